//! Watermarks, late rows, EMIT ON WINDOW CLOSE and state cleaning: two append-only tables that random rows
//! enter, many of them late, and views over them.
//!
//! A late row never enters its table, so a view equals its query over the table in batch. A view that is
//! emitted on window close equals its query over the windows that are closed at the tables' watermarks,
//! and these follow from the tables' content: the latest time minus the delay.

use std::fmt::Write;
use std::time::{Duration, Instant};

use tokio_postgres::{Client, SimpleQueryMessage};

use crate::case::Mode;
use crate::node::{Node, NodeOptions};
use crate::rng::Rng;

/// The watermark of a table, as the batch query computes it.
const A: &str = "((SELECT max(at) FROM a) - INTERVAL '5 seconds')";
const B: &str = "((SELECT max(at) FROM b) - INTERVAL '3 seconds')";

/// How long the state tables may take to say that they are cleaned.
const PATIENCE: Duration = Duration::from_secs(60);

fn bin(seconds: u32, of: &str) -> String {
    format!("date_bin(INTERVAL '{seconds} seconds', {of}, TIMESTAMP '1970-01-01')")
}

struct View {
    query: String,
    /// On window close: what says of a row of the query (as `q`) that its window is closed.
    closed: Option<String>,
}

fn live(query: &str) -> View {
    View { query: query.into(), closed: None }
}

fn closed(query: &str, conditions: &[String]) -> View {
    View { query: query.into(), closed: Some(conditions.join(" AND ")) }
}

fn views() -> Vec<View> {
    let (ta, tb) = (tumble("a"), tumble("b"));
    let aggregate = format!(
        "SELECT k, window_start, count(*) AS n, sum(v) AS s, min(v) AS low, max(v) AS high, \
         count(DISTINCT v) AS d FROM {ta} GROUP BY k, window_start"
    );
    let hop = "SELECT window_start, window_end, count(*) AS n \
               FROM HOP(a, at, INTERVAL '5 seconds', INTERVAL '15 seconds') GROUP BY 1, 2";
    let distinct = format!("SELECT DISTINCT window_start, k FROM {ta}");
    let top = format!(
        "SELECT window_start, id, v, r FROM (SELECT *, row_number() OVER \
         (PARTITION BY window_start ORDER BY v DESC, id) AS r FROM {ta}) t WHERE r <= 2"
    );
    let anti = format!(
        "SELECT x.window_start, x.id FROM {ta} x WHERE NOT EXISTS \
         (SELECT 1 FROM {tb} y WHERE y.window_start = x.window_start AND y.k = x.k)"
    );
    let session = "SELECT k, window_start, window_end, count(*) AS n, sum(v) AS s \
                   FROM SESSION(a, at, INTERVAL '4 seconds', k) GROUP BY 1, 2, 3";
    let asof = "SELECT x.at, x.id, y.id AS other FROM a x ASOF LEFT JOIN b y \
                MATCH_CONDITION (x.at >= y.at) ON x.k = y.k";
    let next = "SELECT x.at, x.id, y.id AS other FROM a x ASOF LEFT JOIN b y \
                MATCH_CONDITION (x.at <= y.at) ON x.k = y.k";
    let steps = "SELECT k, at, id, v - lag(v) OVER w AS d, row_number() OVER w AS r, sum(v) OVER w AS s, \
                 max(v) OVER (w ROWS 2 PRECEDING) AS m FROM a WINDOW w AS (PARTITION BY k ORDER BY at, id)";
    let union = "SELECT date_trunc('minute', at) AS m, count(*) AS n \
                 FROM (SELECT at FROM a UNION ALL SELECT at FROM b) u GROUP BY 1";
    let by_a = format!("q.window_start < {}", bin(10, A));
    let by_b = format!("q.window_start < {}", bin(10, B));
    vec![
        live(&aggregate),
        live(hop),
        live(&distinct),
        live(&window_join("")),
        live(&window_join("LEFT")),
        live(&window_join("FULL")),
        live(&interval_join("")),
        live(&interval_join("LEFT")),
        live(&top),
        live(&anti),
        live(session),
        live(asof),
        live(next),
        closed(&aggregate, std::slice::from_ref(&by_a)),
        closed(hop, &[format!("q.window_start + INTERVAL '10 seconds' < {}", bin(5, A))]),
        closed(&top, std::slice::from_ref(&by_a)),
        closed(&window_join(""), &[by_a.clone(), by_b.clone()]),
        closed(&anti, &[by_a, by_b]),
        closed(
            &interval_join(""),
            &[format!("q.at < {A}"), format!("q.at < {B} - INTERVAL '4 seconds'")],
        ),
        closed(session, &[format!("q.window_end <= {A}")]),
        closed(asof, &[format!("q.at < {A}"), format!("q.at < {B}")]),
        closed(steps, &[format!("q.at < {A}")]),
        closed(
            union,
            &[
                format!("q.m < date_trunc('minute', {A})"),
                format!("q.m < date_trunc('minute', {B})"),
            ],
        ),
    ]
}

fn tumble(table: &str) -> String {
    format!("TUMBLE({table}, at, INTERVAL '10 seconds')")
}

fn window_join(kind: &str) -> String {
    format!(
        "SELECT x.window_start, x.id, y.id AS other FROM {} x {kind} JOIN {} y \
         ON x.window_start = y.window_start AND x.k = y.k",
        tumble("a"),
        tumble("b")
    )
}

