//! `array_sort(array [, descending [, nulls first]])`, as later versions of PostgreSQL have it: NULLs are the greatest.
//! The directions may also be written as DataFusion has them: 'DESC', 'NULLS FIRST'.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, ListArray, UInt32Array};
use arrow::compute::{SortOptions, take};
use arrow::datatypes::DataType;
use datafusion::logical_expr::ScalarUDF;
use millrace_common::keys::KeyCodec;
use millrace_common::{SqlError, SqlState};

use super::arrays::{function, internal, list, range};
use super::byte_order::comparable;

pub fn functions() -> Vec<Arc<ScalarUDF>> {
    ["array_sort", "list_sort"].map(|name| function(name, types, sort, true)).into()
}

fn types(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    let direction = |t: &DataType| matches!(t, DataType::Boolean | DataType::Utf8);
    match args {
        [array @ DataType::List(_), rest @ ..] if rest.len() < 3 && rest.iter().all(direction) => {
            Some((args.to_vec(), array.clone()))
        }
        _ => None,
    }
}

/// Whether a row's direction is this one; `word` is the one that it is otherwise.
fn is(column: &ArrayRef, row: usize, this: &str, word: &str) -> Result<bool, SqlError> {
    if let Some(column) = column.as_boolean_opt() {
        return Ok(column.value(row));
    }
    let text = column.as_string_opt::<i32>().ok_or_else(|| internal("no direction"))?.value(row);
    match text.trim() {
        text if text.eq_ignore_ascii_case(this) => Ok(true),
        text if text.eq_ignore_ascii_case(word) => Ok(false),
        text => Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!("\"{text}\" is neither {this} nor {word}"),
        )),
    }
}

fn sort(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [array, directions @ ..] = args else { return Err(internal("array_sort of one")) };
    let lists = list(array)?;
    let keys = comparable(std::slice::from_ref(lists.values()))?;
    let t = keys.first().ok_or_else(|| internal("no elements"))?.data_type().clone();
    let options = SortOptions { descending: false, nulls_first: false };
    let codec = KeyCodec::with_options([(t, options)]).map_err(internal)?;
    let rows = codec.rows(&keys).map_err(internal)?;
    let mut places: Vec<u32> = Vec::with_capacity(lists.values().len());
    let mut lengths = Vec::with_capacity(lists.len());
    for row in 0..lists.len() {
        if lists.is_null(row) || directions.iter().any(|d| d.is_null(row)) {
            lengths.push(0);
            continue;
        }
        let descending = match directions.first() {
            Some(direction) => is(direction, row, "DESC", "ASC")?,
            None => false,
        };
        let nulls_first = match directions.get(1) {
            Some(nulls) => is(nulls, row, "NULLS FIRST", "NULLS LAST")?,
            None => descending,
        };
        let elements = range(lists, row);
        lengths.push(elements.len());
        let (mut known, nulls): (Vec<u32>, Vec<u32>) =
            elements.map(|i| i as u32).partition(|i| lists.values().is_valid(*i as usize));
        known.sort_by(|a, b| {
            let order = rows.row(*a as usize).cmp(&rows.row(*b as usize));
            if descending { order.reverse() } else { order }
        });
        match nulls_first {
            true => places.extend(nulls.into_iter().chain(known)),
            false => places.extend(known.into_iter().chain(nulls)),
        }
    }
    let values = take(lists.values(), &UInt32Array::from(places), None).map_err(internal)?;
    let DataType::List(item) = array.data_type() else { return Err(internal("no array")) };
    let ends = arrow::buffer::OffsetBuffer::from_lengths(lengths);
    let known = |row| lists.is_valid(row) && directions.iter().all(|d| d.is_valid(row));
    let valid: arrow::buffer::NullBuffer = (0..lists.len()).map(known).collect();
    let sorted = ListArray::try_new(Arc::clone(item), ends, values, Some(valid));
    Ok(Arc::new(sorted.map_err(internal)?))
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn values_in_order() {
        check(&[
            ("array_sort('{3,1,2}'::int4[])", "{1,2,3}"),
            ("array_sort('{3,NULL,1}'::int4[])", "{1,3,NULL}"),
            ("array_sort('{}'::int4[])", "{}"),
            ("array_sort(NULL::int4[])", "NULL"),
            (
                "array_sort('{NaN,-Infinity,1,-0,Infinity}'::float8[])",
                "{-Infinity,-0,1,Infinity,NaN}",
            ),
            ("array_sort('{b,ä,a,B}'::text[])", "{B,a,b,ä}"),
            (
                "array_sort('{\"1 mon\",\"29 days\",\"31 days\"}'::interval[])",
                "{\"29 days\",\"1 mon\",\"31 days\"}",
            ),
            ("list_sort('{2.50,2.5,1}'::numeric[])", "{1,2.5,2.5}"),
        ]);
    }

    #[test]
    fn directions() {
        check(&[
            ("array_sort('{3,NULL,1}'::int4[], true)", "{NULL,3,1}"),
            ("array_sort('{3,NULL,1}'::int4[], true, false)", "{3,1,NULL}"),
            ("array_sort('{3,NULL,1}'::int4[], false, true)", "{NULL,1,3}"),
            ("array_sort('{3,NULL,1}'::int4[], 'DESC')", "{NULL,3,1}"),
            ("array_sort('{3,NULL,1}'::int4[], 'desc', 'nulls last')", "{3,1,NULL}"),
            ("array_sort('{3,NULL,1}'::int4[], 'ASC', 'NULLS FIRST')", "{NULL,1,3}"),
            ("array_sort('{3,1}'::int4[], NULL::bool)", "NULL"),
            ("array_sort('{3,1}'::int4[], 'up')", "error 22023"),
        ]);
    }
}
