//! The sequencer of one table: statements enter one after the other, are checked against everything
//! before them, and are acknowledged when their epoch is committed (docs/design.md §4).
//!
//! It owns the only writer of the table's rows. A lookup through that writer sees committed rows, the
//! epochs being committed and the open one, so a check needs no overlay of its own. Statements look
//! their keys up side by side, before they take the turn ([`lookup`]); one at a time holds it, from
//! the check of what has been written since until its rows are in the open epoch. That last step is
//! synchronous, so a statement whose session goes away is in wholly or not at all. While an epoch is
//! being committed further statements go into the next, which may be on its way too ([`batch`]).
//!
//! A failed check answers only when what it was checked against is committed: nobody is told of a row
//! that later turns out never to have been.

mod ahead;
mod batch;
mod enter;
mod load;
mod lookup;
mod recent;
mod seal;
mod state;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use arrow::datatypes::SchemaRef;
use millrace_common::error::ErrorObject;
use millrace_common::{Epoch, Generation, JobId, TableId};
use millrace_rpc::catalog::{Relation, RowStorage};
use millrace_rpc::services::MetaService;
use millrace_rpc::version::JobVersion;
use millrace_storage::JobStore;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::changelog_cache::ChangelogCache;
use crate::error::ExecError;
use crate::input::generated::PROCTIME;
use crate::input::watermark::{SplitWatermark, WatermarkExpr};
use crate::layout::RowLayout;
use crate::memory::MemoryGovernor;
use crate::stats::WorkTime;
use ahead::LookupsAhead;
use batch::BatchSignals;
pub use batch::EARLY_SEAL_INLINES;
pub(super) use lookup::{FREE_LOOKUPS, KeyRows};
use recent::RecentWrites;
pub use seal::SealedEpoch;
pub(super) use state::{OnTime, Settled, StatementOutcome};
use state::{State, Statements};

/// Name of the counter that holds the next hidden row id.
const ROW_ID_COUNTER: &str = "next_row_id";

/// Row ids of one generation of a table's job: so many that it never comes to the next one's.
const ROW_IDS_OF_GENERATION: i64 = 1 << 40;

/// Counters that say how far a sink's changes are in the table begin with this; the sink's id follows.
pub const SINK_COUNTER: &str = "sink.";

/// What all sequencers of a worker share: held while epochs that are tied to each other end and while a transaction
/// enters its tables, so that no epoch ends with a part of one. An epoch that is not tied ends without it.
#[derive(Debug, Default)]
pub struct TransactionGroups {
    groups: Mutex<u64>,
}

pub struct Sequencer {
    pub(super) job: JobId,
    generation: Generation,
    ties: Arc<TransactionGroups>,
    store: Arc<JobStore>,
    table: TableId,
    /// The primary key as errors name it.
    primary_key_object: ErrorObject,
    /// A key the user declared, not hidden row ids.
    primary_key: bool,
    layout: RowLayout,
    times_of_arrival: Vec<usize>,
    /// With the time column's position.
    watermark: Option<(u32, WatermarkExpr)>,
    pub(super) meta: Arc<dyn MetaService>,
    governor: Arc<MemoryGovernor>,
    /// Where its committed changes are kept for a while.
    changelogs: Arc<ChangelogCache>,
    /// Bytes of statements an open epoch may hold before further ones wait.
    limit: usize,
    /// Bytes of change kept for the changelog cache.
    delta_limit: usize,
    /// Held by one statement at a time; fair.
    pub(super) turn: Arc<tokio::sync::Mutex<()>>,
    pub(super) state: Mutex<State>,
    /// Locked within `state`, or alone.
    recent: Arc<Mutex<RecentWrites>>,
    lookups_ahead: Arc<LookupsAhead>,
    batch: BatchSignals,
    /// Fired by `stop`.
    ended: CancellationToken,
    next_row_id: AtomicI64,
    /// Of its statements.
    pub work: Arc<WorkTime>,
}

/// What a worker's sequencers are given.
pub struct Common {
    pub meta: Arc<dyn MetaService>,
    pub governor: Arc<MemoryGovernor>,
    pub changelogs: Arc<ChangelogCache>,
    pub ties: Arc<TransactionGroups>,
    pub work: Arc<WorkTime>,
}

/// Bounds of a sequencer.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub statement_bytes: usize,
    pub delta_bytes: usize,
    /// Of change in memory, from which an epoch's upload begins while the epoch before is being logged.
    pub early_seal_bytes: usize,
}

