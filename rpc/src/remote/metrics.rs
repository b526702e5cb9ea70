//! Calls of this process to others and of others to it, counted for Prometheus: by method and outcome, with the time that
//! they took.

use std::collections::BTreeMap;
use std::fmt::Write;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::request::RequestId;

/// Upper limits of the histogram's buckets, in seconds.
const LIMITS: [f64; 8] = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0];
/// Methods and outcomes that are counted apart; those of a build are fewer.
const MAX_SERIES: usize = 512;

/// Who has counted a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    Server,
    Client,
}

#[derive(Clone, Copy, Debug, Default)]
struct Histogram {
    /// By limit; what took longer is in none.
    counts: [u64; LIMITS.len()],
    count: u64,
    seconds: f64,
}

impl Histogram {
    fn observe(&mut self, seconds: f64) {
        if let Some(at) = LIMITS.iter().position(|limit| seconds <= *limit) {
            self.counts[at] += 1;
        }
        self.count += 1;
        self.seconds += seconds;
    }

    fn write(&self, text: &mut String, name: &str, labels: &str) {
        let mut sum = 0;
        for (limit, count) in LIMITS.iter().zip(self.counts) {
            sum += count;
            // Writing to a String does not fail.
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{limit}\"}} {sum}");
        }
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(text, "{name}_sum{{{labels}}} {}", self.seconds);
        let _ = writeln!(text, "{name}_count{{{labels}}} {}", self.count);
    }
}

type Series = BTreeMap<(Side, String, &'static str), Histogram>;

/// Of the process.
static CALLS: Mutex<Series> = Mutex::new(BTreeMap::new());

/// A call under way. Dropped before its end, it was cancelled.
pub(super) struct Measured {
    side: Side,
    method: String,
    begun: Instant,
    outcome: &'static str,
    /// What it is part of, for the log of who makes it.
    request: Option<RequestId>,
}

impl Measured {
    pub(super) fn begin(side: Side, method: String) -> Measured {
        let (begun, outcome, request) = (Instant::now(), "cancelled", None);
        Measured { side, method, begun, outcome, request }
    }

    pub(super) fn of_request(mut self, request: Option<RequestId>) -> Measured {
        self.request = request;
        self
    }

    /// What came of it. The time is measured when this is dropped.
    pub(super) fn end(&mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for Measured {
    fn drop(&mut self) {
        // A caller may name any method; only those that are served are told apart.
        let method = match self.outcome {
            "unimplemented" => "unknown".to_owned(),
            _ => std::mem::take(&mut self.method),
        };
        let request = self.request.as_ref().map(RequestId::as_str);
        match self.side {
            // In the span of the call, which names the request.
            Side::Server => tracing::debug!(outcome = self.outcome, "answered"),
            Side::Client => tracing::debug!(method, request, outcome = self.outcome, "called"),
        }
        let seconds = self.begun.elapsed().as_secs_f64();
        let (mut calls, key) = (CALLS.lock(), (self.side, method, self.outcome));
        if calls.len() < MAX_SERIES || calls.contains_key(&key) {
            calls.entry(key).or_default().observe(seconds);
        }
    }
}

/// Appends what was counted since the process began, in Prometheus' text format.
pub fn write_call_metrics(text: &mut String) {
    let calls = CALLS.lock().clone();
    let families = [
        (
            Side::Server,
            "millrace_rpc_server_seconds",
            "Calls that others have made of this process.",
        ),
        (
            Side::Client,
            "millrace_rpc_client_seconds",
            "Calls that this process has made of others.",
        ),
    ];
    for (side, name, help) in families {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} histogram");
        for ((_, method, outcome), histogram) in calls.iter().filter(|((s, ..), _)| *s == side) {
            let labels = format!("method=\"{method}\",outcome=\"{outcome}\"");
            histogram.write(text, name, &labels);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_of_a_histogram_include_the_smaller_ones() {
        let mut histogram = Histogram::default();
        for seconds in [0.0005, 0.003, 0.003, 100.0] {
            histogram.observe(seconds);
        }
        let mut text = String::new();
        histogram.write(&mut text, "x", "a=\"b\"");
        for line in [
            "x_bucket{a=\"b\",le=\"0.001\"} 1",
            "x_bucket{a=\"b\",le=\"0.005\"} 3",
            "x_bucket{a=\"b\",le=\"60\"} 3",
            "x_bucket{a=\"b\",le=\"+Inf\"} 4",
            "x_count{a=\"b\"} 4",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn calls_are_counted_by_what_came_of_them() {
        Measured::begin(Side::Server, "Test/Kept".into()).end("ok");
        drop(Measured::begin(Side::Client, "Test/Dropped".into()));
        Measured::begin(Side::Server, "Test/Made\"Up".into()).end("unimplemented");
        let mut text = String::new();
        write_call_metrics(&mut text);
        let counted = |line: &str| assert!(text.contains(line), "{line} in\n{text}");
        counted("millrace_rpc_server_seconds_count{method=\"Test/Kept\",outcome=\"ok\"} 1");
        counted(
            "millrace_rpc_client_seconds_count{method=\"Test/Dropped\",outcome=\"cancelled\"} 1",
        );
        counted(
            "millrace_rpc_server_seconds_count{method=\"unknown\",outcome=\"unimplemented\"} 1",
        );
        assert!(!text.contains("Made"));
    }
}
