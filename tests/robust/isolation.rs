//! A job that hangs, fails or is cancelled is nobody else's business.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use millrace_sqllogictest::suite;
use millrace_storage::sim::{Profile, SimStore};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tokio_postgres::NoTls;
use tokio_postgres::error::SqlState;

use crate::node::{Node, NodeOptions, one, run};

/// Latencies that hardly vary, and outweigh what the machine adds.
const STEADY: Profile =
    Profile { p50: Duration::from_millis(10), p99: Duration::from_millis(11), ..Profile::INSTANT };

const COMMITS: usize = 60;
const ROUNDS: usize = 5;

struct Broken {
    store: SimStore,
    memory: Arc<InMemory>,
    options: NodeOptions,
}

impl Broken {
    fn new(profile: Profile) -> Broken {
        let memory = Arc::new(InMemory::new());
        let store = SimStore::new(Arc::clone(&memory) as Arc<dyn ObjectStore>, profile, 7);
        let options =
            NodeOptions { flush_bytes: 256 << 10, ..NodeOptions::new(Arc::new(store.clone())) };
        Broken { store, memory, options }
    }

    async fn data_objects(&self) -> BTreeSet<Path> {
        let prefix = Path::from("data");
        self.memory
            .list(Some(&prefix))
            .map_ok(|m| m.location)
            .try_collect()
            .await
            .expect("a listing")
    }

    /// Flips bytes in every block of each object.
    async fn damage(&self, objects: &BTreeSet<Path>) {
        for path in objects {
            let mut bytes =
                self.memory.get(path).await.expect("there").bytes().await.expect("bytes").to_vec();
            bytes.iter_mut().step_by(512).for_each(|b| *b ^= 0x55);
            self.memory.put(path, bytes.into()).await.expect("written");
        }
    }
}

/// Waits until nobody uses the store any more: flushes and compactions are over.
pub async fn settle(store: &SimStore) {
    let until = Instant::now() + Duration::from_secs(30);
    let mut last = store.stats().requests();
    let mut quiet = 0;
    while quiet < 8 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = store.stats().requests();
        quiet = if now == last { quiet + 1 } else { 0 };
        last = now;
    }
    assert!(quiet >= 8, "an idle server keeps using the store");
}

