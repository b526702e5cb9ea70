//! One task per job: starts its tasks, cuts its epochs, commits them, and starts it again when it fails.
//!
//! A driver shares with other drivers only the log writer and the state's lock, neither of which ever
//! waits for a job: a job that hangs or fails delays nobody. A cancelled driver (DROP) stops at its next
//! await, whatever it awaits.

mod settled;
mod sink;
mod start;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use millrace_common::{Env, Epoch, Generation, JobId, SqlError, SqlState};
use millrace_rpc::log::{Entry, RaiseGenerations, StartBackfill, Tick};
use millrace_rpc::services::{ComputeService, Cut, RunningJob};
use millrace_rpc::version::JobCommit;
use tokio::time::Instant;
use tracing::{info, warn};

use self::settled::Settles;
use self::sink::Publishing;
use crate::commit_volume::bytes_of;
use crate::error::{VoidReason, is_skewed};
use crate::fold::Verdict;
use crate::in_flight::{InFlight, Turn};
use crate::job::{JobHandle, Sealed};
use crate::schedule::{Pace, Position, Step, next_step};
use crate::shared::Shared;
use crate::status::JobState;

const BACKOFF_MIN: Duration = Duration::from_millis(200);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// How long a job waits before it looks whether a full store has space again.
const FULL_PAUSE: Duration = Duration::from_secs(1);
/// How long a failed generation may take to stop before the next one starts all the same: what it
/// still does is fenced by its generation.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// How long a job waits for its inputs' first start.
const INPUT_START_LIMIT: Duration = Duration::from_secs(5);

/// Longest sleep towards an instant of the wall clock.
const CLOCK_STEP: Duration = Duration::from_secs(10);
/// How often a job whose content is due to change looks whether it can.
const DUE_PAUSE: Duration = Duration::from_millis(250);
/// A sink that has nothing to do for so long logs that its target has everything: until then the next
/// commit may say so.
const MARK_PAUSE: Duration = Duration::from_secs(1);

/// Why a generation ended.
enum ExitReason {
    Failed(SqlError),
    /// The log is closed: another leader.
    Closed(SqlError),
    /// The log has begun another generation: the job was detached or rebuilt.
    Superseded,
}

impl From<SqlError> for ExitReason {
    fn from(error: SqlError) -> ExitReason {
        ExitReason::Failed(error)
    }
}

