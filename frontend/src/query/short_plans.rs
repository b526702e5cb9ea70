//! Statements by key, answered where they are planned.
//!
//! Most statements look at one row, and what they cost is planning: rules that find nothing to do, tasks and channels for a
//! row, batches with room for thousands. So a plan that is simple ([`is_simple`]) and finds a few rows at most, since its
//! relation is read at one key or its rows are given, runs without all of that, on the thread that has planned it. It
//! ends with the statement there: its future is dropped, and computing its rows takes no time that could be interrupted.
//! Every other plan goes on as usual; what has been done of it is the beginning of that.

use std::any::Any;
use std::sync::Arc;

use arrow::array::RecordBatch;
use datafusion::catalog::TableProvider;
use datafusion::datasource::{MemTable, source_as_provider};
use datafusion::error::DataFusionError;
use datafusion::execution::TaskContext;
use datafusion::execution::session_state::{SessionState, SessionStateBuilder};
use datafusion::logical_expr::{LogicalPlan, TableScan};
use datafusion::physical_plan::execute_stream;
use datafusion::prelude::SessionConfig;
use futures::StreamExt;
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_planner::optimizer::short::{FEW_ROWS, is_simple, optimize_simple};

use super::batch_size::is_too_large;
use super::snapshot_table::SnapshotTable;
use crate::cluster::BatchStream;

/// What short plans are made and run in.
pub struct ShortPlans {
    /// Without rules over physical plans: they are about joins, sorts, aggregates, limits, unions and partitions.
    state: SessionState,
    context: Arc<TaskContext>,
}

/// How far a plan has come on the short way.
pub enum Begun {
    Answered(BatchStream),
    /// It is none of these plans.
    Other(LogicalPlan),
}

impl ShortPlans {
    /// For the same plans as `usual`.
    pub fn new(usual: &SessionState) -> ShortPlans {
        let config = usual.config().clone().with_target_partitions(1).with_batch_size(FEW_ROWS);
        let state = SessionStateBuilder::new_from_existing(usual.clone())
            .with_config(config)
            .with_physical_optimizer_rules(Vec::new())
            .build();
        let context = Arc::new(bare_context(&state, state.config().clone()));
        ShortPlans { state, context }
    }

    /// Runs a plan if it is short; its rows are few, and complete.
    pub async fn answer(&self, plan: LogicalPlan) -> Result<Begun, SqlError> {
        if !is_simple(&plan) {
            return Ok(Begun::Other(plan));
        }
        let plan = optimize_simple(plan)?;
        if !finds_few_rows(&plan) {
            return Ok(Begun::Other(plan));
        }
        Ok(match self.rows(&plan).await {
            // The usual way has fewer rows in a batch.
            Err(e) if is_too_large(&e) => Begun::Other(plan),
            Err(e) => Begun::Answered(futures::stream::iter([Err(told(e))]).boxed()),
            Ok(batches) => {
                Begun::Answered(futures::stream::iter(batches.into_iter().map(Ok)).boxed())
            }
        })
    }

    async fn rows(&self, plan: &LogicalPlan) -> Result<Vec<RecordBatch>, DataFusionError> {
        let planner = self.state.query_planner();
        let physical = planner.create_physical_plan(plan, &self.state).await?;
        let mut stream = execute_stream(physical, Arc::clone(&self.context))?;
        let mut batches = Vec::new();
        while let Some(batch) = stream.next().await {
            batches.push(batch?);
        }
        Ok(batches)
    }
}

fn told(e: DataFusionError) -> SqlError {
    sql_error_from_datafusion(e)
}

/// What a plan runs in: without the functions, which are looked up by name only where plans are read from bytes.
pub fn bare_context(state: &SessionState, config: SessionConfig) -> TaskContext {
    TaskContext::new(
        None,
        state.session_id().to_owned(),
        config,
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Arc::clone(state.runtime_env()),
    )
}

/// Whether the rows that an optimised simple plan is made of are few, whatever its relation holds.
fn finds_few_rows(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::Projection(p) => finds_few_rows(&p.input),
        LogicalPlan::Filter(f) => finds_few_rows(&f.input),
        LogicalPlan::SubqueryAlias(a) => finds_few_rows(&a.input),
        LogicalPlan::TableScan(scan) => reads_few_rows(scan),
        LogicalPlan::EmptyRelation(_) => true,
        LogicalPlan::Values(v) => v.values.len() <= FEW_ROWS,
        _ => false,
    }
}

