//! How far a source's content may go next, and how fast it goes.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, RelationId};
use millrace_rpc::log::{SourceSplit, SplitOffset};
use millrace_rpc::services::SourceParts;
use millrace_rpc::source_poll::{Known, More, Polled};
use tokio::time::Instant;

use crate::job::Sealed;
use crate::state::MetaState;

/// Epochs fixed beyond the fastest reader's last sealed one: one being worked on, one ready.
const OUTSTANDING: usize = 2;
/// Work of the fastest reader in one epoch.
const EPOCH_WORK: Duration = Duration::from_millis(500);
/// Rows of the first epoch, before any speed is known.
pub const FIRST_EVENTS: u64 = 16_384;
/// One epoch's bounds.
pub const MIN_EVENTS: u64 = 1_024;
pub const MAX_EVENTS: u64 = 8 << 20;
/// An epoch is at most this many times the one before: one lucky measurement does not flood a reader.
const MAX_GROWTH: u64 = 4;

/// What the readers allow now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Demand {
    /// No job reads it.
    Nobody,
    /// Enough is outstanding.
    Enough,
    /// The speed of the fastest reader, in offsets a second; `None`: not measured yet.
    Next { speed: Option<f64> },
}

/// A bucket of offsets that fills with time.
pub struct Rate {
    pub per_second: Option<u64>,
    tokens: f64,
    filled: Instant,
}

impl Rate {
    pub fn new(per_second: Option<u64>, now: Instant) -> Rate {
        Rate { per_second, tokens: 0.0, filled: now }
    }

    /// How much may be taken now.
    pub fn allowance(&mut self, now: Instant) -> u64 {
        let Some(rate) = self.per_second else { return u64::MAX };
        let earned = (now - self.filled).as_secs_f64() * rate as f64;
        self.filled = now;
        self.tokens = (self.tokens + earned).min((rate as f64).max(1.0));
        self.tokens as u64
    }

    pub fn take(&mut self, amount: u64) {
        if self.per_second.is_some() {
            self.tokens -= amount as f64;
        }
    }
}

/// `readers`: committed epoch and last sealed cut of every running reader.
pub fn demand(state: &MetaState, id: RelationId, readers: &[(Epoch, Option<Sealed>)]) -> Demand {
    let Some(source) = state.sources.get(&id) else { return Demand::Nobody };
    let reached = readers.iter().map(|(epoch, sealed)| reached(*epoch, *sealed));
    let Some(fastest) = reached.max() else { return Demand::Nobody };
    let ahead =
        source.history.iter().rev().take_while(|(e, _)| *e > fastest).take(OUTSTANDING).count();
    if ahead >= OUTSTANDING {
        return Demand::Enough;
    }
    let total = |epoch| source.offsets_at(epoch).iter().map(|o| o.offset).sum::<u64>();
    let speeds = readers.iter().filter_map(|(_, sealed)| {
        let sealed = (*sealed)?;
        let events = total(sealed.to).saturating_sub(total(sealed.from));
        (events > 0).then(|| events as f64 / sealed.took.as_secs_f64().max(1e-3))
    });
    Demand::Next { speed: speeds.reduce(f64::max) }
}

/// How far a reader is: an epoch that is sealed counts before it is committed.
pub fn reached(committed: Epoch, sealed: Option<Sealed>) -> Epoch {
    sealed.map_or(committed, |sealed| sealed.to.max(committed))
}

pub fn next_amount(previous: u64, speed: f64) -> u64 {
    let wanted = (speed * EPOCH_WORK.as_secs_f64()) as u64;
    wanted
        .clamp(previous / MAX_GROWTH, previous.saturating_mul(MAX_GROWTH))
        .clamp(MIN_EVENTS, MAX_EVENTS)
}

/// What one record can fix.
#[derive(Debug, Default, PartialEq)]
pub struct Next {
    pub offsets: Vec<SplitOffset>,
    /// It is all there is now, and more comes with time.
    pub at_clock: bool,
    /// Offsets that all splits together go forward by.
    pub taken: u64,
}

/// Whether an advance is worth a commit of its own.
pub fn is_full(taken: u64, wanted: u64, more: Option<More>) -> bool {
    taken > 0 && (taken >= wanted || more == Some(More::Never))
}

