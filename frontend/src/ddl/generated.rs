//! Generated columns: `c type GENERATED ALWAYS AS (expr) STORED`, and `c AS expr` of the expression's type.
//!
//! A table stores them: DML computes them with the other columns, a connector's rows get them from a
//! small job graph that is stored with the table. A source's are part of every query over it. The one
//! expression that is not a function of the row is `PROCTIME()`, the time of arrival.

use arrow::array::{Array, ArrayRef, RecordBatch};
use bytes::Bytes;
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_graph::codec::encode_graph;
use millrace_planner::Binder;
use millrace_planner::stream::{JobOptions, Sink, plan_job};
use millrace_rpc::catalog::{Column, ColumnType, Relation, RelationKind};
use sqlparser::ast::Expr;

use crate::dml::{assign, rewrite, rows};
use crate::session::Session;

/// Stands for the type of a column that has not been written down.
pub const UNTYPED: ColumnType = ColumnType { oid: 705, typmod: -1 };
/// How PROCTIME() is stored.
const PROCTIME: &str = "proctime()";
/// The relation that expressions are over.
const OVER: &str = "generated_over";

pub fn is_proctime(column: &Column) -> bool {
    column.generated_sql.as_deref() == Some(PROCTIME)
}

/// Whether its values follow from the row's other columns.
pub fn is_computed(column: &Column) -> bool {
    column.generated_sql.is_some() && !is_proctime(column)
}

/// Checks the expressions of generated columns, and gives those without a type theirs.
pub fn resolve(
    session: &Session,
    kind: RelationKind,
    columns: &mut [Column],
) -> Result<(), SqlError> {
    let names: Vec<String> =
        columns.iter().filter(|c| c.generated_sql.is_some()).map(|c| c.name.clone()).collect();
    if names.is_empty() {
        return Ok(());
    }
    let plain: Vec<Column> =
        columns.iter().filter(|c| c.generated_sql.is_none()).cloned().collect();
    for column in columns.iter_mut() {
        let Some(text) = column.generated_sql.clone() else { continue };
        if column.default_sql.is_some() {
            return Err(SqlError::new(
                SqlState::SYNTAX_ERROR,
                format!(
                    "both default and generation expression specified for column \"{}\"",
                    column.name
                ),
            ));
        }
        resolve_one(session, kind, column, &text, (plain.as_slice(), names.as_slice()))?;
    }
    Ok(())
}

fn resolve_one(
    session: &Session,
    kind: RelationKind,
    column: &mut Column,
    text: &str,
    (plain, generated): (&[Column], &[String]),
) -> Result<(), SqlError> {
    let expr = rewrite::parse_expr(text)?;
    let declared = (column.sql_type != UNTYPED).then(|| column.sql_type()).transpose()?;
    let time = matches!(&expr, Expr::Function(f)
        if f.name.to_string().eq_ignore_ascii_case("proctime"));
    if time {
        if declared.is_some_and(|t| t != SqlType::Timestamptz) {
            return Err(SqlError::new(
                SqlState::DATATYPE_MISMATCH,
                format!(
                    "column \"{}\" is PROCTIME(), which is timestamp with time zone",
                    column.name
                ),
            ));
        }
        column.sql_type = SqlType::Timestamptz.into();
        column.generated_sql = Some(PROCTIME.to_owned());
        return Ok(());
    }
    let over = Relation { columns: plain.to_vec(), ..over() };
    let bound = bind(session, &over, text).map_err(|e| refers(e, generated))?;
    millrace_planner::check_view_volatility(&bound.plan).map_err(|_| {
        SqlError::new(SqlState::INVALID_OBJECT_DEFINITION, "generation expression is not immutable")
    })?;
    let Some(from) = bound.types.first().copied() else {
        return Err(SqlError::internal("a generated column without a type"));
    };
    match declared {
        None => column.sql_type = from.into(),
        Some(to) => {
            assign::check(from, &column.name, to).map_err(|mut e| {
                e.message =
                    e.message.replace(" but expression is", " but generation expression is");
                e
            })?;
            // A table checks the length of what it stores, where a cast would cut.
            if from != to && !(kind == RelationKind::Table && has_length(to)) {
                column.generated_sql = Some(format!("CAST({text} AS {to})"));
            }
        }
    }
    Ok(())
}