/// The best 99th percentile of several rounds: what the machine does beside is not the question.
async fn p99(node: &Node, next: &mut usize) -> Duration {
    let client = node.connect().await;
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        let mut times = Vec::with_capacity(COMMITS);
        for _ in 0..COMMITS {
            let sql = format!("INSERT INTO c VALUES ({next}, {})", *next % 7);
            *next += 1;
            let begun = Instant::now();
            client.batch_execute(&sql).await.expect("the third job commits");
            times.push(begun.elapsed());
        }
        times.sort();
        best = best.min(times[COMMITS * 99 / 100]);
    }
    best
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hung_and_a_failing_job_do_not_delay_a_third() {
    let broken = Broken::new(STEADY);
    let node = Node::start(&broken.options).await;
    let client = node
        .run(
            "CREATE TABLE c (id int PRIMARY KEY, g int);
             CREATE MATERIALIZED VIEW vc AS SELECT g, count(*) AS n FROM c GROUP BY g;
             CREATE TABLE a (g int, v int);
             CREATE MATERIALIZED VIEW va AS SELECT g, count(*) AS n, sum(v) AS s FROM a GROUP BY g;
             INSERT INTO a SELECT g, g FROM generate_series(1, 20000) AS t(g)",
        )
        .await;
    assert_eq!(one(&client, "SELECT count(*) FROM va").await, "20000");
    settle(&broken.store).await;
    drop(client);
    drop(node);

    // The next process names its objects apart, so that one job's can hang and another's be damaged.
    let node = Node::start(&broken.options).await;
    settle(&broken.store).await;
    let before = broken.data_objects().await;
    let client = node
        .run(
            "CREATE TABLE b (id int, t varchar);
             CREATE MATERIALIZED VIEW vb AS SELECT id, max(t) AS t FROM b GROUP BY id;
             INSERT INTO b SELECT g, 'some text ' || g FROM generate_series(1, 9000) AS t(g)",
        )
        .await;
    assert_eq!(one(&client, "SELECT count(*) FROM vb").await, "9000");
    settle(&broken.store).await;
    let objects: BTreeSet<Path> =
        broken.data_objects().await.difference(&before).cloned().collect();
    assert!(!objects.is_empty(), "b's rows are in objects of their own");
    drop(client);
    drop(node);

    // What b and vb read is damaged: they fail. The state of va is cold and cannot be read: it hangs.
    broken.damage(&objects).await;
    let node = Node::start(&broken.options).await;
    broken.store.hang_reads(Some("data/1/"));
    let client = node.connect().await;
    let _ = client
        .batch_execute("INSERT INTO b SELECT g, 'zzz' FROM generate_series(1, 9000) AS t(g)")
        .await;
    let reason = node.wait_for_state("vb", "failed").await;
    assert!(reason.contains("data/2/"), "the reason names the object: {reason}");
    run(&client, "INSERT INTO a SELECT g, 1 FROM generate_series(1, 3000) AS t(g)").await;
    run(&client, "INSERT INTO c VALUES (0, 0)").await;
    let reason = node.wait_for_state("va", "stalled").await;
    assert!(reason.contains("object store"), "{reason}");
    let mut next = 1;
    let with = p99(&node, &mut next).await;

    // Reads of others are not delayed; a read of the stalled view says which one it is.
    let begun = Instant::now();
    assert_eq!(one(&client, "SELECT sum(n) FROM vc").await, next.to_string());
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    run(&client, "SET read_wait_timeout = '700ms'").await;
    let begun = Instant::now();
    let late = client.simple_query("SELECT * FROM va").await.expect_err("va cannot be read");
    let late = late.as_db_error().expect("the server's word");
    assert_eq!(late.code(), &SqlState::QUERY_CANCELED, "{late}");
    assert!(late.message().contains("\"va\""), "{late}");
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());

    for sql in
        ["DROP MATERIALIZED VIEW va", "DROP MATERIALIZED VIEW vb", "DROP TABLE a", "DROP TABLE b"]
    {
        let begun = Instant::now();
        client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
        assert!(begun.elapsed() < Duration::from_secs(1), "{sql} took {:?}", begun.elapsed());
    }
    broken.store.release_reads();
    settle(&broken.store).await;
    let alone = p99(&node, &mut next).await;
    println!("p99 of a commit: {alone:?} alone, {with:?} beside a hung and a failing job");
    assert!(with.as_secs_f64() <= alone.as_secs_f64() * 1.5, "{with:?} against {alone:?} alone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_job_shows_its_reason_and_others_go_on() {
    let broken = Broken::new(Profile::INSTANT);
    let node = Node::start(&broken.options).await;
    let client = node
        .run(
            "CREATE TABLE good (id int PRIMARY KEY);
             CREATE TABLE bad (g int, t varchar);
             CREATE MATERIALIZED VIEW v AS SELECT g, max(t) AS t FROM bad GROUP BY g;
             INSERT INTO bad SELECT g, 'some text ' || g FROM generate_series(1, 9000) AS t(g)",
        )
        .await;
    assert_eq!(one(&client, "SELECT count(*) FROM v").await, "9000");
    settle(&broken.store).await;
    drop(client);
    drop(node);
    let objects = broken.data_objects().await;
    broken.damage(&objects).await;

    let node = Node::start(&broken.options).await;
    let client = node.run("INSERT INTO good VALUES (1), (2)").await;
    // Either the table itself could not be opened, or the view fails when it needs its state.
    let _ = client
        .batch_execute("INSERT INTO bad SELECT g, 'zzz' FROM generate_series(1, 9000) AS t(g)")
        .await;
    let reason = node.wait_for_state("v", "failed").await;
    assert!(reason.contains("data/"), "the reason names the object: {reason}");
    assert_eq!(one(&client, "SELECT count(*) FROM good").await, "2");
    let error = client.simple_query("SELECT * FROM v").await.expect_err("damaged");
    assert_eq!(error.code(), Some(&SqlState::DATA_CORRUPTED), "{error:?}");
    let begun = Instant::now();
    run(&client, "DROP MATERIALIZED VIEW v; DROP TABLE bad; INSERT INTO good VALUES (3)").await;
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_creation_can_be_cancelled_or_left_in_the_background() {
    let broken = Broken::new(Profile::INSTANT);
    let node = Node::start(&broken.options).await;
    let client = node
        .run(
            "CREATE TABLE a (g int, v int);
             INSERT INTO a SELECT g, g FROM generate_series(1, 20000) AS t(g)",
        )
        .await;
    settle(&broken.store).await;
    drop(client);
    drop(node);
    let node = Node::start(&broken.options).await;
    broken.store.hang_reads(Some("data/"));

    // As Ctrl-C in psql does.
    let client = node.connect().await;
    let cancel = client.cancel_token();
    let create = client
        .batch_execute("CREATE MATERIALIZED VIEW v AS SELECT g, sum(v) AS s FROM a GROUP BY g");
    let (created, _) = tokio::join!(create, async {
        node.wait_for_state("v", "creating").await;
        cancel.cancel_query(NoTls).await.expect("the request is taken");
    });
    assert_eq!(created.expect_err("cancelled").code(), Some(&SqlState::QUERY_CANCELED));
    let until = Instant::now() + Duration::from_secs(2);
    while node.job("v").await.is_some() {
        assert!(Instant::now() < until, "the cancelled view is still there");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    // In the background it returns at once, shows where it is, and can be read when it is done.
    let begun = Instant::now();
    run(&client, "SET background_ddl = on; CREATE MATERIALIZED VIEW w AS SELECT g, sum(v) AS s FROM a GROUP BY g").await;
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    node.wait_for_state("w", "creating").await;
    let jobs = suite::rows(&client, "SHOW JOBS").await.expect("SHOW JOBS answers");
    let w = jobs.iter().find(|j| j[1] == "public.w").expect("w is listed");
    assert!(w[4].ends_with('%'), "progress is shown: {w:?}");
    let unready = client.simple_query("SELECT * FROM w").await.expect_err("not readable yet");
    assert_eq!(unready.code(), Some(&SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE), "{unready:?}");
    broken.store.release_reads();
    run(&client, "WAIT").await;
    node.wait_for_state("w", "running").await;
    assert_eq!(one(&client, "SELECT count(*) FROM w").await, "20000");
}

#[tokio::test(flavor = "multi_thread")]
async fn expressions_that_fail_in_a_view_are_null_and_counted() {
    let broken = Broken::new(Profile::INSTANT);
    let node = Node::start(&broken.options).await;
    let client = node
        .run(
            "CREATE TABLE t (k int PRIMARY KEY, v int, name varchar);
             CREATE MATERIALIZED VIEW ev AS SELECT k, 10 / v AS q, v + 2147483647 AS o, CAST(name AS int) AS c FROM t;
             INSERT INTO t VALUES (1, 0, '7'), (2, 5, 'seven')",
        )
        .await;
    let rows = suite::rows(&client, "SELECT k, q, o, c FROM ev ORDER BY k").await.expect("rows");
    assert_eq!(rows, [["1", "NULL", "2147483647", "7"], ["2", "2", "NULL", "NULL"]]);
    assert_eq!(node.job("ev").await.map(|j| j.0), Some("running".to_string()));
    let counted = "SELECT sqlstate, sum(count) FROM millrace_catalog.errors WHERE name = 'ev' GROUP BY 1 ORDER BY 1";
    let errors = suite::rows(&client, counted).await.expect("the counts");
    assert_eq!(errors, [["22003", "1"], ["22012", "1"], ["22P02", "1"]]);
    // The rows are put right, and the view with them.
    run(&client, "UPDATE t SET v = 1, name = '8'").await;
    let rows = suite::rows(&client, "SELECT k, q, o, c FROM ev ORDER BY k").await.expect("rows");
    assert_eq!(rows, [["1", "10", "NULL", "8"], ["2", "10", "NULL", "8"]]);
}
