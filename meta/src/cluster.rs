//! A leader whose jobs run on other processes (docs/design.md §10): processes register with it, tell it that they are
//! there, and are fenced when they do not. Jobs are placed on the compute processes ([`crate::placement`]); those of a
//! process that is fenced go to the others at once. What has registered before at the same address is gone.
//!
//! What follows from a registration or a fence takes several records, and may end half-way: a caller gives up, the store
//! is full, another leader takes over. So it is derived from the log alone and repeated until nothing is left to do
//! ([`Cluster::settle`]).

mod balance;
mod locks;
mod lost;
mod moves;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use millrace_common::task::spawn;
use millrace_common::{JobId, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::catalog::Relation;
use millrace_rpc::control::{Heartbeat, TableLookups};
use millrace_rpc::log::{
    DrainProcess, DropRelations, Entry, FenceProcess, GiveUp, LogEntry, ProcessRole,
    RegisterProcess,
};
use millrace_rpc::services::{CompactorService, ComputeService};
use millrace_rpc::version::StatementId;
use parking_lot::Mutex;
use tokio_util::sync::DropGuard;
use tracing::{debug, info, warn};

use self::balance::Balance;
use crate::compactors::{Compactors, Contact};
use crate::computes::Computes;
use crate::doubted::Doubted;
use crate::fold;
use crate::log::LogStore;
use crate::operator::check_worker;
use crate::placement;
use crate::processes::Process;
use crate::read::shutting_down;
use crate::shared::Shared;
use crate::state::MetaState;
use crate::stream::Sender;

/// How often jobs are placed anew where the log has changed meanwhile; the next look goes on.
const PLANS: usize = 4;
/// A process that has told nothing for so long may be lost.
pub const SILENT: Duration = Duration::from_secs(3);

/// How long a statement waits for a compute process while there is none.
pub const COMPUTE_WAIT: Duration = Duration::from_secs(15);

/// The way from the leader to other processes.
pub trait Connect: Send + Sync {
    fn compute(&self, address: &str, incarnation: u64)
    -> Result<Arc<dyn ComputeService>, SqlError>;
    fn compactor(
        &self,
        address: &str,
        incarnation: u64,
    ) -> Result<Arc<dyn CompactorService>, SqlError>;
    /// The process is fenced: its calls are refused from now on, and its definitions under way end. No step of one is being
    /// done when this returns.
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
    /// The processes that are made use of.
    known: Mutex<BTreeSet<u64>>,
    /// Where no process is made use of before it has answered.
    doubted: Doubted,
    /// The record as of which nothing was left to do.
    settled: Mutex<u64>,
    /// Of the tasks that send the record stream to the compute processes.
    senders: Mutex<BTreeMap<u64, DropGuard>>,
    /// Jobs that are moved because loads have changed.
    balance: Mutex<Balance>,
}

impl Cluster {
    pub fn new(shared: &Arc<Shared>, log: LogStore, connect: Arc<dyn Connect>) -> Arc<Cluster> {
        let note_call = {
            let shared = Arc::downgrade(shared);
            move |process, is_answered, began| {
                if let Some(shared) = shared.upgrade() {
                    shared.members.note_call(process, is_answered, began, shared.env.now());
                }
            }
        };
        let (state, env) = (Arc::clone(&shared.state), shared.env.clone());
        let computes = Arc::new(Computes::new(state, env, Box::new(note_call)));
        let contact = {
            let shared = Arc::downgrade(shared);
            move |process| {
                let shared = shared.upgrade()?;
                let silence = shared.members.silence(process, shared.env.now())?;
                let store_wait = shared.members.store_wait_of(process);
                Some(Contact { silence, store_wait })
            }
        };
        Arc::new(Cluster {
            shared: Arc::clone(shared),
            log,
            connect,
            compactors: Arc::new(Compactors::new(
                Arc::clone(&computes),
                Arc::clone(&shared.compactions),
                Arc::new(contact),
            )),
            computes,
            turn: tokio::sync::Mutex::default(),
            known: Mutex::default(),
            doubted: Doubted::default(),
            settled: Mutex::default(),
            senders: Mutex::default(),
            balance: Mutex::default(),
        })
    }

    /// Goes on with the processes that the log knows, and looks for lost ones until the server stops.
    pub async fn start(self: &Arc<Cluster>) {
        let _one = self.turn.lock().await;
        if let Err(error) = self.settle().await {
            warn!(%error, "not all that processes need was done, trying again");
        }
        let looking = Arc::clone(self).look_for_lost();
        spawn(
            "look for lost processes",
            self.shared.shutdown.clone().run_until_cancelled_owned(looking),
        );
    }

    /// Registers a process, and makes use of it. The same nonce again goes on where the first call ended.
    pub async fn register(&self, process: RegisterProcess) -> Result<u64, CallError> {
        let _one = self.turn.lock().await;
        let nonce = process.nonce;
        let known = || self.shared.state.read().processes.by_nonce(nonce);
        if known().is_none() {
            self.append(Entry::RegisterProcess(process)).await?;
        }
        let incarnation = known()
            .ok_or_else(|| SqlError::internal("a process that has registered is not known"))?;
        self.settle().await?;
        Ok(incarnation)
    }

    /// The process that a new relation's job is to run on; 0: there is none.
    pub fn place_of_new(&self, relation: &Relation) -> u64 {
        let state = self.shared.state.read();
        let takers = placement::takers(&state, &self.computes.incarnations());
        placement::process_of_new(&state, &self.shared.loads.loads(&state), &takers, relation)
    }

    /// Returns when there is a compute process; an error if none comes, or the leader stops.
    pub async fn await_compute(&self) -> Result<(), SqlError> {
        tokio::select! {
            biased;
            () = self.computes.come() => Ok(()),
            () = self.shared.shutdown.cancelled() => Err(shutting_down()),
            () = tokio::time::sleep(COMPUTE_WAIT) => Err(no_compute()),
        }
    }

    /// Work that needs compute processes; an error once there have been none for too long.
    pub async fn with_computes<T>(
        &self,
        work: impl Future<Output = Result<T, SqlError>>,
    ) -> Result<T, SqlError> {
        tokio::select! {
            biased;
            done = work => done,
            () = self.computes.missing_for(COMPUTE_WAIT) => Err(no_compute()),
        }
    }

    /// Does what follows from the log: who is superseded is fenced, what belonged to sessions of the fenced is dropped,
    /// processes are made use of or not any more, and jobs run on those that are there.
    async fn settle(&self) -> Result<(), SqlError> {
        let superseded = superseded(&self.shared.state.read());
        if !superseded.is_empty() {
            self.append(Entry::FenceProcess(FenceProcess { incarnations: superseded })).await?;
        }
        let left = left_of_sessions(&self.shared.state.read());
        if !left.is_empty() {
            self.append(Entry::DropRelations(DropRelations { ids: left })).await?;
        }
        self.take_apart_fenced();
        let has_idle = self.take_in_live();
        let number = self.place(has_idle).await?;
        *self.settled.lock() = number;
        Ok(())
    }

    /// Places the jobs that run nowhere; with `even`, also some that run where there are more than elsewhere. Returns the
    /// record as of which all run somewhere, if they can.
    async fn place(&self, even: bool) -> Result<u64, SqlError> {
        let computes = self.computes.incarnations();
        // Once: what is measured meanwhile is no reason to plan anew.
        let loads = self.shared.loads.loads(&self.shared.state.read());
        for _ in 0..PLANS {
            let (number, entries) = {
                let state = self.shared.state.read();
                let takers = placement::takers(&state, &computes);
                (state.number, placement::plan(&state, &loads, &takers, even))
            };
            if entries.is_empty() {
                return Ok(number);
            }
            for entry in entries {
                let (incarnation, jobs) = (entry.incarnation, entry.jobs.len());
                info!(incarnation, jobs, "jobs are placed");
                if let Err(void) = self.shared.log()?.append(Entry::PlaceJobs(entry)).await? {
                    // A job was dropped meanwhile, for one.
                    debug!(%void, "jobs were not placed this time");
                    break;
                }
            }
        }
        Ok(0)
    }

    /// A process is there, or leaves. What it has written for nothing is in the log when this returns.
    pub async fn beat(&self, mut heartbeat: Heartbeat) -> Result<u64, CallError> {
        let incarnation = heartbeat.incarnation;
        if !self.shared.state.read().processes.is_live(incarnation) {
            return Err(CallError::Fenced { incarnation });
        }
        let is_leaving = heartbeat.leaving;
        let names = std::mem::take(&mut heartbeat.given_up);
        let applied = heartbeat.applied;
        self.shared.clock.note_peer(incarnation, heartbeat.clock_ms);
        self.note_lookups(incarnation, &std::mem::take(&mut heartbeat.lookups));
        self.shared.loads.note(incarnation, &heartbeat.jobs, self.shared.env.now());
        self.shared.members.note(heartbeat, self.shared.env.now());
        // Later than its pins: who sees that it has applied a record sees what it has read since.
        self.shared.applied.acknowledge(incarnation, applied);
        // It sends no other heartbeat until this one is answered, which the store may delay.
        let _answered = self.shared.members.answering(incarnation, &self.shared.env);
        if !names.is_empty() {
            self.append(Entry::GiveUp(GiveUp { incarnation, names })).await?;
        }
        if is_leaving {
            self.fence(&[incarnation]).await?;
        }
        Ok(self.shared.state.read().number)
    }

    /// What is looked up often is worth a merge.
    fn note_lookups(&self, process: u64, told: &[TableLookups]) {
        if told.is_empty() {
            return;
        }
        let is_job = |job| self.shared.job(job).is_some();
        self.shared.compaction.look_at(self.shared.lookups.add(process, told, is_job));
    }

    /// Takes a process's jobs away and gives it no others; `undo`: it takes jobs again. Returns the jobs that run elsewhere
    /// than before.
    /// Refused if those that are to run jobs do not answer. By the id of an earlier call that is in the log only what
    /// follows from it is done, as far as that was left undone.
    pub async fn drain(
        &self,
        worker: u64,
        undo: bool,
        id: Option<StatementId>,
    ) -> Result<Vec<u32>, CallError> {
        let is_done = self.shared.state.read().is_done(id);
        if !is_done {
            check_worker(&self.shared.state.read(), worker)?;
            match undo {
                true => self.check_answers(worker).await?,
                false => self.check_others_answer(worker).await?,
            }
        }
        let _one = self.turn.lock().await;
        let before = {
            let state = self.shared.state.read();
            // Another attempt may have had its turn before this one.
            if !state.is_done(id) {
                self.check_drain(&state, worker, undo)?;
            }
            processes_of_jobs(&state)
        };
        info!(incarnation = worker, undo, "a process is drained by an operator");
        self.append_by(id, Entry::DrainProcess(DrainProcess { incarnation: worker, undo })).await?;
        self.settle().await?;
        let is_idle = |state: &MetaState| {
            let takes = state.processes.is_live(worker) && !state.processes.is_drained(worker);
            takes && state.jobs_of(worker) == 0
        };
        if undo && is_idle(&self.shared.state.read()) {
            self.place(true).await?;
        }
        let state = self.shared.state.read();
        let moved = |(id, process): &(&JobId, &u64)| before.get(*id).is_some_and(|b| b != *process);
        Ok(processes_of_jobs(&state).iter().filter(moved).map(|(id, _)| id.0).collect())
    }

    /// Whether a process may be drained, or take jobs again; else why not.
    fn check_drain(&self, state: &MetaState, worker: u64, undo: bool) -> Result<(), SqlError> {
        check_worker(state, worker)?;
        let takes = |id: &u64| *id != worker && !state.processes.is_drained(*id);
        if undo || self.computes.incarnations().iter().any(takes) {
            return Ok(());
        }
        let message = format!("process {worker} is the only one that takes jobs");
        Err(not_now(message).with_hint("Start another compute process first."))
    }

    /// Jobs may be sent to this process by hand: it beats, and answers the leader.
    async fn check_answers(&self, worker: u64) -> Result<(), SqlError> {
        let silence = self.shared.members.heartbeat_age(worker, self.shared.env.now());
        let is_silent = silence.is_none_or(|age| age > SILENT);
        if !is_silent && self.computes.answers(worker).await {
            return Ok(());
        }
        let message = format!("process {worker} does not answer: no jobs are sent there");
        Err(not_now(message).with_hint(
            "If it is lost, it is fenced within seconds, and its jobs run elsewhere. millrace ctl workers shows how it is.",
        ))
    }

    /// The jobs of a process that is drained go to one that answers.
    async fn check_others_answer(&self, worker: u64) -> Result<(), SqlError> {
        let others: Vec<u64> = {
            let state = self.shared.state.read();
            let takers = placement::takers(&state, &self.computes.incarnations());
            takers.into_iter().filter(|other| *other != worker).collect()
        };
        let mut refused = Ok(());
        for other in others {
            refused = self.check_answers(other).await;
            if refused.is_ok() {
                return refused;
            }
        }
        // Without any other it is the only one, which is said elsewhere.
        refused
    }

    /// Fences processes, for good: what runs on them is placed on others, if there are any.
    async fn fence(&self, incarnations: &[u64]) -> Result<(), SqlError> {
        let _one = self.turn.lock().await;
        let incarnations = incarnations.to_vec();
        self.append(Entry::FenceProcess(FenceProcess { incarnations })).await?;
        self.settle().await
    }

    /// Nobody calls the processes any more that the log has fenced, nor waits for them.
    fn take_apart_fenced(&self) {
        let fenced: Vec<u64> = {
            let state = self.shared.state.read();
            self.shared.members.keep(|id| state.processes.is_live(id));
            self.shared.clock.keep(|id| state.processes.is_live(id));
            let is_fenced = |id: &u64| !state.processes.is_live(*id);
            let doubted = self.doubted.take_fenced(|id| state.processes.is_live(id));
            self.known.lock().extract_if(.., is_fenced).chain(doubted).collect()
        };
        for incarnation in &fenced {
            self.computes.remove(*incarnation);
            self.senders.lock().remove(incarnation);
            self.shared.streams.close(*incarnation);
            self.compactors.remove(*incarnation);
            self.shared.sessions.forget(*incarnation);
            self.shared.lookups.forget_process(*incarnation);
            self.connect.fenced(*incarnation);
            self.free_locks(*incarnation);
        }
        if !fenced.is_empty() {
            info!(incarnations = ?fenced, "processes are fenced");
        }
    }

    /// Makes use of the processes that the log has and nobody has called yet. Whether one of them has come since this one
    /// leads, could run jobs and has none: a change of leader moves no jobs. One that is drained has none because it
    /// shall not.
    fn take_in_live(&self) -> bool {
        let new: Vec<(u64, RegisterProcess, bool)> = {
            let (state, known) = (self.shared.state.read(), self.known.lock());
            let own = self.shared.incarnation.get();
            let live = state.processes.live().iter();
            let new = live.filter(|(id, _)| !known.contains(id) && own != Some(id));
            let has_none = |id: u64| !state.jobs.values().any(|job| job.process == id);
            let has_come = |id: u64| own.is_some_and(|own| id > *own);
            let is_idle = |id, p: &Process| has_come(id) && !p.drained && has_none(id);
            new.map(|(id, p)| (*id, p.registration.clone(), is_idle(*id, p))).collect()
        };
        let mut has_idle = false;
        for (incarnation, process, is_idle) in new {
            if self.is_doubted(incarnation, &process) {
                continue;
            }
            info!(incarnation, address = process.address, roles = ?process.roles, "process is there");
            self.take_in(incarnation, &process);
            self.known.lock().insert(incarnation);
            has_idle |= is_idle && has_role(&process, ProcessRole::Compute);
        }
        has_idle
    }

    /// Whether a process is not made use of before it has answered a call.
    fn is_doubted(&self, incarnation: u64, process: &RegisterProcess) -> bool {
        let address = &process.address;
        if !has_role(process, ProcessRole::Compute) || !self.doubted.holds(address) {
            return false;
        }
        if self.doubted.begin(address, incarnation)
            && let Ok(service) = self.connect.compute(address, incarnation)
        {
            self.shared.members.begin(incarnation, self.shared.env.now());
            let state = Arc::clone(&self.shared.state);
            let asking = self.doubted.clone().ask(address.clone(), incarnation, service, state);
            let shutdown = self.shared.shutdown.clone();
            spawn("ask a doubted process", shutdown.run_until_cancelled_owned(asking));
        }
        true
    }

    async fn append(&self, entry: Entry) -> Result<(), SqlError> {
        self.append_by(None, entry).await
    }

    /// The same for a change that is asked for by this id, once or again.
    async fn append_by(
        &self,
        statement: Option<StatementId>,
        entry: Entry,
    ) -> Result<(), SqlError> {
        let entry = LogEntry { statement, entry: Some(entry) };
        self.shared.log()?.append_once(entry).await??;
        Ok(())
    }

    /// Makes use of a process that is in the log.
    fn take_in(&self, incarnation: u64, process: &RegisterProcess) {
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
}

fn processes_of_jobs(state: &MetaState) -> BTreeMap<JobId, u64> {
    state.jobs.iter().map(|(id, job)| (*id, job.process)).collect()
}

/// What a statement fails with that has waited for a compute process.
pub fn no_compute() -> SqlError {
    let message = format!("no compute process is there (waited {} s)", COMPUTE_WAIT.as_secs());
    SqlError::new(SqlState::CANNOT_CONNECT_NOW, message)
        .with_hint("Start a compute process (millrace compute), then repeat the statement.")
}

fn not_now(message: String) -> SqlError {
    SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, message)
}

pub fn has_role(process: &RegisterProcess, role: ProcessRole) -> bool {
    process.roles().any(|of| of == role)
}

/// The live processes at whose address one of their role has registered since.
fn superseded(state: &MetaState) -> Vec<u64> {
    let live = || {
        let live = state.processes.live().iter().map(|(id, p)| (*id, &p.registration));
        live.filter(|(_, p)| !p.address.is_empty()).map(|(id, p)| (id, (&p.address, &p.roles)))
    };
    // In the order of their registration: the last one stays.
    let newest: BTreeMap<_, u64> = live().map(|(id, place)| (place, id)).collect();
    live().filter(|(id, place)| newest.get(place) != Some(id)).map(|(id, _)| id).collect()
}

/// The relations of sessions whose process is fenced, and all that depends on them.
fn left_of_sessions(state: &MetaState) -> Vec<u32> {
    let is_left = |ephemeral: u64| ephemeral != 0 && !state.processes.is_live(ephemeral);
    let relations = state.relations.iter();
    let mut ids = relations.filter(|(_, r)| is_left(r.ephemeral)).map(|(id, _)| *id).collect();
    fold::add_dependants(state, &mut ids);
    ids.into_iter().map(|id| id.0).collect()
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
        entries.push(Entry::FenceProcess(FenceProcess { incarnations: leaders }));
    }
    entries
}
