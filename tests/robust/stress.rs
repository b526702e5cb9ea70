//! Many sessions at once: what one was told is committed, every session that starts afterwards sees.

use std::time::{Duration, Instant};

use millrace_sqllogictest::{Server, suite};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use crate::node::{one, run};
use crate::started;

const SESSIONS: usize = 20;
const TIME: Duration = Duration::from_secs(20);

const SCHEMA: &str = "
    CREATE TABLE item (id bigint PRIMARY KEY, owner int, n int);
    CREATE TABLE event (owner int, item bigint, what varchar);
    CREATE TABLE account (owner int PRIMARY KEY, balance bigint);
    CREATE MATERIALIZED VIEW per_owner AS SELECT owner, count(*) AS items, sum(n) AS n FROM item GROUP BY owner;
    CREATE MATERIALIZED VIEW joined AS SELECT e.owner, e.item, i.n FROM event e JOIN item i ON e.item = i.id;
    CREATE MATERIALIZED VIEW big AS SELECT id, owner, n FROM item WHERE n >= 50;
    CREATE MATERIALIZED VIEW total AS SELECT sum(balance) AS balance FROM account;
    CREATE MATERIALIZED VIEW top AS SELECT owner, items FROM per_owner ORDER BY items DESC, owner LIMIT 5";

/// What one session did.
#[derive(Default)]
struct Tally {
    items: i64,
    transfers: i64,
    conflicts: u64,
    reads: u64,
}

/// Runs a statement until it is not sent back with 40001.
async fn write(client: &Client, sql: &str, tally: &mut Tally) {
    loop {
        match client.batch_execute(sql).await {
            Ok(()) => return,
            Err(e) if e.code() == Some(&SqlState::T_R_SERIALIZATION_FAILURE) => {
                tally.conflicts += 1
            }
            Err(e) => panic!("{sql}: {e:?}"),
        }
    }
}

async fn expect(server: &Server, sql: &str, expected: &str) {
    let client = server.connect().await.expect("a connection");
    assert_eq!(one(&client, sql).await, expected, "{sql}");
}

async fn session(server: &Server, owner: usize, until: Instant) -> Tally {
    let client = server.connect().await.expect("a connection");
    let mut tally = Tally::default();
    let base = owner as i64 * 1_000_000;
    write(&client, &format!("INSERT INTO account VALUES ({owner}, 100)"), &mut tally).await;
    while Instant::now() < until {
        tally.items += 1;
        let (id, n) = (base + tally.items, tally.items % 100);
        write(&client, &format!("INSERT INTO item VALUES ({id}, {owner}, {n})"), &mut tally).await;
        match tally.items % 4 {
            // Another session, started after the acknowledgement, by way of a view of a view.
            0 => {
                expect(
                    server,
                    &format!("SELECT items FROM per_owner WHERE owner = {owner}"),
                    &tally.items.to_string(),
                )
                .await
            }
            1 => {
                write(
                    &client,
                    &format!("INSERT INTO event VALUES ({owner}, {id}, 'made')"),
                    &mut tally,
                )
                .await;
                expect(server, &format!("SELECT n FROM joined WHERE item = {id}"), &n.to_string())
                    .await;
            }
            2 => {
                let other = (owner + 1) % SESSIONS;
                let sql = format!(
                    "UPDATE account SET balance = balance + CASE owner WHEN {owner} THEN -1 ELSE 1 END WHERE owner IN ({owner}, {other})"
                );
                write(&client, &sql, &mut tally).await;
                tally.transfers += 1;
            }
            _ => {
                // Both views at one epoch.
                let sql = "SELECT (SELECT coalesce(sum(n), 0) FROM per_owner) - (SELECT coalesce(sum(n), 0) FROM item)";
                assert_eq!(one(&client, sql).await, "0");
            }
        }
        tally.reads += 1;
    }
    tally
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_see_what_others_were_told() {
    let (server, _dir) = started(&[]);
    let client = server.connect().await.expect("a connection");
    run(&client, SCHEMA).await;
    let until = Instant::now() + TIME;
    let all =
        futures::future::join_all((0..SESSIONS).map(|owner| session(&server, owner, until))).await;
    let items: i64 = all.iter().map(|t| t.items).sum();
    let conflicts: u64 = all.iter().map(|t| t.conflicts).sum();
    let reads: u64 = all.iter().map(|t| t.reads).sum();
    println!("{items} inserts, {reads} reads and updates, {conflicts} sent back with 40001");
    assert_eq!(one(&client, "SELECT count(*) FROM item").await, items.to_string());
    assert_eq!(one(&client, "SELECT sum(items) FROM per_owner").await, items.to_string());
    suite::check_views(&client).await.unwrap_or_else(|e| panic!("{e}"));
}
