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
mod copies;
mod expressions;
mod literals;
mod ops;
mod patterns;
mod subscripts;

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState, SqlType};
use sqlparser::ast::*;

use super::SessionInfo;
use super::clause_expressions::change_own;
use super::names::name_items;
use super::predicates::{spell_out_filter, spell_out_predicates};
use crate::parser::walk;
pub(super) use comparisons::row_items;
pub use copies::{Copies, size};
pub(super) use literals::interval_text;
use millrace_functions::functions;
use millrace_functions::window_fn::WITH_TIES;
pub use ops::{ANY, ARRAY, ITEM, Op, SCALAR, SERIES, SLICE, VALUES, assigned, plain_call};
pub(super) use ops::{call, resolved, row_op, row_test, row_text, string, take};
use ops::{null, number_text, ours, unwrap_number};

/// Functions that return sets of rows, and the ones of arrays that they are in a SELECT list.
const SETS: [(&str, &str); 7] = [
    ("generate_series", SERIES),
    ("jsonb_array_elements", "jsonb_array_elements_list"),
    ("jsonb_array_elements_text", "jsonb_array_elements_text_list"),
    ("jsonb_object_keys", "jsonb_object_keys_list"),
    ("regexp_split_to_table", "regexp_split_to_array"),
    ("string_to_table", "string_to_array"),
    ("generate_subscripts", "array_subscripts"),
];

/// Whether a function returns a set of rows.
pub(super) fn returns_rows(name: &str) -> bool {
    matches!(name, "unnest" | "regexp_matches") || SETS.iter().any(|(set, _)| *set == name)
}

/// Whether a name is that of a function of single values.
pub(super) fn is_scalar(name: &str) -> bool {
    ops::resolved_name(name).is_some()
        || calls::SPELLED.contains(&name)
        || functions().scalar(name).is_some()
}

/// Rewrites a query in place.
pub fn desugar_query(query: &mut Query, session: &SessionInfo) -> Result<(), SqlError> {
    run(query, session)
}

/// Rewrites a scalar expression in place.
pub fn desugar_expr(expr: &mut Expr, session: &SessionInfo) -> Result<(), SqlError> {
    run(expr, session)
}

fn run<T: VisitMut + Visit>(node: &mut T, session: &SessionInfo) -> Result<(), SqlError> {
    let copies = Copies::of(&*node);
    match walk::visit_mut(node, &mut Desugar { session, queries: 0, copies }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(e) => Err(*e),
    }
}

struct Desugar<'a> {
    session: &'a SessionInfo,
    /// Queries that the visitor is in.
    queries: usize,
    copies: Copies,
}

type Flow = ControlFlow<Box<SqlError>>;

