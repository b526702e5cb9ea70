//! Processes of a cluster that cannot start say why, at once, and end: what they were told is wrong, or the object store
//! cannot be used.

use std::net::{IpAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use millrace_s3::{Options, Server};
use tokio_postgres::NoTls;

use crate::ctl::json;
use crate::process::{Cluster, Process, free_address, send_signal};
use crate::{execute, jobs, one};

/// How long a cold binary on a busy machine may take to say what is wrong. Nothing waits for so long.
const LIMIT: Duration = Duration::from_secs(60);
const ROLES: [&str; 4] = ["meta", "compute", "compactor", "frontend"];
const BUCKET: &str = "bucket";

/// A process that is expected to end by itself.
struct Failing {
    what: String,
    child: Child,
}

impl Failing {
    fn begin(what: String, mut command: Command) -> Failing {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Failing { what, child: command.spawn().expect("the binary is there") }
    }

    /// What it has said. It has failed.
    fn said(self) -> String {
        let (id, (tell, told)) = (self.child.id(), channel());
        std::thread::spawn(move || tell.send(self.child.wait_with_output()));
        let output: Output = match told.recv_timeout(LIMIT) {
            Ok(output) => output.expect("its output can be read"),
            Err(_) => {
                send_signal(id, "KILL");
                panic!("{} neither serves nor ends", self.what)
            }
        };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{}: {said}", self.what);
        assert!(said.contains("millrace: "), "{}: no reason: {said}", self.what);
        said
    }
}

/// A process over this store. Nobody listens where it would look for a leader.
fn command(role: &str, dir: &Path, store: &str) -> Command {
    let metas = (role != "meta").then_some("127.0.0.1:1");
    command_with(role, dir, store, metas)
}

/// The same, which looks for a leader there.
fn command_with(role: &str, dir: &Path, store: &str, metas: Option<&str>) -> Command {
    command_at("127.0.0.1:0", role, dir, store, metas)
}

/// The same at another address.
fn command_at(listen: &str, role: &str, dir: &Path, store: &str, metas: Option<&str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    command
        .args([role, "--http=off", "--memory-limit=128MB"])
        .env("MILLRACE_PARALLELISM", "1")
        .args(["--object-store", store, "--listen", listen])
        .arg("--data-dir")
        .arg(dir.join(role));
    command.args(metas.map(|metas| ["--meta", metas]).into_iter().flatten());
    command
}

fn over_s3(mut command: Command, endpoint: &str, secret: &str) -> Command {
    command.envs([
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", "millrace"),
        ("AWS_SECRET_ACCESS_KEY", secret),
        ("AWS_REGION", "us-east-1"),
    ]);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_cannot_be_used_is_an_error_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(Options::new(dir.path().join("s3"), BUCKET)).await.unwrap();
    let here = format!("http://{}", server.address());
    let (right, nowhere) = ("millrace-secret", "http://127.0.0.1:1");
    let mut failing = Vec::new();
    for role in ROLES {
        for (what, endpoint, secret, bucket, expected) in [
            ("unreachable", nowhere, right, BUCKET, nowhere),
            ("wrong key", here.as_str(), "wrong", BUCKET, "SignatureDoesNotMatch"),
            ("no bucket", here.as_str(), right, "elsewhere", "NoSuchBucket"),
        ] {
            let data = dir.path().join(what);
            let store = format!("s3://{bucket}/millrace");
            let command = over_s3(command(role, &data, &store), endpoint, secret);
            failing.push((Failing::begin(format!("{role}, {what}"), command), expected));
        }
    }
    for (process, expected) in failing {
        let what = process.what.clone();
        let said = process.said();
        assert!(said.contains(expected), "{what}: {expected} in: {said}");
    }
}

/// Who leads tries it, before it writes to the log.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_whose_creates_race_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { racy: true, ..Options::new(dir.path().join("s3"), BUCKET) };
    let server = Server::start(options).await.unwrap();
    let endpoint = format!("http://{}", server.address());
    let meta = command("meta", dir.path(), &format!("s3://{BUCKET}/millrace"));
    let meta = over_s3(meta, &endpoint, "millrace-secret");
    let said = Failing::begin("meta".to_owned(), meta).said();
    assert!(said.contains("lets two creators of a key win"), "{said}");
    let log = dir.path().join("s3").join(BUCKET).join("millrace/meta/log");
    assert!(std::fs::read_dir(log).map_or(true, |mut found| found.next().is_none()));
}

