//! What a compute process tells of its jobs: what only the process knows that they run on.

use millrace_executor::Worker;
use millrace_frontend::cluster::worker_report;
use millrace_meta::LogFollower;
use millrace_rpc::control::JobReport;
use millrace_storage::StateStore;

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
    let open = placed.into_iter().filter(|id| worker.stats(*id).is_some());
    open.map(|id| worker_report(worker, store, id)).collect()
}
