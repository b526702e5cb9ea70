//! Which processes tell of themselves and apply no records, while another one does: what these records have dropped would
//! be kept for them without end (docs/design.md §9).
//!
//! A process counts as far as it has received the log, by the record stream or by itself. A compute process that holds the
//! acknowledgement of a record back for a busy job goes on all the same, and its job loses nothing by that.
//!
//! One that goes on, however slowly, is not fenced; nor is anybody where all stand still, or while the object store does
//! not answer this process: then it is not this one process that is in trouble.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_rpc::log::ProcessRole;
use tokio::time::Instant;

use crate::read::prove_lead;
use crate::shared::Shared;

/// A process that has gone on by no record for so long, though it is waited for, is fenced. That is long, because it may be
/// busy: with a start, with records that it reads back one after the other, with a machine that swaps. It is bounded,
/// because all that is dropped meanwhile takes room in the object store.
pub const APPLY_LEASE: Duration = Duration::from_secs(60);
/// From then on the store is to answer this process at each look, and who stands still says nothing of the others.
const DOUBTED: Duration = Duration::from_secs(30);
/// Looks that are farther apart say nothing of the time between them.
const LATE: Duration = Duration::from_secs(3);
/// How long the store may take to answer this process.
const STORE_ANSWER: Duration = Duration::from_secs(1);

/// How far each process is that follows the log.
type Reached = BTreeMap<u64, u64>;

/// A process that does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Still {
    pub incarnation: u64,
    /// The first one that it has not applied.
    pub record: u64,
}

/// What was seen at the looks until now.
#[derive(Debug, Default)]
pub struct ApplyLeases {
    /// When the last one was.
    looked: Option<Instant>,
    /// How far each process is that is waited for, and since when it has been there at every look.
    since: BTreeMap<u64, (u64, Instant)>,
}

impl ApplyLeases {
    /// Looks once more. Returns the processes that are to be fenced. The store is asked only where one is in question.
    pub async fn look(&mut self, shared: &Shared) -> Vec<Still> {
        let (asked, now) = (shared.applied.asked(), shared.env.now());
        if !self.is_in_question(&reached(shared), asked, now) {
            return Vec::new();
        }
        let is_answered = prove_lead(shared, STORE_ANSWER).await.is_ok();
        self.judge(&reached(shared), asked, is_answered, shared.env.now())
    }

    /// Whether one may have to be fenced. `asked`: the record that all are to have applied.
    fn is_in_question(&mut self, reached: &Reached, asked: u64, now: Instant) -> bool {
        self.note(reached, asked, now);
        !self.standing(reached, DOUBTED, now).is_empty()
    }

    /// `is_answered`: whether the store answers this process.
    fn judge(
        &mut self,
        reached: &Reached,
        asked: u64,
        is_answered: bool,
        now: Instant,
    ) -> Vec<Still> {
        self.note(reached, asked, now);
        if !is_answered {
            self.since.clear();
        }
        self.standing(reached, APPLY_LEASE, now)
    }

    fn note(&mut self, reached: &Reached, asked: u64, now: Instant) {
        let is_late = |looked| now.saturating_duration_since(looked) > LATE;
        let mut before = std::mem::take(&mut self.since);
        if self.looked.is_none_or(is_late) {
            before.clear();
        }
        self.looked = Some(now);
        for (id, at) in reached.iter().filter(|(_, at)| **at < asked) {
            let same = before.get(id).filter(|(was, _)| was == at);
            self.since.insert(*id, (*at, same.map_or(now, |(_, since)| *since)));
        }
    }

    /// The processes that have stood still for so long, where another one is beyond that does not stand still.
    fn standing(&self, reached: &Reached, lasts: Duration, now: Instant) -> Vec<Still> {
        let stands = |id: &u64, lasts: Duration| {
            let since = self.since.get(id).map(|(_, since)| *since);
            since.is_some_and(|since| now.saturating_duration_since(since) >= lasts)
        };
        let is_passed =
            |at: u64| reached.iter().any(|(id, other)| *other > at && !stands(id, DOUBTED));
        let standing = reached.iter().filter(|(id, at)| stands(id, lasts) && is_passed(**at));
        standing.map(|(id, at)| Still { incarnation: *id, record: at + 1 }).collect()
    }
}

