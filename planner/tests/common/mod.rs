//! A catalog of tables and sources for planner tests, binding without a server, and files that pin
//! text: `UPDATE_SNAPSHOTS=1 cargo test` rewrites them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::catalog::default_table_source::DefaultTableSource;
use datafusion::datasource::empty::EmptyTable;
use datafusion::logical_expr::TableSource;
use millrace_common::{RelationId, SqlError, SqlType};
use millrace_graph::JobGraph;
use millrace_planner::explain::{Relations, explain_graph};
use millrace_planner::stream::{JobOptions, Watch, plan_watched};
use millrace_planner::{Binder, CatalogView, SessionInfo, Statement, parse};
use millrace_rpc::catalog::{Column, Relation, RelationKind, RowStorage};

pub struct TestCatalog {
    relations: BTreeMap<String, Arc<Relation>>,
}

fn column(name: &str, sql_type: SqlType, nullable: bool) -> Column {
    Column {
        name: name.into(),
        sql_type: sql_type.into(),
        nullable,
        hidden: name == "_row_id",
        ..Column::default()
    }
}

/// `name type[!]`, comma separated; `!`: NOT NULL.
fn columns(text: &str) -> Vec<Column> {
    text.split(", ")
        .map(|c| {
            let (name, t) = c.split_once(' ').expect("a column has a name and a type");
            let sql_type = match t.trim_end_matches('!') {
                "bigint" => SqlType::BigInt,
                "int" => SqlType::Int,
                "text" => SqlType::Varchar(None),
                "timestamp" => SqlType::Timestamp,
                "numeric" => SqlType::Numeric(Some((12, 2))),
                "double" => SqlType::Double,
                "boolean" => SqlType::Boolean,
                other => panic!("type {other}"),
            };
            column(name, sql_type, !t.ends_with('!'))
        })
        .collect()
}

impl TestCatalog {
    /// The Nexmark sources; `item` and `orders` with keys, `entry` without one, `log` append-only.
    pub fn new() -> TestCatalog {
        let mut catalog = TestCatalog { relations: BTreeMap::new() };
        let bid = "auction bigint, bidder bigint, price bigint, channel text, url text, \
                   date_time timestamp, extra text, _row_id bigint!";
        let auction = "id bigint, item_name text, description text, initial_bid bigint, \
                       reserve bigint, date_time timestamp, expires timestamp, seller bigint, \
                       category bigint, extra text, _row_id bigint!";
        let person = "id bigint, name text, email_address text, credit_card text, city text, \
                      state text, date_time timestamp, extra text, _row_id bigint!";
        for (name, text) in [("bid", bid), ("auction", auction), ("person", person)] {
            catalog.add(name, RelationKind::Source, text, &["_row_id"], true);
        }
        let table = RelationKind::Table;
        catalog.add("item", table, "id bigint!, name text, price numeric", &["id"], false);
        let orders = "id bigint!, item_id bigint, amount int, note text, paid boolean, rate double";
        catalog.add("orders", table, orders, &["id"], false);
        catalog.add(
            "entry",
            table,
            "a bigint, b bigint, c text, _row_id bigint!",
            &["_row_id"],
            false,
        );
        catalog.add(
            "log",
            table,
            "at timestamp, level int, line text, _row_id bigint!",
            &["_row_id"],
            true,
        );
        catalog.add_for_lookahead();
        catalog
    }

    /// Advertising events and their campaigns, a star of tables, a view, and events with a watermark.
    fn add_for_lookahead(&mut self) {
        let event = "ad_id bigint, user_id bigint, kind text, at timestamp, _row_id bigint!";
        self.add("ad_event", RelationKind::Source, event, &["_row_id"], true);
        let table = RelationKind::Table;
        self.add("campaign", table, "ad_id bigint!, campaign_id bigint", &["ad_id"], false);
        let fact = "id bigint!, a bigint, b bigint, c bigint, d bigint";
        self.add("fact", table, fact, &["id"], false);
        for name in ["dim_a", "dim_b", "dim_c", "dim_d"] {
            self.add(name, table, "id bigint!, next bigint, label text", &["id"], false);
        }
        let view = RelationKind::MaterializedView;
        self.add("revenue", view, "item_id bigint!, total numeric", &["item_id"], false);
        self.add("paid", view, "id bigint!, item_id bigint, amount int", &["id"], false);
        self.add("large", view, "id bigint!, item_id bigint, amount int", &["id"], false);
        self.add("moved", view, "id bigint!, next_item bigint, amount int", &["id"], false);
        let click = "user_id bigint, page bigint, at timestamp, _row_id bigint!";
        self.add("click", RelationKind::Source, click, &["_row_id"], true);
        let click = self.relations.get_mut("click").expect("it was added");
        Arc::make_mut(click).watermark_columns = vec![2];
    }

