//! The functions that TUMBLE and HOP are made of (see the planner's `bind::relations::window_tvf` for the plans), and
//! the one that repeats rows (see the planner's `bind::relations::set_operations`).

use std::sync::{Arc, LazyLock};

use arrow::array::*;
use arrow::buffer::{BooleanBuffer, OffsetBuffer};
use arrow::datatypes::*;
use datafusion::common::{Result, ScalarValue};
use datafusion::error::DataFusionError;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, Signature, Volatility,
};
use millrace_common::{SqlError, SqlState};

use super::size_limits::check_bytes;
use crate::error::{external, undefined_function};
use crate::plain::PlainScalar;
use crate::types::type_name;

/// `hop_windows(time, slide, size, offset)` → list of starts, ascending.
pub fn hop_windows() -> Arc<ScalarUDF> {
    Arc::clone(&FUNCTIONS.hop_windows)
}

/// `tumble_start(time, size, offset)` → start of the only window.
pub fn tumble_start() -> Arc<ScalarUDF> {
    Arc::clone(&FUNCTIONS.tumble_start)
}

/// `window_end(start, size)`.
pub fn window_end() -> Arc<ScalarUDF> {
    Arc::clone(&FUNCTIONS.window_end)
}

/// `copies(n)` → a list of `n` elements, for rows that are in a result `n` times.
pub fn copies() -> Arc<ScalarUDF> {
    Arc::clone(&FUNCTIONS.copies)
}

/// `as_of_proctime(column)`: marks rows of a relation that are looked up as of the processing time, for
/// the planner's `stream`; never computed.
pub fn as_of_proctime() -> Arc<ScalarUDF> {
    Arc::clone(&FUNCTIONS.as_of_proctime)
}

/// The name of [`copies`]. SQL text cannot contain it unquoted, nor those of the functions below.
pub const COPIES: &str = "#copies";

/// The name of [`as_of_proctime`].
pub const AS_OF_PROCTIME: &str = "#as_of_proctime";

/// `asof_match(left, right, operator)`: the match condition of an ASOF join, for the planner's
/// `bind::relations::asof`; never computed.
pub const ASOF_MATCH: &str = "#asof_match";

/// Marks the number of rows of a limit with ties, for the planner's `bind::ordering::with_ties`; never computed.
pub const WITH_TIES: &str = "#with_ties";

/// `exclude(what)`: marks, among the expressions of PARTITION BY, what a window's frame leaves out, for
/// the planner's `bind::windows::frames`; never computed.
pub const EXCLUDE: &str = "#exclude";

/// Marks an array whose elements are a column's rows, for the planner's `bind::relations::table_functions`;
/// never computed.
pub const ROWS: &str = "#rows";

/// The positions of an array's elements, from 1: WITH ORDINALITY.
pub const ORDINALS: &str = "#ordinals";

/// All functions of this module.
pub fn functions() -> Vec<Arc<ScalarUDF>> {
    let number: Returns = |_| Ok(DataType::Int64);
    let flag: Returns = |_| Ok(DataType::Boolean);
    vec![
        hop_windows(),
        tumble_start(),
        window_end(),
        copies(),
        as_of_proctime(),
        function(ASOF_MATCH, flag, never),
        function(WITH_TIES, number, never),
        function(EXCLUDE, flag, never),
        function(ROWS, element, never),
        function(ORDINALS, |_| Ok(list_of(DataType::Int64)), |args| on_first(&args, positions)),
    ]
}

/// Those that are asked for by themselves.
struct Functions {
    hop_windows: Arc<ScalarUDF>,
    tumble_start: Arc<ScalarUDF>,
    window_end: Arc<ScalarUDF>,
    copies: Arc<ScalarUDF>,
    as_of_proctime: Arc<ScalarUDF>,
}

static FUNCTIONS: LazyLock<Functions> = LazyLock::new(|| {
    let time: Returns = |args| Ok(first_type(args));
    let starts: Returns = |args| Ok(list_of(first_type(args)));
    let flags: Returns = |_| Ok(list_of(DataType::Boolean));
    Functions {
        hop_windows: function("hop_windows", starts, |args| on_times(&args, hops)),
        tumble_start: function("tumble_start", time, |args| on_times(&args, tumbled)),
        window_end: function("window_end", time, |args| on_times(&args, ended)),
        copies: function(COPIES, flags, |args| on_first(&args, repeated)),
        as_of_proctime: function(AS_OF_PROCTIME, |_| Ok(DataType::Boolean), never),
    }
});

/// The type of a result by those of the arguments.
type Returns = fn(&[DataType]) -> Result<DataType>;

fn function(
    name: &'static str,
    returns: Returns,
    invoke: fn(ScalarFunctionArgs) -> Result<ColumnarValue>,
) -> Arc<ScalarUDF> {
    let signature = Signature::variadic_any(Volatility::Immutable);
    PlainScalar::new(name, signature, returns, invoke).strict().udf()
}

