//! What the executor needs to know of a window function: how to compute it, and how far a change of
//! one row reaches.

use std::sync::Arc;

use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, SchemaRef};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    WindowFrame, WindowFrameBound, WindowFrameUnits, WindowFunctionDefinition,
};
use datafusion::physical_expr::PhysicalSortExpr;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::window::WindowExpr;
use datafusion::physical_plan::windows::create_window_expr;

use crate::asof::{LATEST, Place};
use crate::expr::{ExprRef, as_literal};
use crate::frame::{Distance, Edge, Frame, Units};
use crate::framed::Framed;
use crate::functions;
use crate::session::{SESSION_END, SESSION_START};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankFunction {
    RowNumber,
    Rank,
    DenseRank,
}

#[derive(Clone, Debug, PartialEq)]
pub struct WindowCall {
    /// The window or aggregate function, by the name it is registered under.
    pub function: String,
    pub aggregate: bool,
    /// Columns and literals.
    pub args: Vec<ExprRef>,
    /// A boolean input column: only rows where it is true are aggregated.
    pub filter: Option<ExprRef>,
    pub distinct: bool,
    pub ignore_nulls: bool,
    pub frame: WindowFrame,
    /// `row_number`, `rank` and `dense_rank`, which follow from places alone.
    pub numbering: Option<RankFunction>,
    pub output_type: DataType,
}

/// The function over rows of one group that lie in order, as batch computes it.
pub fn compile(
    call: &WindowCall,
    order: &[(usize, SortOptions)],
    input: &SchemaRef,
) -> Result<Arc<dyn WindowExpr>> {
    let name = &call.function;
    let found = if call.aggregate {
        functions().aggregate(name).map(WindowFunctionDefinition::AggregateUDF)
    } else {
        functions().window(name).map(WindowFunctionDefinition::WindowUDF)
    };
    let Some(function) = found else {
        return datafusion::common::plan_err!("the window function {name} does not exist");
    };
    let sort = |(c, options): &(usize, SortOptions)| {
        let column: ExprRef = Arc::new(Column::new(input.field(*c).name(), *c));
        PhysicalSortExpr::new(column, *options)
    };
    create_window_expr(
        &function,
        name.clone(),
        &call.args,
        &[],
        &order.iter().map(sort).collect::<Vec<_>>(),
        Arc::new(call.frame.clone()),
        Arc::clone(input),
        call.ignore_nulls,
        call.distinct,
        call.filter.clone(),
    )
}

/// How far from a changed row other rows' results may change: so many before it and after it in the
/// order, `None`: all. By the same numbers a row's result needs `after` before it and `before` after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Counted in rows.
    Rows { before: Option<u64>, after: Option<u64> },
    /// Counted in groups of rows that are level.
    Peers { before: Option<u64>, after: Option<u64> },
    /// A row number or a rank: rows after it, by the change in the number of rows. A rank is level for
    /// peers, wherever among them the change is.
    Shift { peers: bool },
    /// The session of a row, by the order's first column, a timestamp: all rows of the sessions that a
    /// change joins or parts. Microseconds.
    Session { gap: i64 },
    /// By the order's value: rows from whose value one edge lies at or before the changed row's and the other at or
    /// behind it (see [`crate::frame::Axis`]). Edges that lie a calendar's months away are none of these.
    Values { frame: Frame },
    /// The last right row so far (see [`crate::asof`]): rows up to the next right one.
    Carry { place: Place },
}

/// Anything may change.
const ALL: Reach = Reach::Peers { before: None, after: None };

impl Reach {
    pub fn of(call: &WindowCall) -> Reach {
        match call.numbering {
            Some(RankFunction::DenseRank) => {
                return Reach::Peers { before: Some(0), after: None };
            }
            Some(rank) => return Reach::Shift { peers: rank == RankFunction::Rank },
            None => {}
        }
        if follows_frame(call) {
            return frame(call);
        }
        if let Some(framed) = Framed::of(call) {
            return match framed.function.as_str() {
                // Each row looks as far as it says.
                "lag" | "lead" => ALL,
                _ => own_frame(framed.frame),
            };
        }
        match call.function.as_str() {
            "lag" => distance(call, 1),
            "lead" => distance(call, -1),
            LATEST => carry_place(call).map_or(ALL, |place| Reach::Carry { place }),
            SESSION_START | SESSION_END => {
                session_gap(call).map_or(ALL, |gap| Reach::Session { gap })
            }
            _ => ALL,
        }
    }
}

/// The gap of a call of `session_start` or `session_end`.
pub fn session_gap(call: &WindowCall) -> Option<i64> {
    let session = [SESSION_START, SESSION_END].contains(&call.function.as_str());
    match call.args.get(1).filter(|_| session).and_then(as_literal)? {
        ScalarValue::Int64(gap) => *gap,
        _ => None,
    }
}

