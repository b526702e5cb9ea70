//! Lateral joins as plans over their left sides.
//!
//! A right side that only computes, filters and unnests becomes that over the left rows: it runs in batch and can be
//! maintained. One that aggregates or takes the first rows needs to tell left rows apart: in batch they get numbers.
//! What else there is is left to DataFusion's decorrelation.

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::common::{Column, JoinType, Result, UnnestOptions};
use datafusion::logical_expr::expr::WindowFunction;
use datafusion::logical_expr::{
    Aggregate, Distinct, EmptyRelation, Expr, ExprFunctionExt, Join, Limit, LogicalPlan,
    LogicalPlanBuilder, Projection, SortExpr, Subquery, SubqueryAlias, cast, ident, lit, when,
};
use millrace_common::SqlError;

use super::provider::columns_of;
use crate::error::external;
use crate::functions::functions;

/// A lateral join as a plan over its left side, where its right side allows that.
pub fn over_left(join: &Join, for_view: bool) -> Option<LogicalPlan> {
    if !join.on.is_empty() || !is_subquery(&join.right) {
        return None;
    }
    if groups(&join.right) {
        // Which row of the left side a group belongs to is said by a number, which no view keeps.
        return if for_view { None } else { numbered(join).ok()? };
    }
    let always = |e: &Expr| *e == lit(true);
    match (join.join_type, &join.filter) {
        (JoinType::Inner, filter) => {
            let plan = apply(&join.right, &join.left, false).ok()??;
            match filter {
                Some(f) if !always(f) => {
                    LogicalPlanBuilder::from(plan).filter(f.clone()).ok()?.build().ok()
                }
                _ => Some(plan),
            }
        }
        (JoinType::Left, filter) if filter.as_ref().is_none_or(always) => {
            apply(&join.right, &join.left, true).ok()?
        }
        _ => None,
    }
}

fn is_subquery(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::SubqueryAlias(a) => is_subquery(&a.input),
        LogicalPlan::Subquery(_) => true,
        _ => false,
    }
}

/// The rows of `left`, each with those that the plan has for it. `outer`: a row without any has NULLs.
/// `None`: the plan does more than compute from one row.
fn apply(plan: &LogicalPlan, left: &LogicalPlan, outer: bool) -> Result<Option<LogicalPlan>> {
    let width = left.schema().fields().len();
    Ok(match plan {
        LogicalPlan::EmptyRelation(EmptyRelation { produce_one_row: true, .. }) => {
            Some(left.clone())
        }
        LogicalPlan::Subquery(Subquery { subquery, .. }) => apply(subquery, left, outer)?,
        LogicalPlan::SubqueryAlias(SubqueryAlias { input, schema, .. }) => {
            let Some(inner) = apply(input, left, outer)? else { return Ok(None) };
            let columns = columns_of(&inner);
            let renamed = columns[width..]
                .iter()
                .zip(schema.iter())
                .map(|(c, (q, f))| c.clone().alias_qualified(q.cloned(), f.name()));
            let all: Vec<Expr> = columns[..width].iter().cloned().chain(renamed).collect();
            Some(LogicalPlanBuilder::from(inner).project(all)?.build()?)
        }
        LogicalPlan::Projection(p) => {
            let Some(inner) = apply(&p.input, left, outer)? else { return Ok(None) };
            let mut all = columns_of(left);
            for (e, (qualifier, field)) in p.expr.iter().zip(p.schema.iter()) {
                let same = matches!(e, Expr::Column(_));
                let e = resolved(e.clone(), left)?;
                all.push(match same {
                    true => e,
                    false => e.unalias().alias_qualified(qualifier.cloned(), field.name()),
                });
            }
            Some(LogicalPlanBuilder::from(inner).project(all)?.build()?)
        }
        LogicalPlan::Filter(f) if !outer => {
            let Some(inner) = apply(&f.input, left, outer)? else { return Ok(None) };
            let predicate = resolved(f.predicate.clone(), left)?;
            Some(LogicalPlanBuilder::from(inner).filter(predicate)?.build()?)
        }
        LogicalPlan::Unnest(u) => {
            let Some(inner) = apply(&u.input, left, outer)? else { return Ok(None) };
            let inner = if outer { without_empty(inner, &u.exec_columns)? } else { inner };
            let options = UnnestOptions::new().with_preserve_nulls(outer);
            let unnested = LogicalPlanBuilder::from(inner)
                .unnest_columns_with_options(u.exec_columns.clone(), options)?;
            Some(unnested.build()?)
        }
        LogicalPlan::Join(j) if !outer && j.join_type == JoinType::Inner => {
            let Some(first) = apply(&j.left, left, outer)? else { return Ok(None) };
            let Some(both) = apply(&j.right, &first, outer)? else { return Ok(None) };
            let equal = j.on.iter().map(|(a, b)| a.clone().eq(b.clone()));
            let filters = equal.chain(j.filter.clone());
            match filters.reduce(Expr::and) {
                None => Some(both),
                Some(all) => {
                    let all = resolved(all, left)?;
                    Some(LogicalPlanBuilder::from(both).filter(all)?.build()?)
                }
            }
        }
        LogicalPlan::Aggregate(a) if !outer => aggregated(a, left)?,
        LogicalPlan::Distinct(Distinct::All(input)) if !outer => {
            let Some(inner) = apply(input, left, outer)? else { return Ok(None) };
            Some(LogicalPlanBuilder::from(inner).distinct()?.build()?)
        }
        LogicalPlan::Limit(l) if !outer => limited(l, left)?,
        LogicalPlan::Sort(s) if !outer => apply(&s.input, left, outer)?,
        plan if !outer && !reads_outer(plan)? => {
            Some(LogicalPlanBuilder::from(left.clone()).cross_join(plan.clone())?.build()?)
        }
        _ => None,
    })
}

