//! A cluster in this process, with a view whose state is built to a size.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace::roles::{Auth, ComputeProcess, FrontendProcess, MetaProcess, Role, RoleConfig};
use millrace::{Config, Overrides};
use millrace_common::{EnvHandle, RelationId};
use millrace_meta::LogFollower;
use millrace_rpc::version::JobVersion;
use millrace_storage::sim::{Profile, SimStore};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use tempfile::TempDir;
use tokio_postgres::Client;

use super::host::Host;
use crate::nexmark::{connect, execute, temporary};
use crate::sums;

/// Of each process. The state is never larger than what is in the store; caches begin cold.
const MEMORY_LIMIT: usize = 1 << 30;
const PARALLELISM: usize = 2;
/// How often commits are made that nobody waits for.
const BARRIER_INTERVAL: Duration = Duration::from_millis(100);
/// Committed rows that a job may have in memory, which whoever takes it over reads before anything else.
const MOST_FLUSH_BYTES: u64 = 4 << 20;
/// Sums of the view.
const SUMS: u64 = 48;
/// About the bytes of a key's state.
const KEY_BYTES: u64 = 600;
/// How often rows are inserted until they stay in a tail.
const TAIL_ATTEMPTS: usize = 4;
/// Rows of a statement of the load, at most.
const LOAD_ROWS: u64 = 50_000;
/// Without a request for so long, a process has nothing to do. The garbage collector runs less often.
const QUIET: Duration = Duration::from_secs(2);
/// How long what runs in the background may take.
const SETTLES: Duration = Duration::from_secs(1_800);

pub struct Cluster {
    /// Where everything lies, without limits.
    pub raw: Arc<dyn ObjectStore>,
    /// Reads the log there. Its requests are in no count.
    pub log: LogFollower,
    /// Asks the frontend. Before the processes, which end after it.
    pub client: Client,
    /// Runs the view, until it is lost.
    pub owner: Option<Host<ComputeProcess>>,
    /// How the store of processes behaves that start from now on.
    pub profile: Profile,
    pub view: RelationId,
    pub table: RelationId,
    /// Keys of the view's state that is in runs, from 0 on.
    pub keys: u64,
    /// Keys above these, which came in tails.
    tail_keys: u64,
    tables: Host<ComputeProcess>,
    frontend: Host<FrontendProcess>,
    meta: Host<MetaProcess>,
    /// Bytes that the state is to have.
    size: u64,
    /// Compute processes, so far.
    pub started: u32,
    dir: TempDir,
}

/// The second table is a job more beside the first one: the view is placed elsewhere.
fn create() -> String {
    let tables = "CREATE TABLE facts (k BIGINT, v BIGINT); CREATE TABLE idle (k BIGINT)";
    format!("{tables}; {}", sums::create_view("totals", "facts", SUMS))
}

impl Cluster {
    /// Without rows. The store has no limits yet.
    pub async fn start(inside: Option<&Path>, size: u64) -> Result<Cluster, String> {
        let dir = temporary(inside)?;
        let store = dir.path().join("store");
        std::fs::create_dir(&store).map_err(|e| format!("{}: {e}", store.display()))?;
        let raw = LocalFileSystem::new_with_prefix(&store).map_err(|e| e.to_string())?;
        let raw: Arc<dyn ObjectStore> = Arc::new(raw);
        let profile = Profile::INSTANT;
        let starting = Starting { dir: dir.path(), raw: &raw, profile, size };
        let meta: Host<MetaProcess> = starting.meta().await?;
        let metas = vec![meta.process()?.address.to_string()];
        let tables = starting.compute(&metas, 0).await?;
        let frontend = starting.frontend(&metas).await?;
        let client = connect(frontend.process()?.address.port()).await?;
        execute(&client, "SET read_wait_timeout = '1h'").await?;
        execute(&client, &create()).await?;
        // There is nothing on it: it is given the view.
        let owner = starting.compute(&metas, 1).await?;
        let log = LogFollower::open(Arc::clone(&raw), EnvHandle::default()).await;
        let log = log.map_err(|e| e.to_string())?;
        let id = |name: &str| {
            let found = log.read(|s| s.relation_named("public", name).map(|r| RelationId(r.id)));
            found.ok_or_else(|| format!("{name} is not there"))
        };
        let (view, table) = (id("totals")?, id("facts")?);
        let cluster = Cluster {
            raw,
            log,
            client,
            owner: Some(owner),
            profile,
            view,
            table,
            keys: 0,
            tail_keys: 0,
            tables,
            frontend,
            meta,
            size,
            started: 2,
            dir,
        };
        cluster.check_places().await?;
        Ok(cluster)
    }

