//! Meta processes: they stand by, claim the lead, and serve as the leader. The leader is the crate's own; how it begins and
//! ends is the binary's (`src/roles/meta.rs`) and is repeated here in short.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use millrace_common::{Generation, JobId, SqlError};
use millrace_rpc::call_error::CallError;
use millrace_rpc::log::{MoveParts, ProcessRole};
use millrace_rpc::services::{
    CompactionTask, CompactorService, ComputeService, Cut, LivePart, RunningJob, StartJob,
};
use millrace_rpc::source_poll::{PollSource, Polled};
use millrace_rpc::stream::{Acknowledged, StreamError, StreamMessage};
use millrace_rpc::version::{JobCommit, PublishHandle, VersionEdit};

use super::network::Delivery;
use super::standby::{Followed, Standby, handshake};
use super::store::ProcessStore;
use super::world::{Caller, METAS, Node, Process, World};
use crate::claim::LED_LONG;
use crate::cluster::Connect;
use crate::follower::LogFollower;
use crate::gc::GcOptions;
use crate::log::{LEADER_LEASE, SnapshotPolicy};
use crate::meta::Meta;
use crate::options::MetaOptions;

/// Between two questions to the leader, and of a leader, whether another one leads.
pub const LOOK: Duration = Duration::from_millis(500);

/// A meta process that has claimed the lead.
pub struct Seat {
    pub meta: Arc<Meta>,
    /// Whether it may be called: it has outwaited the leader before.
    pub leads: AtomicBool,
}

impl Process {
    /// The leader that this process is.
    pub fn leader(&self) -> Result<Arc<Meta>, CallError> {
        let seat = self.seat().filter(|seat| seat.leads.load(Ordering::Relaxed));
        let term = self.term();
        let leads = seat.filter(|seat| seat.meta.term() >= term);
        let not_leader = || CallError::NotLeader { leader: String::new(), term };
        leads.map(|seat| Arc::clone(&seat.meta)).ok_or_else(not_leader)
    }
}

/// The meta process with the highest term of those that say that they lead.
pub async fn find_leader(world: &Arc<World>, from: &Process) -> Option<Node> {
    let asked = METAS.map(|node| async move { (handshake(world, from, node).await, node) });
    let said = futures::future::join_all(asked).await;
    let leads = said.into_iter().filter_map(|(said, node)| {
        let said = said.filter(|said| said.leads)?;
        Some((said.term, node))
    });
    leads.max().map(|(_, node)| node)
}

