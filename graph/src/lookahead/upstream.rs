//! Lookaheads through the jobs of inputs: the rows of a view are computed from rows of what its own job reads, so keys
//! that rows of the view bring may be known before there is a row of the view.

use std::sync::Arc;

use arrow::datatypes::{Schema, SchemaRef};
use datafusion::physical_expr::expressions::Literal;
use datafusion::scalar::ScalarValue;
use millrace_common::RelationId;
use millrace_functions::expr::{ExprRef, column, columns_of};

use super::stages::Port;
use super::steps::{self, node};
use super::{Access, Lookahead, Place, walk};
use crate::{JobGraph, Node, Operator, Project};

/// Those of one lookahead.
const MAX_BEHIND: usize = 16;
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

/// The keys of a lookahead by rows of the tables behind what its leaf reads. `graph_of`: of a relation's own job, if it
/// is derived. There is none where a job between has state, or where the key is chained.
pub fn behind(
    graph: &JobGraph,
    l: &Lookahead,
    graph_of: &dyn Fn(RelationId) -> Option<Arc<JobGraph>>,
) -> Vec<Behind> {
    let Some(Operator::Subscribe(own)) = node(graph, l.leaf).map(|n| &n.op) else { return vec![] };
    let (lookahead, columns) = (l.clone(), own.columns.clone());
    let mut open = vec![Behind { lookahead, columns, through: vec![] }];
    let mut found = Vec::new();
    while let Some(of) = open.pop() {
        match graph_of(of.lookahead.relation) {
            None if of.through.is_empty() => {}
            None => found.push(of),
            Some(producer) if of.through.len() < MAX_JOBS && l.chained.is_none() => {
                open.extend(upstream(&producer, &of));
            }
            Some(_) => {}
        }
        if open.len() + found.len() > MAX_BEHIND {
            break;
        }
    }
    found.truncate(MAX_BEHIND);
    found
}

/// The same keys, of rows of what the job reads that has the graph `producer`: one for each way through it.
fn upstream(producer: &JobGraph, of: &Behind) -> Vec<Behind> {
    let has_state = |node: &Node| !node.op.cleaned_tables().is_empty();
    if producer.fragments.iter().flat_map(|f| &f.nodes).any(has_state) {
        return vec![];
    }
    let read = read_columns(&of.lookahead);
    let key: Option<Vec<usize>> = read.iter().map(|&c| of.columns.get(c).copied()).collect();
    let access = key.map(|key| Access { port: 0, key, vnode: vec![] });
    let Some(port) = access.and_then(|access| root_port(producer, access)) else { return vec![] };
    let mut found: Vec<Behind> = Vec::new();
    for way in walk::ways(producer, &port, &[]) {
        let Some(rows) = steps::lookahead(producer, &port, &[], &way, None) else { continue };
        let Some(Operator::Subscribe(from)) = node(producer, rows.leaf).map(|n| &n.op) else {
            continue;
        };
        let columns = from.columns.clone();
        let Some(lookahead) = joined(rows, &read, &of.lookahead) else { continue };
        let is_known = |other: &Behind| {
            (other.lookahead.relation, &other.columns) == (lookahead.relation, &columns)
                && other.lookahead.is_same(&lookahead)
        };
        if !found.iter().any(is_known) {
            let mut through = of.through.clone();
            through.push(of.lookahead.relation);
            found.push(Behind { lookahead, columns, through });
        }
    }
    found
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
