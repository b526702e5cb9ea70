//! Where rows may wait between a leaf and an operator: only there is it of use that the leaf's rows are looked at.

use super::Lookahead;
use crate::JobGraph;

/// Whether rows may wait on their way from a lookahead's leaf to its operator: in the channel to another task, for state
/// that an operator on the way reads, or for the barrier at which it emits.
pub fn may_wait(graph: &JobGraph, l: &Lookahead) -> bool {
    let (fragment, leaf) = l.leaf;
    if fragment != l.fragment {
        return true;
    }
    let nodes = graph.fragments.get(fragment).map_or(&[][..], |f| &f.nodes);
    let port = nodes.get(l.node).and_then(|n| n.inputs.get(l.input_port)).copied();
    // Inputs stand before what takes them.
    let mut from_leaf = vec![false; nodes.len()];
    for (at, node) in nodes.iter().enumerate() {
        from_leaf[at] = at == leaf || node.inputs.iter().any(|&input| from_leaf[input]);
    }
    let mut to_port: Vec<usize> = port.into_iter().collect();
    while let Some(at) = to_port.pop() {
        // Each is looked at once.
        if at == leaf || !std::mem::take(&mut from_leaf[at]) {
            continue;
        }
        if !nodes[at].op.cleaned_tables().is_empty() {
            return true;
        }
        to_port.extend(&nodes[at].inputs);
    }
    false
}
