//! ALTER of whole relations. What comes from a connector is altered in [`super::source`], columns nowhere yet.

use millrace_common::{RelationId, SqlError, SqlState};
use millrace_planner::ast::{AlterAction, ObjectKind};
use millrace_rpc::catalog::Relation;
use millrace_rpc::log::AlterRelation;
use sqlparser::ast::{Ident, ObjectName};

use super::DETACHED;
use super::drop::noun;
use crate::query::SessionCatalog;
use crate::query::catalog_view::fold;
use crate::session::Session;

/// The most tasks that a fragment of a job may have, as with `--parallelism`.
const MOST_TASKS: u32 = 256;

/// ALTER SINK … PAUSE and RESUME, ALTER … SET PARALLELISM, ALTER … OWNER TO; other changes are refused by name.
pub async fn alter(
    session: &mut Session,
    kind: ObjectKind,
    name: &ObjectName,
    if_exists: bool,
    action: &AlterAction,
) -> Result<String, SqlError> {
    let tag = format!("ALTER {}", kind.noun().to_uppercase());
    if kind == ObjectKind::Schema {
        check_schema(session, name)?;
    } else {
        let relation = match session.catalog_view().resolve(name) {
            Err(e) if if_exists && e.state == SqlState::UNDEFINED_TABLE => {
                let message = format!("{}, skipping", e.message);
                session.notice("NOTICE", SqlState::SUCCESS, message);
                return Ok(tag);
            }
            found => found?,
        };
        // As in PostgreSQL, ALTER TABLE gives any relation another owner.
        let any = kind == ObjectKind::Table && matches!(action, AlterAction::OwnerTo(_));
        if noun(&relation) != kind.noun() && !any {
            let message = format!("\"{}\" is not a {}", relation.name, kind.noun());
            return Err(SqlError::new(SqlState::WRONG_OBJECT_TYPE, message));
        }
        match (kind, action) {
            (ObjectKind::Sink, AlterAction::Pause(paused)) => {
                session.cluster().refresh_reports().await?;
                check_resumable(session, &relation, *paused)?;
                let change = AlterRelation {
                    id: relation.id,
                    paused: Some(*paused),
                    ..AlterRelation::default()
                };
                session.step.define(session.cluster().alter_relation(change)).await?;
                return Ok(tag);
            }
            (
                ObjectKind::MaterializedView | ObjectKind::Index | ObjectKind::Sink,
                AlterAction::Rebuild,
            ) => {
                rebuild(session, kind, &relation).await?;
                return Ok(tag);
            }
            (
                ObjectKind::Table
                | ObjectKind::MaterializedView
                | ObjectKind::Index
                | ObjectKind::Sink,
                AlterAction::SetParallelism(value),
            ) => {
                let parallelism = Some(parallelism(value)?);
                let change =
                    AlterRelation { id: relation.id, parallelism, ..AlterRelation::default() };
                session.step.define(session.cluster().alter_relation(change)).await?;
                return Ok(tag);
            }
            _ => {}
        }
    }
    match action {
        AlterAction::OwnerTo(role) => check_owner(session, role)?,
        action => return Err(refused(&tag, kind, action)),
    }
    Ok(tag)
}

/// Tasks of each fragment of a job; 0 for DEFAULT: as many as the server says.
fn parallelism(value: &str) -> Result<u32, SqlError> {
    if ["default", "adaptive", "auto"].iter().any(|word| value.eq_ignore_ascii_case(word)) {
        return Ok(0);
    }
    let number = value.parse().ok().filter(|n| (1..=MOST_TASKS).contains(n));
    number.ok_or_else(|| {
        let message = format!("invalid parallelism: {value}");
        SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)
            .with_hint(format!("It is 1 to {MOST_TASKS}, or DEFAULT for that of the server."))
    })
}

