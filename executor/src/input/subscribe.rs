//! The snapshot of another relation, then its changes (docs/design.md §4).
//!
//! A task reads the upstream rows of the vnodes it owns. Changes come from the changelog cache, else from
//! the relation's state table; both give exactly `(prev, epoch]`. The first scan goes through the
//! snapshot in key order, a bounded number of rows a cut, and commits the last key read.

use std::collections::VecDeque;
use std::ops::{Bound, Range};
use std::sync::Arc;

use arrow::array::Array;
use async_trait::async_trait;
use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use millrace_common::fault_injection::is_planted;
use millrace_common::{DeltaChunk, Epoch, RelationId, TableId, VNODE_COUNT, Vnode};
use millrace_graph::lookahead::Place;
use millrace_rpc::services::MetaService;
use millrace_rpc::version::{BackfillPosition, BackfillState};
use millrace_storage::{ScanBatch, ScanOptions};
use tokio::time::Instant;

use crate::changelog_cache::{EpochDelta, RingReader};
use crate::consolidate::consolidate_projected;
use crate::error::ExecError;
use crate::exchange::Barrier;
use crate::input::Reader;
use crate::input::position::{Span, spans};
use crate::input::relations::{Content, Relations};
use crate::lookahead::stream_ahead::{HeldStream, StreamAhead, unhurried};
use crate::lookahead::uncommitted::Following;
use crate::memory::MemoryGovernor;
use crate::stats::Progress;
use crate::watermark::{Watermark, WatermarkSet};

/// Rows of changes in memory that are made known before they are handed out.
const RING_ROWS: usize = 8_192;
/// Rows that a task takes at once from changes in memory while memory is tight.
const TIGHT_ROWS: usize = 1_024;
/// Epochs that a job lacks when it is behind: one is mostly there, and has been made known when it entered.
const BEHIND: usize = 2;

/// What a subscription reads, and with what.
pub struct Subscription {
    /// Which of the job's inputs it is.
    pub input: u32,
    pub relation: RelationId,
    /// The upstream's rows.
    pub table: TableId,
    /// Positions in the upstream relation.
    pub columns: Vec<usize>,
    /// Whether rows that differ may be equal in `columns`.
    pub narrows: bool,
    /// Columns of the upstream relation with a watermark.
    pub watermarked: Vec<usize>,
    pub meta: Arc<dyn MetaService>,
    pub vnodes: Range<Vnode>,
    pub relations: Relations,
    /// Rows of one step of the first scan.
    pub scan_rows: usize,
    /// See [`Barrier::stage`].
    pub stage: u32,
    pub chunk_rows: usize,
    pub governor: Arc<MemoryGovernor>,
    /// Of the job.
    pub progress: Arc<Progress>,
    /// Reads the store before rows are asked for; `None`: nothing is to be announced.
    pub ahead: Option<StreamAhead>,
}

impl Subscription {
    /// So many rows of the relation are taken from memory at once: each task has a copy of those that are its own.
    fn rows_at_once(&self) -> usize {
        let own = if self.governor.is_tight() { TIGHT_ROWS } else { self.chunk_rows.max(1) };
        own * VNODE_COUNT / self.vnodes.len().max(1)
    }
}

pub struct SubscribeReader {
    from: Subscription,
    state: State,
    scan: Scan,
    /// Of the epoch being read.
    epoch: Epoch,
    scanning: bool,
    /// A planted bug: what is announced of the relation, to be emitted as if it were committed.
    announced: Option<Following>,
    /// Has recent changes kept until they are read.
    ring: RingReader,
}

enum State {
    Idle,
    /// To be opened.
    Start {
        prev: Epoch,
        epoch: Epoch,
        since: Option<Instant>,
    },
    Ring(RingChanges),
    Store(HeldStream<DeltaChunk>),
    /// One step of the first scan; rows it may still read.
    Scan {
        epoch: Epoch,
        left: usize,
        since: Option<Instant>,
    },
}

/// Changes in memory.
struct RingChanges {
    deltas: VecDeque<Arc<EpochDelta>>,
    /// The next chunk of the first, and its next row.
    next: (usize, usize),
    /// What is handed out next, all but the first announced.
    chunks: VecDeque<DeltaChunk>,
    rows: usize,
}

impl RingChanges {
    fn new(deltas: Vec<Arc<EpochDelta>>) -> RingChanges {
        RingChanges { deltas: deltas.into(), next: (0, 0), chunks: VecDeque::new(), rows: 0 }
    }

    /// The next rows of the task, and their epoch.
    fn take(&mut self, from: &Subscription) -> Result<Option<(Epoch, DeltaChunk)>, ExecError> {
        while let Some(delta) = self.deltas.front() {
            let (at, row) = self.next;
            let Some(chunk) = delta.chunks.get(at) else {
                self.deltas.pop_front();
                self.next = (0, 0);
                continue;
            };
            let end = chunk.num_rows().min(row.saturating_add(from.rows_at_once()));
            self.next = if end == chunk.num_rows() { (at + 1, 0) } else { (at, end) };
            if let Some(own) = chunk.select(&from.vnodes, &from.columns, row..end)? {
                return Ok(Some((delta.epoch, own)));
            }
        }
        Ok(None)
    }

