use std::sync::atomic::{AtomicUsize, Ordering};

use millrace_functions::interrupt::Interrupt;

use super::*;
use crate::ast::{CursorStart, ExplainTarget, ObjectKind, Show};

fn one(sql: &str) -> Statement {
    let mut all = parse(sql).unwrap_or_else(|e| panic!("{sql}: {e} {e:?}"));
    assert_eq!(all.len(), 1, "{sql}");
    all.remove(0).statement
}

/// A short name of what a statement became.
fn kind(s: &Statement) -> &'static str {
    match s {
        Statement::Sql(_) => "sql",
        Statement::CreateTable(_) => "table",
        Statement::CreateSource(_) => "source",
        Statement::CreateView(v) if v.materialized => "mview",
        Statement::CreateView(_) => "view",
        Statement::CreateIndex(_) => "index",
        Statement::CreateSchema { .. } => "schema",
        Statement::Drop(_) => "drop",
        Statement::AlterRelation { .. } => "alter",
        Statement::Truncate { .. } => "truncate",
        Statement::Show(_) => "show",
        Statement::Describe { .. } => "describe",
        Statement::Explain(_) => "explain",
        Statement::Flush => "flush",
        Statement::Wait => "wait",
        Statement::CancelJobs(_) => "cancel",
        Statement::AlterSystem { .. } => "alter system",
        Statement::CreateSink(_) => "sink",
        Statement::CreateSubscription(_) => "subscription",
        Statement::DeclareSubscriptionCursor(_) => "declare",
        Statement::FetchWait { .. } => "fetch",
        Statement::Move { .. } => "move",
        Statement::Subscribe(_) => "subscribe",
        Statement::User(_) => "user",
    }
}

#[test]
fn statements_are_recognised() {
    let table = [
        ("SELECT 1", "sql"),
        (
            "INSERT INTO t VALUES (1) ON CONFLICT (a) DO UPDATE SET b = excluded.b RETURNING *",
            "sql",
        ),
        ("UPDATE t SET a = 1 WHERE b = 2 RETURNING a", "sql"),
        ("DELETE FROM t USING u WHERE t.a = u.a", "sql"),
        ("COPY t FROM STDIN WITH (FORMAT csv, HEADER true)", "sql"),
        ("COPY (SELECT 1) TO STDOUT", "sql"),
        ("BEGIN", "sql"),
        ("START TRANSACTION ISOLATION LEVEL SERIALIZABLE", "sql"),
        ("COMMIT", "sql"),
        ("ROLLBACK TO SAVEPOINT a", "sql"),
        ("ABORT", "sql"),
        ("SAVEPOINT a", "sql"),
        ("RELEASE SAVEPOINT a", "sql"),
        ("SET background_ddl = on", "sql"),
        ("SET TIME ZONE 'UTC'", "sql"),
        ("RESET ALL", "sql"),
        ("DISCARD ALL", "sql"),
        ("DEALLOCATE ALL", "sql"),
        ("CLOSE ALL", "sql"),
        ("PREPARE p AS SELECT 1", "sql"),
        ("EXECUTE p(1)", "sql"),
        ("DECLARE c CURSOR FOR SELECT 1", "sql"),
        ("FETCH 10 FROM c", "sql"),
        ("CREATE TABLE t (a INT PRIMARY KEY, b TEXT NOT NULL DEFAULT 'x') APPEND ONLY", "table"),
        ("CREATE TABLE IF NOT EXISTS t (a INT) ON CONFLICT OVERWRITE WITH (x.y = 'z')", "table"),
        ("CREATE TABLE t AS SELECT 1 AS a", "table"),
        (
            "CREATE SOURCE s (a INT, WATERMARK FOR a AS a - INTERVAL '4 seconds', PRIMARY KEY (a)) WITH (connector = 'nexmark', event.num = 5) FORMAT PLAIN ENCODE JSON",
            "source",
        ),
        ("CREATE OR REPLACE VIEW v (a, b) AS SELECT 1, 2", "view"),
        ("CREATE MATERIALIZED VIEW v AS SELECT 1 AS a", "mview"),
        ("CREATE UNIQUE INDEX i ON t (a DESC, b) INCLUDE (c)", "index"),
        ("CREATE INDEX ON t (a)", "index"),
        ("CREATE SCHEMA IF NOT EXISTS s", "schema"),
        ("DROP MATERIALIZED VIEW IF EXISTS a, b CASCADE", "drop"),
        ("DROP SOURCE s", "drop"),
        ("ALTER MATERIALIZED VIEW v SET PARALLELISM = 4", "alter"),
        ("ALTER TABLE t RENAME TO u", "alter"),
        ("ALTER TABLE t ADD COLUMN x INT", "sql"),
        ("TRUNCATE t", "truncate"),
        ("TRUNCATE TABLE t, u RESTART IDENTITY CASCADE", "truncate"),
        ("SHOW TABLES FROM public", "show"),
        ("SHOW search_path", "show"),
        ("DESCRIBE t", "describe"),
        ("EXPLAIN SELECT 1", "explain"),
        ("EXPLAIN (ANALYZE, COSTS off) SELECT 1", "explain"),
        ("EXPLAIN (SELECT 1)", "explain"),
        ("FLUSH;", "flush"),
        ("WAIT", "wait"),
        ("CANCEL JOBS 1, 2", "cancel"),
        ("SELECT * FROM a JOIN b FOR SYSTEM_TIME AS OF PROCTIME() AS b ON a.x = b.x", "sql"),
        ("SELECT at.a FROM changes at", "sql"),
    ];
    for (sql, expected) in table {
        assert_eq!(kind(&one(sql)), expected, "{sql}");
    }
}

