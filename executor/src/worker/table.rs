//! The epochs of a table: its sequencer's statements, made durable.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::Arc;

use millrace_common::{Epoch, Generation, JobId, crash};
use millrace_rpc::version::JobCommit;
use millrace_storage::{JobStore, Persisted};
use parking_lot::Mutex;

use super::stream::Concluded;
use crate::changelog_cache::ChangelogCache;
use crate::dml::Sequencer;
use crate::error::ExecError;

pub struct Table {
    pub job: JobId,
    pub generation: Generation,
    pub sequencer: Arc<Sequencer>,
    pub store: Arc<JobStore>,
    pub changelogs: Arc<ChangelogCache>,
    in_flight: Mutex<InFlight>,
}

/// A sealed epoch that is durable.
struct Sealed {
    /// Of its commit; an empty one has that of the next.
    number: u64,
    persisted: Persisted,
    /// Nothing is logged of it: it is concluded after the one before it.
    is_empty: bool,
}

/// What is not concluded.
struct InFlight {
    /// Oldest first.
    sealed: VecDeque<Sealed>,
    /// The newest epoch that is committed.
    committed: Epoch,
}

impl Table {
    pub fn new(
        job: JobId,
        generation: Generation,
        sequencer: Arc<Sequencer>,
        store: Arc<JobStore>,
        changelogs: Arc<ChangelogCache>,
        committed: Epoch,
    ) -> Table {
        let in_flight = Mutex::new(InFlight { sealed: VecDeque::new(), committed });
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
        let is_empty = commit.is_empty();
        let mut in_flight = self.in_flight.lock();
        in_flight.sealed.push_back(Sealed { number, persisted, is_empty });
        self.sequencer.handed_over();
        self.conclude_empty(&mut in_flight);
        Ok(commit)
    }

    /// Whether the commit of this number waits for its conclusion.
    pub fn is_in_flight(&self, number: u64) -> bool {
        self.in_flight.lock().sealed.iter().any(|own| own.number == number && !own.is_empty)
    }

    /// The log has the commit of this number, at this epoch.
    pub fn committed(&self, number: u64, epoch: Epoch) -> Concluded {
        let mut in_flight = self.in_flight.lock();
        let Some(oldest) = in_flight.sealed.front() else { return Concluded::Before };
        match oldest.number.cmp(&number) {
            Ordering::Greater => return Concluded::Before,
            Ordering::Less => return Concluded::TooEarly,
            Ordering::Equal => {}
        }
        in_flight.committed = in_flight.committed.max(epoch);
        if let Some(own) = in_flight.sealed.pop_front() {
            self.conclude(in_flight.committed, own.persisted);
        }
        self.conclude_empty(&mut in_flight);
        Concluded::Now
    }

    /// Those with no entry in the log, as far as they are next.
    fn conclude_empty(&self, in_flight: &mut InFlight) {
        while let Some(own) = in_flight.sealed.pop_front_if(|own| own.is_empty) {
            self.conclude(in_flight.committed, own.persisted);
        }
    }

    fn conclude(&self, epoch: Epoch, persisted: Persisted) {
        crash::point("executor-before-publish");
        self.store.publish(epoch, persisted);
        crash::point("executor-after-publish");
        // The changelog cache before the acknowledgement: who is acknowledged may read at once.
        self.sequencer.committed(epoch, |delta| self.changelogs.put(self.job, epoch, delta));
    }
}
