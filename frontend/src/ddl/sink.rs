//! CREATE SINK: a query whose changes leave the system, or feed a table of it.

mod fits;

use millrace_common::{RelationId, SqlError, SqlState, SqlType};
use millrace_connector::sink::{self, SINK_ID, SinkType};
use millrace_graph::{JobGraph, Operator};
use millrace_planner::ast::CreateSink;
use millrace_planner::stream::{JobOptions, Sink, SinkKey, plan_job};
use millrace_planner::{Binder, BoundQuery, check_view_volatility};
use millrace_rpc::catalog::{Column, OptionEntry, Relation, RelationKind};
use sqlparser::ast::Ident;

use super::{create_and_wait, generated, new_name, view};
use crate::dml::{self, rewrite};
use crate::query::SessionCatalog;
use crate::secrets::masked_definition;
use crate::session::{Session, busy};

/// A sink before it exists.
pub struct Planned {
    pub relation: Relation,
    pub graph: JobGraph,
}

pub async fn create_sink(
    session: &mut Session,
    def: &CreateSink,
    text: &str,
) -> Result<String, SqlError> {
    let tag = "CREATE SINK".to_owned();
    let kind = RelationKind::Sink;
    let Some((catalog, schema, name)) = new_name(session, &def.name, kind, def.if_not_exists)?
    else {
        return Ok(tag);
    };
    let Planned { relation, graph } = plan(session, &catalog, def)?;
    if relation.target == 0 {
        sink::create_target(&relation)?.check().await.map_err(|e| {
            let mut e = SqlError::from(e);
            e.hint.get_or_insert_with(|| "The sink was not created.".to_owned());
            e
        })?;
    }
    let relation = Relation {
        schema,
        name,
        definition: masked_definition(text),
        owner: session.user.clone(),
        ..relation
    };
    create_and_wait(session, relation, graph.tables.len().max(1) as u32, false).await?;
    Ok(tag)
}

/// Checks the definition and plans its job.
pub fn plan(
    session: &Session,
    catalog: &SessionCatalog,
    def: &CreateSink,
) -> Result<Planned, SqlError> {
    let (_, name) = SessionCatalog::split_name(&def.name)?;
    let mut relation = Relation {
        name,
        kind: RelationKind::Sink as i32,
        query: def.query.text.clone(),
        options: options(def)?,
        ..Relation::default()
    };
    let table = match &def.into {
        Some((table, _)) => {
            let table = catalog.resolve(table)?;
            dml::check_table(&table, "sink into")?;
            only_appended(&table)?;
            relation.target = table.id;
            Some(table)
        }
        None => None,
    };
    let mut query = def.query.query.clone();
    if let (Some(table), Some((_, columns))) = (&table, &def.into) {
        *query = into_query(session, catalog, def, table, columns)?;
    }
    let bound = Binder::new(catalog, session.info(true)).query(&query, &[])?;
    let names = bound.relation_names()?;
    let kind = match &table {
        Some(table) => table_type(&relation, table)?,
        None => sink::sink_type(&relation)?,
    };
    let key = key(&relation, &bound, kind, table.as_deref())?;
    let blackhole = table.is_none() && relation.option("connector") == Some("blackhole");
    let graph = job(&bound, catalog, blackhole, key)?;
    relation.depends_on = view::depends_on(&bound);
    relation = view::with_graph(relation, &graph, &bound, &names)?;
    if table.is_some() {
        sink::check_common(&relation)?;
        only_table_options(&relation)?;
    } else {
        // Its options are right, or this says what is wrong with them.
        sink::create_target(&relation)?;
    }
    // Last: an option that is wrong is told before what the options would have to say of the query.
    check_appends(&relation, &graph, kind, blackhole)?;
    check_snapshot(&relation, &graph)?;
    Ok(Planned { relation, graph })
}

/// What reads an append-only table counts on its rows staying; a sink overwrites rows by their key.
fn only_appended(table: &Relation) -> Result<(), SqlError> {
    if !table.append_only || !table.primary_key {
        return Ok(());
    }
    let error = SqlError::unsupported(format!(
        "a sink into append-only table \"{}\", which has a primary key",
        table.name
    ));
    Err(error
        .with_detail("A row whose key comes again would overwrite the one before.")
        .with_hint("Create the table without APPEND ONLY, or without the key."))
}

/// The job that hands the query's changes on, or only computes them.
fn job(
    bound: &BoundQuery,
    catalog: &SessionCatalog,
    blackhole: bool,
    key: SinkKey,
) -> Result<JobGraph, SqlError> {
    let keyed = key != SinkKey::None;
    let plan = |sink: Sink| {
        let options = JobOptions { sink, on_window_close: false, ttl_us: None };
        busy(|| plan_job(bound, catalog, &options))
    };
    if !blackhole {
        return plan(Sink::Publish(key));
    }
    if keyed {
        // Nobody is told the rows by it, but a key that other connectors refuse is as wrong here.
        plan(Sink::Publish(key))?;
    }
    plan(Sink::Blackhole)
}

