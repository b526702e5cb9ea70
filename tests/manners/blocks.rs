//! What drivers do: end a failed block by a prepared statement, take locks by number, believe what they are told of
//! settings.

use tokio_postgres::{Client, NoTls};

use super::start;

/// The SQLSTATE with which a prepared statement fails.
async fn refused(client: &Client, sql: &str) -> String {
    let e = client.execute(sql, &[]).await.expect_err(sql);
    e.code().map_or_else(|| e.to_string(), |c| c.code().to_owned())
}

#[tokio::test]
async fn a_failed_block_ends_however_its_end_is_written() {
    let running = start();
    let client = running.server.connect().await.expect("a connection");
    for end in ["ROLLBACK", "END", "end transaction", "/* the end */ ROLLBACK", "-- so\nCOMMIT"] {
        client.batch_execute("BEGIN").await.expect("a block");
        assert_eq!(refused(&client, "SELECT 1 / 0").await, "22012");
        assert_eq!(refused(&client, "SELECT 1").await, "25P02");
        assert_eq!(refused(&client, "ROLLBACK; SELECT 1").await, "42601");
        assert_eq!(refused(&client, "SELEC 1").await, "42601");
        client.execute(end, &[]).await.unwrap_or_else(|e| panic!("{end}: {e}"));
        client.execute("SELECT 1", &[]).await.unwrap_or_else(|e| panic!("after {end}: {e}"));
    }
}

#[tokio::test]
async fn locks_are_taken_by_numbers_that_are_parameters() {
    let running = start();
    let first = running.server.connect().await.expect("a connection");
    let second = running.server.connect().await.expect("another connection");
    let lock = first.prepare("SELECT pg_advisory_lock($1)").await.expect("a statement");
    first.query(&lock, &[&(1i64 << 40)]).await.expect("a lock");
    first.query("SELECT pg_advisory_lock($1, $2)", &[&1i32, &-2i32]).await.expect("a lock of two");
    let one = "SELECT pg_try_advisory_lock($1)";
    let two = "SELECT pg_try_advisory_lock($1, $2)";
    let taken = second.query_one(one, &[&(1i64 << 40)]).await.expect("an answer");
    assert!(!taken.get::<_, bool>(0));
    let taken = second.query_one(two, &[&1i32, &-2i32]).await.expect("an answer");
    assert!(!taken.get::<_, bool>(0));
    let taken = second.query_one(two, &[&1i32, &2i32]).await.expect("an answer");
    assert!(taken.get::<_, bool>(0));
}

#[tokio::test]
async fn a_setting_that_is_rolled_back_is_told() {
    let running = start();
    let address = format!("host=127.0.0.1 port={} user=root dbname=dev", running.server.port);
    let (client, mut connection) =
        tokio_postgres::connect(&address, NoTls).await.expect("a connection");
    let driver = tokio::spawn(async move {
        (&mut connection).await.expect("it ends when the client does");
        connection.parameter("TimeZone").map(str::to_owned)
    });
    let change = "BEGIN; SET TimeZone = 'Asia/Tokyo'; ROLLBACK";
    client.batch_execute(change).await.expect("a block");
    drop(client);
    assert_eq!(driver.await.expect("no panic").as_deref(), Some("UTC"));
}

#[tokio::test]
async fn a_statement_whose_columns_have_changed_does_nothing() {
    let running = start();
    let client = running.server.connect().await.expect("a connection");
    let count = async || {
        let row = client.query_one("SELECT count(*) FROM stale", &[]).await.expect("a count");
        row.get::<_, i64>(0)
    };
    client.batch_execute("CREATE TABLE stale (id int PRIMARY KEY)").await.expect("a table");
    let insert = "INSERT INTO stale VALUES ($1) RETURNING *";
    let within = "WITH w AS (INSERT INTO stale VALUES ($1::int) RETURNING *) SELECT * FROM w";
    let statements = [
        client.prepare(insert).await.expect("a statement"),
        client.prepare(within).await.expect("a statement of parts"),
    ];
    let prepared = "PREPARE s (int) AS INSERT INTO stale VALUES ($1) RETURNING *";
    client.batch_execute(prepared).await.expect("a statement of SQL's");
    // Another definition does not matter.
    client.batch_execute("CREATE TABLE other (id int)").await.expect("another table");
    for (id, statement) in (1i32..).zip(&statements) {
        client.query_one(statement, &[&id]).await.expect("its own row");
    }
    assert_eq!(count().await, 2);
    let changed = "DROP TABLE stale; CREATE TABLE stale (id int PRIMARY KEY, note text)";
    client.batch_execute(changed).await.expect("a table of the same name");
    let code = |e: tokio_postgres::Error| e.code().map(|c| c.code().to_owned());
    for statement in &statements {
        let e = client.query(statement, &[&3i32]).await.expect_err("it gives other columns");
        assert_eq!(code(e).as_deref(), Some("0A000"));
    }
    let e = client.batch_execute("EXECUTE s (3)").await.expect_err("it gives other columns");
    assert_eq!(code(e).as_deref(), Some("0A000"));
    assert_eq!(count().await, 0);
}
