//! A workload whose outcome can be checked: money goes from account to account, each transfer in a transaction that also
//! writes it down under a number of its own.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Instant;

use tokio_postgres::Client;

use crate::writers::{self, Fate, Workload, Writers};
use crate::{assert_equal, execute, one};

pub const ACCOUNTS: i64 = 20;
const BALANCE: i64 = 100;
const TOTALS: &str = "SELECT sum(balance) AS total, count(*) AS accounts FROM accounts";
const PAID: &str = "SELECT a.id, count(t.n) AS transfers FROM accounts a LEFT JOIN transfers t ON t.payer = a.id \
                    GROUP BY a.id";

pub async fn create(client: &Client) {
    let views = [("totals", TOTALS), ("paid", PAID)];
    let views = views.map(|(view, query)| format!("CREATE MATERIALIZED VIEW {view} AS {query}"));
    let accounts = format!(
        "INSERT INTO accounts SELECT x, {BALANCE} FROM generate_series(1, {ACCOUNTS}) AS x(x)"
    );
    let tables = [
        "CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL)",
        "CREATE TABLE transfers (n bigint PRIMARY KEY, payer bigint, payee bigint, note text)",
    ];
    for sql in tables {
        execute(client, sql).await;
    }
    for sql in views.iter().chain([&accounts]) {
        execute(client, sql).await;
    }
}

/// Two sessions that make transfers until they are ended.
pub type Transfers = Writers<Bank>;
pub type Outcomes = writers::Outcomes<Bank>;

/// Transfers by number.
#[derive(Default)]
pub struct Bank(Mutex<Known>);

#[derive(Default)]
struct Known {
    acknowledged: BTreeSet<i64>,
    unknown: BTreeSet<i64>,
}

impl Workload for Bank {
    fn statement(&self, n: i64) -> String {
        let (payer, payee) = (n % ACCOUNTS + 1, (n * 7 + 3) % ACCOUNTS + 1);
        format!(
            "BEGIN;
             UPDATE accounts SET balance = balance - 1 WHERE id = {payer};
             UPDATE accounts SET balance = balance + 1 WHERE id = {payee};
             INSERT INTO transfers VALUES ({n}, {payer}, {payee}, 'n');
             COMMIT"
        )
    }

    fn note(&self, n: i64, fate: Fate, _began: Instant) {
        let mut known = self.0.lock().expect("nobody panics with it");
        match fate {
            Fate::Acknowledged => drop(known.acknowledged.insert(n)),
            Fate::Unknown => drop(known.unknown.insert(n)),
            Fate::Failed => {}
        }
    }
}

impl Outcomes {
    /// What was acknowledged is there, what failed is not, no money is lost or made, and views equal their queries.
    pub async fn check(&self, client: &Client) {
        let rows = client.query("SELECT n FROM transfers ORDER BY n", &[]).await.expect("a read");
        let found: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        let distinct: BTreeSet<i64> = found.iter().copied().collect();
        assert_eq!(found.len(), distinct.len(), "a transfer is there twice");
        {
            let known = self.workload.0.lock().expect("nobody panics with it");
            let lost: Vec<_> = known.acknowledged.difference(&distinct).collect();
            assert!(lost.is_empty(), "acknowledged and lost: {lost:?}");
            let allowed = |n: &&i64| known.acknowledged.contains(n) || known.unknown.contains(n);
            let wrong: Vec<_> = distinct.iter().filter(|n| !allowed(n)).collect();
            assert!(wrong.is_empty(), "failed and there: {wrong:?}");
        }
        let total: i64 = one(client, "SELECT total::bigint FROM totals").await;
        assert_eq!(total, ACCOUNTS * BALANCE);
        assert_equal(client, "SELECT * FROM totals", TOTALS).await;
        assert_equal(client, "SELECT * FROM paid", PAID).await;
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
