//! What clients are told while no compute process is there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use parking_lot::Mutex;
use tokio_postgres::{AsyncMessage, Client, NoTls};

use crate::one;
use crate::process::Cluster;

/// How long statements wait for a compute process, as docs/operations.md says.
const WAIT: Duration = Duration::from_secs(15);
/// What the rest of such a statement may take on a busy machine.
const SLACK: Duration = Duration::from_secs(30);

/// A session that keeps the notices it gets.
struct Listener {
    client: Client,
    notices: Arc<Mutex<Vec<String>>>,
}

impl Listener {
    async fn connect(cluster: &Cluster) -> Listener {
        let address = cluster.address("frontend1");
        let (host, port) = address.rsplit_once(':').unwrap();
        let config = format!("host={host} port={port} user=root dbname=dev");
        let (client, mut connection) = tokio_postgres::connect(&config, NoTls).await.unwrap();
        let notices = Arc::<Mutex<Vec<String>>>::default();
        let kept = Arc::clone(&notices);
        tokio::spawn(async move {
            let mut messages = futures::stream::poll_fn(|cx| connection.poll_message(cx));
            while let Some(Ok(message)) = messages.next().await {
                if let AsyncMessage::Notice(notice) = message {
                    kept.lock().push(notice.message().to_owned());
                }
            }
        });
        Listener { client, notices }
    }

    /// Runs a statement that needs a compute process, while there is none.
    async fn fails(&self, sql: &str) {
        self.notices.lock().clear();
        let began = Instant::now();
        let error = self.client.batch_execute(sql).await.expect_err(sql);
        let took = began.elapsed();
        let error = error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error:?}"));
        assert_eq!(error.code().code(), "57P03", "{sql}: {error:?}");
        assert!(error.hint().unwrap_or_default().contains("compute process"), "{sql}: {error:?}");
        assert!(took < WAIT + SLACK, "{sql} took {took:?}");
        let notices = self.notices.lock().clone();
        assert!(notices.iter().any(|n| n.contains("no compute process is there")), "{notices:?}");
    }

    /// Is cut off while it waits for a compute process: nothing of it has been done.
    async fn is_cancelled(&self, sql: &str) {
        self.notices.lock().clear();
        let began = Instant::now();
        let (done, ()) = tokio::join!(self.client.batch_execute(sql), async {
            while self.notices.lock().is_empty() {
                assert!(began.elapsed() < WAIT, "{sql}: no notice");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            self.client.cancel_token().cancel_query(NoTls).await.unwrap();
        });
        let error = done.expect_err(sql);
        assert_eq!(error.code().map(|c| c.code()), Some("57014"), "{sql}: {error:?}");
        assert!(began.elapsed() < WAIT, "{sql} took {:?}", began.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_say_that_no_compute_process_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with(dir.path(), &["meta", "frontend1"]).await;
    let session = Listener::connect(&cluster).await;
    session.fails("CREATE TABLE t (id bigint PRIMARY KEY, n bigint)").await;
    session.is_cancelled("CREATE TABLE t (id bigint PRIMARY KEY, n bigint)").await;
    session.is_cancelled("CREATE MATERIALIZED VIEW v AS SELECT 1 AS s").await;
    session.client.batch_execute("CREATE VIEW needs_none AS SELECT 1 AS x").await.unwrap();

    cluster.begin("compute");
    let run =
        "CREATE TABLE t (id bigint PRIMARY KEY, n bigint); INSERT INTO t VALUES (1, 1); FLUSH";
    session.client.batch_execute(run).await.expect("nothing was left of the first attempt");
    cluster.process("compute").signal("TERM");
    cluster.process("compute").await_end(Duration::from_secs(60));
    let other = Listener::connect(&cluster).await;
    tokio::join!(
        session.fails("CREATE MATERIALIZED VIEW v AS SELECT sum(n) AS s FROM t"),
        other.fails("INSERT INTO t VALUES (2, 2)"),
    );
    let reason = "SELECT count(*) FROM millrace_catalog.jobs WHERE reason LIKE '%compute process%'";
    assert_eq!(
        one::<i64>(&session.client, reason).await,
        1,
        "the table waits, and there is no view"
    );

    cluster.begin("compute");
    let rows = "SELECT count(*) FROM t";
    session.client.batch_execute("SET read_wait_timeout = '60s'").await.unwrap();
    assert_eq!(one::<i64>(&session.client, rows).await, 1, "what has failed has had no effect");
    let run =
        "INSERT INTO t VALUES (2, 2); CREATE MATERIALIZED VIEW v AS SELECT sum(n) AS s FROM t";
    session.client.batch_execute(run).await.unwrap();
    assert_eq!(one::<i64>(&session.client, "SELECT s::bigint FROM v").await, 3);
}
