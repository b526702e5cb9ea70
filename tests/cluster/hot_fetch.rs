//! The process of a table has blocks of it in memory, and a compactor merges its runs: the process reads those of the new
//! runs into memory before they take the place of the old ones, and reads need nothing of the object store afterwards.

use std::time::{Duration, Instant};

use millrace_storage::sim::{Faults, Profile};
use tokio_postgres::Client;

use crate::console::request;
use crate::process::{Cluster, stop};
use crate::sessions::{LIMIT, await_true};
use crate::{execute, one};

const NAMES: [&str; 4] = ["meta", "compute", "compactor", "frontend1"];
/// How long the compactor is stopped until it has a merge to do, at most. One that is taken for lost after 3 s has none.
const GIVEN: Duration = Duration::from_millis(1_500);
/// It is begun anew where the merge was done by another process all the same, or blocks were not read in time.
const ATTEMPTS: usize = 5;
/// Of a statement: more than a flush waits for.
const ROWS: usize = 200;
/// A read of the object store takes longer than a look at what the process of the table has done, and three of them much
/// less than the process gives itself.
const SLOW: Profile = Profile {
    p50: Duration::from_millis(200),
    p99: Duration::from_millis(200),
    ..Profile::INSTANT
};
/// What the process of the table counts: merges whose blocks it has read, those where that took too long, blocks that it has
/// found in memory, and rounds of the object store.
const FETCHED: &str = "millrace_hot_fetches_total{result=\"complete\"}";
const NOT_FETCHED: &str = "millrace_hot_fetches_total{result=\"incomplete\"}";
const FOUND: &str = "millrace_block_cache_reads_total{found=\"memory\"}";
const ROUNDS: &str = "millrace_block_cache_rounds_total";

struct Test {
    cluster: Cluster,
    client: Client,
    /// Its incarnation.
    compactor: i64,
    tables: usize,
}

impl Test {
    async fn metric(&self, name: &str) -> u64 {
        let address = self.cluster.console("compute");
        let (status, metrics) = request(address, address, "GET /metrics", "", "").await;
        assert_eq!(status, 200, "{metrics}");
        let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok();
        metrics.lines().find_map(value).unwrap_or_else(|| panic!("{name}: {metrics}"))
    }

    /// How often a merge was taken back from the compactor, or its blocks were not read in time: on a machine that is slow
    /// for so long nothing is promised.
    async fn disturbances(&mut self) -> u64 {
        let log = self.cluster.process("meta").log();
        let taken_back = log.matches("a compaction is taken back").count();
        taken_back as u64 + self.metric(NOT_FETCHED).await
    }

    /// Writes a table of which the compactor, which is stopped then, is to merge the runs. Returns its name, and the
    /// disturbances before that: from then on the merge may be taken back.
    async fn table_to_be_merged(&mut self) -> (String, u64) {
        let deadline = Instant::now() + LIMIT;
        loop {
            assert!(Instant::now() < deadline, "the compactor is given nothing");
            self.tables += 1;
            let table = format!("t{}", self.tables);
            let create = format!("CREATE TABLE {table} (id bigint PRIMARY KEY, v text)");
            execute(&self.client, &create).await;
            let has_task = format!(
                "SELECT count(*) FROM millrace_catalog.compactions \
                 WHERE state = 'running' AND relation_name = '{table}' AND worker = {}",
                self.compactor
            );
            let disturbances = self.disturbances().await;
            stop(self.cluster.process("compactor").id());
            let (stopped, mut rows) = (Instant::now(), 0);
            while stopped.elapsed() < GIVEN {
                let insert = format!(
                    "INSERT INTO {table} SELECT {rows} + i, repeat('x', 100) \
                     FROM generate_series(0, {ROWS} - 1) AS g(i)"
                );
                execute(&self.client, &insert).await;
                rows += ROWS;
                if one::<i64>(&self.client, &has_task).await > 0 {
                    return (table, disturbances);
                }
            }
            self.cluster.process("compactor").signal("CONT");
        }
    }

    /// The compactor goes on. Returns when the table has its new runs, and nothing is left to be merged: whether blocks of
    /// the new ones had been read by the time that they were seen.
    async fn merge(&mut self, table: &str) -> bool {
        let fetched = self.metric(FETCHED).await;
        self.cluster.disturb_store(SLOW, Faults::default());
        self.cluster.process("compactor").signal("CONT");
        let merged = format!(
            "SELECT count(*) FROM millrace_catalog.runs WHERE relation_name = '{table}' AND level > 0"
        );
        await_true(&self.client, &merged).await;
        let is_fetched = self.metric(FETCHED).await > fetched;
        self.cluster.disturb_store(Profile::INSTANT, Faults::default());
        let none = "SELECT (count(*) = 0)::int::bigint FROM millrace_catalog.compactions";
        await_true(&self.client, none).await;
        is_fetched
    }

    /// Reads a row of the first statement, which is in the new runs, from the memory of the process of the table.
    async fn read(&self, table: &str) {
        let (found, rounds) = (self.metric(FOUND).await, self.metric(ROUNDS).await);
        let sql = format!("SELECT length(v)::bigint FROM {table} WHERE id = 1");
        let deadline = Instant::now() + LIMIT;
        // The frontend has asked it nothing before, and begins with the connection.
        while self.metric(FOUND).await == found {
            assert!(Instant::now() < deadline, "the process of the table is not asked");
            assert_eq!(one::<i64>(&self.client, &sql).await, 100);
        }
        assert_eq!(self.metric(ROUNDS).await, rounds, "it has read the object store");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_hot_is_in_memory_before_a_compactor_s_runs_are_used() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start_with_consoles(dir.path(), &NAMES).await;
    let client = cluster.connect("frontend1").await;
    let compactor = "SELECT incarnation::bigint FROM millrace_catalog.processes \
                     WHERE roles = ARRAY['compactor']";
    let compactor = one(&client, compactor).await;
    let mut test = Test { cluster, client, compactor, tables: 0 };
    for _ in 0..ATTEMPTS {
        let (table, disturbances) = test.table_to_be_merged().await;
        let is_fetched = test.merge(&table).await;
        if test.disturbances().await == disturbances {
            assert!(is_fetched, "runs were replaced before blocks of the new ones were read");
            return test.read(&table).await;
        }
    }
    panic!("the compactor has merged nothing");
}
