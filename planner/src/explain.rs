//! A job graph as text.

use datafusion::physical_expr_common::physical_expr::fmt_sql;
use millrace_common::RelationId;

use crate::graph::{ExprRef, JobGraph};

/// An expression with column names, as SQL.
pub fn expr_text(e: &ExprRef) -> String {
    fmt_sql(e.as_ref()).to_string()
}

/// One line an operator, inputs indented below. `names` gives the name of a relation.
pub fn explain_graph(
    _graph: &JobGraph,
    _names: &dyn Fn(RelationId) -> Option<String>,
) -> Vec<String> {
    Vec::new()
}
