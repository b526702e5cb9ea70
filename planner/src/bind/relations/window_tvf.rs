//! `TUMBLE(relation, time, size [, offset])`, `HOP(relation, time, slide, size [, offset])` and
//! `SESSION(relation, time, gap [, key, …])`.
//!
//! All add `window_start` and `window_end` to the relation's columns; rows without a time vanish.
//! They are ordinary plans, so that batch runs them as they are:
//!
//! ```text
//! TUMBLE:  Projection: rel.*, window_start, window_end(window_start, size)
//!            Projection: rel.*, tumble_start(time, size, offset) AS window_start
//!              Filter: time IS NOT NULL
//!                rel
//! HOP:     Projection: rel.*, window_start, window_end(window_start, size)
//!            Unnest: window_start
//!              Projection: rel.*, hop_windows(time, slide, size, offset) AS window_start
//!                Filter: time IS NOT NULL
//!                  rel
//! SESSION: Projection: rel.*, session_start(…) AS window_start, session_end(…) AS window_end
//!            Window: session_start(time, gap), session_end(time, gap)
//!                    OVER (PARTITION BY key, … ORDER BY time)
//!              Filter: time IS NOT NULL
//!                rel
//! ```
//!
//! Without an alias the columns of `rel` keep the relation's name, and those that no relation gives a name
//! to have the function's (see `named`).
//!
//! Sizes, gaps and offsets are BIGINT literals, in microseconds. TUMBLE needs nothing special in a stream. HOP's
//! `Unnest` is what the stream planner recognises: its list column is a call of `hop_windows`, with
//! a column and three literals (the optimiser may have pruned columns, never this shape), and it
//! becomes the `Hop` operator. `hop_windows` returns the starts in ascending order, one for each of
//! the windows `[start, start + size)` that hold the time; `start` ≡ offset modulo the slide.

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{Column, Result, ScalarValue, TableReference, UnnestOptions};
use datafusion::error::DataFusionError;
use datafusion::logical_expr::expr::WindowFunction;
use datafusion::logical_expr::planner::{PlannedRelation, RelationPlannerContext};
use datafusion::logical_expr::{
    Expr, ExprFunctionExt, ExprSchemable, LogicalPlan, LogicalPlanBuilder, WindowUDF, col, lit,
};
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::external;
use millrace_functions::session::{session_end, session_start};
use millrace_functions::window_fn::{hop_windows, tumble_start, window_end};
use sqlparser::ast::{Expr as SqlExpr, ObjectName, TableAlias, TableFactor};

use super::provider::columns_of;

/// Windows of one row: each is a copy of it.
const MAX_WINDOWS: i64 = 10_000;

pub fn plan(
    function: &str,
    args: Vec<SqlExpr>,
    alias: Option<TableAlias>,
    context: &mut dyn RelationPlannerContext,
) -> Result<PlannedRelation> {
    if function == "session" {
        return session(args, alias, context);
    }
    let hop = function == "hop";
    let required = if hop { 4 } else { 3 };
    if args.len() != required && args.len() != required + 1 {
        let usage = match hop {
            true => "HOP(relation, time_column, slide, size [, offset])",
            false => "TUMBLE(relation, time_column, size [, offset])",
        };
        return Err(wrong_number(function, usage));
    }
    let has_offset = args.len() == required + 1;
    let mut args = args.into_iter();
    let mut next = || args.next().ok_or_else(|| external(SqlError::internal("missing argument")));
    let input = context.plan(table_factor(next()?)?)?;
    let time = context.sql_to_expr(next()?, input.schema())?;
    check_time(&time, &input, function)?;
    let mut interval = |what: &str, positive: bool| -> Result<i64> {
        let e = context.sql_to_expr(next()?, input.schema())?;
        micros(&e, what, positive).map_err(external)
    };
    let slide = if hop { Some(interval("slide", true)?) } else { None };
    let size = interval("size", true)?;
    let offset = if has_offset { interval("offset", false)? } else { 0 };
    if slide.is_some_and(|slide| size % slide != 0) {
        return Err(external(SqlError::unsupported("a HOP size that is no multiple of its slide")));
    }
    if let Some(windows) = slide.map(|slide| size / slide).filter(|n| *n > MAX_WINDOWS) {
        let e = SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!("each row would be in {windows} windows of HOP, more than {MAX_WINDOWS}"),
        );
        return Err(external(e.with_hint("Make the slide longer or the size shorter.")));
    }
    let plan = windows(function, input, time, slide, size, offset)?;
    Ok(PlannedRelation::new(plan, alias))
}

fn wrong_number(function: &str, usage: &str) -> DataFusionError {
    let message = format!("wrong number of arguments to {}", function.to_uppercase());
    let e = SqlError::new(SqlState::UNDEFINED_FUNCTION, message);
    external(e.with_hint(format!("Use {usage}.")))
}

