//! A job graph as text, the same way for every operator: one line each, inputs indented below, then
//! one line a state table.
//!
//! Columns are shown by name; a name that its input has twice is followed by `#position`. The text
//! is pinned by the planner's snapshot tests.

use std::fmt::Write;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::compute::SortOptions;
use arrow::datatypes::Schema;
use datafusion::physical_expr::expressions::Column;
use millrace_common::RelationId;
use millrace_common::access::AccessClass;
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::expr::ExprRef;
use millrace_functions::expr::replace_columns;
use millrace_functions::framed::Framed;
use millrace_functions::window_call::RankFunction;
use millrace_functions::window_call::WindowCall;
use millrace_functions::window_call::follows_frame;
use millrace_graph::pair_schema;
use millrace_graph::state::ROWS_COLUMN;
use millrace_graph::{
    AggCall, Aggregate, Expand, FragmentOutput, GroupingSet, Hold, JobGraph, Join, JoinKind,
    JoinSide, Lookup, Node, Operator, StateTable, TopN, Window,
};
use millrace_rpc::catalog::RowStorage;

use crate::bind::names::without_marks;
use crate::explain_expr::expr_text;

/// More constant rows than this are only counted.
const SHOWN_ROWS: usize = 4;

/// One line an operator, inputs indented below; then the state tables. `names` gives the name of a
/// relation.
pub fn explain_graph(
    graph: &JobGraph,
    names: &dyn Fn(RelationId) -> Option<String>,
) -> Vec<String> {
    let mut out =
        Explain { graph, names, lines: vec![], keys: vec![String::new(); graph.tables.len()] };
    if let Some(root) = graph.fragments.len().checked_sub(1) {
        out.fragment(root, 0);
    }
    out.tables();
    out.lines.iter().map(|line| without_marks(line)).collect()
}

struct Explain<'a> {
    graph: &'a JobGraph,
    names: &'a dyn Fn(RelationId) -> Option<String>,
    lines: Vec<String>,
    /// What the key of every state table is, collected from the operators.
    keys: Vec<String>,
}