/// A bug in the driver itself is a failure of its job, like any other.
fn panicked(panic: &(dyn std::any::Any + Send)) -> SqlError {
    let text = panic.downcast_ref::<&str>().map(|t| (*t).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    SqlError::internal(format!("the job's driver panicked: {text}"))
}

pub struct Driver {
    pub shared: Arc<Shared>,
    pub handle: Arc<JobHandle>,
    pub compute: Arc<dyn ComputeService>,
}

impl Driver {
    /// Runs until the job is dropped or the server stops.
    pub async fn run(self) {
        let cancel = self.handle.cancel.clone();
        tokio::select! {
            biased;
            () = cancel.cancelled() => {}
            () = self.supervise() => {}
        }
        self.handle.set_attempted();
        self.shared.groups.abort(self.handle.id, Generation(u64::MAX));
        if let Some(generation) = self.handle.generation()
            && self.ends_with_driver()
        {
            self.compute.stop_job(self.handle.id, generation).await;
        }
    }

    /// Whether nobody else goes on with the job: it was dropped, or this process runs it itself. On other processes it
    /// goes on for the next leader.
    fn ends_with_driver(&self) -> bool {
        self.shared.is_alone.get() != Some(&false)
            || self.shared.generation(self.handle.id).is_none()
    }

    /// Generation after generation.
    async fn supervise(&self) {
        self.await_inputs_started().await;
        let (mut failures, mut before) = (0, None);
        loop {
            let Some(generation) = self.next_generation(&mut before) else { return };
            let commits = self.handle.counters().commits;
            let ended = AssertUnwindSafe(self.run_generation(generation)).catch_unwind().await;
            let ended = ended.unwrap_or_else(|panic| ExitReason::Failed(panicked(panic.as_ref())));
            if self.shared.generation(self.handle.id) != Some(generation)
                && !matches!(ended, ExitReason::Closed(_))
            {
                failures = 0;
                self.end_generation(generation).await;
                continue;
            }
            let error = match ended {
                ExitReason::Failed(error) => error,
                ExitReason::Superseded => continue,
                ExitReason::Closed(error) => {
                    let reason = error.to_string();
                    self.set_state(JobState::Failed {
                        code: error.state,
                        reason,
                        retry_at_ms: u64::MAX,
                    });
                    return;
                }
            };
            failures = if self.handle.counters().commits > commits { 1 } else { failures + 1 };
            let pause = backoff(failures, &*self.shared.env);
            let pause_ms = pause.as_millis() as u64;
            warn!(job = %self.label(), %error, pause_ms, "job failed");
            let retry_at_ms = self.shared.env.now_ms() + pause.as_millis() as u64;
            self.set_state(JobState::Failed {
                code: error.state,
                reason: error.to_string(),
                retry_at_ms,
            });
            self.handle.set_attempted();
            // It may have been placed elsewhere before the wait begins.
            let mut retried = std::pin::pin!(self.handle.retry.notified());
            retried.as_mut().enable();
            if self.shared.generation(self.handle.id) != Some(generation) {
                self.end_generation(generation).await;
                continue;
            }
            let pause = tokio::time::timeout(pause, retried);
            let _ = tokio::join!(self.end_generation(generation), pause);
            // It may have been detached or rebuilt meanwhile.
            if self.shared.generation(self.handle.id) != Some(generation) {
                continue;
            }
            if self.raise_generation().await.is_err() {
                return;
            }
            self.handle.restarted();
        }
    }

    /// Stops the tasks of a generation, as far as they let themselves be stopped.
    async fn end_generation(&self, generation: Generation) {
        // Nobody waits for this generation's part of a transaction.
        self.shared.groups.abort(self.handle.id, generation);
        self.handle.set_stopped();
        self.handle.set_cutting(None);
        self.handle.set_sealed(None);
        let stop = self.compute.stop_job(self.handle.id, generation);
        let _ = tokio::time::timeout(STOP_LIMIT, stop).await;
    }

    fn label(&self) -> String {
        self.shared.label(self.handle.id)
    }

    /// Dependency order: inputs have tried to start before this job does.
    async fn await_inputs_started(&self) {
        let inputs = self.shared.state.read().inputs(self.handle.id).to_vec();
        for handle in inputs.iter().filter_map(|i| self.shared.job(*i)) {
            handle.wait_attempted(INPUT_START_LIMIT).await;
        }
    }

    /// Waits for space in a store that has none, and for the right time.
    async fn raise_generation(&self) -> Result<(), SqlError> {
        loop {
            let jobs = vec![self.handle.id.0];
            let raised =
                self.shared.log()?.apply(Entry::RaiseGenerations(RaiseGenerations { jobs })).await;
            match raised {
                Err(refused) if refused.state == SqlState::DISK_FULL || is_skewed(&refused) => {
                    tokio::time::sleep(FULL_PAUSE).await;
                }
                other => return other.map(drop),
            }
        }
    }

    /// Ends only with an error; a failure reported by the tasks interrupts whatever is awaited.
    async fn run_generation(&self, generation: Generation) -> ExitReason {
        tokio::select! {
            biased;
            error = self.handle.failed(generation) => ExitReason::Failed(error),
            ended = self.serve(generation) => match ended {
                Ok(()) => ExitReason::Failed(SqlError::internal("the job's driver returned")),
                Err(ended) => ended,
            },
        }
    }

    async fn serve(&self, generation: Generation) -> Result<(), ExitReason> {
        self.handle.set_generation(generation);
        if self.shared.state.read().is_detached(self.handle.id) {
            return self.stay_detached(generation).await;
        }
        self.await_snapshot_epoch(generation).await?;
        let publishing = Publishing::new(self.follow());
        self.set_state(JobState::Starting);
        let running = self.open(generation).await?;
        // It runs, though its target may keep it waiting: who waits for running jobs waits for it.
        self.publish_state();
        self.handle.set_attempted();
        self.publish_staged(generation, &publishing).await;
        // A worker starts with everything that is committed, or has applied it.
        self.shared.published_all(self.handle.id);
        self.publish_state();
        self.handle.set_attempted();
        self.run_epochs(generation, running, &publishing).await
    }

    /// Has the worker open what the job had computed, for those who read it, and waits until the job is rebuilt.
    async fn stay_detached(&self, generation: Generation) -> Result<(), ExitReason> {
        self.publish_state();
        self.handle.set_attempted();
        self.open(generation).await?;
        self.shared.published_all(self.handle.id);
        info!(job = %self.label(), generation = generation.0, "job is detached");
        loop {
            let woken = self.handle.notify.notified();
            if self.shared.generation(self.handle.id) != Some(generation) {
                return Err(ExitReason::Superseded);
            }
            woken.await;
        }
    }

    /// Epoch after epoch. While one is on its way into the log, the tasks process the next.
    async fn run_epochs<'a, 'g: 'a>(
        &'g self,
        generation: Generation,
        running: Option<RunningJob>,
        publishing: &'a Publishing<'g>,
    ) -> Result<(), ExitReason> {
        let mut in_flight = InFlight::new(self.commits());
        if let Some(running) = running {
            self.take_sealed(generation, running, &mut in_flight, publishing).await?;
        }
        let mut last_cut: Option<Instant> = None;
        loop {
            let since = last_cut.map_or(Duration::MAX, |at| self.shared.env.elapsed(at));
            let step = self.step(since, in_flight.newest());
            // Asked after the step was chosen: what comes after a pause is no part of it.
            if self.is_paused() {
                in_flight.drain().await?;
                self.mark_published(generation).await?;
                self.await_resumed(publishing).await;
                continue;
            }
            let woken = self.handle.notify.notified();
            match step {
                Step::Cut(epoch) if in_flight.has_room() => {
                    last_cut = Some(self.shared.env.now());
                    self.cut(generation, epoch, &mut in_flight, publishing).await?;
                }
                Step::WaitFor(pause) => {
                    let _ = in_flight.during(tokio::time::timeout(pause, woken)).await?;
                }
                // A commit that is concluded wakes the driver, too.
                _ if !in_flight.is_empty() => in_flight.during(woken).await?,
                Step::Wait if self.unmarked().is_some() => {
                    if tokio::time::timeout(MARK_PAUSE, woken).await.is_err() {
                        self.mark_published(generation).await?;
                    }
                }
                Step::Wait => self.await_change().await?,
                Step::Cut(_) | Step::AwaitInputs | Step::StartBackfill => woken.await,
            }
            if !publishing.is_stalled() {
                self.publish_state();
            }
        }
    }

    /// Until somebody has something for this job, or its content is due to change by itself: then the
    /// log's head is moved to that time, if nothing else has.
    async fn await_change(&self) -> Result<(), ExitReason> {
        let (due, head) = {
            let state = self.shared.state.read();
            (state.due(self.handle.id), state.epoch)
        };
        let Some(due) = due else {
            self.handle.notify.notified().await;
            return Ok(());
        };
        if due <= head {
            // It came after the step was chosen, or an input is not that far: not everything that moves it wakes this job.
            let _ = tokio::time::timeout(DUE_PAUSE, self.handle.notify.notified()).await;
            return Ok(());
        }
        let pause = due.millis().saturating_sub(self.shared.env.now_ms());
        if pause > 0 {
            // In steps: the wall clock may be set.
            let pause = Duration::from_millis(pause).min(CLOCK_STEP);
            let _ = tokio::time::timeout(pause, self.handle.notify.notified()).await;
            return Ok(());
        }
        self.append(Entry::Tick(Tick {})).await.map(drop)
    }

    fn step(&self, since_cut: Duration, cut: Option<Position>) -> Step {
        let mut wants = self.shared.waits.wants(self.handle.id);
        wants.cut = self.handle.is_cut_requested();
        let own = cut.as_ref().map_or_else(|| self.committed_epoch(), |at| at.epoch);
        wants.input_is_full = self.shared.lacks_full_epoch(self.handle.id, own);
        let interval = self.shared.settings().barrier_interval.max(self.interval());
        let pace = Pace { interval, step: self.shared.step_limit() };
        next_step(&self.shared.state.read(), self.handle.id, cut, &wants, since_cut, &pace)
    }

    /// A job created over inputs that are themselves being created starts when all have content: one
    /// record then fixes the epoch of all their snapshots.
    async fn await_snapshot_epoch(&self, generation: Generation) -> Result<(), ExitReason> {
        loop {
            match self.step(Duration::MAX, None) {
                Step::StartBackfill if self.inputs_keep_snapshot().await => {
                    let entry = StartBackfill { job: self.handle.id.0, generation: generation.0 };
                    match self.append(Entry::StartBackfill(entry)).await? {
                        // An input was lost in between: look again when something changes.
                        Ok(_) | Err(VoidReason::InputsNotReady) => {}
                        Err(void) => return Err(ExitReason::Failed(void.into())),
                    }
                }
                Step::AwaitInputs | Step::StartBackfill => {
                    self.publish_state();
                    self.handle.set_attempted();
                    self.handle.notify.notified().await;
                }
                _ => return Ok(()),
            }
        }
    }

    async fn append(&self, entry: Entry) -> Result<Verdict, ExitReason> {
        let log = self.shared.log().map_err(ExitReason::Closed)?;
        log.append(entry).await.map_err(|error| match error.is_refusal() {
            true => ExitReason::Failed(error.into()),
            false => ExitReason::Closed(error.into()),
        })
    }

    /// Ends an epoch, and has it logged, concluded and, of a sink, published. The next epoch begins meanwhile; that of a
    /// table is logged when the one before is concluded, that of a sink when its target has the one before.
    async fn cut<'a, 'g: 'a>(
        &'g self,
        generation: Generation,
        epoch: Epoch,
        in_flight: &mut InFlight<'a, ExitReason>,
        publishing: &'a Publishing<'g>,
    ) -> Result<(), ExitReason> {
        let id = self.handle.id;
        let begun = self.shared.env.now();
        let from = in_flight.newest().map_or_else(|| self.committed_epoch(), |p| p.epoch);
        self.handle.take_cut_request();
        self.handle.set_cutting(Some(begun));
        let record = self.shared.state.read().number;
        let cut = Cut { epoch, number: in_flight.next_number(), record };
        let commit = in_flight.during(self.compute.cut(id, generation, cut)).await??;
        self.handle.set_cutting(None);
        let root = epoch == Epoch::ZERO;
        check_answer(id, generation, cut, &commit)?;
        let settles = Settles::of(&commit, record);
        if !root || !commit.is_empty() {
            in_flight.take_number();
        }
        let took = self.shared.env.elapsed(begun);
        self.handle.set_sealed(Some(Sealed { from, to: epoch, took }));
        self.shared.notify_sources_of(id);
        self.take(generation, (commit, settles), begun, in_flight, publishing).await
    }

    /// Has what was sealed logged, concluded and, of a sink, published, beside what the driver does next.
    async fn take<'a, 'g: 'a>(
        &'g self,
        generation: Generation,
        (commit, settles): (JobCommit, Settles),
        begun: Instant,
        in_flight: &mut InFlight<'a, ExitReason>,
        publishing: &'a Publishing<'g>,
    ) -> Result<(), ExitReason> {
        let (id, root) = (self.handle.id, commit.epoch == 0);
        let from = in_flight.newest().map_or_else(|| self.committed_epoch(), |p| p.epoch);
        let ends_rebuild = commit.backfill.is_none() && self.is_rebuilding();
        if ends_rebuild {
            in_flight.drain().await?;
            self.commit(generation, commit, begun, &mut Turn::default()).await?;
            self.shared.wake_beginners();
            // The content has other state tables behind it now.
            return Err(ExitReason::Superseded);
        }
        let position = match root {
            true => Position { epoch: from, ..Position::of_commit(&commit) },
            false => Position::of_commit(&commit),
        };
        in_flight.push(position, |mut turn| {
            Box::pin(async move {
                let publishes = commit.publish.is_some();
                if root || self.is_sink() {
                    // Of a root: two commits in one record would share its epoch. Of a sink: nothing is logged before
                    // the target has what was committed before.
                    turn.begin().await;
                }
                if root && commit.is_empty() {
                    // What was last sealed has no entry in the log: the worker concludes it.
                    settles.note(&self.shared);
                    turn.end();
                    self.handle.notify.notify_one();
                    return Ok(());
                }
                let record = self.commit(generation, commit, begun, &mut turn).await?;
                settles.note(&self.shared);
                if publishes {
                    self.publish_staged(generation, publishing).await;
                }
                if self.is_sink() {
                    self.shared.published(id, record);
                }
                turn.end();
                self.handle.notify.notify_one();
                Ok(())
            })
        });
        Ok(())
    }

    /// Logs a commit and waits, when it is its turn, until the record stream has brought it to the worker. Returns its
    /// record.
    async fn commit(
        &self,
        generation: Generation,
        mut commit: JobCommit,
        begun: Instant,
        turn: &mut Turn,
    ) -> Result<u64, ExitReason> {
        let (id, epoch) = (self.handle.id, Epoch(commit.epoch));
        commit.published = self.unmarked().unwrap_or(0);
        let bytes = bytes_of(&commit);
        fail::fail_point!("meta.commit.before");
        let log = self.shared.log().map_err(ExitReason::Closed)?;
        let logging = self.handle.begin_logging(self.shared.env.now());
        let verdict = match commit.group.take() {
            None => log.append(Entry::Commit(commit)).await,
            Some(group) => self.shared.groups.commit(log, group, commit).await,
        };
        drop(logging);
        fail::fail_point!("meta.commit.after");
        turn.begin().await;
        match verdict {
            Ok(Ok(applied)) => {
                self.handle.committed(self.shared.env.elapsed(begun));
                self.handle.note_written(applied.epoch, bytes);
                if !self.is_sink() {
                    // The stream keeps the order; a sink's target is to have it first.
                    turn.end();
                }
                self.handle.wait_applied(applied.record).await;
                Ok(applied.record)
            }
            Ok(Err(reason)) => {
                let error =
                    SqlError::internal(format!("the commit at epoch {epoch} is void: {reason}"));
                match reason {
                    // No record says so.
                    VoidReason::PartLost => {
                        self.compute.abort_epoch(id, generation, error.clone()).await;
                    }
                    _ => {
                        let head = self.shared.state.read().number;
                        self.shared.wait_applied_by_process_of(id, head).await;
                    }
                }
                Err(ExitReason::Failed(error))
            }
            Err(refused) if refused.is_refusal() => {
                let error = SqlError::from(refused);
                self.compute.abort_epoch(id, generation, error.clone()).await;
                Err(ExitReason::Failed(error))
            }
            Err(closed) => Err(ExitReason::Closed(closed.into())),
        }
    }

    fn is_rebuilding(&self) -> bool {
        let state = self.shared.state.read();
        state.jobs.get(&self.handle.id).is_some_and(|job| job.version.is_rebuilding())
    }

    /// How many commits the job has.
    fn commits(&self) -> u64 {
        let state = self.shared.state.read();
        state.jobs.get(&self.handle.id).map_or(0, |j| j.version.commits)
    }

    fn committed_epoch(&self) -> Epoch {
        let state = self.shared.state.read();
        state.jobs.get(&self.handle.id).map_or(Epoch::ZERO, |j| Epoch(j.version.epoch))
    }

    fn set_state(&self, state: JobState) {
        let running = state == JobState::Running;
        if self.handle.set_state(state) {
            self.shared.changes.touch(self.handle.id);
            // A source moves only while a reader runs: it may have looked before this one did.
            if running {
                self.shared.notify_sources_of(self.handle.id);
            }
        }
    }

    /// Running, creating or waiting, as the version says; paused, as the catalog says.
    fn publish_state(&self) {
        let next = {
            let state = self.shared.state.read();
            let Some(job) = state.jobs.get(&self.handle.id) else { return };
            if let Some(detached) = &job.version.detached {
                let reason = detached.reason.clone();
                drop(state);
                return self.set_state(JobState::Detached { reason });
            }
            match &job.version.backfill {
                _ if state.is_paused_sink(self.handle.id) => JobState::Paused,
                None => JobState::Running,
                Some(b) if b.snapshot_epoch == 0 => {
                    let kept = self.shared.kept_from(&state, &job.inputs);
                    let unready = |i: &&_| {
                        state.readable_frontier(**i).is_none_or(|frontier| frontier < kept)
                            || state.detached_behind(&[**i]).is_some()
                    };
                    JobState::WaitingForInputs {
                        inputs: job.inputs.iter().filter(unready).copied().collect(),
                    }
                }
                Some(b) if job.version.is_rebuilding() => {
                    JobState::Rebuilding { rows_read: b.rows_read, rows_total: b.rows_total }
                }
                Some(b) => JobState::Creating { rows_read: b.rows_read, rows_total: b.rows_total },
            }
        };
        self.set_state(next);
    }
}

