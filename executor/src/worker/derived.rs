//! The epochs of a derived job: barriers in, reports out, one commit of all tasks.
//!
//! Cuts enter one at a time; making an epoch durable happens outside that, so the next epoch may be
//! processed meanwhile. Commits are concluded in the order of their cuts.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use millrace_common::{DeltaChunk, Epoch, Generation, JobId, RelationId, TableId, crash};
use millrace_graph::lookahead::Place;
use millrace_graph::{DerivedWatermark, Retention};
use millrace_rpc::catalog::Relation;
use millrace_rpc::services::Cut;
use millrace_rpc::version::{
    BackfillPosition, BackfillState, ColumnWatermark, JobCommit, JobVersion, PublishHandle,
    SourceWatermark, retention_counter,
};
use millrace_storage::{JobStore, MemRun, Persisted};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use super::stream::Concluded;
use crate::blackhole::Digest;
use crate::changelog_cache::{ChangelogCache, HubChunk};
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::exchange::Barrier;
use crate::invariants::{check_in_flight, check_reports};
use crate::lookahead::uncommitted::Announced;
use crate::publish::{ChangeOf, Publisher};
use crate::stats::Progress;
use crate::task::TaskReport;
use crate::watermark::WatermarkSet;

const DIGEST_ROWS: &str = "blackhole.rows";
const DIGEST_HASH: &str = "blackhole.hash";

/// A sealed epoch that is not concluded.
struct InFlight {
    /// `None` until it is durable.
    persisted: Option<Persisted>,
    delta: Option<Vec<HubChunk>>,
    /// From when on rows of state tables are kept.
    bounds: Vec<(TableId, i64)>,
    changed: bool,
    backfill: bool,
    /// The backfill ends with it.
    caught_up: bool,
    digest: Option<Digest>,
    number: u64,
    epoch: Epoch,
    /// To those that look ahead.
    announced: Option<Announced>,
}

impl InFlight {
    /// What it holds; what it is stays known.
    fn take(&mut self) -> InFlight {
        InFlight {
            persisted: self.persisted.take(),
            delta: self.delta.take(),
            bounds: std::mem::take(&mut self.bounds),
            announced: self.announced.take(),
            ..*self
        }
    }
}

/// What only one cut at a time touches.
struct Control {
    reports: mpsc::UnboundedReceiver<TaskReport>,
    last: Epoch,
    backfill: Option<BackfillState>,
    /// The backfill computes anew what the relation has.
    rebuilding: bool,
    digest: Option<Digest>,
    /// The relation's, by column.
    watermarks: BTreeMap<u32, i64>,
    /// Of the last cut.
    number: u64,
}

pub struct Derived {
    job: JobId,
    /// What logs call it.
    label: String,
    generation: Generation,
    store: Arc<JobStore>,
    changelogs: Arc<ChangelogCache>,
    cuts: Vec<mpsc::UnboundedSender<Arc<Barrier>>>,
    tasks: usize,
    /// Asynchronous: held while the tasks process an epoch.
    control: tokio::sync::Mutex<Control>,
    in_flight: Mutex<VecDeque<InFlight>>,
    /// Told when the outcome of an epoch has taken effect.
    concluded: Notify,
    /// As committed.
    digest: Mutex<Option<Digest>>,
    cleaning: Cleaning,
    /// Of a sink: what stages and publishes its changes.
    publisher: Option<Publisher>,
    /// Of the job's inputs, by number: see [`Barrier::stage`].
    stages: Vec<u32>,
    /// Rows that could not be read or computed.
    errors: Arc<ErrorSink>,
    progress: Arc<Progress>,
    /// One publication at a time: that of a leader which was lost may still be under way.
    publishing: tokio::sync::Mutex<()>,
}

/// What all tasks made of an epoch.
#[derive(Default)]
struct Collected {
    /// Which task has ended which epoch.
    reporters: Vec<(usize, Epoch)>,
    runs: Vec<MemRun>,
    positions: Vec<BackfillPosition>,
    scanned: u64,
    row_count: i64,
    changed: bool,
    delta: Option<Vec<HubChunk>>,
    counters: BTreeMap<String, u64>,
    digest: Option<Digest>,
    marks: WatermarkSet,
    due: Option<Epoch>,
    staged: Vec<DeltaChunk>,
}

/// What of a job's graph has to do with watermarks.
pub struct Cleaning {
    /// Columns of the relation.
    pub output: Vec<DerivedWatermark>,
    pub tables: Vec<(TableId, Retention)>,
    /// Sources among the job's inputs.
    pub sources: Vec<RelationId>,
}

