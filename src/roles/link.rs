//! The way to the leader: who this process is, and its registration.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::EnvHandle;
use millrace_meta::{LogFollower, ReadLease};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::MetaControl;
use millrace_rpc::log::{ProcessRole, RegisterProcess};
use millrace_rpc::remote::{Admission, CallLimits, Identity, Peer, RemoteMeta};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::beat::{LEAVING, leave};
use super::leader::{Found, LeaderSearch};
use super::store::{shown, tell_store};
use super::{Contact, refused};
use crate::standalone::StartError;

/// Between attempts to reach the leader.
const PAUSE: Duration = Duration::from_millis(500);
/// How long a registration may take; then the leader is looked for again, which may be another one by now.
const REGISTER: Duration = Duration::from_secs(5);
/// How long a statement waits for a leader that is not there, at most: longer than another one takes to begin.
const LEADER_PATIENCE: Duration = Duration::from_secs(15);
/// Attempts between two lines of the log that say that it does not answer.
const TOLD_EVERY: u32 = 3;

/// How a process is connected to the leader.
#[derive(Clone)]
pub struct Link {
    pub admission: Arc<Admission>,
    pub meta: Arc<RemoteMeta>,
    pub incarnation: u64,
    pub env: EnvHandle,
    /// For how long others keep what the process reads.
    pub lease: Arc<ReadLease>,
    /// Has calls go to whoever leads, until the last one that has it drops it.
    pub search: Arc<AbortOnDropHandle<()>>,
}

impl Link {
    /// Registers the process with the leader, for which it waits as long as it takes. It is one of `metas`, or one that
    /// they or the log name. Only meta processes of another protocol version are an error, and a leader that works on
    /// another object store: where this one has no log, nothing is begun there. [`StartError::Stopped`] when `stop` is
    /// cancelled meanwhile: the process is not registered then, as far as the leader can be told.
    pub async fn register(
        metas: &[String],
        role: ProcessRole,
        advertised: &Contact,
        log: &Arc<LogFollower>,
        env: &EnvHandle,
        stop: &CancellationToken,
    ) -> Result<Link, StartError> {
        Joining::new(metas, role, advertised, log, env)?.register(stop.clone()).await
    }

    /// The process ends, and has not begun to beat: the leader need not wait until it is lost.
    pub async fn leave(&self) {
        leave(&self.meta, self.incarnation).await;
    }
}

/// A process that has not registered yet. What it has of its link may be used already: calls of the leader wait for one.
pub struct Joining {
    pub identity: Arc<Identity>,
    pub meta: Arc<RemoteMeta>,
    pub lease: Arc<ReadLease>,
    admission: Arc<Admission>,
    metas: Vec<String>,
    search: LeaderSearch,
    process: RegisterProcess,
    log: Arc<LogFollower>,
    env: EnvHandle,
}

impl Joining {
    /// `log`: as far as the process knows it. An error if the first of `metas` is no address.
    pub fn new(
        metas: &[String],
        role: ProcessRole,
        advertised: &Contact,
        log: &Arc<LogFollower>,
        env: &EnvHandle,
    ) -> Result<Joining, StartError> {
        let identity = Arc::new(Identity::follower().with_tls(advertised.tls.clone()));
        let admission = Arc::new(Admission::default().with_tls(advertised.tls.clone()));
        let fences = Arc::clone(log);
        admission.follow_fences(move |incarnation| fences.is_fenced(incarnation));
        let limits = CallLimits { patience: LEADER_PATIENCE, ..CallLimits::default() };
        let first = metas.first().map(String::as_str).unwrap_or_default();
        let peer = Peer::new(first, Arc::clone(&identity), limits).map_err(refused)?;
        tell_store(log, &identity, &admission);
        let search = LeaderSearch::new(metas, log, &identity, &admission, &peer);
        let process = RegisterProcess {
            nonce: env.random().max(1),
            roles: vec![role as i32],
            address: advertised.address.clone(),
        };
        let meta = Arc::new(RemoteMeta::new(peer));
        let lease = Arc::new(ReadLease::unregistered(Arc::clone(log), env.clone()));
        let (metas, log, env) = (metas.to_vec(), Arc::clone(log), env.clone());
        Ok(Joining { identity, meta, lease, admission, metas, search, process, log, env })
    }

