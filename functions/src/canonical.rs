//! A float as it is compared: −0 as 0, and every NaN as one ([`canonicalise`]).

use std::sync::{Arc, OnceLock};

use arrow::datatypes::DataType;
use datafusion::common::Result;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use millrace_common::SqlError;
use millrace_common::keys::canonicalise;

use crate::error::external;

/// `canonical_float(value)`, of floats and arrays of them.
pub fn canonical() -> Arc<ScalarUDF> {
    static F: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| {
        let signature = Signature::any(1, Volatility::Immutable);
        Arc::new(ScalarUDF::from(Canonical { signature }))
    }))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Canonical {
    signature: Signature,
}

fn misuse() -> datafusion::error::DataFusionError {
    external(SqlError::internal("canonical_float takes one value"))
}

impl ScalarUDFImpl for Canonical {
    fn name(&self) -> &str {
        "canonical_float"
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        args.first().cloned().ok_or_else(misuse)
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [value] = args.args.as_slice() else { return Err(misuse()) };
        Ok(ColumnarValue::Array(canonicalise(&value.to_array(args.number_rows)?)))
    }
}
