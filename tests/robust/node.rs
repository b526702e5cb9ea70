//! A server inside the test process over a store that the test can slow, break and count.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millrace::{Config, Http, Overrides, Standalone, StartError, Tuning};
use millrace_common::EnvHandle;
use millrace_sqllogictest::{server, suite};
use millrace_storage::sim::SimStore;
use object_store::ObjectStore;
use tokio::runtime::Runtime;
use tokio_postgres::Client;

/// A running server, on a runtime of its own that can be thrown away as by a crash.
pub struct Node {
    server: Option<Standalone>,
    runtime: Option<Runtime>,
    /// Of its threads.
    name: String,
    pub port: u16,
    /// Of the HTTP port, if it was asked for.
    pub http: Option<SocketAddr>,
}

#[derive(Clone)]
pub struct NodeOptions {
    pub store: Arc<dyn ObjectStore>,
    /// Committed memory of a job beyond which it goes into runs.
    pub flush_bytes: usize,
    pub block_bytes: Option<usize>,
    /// What the whole process holds counts, with all servers of other tests.
    pub memory_limit: usize,
    pub tuning: Tuning,
    /// Instead of the machine's clock.
    pub env: EnvHandle,
    /// `None`: that clock is taken as it is.
    pub max_clock_skew: Option<Duration>,
    pub http: Http,
}

impl NodeOptions {
    pub fn new(store: Arc<dyn ObjectStore>) -> NodeOptions {
        NodeOptions {
            store,
            flush_bytes: 16 << 20,
            block_bytes: None,
            memory_limit: 256 << 20,
            tuning: Tuning::DEFAULT,
            env: EnvHandle::default(),
            max_clock_skew: None,
            http: Http::Off,
        }
    }
}

fn config(options: &NodeOptions) -> Config {
    Config {
        tuning: options.tuning,
        memory_limit: options.memory_limit,
        barrier_interval: Duration::from_millis(20),
        max_clock_skew: options.max_clock_skew,
        http: options.http.clone(),
        ..Config::embedded(&std::env::temp_dir())
    }
}

impl Node {
    pub async fn try_start(options: &NodeOptions) -> Result<Node, StartError> {
        static NODES: AtomicU64 = AtomicU64::new(0);
        let name = format!("node-{}", NODES.fetch_add(1, Ordering::Relaxed));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name(&name)
            .thread_stack_size(millrace_frontend::STACK_BYTES)
            .enable_all()
            .build()
            .expect("threads");
        let overrides = Overrides {
            object_store: Some(Arc::clone(&options.store)),
            block_bytes: options.block_bytes,
            flush_bytes: Some(options.flush_bytes),
            env: options.env.clone(),
            ..Overrides::default()
        };
        let started =
            runtime.spawn(Standalone::start(config(options), overrides)).await.expect("no panic");
        match started {
            Ok(server) => {
                let (port, http) = (server.address.port(), server.http);
                Ok(Node { server: Some(server), runtime: Some(runtime), name, port, http })
            }
            Err(e) => {
                runtime.shutdown_background();
                Err(e)
            }
        }
    }

    pub async fn start(options: &NodeOptions) -> Node {
        Node::try_start(options).await.expect("the server starts")
    }

    pub async fn connect(&self) -> Client {
        server::connect(self.port).await.expect("a connection")
    }

    /// Drops every block from memory: the next reads are cold.
    pub fn forget_blocks(&self) {
        if let Some(server) = &self.server {
            server.store.cache().clear_memory();
        }
    }

    /// Waits until nobody uses the store any more: flushes and compactions are over, however long they take here.
    pub async fn settle(&self, store: &SimStore) {
        let until = Instant::now() + Duration::from_secs(240);
        let mut last = store.stats().requests();
        let mut quiet = 0;
        while quiet < 8 {
            assert!(Instant::now() < until, "an idle server keeps using the store");
            let mut is_idle = false;
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_millis(10)).await;
                is_idle |= !self.is_busy();
            }
            let now = store.stats().requests();
            quiet = if now == last && is_idle { quiet + 1 } else { 0 };
            last = now;
        }
    }

    /// Whether one of the server's threads runs, or would if the machine let it: what computes makes no requests.
    fn is_busy(&self) -> bool {
        let runs = format!("({}) R ", self.name);
        let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let mut stats = tasks.map(|task| std::fs::read_to_string(task.path().join("stat")));
        // A thread may be gone by now.
        stats.any(|stat| stat.is_ok_and(|stat| stat.contains(&runs)))
    }

    /// Appends to the log that were tried again.
    pub fn append_retries(&self) -> u64 {
        self.server.as_ref().map_or(0, |server| server.meta.append_stats().retries)
    }

    /// A new connection that runs these statements one by one.
    pub async fn run(&self, sql: &str) -> Client {
        let client = self.connect().await;
        run(&client, sql).await;
        client
    }

    /// SHOW JOBS: state and reason of a relation.
    pub async fn job(&self, name: &str) -> Option<(String, String)> {
        let client = self.connect().await;
        let jobs = suite::rows(&client, "SHOW JOBS").await.expect("SHOW JOBS answers");
        let job = jobs.into_iter().find(|j| j[1] == format!("public.{name}"))?;
        Some((job[3].clone(), job[6].clone()))
    }

    /// Waits until SHOW JOBS shows the job in this state, and returns the reason it shows.
    pub async fn wait_for_state(&self, name: &str, state: &str) -> String {
        self.wait_for_one_of(name, &[state]).await
    }

    /// As [`Node::wait_for_state`], for any of these states.
    pub async fn wait_for_one_of(&self, name: &str, states: &[&str]) -> String {
        let until = Instant::now() + Duration::from_secs(120);
        loop {
            let job = self.job(name).await;
            match job {
                Some((found, reason)) if states.contains(&found.as_str()) => return reason,
                other => assert!(Instant::now() < until, "{name} is {other:?}, not {states:?}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.server = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Runs statements that must succeed, one by one.
pub async fn run(client: &Client, sql: &str) {
    for statement in sql.split(';').filter(|s| !s.trim().is_empty()) {
        client.batch_execute(statement).await.unwrap_or_else(|e| panic!("{statement}: {e:?}"));
    }
}

/// The only value of a query's only row.
pub async fn one(client: &Client, sql: &str) -> String {
    suite::rows(client, sql).await.unwrap_or_else(|e| panic!("{e}"))[0][0].clone()
}
