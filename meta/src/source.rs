//! Fixes how far a source's content goes (docs/design.md §4, roots).
//!
//! Offsets become content only by a record in the log, so every reader sees the same rows at the same
//! epoch. Their pace follows the fastest reader: at most [`OUTSTANDING`] epochs lie ahead of what it has
//! sealed, and each holds about half a second of its work. A source with a rate of its own is followed by
//! the wall clock. Slower readers fall behind without holding anybody back.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, RelationId};
use millrace_connector::Source;
use millrace_rpc::log::{Entry, SourceAdvance, SplitOffset};
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::warn;

use crate::job::Sealed;
use crate::shared::Shared;
use crate::state::MetaState;
use crate::status::JobState;

/// Epochs fixed beyond the fastest reader's last sealed one: one being worked on, one ready.
const OUTSTANDING: usize = 2;
/// Work of the fastest reader in one epoch.
const EPOCH_WORK: Duration = Duration::from_millis(500);
/// Events of the first epoch, before any speed is known.
const FIRST_EVENTS: u64 = 16_384;
/// One epoch's bounds.
const MIN_EVENTS: u64 = 1_024;
pub const MAX_EVENTS: u64 = 8 << 20;
/// An epoch is at most this many times the one before: one lucky measurement does not flood a reader.
const MAX_GROWTH: u64 = 4;
/// Pause after a failure to open the source.
const RETRY: Duration = Duration::from_secs(5);

pub struct Coordinator {
    shared: Arc<Shared>,
    id: RelationId,
    notify: Arc<Notify>,
}

/// What the readers allow now.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Demand {
    /// Nobody reads, or enough is outstanding.
    None,
    /// The speed of the fastest reader, in events a second; `None`: not measured yet.
    Next { speed: Option<f64> },
}

impl Coordinator {
    pub fn new(shared: Arc<Shared>, id: RelationId, notify: Arc<Notify>) -> Coordinator {
        Coordinator { shared, id, notify }
    }

    /// Until cancelled.
    pub async fn run(self) {
        let Some((source, started_ms)) = self.open().await else { return };
        let most =
            self.shared.source_epoch_events.get().copied().unwrap_or(MAX_EVENTS).max(MIN_EVENTS);
        let mut amount = FIRST_EVENTS.min(most);
        let mut last_advance: Option<Instant> = None;
        loop {
            let Demand::Next { speed } = self.demand() else {
                self.notify.notified().await;
                continue;
            };
            if let Some(speed) = speed {
                amount = next_amount(amount, speed).min(most);
            }
            let now_ms = self.shared.env.now_ms();
            match self.next_offsets(source.as_ref(), started_ms, now_ms, amount) {
                Next::Offsets { offsets, at_clock } => {
                    // What follows the clock is fixed once in a barrier interval.
                    let interval = self.shared.settings().barrier_interval;
                    let since = last_advance.map_or(Duration::MAX, |at| at.elapsed());
                    if at_clock && since < interval {
                        tokio::time::sleep(interval - since).await;
                        continue;
                    }
                    last_advance = Some(Instant::now());
                    if !self.advance(offsets).await {
                        return;
                    }
                }
                Next::Later => tokio::time::sleep(self.shared.settings().barrier_interval).await,
                Next::Finished => self.notify.notified().await,
            }
        }
    }

