//! Which versions of rows jobs may drop, and whether first scans find the versions that they read (docs/design.md §4).
//!
//! A horizon counts from the moment when it is given out: the process that runs the job is told it, or a compaction has it
//! in its task. What either writes from then on may hold no versions below, and the log learns of that only with an edit.
//!
//! The epoch of a first scan is fixed by the log, which does not know of these horizons. From then on no horizon of an
//! input passes that epoch. Before, one may have: where one input has fallen far behind, the newest epoch that all inputs
//! have in common is old, and others may have been given later horizons. So no scan is asked for before there is an epoch
//! that all inputs keep, and one whose epoch was fixed too low all the same, by the record that created the job or because
//! a horizon was given out meanwhile, is not started: it begins anew at another epoch.

use std::collections::BTreeMap;

use millrace_common::fault_injection::is_planted;
use millrace_common::{Epoch, JobId, RelationId};

use crate::fold::position;
use crate::gc::{before, horizon};
use crate::shared::Shared;
use crate::state::MetaState;

impl Shared {
    /// Gives out the horizon of a job. `None`: it is gone.
    pub fn give_horizon(&self, id: JobId) -> Option<Epoch> {
        let (now_ms, limit) = self.kept_by_time();
        let written = |id, bytes| self.written_since(id, bytes);
        let handle = self.job(id)?;
        let _giving = self.giving.lock();
        let horizon = horizon(&self.state.read(), id, limit, now_ms, &written);
        handle.raise_horizon(horizon);
        Some(horizon)
    }

    /// Gives out the horizons of these jobs; returns those that have risen. Afterwards only jobs are left whose horizon
    /// has not reached their newest version, each with the horizon that it was given.
    pub fn give_horizons(&self, jobs: &mut BTreeMap<JobId, Epoch>) -> Vec<(JobId, Epoch)> {
        let (now_ms, limit) = self.kept_by_time();
        let written = |id, bytes| self.written_since(id, bytes);
        let mut raised = Vec::new();
        let _giving = self.giving.lock();
        let state = self.state.read();
        jobs.retain(|id, known| {
            let Some(job) = state.jobs.get(id) else { return false };
            let horizon = horizon(&state, *id, limit, now_ms, &written);
            if horizon > *known {
                *known = horizon;
                raised.push((*id, horizon));
            }
            horizon < Epoch(job.version.epoch)
        });
        for (id, horizon) in &raised {
            if let Some(handle) = self.job(*id) {
                handle.raise_horizon(*horizon);
            }
        }
        raised
    }

    /// The wall clock, and the epoch from which on versions are kept for whoever may read them, or does.
    fn kept_by_time(&self) -> (u64, Epoch) {
        let now_ms = self.env.now_ms();
        let limit = before(now_ms, self.settings().snapshot_retention);
        let leader = self.incarnation.get().copied().unwrap_or_default();
        (now_ms, self.members.reads_from(leader).map_or(limit, |read| read.min(limit)))
    }

    /// The oldest epoch whose versions none of these has been allowed to drop, as far as this leader knows: what an
    /// earlier one has given out it knows of a job whose start it has attempted.
    pub fn kept_from(&self, state: &MetaState, ids: &[RelationId]) -> Epoch {
        let kept = |id: &RelationId| {
            let logged = state.jobs.get(id).map_or(Epoch::ZERO, |job| job.horizon);
            self.job(*id).map_or(logged, |handle| handle.horizon().max(logged))
        };
        ids.iter().map(kept).max().unwrap_or(Epoch::ZERO)
    }

    /// Whether the inputs of a job keep the newest snapshot that they have in common.
    pub fn inputs_keep_snapshot(&self, id: JobId) -> bool {
        let _giving = self.giving.lock();
        let state = self.state.read();
        let inputs = state.inputs(id);
        let newest = state.exact_common(inputs, Epoch::MAX);
        let kept = || self.kept_from(&state, inputs);
        newest.is_some_and(|epoch| epoch >= kept() || is_planted("scan-below-horizon"))
    }

    /// Whether a job has not come beyond its first scan, and its inputs may have dropped versions of the epoch at which it
    /// begins.
    pub fn has_lost_snapshot(&self, id: JobId) -> bool {
        // A horizon that was computed before that epoch was fixed has been given out now.
        let _giving = self.giving.lock();
        let state = self.state.read();
        let Some(job) = state.jobs.get(&id) else { return false };
        let begins = job.version.backfill.is_some() || job.version.commits == 0;
        let is_lost = || position(job) < self.kept_from(&state, &job.inputs);
        begins && is_lost() && !is_planted("scan-below-horizon")
    }
}