impl Derived {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        relation: &Relation,
        generation: Generation,
        store: Arc<JobStore>,
        changelogs: Arc<ChangelogCache>,
        version: &JobVersion,
        cuts: Vec<mpsc::UnboundedSender<Arc<Barrier>>>,
        reports: mpsc::UnboundedReceiver<TaskReport>,
        tasks: usize,
        cleaning: Cleaning,
        publisher: Option<Publisher>,
        stages: Vec<u32>,
        errors: Arc<ErrorSink>,
        progress: Arc<Progress>,
    ) -> Derived {
        let counter = |name: &str| version.counters.get(name).copied();
        let digest = counter(DIGEST_HASH)
            .map(|hash| Digest { rows: counter(DIGEST_ROWS).unwrap_or(0) as i64, hash });
        let control = Control {
            reports,
            last: Epoch(version.epoch),
            backfill: version.backfill.clone(),
            rebuilding: version.is_rebuilding(),
            digest,
            watermarks: version.watermarks.iter().map(|w| (w.column, w.value)).collect(),
            number: version.commits,
        };
        Derived {
            job: RelationId(relation.id),
            label: relation.label(),
            generation,
            store,
            changelogs,
            cuts,
            tasks,
            control: tokio::sync::Mutex::new(control),
            in_flight: Mutex::default(),
            concluded: Notify::new(),
            digest: Mutex::new(digest),
            cleaning,
            publisher,
            stages,
            errors,
            progress,
            publishing: tokio::sync::Mutex::default(),
        }
    }

    /// Brings committed changes of a sink to its target, as one.
    pub async fn publish(&self, handles: &[PublishHandle]) -> Result<(), ExecError> {
        let _one = self.publishing.lock().await;
        match &self.publisher {
            Some(publisher) => publisher.publish(&self.store, handles).await,
            None => Err(ExecError::internal("a job that is not a sink has nothing to publish")),
        }
    }

    /// The watermarks and bounds of cleaning that follow from what the tasks know.
    fn note_marks(&self, control: &mut Control, all: &mut Collected, commit: &mut JobCommit) {
        for (column, value) in all.marks.columns(&self.cleaning.output) {
            let column = column as u32;
            let known = control.watermarks.get(&column);
            if known.is_none_or(|k| *k < value) {
                control.watermarks.insert(column, value);
                // An advance alone is a change.
                commit.changed = true;
            }
        }
        let columns = control.watermarks.iter();
        commit.watermarks =
            columns.map(|(&column, &value)| ColumnWatermark { column, value }).collect();
        commit.source_watermarks = all
            .marks
            .iter()
            .filter(|((relation, _), _)| self.cleaning.sources.contains(relation))
            .filter_map(|((relation, _), v)| {
                Some(SourceWatermark { source: relation.0, value: v? })
            })
            .collect();
        commit.due = all.due.map_or(0, |e| e.0);
    }

    /// From when on rows of each table are kept; only ever later.
    fn bounds(&self, all: &Collected) -> Vec<(TableId, i64)> {
        let one = |(table, r): &(TableId, Retention)| Some((*table, all.marks.least(&r.terms)?));
        self.cleaning.tables.iter().filter_map(one).collect()
    }

    /// What a blackhole has seen, as committed.
    pub fn digest(&self) -> Option<Digest> {
        *self.digest.lock()
    }

    /// Ends an epoch in all tasks and makes it durable.
    pub async fn cut(&self, cut: Cut) -> Result<JobCommit, ExecError> {
        let (epoch, number) = (cut.epoch, cut.number);
        let mut control = self.control.lock().await;
        let barrier = control.barrier(cut, &self.stages)?;
        let barrier = Arc::new(barrier);
        if barrier.swap {
            self.await_concluded().await;
            crash::point("rebuild-before-swap");
        }
        for cut in &self.cuts {
            cut.send(Arc::clone(&barrier)).map_err(|_| ExecError::Stopped)?;
        }
        let mut all = Collected { delta: Some(Vec::new()), ..Collected::default() };
        for _ in 0..self.tasks {
            all.add(control.reports.recv().await.ok_or(ExecError::Stopped)?);
        }
        self.debug_check_reports(&all, epoch);
        self.progress.note_step();
        self.progress.epochs.note_sealed(epoch);
        fail::fail_point!("executor.sealed");
        crash::point("executor-before-persist");
        let runs = std::mem::take(&mut all.runs);
        let staged = std::mem::take(&mut all.staged);
        let mut commit = self.seal(&mut control, &barrier, number, all);
        let of = match (barrier.backfill, &commit.backfill) {
            (true, Some(_)) => ChangeOf::Snapshot,
            (true, None) => ChangeOf::SnapshotEnd,
            _ => ChangeOf::Epoch,
        };
        // Ordered by the number; awaited without holding up the next epoch.
        let persist = self.store.persist(number, runs);
        drop(control);
        let stage = async {
            match &self.publisher {
                Some(publisher) => publisher.stage(&self.store, staged, of).await,
                None => Ok(None),
            }
        };
        let persist = async { persist.await.map_err(ExecError::from) };
        let (persisted, handle) = futures::try_join!(persist, stage)?;
        commit.publish = handle;
        fail::fail_point!("executor.persisted");
        crash::point("executor-after-persist");
        commit.slices = persisted.slices.clone();
        commit.edit = persisted.edit.clone();
        let mut in_flight = self.in_flight.lock();
        if let Some(own) = in_flight.iter_mut().find(|f| f.number == number) {
            own.persisted = Some(persisted);
        }
        Ok(commit)
    }

    /// Waits until all epochs before are visible.
    async fn await_concluded(&self) {
        loop {
            let concluded = self.concluded.notified();
            if self.in_flight.lock().is_empty() {
                return;
            }
            concluded.await;
        }
    }

    fn seal(
        &self,
        control: &mut Control,
        barrier: &Barrier,
        number: u64,
        mut all: Collected,
    ) -> JobCommit {
        if let Some(delta) = all.digest {
            let total = control.digest.unwrap_or_default().plus(delta);
            control.digest = Some(total);
            all.counters.insert(DIGEST_ROWS.to_string(), total.rows as u64);
            all.counters.insert(DIGEST_HASH.to_string(), total.hash);
        }
        let total = self.progress.to_scan.get();
        let rebuilding = control.rebuilding;
        let backfill = control.backfill.take();
        let after = backfill.and_then(|b| advance(b, barrier, total, rebuilding, &mut all));
        let bounds = self.bounds(&all);
        for (table, bound) in &bounds {
            all.counters.insert(retention_counter(table.0), *bound as u64);
        }
        all.counters.extend(self.errors.unsaved());
        let mut commit = JobCommit {
            job: self.job.0,
            generation: self.generation.0,
            number,
            epoch: barrier.epoch.0,
            backfill: after.clone(),
            row_count_delta: all.row_count,
            counters: std::mem::take(&mut all.counters),
            changed: all.changed,
            ..JobCommit::default()
        };
        self.note_marks(control, &mut all, &mut commit);
        control.number = number;
        let announced = self.announce(barrier, &commit, all.delta.as_deref());
        self.in_flight.lock().push_back(InFlight {
            persisted: None,
            delta: all.delta,
            bounds,
            changed: commit.changed,
            backfill: barrier.backfill,
            caught_up: barrier.backfill && after.is_none(),
            digest: control.digest,
            number,
            epoch: barrier.epoch,
            announced,
        });
        control.backfill = after;
        control.last = barrier.epoch;
        self.debug_check_in_flight(control);
        commit
    }

    /// Tells those that look ahead of an epoch's change, unless it is too large to be told.
    fn announce(
        &self,
        barrier: &Barrier,
        commit: &JobCommit,
        delta: Option<&[HubChunk]>,
    ) -> Option<Announced> {
        let delta = delta.filter(|d| !d.is_empty() && commit.changed && !barrier.backfill)?;
        let rows = || delta.iter().map(|chunk| chunk.chunk().clone()).collect();
        let uncommitted = self.changelogs.uncommitted();
        uncommitted.announce(self.job, Place::Root, Some(barrier.epoch), rows)
    }

    /// The job has ended: what is in flight may never be committed.
    pub fn withdraw_announced(&self) {
        self.in_flight.lock().iter_mut().for_each(|own| own.announced = None);
    }

    fn debug_check_reports(&self, all: &Collected, epoch: Epoch) {
        if cfg!(debug_assertions) {
            let checked = check_reports(&all.reporters, self.tasks, epoch);
            debug_assert_eq!(checked, Ok(()), "job {}", self.label);
        }
    }

    fn debug_check_in_flight(&self, control: &Control) {
        if cfg!(debug_assertions) {
            let in_flight = self.in_flight.lock();
            let cuts = in_flight.iter().map(|f| (f.number, f.epoch));
            let checked = check_in_flight(cuts, (control.number, control.last));
            debug_assert_eq!(checked, Ok(()), "job {}", self.label);
        }
    }

    /// Whether the commit of this number waits for its conclusion.
    pub fn is_in_flight(&self, number: u64) -> bool {
        self.in_flight.lock().iter().any(|own| own.number == number)
    }

    /// The log has the commit of this number: it is visible from now on.
    pub fn committed(&self, number: u64, epoch: Epoch) -> Concluded {
        let own = {
            let mut in_flight = self.in_flight.lock();
            let Some(oldest) = in_flight.front_mut() else { return Concluded::Before };
            match oldest.number.cmp(&number) {
                Ordering::Greater => return Concluded::Before,
                Ordering::Less => return Concluded::TooEarly,
                Ordering::Equal => oldest.take(),
            }
        };
        self.publish_committed(epoch, own);
        // Only now: who waits reads what it wrote.
        self.in_flight.lock().pop_front();
        self.concluded.notify_waiters();
        Concluded::Now
    }

    fn publish_committed(&self, epoch: Epoch, own: InFlight) {
        let Some(persisted) = own.persisted else {
            tracing::error!(job = self.label, %epoch, "committed before it was durable");
            return;
        };
        debug_assert_eq!(own.epoch, epoch, "job {} commits its oldest epoch", self.label);
        crash::point("executor-before-publish");
        self.store.publish(epoch, persisted);
        self.store.set_bounds(&own.bounds);
        crash::point("executor-after-publish");
        *self.digest.lock() = own.digest;
        if own.caught_up {
            self.changelogs.open(self.job, epoch);
        } else if !own.backfill && own.changed {
            self.changelogs.put(self.job, epoch, own.delta);
        }
        if let Some(announced) = own.announced {
            announced.committed(epoch);
        }
    }
}

