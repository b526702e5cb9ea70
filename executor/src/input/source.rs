//! Splits of a source, read directly (docs/design.md §4, "Roots").
//!
//! Meta fixes how far each split goes at an epoch; this regenerates exactly the rows between two such
//! offsets. The first scan goes from offset 0 to the snapshot epoch's, in bounded steps. A task reads
//! the splits that are its own by number. Readers stay open from epoch to epoch.

use std::sync::Arc;

use arrow::record_batch::RecordBatch;
use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use millrace_common::{DeltaChunk, Epoch, RelationId};
use millrace_connector::{ConnectorError, Source, SplitReader};
use millrace_rpc::services::MetaService;
use millrace_rpc::version::{BackfillPosition, BackfillState};

use crate::error::ExecError;
use crate::exchange::Barrier;
use crate::input::Reader;

/// What a source leaf reads, and with what.
pub struct SourceInput {
    pub input: u32,
    pub relation: RelationId,
    pub source: Arc<dyn Source>,
    pub columns: Vec<usize>,
    pub meta: Arc<dyn MetaService>,
    /// Rows of one step of the first scan.
    pub scan_rows: usize,
    /// Rows asked for at once.
    pub read_rows: usize,
}

type ReadResult = Result<Option<(RecordBatch, u64)>, ConnectorError>;
type Reading = BoxFuture<'static, (ReadResult, Box<dyn SplitReader>)>;

struct Split {
    number: u32,
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
    /// The split to read next; they take turns.
    turn: usize,
    rows: u64,
    scanning: bool,
}

impl SourceReader {
    /// The splits that fall to task `task` of `parallelism`. `backfill`: the job's, as committed.
    pub fn new(
        from: SourceInput,
        task: usize,
        parallelism: usize,
        backfill: Option<&BackfillState>,
    ) -> Result<SourceReader, ExecError> {
        let numbers = from.source.splits();
        let own = numbers.into_iter().filter(|&s| s as usize % parallelism == task);
        let splits = own.map(|s| Split::resume(s, from.input, backfill)).collect::<Result<_, _>>()?;
        Ok(SourceReader { from, splits, turn: 0, rows: 0, scanning: false })
    }

    fn fixed(&self, epoch: Epoch) -> impl Fn(u32) -> u64 + use<> {
        let offsets = self.from.meta.source_offsets(self.from.relation, epoch);
        move |split| offsets.iter().find(|(s, _)| *s == split).map_or(0, |(_, o)| *o)
    }

    async fn read(&mut self, at: usize) -> Result<Option<DeltaChunk>, ExecError> {
        let split = &mut self.splits[at];
        let offset = split.offset.unwrap_or(0);
        let reading = match &mut split.reading {
            Some(reading) => reading,
            empty => {
                let mut reader = match split.reader.take() {
                    Some(reader) => reader,
                    None => self.from.source.reader(split.number, offset, &self.from.columns)?,
                };
                let (until, rows) = (split.until, self.from.read_rows);
                empty.insert(Box::pin(async move { (reader.read(until, rows).await, reader) }))
            }
        };
        let (result, reader) = reading.await;
        split.reading = None;
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
        self.rows += if self.scanning { batch.num_rows() as u64 } else { 0 };
        Ok((batch.num_rows() > 0).then(|| DeltaChunk::inserts(batch)))
    }
}

impl Split {
    fn resume(number: u32, input: u32, backfill: Option<&BackfillState>) -> Result<Split, ExecError> {
        let (offset, scanned) = match backfill {
            None => (None, true),
            Some(state) => {
                let known = state.positions.iter().find(|p| p.input == input && p.vnode == number);
                match known {
                    None => (Some(0), false),
                    Some(p) => (Some(decode_offset(&p.last_key)?), p.done),
                }
            }
        };
        Ok(Split { number, offset, until: 0, scanned, reader: None, reading: None })
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
        let end = self.fixed(barrier.epoch);
        let before = (!barrier.backfill).then(|| self.fixed(barrier.prev));
        let step = (self.from.scan_rows / self.splits.len().max(1)).max(1) as u64;
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
}
