//! Splits of a source, read directly (docs/design.md §4, "Roots").
//!
//! Meta fixes how far each split goes at an epoch; this regenerates exactly the rows between two such
//! offsets. The first scan goes from offset 0 to the snapshot epoch's, in bounded steps. A task reads
//! the splits that are its own by number. Readers stay open from epoch to epoch, and read on meanwhile
//! ([`crate::lookahead::read_ahead`]); what depends on the epoch is applied when it takes the rows.

mod unread;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use arrow::compute::filter_record_batch;
use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use millrace_common::fault_injection::is_planted;
use millrace_common::{DeltaChunk, Epoch, RelationId};
use millrace_connector::{BadRow, OnError, Position, ReadFrom, ReadResult, Source, SplitReader};
use millrace_rpc::services::{MetaService, SourceParts};
use millrace_rpc::version::{BackfillPosition, BackfillState};

pub use self::unread::UnreadSplits;
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::exchange::Barrier;
use crate::input::Reader;
use crate::input::estimate::ScanEstimate;
use crate::input::watermark::{SourceWatermark, SplitWatermark, is_idle};
use crate::lookahead::read_ahead::{RawBatch, ReadAhead};
use crate::stats::Progress;
use crate::watermark::{Watermark, WatermarkSet};

/// What a source leaf reads, and with what.
pub struct SourceInput {
    pub input: u32,
    pub relation: RelationId,
    pub source: Arc<dyn Source>,
    pub columns: Vec<usize>,
    pub watermark: Option<SourceWatermark>,
    pub meta: Arc<dyn MetaService>,
    /// Rows of one step of the first scan.
    pub scan_rows: usize,
    /// See [`Barrier::stage`].
    pub stage: u32,
    /// Rows asked for at once.
    pub read_rows: usize,
    /// Where rows that cannot be read are reported.
    pub errors: Arc<ErrorSink>,
    /// Of the job.
    pub progress: Arc<Progress>,
    /// The job's counters as committed: where readers stood exactly.
    pub counters: BTreeMap<String, u64>,
}

type Reading = BoxFuture<'static, (ReadResult, Box<dyn SplitReader>)>;

struct Split {
    number: u32,
    watermark: SplitWatermark,
    /// At the epoch being read.
    idle: bool,
    /// Rows before it have been handed out. `None`: to be taken from the epoch before.
    offset: Option<u64>,
    /// Where the row behind it begins, if the reader has said so.
    position: Option<Position>,
    /// Where the epoch ends.
    until: u64,
    /// Where the next step of the first scan ends; `None`: there is none.
    next_until: Option<u64>,
    /// The first scan of this split has come to its end.
    scanned: bool,
    reader: Option<Box<dyn SplitReader>>,
    /// A read under way, which owns the reader, so that dropping the caller loses nothing.
    reading: Option<Reading>,
}

pub struct SourceReader {
    from: Arc<SourceInput>,
    splits: Vec<Split>,
    /// This task's place among those that share the splits.
    task: usize,
    parallelism: usize,
    /// The first scan as committed, for splits not met yet.
    backfill: Option<BackfillState>,
    parts: SourceParts,
    /// The split to read next; they take turns.
    turn: usize,
    rows: u64,
    estimate: ScanEstimate,
    scanning: bool,
    /// The epoch that is being read.
    epoch: Epoch,
    ahead: Option<ReadAhead>,
}

/// Names of the counters that hold a reader's exact place in a split.
fn position_counters(input: u32, split: u32) -> (String, String) {
    (format!("position.{input}.{split}"), format!("position.{input}.{split}.line"))
}

/// The place committed under [`position_counters`].
pub(crate) fn committed_position(
    counters: &BTreeMap<String, u64>,
    input: u32,
    split: u32,
) -> Option<Position> {
    let (offset, line) = position_counters(input, split);
    let line = counters.get(&line).copied().unwrap_or(0);
    counters.get(&offset).map(|offset| Position { offset: *offset, line })
}

/// What to commit of a reader's place.
pub(crate) fn put_position(
    counters: &mut BTreeMap<String, u64>,
    input: u32,
    split: u32,
    position: Position,
) {
    let (offset, line) = position_counters(input, split);
    counters.insert(offset, position.offset);
    counters.insert(line, position.line);
}

