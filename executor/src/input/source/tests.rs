//! Splits whose rows are numbers, read in epochs.

mod ahead;

use arrow::array::{ArrayRef, AsArray, Int64Array};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use arrow::record_batch::RecordBatch;
use millrace_common::{EnvHandle, Generation, JobId, SqlError};
use millrace_connector::{ConnectorError, Known, Polled};
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

    async fn commit_edit(&self, _: JobId, _: Generation, _: VersionEdit) -> Result<bool, SqlError> {
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
    SourceReader::new(Arc::new(from), task, parallelism, backfill, None).unwrap()
}

/// An epoch's rows; every wait is dropped and taken up again.
async fn epoch(reader: &mut SourceReader, prev: u64, epoch: u64, backfill: bool) -> Vec<i64> {
    reader
        .begin(&Barrier { prev: Epoch(prev), epoch: Epoch(epoch), backfill, stage: 0, swap: false })
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