fn carry_place(call: &WindowCall) -> Option<Place> {
    match call.args.get(2).and_then(as_literal)? {
        ScalarValue::Int64(code) => Place::decode((*code)?),
        _ => None,
    }
}

/// Whether the call computes over its frame; others look at places only.
pub fn follows_frame(call: &WindowCall) -> bool {
    let framed = ["first_value", "last_value", "nth_value"];
    call.aggregate || framed.contains(&call.function.as_str())
}

/// `lag`, or with sign −1 `lead`, by a constant number of rows.
fn distance(call: &WindowCall, sign: i64) -> Reach {
    let rows = match call.args.get(1) {
        None => Some(1),
        Some(e) => match as_literal(e).map(|v| v.cast_to(&DataType::Int64)) {
            Some(Ok(ScalarValue::Int64(n))) => n,
            _ => None,
        },
    };
    match rows.and_then(|n| n.checked_mul(sign)) {
        Some(n) if !call.ignore_nulls => Reach::Rows {
            before: Some(n.min(0).unsigned_abs()),
            after: Some(n.max(0).unsigned_abs()),
        },
        _ => ALL,
    }
}

/// The reach of a frame of ours. What it leaves out is part of it: a row that is left out changes nothing.
fn own_frame(frame: Frame) -> Reach {
    // What reaches ahead on one side of a row, or not at all, reaches no row on the other.
    let count = |edge: Edge, ahead: bool| match edge {
        Edge::At { ahead: a, by: Distance::Whole(n) } if a == ahead => u64::try_from(n).ok(),
        Edge::Unbounded => None,
        _ => Some(0),
    };
    let calendar = |e: Edge| matches!(e, Edge::At { by: Distance::Calendar { .. }, .. });
    let by_value = [frame.start, frame.end].iter().any(|e| matches!(e, Edge::At { .. }));
    let (before, after) = (count(frame.end, true), count(frame.start, false));
    match frame.units {
        Units::Rows => Reach::Rows { before, after },
        Units::Range if calendar(frame.start) || calendar(frame.end) => ALL,
        Units::Range if by_value => Reach::Values { frame },
        Units::Range | Units::Groups => Reach::Peers { before, after },
    }
}

fn frame(call: &WindowCall) -> Reach {
    let frame = &call.frame;
    let range = frame.units == WindowFrameUnits::Range;
    let count = |offset: &ScalarValue| match offset {
        // By distance in value, which is not told from places.
        _ if range => None,
        ScalarValue::UInt64(n) => *n,
        _ => None,
    };
    // A bound on the other side of the current row reaches no row on this one.
    let other = |offset: &ScalarValue| if range { count(offset) } else { Some(0) };
    let after = match &frame.start_bound {
        WindowFrameBound::Preceding(offset) => count(offset),
        WindowFrameBound::CurrentRow => Some(0),
        WindowFrameBound::Following(offset) => other(offset),
    };
    let before = match &frame.end_bound {
        WindowFrameBound::Following(offset) => count(offset),
        WindowFrameBound::CurrentRow => Some(0),
        WindowFrameBound::Preceding(offset) => other(offset),
    };
    match frame.units {
        WindowFrameUnits::Rows => Reach::Rows { before, after },
        WindowFrameUnits::Range | WindowFrameUnits::Groups => Reach::Peers { before, after },
    }
}

/// A ranking function, over the whole group.
pub fn numbering(rank: RankFunction) -> WindowCall {
    WindowCall {
        function: match rank {
            RankFunction::RowNumber => "row_number",
            RankFunction::Rank => "rank",
            RankFunction::DenseRank => "dense_rank",
        }
        .into(),
        aggregate: false,
        args: vec![],
        filter: None,
        distinct: false,
        ignore_nulls: false,
        frame: WindowFrame::new(None),
        numbering: Some(rank),
        output_type: DataType::Int64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Exclude;

    #[test]
    fn how_far_frames_reach() {
        let at = |ahead, n| Edge::At { ahead, by: Distance::Whole(n) };
        let reach =
            |units, start, end| own_frame(Frame { units, start, end, exclude: Exclude::Ties });
        let rows = |before, after| Reach::Rows { before, after };
        assert_eq!(reach(Units::Rows, at(false, 2), at(true, 1)), rows(Some(1), Some(2)));
        assert_eq!(reach(Units::Rows, at(true, 1), Edge::Unbounded), rows(None, Some(0)));
        let peers = Reach::Peers { before: Some(0), after: None };
        assert_eq!(reach(Units::Range, Edge::Unbounded, Edge::Current), peers);
        let near = Frame {
            units: Units::Range,
            start: at(false, 2),
            end: Edge::Current,
            exclude: Exclude::Ties,
        };
        assert_eq!(own_frame(near), Reach::Values { frame: near });
        let month = Edge::At { ahead: false, by: Distance::Calendar { months: 1, days: 0, us: 0 } };
        assert_eq!(reach(Units::Range, month, Edge::Current), ALL);
    }
}
