//! As `publishing.rs`, with targets that are reached over a network: a bucket, PostgreSQL and Kafka. What the stopped
//! process has sent arrives late, and it wakes up when another one has the sinks: nothing is there twice, or in another
//! order.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use millrace_sqllogictest::target::Target;
use tokio_postgres::Client;

use crate::broker::{Broker, Hold};
use crate::network::{Network, Way, around};
use crate::postgres::{address, url_at};
use crate::process::{Cluster, stop};
use crate::publishing::{check_order, rows_of};
use crate::sessions::{LIMIT, await_true};
use crate::workloads::targets::flushed;
use crate::{ctl, execute};

const NAMES: [&str; 4] = ["meta", "compute1", "compute2", "frontend1"];
/// The process that is stopped.
const STOPPED: &str = "compute2";
/// The targets in the network.
const BUCKET: &str = "bucket";
const POSTGRES: &str = "postgres";
/// The one that holds back by itself what it is sent, and its topic.
const KAFKA: &str = "kafka";
const TOPIC: &str = "t";
/// For targets to have all changes: a sink whose target does not answer waits for up to 30 s before it tries again.
const FLUSH_LIMIT: Duration = Duration::from_secs(120);
/// Where the bucket's files are.
const PREFIX: &str = "published";
/// Of a batch: few, so that its file is sent in one piece.
const ROWS: usize = 10;
/// In PostgreSQL rows are numbered as they come, and know their transaction. One that inserts rows waits while the test has
/// the lock: they are written then, and not committed.
const TABLE: &str = "
    CREATE TABLE t
        (position bigserial, change bigint NOT NULL DEFAULT txid_current(), batch int, i int);
    CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM pg_advisory_xact_lock_shared(hashtext(TG_TABLE_SCHEMA)); RETURN NULL; END';
    CREATE TRIGGER wait AFTER INSERT ON t FOR EACH STATEMENT EXECUTE FUNCTION wait()";

/// What targets have.
#[derive(PartialEq)]
struct Published {
    files: BTreeMap<PathBuf, String>,
    /// Transaction, batch and number, in the order in which they came; `None`: there is no server.
    rows: Option<Vec<(i64, i32, i32)>>,
    /// By transaction.
    messages: Option<Vec<String>>,
}

struct Test {
    cluster: Cluster,
    network: Network,
    client: Client,
    /// `None`: no server was given.
    postgres: Option<Target>,
    /// `None`: the build has no client for it.
    kafka: Option<Broker>,
    /// That were written.
    batches: usize,
    _dir: tempfile::TempDir,
}

impl Test {
    async fn start() -> Test {
        let (dir, network) = (tempfile::tempdir().unwrap(), Network::new());
        let cluster = Cluster::start_on_network(dir.path(), &NAMES, network.clone()).await;
        let client = cluster.connect("frontend1").await;
        execute(&client, "CREATE TABLE t (batch int, i int, PRIMARY KEY (batch, i))").await;
        let sink = format!(
            "CREATE SINK to_bucket FROM t WITH (connector = 'fs', path = '{}', \
             s3.endpoint = 'http://{}', force_append_only = true) FORMAT PLAIN ENCODE CSV",
            Cluster::store(PREFIX),
            network.proxy(BUCKET, &cluster.store_address())
        );
        execute(&client, &sink).await;
        let postgres = Target::create("interrupted", TABLE).await;
        if let Some(postgres) = &postgres {
            let address = network.proxy(POSTGRES, &address(postgres));
            let sink = format!(
                "CREATE SINK to_postgres FROM t WITH (connector = 'postgres', url = '{}', \
                 schema = '{}', table = 't', type = 'append-only', force_append_only = true)",
                url_at(postgres, &address),
                postgres.schema
            );
            execute(&client, &sink).await;
        }
        let kafka = if cfg!(feature = "kafka") { Some(Broker::start().await) } else { None };
        if let Some(kafka) = &kafka {
            let sink = format!(
                "CREATE SINK to_kafka FROM t WITH (connector = 'kafka', topic = '{TOPIC}', \
                 properties.bootstrap.servers = '{}', force_append_only = true) \
                 FORMAT PLAIN ENCODE CSV",
                kafka.address()
            );
            execute(&client, &sink).await;
        }
        Test { cluster, network, client, postgres, kafka, batches: 0, _dir: dir }
    }

