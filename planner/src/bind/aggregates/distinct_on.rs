//! DISTINCT ON as the planner knows it: by expressions, in the order of ORDER BY, which names each of them.
//!
//! PostgreSQL takes positions and the names of output columns too, in any order, and ORDER BY may end before
//! all are named. By a constant there is one row. Positions that count columns of `*` are written out where
//! the catalog is at hand ([`place`]), the rest here.

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;
use sqlparser::tokenizer::Location;

use crate::bind::expressions::desugar::Copies;
use crate::bind::names::fold;
use crate::bind::names::scopes::{self, Joined};
use crate::bind::ordering::order::{first_in_queries, same, unnested};
use crate::parser::walk;

/// Whether a SELECT DISTINCT ON has `*` in its list.
pub fn has_wildcard(select: &Select) -> bool {
    let by_keys = matches!(select.distinct, Some(Distinct::On(_)));
    by_keys && select.projection.iter().any(|item| plain(item).is_none())
}

/// Writes out the positions of a DISTINCT ON with `*` in its list, and those of its ORDER BY. Where the
/// columns that `*` stands for are not known they stay.
pub fn place(
    select: &mut Select,
    order_by: Option<&mut OrderBy>,
    from: &Joined,
    copies: &mut Copies,
) -> Result<(), SqlError> {
    let Some(all) = all_items(&select.projection, from) else { return Ok(()) };
    if let Some(Distinct::On(keys)) = &mut select.distinct {
        for key in keys {
            put(key, &all, KEYS, copies)?;
        }
    }
    if let Some(OrderBy { kind: OrderByKind::Expressions(order), .. }) = order_by {
        for by in order {
            put(&mut by.expr, &all, ORDER, copies)?;
        }
    }
    Ok(())
}

/// What stands at each place of a list, if that is known of all.
fn all_items(items: &[SelectItem], from: &Joined) -> Option<Vec<Expr>> {
    let mut all = Vec::with_capacity(items.len());
    for item in items {
        if let Some(e) = plain(item) {
            all.push(e.clone());
            continue;
        }
        let columns = match item {
            SelectItem::Wildcard(options) if scopes::is_plain(options) => from.all_columns()?,
            SelectItem::QualifiedWildcard(
                SelectItemQualifiedWildcardKind::ObjectName(name),
                options,
            ) if scopes::is_plain(options) => from.columns_of(name)?,
            _ => return None,
        };
        all.extend(columns);
    }
    Some(all)
}

fn put(e: &mut Expr, all: &[Expr], clause: &str, copies: &mut Copies) -> Result<(), SqlError> {
    let Some(text) = number(e) else { return Ok(()) };
    let found = place_of(text).and_then(|at| all.get(at)).ok_or_else(|| absent(clause, text))?;
    copies.again(found, 1)?;
    let found = found.clone();
    // A constant must not be taken for a position once more.
    *e = if is_constant(&found) { Expr::value(Value::Null) } else { found };
    Ok(())
}

/// Rewrites the DISTINCT ON of a query; 42P10 where ORDER BY begins with something else.
pub fn spell_out(query: &mut Query) -> Result<(), SqlError> {
    let limited = query.limit_clause.is_some() || query.fetch.is_some();
    let with_ties = query.fetch.as_ref().is_some_and(|f| f.with_ties);
    let select = match query.body.as_mut() {
        SetExpr::Select(select) => select,
        body => return spell_out_branches(body),
    };
    let exact = has_merged(select);
    let Some(mut keys) = keys_of(select, exact)? else { return Ok(()) };
    if let Some(OrderBy { kind: OrderByKind::Expressions(by), .. }) = &mut query.order_by {
        let longer = sort_keys(&mut keys, by, &select.projection, exact)?;
        if longer && with_ties {
            let message = "WITH TIES in an order without all keys of DISTINCT ON";
            return Err(SqlError::unsupported(message)
                .with_hint("Write the query in FROM, and ORDER BY and FETCH around it."));
        }
        if by.is_empty() {
            query.order_by = None;
        }
    }
    if !keys.is_empty() {
        select.distinct = Some(Distinct::On(keys));
        return Ok(());
    }
    if limited {
        return Err(SqlError::unsupported("DISTINCT ON a constant with LIMIT")
            .with_hint("Leave DISTINCT ON out and write LIMIT 1."));
    }
    select.distinct = None;
    let limit = Some(Expr::value(Value::Number("1".into(), false)));
    query.limit_clause =
        Some(LimitClause::LimitOffset { limit, offset: None, limit_by: Vec::new() });
    Ok(())
}

