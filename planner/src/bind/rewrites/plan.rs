//! Rewrites of the logical plan, between `SqlToRel` and the optimiser: what PostgreSQL means and DataFusion does not, for
//! batch and views alike.

use datafusion::logical_expr::LogicalPlan;
use millrace_common::SqlError;
use millrace_functions::interrupt;

use crate::bind::{
    SessionInfo, asof, empty_scalars, float_order, frames, guarded_cases, join_filters, lateral,
    limits, null_keys, null_types, ordered_input, outer_aggregates, plan_size, repeated_orders,
    scalar, semantic_equality, set_operations, sort_keys, table_functions, unions, unique, values,
    window_args, with_ties, zones,
};

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
    /// The ones it has to stand behind.
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
    query(&values::NameValues, &["refuse large plans"]),
    // A projection that only names columns of VALUES is none any more.
    query(&unique::NameUniquely, &["name values"]),
    // The columns of both sides have names of their own when a subquery's value becomes one of them.
    query(&join_filters::MoveJoinFilters, &["name uniquely"]),
    // Likewise when what reads the left side becomes a plan over it.
    query(&table_functions::UnnestTableFunctions, &["name uniquely"]),
    query(&window_args::ReadWindowDefaults, &[]),
    query(&semantic_equality::CompareByValue, &[]),
    query(&limits::FilterByLimits, &[]),
    query(&ordered_input::KeepInputOrder, &[]),
    // DISTINCT ON is refused in a subquery, which it is in no more once that is joined.
    query(&lateral::RefuseLateralDistinctOn, &[]),
    // Joins hide what subqueries are ordered by; and rows that are numbered by a LIMIT are compared with a subquery.
    query(
        &scalar::DecorrelateScalars,
        &["keep input order", "filter by limits", "refuse lateral distinct on", "name uniquely"],
    ),
    // The equalities of NULLs are those of the joins that subqueries became.
    query(&null_keys::GuardNullKeys, &["decorrelate scalars"]),
    query(&set_operations::CountSetOperations, &[]),
    query(&with_ties::RankTies, &[]),
    query(&asof::LatestOfAsof, &[]),
    // Once more, for the aggregates that subqueries became.
    query(&ordered_input::KeepJoinedOrder, &["decorrelate scalars"]),
    // The scalar subqueries that are left are those that do not depend on the query around them.
    query(&empty_scalars::AllowEmptyScalars, &["decorrelate scalars"]),
    statement(&unions::UnifyUnions, &["count set operations"]),
    // A NULL may have the type of another branch's column by now.
    statement(&null_types::TypeNulls, &["unify unions"]),
    statement(&repeated_orders::DropRepeatedOrders, &[]),
    statement(&guarded_cases::GuardCases, &[]),
    statement(&float_order::OrderFloats, &[]),
    statement(&sort_keys::OrderByKeys, &[]),
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
