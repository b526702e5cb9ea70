//! A rewrite of the AST before planning, so that PostgreSQL's rules for literals, casts and
//! operators can be applied where types are known.
//!
//! `SqlToRel` has one hook that sees the types of an expression's parts: binary operators. So
//! everything that needs types becomes one, with a custom operator ([`Op`]) that
//! [`super::operators`] resolves: casts, numbers, parameters, unary minus, elements of IN lists. BETWEEN,
//! simple CASE, EXTRACT and their like are spelled out as comparisons and functions. Numbers that are not
//! values (LIMIT, ORDER BY 1, window frames) keep their form.

mod calls;
mod comparisons;
mod expressions;
mod literals;
mod ops;
mod patterns;

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState, SqlType};
use sqlparser::ast::*;

use super::SessionInfo;
use super::names::name_items;
use super::predicates::{spell_out_filter, spell_out_predicates};
use crate::functions::window_fn::WITH_TIES;
pub(super) use comparisons::row_items;
pub(super) use literals::interval_text;
pub use ops::{ANY, Op, SERIES, VALUES, plain_call};
pub(super) use ops::{call, resolved, string, take};
use ops::{null, ours, unwrap_number};

/// Functions that return sets of rows, and the ones of arrays that they are in a SELECT list.
const SETS: [(&str, &str); 5] = [
    ("generate_series", SERIES),
    ("jsonb_array_elements", "jsonb_array_elements_list"),
    ("jsonb_array_elements_text", "jsonb_array_elements_text_list"),
    ("jsonb_object_keys", "jsonb_object_keys_list"),
    ("regexp_split_to_table", "regexp_split_to_array"),
];

/// Rewrites a query in place.
pub fn desugar_query(query: &mut Query, session: &SessionInfo) -> Result<(), SqlError> {
    run(query, session)
}

/// Rewrites a scalar expression in place.
pub fn desugar_expr(expr: &mut Expr, session: &SessionInfo) -> Result<(), SqlError> {
    run(expr, session)
}

fn run<T: VisitMut>(node: &mut T, session: &SessionInfo) -> Result<(), SqlError> {
    match node.visit(&mut Desugar { session }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(e) => Err(*e),
    }
}

struct Desugar<'a> {
    session: &'a SessionInfo,
}

type Flow = ControlFlow<Box<SqlError>>;

