//! Splits that fall silent and speak again (docs/design.md §4, "Watermarks"): a source of files in three splits,
//! where a split waits for its next file while others go on, and its rows are then often too old.
//!
//! Which rows are late depends on the splits' watermarks, idle marks and floors alone, all of them in the log. So every
//! reader must let the same rows in: one that was there from the start, one that scans from the beginning
//! later, one that was started again. When nothing comes any more all splits fall silent, and the watermark is
//! that of the furthest one.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::case::{Mode, differing, execute, rows};
use crate::node::{Node, NodeOptions};
use crate::rng::Rng;

const STEPS: usize = 8;
/// Longest wait for what must come.
const PATIENCE: Duration = Duration::from_secs(180);

/// Queries, each of them a view made early and one made late.
const QUERIES: [(&str, &str); 6] = [
    ("entered", "SELECT id, k, at FROM s"),
    (
        "tumbled",
        "SELECT k, window_start, count(*) AS n FROM TUMBLE(s, at, INTERVAL '10 seconds') GROUP BY 1, 2",
    ),
    ("seen", "SELECT DISTINCT window_start, k FROM TUMBLE(s, at, INTERVAL '20 seconds')"),
    (
        "stayed",
        "SELECT k, window_start, window_end, count(*) AS n FROM SESSION(s, at, INTERVAL '6 seconds', k) GROUP BY 1, 2, 3",
    ),
    (
        "tumbled_closed",
        "SELECT k, window_start, count(*) AS n FROM TUMBLE(s, at, INTERVAL '10 seconds') GROUP BY 1, 2 EMIT ON WINDOW CLOSE",
    ),
    (
        "stayed_closed",
        "SELECT k, window_start, window_end, count(*) AS n FROM SESSION(s, at, INTERVAL '6 seconds', k) GROUP BY 1, 2, 3 EMIT ON WINDOW CLOSE",
    ),
];

/// The watermark when all splits are silent.
const MARK: &str = "((SELECT max(at) FROM early_entered) - INTERVAL '5 seconds')";

async fn create(client: &Client, prefix: &str) -> Result<(), String> {
    for (name, query) in QUERIES {
        execute(client, &format!("CREATE MATERIALIZED VIEW {prefix}_{name} AS {query}")).await?;
    }
    Ok(())
}

/// A file of rows around a time; some of them are old.
fn write_file(folder: &Path, rng: &mut Rng, step: usize, id: &mut usize, clock: &mut i64) {
    let mut text = String::new();
    // Lengths differ, so that some splits get no file for long.
    let rows = if rng.chance(40) { 60 } else { 1 + rng.below(4) };
    for _ in 0..rows {
        *id += 1;
        *clock += rng.below(3) as i64;
        let at = (*clock - rng.below(12) as i64).max(0);
        let (k, minute, second) = (rng.below(3), at / 60, at % 60);
        let _ = writeln!(text, "{id},{k},2026-01-01 00:{minute:02}:{second:02}");
    }
    let (made, name) = (folder.join("_making"), folder.join(format!("{step:03}.csv")));
    std::fs::write(&made, text).expect("a file in a temporary folder");
    std::fs::rename(made, name).expect("a file in a temporary folder");
}

