//! How many splits are opened for a leaf, and what it takes of those that are lent.

use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::array::ArrayRef;
use async_trait::async_trait;
use bytes::Bytes;
use millrace_common::{Epoch, Generation, JobId, SqlError};
use millrace_connector::ReadResult;
use millrace_rpc::version::VersionEdit;
use tokio::sync::Semaphore;

use super::first::OPENINGS;
use super::*;

const SPLITS: usize = 40;
const END: u64 = 10;

/// A log that has the splits up to their end.
struct Backlog;

#[async_trait]
impl MetaService for Backlog {
    fn request_cut(&self, _: JobId) {}

    async fn commit_edit(&self, _: JobId, _: Generation, _: VersionEdit) -> Result<bool, SqlError> {
        Ok(true)
    }

    fn report_failure(&self, _: JobId, _: Generation, _: SqlError) {}

    fn source_offsets(&self, _: RelationId, _: Epoch) -> Vec<(u32, u64)> {
        (0..SPLITS as u32).map(|split| (split, END)).collect()
    }

    fn source_ahead(&self, _: RelationId, splits: &[(u32, u64)]) -> Vec<Option<u64>> {
        splits.iter().map(|(_, offset)| (*offset < END).then_some(END)).collect()
    }

    fn graph(&self, _: RelationId) -> Option<Bytes> {
        None
    }
}

/// Each read waits until it is let through.
struct Waits(Arc<Semaphore>);

#[async_trait]
impl SplitReader for Waits {
    async fn read(&mut self, until: u64, _: usize) -> ReadResult {
        self.0.acquire().await.unwrap().forget();
        let n: ArrayRef = Arc::new(Int64Array::from(vec![0]));
        Ok(Some((RecordBatch::try_from_iter([("n", n)])?, until)))
    }
}

/// What is outside of what reads ahead.
#[derive(Default)]
struct Opened {
    count: AtomicUsize,
    fails: bool,
}

struct Unmet {
    opened: Arc<Opened>,
    gate: Arc<Semaphore>,
}

impl Unread for Unmet {
    fn start(&self, _: u32, _: &SourceParts) -> Option<u64> {
        Some(0)
    }

    fn open(&self, _: u32, _: u64, _: &SourceParts) -> Option<Box<dyn SplitReader>> {
        self.opened.count.fetch_add(1, Ordering::Relaxed);
        let reader: Box<dyn SplitReader> = Box::new(Waits(Arc::clone(&self.gate)));
        Some(reader).filter(|_| !self.opened.fails)
    }
}

/// A leaf that has read nothing of a backlog, and what reads it ahead.
fn start(limit: usize, fails: bool) -> (ReadAhead, Arc<Opened>, Arc<Semaphore>) {
    let relation = RelationId(9);
    let (opened, gate) = (Arc::new(Opened { fails, ..Opened::default() }), Semaphore::new(0));
    let gate = Arc::new(gate);
    let unmet = Unmet { opened: Arc::clone(&opened), gate: Arc::clone(&gate) };
    let (ahead, work) = read_ahead(ReadFrom {
        relation,
        meta: Arc::new(Backlog),
        read_rows: 4,
        governor: MemoryGovernor::new(limit),
        clock: EnvHandle::default(),
        told: Box::new(LeafFollowers { relation, watermark: None, uncommitted: None }),
        unread: Some(Box::new(unmet)),
    });
    ahead.scans(false);
    tokio::spawn(work.run());
    (ahead, opened, gate)
}

/// How many splits have been opened, when nothing goes on any more.
async fn count(opened: &Opened) -> usize {
    for _ in 0..500 {
        tokio::task::yield_now().await;
    }
    opened.count.load(Ordering::Relaxed)
}

#[tokio::test]
async fn few_splits_are_opened_before_something_has_been_read_of_them() {
    let (_ahead, opened, gate) = start(1 << 30, false);
    assert_eq!(count(&opened).await, OPENINGS);
    gate.add_permits(1);
    assert_eq!(count(&opened).await, OPENINGS + 1);
    gate.add_permits(SPLITS);
    assert_eq!(count(&opened).await, SPLITS);
}

#[tokio::test]
async fn splits_that_cannot_be_opened_hold_up_no_others() {
    let (_ahead, opened, _gate) = start(1 << 30, true);
    assert_eq!(count(&opened).await, SPLITS);
}

#[tokio::test]
async fn no_split_is_opened_where_nothing_can_be_held() {
    let (_ahead, opened, _gate) = start(1, false);
    assert_eq!(count(&opened).await, 0);
}

#[tokio::test]
async fn nothing_is_taken_that_begins_where_the_leaf_is_not() {
    let (ahead, _opened, gate) = start(1, false);
    let parts = SourceParts::default();
    for (lent_at, is_taken) in [(5, false), (0, true)] {
        let mut reader: Option<Box<dyn SplitReader>> = Some(Box::new(Waits(Arc::clone(&gate))));
        ahead.lend(0, &mut reader, lent_at, Some(END));
        assert!(reader.is_none());
        assert!(ahead.take_batch(0, &mut reader, &parts, 0..END, || false).await.is_none());
        assert_eq!(reader.is_some(), is_taken, "lent at {lent_at}");
        assert!(ahead.0.state.lock().splits.is_empty());
    }
}
