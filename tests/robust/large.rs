//! Statements of more rows than are held in memory: each changes what it should, or nothing.

use futures::SinkExt;
use millrace_sqllogictest::Server;
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::started;

/// Rows of the table: with their filler more than is held of a statement before it is staged.
const ROWS: i64 = 40_000;

async fn command(client: &Client, sql: &str) -> u64 {
    let failed = |e: tokio_postgres::Error| panic!("{sql}: {e:?}");
    let messages = client.simple_query(sql).await.unwrap_or_else(failed);
    let count = messages.iter().find_map(|m| match m {
        SimpleQueryMessage::CommandComplete(n) => Some(*n),
        _ => None,
    });
    count.expect("a command tag")
}

async fn refused(client: &Client, sql: &str) -> String {
    let e = client.simple_query(sql).await.expect_err(sql);
    e.code().map(|c| c.code().to_owned()).unwrap_or_default()
}

async fn row(client: &Client, sql: &str) -> String {
    let messages = client.simple_query(sql).await.expect(sql);
    let rows = messages.iter().filter_map(|m| match m {
        SimpleQueryMessage::Row(r) => {
            Some((0..r.len()).map(|i| r.get(i).unwrap_or("NULL")).collect::<Vec<_>>().join(" "))
        }
        _ => None,
    });
    rows.collect::<Vec<_>>().join("\n")
}

/// Count, sum of keys and of values: of the table and of a view that follows it.
async fn content(client: &Client) -> String {
    let table = row(client, "SELECT count(*), sum(k), sum(n) FROM a").await;
    let view = row(client, "SELECT c, ks, ns FROM sums").await;
    assert_eq!(table, view, "the view is what the table is");
    table
}

fn start() -> (Server, tempfile::TempDir) {
    started(&["--memory-limit=192MB"])
}

async fn filled(client: &Client) {
    client
        .batch_execute(
            "CREATE TABLE a (k int PRIMARY KEY, n int, filler text); \
             CREATE MATERIALIZED VIEW sums AS SELECT count(*) AS c, sum(k) AS ks, sum(n) AS ns FROM a",
        )
        .await
        .expect("a table and a view");
    let fill =
        format!("INSERT INTO a SELECT g, 0, repeat('x', 500) FROM generate_series(1, {ROWS}) AS g");
    assert_eq!(command(client, &fill).await, ROWS as u64);
}

/// The sum of 1 to `n`.
fn sum(n: i64) -> i64 {
    n * (n + 1) / 2
}

#[tokio::test(flavor = "multi_thread")]
async fn updates_move_keys_join_and_return() {
    let (server, _dir) = start();
    let client = server.connect().await.expect("a connection");
    filled(&client).await;
    // Every row moves to the key of the next one.
    assert_eq!(command(&client, "UPDATE a SET k = k + 1, n = n + 1").await, ROWS as u64);
    assert_eq!(content(&client).await, format!("{ROWS} {} {ROWS}", sum(ROWS) + ROWS));
    assert_eq!(row(&client, "SELECT min(k), max(k) FROM a").await, format!("2 {}", ROWS + 1));
    // Two rows cannot have one key, nor one the key of a row that stays.
    assert_eq!(refused(&client, "UPDATE a SET k = k / 2").await, "23505");
    let onto = format!("UPDATE a SET k = k + 1 WHERE k < {ROWS}");
    assert_eq!(refused(&client, &onto).await, "23505");
    assert_eq!(content(&client).await, format!("{ROWS} {} {ROWS}", sum(ROWS) + ROWS));
    // Several rows of the other table match: each row is changed once.
    client
        .batch_execute(&format!(
            "CREATE TABLE s (k int, v int); \
             INSERT INTO s SELECT g % {ROWS} + 2, 5 FROM generate_series(1, {ROWS} * 2) AS g"
        ))
        .await
        .expect("another table");
    let joined = "UPDATE a SET n = s.v FROM s WHERE s.k = a.k";
    assert_eq!(command(&client, joined).await, ROWS as u64);
    assert_eq!(content(&client).await, format!("{ROWS} {} {}", sum(ROWS) + ROWS, ROWS * 5));
    // RETURNING gives every row, and nothing happens where it fails.
    let failing = "UPDATE a SET n = 6 RETURNING 1 / (k - 777)";
    assert_eq!(refused(&client, failing).await, "22012");
    assert_eq!(content(&client).await, format!("{ROWS} {} {}", sum(ROWS) + ROWS, ROWS * 5));
    let returned = client
        .query("UPDATE a SET n = 7 RETURNING k, n, length(filler)", &[])
        .await
        .expect("an update");
    let keys: i64 = returned.iter().map(|r| i64::from(r.get::<_, i32>(0))).sum();
    assert_eq!((returned.len() as i64, keys), (ROWS, sum(ROWS) + ROWS));
    assert!(returned.iter().all(|r| (r.get::<_, i32>(1), r.get::<_, i32>(2)) == (7, 500)));
    let deleted = client
        .query("DELETE FROM a USING s WHERE s.k = a.k AND a.k % 2 = 0 RETURNING a.k", &[])
        .await
        .expect("a delete");
    assert_eq!(deleted.len() as i64, ROWS / 2);
    let odd = (1..=ROWS / 2).map(|i| 2 * i + 1).sum::<i64>();
    assert_eq!(content(&client).await, format!("{} {odd} {}", ROWS / 2, ROWS / 2 * 7));
}