fn first_type(args: &[DataType]) -> DataType {
    args.first().cloned().unwrap_or(DataType::Null)
}

fn list_of(item: DataType) -> DataType {
    DataType::List(Arc::new(Field::new_list_field(item, true)))
}

/// The type of a list's elements.
fn element(args: &[DataType]) -> Result<DataType> {
    match first_type(args) {
        DataType::List(item) => Ok(item.data_type().clone()),
        other => {
            let call = format!("unnest({})", type_name(&Some(other)));
            Err(external(undefined_function(&call)))
        }
    }
}

fn never(_: ScalarFunctionArgs) -> Result<ColumnarValue> {
    Err(external(SqlError::internal("a mark in a plan is computed")))
}

/// What a function makes of its first argument; of a literal a literal.
fn on_first(
    args: &ScalarFunctionArgs,
    compute: impl Fn(&ArrayRef) -> Result<ArrayRef>,
) -> Result<ColumnarValue> {
    let scalar = matches!(args.args.first(), Some(ColumnarValue::Scalar(_)));
    let out = compute(&args.args[0].to_array(if scalar { 1 } else { args.number_rows })?)?;
    match scalar {
        true => Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&out, 0)?)),
        false => Ok(ColumnarValue::Array(out)),
    }
}

/// What a function makes of times and of the numbers, which are literals, that follow them.
fn on_times(
    args: &ScalarFunctionArgs,
    compute: fn(&TimestampMicrosecondArray, &[i64]) -> Result<ArrayRef>,
) -> Result<ColumnarValue> {
    on_first(args, |times| {
        let us = times.as_primitive_opt::<TimestampMicrosecondType>().ok_or_else(|| {
            external(SqlError::internal("window functions take timestamps in microseconds"))
        })?;
        let numbers = (1..args.args.len()).map(|i| constant(args.args.get(i)));
        compute(us, &numbers.collect::<Result<Vec<i64>>>()?)
    })
}

fn wrong_number() -> DataFusionError {
    external(SqlError::internal("wrong number of window arguments"))
}

/// Each time changed; the type stays.
fn changed(
    us: &TimestampMicrosecondArray,
    change: impl Fn(i64) -> Option<i64>,
) -> Result<ArrayRef> {
    let overflow = || external(out_of_range());
    let changed = us
        .try_unary::<_, TimestampMicrosecondType, _>(|t| change(t).ok_or_else(overflow))?
        .with_data_type(us.data_type().clone());
    Ok(Arc::new(changed))
}

fn tumbled(us: &TimestampMicrosecondArray, numbers: &[i64]) -> Result<ArrayRef> {
    let &[size, offset] = numbers else { return Err(wrong_number()) };
    changed(us, |t| last_start(t, size, offset))
}

fn ended(us: &TimestampMicrosecondArray, numbers: &[i64]) -> Result<ArrayRef> {
    let &[size] = numbers else { return Err(wrong_number()) };
    changed(us, |t| t.checked_add(size))
}

fn constant(v: Option<&ColumnarValue>) -> Result<i64> {
    match v {
        Some(ColumnarValue::Scalar(ScalarValue::Int64(Some(v)))) => Ok(*v),
        _ => Err(external(SqlError::internal("window arguments must be bigint literals"))),
    }
}

fn out_of_range() -> SqlError {
    SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, "timestamp out of range")
}

/// The last start at or before `time`.
fn last_start(time: i64, step: i64, offset: i64) -> Option<i64> {
    let since = time.checked_sub(offset)?;
    time.checked_sub(since.checked_rem_euclid(step)?)
}

/// Lists of as many elements as each count says.
fn repeated(counts: &ArrayRef) -> Result<ArrayRef> {
    let counts = counts.as_primitive_opt::<Int64Type>();
    let counts = counts.ok_or_else(|| external(SqlError::internal("copies takes a bigint")))?;
    let lengths: Vec<usize> =
        counts.iter().map(|n| usize::try_from(n.unwrap_or(0)).unwrap_or(0)).collect();
    let total = lengths.iter().copied().fold(0, usize::saturating_add);
    if total > i32::MAX as usize {
        let message = "a set operation gives too many copies of a row";
        return Err(external(SqlError::new(SqlState("54000"), message)));
    }
    // A bit each.
    check_bytes((total / 8) as i64).map_err(external)?;
    let field = Arc::new(Field::new_list_field(DataType::Boolean, true));
    let elements = Arc::new(BooleanArray::new(BooleanBuffer::new_set(total), None));
    Ok(Arc::new(ListArray::new(field, OffsetBuffer::from_lengths(lengths), elements, None)))
}

