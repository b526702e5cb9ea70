//! Limits of more rows than there may be: a plan takes memory for the rows that come, never for those that a LIMIT allows.
//!
//! DataFusion makes room for all rows of a limit before it reads the first one where it keeps the best groups of an
//! aggregate, and cannot go to disk where it keeps the first rows of a sort. Both are worth it for small limits.

use std::sync::Arc;

use datafusion::common::tree_node::Transformed;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::aggregates::AggregateExec;
use datafusion::physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion::physical_plan::sorts::sort::SortExec;

use super::node_rule::NodeRule;

/// Groups for which an aggregate may make room at once.
const MOST_GROUPS: usize = 8_192;
/// Rows that a sort may keep without going to disk.
const MOST_ROWS: usize = 65_536;
/// More rows than anything has, and so few that sums of such numbers do not overflow.
const ALL_ROWS: usize = 1 << 60;

/// Numbers of rows that add up. Runs before DataFusion's rules, which add them to each other and to bounds of frames.
pub const COUNTABLE_LIMITS: NodeRule =
    NodeRule::new("countable_limits", |node| Ok(countable(node)));

fn countable(node: Arc<dyn ExecutionPlan>) -> Transformed<Arc<dyn ExecutionPlan>> {
    let Some(limit) = node.downcast_ref::<GlobalLimitExec>() else {
        return Transformed::no(node);
    };
    let (skip, fetch) = (limit.skip(), limit.fetch());
    if skip <= ALL_ROWS && fetch.is_none_or(|fetch| fetch <= ALL_ROWS) {
        return Transformed::no(node);
    }
    let fetch = fetch.map(|fetch| fetch.min(ALL_ROWS));
    let limit = GlobalLimitExec::new(Arc::clone(limit.input()), skip.min(ALL_ROWS), fetch);
    Transformed::yes(Arc::new(limit))
}

/// Takes large limits out of aggregates and sorts. Runs after DataFusion's rules, which put them there.
pub const LARGE_LIMITS: NodeRule = NodeRule::new("large_limits", |node| Ok(relieved(node)));

fn relieved(node: Arc<dyn ExecutionPlan>) -> Transformed<Arc<dyn ExecutionPlan>> {
    if let Some(aggregate) = node.downcast_ref::<AggregateExec>()
        && aggregate.limit_options().is_some_and(|options| options.limit() > MOST_GROUPS)
    {
        // The limit itself stays above: this one only spares work.
        return Transformed::yes(Arc::new(aggregate.with_new_limit_options(None)));
    }
    if let Some(sort) = node.downcast_ref::<SortExec>()
        && let Some(rows) = sort.fetch().filter(|rows| *rows > MOST_ROWS)
    {
        let all = Arc::new(sort.with_fetch(None));
        return Transformed::yes(Arc::new(LocalLimitExec::new(all, rows)));
    }
    Transformed::no(node)
}
