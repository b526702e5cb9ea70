//! Which compactions are under way, and which jobs wait for one: for who asks.
//!
//! The scheduler writes it. What waits is what it has found when it last looked at a job: it looks when a compaction
//! begins and when one has ended.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_common::JobId;
use millrace_rpc::control::{CompactionReport, CompactionState};
use millrace_rpc::version::RunMeta;
use parking_lot::Mutex;
use tokio::time::Instant;

/// What is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    pub job: JobId,
    pub table: u32,
    pub runs: u64,
    pub bytes: u64,
    pub target_level: u32,
}

impl Merge {
    pub fn of(job: JobId, inputs: &[RunMeta], target_level: u32) -> Merge {
        Merge {
            job,
            table: inputs.first().map_or(0, |run| run.table_id),
            runs: inputs.len() as u64,
            bytes: inputs.iter().map(|run| run.length).sum(),
            target_level,
        }
    }

    fn report(&self, state: CompactionState, process: u64, lasts: Duration) -> CompactionReport {
        CompactionReport {
            relation: self.job.0,
            table: self.table,
            state: state as i32,
            process,
            runs: self.runs,
            bytes: self.bytes,
            target_level: self.target_level,
            for_ms: u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Task {
    merge: Merge,
    state: CompactionState,
    /// Of the process that does it; 0: not known.
    process: u64,
    since: Instant,
}

#[derive(Debug, Default)]
struct Board {
    /// By the number of the task.
    tasks: BTreeMap<u64, Task>,
    /// The best merge of each job that has one, and since when it has had one.
    queued: BTreeMap<JobId, (Merge, Instant)>,
}

/// See the module. Bounded by the number of jobs, and of compactions at a time.
#[derive(Debug, Default)]
pub struct CompactionBoard(Mutex<Board>);

impl CompactionBoard {
    /// The best merge that a job has now; `None`: it has none.
    pub fn queue(&self, job: JobId, merge: Option<Merge>, now: Instant) {
        let queued = &mut self.0.lock().queued;
        match merge {
            Some(merge) => queued.entry(job).or_insert((merge, now)).0 = merge,
            None => drop(queued.remove(&job)),
        }
    }

    /// A task begins; the job waits for it no longer. `process`: who does it, if it is known by now; else 0.
    pub fn begin(&self, task: u64, merge: Merge, process: u64, now: Instant) {
        let board = &mut *self.0.lock();
        board.queued.remove(&merge.job);
        let state = CompactionState::Running;
        board.tasks.insert(task, Task { merge, state, process, since: now });
    }

    /// A process has been given the task.
    pub fn assign(&self, task: u64, process: u64) {
        if let Some(task) = self.0.lock().tasks.get_mut(&task) {
            task.process = process;
        }
    }

    /// Who does it; 0: it is not known.
    pub fn process_of(&self, task: u64) -> u64 {
        self.0.lock().tasks.get(&task).map_or(0, |task| task.process)
    }

    /// It has failed; its runs are free after a pause.
    pub fn fail(&self, task: u64, now: Instant) {
        if let Some(task) = self.0.lock().tasks.get_mut(&task) {
            (task.state, task.since) = (CompactionState::Failed, now);
        }
    }

    /// Its runs are free again.
    pub fn end(&self, task: u64) {
        self.0.lock().tasks.remove(&task);
    }

    /// Those under way first, in their order, then those that wait, by job.
    pub fn reports(&self, now: Instant) -> Vec<CompactionReport> {
        let board = self.0.lock();
        let lasts = |since: Instant| now.saturating_duration_since(since);
        let tasks = board.tasks.values();
        let tasks = tasks.map(|t| t.merge.report(t.state, t.process, lasts(t.since)));
        let queued = board.queued.values();
        let queued = queued.map(|(m, since)| m.report(CompactionState::Queued, 0, lasts(*since)));
        tasks.chain(queued).collect()
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::RelationId;

    use super::*;

    #[test]
    fn a_merge_waits_runs_fails_and_ends() {
        let (board, start) = (CompactionBoard::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let run = |table_id, length| RunMeta { table_id, length, ..RunMeta::default() };
        let merge = |job, level| Merge::of(RelationId(job), &[run(7, 10), run(7, 20)], level);
        let states = |now| {
            let reports = board.reports(now);
            let state = |r: &CompactionReport| (r.relation, r.state(), r.process, r.for_ms);
            reports.iter().map(state).collect::<Vec<_>>()
        };
        board.queue(RelationId(1), Some(merge(1, 1)), at(0));
        board.queue(RelationId(2), Some(merge(2, 1)), at(0));
        board.queue(RelationId(1), Some(merge(1, 2)), at(1));
        let report = &board.reports(at(2))[0];
        assert_eq!((report.table, report.runs, report.bytes, report.target_level), (7, 2, 30, 2));
        let (queued, running) = (CompactionState::Queued, CompactionState::Running);
        assert_eq!(states(at(2)), [(1, queued, 0, 2_000), (2, queued, 0, 2_000)]);
        board.begin(5, merge(2, 1), 0, at(2));
        board.assign(5, 9);
        assert_eq!(states(at(3)), [(2, running, 9, 1_000), (1, queued, 0, 3_000)]);
        board.fail(5, at(3));
        board.queue(RelationId(1), None, at(3));
        assert_eq!(states(at(4)), [(2, CompactionState::Failed, 9, 1_000)]);
        board.end(5);
        assert_eq!(states(at(4)), []);
    }
}
