//! The log follower: the folded state of a bucket, in a process that does not lead (docs/design.md §10).
//!
//! It needs log and bucket alone, and never writes. It opens as the leader does, from the newest snapshot and the
//! records after it, and folds what follows with the same function. Records come to it in two ways: the leader's
//! record stream is handed to [`LogFollower::take`], and what does not come in time is read from the bucket. So whoever
//! asks for a record that is durable gets it, whatever becomes of the leader.
//!
//! Unlike the leader it has no jobs of its own: what is committed counts as readable at once, because whoever reads
//! here reads what the log names.

mod answers;
mod error;
mod reads;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use millrace_common::{EnvHandle, Epoch, JobId, RelationId};
use millrace_rpc::catalog::Relation;
use millrace_rpc::log::{LogRecord, SplitMarkAt, encode_frame};
use millrace_rpc::services::{JobToStart, SourceParts};
use millrace_rpc::store_id::StoreId;
use millrace_rpc::stream::AppliedRecord;
use millrace_rpc::version::ColumnWatermark;
use object_store::ObjectStore;
use parking_lot::RwLock;
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

pub use error::FollowError;

use crate::error::MetaError;
use crate::fold::{self, Verdict};
use crate::log::{LogStore, crc, decode_record};
use crate::relation_changes::RelationChanges;
use crate::shared::Touched;
use crate::state::MetaState;

/// For how long a record that is waited for may still come by the stream, before the bucket is asked.
const STREAM_GRACE: Duration = Duration::from_millis(50);
/// Between looks at the bucket for a record that is not there, at most.
const LOOK_PAUSE: Duration = Duration::from_secs(2);
/// Records that are asked for at the same time, at most, where many are missing.
const READ_AHEAD: u64 = 64;
/// A missing record proves for so long that it was not there before: a record stays longer than this
/// (`log_retention`), also when a snapshot covers it.
const PROVEN_FOR: Duration = Duration::from_secs(60);
/// The log is opened again when records were deleted while it was being read.
const OPEN_ATTEMPTS: u32 = 3;

/// What became of a record that was to be folded.
enum Step {
    Folded,
    /// It had been folded before.
    Known,
    /// Records are missing before it.
    Gap,
}

/// Holds the state that a bucket's log folds to, as far as it is known here. It only goes forward.
pub struct LogFollower {
    log: LogStore,
    env: EnvHandle,
    state: RwLock<MetaState>,
    /// Number of the last record folded.
    folded: watch::Sender<u64>,
    changes: RelationChanges,
    /// One reads the bucket for all who wait.
    reading: Mutex<()>,
    /// When the latest look that showed us at the log's head began, in nanoseconds since boot.
    proven: AtomicU64,
}

impl std::fmt::Debug for LogFollower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogFollower").field("number", &self.number()).finish_non_exhaustive()
    }
}

impl LogFollower {
    /// Reads the newest snapshot and what follows it.
    pub async fn open(
        store: Arc<dyn ObjectStore>,
        env: EnvHandle,
    ) -> Result<LogFollower, FollowError> {
        let log = LogStore::new(store);
        let began = env.since_boot();
        let state = open_state(&log).await?;
        if state.number == 0 {
            tracing::info!(
                "the log is empty: no meta process has begun to lead on this object store"
            );
        }
        let (folded, _) = watch::channel(state.number);
        let follower = LogFollower {
            log,
            env,
            state: RwLock::new(state),
            folded,
            changes: RelationChanges::default(),
            reading: Mutex::default(),
            proven: AtomicU64::default(),
        };
        follower.prove(began);
        Ok(follower)
    }

    /// Looks at the state, under a lock that folding waits for: no more than a look.
    pub fn read<T>(&self, look: impl FnOnce(&MetaState) -> T) -> T {
        look(&self.state.read())
    }

    /// Number of the last record that is folded.
    pub fn number(&self) -> u64 {
        self.state.read().number
    }

    /// The id of the store; `None`: none of the records that are folded has given it one.
    pub fn store_id(&self) -> Option<StoreId> {
        self.state.read().store_id
    }

    /// Whether the log has fenced the process of this incarnation; 0 stands for a caller that has none.
    pub fn is_fenced(&self, incarnation: u64) -> bool {
        incarnation != 0 && self.read(|state| state.processes.is_fenced(incarnation))
    }

    /// Epoch of that record.
    pub fn head(&self) -> Epoch {
        self.state.read().epoch
    }

    /// Folds what the leader has sent. Records that are here already have no effect; what is missing before the others
    /// is read from the bucket. Returns the number of the last record folded. After an error that is transient, what
    /// was sent comes from the bucket later.
    pub async fn take(&self, records: &[AppliedRecord]) -> Result<u64, FollowError> {
        for AppliedRecord { record, .. } in records {
            if let Step::Gap = self.fold_sent(record)? {
                self.read_up_to(record.number - 1).await?;
                if let Step::Gap = self.fold_sent(record)? {
                    return Err(MetaError::Gap { number: self.number() + 1 }.into());
                }
            }
        }
        Ok(self.number())
    }

