//! Functions whose result can be of any length: `repeat`, `lpad`, `replace`, `||`, lists of series. PostgreSQL refuses
//! what nobody can hold; here the bound is one on a batch of rows, because a batch is made in one piece that no
//! memory budget sees coming. And functions whose time goes with the size of a value: those of large
//! constants are computed when the query runs, not while it is planned, where nobody could end them.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, LazyLock};

use arrow::array::{Array, ArrayRef, AsArray, StringArray};
use arrow::compute::kernels::concat_elements::concat_elements_utf8;
use arrow::compute::{cast, kernels::length::length};
use arrow::datatypes::{DataType, Int64Type, IntervalMonthDayNanoType, IntervalUnit};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, Signature, Volatility,
};
use millrace_common::{SqlError, SqlState};

use crate::error::external;
use crate::interrupt;
use crate::plain::PlainScalar;
use crate::wrapped::{Change, wrapped};

const NAMES: [&str; 22] = [
    "array_distinct",
    "array_except",
    "array_intersect",
    "array_prepend",
    "array_append",
    "array_reverse",
    "array_sort",
    "array_union",
    "flatten",
    "overlay",
    "reverse",
    "string_to_array",
    "translate",
    "repeat",
    "lpad",
    "rpad",
    "replace",
    "generate_series",
    "range",
    "array_repeat",
    "array_resize",
    "levenshtein",
];

/// Bytes of one batch's results.
static MAX_BYTES: AtomicI64 = AtomicI64::new(LARGEST);
const LARGEST: i64 = 256 << 20;
const SMALLEST: i64 = 1 << 20;

/// Fits the bound to the memory that queries of this process have.
pub fn fit_to_memory(bytes: usize) {
    let share = i64::try_from(bytes / 4).unwrap_or(LARGEST);
    MAX_BYTES.store(share.clamp(SMALLEST, LARGEST), Ordering::Relaxed);
}

/// Bytes that a batch of rows may make.
pub fn most_bytes() -> usize {
    usize::try_from(MAX_BYTES.load(Ordering::Relaxed)).unwrap_or(0)
}

/// 54000 for results of more bytes than a batch may have.
pub fn check_bytes(bytes: i64) -> std::result::Result<(), SqlError> {
    let most = MAX_BYTES.load(Ordering::Relaxed);
    if bytes <= most {
        return Ok(());
    }
    Err(SqlError::new(TOO_LARGE.0, TOO_LARGE.1)
        .with_detail(format!("A batch of rows may make {} MB.", most >> 20)))
}

const TOO_LARGE: (SqlState, &str) = (SqlState("54000"), "requested length too large");

