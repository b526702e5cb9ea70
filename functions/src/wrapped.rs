//! DataFusion's functions with something of ours around them.

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

use arrow::datatypes::{DataType, FieldRef};
use datafusion::common::Result;
use datafusion::logical_expr::simplify::{ExprSimplifyResult, SimplifyContext};
use datafusion::logical_expr::{
    ColumnarValue, Expr, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
};

/// What differs from the function inside: by default nothing.
pub trait Change: fmt::Debug + Eq + Hash + Send + Sync + Sized + 'static {
    fn signature<'a>(&'a self, inner: &'a ScalarUDF) -> &'a Signature {
        inner.signature()
    }

    fn coerce_types(&self, inner: &ScalarUDF, args: &[DataType]) -> Result<Vec<DataType>> {
        inner.inner().coerce_types(args)
    }

    fn invoke(&self, inner: &ScalarUDF, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        inner.invoke_with_args(args)
    }
}

/// The function with a change, under the names that it has.
pub fn wrapped(inner: Arc<ScalarUDF>, change: impl Change) -> Arc<ScalarUDF> {
    Arc::new(ScalarUDF::from(Wrapped { inner, change }))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Wrapped<C> {
    inner: Arc<ScalarUDF>,
    change: C,
}

impl<C: Change> ScalarUDFImpl for Wrapped<C> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn aliases(&self) -> &[String] {
        self.inner.aliases()
    }

    fn signature(&self) -> &Signature {
        self.change.signature(&self.inner)
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
        self.change.coerce_types(&self.inner, args)
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        self.change.invoke(&self.inner, args)
    }
}
