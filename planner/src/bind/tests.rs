//! Binder tests over a small catalog, and the functions evaluated in batch.

use std::sync::Arc;

use datafusion::arrow::array::Array;
use datafusion::arrow::record_batch::RecordBatch;
use datafusion::datasource::{MemTable, provider_as_source};
use datafusion::logical_expr::TableSource;
use datafusion::prelude::{SessionConfig, SessionContext};
use millrace_common::{SqlError, SqlState};
use millrace_functions::{cast::to_text, register_all};
use millrace_rpc::catalog::{Column, Relation, RelationKind};

use super::*;
use crate::ast::Statement;
use crate::optimizer::{batch_options, optimize_for_batch, optimize_for_view};

/// Tables and views by name; tables are empty.
#[derive(Default)]
pub struct TestCatalog {
    relations: Vec<Arc<Relation>>,
}

impl TestCatalog {
    /// The Nexmark sources, `t (a int, b bigint, c text, d numeric, f double precision, ts timestamp)` with a
    /// hidden row id, and `k (id int primary key, name text)`.
    pub fn new() -> TestCatalog {
        let mut catalog = TestCatalog::default();
        for ddl in [
            "CREATE TABLE t (a INT, b BIGINT, c TEXT, d NUMERIC, f DOUBLE PRECISION, ts TIMESTAMP, ok BOOLEAN)",
            "CREATE TABLE k (id INT PRIMARY KEY, name TEXT)",
            "CREATE SOURCE bid (auction BIGINT, bidder BIGINT, price BIGINT, channel VARCHAR, url VARCHAR, date_time TIMESTAMP, extra VARCHAR)",
            "CREATE SOURCE auction (id BIGINT, item_name VARCHAR, description VARCHAR, initial_bid BIGINT, reserve BIGINT, date_time TIMESTAMP, expires TIMESTAMP, seller BIGINT, category BIGINT, extra VARCHAR)",
            "CREATE SOURCE person (id BIGINT, name VARCHAR, email_address VARCHAR, credit_card VARCHAR, city VARCHAR, state VARCHAR, date_time TIMESTAMP, extra VARCHAR)",
        ] {
            catalog.create(ddl);
        }
        catalog
    }

    fn create(&mut self, ddl: &str) {
        let statement = crate::parse(ddl).unwrap().remove(0).statement;
        let (Statement::CreateTable(table) | Statement::CreateSource(table)) = statement else {
            panic!("not a table")
        };
        let mut columns: Vec<Column> = Vec::new();
        let mut key = Vec::new();
        for def in &table.columns {
            let is_key =
                |o: &ast::ColumnOptionDef| matches!(o.option, ast::ColumnOption::PrimaryKey(_));
            let is_key = def.options.iter().any(is_key);
            key.extend(is_key.then_some(columns.len() as u32));
            columns.push(Column {
                name: names::fold(&def.name),
                sql_type: types::sql_type(&def.data_type).unwrap().into(),
                nullable: !is_key,
                ..Column::default()
            });
        }
        if key.is_empty() {
            key.push(columns.len() as u32);
            columns.push(Column {
                name: ROW_ID.into(),
                sql_type: SqlType::BigInt.into(),
                nullable: false,
                default_sql: None,
                hidden: true,
                ..Column::default()
            });
        }
        let kind = RelationKind::Table as i32;
        self.add(Relation {
            name: table.name.to_string(),
            kind,
            columns,
            key,
            ..Default::default()
        });
    }

    fn view(&mut self, name: &str, query: &str) {
        let bound = bind(self, query, true).unwrap();
        let columns = bound.names.iter().zip(&bound.types).map(|(name, t)| Column {
            name: name.clone(),
            sql_type: (*t).into(),
            nullable: true,
            default_sql: None,
            hidden: false,
            ..Column::default()
        });
        let columns = columns.collect();
        let kind = RelationKind::View as i32;
        let (name, query) = (name.to_owned(), query.to_owned());
        self.add(Relation { name, kind, columns, query, ..Default::default() });
    }

    fn add(&mut self, relation: Relation) {
        let id = 16384 + self.relations.len() as u32;
        let schema = "public".to_owned();
        self.relations.push(Arc::new(Relation { id, schema, ..relation }));
    }
}

