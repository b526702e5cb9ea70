//! A workload whose outcome after a crash can be judged: batches that are all or nothing, a counter that
//! several sessions raise, a COPY, transactions that move money between two tables, and views over all
//! of it.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use futures::SinkExt;
use millrace_sqllogictest::{Server, suite};
use tokio_postgres::Client;

/// Rows of one batch.
const BATCH: i64 = 5;
/// Rows of one large COPY: more than a load keeps in memory.
const BULK: i64 = 800;
const COUNTER_SESSIONS: usize = 3;
/// Sessions that fill a table whose epochs overlap, because each needs an upload of its own, and rows of a statement.
const WIDE_SESSIONS: usize = 4;
const WIDE: i64 = 64;
/// Accounts of each of the two tables that transactions move money between, and what they hold at first.
const ACCOUNTS: i64 = 4;
const BALANCE: i64 = 1000;

#[derive(Clone)]
pub struct Ledger {
    next_batch: i64,
    /// Batches acknowledged, and batches whose fate the client does not know.
    acknowledged: Vec<i64>,
    unknown: Vec<i64>,
    deleted: Vec<i64>,
    bulks: Vec<i64>,
    unknown_bulks: Vec<i64>,
    increments: i64,
    unknown_increments: i64,
    /// Money moved from one table to the other, acknowledged and perhaps.
    moved: i64,
    unknown_moved: i64,
    /// Of each session that writes wide batches, the number of the last that was acknowledged.
    wide: [i64; WIDE_SESSIONS],
}

const SCHEMA: &str = "
    CREATE TABLE ledger (id bigint PRIMARY KEY, batch bigint, v int);
    CREATE TABLE counter (id int PRIMARY KEY, x bigint);
    INSERT INTO counter VALUES (1, 0), (2, 0);
    CREATE TABLE bulk (id bigint PRIMARY KEY, part bigint, pad text);
    CREATE MATERIALIZED VIEW parts AS SELECT part, count(*) AS n, max(id) AS newest FROM bulk GROUP BY part;
    CREATE TABLE wide (session int, batch bigint, x int, pad text, PRIMARY KEY (session, batch, x));
    CREATE MATERIALIZED VIEW wide_batches AS SELECT session, batch, count(*) AS n FROM wide GROUP BY session, batch;
    CREATE TABLE cash (id int PRIMARY KEY, n bigint);
    CREATE TABLE bank (id int PRIMARY KEY, n bigint);
    INSERT INTO cash SELECT g, 1000 FROM generate_series(1, 4) AS t(g);
    INSERT INTO bank SELECT g, 1000 FROM generate_series(1, 4) AS t(g);
    CREATE MATERIALIZED VIEW money AS SELECT sum(n) AS n FROM
        (SELECT n FROM cash UNION ALL SELECT n FROM bank) AS both_tables;
    CREATE MATERIALIZED VIEW per_batch AS SELECT batch, count(*) AS n, sum(v) AS s FROM ledger GROUP BY batch;
    CREATE MATERIALIZED VIEW sizes AS SELECT n, count(*) AS batches FROM per_batch GROUP BY n;
    CREATE MATERIALIZED VIEW with_counter AS SELECT l.id, c.x FROM ledger l JOIN counter c ON l.v = c.id;
    CREATE MATERIALIZED VIEW newest AS SELECT id, batch FROM ledger ORDER BY id DESC LIMIT 7;
    CREATE TABLE copied (id bigint PRIMARY KEY, batch bigint, v int);
    CREATE SINK copy INTO copied FROM ledger WITH (commit_interval = '300ms');
    CREATE TABLE seldom (n bigint) APPEND ONLY;
    CREATE TABLE seldom_copied (n bigint);
    CREATE SINK seldom_copy INTO seldom_copied FROM seldom;
    CREATE TABLE left_copied (id int PRIMARY KEY, x bigint);
    CREATE SINK left_behind INTO left_copied FROM counter WITH (changelog_retention = '1s');
    ALTER SINK left_behind PAUSE";

impl Ledger {
    pub async fn create(server: &Server) -> Result<Ledger, String> {
        let client = server.connect().await.map_err(|e| e.to_string())?;
        for statement in SCHEMA.split(';') {
            client.batch_execute(statement).await.map_err(|e| format!("{statement}: {e:?}"))?;
        }
        Ok(Ledger {
            next_batch: 1,
            acknowledged: Vec::new(),
            unknown: Vec::new(),
            deleted: Vec::new(),
            bulks: Vec::new(),
            unknown_bulks: Vec::new(),
            increments: 0,
            unknown_increments: 0,
            moved: 0,
            unknown_moved: 0,
            wide: [0; WIDE_SESSIONS],
        })
    }