/// The same of the SELECTs that a set operation unites, whose ORDER BY is not theirs. What stands there in
/// parentheses is a query, which has its own turn.
fn spell_out_branches(body: &mut SetExpr) -> Result<(), SqlError> {
    match body {
        SetExpr::SetOperation { left, right, .. } => {
            spell_out_branches(left)?;
            spell_out_branches(right)
        }
        SetExpr::Select(select) => {
            let exact = has_merged(select);
            let Some(keys) = keys_of(select, exact)? else { return Ok(()) };
            if keys.is_empty() {
                let message = "DISTINCT ON a constant in a set operation";
                return Err(SqlError::unsupported(message).with_hint(
                    "Leave DISTINCT ON out and write the query with LIMIT 1 in parentheses.",
                ));
            }
            select.distinct = Some(Distinct::On(keys));
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Whether columns of the FROM of a SELECT are merged by their names.
pub(in crate::bind) fn has_merged(select: &Select) -> bool {
    select.from.iter().any(scopes::merges)
}

/// What a SELECT is distinct on, each expression once and without constants; `None`: it is not.
fn keys_of(select: &Select, exact: bool) -> Result<Option<Vec<Expr>>, SqlError> {
    let Some(Distinct::On(written)) = &select.distinct else { return Ok(None) };
    let mut keys: Vec<Expr> = Vec::with_capacity(written.len());
    for key in written {
        let Some(key) = meant(key, &select.projection, KEYS)? else {
            let message = "a position in DISTINCT ON that counts columns of *";
            return Err(SqlError::unsupported(message).with_hint("Name the column."));
        };
        check_name(&key, &select.projection)?;
        if !is_constant(&key) && !keys.iter().any(|k| same(k, &key, exact)) {
            keys.push(key);
        }
    }
    Ok(Some(keys))
}

/// Brings the keys into the order of ORDER BY, which then names all of them first. Where a position in it
/// counts columns of `*` that are not known both stay as they are written, and the planner compares them.
/// Whether ORDER BY has become longer.
fn sort_keys(
    keys: &mut Vec<Expr>,
    order: &mut Vec<OrderByExpr>,
    items: &[SelectItem],
    exact: bool,
) -> Result<bool, SqlError> {
    let known = order.iter().map(|by| meant(&by.expr, items, ORDER));
    let Some(known) = known.collect::<Result<Option<Vec<Expr>>, SqlError>>()? else {
        return Ok(false);
    };
    let mut sorted: Vec<Expr> = Vec::new();
    let mut kept: Vec<OrderByExpr> = Vec::new();
    let mut others = false;
    for (mut by, expr) in std::mem::take(order).into_iter().zip(known) {
        // By a constant nothing is ordered, and by the same a second time neither.
        if is_constant(&expr) || sorted.iter().any(|key| same(key, &expr, exact)) {
            continue;
        }
        let key = keys.iter().position(|key| same(key, &expr, exact));
        if key.is_some() && others {
            return Err(unmatched());
        }
        others |= key.is_none();
        if let Some(at) = key {
            keys.remove(at);
            sorted.push(expr.clone());
        }
        if key.is_some() || number(&by.expr).is_some() {
            check_name(&expr, items)?;
            by.expr = expr;
        }
        kept.push(by);
    }
    if others && !keys.is_empty() {
        return Err(unmatched());
    }
    let longer = !keys.is_empty();
    let rest = keys.iter().map(|key| OrderByExpr {
        expr: key.clone(),
        options: OrderByOptions { asc: None, nulls_first: None },
        with_fill: None,
    });
    kept.extend(rest);
    sorted.append(keys);
    *keys = sorted;
    *order = kept;
    Ok(longer)
}

/// The first expression of a DISTINCT ON that ORDER BY does not begin with.
pub fn unmatched_in(sql: &Statement) -> Option<Location> {
    first_in_queries(sql, unmatched_key)
}

/// The position of a DISTINCT ON that its list does not have.
pub fn absent_in(e: &SqlError, sql: &Statement) -> Option<Location> {
    struct Absent<'a>(&'a SqlError);
    impl Visitor for Absent<'_> {
        type Break = Location;

        fn pre_visit_select(&mut self, select: &Select) -> ControlFlow<Location> {
            let Some(Distinct::On(keys)) = &select.distinct else {
                return ControlFlow::Continue(());
            };
            let meant = |key: &&Expr| {
                number(key).is_some_and(|text| absent(KEYS, text).message == self.0.message)
            };
            match keys.iter().find(meant) {
                // Of a shorter list, perhaps, than another's.
                Some(key)
                    if number(key)
                        .and_then(place_of)
                        .is_none_or(|at| at >= select.projection.len()) =>
                {
                    ControlFlow::Break(key.span().start)
                }
                _ => ControlFlow::Continue(()),
            }
        }
    }
    walk::visit(sql, &mut Absent(e)).break_value()
}

fn unmatched_key(query: &Query) -> Option<&Expr> {
    let SetExpr::Select(select) = query.body.as_ref() else { return None };
    let Some(Distinct::On(written)) = &select.distinct else { return None };
    let Some(OrderBy { kind: OrderByKind::Expressions(order), .. }) = &query.order_by else {
        return None;
    };
    let items = select.projection.as_slice();
    let exact = has_merged(select);
    let mut left = Vec::with_capacity(written.len());
    for key in written {
        let expr = meant(key, items, KEYS).ok()??;
        left.extend((!is_constant(&expr)).then_some((key, expr)));
    }
    let all: Vec<Expr> = left.iter().map(|(_, expr)| expr.clone()).collect();
    let mut others = false;
    for by in order {
        let expr = meant(&by.expr, items, ORDER).ok()??;
        match left.iter().position(|(_, key)| same(key, &expr, exact)) {
            Some(at) if others => return left.get(at).map(|(key, _)| *key),
            Some(at) => {
                left.remove(at);
            }
            // One that has been met is ordered by no more.
            None => others |= !is_constant(&expr) && !all.iter().any(|key| same(key, &expr, exact)),
        }
    }
    left.first().filter(|_| others).map(|(key, _)| *key)
}

fn unmatched() -> SqlError {
    let message = "SELECT DISTINCT ON expressions must match initial ORDER BY expressions";
    SqlError::new(SqlState("42P10"), message)
}

/// How messages call the two.
const KEYS: &str = "DISTINCT ON";
const ORDER: &str = "ORDER BY";

fn absent(clause: &str, text: &str) -> SqlError {
    let message = format!("{clause} position {text} is not in select list");
    SqlError::new(SqlState("42P10"), message)
}

/// The place that a position means.
fn place_of(text: &str) -> Option<usize> {
    text.parse::<usize>().ok()?.checked_sub(1)
}

/// An item of a list that is no wildcard.
fn plain(item: &SelectItem) -> Option<&Expr> {
    match item {
        SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } => Some(e),
        _ => None,
    }
}