impl VisitorMut for Desugar<'_> {
    type Break = Box<SqlError>;

    fn pre_visit_select(&mut self, select: &mut Select) -> Flow {
        if let Err(e) = super::table_functions::spell_out(select) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::using::spell_out_select(select) {
            return ControlFlow::Break(Box::new(e));
        }
        name_items(&mut select.projection);
        select.projection.iter_mut().for_each(spread_series);
        if let Err(e) = spell_out_predicates(&mut select.projection) {
            return ControlFlow::Break(Box::new(e));
        }
        for filter in [&mut select.selection, &mut select.having].into_iter().flatten() {
            if let Err(e) = spell_out_filter(filter) {
                return ControlFlow::Break(Box::new(e));
            }
        }
        for from in &mut select.from {
            if let Err(e) = super::asof::mark(from) {
                return ControlFlow::Break(Box::new(e));
            }
        }
        if let Err(e) = super::windows::write_out(select) {
            return ControlFlow::Break(Box::new(e));
        }
        match refuse_select(select) {
            Some(e) => ControlFlow::Break(Box::new(e)),
            None => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_table_factor(&mut self, factor: &mut TableFactor) -> Flow {
        if let TableFactor::Derived { subquery, .. } = factor
            && let Err(e) = super::order::part_and_keep_names(subquery)
        {
            return ControlFlow::Break(Box::new(e));
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_query(&mut self, query: &mut Query) -> Flow {
        for cte in query.with.iter_mut().flat_map(|w| &mut w.cte_tables) {
            if let Err(e) = super::order::part_and_keep_names(&mut cte.query) {
                return ControlFlow::Break(Box::new(e));
            }
        }
        super::order::part_names(query);
        if let Err(e) = super::windows::write_out_order(query) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::using::spell_out_query(query) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::values::unify(&mut query.body) {
            return ControlFlow::Break(Box::new(e));
        }
        match refuse_query(query) {
            Some(e) => ControlFlow::Break(Box::new(e)),
            None => ControlFlow::Continue(()),
        }
    }

    fn post_visit_select(&mut self, select: &mut Select) -> Flow {
        if let GroupByExpr::Expressions(exprs, _) = &mut select.group_by {
            exprs.iter_mut().for_each(unwrap_number);
        }
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, query: &mut Query) -> Flow {
        if let Err(e) = fetch_to_limit(query) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Some(OrderBy { kind: OrderByKind::Expressions(exprs), .. }) = &mut query.order_by {
            exprs.iter_mut().for_each(|o| unwrap_number(&mut o.expr));
        }
        if let Some(LimitClause::LimitOffset { limit, offset, .. }) = &mut query.limit_clause {
            limit.iter_mut().for_each(unwrap_limit);
            offset.iter_mut().for_each(|o| unwrap_limit(&mut o.value));
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        if let Err(e) = super::array_query::spell_out(expr) {
            return ControlFlow::Break(Box::new(e));
        }
        // Before its operands are rewritten, which loses their places.
        if let Expr::BinaryOp { left, op, .. } = expr {
            super::places::note(op, left);
        }
        if let Expr::Function(f) = expr {
            super::filters::guard(f);
            if let Err(e) = super::windows::plain_bounds(f) {
                return ControlFlow::Break(Box::new(e));
            }
        }
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        match self.rewrite(expr) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => ControlFlow::Break(Box::new(e)),
        }
    }
}

/// `generate_series` in a SELECT list is a set of rows.
fn spread_series(item: &mut SelectItem) {
    if let SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } = item
        && let Expr::Function(f) = e
        && let Some((_, list)) = SETS.iter().find(|s| f.name.to_string().eq_ignore_ascii_case(s.0))
    {
        f.name = ObjectName::from(vec![Ident::with_quote('"', *list)]);
        let list = take(e);
        *e = call("unnest", [list]);
    }
}

/// Clauses that would otherwise be ignored or computed wrongly.
fn refuse_select(select: &Select) -> Option<SqlError> {
    if select.into.is_some() {
        return Some(SqlError::unsupported("SELECT INTO").with_hint("Use CREATE TABLE … AS."));
    }
    (select.top.is_some() || !select.lateral_views.is_empty() || select.prewhere.is_some())
        .then(|| SqlError::unsupported("this SELECT clause"))
}

fn refuse_query(query: &Query) -> Option<SqlError> {
    if !query.locks.is_empty() {
        return Some(SqlError::unsupported("a row lock (FOR UPDATE, FOR SHARE)").with_hint(
            "Leave it out: statements that write check that what they read has not changed.",
        ));
    }
    None
}

/// FETCH FIRST n ROWS ONLY is the standard's LIMIT n.
fn fetch_to_limit(query: &mut Query) -> Result<(), SqlError> {
    let Some(fetch) = query.fetch.take() else { return Ok(()) };
    if fetch.percent {
        return Err(SqlError::unsupported("FETCH FIRST … PERCENT"));
    }
    let one = || Expr::value(Value::Number("1".into(), false));
    let mut quantity = fetch.quantity.unwrap_or_else(one);
    if fetch.with_ties {
        unwrap_limit(&mut quantity);
        quantity = call(WITH_TIES, [quantity]);
    }
    match &mut query.limit_clause {
        None => {
            let limit = Some(quantity);
            query.limit_clause =
                Some(LimitClause::LimitOffset { limit, offset: None, limit_by: Vec::new() });
        }
        Some(LimitClause::LimitOffset { limit: limit @ None, .. }) => *limit = Some(quantity),
        Some(_) => {
            return Err(SqlError::new(
                SqlState::SYNTAX_ERROR,
                "multiple LIMIT clauses not allowed",
            ));
        }
    }
    Ok(())
}

fn unwrap_limit(e: &mut Expr) {
    unwrap_number(e);
    if let Expr::BinaryOp { op, right, .. } = e
        && Op::decode(op) == Some(Op::Parameter)
    {
        // LIMIT counts in bigint.
        *e = ours(Op::Cast(SqlType::BigInt), take(right), null());
    }
}
