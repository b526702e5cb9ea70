//! A leader is killed under load: the next one goes on with the jobs as they run, and restarts none. Sources, sinks,
//! transactions over several tables and views go on where they were.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio_postgres::{Client, SimpleQueryMessage};

use crate::process::Cluster;
use crate::sessions::await_true;
use crate::transfers::{self, Transfers};
use crate::{PROGRESS, one};

/// How long it may take until transfers go on. Half of it where nothing else runs.
const LIMIT: Duration = Duration::from_secs(20);
/// How long the sink's target may lack what is committed.
const TARGET_LIMIT: Duration = Duration::from_secs(60);
/// Lines of a file that a source reads.
const LINES: usize = 50;

/// Where jobs run, and their generations.
async fn placed(client: &Client) -> String {
    let sql = "SELECT string_agg(concat_ws(' ', name, worker, generation), ', ' ORDER BY name) \
               FROM millrace_catalog.jobs";
    one::<String>(client, sql).await
}

/// What a source reads and a sink writes.
struct Files(PathBuf);

impl Files {
    fn create(dir: &Path) -> Files {
        let files = Files(dir.to_owned());
        for name in ["read", "written"] {
            std::fs::create_dir(files.0.join(name)).unwrap();
        }
        files
    }

    fn add(&self, number: usize) {
        let lines: String = (0..LINES).map(|n| format!("{}\n", number * LINES + n)).collect();
        let folder = self.0.join("read");
        // A file is found when it is complete.
        std::fs::write(folder.join("new"), lines).unwrap();
        std::fs::rename(folder.join("new"), folder.join(format!("{number}.csv"))).unwrap();
    }

    fn written(&self) -> Vec<i64> {
        let files = std::fs::read_dir(self.0.join("written")).unwrap().map(|f| f.unwrap().path());
        let complete = files.filter(|path| path.extension().is_some_and(|e| e != "tmp"));
        let lines = complete.flat_map(|path| {
            let text = std::fs::read_to_string(path).unwrap();
            text.lines().map(|line| line.parse().unwrap()).collect::<Vec<i64>>()
        });
        lines.collect()
    }

    async fn define(&self, client: &Client) {
        let at = |name: &str| self.0.join(name).display().to_string();
        for sql in [
            format!(
                "CREATE SOURCE numbers (v bigint) WITH (connector = 'fs', path = '{}/*.csv', \
                 discovery_interval = '100ms') FORMAT PLAIN ENCODE CSV",
                at("read")
            ),
            "CREATE MATERIALIZED VIEW counted AS \
             SELECT count(*) AS n, count(DISTINCT v) AS d FROM numbers"
                .to_owned(),
            format!(
                "CREATE SINK written AS SELECT n FROM transfers \
                 WITH (connector = 'fs', path = '{}', force_append_only = true) \
                 FORMAT PLAIN ENCODE CSV",
                at("written")
            ),
        ] {
            client.batch_execute(&sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
        }
    }

    /// The target has each transfer once.
    async fn check(&self, client: &Client) {
        let rows = client.query("SELECT n FROM transfers", &[]).await.unwrap();
        let committed: BTreeSet<i64> = rows.iter().map(|row| row.get(0)).collect();
        let began = Instant::now();
        loop {
            let written = self.written();
            let distinct: BTreeSet<i64> = written.iter().copied().collect();
            assert_eq!(written.len(), distinct.len(), "a transfer was written twice");
            if distinct == committed {
                return;
            }
            let missing = committed.difference(&distinct).count();
            assert!(began.elapsed() < TARGET_LIMIT, "{missing} transfers are missing");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_go_on_when_the_leader_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let files = Files::create(dir.path());
    let mut cluster = Cluster::start_with(dir.path(), &Cluster::TWO_METAS_SPREAD).await;
    let admin = cluster.connect("frontend1").await;
    transfers::create(&admin).await;
    files.add(0);
    files.define(&admin).await;
    let addresses = ["frontend1", "frontend2"].map(|name| cluster.address(name));
    let running = Transfers::start(addresses);
    running.progress(PROGRESS).await;
    let before = placed(&admin).await;
    for (n, (killed, next)) in [("meta1", "meta2"), ("meta2", "meta1")].into_iter().enumerate() {
        let began = Instant::now();
        cluster.process(killed).kill();
        files.add(n + 1);
        running.progress(PROGRESS).await;
        let took = began.elapsed();
        println!("{killed} is killed: transfers go on after {took:?}");
        assert!(took < LIMIT, "{took:?}");
        let lines = (n + 2) * LINES;
        let counted = format!("SELECT (n = {lines} AND d = {lines})::int::bigint FROM counted");
        await_true(&admin, &counted).await;
        assert_eq!(placed(&admin).await, before, "no job is another generation, or elsewhere");
        let log = cluster.process(next).log();
        let goes_on = log.matches("job goes on").count();
        assert_eq!(goes_on, before.split(", ").count(), "{log}");
        assert!(!log.contains("job started") && !log.contains("job failed"), "{log}");
        cluster.begin(killed);
    }
    let outcomes = running.end().await;
    println!("errors: {:#?}", outcomes.errors);
    for name in ["frontend1", "frontend2"] {
        outcomes.check(&cluster.connect(name).await).await;
    }
    files.check(&admin).await;
}

/// While nobody leads jobs wait, and are shown so.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_shown_to_wait_while_nobody_leads() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let admin = cluster.connect("frontend1").await;
    transfers::create(&admin).await;
    let before = placed(&admin).await;
    cluster.process("meta").kill();
    let waiting = "SELECT count(*) FROM millrace_catalog.jobs WHERE state = 'waiting' \
                   AND reason LIKE 'the leader does not answer%'";
    assert_eq!(one::<i64>(&admin, waiting).await, 4);
    let shown = admin.simple_query("SHOW JOBS").await.unwrap();
    let is_row = |message: &&SimpleQueryMessage| matches!(message, SimpleQueryMessage::Row(_));
    assert_eq!(shown.iter().filter(is_row).count(), 4);
    cluster.begin("meta");
    let running = "SELECT (count(*) = 4)::int::bigint FROM millrace_catalog.jobs \
                   WHERE state = 'running'";
    await_true(&admin, running).await;
    assert_eq!(placed(&admin).await, before);
    assert!(!cluster.process("meta").log().contains("job started"));
}
