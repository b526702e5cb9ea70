//! The heartbeat of a process: once a second it tells the leader that it is there, how far it is and what it reads. Where
//! the leader does not answer, the log is asked whether the process has been fenced.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::EnvHandle;
use millrace_meta::{LeaseError, ReadLease};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::{Heartbeat, MetaControl};
use millrace_rpc::remote::{Admission, RemoteMeta};
use millrace_storage::given_up::GivenUp;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::Ending;
use super::link::Link;
use super::lookups::Lookups;
use crate::usage::UsageSource;

const PERIOD: Duration = Duration::from_secs(1);
/// Names of objects in one heartbeat.
const NAMES: usize = 1_000;

/// What a process tells of itself beside its incarnation; the number is the leader's last record, as it said last.
pub type Told = Box<dyn Fn(u64) -> Heartbeat + Send + Sync>;

/// How long the log may take to tell whether the process has been fenced.
const LOG_PATIENCE: Duration = Duration::from_secs(10);
/// How long the leader is told for that the process ends.
pub const LEAVING: Duration = Duration::from_secs(2);

/// Runs until it is dropped, or the process is told that it is fenced.
pub struct Beat {
    meta: Arc<RemoteMeta>,
    incarnation: u64,
    tasks: [AbortOnDropHandle<()>; 2],
    /// For as long as the process beats, and until it has left.
    _search: Arc<AbortOnDropHandle<()>>,
}

impl Beat {
    /// `lookups` and `usage`: where its lookups, and its caches and requests, are read.
    pub fn start(
        link: &Link,
        given_up: Arc<GivenUp>,
        told: Told,
        lookups: Lookups,
        usage: UsageSource,
        ending: Ending,
    ) -> Beat {
        let beating = Beating {
            meta: Arc::clone(&link.meta),
            admission: Arc::clone(&link.admission),
            incarnation: link.incarnation,
            env: link.env.clone(),
            lease: Arc::clone(&link.lease),
            given_up,
            told,
            lookups,
            usage,
            ending: ending.clone(),
            period: PERIOD,
        };
        let watched = watch(Arc::clone(&link.lease), ending);
        let tasks = [tokio::spawn(beating.run()), tokio::spawn(watched)];
        let tasks = tasks.map(AbortOnDropHandle::new);
        let (meta, search) = (Arc::clone(&link.meta), Arc::clone(&link.search));
        Beat { meta, incarnation: link.incarnation, tasks, _search: search }
    }

    /// The process ends: the leader need not wait until it is lost.
    pub async fn leave(self) {
        let Beat { meta, incarnation, tasks, _search: search } = self;
        drop(tasks);
        leave(&meta, incarnation).await;
        drop(search);
    }
}

/// Tells the leader that a process ends that has been given this incarnation.
pub async fn leave(meta: &RemoteMeta, incarnation: u64) {
    let heartbeat = Heartbeat { incarnation, leaving: true, ..Heartbeat::default() };
    match tokio::time::timeout(LEAVING, meta.beat(heartbeat)).await {
        Ok(Ok(_) | Err(CallError::Fenced { .. })) => {}
        Ok(Err(error)) => warn!(%error, "the meta process was not told that this one ends"),
        Err(_) => warn!("the meta process has not answered that this one ends"),
    }
}

/// Ends the process if the log has fenced it, although no leader tells it.
async fn watch(lease: Arc<ReadLease>, ending: Ending) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error @ LeaseError::Fenced { .. }) = lease.check(LOG_PATIENCE).await {
            ending.end(error.to_string());
            return;
        }
    }
}

struct Beating {
    meta: Arc<RemoteMeta>,
    admission: Arc<Admission>,
    incarnation: u64,
    env: EnvHandle,
    lease: Arc<ReadLease>,
    given_up: Arc<GivenUp>,
    told: Told,
    lookups: Lookups,
    usage: UsageSource,
    ending: Ending,
    period: Duration,
}

impl Beating {
    async fn run(self) {
        let mut ticks = tokio::time::interval(self.period);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut record, mut is_lost) = (0, false);
        loop {
            ticks.tick().await;
            let names = self.given_up.take(NAMES);
            let lookups = self.lookups.take();
            let heartbeat = Heartbeat {
                incarnation: self.incarnation,
                given_up: names.clone(),
                clock_ms: self.env.now_ms(),
                usage: Some(self.usage.read()),
                lookups: lookups.clone(),
                ..(self.told)(record)
            };
            let leader = self.meta.peer().address();
            let began = self.env.since_boot();
            match self.meta.beat(heartbeat).await {
                Ok(at) => {
                    self.admission.hear_leader();
                    self.lease.renew(began);
                    record = at;
                    is_lost = false;
                }
                Err(CallError::Fenced { incarnation }) => {
                    self.ending.end(format!("process {incarnation} has been fenced"));
                    return;
                }
                // One that works on another store has the address of a leader of ours, with whom this process has
                // registered: whoever leads now is being looked for.
                Err(error) => {
                    // Told again with the next one. Lookups that are counted twice do no harm.
                    self.given_up.add(names);
                    self.lookups.put_back(lookups);
                    if self.meta.peer().address() != leader {
                        // The one that has not answered leads no longer. The next one need not wait for its heartbeat.
                        ticks.reset_immediately();
                        continue;
                    }
                    if !is_lost {
                        warn!(%error, "the meta process does not take heartbeats");
                    }
                    is_lost = true;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_meta::LogFollower;
    use millrace_rpc::remote::{CallLimits, Identity, Peer};
    use millrace_rpc::store_id::StoreId;
    use object_store::memory::InMemory;
    use tokio::sync::mpsc;

    use super::super::leader::tests::stranger;
    use super::*;

    /// The process has registered with a leader of its own store, which had the address before.
    #[tokio::test]
    async fn a_stranger_at_the_leader_s_address_ends_no_process() {
        let address = stranger(true).await;
        let identity = Arc::new(Identity::follower());
        identity.set_store(StoreId::new(1, 1));
        let peer = Peer::new(&address, identity, CallLimits::default()).unwrap();
        let env = EnvHandle::default();
        let log = LogFollower::open(Arc::new(InMemory::new()), env.clone()).await.unwrap();
        let (beats, mut beaten) = mpsc::unbounded_channel();
        let ending = Ending::default();
        let beating = Beating {
            meta: Arc::new(RemoteMeta::new(peer)),
            admission: Arc::default(),
            incarnation: 7,
            lease: Arc::new(ReadLease::unregistered(Arc::new(log), env.clone())),
            env,
            given_up: Arc::default(),
            told: Box::new(move |_| {
                let _ = beats.send(());
                Heartbeat::default()
            }),
            lookups: Lookups::default(),
            usage: UsageSource::default(),
            ending: ending.clone(),
            period: Duration::from_millis(1),
        };
        let _beating = AbortOnDropHandle::new(tokio::spawn(beating.run()));
        for _ in 0..50 {
            beaten.recv().await.expect("it goes on");
        }
        assert!(!ending.token.is_cancelled());
    }
}
