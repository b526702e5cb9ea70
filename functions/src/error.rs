//! SQL errors inside DataFusion's errors, and back.
//!
//! Our functions and planners raise [`SqlError`]s with their SQLSTATE; DataFusion carries them as
//! `External`. [`sql_error_from_datafusion`] finds them again under whatever context was wrapped
//! around them, and gives DataFusion's own errors the state and wording that PostgreSQL has.

use datafusion::common::SchemaError;
use datafusion::error::DataFusionError;
use datafusion::error::DataFusionError as DfError;
use millrace_common::{SqlError, SqlState};

/// A [`SqlError`] on its way through DataFusion.
pub fn external(e: SqlError) -> DataFusionError {
    DfError::External(Box::new(e))
}

/// How the text of an error for want of memory begins; behind it stand how much queries may have, a colon and the
/// particulars.
pub const QUERY_MEMORY: &str = "queries may have ";

/// Turns any error of planning or executing with DataFusion into what the client sees.
pub fn sql_error_from_datafusion(e: DataFusionError) -> SqlError {
    // What was wrapped around it, perhaps in an error that others hold too, only says where it came up.
    if let DfError::ResourcesExhausted(m) = e.find_root() {
        return out_of_memory(m);
    }
    match e {
        DfError::External(inner) => from_boxed(inner),
        DfError::Context(_, inner) | DfError::Diagnostic(_, inner) => {
            sql_error_from_datafusion(*inner)
        }
        DfError::Collection(mut errors) if !errors.is_empty() => {
            sql_error_from_datafusion(errors.swap_remove(0))
        }
        DfError::Shared(shared) => match std::sync::Arc::try_unwrap(shared) {
            Ok(e) => sql_error_from_datafusion(e),
            Err(shared) => from_shared(&shared),
        },
        DfError::ArrowError(arrow, _) => from_arrow(*arrow),
        DfError::SchemaError(schema, _) => from_schema(*schema),
        DfError::NotImplemented(m) => match unplanned(&m) {
            Some(e) => e,
            None => SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, tidy(&m)),
        },
        DfError::Plan(m) => from_plan_message(&m),
        DfError::Execution(m) => from_execution_message(&m),
        DfError::SQL(parser, _) => SqlError::new(SqlState::SYNTAX_ERROR, tidy(&parser.to_string())),
        other => {
            let text = other.strip_backtrace();
            SqlError::internal(tidy(&text))
        }
    }
}

fn out_of_memory(m: &str) -> SqlError {
    let text = m.lines().map(str::trim).find(|l| !l.is_empty()).unwrap_or_default();
    let limited = text.split_once(QUERY_MEMORY).and_then(|(_, rest)| rest.split_once(": "));
    let (limit, particulars) = match limited {
        Some((size, rest)) => (format!(" ({size})"), rest),
        None => (String::new(), text),
    };
    let message = format!("the query needs more memory than queries may have{limit}");
    SqlError::new(SqlState::OUT_OF_MEMORY, message)
        .with_detail(format!("{}.", particulars.trim_end_matches('.')))
        .with_hint("Raise --memory-limit, or make the query smaller.")
}

/// What says that a correlated subquery is beyond what is taken apart.
pub fn correlated() -> SqlError {
    SqlError::unsupported("this kind of correlated subquery").with_hint("Write it as a join.")
}

/// What is said of an expression that DataFusion has no execution for: it shows its own form of it.
fn unplanned(m: &str) -> Option<SqlError> {
    if m.contains("OuterReferenceColumn") {
        return Some(correlated());
    }
    let (_, shown) = m.split_once("does not support logical expression ")?;
    let kind = shown.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
    Some(match kind {
        "ScalarSubquery" | "Exists" | "InSubquery" | "SetComparison" => correlated(),
        "WindowFunction" => {
            SqlError::new(SqlState("42P20"), "window functions are not allowed here")
        }
        "AggregateFunction" => {
            SqlError::new(SqlState::GROUPING_ERROR, "aggregate functions are not allowed here")
        }
        _ => SqlError::unsupported("an expression of this kind in this place"),
    })
}

