//! The way to the leader: who this process is, and its registration.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::EnvHandle;
use millrace_meta::{LogFollower, ReadLease};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::MetaControl;
use millrace_rpc::log::{ProcessRole, RegisterProcess};
use millrace_rpc::remote::{Admission, CallLimits, Identity, Peer, RemoteMeta};
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::leader::LeaderSearch;
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

/// How a process is connected to the leader, and to others that the log names.
#[derive(Clone)]
pub struct Link {
    pub identity: Arc<Identity>,
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
    /// they or the log name. Only meta processes of another protocol version are an error, and those that work on
    /// another object store: where this one has no log, nothing is begun there.
    pub async fn register(
        metas: &[String],
        role: ProcessRole,
        advertised: &Contact,
        log: &Arc<LogFollower>,
        env: &EnvHandle,
    ) -> Result<Link, StartError> {
        let identity = Arc::new(Identity::follower().with_tls(advertised.tls.clone()));
        let admission = Arc::new(Admission::default().with_tls(advertised.tls.clone()));
        let limits = CallLimits { patience: LEADER_PATIENCE, ..CallLimits::default() };
        let first = metas.first().map(String::as_str).unwrap_or_default();
        let peer = Peer::new(first, Arc::clone(&identity), limits).map_err(refused)?;
        tell_store(log, &identity, &admission);
        let search = LeaderSearch::new(metas, log, &identity, &admission, &peer);
        let mut process = RegisterProcess {
            nonce: env.random().max(1),
            roles: vec![role as i32],
            address: advertised.address.clone(),
        };
        let remote = RemoteMeta::new(peer.clone());
        let mut attempts = 0;
        let (leader, incarnation, began) = loop {
            let began = env.since_boot();
            let registered = async {
                let Some(leader) = search.look().await? else {
                    let (leader, term) = (admission.leader(), admission.term());
                    return Err(CallError::NotLeader { leader, term });
                };
                let registered = remote.register_process(process.clone());
                match tokio::time::timeout(REGISTER, registered).await {
                    Ok(registered) => Ok((leader, registered?)),
                    Err(_) => {
                        let cause = format!("not registered within {} ms", REGISTER.as_millis());
                        Err(CallError::Unreachable { peer: leader.address, cause })
                    }
                }
            };
            match registered.await {
                Ok((leader, incarnation)) => break (leader, incarnation, began),
                Err(error @ CallError::Protocol { .. }) => return Err(refused(error)),
                Err(error @ CallError::OtherStore { .. }) => match log.catch_up().await {
                    // The log has begun since it was read, or was given its id.
                    Ok(_) if tell_store(log, &identity, &admission) => {}
                    Ok(_) => return Err(refused(error)),
                    Err(error) => {
                        warn!(%error, "the log cannot be read, trying again");
                        tokio::time::sleep(PAUSE).await;
                    }
                },
                Err(error) => {
                    if attempts % TOLD_EVERY == 0 {
                        warn!(%error, ?metas, "a leader cannot be reached, trying again");
                    }
                    attempts += 1;
                    if matches!(error, CallError::Sql(_)) {
                        // An answer that came too late may have been followed by a fence, which holds for this number.
                        process.nonce = env.random().max(1);
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        };
        admission.hear_leader();
        identity.set_incarnation(incarnation);
        admission.set_incarnation(incarnation);
        let store_id = shown(identity.store());
        info!(incarnation, leader = leader.address, store_id, "registered");
        let search = Arc::new(AbortOnDropHandle::new(tokio::spawn(search.run(leader))));
        let (meta, env) = (Arc::new(remote), env.clone());
        let lease = Arc::new(ReadLease::new(Arc::clone(log), env.clone(), incarnation, began));
        Ok(Link { identity, admission, meta, incarnation, env, lease, search })
    }

    /// The process at an address, of this incarnation only.
    pub fn peer(&self, address: &str, incarnation: u64) -> Result<Peer, CallError> {
        let peer = Peer::new(address, Arc::clone(&self.identity), CallLimits::default())?;
        Ok(peer.of_incarnation(incarnation))
    }
}
