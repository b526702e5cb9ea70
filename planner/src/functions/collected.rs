//! What aggregates that keep the rows of a group (`string_agg`, `array_agg`) keep of a row: one
//! binary value whose byte order is the order of the aggregate's `ORDER BY`.
//!
//! `order keys | value | separator | length of the separator | length of the value`, lengths as four
//! bytes, big-endian; all ones for the length of a value that is NULL. It is stored in state tables.

use std::sync::{Arc, OnceLock};

use arrow::array::{Array, ArrayRef, AsArray, BinaryBuilder};
use arrow::compute::SortOptions;
use arrow::datatypes::DataType;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use millrace_common::SqlError;
use millrace_common::keys::KeyCodec;

use crate::error::external;

const NULL_LENGTH: u32 = u32::MAX;

/// `collect_entry(flags, value, separator, order keys…)`. Flags: `s` or `k` (NULL values are skipped, or
/// kept), then `a` or `d` and `f` or `l` (nulls first or last) for each key.
pub fn collect_entry() -> Arc<ScalarUDF> {
    static F: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| {
        let signature = Signature::variadic_any(Volatility::Immutable);
        Arc::new(ScalarUDF::from(CollectEntry { signature }))
    }))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct CollectEntry {
    signature: Signature,
}

impl ScalarUDFImpl for CollectEntry {
    fn name(&self) -> &str {
        "collect_entry"
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(DataType::Binary)
    }

    fn is_strict(&self) -> bool {
        false
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let bad = || external(SqlError::internal("malformed arguments of collect_entry"));
        let Some(ColumnarValue::Scalar(ScalarValue::Utf8(Some(flags)))) = args.args.first() else {
            return Err(bad());
        };
        let rows = args.number_rows;
        let arrays: Vec<ArrayRef> =
            args.args[1..].iter().map(|a| a.to_array(rows)).collect::<Result<_>>()?;
        let [value, separator, keys @ ..] = arrays.as_slice() else { return Err(bad()) };
        let options = flags.as_bytes()[1..]
            .chunks_exact(2)
            .map(|f| SortOptions { descending: f[0] == b'd', nulls_first: f[1] == b'f' });
        let fields = keys.iter().map(|k| k.data_type().clone()).zip(options);
        let codec = KeyCodec::with_options(fields)?;
        let encoded = codec.rows(keys)?;
        let (value, separator) = (value.as_string::<i32>(), separator.as_string::<i32>());
        let skip = flags.starts_with('s');
        let mut out = BinaryBuilder::new();
        let mut entry = Vec::new();
        for row in 0..rows {
            if skip && value.is_null(row) {
                out.append_null();
                continue;
            }
            entry.clear();
            if !keys.is_empty() {
                entry.extend_from_slice(encoded.row(row).data());
            }
            let text = if value.is_null(row) { "" } else { value.value(row) };
            let between = if separator.is_null(row) { "" } else { separator.value(row) };
            entry.extend_from_slice(text.as_bytes());
            entry.extend_from_slice(between.as_bytes());
            entry.extend_from_slice(&(between.len() as u32).to_be_bytes());
            let length = if value.is_null(row) { NULL_LENGTH } else { text.len() as u32 };
            entry.extend_from_slice(&length.to_be_bytes());
            out.append_value(&entry);
        }
        Ok(ColumnarValue::Array(Arc::new(out.finish())))
    }
}

/// The value (`None`: NULL) and separator of an entry; `None` if it is damaged.
pub fn read_entry(entry: &[u8]) -> Option<(Option<&str>, &str)> {
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
