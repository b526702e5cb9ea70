//! What sources and connector tables have beyond tables: options, FORMAT, INCLUDE, ALTER.

use millrace_common::{SqlError, SqlState};
use millrace_connector::columns::Include;
use millrace_executor::input::generated::expressions;
use millrace_executor::input::watermark::{SourceWatermark, WatermarkExpr};
use millrace_planner::ast::{AlterAction, ObjectKind, TableDefinition};
use millrace_rpc::catalog::{Column, Format, OnConflict, OptionEntry, Relation};
use millrace_rpc::log::AlterRelation;
use sqlparser::ast::ObjectName;

use super::drop::noun;
use super::table::plain_column;
use crate::query::catalog_view::fold;
use crate::session::Session;

/// Options that may be changed while rows come in: none of them decides what the rows are.
const CHANGEABLE: &[&str] = &["rate_limit", "on_error", "discovery_interval"];
const CHANGEABLE_PREFIXES: &[&str] = &["s3.", "properties."];

/// The options of WITH and of ENCODE, sorted by name.
pub fn options(def: &TableDefinition) -> Result<Vec<OptionEntry>, SqlError> {
    let of_format = def.format.iter().flat_map(|f| &f.options);
    let mut options: Vec<OptionEntry> = def
        .options
        .iter()
        .chain(of_format)
        .map(|(name, value)| OptionEntry { name: name.clone(), value: value.clone() })
        .collect();
    options.sort_by(|a, b| a.name.cmp(&b.name));
    match options.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(SqlError::new(
            SqlState::SYNTAX_ERROR,
            format!("option \"{}\" is given twice", pair[0].name),
        )),
        None => Ok(options),
    }
}

pub fn format(def: &TableDefinition) -> Option<Format> {
    let format = def.format.as_ref()?;
    Some(Format { format: format.format.clone(), encode: format.encode.clone() })
}

/// The columns of `INCLUDE fact [AS name]`.
pub fn included(def: &TableDefinition) -> Result<Vec<Column>, SqlError> {
    def.includes
        .iter()
        .map(|(fact, name)| {
            let include = Include::parse(fact).ok_or_else(|| {
                SqlError::unsupported(format!("INCLUDE {fact}"))
                    .with_hint("Use INCLUDE key, partition, offset, timestamp or file.")
            })?;
            let name = name.as_ref().map_or_else(|| format!("_{}", include.name()), fold);
            let column = plain_column(name, include.sql_type().into());
            Ok(Column { include: Some(include.name().to_owned()), ..column })
        })
        .collect()
}

/// Checks a source that is about to be created, and adds the graph of its generated columns, if its watermark reads any: its
/// readers have to know the time of a row, and whether it is late, before any query computes it.
pub fn check_source(session: &Session, relation: &mut Relation) -> Result<(), SqlError> {
    if let Some(column) = relation.columns.iter().find(|c| super::generated::is_proctime(c)) {
        return Err(SqlError::unsupported(format!(
            "PROCTIME() in a source (column \"{}\")",
            column.name
        ))
        .with_detail("A source keeps no rows, so each reader would see another time.")
        .with_hint("Use CREATE TABLE … WITH (connector = …), which keeps the time of arrival."));
    }
    let strict = |c: &&Column| c.generated_sql.is_some() && !c.nullable;
    if let Some(column) = relation.columns.iter().find(strict) {
        return Err(SqlError::unsupported(format!(
            "NOT NULL of a generated column of a source (column \"{}\")",
            column.name
        ))
        .with_detail("Each query computes the column, after the source's rows have been checked.")
        .with_hint(
            "Leave NOT NULL out, or use CREATE TABLE … WITH (connector = …), which checks what it computes.",
        ));
    }
    if WatermarkExpr::reads_generated(relation)? {
        relation.graph = super::generated::graph(session, relation)?;
        // As its readers will.
        SourceWatermark::of(relation, &[])?;
    }
    if relation.primary_key {
        return Err(SqlError::unsupported("PRIMARY KEY of a source")
            .with_hint("Use CREATE TABLE … WITH (connector = …), which keeps rows by key."));
    }
    needs_no_key(relation)?;
    millrace_connector::validate(relation)
}

