//! Starts a job from its committed version: state opened, tasks built and spawned.

use std::sync::Arc;

use millrace_common::{Epoch, RelationId, SqlError, TableId};
use millrace_planner::codec::decode_graph;
use millrace_planner::graph::{AccessClass, JobGraph};
use millrace_rpc::catalog::{Relation, RelationKind, RowStorage};
use millrace_rpc::services::StartJob;
use millrace_storage::{JobStore, StateClass, TableDesc};

use super::Shared;
use super::derived::Derived;
use super::job::{Job, Kind};
use super::table::Table;
use crate::dml::Sequencer;
use crate::dml::sequencer::Limits;
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::task::build::{Blueprint, build};

pub async fn start(shared: &Arc<Shared>, start: StartJob) -> Result<Arc<Job>, ExecError> {
    let kind = RelationKind::try_from(start.relation.kind).unwrap_or(RelationKind::Unspecified);
    match kind {
        RelationKind::Source => {
            let meta = shared.meta()?;
            let errors = Arc::new(ErrorSink::default());
            let id = RelationId(start.relation.id);
            Ok(Job::new(id, start.generation, None, Kind::Nothing, meta, Vec::new(), errors))
        }
        RelationKind::Table => start_table(shared, start).await,
        RelationKind::MaterializedView | RelationKind::Index | RelationKind::Sink => {
            start_derived(shared, start).await
        }
        RelationKind::View | RelationKind::Unspecified => {
            Err(ExecError::internal("a plain view has no job"))
        }
    }
}

/// The state of a table, or of a job whose graph cannot be loaded: its rows.
fn rows_table(relation: &Relation) -> Result<TableDesc, ExecError> {
    let storage = RowStorage::try_from(relation.storage)
        .map_err(|_| SqlError::internal("unknown row storage in the catalog"))?;
    Ok(TableDesc {
        id: TableId(relation.first_table_id),
        name: "rows".to_string(),
        value_schema: relation.arrow_schema()?,
        storage,
        class: match storage {
            RowStorage::Append => StateClass::Append,
            _ => StateClass::PointUpdate,
        },
        relation: true,
    })
}

fn tables(relation: &Relation, graph: &JobGraph) -> Vec<TableDesc> {
    let ids = relation.first_table_id..;
    let describe = |(id, table): (u32, &millrace_planner::graph::StateTable)| TableDesc {
        id: TableId(id),
        name: table.name.clone(),
        value_schema: Arc::clone(&table.value_schema),
        storage: table.storage,
        class: match table.class {
            AccessClass::PointUpdate => StateClass::PointUpdate,
            AccessClass::Append => StateClass::Append,
            AccessClass::RangeRead => StateClass::RangeRead,
            AccessClass::Lookup => StateClass::Lookup,
            AccessClass::Merge => StateClass::Merge,
        },
        relation: table.relation,
    };
    ids.zip(&graph.tables).map(describe).collect()
}

async fn open(
    shared: &Shared,
    start: &StartJob,
    tables: Vec<TableDesc>,
) -> Result<Arc<JobStore>, ExecError> {
    let id = RelationId(start.relation.id);
    Ok(shared.store.open_job(id, tables, &start.version).await?)
}

async fn start_table(shared: &Arc<Shared>, start: StartJob) -> Result<Arc<Job>, ExecError> {
    let meta = shared.meta()?;
    let id = RelationId(start.relation.id);
    let store = open(shared, &start, vec![rows_table(&start.relation)?]).await?;
    let limits = Limits {
        statement_bytes: shared.options.statement_bytes,
        delta_bytes: shared.options.delta_bytes,
    };
    let governor = Arc::clone(&shared.governor);
    let sequencer = Sequencer::new(
        &start.relation,
        &store,
        &start.version,
        Arc::clone(&meta),
        governor,
        Arc::clone(&shared.ties),
        limits,
    )?;
    let last = Epoch(start.version.epoch);
    shared.hub.open(id, last);
    let table = Table::new(
        id,
        start.generation,
        Arc::new(sequencer),
        Arc::clone(&store),
        Arc::clone(&shared.hub),
        last,
    );
    let errors = Arc::new(ErrorSink::default());
    let kind = Kind::Table(table);
    Ok(Job::new(id, start.generation, Some(store), kind, meta, Vec::new(), errors))
}

async fn start_derived(shared: &Arc<Shared>, start: StartJob) -> Result<Arc<Job>, ExecError> {
    match decode_graph(&start.relation.graph) {
        Ok(graph) => start_graph(shared, start, &graph).await,
        Err(e) => {
            // Its rows stay readable.
            open(shared, &start, vec![rows_table(&start.relation)?]).await?;
            Err(ExecError::Sql(e.into()))
        }
    }
}

/// Starts a derived job with its graph decoded.
pub async fn start_graph(
    shared: &Arc<Shared>,
    start: StartJob,
    graph: &JobGraph,
) -> Result<Arc<Job>, ExecError> {
    let meta = shared.meta()?;
    let id = RelationId(start.relation.id);
    let store = open(shared, &start, tables(&start.relation, graph)).await?;
    let errors = Arc::new(ErrorSink::default());
    let built = build(Blueprint {
        job: id,
        generation: start.generation,
        graph,
        relation: &start.relation,
        inputs: &start.inputs,
        version: &start.version,
        parallelism: start.parallelism,
        job_store: Arc::clone(&store),
        store: Arc::clone(&shared.store),
        hub: Arc::clone(&shared.hub),
        meta: Arc::clone(&meta),
        governor: Arc::clone(&shared.governor),
        options: Arc::clone(&shared.options),
        errors: Arc::clone(&errors),
    })?;
    match &start.version.backfill {
        // Opened when it has caught up.
        Some(_) => shared.hub.close(id),
        None => shared.hub.open(id, Epoch(start.version.epoch)),
    }
    let derived = Derived::new(
        id,
        start.generation,
        Arc::clone(&store),
        Arc::clone(&shared.hub),
        &start.version,
        built.cuts,
        built.reports,
        built.tasks.len(),
    );
    let kind = Kind::Derived(derived);
    let job = Job::new(id, start.generation, Some(store), kind, meta, built.metrics, errors);
    job.spawn(built.tasks, &shared.runtime);
    Ok(job)
}
