//! Scalar subqueries that may have no row. Their value is NULL then, which DataFusion's type of one whose
//! column is never NULL does not allow for.
//!
//! Such a subquery becomes the right side of an outer join with one row of no columns: the same value, of a type that
//! may be NULL. Only those that do not depend on the query around them are left by now; in views they are joins anyway.

use std::sync::Arc;

use datafusion::common::tree_node::Transformed;
use datafusion::common::{JoinType, Result};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder, Subquery, lit};
use millrace_common::SqlError;
use millrace_functions::tree::Walk;

use crate::bind::rewrites::plan::{PlanRewrite, change_nodes};

/// Lets scalar subqueries that may have no row be NULL, in batch: in views they are joins anyway.
pub const ALLOW_EMPTY_SCALARS: PlanRewrite =
    PlanRewrite::in_batch("allow empty scalars", |plan, _| guard(plan));

/// Gives the scalar subqueries of a plan types that may be NULL.
fn guard(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    change_nodes(plan, |node| {
        let names = NamePreserver::new(&node);
        let done = node.map_expressions(|e| {
            let name = names.save(&e);
            let new = e.rewrite_up(|e| match e {
                Expr::ScalarSubquery(subquery) if is_concerned(&subquery) => {
                    Ok(Transformed::yes(Expr::ScalarSubquery(outer(subquery)?)))
                }
                e => Ok(Transformed::no(e)),
            })?;
            Ok(new.update_data(|e| name.restore(e)))
        })?;
        // What is computed of it may be NULL too, here and further up.
        done.map_data(LogicalPlan::recompute_schema)
    })
}

fn is_concerned(subquery: &Subquery) -> bool {
    let never_null = subquery.subquery.schema().fields().iter().any(|f| !f.is_nullable());
    never_null && subquery.outer_ref_columns.is_empty() && !has_one_row(&subquery.subquery)
}

/// Whether a query has one row whatever there is to read.
fn has_one_row(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::Projection(p) => has_one_row(&p.input),
        LogicalPlan::SubqueryAlias(a) => has_one_row(&a.input),
        LogicalPlan::Sort(s) => s.fetch.is_none() && has_one_row(&s.input),
        LogicalPlan::Aggregate(a) => a.group_expr.is_empty(),
        LogicalPlan::EmptyRelation(e) => e.produce_one_row,
        _ => false,
    }
}

fn outer(subquery: Subquery) -> Result<Subquery> {
    let inner = Arc::unwrap_or_clone(subquery.subquery);
    let one = LogicalPlanBuilder::empty(true);
    let plan = one.join_on(inner, JoinType::Left, [lit(true)])?.build()?;
    Ok(Subquery { subquery: Arc::new(plan), ..subquery })
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    #[test]
    fn a_subquery_of_no_row_is_null() {
        let sql = "SELECT coalesce((SELECT a FROM (VALUES (1)) AS v (a) WHERE a > 1), 7)";
        assert_eq!(rows(sql), ["7"]);
    }
}