impl CatalogView for TestCatalog {
    fn relation(&self, schema: Option<&str>, name: &str) -> Option<Arc<Relation>> {
        let here = schema.is_none_or(|s| s == "public");
        self.relations.iter().find(|r| here && r.name == name).cloned()
    }

    fn table_source(&self, relation: &Arc<Relation>) -> Result<Arc<dyn TableSource>, SqlError> {
        let table = MemTable::try_new(relation.arrow_schema()?, vec![vec![]]);
        Ok(provider_as_source(Arc::new(table.map_err(sql_error_from_datafusion)?)))
    }

    fn names(&self) -> Vec<String> {
        self.relations.iter().map(|r| r.name.clone()).collect()
    }
}

pub(super) fn bind(
    catalog: &TestCatalog,
    sql: &str,
    for_view: bool,
) -> Result<BoundQuery, SqlError> {
    let parsed = crate::parse(sql)?.remove(0);
    let Statement::Sql(s) = &parsed.statement else { panic!("not a query: {sql}") };
    let ast::Statement::Query(query) = s.as_ref() else { panic!("not a query: {sql}") };
    let session = SessionInfo { for_view, ..Default::default() };
    let bound = Binder::new(catalog, session).query(query, &[]);
    bound.map_err(|e| locate::in_statement(e, &parsed))
}

/// Runs a query in batch: rows of values as PostgreSQL prints them.
pub(super) fn run(sql: &str) -> Result<Vec<String>, SqlError> {
    let bound = bind(&TestCatalog::new(), sql, false)?;
    let plan = optimize_for_batch(bound.plan)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let batches: Result<Vec<RecordBatch>, _> = runtime.block_on(async {
        let mut context = SessionContext::new_with_config(SessionConfig::from(batch_options()));
        register_all(&mut context)?;
        let plan =
            context.state().query_planner().create_physical_plan(&plan, &context.state()).await?;
        datafusion::physical_plan::collect(plan, context.task_ctx()).await
    });
    let mut rows = Vec::new();
    for batch in batches.map_err(sql_error_from_datafusion)? {
        let columns: Vec<_> = batch.columns().iter().map(|c| to_text(c).unwrap()).collect();
        for i in 0..batch.num_rows() {
            let row: Vec<String> = columns
                .iter()
                .map(|c| {
                    let c = datafusion::arrow::array::AsArray::as_string::<i32>(c);
                    if c.is_null(i) { "∅".into() } else { c.value(i).to_owned() }
                })
                .collect();
            rows.push(row.join("|"));
        }
    }
    Ok(rows)
}

#[test]
fn values_are_those_of_postgres() {
    let cases = include_str!("testdata/expressions.txt");
    let mut wrong = Vec::new();
    for line in cases.lines().filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let (sql, expected) = line.split_once(" => ").expect("`expression => result`");
        let got = match run(&format!("SELECT {sql}")) {
            Ok(rows) => rows.join(" / "),
            Err(e) => format!("{} {}", e.state.0, e.message),
        };
        if got != expected {
            wrong.push(format!("{sql}\n  expected {expected}\n       got {got}"));
        }
    }
    assert!(wrong.is_empty(), "{}\n{}", wrong.len(), wrong.join("\n"));
}

/// Where PostgreSQL's answer depends on the order of rows, ours is the exact one.
#[test]
fn float_sums_are_exact() {
    let sum = |v: &str| run(&format!("SELECT sum(x) FROM (VALUES {v}) t(x)")).unwrap();
    assert_eq!(sum("(0.1::float8), (0.2::float8), (0.3::float8)"), ["0.6"]);
    assert_eq!(sum("(1e308::float8), (1::float8), (-1e308::float8)"), ["1"]);
}