    fn add(&mut self, name: &str, kind: RelationKind, text: &str, key: &[&str], append_only: bool) {
        let columns = columns(text);
        let position = |k: &&str| columns.iter().position(|c| c.name == *k).expect("a key") as u32;
        let key: Vec<u32> = key.iter().map(position).collect();
        let source = kind == RelationKind::Source;
        let relation = Relation {
            id: 16384 + self.relations.len() as u32,
            schema: "public".into(),
            name: name.into(),
            kind: kind as i32,
            distribution: if source { vec![] } else { key.clone() },
            primary_key: !columns.iter().any(|c| c.hidden),
            key,
            columns,
            append_only,
            storage: RowStorage::Keyed as i32,
            ..Relation::default()
        };
        self.relations.insert(name.into(), Arc::new(relation));
    }

    pub fn name_of(&self, id: RelationId) -> Option<String> {
        self.relations.values().find(|r| r.id == id.0).map(|r| r.name.clone())
    }

    fn is_table(&self, id: RelationId) -> bool {
        let table = RelationKind::Table as i32;
        self.relations.values().any(|r| r.id == id.0 && r.kind == table)
    }

    /// What the job of a view runs, of three that read each other; of `revenue` it is not known.
    fn graph_of(&self, id: RelationId) -> Option<Arc<JobGraph>> {
        let query = match self.name_of(id)?.as_str() {
            "paid" => "SELECT id, item_id, amount FROM orders WHERE paid",
            "large" => "SELECT id, item_id, amount FROM paid WHERE amount > 100",
            "moved" => "SELECT id, item_id + 1 AS next_item, amount FROM large",
            _ => return None,
        };
        Some(Arc::new(plan(query).expect("a plan")))
    }
}

impl CatalogView for TestCatalog {
    fn relation(&self, _schema: Option<&str>, name: &str) -> Option<Arc<Relation>> {
        self.relations.get(name).cloned()
    }

    fn table_source(&self, relation: &Arc<Relation>) -> Result<Arc<dyn TableSource>, SqlError> {
        let table = EmptyTable::new(relation.arrow_schema()?);
        Ok(Arc::new(DefaultTableSource::new(Arc::new(table))))
    }

    fn names(&self) -> Vec<String> {
        self.relations.keys().cloned().collect()
    }
}

/// SQL to job graph, the whole way.
pub fn plan(sql: &str) -> Result<JobGraph, SqlError> {
    plan_seen(sql, &mut |_, _| {})
}

/// The same, with a look at the plan after each pass.
pub fn plan_seen(sql: &str, watch: Watch<'_>) -> Result<JobGraph, SqlError> {
    plan_as(sql, &JobOptions::default(), watch)
}

/// The plan of a view that emits on window close.
pub fn plan_closed(sql: &str) -> Result<JobGraph, SqlError> {
    let options = JobOptions { on_window_close: true, ..JobOptions::default() };
    plan_as(sql, &options, &mut |_, _| {})
}

fn plan_as(sql: &str, options: &JobOptions, watch: Watch<'_>) -> Result<JobGraph, SqlError> {
    let catalog = TestCatalog::new();
    let mut statements = parse(sql)?;
    let session = SessionInfo { for_view: true, ..SessionInfo::default() };
    let binder = Binder::new(&catalog, session);
    match statements.pop().map(|s| s.statement) {
        Some(Statement::Sql(statement)) => match *statement {
            sqlparser::ast::Statement::Query(query) => {
                let bound = binder.query(&query, &[])?;
                plan_watched(&bound, &catalog, options, watch)
            }
            other => panic!("not a query: {other}"),
        },
        other => panic!("not a query: {other:?}"),
    }
}

pub fn explain(graph: &JobGraph) -> String {
    let catalog = TestCatalog::new();
    let relations = Relations {
        name: &|id| catalog.name_of(id),
        is_table: &|id| catalog.is_table(id),
        graph: &|id| catalog.graph_of(id),
    };
    let lines = explain_graph(graph, &relations);
    lines.join("\n") + "\n"
}

pub fn tests_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// Compares with a file below `tests`, or writes it. The error says what differs first.
pub fn compare(path: &str, actual: &str) -> Result<(), String> {
    let file = tests_dir().join(path);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&file, actual).map_err(|e| format!("{path}: {e}"))?;
        return Ok(());
    }
    let expected = std::fs::read_to_string(&file).map_err(|e| format!("{path}: {e}"))?;
    if expected == actual {
        return Ok(());
    }
    let differing = expected.lines().zip(actual.lines()).position(|(e, a)| e != a);
    let line = differing.unwrap_or(expected.lines().count().min(actual.lines().count()));
    Err(format!("{path} differs from line {}:\n{actual}", line + 1))
}
