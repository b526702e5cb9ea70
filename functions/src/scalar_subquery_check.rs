//! The value of a subquery that is used as an expression: the one element of the array of its rows, NULL of
//! none. Of more there is an error, 21000.

use std::sync::{Arc, LazyLock};

use arrow::array::{Array, ArrayRef, AsArray, UInt32Array};
use arrow::compute::take;
use arrow::datatypes::DataType;
use datafusion::common::Result;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, Signature, Volatility,
};
use millrace_common::{SqlError, SqlState};

use crate::error::external;
use crate::plain::PlainScalar;

/// `single_value(array)`.
pub fn scalar_subquery_check() -> Arc<ScalarUDF> {
    static F: LazyLock<Arc<ScalarUDF>> = LazyLock::new(|| {
        let signature = Signature::any(1, Volatility::Immutable);
        PlainScalar::new("single_value", signature, element_type, single).udf()
    });
    Arc::clone(&F)
}

fn misuse() -> datafusion::error::DataFusionError {
    external(SqlError::internal("single_value takes an array"))
}

fn single_of(lists: &ArrayRef) -> Result<ArrayRef> {
    let lists = lists.as_list_opt::<i32>().ok_or_else(misuse)?;
    let offsets = lists.value_offsets();
    let element = |row: usize| match offsets[row + 1] - offsets[row] {
        _ if lists.is_null(row) => Ok(None),
        0 => Ok(None),
        1 => Ok(Some(offsets[row] as u32)),
        _ => Err(external(SqlError::new(
            SqlState::CARDINALITY_VIOLATION,
            "more than one row returned by a subquery used as an expression",
        ))),
    };
    let elements = (0..lists.len()).map(element).collect::<Result<UInt32Array>>()?;
    Ok(take(lists.values(), &elements, None)?)
}

fn element_type(args: &[DataType]) -> Result<DataType> {
    match args {
        [DataType::List(element)] => Ok(element.data_type().clone()),
        _ => Err(misuse()),
    }
}

fn single(args: ScalarFunctionArgs) -> Result<ColumnarValue> {
    let [list] = args.args.as_slice() else { return Err(misuse()) };
    Ok(ColumnarValue::Array(single_of(&list.to_array(args.number_rows)?)?))
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn the_only_row_or_none() {
        check(&[
            ("single_value('{7}'::int4[])", "7"),
            ("single_value('{}'::int4[])", "NULL"),
            ("single_value('{NULL}'::int4[])", "NULL"),
            ("single_value(NULL::int4[])", "NULL"),
            ("single_value('{ä}'::text[])", "ä"),
        ]);
    }

    #[test]
    fn more_than_one_row_is_an_error() {
        check(&[
            ("single_value('{1,2}'::int4[])", "error 21000"),
            ("single_value('{NULL,NULL}'::int4[])", "error 21000"),
        ]);
    }
}
