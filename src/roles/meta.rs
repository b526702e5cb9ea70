//! `millrace meta`: the leader of a cluster. It has the log; jobs run on compute processes.

use std::fmt::Write;
use std::fs::File;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use millrace_common::access::AccessClass;
use millrace_common::collections::HashMap;
use millrace_common::{JobId, SqlError};
use millrace_graph::codec::decode_graph;
use millrace_meta::processes::ProcessStatus;
use millrace_meta::{Connect, Meta, MetaOptions};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::MetaControl;
use millrace_rpc::log::ProcessRole;
use millrace_rpc::remote::{
    Admission, CallLimits, Identity, Peer, RemoteCompactor, RemoteCompute, Server,
};
use millrace_rpc::services::{CompactorService, ComputeService, MetaService};
use millrace_storage::read_counts::TableReads;
use parking_lot::Mutex;

use super::metrics::{Metrics, MetricsPort};
use super::options::RoleConfig;
use super::{Ground, Serving};
use crate::standalone::{
    Overrides, StartError, meta_options, own_secret, set_root_password, take_lead, tell_start,
};

/// A running leader.
pub struct MetaProcess {
    pub meta: Arc<Meta>,
    pub address: SocketAddr,
    serving: Serving,
    _port: MetricsPort,
    _lock: File,
}

impl MetaProcess {
    pub async fn start(
        config: RoleConfig,
        overrides: Overrides,
    ) -> Result<MetaProcess, StartError> {
        let began = Instant::now();
        let ground = Ground::prepare(&config, &overrides).await?;
        let meta = take_lead(&config.process, &overrides, || options(&config, &overrides, &ground));
        let meta = meta.await?;
        let tls = ground.advertised.tls.clone();
        let admission = Arc::new(Admission::default().with_tls(tls.clone()));
        admission.raise_term(meta.term());
        admission.set_incarnation(meta.incarnation());
        let identity = Identity::new(meta.term(), meta.incarnation());
        let identity = Arc::new(identity.with_tls(tls));
        let fenced = Arc::<AtomicU64>::default();
        let admission_of_peers = Arc::clone(&admission);
        let connect =
            Peers { identity, admission: admission_of_peers, fenced: Arc::clone(&fenced) };
        meta.start_cluster(Arc::new(connect)).await?;
        set_root_password(&config.process.access, &meta).await?;
        // Frontends find it in the log.
        let _ = own_secret(&meta, false).await;
        let server = Server::new(Arc::clone(&admission));
        let server = server.meta(Arc::clone(&meta) as Arc<dyn MetaControl>);
        let serving = Serving::start(&admission, server, ground.listener);
        let of_log = Arc::clone(&meta);
        let metrics = Metrics::new("meta", meta.incarnation()).with(
            "millrace_log_records_total",
            "counter",
            "Records of the log.",
            move || of_log.record(),
        );
        let of_processes = Arc::clone(&meta);
        let metrics = metrics
            .with(
                "millrace_processes_fenced_total",
                "counter",
                "Processes that this one has fenced.",
                move || fenced.load(Ordering::Relaxed),
            )
            .with_text(move |text| write_behind(&of_processes, text));
        let port = MetricsPort::open(&config.process, metrics).await?;
        tell_start(&config.process, &meta, began);
        Ok(MetaProcess { meta, address: ground.address, serving, _port: port, _lock: ground.lock })
    }

    /// Completes when this process may no longer lead.
    pub async fn ended(&self) -> String {
        self.meta.deposed().await.to_string()
    }

    pub async fn shutdown(self) {
        self.serving.end().await;
        self.meta.shutdown().await;
    }
}

