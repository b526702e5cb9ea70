//! `value IN (a, b)` that the optimiser leaves as it is.
//!
//! DataFusion merges two lists that compare the same value as if their items were constants, and the value not NULL.
//! A call of this function stands for a list where that would change the result.

use std::sync::{Arc, LazyLock};

use arrow::array::{Array, ArrayRef, BooleanArray, Scalar};
use arrow::compute::kernels::boolean::or_kleene;
use arrow::compute::kernels::cmp;
use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
    Volatility,
};
use millrace_common::SqlError;

use crate::error::external;

/// Arguments of which it is known whether they may be NULL: DataFusion looks at no more of a list, whose nodes agree with
/// those of the call.
const INSPECTED: usize = 6;

/// `#in_list(value, item, …)`; not a name that SQL text can have. The types are equal, and none is nested.
pub fn in_list() -> Arc<ScalarUDF> {
    static F: LazyLock<Arc<ScalarUDF>> = LazyLock::new(|| {
        let signature = Signature::variadic_any(Volatility::Immutable);
        Arc::new(ScalarUDF::from(InListCall { signature }))
    });
    Arc::clone(&F)
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct InListCall {
    signature: Signature,
}

fn misuse() -> datafusion::error::DataFusionError {
    external(SqlError::internal("#in_list takes a value and items"))
}

/// Where values are equal to an item.
fn equal(values: &ArrayRef, item: &ColumnarValue) -> Result<BooleanArray> {
    Ok(match item {
        ColumnarValue::Array(items) => cmp::eq(values, items)?,
        ColumnarValue::Scalar(item) => cmp::eq(values, &Scalar::new(item.to_array()?))?,
    })
}

impl ScalarUDFImpl for InListCall {
    fn name(&self) -> &str {
        "#in_list"
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(DataType::Boolean)
    }

    /// It may be NULL where the list might.
    fn return_field_from_args(&self, args: ReturnFieldArgs<'_>) -> Result<FieldRef> {
        let fields = args.arg_fields;
        let nullable = fields.len() > INSPECTED || fields.iter().any(|f| f.is_nullable());
        Ok(Arc::new(Field::new(self.name(), DataType::Boolean, nullable)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [value, items @ ..] = args.args.as_slice() else { return Err(misuse()) };
        // A constant call is a constant.
        let is_scalar = args.args.iter().all(|a| matches!(a, ColumnarValue::Scalar(_)));
        let values = value.to_array(if is_scalar { 1 } else { args.number_rows })?;
        let mut found = BooleanArray::from(vec![false; values.len()]);
        for item in items {
            found = or_kleene(&found, &equal(&values, item)?)?;
        }
        Ok(match is_scalar {
            true => ColumnarValue::Scalar(ScalarValue::try_from_array(&found, 0)?),
            false => ColumnarValue::Array(Arc::new(found)),
        })
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{AsArray, Int64Array};
    use datafusion::common::config::ConfigOptions;

    use super::*;

    fn call(args: Vec<ColumnarValue>, rows: usize) -> ColumnarValue {
        let field: FieldRef = Arc::new(Field::new("a", DataType::Int64, true));
        let args = ScalarFunctionArgs {
            arg_fields: vec![Arc::clone(&field); args.len()],
            args,
            number_rows: rows,
            return_field: Arc::new(Field::new("b", DataType::Boolean, true)),
            config_options: Arc::new(ConfigOptions::default()),
        };
        in_list().invoke_with_args(args).unwrap()
    }

    /// As PostgreSQL 15 has it: NULL unless an item is equal.
    #[test]
    fn what_is_not_known_is_null() {
        let array = |items: Vec<Option<i64>>| -> ColumnarValue {
            ColumnarValue::Array(Arc::new(Int64Array::from(items)))
        };
        let one = |item| ColumnarValue::Scalar(ScalarValue::Int64(item));
        let values = array(vec![Some(1), Some(2), None, Some(4)]);
        let items = [one(Some(1)), array(vec![None, None, Some(3), Some(5)])];
        let args = [vec![values], items.to_vec()].concat();
        let ColumnarValue::Array(found) = call(args, 4) else { panic!("one value for all rows") };
        let found: Vec<_> = found.as_boolean().iter().collect();
        assert_eq!(found, [Some(true), None, None, Some(false)]);
    }

    #[test]
    fn a_call_of_constants_is_a_constant() {
        let one = |item| ColumnarValue::Scalar(ScalarValue::Int64(item));
        for (items, expected) in [
            (vec![Some(2), Some(1)], Some(true)),
            (vec![Some(2), None], None),
            (vec![Some(2)], Some(false)),
        ] {
            let args = [vec![one(Some(1))], items.into_iter().map(one).collect()].concat();
            let ColumnarValue::Scalar(found) = call(args, 3) else { panic!("an array") };
            assert_eq!(found, ScalarValue::Boolean(expected));
        }
    }
}
