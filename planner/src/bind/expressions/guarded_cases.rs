//! CASE of booleans, whose branches are computed for their own rows only, as in PostgreSQL.
//!
//! DataFusion makes `AND` and `OR` of it, which compute all of them for all rows: `CASE WHEN x <> 0 THEN 3 /
//! x > 1 END` would divide by zero. With something to compare its conditions with it stays what it is.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::Result;
use datafusion::common::tree_node::Transformed;
use datafusion::logical_expr::expr::Case;
use datafusion::logical_expr::{Expr, ExprSchemable, LogicalPlan, lit};
use millrace_common::SqlError;
use millrace_functions::tree::Walk;

use crate::bind::rewrites::plan::{PlanRewrite, change_expressions};

/// Computes branches of boolean CASEs for their own rows only.
pub const GUARD_CASES: PlanRewrite = PlanRewrite::new("guard cases", |plan, _| rewrite(plan));

fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    change_expressions(plan, is_concerned, |e, schema| match e {
        Expr::Case(case) if guards(&case)? && is_boolean(&case, schema)? => {
            let expr = Some(Box::new(lit(true)));
            Ok(Transformed::yes(Expr::Case(Case { expr, ..case })))
        }
        e => Ok(Transformed::no(e)),
    })
}

fn is_concerned(e: &Expr) -> Result<bool> {
    match e {
        Expr::Case(case) => guards(case),
        _ => Ok(false),
    }
}

fn is_boolean(case: &Case, schema: &datafusion::common::DFSchema) -> Result<bool> {
    match case.when_then_expr.first() {
        Some((_, then)) => Ok(then.get_type(schema)? == DataType::Boolean),
        None => Ok(false),
    }
}

/// Whether a branch, or a condition behind the first, computes something that may fail.
fn guards(case: &Case) -> Result<bool> {
    if case.expr.is_some() {
        return Ok(false);
    }
    let branches = case.when_then_expr.iter().map(|(_, then)| then);
    let conditions = case.when_then_expr.iter().skip(1).map(|(when, _)| when);
    for e in branches.chain(conditions).chain(&case.else_expr) {
        if e.any(|e| Ok(matches!(e, Expr::ScalarFunction(_) | Expr::Cast(_))))? {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    /// Where it is 0 nothing is divided by it.
    #[test]
    fn a_branch_is_computed_for_its_own_rows() {
        let sql = "SELECT count(*) FROM (VALUES (0), (2)) AS v (x) \
                   WHERE CASE WHEN x <> 0 THEN 4 / x > 1 END";
        assert_eq!(rows(sql), ["1"]);
    }
}
