//! CREATE, ALTER and DROP USER.

use millrace_common::{SqlError, SqlState};
use millrace_planner::ast::UserStatement;
use millrace_rpc::log::UserChange;
use sqlparser::ast::Ident;

use crate::auth::verifier_of;
use crate::query::catalog_view::fold;
use crate::session::Session;

pub async fn execute(session: &mut Session, statement: &UserStatement) -> Result<String, SqlError> {
    match statement {
        UserStatement::Create { name, if_not_exists, password } => {
            let name = checked(name)?;
            if exists(session, &name) {
                let message = format!("role \"{name}\" already exists");
                if !if_not_exists {
                    return Err(SqlError::new(SqlState::DUPLICATE_OBJECT, message));
                }
                let message = format!("{message}, skipping");
                session.notice("NOTICE", SqlState::DUPLICATE_OBJECT, message);
                return Ok("CREATE ROLE".to_owned());
            }
            let verifier = password.clone().flatten().map(|p| verifier_of(&p)).transpose()?;
            set(session, &name, UserChange::Create, verifier).await?;
            Ok("CREATE ROLE".to_owned())
        }
        UserStatement::Alter { name, password } => {
            let name = fold(name);
            if !exists(session, &name) {
                return Err(unknown(&name));
            }
            if let Some(password) = password {
                let verifier = password.as_deref().map(verifier_of).transpose()?;
                set(session, &name, UserChange::Alter, verifier).await?;
            }
            Ok("ALTER ROLE".to_owned())
        }
        UserStatement::Drop { names, if_exists } => {
            let names: Vec<String> = names.iter().map(fold).collect();
            for name in &names {
                if session.shared.config.users.contains(name) {
                    let message = format!(
                        "cannot drop role {name} because it is required by the database system"
                    );
                    return Err(SqlError::new(SqlState::DEPENDENT_OBJECTS_STILL_EXIST, message));
                }
                if *name == session.user {
                    let message = "current user cannot be dropped";
                    return Err(SqlError::new(SqlState("55006"), message));
                }
                if !exists(session, name) && !if_exists {
                    return Err(unknown(name));
                }
            }
            for name in &names {
                if exists(session, name) {
                    set(session, name, UserChange::Drop, None).await?;
                    session.step.note_part();
                } else {
                    let message = format!("role \"{name}\" does not exist, skipping");
                    session.notice("NOTICE", SqlState::UNDEFINED_OBJECT, message);
                }
            }
            Ok("DROP ROLE".to_owned())
        }
    }
}

async fn set(
    session: &Session,
    name: &str,
    change: UserChange,
    verifier: Option<String>,
) -> Result<(), SqlError> {
    session.step.define(session.cluster().set_user(name, change, verifier)).await
}

fn exists(session: &Session, name: &str) -> bool {
    session.shared.has_user(name)
}

fn checked(name: &Ident) -> Result<String, SqlError> {
    let name = fold(name);
    let reserved = name.starts_with("pg_") || matches!(name.as_str(), "public" | "none");
    match reserved {
        true => Err(SqlError::new(SqlState("42939"), format!("role name \"{name}\" is reserved"))),
        false => Ok(name),
    }
}

fn unknown(name: &str) -> SqlError {
    SqlError::new(SqlState::UNDEFINED_OBJECT, format!("role \"{name}\" does not exist"))
}
