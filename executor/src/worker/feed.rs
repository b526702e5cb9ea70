//! A table's connector: reads what meta has fixed of it and feeds it to the table's sequencer.
//!
//! How far the rows of an epoch go is committed with the epoch, as counters of the table's job, so
//! each row enters exactly once, whatever dies. The feed fails by itself: it says why, waits and goes
//! on, while statements on the table work.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{
    Array, ArrayRef, BooleanArray, Int64Array, RecordBatch, RecordBatchOptions,
    TimestampMicrosecondArray,
};
use arrow::compute::{self, filter_record_batch};
use arrow::datatypes::DataType;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError, SqlState, SqlType};
use millrace_connector::{OnError, ReadFrom, Source, SplitReader, create_source};
use millrace_functions::round::round_seconds;
use millrace_rpc::catalog::{OnConflict, Relation};
use millrace_rpc::services::{MetaService, SourceParts};
use millrace_rpc::version::{JobVersion, StatementId, feed_counter};
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

use crate::dml::{DmlError, DmlKind, DmlStatement, EntryFlag, InsertConflict, Sequencer};
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::input::generated::{PROCTIME, expressions};
use crate::input::source::{committed_position, put_position, report_bad_rows};
use crate::operators::expr::SafeExpr;

/// Rows of one statement.
const ROWS: usize = 8_192;
/// Statements whose epoch is not concluded.
const IN_FLIGHT: usize = 64;
const RETRY_MIN: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// How often to look where nothing tells of changes.
const LOOK: Duration = Duration::from_millis(250);
/// Readers' places are committed under this input.
const INPUT: u32 = 0;

/// Why a feed is not going on; `None`: it is.
pub type FeedState = Arc<Mutex<Option<SqlError>>>;

/// How a column of the table is made.
enum Make {
    /// Position in what is read.
    Read(usize),
    /// Position among the expressions.
    Compute(usize),
    /// The time of arrival: `PROCTIME()`.
    Now,
    RowId,
}

struct Split {
    number: u32,
    offset: u64,
    reader: Option<Box<dyn SplitReader>>,
}

pub struct Feed {
    relation: Relation,
    sequencer: Arc<Sequencer>,
    meta: Arc<dyn MetaService>,
    errors: Arc<ErrorSink>,
    state: FeedState,
    source: Option<Arc<dyn Source>>,
    /// Columns to read, and what to make of them.
    read: Vec<usize>,
    make: Vec<Make>,
    /// Expressions, and the columns (among those read) they are over.
    exprs: Vec<SafeExpr>,
    over: Vec<usize>,
    splits: Vec<Split>,
    parts: SourceParts,
    counters: BTreeMap<String, u64>,
    in_flight: VecDeque<oneshot::Receiver<()>>,
}