fn options(config: &RoleConfig, overrides: &Overrides, ground: &Ground) -> MetaOptions {
    let object_store = Arc::clone(&ground.object_store);
    let (no_store, no_tail) = (Arc::default(), Arc::default());
    let options = meta_options(&config.process, overrides, object_store, &no_store, &no_tail);
    let classes = Arc::<Classes>::default();
    let late = Arc::clone(&classes);
    MetaOptions {
        alone: false,
        roles: vec![ProcessRole::Meta],
        address: ground.advertised.address.clone(),
        table_class: Arc::new(move |job, table| classes.of(job, table)),
        table_reads: Arc::new(|_, _| TableReads::MANY),
        pinned: Arc::new(|_| false),
        // Who opens the jobs reads their slices.
        recovering: None,
        opened: Some(Box::new(move |meta| drop(late.meta.set(Arc::downgrade(meta))))),
        ..options
    }
}

/// How state tables are used, by the graphs of their jobs.
#[derive(Default)]
struct Classes {
    meta: OnceLock<std::sync::Weak<Meta>>,
    /// By job; of a job's tables in the order of their ids.
    known: Mutex<HashMap<JobId, Arc<Vec<AccessClass>>>>,
}

impl Classes {
    fn of(&self, job: JobId, table: u32) -> AccessClass {
        let class = || {
            let meta = self.meta.get()?.upgrade()?;
            let version = meta.version(job)?;
            let first = meta.catalog().relation(job)?.first_table_id;
            let classes = self.classes(&meta, job)?;
            let mut positions = 0..classes.len() as u32;
            let position = positions.find(|p| version.state_table(first, *p) == table)?;
            classes.get(position as usize).copied()
        };
        class().unwrap_or(AccessClass::PointUpdate)
    }

    fn classes(&self, meta: &Meta, job: JobId) -> Option<Arc<Vec<AccessClass>>> {
        if let Some(known) = self.known.lock().get(&job) {
            return Some(Arc::clone(known));
        }
        let graph = decode_graph(&MetaService::graph(meta, job)?).ok()?;
        let classes = Arc::new(graph.tables.iter().map(|t| t.class).collect::<Vec<_>>());
        self.known.lock().insert(job, Arc::clone(&classes));
        Some(classes)
    }
}

/// How far each process is behind the log, for Prometheus.
fn write_behind(meta: &Meta, text: &mut String) {
    let name = "millrace_process_records_behind";
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "# HELP {name} Records of the log that the process has not applied yet.\n# TYPE {name} gauge"
    );
    let last = meta.record();
    for ProcessStatus { incarnation, process, applied } in meta.processes() {
        let role = process.registration.roles().next().unwrap_or_default();
        let role = format!("{role:?}").to_lowercase();
        let behind = last.saturating_sub(applied);
        let _ = writeln!(text, "{name}{{incarnation=\"{incarnation}\",role=\"{role}\"}} {behind}");
    }
}

/// The way to the processes that have registered.
struct Peers {
    identity: Arc<Identity>,
    admission: Arc<Admission>,
    /// How many.
    fenced: Arc<AtomicU64>,
}

impl Peers {
    fn peer(&self, address: &str, incarnation: u64) -> Result<Peer, SqlError> {
        let peer = Peer::new(address, Arc::clone(&self.identity), CallLimits::default());
        Ok(peer.map_err(|e: CallError| SqlError::from(e))?.of_incarnation(incarnation))
    }
}

impl Connect for Peers {
    fn compute(
        &self,
        address: &str,
        incarnation: u64,
    ) -> Result<Arc<dyn ComputeService>, SqlError> {
        Ok(Arc::new(RemoteCompute::new(self.peer(address, incarnation)?)))
    }

    fn compactor(
        &self,
        address: &str,
        incarnation: u64,
    ) -> Result<Arc<dyn CompactorService>, SqlError> {
        Ok(Arc::new(RemoteCompactor::new(self.peer(address, incarnation)?)))
    }

    fn fenced(&self, incarnation: u64) {
        self.admission.fence(incarnation);
        self.fenced.fetch_add(1, Ordering::Relaxed);
    }
}
