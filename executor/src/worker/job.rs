//! A job on this worker: what it is, how it ends, how it fails.
//!
//! Failure is the job's own affair: the first task that fails or panics stops the others and is told
//! to meta, by the cut that waits or, between cuts, by itself. Stopping aborts the tasks wherever they
//! wait, so a store that hangs delays nobody.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::fair_shares::Share;
use millrace_common::task::spawn_on;
use millrace_common::{Generation, JobId, RelationId, SqlError};
use millrace_rpc::catalog::Relation;
use millrace_rpc::services::MetaService;
use millrace_storage::JobStore;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::cuts::Cuts;
use super::derived::Derived;
use super::feed::{Feed, FeedState};
use super::table::Table;
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::stats::{BarrierLog, Counter, JobMetrics, JobStats, OperatorStats};
use crate::task::Task;

/// What a job runs.
pub enum Kind {
    /// A source: its readers regenerate its rows.
    Nothing,
    Table(Table),
    Derived(Box<Derived>),
}

#[derive(Default)]
struct Failure {
    error: Option<SqlError>,
    /// A cut will report it.
    cutting: usize,
}

pub struct Job {
    pub id: JobId,
    /// What logs call it.
    pub label: String,
    pub generation: Generation,
    pub store: Option<Arc<JobStore>>,
    pub kind: Kind,
    pub meta: Arc<dyn MetaService>,
    pub metrics: JobMetrics,
    pub barriers: BarrierLog,
    pub epochs: Counter,
    pub cuts: Cuts,
    pub errors: Arc<ErrorSink>,
    /// Of a table with a connector: why that is not going on.
    pub feed: FeedState,
    /// A flush is under way.
    pub flushing: AtomicBool,
    stop: CancellationToken,
    failure: Mutex<Failure>,
    handles: Mutex<Vec<JoinHandle<()>>>,
    /// Those of `handles`, until they are gone, whoever has aborted them.
    tasks: TaskTracker,
}

impl Job {
    pub fn new(
        relation: &Relation,
        generation: Generation,
        store: Option<Arc<JobStore>>,
        kind: Kind,
        meta: Arc<dyn MetaService>,
        metrics: JobMetrics,
        errors: Arc<ErrorSink>,
    ) -> Arc<Job> {
        Arc::new(Job {
            id: RelationId(relation.id),
            label: relation.label(),
            generation,
            store,
            kind,
            meta,
            metrics,
            barriers: BarrierLog::default(),
            epochs: Counter::default(),
            cuts: Cuts::default(),
            errors,
            feed: FeedState::default(),
            flushing: AtomicBool::new(false),
            stop: CancellationToken::new(),
            failure: Mutex::default(),
            handles: Mutex::default(),
            tasks: TaskTracker::new(),
        })
    }

