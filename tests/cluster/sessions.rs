//! What sessions of several frontends have to do with each other.

use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_postgres::{Client, NoTls};

use crate::one;
use crate::process::{Cluster, stop};

/// How long a test waits for what must come.
pub const LIMIT: Duration = Duration::from_secs(60);
/// A statement that does not end by itself, on the threads of queries.
const LONG: &str =
    "SELECT count(*) FROM generate_series(1, 10000000) a, generate_series(1, 10000000) b";

fn code(error: &tokio_postgres::Error) -> &str {
    error.code().map_or("", |code| code.code())
}

/// Returns when the session of this process id runs a statement.
async fn await_active(observer: &Client, pid: i32) {
    let sql =
        format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND state = 'active'");
    await_true(observer, &sql).await;
}

/// Returns when a count is not 0.
pub async fn await_true(observer: &Client, sql: &str) {
    let deadline = Instant::now() + LIMIT;
    while one::<i64>(observer, sql).await == 0 {
        assert!(Instant::now() < deadline, "{sql}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_is_cancelled_through_another_frontend() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(dir.path()).await;
    let (session, observer) =
        (cluster.connect("frontend1").await, cluster.connect("frontend1").await);
    let other = cluster.connect("frontend2").await;
    let pid: i32 = one(&session, "SELECT pg_backend_pid()").await;
    assert!(pid > 0);
    // The other one may not have been told of the first yet.
    let told = "SELECT (count(*) = 2)::int::bigint FROM millrace_catalog.processes \
                WHERE roles = ARRAY['frontend']";
    await_true(&other, told).await;

    for statement in [LONG, "SELECT pg_sleep(600)"] {
        let running = session.simple_query(statement);
        let cancel = async {
            await_active(&observer, pid).await;
            let socket = TcpStream::connect(cluster.address("frontend2")).await.unwrap();
            session.cancel_token().cancel_query_raw(socket, NoTls).await.unwrap();
        };
        let (outcome, ()) = tokio::join!(running, cancel);
        let error = outcome.expect_err("the statement never ends by itself");
        assert_eq!(code(&error), "57014", "{error:?}");
    }

    let running = session.simple_query(LONG);
    let cancel = async {
        await_active(&observer, pid).await;
        assert!(one::<bool>(&other, &format!("SELECT pg_cancel_backend({pid})")).await);
    };
    let (outcome, ()) = tokio::join!(running, cancel);
    assert_eq!(code(&outcome.expect_err("it never ends by itself")), "57014");
    assert_eq!(one::<i32>(&session, "SELECT pg_backend_pid()").await, pid, "the session goes on");

    assert!(one::<bool>(&other, &format!("SELECT pg_terminate_backend({pid})")).await);
    let is_gone =
        format!("SELECT (count(*) = 0)::int::bigint FROM pg_stat_activity WHERE pid = {pid}");
    await_true(&observer, &is_gone).await;
    session.simple_query("SELECT 1").await.expect_err("the session was ended");
    assert!(!one::<bool>(&other, "SELECT pg_cancel_backend(2147483647)").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_request_with_another_key_is_not_heeded() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(dir.path()).await;
    let (session, observer) =
        (cluster.connect("frontend1").await, cluster.connect("frontend1").await);
    let pid: i32 = one(&session, "SELECT pg_backend_pid()").await;
    let running = session.simple_query("SELECT pg_sleep(3)");
    let cancel = async {
        await_active(&observer, pid).await;
        for name in ["frontend1", "frontend2"] {
            forge_cancel(&cluster.address(name), pid).await;
        }
    };
    let (outcome, ()) = tokio::join!(running, cancel);
    outcome.expect("nobody who may has cancelled it");
}

/// Sends cancel requests with keys that nobody was given, and returns when they have been taken.
async fn forge_cancel(address: &str, pid: i32) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let forwarded = |kind: u8| [&[kind][..], &[0; 7], &[1], &[0; 32]].concat();
    for key in [vec![0; 4], forwarded(2), forwarded(3)] {
        let length = (12 + key.len()) as i32;
        let numbers = [length, 80_877_102, pid].map(i32::to_be_bytes).concat();
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(&[numbers, key].concat()).await.unwrap();
        assert_eq!(socket.read(&mut [0; 8]).await.unwrap(), 0, "it is closed without a word");
    }
}

/// Tells what a statement gives, or the code of its error.
async fn outcome(client: &Client, sql: &str) -> Result<(), String> {
    client.batch_execute(sql).await.map_err(|e| code(&e).to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn advisory_locks_are_of_all_frontends() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(dir.path()).await;
    let one_session = cluster.connect("frontend1").await;
    let other = cluster.connect("frontend2").await;
    let (pid, other_pid): (i32, i32) = (
        one(&one_session, "SELECT pg_backend_pid()").await,
        one(&other, "SELECT pg_backend_pid()").await,
    );
    let takes = async |client: &Client, key: i32| {
        one::<bool>(client, &format!("SELECT pg_try_advisory_lock({key}) AS taken")).await
    };

    // Whoever has a lock has it for all; it is given back as often as it was taken.
    assert!(takes(&one_session, 7).await && takes(&one_session, 7).await);
    assert!(!takes(&other, 7).await);
    assert!(one::<bool>(&one_session, "SELECT pg_advisory_unlock(7)").await);
    assert!(!takes(&other, 7).await);
    let held = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted";
    assert_eq!(one::<i32>(&other, held).await, pid, "a lock of another frontend is listed");

    // Who waits has the lock when it is given back.
    let waits = format!("SELECT count(*) FROM pg_locks WHERE pid = {other_pid} AND NOT granted");
    let observer = cluster.connect("frontend2").await;
    let (waited, ()) = tokio::join!(outcome(&other, "SELECT pg_advisory_lock(7)"), async {
        await_true(&observer, &waits).await;
        let blocking = format!("SELECT (pg_blocking_pids({other_pid}))[1]::int");
        assert_eq!(one::<i32>(&observer, &blocking).await, pid);
        outcome(&one_session, "SELECT pg_advisory_unlock(7)").await.unwrap();
    });
    waited.unwrap();
    assert!(!takes(&one_session, 7).await);

    // A wait ends with its statement: by a limit, or when it is cancelled.
    let limited = "SET lock_timeout = '200ms'; SELECT pg_advisory_lock(7)";
    assert_eq!(outcome(&one_session, limited).await, Err("55P03".to_owned()));
    outcome(&one_session, "RESET lock_timeout").await.unwrap();
    let waits = format!("SELECT count(*) FROM pg_locks WHERE pid = {pid} AND NOT granted");
    let (cancelled, ()) =
        tokio::join!(outcome(&one_session, "SELECT pg_advisory_lock(7)"), async {
            await_true(&observer, &waits).await;
            let cancel = format!("SELECT pg_cancel_backend({pid})");
            assert!(one::<bool>(&observer, &cancel).await);
        });
    assert_eq!(cancelled, Err("57014".to_owned()));
    let nobody = "SELECT (count(*) = 0)::int::bigint FROM pg_locks WHERE NOT granted";
    await_true(&observer, nobody).await;

    // A circle of waits over two frontends is found.
    assert!(takes(&one_session, 8).await);
    let (first, second) =
        tokio::join!(outcome(&one_session, "SELECT pg_advisory_lock(7)"), async {
            await_true(&observer, &waits).await;
            let second = outcome(&other, "SELECT pg_advisory_lock(8)").await;
            assert!(one::<bool>(&other, "SELECT pg_advisory_unlock(7)").await);
            second
        });
    assert_eq!((first, second), (Ok(()), Err("40P01".to_owned())));
}

#[tokio::test(flavor = "multi_thread")]
async fn advisory_locks_end_with_whoever_holds_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let one_session = cluster.connect("frontend1").await;
    let other = cluster.connect("frontend2").await;
    let takes = async |client: &Client, key: i32| {
        one::<bool>(client, &format!("SELECT pg_try_advisory_lock({key})")).await
    };
    // Those of a transaction end with it, or with what is rolled back of it.
    assert!(takes(&one_session, 7).await);
    one_session
        .batch_execute(
            "BEGIN; SELECT pg_advisory_xact_lock(9); SAVEPOINT s; \
             SELECT pg_try_advisory_xact_lock(10); ROLLBACK TO SAVEPOINT s",
        )
        .await
        .unwrap();
    outcome(&other, "SELECT pg_advisory_lock(10)").await.unwrap();
    assert!(!takes(&other, 9).await);
    outcome(&one_session, "COMMIT").await.unwrap();
    outcome(&other, "SELECT pg_advisory_lock(9)").await.unwrap();

    // Within a query nobody can wait for the leader, and nobody is told that the lock is his.
    let within = "SELECT pg_try_advisory_lock(n) FROM generate_series(1, 2) AS g(n)";
    assert_eq!(outcome(&other, within).await, Err("0A000".to_owned()));

    // They end with their session, and with their frontend.
    drop(one_session);
    outcome(&other, "SELECT pg_advisory_lock(7)").await.unwrap();
    let lost = cluster.connect("frontend1").await;
    assert!(takes(&lost, 11).await && !takes(&other, 11).await);
    cluster.process("frontend1").kill();
    outcome(&other, "SELECT pg_advisory_lock(11)").await.unwrap();
}

/// What its clients have sent meanwhile it takes for theirs when it goes on, and their locks are others' by then.
#[tokio::test(flavor = "multi_thread")]
async fn who_wakes_up_when_others_have_its_advisory_locks_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let holder = cluster.connect("frontend1").await;
    let block = cluster.connect("frontend1").await;
    let definer = cluster.connect("frontend1").await;
    let other = cluster.connect("frontend2").await;
    outcome(&holder, "CREATE TABLE t (id bigint PRIMARY KEY, who text)").await.unwrap();
    outcome(&holder, "SELECT pg_advisory_lock(1)").await.unwrap();
    outcome(&holder, "INSERT INTO t VALUES (1, 'holder')").await.unwrap();
    let begun = "BEGIN; SELECT pg_advisory_xact_lock(2); INSERT INTO t VALUES (2, 'holder')";
    outcome(&block, begun).await.unwrap();
    outcome(&definer, "SELECT pg_advisory_lock(3)").await.unwrap();

    stop(cluster.process("frontend1").id());
    let takes_over = async {
        for key in 1..=3 {
            outcome(&other, &format!("SELECT pg_advisory_lock({key})")).await.unwrap();
        }
        outcome(&other, "INSERT INTO t VALUES (10, 'other')").await.unwrap();
        cluster.process("frontend1").signal("CONT");
    };
    let (inserted, committed, defined, ()) = tokio::join!(
        outcome(&holder, "INSERT INTO t VALUES (3, 'holder')"),
        outcome(&block, "COMMIT"),
        outcome(&definer, "CREATE TABLE u (id bigint PRIMARY KEY)"),
        takes_over
    );
    let outcomes = [inserted, committed, defined];
    assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
    let process = cluster.process("frontend1");
    process.await_end(LIMIT);
    assert!(process.log().contains("has been fenced"), "{}", process.log());
    // What it has sent before it ended would be there by now.
    outcome(&other, "FLUSH").await.unwrap();
    let rows: i64 = one(&other, "SELECT count(*) FROM t WHERE who = 'holder'").await;
    assert_eq!(rows, 1, "what was acknowledged before it was stopped, and nothing else");
    let made: i64 = one(&other, "SELECT count(*) FROM pg_class WHERE relname = 'u'").await;
    assert_eq!(made, 0);
}

/// SIGTERM: whoever is connected is told, and the leader.
#[tokio::test(flavor = "multi_thread")]
async fn a_frontend_that_ends_tells_its_sessions_and_leaves() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["meta", "compute", "frontend1", "frontend2"];
    let mut cluster = Cluster::start_with(dir.path(), &names).await;
    let observer = cluster.connect("frontend2").await;
    let address = cluster.address("frontend1");
    let own = format!("FROM millrace_catalog.processes WHERE address = '{address}'");
    await_true(&observer, &format!("SELECT count(*) {own}")).await;
    let incarnation: i64 = one(&observer, &format!("SELECT incarnation::bigint {own}")).await;

    let (host, port) = address.rsplit_once(':').unwrap();
    let config = format!("host={host} port={port} user=root dbname=dev connect_timeout=10");
    let (resting, connection) = tokio_postgres::connect(&config, NoTls).await.unwrap();
    let resting_ends = tokio::spawn(connection);
    assert!(one::<bool>(&resting, "SELECT pg_try_advisory_lock(7)").await);
    let busy = cluster.connect("frontend1").await;
    let pid: i32 = one(&busy, "SELECT pg_backend_pid()").await;
    let (busy_ends, ()) = tokio::join!(busy.simple_query("SELECT pg_sleep(600)"), async {
        await_active(&observer, pid).await;
        cluster.process("frontend1").signal("TERM");
    });
    assert_eq!(code(&busy_ends.expect_err("it never ends by itself")), "57P01");
    let told = tokio::time::timeout(LIMIT, resting_ends).await.unwrap().unwrap();
    assert_eq!(code(&told.expect_err("the server ends it")), "57P01");
    cluster.process("frontend1").await_end(LIMIT);

    await_true(&observer, &format!("SELECT (count(*) = 0)::int::bigint {own}")).await;
    let deadline = Instant::now() + LIMIT;
    while !one::<bool>(&observer, "SELECT pg_try_advisory_lock(7)").await {
        assert!(Instant::now() < deadline, "a lock of one of its sessions is still held");
    }
    let log = cluster.process("meta").log();
    let of_it = format!("[{incarnation}]");
    let was_lost = |line: &&str| line.contains("for too long") && line.contains(&of_it);
    assert_eq!(log.lines().find(was_lost), None, "it has left by itself");
}

