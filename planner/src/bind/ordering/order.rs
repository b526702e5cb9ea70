//! Names in ORDER BY: a name by itself is an output column's, a name within an expression an input column's.
//!
//! DataFusion looks among the output columns first for both. So an output column whose name an expression of ORDER BY
//! says is given a name of its own, which is not shown; what then still reads that name is a column of the input.
//!
//! Behind DISTINCT there are only output columns: what it is ordered by is one of them, and becomes its position.

use std::collections::HashSet;
use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;
use sqlparser::tokenizer::Location;

use crate::bind::aggregates::distinct_on::has_merged;
use crate::bind::expressions::clause_expressions::any_own;
use crate::bind::names::{column_name, fold, hidden_name, is_column};
use crate::bind::rewrites::ast::AstRewrite;
use crate::parser::walk;

/// Tells the names of outputs from those of inputs in ORDER BY.
pub const PART_ORDER_NAMES: AstRewrite = AstRewrite {
    name: "part order names",
    query: |query, _| {
        for cte in query.with.iter_mut().flat_map(|w| &mut w.cte_tables) {
            part_and_keep_names(&mut cte.query)?;
        }
        place_distinct(query)?;
        part_branches(&mut query.body)?;
        part_names(query)
    },
    from_item: |factor, _| match factor {
        TableFactor::Derived { subquery, .. } => part_and_keep_names(subquery),
        _ => Ok(()),
    },
    ..AstRewrite::NONE
};

/// Makes positions of what a SELECT DISTINCT is ordered by; 42P10 where its list has no such expression.
fn place_distinct(query: &mut Query) -> Result<(), SqlError> {
    // Merged columns are written out first: the name of one is another column than that of a table's own.
    if matches!(query.body.as_ref(), SetExpr::Select(select) if select.distinct.is_some()) {
        crate::bind::names::using::spell_out_query(query)?;
    }
    crate::bind::aggregates::distinct_on::spell_out(query)?;
    let SetExpr::Select(select) = query.body.as_ref() else { return Ok(()) };
    let Some(list) = distinct_list(select) else { return Ok(()) };
    let exact = has_merged(select);
    let Some(OrderBy { kind: OrderByKind::Expressions(order), .. }) = &mut query.order_by else {
        return Ok(());
    };
    for by in order {
        match listed(&by.expr, &list, exact) {
            Listed::As(position) => {
                let position = Value::Number((position + 1).to_string(), false);
                by.expr = Expr::value(position);
            }
            Listed::No if !is_column(unnested(&by.expr)) => {
                let message =
                    "for SELECT DISTINCT, ORDER BY expressions must appear in select list";
                return Err(SqlError::new(SqlState("42P10"), message));
            }
            // What the list's columns are called, the planner knows.
            Listed::No | Listed::ByName => {}
        }
    }
    Ok(())
}

/// What the first SELECT DISTINCT is ordered by that is not in its list.
pub fn unlisted_in(sql: &Statement) -> Option<Location> {
    first_in_queries(sql, unlisted)
}

/// The position of the first expression that is found in a query of a statement.
pub fn first_in_queries(
    sql: &Statement,
    find: impl Fn(&Query) -> Option<&Expr>,
) -> Option<Location> {
    struct First<F>(F);
    impl<F: Fn(&Query) -> Option<&Expr>> Visitor for First<F> {
        type Break = Location;

        fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<Location> {
            match (self.0)(query) {
                Some(e) => ControlFlow::Break(e.span().start),
                None => ControlFlow::Continue(()),
            }
        }
    }
    walk::visit(sql, &mut First(find)).break_value()
}

fn unlisted(query: &Query) -> Option<&Expr> {
    let SetExpr::Select(select) = query.body.as_ref() else { return None };
    let list = distinct_list(select)?;
    let Some(OrderBy { kind: OrderByKind::Expressions(order), .. }) = &query.order_by else {
        return None;
    };
    let exact = has_merged(select);
    order.iter().map(|by| &by.expr).find(|e| matches!(listed(e, &list, exact), Listed::No))
}

