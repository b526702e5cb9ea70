//! Large epochs: entries that are sealed before their epoch ends, so that an epoch need not fit into memory
//! (docs/design.md §9).
//!
//! A writer that has written much seals what it has and hands it to the store, which writes it as runs that
//! no version names yet. The writer goes on reading them, from memory until they are durable and from the
//! store afterwards, and the epoch's commit links them: each early seal is a part of its own, before
//! that of what was sealed at the barrier, so that of two entries of a key the later one counts.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use millrace_common::Epoch;
use millrace_common::task::{spawn, spawn_on};
use millrace_rpc::version::RunMeta;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::block::Entries;
use crate::error::{Result, StorageError};
use crate::given_up::Claim;
use crate::job_store::JobStore;
use crate::memrun::MemRun;
use crate::merge::{Merger, Mode, Source};
use crate::run::RunReader;
use crate::run_writer::{Admit, Place, RunWriter, Written, on_blocking_thread};
use crate::state_store::Shared;
use crate::table::RowStorage;
use crate::version::TableVersion;

/// Rows of one batch on the way into a run.
const BATCH_ROWS: usize = 8192;
/// Entries as they were written: nothing is dropped.
const ALL: Mode = Mode::Compact { horizon: Epoch::ZERO, bottom: false };

/// Entries sealed early. Shared by the writer that reads them and the commit that will name their runs;
/// dropped unkept it deletes what it wrote.
pub(crate) struct Spill {
    shared: Arc<Shared>,
    state: watch::Sender<State>,
    /// On the objects of the runs, until a commit takes them.
    claims: Mutex<Vec<Claim>>,
}

#[derive(Clone)]
enum State {
    Writing,
    Written(Arc<[Arc<RunReader>]>),
    Failed(StorageError),
}

impl std::fmt::Debug for Spill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Spill").finish_non_exhaustive()
    }
}

impl Spill {
    pub fn new(shared: &Arc<Shared>) -> Arc<Spill> {
        Arc::new(Spill {
            shared: Arc::clone(shared),
            state: watch::Sender::new(State::Writing),
            claims: Mutex::default(),
        })
    }

    /// The runs, once they are durable; until then memory has the entries.
    pub fn readers(&self) -> Option<Arc<[Arc<RunReader>]>> {
        match &*self.state.borrow() {
            State::Written(readers) => Some(Arc::clone(readers)),
            State::Writing | State::Failed(_) => None,
        }
    }

    /// The runs, to be named by a commit, each with an id under which no cache knows it: its epochs are not
    /// those that its readers have seen so far. From now on the claims decide what becomes of their objects.
    pub async fn keep(&self, sequence: u64) -> Result<(Vec<RunMeta>, Vec<Claim>)> {
        let mut watched = self.state.subscribe();
        let closed = |_| StorageError::internal("an early seal was given up");
        let settled = watched.wait_for(|s| !matches!(s, State::Writing)).await.map_err(closed)?;
        match &*settled {
            State::Failed(e) => Err(e.clone()),
            State::Writing => Err(StorageError::internal("an early seal is not finished")),
            State::Written(readers) => {
                let claims = std::mem::take(&mut *self.claims.lock());
                let named = |run: &Arc<RunReader>| RunMeta {
                    run_id: self.shared.namer.next_run_id(),
                    sequence,
                    ..run.meta().clone()
                };
                Ok((readers.iter().map(named).collect(), claims))
            }
        }
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        let Some(readers) = self.readers() else { return };
        readers.iter().for_each(|run| self.shared.cache.forget_run(run));
        delete_unnamed(&self.shared, std::mem::take(self.claims.get_mut()));
    }
}

/// Writes a run that was sealed early, in the background, and takes its entries out of memory.
/// `sealed`: the writer's list, which holds them until then.
pub(crate) fn start(
    store: &Arc<JobStore>,
    run: MemRun,
    spill: &Arc<Spill>,
    sealed: &Arc<Mutex<Vec<MemRun>>>,
) {
    let (store, spill, sealed) = (Arc::clone(store), Arc::clone(spill), Arc::downgrade(sealed));
    let (seal, bytes) = (run.seal, run.memory_size());
    for counter in [&store.spilling, &store.shared.spilling] {
        counter.fetch_add(bytes, Ordering::Relaxed);
    }
    spawn("spill", async move {
        let written = write(&store, run).await;
        let sealed = sealed.upgrade();
        let mut sealed = sealed.as_ref().map(|s| s.lock());
        match written {
            Ok((readers, claims)) => {
                *spill.claims.lock() = claims;
                spill.state.send_replace(State::Written(readers));
                let run = sealed.iter_mut().flat_map(|s| s.iter_mut()).find(|r| r.seal == seal);
                if let Some(run) = run {
                    *run = run.without_batches();
                }
            }
            // Memory keeps them; the commit fails with this.
            Err(error) => drop(spill.state.send_replace(State::Failed(error))),
        }
        drop(sealed);
        for counter in [&store.spilling, &store.shared.spilling] {
            counter.fetch_sub(bytes, Ordering::Relaxed);
        }
        store.touch();
        store.shared.spilled.notify_waiters();
    });
}

type Readers = Arc<[Arc<RunReader>]>;

async fn write(store: &Arc<JobStore>, run: MemRun) -> Result<(Readers, Vec<Claim>)> {
    let table = Arc::clone(store.version().table(run.table())?);
    let codec = Arc::clone(&table.codec);
    let closed = |_| StorageError::internal("the state store is closed");
    let _turn = store.shared.flushing.acquire().await.map_err(closed)?;
    let storage = table.desc.storage;
    let batches = Arc::clone(&run.batches);
    drop(run);
    let Written { runs, claims, .. } =
        write_unnamed(store, &table, storage, 0, move || Ok(batches)).await?;
    let pins = &store.shared.pins;
    let reader = |meta| Arc::new(RunReader::pinned(meta, Arc::clone(&codec), pins));
    Ok((runs.into_iter().map(reader).collect(), claims))
}

/// Writes sorted batches, which `batches` makes, as runs that no version names. The work is done on a
/// blocking thread.
pub(crate) async fn write_unnamed(
    store: &Arc<JobStore>,
    table: &Arc<TableVersion>,
    storage: RowStorage,
    sequence: u64,
    batches: impl FnOnce() -> Result<Arc<[Entries]>> + Send + 'static,
) -> Result<Written> {
    let mut sink = RunWriter::new(Arc::clone(&store.shared), Admit::Never).telling(store);
    let table = Arc::clone(table);
    on_blocking_thread(async move {
        let sorted = batches()?;
        let source = Source::memory(sorted.iter().cloned(), 0);
        drop(sorted);
        let schema = Arc::clone(table.schema());
        let merger = Merger::new(storage, ALL, schema, BATCH_ROWS, vec![source]);
        sink.write(&table.desc, &table.codec, Place { level: 0, sequence }, merger).await?;
        sink.finish().await
    })
    .await
}

/// Deletes objects that no log record will name, in the background; those that cannot be deleted are given up.
pub(crate) fn delete_unnamed(shared: &Shared, objects: Vec<Claim>) {
    let store = Arc::clone(&shared.options.store);
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    spawn_on(&runtime, "delete unnamed objects", async move {
        for object in objects {
            match store.delete(&Path::from(object.name())).await {
                Ok(()) => object.settle(),
                Err(error) => {
                    tracing::warn!(%error, object = object.name(), "an object was not deleted yet");
                }
            }
        }
    });
}
