//! Lookaheads through the jobs of inputs: the rows of a view are computed from rows of what its own job reads, so keys
//! that rows of the view bring may be known before there is a row of the view.

use std::collections::BTreeSet;
use std::sync::Arc;

use arrow::datatypes::{Schema, SchemaRef};
use datafusion::physical_expr::expressions::Literal;
use datafusion::scalar::ScalarValue;
use millrace_common::RelationId;
use millrace_functions::expr::{ExprRef, column, columns_of};

use super::stages::Port;
use super::steps::{self, node};
use super::walk::{End, Way};
use super::{Access, Lookahead, NodeId, Place, walk};
use crate::{JobGraph, Node, Operator, Project};

/// Relations that are looked at for one lookahead, each for each way in which its rows bring the key.
const MAX_RELATIONS: usize = 32;
/// Jobs between a relation and the leaf.
const MAX_JOBS: usize = 8;

/// A lookahead by rows of a relation that stands behind what its leaf reads: a table, since rows of others do not enter.
#[derive(Clone, Debug)]
pub struct Behind {
    /// [`Lookahead::relation`] is that relation; the leaf stays the job's own.
    pub lookahead: Lookahead,
    /// Columns of the relation: a row of them is what the first step takes.
    pub columns: Vec<usize>,
    /// The relations between, the one that the leaf reads first.
    pub through: Vec<RelationId>,
}

impl Behind {
    /// The same keys of the same rows, whatever relations are between.
    fn is_same(&self, other: &Behind) -> bool {
        (self.lookahead.relation, &self.columns) == (other.lookahead.relation, &other.columns)
            && self.lookahead.is_same(&other.lookahead)
    }
}

/// The keys of a lookahead by rows of the tables behind what its leaf reads, each way once. All or none: there is none
/// where some rows of a relation between may come of others than those that bring the key, or where the key is chained.
/// What is behind a relation is looked at once, however many ways lead there.
pub fn behind(
    graph: &JobGraph,
    l: &Lookahead,
    graph_of: &dyn Fn(RelationId) -> Option<Arc<JobGraph>>,
) -> Vec<Behind> {
    let Some(Operator::Subscribe(own)) = node(graph, l.leaf).map(|n| &n.op) else { return vec![] };
    let is_derived = l.relation.is_some_and(|relation| graph_of(relation).is_some());
    if l.chained.is_some() || l.inside.is_some() || !is_derived {
        return vec![];
    }
    let (lookahead, columns) = (l.clone(), own.columns.clone());
    let mut all = vec![Behind { lookahead, columns, through: vec![] }];
    let mut tables = Vec::new();
    let mut at = 0;
    while let Some(of) = all.get(at).cloned() {
        at += 1;
        let Some(producer) = of.lookahead.relation.and_then(graph_of) else {
            tables.push(of);
            continue;
        };
        let is_near = of.through.len() < MAX_JOBS;
        let Some(upstream) = is_near.then(|| upstream(&producer, &of)).flatten() else {
            return vec![];
        };
        for new in upstream {
            if !all.iter().any(|known| known.is_same(&new)) {
                all.push(new);
            }
        }
        if all.len() > MAX_RELATIONS {
            return vec![];
        }
    }
    tables
}

/// The same keys, of rows of what the job reads that has the graph `producer`: one for each way through it. `None`: its
/// rows may come of other rows.
fn upstream(producer: &JobGraph, of: &Behind) -> Option<Vec<Behind>> {
    let read = read_columns(&of.lookahead);
    let key: Option<Vec<usize>> = read.iter().map(|&c| of.columns.get(c).copied()).collect();
    let access = Access { deleted: of.lookahead.deleted, ..Access::of_input(0, &key?, &[]) };
    let port = root_port(producer, access)?;
    let mut ways = walk::ways(producer, &port, &[]);
    // Only tables are looked at.
    ways.retain(|way| !matches!(way.end, End::Inside(_)));
    let ends = |leaf: &NodeId| ways.iter().any(|way| way.end == End::Leaf(*leaf));
    let is_join = |way: &Way| matches!(way.end, End::Join(..));
    if ways.iter().any(is_join)
        || !emitting_leaves(producer, (port.node.0, port.input)).iter().all(ends)
    {
        return None;
    }
    let mut found: Vec<Behind> = Vec::new();
    for way in &ways {
        // The key is the same for all rows: there is nothing to announce.
        let Some(rows) = steps::lookahead(producer, &port, &[], way, None) else { continue };
        let Some(Operator::Subscribe(from)) = node(producer, rows.leaf).map(|n| &n.op) else {
            return None;
        };
        let mut through = of.through.clone();
        through.extend(of.lookahead.relation);
        let (lookahead, columns) = (joined(rows, &read, &of.lookahead)?, from.columns.clone());
        found.push(Behind { lookahead, columns, through });
    }
    Some(found)
}

