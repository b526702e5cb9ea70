//! Layout of the state tables whose columns are not simply their input's: the accumulators of an
//! aggregate. The planner writes these schemas into the graph; the executor's operators follow them.
//! They are on-disk formats: a change is a new graph version.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use millrace_functions::aggregate_kind::AggFunc;

use crate::AggCall;

/// Name of the column that counts a group's input rows.
pub const ROWS_COLUMN: &str = "__rows";

/// The value columns of an aggregate's table: the group columns, then `__rows` (Int64: how many
/// input rows the group has; the group exists while it is positive), then the columns of every call
/// by [`accumulator_fields`].
pub fn accumulator_schema(group: &[usize], calls: &[AggCall], input: &Schema) -> SchemaRef {
    let mut fields: Vec<Field> = group.iter().map(|&g| input.field(g).clone()).collect();
    fields.push(Field::new(ROWS_COLUMN, DataType::Int64, false));
    for (i, call) in calls.iter().enumerate() {
        fields.extend(accumulator_fields(i, call, input));
    }
    Arc::new(Schema::new(fields))
}

/// The accumulator columns of call number `index`:
///
/// | call | columns |
/// |---|---|
/// | `count` | Int64 count |
/// | `sum`, `avg` of integers | Decimal128(38, 0) sum, Int64 count of non-null arguments |
/// | `sum`, `avg` of numeric(p, s) | Decimal128(38, s) (256 bits: Decimal256(76, s)) sum, Int64 count |
/// | `sum`, `avg` of floats | Binary, the bytes of the exact sum; Int64 count |
/// | `sum`, `avg` of intervals | Decimal128(38, 0) each for months, days, microseconds; Int64 count |
/// | `bool_and`, `bool_or` | Int64 count of true, Int64 count of false |
/// | `min`, `max` | the current result (nullable) |
/// | variances, covariances, regressions, `bit_…` | Binary, exact sums
/// ([`millrace_functions::exact_aggregates`]); Int64 count |
/// | `string_agg`, `array_agg`, `mode`, percentiles and other collected ones | Utf8, the current result as
/// text (nullable) |
///
/// DISTINCT calls have the same columns, fed with values as they enter and leave the value table.
pub fn accumulator_fields(index: usize, call: &AggCall, input: &Schema) -> Vec<Field> {
    let name = |part: &str| format!("{index}.{part}");
    let count = || Field::new(name("count"), DataType::Int64, false);
    match call.func {
        AggFunc::Count => vec![count()],
        AggFunc::BoolAnd | AggFunc::BoolOr => vec![
            Field::new(name("true"), DataType::Int64, false),
            Field::new(name("false"), DataType::Int64, false),
        ],
        AggFunc::Min | AggFunc::Max => {
            let value = match call.arg {
                Some(arg) => input.field(arg).data_type().clone(),
                None => call.output_type.clone(),
            };
            vec![Field::new(name("value"), value, true)]
        }
        func if func.is_collected() => vec![Field::new(name("text"), DataType::Utf8, true)],
        func if func.is_exact() => vec![Field::new(name("sums"), DataType::Binary, false), count()],
        // `sum` and `avg`.
        _ => {
            let arg = call.arg.map(|arg| input.field(arg).data_type());
            let mut fields = sum_fields(arg, &name);
            fields.push(count());
            fields
        }
    }
}

/// The value columns of a lookup's table of matches: the columns of its right input, all of which may be NULL,
/// then `copies` (Int64: how many such rows each copy of the left row has met).
pub fn matches_schema(right: &Schema) -> SchemaRef {
    let columns = right.fields().iter().map(|f| f.as_ref().clone().with_nullable(true));
    let copies = Field::new("copies", DataType::Int64, false);
    Arc::new(Schema::new(columns.chain([copies]).collect::<Vec<_>>()))
}

fn sum_fields(arg: Option<&DataType>, name: &dyn Fn(&str) -> String) -> Vec<Field> {
    let sum = |data_type| vec![Field::new(name("sum"), data_type, false)];
    match arg {
        Some(t) if t.is_floating() => sum(DataType::Binary),
        Some(
            DataType::Decimal32(_, s) | DataType::Decimal64(_, s) | DataType::Decimal128(_, s),
        ) => sum(DataType::Decimal128(38, *s)),
        Some(DataType::Decimal256(_, s)) => sum(DataType::Decimal256(76, *s)),
        Some(DataType::Interval(_)) => ["months", "days", "micros"]
            .into_iter()
            .map(|part| Field::new(name(part), DataType::Decimal128(38, 0), false))
            .collect(),
        _ => sum(DataType::Decimal128(38, 0)),
    }
}
