//! The `Unnest`s of views: of arrays, with elements as rows, and those that stand for something else. HOP:
//! that of a call of `hop_windows` that the binder makes of it (see `bind::relations::window_tvf`) becomes
//! the hop operator. TUMBLE is a plain projection and needs nothing.

use arrow::datatypes::DataType;
use datafusion::common::ScalarValue;
use datafusion::logical_expr::expr::ScalarFunction;
use datafusion::logical_expr::{Expr, Extension, LogicalPlan, Projection, Unnest};
use datafusion::physical_expr::expressions::IsNotNullExpr;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::expr;
use millrace_functions::expr::ExprRef;
use millrace_functions::window_fn::COPIES;

use crate::stream::compile::compile;
use crate::stream::convert::{Converter, Extended, Result, in_view};
use crate::stream::plan::{Op, Stream};

/// The function whose unnested result is the starts of a row's windows.
const HOP_WINDOWS: &str = "hop_windows";

/// A recognised HOP: the projection below the unnest, which of its columns is the list of starts.
struct Hop<'a> {
    projection: &'a Projection,
    starts: usize,
    time: &'a Expr,
    slide_us: i64,
    size_us: i64,
    offset_us: i64,
}

impl Converter<'_> {
    pub(super) fn unnest(&self, unnest: &Unnest) -> Result<Stream> {
        if let Some((projection, copies)) = recognise_copies(unnest) {
            return self.copies(unnest, projection, copies);
        }
        let Some(hop) = recognise(unnest) else { return self.elements(unnest) };
        let schema = hop.projection.input.schema();
        let time = compile(hop.time, schema)?;
        let input = without_null_check(self.convert(&hop.projection.input)?, &time);
        let mut input = Extended::new(input);
        let time = input.add(time);
        let input = input.finish()?;
        let start = input.width();
        let stream = input.hop(millrace_graph::Hop {
            time_column: time,
            size_us: hop.size_us,
            slide_us: hop.slide_us,
            offset_us: hop.offset_us,
        });
        let mut columns = Vec::with_capacity(unnest.dependency_indices.len());
        for (&from, field) in unnest.dependency_indices.iter().zip(unnest.schema.fields()) {
            let e = match hop.projection.expr.get(from) {
                Some(_) if from == hop.starts => expr::column(&stream.schema, start),
                Some(e) => compile(e, schema)?,
                None => return Err(in_view("unnest")),
            };
            columns.push((e, field.name().clone()));
        }
        stream.project(columns).map_err(sql_error_from_datafusion)
    }

    /// Any other `Unnest`: rows of the elements of arrays.
    fn elements(&self, unnest: &Unnest) -> Result<Stream> {
        let deep = unnest.list_type_columns.iter().any(|(_, list)| list.depth != 1);
        if deep || !unnest.struct_type_columns.is_empty() {
            return Err(in_view("unnest of nested values"));
        }
        let input = self.convert(&unnest.input)?;
        let lists: Vec<usize> = unnest.list_type_columns.iter().map(|(c, _)| *c).collect();
        let is_list = |&c: &usize| matches!(input.schema.field(c).data_type(), DataType::List(_));
        if !lists.iter().all(is_list) {
            return Err(in_view("unnest"));
        }
        let stream = input.unnest(lists, unnest.options.preserve_nulls());
        let outputs = unnest.dependency_indices.iter().zip(unnest.schema.fields());
        let columns = outputs.map(|(&c, f)| (expr::column(&stream.schema, c), f.name().clone()));
        let columns = columns.collect();
        stream.project(columns).map_err(sql_error_from_datafusion)
    }

    /// `copies(n)` that is unnested: rows that are there `n` times. See `bind::relations::set_operations`.
    fn copies(&self, unnest: &Unnest, projection: &Projection, list: usize) -> Result<Stream> {
        let schema = projection.input.schema();
        let times =
            projection.expr.get(list).and_then(scalar_function).and_then(|f| f.args.first());
        let Some(times) = times else { return Err(in_view("unnest")) };
        let mut input = Extended::new(self.convert(&projection.input)?);
        let times = input.add(compile(times, schema)?);
        let stream = input.finish()?.repeat(times);
        let mut columns = Vec::with_capacity(unnest.dependency_indices.len());
        for (&from, field) in unnest.dependency_indices.iter().zip(unnest.schema.fields()) {
            let e = match projection.expr.get(from) {
                Some(_) if from == list => expr::literal(ScalarValue::Boolean(Some(true))),
                Some(e) => compile(e, schema)?,
                None => return Err(in_view("unnest")),
            };
            columns.push((e, field.name().clone()));
        }
        stream.project(columns).map_err(sql_error_from_datafusion)
    }

    pub(super) fn extension(&self, extension: &Extension) -> Result<Stream> {
        Err(in_view(format!("the operator {}", extension.node.name())))
    }
}

/// The hop operator drops rows without a time itself.
fn without_null_check(stream: Stream, time: &ExprRef) -> Stream {
    let Op::Filter(millrace_graph::Filter { predicate }) = &stream.op else { return stream };
    let only_that = predicate.downcast_ref::<IsNotNullExpr>().is_some_and(|e| e.arg() == time);
    if only_that { stream.into_input() } else { stream }
}

fn recognise(unnest: &Unnest) -> Option<Hop<'_>> {
    let LogicalPlan::Projection(projection) = unnest.input.as_ref() else { return None };
    let [(starts, _)] = unnest.list_type_columns.as_slice() else { return None };
    if !unnest.struct_type_columns.is_empty() {
        return None;
    }
    let call = scalar_function(projection.expr.get(*starts)?)?;
    if call.func.name() != HOP_WINDOWS {
        return None;
    }
    let [time, slide, size, offset] = call.args.as_slice() else { return None };
    Some(Hop {
        projection,
        starts: *starts,
        time,
        slide_us: literal(slide)?,
        size_us: literal(size)?,
        offset_us: literal(offset)?,
    })
}

/// The projection with a call of `copies`, and which of its columns that is.
fn recognise_copies(unnest: &Unnest) -> Option<(&Projection, usize)> {
    let LogicalPlan::Projection(projection) = unnest.input.as_ref() else { return None };
    let [(list, _)] = unnest.list_type_columns.as_slice() else { return None };
    let call = scalar_function(projection.expr.get(*list)?)?;
    (call.func.name() == COPIES && unnest.struct_type_columns.is_empty())
        .then_some((projection, *list))
}

fn scalar_function(e: &Expr) -> Option<&ScalarFunction> {
    match e {
        Expr::ScalarFunction(f) => Some(f),
        Expr::Alias(alias) => scalar_function(&alias.expr),
        _ => None,
    }
}

fn literal(e: &Expr) -> Option<i64> {
    match e {
        Expr::Literal(ScalarValue::Int64(v), _) => *v,
        _ => None,
    }
}
