//! From an optimised logical plan to a job graph (docs/design.md §5).
//!
//! `convert` turns DataFusion's nodes into our algebra (`plan`); the passes in [`crate::passes`]
//! prune, bound ranks and place exchanges; `fragment` cuts the result into fragments with state
//! tables. Whatever a view cannot have is refused here with SQLSTATE 0A000 and its name.

mod aggregate;
pub mod compile;
mod convert;
mod fragment;
mod index;
mod join;
mod lookup;
pub mod operators;
mod order;
mod outputs;
pub mod plan;
pub mod tables;
pub mod temporal;
mod window;
mod window_tvf;

use std::collections::HashSet;

use arrow::datatypes::{Field, Schema};
use datafusion::common::DFSchema;
use datafusion::logical_expr::{ExprSchemable, LogicalPlan};
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::interrupt;
use millrace_functions::types::type_name;
use millrace_graph::JobGraph;
use millrace_graph::codec::encode_watermark;

use crate::bind::{Binder, BoundQuery, check_view_volatility};
use crate::catalog::CatalogView;
use crate::optimizer::optimize_for_view;
use crate::passes::{exchange, passes, share};
use crate::stream::compile::compile;
use plan::Stream;

pub use index::plan_index;

/// What becomes of a job's result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sink {
    /// Stored as the relation's rows.
    #[default]
    Materialize,
    /// Computed and counted, not stored.
    Blackhole,
    /// Each epoch's change is handed on to a target.
    Publish(SinkKey),
}

/// What tells the rows of a sink apart for its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SinkKey {
    /// Nothing that the target would see.
    None,
    /// Any unique key among the query's columns.
    Derived,
    /// These columns, which must contain a unique key.
    Given(Vec<usize>),
}

#[derive(Clone, Debug, Default)]
pub struct JobOptions {
    pub sink: Sink,
    /// EMIT ON WINDOW CLOSE.
    pub on_window_close: bool,
    /// How long rows of the inputs count, in microseconds from when they are processed.
    pub ttl_us: Option<i64>,
}

/// Told of the plan after each pass, by the pass's name.
pub type Watch<'a> = &'a mut dyn FnMut(&'static str, &Stream);

/// Plans the job that maintains a query's result: optimises, then [`plan_logical`].
pub fn plan_job(
    query: &BoundQuery,
    catalog: &dyn CatalogView,
    options: &JobOptions,
) -> Result<JobGraph, SqlError> {
    plan_watched(query, catalog, options, &mut |_, _| {})
}

/// [`plan_job`], watched.
pub fn plan_watched(
    query: &BoundQuery,
    catalog: &dyn CatalogView,
    options: &JobOptions,
    watch: Watch<'_>,
) -> Result<JobGraph, SqlError> {
    check_view_volatility(&query.plan)?;
    let optimised = optimize_for_view(query.plan.clone())?;
    let columns: Vec<(String, SqlType)> =
        query.names.iter().cloned().zip(query.types.iter().copied()).collect();
    plan_logical(&optimised, &columns, catalog, options, watch)
}

/// Plans the job of a logical plan that is already optimised. `columns`: names and types of the
/// relation, which the plan's own are cast to.
fn plan_logical(
    plan: &LogicalPlan,
    columns: &[(String, SqlType)],
    catalog: &dyn CatalogView,
    options: &JobOptions,
    watch: Watch<'_>,
) -> Result<JobGraph, SqlError> {
    let converter = convert::Converter::new(catalog);
    let stream = converter.convert(plan)?;
    converter.check_lookups()?;
    let mut stream = name_columns(stream, columns)?;
    watch("convert", &stream);
    for pass in passes(options, columns.len()) {
        interrupt::check()?;
        stream = pass.run(stream)?;
        watch(pass.name(), &stream);
    }
    interrupt::check()?;
    let placed = exchange::place(stream);
    watch("place exchanges", &placed.0);
    interrupt::check()?;
    let (stream, layout) = fragment::lay_out(placed, &options.sink, columns.len())?;
    watch("lay out the result", &stream);
    interrupt::check()?;
    let stream = share::mark_common(stream)?;
    watch("mark common subplans", &stream);
    fragment::fragment(stream, layout, &options.sink)
}

/// A watermark's expression over a relation's columns, compiled and encoded for the catalog. Its result
/// has the watermark column's type.
pub fn compile_watermark(
    binder: &Binder<'_>,
    expr: &sqlparser::ast::Expr,
    schema: &Schema,
    typed: SqlType,
) -> Result<prost::bytes::Bytes, SqlError> {
    let columns = DFSchema::try_from(schema.clone()).map_err(sql_error_from_datafusion)?;
    let bound = binder.expr(expr, &columns, None)?;
    let found = bound.get_type(&columns).map_err(sql_error_from_datafusion)?;
    if found != typed.to_arrow() {
        return Err(SqlError::new(
            SqlState::DATATYPE_MISMATCH,
            format!(
                "the watermark expression is of type {}, its column of type {typed}",
                type_name(&Some(found))
            ),
        ));
    }
    Ok(encode_watermark(&compile(&bound, &columns)?)?)
}

/// The relation's own column names and types. A name that appears twice is an error.
fn name_columns(stream: Stream, columns: &[(String, SqlType)]) -> Result<Stream, SqlError> {
    let mut seen = HashSet::new();
    for (name, _) in columns {
        if !seen.insert(name.as_str()) {
            let message = format!("column \"{name}\" specified more than once");
            return Err(SqlError::new(SqlState::DUPLICATE_COLUMN, message)
                .with_hint("Give one of them another name with AS."));
        }
    }
    if columns.len() != stream.width() {
        return Err(SqlError::internal("the plan and its column names differ in number"));
    }
    let fields: Vec<Field> =
        columns.iter().map(|(name, t)| Field::new(name, t.to_arrow(), true)).collect();
    convert::cast_to(stream, &Schema::new(fields))
}
