//! Correlated subqueries that compute one value, such as `(SELECT max(y) FROM w WHERE y > v.x)`.
//!
//! DataFusion takes apart those that aggregate and are compared by `=`. The others become:
//! - the first row (`ORDER BY … LIMIT 1`) by equalities: a join with the row that has number one among those of its key
//!   ([`first_row`]), in batch and in views;
//! - what neither aggregates nor limits: an array of what there is, of which [`single`] takes the one element, or
//!   there is an error, as PostgreSQL says;
//! - by other than equalities: in batch lateral joins ([`super::lateral`]), which number the rows of the outer query. No
//!   view keeps such numbers.

mod first_row;

use std::sync::Arc;

use datafusion::common::Result;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::logical_expr::expr::AggregateFunction;
use datafusion::logical_expr::utils::split_conjunction;
use datafusion::logical_expr::{
    BinaryExpr, Expr, JoinType, LogicalPlan, LogicalPlanBuilder, Operator, Subquery, ident, lit,
};
use millrace_common::SqlError;

use super::lateral;
use super::provider::columns_of;
use crate::error::{external, sql_error_from_datafusion};
use crate::functions::functions;
use crate::functions::single::single;

/// Takes apart what DataFusion does not.
pub fn rewrite(plan: LogicalPlan, for_view: bool) -> std::result::Result<LogicalPlan, SqlError> {
    let rewritten = plan.transform_up_with_subqueries(|node| match &node {
        LogicalPlan::Projection(p) => {
            let mut joined = Joined::over(&p.input, for_view);
            let exprs = p.expr.iter().map(|e| joined.replace(e.clone()));
            let exprs = exprs.collect::<Result<Vec<_>>>()?;
            if !joined.changed {
                return Ok(Transformed::no(node));
            }
            let outputs = exprs.into_iter().zip(p.schema.iter()).map(|(e, (q, f))| match e {
                e @ Expr::Column(_) if e.schema_name().to_string() == *f.name() => e,
                e => e.unalias().alias_qualified(q.cloned(), f.name()),
            });
            let outputs: Vec<Expr> = outputs.collect();
            Ok(Transformed::yes(LogicalPlanBuilder::from(joined.plan).project(outputs)?.build()?))
        }
        LogicalPlan::Filter(f) => {
            let mut joined = Joined::over(&f.input, for_view);
            let predicate = joined.replace(f.predicate.clone())?;
            if !joined.changed {
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
    changed: bool,
    for_view: bool,
}

impl Joined {
    fn over(plan: &LogicalPlan, for_view: bool) -> Joined {
        Joined { plan: plan.clone(), count: 0, changed: false, for_view }
    }

    fn replace(&mut self, e: Expr) -> Result<Expr> {
        e.transform_up(|e| {
            let Expr::ScalarSubquery(subquery) = &e else { return Ok(Transformed::no(e)) };
            if subquery.outer_ref_columns.is_empty() {
                return Ok(Transformed::no(e));
            }
            let plan = &subquery.subquery;
            let new = if is_one_row(plan) {
                self.apart(subquery, JoinType::Inner)?
            } else if first_row::is_limited(plan) {
                self.first_row(subquery)?
            } else {
                let all = gathered(subquery)?;
                let value = self.apart(&all, JoinType::Inner)?;
                Some(single().call(vec![value.unwrap_or(Expr::ScalarSubquery(all))]))
            };
            self.changed |= new.is_some();
            Ok(new.map_or_else(|| Transformed::no(e), Transformed::yes))
        })
        .map(|t| t.data)
    }

    /// The value of a subquery of one row that is not compared by equalities, as a column. `None`: leave it where it is.
    fn apart(&mut self, subquery: &Subquery, kind: JoinType) -> Result<Option<Expr>> {
        if self.for_view || compares_by_equality(&subquery.subquery)? {
            return Ok(None);
        }
        self.lateral(subquery, kind)
    }

    fn first_row(&mut self, subquery: &Subquery) -> Result<Option<Expr>> {
        let name = self.next_name();
        if let Some(plan) = first_row::join(&self.plan, &subquery.subquery, &name)? {
            self.plan = plan;
            self.count += 1;
            return Ok(Some(ident(name)));
        }
        if self.for_view {
            let message =
                "in a view, a correlated subquery with LIMIT that compares by other than =";
            return Err(external(SqlError::unsupported(message).with_hint(
                "Join the row_number() of the subquery's rows, or aggregate (min, max).",
            )));
        }
        self.lateral(subquery, JoinType::Left)
    }

    fn next_name(&self) -> String {
        format!("#scalar{}", self.count)
    }

    /// The input with the subquery's value as one more column.
    fn lateral(&mut self, subquery: &Subquery, kind: JoinType) -> Result<Option<Expr>> {
        let name = self.next_name();
        let value = columns_of(&subquery.subquery).into_iter().map(|c| c.alias(name.clone()));
        let named = LogicalPlanBuilder::from(subquery.subquery.as_ref().clone())
            .project(value.collect::<Vec<_>>())?
            .build()?;
        let right =
            LogicalPlan::Subquery(Subquery { subquery: Arc::new(named), ..subquery.clone() });
        let left = LogicalPlanBuilder::from(self.plan.clone());
        let both = match kind {
            JoinType::Inner => left.cross_join(right)?,
            kind => left.join_on(right, kind, [lit(true)])?,
        };
        let LogicalPlan::Join(join) = both.build()? else { return Ok(None) };
        let Some(plan) = lateral::over_left(&join, false) else { return Ok(None) };
        self.plan = plan;
        self.count += 1;
        Ok(Some(ident(name)))
    }
}

/// The values of a subquery as an array.
fn gathered(subquery: &Subquery) -> Result<Subquery> {
    let Some(array_agg) = functions().aggregate("array_agg") else {
        return Err(external(SqlError::internal("array_agg is not registered")));
    };
    let plan = subquery.subquery.as_ref().clone();
    let values = columns_of(&plan);
    let call = AggregateFunction::new_udf(array_agg, values, false, None, vec![], None);
    let no_groups: [Expr; 0] = [];
    let plan = LogicalPlanBuilder::from(plan)
        .aggregate(no_groups, [Expr::AggregateFunction(call).alias("#all")])?
        .build()?;
    Ok(Subquery { subquery: Arc::new(plan), ..subquery.clone() })
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
