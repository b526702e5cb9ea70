//! PostgreSQL's functions and operators where DataFusion's differ.
use datafusion::common::Result;
use datafusion::execution::FunctionRegistry;

/// Registers every function that a plan of ours may hold.
pub fn register_all(_registry: &mut dyn FunctionRegistry) -> Result<()> {
    Ok(())
}
