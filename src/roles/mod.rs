//! The roles of a cluster as processes of their own (docs/design.md §10): `millrace meta`, `compute`, `compactor` and
//! `frontend`, over one bucket.
//!
//! Of any number of meta processes one leads, and the others stand by. Each process but these registers with the leader,
//! tells it once a second that it is there, and ends when it has been fenced: whoever started it starts it again, as
//! another incarnation.

mod beat;
mod compactor;
mod compute;
mod console;
pub(crate) mod elsewhere;
mod ended;
pub(crate) mod frontend;
mod hindrance;
pub(crate) mod leader;
mod link;
mod lookups;
mod meta;
mod metrics;
mod options;
mod peers;
mod reach;
mod registered;
pub(crate) mod reports;
mod results;
mod standby;
pub(crate) mod store;
mod store_watch;
mod table_classes;
pub(crate) mod tls;
pub(crate) mod upstream;

use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;

use millrace_common::SqlError;
use millrace_connector::paths::Limited;
use millrace_rpc::call_error::CallError;
use millrace_rpc::remote::{Admission, Server, Tls};
use millrace_storage::object::Metered;
use object_store::ObjectStore;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub use self::compactor::CompactorProcess;
pub use self::compute::ComputeProcess;
pub use self::frontend::FrontendProcess;
pub use self::meta::MetaProcess;
pub(crate) use self::options::meta_addresses;
pub use self::options::{Auth, ClusterFlags, ClusterOptions, Role, RoleConfig, RpcTlsFiles};
use crate::config::Config;
use crate::listen::{bind, is_local, limit_paths};
use crate::standalone::{OpenedStore, Overrides, StartError, lock, open_store};

/// Where others reach a process, and what it proves to them who it is with.
struct Contact {
    address: String,
    /// `None`: calls are neither encrypted nor authenticated.
    tls: Option<Tls>,
}

/// What every process of a cluster begins with.
struct Ground {
    object_store: Arc<dyn ObjectStore>,
    listener: TcpListener,
    /// Where it listens.
    address: SocketAddr,
    advertised: Contact,
    /// Counts the requests to the object store, where it is this process's own.
    requests: Option<Arc<Metered>>,
    lock: File,
}

impl Ground {
    async fn prepare(config: &RoleConfig, overrides: &Overrides) -> Result<Ground, StartError> {
        tell_unheeded_password(config);
        let Config { data_dir, listen, .. } = &config.process;
        let lock = lock(data_dir)?;
        let (listener, address) = bind(listen).await?;
        let takes_calls = config.role != Role::Frontend;
        let is_secured = config.rpc_tls.is_some() || config.insecure_rpc;
        if takes_calls && !is_secured && !is_local(&[Some(address)]) {
            return Err(StartError::InsecureRpc { address: address.to_string() });
        }
        let reached = reached_at(config, address)?;
        limit_files(config, &reached)?;
        let advertised = Contact { tls: tls::load(config, &reached)?, address: reached };
        let (object_store, requests): OpenedStore = open_store(&config.process, overrides)?;
        Ok(Ground { object_store, listener, address, advertised, requests, lock })
    }
}

/// Frontends and compute processes open files: in directories that are named, and no others. None of them knows from its
/// own flags who may come in at the frontends.
fn limit_files(config: &RoleConfig, reached: &str) -> Result<(), StartError> {
    match config.role {
        Role::Frontend | Role::Compute => {
            let limited =
                Limited::Process { role: config.role.name(), address: reached.to_owned() };
            limit_paths(&config.process.access, limited, false)
        }
        // They open none, and the directories need not be there.
        Role::Meta | Role::Compactor => Ok(()),
    }
}

/// One environment and one file may serve all processes, so that this is no error; but whoever gives the password to a
/// frontend alone expects it to be set.
fn tell_unheeded_password(config: &RoleConfig) {
    if config.role != Role::Meta && config.process.access.root_password.is_some() {
        tracing::warn!(
            "MILLRACE_ROOT_PASSWORD, or root-password of the config file, has no meaning here: meta processes set it"
        );
    }
}

/// Where others reach a process that listens at this address. Of a process that listens at all addresses of its machine
/// nothing is guessed: others may reach it at some of them only, and its certificate and the leader's log name one.
fn reached_at(config: &RoleConfig, listens: SocketAddr) -> Result<String, StartError> {
    match &config.process.advertise {
        Some(advertised) => Ok(advertised.clone()),
        None if listens.ip().to_canonical().is_unspecified() => {
            Err(StartError::NotAdvertised { address: listens.to_string() })
        }
        None => Ok(listens.to_string()),
    }
}

/// A server of calls from other processes. Dropping it ends it.
struct Serving {
    admission: Arc<Admission>,
    task: JoinHandle<()>,
}

impl Serving {
    fn start(admission: &Arc<Admission>, server: Server, listener: TcpListener) -> Serving {
        let serve = async move {
            if let Err(error) = server.serve(listener).await {
                tracing::error!(%error, "calls of other processes are not served any more");
            }
        };
        Serving { admission: Arc::clone(admission), task: tokio::spawn(serve) }
    }

    /// Answers what is under way, within reason.
    async fn end(mut self) {
        self.admission.stop();
        let _ = tokio::time::timeout(std::time::Duration::from_secs(2), &mut self.task).await;
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.admission.stop();
        self.task.abort();
    }
}

/// Why a process ends by itself.
#[derive(Clone, Debug)]
struct Ending {
    token: CancellationToken,
    reason: Arc<std::sync::OnceLock<String>>,
}

impl Default for Ending {
    fn default() -> Ending {
        Ending { token: CancellationToken::new(), reason: Arc::default() }
    }
}

impl Ending {
    /// The first reason stays.
    fn end(&self, reason: String) {
        let _ = self.reason.set(reason);
        self.token.cancel();
    }

    async fn ended(&self) -> String {
        self.token.cancelled().await;
        self.reason.get().cloned().unwrap_or_default()
    }
}

/// What a person is told of a call that a process cannot start without.
fn refused(error: CallError) -> StartError {
    StartError::Meta(SqlError::from(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_listens_at_all_addresses_says_where_others_reach_it() {
        let dir = tempfile::tempdir().unwrap();
        for role in [Role::Meta, Role::Frontend, Role::Compute, Role::Compactor] {
            let reached = |listens: &str, advertise: Option<&str>| {
                let advertise = advertise.map(str::to_owned);
                let config = RoleConfig {
                    role,
                    process: Config { advertise, ..Config::embedded(dir.path()) },
                    metas: Vec::new(),
                    insecure_rpc: false,
                    rpc_tls: None,
                    auth: Auth::default(),
                };
                reached_at(&config, listens.parse().unwrap()).map_err(|e| e.to_string())
            };
            assert_eq!(reached("10.0.0.2:4571", None).unwrap(), "10.0.0.2:4571");
            for all in ["0.0.0.0:4571", "[::]:4571", "[::ffff:0.0.0.0]:4571"] {
                let error = reached(all, None).unwrap_err();
                assert!(error.starts_with(all), "{error}");
                assert!(error.contains("--advertise HOST:PORT"), "{error}");
                assert_eq!(reached(all, Some("compute-1:4571")).unwrap(), "compute-1:4571");
            }
        }
    }
}
