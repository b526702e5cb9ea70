//! Conditions of joins with subqueries that read columns of the joined tables.
//!
//! DataFusion takes subqueries apart in filters and SELECT lists only. So:
//! - a part of the condition that reads no column of the side whose rows are all kept filters the other side;
//! - of an inner join, what reads both sides filters the joined rows;
//! - else the subquery's value becomes a column of the one side that it reads, and the condition reads that column.
//!   EXISTS becomes a count.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::common::{Column, JoinType, Result};
use datafusion::logical_expr::utils::{conjunction, split_conjunction};
use datafusion::logical_expr::{Expr, Join, LogicalPlan, LogicalPlanBuilder, Subquery, ident, lit};
use millrace_common::SqlError;
use millrace_functions::error::{correlated, external, sql_error_from_datafusion};
use millrace_functions::functions;
use millrace_functions::tree::{Walk, WalkPlan};

use super::outer_references::{outer_columns, subquery_of};
use crate::bind::relations::provider::columns_of;
use crate::bind::rewrites::plan::PlanRewrite;

/// Moves conditions with subqueries out of joins.
pub const MOVE_JOIN_FILTERS: PlanRewrite =
    PlanRewrite::new("move join filters", |plan, _| rewrite(plan));

/// Moves such conditions out of all joins of a plan.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    let done = plan.rewrite_up_with_subqueries(|node| match node {
        LogicalPlan::Join(join) if has_subquery(join.filter.as_ref())? => {
            Ok(Transformed::yes(Parts::of(&join).join(join)?))
        }
        node => Ok(Transformed::no(node)),
    });
    done.map(|t| t.data).map_err(sql_error_from_datafusion)
}

/// Whether a condition has a subquery that joins are not made for: one that reads the tables joined, or a predicate.
fn has_subquery(filter: Option<&Expr>) -> Result<bool> {
    let Some(filter) = filter else { return Ok(false) };
    filter.any(|e| {
        Ok(match e {
            Expr::ScalarSubquery(subquery) => !subquery.outer_ref_columns.is_empty(),
            e => subquery_of(e).is_some(),
        })
    })
}

/// A join whose condition is taken apart.
struct Parts {
    left: LogicalPlan,
    right: LogicalPlan,
    /// What stays its condition.
    stays: Vec<Expr>,
    /// What filters the joined rows.
    above: Vec<Expr>,
    /// How many columns were added.
    added: usize,
}

/// The sides of a join that an expression reads.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Reads {
    left: bool,
    right: bool,
}

impl Parts {
    fn of(join: &Join) -> Parts {
        Parts {
            left: join.left.as_ref().clone(),
            right: join.right.as_ref().clone(),
            stays: Vec::new(),
            above: Vec::new(),
            added: 0,
        }
    }

    fn join(mut self, join: Join) -> Result<LogicalPlan> {
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for part in join.filter.iter().flat_map(split_conjunction) {
            let reads = reads(part, &join)?;
            match join.join_type {
                _ if !has_subquery(Some(part))? => self.stays.push(part.clone()),
                JoinType::Inner if reads.left && reads.right => self.above.push(part.clone()),
                JoinType::Inner | JoinType::Right if !reads.right => left.push(part.clone()),
                JoinType::Inner | JoinType::Left if !reads.left => right.push(part.clone()),
                _ => {
                    let part = self.with_columns(part, &join)?;
                    self.stays.push(part);
                }
            }
        }
        self.left = filtered(self.left, left)?;
        self.right = filtered(self.right, right)?;
        let columns: Vec<Expr> =
            join.schema.iter().map(|field| Expr::Column(Column::from(field))).collect();
        let (on, stays) = (join.on, conjunction(self.stays));
        let joined = Join::try_new(
            Arc::new(self.left),
            Arc::new(self.right),
            on,
            stays,
            join.join_type,
            join.join_constraint,
            join.null_equality,
            join.null_aware,
        )?;
        let plan = filtered(LogicalPlan::Join(joined), self.above)?;
        match self.added {
            0 => Ok(plan),
            _ => LogicalPlanBuilder::from(plan).project(columns)?.build(),
        }
    }

    /// A part of the condition that reads the values of its subqueries as columns.
    fn with_columns(&mut self, part: &Expr, join: &Join) -> Result<Expr> {
        let replaced = part.clone().rewrite_up(|e| {
            let (value, test) = match &e {
                Expr::ScalarSubquery(s) if s.outer_ref_columns.is_empty() => {
                    return Ok(Transformed::no(e));
                }
                Expr::ScalarSubquery(s) => (s.clone(), None),
                Expr::Exists(x) => (count_of(&x.subquery)?, Some(x.negated)),
                Expr::InSubquery(_) | Expr::SetComparison(_) => {
                    return Err(external(correlated()));
                }
                _ => return Ok(Transformed::no(e)),
            };
            let value = Expr::ScalarSubquery(value);
            let reads = reads(&value, join)?;
            if reads.left && reads.right {
                return Err(external(correlated()));
            }
            let side = if reads.left { &mut self.left } else { &mut self.right };
            self.added += 1;
            let name = format!("#condition {}", self.added);
            let mut columns = columns_of(side);
            columns.push(value.alias(&name));
            *side = LogicalPlanBuilder::from(side.clone()).project(columns)?.build()?;
            Ok(Transformed::yes(match test {
                None => ident(name),
                Some(true) => ident(name).eq(lit(0i64)),
                Some(false) => ident(name).gt(lit(0i64)),
            }))
        });
        replaced.map(|t| t.data)
    }
}

/// How many rows a subquery has, as a subquery.
fn count_of(subquery: &Subquery) -> Result<Subquery> {
    let Some(count) = functions().aggregate("count") else {
        return Err(external(SqlError::internal("count is not registered")));
    };
    let no_groups: [Expr; 0] = [];
    let plan = LogicalPlanBuilder::from(subquery.subquery.as_ref().clone())
        .aggregate(no_groups, [count.call(vec![lit(1i64)]).alias("#rows")])?
        .build()?;
    Ok(Subquery { subquery: Arc::new(plan), ..subquery.clone() })
}

fn reads(e: &Expr, join: &Join) -> Result<Reads> {
    let mut reads = Reads { left: false, right: false };
    let mut note = |c: &Column| {
        reads.left |= join.left.schema().has_column(c);
        reads.right |= join.right.schema().has_column(c);
    };
    e.walk(|e| {
        if let Expr::Column(c) = e {
            note(c);
        }
        if let Some(subquery) = subquery_of(e) {
            outer_columns(&subquery.subquery)?.iter().for_each(&mut note);
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(reads)
}

fn filtered(plan: LogicalPlan, conditions: Vec<Expr>) -> Result<LogicalPlan> {
    match conjunction(conditions) {
        Some(condition) => LogicalPlanBuilder::from(plan).filter(condition)?.build(),
        None => Ok(plan),
    }
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    #[test]
    fn a_condition_with_a_subquery_keeps_rows_of_the_outer_side() {
        let sql = "SELECT v.a, w.b FROM (VALUES (1), (2)) AS v (a) \
                   LEFT JOIN (VALUES (1), (2)) AS w (b) ON v.a = w.b AND w.b IN (SELECT 2) ORDER BY 1";
        assert_eq!(rows(sql), ["1|∅", "2|2"]);
    }
}