/// Counts skipped rows where `millrace_catalog.errors` shows them.
pub(crate) fn report_bad_rows(errors: &ErrorSink, rows: Vec<BadRow>) {
    for row in rows {
        errors.report(&row.place, &row.error, 1);
    }
}

impl SourceReader {
    /// The splits that fall to task `task` of `parallelism`. `backfill`: the job's, as committed. `ahead`: reads ahead
    /// of them, from now on.
    pub fn new(
        from: Arc<SourceInput>,
        task: usize,
        parallelism: usize,
        backfill: Option<&BackfillState>,
        ahead: Option<ReadAhead>,
    ) -> Result<SourceReader, ExecError> {
        ahead.iter().for_each(|ahead| ahead.scans(backfill.is_some()));
        let backfill = backfill.cloned();
        let (splits, parts) = Default::default();
        Ok(SourceReader {
            from,
            splits,
            task,
            parallelism,
            backfill,
            parts,
            turn: 0,
            rows: 0,
            estimate: ScanEstimate::default(),
            scanning: false,
            epoch: Epoch::ZERO,
            ahead,
        })
    }

    fn fixed(&self, epoch: Epoch) -> impl Fn(u32) -> u64 + use<> {
        let offsets = self.from.meta.source_offsets(self.from.relation, epoch);
        let offsets: BTreeMap<u32, u64> = offsets.into_iter().collect();
        let parts = self.parts.clone();
        move |split| offsets.get(&split).copied().unwrap_or_else(|| parts.start(split))
    }

    /// Takes up the splits that have content at an epoch and fall to this task.
    fn add_splits(&mut self, epoch: Epoch) -> Result<(), ExecError> {
        let parts = self.from.meta.source_parts(self.from.relation);
        if parts != self.parts {
            self.splits.iter_mut().filter_map(|s| s.reader.as_mut()).for_each(|r| r.extend(&parts));
            self.parts = parts;
        }
        let known: BTreeSet<u32> = self.splits.iter().map(|s| s.number).collect();
        for (number, _) in self.from.meta.source_offsets(self.from.relation, epoch) {
            let own = is_own(number, self.task, self.parallelism);
            if own && !known.contains(&number) {
                let start = self.parts.start(number);
                let backfill = self.backfill.as_ref();
                let input = self.from.input;
                let watermark = SplitWatermark::load(&self.from.counters, input, number);
                self.splits.push(Split::resume(number, input, start, watermark, backfill)?);
            }
        }
        Ok(())
    }

    /// The next rows of a split, read ahead or now. Cancel-safe.
    async fn raw_batch(&mut self, at: usize) -> Result<RawBatch, ExecError> {
        let split = &mut self.splits[at];
        let offset = split.offset.unwrap_or(0);
        // A floor holds from its offset on: no read goes across it.
        let until = split.until.min(split.watermark.raise(offset));
        if split.reading.is_none() {
            if let Some(held) = self.held(at, offset..until).await {
                return Ok(held);
            }
            let reader = match self.splits[at].reader.take() {
                Some(reader) => reader,
                None => {
                    let split = &self.splits[at];
                    self.from.open(split.number, offset, split.position, &self.parts)?
                }
            };
            self.splits[at].reading = Some(self.reading(reader, until));
        }
        let split = &mut self.splits[at];
        let Some(reading) = &mut split.reading else {
            return Err(ExecError::internal("a read that has not begun"));
        };
        let (result, mut reader) = reading.await;
        split.reading = None;
        let (result, bad_rows) = RawBatch::of(result, reader.as_mut());
        report_bad_rows(&self.from.errors, bad_rows);
        split.reader = Some(reader);
        result?.ok_or_else(|| {
            ExecError::internal(format!(
                "split {} ended at offset {offset}, before {}",
                split.number, split.until
            ))
        })
    }

    /// What was read ahead of a split, if it may be handed out. Takes the reader back where there is nothing.
    async fn held(&mut self, at: usize, within: Range<u64>) -> Option<RawBatch> {
        let ahead = self.ahead.as_ref()?;
        let (from, split) = (&self.from, &mut self.splits[at]);
        let fails = || from.on_error() == Some(OnError::Fail);
        ahead.take_batch(split.number, &mut split.reader, &self.parts, within, fails).await
    }

    fn reading(&self, mut reader: Box<dyn SplitReader>, until: u64) -> Reading {
        if let Some(on_error) = self.from.on_error() {
            reader.set_on_error(on_error);
        }
        let rows = self.from.read_rows;
        Box::pin(async move { (reader.read(until, rows).await, reader) })
    }

