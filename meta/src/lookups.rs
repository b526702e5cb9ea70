//! How often the runs of state tables have been looked up since they were merged, as the processes of a cluster tell with
//! their heartbeats: what decides whether it pays to merge them (docs/design.md §9).
//!
//! It is in memory only. A new leader begins to count anew, as a server does that is started again.

use std::collections::{BTreeMap, BTreeSet};

use millrace_common::{JobId, RelationId};
use millrace_rpc::control::TableLookups;
use millrace_storage::read_counts::{TableReads, is_burst};
use parking_lot::Mutex;

use crate::shared::Shared;

/// See the module. Bounded by the state tables of the jobs that there are, and the processes.
#[derive(Debug, Default)]
pub struct Lookups {
    counts: Mutex<BTreeMap<JobId, BTreeMap<u32, TableReads>>>,
    /// Processes that have told any.
    telling: Mutex<BTreeSet<u64>>,
}

/// Of a table. One whose job runs on a process that has never told any, as those of earlier builds, counts as read.
pub fn since_merge(shared: &Shared, job: JobId, table: u32) -> TableReads {
    let process = shared.state.read().jobs.get(&job).map_or(0, |job| job.process);
    match shared.lookups.has_told(process) {
        true => shared.lookups.since_merge(job, table),
        false => TableReads::MANY,
    }
}

impl Lookups {
    /// Adds what a process has looked up since its last heartbeat. Returns the jobs of which a table has been looked up
    /// often enough to think about its next merge.
    pub fn add(
        &self,
        process: u64,
        told: &[TableLookups],
        is_job: impl Fn(JobId) -> bool,
    ) -> BTreeSet<JobId> {
        self.telling.lock().insert(process);
        // Asked before the counts are locked: who drops a job may hold what `is_job` waits for.
        let told: Vec<&TableLookups> =
            told.iter().filter(|told| is_job(RelationId(told.job))).collect();
        let mut counts = self.counts.lock();
        let mut bursts = BTreeSet::new();
        for told in told {
            let job = RelationId(told.job);
            let table = counts.entry(job).or_default().entry(told.table).or_default();
            let before = table.keys;
            table.keys = before.saturating_add(told.keys);
            table.cold = table.cold.saturating_add(told.cold);
            if is_burst(before, table.keys) {
                bursts.insert(job);
            }
        }
        bursts
    }

    fn has_told(&self, process: u64) -> bool {
        self.telling.lock().contains(&process)
    }

    /// What has been told of a table.
    fn since_merge(&self, job: JobId, table: u32) -> TableReads {
        let counts = self.counts.lock();
        counts.get(&job).and_then(|tables| tables.get(&table)).copied().unwrap_or_default()
    }

    /// Runs of a table have been merged.
    pub fn merged(&self, job: JobId, table: u32) {
        if let Some(tables) = self.counts.lock().get_mut(&job) {
            tables.remove(&table);
        }
    }

    /// The job is gone.
    pub fn forget(&self, job: JobId) {
        self.counts.lock().remove(&job);
    }

    /// The process is gone.
    pub fn forget_process(&self, process: u64) {
        self.telling.lock().remove(&process);
    }
}

#[cfg(test)]
mod tests {
    use millrace_storage::read_counts::READ_BURST;

    use super::*;

    #[test]
    fn what_processes_tell_is_added_up_until_a_merge() {
        let lookups = Lookups::default();
        let (job, gone) = (RelationId(1), RelationId(2));
        let told = |job: JobId, keys, cold| TableLookups { job: job.0, table: 7, keys, cold };
        let add = |told| !lookups.add(3, &[told], |id| id == job).is_empty();
        assert!(!lookups.has_told(3));
        assert!(!add(told(job, READ_BURST - 1, 3)));
        assert!(!lookups.since_merge(job, 7).are_many());
        assert!(add(told(job, 1, 0)), "those of several processes together");
        assert!(!add(told(job, 1, 0)));
        assert!(add(told(job, READ_BURST, 0)), "twice as many");
        let reads = TableReads { keys: 2 * READ_BURST + 1, cold: 3 };
        assert_eq!(lookups.since_merge(job, 7), reads);
        assert_eq!(lookups.since_merge(job, 8), TableReads::default(), "nobody has looked it up");
        assert!(!add(told(gone, READ_BURST, 0)));
        assert_eq!(lookups.since_merge(gone, 7), TableReads::default());
        lookups.merged(job, 7);
        assert_eq!(lookups.since_merge(job, 7), TableReads::default());
        assert!(add(told(job, READ_BURST, 0)), "the next burst");
        lookups.forget(job);
        assert!(lookups.counts.lock().is_empty());
        assert!(lookups.has_told(3) && !lookups.has_told(4));
        lookups.forget_process(3);
        assert!(!lookups.has_told(3));
    }
}