/// For each list the numbers of its elements.
fn positions(lists: &ArrayRef) -> Result<ArrayRef> {
    let lists = lists.as_list_opt::<i32>();
    let lists = lists.ok_or_else(|| external(SqlError::internal("ordinals take an array")))?;
    let length = |i: usize| if lists.is_null(i) { 0 } else { lists.value_length(i) as usize };
    let lengths: Vec<usize> = (0..lists.len()).map(length).collect();
    let numbers: Int64Array = lengths.iter().flat_map(|n| 1..=*n as i64).collect();
    let field = Arc::new(Field::new_list_field(DataType::Int64, true));
    let offsets = OffsetBuffer::from_lengths(lengths);
    Ok(Arc::new(ListArray::new(field, offsets, Arc::new(numbers), lists.nulls().cloned())))
}

fn hops(us: &TimestampMicrosecondArray, numbers: &[i64]) -> Result<ArrayRef> {
    let &[slide, size, offset] = numbers else { return Err(wrong_number()) };
    let windows = size.checked_div(slide).and_then(|n| usize::try_from(n).ok());
    let windows = windows.ok_or_else(|| external(out_of_range()))?;
    let bytes = us.len().saturating_mul(windows).saturating_mul(size_of::<i64>());
    check_bytes(i64::try_from(bytes).unwrap_or(i64::MAX)).map_err(external)?;
    let mut starts = Vec::with_capacity(us.len() * windows);
    let mut lengths = Vec::with_capacity(us.len());
    for i in 0..us.len() {
        if us.is_null(i) {
            lengths.push(0);
            continue;
        }
        let last = last_start(us.value(i), slide, offset);
        let first = last.and_then(|l| l.checked_sub(size.checked_sub(slide)?));
        let Some(first) = first else { return Err(external(out_of_range())) };
        // The last of them is a time, and so are the others.
        starts.extend((0..windows as i64).map(|k| first.wrapping_add(k.wrapping_mul(slide))));
        lengths.push(windows);
    }
    let values = TimestampMicrosecondArray::from(starts).with_data_type(us.data_type().clone());
    let field = Arc::new(Field::new_list_field(us.data_type().clone(), true));
    let offsets = OffsetBuffer::from_lengths(lengths);
    Ok(Arc::new(ListArray::new(field, offsets, Arc::new(values), us.nulls().cloned())))
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn a_window_begins_at_or_before_its_times() {
        check(&[
            (
                "tumble_start('2024-02-29 13:14:15'::timestamp, '900000000'::int8, '0'::int8)",
                "2024-02-29 13:00:00",
            ),
            (
                "tumble_start('2024-02-29 13:15:00'::timestamp, '900000000'::int8, '0'::int8)",
                "2024-02-29 13:15:00",
            ),
            (
                "tumble_start('1969-12-31 23:59:59'::timestamp, '60000000'::int8, '0'::int8)",
                "1969-12-31 23:59:00",
            ),
            (
                "tumble_start('2024-02-29 13:14:15+00'::timestamptz, '3600000000'::int8, '1800000000'::int8)",
                "2024-02-29 12:30:00+00",
            ),
            (
                "tumble_start('2024-02-29 13:14:15'::timestamp, '60000000'::int8, '-1000000'::int8)",
                "2024-02-29 13:13:59",
            ),
            ("tumble_start(NULL::timestamp, '60000000'::int8, '0'::int8)", "NULL"),
            ("window_end('2024-02-29 13:00'::timestamp, '900000000'::int8)", "2024-02-29 13:15:00"),
            ("window_end(NULL::timestamp, '900000000'::int8)", "NULL"),
            (
                "window_end('2024-02-29 13:00'::timestamp, '9223372036854775807'::int8)",
                "error 22008",
            ),
        ]);
    }

    #[test]
    fn hopping_windows_overlap() {
        check(&[
            (
                "hop_windows('2024-02-29 13:07'::timestamp, '300000000'::int8, '900000000'::int8, '0'::int8)",
                "{\"2024-02-29 12:55:00\",\"2024-02-29 13:00:00\",\"2024-02-29 13:05:00\"}",
            ),
            (
                "hop_windows('2024-02-29 13:05'::timestamp, '300000000'::int8, '300000000'::int8, '0'::int8)",
                "{\"2024-02-29 13:05:00\"}",
            ),
            (
                "hop_windows('2024-02-29 13:07'::timestamp, '300000000'::int8, '600000000'::int8, '60000000'::int8)",
                "{\"2024-02-29 13:01:00\",\"2024-02-29 13:06:00\"}",
            ),
            (
                "hop_windows(NULL::timestamp, '300000000'::int8, '900000000'::int8, '0'::int8)",
                "NULL",
            ),
        ]);
    }

    #[test]
    fn rows_are_repeated_and_numbered() {
        check(&[
            ("#copies('3'::int8)", "{t,t,t}"),
            ("#copies('0'::int8)", "{}"),
            ("#copies('-1'::int8)", "{}"),
            ("#ordinals('{a,NULL,c}'::text[])", "{1,2,3}"),
            ("#ordinals('{}'::text[])", "{}"),
            ("#ordinals(NULL::text[])", "NULL"),
            ("#copies('3000000000'::int8)", "error 54000"),
        ]);
    }
}