/// Runs statements until one fails, and returns the code of the error.
async fn await_error(client: &Client, sql: &str) -> String {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Err(code) = outcome(client, sql).await {
            return code;
        }
        assert!(Instant::now() < deadline, "{sql} goes on");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_lost_advisory_locks_with_their_leader_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let (holder, writer) = (cluster.connect("frontend1").await, cluster.connect("frontend1").await);
    outcome(&holder, "CREATE TABLE t (id bigint PRIMARY KEY)").await.unwrap();
    outcome(&holder, "SELECT pg_advisory_lock(1)").await.unwrap();
    let block = "BEGIN; SELECT pg_advisory_xact_lock(2); INSERT INTO t VALUES (1)";
    outcome(&writer, block).await.unwrap();

    cluster.process("meta").kill();
    cluster.begin("meta");
    assert_eq!(await_error(&holder, "SELECT 1").await, "55000");
    outcome(&holder, "SELECT 1").await.expect("it is told once");
    assert_eq!(outcome(&writer, "COMMIT").await, Err("55000".to_owned()));
    let rows: i64 = one(&holder, "SELECT count(*) FROM t").await;
    assert_eq!(rows, 0, "a transaction without its lock commits nothing");

    // The new leader has locks to give.
    outcome(&holder, "SELECT pg_advisory_lock(1)").await.unwrap();
    let other = cluster.connect("frontend2").await;
    assert!(!one::<bool>(&other, "SELECT pg_try_advisory_lock(1)").await);
    assert!(one::<bool>(&other, "SELECT pg_try_advisory_lock(2)").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_all_frontends_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let one_session = cluster.connect("frontend1").await;
    let other = cluster.connect("frontend2").await;
    let (pid, other_pid): (i32, i32) = (
        one(&one_session, "SELECT pg_backend_pid()").await,
        one(&other, "SELECT pg_backend_pid()").await,
    );
    let lists = |pid: i32, query: &str| {
        format!(
            "SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND usename = 'root' \
             AND query LIKE '{query}%' AND backend_start <= now()"
        )
    };
    await_true(&one_session, &lists(other_pid, "SELECT pg_backend_pid()")).await;
    await_true(&other, &lists(pid, "SELECT count(*)")).await;
    outcome(&other, "BEGIN").await.unwrap();
    let resting = format!("{} AND state = 'idle in transaction'", lists(other_pid, "BEGIN"));
    await_true(&one_session, &resting).await;

    // Who does not answer is left out, and nobody waits for it.
    cluster.process("frontend2").signal("STOP");
    assert_eq!(one::<i64>(&one_session, &lists(other_pid, "")).await, 0);
    assert_eq!(one::<i64>(&one_session, &lists(pid, "")).await, 1);
    cluster.process("frontend2").signal("CONT");
    cluster.process("meta").kill();
    assert_eq!(one::<i64>(&one_session, &lists(pid, "")).await, 1, "own sessions always");
}
