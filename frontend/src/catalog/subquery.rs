//! Sub-selects over system tables.
//!
//! DataFusion decorrelates aggregates and EXISTS in WHERE; clients write plain correlated lookups in
//! SELECT lists. Three rules make them plans:
//!
//! 1. A SELECT from a table that never has rows returns nothing: what of it is hard becomes NULL, and
//!    sub-selects over it become NULL, false or an empty array.
//! 2. A lookup in a SELECT list becomes a LEFT JOIN. Lookups in catalogs find at most one row (they
//!    compare a key), so no row is repeated; PostgreSQL would fail if one found more.
//! 3. `ARRAY(SELECT x …)` becomes `(SELECT array_agg(x) …)`.

use std::collections::HashMap;
use std::ops::ControlFlow;

use sqlparser::ast::*;

use super::objects::system_table;
use super::rewrite::{Rewrite, boolean, call, function_name, null, take};
use super::{information, pg};
use crate::query::catalog_view::fold;
use millrace_planner::parser::walk;

const AGGREGATES: [&str; 12] = [
    "count",
    "sum",
    "min",
    "max",
    "avg",
    "array_agg",
    "string_agg",
    "bool_and",
    "bool_or",
    "every",
    "json_agg",
    "json_object_agg",
];

/// Columns of catalogs that are arrays.
const ARRAYS: [&str; 19] = [
    "indkey",
    "indoption",
    "indclass",
    "indcollation",
    "conkey",
    "confkey",
    "polroles",
    "prattrs",
    "stxkind",
    "stxkeys",
    "proargtypes",
    "reloptions",
    "datacl",
    "relacl",
    "nspacl",
    "attacl",
    "ftoptions",
    "rolconfig",
    "depends_on",
];

/// Those that Millrace always leaves NULL.
const NULL_ARRAYS: [&str; 12] = [
    "reloptions",
    "datacl",
    "relacl",
    "nspacl",
    "attacl",
    "polroles",
    "prattrs",
    "stxkeys",
    "spcoptions",
    "attoptions",
    "attfdwoptions",
    "rolconfig",
];

fn last_name(e: &Expr) -> Option<String> {
    match e {
        Expr::Identifier(i) => Some(fold(i)),
        Expr::CompoundIdentifier(parts) => parts.last().map(fold),
        Expr::Nested(e) | Expr::Cast { expr: e, .. } => last_name(e),
        _ => None,
    }
}

pub(super) fn is_catalog_array(e: &Expr) -> bool {
    last_name(e).is_some_and(|n| ARRAYS.contains(&n.as_str()))
}

pub(super) fn is_vector(e: &Expr) -> bool {
    last_name(e).is_some_and(|n| ARRAYS[..4].contains(&n.as_str()))
}

/// A select that [`select`] has found to return nothing.
pub(super) fn is_empty(query: &Query) -> bool {
    match query.body.as_ref() {
        SetExpr::Select(s) => s.selection == Some(boolean(false)) && !aggregates(s),
        SetExpr::Query(q) => is_empty(q),
        _ => false,
    }
}