/// The WITH and FORMAT clauses as options of the catalog, and the sink's own name for ever.
fn options(def: &CreateSink) -> Result<Vec<OptionEntry>, SqlError> {
    let mut all: Vec<(String, String)> = def.options.clone();
    if let Some((name, _)) = all.iter().find(|(n, _)| matches!(n.as_str(), "format" | "encode")) {
        return Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!("unknown option \"{name}\""),
        )
        .with_hint("Write FORMAT … ENCODE … after the WITH clause."));
    }
    if let Some(format) = &def.format {
        all.push(("format".into(), format.format.clone()));
        if !format.encode.is_empty() {
            all.push(("encode".into(), format.encode.clone()));
        }
        all.extend(format.options.iter().cloned());
    }
    if def.into.is_some() && def.format.is_some() {
        return Err(SqlError::new(SqlState::SYNTAX_ERROR, "a sink into a table has no FORMAT"));
    }
    all.retain(|(n, _)| n != SINK_ID);
    all.push((SINK_ID.into(), format!("{:016x}", rand::random::<u64>())));
    all.sort();
    Ok(all.into_iter().map(|(name, value)| OptionEntry { name, value }).collect())
}

fn only_table_options(relation: &Relation) -> Result<(), SqlError> {
    let known = [
        "type",
        "force_append_only",
        "snapshot",
        "commit_interval",
        "changelog_retention",
        SINK_ID,
    ];
    match relation.options.iter().find(|o| !known.contains(&o.name.as_str())) {
        None => Ok(()),
        Some(o) => Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!("unknown option \"{}\"", o.name),
        )
        .with_hint(
            "Options of a sink into a table: type, force_append_only, snapshot, commit_interval, changelog_retention.",
        )),
    }
}

/// A table with a key is upserted into, one without only grows.
fn table_type(relation: &Relation, table: &Relation) -> Result<SinkType, SqlError> {
    let default = if table.primary_key { SinkType::Upsert } else { SinkType::AppendOnly };
    match relation.option("type") {
        None => Ok(default),
        Some("append-only") => Ok(SinkType::AppendOnly),
        Some("upsert") if table.primary_key => Ok(SinkType::Upsert),
        Some("upsert") => Err(SqlError::new(
            SqlState::INVALID_OBJECT_DEFINITION,
            format!("table \"{}\" has no primary key to upsert by", table.name),
        )),
        Some(other) => Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!("invalid value for option \"type\": \"{other}\""),
        )
        .with_hint("Give 'append-only' or 'upsert'.")),
    }
}

/// What tells the rows apart.
fn key(
    relation: &Relation,
    bound: &BoundQuery,
    kind: SinkType,
    table: Option<&Relation>,
) -> Result<SinkKey, SqlError> {
    if let Some(table) = table {
        return Ok(match kind {
            SinkType::Upsert => SinkKey::Given(table.key.iter().map(|k| *k as usize).collect()),
            _ => SinkKey::None,
        });
    }
    let Some(list) = relation.option("primary_key") else {
        return Ok(if kind == SinkType::Upsert { SinkKey::Derived } else { SinkKey::None });
    };
    let mut key = Vec::new();
    for name in list.split(',').map(str::trim).filter(|n| !n.is_empty()) {
        match bound.names.iter().position(|n| n == name) {
            Some(at) if !key.contains(&at) => key.push(at),
            Some(_) => {}
            None => {
                return Err(SqlError::new(
                    SqlState::UNDEFINED_COLUMN,
                    format!("column \"{name}\" of option \"primary_key\" does not exist"),
                ));
            }
        }
    }
    if key.is_empty() {
        return Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            "option \"primary_key\" names no column",
        ));
    }
    Ok(SinkKey::Given(key))
}

fn check_appends(
    relation: &Relation,
    graph: &JobGraph,
    kind: SinkType,
    blackhole: bool,
) -> Result<(), SqlError> {
    let forced = sink::flag(relation, "force_append_only", false)?;
    if kind != SinkType::AppendOnly || graph.output.append_only || forced || blackhole {
        return Ok(());
    }
    let (table, outside) = (relation.target != 0, relation.option("connector"));
    let other = match outside {
        _ if table => "Sink into a table with a primary key",
        Some("postgres") => "Use type = 'upsert'",
        _ => "Use FORMAT UPSERT or FORMAT DEBEZIUM",
    };
    Err(SqlError::new(
        SqlState::INVALID_OBJECT_DEFINITION,
        "an append-only sink of a query whose rows may change or go",
    )
    .with_detail("Updates and deletions could not be told to the target.")
    .with_hint(format!(
        "{other}, or say force_append_only = true to leave deletions and old rows out."
    )))
}

