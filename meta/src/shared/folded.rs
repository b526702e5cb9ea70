//! What a record sets off when it has been folded into the state.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use millrace_common::{Generation, JobId, RelationId, SqlError};
use millrace_rpc::log::{Entry, LogRecord};
use millrace_rpc::version::JobCommit;

use super::Shared;
use crate::fold::Verdict;
use crate::log::Observer;
use crate::stream::applied;

/// What the entries of a record that took effect were about.
#[derive(Default)]
pub struct Touched {
    /// Jobs that committed.
    committed: BTreeSet<JobId>,
    /// Relations that changed in another way.
    changed: BTreeSet<RelationId>,
    /// Jobs whose runs or tail are others.
    edited: BTreeSet<JobId>,
    /// Jobs that were detached or rebuilt.
    superseded: BTreeSet<JobId>,
}

impl Touched {
    pub fn of(record: &LogRecord, verdicts: &[Verdict]) -> Touched {
        let mut touched = Touched::default();
        for (entry, verdict) in record.entries.iter().zip(verdicts) {
            let (Some(entry), Ok(verdict)) = (entry.entry.as_ref(), verdict) else { continue };
            match entry {
                Entry::Commit(c) => touched.commit(c),
                Entry::Transaction(t) => t.commits.iter().for_each(|c| touched.commit(c)),
                Entry::EditVersion(e) => drop(touched.edited.insert(RelationId(e.job))),
                Entry::SourceAdvance(a) => drop(touched.changed.insert(RelationId(a.source))),
                Entry::StartBackfill(b) => drop(touched.changed.insert(RelationId(b.job))),
                Entry::AlterRelation(a) if a.parallelism.is_some() => {
                    touched.supersede(RelationId(a.id));
                }
                Entry::AlterRelation(a) => drop(touched.changed.insert(RelationId(a.id))),
                Entry::CreateRelation(_) => touched.changed.extend(verdict.relation),
                Entry::Detach(d) => touched.supersede(RelationId(d.job)),
                Entry::Rebuild(r) => touched.supersede(RelationId(r.job)),
                _ => {}
            }
        }
        touched
    }

    fn commit(&mut self, commit: &JobCommit) {
        self.committed.insert(RelationId(commit.job));
        if commit.edit.is_some() {
            self.edited.insert(RelationId(commit.job));
        }
    }

    fn supersede(&mut self, job: JobId) {
        self.superseded.insert(job);
        self.changed.insert(job);
    }

    /// Relations whose content or description is another.
    pub fn all(&self) -> impl Iterator<Item = RelationId> {
        self.committed.union(&self.changed).copied()
    }
}

/// What the log writer holds: not `Shared` itself, which holds the writer's handle.
pub struct Follower(pub Weak<Shared>);

impl Observer for Follower {
    fn folded(&self, record: &Arc<LogRecord>, verdicts: &[Verdict]) {
        if let Some(shared) = self.0.upgrade() {
            shared.streams.push(record, verdicts);
            if shared.followers.receiver_count() > 0 {
                // Nobody may be there any more.
                let _ = shared.followers.send(applied(Arc::clone(record), verdicts));
            }
            shared.folded(record, verdicts);
        }
    }
}

impl Shared {
    fn folded(&self, record: &LogRecord, verdicts: &[Verdict]) {
        let catalog_changed = self.state.read().catalog_version != self.catalog.read().version;
        if catalog_changed {
            let differ = self.refresh_catalog();
            self.sync_tasks(&differ);
        }
        let touched = Touched::of(record, verdicts);
        touched.superseded.iter().for_each(|id| self.end_generation(*id));
        self.wake_after(&touched);
        if catalog_changed {
            let catalog = self.catalog();
            self.changes.touch_where(|id| catalog.relation(id).is_none());
        }
        let has = |wanted: fn(&Entry) -> bool| {
            record.entries.iter().any(|e| e.entry.as_ref().is_some_and(wanted))
        };
        if has(|e| matches!(e, Entry::RegisterProcess(_) | Entry::FenceProcess(_))) {
            self.applied.sync(&self.state.read().processes);
        }
        if has(|e| matches!(e, Entry::PlaceJobs(_) | Entry::FenceProcess(_))) {
            self.end_old_generations();
        }
        if self.is_alone.get() == Some(&false)
            && let Some(own) = self.incarnation.get()
        {
            // Nothing here reads what the log drops.
            self.applied.acknowledge(*own, record.number);
        }
        self.compaction.look_at(touched.edited.iter().copied());
        self.committed.lock().extend(touched.committed);
        self.appended.notify_one();
    }

    /// Wakes those that may have something to do after this record: drivers of the jobs it names and of what reads the
    /// relations it changed, coordinators of sources, and those who wait for a relation. What reads a job's commit is
    /// woken when its worker has published it, not before ([`Shared::acknowledge`]); what reads a job that keeps its content
    /// although an input behind it has moved is woken at once, because that job commits nothing.
    fn wake_after(&self, touched: &Touched) {
        let moved = std::mem::take(&mut self.state.write().moved);
        let state = self.state.read();
        let inputs = touched.all().flat_map(|id| state.inputs(id).iter().copied().chain([id]));
        let sources: BTreeSet<RelationId> =
            inputs.filter(|id| state.sources.contains_key(id)).collect();
        let changed = touched.changed.iter().chain(&moved);
        let readers = changed.flat_map(|id| state.dependencies.readers(*id));
        let woken: BTreeSet<JobId> = readers.chain(touched.changed.iter().copied()).collect();
        drop(state);
        self.wake(woken);
        for id in &touched.changed {
            self.changes.touch(*id);
        }
        let running = self.sources.read();
        for source in sources.iter().filter_map(|id| running.get(id)) {
            source.notify.notify_one();
        }
    }

    /// Jobs may have been placed elsewhere: drivers end the generations that they run.
    fn end_old_generations(&self) {
        let running: Vec<(JobId, Option<Generation>)> =
            self.jobs.read().iter().map(|(id, handle)| (*id, handle.generation())).collect();
        for (id, generation) in running {
            if generation.is_some() && generation != self.generation(id) {
                self.end_generation(id);
            }
        }
    }

    /// The log has begun another generation of the job: its driver ends the one before, whatever that is at.
    fn end_generation(&self, id: JobId) {
        let (Some(handle), Some(now)) = (self.job(id), self.generation(id)) else { return };
        let before = Generation(now.0.saturating_sub(1));
        handle.report_failure(before, SqlError::internal("another generation has begun"));
        // One that failed does not wait for its next attempt, nor does a sink.
        handle.retry.notify_waiters();
    }
}
