//! A workload whose outcome can be checked: money goes from account to account, each transfer in a transaction that also
//! writes it down under a number of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::one;
use crate::process::connect;

pub const ACCOUNTS: i64 = 20;
const BALANCE: i64 = 100;
/// How long a number of transfers may take, restarts of processes included.
const PROGRESS_LIMIT: Duration = Duration::from_secs(120);

pub async fn create(client: &Client) {
    let sql = format!(
        "CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
         CREATE TABLE transfers (n bigint PRIMARY KEY, payer bigint, payee bigint, note text);
         CREATE MATERIALIZED VIEW totals AS SELECT sum(balance) AS total, count(*) AS accounts FROM accounts;
         CREATE MATERIALIZED VIEW paid AS
           SELECT a.id, count(t.n) AS transfers FROM accounts a LEFT JOIN transfers t ON t.payer = a.id GROUP BY a.id;
         INSERT INTO accounts SELECT x, {BALANCE} FROM generate_series(1, {ACCOUNTS}) AS x(x);"
    );
    for statement in sql.split(';').filter(|s| !s.trim().is_empty()) {
        client.execute(statement, &[]).await.unwrap_or_else(|e| panic!("{statement}: {e:?}"));
    }
}

/// Transfers by number.
#[derive(Default)]
pub struct Outcomes {
    acknowledged: BTreeSet<i64>,
    /// Nobody knows, or the session was lost.
    unknown: BTreeSet<i64>,
    /// How many failed with which error.
    pub errors: BTreeMap<String, usize>,
    /// The longest time that a transfer took until it succeeded or failed.
    pub longest: Duration,
}

/// Two sessions that make transfers until they are ended.
pub struct Transfers {
    addresses: Arc<Mutex<[String; 2]>>,
    outcomes: Arc<Mutex<Outcomes>>,
    acknowledged: watch::Sender<[usize; 2]>,
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

struct Session {
    number: usize,
    addresses: Arc<Mutex<[String; 2]>>,
    outcomes: Arc<Mutex<Outcomes>>,
    acknowledged: watch::Sender<[usize; 2]>,
    stop: watch::Receiver<bool>,
}

impl Transfers {
    pub fn start(addresses: [String; 2]) -> Transfers {
        let (acknowledged, stop) = (watch::Sender::new([0, 0]), watch::Sender::new(false));
        let (addresses, outcomes) = (Arc::new(Mutex::new(addresses)), Arc::default());
        let session = |number| Session {
            number,
            addresses: Arc::clone(&addresses),
            outcomes: Arc::clone(&outcomes),
            acknowledged: acknowledged.clone(),
            stop: stop.subscribe(),
        };
        let tasks = [0, 1].map(|number| tokio::spawn(session(number).run())).into();
        Transfers { addresses, outcomes, acknowledged, stop, tasks }
    }

    /// Frontends are reached elsewhere now.
    pub fn move_to(&self, addresses: [String; 2]) {
        *self.addresses.lock().expect("nobody panics with it") = addresses;
    }

    /// Waits until so many more have been acknowledged.
    pub async fn progress(&self, more: usize) {
        let goal = self.acknowledged.borrow().iter().sum::<usize>() + more;
        let mut acknowledged = self.acknowledged.subscribe();
        let reached = acknowledged.wait_for(|counts| counts.iter().sum::<usize>() >= goal);
        let reached = tokio::time::timeout(PROGRESS_LIMIT, reached).await;
        assert!(reached.is_ok(), "transfers do not go on; errors until now: {}", self.errors());
    }

    /// How many each session has had acknowledged.
    pub fn counts(&self) -> [usize; 2] {
        *self.acknowledged.borrow()
    }

    pub fn errors(&self) -> String {
        format!("{:#?}", self.outcomes.lock().expect("nobody panics with it").errors)
    }

