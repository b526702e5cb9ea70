//! A bucket with a query's state, built once, and servers on copies of it.

use std::sync::Arc;

use futures::TryStreamExt;
use millrace::{Config, Overrides, Standalone};
use millrace_common::RelationId;
use millrace_storage::sim::{Profile, SimStore};
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt};
use tempfile::TempDir;
use tokio_postgres::Client;

use super::modes::Mode;
use super::queries::Query;
use crate::cold::{settle_for, state_bytes};
use crate::nexmark::{connect, execute, temporary};

/// Rows of a statement of the load.
const LOAD_ROWS: u64 = 100_000;
/// Bytes of committed rows in memory beyond which they are written: while state is built little, so that it is in the
/// store; later as much as a server has.
const BUILD_FLUSH_BYTES: usize = 128 << 10;
const FLUSH_BYTES: usize = 16 << 20;
/// The garbage collector runs less often than that; its requests take no time from anyone.
const QUIET: std::time::Duration = std::time::Duration::from_secs(2);
const MEMORY_LIMIT: usize = 1 << 30;

pub struct World {
    pub query: &'static Query,
    pub keys: u64,
    /// Bytes of all views' runs.
    pub state: u64,
    /// Memory for cold state: half of it decoded blocks, the other half shared by the state caches.
    pub cache: usize,
    parallelism: usize,
    bucket: Arc<dyn ObjectStore>,
}

/// A server on a copy of the bucket.
pub struct Running {
    pub server: Standalone,
    pub client: Client,
    pub sim: SimStore,
    /// What it reads and writes, from the table to the result.
    pub relations: Vec<RelationId>,
    _dir: TempDir,
}

impl World {
    /// Builds a query's state; the caches may hold `share` times less.
    pub async fn build(
        query: &'static Query,
        keys: u64,
        share: u64,
        parallelism: usize,
    ) -> Result<World, String> {
        let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut world = World { query, keys, state: 0, cache: 0, parallelism, bucket };
        let sim = SimStore::new(Arc::clone(&world.bucket), Profile::INSTANT, 1);
        let running = world.start(sim, Overrides::threads_apart(), BUILD_FLUSH_BYTES).await?;
        world.fill(&running.client).await?;
        settle_for(&running.sim, QUIET).await?;
        for (view, _) in query.views {
            world.state += state_bytes(&running.server, view)?;
        }
        running.stop().await;
        world.cache = (world.state / share.max(1)) as usize;
        match world.cache {
            0 => Err(format!("the state of {} is not in the store: more keys", query.name)),
            _ => Ok(world),
        }
    }

    async fn fill(&self, client: &Client) -> Result<(), String> {
        for table in self.query.tables() {
            execute(client, &table).await?;
        }
        for d in 0..self.query.dimensions {
            for first in (0..self.keys).step_by(LOAD_ROWS as usize) {
                let last = (first + LOAD_ROWS).min(self.keys) - 1;
                execute(client, &Query::load(d, self.keys, first, last)).await?;
            }
        }
        let history = self.first_row();
        for first in (0..history).step_by(LOAD_ROWS as usize) {
            let last = (first + LOAD_ROWS).min(history) - 1;
            let (first, last) = (format!("{first}::bigint"), format!("{last}::bigint"));
            execute(client, &Query::insert(self.keys, &first, &last)).await?;
        }
        for view in self.query.create_views() {
            execute(client, &view).await?;
        }
        execute(client, "FLUSH").await
    }

    /// The number of the first row that is not there yet.
    pub fn first_row(&self) -> u64 {
        self.keys * self.query.history
    }

    /// A server in a mode, with caches that know nothing.
    pub async fn copy(&self, mode: &Mode, profile: Profile) -> Result<Running, String> {
        let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let objects: Vec<_> =
            self.bucket.list(None).try_collect().await.map_err(|e| e.to_string())?;
        for object in objects {
            let found = self.bucket.get(&object.location).await.map_err(|e| e.to_string())?;
            let bytes = found.bytes().await.map_err(|e| e.to_string())?;
            let put = bucket.put(&object.location, bytes.into()).await;
            put.map_err(|e| e.to_string())?;
        }
        let sim = SimStore::new(bucket, mode.profile(profile), 1);
        let caches = self.query.caches * self.parallelism;
        let exec = Some(mode.exec_options(self.cache / 2 / caches));
        let overrides = Overrides { exec, ..Overrides::threads_apart() };
        let mut running = self.start(sim, overrides, FLUSH_BYTES).await?;
        if !mode.in_memory {
            let blocks = running.server.store.cache();
            blocks.set_memory_bytes(self.cache / 2).map_err(|e| e.to_string())?;
        }
        let catalog = running.server.meta.catalog();
        for name in std::iter::once("events").chain(self.query.views.iter().map(|(n, _)| *n)) {
            let relation = catalog.by_name("public", name).map(|r| RelationId(r.id));
            running.relations.push(relation.ok_or_else(|| format!("{name} is not there"))?);
        }
        Ok(running)
    }

    async fn start(
        &self,
        sim: SimStore,
        overrides: Overrides,
        flush_bytes: usize,
    ) -> Result<Running, String> {
        let dir = temporary(None)?;
        let config = Config {
            memory_limit: MEMORY_LIMIT,
            parallelism: self.parallelism,
            ..Config::embedded(dir.path())
        };
        let overrides = Overrides {
            object_store: Some(Arc::new(sim.clone())),
            flush_bytes: Some(flush_bytes),
            ..overrides
        };
        let server = Standalone::start(config, overrides).await.map_err(|e| e.to_string())?;
        let client = connect(server.address.port()).await?;
        Ok(Running { server, client, sim, relations: Vec::new(), _dir: dir })
    }
}

impl Running {
    pub async fn stop(self) {
        drop(self.client);
        self.server.shutdown().await;
    }

    /// Of the result.
    pub fn view(&self) -> RelationId {
        self.relations.last().copied().unwrap_or_default()
    }
}
