//! The HTTP port: metrics, health, the console's JSON and who may run statements, the page in a browser,
//! and the demo.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::browser::Page;
use super::{psql, skip, start};

/// One request; status, head and body.
pub fn exchange(port: u16, what: &str, headers: &str, body: &str) -> (u16, String, String) {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let length = body.len();
    let text = format!(
        "{what} HTTP/1.1\r\n{headers}Connection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    socket.write_all(text.as_bytes()).expect("sent");
    let mut answer = String::new();
    socket.read_to_string(&mut answer).expect("an answer");
    let status = answer.split_whitespace().nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (status, head.to_owned(), body.to_owned())
}

/// One request; status and body.
pub fn request(port: u16, what: &str, headers: &str, body: &str) -> (u16, String) {
    let (status, _, body) = exchange(port, what, headers, body);
    (status, body)
}

fn get(port: u16, path: &str) -> String {
    let host = format!("Host: 127.0.0.1:{port}\r\n");
    let (status, body) = request(port, &format!("GET {path}"), &host, "");
    assert_eq!(status, 200, "{path}: {body}");
    body
}

/// For whatever the server is asked; a machine may be busy.
const PATIENCE: Duration = Duration::from_secs(120);

fn get_json(port: u16, path: &str) -> Value {
    serde_json::from_str(&get(port, path)).expect("JSON")
}

/// Sends statements; status and the first answer.
fn begin(port: u16, extra: &str, sql: &str) -> (u16, String) {
    let headers = format!("Host: localhost:{port}\r\n{extra}");
    request(port, "POST /api/sql", &headers, &json!({"sql": sql}).to_string())
}

/// What a run that was begun comes to, with all its answers.
fn finish(port: u16, begun: &str) -> Value {
    let begun = serde_json::from_str(begun).expect("JSON");
    finished(begun, |path| get_json(port, path))
}

/// As [`finish`], of a run that `get` looks at.
pub fn finished(mut all: Value, get: impl Fn(&str) -> Value) -> Value {
    let until = Instant::now() + PATIENCE;
    while all["done"] == false {
        assert!(Instant::now() < until, "it does not end: {all}");
        let seen = all["answers"].as_array().map_or(0, Vec::len);
        let run = all["run"].as_str().expect("a run").to_owned();
        let mut next = get(&format!("/api/run/{run}?seen={seen}"));
        let more = next["answers"].take();
        all["answers"]
            .as_array_mut()
            .expect("answers")
            .extend(more.as_array().cloned().unwrap_or_default());
        for part in ["done", "error", "current"] {
            all[part] = next[part].take();
        }
    }
    all
}

/// Runs statements as the page does.
fn run(port: u16, sql: &str) -> Value {
    let (status, begun) = begin(port, OWN, sql);
    assert_eq!(status, 200, "{sql}: {begun}");
    finish(port, &begun)
}

fn cancel(port: u16, run: &Value) -> u16 {
    let headers = format!("Host: localhost:{port}\r\n{OWN}");
    let id = run["run"].as_str().expect("a run");
    request(port, &format!("POST /api/run/{id}/cancel"), &headers, "{}").0
}

/// What the console is told of a relation, once that is so.
fn relation_when(port: u16, name: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let until = Instant::now() + PATIENCE;
    loop {
        let state = get_json(port, "/api/state");
        let relations = state["relations"].as_array().cloned().unwrap_or_default();
        let found = relations.into_iter().find(|r| r["name"] == name).unwrap_or_default();
        if is_so(&found) {
            return found;
        }
        assert!(Instant::now() < until, "{name} is {found}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub const OWN: &str = "Content-Type: application/json\r\nX-Millrace-Console: 1\r\n";

#[test]
fn the_http_port_tells_what_the_server_does() {
    let running = start();
    let port = running.server.http.expect("an HTTP port");
    assert_eq!(get(port, "/health"), "ok\n");
    let Some(made) = psql(
        running.server.port,
        &[
            "CREATE TABLE t (id int PRIMARY KEY, v int)",
            "INSERT INTO t SELECT g, g % 7 FROM generate_series(1, 1000) AS s(g)",
            "CREATE MATERIALIZED VIEW sums AS SELECT v, count(*) AS n FROM t GROUP BY v",
            "CREATE MATERIALIZED VIEW joined AS SELECT a.id, b.v FROM t a JOIN t b ON a.v = b.id",
        ],
    ) else {
        return skip("psql");
    };
    assert_eq!(made, "");

    let mut metrics = get(port, "/metrics");
    let deadline = Instant::now() + PATIENCE;
    for line in [
        "millrace_job_rows{job=\"public.t\"} 1000",
        "millrace_job_rows{job=\"public.sums\"} 7",
        "millrace_job_state{job=\"public.sums\",state=\"running\"} 1",
        "# TYPE millrace_store_requests_total counter",
    ] {
        while !metrics.lines().any(|l| l == line) {
            assert!(Instant::now() < deadline, "{line} is not in\n{metrics}");
            std::thread::sleep(Duration::from_millis(50));
            metrics = get(port, "/metrics");
        }
    }
    // What Prometheus takes: a name, labels, a number; every family announced once.
    let mut announced = std::collections::HashSet::new();
    for line in metrics.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            assert!(announced.insert(family.split(' ').next()), "{line} comes twice");
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            assert!(value.parse::<f64>().is_ok(), "{line}");
            assert!(announced.contains(&name.split('{').next()), "{line} was not announced");
        }
    }

    let joined = relation_when(port, "joined", |r| r["job"]["operators"].is_array());
    shows_lookahead(&joined);
    let state = get(port, "/api/state");
    assert!(state.contains("\"name\":\"sums\"") && state.contains("\"Aggregate\""), "{state}");
    assert!(get(port, "/").contains("<title>Millrace</title>"));
    let came = run(port, "SELECT n FROM sums WHERE v = 0; SELECT nope");
    assert_eq!(came["answers"][0]["rows"], json!([["142"]]), "{came}");
    assert_eq!(
        (&came["error"]["state"], &came["error"]["position"]),
        (&json!("42703"), &json!(40))
    );
}

/// What the page draws of keys that are announced to a view's join, and nothing of operators to which none can be.
fn shows_lookahead(view: &Value) {
    let operators = view["job"]["operators"].as_array().expect("operators");
    let (with, without): (Vec<&Value>, Vec<&Value>) =
        operators.iter().partition(|o| o["lookahead"].is_object());
    assert!(!without.is_empty(), "{view}");
    assert_eq!(with.len(), 1, "{view}");
    let shown = &with[0]["lookahead"];
    assert_eq!((&with[0]["name"], &shown["places"]), (&json!("Join"), &json!("entry, root, leaf")));
    for counted in
        ["hinted", "resident", "in_time", "late", "absent", "unused", "dropped", "demand"]
    {
        assert!(shown[counted].is_u64(), "{counted} of {shown}");
    }
    for measured in ["requests_ahead", "requests_demand", "epochs"] {
        assert!(shown[measured].is_u64(), "{measured} of {shown}");
    }
    // What no other join comes before is always announced.
    assert_eq!(shown["not_announced"], "");
    assert!(shown["active"].is_boolean() && shown.get("slack_us").is_some(), "{shown}");
}

/// What a page of another site could send is refused, and runs nothing.
#[test]
fn foreign_pages_run_nothing() {
    let running = start();
    let port = running.server.http.expect("an HTTP port");
    let own_origin = format!("{OWN}Origin: http://localhost:{port}\r\n");
    let (status, begun) = begin(port, &own_origin, "CREATE TABLE mine (a int)");
    assert_eq!((status, &finish(port, &begun)["error"]), (200, &Value::Null));
    let create = "CREATE TABLE foreign_made (a int)";
    for extra in [
        "",
        "Content-Type: application/json\r\n",
        "Content-Type: text/plain\r\nX-Millrace-Console: 1\r\n",
        &format!("{OWN}Origin: http://evil.example\r\n"),
        &format!("{OWN}Origin: null\r\n"),
        &format!("{OWN}Sec-Fetch-Site: cross-site\r\n"),
    ] {
        let (status, answer) = begin(port, extra, create);
        assert_eq!(status, 403, "{extra}: {answer}");
    }
    for head in ["GET /api/state", "GET /", "GET /metrics", "POST /api/sql"] {
        let headers = format!("Host: evil.example:{port}\r\n{OWN}");
        let body = format!("{{\"sql\": \"{create}\"}}");
        assert_eq!(request(port, head, &headers, &body).0, 421, "{head}");
    }
    assert_eq!(request(port, "GET /api/state", "", "").0, 421, "no Host");
    let state = get(port, "/api/state");
    assert!(state.contains("\"mine\"") && !state.contains("foreign_made"), "{state}");
}

/// Each statement of a run has its own first rows, and it is said what is not there.
#[test]
fn each_statement_shows_its_first_rows() {
    let running = start();
    let port = running.server.http.expect("an HTTP port");
    let came = run(
        port,
        "SELECT g FROM generate_series(1, 1001) AS s(g); SELECT g FROM generate_series(1, 1000) AS s(g); \
         SELECT repeat('é', 100000), 'whole'; SELECT repeat('x', 60000) FROM generate_series(1, 100); SELECT 'last'",
    );
    assert_eq!(came["error"], Value::Null);
    let rows = |i: usize| came["answers"][i]["rows"].as_array().map_or(0, Vec::len);
    let cut = |i: usize| came["answers"][i]["cut"].as_str().unwrap_or_default().to_owned();
    let tag = |i: usize| came["answers"][i]["tag"].clone();
    assert_eq!((rows(0), tag(0)), (1000, json!("SELECT 1000+")));
    assert!(cut(0).contains("more rows") && cut(0).contains("the first 1000"), "{}", cut(0));
    assert_eq!((rows(1), tag(1), cut(1)), (1000, json!("SELECT 1000"), String::new()));
    let value = came["answers"][2]["rows"][0][0].as_str().expect("a value");
    assert!(value.starts_with("éé") && value.ends_with("é…") && value.len() < 66_000);
    assert_eq!(came["answers"][2]["rows"][0][1], "whole");
    assert!(cut(2).contains("64 KiB"), "{}", cut(2));
    assert!(rows(3) > 60 && rows(3) < 100, "{}", rows(3));
    assert!(cut(3).contains("4 MiB"), "{}", cut(3));
    assert_eq!(came["answers"][4]["rows"], json!([["last"]]));
}

/// Nothing ends a statement but its own end or whoever wants it to: not a request's, nor a page's.
#[tokio::test]
async fn statements_run_on_until_they_end_or_are_cancelled() {
    let running = start();
    let port = running.server.http.expect("an HTTP port");
    let holder = running.server.connect().await.expect("a connection");
    holder.batch_execute("SELECT pg_advisory_lock(7)").await.expect("a lock");
    let waits = "SELECT 'before'; SELECT pg_advisory_lock(7); CREATE TABLE made (a int)";
    let (_, begun) = begin(port, OWN, waits);
    let begun: Value = serde_json::from_str(&begun).expect("JSON");
    assert_eq!((&begun["done"], &begun["statements"]), (&json!(false), &json!(3)));
    // Where it is, for a page that is opened now.
    let id = begun["run"].as_str().expect("a run");
    let state = get_json(port, "/api/state");
    assert_eq!((&state["runs"][0]["run"], &state["runs"][0]["sql"]), (&json!(id), &json!(waits)));
    let mut look = get_json(port, &format!("/api/run/{id}?seen=0"));
    let until = Instant::now() + PATIENCE;
    while look["current"]["number"] != 2 {
        assert!(Instant::now() < until, "{look}");
        look = get_json(port, &format!("/api/run/{id}"));
    }
    assert_eq!(look["current"]["text"], "SELECT pg_advisory_lock(7)");
    assert_eq!(look["answers"][0]["rows"], json!([["before"]]));
    // Nobody asks while it goes on.
    holder.batch_execute("SELECT pg_advisory_unlock(7)").await.expect("a lock");
    relation_when(port, "made", |r| r["kind"] == "table");
    let came = finish(port, &look.to_string());
    assert_eq!(
        (&came["error"], &came["answers"][2]["tag"]),
        (&Value::Null, &json!("CREATE TABLE"))
    );
    let gone = format!("Host: localhost:{port}\r\n");
    assert_eq!(request(port, &format!("GET /api/run/{id}"), &gone, "").0, 404, "given once");

    let (_, begun) = begin(port, OWN, "SELECT pg_sleep(600); CREATE TABLE never (a int)");
    let begun: Value = serde_json::from_str(&begun).expect("JSON");
    let id = begun["run"].as_str().expect("a run");
    let foreign = format!("Host: localhost:{port}\r\n{OWN}Origin: http://evil.example\r\n");
    assert_eq!(request(port, &format!("POST /api/run/{id}/cancel"), &foreign, "{}").0, 403);
    assert_eq!(cancel(port, &begun), 200);
    let came = finish(port, &begun.to_string());
    assert_eq!((&came["error"]["state"], &came["answers"]), (&json!("57014"), &json!([])));
    let came = run(port, "SET statement_timeout = '1ms'; SELECT pg_sleep(600)");
    assert_eq!(came["error"]["message"], "canceling statement due to statement timeout");
    let state = get_json(port, "/api/state");
    assert_eq!((&state["runs"], state.to_string().contains("never")), (&json!([]), false));
}

/// A block that is open at the end of a run ends with the run's session.
#[test]
fn a_run_that_does_not_commit_its_changes_says_so() {
    let running = start();
    let port = running.server.http.expect("an HTTP port");
    let came = run(port, "CREATE TABLE t (a int); BEGIN; INSERT INTO t VALUES (1)");
    assert_eq!(came["answers"][2]["tag"], "INSERT 0 1");
    assert_eq!(came["error"]["state"], "25001");
    let came = run(port, "BEGIN; INSERT INTO t VALUES (2); COMMIT; BEGIN; SELECT a FROM t");
    assert_eq!((&came["error"], &came["answers"][4]["rows"]), (&Value::Null, &json!([["2"]])));
}

/// However long a view takes to create, the page hears how far it is, and may cancel it.
#[test]
fn a_long_creation_tells_its_progress() {
    let running = start();
    let port = running.server.http.expect("an HTTP port");
    let table =
        "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 20000)";
    assert_eq!(run(port, table)["error"], Value::Null);
    // Hundreds of millions of pairs.
    let (_, begun) = begin(
        port,
        OWN,
        "CREATE MATERIALIZED VIEW pairs AS SELECT count(*) AS n FROM t a JOIN t b ON a.id <> b.id",
    );
    let begun: Value = serde_json::from_str(&begun).expect("JSON");
    let mut look = begun.clone();
    let until = Instant::now() + PATIENCE;
    while !look["current"]["progress"].as_str().is_some_and(|p| p.ends_with('%')) {
        assert!(look["done"] == false && Instant::now() < until, "{look}");
        let id = begun["run"].as_str().expect("a run");
        look = get_json(port, &format!("/api/run/{id}"));
    }
    assert_eq!(cancel(port, &begun), 200);
    assert_eq!(finish(port, &begun.to_string())["error"]["state"], "57014");
    relation_when(port, "pairs", Value::is_null);
}

/// A source or connector that fails is not told to be well, nor is what reads it.
#[test]
fn the_console_says_how_sources_are() {
    let running = start();
    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(dir.path().join("rows.csv"), "7\n8\n").expect("a file");
    let port = running.server.http.expect("an HTTP port");
    let with =
        |path: &str| format!("WITH (connector = 'fs', path = '{path}') FORMAT PLAIN ENCODE CSV");
    let (there, missing) = (
        with(&dir.path().display().to_string()),
        with(&dir.path().join("missing").display().to_string()),
    );
    for sql in [
        format!("CREATE SOURCE fine (v int) {there}"),
        format!("CREATE SOURCE broken (v int) {missing}"),
        format!("CREATE TABLE fed (v int) {missing}"),
        "CREATE MATERIALIZED VIEW of_fine AS SELECT count(*) AS c FROM fine".to_owned(),
        "SET background_ddl = on; CREATE MATERIALIZED VIEW of_broken AS SELECT count(*) AS c FROM broken".to_owned(),
    ] {
        assert_eq!(run(port, &sql)["error"], Value::Null, "{sql}");
    }
    let fine = relation_when(port, "fine", |r| r["source"]["taken"] == 4);
    assert_eq!((&fine["health"], &fine["source"]["lag"]), (&json!("good"), &json!(0)), "{fine}");
    assert_eq!(fine["source"]["splits"][0]["offset"], 4, "{fine}");
    relation_when(port, "of_fine", |r| r["health"] == "good");
    for name in ["broken", "fed"] {
        let failing = relation_when(port, name, |r| r["source"]["state"] == "failing");
        let reason = failing["source"]["reason"].as_str().unwrap_or_default();
        assert!(failing["health"] == "bad" && reason.contains("missing"), "{failing}");
    }
    relation_when(port, "of_broken", |r| {
        r["health"] == "warn" && r["job"]["reason"].as_str().is_some_and(|r| r.contains("missing"))
    });
    assert_eq!(run(port, "ALTER SOURCE fine PAUSE")["error"], Value::Null);
    relation_when(port, "fine", |r| r["source"]["state"] == "paused" && r["health"] == "warn");

    let Some(mut page) = Page::open(&format!("http://127.0.0.1:{port}/?pick=fed")) else {
        return skip("chromium");
    };
    page.shows("detail", "missing");
    page.shows("status", "2 failing");
    for (name, kind, state) in [
        ("fed", "bad", "failing"),
        ("fine", "warn", "paused"),
        ("of_fine", "good", "running"),
        ("of_broken", "warn", "running"),
    ] {
        page.until(&format!(
            "[...document.querySelectorAll('#list tr')].some(tr => tr.cells[0].innerText === '{name}' \
             && tr.cells[2].className === '{kind}' && tr.cells[2].innerText === '{state}')"
        ));
    }
    assert!(page.failures.is_empty(), "{:?}", page.failures);
}

/// The page in a real browser: it draws the dataflow from what the server says, without an error.
#[test]
fn the_console_draws_in_a_browser() {
    let running = start();
    let port = running.server.http.expect("an HTTP port");
    let Some(made) = psql(
        running.server.port,
        &[
            "CREATE TABLE orders (id int PRIMARY KEY, v int)",
            "CREATE MATERIALIZED VIEW totals AS SELECT v, count(*) AS n FROM orders GROUP BY v",
            "CREATE MATERIALIZED VIEW large AS SELECT * FROM totals WHERE n > 1",
            "INSERT INTO orders VALUES (1, 1), (2, 1), (3, 2)",
        ],
    ) else {
        return skip("psql");
    };
    assert_eq!(made, "");
    let Some(mut page) = Page::open(&format!("http://127.0.0.1:{port}/?pick=totals")) else {
        return skip("chromium");
    };
    page.shows("status", "● live");
    page.shows("detail-title", "materialized view public.totals");
    for part in ["State tables", "SELECT v, count(*) AS n FROM orders GROUP BY v"] {
        page.shows("detail", part);
    }
    // The keys of the groups could be announced, and need not be: all of them are in memory.
    for part in ["Lookahead", "Epochs without waits", "entry (idle)"] {
        page.shows("detail", part);
    }
    for label in ["table orders", "materialized view large", "Operators of totals"] {
        page.until(&format!("!!document.querySelector('[aria-label^=\"{label}\"]')"));
    }
    page.until("!document.getElementById('login').checkVisibility()");
    page.until("!document.getElementById('logout').checkVisibility()");
    page.fill("sql", "SELECT v, n FROM totals ORDER BY v; SELECT nope");
    page.click("run");
    page.shows("answers", "SELECT 2");
    page.shows("answers", "(42703)");
    assert!(page.failures.is_empty(), "{:?}", page.failures);
    if let Some(file) = std::env::var_os("MILLRACE_CONSOLE_PICTURE") {
        page.picture(&file);
    }
}

/// `millrace demo` into a pipe: where to connect, then a line a second; ends by itself, cleanly.
#[test]
fn the_demo_shows_its_views() {
    // On a slow machine its time may be over before it has begun.
    for seconds in [20, 60, 180] {
        let text = demo(seconds);
        assert!(!text.contains('\x1b'), "no terminal, no escapes: {text}");
        match shown(&text) {
            Ok(()) => return,
            Err(e) if seconds == 180 => panic!("{e}: {text}"),
            Err(e) => println!("after {seconds} s {e}"),
        }
    }
}

/// What a demo of so many seconds prints.
fn demo(seconds: u64) -> String {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_millrace"))
        .args(["demo", "--seconds", &seconds.to_string(), "--rate", "2000"])
        .args(["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--memory-limit", "256MB"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the demo starts");
    // Read as it comes: a pipe that is full would hold the demo up.
    let mut output = demo.stdout.take().expect("its output");
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        output.read_to_string(&mut text).map(|_| text)
    });
    let until = Instant::now() + Duration::from_secs(120 + seconds);
    let status = loop {
        match demo.try_wait().expect("a status") {
            Some(status) => break status,
            None if Instant::now() > until => {
                let _ = demo.kill();
                panic!("the demo does not end");
            }
            None => std::thread::sleep(Duration::from_millis(100)),
        }
    };
    let text = reader.join().expect("no panic").expect("text");
    assert!(status.success(), "{status}: {text}");
    text
}

/// Whether the demo has shown all it has.
fn shown(text: &str) -> Result<(), String> {
    let is = |there: bool, what: &str| if there { Ok(()) } else { Err(what.to_owned()) };
    let where_to = text.contains("psql -h 127.0.0.1 -p ") && text.contains("Console: http://");
    is(where_to, "it does not say where to connect")?;
    let last = text.lines().rfind(|l| l.contains(" s | ")).unwrap_or_default();
    for view in ["high_bids", "bids_on_auctions", "bids_per_window", "best_bids", "sellers"] {
        is(last.contains(view), &format!("{view} is not in the last line"))?;
    }
    is(!last.contains("bids_per_window 0 rows/s, 0 rows"), "nothing flows")?;
    is(text.ends_with("The demo has ended.\n"), "it does not say that it ends")
}
