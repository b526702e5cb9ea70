//! A table's connector: reads what meta has fixed of it and feeds it to the table's sequencer.
//!
//! How far the rows of an epoch go is committed with the epoch, as counters of the table's job, so each row enters
//! exactly once, whatever dies. While rows enter, those behind them are read ahead, and what will be looked up for them is
//! ([`ahead`]). The feed fails by itself: it says why, waits and goes on, while statements on the table work.

mod ahead;
mod rows;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError};
use millrace_connector::{OnError, ReadFrom, Source, SplitReader, create_source};
use millrace_rpc::catalog::{OnConflict, Relation};
use millrace_rpc::services::{MetaService, SourceParts};
use millrace_rpc::version::{JobVersion, StatementId, feed_counter};
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

pub use ahead::FeedAhead;
use rows::FeedRows;
pub(super) use rows::times_of_arrival;

use crate::dml::{
    Announced, DmlError, DmlKind, DmlStatement, EntryFlag, InsertConflict, Sequencer,
};
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::input::source::{committed_position, put_position, report_bad_rows};
use crate::lookahead::keys_ahead::KeysAhead;
use crate::lookahead::read_ahead::{RawBatch, ReadAhead};

/// Rows of one statement.
pub const ROWS: usize = 8_192;
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

struct Split {
    number: u32,
    offset: u64,
    reader: Option<Box<dyn SplitReader>>,
    /// The next rows, if they have not entered yet.
    completed: Option<Completed>,
}

/// Rows as they enter the table.
#[derive(Clone)]
struct Completed {
    delta: DeltaChunk,
    /// The offset behind them.
    after: u64,
    /// What is committed with them of the place where the reader is.
    fed: BTreeMap<String, u64>,
}

/// What was told of rows that were read ahead; nothing of others.
#[derive(Default)]
struct Ahead {
    announced: Option<Announced>,
    keys: KeysAhead,
}

pub struct Feed {
    relation: Relation,
    sequencer: Arc<Sequencer>,
    meta: Arc<dyn MetaService>,
    errors: Arc<ErrorSink>,
    state: FeedState,
    source: Option<Arc<dyn Source>>,
    rows: FeedRows,
    /// Reads on while rows enter. `None`: for tests that compare.
    ahead: Option<ReadAhead>,
    splits: Vec<Split>,
    parts: SourceParts,
    counters: BTreeMap<String, u64>,
    /// What the sink of errors has handed out to be committed, of rows that have not entered yet.
    unsaved: BTreeMap<String, u64>,
    in_flight: VecDeque<oneshot::Receiver<()>>,
}

