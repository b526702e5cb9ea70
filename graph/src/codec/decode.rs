//! Messages → graph. Every position is checked against what it points into, so that a damaged graph
//! is an error here and not a panic in an operator.

use std::sync::Arc;

use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Schema, SchemaRef, TimeUnit};
use datafusion::logical_expr::{WindowFrame, WindowFrameBound, WindowFrameUnits};
use millrace_common::RelationId;
use millrace_common::access::{AccessClass, RetentionBy};
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::expr::as_literal;
use millrace_functions::versions;
use millrace_functions::window_call::RankFunction;
use millrace_functions::window_call::WindowCall;
use millrace_rpc::catalog::RowStorage;

use crate::codec::expr::decode_expr;
use crate::codec::ipc::{decode_batch, decode_schema};
use crate::codec::names::{EDGE_ROWS, Numbered};
use crate::codec::{CodecError, proto};
use crate::{
    AggCall, Aggregate, Closing, DerivedWatermark, Edge, EdgeKind, EventTimeBuffer, Expand,
    Fragment, GroupingSet, JobGraph, Join, JoinKind, JoinSide, Lookup, MarkStep, Matches, Node,
    Operator, RelationLayout, Retention, SideState, StateTable, TopN, TopNState, ValueTable,
    WatermarkTerm, Window, WindowState,
};
use crate::{check_edges, pair_schema};

type Result<T> = std::result::Result<T, CodecError>;

fn damaged(what: impl Into<String>) -> CodecError {
    CodecError::Damaged(what.into())
}

/// A position below `bound`.
fn position(p: u32, bound: usize, what: &str) -> Result<usize> {
    let p = p as usize;
    if p < bound { Ok(p) } else { Err(damaged(format!("{what} {p} of {bound}"))) }
}

fn positions(list: &[u32], bound: usize, what: &str) -> Result<Vec<usize>> {
    list.iter().map(|&p| position(p, bound, what)).collect()
}

fn columns(list: &[u32], schema: &SchemaRef) -> Result<Vec<usize>> {
    positions(list, schema.fields().len(), "column")
}

pub fn graph(g: &proto::JobGraph) -> Result<JobGraph> {
    let output = g.output.as_ref().ok_or_else(|| damaged("no layout"))?;
    let tables = g.tables.iter().map(table).collect::<Result<Vec<_>>>()?;
    if tables.is_empty() || g.fragments.is_empty() {
        return Err(damaged("no tables or fragments"));
    }
    let sizes = Sizes { tables: tables.len(), fragments: g.fragments.len() };
    let fragments = g.fragments.iter().map(|f| fragment(f, sizes)).collect::<Result<Vec<_>>>()?;
    check_edges(&fragments).map_err(damaged)?;
    Ok(JobGraph { fragments, tables, output: layout(output)? })
}

/// What positions of tables and fragments are checked against.
#[derive(Clone, Copy)]
struct Sizes {
    tables: usize,
    fragments: usize,
}

impl Sizes {
    fn table(self, t: u32) -> Result<usize> {
        position(t, self.tables, "state table")
    }
}

fn layout(l: &proto::RelationLayout) -> Result<RelationLayout> {
    let schema = decode_schema(&l.schema)?;
    Ok(RelationLayout {
        storage: RowStorage::from_number(l.storage)?,
        key: columns(&l.key, &schema)?,
        distribution: columns(&l.distribution, &schema)?,
        append_only: l.append_only,
        marks: marks(&l.marks, &schema)?,
        schema,
    })
}

fn table(t: &proto::StateTable) -> Result<StateTable> {
    let value_schema = decode_schema(&t.value_schema)?;
    Ok(StateTable {
        name: t.name.clone(),
        class: AccessClass::from_number(t.class)?,
        storage: RowStorage::from_number(t.storage)?,
        relation: t.relation,
        retention: t.retention.as_ref().map(|r| retention(r, &value_schema)).transpose()?,
        value_schema,
    })
}

fn marks(list: &[proto::DerivedWatermark], schema: &SchemaRef) -> Result<Vec<DerivedWatermark>> {
    let one = |m: &proto::DerivedWatermark| {
        Ok(DerivedWatermark { column: timestamp(m.column, schema)?, terms: terms(&m.terms)? })
    };
    list.iter().map(one).collect()
}

fn terms(list: &[proto::WatermarkTerm]) -> Result<Vec<WatermarkTerm>> {
    if list.is_empty() {
        return Err(damaged("a watermark of nothing"));
    }
    let step = |s: &proto::MarkStep| match s.size {
        0 => MarkStep::Add(s.add),
        size => MarkStep::Bin { size: size.max(1), offset: s.offset },
    };
    let one = |t: &proto::WatermarkTerm| WatermarkTerm {
        relation: RelationId(t.relation),
        column: t.column as usize,
        steps: t.steps.iter().map(step).collect(),
    };
    Ok(list.iter().map(one).collect())
}

