//! Batches of fewer rows for queries whose rows are wide.
//!
//! A batch has thousands of rows and is made in one piece. A text of a megabyte that is the same for all of
//! them, or that a function makes for each, would take gigabytes that no budget sees coming: so a batch has
//! as many rows as fit.

use std::sync::Arc;

use arrow::array::{RecordBatch, UInt32Array};
use arrow::datatypes::Schema;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNodeRecursion};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::logical_expr::ColumnarValue;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::{Column, Literal};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::execution_plan::reset_plan_states;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::union::UnionExec;
use datafusion::prelude::SessionConfig;
use futures::{StreamExt, stream};
use millrace_common::delta::take_rows;
use millrace_functions::interrupt;
use millrace_functions::size_limits;
use millrace_functions::tree::Walk;

use super::one_input::{OneInput, Operation, StreamResult};
use super::wide_rows::{Measured, Outcome, measured};

/// Constants below this are not looked at.
const SMALL_BYTES: usize = 16 << 10;
/// By what a batch's rows become fewer when they turn out to be too wide.
const FEWER: usize = 16;

/// A plan and what it runs in, with batches of as many rows as its constants let fit.
pub fn fitted(
    plan: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
) -> Result<(Arc<dyn ExecutionPlan>, Arc<TaskContext>)> {
    let (plan, context) = match is_volatile(&plan)? {
        true => (plan, context),
        false => match measured(plan)?.data {
            plan if plan.any(|node| Ok(node.is::<Measured>()))? => {
                let context = renewed(&context, context.session_config());
                (plan, context)
            }
            plan => (plan, context),
        },
    };
    let width = constant_bytes(&plan)?;
    if width < SMALL_BYTES {
        return Ok((plan, context));
    }
    let rows = (size_limits::most_bytes() / width).max(1);
    match rows < context.session_config().batch_size() {
        true => with_rows(plan, &context, rows),
        false => Ok((plan, context)),
    }
}

/// The same plan from its beginning with fewer rows in a batch, if that may help where an error says that a
/// batch was too large. What changes something each time it is computed is not computed again.
pub fn narrower(
    plan: &Arc<dyn ExecutionPlan>,
    context: &TaskContext,
    e: &DataFusionError,
) -> Result<Option<(Arc<dyn ExecutionPlan>, Arc<TaskContext>)>> {
    let rows = context.session_config().batch_size();
    if rows == 1 || !is_too_large(e) || is_volatile(plan)? {
        return Ok(None);
    }
    let plan = reset_plan_states(Arc::clone(plan))?;
    with_rows(plan, context, (rows / FEWER).max(1)).map(Some)
}

/// Whether an error says that a batch was too large.
pub fn is_too_large(e: &DataFusionError) -> bool {
    match e.find_root() {
        DataFusionError::External(e) => size_limits::is_too_large(e.as_ref()),
        _ => false,
    }
}

fn with_rows(
    plan: Arc<dyn ExecutionPlan>,
    context: &TaskContext,
    rows: usize,
) -> Result<(Arc<dyn ExecutionPlan>, Arc<TaskContext>)> {
    let plan = plan.rewrite_up(|node| with_rows_of(node, rows));
    let config = context.session_config().clone().with_batch_size(rows);
    Ok((plan.data()?, renewed(context, &config)))
}

/// What another run of a plan runs in.
fn renewed(context: &TaskContext, config: &SessionConfig) -> Arc<TaskContext> {
    let config = config.clone().with_extension(Arc::new(Outcome::default()));
    Arc::new(TaskContext::new(
        context.task_id(),
        context.session_id(),
        config,
        context.scalar_functions().clone(),
        context.higher_order_functions().clone(),
        context.aggregate_functions().clone(),
        context.window_functions().clone(),
        context.runtime_env(),
    ))
}

/// A node that makes batches of so many rows out of such batches. Most nodes go by the number that the query
/// asks for only in part: a join gives the rows without a match, a group of a partial sort or an aggregate's
/// largest values in one piece.
fn with_rows_of(
    node: Arc<dyn ExecutionPlan>,
    rows: usize,
) -> Result<Transformed<Arc<dyn ExecutionPlan>>> {
    if let Some(narrow) = node.downcast_ref::<Narrow>() {
        // What it divides has just been divided.
        return Ok(match narrow.input.is::<Narrow>() {
            true => Transformed::yes(Arc::clone(&narrow.input)),
            false => Transformed::no(node),
        });
    }
    if let Some(filter) = node.downcast_ref::<FilterExec>() {
        // It puts batches together to as many rows as it was planned with.
        return Ok(Transformed::yes(Arc::new(filter.with_batch_size(rows)?)));
    }
    if keeps_batches(&node) {
        return Ok(Transformed::no(node));
    }
    Ok(Transformed::yes(Arc::new(OneInput::new(Divide, node))))
}

