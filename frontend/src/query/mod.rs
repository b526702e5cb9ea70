//! Batch queries: a bound plan over snapshots, run by DataFusion.
//!
//! A statement binds against one catalog snapshot and reads one epoch. Scans are bound before the
//! epoch is known (names decide which relations are asked for); they share a cell that is filled
//! between planning and execution. Plans run on the frontend's query runtime, never on the one that
//! serves connections; results cross over through a short channel, so a slow client holds back its
//! query and nothing else. Dropping the stream aborts the query; joins, which may go on for long without awaiting
//! anything, see to it themselves that they end and that others have their turn.

mod batch_size;
mod cancellation;
pub mod catalog_view;
mod conditions;
pub mod engine;
mod execution;
mod grouping_sets;
pub mod index;
mod interruptible;
mod large_limits;
mod node_rule;
pub mod null_errors;
mod one_input;
mod ordered_limits;
pub mod overlay;
pub mod planning;
pub mod pool;
pub mod scan_parts;
pub mod short_plans;
pub mod snapshot_table;
mod wide_rows;
mod wrapped_expr;
mod written_order;

use std::sync::Arc;

use datafusion::common::Result;
use datafusion::physical_plan::{ChildrenPropertiesMode, ExecutionPlan, ReplaceChildrenOptions};

pub use catalog_view::SessionCatalog;
pub use engine::{ExpressionErrors, QueryEngine};

/// A node of a plan over other inputs.
fn over(
    node: Arc<dyn ExecutionPlan>,
    inputs: Vec<Arc<dyn ExecutionPlan>>,
) -> Result<Arc<dyn ExecutionPlan>> {
    node.replace_children(inputs, ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute))
}
