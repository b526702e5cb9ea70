//! What drivers read beside values: the fields of errors and the descriptions of columns are PostgreSQL's.

use std::collections::HashMap;

use bytes::Bytes;
use futures::SinkExt;
use tokio_postgres::types::Oid;
use tokio_postgres::{Client, Error, NoTls};

use super::start;

/// The same questions to us and, where there is one, to PostgreSQL, in a schema of that name; our answers.
async fn compare(schema: &str, ask: impl AsyncFn(&Client) -> Vec<String>) -> Vec<String> {
    let schema = format!(
        "DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema}; SET search_path = {schema}"
    );
    let running = start();
    let client = running.server.connect().await.expect("a connection");
    client.batch_execute(&schema).await.expect("a schema");
    let ours = ask(&client).await;
    let Ok(address) = std::env::var("MILLRACE_TEST_POSTGRES") else {
        super::skip("PostgreSQL (MILLRACE_TEST_POSTGRES)");
        return ours;
    };
    let (postgres, driver) =
        tokio_postgres::connect(&address, NoTls).await.expect("PostgreSQL answers");
    tokio::spawn(driver);
    postgres.batch_execute(&schema).await.expect("a schema");
    let theirs = ask(&postgres).await;
    for (mine, theirs) in ours.iter().zip(&theirs) {
        assert_eq!(mine, theirs);
    }
    assert_eq!(ours.len(), theirs.len());
    ours
}

const CONSTRAINED: &str = "CREATE TABLE t (id int PRIMARY KEY, n text NOT NULL, v varchar(3), q numeric(4,2), s smallint); \
     CREATE TABLE k (a int, b text, PRIMARY KEY (b, a)); CREATE TABLE \"Big T\" (i int PRIMARY KEY); \
     CREATE TABLE a_name_of_sixty_three_bytes_which_is_as_long_as_names_may_be_he (i int PRIMARY KEY); \
     CREATE TABLE only_nulls (x int NOT NULL); INSERT INTO t VALUES (1, 'a'), (2, 'b'); \
     INSERT INTO k VALUES (1, 'x'); INSERT INTO \"Big T\" VALUES (1); \
     INSERT INTO a_name_of_sixty_three_bytes_which_is_as_long_as_names_may_be_he VALUES (1)";

/// Statements that violate something, and a few errors that are about no constraint.
const VIOLATIONS: [&str; 32] = [
    "INSERT INTO t VALUES (1, 'x')",
    "INSERT INTO t VALUES (5, NULL)",
    "INSERT INTO t VALUES (NULL, 'x')",
    "INSERT INTO t (id) VALUES (5)",
    "INSERT INTO t VALUES (5, 'x'), (5, 'y')",
    "INSERT INTO t SELECT 1, 'x'",
    "INSERT INTO t SELECT 7, NULL",
    "INSERT INTO k VALUES (1, 'x')",
    "INSERT INTO k VALUES (1, NULL)",
    "INSERT INTO \"Big T\" VALUES (1)",
    "INSERT INTO \"Big T\" VALUES (1) ON CONFLICT ON CONSTRAINT \"Big T_pkey\" DO NOTHING",
    "INSERT INTO a_name_of_sixty_three_bytes_which_is_as_long_as_names_may_be_he VALUES (1)",
    "INSERT INTO only_nulls VALUES (NULL)",
    "INSERT INTO only_nulls SELECT NULL::int",
    "UPDATE t SET n = NULL WHERE id = 1",
    "UPDATE t SET id = 2 WHERE id = 1",
    "UPDATE t SET id = NULL WHERE id = 1",
    "INSERT INTO t VALUES (1, 'x') ON CONFLICT (id) DO UPDATE SET n = NULL",
    "INSERT INTO t VALUES (1, 'x') ON CONFLICT (id) DO UPDATE SET id = 2",
    "INSERT INTO t VALUES (9, NULL) ON CONFLICT (id) DO NOTHING",
    "WITH w AS (INSERT INTO t VALUES (1, 'x') RETURNING id) SELECT * FROM w",
    "WITH w AS (UPDATE t SET n = NULL WHERE id = 1 RETURNING id) SELECT * FROM w",
    "BEGIN; INSERT INTO t VALUES (1, 'x'); COMMIT",
    "BEGIN; INSERT INTO t VALUES (1, 'x') ON CONFLICT (id) DO UPDATE SET id = 2; COMMIT",
    "INSERT INTO t VALUES (8, 'x', 'abcd')",
    "INSERT INTO t VALUES (8, 'x', 'abc', 1000)",
    "INSERT INTO t VALUES (8, 'x', 'abc', 1, 99999)",
    "UPDATE t SET v = v || 'abcd', n = 'abcd', q = 1000 WHERE id = 1",
    "INSERT INTO t VALUES ('x', 'a')",
    "INSERT INTO t (missing) VALUES (1)",
    "SELECT missing FROM t",
    "SELECT 1 / 0",
];

