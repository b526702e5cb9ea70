//! Rows from outside count exactly once, whatever dies: files and made-up rows into views and into
//! tables, under `kill -9` at random moments. What is expected is computed from the files alone.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::{Duration, Instant};

use millrace_sqllogictest::Server;
use tokio_postgres::SimpleQueryMessage;

use super::{kill, start, through_bytes};

/// How long everything may take to arrive at the end.
const ARRIVAL: Duration = Duration::from_secs(180);
const ROUNDS: u64 = 6;
const FILES_A_ROUND: u64 = 3;
const ROWS_A_FILE: u64 = 400;
const KEYS: u64 = 97;
const MADE_UP: u64 = 30_000;

/// The rows of file `n`: number, key, value. Every fifth file's keys come back with other values.
fn rows(n: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    (0..ROWS_A_FILE).map(move |i| {
        let number = n * ROWS_A_FILE + i;
        (number, number.wrapping_mul(2_654_435_761) % KEYS, number * 7 % 1_000)
    })
}

/// Writes file `n` as a writer should: under another name first.
fn write(folder: &Path, n: u64) {
    let mut text = String::from("number,key,note,value\n");
    for (number, key, value) in rows(n) {
        // A quoted line feed now and then, and a line that is broken.
        let note = if number % 50 == 7 { "\"two\nlines\"" } else { "plain" };
        text.push_str(&format!("{number},{key},{note},{value}\n"));
        if number % 200 == 13 {
            text.push_str("not a number,1,x,2\n");
        }
    }
    let hidden = folder.join(format!(".{n:04}"));
    std::fs::write(&hidden, text).expect("the file is written");
    std::fs::rename(&hidden, folder.join(format!("{n:04}.csv"))).expect("the file is renamed");
}

const COLUMNS: &str = "number bigint, key int, note text, value int";

async fn create(server: &Server, folder: &Path) {
    let from = format!(
        "WITH (connector = 'fs', path = '{}/*.csv', discovery_interval = '100ms') \
         FORMAT PLAIN ENCODE CSV (header = true)",
        folder.display()
    );
    let made = format!(
        "WITH (connector = 'datagen', rows = {MADE_UP}, rows_per_second = 10000, splits = 3, \
         fields.id.kind = 'sequence')"
    );
    let client = server.connect().await.expect("a connection");
    for sql in [
        format!("CREATE SOURCE files ({COLUMNS}, double AS value * 2) {from}"),
        format!("CREATE TABLE kept ({COLUMNS}, double AS value * 2, PRIMARY KEY (key)) {from}"),
        format!("CREATE TABLE appended ({COLUMNS}) {from}"),
        format!("CREATE SOURCE made (id bigint, x int) {made}"),
        format!("CREATE TABLE made_kept (id bigint PRIMARY KEY, x int) {made}"),
        "CREATE MATERIALIZED VIEW by_key AS SELECT key, count(*) AS n, sum(double) AS s FROM files GROUP BY key".into(),
        "CREATE MATERIALIZED VIEW copied AS SELECT number, note FROM files".into(),
        "CREATE MATERIALIZED VIEW of_kept AS SELECT count(*) AS n, sum(double) AS s FROM kept".into(),
        "CREATE MATERIALIZED VIEW of_made AS SELECT count(*) AS n, sum(id) AS s, sum(x) AS x FROM made".into(),
        "CREATE TABLE mine (id int PRIMARY KEY)".into(),
    ] {
        client.batch_execute(&sql).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
    }
}

async fn answer(server: &Server, sql: &str) -> Result<Vec<String>, String> {
    let client = server.connect().await.map_err(|e| e.to_string())?;
    let messages = client.simple_query(sql).await.map_err(|e| format!("{sql}: {e}"))?;
    Ok(messages
        .into_iter()
        .filter_map(|m| match m {
            SimpleQueryMessage::Row(row) => {
                Some((0..row.len()).map(|i| row.get(i).unwrap_or("")).collect::<Vec<_>>().join("|"))
            }
            _ => None,
        })
        .collect())
}

