//! Who compacts: the compactor process with the least to do, and where there is none the compute process that runs the
//! job.
//!
//! A task is leased. The process keeps it while it tells that it is there and that the object store answers it, and for a
//! time that depends on what it has to read; then the task is taken back and given to another. The call to the first ends
//! with its lease, so what it still makes of the task is never brought into the log: the process gives the objects up when
//! it finds that nothing names them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use millrace_common::{JobId, SqlError, SqlState};
use millrace_rpc::call_error::is_unreachable;
use millrace_rpc::log::MoveParts;
use millrace_rpc::services::{CompactionTask, CompactorService, LivePart};
use millrace_rpc::version::VersionEdit;
use parking_lot::Mutex;
use tracing::warn;

use crate::compaction_board::CompactionBoard;
use crate::computes::Computes;

type Service = Arc<dyn CompactorService>;

/// Who has told nothing for so long keeps nothing, and is given nothing.
const SILENT: Duration = Duration::from_secs(3);
/// So it is with one that says that the object store has answered it nothing for so long. That is long: where nobody is
/// answered, another process can do no more, and what was done is lost.
const WITHOUT_STORE: Duration = Duration::from_secs(30);
/// Between looks at whether a process still tells of itself.
const LOOK: Duration = Duration::from_millis(500);
/// Looks, one after the other, that find a process silent before a task is taken back from it: when this process has
/// stood still itself, the first comes before what it was told meanwhile.
const LOOKS: u32 = 2;
/// A lease lasts so long, and a second for each of so many bytes that the process has been given and not read.
const LEASE: Duration = Duration::from_secs(60);
const BYTES_A_SECOND: u64 = 1 << 20;
/// It lasts twice as long after each of a table's that was not enough, up to so often: where the store is slow, a task
/// is done in the end.
const DOUBLINGS: u32 = 6;

/// How a process is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contact {
    /// How long it has told nothing.
    pub silence: Duration,
    /// For how long the object store has answered it nothing, as it has told last.
    pub store_wait: Duration,
}

/// How each process is; `None`: it is not known.
pub type ContactOf = Arc<dyn Fn(u64) -> Option<Contact> + Send + Sync>;

/// What a process has been given and has not done. The smallest is given more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Load {
    tasks: usize,
    bytes: u64,
}

#[derive(Default)]
struct Known {
    /// By incarnation, in the order of their registration.
    compactors: Vec<(u64, Service)>,
    /// What compute processes offer.
    computes: Vec<(u64, Service)>,
    load: BTreeMap<u64, Load>,
    /// Leases that were not long enough, where none has been since.
    overdue: BTreeMap<Subject, u32>,
    next: usize,
}

/// See the module.
pub struct Compactors {
    known: Mutex<Known>,
    computes: Arc<Computes>,
    /// Told who does what.
    board: Arc<CompactionBoard>,
    contact: ContactOf,
}

/// A job's state table whose runs are merged; `None`: parts of several are copied.
type Subject = Option<(JobId, u32)>;

/// What is to be done.
#[derive(Clone, Copy, Debug)]
struct Work {
    subject: Subject,
    bytes: u64,
}

/// Who has had a task and not done it.
#[derive(Debug, Default)]
struct Tried {
    processes: BTreeSet<u64>,
    /// One was there and not done in time.
    is_overdue: bool,
}

/// A process that has been given something. Its load falls when this is dropped.
struct Lease<'a> {
    all: &'a Compactors,
    process: u64,
    service: Service,
    bytes: u64,
    lasts: Duration,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Some(load) = self.all.known.lock().load.get_mut(&self.process) {
            load.tasks = load.tasks.saturating_sub(1);
            load.bytes = load.bytes.saturating_sub(self.bytes);
        }
    }
}

/// How a lease has ended without a result.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("process {0} tells nothing any more, or the object store does not answer it")]
    Silent(u64),
    #[error("process {0} has not done it within {1:?}")]
    Overdue(u64, Duration),
    #[error("{0}")]
    Failed(SqlError),
}

impl Ended {
    /// Whether another process may do it.
    fn is_of_process(&self) -> bool {
        /// The last one is what the object store says to a process whose credentials it does not take.
        const REFUSED: [SqlState; 3] = [
            SqlState::CANNOT_CONNECT_NOW,
            SqlState::ADMIN_SHUTDOWN,
            SqlState::INSUFFICIENT_PRIVILEGE,
        ];
        match self {
            Ended::Silent(_) | Ended::Overdue(..) => true,
            Ended::Failed(e) => is_unreachable(e) || REFUSED.contains(&e.state),
        }
    }
}

impl From<Ended> for SqlError {
    fn from(ended: Ended) -> SqlError {
        match ended {
            Ended::Failed(e) => e,
            taken_back => SqlError::new(SqlState::CANNOT_CONNECT_NOW, taken_back.to_string()),
        }
    }
}

impl Compactors {
    pub fn new(
        computes: Arc<Computes>,
        board: Arc<CompactionBoard>,
        contact: ContactOf,
    ) -> Compactors {
        Compactors { known: Mutex::default(), computes, board, contact }
    }

    pub fn add_compactor(&self, incarnation: u64, service: Service) {
        self.known.lock().compactors.push((incarnation, service));
    }

    pub fn add_compute(&self, incarnation: u64, service: Service) {
        self.known.lock().computes.push((incarnation, service));
    }

    pub fn remove(&self, incarnation: u64) {
        let mut known = self.known.lock();
        known.compactors.retain(|(id, _)| *id != incarnation);
        known.computes.retain(|(id, _)| *id != incarnation);
        known.load.remove(&incarnation);
    }