fn needs_no_key(relation: &Relation) -> Result<(), SqlError> {
    match relation.format.as_ref().map(|f| f.format.as_str()) {
        Some(format @ ("UPSERT" | "DEBEZIUM")) if !relation.primary_key => {
            Err(SqlError::unsupported(format!("FORMAT {format} without a primary key")).with_hint(
                "Use CREATE TABLE … (…, PRIMARY KEY (…)) WITH (connector = …): its rows are kept by key.",
            ))
        }
        _ => Ok(()),
    }
}

/// Checks a table with a connector, and adds what it needs: rows overwrite by key unless it says
/// otherwise, and the graph of its generated columns.
pub fn check_table(
    session: &Session,
    relation: &mut Relation,
    def: &TableDefinition,
) -> Result<(), SqlError> {
    needs_no_key(relation)?;
    if def.on_conflict.is_none() && relation.primary_key {
        relation.on_conflict = OnConflict::Overwrite as i32;
    }
    if relation.append_only && relation.primary_key && def.on_conflict.is_none() {
        relation.on_conflict = OnConflict::Ignore as i32;
    }
    millrace_connector::validate(relation)?;
    relation.graph = super::generated::graph(session, relation)?;
    // As the table's feed will.
    expressions(relation)?;
    Ok(())
}

/// ALTER SOURCE | TABLE … SET (…) | PAUSE | RESUME.
pub async fn alter(
    session: &mut Session,
    kind: ObjectKind,
    name: &ObjectName,
    if_exists: bool,
    action: &AlterAction,
) -> Result<String, SqlError> {
    let tag = format!("ALTER {}", kind.noun().to_uppercase());
    let relation = match session.catalog_view().resolve(name) {
        Err(e) if if_exists && e.state == SqlState::UNDEFINED_TABLE => return Ok(tag),
        found => found?,
    };
    if noun(&relation) != kind.noun() {
        return Err(SqlError::new(
            SqlState::WRONG_OBJECT_TYPE,
            format!("\"{}\" is not a {}", relation.name, kind.noun()),
        ));
    }
    if !relation.has_connector() {
        return Err(SqlError::new(
            SqlState::WRONG_OBJECT_TYPE,
            format!("table \"{}\" has no connector", relation.name),
        ));
    }
    let unchanged = AlterRelation { id: relation.id, ..AlterRelation::default() };
    match action {
        AlterAction::Pause(paused) => {
            let change = AlterRelation { paused: Some(*paused), ..unchanged };
            session.step.define(session.cluster().alter_relation(change)).await?;
        }
        AlterAction::SetOptions(options) => {
            let options = changed_options(&relation, options)?;
            let change = AlterRelation { options, ..unchanged };
            session.step.define(session.cluster().alter_relation(change)).await?;
        }
        _ => return Err(SqlError::unsupported(tag)),
    }
    Ok(tag)
}

fn changed_options(
    relation: &Relation,
    options: &[(String, String)],
) -> Result<Vec<OptionEntry>, SqlError> {
    let mut altered = relation.clone();
    let mut changed = Vec::new();
    for (name, value) in options {
        let may = CHANGEABLE.contains(&name.as_str())
            || CHANGEABLE_PREFIXES.iter().any(|p| name.starts_with(p));
        if !may {
            return Err(SqlError::unsupported(format!("changing option \"{name}\""))
                .with_hint(format!("Options that can be changed: {}.", CHANGEABLE.join(", "))));
        }
        let entry = OptionEntry { name: name.clone(), value: value.clone() };
        altered.options.retain(|o| o.name != entry.name);
        altered.options.push(entry.clone());
        changed.push(entry);
    }
    millrace_connector::validate(&altered)?;
    Ok(changed)
}
