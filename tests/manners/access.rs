//! Passwords and TLS, as psql sees them.

use std::path::Path;
use std::process::Command;

use millrace_sqllogictest::{Server, ServerOptions};

use super::skip;

/// psql with this environment: its output and whether it got in.
pub fn psql(port: u16, user: &str, env: &[(&str, &str)], sql: &str) -> Option<(bool, String)> {
    let output = Command::new("psql")
        .args(["-X", "-A", "-t", "-w", "-h", "127.0.0.1", "-d", "dev", "-U", user, "-p"])
        .arg(port.to_string())
        .args(["-c", sql])
        .env_remove("PGPASSWORD")
        .envs(env.iter().copied())
        .output()
        .ok()?;
    let text = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8_lossy(&text).trim().to_owned()))
}

pub fn start(dir: &Path, args: &[&str]) -> Server {
    let args = args.iter().map(ToString::to_string).collect();
    let options = ServerOptions { data_dir: dir.join("data"), args, ..Default::default() };
    Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options).expect("the server starts")
}

#[test]
fn passwords_are_asked_for_and_checked() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let open = start(dir.path(), &[]);
    let run = |sql: &str| psql(open.port, "root", &[], sql);
    let Some((made, text)) = run("CREATE USER ann WITH LOGIN PASSWORD 'open sesame'") else {
        return skip("psql");
    };
    assert!(made, "{text}");
    assert!(run("CREATE ROLE bob").expect("psql").0);
    assert!(run("CREATE USER ann").expect("psql").1.contains("role \"ann\" already exists"));
    assert!(run("DROP USER nobody").expect("psql").1.contains("role \"nobody\" does not exist"));
    assert!(run("ALTER USER root PASSWORD 'of all'").expect("psql").0);
    drop(open);

    // What the log kept is enough after a kill.
    let closed = start(dir.path(), &["--require-password"]);
    let enter = |user: &str, password: &str| {
        psql(closed.port, user, &[("PGPASSWORD", password)], "SELECT current_user").expect("psql")
    };
    assert_eq!(enter("ann", "open sesame"), (true, "ann".to_owned()));
    assert_eq!(enter("root", "of all"), (true, "root".to_owned()));
    for (user, password) in
        [("ann", "shut sesame"), ("bob", ""), ("bob", "x"), ("eve", "open sesame")]
    {
        let (entered, text) = enter(user, password);
        assert!(!entered, "{user} got in");
        let failed = text.contains(&format!("password authentication failed for user \"{user}\""));
        assert!(failed || password.is_empty(), "{text}");
    }
    let env = [("PGPASSWORD", "of all")];
    let alter = |sql: &str| psql(closed.port, "root", &env, sql).expect("psql");
    assert!(alter("ALTER USER ann PASSWORD 'another'").0);
    assert!(!enter("ann", "open sesame").0 && enter("ann", "another").0);
    assert!(alter("DROP USER ann").0);
    assert!(!enter("ann", "another").0);
}

/// As an image is run that others connect to.
#[test]
fn the_environment_gives_root_its_first_password() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let with_password = |password: &str| {
        let env = [("MILLRACE_ROOT_PASSWORD".to_owned(), password.to_owned())];
        let options = ServerOptions {
            data_dir: dir.path().join("data"),
            args: vec!["--require-password".to_owned()],
            env: env.into_iter().collect(),
        };
        Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options).expect("it starts")
    };
    let enter = |server: &Server, password: &str, sql: &str| {
        psql(server.port, "root", &[("PGPASSWORD", password)], sql)
    };
    let server = with_password("first");
    let Some(entered) = enter(&server, "first", "SELECT current_user") else {
        return skip("psql");
    };
    assert_eq!(entered, (true, "root".to_owned()));
    assert!(!enter(&server, "second", "SELECT 1").expect("psql").0);
    assert!(enter(&server, "first", "ALTER USER root PASSWORD 'changed'").expect("psql").0);
    drop(server);

    let server = with_password("second");
    assert!(!enter(&server, "second", "SELECT 1").expect("psql").0, "it has one already");
    assert!(enter(&server, "changed", "SELECT 1").expect("psql").0);
}

