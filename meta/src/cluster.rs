//! A leader whose jobs run on other processes (docs/design.md §10): processes register with it, tell it that they are
//! there, and are fenced when they do not. Jobs are placed on the compute processes ([`crate::placement`]); those of a
//! process that is fenced go to the others at once. What has registered before at the same address is gone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::SqlError;
use millrace_common::task::spawn;
use millrace_rpc::call_error::CallError;
use millrace_rpc::catalog::Relation;
use millrace_rpc::control::Heartbeat;
use millrace_rpc::log::{
    DropRelations, Entry, FenceProcess, GiveUp, PlaceJobs, ProcessRole, RegisterProcess,
};
use millrace_rpc::services::{CompactorService, ComputeService};
use parking_lot::Mutex;
use tokio_util::sync::DropGuard;
use tracing::{info, warn};

use crate::compactors::Compactors;
use crate::computes::Computes;
use crate::fold;
use crate::log::LogStore;
use crate::placement;
use crate::processes::Process;
use crate::shared::Shared;
use crate::state::MetaState;
use crate::stream::Sender;

/// Between looks for processes that are lost.
const LOOK: Duration = Duration::from_secs(1);
/// A look that comes later than this after the last one: this process itself has stood still.
const LATE: Duration = Duration::from_secs(3);

/// The way from the leader to other processes.
pub trait Connect: Send + Sync {
    fn compute(&self, address: &str, incarnation: u64)
    -> Result<Arc<dyn ComputeService>, SqlError>;
    fn compactor(
        &self,
        address: &str,
        incarnation: u64,
    ) -> Result<Arc<dyn CompactorService>, SqlError>;
    /// The process is fenced: its calls are refused from now on.
    fn fenced(&self, incarnation: u64);
}

/// See the module.
pub struct Cluster {
    shared: Arc<Shared>,
    log: LogStore,
    connect: Arc<dyn Connect>,
    pub computes: Arc<Computes>,
    pub compactors: Arc<Compactors>,
    /// One registration, or fencing, at a time.
    turn: tokio::sync::Mutex<()>,
    /// Of the tasks that send the record stream to the compute processes.
    senders: Mutex<BTreeMap<u64, DropGuard>>,
}

impl Cluster {
    pub fn new(shared: &Arc<Shared>, log: LogStore, connect: Arc<dyn Connect>) -> Arc<Cluster> {
        let computes = Arc::new(Computes::new(Arc::clone(&shared.state)));
        Arc::new(Cluster {
            shared: Arc::clone(shared),
            log,
            connect,
            compactors: Arc::new(Compactors::new(Arc::clone(&computes))),
            computes,
            turn: tokio::sync::Mutex::default(),
            senders: Mutex::default(),
        })
    }

    /// Goes on with the processes that the log knows, and looks for lost ones until the server stops.
    pub async fn start(self: &Arc<Cluster>) {
        let _one = self.turn.lock().await;
        let live: Vec<(u64, Process)> = {
            let state = self.shared.state.read();
            state.processes.live().iter().map(|(id, p)| (*id, p.clone())).collect()
        };
        for (incarnation, process) in &live {
            self.take_in(*incarnation, &process.registration);
        }
        if let Err(error) = self.place(false).await {
            warn!(%error, "jobs that run nowhere were not placed this time");
        }
        let looking = Arc::clone(self).look_for_lost();
        spawn(
            "look for lost processes",
            self.shared.shutdown.clone().run_until_cancelled_owned(looking),
        );
    }

    /// Registers a process, and makes use of it. The same nonce again changes nothing.
    pub async fn register(&self, process: RegisterProcess) -> Result<u64, CallError> {
        let _one = self.turn.lock().await;
        if let Some(known) = self.shared.state.read().processes.by_nonce(process.nonce) {
            return Ok(known);
        }
        let predecessors = predecessors(&self.shared.state.read(), &process);
        self.append(Entry::RegisterProcess(process.clone())).await?;
        let incarnation = self.shared.state.read().processes.by_nonce(process.nonce);
        let incarnation = incarnation
            .ok_or_else(|| SqlError::internal("a process that has registered is not known"))?;
        self.fence_now(&predecessors).await?;
        info!(incarnation, address = process.address, roles = ?process.roles, "process registered");
        self.take_in(incarnation, &process);
        if has_role(&process, ProcessRole::Compute) {
            self.place(true).await?;
        }
        Ok(incarnation)
    }

    /// The process that a new relation's job is to run on; 0: there is none.
    pub fn place_of_new(&self, relation: &Relation) -> u64 {
        placement::of_new(&self.shared.state.read(), &self.computes.incarnations(), relation)
    }

    /// Places the jobs that run nowhere; with `even`, also some that run where there are more than elsewhere.
    async fn place(&self, even: bool) -> Result<(), SqlError> {
        let computes = self.computes.incarnations();
        let entries = placement::plan(&self.shared.state.read(), &computes, even);
        for PlaceJobs { incarnation, jobs } in entries {
            info!(incarnation, jobs = jobs.len(), "jobs are placed");
            self.append(Entry::PlaceJobs(PlaceJobs { incarnation, jobs })).await?;
        }
        Ok(())
    }

    /// A process is there, or leaves. What it has written for nothing is in the log when this returns.
    pub async fn beat(&self, mut heartbeat: Heartbeat) -> Result<u64, CallError> {
        let incarnation = heartbeat.incarnation;
        if !self.shared.state.read().processes.is_live(incarnation) {
            return Err(CallError::Fenced { incarnation });
        }
        let is_leaving = heartbeat.leaving;
        let names = std::mem::take(&mut heartbeat.given_up);
        self.shared.applied.acknowledge(incarnation, heartbeat.applied);
        self.shared.members.note(heartbeat, self.shared.env.now());
        if !names.is_empty() {
            self.append(Entry::GiveUp(GiveUp { incarnation, names })).await?;
        }
        if is_leaving {
            self.fence(&[incarnation]).await?;
        }
        Ok(self.shared.state.read().number)
    }

