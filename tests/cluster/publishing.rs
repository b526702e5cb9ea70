//! A process that is stopped in the middle of bringing a change to a sink's target, and wakes up when another one has
//! brought this change and more: nothing is there twice, or in another order, and no file changes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_postgres::Client;

use crate::ctl;
use crate::execute;
use crate::process::{Cluster, send_signal, stop};
use crate::sessions::{LIMIT, await_true};

const NAMES: [&str; 4] = ["meta", "compute1", "compute2", "frontend1"];
/// Rows of a batch, and the length of each, so that its file takes a while to be written.
const ROWS: usize = 2_000;
const LENGTH: usize = 2_000;
/// Between two looks at the directory.
const LOOK: Duration = Duration::from_micros(200);

async fn write(client: &Client, batch: usize) {
    let sql = format!(
        "INSERT INTO t SELECT {batch}, i, repeat('x', {LENGTH}) FROM generate_series(1, {ROWS}) AS g(i)"
    );
    execute(client, &sql).await;
}

/// Files by name: those that are complete, or those that are being written.
fn files(directory: &Path, complete: bool) -> Vec<PathBuf> {
    let files = std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<_> =
        files.filter(|path| path.extension().is_none_or(|e| e != "tmp") == complete).collect();
    files.sort();
    files
}

fn content(directory: &Path) -> BTreeMap<PathBuf, String> {
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap();
        (path, text)
    };
    files(directory, true).into_iter().map(read).collect()
}

/// Stops a process while a file of its is there that is not complete.
fn stop_while_it_writes(id: u32, directory: &Path) {
    let deadline = Instant::now() + LIMIT;
    loop {
        while files(directory, false).is_empty() {
            assert!(Instant::now() < deadline, "no file was seen while it was written");
            std::thread::sleep(LOOK);
        }
        stop(id);
        if !files(directory, false).is_empty() {
            return;
        }
        send_signal(id, "CONT");
    }
}

/// Batch and number of each row of a file.
pub fn rows_of(text: &str) -> Vec<(usize, usize)> {
    let row = |line: &str| {
        let mut cells = line.split(',').map(|cell| cell.parse().ok());
        cells.next().flatten().zip(cells.next().flatten()).expect("two numbers")
    };
    text.lines().map(row).collect()
}

/// Batches of so many rows each are in order, and have all their rows once. Those of one change are in any order.
pub fn check_order(
    changes: impl IntoIterator<Item = Vec<(usize, usize)>>,
    batches: usize,
    rows: usize,
) {
    let sorted = |mut change: Vec<(usize, usize)>| {
        change.sort_unstable();
        change
    };
    let published = changes.into_iter().flat_map(sorted);
    let all = (0..batches).flat_map(|batch| (1..=rows).map(move |row| (batch, row)));
    assert!(published.eq(all), "rows are missing, there twice, or not in order");
}

fn check(content: &BTreeMap<PathBuf, String>, batches: usize) {
    check_order(content.values().map(|text| rows_of(text)), batches, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_stopped_while_it_publishes_neither_repeats_nor_reorders() {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("written");
    let mut cluster = Cluster::start_with(dir.path(), &NAMES).await;
    let client = cluster.connect("frontend1").await;
    execute(&client, "CREATE TABLE t (batch int, i int, text text, PRIMARY KEY (batch, i))").await;
    let sink = format!(
        "CREATE SINK written FROM t WITH (connector = 'fs', path = '{}', force_append_only = true) \
         FORMAT PLAIN ENCODE CSV",
        directory.display()
    );
    execute(&client, &sink).await;
    // The table stays elsewhere, and is written to all the time.
    let metas = cluster.address("meta");
    ctl::told(&metas, &["move", "public.t", &cluster.address("compute1")]);
    ctl::told(&metas, &["move", "public.written", &cluster.address("compute2")]);
    write(&client, 0).await;
    execute(&client, "FLUSH").await;

    let stop = watch::Sender::new(false);
    let writer = tokio::spawn({
        let (client, stop) = (cluster.connect("frontend1").await, stop.subscribe());
        async move {
            let mut batches = 1;
            while !*stop.borrow() {
                write(&client, batches).await;
                batches += 1;
            }
            batches
        }
    });
    let (id, target) = (cluster.process("compute2").id(), directory.clone());
    tokio::task::spawn_blocking(move || stop_while_it_writes(id, &target)).await.unwrap();
    stop.send_replace(true);
    let mut batches = writer.await.unwrap();
    let before = content(&directory);
    let moved = "SELECT count(*) FROM millrace_catalog.jobs AS j \
                 JOIN millrace_catalog.jobs AS t ON t.name = 't' AND t.worker = j.worker \
                 WHERE j.name = 'written'";
    await_true(&client, moved).await;
    for _ in 0..2 {
        write(&client, batches).await;
        batches += 1;
    }
    execute(&client, "FLUSH").await;
    let published = content(&directory);
    check(&published, batches);
    assert!(published.iter().take(before.len()).eq(&before), "a file has changed");
    assert!(files(&directory, false).is_empty(), "what the stopped process has begun stays");

    cluster.process("compute2").signal("CONT");
    cluster.process("compute2").await_end(LIMIT);
    assert!(content(&directory) == published, "the woken process has changed files");
    write(&client, batches).await;
    execute(&client, "FLUSH").await;
    check(&content(&directory), batches + 1);
}
