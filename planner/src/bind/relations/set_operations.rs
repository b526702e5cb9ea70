//! INTERSECT and EXCEPT by multiplicity, for batch and views alike.
//!
//! `SqlToRel` makes joins of them that are wrong for ALL and that views would keep in three states.
//! Here each becomes one count a side over the union of both, which decides how often a row is in
//! the result:
//!
//! ```text
//! Projection: the columns
//!   Unnest: copies                                          (ALL only)
//!     Projection: the columns, copies(how often)            (ALL only)
//!       Filter: by the counts
//!         Aggregate: by the columns, count of left rows, count of right rows
//!           Union: left with true, right with false
//! ```
//!
//! With `l` and `r` the counts, EXCEPT has a row where `l > 0 AND r = 0`, INTERSECT where
//! `l > 0 AND r > 0`, EXCEPT ALL has it `l - r` times, INTERSECT ALL `least(l, r)` times. Rows are equal
//! as in GROUP BY: NULL is equal to NULL. The `Unnest` of a call of `copies` is what the stream
//! planner recognises: it becomes the `Repeat` operator.

use std::sync::Arc;

use datafusion::common::tree_node::Transformed;
use datafusion::common::{Column, JoinType, NullEquality, Result, UnnestOptions};
use datafusion::logical_expr::expr::AggregateFunction;
use datafusion::logical_expr::{
    Distinct, Expr, Join, LogicalPlan, LogicalPlanBuilder, ident, lit, when,
};
use millrace_common::SqlError;
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::functions;
use millrace_functions::tree::WalkPlan;
use millrace_functions::window_fn::copies;

use crate::bind::rewrites::plan::PlanRewrite;

/// Which side a row of the union is of; no identifier of a user looks like it.
const LEFT: &str = "#left";
const LEFT_COUNT: &str = "#l";
const RIGHT_COUNT: &str = "#r";
const COPIES: &str = "#copies";

/// Makes counts of INTERSECT and EXCEPT.
pub const COUNT_SET_OPERATIONS: PlanRewrite =
    PlanRewrite::new("count set operations", |plan, _| rewrite(plan));

/// Rewrites every INTERSECT and EXCEPT that `SqlToRel` planned as a join.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    plan.rewrite_down_with_subqueries(|node| match SetOperation::of(&node) {
        Some(operation) => Ok(Transformed::yes(operation.plan(&node)?)),
        None => Ok(Transformed::no(node)),
    })
    .map(|t| t.data)
    .map_err(sql_error_from_datafusion)
}

/// An INTERSECT or EXCEPT as `SqlToRel` plans it.
pub struct SetOperation<'a> {
    pub left: &'a LogicalPlan,
    pub right: &'a LogicalPlan,
    pub except: bool,
    pub all: bool,
}

impl SetOperation<'_> {
    /// Before subqueries are decorrelated, only set operations are semi and anti joins. ALL over
    /// distinct left rows and the plain operation look alike, and are the same.
    pub fn of(plan: &LogicalPlan) -> Option<SetOperation<'_>> {
        let LogicalPlan::Join(join) = plan else { return None };
        let Join { left, right, join_type, null_equality, filter: None, .. } = join else {
            return None;
        };
        let except = match join_type {
            JoinType::LeftAnti => true,
            JoinType::LeftSemi => false,
            _ => return None,
        };
        if *null_equality != NullEquality::NullEqualsNull {
            return None;
        }
        Some(match left.as_ref() {
            LogicalPlan::Distinct(Distinct::All(left)) => {
                SetOperation { left, right, except, all: false }
            }
            left => SetOperation { left, right, except, all: true },
        })
    }

    /// `node` is what it stands for: the result has its columns.
    fn plan(&self, node: &LogicalPlan) -> Result<LogicalPlan> {
        let width = node.schema().fields().len();
        let columns: Vec<Expr> = (0..width).map(|i| ident(name(i))).collect();
        let both = LogicalPlanBuilder::from(side(self.left, true)?)
            .union(side(self.right, false)?)?
            .aggregate(columns.clone(), [count(true)?, count(false)?])?;
        let (l, r) = (ident(LEFT_COUNT), ident(RIGHT_COUNT));
        let none = || lit(0i64);
        let (kept, times) = match (self.except, self.all) {
            (true, false) => (l.gt(none()).and(r.eq(none())), None),
            (false, false) => (l.gt(none()).and(r.gt(none())), None),
            (true, true) => (l.clone().gt(r.clone()), Some(l - r)),
            (false, true) => {
                let least = when(l.clone().lt(r.clone()), l.clone()).otherwise(r.clone())?;
                (l.gt(none()).and(r.gt(none())), Some(least))
            }
        };
        let mut plan = both.filter(kept)?;
        if let Some(times) = times {
            let copies = copies().call(vec![times]).alias(COPIES);
            let options = UnnestOptions::new().with_preserve_nulls(false);
            plan = plan
                .project(columns.into_iter().chain([copies]))?
                .unnest_column_with_options(Column::from_name(COPIES), options)?;
        }
        let output = node.schema().iter().enumerate().map(|(i, (qualifier, field))| {
            let column = ident(name(i));
            match qualifier {
                Some(q) => column.alias_qualified(Some(q.clone()), field.name()),
                None => column.alias(field.name()),
            }
        });
        plan.project(output.collect::<Vec<_>>())?.build()
    }
}

fn name(column: usize) -> String {
    format!("#{column}")
}

/// One side's rows under the names of the union, with which side it is.
fn side(plan: &LogicalPlan, left: bool) -> Result<LogicalPlan> {
    let tag = lit(left).alias(LEFT);
    // Into the projection itself, so that literals of unknown type are still seen as such.
    let (input, exprs): (&LogicalPlan, Vec<Expr>) = match below_aliases(plan) {
        LogicalPlan::Projection(p) => (&p.input, p.expr.clone()),
        other => {
            let columns = other.schema().iter();
            (other, columns.map(|c| Expr::Column(Column::from(c))).collect())
        }
    };
    let named = exprs.into_iter().enumerate().map(|(i, e)| e.unalias().alias(name(i)));
    LogicalPlanBuilder::from(input.clone()).project(named.chain([tag]).collect::<Vec<_>>())?.build()
}

/// An alias only renames, and columns are taken by position.
fn below_aliases(plan: &LogicalPlan) -> &LogicalPlan {
    match plan {
        LogicalPlan::SubqueryAlias(alias) => below_aliases(&alias.input),
        other => other,
    }
}

fn count(left: bool) -> Result<Expr> {
    let Some(count) = functions().aggregate("count") else {
        return Err(external(SqlError::internal("count is not registered")));
    };
    let filter = if left { ident(LEFT) } else { !ident(LEFT) };
    let call = AggregateFunction::new_udf(
        Arc::clone(&count),
        vec![lit(1i64)],
        false,
        Some(Box::new(filter)),
        vec![],
        None,
    );
    Ok(Expr::AggregateFunction(call).alias(if left { LEFT_COUNT } else { RIGHT_COUNT }))
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    #[test]
    fn rows_are_counted_in_both_branches() {
        let both = |operation: &str| {
            format!(
                "SELECT a FROM (VALUES (1), (1), (2), (NULL)) AS x (a) {operation} \
                 SELECT b FROM (VALUES (1), (NULL), (3)) AS y (b) ORDER BY 1"
            )
        };
        assert_eq!(rows(&both("EXCEPT ALL")), ["1", "2"]);
        assert_eq!(rows(&both("EXCEPT")), ["2"]);
        assert_eq!(rows(&both("INTERSECT ALL")), ["1", "∅"]);
    }
}
