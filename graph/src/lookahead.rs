//! Lookahead: where the access keys of an operator can be computed ahead of its rows (docs/design.md §8).
//!
//! Derived from a job graph by [`lookaheads`], and never stored: a graph that an older version has stored has the same.
//!
//! [`walk`] goes upstream from each input that reads keyed state, with what the operator wants of its rows as
//! expressions over the columns of the node that it has come to; [`steps`] makes the nodes of them once a leaf is reached.

mod steps;
#[cfg(test)]
mod tests;
mod walk;

use arrow::datatypes::SchemaRef;
use millrace_common::RelationId;
use millrace_common::access::AccessClass;

use crate::{JobGraph, Node, Operator, event_time_column};

/// The keys that one input port of an operator will ask its state for, as far as rows of one leaf bring them.
#[derive(Clone, Debug)]
pub struct Lookahead {
    /// The operator that reads keyed state when a row arrives: its fragment and node.
    pub fragment: usize,
    pub node: usize,
    pub port: usize,
    /// The leaf (a subscription or a source) whose rows bring the keys: its fragment and node.
    pub leaf: (usize, usize),
    /// What the leaf reads.
    pub relation: RelationId,
    /// From a row of the leaf to the key: operators without state, each with one input, only with the columns that are
    /// needed; deterministic. The first takes the leaf's rows. An expression may fail on a row whose key is not needed.
    pub steps: Vec<Node>,
    /// Of the rows that the last step puts out (of the leaf's, where there is none).
    pub schema: SchemaRef,
    /// Columns of `schema`: the operator's access key, in its order.
    pub key: Vec<usize>,
    /// Columns of `schema` whose hash is the vnode; empty: vnode 0.
    pub vnode: Vec<usize>,
    /// The column of `schema` that tells the event time of the row at the operator.
    pub time: Option<usize>,
    /// Earliest first. [`Place::Entry`] is listed for every subscription; rows are there only of a table.
    pub places: Vec<Place>,
    /// Reads that must have answered before the key is known: 1 where it is computed from the leaf's row alone.
    pub depth: usize,
}

/// Where rows can be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// They have entered the relation that the leaf reads: its open epoch.
    Entry,
    /// The relation's change is sealed, and not yet committed.
    Root,
    /// The leaf has read them.
    Leaf,
}

impl Lookahead {
    /// The same keys of the same rows.
    fn is_same(&self, other: &Lookahead) -> bool {
        self.leaf == other.leaf
            && self.key == other.key
            && self.vnode == other.vnode
            && self.time == other.time
            && self.steps.iter().map(|s| &s.op).eq(other.steps.iter().map(|s| &s.op))
    }
}

/// All lookaheads of a job, by operator.
pub fn lookaheads(graph: &JobGraph) -> Vec<Lookahead> {
    let mut all = Vec::new();
    for (fragment, nodes) in graph.fragments.iter().map(|f| &f.nodes).enumerate() {
        for (node, operator) in nodes.iter().enumerate() {
            for access in accesses(graph, &operator.op) {
                let Some(&input) = operator.inputs.get(access.port) else { continue };
                let time = nodes.get(input).and_then(|n| event_time_column(&n.marks));
                let mut of_port: Vec<Lookahead> = Vec::new();
                for way in walk::ways(graph, (fragment, input), &access, time) {
                    let Some(found) =
                        steps::lookahead(graph, (fragment, node), &access, time, &way)
                    else {
                        continue;
                    };
                    if !of_port.iter().any(|other| other.is_same(&found)) {
                        of_port.push(found);
                    }
                }
                all.append(&mut of_port);
            }
        }
    }
    all
}

/// A port whose rows read keyed state, and the columns of its input by which they do.
struct Access {
    port: usize,
    key: Vec<usize>,
    vnode: Vec<usize>,
}

/// The ports of an operator whose rows read keyed state as they arrive. State with a single key has none: it is in
/// memory after the first row.
fn accesses(graph: &JobGraph, op: &Operator) -> Vec<Access> {
    let access = |port, key: &[usize], vnode: &[usize]| Access {
        port,
        key: key.to_vec(),
        vnode: vnode.to_vec(),
    };
    let merged =
        |table: usize| graph.tables.get(table).is_some_and(|t| t.class == AccessClass::Merge);
    let mut found = match op {
        Operator::Aggregate(a) if !merged(a.table) => vec![access(0, &a.group, &a.vnode)],
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
