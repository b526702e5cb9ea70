//! Columns, of arrays among them, whose bytes compare as their values do, for all that orders or compares by bytes:
//! intervals go by their length, documents by [`Json::order_key`].

use std::sync::{Arc, OnceLock};

use arrow::array::{Array, ArrayRef, AsArray, BinaryBuilder, ListArray};
use arrow::datatypes::{DataType, Field};
use datafusion::logical_expr::ScalarUDF;
use millrace_common::SqlError;
use millrace_common::json::Json;

use super::arrays::{function, internal, list};
use super::times::lengths;

/// Of the lengths of intervals.
const LENGTH: DataType = DataType::Decimal128(38, 0);

/// Whether values that are equal may have other bytes, in arrays too.
pub fn by_value(t: &DataType) -> bool {
    match t {
        DataType::Interval(_) | DataType::LargeUtf8 => true,
        DataType::List(item) => by_value(item.data_type()),
        _ => false,
    }
}

/// `#order_key(value)`: what a value is ordered by. Not a name that SQL text can contain unquoted.
pub fn order_key() -> Arc<ScalarUDF> {
    static F: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    let of_one = |args: &[DataType]| match args {
        [t] => Some((vec![t.clone()], ordered_by(t))),
        _ => None,
    };
    let eval = |args: &[ArrayRef]| match args {
        [column] => encoded(column),
        _ => Err(internal("the order of one value")),
    };
    Arc::clone(F.get_or_init(|| function("#order_key", of_one, eval, true)))
}

/// The type of what values of a type are ordered by.
fn ordered_by(t: &DataType) -> DataType {
    match t {
        DataType::Interval(_) => LENGTH,
        DataType::LargeUtf8 => DataType::Binary,
        DataType::List(item) if by_value(t) => {
            DataType::List(Arc::new(Field::new_list_field(ordered_by(item.data_type()), true)))
        }
        t => t.clone(),
    }
}

/// The columns with what their values are ordered by. Others are as they are.
pub fn comparable(columns: &[ArrayRef]) -> Result<Vec<ArrayRef>, SqlError> {
    columns.iter().map(encoded).collect()
}

fn encoded(column: &ArrayRef) -> Result<ArrayRef, SqlError> {
    match column.data_type() {
        t if !by_value(t) => Ok(Arc::clone(column)),
        DataType::Interval(_) => lengths(column),
        DataType::List(_) => {
            let lists = list(column)?;
            let values = encoded(lists.values())?;
            let item = Arc::new(Field::new_list_field(values.data_type().clone(), true));
            let (offsets, nulls) = (lists.offsets().clone(), lists.nulls().cloned());
            Ok(Arc::new(ListArray::try_new(item, offsets, values, nulls).map_err(internal)?))
        }
        _ => {
            let texts = column.as_string_opt::<i64>();
            let texts = texts.ok_or_else(|| internal("no column of documents"))?;
            let mut out = BinaryBuilder::with_capacity(texts.len(), texts.value_data().len());
            for text in texts {
                match text {
                    Some(text) => out.append_value(Json::parse(text)?.order_key()),
                    None => out.append_null(),
                }
            }
            Ok(Arc::new(out.finish()))
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::LargeStringArray;

    use super::*;

    #[test]
    fn documents_compare_by_value() {
        let a: ArrayRef = Arc::new(LargeStringArray::from(vec![Some("10"), None, Some("1.0")]));
        let b: ArrayRef = Arc::new(LargeStringArray::from(vec![Some("1"), Some("9")]));
        let found = comparable(&[a, b]).unwrap();
        let (a, b) = (found[0].as_binary::<i32>(), found[1].as_binary::<i32>());
        assert!(a.is_null(1));
        assert_eq!(a.value(2), b.value(0));
        assert!(b.value(0) < b.value(1) && b.value(1) < a.value(0));
    }
}
