//! The compute process of the moment, as one service for all drivers.
//!
//! A driver calls whoever jobs run on now. While there is nobody it waits: its job is not failing, and starts as soon as
//! a process has taken over. What belonged to an earlier process is fenced by the generation of the job, so a call that
//! reaches the next one instead does no harm.

use std::sync::Arc;

use async_trait::async_trait;
use millrace_common::{Generation, JobId, SqlError};
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
    async fn service(&self) -> Arc<dyn ComputeService> {
        let mut current = self.current.subscribe();
        loop {
            if let Some(current) = current.borrow_and_update().clone() {
                return current.service;
            }
            // The sender is in `self`.
            let _ = current.changed().await;
        }
    }

    fn service_now(&self) -> Option<Arc<dyn ComputeService>> {
        self.current.borrow().as_ref().map(|current| Arc::clone(&current.service))
    }
}

#[async_trait]
impl ComputeService for ComputeSlot {
    async fn start_job(&self, start: StartJob) -> Result<(), SqlError> {
        self.service().await.start_job(start).await
    }

    async fn cut(
        &self,
        job: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<JobCommit, SqlError> {
        self.service().await.cut(job, generation, cut).await
    }

    async fn apply_records(&self, message: StreamMessage) -> Result<Acknowledged, StreamError> {
        self.service().await.apply_records(message).await
    }

    async fn applied_since(&self, known: Acknowledged) -> Acknowledged {
        self.service().await.applied_since(known).await
    }

    /// Of a process that is gone there is nothing to end.
    async fn abort_epoch(&self, job: JobId, generation: Generation, error: SqlError) {
        if let Some(service) = self.service_now() {
            service.abort_epoch(job, generation, error).await;
        }
    }

    async fn publish(
        &self,
        job: JobId,
        generation: Generation,
        handles: Vec<PublishHandle>,
    ) -> Result<(), SqlError> {
        self.service().await.publish(job, generation, handles).await
    }

    /// Of a process that is gone there is nothing to stop.
    async fn stop_job(&self, job: JobId, generation: Generation) {
        if let Some(service) = self.service_now() {
            service.stop_job(job, generation).await;
        }
    }
}
