//! Who compacts: compactor processes in turn, and where there is none the compute process that runs the job.

use std::sync::Arc;

use async_trait::async_trait;
use millrace_common::{JobId, SqlError, SqlState};
use millrace_rpc::log::MoveParts;
use millrace_rpc::services::{CompactionTask, CompactorService, LivePart};
use millrace_rpc::version::VersionEdit;
use parking_lot::Mutex;

use crate::compaction_board::CompactionBoard;
use crate::computes::Computes;

type Service = Arc<dyn CompactorService>;

#[derive(Default)]
struct Known {
    /// By incarnation, in the order of their registration.
    compactors: Vec<(u64, Service)>,
    /// What compute processes offer.
    computes: Vec<(u64, Service)>,
    next: usize,
}

/// See the module.
pub struct Compactors {
    known: Mutex<Known>,
    computes: Arc<Computes>,
    /// Told who does what.
    board: Arc<CompactionBoard>,
}

impl Compactors {
    pub fn new(computes: Arc<Computes>, board: Arc<CompactionBoard>) -> Compactors {
        Compactors { known: Mutex::default(), computes, board }
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
    }

    /// A compactor; where there is none, the compute process that runs the job, or any.
    fn next(&self, job: Option<JobId>) -> Result<(u64, Service), SqlError> {
        let mut known = self.known.lock();
        let at = known.next;
        known.next = at.wrapping_add(1);
        let known = &*known;
        if let Some(job) = job.filter(|_| known.compactors.is_empty()) {
            let process = self.computes.placed(job);
            let found = known.computes.iter().find(|(id, _)| *id == process);
            return found.cloned().ok_or_else(nobody);
        }
        let of = if known.compactors.is_empty() { &known.computes } else { &known.compactors };
        of.get(at % of.len().max(1)).cloned().ok_or_else(nobody)
    }
}

fn nobody() -> SqlError {
    SqlError::new(SqlState::CANNOT_CONNECT_NOW, "no process is there that compacts")
}

#[async_trait]
impl CompactorService for Compactors {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError> {
        let (process, service) = self.next(Some(task.job))?;
        self.board.assign(task.task_id, process);
        service.compact(task).await
    }

    async fn copy_parts(&self, parts: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        self.next(None)?.1.copy_parts(parts).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Named(u64);

    #[async_trait]
    impl CompactorService for Named {
        async fn compact(&self, _: CompactionTask) -> Result<VersionEdit, SqlError> {
            Err(SqlError::internal("not asked for here"))
        }

        async fn copy_parts(&self, _: Vec<LivePart>) -> Result<MoveParts, SqlError> {
            Ok(MoveParts { object: self.0.to_string(), ..MoveParts::default() })
        }
    }

    async fn asked(all: &Compactors) -> String {
        all.copy_parts(vec![]).await.map_or_else(|e| e.state.0.to_owned(), |moved| moved.object)
    }

    #[tokio::test]
    async fn compactors_take_turns_and_compute_stands_in() {
        let all = Compactors::new(Arc::new(Computes::new(Arc::default())), Arc::default());
        assert_eq!(asked(&all).await, SqlState::CANNOT_CONNECT_NOW.0);
        all.add_compute(7, Arc::new(Named(7)));
        assert_eq!(asked(&all).await, "7");
        for id in [8, 9] {
            all.add_compactor(id, Arc::new(Named(id)));
        }
        let two = [asked(&all).await, asked(&all).await];
        assert!(two.contains(&"8".into()) && two.contains(&"9".into()), "{two:?}");
        all.remove(8);
        assert_eq!([asked(&all).await, asked(&all).await], ["9", "9"]);
        all.remove(9);
        assert_eq!(asked(&all).await, "7");
    }
}
