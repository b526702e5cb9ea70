//! A value as an array, with an entry for each row of the batch, also where what computes it found one for all of them.
//!
//! DataFusion takes an expression that has one value for a batch without rows for a constant, when it prepares `x IN (…)`.
//! A call of this function has none there.

use std::sync::{Arc, LazyLock};

use arrow::datatypes::{DataType, FieldRef};
use datafusion::common::Result;
use datafusion::logical_expr::{
    ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
    Volatility,
};
use millrace_common::SqlError;

use crate::error::external;

/// `#each_row(value)`; not a name that SQL text can have.
pub fn each_row() -> Arc<ScalarUDF> {
    static F: LazyLock<Arc<ScalarUDF>> = LazyLock::new(|| {
        let signature = Signature::any(1, Volatility::Immutable);
        Arc::new(ScalarUDF::from(EachRow { signature }))
    });
    Arc::clone(&F)
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct EachRow {
    signature: Signature,
}

fn misuse() -> datafusion::error::DataFusionError {
    external(SqlError::internal("#each_row takes one value"))
}

impl ScalarUDFImpl for EachRow {
    fn name(&self) -> &str {
        "#each_row"
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        args.first().cloned().ok_or_else(misuse)
    }

    /// The value's: nodes that were planned before the call stood in them know whether it may be NULL.
    fn return_field_from_args(&self, args: ReturnFieldArgs<'_>) -> Result<FieldRef> {
        args.arg_fields.first().cloned().ok_or_else(misuse)
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [value] = args.args.as_slice() else { return Err(misuse()) };
        Ok(ColumnarValue::Array(value.to_array(args.number_rows)?))
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::Field;
    use datafusion::common::ScalarValue;
    use datafusion::common::config::ConfigOptions;

    use super::*;

    #[test]
    fn one_value_becomes_an_array_of_all_rows() {
        for rows in [0, 1, 3] {
            let field: FieldRef = Arc::new(Field::new("a", DataType::Int64, false));
            let args = ScalarFunctionArgs {
                args: vec![ColumnarValue::Scalar(ScalarValue::from(7i64))],
                arg_fields: vec![Arc::clone(&field)],
                number_rows: rows,
                return_field: field,
                config_options: Arc::new(ConfigOptions::default()),
            };
            let value = each_row().invoke_with_args(args).unwrap();
            let ColumnarValue::Array(values) = value else { panic!("a scalar of {rows} rows") };
            assert_eq!((values.len(), values.null_count()), (rows, 0));
        }
    }

    #[test]
    fn the_result_may_be_null_where_the_value_may() {
        for nullable in [false, true] {
            let fields: [FieldRef; 1] = [Arc::new(Field::new("a", DataType::Utf8, nullable))];
            let args = ReturnFieldArgs { arg_fields: &fields, scalar_arguments: &[None] };
            let result = each_row().return_field_from_args(args).unwrap();
            assert_eq!((result.is_nullable(), result.data_type()), (nullable, &DataType::Utf8));
        }
    }
}
