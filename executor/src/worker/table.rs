//! The epochs of a table: its sequencer's statements, made durable.

use std::collections::VecDeque;
use std::sync::Arc;

use millrace_common::{Epoch, Generation, JobId, crash};
use millrace_rpc::version::JobCommit;
use millrace_storage::{JobStore, Persisted};
use parking_lot::Mutex;

use crate::changelog_cache::ChangelogCache;
use crate::dml::Sequencer;
use crate::error::ExecError;

pub struct Table {
    pub job: JobId,
    pub generation: Generation,
    pub sequencer: Arc<Sequencer>,
    pub store: Arc<JobStore>,
    pub changelogs: Arc<ChangelogCache>,
    /// Durable, not concluded; oldest first.
    in_flight: Mutex<VecDeque<Persisted>>,
}

impl Table {
    pub fn new(
        job: JobId,
        generation: Generation,
        sequencer: Arc<Sequencer>,
        store: Arc<JobStore>,
        changelogs: Arc<ChangelogCache>,
    ) -> Table {
        let in_flight = Mutex::default();
        Table { job, generation, sequencer, store, changelogs, in_flight }
    }

    /// Waits until it is time to end the epoch: see [`Sequencer::await_batch`].
    pub async fn await_batch(&self) -> Result<(), ExecError> {
        self.sequencer.await_batch().await;
        Ok(())
    }

    /// Ends the epoch and makes its rows durable, while the one before may still be on its way into the log.
    pub async fn cut(&self, number: u64) -> Result<JobCommit, ExecError> {
        let sealed = self.sequencer.seal()?;
        fail::fail_point!("executor.sealed");
        crash::point("executor-before-persist");
        let persisted = match &sealed.load {
            Some(runs) => {
                self.store.wait_for_compaction().await;
                self.store.link(number, runs)?
            }
            None => self.store.persist(number, sealed.runs).await?,
        };
        fail::fail_point!("executor.persisted");
        crash::point("executor-after-persist");
        let commit = JobCommit {
            job: self.job.0,
            generation: self.generation.0,
            number,
            epoch: 0,
            slices: persisted.slices.clone(),
            edit: persisted.edit.clone(),
            row_count_delta: sealed.row_count,
            counters: sealed.counters,
            changed: sealed.changed,
            statements: sealed.statements,
            group: sealed.group,
            watermarks: sealed.watermark.into_iter().collect(),
            ..JobCommit::default()
        };
        self.in_flight.lock().push_back(persisted);
        self.sequencer.handed_over();
        Ok(commit)
    }

    pub fn committed(&self, epoch: Epoch) {
        let Some(persisted) = self.in_flight.lock().pop_front() else { return };
        crash::point("executor-before-publish");
        self.store.publish(epoch, persisted);
        crash::point("executor-after-publish");
        // The changelog cache before the acknowledgement: who is acknowledged may read at once.
        self.sequencer.committed(epoch, |delta| self.changelogs.put(self.job, epoch, delta));
    }
}
