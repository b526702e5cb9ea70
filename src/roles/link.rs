//! The way to the leader: who this process is, and its registration.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::Env;
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::MetaControl;
use millrace_rpc::log::{ProcessRole, RegisterProcess};
use millrace_rpc::remote::{Admission, CallLimits, Identity, Peer, RemoteMeta};
use tracing::{info, warn};

use super::{Contact, refused};
use crate::standalone::StartError;

/// Between attempts to reach the leader.
const PAUSE: Duration = Duration::from_millis(500);
/// How long a statement waits for a leader that is not there, at most.
const LEADER_PATIENCE: Duration = Duration::from_secs(9);
/// Attempts between two lines of the log that say that it does not answer.
const TOLD_EVERY: u32 = 3;

/// How a process is connected to the leader, and to others that the log names.
#[derive(Clone)]
pub struct Link {
    pub identity: Arc<Identity>,
    pub admission: Arc<Admission>,
    pub meta: Arc<RemoteMeta>,
    pub incarnation: u64,
}

impl Link {
    /// Registers the process with the leader, for which it waits as long as it takes. A leader of another protocol
    /// version is an error.
    pub async fn register(
        meta: &str,
        role: ProcessRole,
        advertised: &Contact,
        env: &dyn Env,
    ) -> Result<Link, StartError> {
        let identity = Arc::new(Identity::follower().with_tls(advertised.tls.clone()));
        let admission = Arc::new(Admission::default().with_tls(advertised.tls.clone()));
        let limits = CallLimits { patience: LEADER_PATIENCE, ..CallLimits::default() };
        let peer = Peer::new(meta, Arc::clone(&identity), limits).map_err(refused)?;
        let process = RegisterProcess {
            nonce: env.random().max(1),
            roles: vec![role as i32],
            address: advertised.address.clone(),
        };
        let remote = RemoteMeta::new(peer.clone());
        let mut attempts = 0;
        let incarnation = loop {
            let registered = async {
                let handshake = peer.handshake().await?;
                identity.set_term(handshake.term);
                admission.raise_term(handshake.term);
                remote.register_process(process.clone()).await
            };
            match registered.await {
                Ok(incarnation) => break incarnation,
                Err(error @ CallError::Protocol { .. }) => return Err(refused(error)),
                Err(error) => {
                    if attempts % TOLD_EVERY == 0 {
                        warn!(%error, meta, "the meta process cannot be reached, trying again");
                    }
                    attempts += 1;
                    tokio::time::sleep(PAUSE).await;
                }
            }
        };
        identity.set_incarnation(incarnation);
        admission.set_incarnation(incarnation);
        info!(incarnation, meta, "registered");
        Ok(Link { identity, admission, meta: Arc::new(remote), incarnation })
    }

    /// The process at an address, of this incarnation only.
    pub fn peer(&self, address: &str, incarnation: u64) -> Result<Peer, CallError> {
        let peer = Peer::new(address, Arc::clone(&self.identity), CallLimits::default())?;
        Ok(peer.of_incarnation(incarnation))
    }
}
