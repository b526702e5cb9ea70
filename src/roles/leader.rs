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
use tokio::time::Instant;
use tracing::{info, warn};

use crate::port::{Speaks, speaks};

/// Between two looks while nobody leads.
const PAUSE: Duration = Duration::from_millis(200);
/// How often it is checked whether a higher term was met.
const CHECK: Duration = Duration::from_secs(1);
/// How often a leader that was deposed is told, if it does not answer.
const TELLS: u32 = 5;
/// Of a handshake: whoever does not answer soon is not there.
const LIMITS: CallLimits = CallLimits {
    connect: Duration::from_millis(700),
    answer: Duration::from_millis(700),
    silence: Duration::from_millis(1_000),
    patience: Duration::ZERO,
};

/// How long a port may take for the first byte of its answer: one that is being closed takes connections and says nothing.
const FIRST_BYTE: Duration = Duration::from_millis(250);

/// What is at an address.
#[derive(Clone, Debug)]
pub enum Met {
    Answers(Handshake),
    /// A process that speaks another protocol version, as it says.
    OtherVersion(CallError),
    /// Something that answers and does not talk with this process: one of both has no certificate, or one that the other
    /// does not take.
    Refuses(CallError),
    /// Nobody, or whoever is there belongs to another cluster.
    Nobody,
}

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

    /// What is at an address. Whoever does not answer in time is nobody.
    pub async fn meet(&self, address: &str) -> Met {
        let began = Instant::now();
        let error = match self.ask(address).await {
            Ok(said) => return Met::Answers(said),
            Err(error @ CallError::Protocol { .. }) => return Met::OtherVersion(error),
            Err(error) => error,
        };
        let is_connection =
            matches!(error, CallError::Unreachable { .. } | CallError::NotConnected { .. });
        if !is_connection || began.elapsed() >= LIMITS.answer {
            return Met::Nobody;
        }
        match speaks(address, FIRST_BYTE).await {
            Some(Speaks::Tls) => Met::Refuses(error),
            // Without TLS on both sides a process of the cluster would have answered.
            Some(Speaks::Http2) if self.identity.is_secured() => Met::Refuses(error),
            Some(Speaks::Http2) | None => Met::Nobody,
        }
    }

    /// Those that answer, by address, and why the others do not.
    pub async fn answers(
        &self,
        addresses: &BTreeSet<String>,
    ) -> (BTreeMap<String, Handshake>, BTreeMap<String, CallError>) {
        let answers =
            addresses.iter().map(|address| async move { (address, self.ask(address).await) });
        let (mut there, mut failed) = (BTreeMap::new(), BTreeMap::new());
        for (address, answer) in join_all(answers).await {
            match answer {
                Ok(handshake) => _ = there.insert(address.clone(), handshake),
                Err(error) => _ = failed.insert(address.clone(), error),
            }
        }
        (there, failed)
    }

    /// Those that answer, by address. Why one of them does not where nobody does.
    pub async fn ask_all(
        &self,
        addresses: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, Handshake>, CallError> {
        let (there, failed) = self.answers(addresses).await;
        match telling(failed.into_values()) {
            Some(error) if there.is_empty() => Err(error),
            _ => Ok(there),
        }
    }
}

/// The error that says most, the first of those that say as much.
fn telling(errors: impl Iterator<Item = CallError>) -> Option<CallError> {
    errors.min_by_key(|error| match error {
        CallError::OtherStore { leads: true, .. } => 0,
        CallError::Protocol { .. } => 1,
        CallError::OtherStore { .. } => 2,
        _ => 3,
    })
}

