//! A server that runs all roles, on the bucket of a cluster: it is refused while a process of the cluster answers, and
//! takes everything over where it is told to.

use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::one;
use crate::process::{Cluster, connect, free_address};
use crate::transfers;

/// How long a server may take until it serves, or a process until it has ended.
const LIMIT: Duration = Duration::from_secs(60);

/// A session, as soon as the server there serves.
pub async fn served(address: &str) -> Client {
    let began = Instant::now();
    loop {
        match connect(address).await {
            Ok(client) => return client,
            Err(error) => assert!(began.elapsed() < LIMIT, "{address} does not serve: {error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_refused_on_the_bucket_of_a_cluster_or_takes_it_over() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let client = cluster.connect("frontend1").await;
    transfers::create(&client).await;
    let mut refused = cluster.standalone("127.0.0.1:0", &[]);
    refused.await_end(LIMIT);
    let log = refused.log();
    assert!(
        log.contains("a cluster uses this object store") && log.contains("--take-over"),
        "{log}"
    );
    // Its leader is gone, and may come back.
    cluster.process("meta").kill();
    let mut refused = cluster.standalone("127.0.0.1:0", &[]);
    refused.await_end(LIMIT);
    let log = refused.log();
    assert!(log.contains("process at 127.0.0.1:"), "{log}");
    cluster.begin("meta");
    let insert = "INSERT INTO transfers VALUES (1, 1, 2, 'n')";
    client.execute(insert, &[]).await.expect("the cluster goes on");

    let listen = free_address();
    let mut standalone = cluster.standalone(&listen, &["--take-over"]);
    cluster.process("meta").await_end(LIMIT);
    let log = cluster.process("meta").log();
    assert!(log.contains("has taken over this object store"), "{log}");
    let other = served(&listen).await;
    assert_eq!(one::<i64>(&other, "SELECT count(*) FROM transfers").await, 1);
    assert_eq!(one::<i64>(&other, "SELECT accounts FROM totals").await, transfers::ACCOUNTS);
    other.execute("INSERT INTO transfers VALUES (2, 1, 2, 'n')", &[]).await.expect("a row");

    // A cluster begins when nobody has to be asked any more.
    cluster.spawn("meta");
    cluster.process("meta").await_end(LIMIT);
    let log = cluster.process("meta").log();
    assert!(log.contains(&format!("the server at {listen} uses this object store")), "{log}");
    standalone.kill();
    for name in Cluster::NAMES {
        cluster.process(name).kill();
    }
    for name in Cluster::NAMES {
        cluster.begin(name);
    }
    let client = cluster.connect("frontend2").await;
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM transfers").await, 2);
}
