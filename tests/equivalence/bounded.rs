//! State that a watermark cleans stays bounded over a stream that does not end: after three times as long
//! there is about as much of it. One view an operator; what is counted are the entries of the operators' tables in
//! memory and in the store, older versions included, not the view's own rows.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::case::{Mode, execute, rows};
use crate::node::{Node, NodeOptions};

/// Epochs until state has its size, and how many there are in all.
const SETTLED: usize = 15;
const STEPS: usize = 45;
/// How long merges may take to catch up with the stream.
const CAUGHT_UP: Duration = Duration::from_secs(120);
/// Rows of an epoch in each table; ten seconds of time.
const ROWS: usize = 40;

fn views() -> Vec<(&'static str, String)> {
    let window = |t: &str| format!("TUMBLE({t}, at, INTERVAL '10 seconds')");
    let (wa, wb) = (window("a"), window("b"));
    let near =
        "x.k = y.k AND x.at BETWEEN y.at - INTERVAL '4 seconds' AND y.at + INTERVAL '6 seconds'";
    let same = "x.window_start = y.window_start AND x.k = y.k";
    let exists = |not: &str, from: &str, other: &str, on: &str| {
        format!("SELECT x.id FROM {from} x WHERE {not} EXISTS (SELECT 1 FROM {other} y WHERE {on})")
    };
    vec![
        (
            "aggregate",
            format!("SELECT k, window_start, count(*) AS n, max(v) AS top, count(DISTINCT v) AS d FROM {wa} GROUP BY 1, 2"),
        ),
        ("distincts", format!("SELECT DISTINCT window_start, v FROM {wa}")),
        ("join_window", format!("SELECT x.id, y.id AS other FROM {wa} x JOIN {wb} y ON {same}")),
        ("left_window", format!("SELECT x.id, y.id AS other FROM {wa} x LEFT JOIN {wb} y ON {same}")),
        ("full_window", format!("SELECT x.id, y.id AS other FROM {wa} x FULL JOIN {wb} y ON {same}")),
        ("semi_window", exists("", &wa, &wb, same)),
        ("anti_window", exists("NOT", &wa, &wb, same)),
        ("join_interval", format!("SELECT x.id, y.id AS other FROM a x JOIN b y ON {near}")),
        ("left_interval", format!("SELECT x.id, y.id AS other FROM a x LEFT JOIN b y ON {near}")),
        ("full_interval", format!("SELECT x.id, y.id AS other FROM a x FULL JOIN b y ON {near}")),
        ("semi_interval", exists("", "a", "b", near)),
        ("anti_interval", exists("NOT", "a", "b", near)),
        (
            "first_rows",
            format!("SELECT id FROM (SELECT id, row_number() OVER (PARTITION BY window_start, k ORDER BY v DESC, id) AS r FROM {wa}) t WHERE r <= 2"),
        ),
        (
            "deduplicated",
            format!("SELECT id FROM (SELECT id, row_number() OVER (PARTITION BY window_start, k, v ORDER BY at, id) AS r FROM {wa}) t WHERE r = 1"),
        ),
        (
            "over_window",
            format!("SELECT id, sum(v) OVER (PARTITION BY window_start ORDER BY at, id ROWS 2 PRECEDING) AS s FROM {wa}"),
        ),
        (
            "sessions",
            "SELECT k, window_start, window_end, count(*) AS n FROM SESSION(a, at, INTERVAL '2 seconds', k) GROUP BY 1, 2, 3".into(),
        ),
        (
            "asof",
            "SELECT x.id, y.id AS other FROM a x ASOF LEFT JOIN b y MATCH_CONDITION (x.at >= y.at) ON x.k = y.k".into(),
        ),
        (
            "asof_next",
            "SELECT x.id, y.id AS other FROM a x ASOF LEFT JOIN b y MATCH_CONDITION (x.at < y.at) ON x.k = y.k".into(),
        ),
        (
            "held_back",
            format!("SELECT window_start, count(*) AS n FROM {wa} GROUP BY 1 EMIT ON WINDOW CLOSE"),
        ),
    ]
}

