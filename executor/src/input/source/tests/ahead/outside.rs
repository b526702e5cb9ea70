//! What is outside of the job: the log, the catalog, and the source itself.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, TimestampMicrosecondArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use arrow::record_batch::RecordBatch;
use async_trait::async_trait;
use bytes::Bytes;
use millrace_common::{Epoch, Generation, JobId, RelationId, SqlError, SqlState, SqlType};
use millrace_connector::{
    BadRow, ConnectorError, Known, OnError, Polled, Position, ReadFrom, ReadResult, Source,
    SplitReader,
};
use millrace_functions::expr::column;
use millrace_graph::codec::encode_watermark;
use millrace_rpc::catalog::{Column, Relation, Watermark as DeclaredWatermark};
use millrace_rpc::log::{SourceFile, SplitMarkAt};
use millrace_rpc::services::{MetaService, SourceParts};
use millrace_rpc::version::VersionEdit;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::SOURCE;
use super::story::Story;

/// What the log and the catalog say.
pub(super) struct Outside {
    pub(super) story: Story,
    /// The newest epoch that is fixed.
    fixed: Mutex<usize>,
    fails: Mutex<bool>,
    changes: watch::Sender<u64>,
    /// The splits of each question how far may be read ahead.
    pub(super) asked: Mutex<Vec<Vec<u32>>>,
    /// The splits that were opened, in turn.
    pub(super) opened: Mutex<Vec<u32>>,
}

impl Outside {
    pub(super) fn new(story: &Story) -> Arc<Outside> {
        let (fixed, fails, changes) = (Mutex::new(0), Mutex::new(false), watch::Sender::new(0));
        let (story, asked, opened) = (story.clone(), Mutex::default(), Mutex::default());
        Arc::new(Outside { story, fixed, fails, changes, asked, opened })
    }

    /// The log has an epoch, and those before it.
    pub(super) fn fix(&self, epoch: usize, fails: bool) {
        let fixed = epoch.max(*self.fixed.lock());
        (*self.fixed.lock(), *self.fails.lock()) = (fixed, fails);
        self.changes.send_modify(|n| *n += 1);
    }

    /// What runs beside the job has the time that the story gives it at number `n`.
    pub(super) async fn pause(&self, n: usize) {
        for _ in 0..self.story.pauses[n % self.story.pauses.len()] {
            tokio::task::yield_now().await;
        }
    }
}

pub(super) struct Log(pub(super) Arc<Outside>);

#[async_trait]
impl MetaService for Log {
    fn request_cut(&self, _: JobId) {}

    async fn commit_edit(&self, _: JobId, _: Generation, _: VersionEdit) -> Result<bool, SqlError> {
        Ok(true)
    }

    fn report_failure(&self, _: JobId, _: Generation, _: SqlError) {}

    fn source_offsets(&self, _: RelationId, epoch: Epoch) -> Vec<(u32, u64)> {
        let (story, fixed) = (&self.0.story, *self.0.fixed.lock() as u64);
        let epoch = epoch.0.min(fixed) as usize;
        story.splits(epoch).map(|split| (split, story.epochs[epoch][split as usize])).collect()
    }

    fn source_ahead(&self, _: RelationId, splits: &[(u32, u64)]) -> Vec<Option<u64>> {
        self.0.asked.lock().push(splits.iter().map(|(split, _)| *split).collect());
        let (story, fixed) = (&self.0.story, *self.0.fixed.lock());
        let next = |&(split, offset): &(u32, u64)| {
            let end = |epoch: usize| Some(story.epochs.get(epoch)?[split as usize]);
            // Nothing is on its way of a source that is paused.
            let planned = end(fixed + 1).filter(|_| !story.paused[fixed + 1]);
            let planned = planned.map(|end| end + story.beyond[fixed + 1]);
            (0..=fixed).filter_map(end).chain(planned).find(|end| *end > offset)
        };
        splits.iter().map(next).collect()
    }

    fn source_marks(&self, _: RelationId, epoch: Epoch) -> Vec<SplitMarkAt> {
        self.0.story.marks.iter().filter(|m| m.epoch <= epoch.0).copied().collect()
    }

    fn source_parts(&self, _: RelationId) -> SourceParts {
        let fixed = *self.0.fixed.lock();
        let file = |split| {
            let length = self.0.story.files_end(fixed, split);
            SourceFile { split, length, ..SourceFile::default() }
        };
        let files = self.0.story.splits(fixed).map(file).collect();
        SourceParts { files: Arc::new(files), ..SourceParts::default() }
    }

