//! Memory runs become level-0 runs: at a flush, or straight away when a commit is large.
//!
//! Runs of one group become one sorted stream with the group's newest sequence. Groups stay apart,
//! because a disk run may lie between them in commit order.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_common::task::spawn_blocking_on;
use millrace_common::{Epoch, TableId};
use millrace_rpc::sequence::Sequence;
use millrace_rpc::version::{Flushed, VersionEdit};

use tokio::sync::SemaphorePermit;

use crate::error::{Result, StorageError};
use crate::given_up::Claim;
use crate::job_store::{JobStore, Persisted};
use crate::memrun::{MemRun, RUN_BATCH_ROWS};
use crate::merge::{Merger, Mode, Source};
use crate::run_writer::{Admit, Built, Place, RunWriter, Written, in_background};
use crate::version::{TableVersion, Version};

/// Writes one commit's delta as level-0 runs whose epoch is not known yet.
pub(crate) async fn persist_as_runs(
    store: &Arc<JobStore>,
    runs: Vec<MemRun>,
    sequence: u64,
) -> Result<Persisted> {
    let seals = runs.iter().map(|r| (r.table(), r.seal)).collect();
    let version = store.version();
    let _turn = turn(store).await?;
    let mut sink = RunWriter::new(Arc::clone(&store.shared), Admit::Later).telling(store);
    let Written { runs: add_runs, built, claims } = in_background(&store.shared, async move {
        let mut tables: BTreeMap<TableId, Vec<MemRun>> = BTreeMap::new();
        for run in runs {
            tables.entry(run.table()).or_default().push(run);
        }
        let mode = Mode::Compact { horizon: Epoch::ZERO, bottom: false };
        for (id, runs) in tables {
            write(&mut sink, version.table(id)?, &runs, mode, sequence).await?;
        }
        sink.finish().await
    })
    .await?;
    let edit = Some(VersionEdit { add_runs, ..VersionEdit::default() });
    Ok(Persisted { edit, sequence, seals, built, claims, ..Persisted::default() })
}

/// Pushes a commit's own runs into the block cache, now that their epoch is known; in the background.
pub(crate) fn admit(store: &Arc<JobStore>, epoch: Epoch, mut built: Vec<Built>) {
    if built.is_empty() {
        return;
    }
    let cache = Arc::clone(&store.shared.cache);
    let version = store.version();
    let label = store.label();
    let mut work = move || {
        for run in &mut built {
            (run.meta.min_epoch, run.meta.max_epoch) = (epoch.0, epoch.0);
            // A relation's rows go to subscribers through the ring; decoding them here would be for
            // readers that may never come.
            let decoded = version.table(TableId(run.meta.table_id)).is_ok_and(|t| !t.desc.relation);
            if let Err(error) = run.admit(&cache, decoded) {
                tracing::warn!(job = label, %error, "a new run could not be cached");
            }
        }
    };
    match store.shared.background() {
        Some(runtime) => drop(spawn_blocking_on(&runtime, "cache new runs", work)),
        None => work(),
    }
}

/// Writes a version's memory runs as level-0 runs. The claims are on their objects.
pub(crate) async fn flush(
    store: &Arc<JobStore>,
    version: &Version,
) -> Result<(VersionEdit, Vec<Claim>)> {
    let version = version.clone();
    let flushed = Flushed {
        writer: store.shared.options.incarnation,
        commit: Sequence::stored(version.sequence).commit(),
        ..Flushed::default()
    };
    let _turn = turn(store).await?;
    let mut sink = RunWriter::new(Arc::clone(&store.shared), Admit::Memory);
    let written = in_background(&store.shared, async move {
        for table in version.tables() {
            flush_table(&mut sink, table, version.horizon).await?;
        }
        sink.finish().await
    })
    .await?;
    let Written { runs: add_runs, claims, .. } = written;
    Ok((VersionEdit { add_runs, flushed: Some(flushed), ..VersionEdit::default() }, claims))
}

/// Waits until few enough others build runs.
async fn turn(store: &JobStore) -> Result<SemaphorePermit<'_>> {
    let closed = |_| StorageError::internal("the state store is closed");
    store.shared.flushing.acquire().await.map_err(closed)
}

async fn flush_table(sink: &mut RunWriter, table: &TableVersion, relations: Epoch) -> Result<()> {
    let horizon = table.horizon(relations);
    for (i, runs) in table.mem.chunk_by(|a, b| a.group == b.group).enumerate() {
        let bottom = i == 0 && table.disk.is_empty();
        let sequence = runs.iter().map(|r| r.max_sequence).max().unwrap_or(0);
        write(sink, table, runs, Mode::Compact { horizon, bottom }, sequence).await?;
    }
    Ok(())
}

async fn write(
    sink: &mut RunWriter,
    table: &TableVersion,
    runs: &[MemRun],
    mode: Mode,
    sequence: u64,
) -> Result<()> {
    let sources =
        runs.iter().map(|r| Source::memory(r.batches().iter().cloned(), r.max_sequence)).collect();
    let schema = Arc::clone(table.schema());
    let merger = Merger::new(table.desc.storage, mode, schema, RUN_BATCH_ROWS / 8, sources)
        .retaining(table.retain);
    sink.write(&table.desc, &table.codec, Place { level: 0, sequence }, merger).await
}