/// The number of a left row.
const NUMBER: &str = "#lateral";

/// Whether rows of the right side are put together, so that left rows have to be told apart.
fn groups(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::Aggregate(_) | LogicalPlan::Distinct(_) | LogicalPlan::Limit(_) => true,
        LogicalPlan::SubqueryAlias(_)
        | LogicalPlan::Subquery(_)
        | LogicalPlan::Projection(_)
        | LogicalPlan::Filter(_)
        | LogicalPlan::Sort(_) => plan.inputs().into_iter().any(groups),
        _ => false,
    }
}

fn row_number() -> Result<Expr> {
    let udf = functions().window("row_number");
    let udf = udf.ok_or_else(|| external(SqlError::internal("row_number is not registered")))?;
    Ok(Expr::from(WindowFunction::new(udf, vec![])))
}

/// A lateral join with a number for each left row, which the result has no more.
fn numbered(join: &Join) -> Result<Option<LogicalPlan>> {
    if join.join_type != JoinType::Inner && join.join_type != JoinType::Left {
        return Ok(None);
    }
    let left = LogicalPlanBuilder::from(join.left.as_ref().clone())
        .window([row_number()?.alias(NUMBER)])?
        .build()?;
    let width = left.schema().fields().len();
    let Some(inner) = apply(&join.right, &left, false)? else { return Ok(None) };
    let inner = match &join.filter {
        Some(f) if *f != lit(true) => LogicalPlanBuilder::from(inner).filter(f.clone())?.build()?,
        _ => inner,
    };
    let all = columns_of(&inner);
    let own = all[..width - 1].iter().chain(&all[width..]).cloned().collect::<Vec<_>>();
    if join.join_type == JoinType::Inner {
        return Ok(Some(LogicalPlanBuilder::from(inner).project(own)?.build()?));
    }
    // Left rows without any: the others join them by their numbers.
    let right: Vec<Expr> = all[width..].to_vec();
    let number = ident(NUMBER).alias(MATCH);
    let matched =
        LogicalPlanBuilder::from(inner).project(right.iter().cloned().chain([number]))?.build()?;
    let outputs: Vec<Expr> = columns_of(&join.left).into_iter().chain(right).collect();
    let on = ident(NUMBER).eq(ident(MATCH));
    LogicalPlanBuilder::from(left)
        .join_on(matched, JoinType::Left, [on])?
        .project(outputs)?
        .build()
        .map(Some)
}

/// The number of the left row that a group belongs to.
const MATCH: &str = "#match";

/// Groups of each left row. Without GROUP BY there is one, also over no rows.
fn aggregated(a: &Aggregate, left: &LogicalPlan) -> Result<Option<LogicalPlan>> {
    let Some(inner) = apply(&a.input, left, false)? else { return Ok(None) };
    if !left.schema().has_column_with_unqualified_name(NUMBER) {
        return Ok(None);
    }
    let group = a.group_expr.iter().map(|e| resolved(e.clone(), left));
    let group = group.collect::<Result<Vec<_>>>()?;
    if group.iter().any(|e| matches!(e, Expr::GroupingSet(_))) {
        return Ok(None);
    }
    let calls = a.aggr_expr.iter().map(|e| resolved(e.clone(), left));
    let calls = calls.collect::<Result<Vec<_>>>()?;
    let counts: Vec<bool> = calls.iter().map(is_count).collect();
    let keyed = std::iter::once(ident(NUMBER)).chain(group.iter().cloned());
    let grouped = LogicalPlanBuilder::from(inner).aggregate(keyed, calls)?.build()?;
    let columns = columns_of(&grouped);
    let result = |i: usize| format!("#result{i}");
    let named = columns[1..].iter().enumerate().map(|(i, c)| c.clone().alias(result(i)));
    let grouped = LogicalPlanBuilder::from(grouped)
        .project(std::iter::once(columns[0].clone().alias(MATCH)).chain(named))?
        .build()?;
    let kind = if group.is_empty() { JoinType::Left } else { JoinType::Inner };
    let joined = LogicalPlanBuilder::from(left.clone()).join_on(
        grouped,
        kind,
        [ident(NUMBER).eq(ident(MATCH))],
    )?;
    let outputs = a.schema.iter().enumerate().map(|(i, (qualifier, field))| {
        let counts = i >= group.len() && counts[i - group.len()] && group.is_empty();
        let value = ident(result(i));
        let value = match counts {
            // Over no rows a count is zero, every other aggregate NULL.
            true => when(value.clone().is_null(), lit(0i64)).otherwise(value)?,
            false => value,
        };
        Ok(value.alias_qualified(qualifier.cloned(), field.name()))
    });
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    let all: Vec<Expr> = columns_of(left).into_iter().chain(outputs).collect();
    joined.project(all)?.build().map(Some)
}

