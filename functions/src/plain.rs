//! Functions that are no more than a name, a signature, a type and what they compute.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::{Result, not_impl_err};
use datafusion::logical_expr::function::{PartitionEvaluatorArgs, WindowUDFFieldArgs};
use datafusion::logical_expr::{
    ColumnarValue, PartitionEvaluator, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
    WindowUDF, WindowUDFImpl,
};

/// A function: its name, its signature and the rest. Two with one name are the same.
pub struct Plain<Rest> {
    name: &'static str,
    signature: Signature,
    rest: Rest,
}

impl<Rest> fmt::Debug for Plain<Rest> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Plain").field(&self.name).field(&self.signature).finish()
    }
}

impl<Rest> PartialEq for Plain<Rest> {
    fn eq(&self, other: &Plain<Rest>) -> bool {
        self.name == other.name
    }
}

impl<Rest> Eq for Plain<Rest> {}

impl<Rest> Hash for Plain<Rest> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

/// A scalar function.
pub type PlainScalar = Plain<Scalar>;

/// The types that arguments are cast to.
type Coerce = fn(&[DataType]) -> Result<Vec<DataType>>;

pub struct Scalar {
    strict: bool,
    coerce: Option<Coerce>,
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
        Plain { name, signature, rest: Scalar { strict: false, coerce: None, returns, invoke } }
    }

    /// NULL where an argument is.
    pub fn strict(mut self) -> PlainScalar {
        self.rest.strict = true;
        self
    }

    /// What the arguments are cast to, or why they do not fit, where the signature is user-defined.
    pub fn coerced_by(mut self, coerce: Coerce) -> PlainScalar {
        self.rest.coerce = Some(coerce);
        self
    }

    pub fn udf(self) -> Arc<ScalarUDF> {
        Arc::new(ScalarUDF::from(self))
    }
}

impl ScalarUDFImpl for PlainScalar {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        match self.rest.coerce {
            Some(coerce) => coerce(args),
            None => not_impl_err!("{} does not cast its arguments", self.name),
        }
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        (self.rest.returns)(args)
    }

    fn is_strict(&self) -> bool {
        self.rest.strict
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        (self.rest.invoke)(args)
    }
}

/// A window function that looks at its partition only.
pub type PlainWindow = Plain<Window>;

pub struct Window {
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
        Arc::new(WindowUDF::from(Plain { name, signature, rest: Window { returns, evaluator } }))
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
        Ok((self.rest.evaluator)())
    }

    fn field(&self, args: WindowUDFFieldArgs) -> Result<FieldRef> {
        Ok(Arc::new(Field::new(args.name(), (self.rest.returns)(&args)?, true)))
    }
}
