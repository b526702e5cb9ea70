//! The profile `monitoring`: Grafana can load the dashboard, every metric that it asks for is one that some process of a
//! cluster has, the manual has all of them, and Prometheus asks every process. The two images are not started here: they
//! would have to be pulled.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::SERVICES;

const LIMIT: Duration = Duration::from_secs(90);
/// The one that dashboards of Grafana 11 have; later ones read it.
const SCHEMA_VERSION: u64 = 39;
/// Columns of a dashboard.
const WIDTH: u64 = 24;
/// What an expression consists of beside metrics, labels and numbers.
const WORDS: [&str; 8] = ["by", "count", "increase", "or", "rate", "sum", "vector", "without"];

/// A file of the repository.
pub fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn dashboard() -> Value {
    let text = read("docker/monitoring/grafana/dashboards/millrace.json");
    serde_json::from_str(&text).expect("the dashboard is JSON")
}

fn list<'a>(of: &'a Value, name: &str) -> &'a [Value] {
    of[name].as_array().unwrap_or_else(|| panic!("{name} is a list")).as_slice()
}

fn number(of: &Value, name: &str) -> u64 {
    of[name].as_u64().unwrap_or_else(|| panic!("{name} of {of}"))
}

fn text<'a>(of: &'a Value, name: &str) -> &'a str {
    let text = of[name].as_str().filter(|text| !text.is_empty());
    text.unwrap_or_else(|| panic!("{name} of {of}"))
}

/// The panels that show something.
fn graphs(dashboard: &Value) -> impl Iterator<Item = &Value> {
    list(dashboard, "panels").iter().filter(|panel| panel["type"] != "row")
}

fn expressions(dashboard: &Value) -> Vec<&str> {
    graphs(dashboard).flat_map(|p| list(p, "targets")).map(|t| text(t, "expr")).collect()
}

#[test]
fn the_dashboard_can_be_loaded() {
    let dashboard = dashboard();
    assert_eq!(number(&dashboard, "schemaVersion"), SCHEMA_VERSION);
    text(&dashboard, "title");
    assert!(text(&dashboard, "uid").len() <= 40, "Grafana's limit");
    let source = read("docker/monitoring/grafana/provisioning/datasources/prometheus.yml");
    let (mut ids, mut taken) = (BTreeSet::new(), BTreeSet::new());
    for panel in list(&dashboard, "panels") {
        assert!(ids.insert(number(panel, "id")), "an id is there twice: {panel}");
        text(panel, "title");
        let place = &panel["gridPos"];
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|name| number(place, name));
        assert!(w > 0 && h > 0 && x + w <= WIDTH, "{place}");
        for cell in (x..x + w).flat_map(|column| (y..y + h).map(move |line| (column, line))) {
            assert!(taken.insert(cell), "panels overlap: {panel}");
        }
    }
    for panel in graphs(&dashboard) {
        assert!(["timeseries", "stat"].contains(&text(panel, "type")), "{panel}");
        assert!(!list(panel, "targets").is_empty(), "{panel}");
        let mut references = BTreeSet::new();
        for target in list(panel, "targets") {
            assert!(references.insert(text(target, "refId")), "{panel}");
            assert_eq!(text(&target["datasource"], "type"), "prometheus");
            let uid = text(&target["datasource"], "uid");
            assert!(source.lines().any(|line| line.trim() == format!("uid: {uid}")), "{uid}");
            let expression = text(target, "expr");
            for (open, close) in [('(', ')'), ('{', '}'), ('[', ']')] {
                let count = |c| expression.matches(c).count();
                assert_eq!(count(open), count(close), "{expression}");
            }
        }
    }
}

/// The metrics that an expression asks for, each with the labels that it selects by.
fn asked(expression: &str) -> BTreeMap<String, BTreeSet<String>> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut metrics: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut rest = expression;
    while let Some(start) = rest.find(|c: char| c.is_ascii_alphabetic()) {
        let word = &rest[start..];
        let end = word.find(|c| !is_word(c)).unwrap_or(word.len());
        let (word, after) = word.split_at(end);
        rest = after;
        if word == "by" || word == "without" {
            // Labels, which Prometheus may have added.
            rest = rest.split_once(')').map_or("", |(_, rest)| rest);
        } else if !WORDS.contains(&word) {
            let labels = metrics.entry(word.to_owned()).or_default();
            if let Some((selected, after)) = rest.strip_prefix('{').and_then(|r| r.split_once('}'))
            {
                let label = |part: &str| part.split(['=', '!']).next().map(str::to_owned);
                labels.extend(selected.split(',').filter_map(label));
                rest = after;
            }
        }
        // The unit of a range.
        rest = rest.strip_prefix('[').and_then(|r| r.split_once(']')).map_or(rest, |(_, r)| r);
    }
    metrics
}

#[test]
fn metrics_are_found_in_expressions() {
    let expression =
        r#"sum by (job, role) (rate(a_total{result="x,y", role!="b"}[5m])) / b or vector(0)"#;
    let found = asked(expression);
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(names, ["a_total", "b"]);
    assert!(found["a_total"].contains("result") && found["b"].is_empty());
}

/// Processes of a cluster, with addresses of their metrics; killed when dropped.
struct Processes(Vec<(Child, String)>);

impl Drop for Processes {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            // Already gone is fine.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
    listener.expect("a port").to_string()
}