fn from_boxed(inner: Box<dyn std::error::Error + Send + Sync>) -> SqlError {
    match inner.downcast::<SqlError>() {
        Ok(e) => *e,
        Err(other) => match other.downcast::<DataFusionError>() {
            Ok(e) => sql_error_from_datafusion(*e),
            Err(other) => SqlError::internal(tidy(&other.to_string())),
        },
    }
}

/// An error that others hold too: the SQL error is cloned out of it.
fn from_shared(e: &DataFusionError) -> SqlError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(e);
    while let Some(s) = source {
        if let Some(sql) = s.downcast_ref::<SqlError>() {
            return sql.clone();
        }
        source = s.source();
    }
    from_execution_message(&e.strip_backtrace())
}

fn from_execution_message(m: &str) -> SqlError {
    if m.to_lowercase().contains("scalar subquery returned more than one row") {
        let message = "more than one row returned by a subquery used as an expression";
        return SqlError::new(SqlState::CARDINALITY_VIOLATION, message);
    }
    if m.contains("ORDER BY expressions must appear in argument list") {
        return SqlError::new(SqlState("42P10"), tidy(m));
    }
    SqlError::new(SqlState::DATA_EXCEPTION, tidy(m))
}

fn from_arrow(e: arrow::error::ArrowError) -> SqlError {
    use arrow::error::ArrowError as A;
    match e {
        A::ExternalError(inner) => from_boxed(inner),
        A::DivideByZero => division_by_zero(),
        A::ArithmeticOverflow(_) => {
            SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, "value out of range")
        }
        A::CastError(m) if m.to_lowercase().contains("casting from struct(") => {
            SqlError::unsupported("a row as a value of this expression")
        }
        A::CastError(m) => SqlError::new(SqlState::INVALID_TEXT_REPRESENTATION, tidy(&m)),
        other => SqlError::new(SqlState::DATA_EXCEPTION, tidy(&other.to_string())),
    }
}

fn from_schema(e: SchemaError) -> SqlError {
    match e {
        SchemaError::FieldNotFound { field, valid_fields }
            if field.relation.as_ref().is_some_and(|r| {
                let tables = valid_fields.iter().filter_map(|c| c.relation.as_ref());
                !tables.into_iter().any(|t| t.table() == r.table())
            }) =>
        {
            let table = field.relation.as_ref().map_or("", |r| r.table());
            let message = format!("missing FROM-clause entry for table \"{table}\"");
            SqlError::new(SqlState::UNDEFINED_TABLE, message)
        }
        SchemaError::FieldNotFound { field, valid_fields } => {
            let shown = match &field.relation {
                Some(r) => format!("{}.{}", r.table(), field.name),
                None => format!("\"{}\"", field.name),
            };
            let e =
                SqlError::new(SqlState::UNDEFINED_COLUMN, format!("column {shown} does not exist"));
            let names = valid_fields.iter().map(|c| {
                let relation = c.relation.as_ref().map(|r| r.table().to_owned());
                (c.name.as_str(), relation)
            });
            match closest(&field.name, names.clone().map(|(n, _)| n)) {
                Some(name) => {
                    let relation = names.filter(|(n, _)| *n == name).find_map(|(_, r)| r);
                    let full = relation.map_or(name.to_owned(), |r| format!("{r}.{name}"));
                    e.with_hint(format!("Perhaps you meant to reference the column \"{full}\"."))
                }
                None => e,
            }
        }
        SchemaError::AmbiguousReference { field } => SqlError::new(
            SqlState::AMBIGUOUS_COLUMN,
            format!("column reference \"{}\" is ambiguous", field.name),
        ),
        SchemaError::DuplicateQualifiedField { qualifier, .. } => SqlError::new(
            SqlState("42712"),
            format!("table name \"{}\" specified more than once", qualifier.table()),
        ),
        SchemaError::DuplicateUnqualifiedField { name } => SqlError::new(
            SqlState::DUPLICATE_COLUMN,
            format!("column \"{name}\" specified more than once"),
        ),
    }
}

