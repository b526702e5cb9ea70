//! The console of a server that asks for passwords: who gets in, what is closed without, and as whom statements run.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::access::{psql, start};
use super::browser::Page;
use super::console::{OWN, exchange, finished, request};
use super::skip;

const PATIENCE: Duration = Duration::from_secs(120);

/// A server with the users root, ann and bob, of whom bob has no password.
fn closed(dir: &Path) -> Option<millrace_sqllogictest::Server> {
    let open = start(dir, &[]);
    for sql in [
        "CREATE USER ann PASSWORD 'open sesame'",
        "CREATE USER bob",
        "ALTER USER root PASSWORD 'of all'",
    ] {
        let (done, text) = psql(open.port, "root", &[], sql)?;
        assert!(done, "{sql}: {text}");
    }
    drop(open);
    Some(start(dir, &["--require-password"]))
}

/// What the page sends with a cookie: status, head and body.
fn send(port: u16, what: &str, cookie: &str, body: &Value) -> (u16, String, Value) {
    let cookie =
        if cookie.is_empty() { String::new() } else { format!("Cookie: other=1; {cookie}\r\n") };
    let headers = format!("Host: localhost:{port}\r\n{OWN}{cookie}");
    let (status, head, text) = exchange(port, what, &headers, &body.to_string());
    let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
    (status, head, value)
}

fn log_in(port: u16, user: &str, password: &str) -> (u16, String, Value) {
    send(port, "POST /api/login", "", &json!({"user": user, "password": password}))
}

/// The cookie that an answer sets, without its attributes.
fn cookie_of(head: &str) -> String {
    let line = head.lines().find_map(|l| l.strip_prefix("set-cookie: "));
    line.and_then(|l| l.split(';').next()).unwrap_or_default().to_owned()
}

/// Runs statements as the page does, to their end: all answers.
fn run(port: u16, cookie: &str, sql: &str) -> Value {
    let (status, _, begun) = send(port, "POST /api/sql", cookie, &json!({"sql": sql}));
    assert_eq!(status, 200, "{sql}: {begun}");
    finished(begun, |path| send(port, &format!("GET {path}"), cookie, &Value::Null).2)
}

fn entered(port: u16, user: &str, password: &str) -> String {
    let (status, head, body) = log_in(port, user, password);
    assert_eq!(status, 200, "{head}\n{body}");
    cookie_of(&head)
}

const CLOSED: [&str; 6] = [
    "GET /api/state",
    "GET /api/graph/1",
    "GET /api/run/00",
    "POST /api/sql",
    "POST /api/run/00/cancel",
    "POST /api/logout",
];

#[test]
fn the_console_is_closed_to_those_who_have_not_logged_in() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let Some(server) = closed(dir.path()) else { return skip("psql") };
    let port = server.http.expect("an HTTP port");
    let name = format!("millrace_{port}");
    let body = json!({"sql": "CREATE TABLE made (a int)"});
    for cookie in [
        String::new(),
        format!("{name}="),
        format!("{name}=x"),
        format!("{name}={}", "0".repeat(64)),
    ] {
        for what in CLOSED {
            assert_eq!(send(port, what, &cookie, &body).0, 401, "{what} with {cookie:?}");
        }
    }
    for what in ["GET /", "GET /health", "GET /metrics"] {
        let headers = format!("Host: 127.0.0.1:{port}\r\n");
        assert_eq!(request(port, what, &headers, "").0, 200, "{what}");
    }
    // Whether there is such a user is not told.
    let refused: Vec<_> =
        [("ann", "shut sesame"), ("eve", "open sesame"), ("bob", ""), ("bob", "x")]
            .map(|(user, password)| log_in(port, user, password))
            .into_iter()
            .map(|(status, head, body)| (status, cookie_of(&head), body))
            .collect();
    let told = json!({"error": {"message": "the user name or the password is wrong"}});
    assert!(refused.iter().all(|r| *r == (401, String::new(), told.clone())), "{refused:?}");
    for foreign in
        ["Origin: http://evil.example\r\n", "Sec-Fetch-Site: same-site\r\n", "Origin: null\r\n"]
    {
        let headers = format!("Host: localhost:{port}\r\n{OWN}{foreign}");
        let body = json!({"user": "ann", "password": "open sesame"}).to_string();
        assert_eq!(request(port, "POST /api/login", &headers, &body).0, 403, "{foreign}");
    }

    let cookie = entered(port, "ann", "open sesame");
    for foreign in ["Origin: http://evil.example\r\n", "Sec-Fetch-Site: same-site\r\n"] {
        let headers = format!("Host: localhost:{port}\r\nCookie: {cookie}\r\n{OWN}{foreign}");
        for what in ["POST /api/sql", "POST /api/logout"] {
            assert_eq!(request(port, what, &headers, &body.to_string()).0, 403, "{what} {foreign}");
        }
    }
    let (status, _, state) = send(port, "GET /api/state", &cookie, &Value::Null);
    assert_eq!((status, &state["user"], &state["relations"]), (200, &json!("ann"), &json!([])));

    // Guesses: sooner or later not even the right password is looked at.
    let until = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < until, "guesses are free");
        let (status, head, _) = log_in(port, "root", "guess");
        if status == 401 {
            continue;
        }
        assert_eq!(status, 429);
        assert!(head.contains("retry-after: "), "{head}");
        // Unless the time for which it is not has passed meanwhile.
        if log_in(port, "root", "of all").0 == 429 {
            break;
        }
    }
    assert_eq!(send(port, "GET /api/state", &cookie, &Value::Null).0, 200, "who is in stays in");
}