/// The expression that a position or an output column's name stands for; `None`: what the position counts is not known.
fn meant(e: &Expr, items: &[SelectItem], clause: &str) -> Result<Option<Expr>, SqlError> {
    if let Some(text) = number(e) {
        let known: Vec<&Expr> = items.iter().map_while(plain).collect();
        let at = place_of(text);
        return match at.and_then(|at| known.get(at)) {
            Some(found) => Ok(Some((*found).clone())),
            None if at.is_some() && known.len() < items.len() => Ok(None),
            None => Err(absent(clause, text)),
        };
    }
    let Expr::Identifier(name) = unnested(e) else { return Ok(Some(e.clone())) };
    let named = items.iter().find_map(|item| match item {
        SelectItem::ExprWithAlias { expr, alias } if fold(alias) == fold(name) => Some(expr),
        _ => None,
    });
    Ok(Some(named.unwrap_or(e).clone()))
}

/// An expression of the input that takes the place of what stands for it: a bare name would be taken for the output
/// column that is called so.
fn check_name(e: &Expr, items: &[SelectItem]) -> Result<(), SqlError> {
    let Expr::Identifier(name) = unnested(e) else { return Ok(()) };
    let taken = items.iter().any(|item| match item {
        SelectItem::ExprWithAlias { expr, alias } => {
            let itself = matches!(unnested(expr), Expr::Identifier(n) if fold(n) == fold(name));
            fold(alias) == fold(name) && !itself
        }
        _ => false,
    });
    if taken {
        let message = "DISTINCT ON with a column by the name of another output column";
        return Err(SqlError::unsupported(message)
            .with_hint("Write the table's name before the column's in the select list."));
    }
    Ok(())
}

/// The text of a number.
fn number(e: &Expr) -> Option<&str> {
    match unnested(e) {
        Expr::Value(v) => match &v.value {
            Value::Number(text, _) => Some(text),
            _ => None,
        },
        _ => None,
    }
}

/// Called of what is meant: a number is no position any more.
fn is_constant(e: &Expr) -> bool {
    match e {
        Expr::Nested(inner) => is_constant(inner),
        Expr::Value(v) => !matches!(v.value, Value::Placeholder(_)),
        Expr::UnaryOp { expr, .. } | Expr::Cast { expr, .. } => is_constant(expr),
        _ => false,
    }
}
