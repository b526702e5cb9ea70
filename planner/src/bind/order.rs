//! Names in ORDER BY: a name by itself is an output column's, a name within an expression an input column's.
//!
//! DataFusion looks among the output columns first for both. So an output column whose name an expression of ORDER BY
//! says is given a name of its own, which is not shown; what then still reads that name is a column of the input.

use std::collections::HashSet;
use std::ops::ControlFlow;

use millrace_common::SqlError;
use sqlparser::ast::*;

use super::names::{column_name, fold, hidden_name, is_column};

/// Parts the output names of a query from the names in its ORDER BY.
pub fn part_names(query: &mut Query) {
    let Some(OrderBy { kind: OrderByKind::Expressions(order), .. }) = &mut query.order_by else {
        return;
    };
    let SetExpr::Select(select) = query.body.as_mut() else { return };
    let outputs: HashSet<String> = select.projection.iter().filter_map(computed_name).collect();
    let mut read = Names { of: &outputs, found: HashSet::new(), queries: 0 };
    for e in order.iter().map(|o| &o.expr).filter(|e| bare_name(e).is_none()) {
        let _ = e.visit(&mut read);
    }
    let found = read.found;
    for item in &mut select.projection {
        let Some(name) = computed_name(item).filter(|n| found.contains(n)) else { continue };
        let alias = hidden_name(&name);
        if let SelectItem::UnnamedExpr(expr) | SelectItem::ExprWithAlias { expr, .. } = item {
            let expr = std::mem::replace(expr, Expr::value(Value::Null));
            *item = SelectItem::ExprWithAlias { expr, alias };
        }
    }
    for o in order {
        if let Some(name) = bare_name(&o.expr).filter(|n| found.contains(n)) {
            o.expr = Expr::Identifier(hidden_name(&name));
        }
    }
}

/// The same of a query that others read by its columns' names: it keeps them.
pub fn part_and_keep_names(query: &mut Query) -> Result<(), SqlError> {
    let names = |q: &Query| match q.body.as_ref() {
        SetExpr::Select(s) => s.projection.iter().map(output_name).collect::<Option<Vec<_>>>(),
        _ => None,
    };
    // With a wildcard there is no list of names to give back.
    let Some(before) = names(query) else { return Ok(()) };
    part_names(query);
    let Some(after) = names(query).filter(|after| *after != before) else { return Ok(()) };
    let mut outer = crate::parser::parse_query("SELECT 1 FROM (SELECT 1) AS ordered")?;
    if let SetExpr::Select(select) = outer.body.as_mut() {
        let quoted = |name| Ident::with_quote('"', name);
        let items = after.into_iter().zip(before).map(|(from, to)| SelectItem::ExprWithAlias {
            expr: Expr::Identifier(quoted(from)),
            alias: quoted(to),
        });
        select.projection = items.collect();
        for from in &mut select.from {
            if let TableFactor::Derived { subquery, .. } = &mut from.relation {
                std::mem::swap(subquery.as_mut(), query);
            }
        }
        *query = *outer;
    }
    Ok(())
}

fn output_name(item: &SelectItem) -> Option<String> {
    match item {
        SelectItem::UnnamedExpr(e) => Some(column_name(e)),
        SelectItem::ExprWithAlias { alias, .. } => Some(fold(alias)),
        _ => None,
    }
}

/// The name of an output column, if it is not that of the column which it is.
fn computed_name(item: &SelectItem) -> Option<String> {
    let name = output_name(item)?;
    match item {
        SelectItem::UnnamedExpr(e) if is_column(e) => None,
        SelectItem::ExprWithAlias { expr, .. } if is_column(expr) && column_name(expr) == name => {
            None
        }
        _ => Some(name),
    }
}

fn bare_name(e: &Expr) -> Option<String> {
    match e {
        Expr::Identifier(name) => Some(fold(name)),
        Expr::Nested(inner) => bare_name(inner),
        _ => None,
    }
}

/// Looks for unqualified names, but not in subqueries.
struct Names<'a> {
    of: &'a HashSet<String>,
    found: HashSet<String>,
    queries: usize,
}

impl Visitor for Names<'_> {
    type Break = ();

    fn pre_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
        self.queries += 1;
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
        self.queries -= 1;
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, e: &Expr) -> ControlFlow<()> {
        if let (Expr::Identifier(name), 0) = (e, self.queries) {
            let name = fold(name);
            if self.of.contains(&name) {
                self.found.insert(name);
            }
        }
        ControlFlow::Continue(())
    }
}
