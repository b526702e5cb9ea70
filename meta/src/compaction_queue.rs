//! Which jobs' runs may be worth rewriting, and whose come first.
//!
//! A job is looked at when its runs have changed, not when another's have. The most urgent rewriting of all jobs comes
//! first; waiting makes one more urgent, so that none waits for ever behind jobs that are always busy.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_common::JobId;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Urgency that a second of waiting adds, in the unit of `Pick::score`.
const PER_SECOND: u128 = 100;

/// Jobs to be looked at. Bounded by the number of jobs.
#[derive(Debug, Default)]
pub struct CompactionQueue {
    changed: Mutex<BTreeSet<JobId>>,
    told: Notify,
}

impl CompactionQueue {
    /// The runs of these jobs have changed, or can be rewritten from now on.
    pub fn look_at(&self, jobs: impl IntoIterator<Item = JobId>) {
        let mut changed = self.changed.lock();
        changed.extend(jobs);
        let any = !changed.is_empty();
        drop(changed);
        if any {
            self.told.notify_one();
        }
    }

    /// Those told of since the last call.
    pub fn take(&self) -> BTreeSet<JobId> {
        std::mem::take(&mut *self.changed.lock())
    }

    /// Until there may be any.
    pub async fn told(&self) {
        self.told.notified().await;
    }
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    score: u64,
    since: Instant,
}

/// Jobs that have something worth rewriting.
#[derive(Debug, Default)]
pub struct Candidates(BTreeMap<JobId, Candidate>);

impl Candidates {
    /// The score of the job's best rewriting now; `None`: it has none.
    pub fn set(&mut self, job: JobId, score: Option<u64>, now: Instant) {
        match score {
            Some(score) => {
                self.0.entry(job).or_insert(Candidate { score, since: now }).score = score;
            }
            None => drop(self.0.remove(&job)),
        }
    }

    /// Takes the most urgent job; among equals the oldest.
    pub fn take_best(&mut self, now: Instant) -> Option<JobId> {
        let urgency = |c: &Candidate| {
            let waited: Duration = now.saturating_duration_since(c.since);
            u128::from(c.score) + waited.as_millis() * PER_SECOND / 1_000
        };
        let best = self.0.iter().max_by_key(|(id, c)| (urgency(c), Reverse(**id)))?;
        let job = *best.0;
        self.0.remove(&job);
        Some(job)
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::RelationId;

    use super::*;

    #[test]
    fn the_most_urgent_job_comes_first_whatever_its_number() {
        let now = Instant::now();
        let mut candidates = Candidates::default();
        for (job, score) in [(1, 1_000), (2, 3_000), (3, 2_000), (4, 2_000)] {
            candidates.set(RelationId(job), Some(score), now);
        }
        candidates.set(RelationId(3), None, now);
        candidates.set(RelationId(1), Some(2_500), now);
        let order = std::iter::from_fn(|| candidates.take_best(now));
        assert_eq!(order.map(|id| id.0).collect::<Vec<_>>(), [2, 1, 4]);
    }

    #[test]
    fn a_job_that_waits_is_overtaken_for_a_while_only() {
        let start = Instant::now();
        let mut candidates = Candidates::default();
        candidates.set(RelationId(1), Some(1), start);
        let mut rounds = 0;
        loop {
            rounds += 1;
            let now = start + Duration::from_secs(rounds);
            candidates.set(RelationId(2), Some(2_000), now);
            if candidates.take_best(now) == Some(RelationId(1)) {
                break;
            }
            assert!(rounds < 60, "it still waits");
        }
        assert!(rounds > 10);
    }

    #[test]
    fn jobs_told_of_are_taken_once() {
        let queue = CompactionQueue::default();
        queue.look_at([RelationId(2), RelationId(1), RelationId(2)]);
        assert_eq!(queue.take(), BTreeSet::from([RelationId(1), RelationId(2)]));
        assert!(queue.take().is_empty());
    }
}
