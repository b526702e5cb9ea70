//! Lookahead: where the access keys of an operator can be computed ahead of its rows (docs/design.md §8).
//!
//! Derived from a job graph by [`lookaheads`], and never stored: a graph that an older version has stored has the same.
//!
//! [`walk`] goes upstream from each input that reads keyed state, with what the operator wants of its rows as
//! expressions over the columns of the node that it has come to; [`steps`] makes the nodes of them once a leaf is reached.
//!
//! A key that rows of a leaf bring only together with rows that they meet in a join is *chained*: the lookahead of the
//! join's input comes before it, its hints carry what more of the hinted row is needed, and what they find brings the
//! key. [`stages`] puts these together.
//!
//! Rows that an operator inside the job puts out may bring a key as well, and wait for something before they reach the
//! operator whose state it is of: that is a place of its own ([`Inside`]), beside those of a leaf or in their stead.

mod closing;
mod deleted;
mod stages;
mod steps;
#[cfg(test)]
mod tests;
mod upstream;
mod waits;
mod walk;

use arrow::datatypes::SchemaRef;
use millrace_common::RelationId;
use millrace_common::access::AccessClass;

pub use closing::{ClosedRange, closed_ranges};
pub use upstream::{Behind, behind};

use crate::{Aggregate, CountedValues, JobGraph, Node, Operator};

/// A node: its fragment and its number there.
type NodeId = (usize, usize);

/// The keys that rows of one input of an operator will ask its state for, as far as rows of one leaf bring them.
#[derive(Clone, Debug)]
pub struct Lookahead {
    /// The operator that reads keyed state when a row arrives: its fragment and node.
    pub fragment: usize,
    pub node: usize,
    /// What is read: the operator's state by the input's number; of an aggregate 0 is the groups, and what follows are the
    /// value tables of [`Aggregate::counted_values`](crate::Aggregate::counted_values).
    pub port: usize,
    /// The keys are those of rows that are deleted, of what they had met: rows that are added do not read it.
    pub deleted: bool,
    /// The input whose rows read it.
    pub input_port: usize,
    /// The leaf (a subscription or a source) whose rows bring the keys, or bring them together with what they meet: its
    /// fragment and node. Where no leaf's rows do: the operator whose rows do.
    pub leaf: (usize, usize),
    /// What the leaf reads; `None`: it is none.
    pub relation: Option<RelationId>,
    /// The rows that are looked at, if they are not the leaf's.
    pub inside: Option<Inside>,
    /// The lookahead that comes before, if the key depends on what its keys find.
    pub chained: Option<Chained>,
    /// Of the rows that the first step takes: the leaf's, or those inside the job; of one that is chained, what a hinted
    /// row carries, then what is needed of a row that it meets.
    pub input: SchemaRef,
    /// From such a row to the key: operators without state, each with one input, only with the columns that are needed;
    /// deterministic. An expression may fail on a row whose key is not needed.
    pub steps: Vec<Node>,
    /// Of the rows that the last step puts out (`input`, where there is none).
    pub schema: SchemaRef,
    /// Columns of `schema`: the operator's access key, in its order.
    pub key: Vec<usize>,
    /// Columns of `schema` whose hash is the vnode; empty: vnode 0.
    pub vnode: Vec<usize>,
    /// The column of `schema` that tells the event time of the row at the operator.
    pub time: Option<usize>,
    /// Columns of `schema` that a hint brings along, for lookaheads that are chained to this one.
    pub carried: Vec<usize>,
    /// Earliest first. [`Place::Entry`] is listed for every subscription; rows are there only of a table.
    pub places: Vec<Place>,
    /// Reads that must have answered before the key is known: 1 where it is computed from the leaf's row alone.
    pub depth: usize,
}

/// What a lookahead is about, of its operator: the state that is read, and whose rows bring the keys. Those with the same
/// differ only in where the rows are looked at, and how the key is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    /// See [`Lookahead::port`].
    pub port: usize,
    /// See [`Lookahead::deleted`].
    pub deleted: bool,
    /// See [`Lookahead::leaf`].
    pub leaf: (usize, usize),
}

/// What a lookahead is chained to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chained {
    /// The position among the job's lookaheads of that of a join's input: its keys find rows of the other input.
    pub after: usize,
    /// The columns of the other input that are needed.
    pub met: Vec<usize>,
}

