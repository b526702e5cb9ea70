//! Subqueries in the branches of a CASE: they are computed for the rows that reach the branch, so that what
//! fails for others does not fail.
//!
//! A correlated one that may fail is joined for the values of these rows only. Of one that is not
//! correlated, in batch, only whether it has more than one row is asked where it is reached.

use datafusion::common::Result;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::logical_expr::expr::Case;
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder, Operator};
use millrace_functions::scalar_subquery_check::scalar_subquery_check;
use millrace_functions::tree::{Walk, WalkPlan};

use super::{Joined, first_row, gathered, is_one_row};
use crate::bind::subqueries::lateral;
use crate::bind::subqueries::outer_references::subquery_of;

/// Where in the CASEs of an expression a subquery stands.
#[derive(Clone, Default)]
pub struct Branch {
    /// What holds for the rows that reach it; `None`: it is no branch, or nothing is known.
    guard: Option<Expr>,
    within: bool,
}

impl Branch {
    /// The rows of this branch for which a condition holds as well, or does not.
    fn and(&self, condition: Expr, holds: bool) -> Branch {
        let condition = if holds { condition.is_true() } else { condition.is_not_true() };
        let guard = match &self.guard {
            Some(guard) => guard.clone().and(condition),
            None => condition,
        };
        Branch { guard: Some(guard), within: true }
    }
}

/// Whether an expression has a CASE with subqueries.
pub fn has_branches(e: &Expr) -> Result<bool> {
    e.any(|e| match e {
        Expr::Case(_) => e.any(|e| Ok(subquery_of(e).is_some())),
        _ => Ok(false),
    })
}

impl Joined {
    /// The expression with columns for its subqueries, each computed where it is reached.
    pub(super) fn replace_reached(&mut self, e: Expr, branch: &Branch) -> Result<Expr> {
        let e = match e {
            Expr::Case(case) => self.case(case, branch)?,
            e => e.map_children(|e| self.replace_reached(e, branch).map(Transformed::yes))?.data,
        };
        let around = std::mem::replace(&mut self.branch, branch.clone());
        let new = self.replaced(&e);
        self.branch = around;
        let new = new?;
        self.changed |= new.is_some();
        Ok(new.unwrap_or(e))
    }

    fn case(&mut self, case: Case, branch: &Branch) -> Result<Expr> {
        let mut reached = branch.clone();
        let operand = case.expr.map(|e| self.replace_reached(*e, branch)).transpose()?;
        let mut when_then = Vec::with_capacity(case.when_then_expr.len());
        for (when, then) in case.when_then_expr {
            let when = self.replace_reached(*when, &reached)?;
            let condition = match &operand {
                Some(operand) => operand.clone().eq(when.clone()),
                None => when.clone(),
            };
            let then = self.replace_reached(*then, &reached.and(condition.clone(), true))?;
            reached = reached.and(condition, false);
            when_then.push((Box::new(when), Box::new(then)));
        }
        let otherwise = case.else_expr.map(|e| self.replace_reached(*e, &reached)).transpose()?;
        let expr = operand.map(Box::new);
        Ok(Expr::Case(Case { expr, when_then_expr: when_then, else_expr: otherwise.map(Box::new) }))
    }

    /// The rows for which a subquery of the branch is computed; `None`: all of them.
    pub(super) fn reached(&self, subquery: &LogicalPlan) -> Result<Option<LogicalPlan>> {
        let Some(guard) = self.branch.guard.as_ref() else { return Ok(None) };
        let plain = !guard.is_volatile() && !guard.any(|e| Ok(subquery_of(e).is_some()))?;
        if !plain || !may_fail(subquery)? {
            return Ok(None);
        }
        let known = guard.column_refs().into_iter().all(|c| self.source.schema().has_column(c));
        let rows = if known { &self.source } else { &self.plan };
        LogicalPlanBuilder::from(rows.clone()).filter(guard.clone())?.build().map(Some)
    }

    /// The value of a subquery that is not correlated, in batch: an error where there is more than one only
    /// where it is asked for.
    pub(super) fn asked_for(&self, e: &Expr) -> Result<Option<Expr>> {
        let Expr::ScalarSubquery(subquery) = e else { return Ok(None) };
        let one = is_one_row(&subquery.subquery) || first_row::is_limited(&subquery.subquery);
        if !self.batch || !self.branch.within || one {
            return Ok(None);
        }
        if lateral::reads_outer(&subquery.subquery)? {
            return Ok(None);
        }
        Ok(Some(scalar_subquery_check().call(vec![Expr::ScalarSubquery(gathered(subquery)?)])))
    }

    /// A subquery of a branch has its value for the rows that reach it.
    pub(super) fn is_partial(&self, subquery: &LogicalPlan) -> Result<bool> {
        Ok(self.branch.guard.is_some() && may_fail(subquery)?)
    }
}

/// Whether what a plan computes may fail: it does more than to compare and to aggregate.
fn may_fail(plan: &LogicalPlan) -> Result<bool> {
    let mut may = false;
    plan.walk_with_subqueries(|node| {
        node.apply_expressions(|e| {
            e.walk(|e| {
                may |= match e {
                    Expr::ScalarFunction(_) | Expr::Cast(_) => true,
                    Expr::BinaryExpr(b) => is_arithmetic(b.op),
                    _ => false,
                };
                Ok(if may { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
            })
        })
    })?;
    Ok(may)
}

fn is_arithmetic(op: Operator) -> bool {
    use Operator as O;
    matches!(op, O::Plus | O::Minus | O::Multiply | O::Divide | O::Modulo)
}