/// Lines for `COPY t FROM STDIN`.
const COPIED: [&str; 4] = [
    "9\tx\t\\N\t\\N\t\\N\n1\tx\t\\N\t\\N\t\\N\n",
    "9\t\\N\t\\N\t\\N\t\\N\n",
    "9\tx\tabcd\t\\N\t\\N\n",
    "9\tx\t\\N\t\\N\t\\N\n9\tx\t\\N\t\\N\t\\N\n",
];

/// Everything but PostgreSQL's place in its own source, which is a matter of its own.
fn shown(what: &str, result: Result<(), Error>) -> String {
    let error = match &result {
        Ok(()) => return format!("{what}: done"),
        Err(e) => e.as_db_error().expect("an error of the server"),
    };
    format!(
        "{what}: {} schema {:?} table {:?} column {:?} type {:?} constraint {:?} {} ({:?})",
        error.code().code(),
        error.schema(),
        error.table(),
        error.column(),
        error.datatype(),
        error.constraint(),
        error.message(),
        error.detail(),
    )
}

async fn copy(client: &Client, lines: &'static str) -> Result<(), Error> {
    let sink = client.copy_in("COPY t FROM STDIN").await?;
    let mut sink = std::pin::pin!(sink);
    sink.send(Bytes::from_static(lines.as_bytes())).await?;
    sink.finish().await.map(|_| ())
}

#[tokio::test]
async fn errors_name_their_table_column_and_constraint() {
    let told = compare("manners_errors", async |client| {
        client.batch_execute(CONSTRAINED).await.expect("tables");
        let mut told = Vec::new();
        for statement in VIOLATIONS {
            let done = client.batch_execute(statement).await;
            // One that fails in a block leaves it open.
            client.batch_execute("ROLLBACK").await.expect("no block");
            told.push(shown(statement, done));
        }
        for lines in COPIED {
            told.push(shown(lines, copy(client, lines).await));
        }
        told
    });
    let told = told.await;
    assert!(
        told[0].contains("table Some(\"t\") column None type None constraint Some(\"t_pkey\")")
    );
    assert!(told[1].contains("table Some(\"t\") column Some(\"n\") type None constraint None"));
}

/// pgjdbc prepares a statement again if it is this function that reports 0A000.
#[tokio::test]
async fn a_statement_whose_columns_have_changed_is_one_to_prepare_again() {
    let told = compare("manners_changed", async |client| {
        client.batch_execute("CREATE TABLE c (v int)").await.expect("a table");
        let read = client.prepare("SELECT * FROM c").await.expect("a statement");
        // A table like it is another with the same columns.
        client.batch_execute("DROP TABLE c; CREATE TABLE c (v int)").await.expect("a table");
        client.query(&read, &[]).await.expect("the same columns");
        client.batch_execute("DROP TABLE c; CREATE TABLE c (v varchar(3))").await.expect("a table");
        let error = client.query(&read, &[]).await.expect_err("other columns");
        let error = error.as_db_error().expect("an error of the server");
        vec![format!("{} {:?}", error.code().code(), error.routine())]
    });
    assert_eq!(told.await, ["0A000 Some(\"RevalidateCachedQuery\")"]);
}

const DESCRIBED: &str = "CREATE TABLE t (id int PRIMARY KEY, v varchar(5), n numeric(8,3), c char(4), ts timestamp(3), \
     tz timestamptz(0), tm time(2), x text, d date, a int[], va varchar[], pn numeric, pv varchar, b boolean); \
     CREATE TABLE u (id int PRIMARY KEY, w varchar(9), m numeric(6)); \
     CREATE VIEW vw AS SELECT id, v AS vv, n FROM t; CREATE VIEW vw2 AS SELECT * FROM vw; \
     CREATE MATERIALIZED VIEW mv AS SELECT id, v, n, ts, count(*) AS k, upper(v) AS uv FROM t GROUP BY id, v, n, ts; \
     CREATE TABLE made AS SELECT v, ts, n, v || v AS vv, coalesce(v, '') AS cv FROM t";

