//! `millrace ctl`: what it shows is so, and what it changes holds, while statements go on.

use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::process::{Cluster, free_address};
use crate::transfers::{self, Outcomes, Transfers};
use crate::{PROGRESS, one};

const LIMIT: Duration = Duration::from_secs(60);

/// Runs it; what it was told is in the environment, as for the other processes, or among the arguments.
fn ctl(metas: Option<&str>, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    command.arg("ctl").args(arguments).env_remove("MILLRACE_META");
    command.envs(metas.map(|metas| ("MILLRACE_META", metas)));
    command.output().expect("the binary is there")
}

/// What it prints.
pub fn told(metas: &str, arguments: &[&str]) -> String {
    let output = ctl(Some(metas), arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).expect("it prints text")
}

pub fn json(metas: &str, arguments: &[&str]) -> Value {
    let arguments = [&["--json"], arguments].concat();
    serde_json::from_str(&told(metas, &arguments)).expect("it prints JSON")
}

fn rows(metas: &str, command: &str) -> Vec<Value> {
    json(metas, &[command]).as_array().expect("a list").clone()
}

/// What it says is wrong; it must fail.
pub fn refused(metas: Option<&str>, arguments: &[&str]) -> String {
    let output = ctl(metas, arguments);
    assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?} must fail");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The process that a job runs on.
fn worker_of(metas: &str, job: &str) -> u64 {
    let jobs = rows(metas, "jobs");
    let job = jobs.iter().find(|j| j["name"] == job).unwrap_or_else(|| panic!("{job}: {jobs:?}"));
    job["worker"].as_u64().unwrap_or(0)
}

fn generation_of(metas: &str, job: &str) -> u64 {
    let jobs = rows(metas, "jobs");
    let job = jobs.iter().find(|j| j["name"] == job).expect("there is such a job");
    job["generation"].as_u64().expect("a number")
}

struct Test {
    cluster: Cluster,
    metas: String,
    running: Transfers,
    _dir: tempfile::TempDir,
}

impl Test {
    async fn start() -> Test {
        let dir = tempfile::tempdir().unwrap();
        let cluster = Cluster::start_with(dir.path(), &Cluster::TWO_METAS_SPREAD).await;
        transfers::create(&cluster.connect("frontend1").await).await;
        let addresses = ["frontend1", "frontend2"].map(|name| cluster.address(name));
        let running = Transfers::start(addresses);
        running.progress(PROGRESS).await;
        let metas = ["meta1", "meta2"].map(|name| cluster.address(name)).join(",");
        Test { cluster, metas, running, _dir: dir }
    }

