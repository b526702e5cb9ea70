//! The record stream at a worker (docs/design.md §10): what the log says of its jobs takes effect in the order of the
//! log, once, whatever is sent twice, late or again.
//!
//! Commits are concluded by generation and number, so one that was concluded is not concluded again. Edits of versions
//! have no numbers of their own: each job knows up to which record the version that it was opened with has them. That
//! version is read from the log as it is folded here, after the opening has begun: whatever the log says of the job from
//! then on waits, so that nothing is lost between the two.
//! A step of a job is short and is done at once. That of a job that is busy (a large statement is entering the table)
//! or being opened waits in a queue of its own, so that no job waits for another.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use millrace_common::collections::HashMap;
use millrace_common::fault_injection::is_planted;
use millrace_common::task::{spawn_blocking_on, spawn_on};
use millrace_common::{Epoch, Generation, JobId, RelationId};
use millrace_rpc::log::{Entry, LogRecord};
use millrace_rpc::stream::{Acknowledged, AppliedRecord, EntryOutcome, StreamError, StreamMessage};
use millrace_rpc::version::JobCommit;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Shared;
use super::job::{Job, Kind};
use crate::error::ExecError;

/// What became of a commit's conclusion at a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Concluded {
    /// It was the oldest in flight, and has taken effect.
    Now,
    /// It was concluded before.
    Before,
    /// Commits before it are not concluded: a record was lost on the way here.
    TooEarly,
}

/// What an entry of the log says of one job.
#[derive(Clone)]
struct Step {
    record: Arc<LogRecord>,
    entry: usize,
    /// `None`: the entry is void.
    applied: Option<Epoch>,
}

impl Step {
    fn entry(&self) -> Option<&Entry> {
        self.record.entries.get(self.entry)?.entry.as_ref()
    }
}

/// A call that opens a job's state. Calls are numbered: those of two leaders may overlap.
#[derive(Clone, Copy)]
struct Opens {
    call: u64,
    /// The steps up to this record are in the version that the state is opened from, by this call or by one before; 0:
    /// none has read a version yet.
    has: u64,
}

/// Steps that wait, oldest first.
#[derive(Default)]
struct Queue {
    steps: VecDeque<Step>,
    /// The job's state is being opened by this call, the last one that has begun to: nothing is applied to it.
    opening: Option<Opens>,
    /// The first step is being applied.
    is_applying: bool,
}

impl Queue {
    /// The oldest record that is not applied to the job, nor in the version that it is being opened from. What was
    /// acknowledged stays true when the opening ends.
    fn lacks(&self) -> Option<u64> {
        let has = self.opening.map_or(0, |opens| opens.has);
        self.steps.iter().map(|step| step.record.number).find(|number| *number > has)
    }
}

#[derive(Default)]
struct State {
    /// Number of the last record; `None`: there was neither a record nor a job.
    last: Option<u64>,
    /// The record as of which the version was that a job was opened with.
    opened: HashMap<JobId, u64>,
    queues: BTreeMap<JobId, Queue>,
    /// Calls so far that have opened a job.
    calls: u64,
}

impl State {
    /// The queue of a job that this call opens; `None`: another one opens it since, or has opened it.
    fn opened_by(&mut self, job: JobId, call: u64) -> Option<&mut Queue> {
        let queue = self.queues.get_mut(&job)?;
        queue.opening.is_some_and(|opens| opens.call == call).then_some(queue)
    }

    /// The records that are news. All or none.
    fn news<'a>(
        &mut self,
        records: &'a [AppliedRecord],
    ) -> Result<&'a [AppliedRecord], StreamError> {
        let Some(first) = records.first() else { return Ok(records) };
        let last = *self.last.get_or_insert(first.number().saturating_sub(1));
        let known = records.iter().take_while(|r| r.number() <= last).count();
        let news = &records[known..];
        if is_planted("gap-overlooked") {
            return Ok(news);
        }
        let is_next = news.iter().zip(last + 1..).all(|(record, next)| record.number() == next);
        if is_next { Ok(news) } else { Err(StreamError::Gap { next: last + 1 }) }
    }

    fn acknowledged(&self) -> Acknowledged {
        let behind = self.queues.iter().filter_map(|(job, q)| Some((*job, q.lacks()?)));
        Acknowledged { received: self.last.unwrap_or(0), behind: behind.collect() }
    }
}

#[derive(Default)]
pub struct RecordStream {
    /// One message at a time.
    turn: Mutex<()>,
    state: Mutex<State>,
    /// Told when steps that waited have been applied.
    settled: Notify,
}

/// A job's state is being opened from a version: what the log says of the job meanwhile waits until this is dropped. Where
/// no version was read, it is applied to what was there before.
pub struct Opening<'a> {
    shared: &'a Arc<Shared>,
    job: JobId,
    call: u64,
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        let stream = &self.shared.stream;
        let mut state = stream.state.lock();
        // Another call opens the job meanwhile, from a version of its own: what waits, waits for that.
        let Some(queue) = state.opened_by(self.job, self.call) else { return };
        let has = queue.opening.take().map_or(0, |opens| opens.has);
        queue.steps.retain(|step| step.record.number > has);
        let is_empty = queue.steps.is_empty();
        if is_empty {
            state.queues.remove(&self.job);
        }
        if has > 0 {
            state.opened.insert(self.job, has);
        }
        drop(state);
        stream.settled.notify_waiters();
        if !is_empty {
            self.shared.drain(self.job);
        }
    }
}

