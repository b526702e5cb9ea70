//! A job graph as text, the same way for every operator: one line each, inputs indented below, then
//! one line a state table.
//!
//! Columns are shown by name; a name that its input has twice is followed by `#position`. The text
//! is pinned by the planner's snapshot tests.

mod expr;
mod stream;
mod text;

use std::collections::HashSet;
use std::fmt::Write;

use arrow::compute::SortOptions;
use arrow::datatypes::Schema;
use millrace_common::RelationId;
use millrace_common::access::AccessClass;
use millrace_graph::state::ROWS_COLUMN;
use millrace_graph::{
    Aggregate, EdgeKind, EventTimeBuffer, JobGraph, Join, JoinSide, Lookup, Node, Operator, Role,
    StateTable, TopN, TopNState, ValueTable, Window, WindowState,
};
use millrace_rpc::catalog::RowStorage;

use self::text::{
    aggregate, column, duration, expand, hop, join, list, lookup, order_list, project, text, top_n,
    unnest, values, window,
};
use crate::bind::names::without_marks;

pub use expr::expr_text;
pub use stream::explain_stream;

/// One line an operator, inputs indented below; then the state tables. `names` gives the name of a
/// relation.
pub fn explain_graph(
    graph: &JobGraph,
    names: &dyn Fn(RelationId) -> Option<String>,
) -> Vec<String> {
    let keys = vec![String::new(); graph.tables.len()];
    let mut out = Explain { graph, names, lines: vec![], keys, shown: HashSet::new() };
    if let Some((root, fragment)) = graph.fragments.iter().enumerate().next_back() {
        out.node(root, fragment.nodes.len().saturating_sub(1), 0);
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
    /// Nodes that have their lines, by fragment.
    shown: HashSet<(usize, usize)>,
}

impl Explain<'_> {
    /// A node and what is below it; what feeds several has its inputs shown once.
    fn node(&mut self, fragment: usize, index: usize, depth: usize) {
        let graph = self.graph;
        let Some(nodes) = graph.fragments.get(fragment).map(|f| &f.nodes) else { return };
        let Some(node) = nodes.get(index) else { return };
        let inputs: Vec<&Schema> =
            node.inputs.iter().filter_map(|&i| nodes.get(i)).map(|n| n.schema.as_ref()).collect();
        let mut line = "  ".repeat(depth);
        line.push_str(&self.operator(node, &inputs));
        if !node.append_only && node.op.role() != Role::Root {
            line.push_str(" ±");
        }
        if !node.marks.is_empty() {
            let columns: Vec<usize> = node.marks.iter().map(|m| m.column).collect();
            let _ = write!(line, " watermark ({})", list(&node.schema, &columns));
        }
        if !self.shown.insert((fragment, index)) {
            self.lines.push(line + " (shown above)");
            return;
        }
        self.lines.push(line);
        for &input in &node.inputs {
            self.node(fragment, input, depth + 1);
        }
        if let Operator::Exchange { fragment: from, output } = node.op
            && let Some(edge) = graph.fragments.get(from).and_then(|f| f.outputs.get(output))
        {
            self.node(from, edge.from, depth + 1);
        }
    }

    #[deny(clippy::wildcard_enum_match_arm)]
    fn operator(&mut self, node: &Node, inputs: &[&Schema]) -> String {
        let empty = Schema::empty();
        let port = |n: usize| inputs.get(n).copied().unwrap_or(&empty);
        let (input, right) = (port(0), port(1));
        match &node.op {
            Operator::Subscribe { relation, .. } => self.leaf("Subscribe", *relation, node),
            Operator::Source { relation, .. } => self.leaf("Source", *relation, node),
            Operator::Exchange { fragment, output } => self.exchange(*fragment, *output),
            Operator::Values { batch } => values(batch),
            Operator::Filter { predicate } => format!("Filter {}", text(predicate, input)),
            Operator::Project { exprs } => project(exprs, input, &node.schema),
            Operator::Union => "Union".into(),
            Operator::Hop { time_column, size_us, slide_us, offset_us } => {
                hop(&column(input, *time_column), *size_us, *slide_us, *offset_us)
            }
            Operator::Repeat { times_column } => {
                format!("Repeat {} times", column(input, *times_column))
            }
            Operator::Unnest { lists, keep_empty } => unnest(lists, *keep_empty, input),
            Operator::Expand(e) => expand(e, input),
            Operator::Aggregate(a) => self.aggregate(a, input),
            Operator::Join(j) => self.join(j, input, right, &node.schema),
            Operator::Stamp { add_us } => {
                format!("Stamp processing time + {}", duration(*add_us))
            }
            Operator::Lookup(l) => self.lookup(l, input, right, &node.schema),
            Operator::Window(w) => self.window(w, input),
            Operator::TopN(t) => self.top_n(t, input),
            Operator::WindowClose(h) => self.hold("Window close", h, input),
            Operator::TemporalUpperBound(h) => self.hold("Expire", h, input),
            Operator::TemporalLowerBound(h) => self.hold("Appear", h, input),
            Operator::Materialize => self.materialize(),
            Operator::Blackhole => "Blackhole".into(),
            Operator::Sink => self.sink(),
        }
    }

    fn hold(&mut self, name: &str, h: &EventTimeBuffer, input: &Schema) -> String {
        let column = column(input, h.column);
        self.note(h.table, format!("({column}, all other columns)"));
        format!("{name} by {column}")
    }

    fn leaf(&self, kind: &str, relation: RelationId, node: &Node) -> String {
        let name = (self.names)(relation).unwrap_or_else(|| format!("relation {relation}"));
        let all: Vec<usize> = (0..node.schema.fields().len()).collect();
        format!("{kind} {name} ({})", list(&node.schema, &all))
    }

    fn exchange(&self, fragment: usize, output: usize) -> String {
        let Some(producer) = self.graph.fragments.get(fragment) else {
            return format!("Exchange from fragment {fragment}");
        };
        let edge = producer.outputs.get(output);
        let how = match edge.and_then(|e| Some((&e.carries, producer.nodes.get(e.from)?))) {
            Some((EdgeKind::Rows { hash }, from)) if !hash.is_empty() => {
                format!("hash ({})", list(&from.schema, hash))
            }
            Some((EdgeKind::Rows { .. }, _)) | None => "to one task".into(),
        };
        let which = if producer.outputs.len() > 1 { format!(".{output}") } else { String::new() };
        let tasks = if producer.singleton { ", one task" } else { "" };
        format!("Exchange {how} from fragment {fragment}{which}{tasks}")
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
        let line = aggregate(a, input);
        let mut tables = vec![a.table];
        for c in &a.calls {
            if let (Some(ValueTable { table, descending }), Some(arg)) = (c.state, c.arg) {
                let direction = if descending { " desc" } else { "" };
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
        let line = join(j, [left, right], output);
        for (side, input) in [(&j.left, left), (&j.right, right)] {
            self.side(side, if j.null_aware { &[] } else { &side.keys }, input);
        }
        line + &vnode(left, &j.left.vnode, &j.left.keys)
            + &state(&[j.left.state.table, j.right.state.table])
    }

    fn lookup(&mut self, l: &Lookup, left: &Schema, right: &Schema, output: &Schema) -> String {
        let keys: [&[usize]; 2] = [&l.left_keys, &l.right.keys];
        let line = lookup(l.outer, keys, l.residual.as_ref(), [left, right], output);
        self.side(&l.right, &l.right.keys, right);
        let mut tables = vec![l.right.state.table];
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
        columns.extend(&side.state.unique_key);
        let mut key = list(input, &columns);
        match side.state.storage {
            RowStorage::Keyed => {}
            RowStorage::Multiset => {
                key.push_str(if key.is_empty() { "all" } else { ", all others" })
            }
            RowStorage::Append => {
                key.push_str(if key.is_empty() { "sequence" } else { ", sequence" })
            }
        }
        self.note(side.state.table, format!("({key})"));
    }

    fn top_n(&mut self, t: &TopN, input: &Schema) -> String {
        let TopNState { table, storage, unique_key, append_only_input } = &t.state;
        let window = if *append_only_input { ", window only" } else { "" };
        self.note(*table, ordered_key(&t.group, &t.order, unique_key, *storage, input));
        top_n(t, input) + window + &vnode(input, &t.vnode, &t.group) + &state(&[*table])
    }

    fn window(&mut self, w: &Window, input: &Schema) -> String {
        let WindowState { table, storage, unique_key, closing } = &w.state;
        let mut line = window(w, input);
        self.note(*table, ordered_key(&w.group, &w.order, unique_key, *storage, input));
        let mut tables = vec![*table];
        if let Some(closing) = closing {
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

/// The key of rows in order within their groups.
fn ordered_key(
    group: &[usize],
    order: &[(usize, SortOptions)],
    unique_key: &[usize],
    storage: RowStorage,
    input: &Schema,
) -> String {
    let mut key: Vec<String> = vec![];
    for columns in [list(input, group), order_list(input, order), list(input, unique_key)] {
        key.extend((!columns.is_empty()).then_some(columns));
    }
    if storage == RowStorage::Multiset {
        key.push("all others".into());
    }
    format!("({})", key.join(", "))
}

/// The vnode columns, where they are not simply the whole key.
fn vnode(schema: &Schema, vnode: &[usize], key: &[usize]) -> String {
    if vnode == key { String::new() } else { format!(" vnode ({})", list(schema, vnode)) }
}

fn state(tables: &[usize]) -> String {
    let numbers: Vec<String> = tables.iter().map(usize::to_string).collect();
    format!(" [state {}]", numbers.join(", "))
}
