//! The window functions that SESSION is made of (see the planner's `bind::relations::window_tvf` for the plan).
//!
//! Rows of a partition in order of their time: a row is in the session of the one before it if it is less
//! than the gap later. A session's window goes from its first time to its last one plus the gap.

use std::sync::{Arc, LazyLock};

use arrow::array::{Array, ArrayRef, AsArray, TimestampMicrosecondArray};
use arrow::datatypes::{DataType, TimestampMicrosecondType};
use datafusion::common::Result;
use datafusion::logical_expr::function::WindowUDFFieldArgs;
use datafusion::logical_expr::{PartitionEvaluator, Signature, Volatility, WindowUDF};
use millrace_common::{SqlError, SqlState};

use crate::error::external;
use crate::plain::PlainWindow;

/// The names; not ones that SQL text can contain unquoted.
pub const SESSION_START: &str = "#session_start";
pub const SESSION_END: &str = "#session_end";

/// `session_start(time, gap)`: the first time of the row's session. The gap in microseconds, a BIGINT literal.
pub fn session_start() -> Arc<WindowUDF> {
    static F: LazyLock<Arc<WindowUDF>> =
        LazyLock::new(|| edge(SESSION_START, || Box::new(Sessions { end: false })));
    Arc::clone(&F)
}

/// `session_end(time, gap)`: the last time of the row's session plus the gap.
pub fn session_end() -> Arc<WindowUDF> {
    static F: LazyLock<Arc<WindowUDF>> =
        LazyLock::new(|| edge(SESSION_END, || Box::new(Sessions { end: true })));
    Arc::clone(&F)
}

/// Whether a time continues the session whose last time so far is `last`.
pub fn continues(last: i64, time: i64, gap: i64) -> bool {
    time.saturating_sub(last) < gap
}

/// The start or the end of a session.
fn edge(name: &'static str, evaluator: fn() -> Box<dyn PartitionEvaluator>) -> Arc<WindowUDF> {
    PlainWindow::udf(name, Signature::any(2, Volatility::Immutable), time_type, evaluator)
}

fn time_type(args: &WindowUDFFieldArgs) -> Result<DataType> {
    let time = args.get_input_field(0);
    let time = time.ok_or_else(|| external(SqlError::internal("a session without a time")))?;
    Ok(time.data_type().clone())
}

#[derive(Debug)]
struct Sessions {
    /// The end of each row's session, else its start.
    end: bool,
}

impl PartitionEvaluator for Sessions {
    fn evaluate_all(&mut self, values: &[ArrayRef], rows: usize) -> Result<ArrayRef> {
        let internal = |what: &str| external(SqlError::internal(what));
        let [times, gaps] = values else { return Err(internal("a session has two arguments")) };
        let times = times
            .as_primitive_opt::<TimestampMicrosecondType>()
            .ok_or_else(|| internal("sessions are of timestamps in microseconds"))?;
        let gaps = gaps
            .as_primitive_opt::<arrow::datatypes::Int64Type>()
            .ok_or_else(|| internal("the gap of a session is a bigint"))?;
        let mut edges: Vec<Option<i64>> = Vec::with_capacity(rows);
        let mut from = 0;
        while from < times.len() {
            let (gap, mut to) = (gaps.value(from), from + 1);
            let near = |i: usize| {
                times.is_valid(i - 1)
                    && times.is_valid(i)
                    && continues(times.value(i - 1), times.value(i), gap)
            };
            while to < times.len() && near(to) {
                to += 1;
            }
            let edge = match (times.is_valid(from), self.end) {
                (false, _) => None,
                (true, false) => Some(times.value(from)),
                (true, true) => Some(times.value(to - 1).checked_add(gap).ok_or_else(overflow)?),
            };
            edges.resize(to, edge);
            from = to;
        }
        let edges = TimestampMicrosecondArray::from(edges);
        Ok(Arc::new(edges.with_data_type(times.data_type().clone())))
    }
}

fn overflow() -> datafusion::error::DataFusionError {
    external(SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, "timestamp out of range"))
}

#[cfg(test)]
mod tests {
    use arrow::array::Int64Array;

    use super::*;

    fn edges(end: bool, times: &[i64]) -> Vec<i64> {
        let gaps: ArrayRef = Arc::new(Int64Array::from_value(10, times.len()));
        let values: ArrayRef = Arc::new(TimestampMicrosecondArray::from(times.to_vec()));
        let found = Sessions { end }.evaluate_all(&[values, gaps], times.len()).unwrap();
        found.as_primitive::<TimestampMicrosecondType>().values().to_vec()
    }

    #[test]
    fn a_row_the_whole_gap_later_begins_a_session() {
        let times = [0, 9, 9, 18, 28, 37, 100];
        assert_eq!(edges(false, &times), [0, 0, 0, 0, 28, 28, 100]);
        assert_eq!(edges(true, &times), [28, 28, 28, 28, 47, 47, 110]);
    }
}
