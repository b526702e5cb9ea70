//! The runtimes of a server process: whatever may be busy for long is kept from the threads that answer clients.
//!
//! | runtime | what runs on it | priority |
//! |---|---|---|
//! | the caller's | connections, statements, DML, meta, commits, the log | the process's |
//! | tasks | the tasks of jobs, flushes | low |
//! | background | encoding of large commits, merges, compactions | low; of a compactor the lowest |
//! | queries | batch queries (in the frontend) | low |
//!
//! On the threads for tasks and for queries each job, and each query, has one share ([`millrace_common::fair_shares`]). The
//! operating system shares the cores out among the runtimes by priority ([`threads`]). What these read of the
//! object store runs where it is asked for.

use std::sync::Arc;

use async_trait::async_trait;
use millrace_common::fair_shares::threads_for;
use millrace_common::task::spawn_on;
use millrace_common::{SqlError, heap, threads};
use millrace_compactor::Compactor;
use millrace_rpc::log::MoveParts;
use millrace_rpc::request::carried;
use millrace_rpc::services::{CompactionTask, CompactorService, LivePart};
use millrace_rpc::version::VersionEdit;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio_util::task::AbortOnDropHandle;

use crate::standalone::StartError;

/// How long a thread for flushes, compactions and file access waits for more work.
const IDLE_THREAD: std::time::Duration = std::time::Duration::from_secs(1);
/// Threads that drive background work; what computes much is on blocking threads.
const BACKGROUND_THREADS: usize = 1;

/// Which threads the roles of a server run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Threads {
    /// All but queries on the caller's runtime, as simulations and tests want it that end a server with its runtime.
    #[default]
    Shared,
    /// As a server process does it.
    Apart,
}

/// The runtimes beside the caller's and the frontend's.
pub struct Runtimes {
    /// Until they are ended.
    own: Option<[Runtime; 2]>,
}

impl Runtimes {
    /// Starts threads for as many cores as the process may use.
    pub fn start(memory_limit: usize) -> Result<Runtimes, StartError> {
        Runtimes::with_merges_at(memory_limit, threads::lower_priority)
    }

    /// Of a process that merges and nothing else: it may share its host with those that it is to relieve.
    pub fn of_compactor(memory_limit: usize) -> Result<Runtimes, StartError> {
        Runtimes::with_merges_at(memory_limit, threads::lowest_priority)
    }

    fn with_merges_at(memory_limit: usize, merges: fn()) -> Result<Runtimes, StartError> {
        let build = |name: &str, workers: usize, lower: fn()| {
            builder(name, memory_limit)
                .worker_threads(workers)
                .on_thread_start(lower)
                .build()
                .map_err(StartError::Threads)
        };
        let tasks = build("millrace-task", threads_for(cores()), threads::lower_priority)?;
        let background = build("millrace-merge", BACKGROUND_THREADS, merges)?;
        Ok(Runtimes { own: Some([tasks, background]) })
    }

    fn handle(&self, at: usize) -> Option<Handle> {
        Some(self.own.as_ref()?.get(at)?.handle().clone())
    }

    /// Where tasks of jobs run.
    pub fn tasks(&self) -> Option<Handle> {
        self.handle(0)
    }

    /// Where what computes much runs that is no task.
    pub fn background(&self) -> Option<Handle> {
        self.handle(1)
    }

    /// Leaves what is still under way to the end of the process: nothing durable depends on it, and a runtime that
    /// is torn down beneath it would make it panic.
    pub fn leave(mut self) {
        std::mem::forget(self.own.take());
    }
}

impl Drop for Runtimes {
    /// A runtime must not be waited for on another runtime's thread.
    fn drop(&mut self) {
        for runtime in self.own.take().into_iter().flatten() {
            runtime.shutdown_background();
        }
    }
}

/// Compactions on the runtime for what computes much.
pub(crate) struct BackgroundCompactor {
    pub compactor: Arc<Compactor>,
    /// `None`: the caller's.
    pub runtime: Option<Handle>,
}

#[async_trait]
impl CompactorService for BackgroundCompactor {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError> {
        let Some(runtime) = &self.runtime else { return self.compactor.compact(task).await };
        let compactor = Arc::clone(&self.compactor);
        let work = carried(async move { compactor.compact(task).await });
        let compaction = spawn_on(runtime, "compact", work);
        let ended = AbortOnDropHandle::new(compaction).await;
        ended.map_err(|e| SqlError::internal(format!("a compaction failed: {e}")))?
    }

    async fn copy_parts(&self, parts: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        let Some(runtime) = &self.runtime else { return self.compactor.copy_parts(parts).await };
        let compactor = Arc::clone(&self.compactor);
        let work = carried(async move { compactor.copy_parts(parts).await });
        let ended = AbortOnDropHandle::new(spawn_on(runtime, "copy parts", work)).await;
        ended.map_err(|e| SqlError::internal(format!("copying live data failed: {e}")))?
    }
}

/// A runtime of a server: stacks deep enough for expressions, and few threads that wait.
pub fn builder(name: &str, memory_limit: usize) -> Builder {
    let mut builder = Builder::new_multi_thread();
    builder
        .thread_stack_size(millrace_frontend::STACK_BYTES)
        .enable_all()
        .thread_name(name)
        // Each keeps some memory of its own.
        .thread_keep_alive(IDLE_THREAD)
        .max_blocking_threads(blocking_threads(memory_limit))
        .on_thread_stop(heap::report);
    builder
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Threads for flushes, compactions and file access, at most. Each keeps pages of its own for every size
/// that it has ever asked for. Few are enough: only flushes, compactions and what is set
/// aside, some six at most, wait on one for another.
fn blocking_threads(limit: usize) -> usize {
    (limit / (32 << 20)).clamp(8, 512)
}
