//! A process of a cluster as a host of its own would run it: its threads, its way to the store, and its sudden end.

use std::sync::Arc;
use std::time::Duration;

use millrace::StartError;
use millrace::roles::ComputeProcess;
use millrace::runtimes;
use millrace_storage::sim::{Profile, SimStore};
use object_store::ObjectStore;
use tokio::runtime::Runtime;

/// Threads of a process.
const THREADS: usize = 2;
/// How long the threads of one that was killed may take to end.
const ENDS: Duration = Duration::from_secs(20);

/// A process on a runtime of its own. Dropping it is a crash.
pub struct Host<P: Send + 'static> {
    process: Option<P>,
    runtime: Option<Runtime>,
    pub sim: SimStore,
}

impl<P: Send + 'static> Host<P> {
    /// Starts a process, given its way to the store that lies in `raw`. Its latencies are drawn from a seed: of processes
    /// with one seed all first requests take the same time, all second ones, and so on.
    pub async fn start<F>(
        name: &str,
        memory_limit: usize,
        (raw, profile, seed): (&Arc<dyn ObjectStore>, Profile, u64),
        start: impl FnOnce(Arc<dyn ObjectStore>) -> F,
    ) -> Result<Host<P>, String>
    where
        F: Future<Output = Result<P, StartError>> + Send + 'static,
    {
        let sim = SimStore::new(Arc::clone(raw), profile, seed).on_system_clock();
        let runtime = runtimes::builder(name, memory_limit)
            .worker_threads(THREADS)
            .build()
            .map_err(|e| format!("cannot start threads: {e}"))?;
        let started = runtime.spawn(start(Arc::new(sim.clone()))).await;
        // Of a start that has failed, too: a runtime must not be dropped on another one's thread.
        let mut host = Host { process: None, runtime: Some(runtime), sim };
        host.process = Some(match started {
            Ok(process) => process.map_err(|e| e.to_string())?,
            Err(e) => return Err(format!("the start of {name} failed: {e}")),
        });
        Ok(host)
    }

    pub fn process(&self) -> Result<&P, String> {
        self.process.as_ref().ok_or_else(|| "the process is gone".to_owned())
    }

    /// Ends it as `kill -9` does: it tells nobody, and does nothing any more when this returns.
    pub async fn kill(mut self) -> Result<(), String> {
        let (process, runtime) = (self.process.take(), self.runtime.take());
        let end = tokio::task::spawn_blocking(move || {
            drop(process);
            if let Some(runtime) = runtime {
                runtime.shutdown_timeout(ENDS);
            }
        });
        end.await.map_err(|e| e.to_string())
    }
}

impl Host<ComputeProcess> {
    pub fn incarnation(&self) -> Result<u64, String> {
        Ok(self.process()?.worker.store().incarnation())
    }
}

impl<P: Send + 'static> Drop for Host<P> {
    /// On a thread of its own: what is dropped with a process may have to be waited for.
    fn drop(&mut self) {
        let (process, runtime) = (self.process.take(), self.runtime.take());
        std::thread::spawn(move || {
            drop(process);
            if let Some(runtime) = runtime {
                runtime.shutdown_background();
            }
        });
    }
}
