//! `ARRAY(SELECT …)`: the aggregate `array_agg` of the subquery's one column, in its order; an empty array of no rows.

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use millrace_functions::functions;
use sqlparser::ast::*;

use super::predicates::fill;
use crate::bind::expressions::desugar::{Copies, call, string};
use crate::bind::names::fold;
use crate::bind::rewrites::ast::AstRewrite;
use crate::parser::walk;

/// The name of the aggregate of such a subquery, which is of no other query even if all that it reads is.
pub const GATHERED: &str = "#gathered";

/// Makes aggregates of `ARRAY(SELECT …)`.
pub const SPELL_OUT_ARRAY_QUERIES: AstRewrite = AstRewrite {
    name: "spell out array queries",
    expr: |expr, cx| spell_out(expr, &mut cx.copies),
    ..AstRewrite::NONE
};

/// Spells out a call that is one.
fn spell_out(expr: &mut Expr, copies: &mut Copies) -> Result<(), SqlError> {
    let Expr::Function(Function { name, args: FunctionArguments::Subquery(query), .. }) = expr
    else {
        return Ok(());
    };
    if name.to_string().eq_ignore_ascii_case("array") {
        let mut query = query.as_ref().clone();
        if gather(&mut query)? {
            let none = string("{}");
            *expr = call("coalesce", [Expr::Subquery(Box::new(query)), none]);
            return Ok(());
        }
        let order = named_order(&mut query)?.join(", ");
        let order = if order.is_empty() { order } else { format!(" ORDER BY {order}") };
        let columns = if order.is_empty() { r##" ("#v")"## } else { "" };
        let template = format!(
            r##"SELECT coalesce((SELECT array_agg("#v"{order}) FROM (SELECT 1) AS "#s"{columns}), '{{}}')"##
        );
        *expr = fill(&template, &query, None, copies)?;
    }
    Ok(())
}

/// Makes a plain SELECT one of the aggregate, where that takes no query around it: such a subquery can be
/// correlated in a view. `false`: it is left as it was.
fn gather(query: &mut Query) -> Result<bool, SqlError> {
    let limited = query.limit_clause.is_some() || query.fetch.is_some() || query.with.is_some();
    let SetExpr::Select(select) = query.body.as_mut() else { return Ok(false) };
    let grouped = !matches!(&select.group_by, GroupByExpr::Expressions(e, _) if e.is_empty());
    if limited || grouped || select.distinct.is_some() || select.having.is_some() {
        return Ok(false);
    }
    let (value, own_name) = match select.projection.as_slice() {
        [SelectItem::UnnamedExpr(e)] => (e.clone(), None),
        [SelectItem::ExprWithAlias { expr, alias }] => (expr.clone(), Some(fold(alias))),
        _ => return Ok(false),
    };
    if walk::expressions(&value, more_than_a_row).is_break() {
        return Ok(false);
    }
    let mut aggregate = call("array_agg", [value.clone()]);
    if let Some(OrderBy { kind: OrderByKind::Expressions(order), .. }) = query.order_by.take()
        && let Expr::Function(Function { args: FunctionArguments::List(list), .. }) = &mut aggregate
    {
        let order = order.into_iter().map(|mut o| {
            if is_value(&o.expr, &value, own_name.as_deref()) {
                o.expr = value.clone();
            }
            o
        });
        list.clauses.push(FunctionArgumentClause::OrderBy(order.collect()));
    }
    let alias = Ident::with_quote('"', GATHERED);
    select.projection = vec![SelectItem::ExprWithAlias { expr: aggregate, alias }];
    Ok(true)
}

/// Breaks at what is not computed from one row for one row: aggregates, window functions, functions that return rows.
fn more_than_a_row(e: &Expr) -> ControlFlow<()> {
    let Expr::Function(f) = e else { return ControlFlow::Continue(()) };
    let name = f.name.0.last().and_then(|p| p.as_ident()).map(fold).unwrap_or_default();
    let rows = ["unnest", "generate_series", "generate_subscripts"].contains(&name.as_str())
        || ["jsonb_", "json_", "regexp_split", "string_to_table"]
            .iter()
            .any(|p| name.starts_with(p));
    match f.over.is_some() || rows || functions().aggregate(&name).is_some() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    }
}

