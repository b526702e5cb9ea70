//! Whether a frontend reaches the processes that tables run on. Statements that write go there and nowhere else, so at a
//! frontend that is cut off from one of them they fail for as long as that lasts, while others serve them: new sessions are
//! better off there, and whoever chooses a frontend by its health is told so.
//!
//! What is gone for all is no reason: that makes no frontend better than another, and what is committed can be read at all
//! of them. The leader fences a process that is gone, and nothing runs there any more. So a process that does not answer
//! this one counts as out of this one's reach only when the leader has had the time to fence it, and has not, and only
//! while a leader answers this frontend. A frontend that no leader hears of is fenced itself, and ends.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use millrace_meta::state::MetaState;
use millrace_meta::{LogFollower, ReadLease};
use millrace_rpc::call_error::CallError;
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::remote::{CallLimits, Identity, Peer};
use parking_lot::Mutex;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{info, warn};

/// Between two questions to a process.
const PERIOD: Duration = Duration::from_secs(1);
/// A process that has not answered for so long, and is not fenced, is out of reach: longer than the leader takes to fence one
/// that it does not reach or hear of (8 s at most, and a record).
const CUT_OFF: Duration = Duration::from_secs(10);
/// Of a question. A connection that is silent is given up before the question is, so that the next one connects anew.
const LIMITS: CallLimits = CallLimits {
    connect: Duration::from_secs(2),
    answer: Duration::from_secs(2),
    silence: Duration::from_secs(1),
    patience: Duration::ZERO,
};

/// The processes that have not answered, and since when, by incarnation.
#[derive(Debug, Default)]
struct Unreached(BTreeMap<u64, Instant>);

impl Unreached {
    /// These were asked then, and have answered or not. Others do not matter any more.
    fn note(&mut self, asked: &BTreeMap<u64, bool>, then: Instant) {
        self.0.retain(|incarnation, _| asked.get(incarnation) == Some(&false));
        for (incarnation, _) in asked.iter().filter(|(_, is_answered)| !**is_answered) {
            self.0.entry(*incarnation).or_insert(then);
        }
    }

    /// The one that has not answered for the longest time, if that is too long, and for how long. `is_led`: a leader answers
    /// this process, so one that is gone is fenced.
    fn cut_off(&self, now: Instant, is_led: bool) -> Option<(u64, Duration)> {
        let unreached = self.0.iter().map(|(id, since)| (*id, now.duration_since(*since)));
        let longest = unreached.max_by_key(|(_, unreached)| *unreached);
        longest.filter(|(_, unreached)| is_led && *unreached >= CUT_OFF)
    }
}

/// See the module.
pub struct TableReach {
    log: Arc<LogFollower>,
    lease: Arc<ReadLease>,
    identity: Arc<Identity>,
    unreached: Mutex<Unreached>,
}

impl TableReach {
    pub fn new(
        log: Arc<LogFollower>,
        lease: Arc<ReadLease>,
        identity: Arc<Identity>,
    ) -> TableReach {
        TableReach { log, lease, identity, unreached: Mutex::default() }
    }

    /// What keeps this frontend from writing to tables and, as far as it knows, not the others; `None`: nothing does.
    pub fn trouble(&self) -> Option<String> {
        let is_led = self.lease.is_answered();
        let (incarnation, unreached) = self.unreached.lock().cut_off(Instant::now(), is_led)?;
        let address = self.log.read(|state| {
            let process = state.processes.live().get(&incarnation)?;
            Some(process.registration.address.clone())
        })?;
        let seconds = unreached.as_secs();
        Some(format!(
            "process {incarnation} at {address}, which tables run on, has not answered this frontend for {seconds} s, and the leader has not fenced it: statements that write fail here, reads go on"
        ))
    }