/// A column that holds instants.
fn timestamp(column: u32, schema: &SchemaRef) -> Result<usize> {
    let column = position(column, schema.fields().len(), "column")?;
    match schema.field(column).data_type() {
        DataType::Timestamp(TimeUnit::Microsecond, _) => Ok(column),
        other => Err(damaged(format!("a time column of type {other}"))),
    }
}

fn retention(r: &proto::Retention, values: &SchemaRef) -> Result<Retention> {
    let by = match r.value {
        None => RetentionBy::Key,
        Some(column) => RetentionBy::Value(timestamp(column, values)?),
    };
    Ok(Retention { by, terms: terms(&r.terms)? })
}

fn hold(h: &proto::EventTimeBuffer, input: &SchemaRef, sizes: Sizes) -> Result<EventTimeBuffer> {
    Ok(EventTimeBuffer {
        column: timestamp(h.column, input)?,
        vnode: columns(&h.vnode, input)?,
        table: sizes.table(h.table)?,
    })
}

fn fragment(f: &proto::Fragment, sizes: Sizes) -> Result<Fragment> {
    let mut nodes: Vec<Node> = Vec::with_capacity(f.nodes.len());
    for n in &f.nodes {
        let next = node(n, &nodes, sizes)?;
        nodes.push(next);
    }
    let outputs = f.outputs.iter().map(|e| edge(e, &nodes, sizes)).collect::<Result<_>>()?;
    Ok(Fragment { nodes, singleton: f.singleton, outputs })
}

fn edge(e: &proto::Edge, nodes: &[Node], sizes: Sizes) -> Result<Edge> {
    let from = position(e.from, nodes.len(), "node")?;
    let carries = match e.kind {
        EDGE_ROWS => EdgeKind::Rows { hash: columns(&e.hash, &nodes[from].schema)? },
        kind => return Err(CodecError::EdgeKind(kind)),
    };
    Ok(Edge { from, to: position(e.to, sizes.fragments, "fragment")?, carries })
}

fn node(n: &proto::Node, before: &[Node], sizes: Sizes) -> Result<Node> {
    let inputs = positions(&n.inputs, before.len(), "input")?;
    let schemas: Vec<&SchemaRef> = inputs.iter().map(|&i| &before[i].schema).collect();
    let op = n.op.as_ref().ok_or_else(|| damaged("a node without an operator"))?;
    let op = operator(op, &schemas, sizes)?;
    let schema = decode_schema(&n.schema)?;
    let marks = marks(&n.marks, &schema)?;
    Ok(Node { op, inputs, schema, append_only: n.append_only, marks })
}

#[deny(clippy::wildcard_enum_match_arm)]
fn operator(op: &proto::Operator, inputs: &[&SchemaRef], sizes: Sizes) -> Result<Operator> {
    use proto::Operator as In;
    let wrong = || damaged("an operator with the wrong number of inputs");
    let none = || if inputs.is_empty() { Ok(()) } else { Err(wrong()) };
    let one = || if let [input] = inputs { Ok(*input) } else { Err(wrong()) };
    let two = || if let [left, right] = inputs { Ok((*left, *right)) } else { Err(wrong()) };
    let leaf = |l: &proto::Leaf| {
        none()?;
        Ok((RelationId(l.relation), l.columns.iter().map(|&c| c as usize).collect()))
    };
    let source = |op| none().map(|()| op);
    let unary = |op| one().map(|_| op);
    Ok(match op {
        In::Subscribe(l) => {
            let (relation, columns) = leaf(l)?;
            Operator::Subscribe { relation, columns }
        }
        In::Source(l) => {
            let (relation, columns) = leaf(l)?;
            Operator::Source { relation, columns }
        }
        In::Exchange(e) => source(Operator::Exchange {
            fragment: position(e.fragment, sizes.fragments, "fragment")?,
            output: e.output as usize,
        })?,
        In::Values(bytes) => source(Operator::Values { batch: decode_batch(bytes)? })?,
        In::Filter(e) => match e.exprs.as_slice() {
            [predicate] => Operator::Filter { predicate: decode_expr(predicate, one()?)? },
            _ => return Err(damaged("a filter without one predicate")),
        },
        In::Project(e) => {
            let input = one()?;
            let exprs = e.exprs.iter().map(|e| decode_expr(e, input)).collect::<Result<_>>()?;
            Operator::Project { exprs }
        }
        In::Union(_) => Operator::Union,
        In::Hop(h) => Operator::Hop {
            time_column: position(h.time_column, one()?.fields().len(), "column")?,
            size_us: h.size_us,
            slide_us: h.slide_us,
            offset_us: h.offset_us,
        },
        In::Repeat(c) => {
            Operator::Repeat { times_column: position(*c, one()?.fields().len(), "column")? }
        }
        In::Unnest(u) => unnest(u, one()?)?,
        In::Expand(e) => Operator::Expand(expand(e, one()?)?),
        In::Aggregate(a) => Operator::Aggregate(aggregate(a, one()?, sizes)?),
        In::Join(j) => {
            let (left, right) = two()?;
            Operator::Join(join(j, left, right, sizes)?)
        }
        In::Stamp(add_us) => unary(Operator::Stamp { add_us: *add_us })?,
        In::Lookup(l) => {
            let (left, right) = two()?;
            Operator::Lookup(lookup(l, left, right, sizes)?)
        }
        In::Window(w) => Operator::Window(window(w, one()?, sizes)?),
        In::TopN(t) => Operator::TopN(top_n(t, one()?, sizes)?),
        In::WindowClose(h) => Operator::WindowClose(hold(h, one()?, sizes)?),
        In::TemporalUpperBound(h) => Operator::TemporalUpperBound(hold(h, one()?, sizes)?),
        In::TemporalLowerBound(h) => Operator::TemporalLowerBound(hold(h, one()?, sizes)?),
        In::Materialize(_) => unary(Operator::Materialize)?,
        In::Blackhole(_) => unary(Operator::Blackhole)?,
        In::Sink(_) => unary(Operator::Sink)?,
    })
}

