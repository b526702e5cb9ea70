//! A meta process that does not lead: it follows the log, asks the leader whether it is there, and says when the lead is
//! to be claimed ([`millrace_meta::claim`]).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use millrace_common::SqlError;
use millrace_frontend::identification;
use millrace_meta::LogFollower;
use millrace_meta::claim::{DOUBTFUL, Heard, Voter, Watch, claims, voters};
use millrace_meta::cluster::has_role;
use millrace_meta::state::MetaState;
use millrace_rpc::call_error::CallError;
use millrace_rpc::log::ProcessRole;
use millrace_rpc::remote::{Admission, Identity};
use millrace_rpc::store_id::StoreId;
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{info, warn};

use super::hindrance::{Hindrance, not_led, other_version, refused};
use super::leader::{Asker, Met};
use super::store::tell_store;
use crate::leadership::Leadership;
use crate::predecessor::{Predecessor, first_there, is_standalone, predecessors};

/// Between two questions to the leader.
const LOOK: Duration = Duration::from_millis(500);
/// How often the log is read while the leader answers, so that not all of it is missing when it does not.
const CATCH_UP: Duration = Duration::from_secs(30);

/// How long a server that runs all roles may take to say that it is there.
const ANSWER: Duration = Duration::from_millis(700);
const STOP_IT: &str = "Stop it first, or give another --object-store.";

/// The leader, as the log has it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Leader {
    incarnation: u64,
    nonce: u64,
    address: String,
    /// A server that runs all roles.
    is_standalone: bool,
}

/// The leader that a standby has followed, and takes the lead from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Followed {
    pub incarnation: u64,
    pub address: String,
    /// Whether it has said that it leads: it had waited for the lease of the one before it.
    pub has_led: bool,
}

/// How a leader answers.
#[derive(Debug)]
enum Answer {
    Leads,
    /// As one that has waited for the object store for so long that this process reads the log.
    Waits(Duration),
    /// In another protocol version; what is told of it.
    OtherVersion(String),
    /// Something is there and does not talk with this process; what is told of it.
    Refuses(String),
    Silent,
}

/// What a look has come to.
#[derive(Debug)]
enum Verdict {
    Waits,
    /// There is a reason why this process must not claim the lead.
    Hindered(String),
    /// The leader does not talk with this process, which does not claim the lead, but may when the others have lost it; what
    /// is told of it.
    Refused(String),
    /// The lead is to be claimed after this record.
    Claims(u64),
}

impl Verdict {
    /// Not now. `refused`: what is told of a leader that does not talk with this process.
    fn not_now(refused: Option<String>) -> Verdict {
        refused.map_or(Verdict::Waits, Verdict::Refused)
    }
}

/// The newest process that may lead and is not fenced.
fn leader(state: &MetaState) -> Option<Leader> {
    let mut live = state.processes.live().iter().rev();
    let (incarnation, process) =
        live.find(|(_, process)| has_role(&process.registration, ProcessRole::Meta))?;
    let (nonce, address) = (process.registration.nonce, process.registration.address.clone());
    let is_standalone = is_standalone(&process.registration);
    Some(Leader { incarnation: *incarnation, nonce, address, is_standalone })
}

/// Whether the leader must be dead: it had this data directory, or the address `here` of this process, where nobody else
/// can listen. Where a process was deposed, the address proves nothing: another one may have been given the same by
/// mistake, and the two would depose each other for ever.
fn is_dead(leader: &Leader, here: &str, own: &Leadership) -> bool {
    let was_here = leader.address == here && !here.is_empty();
    own.proves_dead(leader.nonce) || (was_here && own.penalty().is_zero())
}

/// What the processes that have registered have said.
#[derive(Debug, Default)]
struct Votes {
    /// For how long each has not heard of a leader.
    answers: Vec<Option<Duration>>,
    /// What is told of those that are there and do not talk with this process.
    refusals: Vec<String>,
}

