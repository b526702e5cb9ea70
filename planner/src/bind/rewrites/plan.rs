//! Rewrites of the logical plan, between `SqlToRel` and the optimiser: what PostgreSQL means and DataFusion
//! does not, for batch and views alike.

use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::common::{DFSchema, Result as PlanResult};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::utils::merge_schema;
use datafusion::logical_expr::{Expr, LogicalPlan};
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::interrupt;
use millrace_functions::tree::{Walk, WalkPlan};

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
#[derive(Clone, Copy)]
pub struct PlanRewrite {
    pub name: &'static str,
    /// Plans of views stay as they are.
    pub batch_only: bool,
    pub run: fn(LogicalPlan, &SessionInfo) -> Result<LogicalPlan, SqlError>,
}

impl PlanRewrite {
    pub const fn new(
        name: &'static str,
        run: fn(LogicalPlan, &SessionInfo) -> Result<LogicalPlan, SqlError>,
    ) -> PlanRewrite {
        PlanRewrite { name, batch_only: false, run }
    }

    /// A rewrite that views need not have.
    pub const fn in_batch(
        name: &'static str,
        run: fn(LogicalPlan, &SessionInfo) -> Result<LogicalPlan, SqlError>,
    ) -> PlanRewrite {
        PlanRewrite { name, batch_only: true, run }
    }
}

/// Changes the nodes of a plan and of its subqueries, inner ones first.
pub fn change_nodes(
    plan: LogicalPlan,
    change: impl FnMut(LogicalPlan) -> PlanResult<Transformed<LogicalPlan>>,
) -> Result<LogicalPlan, SqlError> {
    let done = plan.rewrite_up_with_subqueries(change);
    done.map(|t| t.data).map_err(sql_error_from_datafusion)
}

/// Whether a node has an expression that is wanted, or that has one in it.
pub fn has_expression(
    node: &LogicalPlan,
    wanted: impl Fn(&Expr) -> PlanResult<bool>,
) -> PlanResult<bool> {
    let mut found = false;
    node.apply_expressions(|e| {
        found |= e.any(&wanted)?;
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(found)
}

/// Changes the expressions of a plan and of its subqueries, inner ones first, in nodes that have a `concerned`
/// one. Each is told the columns that its node reads; columns keep their names.
pub fn change_expressions(
    plan: LogicalPlan,
    concerned: fn(&Expr) -> PlanResult<bool>,
    change: fn(Expr, &DFSchema) -> PlanResult<Transformed<Expr>>,
) -> Result<LogicalPlan, SqlError> {
    change_nodes(plan, |node| {
        if !has_expression(&node, concerned)? {
            return Ok(Transformed::no(node));
        }
        let schema = merge_schema(&node.inputs());
        let names = NamePreserver::new(&node);
        let one = |e: Expr| {
            let name = names.save(&e);
            let new = e.rewrite_up(|e| change(e, &schema))?;
            Ok(new.update_data(|e| name.restore(e)))
        };
        node.map_expressions(|e| match e {
            // Not its name counts, but those of what it groups by.
            Expr::GroupingSet(_) => e.map_children(one),
            e => one(e),
        })
    })
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
    pub rewrite: PlanRewrite,
    /// The ones it has to stand behind; none, if it goes by nothing that others change.
    pub after: &'static [&'static str],
}

type After = &'static [&'static str];

const fn query(rewrite: PlanRewrite, after: After) -> PlanEntry {
    PlanEntry { of: Of::Query, rewrite, after }
}

const fn statement(rewrite: PlanRewrite, after: After) -> PlanEntry {
    PlanEntry { of: Of::Statement, rewrite, after }
}

/// All rewrites of the plan, in their order.
pub static PLAN_REWRITES: &[PlanEntry] = &[
    // The ones behind it go through shared parts as often as these are referred to.
    query(plan_size::REFUSE_LARGE_PLANS, &[]),
    // Tells an aggregate's query from the ones around it while subqueries stand where they were written.
    query(outer_aggregates::REFUSE_OUTER_AGGREGATES, &["refuse large plans"]),
    // Names are looked for by what comes next.
    query(values::NAME_VALUES, &["refuse large plans"]),
    // A projection that only names columns of VALUES is none any more, and gives them no names of their own.
    query(unique::NAME_UNIQUELY, &["name values"]),
    // The columns of both sides have names of their own when a subquery's value becomes one of them.
    query(join_filters::MOVE_JOIN_FILTERS, &["name uniquely"]),
    // Likewise when what reads the left side becomes a plan over it.
    query(table_functions::UNNEST_TABLE_FUNCTIONS, &["name uniquely"]),
    // The literals are as they were written: a zone is put into expressions once for the statement.
    query(args::READ_WINDOW_DEFAULTS, &[]),
    // Conditions are written out before subqueries are joined by them.
    query(semantic_equality::COMPARE_BY_VALUE, &[]),
    // What a subquery limits becomes a filter by it, which is then taken apart like any other.
    query(limits::FILTER_BY_LIMITS, &[]),
    // Joins hide what a subquery is ordered by.
    query(ordered_input::KEEP_INPUT_ORDER, &[]),
    // DISTINCT ON is refused in a subquery, which it is in no more once that is joined.
    query(lateral::REFUSE_LATERAL_DISTINCT_ON, &[]),
    // See the entries above for why each of these comes first.
    query(
        scalar::DECORRELATE_SCALARS,
        &[
            "name uniquely",
            "compare by value",
            "filter by limits",
            "keep input order",
            "refuse lateral distinct on",
        ],
    ),
    // The equalities of NULLs are those of the joins that subqueries became.
    query(null_keys::GUARD_NULL_KEYS, &["decorrelate scalars"]),
    // Each of these takes marks of its own, in joins that `SqlToRel` made, in limits and in conditions.
    query(set_operations::COUNT_SET_OPERATIONS, &[]),
    query(with_ties::RANK_TIES, &[]),
    query(asof::LATEST_OF_ASOF, &[]),
    // Once more, for the aggregates that subqueries became.
    query(ordered_input::KEEP_JOINED_ORDER, &["decorrelate scalars"]),
    // The scalar subqueries that are left are those that do not depend on the query around them.
    query(empty_scalars::ALLOW_EMPTY_SCALARS, &["decorrelate scalars"]),
    // Counts are taken over unions of both branches, which have one type.
    statement(unions::UNIFY_UNIONS, &["count set operations"]),
    // A NULL may have the type of another branch's column by now.
    statement(null_types::TYPE_NULLS, &["unify unions"]),
    // From here on values are computed, compared and ordered as PostgreSQL does, each by its own types.
    statement(repeated_orders::DROP_REPEATED_ORDERS, &[]),
    statement(guarded_cases::GUARD_CASES, &[]),
    statement(float_order::ORDER_FLOATS, &[]),
    statement(sort_keys::ORDER_BY_KEYS, &[]),
    // What it looks for is what is computed in the end.
    statement(zones::COMPUTE_IN_ZONE, &["read window defaults"]),
    // The zones know frames as they are written.
    statement(frames::CALL_FRAMED, &["compute in zone"]),
];

/// Runs the rewrites of a query's plan, or of a statement's.
pub fn rewrite(
    mut plan: LogicalPlan,
    of: Of,
    session: &SessionInfo,
) -> Result<LogicalPlan, SqlError> {
    for PlanEntry { rewrite, .. } in PLAN_REWRITES.iter().filter(|entry| entry.of == of) {
        interrupt::check()?;
        if !(rewrite.batch_only && session.for_view) {
            plan = (rewrite.run)(plan, session)?;
        }
    }
    Ok(plan)
}