/// What there is of the source once these splits are logged.
pub fn extended(parts: &SourceParts, splits: &[SourceSplit]) -> SourceParts {
    let mut parts = parts.clone();
    if !splits.is_empty() {
        Arc::make_mut(&mut parts.splits).extend(splits.iter().cloned());
    }
    parts
}

/// Every split moves by its share of `amount`, as far as it has rows; what one cannot use goes to the
/// others.
pub fn next_offsets(polled: &Polled, known: &Known, amount: u64) -> Next {
    let mut left: Vec<(u32, u64, u64)> = polled
        .available
        .iter()
        .map(|(split, end)| {
            let from = known.offset(*split);
            (*split, from, end.saturating_sub(from))
        })
        .collect();
    left.sort_by_key(|(_, _, available)| *available);
    let mut next = Next::default();
    let mut amount = amount;
    let mut short = false;
    let count = left.len();
    for (i, (split, from, available)) in left.into_iter().enumerate() {
        let share = amount.div_ceil((count - i) as u64);
        short |= available < share;
        let step = available.min(share);
        if step > 0 {
            amount -= step;
            next.taken += step;
            next.offsets.push(SplitOffset { split, offset: from + step });
        }
    }
    next.offsets.sort_by_key(|o| o.split);
    next.at_clock = short && polled.more == More::WithTime;
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    fn polled(available: u64, more: More) -> Polled {
        Polled { available: vec![(0, available), (1, available)], more, ..Polled::default() }
    }

    fn known(at: u64) -> Known {
        Known { offsets: vec![(0, at), (1, at)], ..Known::default() }
    }

    fn offsets(of: u64) -> Vec<SplitOffset> {
        [0, 1].map(|split| SplitOffset { split, offset: of }).to_vec()
    }

    #[test]
    fn splits_share_an_epoch_and_what_one_lacks_goes_to_the_others() {
        let next =
            |available, from| next_offsets(&polled(available, More::WithTime), &known(from), 200);
        assert_eq!(next(50, 0), Next { offsets: offsets(50), at_clock: true, taken: 100 });
        assert_eq!(next(50, 50), Next { at_clock: true, ..Next::default() });
        assert_eq!(next(500, 0), Next { offsets: offsets(100), at_clock: false, taken: 200 });
        let uneven = Polled { available: vec![(0, 10), (1, 1_000)], ..Polled::default() };
        let offsets = next_offsets(&uneven, &known(0), 200).offsets;
        let of = |split, offset| SplitOffset { split, offset };
        assert_eq!(offsets, [of(0, 10), of(1, 190)]);
        // A split that does not begin at 0 goes forward from where it begins.
        let split = SourceSplit { split: 3, name: String::new(), start: 70 };
        let parts = extended(&Default::default(), &[split]);
        let known = Known { parts, ..Known::default() };
        let one = Polled { available: vec![(3, 90)], ..Polled::default() };
        assert_eq!(next_offsets(&one, &known, 5).offsets, [of(3, 75)]);
    }

    #[test]
    fn an_epoch_is_full_where_waiting_would_not_add_to_it() {
        let after = Some(More::After(Duration::from_secs(1)));
        assert!(is_full(100, 100, after));
        assert!(!is_full(99, 100, after));
        assert!(!is_full(99, 100, Some(More::WithTime)));
        assert!(is_full(99, 100, Some(More::Never)), "the end");
        assert!(!is_full(0, 100, Some(More::Never)), "only files and marks");
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
        let parts = Default::default();
        state
            .sources
            .insert(id, crate::state::SourceRecord { history, timeline, parts, marks: Vec::new() });
        let next = |offset| state.sources[&id].next_end(0, offset);
        assert_eq!(
            [0, 99, 100, 299, 300].map(next),
            [Some(100), Some(100), Some(200), Some(300), None]
        );
        let sealed = |from, to| Some(Sealed { from: Epoch(from), to: Epoch(to), took: EPOCH_WORK });
        assert_eq!(demand(&state, id, &[]), Demand::Nobody);
        assert_eq!(demand(&state, id, &[(Epoch(10), None)]), Demand::Enough);
        assert_eq!(demand(&state, id, &[(Epoch(20), None)]), Demand::Next { speed: None });
        // The slow reader does not matter, and a sealed epoch counts before it is committed.
        let readers = [(Epoch(0), None), (Epoch(10), sealed(10, 20))];
        assert_eq!(demand(&state, id, &readers), Demand::Next { speed: Some(400.0) });
    }
}
