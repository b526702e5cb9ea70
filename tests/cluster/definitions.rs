//! Definitions at one frontend, as statements at another see them.

use futures::TryStreamExt;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};

use crate::process::Cluster;
use crate::sessions::LIMIT;
use crate::{execute, one};

/// In each of them the second frontend may be behind.
const ROUNDS: i32 = 20;
/// Each has a job of its own.
const SUBSCRIPTIONS: i32 = 5;

#[tokio::test(flavor = "multi_thread")]
async fn what_one_frontend_has_defined_another_one_sees_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["meta", "compute", "frontend1", "frontend2"];
    let cluster = Cluster::start_with(dir.path(), &names).await;
    let (definer, user) = (cluster.connect("frontend1").await, cluster.connect("frontend2").await);
    execute(&definer, "CREATE TABLE t (id int PRIMARY KEY); CREATE VIEW v AS SELECT 0 AS n").await;
    for n in 1..=ROUNDS {
        execute(&definer, &format!("CREATE OR REPLACE VIEW v AS SELECT {n} AS n")).await;
        assert_eq!(one::<i32>(&user, "SELECT n FROM v").await, n, "it was replaced");
        let again = format!("DROP VIEW v; CREATE VIEW v AS SELECT {n} + 1000 AS n");
        execute(&definer, &again).await;
        assert_eq!(one::<i32>(&user, "SELECT n FROM v").await, n + 1000, "it is another one");
        execute(&definer, "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY)").await;
        execute(&user, &format!("INSERT INTO t VALUES ({n})")).await;
        assert_eq!(one::<i32>(&user, "SELECT id FROM t").await, n);
    }
}

/// The value in the first row that a subscription brings.
async fn followed(client: &Client, view: &str) -> String {
    let sql = format!("SUBSCRIBE TO {view}");
    let rows = client.copy_out(sql.as_str()).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    let mut rows = std::pin::pin!(rows);
    let row = tokio::time::timeout(LIMIT, rows.try_next()).await;
    let row = row.expect("in time").expect("a row").expect("no end");
    let text = String::from_utf8_lossy(&row).into_owned();
    text.trim_end().rsplit('\t').next().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_prepared_or_followed_is_of_what_another_frontend_has_defined() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["meta", "compute", "frontend1", "frontend2"];
    let cluster = Cluster::start_with(dir.path(), &names).await;
    let (definer, user) = (cluster.connect("frontend1").await, cluster.connect("frontend2").await);
    execute(&definer, "CREATE VIEW v AS SELECT 0::bigint AS n").await;
    execute(&user, "PREPARE q (bigint) AS SELECT n + $1 AS n FROM v").await;
    let sent = user.prepare("SELECT n + $1::bigint AS n FROM v").await.expect("it is prepared");
    for n in (1..=ROUNDS).map(i64::from) {
        execute(&definer, &format!("CREATE OR REPLACE VIEW v AS SELECT {n}::bigint AS n")).await;
        assert_eq!(one::<i64>(&user, "EXECUTE q (1000)").await, n + 1000, "by name");
        let again = format!("DROP VIEW v; CREATE VIEW v AS SELECT {n}::bigint + 5 AS n");
        execute(&definer, &again).await;
        let row = user.query_one(&sent, &[&1_000_i64]).await.expect("its columns are the same");
        assert_eq!(row.get::<_, i64>(0), n + 1005, "by a message");
    }
    execute(&definer, "DROP VIEW v; CREATE VIEW v AS SELECT 0.5 AS n").await;
    let error = user.query_one(&sent, &[&1_000_i64]).await.expect_err("its columns are others");
    assert_eq!(error.code(), Some(&SqlState::FEATURE_NOT_SUPPORTED), "{error:?}");

    execute(&definer, "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)").await;
    for n in 1..=SUBSCRIPTIONS {
        execute(&definer, &format!("CREATE VIEW w{n} AS SELECT id FROM t")).await;
        assert_eq!(one::<i32>(&user, &format!("SELECT id FROM w{n}")).await, 1);
        let follower = cluster.connect("frontend2").await;
        let replace = format!("CREATE OR REPLACE VIEW w{n} AS SELECT id + {n} AS id FROM t");
        execute(&definer, &replace).await;
        assert_eq!(followed(&follower, &format!("w{n}")).await, (n + 1).to_string());
    }
}

/// Every client of a cluster may come to any frontend.
#[tokio::test(flavor = "multi_thread")]
async fn a_user_that_one_frontend_has_created_is_let_in_by_another_one_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["meta", "frontend1", "frontend2"];
    let cluster = Cluster::start_with(dir.path(), &names).await;
    let definer = cluster.connect("frontend1").await;
    let address = cluster.address("frontend2");
    let (host, port) = address.rsplit_once(':').expect("host and port");
    for n in 1..=ROUNDS {
        execute(&definer, &format!("CREATE USER user{n} PASSWORD 'x'")).await;
        let config = format!("host={host} port={port} user=user{n} dbname=dev connect_timeout=10");
        let (client, connection) = tokio_postgres::connect(&config, NoTls)
            .await
            .unwrap_or_else(|error| panic!("user{n}: {error:?}"));
        tokio::spawn(connection);
        assert_eq!(one::<i32>(&client, "SELECT 1").await, 1);
    }
}
