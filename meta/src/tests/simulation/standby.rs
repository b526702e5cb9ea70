//! Meta processes that stand by, as `src/roles/standby.rs` has them: they ask the leader, those that vote, and each other over
//! the simulated network. What follows from the answers is the crate's own ([`crate::claim`]).

use std::sync::Arc;
use std::time::Duration;

use futures::future::{join, join_all};
use millrace_rpc::log::ProcessRole;

use super::metas::{LOOK, node_of};
use super::network::Delivery;
use super::world::{METAS, Node, Process, World};
use crate::claim::{DOUBTFUL, Voter, Watch, claims, penalty, voters};
use crate::cluster::has_role;
use crate::follower::LogFollower;
use crate::state::MetaState;

/// How long a process may take to say who it is.
const ANSWER: Duration = Duration::from_secs(1);
/// How often a leader that was deposed is told, if it does not answer, and what is between.
const TELLS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// What a process says of itself.
#[derive(Clone, Copy, Debug)]
pub struct Said {
    pub term: u64,
    pub incarnation: u64,
    pub leads: bool,
    /// For how long the object store has answered it nothing, if it leads or is about to.
    log_wait: Duration,
    /// For how long it has not heard of a leader; `None`: it never has.
    leader_silence: Option<Duration>,
}

impl Process {
    /// The leader has answered this process.
    pub fn hear_leader(&self) {
        let now = self.env.now();
        self.admission.lock().heard = Some(now);
    }

    fn says(&self) -> Said {
        let leads = self.leader().is_ok();
        let log_wait = self.seat().map(|seat| seat.meta.store_wait()).unwrap_or_default();
        let known = self.admission.lock();
        let leader_silence = known.heard.map(|heard| self.env.elapsed(heard));
        Said { term: known.term, incarnation: known.incarnation, leads, log_wait, leader_silence }
    }
}

/// Asks a process who it is, which learns of this one's term, and this one of its.
pub async fn handshake(world: &Arc<World>, from: &Process, to: Node) -> Option<Said> {
    let told = from.term();
    let asked = world.call(from, to, Delivery::Repeated, move |process| async move {
        process.raise_term(told);
        Ok(process.says())
    });
    let said = tokio::time::timeout(ANSWER, asked).await.ok()?.ok()?;
    from.raise_term(said.term);
    Some(said)
}

/// The leader that a standby has followed.
#[derive(Clone, Copy, Debug)]
pub struct Followed {
    incarnation: u64,
    node: Node,
    /// Whether it has said that it leads: it had waited for the lease of the one before it.
    has_led: bool,
}

impl Followed {
    /// It is told that this process leads now. Completes when it has answered that it leads no longer. It never does where
    /// another one may answer reads as well: `is_only_one` is not so, or it had not led yet itself.
    pub async fn has_stopped(self, world: &Arc<World>, process: &Process, is_only_one: bool) {
        for _ in 0..TELLS {
            if let Some(said) = handshake(world, process, self.node).await {
                let is_it = said.incarnation == self.incarnation;
                if is_only_one && self.has_led && is_it && !said.leads {
                    return;
                }
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        std::future::pending().await
    }
}

/// The leader, as the log has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Leader {
    incarnation: u64,
    nonce: u64,
    node: Node,
}

/// The newest process that may lead and is not fenced.
fn leader(state: &MetaState) -> Option<Leader> {
    let mut live = state.processes.live().iter().rev();
    let (id, process) = live.find(|(_, p)| has_role(&p.registration, ProcessRole::Meta))?;
    let registration = &process.registration;
    let node = node_of(&registration.address)?;
    Some(Leader { incarnation: *id, nonce: registration.nonce, node })
}

/// A meta process that does not lead.
pub struct Standby<'a> {
    world: &'a Arc<World>,
    process: &'a Process,
    follower: &'a LogFollower,
    watch: Watch,
    /// The incarnation of the leader that has said that it leads, last; 0: none has.
    has_led: u64,
}

