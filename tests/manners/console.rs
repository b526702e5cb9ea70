//! The HTTP port: metrics, health, the console's JSON and who may run statements, the page in a browser,
//! and the demo.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{psql, skip, start};

/// One request; status and body.
fn request(port: u16, head: &str, headers: &str, body: &str) -> (u16, String) {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let length = body.len();
    let text = format!(
        "{head} HTTP/1.1\r\n{headers}Connection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    socket.write_all(text.as_bytes()).expect("sent");
    let mut answer = String::new();
    socket.read_to_string(&mut answer).expect("an answer");
    let status = answer.split_whitespace().nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    let body = answer.split_once("\r\n\r\n").map(|(_, b)| b.to_owned()).unwrap_or_default();
    (status, body)
}

fn get(port: u16, path: &str) -> String {
    let host = format!("Host: 127.0.0.1:{port}\r\n");
    let (status, body) = request(port, &format!("GET {path}"), &host, "");
    assert_eq!(status, 200, "{path}: {body}");
    body
}

fn run(port: u16, extra: &str, sql: &str) -> (u16, String) {
    let headers = format!("Host: localhost:{port}\r\n{extra}");
    request(port, "POST /api/sql", &headers, &format!("{{\"sql\": \"{sql}\"}}"))
}

const OWN: &str = "Content-Type: application/json\r\nX-Millrace-Console: 1\r\n";

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
        ],
    ) else {
        return skip("psql");
    };
    assert_eq!(made, "");

    let mut metrics = get(port, "/metrics");
    let deadline = Instant::now() + Duration::from_secs(60);
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

    let state = get(port, "/api/state");
    assert!(state.contains("\"name\":\"sums\"") && state.contains("\"Aggregate\""), "{state}");
    assert!(get(port, "/").contains("<title>Millrace</title>"));
    let (status, answer) = run(port, OWN, "SELECT n FROM sums WHERE v = 0; SELECT nope");
    assert_eq!(status, 200);
    assert!(answer.contains("[[\"142\"]]"), "{answer}");
    assert!(
        answer.contains("\"state\":\"42703\"") && answer.contains("\"position\":40"),
        "{answer}"
    );
}

/// What a page of another site could send is refused, and runs nothing.
#[test]
fn foreign_pages_run_nothing() {
    let running = start();
    let port = running.server.http.expect("an HTTP port");
    let own_origin = format!("{OWN}Origin: http://localhost:{port}\r\n");
    assert_eq!(run(port, &own_origin, "CREATE TABLE mine (a int)").0, 200);
    let create = "CREATE TABLE foreign_made (a int)";
    for extra in [
        "",
        "Content-Type: application/json\r\n",
        "Content-Type: text/plain\r\nX-Millrace-Console: 1\r\n",
        &format!("{OWN}Origin: http://evil.example\r\n"),
        &format!("{OWN}Origin: null\r\n"),
        &format!("{OWN}Sec-Fetch-Site: cross-site\r\n"),
    ] {
        let (status, answer) = run(port, extra, create);
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

fn chromium() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .flat_map(|dir| names.map(|name| dir.join(name)))
        .find(|file| file.is_file())
}

/// The page in a real browser: it draws the dataflow from what the server says, without an error.
#[test]
fn the_console_draws_in_a_browser() {
    let Some(browser) = chromium() else { return skip("chromium") };
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
    let profile = tempfile::tempdir().expect("a temporary directory");
    let picture = std::env::var_os("MILLRACE_CONSOLE_PICTURE");
    let dump = |arguments: &[&str]| {
        let output = Command::new(&browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .args([
                "--virtual-time-budget=4000",
                "--window-size=1400,1100",
                "--enable-logging=stderr",
            ])
            .args(arguments)
            .arg(format!("http://127.0.0.1:{port}/?pick=totals"))
            .stdin(Stdio::null())
            .output()
            .expect("the browser runs");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let console: Vec<&str> = errors.lines().filter(|l| l.contains(":CONSOLE")).collect();
        assert!(console.is_empty(), "{console:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let parts = [
        "● live",
        "materialized view public.totals",
        "aria-label=\"table orders",
        "aria-label=\"materialized view large",
        "Operators of totals",
        "SELECT v, count(*) AS n FROM orders GROUP BY v",
        "State tables",
    ];
    // The browser's patience is short: on a busy machine it may dump the page before it has its answers.
    let mut page = dump(&["--dump-dom"]);
    for _ in 0..5 {
        if parts.iter().all(|part| page.contains(part)) {
            break;
        }
        page = dump(&["--dump-dom"]);
    }
    for part in parts {
        assert!(page.contains(part), "{part} is not on the page:\n{page}");
    }
    if let Some(file) = picture {
        dump(&[&format!("--screenshot={}", Path::new(&file).display())]);
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