/// The leaves whose rows may make a node put out rows.
fn emitting_leaves(graph: &JobGraph, root: NodeId) -> Vec<NodeId> {
    let (mut open, mut seen, mut leaves) = (vec![root], BTreeSet::new(), Vec::new());
    while let Some(at) = open.pop() {
        let Some(node) = node(graph, at).filter(|_| seen.insert(at)) else { continue };
        match &node.op {
            Operator::Subscribe(_) | Operator::Source(_) => leaves.push(at),
            Operator::Exchange(exchange) => {
                let from = graph.fragments.get(exchange.fragment);
                let edge = from.and_then(|f| f.outputs.get(exchange.output));
                open.extend(edge.map(|edge| (exchange.fragment, edge.from)));
            }
            // The right side emits nothing.
            Operator::Lookup(_) => open.extend(node.inputs.first().map(|&input| (at.0, input))),
            _ => open.extend(node.inputs.iter().map(|&input| (at.0, input))),
        }
    }
    leaves
}

/// Where the rows of a job arrive.
fn root_port(graph: &JobGraph, access: Access) -> Option<Port> {
    let fragment = graph.fragments.len().checked_sub(1)?;
    let root = graph.fragments[fragment].nodes.len().checked_sub(1)?;
    let input = *graph.fragments[fragment].nodes[root].inputs.first()?;
    Some(Port::new((fragment, root), access, input, None))
}

/// The columns of its first step's rows that a lookahead depends on.
fn read_columns(l: &Lookahead) -> Vec<usize> {
    let mut read: Vec<usize> = Vec::new();
    let mut passes = true;
    for step in &l.steps {
        match &step.op {
            // Its rows have the same columns.
            Operator::Filter(filter) => {
                read.extend(columns_of(&filter.predicate));
                continue;
            }
            Operator::Project(project) => read.extend(project.exprs.iter().flat_map(columns_of)),
            _ => read.extend(0..l.input.fields().len()),
        }
        passes = false;
        break;
    }
    if passes {
        read.extend(l.key.iter().chain(&l.vnode).chain(&l.carried).chain(&l.time));
    }
    read.sort_unstable();
    read.dedup();
    read
}

/// The steps of `rows`, whose key is the columns `read` of the rows that `l` takes, and those of `l` after them. Columns
/// that are not read are null.
fn joined(rows: Lookahead, read: &[usize], l: &Lookahead) -> Option<Lookahead> {
    let fields = l.input.fields().iter().enumerate();
    let exprs = fields.map(|(c, field)| match read.binary_search(&c) {
        Ok(at) => Some(column(&rows.schema, *rows.key.get(at)?)),
        Err(_) => {
            let null = ScalarValue::try_from(field.data_type()).ok()?;
            Some(Arc::new(Literal::new(null)) as ExprRef)
        }
    });
    let op = Operator::Project(Project { exprs: exprs.collect::<Option<_>>()? });
    let schema = nullable(&l.input);
    let mut steps = rows.steps;
    steps.push(Node { op, inputs: vec![0], schema, append_only: false, marks: vec![] });
    steps.extend(l.steps.iter().cloned());
    let schema = if l.steps.is_empty() { nullable(&l.schema) } else { Arc::clone(&l.schema) };
    Some(Lookahead {
        relation: rows.relation,
        input: rows.input,
        steps,
        schema,
        places: vec![Place::Entry],
        ..l.clone()
    })
}

fn nullable(schema: &SchemaRef) -> SchemaRef {
    let fields = schema.fields().iter().map(|f| f.as_ref().clone().with_nullable(true));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}
