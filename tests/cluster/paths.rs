//! Files are opened by processes in directories that they may use, whatever another process has let through.

use std::path::Path;
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::process::Cluster;
use crate::sessions::{LIMIT, await_true};
use crate::{execute, one};

/// A table that is fed from a file.
fn fed(name: &str, path: &Path) -> String {
    format!(
        "CREATE TABLE {name} (v int) WITH (connector = 'fs', path = '{}', \
         discovery_interval = '100ms') FORMAT PLAIN ENCODE CSV",
        path.display()
    )
}

/// How a process at an address refuses a path.
fn refusal(path: &Path, role: &str, address: &str) -> String {
    let path = path.display();
    format!(
        "path \"{path}\" is not in a directory that the {role} process at {address} may use (--allow-path)"
    )
}

/// Returns when the catalog says why the process does not open these.
async fn await_refusals(client: &Client, address: &str, sources: &[(&str, &Path)], out: &Path) {
    for (name, path) in sources {
        let reason = refusal(path, "compute", address);
        let sql = format!(
            "SELECT count(*) FROM millrace_catalog.sources \
             WHERE name = '{name}' AND state = 'failing' AND strpos(reason, '{reason}') > 0"
        );
        await_true(client, &sql).await;
    }
    let reason = refusal(out, "compute", address);
    let sql = format!(
        "SELECT count(*) FROM millrace_catalog.jobs \
         WHERE name = 'written' AND strpos(reason, '{reason}') > 0"
    );
    await_true(client, &sql).await;
}

/// Files of a sink that are there.
fn published(out: &Path) -> usize {
    let entries = std::fs::read_dir(out).into_iter().flatten().flatten();
    entries.filter(|e| e.path().extension().is_some_and(|end| end == "json")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compute_process_opens_files_of_its_own_directories_only() {
    let dir = tempfile::tempdir().unwrap();
    let (open, shut) = (dir.path().join("open"), dir.path().join("shut"));
    for folder in [&open, &shut] {
        std::fs::create_dir(folder).unwrap();
        std::fs::write(folder.join("rows.csv"), "7\n").unwrap();
    }
    let (outside, link, out) = (shut.join("rows.csv"), open.join("link.csv"), shut.join("out"));
    std::os::unix::fs::symlink(&outside, &link).unwrap();
    let only_open = format!("--allow-path={}", open.display());

    // A frontend that may use every directory, and one that may use another than the path of the definition.
    let mut cluster = Cluster::start_with(dir.path(), &["meta", "frontend1"]).await;
    cluster.begin_with("frontend2", &[&only_open]);
    let client = cluster.connect("frontend2").await;
    let error = client.batch_execute(&fed("early", &outside)).await.unwrap_err();
    let error = error.as_db_error().expect("the frontend refuses it");
    let expected = refusal(&outside, "frontend", &cluster.address("frontend2"));
    assert_eq!((error.code().code(), error.message()), ("42501", expected.as_str()));

    cluster.begin_with("compute", &[&only_open]);
    let client = cluster.connect("frontend1").await;
    let sources = [("outside", outside.as_path()), ("linked", link.as_path())];
    execute(&client, &fed("inside", &open.join("rows.csv"))).await;
    for (name, path) in sources {
        execute(&client, &fed(name, path)).await;
    }
    execute(&client, "SET background_ddl = on").await;
    let sink = format!(
        "CREATE SINK written FROM inside WITH (connector = 'fs', path = '{}') \
         FORMAT DEBEZIUM ENCODE JSON",
        out.display()
    );
    execute(&client, &sink).await;
    await_refusals(&client, &cluster.address("compute"), &sources, &out).await;
    await_true(&client, "SELECT count(*) FROM inside").await;
    for (name, _) in sources {
        assert_eq!(one::<i64>(&client, &format!("SELECT count(*) FROM {name}")).await, 0);
    }
    assert_eq!(published(&out), 0);

    // Nothing but the limit kept them.
    restart(&mut cluster, "--allow-path=/").await;
    for (name, _) in sources {
        await_true(&client, &format!("SELECT count(*) FROM {name}")).await;
    }
    let deadline = Instant::now() + LIMIT;
    while published(&out) == 0 {
        assert!(Instant::now() < deadline, "the sink writes nothing");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    // What is there already is refused by a process that may not open it.
    restart(&mut cluster, &only_open).await;
    await_refusals(&client, &cluster.address("compute"), &sources, &out).await;
    let is_well = "SELECT count(*) FROM millrace_catalog.sources \
                   WHERE name = 'inside' AND state = 'running' AND reason IS NULL";
    await_true(&client, is_well).await;
}

/// Another compute process takes the place of the one that is there.
async fn restart(cluster: &mut Cluster, flag: &str) {
    cluster.process("compute").signal("TERM");
    cluster.process("compute").await_end(Duration::from_secs(60));
    cluster.begin_with("compute", &[flag]);
}
