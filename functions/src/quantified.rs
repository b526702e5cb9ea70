//! `value op ANY (array)` in three-valued logic: true if it holds for an element, else NULL if it is unknown for one,
//! else false. An empty array has nothing to compare with, not even with NULL. `ALL` is its negation with the opposite
//! operator.

use std::sync::{Arc, OnceLock};

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, UInt32Array};
use arrow::compute::kernels::cmp;
use arrow::compute::take;
use arrow::datatypes::DataType;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::expr::ScalarFunction;
use datafusion::logical_expr::simplify::{ExprSimplifyResult, SimplifyContext};
use datafusion::logical_expr::{
    ColumnarValue, Expr, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility, lit,
};
use millrace_common::SqlError;
use millrace_common::keys::canonicalise;

use super::byte_order::{by_value, comparable};
use super::canonical::canonical;
use super::constant_list;
use super::tree::Walk;
use crate::error::external;

/// `compare_any(array, value, operator)`; the operator is a literal.
pub fn compare_any() -> Arc<ScalarUDF> {
    static F: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| {
        let signature = Signature::user_defined(Volatility::Immutable);
        Arc::new(ScalarUDF::from(CompareAny { signature }))
    }))
}

/// Elements that are written out as a list. Every pass over a plan goes through each of them; more stay an array.
const MAX_LISTED: i32 = 128;

#[derive(Debug, PartialEq, Eq, Hash)]
struct CompareAny {
    signature: Signature,
}

fn misuse() -> datafusion::error::DataFusionError {
    external(SqlError::internal("compare_any takes an array, a value and an operator"))
}

/// The result for every list.
fn compare(lists: &ArrayRef, values: &ArrayRef, op: &str) -> Result<BooleanArray> {
    let lists = lists.as_list_opt::<i32>().ok_or_else(misuse)?;
    let offsets = lists.value_offsets();
    let (first, last) = (offsets[0] as usize, offsets[lists.len()] as usize);
    let elements = canonicalise(&lists.values().slice(first, last - first));
    let lengths = offsets.windows(2).enumerate();
    let owners = lengths.flat_map(|(row, w)| (w[0]..w[1]).map(move |_| row as u32));
    let values = canonicalise(&take(values, &UInt32Array::from_iter_values(owners), None)?);
    let both = comparable(&[values, elements]).map_err(external)?;
    let [values, elements] = both.as_slice() else { return Err(misuse()) };
    let holds = match op {
        "=" => cmp::eq(values, elements),
        "<>" => cmp::neq(values, elements),
        "<" => cmp::lt(values, elements),
        "<=" => cmp::lt_eq(values, elements),
        ">" => cmp::gt(values, elements),
        ">=" => cmp::gt_eq(values, elements),
        _ => return Err(misuse()),
    }?;
    let of = |row: usize| {
        if lists.is_null(row) {
            return None;
        }
        let range = offsets[row] as usize - first..offsets[row + 1] as usize - first;
        let mut unknown = false;
        for i in range {
            if holds.is_null(i) {
                unknown = true;
            } else if holds.value(i) {
                return Some(true);
            }
        }
        (!unknown).then_some(false)
    };
    Ok((0..lists.len()).map(of).collect())
}

fn has_case(elements: &[Expr]) -> Result<bool> {
    for element in elements {
        if element.any(|e| Ok(matches!(e, Expr::Case(_))))? {
            return Ok(true);
        }
    }
    Ok(false)
}

impl ScalarUDFImpl for CompareAny {
    fn name(&self) -> &str {
        "compare_any"
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        Ok(args.to_vec())
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(DataType::Boolean)
    }

    /// A constant array is a list to be IN, by bytes. `CASE a WHEN …` is NULL of no rows, which DataFusion takes for the
    /// value of all: it stays an array.
    fn simplify(&self, args: Vec<Expr>, info: &SimplifyContext) -> Result<ExprSimplifyResult> {
        let [list, value, Expr::Literal(op, _)] = args.as_slice() else {
            return Ok(ExprSimplifyResult::Original(args));
        };
        let by_bytes = info.get_data_type(list).is_ok_and(|t| !by_value(&t));
        if op.try_as_str().flatten() != Some("=") || !by_bytes {
            return Ok(ExprSimplifyResult::Original(args));
        }
        let elements: Vec<Expr> = match list {
            Expr::Literal(ScalarValue::List(array), _)
                if array.is_valid(0) && array.value_length(0) <= MAX_LISTED =>
            {
                let array = array.value(0);
                let one =
                    |i| ScalarValue::try_from_array(&array, i).map(|v| Expr::Literal(v, None));
                (0..array.len()).map(one).collect::<Result<_>>()?
            }
            Expr::ScalarFunction(ScalarFunction { func, args })
                if func.name() == "make_array" && !has_case(args)? =>
            {
                args.clone()
            }
            _ => return Ok(ExprSimplifyResult::Original(args)),
        };
        if elements.is_empty() {
            return Ok(ExprSimplifyResult::Simplified(lit(false)));
        }
        // Of floats there are two zeros.
        let floating = info.get_data_type(value).is_ok_and(|t| t.is_floating());
        let form = |e: Expr| if floating { canonical().call(vec![e]) } else { e };
        let elements = elements.into_iter().map(form).collect();
        Ok(ExprSimplifyResult::Simplified(form(value.clone()).in_list(elements, false)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let rows = args.number_rows;
        let [lists, values, ColumnarValue::Scalar(op)] = args.args.as_slice() else {
            return Err(misuse());
        };
        let op = op.try_as_str().flatten().ok_or_else(misuse)?;
        if let (ColumnarValue::Scalar(ScalarValue::List(list)), "=") = (lists, op)
            && list.is_valid(0)
        {
            let found = constant_list::contains(list, &values.to_array(rows)?)?;
            return Ok(ColumnarValue::Array(Arc::new(found)));
        }
        let (lists, values) = (lists.to_array(rows)?, values.to_array(rows)?);
        Ok(ColumnarValue::Array(Arc::new(compare(&lists, &values, op)?)))
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int32Array, ListArray};
    use arrow::datatypes::Int32Type;

    use super::*;

    /// As PostgreSQL 15 has it.
    #[test]
    fn null_elements_and_empty_arrays() {
        let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>([
            Some(vec![Some(1), None]),
            Some(vec![Some(5), None]),
            Some(vec![]),
            Some(vec![Some(1)]),
            None,
            Some(vec![]),
            Some(vec![Some(6), Some(5)]),
        ]));
        let values: ArrayRef = Arc::new(Int32Array::from(vec![
            Some(5),
            Some(5),
            None,
            None,
            Some(5),
            Some(5),
            Some(5),
        ]));
        let equal = compare(&lists, &values, "=").unwrap();
        let expected = [None, Some(true), Some(false), None, None, Some(false), Some(true)];
        assert_eq!(equal, BooleanArray::from(expected.to_vec()));
        let differs = compare(&lists, &values, "<>").unwrap();
        let expected = [Some(true), None, Some(false), None, None, Some(false), Some(true)];
        assert_eq!(differs, BooleanArray::from(expected.to_vec()));
        // A window of the lists.
        let rest = compare(&lists.slice(3, 4), &values.slice(3, 4), ">=").unwrap();
        assert_eq!(rest, BooleanArray::from(vec![None, None, Some(false), Some(true)]));
    }
}
