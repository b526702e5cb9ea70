//! Threads of the disk tier's own, because foyer must not lose its runtime beneath it: where a runtime ends while an
//! area is given up, foyer asks for the next one while it holds its lock, the runtime drops the new task at once, and
//! the dropped task takes the same lock. The thread hangs, and with it whoever waits for the end of its runtime.
//!
//! Hence this runtime ends only when the cache has been closed, and nobody ever waits for its end.

use std::future::Future;

use tokio::runtime::{Builder, Handle, Runtime};

use millrace_common::heap;
use millrace_common::task::spawn_on;

/// They encode blocks and give up areas; what waits for the disk has threads apart.
const WORKERS: usize = 2;
/// Reads and writes of the disk at the same time. More only queue in the device.
pub(super) const CONCURRENT_IO: usize = 64;

pub(super) struct DiskRuntime {
    handle: Handle,
    /// `None`: ends by itself.
    runtime: Option<Runtime>,
}

impl DiskRuntime {
    pub fn start() -> std::io::Result<DiskRuntime> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .max_blocking_threads(CONCURRENT_IO)
            .thread_name("millrace-disk")
            .enable_time()
            .on_thread_stop(heap::report)
            .build()?;
        Ok(DiskRuntime { handle: runtime.handle().clone(), runtime: Some(runtime) })
    }

    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs a last task, whose end is the runtime's too.
    pub fn end_after(&mut self, last: impl Future<Output = ()> + Send + 'static) {
        let Some(runtime) = self.runtime.take() else { return };
        spawn_on(&self.handle, "close the disk cache", async move {
            last.await;
            runtime.shutdown_background();
        });
    }
}

impl Drop for DiskRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