    async fn end(self) -> Outcomes {
        let outcomes = self.running.end().await;
        for name in ["frontend1", "frontend2"] {
            outcomes.check(&self.cluster.connect(name).await).await;
        }
        outcomes
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_jobs_and_versions_are_shown() {
    let test = Test::start().await;
    let metas = test.metas.as_str();
    let workers = rows(metas, "workers");
    let count = |role: &str, states: &[&str]| {
        let is = |w: &&Value| w["role"] == role && states.iter().any(|s| w["state"] == *s);
        workers.iter().filter(is).count()
    };
    // One that is busy may be silent for a moment.
    let there = ["live", "silent"];
    let counts = ["compute", "compactor", "frontend"].map(|role| count(role, &there));
    assert_eq!(counts, [3, 1, 2], "{workers:#?}");
    assert_eq!((count("meta", &["leads"]), count("meta", &["stands by"])), (1, 1), "{workers:#?}");
    let of = |address: &str| workers.iter().find(|w| w["address"] == address).expect("it is there");
    let compute = of(&test.cluster.address("compute1"));
    let since = compute["since"].as_str().expect("a time");
    assert!(since.starts_with("20") && since.ends_with('Z') && since.contains('T'), "{since}");
    assert!(compute["heartbeat_ms"].is_u64() && compute["records_behind"].is_u64(), "{compute}");
    let jobs_of_all: u64 = workers.iter().filter_map(|w| w["jobs"].as_u64()).sum();
    assert_eq!(jobs_of_all, 4, "{workers:#?}");

    let jobs = rows(metas, "jobs");
    let names: Vec<&str> = jobs.iter().filter_map(|j| j["name"].as_str()).collect();
    let all = ["public.accounts", "public.transfers", "public.totals", "public.paid"];
    assert!(names.len() == 4 && all.iter().all(|name| names.contains(name)), "{jobs:#?}");
    assert!(jobs.iter().all(|j| j["generation"].is_u64() && j["state"].is_string()), "{jobs:#?}");
    let placed = rows(metas, "placement");
    for job in &jobs {
        let line = placed.iter().find(|p| p["id"] == job["id"]).expect("each job has its line");
        assert_eq!(line["worker"], job["worker"]);
        assert_eq!(line["group"] == "tables", job["kind"] == "table");
    }
    let computes: std::collections::BTreeSet<u64> =
        placed.iter().filter_map(|p| p["worker"].as_u64()).collect();
    assert_eq!(computes.len(), 3, "{placed:#?}");

    let versions = rows(metas, "versions");
    let accounts = versions.iter().find(|v| v["name"] == "public.accounts").expect("a version");
    assert!(accounts["commits"].as_u64() > Some(0), "{accounts}");
    let held = |v: &Value| v["slices"].as_u64().unwrap_or(0) + v["runs"].as_u64().unwrap_or(0);
    assert!(held(accounts) > 0, "{accounts}");

    // SQL tells the same.
    let client = test.cluster.connect("frontend1").await;
    let sql =
        "SELECT schema_name || '.' || name, worker, generation > 0 FROM millrace_catalog.jobs";
    for row in client.query(sql, &[]).await.expect("the jobs") {
        let (name, worker, started): (&str, i64, bool) = (row.get(0), row.get(1), row.get(2));
        let job = jobs.iter().find(|j| j["name"] == name).expect("the same jobs");
        assert!(job["worker"] == worker && started, "{job}");
    }
    let sql =
        "SELECT count(*) FROM millrace_catalog.workers WHERE NOT drained AND since LIKE '20%'";
    assert_eq!(one::<i64>(&client, sql).await, 7);
    let sql = "SELECT count(*) FROM millrace_catalog.runs WHERE relation_name IS NULL OR bytes < 1";
    assert_eq!(one::<i64>(&client, sql).await, 0);

    let table = told(metas, &["jobs"]);
    let head: Vec<&str> = table.lines().next().unwrap_or_default().split_whitespace().collect();
    assert_eq!(head[..5], ["id", "name", "kind", "worker", "address"]);
    assert_eq!(table.lines().count(), 5, "{table}");
    test.end().await;
}

/// What is shown of the process with a property.
fn worker_with(metas: &str, column: &str, value: &Value) -> Value {
    let workers = rows(metas, "workers");
    let found = workers.iter().find(|w| w[column] == *value);
    found.unwrap_or_else(|| panic!("{column} {value}: {workers:#?}")).clone()
}

/// The address of the process that a job runs on.
fn address_of(metas: &str, job: &str) -> Value {
    worker_with(metas, "worker", &worker_of(metas, job).into())["address"].clone()
}

fn jobs_on(metas: &str, address: &str) -> usize {
    rows(metas, "jobs").iter().filter(|j| j["address"] == address).count()
}

impl Test {
    /// A compute process other than the one at this address.
    fn other_compute(&self, address: &Value) -> String {
        let computes = ["compute1", "compute2", "compute3"].map(|name| self.cluster.address(name));
        computes.into_iter().find(|other| address != other).expect("there are three")
    }

    async fn kill_leader(&mut self) {
        let leader = worker_with(&self.metas, "state", &"leads".into())["address"].clone();
        let named = |name: &&str| leader == *self.cluster.address(name);
        let leader = ["meta1", "meta2"].into_iter().find(named).expect("one of the two");
        self.cluster.process(leader).kill();
        self.running.progress(PROGRESS).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_moved_while_statements_go_on() {
    let test = Test::start().await;
    let metas = test.metas.as_str();
    // A view goes alone.
    let to = test.other_compute(&address_of(metas, "public.paid"));
    let generation = generation_of(metas, "public.paid");
    let moved = json(metas, &["move", "paid", &to]);
    assert_eq!(moved["moved"].as_array().map(Vec::len), Some(1), "{moved}");
    assert_eq!(moved["moved"][0]["name"], "public.paid", "{moved}");
    assert_eq!(address_of(metas, "public.paid"), to.as_str());
    assert!(generation_of(metas, "public.paid") > generation, "it has started anew");
    let again = told(metas, &["move", "public.paid", &to]);
    assert!(again.contains("runs on process") && again.contains("already"), "{again}");
    // It stays there until an operator has it placed by its load again.
    let placed_by = || {
        let placed = rows(metas, "placement");
        let line = placed.iter().find(|p| p["name"] == "public.paid").expect("it has its line");
        line["placed_by"].clone()
    };
    assert_eq!(placed_by(), "operator");
    let undone = told(metas, &["move", "--undo", "paid"]);
    assert!(undone.contains("public.paid is placed by its load again"), "{undone}");
    assert_eq!(placed_by(), Value::Null);
    assert_eq!(address_of(metas, "public.paid"), to.as_str());
    // Tables go together; there and back, so that statements are met at every stage.
    for _ in 0..4 {
        let to = test.other_compute(&address_of(metas, "public.accounts"));
        let moved = json(metas, &["move", "public.transfers", &to]);
        assert_eq!(moved["moved"].as_array().map(Vec::len), Some(2), "{moved}");
        for table in ["public.accounts", "public.transfers"] {
            assert_eq!(address_of(metas, table), to.as_str());
        }
        test.running.progress(PROGRESS).await;
    }
    let Outcomes { errors, .. } = test.end().await;
    // What was under way is found out or sent again; only what it had read may have changed.
    let others = errors.keys().filter(|e| !e.starts_with("40001"));
    assert_eq!(others.count(), 0, "{errors:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_process_has_no_jobs_whoever_leads() {
    let mut test = Test::start().await;
    let metas = test.metas.clone();
    let metas = metas.as_str();
    let drained = address_of(metas, "public.accounts");
    let drained = drained.as_str().expect("an address");
    assert!(told(metas, &["drain", drained]).contains("is drained"));
    assert_eq!(jobs_on(metas, drained), 0);
    test.running.progress(PROGRESS).await;
    // Nobody is told of the change of leader, and nothing is done twice.
    let goes_on = Arc::new(AtomicBool::new(true));
    let backing_up = {
        let (goes_on, metas) = (Arc::clone(&goes_on), test.metas.clone());
        tokio::task::spawn_blocking(move || {
            while goes_on.load(Ordering::Relaxed) {
                told(&metas, &["backup", "create", "--name", "again"]);
                told(&metas, &["backup", "release", "again"]);
            }
        })
    };
    test.kill_leader().await;
    goes_on.store(false, Ordering::Relaxed);
    backing_up.await.expect("each was done, and once");
    let left = json(metas, &["backup", "list"]);
    assert_eq!(left.as_array().map(Vec::len), Some(0), "{left}");
    let deadline = Instant::now() + LIMIT;
    // Right after the change of leader it may not have been heard of yet.
    while worker_with(metas, "address", &drained.into())["state"] != "drained" {
        assert!(Instant::now() < deadline, "{}", told(metas, &["workers"]));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let admin = test.cluster.connect("frontend2").await;
    for i in 0..4 {
        let sql = format!("CREATE MATERIALIZED VIEW later{i} AS SELECT count(*) FROM accounts");
        admin.batch_execute(&sql).await.expect("definitions go on");
    }
    assert_eq!(jobs_on(metas, drained), 0);
    let error = refused(Some(metas), &["move", "paid", drained]);
    assert!(error.contains("is drained"), "{error}");
    assert!(told(metas, &["drain", "--undo", drained]).contains("takes jobs again"));
    assert!(jobs_on(metas, drained) > 0, "it takes its share again");
    test.running.progress(PROGRESS).await;
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(dir.path()).await;
    let meta = cluster.address("meta");
    let nobody = free_address();
    let frontend = cluster.address("frontend1");
    let workers = rows(&meta, "workers");
    let compute = workers.iter().find(|w| w["role"] == "compute").expect("there is one");
    let compute = compute["worker"].to_string();
    for (metas, arguments, part) in [
        (None, &["workers"][..], "--meta is missing"),
        (Some(nobody.as_str()), &["workers"], "no meta process answers at"),
        (Some("no address"), &["workers"], "no address"),
        // Clients are served there, in another protocol.
        (Some(frontend.as_str()), &["workers"], "no meta process answers at"),
        (Some(&meta), &["move", "t", &compute], "there is no job \"t\""),
        (Some(&meta), &["drain", "7777"], "there is no process \"7777\""),
        (Some(&meta), &["drain", &compute], "the only one that takes jobs"),
        (Some(&meta), &["drain", &meta], "no compute process"),
        (Some(&meta), &["drain"], "<WORKER>"),
        (Some(&meta), &["shuffle"], "shuffle"),
        (Some(&meta), &["workers", "--rpc-tls-cert", "x"], "--rpc-tls-key is missing"),
    ] {
        let began = Instant::now();
        let error = refused(metas, arguments);
        assert!(error.contains(part), "{arguments:?}: {error}");
        assert!(began.elapsed() < Duration::from_secs(20), "{arguments:?}: {:?}", began.elapsed());
    }
    // One of several is enough.
    let several = format!("{nobody},{meta}");
    assert_eq!(rows(&several, "workers").len(), 5);
    // What cannot be printed is no success.
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
    let unprinted = Command::new(env!("CARGO_BIN_EXE_millrace"))
        .args(["ctl", "workers", "--meta", meta.as_str()])
        .stdout(full)
        .output()
        .expect("the binary is there");
    let error = String::from_utf8_lossy(&unprinted.stderr);
    assert!(!unprinted.status.success() && error.contains("cannot be printed"), "{error}");
    // Any process of the cluster knows where the leader is.
    assert_eq!(rows(&cluster.address("compute"), "workers").len(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_is_shown_and_collected() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(dir.path()).await;
    let meta = cluster.address("meta");
    let client = cluster.connect("frontend1").await;
    let retain = async |time: &str| {
        let sql = format!("ALTER SYSTEM SET object_retention = '{time}'");
        client.batch_execute(&sql).await.expect("a setting");
    };
    retain("1h").await;
    client.batch_execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)").await.expect("a table");
    let deadline = Instant::now() + LIMIT;
    let report = loop {
        let rows = "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 500) AS g(i)";
        client.batch_execute(rows).await.expect("rows");
        client.batch_execute("DELETE FROM t").await.expect("no rows");
        let report = json(&meta, &["collection", "--run"]);
        if report["garbage_objects"].as_u64() > Some(0) {
            break report;
        }
        assert!(Instant::now() < deadline, "nothing becomes garbage: {report}");
    };
    assert_eq!(report["retained_objects"], report["garbage_objects"], "{report}");
    assert_eq!(report["object_retention_ms"], 3_600_000);
    assert_eq!(report["holders"].as_array().map(Vec::len), Some(5), "{report}");
    let table = told(&meta, &["collection"]);
    assert!(
        table.starts_with("Live: ") && table.contains("object_retention (1 h 0 min)"),
        "{table}"
    );
    retain("100ms").await;
    while json(&meta, &["collection", "--run"])["garbage_objects"] != 0 {
        assert!(Instant::now() < deadline, "{}", told(&meta, &["collection"]));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
