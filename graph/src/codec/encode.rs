//! Graph → messages.

use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Field, Schema};
use millrace_common::access::RetentionBy;

use crate::codec::ipc::encode_schema;
use crate::codec::names::{EDGE_ROWS, Numbered};
use crate::codec::{CodecError, Result, proto};
use crate::operator::{NodeMessage, Payload};
use crate::{
    DerivedWatermark, Edge, EdgeKind, Fragment, JobGraph, MarkStep, Node, RelationLayout,
    Retention, StateTable, WatermarkTerm, dispatch_operator,
};

pub fn graph(g: &JobGraph) -> Result<proto::JobGraph> {
    Ok(proto::JobGraph {
        fragments: g.fragments.iter().map(fragment).collect::<Result<_>>()?,
        tables: g.tables.iter().map(table).collect::<Result<_>>()?,
        output: Some(layout(&g.output)?),
    })
}

pub fn position(p: usize) -> Result<u32> {
    u32::try_from(p).map_err(|_| CodecError::Encode(format!("position {p}")))
}

pub fn positions(list: &[usize]) -> Result<Vec<u32>> {
    list.iter().map(|&p| position(p)).collect()
}

pub fn optional(p: Option<usize>) -> Result<Option<u32>> {
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

fn node(n: &Node) -> Result<NodeMessage> {
    Ok(NodeMessage {
        inputs: positions(&n.inputs)?,
        schema: encode_schema(&n.schema)?,
        append_only: n.append_only,
        op: Some(dispatch_operator!(&n.op, p => p.encode())?),
        marks: n.marks.iter().map(mark).collect::<Result<_>>()?,
    })
}

pub fn data_type(t: &DataType) -> Result<prost::bytes::Bytes> {
    encode_schema(&Schema::new(vec![Field::new("", t.clone(), true)]))
}

pub fn order((column, options): &(usize, SortOptions)) -> Result<proto::Order> {
    Ok(proto::Order {
        column: position(*column)?,
        descending: options.descending,
        nulls_first: options.nulls_first,
    })
}
