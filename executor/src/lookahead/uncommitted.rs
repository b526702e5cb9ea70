//! Rows of relations that are on their way into the log, as walkers see them: the open and sealed sections of the
//! changelog cache (docs/design.md §8).
//!
//! Nothing is kept here. Who has the rows, an open statement or a sealed epoch, announces them to those that follow the
//! relation, and keeps an [`Announced`], which says when they are committed or that they never will be. So a void epoch
//! clears its section by being dropped. A follower that is behind misses announcements.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use millrace_common::collections::HashMap;
use millrace_common::{DeltaChunk, EnvHandle, Epoch, RelationId};
use millrace_graph::lookahead::Place;
use parking_lot::{Mutex, RwLock};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Due;
use super::commit_times::CommitTimes;

/// Announcements that wait for a follower at most; of their rows and bytes see [`super::backlog`].
const QUEUE: usize = 256;

/// Rows that no reader can see yet, of all the relation's columns: those that are added, and those that are deleted.
#[derive(Clone, Debug)]
pub struct Announcement {
    pub place: Place,
    pub rows: Vec<DeltaChunk>,
    pub due: Due,
}

impl Announcement {
    pub fn num_rows(&self) -> usize {
        self.rows.iter().map(DeltaChunk::num_rows).sum()
    }
}

/// Kept with rows that were announced: rows have one, and clones of it are the same. The last clone is dropped, and none
/// has told an epoch: they are never committed.
#[derive(Clone, Debug, Default)]
pub struct Announced(Vec<Arc<Announcing>>);

/// Of one announcement.
#[derive(Debug)]
struct Announcing {
    due: Due,
    is_committed: AtomicBool,
    sealed: Mutex<Option<Instant>>,
    /// Of the relation.
    commits: Arc<CommitTimes>,
    clock: EnvHandle,
}

impl Announcing {
    fn seal(&self) {
        let now = self.clock.now();
        let mut sealed = self.sealed.lock();
        if sealed.is_none() {
            *sealed = Some(now);
            self.due.seal(self.commits.least().map(|least| now + least));
        }
    }

    fn commit(&self, epoch: Epoch) {
        self.is_committed.store(true, Ordering::Relaxed);
        self.due.resolve(epoch.0);
        if let Some(sealed) = *self.sealed.lock() {
            self.commits.note(self.clock.elapsed(sealed));
        }
    }
}

impl Announced {
    /// These rows are committed with those.
    pub fn join(&mut self, mut other: Announced) {
        self.0.append(&mut other.0);
    }

    /// The epoch with the rows is on its way into the log.
    pub fn sealed(&self) {
        self.0.iter().for_each(|announcing| announcing.seal());
    }

    pub fn committed(self, epoch: Epoch) {
        self.0.iter().for_each(|announcing| announcing.commit(epoch));
    }
}

impl Drop for Announcing {
    fn drop(&mut self) {
        if !self.is_committed.load(Ordering::Relaxed) {
            self.due.resolve(NEVER);
        }
    }
}

/// See [`Due::resolve`].
const NEVER: u64 = 1;

/// Who follows which relation.
#[derive(Debug, Default)]
pub struct Uncommitted {
    /// Followers of all relations: mostly there are none.
    following: AtomicUsize,
    followers: RwLock<HashMap<RelationId, Followers>>,
    next: AtomicU64,
    clock: EnvHandle,
}

/// Of one relation, and how long its commits have taken while there were any.
#[derive(Debug, Default)]
struct Followers {
    all: Vec<Arc<Follower>>,
    commits: Arc<CommitTimes>,
}

#[derive(Debug)]
struct Follower {
    id: u64,
    places: Vec<Place>,
    queue: mpsc::Sender<Announcement>,
    /// What is in the queue.
    waiting: Arc<super::backlog::Backlog>,
    /// Rows that it has missed.
    missed: Arc<AtomicU64>,
}

impl Follower {
    fn tell(&self, announcement: &Announcement) {
        let fits = self.waiting.add(&announcement.rows);
        if fits && self.queue.try_send(announcement.clone()).is_ok() {
            return;
        }
        if fits {
            self.waiting.remove(&announcement.rows);
        }
        self.missed.fetch_add(announcement.num_rows() as u64, Ordering::Relaxed);
    }
}

