//! What the tests of single rewrites share.

use millrace_common::SqlError;

use super::ast::{AstContext, AstEntry, AstRewrite, rewrite_query_by};
use crate::bind::tests::{TestCatalog, run};
use crate::bind::{BoundQuery, SessionInfo, tests};

/// A query as one rewrite leaves it, which has had all of its nodes.
pub fn rewritten(rewrite: AstRewrite, sql: &str) -> Result<String, SqlError> {
    let mut query = crate::parser::parse_query(sql)?;
    let (catalog, session) = (TestCatalog::new(), SessionInfo::default());
    let list = [AstEntry { rewrite, after: &[] }];
    rewrite_query_by(&list, &mut query, AstContext::new(&catalog, &session))?;
    Ok(query.to_string())
}

/// Asserts what one rewrite, which has had all of their nodes, makes of queries.
pub fn assert_rewritten(rewrite: AstRewrite, cases: &[(&str, &str)]) {
    for (sql, expected) in cases {
        assert_eq!(rewritten(rewrite, sql).unwrap(), *expected, "{sql}");
    }
}

/// A query over the tables of the test catalog, bound in batch.
pub fn bound(sql: &str) -> Result<BoundQuery, SqlError> {
    tests::bind(&TestCatalog::new(), sql, false)
}

/// The rows of a query in batch, their values parted by `|`.
pub fn rows(sql: &str) -> Vec<String> {
    run(sql).unwrap()
}