/// The list of a SELECT DISTINCT, if it is all expressions.
fn distinct_list(select: &Select) -> Option<Vec<SelectItem>> {
    let plain = |item: &SelectItem| {
        matches!(item, SelectItem::UnnamedExpr(_) | SelectItem::ExprWithAlias { .. })
    };
    let distinct = matches!(select.distinct, Some(Distinct::Distinct));
    (distinct && select.projection.iter().all(plain)).then(|| select.projection.clone())
}

enum Listed {
    /// By the expression of the column at a place.
    As(usize),
    /// By a column's name or position.
    ByName,
    No,
}

fn listed(e: &Expr, list: &[SelectItem], exact: bool) -> Listed {
    if matches!(e, Expr::Value(_)) {
        return Listed::ByName;
    }
    if let Some(name) = bare_name(e)
        && list.iter().any(|item| output_name(item).as_ref() == Some(&name))
    {
        return Listed::ByName;
    }
    let same = |item: &SelectItem| match item {
        SelectItem::UnnamedExpr(x) | SelectItem::ExprWithAlias { expr: x, .. } => same(e, x, exact),
        _ => false,
    };
    list.iter().position(same).map_or(Listed::No, Listed::As)
}

/// Whether two expressions say the same: case, parentheses and the names of tables aside, where one leaves them out.
/// `exact`: it may not. Where USING merges columns, the name alone is another column than one of the tables'.
pub(in crate::bind) fn same(a: &Expr, b: &Expr, exact: bool) -> bool {
    let (a, b) = (Plain::of(a), Plain::of(b));
    let agree = |(a, b): (&Option<String>, &Option<String>)| {
        a == b || !exact && (a.is_none() || b.is_none())
    };
    a.expr == b.expr && a.tables.iter().zip(&b.tables).all(agree)
}

/// An expression without what is only spelling, and the tables that its columns are qualified with.
struct Plain {
    expr: Expr,
    tables: Vec<Option<String>>,
}

impl Plain {
    fn of(e: &Expr) -> Plain {
        let mut plain = Plain { expr: e.clone(), tables: Vec::new() };
        let mut expr = e.clone();
        let _ = walk::visit_mut(&mut expr, &mut plain);
        plain.expr = expr;
        plain
    }
}

impl VisitorMut for Plain {
    type Break = ();

    fn post_visit_expr(&mut self, e: &mut Expr) -> ControlFlow<()> {
        let folded = |name: &Ident| Ident::with_quote('"', fold(name));
        match e {
            Expr::Nested(inner) => *e = std::mem::replace(inner.as_mut(), Expr::value(Value::Null)),
            Expr::Identifier(name) => {
                *name = folded(&*name);
                self.tables.push(None);
            }
            Expr::CompoundIdentifier(parts) => {
                let before = parts.len().checked_sub(2).and_then(|i| parts.get(i)).map(fold);
                self.tables.push(before);
                if let Some(name) = parts.last().map(folded) {
                    *e = Expr::Identifier(name);
                }
            }
            Expr::Function(f) => {
                let names = f.name.0.iter().filter_map(|part| part.as_ident()).map(folded);
                f.name = ObjectName::from(names.collect::<Vec<_>>());
            }
            _ => {}
        }
        ControlFlow::Continue(())
    }
}

pub(in crate::bind) fn unnested(e: &Expr) -> &Expr {
    match e {
        Expr::Nested(inner) => unnested(inner),
        e => e,
    }
}

/// Parts the output names of a query from the names in its ORDER BY; 42702 for a name of several output columns.
fn part_names(query: &mut Query) -> Result<(), SqlError> {
    let Some(OrderBy { kind: OrderByKind::Expressions(order), .. }) = &mut query.order_by else {
        return Ok(());
    };
    let SetExpr::Select(select) = query.body.as_mut() else { return Ok(()) };
    for name in order.iter().filter_map(|o| bare_name(&o.expr)) {
        crate::bind::names::star_expansion::is_output(&select.projection, &name)?;
    }
    let found = hidden_inputs(select, order);
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
    Ok(())
}