/// Whether texts of the type can be too long.
fn has_length(t: SqlType) -> bool {
    matches!(t, SqlType::Varchar(Some(_)) | SqlType::Char(_))
}

/// PostgreSQL's word for an expression over another generated column.
fn refers(e: SqlError, generated: &[String]) -> SqlError {
    let named = |name: &&String| e.message.contains(&format!("\"{name}\""));
    match generated.iter().find(named) {
        Some(name) if e.state == SqlState::UNDEFINED_COLUMN => SqlError::new(
            SqlState::INVALID_OBJECT_DEFINITION,
            format!("cannot use generated column \"{name}\" in column generation expression"),
        )
        .with_detail("A generated column cannot reference another generated column."),
        _ => e,
    }
}

fn over() -> Relation {
    Relation {
        name: OVER.to_owned(),
        kind: RelationKind::Source as i32,
        append_only: true,
        ..Relation::default()
    }
}

fn bind(
    session: &Session,
    over: &Relation,
    exprs: &str,
) -> Result<millrace_planner::BoundQuery, SqlError> {
    let query = rewrite::parse_query(&format!("SELECT {exprs} FROM {OVER}"))?;
    let mut view = session.catalog_view();
    let empty = RecordBatch::new_empty(over.arrow_schema()?);
    view.add_temporary(over.clone(), rows::mem_table(empty)?);
    Binder::new(&view, session.info(true)).query(&query, &[])
}

/// All columns of a table, in their order, of a query that gives those that are not computed from others.
pub fn over_rows(table: &Relation, rows: String) -> Result<String, SqlError> {
    if !table.columns.iter().any(is_computed) {
        return Ok(rows);
    }
    let mut items = Vec::new();
    for column in table.columns.iter().filter(|c| !c.hidden) {
        let plain = || format!("\"{}\"", column.name.replace('"', "\"\""));
        items.push(cut(column)?.unwrap_or_else(plain));
    }
    Ok(format!("SELECT {} FROM ({rows}) AS {OVER}", items.join(", ")))
}

/// A value with as many digits of its seconds as the column has.
pub fn rounded(column: &Column, value: String) -> String {
    match column.sql_type.second_digits() {
        Some(digits) => format!("round_seconds({value}, {digits})"),
        None => value,
    }
}

/// A column's expression as the rows of a connector or a sink get it: there is no statement to refuse, so a text that
/// is too long is cut.
fn cut(column: &Column) -> Result<Option<String>, SqlError> {
    let Some(sql) = column.generated_sql.as_ref().filter(|_| is_computed(column)) else {
        return Ok(None);
    };
    let t = column.sql_type()?;
    let value = match has_length(t) {
        true => format!("CAST(({sql}) AS {t})"),
        false => format!("({sql})"),
    };
    let value = rounded(column, value);
    Ok(Some(format!("{value} AS \"{}\"", column.name.replace('"', "\"\""))))
}

/// The graph that computes a table's generated columns from its other columns; empty when it has none
/// but the time of arrival.
pub fn graph(session: &Session, table: &Relation) -> Result<Bytes, SqlError> {
    let exprs: Vec<String> =
        table.columns.iter().filter_map(|c| cut(c).transpose()).collect::<Result<_, _>>()?;
    if exprs.is_empty() {
        return Ok(Bytes::new());
    }
    // Positions are the table's: generated columns stay, as columns nobody reads. So does the row id, and
    // it is not hidden here: hiding puts a scan by catalog name in between, and this relation has none.
    let stripped = |c: &Column| Column { generated_sql: None, hidden: false, ..c.clone() };
    let over = Relation { columns: table.columns.iter().map(stripped).collect(), ..over() };
    let query = rewrite::parse_query(&format!("SELECT {} FROM {OVER}", exprs.join(", ")))?;
    let mut view = session.catalog_view();
    let empty = RecordBatch::new_empty(over.arrow_schema()?);
    view.add_temporary(over.clone(), rows::mem_table(empty)?);
    let bound = Binder::new(&view, session.info(true)).query(&query, &[])?;
    let graph = plan_job(
        &bound,
        &view,
        &JobOptions { sink: Sink::Blackhole, on_window_close: false, ttl_us: None },
    )?;
    encode_graph(&graph).map_err(SqlError::from)
}

