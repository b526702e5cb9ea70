//! From an optimised logical plan to a job graph.

use std::sync::Arc;

use datafusion::common::TableReference;
use datafusion::logical_expr::LogicalPlan;
use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;

use crate::graph::JobGraph;

/// Finds the catalog entry behind a table name of a plan.
pub trait RelationLookup {
    fn lookup(&self, table: &TableReference) -> Option<Arc<Relation>>;
}

/// What becomes of a job's result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sink {
    /// Stored as the relation's rows.
    #[default]
    Materialize,
    /// Computed and counted, not stored.
    Blackhole,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct JobOptions {
    pub sink: Sink,
}

/// Plans the job that maintains `plan`'s result.
pub fn plan_job(
    _plan: &LogicalPlan,
    _catalog: &dyn RelationLookup,
    _options: &JobOptions,
) -> Result<JobGraph, SqlError> {
    Err(SqlError::unsupported("a materialized view"))
}
