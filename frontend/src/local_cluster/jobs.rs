//! A job as meta, its worker and its store know it, in one line.

use std::time::Duration;

use millrace_common::JobId;
use millrace_executor::stats::{JobStats, OperatorStats};
use millrace_meta::status::STALL_AFTER;
use millrace_meta::{JobState, JobStatus};
use millrace_rpc::version::{cleaned, late_rows};
use millrace_storage::TableStats;
use millrace_storage::cache::Retrying;
use millrace_storage::object::PutProgress;
use millrace_storage::put_waits::PutWait;
use millrace_storage::write_delay::Overlap;

use super::Direct;
use crate::cluster::{JobRow, TableRow};

impl Direct {
    pub(super) fn job_row(&self, s: JobStatus) -> JobRow {
        let stats = self.worker.stats(s.relation);
        let stalled = stalled(&s, stats.as_ref());
        let reason = match &s.state {
            JobState::Failed { reason, .. }
            | JobState::Stalled { reason, .. }
            | JobState::Detached { reason } => Some(reason.clone()),
            JobState::WaitingForInputs { inputs } => {
                let catalog = self.meta.catalog();
                let name = |id| catalog.relation(id).map(|r| format!("\"{}\"", r.name));
                let names: Vec<String> = inputs.iter().filter_map(|id| name(*id)).collect();
                // What is being created has no frontier.
                let readable = inputs.iter().any(|id| self.meta.frontier(*id).is_some());
                let what = if readable { "detached, or reading what is" } else { "being created" };
                Some(format!("{} {what}", is_or_are(&names)))
            }
            _ => {
                let reason = self.retried_reads(s.relation);
                let reason = reason.or_else(|| self.slow_write(&s));
                reason.or_else(|| self.delayed(s.relation)).or_else(|| {
                    let s = stalled?.as_secs();
                    Some(format!(
                        "nothing of it has moved for {s} s; the object store may not answer"
                    ))
                })
            }
        };
        // A table goes on without its connector.
        let feed = self.worker.feed_error(s.relation);
        let feed = feed.map(|e| format!("its connector fails: {}", e.message));
        let reason = reason.or(feed).or_else(|| self.failing_input(s.relation));
        let reason = reason.or_else(|| clock_set_back(&s, stats.as_ref()));
        let is_stalled = stalled.is_some() || self.has_stalled_commit(&s);
        let word = if is_stalled { "stalled" } else { s.state.name() };
        let (scanned, to_scan) = scan(&s, stats.as_ref());
        let tables = self
            .store
            .job(s.relation)
            .map_or(vec![], |job| job.stats().tables.into_iter().map(table_row).collect());
        JobRow {
            relation: s.relation.0,
            state: word.to_owned(),
            progress: progress(&s, scanned, to_scan),
            scanned,
            to_scan,
            reason,
            rebuilding: s.is_being_rebuilt(),
            epoch: s.epoch.0,
            lag_ms: s.frontier.is_some().then_some(s.lag_ms),
            late_rows: late_rows(&s.version),
            watermarks: s.version.watermarks.iter().map(|w| (w.column, w.value)).collect(),
            cleaned: cleaned(&s.version),
            rows: s.row_count,
            commits: s.counters.commits,
            restarts: s.counters.restarts,
            barrier_p50: s.counters.barrier_p50,
            barrier_p99: s.counters.barrier_p99,
            operators: stats.map_or(vec![], |stats| stats.operators),
            tables,
            published: s.published,
            staged: s.staged,
        }
    }

    /// What a job shows while its commits wait for compaction.
    fn delayed(&self, job: JobId) -> Option<String> {
        let Overlap { name, runs, .. } = self.store.job(job)?.delayed_by()?;
        Some(format!(
            "its commits are delayed because compaction is behind: {runs} runs of state table \"{name}\" may hold one key"
        ))
    }

    /// What a job shows while reads of its state fail and are tried again.
    fn retried_reads(&self, job: JobId) -> Option<String> {
        let Retrying { reads, error } = self.store.cache().retrying(job)?;
        Some(format!(
            "reads that the object store failed and that are tried again: {reads}; the last error: {error}"
        ))
    }

    /// What a job shows while a write that its epochs wait for fails and is tried again, is held back, or takes long:
    /// of the tail, of runs, or of the log.
    fn slow_write(&self, s: &JobStatus) -> Option<String> {
        let puts = self.store.job(s.relation).map_or(vec![], |job| job.put_waits());
        puts.iter().find_map(told_put).or_else(|| {
            let append = self.meta.append_wait().filter(|_| s.logging.is_some())?;
            let object = format!("record {} of the log", append.number);
            told_write(&object, append.waiting, &append.progress)
        })
    }

    /// Whether a commit of it has been on its way into the log for suspiciously long, and the store is why.
    fn has_stalled_commit(&self, s: &JobStatus) -> bool {
        let append = || self.meta.append_wait().map_or(Duration::ZERO, |append| append.waiting);
        s.logging.is_some_and(|waits| waits.min(append()) > STALL_AFTER)
    }
}

