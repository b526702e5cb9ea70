//! The functions that an ASOF join is made of (see the planner's `bind::relations::asof` for the plan).

use std::sync::{Arc, LazyLock};

use arrow::array::{Array, ArrayRef, AsArray, UInt32Array};
use arrow::compute::take;
use arrow::datatypes::DataType;
use datafusion::common::Result;
use datafusion::logical_expr::function::WindowUDFFieldArgs;
use datafusion::logical_expr::{PartitionEvaluator, Signature, Volatility, WindowUDF};
use millrace_common::SqlError;

use crate::error::external;
use crate::plain::PlainWindow;

/// The name of [`latest`]; not one that SQL text can contain unquoted.
pub const LATEST: &str = "#latest";

/// `latest(value, is_right, place)`: over left and right rows in order, the value of the last right row so far,
/// the row itself included. `place` is a BIGINT literal for the executor, see [`Place`].
pub fn latest() -> Arc<WindowUDF> {
    static F: LazyLock<Arc<WindowUDF>> = LazyLock::new(|| {
        let signature = Signature::any(3, Volatility::Immutable);
        PlainWindow::udf(LATEST, signature, value_type, || Box::new(Carry))
    });
    Arc::clone(&F)
}

fn value_type(args: &WindowUDFFieldArgs) -> Result<DataType> {
    let value = args.get_input_field(0);
    let value = value.ok_or_else(|| external(SqlError::internal("latest of nothing")))?;
    Ok(value.data_type().clone())
}

/// Where in a row's order bytes it says whether it is a right row: the order is by the time, of fixed width,
/// then by a BOOLEAN that is not NULL, both ascending for the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Offset of the BOOLEAN's value.
    pub offset: usize,
    /// Its value of right rows.
    pub right: bool,
}

impl Place {
    pub fn encode(self) -> i64 {
        self.offset as i64 * 2 + i64::from(self.right)
    }

    pub fn decode(code: i64) -> Option<Place> {
        Some(Place { offset: usize::try_from(code / 2).ok()?, right: code % 2 == 1 })
    }

    /// Whether a row with these order bytes is a right one.
    pub fn is_right(self, order: &[u8]) -> bool {
        order.get(self.offset).is_some_and(|b| (*b == 1) == self.right)
    }
}

#[derive(Debug)]
struct Carry;

impl PartitionEvaluator for Carry {
    fn evaluate_all(&mut self, values: &[ArrayRef], _: usize) -> Result<ArrayRef> {
        let [value, right, ..] = values else {
            return Err(external(SqlError::internal("latest has three arguments")));
        };
        let right = right
            .as_boolean_opt()
            .ok_or_else(|| external(SqlError::internal("which row is right is a boolean")))?;
        let mut last = None;
        let picks = (0..right.len() as u32).map(|row| {
            if right.is_valid(row as usize) && right.value(row as usize) {
                last = Some(row);
            }
            last
        });
        let picks: UInt32Array = picks.collect();
        Ok(take(value, &picks, None)?)
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{BooleanArray, Int64Array};
    use arrow::datatypes::Int64Type;

    use super::*;

    fn carried(values: Vec<Option<i64>>, right: Vec<Option<bool>>) -> Vec<Option<i64>> {
        let rows = values.len();
        let values: ArrayRef = Arc::new(Int64Array::from(values));
        let right: ArrayRef = Arc::new(BooleanArray::from(right));
        let found = Carry.evaluate_all(&[values, right], rows).unwrap();
        found.as_primitive::<Int64Type>().iter().collect()
    }

    #[test]
    fn a_row_gets_the_last_right_row_s_value() {
        let values = vec![Some(1), Some(2), Some(3), Some(4), Some(5)];
        let right = [false, true, false, true, false].map(Some).to_vec();
        assert_eq!(carried(values, right), [None, Some(2), Some(2), Some(4), Some(4)]);
    }

    #[test]
    fn a_right_row_without_a_value_hides_the_one_before_it() {
        let right = vec![Some(true), Some(true), Some(false)];
        assert_eq!(carried(vec![Some(1), None, Some(3)], right), [Some(1), None, None]);
    }

    #[test]
    fn rows_of_no_side_are_left_rows() {
        assert_eq!(carried(vec![Some(1), Some(2)], vec![Some(true), None]), [Some(1), Some(1)]);
        assert_eq!(carried(vec![], vec![]), []);
    }

    #[test]
    fn misuse_is_an_error() {
        let values: ArrayRef = Arc::new(Int64Array::from(vec![1]));
        assert!(Carry.evaluate_all(&[Arc::clone(&values)], 1).is_err());
        assert!(Carry.evaluate_all(&[Arc::clone(&values), values], 1).is_err());
    }

    #[test]
    fn places_are_read_as_they_were_written() {
        for (offset, right) in [(0, false), (0, true), (9, true), (17, false)] {
            let place = Place { offset, right };
            assert_eq!(Place::decode(place.encode()), Some(place));
        }
        assert_eq!(Place::decode(-2), None);
    }

    #[test]
    fn order_bytes_say_which_rows_are_right() {
        let place = Place { offset: 2, right: true };
        assert!(place.is_right(&[9, 9, 1]));
        assert!(!place.is_right(&[9, 9, 0]));
        assert!(Place { right: false, ..place }.is_right(&[9, 9, 0]));
        assert!(!place.is_right(&[9, 9]), "bytes that are too short are of no right row");
    }
}
