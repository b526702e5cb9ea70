//! What can be accounted for exactly: transfers between two tables, each with a row of its own; batches of rows
//! without a key; counters. What was acknowledged is there once, what was refused is not, and what is not known is
//! there wholly or not at all.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

use tokio_postgres::Client;

use crate::client::{Fate, Tally, describe, numbers};
use crate::locked;
use crate::rng::Rng;

const ACCOUNTS: i64 = 6;
const BALANCE: i64 = 1_000;
const COUNTERS: usize = 3;
/// Rows of a batch.
const BATCH: i64 = 3;
/// More transfers than this are folded into the balances.
const MOST: usize = 3_000;

pub const SCHEMA: &[&str] = &[
    "CREATE TABLE giver (id int PRIMARY KEY, n bigint NOT NULL)",
    "CREATE TABLE taker (id int PRIMARY KEY, n bigint NOT NULL)",
    "CREATE TABLE transfer (id bigint PRIMARY KEY, giver int, taker int, amount bigint)",
    "CREATE TABLE batch (id bigint, part int)",
    "CREATE TABLE counter (id int PRIMARY KEY, x bigint NOT NULL)",
    "INSERT INTO giver SELECT g, 1000 FROM generate_series(0, 5) AS t(g)",
    "INSERT INTO taker SELECT g, 1000 FROM generate_series(0, 5) AS t(g)",
    "INSERT INTO counter VALUES (0, 0), (1, 0), (2, 0)",
    "CREATE MATERIALIZED VIEW money AS SELECT sum(n)::bigint AS n FROM (SELECT n FROM giver UNION ALL SELECT n FROM taker) b",
    "CREATE MATERIALIZED VIEW counted AS SELECT sum(x)::bigint AS x FROM counter",
    // Empty at every epoch.
    "CREATE MATERIALIZED VIEW torn AS \
        SELECT 'giver' AS side, g.id, g.n FROM giver g LEFT JOIN (SELECT giver AS k, sum(amount) AS s FROM transfer GROUP BY giver) t \
        ON t.k = g.id WHERE g.n + coalesce(t.s, 0) <> 1000 UNION ALL \
        SELECT 'taker', g.id, g.n FROM taker g LEFT JOIN (SELECT taker AS k, sum(amount) AS s FROM transfer GROUP BY taker) t \
        ON t.k = g.id WHERE g.n - coalesce(t.s, 0) <> 1000",
    "CREATE MATERIALIZED VIEW torn_batch AS SELECT id, count(*) AS n FROM batch GROUP BY id HAVING count(*) <> 3",
    "CREATE MATERIALIZED VIEW by_pair AS SELECT giver, taker, count(*) AS n, sum(amount) AS s, max(id) AS last \
        FROM transfer GROUP BY giver, taker",
];

#[derive(Clone, Debug, PartialEq, Eq)]
struct Transfer {
    giver: i64,
    taker: i64,
    amount: i64,
    fate: Fate,
}

#[derive(Default)]
pub struct Accounts {
    next: AtomicI64,
    transfers: Mutex<BTreeMap<i64, Transfer>>,
    batches: Mutex<BTreeMap<i64, Fate>>,
    counters: [Counter; COUNTERS],
}

#[derive(Default)]
struct Counter {
    acknowledged: AtomicI64,
    begun: AtomicI64,
    refused: AtomicI64,
}

impl Accounts {
    /// Transfers money until the time is over or the server is gone.
    pub async fn transfer(&self, client: &Client, tally: &Tally, mut rng: Rng, until: Instant) {
        while Instant::now() < until && !client.is_closed() {
            let id = self.next.fetch_add(1, Ordering::Relaxed);
            let [giver, taker] = [rng.between(0, ACCOUNTS - 1), rng.between(0, ACCOUNTS - 1)];
            let amount = rng.between(1, 9);
            let mut steps = [
                format!("UPDATE giver SET n = n - {amount} WHERE id = {giver}"),
                format!("UPDATE taker SET n = n + {amount} WHERE id = {taker}"),
                format!("INSERT INTO transfer VALUES ({id}, {giver}, {taker}, {amount})"),
            ];
            steps.rotate_left(rng.below(3));
            let begun = Transfer { giver, taker, amount, fate: Fate::Unknown };
            locked(&self.transfers).insert(id, begun);
            let fate = match rng.chance(50) {
                true => tally.block(client, &steps).await,
                false => tally.execute(client, &steps.join("; ")).await,
            };
            if let Some(transfer) = locked(&self.transfers).get_mut(&id) {
                transfer.fate = fate;
            }
        }
    }

