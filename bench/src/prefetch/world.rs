//! A bucket with a query's state, built once, and servers on copies of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use millrace::{Config, Overrides, Standalone};
use millrace_common::RelationId;
use millrace_storage::sim::{Profile, SimStore};
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt};
use tempfile::TempDir;
use tokio_postgres::Client;

use super::args::Setting;
use super::modes::Mode;
use super::operators;
use super::queries::{Keys, Query};
use super::sparse;
use crate::cold::{settle_for, state_bytes};
use crate::nexmark::{connect, execute, temporary};

/// Rows of a statement of the load.
const LOAD_ROWS: u64 = 100_000;
/// Bytes of committed rows in memory beyond which they are written: while state is built little, so that it is in the
/// store; later as much as a server has.
const BUILD_FLUSH_BYTES: usize = 128 << 10;
const FLUSH_BYTES: usize = 16 << 20;
/// The garbage collector runs less often than that; its requests take no time from anyone.
const QUIET: Duration = Duration::from_secs(2);
/// How long state that does not come is waited for.
const SETTLES: Duration = Duration::from_secs(60);
/// Not what bounds the caches, which have sizes of their own. The process holds the buckets, too, and a server whose
/// process is near its limit drops hints.
const MEMORY_LIMIT: usize = 16 << 30;
/// The disk tier holds what was ever written while the state was built.
const DISK_BYTES: usize = 512 << 20;
const DISK_OPENS: Duration = Duration::from_secs(30);
/// Where a server keeps its disk tier, in its directory.
const DISK_DIRECTORY: &str = "cache";

pub struct World {
    pub query: &'static Query,
    pub keys: u64,
    /// Bytes of all views' runs.
    pub state: u64,
    /// Names of the views' operators for which rows inside the view can be looked at.
    inputs: Vec<String>,
    parallelism: usize,
    bucket: Arc<dyn ObjectStore>,
    /// The directory of the server that built the state, if it had a disk tier.
    disk: Option<TempDir>,
}

/// A server on a copy of the bucket.
pub struct Running {
    pub server: Standalone,
    pub client: Client,
    pub sim: SimStore,
    /// What it reads and writes, from the table to the result.
    pub relations: Vec<RelationId>,
    /// Memory for cold state, in bytes: half of it decoded blocks, the other half shared by the state caches, and what
    /// hints need.
    pub cache: usize,
    /// Of it, what hints may need.
    pub hints: usize,
    dir: TempDir,
}

/// What a server has that others have not.
struct Start {
    sim: SimStore,
    overrides: Overrides,
    flush_bytes: usize,
    disk_tier: bool,
    dir: TempDir,
}

impl World {
    /// Builds a query's state; with what a disk tier holds then, if one is asked for.
    pub async fn build(
        query: &'static Query,
        keys: u64,
        parallelism: usize,
        disk_tier: bool,
    ) -> Result<World, String> {
        let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let disk = if disk_tier { Some(temporary(None)?) } else { None };
        let inputs = Vec::new();
        let mut world = World { query, keys, state: 0, inputs, parallelism, bucket, disk };
        let dir = temporary(None)?;
        let sim = SimStore::new(Arc::clone(&world.bucket), Profile::INSTANT, 1);
        let overrides = Overrides::threads_apart();
        let start = Start { sim, overrides, flush_bytes: BUILD_FLUSH_BYTES, disk_tier, dir };
        let mut running = world.start(start).await?;
        world.fill(&running.client).await?;
        world.state = settled_state(query, &running).await?;
        running.relations = world.relations(&running)?;
        world.inputs = operators::with_input(&running);
        let dir = running.stop().await;
        if let Some(disk) = &world.disk {
            sparse::copy(&dir.path().join(DISK_DIRECTORY), disk.path())?;
        }
        match world.state {
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
            execute(client, &Query::insert(&Keys::in_turn(self.keys), &first, &last)).await?;
        }
        for view in self.query.create_views() {
            execute(client, &view).await?;
        }
        execute(client, "FLUSH").await
    }

    /// The table and the views, in the order in which rows take them.
    fn relations(&self, running: &Running) -> Result<Vec<RelationId>, String> {
        let catalog = running.server.meta.catalog();
        let views = self.query.views.iter().map(|(name, _)| *name);
        let id = |name: &str| {
            let relation = catalog.by_name("public", name).map(|r| RelationId(r.id));
            relation.ok_or_else(|| format!("{name} is not there"))
        };
        std::iter::once("events").chain(views).map(id).collect()
    }

    /// Whether the query can be run in a mode: rows inside a view can be looked at only where its plan has them.
    pub fn offers(&self, mode: &Mode) -> bool {
        let has = |operator: &str| self.inputs.iter().any(|own| own.eq_ignore_ascii_case(operator));
        mode.input_of().is_none_or(has)
    }

    /// The number of the first row that is not there yet.
    pub fn first_row(&self) -> u64 {
        self.keys * self.query.history
    }

