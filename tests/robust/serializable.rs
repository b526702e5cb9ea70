//! Single statements whose conditions read rows that they do not write, many at once: what comes of them is what some
//! order of them, one after the other, would have made, and no read may have seen another order.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::join_all;
use millrace_sqllogictest::{Server, ServerOptions, suite};
use tokio_postgres::Client;

use crate::node::{one, run};

const SESSIONS: usize = 4;
const ROUNDS: usize = 15;

struct Cluster {
    server: Server,
    sessions: Vec<Client>,
    _dir: tempfile::TempDir,
}

impl Cluster {
    async fn start(schema: &str) -> Cluster {
        Cluster::with_sessions(SESSIONS, schema).await
    }

    async fn with_sessions(count: usize, schema: &str) -> Cluster {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let options =
            ServerOptions { data_dir: dir.path().to_path_buf(), ..ServerOptions::default() };
        let server = Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
            .expect("the server starts");
        let mut sessions = Vec::new();
        for _ in 0..count {
            sessions.push(server.connect().await.expect("a connection"));
        }
        run(&sessions[0], schema).await;
        Cluster { server, sessions, _dir: dir }
    }

    /// Every session runs its statement, all at the same time; none may fail.
    async fn at_once(&self, sql: impl Fn(usize) -> String) {
        join_all(self.sessions.iter().enumerate().map(|(i, client)| {
            let sql = sql(i);
            async move {
                client.batch_execute(&sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
            }
        }))
        .await;
    }

    async fn expect(&self, sql: &str, expected: &str) {
        assert_eq!(one(&self.sessions[0], sql).await, expected, "{sql}");
    }
}

/// What the first one sees absent is there for the others, whichever way they look.
#[tokio::test(flavor = "multi_thread")]
async fn one_of_several_inserts_what_is_not_there() {
    let c = Cluster::start(
        "CREATE TABLE s (r int, w int);
         CREATE TABLE keyed (r int PRIMARY KEY, w int);
         CREATE TABLE watched (r int, w int);
         CREATE MATERIALIZED VIEW by_round AS SELECT r, count(*) AS n FROM watched GROUP BY r;
         CREATE TABLE one (r int, w int);
         CREATE TABLE other (r int, w int)",
    )
    .await;
    for r in 0..ROUNDS {
        c.at_once(|w| {
            format!(
                "INSERT INTO s SELECT {r}, {w} WHERE NOT EXISTS (SELECT 1 FROM s WHERE r = {r})"
            )
        })
        .await;
        c.expect(&format!("SELECT count(*) FROM s WHERE r = {r}"), "1").await;
        // The others are no duplicates: they insert nothing.
        c.at_once(|w| {
            format!(
                "INSERT INTO keyed SELECT {r}, {w} WHERE NOT EXISTS (SELECT 1 FROM keyed WHERE r = {r})"
            )
        })
        .await;
        c.at_once(|w| {
            format!(
                "INSERT INTO watched SELECT {r}, {w} WHERE NOT EXISTS (SELECT 1 FROM by_round WHERE r = {r})"
            )
        })
        .await;
        c.expect(&format!("SELECT count(*) FROM watched WHERE r = {r}"), "1").await;
        // Each reads the table that the other writes.
        c.at_once(|w| {
            let (to, from) = if w % 2 == 0 { ("one", "other") } else { ("other", "one") };
            format!(
                "INSERT INTO {to} SELECT {r}, {w} WHERE NOT EXISTS (SELECT 1 FROM {from} WHERE r = {r})"
            )
        })
        .await;
        let both = format!(
            "SELECT (SELECT count(*) FROM one WHERE r = {r}) * (SELECT count(*) FROM other WHERE r = {r}),
                    (SELECT count(*) FROM one WHERE r = {r}) + (SELECT count(*) FROM other WHERE r = {r}) > 0"
        );
        let rows = suite::rows(&c.sessions[0], &both).await.expect("rows");
        assert_eq!(rows, [["0", "t"]]);
    }
}

/// So many at once that others have to wait for some: one that finds nothing left to insert by then lets them go on.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_inserts_nothing_in_its_turn_lets_the_others_go_on() {
    const VALUES: usize = 6;
    let c = Cluster::with_sessions(
        2 * VALUES,
        "CREATE TABLE watched (r int, w int);
         CREATE MATERIALIZED VIEW by_value AS SELECT r, count(*) AS n FROM watched GROUP BY r",
    )
    .await;
    for session in &c.sessions {
        // Instead of waiting for ever.
        run(session, "SET statement_timeout = '60s'").await;
    }
    for round in 1..=ROUNDS / 3 {
        c.at_once(|w| {
            let r = round * VALUES + w % VALUES;
            format!(
                "INSERT INTO watched SELECT {r}, {w} WHERE NOT EXISTS (SELECT 1 FROM by_value WHERE r = {r})"
            )
        })
        .await;
        c.expect("SELECT count(*) FROM watched", &(round * VALUES).to_string()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_row_stays_and_no_number_is_given_twice() {
    let c = Cluster::start(
        "CREATE TABLE duty (id int PRIMARY KEY, r int);
         CREATE TABLE number (id int PRIMARY KEY, v bigint);
         INSERT INTO number SELECT g, 0 FROM generate_series(0, 3) AS t(g);
         CREATE TABLE given (id int, v bigint);
         CREATE TABLE pool (id int PRIMARY KEY);
         CREATE TABLE taken (id int, w int)",
    )
    .await;
    for r in 0..ROUNDS {
        let rows: Vec<String> = (0..SESSIONS).map(|w| format!("({}, {r})", r * 10 + w)).collect();
        run(&c.sessions[0], &format!("INSERT INTO duty VALUES {}", rows.join(", "))).await;
        c.at_once(|w| {
            let id = r * 10 + w;
            format!(
                "DELETE FROM duty WHERE id = {id} AND (SELECT count(*) FROM duty WHERE r = {r}) > 1"
            )
        })
        .await;
        c.expect(&format!("SELECT count(*) FROM duty WHERE r = {r}"), "1").await;
        c.at_once(|w| {
            format!("UPDATE number SET v = (SELECT max(v) FROM number) + 1 WHERE id = {w}")
        })
        .await;
        c.expect("SELECT count(DISTINCT v) FROM number", &SESSIONS.to_string()).await;
        c.expect("SELECT max(v) FROM number", &((r + 1) * SESSIONS).to_string()).await;
        c.at_once(|w| format!("INSERT INTO given SELECT {w}, coalesce(max(v), 0) + 1 FROM given"))
            .await;
        let all = (r + 1) * SESSIONS;
        c.expect("SELECT count(DISTINCT v) || ' ' || max(v) FROM given", &format!("{all} {all}"))
            .await;
        // A statement of parts.
        run(
            &c.sessions[0],
            &format!("INSERT INTO pool SELECT {r} * 2 + g FROM generate_series(0, 1) AS t(g)"),
        )
        .await;
        c.at_once(|w| {
            format!(
                "WITH first AS (SELECT min(id) AS id FROM pool), \
                 gone AS (DELETE FROM pool WHERE id = (SELECT id FROM first) RETURNING id) \
                 INSERT INTO taken SELECT id, {w} FROM first WHERE id IS NOT NULL"
            )
        })
        .await;
        c.expect("SELECT count(*) FROM pool", "0").await;
        let taken = 2 * (r + 1);
        c.expect(
            "SELECT count(DISTINCT id) || ' ' || count(*) FROM taken",
            &format!("{taken} {taken}"),
        )
        .await;
    }
}

/// Statements that all change the same rows go on, and lose nothing.
#[tokio::test(flavor = "multi_thread")]
async fn statements_that_find_the_same_rows_all_take_effect() {
    let c = Cluster::start(
        "CREATE TABLE hot (id int PRIMARY KEY, grp int, v int);
         INSERT INTO hot SELECT g, g % 2, 0 FROM generate_series(1, 10) AS t(g);
         CREATE TABLE copy (id int, grp int, v int)",
    )
    .await;
    for _ in 0..ROUNDS {
        c.at_once(|w| match w {
            0 => "INSERT INTO copy SELECT * FROM hot".to_owned(),
            _ => "UPDATE hot SET v = v + 1 WHERE grp = 1".to_owned(),
        })
        .await;
    }
    let each = ROUNDS * (SESSIONS - 1);
    c.expect("SELECT sum(v) FROM hot", &(5 * each).to_string()).await;
    // Each copy is of one moment.
    c.expect("SELECT count(*) FROM copy", &(10 * ROUNDS).to_string()).await;
    c.expect(
        "SELECT count(*) FROM (SELECT v FROM copy WHERE grp = 1 GROUP BY v HAVING count(*) % 5 <> 0) AS torn",
        "0",
    )
    .await;
}

/// What a statement has not seen comes after it, for everybody: a read that sees the one row and not yet what the
/// statement has done would tell another order.
#[tokio::test(flavor = "multi_thread")]
async fn no_read_sees_what_a_statement_missed_before_the_statement() {
    let c = Cluster::start(
        "CREATE TABLE m (k int PRIMARY KEY, g int);
         INSERT INTO m VALUES (0, 0);
         CREATE TABLE counted (r int, n bigint)",
    )
    .await;
    let reader = c.server.connect().await.expect("a connection");
    for r in 1..=ROUNDS {
        let done = AtomicBool::new(false);
        // That the new row was there before the statement on the same table, or on the other one, took effect.
        let (mut before_update, mut before_count) = (false, false);
        let read = async {
            let sql = format!(
                "SELECT (SELECT g FROM m WHERE k = 0) < {r} AND EXISTS (SELECT 1 FROM m WHERE k = {r}),
                        NOT EXISTS (SELECT 1 FROM counted WHERE r = {r}) AND EXISTS (SELECT 1 FROM m WHERE k = {r})"
            );
            while !done.load(Ordering::Relaxed) {
                let rows = suite::rows(&reader, &sql).await.expect("rows");
                before_update |= rows[0][0] == "t";
                before_count |= rows[0][1] == "t";
            }
        };
        let write = async {
            c.at_once(|w| match w {
                0 => format!("UPDATE m SET g = {r}"),
                1 => format!("INSERT INTO counted SELECT {r}, count(*) FROM m"),
                2 => format!("INSERT INTO m VALUES ({r}, 0)"),
                _ => format!("UPDATE m SET g = g WHERE k = -{r}"),
            })
            .await;
            done.store(true, Ordering::Relaxed);
        };
        tokio::join!(read, write);
        let updated = one(&c.sessions[0], &format!("SELECT g = {r} FROM m WHERE k = {r}")).await;
        assert!(updated == "t" || !before_update, "round {r}: the UPDATE came before the INSERT");
        let counted =
            one(&c.sessions[0], &format!("SELECT n = {} FROM counted WHERE r = {r}", r + 1)).await;
        assert!(counted == "t" || !before_count, "round {r}: the count came before the INSERT");
    }
}