/// Whether a worker has answered a cut with its commit.
fn check_answer(
    job: JobId,
    generation: Generation,
    cut: Cut,
    commit: &JobCommit,
) -> Result<(), SqlError> {
    let answers = (commit.job, commit.generation, commit.epoch, commit.number);
    if answers == (job.0, generation.0, cut.epoch.0, cut.number) {
        return Ok(());
    }
    let Cut { epoch, number, .. } = cut;
    Err(SqlError::internal(format!("cut {number} at {epoch} was answered by another commit")))
}

/// Doubles with every failure in a row; half of it is jitter, so that many jobs do not retry together.
fn backoff(failures: u32, env: &dyn Env) -> Duration {
    let full = BACKOFF_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(BACKOFF_MAX);
    let half_ms = (full.as_millis() as u64 / 2).max(1);
    Duration::from_millis(half_ms + env.random() % half_ms)
}

#[cfg(test)]
mod tests {
    use millrace_common::SystemEnv;

    use super::*;

    #[test]
    fn backoff_grows_and_is_bounded() {
        for failures in 1..100 {
            let pause = backoff(failures, &SystemEnv);
            assert!(pause >= BACKOFF_MIN / 2 && pause <= BACKOFF_MAX, "{failures}: {pause:?}");
        }
        assert!(backoff(20, &SystemEnv) >= BACKOFF_MAX / 2);
    }
}
