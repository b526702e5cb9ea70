//! Rows that arrive at a fixed rate, whatever becomes of those before.

use std::time::{Duration, Instant};

use futures::future::try_join_all;
use tokio::sync::Mutex;

use super::load::{STATEMENT_ROWS, Sessions, insert, wait_visible};
use super::operators::{Operators, late_epochs};
use super::times::{Epochs, Recording, Sent};
use super::world::Running;
use crate::usage::{Mark, Usage};

/// How often the worker is asked for its newest epochs.
const LOOK: Duration = Duration::from_millis(20);
/// The first rows, while connections and indexes are opened, are not measured: this part of them.
pub const WARM_UP: f64 = 0.2;

/// Which row is due next.
pub struct Arrivals {
    begun: Instant,
    every: Duration,
    first: u64,
    count: u64,
    /// How many have been sent.
    sent: Mutex<u64>,
}

impl Arrivals {
    /// `count` rows from the number `first` on, so many a second.
    pub fn new(begun: Instant, rate: f64, first: u64, count: u64) -> Arrivals {
        let every = Duration::from_secs_f64(1.0 / rate);
        Arrivals { begun, every, first, count, sent: Mutex::new(0) }
    }

    fn due(&self, n: u64) -> Instant {
        self.begun + self.every.mul_f64(n as f64)
    }

    /// When the row after the last one would be due.
    pub fn end(&self) -> Instant {
        self.due(self.count)
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

    /// Sends all rows, until the last statement has its answer.
    pub async fn drive(&self, sessions: &Sessions) -> Result<Vec<Sent>, String> {
        let each = sessions.iter().map(|session| async move {
            let mut all = Vec::new();
            while let Some((n, rows)) = self.next().await {
                let (due, sent) = (self.due(n), Instant::now());
                insert(session, self.first + n, rows).await?;
                let acknowledged = Instant::now();
                all.push(Sent { due, every: self.every, rows, sent, acknowledged });
            }
            Ok::<_, String>(all)
        });
        Ok(try_join_all(each).await?.into_iter().flatten().collect())
    }
}

/// Runs `sending` and looks up the epochs meanwhile, and once more when all rows are visible.
pub async fn record(
    running: &Running,
    sending: impl Future<Output = Result<Vec<Sent>, String>>,
    from: Instant,
) -> Result<Recording, String> {
    let mut epochs = Epochs::of(&running.relations);
    let looking = async {
        loop {
            epochs.look(&running.server.worker);
            tokio::time::sleep(LOOK).await;
        }
    };
    let sending = async {
        let sent = sending.await?;
        wait_visible(running).await?;
        // The worker is told of a commit after it can be read.
        tokio::time::sleep(2 * LOOK).await;
        Ok::<_, String>(sent)
    };
    let sent = tokio::select! {
        sent = sending => sent?,
        () = looking => Vec::new(),
    };
    epochs.look(&running.server.worker);
    Ok(Recording { epochs, sent, from })
}

/// What an open load has measured.
pub struct Measured {
    pub recording: Recording,
    pub usage: Usage,
    pub operators: Operators,
    /// Of the last epochs, warm-up included where there are few.
    pub late_epochs: Option<f64>,
    pub epochs: u64,
}

/// `count` rows from the number `first` on at a fixed rate, until all are visible.
pub async fn open(
    running: &Running,
    sessions: &Sessions,
    first: u64,
    (rate, count): (f64, u64),
) -> Result<Measured, String> {
    let arrivals = Arrivals::new(Instant::now(), rate, first, count);
    let from = arrivals.due((count as f64 * WARM_UP) as u64);
    let marking = async {
        tokio::time::sleep_until(from.into()).await;
        running.sim.reset_stats();
        (Mark::now(), Operators::now(running))
    };
    let recording = record(running, arrivals.drive(sessions), from);
    let (recording, (mark, before)) = futures::join!(recording, marking);
    let (recording, usage) = (recording?, mark.elapsed());
    Ok(Measured {
        usage,
        operators: Operators::now(running).since(before),
        late_epochs: late_epochs(running),
        epochs: recording.epochs.count(from, Instant::now()),
        recording,
    })
}
