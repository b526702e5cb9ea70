//! `SELECT NULL` has type text.

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::logical_expr::{Cast, Expr, LogicalPlan, LogicalPlanBuilder};
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;

use crate::bind::rewrites::plan::PlanRewrite;

/// Gives a statement's columns that are nothing but NULL the type text.
pub const TYPE_NULLS: PlanRewrite = PlanRewrite::new("type nulls", |plan, _| typed(plan));

fn typed(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    let schema = Arc::clone(plan.schema());
    if !schema.fields().iter().any(|f| *f.data_type() == DataType::Null) {
        return Ok(plan);
    }
    let exprs = schema.iter().map(|(qualifier, field)| {
        let column = Expr::Column((qualifier, field).into());
        match field.data_type() {
            DataType::Null => {
                Expr::Cast(Cast::new(Box::new(column), DataType::Utf8)).alias(field.name())
            }
            _ => column,
        }
    });
    LogicalPlanBuilder::from(plan)
        .project(exprs.collect::<Vec<_>>())
        .and_then(|b| b.build())
        .map_err(sql_error_from_datafusion)
}

#[cfg(test)]
mod tests {
    use millrace_common::SqlType;

    use crate::bind::rewrites::testing::bound;

    #[test]
    fn a_null_of_no_type_is_text() {
        assert_eq!(bound("SELECT NULL, 1").unwrap().types, [SqlType::Text, SqlType::Int]);
    }
}