impl Feed {
    /// `ahead`: reads on in the table's splits, if anything does.
    pub fn new(
        relation: &Relation,
        version: &JobVersion,
        sequencer: Arc<Sequencer>,
        meta: Arc<dyn MetaService>,
        errors: Arc<ErrorSink>,
        state: FeedState,
        ahead: Option<ReadAhead>,
    ) -> Result<Feed, ExecError> {
        let rows = FeedRows::new(relation, Arc::clone(&sequencer), Arc::clone(&errors))?;
        Ok(Feed {
            relation: relation.clone(),
            sequencer,
            meta,
            errors,
            state,
            source: None,
            rows,
            ahead,
            splits: Vec::new(),
            parts: SourceParts::default(),
            counters: version.counters.clone(),
            unsaved: BTreeMap::new(),
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
                    self.close();
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
        // Before the parts: what is content lies in parts that are known.
        let mut ends = self.meta.source_offsets(id, Epoch::MAX);
        let parts = self.meta.source_parts(id);
        if parts != self.parts {
            self.splits.iter_mut().filter_map(|s| s.reader.as_mut()).for_each(|r| r.extend(&parts));
            self.parts = parts;
        }
        // Rows that could not enter come first: what was bad in them is committed with the rows that enter next.
        let waiting = self.splits.iter().find(|split| split.completed.is_some());
        let waiting = waiting.map(|split| split.number);
        ends.sort_by_key(|(split, _)| Some(*split) != waiting);
        let mut worked = false;
        for (split, until) in ends {
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
        self.splits.push(Split { number, offset, reader: None, completed: None });
        self.splits.len() - 1
    }

    /// The next rows of a split, all of them content up to `until`, enter the table.
    async fn step(&mut self, at: usize, until: u64) -> Result<(), FeedError> {
        let (rows, ahead) = match self.splits[at].completed.clone() {
            // They could not enter. What was bad in them has been counted.
            Some(rows) => (rows, Ahead::default()),
            None => self.complete(at, until).await?,
        };
        self.unsaved.extend(self.errors.unsaved());
        let mut fed = rows.fed;
        fed.extend(self.unsaved.clone());
        self.enter(rows.delta, ahead, &fed).await?;
        self.unsaved.clear();
        self.counters.extend(fed);
        let split = &mut self.splits[at];
        (split.offset, split.completed) = (rows.after, None);
        Ok(())
    }

    /// The next rows of a split as they will enter the table, kept until they have; and what was told of them before.
    async fn complete(&mut self, at: usize, until: u64) -> Result<(Completed, Ahead), FeedError> {
        let batch = self.raw_batch(at, until).await?;
        let (number, after) = (self.splits[at].number, batch.after);
        self.lend(at, after, until);
        let row_ids = |rows| self.sequencer.allocate_row_ids(rows);
        let delta = self.rows.complete(batch.rows, batch.weights, row_ids).map_err(failed)?;
        report_bad_rows(&self.errors, batch.bad_rows);
        let mut fed = BTreeMap::from([(feed_counter(number), after)]);
        if let Some(position) = batch.position {
            put_position(&mut fed, INPUT, number, position);
        }
        let rows = Completed { after, delta, fed };
        self.splits[at].completed = Some(rows.clone());
        Ok((rows, Ahead { announced: batch.announced, keys: batch.keys }))
    }

    /// The next rows of a split, read ahead or now.
    async fn raw_batch(&mut self, at: usize, until: u64) -> Result<RawBatch, FeedError> {
        if let Some(held) = self.held(at, until).await {
            return Ok(held);
        }
        let mut reader = match self.splits[at].reader.take() {
            Some(reader) => reader,
            None => self.open(at)?,
        };
        if let Some(on_error) = self.on_error() {
            reader.set_on_error(on_error);
        }
        let result = reader.read(until, ROWS).await;
        // Bad rows of a read that has failed are met again by the next.
        let (result, _) = RawBatch::of(result, reader.as_mut());
        let split = &mut self.splits[at];
        split.reader = Some(reader);
        let batch = result.map_err(|e| FeedError::Failed(e.into()))?;
        batch.ok_or_else(|| {
            let message = format!("split {} ended before offset {until}", split.number);
            FeedError::Failed(SqlError::internal(message))
        })
    }

    /// What was read ahead of a split, if all of it is content by now and may enter the table. Takes the reader back where
    /// there is nothing.
    async fn held(&mut self, at: usize, until: u64) -> Option<RawBatch> {
        let fails = self.on_error() == Some(OnError::Fail);
        let ahead = self.ahead.as_ref()?;
        let split = &mut self.splits[at];
        let within = split.offset..until;
        ahead.take_batch(split.number, &mut split.reader, &self.parts, within, || fails).await
    }

    /// Has a split read on beyond `after`: what is content first, and then what is about to be.
    fn lend(&mut self, at: usize, after: u64, until: u64) {
        let Some(ahead) = &self.ahead else { return };
        let split = &mut self.splits[at];
        let until = (after < until).then_some(until);
        ahead.lend(split.number, &mut split.reader, after, until);
    }

    fn open(&mut self, at: usize) -> Result<Box<dyn SplitReader>, FeedError> {
        let source = match &self.source {
            Some(source) => Arc::clone(source),
            None => {
                let source = create_source(&self.relation).map_err(FeedError::Failed)?;
                Arc::clone(self.source.insert(source))
            }
        };
        let split = &self.splits[at];
        let from = ReadFrom {
            split: split.number,
            offset: split.offset,
            position: committed_position(&self.counters, INPUT, split.number),
            parts: self.parts.clone(),
        };
        source.open(from, self.rows.read()).map_err(|e| FeedError::Failed(e.into()))
    }

    /// What a bad row does now; `None`: what it did when the source was opened.
    fn on_error(&self) -> Option<OnError> {
        let value = self.meta.option(RelationId(self.relation.id), "on_error");
        value.map(|value| OnError::named(&value))
    }

    /// Closes the source and all readers, those that are lent too.
    fn close(&mut self) {
        for split in &mut self.splits {
            split.reader = None;
            if let Some(ahead) = &self.ahead {
                ahead.discard(split.number);
            }
        }
        self.source = None;
    }

    async fn enter(
        &mut self,
        delta: DeltaChunk,
        ahead: Ahead,
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
        let Ahead { announced, keys } = ahead;
        let statement = DmlStatement { id, delta, kind, mark: None, entered, announced };
        match self.sequencer.feed(statement, keys, fed.clone()).await {
            Ok(concluded) => {
                self.in_flight.push_back(concluded);
                Ok(())
            }
            Err(DmlError::Conflict) => Err(FeedError::Ended),
            Err(e) => Err(FeedError::Failed(e.into())),
        }
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
