//! What aggregates that keep the rows of a group (`string_agg`, `array_agg`, percentiles, …) keep of a row:
//! one binary value whose byte order is the order of the aggregate's `ORDER BY`; and what they make of
//! a group's entries.
//!
//! `order keys | value | separator | length of the separator | length of the value`, lengths as four
//! bytes, big-endian; all ones for the length of a value that is NULL. It is stored in state tables.

use std::sync::{Arc, LazyLock};

use arrow::array::{Array, ArrayRef, AsArray, BinaryArray, BinaryBuilder};
use arrow::compute::SortOptions;
use arrow::datatypes::DataType;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, Signature, Volatility,
};
use millrace_common::encoding::array::array_items;
use millrace_common::encoding::array::put_item;
use millrace_common::json::Json;
use millrace_common::keys::KeyCodec;
use millrace_common::{SqlError, SqlState, SqlType};

use super::parse;
use super::text::push_float_text;
use crate::aggregate_kind::AggFunc;
use crate::error::external;
use crate::plain::PlainScalar;

const NULL_LENGTH: u32 = u32::MAX;

/// `collect_entry(flags, value, separator, order keys…)`. Flags: `s`, `k` or `o` (NULL values are skipped, or
/// kept; `o`: kept, and the separator is the key of an object, which may not be NULL), then `a` or `d` and
/// `f` or `l` (nulls first or last) for each key.
pub fn collect_entry() -> Arc<ScalarUDF> {
    static F: LazyLock<Arc<ScalarUDF>> = LazyLock::new(|| {
        let signature = Signature::variadic_any(Volatility::Immutable);
        PlainScalar::new("collect_entry", signature, |_| Ok(DataType::Binary), collected).udf()
    });
    Arc::clone(&F)
}

fn collected(args: ScalarFunctionArgs) -> Result<ColumnarValue> {
    let bad = || external(SqlError::internal("malformed arguments of collect_entry"));
    let Some(ColumnarValue::Scalar(ScalarValue::Utf8(Some(flags)))) = args.args.first() else {
        return Err(bad());
    };
    let rows = args.number_rows;
    let arrays: Vec<ArrayRef> =
        args.args[1..].iter().map(|a| a.to_array(rows)).collect::<Result<_>>()?;
    let [value, separator, keys @ ..] = arrays.as_slice() else { return Err(bad()) };
    let directions = flags.as_bytes().get(1..).unwrap_or_default();
    let texts = [value, separator].iter().all(|a| *a.data_type() == DataType::Utf8);
    if !texts || directions.len() != 2 * keys.len() {
        return Err(bad());
    }
    let options = directions
        .chunks_exact(2)
        .map(|f| SortOptions { descending: f[0] == b'd', nulls_first: f[1] == b'f' });
    let nulls = match flags.as_bytes().first() {
        Some(b's') => Nulls::Skipped,
        Some(b'o') => Nulls::KeptUnderKeys,
        _ => Nulls::Kept,
    };
    let entries = entries(nulls, value, Some(separator), keys, options).map_err(external)?;
    Ok(ColumnarValue::Array(Arc::new(entries)))
}

/// What becomes of a NULL value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Nulls {
    Skipped,
    Kept,
    /// And a NULL separator is error 22023.
    KeptUnderKeys,
}

/// What columns are ordered by, where it is not their own bytes.
pub fn order_keys(columns: &[ArrayRef]) -> Result<Vec<ArrayRef>, SqlError> {
    super::byte_order::comparable(columns)
}

/// An entry for each row; `value` and `separator` are texts.
pub fn entries(
    nulls: Nulls,
    value: &ArrayRef,
    separator: Option<&ArrayRef>,
    keys: &[ArrayRef],
    options: impl Iterator<Item = SortOptions>,
) -> Result<BinaryArray, SqlError> {
    let fields = keys.iter().map(|k| k.data_type().clone()).zip(options);
    let internal = |e: arrow::error::ArrowError| SqlError::internal(e.to_string());
    let codec = KeyCodec::with_options(fields).map_err(internal)?;
    let encoded = codec.rows(keys).map_err(internal)?;
    let (value, separator) = (value.as_string::<i32>(), separator.map(|s| s.as_string::<i32>()));
    let mut out = BinaryBuilder::new();
    let mut entry = Vec::new();
    for row in 0..value.len() {
        if nulls == Nulls::Skipped && value.is_null(row) {
            out.append_null();
            continue;
        }
        entry.clear();
        if !keys.is_empty() {
            entry.extend_from_slice(encoded.row(row).data());
        }
        let text = if value.is_null(row) { "" } else { value.value(row) };
        let between = separator.filter(|s| s.is_valid(row)).map(|s| s.value(row));
        if between.is_none() && nulls == Nulls::KeptUnderKeys {
            return Err(SqlError::new(
                SqlState::INVALID_PARAMETER_VALUE,
                "field name must not be null",
            ));
        }
        let between = between.unwrap_or_default();
        entry.extend_from_slice(text.as_bytes());
        entry.extend_from_slice(between.as_bytes());
        entry.extend_from_slice(&(between.len() as u32).to_be_bytes());
        let length = if value.is_null(row) { NULL_LENGTH } else { text.len() as u32 };
        entry.extend_from_slice(&length.to_be_bytes());
        out.append_value(&entry);
    }
    Ok(out.finish())
}

