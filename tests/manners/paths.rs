//! Files that statements may name, where not only the server's owner can run them.

use std::path::Path;

use millrace_sqllogictest::{Server, ServerOptions};

use super::access::psql;
use super::skip;

fn start(dir: &Path, args: &[String]) -> Server {
    let options =
        ServerOptions { data_dir: dir.join("data"), args: args.to_vec(), ..Default::default() };
    Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options).expect("the server starts")
}

/// The statement of a source of lines with one number each.
fn source(name: &str, path: &Path) -> String {
    let path = path.display();
    format!(
        "CREATE SOURCE {name} (v int) WITH (connector = 'fs', path = '{path}') FORMAT PLAIN ENCODE CSV"
    )
}

#[test]
fn a_server_that_asks_for_passwords_uses_named_directories_only() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (open, shut) = (dir.path().join("open"), dir.path().join("shut"));
    for directory in [&open, &shut] {
        std::fs::create_dir_all(directory).expect("a directory");
        std::fs::write(directory.join("rows.csv"), "7\n").expect("a file");
    }
    std::os::unix::fs::symlink(shut.join("rows.csv"), open.join("link.csv")).expect("a link");

    let server = start(dir.path(), &[]);
    let run = |sql: &str| psql(server.port, "root", &[], sql);
    let Some((made, text)) = run("ALTER USER root PASSWORD 'x'") else { return skip("psql") };
    assert!(made, "{text}");
    for sql in [
        &source("outside", &shut),
        "CREATE TABLE t (v int)",
        "INSERT INTO t VALUES (1)",
        "CREATE MATERIALIZED VIEW m AS SELECT count(*) AS c FROM outside",
    ] {
        let (done, text) = run(sql).expect("psql");
        assert!(done, "{sql}: {text}");
    }
    drop(server);

    let args = ["--require-password".to_owned(), format!("--allow-path={}", open.display())];
    let server = start(dir.path(), &args);
    let run = |sql: &str| psql(server.port, "root", &[("PGPASSWORD", "x")], sql).expect("psql");
    assert_eq!(run("SELECT v FROM t"), (true, "1".to_owned()));
    // What is there already and may not be used any more says so.
    let why = run("SELECT state, reason FROM millrace_catalog.sources WHERE name = 'outside'").1;
    assert!(why.contains("not in a directory that this server may use"), "{why}");

    assert!(!run(&source("refused", &open.join("../shut"))).0);
    for path in [&shut, Path::new("/"), Path::new("/etc/pass*")] {
        let (made, text) = run(&source("refused", path));
        assert!(!made && text.contains("--allow-path"), "{}: {text}", path.display());
    }
    let sink = |path: &Path| {
        let path = path.display();
        let with = format!("WITH (connector = 'fs', path = '{path}') FORMAT DEBEZIUM ENCODE JSON");
        format!("CREATE SINK s_{} FROM t {with}", path.to_string().len())
    };
    let (made, text) = run(&sink(&shut.join("out")));
    assert!(!made && text.contains("--allow-path"), "{text}");
    let (made, text) = run(&sink(&open.join("out")));
    assert!(made, "{text}");

    let (made, text) = run(&source("inside", &open.join("rows.csv")));
    assert!(made, "{text}");
    assert!(run("CREATE MATERIALIZED VIEW n AS SELECT count(*) AS c FROM inside").0);
    // A link into the open leads out of it.
    let linked = "CREATE TABLE linked (v int) WITH (connector = 'fs', path = '";
    let linked = format!("{linked}{}') FORMAT PLAIN ENCODE CSV", open.join("link.csv").display());
    run(&linked);
    assert_eq!(run("SELECT count(*) FROM linked"), (true, "0".to_owned()));
}
