//! What the columns that all FROM items have, by the catalog, let be written out of a SELECT: columns that USING merges
//! where a join stands in parentheses, and `*` where it repeats names.
//!
//! [`super::using`] does without the catalog, for joins in a row. A join in parentheses has merged columns of its own,
//! which a join around it may merge once more; and of columns of one name in `*`, DataFusion tells the
//! tables apart only as long as the query is not part of another.

use std::collections::HashSet;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;

use super::output_names::{column_name, fold};
use super::scopes::{self, Column, Joined, is_plain};
use crate::bind::expressions::clause_expressions::change_own;
use crate::bind::ordering::order::{hidden_inputs, same};
use crate::parser::joins::qualified_join;

/// Whether all of a FROM clause is known, so that each of its columns can be told by its table.
pub fn is_known(select: &Select, from: &Joined) -> bool {
    let mut names = HashSet::new();
    from.complete()
        && select.from.iter().all(is_standard)
        && from.tables.iter().all(|t| t.name.as_ref().is_some_and(|name| names.insert(fold(name))))
}

/// Whether a join has the columns of both sides.
fn is_standard(from: &TableWithJoins) -> bool {
    let nested = |factor: &TableFactor| match factor {
        TableFactor::NestedJoin { table_with_joins, .. } => is_standard(table_with_joins),
        _ => true,
    };
    let standard = |operator: &JoinOperator| {
        matches!(operator, qualified_join!(_) | JoinOperator::CrossJoin(_))
    };
    nested(&from.relation)
        && from.joins.iter().all(|j| nested(&j.relation) && standard(&j.join_operator))
}

/// Whether a join that merges columns has a join in parentheses.
pub fn nests(select: &Select) -> bool {
    let is_nested = |factor: &TableFactor| matches!(factor, TableFactor::NestedJoin { .. });
    select.from.iter().any(|from| {
        scopes::merges(from)
            && (is_nested(&from.relation) || from.joins.iter().any(|j| is_nested(&j.relation)))
    })
}

/// Refuses a join in parentheses on the right, beside or with columns that are merged: its columns are not known, and
/// DataFusion would take others for the merged ones.
pub fn refuse_nested(select: &Select) -> Result<(), SqlError> {
    let is_nested = |join: &Join| matches!(join.relation, TableFactor::NestedJoin { .. });
    if !select.from.iter().any(|f| scopes::merges(f) && f.joins.iter().any(is_nested)) {
        return Ok(());
    }
    let message = "USING and NATURAL with a join in parentheses of which not all columns are known";
    Err(SqlError::unsupported(message).with_hint("Write the join's condition with ON."))
}

/// A FROM item that is a join with an alias becomes a subquery, which has its columns under their names.
pub fn name_joins(from: &mut TableWithJoins) -> Result<(), SqlError> {
    name_join(&mut from.relation)?;
    from.joins.iter_mut().try_for_each(|join| name_join(&mut join.relation))
}

fn name_join(factor: &mut TableFactor) -> Result<(), SqlError> {
    let TableFactor::NestedJoin { table_with_joins, alias } = factor else { return Ok(()) };
    name_joins(table_with_joins)?;
    // What is lateral may name items before the join.
    if alias.is_none() || is_lateral(table_with_joins) {
        return Ok(());
    }
    let mut subquery = crate::parser::parse_query("SELECT * FROM (SELECT 1) AS joined")?;
    if let SetExpr::Select(select) = subquery.body.as_mut() {
        select.from = vec![table_with_joins.as_ref().clone()];
    }
    let alias = alias.take();
    *factor = TableFactor::Derived { lateral: false, subquery, alias, sample: None };
    Ok(())
}

fn is_lateral(from: &TableWithJoins) -> bool {
    let lateral = |factor: &TableFactor| match factor {
        TableFactor::NestedJoin { table_with_joins, .. } => is_lateral(table_with_joins),
        TableFactor::Derived { lateral, .. } => *lateral,
        TableFactor::Table { args, .. } => args.is_some(),
        _ => true,
    };
    lateral(&from.relation) || from.joins.iter().any(|join| lateral(&join.relation))
}