/// Has the process at this address, which led before, learn from a handshake of the term of `identity`, if it answers: it
/// ends then, and with it the calls that wait there. Returns its incarnation when it has answered that it leads no longer:
/// a call that comes there after that is refused.
pub async fn tell_deposed(address: &str, identity: &Arc<Identity>) -> Option<u64> {
    let asker = Asker::new(Arc::clone(identity));
    for _ in 0..TELLS {
        if let Ok(said) = asker.ask(address).await {
            return (!said.leads).then_some(said.incarnation);
        }
        tokio::time::sleep(PAUSE).await;
    }
    None
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

    /// Looks once. Who leads, if somebody does: calls go there from now on. An error if nobody answers, if nobody leads but
    /// a process of another protocol version, as those that answer name it, or if who leads works on another store than this
    /// process, as far as that has read its log. What is at an address that only the log names may belong to another cluster
    /// by now: it says nothing.
    pub async fn look(&self) -> Result<Option<Found>, CallError> {
        let mut asked: BTreeSet<String> = self.metas.iter().cloned().collect();
        asked.extend(self.log.read(|state| {
            let live = state.processes.live().values().map(|p| &p.registration);
            let metas = live.filter(|p| has_role(p, ProcessRole::Meta) && p.roles.len() == 1);
            metas.map(|p| p.address.clone()).filter(|a| !a.is_empty()).collect::<Vec<_>>()
        }));
        let is_old = |address: &String| asked.contains(address) && !self.metas.contains(address);
        let (mut there, mut failed) = self.asker.answers(&asked).await;
        if there.is_empty() {
            failed.retain(|address, _| !is_old(address));
            return telling(failed.into_values()).map_or(Ok(None), Err);
        }
        let named = there.values().map(|said| said.leader.clone());
        let named: BTreeSet<String> = named.filter(|leader| !leader.is_empty()).collect();
        let unasked = named.difference(&asked).cloned().collect();
        let (more, why_not) = self.asker.answers(&unasked).await;
        there.extend(more);
        failed.extend(why_not);
        let ours = self.identity.store();
        let is_elsewhere = |said: &Handshake| said.store.is_some() && said.store != ours;
        there.retain(|address, said| said.leads && !(is_elsewhere(said) && is_old(address)));
        let Some((address, said)) = there.into_iter().max_by_key(|(_, said)| said.term) else {
            let is_other = |error: &CallError| matches!(error, CallError::Protocol { .. });
            failed.retain(|address, error| named.contains(address) && is_other(error));
            return failed.into_values().next().map_or(Ok(None), Err);
        };
        if is_elsewhere(&said) {
            let (peer, theirs, leads) = (address, said.store, true);
            return Err(CallError::OtherStore { peer, ours, theirs, leads });
        }
        self.identity.raise_term(said.term);
        self.admission.raise_term(said.term);
        self.admission.follow(&address);
        self.peer.redirect(&address)?;
        Ok(Some(Found { address, term: said.term }))
    }

    /// Looks again whenever a call finds no leader, or one that the object store does not answer, or a higher term was met
    /// or is in the log. Runs until it is dropped.
    pub async fn run(self, mut found: Found) {
        loop {
            tokio::select! {
                () = self.peer.troubled() => {}
                () = tokio::time::sleep(CHECK) => {
                    let in_log = self.log.read(|state| state.term);
                    if self.admission.term().max(in_log) <= found.term {
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

#[cfg(test)]
pub mod tests {
    use millrace_common::EnvHandle;
    use millrace_meta::{Meta, MetaOptions};
    use millrace_rpc::call_error::PROTOCOL_VERSION;
    use millrace_rpc::control::{Heartbeat, MetaControl};
    use millrace_rpc::remote::{LeaderSlot, RemoteMeta, Server};
    use millrace_rpc::store_id::StoreId;
    use object_store::ObjectStore;
    use object_store::memory::InMemory;
    use tokio::net::TcpListener;
    use tokio_util::task::AbortOnDropHandle;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    /// A meta process that can lead, and where it listens.
    async fn may_lead(meta: &Arc<Meta>) -> (Arc<Admission>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (admission, slot) = (Arc::<Admission>::default(), Arc::<LeaderSlot>::default());
        assert!(slot.set(Arc::clone(meta) as Arc<dyn MetaControl>).is_ok());
        tokio::spawn(Server::new(Arc::clone(&admission)).leader(slot).serve(listener));
        (admission, address)
    }

    /// A meta process that answers so, and where it listens.
    pub async fn node(admission: Admission) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = Server::new(Arc::new(admission)).leader(Arc::default());
        tokio::spawn(server.serve(listener));
        address
    }

    /// One of the next protocol version.
    pub async fn node_of_next_version() -> String {
        node(Admission::default().speaking(PROTOCOL_VERSION + 1)).await
    }

    /// A meta process of another cluster, which may lead it, and where it listens.
    pub async fn stranger(leads: bool) -> String {
        let admission = Admission::default();
        admission.set_store(StoreId::new(7, 7));
        if leads {
            admission.lead(9);
        }
        node(admission).await
    }

    /// What a process finds that was told of these meta processes.
    async fn look(
        log: &Arc<LogFollower>,
        metas: &[&str],
        identity: Identity,
    ) -> Result<Option<Found>, CallError> {
        let identity = Arc::new(identity);
        let peer = Peer::new(NOBODY, Arc::clone(&identity), LIMITS).unwrap();
        let metas: Vec<String> = metas.iter().map(|meta| (*meta).to_owned()).collect();
        LeaderSearch::new(&metas, log, &identity, &Arc::default(), &peer).look().await
    }

    /// Where nobody listens.
    const NOBODY: &str = "127.0.0.1:1";

    #[tokio::test]
    async fn strangers_count_where_the_process_was_told_of_them_and_they_lead() {
        let (address, stands_by) = (stranger(true).await, stranger(false).await);
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        // It had the address before.
        let options = MetaOptions {
            alone: false,
            roles: vec![ProcessRole::Meta],
            address: address.clone(),
            ..MetaOptions::new(Arc::clone(&store))
        };
        drop(Meta::open(options).await.unwrap());
        let log = LogFollower::open(store, EnvHandle::default()).await.unwrap();
        let log = Arc::new(log);
        let knows = || {
            let identity = Identity::follower();
            identity.set_store(log.store_id().unwrap());
            identity
        };
        let of_log = look(&log, &[NOBODY], knows()).await;
        assert!(matches!(of_log, Err(CallError::NotConnected { .. })), "{of_log:?}");
        let of_log = look(&log, &[NOBODY], Identity::follower()).await;
        assert!(matches!(of_log, Ok(None)), "{of_log:?}");
        for identity in [knows(), Identity::follower()] {
            let led = look(&log, &[NOBODY, address.as_str()], identity).await;
            assert!(matches!(led, Err(CallError::OtherStore { leads: true, .. })), "{led:?}");
        }
        let stands_by = look(&log, &[stands_by.as_str()], knows()).await;
        assert!(
            matches!(stands_by, Err(CallError::OtherStore { leads: false, .. })),
            "{stands_by:?}"
        );
    }

    #[tokio::test]
    async fn a_leader_of_another_version_is_an_error_where_somebody_names_it() {
        let other = node_of_next_version().await;
        let follows = Admission::default();
        follows.follow(&other);
        let (follows, knows_nobody) = (node(follows).await, node(Admission::default()).await);
        let store = Arc::new(InMemory::new());
        let log = Arc::new(LogFollower::open(store, EnvHandle::default()).await.unwrap());
        let looked = async |metas: [&str; 2]| look(&log, &metas, Identity::follower()).await;
        for metas in [[follows.as_str(), NOBODY], [follows.as_str(), other.as_str()]] {
            let versions = match looked(metas).await {
                Err(CallError::Protocol { ours, theirs, .. }) => (ours, theirs),
                led => panic!("{led:?}"),
            };
            assert_eq!(versions, (PROTOCOL_VERSION, PROTOCOL_VERSION + 1));
        }
        let led = looked([knows_nobody.as_str(), other.as_str()]).await;
        assert!(matches!(led, Ok(None)), "it may not lead: {led:?}");
    }

    /// A process that follows the first of two that can lead, and neither hears of the second.
    struct Test {
        store: Arc<dyn ObjectStore>,
        meta: Arc<Meta>,
        log: Arc<LogFollower>,
        peer: Peer,
        first: (Arc<Admission>, String),
        second: (Arc<Admission>, String),
        _search: AbortOnDropHandle<()>,
    }

    impl Test {
        async fn start() -> Test {
            let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let meta = Meta::open(MetaOptions::new(Arc::clone(&store))).await.unwrap();
            let (first, second) = (may_lead(&meta).await, may_lead(&meta).await);
            first.0.lead(1);
            let log = LogFollower::open(Arc::clone(&store), EnvHandle::default()).await.unwrap();
            let (log, identity) = (Arc::new(log), Arc::new(Identity::follower()));
            let peer = Peer::new(&first.1, Arc::clone(&identity), CallLimits::default()).unwrap();
            let metas = [first.1.clone(), second.1.clone()];
            let search = LeaderSearch::new(&metas, &log, &identity, &Arc::default(), &peer);
            let found = search.look().await.unwrap().unwrap();
            assert_eq!(found, Found { address: first.1.clone(), term: 1 });
            second.0.lead(2);
            let search = AbortOnDropHandle::new(tokio::spawn(search.run(found)));
            Test { store, meta, log, peer, first, second, _search: search }
        }

        async fn finds_the_second(&self) {
            let redirected = self.peer.redirected_from(&self.first.1);
            tokio::time::timeout(LIMIT, redirected).await.unwrap();
            assert_eq!(*self.peer.address(), *self.second.1);
        }
    }

    #[tokio::test]
    async fn another_leader_is_found_though_the_one_before_answers() {
        let test = Test::start().await;
        test.first.0.set_log_wait(Duration::from_secs(5));
        let incarnation = test.meta.incarnation();
        let heartbeat = Heartbeat { incarnation, ..Heartbeat::default() };
        RemoteMeta::new(test.peer.clone()).beat(heartbeat).await.unwrap();
        test.finds_the_second().await;
    }

    /// Its successor need not wait for its lease: no call that comes later is answered.
    #[tokio::test]
    async fn a_leader_that_hears_of_its_successor_has_stopped() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let meta = Meta::open(MetaOptions::new(store)).await.unwrap();
        let (admission, address) = may_lead(&meta).await;
        admission.lead(1);
        admission.set_incarnation(7);
        let tell = async |term| tell_deposed(&address, &Arc::new(Identity::new(term, 9))).await;
        assert_eq!(tell(1).await, None, "it leads on");
        assert_eq!(tell(2).await, Some(7));
        let identity = Arc::new(Identity::follower());
        let peer = Peer::new(&address, identity, CallLimits::default()).unwrap();
        let asked = RemoteMeta::new(peer).beat(Heartbeat::default()).await;
        assert!(matches!(asked, Err(CallError::NotLeader { .. })), "{asked:?}");
    }

    #[tokio::test]
    async fn another_leader_is_found_when_the_log_has_it() {
        let test = Test::start().await;
        let next = Meta::open(MetaOptions::new(Arc::clone(&test.store))).await.unwrap();
        assert_eq!(next.term(), 2);
        test.log.catch_up().await.unwrap();
        test.finds_the_second().await;
    }
}
