//! Expressions that fail on a row of a view (docs/design.md §6): the value is NULL, the failure is
//! counted per job, and the first samples of each kind are kept for `millrace_catalog.errors`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_common::SqlError;
use parking_lot::Mutex;

/// Samples kept of one kind of error.
const SAMPLES_PER_KIND: usize = 10;
/// Kinds kept apart; further ones are only counted in the total.
const KINDS: usize = 64;

/// Failures of one expression with one SQLSTATE.
#[derive(Clone, Debug)]
pub struct ErrorKind {
    /// The operator or expression, as EXPLAIN names it.
    pub place: String,
    pub state: &'static str,
    pub count: u64,
    pub samples: Vec<String>,
}

/// Counts a job's expression errors. Cheap when none happens: nothing is called.
#[derive(Debug, Default)]
pub struct ErrorSink {
    total: AtomicU64,
    kinds: Mutex<BTreeMap<(String, &'static str), ErrorKind>>,
}

impl ErrorSink {
    /// `rows` rows failed at `place` alike; `error` is what one of them said.
    pub fn report(&self, place: &str, error: &SqlError, rows: u64) {
        self.total.fetch_add(rows, Ordering::Relaxed);
        let mut kinds = self.kinds.lock();
        let key = (place.to_string(), error.state.0);
        if kinds.len() >= KINDS && !kinds.contains_key(&key) {
            return;
        }
        let kind = kinds.entry(key).or_insert_with(|| ErrorKind {
            place: place.to_string(),
            state: error.state.0,
            count: 0,
            samples: Vec::new(),
        });
        kind.count += rows;
        if kind.samples.len() < SAMPLES_PER_KIND && !kind.samples.contains(&error.message) {
            kind.samples.push(error.message.clone());
        }
    }

    /// Failed rows since the job started on this worker.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    pub fn kinds(&self) -> Vec<ErrorKind> {
        self.kinds.lock().values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::SqlState;

    use super::*;

    #[test]
    fn counts_all_and_keeps_the_first_samples() {
        let sink = ErrorSink::default();
        for i in 0..100 {
            let e = SqlError::new(SqlState::DIVISION_BY_ZERO, format!("division by zero {i}"));
            sink.report("Project", &e, 2);
        }
        assert_eq!(sink.total(), 200);
        let kinds = sink.kinds();
        assert_eq!(kinds.len(), 1);
        assert_eq!(kinds[0].count, 200);
        assert_eq!(kinds[0].samples.len(), SAMPLES_PER_KIND);
        assert_eq!(kinds[0].samples[0], "division by zero 0");
    }
}
