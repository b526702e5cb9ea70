//! `string_agg`, of texts and of `bytea`, in batch and over windows. A separator is a value of its row, as
//! in PostgreSQL: it stands before the row's value, and that of the first row is not seen.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use arrow::array::{Array, ArrayRef, AsArray, BinaryArray};
use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::function::{AccumulatorArgs, StateFieldsArgs};
use datafusion::logical_expr::utils::AggregateOrderSensitivity;
use datafusion::logical_expr::{
    Accumulator, AggregateUDF, AggregateUDFImpl, Signature, Volatility,
};
use datafusion::physical_expr::PhysicalSortExpr;
use millrace_common::keys::KeyCodec;
use millrace_common::{SqlError, SqlState, SqlType};

use super::aggregates::{list_state, lists_of, malformed_state, undefined_aggregate};
use super::cast::convert;
use super::ordered_entries::order_keys;
use crate::error::external;

/// `string_agg(value, separator)`.
pub fn string_agg() -> Arc<AggregateUDF> {
    static F: OnceLock<Arc<AggregateUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| {
        let signature = Signature::user_defined(Volatility::Immutable);
        Arc::new(AggregateUDF::from(StringAgg { signature }))
    }))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct StringAgg {
    signature: Signature,
}

impl AggregateUDFImpl for StringAgg {
    fn name(&self) -> &str {
        "string_agg"
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        let text = |t: &DataType| matches!(t, DataType::Utf8 | DataType::Utf8View | DataType::Null);
        match args {
            [value, separator] if text(value) && text(separator) => {
                Ok(vec![DataType::Utf8, DataType::Utf8])
            }
            // A literal is read as a bytea when it is met: DataFusion would take its letters for the bytes.
            [DataType::Binary, DataType::Utf8] => Ok(args.to_vec()),
            [DataType::Binary | DataType::Null, DataType::Binary | DataType::Null] => {
                Ok(vec![DataType::Binary, DataType::Binary])
            }
            _ => Err(external(undefined_aggregate(self.name(), args))),
        }
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        match args.first() {
            Some(DataType::Binary) => Ok(DataType::Binary),
            _ => Ok(DataType::Utf8),
        }
    }

    fn accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        let bytes = *args.return_field.data_type() == DataType::Binary;
        if !args.is_distinct && args.order_bys.is_empty() {
            return Ok(Box::new(Plain { bytes, joined: None, first: None }));
        }
        let known = |o: &PhysicalSortExpr| args.exprs.iter().any(|e| e.eq(&o.expr));
        if args.is_distinct && !args.order_bys.iter().all(known) {
            return Err(external(SqlError::new(
                SqlState("42P10"),
                "in an aggregate with DISTINCT, ORDER BY expressions must appear in argument list",
            )));
        }
        Ok(Box::new(Sorted {
            bytes,
            distinct: args.is_distinct,
            options: args.order_bys.iter().map(|o| o.options).collect(),
            rows: Vec::new(),
            size: 0,
        }))
    }

    fn state_fields(&self, args: StateFieldsArgs) -> Result<Vec<FieldRef>> {
        if args.is_distinct || !args.ordering_fields.is_empty() {
            let item = Arc::new(Field::new_list_field(DataType::Binary, true));
            return Ok(vec![Arc::new(Field::new("rows", DataType::List(item), true))]);
        }
        Ok(vec![
            Arc::new(Field::new("joined", DataType::Binary, true)),
            Arc::new(Field::new("first", DataType::Binary, true)),
        ])
    }

    fn with_beneficial_ordering(
        self: Arc<Self>,
        _: bool,
    ) -> Result<Option<Arc<dyn AggregateUDFImpl>>> {
        Ok(Some(self))
    }

    /// Rows are sorted here, by what comes with the arguments.
    fn order_sensitivity(&self) -> AggregateOrderSensitivity {
        AggregateOrderSensitivity::SoftRequirement
    }
}

/// A column of values or separators as bytes.
fn raw(column: &ArrayRef, bytes: bool) -> Result<BinaryArray> {
    let column = match bytes {
        true => convert(column, SqlType::Bytea).map_err(external)?,
        false => arrow::compute::cast(column, &DataType::Binary)?,
    };
    match column.as_binary_opt::<i32>() {
        Some(column) => Ok(column.clone()),
        None => Err(external(SqlError::internal("string_agg takes texts or bytea"))),
    }
}