fn interval_join(kind: &str) -> String {
    format!(
        "SELECT x.at, x.id, y.id AS other FROM a x {kind} JOIN b y ON x.k = y.k \
         AND x.at BETWEEN y.at - INTERVAL '4 seconds' AND y.at + INTERVAL '6 seconds'"
    )
}

fn table(name: &str, delay: u32) -> String {
    format!(
        "CREATE TABLE {name} (id int, k int, v int, at timestamp, \
         WATERMARK FOR at AS at - INTERVAL '{delay} seconds') APPEND ONLY"
    )
}

/// One statement that reads the view and its query at the same epoch, as (side, row).
async fn differences(client: &Client, number: usize, view: &View) -> Result<String, String> {
    let query = match &view.closed {
        None => format!("SELECT * FROM ({}) q", view.query),
        Some(closed) => format!("SELECT * FROM ({}) q WHERE {closed}", view.query),
    };
    let both = format!(
        "SELECT 'view' AS side, v{number}.* FROM v{number} UNION ALL SELECT 'query', e.* FROM ({query}) e"
    );
    let rows = client.simple_query(&both).await.map_err(|e| format!("{both}: {e:?}"))?;
    let (mut have, mut want) = (Vec::new(), Vec::new());
    for row in rows {
        let SimpleQueryMessage::Row(row) = row else { continue };
        let text: Vec<&str> = (1..row.len()).map(|i| row.get(i).unwrap_or("NULL")).collect();
        let side = if row.get(0) == Some("view") { &mut have } else { &mut want };
        side.push(text.join(" | "));
    }
    have.sort();
    want.sort();
    let mut out = String::new();
    if have != want {
        let extra = have.iter().filter(|r| !want.contains(r));
        let missing = want.iter().filter(|r| !have.contains(r));
        let _ = writeln!(out, "{}: {} rows, expected {}", view.query, have.len(), want.len());
        extra.take(5).for_each(|r| out.push_str(&format!("  + {r}\n")));
        missing.take(5).for_each(|r| out.push_str(&format!("  - {r}\n")));
    }
    Ok(out)
}

async fn run(mode: Mode, seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut node = Node::start(NodeOptions::for_mode(mode, seed)).await?;
    let mut client = node.connect().await?;
    let sql = |e: tokio_postgres::Error| format!("{e:?}");
    for (name, delay) in [("a", 5), ("b", 3)] {
        client.simple_query(&table(name, delay)).await.map_err(sql)?;
    }
    let views = views();
    // Some views read what is there already.
    let late_start = rng.below(views.len());
    let create = async |client: &Client, range: std::ops::Range<usize>| -> Result<(), String> {
        for (i, view) in views.iter().enumerate().skip(range.start).take(range.len()) {
            let emit = if view.closed.is_some() { " EMIT ON WINDOW CLOSE" } else { "" };
            let text = format!("CREATE MATERIALIZED VIEW v{i} AS {}{emit}", view.query);
            client.simple_query(&text).await.map_err(|e| format!("{text}: {e:?}"))?;
        }
        Ok(())
    };
    create(&client, 0..late_start).await?;
    let (mut clock, mut id) = (0i64, 0);
    for step in 0..24 {
        if step == 8 {
            create(&client, late_start..views.len()).await?;
        }
        for name in ["a", "b"] {
            let mut rows = Vec::new();
            for _ in 0..rng.below(6) {
                clock += rng.below(5) as i64;
                id += 1;
                let at = clock - rng.below(14) as i64;
                let at = format!("TIMESTAMP '2026-01-01' + INTERVAL '{at} seconds'");
                rows.push(format!("({id}, {}, {}, {at})", rng.below(3), rng.below(9)));
            }
            if !rows.is_empty() {
                let text = format!("INSERT INTO {name} VALUES {}", rows.join(", "));
                client.simple_query(&text).await.map_err(sql)?;
            }
        }
        if mode.restarts_after(step, &mut rng, 20) {
            node = node.crash_and_restart().await?;
            client = node.connect().await?;
        }
        let there = if step < 8 { late_start } else { views.len() };
        if rng.below(3) == 0 || step == 23 {
            for (i, view) in views.iter().enumerate().take(there) {
                let found = differences(&client, i, view).await?;
                if !found.is_empty() {
                    return Err(format!("seed {seed}, {mode:?}, step {step}, v{i}\n{found}"));
                }
            }
        }
    }
    wait_until_cleaned(&client).await?;
    node.stop().await;
    Ok(())
}

/// The state tables of most views say that they are cleaned.
async fn wait_until_cleaned(client: &Client) -> Result<(), String> {
    let kept = "SELECT count(*) FROM millrace_catalog.state_tables s \
                WHERE s.relation_name LIKE 'v%' AND s.kept_since IS NOT NULL";
    let deadline = Instant::now() + PATIENCE;
    loop {
        let rows = client.simple_query(kept).await.map_err(|e| format!("{e:?}"))?;
        let cleaned = rows.iter().find_map(|m| match m {
            SimpleQueryMessage::Row(r) => r.get(0)?.parse::<u32>().ok(),
            _ => None,
        });
        if cleaned.unwrap_or(0) >= 20 {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("only {cleaned:?} state tables are cleaned"));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn event_time_views_equal_their_queries() {
    let modes = [Mode::Plain, Mode::TinyCaches, Mode::Crash, Mode::SlowStore, Mode::Restart];
    crate::each_case("MILLRACE_EVENT_TIME_CASES", [5, 20], &[], &modes, run);
}
