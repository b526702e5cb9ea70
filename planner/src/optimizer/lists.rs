//! Lists whose items have values of their own for each row, although DataFusion would take them for constants.
//!
//! It makes a set of `x IN (a, b)` when each item has one value for a batch without rows. That of a CASE may be the one of its
//! last branch, which no condition kept away. Such an item becomes an array of its values ([`each_row`]), and the list
//! is compared item by item. What an item is, is known after all rules only: they write a CASE for `coalesce`, and put
//! the CASE that a column of a subquery stands for into a list that compares with the column.

use datafusion::common::Result;
use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::logical_expr::expr::InList;
use datafusion::logical_expr::{Expr, LogicalPlan};
use millrace_common::SqlError;
use millrace_functions::each_row::each_row;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::tree::{Walk, WalkPlan};

use crate::bind::rewrites::plan::{change_expressions, has_expression};

/// An optimised plan whose lists have such items no more.
pub fn computed_for_each_row(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    match has_concerned(&plan).map_err(sql_error_from_datafusion)? {
        true => change_expressions(plan, is_concerned, |e, _| for_each_row(e)),
        false => Ok(plan),
    }
}

/// Nearly all plans have no such list, and are not taken apart to find that out.
fn has_concerned(plan: &LogicalPlan) -> Result<bool> {
    let mut found = false;
    plan.walk_with_subqueries(|node| {
        found |= has_expression(node, is_concerned)?;
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

fn is_concerned(e: &Expr) -> Result<bool> {
    let Expr::InList(InList { list, .. }) = e else { return Ok(false) };
    for item in list {
        if may_pass_for_constant(item)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn may_pass_for_constant(item: &Expr) -> Result<bool> {
    match item {
        Expr::ScalarFunction(f) if f.func == each_row() => Ok(false),
        item => item.any(|e| Ok(matches!(e, Expr::Case(_)))),
    }
}

/// The same of one expression, whose operands have been changed.
pub fn for_each_row(e: Expr) -> Result<Transformed<Expr>> {
    if !is_concerned(&e)? {
        return Ok(Transformed::no(e));
    }
    Ok(match e {
        Expr::InList(InList { expr, list, negated }) => {
            let list = list.into_iter().map(item_for_each_row).collect::<Result<Vec<_>>>()?;
            Transformed::yes(Expr::InList(InList { expr, list, negated }))
        }
        e => Transformed::no(e),
    })
}

fn item_for_each_row(item: Expr) -> Result<Expr> {
    Ok(match may_pass_for_constant(&item)? {
        true => each_row().call(vec![item]),
        false => item,
    })
}

#[cfg(test)]
mod tests {
    use arrow::array::RecordBatch;
    use datafusion::logical_expr::{col, lit, when};
    use datafusion::physical_plan::collect;
    use datafusion::prelude::SessionContext;

    use super::*;
    use crate::optimizer::optimize_for_batch;
    use crate::optimizer::short::{is_simple, optimize_simple};

    #[test]
    fn items_that_may_pass_for_constants_are_changed_and_once() {
        let case = || when(col("a").is_null(), lit(1i64)).otherwise(col("a")).unwrap();
        let list = |items: Vec<Expr>| col("x").in_list(items, true);
        for items in [vec![], vec![lit(1i64), lit(2i64)], vec![col("a"), col("a") + lit(1i64)]] {
            assert!(!for_each_row(list(items)).unwrap().transformed);
        }
        let once = for_each_row(list(vec![lit(7i64), case()])).unwrap();
        assert_eq!(once.data, list(vec![lit(7i64), each_row().call(vec![case()])]));
        assert!(!for_each_row(once.data).unwrap().transformed);
        // What is looked for has one value for each row anyway.
        let looked_for = case().in_list(vec![lit(7i64), lit(8i64)], false);
        assert!(!for_each_row(looked_for).unwrap().transformed);
    }

    async fn rows(tables: &SessionContext, plan: LogicalPlan) -> usize {
        let state = tables.state();
        let physical = state.query_planner().create_physical_plan(&plan, &state).await.unwrap();
        let batches = collect(physical, tables.task_ctx()).await.unwrap();
        batches.iter().map(RecordBatch::num_rows).sum()
    }

    #[tokio::test]
    async fn an_item_that_a_rule_makes_a_case_has_the_value_of_its_row() {
        let tables = SessionContext::new();
        let made = "CREATE TABLE t (id BIGINT, a BIGINT, b BIGINT, x BIGINT) AS VALUES \
                    (1, 5, NULL, 5), (2, NULL, NULL, 0), (3, NULL, 6, 5)";
        tables.sql(made).await.unwrap();
        let query = "SELECT id FROM t WHERE x IN (coalesce(a, b, 0), 7, 8, 9)";
        let plan = tables.state().create_logical_plan(query).await.unwrap();
        assert!(is_simple(&plan));
        assert_eq!(rows(&tables, optimize_for_batch(plan.clone()).unwrap()).await, 2);
        let short = optimize_simple(plan).unwrap();
        assert_eq!(rows(&tables, short.clone()).await, 2);
        // A plan that turns out not to be short has all rules after these.
        assert_eq!(rows(&tables, optimize_for_batch(short).unwrap()).await, 2);
    }
}
