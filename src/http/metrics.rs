//! `/metrics`: the numbers of the process in Prometheus' text format, version 0.0.4. A server that has all roles shows all
//! of them, a process of a cluster those of what it does.

use std::fmt::{Display, Write};
use std::sync::Arc;
use std::time::Instant;

use millrace_common::RelationId;
use millrace_executor::Worker;
use millrace_executor::memory::{MEMORY_CLASSES, MemoryGovernor};
use millrace_executor::stats::{LookaheadStats, OperatorStats};
use millrace_frontend::ReadWays;
use millrace_frontend::cluster::JobRow;
use millrace_frontend::query::engine::QueryEngine;
use millrace_frontend::server::{Activity, Shared};
use millrace_meta::Meta;
use millrace_rpc::rows::encoded_batches;
use millrace_storage::StateStore;
use millrace_storage::cache::{Priority, ReadStats};
use millrace_storage::object::{Metered, PaceStats, RequestClass};

/// A text under construction: families in order, each with its help once.
pub(crate) struct Exposition<'a> {
    text: &'a mut String,
}

impl<'a> Exposition<'a> {
    pub(crate) fn new(text: &'a mut String) -> Exposition<'a> {
        Exposition { text }
    }

    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a String does not fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.text.push_str(name);
        for (i, (label, text)) in labels.iter().enumerate() {
            self.text.push(if i == 0 { '{' } else { ',' });
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.text, "{label}=\"{text}\"");
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }
}

/// What a server that has all roles shows.
pub struct Standalone {
    pub frontend: Arc<Shared>,
    pub worker: Arc<Worker>,
    pub store: Arc<StateStore>,
    pub meta: Arc<Meta>,
    pub requests: Option<Arc<Metered>>,
    /// Bytes.
    pub memory_limit: usize,
    pub started: Instant,
}

/// All metrics.
pub fn text(sources: &Standalone) -> String {
    let mut text = String::new();
    let mut out = Exposition::new(&mut text);
    process(&mut out, sources);
    batches(&mut out);
    memory(&mut out, sources.worker.governor());
    sessions(&mut out, &sources.frontend.activity(), &sources.frontend.engine);
    if let Some(metered) = &sources.requests {
        requests(&mut out, metered);
    }
    log(&mut out, &sources.meta);
    cache(&mut out, &sources.store);
    delays(&mut out, &sources.store);
    let (catalog, rows) = (sources.frontend.cluster.catalog(), sources.frontend.cluster.jobs());
    let name = |job: &JobRow| {
        let relation = catalog.by_id(job.relation);
        relation.map_or_else(|| job.relation.to_string(), |r| format!("{}.{}", r.schema, r.name))
    };
    let names: Vec<String> = rows.iter().map(name).collect();
    jobs(&mut out, &names, &rows);
    let cluster = &sources.frontend.cluster;
    let failed = |job: &JobRow| {
        let errors = cluster.expression_errors(RelationId(job.relation));
        errors.iter().map(|e| e.count).sum::<u64>()
    };
    expression_errors(&mut out, names.iter().zip(rows.iter().map(failed)));
    text
}