fn told_put(put: &PutWait) -> Option<String> {
    match &put.object {
        Some(object) => {
            told_write(&format!("{object} ({})", put.kind.name()), put.waited, &put.progress)
        }
        None => (put.waited > STALL_AFTER).then(|| {
            let seconds = put.waited.as_secs();
            format!("its commit has waited for {seconds} s behind others of the tail")
        }),
    }
}

/// `None`: there is nothing unusual about it.
fn told_write(object: &str, waited: Duration, put: &PutProgress) -> Option<String> {
    let seconds = waited.as_secs();
    match (put.failures, &put.error) {
        _ if put.held => Some(format!(
            "the object store has asked for fewer requests: a write waits, of {object}, for {seconds} s"
        )),
        (failures @ 1.., error) => Some(format!(
            "a write that the object store failed is tried again: of {object}, for {seconds} s, failures: {failures}; \
             the last error: {}",
            error.as_deref().unwrap_or("unknown")
        )),
        _ if waited > STALL_AFTER => Some(format!(
            "a write to the object store has had no answer: of {object}, for {seconds} s"
        )),
        _ => None,
    }
}

/// `"a" is`, `"a" and "b" are`.
fn is_or_are(names: &[String]) -> String {
    match names {
        [] => "an input is".to_owned(),
        [one] => format!("{one} is"),
        many => format!("{} are", many.join(" and ")),
    }
}

/// For how long its tasks have been at one epoch without doing anything for it.
fn stalled(s: &JobStatus, stats: Option<&JobStats>) -> Option<Duration> {
    let idle = stats.map_or(Duration::MAX, |stats| stats.idle);
    s.stalled.map(|at_it| at_it.min(idle)).filter(|d| *d > STALL_AFTER)
}

/// What a view with temporal filters shows while epochs, whose time is its `now()`, are ahead of the clock.
fn clock_set_back(s: &JobStatus, stats: Option<&JobStats>) -> Option<String> {
    let ahead = s.ahead?.as_secs();
    let by_clock = |o: &OperatorStats| matches!(o.name.as_str(), "Expire" | "Appear");
    stats?.operators.iter().any(by_clock).then(|| {
        format!(
            "the clock has been set back: now() is {ahead} s ahead of it, and rows come and go too early until the \
             clock gets there"
        )
    })
}

/// Rows that its first scan has read, of about so many: by its tasks' own count, which runs ahead of what is committed.
fn scan(s: &JobStatus, stats: Option<&JobStats>) -> (u64, u64) {
    let Some(committed) = &s.version.backfill else { return (0, 0) };
    let live = stats.map_or((0, 0), |stats| (stats.scanned, stats.to_scan));
    (live.0.max(committed.rows_read), if live.1 > 0 { live.1 } else { committed.rows_total })
}

/// Of a creation. It is over when the last row is not only read.
fn progress(s: &JobStatus, scanned: u64, to_scan: u64) -> Option<String> {
    match &s.state {
        JobState::Running | JobState::Paused | JobState::Detached { .. } => return None,
        JobState::Stalled { .. } | JobState::Failed { .. } if s.frontier.is_some() => return None,
        _ => {}
    }
    let percent = u128::from(scanned) * 100 / u128::from(to_scan.max(1));
    Some(format!("{}%", percent.min(99)))
}

fn table_row(t: TableStats) -> TableRow {
    TableRow {
        id: t.table.0,
        name: t.name,
        memory_bytes: t.mem_bytes,
        stored_bytes: t.disk_bytes,
        entries: t.mem_rows + t.disk_rows,
    }
}

#[cfg(test)]
mod tests {
    use millrace_storage::put_waits::PutKind;

    use super::*;

    #[test]
    fn writes_are_told_that_fail_are_held_back_or_take_long() {
        let put = |seconds, failures, held| PutWait {
            kind: PutKind::Tail,
            object: Some("data/1/7.seg".to_owned()),
            waited: Duration::from_secs(seconds),
            progress: PutProgress {
                failures,
                error: (failures > 0).then(|| "connection reset".to_owned()),
                held,
            },
        };
        let long = STALL_AFTER.as_secs() + 1;
        assert_eq!(told_put(&put(0, 0, false)), None);
        assert_eq!(told_put(&put(STALL_AFTER.as_secs(), 0, false)), None);
        let told = |put: &PutWait| told_put(put).unwrap_or_default();
        let reset = "failures: 2; the last error: connection reset";
        for (put, text) in [
            (put(long, 0, false), "has had no answer"),
            (put(0, 0, true), "has asked for fewer requests"),
            (put(1, 2, false), reset),
            (put(1, 2, true), "has asked for fewer requests"),
        ] {
            let told = told(&put);
            assert!(told.contains(text) && told.contains("data/1/7.seg (tail)"), "{told}");
        }
        let behind = PutWait { object: None, ..put(long, 0, false) };
        assert!(told(&behind).contains("behind others of the tail"));
        assert_eq!(told_put(&PutWait { object: None, ..put(1, 0, false) }), None);
    }
}