    /// As [`Link::register`].
    pub async fn register(mut self, stop: CancellationToken) -> Result<Link, StartError> {
        let mut attempts = 0;
        let (leader, incarnation, began) = loop {
            let began = self.env.since_boot();
            let registered = self.try_register(&stop).await.ok_or(StartError::Stopped)?;
            let error = match registered {
                Ok((leader, incarnation)) => break (leader, incarnation, began),
                Err(error) => error,
            };
            let pause = stop.run_until_cancelled(self.pause(error, &mut attempts)).await;
            pause.ok_or(StartError::Stopped)??;
        };
        let Joining { identity, meta, lease, admission, search, env, .. } = self;
        admission.hear_leader();
        identity.set_incarnation(incarnation);
        admission.set_incarnation(incarnation);
        lease.register(incarnation, began);
        let store_id = shown(identity.store());
        info!(incarnation, leader = leader.address, store_id, "registered");
        let search = Arc::new(AbortOnDropHandle::new(tokio::spawn(search.run(leader))));
        Ok(Link { admission, meta, incarnation, env, lease, search })
    }

    /// After an attempt that has failed; an error if another one is of no use.
    async fn pause(&mut self, error: CallError, attempts: &mut u32) -> Result<(), StartError> {
        match error {
            CallError::Protocol { .. } => return Err(refused(error)),
            CallError::OtherStore { leads: true, .. } => {
                match self.log.catch_up().await {
                    // The log has begun since it was read, or was given its id.
                    Ok(_) if tell_store(&self.log, &self.identity, &self.admission) => {}
                    Ok(_) => return Err(refused(error)),
                    Err(error) => {
                        warn!(%error, "the log cannot be read, trying again");
                        tokio::time::sleep(PAUSE).await;
                    }
                }
                return Ok(());
            }
            _ => {}
        }
        if attempts.is_multiple_of(TOLD_EVERY) {
            let metas = &self.metas;
            warn!(%error, ?metas, "a leader cannot be reached, trying again");
        }
        *attempts += 1;
        if self.identity.store().is_none() && self.log.catch_up().await.is_ok() {
            tell_store(&self.log, &self.identity, &self.admission);
        }
        if matches!(error, CallError::Sql(_)) {
            // An answer that came too late may have been followed by a fence, which holds for this number.
            self.process.nonce = self.env.random().max(1);
        }
        tokio::time::sleep(PAUSE).await;
        Ok(())
    }

