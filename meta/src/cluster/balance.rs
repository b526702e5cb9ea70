//! Looks now and then whether a job is to move because loads have changed ([`crate::rebalance`]), and has it moved.
//!
//! It looks while all processes are well and nothing else is to be placed. Between the decision and the record both may
//! change, so the move is looked at once more in its turn; what comes between that and the record does no harm, since any
//! placement is as good to the log as another.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::task::spawn;
use millrace_common::{JobId, SqlError};
use millrace_rpc::log::{Entry, PlaceJobs};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::{Cluster, SILENT, superseded};
use crate::placement;
use crate::rebalance::{Look, Move, Rebalancer};
use crate::status::JobState;

/// A look that is due and comes later than this: this process has stood still, and knows little of the time before.
const LATE: Duration = Duration::from_secs(3);

/// What looks have seen, and what has come of them.
#[derive(Debug, Default)]
pub(super) struct Balance {
    /// When the last one was.
    looked: Option<Instant>,
    seen: Rebalancer,
    /// How many jobs were moved.
    moved: u64,
}

impl Cluster {
    /// How many jobs this leader has moved for their loads.
    pub fn rebalanced(&self) -> u64 {
        self.balance.lock().moved
    }

    /// Called each second: looks if it is time to. What is to be done then goes on by itself.
    pub(super) fn rebalance(self: &Arc<Cluster>) {
        let (interval, now) = (self.shared.settings().rebalance_interval, self.shared.env.now());
        let Some(found) = self.look_for_move(interval, now) else { return };
        let cluster = Arc::clone(self);
        let moving = async move { cluster.move_for_load(found).await };
        let shutdown = self.shared.shutdown.clone();
        spawn("move a job for its load", shutdown.run_until_cancelled_owned(moving));
    }

    fn look_for_move(&self, interval: Duration, now: Instant) -> Option<Move> {
        let mut balance = self.balance.lock();
        let balance = &mut *balance;
        let passed = now.saturating_duration_since(*balance.looked.get_or_insert(now));
        if passed < interval {
            return None;
        }
        balance.looked = Some(now);
        if interval.is_zero() || passed > interval + LATE {
            balance.seen.forget();
            return None;
        }
        let found = self.see_loads(|look| balance.seen.look(look));
        if found.is_none() {
            balance.seen.forget();
        }
        found.flatten()
    }

    /// What a look sees, given to `see`. `None`: not all is well, or something else is to be placed.
    fn see_loads<T>(&self, see: impl FnOnce(&Look<'_>) -> T) -> Option<T> {
        let now = self.shared.env.now();
        if self.has_come() || !self.lost().is_empty() {
            return None;
        }
        let computes = self.computes.incarnations();
        let state = self.shared.state.read();
        let takers = placement::takers(&state, &computes);
        let loads = self.shared.loads.loads(&state);
        let members = &self.shared.members;
        let is_told = |id: &u64| members.heartbeat_age(*id, now).is_some_and(|age| age <= SILENT);
        let store_waits = members.store_waits(&state.processes, now);
        let all_well = computes.iter().all(is_told)
            && store_waits.iter().all(|(_, wait)| *wait <= SILENT)
            && !members.is_any_unreached(&state.processes);
        if !all_well
            || !superseded(&state).is_empty()
            || !placement::plan(&state, &loads, &takers, false).is_empty()
        {
            return None;
        }
        let is_running = |id: JobId| {
            let job = self.shared.job(id);
            job.is_some_and(|job| job.state() == JobState::Running)
        };
        let loads = self.shared.loads.told(&state, now);
        let (state, takers) = (&*state, &takers[..]);
        Some(see(&Look { state, loads: &loads, takers, is_running: &is_running }))
    }

    async fn move_for_load(&self, found: Move) {
        match self.try_move(&found).await {
            Ok(true) => {
                let mut balance = self.balance.lock();
                balance.moved += 1;
                balance.seen.note_moved(found.job);
            }
            Ok(false) => debug!(job = %found.job, "a job has no reason to move any more"),
            Err(error) => warn!(%error, job = %found.job, "a job was not moved for its load"),
        }
    }

    /// Whether the job was moved: it is not where something has changed since it was decided.
    async fn try_move(&self, found: &Move) -> Result<bool, SqlError> {
        self.check_answers(found.to).await?;
        let _one = self.turn.lock().await;
        let is_same = |look: &Look<'_>| look.moves().iter().any(|other| other.is_same(found));
        if self.see_loads(is_same) != Some(true) {
            return Ok(false);
        }
        let Move { job, from, to, load, from_load, to_load } = *found;
        let (label, cores) = (self.shared.label(job), |load: u64| load as f64 / 1e3);
        let jobs = vec![job.0];
        self.append(Entry::PlaceJobs(PlaceJobs { incarnation: to, jobs, by_operator: false }))
            .await?;
        info!(
            job = %label,
            from,
            to,
            load = cores(load),
            from_load = cores(from_load),
            to_load = cores(to_load),
            "a job moves to a process that takes less of the cores"
        );
        Ok(true)
    }
}
