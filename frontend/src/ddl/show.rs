//! SHOW and DESCRIBE.

use millrace_common::{SqlError, SqlState};
use millrace_planner::ast::{ObjectKind, Show};
use millrace_rpc::catalog::{Relation, RelationKind};
use sqlparser::ast::{Ident, ObjectName};

use super::drop::noun;
use crate::query::SessionCatalog;
use crate::query::catalog_view::{SYSTEM_SCHEMAS, fold};
use crate::session::{RowSet, Session};

pub const DESCRIBE: &[&str] = &["Name", "Type", "Nullable", "Default", "Key"];
const JOBS: &[&str] = &["id", "name", "kind", "state", "progress", "lag_ms", "reason"];

/// The columns a SHOW returns.
pub fn columns(show: &Show) -> &'static [&'static str] {
    match show {
        Show::Tables(_)
        | Show::Sources(_)
        | Show::Views(_)
        | Show::MaterializedViews(_)
        | Show::Indexes(_) => &["Name"],
        Show::Schemas => &["Schema"],
        Show::Databases => &["Database"],
        Show::Jobs => JOBS,
        Show::Columns(_) => DESCRIBE,
        Show::Create(..) => &["Name", "Create Sql"],
        Show::AllSettings => &["name", "setting", "description"],
        Show::Setting(_) => &["setting"],
    }
}

pub fn show(session: &Session, show: &Show) -> Result<RowSet, SqlError> {
    let names = columns(show);
    let one = |values: Vec<String>| values.into_iter().map(|v| vec![Some(v)]).collect::<Vec<_>>();
    let rows = match show {
        Show::Tables(schema) => one(relations(session, schema.as_ref(), RelationKind::Table)?),
        Show::Sources(schema) => one(relations(session, schema.as_ref(), RelationKind::Source)?),
        Show::Views(schema) => one(relations(session, schema.as_ref(), RelationKind::View)?),
        Show::MaterializedViews(schema) => {
            one(relations(session, schema.as_ref(), RelationKind::MaterializedView)?)
        }
        Show::Indexes(_) => one(relations(session, None, RelationKind::Index)?),
        Show::Schemas => {
            let mut all = session.cluster().catalog().schemas.clone();
            all.extend(SYSTEM_SCHEMAS.iter().map(|s| (*s).to_owned()));
            all.sort();
            one(all)
        }
        Show::Databases => one(vec![session.database.clone()]),
        Show::Jobs => jobs(session),
        Show::Columns(name) => return describe(session, name),
        Show::Create(kind, name) => vec![create_text(session, *kind, name)?],
        Show::AllSettings => return session.show_all(),
        Show::Setting(name) => return session.show(name),
    };
    RowSet::text(names, rows, "SHOW")
}

fn relations(
    session: &Session,
    schema: Option<&Ident>,
    kind: RelationKind,
) -> Result<Vec<String>, SqlError> {
    let catalog = session.cluster().catalog();
    let schemas = match schema {
        Some(s) => {
            let s = fold(s);
            if !catalog.schemas.contains(&s) {
                return Err(SqlError::new(
                    SqlState::INVALID_SCHEMA_NAME,
                    format!("schema \"{s}\" does not exist"),
                ));
            }
            vec![s]
        }
        None => session.search_path(),
    };
    let mut names: Vec<String> = catalog
        .relations()
        .iter()
        .filter(|r| r.kind == kind as i32 && schemas.contains(&r.schema))
        .map(|r| r.name.clone())
        .collect();
    names.sort();
    Ok(names)
}

fn jobs(session: &Session) -> Vec<Vec<Option<String>>> {
    let catalog = session.cluster().catalog();
    session
        .cluster()
        .jobs()
        .into_iter()
        .map(|j| {
            let relation = catalog.by_id(j.relation);
            vec![
                Some(j.relation.to_string()),
                relation.map(|r| format!("{}.{}", r.schema, r.name)),
                relation.map(|r| noun(r).to_owned()),
                Some(j.state),
                j.progress,
                j.lag_ms.map(|v| v.to_string()),
                j.reason,
            ]
        })
        .collect()
}

fn create_text(
    session: &Session,
    kind: ObjectKind,
    name: &ObjectName,
) -> Result<Vec<Option<String>>, SqlError> {
    let relation = session.catalog_view().resolve(name)?;
    if noun(&relation) != kind.noun() {
        return Err(SqlError::new(
            SqlState::WRONG_OBJECT_TYPE,
            format!("\"{}\" is not a {}", relation.name, kind.noun()),
        ));
    }
    Ok(vec![
        Some(format!("{}.{}", relation.schema, relation.name)),
        Some(relation.definition.clone()),
    ])
}

pub fn describe(session: &Session, name: &ObjectName) -> Result<RowSet, SqlError> {
    let view: SessionCatalog = session.catalog_view();
    let relation = view.resolve(name)?;
    RowSet::text(DESCRIBE, describe_rows(&relation)?, "DESCRIBE")
}

fn describe_rows(relation: &Relation) -> Result<Vec<Vec<Option<String>>>, SqlError> {
    relation
        .columns
        .iter()
        .enumerate()
        .filter(|(_, c)| !c.hidden)
        .map(|(i, c)| {
            let key = relation.primary_key && relation.key.contains(&(i as u32));
            Ok(vec![
                Some(c.name.clone()),
                Some(c.sql_type()?.to_string()),
                Some(if c.nullable { "yes" } else { "no" }.to_owned()),
                c.default_sql.clone(),
                key.then(|| "primary key".to_owned()),
            ])
        })
        .collect()
}
