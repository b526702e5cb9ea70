//! Backups of a cluster that goes on: what they name stays whoever leads, is restored into a store of its own, and goes
//! when they are released.

use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio_postgres::Client;

use crate::ctl::{json, refused, told};
use crate::one;
use crate::process::{Cluster, Process, connect, free_address};
use crate::sessions::await_true;
use crate::standalone::served;

const LIMIT: Duration = Duration::from_secs(60);
const SETUP: &str = "
    CREATE TABLE items (id bigint PRIMARY KEY, v bigint NOT NULL, filler text);
    CREATE TABLE marks (n bigint PRIMARY KEY);
    CREATE MATERIALIZED VIEW sums AS SELECT id % 10 AS k, sum(v)::bigint AS v, count(*) AS n FROM items GROUP BY id % 10;
    CREATE MATERIALIZED VIEW top AS SELECT k, v FROM sums ORDER BY v DESC, k LIMIT 3;
    INSERT INTO marks SELECT i FROM generate_series(1, 50) AS g(i)";
/// Everything that a store says of its tables and views, as one text each.
const CONTENT: [&str; 4] = [
    "SELECT count(*)::text || ' ' || sum(v)::text || ' ' || sum(length(filler))::text FROM items",
    "SELECT string_agg(k::text || ':' || v::text || ':' || n::text, ' ' ORDER BY k) FROM sums",
    "SELECT string_agg(k::text || ':' || v::text, ' ' ORDER BY k) FROM top",
    "SELECT count(*)::text || ' ' || sum(n)::text FROM marks",
];

async fn content(client: &Client) -> Vec<String> {
    let mut found = Vec::new();
    for sql in CONTENT {
        found.push(one(client, sql).await);
    }
    found
}

/// Enough for flushes and compactions.
async fn write(client: &Client, from: u32, rounds: u32) {
    for round in from..from + rounds {
        let sql = format!(
            "INSERT INTO items SELECT {round} * 100 + i, i * {round}, repeat('x', 100) FROM generate_series(0, 99) AS g(i)"
        );
        client.batch_execute(&sql).await.expect("rows");
        let sql = format!("DELETE FROM items WHERE id % 7 = {}", round % 7);
        client.batch_execute(&sql).await.expect("fewer rows");
    }
}