/// Asks until the answer is what it should be; gives the last one else.
async fn until(client: &Client, sql: &str, wanted: &str) -> Result<(), String> {
    let begun = Instant::now();
    loop {
        let found = rows(client, sql).await?;
        let first = found.first().and_then(|r| r.first().cloned().flatten()).unwrap_or_default();
        if first == wanted {
            return Ok(());
        }
        if begun.elapsed() > PATIENCE {
            return Err(format!("{sql}: {found:?}, not {wanted}"));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Whether two queries give the same rows, both at one epoch.
pub async fn compare(client: &Client, a: &str, b: &str) -> Result<(), String> {
    let both =
        format!("SELECT 'a' AS side, x.* FROM ({a}) x UNION ALL SELECT 'b', y.* FROM ({b}) y");
    let (mut left, mut right) = (Vec::new(), Vec::new());
    for mut row in rows(client, &both).await? {
        let side = row.remove(0);
        if side.as_deref() == Some("a") { left.push(row) } else { right.push(row) }
    }
    let lengths = (left.len(), right.len());
    match differing(&mut left, &mut right) {
        None => Ok(()),
        Some([extra, missing]) => Err(format!(
            "{a} ({} rows)\n{b} ({} rows)\n  + {extra:?}\n  - {missing:?}",
            lengths.0, lengths.1
        )),
    }
}

async fn run(mode: Mode, seed: u64, folder: PathBuf) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut node = Node::start(NodeOptions::for_mode(mode, seed)).await?;
    let mut client = node.connect().await?;
    execute(
        &client,
        &format!(
            "CREATE SOURCE s (id int, k int, at timestamp, WATERMARK FOR at AS at - INTERVAL '5 seconds') \
             WITH (connector = 'fs', path = '{}/*.csv', splits = 3, discovery_interval = '100ms', \
             idle_timeout = '300ms') FORMAT PLAIN ENCODE CSV",
            folder.display()
        ),
    )
    .await?;
    create(&client, "early").await?;
    let (mut id, mut clock) = (0, 0);
    for step in 0..STEPS {
        write_file(&folder, &mut rng, step, &mut id, &mut clock);
        let files = "SELECT files FROM millrace_catalog.sources WHERE name = 's'";
        until(&client, files, &(step + 1).to_string()).await?;
        if step == STEPS / 2 {
            create(&client, "late").await?;
        }
        if mode == Mode::Crash && rng.chance(40) {
            node = node.crash_and_restart().await?;
            client = node.connect().await?;
        }
        for (name, _) in QUERIES.iter().filter(|_| step >= STEPS / 2) {
            let (early, late) =
                (format!("SELECT * FROM early_{name}"), format!("SELECT * FROM late_{name}"));
            compare(&client, &early, &late).await.map_err(|e| format!("step {step}: {e}"))?;
        }
    }
    // All splits fall silent: the furthest one's watermark closes what it can.
    let closed = [
        (
            "tumbled",
            format!(
                "window_start < date_bin(INTERVAL '10 seconds', {MARK}, TIMESTAMP '1970-01-01')"
            ),
        ),
        ("stayed", format!("window_end <= {MARK}")),
    ];
    for (name, is_closed) in &closed {
        let count = |from: &str| format!("SELECT count(*) FROM {from}");
        let wanted = rows(&client, &count(&format!("early_{name} WHERE {is_closed}"))).await?;
        let wanted = wanted.first().and_then(|r| r[0].clone()).unwrap_or_default();
        for prefix in ["early", "late"] {
            until(&client, &count(&format!("{prefix}_{name}_closed")), &wanted).await?;
            let live = format!("SELECT * FROM early_{name} WHERE {is_closed}");
            compare(&client, &live, &format!("SELECT * FROM {prefix}_{name}_closed")).await?;
        }
    }
    // All readers have left out the same number of rows.
    let late = "SELECT count(DISTINCT late_rows) FROM millrace_catalog.jobs WHERE name LIKE 'early%' OR name LIKE 'late%'";
    until(&client, late, "1").await?;
    let entered = rows(&client, "SELECT count(*) FROM early_entered").await?;
    let late = "SELECT late_rows FROM millrace_catalog.jobs WHERE name = 'late_entered'";
    let late = rows(&client, late).await?;
    let number =
        |r: &[Vec<Option<String>>]| r[0][0].as_deref().and_then(|t| t.parse::<usize>().ok());
    if number(&entered).zip(number(&late)).map(|(a, b)| a + b) != Some(id) {
        return Err(format!("{entered:?} rows entered and {late:?} were late, of {id}"));
    }
    node.stop().await;
    Ok(())
}

#[test]
fn silent_splits_hold_no_reader_back_and_mislead_none() {
    let modes = [Mode::Plain, Mode::TinyCaches, Mode::Crash];
    crate::each_case("MILLRACE_IDLE_CASES", [3, 12], &[], &modes, async |mode, seed| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        run(mode, seed, folder.path().to_path_buf()).await
    });
}
