//! Correlated subqueries that compute one value by other than equalities, such as
//! `(SELECT max(y) FROM w WHERE y > v.x)`. DataFusion takes apart only those that are compared by `=`; in batch the
//! others become lateral joins ([`super::lateral`]), which number the rows of the outer query.

use std::sync::Arc;

use datafusion::common::Result;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::logical_expr::utils::split_conjunction;
use datafusion::logical_expr::{
    BinaryExpr, Expr, LogicalPlan, LogicalPlanBuilder, Operator, Subquery, ident,
};
use millrace_common::SqlError;

use super::lateral;
use super::provider::columns_of;
use crate::error::sql_error_from_datafusion;

/// Turns them into lateral joins.
pub fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    let rewritten = plan.transform_up_with_subqueries(|node| match &node {
        LogicalPlan::Projection(p) => {
            let mut joined = Joined { plan: p.input.as_ref().clone(), count: 0 };
            let exprs = p.expr.iter().map(|e| joined.replace(e.clone()));
            let exprs = exprs.collect::<Result<Vec<_>>>()?;
            if joined.count == 0 {
                return Ok(Transformed::no(node));
            }
            let outputs = exprs.into_iter().zip(p.schema.iter()).map(|(e, (q, f))| match e {
                e @ Expr::Column(_) => e,
                e => e.unalias().alias_qualified(q.cloned(), f.name()),
            });
            let outputs: Vec<Expr> = outputs.collect();
            Ok(Transformed::yes(LogicalPlanBuilder::from(joined.plan).project(outputs)?.build()?))
        }
        LogicalPlan::Filter(f) => {
            let mut joined = Joined { plan: f.input.as_ref().clone(), count: 0 };
            let predicate = joined.replace(f.predicate.clone())?;
            if joined.count == 0 {
                return Ok(Transformed::no(node));
            }
            let columns = columns_of(&f.input);
            let plan = LogicalPlanBuilder::from(joined.plan).filter(predicate)?;
            Ok(Transformed::yes(plan.project(columns)?.build()?))
        }
        _ => Ok(Transformed::no(node)),
    });
    rewritten.map(|t| t.data).map_err(sql_error_from_datafusion)
}

/// The input of an expression, with a column for each subquery that was taken out of it.
struct Joined {
    plan: LogicalPlan,
    count: usize,
}

impl Joined {
    fn replace(&mut self, e: Expr) -> Result<Expr> {
        e.transform_up(|e| {
            let Expr::ScalarSubquery(subquery) = &e else { return Ok(Transformed::no(e)) };
            if subquery.outer_ref_columns.is_empty()
                || !is_one_row(&subquery.subquery)
                || compares_by_equality(&subquery.subquery)?
            {
                return Ok(Transformed::no(e));
            }
            let name = format!("#scalar{}", self.count);
            match self.join(subquery, &name)? {
                Some(plan) => {
                    self.plan = plan;
                    self.count += 1;
                    Ok(Transformed::yes(ident(name)))
                }
                None => Ok(Transformed::no(e)),
            }
        })
        .map(|t| t.data)
    }

    /// The input with the subquery's value as one more column.
    fn join(&self, subquery: &Subquery, name: &str) -> Result<Option<LogicalPlan>> {
        let value = columns_of(&subquery.subquery).into_iter().map(|c| c.alias(name));
        let named = LogicalPlanBuilder::from(subquery.subquery.as_ref().clone())
            .project(value.collect::<Vec<_>>())?
            .build()?;
        let right =
            LogicalPlan::Subquery(Subquery { subquery: Arc::new(named), ..subquery.clone() });
        let both = LogicalPlanBuilder::from(self.plan.clone()).cross_join(right)?.build()?;
        match &both {
            LogicalPlan::Join(join) => Ok(lateral::over_left(join, false)),
            _ => Ok(None),
        }
    }
}

/// An aggregate without GROUP BY: it has one row, whatever it is computed over.
fn is_one_row(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::Projection(p) => is_one_row(&p.input),
        LogicalPlan::SubqueryAlias(a) => is_one_row(&a.input),
        LogicalPlan::Aggregate(a) => a.group_expr.is_empty(),
        _ => false,
    }
}

/// Whether columns of the outer query are only compared with `=`, in filters.
fn compares_by_equality(plan: &LogicalPlan) -> Result<bool> {
    let outer = |e: &Expr| matches!(e, Expr::OuterReferenceColumn(_, _));
    let mut only = true;
    plan.apply_with_subqueries(|node| {
        for e in node.expressions() {
            for part in split_conjunction(&e) {
                let mut refers = false;
                part.apply(|e| {
                    refers |= outer(e);
                    Ok(TreeNodeRecursion::Continue)
                })?;
                let equality = matches!(node, LogicalPlan::Filter(_))
                    && match part {
                        Expr::BinaryExpr(BinaryExpr { left, op: Operator::Eq, right }) => {
                            outer(left) != outer(right)
                        }
                        _ => false,
                    };
                only &= !refers || equality;
            }
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(only)
}
