//! What EXPLAIN shows of lookahead (docs/design.md §8): a line for each port and leaf whose rows bring keys ahead, by
//! themselves or, chained, with the rows that they meet in a join.

use std::fmt::Write;

use arrow::datatypes::Schema;
use millrace_common::RelationId;
use millrace_graph::lookahead::{Lookahead, Place, behind, lookaheads};
use millrace_graph::{JobGraph, Operator, dispatch_operator};

use super::Relations;
use super::text::{list, state, vnode};
use crate::stream::operators::{LineContext, OperatorLine};

/// In the order of the operators.
pub fn lines(graph: &JobGraph, relations: &Relations<'_>) -> Vec<String> {
    let all = lookaheads(graph);
    let mut lines = Vec::with_capacity(all.len());
    for l in &all {
        lines.push(line(graph, &all, l, &[], relations));
        for behind in behind(graph, l, relations.graph) {
            lines.push(line(graph, &all, &behind.lookahead, &behind.through, relations));
        }
    }
    lines
}

/// `lookahead <operator> <port> [state …]: key (…) time (…) from <relation> at <places> through <relations>, chained to
/// <operator> <port> [state …] at depth <n> by <steps>; carries (…)`. `through`: relations between that relation and the
/// leaf.
fn line(
    graph: &JobGraph,
    all: &[Lookahead],
    l: &Lookahead,
    through: &[RelationId],
    relations: &Relations<'_>,
) -> String {
    let mut line = format!("lookahead {}", operator(graph, l));
    let _ =
        write!(line, ": key ({}){}", list(&l.schema, &l.key), vnode(&l.schema, &l.vnode, &l.key));
    if let Some(time) = l.time {
        let _ = write!(line, " time ({})", list(&l.schema, &[time]));
    }
    let name =
        |id: RelationId| (relations.name)(id).unwrap_or_else(|| format!("relation {}", id.0));
    let from = name(l.relation);
    let _ = write!(line, " from {from} at {}", places(graph, l, relations).join(", "));
    if !through.is_empty() {
        // In the order in which rows take them.
        let through: Vec<String> = through.iter().rev().map(|id| name(*id)).collect();
        let _ = write!(line, " through {}", through.join(", "));
    }
    if let Some(before) = l.chained.as_ref().and_then(|chained| all.get(chained.after)) {
        let _ = write!(line, ", chained to {} at depth {}", operator(graph, before), l.depth);
    }
    let steps = steps(graph, l, relations);
    if !steps.is_empty() {
        let _ = write!(line, " by {}", steps.join("; "));
    }
    if !l.carried.is_empty() {
        let _ = write!(line, "; carries ({})", list(&l.schema, &l.carried));
    }
    line
}

/// The operator whose rows read state, by its name, its port, and what tells it from others: its state tables.
fn operator(graph: &JobGraph, l: &Lookahead) -> String {
    let nodes = graph.fragments.get(l.fragment).map_or(&[][..], |f| &f.nodes);
    let Some(node) = nodes.get(l.node) else { return String::new() };
    let name = match &node.op {
        Operator::Aggregate(a) if a.calls.is_empty() => "Distinct",
        op => op.name(),
    };
    let port = match (node.inputs.len(), l.port) {
        (2, 0) => " left",
        (2, _) => " right",
        _ => "",
    };
    format!("{name}{port}{}", state(&node.op.cleaned_tables()))
}

/// Where the leaf's rows can be looked at; only a table and a source have an entry.
fn places(graph: &JobGraph, l: &Lookahead, relations: &Relations<'_>) -> Vec<&'static str> {
    let leaf = graph.fragments.get(l.leaf.0).and_then(|f| f.nodes.get(l.leaf.1));
    let is_source = leaf.is_some_and(|n| matches!(n.op, Operator::Source(_)));
    let has_entry = is_source || (relations.is_table)(l.relation);
    let shown = l.places.iter().filter(|p| has_entry || **p != Place::Entry);
    let name = |p: &Place| match p {
        Place::Entry => "entry",
        Place::Root => "root",
        Place::Leaf => "leaf",
    };
    shown.map(name).collect()
}

/// As the plan shows such operators.
fn steps(graph: &JobGraph, l: &Lookahead, relations: &Relations<'_>) -> Vec<String> {
    let empty = Schema::empty();
    let mut input = l.input.as_ref();
    let mut shown = Vec::with_capacity(l.steps.len());
    for step in &l.steps {
        let mut at = LineContext {
            inputs: [input, &empty],
            output: &step.schema,
            graph: Some(graph),
            names: relations.name,
            keys: vec![],
        };
        shown.push(dispatch_operator!(&step.op, p => p.line(&mut at)));
        input = &step.schema;
    }
    shown
}
