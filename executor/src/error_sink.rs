//! Expressions that fail on a row of a view (docs/design.md §6): the value is NULL, the failure is
//! counted per job, and the first samples of each kind are kept for `millrace_catalog.errors`.
//!
//! Counts and a few samples are committed with the job's counters, so that a restart does not forget them: as
//! `errors.total`, `error.<SQLSTATE>.<place>` (a count) and `sample.<SQLSTATE>.<bytes of the place>.<place><message>`
//! (its number). They are bounded, because a job's counters are never removed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_common::SqlError;
use parking_lot::Mutex;

/// Samples kept of one kind of error.
const SAMPLES_PER_KIND: usize = 10;
/// Kinds kept apart; further ones are only counted in the total.
const KINDS: usize = 64;
/// Samples of one kind that outlive a restart, and bytes of each.
const SAVED_SAMPLES: usize = 2;
const SAVED_BYTES: usize = 240;

const TOTAL: &str = "errors.total";
const COUNT: &str = "error.";
const SAMPLE: &str = "sample.";

/// Failures of one expression with one SQLSTATE.
#[derive(Clone, Debug)]
pub struct ErrorKind {
    /// The operator or expression, as EXPLAIN names it.
    pub place: String,
    pub state: String,
    pub count: u64,
    pub samples: Vec<String>,
    /// `count` when it was last committed.
    saved: u64,
}

/// Counts a job's expression errors. Cheap when none happens: nothing is called.
#[derive(Debug, Default)]
pub struct ErrorSink {
    total: AtomicU64,
    saved_total: AtomicU64,
    /// By place and state.
    kinds: Mutex<BTreeMap<(String, String), ErrorKind>>,
}

impl ErrorSink {
    /// What a job had counted when these counters of it were committed.
    pub fn load(counters: &BTreeMap<String, u64>) -> ErrorSink {
        let sink = ErrorSink::default();
        let total = counters.get(TOTAL).copied().unwrap_or(0);
        sink.total.store(total, Ordering::Relaxed);
        sink.saved_total.store(total, Ordering::Relaxed);
        let mut samples = Vec::new();
        let mut kinds = sink.kinds.lock();
        for (name, &value) in counters {
            if let Some((state, place)) = name.strip_prefix(COUNT).and_then(|n| n.split_once('.')) {
                let kind = kind(&mut kinds, place, state);
                (kind.count, kind.saved) = (value, value);
            } else if let Some(sample) = name.strip_prefix(SAMPLE).and_then(read_sample) {
                samples.push((value, sample));
            }
        }
        samples.sort();
        for (_, (state, place, message)) in samples {
            kind(&mut kinds, place, state).samples.push(message.to_owned());
        }
        drop(kinds);
        sink
    }

    /// `rows` rows failed at `place` alike; `error` is what one of them said.
    pub fn report(&self, place: &str, error: &SqlError, rows: u64) {
        self.total.fetch_add(rows, Ordering::Relaxed);
        let mut kinds = self.kinds.lock();
        let key = (place.to_string(), error.state.0.to_string());
        if kinds.len() >= KINDS && !kinds.contains_key(&key) {
            return;
        }
        let kind = kind(&mut kinds, place, error.state.0);
        kind.count += rows;
        if kind.samples.len() < SAMPLES_PER_KIND && !kind.samples.contains(&error.message) {
            kind.samples.push(error.message.clone());
        }
    }

    /// What is to be committed: counters that have changed since the last call.
    pub fn unsaved(&self) -> BTreeMap<String, u64> {
        let total = self.total();
        if self.saved_total.swap(total, Ordering::Relaxed) == total {
            return BTreeMap::new();
        }
        let mut out = BTreeMap::from([(TOTAL.to_string(), total)]);
        for kind in self.kinds.lock().values_mut().filter(|k| k.count != k.saved) {
            kind.saved = kind.count;
            let (state, place) = (&kind.state, &kind.place);
            out.insert(format!("{COUNT}{state}.{place}"), kind.count);
            for (i, message) in kind.samples.iter().take(SAVED_SAMPLES).enumerate() {
                let end = message.floor_char_boundary(SAVED_BYTES);
                let length = place.len();
                let name = format!("{SAMPLE}{state}.{length}.{place}{}", &message[..end]);
                out.insert(name, i as u64);
            }
        }
        out
    }

    /// Failed rows since the job was created.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    pub fn kinds(&self) -> Vec<ErrorKind> {
        self.kinds.lock().values().cloned().collect()
    }
}

fn kind<'k>(
    kinds: &'k mut BTreeMap<(String, String), ErrorKind>,
    place: &str,
    state: &str,
) -> &'k mut ErrorKind {
    kinds.entry((place.to_string(), state.to_string())).or_insert_with(|| ErrorKind {
        place: place.to_string(),
        state: state.to_string(),
        count: 0,
        samples: Vec::new(),
        saved: 0,
    })
}

/// State, place and message of a sample's counter.
fn read_sample(name: &str) -> Option<(&str, &str, &str)> {
    let (state, rest) = name.split_once('.')?;
    let (length, rest) = rest.split_once('.')?;
    let (place, message) = rest.split_at_checked(length.parse().ok()?)?;
    Some((state, place, message))
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

    #[test]
    fn what_is_committed_outlives_a_restart_and_is_bounded() {
        let sink = ErrorSink::default();
        let mut counters = BTreeMap::new();
        let long = "é".repeat(1_000);
        for i in 0..1_000 {
            let e = SqlError::new(SqlState::DIVISION_BY_ZERO, format!("{i}: {long}"));
            sink.report(&format!("file /a.b/{}.csv", i % 100), &e, 1);
            counters.extend(sink.unsaved());
        }
        assert!(sink.unsaved().is_empty());
        assert!(counters.len() <= 1 + KINDS * (1 + SAVED_SAMPLES), "{}", counters.len());
        assert!(counters.keys().all(|name| name.len() < SAVED_BYTES + 64));
        let again = ErrorSink::load(&counters);
        assert_eq!(again.total(), 1_000);
        assert!(again.unsaved().is_empty());
        let (before, after) = (sink.kinds(), again.kinds());
        assert_eq!(before.len(), after.len());
        for (before, after) in before.iter().zip(&after) {
            assert_eq!((&before.place, &before.state), (&after.place, &after.state));
            assert_eq!((before.count, after.samples.len()), (after.count, SAVED_SAMPLES));
            assert!(before.samples[0].starts_with(&after.samples[0]));
        }
    }
}
