//! Jobs as SHOW JOBS shows them, and why they do not get on: what the log and the drivers say, joined with what the
//! process says that the job runs on.

use std::time::Duration;

use millrace_common::RelationId;
use millrace_rpc::control::{AvailableOffset, JobReport, SourceReport, TableRetention};
use millrace_rpc::version::{cleaned, late_rows};
use millrace_storage::object::PutProgress;

use crate::meta::Meta;
use crate::status::{JobState, JobStatus, STALL_AFTER};

impl Meta {
    /// All jobs, with what the processes say that they run on.
    pub fn told_jobs(&self) -> Vec<JobReport> {
        let (own, loads) = {
            let state = self.shared.state.read();
            (self.shared.members.job_reports(&state), self.shared.loads.loads(&state))
        };
        let report = |status: JobStatus| {
            let load = loads.get(&status.relation).copied();
            let own = own.get(&status.relation.0).cloned().unwrap_or_default();
            JobReport { load, ..self.job_report(status, own) }
        };
        self.job_statuses().into_iter().map(report).collect()
    }

    /// A job, given what its process says of it.
    pub fn job_report(&self, s: JobStatus, own: JobReport) -> JobReport {
        let stalled = stalled(&s, own.idle_ms.map(Duration::from_millis));
        let is_stalled = stalled.is_some() || self.has_stalled_commit(&s);
        let micros = |d: Duration| d.as_micros() as u64;
        let (scanned, to_scan) = scan(&s, &own);
        JobReport {
            relation: s.relation.0,
            state: if is_stalled { "stalled" } else { s.state.name() }.to_owned(),
            progress: progress(&s, scanned, to_scan),
            scanned,
            to_scan,
            reason: self.reason(&s, &own, stalled),
            rebuilding: s.is_being_rebuilt(),
            epoch: s.epoch.0,
            lag_ms: s.frontier.is_some().then_some(s.lag_ms),
            late_rows: late_rows(&s.version),
            watermarks: s.version.watermarks.clone(),
            cleaned: cleaned(&s.version).into_iter().map(retention).collect(),
            rows: s.row_count,
            commits: s.counters.commits,
            restarts: s.counters.restarts,
            barrier_p50_us: micros(s.counters.barrier_p50),
            barrier_p99_us: micros(s.counters.barrier_p99),
            published: s.published,
            staged: s.staged as u64,
            ..own
        }
    }

    fn reason(&self, s: &JobStatus, own: &JobReport, stalled: Option<Duration>) -> Option<String> {
        let reason = match &s.state {
            JobState::Failed { reason, .. }
            | JobState::Stalled { reason, .. }
            | JobState::Detached { reason } => Some(reason.clone()),
            JobState::WaitingForInputs { inputs } => Some(self.waits_for(inputs)),
            _ => {
                let reason = own.reason.clone().or_else(|| self.slow_append(s));
                reason.or_else(|| self.has_no_process(s)).or_else(|| {
                    let s = stalled?.as_secs();
                    Some(format!(
                        "nothing of it has moved for {s} s; the object store may not answer"
                    ))
                })
            }
        };
        // A table goes on without its connector.
        let feed = || own.feed_error.as_ref().map(|e| format!("its connector fails: {e}"));
        let reason = reason.or_else(feed).or_else(|| self.failing_input(s.relation));
        reason.or_else(|| clock_set_back(s, own))
    }

    fn waits_for(&self, inputs: &[RelationId]) -> String {
        let catalog = self.catalog();
        let name = |id| catalog.relation(id).map(|r| format!("\"{}\"", r.name));
        let names: Vec<String> = inputs.iter().filter_map(|id| name(*id)).collect();
        // What is being created has no frontier.
        let readable = inputs.iter().any(|id| self.frontier(*id).is_some());
        let what = match readable {
            true => "detached, reading what is, or further behind than versions are kept",
            false => "being created",
        };
        format!("{} {what}", is_or_are(&names))
    }