impl<'a> Standby<'a> {
    pub fn new(
        world: &'a Arc<World>,
        process: &'a Process,
        follower: &'a LogFollower,
    ) -> Standby<'a> {
        let watch = Watch::new(penalty(world.led(process.node).deposed), process.env.now());
        Standby { world, process, follower, watch, has_led: 0 }
    }

    /// The log's last record, if this process need not look for a leader: nobody leads, or the one that did was here, and was
    /// not deposed.
    pub fn claims_at_once(&self) -> Option<u64> {
        let (leader, record) = self.follower.read(|state| (leader(state), state.number));
        let (led, here) = (self.world.led(self.process.node), self.process.node);
        let was_here = |node: Node| node == here && penalty(led.deposed).is_zero();
        let is_dead = |leader: Leader| led.proves_dead(leader.nonce) || was_here(leader.node);
        leader.is_none_or(is_dead).then_some(record)
    }

    /// Returns the record after which the lead is to be claimed.
    pub async fn wait(&mut self) -> u64 {
        loop {
            tokio::time::sleep(LOOK).await;
            let world = self.world;
            if world.is_rough() && world.numbers.chance(world.climate.claims) {
                // Out of turn: whatever a claim is based on, it does no harm.
                let _ = self.follower.catch_up().await;
                return self.follower.number();
            }
            if let Some(record) = self.look().await {
                return record;
            }
        }
    }

    /// The leader that the log has.
    pub fn followed(&self) -> Option<Followed> {
        let Leader { incarnation, node, .. } = self.follower.read(leader)?;
        Some(Followed { incarnation, node, has_led: self.has_led == incarnation })
    }

    /// Asks once. The log's last record, if the lead is to be claimed after it.
    async fn look(&mut self) -> Option<u64> {
        let asked = self.follower.read(leader);
        let said = self.ask_leader(asked).await;
        if said.is_some_and(|said| said.log_wait < DOUBTFUL) {
            self.watch.hear(self.process.env.now());
            return None;
        }
        self.follower.catch_up().await.ok()?;
        let (leader, term, record) =
            self.follower.read(|state| (leader(state), state.term, state.number));
        self.process.raise_term(term);
        let now = self.process.env.now();
        if leader.is_some() && leader != asked {
            // Another one leads by now, and was not asked yet.
            self.watch.hear(now);
            return None;
        }
        let log_wait = said.map(|said| said.log_wait);
        let mut heard = self.watch.note(leader.is_none(), log_wait, record, now)?;
        let mut voters = self.follower.read(voters);
        heard.registered = voters.len();
        if !heard.asks_voters() {
            voters.clear();
        }
        (heard.answers, heard.rank) = join(self.ask_voters(voters), self.rank()).await;
        if !claims(&heard) {
            return None;
        }
        let why = if log_wait.is_some() { "leader cut off" } else { "leader lost" };
        self.world.count(why);
        self.world.note(|| format!("{} has heard {heard:?}", self.process.node));
        Some(record)
    }

    /// What the leader says, if it answers as the one that the log has.
    async fn ask_leader(&mut self, leader: Option<Leader>) -> Option<Said> {
        let Leader { incarnation, node, .. } = leader?;
        let said = handshake(self.world, self.process, node).await;
        let said = said.filter(|said| said.incarnation == incarnation)?;
        if said.leads {
            self.has_led = incarnation;
        }
        Some(said)
    }

    /// Asks the processes that have registered how long they have not heard of a leader.
    async fn ask_voters(&self, voters: Vec<Voter>) -> Vec<Option<Duration>> {
        let (world, process) = (self.world, self.process);
        let answers = voters.into_iter().map(|voter| async move {
            let said = handshake(world, process, node_of(&voter.address)?).await?;
            (said.incarnation == voter.incarnation).then_some(said.leader_silence)
        });
        join_all(answers).await.into_iter().flatten().collect()
    }

    /// How many of the others that stand by come before this one.
    async fn rank(&self) -> usize {
        let (world, process) = (self.world, self.process);
        let before = METAS.into_iter().filter(|node| *node < process.node);
        let there = join_all(before.map(|node| handshake(world, process, node))).await;
        there.into_iter().flatten().filter(|said| !said.leads).count()
    }
}