/// What is announced of a relation, until this is dropped.
#[derive(Debug)]
pub struct Following {
    of: Arc<Uncommitted>,
    relation: RelationId,
    id: u64,
    queue: mpsc::Receiver<Announcement>,
    waiting: Arc<super::backlog::Backlog>,
    missed: Arc<AtomicU64>,
}

impl Following {
    /// What waits counts as memory, and is missed while that is tight.
    pub fn accounted(self, governor: &Arc<crate::memory::MemoryGovernor>) -> Following {
        self.waiting.account(governor);
        self
    }

    /// The next announcement; cancel-safe.
    pub async fn next(&mut self) -> Option<Announcement> {
        let announcement = self.queue.recv().await?;
        self.waiting.remove(&announcement.rows);
        Some(announcement)
    }

    /// Rows that were announced while too much was waiting, since the last call.
    pub fn take_missed(&self) -> u64 {
        self.missed.swap(0, Ordering::Relaxed)
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let mut followers = self.of.followers.write();
        let Some(own) = followers.get_mut(&self.relation) else { return };
        own.all.retain(|f| f.id != self.id);
        if own.all.is_empty() {
            followers.remove(&self.relation);
        }
        self.of.following.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Uncommitted {
    pub fn new(clock: EnvHandle) -> Uncommitted {
        Uncommitted { clock, ..Uncommitted::default() }
    }

    /// From now on, what is announced of a relation at one of these places.
    pub fn follow(self: &Arc<Self>, relation: RelationId, places: Vec<Place>) -> Following {
        let (sender, queue) = mpsc::channel(QUEUE);
        let (waiting, missed) = (Arc::default(), Arc::<AtomicU64>::default());
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (of_waiting, of_missed) = (Arc::clone(&waiting), Arc::clone(&missed));
        let follower =
            Follower { id, places, queue: sender, waiting: of_waiting, missed: of_missed };
        self.followers.write().entry(relation).or_default().all.push(Arc::new(follower));
        self.following.fetch_add(1, Ordering::Relaxed);
        Following { of: Arc::clone(self), relation, id, queue, waiting, missed }
    }

    /// Tells the followers of a relation of rows at a place. `None`: there are none. `epoch`: where it is known.
    pub fn announce(
        &self,
        relation: RelationId,
        place: Place,
        epoch: Option<Epoch>,
        rows: impl FnOnce() -> Vec<DeltaChunk>,
    ) -> Option<Announced> {
        if self.following.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let (told, commits) = {
            let followers = self.followers.read();
            let of_relation = followers.get(&relation)?;
            let told = of_relation.all.iter().filter(|f| f.places.contains(&place));
            (told.cloned().collect::<Vec<_>>(), Arc::clone(&of_relation.commits))
        };
        if told.is_empty() {
            return None;
        }
        let due = epoch.map_or_else(Due::default, |e| Due::at(e.0));
        let announcing = Announcing {
            due: due.clone(),
            is_committed: AtomicBool::new(false),
            sealed: Mutex::new(None),
            commits,
            clock: self.clock.clone(),
        };
        if place == Place::Root {
            announcing.seal();
        }
        // Nobody waits for it: those of all relations are behind one lock, and expressions may take long.
        let announcement = Announcement { place, rows: rows(), due };
        told.iter().for_each(|f| f.tell(&announcement));
        Some(Announced(vec![Arc::new(announcing)]))
    }

    /// How many follow some relation.
    pub fn following(&self) -> usize {
        self.following.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use arrow::array::{ArrayRef, Int64Array, RecordBatch};

    use super::*;

    const R: RelationId = RelationId(7);

    fn rows(count: usize) -> Vec<DeltaChunk> {
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..count as i64));
        vec![DeltaChunk::inserts(RecordBatch::try_from_iter([("a", column)]).unwrap())]
    }

    fn never() -> Vec<DeltaChunk> {
        unreachable!("nobody follows")
    }

    #[tokio::test]
    async fn rows_are_announced_to_those_that_follow_their_relation_and_place() {
        let uncommitted = Arc::new(Uncommitted::default());
        assert!(uncommitted.announce(R, Place::Root, None, never).is_none());
        let mut following = uncommitted.follow(R, vec![Place::Root]);
        assert!(uncommitted.announce(RelationId(8), Place::Root, None, never).is_none());
        assert!(uncommitted.announce(R, Place::Entry, None, never).is_none());
        let announced = uncommitted.announce(R, Place::Root, None, || rows(3)).unwrap();
        let got = following.next().await.unwrap();
        assert_eq!((got.place, got.num_rows()), (Place::Root, 3));
        assert!(!got.due.has_passed(u64::MAX), "not committed");
        announced.committed(Epoch(20));
        assert!(got.due.has_passed(20) && !got.due.has_passed(19));
        drop(following);
        assert_eq!(uncommitted.following(), 0);
        assert!(uncommitted.announce(R, Place::Root, None, never).is_none());
    }

    #[tokio::test]
    async fn others_may_begin_to_follow_while_rows_are_made() {
        let uncommitted = Arc::new(Uncommitted::default());
        let mut following = uncommitted.follow(R, vec![Place::Root]);
        let announced = uncommitted.announce(R, Place::Root, None, || {
            assert!(uncommitted.followers.try_write().is_some(), "the followers are locked");
            rows(3)
        });
        assert!(announced.is_some());
        assert_eq!(following.next().await.unwrap().num_rows(), 3);
    }

    #[tokio::test]
    async fn rows_of_a_void_epoch_are_never_due() {
        let uncommitted = Arc::new(Uncommitted::default());
        let mut following = uncommitted.follow(R, vec![Place::Root, Place::Entry]);
        let mut all = Announced::default();
        for epoch in [None, Some(Epoch(30))] {
            all.join(uncommitted.announce(R, Place::Entry, epoch, || rows(1)).unwrap());
        }
        let dues = [following.next().await.unwrap().due, following.next().await.unwrap().due];
        assert!(dues[1].has_passed(30) && !dues[1].has_passed(29), "the epoch was known");
        let same = all.clone();
        drop(all);
        assert!(dues[1].has_passed(30) && !dues[1].has_passed(29), "another clone may tell");
        drop(same);
        assert!(dues.iter().all(|due| due.has_passed(2)), "nothing waits for them");
    }

    #[tokio::test]
    async fn one_clone_tells_when_rows_are_committed() {
        let uncommitted = Arc::new(Uncommitted::default());
        let mut following = uncommitted.follow(R, vec![Place::Entry]);
        let announced = uncommitted.announce(R, Place::Entry, None, || rows(1)).unwrap();
        announced.clone().committed(Epoch(30));
        drop(announced);
        let due = following.next().await.unwrap().due;
        assert!(due.has_passed(30) && !due.has_passed(29));
    }

    #[tokio::test(start_paused = true)]
    async fn rows_that_are_sealed_come_when_a_tenth_of_commits_would_be_done() {
        let uncommitted = Arc::new(Uncommitted::default());
        let mut following = uncommitted.follow(R, vec![Place::Root, Place::Entry]);
        for i in 0..20 {
            // Half of them are told of when they are received, long before they are sealed.
            let place = if i % 2 == 0 { Place::Root } else { Place::Entry };
            let announced = uncommitted.announce(R, place, None, || rows(1)).unwrap();
            if place == Place::Entry {
                tokio::time::advance(Duration::from_secs(1)).await;
                announced.sealed();
            }
            tokio::time::advance(Duration::from_millis(if i < 2 { 20 } else { 50 })).await;
            announced.committed(Epoch(30));
            following.next().await.unwrap();
        }
        let announced = uncommitted.announce(R, Place::Root, None, || rows(1)).unwrap();
        let due = following.next().await.unwrap().due;
        let now = uncommitted.clock.now();
        assert_eq!(
            due.there_at(),
            Some(now + Duration::from_millis(50)),
            "of the 20 only 2 are faster"
        );
        // Only the first time counts.
        tokio::time::advance(Duration::from_millis(10)).await;
        announced.sealed();
        assert_eq!(due.there_at(), Some(now + Duration::from_millis(50)));
    }

    #[tokio::test]
    async fn a_follower_that_is_behind_misses_rows_and_holds_few() {
        let uncommitted = Arc::new(Uncommitted::default());
        let mut following = uncommitted.follow(R, vec![Place::Root]);
        let announce = |count| uncommitted.announce(R, Place::Root, None, || rows(count)).unwrap();
        // One alone may be of any number of rows.
        let many = super::super::backlog::MAX_ROWS * 2;
        announce(many);
        announce(1);
        assert_eq!(following.take_missed(), 1);
        assert_eq!(following.next().await.unwrap().num_rows(), many);
        (0..QUEUE + 5).for_each(|_| drop(announce(1)));
        assert_eq!((following.take_missed(), following.take_missed()), (5, 0));
    }
}
