//! How a generation of a job begins: from what is committed, or where it runs already.
//!
//! A leader that takes over finds jobs running, which know nothing of the change but that no cuts come. It asks the
//! process of each for its generation, and goes on with it: what was cut and is not in the log is logged now, by the
//! numbers that it was given, and the next cut has the number after these. Nothing is lost of what tasks have in memory,
//! and no statement that waits has to be sent again.

use std::time::Duration;

use millrace_common::fault_injection::is_planted;
use millrace_common::{Generation, SqlError, SqlState};
use millrace_rpc::log::{Entry, Rebuild};
use millrace_rpc::services::{RunningJob, StartJob};
use tracing::{info, warn};

use super::{Driver, ExitReason, INPUT_START_LIMIT, Publishing, Settles};
use crate::in_flight::InFlight;
use crate::state::is_derived;

/// Between two questions to a process that does not answer.
const PAUSE: Duration = Duration::from_millis(200);
/// How long it is asked, unless it is fenced before: longer than a lost one's lease.
const LIMIT: Duration = Duration::from_secs(12);

impl Driver {
    /// Has the job's process run this generation. `Some`: it did before, and this is what it has sealed and the log lacks.
    pub(super) async fn open(
        &self,
        generation: Generation,
    ) -> Result<Option<RunningJob>, ExitReason> {
        // Reads of its inputs there miss nothing from now on.
        self.shared.wait_begun(self.handle.id).await;
        if self.takes_inherited(generation) && !is_planted("not-adopted") {
            if let Some(running) = self.adopt(generation).await? {
                return Ok(Some(running));
            }
            if self.is_root() {
                // Other tables may have sealed parts of transactions of which this one's part is lost.
                self.shared.groups.abort(self.handle.id, generation);
                self.raise_generation().await?;
                return Err(ExitReason::Superseded);
            }
        }
        self.start(generation).await?;
        Ok(None)
    }

    /// Whether the inputs keep a snapshot that the job can begin at. Known when they have been asked for what earlier
    /// leaders have allowed them to drop.
    pub(super) async fn inputs_keep_snapshot(&self) -> bool {
        self.await_inputs_attempted().await;
        self.shared.inputs_keep_snapshot(self.handle.id)
    }

    async fn await_inputs_attempted(&self) {
        let inputs = self.shared.state.read().inputs(self.handle.id).to_vec();
        for handle in inputs.iter().filter_map(|input| self.shared.job(*input)) {
            // Its first start is bounded in time.
            while !handle.wait_attempted(INPUT_START_LIMIT).await {}
        }
    }

    /// A first scan whose versions may be gone is not started: it begins anew, at another epoch.
    async fn check_snapshot(&self) -> Result<(), ExitReason> {
        let is_caught_up = self.shared.state.read().is_caught_up(self.handle.id);
        if is_caught_up && self.commits() > 0 {
            return Ok(());
        }
        self.await_inputs_attempted().await;
        if !self.shared.has_lost_snapshot(self.handle.id) {
            return Ok(());
        }
        warn!(job = %self.label(), "inputs have dropped versions of the epoch that a first scan reads: it begins anew");
        match self.append(Entry::Rebuild(Rebuild { job: self.handle.id.0 })).await? {
            Ok(_) => Err(ExitReason::Superseded),
            Err(void) => Err(ExitReason::Failed(void.into())),
        }
    }

    /// Has the job's process start the tasks, if the job has any, from what is committed.
    async fn start(&self, generation: Generation) -> Result<(), ExitReason> {
        self.check_snapshot().await?;
        let Some(order) = self.order(generation) else {
            return Err(SqlError::new(SqlState::UNDEFINED_TABLE, "the relation was dropped").into());
        };
        self.handle.set_stopped();
        self.compute.start_job(order).await?;
        // Its state is as of this record or a later one.
        self.handle.set_applied(order.record);
        self.has_begun(generation);
        info!(job = %self.label(), generation = generation.0, "job started");
        Ok(())
    }

    /// `None`: there is no such job.
    fn order(&self, generation: Generation) -> Option<StartJob> {
        let state = self.shared.state.read();
        let job = self.handle.id;
        let relation = state.relations.get(&job).filter(|_| state.jobs.contains_key(&job))?;
        let own = Some(relation.parallelism as usize).filter(|tasks| *tasks > 0);
        let parallelism = own.unwrap_or(self.shared.parallelism);
        Some(StartJob { job, generation, record: state.number, parallelism })
    }

    fn has_begun(&self, generation: Generation) {
        // The worker is told again what has risen since.
        self.shared.committed.lock().insert(self.handle.id);
        self.handle.set_started(generation);
        self.shared.compaction.look_at([self.handle.id]);
    }

