//! ALTER of whole relations. What comes from a connector is altered in [`super::source`], columns nowhere yet.

use millrace_common::{RelationId, SqlError, SqlState};
use millrace_planner::ast::{AlterAction, ObjectKind};
use sqlparser::ast::{Ident, ObjectName};

use super::drop::noun;
use crate::query::SessionCatalog;
use crate::query::catalog_view::fold;
use crate::session::Session;

/// ALTER SINK … PAUSE and RESUME, ALTER … OWNER TO; other changes are refused by name.
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
        if let (ObjectKind::Sink, AlterAction::Pause(paused)) = (kind, action) {
            let id = RelationId(relation.id);
            session.cluster().alter_relation(id, Vec::new(), Some(*paused)).await?;
            return Ok(tag);
        }
    }
    match action {
        AlterAction::OwnerTo(role) => check_owner(session, role)?,
        action => return Err(refused(&tag, kind, action)),
    }
    Ok(tag)
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
        AlterAction::SetParallelism(_) => {
            ("SET PARALLELISM", "All jobs have the server's parallelism.")
        }
        AlterAction::SetOptions(_) if kind == ObjectKind::Sink => {
            ("SET", "Drop the sink and create it anew with other options.")
        }
        AlterAction::SetOptions(_) => {
            ("SET", "Options of sources and of tables that have a connector can be changed.")
        }
        AlterAction::Pause(true) => ("PAUSE", PAUSABLE),
        AlterAction::Pause(false) => ("RESUME", PAUSABLE),
        AlterAction::OwnerTo(_) => ("OWNER TO", ""),
    };
    SqlError::unsupported(format!("{tag} … {what}")).with_hint(hint)
}

const PAUSABLE: &str = "Sinks, sources and tables that have a connector can be paused.";