    /// A server in a mode, with caches in memory that know nothing. In each round the store draws other latencies:
    /// medians of rounds that all draw the same ones would be of one sample.
    pub async fn copy(
        &self,
        mode: &Mode,
        setting: &Setting,
        round: u32,
    ) -> Result<Running, String> {
        let bucket = copied(&self.bucket).await?;
        let profile = mode.profile(setting.profile);
        let sim = SimStore::new(bucket, profile, u64::from(round) + 1).on_system_clock();
        let cache = (self.state as f64 / setting.state_to_cache) as usize;
        let caches = self.query.caches * self.parallelism;
        // What hints need is memory that the caches have less, but never more than half of it.
        let hints = mode.hint_bytes(self.query, self.parallelism);
        let left = cache.saturating_sub(hints).max(cache / 2);
        let exec = Some(mode.exec_options(left / 2 / caches, setting.threshold));
        let overrides = Overrides { exec, ..Overrides::threads_apart() };
        let dir = temporary(None)?;
        let disk_tier = setting.disk_tier && !mode.in_memory;
        if let Some(disk) = self.disk.as_ref().filter(|_| disk_tier) {
            sparse::copy(disk.path(), &dir.path().join(DISK_DIRECTORY))?;
        }
        let start = Start { sim, overrides, flush_bytes: FLUSH_BYTES, disk_tier, dir };
        let mut running = self.start(start).await?;
        running.cache = cache;
        running.hints = cache - left;
        if !mode.in_memory {
            let blocks = running.server.store.cache();
            blocks.set_memory_bytes(left / 2).map_err(|e| e.to_string())?;
        }
        running.relations = self.relations(&running)?;
        Ok(running)
    }

    async fn start(&self, start: Start) -> Result<Running, String> {
        let Start { sim, overrides, flush_bytes, disk_tier, dir } = start;
        let config = Config {
            memory_limit: MEMORY_LIMIT,
            parallelism: self.parallelism,
            disk_cache: if disk_tier { DISK_BYTES } else { 0 },
            ..Config::embedded(dir.path())
        };
        let overrides = Overrides {
            object_store: Some(Arc::new(sim.clone())),
            flush_bytes: Some(flush_bytes),
            ..overrides
        };
        let server = Standalone::start(config, overrides).await.map_err(|e| e.to_string())?;
        if disk_tier {
            until_open(&server).await?;
        }
        let client = connect(server.address.port()).await?;
        Ok(Running { server, client, sim, relations: Vec::new(), cache: 0, hints: 0, dir })
    }
}

/// Bytes of all views' runs, when no more come: views are created and runs are written in the background, and a busy
/// machine pauses.
async fn settled_state(query: &Query, running: &Running) -> Result<u64, String> {
    let begun = Instant::now();
    let mut last = 0;
    loop {
        settle_for(&running.sim, QUIET).await?;
        let each = query.views.iter().map(|(view, _)| state_bytes(&running.server, view));
        let state: u64 = each.sum::<Result<u64, String>>()?;
        if state > 0 && state == last || begun.elapsed() > SETTLES {
            return Ok(state);
        }
        last = state;
    }
}

/// The disk tier opens in the background.
async fn until_open(server: &Standalone) -> Result<(), String> {
    let begun = Instant::now();
    while !server.store.cache().has_disk() {
        if begun.elapsed() > DISK_OPENS {
            return Err("the disk tier does not open".to_owned());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// A copy of a bucket, in memory.
async fn copied(from: &Arc<dyn ObjectStore>) -> Result<Arc<dyn ObjectStore>, String> {
    let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let objects: Vec<_> = from.list(None).try_collect().await.map_err(|e| e.to_string())?;
    for object in objects {
        let found = from.get(&object.location).await.map_err(|e| e.to_string())?;
        let bytes = found.bytes().await.map_err(|e| e.to_string())?;
        let put = bucket.put(&object.location, bytes.into()).await;
        put.map_err(|e| e.to_string())?;
    }
    Ok(bucket)
}

impl Running {
    /// Stops the server; its directory.
    pub async fn stop(self) -> TempDir {
        drop(self.client);
        self.server.shutdown_with_threads().await;
        self.dir
    }

    /// Stops a server on a copy, whose objects go: tasks that a server leaves in this process may hold the bucket.
    pub async fn discard(self) -> Result<(), String> {
        let sim = self.sim.clone();
        self.stop().await;
        sim.set_profile(Profile::INSTANT);
        let objects: Vec<_> = sim.list(None).try_collect().await.map_err(|e| e.to_string())?;
        for object in objects {
            sim.delete(&object.location).await.map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Of the result.
    pub fn view(&self) -> RelationId {
        self.relations.last().copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_of_a_place_inside_a_view_is_one_for_queries_with_such_an_operator() {
        let offered = |inputs: &[&str]| {
            let world = World {
                query: Query::by_name("join3").unwrap(),
                keys: 1,
                state: 1,
                inputs: inputs.iter().map(|name| (*name).to_owned()).collect(),
                parallelism: 1,
                bucket: Arc::new(InMemory::new()),
                disk: None,
            };
            let modes = ["leaf", "join:input", "aggregate:input"];
            modes.map(|mode| world.offers(&Mode::by_name(mode).unwrap()))
        };
        assert_eq!(offered(&[]), [true, false, false]);
        assert_eq!(offered(&["Join"]), [true, true, false]);
        assert_eq!(offered(&["Aggregate", "Join"]), [true, true, true]);
    }
}