fn get(column: &BinaryArray, row: usize) -> Option<&[u8]> {
    column.is_valid(row).then(|| column.value(row))
}

/// Bytes as a value of the result's type.
fn scalar(joined: Option<Vec<u8>>, bytes: bool) -> Result<ScalarValue> {
    if bytes {
        return Ok(ScalarValue::Binary(joined));
    }
    let text = joined.map(String::from_utf8).transpose();
    let text = text.map_err(|_| external(SqlError::internal("string_agg of no text")))?;
    Ok(ScalarValue::Utf8(text))
}

/// Rows in the order in which they come.
#[derive(Debug)]
struct Plain {
    /// Of `bytea`.
    bytes: bool,
    /// `None`: no value yet.
    joined: Option<Vec<u8>>,
    /// The separator before the first value, for when rows of another part turn out to come before it.
    first: Option<Vec<u8>>,
}

impl Plain {
    fn push(&mut self, value: &[u8], separator: Option<&[u8]>) {
        match &mut self.joined {
            Some(joined) => {
                joined.extend_from_slice(separator.unwrap_or_default());
                joined.extend_from_slice(value);
            }
            None => {
                self.joined = Some(value.to_vec());
                self.first = separator.map(<[u8]>::to_vec);
            }
        }
    }

    fn add(&mut self, values: &BinaryArray, separators: &BinaryArray) {
        for row in 0..values.len() {
            if let Some(value) = get(values, row) {
                self.push(value, get(separators, row));
            }
        }
    }
}

fn two(values: &[ArrayRef]) -> Result<(&ArrayRef, &ArrayRef)> {
    match values {
        [value, separator, ..] => Ok((value, separator)),
        _ => Err(external(SqlError::internal("string_agg takes a value and a separator"))),
    }
}

impl Accumulator for Plain {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        let (value, separator) = two(values)?;
        self.add(&raw(value, self.bytes)?, &raw(separator, self.bytes)?);
        Ok(())
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        scalar(self.joined.clone(), self.bytes)
    }

    fn size(&self) -> usize {
        let kept = |b: &Option<Vec<u8>>| b.as_ref().map_or(0, Vec::capacity);
        size_of::<Plain>() + kept(&self.joined) + kept(&self.first)
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        Ok(vec![ScalarValue::Binary(self.joined.clone()), ScalarValue::Binary(self.first.clone())])
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        let (joined, first) = two(states)?;
        self.add(&raw(joined, true)?, &raw(first, true)?);
        Ok(())
    }
}

/// Rows in the order of an ORDER BY, with DISTINCT each pair of a value and a separator once.
#[derive(Debug)]
struct Sorted {
    bytes: bool,
    distinct: bool,
    options: Vec<SortOptions>,
    /// As [`row_bytes`] makes them, as they come.
    rows: Vec<Box<[u8]>>,
    /// Bytes of all rows.
    size: usize,
}

/// All ones for the length of a separator that is NULL.
const NULL_LENGTH: u32 = u32::MAX;

/// `length of the key | length of the separator | key | separator | value`, lengths as four bytes, big-endian.
fn row_bytes(key: &[u8], separator: Option<&[u8]>, value: &[u8]) -> Box<[u8]> {
    let between = separator.map_or(NULL_LENGTH, |s| s.len() as u32);
    let lengths = [(key.len() as u32).to_be_bytes(), between.to_be_bytes()];
    [&lengths[0][..], &lengths[1], key, separator.unwrap_or_default(), value].concat().into()
}

/// A row's key, separator and value.
type Parts<'a> = (&'a [u8], Option<&'a [u8]>, &'a [u8]);

/// `None`: damaged.
fn row_parts(row: &[u8]) -> Option<Parts<'_>> {
    let word = |from: usize| Some(u32::from_be_bytes(row.get(from..from + 4)?.try_into().ok()?));
    let (key, between) = (word(0)? as usize, word(4)?);
    let (key, rest) = row.get(8..)?.split_at_checked(key)?;
    if between == NULL_LENGTH {
        return Some((key, None, rest));
    }
    let (separator, value) = rest.split_at_checked(between as usize)?;
    Some((key, Some(separator), value))
}