/// Queries whose columns are described.
const QUERIES: [&str; 83] = [
    "SELECT * FROM t",
    "SELECT id AS x, v y FROM t",
    "SELECT a.* FROM t a",
    "SELECT v, id FROM t WHERE id = 1 ORDER BY 1 LIMIT 1",
    "SELECT DISTINCT v, n FROM t",
    "SELECT v, count(*) FROM t GROUP BY v HAVING count(*) > 0",
    "SELECT v, n, count(*) FROM t GROUP BY ROLLUP (v, n)",
    "SELECT DISTINCT ON (v) v, id FROM t ORDER BY v, id",
    "SELECT max(v), min(n), sum(n), max(ts), avg(n), count(v) FROM t",
    "SELECT v || '', n + 1, -n, id + 1, n * 2.0, n / 3, n::int, n::float8 FROM t",
    "SELECT v::varchar(3), n::numeric(5,1), v::text, n::numeric, c::char(9), ts::timestamp(1), id::varchar(4) FROM t",
    "SELECT v::varchar(5), n::numeric(8,3), ts::timestamp(3), id::int, x::text, id::varchar FROM t",
    "SELECT 'a'::varchar(3), 1::numeric(4,2), 'a'::char(2), NULL::varchar(3), '1'::numeric(4,1)",
    "SELECT now()::timestamp(2), '10:00'::time(3), '1 sec'::interval(2), time '10:00', interval '1 day'",
    "SELECT (v), v COLLATE \"C\" FROM t",
    "SELECT * FROM (SELECT id, v AS q FROM t) s",
    "SELECT q FROM (SELECT v || '' AS q, n FROM t) s",
    "SELECT s.* FROM (SELECT v, n FROM t LIMIT 3) s",
    "SELECT s.* FROM (SELECT v, count(*) AS k FROM t GROUP BY v) s",
    "SELECT x.id FROM (SELECT id FROM (SELECT id FROM t) y) x",
    "SELECT s.b FROM (SELECT id, v FROM t) AS s (a, b)",
    "WITH w AS (SELECT id, v, n FROM t) SELECT v, n, id FROM w",
    "WITH w (a1, b1) AS (SELECT id, v FROM t) SELECT b1, a1 FROM w",
    "WITH w AS MATERIALIZED (SELECT v FROM t) SELECT * FROM w",
    "WITH t AS (SELECT w AS v FROM u) SELECT v FROM t",
    "WITH RECURSIVE r AS (SELECT id, v FROM t UNION ALL SELECT id, v FROM r WHERE false) SELECT * FROM r",
    "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 3) SELECT * FROM r",
    "SELECT v FROM t UNION SELECT w FROM u",
    "SELECT v FROM t UNION ALL SELECT v FROM t",
    "SELECT n FROM t UNION SELECT 1",
    "SELECT * FROM (SELECT v FROM t UNION ALL SELECT v FROM t) q",
    "SELECT v FROM t EXCEPT SELECT w FROM u",
    "SELECT v AS a FROM t INTERSECT SELECT v FROM t",
    "SELECT * FROM t JOIN u ON t.id = u.id",
    "SELECT * FROM t JOIN u USING (id)",
    "SELECT id FROM t JOIN u USING (id)",
    "SELECT id, v FROM t LEFT JOIN u USING (id)",
    "SELECT id, w FROM t RIGHT JOIN u USING (id)",
    "SELECT id, w FROM t FULL JOIN u USING (id)",
    "SELECT * FROM t NATURAL JOIN u",
    "SELECT t.v, u.w FROM t, u WHERE t.id = u.id",
    "SELECT t.id, x.m FROM t CROSS JOIN (SELECT m FROM u) x",
    "SELECT t.v, u.w FROM t, LATERAL (SELECT w FROM u WHERE u.id = t.id) u",
    "SELECT q FROM t, LATERAL (SELECT t.v AS q) z",
    "SELECT * FROM vw",
    "SELECT vv, n FROM vw",
    "SELECT * FROM vw2",
    "SELECT x.vv FROM (SELECT * FROM vw) x",
    "SELECT * FROM mv",
    "SELECT v, ts FROM mv",
    "SELECT * FROM made",
    "TABLE t",
    "TABLE vw",
    "SELECT CASE WHEN b THEN v ELSE v END, coalesce(v, v), coalesce(n, n), greatest(n, n) FROM t",
    "SELECT CASE WHEN b THEN 'a' ELSE v END, coalesce(v, 'x'), coalesce(n, 0), nullif(v, 'x') FROM t",
    "SELECT CASE WHEN b THEN n END, coalesce(ts, ts), ts + interval '1 day', date_trunc('day', ts) FROM t",
    "SELECT (SELECT v FROM t LIMIT 1), (SELECT n FROM t LIMIT 1), (SELECT t.v) FROM t",
    "SELECT lag(v) OVER (ORDER BY id), first_value(n) OVER (ORDER BY id), row_number() OVER (), v FROM t",
    "SELECT lower(v), substr(v, 1), trim(v), abs(n), round(n, 1), v || v FROM t",
    "SELECT a[1], va, array[v], array[n] FROM t",
    "SELECT v FROM t WINDOW w AS (ORDER BY id)",
    "SELECT y FROM (SELECT v AS y FROM t ORDER BY id) z ORDER BY y",
    "SELECT id, v FROM t WHERE id IN (SELECT id FROM u) AND EXISTS (SELECT 1 FROM u)",
    "SELECT j.v FROM (t JOIN u ON t.id = u.id) j",
    "SELECT id, w FROM (t JOIN u USING (id))",
    "VALUES ('a'::varchar(3)), ('b'::varchar(3))",
    "VALUES ('a'::varchar(3)), ('b'::varchar(4))",
    "VALUES (1, 'a'), (2, 'b')",
    "SELECT 1, 'a', NULL, true, 1.5, now()",
    "SELECT * FROM generate_series(1, 2) g",
    "SELECT t.v, g FROM t, generate_series(1, 2) g",
    "SELECT v FROM (VALUES ('a'::varchar(3))) x (v)",
    "SELECT oid, relname FROM pg_class",
    "SELECT attname, atttypmod FROM pg_catalog.pg_attribute a WHERE a.attnum > 0",
    "INSERT INTO t (id, v, n) VALUES (100, 'x', 1) RETURNING *",
    "INSERT INTO t (id, v, n) VALUES (101, 'x', 1) RETURNING id, v AS q, n + 1",
    "INSERT INTO t (id, v) VALUES (1, 'z') ON CONFLICT (id) DO UPDATE SET v = excluded.v RETURNING v, n",
    "UPDATE t SET v = 'y' WHERE id = 100 RETURNING v, n, upper(v)",
    "DELETE FROM t WHERE id >= 100 RETURNING *",
    "SHOW timezone",
    "EXPLAIN SELECT 1",
    "SELECT $1::varchar(4), v FROM t WHERE id = $2",
    "SELECT nullif(n, 1), least(v, v) FROM t",
];

