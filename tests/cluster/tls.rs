//! A cluster whose processes prove to each other who they are.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::process::{Process, connect, free_address};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certificates").join(name)
}

/// A process with certificate and key of one name and a CA, or with none.
fn command(dir: &Path, name: &str, role: &str, files: Option<(&str, &str)>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    command
        .args([role, "--http=off", "--memory-limit=128MB"])
        .env("MILLRACE_PARALLELISM", "1")
        .args(["--object-store", &format!("file://{}", dir.join("store").display())])
        .arg("--data-dir")
        .arg(dir.join(name));
    add_files(&mut command, files);
    command
}

fn add_files(command: &mut Command, files: Option<(&str, &str)>) {
    if let Some((own, ca)) = files {
        command.arg("--rpc-tls-cert").arg(file(&format!("{own}.pem")));
        command.arg("--rpc-tls-key").arg(file(&format!("{own}.key")));
        command.arg("--rpc-tls-ca").arg(file(ca));
    }
}

fn until(what: &str, process: &Process, is_so: impl Fn(&str) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so(&process.log()) {
        assert!(Instant::now() < deadline, "{what}:\n{}", process.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_without_a_certificate_of_the_ca_take_no_part() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Some(("process", "ca.pem"));
    let address = free_address();
    let begin = |name: &str, role: &str, listen: &str, files| {
        let mut command = command(dir.path(), name, role, files);
        command.args(["--listen", listen]);
        if role != "meta" {
            command.args(["--meta", &address]);
        }
        Process::spawn(command)
    };
    let mut meta = begin("meta", "meta", &address, ours);
    meta.await_ready();
    let mut compute = begin("compute", "compute", "127.0.0.1:0", ours);
    let mut frontend = begin("frontend", "frontend", "127.0.0.1:0", ours);
    compute.await_ready();
    frontend.await_ready();
    let client = connect(&frontend.address).await.unwrap();
    client
        .batch_execute(
            "CREATE TABLE t (a int PRIMARY KEY);
             CREATE MATERIALIZED VIEW v AS SELECT sum(a)::bigint AS s FROM t;
             INSERT INTO t VALUES (1), (2)",
        )
        .await
        .unwrap();
    // An operator proves who he is, too.
    let ctl = |files| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.args(["ctl", "--meta", &address]);
        add_files(&mut command, files);
        command.args(["jobs", "--json"]).output().expect("the binary is there")
    };
    let jobs = String::from_utf8(ctl(ours).stdout).unwrap();
    assert!(jobs.contains("public.t") && jobs.contains("public.v"), "{jobs}");
    for files in [None, Some(("stranger", "other-ca.pem"))] {
        let output = ctl(files);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("no meta process answers"), "{error}");
    }
    for (name, files) in [("plain", None), ("stranger", Some(("stranger", "other-ca.pem")))] {
        let refused = meta.log().matches("was refused").count();
        let mut other = begin(name, "compute", "127.0.0.1:0", files);
        until("its attempts", &other, |log| log.contains("cannot be reached"));
        until("its refusal", &meta, |log| log.matches("was refused").count() > refused);
        assert!(!other.is_ready() && !other.log().contains("link: registered"), "{}", other.log());
    }
    // The leader is there, though it does not talk with them.
    for (name, files) in [("plain", None), ("stranger", Some(("stranger", "other-ca.pem")))] {
        let standby = begin(&format!("{name}-meta"), "meta", "127.0.0.1:0", files);
        until("why it does not lead", &standby, |log| log.contains("does not claim the lead"));
        assert!(!standby.log().contains("claims the lead"), "{}", standby.log());
    }
    let sum: i64 = client.query_one("SELECT s FROM v", &[]).await.unwrap().get(0);
    assert_eq!(sum, 3);
}

#[test]
fn certificates_that_cannot_be_used_are_an_error_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let fails = |listen: &str, arguments: &[&str]| {
        let mut command = command(dir.path(), "meta", "meta", None);
        let output = command.args(["--listen", listen]).args(arguments).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let path = |name: &str| file(name).display().to_string();
    let with = |cert: &str, key: &str| {
        let (cert, key, ca) = (path(cert), path(key), path("ca.pem"));
        let arguments = ["--rpc-tls-cert", &cert, "--rpc-tls-key", &key, "--rpc-tls-ca", &ca];
        fails("127.0.0.1:0", &arguments)
    };
    for (said, expected) in [
        (with("nothing.pem", "process.key"), "nothing.pem"),
        (with("make.sh", "process.key"), "no certificate"),
        (with("process.pem", "stranger.key"), "does not fit"),
        (with("other-host.pem", "process.key"), "127.0.0.1"),
        (with("expired.pem", "process.key"), "xpired"),
        (fails("127.0.0.1:0", &["--rpc-tls-key", &path("process.key")]), "--rpc-tls-cert"),
        (fails("0.0.0.0:0", &[]), "--rpc-tls-cert"),
        (fails("127.0.0.1:0", &["--auth", "trust"]), "--auth has no meaning for millrace meta"),
        (fails("0.0.0.0:0", &["--insecure-rpc"]), "--advertise"),
    ] {
        assert!(said.contains(expected), "{expected} in: {said}");
    }
}