impl Sorted {
    fn keep(&mut self, row: Box<[u8]>) {
        self.size += row.len();
        self.rows.push(row);
    }

    fn joined(&self) -> Result<Option<Vec<u8>>> {
        let rows = self.rows.iter().map(|r| row_parts(r).ok_or_else(malformed_state));
        let mut rows = rows.collect::<Result<Vec<Parts<'_>>>>()?;
        // Stable: rows that are level stay as they came.
        rows.sort_by(|a, b| a.0.cmp(b.0));
        let mut seen = HashSet::new();
        let mut all = Plain { bytes: self.bytes, joined: None, first: None };
        for (_, separator, value) in rows {
            if !self.distinct || seen.insert((separator, value)) {
                all.push(value, separator);
            }
        }
        Ok(all.joined)
    }
}

impl Accumulator for Sorted {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        let (value, separator) = two(values)?;
        let (value, separator) = (raw(value, self.bytes)?, raw(separator, self.bytes)?);
        let keys = values.get(2..2 + self.options.len()).unwrap_or_default();
        if keys.is_empty() {
            for row in 0..value.len() {
                if let Some(v) = get(&value, row) {
                    self.keep(row_bytes(&[], get(&separator, row), v));
                }
            }
            return Ok(());
        }
        let keys = order_keys(keys).map_err(external)?;
        let types = keys.iter().map(|k| k.data_type().clone());
        let codec = KeyCodec::with_options(types.zip(self.options.iter().copied()))?;
        let encoded = codec.rows(&keys)?;
        for row in 0..value.len() {
            if let Some(v) = get(&value, row) {
                self.keep(row_bytes(encoded.row(row).data(), get(&separator, row), v));
            }
        }
        Ok(())
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        scalar(self.joined()?, self.bytes)
    }

    fn size(&self) -> usize {
        size_of::<Sorted>() + self.size + self.rows.capacity() * size_of::<Box<[u8]>>()
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        let row = |r: &[u8]| ScalarValue::Binary(Some(r.to_vec()));
        let all: Vec<ScalarValue> = self.rows.iter().map(|r| row(r)).collect();
        Ok(vec![list_state(&all, &DataType::Binary)])
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        for list in lists_of(states)?.iter().flatten() {
            let rows = list.as_binary_opt::<i32>().ok_or_else(malformed_state)?;
            rows.iter().flatten().for_each(|row| self.keep(row.into()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::StringArray;

    use super::*;

    #[test]
    fn separators_stand_before_their_values() {
        let texts = |all: [Option<&str>; 4]| Arc::new(StringArray::from(all.to_vec())) as ArrayRef;
        let values = texts([None, Some("a"), Some("b"), Some("c")]);
        let separators = texts([Some("0"), Some("1"), Some("2"), None]);
        let mut plain = Plain { bytes: false, joined: None, first: None };
        plain.update_batch(&[values, separators]).unwrap();
        assert_eq!(plain.evaluate().unwrap(), ScalarValue::from("a2bc"));
        let mut other = Plain { bytes: false, joined: Some(b"x".to_vec()), first: None };
        let state = plain.state().unwrap();
        let state: Vec<ArrayRef> = state.iter().map(|s| s.to_array().unwrap()).collect();
        other.merge_batch(&state).unwrap();
        assert_eq!(other.evaluate().unwrap(), ScalarValue::from("x1a2bc"));
    }

    #[test]
    fn rows_are_sorted_and_each_pair_is_once() {
        let options = vec![SortOptions { descending: true, nulls_first: false }];
        let mut sorted =
            Sorted { bytes: false, distinct: true, options, rows: Vec::new(), size: 0 };
        let values: ArrayRef = Arc::new(StringArray::from(vec!["a", "b", "a", "c"]));
        let separators: ArrayRef = Arc::new(StringArray::from(vec![",", ",", ",", ";"]));
        sorted.update_batch(&[Arc::clone(&values), separators, values]).unwrap();
        assert_eq!(sorted.evaluate().unwrap(), ScalarValue::from("c,b,a"));
    }
}