#[test]
fn options_may_have_dots_and_numbers() {
    let Statement::CreateSource(s) = one(
        "CREATE SOURCE bid (price BIGINT, t TIMESTAMP, WATERMARK FOR t AS t - INTERVAL '4 seconds')
         WITH (connector = 'nexmark', event.num = 1000, \"Odd\" = true)",
    ) else {
        panic!("not a source")
    };
    let expected = [("connector", "nexmark"), ("event.num", "1000"), ("Odd", "true")];
    assert_eq!(s.options, expected.map(|(a, b)| (a.to_string(), b.to_string())));
    assert_eq!(s.watermark.unwrap().text, "t - INTERVAL '4 seconds'");
    assert_eq!(s.columns.len(), 2);
}

#[test]
fn every_statement_keeps_its_text() {
    let all = parse("  select 'ä;' ;; CREATE VIEW v AS\n SELECT 2 ; flush").unwrap();
    let texts: Vec<_> = all.iter().map(|s| (s.text.as_str(), s.offset)).collect();
    assert_eq!(texts, [("select 'ä;'", 2), ("CREATE VIEW v AS\n SELECT 2", 17), ("flush", 46)]);
    let Statement::CreateView(v) = &all[1].statement else { panic!("not a view") };
    assert_eq!(v.query.text, "SELECT 2");
}

#[test]
fn emit_on_window_close_is_parsed() {
    let all = parse("CREATE MATERIALIZED VIEW v AS SELECT a FROM t EMIT ON WINDOW CLOSE; SELECT 1")
        .unwrap();
    let Statement::CreateView(v) = &all[0].statement else { panic!("not a view") };
    assert!(v.emit_on_window_close);
    assert_eq!(v.query.text, "SELECT a FROM t");
    let explain = "EXPLAIN CREATE MATERIALIZED VIEW v AS SELECT a FROM t EMIT ON WINDOW CLOSE";
    let Statement::Explain(e) = one(explain) else { panic!("not EXPLAIN") };
    let ExplainTarget::Statement(Statement::CreateView(v)) = e.target else { panic!("no view") };
    assert!(v.emit_on_window_close);
    assert_eq!(v.query.text, "SELECT a FROM t");
    assert!(parse("EXPLAIN SELECT a FROM t EMIT ON WINDOW CLOSE").is_err());
    assert!(parse("SELECT a FROM t EMIT ON WINDOW CLOSE").is_err());
}

#[test]
fn show_and_explain_have_their_parts() {
    assert!(matches!(
        one("SHOW MATERIALIZED VIEWS"),
        Statement::Show(Show::MaterializedViews(None))
    ));
    assert!(matches!(
        one("SHOW CREATE MATERIALIZED VIEW v"),
        Statement::Show(Show::Create(ObjectKind::MaterializedView, _))
    ));
    let Statement::Explain(e) = one("EXPLAIN ANALYZE MATERIALIZED VIEW v") else { panic!() };
    assert!(e.analyze && matches!(e.target, ExplainTarget::Job(_)));
    let Statement::Explain(e) = one("EXPLAIN CREATE MATERIALIZED VIEW v AS SELECT 1") else {
        panic!()
    };
    assert!(matches!(e.target, ExplainTarget::Statement(Statement::CreateView(_))));
}

#[test]
fn errors_have_postgres_words_and_positions() {
    let table = [
        ("SELEC 1", "syntax error at or near \"SELEC\"", 1),
        ("SELECT 1 FROM", "syntax error at end of input", 14),
        ("SELECT a b c FROM t", "syntax error at or near \"c\"", 12),
        ("SELECT * FRM t", "syntax error at or near \"FRM\"", 10),
        ("SELECT 1;\nSELECT )", "syntax error at or near \")\"", 18),
        ("CREATE TABLE t (a INT,)", "syntax error at or near \")\"", 23),
        ("SELECT 'ä', FROM WHERE", "syntax error at or near \"WHERE\"", 18),
        ("CREATE SOURCE s (a INT) WITH (x 1)", "syntax error at or near \"1\"", 33),
        ("SELECT 'abc", "unterminated quoted string at or near \"'abc\"", 8),
        ("DROP TABLE", "syntax error at end of input", 11),
    ];
    for (sql, message, position) in table {
        let e = parse(sql).expect_err(sql);
        assert_eq!(e.state, SqlState::SYNTAX_ERROR, "{sql}");
        assert_eq!((e.message.as_str(), e.position), (message, Some(position)), "{sql}");
    }
}

#[test]
fn deep_nesting_is_an_error_not_a_crash() {
    let sql = format!("SELECT {}1{}", "(".repeat(5000), ")".repeat(5000));
    assert_eq!(parse(&sql).unwrap_err().state, SqlState::STATEMENT_TOO_COMPLEX);
}

#[test]
fn a_sinks_query_ends_where_its_options_begin() {
    let Statement::CreateSink(s) =
        one("CREATE SINK s AS WITH x AS (SELECT 1 AS a) SELECT a FROM x \
         WITH (connector = 'fs', path = '/p') FORMAT UPSERT ENCODE JSON")
    else {
        panic!()
    };
    assert_eq!(s.query.text, "WITH x AS (SELECT 1 AS a) SELECT a FROM x");
    assert_eq!(s.options.len(), 2);
    let format = s.format.unwrap();
    assert_eq!((format.format.as_str(), format.encode.as_str()), ("UPSERT", "JSON"));
    let Statement::CreateSink(s) = one("CREATE SINK s INTO t (a, b) FROM public.v") else {
        panic!()
    };
    assert!(s.from_relation && s.into.is_some_and(|(_, columns)| columns.len() == 2));
    assert_eq!(s.query.text, "SELECT * FROM public.v");
    // Errors in the query have their place in the whole statement.
    let error = parse("CREATE SINK s AS SELECT a FROM t WHERE = 1 WITH (a = 1)").unwrap_err();
    assert_eq!((error.state, error.position), (SqlState::SYNTAX_ERROR, Some(40)));
}

#[test]
fn subscriptions_and_their_cursors() {
    assert_eq!(
        kind(&one("CREATE SUBSCRIPTION s FROM v WITH (retention = '1 day')")),
        "subscription"
    );
    let start = |sql: &str| match one(sql) {
        Statement::DeclareSubscriptionCursor(d) => d.start,
        _ => panic!("{sql}"),
    };
    assert_eq!(start("DECLARE c SUBSCRIPTION CURSOR FOR s"), CursorStart::Now);
    assert_eq!(start("DECLARE c SUBSCRIPTION CURSOR FOR s FULL"), CursorStart::Full);
    assert_eq!(start("DECLARE c SUBSCRIPTION CURSOR FOR s SINCE begin()"), CursorStart::Begin);
    assert_eq!(start("DECLARE c SUBSCRIPTION CURSOR FOR s SINCE now()"), CursorStart::Now);
    assert_eq!(
        start("DECLARE c SUBSCRIPTION CURSOR FOR s SINCE 42"),
        CursorStart::After("42".into())
    );
    assert_eq!(kind(&one("DECLARE c CURSOR WITH HOLD FOR SELECT 1")), "sql");
    assert_eq!(kind(&one("FETCH 10 FROM c WITH (timeout = '1s')")), "fetch");
    assert_eq!(kind(&one("FETCH 10 FROM c")), "sql");
}

#[test]
fn subscribe_takes_a_relation_or_a_query() {
    let parts = |sql: &str| match one(sql) {
        Statement::Subscribe(s) => (s.relation.is_some(), s.query.text, s.as_of, s.copy.is_some()),
        _ => panic!("{sql}"),
    };
    let all = |relation, text: &str, as_of: Option<&str>, copy| {
        (relation, text.to_owned(), as_of.map(str::to_owned), copy)
    };
    assert_eq!(parts("SUBSCRIBE TO v"), all(true, "SELECT * FROM v", None, false));
    assert_eq!(
        parts("COPY (SUBSCRIBE v AS OF 7 WITH (snapshot = false)) TO STDOUT (FORMAT csv)"),
        all(true, "SELECT * FROM v", Some("7"), true)
    );
    assert_eq!(
        parts("SUBSCRIBE TO SELECT (a) FROM t AS OF 8 WITH (progress = true)"),
        all(false, "SELECT (a) FROM t", Some("8"), false)
    );
}

#[test]
fn generated_columns_may_have_types() {
    use sqlparser::ast::{ColumnOption, DataType};
    let sql = "CREATE TABLE t (a int, b bigint AS a * 2, c timestamptz AS PROCTIME(), d AS a, e text NOT NULL)";
    let Statement::CreateTable(table) = one(sql) else { panic!("not a table") };
    let generated = |c: &sqlparser::ast::ColumnDef| {
        let mut options = c.options.iter();
        options
            .any(|o| matches!(&o.option, ColumnOption::Generated { generation_expr: Some(_), .. }))
    };
    let found: Vec<(bool, bool)> = table
        .columns
        .iter()
        .map(|c| (generated(c), c.data_type != DataType::Unspecified))
        .collect();
    assert_eq!(found, [(false, true), (true, true), (true, true), (true, false), (false, true)]);
}

#[test]
fn windows_may_be_written_as_in_standard_sql() {
    let sql = |text: &str| match one(text) {
        Statement::Sql(sql) => sql.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        sql(
            "SELECT * FROM TUMBLE(TABLE s.t, DESCRIPTOR(at), INTERVAL '10 seconds') w, HOP(TABLE u, DESCRIPTOR(\"at\"), f(1), g(2))"
        ),
        sql("SELECT * FROM TUMBLE(s.t, at, INTERVAL '10 seconds') w, HOP(u, \"at\", f(1), g(2))"),
    );
    assert_eq!(sql("TABLE tumble"), sql("SELECT * FROM tumble"));
}

#[test]
fn abort_is_rollback() {
    use sqlparser::ast::Statement as Sql;
    for (sql, chained) in [
        ("ABORT", false),
        ("abort work", false),
        ("ABORT TRANSACTION AND NO CHAIN", false),
        ("ABORT AND CHAIN", true),
    ] {
        let Statement::Sql(parsed) = one(sql) else { panic!("{sql}") };
        assert_eq!(*parsed, Sql::Rollback { chain: chained, savepoint: None }, "{sql}");
    }
    assert!(parse("ABORT TO SAVEPOINT a").is_err());
}

#[test]
fn places_are_found_in_any_text() {
    use sqlparser::tokenizer::Location;
    let wide = "é".repeat(200);
    for sql in ["a\nbc\n", "", "aé\r\n\n→b", wide.as_str(), &format!("{wide}\n{wide}x")] {
        let source = Source::new(sql);
        let (mut line, mut column) = (1, 1);
        for (n, (byte, c)) in sql.char_indices().enumerate() {
            let at = Location { line, column };
            assert_eq!((source.byte(at), source.chars_before(at)), (byte, n), "{sql:?} {n}");
            (line, column) = if c == '\n' { (line + 1, 1) } else { (line, column + 1) };
        }
        for (line, column) in [(line, column), (line, column + 9), (line + 1, 1), (0, 0)] {
            let at = Location { line, column };
            let end = (sql.len(), sql.chars().count());
            assert_eq!((source.byte(at), source.chars_before(at)), end, "{sql:?}");
        }
    }
}

/// A string of many statements in one line is not counted from its start for each of them.
#[test]
fn statements_of_one_line_have_their_places() {
    for unit in ["SELECT 'x'; ", "SELECT 'é'; "] {
        let sql = unit.repeat(2000);
        let parsed = parse(&sql).unwrap();
        let characters = unit.chars().count();
        assert_eq!(parsed.len(), 2000);
        assert!(parsed.iter().enumerate().all(|(i, s)| s.offset == i * characters));
        assert!(parsed.iter().all(|s| s.text == unit.trim_end_matches("; ")));
    }
}

/// What is missing when it is noticed may be there again when the error is worded: memory, once half a tree is dropped.
#[test]
fn the_end_of_a_statement_is_told_wherever_it_is_noticed() {
    let sql = format!("SELECT {}", vec!["a"; 2000].join(", "));
    for question in 0..8 {
        let asked = AtomicUsize::new(0);
        let once = Interrupt::new(move || {
            let now = asked.fetch_add(1, Ordering::Relaxed) == question;
            now.then(|| SqlError::new(SqlState::OUT_OF_MEMORY, "full"))
        });
        let state = once.during(|| parse(&sql)).map_err(|e| e.state);
        assert_eq!(state.err(), Some(SqlState::OUT_OF_MEMORY), "{question}");
    }
}
