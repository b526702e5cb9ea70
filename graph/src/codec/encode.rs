//! Graph → messages.

use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Field, Schema};
use datafusion::logical_expr::WindowFrameBound;
use millrace_common::access::RetentionBy;
use millrace_functions::expr::literal;
use millrace_functions::versions;
use millrace_functions::window_call::WindowCall;

use crate::codec::expr::encode_expr;
use crate::codec::ipc::{encode_batch, encode_schema};
use crate::codec::names::{EDGE_ROWS, Numbered};
use crate::codec::{CodecError, proto};
use crate::{
    AggCall, Aggregate, DerivedWatermark, Edge, EdgeKind, EventTimeBuffer, Expand, Fragment,
    GroupingSet, JobGraph, Join, JoinSide, Lookup, MarkStep, Node, Operator, RelationLayout,
    Retention, StateTable, TopN, WatermarkTerm, Window,
};

type Result<T> = std::result::Result<T, CodecError>;

pub fn graph(g: &JobGraph) -> Result<proto::JobGraph> {
    Ok(proto::JobGraph {
        fragments: g.fragments.iter().map(fragment).collect::<Result<_>>()?,
        tables: g.tables.iter().map(table).collect::<Result<_>>()?,
        output: Some(layout(&g.output)?),
    })
}

fn position(p: usize) -> Result<u32> {
    u32::try_from(p).map_err(|_| CodecError::Encode(format!("position {p}")))
}

fn positions(list: &[usize]) -> Result<Vec<u32>> {
    list.iter().map(|&p| position(p)).collect()
}

fn optional(p: Option<usize>) -> Result<Option<u32>> {
    p.map(position).transpose()
}

fn layout(l: &RelationLayout) -> Result<proto::RelationLayout> {
    Ok(proto::RelationLayout {
        schema: encode_schema(&l.schema)?,
        storage: l.storage.number()?,
        key: positions(&l.key)?,
        distribution: positions(&l.distribution)?,
        append_only: l.append_only,
        marks: l.marks.iter().map(mark).collect::<Result<_>>()?,
    })
}

fn table(t: &StateTable) -> Result<proto::StateTable> {
    Ok(proto::StateTable {
        name: t.name.clone(),
        class: t.class.number()?,
        value_schema: encode_schema(&t.value_schema)?,
        storage: t.storage.number()?,
        relation: t.relation,
        retention: t.retention.as_ref().map(retention).transpose()?,
    })
}

fn mark(m: &DerivedWatermark) -> Result<proto::DerivedWatermark> {
    Ok(proto::DerivedWatermark { column: position(m.column)?, terms: terms(&m.terms)? })
}

fn terms(list: &[WatermarkTerm]) -> Result<Vec<proto::WatermarkTerm>> {
    let one = |t: &WatermarkTerm| {
        let steps = t.steps.iter().map(|step| match *step {
            MarkStep::Add(add) => proto::MarkStep { add, size: 0, offset: 0 },
            MarkStep::Bin { size, offset } => proto::MarkStep { add: 0, size, offset },
        });
        Ok(proto::WatermarkTerm {
            relation: t.relation.0,
            column: position(t.column)?,
            steps: steps.collect(),
        })
    };
    list.iter().map(one).collect()
}

fn retention(r: &Retention) -> Result<proto::Retention> {
    let value = match r.by {
        RetentionBy::Key => None,
        RetentionBy::Value(column) => Some(position(column)?),
    };
    Ok(proto::Retention { value, terms: terms(&r.terms)? })
}

fn hold(h: &EventTimeBuffer) -> Result<proto::EventTimeBuffer> {
    Ok(proto::EventTimeBuffer {
        column: position(h.column)?,
        vnode: positions(&h.vnode)?,
        table: position(h.table)?,
    })
}

fn fragment(f: &Fragment) -> Result<proto::Fragment> {
    let nodes = f.nodes.iter().map(node).collect::<Result<_>>()?;
    let outputs = f.outputs.iter().map(edge).collect::<Result<_>>()?;
    Ok(proto::Fragment { nodes, singleton: f.singleton, outputs })
}

