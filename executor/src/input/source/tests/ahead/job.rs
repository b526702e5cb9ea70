//! A job that reads the source through all its generations, and what it has to show for each epoch.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use millrace_common::{EnvHandle, Epoch};
use millrace_rpc::services::MetaService;
use millrace_rpc::version::{BackfillPosition, BackfillState};

use super::SOURCE;
use super::outside::{Log, Outside, Rows, relation};
use super::story::Story;
use crate::error_sink::ErrorSink;
use crate::exchange::Barrier;
use crate::input::Reader;
use crate::input::source::{SourceInput, SourceReader, UnreadSplits};
use crate::input::watermark::SourceWatermark;
use crate::lookahead::read_ahead::{LeafFollowers, ReadFrom as AheadFrom, read_ahead};
use crate::lookahead::uncommitted::Uncommitted;
use crate::memory::MemoryGovernor;
use crate::stats::Progress;
use crate::watermark::WatermarkSet;

/// The job's leaf in one generation.
pub(super) struct Leaf {
    reader: SourceReader,
    pub(super) errors: Arc<ErrorSink>,
    /// What reads ahead, if anything does.
    pub(super) beside: Option<tokio::task::JoinHandle<()>>,
    pub(super) governor: Arc<MemoryGovernor>,
}

impl Leaf {
    pub(super) fn start(
        outside: &Arc<Outside>,
        counters: &BTreeMap<String, u64>,
        is_ahead: bool,
        followers: Option<Arc<Uncommitted>>,
    ) -> Leaf {
        Leaf::resume(outside, counters, Epoch::ZERO, None, is_ahead, followers)
    }

    /// `committed`: the epoch that the job goes on from; `backfill`: its first scan as committed.
    pub(super) fn resume(
        outside: &Arc<Outside>,
        counters: &BTreeMap<String, u64>,
        committed: Epoch,
        backfill: Option<&BackfillState>,
        is_ahead: bool,
        followers: Option<Arc<Uncommitted>>,
    ) -> Leaf {
        let meta: Arc<dyn MetaService> = Arc::new(Log(Arc::clone(outside)));
        let errors = Arc::new(ErrorSink::load(counters));
        let watermark = SourceWatermark::of(&relation(), &[0]).unwrap();
        let governor = MemoryGovernor::new(1 << 30);
        let from = Arc::new(SourceInput {
            input: 0,
            relation: SOURCE,
            source: Arc::new(Rows(Arc::clone(outside))),
            columns: vec![0],
            watermark: watermark.clone(),
            meta: Arc::clone(&meta),
            scan_rows: 20,
            stage: 0,
            read_rows: 4,
            errors: Arc::clone(&errors),
            progress: Arc::new(Progress::new(EnvHandle::default())),
            counters: counters.clone(),
        });
        let ahead = is_ahead.then(|| {
            let unread = UnreadSplits::new(&from, 0, 1, committed, backfill).unwrap();
            let (ahead, work) = read_ahead(AheadFrom {
                relation: SOURCE,
                meta,
                read_rows: 4,
                governor: Arc::clone(&governor),
                clock: EnvHandle::default(),
                told: Box::new(LeafFollowers {
                    relation: SOURCE,
                    watermark,
                    uncommitted: followers,
                }),
                unread: Some(Box::new(unread)),
            });
            (ahead, tokio::spawn(work.run()))
        });
        let (ahead, beside) = ahead.unzip();
        let reader = SourceReader::new(from, 0, 1, backfill, ahead).unwrap();
        Leaf { reader, errors, beside, governor }
    }

    /// The rows of an epoch, as many chunks of them as asked for; `None`: it failed.
    pub(super) async fn epoch(&mut self, epoch: usize, chunks: usize) -> Option<Vec<i64>> {
        self.read(&next_epoch(epoch), chunks).await
    }

    /// The same of an epoch, or of a step of the first scan.
    pub(super) async fn read(&mut self, barrier: &Barrier, chunks: usize) -> Option<Vec<i64>> {
        self.reader.begin(barrier).unwrap();
        let mut rows = Vec::new();
        for _ in 0..chunks {
            let next = loop {
                tokio::select! {
                    biased;
                    next = self.reader.next() => break next,
                    // Dropped and taken up again.
                    () = tokio::task::yield_now() => {}
                }
            };
            match next {
                Ok(Some(chunk)) => {
                    rows.extend(chunk.batch.column(0).as_primitive::<Int64Type>().values())
                }
                Ok(None) => break,
                Err(_) => return None,
            }
        }
        rows.sort_unstable();
        Some(rows)
    }