/// The value (`None`: NULL) and separator of an entry; `None` if it is damaged.
fn read_entry(entry: &[u8]) -> Option<(Option<&str>, &str)> {
    let at = entry.len().checked_sub(8)?;
    let word = |from: usize| Some(u32::from_be_bytes(entry.get(from..from + 4)?.try_into().ok()?));
    let (between, length) = (word(at)? as usize, word(at + 4)?);
    let separator = entry.get(at.checked_sub(between)?..at)?;
    let separator = std::str::from_utf8(separator).ok()?;
    if length == NULL_LENGTH {
        return Some((None, separator));
    }
    let end = at - between;
    let value = entry.get(end.checked_sub(length as usize)?..end)?;
    Some((Some(std::str::from_utf8(value).ok()?), separator))
}

/// The value of an entry, unless it is NULL or damaged.
pub fn value_of(entry: &[u8]) -> Option<&str> {
    read_entry(entry)?.0
}

/// The order keys of a readable entry.
fn key_of<'a>(entry: &'a [u8], value: Option<&str>, separator: &str) -> &'a [u8] {
    &entry[..entry.len() - 8 - separator.len() - value.map_or(0, str::len)]
}

/// An entry's parts.
struct Entry<'a> {
    key: &'a [u8],
    value: Option<&'a str>,
    separator: &'a str,
    count: i64,
}

/// A group's result as text, from its entries in order, each with how often it is there. `distinct`: an
/// entry counts once. `output` is the call's type. `fraction` is that of a percentile, if it is not in the
/// entries' separators; an empty one is NULL.
pub fn build<'a>(
    func: AggFunc,
    distinct: bool,
    output: &DataType,
    fraction: Option<&str>,
    entries: impl Iterator<Item = (&'a [u8], i64)>,
) -> Result<Option<Box<str>>, SqlError> {
    let mut all = Vec::new();
    for (entry, count) in entries {
        let (value, separator) = read_entry(entry)
            .ok_or_else(|| SqlError::internal("a collected value is malformed"))?;
        let count = if distinct { count.min(1) } else { count };
        if count > 0 {
            all.push(Entry { key: key_of(entry, value, separator), value, separator, count });
        }
    }
    let (Some(first), Some(last)) = (all.first(), all.last()) else { return Ok(None) };
    let text = match func {
        AggFunc::StringAgg => Some(joined(&all, *output == DataType::Binary)),
        AggFunc::ArrayAgg => Some(listed(all.iter().flat_map(|e| (0..e.count).map(|_| e.value)))),
        AggFunc::FirstValue => first.value.map(str::to_owned),
        AggFunc::LastValue => last.value.map(str::to_owned),
        AggFunc::Mode => most_frequent(&all).map(str::to_owned),
        AggFunc::JsonbObjectAgg => Some(object(&all)?),
        AggFunc::PercentileCont | AggFunc::PercentileDisc => {
            percentiles(func, output, fraction.unwrap_or(first.separator), &all)?
        }
        other => return Err(SqlError::internal(format!("{other:?} does not collect"))),
    };
    Ok(text.map(String::into_boxed_str))
}