    fn option(&self, _: RelationId, name: &str) -> Option<String> {
        assert_eq!(name, "on_error");
        Some(if *self.0.fails.lock() { "fail" } else { "skip" }.to_string())
    }

    fn changes(&self, _: RelationId) -> Option<watch::Receiver<u64>> {
        Some(self.0.changes.subscribe())
    }

    fn graph(&self, _: RelationId) -> Option<Bytes> {
        None
    }
}

pub(super) fn row_schema() -> SchemaRef {
    let time = DataType::Timestamp(TimeUnit::Microsecond, None);
    Arc::new(Schema::new(vec![
        Field::new("n", DataType::Int64, true),
        Field::new("at", time, true),
    ]))
}

/// Row k of split s holds `s * 1000 + k` and a time; every seventh is bad, every fifth old.
pub(super) struct Rows(pub(super) Arc<Outside>);

struct RowReader {
    split: u32,
    at: u64,
    parts: SourceParts,
    on_error: OnError,
    bad: Vec<BadRow>,
}

#[async_trait]
impl Source for Rows {
    fn schema(&self) -> SchemaRef {
        row_schema()
    }

    async fn poll(&self, _: &Known) -> Result<Polled, ConnectorError> {
        Ok(Polled::default())
    }

    fn open(&self, from: ReadFrom, _: &[usize]) -> Result<Box<dyn SplitReader>, ConnectorError> {
        self.0.opened.lock().push(from.split);
        // As a reader of files does: a place that is known exactly is where it goes on.
        let known = from.position.filter(|p| p.offset >= from.offset);
        known.into_iter().for_each(|p| assert_eq!(p.line, p.offset * 10));
        let at = known.map_or(from.offset, |p| p.offset);
        let (on_error, bad) = (OnError::Skip, Vec::new());
        Ok(Box::new(RowReader { split: from.split, at, parts: from.parts, on_error, bad }))
    }
}

#[async_trait]
impl SplitReader for RowReader {
    async fn read(&mut self, until: u64, max_rows: usize) -> ReadResult {
        tokio::task::yield_now().await;
        let end = until.min(self.at + max_rows as u64);
        let (mut numbers, mut times) = (Vec::new(), Vec::new());
        for k in self.at..end {
            let known = self.parts.files.iter().filter(|f| f.split == self.split);
            if known.map(|f| f.length).sum::<u64>() <= k {
                return Err(ConnectorError::NoSuchSplit(self.split));
            }
            if k % 7 == 3 {
                let place = format!("split {}", self.split);
                let error = SqlError::new(SqlState::BAD_COPY_FILE_FORMAT, format!("row {k}"));
                if self.on_error == OnError::Fail {
                    return Err(ConnectorError::BadRow { place, error: Box::new(error) });
                }
                self.bad.push(BadRow { place, error });
                continue;
            }
            numbers.push(i64::from(self.split) * 1_000 + k as i64);
            times.push(k as i64 * 10 - if k % 5 == 2 { 35 } else { 0 });
        }
        self.at = end;
        let (numbers, times) = (Int64Array::from(numbers), TimestampMicrosecondArray::from(times));
        let columns: Vec<ArrayRef> = vec![Arc::new(numbers), Arc::new(times)];
        Ok(Some((RecordBatch::try_new(row_schema(), columns)?, end)))
    }

    fn position(&self) -> Option<Position> {
        Some(Position { offset: self.at, line: self.at * 10 })
    }

    fn take_bad_rows(&mut self) -> Vec<BadRow> {
        std::mem::take(&mut self.bad)
    }

    fn set_on_error(&mut self, on_error: OnError) {
        self.on_error = on_error;
    }

    fn extend(&mut self, parts: &SourceParts) {
        self.parts = parts.clone();
    }
}

/// A source with a watermark on its second column.
pub(super) fn relation() -> Relation {
    let column_of = |name: &str, sql_type: SqlType| Column {
        name: name.to_string(),
        sql_type: sql_type.into(),
        nullable: true,
        ..Column::default()
    };
    let expr = encode_watermark(&column(&row_schema(), 1)).unwrap();
    Relation {
        id: SOURCE.0,
        columns: vec![column_of("n", SqlType::BigInt), column_of("at", SqlType::Timestamp)],
        watermark: Some(DeclaredWatermark { column: 1, expr, ..DeclaredWatermark::default() }),
        ..Relation::default()
    }
}