impl Control {
    fn barrier(&self, cut: Cut, stages: &[u32]) -> Result<Barrier, ExecError> {
        let Cut { epoch, number, .. } = cut;
        if number != self.number + 1 {
            let last = self.number;
            return Err(ExecError::internal(format!("cut {number}, not the one after {last}")));
        }
        match &self.backfill {
            // A job started before its snapshot epoch was fixed learns it here.
            Some(b) if b.snapshot_epoch != 0 && b.snapshot_epoch != epoch.0 => {
                let of = b.snapshot_epoch;
                Err(ExecError::internal(format!("cut at {epoch} in a backfill of {of}")))
            }
            None if epoch <= self.last => {
                Err(ExecError::internal(format!("cut at {epoch}, not after {}", self.last)))
            }
            backfill => {
                let stage = backfill.as_ref().map_or(u32::MAX, |b| stage(b, stages));
                let swap = backfill.as_ref().is_some_and(|b| b.swap);
                Ok(Barrier { prev: self.last, epoch, backfill: backfill.is_some(), stage, swap })
            }
        }
    }
}

/// The first stage with an input that is not scanned to its end.
fn stage(backfill: &BackfillState, stages: &[u32]) -> u32 {
    let of = |p: &BackfillPosition| stages.get(p.input as usize).copied().unwrap_or(0);
    backfill.positions.iter().filter(|p| !p.done).map(of).min().unwrap_or(0)
}

