//! Which compute processes the object store does not answer, while it answers another one and the leader: their jobs can
//! do better elsewhere (docs/design.md §10).
//!
//! A process learns some seconds late that the store answers again, and sooner or later than another one. So nobody is
//! judged by one look: what is said counts if it is said at every look for longer than that, and the store has answered the
//! leader at each. Where one waits alone, and the store has answered the leader ever since that began, there was no outage
//! for all: that one is fenced sooner.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::members::RECENT;
use crate::read::prove_lead;
use crate::shared::Shared;

/// One that has waited for longer, while the store answers another one, is fenced.
const CUT_OFF: Duration = Duration::from_secs(12);
/// For how long it is to be said: longer than it may take a process to notice that an outage for all is over.
const LASTS: Duration = Duration::from_secs(8);
/// One that has waited for longer may be cut off: it is looked at from then on.
const DOUBTED: Duration = CUT_OFF.saturating_sub(LASTS);
/// One that has waited for less is answered.
const ANSWERED: Duration = Duration::from_secs(3);

/// One that has waited for longer is fenced where it waits alone. With beats and looks that is about as soon as for one
/// that is silent, so its jobs go on elsewhere as soon.
const ALONE_CUT_OFF: Duration = Duration::from_secs(5);
/// For how long that is to be said. A process that is not answered asks the store each half second, whatever becomes of
/// what it has asked before, and beats within another second.
const ALONE_LASTS: Duration = Duration::from_secs(3);
/// One that has waited for longer is in question; another one is not fenced beside it. Where a process is answered, it
/// does not wait for so long: it asks the store when it has had no answer for 1 to 1.5 s.
const WAITS: Duration = Duration::from_secs(2);
/// Of one that says when it comes into question that it has waited for longer, it is not known how that began.
const BEGINS: Duration = Duration::from_millis(4_500);

/// Looks that are farther apart say nothing of the time between them.
const LATE: Duration = Duration::from_secs(3);
/// How long the store may take to answer the leader.
const STORE_ANSWER: Duration = Duration::from_secs(1);

/// For how long the store has not answered each process, as it says.
type Said = [(u64, Duration)];

/// What was said at the looks until now.
#[derive(Debug, Default)]
pub struct StoreWaits {
    /// When the last one was.
    looked: Option<Instant>,
    /// Whether each process is answered, and since when it has said so at every look.
    since: BTreeMap<u64, (bool, Instant)>,
    /// The processes that wait beside others that are answered, and did so from the beginning.
    alone: BTreeMap<u64, Alone>,
    /// When some waited last and the store did not answer the leader, or no other process.
    outage: Option<Instant>,
}

/// How a process waits.
#[derive(Clone, Copy, Debug)]
struct Alone {
    /// It has said so at every look since then.
    since: Instant,
    /// For how long it had waited at the last one.
    wait: Duration,
}

impl StoreWaits {
    /// Looks once more. Returns the processes that are to be fenced. The store is asked only where some process waits.
    pub async fn look(&mut self, shared: &Shared) -> Vec<u64> {
        let said = || {
            let state = shared.state.read();
            shared.members.store_waits(&state.processes, shared.env.now())
        };
        let is_answered = is_in_question(&said()) && answers_leader(shared).await;
        self.note(&said(), is_answered, shared.env.now())
    }

    /// `is_answered`: whether the store answers this process.
    fn note(&mut self, said: &Said, is_answered: bool, now: Instant) -> Vec<u64> {
        let is_late = |looked| now.saturating_duration_since(looked) > LATE;
        if self.looked.is_none_or(is_late) {
            *self = StoreWaits::default();
        }
        self.looked = Some(now);
        if !is_answered {
            (self.since, self.alone) = Default::default();
            if said.iter().any(|(_, wait)| *wait > WAITS) {
                self.outage = Some(now);
            }
            return Vec::new();
        }
        let mut cut_off = self.note_each(said, now);
        cut_off.extend(self.note_alone(said, now));
        cut_off.sort_unstable();
        cut_off.dedup();
        cut_off
    }