    /// Writes batches of rows that nothing keeps from coming twice.
    pub async fn batch(&self, client: &Client, tally: &Tally, mut rng: Rng, until: Instant) {
        while Instant::now() < until && !client.is_closed() {
            let id = self.next.fetch_add(1, Ordering::Relaxed);
            locked(&self.batches).insert(id, Fate::Unknown);
            let fate = if rng.chance(30) {
                let lines = (0..BATCH).map(|i| format!("{id}\t{i}\n")).collect();
                tally.copy(client, "batch", lines).await
            } else {
                let rows: Vec<String> = (0..BATCH).map(|i| format!("({id}, {i})")).collect();
                let sql = format!("INSERT INTO batch VALUES {}", rows.join(", "));
                tally.execute(client, &sql).await
            };
            locked(&self.batches).insert(id, fate);
            tokio::time::sleep(std::time::Duration::from_millis(rng.below(60) as u64)).await;
        }
    }

    /// Raises counters and reads them: a read sees all that was acknowledged to anybody before it began.
    pub async fn count(&self, client: &Client, tally: &Tally, mut rng: Rng, until: Instant) {
        while Instant::now() < until && !client.is_closed() {
            let of = rng.below(COUNTERS);
            if rng.chance(50) {
                let counter = &self.counters[of];
                counter.begun.fetch_add(1, Ordering::AcqRel);
                let sql = format!("UPDATE counter SET x = x + 1 WHERE id = {of}");
                match tally.execute(client, &sql).await {
                    Fate::Done => counter.acknowledged.fetch_add(1, Ordering::AcqRel),
                    Fate::Refused => counter.refused.fetch_add(1, Ordering::AcqRel),
                    Fate::Unknown => 0,
                };
                continue;
            }
            let (sql, range) = match rng.chance(50) {
                true => (format!("SELECT x FROM counter WHERE id = {of}"), of..of + 1),
                false => ("SELECT x FROM counted".to_string(), 0..COUNTERS),
            };
            let sum = |of: fn(&Counter) -> &AtomicI64| -> i64 {
                self.counters[range.clone()].iter().map(|c| of(c).load(Ordering::Acquire)).sum()
            };
            let least = sum(|c| &c.acknowledged);
            let read = numbers(client, &sql).await;
            if tally.fate(&sql, &read) != Fate::Done {
                continue;
            }
            let most = sum(|c| &c.begun);
            let x = read.ok().and_then(|r| r.first().and_then(|r| r.first().copied()));
            if !x.is_some_and(|x| (least..=most).contains(&x)) {
                tally.is_wrong(format!("{sql} = {x:?}, and {least} to {most} were counted"));
            }
        }
    }

    /// Compares what is there with the books, while nobody writes; what was unknown is known then.
    pub async fn settle(&self, client: &Client) -> Result<(), String> {
        let failed = |e| describe(&e);
        let sql = "SELECT id, giver, taker, amount FROM transfer";
        let found = numbers(client, sql).await.map_err(failed)?;
        self.settle_transfers(found)?;
        let sql = "SELECT id, count(*) FROM batch GROUP BY id";
        self.settle_batches(numbers(client, sql).await.map_err(failed)?)?;
        for (id, counter) in self.counters.iter().enumerate() {
            let sql = format!("SELECT x FROM counter WHERE id = {id}");
            let found = numbers(client, &sql).await.map_err(failed)?;
            let x = found.first().map_or(i64::MIN, |r| r[0]);
            let least = counter.acknowledged.load(Ordering::Acquire);
            let refused = counter.refused.swap(0, Ordering::AcqRel);
            let most = counter.begun.load(Ordering::Acquire) - refused;
            if !(least..=most).contains(&x) {
                return Err(format!("counter {id} is {x}, not {least} to {most}"));
            }
            counter.acknowledged.store(x, Ordering::Release);
            counter.begun.store(x, Ordering::Release);
        }
        self.balances(client).await?;
        self.fold(client).await
    }

