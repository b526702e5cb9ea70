//! Lateral joins as plans over their left sides.
//!
//! A right side that only computes, filters and unnests becomes that over the left rows. One that puts rows together
//! (aggregates, takes the first, unites) is computed for each of the different values that it reads of the left side
//! and joined to it by them (T. Neumann, A. Kemper, Unnesting Arbitrary Queries, BTW 2015). Both run in batch and can be
//! maintained. What else there is is left to DataFusion's decorrelation.

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::common::{Column, DFSchema, JoinType, NullEquality, Result, UnnestOptions};
use datafusion::logical_expr::expr::WindowFunction;
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::utils::split_conjunction;
use datafusion::logical_expr::{
    Aggregate, BinaryExpr, Distinct, EmptyRelation, Expr, ExprFunctionExt, Join, Limit,
    LogicalPlan, LogicalPlanBuilder, Operator, Projection, SortExpr, Subquery, SubqueryAlias, cast,
    ident, lit, when,
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
    if let Ok(Some(plan)) = row_by_row(join) {
        return Some(plan);
    }
    // What DataFusion takes apart itself has fewer operators.
    if for_view && decorrelates(&join.right).ok()? {
        return None;
    }
    value_by_value(join).ok()?
}

/// The right side as computations over the rows of the left one.
fn row_by_row(join: &Join) -> Result<Option<LogicalPlan>> {
    if groups(&join.right) {
        return Ok(None);
    }
    let rows = Over { keys: Vec::new() };
    let always = |e: &Expr| *e == lit(true);
    match (join.join_type, &join.filter) {
        (JoinType::Inner, filter) => {
            let Some(plan) = rows.apply(&join.right, &join.left, false)? else { return Ok(None) };
            match filter {
                Some(f) if !always(f) => {
                    LogicalPlanBuilder::from(plan).filter(f.clone())?.build().map(Some)
                }
                _ => Ok(Some(plan)),
            }
        }
        (JoinType::Left, filter) if filter.as_ref().is_none_or(always) => {
            rows.apply(&join.right, &join.left, true)
        }
        _ => Ok(None),
    }
}

/// The right side for each of the different values that it reads of the left one, joined by them. So it does not matter
/// in which order the left side's rows come, nor that its plan is there twice.
fn value_by_value(join: &Join) -> Result<Option<LogicalPlan>> {
    if join.join_type != JoinType::Inner && join.join_type != JoinType::Left {
        return Ok(None);
    }
    let keys = read_columns(&join.right, &join.left)?;
    // Other values the second time would lose rows without a word.
    if keys.is_empty() || is_volatile(&join.left)? {
        return Ok(None);
    }
    let values = LogicalPlanBuilder::from(without_limits(&join.left)?)
        .project(keys.iter().cloned().map(Expr::Column))?
        .distinct()?
        .build()?;
    let over = Over { keys };
    let Some(rows) = over.apply(&join.right, &values, false)? else { return Ok(None) };
    let (width, all) = (over.keys.len(), columns_of(&rows));
    let right: Vec<Expr> = all[width..].to_vec();
    let matched = LogicalPlanBuilder::from(rows)
        .project(over.named_keys().into_iter().chain(right.iter().cloned()))?
        .build()?;
    let filter = join.filter.clone().filter(|f| *f != lit(true));
    let outputs: Vec<Expr> = columns_of(&join.left).into_iter().chain(right).collect();
    over.joined(join.left.as_ref().clone(), matched, join.join_type, filter)?
        .project(outputs)?
        .build()
        .map(Some)
}