/// Whether an error is one of [`check_bytes`]: a batch of fewer rows may do.
pub fn is_too_large(e: &(dyn std::error::Error + 'static)) -> bool {
    let e = e.downcast_ref::<SqlError>();
    e.is_some_and(|e| e.state == TOO_LARGE.0 && e.message == TOO_LARGE.1)
}

/// What a call of constants may take or make when it is computed in advance.
const FOLDED_BYTES: i64 = 64 << 10;

/// Refuses to compute a call of large constants in advance, which leaves it for the execution: that can be
/// ended at any time.
pub fn leave_large(args: &[ColumnarValue]) -> Result<()> {
    if !interrupt::is_folding() {
        return Ok(());
    }
    let bytes = |value: &ColumnarValue| match value {
        ColumnarValue::Scalar(ScalarValue::Utf8(Some(text)))
        | ColumnarValue::Scalar(ScalarValue::LargeUtf8(Some(text))) => text.len(),
        ColumnarValue::Scalar(ScalarValue::Binary(Some(bytes))) => bytes.len(),
        ColumnarValue::Scalar(ScalarValue::List(list)) => list.get_buffer_memory_size(),
        _ => 0,
    };
    left(args.iter().map(|value| bytes(value) as i64).sum())
}

fn left(bytes: i64) -> Result<()> {
    match bytes > FOLDED_BYTES && interrupt::is_folding() {
        true => Err(external(SqlError::internal("a large constant is computed when it is needed"))),
        false => Ok(()),
    }
}

/// The bounded form of a function, where it needs one.
pub fn with_size_limits(udf: Arc<ScalarUDF>) -> Arc<ScalarUDF> {
    match NAMES.contains(&udf.name()) {
        true => wrapped(udf, Bounded),
        false => udf,
    }
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Bounded;

impl Change for Bounded {
    fn invoke(&self, inner: &ScalarUDF, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let constant = args.args.iter().all(|a| matches!(a, ColumnarValue::Scalar(_)));
        let rows = if constant { 1 } else { args.number_rows };
        leave_large(&args.args)?;
        let bytes = result_bytes(inner.name(), &args.args, rows)?;
        check_bytes(bytes).map_err(external)?;
        left(bytes)?;
        interrupt::step(usize::try_from(bytes).unwrap_or(0)).map_err(external)?;
        let mut args = args;
        match (inner.name(), args.args.as_mut_slice()) {
            // DataFusion makes room for so many characters, and there is none for fewer than none.
            ("lpad" | "rpad", [_, count, ..]) => *count = at_least_none(count)?,
            ("generate_series" | "range", [_, _, step]) => check_step(step, rows)?,
            ("levenshtein", [a, b, ..]) => check_lengths(a, b, rows)?,
            _ => {}
        }
        inner.invoke_with_args(args)
    }
}

/// A length, which is 0 where it is negative.
fn at_least_none(count: &ColumnarValue) -> Result<ColumnarValue> {
    let bounded = |array: ArrayRef| -> Result<ArrayRef> {
        let counts = cast(&array, &DataType::Int64)?;
        let counts = counts.as_primitive::<Int64Type>();
        Ok(Arc::new(counts.unary::<_, Int64Type>(|n| n.max(0))))
    };
    Ok(match count {
        ColumnarValue::Array(array) => ColumnarValue::Array(bounded(Arc::clone(array))?),
        ColumnarValue::Scalar(value) => {
            let one = bounded(value.to_array()?)?;
            ColumnarValue::Scalar(ScalarValue::try_from_array(&one, 0)?)
        }
    })
}

/// Refuses steps in months and days of both signs, which may never come to the end, and those that have no opposite.
fn check_step(step: &ColumnarValue, rows: usize) -> Result<()> {
    if !matches!(step.data_type(), DataType::Interval(IntervalUnit::MonthDayNano)) {
        return Ok(());
    }
    let array = step.to_array(rows)?;
    for i in array.as_primitive::<IntervalMonthDayNanoType>().iter().flatten() {
        let parts = [i.months.into(), i.days.into(), i.nanoseconds];
        let both = parts.iter().any(|n| *n < 0) && parts.iter().any(|n| *n > 0);
        if i.months == i32::MIN || i.days == i32::MIN || i.nanoseconds == i64::MIN {
            let message = "interval out of range";
            return Err(external(SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, message)));
        }
        if both {
            let message = "an array of a series whose step has parts of both signs";
            return Err(external(SqlError::unsupported(message)));
        }
    }
    Ok(())
}

/// The time of a comparison letter by letter goes with the product of the lengths: PostgreSQL has a bound for them.
fn check_lengths(a: &ColumnarValue, b: &ColumnarValue, rows: usize) -> Result<()> {
    const MOST: i64 = 255;
    let longest = lengths(a, rows)?.into_iter().chain(lengths(b, rows)?).max();
    if longest.is_none_or(|n| n <= MOST) {
        return Ok(());
    }
    let message = format!("levenshtein argument exceeds maximum length of {MOST} characters");
    Err(external(SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)))
}

/// At least this many bytes will be made.
fn result_bytes(name: &str, args: &[ColumnarValue], rows: usize) -> Result<i64> {
    match (name, args) {
        ("repeat", [text, count]) => {
            let lengths = lengths(text, rows)?;
            let counts = numbers(count, rows)?;
            Ok(sum(lengths.iter().zip(counts).map(|(l, n)| l.saturating_mul(n))))
        }
        ("lpad" | "rpad", [_, count, ..]) => Ok(sum(numbers(count, rows)?.into_iter())),
        ("array_repeat", [element, count]) | ("array_resize", [_, count, element]) => {
            let widths = element_bytes(element, rows)?.into_iter();
            Ok(sum(widths.zip(numbers(count, rows)?).map(|(l, n)| l.saturating_mul(n))))
        }
        ("array_resize", [_, count]) => {
            Ok(sum(numbers(count, rows)?.into_iter()).saturating_mul(ELEMENT_BYTES))
        }
        ("replace", [text, from, to]) => replaced_bytes(text, from, to, rows),
        ("generate_series" | "range", [_]) => {
            Ok(sum(numbers(&args[0], rows)?.into_iter()).saturating_mul(ELEMENT_BYTES))
        }
        ("generate_series" | "range", [start, stop, step @ ..]) => {
            Ok(series_length(start, stop, step.first(), rows)?.saturating_mul(ELEMENT_BYTES))
        }
        _ => Ok(0),
    }
}

