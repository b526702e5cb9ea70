//! A process of another protocol version where the log has the leader: nobody takes the lead from it, or begins beside it.

use std::sync::Arc;
use std::time::Duration;

use millrace_rpc::call_error::PROTOCOL_VERSION;
use millrace_rpc::remote::{Admission, Server};
use tokio::net::TcpListener;

use crate::bad_starts::await_log;
use crate::execute;
use crate::process::{Cluster, Process};

const LIMIT: Duration = Duration::from_secs(60);
const NAMES: [&str; 4] = ["meta1", "meta2", "compute", "frontend1"];
const CLAIMS: &str = "this process claims the lead";

#[tokio::test(flavor = "multi_thread")]
async fn nobody_leads_in_place_of_a_leader_of_another_version() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with(dir.path(), &NAMES).await;
    let client = cluster.connect("frontend1").await;
    execute(&client, "CREATE TABLE t (id bigint PRIMARY KEY)").await;
    await_log(cluster.process("meta2"), "stands by");

    let address = cluster.address("meta1");
    cluster.process("meta1").kill();
    let admission = Arc::new(Admission::default().speaking(PROTOCOL_VERSION + 1));
    let listener = TcpListener::bind(&address).await.unwrap();
    let serving = tokio::spawn(Server::new(Arc::clone(&admission)).serve(listener));
    let versions = [PROTOCOL_VERSION, PROTOCOL_VERSION + 1];
    let names_both = |log: &str| {
        let named = versions.map(|version| format!("protocol version {version} (build"));
        assert!(named.iter().chain([&address]).all(|part| log.contains(part.as_str())), "{log}");
    };
    await_log(cluster.process("meta2"), "does not claim the lead");
    names_both(&cluster.process("meta2").log());

    let mut command = cluster.program();
    command
        .args(["meta", "--http=off", "--memory-limit=128MB", "--listen", "127.0.0.1:0"])
        .args(["--object-store", &Cluster::store("millrace")])
        .arg("--data-dir")
        .arg(dir.path().join("another"));
    let mut another = Process::spawn(command);
    another.await_end(LIMIT);
    let log = another.log();
    assert!(log.contains("millrace: cannot start: "), "{log}");
    names_both(&log);

    let log = cluster.process("meta2").log();
    assert!(!log.contains(CLAIMS), "{log}");
    admission.stop();
    tokio::time::timeout(LIMIT, serving).await.unwrap().unwrap().unwrap();
    await_log(cluster.process("meta2"), CLAIMS);
    execute(&client, "INSERT INTO t VALUES (1)").await;
}
