//! Lookups for rows that the table's connector has read and that have not entered yet (docs/design.md §8).
//!
//! Their answers are dropped: what was read stays in the block cache, where the statement's own lookup finds it, or joins
//! what is still being read. So what a statement is checked against is the same. Nothing is looked up ahead until a lookup
//! has asked the store, nor when many in a row have asked it nothing.
//!
//! What becomes of them is counted as that of keys that are announced to an operator, which the connector is shown as.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arrow::array::Array;
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::DeltaChunk;
use millrace_graph::lookahead::Place;
use millrace_rpc::catalog::Relation;
use millrace_storage::cache::Priority;
use millrace_storage::{Lookup, Reading};

use super::Sequencer;
use crate::error::ExecError;
use crate::lookahead::keys_ahead::{AheadOutcome, KeysAhead, LookupAhead};
use crate::lookahead::slack::{SideSlack, Spot, SpotSlack};
use crate::stats::{Counter, LookaheadMeasures, LookaheadMetrics, LookaheadStats, OperatorStats};

/// Lookups ahead in a row that asked the store nothing, after which there are none.
const WARM: u64 = 64;
/// One that takes longer is given up, so that it holds no version.
const GIVEN_UP: Duration = Duration::from_secs(2);
/// What a table's connector is called among operators.
const CONNECTOR: &str = "Connector";

/// See the module.
#[derive(Debug, Default)]
pub(super) struct LookupsAhead {
    /// So many more, if all of them find everything here.
    left: AtomicU64,
    /// Lookups of statements that asked the store.
    cold: AtomicU64,
    /// The table has a connector whose rows are looked up.
    is_connected: bool,
    /// They are read ahead.
    is_read_ahead: AtomicBool,
    /// Of the connector: rows that have entered, those that took effect, and the lookups of their keys.
    rows_in: Counter,
    rows_out: Counter,
    counted: Arc<LookaheadMetrics>,
}

/// What a lookup does beyond memory.
#[derive(Default)]
pub(super) struct LookupCounts {
    requests: Arc<AtomicU64>,
    bytes: Arc<AtomicU64>,
}

impl LookupCounts {
    pub fn of(&self, lookup: Lookup) -> Lookup {
        lookup.counted(&self.requests).counted_in_bytes(&self.bytes)
    }

    /// To the store.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    fn has_read(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > 0
    }
}

impl LookupsAhead {
    pub fn of(relation: &Relation) -> LookupsAhead {
        let is_connected = relation.has_connector() && relation.primary_key;
        LookupsAhead { is_connected, ..LookupsAhead::default() }
    }

    /// A statement's lookup has made so many requests to the store.
    pub fn note_lookup(&self, requests: u64) {
        if requests > 0 {
            self.cold.fetch_add(1, Ordering::Relaxed);
            self.left.store(WARM, Ordering::Relaxed);
        }
    }

    /// It was of so many keys of rows of the connector, whose lookup ahead was so far when it began.
    pub fn note_connector_lookup(
        &self,
        ahead: LookupAhead,
        keys: u64,
        is_pending: bool,
        counts: &LookupCounts,
    ) {
        // What is being read ahead is not read again, but waited for.
        let has_waited = is_pending && (counts.has_read() || ahead == LookupAhead::UnderWay);
        ahead.count(keys, has_waited, &self.counted);
        self.counted.demand_requests.fetch_add(counts.requests(), Ordering::Relaxed);
    }

    /// Rows of the connector have entered, of which so many took effect.
    pub fn note_rows(&self, entered: u64, affected: u64) {
        self.rows_in.add(entered);
        self.rows_out.add(affected);
    }

    /// A lookup ahead has made so many. If a statement's is noted meanwhile it may be lost; the next one is not.
    fn note_ahead(&self, requests: u64) {
        let left = match requests {
            0 => self.left.load(Ordering::Relaxed).saturating_sub(1),
            _ => WARM,
        };
        self.left.store(left, Ordering::Relaxed);
        self.counted.ahead_requests.fetch_add(requests, Ordering::Relaxed);
    }