/// See the module.
pub struct Standby {
    log: Arc<LogFollower>,
    admission: Arc<Admission>,
    asker: Asker,
    identity: Arc<Identity>,
    /// Where other meta processes may be.
    metas: BTreeSet<String>,
    /// Where others reach this one.
    own: String,
    watch: Watch,
    hindrance: Arc<Hindrance>,
    /// When the log was read last.
    caught_up: Instant,
    /// The leader that has said that it leads, last; 0: none has.
    has_led: u64,
}

impl Standby {
    pub fn new(
        log: LogFollower,
        identity: Arc<Identity>,
        admission: &Arc<Admission>,
        metas: &[String],
        own: &str,
        penalty: Duration,
        hindrance: &Arc<Hindrance>,
    ) -> Standby {
        let now = Instant::now();
        Standby {
            log: Arc::new(log),
            admission: Arc::clone(admission),
            asker: Asker::new(Arc::clone(&identity)),
            identity,
            metas: metas.iter().filter(|meta| *meta != own).cloned().collect(),
            own: own.to_owned(),
            watch: Watch::new(penalty, now),
            hindrance: Arc::clone(hindrance),
            caught_up: now,
            has_led: 0,
        }
    }

    /// The log's last record, if this process need not look for a leader: nobody leads, or the one that did is dead.
    pub fn claims_at_once(&self, own: &Leadership) -> Option<u64> {
        let (leader, number) = self.log.read(|state| (leader(state), state.number));
        let is_dead = leader.is_none_or(|leader| is_dead(&leader, &self.own, own));
        is_dead.then_some(number)
    }

    /// An error if a process that takes part, or another meta process, speaks another protocol version: none of them could
    /// register with this one. Otherwise whether this process may lead those that are there: not if most of those that have
    /// registered do not talk with it. It waits for none that does not answer.
    pub async fn may_lead(&self) -> Result<bool, SqlError> {
        // Who is at an old address by now, and works on another store, is told apart by it.
        self.tell_store();
        let (leader, voters) = self.log.read(|state| (leader(state), voters(state)));
        let leader = leader.filter(|leader| !leader.is_standalone && !leader.address.is_empty());
        let mut metas = self.metas.clone();
        metas.extend(leader.map(|leader| leader.address));
        // Nobody but this process is there.
        metas.remove(&self.own);
        let met = metas.into_iter().map(|address| async move {
            let met = self.asker.meet(&address).await;
            (address, met)
        });
        let (met, votes) = tokio::join!(join_all(met), self.ask_voters(voters));
        for (address, met) in met {
            if let Met::OtherVersion(error) = met {
                return Err(not_led(other_version("meta", &address, &error)));
            }
        }
        let votes = votes.map_err(not_led)?;
        Ok(votes.refusals.len() <= votes.answers.len())
    }

    /// An error if this process was given another object store than a meta process that it was told of: it would begin a
    /// cluster of its own there. It waits for none that does not answer.
    pub async fn refuse_other_store(&self) -> Result<(), SqlError> {
        self.tell_store();
        while let Some(other) = self.other_store().await {
            // The log may have begun since it was read, or have been given its id.
            self.log.catch_up().await?;
            if !self.tell_store() {
                return Err(other.into());
            }
        }
        Ok(())
    }

    /// Why this process does not work on the store of the others: one of them leads elsewhere. One that does not lead and
    /// refuses this process may be a stranger at an old address.
    async fn other_store(&self) -> Option<CallError> {
        let there = match self.asker.ask_all(&self.metas).await {
            Ok(there) => there,
            Err(error @ CallError::OtherStore { leads: true, .. }) => return Some(error),
            Err(_) => return None,
        };
        let ours = self.identity.store();
        let mut leading = there.into_iter().filter(|(_, said)| said.leads);
        let (peer, said) = leading.find(|(_, said)| said.store.is_some() && said.store != ours)?;
        Some(CallError::OtherStore { peer, ours, theirs: said.store, leads: true })
    }

