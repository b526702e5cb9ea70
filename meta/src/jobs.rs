//! The jobs of the state, by id.
//!
//! A map that, in tests, counts how many records are looked at: what a commit costs must follow what it changes,
//! not how many jobs there are, and a count shows that on any machine.

use std::collections::BTreeMap;
use std::collections::btree_map::{Iter, IterMut, Keys, Values};
#[cfg(test)]
use std::ops::Index;

use millrace_common::RelationId;

use crate::state::JobRecord;

/// See the module. In the order of the ids: a job's inputs come before it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Jobs(BTreeMap<RelationId, JobRecord>);

impl Jobs {
    pub fn get(&self, id: &RelationId) -> Option<&JobRecord> {
        visits::add(1);
        self.0.get(id)
    }

    pub fn get_mut(&mut self, id: &RelationId) -> Option<&mut JobRecord> {
        visits::add(1);
        self.0.get_mut(id)
    }

    pub fn contains_key(&self, id: &RelationId) -> bool {
        visits::add(1);
        self.0.contains_key(id)
    }

    pub fn insert(&mut self, id: RelationId, job: JobRecord) -> Option<JobRecord> {
        visits::add(1);
        self.0.insert(id, job)
    }

    pub fn remove(&mut self, id: &RelationId) -> Option<JobRecord> {
        visits::add(1);
        self.0.remove(id)
    }

    /// All jobs. Nothing that happens for every commit may call this.
    pub fn iter(&self) -> Iter<'_, RelationId, JobRecord> {
        visits::add(self.0.len());
        self.0.iter()
    }

    /// As `iter`.
    pub fn iter_mut(&mut self) -> IterMut<'_, RelationId, JobRecord> {
        visits::add(self.0.len());
        self.0.iter_mut()
    }

    /// As `iter`.
    pub fn values(&self) -> Values<'_, RelationId, JobRecord> {
        visits::add(self.0.len());
        self.0.values()
    }

    /// As `iter`.
    pub fn keys(&self) -> Keys<'_, RelationId, JobRecord> {
        visits::add(self.0.len());
        self.0.keys()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
impl Index<&RelationId> for Jobs {
    type Output = JobRecord;

    fn index(&self, id: &RelationId) -> &JobRecord {
        visits::add(1);
        &self.0[id]
    }
}

impl FromIterator<(RelationId, JobRecord)> for Jobs {
    fn from_iter<T: IntoIterator<Item = (RelationId, JobRecord)>>(jobs: T) -> Jobs {
        Jobs(jobs.into_iter().collect())
    }
}

/// How many job records this thread has looked at.
#[cfg(test)]
pub mod visits {
    use std::cell::Cell;

    thread_local! {
        static COUNT: Cell<u64> = const { Cell::new(0) };
    }

    pub fn add(count: usize) {
        COUNT.with(|c| c.set(c.get() + count as u64));
    }

    /// How many `run` looks at.
    pub fn of<T>(run: impl FnOnce() -> T) -> u64 {
        let before = count();
        run();
        count() - before
    }

    pub fn count() -> u64 {
        COUNT.with(Cell::get)
    }

    /// Runs what only debug builds do, without counting it.
    pub fn uncounted<T>(run: impl FnOnce() -> T) -> T {
        let before = count();
        let result = run();
        COUNT.with(|c| c.set(before));
        result
    }
}

#[cfg(not(test))]
mod visits {
    #[inline]
    pub fn add(_: usize) {}
}
