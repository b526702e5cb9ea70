//! Expressions that do something around the one expression inside them.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, FieldRef, Schema};
use datafusion::error::Result;
use datafusion::logical_expr::ColumnarValue;
use datafusion::physical_expr::PhysicalExpr;

/// What is done around an expression. Its type stays.
pub trait Around: Clone + fmt::Debug + Eq + Hash + Send + Sync + 'static {
    /// Whether results may be NULL where those of the expression inside never are.
    const ADDS_NULLS: bool;

    fn evaluate(&self, inner: &dyn PhysicalExpr, batch: &RecordBatch) -> Result<ColumnarValue>;

    /// As EXPLAIN shows it.
    fn show(&self, inner: &dyn PhysicalExpr, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// The expression with something done around it.
pub fn wrapped<A: Around>(inner: &Arc<dyn PhysicalExpr>, around: A) -> Arc<dyn PhysicalExpr> {
    Arc::new(WrappedExpr { inner: Arc::clone(inner), around })
}

#[derive(Debug, Eq)]
struct WrappedExpr<A: Around> {
    inner: Arc<dyn PhysicalExpr>,
    around: A,
}

impl<A: Around> PartialEq for WrappedExpr<A> {
    fn eq(&self, other: &WrappedExpr<A>) -> bool {
        self.inner.eq(&other.inner) && self.around == other.around
    }
}

impl<A: Around> Hash for WrappedExpr<A> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.inner.hash(state);
        self.around.hash(state);
    }
}

impl<A: Around> fmt::Display for WrappedExpr<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.around.show(self.inner.as_ref(), f)
    }
}

impl<A: Around> PhysicalExpr for WrappedExpr<A> {
    fn data_type(&self, schema: &Schema) -> Result<DataType> {
        self.inner.data_type(schema)
    }

    fn nullable(&self, schema: &Schema) -> Result<bool> {
        Ok(A::ADDS_NULLS || self.inner.nullable(schema)?)
    }

    fn return_field(&self, schema: &Schema) -> Result<FieldRef> {
        let field = self.inner.return_field(schema)?;
        Ok(match A::ADDS_NULLS {
            true => Arc::new(field.as_ref().clone().with_nullable(true)),
            false => field,
        })
    }

    fn evaluate(&self, batch: &RecordBatch) -> Result<ColumnarValue> {
        self.around.evaluate(self.inner.as_ref(), batch)
    }

    fn children(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        vec![&self.inner]
    }

    fn with_new_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn PhysicalExpr>>,
    ) -> Result<Arc<dyn PhysicalExpr>> {
        let inner = children.pop().unwrap_or_else(|| self.inner.clone());
        Ok(wrapped(&inner, self.around.clone()))
    }

    fn fmt_sql(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt_sql(f)
    }
}
