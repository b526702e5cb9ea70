//! Lateral joins as plans over their left sides.
//!
//! A right side that only computes, filters and unnests becomes that over the left rows. One that puts rows together
//! (aggregates, takes the first, unites) is computed for each of the different values that it reads of the left side
//! and joined to it by them (T. Neumann, A. Kemper, Unnesting Arbitrary Queries, BTW 2015). Both run in
//! batch and can be maintained. What else there is is left to DataFusion's decorrelation.

mod names;
mod simple;

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::common::{
    Column, DFSchema, JoinType, NullEquality, Result, ScalarValue, Spans, UnnestOptions,
};
use datafusion::logical_expr::expr::WindowFunction;
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::{
    Aggregate, Distinct, EmptyRelation, Expr, ExprFunctionExt, Join, Limit, LogicalPlan,
    LogicalPlanBuilder, Operator, Projection, ScalarUDF, SortExpr, Subquery, SubqueryAlias, Union,
    Window, binary_expr, cast, ident, lit, when,
};
use millrace_common::SqlError;
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::interrupt;
use millrace_functions::tree::{Walk, WalkPlan};
use millrace_functions::{functions, row_counts};

use super::outer_references;
use crate::bind::relations::provider::columns_of;
use crate::bind::rewrites::plan::{PlanRewrite, has_expression};
pub use simple::{Predicate, decorrelates, joins, refers_outside};

/// A lateral join as a plan over its left side, where its right side allows that.
pub fn over_left(join: &Join, for_view: bool) -> Option<LogicalPlan> {
    match is_subquery(&join.right) {
        true => over_values(join, &join.left, for_view),
        false => over_values(&as_lateral(join).ok()??, &join.left, for_view),
    }
}

/// A join whose right side reads its left one without being a subquery: one of the right side's own lateral
/// joins does, or a subquery of an expression.
fn as_lateral(join: &Join) -> Result<Option<Join>> {
    if read_columns(&join.right, &join.left)?.is_empty() {
        return Ok(None);
    }
    let equal = join.on.iter().map(|(a, b)| a.clone().eq(b.clone()));
    let filter = equal.chain(join.filter.clone()).reduce(Expr::and);
    let outer_ref_columns = join.right.all_out_ref_exprs();
    let subquery = Arc::clone(&join.right);
    let right = Subquery { subquery, outer_ref_columns, spans: Spans::new() };
    let right = Arc::new(LogicalPlan::Subquery(right));
    Ok(Some(Join { on: Vec::new(), filter, right, ..join.clone() }))
}

/// The same, where the values that the right side reads are also those of `source`: a plan of which the left
/// side has every row, and whose columns are its first ones.
pub fn over_values(join: &Join, source: &LogicalPlan, for_view: bool) -> Option<LogicalPlan> {
    if !join.on.is_empty() || !is_subquery(&join.right) {
        return None;
    }
    if let Some(plan) = named_apart(join, source, |join, _| row_by_row(join)) {
        return Some(plan);
    }
    // What DataFusion takes apart itself has fewer operators.
    if for_view && decorrelates(&join.right).ok()? && !reads_beyond(join).ok()? {
        return None;
    }
    named_apart(join, source, value_by_value)
}

/// The same for the values of some of the left side's rows only; the others have NULLs.
pub fn over_some(join: &Join, some: &LogicalPlan) -> Option<LogicalPlan> {
    match join.on.is_empty() && is_subquery(&join.right) {
        true => named_apart(join, some, value_by_value),
        false => None,
    }
}

/// What `way` makes of a join and the source of its values, where columns of both sides may be called the same.
fn named_apart(
    join: &Join,
    source: &LogicalPlan,
    way: impl Fn(&Join, &LogicalPlan) -> Result<Option<LogicalPlan>>,
) -> Option<LogicalPlan> {
    match way(join, source) {
        Ok(plan) => plan,
        Err(_) => names::with_own(join, source, way).ok()?,
    }
}

