//! What holds of the edges and nodes of every job graph.

use std::collections::HashSet;

use crate::{EdgeKind, Exchange, Fragment, Operator, Role};

/// Checks that the graph is acyclic and whole: every position points at something that comes before (an input) or
/// behind (an edge's fragment), every exchange takes an edge that leads to it, every edge is taken once, every
/// node's output goes somewhere, and the root is the last node of the last fragment and nowhere else.
pub fn check_edges(fragments: &[Fragment]) -> Result<(), String> {
    let mut taken = HashSet::new();
    for (f, fragment) in fragments.iter().enumerate() {
        for (n, node) in fragment.nodes.iter().enumerate() {
            if node.inputs.iter().any(|&i| i >= n) {
                return Err(format!("input of node {f}.{n} does not precede it"));
            }
            if let Operator::Exchange(Exchange { fragment: from, output }) = node.op {
                let edge = fragments.get(from).and_then(|p| p.outputs.get(output));
                let edge = edge.ok_or_else(|| format!("node {f}.{n} takes no edge"))?;
                match edge.carries {
                    EdgeKind::Rows { .. } if edge.to == f => {}
                    EdgeKind::Rows { .. } => {
                        return Err(format!("edge {from}.{output} does not lead to node {f}.{n}"));
                    }
                }
                if !taken.insert((from, output)) {
                    return Err(format!("edge {from}.{output} is taken twice"));
                }
            }
        }
        for (o, edge) in fragment.outputs.iter().enumerate() {
            if edge.from >= fragment.nodes.len() || edge.to <= f || edge.to >= fragments.len() {
                return Err(format!("edge {f}.{o} leads nowhere, or back"));
            }
        }
        check_outputs(f, fragment, f + 1 == fragments.len())?;
    }
    let mut edges =
        fragments.iter().enumerate().flat_map(|(f, g)| (0..g.outputs.len()).map(move |o| (f, o)));
    match edges.find(|edge| !taken.contains(edge)) {
        Some((f, o)) => Err(format!("nothing takes edge {f}.{o}")),
        None => Ok(()),
    }
}

fn check_outputs(f: usize, fragment: &Fragment, holds_root: bool) -> Result<(), String> {
    let fed = consumers(fragment);
    let last = fragment.nodes.len().checked_sub(1);
    for (n, node) in fragment.nodes.iter().enumerate() {
        let is_root = node.op.role() == Role::Root;
        if is_root != (holds_root && Some(n) == last) {
            return Err(format!("node {f}.{n} is a root in the middle, or none at the end"));
        }
        if is_root != (fed[n] == 0) {
            return Err(format!("the output of node {f}.{n} goes nowhere, or a root has one"));
        }
    }
    match last {
        Some(_) => Ok(()),
        None => Err(format!("fragment {f} has no nodes")),
    }
}

/// How many take each node's output.
fn consumers(fragment: &Fragment) -> Vec<usize> {
    let mut counts = vec![0; fragment.nodes.len()];
    let inputs = fragment.nodes.iter().flat_map(|n| n.inputs.iter().copied());
    for node in inputs.chain(fragment.outputs.iter().map(|e| e.from)) {
        if let Some(count) = counts.get_mut(node) {
            *count += 1;
        }
    }
    counts
}

/// Whether the output of some node goes to several: the graph is no tree.
pub fn shares(fragments: &[Fragment]) -> bool {
    fragments.iter().any(|f| consumers(f).iter().any(|&n| n > 1))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::Schema;
    use millrace_common::RelationId;

    use super::*;
    use crate::{Edge, Materialize, Node, Sink, Subscribe, Union};

    fn node(op: Operator, inputs: Vec<usize>) -> Node {
        let schema = Arc::new(Schema::empty());
        Node { op, inputs, schema, append_only: false, marks: vec![] }
    }

    fn edge(from: usize, to: usize) -> Edge {
        Edge { from, to, carries: EdgeKind::Rows { hash: vec![] } }
    }

    fn fragment(nodes: Vec<Node>, outputs: Vec<Edge>) -> Fragment {
        Fragment { nodes, singleton: true, outputs }
    }

    fn leaf() -> Node {
        node(Operator::Subscribe(Subscribe { relation: RelationId(1), columns: vec![] }), vec![])
    }

    fn exchange(output: usize) -> Node {
        node(Operator::Exchange(Exchange { fragment: 0, output }), vec![])
    }

    /// A fragment with two ways out, both taken by the next.
    fn twice() -> Vec<Fragment> {
        let union = node(Operator::Union(Union), vec![0, 1]);
        let root = node(Operator::Materialize(Materialize), vec![2]);
        vec![
            fragment(vec![leaf()], vec![edge(0, 1), edge(0, 1)]),
            fragment(vec![exchange(0), exchange(1), union, root], vec![]),
        ]
    }

    #[test]
    fn a_fragment_may_have_several_ways_out_each_taken_once() {
        assert_eq!(check_edges(&twice()), Ok(()));
        assert!(shares(&twice()));
        let mut same = twice();
        same[1].nodes[1] = exchange(0);
        assert!(check_edges(&same).unwrap_err().contains("taken twice"));
        let mut left = twice();
        left[1].nodes.remove(1);
        left[1].nodes[1].inputs = vec![0];
        left[1].nodes[2].inputs = vec![1];
        assert_eq!(check_edges(&left).unwrap_err(), "nothing takes edge 0.1");
        assert!(!shares(&[left.remove(1)]));
    }

    #[test]
    fn edges_lead_forward_and_to_their_exchange() {
        let mut back = twice();
        back[0].outputs[1].to = 0;
        assert!(check_edges(&back).unwrap_err().contains("edge 0.1"));
        let mut unknown = twice();
        unknown[1].nodes[0] = exchange(2);
        assert!(check_edges(&unknown).unwrap_err().contains("takes no edge"));
    }

    #[test]
    fn only_the_root_feeds_nothing() {
        let mut idle = twice();
        idle[1].nodes[2].inputs = vec![0];
        assert!(check_edges(&idle).unwrap_err().contains("node 1.1 goes nowhere"));
        let mut middle = twice();
        middle[1].nodes[2].op = Operator::Sink(Sink);
        assert!(check_edges(&middle).unwrap_err().contains("node 1.2 is a root"));
    }
}