    /// Whether a process tells of itself, and reads and writes objects, as far as it is known.
    fn is_there(&self, process: u64) -> bool {
        let is_well = |c: Contact| c.silence <= SILENT && c.store_wait <= WITHOUT_STORE;
        (self.contact)(process).is_none_or(is_well)
    }

    /// Chooses a process that has not been tried. Compactors that are not there do not count, and where no other can be
    /// reached, a compute process stands in.
    fn lease(&self, work: Work, tried: &Tried) -> Result<Lease<'_>, SqlError> {
        let placed = work.subject.map(|(job, _)| self.computes.placed(job));
        let known = &mut *self.known.lock();
        known.next = known.next.wrapping_add(1);
        let may = |(id, _): &&(u64, Service)| !tried.processes.contains(id) && self.is_there(*id);
        let mut of: Vec<&(u64, Service)> = known.compactors.iter().filter(may).collect();
        if of.is_empty() && !tried.is_overdue {
            let is_placed = |(id, _): &&(u64, Service)| placed.is_none_or(|process| process == *id);
            let is_new = |(id, _): &&(u64, Service)| !tried.processes.contains(id);
            of = known.computes.iter().filter(is_placed).filter(is_new).collect();
        }
        let from = known.next % of.len().max(1);
        let (left, right) = of.split_at(from);
        let load = |id: &u64| known.load.get(id).copied().unwrap_or_default();
        let in_turn = right.iter().chain(left);
        // Of several with the same load, the first.
        let (process, service) =
            in_turn.min_by_key(|(id, _)| load(id)).map(|p| (*p).clone()).ok_or_else(nobody)?;
        let load = known.load.entry(process).or_default();
        load.tasks += 1;
        load.bytes += work.bytes;
        let doublings = known.overdue.get(&work.subject).copied().unwrap_or(0);
        // It may do what it was given before first.
        let lasts = LEASE + Duration::from_secs(load.bytes / BYTES_A_SECOND);
        let lasts = lasts * 2u32.pow(doublings.min(DOUBLINGS));
        Ok(Lease { all: self, process, service, bytes: work.bytes, lasts })
    }

    /// Completes when the process has not been there for too long, or is fenced.
    async fn lost(&self, process: u64) {
        let is_known = || {
            let known = self.known.lock();
            known.compactors.iter().chain(&known.computes).any(|(id, _)| *id == process)
        };
        let mut silent = 0;
        while is_known() && silent < LOOKS {
            tokio::time::sleep(LOOK).await;
            silent = if self.is_there(process) { 0 } else { silent + 1 };
        }
    }

    async fn hold<T>(
        &self,
        lease: &Lease<'_>,
        call: impl Future<Output = Result<T, SqlError>>,
    ) -> Result<T, Ended> {
        let Lease { process, lasts, .. } = *lease;
        // In a fixed order, so that a seed repeats a run.
        tokio::select! {
            biased;
            answer = call => answer.map_err(Ended::Failed),
            () = self.lost(process) => Err(Ended::Silent(process)),
            () = tokio::time::sleep(lasts) => Err(Ended::Overdue(process, lasts)),
        }
    }

    /// Has one process after another do it until one has, or none is left.
    async fn run<T, F: Future<Output = Result<T, SqlError>>>(
        &self,
        work: Work,
        assigned: impl Fn(u64),
        call: impl Fn(Service) -> F,
    ) -> Result<T, SqlError> {
        let mut tried = Tried::default();
        let mut last = None;
        loop {
            let lease = match self.lease(work, &tried) {
                Ok(lease) => lease,
                Err(nobody) => return Err(last.unwrap_or(nobody)),
            };
            assigned(lease.process);
            let ended = match self.hold(&lease, call(Arc::clone(&lease.service))).await {
                Ok(result) => {
                    self.known.lock().overdue.remove(&work.subject);
                    return Ok(result);
                }
                Err(ended) if !ended.is_of_process() => return Err(ended.into()),
                Err(ended) => ended,
            };
            let (job, process) = (work.subject.map(|(job, _)| job), lease.process);
            warn!(?job, process, %ended, "a compaction is taken back");
            if matches!(ended, Ended::Overdue(..)) {
                *self.known.lock().overdue.entry(work.subject).or_default() += 1;
                tried.is_overdue = true;
            }
            tried.processes.insert(process);
            last = Some(ended.into());
        }
    }
}

fn nobody() -> SqlError {
    SqlError::new(SqlState::CANNOT_CONNECT_NOW, "no process is there that compacts")
}

#[async_trait]
impl CompactorService for Compactors {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError> {
        let bytes = task.inputs.iter().map(|run| run.length).sum();
        let table = task.inputs.first().map_or(0, |run| run.table_id);
        let work = Work { subject: Some((task.job, table)), bytes };
        let assigned = |process| self.board.assign(task.task_id, process);
        let compact = |service: Service| {
            let task = task.clone();
            async move { service.compact(task).await }
        };
        self.run(work, assigned, compact).await
    }

    async fn copy_parts(&self, parts: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        let work = Work { subject: None, bytes: parts.iter().map(|part| part.length).sum() };
        let copy = |service: Service| {
            let parts = parts.clone();
            async move { service.copy_parts(parts).await }
        };
        self.run(work, |_| {}, copy).await
    }

    fn processes(&self) -> usize {
        let known = self.known.lock();
        known.compactors.iter().filter(|(id, _)| self.is_there(*id)).count().max(1)
    }
}

#[cfg(test)]
mod tests;