fn joined(entries: &[Entry<'_>], bytea: bool) -> String {
    let start = if bytea { BYTEA_START } else { "" };
    let mut out = String::from(start);
    let mut first = true;
    for e in entries {
        for _ in 0..e.count {
            if !first {
                out.push_str(e.separator.strip_prefix(start).unwrap_or_default());
            }
            first = false;
            let value = e.value.unwrap_or_default();
            out.push_str(value.strip_prefix(start).unwrap_or_default());
        }
    }
    out
}

/// What the text of a `bytea` begins with; its digits follow.
const BYTEA_START: &str = "\\x";

/// The literal of an array.
fn listed<'a>(values: impl Iterator<Item = Option<&'a str>>) -> String {
    let mut out = String::from("{");
    for (i, value) in values.enumerate() {
        if i > 0 {
            out.push(',');
        }
        match value {
            None => out.push_str("NULL"),
            Some(value) => put_item(value, &mut out),
        }
    }
    out.push('}');
    out
}

/// The first of the most frequent values.
fn most_frequent<'a>(entries: &[Entry<'a>]) -> Option<&'a str> {
    let mut best: Option<(i64, Option<&str>)> = None;
    for level in entries.chunk_by(|a, b| a.key == b.key) {
        let count = level.iter().map(|e| e.count).sum();
        if best.is_none_or(|(most, _)| count > most) {
            best = Some((count, level[0].value));
        }
    }
    best.and_then(|b| b.1)
}

fn object(entries: &[Entry<'_>]) -> Result<String, SqlError> {
    let one = |e: &Entry<'_>| {
        let value = e.value.map_or(Ok(Json::Null), Json::parse)?;
        Ok((e.separator.to_owned(), value))
    };
    let entries = entries.iter().map(one).collect::<Result<Vec<_>, SqlError>>()?;
    Ok(Json::object(entries).print())
}