    /// The split has come to the end of a batch: what depends on the epoch is applied to its rows.
    fn hand_out(&mut self, at: usize, raw: RawBatch) -> Result<Option<DeltaChunk>, ExecError> {
        let split = &mut self.splits[at];
        let (offset, after) = (split.offset.unwrap_or(0), raw.after);
        if is_planted("bad-row-counted-twice") && split.reader.is_none() {
            report_bad_rows(&self.from.errors, raw.bad_rows.clone());
        }
        report_bad_rows(&self.from.errors, raw.bad_rows);
        if after <= offset || after > split.until {
            return Err(ExecError::internal(format!(
                "split {} went from offset {offset} to {after}, asked for up to {}",
                split.number, split.until
            )));
        }
        (split.offset, split.position) = (Some(after), raw.position);
        if let Some(announced) = raw.announced {
            announced.committed(self.epoch);
        }
        let is_end = after >= split.until;
        if let Some(ahead) = &self.ahead {
            let until = if is_end { split.next_until } else { Some(split.until) };
            // The floors that begin further on have not been applied: no batch may go across one.
            let until = until.map(|until| until.min(split.watermark.next_floor(after)));
            ahead.lend(split.number, &mut split.reader, after, until);
        }
        if self.scanning {
            let (rows, per_row) = (raw.rows.num_rows() as u64, self.from.source.offsets_per_row());
            self.rows += rows;
            self.estimate.read(after - offset, rows, per_row, &self.from.progress);
        }
        let batch = match &self.from.watermark {
            None => raw.rows,
            Some(w) => {
                let batch = w.complete(raw.rows, Some(&self.from.errors))?;
                let (stays, late) = w.expr.advance(&batch, &mut split.watermark.running)?;
                split.watermark.late += late;
                let asked: Vec<usize> = (0..w.width).collect();
                let batch = batch.project(&asked)?;
                match stays {
                    None => batch,
                    Some(mask) => filter_record_batch(&batch, &mask)?,
                }
            }
        };
        Ok((batch.num_rows() > 0).then(|| DeltaChunk::inserts(batch)))
    }
}

/// Whether a split falls to task `task` of `parallelism`.
fn is_own(split: u32, task: usize, parallelism: usize) -> bool {
    split as usize % parallelism == task
}

impl SourceInput {
    /// A reader of a split from `offset` on. `position`: exactly where that is, if a reader has come there since the job
    /// was started.
    fn open(
        &self,
        split: u32,
        offset: u64,
        position: Option<Position>,
        parts: &SourceParts,
    ) -> Result<Box<dyn SplitReader>, ExecError> {
        let columns = self.watermark.as_ref().map_or(&self.columns, |w| &w.columns);
        let committed = || committed_position(&self.counters, self.input, split);
        let position = position.or_else(committed);
        let at = ReadFrom { split, offset, position, parts: parts.clone() };
        Ok(self.source.open(at, columns)?)
    }

    /// What a bad row does now; `None`: what it did when the source was opened.
    fn on_error(&self) -> Option<OnError> {
        self.meta.option(self.relation, "on_error").map(|value| OnError::named(&value))
    }
}

impl Split {
    fn resume(
        number: u32,
        input: u32,
        start: u64,
        watermark: SplitWatermark,
        backfill: Option<&BackfillState>,
    ) -> Result<Split, ExecError> {
        let (offset, scanned) = match backfill {
            None => (None, true),
            Some(state) => {
                let known = state.positions.iter().find(|p| p.input == input && p.vnode == number);
                match known {
                    None => (Some(start), false),
                    Some(p) => (Some(decode_offset(&p.last_key)?), p.done),
                }
            }
        };
        let idle = false;
        let (until, next_until, position, reader, reading) = (0, None, None, None, None);
        Ok(Split {
            number,
            watermark,
            idle,
            offset,
            position,
            until,
            next_until,
            scanned,
            reader,
            reading,
        })
    }
}

fn decode_offset(bytes: &[u8]) -> Result<u64, ExecError> {
    if bytes.is_empty() {
        return Ok(0);
    }
    let bytes: [u8; 8] = bytes
        .try_into()
        .map_err(|_| ExecError::internal("a source position that is not eight bytes long"))?;
    Ok(u64::from_be_bytes(bytes))
}