#[test]
fn a_config_file_with_a_wrong_key_is_an_error_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("millrace.toml");
    std::fs::write(&config, "metta = [\"10.0.0.1:4570\"]\n").unwrap();
    for role in ROLES {
        let mut command = command(role, dir.path(), "file:///nowhere");
        command.arg("--config").arg(&config);
        let said = Failing::begin(role.to_owned(), command).said();
        assert!(said.contains("metta") && said.contains("millrace.toml"), "{role}: {said}");
        assert!(!dir.path().join(role).exists(), "{role} has begun");
    }
}

/// What a process says that is given a flag in each way, and where it has it from.
fn given_in_each_way(role: &str, dir: &Path, flag: &str, value: &str) -> [(String, String); 3] {
    let key = flag.trim_start_matches("--");
    let file = dir.join("millrace.toml");
    std::fs::write(&file, format!("{key} = \"{value}\"\n")).unwrap();
    let variable = format!("MILLRACE_{}", key.replace('-', "_").to_uppercase());
    let said = |add: &dyn Fn(&mut Command)| {
        let mut command = command(role, dir, "file:///nowhere");
        add(&mut command);
        Failing::begin(format!("{role} with {flag}"), command).said()
    };
    let by_line = said(&|command| {
        command.args([flag, value]);
    });
    let by_env = said(&|command| {
        command.env(&variable, value);
    });
    let by_file = said(&|command| {
        command.arg("--config").arg(&file);
    });
    let path = file.display().to_string();
    [(by_line, "the command line".to_owned()), (by_env, variable), (by_file, path)]
}

#[test]
fn settings_that_cannot_be_are_an_error_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let mut cases = vec![
        ("meta", "--barrier-interval", "2h", "\"2h\" (expected 1ms to 1h)"),
        ("meta", "--gc-interval", "0", "\"0\" (expected 10ms to 5d)"),
        ("meta", "--gc-interval", "6d", "\"6d\" (expected 10ms to 5d)"),
        ("meta", "--max-clock-skew", "0", "\"0\" (expected 10ms to 365d)"),
        ("frontend", "--authentication-timeout", "0", "\"0\" (expected 100ms to 1d)"),
        ("frontend", "--tls-cert", "any.pem", "--tls-key is missing, and "),
        ("frontend", "--tls-key", "any.pem", "--tls-cert is missing, and "),
    ];
    for role in ["frontend", "compute", "compactor"] {
        cases.push((role, "--disk-cache", "8", "\"8\" (expected 0, or at least 64MB)"));
    }
    for role in ROLES {
        cases.push((role, "--rpc-tls-ca", "any.pem", "--rpc-tls-cert is missing, and "));
    }
    for (role, flag, value, expected) in cases {
        for (said, origin) in given_in_each_way(role, dir.path(), flag, value) {
            for part in [flag, expected, origin.as_str()] {
                assert!(said.contains(part), "{role}: {part} in: {said}");
            }
        }
        assert!(!dir.path().join(role).exists(), "{role} has begun");
    }
    let mut frontend = command("frontend", dir.path(), "file:///nowhere");
    frontend.args(["--auth", "trust"]).env("MILLRACE_REQUIRE_PASSWORD", "true");
    let said = Failing::begin("frontend".to_owned(), frontend).said();
    let both = "--auth and --require-password contradict each other";
    let origins = ["--auth comes from the command line", "MILLRACE_REQUIRE_PASSWORD"];
    for part in [both, origins[0], origins[1]] {
        assert!(said.contains(part), "{part} in: {said}");
    }
}

