//! Small reads that the *owner* of a relation, the process that its job runs on, answers from its memory
//! (docs/design.md §10).
//!
//! Log and bucket are always there, but a read of what is in no cache of this process waits for several dependent rounds
//! of the object store. The owner has most of what is read in memory, and is one round of the network away. It is asked
//! for few rows: by keys, in key ranges, or with a small limit. Whole scans stay with the follower: they move many bytes,
//! which the store brings as fast, and would take memory and cores from the owner's jobs.
//!
//! No read fails because of the owner, and none waits long for it:
//!
//! - A read is sent only where there is a connection; one is made beside the reads.
//! - What is not answered within [`ANSWER_WAIT`] is read from log and bucket, as is what the owner refuses.
//! - A process that has failed to answer is not asked for [`SET_ASIDE`]. One that has answered other reads meanwhile is: it
//!   is there, and has to ask the store for some rows.
//! - Rows are passed on when all are here, so a read that breaks off repeats none.
//! - What cannot be an answer to the read is none: the process may be of another build.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arrow::array::{BinaryArray, RecordBatch};
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use bytes::Bytes;
use millrace_common::collections::HashMap;
use millrace_common::delta::new_batch;
use millrace_common::{DeltaChunk, EnvHandle};
use millrace_rpc::read::{
    FoundRows, KeyRange, MOST_KEYS, MOST_RANGES, ReadAnswer, ReadRefusal, ReadRequest, ReadService,
    WantedRows,
};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};
use tracing::debug;

use crate::cluster::{KeyBounds, ScanRequest, snapshot};

/// How long a read waits for the owner's answer: some rounds of the store, which the owner may have to ask as well.
const ANSWER_WAIT: Duration = Duration::from_millis(250);
/// How long a process is not asked after it has failed to answer a read in time, or at all.
const SET_ASIDE: Duration = Duration::from_secs(5);
/// Rows of a read that is bounded by their number alone, at most.
const MOST_ROWS: usize = 1_000;
/// Bytes of rows that the owner is asked for, at most: they are collected here.
pub(super) const MOST_BYTES: u64 = 1 << 20;
/// Rows that are made of an answer, at most: one row may stand for very many.
const MOST_REPEATED: u64 = 1 << 20;

/// Why a read goes to log and bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// `read_from_owner` says so.
    Off,
    /// Many rows are wanted.
    Scan,
    /// The log says that the job runs nowhere.
    NoOwner,
    /// There is no connection yet.
    NotConnected,
    /// It has failed to answer of late.
    SetAside,
    /// It has not answered in time.
    Late,
    /// It has answered with an error, or what it has answered cannot be read.
    Failed,
    Refused(ReadRefusal),
}

/// As the metrics name them, in the order of [`Why::position`].
const REASONS: [&str; 12] = [
    "off",
    "scan",
    "no_owner",
    "not_connected",
    "set_aside",
    "late",
    "failed",
    "not_open",
    "not_yet",
    "too_old",
    "too_large",
    "busy",
];

impl Why {
    fn position(self) -> usize {
        match self {
            Why::Off => 0,
            Why::Scan => 1,
            Why::NoOwner => 2,
            Why::NotConnected => 3,
            Why::SetAside => 4,
            Why::Late => 5,
            Why::Failed => 6,
            Why::Refused(ReadRefusal::NotOpen) => 7,
            Why::Refused(ReadRefusal::NotYet) => 8,
            Why::Refused(ReadRefusal::TooOld) => 9,
            Why::Refused(ReadRefusal::TooLarge) => 10,
            Why::Refused(ReadRefusal::Busy) => 11,
        }
    }
}

/// Reads of committed rows so far, by the way that they have taken.
#[derive(Debug, Default)]
pub struct ReadWays {
    owner: AtomicU64,
    follower: [AtomicU64; REASONS.len()],
}

impl ReadWays {
    /// Those that the owner has answered.
    pub fn by_owner(&self) -> u64 {
        self.owner.load(Ordering::Relaxed)
    }

    /// Those that went to log and bucket, by reason.
    pub fn by_follower(&self) -> impl Iterator<Item = (&'static str, u64)> {
        REASONS.into_iter().zip(self.follower.iter().map(|count| count.load(Ordering::Relaxed)))
    }

