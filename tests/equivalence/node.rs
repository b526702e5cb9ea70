//! A server inside the test process, over a store that the test owns, so that it can die and come back.

use std::sync::Arc;
use std::time::Duration;

use millrace::{Config, Loopback, Overrides, Standalone, Tuning};
use millrace_executor::options::{ExecOptions, LookaheadMode, StateAccess};
use millrace_frontend::Direct;
use millrace_frontend::cluster::Cluster;
use millrace_graph::codec::decode_graph;
use millrace_storage::sim::{Profile, SimStore};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use tokio::runtime::Runtime;
use tokio_postgres::Client;

use crate::case::Mode;
use crate::coverage::{self, Reads};

/// Wherever rows are looked at ahead, views are the same.
const PLACES: [LookaheadMode; 5] = [
    LookaheadMode::Auto,
    LookaheadMode::Leaf,
    LookaheadMode::Entry,
    LookaheadMode::Root,
    LookaheadMode::Input,
];

/// How the roles of a seed's node call each other: every third through bytes, in each mode of [`Mode::of_seed`].
/// `MILLRACE_EQUIVALENCE_LOOPBACK` has all call in one way.
pub fn loopback_of(seed: u64) -> Loopback {
    match std::env::var("MILLRACE_EQUIVALENCE_LOOPBACK").as_deref() {
        Ok("direct") => Loopback::Direct,
        Ok("encode") => Loopback::Encode,
        Ok(other) => panic!("there is no loopback {other}"),
        Err(_) if (seed + seed / Mode::OF_SEEDS).is_multiple_of(3) => Loopback::Encode,
        Err(_) => Loopback::Direct,
    }
}

/// Whether a node's store answers after random latencies, so in random order: of those that crash every second one, so
/// that it dies with reads and hints under way.
fn is_over_slow_store(mode: Mode, seed: u64) -> bool {
    match mode {
        Mode::SlowStore | Mode::Synchronous => true,
        Mode::Crash => (seed / Mode::OF_SEEDS).is_multiple_of(2),
        _ => false,
    }
}

/// How to run a node.
#[derive(Clone)]
pub struct NodeOptions {
    overrides: Overrides,
    tuning: Tuning,
    loopback: Loopback,
}

impl NodeOptions {
    pub fn for_mode(mode: Mode, seed: u64) -> NodeOptions {
        let memory: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let slow = is_over_slow_store(mode, seed);
        let store: Arc<dyn ObjectStore> = if slow {
            // Random latencies complete fetches in random order; a fast profile keeps the run short.
            Arc::new(SimStore::new(memory, Profile::NVME, seed))
        } else {
            memory
        };
        // Each mode meets each place.
        let place = seed as usize / Mode::ALL.len() % PLACES.len();
        let tiny = !matches!(mode, Mode::Plain | Mode::Concurrent);
        let exec = if tiny {
            ExecOptions {
                cache_bytes: match mode {
                    Mode::TinyCaches => 300,
                    Mode::Restart => 1,
                    _ => 2 << 10,
                },
                backfill_rows: 7,
                group_change_bytes: if mode == Mode::TinyCaches { 600 } else { 4 << 10 },
                delta_bytes: if mode == Mode::TinyCaches { 400 } else { 4 << 10 },
                changelog_bytes: if mode == Mode::TinyCaches { 300 } else { 1 << 20 },
                chunk_rows: 16,
                delay_reads: mode != Mode::Crash || slow,
                lookahead: PLACES[place],
                random_hints: matches!(mode, Mode::TinyCaches | Mode::SlowStore | Mode::Crash),
                state_access: if mode == Mode::Synchronous {
                    StateAccess::Synchronous
                } else {
                    StateAccess::Asynchronous
                },
                ..ExecOptions::default()
            }
        } else {
            ExecOptions::default()
        };
        let overrides = Overrides {
            object_store: Some(store),
            exec: Some(exec),
            block_bytes: tiny.then_some(256),
            flush_bytes: tiny.then_some(4 << 10),
            spill_bytes: tiny.then_some(1 << 10),
            lookup_bytes: tiny.then_some(2 << 10),
            ..Overrides::default()
        };
        // A job that is behind takes a few rows at a time.
        let tuning = Tuning { step_bytes: tiny.then_some(1 << 10), ..Tuning::default() };
        NodeOptions { overrides, tuning, loopback: loopback_of(seed) }
    }
}

/// A running node, on a runtime of its own that can be thrown away.
pub struct Node {
    options: NodeOptions,
    server: Option<Standalone>,
    runtime: Option<Runtime>,
    port: u16,
}

fn config(options: &NodeOptions) -> Config {
    Config {
        tuning: options.tuning,
        loopback: options.loopback,
        barrier_interval: Duration::from_millis(20),
        ..Config::embedded(&std::env::temp_dir())
    }
}

impl Node {
    pub async fn start(options: NodeOptions) -> Result<Node, String> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_stack_size(millrace_frontend::STACK_BYTES)
            .enable_all()
            .build()
            .map_err(|e| e.to_string())?;
        let overrides = options.overrides.clone();
        let config = config(&options);
        let started = runtime.spawn(Standalone::start(config, overrides));
        let server = started.await.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
        let port = server.address.port();
        Ok(Node { options, server: Some(server), runtime: Some(runtime), port })
    }

    pub async fn connect(&self) -> Result<Client, String> {
        millrace_sqllogictest::server::connect(self.port).await.map_err(|e| e.to_string())
    }

    /// Adds what the operators of all jobs have read from below their caches since the node began, and how often
    /// they settled changes before the barrier.
    pub fn add_reads(&self, reads: &mut Reads, settled: &mut Reads) {
        let Some(server) = &self.server else { return };
        // What the leader is told of jobs is up to a second old.
        let (meta, store) = (Arc::clone(&server.meta), Arc::clone(&server.store));
        let cluster = Direct::new(meta, store, Arc::clone(&server.worker));
        let catalog = cluster.catalog();
        for job in cluster.jobs() {
            let graph = catalog.by_id(job.relation).map(|r| decode_graph(&r.graph));
            let Some(Ok(graph)) = graph else { continue };
            for operator in &job.operators {
                let fragment = graph.fragments.get(operator.fragment);
                let node = fragment.and_then(|f| f.nodes.get(operator.node));
                for label in node.map(|n| coverage::labels(&n.op)).unwrap_or_default() {
                    *reads.entry(label).or_default() += operator.cache_misses;
                    *settled.entry(label).or_default() += operator.settled_early;
                }
            }
        }
    }

    /// Everything the process knew is gone at once; only the store remains.
    pub async fn crash_and_restart(mut self) -> Result<Node, String> {
        self.discard();
        Node::start(self.options.clone()).await
    }

    pub async fn stop(mut self) {
        self.discard();
    }

    fn discard(&mut self) {
        self.server = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.discard();
    }
}

#[test]
fn some_nodes_of_the_short_form_die_with_reads_and_hints_under_way() {
    let crashes = (1..=u64::from(crate::CASES[0])).filter(|s| Mode::of_seed(*s) == Mode::Crash);
    let (slow, quick): (Vec<u64>, Vec<u64>) =
        crashes.partition(|seed| is_over_slow_store(Mode::Crash, *seed));
    assert!(!slow.is_empty() && !quick.is_empty(), "{slow:?} and {quick:?}");
    for seed in slow {
        let exec = NodeOptions::for_mode(Mode::Crash, seed).overrides.exec.expect("options");
        assert!(exec.random_hints && exec.delay_reads, "seed {seed}");
    }
}