fn any_expression<V: Visit>(node: &V, mut test: impl FnMut(&Expr) -> bool) -> bool {
    let flow = walk::expressions(node, |e| {
        if test(e) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    flow.is_break()
}

fn aggregates(s: &Select) -> bool {
    let grouped = !matches!(&s.group_by, GroupByExpr::Expressions(e, _) if e.is_empty());
    let aggregate = |e: &Expr| matches!(e, Expr::Function(f) if AGGREGATES.contains(&function_name(f).as_str()));
    grouped || s.having.is_some() || s.projection.iter().any(|item| any_expression(item, aggregate))
}

/// Schema and name of a plain table.
fn table_name(factor: &TableFactor) -> Option<(Option<String>, String)> {
    let TableFactor::Table { name, args: None, .. } = factor else { return None };
    let parts: Vec<String> = name.0.iter().filter_map(|p| p.as_ident()).map(fold).collect();
    match parts.as_slice() {
        [name] => Some((None, name.clone())),
        [schema, name] | [_, schema, name] => Some((Some(schema.clone()), name.clone())),
        _ => None,
    }
}

/// Columns of a system table.
fn system_columns(factor: &TableFactor, rewrite: &Rewrite) -> Option<Vec<&'static str>> {
    let (schema, name) = table_name(factor)?;
    if schema.is_none() && (rewrite.is_user)(&name) {
        return None;
    }
    let spec = system_table(schema.as_deref().unwrap_or("pg_catalog"), &name)?.4;
    Some(spec.split_whitespace().map(|c| c.split(':').next().unwrap_or(c)).collect())
}

fn never_has_rows(factor: &TableFactor, rewrite: &Rewrite) -> bool {
    let function = |name: &ObjectName, args: &[FunctionArg]| {
        let name = name.0.last().and_then(|p| p.as_ident()).map(fold).unwrap_or_default();
        let first = match args.first() {
            Some(FunctionArg::Unnamed(FunctionArgExpr::Expr(e))) => last_name(e),
            _ => None,
        };
        name == "unnest" && first.is_some_and(|n| NULL_ARRAYS.contains(&n.as_str()))
    };
    match factor {
        TableFactor::Table { name, args: Some(args), .. } => function(name, &args.args),
        TableFactor::Function { name, args, .. } => function(name, args),
        TableFactor::UNNEST { array_exprs, .. } => {
            array_exprs.iter().filter_map(last_name).any(|n| NULL_ARRAYS.contains(&n.as_str()))
        }
        TableFactor::NestedJoin { table_with_joins, .. } => empty_from(table_with_joins, rewrite),
        factor => match table_name(factor) {
            Some((Some(schema), name)) if schema == "pg_catalog" => pg::always_empty(&name),
            Some((Some(schema), name)) if schema == "information_schema" => {
                information::always_empty(&name)
            }
            Some((None, name)) => !(rewrite.is_user)(&name) && pg::always_empty(&name),
            _ => false,
        },
    }
}

/// Whether a FROM item returns nothing: its first table, or one that is joined to be there.
fn empty_from(from: &TableWithJoins, rewrite: &Rewrite) -> bool {
    let outer = |j: &Join| {
        matches!(
            j.join_operator,
            JoinOperator::Right(_) | JoinOperator::RightOuter(_) | JoinOperator::FullOuter(_)
        )
    };
    if from.joins.iter().any(outer) {
        return false;
    }
    let inner = |j: &Join| {
        matches!(
            j.join_operator,
            JoinOperator::Join(_) | JoinOperator::Inner(_) | JoinOperator::CrossJoin(_)
        )
    };
    never_has_rows(&from.relation, rewrite)
        || from.joins.iter().any(|j| inner(j) && never_has_rows(&j.relation, rewrite))
}

/// Applies the rules to one SELECT whose parts have been rewritten.
pub(super) fn select(select: &mut Select, rewrite: &mut Rewrite) {
    if select.from.iter().any(|f| empty_from(f, rewrite)) {
        return nothing(select);
    }
    if select.from.is_empty() {
        return;
    }
    let mut joins = Vec::new();
    for item in &mut select.projection {
        if let SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } = item {
            lookups(e, true, rewrite, &mut joins);
        }
    }
    if let Some(e) = &mut select.selection {
        lookups(e, false, rewrite, &mut joins);
    }
    if joins.is_empty() {
        return;
    }
    let mut from = one_from(std::mem::take(&mut select.from));
    if let Some(from) = from.first_mut() {
        from.joins.extend(joins);
    }
    select.from = from;
}

