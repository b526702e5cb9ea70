//! Clauses that would otherwise be ignored or computed wrongly.

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;

use crate::bind::rewrites::ast::{AstContext, AstRewrite};

/// Refuses what no other rewrite has taken away.
pub const REFUSE_CLAUSES: AstRewrite = AstRewrite {
    name: "refuse clauses",
    query: |query, cx| {
        if crate::parser::with_changes_rows(query) {
            return Err(changes_in_with(cx));
        }
        refuse_query(query).map_or(Ok(()), Err)
    },
    select: |select, _| refuse_select(select).map_or(Ok(()), Err),
    ..AstRewrite::NONE
};

fn refuse_select(select: &Select) -> Option<SqlError> {
    if select.into.is_some() {
        return Some(SqlError::unsupported("SELECT INTO").with_hint("Use CREATE TABLE … AS."));
    }
    (select.top.is_some() || !select.lateral_views.is_empty() || select.prewhere.is_some())
        .then(|| SqlError::unsupported("this SELECT clause"))
}

/// A statement that changes rows in the WITH of a query. Of a statement's own WITH nobody asks here: the
/// statement is run in parts.
fn changes_in_with(cx: &AstContext<'_>) -> SqlError {
    let refused = |message: &str| SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message);
    if cx.queries > 1 {
        return refused(
            "WITH clause containing a data-modifying statement must be at the top level",
        );
    }
    if cx.session.for_view {
        return refused("a definition must not contain data-modifying statements in WITH");
    }
    SqlError::unsupported("INSERT, UPDATE or DELETE in the WITH of this statement")
        .with_hint("Write the query with its WITH as a statement of its own.")
}

fn refuse_query(query: &Query) -> Option<SqlError> {
    if crate::parser::changes_rows(query) {
        return Some(SqlError::unsupported("INSERT, UPDATE or DELETE within a query").with_hint(
            "Write it as a statement of its own, in a transaction with the one that reads its rows.",
        ));
    }
    if !query.locks.is_empty() {
        return Some(SqlError::unsupported("a row lock (FOR UPDATE, FOR SHARE)").with_hint(
            "Leave it out: statements that write check that what they read has not changed.",
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bind::rewrites::testing::rewritten;

    #[test]
    fn clauses_that_nothing_runs_are_refused() {
        for sql in ["SELECT a INTO b FROM t", "SELECT a FROM t FOR UPDATE"] {
            let e = rewritten(REFUSE_CLAUSES, sql).unwrap_err();
            assert_eq!(e.state, SqlState::FEATURE_NOT_SUPPORTED, "{sql}");
        }
    }
}
