//! Where an operator has jobs run.

use millrace_common::{JobId, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::log::{Entry, PlaceJobs};
use millrace_rpc::version::StatementId;
use tracing::info;

use super::{Cluster, not_now};
use crate::operator::check_worker;
use crate::placement;
use crate::state::{JobRecord, MetaState};

impl Cluster {
    /// Has a job run on a process from now on, and with a table all that write to tables. No load moves them from there.
    /// Returns those that ran elsewhere. Refused if that one does not answer. What an earlier call of the same id has moved
    /// stays where it is by now. Process 0: they stay where they are, until there is a reason to move them.
    pub async fn move_job(
        &self,
        job: JobId,
        worker: u64,
        id: Option<StatementId>,
    ) -> Result<Vec<u32>, CallError> {
        let is_done = || self.shared.state.read().is_done(id);
        if is_done() {
            return Ok(Vec::new());
        }
        if worker == 0 {
            self.undo_move(job, id).await?;
            return Ok(Vec::new());
        }
        check_worker(&self.shared.state.read(), worker)?;
        self.check_answers(worker).await?;
        let _one = self.turn.lock().await;
        // Another attempt may have had its turn before this one.
        if is_done() {
            return Ok(Vec::new());
        }
        let (entry, moved) = {
            let state = self.shared.state.read();
            check_worker(&state, worker)?;
            if state.processes.is_drained(worker) {
                let message = format!("process {worker} is drained: it is given no jobs");
                return Err(not_now(message)
                    .with_hint("millrace ctl drain --undo allows them again.")
                    .into());
            }
            let group = group_of(&state, job)?;
            let of_group = group.iter().filter_map(|id| Some((id.0, state.jobs.get(id)?)));
            let is_news = |(_, job): &(u32, &JobRecord)| job.process != worker || !job.by_operator;
            let placed: Vec<(u32, &JobRecord)> = of_group.filter(is_news).collect();
            let elsewhere = placed.iter().filter(|(_, job)| job.process != worker);
            let moved: Vec<u32> = elsewhere.map(|(id, _)| *id).collect();
            let jobs = placed.iter().map(|(id, _)| *id).collect();
            (PlaceJobs { incarnation: worker, jobs, by_operator: true }, moved)
        };
        if !entry.jobs.is_empty() {
            info!(incarnation = worker, jobs = ?entry.jobs, "jobs are placed by an operator");
            self.append_by(id, Entry::PlaceJobs(entry)).await?;
        }
        Ok(moved)
    }

    /// A job, and with a table all that write to tables, may be placed elsewhere again though an operator has moved it.
    async fn undo_move(&self, job: JobId, id: Option<StatementId>) -> Result<(), CallError> {
        let _one = self.turn.lock().await;
        let entry = {
            let state = self.shared.state.read();
            // Another attempt may have had its turn before this one.
            if state.is_done(id) {
                return Ok(());
            }
            let group = group_of(&state, job)?;
            // All of a group run on one process.
            let incarnation = state.jobs.get(&job).map_or(0, |job| job.process);
            let is_there = |id: &&JobId| {
                let job = state.jobs.get(id);
                job.is_some_and(|job| job.process == incarnation && job.by_operator)
            };
            let jobs = group.iter().filter(is_there).map(|id| id.0).collect();
            PlaceJobs { incarnation, jobs, by_operator: false }
        };
        if !entry.jobs.is_empty() {
            info!(jobs = ?entry.jobs, "a move is undone by an operator: jobs may run elsewhere");
            self.append_by(id, Entry::PlaceJobs(entry)).await?;
        }
        Ok(())
    }
}

/// See [`placement::group_of`]; an error if there is no such job.
fn group_of(state: &MetaState, job: JobId) -> Result<Vec<JobId>, SqlError> {
    placement::group_of(state, job).ok_or_else(|| {
        SqlError::new(SqlState::UNDEFINED_OBJECT, format!("there is no job {}", job.0))
    })
}