fn session(
    args: Vec<SqlExpr>,
    alias: Option<TableAlias>,
    context: &mut dyn RelationPlannerContext,
) -> Result<PlannedRelation> {
    if args.len() < 3 {
        let usage = "SESSION(relation, time_column, gap [, key_column, …])";
        return Err(wrong_number("session", usage));
    }
    let mut args = args.into_iter();
    let mut next = || args.next().ok_or_else(|| external(SqlError::internal("missing argument")));
    let input = context.plan(table_factor(next()?)?)?;
    let time = context.sql_to_expr(next()?, input.schema())?;
    check_time(&time, &input, "session")?;
    let gap = context.sql_to_expr(next()?, input.schema())?;
    let gap = micros(&gap, "gap", true).map_err(external)?;
    let mut keys = Vec::new();
    for key in args {
        keys.push(context.sql_to_expr(key, input.schema())?);
    }
    if keys.iter().any(|k| !matches!(k, Expr::Column(_))) {
        return Err(external(SqlError::new(
            SqlState::SYNTAX_ERROR,
            "the keys of SESSION must be columns",
        )));
    }
    let columns = columns_of(&input);
    let edge = |function: Arc<WindowUDF>, name: &str| -> Result<Expr> {
        let call = Expr::from(WindowFunction::new(function, vec![time.clone(), lit(gap)]));
        let order = vec![time.clone().sort(true, false)];
        Ok(call.partition_by(keys.clone()).order_by(order).build()?.alias(name))
    };
    let edges = [edge(session_start(), "window_start")?, edge(session_end(), "window_end")?];
    let plan = LogicalPlanBuilder::from(input)
        .filter(time.clone().is_not_null())?
        .window(edges)?
        .project(named("session", columns, [col("window_start"), col("window_end")]))?
        .build()?;
    Ok(PlannedRelation::new(plan, alias))
}

/// The first argument: a name (of a relation or CTE) or a subquery.
fn table_factor(e: SqlExpr) -> Result<TableFactor> {
    let table = |name: ObjectName| TableFactor::Table {
        name,
        alias: None,
        args: None,
        with_hints: Vec::new(),
        version: None,
        with_ordinality: false,
        partitions: Vec::new(),
        json_path: None,
        sample: None,
        index_hints: Vec::new(),
    };
    match e {
        SqlExpr::Identifier(i) => Ok(table(ObjectName::from(vec![i]))),
        SqlExpr::CompoundIdentifier(parts) => Ok(table(ObjectName::from(parts))),
        SqlExpr::Subquery(subquery) => {
            Ok(TableFactor::Derived { lateral: false, subquery, alias: None, sample: None })
        }
        SqlExpr::Nested(inner) => table_factor(*inner),
        _ => Err(external(SqlError::new(
            SqlState::SYNTAX_ERROR,
            "the first argument of a window function in FROM must be a relation or a subquery",
        ))),
    }
}

fn check_time(time: &Expr, input: &LogicalPlan, function: &str) -> Result<()> {
    let function = function.to_uppercase();
    if !matches!(time, Expr::Column(_)) {
        return Err(external(SqlError::new(
            SqlState::SYNTAX_ERROR,
            format!("the second argument of {function} must be a column"),
        )));
    }
    match time.get_type(input.schema())? {
        DataType::Timestamp(_, _) => Ok(()),
        other => Err(external(SqlError::new(
            SqlState::DATATYPE_MISMATCH,
            format!(
                "the time column of {function} must be a timestamp, not {}",
                millrace_functions::types::type_name(&Some(other))
            ),
        ))),
    }
}

/// The microseconds of an interval literal without months.
fn micros(e: &Expr, what: &str, positive: bool) -> Result<i64, SqlError> {
    let Expr::Literal(ScalarValue::IntervalMonthDayNano(Some(i)), _) = e else {
        return Err(SqlError::new(
            SqlState::DATATYPE_MISMATCH,
            format!("the window {what} must be a constant interval"),
        ));
    };
    let us = i128::from(i.days) * 86_400_000_000 + i128::from(i.nanoseconds / 1000);
    match i64::try_from(us) {
        Ok(us) if i.months == 0 && (us > 0 || !positive) => Ok(us),
        _ => Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!("the window {what} must be a positive interval of days or less"),
        )),
    }
}

/// The columns of a window function in FROM. As in PostgreSQL the function's name stands for an alias: a column
/// without any is ambiguous beside the same name of another relation, as in `window_start IN (SELECT window_start …)`.
fn named(function: &str, columns: Vec<Expr>, edges: [Expr; 2]) -> Vec<Expr> {
    let qualified = |e: Expr| {
        let name = match &e {
            Expr::Column(Column { relation: None, name, .. }) => name.clone(),
            Expr::Alias(alias) => alias.name.clone(),
            _ => return e,
        };
        e.unalias().alias_qualified(Some(TableReference::bare(function)), name)
    };
    columns.into_iter().chain(edges).map(qualified).collect()
}

fn windows(
    function: &str,
    input: LogicalPlan,
    time: Expr,
    slide: Option<i64>,
    size: i64,
    offset: i64,
) -> Result<LogicalPlan> {
    let columns = columns_of(&input);
    let start = match slide {
        None => tumble_start().call(vec![time.clone(), lit(size), lit(offset)]),
        Some(slide) => hop_windows().call(vec![time.clone(), lit(slide), lit(size), lit(offset)]),
    };
    let with_start = columns.iter().cloned().chain([start.alias("window_start")]);
    let mut plan =
        LogicalPlanBuilder::from(input).filter(time.is_not_null())?.project(with_start)?;
    if slide.is_some() {
        let options = UnnestOptions::new().with_preserve_nulls(false);
        let column = Column::from_name("window_start");
        plan = plan.unnest_column_with_options(column, options)?;
    }
    let end = window_end().call(vec![col("window_start"), lit(size)]).alias("window_end");
    plan.project(named(function, columns, [col("window_start"), end]))?.build()
}
