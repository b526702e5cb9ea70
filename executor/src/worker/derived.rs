//! The epochs of a derived job: barriers in, reports out, one commit of all tasks.
//!
//! Cuts enter one at a time; making an epoch durable happens outside that, so the next epoch may be
//! processed meanwhile. Commits are concluded in the order of their cuts.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use millrace_common::{Epoch, Generation, JobId, crash};
use millrace_rpc::version::{BackfillPosition, BackfillState, JobCommit, JobVersion};
use millrace_storage::{JobStore, MemRun, Persisted};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::blackhole::Digest;
use crate::error::ExecError;
use crate::exchange::Barrier;
use crate::hub::{DeltaHub, HubChunk};
use crate::task::TaskReport;

const DIGEST_ROWS: &str = "blackhole.rows";
const DIGEST_HASH: &str = "blackhole.hash";

/// A sealed epoch that is not concluded.
struct InFlight {
    /// `None` until it is durable.
    persisted: Option<Persisted>,
    delta: Option<Vec<HubChunk>>,
    changed: bool,
    backfill: bool,
    /// The backfill ends with it.
    caught_up: bool,
    digest: Option<Digest>,
    number: u64,
}

/// What only one cut at a time touches.
struct Control {
    reports: mpsc::UnboundedReceiver<TaskReport>,
    last: Epoch,
    backfill: Option<BackfillState>,
    digest: Option<Digest>,
    number: u64,
}

pub struct Derived {
    job: JobId,
    generation: Generation,
    store: Arc<JobStore>,
    hub: Arc<DeltaHub>,
    cuts: Vec<mpsc::UnboundedSender<Arc<Barrier>>>,
    tasks: usize,
    /// Asynchronous: held while the tasks process an epoch.
    control: tokio::sync::Mutex<Control>,
    in_flight: Mutex<VecDeque<InFlight>>,
    /// As committed.
    digest: Mutex<Option<Digest>>,
}

/// What all tasks made of an epoch.
#[derive(Default)]
struct Collected {
    runs: Vec<MemRun>,
    positions: Vec<BackfillPosition>,
    scanned: u64,
    row_count: i64,
    changed: bool,
    delta: Option<Vec<HubChunk>>,
    counters: HashMap<String, u64>,
    digest: Option<Digest>,
}

