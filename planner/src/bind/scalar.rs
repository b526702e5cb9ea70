//! Correlated subqueries that compute one value, such as `(SELECT max(y) FROM w WHERE y > v.x)`.
//!
//! DataFusion takes apart those that aggregate and are compared by `=` in filters and SELECT lists. The others become:
//! - the first row (`ORDER BY … LIMIT 1`) by equalities: a join with the row that has number one among those of its key
//!   ([`first_row`]);
//! - what neither aggregates nor limits: an array of what there is, of which [`single`] takes the one element, or
//!   there is an error, as PostgreSQL says;
//! - all else: lateral joins ([`super::lateral`]).

mod first_row;

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::common::{ExprSchema, JoinType, Result};
use datafusion::logical_expr::expr::{AggregateFunction, InSubquery};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::{
    Aggregate, Expr, LogicalPlan, LogicalPlanBuilder, Sort, SortExpr, Subquery, ident, lit,
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
            let mut joined = Joined::over(&p.input, false);
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
            let mut joined = Joined::over(&f.input, false);
            let predicate = match for_view {
                true => f.predicate.clone(),
                false => joined.replace_not_in(f.predicate.clone())?,
            };
            let predicate = joined.replace(predicate)?;
            if !joined.changed {
                return Ok(Transformed::no(node));
            }
            let columns = columns_of(&f.input);
            let plan = LogicalPlanBuilder::from(joined.plan).filter(predicate)?;
            Ok(Transformed::yes(plan.project(columns)?.build()?))
        }
        LogicalPlan::Aggregate(a) => {
            let mut joined = Joined::over(&a.input, true);
            let group = joined.replace_named(&a.group_expr)?;
            let calls = joined.replace_named(&a.aggr_expr)?;
            if !joined.changed {
                return Ok(Transformed::no(node));
            }
            let aggregate = Aggregate::try_new(Arc::new(joined.plan), group, calls)?;
            Ok(Transformed::yes(LogicalPlan::Aggregate(aggregate)))
        }
        LogicalPlan::Sort(s) => {
            let mut joined = Joined::over(&s.input, true);
            let by = s
                .expr
                .iter()
                .map(|by| Ok(SortExpr { expr: joined.replace(by.expr.clone())?, ..by.clone() }));
            let expr = by.collect::<Result<Vec<_>>>()?;
            if !joined.changed {
                return Ok(Transformed::no(node));
            }
            let (input, fetch) = (Arc::new(joined.plan), s.fetch);
            let sorted = LogicalPlan::Sort(Sort { expr, input, fetch });
            let plan = LogicalPlanBuilder::from(sorted).project(columns_of(&s.input))?;
            Ok(Transformed::yes(plan.build()?))
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
    /// Also those that DataFusion takes apart elsewhere.
    all: bool,
}

impl Joined {
    fn over(plan: &LogicalPlan, all: bool) -> Joined {
        Joined { plan: plan.clone(), count: 0, changed: false, all }
    }

    /// Expressions that keep their names.
    fn replace_named(&mut self, exprs: &[Expr]) -> Result<Vec<Expr>> {
        let names = NamePreserver::new_for_projection();
        let replaced = exprs.iter().map(|e| {
            let name = names.save(e);
            Ok(name.restore(self.replace(e.clone())?))
        });
        replaced.collect()
    }

    /// `x NOT IN (SELECT v …)` that is correlated: there is no row for which `v <> x` is not sure. DataFusion has no join for
    /// it, as views have.
    fn replace_not_in(&mut self, e: Expr) -> Result<Expr> {
        e.transform_up(|e| {
            let Expr::InSubquery(InSubquery { expr, subquery, negated: true }) = &e else {
                return Ok(Transformed::no(e));
            };
            let values = columns_of(&subquery.subquery);
            let ([value], false) = (values.as_slice(), subquery.outer_ref_columns.is_empty())
            else {
                return Ok(Transformed::no(e));
            };
            let schema = Arc::clone(self.plan.schema());
            let looked_for = expr.as_ref().clone().transform(|e| match e {
                Expr::Column(c) if schema.has_column(&c) => {
                    let field = Arc::clone(schema.field_from_column(&c)?);
                    Ok(Transformed::yes(Expr::OuterReferenceColumn(field, c)))
                }
                e => Ok(Transformed::no(e)),
            })?;
            let perhaps = value.clone().not_eq(looked_for.data).is_not_true();
            let Some(count) = functions().aggregate("count") else {
                return Err(external(SqlError::internal("count is not registered")));
            };
            let no_groups: [Expr; 0] = [];
            let plan = LogicalPlanBuilder::from(subquery.subquery.as_ref().clone())
                .filter(perhaps)?
                .aggregate(no_groups, [count.call(vec![lit(1i64)]).alias("#found")])?
                .build()?;
            let found = Subquery { subquery: Arc::new(plan), ..subquery.clone() };
            let found = self.lateral(&found, JoinType::Inner)?;
            self.changed |= found.is_some();
            Ok(match found {
                Some(found) => Transformed::yes(found.eq(lit(0i64))),
                None => Transformed::no(e),
            })
        })
        .map(|t| t.data)
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

    /// The value of a subquery of one row as a column. `None`: leave it where it is.
    fn apart(&mut self, subquery: &Subquery, kind: JoinType) -> Result<Option<Expr>> {
        if !self.all && lateral::decorrelates(&subquery.subquery)? {
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