    fn settle_transfers(&self, found: Vec<Vec<i64>>) -> Result<(), String> {
        let mut transfers = locked(&self.transfers);
        let mut found: BTreeMap<i64, Vec<i64>> =
            found.into_iter().map(|r| (r[0], r[1..].to_vec())).collect();
        for (id, transfer) in transfers.iter_mut() {
            match (found.remove(id), transfer.fate) {
                (None, Fate::Done) => return Err(format!("transfer {id} is lost: {transfer:?}")),
                (Some(_), Fate::Refused) => {
                    return Err(format!("transfer {id} was refused and is there: {transfer:?}"));
                }
                (Some(row), _) if row != [transfer.giver, transfer.taker, transfer.amount] => {
                    return Err(format!("transfer {id} is {row:?}, not {transfer:?}"));
                }
                (Some(_), _) => transfer.fate = Fate::Done,
                (None, _) => transfer.fate = Fate::Refused,
            }
        }
        transfers.retain(|_, t| t.fate == Fate::Done);
        match found.pop_first() {
            Some((id, row)) => Err(format!("transfer {id} was never made, or is back: {row:?}")),
            None => Ok(()),
        }
    }

    fn settle_batches(&self, found: Vec<Vec<i64>>) -> Result<(), String> {
        let mut batches = locked(&self.batches);
        let mut found: BTreeMap<i64, i64> = found.into_iter().map(|r| (r[0], r[1])).collect();
        for (id, fate) in batches.iter_mut() {
            let n = found.remove(id).unwrap_or(0);
            let right = match fate {
                Fate::Done => n == BATCH,
                Fate::Refused => n == 0,
                Fate::Unknown => n == 0 || n == BATCH,
            };
            if !right {
                return Err(format!("batch {id} has {n} of {BATCH} rows, and was {fate:?}"));
            }
            *fate = if n == 0 { Fate::Refused } else { Fate::Done };
        }
        batches.retain(|_, fate| *fate == Fate::Done);
        match found.pop_first() {
            Some((id, n)) => Err(format!("batch {id} was never written, or is back: {n} rows")),
            None => Ok(()),
        }
    }

    async fn balances(&self, client: &Client) -> Result<(), String> {
        let mut given = vec![BALANCE; ACCOUNTS as usize];
        let mut taken = given.clone();
        for transfer in locked(&self.transfers).values() {
            given[transfer.giver as usize] -= transfer.amount;
            taken[transfer.taker as usize] += transfer.amount;
        }
        for (table, expected) in [("giver", given), ("taker", taken)] {
            let sql = format!("SELECT n FROM {table} ORDER BY id");
            let found = numbers(client, &sql).await.map_err(|e| describe(&e))?;
            if found.concat() != expected {
                return Err(format!("{table} has {found:?}, the transfers say {expected:?}"));
            }
        }
        Ok(())
    }

    /// Begins anew in one transaction once there are many transfers.
    async fn fold(&self, client: &Client) -> Result<(), String> {
        if locked(&self.transfers).len() > MOST {
            let sql = format!(
                "DELETE FROM transfer; UPDATE giver SET n = {BALANCE}; UPDATE taker SET n = {BALANCE}"
            );
            client.batch_execute(&sql).await.map_err(|e| describe(&e))?;
            locked(&self.transfers).clear();
        }
        if locked(&self.batches).len() > MOST {
            client.batch_execute("DELETE FROM batch").await.map_err(|e| describe(&e))?;
            locked(&self.batches).clear();
        }
        Ok(())
    }
}
