//! `width_bucket(value, thresholds)`, and the rows of `regexp_matches`, which are arrays.

use std::sync::Arc;

use arrow::array::*;
use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Field};
use datafusion::logical_expr::ScalarUDF;
use millrace_common::keys::KeyCodec;
use millrace_common::types::Element;
use millrace_common::{SqlError, SqlState, SqlType};

use super::arrays::{array_of, function, internal, list, range};
use super::cast::convert;
use crate::types::common_type;

/// Both, under the names by which the planner's `bind` looks for them.
pub fn functions() -> Vec<Arc<ScalarUDF>> {
    vec![
        function("width_bucket_of", valued, bucket, true),
        function("text_arrays", texts, arrays, true),
    ]
}

fn valued(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    let [value, DataType::List(item)] = args else { return None };
    let common = match (value, item.data_type()) {
        (DataType::Null, t) | (t, DataType::Null) => t.clone(),
        (a, b) => common_type(a, b)?,
    };
    Some((vec![common.clone(), array_of(&common)], DataType::Int32))
}

/// Bytes in the order of values.
fn sortable(values: &ArrayRef) -> Result<BinaryArray, SqlError> {
    let codec = KeyCodec::with_options([(values.data_type().clone(), SortOptions::default())]);
    let rows = codec.map_err(internal)?.rows(std::slice::from_ref(values)).map_err(internal)?;
    Ok(BinaryArray::from_iter_values(rows.iter().map(|r| r.data())))
}

/// How many of the thresholds, which are in order, a value has reached.
fn bucket(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [values, thresholds] = args else { return Err(internal("a value and its thresholds")) };
    let lists = list(thresholds)?;
    let (keys, bounds) = (sortable(values)?, sortable(lists.values())?);
    let mut out = Int32Builder::with_capacity(values.len());
    for row in 0..values.len() {
        if values.is_null(row) || lists.is_null(row) {
            out.append_null();
            continue;
        }
        let places = range(lists, row);
        if places.clone().any(|at| lists.values().is_null(at)) {
            let message = "thresholds array must not contain NULLs";
            return Err(SqlError::new(SqlState("22004"), message));
        }
        let (mut low, mut high) = (places.start, places.end);
        while low < high {
            let middle = low + (high - low) / 2;
            match keys.value(row) < bounds.value(middle) {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        out.append_value((low - places.start) as i32);
    }
    Ok(Arc::new(out.finish()))
}

fn texts(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    let texts = array_of(&DataType::Utf8);
    match args {
        [t] if *t == texts => Some((vec![texts.clone()], array_of(&texts))),
        _ => None,
    }
}

/// Texts of arrays as arrays.
fn arrays(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [column] = args else { return Err(internal("an array of texts")) };
    let lists = list(column)?;
    let items = convert(lists.values(), SqlType::Array(Element::Text))?;
    let field = Arc::new(Field::new_list_field(items.data_type().clone(), true));
    let nested = ListArray::try_new(field, lists.offsets().clone(), items, lists.nulls().cloned());
    Ok(Arc::new(nested.map_err(internal)?))
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn a_bucket_begins_with_its_threshold() {
        check(&[
            ("width_bucket_of(5, '{1,5,10}'::int4[])", "2"),
            ("width_bucket_of(0, '{1,5,10}'::int4[])", "0"),
            ("width_bucket_of(10, '{1,5,10}'::int4[])", "3"),
            ("width_bucket_of(1, '{}'::int4[])", "0"),
            ("width_bucket_of(5.5, '{1,5,10}'::int4[])", "2"),
            ("width_bucket_of('NaN'::float8, '{1,Infinity,NaN}'::float8[])", "3"),
            ("width_bucket_of('b'::text, '{a,b,c}'::text[])", "2"),
            ("width_bucket_of('2024-01-15'::date, '{2024-01-01,2024-02-01}'::date[])", "1"),
        ]);
    }

    #[test]
    fn nulls_and_types() {
        check(&[
            ("width_bucket_of(NULL::int4, '{1,5}'::int4[])", "NULL"),
            ("width_bucket_of(1, NULL::int4[])", "NULL"),
            ("width_bucket_of(1, '{1,NULL}'::int4[])", "error 22004"),
        ]);
    }
}