#[test]
fn output_names_and_types_are_those_of_postgres() {
    let cases = [
        (
            "SELECT 1, 'x', a, t.b, count(*), sum(a), a+1 FROM t GROUP BY a, b",
            "?column? ?column? a b count sum ?column?",
            "int4 text int4 int8 int8 int8 int4",
        ),
        (
            "SELECT a::text, 5::bigint, CASE WHEN ok THEN 1 ELSE 2 END, coalesce(c, 'x'), true FROM t",
            "a int8 case coalesce ?column?",
            "text int8 int4 text bool",
        ),
        ("SELECT * FROM t", "a b c d f ts ok", "int4 int8 text numeric float8 timestamp bool"),
        ("SELECT _row_id, a FROM t", "_row_id a", "int8 int4"),
        ("SELECT a, a, 1, 1 FROM t", "a a ?column? ?column?", "int4 int4 int4 int4"),
        (
            "SELECT avg(a), avg(f), sum(b), sum(f), min(c), avg(d), sum(d) FROM t",
            "avg avg sum sum min avg sum",
            "numeric float8 numeric float8 text numeric numeric",
        ),
        (
            "SELECT extract(year FROM ts), date_trunc('day', ts), (SELECT max(a) FROM t), EXISTS (SELECT 1) FROM t",
            "extract date_trunc max exists",
            "numeric timestamp int4 bool",
        ),
        (
            "SELECT NULL, date '2020-01-01' - date '2019-01-01', interval '1 day' * 2, 0.5 * b FROM t",
            "?column? ?column? ?column? ?column?",
            "text int4 interval numeric",
        ),
        (
            "SELECT row_number() OVER (ORDER BY a), length(c), upper(c) FROM t",
            "row_number length upper",
            "int8 int4 text",
        ),
    ];
    let catalog = TestCatalog::new();
    for (sql, names, types) in cases {
        let bound = bind(&catalog, sql, false).unwrap_or_else(|e| panic!("{sql}: {e:?}"));
        assert_eq!(bound.names.join(" "), names, "{sql}");
        let got: Vec<_> =
            bound.types.iter().map(|t| millrace_functions::types::type_column_name(*t)).collect();
        assert_eq!(got.join(" "), types, "{sql}");
    }
}

/// Statements, and of their errors the state, the message and the position.
const ERRORS: &[(&str, &str, &str, Option<u32>)] = &[
    ("SELECT x FROM t", "42703", "column \"x\" does not exist", Some(8)),
    ("SELECT t.x FROM t", "42703", "column t.x does not exist", Some(8)),
    ("SELECT 1 FROM nope", "42P01", "relation \"nope\" does not exist", Some(15)),
    ("SELECT 1 FROM s.nope", "42P01", "relation \"s.nope\" does not exist", Some(15)),
    ("SELECT id FROM k, person", "42702", "column reference \"id\" is ambiguous", Some(8)),
    ("SELECT nope(1)", "42883", "function nope(integer) does not exist", Some(8)),
    ("SELECT a + c FROM t", "42883", "operator does not exist: integer + text", Some(10)),
    ("SELECT a = c FROM t", "42883", "operator does not exist: integer = text", Some(10)),
    ("SELECT a = 'x' FROM t", "22P02", "invalid input syntax for type integer: \"x\"", Some(12)),
    (
        "SELECT a IN (1, 'x') FROM t",
        "22P02",
        "invalid input syntax for type integer: \"x\"",
        Some(17),
    ),
    ("SELECT ok::date FROM t", "42846", "cannot cast type boolean to date", Some(10)),
    ("SELECT a::nope FROM t", "42704", "type \"nope\" does not exist", Some(11)),
    ("SELECT sum(c) FROM t", "42883", "function sum(text) does not exist", Some(8)),
    (
        "SELECT a FROM t WHERE row_number() OVER () = 1",
        "42P20",
        "window functions are not allowed in WHERE",
        Some(23),
    ),
    (
        "SELECT a FROM t WHERE count(*) = 1",
        "42803",
        "aggregate functions are not allowed in WHERE",
        Some(23),
    ),
    ("SELECT sum(count(*)) FROM t", "42803", "aggregate function calls cannot be nested", Some(12)),
    (
        "SELECT 1 UNION SELECT 1, 2",
        "42601",
        "each UNION query must have the same number of columns",
        Some(23),
    ),
    (
        "SELECT DISTINCT a FROM t ORDER BY ok",
        "42P10",
        "for SELECT DISTINCT, ORDER BY expressions must appear in select list",
        Some(35),
    ),
    (
        "SELECT * FROM t UNION SELECT 1",
        "42601",
        "each UNION query must have the same number of columns",
        Some(30),
    ),
    (
        "SELECT a FROM t UNION SELECT c FROM t",
        "42804",
        "UNION types integer and text cannot be matched",
        Some(30),
    ),
    (
        "SELECT DISTINCT ON (a) c FROM t ORDER BY c, a",
        "42P10",
        "SELECT DISTINCT ON expressions must match initial ORDER BY expressions",
        Some(21),
    ),
    (
        "SELECT NOT ok, NOT a FROM t WHERE NOT (a = 1)",
        "42804",
        "argument of NOT must be type boolean, not type integer",
        None,
    ),
    (
        "SELECT NOT a FROM t WHERE NOT (a = 1)",
        "42804",
        "argument of NOT must be type boolean, not type integer",
        Some(12),
    ),
    (
        "SELECT 1 FROM t JOIN k USING (nope)",
        "42703",
        "column \"nope\" specified in USING clause does not exist in left table",
        None,
    ),
    (
        "SELECT * FROM t FOR SYSTEM_TIME AS OF now()",
        "0A000",
        "FOR SYSTEM_TIME AS OF another time than PROCTIME() is not supported",
        None,
    ),
    (
        "SELECT * FROM tumble(t, c, interval '1 s')",
        "42804",
        "the time column of TUMBLE must be a timestamp, not text",
        None,
    ),
    (
        "SELECT * FROM tumble(t, ts, interval '1 month')",
        "22023",
        "the window size must be a positive interval of days or less",
        None,
    ),
];

