//! What a compute process tells of its jobs: what only the process knows that they run on.

use millrace_executor::Worker;
use millrace_frontend::cluster::{JobRow, TableRow, job_report};
use millrace_meta::LogFollower;
use millrace_rpc::control::JobReport;
use millrace_storage::{StateStore, TableStats};

/// Of all jobs that are open here.
pub fn worker_reports(
    worker: &Worker,
    store: &StateStore,
    follower: &LogFollower,
) -> Vec<JobReport> {
    let incarnation = store.incarnation();
    let placed = follower.read(|state| {
        let jobs = state.jobs.iter().filter(|(_, job)| job.process == incarnation);
        jobs.map(|(id, _)| *id).collect::<Vec<_>>()
    });
    let report = |id| {
        let stats = worker.stats(id)?;
        let job = store.job(id);
        let tables = job.map_or(vec![], |job| job.stats().tables);
        let retried = store.cache().retrying(id);
        let reason = retried.map(|retrying| {
            format!(
                "reads that the object store failed and that are tried again: {}; the last error: {}",
                retrying.reads, retrying.error
            )
        });
        Some(job_report(JobRow {
            relation: id.0,
            scanned: stats.scanned,
            to_scan: stats.to_scan,
            reason,
            operators: stats.operators,
            tables: tables.into_iter().map(table_row).collect(),
            ..JobRow::default()
        }))
    };
    placed.into_iter().filter_map(report).collect()
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
