//! The handle everybody holds: what it leads, its start, and what it tells of itself.

mod ddl;
mod opening;
mod reads;
mod service;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use millrace_common::task::spawn;
use millrace_common::{Generation, JobId, SqlError};
use millrace_rpc::control::{CompactionReport, ProcessUsage};
use millrace_rpc::log::{Entry, FenceProcess};
use millrace_rpc::services::{CompactorService, ComputeService};
use millrace_rpc::store_id::StoreId;
use millrace_storage::given_up::GivenUp;

pub use self::ddl::CreateOptions;
pub(crate) use self::ddl::setting_entry;
pub use self::opening::is_overtaken;
use crate::backup::files::BackupFiles;
use crate::catalog::Catalog;
use crate::clock::{ClockSkew, watch_clock};
use crate::cluster::{Cluster, Connect};
use crate::compact::{ReadsOfTable, Scheduler, TableClass};
use crate::gc::{Collector, GcOptions};
use crate::job_loads::load_of;
use crate::log::LogStore;
use crate::processes::{Process, ProcessStatus};
use crate::segments::{RewriteOptions, SegmentRewriter};
use crate::settings::Settings;
use crate::shared::{Services, Shared};
use crate::state::MetaState;
use crate::stream::Sender;

/// How long `start` waits for the jobs' first start.
const START_LIMIT: Duration = Duration::from_secs(5);

/// What a process has in its caches and asks of the store, now.
pub type UsageOf = Box<dyn Fn() -> ProcessUsage + Send + Sync>;

/// Leads one object store, until dropped or deposed.
pub struct Meta {
    pub(crate) shared: Arc<Shared>,
    store: LogStore,
    incarnation: u64,
    nonce: u64,
    predecessors: Vec<u64>,
    table_class: TableClass,
    table_reads: ReadsOfTable,
    pinned: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    given_up: Arc<GivenUp>,
    pub(crate) backup_files: Arc<BackupFiles>,
    gc: GcOptions,
    rewrite: RewriteOptions,
    /// Of a leader whose jobs run on other processes; set when it starts.
    pub(crate) cluster: OnceLock<Arc<Cluster>>,
    /// Of this process.
    usage: OnceLock<UsageOf>,
}

impl Meta {
    /// As the log has registered this process: it names its objects, `data/<incarnation>/…`, and its statements.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The random number by which this process has registered.
    pub fn nonce(&self) -> u64 {
        self.nonce
    }

    /// The nonces of the leaders that this one has taken the lead from and that had not resigned; 0: of one that had none.
    /// Until each is known to be dead, or the lease of its last proof is over
    /// ([`LEADER_LEASE`](crate::log::LEADER_LEASE)), it may still answer reads.
    pub fn predecessors(&self) -> &[u64] {
        &self.predecessors
    }

    /// The last record of a leader that ends: it fences itself, so that its successor need not wait. Nothing may be
    /// answered any more.
    pub async fn resign(&self) -> Result<(), SqlError> {
        let incarnations = vec![self.incarnation];
        self.apply(Entry::FenceProcess(FenceProcess { incarnations })).await
    }

    /// Number of the log's last record.
    pub fn record(&self) -> u64 {
        self.shared.state.read().number
    }

    /// Something of the folded state; nothing is logged meanwhile.
    pub fn read_state<T>(&self, read: impl FnOnce(&MetaState) -> T) -> T {
        read(&self.shared.state.read())
    }

    #[cfg(test)]
    pub(crate) fn state_for_tests(&self) -> MetaState {
        self.shared.state.read().clone()
    }

    /// The term in which this process leads.
    pub fn term(&self) -> u64 {
        self.shared.state.read().term
    }

    /// The id of the store that this process leads. Some from the record on by which it leads.
    pub fn store_id(&self) -> Option<StoreId> {
        self.shared.state.read().store_id
    }

    /// The processes that are not fenced, and how each is.
    pub fn processes(&self) -> Vec<ProcessStatus> {
        let state = self.shared.state.read();
        let (now, loads) = (self.shared.env.now(), self.shared.loads.loads(&state));
        let status = |(incarnation, process): (&u64, &Process)| ProcessStatus {
            incarnation: *incarnation,
            process: process.clone(),
            applied: self.shared.applied.last_applied(*incarnation).unwrap_or(process.number),
            heartbeat: self.shared.members.heartbeat_age(*incarnation, now),
            jobs: state.jobs_of(*incarnation),
            load: load_of(&state, &loads, *incarnation),
        };
        state.processes.live().iter().map(status).collect()
    }

    /// Where this process's own caches and requests are told. Once; a second call changes nothing.
    pub fn set_usage(&self, usage: UsageOf) {
        let _ = self.usage.set(usage);
    }

    /// The caches and requests of this process, and of the others as each has told last.
    pub fn usages(&self) -> Vec<ProcessUsage> {
        let own = self.usage.get().map(|usage| usage());
        let own = own.map(|usage| ProcessUsage { incarnation: self.incarnation, ..usage });
        let others = self.shared.members.usages(&self.shared.state.read().processes).into_iter();
        own.into_iter().chain(others.filter(|u| u.incarnation != self.incarnation)).collect()
    }

