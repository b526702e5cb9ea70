//! Sessions that insert rows, and rows in closed loop to find the most that a mode can take.

use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::try_join_all;
use tokio_postgres::{Client, NoTls, Statement};

use super::operators::{NO_PLACE, places};
use super::queries::{Keys, Query, Row};
use super::world::{Running, World};
use crate::nexmark::connect;

/// Rows of one statement at most.
pub const STATEMENT_ROWS: u64 = 4_096;
/// Rows of the first batch of the closed loop, and of the largest; each is so much larger than the one before.
const FIRST_BATCH: u64 = 16;
const LARGEST_BATCH: u64 = 1 << 16;
const GROWTH: u64 = 4;
/// A batch that has raised the rate by so much is followed by another, up to so many times the budget.
const RAISED: f64 = 1.1;
const MOST_BUDGETS: u32 = 3;
/// A row that is not visible by then is an error.
const LIMIT: Duration = Duration::from_secs(60);

/// Connections that insert rows.
pub struct Sessions(Vec<Session>);

pub struct Session {
    client: Client,
    keys: Keys,
    /// Inserts one row.
    one: Statement,
    /// Inserts the rows from a number to another.
    several: Statement,
}

impl Sessions {
    pub async fn open(keys: &Keys, running: &Running, count: usize) -> Result<Sessions, String> {
        let sql = Query::insert(keys, "$1::bigint", "$2::bigint");
        let open = || async {
            let client = connect(running.server.address.port()).await?;
            let one = client.prepare(Query::INSERT_ROW).await.map_err(|e| told(&e))?;
            let several = client.prepare(&sql).await.map_err(|e| told(&e))?;
            Ok::<_, String>(Session { client, keys: *keys, one, several })
        };
        Ok(Sessions(try_join_all((0..count.max(1)).map(|_| open())).await?))
    }

    pub fn iter(&self) -> impl Iterator<Item = &Session> {
        self.0.iter()
    }
}

fn told(error: &tokio_postgres::Error) -> String {
    error.as_db_error().map_or_else(|| error.to_string(), |db| db.to_string())
}

pub async fn insert(session: &Session, first: u64, rows: u64) -> Result<(), String> {
    let Session { client, keys, one, several } = session;
    if rows == 1 {
        let Row { id, keys: [a, b, c, d, e], price, time, pad } = &Row::new(keys, first);
        client.execute(one, &[id, a, b, c, d, e, price, time, pad]).await
    } else {
        let last = (first + rows) as i64 - 1;
        client.execute(several, &[&(first as i64), &last]).await
    }
    .map_err(|e| told(&e))?;
    Ok(())
}

/// Somebody who waits for the result, so that it is cut at once.
pub struct Reader(tokio_postgres::CancelToken);

impl Reader {
    pub async fn open(world: &World, running: &Running) -> Result<Reader, String> {
        let client = connect(running.server.address.port()).await?;
        let sql = format!("SUBSCRIBE TO {} WITH (snapshot = false)", world.query.result());
        let cancel = client.cancel_token();
        let rows = client.copy_out(&sql).await.map_err(|e| told(&e))?;
        tokio::spawn(async move {
            // The connection ends with its client.
            let _client = client;
            futures::pin_mut!(rows);
            while let Some(Ok(_)) = rows.next().await {}
        });
        Ok(Reader(cancel))
    }

    pub async fn close(self) -> Result<(), String> {
        self.0.cancel_query(NoTls).await.map_err(|e| e.to_string())
    }
}

/// How often each key comes until all are taken to be in memory: of some queries a filter drops two rows of three.
const PASSES: u64 = 30;
/// Batches of one row each, after which hints are no longer wanted of what has no reads; and how many more are tried.
const QUIET_BATCHES: usize = 64;
const MORE_BATCHES: usize = 1_000;

/// Has the state of all keys read, and goes on until no operator wants hints; the number of the next row. The store must
/// answer at once, or it takes long.
pub async fn warm(
    world: &World,
    running: &Running,
    sessions: &Sessions,
    keys: &Keys,
) -> Result<u64, String> {
    let session = sessions.0.first().ok_or("there is no session")?;
    let begin = world.first_row();
    let mut next = begin + PASSES * keys.count;
    for first in (begin..next).step_by(STATEMENT_ROWS as usize) {
        insert(session, first, STATEMENT_ROWS.min(next - first)).await?;
    }
    for batch in 0..QUIET_BATCHES + MORE_BATCHES {
        wait_visible(running).await?;
        if batch >= QUIET_BATCHES && places(running) == NO_PLACE {
            return Ok(next);
        }
        insert(session, next, 1).await?;
        next += 1;
    }
    Err(format!("hints of {} are wanted though its state is in memory", world.query.name))
}

/// Until the result has everything that is acknowledged.
pub async fn wait_visible(running: &Running) -> Result<(), String> {
    let meta = &running.server.meta;
    let table = running.relations.first().copied().unwrap_or_default();
    let begun = Instant::now();
    let wanted = meta.frontier(table);
    while meta.frontier(running.view()) < wanted {
        if begun.elapsed() > LIMIT {
            return Err("the view does not catch up".to_owned());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// The most rows a second: of batches that grow, each visible before the next is sent, the best rate. Goes on for longer
/// than the budget while larger batches still raise the rate: over a slow store the first ones take all of it.
pub async fn closed(
    world: &World,
    running: &Running,
    sessions: &Sessions,
    budget: Duration,
) -> Result<f64, String> {
    let (begun, mut next, mut best) = (Instant::now(), world.first_row(), 0.0f64);
    let mut batch = FIRST_BATCH;
    let mut is_rising = true;
    while begun.elapsed() < budget || is_rising && begun.elapsed() < budget * MOST_BUDGETS {
        let sent = Instant::now();
        let share = batch.div_ceil(sessions.0.len() as u64).min(STATEMENT_ROWS);
        let firsts = (next..next + batch).step_by(share as usize);
        let parts: Vec<_> = firsts.map(|f| (f, share.min(next + batch - f))).collect();
        let each = sessions.0.iter().enumerate().map(|(i, session)| {
            let own = parts.iter().skip(i).step_by(sessions.0.len());
            async move {
                for &(first, rows) in own {
                    insert(session, first, rows).await?;
                }
                Ok::<_, String>(())
            }
        });
        try_join_all(each).await?;
        wait_visible(running).await?;
        let rate = batch as f64 / sent.elapsed().as_secs_f64();
        is_rising = rate > best * RAISED;
        best = best.max(rate);
        next += batch;
        batch = (batch * GROWTH).min(LARGEST_BATCH);
    }
    Ok(best)
}