/// Whether a FROM item has a join with an alias.
pub fn has_named_join(from: &TableWithJoins) -> bool {
    let named = |factor: &TableFactor| match factor {
        TableFactor::NestedJoin { table_with_joins, alias } => {
            alias.is_some() || has_named_join(table_with_joins)
        }
        _ => false,
    };
    named(&from.relation) || from.joins.iter().any(|join| named(&join.relation))
}

/// Whether `*` may repeat names.
pub fn may_repeat(select: &Select) -> bool {
    let wild = |item: &SelectItem| {
        matches!(item, SelectItem::Wildcard(_) | SelectItem::QualifiedWildcard(..))
    };
    let several = select.projection.len() > 1
        || select.from.len() > 1
        || select.from.iter().any(|from| !from.joins.is_empty());
    several && select.projection.iter().any(wild)
}

/// Whether ORDER BY means columns of the input by names that output columns beside `*` have. Those are given
/// other names, for which the list must be known.
pub fn hides_inputs(select: &Select, order_by: Option<&OrderBy>) -> bool {
    match order_by.map(|order_by| &order_by.kind) {
        Some(OrderByKind::Expressions(order)) => {
            may_repeat(select) && !hidden_inputs(select, order).is_empty()
        }
        _ => false,
    }
}

/// Whether `*` repeats names. Of columns that are not known, it is taken not to.
pub fn repeats(select: &Select, from: &Joined) -> bool {
    let mut names = HashSet::new();
    let mut repeated = false;
    for item in &select.projection {
        match item {
            SelectItem::UnnamedExpr(e) => repeated |= !names.insert(column_name(e)),
            SelectItem::ExprWithAlias { alias, .. } => repeated |= !names.insert(fold(alias)),
            SelectItem::Wildcard(options) if is_plain(options) => {
                for column in &from.columns {
                    repeated |= !names.insert(column.name.clone());
                }
            }
            SelectItem::QualifiedWildcard(
                SelectItemQualifiedWildcardKind::ObjectName(name),
                options,
            ) if is_plain(options) => {
                let Some(columns) = from.columns_of(name) else { return false };
                for column in &columns {
                    repeated |= !names.insert(column_name(column));
                }
            }
            _ => return false,
        }
    }
    repeated && may_repeat(select)
}

/// Writes out the merged columns and `*` of a SELECT, and of its ORDER BY.
pub fn write_out(
    select: &mut Select,
    order_by: Option<&mut OrderBy>,
    from: &Joined,
) -> Result<(), SqlError> {
    let mut projection = Vec::with_capacity(select.projection.len());
    for item in std::mem::take(&mut select.projection) {
        write_item(item, from, &mut projection);
    }
    select.projection = projection;
    replace(&mut select.selection, from);
    replace(&mut select.group_by, from);
    replace(&mut select.having, from);
    replace(&mut select.qualify, from);
    replace(&mut select.distinct, from);
    replace(&mut select.named_window, from);
    let Some(OrderBy { kind: OrderByKind::Expressions(exprs), .. }) = order_by else {
        return Ok(());
    };
    for by in exprs {
        match &by.expr {
            // The name of an output column stands for that.
            Expr::Identifier(name) if is_output(&select.projection, &fold(name))? => {}
            _ => replace(&mut by.expr, from),
        }
    }
    Ok(())
}

/// Whether ORDER BY means an output column by a name; 42702 if it may mean one or another.
pub fn is_output(items: &[SelectItem], name: &str) -> Result<bool, SqlError> {
    let mut found: Option<&Expr> = None;
    for item in items {
        let expr = match item {
            SelectItem::UnnamedExpr(e) if column_name(e) == name => e,
            SelectItem::ExprWithAlias { expr, alias } if fold(alias) == name => expr,
            _ => continue,
        };
        if found.is_some_and(|before| !same(before, expr, false)) {
            let message = format!("ORDER BY \"{name}\" is ambiguous");
            return Err(SqlError::new(SqlState::AMBIGUOUS_COLUMN, message));
        }
        found = Some(expr);
    }
    Ok(found.is_some())
}

