//! The functions that TUMBLE and HOP are made of (see the planner's `bind::relations::window_tvf` for the plans), and
//! the one that repeats rows (see the planner's `bind::relations::set_operations`).

use std::sync::{Arc, LazyLock};

use arrow::array::*;
use arrow::buffer::{BooleanBuffer, OffsetBuffer};
use arrow::datatypes::*;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use millrace_common::{SqlError, SqlState};

use super::size_limits::check_bytes;
use crate::error::{external, undefined_function};
use crate::types::type_name;

/// `hop_windows(time, slide, size, offset)` → list of starts, ascending.
pub fn hop_windows() -> Arc<ScalarUDF> {
    WindowFn::shared(Kind::Hop)
}

/// `tumble_start(time, size, offset)` → start of the only window.
pub fn tumble_start() -> Arc<ScalarUDF> {
    WindowFn::shared(Kind::Tumble)
}

/// `window_end(start, size)`.
pub fn window_end() -> Arc<ScalarUDF> {
    WindowFn::shared(Kind::End)
}

/// `copies(n)` → a list of `n` elements, for rows that are in a result `n` times.
pub fn copies() -> Arc<ScalarUDF> {
    WindowFn::shared(Kind::Copies)
}

/// The name of [`copies`]; not one that SQL text can contain unquoted.
pub const COPIES: &str = "#copies";

/// `as_of_proctime(column)`: marks rows of a relation that are looked up as of the processing time, for
/// the planner's `stream`; never computed.
pub fn as_of_proctime() -> Arc<ScalarUDF> {
    WindowFn::shared(Kind::AsOfProctime)
}

/// The name of [`as_of_proctime`]; not one that SQL text can contain unquoted.
pub const AS_OF_PROCTIME: &str = "#as_of_proctime";

/// `asof_match(left, right, operator)`: the match condition of an ASOF join, for the planner's
/// `bind::relations::asof`; never computed.
pub fn asof_match() -> Arc<ScalarUDF> {
    WindowFn::shared(Kind::AsofMatch)
}

/// The name of [`asof_match`]; not one that SQL text can contain unquoted.
pub const ASOF_MATCH: &str = "#asof_match";

/// Marks the number of rows of a limit with ties, for the planner's `bind::ordering::with_ties`; never computed.
pub const WITH_TIES: &str = "#with_ties";

pub fn with_ties() -> Arc<ScalarUDF> {
    WindowFn::shared(Kind::WithTies)
}

/// `exclude(what)`: marks, among the expressions of PARTITION BY, what a window's frame leaves out, for
/// the planner's `bind::windows::frames`; never computed.
pub const EXCLUDE: &str = "#exclude";

pub fn exclude() -> Arc<ScalarUDF> {
    WindowFn::shared(Kind::Exclude)
}

/// Marks an array whose elements are a column's rows, for the planner's `bind::relations::table_functions`;
/// never computed.
pub const ROWS: &str = "#rows";

pub fn rows() -> Arc<ScalarUDF> {
    WindowFn::shared(Kind::Rows)
}

/// The positions of an array's elements, from 1: WITH ORDINALITY.
pub const ORDINALS: &str = "#ordinals";

pub fn ordinals() -> Arc<ScalarUDF> {
    WindowFn::shared(Kind::Ordinals)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Rows,
    Ordinals,
    Hop,
    Tumble,
    End,
    Copies,
    WithTies,
    Exclude,
    AsOfProctime,
    AsofMatch,
}

/// The functions' names, in the order of their kinds.
const NAMES: [(Kind, &str); 10] = [
    (Kind::Rows, ROWS),
    (Kind::Ordinals, ORDINALS),
    (Kind::Hop, "hop_windows"),
    (Kind::Tumble, "tumble_start"),
    (Kind::End, "window_end"),
    (Kind::Copies, COPIES),
    (Kind::WithTies, WITH_TIES),
    (Kind::Exclude, EXCLUDE),
    (Kind::AsOfProctime, AS_OF_PROCTIME),
    (Kind::AsofMatch, ASOF_MATCH),
];

#[derive(Debug, PartialEq, Eq, Hash)]
struct WindowFn {
    kind: Kind,
    name: &'static str,
    signature: Signature,
}

impl WindowFn {
    fn shared(kind: Kind) -> Arc<ScalarUDF> {
        static ALL: LazyLock<[Arc<ScalarUDF>; 10]> = LazyLock::new(|| {
            NAMES.map(|(kind, name)| {
                let signature = Signature::variadic_any(Volatility::Immutable);
                Arc::new(ScalarUDF::from(WindowFn { kind, name, signature }))
            })
        });
        Arc::clone(&ALL[kind as usize])
    }
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

impl ScalarUDFImpl for WindowFn {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        let time = args.first().cloned().unwrap_or(DataType::Null);
        Ok(match self.kind {
            Kind::Hop => DataType::List(Arc::new(Field::new_list_field(time, true))),
            Kind::Tumble | Kind::End => time,
            Kind::WithTies => DataType::Int64,
            Kind::Exclude | Kind::AsOfProctime | Kind::AsofMatch => DataType::Boolean,
            Kind::Rows => match time {
                DataType::List(item) => item.data_type().clone(),
                other => {
                    let call = format!("unnest({})", type_name(&Some(other)));
                    return Err(external(undefined_function(&call)));
                }
            },
            Kind::Ordinals => {
                DataType::List(Arc::new(Field::new_list_field(DataType::Int64, true)))
            }
            Kind::Copies => {
                DataType::List(Arc::new(Field::new_list_field(DataType::Boolean, true)))
            }
        })
    }

    fn is_strict(&self) -> bool {
        true
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let rows = args.number_rows;
        let scalar = matches!(args.args.first(), Some(ColumnarValue::Scalar(_)));
        let times = args.args[0].to_array(if scalar { 1 } else { rows })?;
        if matches!(self.kind, Kind::Copies | Kind::Ordinals) {
            let out = match self.kind {
                Kind::Copies => repeated(&times)?,
                _ => positions(&times)?,
            };
            return match scalar {
                true => Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&out, 0)?)),
                false => Ok(ColumnarValue::Array(out)),
            };
        }
        let us = times.as_primitive_opt::<TimestampMicrosecondType>().ok_or_else(|| {
            external(SqlError::internal("window functions take timestamps in microseconds"))
        })?;
        let numbers: Vec<i64> =
            (1..args.args.len()).map(|i| constant(args.args.get(i))).collect::<Result<_>>()?;
        let overflow = || external(out_of_range());
        let out: ArrayRef = match (self.kind, numbers.as_slice()) {
            (Kind::Tumble, [size, offset]) => Arc::new(
                us.try_unary::<_, TimestampMicrosecondType, _>(|t| {
                    last_start(t, *size, *offset).ok_or_else(overflow)
                })?
                .with_data_type(us.data_type().clone()),
            ),
            (Kind::End, [size]) => Arc::new(
                us.try_unary::<_, TimestampMicrosecondType, _>(|t| {
                    t.checked_add(*size).ok_or_else(overflow)
                })?
                .with_data_type(us.data_type().clone()),
            ),
            (Kind::Hop, [slide, size, offset]) => hop(us, *slide, *size, *offset)?,
            _ => return Err(external(SqlError::internal("wrong number of window arguments"))),
        };
        match scalar {
            true => Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&out, 0)?)),
            false => Ok(ColumnarValue::Array(out)),
        }
    }
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

fn hop(us: &TimestampMicrosecondArray, slide: i64, size: i64, offset: i64) -> Result<ArrayRef> {
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
