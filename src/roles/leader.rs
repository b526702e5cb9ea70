//! Where the leader is. Meta processes are asked by a handshake, which each answers whether it leads or not; of those
//! that say they lead, the one with the highest term does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use millrace_meta::LogFollower;
use millrace_meta::cluster::has_role;
use millrace_rpc::call_error::CallError;
use millrace_rpc::log::ProcessRole;
use millrace_rpc::remote::{Admission, CallLimits, Handshake, Identity, Peer};
use parking_lot::Mutex;
use tracing::{info, warn};

/// Between two looks while nobody leads.
const PAUSE: Duration = Duration::from_millis(200);
/// How often it is checked whether a higher term was met.
const CHECK: Duration = Duration::from_secs(1);
/// Of a handshake: whoever does not answer soon is not there.
const LIMITS: CallLimits = CallLimits {
    connect: Duration::from_millis(700),
    answer: Duration::from_millis(700),
    silence: Duration::from_millis(1_000),
    patience: Duration::ZERO,
};

/// Asks processes by their address who they are, and keeps the connections.
pub struct Asker {
    identity: Arc<Identity>,
    known: Mutex<BTreeMap<String, Peer>>,
}

impl Asker {
    pub fn new(identity: Arc<Identity>) -> Asker {
        Asker { identity, known: Mutex::default() }
    }

    pub async fn ask(&self, address: &str) -> Result<Handshake, CallError> {
        let known = self.known.lock().get(address).cloned();
        let peer = match known {
            Some(peer) => peer,
            None => {
                let peer = Peer::new(address, Arc::clone(&self.identity), LIMITS)?;
                self.known.lock().insert(address.to_owned(), peer.clone());
                peer
            }
        };
        peer.handshake().await
    }

    /// Those that answer, by address. Why one of them does not where nobody does.
    pub async fn ask_all(
        &self,
        addresses: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, Handshake>, CallError> {
        let answers =
            addresses.iter().map(|address| async move { (address, self.ask(address).await) });
        let (mut there, mut refused) = (BTreeMap::new(), None);
        for (address, answer) in join_all(answers).await {
            match answer {
                Ok(handshake) => _ = there.insert(address.clone(), handshake),
                Err(error @ CallError::Protocol { .. }) => refused = Some(error),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        match refused {
            Some(error) if there.is_empty() => Err(error),
            _ => Ok(there),
        }
    }
}

/// The leader that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub address: String,
    pub term: u64,
}

/// Finds the leader for a process that registers with it, and has its calls go there.
pub struct LeaderSearch {
    /// As `--meta` names them.
    metas: Vec<String>,
    log: Arc<LogFollower>,
    asker: Asker,
    identity: Arc<Identity>,
    admission: Arc<Admission>,
    /// The way to the leader.
    peer: Peer,
}

impl LeaderSearch {
    pub fn new(
        metas: &[String],
        log: &Arc<LogFollower>,
        identity: &Arc<Identity>,
        admission: &Arc<Admission>,
        peer: &Peer,
    ) -> LeaderSearch {
        LeaderSearch {
            metas: metas.to_vec(),
            log: Arc::clone(log),
            asker: Asker::new(Arc::clone(identity)),
            identity: Arc::clone(identity),
            admission: Arc::clone(admission),
            peer: peer.clone(),
        }
    }

    /// Looks once. Who leads, if somebody does: calls go there from now on. An error if nobody answers.
    pub async fn look(&self) -> Result<Option<Found>, CallError> {
        let mut asked: BTreeSet<String> = self.metas.iter().cloned().collect();
        asked.extend(self.log.read(|state| {
            let live = state.processes.live().values().map(|p| &p.registration);
            let metas = live.filter(|p| has_role(p, ProcessRole::Meta) && p.roles.len() == 1);
            metas.map(|p| p.address.clone()).filter(|a| !a.is_empty()).collect::<Vec<_>>()
        }));
        let mut there = self.asker.ask_all(&asked).await?;
        let named = there.values().map(|said| said.leader.clone());
        let named: BTreeSet<String> =
            named.filter(|leader| !leader.is_empty() && !asked.contains(leader)).collect();
        there.extend(self.asker.ask_all(&named).await.unwrap_or_default());
        let leading = there.into_iter().filter(|(_, said)| said.leads);
        let Some((address, said)) = leading.max_by_key(|(_, said)| said.term) else {
            return Ok(None);
        };
        self.identity.raise_term(said.term);
        self.admission.raise_term(said.term);
        self.admission.follow(&address);
        self.peer.redirect(&address)?;
        Ok(Some(Found { address, term: said.term }))
    }

    /// Looks again whenever a call finds no leader, or a higher term was met. Runs until it is dropped.
    pub async fn run(self, mut found: Found) {
        loop {
            tokio::select! {
                () = self.peer.troubled() => {}
                () = tokio::time::sleep(CHECK) => {
                    if self.admission.term() <= found.term {
                        continue;
                    }
                }
            }
            let (before, mut is_told) = (found.clone(), false);
            loop {
                match self.look().await {
                    Ok(Some(leader)) => {
                        found = leader;
                        break;
                    }
                    Ok(None) => {}
                    Err(error) if !is_told => {
                        is_told = true;
                        warn!(%error, "no meta process can be reached, trying again");
                    }
                    Err(_) => {}
                }
                tokio::time::sleep(PAUSE).await;
            }
            if found != before {
                info!(leader = found.address, term = found.term, "another process leads");
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}
