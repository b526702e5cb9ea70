//! Starts a job from its committed version, as the log has it here: state opened, tasks built and spawned.

use std::sync::Arc;

use futures::FutureExt;
use millrace_common::access::AccessClass;
use millrace_common::task::spawn_on;
use millrace_common::{Epoch, RelationId, SqlError, TableId};
use millrace_connector::sink::create_target;
use millrace_graph::codec::decode_graph;
use millrace_graph::{JobGraph, Operator, StateTable};
use millrace_rpc::catalog::{Relation, RelationKind, RowStorage};
use millrace_rpc::request::carried;
use millrace_rpc::services::{CompactionTask, JobToStart};
use millrace_rpc::version::{JobVersion, retention_counter};
use millrace_storage::{JobStore, TableDesc};

use super::Shared;
use super::derived::{Cleaning, Derived};
use super::feed::{self, Feed, FeedAhead};
use super::into_table::TableTarget;
use super::job::{Job, Kind};
use super::table::Table;
use crate::dml::Sequencer;
use crate::dml::sequencer::{Common, EARLY_SEAL_INLINES, Limits};
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::layout::RowLayout;
use crate::lookahead::read_ahead::{ReadFrom, read_ahead};
use crate::options::JOB_OPTIONS;
use crate::publish::{Publisher, Target};
use crate::stats::{JobMetrics, Progress};
use crate::task::build::{Blueprint, build, fragment_tasks};

/// `parallelism`: see [`StartJob`](millrace_rpc::services::StartJob).
pub async fn start(
    shared: &Arc<Shared>,
    start: JobToStart,
    parallelism: usize,
) -> Result<Arc<Job>, ExecError> {
    let kind = RelationKind::try_from(start.relation.kind).unwrap_or(RelationKind::Unspecified);
    match kind {
        RelationKind::Source => without_tasks(shared, &start, None),
        _ if start.version.detached.is_some() => open_detached(shared, start, kind).await,
        RelationKind::Table => start_table(shared, start).await,
        RelationKind::MaterializedView | RelationKind::Index | RelationKind::Sink => {
            start_derived(shared, start, parallelism).await
        }
        RelationKind::View | RelationKind::Subscription | RelationKind::Unspecified => {
            Err(ExecError::internal("a relation without rows has no job"))
        }
    }
}

/// A job that is there for others to read.
fn without_tasks(
    shared: &Shared,
    start: &JobToStart,
    store: Option<Arc<JobStore>>,
) -> Result<Arc<Job>, ExecError> {
    let meta = shared.meta()?;
    let progress = Arc::new(Progress::new(shared.store.env().clone()));
    let metrics = JobMetrics::plain(Vec::new(), progress);
    let (relation, errors) = (&start.relation, Arc::new(ErrorSink::default()));
    Ok(Job::new(relation, start.generation, store, Kind::Nothing, meta, metrics, errors))
}

/// What the job had computed stays readable.
async fn open_detached(
    shared: &Shared,
    start: JobToStart,
    kind: RelationKind,
) -> Result<Arc<Job>, ExecError> {
    shared.changelogs.close(RelationId(start.relation.id));
    let store = match kind {
        RelationKind::Sink => None,
        _ => Some(open(shared, &start, vec![rows_table(&start.relation)?]).await?),
    };
    without_tasks(shared, &start, store)
}

/// The state table that has a relation's rows: all that others read of its job.
pub fn rows_table(relation: &Relation) -> Result<TableDesc, ExecError> {
    let storage = RowStorage::try_from(relation.storage)
        .map_err(|_| SqlError::internal("unknown row storage in the catalog"))?;
    Ok(TableDesc {
        id: TableId(relation.first_table_id),
        name: "rows".to_string(),
        value_schema: relation.arrow_schema()?,
        storage,
        class: match storage {
            RowStorage::Append => AccessClass::Append,
            _ => AccessClass::PointUpdate,
        },
        relation: true,
        retention: None,
    })
}

/// The state table whose runs a task names, for who merges them without running the job: by the task alone. `None`: the
/// job has no such table.
pub fn describe_table(task: &CompactionTask) -> Result<Option<TableDesc>, SqlError> {
    let Some(run) = task.inputs.first() else { return Ok(None) };
    let Some(position) = task.table.position else {
        let rows = rows_table(&task.relation).map_err(ExecError::into_sql)?;
        return Ok(Some(rows).filter(|rows| rows.id == TableId(run.table_id)));
    };
    let graph = decode_graph(&task.relation.graph)?;
    Ok(graph.tables.get(position as usize).map(|table| described(run.table_id, table)))
}

fn tables(relation: &Relation, version: &JobVersion, graph: &JobGraph) -> Vec<TableDesc> {
    let first = relation.first_table_id;
    // In a rebuild what is computed is collected beside the rows.
    let rows = graph.tables.first().filter(|_| version.is_rebuilding()).map(|rows| (first, rows));
    let tables = rows.into_iter().chain(state_tables(relation, version, graph));
    tables.map(|(id, table)| described(id, table)).collect()
}