/// DataFusion has no codes for planning errors; the few that users meet are told by their words.
fn from_plan_message(m: &str) -> SqlError {
    let text = tidy(m);
    if let Some(name) = text.strip_prefix("invalid function '").and_then(|t| t.split('\'').next()) {
        return SqlError::new(
            SqlState::UNDEFINED_FUNCTION,
            format!("function {name} does not exist"),
        );
    }
    // An error of ours that DataFusion wrapped into words while it resolved a function.
    if let Some(inner) = text.split("coercion failed with: External error: ").nth(1) {
        let message = inner.split(" No function matches").next().unwrap_or(inner);
        let message = message.trim_end().trim_end_matches('.');
        if let Some(what) = message.strip_suffix(" is not supported") {
            return SqlError::unsupported(what);
        }
        return SqlError::new(SqlState::UNDEFINED_FUNCTION, message).with_hint(call_hint(message));
    }
    if let Some(e) = in_postgres_words(&text) {
        return e;
    }
    let lower = text.to_lowercase();
    let state = if lower.contains("must appear in the group by clause")
        || lower.contains("in the select list must appear")
        || lower.contains("having clause references")
    {
        SqlState::GROUPING_ERROR
    } else if lower.contains("invalid function") || lower.contains("no function matches") {
        SqlState::UNDEFINED_FUNCTION
    } else if lower.contains("types") || lower.contains("coerc") || lower.contains("cannot cast") {
        SqlState::DATATYPE_MISMATCH
    } else if lower.contains("not supported") || lower.contains("unsupported") {
        SqlState::FEATURE_NOT_SUPPORTED
    } else {
        SqlState::SYNTAX_ERROR
    };
    SqlError::new(state, text)
}

/// PostgreSQL's error for what DataFusion's planner says in other words.
fn in_postgres_words(text: &str) -> Option<SqlError> {
    of_types(text).or_else(|| of_clauses(text)).or_else(|| of_counts(text))
}

fn of_types(text: &str) -> Option<SqlError> {
    let some = |state, message: String| Some(SqlError::new(state, message));
    let after = |mark: &str| after(text, mark);
    if let Some(call) = after("argument types '").and_then(|t| t.split('\'').next()) {
        return Some(undefined_function(&call_in_sql(call)));
    }
    if let Some(t) = after("non-boolean predicate '").and_then(|_| after("returning ")) {
        let aggregate = ["count(", "sum(", "min(", "max(", "avg("].iter().any(|f| text.contains(f));
        let clause = if aggregate { "HAVING" } else { "WHERE" };
        let message = format!(
            "argument of {clause} must be type boolean, not type {}",
            type_in_sql(&first_word(t))
        );
        return some(SqlState::DATATYPE_MISMATCH, message);
    }
    if let Some(t) = after("'NOT' requires a boolean expression, got ") {
        let t = type_in_sql(&first_word(t));
        let message = format!("argument of NOT must be type boolean, not type {t}");
        return some(SqlState::DATATYPE_MISMATCH, message);
    }
    None
}