impl Opening<'_> {
    /// The job is opened from its version as of this record, which was read after the opening had begun.
    pub fn set_as_of(&self, record: u64) {
        let mut state = self.shared.stream.state.lock();
        let Some(queue) = state.opened_by(self.job, self.call) else { return };
        queue.opening = Some(Opens { call: self.call, has: record });
        drop(state);
        self.shared.stream.settled.notify_waiters();
    }

    /// Whether no other call has begun to open the job since: what this one has opened is out of date then.
    pub fn is_current(&self) -> bool {
        self.shared.stream.state.lock().opened_by(self.job, self.call).is_some()
    }

    /// Adds the job that this call has started; it comes back where another call has begun to open it since.
    pub fn add(&self, job: Arc<Job>) -> Result<(), Arc<Job>> {
        // Locked: nobody begins to open it meanwhile.
        let mut state = self.shared.stream.state.lock();
        if state.opened_by(self.job, self.call).is_none() {
            return Err(job);
        }
        self.shared.add(job);
        Ok(())
    }

    /// Completes when another call has begun to open the job.
    pub async fn superseded(&self) {
        loop {
            let settled = self.shared.stream.settled.notified();
            if !self.is_current() {
                return;
            }
            settled.await;
        }
    }
}

impl RecordStream {
    /// The job's state is closed.
    pub fn forget(&self, job: JobId) {
        self.state.lock().opened.remove(&job);
    }

    /// The record as of which a job was opened last.
    pub fn opened(&self, job: JobId) -> Option<u64> {
        self.state.lock().opened.get(&job).copied()
    }

    /// The state is closed that was opened as of this record; what was opened since is kept.
    pub fn forget_opened(&self, job: JobId, record: Option<u64>) {
        let mut state = self.state.lock();
        if state.opened.get(&job).copied() == record {
            state.opened.remove(&job);
        }
    }

    pub fn acknowledged(&self) -> Acknowledged {
        self.state.lock().acknowledged()
    }

    /// Completes when more has been applied than was acknowledged with `known`.
    pub async fn applied_since(&self, known: &Acknowledged) -> Acknowledged {
        loop {
            let settled = self.settled.notified();
            let now = self.acknowledged();
            if now != *known {
                return now;
            }
            settled.await;
        }
    }
}

