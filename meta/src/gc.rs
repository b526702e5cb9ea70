//! Garbage collection and horizons (docs/design.md §9).
//!
//! An object of any kind (runs, slices of the tail, staged changes, what a dropped relation had) is deleted when the
//! log says that nothing names it and no reader holds it: it lost its last reference longer than `object_retention`
//! ago and every live process has applied the record that dropped it, the process that wrote it has given it up, or that
//! process is fenced and never committed it. The deletion is logged first, so that its name can never be referenced
//! again, and then done; what a crash leaves undeleted is found by the sweep at the next start. Objects that a live
//! process has written and not (yet) committed are never touched.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use millrace_common::fault_injection::is_planted;
use millrace_common::{Epoch, JobId, crash};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::{DeleteObjects, Entry, GiveUp};
use millrace_storage::given_up::GivenUp;
use object_store::path::Path;
use tracing::{info, warn};

use crate::backup::files::BackupFiles;
use crate::detach;
use crate::error::MetaError;
use crate::fold::position;
use crate::log::LogStore;
use crate::objects::{DATA_PREFIX, parse};
use crate::shared::Shared;
use crate::state::MetaState;

/// Names in one log entry.
const BATCH: usize = 1_000;

/// When garbage is collected.
#[derive(Clone, Copy, Debug)]
pub struct GcOptions {
    /// How often garbage and horizons are looked at, while anything changes.
    pub period: Duration,
    /// How long objects stay that nothing names any more; `None`: as the setting `object_retention` says. Without such a
    /// time nothing keeps an object but those that may still read it, which is what simulations are to show.
    pub object_retention: Option<Duration>,
}

impl Default for GcOptions {
    fn default() -> GcOptions {
        GcOptions { period: Duration::from_secs(10), object_retention: None }
    }
}

pub struct Collector {
    pub shared: Arc<Shared>,
    pub store: LogStore,
    /// This process's incarnation.
    pub incarnation: u64,
    /// Objects that local readers still hold, whatever the log says.
    pub pinned: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// What this process has written for nothing.
    pub given_up: Arc<GivenUp>,
    pub backup_files: Arc<BackupFiles>,
    pub options: GcOptions,
}

/// How many incarnations are fenced, and the newest that was given: where one has risen, fenced processes may have left
/// something. One that had stopped may have written it after the sweep that followed its fence; it ends then, and another one
/// registers in its place.
type ToSweep = (u64, u64);

/// Records that were the log's last at earlier looks, with their epochs: what they have dropped may be deleted when all
/// processes have applied them.
#[derive(Debug, Default)]
struct Dropped {
    /// Ascending; the first is applied by all.
    looks: VecDeque<(u64, Epoch)>,
}

impl Dropped {
    /// The log's last record is this one now. Returns the epoch through which all processes have applied the log.
    fn look(&mut self, number: u64, epoch: Epoch, all_applied: impl Fn(u64) -> bool) -> Epoch {
        if self.looks.back().is_none_or(|(last, _)| *last < number) {
            self.looks.push_back((number, epoch));
        }
        let applied = self.looks.iter().take_while(|(number, _)| all_applied(*number)).count();
        let Some(newest) = applied.checked_sub(1) else { return Epoch::ZERO };
        // It is needed as long as the next is not applied.
        self.looks.drain(..newest);
        self.looks.front().map_or(Epoch::ZERO, |(_, epoch)| *epoch)
    }

    /// Whether some process has not applied all that was seen.
    fn is_waiting(&self) -> bool {
        self.looks.len() > 1
    }
}

/// What went wrong in a round, for an operator who has asked for it.
#[derive(Debug, Default)]
struct Troubles(Vec<String>);

impl Troubles {
    /// `None`: it failed, which is told.
    fn note<T, E: std::fmt::Display>(&mut self, what: &str, result: Result<T, E>) -> Option<T> {
        let tell = |error: &E| {
            warn!(%error, "{what}");
            self.0.push(format!("{what}: {error}"));
        };
        result.inspect_err(tell).ok()
    }
}

impl Collector {
    /// Until the server stops. An idle server makes no request: nothing is looked at while no record
    /// was appended.
    pub async fn run(self) {
        // Recovery has the store to itself.
        let mut ended = 0;
        self.pause(ended).await;
        let mut undeleted = Vec::new();
        let mut dropped = Dropped::default();
        let mut troubles = Troubles::default();
        let mut swept = self.try_sweep(&mut undeleted, &mut troubles).await;
        let mut backed_up = self.settle_backups(&mut troubles).await;
        drop(troubles);
        // Jobs with versions above their horizon: at first perhaps all.
        let mut moving: BTreeMap<JobId, Epoch> =
            self.shared.state.read().jobs.keys().map(|id| (*id, Epoch::ZERO)).collect();
        loop {
            if swept == self.to_sweep() && undeleted.is_empty() && backed_up {
                self.news(dropped.is_waiting(), ended).await;
            }
            self.pause(ended).await;
            let round = self.shared.collection.asked();
            let mut troubles = Troubles::default();
            if swept != self.to_sweep() {
                swept = self.try_sweep(&mut undeleted, &mut troubles).await;
            }
            backed_up = self.settle_backups(&mut troubles).await;
            // First: what is detached holds no horizon.
            let detached = detach::enforce(&self.shared).await;
            troubles.note("late jobs were not detached this time", detached);
            self.move_horizons(&mut moving);
            undeleted = self.store.delete(undeleted).await;
            let told = self.give_up().await;
            troubles.note("what was written for nothing is not logged as such this time", told);
            let collected = self.collect(&mut dropped, &mut undeleted).await;
            troubles.note("garbage was not collected this time", collected);
            if !undeleted.is_empty() {
                let failed = undeleted.len();
                troubles.0.push(format!("{failed} objects could not be deleted this time"));
            }
            self.shared.collection.end(round, troubles.0);
            ended = round;
        }
    }