/// Of what a clause may not have in it.
fn of_clauses(text: &str) -> Option<SqlError> {
    let some = |state, message: String| Some(SqlError::new(state, message));
    let after = |mark: &str| after(text, mark);
    if let Some(column) = after("SELECT must be in GROUP BY").and_then(|_| text.split('"').nth(1)) {
        return some(
            SqlState::GROUPING_ERROR,
            format!(
                "column \"{column}\" must appear in the GROUP BY clause or be used in an aggregate \
                 function"
            ),
        );
    }
    const NOT_DECORRELATED: [&str; 4] = [
        "correlated scalar subquery ",
        "accessing outer reference columns is not allowed",
        "subquery can only be used in ",
        "unsupported operator in the subquery plan",
    ];
    let lower = text.to_lowercase();
    if NOT_DECORRELATED.iter().any(|words| lower.contains(words)) {
        return Some(correlated());
    }
    if lower.starts_with("for select distinct, order by expressions ") {
        let message = "for SELECT DISTINCT, ORDER BY expressions must appear in select list";
        return some(SqlState("42P10"), message.into());
    }
    if text.starts_with("aggregate functions are not allowed in the WHERE clause") {
        return some(
            SqlState::GROUPING_ERROR,
            "aggregate functions are not allowed in WHERE".into(),
        );
    }
    if text.starts_with("aggregate function calls cannot be nested") {
        let message = "aggregate function calls cannot be nested";
        return some(SqlState::GROUPING_ERROR, message.into());
    }
    None
}

/// Of numbers of columns, of rows, and of positions.
fn of_counts(text: &str) -> Option<SqlError> {
    let some = |state, message: String| Some(SqlError::new(state, message));
    let after = |mark: &str| after(text, mark);
    if text.starts_with("too many columns! The subquery") {
        return some(SqlState::SYNTAX_ERROR, "subquery must return only one column".into());
    }
    if text.contains("names given as column alias") {
        let mut counts = text.split(' ').filter_map(|w| w.parse::<usize>().ok());
        let (has, named) = (counts.next()?, counts.next()?);
        if has > named {
            return some(SqlState::SYNTAX_ERROR, "subquery has too many columns".into());
        }
        let message = format!("table has {has} columns available but {named} columns specified");
        return some(SqlState("42P10"), message);
    }
    if text.starts_with("inconsistent data length across values list") {
        return some(SqlState::SYNTAX_ERROR, "VALUES lists must all be the same length".into());
    }
    if text.contains("queries have different number of columns") {
        let operator = text.split(' ').next().unwrap_or("UNION");
        let message = format!("each {operator} query must have the same number of columns");
        return some(SqlState::SYNTAX_ERROR, message);
    }
    if text.starts_with("LIMIT must be >") {
        return some(SqlState("2201W"), "LIMIT must not be negative".into());
    }
    if text.starts_with("OFFSET must be >") {
        return some(SqlState("2201X"), "OFFSET must not be negative".into());
    }
    if let Some(n) = after("column out of bounds, specified: ") {
        let message = format!("ORDER BY position {} is not in select list", first_word(n));
        return some(SqlState("42P10"), message);
    }
    if let Some(n) = after("cannot find column with position ") {
        let message = format!("GROUP BY position {} is not in select list", first_word(n));
        return some(SqlState("42P10"), message);
    }
    None
}

/// What follows a mark.
fn after<'a>(text: &'a str, mark: &str) -> Option<&'a str> {
    text.split_once(mark).map(|(_, rest)| rest)
}

fn first_word(rest: &str) -> String {
    rest.split([' ', ',', '\'']).next().unwrap_or(rest).to_owned()
}

/// 42883 for a call written with its argument types.
pub fn undefined_function(call: &str) -> SqlError {
    let message = format!("function {call} does not exist");
    let hint = call_hint(&message);
    SqlError::new(SqlState::UNDEFINED_FUNCTION, message).with_hint(hint)
}

/// What to do about a call that is not known. Elsewhere windows are made in GROUP BY.
fn call_hint(message: &str) -> &'static str {
    let call = message.strip_prefix("function ").unwrap_or_default();
    match call.split('(').next().unwrap_or_default() {
        "tumble" => {
            "Windows are made in FROM: FROM TUMBLE(table, ts, size), and GROUP BY window_start."
        }
        "hop" => {
            "Windows are made in FROM: FROM HOP(table, ts, slide, size), and GROUP BY window_start."
        }
        "session" => {
            "Windows are made in FROM: FROM SESSION(table, ts, gap, key), and GROUP BY window_start."
        }
        _ => {
            "No function matches the given name and argument types. You might need to add explicit type \
             casts."
        }
    }
}

