//! State that is read by range when a watermark has passed it: no row announces it, the watermark does.

use super::NodeId;
use crate::{BufferMode, JobGraph, Operator};

/// A range of an operator's state: of a table ordered by an instant, what a watermark has just passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClosedRange {
    /// Its fragment and node.
    pub operator: NodeId,
    /// The column of its input whose watermark it is.
    pub column: usize,
    /// The state table.
    pub table: usize,
}

/// All of a job, in the order of the operators: what EMIT ON WINDOW CLOSE holds back, and the times at which sessions are
/// over and rows of ASOF joins may go.
pub fn closed_ranges(graph: &JobGraph) -> Vec<ClosedRange> {
    let nodes = |f: usize| graph.fragments[f].nodes.iter().enumerate();
    let all =
        (0..graph.fragments.len()).flat_map(|f| nodes(f).map(move |(n, node)| ((f, n), node)));
    let range = |operator, op: &Operator| match op {
        Operator::Buffer(b) if b.mode == BufferMode::WindowClose => {
            Some(ClosedRange { operator, column: b.column, table: b.table })
        }
        Operator::Window(w) => {
            let closing = w.state.closing.as_ref()?;
            Some(ClosedRange { operator, column: closing.column, table: closing.table })
        }
        _ => None,
    };
    all.filter_map(|(operator, node)| range(operator, &node.op)).collect()
}
