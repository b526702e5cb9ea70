//! A leader whose jobs run on other processes (docs/design.md §10): processes register with it, tell it that they are
//! there, and are fenced when they do not. Jobs run on one compute process, the one that registered last; what has
//! registered before at the same address is gone.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::SqlError;
use millrace_common::task::spawn;
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::Heartbeat;
use millrace_rpc::log::{
    DropRelations, Entry, FenceProcess, GiveUp, PlaceJobs, ProcessRole, RegisterProcess,
};
use millrace_rpc::services::{CompactorService, ComputeService};
use parking_lot::Mutex;
use tokio_util::sync::DropGuard;
use tracing::{info, warn};

use crate::compactors::Compactors;
use crate::compute_slot::ComputeSlot;
use crate::fold;
use crate::log::LogStore;
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
    pub slot: Arc<ComputeSlot>,
    pub compactors: Arc<Compactors>,
    /// One registration, or fencing, at a time.
    turn: tokio::sync::Mutex<()>,
    /// Of the task that sends the record stream to the compute process.
    sender: Mutex<Option<DropGuard>>,
}

impl Cluster {
    pub fn new(shared: &Arc<Shared>, log: LogStore, connect: Arc<dyn Connect>) -> Arc<Cluster> {
        Arc::new(Cluster {
            shared: Arc::clone(shared),
            log,
            connect,
            slot: Arc::default(),
            compactors: Arc::default(),
            turn: tokio::sync::Mutex::default(),
            sender: Mutex::default(),
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
        let is_compute = has_role(&process, ProcessRole::Compute);
        self.append(Entry::RegisterProcess(process.clone())).await?;
        let incarnation = self.shared.state.read().processes.by_nonce(process.nonce);
        let incarnation = incarnation
            .ok_or_else(|| SqlError::internal("a process that has registered is not known"))?;
        if is_compute {
            // Who is called from now on waits for the new one.
            self.slot.clear();
            self.append(Entry::PlaceJobs(PlaceJobs { incarnation, jobs: Vec::new() })).await?;
        }
        self.fence_now(&predecessors).await?;
        info!(incarnation, address = process.address, roles = ?process.roles, "process registered");
        self.take_in(incarnation, &process);
        Ok(incarnation)
    }

    /// A process is there. What it has written for nothing is in the log when this returns.
    pub async fn beat(&self, mut heartbeat: Heartbeat) -> Result<u64, CallError> {
        let incarnation = heartbeat.incarnation;
        if !self.shared.state.read().processes.is_live(incarnation) {
            return Err(CallError::Fenced { incarnation });
        }
        let names = std::mem::take(&mut heartbeat.given_up);
        self.shared.applied.acknowledge(incarnation, heartbeat.applied);
        self.shared.members.note(heartbeat, self.shared.env.now());
        if !names.is_empty() {
            self.append(Entry::GiveUp(GiveUp { incarnation, names })).await?;
        }
        Ok(self.shared.state.read().number)
    }

    /// Fences processes, for good: what runs on them runs nowhere until another takes over.
    pub async fn fence(&self, incarnations: &[u64]) -> Result<(), SqlError> {
        let _one = self.turn.lock().await;
        self.fence_now(incarnations).await
    }

    async fn fence_now(&self, incarnations: &[u64]) -> Result<(), SqlError> {
        if incarnations.is_empty() {
            return Ok(());
        }
        let entries = fence_entries(&self.shared.state.read(), incarnations);
        for incarnation in incarnations {
            self.slot.clear_if(*incarnation);
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

    /// Jobs run there from now on, and the record stream goes there.
    fn use_compute(&self, incarnation: u64, service: Arc<dyn ComputeService>) {
        let number = self.shared.state.read().number;
        let (shared, log) = (Arc::clone(&self.shared), self.log.clone());
        let sender = Sender::new(shared, Arc::clone(&service), log, number, incarnation);
        let stop = self.shared.shutdown.child_token();
        spawn("send records", stop.clone().run_until_cancelled_owned(sender.run()));
        *self.sender.lock() = Some(stop.drop_guard());
        self.slot.set(incarnation, service);
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

/// The live processes whose place a new one takes: at its address, and of computes all.
fn predecessors(state: &MetaState, new: &RegisterProcess) -> Vec<u64> {
    let is_compute = has_role(new, ProcessRole::Compute);
    let replaced = |old: &RegisterProcess| {
        let same_address = !new.address.is_empty() && old.address == new.address;
        (same_address && old.roles == new.roles)
            || (is_compute && has_role(old, ProcessRole::Compute))
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
