//! Whether a statement that has failed rests on what others have changed meanwhile: then it is begun anew.

use std::sync::Arc;

use millrace_common::{SqlError, SqlState};
use millrace_planner::Statement;
use millrace_planner::ast::Show;
use millrace_planner::parser::with_changes_rows;
use sqlparser::ast::Statement as Sql;

use super::Session;
use super::planned::is_outdated;
use crate::cluster::CatalogSnapshot;

impl Session {
    /// Whether a statement that has failed is to be begun anew; `planned`: the catalog from before it was planned.
    pub(super) async fn plans_again(
        &self,
        error: &SqlError,
        planned: &Arc<CatalogSnapshot>,
    ) -> bool {
        is_outdated(error) || self.learns_more(error, planned).await
    }

    /// Whether something that was not known in this catalog, was and is gone, or was of another kind or type, may be known
    /// now, so that it is of use to try again.
    pub(crate) async fn learns_more(
        &self,
        error: &SqlError,
        planned: &Arc<CatalogSnapshot>,
    ) -> bool {
        let of_definitions = [
            SqlState::UNDEFINED_TABLE,
            SqlState::UNDEFINED_COLUMN,
            SqlState::UNDEFINED_OBJECT,
            SqlState::INVALID_SCHEMA_NAME,
            SqlState::AMBIGUOUS_COLUMN,
            SqlState::UNDEFINED_FUNCTION,
            SqlState::DATATYPE_MISMATCH,
            SqlState::WRONG_OBJECT_TYPE,
        ];
        of_definitions.contains(&error.state) && self.knows_more(planned).await
    }

    /// Whether the catalog is another one than this, now that the newest was looked for.
    pub(super) async fn knows_more(&self, planned: &Arc<CatalogSnapshot>) -> bool {
        // Also where the catalog has gone on by itself: it may go on still. If it cannot be looked for, what is known is as true
        // as can be known.
        let _ = self.cluster().refresh_catalog().await;
        !Arc::ptr_eq(planned, &self.cluster().catalog())
    }
}

/// Whether a query has parts that change rows.
pub(super) fn changes_in_with(statement: &Statement) -> bool {
    matches!(statement, Statement::Sql(sql)
        if matches!(sql.as_ref(), Sql::Query(query) if with_changes_rows(query)))
}

/// Whether a statement that names something unknown has done nothing by the time that this shows.
pub(super) fn can_be_tried_again(statement: &Statement) -> bool {
    match statement {
        Statement::Sql(sql) => match sql.as_ref() {
            // Its parts run one after the other.
            Sql::Query(query) => !with_changes_rows(query),
            Sql::Insert(_)
            | Sql::Update(_)
            | Sql::Delete(_)
            | Sql::Copy { .. }
            | Sql::Declare { .. }
            | Sql::Prepare { .. } => true,
            // What it executes is tried again by itself, if it can be.
            _ => false,
        },
        Statement::Show(Show::Setting(_) | Show::AllSettings) => false,
        Statement::Show(_)
        | Statement::Describe { .. }
        | Statement::Explain(_)
        | Statement::DeclareSubscriptionCursor(_)
        | Statement::Subscribe(_) => true,
        _ => false,
    }
}
