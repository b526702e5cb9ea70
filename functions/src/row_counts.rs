//! The numbers of rows of LIMIT and OFFSET that a query computes: NULL is no limit and skips none, below zero there is an
//! error.

use std::sync::{Arc, OnceLock};

use arrow::array::{AsArray, Int64Array};
use arrow::datatypes::{DataType, Int64Type};
use datafusion::common::Result;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use millrace_common::{SqlError, SqlState};

use crate::error::external;

/// `#limit(bigint)`.
pub fn limit() -> Arc<ScalarUDF> {
    static F: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| RowCount::udf(Clause::Limit)))
}

/// `#offset(bigint)`.
pub fn offset() -> Arc<ScalarUDF> {
    static F: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| RowCount::udf(Clause::Offset)))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Clause {
    Limit,
    Offset,
}

impl Clause {
    /// The rows that a number means.
    pub fn rows(self, count: Option<i64>) -> Result<i64, SqlError> {
        match (self, count) {
            (Clause::Limit, None) => Ok(i64::MAX),
            (Clause::Offset, None) => Ok(0),
            (_, Some(count)) if count >= 0 => Ok(count),
            (Clause::Limit, _) => {
                Err(SqlError::new(SqlState("2201W"), "LIMIT must not be negative"))
            }
            (Clause::Offset, _) => {
                Err(SqlError::new(SqlState("2201X"), "OFFSET must not be negative"))
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct RowCount {
    clause: Clause,
    signature: Signature,
}

impl RowCount {
    fn udf(clause: Clause) -> Arc<ScalarUDF> {
        let signature = Signature::exact(vec![DataType::Int64], Volatility::Immutable);
        Arc::new(ScalarUDF::from(RowCount { clause, signature }))
    }
}

impl ScalarUDFImpl for RowCount {
    fn name(&self) -> &str {
        match self.clause {
            Clause::Limit => "#limit",
            Clause::Offset => "#offset",
        }
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(DataType::Int64)
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let misuse = || external(SqlError::internal("a number of rows that is no bigint"));
        let [count] = args.args.as_slice() else { return Err(misuse()) };
        let counts = count.to_array(args.number_rows)?;
        let counts = counts.as_primitive_opt::<Int64Type>().ok_or_else(misuse)?;
        let rows = counts.iter().map(|count| self.clause.rows(count).map(Some).map_err(external));
        Ok(ColumnarValue::Array(Arc::new(rows.collect::<Result<Int64Array>>()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_no_limit_and_none_are_below_zero() {
        assert_eq!(Clause::Limit.rows(None).unwrap(), i64::MAX);
        assert_eq!(Clause::Offset.rows(None).unwrap(), 0);
        assert_eq!(Clause::Limit.rows(Some(0)).unwrap(), 0);
        assert_eq!(Clause::Limit.rows(Some(-1)).unwrap_err().state, SqlState("2201W"));
        assert_eq!(Clause::Offset.rows(Some(-1)).unwrap_err().state, SqlState("2201X"));
    }
}
