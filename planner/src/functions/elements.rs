//! Columns, of arrays among them, whose bytes compare as their values do, for functions that compare by bytes: intervals
//! are compared by their length, documents with their numbers by value.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, ListArray};
use arrow::datatypes::{DataType, Field};
use millrace_common::SqlError;
use millrace_common::json::Json;

use super::arrays::{internal, list};
use super::times::lengths;

/// Whether values that are equal may have other bytes, in arrays too.
pub fn by_value(t: &DataType) -> bool {
    match t {
        DataType::Interval(_) | DataType::LargeUtf8 => true,
        DataType::List(item) => by_value(item.data_type()),
        _ => false,
    }
}

/// The columns with intervals as their lengths and documents as their places among all of these. Others are as they are.
pub fn comparable(columns: &[ArrayRef]) -> Result<Vec<ArrayRef>, SqlError> {
    let places = places(columns.iter().flat_map(documents).collect())?;
    columns.iter().map(|column| encoded(column, &places)).collect()
}

/// The texts of documents, in arrays too.
fn documents(column: &ArrayRef) -> Vec<&str> {
    match column.data_type() {
        DataType::List(_) => {
            column.as_list_opt::<i32>().map_or_else(Vec::new, |lists| documents(lists.values()))
        }
        DataType::LargeUtf8 => column
            .as_string_opt::<i64>()
            .map_or_else(Vec::new, |texts| texts.iter().flatten().collect()),
        _ => Vec::new(),
    }
}

/// Which place each has in the order of all; equal ones have the same.
fn places(mut texts: Vec<&str>) -> Result<HashMap<&str, i64>, SqlError> {
    texts.sort_unstable();
    texts.dedup();
    let parsed = texts.into_iter().map(|text| Ok((Json::parse(text)?, text)));
    let mut parsed = parsed.collect::<Result<Vec<(Json, &str)>, SqlError>>()?;
    parsed.sort_by(|a, b| a.0.compare(&b.0));
    let mut places = HashMap::with_capacity(parsed.len());
    let (mut place, mut before) = (0i64, None::<&Json>);
    for (document, text) in &parsed {
        place += i64::from(before.is_some_and(|before| before.compare(document).is_ne()));
        before = Some(document);
        places.insert(*text, place);
    }
    Ok(places)
}

fn encoded(column: &ArrayRef, places: &HashMap<&str, i64>) -> Result<ArrayRef, SqlError> {
    match column.data_type() {
        t if !by_value(t) => Ok(Arc::clone(column)),
        DataType::Interval(_) => lengths(column),
        DataType::List(_) => {
            let lists = list(column)?;
            let values = encoded(lists.values(), places)?;
            let item = Arc::new(Field::new_list_field(values.data_type().clone(), true));
            let (offsets, nulls) = (lists.offsets().clone(), lists.nulls().cloned());
            Ok(Arc::new(ListArray::try_new(item, offsets, values, nulls).map_err(internal)?))
        }
        _ => {
            let texts = column.as_string_opt::<i64>();
            let texts = texts.ok_or_else(|| internal("no column of documents"))?;
            let place = |text: Option<&str>| text.and_then(|text| places.get(text).copied());
            Ok(Arc::new(texts.iter().map(place).collect::<Int64Array>()))
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::LargeStringArray;
    use arrow::datatypes::Int64Type;

    use super::*;

    #[test]
    fn documents_have_places_by_value() {
        let a: ArrayRef = Arc::new(LargeStringArray::from(vec![Some("10"), None, Some("1.0")]));
        let b: ArrayRef = Arc::new(LargeStringArray::from(vec![Some("1"), Some("9")]));
        let found = comparable(&[a, b]).unwrap();
        let of = |i: usize| found[i].as_primitive::<Int64Type>().iter().collect::<Vec<_>>();
        assert_eq!(of(0), [Some(2), None, Some(0)]);
        assert_eq!(of(1), [Some(0), Some(1)]);
    }
}
