//! State that a watermark announces.

use super::*;
use crate::Closing;

#[test]
fn what_waits_for_a_watermark_is_announced_by_it() {
    let mut plan = Plan::new();
    let leaf = plan.leaf_of(vec![bigint("a"), time("at")]);
    let sessions = plan.window(leaf, &[0]);
    let Operator::Window(window) = &mut plan.nodes[sessions].op else { panic!("a window") };
    window.state.closing = Some(Closing { column: 1, gap: 5, table: 7 });
    // Its results follow from the group's rows alone.
    plan.window(sessions, &[0]);
    for mode in [BufferMode::UpperBound, BufferMode::LowerBound, BufferMode::WindowClose] {
        let buffer = EventTimeBuffer { mode, column: 1, vnode: vec![0], table: 3 };
        plan.same(Operator::Buffer(buffer), leaf);
    }
    let found = closed_ranges(&plan.graph());
    let range = |node, table| ClosedRange { operator: (0, node), column: 1, table };
    assert_eq!(found, [range(1, 7), range(5, 3)]);
}

/// A tumbling window's rows are appended until it is closed, and then read by range: no row of a leaf brings a key.
#[test]
fn rows_bring_no_keys_of_state_that_a_watermark_announces() {
    let mut plan = Plan::new();
    let leaf = plan.leaf_of(vec![bigint("a"), time("at")]);
    let mode = BufferMode::WindowClose;
    let buffer = EventTimeBuffer { mode, column: 1, vnode: vec![0], table: 0 };
    plan.same(Operator::Buffer(buffer), leaf);
    let graph = plan.graph();
    assert!(lookaheads(&graph).is_empty());
    assert_eq!(closed_ranges(&graph).len(), 1);
}
