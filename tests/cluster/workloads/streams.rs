//! Views over the events of Nexmark, which arrive while processes are killed. What a view has at the end of the stream is
//! compared with what its query answers then.

use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::{difference, execute, one};

/// Events a second.
const RATE: u64 = 150;
/// How long it may take until views have what there is of the stream.
const LIMIT: Duration = Duration::from_secs(90);

const QUERIES: [(&str, &str); 3] = [
    ("q4", include_str!("../../../planner/tests/nexmark/q4.sql")),
    ("q8", include_str!("../../../planner/tests/nexmark/q8.sql")),
    ("q20", include_str!("../../../planner/tests/nexmark/q20.sql")),
];
/// Of 50 events, how many are of each kind.
const KINDS: [(&str, u64, &str); 3] = [
    (
        "bid",
        46,
        "auction BIGINT, bidder BIGINT, price BIGINT, channel VARCHAR, url VARCHAR, \
         date_time TIMESTAMP, extra VARCHAR",
    ),
    (
        "auction",
        3,
        "id BIGINT, item_name VARCHAR, description VARCHAR, initial_bid BIGINT, reserve BIGINT, \
         date_time TIMESTAMP, expires TIMESTAMP, seller BIGINT, category BIGINT, extra VARCHAR",
    ),
    (
        "person",
        1,
        "id BIGINT, name VARCHAR, email_address VARCHAR, credit_card VARCHAR, city VARCHAR, \
         state VARCHAR, date_time TIMESTAMP, extra VARCHAR",
    ),
];

/// The number of events, which have arrived after this time.
pub fn events(seconds: u64) -> u64 {
    (RATE * seconds).next_multiple_of(50)
}

pub async fn create(client: &Client, events: u64) {
    for (table, _, columns) in KINDS {
        let sql = format!(
            "CREATE SOURCE {table} ({columns}, \
             WATERMARK FOR date_time AS date_time - INTERVAL '4 seconds') \
             WITH (connector = 'nexmark', table = '{table}', event.num = {events}, \
             event.rate = {RATE}, splits = 2, seed = 42)"
        );
        execute(client, &sql).await;
    }
    for (view, query) in QUERIES {
        execute(client, &format!("CREATE MATERIALIZED VIEW {view} AS {query}")).await;
    }
}

/// All events arrive, and views equal their queries.
pub async fn check(client: &Client, events: u64) {
    let deadline = Instant::now() + LIMIT;
    for (table, share, _) in KINDS {
        let (sql, all) = (format!("SELECT count(*) FROM {table}"), (events / 50 * share) as i64);
        loop {
            let count: i64 = one(client, &sql).await;
            assert!(count <= all, "{count} events of {table}, of {all}");
            if count == all {
                break;
            }
            assert!(Instant::now() < deadline, "{count} events of {table}, of {all}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    for (view, query) in QUERIES {
        let content = format!("SELECT * FROM {view}");
        while let Some(difference) = difference(client, &content, query).await {
            assert!(Instant::now() < deadline, "{view}: {difference}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_ne!(one::<i64>(client, &format!("SELECT count(*) FROM {view}")).await, 0, "{view}");
    }
}