    /// Writes until the time is over or the server is gone.
    pub async fn run(&mut self, server: &Server, limit: Duration) {
        let until = Instant::now() + limit;
        let increments = AtomicI64::new(0);
        let unknown_increments = AtomicI64::new(0);
        let counters = (0..COUNTER_SESSIONS)
            .map(|_| raise_counter(server, until, &increments, &unknown_increments));
        let counters = futures::future::join_all(counters);
        let (moved, unknown_moved) = (AtomicI64::new(0), AtomicI64::new(0));
        let movers = [1, 2].map(|first| move_money(server, until, first, &moved, &unknown_moved));
        let movers = futures::future::join_all(movers);
        let wide = self.wide;
        let batches = async {
            let Ok(client) = server.connect().await else { return };
            // Its sink is idle afterwards, and says in the log that it is done.
            if client.batch_execute("INSERT INTO seldom VALUES (1)").await.is_err() {
                return;
            }
            while Instant::now() < until {
                if !self.batch(&client).await {
                    return;
                }
            }
        };
        let (fleeting, rebuilt) = (create_and_drop(server, until), rebuild(server, until));
        let wide = (0..).zip(wide).map(|(session, last)| write_wide(server, until, session, last));
        let wide = futures::future::join_all(wide);
        let (.., wide) = tokio::join!(counters, batches, movers, fleeting, rebuilt, wide);
        self.wide.copy_from_slice(&wide);
        self.increments += increments.into_inner();
        self.unknown_increments += unknown_increments.into_inner();
        self.moved += moved.into_inner();
        self.unknown_moved += unknown_moved.into_inner();
    }

    /// One batch by INSERT or COPY, now and then a DELETE; false when the server is gone.
    async fn batch(&mut self, client: &Client) -> bool {
        let batch = self.next_batch;
        self.next_batch += 1;
        let done =
            if batch % 4 == 0 { copy(client, batch).await } else { insert(client, batch).await };
        if done {
            self.acknowledged.push(batch);
        } else {
            self.unknown.push(batch);
            return false;
        }
        if batch % 3 == 2 {
            if !copy_bulk(client, batch).await {
                self.unknown_bulks.push(batch);
                return false;
            }
            self.bulks.push(batch);
        }
        if batch % 5 == 0 {
            let sql = format!("DELETE FROM ledger WHERE batch = {batch}");
            let deleted = client.batch_execute(&sql).await.is_ok();
            self.acknowledged.retain(|b| *b != batch);
            if deleted {
                self.deleted.push(batch);
            } else {
                self.unknown.push(batch);
                return false;
            }
        }
        true
    }

    /// Compares what is there with what was acknowledged, and every view with its query.
    pub async fn verify(&mut self, server: &Server) -> Result<(), String> {
        let client = server.connect().await.map_err(|e| e.to_string())?;
        // A view whose creation was under way goes on being created, and cannot be read before.
        client.batch_execute("WAIT").await.map_err(|e| e.to_string())?;
        let counts =
            suite::rows(&client, "SELECT batch, count(*) FROM ledger GROUP BY batch").await?;
        let count = |batch: i64| {
            let found = counts.iter().find(|r| r[0] == batch.to_string());
            found.map_or(0, |r| r[1].parse().unwrap_or(-1))
        };
        for &batch in &self.acknowledged {
            let n = count(batch);
            if n != BATCH {
                return Err(format!("acknowledged batch {batch} has {n} of {BATCH} rows"));
            }
        }
        for &batch in &self.deleted {
            if count(batch) != 0 {
                return Err(format!("batch {batch} is back after its acknowledged deletion"));
            }
        }
        for batch in std::mem::take(&mut self.unknown) {
            match count(batch) {
                0 => self.deleted.push(batch),
                n if n == BATCH => self.acknowledged.push(batch),
                n => return Err(format!("batch {batch} is torn: {n} of {BATCH} rows")),
            }
        }
        if let Some(row) =
            counts.iter().find(|r| r[0].parse().is_ok_and(|b: i64| b >= self.next_batch))
        {
            return Err(format!("batch {} was never written", row[0]));
        }
        let x = suite::rows(&client, "SELECT x FROM counter WHERE id = 1").await?;
        let x: i64 = x[0][0].parse().map_err(|_| "the counter is not a number".to_string())?;
        let range = self.increments..=self.increments + self.unknown_increments;
        if !range.contains(&x) {
            return Err(format!("the counter is {x}, acknowledged increments say {range:?}"));
        }
        self.increments = x;
        self.unknown_increments = 0;
        self.verify_bulks(&client).await?;
        self.verify_money(&client).await?;
        self.verify_wide(&client).await?;
        // The eighth comes and goes.
        let views = suite::check_views(&client).await?;
        if !(7..=8).contains(&views) {
            return Err(format!("{views} of 7 views are there"));
        }
        // It goes on from there.
        if !self.batch(&client).await {
            return Err("a statement after the restart failed".to_string());
        }
        suite::flush(&client).await?;
        for (from, to) in [("ledger", "copied"), ("seldom", "seldom_copied")] {
            let mut tables = Vec::new();
            for table in [from, to] {
                let mut rows = suite::rows(&client, &format!("SELECT * FROM {table}")).await?;
                rows.sort();
                tables.push(rows);
            }
            if tables[0] != tables[1] {
                return Err(format!("{to} is not {from}: {tables:?}"));
            }
        }
        let views = suite::check_views(&client).await?;
        if views < 7 {
            return Err(format!("{views} of 7 views are there after a statement"));
        }
        Ok(())
    }

