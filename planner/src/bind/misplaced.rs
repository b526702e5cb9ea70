//! Calls of aggregates and window functions where a clause has none, and what else is wrong with a query as it is written.
//!
//! It is looked for in the tree as it was parsed: before it is planned, and once more for the place that an error means.

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;
use sqlparser::tokenizer::Location;

use super::names::fold;
use crate::functions::functions;

/// What is wrong, and where.
#[derive(Debug)]
pub struct Misplaced {
    pub error: SqlError,
    pub at: Location,
}

/// The first call of a query that may not stand where it does.
pub fn in_query(query: &Query) -> Option<Misplaced> {
    search(query)
}

/// Where stands what an error of this message is about.
pub fn place(message: &str, sql: &Statement) -> Option<Location> {
    let condition = match sql {
        Statement::Update(u) => u.selection.as_ref(),
        Statement::Delete(d) => d.selection.as_ref(),
        _ => None,
    };
    let found = condition.and_then(|e| clause(e, "WHERE")).or_else(|| search(sql))?;
    (found.error.message == message).then_some(found.at)
}

/// How many columns a query has, where no `*` stands for some.
pub fn width(body: &SetExpr) -> Option<usize> {
    match body {
        SetExpr::Select(select) => {
            let plain = |item: &SelectItem| {
                matches!(item, SelectItem::UnnamedExpr(_) | SelectItem::ExprWithAlias { .. })
            };
            select.projection.iter().all(plain).then_some(select.projection.len())
        }
        SetExpr::Query(query) => width(&query.body),
        SetExpr::SetOperation { left, .. } => width(left),
        SetExpr::Values(values) => values.rows.first().map(|row| row.content.len()),
        _ => None,
    }
}

/// Queries of a set operation that differ in their numbers of columns.
fn uneven(body: &SetExpr) -> Option<Misplaced> {
    let SetExpr::SetOperation { left, right, op, .. } = body else { return None };
    if let Some(found) = uneven(left).or_else(|| uneven(right)) {
        return Some(found);
    }
    if width(left)? == width(right)? {
        return None;
    }
    let message = format!("each {op} query must have the same number of columns");
    let error = SqlError::new(SqlState::SYNTAX_ERROR, message);
    Some(Misplaced { error, at: first_item(right)? })
}