impl Explain<'_> {
    fn fragment(&mut self, index: usize, depth: usize) {
        let graph = self.graph;
        let Some(fragment) = graph.fragments.get(index) else { return };
        if let Some(root) = fragment.nodes.len().checked_sub(1) {
            self.node(&fragment.nodes, root, depth);
        }
    }

    fn node(&mut self, nodes: &[Node], index: usize, depth: usize) {
        let Some(node) = nodes.get(index) else { return };
        let inputs: Vec<&Schema> =
            node.inputs.iter().filter_map(|&i| nodes.get(i)).map(|n| n.schema.as_ref()).collect();
        let mut line = "  ".repeat(depth);
        line.push_str(&self.operator(node, &inputs));
        if !node.append_only && !is_root(&node.op) {
            line.push_str(" ±");
        }
        if !node.marks.is_empty() {
            let columns: Vec<usize> = node.marks.iter().map(|m| m.column).collect();
            let _ = write!(line, " watermark ({})", list(&node.schema, &columns));
        }
        self.lines.push(line);
        for &input in &node.inputs {
            self.node(nodes, input, depth + 1);
        }
        if let Operator::Exchange { fragment } = node.op {
            self.fragment(fragment, depth + 1);
        }
    }

    fn operator(&mut self, node: &Node, inputs: &[&Schema]) -> String {
        let first = inputs.first().copied();
        match (&node.op, first) {
            (Operator::Subscribe { relation, .. }, _) => self.leaf("Subscribe", *relation, node),
            (Operator::Source { relation, .. }, _) => self.leaf("Source", *relation, node),
            (Operator::Exchange { fragment }, _) => self.exchange(*fragment),
            (Operator::Values { batch }, _) => values(batch),
            (Operator::Filter { predicate }, Some(input)) => {
                format!("Filter {}", text(predicate, input))
            }
            (Operator::Project { exprs }, Some(input)) => project(exprs, input, &node.schema),
            (Operator::Union, _) => "Union".into(),
            (Operator::Hop { time_column, size_us, slide_us, offset_us }, Some(input)) => {
                hop(&column(input, *time_column), *size_us, *slide_us, *offset_us)
            }
            (Operator::Repeat { times_column }, Some(input)) => {
                format!("Repeat {} times", column(input, *times_column))
            }
            (Operator::Unnest { lists, keep_empty }, Some(input)) => {
                let lists: Vec<String> = lists.iter().map(|&c| column(input, c)).collect();
                let kept = if *keep_empty { " keeping rows without elements" } else { "" };
                format!("Unnest {}{kept}", lists.join(", "))
            }
            (Operator::Expand(e), Some(input)) => expand(e, input),
            (Operator::Aggregate(a), Some(input)) => self.aggregate(a, input),
            (Operator::Join(j), Some(left)) => {
                self.join(j, left, inputs.get(1).copied().unwrap_or(left), &node.schema)
            }
            (Operator::Stamp { add_us }, _) => {
                format!("Stamp processing time + {}", duration(*add_us))
            }
            (Operator::Lookup(l), Some(left)) => {
                self.lookup(l, left, inputs.get(1).copied().unwrap_or(left), &node.schema)
            }
            (Operator::Window(w), Some(input)) => self.window(w, input),
            (Operator::TopN(t), Some(input)) => self.top_n(t, input),
            (Operator::WindowClose(h), Some(input)) => self.hold("Window close", h, input),
            (Operator::Expire(h), Some(input)) => self.hold("Expire", h, input),
            (Operator::Appear(h), Some(input)) => self.hold("Appear", h, input),
            (Operator::Materialize, _) => self.materialize(),
            (Operator::Blackhole, _) => "Blackhole".into(),
            (Operator::Sink, _) => self.sink(),
            _ => "an operator without its input".into(),
        }
    }

    fn hold(&mut self, name: &str, h: &Hold, input: &Schema) -> String {
        let column = column(input, h.column);
        self.note(h.table, format!("({column}, all other columns)"));
        format!("{name} by {column}")
    }

    fn leaf(&self, kind: &str, relation: RelationId, node: &Node) -> String {
        let name = (self.names)(relation).unwrap_or_else(|| format!("relation {relation}"));
        let all: Vec<usize> = (0..node.schema.fields().len()).collect();
        format!("{kind} {name} ({})", list(&node.schema, &all))
    }

    fn exchange(&self, fragment: usize) -> String {
        let producer = &self.graph.fragments.get(fragment);
        let how = match producer.map(|f| (&f.output, f.nodes.last())) {
            Some((FragmentOutput::Exchange { hash, .. }, Some(root))) if !hash.is_empty() => {
                format!("hash ({})", list(&root.schema, hash))
            }
            _ => "to one task".into(),
        };
        let tasks = if producer.is_some_and(|f| f.singleton) { ", one task" } else { "" };
        format!("Exchange {how} from fragment {fragment}{tasks}")
    }

    fn materialize(&mut self) -> String {
        let layout = &self.graph.output;
        let key = list(&layout.schema, &layout.key);
        self.note(
            0,
            match layout.storage {
                RowStorage::Keyed => format!("({key})"),
                RowStorage::Multiset => "(all columns)".into(),
                RowStorage::Append => "(sequence)".into(),
            },
        );
        let how = match layout.storage {
            RowStorage::Keyed => format!("key ({key})"),
            RowStorage::Multiset => "multiset".into(),
            RowStorage::Append => "append".into(),
        };
        let vnode = match layout.distribution.as_slice() {
            [] => String::new(),
            columns => format!(", vnode ({})", list(&layout.schema, columns)),
        };
        format!("Materialize {how}{vnode}")
    }

    fn sink(&self) -> String {
        let layout = &self.graph.output;
        match (layout.append_only, layout.storage) {
            (true, _) => "Sink append".into(),
            (false, RowStorage::Keyed) => {
                format!("Sink key ({})", list(&layout.schema, &layout.key))
            }
            (false, _) => "Sink multiset".into(),
        }
    }

    fn note(&mut self, table: usize, key: String) {
        if let Some(slot) = self.keys.get_mut(table) {
            *slot = key;
        }
    }

    fn aggregate(&mut self, a: &Aggregate, input: &Schema) -> String {
        let group = list(input, &a.group);
        self.note(a.table, format!("({group})"));
        let mut line = if a.calls.is_empty() { "Distinct".to_owned() } else { "Aggregate".into() };
        if !a.group.is_empty() {
            let _ = write!(line, " by ({group})");
        }
        if !a.calls.is_empty() {
            let calls: Vec<String> = a.calls.iter().map(|c| call(c, input)).collect();
            let _ = write!(line, ": {}", calls.join(", "));
        }
        let mut tables = vec![a.table];
        for c in &a.calls {
            if let (Some(table), Some(arg)) = (c.value_table, c.arg) {
                let direction = if c.value_descending { " desc" } else { "" };
                let comma = if a.group.is_empty() { "" } else { ", " };
                let value = column(input, arg);
                self.note(table, format!("({group}{comma}{value}{direction})"));
                if !tables.contains(&table) {
                    tables.push(table);
                }
            }
        }
        line + &vnode(input, &a.vnode, &a.group) + &state(&tables)
    }

    fn join(&mut self, j: &Join, left: &Schema, right: &Schema, output: &Schema) -> String {
        let kind = match j.kind {
            JoinKind::Inner => "inner",
            JoinKind::LeftOuter => "left outer",
            JoinKind::RightOuter => "right outer",
            JoinKind::FullOuter => "full outer",
            JoinKind::LeftSemi => "left semi",
            JoinKind::RightSemi => "right semi",
            JoinKind::LeftAnti => "left anti",
            JoinKind::RightAnti => "right anti",
            JoinKind::LeftMark => "left mark",
        };
        let mut line = format!("Join {kind}");
        let equals = if j.null_equals_null { " is not distinct from " } else { " = " };
        line.push_str(&on([left, right], [&j.left.keys, &j.right.keys], equals));
        if let Some(residual) = &j.residual {
            let _ = write!(line, " where {}", text(residual, &pair_schema(left, right)));
        }
        if j.null_aware {
            line.push_str(", null aware");
        }
        let all: Vec<usize> = (0..output.fields().len()).collect();
        let _ = write!(line, " → ({})", list(output, &all));
        for (side, input) in [(&j.left, left), (&j.right, right)] {
            self.side(side, if j.null_aware { &[] } else { &side.keys }, input);
        }
        line + &vnode(left, &j.left.vnode, &j.left.keys) + &state(&[j.left.table, j.right.table])
    }

    fn lookup(&mut self, l: &Lookup, left: &Schema, right: &Schema, output: &Schema) -> String {
        let kind = if l.outer { "left outer" } else { "inner" };
        let keys = on([left, right], [&l.left_keys, &l.right.keys], " = ");
        let mut line = format!("Lookup join {kind}{keys} as of processing time");
        if let Some(residual) = &l.residual {
            let _ = write!(line, " where {}", text(residual, &pair_schema(left, right)));
        }
        let all: Vec<usize> = (0..output.fields().len()).collect();
        let _ = write!(line, " → ({})", list(output, &all));
        self.side(&l.right, &l.right.keys, right);
        let mut tables = vec![l.right.table];
        if let Some(m) = &l.matches {
            let mut columns = l.left_keys.clone();
            columns.extend(&m.unique_key);
            let others = if m.identity == RowStorage::Keyed { "" } else { ", all others" };
            self.note(m.table, format!("({}{others}, sequence)", list(left, &columns)));
            tables.push(m.table);
        }
        line + &vnode(left, &l.left_vnode, &l.left_keys) + &state(&tables)
    }

    /// `keys`: what rows are stored under, before what tells them apart.
    fn side(&mut self, side: &JoinSide, keys: &[usize], input: &Schema) {
        let mut columns = keys.to_vec();
        columns.extend(&side.unique_key);
        let mut key = list(input, &columns);
        match side.storage {
            RowStorage::Keyed => {}
            RowStorage::Multiset => {
                key.push_str(if key.is_empty() { "all" } else { ", all others" })
            }
            RowStorage::Append => {
                key.push_str(if key.is_empty() { "sequence" } else { ", sequence" })
            }
        }
        self.note(side.table, format!("({key})"));
    }

    fn top_n(&mut self, t: &TopN, input: &Schema) -> String {
        let rank = match t.rank {
            RankFunction::RowNumber => "row_number",
            RankFunction::Rank => "rank",
            RankFunction::DenseRank => "dense_rank",
        };
        let order = order_list(input, &t.order);
        let mut line = format!("TopN {rank}");
        match (t.offset, t.limit) {
            (0, Some(limit)) => drop(write!(line, " <= {limit}")),
            (0, None) => {}
            (offset, Some(limit)) => {
                let _ = write!(line, " in {}..{}", offset + 1, offset.saturating_add(limit));
            }
            (offset, None) => drop(write!(line, " > {offset}")),
        }
        if !t.group.is_empty() {
            let _ = write!(line, " by ({})", list(input, &t.group));
        }
        if !t.order.is_empty() {
            let _ = write!(line, " order ({order})");
        }
        if t.emit_rank {
            line.push_str(", with rank");
        }
        if t.append_only_input {
            line.push_str(", window only");
        }
        let mut key: Vec<String> = vec![];
        for columns in [list(input, &t.group), order, list(input, &t.unique_key)] {
            key.extend((!columns.is_empty()).then_some(columns));
        }
        if t.storage == RowStorage::Multiset {
            key.push("all others".into());
        }
        self.note(t.table, format!("({})", key.join(", ")));
        line + &vnode(input, &t.vnode, &t.group) + &state(&[t.table])
    }

    fn window(&mut self, w: &Window, input: &Schema) -> String {
        let calls: Vec<String> = w.calls.iter().map(|c| window_call(c, input)).collect();
        let mut line = format!("Window {}", calls.join(", "));
        if !w.group.is_empty() {
            let _ = write!(line, " by ({})", list(input, &w.group));
        }
        let order = order_list(input, &w.order);
        if !w.order.is_empty() {
            let _ = write!(line, " order ({order})");
        }
        let mut key: Vec<String> = vec![];
        for columns in [list(input, &w.group), order, list(input, &w.unique_key)] {
            key.extend((!columns.is_empty()).then_some(columns));
        }
        if w.storage == RowStorage::Multiset {
            key.push("all others".into());
        }
        self.note(w.table, format!("({})", key.join(", ")));
        let mut tables = vec![w.table];
        if let Some(closing) = &w.closing {
            line.push_str(", closed by watermark");
            let columns: Vec<usize> = [closing.column].into_iter().chain(w.group.clone()).collect();
            self.note(closing.table, format!("({})", list(input, &columns)));
            tables.push(closing.table);
        }
        line + &vnode(input, &w.vnode, &w.group) + &state(&tables)
    }

    fn tables(&mut self) {
        let root = self.graph.fragments.last().and_then(|f| f.nodes.last());
        // A sink keeps no rows.
        let unused = usize::from(root.is_some_and(|n| matches!(n.op, Operator::Sink)));
        for (i, t) in self.graph.tables.iter().enumerate().skip(unused) {
            let key = self.keys.get(i).cloned().unwrap_or_default();
            self.lines.push(format!("state {i}: {}", table(t, &key)));
        }
    }
}

