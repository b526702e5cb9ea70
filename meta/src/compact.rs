//! Compaction scheduling: which job's runs to rewrite next, on whatever compactor there is
//! (docs/design.md §9).
//!
//! A compaction is valid while its input runs are part of the version and the job has the generation it
//! was planned in; its result takes effect by a record in the log and is then told to the worker. Only
//! jobs whose worker has opened their state are compacted, so that no worker misses an edit between
//! reading a version and opening it. A task that fails is tried again after a pause; nothing it wrote is
//! referenced.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_common::access::AccessClass;
use millrace_common::collections::HashSet;
use millrace_common::task::spawn;
use millrace_common::{Generation, JobId, SqlError, crash};
use millrace_rpc::log::{EditVersion, Entry};
use millrace_rpc::services::CompactionTask;
use millrace_rpc::version::retention_counter;
use millrace_storage::compaction::{Pick, pick};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tracing::{debug, warn};

use crate::gc::{before, horizon};
use crate::shared::{Services, Shared};

/// Compactions at a time.
const PARALLEL: usize = 2;
/// Pause before runs whose compaction failed are looked at again.
const RETRY: Duration = Duration::from_secs(10);

/// How a state table is used: decides between levels and tiers.
pub type TableClass = Arc<dyn Fn(JobId, u32) -> AccessClass + Send + Sync>;

pub struct Scheduler {
    shared: Arc<Shared>,
    class: TableClass,
    busy: Arc<Mutex<HashSet<u64>>>,
    slots: Arc<Semaphore>,
    next_task: AtomicU64,
}

impl Scheduler {
    pub fn new(shared: Arc<Shared>, class: TableClass) -> Scheduler {
        Scheduler {
            shared,
            class,
            busy: Arc::default(),
            slots: Arc::new(Semaphore::new(PARALLEL)),
            next_task: AtomicU64::new(1),
        }
    }

    /// Until the server stops. Sleeps until runs have changed.
    pub async fn run(self) {
        let Some(services) = self.shared.services.get().cloned() else { return };
        loop {
            while let Some((task, generation)) = self.next() {
                let Ok(slot) = Arc::clone(&self.slots).acquire_owned().await else { return };
                let run = run(
                    Arc::clone(&self.shared),
                    services.clone(),
                    task,
                    generation,
                    Arc::clone(&self.busy),
                );
                let shared = Arc::clone(&self.shared);
                spawn("compact", async move {
                    run.await;
                    drop(slot);
                    shared.compaction.notify_one();
                });
            }
            self.shared.compaction.notified().await;
        }
    }

    /// The most useful compaction of the first job that needs one; its runs are busy from now on.
    fn next(&self) -> Option<(CompactionTask, Generation)> {
        let now_ms = self.shared.env.now_ms();
        let limit = before(now_ms, self.shared.settings().snapshot_retention);
        let state = self.shared.state.read();
        let mut busy = self.busy.lock();
        let (job, relation, picked, generation) = state.jobs.iter().find_map(|(id, job)| {
            let generation = Generation(job.version.generation);
            if self.shared.job(*id)?.started() != Some(generation) {
                return None;
            }
            let class = |table| (self.class)(*id, table);
            let version = &job.version;
            let cleaned = |table| version.counters.contains_key(&retention_counter(table));
            let is_busy = |run| busy.contains(&run);
            let picked = pick(&version.runs, &version.tail, class, cleaned, is_busy)?;
            Some((*id, state.relations.get(id)?, picked, generation))
        })?;
        let Pick { inputs, target_level, bottom, .. } = picked;
        let written = |id, bytes| self.shared.written_since(id, bytes);
        busy.extend(inputs.iter().map(|r| r.run_id));
        let task = CompactionTask {
            task_id: self.next_task.fetch_add(1, Ordering::Relaxed),
            job,
            relation: relation.as_ref().clone(),
            inputs,
            target_level,
            horizon: horizon(&state, job, limit, now_ms, &written),
            bottom,
        };
        Some((task, generation))
    }
}

/// One task to its end. Its runs are free again afterwards; after a failure not before a pause.
async fn run(
    shared: Arc<Shared>,
    services: Services,
    task: CompactionTask,
    generation: Generation,
    busy: Arc<Mutex<HashSet<u64>>>,
) {
    let runs: Vec<u64> = task.inputs.iter().map(|r| r.run_id).collect();
    let job = task.relation.label();
    if let Err(error) = compact(&shared, &services, task, generation).await {
        warn!(job, %error, "compaction failed, trying again");
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = shared.shutdown.cancelled() => {}
        }
    }
    let mut busy = busy.lock();
    for run in runs {
        busy.remove(&run);
    }
}

async fn compact(
    shared: &Shared,
    services: &Services,
    task: CompactionTask,
    generation: Generation,
) -> Result<(), SqlError> {
    let (job, horizon, inputs) = (task.job, task.horizon, task.inputs.len());
    let label = task.relation.label();
    let edit = services.compactor.compact(task).await?;
    let entry = EditVersion {
        job: job.0,
        generation: generation.0,
        edit: edit.clone(),
        horizon: horizon.0,
    };
    crash::point("compaction-before-commit");
    match shared.log()?.append(Entry::EditVersion(entry)).await? {
        Ok(_) => {
            crash::point("compaction-after-commit");
            debug!(job = label, inputs, outputs = edit.add_runs.len(), "compacted");
            services.compute.apply_edit(job, edit).await;
            crash::point("compaction-after-apply");
        }
        // Dropped, or its runs were replaced: the result is nobody's.
        Err(void) => debug!(job = label, %void, "a compaction came too late"),
    }
    Ok(())
}
