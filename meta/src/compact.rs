//! Compaction scheduling: which job's runs to rewrite next, on whatever compactor there is
//! (docs/design.md §9).
//!
//! A compaction is valid while its input runs are part of the version and the job has the generation it
//! was planned in; its result takes effect by a record in the log, which the worker is sent like all. Only
//! jobs whose worker has opened their state are compacted, so that no worker misses an edit between
//! reading a version and opening it. A task that fails is tried again after a pause; nothing it wrote is
//! referenced.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::access::AccessClass;
use millrace_common::collections::HashSet;
use millrace_common::task::spawn;
use millrace_common::{Generation, JobId, SqlError, crash};
use millrace_rpc::log::{EditVersion, Entry};
use millrace_rpc::services::CompactionTask;
use millrace_rpc::version::retention_counter;
use millrace_storage::compaction::{Pick, pick};
use millrace_storage::read_counts::TableReads;
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{debug, warn};

use crate::compaction_board::Merge;
use crate::compaction_queue::Candidates;
use crate::shared::{Services, Shared};

/// Compactions at a time, for each process that compacts.
const PARALLEL: usize = 2;
/// Between looks at how many there may be.
const LOOK: Duration = Duration::from_secs(1);
/// Pause before runs whose compaction failed are looked at again.
const RETRY: Duration = Duration::from_secs(10);
/// How long a result waits at most for the process that runs the job to read what it needs of the new runs.
const PREPARATION: Duration = Duration::from_secs(5);

/// How a state table is used: decides between levels and tiers.
pub type TableClass = Arc<dyn Fn(JobId, u32) -> AccessClass + Send + Sync>;

/// How often a state table's runs have been read since they were merged.
pub type ReadsOfTable = Arc<dyn Fn(JobId, u32) -> TableReads + Send + Sync>;

/// Compactions under way: how many.
#[derive(Clone, Default)]
struct Slots(Arc<watch::Sender<usize>>);

impl Slots {
    /// Waits until there are fewer than `most`. For one caller.
    async fn take(&self, most: impl Fn() -> usize) -> Slot {
        let mut taken = self.0.subscribe();
        // There may be more processes by now. The sender is in `self`: there is no error.
        while tokio::time::timeout(LOOK, taken.wait_for(|taken| *taken < most())).await.is_err() {}
        self.0.send_modify(|taken| *taken += 1);
        Slot(self.clone())
    }
}

/// One of them. It has ended when this is dropped.
struct Slot(Slots);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.0.send_modify(|taken| *taken = taken.saturating_sub(1));
    }
}

pub struct Scheduler {
    shared: Arc<Shared>,
    class: TableClass,
    reads: ReadsOfTable,
    busy: Arc<Mutex<HashSet<u64>>>,
    slots: Slots,
    next_task: u64,
    candidates: Candidates,
}

impl Scheduler {
    pub fn new(shared: Arc<Shared>, class: TableClass, reads: ReadsOfTable) -> Scheduler {
        Scheduler {
            shared,
            class,
            reads,
            busy: Arc::default(),
            slots: Slots::default(),
            next_task: 1,
            candidates: Candidates::default(),
        }
    }

    /// The runs that are being rewritten.
    pub fn busy(&self) -> Arc<Mutex<HashSet<u64>>> {
        Arc::clone(&self.busy)
    }

    /// Until the server stops. Sleeps until runs have changed, or are read more often.
    pub async fn run(mut self) {
        let Some(services) = self.shared.services.get().cloned() else { return };
        loop {
            // The slot first: what is most urgent may have changed when it is free.
            let slot = self.slots.take(|| PARALLEL * services.compactor.processes()).await;
            self.look();
            let Some((task, generation)) = self.next() else {
                drop(slot);
                self.shared.compaction.told().await;
                continue;
            };
            let job = task.job;
            let shared = Arc::clone(&self.shared);
            let run = run(
                Arc::clone(&self.shared),
                services.clone(),
                task,
                generation,
                Arc::clone(&self.busy),
            );
            spawn("compact", async move {
                run.await;
                drop(slot);
                // Its runs are free again.
                shared.compaction.look_at([job]);
            });
        }
    }

    /// Scores the jobs whose runs have changed.
    fn look(&mut self) {
        for job in self.shared.compaction.take() {
            self.score(job);
        }
    }

    fn score(&mut self, job: JobId) {
        let (picked, now) = (self.pick(job), self.shared.env.now());
        let merge = |(p, _): &(Pick, Generation)| Merge::of(job, &p.inputs, p.target_level);
        self.shared.compactions.queue(job, picked.as_ref().map(merge), now);
        self.candidates.set(job, picked.map(|(picked, _)| picked.score), now);
    }

