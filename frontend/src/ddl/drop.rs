//! DROP of relations and schemas.

use std::collections::BTreeSet;

use millrace_common::{RelationId, SqlError, SqlState};
use millrace_planner::CatalogView;
use millrace_planner::ast::{Drop, ObjectKind};
use millrace_rpc::catalog::{Relation, RelationKind};

use crate::cluster::CatalogSnapshot;
use crate::query::SessionCatalog;
use crate::session::Session;

pub async fn drop_objects(session: &mut Session, def: &Drop) -> Result<String, SqlError> {
    let tag = format!("DROP {}", def.kind.noun().to_uppercase());
    if def.kind == ObjectKind::Schema {
        drop_schemas(session, def).await?;
        return Ok(tag);
    }
    let view = session.catalog_view();
    let mut ids = BTreeSet::new();
    for name in &def.names {
        let (schema, short) = SessionCatalog::split_name(name)?;
        match view.relation(schema.as_deref(), &short) {
            Some(relation) => {
                check_kind(&relation, def.kind)?;
                ids.insert(relation.id);
            }
            None => missing(session, def, &short)?,
        }
    }
    drop_with_dependants(session, &view.snapshot, ids, def.cascade).await?;
    Ok(tag)
}

fn missing(session: &mut Session, def: &Drop, name: &str) -> Result<(), SqlError> {
    let message = format!("{} \"{name}\" does not exist", def.kind.noun());
    let state = if def.kind == ObjectKind::Schema {
        SqlState::INVALID_SCHEMA_NAME
    } else {
        SqlState::UNDEFINED_TABLE
    };
    if !def.if_exists {
        return Err(SqlError::new(state, message));
    }
    session.notice("NOTICE", SqlState::SUCCESS, format!("{message}, skipping"));
    Ok(())
}

pub fn noun(relation: &Relation) -> &'static str {
    match RelationKind::try_from(relation.kind) {
        Ok(RelationKind::Table) => "table",
        Ok(RelationKind::Source) => "source",
        Ok(RelationKind::View) => "view",
        Ok(RelationKind::MaterializedView) => "materialized view",
        Ok(RelationKind::Index) => "index",
        Ok(RelationKind::Sink) => "sink",
        Ok(RelationKind::Subscription) => "subscription",
        _ => "relation",
    }
}

fn check_kind(relation: &Relation, kind: ObjectKind) -> Result<(), SqlError> {
    let actual = noun(relation);
    if actual == kind.noun() {
        return Ok(());
    }
    let article = |n: &str| if n == "index" { "an" } else { "a" };
    Err(SqlError::new(
        SqlState::WRONG_OBJECT_TYPE,
        format!("\"{}\" is not {} {}", relation.name, article(kind.noun()), kind.noun()),
    )
    .with_hint(format!(
        "Use DROP {} to remove {} {actual}.",
        actual.to_uppercase(),
        article(actual)
    )))
}

/// Drops relations; what depends on them goes too with CASCADE, else it is an error that lists it.
async fn drop_with_dependants(
    session: &mut Session,
    snapshot: &CatalogSnapshot,
    named: BTreeSet<u32>,
    cascade: bool,
) -> Result<(), SqlError> {
    let mut all = named.clone();
    let mut lines = Vec::new();
    let mut queue: Vec<u32> = named.iter().copied().collect();
    while let Some(id) = queue.pop() {
        let Some(parent) = snapshot.by_id(id) else { continue };
        for child in snapshot.dependants(id) {
            if all.insert(child.id) {
                // An index is part of what it belongs to.
                if child.kind != RelationKind::Index as i32 {
                    lines.push((child.clone(), parent.clone()));
                }
                queue.push(child.id);
            }
        }
    }
    if !lines.is_empty() {
        let listed: Vec<String> = lines
            .iter()
            .map(|(c, p)| format!("{} {} depends on {} {}", noun(c), c.name, noun(p), p.name))
            .collect();
        if !cascade {
            let what = named.iter().next().and_then(|id| snapshot.by_id(*id));
            let what = what.map_or("the object".to_owned(), |r| format!("{} {}", noun(r), r.name));
            return Err(SqlError::new(
                SqlState::DEPENDENT_OBJECTS_STILL_EXIST,
                format!("cannot drop {what} because other objects depend on it"),
            )
            .with_detail(listed.join("\n"))
            .with_hint("Use DROP ... CASCADE to drop the dependent objects too."));
        }
        let notice = match lines.as_slice() {
            [(only, _)] => format!("drop cascades to {} {}", noun(only), only.name),
            many => format!("drop cascades to {} other objects", many.len()),
        };
        session.notice("NOTICE", SqlState::SUCCESS, notice);
    }
    if all.is_empty() {
        return Ok(());
    }
    let all = all.into_iter().map(RelationId).collect();
    session.step.define(session.cluster().drop_relations(all)).await
}

async fn drop_schemas(session: &mut Session, def: &Drop) -> Result<(), SqlError> {
    let snapshot = session.cluster().catalog();
    let mut schemas = Vec::with_capacity(def.names.len());
    // All before the first one: where one is wrong nothing is dropped.
    for name in &def.names {
        let (_, schema) = SessionCatalog::split_name(name)?;
        if !snapshot.schemas.contains(&schema) {
            missing(session, def, &schema)?;
        } else if !schemas.contains(&schema) {
            if !def.cascade {
                check_empty(&snapshot, &schema)?;
            }
            schemas.push(schema);
        }
    }
    for schema in schemas {
        if def.cascade {
            // Some of what is in it may have gone with the schema before.
            let snapshot = session.cluster().catalog();
            let inside = inside(&snapshot, &schema);
            if !inside.is_empty() {
                drop_with_dependants(session, &snapshot, inside, true).await?;
                session.step.note_part();
            }
        }
        session.step.define(session.cluster().drop_schema(&schema)).await?;
        session.step.note_part();
    }
    Ok(())
}

/// The relations in a schema.
fn inside(snapshot: &CatalogSnapshot, schema: &str) -> BTreeSet<u32> {
    snapshot.all().iter().filter(|r| r.schema == schema).map(|r| r.id).collect()
}

/// An error that lists what is in a schema.
fn check_empty(snapshot: &CatalogSnapshot, schema: &str) -> Result<(), SqlError> {
    let inside = inside(snapshot, schema);
    if inside.is_empty() {
        return Ok(());
    }
    let listed: Vec<String> = inside
        .iter()
        .filter_map(|id| snapshot.by_id(*id))
        .map(|r| format!("{} {schema}.{} depends on schema {schema}", noun(r), r.name))
        .collect();
    Err(SqlError::new(
        SqlState::DEPENDENT_OBJECTS_STILL_EXIST,
        format!("cannot drop schema {schema} because other objects depend on it"),
    )
    .with_detail(listed.join("\n"))
    .with_hint("Use DROP ... CASCADE to drop the dependent objects too."))
}
