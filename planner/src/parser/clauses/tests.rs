//! Clauses that sqlparser reads and that nothing here uses.

use crate::parser::parse;

/// The SQLSTATE of a statement that is not taken, and what stands at its place.
fn refused(sql: &str) -> (String, String) {
    match parse(sql) {
        Ok(_) => ("taken".to_owned(), String::new()),
        Err(e) => {
            let from = e.position.map_or(sql.len(), |p| p as usize - 1);
            let word = sql[from..].split([' ', ',', ')']).next().unwrap_or_default();
            (e.state.0.to_owned(), word.to_owned())
        }
    }
}

#[test]
fn changes_have_no_order_and_no_limit() {
    for (sql, word) in [
        ("UPDATE t SET v = 1 WHERE v > 0 LIMIT 1", "LIMIT"),
        ("UPDATE t SET v = 1 ORDER BY v LIMIT 1", "ORDER"),
        ("UPDATE t SET v = 1 LIMIT 1 RETURNING v", "LIMIT"),
        ("DELETE FROM t ORDER BY v LIMIT 2", "ORDER"),
        ("DELETE FROM t WHERE v > 0 limit 2", "limit"),
        ("DELETE FROM t LIMIT 2", "LIMIT"),
        ("EXPLAIN DELETE FROM t LIMIT 2", "LIMIT"),
        ("PREPARE p AS DELETE FROM t LIMIT $1", "LIMIT"),
        ("WITH d AS (DELETE FROM t LIMIT 2 RETURNING v) SELECT * FROM d", "LIMIT"),
    ] {
        let (state, at) = refused(sql);
        // What sqlparser does not read is an error of its own.
        assert_eq!(state, "42601", "{sql}");
        assert!(at == word || at.is_empty() || sql.contains("RETURNING"), "{sql}: at {at}");
    }
}

#[test]
fn clauses_of_other_systems() {
    for sql in [
        "SELECT TOP 3 * FROM t",
        "SELECT * EXCEPT (a) FROM t",
        "SELECT * EXCLUDE (a) FROM t",
        "SELECT * REPLACE (1 AS a) FROM t",
        "SELECT a FROM t GROUP BY ALL",
        "SELECT a FROM t LIMIT 1, 2",
        "SELECT a FROM t LIMIT 1 BY a",
        "SELECT a FROM t GROUP BY a WITH ROLLUP",
        "SELECT a FROM t SORT BY a",
        "SELECT a FROM t SETTINGS x = 1",
        "SELECT a FROM t FOR JSON AUTO",
        "SELECT a FROM t UNION BY NAME SELECT a FROM u",
        "SELECT * FROM t CROSS JOIN u ON t.a = u.a",
        "SELECT * FROM t LEFT SEMI JOIN u ON t.a = u.a",
        "SELECT * FROM t TABLESAMPLE BERNOULLI (10)",
        "SELECT * FROM (SELECT 1) AS x TABLESAMPLE BERNOULLI (10)",
        "SELECT * FROM unnest(ARRAY[1]) WITH OFFSET AS o",
        "SELECT array_agg(a LIMIT 2) FROM t",
        "SELECT string_agg(a SEPARATOR ',') FROM t",
        "SELECT TRY_CAST(a AS int) FROM t",
        "SELECT CONVERT(a, int) FROM t",
        "VALUES ROW(1)",
        "INSERT OR REPLACE INTO t VALUES (1)",
        "INSERT IGNORE INTO t VALUES (1)",
        "INSERT INTO t SET a = 1",
        "INSERT OVERWRITE t SELECT 1",
        "INSERT t VALUES (1)",
        "REPLACE INTO t VALUES (1)",
        "UPDATE t JOIN u ON t.a = u.a SET b = 1",
        "UPDATE t FROM u SET b = 1",
        "UPDATE t AS x (a, b) SET b = 1",
        "UPDATE OR IGNORE t SET b = 1",
        "DELETE t WHERE a = 1",
        "DELETE t FROM t JOIN u ON t.a = u.a",
        "DELETE FROM t JOIN u ON t.a = u.a",
        "CREATE TABLE t (a int, PRIMARY KEY (a) DEFERRABLE INITIALLY DEFERRED)",
        "CREATE TABLE t (a int PRIMARY KEY DEFERRABLE)",
        "CREATE TABLE t (a int, PRIMARY KEY (a DESC))",
        "CREATE TABLE t (a int, b int GENERATED ALWAYS AS (a + 1) VIRTUAL)",
        "CREATE TABLE t (a int DEFAULT TRY_CAST('1' AS int))",
        "CREATE MATERIALIZED VIEW v AS SELECT * EXCEPT (a) FROM t",
        "CREATE SINK s AS SELECT * EXCEPT (a) FROM t WITH (connector = 'file')",
        "COPY (SELECT a FROM t LIMIT 1, 2) TO STDOUT",
        "SET GLOBAL a = 1",
        "BEGIN IMMEDIATE",
        "EXECUTE p USING 1",
        "ROLLBACK AND CHAIN TO SAVEPOINT a",
        "FETCH 1 FROM c INTO d",
    ] {
        let (state, _) = refused(sql);
        assert!(state == "42601" || state == "0A000", "{sql}: {state}");
    }
}