    fn are_wanted(&self) -> bool {
        self.left.load(Ordering::Relaxed) > 0
    }

    fn stats(&self) -> OperatorStats {
        let is_read_ahead = self.is_read_ahead.load(Ordering::Relaxed);
        let spot = Spot { is_own: true, place: Place::Entry };
        let place = SpotSlack { spot, epochs: 0, quantiles: [None; 3] };
        let rows = SideSlack { spots: vec![place], ..SideSlack::default() };
        let active = usize::from(is_read_ahead && self.are_wanted());
        OperatorStats {
            name: CONNECTOR.to_owned(),
            rows_in: self.rows_in.get(),
            rows_out: self.rows_out.get(),
            lookahead: LookaheadStats { active, ..self.counted.read() },
            measures: LookaheadMeasures {
                sides: is_read_ahead.then_some(rows).into_iter().collect(),
                ..self.counted.measures()
            },
            ..OperatorStats::default()
        }
    }
}

impl Sequencer {
    /// Whether it is worth while to look up keys ahead of their rows.
    pub fn looks_up_ahead(&self) -> bool {
        self.primary_key && self.lookups_ahead.are_wanted()
    }

    /// The connector's rows are read ahead.
    pub fn note_read_ahead(&self) {
        self.lookups_ahead.is_read_ahead.store(true, Ordering::Relaxed);
    }

    /// The table's connector as an operator. `None`: it has none, or one whose rows need no lookup.
    pub fn connector_stats(&self) -> Option<OperatorStats> {
        self.lookups_ahead.is_connected.then(|| self.lookups_ahead.stats())
    }

    /// Looks up what is at the keys of rows that have not entered: the read that this takes, for which nobody waits. Tells
    /// `ahead` of it. `None`: everything is in memory. Fails if the rows do not have the table's columns.
    pub fn look_up_ahead(
        &self,
        rows: DeltaChunk,
        ahead: KeysAhead,
    ) -> Result<Option<BoxFuture<'static, ()>>, ExecError> {
        let keys = self.keyed(rows)?.distinct()?;
        let (asked, counts) = (keys.len() as u64, LookupCounts::default());
        let lookup = {
            let state = self.state.lock();
            if state.stopped {
                return Ok(None);
            }
            state.writer.multi_get(keys)
        };
        ahead.begin(asked, &self.lookups_ahead.counted);
        let Lookup::Pending(reading) = counts.of(lookup.of_class(Priority::Prefetch)) else {
            self.lookups_ahead.note_ahead(0);
            ahead.end(AheadOutcome::Resident);
            return Ok(None);
        };
        let lookups = Arc::clone(&self.lookups_ahead);
        let read = tokio::time::timeout(GIVEN_UP, present(reading)).map(move |answer| {
            lookups.note_ahead(counts.requests());
            ahead.end(match answer.ok().flatten() {
                Some(_) if !counts.has_read() => AheadOutcome::Resident,
                Some(present) => AheadOutcome::Read { absent: asked.saturating_sub(present) },
                None => AheadOutcome::GivenUp,
            });
        });
        Ok(Some(read.boxed()))
    }

    /// Lookups of statements that asked the store.
    #[cfg(test)]
    pub fn cold_lookups(&self) -> u64 {
        self.lookups_ahead.cold.load(Ordering::Relaxed)
    }
}

/// Reads an answer part by part, so that never all of it is held: for how many keys there is a row. What fails, which is
/// `None`, is met again by who waits for it.
async fn present(mut reading: Reading) -> Option<u64> {
    let mut rows = 0;
    loop {
        let part = reading.next().await.ok()?;
        rows += part.found.input.values().len() as u64;
        if part.is_last {
            return Some(rows);
        }
    }
}
