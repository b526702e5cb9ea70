//! Calls of aggregates and window functions where a clause has none, and what else is wrong with a query as
//! it is written.
//!
//! It is looked for in the tree as it was parsed: before it is planned, and once more for the place that an
//! error means.

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use millrace_functions::functions;
use sqlparser::ast::*;
use sqlparser::tokenizer::Location;

use crate::bind::expressions::clause_expressions::any_own;
use crate::bind::expressions::desugar;
use crate::bind::names::fold;
use crate::parser::joins;
use crate::parser::walk;

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
    let found = in_change(sql).or_else(|| search(sql))?;
    (found.error.message == message).then_some(found.at)
}

/// The first call of an INSERT, UPDATE or DELETE that may not stand where it does, but for what is within its queries.
pub fn in_change(sql: &Statement) -> Option<Misplaced> {
    let (set, condition, returning) = match sql {
        Statement::Update(u) => (u.assignments.as_slice(), u.selection.as_ref(), &u.returning),
        Statement::Delete(d) => (&[][..], d.selection.as_ref(), &d.returning),
        Statement::Insert(i) => match &i.on {
            Some(OnInsert::OnConflict(OnConflict {
                action: OnConflictAction::DoUpdate(update),
                ..
            })) => (update.assignments.as_slice(), update.selection.as_ref(), &i.returning),
            _ => (&[][..], None, &i.returning),
        },
        _ => return None,
    };
    let mut set = set.iter().map(|assignment| &assignment.value);
    set.find_map(|value| clause(value, "UPDATE").or_else(|| rows(value, "UPDATE")))
        .or_else(|| condition.and_then(|e| clause(e, "WHERE").or_else(|| rows(e, "WHERE"))))
        .or_else(|| {
            let items = returning.as_ref()?;
            clause(items, "RETURNING").or_else(|| rows(items, "RETURNING"))
        })
}

/// A function that returns rows where there is one value.
fn rows<T: Visit>(node: &T, name: &str) -> Option<Misplaced> {
    let at = first(node, Call::Rows)?;
    let message = format!("set-returning functions are not allowed in {name}");
    Some(Misplaced { error: SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message), at })
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

/// The order of a set operation by something else than its columns.
fn ordered_union(query: &Query) -> Option<Misplaced> {
    let mut body = query.body.as_ref();
    while let SetExpr::Query(inner) = body {
        body = inner.body.as_ref();
    }
    let SetExpr::SetOperation { .. } = body else { return None };
    let Some(OrderBy { kind: OrderByKind::Expressions(exprs), .. }) = &query.order_by else {
        return None;
    };
    let mut exprs = exprs.iter().map(|by| &by.expr);
    // What is no number is told where it is planned, and so is a name that is no column's.
    let other = exprs.find(|e| {
        !matches!(e, Expr::Identifier(_) | Expr::CompoundIdentifier(_) | Expr::Value(_))
            && !matches!(e, Expr::Nested(inner) if matches!(**inner, Expr::Identifier(_)))
    })?;
    let message = "invalid UNION/INTERSECT/EXCEPT ORDER BY clause";
    let error = SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message)
        .with_detail("Only result column names can be used, not expressions or functions.")
        .with_hint(
            "Add the expression/function to every SELECT, or move the UNION into a FROM clause.",
        );
    Some(Misplaced { error, at: other.span().start })
}

/// What an item of FROM is called, and the table that it is where it has no other name.
pub(in crate::bind) type Called<'a> = (String, Option<&'a ObjectName>);

fn called<'a>(factor: &'a TableFactor, names: &mut Vec<Called<'a>>) {
    match factor {
        TableFactor::Table { alias: Some(alias), .. }
        | TableFactor::Derived { alias: Some(alias), .. }
        | TableFactor::Function { alias: Some(alias), .. }
        | TableFactor::UNNEST { alias: Some(alias), .. }
        | TableFactor::NestedJoin { alias: Some(alias), .. } => {
            names.push((fold(&alias.name), None));
        }
        TableFactor::Table { name, alias: None, args: None, .. } => {
            if let Some(last) = name.0.last().and_then(|p| p.as_ident()) {
                names.push((fold(last), Some(name)));
            }
        }
        TableFactor::NestedJoin { table_with_joins, alias: None } => {
            called(&table_with_joins.relation, names);
            table_with_joins.joins.iter().for_each(|join| called(&join.relation, names));
        }
        _ => {}
    }
}

/// What the items of a SELECT's FROM are called.
pub(in crate::bind) fn names_of(select: &Select) -> Vec<Called<'_>> {
    let mut names = Vec::new();
    for from in &select.from {
        called(&from.relation, &mut names);
        from.joins.iter().for_each(|join| called(&join.relation, &mut names));
    }
    names
}

