//! What EXPLAIN shows of lookahead (docs/design.md §8): a line for each port and leaf whose rows bring keys ahead, by
//! themselves or, chained, with the rows that they meet in a join; one for each port and operator inside the job whose
//! rows do; then one for each range of state that a watermark announces.

use std::fmt::Write;

use arrow::datatypes::Schema;
use millrace_common::RelationId;
use millrace_graph::lookahead::{
    ClosedRange, Lookahead, Place, Subject, behind, closed_ranges, lookaheads,
};
use millrace_graph::{JobGraph, Node, Operator, Source, Subscribe, dispatch_operator};

use super::Relations;
use super::text::{list, state, vnode};
use crate::stream::operators::{LineContext, OperatorLine};

/// In the order of the operators.
pub fn lines(graph: &JobGraph, relations: &Relations<'_>) -> Vec<String> {
    let all = lookaheads(graph);
    let mut lines = Vec::with_capacity(all.len());
    for l in &all {
        if l.inside.is_some() && l.relation.is_some() {
            // A place of the leaf's line.
            continue;
        }
        lines.push(line(graph, &all, l, &[], relations));
        for behind in behind(graph, l, relations.graph) {
            lines.push(line(graph, &all, &behind.lookahead, &behind.through, relations));
        }
    }
    lines.extend(closed_ranges(graph).iter().filter_map(|range| closed(graph, range)));
    lines
}

/// `lookahead <operator> [state …]: range (…) at watermark`. The column is the input's whose watermark it is.
fn closed(graph: &JobGraph, range: &ClosedRange) -> Option<String> {
    let nodes = &graph.fragments.get(range.operator.0)?.nodes;
    let node = nodes.get(range.operator.1)?;
    let input = &nodes.get(*node.inputs.first()?)?.schema;
    let (name, column) = (node.op.name(), list(input, &[range.column]));
    Some(format!("lookahead {name}{}: range ({column}) at watermark", state(&[range.table])))
}

/// `lookahead <operator> <port> [state …]: key (…) time (…) from <relation> at <places> through <relations>, chained to
/// <operator> <port> [state …] at depth <n> by <steps>; carries (…)`. `through`: relations between that relation and the
/// leaf. Where no leaf's rows bring the key, there is an operator instead of the relation.
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
    let name = |id: RelationId| relation_name(relations.name, id);
    let from = l.relation.map_or_else(|| named(graph, l.leaf), name);
    let mut places = places(graph, l, relations);
    if through.is_empty() {
        places.extend(inside(graph, all, l));
    }
    let _ = write!(line, " from {from} at {}", places.join(", "));
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

/// `<operator> <port> [state …] from <relation>`, as [`lines`] name them: what is looked ahead of at an operator, and whose
/// rows bring the keys. `None`: the graph has no such operators.
pub fn subject(
    graph: &JobGraph,
    at: (usize, usize),
    subject: Subject,
    name: &dyn Fn(RelationId) -> Option<String>,
) -> Option<String> {
    let reads = reads(graph, at, subject)?;
    let relation = match node(graph, subject.leaf)?.op {
        Operator::Subscribe(Subscribe { relation, .. })
        | Operator::Source(Source { relation, .. }) => Some(relation),
        _ => None,
    };
    let from = match relation {
        Some(id) => relation_name(name, id),
        None => named(graph, subject.leaf),
    };
    Some(format!("{reads} from {from}"))
}

fn relation_name(name: &dyn Fn(RelationId) -> Option<String>, id: RelationId) -> String {
    name(id).unwrap_or_else(|| format!("relation {}", id.0))
}

/// See [`reads`].
fn operator(graph: &JobGraph, l: &Lookahead) -> String {
    reads(graph, (l.fragment, l.node), l.subject()).unwrap_or_default()
}

/// The operator whose rows read state, by its name, its port, whether only deleted rows do, and what tells it from others:
/// its state tables, or that of the values that are read.
fn reads(graph: &JobGraph, at: (usize, usize), subject: Subject) -> Option<String> {
    let node = node(graph, at)?;
    if let Operator::Aggregate(a) = &node.op
        && let Some(number) = subject.port.checked_sub(1)
    {
        let tables: Vec<usize> =
            a.counted_values().get(number).map(|v| v.table).into_iter().collect();
        return Some(format!("{} values{}", name(&node.op), state(&tables)));
    }
    let port = match (node.inputs.len(), subject.port) {
        (2, 0) if subject.deleted => " left, deleted rows",
        (2, 0) => " left",
        (2, _) => " right",
        _ => "",
    };
    Some(format!("{}{port}{}", name(&node.op), state(&node.op.cleaned_tables())))
}

/// An operator by its name and its state tables, if it has any.
fn named(graph: &JobGraph, at: (usize, usize)) -> String {
    let Some(node) = node(graph, at) else { return String::new() };
    let tables = node.op.cleaned_tables();
    let state = if tables.is_empty() { String::new() } else { state(&tables) };
    format!("{}{state}", name(&node.op))
}

fn name(op: &Operator) -> &'static str {
    match op {
        Operator::Aggregate(a) if a.calls.is_empty() => "Distinct",
        op => op.name(),
    }
}

fn node(graph: &JobGraph, (fragment, node): (usize, usize)) -> Option<&Node> {
    graph.fragments.get(fragment)?.nodes.get(node)
}

/// `input of <operator>`: where rows inside the job can be looked at for the same input, each once.
fn inside(graph: &JobGraph, all: &[Lookahead], l: &Lookahead) -> Vec<String> {
    let side = |l: &Lookahead| (l.fragment, l.node, l.port, l.deleted, l.leaf);
    let mut places = Vec::new();
    for inside in all.iter().filter(|other| side(other) == side(l)).filter_map(|l| l.inside) {
        let place = format!("input of {}", named(graph, inside.input_of));
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

/// Where the leaf's rows can be looked at; only a table and a source have an entry.
fn places(graph: &JobGraph, l: &Lookahead, relations: &Relations<'_>) -> Vec<String> {
    let is_source = node(graph, l.leaf).is_some_and(|n| matches!(n.op, Operator::Source(_)));
    let has_entry = is_source || l.relation.is_some_and(relations.is_table);
    let shown = |p: &Place| match p {
        Place::Entry => has_entry.then_some("entry"),
        Place::Root => Some("root"),
        Place::Leaf => Some("leaf"),
        // With the operator: see [`inside`].
        Place::Input => None,
    };
    l.places.iter().filter_map(shown).map(str::to_string).collect()
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