impl Sequencer {
    pub fn new(
        relation: &Relation,
        store: &Arc<JobStore>,
        generation: Generation,
        version: &JobVersion,
        common: Common,
        limits: Limits,
    ) -> Result<Sequencer, ExecError> {
        let Common { meta, governor, changelogs, ties, work } = common;
        let layout = RowLayout::of_relation(relation)?;
        if layout.storage != RowStorage::Keyed {
            return Err(ExecError::internal("a table whose rows have no key"));
        }
        let writer = store.writer(TableId(relation.first_table_id))?;
        let next = version.counters.get(ROW_ID_COUNTER).copied().unwrap_or(1);
        let next = first_row_id(generation, next);
        Ok(Sequencer {
            job: millrace_common::RelationId(relation.id),
            generation: Generation(version.generation),
            ties,
            store: Arc::clone(store),
            table: TableId(relation.first_table_id),
            primary_key_object: relation.primary_key_object(),
            primary_key: relation.primary_key,
            layout,
            times_of_arrival: times_of_arrival(relation),
            watermark: relation
                .watermark
                .as_ref()
                .map(|w| w.column)
                .zip(WatermarkExpr::of(relation)?),
            meta,
            governor,
            changelogs,
            limit: limits.statement_bytes,
            delta_limit: limits.delta_bytes,
            turn: Arc::default(),
            state: Mutex::new(State {
                writer,
                open: Statements::default(),
                in_flight: VecDeque::new(),
                ahead: VecDeque::new(),
                committed: Epoch(version.epoch),
                stopped: false,
                watermark: SplitWatermark::load(&version.counters, 0, 0),
                marks: sink_marks(&version.counters),
                marked: false,
            }),
            recent: Arc::default(),
            lookups_ahead: Arc::new(LookupsAhead::of(relation)),
            batch: BatchSignals::new(limits.early_seal_bytes),
            ended: CancellationToken::new(),
            next_row_id: AtomicI64::new(next),
            work,
        })
    }

    pub fn schema(&self) -> &SchemaRef {
        &self.layout.schema
    }

    /// A column of the table as errors name it.
    pub fn error_object(&self, column: &str) -> ErrorObject {
        let column = Some(column.to_owned());
        ErrorObject { column, constraint: None, ..self.primary_key_object.clone() }
    }

    /// Position of the hidden row id that rows of a table without a key have.
    pub fn hidden_row_id(&self) -> Option<usize> {
        match self.layout.key.as_slice() {
            [at] if !self.primary_key => Some(*at),
            _ => None,
        }
    }

    /// `PROCTIME()` of rows that arrive now: microseconds since 1970.
    pub fn time_of_arrival(&self) -> i64 {
        i64::try_from(self.store.env().now_micros()).unwrap_or(i64::MAX)
    }

    /// Positions of the columns that are `PROCTIME()`.
    pub fn times_of_arrival(&self) -> &[usize] {
        &self.times_of_arrival
    }

    /// `n` row ids that no row has, nor one that is on its way: see `first_row_id`.
    pub fn allocate_row_ids(&self, n: u64) -> i64 {
        self.next_row_id.fetch_add(n as i64, Ordering::Relaxed)
    }

    fn next_row_id(&self) -> u64 {
        u64::try_from(self.next_row_id.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// Whether rows may be late: which ones are is decided in the order they come in.
    pub(super) fn has_watermark(&self) -> bool {
        self.watermark.is_some()
    }

    /// Whether rows have a key that the user declared: others are new by themselves.
    pub(super) fn has_primary_key(&self) -> bool {
        self.primary_key
    }

    /// Lets no epochs end that are tied to each other; for a transaction that enters several tables.
    pub(super) fn hold_seals(&self) -> parking_lot::MutexGuard<'_, u64> {
        self.ties.groups.lock()
    }

    pub fn is_stopped(&self) -> bool {
        self.state.lock().stopped
    }

    /// As a large statement does that enters, until the answer is dropped.
    #[cfg(test)]
    pub fn keep_busy(&self) -> impl Drop + '_ {
        self.state.lock()
    }

    /// Whether somebody, perhaps a large statement, keeps the table from being changed at this moment.
    pub fn is_busy(&self) -> bool {
        self.state.try_lock().is_none()
    }
}

/// The first row id of a generation. It gives none that an earlier one has given: those of rows that are committed are
/// below the counter that is committed with them, and others, whose rows may enter later or never, are of the earlier
/// generation's own. So a row id that has been given is new whenever its row enters, and whoever runs the table then.
fn first_row_id(generation: Generation, committed: u64) -> i64 {
    let own = i64::try_from(generation.0).ok();
    let own = own.and_then(|generation| generation.checked_mul(ROW_IDS_OF_GENERATION));
    i64::try_from(committed).unwrap_or(i64::MAX).max(own.unwrap_or(0))
}

fn times_of_arrival(relation: &Relation) -> Vec<usize> {
    let columns = relation.columns.iter().enumerate();
    let times = columns.filter(|(_, c)| c.generated_sql.as_deref() == Some(PROCTIME));
    times.map(|(at, _)| at).collect()
}

fn sink_marks(counters: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let marks = counters.iter().filter(|(name, _)| name.starts_with(SINK_COUNTER));
    marks.map(|(name, n)| (name.clone(), *n)).collect()
}

impl Drop for Sequencer {
    fn drop(&mut self) {
        self.stop(None);
    }
}
