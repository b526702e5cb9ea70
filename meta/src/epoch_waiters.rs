//! Who waits for which job to reach which epoch.

use std::collections::BTreeMap;

use millrace_common::collections::HashMap;
use millrace_common::{Epoch, JobId};
use parking_lot::Mutex;

use crate::schedule::Wants;

#[derive(Debug, Default)]
struct Counts {
    aligned: usize,
    reach: usize,
}

/// All waits in force. Bounded by the number of waiting statements, readers and sinks.
#[derive(Debug, Default)]
pub struct Waits {
    targets: Mutex<HashMap<JobId, BTreeMap<Epoch, Counts>>>,
    /// How many wait for the next change of each, whenever that is.
    followers: Mutex<HashMap<JobId, usize>>,
}

/// Holds the interest of somebody who waits for changes; dropping it ends it.
pub struct FollowGuard<'a> {
    waits: &'a Waits,
    jobs: Vec<JobId>,
}

/// Holds a wait; dropping it ends it (also when the statement is cancelled).
pub struct WaitGuard<'a> {
    waits: &'a Waits,
    jobs: Vec<JobId>,
    target: Epoch,
    aligned: bool,
}

impl Waits {
    /// The jobs are to reach `target`; `aligned`: to be exact just there.
    pub fn register(&self, jobs: Vec<JobId>, target: Epoch, aligned: bool) -> WaitGuard<'_> {
        let mut targets = self.targets.lock();
        for job in &jobs {
            let counts = targets.entry(*job).or_default().entry(target).or_default();
            *(if aligned { &mut counts.aligned } else { &mut counts.reach }) += 1;
        }
        drop(targets);
        WaitGuard { waits: self, jobs, target, aligned }
    }

    /// The jobs are to end an epoch whenever there is something in it.
    pub fn follow(&self, jobs: Vec<JobId>) -> FollowGuard<'_> {
        let mut followers = self.followers.lock();
        jobs.iter().for_each(|job| *followers.entry(*job).or_default() += 1);
        drop(followers);
        FollowGuard { waits: self, jobs }
    }

    pub fn wants(&self, job: JobId) -> Wants {
        let followed = self.followers.lock().contains_key(&job);
        let targets = self.targets.lock();
        let Some(epochs) = targets.get(&job) else {
            return Wants { followed, ..Wants::default() };
        };
        let pick = |f: fn(&Counts) -> usize| {
            epochs.iter().filter(|(_, c)| f(c) > 0).map(|(e, _)| *e).collect()
        };
        let (aligned, reach) = (pick(|c| c.aligned), pick(|c| c.reach));
        Wants { followed, aligned, reach, ..Wants::default() }
    }
}

impl Drop for FollowGuard<'_> {
    fn drop(&mut self) {
        let mut followers = self.waits.followers.lock();
        for job in &self.jobs {
            if let Some(count) = followers.get_mut(job) {
                *count -= 1;
                if *count == 0 {
                    followers.remove(job);
                }
            }
        }
    }
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        let mut targets = self.waits.targets.lock();
        for job in &self.jobs {
            let Some(epochs) = targets.get_mut(job) else { continue };
            if let Some(counts) = epochs.get_mut(&self.target) {
                *(if self.aligned { &mut counts.aligned } else { &mut counts.reach }) -= 1;
                if counts.aligned == 0 && counts.reach == 0 {
                    epochs.remove(&self.target);
                }
            }
            if epochs.is_empty() {
                targets.remove(job);
            }
        }
    }
}