/// Whether a node's batches have no more rows than those that it is given.
fn keeps_batches(node: &Arc<dyn ExecutionPlan>) -> bool {
    node.is::<ProjectionExec>()
        || node.is::<Measured>()
        || node.is::<CoalescePartitionsExec>()
        || node.is::<UnionExec>()
        || node.is::<LocalLimitExec>()
        || node.is::<GlobalLimitExec>()
}

/// Bytes that the large constants of a plan take in a row.
fn constant_bytes(plan: &Arc<dyn ExecutionPlan>) -> Result<usize> {
    let mut bytes = 0usize;
    plan.walk(|node| {
        node.apply_expressions(&mut |e| {
            bytes = bytes.saturating_add(widths(e)?);
            Ok(TreeNodeRecursion::Continue)
        })?;
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(bytes)
}

/// Of the constants that an expression is made of. Those that fail do so when they are needed.
fn widths(e: &Arc<dyn PhysicalExpr>) -> Result<usize> {
    if let Some(literal) = e.downcast_ref::<Literal>() {
        return Ok(large(literal.value().size()));
    }
    if e.is::<Column>() {
        return Ok(0);
    }
    let children = e.children();
    if is_constant(e) && !children.is_empty() {
        interrupt::check().map_err(|e| DataFusionError::External(Box::new(e)))?;
        let row = RecordBatch::new_empty(Arc::new(Schema::empty()));
        return Ok(match e.evaluate(&row) {
            Ok(ColumnarValue::Scalar(value)) => large(value.size()),
            Ok(ColumnarValue::Array(_)) | Err(_) => 0,
        });
    }
    children.into_iter().try_fold(0usize, |sum, e| Ok(sum.saturating_add(widths(e)?)))
}

fn large(bytes: usize) -> usize {
    if bytes < SMALL_BYTES { 0 } else { bytes }
}

/// Whether all that it is made of are literals.
fn is_constant(e: &Arc<dyn PhysicalExpr>) -> bool {
    let children = e.children();
    match children.is_empty() {
        true => e.is::<Literal>(),
        false => !e.is_volatile_node() && children.into_iter().all(is_constant),
    }
}

fn is_volatile(plan: &Arc<dyn ExecutionPlan>) -> Result<bool> {
    let mut volatile = false;
    plan.walk(|node| {
        node.apply_expressions(&mut |e| {
            volatile |= datafusion::physical_expr_common::physical_expr::is_volatile(e);
            Ok(TreeNodeRecursion::Continue)
        })?;
        Ok(if volatile { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(volatile)
}

/// Divides batches into those that the query asks for.
#[derive(Clone, Debug)]
struct Divide;

type Narrow = OneInput<Divide>;

impl Operation for Divide {
    const NAME: &'static str = "Narrow";
    const KEEPS_ORDER: bool = true;

    fn execute(node: &OneInput<Self>, partition: usize, context: Arc<TaskContext>) -> StreamResult {
        let rows = context.session_config().batch_size();
        let batches = node.input.execute(partition, context)?;
        let divided = batches.flat_map(move |batch| match batch {
            Ok(batch) if batch.num_rows() <= rows => stream::iter([Ok(batch)]).boxed(),
            Ok(batch) => {
                let starts = (0..batch.num_rows()).step_by(rows);
                stream::iter(starts.map(move |at| part(&batch, at, rows))).boxed()
            }
            Err(e) => stream::iter([Err(e)]).boxed(),
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(node.input.schema(), divided)))
    }
}

/// So many rows from one on, as a batch of its own: what counts a batch's memory counts all of its buffers.
fn part(batch: &RecordBatch, at: usize, rows: usize) -> Result<RecordBatch> {
    let end = (at + rows).min(batch.num_rows());
    let indices = UInt32Array::from_iter_values((at..end).map(|i| i as u32));
    Ok(take_rows(batch, &indices)?)
}
