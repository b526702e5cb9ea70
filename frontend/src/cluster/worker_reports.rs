//! What only the process knows of a job that the job runs on.

use millrace_common::JobId;
use millrace_executor::Worker;
use millrace_meta::job_reports::told_write;
use millrace_meta::status::STALL_AFTER;
use millrace_rpc::control::JobReport;
use millrace_storage::cache::Retrying;
use millrace_storage::put_waits::PutWait;
use millrace_storage::write_delay::Overlap;
use millrace_storage::{StateStore, TableStats};

use super::{JobRow, TableRow, job_report};

/// What a job's own process says of it; the rest is the leader's to say. Of a job that is not open here, nothing.
pub fn worker_report(worker: &Worker, store: &StateStore, id: JobId) -> JobReport {
    let (stats, job) = (worker.stats(id), store.job(id));
    let reason = retried_reads(store, id).or_else(|| slow_write(store, id));
    let (idle_ms, feed) = (stats.as_ref().map(|s| s.idle), worker.feed_error(id));
    let worked = stats.as_ref().map(|s| s.worked);
    let stats = stats.unwrap_or_default();
    let tables = job.map_or(vec![], |job| job.stats().tables);
    let told = job_report(JobRow {
        relation: id.0,
        scanned: stats.scanned,
        to_scan: stats.to_scan,
        reason: reason.or_else(|| delayed(store, id)).or_else(|| short_of_memory(worker, id)),
        operators: stats.operators,
        fragment_tasks: stats.fragment_tasks,
        tables: tables.into_iter().map(table_row).collect(),
        ..JobRow::default()
    });
    JobReport {
        worked_us: worked.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
        idle_ms: idle_ms.map(|idle| u64::try_from(idle.as_millis()).unwrap_or(u64::MAX)),
        feed_error: feed.map(|error| error.into_parts().message),
        ..told
    }
}

/// What a job shows while reads of its state fail and are tried again.
fn retried_reads(store: &StateStore, id: JobId) -> Option<String> {
    let Retrying { reads, error } = store.cache().retrying(id)?;
    Some(format!(
        "reads that the object store failed and that are tried again: {reads}; the last error: {error}"
    ))
}

/// What a job shows while a write that its epochs wait for fails and is tried again, is held back, or takes long.
fn slow_write(store: &StateStore, id: JobId) -> Option<String> {
    store.job(id)?.put_waits().iter().find_map(told_put)
}

/// What a job shows while its commits wait for compaction.
fn delayed(store: &StateStore, id: JobId) -> Option<String> {
    let Overlap { name, runs, .. } = store.job(id)?.delayed_by()?;
    Some(format!(
        "its commits are delayed because compaction is behind: {runs} runs of state table \"{name}\" may hold one key"
    ))
}

/// What a job shows while other jobs go first because memory is tight.
fn short_of_memory(worker: &Worker, id: JobId) -> Option<String> {
    worker
        .governor()
        .waits_for_others(id)
        .then(|| "its epoch is large and waits for memory: those of other jobs go first".to_owned())
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
    use std::time::Duration;

    use millrace_storage::object::PutProgress;
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
