//! The compute processes, as one service for all drivers.
//!
//! A call about a job goes to the process that the log has placed it on. While there is none, or it is not known yet how
//! to call it, the caller waits: its job is not failing, and starts as soon as it is placed. What belonged to an earlier
//! process is fenced by the generation of the job, so a call that reaches the next one instead does no harm.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use millrace_common::collections::HashMap;
use millrace_common::{EnvHandle, Generation, JobId, SqlError, SqlState};
use millrace_rpc::call_error::is_unreachable;
use millrace_rpc::services::{ComputeService, Cut, RunningJob, StartJob};
use millrace_rpc::source_poll::{PollSource, Polled};
use millrace_rpc::stream::{Acknowledged, StreamError, StreamMessage};
use millrace_rpc::version::{JobCommit, PublishHandle, VersionEdit};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::state::MetaState;

/// How long a process may take to answer that it is there.
const ANSWER: Duration = Duration::from_secs(2);

type Service = Arc<dyn ComputeService>;

/// Is told of each call of a process whether it was answered, or has not reached it, and when it began.
pub type NoteCall = Box<dyn Fn(u64, bool, Instant) + Send + Sync>;

/// See the module.
pub struct Computes {
    state: Arc<RwLock<MetaState>>,
    /// By incarnation.
    known: watch::Sender<BTreeMap<u64, Service>>,
    /// Where each job was started last, and in which generation: there it is to be stopped.
    started: Mutex<HashMap<JobId, (Generation, u64)>>,
    env: EnvHandle,
    note_call: NoteCall,
}

impl Computes {
    /// `state`: what the log says.
    pub fn new(state: Arc<RwLock<MetaState>>, env: EnvHandle, note_call: NoteCall) -> Computes {
        let (known, started) = (watch::Sender::default(), Mutex::default());
        Computes { state, known, started, env, note_call }
    }

    /// Jobs that are placed on this process are called there from now on.
    pub fn add(&self, incarnation: u64, service: Service) {
        self.known.send_modify(|known| drop(known.insert(incarnation, service)));
    }

    /// The process is gone: calls to it end with an error.
    pub fn remove(&self, incarnation: u64) {
        self.known.send_if_modified(|known| known.remove(&incarnation).is_some());
        self.started.lock().retain(|_, (_, process)| *process != incarnation);
    }

    /// The processes that are there, in the order of their registration.
    pub fn incarnations(&self) -> Vec<u64> {
        self.known.borrow().keys().copied().collect()
    }

    /// Completes when there is a process.
    pub async fn come(&self) {
        // The sender is in `self`.
        let _ = self.known.subscribe().wait_for(|known| !known.is_empty()).await;
    }

    /// Completes when there has been no process for this long without a break.
    pub async fn missing_for(&self, limit: Duration) {
        let mut known = self.known.subscribe();
        loop {
            // The sender is in `self`.
            let _ = known.wait_for(BTreeMap::is_empty).await;
            let come = known.wait_for(|known| !known.is_empty());
            if tokio::time::timeout(limit, come).await.is_err() {
                return;
            }
        }
    }

    /// Whether a process answers now. It is told nothing.
    pub async fn answers(&self, incarnation: u64) -> bool {
        let Some(service) = self.get(incarnation) else { return false };
        answers(&*service).await
    }

    /// Whether a call reaches a process now, however it is answered. It is told nothing.
    pub async fn is_reached(&self, incarnation: u64) -> bool {
        let Some(service) = self.get(incarnation) else { return false };
        let asked = service.apply_records(StreamMessage::default());
        match tokio::time::timeout(ANSWER, asked).await {
            Ok(Err(StreamError::Failed(error))) => !is_unreachable(&error),
            asked => asked.is_ok(),
        }
    }

    /// The process that the log has placed a job on; 0: none.
    pub fn placed(&self, job: JobId) -> u64 {
        self.state.read().jobs.get(&job).map_or(0, |job| job.process)
    }

    fn get(&self, incarnation: u64) -> Option<Service> {
        self.known.borrow().get(&incarnation).cloned()
    }

    /// Waits until the process that a job is placed on is there. A job that is placed elsewhere meanwhile has another
    /// generation, whose driver calls anew.
    async fn process_of(&self, job: JobId) -> (u64, Service) {
        let mut known = self.known.subscribe();
        loop {
            known.mark_unchanged();
            let incarnation = self.placed(job);
            if let Some(service) = self.get(incarnation) {
                return (incarnation, service);
            }
            // The sender is in `self`.
            let _ = known.changed().await;
        }
    }

    /// Completes when the process is gone.
    async fn gone(&self, incarnation: u64) {
        // The sender is in `self`.
        let _ = self.known.subscribe().wait_for(|known| !known.contains_key(&incarnation)).await;
    }