/// The equalities of a join.
fn on(inputs: [&Schema; 2], keys: [&Vec<usize>; 2], equals: &str) -> String {
    let pair = |(&l, &r): (&usize, &usize)| column(inputs[0], l) + equals + &column(inputs[1], r);
    let pairs: Vec<String> = keys[0].iter().zip(keys[1]).map(pair).collect();
    if pairs.is_empty() { String::new() } else { format!(" on ({})", pairs.join(", ")) }
}

fn is_root(op: &Operator) -> bool {
    matches!(op, Operator::Materialize | Operator::Blackhole | Operator::Sink)
}

fn table(t: &StateTable, key: &str) -> String {
    let storage = match t.storage {
        RowStorage::Keyed => "keyed",
        RowStorage::Multiset => "multiset",
        RowStorage::Append => "append",
    };
    let class = match t.class {
        AccessClass::PointUpdate => "point update",
        AccessClass::Append => "append",
        AccessClass::RangeRead => "range read",
        AccessClass::Lookup => "lookup",
        AccessClass::Merge => "merge",
    };
    let shown = t.value_schema.fields().iter().filter(|f| f.name() != ROWS_COLUMN).count();
    let plural = if shown == 1 { "" } else { "s" };
    let cleaned = if t.retention.is_some() { ", cleaned by watermark" } else { "" };
    format!("{}, {class}, {storage} {key}, {shown} column{plural}{cleaned}", t.name)
}

