//! A frontend that no leader answers reads what is committed for as long as nobody has fenced it, and ends by itself when
//! the log says that somebody has.

use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::network::{Network, around};
use crate::one;
use crate::process::Cluster;
use crate::sessions::await_true;

/// How long something may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
const NAMES: [&str; 4] = ["meta", "compute", "frontend1", "frontend2"];
const COUNT: &str = "SELECT count(*) FROM t";

/// Reads without asking the leader.
async fn reader(cluster: &Cluster, name: &str) -> Client {
    let client = cluster.connect(name).await;
    client.batch_execute("SET read_freshness = 'any'").await.unwrap();
    client
}

/// Returns when the log of a process says so.
pub async fn told(cluster: &mut Cluster, name: &str, what: &str) {
    let deadline = Instant::now() + LIMIT;
    while !cluster.process(name).log().contains(what) {
        assert!(Instant::now() < deadline, "{what}:\n{}", cluster.process(name).log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_not_answered_reads_until_it_is_fenced() {
    let dir = tempfile::tempdir().unwrap();
    let network = Network::new();
    let mut cluster = Cluster::start_on_network(dir.path(), &NAMES, network.clone()).await;
    let admin = cluster.connect("frontend1").await;
    let sql = "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1), (2)";
    admin.batch_execute(sql).await.unwrap();
    let client = reader(&cluster, "frontend2").await;
    // It may not have been told of the rows yet.
    await_true(&client, "SELECT (count(*) = 2)::int::bigint FROM t").await;

    // Nobody is there who could fence it.
    for name in ["meta", "compute"] {
        cluster.process(name).kill();
    }
    told(&mut cluster, "frontend2", "the log has not fenced this process: it reads on").await;
    assert_eq!(one::<i64>(&client, COUNT).await, 2);
    for name in ["meta", "compute"] {
        cluster.begin(name);
    }
    told(&mut cluster, "frontend2", "a leader answers again").await;
    assert_eq!(one::<i64>(&client, COUNT).await, 2);

    // It hears nothing of the leader that fences it, and has the object store alone.
    network.hold(around("frontend2", &NAMES));
    let deadline = Instant::now() + LIMIT;
    while !cluster.process("frontend2").has_ended() {
        assert!(Instant::now() < deadline, "{}", cluster.process("frontend2").log());
        match client.query_one(COUNT, &[]).await {
            Ok(row) => assert_eq!(row.get::<_, i64>(0), 2),
            Err(error) => {
                // Without a code the connection has ended.
                let code = error.code().map_or("57P03", |code| code.code());
                assert_eq!(code, "57P03", "{error:?}");
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let log = cluster.process("frontend2").log();
    assert!(log.contains("has been fenced"), "{log}");
    // The others have noticed nothing.
    admin.batch_execute("INSERT INTO t VALUES (3)").await.unwrap();
    assert_eq!(one::<i64>(&admin, COUNT).await, 3);
}
