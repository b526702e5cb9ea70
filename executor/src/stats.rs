//! Counters of a running job, for EXPLAIN ANALYZE, SHOW JOBS and metrics. Relaxed atomics, updated
//! once a chunk, never once a row.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

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
        }
    }
}

/// What [`OperatorMetrics`] read at some moment.
#[derive(Clone, Debug, Default)]
pub struct OperatorStats {
    pub fragment: usize,
    pub node: usize,
    pub name: String,
    pub rows_in: u64,
    pub rows_out: u64,
    pub state_bytes: u64,
    pub cache_hits: u64,
    pub cache_misses: u64,
    pub parked_rows: u64,
    pub fetch_rounds: u64,
}

/// Barriers of a job, newest last.
#[derive(Debug, Default)]
pub struct BarrierLog {
    micros: Mutex<std::collections::VecDeque<u64>>,
}

impl BarrierLog {
    const KEPT: usize = 1_024;

    pub fn record(&self, duration: std::time::Duration) {
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
}
