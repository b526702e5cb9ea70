//! Correlated subqueries that compute one value, such as `(SELECT max(y) FROM w WHERE y > v.x)`.
//!
//! DataFusion takes apart those that aggregate and are compared by `=` in filters and SELECT lists. The others become:
//! - the first row (`ORDER BY … LIMIT 1`) by equalities: a join with the row that has number one among those of its key
//!   ([`first_row`]);
//! - what neither aggregates nor limits: an array of what there is, of which [`scalar_subquery_check`] takes the one
//!   element, or there is an error, as PostgreSQL says;
//! - all else: lateral joins ([`super::lateral`]).
//!
//! So does, of whatever kind, a subquery within which others read columns of the query around both
//! ([`super::outer_references`]).

mod aggregate_subqueries;
mod branches;
mod first_row;

use std::sync::Arc;

use datafusion::common::tree_node::Transformed;
use datafusion::common::{DataFusionError, ExprSchema, JoinType, Result};
use datafusion::logical_expr::expr::{AggregateFunction, InSubquery, SetQuantifier};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::utils::{conjunction, split_conjunction};
use datafusion::logical_expr::{
    Aggregate, Expr, Filter, LogicalPlan, LogicalPlanBuilder, Sort, SortExpr, Subquery,
    binary_expr, ident, lit,
};
use millrace_common::SqlError;
use millrace_functions::error::{correlated, external, sql_error_from_datafusion};
use millrace_functions::functions;
use millrace_functions::interrupt;
use millrace_functions::scalar_subquery_check::scalar_subquery_check;
use millrace_functions::tree::{Walk, WalkPlan};

use super::lateral;
use super::lateral::Predicate;
use super::outer_references;
use crate::bind::relations::provider::columns_of;
use crate::bind::rewrites::plan::PlanRewrite;
use branches::Branch;

/// Makes joins of correlated subqueries that compute one value.
pub const DECORRELATE_SCALARS: PlanRewrite =
    PlanRewrite::new("decorrelate scalars", |plan, session| rewrite(plan, session.for_view));

/// Takes apart what DataFusion does not.
fn rewrite(plan: LogicalPlan, for_view: bool) -> std::result::Result<LogicalPlan, SqlError> {
    // From the outermost query inwards: it is the others that then have its columns.
    let across = aggregate_subqueries::rewrite(plan).and_then(|plan| {
        plan.rewrite_down_with_subqueries(|node| taken_apart(node, Which::Across))
    });
    let rest = across.and_then(|across| {
        let which = Which::Rest { for_view };
        across.data.rewrite_up_with_subqueries(|node| taken_apart(node, which))
    });
    rest.map(|t| t.data).map_err(sql_error_from_datafusion)
}

/// The subqueries that are taken out of expressions.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    /// Those within which others read columns of the query around all of them.
    Across,
    /// Those with one value that DataFusion does not take apart.
    Rest { for_view: bool },
}