fn edge(e: &Edge) -> Result<proto::Edge> {
    let (kind, hash) = match &e.carries {
        EdgeKind::Rows { hash } => (EDGE_ROWS, positions(hash)?),
    };
    Ok(proto::Edge { to: position(e.to)?, kind, from: position(e.from)?, hash })
}

fn node(n: &Node) -> Result<proto::Node> {
    Ok(proto::Node {
        inputs: positions(&n.inputs)?,
        schema: encode_schema(&n.schema)?,
        append_only: n.append_only,
        op: Some(operator(&n.op)?),
        marks: n.marks.iter().map(mark).collect::<Result<_>>()?,
    })
}

#[deny(clippy::wildcard_enum_match_arm)]
fn operator(op: &Operator) -> Result<proto::Operator> {
    use proto::Operator as Out;
    let nothing = proto::Nothing {};
    Ok(match op {
        Operator::Subscribe { relation, columns } => {
            Out::Subscribe(proto::Leaf { relation: relation.0, columns: positions(columns)? })
        }
        Operator::Source { relation, columns } => {
            Out::Source(proto::Leaf { relation: relation.0, columns: positions(columns)? })
        }
        Operator::Exchange { fragment, output } => Out::Exchange(proto::EdgeRef {
            fragment: position(*fragment)?,
            output: position(*output)?,
        }),
        Operator::Values { batch } => Out::Values(encode_batch(batch)?),
        Operator::Filter { predicate } => {
            Out::Filter(proto::Expressions { exprs: vec![encode_expr(predicate)?] })
        }
        Operator::Project { exprs } => Out::Project(proto::Expressions {
            exprs: exprs.iter().map(encode_expr).collect::<Result<_>>()?,
        }),
        Operator::Union => Out::Union(nothing),
        Operator::Hop { time_column, size_us, slide_us, offset_us } => Out::Hop(proto::Hop {
            time_column: position(*time_column)?,
            size_us: *size_us,
            slide_us: *slide_us,
            offset_us: *offset_us,
        }),
        Operator::Repeat { times_column } => Out::Repeat(position(*times_column)?),
        Operator::Unnest { lists, keep_empty } => {
            Out::Unnest(proto::Unnest { lists: positions(lists)?, keep_empty: *keep_empty })
        }
        Operator::Expand(e) => Out::Expand(expand(e)?),
        Operator::Aggregate(a) => Out::Aggregate(aggregate(a)?),
        Operator::Join(j) => Out::Join(join(j)?),
        Operator::Stamp { add_us } => Out::Stamp(*add_us),
        Operator::Lookup(l) => Out::Lookup(lookup(l)?),
        Operator::TopN(t) => Out::TopN(top_n(t)?),
        Operator::Window(w) => Out::Window(window(w)?),
        Operator::WindowClose(h) => Out::WindowClose(hold(h)?),
        Operator::TemporalUpperBound(h) => Out::TemporalUpperBound(hold(h)?),
        Operator::TemporalLowerBound(h) => Out::TemporalLowerBound(hold(h)?),
        Operator::Materialize => Out::Materialize(nothing),
        Operator::Blackhole => Out::Blackhole(nothing),
        Operator::Sink => Out::Sink(nothing),
    })
}

fn expand(e: &Expand) -> Result<proto::Expand> {
    let set = |s: &GroupingSet| proto::GroupingSet { keep: s.keep.clone(), id: s.id };
    Ok(proto::Expand { columns: positions(&e.columns)?, sets: e.sets.iter().map(set).collect() })
}

fn aggregate(a: &Aggregate) -> Result<proto::Aggregate> {
    Ok(proto::Aggregate {
        group: positions(&a.group)?,
        vnode: positions(&a.vnode)?,
        calls: a.calls.iter().map(call).collect::<Result<_>>()?,
        table: position(a.table)?,
    })
}

fn call(c: &AggCall) -> Result<proto::AggCall> {
    Ok(proto::AggCall {
        func: c.func.number()?,
        arg: optional(c.arg)?,
        distinct: c.distinct,
        filter: optional(c.filter)?,
        output_type: data_type(&c.output_type)?,
        value_table: optional(c.state.map(|v| v.table))?,
        value_descending: c.state.is_some_and(|v| v.descending),
    })
}

fn data_type(t: &DataType) -> Result<prost::bytes::Bytes> {
    encode_schema(&Schema::new(vec![Field::new("", t.clone(), true)]))
}