/// Whether a plan computes something that differs from one time to the next, such as `random()`.
fn is_volatile(plan: &LogicalPlan) -> Result<bool> {
    let mut volatile = false;
    plan.apply_with_subqueries(|node| {
        volatile |= node.expressions().iter().any(Expr::is_volatile);
        Ok(if volatile { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(volatile)
}

/// A plan with at least the rows of this one: a LIMIT may take others when it is asked a second time.
fn without_limits(plan: &LogicalPlan) -> Result<LogicalPlan> {
    let inputs = match plan {
        LogicalPlan::Limit(l) => return without_limits(&l.input),
        LogicalPlan::Projection(_)
        | LogicalPlan::Filter(_)
        | LogicalPlan::SubqueryAlias(_)
        | LogicalPlan::Sort(_)
        | LogicalPlan::Union(_)
        | LogicalPlan::Distinct(Distinct::All(_)) => {
            plan.inputs().into_iter().map(without_limits).collect::<Result<Vec<_>>>()?
        }
        LogicalPlan::Join(j) if j.join_type == JoinType::Inner => {
            vec![without_limits(&j.left)?, without_limits(&j.right)?]
        }
        LogicalPlan::Join(j) if j.join_type == JoinType::Left => {
            vec![without_limits(&j.left)?, j.right.as_ref().clone()]
        }
        // What is put together of fewer rows is something else.
        _ => return Ok(plan.clone()),
    };
    plan.with_new_exprs(plan.expressions(), inputs)
}

/// The columns of `left` that a plan reads.
fn read_columns(plan: &LogicalPlan, left: &LogicalPlan) -> Result<Vec<Column>> {
    let mut columns: Vec<Column> = Vec::new();
    plan.apply_with_subqueries(|node| {
        for e in node.expressions() {
            e.apply(|e| {
                if let Expr::OuterReferenceColumn(_, c) = e
                    && left.schema().has_column(c)
                    && !columns.contains(c)
                {
                    columns.push(c.clone());
                }
                Ok(TreeNodeRecursion::Continue)
            })?;
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(columns)
}

fn is_subquery(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::SubqueryAlias(a) => is_subquery(&a.input),
        LogicalPlan::Subquery(_) => true,
        _ => false,
    }
}

/// Whether rows of the right side are put together, so that left rows have to be told apart.
fn groups(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::Aggregate(_)
        | LogicalPlan::Distinct(_)
        | LogicalPlan::Limit(_)
        | LogicalPlan::Window(_) => true,
        plan => plan.inputs().into_iter().any(groups),
    }
}

/// Whether DataFusion takes a subquery apart: columns of the outer query are only compared by `=`, in filters between which
/// and the top there are only projections and one aggregate.
pub fn decorrelates(plan: &LogicalPlan) -> Result<bool> {
    match plan {
        LogicalPlan::Subquery(s) => decorrelates(&s.subquery),
        LogicalPlan::SubqueryAlias(a) if is_subquery(plan) => decorrelates(&a.input),
        LogicalPlan::Projection(p) if !refers_outside(&p.expr)? => decorrelates(&p.input),
        LogicalPlan::Aggregate(a) => {
            let own = [a.group_expr.as_slice(), a.aggr_expr.as_slice()];
            let refers = refers_outside(own[0])? || refers_outside(own[1])?;
            Ok(!refers && a.group_expr.is_empty() && filters_by_equality(&a.input)?)
        }
        plan => filters_by_equality(plan),
    }
}

fn filters_by_equality(plan: &LogicalPlan) -> Result<bool> {
    match plan {
        LogicalPlan::Projection(p) if !refers_outside(&p.expr)? => filters_by_equality(&p.input),
        LogicalPlan::Filter(f) => {
            let outer = |e: &Expr| matches!(e, Expr::OuterReferenceColumn(_, _));
            let own = |e: &Expr| -> Result<bool> {
                Ok(e.any_column_refs() && !refers_outside(std::slice::from_ref(e))?)
            };
            for part in split_conjunction(&f.predicate) {
                let equality = match part {
                    Expr::BinaryExpr(BinaryExpr { left, op: Operator::Eq, right }) => {
                        (outer(left) && own(right)?) || (outer(right) && own(left)?)
                    }
                    _ => false,
                };
                if !equality && refers_outside(std::slice::from_ref(part))? {
                    return Ok(false);
                }
            }
            filters_by_equality(&f.input)
        }
        plan => Ok(!reads_outer(plan)?),
    }
}

/// Whether expressions read the outer query, also by way of subqueries.
pub fn refers_outside(exprs: &[Expr]) -> Result<bool> {
    let mut refers = false;
    for e in exprs {
        e.apply(|e| {
            refers |= match e {
                Expr::OuterReferenceColumn(_, _) => true,
                Expr::ScalarSubquery(s) => !s.outer_ref_columns.is_empty(),
                Expr::Exists(x) => !x.subquery.outer_ref_columns.is_empty(),
                Expr::InSubquery(x) => !x.subquery.outer_ref_columns.is_empty(),
                _ => false,
            };
            Ok(TreeNodeRecursion::Continue)
        })?;
    }
    Ok(refers)
}

/// A plan applied to the rows of a left side, which keep their columns in front.
struct Over {
    /// Columns of the left side by which groups are told apart; none: there are no groups.
    keys: Vec<Column>,
}

impl Over {
    fn key_exprs(&self) -> Vec<Expr> {
        self.keys.iter().cloned().map(Expr::Column).collect()
    }

    /// The keys under names of their own.
    fn named_keys(&self) -> Vec<Expr> {
        let named = self.key_exprs().into_iter().enumerate();
        named.map(|(i, key)| key.alias(match_name(i))).collect()
    }

    /// `left` with what [`Over::named_keys`] of `right` say belongs to each row.
    fn joined(
        &self,
        left: LogicalPlan,
        right: LogicalPlan,
        kind: JoinType,
        filter: Option<Expr>,
    ) -> Result<LogicalPlanBuilder> {
        let matches = (0..self.keys.len()).map(|i| Column::from_name(match_name(i)));
        let on = (self.keys.clone(), matches.collect::<Vec<Column>>());
        let same = NullEquality::NullEqualsNull;
        LogicalPlanBuilder::from(left).join_detailed(right, kind, on, filter, same)
    }

    /// The rows of `left`, each with those that the plan has for it. `outer`: a row without any has NULLs.
    /// `None`: the plan does more than that.
    fn apply(
        &self,
        plan: &LogicalPlan,
        left: &LogicalPlan,
        outer: bool,
    ) -> Result<Option<LogicalPlan>> {
        let width = left.schema().fields().len();
        let grouped = !outer && !self.keys.is_empty();
        Ok(match plan {
            LogicalPlan::EmptyRelation(EmptyRelation { produce_one_row: true, .. }) => {
                Some(left.clone())
            }
            LogicalPlan::Subquery(Subquery { subquery, .. }) => {
                self.apply(subquery, left, outer)?
            }
            LogicalPlan::SubqueryAlias(SubqueryAlias { input, schema, .. }) => {
                let Some(inner) = self.apply(input, left, outer)? else { return Ok(None) };
                Some(renamed(inner, width, schema)?)
            }
            LogicalPlan::Projection(p) => {
                let Some(inner) = self.apply(&p.input, left, outer)? else { return Ok(None) };
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
                let Some(inner) = self.apply(&f.input, left, outer)? else { return Ok(None) };
                let predicate = resolved(f.predicate.clone(), left)?;
                Some(LogicalPlanBuilder::from(inner).filter(predicate)?.build()?)
            }
            LogicalPlan::Unnest(u) => {
                let Some(inner) = self.apply(&u.input, left, outer)? else { return Ok(None) };
                let inner = if outer { without_empty(inner, &u.exec_columns)? } else { inner };
                let options = UnnestOptions::new().with_preserve_nulls(outer);
                let unnested = LogicalPlanBuilder::from(inner)
                    .unnest_columns_with_options(u.exec_columns.clone(), options)?;
                Some(unnested.build()?)
            }
            LogicalPlan::Join(j) if !outer => self.join(j, left)?,
            LogicalPlan::Union(u) if grouped => {
                // A union keeps no qualifiers: in it the columns have names of their own.
                let place = |i: usize| format!("#column{i}");
                let mut all: Option<LogicalPlanBuilder> = None;
                for input in &u.inputs {
                    let Some(rows) = self.apply(input, left, false)? else { return Ok(None) };
                    let columns = columns_of(&rows).into_iter().enumerate();
                    let rows = LogicalPlanBuilder::from(rows)
                        .project(columns.map(|(i, c)| c.alias(place(i))))?;
                    all = Some(match all {
                        None => rows,
                        Some(before) => before.union(rows.build()?)?,
                    });
                }
                let Some(all) = all else { return Ok(None) };
                let names = left.schema().iter().chain(u.schema.iter()).enumerate();
                let named =
                    names.map(|(i, (q, f))| ident(place(i)).alias_qualified(q.cloned(), f.name()));
                Some(all.project(named.collect::<Vec<_>>())?.build()?)
            }
            LogicalPlan::Window(w) if grouped => {
                let Some(inner) = self.apply(&w.input, left, false)? else { return Ok(None) };
                let names = NamePreserver::new_for_projection();
                let calls = w.window_expr.iter().map(|e| {
                    let name = names.save(e);
                    Ok(name.restore(partitioned(resolved(e.clone(), left)?, &self.key_exprs())))
                });
                let calls = calls.collect::<Result<Vec<_>>>()?;
                Some(LogicalPlanBuilder::from(inner).window(calls)?.build()?)
            }
            LogicalPlan::Aggregate(a) if grouped => self.aggregated(a, left)?,
            LogicalPlan::Distinct(Distinct::All(input)) if grouped => {
                let Some(inner) = self.apply(input, left, outer)? else { return Ok(None) };
                Some(LogicalPlanBuilder::from(inner).distinct()?.build()?)
            }
            LogicalPlan::Limit(l) if grouped => self.limited(l, left)?,
            LogicalPlan::Sort(s) if !outer => self.apply(&s.input, left, outer)?,
            plan if !outer && !reads_outer(plan)? => {
                Some(LogicalPlanBuilder::from(left.clone()).cross_join(plan.clone())?.build()?)
            }
            _ => None,
        })
    }

    fn join(&self, j: &Join, left: &LogicalPlan) -> Result<Option<LogicalPlan>> {
        let Some(first) = self.apply(&j.left, left, false)? else { return Ok(None) };
        let equal = j.on.iter().map(|(a, b)| a.clone().eq(b.clone()));
        let filters = equal.chain(j.filter.clone()).map(|e| resolved(e, left));
        let filters = filters.collect::<Result<Vec<_>>>()?;
        match j.join_type {
            JoinType::Inner => {
                let Some(both) = self.apply(&j.right, &first, false)? else { return Ok(None) };
                match filters.into_iter().reduce(Expr::and) {
                    None => Ok(Some(both)),
                    Some(all) => LogicalPlanBuilder::from(both).filter(all)?.build().map(Some),
                }
            }
            JoinType::Left if !reads_outer(&j.right)? => LogicalPlanBuilder::from(first)
                .join_on(j.right.as_ref().clone(), JoinType::Left, filters)?
                .build()
                .map(Some),
            _ => Ok(None),
        }
    }

    /// Groups of each left row. Without GROUP BY there is one, also over no rows.
    fn aggregated(&self, a: &Aggregate, left: &LogicalPlan) -> Result<Option<LogicalPlan>> {
        let Some(inner) = self.apply(&a.input, left, false)? else { return Ok(None) };
        let group = a.group_expr.iter().map(|e| resolved(e.clone(), left));
        let group = group.collect::<Result<Vec<_>>>()?;
        if group.iter().any(|e| matches!(e, Expr::GroupingSet(_))) {
            return Ok(None);
        }
        let calls = a.aggr_expr.iter().map(|e| resolved(e.clone(), left));
        let calls = calls.collect::<Result<Vec<_>>>()?;
        let counts: Vec<bool> = calls.iter().map(is_count).collect();
        let keyed = self.key_exprs().into_iter().chain(group.iter().cloned());
        let grouped = LogicalPlanBuilder::from(inner).aggregate(keyed, calls)?.build()?;
        let columns = columns_of(&grouped);
        let result = |i: usize| format!("#result{i}");
        let values = columns[self.keys.len()..].iter().enumerate();
        let values = values.map(|(i, c)| c.clone().alias(result(i)));
        let keys = columns.iter().take(self.keys.len()).enumerate();
        let keys = keys.map(|(i, c)| c.clone().alias(match_name(i)));
        let grouped =
            LogicalPlanBuilder::from(grouped.clone()).project(keys.chain(values))?.build()?;
        let kind = if group.is_empty() { JoinType::Left } else { JoinType::Inner };
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
        self.joined(left.clone(), grouped, kind, None)?.project(all)?.build().map(Some)
    }

    /// The first rows of each left row, by the order below the limit.
    fn limited(&self, l: &Limit, left: &LogicalPlan) -> Result<Option<LogicalPlan>> {
        // The order may stand below projections that keep its columns.
        let (order, input): (Vec<SortExpr>, &LogicalPlan) = match l.input.as_ref() {
            LogicalPlan::Sort(s) => (s.expr.clone(), &s.input),
            LogicalPlan::Projection(p) => match p.input.as_ref() {
                LogicalPlan::Sort(_) => {
                    let plan =
                        LogicalPlan::Limit(Limit { input: Arc::clone(&p.input), ..l.clone() });
                    let p = Projection::try_new(p.expr.clone(), Arc::new(plan))?;
                    return self.apply(&LogicalPlan::Projection(p), left, false);
                }
                _ => (vec![], &l.input),
            },
            other => (vec![], other),
        };
        let Some(inner) = self.apply(input, left, false)? else { return Ok(None) };
        let order = order
            .into_iter()
            .map(|s| Ok(SortExpr { expr: resolved(s.expr, left)?, ..s }))
            .collect::<Result<Vec<_>>>()?;
        let numbered = row_number()?.partition_by(self.key_exprs());
        let numbered = match order.is_empty() {
            true => numbered.build()?,
            false => numbered.order_by(order).build()?,
        };
        let columns = columns_of(&inner);
        let bigint = |e: Expr| cast(e, DataType::Int64);
        let skip = l.skip.as_deref().filter(|skip| skip.to_string() != "Int64(0)");
        let place = || bigint(ident(PLACE));
        let after = skip.map(|skip| place().gt(bigint(skip.clone())));
        let until = l.fetch.as_deref().map(|fetch| {
            let fetch = bigint(fetch.clone());
            place().lt_eq(match skip {
                Some(skip) => bigint(skip.clone()) + fetch,
                None => fetch,
            })
        });
        let mut plan = LogicalPlanBuilder::from(inner).window([numbered.alias(PLACE)])?;
        if let Some(kept) = after.into_iter().chain(until).reduce(Expr::and) {
            plan = plan.filter(kept)?;
        }
        plan.project(columns)?.build().map(Some)
    }
}

fn match_name(i: usize) -> String {
    format!("#match{i}")
}

/// The columns after the left side's under the names of a schema.
fn renamed(plan: LogicalPlan, width: usize, schema: &DFSchema) -> Result<LogicalPlan> {
    let columns = columns_of(&plan);
    let renamed = columns[width..]
        .iter()
        .zip(schema.iter())
        .map(|(c, (q, f))| c.clone().alias_qualified(q.cloned(), f.name()));
    let all: Vec<Expr> = columns[..width].iter().cloned().chain(renamed).collect();
    LogicalPlanBuilder::from(plan).project(all)?.build()
}

/// A window function within each left row.
fn partitioned(e: Expr, keys: &[Expr]) -> Expr {
    match e {
        Expr::Alias(mut alias) => {
            *alias.expr = partitioned(*alias.expr, keys);
            Expr::Alias(alias)
        }
        Expr::WindowFunction(mut call) => {
            call.params.partition_by.splice(0..0, keys.iter().cloned());
            Expr::WindowFunction(call)
        }
        other => other,
    }
}

fn row_number() -> Result<Expr> {
    let udf = functions().window("row_number");
    let udf = udf.ok_or_else(|| external(SqlError::internal("row_number is not registered")))?;
    Ok(Expr::from(WindowFunction::new(udf, vec![])))
}

fn is_count(e: &Expr) -> bool {
    match e {
        Expr::Alias(a) => is_count(&a.expr),
        Expr::AggregateFunction(f) => f.func.name() == "count",
        _ => false,
    }
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