    /// Makes the next chunks known that are not handed out at once.
    fn look_ahead(&mut self, from: &Subscription) -> Result<(), ExecError> {
        let followed = from.ahead.as_ref().filter(|ahead| ahead.is_followed());
        let most = if followed.is_some() { RING_ROWS } else { 1 };
        while self.chunks.is_empty() || self.rows < most {
            let Some((epoch, chunk)) = self.take(from)? else { return Ok(()) };
            if let Some(ahead) = followed.filter(|_| !self.chunks.is_empty()) {
                ahead.tell(epoch, &chunk);
            }
            self.rows += chunk.num_rows();
            self.chunks.push_back(chunk);
        }
        Ok(())
    }
}

struct Scan {
    spans: Vec<Span>,
    /// Of the first span that is not done; kept from step to step.
    stream: Option<HeldStream<ScanBatch>>,
    rows: u64,
}

impl SubscribeReader {
    /// `backfill`: the job's, as committed; `None` when it has caught up.
    pub fn new(from: Subscription, backfill: Option<&BackfillState>) -> SubscribeReader {
        let spans = match backfill {
            Some(state) => spans(&state.positions, from.input, &from.vnodes),
            None => {
                vec![Span { vnodes: from.vnodes.clone(), last_key: Bytes::new(), done: true }]
            }
        };
        let scan = Scan { spans, stream: None, rows: 0 };
        let ring = from.relations.changelogs.subscribe(from.relation);
        let uncommitted = from.relations.changelogs.uncommitted();
        let announced = is_planted("leaf-reads-uncommitted")
            .then(|| uncommitted.follow(from.relation, vec![Place::Root]));
        SubscribeReader {
            from,
            state: State::Idle,
            scan,
            epoch: Epoch::ZERO,
            scanning: false,
            announced,
            ring,
        }
    }

    async fn open(&mut self) -> Result<(), ExecError> {
        let State::Start { prev, epoch, since } = &mut self.state else { return Ok(()) };
        let (prev, epoch) = (*prev, *epoch);
        if let Some(deltas) = self.from.relations.recent(self.from.relation, prev, epoch) {
            self.state = State::Ring(RingChanges::new(deltas));
            return Ok(());
        }
        let content = self.from.relations.content(self.from.relation, since).await?;
        let prev = if is_planted("changes-skip-epoch") { epoch } else { prev };
        let changes = content.changes(self.from.table, prev, epoch, self.from.vnodes.clone());
        let columns = self.from.columns.clone();
        self.state = State::Store(match &self.from.ahead {
            Some(ahead) => ahead.drive(changes, move |c| {
                let batch = c.batch.project(&columns).ok()?;
                Some(DeltaChunk::new(batch, c.weights.clone()))
            }),
            None => unhurried(changes),
        });
        Ok(())
    }

    /// A planted bug, see `announced`.
    fn next_announced(&mut self) -> Result<Option<DeltaChunk>, ExecError> {
        let Some(announced) = self.announced.as_mut().filter(|_| !self.scanning) else {
            return Ok(None);
        };
        let Some(Some(announcement)) = announced.next().now_or_never() else { return Ok(None) };
        let Some(rows) = announcement.rows.first() else { return Ok(None) };
        Ok(Some(DeltaChunk::inserts(rows.batch.project(&self.from.columns)?)))
    }

    fn next_in_ring(&mut self) -> Result<Option<DeltaChunk>, ExecError> {
        let State::Ring(ring) = &mut self.state else { return Ok(None) };
        ring.look_ahead(&self.from)?;
        let chunk = ring.chunks.pop_front();
        match &chunk {
            Some(chunk) => ring.rows -= chunk.num_rows(),
            None => self.end_epoch()?,
        }
        Ok(chunk)
    }

    /// All changes of the epoch are read. Where the job is behind, tells of those after it.
    fn end_epoch(&mut self) -> Result<(), ExecError> {
        self.state = State::Idle;
        self.ring.passed(self.epoch);
        let Some(ahead) = self.from.ahead.as_ref().filter(|ahead| ahead.is_followed()) else {
            return Ok(());
        };
        let left = self.from.relations.recent(self.from.relation, self.epoch, Epoch::MAX);
        let Some(left) = left.filter(|deltas| deltas.len() >= BEHIND) else { return Ok(()) };
        let (mut left, mut rows) = (RingChanges::new(left), 0);
        while let Some((epoch, chunk)) = left.take(&self.from)?.filter(|_| rows < RING_ROWS) {
            rows += chunk.num_rows();
            ahead.tell(epoch, &chunk);
        }
        Ok(())
    }