/// A table of a job's graph, with its id.
fn described(id: u32, table: &StateTable) -> TableDesc {
    TableDesc {
        id: TableId(id),
        name: table.name.clone(),
        value_schema: Arc::clone(&table.value_schema),
        storage: table.storage,
        class: table.class,
        relation: table.relation,
        retention: table.retention.as_ref().map(|r| r.by),
    }
}

/// The tables of a job's graph, with their ids.
fn state_tables<'a>(
    relation: &'a Relation,
    version: &'a JobVersion,
    graph: &'a JobGraph,
) -> impl Iterator<Item = (u32, &'a StateTable)> {
    let ids = (0..).map(|position| version.state_table(relation.first_table_id, position));
    ids.zip(&graph.tables)
}

async fn open(
    shared: &Shared,
    start: &JobToStart,
    tables: Vec<TableDesc>,
) -> Result<Arc<JobStore>, ExecError> {
    let id = RelationId(start.relation.id);
    let bounds = bounds(&start.version, &tables);
    let store = shared.store.open_job(id, tables, &start.version).await?;
    store.set_label(start.relation.label());
    store.set_bounds(&bounds);
    Ok(store)
}

async fn start_table(shared: &Arc<Shared>, start: JobToStart) -> Result<Arc<Job>, ExecError> {
    let meta = shared.meta()?;
    let id = RelationId(start.relation.id);
    let store = open(shared, &start, vec![rows_table(&start.relation)?]).await?;
    let limits = Limits {
        statement_bytes: shared.options.statement_bytes,
        delta_bytes: shared.options.delta_bytes,
        early_seal_bytes: EARLY_SEAL_INLINES * shared.store.inline_bytes(),
    };
    let progress = Arc::new(Progress::new(shared.store.env().clone()));
    let common = Common {
        meta: Arc::clone(&meta),
        governor: Arc::clone(&shared.governor),
        changelogs: Arc::clone(&shared.changelogs),
        ties: Arc::clone(&shared.ties),
        work: Arc::clone(&progress.work),
    };
    let JobToStart { relation, generation, version, .. } = &start;
    let sequencer = Sequencer::new(relation, &store, *generation, version, common, limits)?;
    let last = Epoch(start.version.epoch);
    shared.changelogs.open(id, last);
    let sequencer = Arc::new(sequencer);
    let fed = Arc::clone(&sequencer);
    let table = Table::new(
        id,
        start.generation,
        sequencer,
        Arc::clone(&store),
        Arc::clone(&shared.changelogs),
        Epoch(start.version.epoch),
    );
    let errors = Arc::new(ErrorSink::load(&start.version.counters));
    let kind = Kind::Table(table);
    let metrics = JobMetrics::plain(vec![1], progress);
    let job = Job::new(&start.relation, start.generation, Some(store), kind, meta, metrics, errors);
    if start.relation.has_connector() {
        start_feed(shared, &start, &job, fed)?;
    }
    Ok(job)
}

/// Runs a table's connector, and what reads ahead of it.
fn start_feed(
    shared: &Shared,
    start: &JobToStart,
    job: &Arc<Job>,
    sequencer: Arc<Sequencer>,
) -> Result<(), ExecError> {
    let relation = &start.relation;
    let ahead = match shared.options.read_ahead {
        true => {
            let (ahead, work) = read_ahead(ReadFrom {
                relation: RelationId(relation.id),
                meta: Arc::clone(&job.meta),
                read_rows: feed::ROWS,
                governor: Arc::clone(&shared.governor),
                clock: shared.store.env().clone(),
                told: Box::new(FeedAhead::new(relation, Arc::clone(&sequencer))?),
                unread: None,
            });
            let share = shared.shares.holder();
            job.spawn_beside(vec![work.run().boxed()], &shared.runtime, &share);
            Some(ahead)
        }
        false => None,
    };
    let (meta, errors) = (Arc::clone(&job.meta), Arc::clone(&job.errors));
    let state = Arc::clone(&job.feed);
    let feed = Feed::new(relation, &start.version, sequencer, meta, errors, state, ahead)?;
    job.spawn_feed(feed, &shared.runtime);
    Ok(())
}

async fn start_derived(
    shared: &Arc<Shared>,
    start: JobToStart,
    parallelism: usize,
) -> Result<Arc<Job>, ExecError> {
    match decode_graph(&start.relation.graph) {
        Ok(graph) => start_graph(shared, start, &graph, parallelism).await,
        Err(e) => {
            // Its rows stay readable.
            open(shared, &start, vec![rows_table(&start.relation)?]).await?;
            Err(ExecError::Sql(e.into()))
        }
    }
}

fn cleaning(start: &JobToStart, graph: &JobGraph) -> Cleaning {
    let tables = state_tables(&start.relation, &start.version, graph);
    let sources = start.inputs.iter().filter(|r| r.kind() == RelationKind::Source);
    Cleaning {
        output: graph.output.marks.clone(),
        tables: tables.filter_map(|(id, t)| Some((TableId(id), t.retention.clone()?))).collect(),
        sources: sources.map(|r| RelationId(r.id)).collect(),
    }
}

