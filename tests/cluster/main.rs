//! A cluster of real processes over one bucket: what is acknowledged is there once, and views equal their queries,
//! whichever process is killed, stopped or started again.

// A test is allowed what clippy.toml keeps from the engine.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod backups;
mod bad_starts;
mod broker;
mod clocks;
mod compactors;
mod console;
mod ctl;
mod definitions;
mod health;
mod hot_fetch;
mod interrupted;
mod leases;
mod metas;
mod missing;
mod nemesis;
mod network;
mod observed;
mod owners;
mod paths;
mod postgres;
mod process;
mod publishing;
mod sessions;
mod sources;
mod standalone;
mod suites;
mod takeover;
mod tls;
mod transfers;
mod unregistered;
mod versions;
mod without_store;
mod workloads;
mod writers;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use process::Cluster;
use sessions::LIMIT;
use tokio_postgres::{Client, Error, Row};
use transfers::Transfers;

/// Transfers that must be acknowledged after each event.
const PROGRESS: usize = 8;

async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(client: &Client, sql: &str) -> T {
    client.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}")).get(0)
}

async fn execute(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
}

/// How many rows one of two queries has and the other lacks, if any.
async fn compared(client: &Client, one: &str, other: &str) -> Result<Option<String>, Error> {
    let sql = format!(
        "WITH a AS ({one}), b AS ({other}) SELECT \
         (SELECT count(*) FROM (SELECT * FROM a EXCEPT ALL SELECT * FROM b) AS d), \
         (SELECT count(*) FROM (SELECT * FROM b EXCEPT ALL SELECT * FROM a) AS d)"
    );
    let row = client.query_one(&sql, &[]).await?;
    let (more, less): (i64, i64) = (row.get(0), row.get(1));
    Ok((more + less > 0).then(|| format!("{more} rows are too many, {less} are missing: {one}")))
}

/// The same of queries that do not fail.
async fn difference(client: &Client, one: &str, other: &str) -> Option<String> {
    compared(client, one, other).await.unwrap_or_else(|e| panic!("{one}; {other}: {e:?}"))
}

