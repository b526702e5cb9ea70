//! History is kept for a job only so long: one that is away for longer is detached, visibly, keeps its content, and comes
//! back by a rebuild that changes the content by the difference, so that what reads it goes on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace::Tuning;
use millrace_common::{RelationId, SqlError};
use millrace_rpc::services::MetaService;
use millrace_sqllogictest::suite;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use tokio_postgres::Client;

use super::{Node, PATIENCE, one, run};

const TUNING: Tuning = Tuning {
    flush_bytes: Some(16 << 10),
    inline_bytes: Some(64),
    snapshot_records: Some(32),
    gc_interval: Some(Duration::from_millis(50)),
    ..Tuning::DEFAULT
};

async fn id_of(client: &Client, name: &str) -> RelationId {
    let sql = format!("SELECT id FROM millrace_catalog.jobs WHERE name = '{name}'");
    RelationId(one(client, &sql).await.parse().expect("a number"))
}

async fn state_of(client: &Client, name: &str) -> String {
    one(client, &format!("SELECT state FROM millrace_catalog.jobs WHERE name = '{name}'")).await
}

async fn error(client: &Client, sql: &str) -> (String, String, String) {
    let e = client.batch_execute(sql).await.expect_err(sql);
    let db = e.as_db_error().expect("an error of the server").clone();
    let more = format!("{} {}", db.detail().unwrap_or(""), db.hint().unwrap_or(""));
    (db.code().code().to_owned(), db.message().to_owned(), more)
}

/// Rows of the query, as a bag.
async fn rows(client: &Client, sql: &str) -> Vec<Vec<String>> {
    let mut rows = suite::rows(client, sql).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
    rows.sort();
    rows
}

/// Every view, with what its rows are by its query.
const VIEWS: &[(&str, &str)] = &[
    ("by_g", "SELECT g, count(*) AS n, sum(v) AS s, max(v) AS top FROM t GROUP BY g"),
    ("bag", "SELECT v % 7 AS r FROM t"),
    ("plain", "SELECT k, v FROM t WHERE v % 2 = 0"),
    ("pairs", "SELECT a.k, b.v FROM t a JOIN u b ON a.g = b.k"),
    ("log", "SELECT n, n * 2 AS d FROM e WHERE n % 3 > 0"),
    // Over views.
    ("top", "SELECT s % 5 AS m, count(*) AS groups FROM by_g GROUP BY 1"),
    ("logged", "SELECT count(*) AS n, sum(d) AS s FROM log"),
];

async fn create(client: &Client) {
    run(
        client,
        "CREATE TABLE t (k int PRIMARY KEY, g int, v bigint);
         CREATE TABLE u (k int PRIMARY KEY, v bigint);
         CREATE TABLE e (n bigint) APPEND ONLY;
         CREATE TABLE copied (g int PRIMARY KEY, n bigint, s numeric, top bigint);",
    )
    .await;
    write(client, 0).await;
    for (name, query) in VIEWS {
        run(client, &format!("CREATE MATERIALIZED VIEW {name} AS {query}")).await;
    }
    run(client, "CREATE SINK copy INTO copied FROM by_g").await;
    run(client, "CREATE SUBSCRIPTION changes FROM by_g WITH (retention = '1 day')").await;
    run(client, "CREATE INDEX t_by_g ON t (g)").await;
}

/// Rows come, change and go.
async fn write(client: &Client, round: i64) {
    let from = round * 300;
    run(
        client,
        &format!(
            "INSERT INTO t SELECT x, x % 23, x * 3 FROM generate_series({from}, {}) AS s(x)",
            from + 299
        ),
    )
    .await;
    run(client, &format!("UPDATE t SET v = v + 1, g = (g + 5) % 23 WHERE k % 11 = {}", round % 11))
        .await;
    run(client, &format!("DELETE FROM t WHERE k % 13 = {}", round % 13)).await;
    run(
        client,
        &format!(
            "DELETE FROM u; INSERT INTO u SELECT x, x + {round} FROM generate_series(0, 19) AS s(x)"
        ),
    )
    .await;
    run(
        client,
        &format!("INSERT INTO e SELECT x FROM generate_series({from}, {}) AS s(x)", from + 99),
    )
    .await;
}