    pub async fn end(self) -> Outcomes {
        self.stop.send_replace(true);
        for task in self.tasks {
            task.await.expect("a session of transfers");
        }
        std::mem::take(&mut *self.outcomes.lock().expect("nobody panics with it"))
    }
}

impl Session {
    async fn run(self) {
        let mut n = self.number as i64;
        while !*self.stop.borrow() {
            let address =
                self.addresses.lock().expect("nobody panics with it")[self.number].clone();
            let Ok(client) = connect(&address).await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            while !*self.stop.borrow() && !client.is_closed() {
                n += 2;
                self.transfer(&client, n).await;
            }
        }
    }

    async fn transfer(&self, client: &Client, n: i64) {
        let (payer, payee) = (n % ACCOUNTS + 1, (n * 7 + 3) % ACCOUNTS + 1);
        let sql = format!(
            "BEGIN;
             UPDATE accounts SET balance = balance - 1 WHERE id = {payer};
             UPDATE accounts SET balance = balance + 1 WHERE id = {payee};
             INSERT INTO transfers VALUES ({n}, {payer}, {payee}, 'n');
             COMMIT"
        );
        let began = Instant::now();
        let done = client.batch_execute(&sql).await;
        self.note(|outcomes| outcomes.longest = outcomes.longest.max(began.elapsed()));
        match done {
            Ok(()) => {
                self.note(|outcomes| _ = outcomes.acknowledged.insert(n));
                self.acknowledged.send_modify(|counts| counts[self.number] += 1);
            }
            Err(error) => {
                let code = error.code().map_or("", |c| c.code());
                let text = format!("{code} {}", error.as_db_error().map_or("", |e| e.message()));
                self.note(|outcomes| *outcomes.errors.entry(text).or_default() += 1);
                // The session is gone, or the outcome is said to be unknown.
                if client.is_closed() || matches!(code, "" | "08007" | "57P01") {
                    self.note(|outcomes| _ = outcomes.unknown.insert(n));
                }
                // After an error in the middle the transaction is still there; a lost session has none.
                let _ = client.batch_execute("ROLLBACK").await;
            }
        }
    }

    fn note(&self, write: impl FnOnce(&mut Outcomes)) {
        write(&mut self.outcomes.lock().expect("nobody panics with it"));
    }
}

impl Outcomes {
    /// What was acknowledged is there, what failed is not, no money is lost or made, and views equal their queries.
    pub async fn check(&self, client: &Client) {
        let rows = client.query("SELECT n FROM transfers ORDER BY n", &[]).await.expect("a read");
        let found: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        let distinct: BTreeSet<i64> = found.iter().copied().collect();
        assert_eq!(found.len(), distinct.len(), "a transfer is there twice");
        let lost: Vec<_> = self.acknowledged.difference(&distinct).collect();
        assert!(lost.is_empty(), "acknowledged and lost: {lost:?}");
        let allowed = |n: &&i64| self.acknowledged.contains(n) || self.unknown.contains(n);
        let wrong: Vec<_> = distinct.iter().filter(|n| !allowed(n)).collect();
        assert!(wrong.is_empty(), "failed and there: {wrong:?}");
        let total: i64 = one(client, "SELECT total::bigint FROM totals").await;
        assert_eq!(total, ACCOUNTS * BALANCE);
        for (view, query) in [
            (
                "SELECT total::bigint, accounts FROM totals",
                "SELECT sum(balance)::bigint, count(*) FROM accounts",
            ),
            (
                "SELECT id, transfers FROM paid",
                "SELECT a.id, count(t.n) FROM accounts a LEFT JOIN transfers t ON t.payer = a.id GROUP BY a.id",
            ),
        ] {
            for (from, without) in [(view, query), (query, view)] {
                let sql = format!("SELECT count(*) FROM ({from} EXCEPT ALL {without}) AS d");
                assert_eq!(one::<i64>(client, &sql).await, 0, "{sql}");
            }
        }
        // Each payment has changed two balances, in one with its row.
        let moved: i64 = one(
            client,
            "SELECT count(*) FROM accounts a WHERE a.balance <> 100
               - (SELECT count(*) FROM transfers t WHERE t.payer = a.id)
               + (SELECT count(*) FROM transfers t WHERE t.payee = a.id)",
        )
        .await;
        assert_eq!(moved, 0, "balances that do not follow from the transfers");
    }
}