/// Resident memory of the process, in bytes; 0 where the kernel does not say.
pub fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with("VmRSS:"));
    let kib = line.and_then(|l| l.split_whitespace().nth(1)).and_then(|n| n.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

fn process(out: &mut Exposition, sources: &Standalone) {
    out.family("millrace_build_info", "gauge", "The version that runs.");
    out.sample("millrace_build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    let uptime = sources.started.elapsed().as_secs_f64();
    out.single("millrace_uptime_seconds", "gauge", "Time since the start.", uptime);
    let limit = sources.memory_limit;
    out.single("millrace_memory_limit_bytes", "gauge", "The memory limit.", limit);
    let help = "Resident memory of the process.";
    out.single("millrace_memory_resident_bytes", "gauge", help, resident());
}

/// Of the calls between roles.
pub(crate) fn batches(out: &mut Exposition) {
    let help = "Arrow batches encoded to send them to another role: none within one process.";
    out.single("millrace_encoded_batches_total", "counter", help, encoded_batches());
}

/// Of a frontend that is a process of its own.
pub(crate) fn read_ways(out: &mut Exposition, ways: &ReadWays) {
    let name = "millrace_table_reads_total";
    let help = "Reads of committed rows, by the process of their job or by log and bucket.";
    out.family(name, "counter", help);
    out.sample(name, &[("way", "owner"), ("reason", "")], ways.by_owner());
    for (reason, count) in ways.by_follower() {
        out.sample(name, &[("way", "follower"), ("reason", reason)], count);
    }
}

/// What the memory governor of a process that runs jobs accounts for.
pub(crate) fn memory(out: &mut Exposition, governor: &MemoryGovernor) {
    let used = governor.used();
    out.single("millrace_memory_used_bytes", "gauge", "Memory the governor accounts for.", used);
    out.family("millrace_memory_bytes", "gauge", "Memory the governor accounts for, by class.");
    for (class, bytes) in MEMORY_CLASSES.iter().zip(governor.by_class()) {
        out.sample("millrace_memory_bytes", &[("class", class)], bytes);
    }
    let help = "Memory in use as the allocator counts it, or as far as it is accounted for.";
    out.single("millrace_memory_in_use_bytes", "gauge", help, governor.in_use());
    let help = "The most memory in use so far, observed several times a second.";
    out.single("millrace_memory_peak_bytes", "gauge", help, governor.peak());
}

/// Of a process that has sessions.
pub(crate) fn sessions(out: &mut Exposition, sessions: &[Activity], engine: &QueryEngine) {
    let help = "Memory of running batch queries.";
    out.single("millrace_query_memory_bytes", "gauge", help, engine.memory_used());
    out.family("millrace_sessions", "gauge", "Open sessions by what they do.");
    let active = sessions.iter().filter(|s| s.active).count();
    out.sample("millrace_sessions", &[("state", "active")], active);
    out.sample("millrace_sessions", &[("state", "idle")], sessions.len() - active);
}

/// Requests to the object store.
pub(crate) fn requests(out: &mut Exposition, metered: &Metered) {
    let s = metered.stats();
    let name = "millrace_store_requests_total";
    out.family(name, "counter", "Requests to the object store.");
    for (kind, n) in [("put", s.puts), ("get", s.gets), ("list", s.lists), ("delete", s.deletes)] {
        out.sample(name, &[("kind", kind)], n);
    }
    let name = "millrace_store_bytes_total";
    out.family(name, "counter", "Bytes to and from the object store.");
    out.sample(name, &[("direction", "written")], s.bytes_written);
    out.sample(name, &[("direction", "read")], s.bytes_read);
    let help = "Requests to the object store that were tried again.";
    out.single("millrace_store_retries_total", "counter", help, s.retries);
    let help = "Requests to the object store that failed for good.";
    out.single("millrace_store_errors_total", "counter", help, s.errors);
    held_back(out, &metered.pace_stats());
}

/// Of the process that leads: appends to the log, and what the store holds.
pub(crate) fn log(out: &mut Exposition, meta: &Meta) {
    let appends = meta.append_stats();
    let help =
        "For how long the append to the log has been under way that commits wait for; 0: none is.";
    out.single("millrace_log_append_seconds", "gauge", help, appends.waiting.as_secs_f64());
    let help = "Appends to the log that were tried again.";
    out.single("millrace_log_append_retries_total", "counter", help, appends.retries);
    segments(out, meta);
}

/// Of the process that leads a cluster: jobs that it has moved.
pub(crate) fn placement(out: &mut Exposition, meta: &Meta) {
    let help = "Jobs moved to other compute processes because loads had changed.";
    out.single("millrace_jobs_rebalanced_total", "counter", help, meta.rebalanced_jobs());
}

/// Blocks and reads of a process that reads the store.
pub(crate) fn cache(out: &mut Exposition, store: &StateStore) {
    let c = store.cache().stats();
    let name = "millrace_block_cache_reads_total";
    out.family(name, "counter", "Blocks read, by where they were found.");
    out.sample(name, &[("found", "memory")], c.hits);
    out.sample(name, &[("found", "disk")], c.disk_hits);
    out.sample(name, &[("found", "store")], c.misses.saturating_sub(c.disk_hits));
    let name = "millrace_block_cache_bytes";
    out.family(name, "gauge", "Memory of the block cache.");
    out.sample(name, &[("kind", "blocks")], c.memory_bytes);
    out.sample(name, &[("kind", "indexes")], c.index_bytes);
    let name = "millrace_disk_cache_blocks_total";
    out.family(name, "counter", "Blocks offered to the disk cache, by what became of them.");
    out.sample(name, &[("result", "admitted")], c.disk.admitted);
    out.sample(name, &[("result", "refused")], c.disk.refused);
    out.sample(name, &[("result", "dropped")], c.disk.dropped);
    let help =
        "Blocks of the disk cache that were written once more, because they were read when old.";
    out.single("millrace_disk_cache_blocks_kept_total", "counter", help, c.disk.kept);
    let help = "Dependent rounds of block reads.";
    out.single("millrace_block_cache_rounds_total", "counter", help, c.rounds);
    reads(out, &store.cache().read_stats());
}

/// Requests other than reads that wait because the store asks for fewer, or that are being tried again.
fn held_back(out: &mut Exposition, stats: &PaceStats) {
    let classes = || RequestClass::ALL.iter().zip(&stats.classes);
    let name = "millrace_store_requests_waiting";
    out.family(
        name,
        "gauge",
        "Requests other than reads that wait, because the store asked for fewer.",
    );
    for (class, held) in classes() {
        out.sample(name, &[("class", class.name())], held.waiting);
    }
    let name = "millrace_store_requests_retrying";
    out.family(
        name,
        "gauge",
        "Requests other than reads that have failed and are being tried again.",
    );
    for (class, held) in classes() {
        out.sample(name, &[("class", class.name())], held.retrying);
    }
    let help = "Requests other than reads that may start in a second at present; 0: any number.";
    out.single("millrace_store_requests_rate_limit", "gauge", help, stats.rate.unwrap_or(0.0));
    let help = "Answers to requests other than reads that ask for fewer (429, 503).";
    out.single("millrace_store_request_slow_downs_total", "counter", help, stats.slow_downs);
}

/// What the store holds that is alive, and segments that held little else.
fn segments(out: &mut Exposition, meta: &Meta) {
    let help = "Bytes of the object store's data that the newest versions name.";
    out.single("millrace_store_live_bytes", "gauge", help, meta.live_bytes());
    let rewritten = meta.rewrite_stats();
    let help = "Segments with little live data that were rewritten.";
    out.single("millrace_segments_rewritten_total", "counter", help, rewritten.segments);
    let name = "millrace_segment_rewrite_bytes_total";
    out.family(name, "counter", "Bytes of rewritten segments, and of what was copied of them.");
    out.sample(name, &[("kind", "copied")], rewritten.copied_bytes);
    out.sample(name, &[("kind", "freed")], rewritten.freed_bytes);
}

/// Commits of a process that runs jobs, as far as compaction has held them up.
pub(crate) fn delays(out: &mut Exposition, store: &StateStore) {
    let delays = store.delayed_commits();
    let help = "Commits that were delayed because compaction was behind.";
    out.single("millrace_commits_delayed_total", "counter", help, delays.commits);
    let help = "How long commits were delayed because compaction was behind.";
    let waited = delays.waited.as_secs_f64();
    out.single("millrace_commit_delay_seconds_total", "counter", help, waited);
    hot_fetches(out, store);
}

/// What was read into memory before compactions of other processes took effect.
fn hot_fetches(out: &mut Exposition, store: &StateStore) {
    let hot = store.hot_fetches();
    let name = "millrace_hot_fetches_total";
    let help = "Compactions by other processes whose new runs were read ahead, because the old ones had blocks in memory.";
    out.family(name, "counter", help);
    out.sample(name, &[("result", "complete")], hot.fetches.saturating_sub(hot.incomplete));
    out.sample(name, &[("result", "incomplete")], hot.incomplete);
    let help = "Blocks of new runs that were read into memory before they replaced others.";
    out.single("millrace_hot_fetch_blocks_total", "counter", help, hot.blocks);
    let help = "Encoded bytes of these blocks.";
    out.single("millrace_hot_fetch_bytes_total", "counter", help, hot.bytes);
    let help = "Requests to the object store for new runs before they replaced others.";
    out.single("millrace_hot_fetch_requests_total", "counter", help, hot.requests);
    let help = "How long these reads took: compactions took effect so much later.";
    out.single("millrace_hot_fetch_seconds_total", "counter", help, hot.took.as_secs_f64());
}

/// Reads of the store: what waits, what is under way, and how the store answers.
fn reads(out: &mut Exposition, stats: &ReadStats) {
    let name = "millrace_store_reads_queued";
    out.family(name, "gauge", "Reads that wait for their turn, by class.");
    for (class, n) in Priority::ALL.iter().zip(&stats.classes) {
        out.sample(name, &[("class", class.name())], n.queued);
    }
    let name = "millrace_store_reads_in_flight";
    out.family(name, "gauge", "Reads under way, by class.");
    for (class, n) in Priority::ALL.iter().zip(&stats.classes) {
        out.sample(name, &[("class", class.name())], n.in_flight);
    }
    let help = "Reads that may be under way at present.";
    out.single("millrace_store_reads_limit", "gauge", help, stats.limit);
    let help = "Reads that may start in a second at present; 0: any number.";
    out.single("millrace_store_reads_rate_limit", "gauge", help, stats.rate.unwrap_or(0.0));
    let help = "Reads that have failed and are being tried again.";
    out.single("millrace_store_reads_retrying", "gauge", help, stats.retrying);
    let help = "Answers to reads that ask for fewer requests (429, 503).";
    out.single("millrace_store_slow_downs_total", "counter", help, stats.slow_downs);
    let help = "Reads given up because no answer came in time.";
    out.single("millrace_store_read_timeouts_total", "counter", help, stats.timeouts);
    let help = "Reads sent again after a failure.";
    out.single("millrace_store_read_retries_total", "counter", help, stats.retries);
    let help =
        "Queued reads that became more urgent, because somebody more urgent waits for them too.";
    out.single("millrace_store_reads_raised_total", "counter", help, stats.raised);
    let name = "millrace_store_hedged_reads_total";
    out.family(name, "counter", "Second requests for slow reads, and those that answered first.");
    out.sample(name, &[("result", "sent")], stats.hedges_sent);
    out.sample(name, &[("result", "won")], stats.hedges_won);
}

/// Jobs, by their names.
pub(crate) fn jobs(out: &mut Exposition, names: &[String], jobs: &[JobRow]) {
    let each = || names.iter().zip(jobs);

    out.family("millrace_job_state", "gauge", "1 for the state a job is in.");
    for (name, j) in each() {
        out.sample("millrace_job_state", &[("job", name), ("state", &j.state)], 1);
    }
    type Number = fn(&JobRow) -> f64;
    let families: [(&str, &str, &str, Number); 6] = [
        ("millrace_job_lag_seconds", "gauge", "How far a job is behind its inputs.", |j| {
            j.lag_ms.unwrap_or(0) as f64 / 1e3
        }),
        ("millrace_job_rows", "gauge", "Rows of a job's relation.", |j| j.rows as f64),
        ("millrace_job_commits_total", "counter", "Epochs a job has committed.", |j| {
            j.commits as f64
        }),
        ("millrace_job_restarts_total", "counter", "Restarts of a job.", |j| j.restarts as f64),
        ("millrace_job_state_bytes", "gauge", "State of a job, in memory and stored.", |j| {
            j.state_bytes() as f64
        }),
        ("millrace_job_operators", "gauge", "Operators of a running job.", |j| {
            j.operators.len() as f64
        }),
    ];
    for (family, kind, help, value) in families {
        out.family(family, kind, help);
        for (name, j) in each() {
            out.sample(family, &[("job", name)], value(j));
        }
    }
    let family = "millrace_job_epoch_seconds";
    out.family(family, "gauge", "From a cut to its commit, of a job's last epochs.");
    for (name, j) in each() {
        for (quantile, took) in [("0.5", j.barrier_p50), ("0.99", j.barrier_p99)] {
            out.sample(family, &[("job", name), ("quantile", quantile)], took.as_secs_f64());
        }
    }
    operators(out, names, jobs);
    lookahead(out, names, jobs);
}

/// Jobs by their names, and how many rows an expression of each has failed on.
pub(crate) fn expression_errors<'n>(
    out: &mut Exposition,
    jobs: impl Iterator<Item = (&'n String, u64)>,
) {
    let family = "millrace_expression_errors_total";
    out.family(family, "counter", "Rows on which an expression of a view failed.");
    for (name, failed) in jobs {
        out.sample(family, &[("job", name)], failed);
    }
}

/// What became of the keys that were announced to the operators of a job.
fn lookahead(out: &mut Exposition, names: &[String], jobs: &[JobRow]) {
    type Number = fn(&LookaheadStats) -> u64;
    let results: [(&str, Number); 10] = [
        ("hinted", |l| l.hinted),
        ("resident", |l| l.resident),
        ("prefetched", |l| l.prefetched),
        ("in_time", |l| l.in_time),
        ("late", |l| l.late),
        ("absent", |l| l.absent),
        ("unused", |l| l.unused),
        ("dropped", |l| l.dropped),
        ("stale", |l| l.stale),
        ("demand", |l| l.missed),
    ];
    let family = "millrace_lookahead_keys_total";
    let help = "Keys of state by what became of them: announced, read ahead, or waited for.";
    out.family(family, "counter", help);
    for (name, job) in names.iter().zip(jobs) {
        let of_job = job.operators.iter().map(|o| &o.lookahead);
        for (result, value) in results {
            let keys: u64 = of_job.clone().map(value).sum();
            out.sample(family, &[("job", name), ("result", result)], keys);
        }
    }
}

fn operators(out: &mut Exposition, names: &[String], jobs: &[JobRow]) {
    type Number = fn(&OperatorStats) -> u64;
    let families: [(&str, &str, &str, Number); 8] = [
        ("millrace_operator_rows_in_total", "counter", "Rows into an operator.", |o| o.rows_in),
        ("millrace_operator_rows_out_total", "counter", "Rows out of an operator.", |o| o.rows_out),
        ("millrace_operator_cache_bytes", "gauge", "State an operator holds in memory.", |o| {
            o.state_bytes
        }),
        ("millrace_operator_cache_hits_total", "counter", "State reads its cache answered.", |o| {
            o.cache_hits
        }),
        ("millrace_operator_cache_misses_total", "counter", "State reads beyond its cache.", |o| {
            o.cache_misses
        }),
        ("millrace_operator_parked_rows", "gauge", "Rows that wait for state.", |o| o.parked_rows),
        (
            "millrace_operator_settled_early_total",
            "counter",
            "Times that changes were settled before the barrier.",
            |o| o.settled_early,
        ),
        (
            "millrace_operator_fetch_rounds_total",
            "counter",
            "Dependent rounds of state reads.",
            |o| o.fetch_rounds,
        ),
    ];
    for (family, kind, help, value) in families {
        out.family(family, kind, help);
        for (name, job) in names.iter().zip(jobs) {
            for o in &job.operators {
                let place = format!("{}.{}", o.fragment, o.node);
                let labels = [("job", name.as_str()), ("operator", &o.name), ("place", &place)];
                out.sample(family, &labels, value(o));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut text = String::new();
        let mut out = Exposition::new(&mut text);
        out.single("a_total", "counter", "Things.", 3);
        out.family("b", "gauge", "More.");
        out.sample("b", &[("x", "a\"b\\c\nd"), ("y", "2")], 0.5);
        assert_eq!(
            text,
            "# HELP a_total Things.\n# TYPE a_total counter\na_total 3\n# HELP b More.\n\
             # TYPE b gauge\nb{x=\"a\\\"b\\\\c\\nd\",y=\"2\"} 0.5\n"
        );
    }
}
