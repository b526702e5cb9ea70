//! Splits of a source, read directly (docs/design.md §4, "Roots").
//!
//! Meta fixes how far each split goes at an epoch; this regenerates exactly the rows between two such
//! offsets. The first scan goes from offset 0 to the snapshot epoch's, in bounded steps. A task reads
//! the splits that are its own by number. Readers stay open from epoch to epoch.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::compute::filter_record_batch;
use arrow::record_batch::RecordBatch;
use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use millrace_common::{DeltaChunk, Epoch, RelationId};
use millrace_connector::{
    BadRow, ConnectorError, OnError, Position, ReadFrom, Source, SplitReader,
};
use millrace_rpc::services::{MetaService, SourceParts};
use millrace_rpc::version::{BackfillPosition, BackfillState};

use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::exchange::Barrier;
use crate::input::Reader;
use crate::input::estimate::ScanEstimate;
use crate::input::watermark::{SourceWatermark, SplitWatermark, is_idle};
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

type ReadResult = Result<Option<(RecordBatch, u64)>, ConnectorError>;
type Reading = BoxFuture<'static, (ReadResult, Box<dyn SplitReader>)>;

struct Split {
    number: u32,
    watermark: SplitWatermark,
    /// At the epoch being read.
    idle: bool,
    /// Rows before it have been handed out. `None`: to be taken from the epoch before.
    offset: Option<u64>,
    /// Where the epoch ends.
    until: u64,
    /// The first scan of this split has come to its end.
    scanned: bool,
    reader: Option<Box<dyn SplitReader>>,
    /// A read under way, which owns the reader, so that dropping the caller loses nothing.
    reading: Option<Reading>,
}

