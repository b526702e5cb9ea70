//! What is told of jobs, sources and the log: SHOW JOBS, SHOW SOURCES, metrics.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, Generation, RelationId};
use millrace_rpc::version::JobVersion;

use crate::job::JobHandle;
use crate::log::{AppendStats, AppendWait, encode_snapshot};
use crate::meta::Meta;
use crate::read;
use crate::segments::RewriteStats;
use crate::source::SourceState;
use crate::state::JobRecord;
use crate::status::{JobState, JobStatus, STALL_AFTER, ahead_of_clock};

/// A source and how far it is.
#[derive(Clone, Debug)]
pub struct SourceReport {
    pub state: SourceState,
    pub reason: Option<String>,
    pub splits: Vec<SplitReport>,
    /// Files found.
    pub files: usize,
}

#[derive(Clone, Debug)]
pub struct SplitReport {
    pub split: u32,
    pub name: String,
    pub start: u64,
    /// Where its content ends.
    pub offset: u64,
    /// Of a table's connector: what the table has committed.
    pub taken: Option<u64>,
    /// How far it could go; `None`: not known, or no limit.
    pub available: Option<u64>,
}

impl Meta {
    pub fn job_statuses(&self) -> Vec<JobStatus> {
        let ids: Vec<RelationId> = self.shared.state.read().jobs.keys().copied().collect();
        ids.into_iter().filter_map(|id| self.job_status(id)).collect()
    }

    pub fn job_status(&self, id: RelationId) -> Option<JobStatus> {
        let handle = self.shared.job(id);
        let state = self.shared.state.read();
        let job = state.jobs.get(&id)?;
        let frontier = state.readable_frontier(id);
        let newest = state.newest_root_change(&state.closure(&[id]));
        let known = frontier.unwrap_or(newest);
        let lag_ms = match newest > known {
            true => read::oldest_missing(&self.shared, &state, id)
                .unwrap_or_else(|| newest.millis().saturating_sub(known.millis())),
            false => 0,
        };
        Some(JobStatus {
            relation: id,
            state: state_of(handle.as_deref(), job),
            generation: Generation(job.version.generation),
            epoch: Epoch(job.version.epoch),
            frontier,
            lag_ms,
            row_count: job.version.row_count,
            version: Arc::clone(&job.version),
            stalled: handle
                .as_ref()
                .and_then(|h| h.cutting_for(&*self.shared.env))
                .filter(|d| *d > STALL_AFTER),
            logging: handle.as_ref().and_then(|h| h.logging_for(&*self.shared.env)),
            published: job.version.published.max(handle.as_ref().map_or(0, |h| h.published())),
            staged: staged(&job.version, handle.as_ref().map_or(0, |h| h.published())),
            counters: handle.map(|h| h.counters()).unwrap_or_default(),
            ahead: ahead_of_clock(state.epoch, self.shared.env.now_ms()),
        })
    }

    /// A source, or the connector of a table; `None`: there is none of this id.
    pub fn source_report(&self, id: RelationId) -> Option<SourceReport> {
        let status = self.shared.source_status(id);
        let state = self.shared.state.read();
        let splits = state.split_reports(id, &status.available)?;
        let files = state.source_parts(id).files.len();
        Some(SourceReport { state: status.state, reason: status.reason, splits, files })
    }

    /// Bytes of the store's objects that versions name.
    pub fn live_bytes(&self) -> u64 {
        self.shared.state.read().objects.all_live_bytes()
    }

    /// What segments with little live data have been rewritten.
    pub fn rewrite_stats(&self) -> RewriteStats {
        self.shared.rewrites.read()
    }

    /// How the store takes appends to the log.
    pub fn append_stats(&self) -> AppendStats {
        self.shared.log().map(|log| log.append_stats()).unwrap_or_default()
    }

    /// The append to the log that is under way, which commits wait for.
    pub fn append_wait(&self) -> Option<AppendWait> {
        self.shared.log().ok()?.append_wait()
    }

    /// For how long the object store has answered this leader nothing, where it waits for an answer; zero: it answers, though
    /// it may take its time for a record, or asks for fewer requests. After some seconds another process that the store
    /// answers leads better.
    pub fn store_wait(&self) -> Duration {
        self.shared.log().map(|log| log.store_wait()).unwrap_or_default()
    }

    /// Bytes of a snapshot of the log, if one were taken now.
    pub fn snapshot_bytes(&self) -> usize {
        let state = self.shared.state.read().for_snapshot();
        encode_snapshot(&state).len()
    }
}

/// Handles that a sink's target does not have; it is known to have those up to `published`.
fn staged(version: &JobVersion, published: u64) -> usize {
    version.publish.iter().filter(|h| h.sequence > published).count()
}

/// What a job does, as its driver says. One that was just told to compute its relation anew does so before its driver
/// says it: whoever waits for rebuilds waits for it.
fn state_of(handle: Option<&JobHandle>, job: &JobRecord) -> JobState {
    let state = match handle.map_or(JobState::Starting, |h| h.state()) {
        // It was until now: a sink that is told to begin anew can be resumed at once.
        JobState::Detached { .. } if job.version.detached.is_none() => JobState::Starting,
        state => state,
    };
    let own = Generation(job.version.generation);
    let is_old = handle.is_some_and(|h| h.generation().is_some_and(|known| known < own));
    let says_nothing = matches!(state, JobState::Starting | JobState::Running);
    let Some(backfill) = &job.version.backfill else { return state };
    let (rows_read, rows_total) = (backfill.rows_read, backfill.rows_total);
    match job.version.is_rebuilding() {
        true if is_old || says_nothing => JobState::Rebuilding { rows_read, rows_total },
        false if is_old => JobState::Creating { rows_read, rows_total },
        _ => state,
    }
}