fn hard(e: &Expr) -> bool {
    matches!(
        e,
        Expr::Subquery(_)
            | Expr::Exists { .. }
            | Expr::InSubquery { .. }
            | Expr::AnyOp { .. }
            | Expr::AllOp { .. }
            | Expr::CompoundFieldAccess { .. }
            | Expr::Function(Function { args: FunctionArguments::Subquery(_), .. })
    )
}

/// A SELECT without rows.
fn nothing(select: &mut Select) {
    select.selection = Some(boolean(false));
    for item in &mut select.projection {
        if let SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } = item
            && any_expression(e, hard)
        {
            *e = null();
        }
    }
    // Functions over arrays of catalogs do not plan; their rows are not needed either.
    let plain = |f: &TableFactor| matches!(f, TableFactor::Table { args: None, .. });
    select.from.retain(|f| plain(&f.relation) || !f.joins.is_empty());
}

/// `a, b JOIN c` as one FROM item.
fn one_from(from: Vec<TableWithJoins>) -> Vec<TableWithJoins> {
    let mut items = from.into_iter();
    let Some(mut first) = items.next() else { return vec![] };
    for item in items {
        let relation = match item.joins.is_empty() {
            true => item.relation,
            false => TableFactor::NestedJoin { table_with_joins: Box::new(item), alias: None },
        };
        let join_operator = JoinOperator::CrossJoin(JoinConstraint::None);
        first.joins.push(Join { relation, global: false, join_operator });
    }
    vec![first]
}

/// Turns the lookups of an expression into joins; EXISTS in WHERE is left to DataFusion.
fn lookups(e: &mut Expr, tests: bool, rewrite: &mut Rewrite, joins: &mut Vec<Join>) {
    let _ = walk::expressions_mut(e, |e| {
        let (query, exists) = match e {
            Expr::Subquery(q) => (q, None),
            Expr::Exists { subquery, negated } if tests => (subquery, Some(*negated)),
            _ => return ControlFlow::<()>::Continue(()),
        };
        if let Some((value, join)) = lookup(query, exists.is_some(), rewrite) {
            joins.push(join);
            let value = Box::new(value);
            *e = match exists {
                None => *value,
                Some(false) => Expr::IsNotNull(value),
                Some(true) => Expr::IsNull(value),
            };
        }
        ControlFlow::Continue(())
    });
}

/// A sub-select as a value and the join that provides it.
fn lookup(query: &Query, exists: bool, rewrite: &mut Rewrite) -> Option<(Expr, Join)> {
    let SetExpr::Select(select) = query.body.as_ref() else { return None };
    if query.with.is_some()
        || query.limit_clause.is_some()
        || query.fetch.is_some()
        || aggregates(select)
    {
        return None;
    }
    let mut select = select.clone();
    if select.distinct.is_some() || select.projection.len() != 1 || select.from.is_empty() {
        return None;
    }
    let n = rewrite.joins + 1;
    let mut scope = Scope::default();
    for from in &mut select.from {
        scope.add(&mut from.relation, n, rewrite)?;
        for join in &mut from.joins {
            scope.add(&mut join.relation, n, rewrite)?;
        }
    }
    rewrite.joins = n;
    let mut value = match select.projection.pop()? {
        _ if exists => scope.witness()?,
        SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } => e,
        _ => return None,
    };
    scope.qualify(&mut value);
    let mut condition = select.selection.take().unwrap_or_else(|| boolean(true));
    scope.qualify(&mut condition);
    for from in &mut select.from {
        scope.qualify(from);
    }
    let mut from = one_from(select.from);
    let from = from.pop()?;
    let relation = match from.joins.is_empty() {
        true => from.relation,
        false => TableFactor::NestedJoin { table_with_joins: Box::new(from), alias: None },
    };
    let join_operator = JoinOperator::LeftOuter(JoinConstraint::On(condition));
    Some((value, Join { relation, global: false, join_operator }))
}

