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
        let splits =
            own.map(|s| Split::resume(s, from.input, backfill)).collect::<Result<_, _>>()?;
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
    fn resume(
        number: u32,
        input: u32,
        backfill: Option<&BackfillState>,
    ) -> Result<Split, ExecError> {
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

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, AsArray, Int64Array};
    use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
    use millrace_common::{Generation, JobId, SqlError};
    use millrace_rpc::version::VersionEdit;

    use super::*;

    /// Row k of split s holds `s * 1000 + k`.
    struct Numbers;

    struct NumbersReader(u32, u64);

    impl Source for Numbers {
        fn schema(&self) -> SchemaRef {
            Arc::new(Schema::new(vec![Field::new("n", DataType::Int64, false)]))
        }

        fn splits(&self) -> Vec<u32> {
            vec![0, 1, 2]
        }

        fn available(&self, _: u32, _: u64, _: u64) -> u64 {
            u64::MAX
        }

        fn reader(
            &self,
            split: u32,
            offset: u64,
            _: &[usize],
        ) -> Result<Box<dyn SplitReader>, ConnectorError> {
            Ok(Box::new(NumbersReader(split, offset)))
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
            meta: Arc::new(Offsets),
            scan_rows: 15,
            read_rows: 4,
        };
        SourceReader::new(from, task, parallelism, backfill).unwrap()
    }

    /// An epoch's rows; every wait is dropped and taken up again.
    async fn epoch(reader: &mut SourceReader, prev: u64, epoch: u64, backfill: bool) -> Vec<i64> {
        reader.begin(&Barrier { prev: Epoch(prev), epoch: Epoch(epoch), backfill }).unwrap();
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
        assert!(odd.begin(&Barrier { prev: Epoch(3), epoch: Epoch(6), backfill: false }).is_err());
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