    /// What a job shows that could start and has nowhere to.
    fn has_no_process(&self, s: &JobStatus) -> Option<String> {
        let cluster = self.cluster.get().filter(|_| s.state == JobState::Starting)?;
        (cluster.computes.placed(s.relation) == 0)
            .then(|| "no compute process is there for it to run on".to_owned())
    }

    /// What a job shows while a write to the log that its commit waits for fails and is tried again, is held back, or
    /// takes long.
    fn slow_append(&self, s: &JobStatus) -> Option<String> {
        let append = self.append_wait().filter(|_| s.logging.is_some())?;
        let object = format!("record {} of the log", append.number);
        told_write(&object, append.waiting, &append.progress)
    }

    /// Whether a commit of it has been on its way into the log for suspiciously long, and the store is why.
    fn has_stalled_commit(&self, s: &JobStatus) -> bool {
        let append = || self.append_wait().map_or(Duration::ZERO, |append| append.waiting);
        s.logging.is_some_and(|waits| waits.min(append()) > STALL_AFTER)
    }

    /// What is wrong with a source that a job reads, or with its own connector.
    fn failing_input(&self, job: RelationId) -> Option<String> {
        let inputs = self.inputs(job).into_iter().chain([job]);
        inputs.into_iter().find_map(|id| {
            let reason = self.source_report(id)?.reason?;
            let catalog = self.catalog();
            let name = catalog.relation(id).map(|r| r.name.clone()).unwrap_or_default();
            Some(format!("source \"{name}\": {reason}"))
        })
    }

    /// What only the leader knows of sources and connectors of tables: `feed_error` is what a table's process says.
    pub(crate) fn source_reports(
        &self,
        feed_error: impl Fn(RelationId) -> Option<String>,
    ) -> Vec<SourceReport> {
        let catalog = self.catalog();
        let ids = catalog.relations().filter(|r| r.has_connector()).map(|r| RelationId(r.id));
        let report = |id: RelationId| {
            let status = self.shared.source_status(id);
            let feed = feed_error(id);
            let available = status.available.into_iter();
            SourceReport {
                relation: id.0,
                state: if feed.is_some() { "failing" } else { status.state.name() }.to_owned(),
                reason: feed.or(status.reason),
                available: available
                    .map(|(split, offset)| AvailableOffset { split, offset })
                    .collect(),
            }
        };
        ids.map(report).collect()
    }
}

fn retention((table, kept_since): (u32, i64)) -> TableRetention {
    TableRetention { table, kept_since }
}

/// What is told of a write that something waits for. `None`: there is nothing unusual about it.
pub fn told_write(object: &str, waited: Duration, put: &PutProgress) -> Option<String> {
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
fn stalled(s: &JobStatus, idle: Option<Duration>) -> Option<Duration> {
    let idle = idle.unwrap_or(Duration::MAX);
    s.stalled.map(|at_it| at_it.min(idle)).filter(|d| *d > STALL_AFTER)
}

/// What a view with temporal filters shows while epochs, whose time is its `now()`, are ahead of the clock.
fn clock_set_back(s: &JobStatus, own: &JobReport) -> Option<String> {
    let ahead = s.ahead?.as_secs();
    let mut names = own.operators.iter().map(|o| o.name.as_str());
    names.any(|name| matches!(name, "Expire" | "Appear")).then(|| {
        format!(
            "the clock has been set back: now() is {ahead} s ahead of it, and rows come and go too early until the \
             clock gets there"
        )
    })
}

/// Rows that its first scan has read, of about so many: by its tasks' own count, which runs ahead of what is committed.
fn scan(s: &JobStatus, own: &JobReport) -> (u64, u64) {
    let Some(committed) = &s.version.backfill else { return (0, 0) };
    let to_scan = if own.to_scan > 0 { own.to_scan } else { committed.rows_total };
    (own.scanned.max(committed.rows_read), to_scan)
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
