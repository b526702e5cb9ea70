//! What all processes that do not lead do: they find the leader, register, and beat.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use millrace_common::task::spawn;
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::{Heartbeat, MetaControl};
use millrace_rpc::log::{ProcessRole, RegisterProcess};
use millrace_storage::given_up::GivenUp;
use parking_lot::Mutex;

use super::metas::{address, find_leader};
use super::network::Delivery;
use super::store::ProcessStore;
use super::world::{Caller, Node, Process, World};
use crate::follower::LogFollower;
use crate::meta::Meta;

const PAUSE: Duration = Duration::from_millis(500);
const BEAT: Duration = Duration::from_secs(1);
/// How often it is asked who leads though the one that did answers.
const LOOK: Duration = Duration::from_secs(5);

/// A process that has registered, and its way to the leader.
pub struct Member {
    pub world: Arc<World>,
    pub process: Arc<Process>,
    pub follower: Arc<LogFollower>,
    pub given_up: Arc<GivenUp>,
    leader: Mutex<Option<Node>>,
    /// The leader's last record, as it said last.
    pub told: Mutex<u64>,
}

impl Member {
    pub fn of(
        world: &Arc<World>,
        process: &Arc<Process>,
        follower: Arc<LogFollower>,
    ) -> Arc<Member> {
        Arc::new(Member {
            world: Arc::clone(world),
            process: Arc::clone(process),
            follower,
            given_up: Arc::default(),
            leader: Mutex::default(),
            told: Mutex::default(),
        })
    }

    /// Opens the log, registers, and reads the log once more. `None`: its registration is fenced already.
    pub async fn register(
        world: &Arc<World>,
        process: &Arc<Process>,
        role: ProcessRole,
    ) -> Option<Arc<Member>> {
        let store = ProcessStore::open(world, process.node);
        let follower = loop {
            let opened = LogFollower::open(Arc::clone(&store), process.env.clone()).await;
            if let Ok(follower) = opened {
                break Arc::new(follower);
            }
            tokio::time::sleep(PAUSE).await;
        };
        let member = Member::of(world, process, Arc::clone(&follower));
        process.services.lock().follower = Some(Arc::clone(&follower));
        let registration = RegisterProcess {
            nonce: process.env.random().max(1),
            roles: vec![role as i32],
            address: address(process.node),
        };
        let incarnation = loop {
            let registration = registration.clone();
            let registered = member.ask_leader(Delivery::Repeated, move |meta| {
                let registration = registration.clone();
                async move { meta.register_process(registration).await }
            });
            match registered.await {
                Ok(incarnation) => break incarnation,
                Err(CallError::Sql(error)) if error.message.contains("fenced") => return None,
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        };
        world.note(|| format!("{} is process {incarnation}", process.node));
        process.hear_leader();
        process.admission.lock().incarnation = incarnation;
        while follower.catch_up().await.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
        process.reads.store(true, Ordering::Relaxed);
        spawn("look for the leader", Arc::clone(&member).look());
        Some(member)
    }

    async fn look(self: Arc<Member>) {
        loop {
            tokio::time::sleep(LOOK).await;
            if let Some(node) = find_leader(&self.world, &self.process).await {
                *self.leader.lock() = Some(node);
            }
        }
    }

    /// Calls the leader; one that is not known, or does not answer, is looked for.
    pub async fn ask_leader<T, F>(
        &self,
        delivery: Delivery,
        serve: impl Fn(Arc<Meta>) -> F + Send + Sync + Clone + 'static,
    ) -> Result<T, CallError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, CallError>> + Send + 'static,
    {
        let known = *self.leader.lock();
        let node = match known {
            Some(node) => node,
            None => {
                let found = find_leader(&self.world, &self.process).await;
                let term = self.process.term();
                found.ok_or(CallError::NotLeader { leader: String::new(), term })?
            }
        };
        *self.leader.lock() = Some(node);
        let incarnation = self.process.incarnation();
        let caller = Caller { term: self.process.term(), incarnation, target: 0 };
        let said = self.world.call(&self.process, node, delivery, move |process| {
            let serve = serve.clone();
            async move {
                // Who has no incarnation yet follows no leader.
                let term = if caller.incarnation == 0 { 0 } else { caller.term };
                process.admit(Caller { term, ..caller })?;
                serve(process.leader()?).await
            }
        });
        let said = said.await;
        match &said {
            Err(CallError::StaleTerm { term }) => self.process.raise_term(*term),
            Err(error) if error.is_retryable() => *self.leader.lock() = None,
            _ => {}
        }
        said
    }

    /// Tells the leader each second that the process is there, until it is fenced; then the process ends.
    pub async fn beat(self: Arc<Member>, applied: impl Fn() -> u64 + Send + Sync + 'static) {
        loop {
            let names = self.given_up.take(100);
            let heartbeat = Heartbeat {
                incarnation: self.process.incarnation(),
                applied: applied(),
                pinned: self.process.pins.lock().clone(),
                given_up: names.clone(),
                ..Heartbeat::default()
            };
            let beaten = self.ask_leader(Delivery::Repeated, move |meta| {
                let heartbeat = heartbeat.clone();
                async move { meta.beat(heartbeat).await }
            });
            match beaten.await {
                Ok(record) => {
                    self.process.hear_leader();
                    *self.told.lock() = record;
                }
                Err(CallError::Fenced { .. }) => {
                    self.world.restart(&self.process, "has been fenced");
                    return;
                }
                Err(_) => self.given_up.add(names),
            }
            tokio::time::sleep(BEAT).await;
        }
    }

    /// Tells the leader that the process ends.
    pub async fn leave(&self) {
        let incarnation = self.process.incarnation();
        let heartbeat = Heartbeat { incarnation, leaving: true, ..Heartbeat::default() };
        let left = self.ask_leader(Delivery::Repeated, move |meta| {
            let heartbeat = heartbeat.clone();
            async move { meta.beat(heartbeat).await }
        });
        // If it does not hear it, the process is lost a little later.
        let _ = left.await;
    }

    /// While it lives, the leader is told that these objects are read.
    pub fn pin(&self, objects: impl IntoIterator<Item = String>) -> Pinned {
        let objects: Vec<String> = objects.into_iter().filter(|o| !o.is_empty()).collect();
        self.process.pins.lock().extend(objects.iter().cloned());
        Pinned { process: Arc::clone(&self.process), objects }
    }

    /// What a process cannot read is a broken promise, unless it was fenced.
    pub fn must_read<T>(&self, what: &str, read: Result<T, String>) -> Option<T> {
        match read {
            Ok(read) => Some(read),
            Err(reason) if reason.ends_with("is gone") => {
                let incarnation = self.process.incarnation();
                if self.world.is_live(incarnation) {
                    self.world.fail(format!("process {incarnation} cannot read {what}: {reason}"));
                }
                None
            }
            Err(_) => None,
        }
    }
}

pub struct Pinned {
    process: Arc<Process>,
    objects: Vec<String>,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut pins = self.process.pins.lock();
        for object in &self.objects {
            if let Some(at) = pins.iter().position(|pinned| pinned == object) {
                pins.swap_remove(at);
            }
        }
    }
}
