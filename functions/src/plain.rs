//! Functions that are no more than a name, a signature, a type and what they compute.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::Result;
use datafusion::logical_expr::function::{PartitionEvaluatorArgs, WindowUDFFieldArgs};
use datafusion::logical_expr::{
    ColumnarValue, PartitionEvaluator, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
    WindowUDF, WindowUDFImpl,
};

/// A scalar function. Two with one name are the same.
#[derive(Debug)]
pub struct PlainScalar {
    name: &'static str,
    signature: Signature,
    strict: bool,
    returns: fn(&[DataType]) -> Result<DataType>,
    invoke: fn(ScalarFunctionArgs) -> Result<ColumnarValue>,
}

impl PlainScalar {
    /// A function that is called for NULLs too. `returns` tells its type by those of the arguments.
    pub fn new(
        name: &'static str,
        signature: Signature,
        returns: fn(&[DataType]) -> Result<DataType>,
        invoke: fn(ScalarFunctionArgs) -> Result<ColumnarValue>,
    ) -> PlainScalar {
        PlainScalar { name, signature, strict: false, returns, invoke }
    }

    /// NULL where an argument is.
    pub fn strict(self) -> PlainScalar {
        PlainScalar { strict: true, ..self }
    }

    pub fn udf(self) -> Arc<ScalarUDF> {
        Arc::new(ScalarUDF::from(self))
    }
}

impl PartialEq for PlainScalar {
    fn eq(&self, other: &PlainScalar) -> bool {
        self.name == other.name
    }
}

impl Eq for PlainScalar {}

impl Hash for PlainScalar {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl ScalarUDFImpl for PlainScalar {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        (self.returns)(args)
    }

    fn is_strict(&self) -> bool {
        self.strict
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        (self.invoke)(args)
    }
}

/// A window function that looks at its partition only. Two with one name are the same.
#[derive(Debug)]
pub struct PlainWindow {
    name: &'static str,
    signature: Signature,
    returns: fn(&WindowUDFFieldArgs) -> Result<DataType>,
    evaluator: fn() -> Box<dyn PartitionEvaluator>,
}

impl PlainWindow {
    /// `returns` tells the type by the arguments' fields; a result may be NULL.
    pub fn udf(
        name: &'static str,
        signature: Signature,
        returns: fn(&WindowUDFFieldArgs) -> Result<DataType>,
        evaluator: fn() -> Box<dyn PartitionEvaluator>,
    ) -> Arc<WindowUDF> {
        Arc::new(WindowUDF::from(PlainWindow { name, signature, returns, evaluator }))
    }
}

impl PartialEq for PlainWindow {
    fn eq(&self, other: &PlainWindow) -> bool {
        self.name == other.name
    }
}

impl Eq for PlainWindow {}

impl Hash for PlainWindow {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl WindowUDFImpl for PlainWindow {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn partition_evaluator(
        &self,
        _: PartitionEvaluatorArgs,
    ) -> Result<Box<dyn PartitionEvaluator>> {
        Ok((self.evaluator)())
    }

    fn field(&self, args: WindowUDFFieldArgs) -> Result<FieldRef> {
        Ok(Arc::new(Field::new(args.name(), (self.returns)(&args)?, true)))
    }
}