    /// What is committed with an epoch.
    fn commit(&self, counters: &mut BTreeMap<String, u64>) {
        self.reader.counters(counters);
        counters.extend(self.errors.unsaved());
    }
}

impl Drop for Leaf {
    fn drop(&mut self) {
        self.beside.iter().for_each(|beside| beside.abort());
    }
}

fn next_epoch(epoch: usize) -> Barrier {
    let (prev, epoch) = (Epoch(epoch as u64 - 1), Epoch(epoch as u64));
    Barrier { prev, epoch, backfill: false, stage: 0, swap: false }
}

/// What a job has to show for an epoch, or for a step of its first scan.
#[derive(Debug, PartialEq)]
pub(super) struct Shown {
    pub(super) rows: Vec<i64>,
    failed: bool,
    pub(super) counters: BTreeMap<String, u64>,
    pub(super) marks: WatermarkSet,
    positions: Vec<BackfillPosition>,
    /// Rows of the first scan.
    scanned: u64,
}

/// A job through all its generations, with what is committed of it.
struct Job {
    outside: Arc<Outside>,
    is_ahead: bool,
    committed: Epoch,
    counters: BTreeMap<String, u64>,
    backfill: Option<BackfillState>,
    leaf: Leaf,
}

impl Job {
    fn start(story: &Story, is_ahead: bool) -> Job {
        let (outside, counters) = (Outside::new(story), BTreeMap::new());
        let scan = |epoch| BackfillState { snapshot_epoch: epoch, ..BackfillState::default() };
        let backfill = story.scan.map(|epoch| scan(epoch as u64));
        let committed = Epoch::ZERO;
        let leaf = Leaf::resume(&outside, &counters, committed, backfill.as_ref(), is_ahead, None);
        Job { outside, is_ahead, committed, counters, backfill, leaf }
    }

    /// Starts again, where the story has number `n`.
    async fn restart(&mut self, n: usize) {
        let (counters, backfill) = (&self.counters, self.backfill.as_ref());
        let (committed, is_ahead) = (self.committed, self.is_ahead);
        self.leaf = Leaf::resume(&self.outside, counters, committed, backfill, is_ahead, None);
        self.outside.pause(n).await;
    }

    /// Goes on to a barrier, where the story has number `n`, and commits.
    async fn go_on(&mut self, barrier: &Barrier, n: usize) -> Shown {
        let outside = Arc::clone(&self.outside);
        if let Some(chunks) = outside.story.kills[n % outside.story.kills.len()] {
            let _ = self.leaf.read(barrier, chunks).await;
            self.restart(n).await;
        }
        let mut rows = self.leaf.read(barrier, usize::MAX).await;
        let failed = rows.is_none();
        if failed {
            outside.fix(barrier.epoch.0 as usize, false);
            self.restart(n).await;
            rows = self.leaf.read(barrier, usize::MAX).await;
        }
        self.leaf.commit(&mut self.counters);
        self.committed = barrier.epoch;
        let mut positions = Vec::new();
        self.leaf.reader.positions(&mut positions);
        let scan = self.backfill.take().filter(|_| barrier.backfill);
        self.backfill = scan.map(|scan| BackfillState { positions: positions.clone(), ..scan });
        Shown {
            rows: rows.unwrap(),
            failed,
            counters: self.counters.clone(),
            marks: self.leaf.reader.marks(),
            positions,
            scanned: self.leaf.reader.take_scanned(),
        }
    }

    /// All steps of the first scan.
    async fn scan(&mut self, epoch: usize) -> Vec<Shown> {
        let mut shown: Vec<Shown> = Vec::new();
        let at = Epoch(epoch as u64);
        let barrier = Barrier { prev: at, epoch: at, backfill: true, stage: 0, swap: false };
        self.outside.fix(epoch, self.outside.story.fails[epoch]);
        while shown.last().is_none_or(|step| step.positions.iter().any(|p| !p.done)) {
            self.outside.pause(shown.len()).await;
            let step = self.go_on(&barrier, shown.len()).await;
            shown.push(step);
            assert!(shown.len() < 1_000, "the scan does not end");
        }
        shown
    }
}

pub(super) async fn tell(story: &Story, is_ahead: bool) -> Vec<Shown> {
    let mut job = Job::start(story, is_ahead);
    let mut shown = match story.scan {
        Some(epoch) => job.scan(epoch).await,
        None => Vec::new(),
    };
    for epoch in story.scan.unwrap_or(0) + 1..story.epochs.len() {
        job.outside.pause(epoch).await;
        let fixed = (epoch + story.lags[epoch]).min(story.epochs.len() - 1);
        job.outside.fix(fixed, story.fails[epoch]);
        shown.push(job.go_on(&next_epoch(epoch), epoch).await);
    }
    shown
}
