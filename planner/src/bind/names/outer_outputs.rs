//! `(SELECT u.id FROM a) AS s` in a subquery where `u` is of the query around: the column is called `id`.
//!
//! The planner gives a column of an outer query no name of its own where it stands in a SELECT list. That of
//! a query in FROM is given one in its plan, that of a query in WITH in the text.

use std::collections::HashMap;

use datafusion::common::Result;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder};
use millrace_functions::tree::Walk;
use sqlparser::ast;

use super::output_names::{column_name, fold};
use crate::bind::relations::provider::columns_of;
use crate::bind::rewrites::ast::AstRewrite;
use crate::bind::spans::misplaced_calls::names_of;

/// Names the columns of queries in WITH that are columns of an outer query.
pub const NAME_OUTER_OUTPUTS: AstRewrite = AstRewrite {
    name: "name outer outputs",
    query: |query, _| {
        for cte in query.with.iter_mut().flat_map(|w| &mut w.cte_tables) {
            name_in_with(&mut cte.query.body);
        }
        Ok(())
    },
    ..AstRewrite::NONE
};

/// Writes out the names of the columns of a query in WITH that are of no table in its FROM.
fn name_in_with(body: &mut ast::SetExpr) {
    match body {
        ast::SetExpr::Select(select) => {
            let tables: Vec<String> = names_of(select).into_iter().map(|(name, _)| name).collect();
            let nothing = select.from.is_empty();
            for item in &mut select.projection {
                if let ast::SelectItem::UnnamedExpr(e) = item
                    && is_of_outer(e, &tables, nothing)
                {
                    let alias = ast::Ident::with_quote('"', column_name(e));
                    *item = ast::SelectItem::ExprWithAlias { expr: e.clone(), alias };
                }
            }
        }
        ast::SetExpr::Query(query) => name_in_with(&mut query.body),
        // Its columns are called as those of the first of its queries.
        ast::SetExpr::SetOperation { left, .. } => name_in_with(left),
        _ => {}
    }
}

fn is_of_outer(e: &ast::Expr, tables: &[String], nothing: bool) -> bool {
    match e {
        ast::Expr::Identifier(_) => nothing,
        ast::Expr::CompoundIdentifier(parts) => match parts.as_slice() {
            [.., table, _] => !tables.contains(&fold(table)),
            _ => false,
        },
        _ => false,
    }
}

/// The plan of a query in FROM, whose columns are called as those of the outer queries that they are.
pub fn name(plan: LogicalPlan) -> Result<LogicalPlan> {
    let mut names: HashMap<String, String> = HashMap::new();
    plan.walk(|node| {
        if let LogicalPlan::Projection(p) = node {
            for e in &p.expr {
                if let Expr::OuterReferenceColumn(_, c) = e {
                    names.insert(e.schema_name().to_string(), c.name.clone());
                }
            }
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    let is_concerned = |e: &Expr| match e {
        Expr::Column(c) if c.relation.is_none() => names.get(&c.name),
        _ => None,
    };
    let columns = columns_of(&plan);
    if !columns.iter().any(|c| is_concerned(c).is_some()) {
        return Ok(plan);
    }
    let named = columns.into_iter().map(|c| match is_concerned(&c) {
        Some(name) => c.alias(name),
        None => c,
    });
    let named: Vec<Expr> = named.collect();
    LogicalPlanBuilder::from(plan).project(named)?.build()
}

#[cfg(test)]
mod tests {
    use super::NAME_OUTER_OUTPUTS;
    use crate::bind::rewrites::testing::assert_rewritten;

    #[test]
    fn columns_of_other_tables_are_named_in_with() {
        let cases = [
            (
                "WITH w AS (SELECT u.id, a.x, y FROM a) SELECT u.id FROM w",
                "WITH w AS (SELECT u.id AS \"id\", a.x, y FROM a) SELECT u.id FROM w",
            ),
            // Of a set operation the first branch names the columns.
            (
                "WITH w AS (SELECT u.id FROM a UNION SELECT u.id FROM a) SELECT 1 FROM w",
                "WITH w AS (SELECT u.id AS \"id\" FROM a UNION SELECT u.id FROM a) SELECT 1 FROM w",
            ),
        ];
        assert_rewritten(NAME_OUTER_OUTPUTS, &cases);
    }
}
