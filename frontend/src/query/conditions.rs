//! Conditions of joins that are computed as they are written.
//!
//! DataFusion computes what a condition reads of one side for each of that side's rows, before the join. What is computed
//! there fails also where the condition would never have asked for it: `a.x <> 0 AND b.y > 1 / a.x`. So such a condition is
//! one expression, of which only the columns are seen.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, FieldRef, Schema, SchemaRef};
use datafusion::common::Result;
use datafusion::common::tree_node::Transformed;
use datafusion::logical_expr::ColumnarValue;
use datafusion::physical_expr::expressions::{CaseExpr, Column};
use datafusion::physical_expr::{PhysicalExpr, ScalarFunctionExpr};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::joins::utils::JoinFilter;
use datafusion::physical_plan::joins::{
    NestedLoopJoinExec, NestedLoopJoinExecBuilder, SortMergeJoinExec,
};
use millrace_functions::tree::Walk;

use crate::query::node_rule::{Changed, NodeRule};

/// Functions that hardly ever fail: ranges of times and the like are joined by them.
const HARMLESS: [&str; 3] = ["pg_add", "pg_sub", "pg_mul"];

/// Runs before DataFusion's rules.
pub const WHOLE_CONDITIONS: NodeRule = NodeRule::new("whole_conditions", in_one_piece);

fn in_one_piece(node: Arc<dyn ExecutionPlan>) -> Changed {
    let join = node.downcast_ref::<NestedLoopJoinExec>();
    let Some((join, filter)) = join.and_then(|join| Some((join, join.filter()?))) else {
        return Ok(Transformed::no(node));
    };
    if !may_fail(filter.expression())? {
        return Ok(Transformed::no(node));
    }
    let builder = NestedLoopJoinExecBuilder::from(join).with_filter(Some(whole(filter)));
    Ok(Transformed::yes(Arc::new(builder.build()?) as Arc<dyn ExecutionPlan>))
}

fn may_fail(condition: &Arc<dyn PhysicalExpr>) -> Result<bool> {
    condition.any(|e| {
        let function = e.downcast_ref::<ScalarFunctionExpr>();
        Ok(e.is::<CaseExpr>() || function.is_some_and(|f| !HARMLESS.contains(&f.name())))
    })
}

/// The same join with another condition.
pub fn merge_join(join: &SortMergeJoinExec, filter: JoinFilter) -> Result<Arc<dyn ExecutionPlan>> {
    Ok(Arc::new(SortMergeJoinExec::try_new(
        Arc::clone(join.left()),
        Arc::clone(join.right()),
        join.on().to_vec(),
        Some(filter),
        join.join_type(),
        join.sort_options().to_vec(),
        join.null_equality(),
    )?))
}

/// The same condition in one piece.
pub fn whole(filter: &JoinFilter) -> JoinFilter {
    let columns = filter.schema().fields().iter().enumerate();
    let columns = columns.map(|(i, f)| Arc::new(Column::new(f.name(), i)) as Arc<dyn PhysicalExpr>);
    let condition = Whole {
        columns: columns.collect(),
        schema: Arc::clone(filter.schema()),
        inner: Arc::clone(filter.expression()),
    };
    let indices = filter.column_indices().to_vec();
    JoinFilter::new(Arc::new(condition), indices, Arc::clone(filter.schema()))
}

#[derive(Debug)]
struct Whole {
    /// Where the columns of the condition are now.
    columns: Vec<Arc<dyn PhysicalExpr>>,
    /// What it was made for.
    schema: SchemaRef,
    inner: Arc<dyn PhysicalExpr>,
}

impl PartialEq for Whole {
    fn eq(&self, other: &Whole) -> bool {
        self.columns.eq(&other.columns) && self.inner.eq(&other.inner)
    }
}

impl Eq for Whole {}

impl Hash for Whole {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.columns.hash(state);
        self.inner.hash(state);
    }
}

impl fmt::Display for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.inner, f)
    }
}

impl PhysicalExpr for Whole {
    fn data_type(&self, _: &Schema) -> Result<DataType> {
        self.inner.data_type(&self.schema)
    }

    fn nullable(&self, _: &Schema) -> Result<bool> {
        self.inner.nullable(&self.schema)
    }

    fn return_field(&self, _: &Schema) -> Result<FieldRef> {
        self.inner.return_field(&self.schema)
    }

    fn evaluate(&self, batch: &RecordBatch) -> Result<ColumnarValue> {
        let rows = batch.num_rows();
        let values = self.columns.iter().map(|c| c.evaluate(batch)?.into_array(rows));
        let values = values.collect::<Result<Vec<_>>>()?;
        let options = arrow::array::RecordBatchOptions::new().with_row_count(Some(rows));
        let fields =
            self.schema.fields().iter().zip(&values).map(|(f, v)| {
                f.as_ref().clone().with_nullable(f.is_nullable() || v.null_count() > 0)
            });
        let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        self.inner.evaluate(&RecordBatch::try_new_with_options(schema, values, &options)?)
    }

    fn children(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        self.columns.iter().collect()
    }

    fn with_new_children(
        self: Arc<Self>,
        columns: Vec<Arc<dyn PhysicalExpr>>,
    ) -> Result<Arc<dyn PhysicalExpr>> {
        let (schema, inner) = (Arc::clone(&self.schema), Arc::clone(&self.inner));
        Ok(Arc::new(Whole { columns, schema, inner }))
    }

    /// Nobody is to compute it elsewhere.
    fn is_volatile_node(&self) -> bool {
        true
    }

    fn fmt_sql(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt_sql(f)
    }
}
