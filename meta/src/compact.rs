//! Compaction scheduling: which job's runs to rewrite next, on whatever compactor there is
//! (docs/design.md §9).
//!
//! A task has all that who does it needs to know of the job, as of the version that its runs were picked from.
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
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::{EditVersion, Entry};
use millrace_rpc::services::{CompactionTask, MergedTable};
use millrace_rpc::version::{JobVersion, retention_counter};
use millrace_storage::compaction::{Pick, pick};
use millrace_storage::read_counts::TableReads;
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{Instrument, debug, info_span, warn};

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

/// A rewriting of a job's runs, and what it was picked from.
struct Picked {
    pick: Pick,
    version: Arc<JobVersion>,
    relation: Arc<Relation>,
}

/// What a task tells of a state table beside the catalog entry of its job.
fn merged_table(relation: &Relation, version: &JobVersion, table: u32) -> MergedTable {
    // A graph says nothing of a table's rows, and the rows of a detached job are open as the catalog describes them.
    let is_of_catalog = relation.kind() == RelationKind::Table || version.detached.is_some();
    let position = match is_of_catalog {
        true => None,
        false => version.graph_position(relation.first_table_id, relation.table_count, table),
    };
    let bound = version.counters.get(&retention_counter(table)).map(|bound| *bound as i64);
    MergedTable { position, bound }
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
            // The compactor that does it and the process that runs the job log what they do for it by this id.
            let request = self.shared.new_request();
            let span = info_span!("compaction", request = request.as_str());
            let run = run(
                Arc::clone(&self.shared),
                services.clone(),
                task,
                generation,
                Arc::clone(&self.busy),
            );
            let work = async move {
                run.await;
                drop(slot);
                // Its runs are free again.
                shared.compaction.look_at([job]);
            };
            spawn("compact", request.scope(work.instrument(span)));
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
        let pick = picked.as_ref().map(|picked| &picked.pick);
        let merge = pick.map(|pick| Merge::of(job, &pick.inputs, pick.target_level));
        self.shared.compactions.queue(job, merge, now);
        self.candidates.set(job, pick.map(|pick| pick.score), now);
    }

    /// The most useful rewriting of a job's runs, if any is worth it.
    fn pick(&self, job: JobId) -> Option<Picked> {
        let (version, relation) = {
            let state = self.shared.state.read();
            (Arc::clone(&state.jobs.get(&job)?.version), Arc::clone(state.relations.get(&job)?))
        };
        if self.shared.job(job)?.started() != Some(Generation(version.generation)) {
            return None;
        }
        let class = |table| (self.class)(job, table);
        let reads = |table| (self.reads)(job, table);
        let cleaned = |table| version.counters.contains_key(&retention_counter(table));
        let busy = self.busy.lock();
        let is_busy = |run| busy.contains(&run);
        let pick = pick(&version.runs, &version.tail, class, reads, cleaned, is_busy)?;
        Some(Picked { pick, version, relation })
    }

    /// The most urgent compaction of all jobs; its runs are busy from now on.
    fn next(&mut self) -> Option<(CompactionTask, Generation)> {
        loop {
            let job = self.candidates.take_best(self.shared.env.now())?;
            self.shared.compactions.queue(job, None, self.shared.env.now());
            let Some(Picked { pick, version, relation }) = self.pick(job) else { continue };
            let Pick { table_id, inputs, target_level, bottom, .. } = pick;
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
            let table = merged_table(&relation, &version, table_id);
            let relation = Arc::unwrap_or_clone(relation);
            let task = CompactionTask {
                task_id,
                job,
                relation,
                inputs,
                table,
                target_level,
                horizon,
                bottom,
            };
            return Some((task, Generation(version.generation)));
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

#[cfg(test)]
mod tests {
    use millrace_rpc::version::Detached;

    use super::*;

    #[test]
    fn a_task_tells_where_a_table_is_described_and_what_is_kept_of_it() {
        let view = Relation {
            kind: RelationKind::MaterializedView as i32,
            first_table_id: 10,
            table_count: 3,
            ..Relation::default()
        };
        let counters = [(retention_counter(12), -5_i64 as u64)].into();
        let version = JobVersion { counters, ..JobVersion::default() };
        let told = |relation: &Relation, version: &JobVersion, table| {
            let MergedTable { position, bound } = merged_table(relation, version, table);
            (position, bound)
        };
        assert_eq!(told(&view, &version, 10), (Some(0), None));
        assert_eq!(told(&view, &version, 12), (Some(2), Some(-5)));
        let rebuilt = JobVersion { rebuilt_tables: 50, ..version.clone() };
        assert_eq!(told(&view, &rebuilt, 52), (Some(2), None));

        let detached = JobVersion { detached: Some(Detached::default()), ..version.clone() };
        assert_eq!(told(&view, &detached, 10), (None, None));
        let table = Relation { kind: RelationKind::Table as i32, ..view };
        assert_eq!(told(&table, &version, 10), (None, None));
    }
}
