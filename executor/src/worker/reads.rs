//! Reads by frontends of other processes: the committed rows of a job that runs here, from its open store.
//!
//! Whoever asks can read the same rows from log and bucket. So what is not as the caller takes it to be is refused and not
//! waited for, and nothing is kept for a caller: a read holds its version as long as it takes, as every reader here does.
//! What a request asks for is checked: it may come of another build, or of a bug.
//!
//! All reads together have one share of the cores, as a job has: many of them slow no job down by more than another job
//! would, and one of them is next when a permit is free. At a time they are few, so their rows need little memory.

use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::BinaryArray;
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use millrace_common::fair_shares::{FairShares, Share};
use millrace_common::task::spawn_on;
use millrace_common::{DeltaChunk, SqlError};
use millrace_rpc::call_error::CallError;
use millrace_rpc::read::{
    FoundRows, KeyRange, ReadAnswer, ReadRefusal, ReadRequest, ReadService, WantedRows,
};
use millrace_rpc::request::carried;
use millrace_rpc::rows::bytes_of;
use millrace_storage::{ScanOptions, Snapshot, StorageError};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::{Shared, Worker};

/// Reads under way; more are refused.
const READS_AT_ONCE: usize = 64;
/// How long a read waits for commits that its caller has read in the log already: the leader sends a record to all processes
/// at about the same time.
const COMMITS_WAIT: Duration = Duration::from_millis(20);
/// Rows of a batch, at most.
const BATCH_ROWS: u64 = 8192;
/// Bytes of rows of one read, at most, whatever its caller takes.
const MOST_BYTES: u64 = 4 << 20;

/// What all reads of frontends share.
pub(super) struct ReadsOfFrontends {
    share: Arc<Share>,
    places: Semaphore,
}

impl ReadsOfFrontends {
    pub(super) fn new(shares: &Arc<FairShares>) -> ReadsOfFrontends {
        ReadsOfFrontends { share: shares.holder(), places: Semaphore::new(READS_AT_ONCE) }
    }
}

#[async_trait]
impl ReadService for Worker {
    async fn read(&self, mut request: ReadRequest) -> Result<ReadAnswer, CallError> {
        if !request.rows.is_small() {
            return Ok(ReadAnswer::Refused(ReadRefusal::TooLarge));
        }
        request.max_bytes = request.max_bytes.min(MOST_BYTES);
        let ReadsOfFrontends { share, places } = &self.shared.reads_of_frontends;
        let Ok(_place) = places.try_acquire() else {
            return Ok(ReadAnswer::Refused(ReadRefusal::Busy));
        };
        let shared = Arc::clone(&self.shared);
        let work = share.run(carried(async move { shared.read_committed(request).await }));
        let reading = spawn_on(&self.shared.runtime, "read for a frontend", work);
        // It ends with its caller.
        match AbortOnDropHandle::new(reading).await {
            Ok(answer) => answer,
            Err(error) => {
                Err(SqlError::internal(format!("a read for a frontend failed: {error}")).into())
            }
        }
    }
}

impl Shared {
    async fn read_committed(&self, request: ReadRequest) -> Result<ReadAnswer, CallError> {
        let snapshot = match self.committed_at(&request).await {
            Ok(snapshot) => snapshot,
            Err(refusal) => return Ok(ReadAnswer::Refused(refusal)),
        };
        check(&snapshot, &request)?;
        let found = match &request.rows {
            WantedRows::Keys(keys) => at_keys(&snapshot, &request, keys).await,
            WantedRows::Ranges(ranges) => {
                scanned(&snapshot, &request, Some(ranges.as_slice())).await
            }
            WantedRows::Any => scanned(&snapshot, &request, None).await,
        };
        let found = found.map_err(SqlError::from)?;
        Ok(found.map_or(ReadAnswer::Refused(ReadRefusal::TooLarge), ReadAnswer::Rows))
    }

