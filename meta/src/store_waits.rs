//! Which compute processes the object store does not answer, while it answers another one and the leader: their jobs can
//! do better elsewhere (docs/design.md §10).
//!
//! A process learns some seconds late that the store answers again, and sooner or later than another one. So nobody is
//! judged by one look: what is said counts if it is said at every look for longer than that, and the store has answered the
//! leader at each.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::read::prove_lead;
use crate::shared::Shared;

/// One that has waited for longer, while the store answers another one, is fenced.
const CUT_OFF: Duration = Duration::from_secs(12);
/// For how long it is to be said. A process waits 4 s for an answer, asks again 1 s later and beats within another second;
/// the leader looks each second.
const LASTS: Duration = Duration::from_secs(8);
/// One that has waited for longer may be cut off: it is looked at from then on.
const DOUBTED: Duration = CUT_OFF.saturating_sub(LASTS);
/// One that has waited for less is answered.
const ANSWERED: Duration = Duration::from_secs(3);
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
}

impl StoreWaits {
    /// Looks once more. Returns the processes that are to be fenced. The store is asked only where some process waits.
    pub async fn look(&mut self, shared: &Shared) -> Vec<u64> {
        let said = || {
            let state = shared.state.read();
            shared.members.store_waits(&state.processes, shared.env.now())
        };
        // Else a fence would wait with this process, and be late.
        let is_answered = is_in_question(&said()) && prove_lead(shared, STORE_ANSWER).await.is_ok();
        self.note(&said(), is_answered, shared.env.now())
    }

    /// `is_answered`: whether the store answers this process.
    fn note(&mut self, said: &Said, is_answered: bool, now: Instant) -> Vec<u64> {
        let is_late = |looked| now.saturating_duration_since(looked) > LATE;
        let mut before = std::mem::take(&mut self.since);
        if self.looked.is_none_or(is_late) {
            before.clear();
        }
        self.looked = Some(now);
        if !is_answered {
            return Vec::new();
        }
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
    let any = |well| said.iter().any(|(_, wait)| is_well(*wait) == Some(well));
    any(true) && any(false)
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
            let said = [1u64, 2].map(|id| (id, Duration::from_secs(said[id as usize - 1])));
            let mut fenced = Vec::new();
            for _ in 0..times {
                tokio::time::advance(SECOND).await;
                fenced = self.0.note(&said, is_answered, Instant::now());
            }
            fenced
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
}