    /// Whether all backups have their states, and no others are there.
    async fn settle_backups(&self, troubles: &mut Troubles) -> bool {
        let settled = self.backup_files.settle().await;
        troubles
            .note("the states of backups were not written or deleted this time", settled)
            .is_some()
    }

    /// Between two rounds; none if somebody has asked for another than the one that has ended.
    async fn pause(&self, ended: u64) {
        tokio::select! {
            biased;
            () = self.shared.collection.asked_beyond(ended) => {}
            () = tokio::time::sleep(self.options.period) => {}
        }
    }

    /// What there was to sweep, if it has come to its end.
    async fn try_sweep(
        &self,
        undeleted: &mut Vec<Path>,
        troubles: &mut Troubles,
    ) -> Option<ToSweep> {
        let to_sweep = self.to_sweep();
        let swept = self.sweep(undeleted).await;
        troubles.note("objects of fenced processes were not swept this time", swept).and(to_sweep)
    }

    fn to_sweep(&self) -> Option<ToSweep> {
        let state = self.shared.state.read();
        Some((state.processes.fenced(), state.processes.last()))
    }

    /// Until a record was appended, something was given up, a process has applied more if one is waited for, or garbage
    /// is old enough that was not when it was last looked at; or another round is asked for than the one that has ended.
    async fn news(&self, waits_for_process: bool, ended: u64) {
        let has_garbage = self.shared.state.read().objects.has_garbage();
        let retention = self.retention();
        // In a fixed order, so that a seed repeats a run. Each comes once.
        tokio::select! {
            biased;
            () = self.shared.appended.notified() => {}
            () = self.given_up.wait() => {}
            () = self.shared.collection.asked_beyond(ended) => {}
            () = self.shared.applied.changed.notified(), if waits_for_process => {}
            () = tokio::time::sleep(retention), if has_garbage => {}
        }
    }

    fn retention(&self) -> Duration {
        let setting = || self.shared.settings().object_retention;
        self.options.object_retention.unwrap_or_else(setting)
    }

    /// Tells the log what was written for nothing, by this process or for it by another: if no version names it, it is
    /// garbage from now on. What a fenced process has written is, anyway.
    async fn give_up(&self) -> Result<(), MetaError> {
        let Ok(log) = self.shared.log() else { return Err(MetaError::Closed) };
        loop {
            let names = self.given_up.take(BATCH);
            if names.is_empty() {
                return Ok(());
            }
            let mut by_writer: BTreeMap<u64, Vec<String>> = BTreeMap::new();
            for name in names {
                let writer = parse(&name).map_or(self.incarnation, |(writer, _)| writer);
                by_writer.entry(writer).or_default().push(name);
            }
            while let Some((incarnation, names)) = by_writer.pop_first() {
                let entry = GiveUp { incarnation, names: names.clone() };
                if let Err(error) = log.append(Entry::GiveUp(entry)).await {
                    self.given_up.add(names.into_iter().chain(by_writer.into_values().flatten()));
                    return Err(error);
                }
            }
        }
    }

    /// Deletes what lost its last reference longer ago than `object_retention`: requests may be on their way to it,
    /// and copies of a version be under way. Every live process has applied the record that dropped it: none will begin
    /// to read it. Readers that hold it are asked apart (`MetaOptions::pinned`).
    async fn collect(
        &self,
        dropped: &mut Dropped,
        undeleted: &mut Vec<Path>,
    ) -> Result<(), MetaError> {
        let limit = before(self.shared.env.now_ms(), self.retention());
        let mut garbage = {
            let state = self.shared.state.read();
            let all_applied = |number| {
                self.shared.applied.all_applied(number) || is_planted("object-collected-early")
            };
            let applied = dropped.look(state.number, state.epoch, all_applied);
            if state.objects.has_garbage() {
                self.shared.applied.ask(state.number);
            }
            let mut garbage =
                state.objects.garbage_before(limit.min(Epoch(applied.0.saturating_add(1))));
            garbage.retain(|name| !state.backups.hold(name));
            garbage
        };
        garbage.retain(|name| !(self.pinned)(name) && !self.shared.members.pins(name));
        self.delete(garbage, undeleted).await
    }