/// The state of the backfill after a step; `None`: done.
fn advance(
    before: BackfillState,
    barrier: &Barrier,
    rows_total: u64,
    rebuilding: bool,
    all: &mut Collected,
) -> Option<BackfillState> {
    let scanned = all.positions.iter().all(|p| p.done);
    if scanned && (!rebuilding || barrier.swap) {
        return None;
    }
    let mut positions = std::mem::take(&mut all.positions);
    positions.sort_by_key(|p| (p.input, p.vnode));
    Some(BackfillState {
        snapshot_epoch: barrier.epoch.0,
        positions,
        rows_read: before.rows_read + all.scanned,
        rows_total,
        // Once all that the scans brought is visible.
        swap: scanned,
    })
}

impl Collected {
    fn add(&mut self, report: TaskReport) {
        self.reporters.push((report.task, report.epoch));
        self.runs.extend(report.runs);
        self.positions.extend(report.positions);
        self.scanned += report.scanned;
        self.counters.extend(report.counters);
        self.marks.merge(&report.marks);
        self.due = [self.due, report.due].into_iter().flatten().min();
        let Some(root) = report.root else { return };
        self.row_count += root.row_count;
        self.changed |= root.changed;
        self.staged.extend(root.staged);
        self.counters.extend(root.counters);
        self.delta = match (self.delta.take(), root.delta) {
            (Some(mut all), Some(own)) => {
                all.extend(own);
                Some(all)
            }
            _ => None,
        };
        if let Some(digest) = root.digest {
            self.digest = Some(self.digest.unwrap_or_default().plus(digest));
        }
    }
}
