//! Whether the server is still there from which this process would take the lead.
//!
//! Taking over from a server that works does no harm to data, but ends it: that is for the operator to decide. So whoever
//! starts on an object store that has a leader asks it first, where the log says that it is: a server that runs all roles
//! at its SQL port ([`millrace_frontend::identification`]), the processes of a cluster by a handshake. One that does not
//! answer counts as dead.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt};
use millrace_common::{SqlError, SqlState};
use millrace_frontend::identification::is_there;
use millrace_meta::cluster::has_role;
use millrace_meta::state::MetaState;
use millrace_meta::{MayClaim, Meta};
use millrace_rpc::call_error::CallError;
use millrace_rpc::log::{ProcessRole, RegisterProcess};
use millrace_rpc::remote::{CallLimits, Identity, Peer};
use parking_lot::Mutex;

use crate::leadership::Leadership;
use crate::port::{Speaks, speaks};

/// How long a server that runs all roles may take to answer; it may be about to start.
const LIMIT: Duration = Duration::from_secs(3);
/// Of a handshake: whoever does not answer soon is not there.
const LIMITS: CallLimits = CallLimits {
    connect: Duration::from_millis(1_500),
    answer: Duration::from_millis(1_500),
    silence: Duration::from_millis(2_000),
    patience: Duration::ZERO,
};
const TAKE_OVER: &str = "Stop it first, give another --object-store, or let this server take over with --take-over: the other one ends then.";

/// A process that the log has, and that may still be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Predecessor {
    /// Runs all roles.
    Standalone { address: String, nonce: u64 },
    /// Of a cluster.
    Process { address: String, incarnation: u64, role: &'static str },
}

/// Whether a registration is that of a server that runs all roles.
pub fn is_standalone(process: &RegisterProcess) -> bool {
    has_role(process, ProcessRole::Meta) && has_role(process, ProcessRole::Frontend)
}

/// The processes that the log has and that `own`, the file of this process's data directory, does not prove to be dead:
/// those that take calls.
pub fn predecessors(state: &MetaState, own: &Leadership) -> Vec<Predecessor> {
    let live = state.processes.live().iter().map(|(id, process)| (*id, &process.registration));
    let unknown = live.filter(|(_, p)| !p.address.is_empty() && !own.proves_dead(p.nonce));
    unknown.filter_map(|(incarnation, process)| of(incarnation, process)).collect()
}

fn of(incarnation: u64, process: &RegisterProcess) -> Option<Predecessor> {
    let address = process.address.clone();
    if is_standalone(process) {
        return Some(Predecessor::Standalone { address, nonce: process.nonce });
    }
    let role = match process.roles().next()? {
        ProcessRole::Meta => "meta",
        ProcessRole::Compute => "compute",
        ProcessRole::Compactor => "compactor",
        // Its address is for clients.
        ProcessRole::Frontend | ProcessRole::Unspecified => return None,
    };
    Some(Predecessor::Process { address, incarnation, role })
}

impl Predecessor {
    /// Whether it answers.
    pub async fn is_there(&self) -> bool {
        match self {
            Predecessor::Standalone { address, nonce } => is_there(address, *nonce, LIMIT).await,
            Predecessor::Process { address, incarnation, .. } => {
                match handshake(address, Identity::follower()).await {
                    Ok(answered) => answered == *incarnation,
                    // Of another release, or one that talks only to those who prove who they are.
                    Err(CallError::Protocol { .. }) => true,
                    Err(_) => speaks(address, LIMITS.answer).await == Some(Speaks::Tls),
                }
            }
        }
    }

    /// Why this process does not start, and what to do.
    pub fn refusal(&self, hint: &str) -> SqlError {
        let message = match self {
            Predecessor::Standalone { address, .. } => {
                format!("the server at {address} uses this object store, and answers")
            }
            Predecessor::Process { address, role, .. } => {
                format!("a cluster uses this object store: its {role} process at {address} answers")
            }
        };
        SqlError::new(SqlState::OBJECT_IN_USE, message).with_hint(hint)
    }
}

/// Asks those that the log has, and keeps them in `found`. `takes_over`: whoever answers.
pub fn may_claim(
    own: Leadership,
    found: Arc<Mutex<Vec<Predecessor>>>,
    takes_over: bool,
) -> MayClaim {
    Box::new(move |state| {
        let before = predecessors(state, &own);
        found.lock().clone_from(&before);
        let ask = async move {
            if takes_over {
                return Ok(());
            }
            match first_there(before).await {
                Some(there) => Err(there.refusal(TAKE_OVER)),
                None => Ok(()),
            }
        };
        ask.boxed()
    })
}

/// The first of them that answers.
pub async fn first_there(predecessors: Vec<Predecessor>) -> Option<Predecessor> {
    let asked = predecessors.into_iter().map(|one| async move {
        let is_there = one.is_there().await;
        is_there.then_some(one)
    });
    let mut asked: FuturesUnordered<_> = asked.collect();
    while let Some(answered) = asked.next().await {
        if answered.is_some() {
            return answered;
        }
    }
    None
}

/// Has those learn of it from which this process has taken the lead, so that they end although they have nothing to do.
pub async fn tell(predecessors: Vec<Predecessor>, meta: Arc<Meta>) {
    let (term, incarnation, store) = (meta.term(), meta.incarnation(), meta.store_id());
    let told = predecessors.iter().map(|one| async move {
        match one {
            Predecessor::Standalone { address, nonce } => {
                _ = is_there(address, *nonce, LIMIT).await
            }
            Predecessor::Process { address, .. } => {
                let identity = Identity::new(term, incarnation);
                if let Some(store) = store {
                    identity.set_store(store);
                }
                _ = handshake(address, identity).await;
            }
        }
    });
    join_all(told).await;
}

/// The incarnation of the process that answers at an address. It learns the term of the caller.
async fn handshake(address: &str, caller: Identity) -> Result<u64, CallError> {
    Ok(Peer::new(address, Arc::new(caller), LIMITS)?.handshake().await?.incarnation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::tests::expects_tls;

    fn registered(roles: &[ProcessRole], address: &str) -> RegisterProcess {
        let roles = roles.iter().map(|role| *role as i32).collect();
        RegisterProcess { nonce: 7, roles, address: address.to_owned() }
    }

    #[test]
    fn those_are_asked_that_take_calls() {
        use ProcessRole::{Compute, Frontend, Meta};
        let all = registered(&[Meta, Frontend, Compute], "a:1");
        let expected = Predecessor::Standalone { address: "a:1".into(), nonce: 7 };
        assert_eq!(of(3, &all), Some(expected));
        let expected =
            Predecessor::Process { address: "a:1".into(), incarnation: 3, role: "compute" };
        assert_eq!(of(3, &registered(&[Compute], "a:1")), Some(expected));
        assert_eq!(of(3, &registered(&[Frontend], "a:1")), None, "it is a port of clients");
    }

    #[tokio::test]
    async fn nobody_answers_at_an_address_that_is_free() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let dead = Predecessor::Standalone { address: address.clone(), nonce: 7 };
        let process = Predecessor::Process { address, incarnation: 3, role: "meta" };
        assert_eq!(first_there(vec![dead, process]).await, None);
        assert_eq!(first_there(Vec::new()).await, None);
    }

    #[tokio::test]
    async fn what_expects_tls_is_there() {
        let address = expects_tls().await;
        let process = Predecessor::Process { address, incarnation: 3, role: "meta" };
        assert_eq!(first_there(vec![process.clone()]).await, Some(process));
    }
}
