//! What drivers ask of arrays of column numbers, and other shapes of query that only they write.

use millrace_planner::bind::names::{column_name, hidden_name, is_column};
use sqlparser::ast::*;

use super::rewrite::{call, function_name, take};
use super::subquery::{is_catalog_array, is_vector};
use crate::query::catalog_view::fold;

fn number(n: u8) -> Expr {
    Expr::value(Value::Number(n.to_string(), false))
}

fn arguments(f: &mut Function) -> Vec<&mut Expr> {
    let FunctionArguments::List(list) = &mut f.args else { return Vec::new() };
    list.args
        .iter_mut()
        .filter_map(|a| match a {
            FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) => Some(e),
            _ => None,
        })
        .collect()
}

/// `generate_subscripts(conkey, 1)` and `_pg_expandarray(indkey)` in a SELECT list: rows of an array. The second has
/// two columns, of which this is the first; see [`field`].
pub(super) fn rows_of_array(f: &mut Function) -> Option<Expr> {
    let name = function_name(f);
    match (name.as_str(), arguments(f).as_mut_slice()) {
        (SUBSCRIPTS, [array, _]) if is_catalog_array(array) => {
            // Vectors count from 0, arrays from 1.
            let first = number(u8::from(!is_vector(array)));
            Some(call("unnest", [call("#subscripts", [take(array), first])]))
        }
        ("_pg_expandarray", [array]) => Some(call("unnest", [take(array)])),
        _ => None,
    }
}

/// `FROM generate_subscripts(i.indkey, 1) AS k`: as in a SELECT list, vectors count from 0.
pub(super) fn subscripts_of_vector(table: &mut TableFactor) {
    let (name, args, alias, with_ordinality) = match table {
        TableFactor::Table { name, args: Some(args), alias, with_ordinality, .. } => {
            (name, &mut args.args, alias, *with_ordinality)
        }
        TableFactor::Function { name, args, alias, with_ordinality, .. } => {
            (name, args, alias, *with_ordinality)
        }
        _ => return,
    };
    if name.0.last().and_then(|p| p.as_ident()).map(fold).as_deref() != Some(SUBSCRIPTS) {
        return;
    }
    if let [FunctionArg::Unnamed(FunctionArgExpr::Expr(vector)), _] = args.as_mut_slice()
        && is_vector(vector)
    {
        let named = || TableAlias {
            explicit: true,
            name: Ident::new(SUBSCRIPTS),
            columns: Vec::new(),
            at: None,
        };
        *table = TableFactor::UNNEST {
            alias: Some(alias.take().unwrap_or_else(named)),
            array_exprs: vec![call("#subscripts", [take(vector), number(0)])],
            with_offset: false,
            with_offset_alias: None,
            with_ordinality,
        };
    }
}

const SUBSCRIPTS: &str = "generate_subscripts";

/// `array_lower`, `array_upper` and `array_position` of a vector, which counts from 0.
pub(super) fn places_in_vector(f: &mut Function) -> Option<Expr> {
    let name = function_name(f);
    match (name.as_str(), arguments(f).as_mut_slice()) {
        ("array_lower" | "array_upper" | "array_position", [vector, ..]) if is_vector(vector) => {
            **vector = call("#numbers", [take(vector)]);
            let place = Box::new(Expr::Function(f.clone()));
            let (op, right) = (BinaryOperator::Minus, Box::new(number(1)));
            Some(Expr::Nested(Box::new(Expr::BinaryOp { left: place, op, right })))
        }
        _ => None,
    }
}

/// `(_pg_expandarray(indkey)).n`, its place in the array, and `.x`, the element; also by the name that the JDBC driver
/// gives the two together.
pub(super) fn field(root: &mut Expr, access: &[AccessExpr]) -> Option<Expr> {
    let [AccessExpr::Dot(Expr::Identifier(field))] = access else { return None };
    let field = fold(field);
    let mut root = root;
    while let Expr::Nested(inner) = root {
        root = inner;
    }
    match root {
        Expr::Function(f) if function_name(f) == "unnest" => {
            let array = match (field.as_str(), arguments(f).as_mut_slice()) {
                ("x", [array]) => take(array),
                ("n", [array]) => call("#subscripts", [take(array), number(1)]),
                _ => return None,
            };
            Some(call("unnest", [array]))
        }
        Expr::CompoundIdentifier(parts)
            if field == "x" && parts.last().map(fold).as_deref() == Some("keys") =>
        {
            Some(take(root))
        }
        _ => None,
    }
}

/// `FROM pg_get_keywords()`: a table, as far as we are concerned.
pub(super) fn keywords(table: &mut TableFactor) {
    if let TableFactor::Table { name, args, .. } = table
        && args.as_ref().is_some_and(|a| a.args.is_empty())
        && name.0.last().and_then(|p| p.as_ident()).map(fold).as_deref() == Some("pg_get_keywords")
    {
        *args = None;
    }
}

/// `SELECT c.oid, c.*`: the columns beside a wildcard, which may bring them too, get names of their own, shown as those
/// they have. Only of a whole query: inside it others go by the names.
pub(super) fn beside_wildcard(query: &mut Query) {
    let SetExpr::Select(select) = query.body.as_mut() else { return };
    let wildcard = |item: &SelectItem| {
        matches!(item, SelectItem::Wildcard(_) | SelectItem::QualifiedWildcard(..))
    };
    if select.distinct.is_some() || !select.projection.iter().any(wildcard) {
        return;
    }
    for item in &mut select.projection {
        if let SelectItem::UnnamedExpr(e) = item
            && is_column(e)
        {
            let alias = hidden_name(&column_name(e));
            *item = SelectItem::ExprWithAlias { expr: take(e), alias };
        }
    }
}