#[test]
fn what_postgres_has_is_taken() {
    for sql in [
        "WITH RECURSIVE a (x) AS MATERIALIZED (SELECT 1) SELECT DISTINCT ON (x) x AS y, * FROM a AS b (z) \
         LEFT JOIN LATERAL (SELECT 2) AS c ON true CROSS JOIN d NATURAL JOIN e WHERE x = 1 GROUP BY ROLLUP (x), y \
         HAVING count(*) FILTER (WHERE z) > 1 WINDOW w AS (PARTITION BY x ORDER BY y DESC NULLS LAST) \
         ORDER BY x NULLS FIRST LIMIT 3 OFFSET 2 ROWS",
        "SELECT sum(a) OVER w, string_agg(DISTINCT b, ',' ORDER BY b), percentile_disc(0.5) WITHIN GROUP (ORDER BY a), \
         CASE a WHEN 1 THEN 2 END, a[1], a[1:2], CAST(a AS int), interval '1' day, ARRAY[1], ceil(1.5), trim(both 'x' from b), \
         substring(b from 1 for 2), overlay(b placing 'x' from 1), position('a' in b), extract(day from c), b LIKE 'x' ESCAPE '!', \
         a IN (SELECT 1), EXISTS (SELECT 1), a = ANY (ARRAY[1]), (a, b) = (1, 2), c AT TIME ZONE 'UTC', b COLLATE \"C\" \
         FROM t WINDOW w AS (ORDER BY a ROWS BETWEEN 1 PRECEDING AND CURRENT ROW)",
        "SELECT 1 UNION ALL SELECT 2 EXCEPT (VALUES (3) INTERSECT TABLE t) ORDER BY 1 FETCH FIRST 2 ROWS WITH TIES",
        "INSERT INTO t AS x (a) VALUES (1), (DEFAULT) ON CONFLICT (a) DO UPDATE SET b = excluded.b WHERE x.b > 0 RETURNING *",
        "UPDATE t AS x SET a = 1, (b, c) = (2, 3) FROM u JOIN w ON u.a = w.a WHERE x.a = u.a RETURNING x.a AS y",
        "DELETE FROM t AS x USING u, w WHERE x.a = u.a RETURNING *",
        "CREATE TABLE t (a int CONSTRAINT c NOT NULL, b text DEFAULT 'x', c int GENERATED ALWAYS AS (a + 1) STORED, \
         CONSTRAINT k PRIMARY KEY (a) NOT DEFERRABLE)",
        "BEGIN TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY",
        "COMMIT AND CHAIN",
        "SET LOCAL TIME ZONE 'UTC'",
        "DECLARE c BINARY INSENSITIVE SCROLL CURSOR WITH HOLD FOR SELECT 1",
        "EXECUTE p (1, 'x')",
        "VACUUM FULL t",
        "ANALYZE t",
    ] {
        if let Err(e) = parse(sql) {
            panic!("{sql}: {e:?}");
        }
    }
}
