//! Functions whose result can be of any length, `repeat`, `lpad` and `rpad`: DataFusion's, with
//! PostgreSQL's refusal of results that nobody can hold. The bound is one on a batch of rows, because
//! a batch is made in one piece that no memory budget sees coming.

use std::sync::Arc;

use arrow::array::AsArray;
use arrow::compute::{cast, kernels::length::length};
use arrow::datatypes::{DataType, FieldRef, Int64Type};
use datafusion::common::Result;
use datafusion::logical_expr::simplify::{ExprSimplifyResult, SimplifyContext};
use datafusion::logical_expr::{
    ColumnarValue, Expr, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
};
use millrace_common::{SqlError, SqlState};

use crate::error::external;

const NAMES: [&str; 3] = ["repeat", "lpad", "rpad"];
/// Bytes of one batch's results.
const MAX_BYTES: i64 = 256 << 20;

/// The bounded form of a function, where it needs one.
pub fn bounded(udf: Arc<ScalarUDF>) -> Arc<ScalarUDF> {
    match NAMES.contains(&udf.name()) {
        true => Arc::new(ScalarUDF::from(Bounded { inner: udf })),
        false => udf,
    }
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Bounded {
    inner: Arc<ScalarUDF>,
}

impl ScalarUDFImpl for Bounded {
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
        if let [text, count, ..] = args.args.as_slice()
            && result_bytes(self.name() == "repeat", text, count, args.number_rows)? > MAX_BYTES
        {
            let e = SqlError::new(SqlState("54000"), "requested length too large").with_detail(
                format!(
                    "A batch of {} rows may make {} MB of text.",
                    args.number_rows,
                    MAX_BYTES >> 20
                ),
            );
            return Err(external(e));
        }
        self.inner.invoke_with_args(args)
    }
}

/// At least this many bytes will be made.
fn result_bytes(
    repeat: bool,
    text: &ColumnarValue,
    count: &ColumnarValue,
    rows: usize,
) -> Result<i64> {
    let constant = matches!((text, count), (ColumnarValue::Scalar(_), ColumnarValue::Scalar(_)));
    let rows = if constant { 1 } else { rows };
    let counts = cast(&count.to_array(rows)?, &DataType::Int64)?;
    let counts = counts.as_primitive::<Int64Type>();
    let lengths = match repeat {
        true => Some(cast(&length(&text.to_array(rows)?)?, &DataType::Int64)?),
        false => None,
    };
    let lengths = lengths.as_ref().map(|l| l.as_primitive::<Int64Type>());
    let sizes = counts.iter().enumerate().map(|(row, n)| {
        let length = lengths.map_or(1, |l| if row < l.len() { l.value(row) } else { 0 });
        n.unwrap_or(0).max(0).saturating_mul(length)
    });
    Ok(sizes.fold(0i64, i64::saturating_add))
}

#[cfg(test)]
mod tests {
    use datafusion::common::ScalarValue;

    use super::*;

    #[test]
    fn results_that_nobody_can_hold_are_counted_before_they_are_made() {
        let text = ColumnarValue::Scalar(ScalarValue::Utf8(Some("ab".into())));
        let count = |n| ColumnarValue::Scalar(ScalarValue::Int64(n));
        assert_eq!(result_bytes(true, &text, &count(Some(3)), 8192).unwrap(), 6);
        assert_eq!(result_bytes(false, &text, &count(Some(3)), 8192).unwrap(), 3);
        assert_eq!(result_bytes(true, &text, &count(Some(-3)), 1).unwrap(), 0);
        assert_eq!(result_bytes(true, &text, &count(None), 1).unwrap(), 0);
        assert!(result_bytes(true, &text, &count(Some(i64::MAX)), 1).unwrap() > MAX_BYTES);
    }
}