/// Whether the right side reads columns of queries further out than the left side.
fn reads_beyond(join: &Join) -> Result<bool> {
    let mut found = false;
    join.right.walk_with_subqueries(|node| {
        let read = node.all_out_ref_exprs();
        found |= read.iter().any(|e| match e {
            Expr::OuterReferenceColumn(_, c) => !join.left.schema().has_column(c),
            _ => false,
        });
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

/// The right side as computations over the rows of the left one.
fn row_by_row(join: &Join) -> Result<Option<LogicalPlan>> {
    if groups(&join.right) {
        return Ok(None);
    }
    let rows = Over { keys: Vec::new(), matches: String::new() };
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
/// in which order the left side's rows come, nor that its plan is there twice: that of `source`, where it
/// has the values. The left side may be the source with a column for each of many subqueries, and a second
/// copy of all of them for the next would be twice as many every time.
fn value_by_value(join: &Join, source: &LogicalPlan) -> Result<Option<LogicalPlan>> {
    if join.join_type != JoinType::Inner && join.join_type != JoinType::Left {
        return Ok(None);
    }
    let keys = read_columns(&join.right, &join.left)?;
    // Other values the second time would lose rows without a word.
    if keys.is_empty() || is_volatile(&join.left)? {
        return Ok(None);
    }
    let all_there = keys.iter().all(|key| source.schema().has_column(key));
    let source = if all_there { source } else { join.left.as_ref() };
    let values = LogicalPlanBuilder::from(without_limits(source)?)
        .project(keys.iter().cloned().map(Expr::Column))?
        .distinct()?
        .build()?;
    let over = Over { keys, matches: names::unused(join, "#match")? };
    let filter = join.filter.clone().filter(|f| *f != lit(true));
    over.by_key(join.left.as_ref().clone(), &join.right, &values, join.join_type, filter)
}

/// Whether a plan computes something that differs from one time to the next, such as `random()`.
fn is_volatile(plan: &LogicalPlan) -> Result<bool> {
    let mut volatile = false;
    plan.walk_with_subqueries(|node| {
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
    plan.walk_with_subqueries(|node| {
        for e in node.expressions() {
            e.walk(|e| {
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

pub(in crate::bind) fn is_subquery(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::SubqueryAlias(a) => is_subquery(&a.input),
        LogicalPlan::Subquery(_) => true,
        _ => false,
    }
}

/// Whether a plan reads a relation.
fn scans(plan: &LogicalPlan) -> Result<bool> {
    plan.any(|node| Ok(matches!(node, LogicalPlan::TableScan(_))))
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

/// Whether a plan gives what it should only over left rows that differ by the keys: rows are put together, or padded.
fn needs_keys(plan: &LogicalPlan) -> Result<bool> {
    if let LogicalPlan::Join(join) = plan
        && join.join_type == JoinType::Left
        && reads_outer(&join.right)?
    {
        return Ok(true);
    }
    for input in plan.inputs() {
        if needs_keys(input)? {
            return Ok(true);
        }
    }
    Ok(groups(plan))
}

/// A plan applied to the rows of a left side, which keep their columns in front.
struct Over {
    /// Columns of the left side by which groups are told apart; none: there are no groups. The left side of a plan that
    /// has groups has one row for each of their values.
    keys: Vec<Column>,
    /// What names of their values start with where they are joined by.
    matches: String,
}

impl Over {
    fn key_exprs(&self) -> Vec<Expr> {
        self.keys.iter().cloned().map(Expr::Column).collect()
    }

    fn match_name(&self, i: usize) -> String {
        format!("{}{i}", self.matches)
    }

    /// The keys under names of their own.
    fn named_keys(&self) -> Vec<Expr> {
        let named = self.key_exprs().into_iter().enumerate();
        named.map(|(i, key)| key.alias(self.match_name(i))).collect()
    }

    /// `left` with what [`Over::named_keys`] of `right` say belongs to each row.
    fn joined(
        &self,
        left: LogicalPlan,
        right: LogicalPlan,
        kind: JoinType,
        filter: Option<Expr>,
    ) -> Result<LogicalPlanBuilder> {
        let matches = (0..self.keys.len()).map(|i| Column::from_name(self.match_name(i)));
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
        interrupt::check().map_err(external)?;
        let width = left.schema().fields().len();
        let grouped = !outer && !self.keys.is_empty();
        // What is the same for all left rows is put together once.
        if grouped && groups(plan) && !reads_outer(plan)? {
            let both = LogicalPlanBuilder::from(left.clone()).cross_join(plan.clone())?;
            return both.build().map(Some);
        }
        Ok(match plan {
            LogicalPlan::EmptyRelation(EmptyRelation { produce_one_row: true, .. }) => {
                Some(left.clone())
            }
            LogicalPlan::Subquery(Subquery { subquery, .. }) => {
                self.apply(subquery, left, outer)?
            }
            // Below its alias a relation may be called as one of the left side.
            LogicalPlan::SubqueryAlias(a) if !outer && scans(&a.input)? && !reads_outer(plan)? => {
                Some(LogicalPlanBuilder::from(left.clone()).cross_join(plan.clone())?.build()?)
            }
            LogicalPlan::SubqueryAlias(SubqueryAlias { input, schema, .. }) => {
                let Some(inner) = self.apply(input, left, outer)? else { return Ok(None) };
                Some(renamed(inner, width, schema)?)
            }
            LogicalPlan::Projection(p) => self.projected(p, left, outer)?,
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
            LogicalPlan::Union(u) if grouped => self.united(u, left)?,
            LogicalPlan::Window(w) if grouped => self.windowed(w, left)?,
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

    fn projected(
        &self,
        p: &Projection,
        left: &LogicalPlan,
        outer: bool,
    ) -> Result<Option<LogicalPlan>> {
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
        LogicalPlanBuilder::from(inner).project(all)?.build().map(Some)
    }

    fn united(&self, u: &Union, left: &LogicalPlan) -> Result<Option<LogicalPlan>> {
        // A union keeps no qualifiers: in it the columns have names of their own.
        let place = |i: usize| format!("#column{i}");
        let mut all: Option<LogicalPlanBuilder> = None;
        for input in &u.inputs {
            let Some(rows) = self.apply(input, left, false)? else { return Ok(None) };
            let columns = columns_of(&rows).into_iter().enumerate();
            let rows =
                LogicalPlanBuilder::from(rows).project(columns.map(|(i, c)| c.alias(place(i))))?;
            all = Some(match all {
                None => rows,
                Some(before) => before.union(rows.build()?)?,
            });
        }
        let Some(all) = all else { return Ok(None) };
        let names = left.schema().iter().chain(u.schema.iter()).enumerate();
        let named = names.map(|(i, (q, f))| ident(place(i)).alias_qualified(q.cloned(), f.name()));
        all.project(named.collect::<Vec<_>>())?.build().map(Some)
    }

    fn windowed(&self, w: &Window, left: &LogicalPlan) -> Result<Option<LogicalPlan>> {
        let Some(inner) = self.apply(&w.input, left, false)? else { return Ok(None) };
        let names = NamePreserver::new_for_projection();
        let calls = w.window_expr.iter().map(|e| {
            let name = names.save(e);
            Ok(name.restore(partitioned(resolved(e.clone(), left)?, &self.key_exprs())))
        });
        let calls = calls.collect::<Result<Vec<_>>>()?;
        LogicalPlanBuilder::from(inner).window(calls)?.build().map(Some)
    }

    fn join(&self, j: &Join, left: &LogicalPlan) -> Result<Option<LogicalPlan>> {
        if is_subquery(&j.right) && !read_columns(&j.right, &j.left)?.is_empty() {
            // A lateral join of its own: first over its own left side.
            return match over_left(j, false) {
                Some(plan) => self.apply(&plan, left, false),
                None => Ok(None),
            };
        }
        let Some(first) = self.apply(&j.left, left, false)? else { return Ok(None) };
        let op = match j.null_equality {
            NullEquality::NullEqualsNull => Operator::IsNotDistinctFrom,
            NullEquality::NullEqualsNothing => Operator::Eq,
        };
        let equal = j.on.iter().map(|(a, b)| binary_expr(a.clone(), op, b.clone()));
        let filters = equal.chain(j.filter.clone()).map(|e| resolved(e, left));
        let filters = filters.collect::<Result<Vec<_>>>()?;
        let filter = filters.into_iter().reduce(Expr::and);
        let reads = reads_outer(&j.right)?;
        let apart = !self.keys.is_empty() && reads;
        match j.join_type {
            // Over the joined rows its groups would have each of them.
            JoinType::Inner if apart && needs_keys(&j.right)? => {
                self.by_key(first, &j.right, left, JoinType::Inner, filter)
            }
            JoinType::Inner => {
                let Some(both) = self.apply(&j.right, &first, false)? else { return Ok(None) };
                match filter {
                    None => Ok(Some(both)),
                    Some(all) => LogicalPlanBuilder::from(both).filter(all)?.build().map(Some),
                }
            }
            JoinType::Left if apart => self.by_key(first, &j.right, left, JoinType::Left, filter),
            JoinType::Left if !reads => LogicalPlanBuilder::from(first)
                .join_on(j.right.as_ref().clone(), JoinType::Left, filter)?
                .build()
                .map(Some),
            _ => Ok(None),
        }
    }

    /// `first` with what `right` has for each of the rows of `left`, by the keys.
    fn by_key(
        &self,
        first: LogicalPlan,
        right: &LogicalPlan,
        left: &LogicalPlan,
        kind: JoinType,
        filter: Option<Expr>,
    ) -> Result<Option<LogicalPlan>> {
        let Some(rows) = self.apply(right, left, false)? else { return Ok(None) };
        let all = columns_of(&rows);
        let own: Vec<Expr> = all[left.schema().fields().len()..].to_vec();
        let matched = LogicalPlanBuilder::from(rows)
            .project(self.named_keys().into_iter().chain(own.iter().cloned()))?
            .build()?;
        let outputs: Vec<Expr> = columns_of(&first).into_iter().chain(own).collect();
        self.joined(first, matched, kind, filter)?.project(outputs)?.build().map(Some)
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
        let keys = keys.map(|(i, c)| c.clone().alias(self.match_name(i)));
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
        let skip = bound_of(&l.skip, left, row_counts::offset())?;
        let fetch = bound_of(&l.fetch, left, row_counts::limit())?;
        let mut plan = LogicalPlanBuilder::from(inner).window([numbered.alias(PLACE)])?;
        if let Some(kept) = kept(skip.filter(|skip| known(skip) != Some(0)), fetch) {
            plan = plan.filter(kept)?;
        }
        plan.project(columns)?.build().map(Some)
    }
}

/// Which of the rows of a left row are kept; `None`: all.
fn kept(skip: Option<Expr>, fetch: Option<Expr>) -> Option<Expr> {
    let place = || cast(ident(PLACE), DataType::Int64);
    let after = skip.clone().map(|skip| place().gt(skip));
    let until = fetch.map(|fetch| match skip {
        None => place().lt_eq(fetch),
        Some(skip) => match (known(&skip), known(&fetch)) {
            (Some(skip), Some(fetch)) => place().lt_eq(lit(skip.saturating_add(fetch))),
            // Their sum may be more than a bigint holds.
            _ => (place() - skip).lt_eq(fetch),
        },
    });
    after.into_iter().chain(until).reduce(Expr::and)
}

fn known(bound: &Expr) -> Option<i64> {
    match bound {
        Expr::Literal(ScalarValue::Int64(count), _) => *count,
        _ => None,
    }
}

/// A limit's number of rows, or that of those before them, which may be one of the left side's. `rows`: what a computed
/// number means.
fn bound_of(
    e: &Option<Box<Expr>>,
    left: &LogicalPlan,
    rows: Arc<ScalarUDF>,
) -> Result<Option<Expr>> {
    let Some(e) = e.as_deref() else { return Ok(None) };
    Ok(Some(match resolved(e.clone(), left)? {
        literal @ Expr::Literal(ScalarValue::Int64(Some(_)), _) => literal,
        e => rows.call(vec![cast(e, DataType::Int64)]),
    }))
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
        Expr::AggregateFunction(f) => matches!(f.func.name(), "count" | "regr_count"),
        _ => false,
    }
}

/// A row's place among those of its left row.
const PLACE: &str = "#place";

/// References to the outer query that are columns of `left`, as such.
fn resolved(e: Expr, left: &LogicalPlan) -> Result<Expr> {
    e.rewrite_up(|e| match e {
        Expr::OuterReferenceColumn(_, c) if left.schema().has_column(&c) => {
            Ok(Transformed::yes(Expr::Column(c)))
        }
        e => Ok(Transformed::no(e)),
    })
    .map(|t| t.data)
}

/// Refuses DISTINCT ON in subqueries that read an outer query.
pub const REFUSE_LATERAL_DISTINCT_ON: PlanRewrite =
    PlanRewrite::new("refuse lateral distinct on", |plan, _| {
        refuse_distinct_on(&plan).map_err(sql_error_from_datafusion)?;
        Ok(plan)
    });

/// Refuses DISTINCT ON over the rows that a subquery has for one outer row: what is first among them is not
/// what is first among all, from which DataFusion would choose those of the outer row.
fn refuse_distinct_on(plan: &LogicalPlan) -> Result<()> {
    plan.walk_with_subqueries(|node| {
        if let LogicalPlan::Subquery(s) = node {
            without_distinct_on(&s.subquery)?;
        }
        node.apply_expressions(|e| {
            e.walk(|e| {
                match e {
                    Expr::Exists(e) => without_distinct_on(&e.subquery.subquery)?,
                    Expr::InSubquery(e) => without_distinct_on(&e.subquery.subquery)?,
                    Expr::SetComparison(e) => without_distinct_on(&e.subquery.subquery)?,
                    Expr::ScalarSubquery(s) => without_distinct_on(&s.subquery)?,
                    _ => {}
                }
                Ok(TreeNodeRecursion::Continue)
            })
        })
    })
    .map(|_| ())
}

fn without_distinct_on(plan: &LogicalPlan) -> Result<()> {
    let is_outer = |e: &Expr| Ok(matches!(e, Expr::OuterReferenceColumn(_, _)));
    plan.walk(|node| {
        if !matches!(node, LogicalPlan::Distinct(Distinct::On(_))) {
            return Ok(TreeNodeRecursion::Continue);
        }
        match node.any(|below| has_expression(below, is_outer))? {
            true => Err(external(
                SqlError::unsupported("DISTINCT ON in a correlated subquery").with_hint(
                    "row_number() OVER (PARTITION BY … ORDER BY …) = 1 in it says the same.",
                ),
            )),
            false => Ok(TreeNodeRecursion::Continue),
        }
    })
    .map(|_| ())
}

/// Whether a plan, or a subquery of it, reads columns of queries around it.
pub(in crate::bind) fn reads_outer(plan: &LogicalPlan) -> Result<bool> {
    Ok(!outer_references::outer_columns(plan)?.is_empty())
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