impl Derived {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        job: JobId,
        generation: Generation,
        store: Arc<JobStore>,
        hub: Arc<DeltaHub>,
        version: &JobVersion,
        cuts: Vec<mpsc::UnboundedSender<Arc<Barrier>>>,
        reports: mpsc::UnboundedReceiver<TaskReport>,
        tasks: usize,
    ) -> Derived {
        let counter = |name: &str| version.counters.get(name).copied();
        let digest = counter(DIGEST_HASH)
            .map(|hash| Digest { rows: counter(DIGEST_ROWS).unwrap_or(0) as i64, hash });
        let control = Control {
            reports,
            last: Epoch(version.epoch),
            backfill: version.backfill.clone(),
            digest,
            number: 0,
        };
        Derived {
            job,
            generation,
            store,
            hub,
            cuts,
            tasks,
            control: tokio::sync::Mutex::new(control),
            in_flight: Mutex::default(),
            digest: Mutex::new(digest),
        }
    }

    /// What a blackhole has seen, as committed.
    pub fn digest(&self) -> Option<Digest> {
        *self.digest.lock()
    }

    /// Ends an epoch in all tasks and makes it durable.
    pub async fn cut(&self, epoch: Epoch) -> Result<JobCommit, ExecError> {
        let mut control = self.control.lock().await;
        let barrier = control.barrier(epoch)?;
        let barrier = Arc::new(barrier);
        for cut in &self.cuts {
            cut.send(Arc::clone(&barrier)).map_err(|_| ExecError::Stopped)?;
        }
        let mut all = Collected { delta: Some(Vec::new()), ..Collected::default() };
        for _ in 0..self.tasks {
            all.add(control.reports.recv().await.ok_or(ExecError::Stopped)?);
        }
        fail::fail_point!("executor.sealed");
        crash::point("executor-before-persist");
        let runs = std::mem::take(&mut all.runs);
        let (mut commit, number) = self.seal(&mut control, &barrier, all);
        // Ordered by the call; awaited without holding up the next epoch.
        let persist = self.store.persist(runs);
        drop(control);
        let persisted = persist.await?;
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

    fn seal(
        &self,
        control: &mut Control,
        barrier: &Barrier,
        mut all: Collected,
    ) -> (JobCommit, u64) {
        if let Some(delta) = all.digest {
            let total = control.digest.unwrap_or_default().add(delta);
            control.digest = Some(total);
            all.counters.insert(DIGEST_ROWS.to_string(), total.rows as u64);
            all.counters.insert(DIGEST_HASH.to_string(), total.hash);
        }
        let after = control.backfill.take().and_then(|b| advance(b, barrier, &mut all));
        let commit = JobCommit {
            job: self.job.0,
            generation: self.generation.0,
            prev_epoch: control.last.0,
            epoch: barrier.epoch.0,
            backfill: after.clone(),
            row_count_delta: all.row_count,
            counters: all.counters,
            changed: all.changed,
            ..JobCommit::default()
        };
        control.number += 1;
        self.in_flight.lock().push_back(InFlight {
            persisted: None,
            delta: all.delta,
            changed: all.changed,
            backfill: barrier.backfill,
            caught_up: barrier.backfill && after.is_none(),
            digest: control.digest,
            number: control.number,
        });
        control.backfill = after;
        control.last = barrier.epoch;
        (commit, control.number)
    }

    /// The oldest epoch in flight is committed: visible from now on.
    pub fn committed(&self, epoch: Epoch) {
        let Some(own) = self.in_flight.lock().pop_front() else { return };
        let Some(persisted) = own.persisted else {
            tracing::error!(job = %self.job, %epoch, "committed before it was durable");
            return;
        };
        crash::point("executor-before-publish");
        self.store.publish(epoch, persisted);
        crash::point("executor-after-publish");
        *self.digest.lock() = own.digest;
        if own.caught_up {
            self.hub.open(self.job, epoch);
        } else if !own.backfill && own.changed {
            self.hub.put(self.job, epoch, own.delta);
        }
    }
}

impl Control {
    fn barrier(&self, epoch: Epoch) -> Result<Barrier, ExecError> {
        match &self.backfill {
            // A job started before its snapshot epoch was fixed learns it here.
            Some(b) if b.snapshot_epoch != 0 && b.snapshot_epoch != epoch.0 => {
                let of = b.snapshot_epoch;
                Err(ExecError::internal(format!("cut at {epoch} in a backfill of {of}")))
            }
            None if epoch <= self.last => {
                Err(ExecError::internal(format!("cut at {epoch}, not after {}", self.last)))
            }
            backfill => Ok(Barrier { prev: self.last, epoch, backfill: backfill.is_some() }),
        }
    }
}

/// The state of the backfill after a step; `None`: done.
fn advance(before: BackfillState, barrier: &Barrier, all: &mut Collected) -> Option<BackfillState> {
    if all.positions.iter().all(|p| p.done) {
        return None;
    }
    let mut positions = std::mem::take(&mut all.positions);
    positions.sort_by_key(|p| (p.input, p.vnode));
    Some(BackfillState {
        snapshot_epoch: barrier.epoch.0,
        positions,
        rows_read: before.rows_read + all.scanned,
        rows_total: before.rows_total,
    })
}

impl Collected {
    fn add(&mut self, report: TaskReport) {
        self.runs.extend(report.runs);
        self.positions.extend(report.positions);
        self.scanned += report.scanned;
        let Some(root) = report.root else { return };
        self.row_count += root.row_count;
        self.changed |= root.changed;
        self.counters.extend(root.counters);
        self.delta = match (self.delta.take(), root.delta) {
            (Some(mut all), Some(own)) => {
                all.extend(own);
                Some(all)
            }
            _ => None,
        };
        if let Some(digest) = root.digest {
            self.digest = Some(self.digest.unwrap_or_default().add(digest));
        }
    }
}