fn unnest(u: &proto::Unnest, input: &SchemaRef) -> Result<Operator> {
    let lists = columns(&u.lists, input)?;
    if lists.iter().any(|&c| !matches!(input.field(c).data_type(), DataType::List(_))) {
        return Err(damaged("an unnest of what is no list"));
    }
    Ok(Operator::Unnest { lists, keep_empty: u.keep_empty })
}

fn expand(e: &proto::Expand, input: &SchemaRef) -> Result<Expand> {
    if e.sets.iter().any(|s| s.keep.len() != e.columns.len()) {
        return Err(damaged("a grouping set over other columns"));
    }
    let set = |s: &proto::GroupingSet| GroupingSet { keep: s.keep.clone(), id: s.id };
    Ok(Expand { columns: columns(&e.columns, input)?, sets: e.sets.iter().map(set).collect() })
}

fn aggregate(a: &proto::Aggregate, input: &SchemaRef, sizes: Sizes) -> Result<Aggregate> {
    Ok(Aggregate {
        group: columns(&a.group, input)?,
        vnode: columns(&a.vnode, input)?,
        calls: a.calls.iter().map(|c| call(c, input, sizes)).collect::<Result<_>>()?,
        table: sizes.table(a.table)?,
    })
}

fn call(c: &proto::AggCall, input: &SchemaRef, sizes: Sizes) -> Result<AggCall> {
    let column = |c: u32| position(c, input.fields().len(), "column");
    let value_table = c.value_table.map(|t| -> Result<ValueTable> {
        Ok(ValueTable { table: sizes.table(t)?, descending: c.value_descending })
    });
    Ok(AggCall {
        func: AggFunc::from_number(c.func)?,
        arg: c.arg.map(column).transpose()?,
        distinct: c.distinct,
        filter: c.filter.map(column).transpose()?,
        output_type: data_type(&c.output_type)?,
        state: value_table.transpose()?,
    })
}

fn data_type(bytes: &[u8]) -> Result<DataType> {
    let schema = decode_schema(bytes)?;
    let field = schema.fields().first().ok_or_else(|| damaged("no output type"))?;
    Ok(field.data_type().clone())
}

fn side(s: Option<&proto::JoinSide>, input: &SchemaRef, sizes: Sizes) -> Result<JoinSide> {
    let s = s.ok_or_else(|| damaged("a join without a side"))?;
    Ok(JoinSide {
        keys: columns(&s.keys, input)?,
        vnode: columns(&s.vnode, input)?,
        state: SideState {
            table: sizes.table(s.table)?,
            storage: RowStorage::from_number(s.storage)?,
            unique_key: columns(&s.unique_key, input)?,
            unique_per_key: s.unique_per_key,
        },
    })
}

fn join(j: &proto::Join, left: &SchemaRef, right: &SchemaRef, sizes: Sizes) -> Result<Join> {
    let pair = Arc::new(pair_schema(left, right));
    // The mark column lies behind the left ones, so the pair's width bounds every kind's output.
    let bound = pair.fields().len().max(left.fields().len() + 1);
    Ok(Join {
        kind: JoinKind::from_number(j.kind)?,
        left: side(j.left.as_ref(), left, sizes)?,
        right: side(j.right.as_ref(), right, sizes)?,
        residual: j.residual.as_ref().map(|e| decode_expr(e, &pair)).transpose()?,
        null_aware: j.null_aware,
        null_equals_null: j.null_equals_null,
        output: positions(&j.output, bound, "join column")?,
    })
}