/// `upper(Int32)` as `upper(integer)`.
fn call_in_sql(call: &str) -> String {
    let Some((name, args)) = call.strip_suffix(')').and_then(|c| c.split_once('(')) else {
        return call.to_owned();
    };
    let args: Vec<String> = args.split(", ").map(type_in_sql).collect();
    format!("{name}({})", args.join(", "))
}

/// The SQL name of an Arrow type's name.
fn type_in_sql(name: &str) -> String {
    match name.parse() {
        Ok(t) => crate::types::type_name(&Some(t)),
        Err(_) => name.to_owned(),
    }
}

/// One line, in lower case at the start, without DataFusion's prefixes and the full stop.
fn tidy(m: &str) -> String {
    let line = m.lines().map(str::trim).find(|l| !l.is_empty()).unwrap_or("unknown error");
    let line = line
        .trim_start_matches("Error during planning: ")
        .trim_start_matches("Execution error: ")
        .trim_start_matches("This feature is not implemented: ")
        .trim_end_matches('.');
    let mut chars = line.chars();
    match (chars.next(), line.chars().nth(1)) {
        (Some(a), Some(b)) if a.is_uppercase() && !b.is_uppercase() => {
            a.to_lowercase().chain(chars).collect()
        }
        _ => line.to_owned(),
    }
}

pub fn division_by_zero() -> SqlError {
    SqlError::new(SqlState::DIVISION_BY_ZERO, "division by zero")
}

/// The candidate that differs least from `name`, if it is close enough to be what was meant.
pub fn closest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (name.chars().count() / 2).clamp(1, 3);
    candidates
        .map(|c| (edit_distance(name, c), c))
        .filter(|(d, c)| *d <= limit && *d < c.chars().count())
        .min_by_key(|(d, _)| *d)
        .map(|(_, c)| c)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().flat_map(char::to_lowercase).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().flat_map(char::to_lowercase).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sql_errors_survive_the_way_through_datafusion() {
        let e = external(division_by_zero()).context("while doing something");
        let back = sql_error_from_datafusion(e);
        assert_eq!(back.state, SqlState::DIVISION_BY_ZERO);
        let shared = std::sync::Arc::new(external(division_by_zero()));
        let e = DataFusionError::Shared(std::sync::Arc::clone(&shared));
        assert_eq!(sql_error_from_datafusion(e).state, SqlState::DIVISION_BY_ZERO);
    }

    #[test]
    fn want_of_memory_is_told_whatever_is_wrapped_around_it() {
        let text = format!("{QUERY_MEMORY}64 MB: Sort[0] has 1 bytes and asks for 2 more");
        let wrapped = DfError::ResourcesExhausted(text).context("Not enough memory");
        let shared = std::sync::Arc::new(wrapped);
        let e = sql_error_from_datafusion(DfError::Shared(std::sync::Arc::clone(&shared)));
        assert_eq!(e.state, SqlState::OUT_OF_MEMORY);
        assert_eq!(e.message, "the query needs more memory than queries may have (64 MB)");
        assert_eq!(e.detail.as_deref(), Some("Sort[0] has 1 bytes and asks for 2 more."));
        let other = DfError::External(Box::new(DfError::ResourcesExhausted("Too much.".into())));
        let e = sql_error_from_datafusion(other);
        assert_eq!(e.message, "the query needs more memory than queries may have");
        assert_eq!(e.detail.as_deref(), Some("Too much."));
    }

    #[test]
    fn suggestions_are_close() {
        assert_eq!(closest("prise", ["price", "bidder"].into_iter()), Some("price"));
        assert_eq!(closest("x", ["price"].into_iter()), None);
    }
}
