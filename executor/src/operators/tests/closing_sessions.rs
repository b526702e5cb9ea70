//! Sessions that are over leave the state when the watermark comes, over a simulated store: the times at which they are
//! over and the rows of their groups are read before.

use std::sync::Arc;

use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use datafusion::common::ScalarValue;
use datafusion::logical_expr::WindowFrame;
use datafusion::physical_expr::expressions::Column;
use millrace_functions::expr::literal;
use millrace_functions::session::SESSION_START;
use millrace_functions::window_call::WindowCall;
use millrace_graph::{Closing, Operator as Op, Window, WindowState};
use millrace_rpc::catalog::RowStorage;

use super::closing::{APART, Held, STEADY, WINDOW, end, schema};
use crate::options::{ExecOptions, LookaheadMode};

/// Windows of sessions.
const WINDOWS: usize = 5;

/// `SELECT *, session_start OVER (PARTITION BY id ORDER BY at)`
fn sessions() -> (Op, SchemaRef, Vec<(SchemaRef, RowStorage)>) {
    const GAP: i64 = 10;
    let time = DataType::Timestamp(TimeUnit::Microsecond, None);
    let start = WindowCall {
        function: SESSION_START.into(),
        aggregate: false,
        args: vec![Arc::new(Column::new("at", 0)), literal(ScalarValue::from(GAP))],
        filter: None,
        distinct: false,
        ignore_nulls: false,
        frame: WindowFrame::new(Some(false)),
        numbering: None,
        output_type: time.clone(),
    };
    let state = WindowState {
        table: 0,
        storage: RowStorage::Multiset,
        unique_key: vec![],
        closing: Some(Closing { column: 0, gap: GAP, table: 1 }),
    };
    let order = vec![(0, SortOptions { descending: false, nulls_first: false })];
    let window = Window { group: vec![1], vnode: vec![], order, calls: vec![start], state };
    let mut fields: Vec<Field> = schema().fields().iter().map(|f| f.as_ref().clone()).collect();
    fields.push(Field::new("start", time, true));
    let tables = vec![(schema(), RowStorage::Multiset), (schema(), RowStorage::Keyed)];
    (Op::Window(window), Arc::new(Schema::new(fields)), tables)
}

/// One row for each session, each of a group of its own: all in the store, and nothing of them in memory.
async fn cold(lookahead: LookaheadMode) -> Held {
    let (op, schema, tables) = sessions();
    let options = ExecOptions { lookahead, ..ExecOptions::default() };
    let mut held = Held::over(options, op, schema, tables).await;
    let rows: Vec<(i64, i64)> = (0..WINDOWS as i64 * WINDOW).map(|i| (i * APART, i)).collect();
    held.push(&rows);
    assert_eq!(held.barrier(0).await.0, rows);
    held.cool().await;
    held.restart();
    held.sim.set_profile(STEADY);
    held
}

#[tokio::test(start_paused = true)]
async fn sessions_that_are_over_are_read_before_the_watermark_comes() {
    let mut held = cold(LookaheadMode::Auto).await;
    let (_, demand) = held.barrier(end(0)).await;
    assert!(demand > 0, "the state is cold");
    for window in 1..WINDOWS {
        held.store.cache().clear_memory();
        assert!(held.foresee(end(window)));
        held.read_ahead().await;
        assert_eq!(held.barrier(end(window)).await.1, 0, "window {window}");
    }
    let told = held.told();
    let closed = (WINDOWS as u64 - 1) * WINDOW as u64;
    assert_eq!((told.unused, told.dropped, told.late), (0, 0, 0), "{told:?}");
    assert_eq!(told.in_time, WINDOWS as u64 - 1 + closed, "ranges and groups");
    assert_eq!(held.entries(0).await, 0, "all sessions have left");
}

#[tokio::test(start_paused = true)]
async fn sessions_that_are_not_read_ahead_leave_all_the_same() {
    let mut held = cold(LookaheadMode::Off).await;
    for window in 0..WINDOWS {
        held.store.cache().clear_memory();
        assert!(!held.foresee(end(window)));
        assert!(held.barrier(end(window)).await.1 > 0, "window {window}");
    }
    assert_eq!(held.entries(0).await, 0);
}

#[tokio::test(start_paused = true)]
async fn sessions_that_were_foreseen_wrongly_are_read_when_they_are_over() {
    let mut held = cold(LookaheadMode::Auto).await;
    held.barrier(end(0)).await;
    // Of two windows and one that is not over, and then none in time.
    held.foresee(end(3));
    held.read_ahead().await;
    for window in 1..WINDOWS {
        held.barrier(end(window)).await;
        held.foresee(end(window));
    }
    assert_eq!(held.entries(0).await, 0);
}