#[tokio::test(flavor = "multi_thread")]
async fn inserts_meet_the_rows_that_are_there() {
    let (server, _dir) = start();
    let client = server.connect().await.expect("a connection");
    filled(&client).await;
    // Half of the keys are there.
    let half = ROWS / 2;
    let rows = format!(
        "INSERT INTO a SELECT g + {half}, 1, repeat('y', 500) FROM generate_series(1, {ROWS}) AS g"
    );
    let all = sum(ROWS + half);
    assert_eq!(refused(&client, &rows).await, "23505");
    let nothing = format!("{rows} ON CONFLICT DO NOTHING");
    assert_eq!(command(&client, &nothing).await, half as u64);
    assert_eq!(content(&client).await, format!("{} {all} {half}", ROWS + half));
    let update = format!(
        "{rows} ON CONFLICT (k) DO UPDATE SET n = a.n + excluded.n + 10, filler = excluded.filler"
    );
    assert_eq!(command(&client, &update).await, ROWS as u64);
    // 11 for those that were there from the start, 12 for those inserted since.
    assert_eq!(content(&client).await, format!("{} {all} {}", ROWS + half, half * 11 + half * 12));
    let twice = format!(
        "INSERT INTO a SELECT g % {half}, 1, repeat('z', 500) FROM generate_series(1, {ROWS}) AS g \
         ON CONFLICT (k) DO UPDATE SET n = 0"
    );
    assert_eq!(refused(&client, &twice).await, "21000");
    let returned = client
        .query(
            &format!(
                "INSERT INTO a SELECT g, 3, repeat('w', 500) FROM generate_series(1000001, {}) AS g \
                 RETURNING k",
                1_000_000 + ROWS
            ),
            &[],
        )
        .await
        .expect("an insert");
    assert_eq!(returned.len() as i64, ROWS);
    let all = all + ROWS * 1_000_000 + sum(ROWS);
    let values = half * 23 + ROWS * 3;
    assert_eq!(content(&client).await, format!("{} {all} {values}", ROWS * 2 + half));
}