/// The names of computed output columns by which ORDER BY means columns of the input: within an expression, or with a
/// table's name before it.
pub(in crate::bind) fn hidden_inputs(select: &Select, order: &[OrderByExpr]) -> HashSet<String> {
    let outputs: HashSet<String> = select.projection.iter().filter_map(computed_name).collect();
    let mut found = HashSet::new();
    for e in order.iter().map(|o| &o.expr).filter(|e| bare_name(e).is_none()) {
        any_own(e, |e| {
            let name = match e {
                Expr::Identifier(name) => Some(fold(name)),
                Expr::CompoundIdentifier(parts) => parts.last().map(fold),
                _ => None,
            };
            found.extend(name.filter(|name| outputs.contains(name)));
            false
        });
    }
    found
}

/// The same of a query that others read by its columns' names: it keeps them.
fn part_and_keep_names(query: &mut Query) -> Result<(), SqlError> {
    let names = |q: &Query| match q.body.as_ref() {
        SetExpr::Select(s) => s.projection.iter().map(output_name).collect::<Option<Vec<_>>>(),
        _ => None,
    };
    place_distinct(query)?;
    // With a wildcard there is no list of names to give back.
    let Some(before) = names(query) else { return Ok(()) };
    part_names(query)?;
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

/// The same of the queries in parentheses that a set operation unites.
fn part_branches(body: &mut SetExpr) -> Result<(), SqlError> {
    let SetExpr::SetOperation { left, right, .. } = body else { return Ok(()) };
    for side in [left, right] {
        match side.as_mut() {
            SetExpr::Query(query) => part_and_keep_names(query)?,
            side => part_branches(side)?,
        }
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
        // With an alias a column is nobody's any more, and another table may have one of its name.
        SelectItem::ExprWithAlias { expr: Expr::Identifier(column), .. }
            if fold(column) == name =>
        {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bind::rewrites::testing::{assert_rewritten, rewritten};

    #[test]
    fn a_name_within_an_expression_is_an_input_s() {
        let cases = [
            (
                "SELECT -a AS a FROM t ORDER BY a + 1",
                "SELECT -a AS \"a\u{1f}own\" FROM t ORDER BY a + 1",
            ),
            // By itself it is the output's.
            ("SELECT -a AS a FROM t ORDER BY a", "SELECT -a AS a FROM t ORDER BY a"),
            ("SELECT a FROM t ORDER BY a + 1", "SELECT a FROM t ORDER BY a + 1"),
        ];
        assert_rewritten(PART_ORDER_NAMES, &cases);
    }

    #[test]
    fn a_query_in_from_keeps_its_names() {
        let sql = "SELECT a FROM (SELECT -a AS a FROM t ORDER BY a + 1) AS s";
        let expected = "SELECT a FROM (SELECT \"a\u{1f}own\" AS \"a\" FROM \
                        (SELECT -a AS \"a\u{1f}own\" FROM t ORDER BY a + 1) AS ordered) AS s";
        assert_rewritten(PART_ORDER_NAMES, &[(sql, expected)]);
    }

    #[test]
    fn what_distinct_is_ordered_by_is_a_place_in_its_list() {
        let sql = "SELECT DISTINCT b, a + 1 FROM t ORDER BY A + 1, b";
        let expected = "SELECT DISTINCT b, a + 1 FROM t ORDER BY 2, b";
        assert_rewritten(PART_ORDER_NAMES, &[(sql, expected)]);
        let e = rewritten(PART_ORDER_NAMES, "SELECT DISTINCT b FROM t ORDER BY a + 1").unwrap_err();
        assert_eq!(e.state, SqlState("42P10"));
    }
}
