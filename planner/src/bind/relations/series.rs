//! `generate_series` as a relation: values are made a batch at a time as they are asked for, so that a
//! series of any length costs no memory and ends as soon as its reader does.
//!
//! Source: PostgreSQL 15 documentation, 9.25 (set returning functions).

use std::sync::Arc;

use arrow::array::{
    ArrayRef, Decimal128Array, Int32Array, Int64Array, RecordBatch, TimestampMicrosecondArray,
};
use arrow::datatypes::{DataType, Field, IntervalMonthDayNano, Schema, SchemaRef, TimeUnit};
use datafusion::catalog::streaming::StreamingTable;
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::datasource::provider_as_source;
use datafusion::execution::context::ExecutionProps;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::physical_planning_context::PhysicalPlanningContext;
use datafusion::logical_expr::{ColumnarValue, Expr, LogicalPlan, LogicalPlanBuilder};
use datafusion::physical_expr::create_physical_expr;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use millrace_common::zone::Zone;
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::cast::fold_literal;
use millrace_functions::datetime::shift;
use millrace_functions::error::external;
use millrace_functions::tree::Walk;
use millrace_functions::zones::shift_in;

use crate::bind::expressions::zones::Zones;
use crate::optimizer::lists::for_each_row;
use crate::optimizer::optimize_for_batch;

/// The column, and the relation, are named after the function.
const NAME: &str = "generate_series";
/// Rows of a batch.
const BATCH: usize = 8192;
/// Digits behind the point of a numeric that declares none.
const MAX_SCALE: i8 = 16;

/// The relation of a call whose arguments are known now; `None`: they are not, or of other types.
pub fn relation(args: &[Expr], zones: Zones) -> Result<Option<LogicalPlan>> {
    let Some(values) = args.iter().map(constant).collect::<Option<Vec<_>>>() else {
        return Ok(None);
    };
    let Some(series) = Series::of(&values, zones).map_err(external)? else { return Ok(None) };
    let schema = Arc::new(Schema::new(vec![Field::new(NAME, series.data_type.clone(), true)]));
    let stream = SeriesStream { schema: Arc::clone(&schema), series };
    let table = StreamingTable::try_new(schema, vec![Arc::new(stream)])?;
    LogicalPlanBuilder::scan(NAME, provider_as_source(Arc::new(table)), None)?.build().map(Some)
}

/// The value of an expression without columns, parameters and subqueries.
pub fn constant(expr: &Expr) -> Option<ScalarValue> {
    if let Expr::Literal(value, _) = expr {
        return Some(value.clone());
    }
    evaluated(expr).ok()
}

/// The same; an error where it has none.
pub fn evaluated(expr: &Expr) -> Result<ScalarValue> {
    // Some functions are there to be rewritten, and some operands to be cast, before anything can compute them.
    computed(expr).or_else(|_| computed(&prepared(expr)?))
}

/// An expression as a query would compute it.
fn prepared(expr: &Expr) -> Result<Expr> {
    let plan = LogicalPlanBuilder::empty(true).project([expr.clone()])?.build()?;
    match optimize_for_batch(plan).map_err(external)? {
        LogicalPlan::Projection(p) => Ok(p.expr.into_iter().next().unwrap_or_else(|| expr.clone())),
        _ => Ok(expr.clone()),
    }
}

fn computed(expr: &Expr) -> Result<ScalarValue> {
    let schema = DFSchema::empty();
    let (props, context) = (ExecutionProps::new(), PhysicalPlanningContext::default());
    let expr = expr.clone().rewrite_up(for_each_row)?.data;
    let physical = create_physical_expr(&expr, &schema, &props, &context)?;
    let one = arrow::array::RecordBatchOptions::new().with_row_count(Some(1));
    let row = RecordBatch::try_new_with_options(Arc::new(Schema::empty()), vec![], &one)?;
    match physical.evaluate(&row)? {
        ColumnarValue::Scalar(value) => Ok(value),
        ColumnarValue::Array(array) => ScalarValue::try_from_array(&array, 0),
    }
}

/// How far one value is from the next.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    By(i128),
    /// Calendar steps add up: a month after 31 January and another are 28 March.
    Interval(IntervalMonthDayNano),
}

#[derive(Clone, Debug, PartialEq)]
struct Series {
    data_type: DataType,
    /// `None`: there is no row, because an argument is NULL.
    bounds: Option<(i128, i128)>,
    step: Step,
    /// In which days and months are counted, if it is not UTC.
    zone: Option<Zone>,
}

impl Series {
    fn of(args: &[ScalarValue], zones: Zones) -> Result<Option<Series>, SqlError> {
        let [start, stop, rest @ ..] = args else { return Ok(None) };
        let step = rest.first();
        // NULL goes with every type.
        let all = |f: fn(&DataType) -> bool| {
            args.iter().map(ScalarValue::data_type).all(|t| t.is_null() || f(&t))
        };
        match start.data_type() {
            t @ DataType::Timestamp(TimeUnit::Microsecond, _) => Series::of_times(&t, args, zones),
            _ if all(|t| matches!(t, DataType::Int16 | DataType::Int32)) => {
                Series::of_numbers(DataType::Int32, 0, start, stop, step)
            }
            _ if all(DataType::is_integer) => {
                Series::of_numbers(DataType::Int64, 0, start, stop, step)
            }
            _ if all(|t| t.is_integer() || t.is_decimal()) => {
                let scales = args.iter().map(|a| match a {
                    ScalarValue::Decimal128(v, _, s) => least_scale(*v, *s),
                    _ => 0,
                });
                let scale = scales.max().unwrap_or(0).min(MAX_SCALE);
                Series::of_numbers(DataType::Decimal128(38, scale), scale, start, stop, step)
            }
            _ => Ok(None),
        }
    }