pub async fn run(world: Arc<World>, process: Arc<Process>) {
    let store = ProcessStore::open(&world, process.node);
    let follower = loop {
        if let Ok(follower) = LogFollower::open(Arc::clone(&store), process.env.clone()).await {
            break follower;
        }
        tokio::time::sleep(LOOK).await;
    };
    let mut standby = Standby::new(&world, &process, &follower);
    let mut at_once = standby.claims_at_once();
    loop {
        let (record, before) = match at_once.take() {
            Some(record) => (record, None),
            None => (standby.wait().await, standby.followed()),
        };
        world.note(|| format!("{} claims after {record}", process.node));
        match Meta::open(options(&world, &process, record)).await {
            Ok(meta) => return lead(&world, &process, meta, before).await,
            Err(error) => {
                world.note(|| format!("{} does not lead: {}", process.node, error.message))
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

fn options(world: &Arc<World>, process: &Process, record: u64) -> MetaOptions {
    let settings =
        [("object_retention", "100ms"), ("snapshot_retention", "30s"), ("log_retention", "600s")];
    MetaOptions {
        env: process.env.clone(),
        alone: false,
        only_after: Some(record),
        roles: vec![ProcessRole::Meta],
        address: format!("m:{}", process.node),
        settings: settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        snapshots: SnapshotPolicy { min_records: 20, size_divisor: 4, max_records: 60 },
        gc: GcOptions {
            period: Duration::from_millis(300),
            object_retention: world.collects_at_once.then_some(Duration::ZERO),
        },
        ..MetaOptions::new(ProcessStore::open(world, process.node))
    }
}

/// Of an address.
pub fn node_of(address: &str) -> Option<Node> {
    address.split_once(':')?.1.parse().ok()
}

/// Leads until another one does, and ends. `before`: the leader that may still be there.
async fn lead(
    world: &Arc<World>,
    process: &Arc<Process>,
    meta: Arc<Meta>,
    before: Option<Followed>,
) {
    let (term, incarnation) = (meta.term(), meta.incarnation());
    world.note(|| format!("{} leads, term {term}, process {incarnation}", process.node));
    world.count("leaders");
    process.raise_term(term);
    process.admission.lock().incarnation = incarnation;
    let seat = Arc::new(Seat { meta: Arc::clone(&meta), leads: AtomicBool::new(false) });
    process.services.lock().seat = Some(Arc::clone(&seat));
    let led = world.led(process.node);
    if !meta.predecessors().iter().all(|nonce| led.proves_dead(*nonce)) {
        let is_only_one = meta.predecessors().len() == 1;
        let stopped = async {
            match before {
                Some(before) => before.has_stopped(world, process, is_only_one).await,
                None => std::future::pending().await,
            }
        };
        if tokio::time::timeout(LEADER_LEASE * 5 / 4, stopped).await.is_ok() {
            world.count("leases not waited for");
        }
    }
    // Not before: if this process dies while it waits, the next one must wait, too.
    world.note_led(process.node, |led| led.nonce = meta.nonce());
    let peers = Peers { world: Arc::clone(world), process: Arc::clone(process), term, incarnation };
    if let Err(error) = meta.start_cluster(Arc::new(peers)).await {
        world.fail(format!("a leader does not start: {error:?}"));
    }
    seat.leads.store(true, Ordering::Relaxed);
    let began = process.env.now();
    let reason = loop {
        if process.env.elapsed(began) > LED_LONG {
            world.note_led(process.node, |led| led.deposed = 0);
        }
        if let Ok(reason) = tokio::time::timeout(LOOK, meta.deposed()).await {
            break reason.message.clone();
        }
        if process.term() > term {
            break "has met a higher term".to_owned();
        }
    };
    // Else it ends in order.
    if seat.leads.swap(false, Ordering::Relaxed) && world.climate.penalties {
        world.note_led(process.node, |led| led.deposed += 1);
    }
    world.restart(process, &reason);
}

/// The way from the leader to other processes.
struct Peers {
    world: Arc<World>,
    process: Arc<Process>,
    term: u64,
    incarnation: u64,
}

impl Peers {
    fn peer(&self, address: &str, target: u64) -> Result<Arc<Peer>, SqlError> {
        let to = node_of(address).ok_or_else(|| SqlError::internal("no such address"))?;
        let caller = Caller { term: self.term, incarnation: self.incarnation, target };
        let (world, from) = (Arc::clone(&self.world), Arc::clone(&self.process));
        Ok(Arc::new(Peer { world, from, to, caller }))
    }
}

impl Connect for Peers {
    fn compute(&self, address: &str, target: u64) -> Result<Arc<dyn ComputeService>, SqlError> {
        Ok(self.peer(address, target)?)
    }

    fn compactor(&self, address: &str, target: u64) -> Result<Arc<dyn CompactorService>, SqlError> {
        Ok(self.peer(address, target)?)
    }

    fn fenced(&self, incarnation: u64) {
        self.world.note(|| format!("{} has fenced {incarnation}", self.process.node));
        self.process.admission.lock().fenced.insert(incarnation);
    }
}

/// One process, as the leader calls it.
struct Peer {
    world: Arc<World>,
    from: Arc<Process>,
    to: Node,
    caller: Caller,
}

impl Peer {
    /// What a refusal says of a later term is learnt.
    async fn call<T, F>(
        &self,
        delivery: Delivery,
        serve: impl Fn(Arc<Process>) -> F + Send + Sync + Clone + 'static,
    ) -> Result<T, CallError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, CallError>> + Send + 'static,
    {
        let caller = self.caller;
        let said = self.world.call(&self.from, self.to, delivery, move |process| {
            let serve = serve.clone();
            async move {
                process.admit(caller)?;
                serve(process).await
            }
        });
        let said = said.await;
        if let Err(error) = &said {
            let (from, to) = (self.from.node, self.to);
            self.world.note(|| format!("{to} does not do what {from} asks: {error}"));
        }
        if let Err(CallError::StaleTerm { term }) = &said {
            self.from.raise_term(*term);
        }
        said
    }
}

fn no_worker() -> CallError {
    SqlError::internal("no jobs run here").into()
}

#[async_trait]
impl ComputeService for Peer {
    async fn start_job(&self, start: StartJob) -> Result<(), SqlError> {
        let started = self.call(Delivery::Once, move |process| async move {
            Ok(process.worker().ok_or_else(no_worker)?.start_job(start).await?)
        });
        Ok(started.await?)
    }

    async fn adopt_job(
        &self,
        job: JobId,
        generation: Generation,
        record: u64,
        after: u64,
    ) -> Result<Option<RunningJob>, SqlError> {
        let running = self.call(Delivery::Repeated, move |process| async move {
            let worker = process.worker().ok_or_else(no_worker)?;
            Ok(worker.adopt_job(job, generation, record, after).await?)
        });
        Ok(running.await?)
    }

    async fn cut(
        &self,
        job: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<JobCommit, SqlError> {
        let cut = self.call(Delivery::Once, move |process| async move {
            Ok(process.worker().ok_or_else(no_worker)?.cut(job, generation, cut).await?)
        });
        Ok(cut.await?)
    }

    async fn apply_records(&self, message: StreamMessage) -> Result<Acknowledged, StreamError> {
        let applied = self.call(Delivery::Repeated, move |process| {
            let message = message.clone();
            async move {
                let worker = process.worker().ok_or_else(no_worker)?;
                Ok(worker.apply_records(message).await)
            }
        });
        match applied.await {
            Ok(applied) => applied,
            Err(error) => Err(StreamError::Failed(error.into())),
        }
    }

    async fn poll_source(&self, _: PollSource) -> Result<Polled, SqlError> {
        Err(SqlError::internal("no source is simulated"))
    }

    async fn applied_since(&self, _: Acknowledged) -> Acknowledged {
        // No job is ever busy.
        std::future::pending().await
    }

    async fn prepare_edit(&self, _: JobId, _: Generation, _: VersionEdit) {
        // Nothing is cached here.
    }

    async fn abort_epoch(&self, job: JobId, generation: Generation, _: SqlError) {
        self.stop_job(job, generation).await;
    }

    async fn publish(
        &self,
        _: JobId,
        _: Generation,
        _: Vec<PublishHandle>,
    ) -> Result<(), SqlError> {
        Err(SqlError::unsupported("sinks"))
    }

    async fn stop_job(&self, job: JobId, generation: Generation) {
        let stopped = self.call(Delivery::Repeated, move |process| async move {
            process.worker().ok_or_else(no_worker)?.stop_job(job, generation);
            Ok(())
        });
        // A process that does not hear it is fenced by the generation.
        let _ = stopped.await;
    }
}

#[async_trait]
impl CompactorService for Peer {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError> {
        let world = Arc::clone(&self.world);
        let compacted = self.call(Delivery::Once, move |process| {
            let (world, task) = (Arc::clone(&world), task.clone());
            async move { Ok(super::compactor::compact(&world, &process, task).await?) }
        });
        Ok(compacted.await?)
    }

    async fn copy_parts(&self, _: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        Err(SqlError::unsupported("moving parts"))
    }
}

/// Who registers with a leader: by role, where it is.
pub fn address(node: Node) -> String {
    let roles = BTreeMap::from([(5, "c"), (6, "f"), (7, "f")]);
    format!("{}:{node}", roles.get(&node).unwrap_or(&"w"))
}
