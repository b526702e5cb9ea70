//! Output column names, by PostgreSQL's rules (FigureColname).
//!
//! DataFusion wants the names of one projection unique; PostgreSQL does not. A repeated name gets
//! an invisible suffix here, which [`shown`] takes off again.

use std::collections::HashMap;
use std::ops::ControlFlow;

use millrace_functions::types::type_column_name;
use sqlparser::ast::{
    AccessExpr, BinaryOperator, Expr, Ident, ObjectName, Query, SelectItem, SetExpr, UnaryOperator,
    Value,
};

use crate::bind::expressions::types::sql_type;
use crate::bind::rewrites::ast::AstRewrite;
use crate::parser::walk;

/// Starts the suffix of a repeated name; no identifier of a user contains it.
const MARK: char = '\u{1f}';

/// A name as the user sees it.
pub fn shown(name: &str) -> &str {
    name.split(MARK).next().unwrap_or(name)
}

/// A name of its own for an output column, shown as the one it has.
pub fn hidden_name(name: &str) -> Ident {
    Ident::with_quote('"', format!("{name}{MARK}own"))
}

/// A name for one of several output columns that are shown by the same.
pub fn repeated_name(name: &str, count: usize) -> Ident {
    Ident::with_quote('"', format!("{name}{MARK}{count}"))
}

/// A name that no other column of a statement has, shown as the one it has.
pub fn own_name(name: &str, count: usize) -> String {
    format!("{}{MARK}#{count}", shown(name))
}

/// Another name for a table, shown as the one it has.
pub fn table_alias(name: &str) -> Ident {
    Ident::with_quote('"', format!("{name}{MARK}"))
}

/// A message without what is not shown of names.
pub fn without_marks(message: &str) -> String {
    let mut parts = message.split(MARK);
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let part = part.strip_prefix("own").unwrap_or(part);
        let part = part.strip_prefix('#').unwrap_or(part);
        shown.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit()));
    }
    shown
}

/// Whether a SELECT list makes rows of arrays.
pub fn makes_rows(items: &[SelectItem]) -> bool {
    let of_rows = |e: &Expr| match e {
        Expr::Function(f) => {
            let name = last_part(&f.name);
            matches!(name.as_str(), "unnest" | "generate_series" | "generate_subscripts")
        }
        _ => false,
    };
    let found = |item: &SelectItem| {
        walk::expressions(item, |e| match of_rows(e) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        })
        .is_break()
    };
    items.iter().any(found)
}

/// Names the output columns of a SELECT as PostgreSQL does.
pub const NAME_COLUMNS: AstRewrite = AstRewrite {
    name: "name columns",
    select: |select, _| {
        name_items(&mut select.projection);
        Ok(())
    },
    ..AstRewrite::NONE
};

/// Gives every expression of a SELECT list the alias that PostgreSQL would, unique in the list.
fn name_items(items: &mut [SelectItem]) {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let rows = makes_rows(items);
    for item in items {
        let (name, plain) = match &*item {
            // Beside rows that are made of the same column its name would stand for both.
            SelectItem::UnnamedExpr(e @ Expr::CompoundFieldAccess { .. }) if rows => {
                (hidden_name(&column_name(e)).value, false)
            }
            SelectItem::UnnamedExpr(e) => (column_name(e), is_column(e)),
            SelectItem::ExprWithAlias { alias, .. } => (fold(alias), true),
            _ => continue,
        };
        let count = seen.entry(name.clone()).or_insert(0);
        *count += 1;
        if *count == 1 && plain {
            continue;
        }
        let unique = match *count {
            1 => name,
            n => format!("{name}{MARK}{n}"),
        };
        let alias = Ident::with_quote('"', unique);
        match item {
            SelectItem::UnnamedExpr(e) => {
                let expr = std::mem::replace(e, Expr::value(Value::Null));
                *item = SelectItem::ExprWithAlias { expr, alias };
            }
            SelectItem::ExprWithAlias { alias: a, .. } => *a = alias,
            _ => {}
        }
    }
}

pub fn is_column(e: &Expr) -> bool {
    matches!(e, Expr::Identifier(_) | Expr::CompoundIdentifier(_))
}