/// Names that tell columns apart.
fn column(schema: &Schema, c: usize) -> String {
    let Some(field) = schema.fields().get(c) else { return format!("#{c}") };
    let twice = schema.fields().iter().filter(|f| f.name() == field.name()).count() > 1;
    if twice { format!("{}#{c}", field.name()) } else { field.name().clone() }
}

fn list(schema: &Schema, columns: &[usize]) -> String {
    columns.iter().map(|&c| column(schema, c)).collect::<Vec<_>>().join(", ")
}

fn order_list(schema: &Schema, order: &[(usize, SortOptions)]) -> String {
    let one = |(c, o): &(usize, SortOptions)| {
        let direction = if o.descending { " desc" } else { "" };
        // PostgreSQL's default is NULLS LAST ascending, FIRST descending.
        let nulls = match (o.descending, o.nulls_first) {
            (false, true) => " nulls first",
            (true, false) => " nulls last",
            _ => "",
        };
        format!("{}{direction}{nulls}", column(schema, *c))
    };
    order.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn text(e: &ExprRef, input: &Schema) -> String {
    let named =
        replace_columns(e, |c| Some(Arc::new(Column::new(&column(input, c), c)) as ExprRef));
    expr_text(named.as_ref().unwrap_or(e))
}

fn project(exprs: &[ExprRef], input: &Schema, output: &Schema) -> String {
    let one = |(i, e): (usize, &ExprRef)| {
        let text = text(e, input);
        let name = output.fields().get(i).map_or("", |f| f.name());
        // A computed column may be called by its own text.
        if text == name || expr_text(e) == name { text } else { format!("{text} as {name}") }
    };
    let columns: Vec<String> = exprs.iter().enumerate().map(one).collect();
    format!("Project {}", columns.join(", "))
}

fn call(c: &AggCall, input: &Schema) -> String {
    let name = match c.func {
        AggFunc::Count => "count",
        AggFunc::Sum => "sum",
        AggFunc::Avg => "avg",
        AggFunc::Min => "min",
        AggFunc::Max => "max",
        AggFunc::BoolAnd => "bool_and",
        AggFunc::BoolOr => "bool_or",
        AggFunc::StringAgg => "string_agg",
        AggFunc::ArrayAgg => "array_agg",
        AggFunc::FirstValue => "first_value",
        AggFunc::LastValue => "last_value",
        AggFunc::PercentileCont => "percentile_cont",
        AggFunc::PercentileDisc => "percentile_disc",
        AggFunc::Mode => "mode",
        AggFunc::JsonbObjectAgg => "jsonb_object_agg",
        func => millrace_functions::statistics::name_of(func).unwrap_or("?"),
    };
    let distinct = if c.distinct { "distinct " } else { "" };
    let arg = c.arg.map_or("*".into(), |a| column(input, a));
    let filter = c.filter.map_or(String::new(), |f| format!(" filter ({})", column(input, f)));
    format!("{name}({distinct}{arg}){filter}")
}

fn window_call(c: &WindowCall, input: &Schema) -> String {
    if let Some(framed) = Framed::of(c) {
        return framed_call(&framed, &c.args, input);
    }
    let args: Vec<String> = c.args.iter().map(|e| text(e, input)).collect();
    let distinct = if c.distinct { "distinct " } else { "" };
    let mut call = format!("{}({distinct}{})", c.function, args.join(", "));
    if c.ignore_nulls {
        call.push_str(" ignore nulls");
    }
    if let Some(filter) = &c.filter {
        let _ = write!(call, " filter ({})", text(filter, input));
    }
    if follows_frame(c) {
        let frame = c.frame.to_string().to_lowercase();
        let _ = write!(call, " {frame}");
    }
    call
}

/// A call over a frame of ours, as it was written.
fn framed_call(framed: &Framed, args: &[ExprRef], input: &Schema) -> String {
    let (filter, args) = framed.arguments(args);
    let args: Vec<String> = args.iter().map(|e| text(e, input)).collect();
    let distinct = if framed.distinct { "distinct " } else { "" };
    let mut call = format!("{}({distinct}{})", framed.function, args.join(", "));
    if framed.ignore_nulls {
        call.push_str(" ignore nulls");
    }
    if let Some(filter) = filter {
        let _ = write!(call, " filter ({})", text(filter, input));
    }
    if !["lag", "lead"].contains(&framed.function.as_str()) {
        let _ = write!(call, " {}", framed.frame);
    }
    call
}

fn hop(time: &str, size_us: i64, slide_us: i64, offset_us: i64) -> String {
    let mut line = if size_us == slide_us {
        format!("Tumble {time} size {}", duration(size_us))
    } else {
        format!("Hop {time} size {} slide {}", duration(size_us), duration(slide_us))
    };
    if offset_us != 0 {
        let _ = write!(line, " offset {}", duration(offset_us));
    }
    line
}

fn expand(e: &Expand, input: &Schema) -> String {
    let set = |s: &GroupingSet| {
        let kept = e.columns.iter().zip(&s.keep).filter(|(_, keep)| **keep).map(|(c, _)| *c);
        format!("({})", list(input, &kept.collect::<Vec<_>>()))
    };
    let sets: Vec<String> = e.sets.iter().map(set).collect();
    format!("Expand grouping sets {}", sets.join(", "))
}

fn duration(us: i64) -> String {
    match us {
        us if us % 1_000_000 == 0 => format!("{}s", us / 1_000_000),
        us if us % 1_000 == 0 => format!("{}ms", us / 1_000),
        us => format!("{us}us"),
    }
}

fn values(batch: &RecordBatch) -> String {
    if batch.num_rows() > SHOWN_ROWS {
        return format!("Values {} rows", batch.num_rows());
    }
    let cell = |c: usize, row: usize| {
        arrow::util::display::array_value_to_string(batch.column(c), row).unwrap_or_default()
    };
    let row = |row: usize| {
        let cells: Vec<String> = (0..batch.num_columns()).map(|c| cell(c, row)).collect();
        format!("({})", cells.join(", "))
    };
    let rows: Vec<String> = (0..batch.num_rows()).map(row).collect();
    format!("Values {}", if rows.is_empty() { "no rows".into() } else { rows.join(", ") })
}

/// The vnode columns, where they are not simply the whole key.
fn vnode(schema: &Schema, vnode: &[usize], key: &[usize]) -> String {
    if vnode == key { String::new() } else { format!(" vnode ({})", list(schema, vnode)) }
}

fn state(tables: &[usize]) -> String {
    let numbers: Vec<String> = tables.iter().map(usize::to_string).collect();
    format!(" [state {}]", numbers.join(", "))
}