    /// What is committed at the epoch of a read, if it is what the log says.
    async fn committed_at(&self, request: &ReadRequest) -> Result<Snapshot, ReadRefusal> {
        let ReadRequest { job: id, generation, commits, epoch, .. } = *request;
        let job = self.job_of(id, generation).ok_or(ReadRefusal::NotOpen)?;
        let store = job.store.as_ref().ok_or(ReadRefusal::NotOpen)?;
        tokio::select! {
            biased;
            () = job.stopped() => return Err(ReadRefusal::NotOpen),
            published = timeout(COMMITS_WAIT, job.cuts.published(commits)) => {
                published.map_err(|_| ReadRefusal::NotYet)?;
            }
        }
        // What was committed up to the caller's record would be right all the same; but what runs elsewhere is closed here
        // at any time.
        if let Some(elsewhere) = &self.elsewhere
            && elsewhere.generation_here(id) != Some(generation)
        {
            return Err(ReadRefusal::NotOpen);
        }
        // It fails for nothing else.
        store.snapshot(epoch).map_err(|_| ReadRefusal::TooOld)
    }
}

/// Whether a request names the rows of the relation, and columns that these have.
fn check(snapshot: &Snapshot, request: &ReadRequest) -> Result<(), CallError> {
    let ReadRequest { table, columns, .. } = request;
    let Some(count) = snapshot.relation_columns(*table) else {
        let message = format!("state table {table} does not have the rows of the relation");
        return Err(CallError::Malformed(message));
    };
    if columns.len() > count {
        let message =
            format!("{} columns are wanted of a relation that has {count}", columns.len());
        return Err(CallError::Malformed(message));
    }
    match columns.iter().find(|column| **column as usize >= count) {
        Some(column) => Err(CallError::Malformed(format!(
            "column {column} is wanted of a relation that has {count}, from 0 on"
        ))),
        None => Ok(()),
    }
}

fn columns_of(request: &ReadRequest) -> Vec<usize> {
    request.columns.iter().map(|column| *column as usize).collect()
}

/// The rows at some keys. `None`: they are too large.
async fn at_keys(
    snapshot: &Snapshot,
    request: &ReadRequest,
    keys: &[Bytes],
) -> Result<Option<FoundRows>, StorageError> {
    let keys = BinaryArray::from_iter_values(keys);
    let found = snapshot.multi_get(request.table, keys).await?;
    let rows = DeltaChunk::inserts(found.values.project(&columns_of(request))?);
    let fits = bytes_of(&rows) as u64 <= request.max_bytes;
    let positions = found.input.values().to_vec();
    Ok(fits.then(|| FoundRows { positions, chunks: vec![rows] }))
}

/// Rows in some ranges, or anywhere, until there are as many as the read asks for. `None`: they are too large.
///
/// Then what was read here was read for nothing: no more than the caller takes. Before it is read nothing tells how large it
/// is: sizes of runs and of their blocks count older versions and deletes, and so would have rows refused that change often
/// and are few.
async fn scanned(
    snapshot: &Snapshot,
    request: &ReadRequest,
    ranges: Option<&[KeyRange]>,
) -> Result<Option<FoundRows>, StorageError> {
    let limit = request.limit.unwrap_or(u64::MAX);
    let options = ScanOptions {
        projection: Some(columns_of(request)),
        batch_rows: limit.clamp(1, BATCH_ROWS) as usize,
        ..ScanOptions::default()
    };
    let bounds =
        |r: &KeyRange| (Bound::Included(r.from.to_vec()), Bound::Excluded(r.until.to_vec()));
    let mut batches = match ranges {
        None => snapshot.scan(request.table, options),
        Some(ranges) => {
            let ranges = ranges.iter().map(bounds).collect();
            snapshot.scan_ranges(request.table, ranges, options)
        }
    };
    let (mut chunks, mut rows, mut bytes) = (Vec::new(), 0, 0);
    while rows < limit
        && let Some(batch) = batches.next().await.transpose()?
    {
        let weights = batch.weights.values();
        let times = |weight: &i64| u64::try_from(*weight).unwrap_or(0);
        rows = weights.iter().map(times).fold(rows, u64::saturating_add);
        bytes += size_of_val::<[i64]>(weights) as u64;
        let chunk = DeltaChunk::new(batch.values, Some(batch.weights));
        bytes += bytes_of(&chunk) as u64;
        if bytes > request.max_bytes {
            return Ok(None);
        }
        chunks.push(chunk);
    }
    Ok(Some(FoundRows { positions: Vec::new(), chunks }))
}