/// Rows inside a job that are looked at when an operator with state puts them out, or one that computes their key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inside {
    /// That operator: its fragment and node.
    pub from: (usize, usize),
    /// The next one at which they may wait: one with state or, if there is none, an exchange. What is between does not
    /// hold them up: they are looked at before they come to it.
    pub input_of: (usize, usize),
}

/// Where rows can be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// They have entered the relation that the leaf reads: its open epoch. Of a source: they are read ahead.
    Entry,
    /// The relation's change is sealed, and not yet committed.
    Root,
    /// The leaf has read them; listed where rows may wait between it and the operator.
    Leaf,
    /// They come to an operator inside the job: see [`Lookahead::inside`].
    Input,
}

impl Lookahead {
    pub fn subject(&self) -> Subject {
        Subject { port: self.port, deleted: self.deleted, leaf: self.leaf }
    }

    /// The same keys of the same rows.
    fn is_same(&self, other: &Lookahead) -> bool {
        self.leaf == other.leaf
            && self.inside == other.inside
            && self.chained == other.chained
            && self.carried == other.carried
            && self.key == other.key
            && self.vnode == other.vnode
            && self.time == other.time
            && self.steps.iter().map(|s| &s.op).eq(other.steps.iter().map(|s| &s.op))
    }
}

/// All lookaheads of a job, by operator; those of a port by their depth, and behind them those inside the job.
pub fn lookaheads(graph: &JobGraph) -> Vec<Lookahead> {
    let mut all = stages::lookaheads(graph);
    for l in &mut all {
        if !waits::may_wait(graph, l) {
            l.places.retain(|place| *place != Place::Leaf);
        }
    }
    all
}

/// State that rows of an input read by key, and the columns of the input by which they do.
struct Access {
    /// See [`Lookahead::port`].
    port: usize,
    input_port: usize,
    key: Vec<usize>,
    vnode: Vec<usize>,
    /// A column that is true in the rows that read it.
    filter: Option<usize>,
    /// See [`Lookahead::deleted`].
    deleted: bool,
}

impl Access {
    /// By all rows of an input.
    fn of_input(port: usize, key: &[usize], vnode: &[usize]) -> Access {
        let (key, vnode) = (key.to_vec(), vnode.to_vec());
        Access { port, input_port: port, key, vnode, filter: None, deleted: false }
    }
}

/// The groups of an aggregate, unless `merged`: they are added to and not read; and its tables of values that are counted.
fn accesses_of_aggregate(a: &Aggregate, merged: bool) -> Vec<Access> {
    let groups = (!merged).then(|| Access::of_input(0, &a.group, &a.vnode));
    let values = a.counted_values().into_iter().enumerate();
    let values = values.map(|(i, CountedValues { arg, filter, .. })| Access {
        port: 1 + i,
        filter,
        ..Access::of_input(0, &[a.group.as_slice(), &[arg]].concat(), &a.vnode)
    });
    groups.into_iter().chain(values).collect()
}

/// What rows of an operator's inputs read by key as they arrive. State with a single key has none: it is in
/// memory after the first row. Nor has what is read when a watermark has passed it: see [`closed_ranges`]. What only rows
/// that are deleted read is told by [`deleted::access`].
fn accesses(graph: &JobGraph, op: &Operator) -> Vec<Access> {
    let access = Access::of_input;
    let merged =
        |table: usize| graph.tables.get(table).is_some_and(|t| t.class == AccessClass::Merge);
    let mut found = match op {
        Operator::Aggregate(a) => accesses_of_aggregate(a, merged(a.table)),
        Operator::TopN(t) => vec![access(0, &t.group, &t.vnode)],
        Operator::Window(w) => vec![access(0, &w.group, &w.vnode)],
        // A row of one side meets the rows of the other side that have its key.
        Operator::Join(j) if !j.null_aware => {
            vec![access(0, &j.left.keys, &j.left.vnode), access(1, &j.right.keys, &j.right.vnode)]
        }
        // Rows of the right side are written, and meet nothing.
        Operator::Lookup(l) => vec![access(0, &l.left_keys, &l.left_vnode)],
        _ => vec![],
    };
    found.retain(|a| !a.key.is_empty());
    found
}
