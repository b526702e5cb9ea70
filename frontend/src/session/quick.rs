//! Queries that are bound on the spot.
//!
//! Binding keeps a processor busy, so that the other tasks of the thread are passed on to another one first
//! ([`super::busy`]). For a statement by key that takes longer than binding it.

use std::ops::ControlFlow;

use millrace_planner::CatalogView;
use millrace_planner::parser::walk;
use millrace_rpc::catalog::RelationKind;
use sqlparser::ast::{Expr, ObjectName, Query, SetExpr, TableFactor};

use crate::query::SessionCatalog;

/// Expressions that are few.
const FEW: usize = 200;

/// Whether a query is bound in no time that others would wait for: it has few expressions, over one table, and nothing of it
/// stands for something larger, as a view does.
pub fn is_quick_to_bind(view: &SessionCatalog, query: &Query) -> bool {
    let SetExpr::Select(select) = query.body.as_ref() else { return false };
    let one_table = match select.from.as_slice() {
        [] => true,
        [only] => match &only.relation {
            TableFactor::Table { name, args: None, .. } => {
                only.joins.is_empty() && is_table(view, name)
            }
            _ => false,
        },
        _ => false,
    };
    one_table && query.with.is_none() && has_few_expressions(query)
}

fn is_table(view: &SessionCatalog, name: &ObjectName) -> bool {
    let Ok((schema, name)) = SessionCatalog::split_name(name) else { return false };
    let relation = view.relation(schema.as_deref(), &name);
    relation.is_some_and(|r| r.kind == RelationKind::Table as i32)
}

fn has_few_expressions(query: &Query) -> bool {
    let mut left = FEW;
    let walked = walk::expressions(query, |e| {
        let large = matches!(
            e,
            Expr::Function(_) | Expr::Subquery(_) | Expr::InSubquery { .. } | Expr::Exists { .. }
        );
        if large || left == 0 {
            return ControlFlow::Break(());
        }
        left -= 1;
        ControlFlow::Continue(())
    });
    walked.is_continue()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dml::rewrite::parse_query;

    #[test]
    fn few_expressions_without_calls_are_quick() {
        let quick = |sql: &str| has_few_expressions(&parse_query(sql).unwrap());
        assert!(quick("SELECT id, v + 1 FROM t WHERE id = CAST('5' AS bigint)"));
        assert!(!quick("SELECT repeat('x', 1000000000)"));
        assert!(!quick("SELECT id FROM t WHERE v IN (SELECT v FROM s)"));
        assert!(!quick("SELECT (SELECT 1)"));
        assert!(!quick("SELECT 1 WHERE EXISTS (SELECT 1)"));
        assert!(!quick(&format!("SELECT {}", vec!["1"; FEW].join(" + "))));
    }
}