    /// Asks the processes once a second, until it is dropped.
    pub async fn watch(self: Arc<TableReach>) {
        let mut peers = BTreeMap::new();
        let mut is_told = false;
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let began = Instant::now();
            let asked = self.ask(&mut peers).await;
            self.unreached.lock().note(&asked, began);
            let trouble = self.trouble();
            match &trouble {
                Some(trouble) if !is_told => warn!("{trouble}"),
                None if is_told => {
                    info!("this frontend is not cut off from a process of tables any more");
                }
                _ => {}
            }
            is_told = trouble.is_some();
        }
    }

    /// Whether each of the processes that tables run on answers.
    async fn ask(&self, peers: &mut BTreeMap<u64, Peer>) -> BTreeMap<u64, bool> {
        let places = self.log.read(places_of_tables);
        peers.retain(|incarnation, _| places.contains_key(incarnation));
        for (incarnation, address) in places {
            if peers.contains_key(&incarnation) {
                continue;
            }
            // Where it is no address, statements say so.
            if let Ok(peer) = Peer::new(&address, Arc::clone(&self.identity), LIMITS) {
                peers.insert(incarnation, peer);
            }
        }
        let questions = peers.iter().map(|(incarnation, peer)| async move {
            (*incarnation, is_answer(&peer.handshake().await.map(drop)))
        });
        join_all(questions).await.into_iter().collect()
    }
}

/// Whether somebody is there. Who refuses is, too.
fn is_answer(answer: &Result<(), CallError>) -> bool {
    let unreached = |error: &CallError| {
        matches!(error, CallError::Unreachable { .. } | CallError::NotConnected { .. })
    };
    !answer.as_ref().is_err_and(unreached)
}

/// The live processes that tables run on, and their addresses.
fn places_of_tables(state: &MetaState) -> BTreeMap<u64, String> {
    let tables = state.relations.iter().filter(|(_, r)| r.kind() == RelationKind::Table);
    let processes = tables.filter_map(|(id, _)| {
        let incarnation = state.jobs.get(id)?.process;
        let process = state.processes.live().get(&incarnation)?;
        Some((incarnation, process.registration.address.clone()))
    });
    processes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_process_is_out_of_reach_when_it_would_have_been_fenced_if_it_were_gone() {
        let mut unreached = Unreached::default();
        let began = Instant::now();
        let at = |seconds: u32| began + SECOND * seconds;
        let asked = |answers: &[(u64, bool)]| answers.iter().copied().collect::<BTreeMap<_, _>>();
        assert_eq!(unreached.cut_off(at(0), true), None);
        unreached.note(&asked(&[(7, false), (8, true)]), at(0));
        unreached.note(&asked(&[(7, false), (8, false)]), at(5));
        assert_eq!(unreached.cut_off(at(9), true), None, "the leader may fence it yet");
        assert_eq!(unreached.cut_off(at(10), true), Some((7, SECOND * 10)));
        assert_eq!(unreached.cut_off(at(10), false), None, "nobody would fence it");
        // It answers again; the other one is fenced, or has no tables any more.
        unreached.note(&asked(&[(7, true), (8, false)]), at(11));
        assert_eq!(unreached.cut_off(at(20), true), Some((8, SECOND * 15)));
        unreached.note(&asked(&[(7, true)]), at(21));
        assert_eq!(unreached.cut_off(at(60), true), None);
        // One answer in between is enough.
        unreached.note(&asked(&[(7, false)]), at(61));
        assert_eq!(unreached.cut_off(at(70), true), None);
    }

    #[test]
    fn who_refuses_is_there() {
        let (peer, cause) = ("a:1".to_owned(), "planted".to_owned());
        let silent = CallError::Unreachable { peer: peer.clone(), cause: cause.clone() };
        assert!(!is_answer(&Err(silent)));
        assert!(!is_answer(&Err(CallError::NotConnected { peer, cause })));
        let refused = CallError::Protocol { ours: 1, theirs: 2, build: String::new() };
        assert!(is_answer(&Err(refused)) && is_answer(&Ok(())));
    }
}
