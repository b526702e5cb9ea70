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
