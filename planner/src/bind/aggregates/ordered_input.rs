//! `array_agg(x)` of a subquery with ORDER BY: PostgreSQL's rows come in that order, and the result has it.
//!
//! A sort below an aggregate says nothing in a plan. So what the subquery is ordered by becomes columns of
//! it, and the order that of the aggregates whose result depends on one and that say none themselves.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::common::{Column, Result};
use datafusion::logical_expr::expr::Sort as SortExpr;
use datafusion::logical_expr::{
    Aggregate, Expr, Filter, Limit, LogicalPlan, Projection, Sort, SubqueryAlias, ident,
};
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::tree::{Walk, WalkPlan};

use crate::bind::relations::provider::columns_of;
use crate::bind::rewrites::plan::PlanRewrite;
use crate::bind::subqueries::outer_references::subquery_of;

/// Aggregates whose results are in the order of their rows; those of documents are made of `array_agg`.
const ORDERED: [&str; 2] = ["array_agg", "string_agg"];

/// Gives aggregates the order of the subqueries whose rows they take.
pub const KEEP_INPUT_ORDER: PlanRewrite =
    PlanRewrite::new("keep input order", |plan, _| keep(plan));

/// [`KEEP_INPUT_ORDER`] of the aggregates that subqueries have become.
pub const KEEP_JOINED_ORDER: PlanRewrite =
    PlanRewrite::new("keep joined order", |plan, _| keep(plan));

fn keep(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    let kept = plan.rewrite_up_with_subqueries(|node| match &node {
        LogicalPlan::Aggregate(aggregate) => match ordered(aggregate)? {
            Some(aggregate) => Ok(Transformed::yes(LogicalPlan::Aggregate(aggregate))),
            None => Ok(Transformed::no(node)),
        },
        _ => Ok(Transformed::no(node)),
    });
    kept.map(|t| t.data).map_err(sql_error_from_datafusion)
}

fn ordered(aggregate: &Aggregate) -> Result<Option<Aggregate>> {
    if !aggregate.aggr_expr.iter().any(wants_order) {
        return Ok(None);
    }
    let Some((input, order)) = exposed(&aggregate.input, false)? else { return Ok(None) };
    let calls = aggregate.aggr_expr.iter().map(|e| in_order(e, &order)).collect();
    Aggregate::try_new(Arc::new(input), aggregate.group_expr.clone(), calls).map(Some)
}

fn wants_order(e: &Expr) -> bool {
    match e {
        Expr::Alias(alias) => wants_order(&alias.expr),
        Expr::AggregateFunction(f) => {
            let free = !f.params.distinct && f.params.order_by.is_empty();
            free && ORDERED.contains(&f.func.name())
        }
        _ => false,
    }
}

/// A call in an order, by the name that it had.
fn in_order(e: &Expr, order: &[SortExpr]) -> Expr {
    if !wants_order(e) {
        return e.clone();
    }
    let (relation, name) = e.qualified_name();
    let mut call = e.clone().unalias();
    if let Expr::AggregateFunction(f) = &mut call {
        f.params.order_by = order.to_vec();
    }
    call.alias_qualified(relation, name)
}

fn order_name(i: usize) -> String {
    format!("#order{i}")
}

/// A plan with what its rows are ordered by as further columns; `None`: they are in no order. `limited`:
/// which rows there are depends on the order.
fn exposed(plan: &LogicalPlan, limited: bool) -> Result<Option<(LogicalPlan, Vec<SortExpr>)>> {
    Ok(match plan {
        LogicalPlan::Sort(sort) => of_sort(plan, sort, limited)?,
        LogicalPlan::Limit(limit) => exposed(&limit.input, true)?.map(|(input, order)| {
            let (skip, fetch) = (limit.skip.clone(), limit.fetch.clone());
            (LogicalPlan::Limit(Limit { skip, fetch, input: Arc::new(input) }), order)
        }),
        LogicalPlan::Filter(filter) => match exposed(&filter.input, limited)? {
            Some((input, order)) => {
                let filter = Filter::try_new(filter.predicate.clone(), Arc::new(input))?;
                Some((LogicalPlan::Filter(filter), order))
            }
            None => None,
        },
        LogicalPlan::Projection(projection) => match exposed(&projection.input, limited)? {
            Some((input, order)) => {
                let more = order.iter().map(|by| by.expr.clone());
                let exprs = projection.expr.iter().cloned().chain(more).collect();
                let projection = Projection::try_new(exprs, Arc::new(input))?;
                Some((LogicalPlan::Projection(projection), order))
            }
            None => None,
        },
        LogicalPlan::SubqueryAlias(alias) => match exposed(&alias.input, limited)? {
            Some((input, order)) => {
                let of_alias = |(i, by): (usize, SortExpr)| {
                    let column = Column::new(Some(alias.alias.clone()), order_name(i));
                    by.with_expr(Expr::Column(column))
                };
                let order = order.into_iter().enumerate().map(of_alias).collect();
                let named = SubqueryAlias::try_new(Arc::new(input), alias.alias.clone())?;
                Some((LogicalPlan::SubqueryAlias(named), order))
            }
            None => None,
        },
        _ => None,
    })
}

fn of_sort(
    plan: &LogicalPlan,
    sort: &Sort,
    limited: bool,
) -> Result<Option<(LogicalPlan, Vec<SortExpr>)>> {
    for by in &sort.expr {
        if !is_plain(&by.expr)? {
            return Ok(None);
        }
    }
    let mut exprs = columns_of(plan);
    let keys = sort.expr.iter().enumerate();
    exprs.extend(keys.clone().map(|(i, by)| by.expr.clone().alias(order_name(i))));
    let order = keys.map(|(i, by)| by.with_expr(ident(order_name(i)))).collect();
    let input = match limited || sort.fetch.is_some() {
        true => Arc::new(plan.clone()),
        false => Arc::clone(&sort.input),
    };
    Ok(Some((LogicalPlan::Projection(Projection::try_new(exprs, input)?), order)))
}

/// Whether an expression is the same each time that it is computed, here as well as below.
fn is_plain(e: &Expr) -> Result<bool> {
    let mut plain = !e.is_volatile();
    e.walk(|e| {
        plain &= subquery_of(e).is_none() && !matches!(e, Expr::OuterReferenceColumn(..));
        Ok(if plain { TreeNodeRecursion::Continue } else { TreeNodeRecursion::Stop })
    })?;
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    #[test]
    fn an_array_has_the_order_of_its_subquery() {
        let sql = "SELECT array_agg(a) FROM \
                   (SELECT a FROM (VALUES (2), (1), (3)) AS v (a) ORDER BY a DESC) AS s";
        assert_eq!(rows(sql), ["{3,2,1}"]);
    }
}