#[async_trait]
impl Reader for SourceReader {
    fn begin(&mut self, barrier: &Barrier) -> Result<(), ExecError> {
        (self.scanning, self.epoch) = (barrier.backfill, barrier.epoch);
        self.ahead.iter().for_each(|ahead| ahead.scans(barrier.backfill));
        self.add_splits(barrier.epoch)?;
        if !barrier.backfill {
            // A split that is met from now on is new.
            self.backfill = None;
        }
        let end = self.fixed(barrier.epoch);
        let before = (!barrier.backfill).then(|| self.fixed(barrier.prev));
        if self.from.watermark.is_some() {
            let marks = self.from.meta.source_marks(self.from.relation, barrier.epoch);
            for split in &mut self.splits {
                split.watermark.set_floors(split.number, &marks);
                split.idle = is_idle(split.number, &marks);
            }
        }
        if barrier.backfill {
            let length = |s: &Split| end(s.number).saturating_sub(self.parts.start(s.number));
            let total = self.splits.iter().map(length).sum();
            let per_row = self.from.source.offsets_per_row();
            self.estimate.begin(total, per_row, &self.from.progress);
        }
        let rows = (self.from.scan_rows / self.splits.len().max(1)).max(1) as u64;
        let step = match barrier.holds_scan(self.from.stage) {
            true => 0,
            false => rows.saturating_mul(self.from.source.offsets_per_row().max(1)),
        };
        for split in &mut self.splits {
            let end = end(split.number);
            let Some(before) = &before else {
                let offset = split.offset.unwrap_or(0);
                split.until = end.min(offset.saturating_add(step)).max(offset);
                split.scanned = split.until >= end;
                let next = end.min(split.until.saturating_add(step));
                split.next_until = (!split.scanned).then_some(next);
                continue;
            };
            let expected = before(split.number);
            let offset = *split.offset.get_or_insert(expected);
            if offset != expected || end < offset {
                return Err(ExecError::internal(format!(
                    "split {} of source {} is at offset {offset}, its epoch goes from {expected} to {end}",
                    split.number, self.from.relation
                )));
            }
            (split.until, split.next_until) = (end, None);
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<Option<DeltaChunk>, ExecError> {
        let count = self.splits.len();
        loop {
            let due = (0..count)
                .map(|i| (self.turn + i) % count)
                .find(|&i| self.splits[i].offset.unwrap_or(0) < self.splits[i].until);
            let Some(at) = due else { return Ok(None) };
            let raw = self.raw_batch(at).await?;
            self.turn = at + 1;
            let chunk = self.hand_out(at, raw)?;
            if chunk.is_some() {
                return Ok(chunk);
            }
        }
    }

    fn positions(&self, out: &mut Vec<BackfillPosition>) {
        out.extend(self.splits.iter().map(|s| BackfillPosition {
            input: self.from.input,
            vnode: s.number,
            last_key: Bytes::copy_from_slice(&s.offset.unwrap_or(0).to_be_bytes()),
            done: s.scanned,
        }));
    }

    fn take_scanned(&mut self) -> u64 {
        std::mem::take(&mut self.rows)
    }

    /// The least running watermark of the splits that are not idle. During the first scan an idle split
    /// counts until it is read: its rows are as old as they are.
    fn marks(&self) -> WatermarkSet {
        let mut marks = WatermarkSet::default();
        let Some(w) = &self.from.watermark else { return marks };
        let mut mark = Watermark::Idle(None);
        for split in &self.splits {
            let own = match split.watermark.running {
                own if split.idle && (!self.scanning || split.scanned) => Watermark::Idle(own),
                Some(own) => Watermark::At(own),
                None => Watermark::Unknown,
            };
            mark = mark.merge(own);
        }
        marks.add((self.from.relation, w.column), mark);
        marks
    }

    fn counters(&self, out: &mut BTreeMap<String, u64>) {
        for split in self.splits.iter().filter(|_| self.from.watermark.is_some()) {
            split.watermark.store(self.from.input, split.number, out);
        }
        for split in &self.splits {
            let mut position = split.position;
            if is_planted("position-of-the-reader") {
                let reader = self.ahead.as_ref().map(|a| a.position_of_the_reader(split.number));
                position = reader.flatten().or(position);
            }
            if let Some(position) = position {
                put_position(out, self.from.input, split.number, position);
            }
        }
    }
}

#[cfg(test)]
mod tests;