/// `fractions` is the text of one or of an array of them.
fn percentiles(
    func: AggFunc,
    output: &DataType,
    fractions: &str,
    entries: &[Entry<'_>],
) -> Result<Option<String>, SqlError> {
    let ends: Vec<i64> = entries
        .iter()
        .scan(0, |sum, e| {
            *sum += e.count;
            Some(*sum)
        })
        .collect();
    // The value of a row, counted from 0.
    let at = |row: i64| {
        let entry = &entries[ends.partition_point(|end| *end <= row).min(entries.len() - 1)];
        entry.value.unwrap_or_default()
    };
    let rows = ends.last().copied().unwrap_or_default();
    let one = |fraction: f64| match func {
        AggFunc::PercentileDisc => {
            let row = (fraction * rows as f64).ceil().max(1.0) as i64;
            Ok(at(row - 1).to_owned())
        }
        _ => {
            let place = fraction * (rows - 1) as f64;
            let (low, high) = (place.floor(), place.ceil());
            let value = |row: f64| parse::float(at(row as i64), SqlType::Double);
            let (from, to) = (value(low)?, value(high)?);
            let mut text = String::new();
            let between = if low == high { from } else { from + (to - from) * (place - low) };
            push_float_text(&mut text, between);
            Ok::<String, SqlError>(text)
        }
    };
    if fractions.is_empty() {
        return Ok(None);
    }
    if !matches!(output, DataType::List(_)) {
        return one(read_fraction(fractions)?).map(Some);
    }
    let items = array_items(fractions)
        .ok_or_else(|| SqlError::internal("malformed fractions of a percentile"))?;
    let values = items
        .iter()
        .map(|item| item.as_deref().map(|text| one(read_fraction(text)?)).transpose())
        .collect::<Result<Vec<_>, SqlError>>()?;
    Ok(Some(listed(values.iter().map(Option::as_deref))))
}

fn read_fraction(text: &str) -> Result<f64, SqlError> {
    let fraction = parse::float(text, SqlType::Double)?;
    match (0.0..=1.0).contains(&fraction) {
        true => Ok(fraction),
        false => Err(SqlError::new(
            SqlState::NUMERIC_VALUE_OUT_OF_RANGE,
            format!("percentile value {text} is not between 0 and 1"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::{Int64Array, StringArray};

    const FIRST: SortOptions = SortOptions { descending: false, nulls_first: false };

    fn texts(values: &[Option<&str>]) -> ArrayRef {
        Arc::new(StringArray::from(values.to_vec()))
    }

    fn made(nulls: Nulls, values: &[Option<&str>], separators: &[Option<&str>]) -> BinaryArray {
        let separators = texts(separators);
        entries(nulls, &texts(values), Some(&separators), &[], [].into_iter()).unwrap()
    }

    fn joined_by(
        func: AggFunc,
        output: &DataType,
        all: &[(&BinaryArray, usize, i64)],
    ) -> Option<String> {
        let all = all.iter().map(|(column, row, count)| (column.value(*row), *count));
        build(func, false, output, None, all).unwrap().map(String::from)
    }

    #[test]
    fn bytes_of_entries_are_in_the_order_of_the_keys() {
        let keys: ArrayRef = Arc::new(Int64Array::from(vec![Some(-5), Some(7), None]));
        let values = texts(&[Some("zz"), Some("a"), Some("m")]);
        let sorted = |options: SortOptions| {
            let keys = [Arc::clone(&keys)];
            let found = entries(Nulls::Kept, &values, None, &keys, [options].into_iter()).unwrap();
            let mut all: Vec<&[u8]> = found.iter().flatten().collect();
            all.sort();
            all.into_iter().map(|e| value_of(e).unwrap().to_owned()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(sorted(FIRST), "zz a m");
        assert_eq!(sorted(SortOptions { descending: true, ..FIRST }), "a zz m");
        assert_eq!(sorted(SortOptions { nulls_first: true, ..FIRST }), "m zz a");
    }

    #[test]
    fn entries_are_read_as_they_were_written() {
        let found =
            made(Nulls::Kept, &[Some("größe"), None, Some("")], &[Some(", "), None, Some("")]);
        let read: Vec<_> = found.iter().map(|e| read_entry(e.unwrap()).unwrap()).collect();
        assert_eq!(read, [(Some("größe"), ", "), (None, ""), (Some(""), "")]);
        assert_eq!(value_of(found.value(1)), None);
    }

    #[test]
    fn damaged_entries_are_errors() {
        let whole = made(Nulls::Kept, &[Some("ab")], &[Some(",")]);
        let whole = whole.value(0);
        assert!(read_entry(whole).is_some());
        for end in 0..whole.len() {
            assert_eq!(read_entry(&whole[..end]), None, "{end} bytes");
        }
        let output = DataType::Utf8;
        let damaged = [(&whole[1..], 1)];
        assert!(build(AggFunc::StringAgg, false, &output, None, damaged.into_iter()).is_err());
    }

    #[test]
    fn null_values_are_skipped_or_kept() {
        let (values, none) = ([Some("a"), None], [None, None]);
        assert_eq!(made(Nulls::Skipped, &values, &none).null_count(), 1);
        assert_eq!(made(Nulls::Kept, &values, &none).null_count(), 0);
        let keys = texts(&[None]);
        let error =
            entries(Nulls::KeptUnderKeys, &texts(&[None]), Some(&keys), &[], [].into_iter());
        assert_eq!(error.unwrap_err().state, SqlState::INVALID_PARAMETER_VALUE);
    }

    #[test]
    fn a_distinct_entry_counts_once() {
        let found = made(Nulls::Kept, &[Some("a"), Some("b")], &[Some("-"), Some("+")]);
        let all = [(found.value(0), 3), (found.value(1), 2)];
        let text = build(AggFunc::StringAgg, true, &DataType::Utf8, None, all.into_iter());
        assert_eq!(text.unwrap().as_deref(), Some("a+b"));
    }

    #[test]
    fn bytes_are_joined_behind_one_prefix() {
        let found = made(Nulls::Kept, &[Some("\\x01"), Some("\\xff")], &[None, Some("\\x00")]);
        let all = [(&found, 0, 1), (&found, 1, 1)];
        let joined = joined_by(AggFunc::StringAgg, &DataType::Binary, &all);
        assert_eq!(joined.as_deref(), Some("\\x0100ff"));
    }

    #[test]
    fn percentiles_need_a_fraction_from_zero_to_one() {
        let found = made(Nulls::Kept, &[Some("1"), Some("2")], &[None, None]);
        let of = |fraction: &str| {
            let all = found.iter().flatten().map(|e| (e, 1));
            build(AggFunc::PercentileCont, false, &DataType::Float64, Some(fraction), all)
        };
        assert_eq!(of("0.25").unwrap().as_deref(), Some("1.25"));
        assert_eq!(of("1").unwrap().as_deref(), Some("2"));
        assert_eq!(of("").unwrap(), None, "a fraction that is NULL");
        for wrong in ["1.01", "-0.5", "NaN"] {
            let state = of(wrong).unwrap_err().state;
            assert_eq!(state, SqlState::NUMERIC_VALUE_OUT_OF_RANGE, "{wrong}");
        }
    }

    #[test]
    fn only_collected_functions_are_built() {
        let found = made(Nulls::Kept, &[Some("1")], &[None]);
        let all = found.iter().flatten().map(|e| (e, 1));
        assert!(build(AggFunc::Sum, false, &DataType::Int64, None, all).is_err());
    }
}
