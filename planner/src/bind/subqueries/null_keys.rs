//! Equalities over joins in which NULL is equal to NULL, as they come of correlated subqueries.
//!
//! DataFusion makes keys of such a join of the equalities that stand above it or in its condition, for which
//! NULLs would be equal too. So each says by itself that its left side is not NULL, which it implies.
//!
//! It also makes one of inner joins that stand on each other, where all of them get what the topmost says of NULLs. So
//! below and above other joins each of these stands apart, under an alias of columns that have names of their own.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::common::{Column, JoinType, NullEquality, Result, TableReference};
use datafusion::logical_expr::utils::split_conjunction;
use datafusion::logical_expr::{
    BinaryExpr, Expr, Filter, Join, LogicalPlan, LogicalPlanBuilder, Operator,
};
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::tree::{Walk, WalkPlan};

use crate::bind::relations::provider::columns_of;
use crate::bind::rewrites::plan::PlanRewrite;

/// Keeps NULLs apart in equalities over joins that take them as equal.
pub const GUARD_NULL_KEYS: PlanRewrite = PlanRewrite::new("guard null keys", |plan, _| guard(plan));

/// Does that to a plan that has such joins.
fn guard(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    let guarded = Joins::of(&plan).and_then(|joins| {
        if !joins.null_safe {
            return Ok(plan);
        }
        let guarded = plan.rewrite_up_with_subqueries(guard_node)?.data;
        match joins.others {
            true => guarded.rewrite_up_with_subqueries(set_apart).map(|t| t.data),
            false => Ok(guarded),
        }
    });
    guarded.map_err(sql_error_from_datafusion)
}

/// Which joins a plan has, or gets.
#[derive(Default)]
struct Joins {
    null_safe: bool,
    others: bool,
}

impl Joins {
    fn of(plan: &LogicalPlan) -> Result<Joins> {
        let mut joins = Joins::default();
        plan.walk_with_subqueries(|node| {
            if is_null_safe(node) {
                joins.null_safe = true;
            } else if let LogicalPlan::Join(_) = node {
                joins.others = true;
            }
            node.apply_expressions(|e| {
                // Scalar ones become joins later.
                joins.others |= e.any(|e| Ok(matches!(e, Expr::ScalarSubquery(_))))?;
                Ok(TreeNodeRecursion::Continue)
            })
        })?;
        Ok(joins)
    }
}

fn is_null_safe(node: &LogicalPlan) -> bool {
    match node {
        LogicalPlan::Join(join) => {
            let kind = matches!(join.join_type, JoinType::Inner | JoinType::Left);
            kind && join.null_equality == NullEquality::NullEqualsNull
        }
        _ => false,
    }
}

const APART: &str = "#apart";

fn set_apart(node: LogicalPlan) -> Result<Transformed<LogicalPlan>> {
    if !is_null_safe(&node) {
        return Ok(Transformed::no(node));
    }
    let name = |i: usize| format!("#{i}");
    let own = columns_of(&node).into_iter().enumerate().map(|(i, c)| c.alias(name(i)));
    let own: Vec<Expr> = own.collect();
    let outputs = node.schema().iter().enumerate().map(|(i, (qualifier, field))| {
        let column = Column::new(Some(TableReference::bare(APART)), name(i));
        Expr::Column(column).alias_qualified(qualifier.cloned(), field.name())
    });
    let outputs: Vec<Expr> = outputs.collect();
    let apart = LogicalPlanBuilder::from(node).project(own)?.alias(TableReference::bare(APART))?;
    Ok(Transformed::yes(apart.project(outputs)?.build()?))
}

fn guard_node(node: LogicalPlan) -> Result<Transformed<LogicalPlan>> {
    let condition = match &node {
        LogicalPlan::Filter(filter) => Some(&filter.predicate),
        LogicalPlan::Join(join) => join.filter.as_ref(),
        _ => None,
    };
    let Some(condition) = condition.and_then(not_of_null) else {
        return Ok(Transformed::no(node));
    };
    Ok(match node {
        LogicalPlan::Filter(filter) => {
            let guarded = Filter::try_new(condition, Arc::clone(&filter.input))?;
            Transformed::yes(LogicalPlan::Filter(guarded))
        }
        LogicalPlan::Join(join) => {
            Transformed::yes(LogicalPlan::Join(Join { filter: Some(condition), ..join }))
        }
        other => Transformed::no(other),
    })
}

/// A condition with what its equalities of columns imply.
fn not_of_null(condition: &Expr) -> Option<Expr> {
    let implied = split_conjunction(condition).into_iter().filter_map(|part| match part {
        Expr::BinaryExpr(BinaryExpr { left, op: Operator::Eq, right })
            if left.any_column_refs() && right.any_column_refs() =>
        {
            Some(left.as_ref().clone().is_not_null())
        }
        _ => None,
    });
    let implied = implied.reduce(Expr::and)?;
    Some(condition.clone().and(implied))
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    /// The rows of NULL meet in the subquery, but NULL equals nothing above it.
    #[test]
    fn null_equals_nothing_above_a_join_by_nulls() {
        let sql = "SELECT a FROM (VALUES (1), (NULL)) AS v (a) WHERE a = \
                   (SELECT max(b) FROM (VALUES (1), (NULL)) AS w (b) WHERE w.b IS NOT DISTINCT FROM v.a)";
        assert_eq!(rows(sql), ["1"]);
    }
}
