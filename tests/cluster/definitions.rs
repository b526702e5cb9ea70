//! Definitions at one frontend, as statements at another see them.

use crate::process::Cluster;
use crate::{execute, one};

/// In each of them the second frontend may be behind.
const ROUNDS: i32 = 20;

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
