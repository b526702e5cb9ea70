//! GROUP BY the primary key of a table: its other columns have one value in each group, so the ones that the
//! query names are grouped by too.
//!
//! As in PostgreSQL only tables have such a key, not views or subqueries over them; and with GROUPING SETS,
//! ROLLUP and CUBE nothing is added.

use std::ops::ControlFlow;

use sqlparser::ast::*;

use crate::bind::names::fold;
use crate::bind::names::scopes::{Joined, Table, is_plain};
use crate::bind::ordering::order::unnested;
use crate::bind::spans::misplaced_calls::is_aggregate;
use crate::parser::walk;

/// What a SELECT is grouped by, if these are plain expressions.
pub fn group_exprs(select: &Select) -> Option<&[Expr]> {
    let GroupByExpr::Expressions(exprs, modifiers) = &select.group_by else { return None };
    let sets = |e: &Expr| matches!(e, Expr::GroupingSets(_) | Expr::Rollup(_) | Expr::Cube(_));
    let plain = modifiers.is_empty() && !exprs.is_empty() && !exprs.iter().any(sets);
    plain.then_some(exprs.as_slice())
}

/// Adds the columns that depend on what a SELECT is grouped by.
pub fn spell_out(select: &mut Select, order_by: Option<&OrderBy>, from: &Joined) {
    let Some(exprs) = group_exprs(select) else { return };
    let grouped: Vec<Place> =
        exprs.iter().filter_map(|e| grouped_column(e, &select.projection, from)).collect();
    let is_dependent = |(at, table): &(usize, &Table)| {
        !table.key.is_empty() && table.key.iter().all(|k| grouped.contains(&(*at, *k)))
    };
    let dependent: Vec<usize> =
        from.tables.iter().enumerate().filter(is_dependent).map(|(at, _)| at).collect();
    if dependent.is_empty() {
        return;
    }
    let mut named = Named { from, places: Vec::new(), within: 0 };
    named.wildcards(&select.projection);
    let _ = walk::visit(&select.projection, &mut named);
    let _ = walk::visit(&select.having, &mut named);
    let _ = walk::visit(&select.distinct, &mut named);
    let _ = walk::visit(&select.named_window, &mut named);
    let _ = walk::visit(&select.qualify, &mut named);
    if let Some(order_by) = order_by {
        let _ = walk::visit(order_by, &mut named);
    }
    let mut places = named.places;
    places.retain(|place| dependent.contains(&place.0) && !grouped.contains(place));
    places.sort_unstable();
    places.dedup();
    let added = places.iter().filter_map(|place| column(from, *place));
    if let GroupByExpr::Expressions(exprs, _) = &mut select.group_by {
        exprs.extend(added);
    }
}

/// A table's place in FROM and a column's in it.
type Place = (usize, usize);

fn column(from: &Joined, (table, column): Place) -> Option<Expr> {
    let table = from.tables.get(table)?;
    let name = Ident::with_quote('"', table.columns.get(column)?);
    Some(Expr::CompoundIdentifier(vec![table.name.clone()?, name]))
}

/// The column that an expression of GROUP BY is: by its name, as that of an input or else of an output
/// column, or by the position of an output column.
fn grouped_column(e: &Expr, items: &[SelectItem], from: &Joined) -> Option<Place> {
    let item = |e: &Expr| input_column(unnested(e), from);
    match unnested(e) {
        Expr::Value(v) => {
            let Value::Number(text, _) = &v.value else { return None };
            let at = text.parse::<usize>().ok()?.checked_sub(1)?;
            item(&output(items, at, from)?)
        }
        Expr::Identifier(name) if !from.columns.iter().any(|c| c.name == fold(name)) => {
            items.iter().find_map(|i| match i {
                SelectItem::ExprWithAlias { expr, alias } if fold(alias) == fold(name) => {
                    item(expr)
                }
                _ => None,
            })
        }
        other => item(other),
    }
}

/// What stands at a position of the output.
fn output(items: &[SelectItem], at: usize, from: &Joined) -> Option<Expr> {
    let mut before = 0;
    for item in items {
        let columns = match item {
            SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } => {
                vec![e.clone()]
            }
            SelectItem::Wildcard(options) if is_plain(options) => from.all_columns()?,
            SelectItem::QualifiedWildcard(
                SelectItemQualifiedWildcardKind::ObjectName(name),
                options,
            ) if is_plain(options) => from.columns_of(name)?,
            _ => return None,
        };
        if at < before + columns.len() {
            return columns.into_iter().nth(at - before);
        }
        before += columns.len();
    }
    None
}

/// The column of a table that a name means.
fn input_column(e: &Expr, from: &Joined) -> Option<Place> {
    match e {
        Expr::Identifier(name) => {
            let name = fold(name);
            let mut found = from.columns.iter().filter(|c| c.name == name);
            let (column, None) = (found.next()?, found.next()) else { return None };
            let at = column.table?;
            let place = from.tables.get(at)?.columns.iter().position(|c| *c == name)?;
            Some((at, place))
        }
        Expr::CompoundIdentifier(parts) => {
            let [.., table, name] = parts.as_slice() else { return None };
            let (table, name) = (fold(table), fold(name));
            let called = |t: &Table| t.name.as_ref().is_some_and(|n| fold(n) == table);
            let at = from.tables.iter().position(called)?;
            let place = from.tables.get(at)?.columns.iter().position(|c| *c == name)?;
            Some((at, place))
        }
        _ => None,
    }
}

/// The columns that clauses name, also in subqueries. One that a subquery has itself may be among them: to be grouped
/// by what depends on the groups changes nothing.
struct Named<'a> {
    from: &'a Joined,
    places: Vec<Place>,
    /// Aggregates that the visitor is in: their arguments are not of groups.
    within: usize,
}

impl Named<'_> {
    fn wildcards(&mut self, items: &[SelectItem]) {
        for item in items {
            let table = match item {
                SelectItem::Wildcard(_) => None,
                SelectItem::QualifiedWildcard(
                    SelectItemQualifiedWildcardKind::ObjectName(name),
                    _,
                ) => Some(name.0.last().and_then(|p| p.as_ident()).map(fold)),
                _ => continue,
            };
            for (at, t) in self.from.tables.iter().enumerate() {
                if table.as_ref().is_none_or(|name| *name == t.name.as_ref().map(fold)) {
                    self.places.extend((0..t.columns.len()).map(|column| (at, column)));
                }
            }
        }
    }
}

impl Visitor for Named<'_> {
    type Break = ();

    fn pre_visit_expr(&mut self, e: &Expr) -> ControlFlow<()> {
        if matches!(e, Expr::Function(f) if is_aggregate(f)) {
            self.within += 1;
        }
        if self.within == 0 {
            self.places.extend(input_column(e, self.from));
        }
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, e: &Expr) -> ControlFlow<()> {
        if matches!(e, Expr::Function(f) if is_aggregate(f)) {
            self.within -= 1;
        }
        ControlFlow::Continue(())
    }
}