    fn is_root(&self) -> bool {
        let state = self.shared.state.read();
        state.relations.get(&self.handle.id).is_some_and(|relation| !is_derived(relation))
    }

    /// Whether this generation was there before this process led. Asked once: later it is this leader's own.
    fn takes_inherited(&self, generation: Generation) -> bool {
        self.shared.inherited.lock().remove(&self.handle.id) == Some(generation)
    }

    /// Goes on with a generation that runs. `None`: it does not, or is at another place than the log.
    async fn adopt(&self, generation: Generation) -> Result<Option<RunningJob>, ExitReason> {
        let commits = self.commits();
        let Some(running) = self.ask_running(generation, commits).await? else {
            info!(job = %self.label(), generation = generation.0, "job does not run");
            return Ok(None);
        };
        let Some(running) = following(running, commits) else {
            warn!(job = %self.label(), generation = generation.0, "job is not where the log says");
            return Ok(None);
        };
        // Before anything that the process writes is logged.
        self.handle.raise_horizon(running.horizon);
        self.has_begun(generation);
        // Statements may wait whose request for a cut was lost with the leader before.
        self.handle.request_cut();
        let sealed = running.sealed.len();
        info!(job = %self.label(), generation = generation.0, sealed, "job goes on");
        Ok(Some(running))
    }

    /// Asks until there is an answer, for a bounded time; the end of the generation ends it before.
    async fn ask_running(
        &self,
        generation: Generation,
        after: u64,
    ) -> Result<Option<RunningJob>, ExitReason> {
        let began = self.shared.env.now();
        loop {
            let record = self.shared.state.read().number;
            match self.compute.adopt_job(self.handle.id, generation, record, after).await {
                Ok(running) => return Ok(running),
                Err(error)
                    if error.state == SqlState::CONNECTION_FAILURE
                        && self.shared.env.elapsed(began) < LIMIT =>
                {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Has what a process had sealed for an earlier leader logged like what it seals for this one, also what becomes of a
    /// cut that was under way: that may wait until what was sealed before is logged.
    pub(super) async fn take_sealed<'a, 'g: 'a>(
        &'g self,
        generation: Generation,
        mut running: RunningJob,
        in_flight: &mut InFlight<'a, ExitReason>,
        publishing: &'a Publishing<'g>,
    ) -> Result<(), ExitReason> {
        loop {
            let number = running.number;
            for commit in running.sealed {
                in_flight.take_number();
                let begun = self.shared.env.now();
                // As of which record it was cut is not known.
                let commit = (commit, Settles::default());
                self.take(generation, commit, begun, in_flight, publishing).await?;
            }
            if !running.is_cutting {
                return Ok(());
            }
            let asked = in_flight.during(self.ask_running(generation, number)).await??;
            let ended = || SqlError::internal("the job has ended in the cut that was under way");
            running = asked.and_then(|job| following(job, number)).ok_or_else(ended)?;
        }
    }
}

/// What a process runs, with what of the sealed commits comes after number `commits`; `None`: they do not follow that.
/// What the log has already is one with it.
fn following(mut running: RunningJob, commits: u64) -> Option<RunningJob> {
    if is_planted("adopted-without-parts") {
        (running.sealed, running.number) = (Vec::new(), commits);
    }
    running.sealed.retain(|commit| commit.number > commits);
    let sealed = &running.sealed;
    let follow = sealed.iter().zip(commits + 1..).all(|(commit, next)| commit.number == next);
    let newest = sealed.last().map_or(commits, |commit| commit.number);
    (follow && newest == running.number).then_some(running)
}

#[cfg(test)]
mod tests {
    use millrace_rpc::version::JobCommit;

    use super::*;

    #[test]
    fn what_is_sealed_must_follow_what_is_committed() {
        let commit = |number: &u64| JobCommit { number: *number, ..JobCommit::default() };
        let fit = |sealed: &[u64], number, commits| {
            let sealed = sealed.iter().map(commit).collect();
            let running = RunningJob { number, sealed, ..RunningJob::default() };
            let lacking = following(running, commits)?.sealed;
            Some(lacking.iter().map(|commit| commit.number).collect::<Vec<_>>())
        };
        assert_eq!(fit(&[], 4, 4), Some(vec![]));
        assert_eq!(fit(&[5, 6], 6, 4), Some(vec![5, 6]));
        assert_eq!(fit(&[4, 5], 5, 4), Some(vec![5]), "the log has one of them already");
        assert_eq!(fit(&[4], 4, 4), Some(vec![]));
        assert_eq!(fit(&[6], 6, 4), None, "one is missing");
        assert_eq!(fit(&[5], 6, 4), None, "one is lost");
        assert_eq!(fit(&[], 3, 4), None, "the log is ahead");
    }
}