    async fn open(&self) -> Option<(Arc<dyn Source>, u64)> {
        loop {
            let relation = self.shared.state.read().relations.get(&self.id).cloned()?;
            match millrace_connector::create_source(&relation) {
                Ok(source) => return Some((source, Epoch(relation.created_epoch).millis())),
                Err(error) => {
                    warn!(source = %self.id, %error, "source cannot be opened");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    fn demand(&self) -> Demand {
        let state = self.shared.state.read();
        let readers: Vec<(Epoch, Option<Sealed>)> = state
            .readers(self.id)
            .into_iter()
            .filter_map(|id| {
                let handle = self.shared.job(id)?;
                let job = state.jobs.get(&id)?;
                let ready = job.version.backfill.is_none() && handle.state() == JobState::Running;
                ready.then(|| (Epoch(job.version.epoch), handle.sealed()))
            })
            .collect();
        demand(&state, self.id, &readers)
    }

    /// `false`: the source is gone or the log is closed.
    async fn advance(&self, offsets: Vec<SplitOffset>) -> bool {
        let entry = Entry::SourceAdvance(SourceAdvance { source: self.id.0, offsets });
        match self.shared.log() {
            Ok(log) => log.apply(entry).await.is_ok(),
            Err(_) => false,
        }
    }

    fn next_offsets(&self, source: &dyn Source, started_ms: u64, now_ms: u64, amount: u64) -> Next {
        let newest = {
            let state = self.shared.state.read();
            state.sources.get(&self.id).map(|s| s.newest().to_vec()).unwrap_or_default()
        };
        next_offsets(source, &newest, started_ms, now_ms, amount)
    }
}

/// `readers`: committed epoch and last sealed cut of every running reader.
fn demand(state: &MetaState, id: RelationId, readers: &[(Epoch, Option<Sealed>)]) -> Demand {
    let Some(source) = state.sources.get(&id) else { return Demand::None };
    let reached =
        |(epoch, sealed): &(Epoch, Option<Sealed>)| sealed.map_or(*epoch, |s| s.to.max(*epoch));
    let Some(fastest) = readers.iter().map(reached).max() else { return Demand::None };
    let ahead =
        source.history.iter().rev().take_while(|(e, _)| *e > fastest).take(OUTSTANDING).count();
    if ahead >= OUTSTANDING {
        return Demand::None;
    }
    let total = |epoch| source.offsets_at(epoch).iter().map(|o| o.offset).sum::<u64>();
    let speeds = readers.iter().filter_map(|(_, sealed)| {
        let sealed = (*sealed)?;
        let events = total(sealed.to).saturating_sub(total(sealed.from));
        (events > 0).then(|| events as f64 / sealed.took.as_secs_f64().max(1e-3))
    });
    Demand::Next { speed: speeds.reduce(f64::max) }
}

fn next_amount(previous: u64, speed: f64) -> u64 {
    let wanted = (speed * EPOCH_WORK.as_secs_f64()) as u64;
    wanted
        .clamp(previous / MAX_GROWTH, previous.saturating_mul(MAX_GROWTH))
        .clamp(MIN_EVENTS, MAX_EVENTS)
}

#[derive(Debug, PartialEq)]
enum Next {
    /// `at_clock`: all there is now; more comes with time.
    Offsets { offsets: Vec<SplitOffset>, at_clock: bool },
    /// Nothing now.
    Later,
    /// Nothing ever.
    Finished,
}

/// Every split moves by its share of `amount`, as far as it has rows.
fn next_offsets(
    source: &dyn Source,
    newest: &[SplitOffset],
    started_ms: u64,
    now_ms: u64,
    amount: u64,
) -> Next {
    let splits = source.splits();
    let share = (amount / splits.len().max(1) as u64).max(1);
    let mut offsets = Vec::new();
    let mut at_clock = false;
    let mut finished = true;
    for split in splits {
        let from = newest.iter().find(|o| o.split == split).map_or(0, |o| o.offset);
        let available = source.available(split, started_ms, now_ms);
        // Far in the future: whether this split will ever have more than it has now.
        let ever = source.available(split, started_ms, now_ms.saturating_mul(2));
        let to = available.min(from.saturating_add(share)).max(from);
        at_clock |= available < from.saturating_add(share) && ever > available;
        finished &= ever <= to;
        if to > from {
            offsets.push(SplitOffset { split, offset: to });
        }
    }
    match (offsets.is_empty(), finished) {
        (false, _) => Next::Offsets { offsets, at_clock },
        (true, false) => Next::Later,
        (true, true) => Next::Finished,
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::{Schema, SchemaRef};
    use millrace_connector::{ConnectorError, SplitReader};

    use super::*;

    /// Two splits of `total` events each, `per_second` of them a second.
    struct Clocked {
        total: u64,
        per_second: u64,
    }

    impl Source for Clocked {
        fn schema(&self) -> SchemaRef {
            Arc::new(Schema::empty())
        }

        fn splits(&self) -> Vec<u32> {
            vec![0, 1]
        }

        fn available(&self, _: u32, started_ms: u64, now_ms: u64) -> u64 {
            ((now_ms - started_ms) * self.per_second / 1_000).min(self.total)
        }

        fn reader(
            &self,
            _: u32,
            _: u64,
            _: &[usize],
        ) -> Result<Box<dyn SplitReader>, ConnectorError> {
            unreachable!("a coordinator reads no rows")
        }
    }

    fn offsets(of: u64) -> Vec<SplitOffset> {
        [0, 1].map(|split| SplitOffset { split, offset: of }).to_vec()
    }

    #[test]
    fn a_source_with_a_rate_is_followed_by_the_clock_to_its_end() {
        let source = Clocked { total: 1_000, per_second: 100 };
        let next = |from, now_ms| next_offsets(&source, &offsets(from), 0, now_ms, 200);
        assert_eq!(next(0, 500), Next::Offsets { offsets: offsets(50), at_clock: true });
        assert_eq!(next(50, 500), Next::Later);
        assert_eq!(next(0, 5_000), Next::Offsets { offsets: offsets(100), at_clock: false });
        assert_eq!(next(950, 60_000), Next::Offsets { offsets: offsets(1_000), at_clock: false });
        assert_eq!(next(1_000, 60_000), Next::Finished);
    }

    #[test]
    fn an_epoch_grows_with_the_readers_speed_but_not_at_once() {
        assert_eq!(next_amount(1_000_000, 1_000_000.0), 500_000);
        assert_eq!(next_amount(16_384, 1e9), 16_384 * MAX_GROWTH);
        assert_eq!(next_amount(MAX_EVENTS, 1e12), MAX_EVENTS);
        assert_eq!(next_amount(2_048, 0.5), MIN_EVENTS);
    }

    #[test]
    fn at_most_two_epochs_lie_ahead_of_the_fastest_reader() {
        let id = RelationId(1);
        let mut state = MetaState::default();
        let history = (1..=3).map(|e| (Epoch(e * 10), offsets(e * 100))).collect();
        let timeline = crate::timeline::Timeline::since(Epoch(1));
        state.sources.insert(id, crate::state::SourceRecord { history, timeline });
        let sealed = |from, to| Some(Sealed { from: Epoch(from), to: Epoch(to), took: EPOCH_WORK });
        assert_eq!(demand(&state, id, &[]), Demand::None);
        assert_eq!(demand(&state, id, &[(Epoch(10), None)]), Demand::None);
        assert_eq!(demand(&state, id, &[(Epoch(20), None)]), Demand::Next { speed: None });
        // The slow reader does not matter, and a sealed epoch counts before it is committed.
        let readers = [(Epoch(0), None), (Epoch(10), sealed(10, 20))];
        assert_eq!(demand(&state, id, &readers), Demand::Next { speed: Some(400.0) });
    }
}
