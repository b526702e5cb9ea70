//! Messages → graph. Every position is checked against what it points into, so that a damaged graph
//! is an error here and not a panic in an operator.

use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, SchemaRef, TimeUnit};
use millrace_common::RelationId;
use millrace_common::access::{AccessClass, RetentionBy};
use millrace_rpc::catalog::RowStorage;

use crate::codec::ipc::decode_schema;
use crate::codec::names::{EDGE_ROWS, Numbered};
use crate::codec::{CodecError, Result, proto};
use crate::operator::{self, NodeMessage};
use crate::{
    DerivedWatermark, Edge, EdgeKind, Fragment, JobGraph, MarkStep, Node, RelationLayout,
    Retention, StateTable, WatermarkTerm, check_edges,
};

pub fn damaged(what: impl Into<String>) -> CodecError {
    CodecError::Damaged(what.into())
}

/// A position below `bound`.
pub fn position(p: u32, bound: usize, what: &str) -> Result<usize> {
    let p = p as usize;
    if p < bound { Ok(p) } else { Err(damaged(format!("{what} {p} of {bound}"))) }
}

pub fn positions(list: &[u32], bound: usize, what: &str) -> Result<Vec<usize>> {
    list.iter().map(|&p| position(p, bound, what)).collect()
}

pub fn columns(list: &[u32], schema: &SchemaRef) -> Result<Vec<usize>> {
    positions(list, schema.fields().len(), "column")
}

/// A column of a schema.
pub fn column(c: u32, schema: &SchemaRef) -> Result<usize> {
    position(c, schema.fields().len(), "column")
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
pub struct Sizes {
    pub tables: usize,
    pub fragments: usize,
}

impl Sizes {
    pub fn table(self, t: u32) -> Result<usize> {
        position(t, self.tables, "state table")
    }
}

/// What an operator's columns and state tables are checked against.
pub struct Inputs<'a> {
    pub schemas: &'a [&'a SchemaRef],
    pub sizes: Sizes,
}

impl Inputs<'_> {
    pub fn none(&self) -> Result<()> {
        if self.schemas.is_empty() { Ok(()) } else { Err(wrong_inputs()) }
    }

    pub fn one(&self) -> Result<&SchemaRef> {
        if let [input] = self.schemas { Ok(*input) } else { Err(wrong_inputs()) }
    }

    pub fn two(&self) -> Result<(&SchemaRef, &SchemaRef)> {
        if let [left, right] = self.schemas { Ok((*left, *right)) } else { Err(wrong_inputs()) }
    }
}

fn wrong_inputs() -> CodecError {
    damaged("an operator with the wrong number of inputs")
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
pub fn timestamp(column: u32, schema: &SchemaRef) -> Result<usize> {
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

fn node(n: &NodeMessage, before: &[Node], sizes: Sizes) -> Result<Node> {
    let inputs = positions(&n.inputs, before.len(), "input")?;
    let schemas: Vec<&SchemaRef> = inputs.iter().map(|&i| &before[i].schema).collect();
    let op = n.op.as_ref().ok_or_else(|| damaged("a node without an operator"))?;
    let op = operator::decode(op, &Inputs { schemas: &schemas, sizes })?;
    let schema = decode_schema(&n.schema)?;
    let marks = marks(&n.marks, &schema)?;
    Ok(Node { op, inputs, schema, append_only: n.append_only, marks })
}

pub fn data_type(bytes: &[u8]) -> Result<DataType> {
    let schema = decode_schema(bytes)?;
    let field = schema.fields().first().ok_or_else(|| damaged("no output type"))?;
    Ok(field.data_type().clone())
}

pub fn order(o: &proto::Order, input: &SchemaRef) -> Result<(usize, SortOptions)> {
    let column = column(o.column, input)?;
    Ok((column, SortOptions { descending: o.descending, nulls_first: o.nulls_first }))
}