/// Whoever takes calls of other processes; a frontend takes sessions alone, and asks for passwords.
#[test]
fn no_role_takes_insecure_calls_of_other_hosts_by_default() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("file://{}", dir.path().join("store").display());
    let insecure = "would be neither encrypted nor authenticated";
    let own = own_address();
    for role in ROLES {
        let metas = (role != "meta").then_some("127.0.0.1:1");
        let said = |listen: &str, flags: &[&str]| {
            let mut command = command_at(listen, role, dir.path(), &store, metas);
            command.args(flags);
            Failing::begin(format!("{role} at {listen} with {flags:?}"), command).said()
        };
        // That one would begin.
        let listens = own.filter(|_| role != "frontend").map(|own| format!("{own}:0"));
        for listen in listens.iter().map(String::as_str).chain(["0.0.0.0:0"]) {
            let said = said(listen, &[]);
            assert_eq!(said.contains(insecure), role != "frontend", "{role}: {said}");
            for flag in ["--rpc-tls-cert", "--rpc-tls-key", "--rpc-tls-ca", "--insecure-rpc"] {
                assert_eq!(said.contains(flag), role != "frontend", "{role}: {flag} in: {said}");
            }
        }
        // Each takes them if it is told to, and says then that it has no address.
        let files = ["--rpc-tls-cert=a.pem", "--rpc-tls-key=a.key", "--rpc-tls-ca=ca.pem"];
        for flags in [["--insecure-rpc"].as_slice(), files.as_slice()] {
            let said = said("0.0.0.0:0", flags);
            assert!(said.contains("--advertise") && !said.contains(insecure), "{role}: {said}");
        }
        if role != "frontend" {
            let said = said("127.0.0.1:0", &["--auth", "trust"]);
            let whose = format!("--auth has no meaning for millrace {role}");
            assert!(said.contains(&whose), "{said}");
        }
    }
}