#[test]
fn a_login_is_its_users_until_it_ends() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let Some(server) = closed(dir.path()) else { return skip("psql") };
    let port = server.http.expect("an HTTP port");
    let (_, head, body) = log_in(port, "ann", "open sesame");
    assert_eq!(body, json!({"user": "ann"}));
    let ann = cookie_of(&head);
    let token = ann.strip_prefix(&format!("millrace_{port}=")).expect("a cookie of this port");
    assert_eq!(token.len(), 64, "256 bits: {token}");
    let set = head.lines().find(|l| l.starts_with("set-cookie: ")).unwrap_or_default();
    for part in ["; HttpOnly", "; SameSite=Strict", "; Path=/", "; Max-Age=43200"] {
        assert!(set.contains(part), "{set}");
    }
    let root = entered(port, "root", "of all");
    for (cookie, user) in [(&ann, "ann"), (&root, "root")] {
        let answer = run(port, cookie, "SELECT current_user, session_user");
        assert_eq!(answer["answers"][0]["rows"], json!([[user, user]]), "{answer}");
    }

    // A run is its user's alone.
    let sql = json!({"sql": "SELECT pg_sleep(600)"});
    let (_, _, begun) = send(port, "POST /api/sql", &ann, &sql);
    assert_eq!(begun["done"], false, "{begun}");
    let path = format!("/api/run/{}", begun["run"].as_str().expect("a run"));
    let (look, cancel) = (format!("GET {path}"), format!("POST {path}/cancel"));
    assert_eq!(send(port, &look, &root, &Value::Null).0, 404);
    assert_eq!(send(port, &cancel, &root, &Value::Null).0, 404);
    let runs = |cookie: &str| {
        let (_, _, state) = send(port, "GET /api/state", cookie, &Value::Null);
        state["runs"].as_array().map_or(0, Vec::len)
    };
    assert_eq!((runs(&ann), runs(&root)), (1, 0));
    assert_eq!(send(port, &cancel, &ann, &Value::Null).0, 200);

    assert_eq!(send(port, "POST /api/logout", &ann, &json!({})).0, 200);
    for what in CLOSED {
        assert_eq!(send(port, what, &ann, &json!({})).0, 401, "{what}");
    }
    assert_eq!(send(port, "GET /api/state", &root, &Value::Null).0, 200, "root is still in");
    // Another password ends what was let in with the old one; so does the user's end.
    let again = entered(port, "ann", "open sesame");
    let altered = run(port, &root, "ALTER USER ann PASSWORD 'another'");
    assert_eq!(altered["error"], Value::Null);
    assert_eq!(send(port, "GET /api/state", &again, &Value::Null).0, 401);
    let newest = entered(port, "ann", "another");
    assert_eq!(run(port, &root, "DROP USER ann")["error"], Value::Null);
    assert_eq!(send(port, "GET /api/state", &newest, &Value::Null).0, 401);
}

/// Others can reach it: then this machine's users log in as well.
#[test]
fn a_console_that_others_can_reach_wants_a_login() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for (args, status) in [(&[][..], 200), (&["--http", "0.0.0.0:0"][..], 401)] {
        let server = start(dir.path(), args);
        let port = server.http.expect("an HTTP port");
        assert_eq!(send(port, "GET /api/state", "", &Value::Null).0, status, "{args:?}");
        let (refused, _, _) = log_in(port, "root", "");
        assert_eq!(refused, if status == 200 { 404 } else { 401 }, "{args:?}");
    }
}

#[test]
fn a_browser_logs_in_runs_statements_and_logs_out() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let Some(server) = closed(dir.path()) else { return skip("psql") };
    let port = server.http.expect("an HTTP port");
    let Some(mut page) = Page::open(&format!("http://127.0.0.1:{port}/")) else {
        return skip("chromium");
    };
    page.shows("login", "Log in");
    page.until("!document.getElementById('main').checkVisibility()");
    page.fill("login-user", "ann");
    page.fill("login-password", "shut sesame");
    page.click("login-button");
    page.shows("login-error", "the user name or the password is wrong");
    page.fill("login-password", "open sesame");
    page.click("login-button");
    page.shows("user", "ann");
    page.until("!document.getElementById('login').checkVisibility()");
    assert_eq!(page.value("document.cookie"), "", "no script sees the cookie");

    page.fill(
        "sql",
        "CREATE TABLE t (a int); INSERT INTO t VALUES (7); SELECT current_user, a FROM t",
    );
    page.click("run");
    page.shows("answers", "ann");
    page.shows("answers", "SELECT 1");
    page.until("[...document.querySelectorAll('#list button')].some(b => b.textContent === 't')");
    // What takes long runs on until it is cancelled.
    page.fill("sql", "SELECT pg_sleep(600)");
    page.click("run");
    page.shows("took", "SELECT pg_sleep(600)");
    page.reload();
    page.shows("took", "SELECT pg_sleep(600)");
    page.click("cancel");
    page.shows("answers", "canceling statement due to user request (57014)");

    page.click("logout");
    page.shows("login", "Log in");
    page.until("!document.getElementById('main').checkVisibility()");
    let left =
        page.value("document.getElementById('list').children.length + answers.children.length");
    assert_eq!(left, 0, "nothing is left of what was shown");
    page.reload();
    page.shows("login", "Log in");
    assert!(page.failures.is_empty(), "{:?}", page.failures);
}
