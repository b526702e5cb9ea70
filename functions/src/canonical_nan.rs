//! DataFusion's functions that make a NaN of their own where they have no value. Ours return the one that
//! all values share.

use std::sync::Arc;

use arrow::datatypes::{DataType, FieldRef};
use datafusion::common::Result;
use datafusion::logical_expr::simplify::{ExprSimplifyResult, SimplifyContext};
use datafusion::logical_expr::{
    ColumnarValue, Expr, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
};
use millrace_common::keys::with_one_nan;

/// `tests/nan.rs` finds those that are missing here.
const NAMES: [&str; 5] = ["log2", "power", "array_distance", "inner_product", "cosine_distance"];

/// The form of a function that returns no other NaN, where it needs one.
pub fn with_canonical_nan(udf: Arc<ScalarUDF>) -> Arc<ScalarUDF> {
    match NAMES.contains(&udf.name()) {
        true => Arc::new(ScalarUDF::from(CanonicalNan { inner: udf })),
        false => udf,
    }
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct CanonicalNan {
    inner: Arc<ScalarUDF>,
}

impl ScalarUDFImpl for CanonicalNan {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn aliases(&self) -> &[String] {
        self.inner.aliases()
    }

    fn signature(&self) -> &Signature {
        self.inner.signature()
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        self.inner.inner().return_type(args)
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs<'_>) -> Result<FieldRef> {
        self.inner.inner().return_field_from_args(args)
    }

    fn simplify(&self, args: Vec<Expr>, info: &SimplifyContext) -> Result<ExprSimplifyResult> {
        self.inner.inner().simplify(args, info)
    }

    fn is_strict(&self) -> bool {
        self.inner.inner().is_strict()
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        self.inner.inner().coerce_types(args)
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let rows = args.number_rows;
        let value = self.inner.invoke_with_args(args)?.into_array(rows)?;
        Ok(ColumnarValue::Array(with_one_nan(&value)))
    }
}
