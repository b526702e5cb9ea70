//! The one place where the engine starts tasks, so that a simulation can decide when they run.
//!
//! Every task has a name, of what it does; a trace line tells when it starts.

use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// Runs a future beside the caller, on the runtime that the caller runs on.
///
/// # Panics
///
/// Outside a runtime.
pub fn spawn<F>(name: &'static str, future: F) -> JoinHandle<F::Output>
where
    F: Future<Output: Send + 'static> + Send + 'static,
{
    spawn_on(&Handle::current(), name, future)
}

/// Runs a future beside the caller, on a given runtime.
pub fn spawn_on<F>(runtime: &Handle, name: &'static str, future: F) -> JoinHandle<F::Output>
where
    F: Future<Output: Send + 'static> + Send + 'static,
{
    tracing::trace!(task = name, "started");
    runtime.spawn(future)
}

/// Runs work that may block its thread, on a thread of the caller's runtime that is kept for such work.
///
/// # Panics
///
/// Outside a runtime.
pub fn spawn_blocking<R: Send + 'static>(
    name: &'static str,
    work: impl FnOnce() -> R + Send + 'static,
) -> JoinHandle<R> {
    spawn_blocking_on(&Handle::current(), name, work)
}

/// Runs work that may block its thread, on a thread of a given runtime that is kept for such work.
pub fn spawn_blocking_on<R: Send + 'static>(
    runtime: &Handle,
    name: &'static str,
    work: impl FnOnce() -> R + Send + 'static,
) -> JoinHandle<R> {
    tracing::trace!(task = name, "started");
    runtime.spawn_blocking(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tasks_answer_with_their_result() {
        assert_eq!(spawn("test", async { 1 }).await.unwrap(), 1);
        assert_eq!(spawn_blocking("test", || 2).await.unwrap(), 2);
        let runtime = Handle::current();
        assert_eq!(spawn_on(&runtime, "test", async { 3 }).await.unwrap(), 3);
        assert_eq!(spawn_blocking_on(&runtime, "test", || 4).await.unwrap(), 4);
    }
}