/// Of an array.
const ELEMENT_BYTES: i64 = 8;

fn sum(sizes: impl Iterator<Item = i64>) -> i64 {
    sizes.fold(0i64, i64::saturating_add)
}

/// Values of an argument, none below zero.
fn numbers(value: &ColumnarValue, rows: usize) -> Result<Vec<i64>> {
    let counts = cast(&value.to_array(rows)?, &DataType::Int64)?;
    Ok(counts.as_primitive::<Int64Type>().iter().map(|n| n.unwrap_or(0).max(0)).collect())
}

/// What elements of an array take that are such values.
fn element_bytes(value: &ColumnarValue, rows: usize) -> Result<Vec<i64>> {
    use DataType as D;
    let lengths = match value.data_type() {
        D::Utf8 | D::LargeUtf8 | D::Binary => lengths(value, rows)?,
        _ => vec![0; rows],
    };
    Ok(lengths.into_iter().map(|bytes| bytes.max(ELEMENT_BYTES)).collect())
}

fn lengths(value: &ColumnarValue, rows: usize) -> Result<Vec<i64>> {
    let lengths = cast(&length(&value.to_array(rows)?)?, &DataType::Int64)?;
    Ok(lengths.as_primitive::<Int64Type>().iter().map(|n| n.unwrap_or(0)).collect())
}

/// What a replacement makes longer, counted where the most that it could come to is too much.
fn replaced_bytes(
    text: &ColumnarValue,
    from: &ColumnarValue,
    to: &ColumnarValue,
    rows: usize,
) -> Result<i64> {
    let own = lengths(text, rows)?;
    let (old, new) = (lengths(from, rows)?, lengths(to, rows)?);
    let most = own
        .iter()
        .zip(old.iter().zip(&new))
        .map(|(l, (o, n))| l.saturating_add((l / (*o).max(1)).saturating_mul((n - o).max(0))));
    let most = sum(most);
    if check_bytes(most).is_ok() {
        return Ok(most);
    }
    let strings =
        |v: &ColumnarValue| -> Result<ArrayRef> { Ok(cast(&v.to_array(rows)?, &DataType::Utf8)?) };
    let (text, from) = (strings(text)?, strings(from)?);
    let (text, from) = (text.as_string::<i32>(), from.as_string::<i32>());
    let exact = (0..rows).map(|i| {
        if text.is_null(i) || from.is_null(i) || from.value(i).is_empty() {
            return own[i];
        }
        let found = text.value(i).matches(from.value(i)).count() as i64;
        own[i].saturating_add(found.saturating_mul(new[i] - old[i]))
    });
    Ok(sum(exact))
}

/// Elements of series of numbers, days or instants.
fn series_length(
    start: &ColumnarValue,
    stop: &ColumnarValue,
    step: Option<&ColumnarValue>,
    rows: usize,
) -> Result<i64> {
    const DAY_US: i64 = 86_400_000_000;
    let units = |v: &ColumnarValue| -> Result<Option<Vec<Option<i64>>>> {
        let array = v.to_array(rows)?;
        let scale = match array.data_type() {
            t if t.is_integer() => 1,
            DataType::Date32 => DAY_US,
            DataType::Timestamp(_, _) => 1,
            _ => return Ok(None),
        };
        let array = match array.data_type() {
            DataType::Date32 => cast(&array, &DataType::Int32)?,
            _ => array,
        };
        let whole = cast(&array, &DataType::Int64)?;
        let whole = whole.as_primitive::<Int64Type>().iter();
        Ok(Some(whole.map(|n| n.map(|n| n.saturating_mul(scale))).collect()))
    };
    let (Some(from), Some(to)) = (units(start)?, units(stop)?) else { return Ok(0) };
    let steps: Vec<Option<i64>> = match step {
        None => vec![Some(1); rows],
        Some(step)
            if matches!(step.data_type(), DataType::Interval(IntervalUnit::MonthDayNano)) =>
        {
            let array = step.to_array(rows)?;
            let spans = array.as_primitive::<IntervalMonthDayNanoType>().iter();
            spans
                .map(|i| {
                    let i = i?;
                    let days = i64::from(i.months) * 28 + i64::from(i.days);
                    Some(days.saturating_mul(DAY_US).saturating_add(i.nanoseconds / 1000))
                })
                .collect()
        }
        Some(step) => match units(step)? {
            Some(steps) => steps,
            None => return Ok(0),
        },
    };
    let each = from.iter().zip(&to).zip(&steps).map(|((from, to), step)| {
        let (Some(from), Some(to), Some(step)) = (from, to, step) else { return 0 };
        let span = i128::from(*to) - i128::from(*from);
        if *step == 0 || (span < 0) != (*step < 0) {
            return 1;
        }
        i64::try_from(span / i128::from(*step)).unwrap_or(i64::MAX)
    });
    Ok(sum(each))
}