    pub(super) fn note_owner(&self) {
        self.owner.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn note_follower(&self, why: Why) {
        if let Some(count) = self.follower.get(why.position()) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// How a process is to be asked.
#[derive(Clone, Copy)]
enum Standing {
    Connecting,
    /// `answered`: when it last did, or when the connection was made.
    Connected {
        answered: Instant,
    },
    /// Not at all, since then.
    SetAside(Instant),
}

/// What is known of the processes that jobs run on.
pub(super) struct Owners {
    pub(super) ways: Arc<ReadWays>,
    env: EnvHandle,
    /// By incarnation; those that are gone are few.
    known: Mutex<HashMap<u64, Standing>>,
}

impl Owners {
    pub(super) fn new(env: EnvHandle) -> Owners {
        Owners { ways: Arc::default(), env, known: Mutex::default() }
    }

    /// What the process of this incarnation answers. An error: why log and bucket are to be read.
    pub(super) async fn ask(
        self: &Arc<Owners>,
        incarnation: u64,
        reads: &Arc<dyn ReadService>,
        request: ReadRequest,
    ) -> Result<FoundRows, Why> {
        self.check(incarnation, reads)?;
        let began = self.env.now();
        let why = match timeout(ANSWER_WAIT, reads.read(request)).await {
            Ok(Ok(answer)) => {
                self.note_answer(incarnation);
                return match answer {
                    ReadAnswer::Rows(found) => Ok(found),
                    ReadAnswer::Refused(refusal) => Err(Why::Refused(refusal)),
                };
            }
            Ok(Err(error)) => {
                debug!(process = incarnation, %error, "a read was not answered");
                Why::Failed
            }
            Err(_) if self.has_answered_since(incarnation, began) => return Err(Why::Late),
            Err(_) => Why::Late,
        };
        let since = self.env.now();
        self.known.lock().insert(incarnation, Standing::SetAside(since));
        Err(why)
    }

    fn note_answer(&self, incarnation: u64) {
        let now = self.env.now();
        if let Some(Standing::Connected { answered }) = self.known.lock().get_mut(&incarnation) {
            *answered = now;
        }
    }

    /// Whether a process has answered a read later than then.
    fn has_answered_since(&self, incarnation: u64, then: Instant) -> bool {
        let standing = self.known.lock().get(&incarnation).copied();
        matches!(standing, Some(Standing::Connected { answered }) if answered > then)
    }

    /// Whether a process may be asked now. One that there is no connection to is connected to beside the reads.
    fn check(
        self: &Arc<Owners>,
        incarnation: u64,
        reads: &Arc<dyn ReadService>,
    ) -> Result<(), Why> {
        let mut known = self.known.lock();
        match known.get(&incarnation) {
            Some(Standing::Connected { .. }) => return Ok(()),
            Some(Standing::Connecting) => return Err(Why::NotConnected),
            Some(Standing::SetAside(since)) if self.env.elapsed(*since) < SET_ASIDE => {
                return Err(Why::SetAside);
            }
            Some(Standing::SetAside(_)) | None => {}
        }
        known.insert(incarnation, Standing::Connecting);
        drop(known);
        tokio::spawn(connect(Arc::clone(self), incarnation, Arc::clone(reads)));
        Err(Why::NotConnected)
    }
}

async fn connect(owners: Arc<Owners>, incarnation: u64, reads: Arc<dyn ReadService>) {
    let standing = match reads.connect().await {
        Ok(()) => Standing::Connected { answered: owners.env.now() },
        Err(error) => {
            debug!(process = incarnation, %error, "there is no connection for reads");
            Standing::SetAside(owners.env.now())
        }
    };
    owners.known.lock().insert(incarnation, standing);
}

/// What a scan wants, if that is little: all of it may turn out to be more.
pub(super) fn small(request: &ScanRequest) -> Option<WantedRows> {
    let range = |r: &KeyBounds| KeyRange {
        from: Bytes::copy_from_slice(&r.from),
        until: Bytes::copy_from_slice(&r.until),
    };
    match (&request.keys, &request.ranges) {
        (Some(keys), _) => few_keys(keys),
        (None, Some(ranges)) if ranges.len() <= MOST_RANGES => {
            let ranges = WantedRows::Ranges(ranges.iter().map(range).collect());
            Some(ranges).filter(WantedRows::is_small)
        }
        (None, None) if request.limit.is_some_and(|limit| limit <= MOST_ROWS) => {
            Some(WantedRows::Any)
        }
        _ => None,
    }
}

/// The rows at some keys, if these are few.
pub(super) fn few_keys(keys: &BinaryArray) -> Option<WantedRows> {
    let few = keys.value_offsets().len() <= MOST_KEYS + 1;
    let copied = || WantedRows::Keys(keys.iter().flatten().map(Bytes::copy_from_slice).collect());
    few.then(copied).filter(WantedRows::is_small)
}

/// Whether rows may be an answer. `keys`: how many were asked for: each has one row at most, and the rows are in their order;
/// `None`: something else was, which no positions belong to.
pub(super) fn may_answer(found: &FoundRows, keys: Option<usize>) -> bool {
    let FoundRows { positions, chunks } = found;
    let mut weights =
        chunks.iter().filter_map(|chunk| chunk.weights.as_ref()).flat_map(|w| w.values().iter());
    let rows: usize = chunks.iter().map(DeltaChunk::num_rows).sum();
    let Some(keys) = keys else {
        let times = |sum: u64, weight: &i64| {
            let weight = u64::try_from(*weight).ok().filter(|weight| *weight > 0)?;
            Some(sum.saturating_add(weight))
        };
        let repeated = weights.try_fold(0, times);
        return positions.is_empty() && repeated.is_some_and(|rows| rows <= MOST_REPEATED);
    };
    positions.len() == rows
        && positions.is_sorted_by(|a, b| a < b)
        && positions.last().is_none_or(|last| (*last as usize) < keys)
        && weights.all(|weight| *weight == 1)
}

/// Rows as the owner has sent them, as often as their multiplicities say. An error where they are not of these columns.
pub(super) fn batches(
    schema: &SchemaRef,
    found: Vec<DeltaChunk>,
) -> Result<Vec<RecordBatch>, ArrowError> {
    let batch = |chunk: DeltaChunk| {
        let columns = chunk.batch.columns().to_vec();
        let values = new_batch(schema, columns, chunk.num_rows())?;
        snapshot::repeat(values, &chunk.weights_array())
    };
    found.into_iter().map(batch).collect()
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array};
    use async_trait::async_trait;
    use millrace_common::{Epoch, Generation, RelationId, TableId};
    use millrace_rpc::call_error::CallError;
    use millrace_rpc::read::MOST_KEY_BYTES;

    use super::*;

    /// Answers reads with nothing while it is well, and counts what it is asked.
    #[derive(Default)]
    struct Process {
        is_ill: Mutex<bool>,
        reads: AtomicU64,
        connections: AtomicU64,
    }

    #[async_trait]
    impl ReadService for Process {
        async fn read(&self, _: ReadRequest) -> Result<ReadAnswer, CallError> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            if *self.is_ill.lock() {
                std::future::pending::<()>().await;
            }
            Ok(ReadAnswer::Rows(FoundRows::default()))
        }

        async fn connect(&self) -> Result<(), CallError> {
            self.connections.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    struct Bench {
        owners: Arc<Owners>,
        process: Arc<Process>,
    }

    impl Bench {
        fn new() -> Bench {
            let owners = Arc::new(Owners::new(EnvHandle::default()));
            Bench { owners, process: Arc::default() }
        }

        async fn read(&self) -> Result<(), Why> {
            let request = ReadRequest {
                job: RelationId(1),
                generation: Generation(1),
                commits: 0,
                epoch: Epoch(1),
                table: TableId(1),
                columns: Vec::new(),
                rows: WantedRows::Any,
                limit: None,
                max_bytes: MOST_BYTES,
            };
            let reads = Arc::clone(&self.process) as Arc<dyn ReadService>;
            self.owners.ask(7, &reads, request).await.map(drop)
        }

        /// How often the process was asked to connect, and to read.
        fn asked(&self) -> (u64, u64) {
            let Process { reads, connections, .. } = self.process.as_ref();
            (connections.load(Ordering::Relaxed), reads.load(Ordering::Relaxed))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_is_asked_where_there_is_a_connection_and_not_soon_after_a_failure() {
        let bench = Bench::new();
        assert_eq!(bench.read().await, Err(Why::NotConnected));
        // The connection is made by a task, which runs while this one waits.
        tokio::task::yield_now().await;
        assert_eq!((bench.read().await, bench.asked()), (Ok(()), (1, 1)));
        *bench.process.is_ill.lock() = true;
        let began = Instant::now();
        assert_eq!(bench.read().await, Err(Why::Late));
        assert!(began.elapsed() < ANSWER_WAIT * 2, "{:?}", began.elapsed());
        *bench.process.is_ill.lock() = false;
        assert_eq!((bench.read().await, bench.asked()), (Err(Why::SetAside), (1, 2)));
        tokio::time::advance(SET_ASIDE).await;
        assert_eq!(bench.read().await, Err(Why::NotConnected), "it may be gone");
        tokio::task::yield_now().await;
        assert_eq!((bench.read().await, bench.asked()), (Ok(()), (2, 3)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_is_late_is_asked_again_if_it_has_answered_others_meanwhile() {
        let bench = Bench::new();
        assert_eq!(bench.read().await, Err(Why::NotConnected));
        tokio::task::yield_now().await;
        *bench.process.is_ill.lock() = true;
        let (slow, quick) = tokio::join!(bench.read(), async {
            tokio::time::advance(ANSWER_WAIT / 2).await;
            *bench.process.is_ill.lock() = false;
            bench.read().await
        });
        assert_eq!((slow, quick), (Err(Why::Late), Ok(())));
        assert_eq!((bench.read().await, bench.asked()), (Ok(()), (1, 3)));
    }

    #[test]
    fn only_few_rows_are_asked_for() {
        let limit = |limit| ScanRequest { limit: Some(limit), ..ScanRequest::default() };
        assert_eq!(small(&ScanRequest::default()), None);
        assert_eq!(small(&limit(MOST_ROWS)), Some(WantedRows::Any));
        assert_eq!(small(&limit(MOST_ROWS + 1)), None);
        let keys = |count: usize| ScanRequest {
            keys: Some(BinaryArray::from_iter_values((0..count).map(|key| key.to_be_bytes()))),
            ..ScanRequest::default()
        };
        assert!(small(&keys(MOST_KEYS)).is_some() && small(&keys(MOST_KEYS + 1)).is_none());
        assert_eq!(small(&keys(0)), Some(WantedRows::Keys(Vec::new())));
        let range = || KeyBounds { from: vec![1], until: vec![2] };
        let ranges = |count: usize| ScanRequest {
            ranges: Some((0..count).map(|_| range()).collect()),
            ..ScanRequest::default()
        };
        assert!(small(&ranges(MOST_RANGES)).is_some() && small(&ranges(MOST_RANGES + 1)).is_none());
        let large = |bytes: usize| ScanRequest {
            keys: Some(BinaryArray::from_iter_values([vec![1u8; bytes]])),
            ..ScanRequest::default()
        };
        let is_asked_for = |request: ScanRequest| small(&request).is_some();
        assert!(is_asked_for(large(MOST_KEY_BYTES)) && !is_asked_for(large(MOST_KEY_BYTES + 1)));
        let large = |bytes: usize| {
            let bounds = KeyBounds { from: vec![1; bytes], until: vec![2; MOST_KEY_BYTES / 2] };
            ScanRequest { ranges: Some(vec![bounds]), ..ScanRequest::default() }
        };
        let half = MOST_KEY_BYTES / 2;
        assert!(is_asked_for(large(half)) && !is_asked_for(large(half + 1)));
    }

    #[test]
    fn what_cannot_be_an_answer_is_none() {
        let rows = |count: i64, weights: Option<Vec<i64>>| {
            let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..count));
            let batch = RecordBatch::try_from_iter([("id", ids)]).unwrap();
            DeltaChunk::new(batch, weights.map(Int64Array::from))
        };
        let may = |positions: &[u32], chunks: Vec<DeltaChunk>, keys| {
            may_answer(&FoundRows { positions: positions.to_vec(), chunks }, keys)
        };
        let of_three_keys = |positions: &[u32], chunks| may(positions, chunks, Some(3));
        assert!(of_three_keys(&[], vec![]));
        assert!(of_three_keys(&[0, 2], vec![rows(2, None)]));
        assert!(of_three_keys(&[0, 2], vec![rows(1, None), rows(1, Some(vec![1]))]));
        assert!(!of_three_keys(&[1], vec![rows(2, None)]), "a row more");
        assert!(!of_three_keys(&[0, 1], vec![rows(1, None)]), "a row less");
        assert!(!of_three_keys(&[2, 0], vec![rows(2, None)]), "in another order");
        assert!(!of_three_keys(&[1, 1], vec![rows(2, None)]), "two rows of one key");
        assert!(!of_three_keys(&[0, 3], vec![rows(2, None)]), "of no key");
        assert!(!of_three_keys(&[0], vec![rows(1, Some(vec![2]))]), "a row twice");

        assert!(may(&[], vec![rows(2, None), rows(2, Some(vec![1, 5]))], None));
        assert!(!may(&[0, 1], vec![rows(2, None)], None), "of keys, and none were asked for");
        for weights in [vec![1, 0], vec![1, -1], vec![1, 1 << 40], vec![i64::MAX; 2]] {
            assert!(!may(&[], vec![rows(2, Some(weights.clone()))], None), "{weights:?}");
        }
    }

    #[test]
    fn each_reason_has_a_name_of_its_own() {
        let refusals = [
            ReadRefusal::NotOpen,
            ReadRefusal::NotYet,
            ReadRefusal::TooOld,
            ReadRefusal::TooLarge,
            ReadRefusal::Busy,
        ];
        let others = [
            Why::Off,
            Why::Scan,
            Why::NoOwner,
            Why::NotConnected,
            Why::SetAside,
            Why::Late,
            Why::Failed,
        ];
        let ways = ReadWays::default();
        for why in others.into_iter().chain(refusals.map(Why::Refused)) {
            ways.note_follower(why);
        }
        let counts: Vec<_> = ways.by_follower().collect();
        assert!(counts.iter().all(|(_, count)| *count == 1), "{counts:?}");
    }
}
