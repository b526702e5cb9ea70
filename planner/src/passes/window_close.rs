//! EMIT ON WINDOW CLOSE: the result is held back until the watermark says that it is final.

use millrace_common::SqlError;

use crate::passes::{Pass, watermark};
use crate::stream::plan::{Op, Stream};

/// Holds the result back until its windows are closed.
pub struct CloseWindows {
    /// How many columns of the result, the first ones, are visible.
    pub visible: usize,
}

impl Pass for CloseWindows {
    fn name(&self) -> &'static str {
        "close windows"
    }

    fn run(&self, stream: Stream) -> Result<Stream, SqlError> {
        close_windows(stream, self.visible)
    }
}

fn close_windows(stream: Stream, visible: usize) -> Result<Stream, SqlError> {
    match watermark::closing_column(&stream, visible) {
        Some(column) => Ok(stream.window_close(column)),
        None => {
            let message =
                "EMIT ON WINDOW CLOSE of a query whose result has no column with a watermark";
            let hint = match has_windows(&stream) {
                true => WINDOW_HINT,
                false => {
                    "Declare WATERMARK FOR on the source, and have the window or time column in the result."
                }
            };
            Err(SqlError::unsupported(message).with_hint(hint))
        }
    }
}

/// What a result with window functions can wait for.
const WINDOW_HINT: &str = "A window function keeps the watermark of a column of its PARTITION BY; and of \
     the first column of its ORDER BY, if that is ascending with NULLs last and no result depends on rows after its own \
     (lag, row_number, rank, dense_rank, aggregates over frames that end at CURRENT ROW or before). Have that column \
     in the result.";

fn has_windows(stream: &Stream) -> bool {
    matches!(stream.op, Op::Window(_)) || stream.inputs.iter().any(has_windows)
}
