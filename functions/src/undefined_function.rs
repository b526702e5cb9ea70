//! A function that does not exist: bound all the same, so that the error can name the types of its
//! arguments.

use std::sync::Arc;

use arrow::datatypes::DataType;
use datafusion::common::Result;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use millrace_common::SqlError;

use crate::error::{external, undefined_function};

pub fn missing_function(name: &str) -> Arc<ScalarUDF> {
    let signature = Signature::user_defined(Volatility::Immutable);
    Arc::new(ScalarUDF::from(Missing { name: name.to_owned(), signature }))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Missing {
    name: String,
    signature: Signature,
}

impl Missing {
    fn error(&self, args: &[DataType]) -> SqlError {
        let types: Vec<String> = args
            .iter()
            .map(|t| crate::types::type_name(&Some(t.clone()).filter(|t| !t.is_null())))
            .collect();
        undefined_function(&format!("{}({})", self.name, types.join(", ")))
    }
}

impl ScalarUDFImpl for Missing {
    fn name(&self) -> &str {
        &self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        Err(external(self.error(args)))
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        Err(external(self.error(args)))
    }

    fn invoke_with_args(&self, _: ScalarFunctionArgs) -> Result<ColumnarValue> {
        Err(external(self.error(&[])))
    }
}
