//! A frontend that is started while nobody leads reads what is committed from log and bucket, and registers by itself when
//! somebody leads.

use std::process::Command;
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::process::{Cluster, Process, connect};
use crate::{execute, one};

/// How long something may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
const NAMES: [&str; 3] = ["meta", "compute", "frontend1"];

/// Fails because nobody leads, without effect.
async fn waits_in_vain(client: &Client, sql: &str) {
    let error = client.batch_execute(sql).await.expect_err(sql);
    let error = error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error:?}"));
    assert_eq!(error.code().code(), "57P03", "{sql}: {error:?}");
    assert!(error.hint().unwrap_or_default().contains("read_freshness"), "{sql}: {error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frontend_serves_before_there_is_a_leader_and_registers_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with_consoles(dir.path(), &NAMES).await;
    let client = cluster.connect("frontend1").await;
    let sql =
        "CREATE TABLE t (id int PRIMARY KEY, n bigint); INSERT INTO t VALUES (1, 10), (2, 20);
               CREATE MATERIALIZED VIEW v AS SELECT sum(n)::bigint AS s FROM t";
    execute(&client, sql).await;
    assert_eq!(one::<i64>(&client, "SELECT s FROM v").await, 30);
    for name in NAMES {
        cluster.process(name).kill();
    }

    cluster.begin("frontend1");
    let unhealthy = millrace::health::check(cluster.console("frontend1")).unwrap_err();
    assert!(unhealthy.contains("503") && unhealthy.contains("not registered yet"), "{unhealthy}");
    let client = cluster.connect("frontend1").await;
    execute(&client, "SET read_freshness = 'any'").await;
    assert_eq!(one::<i64>(&client, "SELECT s FROM v").await, 30);
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM t").await, 2);
    execute(&client, "SET read_freshness = 'newest'; SET read_wait_timeout = '500ms'").await;
    waits_in_vain(&client, "SELECT * FROM t").await;
    waits_in_vain(&client, "INSERT INTO t VALUES (3, 30)").await;

    cluster.begin("meta");
    cluster.begin("compute");
    let deadline = Instant::now() + LIMIT;
    while let Err(why) = millrace::health::check(cluster.console("frontend1")) {
        assert!(Instant::now() < deadline, "{why}:\n{}", cluster.process("frontend1").log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // The session goes on, and so would one that begins now.
    for (client, id) in [(&client, 4), (&cluster.connect("frontend1").await, 5)] {
        execute(client, "SET read_wait_timeout = '60s'").await;
        execute(client, &format!("INSERT INTO t VALUES ({id}, 100)")).await;
        assert!(one::<bool>(client, &format!("SELECT pg_try_advisory_lock({id})")).await);
    }
    assert_eq!(
        one::<i64>(&client, "SELECT s FROM v").await,
        230,
        "what has failed has had no effect"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_comes_in_where_no_meta_process_has_ever_led() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    // Nobody listens at that port.
    command
        .args(["frontend", "--http=off", "--memory-limit=128MB", "--meta=127.0.0.1:1"])
        .args(["--listen", "127.0.0.1:0"])
        .args(["--object-store", &format!("file://{}", dir.path().join("store").display())])
        .arg("--data-dir")
        .arg(dir.path().join("data"));
    let mut frontend = Process::spawn(command);
    frontend.await_ready();
    let Err(error) = connect(&frontend.address).await else { panic!("nobody has led") };
    assert_eq!(error.code().map(|c| c.code()), Some("57P03"), "{error:?}");
}