    fn of_numbers(
        data_type: DataType,
        scale: i8,
        start: &ScalarValue,
        stop: &ScalarValue,
        step: Option<&ScalarValue>,
    ) -> Result<Option<Series>, SqlError> {
        let number = |v: &ScalarValue| -> Result<Option<i128>, SqlError> {
            if v.is_null() {
                return Ok(None);
            }
            match v.cast_to(&DataType::Decimal128(38, scale)) {
                Ok(ScalarValue::Decimal128(v, _, _)) => Ok(v),
                _ => Err(SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, "value out of range")),
            }
        };
        let one = 10i128.pow(scale.unsigned_abs().into());
        let by = match step {
            Some(step) => number(step)?,
            None => Some(one),
        };
        if by == Some(0) {
            return Err(zero_step());
        }
        let bounds = number(start)?.zip(number(stop)?).filter(|_| by.is_some());
        Ok(Some(Series { data_type, bounds, step: Step::By(by.unwrap_or(one)), zone: None }))
    }

    fn of_times(
        t: &DataType,
        args: &[ScalarValue],
        zones: Zones,
    ) -> Result<Option<Series>, SqlError> {
        let [start, stop, step] = args else { return Ok(None) };
        let Ok(sql) = SqlType::from_arrow(t) else { return Ok(None) };
        let time = |v: &ScalarValue| match v {
            ScalarValue::TimestampMicrosecond(v, _) => *v,
            _ => None,
        };
        // A literal whose type nothing says takes the one it is needed as.
        let stop = match stop {
            ScalarValue::Utf8(Some(text)) => zones.literal(text, sql)?,
            other if other.data_type() == *t || other.is_null() => other.clone(),
            _ => return Ok(None),
        };
        let step = match step {
            ScalarValue::Utf8(Some(text)) => fold_literal(text, SqlType::Interval)?,
            other => other.clone(),
        };
        let ScalarValue::IntervalMonthDayNano(step) = step else { return Ok(None) };
        let zero = IntervalMonthDayNano::new(0, 0, 0);
        if step == Some(zero) {
            return Err(zero_step());
        }
        let ends = time(start).zip(time(&stop));
        let bounds = ends.filter(|_| step.is_some()).map(|(a, b)| (a.into(), b.into()));
        let step = Step::Interval(step.unwrap_or(zero));
        let zone = zones.zone.filter(|_| sql == SqlType::Timestamptz);
        Ok(Some(Series { data_type: t.clone(), bounds, step, zone }))
    }

    fn ascends(&self) -> bool {
        match self.step {
            Step::By(by) => by > 0,
            Step::Interval(i) => {
                // As PostgreSQL compares intervals: a month has 30 days.
                let days = i128::from(i.months) * 30 + i128::from(i.days);
                days * 86_400_000_000_000 + i128::from(i.nanoseconds) > 0
            }
        }
    }

    /// The value after another; `None`: it would not fit its type.
    fn after(&self, value: i128) -> Option<i128> {
        match self.step {
            Step::By(by) => {
                let next = value.checked_add(by)?;
                let fits = match self.data_type {
                    DataType::Int32 => i32::try_from(next).is_ok(),
                    DataType::Int64 => i64::try_from(next).is_ok(),
                    _ => true,
                };
                fits.then_some(next)
            }
            Step::Interval(i) => {
                let t = i64::try_from(value).ok()?;
                let next = match self.zone {
                    None => shift(t, i, false),
                    Some(zone) => shift_in(zone, t, i, false),
                };
                next.ok().map(i128::from)
            }
        }
    }

    fn array(&self, values: &[i128]) -> Result<ArrayRef> {
        let longs = || values.iter().map(|v| *v as i64);
        Ok(match &self.data_type {
            DataType::Int32 => Arc::new(Int32Array::from_iter_values(longs().map(|v| v as i32))),
            DataType::Decimal128(p, s) => Arc::new(
                Decimal128Array::from_iter_values(values.iter().copied())
                    .with_precision_and_scale(*p, *s)?,
            ),
            DataType::Timestamp(_, zone) => Arc::new(
                TimestampMicrosecondArray::from_iter_values(longs())
                    .with_timezone_opt(zone.clone()),
            ),
            _ => Arc::new(Int64Array::from_iter_values(longs())),
        })
    }
}

fn zero_step() -> SqlError {
    SqlError::new(SqlState::INVALID_PARAMETER_VALUE, "step size cannot equal zero")
}

/// The fewest digits behind the point that still hold the value.
fn least_scale(value: Option<i128>, scale: i8) -> i8 {
    let (mut value, mut scale) = (value.unwrap_or(0), scale);
    while scale > 0 && value % 10 == 0 {
        (value, scale) = (value / 10, scale - 1);
    }
    scale
}

#[derive(Debug)]
struct SeriesStream {
    schema: SchemaRef,
    series: Series,
}

impl PartitionStream for SeriesStream {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let (series, schema) = (self.series.clone(), Arc::clone(&self.schema));
        let mut next = series.bounds.map(|(start, _)| start);
        let up = series.ascends();
        let batches = std::iter::from_fn(move || {
            let (_, stop) = series.bounds?;
            let mut values = Vec::with_capacity(BATCH.min(1024));
            while values.len() < BATCH
                && let Some(value) = next.filter(|v| if up { *v <= stop } else { *v >= stop })
            {
                values.push(value);
                next = series.after(value);
            }
            if values.is_empty() {
                return None;
            }
            let column = series.array(&values);
            Some(column.and_then(|c| Ok(RecordBatch::try_new(Arc::clone(&schema), vec![c])?)))
        });
        let stream = futures::stream::iter(batches);
        Box::pin(RecordBatchStreamAdapter::new(Arc::clone(&self.schema), stream))
    }
}
