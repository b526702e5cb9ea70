//! A compute process that the object store alone does not answer: a short while changes nothing. After a long one its jobs
//! go on elsewhere and it ends, whatever it has sent to the store; those of others do not notice.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::network::{Network, Way, around};
use crate::process::{Cluster, OBJECT_STORE};
use crate::sessions::{LIMIT, await_true};
use crate::transfers::{self, Transfers};
use crate::{Job, PROGRESS, ctl, execute, jobs, one};

const NAMES: [&str; 5] = ["meta", "compute1", "compute2", "frontend1", "frontend2"];
/// The process that is cut off.
const CUT_OFF: &str = "compute1";
/// Its jobs; those of the tables come first.
const ITS_JOBS: [&str; 4] = ["accounts", "transfers", "kept", "paid"];
const OTHER_JOBS: [&str; 2] = ["totals", "ticking"];
/// How long it may take until writes go on. The process is fenced after 7 s, as docs/operations.md says, and the rest is
/// as where one is lost; less than half of it where nothing else runs.
const RESUME_LIMIT: Duration = Duration::from_secs(45);
/// Beside the tables of the bank: one whose rows are too large for the log, and a source, which needs none of them.
const DEFINITIONS: [&str; 3] = [
    "CREATE TABLE kept (id bigint PRIMARY KEY, v text)",
    "CREATE SOURCE ticks (id bigint) WITH (connector = 'datagen', fields.id.kind = 'sequence')",
    "CREATE MATERIALIZED VIEW ticking AS SELECT count(*) AS n FROM ticks",
];
/// Nothing compresses it much.
const KEEP: &str = "INSERT INTO kept \
                    SELECT 1, string_agg(md5(i::text), '') FROM generate_series(1, 300) AS g(i)";
const KEPT: &str = "SELECT count(*) FROM kept WHERE id = 1 AND length(v) = 9600";

struct Test {
    cluster: Cluster,
    network: Network,
    admin: Client,
    running: Transfers,
    _dir: tempfile::TempDir,
}

fn ways() -> Vec<Way> {
    around(CUT_OFF, &[OBJECT_STORE])
}

impl Test {
    async fn start() -> Test {
        let (dir, network) = (tempfile::tempdir().unwrap(), Network::new());
        let cluster = Cluster::start_on_network(dir.path(), &NAMES, network.clone()).await;
        let admin = cluster.connect("frontend1").await;
        transfers::create(&admin).await;
        for sql in DEFINITIONS {
            execute(&admin, sql).await;
        }
        let addresses = ["frontend1", "frontend2"].map(|name| cluster.address(name));
        let running = Transfers::start(addresses);
        let test = Test { cluster, network, admin, running, _dir: dir };
        test.place();
        test.go_on().await;
        test
    }

    /// Each job where it belongs.
    fn place(&self) {
        let meta = self.cluster.address("meta");
        let all = [(CUT_OFF, &ITS_JOBS[..]), ("compute2", &OTHER_JOBS[..])];
        for (name, jobs) in all {
            let address = self.network.proxy(name, &self.cluster.address(name));
            for job in jobs {
                ctl::told(&meta, &["move", &format!("public.{job}"), &address]);
            }
        }
    }

    /// Sessions write, and views are as fresh as the tables.
    async fn go_on(&self) {
        self.running.progress(PROGRESS).await;
        assert_eq!(
            one::<i64>(&self.admin, "SELECT accounts FROM totals").await,
            transfers::ACCOUNTS
        );
        one::<i64>(&self.admin, "SELECT sum(transfers)::bigint FROM paid").await;
    }

    /// Waits until its jobs are placed on another process.
    async fn await_moved(&self, before: &BTreeMap<String, Job>) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let now = jobs(&self.admin).await;
            let stays = |name: &&str| [0, before[*name].worker].contains(&now[*name].worker);
            if !ITS_JOBS.iter().any(stays) {
                return;
            }
            assert!(Instant::now() < deadline, "jobs stay where no store is: {now:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn end(self) {
        let outcomes = self.running.end().await;
        println!("errors: {:#?}", outcomes.errors);
        for name in ["frontend1", "frontend2"] {
            outcomes.check(&self.cluster.connect(name).await).await;
        }
    }
}

/// These jobs were not placed elsewhere, and have not begun anew.
fn assert_undisturbed(names: &[&str], before: &BTreeMap<String, Job>, now: &BTreeMap<String, Job>) {
    for name in names {
        let (before, now) = (before[*name], now[*name]);
        let is_same = (now.worker, now.generation) == (before.worker, before.generation);
        assert!(is_same, "{name} was not affected: {before:?}, {now:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_process_without_the_object_store_go_on_elsewhere() {
    let mut test = Test::start().await;
    let before = jobs(&test.admin).await;
    test.network.hold(ways());
    test.network.await_held((CUT_OFF, OBJECT_STORE)).await;
    test.network.release(&ways());
    test.go_on().await;
    let names = [&ITS_JOBS[..], &OTHER_JOBS].concat();
    assert_undisturbed(&names, &before, &jobs(&test.admin).await);

    test.network.hold(ways());
    let began = Instant::now();
    // It waits there, and is made where the table is then.
    let client = test.cluster.connect("frontend2").await;
    let waiting = tokio::spawn(async move { execute(&client, KEEP).await });
    let tick = jobs(&test.admin).await["ticking"].epoch;
    let ticks = format!(
        "SELECT (epoch > {tick})::int::bigint FROM millrace_catalog.jobs WHERE name = 'ticking'"
    );
    await_true(&test.admin, &ticks).await;
    test.await_moved(&before).await;
    let moved = began.elapsed();
    test.running.progress(PROGRESS).await;
    let resumed = began.elapsed();
    println!("jobs are placed elsewhere after {moved:?}, and writes go on after {resumed:?}");
    assert!(resumed < RESUME_LIMIT, "{resumed:?}");
    test.go_on().await;
    waiting.await.expect("the statement that has waited is made");
    assert_eq!(one::<i64>(&test.admin, KEPT).await, 1);
    assert_undisturbed(&OTHER_JOBS, &before, &jobs(&test.admin).await);

    // It hears so of the leader, though it is still cut off.
    test.cluster.process(CUT_OFF).await_end(LIMIT);
    let log = test.cluster.process(CUT_OFF).log();
    assert!(log.contains("has been fenced"), "{log}");
    let log = test.cluster.process("meta").log();
    assert!(log.contains("the object store has not answered processes for too long"), "{log}");

    // What it had sent arrives, and one that is started in its place is given jobs.
    test.network.release(&ways());
    test.cluster.begin(CUT_OFF);
    test.place();
    test.go_on().await;
    assert_eq!(one::<i64>(&test.admin, KEPT).await, 1);
    let now = jobs(&test.admin).await;
    assert!(ITS_JOBS.iter().all(|name| now[*name].worker > before[*name].worker), "{now:?}");
    test.end().await;
}