/// Without the changes that it has missed a sink cannot go on from where it is.
fn check_resumable(session: &Session, sink: &Relation, paused: bool) -> Result<(), SqlError> {
    let jobs = session.cluster().jobs();
    let job = jobs.iter().find(|j| j.relation == sink.id && j.state == DETACHED);
    let Some(job) = job.filter(|_| !paused) else { return Ok(()) };
    let message = format!("sink \"{}\" is detached and cannot go on from where it is", sink.name);
    let error = SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, message)
        .with_hint(format!("ALTER SINK {} REBUILD begins anew with a snapshot.", sink.name));
    Err(match &job.reason {
        Some(reason) => error.with_detail(reason.clone()),
        None => error,
    })
}

/// Computes the relation anew and, unless DDL is in the background, waits until that is done. The rebuild goes on
/// whatever becomes of the statement.
async fn rebuild(
    session: &mut Session,
    kind: ObjectKind,
    relation: &Relation,
) -> Result<(), SqlError> {
    let id = RelationId(relation.id);
    session.step.define(session.cluster().rebuild(id)).await?;
    if kind == ObjectKind::Sink {
        let what = match relation
            .option("snapshot")
            .is_some_and(|v| matches!(v, "false" | "off" | "0"))
        {
            true => {
                "its target gets the changes from now on; it does not get those that the sink has missed"
            }
            false => "its target gets all rows again; rows that were deleted meanwhile stay there",
        };
        let message = format!("sink \"{}\" begins anew: {what}", relation.name);
        session.notice("NOTICE", SqlState::SUCCESS, message);
    }
    if session.settings.bool("background_ddl") {
        return Ok(());
    }
    session.cluster().wait_rebuilt(id, session.cancel.clone()).await
}

fn check_schema(session: &Session, name: &ObjectName) -> Result<(), SqlError> {
    let (_, schema) = SessionCatalog::split_name(name)?;
    if session.cluster().catalog().schemas.contains(&schema) {
        return Ok(());
    }
    let message = format!("schema \"{schema}\" does not exist");
    Err(SqlError::new(SqlState::INVALID_SCHEMA_NAME, message))
}

/// Everybody may do everything, so who owns an object changes nothing: dumps that say it are taken as they are.
fn check_owner(session: &Session, role: &Ident) -> Result<(), SqlError> {
    let named = fold(role);
    let this = role.quote_style.is_none()
        && matches!(named.as_str(), "current_user" | "current_role" | "session_user");
    if this || session.shared.has_user(&named) {
        return Ok(());
    }
    let message = format!("role \"{named}\" does not exist");
    Err(SqlError::new(SqlState::UNDEFINED_OBJECT, message))
}

fn refused(tag: &str, kind: ObjectKind, action: &AlterAction) -> SqlError {
    let (what, hint) = match action {
        AlterAction::Rename(_) => (
            "RENAME TO",
            "What reads it names it in its definition. Create it anew under the other name.",
        ),
        AlterAction::SetSchema(_) => (
            "SET SCHEMA",
            "What reads it names it in its definition. Create it anew in the other schema.",
        ),
        AlterAction::SetParallelism(_) => (
            "SET PARALLELISM",
            "Tables, materialized views, indexes and sinks have tasks of their own.",
        ),
        AlterAction::SetOptions(_) if kind == ObjectKind::Sink => {
            ("SET", "Drop the sink and create it anew with other options.")
        }
        AlterAction::SetOptions(_) => {
            ("SET", "Options of sources and of tables that have a connector can be changed.")
        }
        AlterAction::Pause(true) => ("PAUSE", PAUSABLE),
        AlterAction::Pause(false) => ("RESUME", PAUSABLE),
        AlterAction::Rebuild => {
            ("REBUILD", "Materialized views, indexes and sinks can be rebuilt.")
        }
        AlterAction::OwnerTo(_) => ("OWNER TO", ""),
    };
    SqlError::unsupported(format!("{tag} … {what}")).with_hint(hint)
}

const PAUSABLE: &str = "Sinks, sources and tables that have a connector can be paused.";