    /// Folds all records that the bucket has. Returns the number of the last one.
    pub async fn catch_up(&self) -> Result<u64, FollowError> {
        let _one = self.reading.lock().await;
        self.read_on(None).await?;
        Ok(self.number())
    }

    /// Returns when this record is folded. If the stream does not bring it soon, it is read from the bucket; a store
    /// that does not answer is asked again until the deadline.
    pub async fn wait_for(&self, record: u64, deadline: Instant) -> Result<(), FollowError> {
        let mut trouble = None;
        let mut pause = STREAM_GRACE;
        loop {
            let until = deadline.min(self.env.now() + pause);
            if timeout_at(until, self.reaches(record)).await.is_ok() {
                return Ok(());
            }
            if self.env.now() >= deadline {
                return Err(FollowError::Late { record, at: self.number(), trouble });
            }
            let looked = timeout_at(deadline, async {
                tokio::select! {
                    biased;
                    () = self.reaches(record) => Ok(()),
                    done = self.read_up_to(record) => done,
                }
            });
            match looked.await {
                Ok(Err(error)) if error.is_transient() => trouble = Some(error.to_string()),
                Ok(done) => done?,
                Err(_) => {}
            }
            pause = (pause * 2).min(LOOK_PAUSE);
        }
    }

    /// Completes when a record beyond this one is folded; returns the number of the last one.
    pub async fn changed_since(&self, number: u64) -> u64 {
        self.reaches(number.saturating_add(1)).await;
        self.number()
    }

    async fn reaches(&self, record: u64) {
        // The sender is in `self`: there is no error.
        let _ = self.folded.subscribe().wait_for(|number| *number >= record).await;
    }

    /// As [`MetaService::changes`](millrace_rpc::services::MetaService::changes): rises when offsets of a source are
    /// fixed, a job has committed, options have changed, or the relation is gone. It carries nothing.
    pub fn changes(&self, relation: RelationId) -> watch::Receiver<u64> {
        self.changes.subscribe(relation)
    }

    /// Of a record as it was sent. Its bytes in the log are what encoding it gives.
    fn fold_sent(&self, record: &Arc<LogRecord>) -> Result<Step, FollowError> {
        match record.number {
            known if known <= self.number() => Ok(Step::Known),
            next if next == self.number() + 1 => {
                let sum = crc(&encode_frame(record.as_ref(), crc));
                self.fold(record, sum)
            }
            _ => Ok(Step::Gap),
        }
    }

    fn fold_read(&self, number: u64, bytes: &Bytes) -> Result<Step, FollowError> {
        let record = decode_record(number, bytes)?;
        if record.number != number {
            return Err(FollowError::Foreign { number });
        }
        self.fold(&record, crc(bytes))
    }

    /// Folds the record if it is the next one. What readers of a relation may want to know is told.
    fn fold(&self, record: &LogRecord, sum: u32) -> Result<Step, FollowError> {
        let mut state = self.state.write();
        if record.number <= state.number {
            return Ok(Step::Known);
        }
        if record.number > state.number + 1 {
            return Ok(Step::Gap);
        }
        if record.prev_crc != state.crc {
            return Err(FollowError::Foreign { number: record.number });
        }
        let catalog = state.catalog_version;
        let verdicts = fold::apply(&mut state, record, sum);
        let moved = std::mem::take(&mut state.moved);
        state.unpublished.clear();
        let catalog_changed = state.catalog_version != catalog;
        drop(state);
        self.folded.send_modify(|number| *number = record.number.max(*number));
        self.tell(record, &verdicts, moved, catalog_changed);
        Ok(Step::Folded)
    }

    fn tell(
        &self,
        record: &LogRecord,
        verdicts: &[Verdict],
        moved: impl IntoIterator<Item = RelationId>,
        catalog_changed: bool,
    ) {
        let touched = Touched::of(record, verdicts);
        touched.all().chain(moved).for_each(|id| self.changes.touch(id));
        if catalog_changed {
            let state = self.state.read();
            self.changes.touch_where(|id| !state.relations.contains_key(&id));
        }
    }

    async fn read_up_to(&self, record: u64) -> Result<(), FollowError> {
        let _one = self.reading.lock().await;
        if self.number() >= record {
            return Ok(());
        }
        self.read_on(Some(record)).await
    }

    /// Reads and folds what follows, until there is none. `known`: a record that is known to be durable; that it is
    /// missing means that it was deleted.
    async fn read_on(&self, known: Option<u64>) -> Result<(), FollowError> {
        let mut width = 1;
        loop {
            let began = self.env.since_boot();
            let first = self.number() + 1;
            let found = self.read_records(first, width).await?;
            let is_end = (found.len() as u64) < width;
            for (number, bytes) in (first..).zip(&found) {
                self.fold_read(number, bytes)?;
            }
            if !is_end {
                width = (width * 2).min(READ_AHEAD);
                continue;
            }
            let next = self.number() + 1;
            if known.is_none_or(|record| record < next) && self.age() < PROVEN_FOR {
                self.prove(began);
                return Ok(());
            }
            if !self.reopen_if_covered(next).await? {
                self.prove(began);
                return Ok(());
            }
        }
    }