    /// Returns those that have waited for long enough while another one was answered.
    fn note_each(&mut self, said: &Said, now: Instant) -> Vec<u64> {
        let before = std::mem::take(&mut self.since);
        for (id, wait) in said {
            if let Some(well) = is_well(*wait) {
                let same = before.get(id).filter(|(was_well, _)| *was_well == well);
                self.since.insert(*id, (well, same.map_or(now, |(_, since)| *since)));
            }
        }
        let lasts = |id: &u64, as_well: bool| {
            let known = self.since.get(id).filter(|(well, _)| *well == as_well);
            known.is_some_and(|(_, since)| now.saturating_duration_since(*since) >= LASTS)
        };
        if !said.iter().any(|(id, _)| lasts(id, true)) {
            return Vec::new();
        }
        let cut_off = said.iter().filter(|(id, wait)| *wait > CUT_OFF && lasts(id, false));
        cut_off.map(|(id, _)| *id).collect()
    }

    /// Returns the one that has waited for long enough where no other one does.
    fn note_alone(&mut self, said: &Said, now: Instant) -> Option<u64> {
        let before = std::mem::take(&mut self.alone);
        let mut cut_off = None;
        for (id, wait) in said.iter().copied().filter(|(_, wait)| *wait > WAITS) {
            let Some(longest) = said.iter().filter(|(o, _)| *o != id).map(|(_, w)| *w).max() else {
                continue;
            };
            // A shorter wait is another one: the store has answered meanwhile.
            let same = before.get(&id).filter(|alone| alone.wait <= wait);
            let since = match same {
                Some(alone) => alone.since,
                None if wait <= BEGINS && !self.was_out(wait, now) => now,
                None => continue,
            };
            if longest >= ANSWERED {
                continue;
            }
            self.alone.insert(id, Alone { since, wait });
            let lasts = now.saturating_duration_since(since) >= ALONE_LASTS;
            if wait > ALONE_CUT_OFF && lasts && longest <= WAITS {
                cut_off = Some(id);
            }
        }
        cut_off
    }

    /// Whether there was an outage at a look since one began to wait that says that it has waited for so long.
    fn was_out(&self, wait: Duration, now: Instant) -> bool {
        self.outage.is_some_and(|at| now.saturating_duration_since(at) <= wait + RECENT)
    }
}

/// Whether the store answers the leader now, and a fence would not wait for it, and be late.
async fn answers_leader(shared: &Shared) -> bool {
    let Ok(log) = shared.log() else { return false };
    // A proof may be older than what the processes say.
    let asked = tokio::time::timeout(STORE_ANSWER, log.store_answers());
    let (leads, answers) = tokio::join!(prove_lead(shared, STORE_ANSWER), asked);
    leads.is_ok() && matches!(answers, Ok(true))
}

/// Whether one that has waited for so long is answered; `None`: neither can be said.
fn is_well(wait: Duration) -> Option<bool> {
    match wait {
        wait if wait < ANSWERED => Some(true),
        wait if wait > DOUBTED => Some(false),
        _ => None,
    }
}

