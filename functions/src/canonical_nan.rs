//! DataFusion's functions that make a NaN of their own where they have no value. Ours return the one that
//! all values share.

use std::sync::Arc;

use datafusion::common::Result;
use datafusion::logical_expr::{ColumnarValue, ScalarFunctionArgs, ScalarUDF};
use millrace_common::keys::with_one_nan;

use crate::wrapped::{Change, wrapped};

/// `tests/nan.rs` finds those that are missing here.
const NAMES: [&str; 5] = ["log2", "power", "array_distance", "inner_product", "cosine_distance"];

/// The form of a function that returns no other NaN, where it needs one.
pub fn with_canonical_nan(udf: Arc<ScalarUDF>) -> Arc<ScalarUDF> {
    match NAMES.contains(&udf.name()) {
        true => wrapped(udf, CanonicalNan),
        false => udf,
    }
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct CanonicalNan;

impl Change for CanonicalNan {
    fn invoke(&self, inner: &ScalarUDF, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let rows = args.number_rows;
        let value = inner.invoke_with_args(args)?.into_array(rows)?;
        Ok(ColumnarValue::Array(with_one_nan(&value)))
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::{DataType, FieldRef};
    use arrow::datatypes::{Field, Float64Type};
    use datafusion::common::ScalarValue;
    use datafusion::logical_expr::{ScalarFunctionImplementation, Volatility, create_udf};

    use super::*;
    use crate::testing::check;

    #[test]
    fn values_stay_and_there_is_a_nan_where_none_is() {
        check(&[
            ("log2('8'::float8)", "3"),
            ("log2('-1'::float8)", "NaN"),
            ("power('2'::float8, '3'::float8)", "8"),
            ("array_distance('{0,3}'::float8[], '{4,0}'::float8[])", "5"),
            ("inner_product('{1,2}'::float8[], '{3,4}'::float8[])", "11"),
            ("log2(NULL::float8)", "NULL"),
        ]);
    }

    fn other_nan() -> f64 {
        f64::from_bits(f64::NAN.to_bits() | 1 << 63)
    }

    fn named(name: &str) -> Arc<ScalarUDF> {
        let other: ScalarFunctionImplementation =
            Arc::new(|_| Ok(ColumnarValue::Scalar(ScalarValue::Float64(Some(other_nan())))));
        let (takes, returns) = (vec![DataType::Float64], DataType::Float64);
        Arc::new(create_udf(name, takes, returns, Volatility::Immutable, other))
    }

    fn bits(udf: &ScalarUDF) -> u64 {
        let field: FieldRef = Arc::new(Field::new("a", DataType::Float64, true));
        let call = ScalarFunctionArgs {
            args: vec![ColumnarValue::Scalar(ScalarValue::Float64(Some(1.0)))],
            arg_fields: vec![Arc::clone(&field)],
            number_rows: 1,
            return_field: field,
            config_options: Default::default(),
        };
        let found = udf.invoke_with_args(call).unwrap().into_array(1).unwrap();
        found.as_primitive::<Float64Type>().value(0).to_bits()
    }

    #[test]
    fn another_nan_becomes_the_one() {
        assert_eq!(bits(&named("log2")), other_nan().to_bits());
        assert_eq!(bits(&with_canonical_nan(named("log2"))), f64::NAN.to_bits());
    }

    #[test]
    fn other_functions_are_left() {
        let udf = named("sin");
        assert!(Arc::ptr_eq(&udf, &with_canonical_nan(Arc::clone(&udf))));
    }
}
