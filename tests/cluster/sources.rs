//! What there is of a source is looked at where it is read: by compute processes, and not by the one that leads.

use std::path::Path;

use crate::one;
use crate::process::Cluster;
use crate::sessions::await_true;

/// Lines of a file that a source reads.
const LINES: usize = 50;
/// Seen from the working directory of a process.
const WITH: &str = "WITH (connector = 'fs', path = '/proc/self/cwd/read/*.csv', \
                    discovery_interval = '100ms') FORMAT PLAIN ENCODE CSV";
const READERS: [&str; 4] = ["fed", "a", "b", "c"];

fn add(folder: &Path, number: usize) {
    let lines: String = (0..LINES).map(|n| format!("{}\n", number * LINES + n)).collect();
    // A file is found when it is complete.
    std::fs::write(folder.join("new"), lines).unwrap();
    std::fs::rename(folder.join("new"), folder.join(format!("{number}.csv"))).unwrap();
}

/// Only compute processes see the files. Each of them is killed, also the one that is asked about the source.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_goes_on_where_the_leader_does_not_see_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with(dir.path(), &Cluster::SPREAD).await;
    let folder = cluster.work_dir("compute").join("read");
    std::fs::create_dir(&folder).unwrap();
    add(&folder, 0);
    let client = cluster.connect("frontend1").await;
    let mut statements = vec![
        format!("CREATE SOURCE numbers (v bigint) {WITH}"),
        format!("CREATE TABLE fed (v bigint) {WITH}"),
    ];
    for view in &READERS[1..] {
        statements.push(format!("CREATE MATERIALIZED VIEW {view} AS SELECT v FROM numbers"));
    }
    for sql in statements {
        client.batch_execute(&sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    }
    for (number, killed) in ["compute1", "compute2", "compute3"].into_iter().enumerate() {
        for reader in READERS {
            let lines = (number + 1) * LINES;
            let all = format!(
                "SELECT (count(*) = {lines} AND count(DISTINCT v) = {lines})::int::bigint \
                 FROM {reader}"
            );
            await_true(&client, &all).await;
        }
        cluster.process(killed).kill();
        add(&folder, number + 1);
        let goes_on = format!("SELECT (count(*) > {})::int::bigint FROM a", (number + 1) * LINES);
        await_true(&client, &goes_on).await;
        cluster.begin(killed);
    }
    let are_well = "SELECT (count(*) = 2)::int::bigint FROM millrace_catalog.sources \
                    WHERE state = 'running' AND reason IS NULL";
    await_true(&client, are_well).await;
    let files: i64 = one(&client, "SELECT sum(files)::bigint FROM millrace_catalog.sources").await;
    assert_eq!(files, 8);
    let log = cluster.process("meta").log();
    assert!(!log.contains("source cannot be read"), "{log}");
}
