//! The compute process of the moment, as one service for all drivers.
//!
//! A driver calls whoever jobs run on now. While there is nobody it waits: its job is not failing, and starts as soon as
//! a process has taken over. What belonged to an earlier process is fenced by the generation of the job, so a call that
//! reaches the next one instead does no harm.

use std::sync::Arc;

use async_trait::async_trait;
use millrace_common::{Generation, JobId, SqlError, SqlState};
use millrace_rpc::services::{ComputeService, Cut, StartJob};
use millrace_rpc::stream::{Acknowledged, StreamError, StreamMessage};
use millrace_rpc::version::{JobCommit, PublishHandle};
use tokio::sync::watch;

#[derive(Clone)]
struct Current {
    incarnation: u64,
    service: Arc<dyn ComputeService>,
}

/// See the module.
pub struct ComputeSlot {
    current: watch::Sender<Option<Current>>,
}

impl Default for ComputeSlot {
    fn default() -> ComputeSlot {
        ComputeSlot { current: watch::Sender::new(None) }
    }
}

impl ComputeSlot {
    /// Jobs run on this process from now on.
    pub fn set(&self, incarnation: u64, service: Arc<dyn ComputeService>) {
        self.current.send_replace(Some(Current { incarnation, service }));
    }

    /// Nobody is called until there is another process.
    pub fn clear(&self) {
        self.current.send_replace(None);
    }

    /// The same, if it is this process.
    pub fn clear_if(&self, incarnation: u64) {
        self.current.send_if_modified(|current| {
            let is_it = current.as_ref().is_some_and(|c| c.incarnation == incarnation);
            if is_it {
                *current = None;
            }
            is_it
        });
    }

    /// The process that jobs run on; `None`: there is none.
    pub fn incarnation(&self) -> Option<u64> {
        self.current.borrow().as_ref().map(|current| current.incarnation)
    }

    /// Waits until there is a process.
    async fn process(&self) -> Current {
        let mut current = self.current.subscribe();
        loop {
            if let Some(current) = current.borrow_and_update().clone() {
                return current;
            }
            // The sender is in `self`.
            let _ = current.changed().await;
        }
    }

    /// Completes when jobs run on this process no longer.
    async fn replaced(&self, incarnation: u64) {
        let is_other = |current: &Option<Current>| {
            current.as_ref().is_none_or(|c| c.incarnation != incarnation)
        };
        // The sender is in `self`.
        let _ = self.current.subscribe().wait_for(is_other).await;
    }

    /// Calls the process, and gives up when another takes its place: it may never answer.
    async fn call<T, F>(
        &self,
        call: impl FnOnce(Arc<dyn ComputeService>) -> F,
    ) -> Result<T, SqlError>
    where
        F: Future<Output = Result<T, SqlError>>,
    {
        let Current { incarnation, service } = self.process().await;
        tokio::select! {
            biased;
            answer = call(service) => answer,
            () = self.replaced(incarnation) => Err(SqlError::new(
                SqlState::CANNOT_CONNECT_NOW,
                format!("compute process {incarnation} has been replaced"),
            )),
        }
    }

    /// Tells the process, if there is one, something that ends with it.
    async fn tell<F>(&self, call: impl FnOnce(Arc<dyn ComputeService>) -> F)
    where
        F: Future<Output = ()>,
    {
        let current = self.current.borrow().clone();
        let Some(Current { incarnation, service }) = current else { return };
        tokio::select! {
            biased;
            () = call(service) => {}
            () = self.replaced(incarnation) => {}
        }
    }
}

#[async_trait]
impl ComputeService for ComputeSlot {
    async fn start_job(&self, start: StartJob) -> Result<(), SqlError> {
        self.call(|process| async move { process.start_job(start).await }).await
    }

    async fn cut(
        &self,
        job: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<JobCommit, SqlError> {
        self.call(|process| async move { process.cut(job, generation, cut).await }).await
    }

    async fn apply_records(&self, message: StreamMessage) -> Result<Acknowledged, StreamError> {
        self.process().await.service.apply_records(message).await
    }

    async fn applied_since(&self, known: Acknowledged) -> Acknowledged {
        self.process().await.service.applied_since(known).await
    }

    /// Of a process that is gone there is nothing to end.
    async fn abort_epoch(&self, job: JobId, generation: Generation, error: SqlError) {
        self.tell(|process| async move { process.abort_epoch(job, generation, error).await }).await;
    }

    async fn publish(
        &self,
        job: JobId,
        generation: Generation,
        handles: Vec<PublishHandle>,
    ) -> Result<(), SqlError> {
        self.call(|process| async move { process.publish(job, generation, handles).await }).await
    }

    /// Of a process that is gone there is nothing to stop.
    async fn stop_job(&self, job: JobId, generation: Generation) {
        self.tell(|process| async move { process.stop_job(job, generation).await }).await;
    }
}