/// From when on rows of the state tables are kept, as committed.
fn bounds(version: &JobVersion, tables: &[TableDesc]) -> Vec<(TableId, i64)> {
    let cleaned = tables.iter().filter(|t| t.retention.is_some());
    let bound =
        |t: &TableDesc| Some((t.id, *version.counters.get(&retention_counter(t.id.0))? as i64));
    cleaned.filter_map(bound).collect()
}

/// What brings a sink's changes to its target; `None`: it is no sink, or one without a target.
fn publisher(
    shared: &Arc<Shared>,
    start: &JobToStart,
    graph: &JobGraph,
) -> Result<Option<Publisher>, ExecError> {
    let root = graph.fragments.last().and_then(|f| f.nodes.last());
    if !root.is_some_and(|n| matches!(n.op, Operator::Sink(_))) {
        return Ok(None);
    }
    let layout = RowLayout::of_output(&graph.output)?;
    let target = match start.relation.target {
        0 => Target::Outside(create_target(&without_job_options(&start.relation))?),
        table => Target::Table(TableTarget::new(Arc::downgrade(shared), table, &start.relation)),
    };
    let whole = tells_intermediate(graph);
    Ok(Some(Publisher::new(&start.relation, &start.version, &layout, target, whole)?))
}

/// As its target knows it: how its job runs is nothing to it.
fn without_job_options(relation: &Relation) -> Relation {
    let mut relation = relation.clone();
    relation.options.retain(|o| !JOB_OPTIONS.contains(&o.name.as_str()));
    relation
}

/// Whether a part of the inputs' snapshot has rows that the whole does not have.
fn tells_intermediate(graph: &JobGraph) -> bool {
    let mut nodes = graph.fragments.iter().flat_map(|f| &f.nodes);
    !graph.output.append_only && nodes.any(|n| n.op.has_intermediate_rows())
}

/// Has what is committed of inputs that run elsewhere read while the job's own state is opened: a job that is behind will
/// ask for it at once. What fails here fails again, or does not, when the job asks.
fn read_inputs(shared: &Arc<Shared>, start: &JobToStart) {
    let Some(elsewhere) = &shared.elsewhere else { return };
    let of_jobs = start.inputs.iter().filter(|input| input.kind() != RelationKind::Source);
    for input in of_jobs.map(|input| RelationId(input.id)) {
        if !elsewhere.is_placed_elsewhere(input) {
            continue;
        }
        let elsewhere = Arc::clone(elsewhere);
        let read = async move {
            if let Err(error) = elsewhere.follow(input).await {
                tracing::debug!(%input, %error, "an input could not be read ahead");
            }
        };
        spawn_on(&shared.runtime, "read an input ahead", carried(read));
    }
}

/// Starts a derived job with its graph decoded.
pub async fn start_graph(
    shared: &Arc<Shared>,
    start: JobToStart,
    graph: &JobGraph,
    parallelism: usize,
) -> Result<Arc<Job>, ExecError> {
    let meta = shared.meta()?;
    let id = RelationId(start.relation.id);
    if meta.is_behind(id) {
        read_inputs(shared, &start);
    }
    let store = open(shared, &start, tables(&start.relation, &start.version, graph)).await?;
    let errors = Arc::new(ErrorSink::load(&start.version.counters));
    let progress = Arc::new(Progress::new(shared.store.env().clone()));
    progress.scanned.add(start.version.backfill.as_ref().map_or(0, |b| b.rows_read));
    let built = build(Blueprint {
        job: id,
        generation: start.generation,
        graph,
        relation: &start.relation,
        inputs: &start.inputs,
        version: &start.version,
        parallelism,
        job_store: Arc::clone(&store),
        relations: shared.relations(),
        meta: Arc::clone(&meta),
        governor: Arc::clone(&shared.governor),
        options: Arc::new(shared.options.for_job(|name| start.relation.option(name))),
        errors: Arc::clone(&errors),
        progress: Arc::clone(&progress),
    })?;
    match &start.version.backfill {
        // Opened when it has caught up.
        Some(_) => shared.changelogs.close(id),
        None => shared.changelogs.open(id, Epoch(start.version.epoch)),
    }
    let derived = Derived::new(
        &start.relation,
        start.generation,
        Arc::clone(&store),
        Arc::clone(&shared.changelogs),
        &start.version,
        built.cuts,
        built.reports,
        built.tasks.len(),
        cleaning(&start, graph),
        publisher(shared, &start, graph)?,
        built.stages,
        Arc::clone(&errors),
        Arc::clone(&progress),
    );
    let kind = Kind::Derived(Box::new(derived));
    let metrics = JobMetrics {
        operators: built.metrics,
        fragment_tasks: fragment_tasks(graph, parallelism),
        progress,
    };
    let job = Job::new(&start.relation, start.generation, Some(store), kind, meta, metrics, errors);
    let share = shared.shares.holder();
    job.spawn(built.tasks, &shared.runtime, &share);
    job.spawn_beside(built.beside, &shared.runtime, &share);
    Ok(job)
}