fn is_count(e: &Expr) -> bool {
    match e {
        Expr::Alias(a) => is_count(&a.expr),
        Expr::AggregateFunction(f) => f.func.name() == "count",
        _ => false,
    }
}

/// The first rows of each left row, by the order below the limit.
fn limited(l: &Limit, left: &LogicalPlan) -> Result<Option<LogicalPlan>> {
    if !left.schema().has_column_with_unqualified_name(NUMBER) {
        return Ok(None);
    }
    // The order may stand below projections that keep its columns.
    let (order, input): (Vec<SortExpr>, &LogicalPlan) = match l.input.as_ref() {
        LogicalPlan::Sort(s) => (s.expr.clone(), &s.input),
        LogicalPlan::Projection(p) => match p.input.as_ref() {
            LogicalPlan::Sort(_) => {
                let plan = LogicalPlan::Limit(Limit { input: Arc::clone(&p.input), ..l.clone() });
                let p = Projection::try_new(p.expr.clone(), Arc::new(plan))?;
                return apply(&LogicalPlan::Projection(p), left, false);
            }
            _ => (vec![], &l.input),
        },
        other => (vec![], other),
    };
    let Some(inner) = apply(input, left, false)? else { return Ok(None) };
    let order = order
        .into_iter()
        .map(|s| Ok(SortExpr { expr: resolved(s.expr, left)?, ..s }))
        .collect::<Result<Vec<_>>>()?;
    let numbered = row_number()?.partition_by(vec![ident(NUMBER)]).order_by(order).build()?;
    let columns = columns_of(&inner);
    let bigint = |e: Expr| cast(e, DataType::Int64);
    let skip = l.skip.as_deref().cloned().unwrap_or_else(|| lit(0i64));
    let place = || bigint(ident(PLACE));
    let mut kept = place().gt(bigint(skip.clone()));
    if let Some(fetch) = l.fetch.as_deref() {
        kept = kept.and(place().lt_eq(bigint(skip) + bigint(fetch.clone())));
    }
    LogicalPlanBuilder::from(inner)
        .window([numbered.alias(PLACE)])?
        .filter(kept)?
        .project(columns)?
        .build()
        .map(Some)
}

/// A row's place among those of its left row.
const PLACE: &str = "#place";

/// References to the outer query that are columns of `left`, as such.
fn resolved(e: Expr, left: &LogicalPlan) -> Result<Expr> {
    e.transform(|e| match e {
        Expr::OuterReferenceColumn(_, c) if left.schema().has_column(&c) => {
            Ok(Transformed::yes(Expr::Column(c)))
        }
        e => Ok(Transformed::no(e)),
    })
    .map(|t| t.data)
}

fn reads_outer(plan: &LogicalPlan) -> Result<bool> {
    let mut found = false;
    plan.apply_with_subqueries(|node| {
        found |= !node.all_out_ref_exprs().is_empty();
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

/// Empty arrays as NULLs, which an unnest can keep.
fn without_empty(plan: LogicalPlan, lists: &[Column]) -> Result<LogicalPlan> {
    let Some(cardinality) = functions().scalar("cardinality") else { return Ok(plan) };
    let mut columns = columns_of(&plan);
    for column in &mut columns {
        let Expr::Column(c) = &*column else { continue };
        if lists.contains(c) {
            let filled = cardinality.call(vec![column.clone()]).gt(lit(0u64));
            let (relation, name) = (c.relation.clone(), c.name.clone());
            let list = when(filled, column.clone()).end()?;
            *column = list.alias_qualified(relation, name);
        }
    }
    LogicalPlanBuilder::from(plan).project(columns)?.build()
}
