//! Operations of the disk tier that took longer than they may. As long as one is under way, the tier counts as absent.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;

use millrace_common::task::spawn_on;

pub(super) struct Overdue {
    directory: PathBuf,
    /// Where what is overdue goes on.
    runtime: Handle,
    operations: Arc<AtomicUsize>,
}

impl Overdue {
    pub fn new(directory: PathBuf, runtime: Handle) -> Overdue {
        Overdue { directory, runtime, operations: Arc::default() }
    }

    /// Whether an operation that has exceeded its bound is still under way.
    pub fn any(&self) -> bool {
        self.operations.load(Ordering::Relaxed) > 0
    }

    /// What the operation says, or `None` if it takes longer than `bound`. It goes on in the background then.
    pub async fn within<T: Send + 'static>(
        &self,
        bound: Duration,
        doing: &'static str,
        operation: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let mut operation = Box::pin(operation);
        match timeout(bound, &mut operation).await {
            Ok(result) => Some(result),
            Err(_) => {
                self.leave(bound, doing, operation);
                None
            }
        }
    }

    fn leave<T: Send + 'static>(
        &self,
        bound: Duration,
        doing: &'static str,
        operation: impl Future<Output = T> + Send + 'static,
    ) {
        let directory = self.directory.clone();
        if self.operations.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                directory = %directory.display(),
                "{doing} takes longer than {bound:?}; going on without the disk cache until it has ended"
            );
        }
        let operations = self.operations.clone();
        spawn_on(&self.runtime, "end an overdue operation of the disk cache", async move {
            operation.await;
            if operations.fetch_sub(1, Ordering::Relaxed) == 1 {
                tracing::info!(directory = %directory.display(), "the disk cache answers again");
            }
        });
    }
}