/// Whether an expression of ORDER BY is the output column.
fn is_value(e: &Expr, value: &Expr, own_name: Option<&str>) -> bool {
    match e {
        Expr::Value(v) => matches!(&v.value, Value::Number(n, _) if n == "1"),
        Expr::Identifier(name) if own_name.is_some_and(|own| own == fold(name)) => true,
        e => e == value,
    }
}

fn too_many_columns() -> SqlError {
    SqlError::new(SqlState::SYNTAX_ERROR, "subquery must return only one column")
}

/// Gives the column of an ordered SELECT the name `#v`, and what it is ordered by columns of its own; the
/// order by these. Of another query there is no order.
fn named_order(query: &mut Query) -> Result<Vec<String>, SqlError> {
    let SetExpr::Select(select) = query.body.as_mut() else { return Ok(Vec::new()) };
    if select.projection.len() > 1 {
        return Err(too_many_columns());
    }
    let Some(OrderBy { kind: OrderByKind::Expressions(order), .. }) = &query.order_by else {
        return Ok(Vec::new());
    };
    let (value, own_name) = match select.projection.pop() {
        Some(SelectItem::UnnamedExpr(e)) => (e, None),
        Some(SelectItem::ExprWithAlias { expr, alias }) => (expr, Some(fold(&alias))),
        Some(other) => {
            select.projection.push(other);
            return Err(SqlError::unsupported("* in an ordered ARRAY subquery"));
        }
        None => return Err(too_many_columns()),
    };
    let quoted = |name: String| Ident::with_quote('"', name);
    let item = |expr, name: String| SelectItem::ExprWithAlias { expr, alias: quoted(name) };
    let mut by = Vec::new();
    let mut more = Vec::new();
    for (i, o) in order.iter().enumerate() {
        let is_value = is_value(&o.expr, &value, own_name.as_deref());
        let name = if is_value { "#v".to_owned() } else { format!("#o{i}") };
        if !is_value {
            more.push(item(o.expr.clone(), name.clone()));
        }
        let direction = match o.options.asc {
            Some(false) => " DESC",
            _ => "",
        };
        let nulls = match o.options.nulls_first {
            Some(true) => " NULLS FIRST",
            Some(false) => " NULLS LAST",
            None => "",
        };
        by.push(format!("\"{name}\"{direction}{nulls}"));
    }
    if select.distinct.is_some() && !more.is_empty() {
        return Err(SqlError::new(
            SqlState("42P10"),
            "for SELECT DISTINCT, ORDER BY expressions must appear in select list",
        ));
    }
    select.projection = std::iter::once(item(value, "#v".into())).chain(more).collect();
    if query.limit_clause.is_none() && query.fetch.is_none() {
        query.order_by = None;
    } else if let Some(OrderBy { kind: OrderByKind::Expressions(order), .. }) = &mut query.order_by
    {
        // Its names are the new ones.
        for (o, name) in order.iter_mut().zip(&by) {
            let name = name.split('"').nth(1).unwrap_or_default();
            o.expr = Expr::Identifier(quoted(name.to_owned()));
        }
    }
    Ok(by)
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    #[test]
    fn an_array_has_the_rows_of_its_subquery_in_their_order() {
        let sql = "SELECT ARRAY(SELECT a FROM (VALUES (2), (1)) AS v (a) ORDER BY a)";
        assert_eq!(rows(sql), ["{1,2}"]);
        let sql = "SELECT ARRAY(SELECT a FROM (VALUES (2), (1)) AS v (a) WHERE a > 2)";
        assert_eq!(rows(sql), ["{}"]);
    }
}
