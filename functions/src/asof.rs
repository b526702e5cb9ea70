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