/// What the queries must answer when all files but those still to come have been read.
fn expected(files: u64) -> Vec<(&'static str, Vec<String>)> {
    let mut by_key: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let mut kept: HashMap<u64, u64> = HashMap::new();
    let (mut count, mut sum) = (0, 0);
    for (number, key, value) in (0..files).flat_map(rows) {
        let group = by_key.entry(key).or_default();
        *group = (group.0 + 1, group.1 + value * 2);
        kept.insert(key, value);
        count += 1;
        sum += number;
    }
    let twice: u64 = kept.values().map(|v| v * 2).sum();
    let ids: u64 = (0..MADE_UP).sum();
    let groups = by_key.iter().map(|(k, (n, s))| format!("{k}|{n}|{s}")).collect();
    vec![
        ("SELECT key, n, s FROM by_key ORDER BY key", groups),
        (
            "SELECT count(*), sum(number), count(DISTINCT number) FROM copied",
            vec![format!("{count}|{sum}|{count}")],
        ),
        (
            "SELECT count(*), sum(number), count(DISTINCT number) FROM appended",
            vec![format!("{count}|{sum}|{count}")],
        ),
        ("SELECT count(*), sum(double) FROM kept", vec![format!("{}|{twice}", kept.len())]),
        ("SELECT n, s FROM of_kept", vec![format!("{}|{twice}", kept.len())]),
        ("SELECT n, s FROM of_made", vec![format!("{MADE_UP}|{ids}")]),
        ("SELECT count(*), sum(id) FROM made_kept", vec![format!("{MADE_UP}|{ids}")]),
        // Two readers of one stream, and the stream itself.
        ("SELECT (SELECT x FROM of_made) = (SELECT sum(x) FROM made_kept)", vec!["t".into()]),
        ("SELECT count(*) FROM files EXCEPT ALL SELECT count(*) FROM copied", vec![]),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_outside_count_once_under_kill() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let files = tempfile::tempdir().expect("a temporary directory");
    let mut server = start(dir.path(), HashMap::new());
    create(&server, files.path()).await;
    let mut written = 0;
    for round in 0..ROUNDS {
        for _ in 0..FILES_A_ROUND {
            write(files.path(), written);
            written += 1;
        }
        // The moment is the point: it is not synchronisation.
        tokio::time::sleep(Duration::from_millis(90 + 271 * round)).await;
        kill(server.pid());
        // The roles of every third call each other through bytes.
        let env = if round % 3 == 1 { through_bytes() } else { HashMap::new() };
        server.restart(Some(env)).expect("the server starts after a kill");
        // Statements on other tables never wait for a connector.
        answer(&server, &format!("INSERT INTO mine VALUES ({round})")).await.expect("an insert");
    }
    // What is reported lasts as long as the process: this one shall read a broken line itself.
    write(files.path(), written);
    written += 1;
    let begun = Instant::now();
    for (sql, rows) in expected(written) {
        loop {
            let got = answer(&server, sql).await;
            if got.as_ref() == Ok(&rows) {
                break;
            }
            assert!(
                begun.elapsed() < ARRIVAL,
                "{sql}\nanswers {got:?}\nnot {rows:?}\n{}",
                server.log()
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    // Nothing comes after the end.
    answer(&server, "FLUSH").await.expect("a flush");
    for (sql, rows) in expected(written) {
        assert_eq!(answer(&server, sql).await.as_ref(), Ok(&rows), "{sql}");
    }
    let bad =
        "SELECT count(*) > 0 FROM millrace_catalog.errors WHERE message LIKE 'line %not a number%'";
    while answer(&server, bad).await != Ok(vec!["t".into()]) {
        assert!(begun.elapsed() < ARRIVAL, "broken lines are not reported");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
