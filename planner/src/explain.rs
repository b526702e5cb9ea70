//! A job graph as text.

use millrace_common::RelationId;

use crate::graph::JobGraph;

/// One line an operator, inputs indented below. `names` gives the name of a relation.
pub fn explain_graph(
    _graph: &JobGraph,
    _names: &dyn Fn(RelationId) -> Option<String>,
) -> Vec<String> {
    Vec::new()
}