/// A column by its schema and table, where only an alias is called like the table.
fn hidden_table(select: &Select) -> Option<Misplaced> {
    let names = names_of(select);
    let mut found = None;
    let mut look = |e: &Expr| {
        let Expr::CompoundIdentifier(parts) = e else { return false };
        let [schema, table, _] = parts.as_slice() else { return false };
        let (schema, table) = (fold(schema), fold(table));
        let mut same = names.iter().filter(|(name, _)| *name == table).peekable();
        let hidden = same.peek().is_some()
            && same.all(|(_, relation)| relation.is_none())
            && names.iter().all(|(name, _)| *name != schema);
        if hidden {
            let message = format!("invalid reference to FROM-clause entry for table \"{table}\"");
            let error = SqlError::new(SqlState::UNDEFINED_TABLE, message)
                .with_hint(format!("\"{table}\" is an alias here, which has no schema."));
            found = Some(Misplaced { error, at: e.span().start });
        }
        hidden
    };
    let _ = any_own(&select.projection, &mut look) || any_own(&select.selection, &mut look);
    found
}

/// Two items of FROM of one name.
fn repeated_table(select: &Select) -> Option<Misplaced> {
    let names = names_of(select);
    // Tables of several schemas may have one name.
    let same =
        |(a, x): &Called<'_>, (b, y): &Called<'_>| a == b && (x.is_none() || y.is_none() || x == y);
    let repeated =
        names.iter().enumerate().find(|(i, name)| names[..*i].iter().any(|n| same(n, name)));
    let (_, (name, _)) = repeated?;
    let message = format!("table name \"{name}\" specified more than once");
    let error = SqlError::new(SqlState("42712"), message);
    Some(Misplaced { error, at: Location { line: 0, column: 0 } })
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
    /// Of a function that returns a set of rows.
    Rows,
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
    if names_aggregate(&name) {
        return Some(Call::Aggregate);
    }
    desugar::returns_rows(&name).then_some(Call::Rows)
}

fn names_aggregate(name: &str) -> bool {
    // An operation of GROUP BY.
    name != "grouping" && (functions().aggregate(name).is_some() || SPELLED.contains(&name))
}

/// Whether a call is that of an aggregate, and not of a window function.
pub(in crate::bind) fn is_aggregate(f: &Function) -> bool {
    kind(f) == Some(Call::Aggregate)
}

pub(in crate::bind) fn start(f: &Function) -> Location {
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
    walk::visit(node, &mut First { call, queries: 0 }).break_value()
}

fn misplaced(call: Call, message: impl Into<String>, at: Location) -> Misplaced {
    let state = match call {
        Call::Aggregate => SqlState::GROUPING_ERROR,
        Call::Window | Call::Rows => SqlState("42P20"),
    };
    Misplaced { error: SqlError::new(state, message), at }
}

/// A call that stands where neither aggregates nor window functions may.
pub(in crate::bind) fn in_clause(f: &Function, name: &str) -> Option<Misplaced> {
    let call = kind(f)?;
    let what = match call {
        Call::Aggregate => "aggregate",
        Call::Window => "window",
        Call::Rows => return None,
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
    walk::visit(node, &mut Search { queries: 0 }).break_value().map(|found| *found)
}

struct Search {
    /// Queries that the visitor is in.
    queries: usize,
}

impl Search {
    /// What may not stand in a condition of a SELECT. An aggregate of the query around may, but is not computed.
    fn condition(&self, e: &Expr, select: &Select, name: &str) -> Option<Misplaced> {
        let found = clause(e, name)?;
        let error = match self.queries {
            0 | 1 => None,
            _ => crate::bind::subqueries::outer_aggregates::written(e, &names_of(select)),
        };
        Some(error.map_or(found, |(error, at)| Misplaced { error, at }))
    }
}

type Flow = ControlFlow<Box<Misplaced>>;

fn flow(found: Option<Misplaced>) -> Flow {
    match found {
        Some(found) => ControlFlow::Break(Box::new(found)),
        None => ControlFlow::Continue(()),
    }
}

impl Visitor for Search {
    type Break = Box<Misplaced>;

    fn post_visit_query(&mut self, _: &Query) -> Flow {
        self.queries -= 1;
        ControlFlow::Continue(())
    }

    fn pre_visit_query(&mut self, query: &Query) -> Flow {
        self.queries += 1;
        if let Some(LimitClause::LimitOffset { limit, offset, .. }) = &query.limit_clause {
            flow(limit.as_ref().and_then(|e| clause(e, "LIMIT")))?;
            flow(offset.as_ref().and_then(|o| clause(&o.value, "OFFSET")))?;
        }
        flow(uneven(&query.body))?;
        flow(ordered_union(query))?;
        flow(ordered_by_rows(query))?;
        match query.body.as_ref() {
            SetExpr::Values(values) => flow(clause(values, "VALUES")),
            _ => ControlFlow::Continue(()),
        }
    }

    fn pre_visit_select(&mut self, select: &Select) -> Flow {
        flow(repeated_table(select))?;
        flow(hidden_table(select))?;
        for join in select.from.iter().flat_map(|from| &from.joins) {
            let on = on(&join.join_operator);
            flow(on.and_then(|e| self.condition(e, select, "JOIN conditions")))?;
        }
        let condition = select.selection.as_ref();
        flow(condition.and_then(|e| self.condition(e, select, "WHERE")))?;
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
            Expr::Function(f) => flow(nested(f).or_else(|| of_others(f))),
            _ => ControlFlow::Continue(()),
        }
    }
}

