//! Counters of a running job, for EXPLAIN ANALYZE, SHOW JOBS and metrics. Relaxed atomics, updated
//! once a chunk, never once a row.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use millrace_common::EnvHandle;
use parking_lot::Mutex;
use tokio::time::Instant;

/// A number that any task may add to.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// For gauges summed over instances: replaces what an instance last reported.
    pub fn replace(&self, last: &mut u64, now: u64) {
        self.0.fetch_add(now.wrapping_sub(*last), Ordering::Relaxed);
        *last = now;
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One operator of the graph, over all its parallel instances.
#[derive(Debug, Default)]
pub struct OperatorMetrics {
    pub fragment: usize,
    pub node: usize,
    pub name: String,
    /// Kept by the runtime.
    pub rows_in: Counter,
    pub rows_out: Counter,
    /// Kept by the runtime from `Operator::memory_size`.
    pub state_bytes: Counter,
    /// Kept by the operators.
    pub cache_hits: Counter,
    pub cache_misses: Counter,
    pub parked_rows: Counter,
    /// Batched reads of state that had to wait.
    pub fetch_rounds: Counter,
    /// How often it settled before the barrier what it would have held. Kept by the runtime.
    pub settled_early: Counter,
}

impl OperatorMetrics {
    pub fn new(fragment: usize, node: usize, name: impl Into<String>) -> Arc<OperatorMetrics> {
        Arc::new(OperatorMetrics {
            fragment,
            node,
            name: name.into(),
            ..OperatorMetrics::default()
        })
    }

    pub fn read(&self) -> OperatorStats {
        OperatorStats {
            fragment: self.fragment,
            node: self.node,
            name: self.name.clone(),
            rows_in: self.rows_in.get(),
            rows_out: self.rows_out.get(),
            state_bytes: self.state_bytes.get(),
            cache_hits: self.cache_hits.get(),
            cache_misses: self.cache_misses.get(),
            parked_rows: self.parked_rows.get(),
            fetch_rounds: self.fetch_rounds.get(),
            settled_early: self.settled_early.get(),
        }
    }
}

/// One operator of a running job, all its tasks together: what [`OperatorMetrics`] read at some moment.
#[derive(Clone, Debug, Default)]
pub struct OperatorStats {
    /// Its place in the job graph.
    pub fragment: usize,
    pub node: usize,
    pub name: String,
    pub rows_in: u64,
    pub rows_out: u64,
    /// Bytes of its state in caches.
    pub state_bytes: u64,
    pub cache_hits: u64,
    pub cache_misses: u64,
    /// Rows that wait for state now.
    pub parked_rows: u64,
    /// Dependent rounds of reads that went below its caches.
    pub fetch_rounds: u64,
    /// How often it settled before the barrier what it would have held until then.
    pub settled_early: u64,
}

/// How far a job's tasks are, while they are at an epoch. Shared by all of them.
#[derive(Debug)]
pub struct Progress {
    /// Rows that the first scans have read, and have to read in all as far as that is known.
    pub scanned: Counter,
    pub to_scan: Counter,
    clock: EnvHandle,
    began: Instant,
    /// When rows last moved: milliseconds from `began`.
    moved: AtomicU64,
    /// Tasks that compute at this moment.
    computing: AtomicUsize,
}

impl Progress {
    pub fn new(clock: EnvHandle) -> Progress {
        Progress {
            scanned: Counter::default(),
            to_scan: Counter::default(),
            began: clock.now(),
            clock,
            moved: AtomicU64::new(0),
            computing: AtomicUsize::new(0),
        }
    }

    /// A task has taken a step.
    pub fn note_step(&self) {
        let since = self.clock.elapsed(self.began);
        self.moved.store(since.as_millis() as u64, Ordering::Relaxed);
    }

    /// For how long no task has done anything but wait.
    pub fn idle(&self) -> Duration {
        if self.computing.load(Ordering::Relaxed) > 0 {
            return Duration::ZERO;
        }
        let moved = Duration::from_millis(self.moved.load(Ordering::Relaxed));
        self.clock.elapsed(self.began).saturating_sub(moved)
    }

    /// A task's work, which must not unwind. While it is being polled, the task computes.
    pub fn watch<F: Future>(self: Arc<Self>, work: F) -> impl Future<Output = F::Output> {
        let mut work = Box::pin(work);
        std::future::poll_fn(move |context| {
            self.computing.fetch_add(1, Ordering::Relaxed);
            let polled = work.as_mut().poll(context);
            self.computing.fetch_sub(1, Ordering::Relaxed);
            polled
        })
    }
}

/// What is counted of a running job.
#[derive(Debug)]
pub struct JobMetrics {
    pub operators: Vec<Arc<OperatorMetrics>>,
    pub progress: Arc<Progress>,
}

/// Barriers of a job, newest last.
#[derive(Debug, Default)]
pub struct BarrierLog {
    micros: Mutex<std::collections::VecDeque<u64>>,
}

impl BarrierLog {
    const KEPT: usize = 1_024;

    pub fn record(&self, duration: Duration) {
        let mut micros = self.micros.lock();
        if micros.len() == Self::KEPT {
            micros.pop_front();
        }
        micros.push_back(duration.as_micros() as u64);
    }

    pub fn micros(&self) -> Vec<u64> {
        self.micros.lock().iter().copied().collect()
    }
}

/// A running job as EXPLAIN ANALYZE shows it.
#[derive(Clone, Debug, Default)]
pub struct JobStats {
    pub operators: Vec<OperatorStats>,
    /// From the cut's request until its delta was durable, of the last barriers.
    pub barrier_micros: Vec<u64>,
    pub epochs: u64,
    pub expression_errors: u64,
    /// See [`Progress`].
    pub scanned: u64,
    pub to_scan: u64,
    /// For how long nothing of it has moved: no rows, and no upload of what it writes.
    pub idle: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_computes_is_not_idle() {
        let progress = Arc::new(Progress {
            began: Instant::now() - Duration::from_secs(60),
            ..Progress::new(EnvHandle::default())
        });
        assert!(progress.idle() >= Duration::from_secs(60));
        let of_task = Arc::clone(&progress);
        let while_polled = Arc::clone(&progress).watch(async move { of_task.idle() }).await;
        assert_eq!(while_polled, Duration::ZERO);
        assert!(progress.idle() >= Duration::from_secs(60), "it only waits again");
        progress.note_step();
        assert!(progress.idle() < Duration::from_secs(60));
    }
}
