//! The way to the leader, for a program that takes no part in the cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use millrace_rpc::call_error::CallError;
use millrace_rpc::remote::{CallLimits, Handshake, Identity, Peer, RemoteOperator};
use tokio::time::Instant;

use super::CtlOptions;
use crate::config::ConfigError;
use crate::roles::leader::Asker;
use crate::roles::{ClusterFlags, meta_addresses, tls};
use crate::standalone::described;

/// How long it is waited for somebody to lead: longer than another process takes to begin.
const PATIENCE: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(300);

/// The leader, and the meta processes that have answered.
pub struct Connection {
    pub leader: RemoteOperator,
    metas: BTreeMap<String, Handshake>,
}

impl Connection {
    /// Finds the leader among the meta processes that were named, and those that they name. An error says why not.
    pub async fn open(options: &CtlOptions) -> Result<Connection, String> {
        let asked = meta_addresses(&options.meta).map_err(|e| e.to_string())?;
        let asked: BTreeSet<String> = asked.into_iter().collect();
        if asked.is_empty() {
            let name = "--meta";
            let why = "the addresses of the meta processes, of which one leads";
            return Err(ConfigError::Missing { name, why }.to_string());
        }
        let flags = ClusterFlags {
            rpc_tls_cert: options.rpc_tls_cert.clone(),
            rpc_tls_key: options.rpc_tls_key.clone(),
            rpc_tls_ca: options.rpc_tls_ca.clone(),
            ..ClusterFlags::default()
        };
        let files = flags.rpc_tls().map_err(|e| e.to_string())?;
        let files = files.map(|files| tls::load_files(&files, None)).transpose();
        let tls = files.map_err(|e| e.to_string())?;
        let identity = Arc::new(Identity::follower().with_tls(tls));
        let asker = Asker::new(Arc::clone(&identity));
        let deadline = Instant::now() + PATIENCE;
        loop {
            let metas = ask_all(&asker, &asked).await.map_err(|e| nobody(&asked, e))?;
            let leading = metas.iter().filter(|(_, said)| said.leads);
            if let Some((address, said)) = leading.max_by_key(|(_, said)| said.term) {
                identity.raise_term(said.term);
                let peer = Peer::new(address, identity, CallLimits::default());
                let peer = peer.map_err(|e| described(&e.into()))?;
                return Ok(Connection { leader: RemoteOperator::new(peer), metas });
            }
            if Instant::now() >= deadline {
                let there: Vec<&str> = metas.keys().map(String::as_str).collect();
                return Err(format!(
                    "no meta process leads: {} answered, and none of them has taken the lead within {} s",
                    there.join(", "),
                    PATIENCE.as_secs()
                ));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Meta processes that do not lead.
    pub fn standing_by(&self) -> impl Iterator<Item = &String> {
        self.metas.iter().filter(|(_, said)| !said.leads).map(|(address, _)| address)
    }
}

/// Those that answer, and the leaders that they name.
async fn ask_all(
    asker: &Asker,
    asked: &BTreeSet<String>,
) -> Result<BTreeMap<String, Handshake>, CallError> {
    let mut there = asker.ask_all(asked).await?;
    let named = there.values().map(|said| said.leader.clone());
    let named: BTreeSet<String> =
        named.filter(|leader| !leader.is_empty() && !asked.contains(leader)).collect();
    there.extend(asker.ask_all(&named).await.unwrap_or_default());
    Ok(there)
}

fn nobody(asked: &BTreeSet<String>, error: CallError) -> String {
    let addresses: Vec<&str> = asked.iter().map(String::as_str).collect();
    format!("no meta process answers at {}: {}", addresses.join(", "), described(&error.into()))
}