    /// Fences processes, for good: what runs on them is placed on others, if there are any.
    pub async fn fence(&self, incarnations: &[u64]) -> Result<(), SqlError> {
        let _one = self.turn.lock().await;
        self.fence_now(incarnations).await?;
        self.place(false).await
    }

    async fn fence_now(&self, incarnations: &[u64]) -> Result<(), SqlError> {
        if incarnations.is_empty() {
            return Ok(());
        }
        let entries = fence_entries(&self.shared.state.read(), incarnations);
        for incarnation in incarnations {
            self.computes.remove(*incarnation);
            self.senders.lock().remove(incarnation);
            self.shared.streams.close(*incarnation);
            self.compactors.remove(*incarnation);
            self.shared.members.forget(*incarnation);
            self.connect.fenced(*incarnation);
        }
        for entry in entries {
            self.append(entry).await?;
        }
        info!(?incarnations, "processes are fenced");
        Ok(())
    }

    async fn append(&self, entry: Entry) -> Result<(), SqlError> {
        self.shared.log()?.apply(entry).await.map(drop)
    }

    /// Makes use of a process that is in the log.
    fn take_in(&self, incarnation: u64, process: &RegisterProcess) {
        if self.shared.incarnation.get() == Some(&incarnation) {
            return;
        }
        self.shared.members.begin(incarnation, self.shared.env.now());
        let address = &process.address;
        let cannot = |error: &SqlError| warn!(%error, incarnation, "a process cannot be called");
        if has_role(process, ProcessRole::Compute) {
            if let Ok(service) = self.connect.compute(address, incarnation).inspect_err(cannot) {
                self.use_compute(incarnation, service);
            }
            if let Ok(service) = self.connect.compactor(address, incarnation).inspect_err(cannot) {
                self.compactors.add_compute(incarnation, service);
            }
        } else if has_role(process, ProcessRole::Compactor)
            && let Ok(service) = self.connect.compactor(address, incarnation).inspect_err(cannot)
        {
            self.compactors.add_compactor(incarnation, service);
        }
    }

    /// Jobs may run there from now on, and the record stream goes there.
    fn use_compute(&self, incarnation: u64, service: Arc<dyn ComputeService>) {
        let (shared, log) = (Arc::clone(&self.shared), self.log.clone());
        let sender = Sender::new(shared, Arc::clone(&service), log, incarnation);
        let stop = self.shared.shutdown.child_token();
        spawn("send records", stop.clone().run_until_cancelled_owned(sender.run()));
        self.senders.lock().insert(incarnation, stop.drop_guard());
        self.computes.add(incarnation, service);
    }

    async fn look_for_lost(self: Arc<Cluster>) {
        let mut looked = self.shared.env.now();
        loop {
            tokio::time::sleep(LOOK).await;
            let now = self.shared.env.now();
            if now.saturating_duration_since(looked) > LATE {
                // What the others have told meanwhile may not have been read yet.
                self.shared.members.begin_again(now);
            }
            looked = now;
            let lost = {
                let state = self.shared.state.read();
                let mut lost = self.shared.members.lost(&state.processes, now);
                lost.retain(|id| self.shared.incarnation.get() != Some(id));
                lost
            };
            if lost.is_empty() {
                continue;
            }
            warn!(incarnations = ?lost, "processes have told nothing for too long");
            if let Err(error) = self.fence(&lost).await {
                warn!(%error, "lost processes were not fenced this time");
            }
        }
    }
}

pub fn has_role(process: &RegisterProcess, role: ProcessRole) -> bool {
    process.roles().any(|of| of == role)
}

/// The live processes whose place a new one takes: at its address, in its role.
fn predecessors(state: &MetaState, new: &RegisterProcess) -> Vec<u64> {
    let replaced = |old: &RegisterProcess| {
        !new.address.is_empty() && old.address == new.address && old.roles == new.roles
    };
    let live = state.processes.live().iter();
    live.filter(|(_, old)| replaced(&old.registration)).map(|(id, _)| *id).collect()
}

/// Ends processes and what belongs to their sessions.
pub fn fence_entries(state: &MetaState, incarnations: &[u64]) -> Vec<Entry> {
    let mut entries =
        vec![Entry::FenceProcess(FenceProcess { incarnations: incarnations.to_vec() })];
    let is_theirs = |ephemeral: u64| ephemeral != 0 && incarnations.contains(&ephemeral);
    let relations = state.relations.iter();
    let mut ids = relations.filter(|(_, r)| is_theirs(r.ephemeral)).map(|(id, _)| *id).collect();
    fold::add_dependants(state, &mut ids);
    if !ids.is_empty() {
        let ids = ids.into_iter().map(|id| id.0).collect();
        entries.push(Entry::DropRelations(DropRelations { ids }));
    }
    entries
}

/// How a process begins that leads and has others do the rest: it registers and ends earlier leaders. Jobs stay where
/// they run.
pub fn leading(state: &MetaState, process: &RegisterProcess) -> Vec<Entry> {
    let leaders = state.processes.live().iter();
    let leaders: Vec<u64> = leaders
        .filter(|(_, p)| has_role(&p.registration, ProcessRole::Meta))
        .map(|(id, _)| *id)
        .collect();
    let mut entries = vec![Entry::RegisterProcess(process.clone())];
    if !leaders.is_empty() {
        entries.extend(fence_entries(state, &leaders));
    }
    entries
}