    /// Once: who leads, and the incarnation that it has given. `None`: `stop` was cancelled before.
    async fn try_register(
        &self,
        stop: &CancellationToken,
    ) -> Option<Result<(Found, u64), CallError>> {
        let leader = match stop.run_until_cancelled(self.search.look()).await? {
            Ok(Some(leader)) => leader,
            Ok(None) => {
                let (leader, term) = (self.admission.leader(), self.admission.term());
                return Some(Err(CallError::NotLeader { leader, term }));
            }
            Err(error) => return Some(Err(error)),
        };
        let mut registered = self.meta.register_process(self.process.clone());
        let in_time = tokio::time::timeout(REGISTER, &mut registered);
        let ended = stop.run_until_cancelled(in_time).await;
        match ended {
            Some(Ok(registered)) => Some(registered.map(|incarnation| (leader, incarnation))),
            Some(Err(_)) => {
                let cause = format!("not registered within {} ms", REGISTER.as_millis());
                Some(Err(CallError::Unreachable { peer: leader.address, cause }))
            }
            None => {
                // The leader may have it in the log already, or be about to.
                if let Ok(Ok(incarnation)) = tokio::time::timeout(LEAVING, registered).await {
                    self.identity.set_incarnation(incarnation);
                    leave(&self.meta, incarnation).await;
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_meta::{Meta, MetaOptions};
    use millrace_rpc::remote::{LeaderSlot, Server};
    use millrace_storage::sim::{Faults, Profile, RequestKind, SimStore};
    use object_store::ObjectStore;
    use object_store::memory::InMemory;
    use tokio::net::TcpListener;

    use super::super::leader::tests::stranger;
    use super::super::peers::Peers;
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    /// A meta process that is about to lead.
    async fn candidate(store: &Arc<dyn ObjectStore>) -> (Arc<Meta>, Arc<Admission>) {
        let options = MetaOptions { alone: false, ..MetaOptions::new(Arc::clone(store)) };
        let meta = Meta::open(options).await.unwrap();
        let admission = Arc::<Admission>::default();
        let connect = Peers {
            identity: Arc::new(Identity::new(meta.term(), meta.incarnation())),
            admission: Arc::clone(&admission),
            fenced: Arc::default(),
        };
        meta.start_cluster(Arc::new(connect)).await.unwrap();
        (meta, admission)
    }

    /// It leads, and listens.
    fn lead(meta: &Arc<Meta>, admission: Arc<Admission>, listener: TcpListener) {
        admission.set_store(meta.store_id().unwrap());
        admission.set_incarnation(meta.incarnation());
        admission.lead(meta.term());
        let slot = Arc::<LeaderSlot>::default();
        assert!(slot.set(Arc::clone(meta) as Arc<dyn MetaControl>).is_ok());
        tokio::spawn(Server::new(admission).leader(slot).serve(listener));
    }

    #[tokio::test]
    async fn a_stranger_that_does_not_lead_keeps_no_process_from_registering() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let (meta, admission) = candidate(&store).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let metas = [stranger(false).await, listener.local_addr().unwrap().to_string()];
        let (env, stop) = (EnvHandle::default(), CancellationToken::new());
        let log = Arc::new(LogFollower::open(store, env.clone()).await.unwrap());
        let contact = Contact { address: String::new(), tls: None };
        let role = ProcessRole::Frontend;
        let registering = Link::register(&metas, role, &contact, &log, &env, &stop);
        let mut registering = std::pin::pin!(registering);
        let early = tokio::time::timeout(PAUSE * 4, &mut registering).await;
        assert!(early.is_err(), "it goes on to look for a leader");

        lead(&meta, admission, listener);
        let link = tokio::time::timeout(LIMIT, registering).await.unwrap().unwrap();
        assert!(meta.read_state(|state| state.processes.is_live(link.incarnation)));
        link.leave().await;
        assert!(!meta.read_state(|state| state.processes.is_live(link.incarnation)));
    }

    #[tokio::test]
    async fn who_is_stopped_while_it_registers_leaves() {
        let sim = SimStore::in_memory(Profile::INSTANT, 1);
        let store: Arc<dyn ObjectStore> = Arc::new(sim.clone());
        let (meta, admission) = candidate(&store).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let metas = [listener.local_addr().unwrap().to_string()];
        lead(&meta, admission, listener);
        let (env, stop) = (EnvHandle::default(), CancellationToken::new());
        let log = Arc::new(LogFollower::open(store, env.clone()).await.unwrap());

        // The leader waits for the record.
        sim.set_faults(Faults { hang: 1.0, only: Some(RequestKind::Put), ..Faults::default() });
        let stopped = stop.clone();
        let registering = tokio::spawn(async move {
            let contact = Contact { address: "127.0.0.1:1".to_owned(), tls: None };
            let role = ProcessRole::Compute;
            Link::register(&metas, role, &contact, &log, &env, &stopped).await.map(drop)
        });
        let ended = async {
            while sim.stats().faults == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            stop.cancel();
            sim.set_faults(Faults::default());
            while !registering.is_finished() {
                sim.answer_hung();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            registering.await.unwrap()
        };
        let ended = tokio::time::timeout(LIMIT, ended).await.unwrap();
        assert!(matches!(ended, Err(StartError::Stopped)), "{ended:?}");
        let (last, live) = meta.read_state(|state| {
            let live: Vec<u64> = state.processes.live().keys().copied().collect();
            (state.processes.last(), live)
        });
        assert!(last > meta.incarnation(), "it was in the log");
        assert_eq!(live, [meta.incarnation()]);
    }

    /// A process learns of fences by the log alone.
    #[tokio::test]
    async fn calls_of_a_process_that_the_log_has_fenced_are_refused() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let meta = Meta::open(MetaOptions::new(Arc::clone(&store))).await.unwrap();
        let env = EnvHandle::default();
        let log = Arc::new(LogFollower::open(store, env.clone()).await.unwrap());
        let contact = Contact { address: String::new(), tls: None };
        let metas = ["127.0.0.1:1".to_owned()];
        let joining = Joining::new(&metas, ProcessRole::Compute, &contact, &log, &env).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        // It serves nothing but that it leads, which it does not.
        let server = Server::new(Arc::clone(&joining.admission)).leader(Arc::default());
        tokio::spawn(server.serve(listener));
        let of = |incarnation| {
            let identity = Identity::new(meta.term(), incarnation);
            identity.set_store(meta.store_id().unwrap());
            let peer = Peer::new(&address, Arc::new(identity), CallLimits::default());
            RemoteMeta::new(peer.unwrap())
        };
        let (caller, newcomer) = (of(meta.incarnation()), of(0));
        let taken = caller.flush().await;
        assert!(matches!(taken, Err(CallError::NotLeader { .. })), "{taken:?}");
        meta.resign().await.unwrap();
        log.catch_up().await.unwrap();
        let refused = caller.flush().await;
        assert!(matches!(refused, Err(CallError::Fenced { .. })), "{refused:?}");
        let taken = newcomer.flush().await;
        assert!(matches!(taken, Err(CallError::NotLeader { .. })), "{taken:?}");
    }
}