    fn tell_store(&self) -> bool {
        tell_store(&self.log, &self.identity, &self.admission)
    }

    /// The store that the log is of; `None`: it does not say yet.
    pub fn store_id(&self) -> Option<StoreId> {
        self.log.store_id()
    }

    /// An error if a server that runs all roles uses the object store: a cluster begins where that has ended.
    pub async fn refuse_standalone(&self, own: &Leadership) -> Result<(), SqlError> {
        let before = self.log.read(|state| predecessors(state, own));
        let standalone = |one: &Predecessor| matches!(one, Predecessor::Standalone { .. });
        match first_there(before.into_iter().filter(standalone).collect()).await {
            Some(there) => Err(there.refusal(STOP_IT)),
            None => Ok(()),
        }
    }

    /// Returns when the lead is to be claimed, if the log's last record is still the one that is returned.
    pub async fn wait(&mut self) -> u64 {
        let mut ticks = tokio::time::interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            match self.look().await {
                Ok(Some(number)) => return number,
                Ok(None) => {}
                Err(error) => warn!(%error, "the log cannot be read, trying again"),
            }
        }
    }

    /// Asks once. The log's last record, if the lead is to be claimed after it.
    async fn look(&mut self) -> Result<Option<u64>, SqlError> {
        let verdict = self.judge().await?;
        match verdict {
            Verdict::Hindered(why) => {
                self.watch.hinder(Instant::now());
                self.hindrance.set(Some(why));
            }
            // What was found then is told until it counts for nothing.
            Verdict::Waits | Verdict::Refused(_) if self.watch.is_hindered(Instant::now()) => {}
            Verdict::Refused(why) => self.hindrance.set(Some(why)),
            Verdict::Waits if self.watch.is_refused(Instant::now()) => {}
            Verdict::Waits => self.hindrance.set(None),
            Verdict::Claims(number) => {
                self.hindrance.set(None);
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    async fn judge(&mut self) -> Result<Verdict, SqlError> {
        let (log_wait, refused) = match self.ask_leader().await {
            Answer::Leads => {
                self.watch.unhinder();
                self.hindrance.clear();
                self.hear().await?;
                return Ok(Verdict::Waits);
            }
            Answer::OtherVersion(why) => {
                self.hear().await?;
                return Ok(Verdict::Hindered(why));
            }
            Answer::Waits(wait) => (Some(wait), None),
            Answer::Refuses(why) => (None, Some(why)),
            Answer::Silent => (None, None),
        };
        let asked = self.log.read(leader);
        self.catch_up().await?;
        let (leader, number) = self.log.read(|state| (leader(state), state.number));
        let now = Instant::now();
        if leader.is_some() && leader != asked {
            // Another one leads by now, and was not asked yet.
            self.watch.hear(now);
            return Ok(Verdict::Waits);
        }
        if refused.is_some() {
            self.watch.refuse(now);
        }
        let Some(mut heard) = self.watch.note(leader.is_none(), log_wait, number, now) else {
            return Ok(Verdict::not_now(refused));
        };
        Ok(match self.ask_others(&mut heard).await {
            Ok(()) if claims(&heard) => {
                let why = match log_wait {
                    Some(_) => "the leader is cut off from the object store",
                    None => "nobody leads",
                };
                info!(?leader, ?heard, "{why}: this process claims the lead");
                Verdict::Claims(number)
            }
            Ok(()) => Verdict::not_now(refused),
            Err(why) => Verdict::Hindered(why),
        })
    }

    /// The leader is there.
    async fn hear(&mut self) -> Result<(), SqlError> {
        self.watch.hear(Instant::now());
        // Who does not know its store refuses nobody that works on another one.
        if self.caught_up.elapsed() >= CATCH_UP || self.identity.store().is_none() {
            self.catch_up().await?;
        }
        Ok(())
    }

    /// Asks the processes that have registered and those that stand by. An error if this process must not lead the former,
    /// because one speaks another protocol version, or because most of those that are there do not talk with it: what is
    /// told of it.
    async fn ask_others(&self, heard: &mut Heard) -> Result<(), String> {
        let mut voters = self.log.read(voters);
        heard.registered = voters.len();
        if !heard.asks_voters() {
            voters.clear();
        }
        let (votes, rank) = tokio::join!(self.ask_voters(voters), self.rank());
        let Votes { answers, refusals } = votes?;
        heard.rank = rank;
        (heard.answers, heard.refusals) = (answers, refusals.len());
        match refusals.into_iter().next() {
            Some(first) if heard.most_refuse() => Err(first),
            _ => Ok(()),
        }
    }

    async fn catch_up(&mut self) -> Result<(), SqlError> {
        self.log.catch_up().await?;
        self.tell_store();
        self.caught_up = Instant::now();
        self.admission.raise_term(self.log.read(|state| state.term));
        Ok(())
    }

    /// The leader that the log has, if it leads a cluster: it is to learn that another one leads.
    pub fn followed(&self) -> Option<Followed> {
        let leader = self.log.read(leader);
        let leader = leader.filter(|l| !l.is_standalone && !l.address.is_empty())?;
        let Leader { incarnation, address, .. } = leader;
        Some(Followed { incarnation, address, has_led: self.has_led == incarnation })
    }

    /// Whether the leader that the log has answers, as the one that it is there.
    async fn ask_leader(&mut self) -> Answer {
        let Some(leader) = self.log.read(leader) else {
            self.admission.follow("");
            return Answer::Silent;
        };
        if leader.is_standalone {
            // It leads no cluster: there is nobody to be followed.
            self.admission.follow("");
            return match identification::is_there(&leader.address, leader.nonce, ANSWER).await {
                true => Answer::Leads,
                false => Answer::Silent,
            };
        }
        let said = match self.asker.meet(&leader.address).await {
            Met::Answers(said) => said,
            Met::OtherVersion(error) => {
                // Others find it there, and are told which version it speaks.
                self.admission.follow(&leader.address);
                return Answer::OtherVersion(other_version("meta", &leader.address, &error));
            }
            Met::Refuses(error) => {
                return Answer::Refuses(refused("the leader", &leader.address, &error));
            }
            Met::Nobody => return Answer::Silent,
        };
        self.admission.raise_term(said.term);
        if said.incarnation != leader.incarnation {
            return Answer::Silent;
        }
        self.admission.follow(&leader.address);
        self.admission.hear_leader();
        if said.leads {
            self.has_led = leader.incarnation;
        }
        // A claim needs the log's last record by the time that it is due, and to have seen that none comes.
        if said.log_wait < DOUBTFUL { Answer::Leads } else { Answer::Waits(said.log_wait) }
    }

    /// Asks the processes that have registered how long they have not heard of a leader. An error if one of them speaks
    /// another protocol version: what is told of it.
    async fn ask_voters(&self, voters: Vec<Voter>) -> Result<Votes, String> {
        let asked = voters.into_iter().map(|voter| async move {
            let met = self.asker.meet(&voter.address).await;
            (voter, met)
        });
        let mut votes = Votes::default();
        for (Voter { incarnation, address, role }, met) in join_all(asked).await {
            match met {
                Met::Answers(said) if said.incarnation == incarnation => {
                    votes.answers.push(said.leader_silence);
                }
                Met::OtherVersion(error) => return Err(other_version(role, &address, &error)),
                Met::Refuses(error) => {
                    let who = format!("the {role} process");
                    votes.refusals.push(refused(&who, &address, &error));
                }
                // Another one is there by now.
                Met::Answers(_) | Met::Nobody => {}
            }
        }
        Ok(votes)
    }

    /// How many of the others that stand by come before this one.
    async fn rank(&self) -> usize {
        let there = self.asker.ask_all(&self.metas).await.unwrap_or_default();
        there.iter().filter(|(address, said)| !said.leads && **address < self.own).count()
    }
}

#[cfg(test)]
mod tests;
