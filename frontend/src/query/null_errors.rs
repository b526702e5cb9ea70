//! `SET expression_errors = 'null'`: a query computes what a view of it would hold.
//!
//! Views go on where an expression fails on a row: its value is NULL there. Under this setting a batch
//! query is optimised by the views' rules and its projections, filters and conditions of joins are evaluated
//! in the same way: at once, and only when that fails in halves, down to the failing rows. What the other
//! nodes compute is in projections below them.

use std::fmt;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, new_null_array};
use datafusion::common::tree_node::Transformed;
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::ColumnarValue;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::{Column, Literal};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::joins::utils::JoinFilter;
use datafusion::physical_plan::joins::{
    HashJoinExec, NestedLoopJoinExec, NestedLoopJoinExecBuilder, SortMergeJoinExec,
};
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
use millrace_functions::interrupt;

use crate::query::conditions::{merge_join, whole};
use crate::query::node_rule::{Changed, NodeRule};
use crate::query::wrapped_expr::{Around, wrapped};

/// NULL where the expression inside fails.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct NullOnError;

fn wrap(expr: &Arc<dyn PhysicalExpr>) -> Arc<dyn PhysicalExpr> {
    let safe = expr.downcast_ref::<Column>().is_some() || expr.downcast_ref::<Literal>().is_some();
    if safe { expr.clone() } else { wrapped(expr, NullOnError) }
}

fn halves(expr: &dyn PhysicalExpr, batch: &RecordBatch) -> Result<ArrayRef> {
    let rows = batch.num_rows();
    // The end of the statement is no failure of the expression.
    interrupt::check().map_err(|e| DataFusionError::External(Box::new(e)))?;
    match expr.evaluate(batch).and_then(|v| v.into_array(rows)) {
        Ok(array) => Ok(array),
        Err(_) if rows <= 1 => {
            interrupt::check().map_err(|e| DataFusionError::External(Box::new(e)))?;
            Ok(new_null_array(&expr.data_type(&batch.schema())?, rows))
        }
        Err(_) => {
            let left = halves(expr, &batch.slice(0, rows / 2))?;
            let right = halves(expr, &batch.slice(rows / 2, rows - rows / 2))?;
            Ok(arrow::compute::concat(&[left.as_ref() as &dyn Array, right.as_ref()])?)
        }
    }
}

impl Around for NullOnError {
    const ADDS_NULLS: bool = true;

    fn evaluate(&self, inner: &dyn PhysicalExpr, batch: &RecordBatch) -> Result<ColumnarValue> {
        match inner.evaluate(batch) {
            Ok(value) => Ok(value),
            Err(_) => halves(inner, batch).map(ColumnarValue::Array),
        }
    }

    fn show(&self, inner: &dyn PhysicalExpr, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "null_on_error({inner})")
    }
}

/// Wraps the expressions of a plan. Runs before DataFusion's rules, which merge projections: what
/// one projection makes NULL stays NULL for the next. Columns become nullable.
pub const NULL_ON_ERROR: NodeRule = NodeRule::new("null_on_error", guarded).of_other_columns();

fn guarded(node: Arc<dyn ExecutionPlan>) -> Changed {
    if let Some(p) = node.downcast_ref::<ProjectionExec>() {
        return projection(p).map(Transformed::yes);
    }
    if let Some(f) = node.downcast_ref::<FilterExec>()
        && f.projection().is_none()
    {
        let filter = FilterExec::try_new(wrap(f.predicate()), f.input().clone())?;
        return Ok(Transformed::yes(Arc::new(filter)));
    }
    if let Some(join) = joined(&node)? {
        return Ok(Transformed::yes(join));
    }
    Ok(Transformed::no(node))
}

fn projection(p: &ProjectionExec) -> Result<Arc<dyn ExecutionPlan>> {
    let exprs =
        p.expr().iter().map(|e| ProjectionExpr { expr: wrap(&e.expr), alias: e.alias.clone() });
    Ok(Arc::new(ProjectionExec::try_new(exprs.collect::<Vec<_>>(), p.input().clone())?))
}

/// A join whose condition is not true where it fails.
fn joined(node: &Arc<dyn ExecutionPlan>) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    if let Some(join) = node.downcast_ref::<NestedLoopJoinExec>()
        && let Some(filter) = join.filter()
    {
        let condition = whole(&safe(filter));
        let builder = NestedLoopJoinExecBuilder::from(join).with_filter(Some(condition));
        return Ok(Some(Arc::new(builder.build()?)));
    }
    if let Some(join) = node.downcast_ref::<HashJoinExec>()
        && let Some(filter) = join.filter()
    {
        return join.builder().with_filter(Some(safe(filter))).build_exec().map(Some);
    }
    if let Some(join) = node.downcast_ref::<SortMergeJoinExec>()
        && let Some(filter) = join.filter()
    {
        return merge_join(join, safe(filter)).map(Some);
    }
    Ok(None)
}

fn safe(filter: &JoinFilter) -> JoinFilter {
    let columns = filter.column_indices().to_vec();
    JoinFilter::new(wrap(filter.expression()), columns, Arc::clone(filter.schema()))
}