/// Without the snapshot an operator's state would lack the rows of before.
fn check_snapshot(relation: &Relation, graph: &JobGraph) -> Result<(), SqlError> {
    if sink::flag(relation, "snapshot", true)? || graph.tables.len() <= 1 {
        return Ok(());
    }
    Err(SqlError::unsupported("snapshot = false for a query with joins, aggregates or limits")
        .with_hint("Create a materialized view of it, and a sink FROM that."))
}

/// The query as rows of the table: its columns by position or by the list, and defaults for the rest.
fn into_query(
    session: &Session,
    catalog: &SessionCatalog,
    def: &CreateSink,
    table: &Relation,
    listed: &[Ident],
) -> Result<sqlparser::ast::Query, SqlError> {
    let bound = busy(|| Binder::new(catalog, session.info(true)).query(&def.query.query, &[]))?;
    let names = bound.relation_names()?;
    let targets = dml::insert::target_columns(table, listed)?;
    if names.len() > targets.len() || (!listed.is_empty() && names.len() < targets.len()) {
        let what = if names.len() > targets.len() {
            "expressions than target columns"
        } else {
            "target columns than expressions"
        };
        let taken = match listed {
            [] => format!("the table takes {}", targets.len()),
            _ => format!("the list names {}", targets.len()),
        };
        return Err(SqlError::new(
            SqlState::SYNTAX_ERROR,
            format!("the sink's query has more {what}"),
        )
        .with_detail(format!("It has {} columns, {taken}.", names.len())));
    }
    let quote = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    let mut items = Vec::new();
    let given = |c: &Column| !c.hidden && !generated::is_computed(c);
    for (at, column) in table.columns.iter().enumerate().filter(|(_, c)| given(c)) {
        let from = targets.iter().position(|t| *t == at).filter(|i| *i < names.len());
        let item = match from {
            Some(i) => {
                fits::check(&bound.plan, i, bound.types[i], column, catalog)?;
                let value = value(&quote(&names[i]), bound.types[i], column)?;
                match fits::rounded_to(&bound.plan, i, column, catalog) {
                    Some(digits) => format!("round_seconds({value}, {digits})"),
                    None => value,
                }
            }
            None => unlisted(session, catalog, column)?,
        };
        items.push(format!("{item} AS {}", quote(&column.name)));
    }
    let text = &def.query.text;
    let rows = format!("SELECT {} FROM ({text}) AS __sink", items.join(", "));
    rewrite::parse_query(&generated::over_rows(table, rows)?)
}

fn value(name: &str, from: SqlType, column: &Column) -> Result<String, SqlError> {
    let to = column.sql_type()?;
    let name = format!("__sink.{name}");
    let text = |t: SqlType| matches!(t, SqlType::Text | SqlType::Varchar(_));
    // A cast would hide that a key is one.
    let as_it_is = from == to || (text(from) && text(to));
    Ok(if as_it_is { name } else { format!("CAST({name} AS {to})") })
}

/// What a column gets that the query has no value for.
fn unlisted(
    session: &Session,
    catalog: &SessionCatalog,
    column: &Column,
) -> Result<String, SqlError> {
    let item = default(column)?;
    let query = rewrite::parse_query(&format!("SELECT {item}"))?;
    let bound = Binder::new(catalog, session.info(true)).query(&query, &[])?;
    // Of the whole query it could not be told any more that the table's default is what it says.
    check_view_volatility(&bound.plan).map_err(|e| {
        let name = &column.name;
        e.with_detail(format!(
            "The sink has no value for column \"{name}\", and its default depends on when it is computed."
        ))
        .with_hint(format!("List column \"{name}\" and give it a value in the sink's query."))
    })?;
    Ok(item)
}

fn default(column: &Column) -> Result<String, SqlError> {
    let to = column.sql_type()?;
    if generated::is_proctime(column) {
        // The rows get it when they arrive at the table.
        return Ok(format!("CAST(NULL AS {to})"));
    }
    match &column.default_sql {
        Some(default) => {
            let value = format!("CAST({default} AS {to})");
            Ok(generated::rounded(column, value))
        }
        None if column.nullable => Ok(format!("CAST(NULL AS {to})")),
        None => Err(SqlError::new(
            SqlState::NOT_NULL_VIOLATION,
            format!("column \"{}\" may not be NULL and the sink has no value for it", column.name),
        )),
    }
}

/// Whether the job's last operator hands changes on.
pub fn publishes(graph: &JobGraph) -> bool {
    let root = graph.fragments.last().and_then(|f| f.nodes.last());
    root.is_some_and(|n| matches!(n.op, Operator::Sink(_)))
}

/// The relation that a sink's changes go into.
pub fn target_of(relation: &Relation) -> Option<RelationId> {
    Some(relation.target).filter(|t| *t != 0).map(RelationId)
}