    /// The most useful rewriting of a job's runs, if any is worth it.
    fn pick(&self, job: JobId) -> Option<(Pick, Generation)> {
        let version = Arc::clone(&self.shared.state.read().jobs.get(&job)?.version);
        let generation = Generation(version.generation);
        if self.shared.job(job)?.started() != Some(generation) {
            return None;
        }
        let class = |table| (self.class)(job, table);
        let reads = |table| (self.reads)(job, table);
        let cleaned = |table| version.counters.contains_key(&retention_counter(table));
        let busy = self.busy.lock();
        let is_busy = |run| busy.contains(&run);
        Some((pick(&version.runs, &version.tail, class, reads, cleaned, is_busy)?, generation))
    }

    /// The most urgent compaction of all jobs; its runs are busy from now on.
    fn next(&mut self) -> Option<(CompactionTask, Generation)> {
        loop {
            let job = self.candidates.take_best(self.shared.env.now())?;
            self.shared.compactions.queue(job, None, self.shared.env.now());
            let Some((picked, generation)) = self.pick(job) else { continue };
            let Pick { inputs, target_level, bottom, .. } = picked;
            let relation = self.shared.state.read().relations.get(&job).cloned();
            let Some(relation) = relation.map(Arc::unwrap_or_clone) else { continue };
            let Some(horizon) = self.shared.give_horizon(job) else { continue };
            self.busy.lock().extend(inputs.iter().map(|r| r.run_id));
            let task_id = self.next_task;
            self.next_task += 1;
            let merge = Merge::of(job, &inputs, target_level);
            // In a cluster it is known when somebody has been chosen.
            let is_alone = self.shared.is_alone.get() == Some(&true);
            let own = self.shared.incarnation.get().filter(|_| is_alone).copied().unwrap_or(0);
            self.shared.compactions.begin(task_id, merge, own, self.shared.env.now());
            // Another table of the job may be worth it too.
            self.score(job);
            let task =
                CompactionTask { task_id, job, relation, inputs, target_level, horizon, bottom };
            return Some((task, generation));
        }
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
    let (task_id, runs) = (task.task_id, task.inputs.iter().map(|r| r.run_id));
    let runs: Vec<u64> = runs.collect();
    let job = task.relation.label();
    if let Err(error) = compact(&shared, &services, task, generation).await {
        warn!(job, %error, "compaction failed, trying again");
        shared.compactions.fail(task_id, shared.env.now());
        // In a fixed order, so that a seed repeats a run. Either comes once.
        tokio::select! {
            biased;
            () = shared.shutdown.cancelled() => {}
            () = tokio::time::sleep(RETRY) => {}
        }
    }
    shared.compactions.end(task_id);
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
    let (id, job, horizon, inputs) = (task.task_id, task.job, task.horizon, task.inputs.len());
    let label = task.relation.label();
    let tables: BTreeSet<u32> = task.inputs.iter().map(|run| run.table_id).collect();
    let edit = services.compactor.compact(task).await?;
    let owner = shared.state.read().jobs.get(&job).map_or(0, |job| job.process);
    // Who has made the new runs has them in its caches.
    if shared.compactions.process_of(id) != owner {
        let prepared = services.compute.prepare_edit(job, generation, edit.clone());
        // It is for speed only.
        let _ = tokio::time::timeout(PREPARATION, prepared).await;
    }
    let objects: Vec<String> = edit.add_runs.iter().map(|run| run.object.clone()).collect();
    let outputs = objects.len();
    let entry = EditVersion { job: job.0, generation: generation.0, edit, horizon: horizon.0 };
    crash::point("compaction-before-commit");
    let verdict = shared.log()?.append(Entry::EditVersion(entry)).await;
    if !matches!(verdict, Ok(Ok(_))) {
        // Dropped, or its runs were replaced, or the store is full: the result is nobody's.
        shared.give_up(objects);
    }
    match verdict? {
        Ok(applied) => {
            crash::point("compaction-after-commit");
            debug!(job = label, inputs, outputs, "compacted");
            tables.into_iter().for_each(|table| shared.lookups.merged(job, table));
            // Until then its runs are taken.
            shared.wait_applied(job, applied.record).await;
            crash::point("compaction-after-apply");
        }
        Err(void) => debug!(job = label, %void, "a compaction came too late"),
    }
    Ok(())
}
