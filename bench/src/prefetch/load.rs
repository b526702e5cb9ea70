//! Rows as they arrive: in closed loop to find the most a mode can take, and at a fixed rate to see how long they take.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::try_join_all;
use tokio::sync::Mutex;
use tokio_postgres::{Client, NoTls, Statement};

use super::queries::Query;
use super::times::{Epochs, Latencies, Sent};
use super::world::{Running, World};
use crate::nexmark::connect;
use crate::usage::{Mark, Usage};

/// Rows of one statement at most.
const STATEMENT_ROWS: u64 = 4_096;
/// Rows of the first batch of the closed loop, and of the largest.
const FIRST_BATCH: u64 = 16;
const LARGEST_BATCH: u64 = 1 << 16;
/// A row that is not visible by then is an error.
const LIMIT: Duration = Duration::from_secs(60);
/// How often the worker is asked for its newest epochs.
const LOOK: Duration = Duration::from_millis(20);
/// The first rows, while connections and indexes are opened, are not measured: this part of them.
const WARM_UP: f64 = 0.2;

/// Connections that insert rows.
pub struct Sessions(Vec<(Client, Statement)>);

impl Sessions {
    pub async fn open(world: &World, running: &Running, count: usize) -> Result<Sessions, String> {
        let sql = Query::insert(world.keys, "$1::bigint", "$2::bigint");
        let open = || async {
            let client = connect(running.server.address.port()).await?;
            let statement = client.prepare(&sql).await.map_err(|e| told(&e))?;
            Ok::<_, String>((client, statement))
        };
        Ok(Sessions(try_join_all((0..count.max(1)).map(|_| open())).await?))
    }
}

fn told(error: &tokio_postgres::Error) -> String {
    error.as_db_error().map_or_else(|| error.to_string(), |db| db.to_string())
}

async fn insert(session: &(Client, Statement), first: u64, rows: u64) -> Result<(), String> {
    let (client, statement) = session;
    let last = (first + rows) as i64 - 1;
    client.execute(statement, &[&(first as i64), &last]).await.map_err(|e| told(&e))?;
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

/// Until the result has everything that is acknowledged.
async fn wait_visible(running: &Running) -> Result<(), String> {
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

/// The most rows a second: of batches that double, each visible before the next is sent, the best rate.
pub async fn closed(
    world: &World,
    running: &Running,
    sessions: &Sessions,
    budget: Duration,
) -> Result<f64, String> {
    let (begun, mut next, mut best) = (Instant::now(), world.first_row(), 0.0f64);
    let mut batch = FIRST_BATCH;
    while begun.elapsed() < budget {
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
        best = best.max(batch as f64 / sent.elapsed().as_secs_f64());
        next += batch;
        batch = (batch * 2).min(LARGEST_BATCH);
    }
    Ok(best)
}

/// What an open load has measured.
pub struct Measured {
    pub latencies: Latencies,
    pub rows: u64,
    pub usage: Usage,
    pub operators: Operators,
    pub epochs: u64,
}

/// Sums over all operators of the views.
#[derive(Clone, Copy, Default)]
pub struct Operators {
    /// Keys that a row waited for.
    pub missed: u64,
    /// Keys that were read ahead, those of them that a row had to wait for all the same, and those that no row needed.
    pub prefetched: u64,
    pub late: u64,
    pub unused: u64,
}

impl Operators {
    fn now(running: &Running) -> Operators {
        let views = running.relations.iter().skip(1);
        let stats = views.filter_map(|v| running.server.worker.stats(*v));
        let each = stats.flat_map(|s| s.operators).map(|o| o.lookahead);
        each.fold(Operators::default(), |sum, one| Operators {
            missed: sum.missed + one.missed,
            late: sum.late + one.late,
            prefetched: sum.prefetched + one.prefetched,
            unused: sum.unused + one.unused,
        })
    }

    fn since(self, before: Operators) -> Operators {
        Operators {
            missed: self.missed.saturating_sub(before.missed),
            late: self.late.saturating_sub(before.late),
            prefetched: self.prefetched.saturating_sub(before.prefetched),
            unused: self.unused.saturating_sub(before.unused),
        }
    }
}

/// Which row is due next.
struct Arrivals {
    begun: Instant,
    every: Duration,
    first: u64,
    count: u64,
    /// How many have been sent.
    sent: Mutex<u64>,
}

impl Arrivals {
    fn due(&self, n: u64) -> Instant {
        self.begun + self.every.mul_f64(n as f64)
    }

    /// Waits for the next row; the numbers of those that are due then. One session at a time waits.
    async fn next(&self) -> Option<(u64, u64)> {
        let mut sent = self.sent.lock().await;
        if *sent >= self.count {
            return None;
        }
        tokio::time::sleep_until(self.due(*sent).into()).await;
        let due = self.begun.elapsed().div_duration_f64(self.every) as u64 + 1;
        let rows = due.saturating_sub(*sent).clamp(1, STATEMENT_ROWS).min(self.count - *sent);
        let n = *sent;
        *sent += rows;
        Some((n, rows))
    }

    async fn drive(&self, session: &(Client, Statement)) -> Result<Vec<Sent>, String> {
        let mut all = Vec::new();
        while let Some((n, rows)) = self.next().await {
            insert(session, self.first + n, rows).await?;
            let acknowledged = Instant::now();
            all.push(Sent { due: self.due(n), every: self.every, rows, acknowledged });
        }
        Ok(all)
    }
}

/// Rows at a fixed rate, until all are visible.
pub async fn open(
    world: &World,
    running: &Running,
    sessions: &Sessions,
    (rate, count): (f64, u64),
) -> Result<Measured, String> {
    let arrivals = Arrivals {
        begun: Instant::now(),
        every: Duration::from_secs_f64(1.0 / rate),
        first: world.first_row(),
        count,
        sent: Mutex::new(0),
    };
    let epochs = Arc::new(Mutex::new(Epochs::of(&running.relations)));
    let from = arrivals.due((count as f64 * WARM_UP) as u64);
    let looking = async {
        loop {
            epochs.lock().await.look(&running.server.worker);
            tokio::time::sleep(LOOK).await;
        }
    };
    let sending = async {
        let sent = try_join_all(sessions.0.iter().map(|s| arrivals.drive(s))).await?;
        wait_visible(running).await?;
        // The worker is told of a commit after it can be read.
        tokio::time::sleep(2 * LOOK).await;
        Ok::<_, String>(sent.into_iter().flatten().collect::<Vec<_>>())
    };
    let marking = async {
        tokio::time::sleep_until(from.into()).await;
        running.sim.reset_stats();
        (Mark::now(), Operators::now(running))
    };
    let measured = async { futures::join!(sending, marking) };
    let (sent, (mark, before)) = tokio::select! {
        measured = measured => measured,
        () = looking => return Err("the worker is not asked any more".to_owned()),
    };
    let (sent, usage) = (sent?, mark.elapsed());
    let mut epochs = epochs.lock().await;
    epochs.look(&running.server.worker);
    let latencies = Latencies::of(&epochs, &sent, from)?;
    Ok(Measured {
        rows: latencies.rows(),
        latencies,
        usage,
        operators: Operators::now(running).since(before),
        epochs: epochs.count(from, Instant::now()),
    })
}