fn reads_few_rows(scan: &TableScan) -> bool {
    let Ok(provider) = source_as_provider(&scan.source) else { return false };
    let provider: &dyn TableProvider = provider.as_ref();
    let provider: &dyn Any = provider;
    if let Some(table) = provider.downcast_ref::<SnapshotTable>() {
        return table.reads_one_key(&scan.filters);
    }
    provider.downcast_ref::<MemTable>().is_some_and(|table| match table.batches.as_slice() {
        [only] => only.try_read().is_ok_and(|batches| {
            batches.iter().map(RecordBatch::num_rows).sum::<usize>() <= FEW_ROWS
        }),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array, StringArray};
    use arrow::util::pretty::pretty_format_batches;
    use datafusion::prelude::SessionContext;

    use super::*;
    use crate::query::QueryEngine;
    use crate::query::planning::Held;

    /// An engine, its way for short plans, and a session with a small table and a large one.
    fn engine() -> (QueryEngine, ShortPlans, SessionContext) {
        let engine = QueryEngine::new(2, 256 << 20, || {}).unwrap();
        // Before there are tables: it has a catalog of its own.
        let short = ShortPlans::new(engine.usual_state());
        let tables = SessionContext::new_with_state(engine.usual_state().clone());
        let columns = |rows: i64| {
            let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows));
            let v = (0..rows).map(|row| (row % 3 > 0).then_some(row * 10));
            let v: ArrayRef = Arc::new(Int64Array::from_iter(v));
            let names = StringArray::from_iter_values((0..rows).map(|row| format!("n{row}")));
            let names: ArrayRef = Arc::new(names);
            RecordBatch::try_from_iter([("id", ids), ("v", v), ("name", names)]).unwrap()
        };
        tables.register_batch("few", columns(8)).unwrap();
        tables.register_batch("many", columns(FEW_ROWS as i64 + 1)).unwrap();
        (engine, short, tables)
    }

    async fn plan(tables: &SessionContext, query: &str) -> LogicalPlan {
        tables.state().create_logical_plan(query).await.unwrap()
    }

    async fn is_answered(query: &str) -> bool {
        let (_engine, short, tables) = engine();
        let begun = short.answer(plan(&tables, query).await).await.unwrap();
        matches!(begun, Begun::Answered(_))
    }

    #[tokio::test]
    async fn plans_of_few_rows_are_short() {
        for query in
            ["SELECT v + 1 FROM few WHERE id = 3", "SELECT 1", "SELECT 1 FROM many WHERE 1 = 2"]
        {
            assert!(is_answered(query).await, "{query}");
        }
        for query in [
            "SELECT v + 1 FROM many WHERE id = 3",
            "SELECT v FROM few ORDER BY v",
            "SELECT max(v) FROM few",
            "SELECT v FROM few LIMIT 3",
        ] {
            assert!(!is_answered(query).await, "{query}");
        }
    }

    /// Rows as text, or the error.
    async fn shown(engine: &QueryEngine, plan: LogicalPlan) -> String {
        let mut stream = match engine.run(plan, &Held::new(engine)).await {
            Ok(stream) => stream,
            Err(e) => return format!("{} {}", e.state.0, e.message),
        };
        let mut batches = Vec::new();
        while let Some(batch) = stream.next().await {
            match batch {
                Ok(batch) if batch.num_rows() == 0 => {}
                Ok(batch) => batches.push(batch),
                Err(e) => return format!("{} {}", e.state.0, e.message),
            }
        }
        pretty_format_batches(&batches).unwrap().to_string()
    }

    /// A LIMIT that cuts nothing off makes a query go the usual way.
    #[tokio::test(flavor = "multi_thread")]
    async fn both_ways_give_the_same_rows_and_errors() {
        let (engine, _, tables) = engine();
        for items in [
            "*",
            "id, v + 1, v * v, name",
            "v + 1, (v + 1) * 2, -(v + 1)",
            "CASE WHEN v > 20 THEN id ELSE v END, coalesce(v, id)",
            "pg_div(id, id - 3)",
            "CAST(v AS VARCHAR), CAST(id AS SMALLINT), v IS NULL, NOT (v > 30)",
            "v BETWEEN 10 AND 40, v IN (10, 20), v IN (10, NULL), v IS DISTINCT FROM 10",
            "pg_add(9223372036854775807, id)",
            "CAST(id AS DOUBLE) / 0, v % 7",
        ] {
            for filter in [
                "true",
                "id = 3",
                "id = 3 AND v = 30",
                "v IS NULL",
                "v > 10 OR pg_div(id, 0) > 1",
                "id <> 3 AND pg_div(10, id - 3) > 0",
                "NULL",
                "false",
                "id = 2 AND name = 'n2'",
            ] {
                let query = format!("SELECT {items} FROM few WHERE {filter}");
                let simple = plan(&tables, &query).await;
                let usual = plan(&tables, &format!("{query} LIMIT 1000")).await;
                assert!(!is_simple(&usual));
                let (simple, usual) = (shown(&engine, simple).await, shown(&engine, usual).await);
                assert_eq!(simple, usual, "{query}");
            }
        }
    }
}