/// Rows of a COPY whose keys repeat: the last of each key is known by its number.
async fn copy(client: &Client, table: &str, keys: i64, lines: i64) -> u64 {
    let sink = client.copy_in(&format!("COPY {table} FROM STDIN")).await.expect("COPY begins");
    futures::pin_mut!(sink);
    let filler = "c".repeat(500);
    let mut data = String::new();
    for line in 0..lines {
        data.push_str(&format!("{}\t{line}\t{filler}\n", line % keys));
        if data.len() > 1 << 20 || line + 1 == lines {
            sink.send(bytes::Bytes::from(std::mem::take(&mut data))).await.expect("data");
        }
    }
    sink.finish().await.expect("COPY ends")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_line_at_the_end_of_a_large_copy_is_named() {
    let (server, _dir) = start();
    let client = server.connect().await.expect("a connection");
    client
        .batch_execute("CREATE TABLE a (k int PRIMARY KEY, n int NOT NULL, filler text)")
        .await
        .expect("a table");
    let filler = "c".repeat(500);
    let next = ROWS + 1;
    for (last, state, context) in [
        (format!("{next}\t\\N\tx\n"), "23502", format!("line {next}: \"{next}\t\\N\tx\"")),
        (format!("{next}\t0\tx\n{next}\t1\ty\n"), "23505", format!("line {}", next + 1)),
    ] {
        let sink = client.copy_in("COPY a FROM STDIN").await.expect("COPY begins");
        futures::pin_mut!(sink);
        let mut data = String::new();
        for key in 1..=ROWS {
            data.push_str(&format!("{key}\t0\t{filler}\n"));
            if data.len() > 1 << 20 {
                sink.send(bytes::Bytes::from(std::mem::take(&mut data))).await.expect("data");
            }
        }
        data.push_str(&last);
        sink.send(bytes::Bytes::from(data)).await.expect("data");
        let e = sink.finish().await.expect_err("a bad line");
        let e = e.as_db_error().expect("an error of the server");
        assert_eq!(
            (e.code().code(), e.where_()),
            (state, Some(format!("COPY a, {context}").as_str()))
        );
        assert_eq!(row(&client, "SELECT count(*) FROM a").await, "0");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_that_overwrite_or_ignore_take_loads_of_any_size() {
    let (server, _dir) = start();
    let client = server.connect().await.expect("a connection");
    client
        .batch_execute(
            "CREATE TABLE o (k int PRIMARY KEY, n int, filler text) ON CONFLICT OVERWRITE; \
             CREATE TABLE i (k int PRIMARY KEY, n int, filler text) ON CONFLICT IGNORE; \
             INSERT INTO o VALUES (5, -1, ''), (-1, -1, ''); INSERT INTO i VALUES (5, -1, ''), (-1, -1, ''); \
             CREATE MATERIALIZED VIEW so AS SELECT count(*) AS c, sum(n) AS n FROM o; \
             CREATE MATERIALIZED VIEW si AS SELECT count(*) AS c, sum(n) AS n FROM i",
        )
        .await
        .expect("tables");
    let (keys, lines) = (25_000, 60_000);
    assert_eq!(copy(&client, "o", keys, lines).await, lines as u64);
    // The last line of key k is k + 50000, or k + 25000 where that is beyond the end.
    let last: i64 = (0..keys).map(|k| if k < 10_000 { k + 50_000 } else { k + 25_000 }).sum();
    let expected = format!("{} {}", keys + 1, last - 1);
    assert_eq!(row(&client, "SELECT count(*), sum(n) FROM o").await, expected);
    assert_eq!(row(&client, "SELECT c, n FROM so").await, expected);
    assert_eq!(copy(&client, "i", keys, lines).await, keys as u64 - 1);
    let first: i64 = (0..keys).sum::<i64>() - 5 - 1 - 1;
    let expected = format!("{} {first}", keys + 1);
    assert_eq!(row(&client, "SELECT count(*), sum(n) FROM i").await, expected);
    assert_eq!(row(&client, "SELECT c, n FROM si").await, expected);
    let again = "INSERT INTO o SELECT k, 1, filler FROM i";
    assert_eq!(command(&client, again).await, keys as u64 + 1);
    let expected = format!("{0} {0}", keys + 1);
    assert_eq!(row(&client, "SELECT count(*), sum(n) FROM o").await, expected);
    assert_eq!(row(&client, "SELECT c, n FROM so").await, expected);
    assert_eq!(command(&client, "INSERT INTO i SELECT k, 1, filler FROM o").await, 0);
}

/// Both sides of a query's join are larger than what queries may hold: they are sorted, on disk if need be.
#[tokio::test(flavor = "multi_thread")]
async fn a_join_that_does_not_fit_into_memory_is_answered() {
    const SIDE: i64 = 400_000;
    let (server, _dir) = start();
    let client = server.connect().await.expect("a connection");
    let side =
        format!("(SELECT g, repeat('y', 120) || g AS t FROM generate_series(1, {SIDE}) AS s(g))");
    let joined = format!(
        "SELECT count(*), sum(a.g), count(*) FILTER (WHERE a.t = b.t) \
         FROM {side} a JOIN {side} b ON a.g = b.g"
    );
    assert_eq!(row(&client, &joined).await, format!("{SIDE} {} {SIDE}", sum(SIDE)));
}

/// The longest chains that are taken can be planned, in queries and in views; longer ones are refused.
#[tokio::test(flavor = "multi_thread")]
async fn long_chains_are_planned_or_refused() {
    let (server, _dir) = start();
    let client = server.connect().await.expect("a connection");
    let conditions = |n: usize| (0..n).map(|i| format!("x <> {i}")).collect::<Vec<_>>();
    let view = format!(
        "CREATE TABLE c (x int); CREATE MATERIALIZED VIEW v AS SELECT x FROM c WHERE {}; \
         INSERT INTO c VALUES (-1), (7)",
        conditions(1_000).join(" AND ")
    );
    client.batch_execute(&view).await.expect("a view with a long condition");
    assert_eq!(row(&client, "SELECT x FROM v").await, "-1");
    let either = conditions(1_000).join(" OR ");
    assert_eq!(row(&client, &format!("SELECT count(*) FROM c WHERE {either}")).await, "2");
    let sum = vec!["1"; 100].join(" + ");
    assert_eq!(row(&client, &format!("SELECT {sum}")).await, "100");
    let union = vec!["SELECT 1 AS a"; 200].join(" UNION ALL ");
    assert_eq!(row(&client, &format!("SELECT sum(a) FROM ({union}) u")).await, "200");
    let with: Vec<String> =
        (1..200).map(|i| format!("c{i} AS (SELECT x FROM c{})", i - 1)).collect();
    let with =
        format!("WITH c0 AS (SELECT x FROM c), {} SELECT count(*) FROM c199", with.join(", "));
    assert_eq!(row(&client, &with).await, "2");
    let nested = format!("SELECT {}x{} FROM v", "abs(".repeat(40), ")".repeat(40));
    assert_eq!(row(&client, &nested).await, "1");
    let long = |n: usize, with: &str| format!("SELECT {}", vec!["1"; n].join(with));
    for sql in [
        long(20_000, " + "),
        long(5_000, "::text || "),
        format!("UPDATE c SET x = 1 WHERE {}", conditions(20_000).join(" OR ")),
        format!(
            "CREATE MATERIALIZED VIEW w AS SELECT x FROM c WHERE {}",
            conditions(5_000).join(" AND ")
        ),
        long(5_000, " UNION SELECT "),
    ] {
        assert_eq!(refused(&client, &sql).await, "54001", "{}", &sql[..60]);
    }
    assert_eq!(row(&client, "SELECT x FROM v").await, "-1");
}

/// Views may stand on views as far as a layered model goes; the server outlives what goes further.
#[tokio::test(flavor = "multi_thread")]
async fn views_on_views_are_bound_in_any_depth_that_is_taken() {
    let (server, _dir) = start();
    let client = server.connect().await.expect("a connection");
    client.batch_execute("CREATE VIEW l0 AS SELECT 1 AS a").await.expect("a view");
    for i in 1..60 {
        let view = format!("CREATE VIEW l{i} AS SELECT a + 1 AS a FROM l{}", i - 1);
        client.batch_execute(&view).await.expect("a view on a view");
    }
    assert_eq!(row(&client, "SELECT a FROM l59").await, "60");
    let mut state = String::new();
    for i in 60..90 {
        let view = format!("CREATE VIEW l{i} AS SELECT a + 1 AS a FROM l{}", i - 1);
        if let Err(e) = client.batch_execute(&view).await {
            state = e.code().map(|c| c.code().to_owned()).unwrap_or_default();
            break;
        }
    }
    assert_eq!(state, "54001");
    assert_eq!(row(&client, "SELECT a FROM l59").await, "60");
}