/// Computes the generated columns of rows that a statement writes.
pub async fn fill(
    session: &Session,
    table: &Relation,
    columns: &mut [ArrayRef],
    count: usize,
) -> Result<(), SqlError> {
    let generated: Vec<usize> =
        (0..table.columns.len()).filter(|&i| table.columns[i].generated_sql.is_some()).collect();
    if generated.is_empty() || count == 0 {
        return Ok(());
    }
    let stripped: Vec<Column> =
        table.columns.iter().map(|c| Column { generated_sql: None, ..c.clone() }).collect();
    let over = Relation { columns: stripped, ..over() };
    let schema = rows::nullable(over.arrow_schema()?.as_ref());
    let batch = rows::batch(&schema, columns.to_vec(), count)?;
    let numbers = arrow::array::UInt32Array::from_iter_values(0..count as u32);
    let (relation, numbered) = rows::with_row_number(&over, OVER, &batch, numbers)?;
    let mut query = rewrite::empty_query()?;
    let select = rewrite::select_of(&mut query)?;
    select.projection.clear();
    for &i in &generated {
        let column = &table.columns[i];
        let text = match is_proctime(column) {
            true => "now()",
            false => column.generated_sql.as_deref().unwrap_or("NULL"),
        };
        select.projection.push(rewrite::item(rewrite::parse_expr(text)?, &format!("g{i}")));
    }
    select.projection.push(rewrite::item(rewrite::column(OVER, rows::ROW_NUMBER), "n"));
    select.from = vec![rewrite::table_ref(None, OVER)];
    let mut view = session.catalog_view();
    view.add_temporary(relation, rows::mem_table(numbered)?);
    // The same values for everybody: in UTC.
    let batches = match session.settings.zone() {
        None => session.collect(&view, &query).await?.1,
        Some(_) => session.collect_in_utc(&view, &query).await?,
    };
    let Some(first) = batches.first() else {
        return Err(SqlError::internal("generated columns came back without rows"));
    };
    let all =
        arrow::compute::concat_batches(&first.schema(), &batches).map_err(rows::arrow_error)?;
    // In the order of the rows, whatever the engine made of it.
    let order = arrow::compute::sort_to_indices(all.column(generated.len()), None, None)
        .map_err(rows::arrow_error)?;
    for (at, &i) in generated.iter().enumerate() {
        let column = &table.columns[i];
        let sorted =
            arrow::compute::take(all.column(at), &order, None).map_err(rows::arrow_error)?;
        columns[i] = assign::assign(&sorted, &column.name, column.sql_type()?)?;
    }
    match columns.iter().all(|c| c.len() == count) {
        true => Ok(()),
        false => Err(SqlError::internal("generated columns came back with other rows")),
    }
}

/// PostgreSQL's error for a value given for a generated column.
pub fn refuse_value(column: &Column, insert: bool) -> Result<(), SqlError> {
    if column.generated_sql.is_none() {
        return Ok(());
    }
    let name = &column.name;
    let message = match insert {
        true => format!("cannot insert a non-DEFAULT value into column \"{name}\""),
        false => format!("column \"{name}\" can only be updated to DEFAULT"),
    };
    Err(SqlError::new(SqlState("428C9"), message)
        .with_detail(format!("Column \"{name}\" is a generated column.")))
}