fn side(s: &JoinSide) -> Result<proto::JoinSide> {
    Ok(proto::JoinSide {
        keys: positions(&s.keys)?,
        vnode: positions(&s.vnode)?,
        table: position(s.state.table)?,
        storage: s.state.storage.number()?,
        unique_key: positions(&s.state.unique_key)?,
        unique_per_key: s.state.unique_per_key,
    })
}

fn join(j: &Join) -> Result<proto::Join> {
    Ok(proto::Join {
        kind: j.kind.number()?,
        left: Some(side(&j.left)?),
        right: Some(side(&j.right)?),
        residual: j.residual.as_ref().map(encode_expr).transpose()?,
        null_aware: j.null_aware,
        null_equals_null: j.null_equals_null,
        output: positions(&j.output)?,
    })
}

fn lookup(l: &Lookup) -> Result<proto::Lookup> {
    let matches = l.matches.as_ref().map(|m| -> Result<proto::Matches> {
        Ok(proto::Matches {
            table: position(m.table)?,
            identity: m.identity.number()?,
            unique_key: positions(&m.unique_key)?,
        })
    });
    Ok(proto::Lookup {
        outer: l.outer,
        left_keys: positions(&l.left_keys)?,
        left_vnode: positions(&l.left_vnode)?,
        right: Some(side(&l.right)?),
        residual: l.residual.as_ref().map(encode_expr).transpose()?,
        output: positions(&l.output)?,
        matches: matches.transpose()?,
    })
}

fn order((column, options): &(usize, SortOptions)) -> Result<proto::Order> {
    Ok(proto::Order {
        column: position(*column)?,
        descending: options.descending,
        nulls_first: options.nulls_first,
    })
}

fn window(w: &Window) -> Result<proto::Window> {
    let closing = w.state.closing.as_ref().map(|c| -> Result<proto::Closing> {
        let (column, table) = (position(c.column)?, position(c.table)?);
        Ok(proto::Closing { column, gap: c.gap, table })
    });
    Ok(proto::Window {
        closing: closing.transpose()?,
        group: positions(&w.group)?,
        vnode: positions(&w.vnode)?,
        order: w.order.iter().map(order).collect::<Result<_>>()?,
        calls: w.calls.iter().map(window_call).collect::<Result<_>>()?,
        table: position(w.state.table)?,
        storage: w.state.storage.number()?,
        unique_key: positions(&w.state.unique_key)?,
    })
}

fn window_call(c: &WindowCall) -> Result<proto::WindowCall> {
    Ok(proto::WindowCall {
        function: c.function.clone(),
        aggregate: c.aggregate,
        args: c.args.iter().map(encode_expr).collect::<Result<_>>()?,
        filter: c.filter.as_ref().map(encode_expr).transpose()?,
        distinct: c.distinct,
        ignore_nulls: c.ignore_nulls,
        units: c.frame.units.number()?,
        start: Some(bound(&c.frame.start_bound)?),
        end: Some(bound(&c.frame.end_bound)?),
        numbering: c.numbering.map(Numbered::number).transpose()?,
        output_type: data_type(&c.output_type)?,
        version: versions::newest(&c.function),
    })
}

fn bound(b: &WindowFrameBound) -> Result<proto::Bound> {
    let (kind, offset) = match b {
        WindowFrameBound::Preceding(offset) => (1, Some(offset)),
        WindowFrameBound::CurrentRow => (2, None),
        WindowFrameBound::Following(offset) => (3, Some(offset)),
    };
    let offset = offset.map(|o| encode_expr(&literal(o.clone()))).transpose()?;
    Ok(proto::Bound { kind, offset })
}

fn top_n(t: &TopN) -> Result<proto::TopN> {
    Ok(proto::TopN {
        group: positions(&t.group)?,
        vnode: positions(&t.vnode)?,
        order: t.order.iter().map(order).collect::<Result<_>>()?,
        offset: t.offset,
        limit: t.limit,
        rank: t.rank.number()?,
        emit_rank: t.emit_rank,
        table: position(t.state.table)?,
        storage: t.state.storage.number()?,
        unique_key: positions(&t.state.unique_key)?,
        append_only_input: t.state.append_only_input,
    })
}