impl Shared {
    /// From now on nothing is applied to the job, which is opened from its version as of `record` or a later one. `None`:
    /// another call has begun to open it since.
    pub async fn begin_opening(self: &Arc<Shared>, job: JobId, record: u64) -> Option<Opening<'_>> {
        let call = {
            let mut state = self.stream.state.lock();
            // Where there was neither a record nor a job: every version that is read from now on has this one, and what
            // comes after it is taken in for whoever may lack it.
            state.last.get_or_insert(record);
            state.calls += 1;
            let call = state.calls;
            let queue = state.queues.entry(job).or_default();
            // What was in another call's version is in that of this one, too: it is read later.
            let has = queue.opening.map_or(0, |opens| opens.has);
            queue.opening = Some(Opens { call, has });
            call
        };
        self.stream.settled.notify_waiters();
        // Whoever gives up here leaves no job behind that nobody opens.
        let opening = Opening { shared: self, job, call };
        loop {
            let settled = self.stream.settled.notified();
            let is_applying = self.stream.state.lock().opened_by(job, call)?.is_applying;
            if !is_applying {
                return Some(opening);
            }
            settled.await;
        }
    }

    /// Takes in what the leader sends.
    pub fn receive(
        self: &Arc<Shared>,
        message: &StreamMessage,
    ) -> Result<Acknowledged, StreamError> {
        let _turn = self.stream.turn.lock();
        let news = self.stream.state.lock().news(&message.records)?;
        for record in news {
            for (entry, outcome) in record.outcomes.iter().enumerate() {
                let applied = match outcome {
                    EntryOutcome::Applied(epoch) => Some(*epoch),
                    EntryOutcome::Void(_) => None,
                };
                self.take(Step { record: Arc::clone(&record.record), entry, applied });
            }
            self.stream.state.lock().last = Some(record.number());
        }
        for (job, horizon) in &message.horizons {
            if let Some(store) = self.store.job(*job) {
                store.set_horizon(*horizon);
            }
        }
        Ok(self.stream.acknowledged())
    }

    /// Has an entry take effect on the jobs that it is about.
    fn take(self: &Arc<Shared>, step: Step) {
        match step.entry() {
            Some(Entry::Commit(commit)) => self.take_at(RelationId(commit.job), &step),
            Some(Entry::EditVersion(edit)) => self.take_at(RelationId(edit.job), &step),
            Some(Entry::Transaction(transaction)) => {
                let jobs = transaction.commits.iter().map(|commit| RelationId(commit.job));
                jobs.for_each(|job| self.take_at(job, &step));
            }
            Some(Entry::MoveParts(moved)) => {
                let jobs: BTreeSet<u32> = moved.parts.iter().map(|part| part.job).collect();
                jobs.into_iter().for_each(|job| self.take_at(RelationId(job), &step));
            }
            _ => {}
        }
    }

    fn take_at(self: &Arc<Shared>, job: JobId, step: &Step) {
        let mut state = self.stream.state.lock();
        if state.opened.get(&job).is_some_and(|record| step.record.number <= *record) {
            return;
        }
        if let Some(queue) = state.queues.get_mut(&job) {
            queue.steps.push_back(step.clone());
            return;
        }
        if !self.is_busy(job) {
            // Locked: nobody begins to open the job meanwhile.
            self.apply(job, step);
            return;
        }
        state.queues.entry(job).or_default().steps.push_back(step.clone());
        drop(state);
        self.drain(job);
    }

    /// Whether a conclusion would wait for the job.
    fn is_busy(&self, job: JobId) -> bool {
        let job = self.job(job);
        job.is_some_and(|j| matches!(&j.kind, Kind::Table(table) if table.sequencer.is_busy()))
    }

    /// Applies the steps of a job that wait, on a thread that may.
    fn drain(self: &Arc<Shared>, job: JobId) {
        let shared = Arc::clone(self);
        spawn_blocking_on(&self.runtime, "apply records to a busy job", move || {
            while let Some(step) = shared.next_waiting(job) {
                shared.apply(job, &step);
                shared.note_applied(job);
            }
        });
    }

    /// The step to be applied next. `None`: none waits, or the job is being opened.
    fn next_waiting(&self, job: JobId) -> Option<Step> {
        let mut state = self.stream.state.lock();
        let queue = state.queues.get_mut(&job).filter(|q| q.opening.is_none() && !q.is_applying)?;
        let step = queue.steps.front().cloned();
        queue.is_applying = step.is_some();
        if step.is_none() {
            state.queues.remove(&job);
        }
        step
    }

    fn note_applied(&self, job: JobId) {
        let mut state = self.stream.state.lock();
        if let Some(queue) = state.queues.get_mut(&job) {
            queue.is_applying = false;
            queue.steps.pop_front();
            if queue.steps.is_empty() && queue.opening.is_none() {
                state.queues.remove(&job);
            }
        }
        drop(state);
        self.stream.settled.notify_waiters();
    }

    fn apply(&self, id: JobId, step: &Step) {
        match step.entry() {
            Some(Entry::Commit(commit)) => self.conclude(commit, step.applied),
            Some(Entry::Transaction(transaction)) => {
                let own = transaction.commits.iter().find(|commit| commit.job == id.0);
                own.into_iter().for_each(|commit| self.conclude(commit, step.applied));
            }
            Some(entry) if step.applied.is_some() => {
                let Some(store) = self.store.job(id) else { return };
                match entry {
                    Entry::EditVersion(edit) => {
                        store.apply_edit(&edit.edit);
                        // Versions below are not in the new runs.
                        if Epoch(edit.horizon) > store.horizon() {
                            store.set_horizon(Epoch(edit.horizon));
                        }
                    }
                    Entry::MoveParts(moved) => store.move_parts(&moved.object, &moved.parts),
                    _ => {}
                }
            }
            _ => {}
        }
    }

    /// A commit is in the log: at `epoch`, or void, and with it those that were cut after it.
    fn conclude(&self, commit: &JobCommit, epoch: Option<Epoch>) {
        let (id, generation) = (RelationId(commit.job), Generation(commit.generation));
        let Some(job) = self.job_of(id, generation) else { return };
        match epoch {
            Some(epoch) => committed(&job, commit.number, epoch),
            None => self.void(job, commit.number),
        }
    }

    fn void(&self, job: Arc<Job>, number: u64) {
        let is_in_flight = match &job.kind {
            Kind::Table(table) => table.is_in_flight(number),
            Kind::Derived(derived) => derived.is_in_flight(number),
            Kind::Nothing => false,
        };
        if !is_in_flight {
            return;
        }
        if let Kind::Table(table) = &job.kind {
            table.sequencer.void(None);
        }
        spawn_on(&self.runtime, "stop a job", async move { job.stop().await });
    }
}

fn committed(job: &Job, number: u64, epoch: Epoch) {
    job.cuts.conclude(number);
    let concluded = match &job.kind {
        Kind::Table(table) => table.committed(number, epoch),
        Kind::Derived(derived) => derived.committed(number, epoch),
        Kind::Nothing => Concluded::Before,
    };
    match concluded {
        Concluded::Now => {
            job.cuts.note_published(number);
            job.metrics.progress.epochs.note_committed(epoch);
        }
        Concluded::Before => {}
        Concluded::TooEarly => job.fail(ExecError::internal(format!(
            "commit {number} is in the log, and one before it was never concluded"
        ))),
    }
}