/// An item of the SELECT list, which keeps its name.
fn write_item(item: SelectItem, from: &Joined, items: &mut Vec<SelectItem>) {
    match item {
        SelectItem::Wildcard(options) if is_plain(&options) => items.extend(all_items(from)),
        SelectItem::QualifiedWildcard(
            SelectItemQualifiedWildcardKind::ObjectName(name),
            options,
        ) if is_plain(&options) => match from.columns_of(&name) {
            Some(columns) if is_told(&columns) => {
                items.extend(columns.into_iter().map(SelectItem::UnnamedExpr));
            }
            _ => {
                let kind = SelectItemQualifiedWildcardKind::ObjectName(name);
                items.push(SelectItem::QualifiedWildcard(kind, options));
            }
        },
        SelectItem::UnnamedExpr(mut expr) => {
            let name = column_name(&expr);
            replace(&mut expr, from);
            items.push(match column_name(&expr) == name {
                true => SelectItem::UnnamedExpr(expr),
                false => SelectItem::ExprWithAlias { expr, alias: Ident::with_quote('"', name) },
            });
        }
        SelectItem::ExprWithAlias { mut expr, alias } => {
            replace(&mut expr, from);
            items.push(SelectItem::ExprWithAlias { expr, alias });
        }
        other => items.push(other),
    }
}

/// Whether the columns of a table have names of their own.
fn is_told(columns: &[Expr]) -> bool {
    let mut names = HashSet::new();
    columns.iter().all(|c| names.insert(column_name(c)))
}

/// What `*` stands for. A table two columns of which have one name keeps its own `*`, without what is merged.
fn all_items(from: &Joined) -> Vec<SelectItem> {
    let mut items = Vec::with_capacity(from.columns.len());
    let mut whole = HashSet::new();
    for column in &from.columns {
        let name = || Ident::with_quote('"', &column.name);
        if column.merged {
            let expr = column.value.clone().unwrap_or_else(|| Expr::Identifier(name()));
            items.push(SelectItem::ExprWithAlias { expr, alias: name() });
            continue;
        }
        let Some((at, table)) = column.table.and_then(|at| Some((at, from.tables.get(at)?))) else {
            continue;
        };
        let Some(qualifier) = table.name.clone() else { continue };
        let names: HashSet<&String> = table.columns.iter().collect();
        if names.len() == table.columns.len() {
            let parts = vec![qualifier, name()];
            items.push(SelectItem::UnnamedExpr(Expr::CompoundIdentifier(parts)));
        } else if whole.insert(at) {
            items.push(whole_table(qualifier, at, from, &table.columns));
        }
    }
    items
}

fn whole_table(table: Ident, at: usize, from: &Joined, columns: &[String]) -> SelectItem {
    let is_left = |name: &&String| {
        from.columns.iter().any(|c| c.table == Some(at) && !c.merged && c.name == **name)
    };
    let mut without =
        columns.iter().filter(|name| !is_left(name)).map(|name| Ident::with_quote('"', name));
    let except = without.next().map(|first_element| ExceptSelectItem {
        first_element,
        additional_elements: without.collect(),
    });
    let kind = SelectItemQualifiedWildcardKind::ObjectName(ObjectName::from(vec![table]));
    let options = WildcardAdditionalOptions { opt_except: except, ..Default::default() };
    SelectItem::QualifiedWildcard(kind, options)
}

/// Writes the merged columns out where a clause names them. Subqueries may have columns of the same name, and are left
/// alone; a name that another item has too stays, and is ambiguous.
pub fn replace(clause: &mut impl VisitMut, from: &Joined) {
    if !from.columns.iter().any(|c| c.merged) {
        return;
    }
    change_own(clause, |e| {
        if let Expr::Identifier(name) = &*e
            && let Some(value) = only(from, &fold(name)).and_then(|c| c.value.as_ref())
        {
            *e = Expr::Nested(Box::new(value.clone()));
        }
    });
}

/// The one column of a name.
pub fn only<'a>(from: &'a Joined, name: &str) -> Option<&'a Column> {
    let mut found = from.columns.iter().filter(|c| c.name == name);
    match (found.next(), found.next()) {
        (Some(column), None) => Some(column),
        _ => None,
    }
}