fn taken_apart(node: LogicalPlan, which: Which) -> Result<Transformed<LogicalPlan>> {
    interrupt::check().map_err(external)?;
    match &node {
        LogicalPlan::Projection(p) => {
            let mut joined = Joined::over(&p.input, which, false);
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
            let (input, condition) = filtered_before(f)?;
            let mut joined = Joined::over(&input, which, false);
            let predicate = match which {
                Which::Rest { for_view: false } => joined.replace_not_in(condition)?,
                _ => condition,
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
            let mut joined = Joined::over(&a.input, which, true);
            let group = joined.replace_named(&a.group_expr)?;
            let calls = joined.replace_named(&a.aggr_expr)?;
            if !joined.changed {
                return Ok(Transformed::no(node));
            }
            let aggregate = Aggregate::try_new(Arc::new(joined.plan), group, calls)?;
            Ok(Transformed::yes(LogicalPlan::Aggregate(aggregate)))
        }
        LogicalPlan::Sort(s) => {
            let mut joined = Joined::over(&s.input, which, true);
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
        _ => {
            match which {
                Which::Across => outer_references::refuse_across(&node)?,
                Which::Rest { .. } => aggregate_subqueries::refuse_groups(&node)?,
            }
            Ok(Transformed::no(node))
        }
    }
}

/// The input of a filter with what its condition says without subqueries, and the rest of that: subqueries are then
/// computed for fewer rows.
fn filtered_before(f: &Filter) -> Result<(LogicalPlan, Expr)> {
    let is_plain = |e: &Expr| {
        let found = e.any(|e| Ok(outer_references::subquery_of(e).is_some()))?;
        Ok::<_, DataFusionError>(!found && !e.is_volatile())
    };
    let (mut before, mut rest) = (Vec::new(), Vec::new());
    for part in split_conjunction(&f.predicate) {
        let side = if is_plain(part)? { &mut before } else { &mut rest };
        side.push(part.clone());
    }
    match (conjunction(before), conjunction(rest)) {
        (Some(before), Some(rest)) => {
            let input = Filter::try_new(before, Arc::clone(&f.input))?;
            Ok((LogicalPlan::Filter(input), rest))
        }
        _ => Ok((f.input.as_ref().clone(), f.predicate.clone())),
    }
}

/// The input of an expression, with a column for each subquery that was taken out of it.
struct Joined {
    plan: LogicalPlan,
    /// The input as it was: what the subqueries read of it they need not read of one another's results.
    source: LogicalPlan,
    count: usize,
    changed: bool,
    across: bool,
    /// Also those that DataFusion takes apart elsewhere.
    all: bool,
    /// Not in a view.
    batch: bool,
    /// Where in a CASE the subquery stands that is taken out.
    branch: Branch,
}

impl Joined {
    fn over(plan: &LogicalPlan, which: Which, all: bool) -> Joined {
        let across = which == Which::Across;
        let (plan, source) = (plan.clone(), plan.clone());
        let batch = which == Which::Rest { for_view: false };
        let (all, branch) = (all || across, Branch::default());
        Joined { plan, source, count: 0, changed: false, across, all, batch, branch }
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

    /// `x NOT IN (SELECT v …)` that is correlated: there is no row for which `v <> x` is not sure.
    /// DataFusion has no join for it, as views have.
    fn replace_not_in(&mut self, e: Expr) -> Result<Expr> {
        e.rewrite_up(|e| {
            let new = match &e {
                Expr::InSubquery(x) if x.negated && !x.subquery.outer_ref_columns.is_empty() => {
                    self.found_in(x)?
                }
                _ => None,
            };
            self.changed |= new.is_some();
            Ok(new.map_or_else(|| Transformed::no(e), Transformed::yes))
        })
        .map(|t| t.data)
    }

    fn replace(&mut self, e: Expr) -> Result<Expr> {
        if branches::has_branches(&e)? {
            return self.replace_reached(e, &Branch::default());
        }
        e.rewrite_up(|e| {
            let new = self.replaced(&e)?;
            self.changed |= new.is_some();
            Ok(new.map_or_else(|| Transformed::no(e), Transformed::yes))
        })
        .map(|t| t.data)
    }

    /// What a subquery becomes; `None`: it stays.
    fn replaced(&mut self, e: &Expr) -> Result<Option<Expr>> {
        match (e, self.across) {
            (e, true) => self.read_across(e),
            (Expr::ScalarSubquery(s), false) if !s.outer_ref_columns.is_empty() => self.value(s),
            (Expr::ScalarSubquery(_), false) => self.asked_for(e),
            (e, false) => self.not_joined(e),
        }
    }

    /// Predicates that DataFusion's joins are not made for, such as EXISTS of a group that is there over no rows too.
    fn not_joined(&mut self, e: &Expr) -> Result<Option<Expr>> {
        let kind = match e {
            Expr::Exists(_) => Predicate::Exists,
            Expr::InSubquery(_) | Expr::SetComparison(_) => Predicate::Compared,
            _ => return Ok(None),
        };
        let Some(subquery) = outer_references::subquery_of(e) else { return Ok(None) };
        if subquery.outer_ref_columns.is_empty()
            || !aggregate_subqueries::has_group(subquery)?
                && lateral::joins(&subquery.subquery, kind)?
        {
            return Ok(None);
        }
        self.truth(e)?.map_or_else(|| Err(external(correlated())), |e| Ok(Some(e)))
    }

    /// A subquery within which others read this query's columns. Where it is computed for these, as a join,
    /// they are columns of the queries around those others too.
    fn read_across(&mut self, e: &Expr) -> Result<Option<Expr>> {
        let Some(subquery) = outer_references::subquery_of(e) else { return Ok(None) };
        if !outer_references::reads_across(&subquery.subquery, self.plan.schema())? {
            return Ok(None);
        }
        let new = match e {
            Expr::ScalarSubquery(subquery) => self.value(subquery)?,
            e => self.truth(e)?,
        };
        new.map_or_else(|| Err(external(correlated())), |e| Ok(Some(e)))
    }

    /// Whether a predicate holds, where NULL is as good as false: whether its subquery has rows of some kind.
    fn truth(&mut self, e: &Expr) -> Result<Option<Expr>> {
        match e {
            Expr::Exists(x) => self.found(&x.subquery, None, x.negated),
            Expr::InSubquery(x) => self.found_in(x),
            Expr::SetComparison(x) => {
                let values = columns_of(&x.subquery.subquery);
                let [value] = values.as_slice() else { return Ok(None) };
                let holds = binary_expr(self.from_within(&x.expr)?, x.op, value.clone());
                match x.quantifier {
                    SetQuantifier::Any => self.found(&x.subquery, Some(holds), false),
                    SetQuantifier::All => self.found(&x.subquery, Some(holds.is_not_true()), true),
                }
            }
            _ => Ok(None),
        }
    }

    /// An expression over the input as a subquery reads it.
    fn from_within(&self, e: &Expr) -> Result<Expr> {
        let schema = Arc::clone(self.plan.schema());
        let read = e.clone().rewrite_up(|e| match e {
            Expr::Column(c) if schema.has_column(&c) => {
                let field = Arc::clone(schema.field_from_column(&c)?);
                Ok(Transformed::yes(Expr::OuterReferenceColumn(field, c)))
            }
            e => Ok(Transformed::no(e)),
        });
        read.map(|t| t.data)
    }

    /// IN, where NULL is as good as false: whether rows are equal to what is looked for, or for NOT IN none may be.
    fn found_in(&mut self, x: &InSubquery) -> Result<Option<Expr>> {
        let values = columns_of(&x.subquery.subquery);
        let [value] = values.as_slice() else { return Ok(None) };
        let looked_for = self.from_within(&x.expr)?;
        let like = match x.negated {
            true => value.clone().not_eq(looked_for).is_not_true(),
            false => value.clone().eq(looked_for),
        };
        self.found(&x.subquery, Some(like), x.negated)
    }

    /// Whether a subquery has rows, or has none; `like`: which ones.
    fn found(
        &mut self,
        subquery: &Subquery,
        like: Option<Expr>,
        none: bool,
    ) -> Result<Option<Expr>> {
        let Some(count) = functions().aggregate("count") else {
            return Err(external(SqlError::internal("count is not registered")));
        };
        let mut plan = LogicalPlanBuilder::from(subquery.subquery.as_ref().clone());
        if let Some(like) = like {
            plan = plan.filter(like)?;
        }
        let no_groups: [Expr; 0] = [];
        let count = count.call(vec![lit(1i64)]).alias("#found");
        let plan = Arc::new(plan.aggregate(no_groups, [count])?.build()?);
        let found = Subquery { subquery: plan, ..subquery.clone() };
        let found = self.lateral(&found, JoinType::Inner)?;
        Ok(found.map(|found| match none {
            true => found.eq(lit(0i64)),
            false => found.gt(lit(0i64)),
        }))
    }

    /// The value of a correlated subquery. `None`: it stays where it is.
    fn value(&mut self, subquery: &Subquery) -> Result<Option<Expr>> {
        let plan = &subquery.subquery;
        if is_one_row(plan) {
            return self.apart(subquery, JoinType::Inner);
        }
        if first_row::is_limited(plan) {
            return self.first_row(subquery);
        }
        let all = gathered(subquery)?;
        Ok(match self.apart(&all, JoinType::Inner)? {
            None if self.across => None,
            value => {
                Some(scalar_subquery_check().call(vec![value.unwrap_or(Expr::ScalarSubquery(all))]))
            }
        })
    }

    /// The value of a subquery of one row as a column. `None`: leave it where it is.
    fn apart(&mut self, subquery: &Subquery, kind: JoinType) -> Result<Option<Expr>> {
        let partial = self.is_partial(&subquery.subquery)?;
        if !self.all && !partial && lateral::decorrelates(&subquery.subquery)? {
            return Ok(None);
        }
        self.lateral(subquery, kind)
    }

    fn first_row(&mut self, subquery: &Subquery) -> Result<Option<Expr>> {
        let name = self.next_name();
        if !self.across
            && let Some(plan) = first_row::join(&self.plan, &subquery.subquery, &name)?
        {
            self.plan = plan;
            self.count += 1;
            return Ok(Some(ident(name)));
        }
        self.lateral(subquery, JoinType::Left)
    }

    fn next_name(&self) -> String {
        let schema = self.plan.schema();
        let mut place = self.count;
        // The input may have some that were taken out of the same expression before.
        while schema.has_column_with_unqualified_name(&format!("#scalar{place}")) {
            place += 1;
        }
        format!("#scalar{place}")
    }

    /// The input with what a subquery has for each of its rows, or for those that reach the subquery.
    fn joined(&self, right: LogicalPlan, kind: JoinType) -> Result<Option<LogicalPlan>> {
        let left = || LogicalPlanBuilder::from(self.plan.clone());
        if let Some(reached) = self.reached(&right)? {
            let both = left().join_on(right.clone(), JoinType::Left, [lit(true)])?.build()?;
            if let LogicalPlan::Join(join) = both
                && let Some(plan) = lateral::over_some(&join, &reached)
            {
                return Ok(Some(plan));
            }
        }
        let both = match kind {
            JoinType::Inner => left().cross_join(right)?,
            kind => left().join_on(right, kind, [lit(true)])?,
        };
        match both.build()? {
            LogicalPlan::Join(join) => Ok(lateral::over_values(&join, &self.source, false)),
            _ => Ok(None),
        }
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
        let Some(plan) = self.joined(right, kind)? else { return Ok(None) };
        aggregate_subqueries::check_size(&plan)?;
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

#[cfg(test)]
mod tests;