/// Entries of each view's operators.
async fn entries(client: &Client) -> Result<BTreeMap<String, i64>, String> {
    let sql = "SELECT relation_name, coalesce(sum(entries), 0) FROM millrace_catalog.state_tables \
               WHERE NOT is_result GROUP BY relation_name";
    let one = |row: Vec<Option<String>>| {
        let number = row.get(1).cloned().flatten().and_then(|n| n.parse().ok());
        (row.into_iter().next().flatten().unwrap_or_default(), number.unwrap_or(0))
    };
    Ok(rows(client, sql).await?.into_iter().map(one).collect())
}

async fn run(mode: Mode) -> Result<(), String> {
    let node = Node::start(NodeOptions::for_mode(mode, 1)).await?;
    let client = node.connect().await?;
    for table in ["a", "b"] {
        let watermark = "WATERMARK FOR at AS at - INTERVAL '5 seconds'";
        execute(
            &client,
            &format!(
                "CREATE TABLE {table} (id int, k int, v int, at timestamp, {watermark}) APPEND ONLY"
            ),
        )
        .await?;
    }
    let views = views();
    for (name, query) in &views {
        execute(&client, &format!("CREATE MATERIALIZED VIEW {name} AS {query}")).await?;
    }
    let mut early = BTreeMap::new();
    for step in 0..STEPS {
        for (t, table) in ["a", "b"].into_iter().enumerate() {
            let row = |i: usize| {
                let ms = step * 10_000 + i * 10_000 / ROWS;
                let at = format!("TIMESTAMP '2026-01-01' + INTERVAL '{ms} milliseconds'");
                // Ids tell all rows apart; a key has a row every few seconds, and pauses.
                format!(
                    "({}, {}, {}, {at})",
                    step * ROWS + i,
                    (i * 7 + t) % 11,
                    (i * 13 + step) % 9
                )
            };
            let all: Vec<String> = (0..ROWS).map(row).collect();
            execute(&client, &format!("INSERT INTO {table} VALUES {}", all.join(", "))).await?;
        }
        execute(&client, "FLUSH").await?;
        if step + 1 == SETTLED {
            early = entries(&client).await?;
        }
    }
    // Merges run beside the stream, and of a store of tiny runs there is much to merge.
    let deadline = Instant::now() + CAUGHT_UP;
    let grown = loop {
        let grown = grown(&views, &early, &entries(&client).await?, mode);
        if grown.is_empty() || Instant::now() > deadline {
            break grown;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    node.stop().await;
    if grown.is_empty() { Ok(()) } else { Err(grown.join("\n")) }
}

/// The views whose state has grown.
fn grown(
    views: &[(&'static str, String)],
    early: &BTreeMap<String, i64>,
    late: &BTreeMap<String, i64>,
    mode: Mode,
) -> Vec<String> {
    let mut grown = Vec::new();
    for (name, _) in views {
        let (before, after) = (early.get(*name).copied(), late.get(*name).copied());
        let (before, after) = (before.unwrap_or(0), after.unwrap_or(0));
        println!("{name}: {before} entries, then {after}");
        // Runs are merged now and then: by what has come since the last time it may be more, in a store of many
        // tiny runs by some epochs' rows.
        let slack = if mode == Mode::Plain { 2 * ROWS } else { 20 * ROWS };
        if after == 0 || after > before * 3 / 2 + slack as i64 {
            grown.push(format!("{name}: {before} entries, then {after}"));
        }
    }
    grown
}

#[test]
fn state_stays_bounded_over_an_endless_stream() {
    let _alone = crate::alone();
    for mode in [Mode::Plain, Mode::TinyCaches] {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        if let Err(e) = runtime.block_on(run(mode)) {
            panic!("{mode:?}:\n{e}");
        }
    }
}
