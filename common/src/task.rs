//! The one place where the engine starts tasks, so that a simulation can decide when they run.
//!
//! Every task has a name, of what it does; a trace line tells when it starts. In a simulation of several processes a task
//! belongs to the process of the task that has started it, whose [`Gate`] decides when it runs.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// Whether tasks of a simulated process run now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    Run,
    /// The process is stopped, or it is another task's turn: the task goes on when it is woken.
    Wait,
    /// The process is dead: its tasks are dropped where they are.
    Never,
}

/// A simulated process, as its tasks ask before each step.
pub trait Gate: Send + Sync + 'static {
    /// Whether a task runs now; where it waits, `waker` is to be woken when it may run. Tasks are numbered in the order
    /// in which they are started.
    fn enter(&self, task: u64, waker: &Waker) -> Entry;
    /// The step of the task that ran is over.
    fn leave(&self);
    /// The task is gone, and may have waited to run: it was aborted, or has ended.
    fn forget(&self, task: u64);
}

thread_local! {
    /// Of the task that runs on this thread.
    static GATE: RefCell<Option<Arc<dyn Gate>>> = const { RefCell::new(None) };
    /// Tasks of simulated processes that were started on this thread.
    static STARTED: Cell<u64> = const { Cell::new(0) };
}

fn current_gate() -> Option<Arc<dyn Gate>> {
    GATE.with_borrow(Clone::clone)
}

/// While it lives, what this thread does is done by a process.
struct Inside(Option<Arc<dyn Gate>>);

impl Inside {
    fn enter(gate: &Arc<dyn Gate>) -> Inside {
        Inside(GATE.replace(Some(Arc::clone(gate))))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        GATE.set(self.0.take());
    }
}

/// A future of a simulated process; see [`within`].
pub struct Gated<F> {
    gate: Arc<dyn Gate>,
    task: u64,
    /// `None`: the process is dead.
    future: Option<Pin<Box<F>>>,
}

/// Has a future, and all tasks that it starts, run as a simulated process. It never completes when that is dead.
pub fn within<F: Future>(gate: Arc<dyn Gate>, future: F) -> Gated<F> {
    let task = STARTED.get();
    STARTED.set(task + 1);
    Gated { gate, task, future: Some(Box::pin(future)) }
}

impl<F> Drop for Gated<F> {
    fn drop(&mut self) {
        self.gate.forget(self.task);
    }
}

impl<F: Future> Future for Gated<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let gated = self.get_mut();
        let entry = gated.gate.enter(gated.task, cx.waker());
        let _inside = Inside::enter(&gated.gate);
        match (entry, &mut gated.future) {
            (Entry::Run, Some(future)) => {
                let polled = future.as_mut().poll(cx);
                gated.gate.leave();
                polled
            }
            (Entry::Never, future) => {
                *future = None;
                Poll::Pending
            }
            (Entry::Run | Entry::Wait, _) => Poll::Pending,
        }
    }
}

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
    match current_gate() {
        None => runtime.spawn(future),
        Some(gate) => runtime.spawn(within(gate, future)),
    }
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

/// Runs work that may block its thread, on a thread of a given runtime that is kept for such work. That of a simulated
/// process is a task like all others: when a thread of its own would be done, no seed tells.
pub fn spawn_blocking_on<R: Send + 'static>(
    runtime: &Handle,
    name: &'static str,
    work: impl FnOnce() -> R + Send + 'static,
) -> JoinHandle<R> {
    tracing::trace!(task = name, "started");
    match current_gate() {
        None => runtime.spawn_blocking(work),
        Some(gate) => runtime.spawn(within(gate, async move { work() })),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn tasks_answer_with_their_result() {
        assert_eq!(spawn("test", async { 1 }).await.unwrap(), 1);
        assert_eq!(spawn_blocking("test", || 2).await.unwrap(), 2);
        let runtime = Handle::current();
        assert_eq!(spawn_on(&runtime, "test", async { 3 }).await.unwrap(), 3);
        assert_eq!(spawn_blocking_on(&runtime, "test", || 4).await.unwrap(), 4);
    }

    /// A process that is stopped, or dead.
    struct Switch(Mutex<(Entry, Vec<Waker>)>);

    impl Switch {
        fn set(&self, entry: Entry) {
            let mut state = self.0.lock().unwrap();
            state.0 = entry;
            state.1.drain(..).for_each(Waker::wake);
        }
    }

    impl Gate for Switch {
        fn enter(&self, _: u64, waker: &Waker) -> Entry {
            let mut state = self.0.lock().unwrap();
            state.1.push(waker.clone());
            state.0
        }

        fn leave(&self) {}

        fn forget(&self, _: u64) {}
    }

    #[tokio::test(start_paused = true)]
    async fn tasks_of_a_stopped_process_wait_and_those_of_a_dead_one_are_dropped() {
        let switch = Arc::new(Switch(Mutex::new((Entry::Wait, Vec::new()))));
        let counted = Arc::<AtomicU64>::default();
        let counter = Arc::clone(&counted);
        let root = async move {
            let counter = Arc::clone(&counter);
            spawn("test", async move {
                loop {
                    counter.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            });
            spawn_blocking("test", || 5).await.unwrap()
        };
        let root = tokio::spawn(within(Arc::clone(&switch) as Arc<dyn Gate>, root));
        tokio::time::sleep(Duration::from_secs(9)).await;
        assert_eq!(counted.load(Ordering::Relaxed), 0);
        switch.set(Entry::Run);
        assert_eq!(root.await.unwrap(), 5);
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        assert_eq!(counted.load(Ordering::Relaxed), 3, "what it has started runs, too");
        switch.set(Entry::Wait);
        tokio::time::sleep(Duration::from_secs(9)).await;
        switch.set(Entry::Never);
        tokio::time::sleep(Duration::from_secs(9)).await;
        assert_eq!(counted.load(Ordering::Relaxed), 3);
        assert_eq!(Arc::strong_count(&counted), 1, "the dead one's tasks are gone");
        assert!(current_gate().is_none());
    }
}
