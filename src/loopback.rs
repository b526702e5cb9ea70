//! How the roles of a standalone server call each other: by reference, or as the processes of a cluster do, with every
//! call, answer and message encoded and decoded again. The second is for tests: whatever tests a standalone server then
//! tests the messages of a cluster, the followers that read what the log names, and the adapters of the services.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use millrace_common::{EnvHandle, RelationId, SqlError};
use millrace_executor::Worker;
use millrace_frontend::cluster::Cluster;
use millrace_frontend::local_cluster::Direct;
use millrace_frontend::remote_cluster::{RemoteCluster, RemoteOptions, TableProcess, TableRoutes};
use millrace_meta::{LogFollower, Meta};
use millrace_rpc::control::{Heartbeat, MetaControl};
use millrace_rpc::dml::DmlService;
use millrace_rpc::loopback::Encoded;
use millrace_rpc::read::ReadService;
use millrace_rpc::remote::RemoteMeta;
use millrace_rpc::services::{CompactorService, ComputeService, MetaService};
use millrace_storage::{StateStore, VersionFollower};
use object_store::ObjectStore;
use serde::Deserialize;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use crate::roles::elsewhere::FollowedInputs;
use crate::roles::frontend::{close_idle, follow};
use crate::roles::reports::worker_reports;
use crate::roles::upstream::{Following, Upstream};
use crate::standalone::StartError;

/// Between two heartbeats of the worker and the frontend.
const PERIOD: Duration = Duration::from_secs(1);

/// How the roles of one process call each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Loopback {
    /// By reference
    #[default]
    Direct,
    /// Through bytes, as the processes of a cluster do; for tests
    Encode,
}

/// The roles of one process, which do not know each other yet.
pub(crate) struct Roles {
    pub meta: Arc<Meta>,
    pub store: Arc<StateStore>,
    pub worker: Arc<Worker>,
    pub compactor: Arc<dyn CompactorService>,
}

/// What sessions need of the other roles.
pub(crate) struct Joined {
    pub cluster: Arc<dyn Cluster>,
    /// What keeps it up to date, until this is dropped.
    pub following: Vec<AbortOnDropHandle<()>>,
}

impl Roles {
    /// Introduces the roles to each other and starts all jobs.
    pub async fn join(
        self,
        loopback: Loopback,
        bucket: &Arc<dyn ObjectStore>,
        env: &EnvHandle,
    ) -> Result<Joined, StartError> {
        match loopback {
            Loopback::Direct => self.join_directly().await,
            Loopback::Encode => self.join_through_bytes(bucket, env).await,
        }
    }

    async fn join_directly(self) -> Result<Joined, StartError> {
        let Roles { meta, store, worker, compactor } = self;
        worker.set_meta(Arc::clone(&meta) as Arc<dyn MetaService>);
        meta.start(Arc::clone(&worker) as Arc<dyn ComputeService>, compactor).await?;
        let cluster = Arc::new(Direct::new(meta, store, worker));
        Ok(Joined { cluster, following: Vec::new() })
    }

    /// Worker and frontend follow the log each for itself, as in processes of their own; they share the store and its
    /// caches.
    async fn join_through_bytes(
        self,
        bucket: &Arc<dyn ObjectStore>,
        env: &EnvHandle,
    ) -> Result<Joined, StartError> {
        let Roles { meta, store, worker, compactor } = self;
        let incarnation = meta.incarnation();
        let leader = Arc::new(Encoded::meta(Arc::clone(&meta) as Arc<dyn MetaControl>));
        let follower = opened(bucket, env).await?;
        let versions = Arc::new(VersionFollower::new(&store));
        let upstream = Upstream { follower: Arc::clone(&follower), meta: Arc::clone(&leader) };
        worker.set_meta(Arc::new(upstream) as Arc<dyn MetaService>);
        let inputs = FollowedInputs {
            follower: Arc::clone(&follower),
            versions: Arc::clone(&versions),
            incarnation,
        };
        let compute = Following {
            follower: Arc::clone(&follower),
            worker: Arc::clone(&worker),
            inputs: Arc::new(inputs),
        };
        let compute = Encoded::compute(Arc::new(compute) as Arc<dyn ComputeService>);
        meta.start(Arc::new(compute), Arc::new(Encoded::compactor(compactor))).await?;

        let log = opened(bucket, env).await?;
        let dml = Encoded::dml(Arc::clone(&worker) as Arc<dyn DmlService>);
        let reads = Encoded::reads(Arc::clone(&worker) as Arc<dyn ReadService>);
        let process = TableProcess { incarnation, dml: Arc::new(dml), reads: Arc::new(reads) };
        let cluster = Arc::new(RemoteCluster::new(RemoteOptions {
            log: Arc::clone(&log),
            versions: Arc::clone(&versions),
            meta: Arc::clone(&leader) as Arc<dyn MetaControl>,
            routes: Arc::new(Here(process)),
            env: env.clone(),
            settings: BTreeMap::new(),
            lease: None,
        }));
        let beating = Beating {
            leader: Arc::clone(&leader),
            store,
            worker,
            follower,
            log: Arc::clone(&log),
            versions: Arc::clone(&versions),
            cluster: Arc::clone(&cluster),
        };
        let following = vec![
            spawned(follow(log, leader)),
            spawned(close_idle(versions)),
            spawned(beating.run()),
        ];
        Ok(Joined { cluster, following })
    }
}

async fn opened(
    bucket: &Arc<dyn ObjectStore>,
    env: &EnvHandle,
) -> Result<Arc<LogFollower>, SqlError> {
    Ok(Arc::new(LogFollower::open(Arc::clone(bucket), env.clone()).await?))
}

fn spawned(work: impl Future<Output = ()> + Send + 'static) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(work))
}

/// All tables run in this process.
struct Here(TableProcess);

impl TableRoutes for Here {
    fn process_of(&self, _: RelationId) -> Result<TableProcess, SqlError> {
        Ok(self.0.clone())
    }
}

/// What the leader is told of worker and frontend, in one heartbeat, since they are one process.
struct Beating {
    leader: Arc<RemoteMeta>,
    store: Arc<StateStore>,
    worker: Arc<Worker>,
    /// The worker's.
    follower: Arc<LogFollower>,
    /// The frontend's.
    log: Arc<LogFollower>,
    versions: Arc<VersionFollower>,
    cluster: Arc<RemoteCluster>,
}

impl Beating {
    async fn run(self) {
        loop {
            if let Err(error) = self.leader.beat(self.heartbeat()).await {
                warn!(%error, "a heartbeat was refused");
            }
            // The console and the metrics show what was told last.
            if let Err(error) = self.cluster.refresh_reports().await {
                warn!(%error, "the leader does not tell how jobs are");
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    fn heartbeat(&self) -> Heartbeat {
        let applied = self.log.number();
        // Asked later than `applied`: what is dropped after that is not deleted before the next heartbeat.
        let pinned = self.versions.pinned();
        Heartbeat {
            incarnation: self.store.incarnation(),
            applied,
            reads_from: pinned.epoch.map(|epoch| epoch.0),
            pinned: pinned.objects.into_iter().collect(),
            jobs: worker_reports(&self.worker, &self.store, &self.follower),
            ..Heartbeat::default()
        }
    }
}
