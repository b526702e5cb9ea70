//! What a frontend's health says where it is cut off from the process that tables run on: whoever chooses frontends by it
//! gives new sessions to the others.

use std::time::{Duration, Instant};

use crate::network::{Network, around};
use crate::process::Cluster;
use crate::{execute, one};

const NAMES: [&str; 4] = ["meta", "compute", "frontend1", "frontend2"];
/// How long something may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// What `millrace health` says of a process.
pub async fn health(cluster: &Cluster, name: &str) -> Result<(), String> {
    let console = cluster.console(name).to_owned();
    let asked = tokio::task::spawn_blocking(move || millrace::health::check(&console));
    asked.await.expect("no panic")
}

/// Returns what a process says when it is well, or not.
pub async fn health_when(cluster: &Cluster, name: &str, is_well: bool) -> Result<(), String> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let said = health(cluster, name).await;
        if said.is_ok() == is_well {
            return said;
        }
        assert!(Instant::now() < deadline, "{name}: {said:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frontend_that_is_cut_off_from_tables_says_so_and_no_other_does() {
    let dir = tempfile::tempdir().unwrap();
    let network = Network::new();
    let cluster =
        Cluster::start_on_network_with_consoles(dir.path(), &NAMES, network.clone()).await;
    let client = cluster.connect("frontend2").await;
    execute(&client, "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)").await;
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM t").await, 1);
    // One that has waited for its registration for long takes sessions before it is well.
    for name in ["frontend1", "frontend2"] {
        assert_eq!(health_when(&cluster, name, true).await, Ok(()));
    }

    let cut = around("frontend2", &["compute"]);
    network.hold(cut.iter().copied());
    let said = health_when(&cluster, "frontend2", false).await.unwrap_err();
    assert!(said.contains("503") && said.contains("has not answered this frontend"), "{said}");
    assert_eq!(health(&cluster, "frontend1").await, Ok(()));
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM t").await, 1, "reads go on");

    network.release(&cut);
    assert_eq!(health_when(&cluster, "frontend2", true).await, Ok(()));
    execute(&client, "INSERT INTO t VALUES (2)").await;
}
