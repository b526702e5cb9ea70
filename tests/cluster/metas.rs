//! Two meta processes: one leads, and the other takes over when it is killed, stopped, told to end or cut off from the
//! object store. What was acknowledged is there, whoever leads.

use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::network::Network;
use crate::process::{Cluster, OBJECT_STORE};
use crate::transfers::{self, Transfers};
use crate::{PROGRESS, one};

/// How long it may take until definitions and statements go on. Less than half of it where nothing else runs.
const LIMIT: Duration = Duration::from_secs(20);
/// How long what waits at a leader may take that is cut off from the object store. About 6 s where nothing else runs.
const ENDS: Duration = Duration::from_secs(15);

struct Test {
    cluster: Cluster,
    network: Option<Network>,
    admin: Client,
    running: Transfers,
    defined: u32,
    _dir: tempfile::TempDir,
}

impl Test {
    async fn start() -> Test {
        let dir = tempfile::tempdir().unwrap();
        let cluster = Cluster::start_with(dir.path(), &Cluster::TWO_METAS).await;
        Test::with(dir, cluster, None).await
    }

    async fn start_on(network: Network) -> Test {
        let (dir, names) = (tempfile::tempdir().unwrap(), &Cluster::TWO_METAS);
        let cluster = Cluster::start_on_network(dir.path(), names, network.clone()).await;
        Test::with(dir, cluster, Some(network)).await
    }

    async fn with(dir: tempfile::TempDir, cluster: Cluster, network: Option<Network>) -> Test {
        let admin = cluster.connect("frontend1").await;
        transfers::create(&admin).await;
        let addresses = ["frontend1", "frontend2"].map(|name| cluster.address(name));
        let running = Transfers::start(addresses);
        running.progress(PROGRESS).await;
        Test { cluster, network, admin, running, defined: 0, _dir: dir }
    }