/// Begins to restore a backup into a prefix.
fn restoring(cluster: &Cluster, backup: &str, prefix: &str) -> Child {
    let (from, to) = (Cluster::store("millrace"), Cluster::store(prefix));
    let mut command = cluster.program();
    command.args(["ctl", "restore", backup, "--from", &from, "--to", &to]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary is there")
}

fn restored(cluster: &Cluster, backup: &str, prefix: &str) -> Output {
    restoring(cluster, backup, prefix).wait_with_output().expect("it ends")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

async fn start(cluster: &mut Cluster, prefix: &str) -> (Process, Client) {
    let listen = free_address();
    let server = cluster.standalone_on(prefix, &listen, &[]);
    let client = served(&listen).await;
    (server, client)
}

/// A cluster is started on a backup that was restored: it has this content, and its views follow.
async fn check_cluster_on(cluster: &mut Cluster, backup: &str, expected: &[String]) {
    const PREFIX: &str = "restored-for-a-cluster";
    let output = restored(cluster, backup, PREFIX);
    assert!(output.status.success(), "{}", text(&output));
    let meta = cluster.process_on(PREFIX, "meta", None);
    let [_compute, frontend] =
        ["compute", "frontend"].map(|role| cluster.process_on(PREFIX, role, Some(&meta.address)));
    let copy = connect(&frontend.address).await.expect("the frontend takes sessions");
    assert_eq!(content(&copy).await, expected);
    copy.batch_execute("INSERT INTO items VALUES (-1, 5, 'y')").await.expect("a row");
    assert_eq!(one::<i64>(&copy, "SELECT n FROM sums WHERE k = -1").await, 1);
}

fn listed(metas: &str, name: &str) -> Value {
    let all = json(metas, &["backup", "list"]);
    let all = all.as_array().expect("a list");
    all.iter().find(|b| b["name"] == name).unwrap_or_else(|| panic!("{name}: {all:#?}")).clone()
}

/// Collects until this holds of the number of objects that are garbage and not deleted.
async fn collect(metas: &str, holds: impl Fn(u64) -> bool) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let report = json(metas, &["collection", "--run"]);
        if holds(report["garbage_objects"].as_u64().expect("a number")) {
            return;
        }
        assert!(Instant::now() < deadline, "{report}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_is_restored_elsewhere_while_the_cluster_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with(dir.path(), &Cluster::TWO_METAS).await;
    let metas = ["meta1", "meta2"].map(|name| cluster.address(name)).join(",");
    let client = cluster.connect("frontend1").await;
    client.batch_execute(SETUP).await.expect("a schema");
    let retention = "ALTER SYSTEM SET object_retention = '100ms'";
    client.batch_execute(retention).await.expect("a setting");
    let files = dir.path().join("files");
    let sink = format!(
        "CREATE SINK files FROM marks WITH (connector = 'fs', path = '{}', force_append_only = true) FORMAT PLAIN ENCODE JSON",
        files.display()
    );
    client.batch_execute(&sink).await.expect("a sink");
    write(&client, 0, 20).await;
    let expected = content(&client).await;

    let made = json(&metas, &["backup", "create", "--name", "monday"]);
    assert!(made["objects"].as_u64() > Some(0) && made["bytes"].as_u64() > Some(0), "{made}");
    let again = refused(Some(&metas), &["backup", "create", "--name", "monday"]);
    assert!(again.contains("there is a backup \"monday\" already"), "{again}");

    // All that it names is garbage soon, but for the backup.
    for sql in [
        "DROP TABLE items CASCADE",
        "DELETE FROM marks WHERE n <= 40",
        "CREATE TABLE items (other int)",
    ] {
        client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    }
    collect(&metas, |left| left > 0).await;
    for name in ["meta1", "meta2"] {
        // Whichever leads: then nobody has it in memory.
        cluster.process(name).kill();
        cluster.begin(name);
    }
    let shown = listed(&metas, "monday");
    assert_eq!((&shown["record"], &shown["state"]), (&made["record"], &"complete".into()));
    collect(&metas, |_| listed(&metas, "monday")["kept_objects"].as_u64() > Some(0)).await;

    // One is killed in the middle, wherever that is, and another one goes on from there.
    let mut cut_off = restoring(&cluster, "monday", "restored");
    let deadline = Instant::now() + LIMIT;
    while cluster.objects_below("restored").is_empty() {
        assert!(Instant::now() < deadline, "nothing is copied");
        std::thread::yield_now();
    }
    cut_off.kill().expect("a signal");
    cut_off.wait().expect("it ends");
    let has_database = |cluster: &Cluster| {
        let objects = cluster.objects_below("restored");
        objects.keys().any(|path| path.display().to_string().contains("meta/snapshot/"))
    };
    let output = match has_database(&cluster) {
        // It was quicker.
        true => None,
        false => Some(restored(&cluster, "monday", "restored")),
    };
    let succeeded = output.as_ref().is_none_or(|output| output.status.success());
    assert!(
        succeeded && has_database(&cluster),
        "{}",
        output.as_ref().map(text).unwrap_or_default()
    );
    let told_again = restored(&cluster, "monday", "restored");
    assert!(!told_again.status.success());
    assert!(text(&told_again).contains("holds a database already"), "{}", text(&told_again));
    let onto_itself = restored(&cluster, "monday", "millrace");
    assert!(text(&onto_itself).contains("holds a database already"), "{}", text(&onto_itself));

    let published = std::fs::read_dir(&files).map_or(0, |entries| entries.count());
    let (server, copy) = start(&mut cluster, "restored").await;
    assert_eq!(content(&copy).await, expected);
    copy.batch_execute("INSERT INTO items VALUES (-1, 5, 'y'); INSERT INTO marks VALUES (1000)")
        .await
        .expect("rows");
    assert_eq!(one::<i64>(&copy, "SELECT n FROM sums WHERE k = -1").await, 1);
    let paused =
        "SELECT count(*) FROM millrace_catalog.jobs WHERE name = 'files' AND state = 'paused'";
    await_true(&copy, paused).await;
    assert_eq!(std::fs::read_dir(&files).map_or(0, |entries| entries.count()), published);
    check_cluster_on(&mut cluster, "monday", &expected).await;
    // The cluster has noticed nothing.
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM marks").await, 10);
    client.batch_execute("INSERT INTO items VALUES (7)").await.expect("the cluster goes on");
    drop(server);

    assert!(told(&metas, &["backup", "release", "monday"]).contains("Nothing is kept"));
    assert_eq!(json(&metas, &["backup", "list"]).as_array().map(Vec::len), Some(0));
    collect(&metas, |left| left == 0).await;
    let backups = cluster.objects_below("millrace/meta/backup");
    assert!(backups.is_empty(), "{backups:?}");
    let gone = restored(&cluster, "monday", "later");
    assert!(text(&gone).contains("there is no backup \"monday\""), "{}", text(&gone));
    assert!(cluster.objects_below("later").is_empty());
    let unknown = refused(Some(&metas), &["backup", "release", "monday"]);
    assert!(unknown.contains("there is no backup \"monday\""), "{unknown}");
    let bad = refused(Some(&metas), &["backup", "create", "--name", "12"]);
    assert!(bad.contains("is no name of a backup"), "{bad}");
}
