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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::compute::SortOptions;
    use millrace_common::{SqlState, SqlType};
    use millrace_graph::BufferMode;
    use millrace_rpc::catalog::{Column, Relation};

    use super::*;
    use crate::passes::tests::table;
    use crate::stream::plan::{Identity, Scan, Window};

    /// The columns `c TEXT` and `at TIMESTAMP`, the latter with a watermark.
    fn events() -> Stream {
        let Stream { op: Op::Scan(Scan { relation, .. }), .. } = table() else {
            panic!("the table is scanned");
        };
        let mut relation = Relation::clone(&relation);
        relation.columns.push(Column {
            name: "at".into(),
            sql_type: SqlType::Timestamp.into(),
            ..Column::default()
        });
        relation.watermark_columns = vec![3];
        let schema = relation.arrow_schema().unwrap().project(&[2, 3]).unwrap();
        Stream::scan(Arc::new(relation), Arc::new(schema), vec![2, 3])
    }

    /// Window functions over the events of each group, in the order of a column.
    fn windowed(group: usize, order: usize, options: SortOptions) -> Stream {
        events().window(Window {
            group: vec![group],
            order: vec![(order, options)],
            calls: vec![],
            vnode: vec![],
            state: Identity::default(),
        })
    }

    fn closed(stream: Stream, visible: usize) -> Result<Stream, SqlError> {
        CloseWindows { visible }.run(stream)
    }

    /// The column whose watermark the result waits for.
    fn awaited(stream: &Stream) -> Option<usize> {
        match &stream.op {
            Op::Buffer(buffer) if buffer.mode == BufferMode::WindowClose => Some(buffer.column),
            _ => None,
        }
    }

    #[test]
    fn a_result_waits_for_its_first_column_with_a_watermark() {
        let found = closed(events(), 2).unwrap();
        assert_eq!(awaited(&found), Some(1));
        assert!(matches!(found.inputs[0].op, Op::Scan(_)));
        let found = closed(events().select(&[1, 0, 1]), 3).unwrap();
        assert_eq!(awaited(&found), Some(0));
        let found = closed(windowed(1, 0, SortOptions::default()), 2).unwrap();
        assert_eq!(awaited(&found), Some(1), "the watermark of a PARTITION BY stays");
    }

    #[test]
    fn a_watermark_that_is_not_seen_does_not_count() {
        let error = closed(events(), 1).map(drop).unwrap_err();
        assert_eq!(error.state, SqlState::FEATURE_NOT_SUPPORTED);
        assert!(error.hint.as_deref().unwrap().starts_with("Declare WATERMARK FOR"));
        assert!(closed(table(), 3).is_err(), "no column has a watermark");
    }

    #[test]
    fn window_functions_say_which_watermarks_they_keep() {
        let newest_first = SortOptions { descending: true, nulls_first: true };
        let over = windowed(0, 1, newest_first);
        for plan in [over.clone(), over.select(&[1])] {
            let error = closed(plan, 1).map(drop).unwrap_err();
            assert_eq!(error.hint.as_deref(), Some(WINDOW_HINT));
        }
    }
}
