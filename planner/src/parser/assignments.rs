//! `SET (a, b) = (1, 2)` and `SET (a, b) = (SELECT x, y …)` as an assignment of each column.
//!
//! A subquery is written for each column with only that one in its list. So that all are of the same row, one
//! that has a LIMIT is ordered by all of its columns behind what it is ordered by.

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;
use sqlparser::tokenizer::Location;

use super::parse_query;
use crate::parser::walk;

/// An error, and what it is about.
pub struct Misstated {
    pub error: SqlError,
    /// Where that begins, parentheses aside.
    pub at: Location,
    /// It is in parentheses that belong to it.
    pub enclosed: bool,
}

/// Spreads the assignments of a statement, and of those within it.
pub fn spread(statement: &mut Statement) -> Result<(), Box<Misstated>> {
    struct Spread;
    impl VisitorMut for Spread {
        type Break = Box<Misstated>;

        fn pre_visit_statement(&mut self, statement: &mut Statement) -> ControlFlow<Self::Break> {
            let assignments = match statement {
                Statement::Update(update) => &mut update.assignments,
                Statement::Insert(insert) => match &mut insert.on {
                    Some(OnInsert::OnConflict(OnConflict {
                        action: OnConflictAction::DoUpdate(update),
                        ..
                    })) => &mut update.assignments,
                    _ => return ControlFlow::Continue(()),
                },
                _ => return ControlFlow::Continue(()),
            };
            match spread_all(assignments) {
                Ok(()) => ControlFlow::Continue(()),
                Err(e) => ControlFlow::Break(e),
            }
        }
    }
    match walk::visit_mut(statement, &mut Spread) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(e) => Err(e),
    }
}

fn spread_all(assignments: &mut Vec<Assignment>) -> Result<(), Box<Misstated>> {
    if !assignments.iter().any(|a| matches!(a.target, AssignmentTarget::Tuple(_))) {
        return Ok(());
    }
    let mut all = Vec::with_capacity(assignments.len() + 1);
    for assignment in std::mem::take(assignments) {
        match assignment.target {
            AssignmentTarget::Tuple(names) => {
                let value = &assignment.value;
                let at = value.span().start;
                let enclosed = matches!(value, Expr::Tuple(_) | Expr::Subquery(_));
                let values = values(value, names.len())
                    .map_err(|error| Box::new(Misstated { error, at, enclosed }))?;
                all.extend(names.into_iter().zip(values).map(|(name, value)| Assignment {
                    target: AssignmentTarget::ColumnName(name),
                    value,
                }));
            }
            AssignmentTarget::ColumnName(_) => all.push(assignment),
        }
    }
    *assignments = all;
    Ok(())
}

/// The values of columns.
fn values(value: &Expr, columns: usize) -> Result<Vec<Expr>, SqlError> {
    let values = match value {
        Expr::Nested(inner) => return values(inner, columns),
        Expr::Tuple(items) => items.clone(),
        Expr::Function(f) => row(f).ok_or_else(no_row)?,
        Expr::Subquery(query) => return of_subquery(query, columns),
        _ => return Err(no_row()),
    };
    match values.len() == columns {
        true => Ok(values),
        false => Err(uneven()),
    }
}

fn no_row() -> SqlError {
    let message =
        "source for a multiple-column UPDATE item must be a sub-SELECT or ROW() expression";
    SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message)
}

fn uneven() -> SqlError {
    SqlError::new(SqlState::SYNTAX_ERROR, "number of columns does not match number of values")
}

/// The fields of `ROW(…)`.
fn row(f: &Function) -> Option<Vec<Expr>> {
    if !f.name.to_string().eq_ignore_ascii_case("row") {
        return None;
    }
    let FunctionArguments::List(list) = &f.args else { return None };
    let fields = list.args.iter().map(|arg| match arg {
        FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) => Some(e.clone()),
        _ => None,
    });
    fields.collect()
}

fn of_subquery(query: &Query, columns: usize) -> Result<Vec<Expr>, SqlError> {
    if columns > 1 && calls_random(query) {
        let feature = "a subquery with random values that sets several columns";
        return Err(SqlError::unsupported(feature).with_hint("Write a subquery for each column."));
    }
    let items = plain_items(query);
    if items.as_ref().is_some_and(|items| items.len() != columns) {
        return Err(uneven());
    }
    let value = |at: usize| {
        let query = match &items {
            Some(items) if is_simple(query, items) => with_item(query, items, at),
            _ => over(query, columns, at)?,
        };
        Ok(Expr::Subquery(Box::new(query)))
    };
    (0..columns).map(value).collect()
}

/// Whether each run of a query may find other rows.
fn calls_random(query: &Query) -> bool {
    let random = |e: &Expr| match e {
        Expr::Function(f) => {
            let name = f.name.0.last().and_then(|p| p.as_ident()).map(|i| i.value.to_lowercase());
            matches!(name.as_deref(), Some("random" | "gen_random_uuid"))
        }
        _ => false,
    };
    let flow = walk::expressions(query, |e| match random(e) {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    });
    flow.is_break()
}

/// The list of a query, if that is a SELECT and all of its items are expressions.
fn plain_items(query: &Query) -> Option<Vec<SelectItem>> {
    let SetExpr::Select(select) = query.body.as_ref() else { return None };
    let plain = |item: &SelectItem| expr_of(item).is_some();
    select.projection.iter().all(plain).then(|| select.projection.clone())
}

fn expr_of(item: &SelectItem) -> Option<&Expr> {
    match item {
        SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } => Some(e),
        _ => None,
    }
}