/// Returns when the process has written this to its log.
pub fn await_log(process: &Process, text: &str) {
    let deadline = Instant::now() + LIMIT;
    while !process.log().contains(text) {
        assert!(Instant::now() < deadline, "{text} is not in:\n{}", process.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What a leader says of its store.
fn store_id(meta: &Process) -> String {
    let shown = json(&meta.address, &["store"]);
    let id = shown[0]["store_id"].as_str().expect("a text").to_owned();
    assert_eq!(id.len(), 32, "{shown}");
    await_log(meta, &id);
    id
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_given_another_object_store_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let url = |name: &str| format!("file://{}", path(name).display());
    let started = |role: &str, name: &str, data: &str, metas: Option<&str>| {
        let mut process = Process::spawn(command_with(role, &path(data), &url(name), metas));
        process.await_ready();
        process
    };
    let mut before = started("meta", "other", "other-data", None);
    let other = store_id(&before);
    before.kill();
    let meta = started("meta", "right", "right-data", None);
    let right = store_id(&meta);
    assert_ne!(right, other);

    let mut failing = Vec::new();
    for role in ROLES {
        for (name, has) in [("other", other.as_str()), ("empty", "holds no log")] {
            let data = path(&format!("{role}-{name}"));
            let command = command_with(role, &data, &url(name), Some(meta.address.as_str()));
            failing.push((Failing::begin(format!("{role}, {name}"), command), has));
        }
    }
    for (process, has) in failing {
        let what = process.what.clone();
        let said = process.said();
        for part in [right.as_str(), has, meta.address.as_str(), "--object-store"] {
            assert!(said.contains(part), "{what}: {part} in: {said}");
        }
    }
    assert!(!path("empty").join("meta").exists(), "a log was begun");
    // The leader says so, too.
    await_log(&meta, &other);
    let compute = started("compute", "right", "compute-data", Some(meta.address.as_str()));
    await_log(&compute, &right);
}

/// An address of this machine that others reach. Nothing is sent.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let own = socket.local_addr().ok()?.ip();
    (!own.is_loopback() && !own.is_unspecified()).then_some(own)
}

/// Whether it lets a user in with a password.
async fn lets_in(user: &str, address: &str, password: &str) -> Result<(), String> {
    let (host, port) = address.rsplit_once(':').expect("host and port");
    let config = format!(
        "host={host} port={port} user={user} dbname=dev connect_timeout=10 password={password}"
    );
    match tokio_postgres::connect(&config, NoTls).await {
        Ok((client, connection)) => {
            tokio::spawn(connection);
            client.simple_query("SELECT 1").await.map(drop).map_err(|e| e.to_string())
        }
        Err(error) => {
            let code = error.code().map(|code| code.code().to_owned());
            Err(code.unwrap_or_else(|| error.to_string()))
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frontend_that_others_reach_asks_for_passwords_unless_it_trusts() {
    let Some(own) = own_address() else {
        return eprintln!("skipped: this machine has no address that others reach");
    };
    let dir = tempfile::tempdir().unwrap();
    let store = format!("file://{}", dir.path().join("store").display());
    let meta_address = free_address();
    let begin = |name: &str, role: &str, listen: &str, arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command
            .args([role, "--http=off", "--memory-limit=128MB"])
            .env("MILLRACE_PARALLELISM", "1")
            .args(["--object-store", &store, "--listen", listen, "--meta", &meta_address])
            .arg("--data-dir")
            .arg(dir.path().join(name))
            .args(arguments)
            .env("MILLRACE_ROOT_PASSWORD", "open sesame");
        Process::spawn(command)
    };
    let mut meta = begin("meta", "meta", &meta_address, &[]);
    let listen = format!("{own}:0");
    let mut asking = begin("asking", "frontend", &listen, &[]);
    let mut trusting = begin("trusting", "frontend", &listen, &["--auth", "trust"]);
    for process in [&mut meta, &mut asking, &mut trusting] {
        process.await_ready();
    }
    // The user postgres has no password, and so none is right.
    for user in ["root", "postgres"] {
        assert_eq!(lets_in(user, &asking.address, "shut").await, Err("28P01".to_owned()));
        assert_eq!(lets_in(user, &trusting.address, "shut").await, Ok(()));
    }
    assert_eq!(lets_in("root", &asking.address, "'open sesame'").await, Ok(()));
    assert_eq!(
        lets_in("postgres", &asking.address, "'open sesame'").await,
        Err("28P01".to_owned())
    );
    let unheeded =
        "MILLRACE_ROOT_PASSWORD, or root-password of the config file, has no meaning here";
    assert!(asking.log().contains(unheeded), "{}", asking.log());
    assert!(!meta.log().contains(unheeded), "{}", meta.log());
}

/// Where each job is, and its generation.
async fn placed(client: &tokio_postgres::Client) -> Vec<(String, i64, i64)> {
    let jobs = jobs(client).await;
    jobs.into_iter().map(|(name, job)| (name, job.worker, job.generation)).collect()
}

/// It would be given some of the jobs, and lose them again.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_whose_port_is_taken_does_not_register() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with(dir.path(), &["meta", "compute", "frontend1"]).await;
    let client = cluster.connect("frontend1").await;
    execute(&client, "CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
    for name in ["a", "b", "c"] {
        let view = format!("CREATE MATERIALIZED VIEW {name} AS SELECT sum(v)::bigint AS s FROM t");
        execute(&client, &view).await;
    }
    let before = placed(&client).await;
    assert!(before.len() == 4 && before.iter().all(|(_, worker, _)| *worker > 0), "{before:?}");
    let registered = cluster.process("meta").log().matches("process is there").count();
    assert!(registered >= 2, "{}", cluster.process("meta").log());

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = (taken.local_addr().unwrap().to_string(), taken);
    for role in ["compute", "compactor"] {
        // As often as whoever supervises it would start it.
        for attempt in 0..2 {
            let mut command = cluster.program();
            command
                .args([role, "--listen", "127.0.0.1:0", "--http", &taken.0])
                .args(["--object-store", &Cluster::store("millrace")])
                .args(["--meta", &cluster.address("meta"), "--memory-limit=128MB"])
                .arg("--data-dir")
                .arg(dir.path().join(format!("failing-{role}")));
            let said = Failing::begin(format!("{role}, attempt {attempt}"), command).said();
            let error = format!("cannot listen on {}", taken.0);
            assert!(said.contains(&error) && said.contains("--http"), "{role}: {said}");
        }
    }
    assert_eq!(placed(&client).await, before);
    let log = cluster.process("meta").log();
    assert_eq!(log.matches("process is there").count(), registered, "{log}");
    execute(&client, "INSERT INTO t VALUES (1, 10), (2, 20)").await;
    assert_eq!(one::<i64>(&client, "SELECT s FROM a").await, 30);
}