    /// One that has nothing to do.
    pub async fn start_standby(&mut self) -> Result<Host<ComputeProcess>, String> {
        let (profile, number) = (self.profile, self.started);
        self.started += 1;
        let (dir, raw, size) = (self.dir.path(), &self.raw, self.size);
        let metas = vec![self.meta.process()?.address.to_string()];
        let starting = Starting { dir, raw, profile, size };
        let standby = starting.compute(&metas, number).await?;
        self.check_places().await?;
        Ok(standby)
    }

    /// The view runs on its owner, and its input elsewhere.
    async fn check_places(&self) -> Result<(), String> {
        self.log.catch_up().await.map_err(|e| e.to_string())?;
        let owner = self.owner.as_ref().map(Host::incarnation).transpose()?;
        let tables = Some(self.tables.incarnation()?);
        let places = (self.placed(self.view), self.placed(self.table));
        match places == (owner, tables) {
            true => Ok(()),
            false => Err(format!("jobs run on {places:?}, not on {:?}", (owner, tables))),
        }
    }

    /// The process that a job is placed on, as the log was read last.
    pub fn placed(&self, job: RelationId) -> Option<u64> {
        self.log.read(|state| state.jobs.get(&job).map(|j| j.process))
    }

    /// What the log names of a job, as it was read last.
    pub fn version(&self, job: RelationId) -> Arc<JobVersion> {
        let version = self.log.read(|s| s.jobs.get(&job).map(|j| Arc::clone(&j.version)));
        version.unwrap_or_default()
    }

    /// Bytes of the view's runs.
    pub fn state_bytes(&self) -> u64 {
        self.version(self.view).runs.iter().map(|r| r.length).sum()
    }

    /// Inserts keys until the state is as large as it is to be, and waits until nothing more is done to it.
    pub async fn fill(&mut self) -> Result<(), String> {
        let rows = (self.size / KEY_BYTES / 16).clamp(200, LOAD_ROWS);
        while self.state_bytes() < self.size {
            let (from, to) = (self.keys, self.keys + rows - 1);
            let rows_of = format!("SELECT x, {} FROM generate_series({from}, {to})", sums::value());
            let load = format!("INSERT INTO facts {rows_of} AS s(x)");
            execute(&self.client, &load).await?;
            self.keys += rows;
            // No faster than the view can take it.
            execute(&self.client, &format!("SELECT n FROM totals WHERE k = {to}")).await?;
            self.log.catch_up().await.map_err(|e| e.to_string())?;
        }
        execute(&self.client, "FLUSH").await?;
        self.settle().await?;
        // Merges may have made it smaller.
        let times = self.state_bytes() as f64 / self.size as f64;
        match (0.5..3.0).contains(&times) {
            true => Ok(()),
            false => Err(format!("the state has {times:.2} times the size that it is to have")),
        }
    }

    /// Whatever the size of the state is, from some 0.1 GB on, whoever takes the view over finds about the same after the
    /// runs: slices in objects of their own, of the view and of its input each. Of a smaller state less is written as runs
    /// at once, so the slices are smaller, too.
    pub async fn leave_tails(&mut self) -> Result<(), String> {
        for _ in 0..TAIL_ATTEMPTS {
            // Rows in memory take more than in the store.
            let rows = flush_bytes(self.size) / 8 / KEY_BYTES;
            let from = self.keys + self.tail_keys;
            let to = from + rows - 1;
            let rows_of = format!("SELECT x, {} FROM generate_series({from}, {to})", sums::value());
            execute(&self.client, &format!("INSERT INTO facts {rows_of} AS s(x)")).await?;
            self.tail_keys += rows;
            execute(&self.client, &format!("SELECT n FROM totals WHERE k = {to}")).await?;
            self.settle().await?;
            // With the rows that were in memory before they may have been too many, and are runs now.
            if self.check_tails().is_ok() {
                return Ok(());
            }
        }
        self.check_tails()
    }