    /// A large COPY is there wholly or not at all.
    async fn verify_bulks(&mut self, client: &Client) -> Result<(), String> {
        let counts = suite::rows(client, "SELECT part, n FROM parts").await?;
        let count = |part: i64| {
            let found = counts.iter().find(|r| r[0] == part.to_string());
            found.map_or(0, |r| r[1].parse().unwrap_or(-1))
        };
        if let Some(part) = self.bulks.iter().find(|p| count(**p) != BULK) {
            return Err(format!("acknowledged COPY {part} has {} of {BULK} rows", count(*part)));
        }
        for part in std::mem::take(&mut self.unknown_bulks) {
            match count(part) {
                0 => {}
                n if n == BULK => self.bulks.push(part),
                n => return Err(format!("COPY {part} is torn: {n} of {BULK} rows")),
            }
        }
        Ok(())
    }

    /// Each session's batches are there one after the other, whole, up to the last that was acknowledged or the one
    /// behind it.
    async fn verify_wide(&mut self, client: &Client) -> Result<(), String> {
        let sql = "SELECT session, count(*), max(batch), min(n), max(n) FROM wide_batches GROUP BY session";
        let found = suite::rows(client, sql).await?;
        for (session, last) in self.wide.iter_mut().enumerate() {
            let row = found.iter().find(|r| r[0] == session.to_string());
            let number = |i: usize| row.map_or(Ok(0), |r| r[i].parse::<i64>());
            let numbers = [1, 2, 3, 4].map(number);
            let [Ok(batches), Ok(newest), Ok(least), Ok(most)] = numbers else {
                return Err(format!("{row:?}"));
            };
            let whole = batches == 0 || least == WIDE && most == WIDE;
            if !whole || batches != newest || !(*last..=*last + 1).contains(&newest) {
                return Err(format!("session {session} was acknowledged {last} batches: {row:?}"));
            }
            *last = newest;
        }
        Ok(())
    }

    /// A transaction over two tables is in both or in neither.
    async fn verify_money(&mut self, client: &Client) -> Result<(), String> {
        let sql =
            "SELECT (SELECT sum(n) FROM cash), (SELECT sum(n) FROM bank), (SELECT n FROM money)";
        let rows = suite::rows(client, sql).await?;
        let number = |i: usize| rows[0][i].parse::<i64>().map_err(|_| format!("{rows:?}"));
        let (cash, bank, both) = (number(0)?, number(1)?, number(2)?);
        let all = 2 * ACCOUNTS * BALANCE;
        if cash + bank != all || both != all {
            return Err(format!(
                "{cash} in cash and {bank} in the bank, {both} together, not {all}"
            ));
        }
        let moved = bank - ACCOUNTS * BALANCE;
        let range = self.moved..=self.moved + self.unknown_moved;
        if !range.contains(&moved) {
            return Err(format!("{moved} was moved, acknowledged transactions say {range:?}"));
        }
        (self.moved, self.unknown_moved) = (moved, 0);
        Ok(())
    }
}

async fn insert(client: &Client, batch: i64) -> bool {
    let rows: Vec<String> =
        (0..BATCH).map(|i| format!("({}, {batch}, {})", batch * 100 + i, i % 3)).collect();
    client.batch_execute(&format!("INSERT INTO ledger VALUES {}", rows.join(", "))).await.is_ok()
}