impl VisitorMut for Desugar<'_> {
    type Break = Box<SqlError>;

    fn pre_visit_select(&mut self, select: &mut Select) -> Flow {
        // What is spelled out may have its subqueries more than once.
        if let Err(e) = millrace_functions::interrupt::check() {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::table_functions::spell_out(select) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::using::spell_out_select(select) {
            return ControlFlow::Break(Box::new(e));
        }
        super::join_conditions::move_to_where(select);
        super::whole_rows::mark(select);
        if let Err(e) = super::grouping::spell_out(select, &mut self.copies) {
            return ControlFlow::Break(Box::new(e));
        }
        name_items(&mut select.projection);
        select.projection.iter_mut().for_each(spread_series);
        change_own(&mut select.projection, spread_matches);
        if let Err(e) = spell_out_predicates(&mut select.projection, &mut self.copies) {
            return ControlFlow::Break(Box::new(e));
        }
        for filter in [&mut select.selection, &mut select.having].into_iter().flatten() {
            if let Err(e) = spell_out_filter(filter, &mut self.copies) {
                return ControlFlow::Break(Box::new(e));
            }
        }
        for from in &mut select.from {
            if let Err(e) = super::asof::mark(from) {
                return ControlFlow::Break(Box::new(e));
            }
        }
        if let Err(e) = super::windows::write_out(select, &mut self.copies) {
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
        if let Err(e) = spell_out_names(query) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::windows::write_out_order(query, &mut self.copies) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::using::spell_out_query(query) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::values::unify(&mut query.body, &mut self.copies) {
            return ControlFlow::Break(Box::new(e));
        }
        self.queries += 1;
        // Within others it may name what is theirs.
        if self.queries == 1
            && let Some(LimitClause::LimitOffset { limit, offset, .. }) = &query.limit_clause
        {
            let limit = limit.iter().map(|e| (e, "LIMIT"));
            let offset = offset.iter().map(|o| (&o.value, "OFFSET"));
            for (e, clause) in limit.chain(offset) {
                if let Err(e) = super::limits::check(e, clause) {
                    return ControlFlow::Break(Box::new(e));
                }
            }
        }
        if crate::parser::with_changes_rows(query) {
            return ControlFlow::Break(Box::new(self.changes_in_with()));
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
        self.queries -= 1;
        if let Err(e) = fetch_to_limit(query) {
            return ControlFlow::Break(Box::new(e));
        }
        if let Some(OrderBy { kind: OrderByKind::Expressions(exprs), .. }) = &mut query.order_by {
            exprs.iter_mut().for_each(|o| unwrap_number(&mut o.expr));
        }
        if let Some(LimitClause::LimitOffset { limit, offset, .. }) = &mut query.limit_clause {
            // NULL is no limit.
            let _ = limit.take_if(|e| is_null(e));
            let _ = offset.take_if(|o| is_null(&o.value));
            let counts = limit.iter().chain(offset.iter().map(|o| &o.value));
            for text in counts.filter_map(number_text) {
                if let Err(e) = super::limits::check_size(text) {
                    return ControlFlow::Break(Box::new(e));
                }
            }
            limit.iter_mut().for_each(|limit| unwrap_limit(limit, "LIMIT"));
            offset.iter_mut().for_each(|o| unwrap_limit(&mut o.value, "OFFSET"));
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        if let Err(e) = self.copies.meet() {
            return ControlFlow::Break(Box::new(e));
        }
        if let Err(e) = super::array_query::spell_out(expr, &mut self.copies) {
            return ControlFlow::Break(Box::new(e));
        }
        super::whole_rows::name_field(expr);
        if let Err(e) = super::predicates::compare_row(expr, &mut self.copies) {
            return ControlFlow::Break(Box::new(e));
        }
        // Before its operands are rewritten, which loses their places.
        if let Expr::BinaryOp { left, op, .. } = expr {
            super::operator_spans::note(op, left);
        }
        if let Expr::Function(f) = expr {
            super::filters::guard(f);
            if let Err(e) = super::windows::plain_bounds(f, self.session) {
                return ControlFlow::Break(Box::new(e));
            }
        }
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        match self.copies.within(expr).and_then(|()| self.rewrite(expr)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => ControlFlow::Break(Box::new(e)),
        }
    }
}

/// Gives a query's columns, and those of its WITH and of what it unites, names that mean one thing only.
fn spell_out_names(query: &mut Query) -> Result<(), SqlError> {
    let recursive = query.with.as_ref().is_some_and(|with| with.recursive);
    for cte in query.with.iter_mut().flat_map(|w| &mut w.cte_tables) {
        super::outer_outputs::name_in_with(&mut cte.query.body);
        if !recursive && super::unions::is_set_operation(&cte.query.body) {
            super::unions::in_from(&mut cte.query)?;
        }
        super::order::part_and_keep_names(&mut cte.query)?;
    }
    super::order::place_distinct(query)?;
    super::order::part_branches(&mut query.body)?;
    super::order::part_names(query)
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

/// `regexp_matches` in a SELECT list is a set of rows, of which the list may also name the elements.
fn spread_matches(e: &mut Expr) {
    if let Expr::Function(f) = &*e
        && f.over.is_none()
        && f.name.to_string().eq_ignore_ascii_case("regexp_matches")
        && let Some(args) = calls::unnamed_arguments(f)
    {
        *e = call("unnest", [super::table_functions::match_rows(args)]);
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

impl Desugar<'_> {
    /// A statement that changes rows in the WITH of a query. Of a statement's own WITH nobody asks here: the
    /// statement is run in parts.
    fn changes_in_with(&self) -> SqlError {
        let refused = |message: &str| SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message);
        if self.queries > 1 {
            return refused(
                "WITH clause containing a data-modifying statement must be at the top level",
            );
        }
        if self.session.for_view {
            return refused("a definition must not contain data-modifying statements in WITH");
        }
        SqlError::unsupported("INSERT, UPDATE or DELETE in the WITH of this statement")
            .with_hint("Write the query with its WITH as a statement of its own.")
    }
}

fn refuse_query(query: &Query) -> Option<SqlError> {
    if crate::parser::changes_rows(query) {
        return Some(SqlError::unsupported("INSERT, UPDATE or DELETE within a query").with_hint(
            "Write it as a statement of its own, in a transaction with the one that reads its rows.",
        ));
    }
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
        number_text(&quantity).map_or(Ok(()), super::limits::check_size)?;
        unwrap_limit(&mut quantity, "LIMIT");
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

fn is_null(e: &Expr) -> bool {
    match e {
        Expr::Nested(inner) => is_null(inner),
        Expr::Value(v) => v.value == Value::Null,
        _ => false,
    }
}

/// A whole number stays as it is; everything else becomes a bigint, in which LIMIT counts.
fn unwrap_limit(e: &mut Expr, clause: &str) {
    if number_text(e).is_some_and(|text| text.parse::<i64>().is_ok()) {
        return unwrap_number(e);
    }
    match e {
        Expr::Value(v) if matches!(v.value, Value::Number(_, _)) => {}
        // Its rows are counted elsewhere.
        Expr::Function(f)
            if f.name == ObjectName::from(vec![Ident::with_quote('"', WITH_TIES)]) => {}
        Expr::BinaryOp { op, right, .. } if Op::decode(op) == Some(Op::Parameter) => {
            *e = ours(Op::Cast(SqlType::BigInt), take(right), null());
        }
        other => *other = ours(Op::Rows, take(other), Box::new(string(clause))),
    }
}
