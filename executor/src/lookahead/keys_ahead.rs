//! Keys that a table looks up before the rows of its connector enter: what becomes of them, for the table's counters.
//!
//! Those of one read of a split are looked up together and enter together, so they are counted together, as what the
//! slowest of them was.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::stats::LookaheadMetrics;

/// The keys of some rows, which the rows bring along until they enter, and the lookup ahead of them until it has ended.
/// Nothing, as long as there is no such lookup.
#[derive(Clone, Debug, Default)]
pub struct KeysAhead(Arc<OnceLock<Keys>>);

#[derive(Debug)]
struct Keys {
    count: u64,
    counted: Arc<LookaheadMetrics>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    lookup: LookupAhead,
    /// The rows are being looked up themselves, or have been.
    have_come: bool,
}

/// How far a lookup ahead is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupAhead {
    /// There is none that has anything to do with what is in memory.
    Nothing,
    UnderWay,
    /// It has brought into memory what was not there.
    Done,
}

/// How a lookup ahead has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AheadOutcome {
    /// All was in memory.
    Resident,
    /// Some was not; for so many keys there is nothing.
    Read { absent: u64 },
    /// It has failed, or took too long.
    GivenUp,
}

impl KeysAhead {
    /// A lookup of so many keys begins. Once.
    pub fn begin(&self, count: u64, counted: &Arc<LookaheadMetrics>) {
        counted.hinted.add(count);
        let state = State { lookup: LookupAhead::UnderWay, have_come: false };
        let (counted, state) = (Arc::clone(counted), Mutex::new(state));
        // Only who reads the split ahead begins it.
        let _ = self.0.set(Keys { count, counted, state });
    }

    /// It has ended.
    pub fn end(&self, outcome: AheadOutcome) {
        let Some(keys) = self.0.get() else { return };
        let (count, counted) = (keys.count, &keys.counted);
        let lookup = match outcome {
            AheadOutcome::Resident => {
                counted.resident.add(count);
                LookupAhead::Nothing
            }
            AheadOutcome::Read { absent } => {
                counted.prefetched.add(count);
                counted.absent.add(absent);
                LookupAhead::Done
            }
            AheadOutcome::GivenUp => {
                counted.dropped.add(count);
                LookupAhead::Nothing
            }
        };
        keys.state.lock().lookup = lookup;
    }

    /// The rows are about to be looked up themselves: how far the lookup ahead is, for the first time.
    pub fn come(&self) -> LookupAhead {
        let Some(keys) = self.0.get() else { return LookupAhead::Nothing };
        let mut state = keys.state.lock();
        match std::mem::replace(&mut state.have_come, true) {
            true => LookupAhead::Nothing,
            false => state.lookup,
        }
    }
}

/// What was read ahead, and no row has come.
impl Drop for Keys {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if !state.have_come && state.lookup == LookupAhead::Done {
            self.counted.unused.add(self.count);
        }
    }
}

impl LookupAhead {
    /// Rows with so many keys came when it was so far, and have been looked up; whether they had to wait.
    pub fn count(self, keys: u64, has_waited: bool, counted: &LookaheadMetrics) {
        match (self, has_waited) {
            (LookupAhead::Nothing, _) => {}
            (_, false) => counted.in_time.add(keys),
            (LookupAhead::UnderWay, true) => counted.late.add(keys),
            // It has left memory again.
            (LookupAhead::Done, true) => counted.unused.add(keys),
        }
        if has_waited {
            counted.missed.add(keys);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::LookaheadStats;

    const READ: AheadOutcome = AheadOutcome::Read { absent: 2 };

    /// What is counted of 30 keys that are looked up ahead, and whose rows come then, if they do: before the lookup has
    /// ended or after it, and with or without a wait.
    fn told(outcome: AheadOutcome, rows: Option<(bool, bool)>) -> LookaheadStats {
        let counted = Arc::new(LookaheadMetrics::default());
        let keys = KeysAhead::default();
        keys.begin(30, &counted);
        let of_rows = keys.clone();
        let early = rows.filter(|(is_early, _)| *is_early).map(|_| of_rows.come());
        keys.end(outcome);
        drop(keys);
        if let Some((_, has_waited)) = rows {
            early.unwrap_or_else(|| of_rows.come()).count(30, has_waited, &counted);
            assert_eq!(of_rows.come(), LookupAhead::Nothing, "they come once");
        }
        drop(of_rows);
        counted.read()
    }

    #[test]
    fn keys_are_counted_by_how_their_rows_found_them() {
        let read = LookaheadStats { hinted: 30, prefetched: 30, absent: 2, ..Default::default() };
        let waited = LookaheadStats { missed: 30, ..read };
        let (early, after) = (true, false);
        assert_eq!(
            told(READ, Some((after, false))),
            LookaheadStats { in_time: 30, ..read },
            "it was there"
        );
        assert_eq!(
            told(READ, Some((early, true))),
            LookaheadStats { late: 30, ..waited },
            "it was under way"
        );
        assert_eq!(
            told(READ, Some((after, true))),
            LookaheadStats { unused: 30, ..waited },
            "it was no longer there"
        );
        assert_eq!(told(READ, None), LookaheadStats { unused: 30, ..read }, "no row has come");
    }

    #[test]
    fn keys_that_were_not_read_ahead_are_neither_used_nor_in_vain() {
        let hinted = LookaheadStats { hinted: 30, ..Default::default() };
        let resident = LookaheadStats { resident: 30, ..hinted };
        let dropped = LookaheadStats { dropped: 30, ..hinted };
        assert_eq!(told(AheadOutcome::Resident, None), resident);
        assert_eq!(told(AheadOutcome::Resident, Some((false, false))), resident);
        assert_eq!(told(AheadOutcome::GivenUp, None), dropped);
        let waited = LookaheadStats { missed: 30, ..dropped };
        assert_eq!(told(AheadOutcome::GivenUp, Some((false, true))), waited);
        // Of rows without a lookup ahead.
        let counted = LookaheadMetrics::default();
        KeysAhead::default().come().count(30, true, &counted);
        assert_eq!(counted.read(), LookaheadStats { missed: 30, ..Default::default() });
    }
}