async fn check(client: &Client) {
    for (name, query) in VIEWS {
        assert_eq!(
            rows(client, &format!("SELECT * FROM {name}")).await,
            rows(client, query).await,
            "{name}"
        );
    }
    run(client, "FLUSH").await;
    assert_eq!(
        rows(client, "SELECT * FROM copied").await,
        rows(client, "SELECT * FROM by_g").await
    );
    assert_eq!(
        rows(client, "SELECT k, v FROM t WHERE g = 7").await,
        rows(client, "SELECT k, v FROM t WHERE g + 0 = 7").await
    );
}

/// Keeps a job from getting on, while the table changes, until it is detached.
async fn detach(node: &Node, client: &Client, name: &str) {
    let (meta, id) = (Arc::clone(&node.server().meta), id_of(client, name).await);
    let fail = async {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = meta.job_status(id).expect("the job is there");
            if status.state.name() == "detached" {
                return;
            }
            assert!(Instant::now() < deadline, "{name} is {:?}", status.state);
            meta.report_failure(id, status.generation, SqlError::internal("planted"));
            tokio::task::yield_now().await;
        }
    };
    let write = async {
        loop {
            run(client, "UPDATE t SET v = v + 1 WHERE k % 50 = 3; UPDATE u SET v = v + 1").await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    // Both go on until the first is done.
    tokio::select! {
        () = fail => {}
        () = write => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_detached_view_is_rebuilt_and_what_reads_it_goes_on() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let mut node = Node::start(&store, TUNING).await;
    let mut client = node.connect().await;
    create(&client).await;
    check(&client).await;
    let reader = node.connect().await;
    run(&reader, "DECLARE c SUBSCRIPTION CURSOR FOR changes").await;
    let before = rows(&client, "SELECT * FROM by_g").await;
    run(&client, "ALTER SYSTEM SET changelog_retention = '1s'").await;
    detach(&node, &client, "by_g").await;
    run(&client, "ALTER SYSTEM SET changelog_retention = '1 d'").await;

    for sql in ["SELECT * FROM by_g", "SELECT * FROM top", "FETCH ALL FROM c"] {
        let on = if sql.starts_with("FETCH") { &reader } else { &client };
        let (code, message, more) = error(on, sql).await;
        assert_eq!((code.as_str(), message.as_str()), ("55000", "relation \"by_g\" is detached"));
        assert!(
            more.contains("planted") && more.contains("ALTER MATERIALIZED VIEW by_g REBUILD"),
            "{more}"
        );
    }
    let jobs = "SELECT state, reason FROM millrace_catalog.jobs WHERE name = 'by_g'";
    let told = &rows(&client, jobs).await[0];
    assert!(told[0] == "detached" && told[1].contains("changelog_retention"), "{told:?}");
    run(&client, "SET read_freshness = 'any'").await;
    assert_eq!(rows(&client, "SELECT * FROM by_g").await.len(), before.len());
    run(&client, "RESET read_freshness").await;
    // The others go on.
    write(&client, 1).await;
    assert_eq!(rows(&client, "SELECT * FROM bag").await, rows(&client, VIEWS[1].1).await);

    run(&client, "ALTER MATERIALIZED VIEW by_g REBUILD").await;
    check(&client).await;
    // The cursor has the difference: together with what was there it is what is there now.
    let mut content = before;
    for change in suite::rows(&reader, "FETCH ALL FROM c").await.expect("changes") {
        let row = change[3..].to_vec();
        match change[1].as_str() {
            "insert" => content.push(row),
            _ => {
                let at =
                    content.iter().position(|r| *r == row).unwrap_or_else(|| panic!("{row:?}"));
                content.swap_remove(at);
            }
        }
    }
    content.sort();
    assert_eq!(content, rows(&client, "SELECT * FROM by_g").await);

    // The same content again, and for all kinds of rows, also those of a healthy view.
    for (name, _) in VIEWS {
        write(&client, 2).await;
        run(&client, &format!("ALTER MATERIALIZED VIEW {name} REBUILD")).await;
        check(&client).await;
        run(&client, "DELETE FROM t WHERE k >= 600").await;
    }
    run(&client, "ALTER INDEX t_by_g REBUILD").await;
    check(&client).await;
    drop((reader, client, node));
    node = Node::start(&store, TUNING).await;
    client = node.connect().await;
    check(&client).await;
    write(&client, 3).await;
    check(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rebuild_goes_on_after_a_crash_and_brings_only_the_difference() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let mut node = Node::start(&store, TUNING).await;
    let mut client = node.connect().await;
    create(&client).await;
    run(&client, "SET background_ddl = on").await;
    for round in 1..5 {
        write(&client, round).await;
        for (name, _) in VIEWS {
            run(&client, &format!("ALTER MATERIALIZED VIEW {name} REBUILD")).await;
        }
        drop((client, node));
        node = Node::start(&store, TUNING).await;
        client = node.connect().await;
        run(&client, "WAIT").await;
        check(&client).await;
        run(&client, "SET background_ddl = on").await;
    }
    // Nothing has changed: there is no difference.
    run(&client, "DECLARE c SUBSCRIPTION CURSOR FOR changes").await;
    run(&client, "RESET background_ddl; ALTER MATERIALIZED VIEW by_g REBUILD").await;
    assert_eq!(rows(&client, "FETCH ALL FROM c").await, Vec::<Vec<String>>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_detached_sink_waits_for_a_statement() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let node = Node::start(&store, TUNING).await;
    let client = node.connect().await;
    run(
        &client,
        "CREATE TABLE t (k int PRIMARY KEY, v int);
         CREATE TABLE copied (k int PRIMARY KEY, v int);
         INSERT INTO t VALUES (1, 1), (2, 2);
         CREATE SINK k INTO copied FROM t WITH (changelog_retention = '1s');
         FLUSH;
         ALTER SINK k PAUSE",
    )
    .await;
    let deadline = Instant::now() + PATIENCE;
    while state_of(&client, "k").await != "detached" {
        assert!(Instant::now() < deadline, "the sink is {}", state_of(&client, "k").await);
        run(&client, "UPDATE t SET v = v + 1 WHERE k = 1").await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    run(&client, "DELETE FROM t WHERE k = 2; INSERT INTO t VALUES (3, 3)").await;
    let (code, message, more) = error(&client, "ALTER SINK k RESUME").await;
    assert_eq!(code, "55000", "{message}");
    assert!(more.contains("it was paused") && more.contains("ALTER SINK k REBUILD"), "{more}");
    run(&client, "FLUSH").await;
    assert_eq!(one(&client, "SELECT count(*) FROM copied").await, "2");
    // It begins anew, with a snapshot: what was deleted meanwhile is not known to it.
    run(&client, "ALTER SINK k REBUILD").await;
    run(&client, "ALTER SINK k RESUME").await;
    let deadline = Instant::now() + PATIENCE;
    while state_of(&client, "k").await != "running" {
        assert!(Instant::now() < deadline, "the sink is {}", state_of(&client, "k").await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    run(&client, "FLUSH").await;
    assert_eq!(rows(&client, "SELECT k FROM copied").await, [["1"], ["2"], ["3"]]);
    run(&client, "DELETE FROM copied WHERE k = 2; UPDATE t SET v = 7; DELETE FROM t WHERE k = 3")
        .await;
    run(&client, "FLUSH").await;
    assert_eq!(rows(&client, "SELECT * FROM copied").await, [["1", "7"]]);
}
