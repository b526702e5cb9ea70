//! Whose large epochs go on while memory is tight.
//!
//! Much of what an epoch takes in is held until its barrier. Jobs that work on large epochs at the same time need the
//! sum of that, and are done no sooner for it. So while memory is tight they go in the order in which they came: as
//! many at a time as together need a part of the limit, and at least one. Once more is in use than may be it is one:
//! what others have written must reach the store first. The others wait with what they have.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_common::{EnvHandle, JobId};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::MemoryGovernor;

/// How long others wait while those that go on do nothing: their store may not answer, or their epochs have no end yet.
const PATIENCE: Duration = Duration::from_secs(2);
/// Until who waits looks whether memory is still tight.
const LOOK: Duration = Duration::from_millis(100);
/// Those that go on together may need this part of the limit.
const PART: usize = 8;
/// What an epoch needs for each row that comes in to a task: its change, the state, and what is written of both.
const ROW_NEED: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Precedence {
    queue: Mutex<Queue>,
    /// Of tasks that go on.
    steps: AtomicU64,
    ended: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    order: VecDeque<Entry>,
    next: u64,
}

/// A job with a large epoch.
#[derive(Debug)]
struct Entry {
    number: u64,
    job: JobId,
    /// That have not ended their epochs.
    tasks: usize,
    /// That these tasks have taken in.
    rows: usize,
    /// Others went past it because it did nothing, and it has not asked since.
    is_passed: bool,
}

/// A task's part in its job's place, until its epoch ends and this is dropped.
#[derive(Debug)]
pub struct Place {
    governor: Arc<MemoryGovernor>,
    /// Of the entry.
    number: u64,
    rows: usize,
    goes_on: bool,
    /// The steps of those that go on, as seen last, and since when there were so many.
    seen: Option<(u64, Instant)>,
}

impl MemoryGovernor {
    /// A place for a task of the job, whose epoch has become large: behind those of other jobs, unless another task has one.
    pub fn place(self: &Arc<Self>, job: JobId) -> Place {
        let number = self.precedence.queue.lock().enter(job);
        Place { governor: Arc::clone(self), number, rows: 0, goes_on: false, seen: None }
    }

    /// Whether a large epoch of the job waits because those of others go on.
    pub fn waits_for_others(&self, job: JobId) -> bool {
        self.is_tight() && self.precedence.queue.lock().waits(job, self.most_together())
    }

    /// What epochs that go on together may need while memory is tight.
    fn most_together(&self) -> usize {
        if self.is_over() { 0 } else { self.limit / PART }
    }
}

impl Place {
    /// Completes when the task, whose epoch has so many rows by now, may take in more: it is the job's turn, or memory is
    /// not tight. A wait that is given up can be begun again.
    pub async fn turn(&mut self, rows: usize, clock: &EnvHandle) {
        let governor = Arc::clone(&self.governor);
        let precedence = &governor.precedence;
        precedence.queue.lock().ask(self.number, rows.saturating_sub(self.rows));
        self.rows = self.rows.max(rows);
        self.goes_on = false;
        while governor.is_tight() {
            // Before the look, so that no end is missed.
            let ended = precedence.ended.notified();
            if precedence.queue.lock().may_go_on(self.number, governor.most_together()) {
                break;
            }
            let steps = precedence.steps.load(Ordering::Relaxed);
            let (_, since) = match self.seen {
                Some(seen) if seen.0 == steps => seen,
                _ => *self.seen.insert((steps, clock.now())),
            };
            if clock.elapsed(since) >= PATIENCE {
                // The others are to wait as long for this one.
                precedence.steps.fetch_add(1, Ordering::Relaxed);
                precedence.queue.lock().advance(self.number);
                continue;
            }
            let _ = tokio::time::timeout(LOOK, ended).await;
        }
        (self.goes_on, self.seen) = (true, None);
    }

    /// The task has done something.
    pub fn step(&self) {
        if self.goes_on {
            self.governor.precedence.steps.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let precedence = &self.governor.precedence;
        precedence.queue.lock().leave(self.number, self.rows);
        precedence.ended.notify_waiters();
    }
}

impl Queue {
    fn enter(&mut self, job: JobId) -> u64 {
        if let Some(entry) = self.order.iter_mut().find(|entry| entry.job == job) {
            entry.tasks += 1;
            return entry.number;
        }
        self.next += 1;
        let entry = Entry { number: self.next, job, tasks: 1, rows: 0, is_passed: false };
        // Before those at the end that do nothing.
        let at = self.order.iter().rposition(|entry| !entry.is_passed).map_or(0, |last| last + 1);
        self.order.insert(at, entry);
        self.next
    }

    fn position(&self, number: u64) -> Option<usize> {
        self.order.iter().position(|entry| entry.number == number)
    }

    /// A task asks whether it may go on, and has taken in so many rows more.
    fn ask(&mut self, number: u64, more: usize) {
        if let Some(at) = self.position(number) {
            self.order[at].rows += more;
            self.order[at].is_passed = false;
        }
    }

    /// Whether the job and those before it need at most `most` bytes together, or there are none before it.
    fn may_go_on(&self, number: u64, most: usize) -> bool {
        let Some(at) = self.position(number) else { return true };
        let rows: usize = self.order.range(..=at).map(|entry| entry.rows).sum();
        at == 0 || rows.saturating_mul(ROW_NEED) <= most
    }

    fn waits(&self, job: JobId, most: usize) -> bool {
        let entry = self.order.iter().find(|entry| entry.job == job);
        entry.is_some_and(|entry| !entry.is_passed && !self.may_go_on(entry.number, most))
    }