/// Compute processes and frontends. The leader is always there, and a compactor says what the leader has told it.
fn reached(shared: &Shared) -> Reached {
    let state = shared.state.read();
    let follows = |role: ProcessRole| matches!(role, ProcessRole::Compute | ProcessRole::Frontend);
    let live = state.processes.live().iter();
    let following = live.filter(|(_, p)| p.registration.roles().any(follows));
    following.filter_map(|(id, _)| Some((*id, shared.applied.reached(*id)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Process 1 is here, and 10 is asked for.
    const STANDS: u64 = 4;
    const ASKED: u64 = 10;

    struct Looks(ApplyLeases);

    impl Looks {
        /// So many, a second apart, at which these processes are so far. Who is fenced after the last one.
        async fn look(
            &mut self,
            times: u64,
            reached: &[(u64, u64)],
            is_answered: bool,
        ) -> Vec<u64> {
            let reached: Reached = reached.iter().copied().collect();
            let mut fenced = Vec::new();
            for _ in 0..times {
                tokio::time::advance(Duration::from_secs(1)).await;
                fenced = match self.0.is_in_question(&reached, ASKED, Instant::now()) {
                    true => self.0.judge(&reached, ASKED, is_answered, Instant::now()),
                    false => Vec::new(),
                };
            }
            fenced.iter().for_each(|still| assert_eq!(still.record, STANDS + 1));
            fenced.iter().map(|still| still.incarnation).collect()
        }
    }

    fn looks() -> Looks {
        Looks(ApplyLeases::default())
    }

    /// The lease, in looks: it begins with the first.
    fn lease() -> u64 {
        APPLY_LEASE.as_secs() + 1
    }

    #[tokio::test(start_paused = true)]
    async fn who_applies_nothing_while_another_does_is_fenced_after_the_lease() {
        for beyond in [ASKED, ASKED + 5] {
            let mut looks = looks();
            let said = [(1, STANDS), (2, beyond)];
            assert_eq!(looks.look(lease() - 1, &said, true).await, [0u64; 0]);
            assert_eq!(looks.look(1, &said, true).await, [1]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_goes_on_however_slowly_is_not() {
        let mut looks = looks();
        for at in 1..=STANDS {
            let said = [(1, at), (2, ASKED)];
            assert_eq!(looks.look(lease() - 1, &said, true).await, [0u64; 0], "{at}");
        }
        assert_eq!(looks.look(1, &[(1, STANDS), (2, ASKED)], true).await, [1]);
        assert_eq!(looks.look(2 * lease(), &[(1, ASKED), (2, ASKED + 9)], true).await, [0u64; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_where_no_other_goes_on() {
        let alone: &[&[(u64, u64)]] = &[
            &[(1, STANDS)],
            &[(1, STANDS), (2, STANDS)],
            &[(1, STANDS), (2, STANDS - 1)],
            // It was beyond before.
            &[(1, STANDS), (2, ASKED - 1)],
        ];
        for said in alone {
            assert_eq!(looks().look(3 * lease(), said, true).await, [0u64; 0], "{said:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_while_the_store_does_not_answer_the_leader() {
        let mut looks = looks();
        let said = [(1, STANDS), (2, ASKED)];
        // The last of these looks asks the store.
        let asks = DOUBTED.as_secs() + 1;
        assert_eq!(looks.look(4 * asks, &said, false).await, [0u64; 0]);
        assert_eq!(looks.look(lease() - 1, &said, true).await, [0u64; 0], "it begins anew");
        assert_eq!(looks.look(1, &said, true).await, [1]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_has_stood_still_has_seen_nothing() {
        let mut looks = looks();
        let said = [(1, STANDS), (2, ASKED)];
        assert_eq!(looks.look(lease() - 1, &said, true).await, [0u64; 0]);
        tokio::time::advance(LATE).await;
        assert_eq!(looks.look(lease() - 1, &said, true).await, [0u64; 0]);
        assert_eq!(looks.look(1, &said, true).await, [1]);
    }
}