    /// Runs the job's tasks, in its share of the cores.
    pub fn spawn(
        self: &Arc<Self>,
        tasks: Vec<Task>,
        runtime: &tokio::runtime::Handle,
        share: &Arc<Share>,
    ) {
        let mut handles = self.handles.lock();
        for task in tasks {
            // Weak: the tasks must not keep the job, nor its channels, alive.
            let job = Arc::downgrade(self);
            let stop = self.stop.clone();
            let progress = Arc::clone(&self.metrics.progress);
            let share = Arc::clone(share);
            let task = self.tasks.track_future(async move {
                let run = progress.watch(AssertUnwindSafe(task.run()).catch_unwind());
                let run = share.run(run);
                let ended = tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    ended = run => ended,
                };
                let error = match ended {
                    Ok(Ok(())) => ExecError::internal("a task ended by itself"),
                    Ok(Err(e)) => e,
                    Err(panic) => ExecError::Panic(panic_text(panic.as_ref())),
                };
                if let Some(job) = job.upgrade() {
                    job.fail(error);
                }
            });
            handles.push(spawn_on(runtime, "run a task", task));
        }
    }

    /// Runs what works beside the job's tasks until it ends, in its share of the cores. Without it the job does the same.
    pub fn spawn_beside(
        &self,
        work: Vec<BoxFuture<'static, ()>>,
        runtime: &tokio::runtime::Handle,
        share: &Arc<Share>,
    ) {
        let mut handles = self.handles.lock();
        for work in work {
            let (label, stop) = (self.label.clone(), self.stop.clone());
            let run = share.run(AssertUnwindSafe(work).catch_unwind());
            let work = self.tasks.track_future(async move {
                let ended = tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    ended = run => ended,
                };
                if let Err(panic) = ended {
                    let panic = panic_text(panic.as_ref());
                    tracing::error!(job = label, panic, "what looks ahead panicked");
                }
            });
            handles.push(spawn_on(runtime, "look ahead", work));
        }
    }

    /// Runs a table's connector until the job ends.
    pub fn spawn_feed(self: &Arc<Self>, feed: Feed, runtime: &tokio::runtime::Handle) {
        let (job, stop) = (Arc::downgrade(self), self.stop.clone());
        let work = Arc::clone(&self.metrics.progress.work);
        let feeding = self.tasks.track_future(async move {
            let run = AssertUnwindSafe(work.count(feed.run())).catch_unwind();
            let ended = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                ended = run => ended,
            };
            if let (Err(panic), Some(job)) = (ended, job.upgrade()) {
                job.fail(ExecError::Panic(panic_text(panic.as_ref())));
            }
        });
        self.handles.lock().push(spawn_on(runtime, "feed a table", feeding));
    }

    /// A task failed. Only the first failure counts; the others follow from it.
    pub fn fail(&self, error: ExecError) {
        if matches!(error, ExecError::Stopped) {
            return;
        }
        let error = error.into_sql();
        tracing::warn!(job = self.label, generation = self.generation.0, %error, "job failed");
        let report = {
            let mut failure = self.failure.lock();
            let first = failure.error.is_none();
            failure.error.get_or_insert_with(|| error.clone());
            first && failure.cutting == 0
        };
        self.end(Some(&error));
        if report {
            self.meta.report_failure(self.id, self.generation, error);
        }
    }

    fn end(&self, reason: Option<&SqlError>) {
        self.stop.cancel();
        match &self.kind {
            Kind::Table(table) => table.sequencer.stop(reason),
            Kind::Derived(derived) => derived.withdraw_announced(),
            Kind::Nothing => {}
        }
    }

    /// Awaits a step of a cut; the job's end interrupts it. Its failure is this step's.
    pub async fn guard<T>(
        &self,
        step: impl Future<Output = Result<T, ExecError>>,
    ) -> Result<T, SqlError> {
        self.failure.lock().cutting += 1;
        let result = tokio::select! {
            biased;
            result = step => result,
            () = self.stop.cancelled() => Err(ExecError::Stopped),
        };
        let first = {
            let mut failure = self.failure.lock();
            failure.cutting -= 1;
            failure.error.clone()
        };
        let result = match (result, first) {
            (Ok(value), None) => Ok(value),
            (_, Some(error)) => Err(error),
            (Err(error), None) => Err(error.into_sql()),
        };
        if let Err(error) = &result {
            self.failure.lock().error.get_or_insert_with(|| error.clone());
            self.end(Some(error));
        }
        result
    }

    /// Ends the tasks, wherever they are, and waits until they are gone, also where another call has begun to end them.
    pub async fn stop(&self) {
        self.end(None);
        let handles = std::mem::take(&mut *self.handles.lock());
        for handle in handles {
            handle.abort();
        }
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// What is waited for to know that the tasks are gone, once the job has been stopped.
    pub fn tasks(&self) -> TaskTracker {
        self.tasks.clone()
    }

    /// Why it failed, if it did.
    pub fn failure(&self) -> Option<SqlError> {
        self.failure.lock().error.clone()
    }

    /// Ends it for a reason found elsewhere.
    pub fn set_failure(&self, error: SqlError) {
        self.failure.lock().error.get_or_insert(error);
    }

    /// Completes when the job has ended or is about to.
    pub async fn stopped(&self) {
        self.stop.cancelled().await;
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.is_cancelled()
    }

    pub fn stats(&self) -> JobStats {
        let progress = &self.metrics.progress;
        let uploaded = self.store.as_ref().and_then(|s| s.since_upload());
        JobStats {
            fragment_tasks: self.metrics.fragment_tasks.clone(),
            operators: self.operators(),
            barrier_micros: self.barriers.micros(),
            epochs: self.epochs.get(),
            expression_errors: self.errors.total(),
            scanned: progress.scanned.get(),
            to_scan: progress.to_scan.get(),
            idle: progress.idle().min(uploaded.unwrap_or(Duration::MAX)),
            worked: progress.work.total(),
        }
    }

    /// A table has none, but what feeds it.
    fn operators(&self) -> Vec<OperatorStats> {
        match &self.kind {
            Kind::Table(table) => table.sequencer.connector_stats().into_iter().collect(),
            Kind::Derived(_) | Kind::Nothing => {
                self.metrics.operators.iter().map(|m| m.read()).collect()
            }
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_string())
}