/// Batches behind `last`, each whole or not at all; the last that was acknowledged.
async fn write_wide(server: &Server, until: Instant, session: i32, last: i64) -> i64 {
    let mut last = last;
    let Ok(client) = server.connect().await else { return last };
    while Instant::now() < until {
        let batch = last + 1;
        let rows = format!("SELECT {session}, {batch}, x, repeat('x', 40)");
        let insert = format!("INSERT INTO wide {rows} FROM generate_series(1, {WIDE}) AS s(x)");
        if client.batch_execute(&insert).await.is_err() {
            return last;
        }
        last = batch;
    }
    last
}

async fn copy(client: &Client, batch: i64) -> bool {
    let Ok(sink) = client.copy_in("COPY ledger FROM STDIN").await else { return false };
    futures::pin_mut!(sink);
    let lines: String =
        (0..BATCH).map(|i| format!("{}\t{batch}\t{}\n", batch * 100 + i, i % 3)).collect();
    if sink.send(bytes::Bytes::from(lines)).await.is_err() {
        return false;
    }
    sink.finish().await.is_ok_and(|n| n == BATCH as u64)
}

async fn copy_bulk(client: &Client, part: i64) -> bool {
    let Ok(sink) = client.copy_in("COPY bulk FROM STDIN").await else { return false };
    futures::pin_mut!(sink);
    for from in (0..BULK).step_by(100) {
        let pad = "x".repeat(64);
        let lines: String =
            (from..from + 100).map(|i| format!("{}\t{part}\t{pad}\n", part * 10_000 + i)).collect();
        if sink.send(bytes::Bytes::from(lines)).await.is_err() {
            return false;
        }
    }
    sink.finish().await.is_ok_and(|n| n == BULK as u64)
}

/// A view that is built and dropped again and again; errors say that the server is gone.
async fn create_and_drop(server: &Server, until: Instant) {
    let Ok(client) = server.connect().await else { return };
    const DROP: &str = "DROP MATERIALIZED VIEW IF EXISTS fleeting";
    const CREATE: &str = "CREATE MATERIALIZED VIEW fleeting AS \
        SELECT v, count(*) AS n, max(id) AS newest FROM ledger GROUP BY v";
    while Instant::now() < until {
        if client.batch_execute(DROP).await.is_err() || client.batch_execute(CREATE).await.is_err()
        {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Views that are computed anew again and again, one that the other reads among them, and a sink that is paused until it
/// is detached.
async fn rebuild(server: &Server, until: Instant) {
    let Ok(client) = server.connect().await else { return };
    if client.batch_execute("ALTER SINK left_behind REBUILD").await.is_err() {
        return;
    }
    while Instant::now() < until {
        for view in ["per_batch", "sizes"] {
            let sql = format!("ALTER MATERIALIZED VIEW {view} REBUILD");
            if client.batch_execute(&sql).await.is_err() {
                return;
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Moves money from one table to the other, one coin a transaction. Sessions begin at different
/// tables and meet at the same rows, so some are told to try again.
async fn move_money(
    server: &Server,
    until: Instant,
    first: i64,
    done: &AtomicI64,
    unknown: &AtomicI64,
) {
    let Ok(client) = server.connect().await else { return };
    let mut id = first;
    while Instant::now() < until {
        id = id % ACCOUNTS + 1;
        let take = format!("UPDATE cash SET n = n - 1 WHERE id = {id}");
        let give = format!("UPDATE bank SET n = n + 1 WHERE id = {id}");
        let (one, two) = if first == 1 { (take, give) } else { (give, take) };
        let transaction = async {
            client.batch_execute("BEGIN").await?;
            client.batch_execute(&one).await?;
            client.batch_execute(&two).await?;
            client.batch_execute("COMMIT").await
        };
        match transaction.await {
            Ok(()) => done.fetch_add(1, Ordering::Relaxed),
            Err(e) if e.as_db_error().is_some_and(|d| d.code().code() == "40001") => {
                if client.batch_execute("ROLLBACK").await.is_err() {
                    return;
                }
                0
            }
            Err(_) => {
                unknown.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
    }
}

async fn raise_counter(server: &Server, until: Instant, done: &AtomicI64, unknown: &AtomicI64) {
    let Ok(client) = server.connect().await else { return };
    while Instant::now() < until {
        match client.batch_execute("UPDATE counter SET x = x + 1 WHERE id = 1").await {
            Ok(()) => done.fetch_add(1, Ordering::Relaxed),
            // A refused statement was not executed; a broken connection leaves it open.
            Err(e) if e.as_db_error().is_some_and(|d| d.code().code() == "40001") => 0,
            Err(_) => {
                unknown.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
    }
}