#[test]
fn health_tells_by_its_exit_code() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let health = |address: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.args(["health", "--http", address]).output().expect("it runs").status.success()
    };
    assert!(!health("127.0.0.1:1"), "nobody is there");
    let server = start(dir.path(), &["--http", "127.0.0.1:0"]);
    let address = format!("127.0.0.1:{}", server.http.expect("an HTTP port"));
    assert!(health(&address));
    drop(server);
    assert!(!health(&address));
}

#[test]
fn the_environment_has_two_names_for_the_http_port() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let begin = |env: &[(&str, &str)]| {
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let options = ServerOptions {
            data_dir: dir.path().join("data"),
            args: Vec::new(),
            env: env.collect(),
        };
        Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options).expect("it starts")
    };
    let second = ("MILLRACE_METRICS_LISTEN", "off");
    assert_eq!(begin(&[second]).http, None);
    let server = begin(&[second, ("MILLRACE_HTTP", "127.0.0.1:0")]);
    let address = format!("127.0.0.1:{}", server.http.expect("the first name goes before"));
    let mut health = Command::new(env!("CARGO_BIN_EXE_millrace"));
    health.arg("health").env_remove("MILLRACE_HTTP").env("MILLRACE_METRICS_LISTEN", address);
    assert!(health.output().expect("it runs").status.success());
}

#[test]
fn tls_is_served_from_files() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-sha256"])
        .args(["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"])
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&cert)
        .output();
    if !made.is_ok_and(|o| o.status.success()) {
        return skip("openssl");
    }
    let (cert, key) = (cert.display().to_string(), key.display().to_string());
    let plain = start(dir.path(), &[]);
    let require = [("PGSSLMODE", "require")];
    let Some((entered, text)) = psql(plain.port, "root", &require, "SELECT 1") else {
        return skip("psql");
    };
    assert!(!entered && text.contains("does not support SSL"), "{text}");
    assert!(psql(plain.port, "root", &[], "ALTER USER root PASSWORD 'of all'").expect("psql").0);
    drop(plain);

    let args = ["--tls-cert", &cert, "--tls-key", &key, "--require-password"];
    let server = start(dir.path(), &args);
    let verified = [
        ("PGSSLMODE", "verify-full"),
        ("PGSSLROOTCERT", cert.as_str()),
        ("PGPASSWORD", "of all"),
        // The proof of the password is bound to the server's certificate.
        ("PGCHANNELBINDING", "require"),
    ];
    // More than one TLS record, both ways.
    let sql = "SELECT length(string_agg(g::text, '')) FROM generate_series(1, 100000) AS s(g)";
    let (entered, text) = psql(server.port, "root", &verified, sql).expect("psql");
    assert_eq!((entered, text.as_str()), (true, "488895"));
    let many = "SELECT g FROM generate_series(1, 50000) AS s(g)";
    let (_, text) = psql(server.port, "root", &verified, many).expect("psql");
    assert_eq!(text.lines().count(), 50_000);
    let wrong = [("PGSSLMODE", "require"), ("PGPASSWORD", "of none")];
    assert!(!psql(server.port, "root", &wrong, "SELECT 1").expect("psql").0);
    let clear = [("PGSSLMODE", "disable"), ("PGPASSWORD", "of all")];
    assert!(psql(server.port, "root", &clear, "SELECT 1").expect("psql").0);
}

#[test]
fn bad_tls_files_are_said() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("not.pem");
    std::fs::write(&file, "nothing").expect("written");
    let output = Command::new(env!("CARGO_BIN_EXE_millrace"))
        .args(["--listen", "127.0.0.1:0", "--http", "off", "--data-dir"])
        .arg(dir.path().join("data"))
        .arg("--tls-cert")
        .arg(&file)
        .arg("--tls-key")
        .arg(&file)
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("--tls-cert"), "{text}");
}
