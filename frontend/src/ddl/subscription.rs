//! CREATE SUBSCRIPTION: keeps a relation's changes for those who come back for them.

use std::time::Duration;

use millrace_common::settings::parse_duration;
use millrace_common::{SqlError, SqlState};
use millrace_planner::ast::CreateSubscription;
use millrace_rpc::catalog::{OptionEntry, Relation, RelationKind};

use super::drop::noun;
use super::{create, new_name};
use crate::session::Session;

const DEFAULT_RETENTION: &str = "1 day";
const DEFAULT_RETENTION_BYTES: u64 = 16 << 30;
const MIN_RETENTION_BYTES: u64 = 1 << 20;

pub async fn create_subscription(
    session: &mut Session,
    def: &CreateSubscription,
    text: &str,
) -> Result<String, SqlError> {
    let tag = "CREATE SUBSCRIPTION".to_owned();
    let kind = RelationKind::Subscription;
    let Some((catalog, schema, name)) = new_name(session, &def.name, kind, def.if_not_exists)?
    else {
        return Ok(tag);
    };
    let from = catalog.resolve(&def.from)?;
    check_followable(&from)?;
    let known = ["retention", "retention_bytes"];
    if let Some((other, _)) = def.options.iter().find(|(n, _)| !known.contains(&n.as_str())) {
        return Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!("unknown option \"{other}\""),
        )
        .with_hint("Options of a subscription: retention, retention_bytes."));
    }
    let option = |name: &str| def.options.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
    let retention = option("retention").unwrap_or(DEFAULT_RETENTION).to_owned();
    let bytes = match option("retention_bytes") {
        None => DEFAULT_RETENTION_BYTES,
        Some(text) => {
            text.trim().parse().ok().filter(|b| *b >= MIN_RETENTION_BYTES).ok_or_else(|| {
                SqlError::new(
                    SqlState::INVALID_PARAMETER_VALUE,
                    format!("invalid value for option \"retention_bytes\": \"{text}\""),
                )
                .with_hint(format!("Give a number of bytes, at least {MIN_RETENTION_BYTES}."))
            })?
        }
    };
    if parse_duration(&retention)? < Duration::from_secs(1) {
        return Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            "the retention of a subscription must be at least a second",
        ));
    }
    let relation = Relation {
        schema,
        name,
        kind: kind as i32,
        definition: text.to_owned(),
        depends_on: vec![from.id],
        options: vec![
            OptionEntry { name: "retention".to_owned(), value: retention },
            OptionEntry { name: "retention_bytes".to_owned(), value: bytes.to_string() },
        ],
        owner: session.user.clone(),
        ..Relation::default()
    };
    create(session, relation, 0, false).await?;
    Ok(tag)
}

/// Only what keeps rows has changes to read.
pub fn check_followable(relation: &Relation) -> Result<(), SqlError> {
    match RelationKind::try_from(relation.kind) {
        Ok(RelationKind::Table | RelationKind::MaterializedView) => Ok(()),
        Ok(RelationKind::View | RelationKind::Source) => Err(SqlError::new(
            SqlState::WRONG_OBJECT_TYPE,
            format!("\"{}\" is a {}, which keeps no rows", relation.name, noun(relation)),
        )
        .with_hint("Create a materialized view of it and subscribe to that.")),
        _ => Err(SqlError::new(
            SqlState::WRONG_OBJECT_TYPE,
            format!("\"{}\" is a {}", relation.name, noun(relation)),
        )
        .with_hint("Subscribe to a table or a materialized view.")),
    }
}