#[tokio::test]
async fn columns_are_described_as_postgresql_describes_them() {
    compare("manners_columns", async |client| {
        client.batch_execute(DESCRIBED).await.expect("tables");
        let named = client.query("SELECT oid, relname::text FROM pg_class", &[]).await;
        let names: HashMap<Oid, String> =
            named.expect("relations").iter().map(|row| (row.get(0), row.get(1))).collect();
        let mut told = Vec::new();
        for query in QUERIES {
            let statement = client.prepare(query).await.unwrap_or_else(|e| panic!("{query}: {e:?}"));
            let columns = statement.columns().iter().map(|c| {
                let table = c.table_oid().map(|oid| names.get(&oid).map_or("?", String::as_str));
                let (name, number, modifier) = (c.name(), c.column_id(), c.type_modifier());
                format!("\n  {name} {table:?}.{number:?} {} {modifier}", c.type_())
            });
            told.push(format!("{query}{}", columns.collect::<String>()));
        }
        // What the catalogs say is what is told of the columns.
        let modifiers = "SELECT relname::text, attname::text, format_type(atttypid, atttypmod) \
             FROM pg_attribute JOIN pg_class c ON c.oid = attrelid JOIN pg_namespace s ON s.oid = relnamespace \
             WHERE nspname = 'manners_columns' AND relkind IN ('r', 'v', 'm') AND attnum > 0 ORDER BY relname, attnum";
        for row in client.query(modifiers, &[]).await.expect("columns") {
            let part = |i| row.get::<_, String>(i);
            told.push(format!("{}.{} {}", part(0), part(1), part(2)));
        }
        told
    })
    .await;
}
