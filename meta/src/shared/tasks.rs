//! Keeps the tasks of meta as the catalog says: a driver for each job, a coordinator for each source.

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_common::task::spawn;
use millrace_common::{JobId, RelationId};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{Services, Shared, SourceHandle};
use crate::catalog::Catalog;
use crate::driver::Driver;
use crate::job::JobHandle;
use crate::settings::Settings;
use crate::source::{self, SourceStatus};

impl Shared {
    /// Everything derived from the state, once it has been read.
    pub fn refresh(&self) {
        self.refresh_catalog();
        self.start_tasks();
    }

    /// Replaces the catalog. Returns what is new, gone or changed in it.
    pub(super) fn refresh_catalog(&self) -> BTreeSet<RelationId> {
        let state = self.state.read();
        let previous = self.catalog();
        let catalog = Catalog::after(
            &previous,
            state.catalog_version,
            state.relations.clone(),
            state.schemas.clone(),
            state.settings.clone(),
            state.users.clone(),
            |id| state.inputs(id).to_vec(),
        );
        *self.settings.write() = Settings::resolve(&self.base_settings, &state.settings);
        drop(state);
        let differ = catalog.differs_from(&previous);
        *self.catalog.write() = Arc::new(catalog);
        differ
    }

    /// Starts what the catalog says when the services are there.
    pub fn start_tasks(&self) {
        let all = self.state.read().relations.keys().copied().collect();
        self.sync_tasks(&all);
    }

    /// One driver per job and one coordinator per source: starts and stops those of these relations, as the state says.
    pub(super) fn sync_tasks(&self, ids: &BTreeSet<RelationId>) {
        let (Some(services), Some(me)) = (self.services.get(), self.me.upgrade()) else { return };
        if self.shutdown.is_cancelled() {
            return;
        }
        let (jobs, sources): (BTreeSet<JobId>, BTreeSet<RelationId>) = {
            let state = self.state.read();
            let jobs = ids.iter().copied().filter(|id| state.jobs.contains_key(id));
            let sources = ids.iter().copied().filter(|id| state.sources.contains_key(id));
            (jobs.collect(), sources.collect())
        };
        self.sync_jobs(&me, services, ids, &jobs);
        let mut running = self.sources.write();
        for gone in ids.difference(&sources) {
            if let Some(handle) = running.remove(gone) {
                handle.cancel.cancel();
            }
        }
        for id in sources {
            running.entry(id).or_insert_with(|| {
                let (notify, cancel) = (Arc::new(Notify::new()), self.shutdown.child_token());
                let status = Arc::<Mutex<SourceStatus>>::default();
                let coordinator = source::Coordinator::new(
                    Arc::clone(&me),
                    Arc::clone(&services.compute),
                    id,
                    Arc::clone(&notify),
                    Arc::clone(&status),
                );
                let run = cancel.clone().run_until_cancelled_owned(coordinator.run());
                spawn("pace a source", run);
                SourceHandle { notify, status, cancel }
            });
        }
    }

    fn sync_jobs(
        &self,
        me: &Arc<Shared>,
        services: &Services,
        ids: &BTreeSet<RelationId>,
        jobs: &BTreeSet<JobId>,
    ) {
        let mut running = self.jobs.write();
        for gone in ids.difference(jobs) {
            if let Some(handle) = running.remove(gone) {
                handle.cancel.cancel();
            }
        }
        let new: Vec<Arc<JobHandle>> = jobs
            .iter()
            .filter(|id| !running.contains_key(id))
            .map(|id| Arc::new(JobHandle::new(*id, self.shutdown.child_token())))
            .collect();
        running.extend(new.iter().map(|h| (h.id, Arc::clone(h))));
        drop(running);
        ids.difference(jobs).for_each(|gone| self.lookups.forget(*gone));
        for handle in new {
            let compute = Arc::clone(&services.compute);
            spawn("drive a job", Driver { shared: Arc::clone(me), handle, compute }.run());
        }
    }
}