    /// How many jobs this leader has moved to other processes because loads had changed.
    pub fn rebalanced_jobs(&self) -> u64 {
        self.cluster.get().map_or(0, |cluster| cluster.rebalanced())
    }

    /// Compactions that are under way, and jobs that wait for one.
    pub fn compactions(&self) -> Vec<CompactionReport> {
        self.shared.compactions.reports(self.shared.env.now())
    }

    /// Starts a driver for every job, from its committed version and stored graph. Returns when all have
    /// started or failed to, or after a few seconds: a job that hangs holds nobody up.
    pub async fn start(
        self: &Arc<Self>,
        compute: Arc<dyn ComputeService>,
        compactor: Arc<dyn CompactorService>,
    ) -> Result<(), SqlError> {
        self.set_services(Services { compute: Arc::clone(&compute), compactor })?;
        let (shared, log) = (Arc::clone(&self.shared), self.store.clone());
        let sender = Sender::new(shared, compute, log, self.incarnation);
        let shutdown = &self.shared.shutdown;
        spawn("send records", shutdown.clone().run_until_cancelled_owned(sender.run()));
        self.start_tasks();
        let ids: Vec<JobId> = self.shared.state.read().jobs.keys().copied().collect();
        let handles = ids.into_iter().filter_map(|id| self.shared.job(id)).collect::<Vec<_>>();
        futures::future::join_all(handles.iter().map(|h| h.wait_attempted(START_LIMIT))).await;
        Ok(())
    }

    /// The same for jobs that run on other processes: those that the log knows, and those that register from now on.
    pub async fn start_cluster(
        self: &Arc<Self>,
        connect: Arc<dyn Connect>,
    ) -> Result<(), SqlError> {
        *self.shared.inherited.lock() = {
            let state = self.shared.state.read();
            let running = state.jobs.iter().filter(|(_, job)| job.process != 0);
            running.map(|(id, job)| (*id, Generation(job.version.generation))).collect()
        };
        let cluster = Cluster::new(&self.shared, self.store.clone(), connect);
        let compute = Arc::clone(&cluster.computes) as Arc<dyn ComputeService>;
        let compactor = Arc::clone(&cluster.compactors) as Arc<dyn CompactorService>;
        self.set_services(Services { compute, compactor })?;
        cluster.start().await;
        // Set once: the services were.
        let _ = self.cluster.set(cluster);
        self.start_tasks();
        Ok(())
    }

    fn set_services(&self, services: Services) -> Result<(), SqlError> {
        if self.shared.services.set(services).is_err() {
            return Err(SqlError::internal("meta was started twice"));
        }
        Ok(())
    }

    /// Drivers and background work.
    fn start_tasks(&self) {
        self.shared.start_tasks();
        let collector = Collector {
            shared: Arc::clone(&self.shared),
            store: self.store.clone(),
            incarnation: self.incarnation,
            pinned: Arc::clone(&self.pinned),
            given_up: Arc::clone(&self.given_up),
            backup_files: Arc::clone(&self.backup_files),
            options: self.gc,
        };
        let scheduler = Scheduler::new(
            Arc::clone(&self.shared),
            Arc::clone(&self.table_class),
            Arc::clone(&self.table_reads),
        );
        let rewriter = SegmentRewriter {
            shared: Arc::clone(&self.shared),
            busy: scheduler.busy(),
            options: self.rewrite,
        };
        let shutdown = &self.shared.shutdown;
        if self.shared.clock.is_on() {
            let watch = watch_clock(Arc::clone(&self.shared), self.store.clone());
            spawn("watch the clock", shutdown.clone().run_until_cancelled_owned(watch));
        }
        spawn("rewrite segments", shutdown.clone().run_until_cancelled_owned(rewriter.run()));
        spawn("collect garbage", shutdown.clone().run_until_cancelled_owned(collector.run()));
        spawn("plan compactions", shutdown.clone().run_until_cancelled_owned(scheduler.run()));
    }

    /// Stops all drivers; nothing durable needs it.
    pub async fn shutdown(&self) {
        self.shared.shutdown.cancel();
        self.shared.changes.touch_where(|_| true);
    }

    /// The catalog after the newest record.
    pub fn catalog(&self) -> Arc<Catalog> {
        self.shared.catalog()
    }

    pub fn settings(&self) -> Settings {
        self.shared.settings()
    }

    /// Why this process does not lead at present although nobody else does; `None`: its clock is right.
    pub fn clock_skew(&self) -> Option<ClockSkew> {
        self.shared.clock.skew()
    }

    /// The same as an error, for what need not wait until it is refused.
    pub fn check_clock(&self) -> Result<(), SqlError> {
        Ok(self.shared.clock.check()?)
    }

    /// Completes when another server has taken over this store: nothing is acknowledged any more.
    pub async fn deposed(&self) -> SqlError {
        match self.shared.log() {
            Ok(log) => log.deposed().await.into(),
            Err(error) => error,
        }
    }
}

impl Drop for Meta {
    fn drop(&mut self) {
        self.shared.shutdown.cancel();
    }
}
