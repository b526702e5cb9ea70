//! Rewrites of the logical plan, between `SqlToRel` and the optimiser: what PostgreSQL means and DataFusion
//! does not, for batch and views alike.

use datafusion::logical_expr::LogicalPlan;
use millrace_common::SqlError;
use millrace_functions::interrupt;

use crate::bind::SessionInfo;
use crate::bind::aggregates::ordered_input;
use crate::bind::expressions::{guarded_cases, null_types, semantic_equality, zones};
use crate::bind::ordering::{float_order, limits, repeated_orders, sort_keys, with_ties};
use crate::bind::relations::{asof, plan_size, set_operations, table_functions, unions, values};
use crate::bind::subqueries::{
    empty_scalars, join_filters, lateral, null_keys, outer_aggregates, scalar, unique,
};
use crate::bind::windows::{args, frames};

/// A rewrite of the logical plan, or a check of it that gives it back as it was.
pub trait PlanRewrite: Sync {
    fn name(&self) -> &'static str;

    fn run(&self, plan: LogicalPlan, session: &SessionInfo) -> Result<LogicalPlan, SqlError>;
}

/// Whose plan a rewrite takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Of {
    /// Each text's that is planned: the statement's, and those of the views that it reads.
    Query,
    /// The statement's, with the views in it.
    Statement,
}

/// A rewrite at its place in the list.
pub struct PlanEntry {
    pub of: Of,
    pub rewrite: &'static dyn PlanRewrite,
    /// The ones it has to stand behind; none, if it goes by nothing that others change.
    pub after: &'static [&'static str],
}

type After = &'static [&'static str];

const fn query(rewrite: &'static dyn PlanRewrite, after: After) -> PlanEntry {
    PlanEntry { of: Of::Query, rewrite, after }
}

const fn statement(rewrite: &'static dyn PlanRewrite, after: After) -> PlanEntry {
    PlanEntry { of: Of::Statement, rewrite, after }
}

/// All rewrites of the plan, in their order.
pub static PLAN_REWRITES: &[PlanEntry] = &[
    // The ones behind it go through shared parts as often as these are referred to.
    query(&plan_size::RefuseLargePlans, &[]),
    // Tells an aggregate's query from the ones around it while subqueries stand where they were written.
    query(&outer_aggregates::RefuseOuterAggregates, &["refuse large plans"]),
    // Names are looked for by what comes next.
    query(&values::NameValues, &["refuse large plans"]),
    // A projection that only names columns of VALUES is none any more, and gives them no names of their own.
    query(&unique::NameUniquely, &["name values"]),
    // The columns of both sides have names of their own when a subquery's value becomes one of them.
    query(&join_filters::MoveJoinFilters, &["name uniquely"]),
    // Likewise when what reads the left side becomes a plan over it.
    query(&table_functions::UnnestTableFunctions, &["name uniquely"]),
    // The literals are as they were written: a zone is put into expressions once for the statement.
    query(&args::ReadWindowDefaults, &[]),
    // Conditions are written out before subqueries are joined by them.
    query(&semantic_equality::CompareByValue, &[]),
    // What a subquery limits becomes a filter by it, which is then taken apart like any other.
    query(&limits::FilterByLimits, &[]),
    // Joins hide what a subquery is ordered by.
    query(&ordered_input::KeepInputOrder, &[]),
    // DISTINCT ON is refused in a subquery, which it is in no more once that is joined.
    query(&lateral::RefuseLateralDistinctOn, &[]),
    // See the entries above for why each of these comes first.
    query(
        &scalar::DecorrelateScalars,
        &[
            "name uniquely",
            "compare by value",
            "filter by limits",
            "keep input order",
            "refuse lateral distinct on",
        ],
    ),
    // The equalities of NULLs are those of the joins that subqueries became.
    query(&null_keys::GuardNullKeys, &["decorrelate scalars"]),
    // Each of these takes marks of its own, in joins that `SqlToRel` made, in limits and in conditions.
    query(&set_operations::CountSetOperations, &[]),
    query(&with_ties::RankTies, &[]),
    query(&asof::LatestOfAsof, &[]),
    // Once more, for the aggregates that subqueries became.
    query(&ordered_input::KeepJoinedOrder, &["decorrelate scalars"]),
    // The scalar subqueries that are left are those that do not depend on the query around them.
    query(&empty_scalars::AllowEmptyScalars, &["decorrelate scalars"]),
    // Counts are taken over unions of both branches, which have one type.
    statement(&unions::UnifyUnions, &["count set operations"]),
    // A NULL may have the type of another branch's column by now.
    statement(&null_types::TypeNulls, &["unify unions"]),
    // From here on values are computed, compared and ordered as PostgreSQL does, each by its own types.
    statement(&repeated_orders::DropRepeatedOrders, &[]),
    statement(&guarded_cases::GuardCases, &[]),
    statement(&float_order::OrderFloats, &[]),
    statement(&sort_keys::OrderByKeys, &[]),
    // What it looks for is what is computed in the end.
    statement(&zones::ComputeInZone, &["read window defaults"]),
    // The zones know frames as they are written.
    statement(&frames::CallFramed, &["compute in zone"]),
];

/// Runs the rewrites of a query's plan, or of a statement's.
pub fn rewrite(
    mut plan: LogicalPlan,
    of: Of,
    session: &SessionInfo,
) -> Result<LogicalPlan, SqlError> {
    for entry in PLAN_REWRITES.iter().filter(|entry| entry.of == of) {
        interrupt::check()?;
        plan = entry.rewrite.run(plan, session)?;
    }
    Ok(plan)
}
