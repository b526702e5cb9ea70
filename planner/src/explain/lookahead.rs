//! What EXPLAIN shows of lookahead (docs/design.md §8): a line for each port and leaf whose rows bring keys ahead.

use std::fmt::Write;

use arrow::datatypes::Schema;
use millrace_graph::lookahead::{Lookahead, Place, lookaheads};
use millrace_graph::{JobGraph, Node, Operator, dispatch_operator};

use super::Relations;
use super::text::{list, state, vnode};
use crate::stream::operators::{LineContext, OperatorLine};

/// In the order of the operators.
pub fn lines(graph: &JobGraph, relations: &Relations<'_>) -> Vec<String> {
    lookaheads(graph).iter().map(|l| line(graph, l, relations)).collect()
}

/// `lookahead <operator> <port> [state …]: key (…) time (…) from <relation> at <places> by <steps>`.
fn line(graph: &JobGraph, l: &Lookahead, relations: &Relations<'_>) -> String {
    let nodes = graph.fragments.get(l.fragment).map_or(&[][..], |f| &f.nodes);
    let mut line = format!("lookahead {}", operator(nodes, l));
    let _ =
        write!(line, ": key ({}){}", list(&l.schema, &l.key), vnode(&l.schema, &l.vnode, &l.key));
    if let Some(time) = l.time {
        let _ = write!(line, " time ({})", list(&l.schema, &[time]));
    }
    let name = (relations.name)(l.relation).unwrap_or_else(|| format!("relation {}", l.relation.0));
    let _ = write!(line, " from {name} at {}", places(l, relations).join(", "));
    let steps = steps(graph, l, relations);
    if !steps.is_empty() {
        let _ = write!(line, " by {}", steps.join("; "));
    }
    line
}

/// The operator whose rows read state, by its name, its port, and what tells it from others: its state tables.
fn operator(nodes: &[Node], l: &Lookahead) -> String {
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

/// Where the leaf's rows can be looked at; only a table has an entry.
fn places(l: &Lookahead, relations: &Relations<'_>) -> Vec<&'static str> {
    let is_table = (relations.is_table)(l.relation);
    let shown = l.places.iter().filter(|p| is_table || **p != Place::Entry);
    let name = |p: &Place| match p {
        Place::Entry => "entry",
        Place::Root => "root",
        Place::Leaf => "leaf",
    };
    shown.map(name).collect()
}

/// As the plan shows such operators.
fn steps(graph: &JobGraph, l: &Lookahead, relations: &Relations<'_>) -> Vec<String> {
    let leaf = graph.fragments.get(l.leaf.0).and_then(|f| f.nodes.get(l.leaf.1));
    let empty = Schema::empty();
    let mut input = leaf.map_or(&empty, |n| n.schema.as_ref());
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