    /// Records from this one on, as many as are there without a gap.
    async fn read_records(&self, first: u64, count: u64) -> Result<Vec<Bytes>, FollowError> {
        let reads = (first..first + count).map(|number| self.log.read(number));
        let found = try_join_all(reads).await?;
        Ok(found.into_iter().map_while(|bytes| bytes).collect())
    }

    /// Record `next` is not there. If a snapshot covers it, it may have been deleted: the state is read anew. Whether
    /// that was so.
    async fn reopen_if_covered(&self, next: u64) -> Result<bool, FollowError> {
        let snapshots = self.log.list_snapshots().await?;
        if snapshots.iter().all(|(number, _)| *number < next) {
            return Ok(false);
        }
        let opened = open_state(&self.log).await?;
        let number = opened.number;
        {
            let mut state = self.state.write();
            if number <= state.number {
                // The stream has brought what was missing meanwhile, or the bucket is an older one.
                return Ok(state.number >= next);
            }
            info!(
                from = state.number,
                to = number,
                "records were deleted: followed from a snapshot"
            );
            // It does not go back, and is another one if the catalog is.
            let catalog_version = opened.catalog_version.max(state.catalog_version);
            *state = MetaState { catalog_version, ..opened };
        }
        self.folded.send_modify(|folded| *folded = number.max(*folded));
        self.changes.touch_where(|_| true);
        Ok(true)
    }

    fn prove(&self, began: Duration) {
        self.proven.fetch_max(began.as_nanos() as u64, Ordering::AcqRel);
    }

    fn age(&self) -> Duration {
        let proven = Duration::from_nanos(self.proven.load(Ordering::Acquire));
        self.env.since_boot().saturating_sub(proven)
    }
}

/// What [`MetaService`](millrace_rpc::services::MetaService) answers from the folded state, answered by its follower.
impl LogFollower {
    pub fn source_offsets(&self, source: RelationId, epoch: Epoch) -> Vec<(u32, u64)> {
        self.read(|state| state.source_offsets(source, epoch))
    }

    /// Where records of the log say that content of splits ends next: see
    /// [`MetaService::source_ahead`](millrace_rpc::services::MetaService::source_ahead).
    pub fn source_ahead(&self, source: RelationId, splits: &[(u32, u64)]) -> Vec<Option<u64>> {
        self.read(|state| {
            let record = state.sources.get(&source);
            let next = |&(split, offset): &(u32, u64)| record?.next_end(split, offset);
            splits.iter().map(next).collect()
        })
    }

    pub fn source_marks(&self, source: RelationId, epoch: Epoch) -> Vec<SplitMarkAt> {
        self.read(|state| state.source_marks(source, epoch))
    }

    pub fn source_parts(&self, source: RelationId) -> SourceParts {
        self.read(|state| state.source_parts(source))
    }

    pub fn watermarks(&self, relation: RelationId, epoch: Epoch) -> Vec<ColumnWatermark> {
        self.read(|state| state.watermarks(relation, epoch))
    }

    pub fn row_count(&self, relation: RelationId) -> Option<u64> {
        self.read(|state| state.row_count(relation))
    }

    pub fn job_to_start(&self, job: JobId) -> Option<JobToStart> {
        self.read(|state| state.job_to_start(job))
    }

    pub fn relation(&self, relation: RelationId) -> Option<Arc<Relation>> {
        self.read(|state| state.relations.get(&relation).cloned())
    }

    pub fn option(&self, relation: RelationId, name: &str) -> Option<String> {
        self.read(|state| state.option(relation, name))
    }

    pub fn graph(&self, relation: RelationId) -> Option<Bytes> {
        self.read(|state| state.graph(relation))
    }

    pub fn is_behind(&self, job: JobId) -> bool {
        self.read(|state| state.is_behind(job))
    }
}

/// The state of all that is in the bucket. What the leader keeps of its own workers is left out.
async fn open_state(log: &LogStore) -> Result<MetaState, FollowError> {
    let mut attempt = 1;
    loop {
        match log.open().await {
            Ok(opened) => {
                let mut state = opened.state;
                state.unpublished.clear();
                state.moved.clear();
                return Ok(state);
            }
            // A snapshot that was listed, or a record, may be gone when it is read.
            Err(error @ (MetaError::Store(_) | MetaError::Gap { .. }))
                if attempt < OPEN_ATTEMPTS =>
            {
                warn!(%error, "the log could not be read, trying again");
                attempt += 1;
            }
            Err(error) => return Err(error.into()),
        }
    }
}
