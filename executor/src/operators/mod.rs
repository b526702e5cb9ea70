//! The operators of the job graph; see [`build`].

use arrow::datatypes::SchemaRef;
use millrace_planner::graph::Node;

use crate::error::ExecError;
use crate::operator::{Operator, OperatorContext};

/// Builds the instance of a node that one task drives. Leaves and roots are the runtime's.
pub fn build(
    node: &Node,
    input_schemas: &[SchemaRef],
    ctx: &OperatorContext<'_>,
) -> Result<Box<dyn Operator>, ExecError> {
    let _ = (input_schemas, ctx);
    Err(ExecError::internal(format!("no operator for {:?}", node.op)))
}