impl Processes {
    /// One of each role; the second address is that of sessions.
    fn start(dir: &Path) -> (Processes, String) {
        let (meta, sessions) = (free_address(), free_address());
        let mut processes = Processes(Vec::new());
        for role in ["meta", "compute", "compactor", "frontend"] {
            let http = free_address();
            let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
            let store = format!("file://{}", dir.join("store").display());
            command.args([role, "--object-store", &store, "--http", &http]);
            command.env("MILLRACE_PARALLELISM", "1").args(["--memory-limit=128MB", "--data-dir"]);
            command.arg(dir.join(role)).stdin(Stdio::null()).stdout(Stdio::null());
            match role {
                "meta" => command.args(["--listen", &meta]),
                "frontend" => command.args(["--listen", &sessions, "--meta", &meta]),
                _ => command.args(["--listen", "127.0.0.1:0", "--meta", &meta]),
            };
            let child = command.spawn().expect("the binary is there");
            processes.0.push((child, http));
        }
        (processes, sessions)
    }

    /// A server that runs all roles, beside them.
    fn add_standalone(&mut self, dir: &Path) {
        let http = free_address();
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.args([
            "standalone",
            "--listen=127.0.0.1:0",
            "--memory-limit=128MB",
            "--http",
            &http,
        ]);
        command.env("MILLRACE_PARALLELISM", "1").arg("--data-dir").arg(dir.join("standalone"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        self.0.push((command.spawn().expect("the binary is there"), http));
    }

    /// What all of them show.
    fn metrics(&self) -> std::io::Result<String> {
        let mut all = String::new();
        for (_, address) in &self.0 {
            let mut stream = TcpStream::connect(address)?;
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            let request =
                format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes())?;
            stream.read_to_string(&mut all)?;
        }
        Ok(all)
    }
}

/// Names of samples, each with the names of its labels.
fn samples(metrics: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in metrics.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        let labels = line.split_once('{').map_or("", |(_, rest)| rest);
        let labels = labels.split("=\"").filter_map(|part| part.rsplit(['"', ',', '{']).next());
        found.entry(name).or_default().extend(labels);
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_of_the_dashboard_is_one_of_a_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let (processes, sessions) = Processes::start(dir.path());
    let deadline = Instant::now() + LIMIT;
    let client = loop {
        match crate::connect(&sessions).await {
            Ok(client) => break client,
            Err(error) => assert!(Instant::now() < deadline, "no session: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let sql = "CREATE TABLE t (id int PRIMARY KEY, k int);
               CREATE MATERIALIZED VIEW v AS SELECT k, count(*) AS n FROM t GROUP BY k;
               INSERT INTO t VALUES (1, 1), (2, 1)";
    client.batch_execute(sql).await.expect("statements run");
    let dashboard = dashboard();
    let wanted: Vec<_> = expressions(&dashboard).into_iter().map(|e| (e, asked(e))).collect();
    assert!(wanted.len() > 30 && wanted.iter().all(|(_, metrics)| !metrics.is_empty()));
    loop {
        let metrics = processes.metrics().unwrap_or_default();
        let there = samples(&metrics);
        let missing: Vec<String> = wanted
            .iter()
            .flat_map(|(_, metrics)| metrics)
            .filter(|(name, labels)| {
                let known = there.get(name.as_str());
                known.is_none_or(|known| !labels.iter().all(|l| known.contains(l.as_str())))
            })
            .map(|(name, labels)| format!("{name} {labels:?}"))
            .collect();
        if missing.is_empty() {
            break;
        }
        assert!(Instant::now() < deadline, "no process has {missing:#?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Names in the first cells of the manual's tables of metrics; those that stand for several are left out.
fn documented(manual: &str) -> BTreeSet<&str> {
    let rows = manual.lines().filter(|line| line.starts_with("| `millrace_"));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let named = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    named.filter_map(|name| name.split('{').next()).filter(|name| !name.contains('…')).collect()
}

/// Names of what is exported.
fn families(metrics: &str) -> BTreeSet<&str> {
    let types = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types.filter_map(|rest| rest.split(' ').next()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_manual_has_every_metric_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let (mut processes, _) = Processes::start(dir.path());
    processes.add_standalone(dir.path());
    let manual = read("docs/operations.md");
    let documented = documented(&manual);
    let deadline = Instant::now() + LIMIT;
    loop {
        let metrics = processes.metrics().unwrap_or_default();
        let exported = families(&metrics);
        let unknown: Vec<_> = exported.difference(&documented).collect();
        assert!(unknown.is_empty(), "docs/operations.md lacks {unknown:#?}");
        let missing: Vec<_> = documented.difference(&exported).collect();
        if missing.is_empty() {
            break;
        }
        assert!(Instant::now() < deadline, "no process has {missing:#?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[test]
fn prometheus_asks_every_process() {
    let config = read("docker/monitoring/prometheus.yml");
    let has = |line: &str| config.lines().any(|l| l.trim() == line);
    assert!(has("honor_labels: true"), "else `job` of a metric would be renamed");
    let targets: BTreeSet<&str> = config.split('"').filter(|part| part.contains(':')).collect();
    let port = |service: &str| if service == "haproxy" { 8404 } else { 5691 };
    let processes = SERVICES.iter().filter(|service| **service != "s3");
    let expected: BTreeSet<String> = processes.map(|s| format!("{s}:{}", port(s))).collect();
    let found: BTreeSet<String> =
        targets.into_iter().filter(|t| !t.contains(' ')).map(str::to_owned).collect();
    assert_eq!(found, expected);
    // They listen where they are asked.
    assert!(read("docker-compose.yml").contains("MILLRACE_HTTP: 0.0.0.0:5691"));
    assert!(read("docker/haproxy.cfg").contains("bind :8404"));
}
