//! How far workers have applied what is logged, and which commits may be read by then.

use std::sync::Arc;

use millrace_common::{Epoch, JobId};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::stream::Acknowledged;

use super::Shared;
use crate::job::JobHandle;
use crate::stream::RecordStream;

impl Shared {
    /// What the job has committed up to this record can be read where it is to be read.
    pub fn published(&self, id: JobId, record: u64) {
        self.take_unpublished(&[(id, record)]);
    }

    /// The job's worker has begun with everything that is committed.
    pub fn published_all(&self, id: JobId) {
        self.take_unpublished(&[(id, u64::MAX)]);
    }

    fn take_unpublished(&self, published: &[(JobId, u64)]) {
        let mut woken = Vec::new();
        let mut touched = Vec::new();
        {
            let mut state = self.state.write();
            for (id, record) in published {
                let Some(commits) = state.unpublished.get_mut(id) else { continue };
                let before = commits.len();
                while commits.pop_front_if(|(of, _)| *of <= *record).is_some() {}
                let is_news = commits.len() < before;
                if commits.is_empty() {
                    state.unpublished.remove(id);
                }
                if is_news {
                    woken.extend(state.readers(*id));
                    touched.push(*id);
                }
            }
        }
        self.wake(woken);
        touched.into_iter().for_each(|id| self.changes.touch(id));
    }

    /// A compute process has applied records. What a job that runs there has committed is readable then, unless its
    /// generation is being ended: who is not running is told nothing, and begins with all that is committed.
    pub fn acknowledge(&self, incarnation: u64, stream: &RecordStream, at: &Acknowledged) {
        let further = stream.acknowledge(at);
        let mut handles: Vec<(Arc<JobHandle>, u64)> = {
            let jobs = self.jobs.read();
            let further = further.into_iter();
            further.filter_map(|(id, record)| Some((Arc::clone(jobs.get(&id)?), record))).collect()
        };
        let published: Vec<(JobId, u64)> = {
            let state = self.state.read();
            let runs_there =
                |id: &JobId| state.jobs.get(id).is_some_and(|job| job.process == incarnation);
            handles.retain(|(handle, _)| runs_there(&handle.id));
            // What a sink has committed is published when its target has it.
            let is_sink = |id: &JobId| {
                state.relations.get(id).is_some_and(|r| r.kind() == RelationKind::Sink)
            };
            let running = handles.iter().filter(|(h, _)| h.started().is_some() && !is_sink(&h.id));
            running.map(|(handle, record)| (handle.id, *record)).collect()
        };
        self.take_unpublished(&published);
        for (handle, record) in &handles {
            handle.set_applied(*record);
        }
        stream.set_applied(at.applied());
        self.applied.note_received(incarnation, at.received);
        if self.is_alone.get() == Some(&true) {
            // Other processes tell it together with what they read.
            self.applied.acknowledge(incarnation, at.applied());
        }
    }

    /// Completes when the worker has applied this record to the job, or the job is dropped or the server stops.
    pub async fn wait_applied(&self, id: JobId, record: u64) {
        let Some(handle) = self.job(id) else { return };
        let _ = handle.cancel.run_until_cancelled(handle.wait_applied(record)).await;
    }

    /// Completes when the process that a job runs on has applied to it and its inputs what earlier leaders have logged, or
    /// is gone. Returns at once while there is none.
    pub async fn wait_begun(&self, id: JobId) {
        let (process, jobs) = {
            let state = self.state.read();
            let Some(job) = state.jobs.get(&id) else { return };
            let jobs: Vec<JobId> = job.inputs.iter().copied().chain([id]).collect();
            (job.process, jobs)
        };
        self.streams.wait_begun(process, &jobs).await;
    }

    /// Completes when every compute process has applied everything up to this record, or the server stops.
    pub async fn wait_all_applied(&self, record: u64) {
        self.applied.ask(record);
        let _ = self.shutdown.run_until_cancelled(self.streams.wait_applied(record)).await;
    }

    /// Completes when the process that a job runs on has applied everything up to this record, or the server stops.
    pub async fn wait_applied_by_process_of(&self, id: JobId, record: u64) {
        let process = self.state.read().jobs.get(&id).map_or(0, |job| job.process);
        let applied = self.streams.wait_applied_by(process, record);
        let _ = self.shutdown.run_until_cancelled(applied).await;
    }

    /// No worker runs yet: each begins with everything committed. Only what a sink has staged may not
    /// have reached its target.
    pub fn forget_unpublished(&self) {
        let mut state = self.state.write();
        let number = state.number;
        state.unpublished = state
            .jobs
            .iter()
            .filter(|(_, job)| !job.version.publish.is_empty())
            .map(|(id, job)| (*id, [(number, Epoch(job.version.epoch))].into()))
            .collect();
    }
}