/// Two queries have the same rows, each as often.
async fn assert_equal(client: &Client, one: &str, other: &str) {
    let difference = difference(client, one, other).await;
    assert_eq!(difference, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_process_is_killed_and_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let admin = cluster.connect("frontend1").await;
    transfers::create(&admin).await;
    let addresses = ["frontend1", "frontend2"].map(|name| cluster.address(name));
    let running = Transfers::start(addresses);
    running.progress(PROGRESS).await;
    for name in Cluster::NAMES {
        let killed = Instant::now();
        cluster.process(name).kill();
        cluster.begin(name);
        if name.starts_with("frontend") {
            let addresses = ["frontend1", "frontend2"].map(|name| cluster.address(name));
            running.move_to(addresses);
        }
        running.progress(PROGRESS).await;
        println!("{name} was killed: transfers go on after {:?}", killed.elapsed());
    }
    let outcomes = running.end().await;
    for name in ["frontend1", "frontend2"] {
        outcomes.check(&cluster.connect(name).await).await;
    }
    drop(admin);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_worker_that_wakes_has_lost_its_jobs() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    transfers::create(&cluster.connect("frontend1").await).await;
    let addresses = ["frontend1", "frontend2"].map(|name| cluster.address(name));
    let running = Transfers::start(addresses);
    running.progress(PROGRESS).await;
    cluster.process("compute").signal("STOP");
    let mut stopped = cluster.begin("compute").expect("there was one before");
    running.progress(PROGRESS).await;
    stopped.signal("CONT");
    stopped.await_end(Duration::from_secs(60));
    assert!(stopped.log().contains("link: registered"), "{}", stopped.log());
    running.progress(PROGRESS).await;
    let outcomes = running.end().await;
    outcomes.check(&cluster.connect("frontend2").await).await;
}

/// A job as the leader knows it.
#[derive(Clone, Copy, Debug)]
struct Job {
    /// 0: it is placed nowhere.
    worker: i64,
    generation: i64,
    /// Of its last commit.
    epoch: i64,
}

async fn jobs(client: &Client) -> BTreeMap<String, Job> {
    let sql = "SELECT name, coalesce(worker, 0)::bigint, coalesce(generation, 0)::bigint, \
               coalesce(epoch, 0)::bigint FROM millrace_catalog.jobs";
    let rows = client.query(sql, &[]).await.unwrap();
    let job = |row: &Row| Job { worker: row.get(1), generation: row.get(2), epoch: row.get(3) };
    rows.iter().map(|row| (row.get(0), job(row))).collect()
}

/// Waits until all jobs are placed elsewhere than on a process that was killed. Those that were elsewhere have stayed as
/// they were, and if tables were among them, they have committed meanwhile.
async fn await_moved(client: &Client, before: &BTreeMap<String, Job>, lost: i64) {
    let deadline = Instant::now() + LIMIT;
    let mut now = jobs(client).await;
    while now.values().any(|job| [lost, 0].contains(&job.worker)) {
        assert!(Instant::now() < deadline, "jobs stay on a process that is gone: {now:?}");
        now = jobs(client).await;
    }
    let writes_go_on = before["accounts"].worker != lost;
    for (name, before) in before.iter().filter(|(_, job)| job.worker != lost) {
        let now = &now[name];
        let is_same = now.worker == before.worker && now.generation == before.generation;
        assert!(is_same, "{name} was not affected: {before:?}, {now:?}");
        let has_committed = now.epoch > before.epoch;
        assert!(has_committed || !writes_go_on, "{name} does not commit: {before:?}, {now:?}");
    }
}

/// Tables on one process, and views where there is room: each process has written something of its own.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_lost_process_go_on_elsewhere_and_no_others_move() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with(dir.path(), &Cluster::SPREAD).await;
    let admin = cluster.connect("frontend1").await;
    transfers::create(&admin).await;
    let addresses = ["frontend1", "frontend2"].map(|name| cluster.address(name));
    let running = Transfers::start(addresses);
    running.progress(PROGRESS).await;
    let computes = "SELECT incarnation::bigint, address FROM millrace_catalog.processes \
                    WHERE roles = ARRAY['compute'] ORDER BY 1";
    let computes: Vec<(i64, String)> =
        admin.query(computes, &[]).await.unwrap().iter().map(|r| (r.get(0), r.get(1))).collect();
    assert_eq!(computes.len(), 3);
    let works = |id: &i64| cluster.objects_of(*id as u64) > 0;
    let deadline = Instant::now() + Duration::from_secs(60);
    while !computes.iter().all(|(id, _)| works(id)) {
        assert!(Instant::now() < deadline, "a process has nothing to do: {computes:?}");
        running.progress(1).await;
    }
    let tables = jobs(&admin).await["accounts"].worker;
    for name in ["compute3", "compute1"] {
        let address = cluster.address(name);
        let (lost, _) = computes.iter().find(|(_, a)| *a == address).expect("it has registered");
        assert_eq!(*lost == tables, name == "compute1", "the tables are on one of them");
        let before = jobs(&admin).await;
        let killed = Instant::now();
        cluster.process(name).kill();
        await_moved(&admin, &before, *lost).await;
        println!("{name} was killed: its jobs are placed elsewhere after {:?}", killed.elapsed());
        // Transfers do not need all processes; a fresh read of the views does.
        assert_eq!(one::<i64>(&admin, "SELECT accounts FROM totals").await, transfers::ACCOUNTS);
        one::<i64>(&admin, "SELECT sum(transfers)::bigint FROM paid").await;
        running.progress(PROGRESS).await;
        println!("{name} was killed: all goes on elsewhere after {:?}", killed.elapsed());
    }
    cluster.begin("compute1");
    let left = Instant::now();
    cluster.process("compute2").signal("TERM");
    cluster.process("compute2").await_end(Duration::from_secs(60));
    assert_eq!(one::<i64>(&admin, "SELECT accounts FROM totals").await, transfers::ACCOUNTS);
    running.progress(PROGRESS).await;
    println!("compute2 has left: all goes on elsewhere after {:?}", left.elapsed());
    let outcomes = running.end().await;
    let unknown = outcomes.errors.keys().find(|error| error.starts_with("08007"));
    assert_eq!(unknown, None, "the log tells what became of a statement whose process was lost");
    outcomes.check(&cluster.connect("frontend2").await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn committed_state_is_read_while_nobody_else_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let client = cluster.connect("frontend1").await;
    transfers::create(&client).await;
    let total: i64 = one(&client, "SELECT total::bigint FROM totals").await;
    for name in ["compute", "compactor", "meta"] {
        cluster.process(name).kill();
    }
    let other = cluster.connect("frontend2").await;
    for client in [&client, &other] {
        client.batch_execute("SET read_freshness = 'any'").await.unwrap();
        assert_eq!(one::<i64>(client, "SELECT total::bigint FROM totals").await, total);
        assert_eq!(one::<i64>(client, "SELECT count(*) FROM accounts").await, transfers::ACCOUNTS);
    }
    // What needs the leader says that it is not there, and takes its time before.
    other
        .batch_execute("SET read_freshness = 'newest'; SET read_wait_timeout = '500ms'")
        .await
        .unwrap();
    let error = other.query("SELECT count(*) FROM accounts", &[]).await.unwrap_err();
    assert_eq!(error.code().map(|c| c.code()), Some("57P03"), "{error:?}");
    cluster.begin("meta");
    cluster.begin("compute");
    other.batch_execute("SET read_wait_timeout = '60s'").await.unwrap();
    other.execute("UPDATE accounts SET balance = balance + 1 WHERE id = 1", &[]).await.unwrap();
    assert_eq!(one::<i64>(&other, "SELECT total::bigint FROM totals").await, total + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_are_merged_by_the_compactor() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let client = cluster.connect("frontend1").await;
    transfers::create(&client).await;
    let compactor: i64 = one(
        &client,
        "SELECT incarnation::bigint FROM millrace_catalog.processes WHERE roles = ARRAY['compactor']",
    )
    .await;
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut round = 0;
    while cluster.objects_of(compactor as u64) == 0 {
        assert!(Instant::now() < deadline, "{}", cluster.process("compactor").log());
        round += 1;
        let sql = format!(
            "INSERT INTO transfers SELECT 1000000 + {round} * 1000 + x, 1, 2, repeat('x', 100) \
             FROM generate_series(1, 500) AS x(x)"
        );
        client.execute(&sql, &[]).await.unwrap();
    }
    let count: i64 = one(&client, "SELECT count(*) FROM transfers").await;
    assert_eq!(count, round * 500);
}
