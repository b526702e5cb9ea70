//! In which order the inputs of a job come in where that matters: what a lookup looks up before what it is
//! looked up for, within an epoch and in the first scan.

use millrace_graph::{Exchange, Fragment, JobGraph, Operator as Op, Role, shares};

use crate::error::ExecError;

/// See the module.
pub struct Order {
    /// Of the job's inputs, numbered by fragment and node: an input scans when all of earlier stages are done.
    pub stages: Vec<u32>,
    /// By fragment and node: the leaves of the fragment that a leaf waits for in every epoch.
    after: Vec<Vec<Vec<usize>>>,
}

impl Order {
    /// Fails where it might never end: a fragment that fed both sides of a lookup would wait, its channel to the one
    /// full, for the other to have all of the epoch. Graphs with lookups are trees.
    pub fn of(graph: &JobGraph) -> Result<Order, ExecError> {
        let mut nodes = graph.fragments.iter().flat_map(|f| &f.nodes);
        let looks_up = nodes.any(|n| matches!(n.op, Op::Lookup(_)));
        let exits = graph.fragments.iter().map(|f| f.outputs.len()).max().unwrap_or(0);
        if looks_up && (exits > 1 || shares(&graph.fragments)) {
            return Err(ExecError::internal("a graph with a lookup shares a node's output"));
        }
        let mut numbers = Vec::with_capacity(graph.fragments.len());
        let mut inputs = 0;
        for fragment in &graph.fragments {
            let mut number = |op: &Op| {
                inputs += u32::from(op.role() == Role::Input);
                inputs.saturating_sub(1)
            };
            numbers.push(fragment.nodes.iter().map(|n| number(&n.op)).collect::<Vec<_>>());
        }
        let mut stages = vec![0; inputs as usize];
        if looks_up && let Some((root, fragment)) = graph.fragments.iter().enumerate().next_back() {
            let last = fragment.nodes.len().saturating_sub(1);
            Stages { graph, numbers: &numbers, stages: &mut stages }.node(root, last, 0);
        }
        Ok(Order { stages, after: graph.fragments.iter().map(leaves_after).collect() })
    }

    pub fn stage(&self, input: u32) -> u32 {
        self.stages.get(input as usize).copied().unwrap_or(0)
    }

    pub fn after(&self, fragment: usize, node: usize) -> &[usize] {
        self.after.get(fragment).and_then(|f| f.get(node)).map_or(&[], Vec::as_slice)
    }
}

struct Stages<'a> {
    graph: &'a JobGraph,
    numbers: &'a [Vec<u32>],
    stages: &'a mut [u32],
}

impl Stages<'_> {
    /// Puts the inputs below a node into `stage` and later ones; the last one used.
    fn node(&mut self, fragment: usize, node: usize, stage: u32) -> u32 {
        let graph = self.graph;
        let of = &graph.fragments[fragment].nodes[node];
        match (&of.op, of.inputs.as_slice()) {
            (Op::Exchange(Exchange { fragment: from, output }), _) if *from < fragment => {
                match graph.fragments[*from].outputs.get(*output) {
                    Some(edge) => self.node(*from, edge.from, stage),
                    None => stage,
                }
            }
            (Op::Lookup(_), &[left, right]) if left < node && right < node => {
                let looked_up = self.node(fragment, right, stage);
                self.node(fragment, left, looked_up + 1)
            }
            (op, inputs) => {
                if op.role() == Role::Input {
                    let number = self.numbers[fragment][node] as usize;
                    self.stages[number] = stage;
                }
                let below = inputs.iter().filter(|i| **i < node);
                below.map(|&i| self.node(fragment, i, stage)).max().unwrap_or(stage)
            }
        }
    }
}

/// For every leaf of a fragment, which others it waits for.
fn leaves_after(fragment: &Fragment) -> Vec<Vec<usize>> {
    let mut after = vec![Vec::new(); fragment.nodes.len()];
    for (n, node) in fragment.nodes.iter().enumerate() {
        if let (Op::Lookup(_), &[left, right]) = (&node.op, node.inputs.as_slice())
            && left < n
            && right < n
        {
            let first = leaves(fragment, right);
            for leaf in leaves(fragment, left) {
                after[leaf].extend(&first);
            }
        }
    }
    after
}

/// The leaves below a node; a node's inputs precede it.
fn leaves(fragment: &Fragment, node: usize) -> Vec<usize> {
    match fragment.nodes[node].inputs.as_slice() {
        [] => vec![node],
        inputs => inputs.iter().filter(|i| **i < node).flat_map(|&i| leaves(fragment, i)).collect(),
    }
}
