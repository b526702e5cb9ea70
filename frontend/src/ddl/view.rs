//! CREATE VIEW and CREATE MATERIALIZED VIEW.

use millrace_common::{SqlError, SqlState, SqlType};
use millrace_graph::JobGraph;
use millrace_graph::codec::encode_graph;
use millrace_planner::ast::CreateView;
use millrace_planner::bind::outputs::replaces;
use millrace_planner::stream::{self, JobOptions, Sink, Watch};
use millrace_planner::{Binder, BoundQuery};
use millrace_rpc::catalog::{Column, Relation, RelationKind};

use super::table::plain_column;
use super::{Existing, check_name, create, create_and_wait};
use crate::query::SessionCatalog;
use crate::query::catalog_view::fold;
use crate::session::{Session, busy};

pub async fn create_view(
    session: &mut Session,
    def: &CreateView,
    text: &str,
) -> Result<String, SqlError> {
    let (kind, tag) = if def.materialized {
        (RelationKind::MaterializedView, "CREATE MATERIALIZED VIEW")
    } else {
        (RelationKind::View, "CREATE VIEW")
    };
    let view = session.catalog_view();
    let (schema, name) = view.target(&def.name)?;
    let existing =
        check_name(session, &view, &schema, &name, kind, def.if_not_exists, def.or_replace)?;
    if matches!(existing, Existing::Skip) {
        return Ok(tag.to_owned());
    }
    if def.emit_on_window_close && !def.materialized {
        return Err(SqlError::unsupported("EMIT ON WINDOW CLOSE of a plain view")
            .with_hint("Use CREATE MATERIALIZED VIEW."));
    }
    if !def.with_data {
        return Err(SqlError::unsupported("a materialized view WITH NO DATA")
            .with_hint("A materialized view always has its rows."));
    }
    let (bound, names) = bind(session, &view, def)?;
    let types = session.declared_types(&view, &def.query.query, &bound);
    let relation = Relation {
        schema,
        name,
        kind: kind as i32,
        definition: text.to_owned(),
        query: def.query.text.clone(),
        depends_on: depends_on(&bound),
        owner: session.user.clone(),
        ..Relation::default()
    };
    let replace = matches!(existing, Existing::Replace);
    if def.materialized {
        let graph = plan(&view, &bound, def)?;
        let mut relation = with_graph(relation, &graph, &bound, &names)?;
        // Hidden columns come after those of the query.
        relation.columns.iter_mut().zip(types).for_each(|(c, t)| c.sql_type = t);
        create_and_wait(session, relation, graph.tables.len().max(1) as u32, replace).await?;
    } else {
        let columns: Vec<Column> =
            names.into_iter().zip(types).map(|(n, t)| plain_column(n, t)).collect();
        if let (true, Some(old)) = (replace, view.snapshot.get(&relation.schema, &relation.name)) {
            check_replaced(&old.columns, &columns)?;
        }
        let relation = Relation { columns, ..relation };
        create(session, relation, 0, replace).await?;
    }
    Ok(tag.to_owned())
}

/// A view that is replaced keeps its columns, which other definitions name, and may get more of them.
fn check_replaced(old: &[Column], new: &[Column]) -> Result<(), SqlError> {
    let refused = |message: String| {
        Err(SqlError::new(SqlState::INVALID_TABLE_DEFINITION, message)
            .with_hint("Drop the view first to give it other columns."))
    };
    if new.len() < old.len() {
        return refused("cannot drop columns from view".into());
    }
    for (old, new) in old.iter().zip(new) {
        if old.name != new.name {
            let (from, to) = (&old.name, &new.name);
            return refused(format!("cannot change name of view column \"{from}\" to \"{to}\""));
        }
        // A view of an older version has text where the query has varchar.
        let (was, is) = (old.sql_type, new.sql_type);
        let told_less = was.typmod == -1 && (was.oid == is.oid || replaces(was.oid, is.oid));
        if was != is && !told_less {
            let name = &old.name;
            let (from, to) = (was.to_sql()?, is.to_sql()?);
            return refused(format!(
                "cannot change data type of view column \"{name}\" from {from} to {to}"
            ));
        }
    }
    Ok(())
}