/// Whether a query is the same with fewer items: nothing else of it means one.
fn is_simple(query: &Query, items: &[SelectItem]) -> bool {
    let SetExpr::Select(select) = query.body.as_ref() else { return false };
    let grouped = !matches!(
        &select.group_by,
        GroupByExpr::Expressions(exprs, modifiers) if exprs.is_empty() && modifiers.is_empty()
    );
    if grouped || select.distinct.is_some() {
        return false;
    }
    let is_item = |e: &Expr| match e {
        Expr::Value(_) => true,
        Expr::Identifier(name) => items.iter().any(|item| {
            matches!(item, SelectItem::ExprWithAlias { alias, .. }
                if alias.value.eq_ignore_ascii_case(&name.value))
        }),
        _ => false,
    };
    match &query.order_by {
        None => true,
        Some(OrderBy { kind: OrderByKind::Expressions(by), .. }) => {
            !by.iter().any(|by| is_item(&by.expr))
        }
        Some(_) => false,
    }
}

fn is_limited(query: &Query) -> bool {
    query.limit_clause.is_some() || query.fetch.is_some()
}

/// A simple query with one of its items.
fn with_item(query: &Query, items: &[SelectItem], at: usize) -> Query {
    let mut one = query.clone();
    if is_limited(query) {
        // A constant would be a position.
        let exprs = items.iter().filter_map(expr_of).filter(|e| !matches!(e, Expr::Value(_)));
        order_by_too(&mut one, exprs.cloned().collect());
    }
    if let SetExpr::Select(select) = one.body.as_mut() {
        // By no name of its own, which what the query is ordered by might mean.
        let item = items.get(at).and_then(expr_of).cloned().map(SelectItem::UnnamedExpr);
        select.projection = item.into_iter().collect();
    }
    one
}

/// `SELECT "#1" FROM (query) AS "#s" ("#0", "#1")`.
fn over(query: &Query, columns: usize, at: usize) -> Result<Query, SqlError> {
    let mut inner = query.clone();
    let distinct_on = matches!(
        query.body.as_ref(),
        SetExpr::Select(select) if matches!(select.distinct, Some(Distinct::On(_)))
    );
    if is_limited(query) || distinct_on {
        let position = |i: usize| Expr::value(Value::Number(i.to_string(), false));
        order_by_too(&mut inner, (1..=columns).map(position).collect());
    }
    let names: Vec<String> = (0..columns).map(|i| format!("\"#{i}\"")).collect();
    let template = format!("SELECT \"#{at}\" FROM (SELECT 1) AS \"#s\" ({})", names.join(", "));
    let mut outer = *parse_query(&template)?;
    if let SetExpr::Select(select) = outer.body.as_mut()
        && let Some(from) = select.from.first_mut()
        && let TableFactor::Derived { subquery, .. } = &mut from.relation
    {
        **subquery = inner;
    }
    Ok(outer)
}

/// Orders a query by more than it is.
fn order_by_too(query: &mut Query, exprs: Vec<Expr>) {
    let more = exprs.into_iter().map(|expr| OrderByExpr {
        expr,
        options: OrderByOptions { asc: None, nulls_first: None },
        with_fill: None,
    });
    match &mut query.order_by {
        Some(OrderBy { kind: OrderByKind::Expressions(by), .. }) => by.extend(more),
        Some(_) => {}
        None => {
            let kind = OrderByKind::Expressions(more.collect());
            query.order_by = Some(OrderBy { kind, interpolate: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::ast::Statement;
    use crate::parser::parse;

    fn assigned(sql: &str) -> Result<Vec<String>, (&'static str, Option<u32>)> {
        let parsed = parse(sql).map_err(|e| (e.state.0, e.position))?;
        let Some(Statement::Sql(sql)) = parsed.into_iter().next().map(|p| p.statement) else {
            return Ok(Vec::new());
        };
        let sqlparser::ast::Statement::Update(update) = *sql else { return Ok(Vec::new()) };
        Ok(update.assignments.iter().map(|a| a.to_string()).collect())
    }

    #[test]
    fn each_column_gets_its_value() {
        let row = assigned("UPDATE t SET (a, b) = (1, DEFAULT), c = 3, (d) = ROW(4)");
        let expected = ["a = 1", "b = DEFAULT", "c = 3", "d = 4"];
        assert_eq!(row, Ok(expected.map(String::from).to_vec()));
        let simple = assigned("UPDATE t SET (a, b) = (SELECT x, y FROM u ORDER BY z LIMIT 1)");
        let expected = [
            "a = (SELECT x FROM u ORDER BY z, x, y LIMIT 1)",
            "b = (SELECT y FROM u ORDER BY z, x, y LIMIT 1)",
        ];
        assert_eq!(simple, Ok(expected.map(String::from).to_vec()));
        let named = assigned("UPDATE t SET (a, b) = (SELECT x AS y, y AS x FROM u LIMIT 1)");
        let expected = [
            "a = (SELECT x FROM u ORDER BY x, y LIMIT 1)",
            "b = (SELECT y FROM u ORDER BY x, y LIMIT 1)",
        ];
        assert_eq!(named, Ok(expected.map(String::from).to_vec()));
        let wild = assigned("UPDATE t SET (a, b) = (SELECT * FROM u)").unwrap();
        assert_eq!(
            wild[1],
            "b = (SELECT \"#1\" FROM (SELECT * FROM u) AS \"#s\" (\"#0\", \"#1\"))"
        );
    }

    #[test]
    fn what_is_no_row_of_the_columns_is_refused() {
        assert_eq!(assigned("UPDATE t SET (a, b) = 1"), Err(("0A000", Some(23))));
        assert_eq!(assigned("UPDATE t SET (a, b) = (1, 2, 3)"), Err(("42601", Some(23))));
        assert_eq!(assigned("UPDATE t SET (a, b) = (SELECT 1)"), Err(("42601", Some(23))));
    }
}