/// A function that returns rows where each of them would be a row of the query.
fn rows_within<T: Visit>(node: &T, place: &str) -> Option<Misplaced> {
    let at = first(node, Call::Rows)?;
    let error = SqlError::unsupported(format!("a set-returning function in {place}"));
    let hint = "Move it into a LATERAL item of FROM, and name its column.";
    Some(Misplaced { error: error.with_hint(hint), at })
}

/// ORDER BY a function that returns rows: not by a column of the query that is one, by name or position.
fn ordered_by_rows(query: &Query) -> Option<Misplaced> {
    let Some(OrderBy { kind: OrderByKind::Expressions(order), .. }) = &query.order_by else {
        return None;
    };
    order.iter().find_map(|by| rows_within(&by.expr, "ORDER BY"))
}

/// What may not be within a call.
fn nested(f: &Function) -> Option<Misplaced> {
    let call = kind(f)?;
    let filter = f.filter.as_deref().and_then(|e| clause(e, "FILTER"));
    let within = |inner, message: &str| {
        let at = first(&f.args, inner).or_else(|| first(&f.within_group, inner))?;
        Some(misplaced(call, message, at))
    };
    let rows_of = |what: &str| {
        let at = first(&f.args, Call::Rows)?;
        let message = format!("{what} function calls cannot contain set-returning function calls");
        Some(Misplaced { error: SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message), at })
    };
    let rows = match call {
        Call::Aggregate => rows_of("aggregate"),
        Call::Window => rows_of("window").or_else(|| rows_within(&f.over, "a window definition")),
        Call::Rows => None,
    };
    if rows.is_some() {
        return rows;
    }
    let args = match call {
        Call::Aggregate => within(Call::Aggregate, "aggregate function calls cannot be nested")
            .or_else(|| {
                let message = "aggregate function calls cannot contain window function calls";
                within(Call::Window, message)
            }),
        Call::Window => within(Call::Window, "window function calls cannot be nested")
            .or_else(|| in_definition(&f.over)),
        Call::Rows => return None,
    };
    args.or(filter)
}

/// A clause of aggregates or window functions in a call of another function.
fn of_others(f: &Function) -> Option<Misplaced> {
    let name = f.name.0.last().and_then(|p| p.as_ident()).map(fold)?;
    // What is not known at all is told where it is looked up.
    let scalar = !names_aggregate(&name) && functions().window(&name).is_none();
    if !scalar || !desugar::is_scalar(&name) {
        return None;
    }
    let mut ordered = false;
    let mut nulls = f.null_treatment.is_some();
    let mut distinct = false;
    if let FunctionArguments::List(list) = &f.args {
        distinct = list.duplicate_treatment == Some(DuplicateTreatment::Distinct);
        for clause in &list.clauses {
            ordered |= matches!(clause, FunctionArgumentClause::OrderBy(_));
            nulls |= matches!(clause, FunctionArgumentClause::IgnoreOrRespectNulls(_));
        }
    }
    let (clause, wanted) = match f {
        _ if distinct => ("DISTINCT", "an aggregate function"),
        f if !f.within_group.is_empty() => ("WITHIN GROUP", "an aggregate function"),
        _ if ordered => ("ORDER BY", "an aggregate function"),
        f if f.filter.is_some() => ("FILTER", "an aggregate function"),
        f if f.over.is_some() => ("OVER", "a window function nor an aggregate function"),
        _ if nulls => ("IGNORE or RESPECT NULLS", "a window function"),
        _ => return None,
    };
    let message = format!("{clause} specified, but {name} is not {wanted}");
    Some(Misplaced { error: SqlError::new(SqlState("42809"), message), at: start(f) })
}

fn in_definition<T: Visit>(windows: &T) -> Option<Misplaced> {
    let message = "window functions are not allowed in window definitions";
    Some(misplaced(Call::Window, message, first(windows, Call::Window)?))
}

/// The condition of a join.
fn on(operator: &JoinOperator) -> Option<&Expr> {
    match joins::constraint(operator)? {
        JoinConstraint::On(e) => Some(e),
        JoinConstraint::Using(_) | JoinConstraint::Natural | JoinConstraint::None => None,
    }
}