    /// The meta process that the log has as the leader, if it is one that was started last by its name.
    async fn leader(&self) -> Option<&'static str> {
        let sql = "SELECT address FROM millrace_catalog.processes WHERE roles = ARRAY['meta']";
        let rows = self.admin.query(sql, &[]).await.unwrap();
        let addresses: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        let address = |name: &'static str| match &self.network {
            Some(network) => network.proxy(name, &self.cluster.address(name)),
            None => self.cluster.address(name),
        };
        ["meta1", "meta2"].into_iter().find(|name| addresses.contains(&address(name)))
    }

    /// Definitions, statements and fresh reads go on. Returns how long that took, and who leads.
    async fn goes_on(&mut self, what: &str) -> &'static str {
        let began = Instant::now();
        self.defined += 1;
        let name = format!("defined{}", self.defined);
        let sql = format!("CREATE MATERIALIZED VIEW {name} AS SELECT count(*) AS n FROM accounts");
        while let Err(error) = self.admin.batch_execute(&sql).await {
            // Of one whose leader was lost meanwhile the next one tells the outcome.
            assert_ne!(error.code().map(|c| c.code()), Some("08007"), "{what}: {error:?}");
            assert!(began.elapsed() < LIMIT, "{what}: definitions do not go on: {error:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let defined = began.elapsed();
        let sql = format!("SELECT n FROM {name}");
        assert_eq!(one::<i64>(&self.admin, &sql).await, transfers::ACCOUNTS);
        self.running.progress(PROGRESS).await;
        let all = began.elapsed();
        println!("{what}: a view is defined after {defined:?}, all goes on after {all:?}");
        assert!(all < LIMIT, "{what}: {all:?}");
        self.leader().await.expect("somebody leads")
    }

    /// Returns when both sessions have written again since then, and how long that took.
    async fn resume(&self, since: Instant) -> Duration {
        while self.running.have_written_since(since) != [true, true] {
            assert!(since.elapsed() < LIMIT, "writes do not go on: {}", self.running.errors());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        since.elapsed()
    }

    /// Reads again and again until sessions write. Returns how long the longest read took.
    async fn reads_since(&self, since: Instant, client: &Client) -> Duration {
        let mut longest = Duration::ZERO;
        while self.running.have_written_since(since) != [true, true] {
            let began = Instant::now();
            let count = one::<i64>(client, "SELECT count(*) FROM accounts").await;
            assert_eq!(count, transfers::ACCOUNTS);
            longest = longest.max(began.elapsed());
        }
        longest
    }

    async fn end(self) {
        let outcomes = self.running.end().await;
        println!("errors: {:#?}", outcomes.errors);
        for name in ["frontend1", "frontend2"] {
            outcomes.check(&self.cluster.connect(name).await).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_takes_over_from_a_killed_leader() {
    let mut test = Test::start().await;
    assert_eq!(test.leader().await, Some("meta1"));
    assert!(test.cluster.process("meta2").log().contains("stands by"));
    for (killed, next) in [("meta1", "meta2"), ("meta2", "meta1")] {
        test.cluster.process(killed).kill();
        assert_eq!(test.goes_on(&format!("{killed} is killed")).await, next);
        // It finds that another leads.
        test.cluster.begin(killed);
        assert_eq!(test.goes_on(&format!("{killed} is there again")).await, next);
        assert!(test.cluster.process(killed).log().contains("stands by"));
    }
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_leader_that_wakes_leads_no_longer() {
    let mut test = Test::start().await;
    test.cluster.process("meta1").signal("STOP");
    assert_eq!(test.goes_on("meta1 is stopped").await, "meta2");
    test.cluster.process("meta1").signal("CONT");
    test.cluster.process("meta1").await_end(Duration::from_secs(60));
    let log = test.cluster.process("meta1").log();
    assert!(log.contains("has taken over this object store"), "{log}");
    test.cluster.begin("meta1");
    assert_eq!(test.goes_on("meta1 stands by").await, "meta2");
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_takes_over_from_a_leader_that_is_cut_off_from_the_object_store() {
    let network = Network::new();
    let mut test = Test::start_on(network.clone()).await;
    assert_eq!(test.leader().await, Some("meta1"));
    let [reader, definer] =
        [test.cluster.connect("frontend1").await, test.cluster.connect("frontend2").await];
    let ways = [("meta1", OBJECT_STORE), (OBJECT_STORE, "meta1")];
    network.hold(ways);
    let began = Instant::now();
    let (written, read, defined) =
        tokio::join!(test.resume(began), test.reads_since(began, &reader), define(&definer));
    println!(
        "writes go on after {written:?}; a read waited for {read:?}, a CREATE for {defined:?}"
    );
    assert!(read > Duration::from_secs(1), "none has waited at the leader that is cut off");
    assert!([written, read, defined].iter().all(|time| *time < ENDS));

    // It learns of it from the other one.
    test.cluster.process("meta1").await_end(Duration::from_secs(60));
    let log = test.cluster.process("meta1").log();
    assert!(log.contains("has taken over this object store"), "{log}");
    assert_eq!(test.goes_on("meta1 is cut off from the object store").await, "meta2");
    // The record that it had sent arrives.
    network.release(&ways);
    test.cluster.begin("meta1");
    assert_eq!(test.goes_on("meta1 is there again").await, "meta2");
    assert!(test.cluster.process("meta1").log().contains("stands by"));
    test.end().await;
}

/// How long a definition takes whose leader is lost meanwhile: the next one makes it.
async fn define(client: &Client) -> Duration {
    let began = Instant::now();
    let sql = "CREATE MATERIALIZED VIEW waiting AS SELECT count(*) AS n FROM accounts";
    client.batch_execute(sql).await.unwrap();
    let took = began.elapsed();
    let count = one::<i64>(client, "SELECT n FROM waiting").await;
    assert_eq!(count, transfers::ACCOUNTS);
    took
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_ends_in_order_is_followed_at_once() {
    let mut test = Test::start().await;
    for (ended, next) in [("meta1", "meta2"), ("meta2", "meta1")] {
        test.cluster.process(ended).signal("TERM");
        assert_eq!(test.goes_on(&format!("{ended} has ended")).await, next);
        test.cluster.process(ended).await_end(Duration::from_secs(60));
        let log = test.cluster.process(ended).log();
        assert!(log.contains("leads no longer"), "{log}");
        // Nobody waited for its lease.
        let log = test.cluster.process(next).log();
        assert!(!log.contains("may not be over yet"), "{log}");
        test.cluster.begin(ended);
    }
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_two_leads_when_both_are_killed_and_started_again() {
    let mut test = Test::start().await;
    for name in ["meta1", "meta2"] {
        test.cluster.process(name).kill();
    }
    for name in ["meta2", "meta1"] {
        test.cluster.spawn(name);
    }
    for name in ["meta2", "meta1"] {
        test.cluster.process(name).await_ready();
    }
    let leader = test.goes_on("both were killed").await;
    // It led before, as its data directory tells, unless it took so long to start that the other has taken over.
    println!("{leader} leads");
    test.end().await;
}