fn lookup(l: &proto::Lookup, left: &SchemaRef, right: &SchemaRef, sizes: Sizes) -> Result<Lookup> {
    let pair = Arc::new(pair_schema(left, right));
    let matches = l.matches.as_ref().map(|m| -> Result<Matches> {
        Ok(Matches {
            table: sizes.table(m.table)?,
            identity: RowStorage::from_number(m.identity)?,
            unique_key: columns(&m.unique_key, left)?,
        })
    });
    let found = Lookup {
        outer: l.outer,
        left_keys: columns(&l.left_keys, left)?,
        left_vnode: columns(&l.left_vnode, left)?,
        right: side(l.right.as_ref(), right, sizes)?,
        residual: l.residual.as_ref().map(|e| decode_expr(e, &pair)).transpose()?,
        output: columns(&l.output, &pair)?,
        matches: matches.transpose()?,
    };
    if found.left_keys.is_empty() || found.left_keys.len() != found.right.keys.len() {
        return Err(damaged("a lookup without keys on both sides"));
    }
    Ok(found)
}

fn order(o: &proto::Order, input: &SchemaRef) -> Result<(usize, SortOptions)> {
    let column = position(o.column, input.fields().len(), "column")?;
    Ok((column, SortOptions { descending: o.descending, nulls_first: o.nulls_first }))
}

fn window(w: &proto::Window, input: &SchemaRef, sizes: Sizes) -> Result<Window> {
    let closing = w.closing.as_ref().map(|c| -> Result<Closing> {
        let (column, table) = (timestamp(c.column, input)?, sizes.table(c.table)?);
        Ok(Closing { column, gap: c.gap, table })
    });
    Ok(Window {
        group: columns(&w.group, input)?,
        vnode: columns(&w.vnode, input)?,
        order: w.order.iter().map(|o| order(o, input)).collect::<Result<_>>()?,
        calls: w.calls.iter().map(|c| window_call(c, input)).collect::<Result<_>>()?,
        state: WindowState {
            table: sizes.table(w.table)?,
            storage: RowStorage::from_number(w.storage)?,
            unique_key: columns(&w.unique_key, input)?,
            closing: closing.transpose()?,
        },
    })
}

fn window_call(c: &proto::WindowCall, input: &SchemaRef) -> Result<WindowCall> {
    let units = WindowFrameUnits::from_number(c.units)?;
    let (start, end) = (bound(c.start.as_ref())?, bound(c.end.as_ref())?);
    if c.version != versions::newest(&c.function) {
        let (name, version) = (c.function.clone(), c.version);
        return Err(CodecError::UnknownFunction { name, version });
    }
    Ok(WindowCall {
        function: c.function.clone(),
        aggregate: c.aggregate,
        args: c.args.iter().map(|e| decode_expr(e, input)).collect::<Result<_>>()?,
        filter: c.filter.as_ref().map(|e| decode_expr(e, input)).transpose()?,
        distinct: c.distinct,
        ignore_nulls: c.ignore_nulls,
        frame: WindowFrame::new_bounds(units, start, end),
        numbering: c.numbering.map(RankFunction::from_number).transpose()?,
        output_type: data_type(&c.output_type)?,
    })
}

fn bound(b: Option<&proto::Bound>) -> Result<WindowFrameBound> {
    let b = b.ok_or_else(|| damaged("a window frame without an end"))?;
    let offset = b.offset.as_ref().map(|e| decode_expr(e, &Schema::empty())).transpose()?;
    let offset = offset.as_ref().and_then(as_literal).cloned();
    match (b.kind, offset) {
        (1, Some(offset)) => Ok(WindowFrameBound::Preceding(offset)),
        (2, None) => Ok(WindowFrameBound::CurrentRow),
        (3, Some(offset)) => Ok(WindowFrameBound::Following(offset)),
        (kind, _) => Err(damaged(format!("a window frame's end of kind {kind}"))),
    }
}

fn top_n(t: &proto::TopN, input: &SchemaRef, sizes: Sizes) -> Result<TopN> {
    Ok(TopN {
        group: columns(&t.group, input)?,
        vnode: columns(&t.vnode, input)?,
        order: t.order.iter().map(|o| order(o, input)).collect::<Result<_>>()?,
        offset: t.offset,
        limit: t.limit,
        rank: RankFunction::from_number(t.rank)?,
        emit_rank: t.emit_rank,
        state: TopNState {
            table: sizes.table(t.table)?,
            storage: RowStorage::from_number(t.storage)?,
            unique_key: columns(&t.unique_key, input)?,
            append_only_input: t.append_only_input,
        },
    })
}
