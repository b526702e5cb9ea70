//! `sign(x)`: a numeric of a numeric or integer, a float of a float.

use std::sync::{Arc, OnceLock};

use arrow::array::{ArrayRef, AsArray};
use arrow::datatypes::*;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, Signature, Volatility,
};

use crate::error::{external, undefined_function};
use crate::plain::PlainScalar;

pub fn sign_function() -> Arc<ScalarUDF> {
    static F: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| {
        let signature = Signature::user_defined(Volatility::Immutable);
        let returns = |args: &[DataType]| Ok(super::round::result_type(args));
        PlainScalar::new("sign", signature, returns, signs).coerced_by(argument).strict().udf()
    }))
}

fn argument(args: &[DataType]) -> Result<Vec<DataType>> {
    match args {
        // PostgreSQL takes the float for integers and literals of unknown type.
        [DataType::Decimal128(_, _)] => Ok(args.to_vec()),
        [t] if t.is_numeric() || t.is_null() => Ok(vec![DataType::Float64]),
        _ => {
            let names: Vec<String> =
                args.iter().map(|t| crate::types::type_name(&Some(t.clone()))).collect();
            Err(external(undefined_function(&format!("sign({})", names.join(", ")))))
        }
    }
}

fn signs(args: ScalarFunctionArgs) -> Result<ColumnarValue> {
    let scalar = matches!(args.args[0], ColumnarValue::Scalar(_));
    let array = args.args[0].to_array(1)?;
    let out: ArrayRef = match array.data_type() {
        DataType::Decimal128(_, _) => Arc::new(
            array
                .as_primitive::<Decimal128Type>()
                .unary::<_, Decimal128Type>(i128::signum)
                .with_precision_and_scale(38, 0)?,
        ),
        _ => {
            // Of NaN and of −0 it is 0.
            let sign = |v: f64| if v == 0.0 || v.is_nan() { 0.0 } else { v.signum() };
            Arc::new(array.as_primitive::<Float64Type>().unary::<_, Float64Type>(sign))
        }
    };
    Ok(match scalar {
        true => ColumnarValue::Scalar(ScalarValue::try_from_array(&out, 0)?),
        false => ColumnarValue::Array(out),
    })
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn signs_of_numerics_and_floats() {
        check(&[
            ("sign(-2.50)", "-1"),
            ("sign(0.0)", "0"),
            ("sign(3)", "1"),
            ("sign('-9223372036854775808'::int8)", "-1"),
            ("sign('-0'::float8)", "0"),
            ("sign('0.0000001'::float8)", "1"),
            ("sign('-Infinity'::float8)", "-1"),
            ("sign(NULL::numeric)", "NULL"),
            ("sign('2'::float4)", "1"),
        ]);
    }

    #[test]
    fn a_nan_has_no_sign() {
        check(&[
            // PostgreSQL's float sign(NaN) is 0 as well.
            ("sign('NaN'::float8)", "0"),
        ]);
    }
}