pub struct SourceReader {
    from: SourceInput,
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
    /// The splits that fall to task `task` of `parallelism`. `backfill`: the job's, as committed.
    pub fn new(
        from: SourceInput,
        task: usize,
        parallelism: usize,
        backfill: Option<&BackfillState>,
    ) -> Result<SourceReader, ExecError> {
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
        })
    }

    fn fixed(&self, epoch: Epoch) -> impl Fn(u32) -> u64 + use<> {
        let offsets = self.from.meta.source_offsets(self.from.relation, epoch);
        let parts = self.parts.clone();
        move |split| {
            let fixed = offsets.iter().find(|(s, _)| *s == split);
            fixed.map_or_else(|| parts.start(split), |(_, o)| *o)
        }
    }

    /// Takes up the splits that have content at an epoch and fall to this task.
    fn add_splits(&mut self, epoch: Epoch) -> Result<(), ExecError> {
        let parts = self.from.meta.source_parts(self.from.relation);
        if parts != self.parts {
            self.splits.iter_mut().filter_map(|s| s.reader.as_mut()).for_each(|r| r.extend(&parts));
            self.parts = parts;
        }
        for (number, _) in self.from.meta.source_offsets(self.from.relation, epoch) {
            let own = number as usize % self.parallelism == self.task;
            if own && !self.splits.iter().any(|s| s.number == number) {
                let start = self.parts.start(number);
                let backfill = self.backfill.as_ref();
                let input = self.from.input;
                let watermark = SplitWatermark::load(&self.from.counters, input, number);
                self.splits.push(Split::resume(number, input, start, watermark, backfill)?);
            }
        }
        Ok(())
    }

    async fn read(&mut self, at: usize) -> Result<Option<DeltaChunk>, ExecError> {
        let split = &mut self.splits[at];
        let offset = split.offset.unwrap_or(0);
        let reading = match &mut split.reading {
            Some(reading) => reading,
            empty => {
                let mut reader = match split.reader.take() {
                    Some(reader) => reader,
                    None => {
                        let watermark = self.from.watermark.as_ref();
                        let columns = watermark.map_or(&self.from.columns, |w| &w.columns);
                        let counters = &self.from.counters;
                        let position = committed_position(counters, self.from.input, split.number);
                        let at = ReadFrom {
                            split: split.number,
                            offset,
                            position,
                            parts: self.parts.clone(),
                        };
                        self.from.source.open(at, columns)?
                    }
                };
                if let Some(value) = self.from.meta.option(self.from.relation, "on_error") {
                    reader.set_on_error(OnError::named(&value));
                }
                // A floor holds from its offset on: no read goes across it.
                let until = split.until.min(split.watermark.raise(offset));
                let rows = self.from.read_rows;
                empty.insert(Box::pin(async move { (reader.read(until, rows).await, reader) }))
            }
        };
        let (result, mut reader) = reading.await;
        split.reading = None;
        report_bad_rows(&self.from.errors, reader.take_bad_rows());
        split.reader = Some(reader);
        let Some((batch, after)) = result? else {
            return Err(ExecError::internal(format!(
                "split {} ended at offset {offset}, before {}",
                split.number, split.until
            )));
        };
        if after <= offset || after > split.until {
            return Err(ExecError::internal(format!(
                "split {} went from offset {offset} to {after}, asked for up to {}",
                split.number, split.until
            )));
        }
        split.offset = Some(after);
        if self.scanning {
            let (rows, per_row) = (batch.num_rows() as u64, self.from.source.offsets_per_row());
            self.rows += rows;
            self.estimate.read(after - offset, rows, per_row, &self.from.progress);
        }
        let batch = match &self.from.watermark {
            None => batch,
            Some(w) => {
                let batch = w.complete(batch, Some(&self.from.errors))?;
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
        let (until, reader, reading) = (0, None, None);
        Ok(Split { number, watermark, idle, offset, until, scanned, reader, reading })
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
        self.scanning = barrier.backfill;
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
            split.until = end;
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
            let chunk = self.read(at).await?;
            self.turn = at + 1;
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
            if let Some(position) = split.reader.as_ref().and_then(|r| r.position()) {
                put_position(out, self.from.input, split.number, position);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, AsArray, Int64Array};
    use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
    use millrace_common::{EnvHandle, Generation, JobId, SqlError};
    use millrace_connector::{Known, Polled};
    use millrace_rpc::version::VersionEdit;

    use super::*;

    /// Row k of split s holds `s * 1000 + k`.
    struct Numbers;

    struct NumbersReader(u32, u64);

    #[async_trait]
    impl Source for Numbers {
        fn schema(&self) -> SchemaRef {
            Arc::new(Schema::new(vec![Field::new("n", DataType::Int64, false)]))
        }

        async fn poll(&self, _: &Known) -> Result<Polled, ConnectorError> {
            Ok(Polled::default())
        }

        fn open(&self, at: ReadFrom, _: &[usize]) -> Result<Box<dyn SplitReader>, ConnectorError> {
            Ok(Box::new(NumbersReader(at.split, at.offset)))
        }
    }

    #[async_trait]
    impl SplitReader for NumbersReader {
        async fn read(&mut self, until: u64, max_rows: usize) -> ReadResult {
            // A read that is dropped here must lose nothing.
            tokio::task::yield_now().await;
            let end = until.min(self.1 + max_rows as u64);
            let rows = (self.1..end).map(|k| i64::from(self.0) * 1_000 + k as i64);
            let n: ArrayRef = Arc::new(Int64Array::from_iter_values(rows));
            self.1 = end;
            Ok(Some((RecordBatch::try_from_iter([("n", n)])?, end)))
        }
    }

    /// Epoch e fixes every split at 10 × e.
    struct Offsets;

    #[async_trait]
    impl MetaService for Offsets {
        fn request_cut(&self, _: JobId) {}

        async fn commit_edit(
            &self,
            _: JobId,
            _: Generation,
            _: VersionEdit,
        ) -> Result<bool, SqlError> {
            Ok(true)
        }

        fn report_failure(&self, _: JobId, _: Generation, _: SqlError) {}

        fn source_offsets(&self, _: RelationId, epoch: Epoch) -> Vec<(u32, u64)> {
            (0..3).map(|s| (s, epoch.0 * 10)).collect()
        }

        fn graph(&self, _: RelationId) -> Option<Bytes> {
            None
        }
    }

    fn reader(task: usize, parallelism: usize, backfill: Option<&BackfillState>) -> SourceReader {
        let from = SourceInput {
            input: 4,
            relation: RelationId(9),
            source: Arc::new(Numbers),
            columns: vec![0],
            watermark: None,
            meta: Arc::new(Offsets),
            scan_rows: 15,
            stage: 0,
            read_rows: 4,
            errors: Arc::default(),
            progress: Arc::new(Progress::new(EnvHandle::default())),
            counters: BTreeMap::new(),
        };
        SourceReader::new(from, task, parallelism, backfill).unwrap()
    }

    /// An epoch's rows; every wait is dropped and taken up again.
    async fn epoch(reader: &mut SourceReader, prev: u64, epoch: u64, backfill: bool) -> Vec<i64> {
        reader
            .begin(&Barrier {
                prev: Epoch(prev),
                epoch: Epoch(epoch),
                backfill,
                stage: 0,
                swap: false,
            })
            .unwrap();
        let mut rows = Vec::new();
        loop {
            let next = tokio::select! {
                biased;
                next = reader.next() => next.unwrap(),
                () = std::future::ready(()) => continue,
            };
            let Some(chunk) = next else { break };
            rows.extend(chunk.batch.column(0).as_primitive::<Int64Type>().values());
        }
        rows.sort_unstable();
        rows
    }

    fn rows(splits: &[i64], from: i64, to: i64) -> Vec<i64> {
        splits.iter().flat_map(|s| (from..to).map(move |k| s * 1_000 + k)).collect()
    }

    #[tokio::test]
    async fn an_epoch_is_exactly_the_rows_between_its_offsets_however_it_is_shared_out() {
        let mut whole = reader(0, 1, None);
        assert_eq!(epoch(&mut whole, 2, 5, false).await, rows(&[0, 1, 2], 20, 50));
        assert_eq!(epoch(&mut whole, 5, 6, false).await, rows(&[0, 1, 2], 50, 60));
        let (mut even, mut odd) = (reader(0, 2, None), reader(1, 2, None));
        assert_eq!(epoch(&mut even, 2, 5, false).await, rows(&[0, 2], 20, 50));
        assert_eq!(epoch(&mut odd, 2, 5, false).await, rows(&[1], 20, 50));
        assert!(
            odd.begin(&Barrier {
                prev: Epoch(3),
                epoch: Epoch(6),
                backfill: false,
                stage: 0,
                swap: false
            })
            .is_err()
        );
    }

    #[tokio::test]
    async fn the_first_scan_goes_in_steps_and_resumes_where_it_was_committed() {
        let mut state = BackfillState { snapshot_epoch: 2, ..BackfillState::default() };
        let mut read = Vec::new();
        let mut steps = 0;
        while state.positions.is_empty() || state.positions.iter().any(|p| !p.done) {
            // Every step by a new reader, as after a restart.
            let mut scan = reader(0, 1, Some(&state));
            read.extend(epoch(&mut scan, 2, 2, true).await);
            state.positions.clear();
            scan.positions(&mut state.positions);
            steps += 1;
        }
        read.sort_unstable();
        assert_eq!(read, rows(&[0, 1, 2], 0, 20));
        assert_eq!(steps, 4);
        let mut after = reader(0, 1, Some(&state));
        assert_eq!(epoch(&mut after, 2, 3, false).await, rows(&[0, 1, 2], 20, 30));
    }
}