/// `||` of texts.
pub fn text_concat() -> Arc<ScalarUDF> {
    static F: LazyLock<Arc<ScalarUDF>> = LazyLock::new(|| {
        let text = vec![DataType::Utf8, DataType::Utf8];
        let signature = Signature::exact(text, Volatility::Immutable);
        PlainScalar::new("textcat", signature, |_| Ok(DataType::Utf8), concatenated).strict().udf()
    });
    Arc::clone(&F)
}

fn concatenated(args: ScalarFunctionArgs) -> Result<ColumnarValue> {
    let constant = args.args.iter().all(|a| matches!(a, ColumnarValue::Scalar(_)));
    let rows = if constant { 1 } else { args.number_rows };
    let bytes = sum(args.args.iter().map(|a| match a {
        ColumnarValue::Scalar(ScalarValue::Utf8(Some(s))) => {
            (s.len() as i64).saturating_mul(rows as i64)
        }
        ColumnarValue::Array(a) => a.as_string_opt::<i32>().map_or(0, text_bytes),
        _ => 0,
    }));
    check_bytes(bytes).map_err(external)?;
    interrupt::step(usize::try_from(bytes).unwrap_or(0)).map_err(external)?;
    let arrays = args.args.iter().map(|a| a.to_array(rows)).collect::<Result<Vec<_>>>()?;
    let texts: Vec<&StringArray> = arrays.iter().filter_map(|a| a.as_string_opt::<i32>()).collect();
    let [left, right] = texts.as_slice() else {
        return Err(external(SqlError::internal("|| of other than texts")));
    };
    let both: ArrayRef = Arc::new(concat_elements_utf8(left, right)?);
    Ok(match constant {
        true => ColumnarValue::Scalar(ScalarValue::try_from_array(&both, 0)?),
        false => ColumnarValue::Array(both),
    })
}

fn text_bytes(texts: &StringArray) -> i64 {
    let ends = texts.value_offsets();
    match (ends.first(), ends.last()) {
        (Some(first), Some(last)) => i64::from(last - first),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(s: &str) -> ColumnarValue {
        ColumnarValue::Scalar(ScalarValue::Utf8(Some(s.into())))
    }

    fn number(n: impl std::convert::Into<Option<i64>>) -> ColumnarValue {
        ColumnarValue::Scalar(ScalarValue::Int64(n.into()))
    }

    fn bytes(name: &str, args: &[ColumnarValue]) -> i64 {
        result_bytes(name, args, 1).unwrap()
    }

    #[test]
    fn results_that_nobody_can_hold_are_counted_before_they_are_made() {
        assert_eq!(bytes("repeat", &[text("ab"), number(3)]), 6);
        assert_eq!(bytes("lpad", &[text("ab"), number(3)]), 3);
        assert_eq!(bytes("repeat", &[text("ab"), number(-3)]), 0);
        assert_eq!(bytes("repeat", &[text("ab"), number(None)]), 0);
        assert!(bytes("repeat", &[text("ab"), number(i64::MAX)]) > LARGEST);
        assert_eq!(bytes("replace", &[text("abab"), text("a"), text("xyz")]), 12);
        assert_eq!(bytes("generate_series", &[number(1), number(100), number(3)]), 33 * 8);
        assert!(bytes("generate_series", &[number(0), number(i64::MAX)]) > LARGEST);
    }
}
