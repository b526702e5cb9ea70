//! `SET expression_errors = 'null'`: a query computes what a view of it would hold.
//!
//! Views go on where an expression fails on a row: its value is NULL there. Under this setting a batch
//! query is optimised by the views' rules and its projections, filters and conditions of joins are evaluated
//! in the same way: at once, and only when that fails in halves, down to the failing rows. What the other
//! nodes compute is in projections below them.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, new_null_array};
use arrow::datatypes::{DataType, FieldRef, Schema};
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

use crate::query::conditions::whole;
use crate::query::node_rule::{Changed, NodeRule};

/// NULL where the inner expression fails.
#[derive(Debug, Eq)]
struct NullOnError {
    inner: Arc<dyn PhysicalExpr>,
}

impl PartialEq for NullOnError {
    fn eq(&self, other: &NullOnError) -> bool {
        self.inner.eq(&other.inner)
    }
}

impl Hash for NullOnError {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.inner.hash(state);
    }
}

fn wrap(expr: &Arc<dyn PhysicalExpr>) -> Arc<dyn PhysicalExpr> {
    let safe = expr.downcast_ref::<Column>().is_some() || expr.downcast_ref::<Literal>().is_some();
    match safe {
        true => expr.clone(),
        false => Arc::new(NullOnError { inner: expr.clone() }),
    }
}

impl NullOnError {
    fn halves(&self, batch: &RecordBatch) -> Result<ArrayRef> {
        let rows = batch.num_rows();
        // The end of the statement is no failure of the expression.
        interrupt::check().map_err(|e| DataFusionError::External(Box::new(e)))?;
        match self.inner.evaluate(batch).and_then(|v| v.into_array(rows)) {
            Ok(array) => Ok(array),
            Err(_) if rows <= 1 => {
                interrupt::check().map_err(|e| DataFusionError::External(Box::new(e)))?;
                Ok(new_null_array(&self.inner.data_type(&batch.schema())?, rows))
            }
            Err(_) => {
                let left = self.halves(&batch.slice(0, rows / 2))?;
                let right = self.halves(&batch.slice(rows / 2, rows - rows / 2))?;
                Ok(arrow::compute::concat(&[left.as_ref() as &dyn Array, right.as_ref()])?)
            }
        }
    }
}

impl fmt::Display for NullOnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "null_on_error({})", self.inner)
    }
}

impl PhysicalExpr for NullOnError {
    fn data_type(&self, schema: &Schema) -> Result<DataType> {
        self.inner.data_type(schema)
    }

    fn nullable(&self, _: &Schema) -> Result<bool> {
        Ok(true)
    }

    fn return_field(&self, schema: &Schema) -> Result<FieldRef> {
        Ok(Arc::new(self.inner.return_field(schema)?.as_ref().clone().with_nullable(true)))
    }

    fn evaluate(&self, batch: &RecordBatch) -> Result<ColumnarValue> {
        match self.inner.evaluate(batch) {
            Ok(value) => Ok(value),
            Err(_) => self.halves(batch).map(ColumnarValue::Array),
        }
    }

    fn children(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        vec![&self.inner]
    }

    fn with_new_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn PhysicalExpr>>,
    ) -> Result<Arc<dyn PhysicalExpr>> {
        let inner = children.pop().unwrap_or_else(|| self.inner.clone());
        Ok(Arc::new(NullOnError { inner }))
    }

    fn fmt_sql(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt_sql(f)
    }
}

/// Wraps the expressions of a plan. Runs before DataFusion's rules, which merge projections: what
/// one projection makes NULL stays NULL for the next. Columns become nullable.
pub const NULL_ON_ERROR: NodeRule =
    NodeRule { name: "null_on_error", keeps_schema: false, change: wrapped };

fn wrapped(node: Arc<dyn ExecutionPlan>) -> Changed {
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
        let join = SortMergeJoinExec::try_new(
            Arc::clone(join.left()),
            Arc::clone(join.right()),
            join.on().to_vec(),
            Some(safe(filter)),
            join.join_type(),
            join.sort_options().to_vec(),
            join.null_equality(),
        )?;
        return Ok(Some(Arc::new(join)));
    }
    Ok(None)
}

fn safe(filter: &JoinFilter) -> JoinFilter {
    let columns = filter.column_indices().to_vec();
    JoinFilter::new(wrap(filter.expression()), columns, Arc::clone(filter.schema()))
}
