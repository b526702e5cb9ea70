//! A float as it is compared: −0 as 0, and every NaN as one ([`canonicalise`]).

use std::sync::{Arc, LazyLock};

use arrow::datatypes::DataType;
use datafusion::common::Result;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, Signature, Volatility,
};
use millrace_common::SqlError;
use millrace_common::keys::canonicalise;

use crate::error::external;
use crate::plain::PlainScalar;

/// `canonical_float(value)`, of floats and arrays of them.
pub fn canonical() -> Arc<ScalarUDF> {
    static F: LazyLock<Arc<ScalarUDF>> = LazyLock::new(|| {
        let signature = Signature::any(1, Volatility::Immutable);
        let same = |args: &[DataType]| args.first().cloned().ok_or_else(misuse);
        PlainScalar::new("canonical_float", signature, same, canonical_values).udf()
    });
    Arc::clone(&F)
}

fn misuse() -> datafusion::error::DataFusionError {
    external(SqlError::internal("canonical_float takes one value"))
}

fn canonical_values(args: ScalarFunctionArgs) -> Result<ColumnarValue> {
    let [value] = args.args.as_slice() else { return Err(misuse()) };
    Ok(ColumnarValue::Array(canonicalise(&value.to_array(args.number_rows)?)))
}