/// Where the list of a query begins.
pub fn first_item(body: &SetExpr) -> Option<Location> {
    match body {
        SetExpr::Select(select) => select.projection.first().map(|item| item.span().start),
        SetExpr::Query(query) => first_item(&query.body),
        SetExpr::SetOperation { left, .. } => first_item(left),
        SetExpr::Values(values) => Some(values.rows.first()?.content.first()?.span().start),
        _ => None,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Aggregate,
    Window,
}

/// Aggregates that other functions stand for.
const SPELLED: [&str; 6] = [
    "jsonb_agg",
    "json_agg",
    "json_object_agg",
    "jsonb_object_agg",
    "approx_count_distinct",
    "approx_distinct",
];

fn kind(f: &Function) -> Option<Call> {
    if f.over.is_some() {
        return Some(Call::Window);
    }
    let name = f.name.0.last().and_then(|p| p.as_ident()).map(fold)?;
    let aggregate = functions().aggregate(&name).is_some() || SPELLED.contains(&name.as_str());
    // An operation of GROUP BY.
    (aggregate && name != "grouping").then_some(Call::Aggregate)
}

/// Whether a call is that of an aggregate, and not of a window function.
pub(super) fn is_aggregate(f: &Function) -> bool {
    kind(f) == Some(Call::Aggregate)
}

pub(super) fn start(f: &Function) -> Location {
    let name = f.name.0.first().and_then(|p| p.as_ident());
    name.map_or(Location { line: 0, column: 0 }, |name| name.span.start)
}

/// Looks at expressions, but not in their subqueries.
struct First {
    call: Call,
    queries: usize,
}

impl Visitor for First {
    type Break = Location;

    fn pre_visit_query(&mut self, _: &Query) -> ControlFlow<Location> {
        self.queries += 1;
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, _: &Query) -> ControlFlow<Location> {
        self.queries -= 1;
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, e: &Expr) -> ControlFlow<Location> {
        match e {
            Expr::Function(f) if self.queries == 0 && kind(f) == Some(self.call) => {
                ControlFlow::Break(start(f))
            }
            _ => ControlFlow::Continue(()),
        }
    }
}

/// The first call of a kind.
fn first<T: Visit>(node: &T, call: Call) -> Option<Location> {
    node.visit(&mut First { call, queries: 0 }).break_value()
}

fn misplaced(call: Call, message: impl Into<String>, at: Location) -> Misplaced {
    let state = match call {
        Call::Aggregate => SqlState::GROUPING_ERROR,
        Call::Window => SqlState("42P20"),
    };
    Misplaced { error: SqlError::new(state, message), at }
}

/// A call that stands where neither aggregates nor window functions may.
pub(super) fn in_clause(f: &Function, name: &str) -> Option<Misplaced> {
    let call = kind(f)?;
    let what = match call {
        Call::Aggregate => "aggregate",
        Call::Window => "window",
    };
    Some(misplaced(call, format!("{what} functions are not allowed in {name}"), start(f)))
}

/// A call in a clause that has neither aggregates nor window functions.
fn clause<T: Visit>(node: &T, name: &str) -> Option<Misplaced> {
    let of = |call, what| {
        let at = first(node, call)?;
        Some(misplaced(call, format!("{what} functions are not allowed in {name}"), at))
    };
    of(Call::Aggregate, "aggregate").or_else(|| of(Call::Window, "window"))
}

fn search<T: Visit>(node: &T) -> Option<Misplaced> {
    node.visit(&mut Search).break_value().map(|found| *found)
}

struct Search;

type Flow = ControlFlow<Box<Misplaced>>;

fn flow(found: Option<Misplaced>) -> Flow {
    match found {
        Some(found) => ControlFlow::Break(Box::new(found)),
        None => ControlFlow::Continue(()),
    }
}

impl Visitor for Search {
    type Break = Box<Misplaced>;

    fn pre_visit_query(&mut self, query: &Query) -> Flow {
        if let Some(LimitClause::LimitOffset { limit, offset, .. }) = &query.limit_clause {
            flow(limit.as_ref().and_then(|e| clause(e, "LIMIT")))?;
            flow(offset.as_ref().and_then(|o| clause(&o.value, "OFFSET")))?;
        }
        flow(uneven(&query.body))?;
        match query.body.as_ref() {
            SetExpr::Values(values) => flow(clause(values, "VALUES")),
            _ => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_select(&mut self, select: &Select) -> Flow {
        for join in select.from.iter().flat_map(|from| &from.joins) {
            flow(on(&join.join_operator).and_then(|e| clause(e, "JOIN conditions")))?;
        }
        flow(select.selection.as_ref().and_then(|e| clause(e, "WHERE")))?;
        if let GroupByExpr::Expressions(exprs, _) = &select.group_by {
            flow(clause(exprs, "GROUP BY"))?;
        }
        let having = select.having.as_ref().and_then(|e| first(e, Call::Window));
        let message = "window functions are not allowed in HAVING";
        flow(having.map(|at| misplaced(Call::Window, message, at)))?;
        flow(in_definition(&select.named_window))
    }

    fn pre_visit_expr(&mut self, e: &Expr) -> Flow {
        match e {
            Expr::Function(f) => flow(nested(f)),
            _ => ControlFlow::Continue(()),
        }
    }
}

/// What may not be within a call.
fn nested(f: &Function) -> Option<Misplaced> {
    let call = kind(f)?;
    let filter = f.filter.as_deref().and_then(|e| clause(e, "FILTER"));
    let within = |inner, message: &str| {
        let at = first(&f.args, inner).or_else(|| first(&f.within_group, inner))?;
        Some(misplaced(call, message, at))
    };
    let args = match call {
        Call::Aggregate => within(Call::Aggregate, "aggregate function calls cannot be nested")
            .or_else(|| {
                let message = "aggregate function calls cannot contain window function calls";
                within(Call::Window, message)
            }),
        Call::Window => within(Call::Window, "window function calls cannot be nested")
            .or_else(|| in_definition(&f.over)),
    };
    args.or(filter)
}

fn in_definition<T: Visit>(windows: &T) -> Option<Misplaced> {
    let message = "window functions are not allowed in window definitions";
    Some(misplaced(Call::Window, message, first(windows, Call::Window)?))
}

/// The condition of a join.
fn on(operator: &JoinOperator) -> Option<&Expr> {
    match operator {
        JoinOperator::Join(c)
        | JoinOperator::Inner(c)
        | JoinOperator::Left(c)
        | JoinOperator::LeftOuter(c)
        | JoinOperator::Right(c)
        | JoinOperator::RightOuter(c)
        | JoinOperator::FullOuter(c) => match c {
            JoinConstraint::On(e) => Some(e),
            _ => None,
        },
        _ => None,
    }
}