    /// Calls a process, and gives up when it is gone: it may never answer.
    async fn call<T>(
        &self,
        incarnation: u64,
        call: impl Future<Output = Result<T, SqlError>>,
    ) -> Result<T, SqlError> {
        let began = self.env.now();
        tokio::select! {
            biased;
            answer = call => {
                let is_answered = !answer.as_ref().err().is_some_and(is_unreachable);
                (self.note_call)(incarnation, is_answered, began);
                answer
            }
            () = self.gone(incarnation) => Err(gone(incarnation)),
        }
    }

    /// Where a generation of a job was started; `None`: nowhere, or that process is gone.
    fn running(&self, job: JobId, generation: Generation) -> Option<(u64, Service)> {
        let (of, incarnation) = self.started.lock().get(&job).copied()?;
        let service = self.get(incarnation).filter(|_| of == generation)?;
        Some((incarnation, service))
    }

    /// Tells the process that runs a generation, if it does, something that ends with it.
    async fn tell<F: Future<Output = ()>>(
        &self,
        job: JobId,
        generation: Generation,
        call: impl FnOnce(Service) -> F,
    ) {
        let Some((incarnation, service)) = self.running(job, generation) else { return };
        tokio::select! {
            biased;
            () = call(service) => {}
            () = self.gone(incarnation) => {}
        }
    }
}

/// See [`Computes::answers`].
pub async fn answers(service: &dyn ComputeService) -> bool {
    let asked = service.apply_records(StreamMessage::default());
    // What it says of the stream does not matter.
    matches!(tokio::time::timeout(ANSWER, asked).await, Ok(Ok(_) | Err(StreamError::Gap { .. })))
}

fn gone(incarnation: u64) -> SqlError {
    let message = format!("compute process {incarnation} is gone");
    SqlError::new(SqlState::CANNOT_CONNECT_NOW, message)
}

#[async_trait]
impl ComputeService for Computes {
    async fn start_job(&self, start: StartJob) -> Result<(), SqlError> {
        let (incarnation, service) = self.process_of(start.job).await;
        self.started.lock().insert(start.job, (start.generation, incarnation));
        self.call(incarnation, service.start_job(start)).await
    }

    async fn adopt_job(
        &self,
        job: JobId,
        generation: Generation,
        record: u64,
        after: u64,
    ) -> Result<Option<RunningJob>, SqlError> {
        let (incarnation, service) = self.process_of(job).await;
        self.started.lock().insert(job, (generation, incarnation));
        self.call(incarnation, service.adopt_job(job, generation, record, after)).await
    }

    async fn cut(
        &self,
        job: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<JobCommit, SqlError> {
        let (incarnation, service) = self.process_of(job).await;
        self.call(incarnation, service.cut(job, generation, cut)).await
    }

    /// Each process has a stream of its own.
    async fn apply_records(&self, _: StreamMessage) -> Result<Acknowledged, StreamError> {
        Err(StreamError::Failed(SqlError::internal("records are sent to one process")))
    }

    async fn applied_since(&self, _: Acknowledged) -> Acknowledged {
        std::future::pending().await
    }

    /// Not where the job is not started.
    async fn prepare_edit(&self, job: JobId, generation: Generation, edit: VersionEdit) {
        let prepare =
            |service: Service| async move { service.prepare_edit(job, generation, edit).await };
        self.tell(job, generation, prepare).await;
    }

    async fn abort_epoch(&self, job: JobId, generation: Generation, error: SqlError) {
        let abort = |service: Service| async move {
            service.abort_epoch(job, generation, error).await;
        };
        self.tell(job, generation, abort).await;
    }

    async fn publish(
        &self,
        job: JobId,
        generation: Generation,
        handles: Vec<PublishHandle>,
    ) -> Result<(), SqlError> {
        let (incarnation, service) = self.process_of(job).await;
        self.call(incarnation, service.publish(job, generation, handles)).await
    }

    /// Of a process that is gone there is nothing to stop.
    async fn stop_job(&self, job: JobId, generation: Generation) {
        let stop = |service: Service| async move { service.stop_job(job, generation).await };
        self.tell(job, generation, stop).await;
        let mut started = self.started.lock();
        if started.get(&job).is_some_and(|(of, _)| *of <= generation) {
            started.remove(&job);
        }
    }

    /// Waits for no process: another reader may be where one is.
    async fn poll_source(&self, poll: PollSource) -> Result<Polled, SqlError> {
        let incarnation = self.placed(poll.reader);
        let service = self.get(incarnation).ok_or_else(|| gone(incarnation))?;
        self.call(incarnation, service.poll_source(poll)).await
    }
}