/// An identifier as PostgreSQL folds it.
pub fn fold(ident: &Ident) -> String {
    match ident.quote_style {
        Some(_) => ident.value.clone(),
        None => ident.value.to_ascii_lowercase(),
    }
}

fn last_part(name: &ObjectName) -> String {
    name.0.last().and_then(|p| p.as_ident()).map(fold).unwrap_or_default()
}

/// The name of an expression without an alias.
pub fn column_name(e: &Expr) -> String {
    figure(e).map_or_else(|| "?column?".to_owned(), |(name, _)| name)
}

/// A name and whether it is a strong one (a cast's type name and CASE are weak).
fn figure(e: &Expr) -> Option<(String, bool)> {
    let strong = |s: &str| Some((s.to_owned(), true));
    let weak = |s: &str| Some((s.to_owned(), false));
    match e {
        Expr::Identifier(i) => Some((fold(i), true)),
        Expr::CompoundIdentifier(parts) => parts.last().map(|i| (fold(i), true)),
        Expr::Nested(inner) | Expr::Collate { expr: inner, .. } => figure(inner),
        Expr::Function(f) => Some((last_part(&f.name), true)),
        Expr::Cast { expr, data_type, .. } => match figure(expr) {
            Some((name, true)) => Some((name, true)),
            _ => weak(sql_type(data_type).map_or("text", type_column_name)),
        },
        Expr::TypedString(t) => weak(sql_type(&t.data_type).map_or("text", type_column_name)),
        Expr::Interval(_) => weak("interval"),
        Expr::Case { else_result, .. } => match else_result.as_deref().and_then(figure) {
            Some((name, true)) => Some((name, true)),
            _ => weak("case"),
        },
        Expr::UnaryOp { op: UnaryOperator::Plus, .. } => None,
        Expr::BinaryOp { op: BinaryOperator::Overlaps, .. } => strong("overlaps"),
        Expr::Exists { .. } => strong("exists"),
        Expr::Subquery(q) => subquery_name(q).map(|n| (n, true)),
        Expr::Extract { .. } => strong("extract"),
        Expr::Substring { shorthand, .. } => {
            strong(if *shorthand { "substr" } else { "substring" })
        }
        Expr::Position { .. } => strong("position"),
        Expr::Overlay { .. } => strong("overlay"),
        Expr::Ceil { .. } => strong("ceil"),
        Expr::Floor { .. } => strong("floor"),
        Expr::Trim { trim_where, .. } => strong(match trim_where {
            Some(sqlparser::ast::TrimWhereField::Leading) => "ltrim",
            Some(sqlparser::ast::TrimWhereField::Trailing) => "rtrim",
            _ => "btrim",
        }),
        Expr::AtTimeZone { .. } => strong("timezone"),
        Expr::Array(_) => strong("array"),
        Expr::CompoundFieldAccess { root, access_chain } => {
            let field = access_chain.iter().rev().find_map(|access| match access {
                AccessExpr::Dot(Expr::Identifier(field)) => Some(fold(field)),
                _ => None,
            });
            field.map_or_else(|| figure(root), |field| Some((field, true)))
        }
        Expr::Tuple(_) => strong("row"),
        _ => None,
    }
}

fn subquery_name(q: &Query) -> Option<String> {
    match q.body.as_ref() {
        SetExpr::Select(s) => match s.projection.first()? {
            SelectItem::UnnamedExpr(e) => Some(column_name(e)),
            SelectItem::ExprWithAlias { alias, .. } => Some(shown(&fold(alias)).to_owned()),
            _ => None,
        },
        SetExpr::Query(q) => subquery_name(q),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::NAME_COLUMNS;
    use crate::bind::rewrites::testing::assert_rewritten;

    #[test]
    fn columns_have_names_of_their_own_that_are_shown_alike() {
        let sql = "SELECT a + 1, count(*), count(b), x FROM t";
        let expected = "SELECT a + 1 AS \"?column?\", count(*) AS \"count\", \
                        count(b) AS \"count\u{1f}2\", x FROM t";
        assert_rewritten(NAME_COLUMNS, &[(sql, expected)]);
    }
}