impl Feed {
    pub fn new(
        relation: &Relation,
        version: &JobVersion,
        sequencer: Arc<Sequencer>,
        meta: Arc<dyn MetaService>,
        errors: Arc<ErrorSink>,
        state: FeedState,
    ) -> Result<Feed, ExecError> {
        let (exprs, sources) = expressions(relation)?;
        let safe = |e| SafeExpr::new(e, "generated column", Arc::clone(&errors));
        let exprs: Vec<SafeExpr> = exprs.into_iter().map(safe).collect();
        let (mut read, mut make, mut computed) = (Vec::new(), Vec::new(), 0);
        for (i, column) in relation.columns.iter().enumerate() {
            make.push(if column.generated_sql.as_deref() == Some(PROCTIME) {
                Make::Now
            } else if column.generated_sql.is_some() {
                computed += 1;
                Make::Compute(computed - 1)
            } else if column.hidden {
                Make::RowId
            } else {
                read.push(i);
                Make::Read(read.len() - 1)
            });
        }
        if computed != exprs.len() {
            return Err(ExecError::internal("a table's generated columns do not fit its graph"));
        }
        let over = sources
            .into_iter()
            .map(|c| read.iter().position(|r| *r == c))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| ExecError::internal("a generated column over a generated column"))?;
        Ok(Feed {
            relation: relation.clone(),
            sequencer,
            meta,
            errors,
            state,
            source: None,
            read,
            make,
            exprs,
            over,
            splits: Vec::new(),
            parts: SourceParts::default(),
            counters: version.counters.clone(),
            in_flight: VecDeque::new(),
        })
    }

    /// Until the table's job ends.
    pub async fn run(mut self) {
        let mut failures = 0;
        let id = RelationId(self.relation.id);
        let mut changes = self.meta.changes(id);
        loop {
            if let Some(changes) = &mut changes {
                changes.mark_unchanged();
            }
            match self.round().await {
                Ok(true) => {
                    failures = 0;
                    continue;
                }
                Ok(false) => {
                    failures = 0;
                    *self.state.lock() = None;
                    let told = match &mut changes {
                        Some(changes) => changes.changed().await.is_ok(),
                        None => false,
                    };
                    if !told {
                        tokio::time::sleep(LOOK).await;
                    }
                }
                // The table has ended.
                Err(FeedError::Ended) => return,
                Err(FeedError::Failed(error)) => {
                    tracing::warn!(table = self.relation.label(), %error, "the table's connector failed");
                    *self.state.lock() = Some(error);
                    failures += 1;
                    // Readers are opened anew; what has entered the table is behind the offsets.
                    self.splits.iter_mut().for_each(|s| s.reader = None);
                    self.source = None;
                    let pause = RETRY_MIN.saturating_mul(1 << (failures - 1).min(8));
                    let altered = altered(Arc::clone(&self.meta), id, changes.clone());
                    let _ = tokio::time::timeout(pause.min(RETRY_MAX), altered).await;
                }
            }
            if self.sequencer.is_stopped() {
                return;
            }
        }
    }

    /// One batch of every split that has any; `false`: none has.
    async fn round(&mut self) -> Result<bool, FeedError> {
        let id = RelationId(self.relation.id);
        let parts = self.meta.source_parts(id);
        if parts != self.parts {
            self.splits.iter_mut().filter_map(|s| s.reader.as_mut()).for_each(|r| r.extend(&parts));
            self.parts = parts;
        }
        let mut worked = false;
        for (split, until) in self.meta.source_offsets(id, Epoch::MAX) {
            let at = self.split(split);
            if self.splits[at].offset < until {
                self.step(at, until).await?;
                worked = true;
            }
        }
        Ok(worked)
    }

    fn split(&mut self, number: u32) -> usize {
        if let Some(at) = self.splits.iter().position(|s| s.number == number) {
            return at;
        }
        let committed = self.counters.get(&feed_counter(number)).copied();
        let offset = committed.unwrap_or_else(|| self.parts.start(number));
        self.splits.push(Split { number, offset, reader: None });
        self.splits.len() - 1
    }

    async fn step(&mut self, at: usize, until: u64) -> Result<(), FeedError> {
        let source = match &self.source {
            Some(source) => Arc::clone(source),
            None => {
                let source = create_source(&self.relation).map_err(FeedError::Failed)?;
                Arc::clone(self.source.insert(source))
            }
        };
        let split = &mut self.splits[at];
        let reader = match &mut split.reader {
            Some(reader) => reader,
            empty => {
                let from = ReadFrom {
                    split: split.number,
                    offset: split.offset,
                    position: committed_position(&self.counters, INPUT, split.number),
                    parts: self.parts.clone(),
                };
                let opened = source.open(from, &self.read);
                empty.insert(opened.map_err(|e| FeedError::Failed(e.into()))?)
            }
        };
        if let Some(value) = self.meta.option(RelationId(self.relation.id), "on_error") {
            reader.set_on_error(OnError::named(&value));
        }
        let result = reader.read(until, ROWS).await;
        report_bad_rows(&self.errors, reader.take_bad_rows());
        let read = result.map_err(|e| FeedError::Failed(e.into()))?;
        let weights = reader.weights();
        let position = reader.position();
        let Some((batch, after)) = read else {
            let message = format!("split {} ended before offset {until}", split.number);
            return Err(FeedError::Failed(SqlError::internal(message)));
        };
        let number = split.number;
        let (rows, weights) = self.complete(batch, weights).map_err(failed)?;
        let mut fed = BTreeMap::from([(feed_counter(number), after)]);
        if let Some(position) = position {
            put_position(&mut fed, INPUT, number, position);
        }
        fed.extend(self.errors.unsaved());
        self.enter(DeltaChunk::new(rows, weights), &fed).await?;
        self.counters.extend(fed);
        self.splits[at].offset = after;
        Ok(())
    }

    async fn enter(
        &mut self,
        delta: DeltaChunk,
        fed: &BTreeMap<String, u64>,
    ) -> Result<(), FeedError> {
        while self.in_flight.len() >= IN_FLIGHT {
            if let Some(oldest) = self.in_flight.pop_front() {
                // However it ended: there is room, or the table has stopped.
                let _ = oldest.await;
            }
        }
        let kind = match OnConflict::try_from(self.relation.on_conflict) {
            // A hidden row id is always new.
            _ if !self.relation.primary_key => {
                DmlKind::Insert { on_conflict: InsertConflict::Error }
            }
            Ok(OnConflict::Overwrite) => DmlKind::Feed { on_conflict: InsertConflict::Overwrite },
            _ => DmlKind::Feed { on_conflict: InsertConflict::Nothing },
        };
        // Nobody asks for the fate of these rows by name.
        let id = StatementId::default();
        let entered = EntryFlag::default();
        let statement = DmlStatement { id, delta, kind, mark: None, entered, announced: None };
        match self.sequencer.feed(statement, fed.clone()).await {
            Ok(concluded) => {
                self.in_flight.push_back(concluded);
                Ok(())
            }
            Err(DmlError::Conflict) => Err(FeedError::Ended),
            Err(e) => Err(FeedError::Failed(e.into())),
        }
    }

    /// Rows of all of the table's columns; rows that violate NOT NULL are reported and left out.
    fn complete(
        &self,
        batch: RecordBatch,
        weights: Option<Int64Array>,
    ) -> Result<(RecordBatch, Option<Int64Array>), ExecError> {
        let rows = batch.num_rows();
        let read =
            self.read.iter().zip(batch.columns()).map(|(at, array)| self.rounded(*at, array));
        let read = read.collect::<Result<Vec<ArrayRef>, ExecError>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let batch = RecordBatch::try_new_with_options(batch.schema(), read, &options)?;
        let computed = self.compute(&batch)?;
        let columns = self.make.iter().enumerate().map(|(column, make)| match make {
            Make::Read(at) => Ok(Arc::clone(batch.column(*at))),
            Make::Compute(at) => self.rounded(column, &computed[*at]),
            Make::Now => Ok(times_of_arrival(self.sequencer.time_of_arrival(), rows)),
            Make::RowId => {
                let first = self.sequencer.allocate_row_ids(rows as u64);
                Ok(Arc::new(Int64Array::from_iter_values(first..first + rows as i64)) as ArrayRef)
            }
        });
        let columns = columns.collect::<Result<Vec<ArrayRef>, ExecError>>()?;
        let good = self.valid(&columns, weights.as_ref());
        // Deletions bring no more than their key.
        let schema = self.sequencer.schema();
        let nullable: Vec<_> =
            schema.fields().iter().map(|f| f.as_ref().clone().with_nullable(true)).collect();
        let schema = Arc::new(arrow::datatypes::Schema::new(nullable));
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let full = RecordBatch::try_new_with_options(schema, columns, &options)?;
        let Some(good) = good else { return Ok((full, weights)) };
        let weights = match weights {
            None => None,
            Some(w) => {
                use arrow::array::AsArray;
                Some(compute::filter(&w, &good)?.as_primitive().clone())
            }
        };
        Ok((filter_record_batch(&full, &good)?, weights))
    }

    /// Times with as many digits of their seconds as their column has.
    fn rounded(&self, column: usize, array: &ArrayRef) -> Result<ArrayRef, ExecError> {
        let digits = self.relation.columns.get(column).and_then(|c| c.sql_type.second_digits());
        match digits {
            Some(digits) => Ok(round_seconds(array, digits)?),
            None => Ok(Arc::clone(array)),
        }
    }

    fn compute(&self, batch: &RecordBatch) -> Result<Vec<ArrayRef>, ExecError> {
        if self.exprs.is_empty() {
            return Ok(Vec::new());
        }
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        let columns = self.over.iter().map(|&c| Arc::clone(batch.column(c))).collect();
        let schema = Arc::new(batch.schema().project(&self.over)?);
        let input = RecordBatch::try_new_with_options(schema, columns, &options)?;
        self.exprs.iter().map(|e| e.evaluate(&input)).collect()
    }

    /// Rows whose NOT NULL columns have values; `None`: all.
    fn valid(&self, columns: &[ArrayRef], weights: Option<&Int64Array>) -> Option<BooleanArray> {
        let rows = columns.first().map_or(0, |c| c.len());
        let mut good: Option<Vec<bool>> = None;
        for (i, (column, array)) in self.relation.columns.iter().zip(columns).enumerate() {
            if column.nullable || array.null_count() == 0 {
                continue;
            }
            let key = self.relation.key.contains(&(i as u32));
            let deletes = |row: usize| weights.is_some_and(|w| w.value(row) < 0);
            let bad = (0..rows).filter(|&r| array.is_null(r) && (key || !deletes(r)));
            let mut count = 0;
            for row in bad {
                good.get_or_insert_with(|| vec![true; rows])[row] = false;
                count += 1;
            }
            if count > 0 {
                let message = format!(
                    "null value in column \"{}\" of relation \"{}\" violates not-null constraint",
                    column.name, self.relation.name
                );
                let error = SqlError::new(SqlState::NOT_NULL_VIOLATION, message);
                self.errors.report("connector", &error, count);
            }
        }
        good.map(BooleanArray::from)
    }
}

/// Completes when the table's `on_error` is another than it was.
async fn altered(
    meta: Arc<dyn MetaService>,
    id: RelationId,
    changes: Option<watch::Receiver<u64>>,
) {
    let now = || meta.option(id, "on_error");
    let before = now();
    if let Some(mut changes) = changes {
        while changes.changed().await.is_ok() {
            if now() != before {
                return;
            }
        }
    }
    std::future::pending().await
}

enum FeedError {
    Ended,
    Failed(SqlError),
}

fn failed(error: ExecError) -> FeedError {
    FeedError::Failed(error.into_sql())
}

/// The time at which rows arrive, so many times.
pub(super) fn times_of_arrival(time: i64, rows: usize) -> ArrayRef {
    let array = TimestampMicrosecondArray::from(vec![time; rows]);
    match SqlType::Timestamptz.to_arrow() {
        DataType::Timestamp(_, Some(zone)) => Arc::new(array.with_timezone(zone)),
        _ => Arc::new(array),
    }
}