    /// Those in the network.
    fn targets(&self) -> Vec<&'static str> {
        let postgres = self.postgres.is_some().then_some(POSTGRES);
        [BUCKET].into_iter().chain(postgres).collect()
    }

    /// The targets of all sinks.
    fn all_targets(&self) -> Vec<&'static str> {
        let kafka = self.kafka.is_some().then_some(KAFKA);
        self.targets().into_iter().chain(kafka).collect()
    }

    async fn write(&mut self) {
        let sql = format!(
            "INSERT INTO t SELECT {}, i FROM generate_series(1, {ROWS}) AS g(i)",
            self.batches
        );
        execute(&self.client, &sql).await;
        self.batches += 1;
    }

    fn place(&self, job: &str, name: &'static str) {
        let address = self.network.proxy(name, &self.cluster.address(name));
        ctl::told(&self.cluster.address("meta"), &["move", job, &address]);
    }

    /// Returns when so many sinks are on the process of the table.
    async fn await_beside_table(&self, sinks: usize) {
        let beside = format!(
            "SELECT (count(*) = {sinks})::int::bigint FROM millrace_catalog.jobs AS j \
             JOIN millrace_catalog.jobs AS t ON t.name = 't' AND t.worker = j.worker \
             WHERE j.name <> 't'"
        );
        await_true(&self.client, &beside).await;
    }

    /// The process that is to be stopped has the sinks, and a session at PostgreSQL, and the other one the table.
    async fn publish(&mut self) {
        self.place("public.t", "compute1");
        for target in self.all_targets() {
            self.place(&format!("public.to_{target}"), STOPPED);
        }
        self.await_beside_table(0).await;
        self.write().await;
        self.check().await;
    }

    /// Targets have what was written, once and in order. Returns it.
    async fn check(&self) -> Published {
        let began = Instant::now();
        while let Err(reason) = flushed(&self.client).await {
            assert!(began.elapsed() < FLUSH_LIMIT, "targets lack changes: {reason}");
        }
        let published = self.published().await;
        check_order(published.files.values().map(|text| rows_of(text)), self.batches, ROWS);
        if let Some(messages) = &published.messages {
            check_order(messages.iter().map(|text| rows_of(text)), self.batches, ROWS);
        }
        if let Some(rows) = &published.rows {
            let changes = rows.chunk_by(|one, next| one.0 == next.0);
            let row = |(_, batch, i): &(i64, i32, i32)| (*batch as usize, *i as usize);
            check_order(changes.map(|rows| rows.iter().map(row).collect()), self.batches, ROWS);
        }
        published
    }

    async fn published(&self) -> Published {
        let objects = self.cluster.objects_below(PREFIX).into_keys();
        let read = |path: PathBuf| {
            let text = std::fs::read_to_string(&path).expect("an object");
            (path, text)
        };
        let files = objects.map(read).collect();
        let messages = self.kafka.as_ref().map(|kafka| kafka.changes(TOPIC));
        let Some(postgres) = &self.postgres else {
            return Published { files, rows: None, messages };
        };
        let sql = "SELECT change, batch, i FROM t ORDER BY position";
        let rows = postgres.client.query(sql, &[]).await.expect("a read");
        let rows = rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
        Published { files, rows: Some(rows), messages }
    }

    /// In PostgreSQL somebody waits who uses this table.
    async fn await_waiting_in_postgres(&self, table: &str) {
        let Some(postgres) = &self.postgres else { return };
        let sql = format!(
            "SELECT count(DISTINCT w.pid) FROM pg_locks AS w JOIN pg_locks AS l ON l.pid = w.pid \
             WHERE NOT w.granted AND l.relation = '{table}'::regclass"
        );
        await_true(&postgres.client, &sql).await;
    }

    /// The advisory lock that transactions in PostgreSQL wait for.
    async fn in_postgres(&self, function: &str) {
        let Some(postgres) = &self.postgres else { return };
        let sql = format!("SELECT {function}(hashtext('{}'))", postgres.schema);
        execute(&postgres.client, &sql).await;
    }

    /// A connection to the bucket that is idle may end at any time: the next request is to have one of its own.
    fn hold(&self, ways: &[Way], of_kafka: Hold) {
        self.network.hold(ways.iter().copied());
        self.network.reset((STOPPED, BUCKET));
        if let Some(kafka) = &self.kafka {
            kafka.hold(of_kafka);
        }
    }

    /// Returns when something goes each of these ways, or to Kafka, that is held back.
    async fn await_held(&self, ways: &[Way]) {
        for way in ways {
            self.network.await_held(*way).await;
        }
        if let Some(kafka) = &self.kafka {
            kafka.await_held().await;
        }
    }

    fn stop(&mut self) {
        stop(self.cluster.process(STOPPED).id());
    }

    /// The stopped process wakes up, and finds that it has been fenced.
    fn wake(&mut self) {
        let process = self.cluster.process(STOPPED);
        process.signal("CONT");
        process.await_end(LIMIT);
        assert!(process.log().contains("has been fenced"), "{}", process.log());
    }

    /// A change is on its way when the process is stopped, and reaches the targets when they have had it and more from
    /// another one.
    async fn a_request_arrives_late(&mut self) {
        self.publish().await;
        let targets = self.targets();
        let requests: Vec<Way> = targets.iter().map(|target| (STOPPED, *target)).collect();
        self.hold(&around(STOPPED, &targets), Hold::Rest);
        self.write().await;
        self.await_held(&requests).await;
        self.stop();
        self.await_beside_table(self.all_targets().len()).await;
        for _ in 0..2 {
            self.write().await;
        }
        let published = self.check().await;

        for target in &targets {
            self.network.release(&[(STOPPED, *target)]);
            self.network.await_held((*target, STOPPED)).await;
        }
        if let Some(kafka) = &self.kafka {
            kafka.release();
            kafka.await_refused().await;
        }
        assert!(self.published().await == published, "what was late has changed a target");
        self.network.release(&around(STOPPED, &targets));
        self.wake();
        assert!(self.published().await == published, "the woken process has changed a target");
    }

    /// A change is with the targets when the process is stopped: the bucket and Kafka have it, and PostgreSQL in a
    /// transaction that is open. There the next process waits for that.
    async fn an_answer_arrives_late(&mut self) {
        self.publish().await;
        let answer = (BUCKET, STOPPED);
        self.in_postgres("pg_advisory_lock").await;
        self.hold(&[answer], Hold::Commit);
        self.write().await;
        self.await_held(&[answer]).await;
        self.await_waiting_in_postgres("t").await;
        self.stop();
        self.in_postgres("pg_advisory_unlock").await;
        self.await_beside_table(self.all_targets().len()).await;
        self.await_waiting_in_postgres("millrace_sink").await;
        self.network.release(&[answer]);
        if let Some(kafka) = &self.kafka {
            kafka.release();
        }
        self.wake();
        for _ in 0..2 {
            self.write().await;
        }
        self.check().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_stopped_between_request_and_answer_of_a_target_neither_repeats_nor_reorders() {
    let mut test = Test::start().await;
    test.a_request_arrives_late().await;
    test.cluster.begin(STOPPED);
    test.an_answer_arrives_late().await;
    if let Some(postgres) = test.postgres {
        postgres.drop().await;
    }
}