    /// One batch of the first scan; `None` at the end of the step.
    async fn next_in_scan(&mut self) -> Result<Option<DeltaChunk>, ExecError> {
        let State::Scan { epoch, left, since } = &mut self.state else { return Ok(None) };
        loop {
            let open = self.scan.spans.iter_mut().find(|s| !s.done);
            let (Some(span), true) = (open, *left > 0) else {
                self.state = State::Idle;
                return Ok(None);
            };
            let stream = match &mut self.scan.stream {
                Some(stream) => stream,
                empty => {
                    let relations = &self.from.relations;
                    let content = relations.content(self.from.relation, since).await?;
                    empty.insert(scan_span(&self.from, &content, *epoch, span)?)
                }
            };
            let Some(batch) = stream.next().await.transpose()? else {
                span.done = true;
                self.scan.stream = None;
                continue;
            };
            let batch = batch.hand_out(*epoch);
            let keys = batch.keys.as_ref().filter(|k| k.len() == batch.values.num_rows());
            let keys = keys.ok_or_else(|| ExecError::internal("a scan with keys gave none"))?;
            if keys.is_empty() {
                continue;
            }
            let rows = keys.len();
            span.last_key = Bytes::copy_from_slice(keys.value(rows - 1));
            *left = left.saturating_sub(rows);
            self.scan.rows += rows as u64;
            self.from.progress.scanned.add(rows as u64);
            return Ok(Some(DeltaChunk::new(batch.values, weights_of(batch.weights))));
        }
    }
}

/// Implied when all are one.
fn weights_of(weights: arrow::array::Int64Array) -> Option<arrow::array::Int64Array> {
    (!weights.values().iter().all(|&w| w == 1)).then_some(weights)
}

fn scan_span(
    from: &Subscription,
    content: &Content,
    epoch: Epoch,
    span: &Span,
) -> Result<HeldStream<ScanBatch>, ExecError> {
    let range = (!span.last_key.is_empty())
        .then(|| (Bound::Excluded(span.last_key.to_vec()), Bound::Unbounded));
    let options = ScanOptions {
        projection: Some(from.columns.clone()),
        with_keys: true,
        range,
        vnodes: Some(span.vnodes.clone()),
        batch_rows: from.chunk_rows,
    };
    let scan = content.snapshot(epoch)?.scan(from.table, options);
    Ok(match &from.ahead {
        Some(ahead) => ahead.drive(scan, |batch| Some(DeltaChunk::inserts(batch.values.clone()))),
        None => unhurried(scan),
    })
}

#[async_trait]
impl Reader for SubscribeReader {
    fn begin(&mut self, barrier: &Barrier) -> Result<(), ExecError> {
        self.epoch = barrier.epoch;
        self.scanning = barrier.backfill;
        self.state = if barrier.holds_scan(self.from.stage) {
            State::Idle
        } else if barrier.backfill {
            State::Scan { epoch: barrier.epoch, left: self.from.scan_rows, since: None }
        } else {
            self.scan.stream = None;
            self.ring.passed(barrier.prev);
            State::Start { prev: barrier.prev, epoch: barrier.epoch, since: None }
        };
        Ok(())
    }

    async fn next(&mut self) -> Result<Option<DeltaChunk>, ExecError> {
        if let Some(chunk) = self.next_announced()? {
            return Ok(Some(chunk));
        }
        loop {
            let chunk = match &mut self.state {
                State::Idle => return Ok(None),
                State::Start { .. } => {
                    self.open().await?;
                    continue;
                }
                State::Ring(..) => self.next_in_ring()?,
                State::Scan { .. } => return self.next_in_scan().await,
                State::Store(changes) => match changes.next().await.transpose()? {
                    Some(chunk) => {
                        let chunk = chunk.hand_out(self.epoch);
                        let batch = chunk.batch.project(&self.from.columns)?;
                        Some(DeltaChunk { batch, weights: chunk.weights })
                    }
                    None => {
                        self.end_epoch()?;
                        None
                    }
                },
            };
            let Some(chunk) = chunk else { continue };
            let chunk = if self.from.narrows { consolidate_projected(chunk)? } else { chunk };
            if !chunk.is_empty() {
                return Ok(Some(chunk));
            }
        }
    }

    fn positions(&self, out: &mut Vec<BackfillPosition>) {
        out.extend(self.scan.spans.iter().map(|s| s.position(self.from.input)));
    }

    fn take_scanned(&mut self) -> u64 {
        std::mem::take(&mut self.scan.rows)
    }

    /// The upstream's at the epoch. While the first scan goes on, rows of any age still come.
    fn marks(&self) -> WatermarkSet {
        let mut marks = WatermarkSet::default();
        if self.from.watermarked.is_empty() {
            return marks;
        }
        let done = !self.scanning || self.scan.spans.iter().all(|s| s.done);
        let known = match done {
            true => self.from.meta.watermarks(self.from.relation, self.epoch),
            false => Vec::new(),
        };
        for &column in &self.from.watermarked {
            let found = known.iter().find(|w| w.column as usize == column);
            let mark = found.map_or(Watermark::Unknown, |w| Watermark::At(w.value));
            marks.add((self.from.relation, column), mark);
        }
        marks
    }
}