/// The tables of a lookup under their new names.
#[derive(Default)]
struct Scope {
    renamed: HashMap<String, Ident>,
    columns: HashMap<&'static str, Ident>,
    first: Option<(Ident, &'static str)>,
}

impl Scope {
    fn add(&mut self, factor: &mut TableFactor, n: usize, rewrite: &Rewrite) -> Option<()> {
        let columns = system_columns(factor, rewrite)?;
        let (_, name) = table_name(factor)?;
        let TableFactor::Table { alias, .. } = factor else { return None };
        let old = alias.as_ref().map_or(name, |a| fold(&a.name));
        let new = Ident::with_quote('"', format!("{old}#{n}"));
        self.first.get_or_insert((new.clone(), columns.first()?));
        for column in columns {
            self.columns.entry(column).or_insert_with(|| new.clone());
        }
        *alias = Some(TableAlias { explicit: true, name: new.clone(), columns: vec![], at: None });
        self.renamed.insert(old, new);
        Some(())
    }

    /// A column that is NULL only when the join found nothing.
    fn witness(&self) -> Option<Expr> {
        let (table, column) = self.first.as_ref()?;
        Some(Expr::CompoundIdentifier(vec![table.clone(), Ident::new(*column)]))
    }

    fn qualify<V: VisitMut>(&self, node: &mut V) {
        let _ = walk::expressions_mut(node, |e| {
            match e {
                Expr::Identifier(i) => {
                    if let Some(table) = self.columns.get(fold(i).as_str()) {
                        *e = Expr::CompoundIdentifier(vec![table.clone(), i.clone()]);
                    }
                }
                Expr::CompoundIdentifier(parts) if parts.len() >= 2 => {
                    let at = parts.len() - 2;
                    if let Some(table) = self.renamed.get(&fold(&parts[at])) {
                        parts[at] = table.clone();
                        parts.drain(..at);
                    }
                }
                _ => {}
            }
            ControlFlow::<()>::Continue(())
        });
    }
}

/// `ARRAY(SELECT …)` over a system table. Others are the planner's.
pub(super) fn array(query: &mut Query, rewrite: &Rewrite) -> Option<Expr> {
    if is_empty(query) {
        return Some(call("#no_texts", []));
    }
    let SetExpr::Select(select) = query.body.as_mut() else { return None };
    if let Some(options) = options_of(select) {
        return Some(call("#options", [options]));
    }
    if !select.from.iter().any(|f| system_columns(&f.relation, rewrite).is_some()) {
        return None;
    }
    if let [SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. }] =
        select.projection.as_mut_slice()
    {
        // One column is ordered by itself, where an order is asked for.
        let value = take(e);
        *e = call("array_agg", [value]);
        if query.order_by.take().is_some()
            && let Expr::Function(Function { args: FunctionArguments::List(list), .. }) = e
            && let Some(FunctionArg::Unnamed(FunctionArgExpr::Expr(value))) = list.args.first()
        {
            let options = OrderByOptions { asc: None, nulls_first: None };
            let by = OrderByExpr { expr: value.clone(), options, with_fill: None };
            list.clauses.push(FunctionArgumentClause::OrderBy(vec![by]));
        }
    }
    Some(Expr::Subquery(Box::new(query.clone())))
}

/// The argument of `… FROM pg_options_to_table(argument)`.
fn options_of(select: &mut Select) -> Option<Expr> {
    let [TableWithJoins { relation, joins }] = select.from.as_mut_slice() else { return None };
    let (name, args) = match relation {
        TableFactor::Table { name, args: Some(args), .. } => (name, &mut args.args),
        TableFactor::Function { name, args, .. } => (name, args),
        _ => return None,
    };
    let name = name.0.last().and_then(|p| p.as_ident()).map(fold)?;
    match args.first_mut() {
        Some(FunctionArg::Unnamed(FunctionArgExpr::Expr(e)))
            if name == "pg_options_to_table" && joins.is_empty() =>
        {
            Some(take(e))
        }
        _ => None,
    }
}