#[test]
fn errors_have_state_position_and_hint() {
    let catalog = TestCatalog::new();
    for &(sql, state, message, position) in ERRORS {
        let e = match bind(&catalog, sql, false) {
            Err(e) => e,
            Ok(b) => panic!("{sql} was bound: {}", b.plan),
        };
        assert_eq!((e.state.0, e.message.as_str()), (state, message), "{sql}: {e:?}");
        assert_eq!(e.position, position, "{sql}");
    }
    let e = bind(&catalog, "SELECT bider FROM bid", false).unwrap_err();
    assert_eq!(
        e.hint.as_deref().unwrap(),
        "Perhaps you meant to reference the column \"bid.bidder\"."
    );
}

#[test]
fn parameters_take_their_types_from_use() {
    let catalog = TestCatalog::new();
    let cases: [(&str, &[DataType]); 6] = [
        ("SELECT * FROM t WHERE a = $1 AND b > $2", &[DataType::Int32, DataType::Int64]),
        ("SELECT $1::date", &[DataType::Date32]),
        ("SELECT a + $1 FROM t LIMIT $2", &[DataType::Int32, DataType::Int64]),
        ("SELECT $1", &[DataType::Utf8]),
        ("SELECT * FROM t WHERE a IN ($1, $2)", &[DataType::Int32, DataType::Int32]),
        ("SELECT * FROM t WHERE c LIKE $1", &[DataType::Utf8]),
    ];
    for (sql, expected) in cases {
        let bound = bind(&catalog, sql, false).unwrap_or_else(|e| panic!("{sql}: {e:?}"));
        assert_eq!(bound.param_types, expected, "{sql}");
    }
}

#[test]
fn views_are_expanded_and_duplicates_refused() {
    let mut catalog = TestCatalog::new();
    catalog.view("v", "SELECT a, count(*) FROM t GROUP BY a");
    let bound = bind(&catalog, "SELECT count FROM v WHERE a = '5'", false).unwrap();
    assert_eq!(bound.relations.len(), 2);
    optimize_for_view(bound.plan).unwrap();
    let bound = bind(&catalog, "SELECT a, a FROM t", true).unwrap();
    assert_eq!(bound.relation_names().unwrap_err().state, SqlState::DUPLICATE_COLUMN);
    let bound = bind(&catalog, "SELECT a, now() FROM t", true).unwrap();
    assert_eq!(check_view_volatility(&bound.plan).unwrap_err().state.0, "0A000");
}

#[test]
fn nexmark_binds_and_optimises() {
    let catalog = TestCatalog::new();
    let all = include_str!("testdata/nexmark.sql");
    let mut count = 0;
    for statement in crate::parse(all).unwrap() {
        let bound = bind(&catalog, &statement.text, true)
            .unwrap_or_else(|e| panic!("{}: {e:?}", statement.text));
        check_view_volatility(&bound.plan).unwrap();
        let plan =
            optimize_for_view(bound.plan).unwrap_or_else(|e| panic!("{}: {e:?}", statement.text));
        assert!(!plan.to_string().contains("_row_id"), "{plan}");
        println!("{}\n{}", statement.text, plan.display_indent());
        count += 1;
    }
    assert_eq!(count, 12);
}