    /// Deletes what fenced processes wrote and no version names: nothing of theirs can be committed any more.
    async fn sweep(&self, undeleted: &mut Vec<Path>) -> Result<(), MetaError> {
        let listed = self.store.list_sizes(DATA_PREFIX).await?;
        let orphans: Vec<String> = {
            let state = self.shared.state.read();
            let alive = listed.iter().filter(|(name, _)| state.objects.is_referenced(name));
            self.shared.listed_sizes.set(alive.cloned());
            let is_orphan = |name: &String| {
                parse(name).is_some_and(|(writer, _)| state.processes.is_fenced(writer))
                    && !state.objects.is_referenced(name)
                    && !state.objects.is_garbage(name)
            };
            listed.into_iter().map(|(name, _)| name).filter(is_orphan).collect()
        };
        if !orphans.is_empty() {
            info!(count = orphans.len(), "deleting objects that fenced processes left uncommitted");
        }
        self.delete(orphans, undeleted).await
    }

    /// `undeleted`: takes in those whose deletion is logged and has failed.
    async fn delete(&self, names: Vec<String>, undeleted: &mut Vec<Path>) -> Result<(), MetaError> {
        let Ok(log) = self.shared.log() else { return Err(MetaError::Closed) };
        for batch in names.chunks(BATCH) {
            let entry = Entry::DeleteObjects(DeleteObjects { names: batch.to_vec() });
            crash::point("gc-before-log");
            if log.append(entry).await?.is_err() {
                // One of them is in use again: look at all of them anew next time.
                continue;
            }
            crash::point("gc-after-log");
            fail::fail_point!("meta.gc.logged");
            let failed =
                self.store.delete(batch.iter().map(|n| Path::from(n.as_str())).collect()).await;
            crash::point("gc-after-delete");
            if !failed.is_empty() {
                warn!(failed = failed.len(), "objects could not be deleted this time");
                undeleted.extend(failed);
            }
        }
        Ok(())
    }

    /// Tells the workers which versions no read needs any more. A job whose horizon has reached its newest version has
    /// nothing to lose until it commits again. `moving`: the others, and their horizons.
    fn move_horizons(&self, moving: &mut BTreeMap<JobId, Epoch>) {
        let committed = std::mem::take(&mut *self.shared.committed.lock());
        for job in committed {
            moving.entry(job).or_default();
        }
        for (job, horizon) in self.shared.give_horizons(moving) {
            self.shared.streams.raise_horizon(job, horizon);
        }
    }
}

/// The epoch that lies `age` before now.
pub fn before(now_ms: u64, age: Duration) -> Epoch {
    Epoch::from_millis(now_ms.saturating_sub(age.as_millis() as u64))
}

/// The epoch below which no version of the job is needed: `limit`, or less where the content itself is older, a reader of
/// the relation stands further back or a subscription keeps its changes for longer. `written`: the epoch after which a
/// job has committed no more than so many bytes.
pub fn horizon(
    state: &MetaState,
    id: JobId,
    limit: Epoch,
    now_ms: u64,
    written: &dyn Fn(JobId, u64) -> Epoch,
) -> Epoch {
    let mut horizon = limit;
    let Some(job) = state.jobs.get(&id) else { return horizon };
    // A derived relation is read as of epochs through which it is known, which do not go on by themselves.
    if let Some(anchor) = job.timeline.anchor().filter(|_| !job.inputs.is_empty()) {
        horizon = horizon.min(anchor);
    }
    for reader in state.dependencies.readers(id).filter_map(|r| state.jobs.get(&r)) {
        // A reader whose snapshot is not fixed needs none: `MAX`.
        horizon = horizon.min(position(reader));
    }
    for subscription in state.dependencies.named_by(id) {
        let Some(subscription) = state.relations.get(&subscription) else { continue };
        let Some(retention) = retention(subscription) else { continue };
        let bytes = subscription.option("retention_bytes").and_then(|b| b.parse().ok());
        let by_bytes = bytes.map_or(Epoch::ZERO, |b| written(id, b));
        horizon = horizon.min(before(now_ms, retention).max(by_bytes));
    }
    // There are no versions in between: who has seen the content before a rebuild goes on from there.
    let (from, at) = (Epoch(job.version.swapped_from), Epoch(job.version.swapped_at));
    if horizon > from && horizon < at { from } else { horizon }
}

/// For how long a subscription keeps the changes of its relation.
fn retention(relation: &Relation) -> Option<Duration> {
    if relation.kind() != RelationKind::Subscription {
        return None;
    }
    millrace_common::settings::parse_duration(relation.option("retention")?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_dropped_waits_for_the_slowest_process() {
        let mut dropped = Dropped::default();
        assert_eq!(dropped.look(3, Epoch(30), |n| n <= 2), Epoch::ZERO);
        assert_eq!(dropped.look(3, Epoch(30), |n| n <= 4), Epoch(30));
        assert!(!dropped.is_waiting());
        assert_eq!(dropped.look(5, Epoch(50), |n| n <= 4), Epoch(30));
        assert_eq!(dropped.look(9, Epoch(90), |n| n <= 8), Epoch(50));
        assert!(dropped.is_waiting());
        assert_eq!(dropped.look(9, Epoch(90), |n| n <= 9), Epoch(90));
        assert!(!dropped.is_waiting());
    }
}
