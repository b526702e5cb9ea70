//! Expressions over chunks of a view: an error on a row makes that row's value NULL, is counted, and
//! leaves the other rows alone (docs/design.md §6).
//!
//! A whole chunk is evaluated at once; only when that fails is it bisected down to the failing rows,
//! so chunks without errors pay nothing.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BooleanArray, RecordBatch, new_empty_array, new_null_array};
use arrow::buffer::BooleanBuffer;
use arrow::compute;
use arrow::error::ArrowError;
use datafusion::error::DataFusionError;
use millrace_common::{SqlError, SqlState};
use millrace_functions::expr::ExprRef;

use crate::error::ExecError;
use crate::error_sink::ErrorSink;

/// Rows for which a boolean is true, and not NULL.
pub fn truth(array: &BooleanArray) -> BooleanBuffer {
    match array.nulls() {
        Some(nulls) => array.values() & nulls.inner(),
        None => array.values().clone(),
    }
}

/// A compiled expression and where its errors go.
pub struct SafeExpr {
    expr: ExprRef,
    place: String,
    errors: Arc<ErrorSink>,
}

impl SafeExpr {
    pub fn new(expr: ExprRef, place: &str, errors: Arc<ErrorSink>) -> SafeExpr {
        let place = format!("{place}: {expr}");
        SafeExpr { expr, place, errors }
    }

    /// The value for every row; NULL where it fails.
    pub fn evaluate(&self, batch: &RecordBatch) -> Result<ArrayRef, ExecError> {
        match self.attempt(batch) {
            Ok(array) => Ok(array),
            Err(error) => self.bisect(batch, error),
        }
    }

    /// Rows for which a boolean expression is true.
    pub fn evaluate_mask(&self, batch: &RecordBatch) -> Result<BooleanArray, ExecError> {
        let array = self.evaluate(batch)?;
        array
            .as_any()
            .downcast_ref::<BooleanArray>()
            .cloned()
            .ok_or_else(|| ExecError::internal(format!("{} is not boolean", self.place)))
    }

    fn attempt(&self, batch: &RecordBatch) -> Result<ArrayRef, DataFusionError> {
        if batch.num_rows() == 0 {
            return Ok(new_empty_array(&self.expr.data_type(batch.schema_ref())?));
        }
        self.expr.evaluate(batch)?.into_array(batch.num_rows())
    }

    fn bisect(&self, batch: &RecordBatch, error: DataFusionError) -> Result<ArrayRef, ExecError> {
        let rows = batch.num_rows();
        if rows <= 1 {
            self.errors.report(&self.place, &sql_error(&error), rows as u64);
            let data_type = self.expr.data_type(batch.schema_ref())?;
            return Ok(new_null_array(&data_type, rows));
        }
        let left = self.evaluate(&batch.slice(0, rows / 2))?;
        let right = self.evaluate(&batch.slice(rows / 2, rows - rows / 2))?;
        Ok(compute::concat(&[left.as_ref(), right.as_ref()])?)
    }
}

/// What a failing expression tells the user.
pub(crate) fn sql_error(error: &DataFusionError) -> SqlError {
    match error {
        DataFusionError::External(inner) => match inner.downcast_ref::<SqlError>() {
            Some(e) => e.clone(),
            None => SqlError::new(SqlState::DATA_EXCEPTION, inner.to_string()),
        },
        DataFusionError::Context(_, inner) => sql_error(inner),
        DataFusionError::Shared(inner) => sql_error(inner),
        DataFusionError::ArrowError(inner, _) => arrow_error(inner),
        other => SqlError::new(SqlState::DATA_EXCEPTION, other.strip_backtrace()),
    }
}

fn arrow_error(error: &ArrowError) -> SqlError {
    match error {
        ArrowError::DivideByZero => SqlError::new(SqlState::DIVISION_BY_ZERO, "division by zero"),
        ArrowError::ArithmeticOverflow(m) => {
            SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, m.clone())
        }
        ArrowError::ExternalError(inner) => match inner.downcast_ref::<SqlError>() {
            Some(e) => e.clone(),
            None => SqlError::new(SqlState::DATA_EXCEPTION, inner.to_string()),
        },
        other => SqlError::new(SqlState::DATA_EXCEPTION, other.to_string()),
    }
}