/// Binds a view's query; the names of its columns.
pub fn bind(
    session: &Session,
    view: &SessionCatalog,
    def: &CreateView,
) -> Result<(BoundQuery, Vec<String>), SqlError> {
    let refused = match def.materialized {
        true => "materialized views must not use data-modifying statements in WITH",
        false => "views must not contain data-modifying statements in WITH",
    };
    crate::dml::with::refuse(&def.query.query, refused)?;
    let info = session.info_of_definition(def.materialized);
    let mut bound = busy(|| Binder::new(view, info).query(&def.query.query, &[]))?;
    if def.columns.len() > bound.names.len() {
        return Err(SqlError::new(
            SqlState::SYNTAX_ERROR,
            "CREATE VIEW specifies more column names than columns",
        ));
    }
    for (name, given) in bound.names.iter_mut().zip(&def.columns) {
        *name = fold(given);
    }
    let names = bound.relation_names()?;
    Ok((bound, names))
}

/// Relations a definition names, without what its views read in turn.
pub fn depends_on(bound: &BoundQuery) -> Vec<u32> {
    let mut ids: Vec<u32> = bound.relations.iter().map(|r| r.id).filter(|id| *id != 0).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

pub fn plan(
    view: &SessionCatalog,
    bound: &BoundQuery,
    def: &CreateView,
) -> Result<JobGraph, SqlError> {
    plan_watched(view, bound, def, &mut |_, _| {})
}

/// [`plan`], with a look at the plan after each pass.
pub fn plan_watched(
    view: &SessionCatalog,
    bound: &BoundQuery,
    def: &CreateView,
    watch: Watch<'_>,
) -> Result<JobGraph, SqlError> {
    let options = job_options(def)?;
    busy(|| stream::plan_watched(bound, view, &options, watch))
}

fn job_options(def: &CreateView) -> Result<JobOptions, SqlError> {
    let sink = match def.options.iter().find(|(n, _)| n == "sink") {
        Some((_, v)) if v == "blackhole" => Sink::Blackhole,
        Some((_, v)) => {
            return Err(SqlError::new(
                SqlState::INVALID_PARAMETER_VALUE,
                format!("invalid value for option \"sink\": \"{v}\""),
            ));
        }
        None => Sink::Materialize,
    };
    let ttl_us = def.options.iter().find(|(n, _)| n == "ttl").map(|(_, v)| ttl(v)).transpose()?;
    if let Some((name, _)) = def.options.iter().find(|(n, _)| n != "sink" && n != "ttl") {
        return Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!("unrecognized materialized view option \"{name}\""),
        ));
    }
    let on_window_close = def.emit_on_window_close;
    Ok(JobOptions { sink, on_window_close, ttl_us })
}

/// How long rows count, in microseconds.
fn ttl(value: &str) -> Result<i64, SqlError> {
    let ttl = millrace_common::settings::parse_duration(value)?;
    match i64::try_from(ttl.as_micros()) {
        Ok(us) if us > 0 => Ok(us),
        _ => Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!("invalid value for option \"ttl\": \"{value}\""),
        )),
    }
}

/// The catalog entry of a job: its stored columns, layout and graph.
pub fn with_graph(
    relation: Relation,
    graph: &JobGraph,
    bound: &BoundQuery,
    names: &[String],
) -> Result<Relation, SqlError> {
    let layout = &graph.output;
    let positions = |list: &[usize]| list.iter().map(|i| *i as u32).collect();
    let columns = layout
        .schema
        .fields()
        .iter()
        .enumerate()
        .map(|(i, field)| {
            let hidden = i >= names.len();
            let t = match bound.types.get(i) {
                Some(t) => *t,
                None => SqlType::from_arrow(field.data_type())?,
            };
            let name = names.get(i).cloned().unwrap_or_else(|| field.name().clone());
            Ok(Column { nullable: field.is_nullable(), hidden, ..plain_column(name, t.into()) })
        })
        .collect::<Result<_, SqlError>>()?;
    Ok(Relation {
        columns,
        key: positions(&layout.key),
        distribution: positions(&layout.distribution),
        storage: layout.storage as i32,
        append_only: layout.append_only,
        watermark_columns: layout.marks.iter().map(|m| m.column as u32).collect(),
        graph: encode_graph(graph)?,
        ..relation
    })
}