/// Whether the store may answer some of them and not the others.
fn is_in_question(said: &Said) -> bool {
    let waits = |(id, wait): &(u64, Duration)| {
        *wait > WAITS && said.iter().any(|(other, wait)| other != id && *wait < ANSWERED)
    };
    said.iter().any(waits)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    struct Looks(StoreWaits);

    impl Looks {
        /// So many, a second apart, at which processes 1 and 2 say that they have waited for so many seconds. Who is fenced
        /// after the last one.
        async fn look(&mut self, times: u32, said: [u64; 2], is_answered: bool) -> Vec<u64> {
            let mut fenced = Vec::new();
            for _ in 0..times {
                fenced = self.once(said.map(|seconds| seconds * 1_000), is_answered).await;
            }
            fenced
        }

        /// One, with milliseconds.
        async fn once(&mut self, said: [u64; 2], is_answered: bool) -> Vec<u64> {
            let said = [1u64, 2].map(|id| (id, Duration::from_millis(said[id as usize - 1])));
            tokio::time::advance(SECOND).await;
            self.0.note(&said, is_answered, Instant::now())
        }

        /// Some, a second apart: process 1 has waited for `from` seconds at the first and `to` at the last, and process 2
        /// for none at any. Nobody is fenced before the last one. Who is fenced after it.
        async fn grow(&mut self, from: u64, to: u64) -> Vec<u64> {
            for wait in from..to {
                assert_eq!(self.look(1, [wait, 0], true).await, [0u64; 0], "{wait}");
            }
            self.look(1, [to, 0], true).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_not_answered_at_any_look_while_others_are_is_fenced() {
        let mut looks = Looks(StoreWaits::default());
        assert_eq!(looks.look(1, [5, 0], true).await, [0u64; 0]);
        assert_eq!(looks.look(7, [13, 0], true).await, [0u64; 0], "not for long enough");
        assert_eq!(looks.look(1, [13, 0], true).await, [1]);
        assert_eq!(looks.look(1, [12, 0], true).await, [0u64; 0], "it has not waited for so long");
        assert_eq!(looks.look(1, [13, 0], true).await, [1]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_interrupted_begins_anew() {
        for interruption in [([0, 0], true), ([13, 13], true), ([13, 4], true), ([13, 0], false)] {
            let mut looks = Looks(StoreWaits::default());
            assert_eq!(looks.look(9, [13, 0], true).await, [1]);
            let (said, is_answered) = interruption;
            assert_eq!(looks.look(1, said, is_answered).await, [0u64; 0], "{interruption:?}");
            assert_eq!(looks.look(8, [13, 0], true).await, [0u64; 0], "{interruption:?}");
            assert_eq!(looks.look(1, [13, 0], true).await, [1], "{interruption:?}");
        }
        let mut looks = Looks(StoreWaits::default());
        assert_eq!(looks.look(9, [13, 0], true).await, [1]);
        tokio::time::advance(LATE).await;
        assert_eq!(looks.look(1, [13, 0], true).await, [0u64; 0], "nobody has looked meanwhile");
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_alone_from_the_beginning_is_fenced_sooner() {
        assert_eq!(Looks(StoreWaits::default()).grow(0, 6).await, [1]);
        // It has come into question late, and says the same twice.
        let mut looks = Looks(StoreWaits::default());
        assert_eq!(looks.once([4_400, 0], true).await, [0u64; 0]);
        assert_eq!(looks.look(2, [6, 0], true).await, [0u64; 0], "not for long enough");
        assert_eq!(looks.look(1, [7, 0], true).await, [1]);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_fenced_sooner_beside_another_one_that_waits() {
        let mut looks = Looks(StoreWaits::default());
        assert_eq!(looks.grow(0, 5).await, [0u64; 0]);
        for wait in 6..=11 {
            assert_eq!(looks.once([wait * 1_000, 2_900], true).await, [0u64; 0], "{wait}");
        }
        assert_eq!(looks.look(1, [12, 1], true).await, [1], "it was answered after all");
    }

    #[tokio::test(start_paused = true)]
    async fn what_may_have_been_an_outage_for_all_fences_nobody_sooner() {
        // How 2 waited at one look, and whether the store answered the leader.
        for (other, is_answered) in [(3, true), (4, true), (0, false), (4, false)] {
            let mut looks = Looks(StoreWaits::default());
            assert_eq!(looks.grow(0, 3).await, [0u64; 0]);
            let fenced = looks.look(1, [4, other], is_answered).await;
            assert_eq!(fenced, [0u64; 0], "{other}, {is_answered}");
            assert_eq!(looks.grow(5, 12).await, [0u64; 0], "{other}, {is_answered}");
        }
        let mut looks = Looks(StoreWaits::default());
        assert_eq!(looks.look(1, [3, 0], false).await, [0u64; 0]);
        assert_eq!(looks.grow(4, 12).await, [0u64; 0], "it waits since before that");
    }

    #[tokio::test(start_paused = true)]
    async fn who_was_answered_meanwhile_begins_to_wait_anew() {
        let mut looks = Looks(StoreWaits::default());
        assert_eq!(looks.grow(0, 5).await, [0u64; 0]);
        assert_eq!(looks.once([2_100, 0], true).await, [0u64; 0]);
        assert_eq!(looks.grow(3, 5).await, [0u64; 0]);
        assert_eq!(looks.look(1, [6, 0], true).await, [1]);
    }
}
