//! The web console of a frontend: what it is told of the cluster, and who may run statements.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::process::Cluster;

const LIMIT: Duration = Duration::from_secs(60);
/// What the page itself sends with what changes something.
const OWN: &str = "Content-Type: application/json\r\nX-Millrace-Console: 1\r\n";

/// One request, as a client that calls the server by this name; status and body.
pub async fn request(
    address: &str,
    host: &str,
    what: &str,
    headers: &str,
    body: &str,
) -> (u16, String) {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let text = format!(
        "{what} HTTP/1.1\r\nHost: {host}\r\n{headers}Connection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    socket.write_all(text.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    let status = answer.split_whitespace().nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status, body.to_owned())
}

/// What the page is told once that is so.
async fn state_when(address: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        let (status, body) = request(address, address, "GET /api/state", "", "").await;
        assert_eq!(status, 200, "{body}");
        let state: Value = serde_json::from_str(&body).unwrap();
        if is_so(&state) {
            return state;
        }
        assert!(Instant::now() < deadline, "{state:#}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn list<'a>(of: &'a Value, name: &str) -> &'a [Value] {
    of[name].as_array().map(Vec::as_slice).unwrap_or_default()
}

/// The relation of this name.
fn relation<'a>(state: &'a Value, name: &str) -> &'a Value {
    list(state, "relations").iter().find(|r| r["name"] == name).unwrap_or(&Value::Null)
}

/// Incarnations of processes of a role that the leader has heard of, or that lead.
fn processes(state: &Value, role: &str) -> Vec<u64> {
    let known = list(state, "processes").iter();
    let known = known.filter(|p| p["roles"] == json!([role]) && p["applied"].is_u64());
    known.filter_map(|p| p["incarnation"].as_u64()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frontend_shows_processes_and_where_jobs_run() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with_consoles(dir.path(), &Cluster::SPREAD).await;
    let client = cluster.connect("frontend2").await;
    let sql = "CREATE TABLE t (id bigint PRIMARY KEY);
               CREATE MATERIALIZED VIEW v AS SELECT count(*) AS n FROM t;
               CREATE MATERIALIZED VIEW w AS SELECT sum(id) AS s FROM t;
               INSERT INTO t VALUES (1), (2)";
    client.batch_execute(sql).await.unwrap();
    let address = cluster.console("frontend1").to_owned();

    let (status, page) = request(&address, &address, "GET /", "", "").await;
    assert!(status == 200 && page.contains("<title>Millrace</title>"), "{status}");
    let runs = |state: &Value, name: &str| {
        let job = &relation(state, name)["job"];
        let is_there = job["state"] == "running" && job["lag_ms"].is_u64();
        is_there.then(|| job["process"].as_u64()).flatten()
    };
    let all_is_told = |state: &Value| {
        processes(state, "compute").len() == 3
            && ["compactor", "meta"].iter().all(|role| processes(state, role).len() == 1)
            && processes(state, "frontend").len() == 2
            && ["t", "v", "w"].iter().all(|name| runs(state, name).is_some())
            && relation(state, "t")["job"]["rows"] == 2
            && !list(&relation(state, "v")["job"], "operators").is_empty()
    };
    let state = state_when(&address, all_is_told).await;
    let computes = processes(&state, "compute");
    let on: Vec<u64> = ["t", "v", "w"].iter().filter_map(|name| runs(&state, name)).collect();
    assert!(on.iter().all(|process| computes.contains(process)), "{on:?} of {computes:?}");
    assert!(on.iter().any(|process| *process != on[0]), "they are spread: {on:?}");
    assert!(state["compactions"].is_array() && state["user"].is_null());
    let id = relation(&state, "v")["id"].as_u64().unwrap();
    let (status, graph) =
        request(&address, &address, &format!("GET /api/graph/{id}"), "", "").await;
    assert!(status == 200 && graph.contains("\"nodes\""), "{graph}");

    // Statements run as those of a session do.
    let body = json!({"sql": "INSERT INTO t VALUES (3); SELECT n FROM v"}).to_string();
    let (status, begun) = request(&address, &address, "POST /api/sql", OWN, &body).await;
    assert_eq!(status, 200, "{begun}");
    let run: Value = serde_json::from_str(&begun).unwrap();
    if run["done"] == true {
        assert_eq!(run["answers"][1]["rows"], json!([["3"]]), "{run}");
    }
    state_when(&address, |state| relation(state, "t")["job"]["rows"] == 3).await;

    // Without a leader the page says of jobs what the log has, and that they wait.
    cluster.process("meta").kill();
    let waits = |state: &Value| {
        let job = &relation(state, "v")["job"];
        job["state"] == "waiting" && job["reason"].as_str().is_some_and(|r| r.contains("leader"))
    };
    let state = state_when(&address, waits).await;
    assert_eq!(list(&state, "processes").len(), 7);
    assert!(list(&state, "processes").iter().all(|p| p["applied"].is_null()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_console_of_a_frontend_is_for_those_who_may_log_in() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with_consoles(dir.path(), &["meta"]).await;
    cluster.begin_with("frontend2", &["--auth=trust"]);
    let client = cluster.connect("frontend2").await;
    client.batch_execute("ALTER USER root PASSWORD 'sesame'").await.unwrap();
    cluster.begin_with("frontend1", &["--require-password"]);
    let (address, open) = (cluster.console("frontend1"), cluster.console("frontend2"));
    let (status, body) = request(address, address, "GET /api/state", "", "").await;
    assert_eq!(status, 401, "{body}");
    let login = json!({"user": "root", "password": "wrong"}).to_string();
    let (status, body) = request(address, address, "POST /api/login", OWN, &login).await;
    assert_eq!(status, 401, "{body}");
    let login = json!({"user": "root", "password": "sesame"}).to_string();
    let (status, body) = request(address, address, "POST /api/login", OWN, &login).await;
    assert_eq!(status, 200, "{body}");
    // A proxy and Prometheus call a process by whatever name they have for it; the page has one name.
    for (address, host) in [(address, "frontend-1:5691"), (open, "frontend-2:5691")] {
        for path in ["GET /health", "GET /metrics"] {
            assert_eq!(request(address, host, path, "", "").await.0, 200, "{path} of {host}");
        }
        assert_eq!(request(address, host, "GET /api/state", "", "").await.0, 421);
    }
    let (status, metrics) = request(address, address, "GET /metrics", "", "").await;
    assert!(status == 200 && metrics.contains("role=\"frontend\""), "{metrics}");
    assert_eq!(request(open, open, "GET /api/state", "", "").await.0, 200);
}
