//! What clients write that only the system catalogs give a meaning: rewritten before planning.

use millrace_common::SqlError;
use sqlparser::ast::Query;

use crate::session::Session;

/// The query as our planner takes it.
pub fn for_clients(query: &Query, _session: &Session) -> Result<Query, SqlError> {
    Ok(query.clone())
}