    /// See [`Cluster::leave_tails`]: nothing has written them as runs meanwhile.
    pub fn check_tails(&self) -> Result<(), String> {
        for (name, job) in [("totals", self.view), ("facts", self.table)] {
            if self.version(job).tail.is_empty() {
                return Err(format!("{name} has no tail"));
            }
        }
        Ok(())
    }

    /// The store behaves so from now on.
    pub fn limit(&mut self, profile: Profile) {
        self.profile = profile;
        self.sims().for_each(|sim| sim.set_profile(profile));
    }

    /// Ends all processes, so that their directory can go.
    pub async fn stop(self) -> Result<(), String> {
        let Cluster { client, owner, tables, frontend, meta, dir, .. } = self;
        drop(client);
        if let Some(owner) = owner {
            owner.kill().await?;
        }
        tables.kill().await?;
        frontend.kill().await?;
        meta.kill().await?;
        dir.close().map_err(|e| format!("cannot remove the temporary directory: {e}"))
    }

    fn sims(&self) -> impl Iterator<Item = &SimStore> {
        let all = [&self.meta.sim, &self.frontend.sim, &self.tables.sim];
        all.into_iter().chain(self.owner.as_ref().map(|owner| &owner.sim))
    }

    /// Until no process has asked the store for anything for a while.
    pub async fn settle(&self) -> Result<(), String> {
        let begun = Instant::now();
        let requests = || self.sims().map(|sim| sim.stats().requests()).sum::<u64>();
        let (mut last, mut since) = (requests(), Instant::now());
        while since.elapsed() < QUIET {
            if begun.elapsed() > SETTLES {
                return Err("the cluster does not come to rest".to_owned());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            let now = requests();
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
        self.log.catch_up().await.map_err(|e| e.to_string())?;
        Ok(())
    }

    /// The view is its query, of a few of its columns.
    pub async fn check_content(&self) -> Result<(), String> {
        self.sims().for_each(|sim| sim.set_profile(Profile::INSTANT));
        let totals = ("totals", "facts", SUMS);
        let keys = self.keys + self.tail_keys;
        sums::check_view(&self.client, totals, &keys.to_string()).await
    }
}

/// Committed rows of a job in memory beyond which they are written as runs, for a state of this size.
fn flush_bytes(size: u64) -> u64 {
    (size / 16).clamp(64 << 10, MOST_FLUSH_BYTES)
}

/// What processes begin with.
struct Starting<'a> {
    dir: &'a Path,
    raw: &'a Arc<dyn ObjectStore>,
    profile: Profile,
    size: u64,
}

impl Starting<'_> {
    fn config(&self, role: Role, name: &str, metas: &[String]) -> RoleConfig {
        let process = Config {
            memory_limit: MEMORY_LIMIT,
            parallelism: PARALLELISM,
            barrier_interval: BARRIER_INTERVAL,
            ..Config::embedded(&self.dir.join(name))
        };
        RoleConfig {
            role,
            process,
            metas: metas.to_vec(),
            insecure_rpc: false,
            rpc_tls: None,
            auth: Auth::Trust,
        }
    }

    fn overrides(&self, store: Arc<dyn ObjectStore>) -> Overrides {
        Overrides {
            object_store: Some(store),
            flush_bytes: Some(flush_bytes(self.size) as usize),
            ..Overrides::default()
        }
    }

    async fn meta(&self) -> Result<Host<MetaProcess>, String> {
        let config = self.config(Role::Meta, "meta", &[]);
        let at = (self.raw, self.profile, 1);
        let start = |store| MetaProcess::start(config, self.overrides(store));
        Host::start("meta", MEMORY_LIMIT, at, start).await
    }

    async fn frontend(&self, metas: &[String]) -> Result<Host<FrontendProcess>, String> {
        let config = self.config(Role::Frontend, "frontend", metas);
        let at = (self.raw, self.profile, 1);
        let start = |store| FrontendProcess::start(config, self.overrides(store));
        Host::start("frontend", MEMORY_LIMIT, at, start).await
    }

    async fn compute(&self, metas: &[String], number: u32) -> Result<Host<ComputeProcess>, String> {
        let config = self.config(Role::Compute, &format!("compute-{number}"), metas);
        // Each new owner of a view meets other latencies: runs are to be samples of their own.
        let at = (self.raw, self.profile, u64::from(number) + 1);
        let start = |store| ComputeProcess::start(config, self.overrides(store));
        Host::start("compute", MEMORY_LIMIT, at, start).await
    }
}