    /// Those before the job go behind all others.
    fn advance(&mut self, number: u64) {
        if let Some(at) = self.position(number) {
            self.order.range_mut(..at).for_each(|entry| entry.is_passed = true);
            self.order.rotate_left(at);
        }
    }

    fn leave(&mut self, number: u64, rows: usize) {
        let Some(at) = self.position(number) else { return };
        let entry = &mut self.order[at];
        entry.rows = entry.rows.saturating_sub(rows);
        entry.tasks = entry.tasks.saturating_sub(1);
        if entry.tasks == 0 {
            self.order.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use millrace_common::RelationId;

    use super::*;
    use crate::memory::{MemoryClass, Reservation};

    const A: JobId = RelationId(1);
    const B: JobId = RelationId(2);
    const LIMIT: usize = 128 << 20;
    /// Rows whose epoch needs all that those that go on together may.
    const MOST_ROWS: usize = LIMIT / PART / ROW_NEED;

    fn tight() -> (Arc<MemoryGovernor>, Reservation) {
        let governor = MemoryGovernor::new(LIMIT);
        let mut held = governor.account(MemoryClass::Memtable);
        held.set(LIMIT / 10 * 8);
        assert!(governor.is_tight());
        (governor, held)
    }

    /// Whether it goes on at once.
    fn goes_on(place: &mut Place, rows: usize) -> bool {
        place.turn(rows, &EnvHandle::default()).now_or_never().is_some()
    }

    #[tokio::test(start_paused = true)]
    async fn a_job_goes_on_with_all_its_tasks_until_all_have_ended_their_epochs() {
        let (governor, _held) = tight();
        let (mut first, mut second) = (governor.place(A), governor.place(A));
        let mut other = governor.place(B);
        assert!(goes_on(&mut first, MOST_ROWS) && goes_on(&mut second, MOST_ROWS));
        assert!(!goes_on(&mut other, MOST_ROWS));
        assert_eq!([A, B].map(|job| governor.waits_for_others(job)), [false, true]);
        drop(first);
        assert!(!goes_on(&mut other, MOST_ROWS));
        drop(second);
        assert!(goes_on(&mut other, MOST_ROWS));
        assert!(!governor.waits_for_others(B));
    }

    #[tokio::test(start_paused = true)]
    async fn jobs_that_need_little_go_on_together() {
        let (governor, _held) = tight();
        let mut places: Vec<Place> = (0..5).map(|job| governor.place(RelationId(job))).collect();
        let may: Vec<bool> = places.iter_mut().map(|p| goes_on(p, MOST_ROWS / 4)).collect();
        assert_eq!(may, [true, true, true, true, false]);
        // The first has become larger meanwhile; it goes on, and the last of the others does not.
        assert!(goes_on(&mut places[0], MOST_ROWS / 2));
        assert!(goes_on(&mut places[2], MOST_ROWS / 4) && !goes_on(&mut places[3], MOST_ROWS / 4));
        drop(places.remove(0));
        assert!(goes_on(&mut places[2], MOST_ROWS / 4));
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_first_goes_on_while_more_is_in_use_than_may_be() {
        let (governor, mut held) = tight();
        let (mut first, mut second) = (governor.place(A), governor.place(B));
        assert!(goes_on(&mut first, MOST_ROWS / 4) && goes_on(&mut second, MOST_ROWS / 4));
        held.set(governor.heap_limit() + 1);
        assert!(goes_on(&mut first, MOST_ROWS / 4) && !goes_on(&mut second, MOST_ROWS / 4));
        held.set(governor.heap_limit());
        assert!(goes_on(&mut second, MOST_ROWS / 4));
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_once_there_is_room() {
        let (governor, mut held) = tight();
        let (mut first, mut second) = (governor.place(A), governor.place(B));
        assert!(goes_on(&mut first, MOST_ROWS));
        let clock = EnvHandle::default();
        let waiting = second.turn(MOST_ROWS, &clock);
        let freed = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            held.set(0);
        };
        tokio::join!(waiting, freed);
        assert!(!governor.is_tight() && first.goes_on, "it goes on beside the other");
    }

    /// One that works is waited for as long as that takes, one that does nothing only for a moment; after that it is the
    /// last.
    #[tokio::test(start_paused = true)]
    async fn a_job_that_does_nothing_goes_behind_the_others() {
        let (governor, _held) = tight();
        let (mut first, mut second) = (governor.place(A), governor.place(B));
        let mut third = governor.place(RelationId(3));
        assert!(goes_on(&mut first, MOST_ROWS));
        assert!(!goes_on(&mut third, MOST_ROWS));
        let clock = EnvHandle::default();
        // It gives the wait up many times meanwhile.
        let look = async |place: &mut Place, time| {
            tokio::time::timeout(time, place.turn(MOST_ROWS, &clock)).await.is_ok()
        };
        for _ in 0..100 {
            assert!(!look(&mut second, PATIENCE / 5).await);
            first.step();
        }
        let mut looks = 0;
        while !look(&mut second, PATIENCE / 40).await {
            looks += 1;
            assert!(looks < 100, "it waits for ever");
        }
        drop(second);
        assert!(goes_on(&mut third, MOST_ROWS), "the first is behind it");
        let mut fourth = governor.place(RelationId(4));
        drop(third);
        assert!(goes_on(&mut fourth, MOST_ROWS), "and behind those that come later");
        // It does something again.
        assert!(!goes_on(&mut first, MOST_ROWS));
        let mut fifth = governor.place(RelationId(5));
        drop(fourth);
        assert!(!goes_on(&mut fifth, MOST_ROWS) && goes_on(&mut first, MOST_ROWS));
    }
}