#[test]
fn not_in_stays_null_aware() {
    let catalog = TestCatalog::new();
    let bound = bind(&catalog, "SELECT a FROM t WHERE a NOT IN (SELECT id FROM k)", true).unwrap();
    let plan = optimize_for_view(bound.plan).unwrap();
    assert!(plan.display_indent().to_string().contains("LeftAnti"), "{}", plan.display_indent());
    assert!(format!("{plan:?}").contains("null_aware: true"), "{plan:?}");
    let null = "SELECT x FROM (VALUES (1), (2)) v(x) WHERE x NOT IN (SELECT y FROM (VALUES (1), (NULL)) w(y))";
    assert!(run(null).unwrap().is_empty());
}

/// Frames and DISTINCT ON say which of their expressions is wrong, as PostgreSQL does.
#[test]
fn frames_and_positions_have_their_places() {
    let cases = [
        (
            "SELECT sum(a) OVER (ORDER BY a ROWS b PRECEDING) FROM t",
            "42P10",
            "argument of ROWS must not contain variables",
            Some(37),
        ),
        (
            "SELECT sum(a) OVER w FROM t WINDOW w AS (ORDER BY a GROUPS 1 + b PRECEDING)",
            "42P10",
            "argument of GROUPS must not contain variables",
            Some(64),
        ),
        (
            "SELECT sum(a) OVER (ORDER BY a RANGE 1.5 PRECEDING) FROM t",
            "0A000",
            "RANGE with offset PRECEDING/FOLLOWING is not supported for column type integer and offset type numeric",
            Some(38),
        ),
        (
            "SELECT sum(a) OVER (ORDER BY c RANGE 1 PRECEDING) FROM t",
            "0A000",
            "RANGE with offset PRECEDING/FOLLOWING is not supported for column type text",
            Some(38),
        ),
        (
            "SELECT sum(a) OVER (ORDER BY a ROWS $1 PRECEDING) FROM t",
            "0A000",
            "a parameter as a frame's offset is not supported",
            None,
        ),
        (
            "SELECT DISTINCT ON (a, 5) a FROM t",
            "42P10",
            "DISTINCT ON position 5 is not in select list",
            Some(24),
        ),
    ];
    let catalog = TestCatalog::new();
    for (sql, state, message, position) in cases {
        let e = bind(&catalog, sql, false).map(|b| b.plan).unwrap_err();
        assert_eq!((e.state.0, e.message.as_str()), (state, message), "{sql}");
        assert_eq!(e.position, position, "{sql}");
    }
}

/// What repeats its operands at every level is refused before it fills the memory; what repeats nothing may be long.
#[test]
fn copies_within_copies_are_refused() {
    let catalog = TestCatalog::new();
    let windows =
        format!("(SELECT {}1 FROM t WINDOW w AS (PARTITION BY ", "sum(1) OVER w + ".repeat(16));
    let nested = [
        ("(", "true", " IN (SELECT true))", 40),
        ("(", "'x'", " LIKE ALL (ARRAY['a', 'b']))", 40),
        ("(", "'x'", " LIKE SOME (ARRAY['a', 'b']))", 40),
        (windows.as_str(), "1", "))", 5),
    ];
    for (before, inner, after, levels) in nested {
        let sql = format!("SELECT {}{inner}{}", before.repeat(levels), after.repeat(levels));
        let e = bind(&catalog, &sql, false).map(|b| b.plan).unwrap_err();
        assert_eq!(e.state, SqlState::STATEMENT_TOO_COMPLEX, "{sql}: {e:?}");
        assert!(e.message.contains("too large"), "{sql}: {e:?}");
    }
    let sum = format!("a{}", " + 1".repeat(40));
    let list: Vec<String> = (0..5_000).map(|n| n.to_string()).collect();
    let sql = format!("SELECT {sum} = ANY (ARRAY[{}]) FROM t", list.join(", "));
    bind(&catalog, &sql, false).unwrap();
}
