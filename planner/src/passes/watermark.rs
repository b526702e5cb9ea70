//! Watermarks as a derived property: which columns of a stream have one, and how it follows from the
//! watermarks of the relations that are read (docs/design.md §4, §5).
//!
//! A [`DerivedWatermark`] promises that after an epoch no change, insertion or retraction, has a smaller value
//! in the column than the mark's value at that epoch. The value is a function of the relations'
//! watermarks at the epoch alone, so every task computes it for itself once it knows these.

use arrow::datatypes::{DataType, Schema, TimeUnit};
use datafusion::common::ScalarValue;
use datafusion::logical_expr::Operator as BinaryOp;
use datafusion::physical_expr::ScalarFunctionExpr;
use datafusion::physical_expr::expressions::BinaryExpr;
use millrace_common::RelationId;
use millrace_functions::asof::LATEST;
use millrace_functions::expr;
use millrace_functions::expr::ExprRef;
use millrace_functions::frame::Edge;
use millrace_functions::session::SESSION_END;
use millrace_functions::window_call::Reach;
use millrace_functions::window_call::WindowCall;
use millrace_graph::{DerivedWatermark, JoinKind, MarkStep, WatermarkTerm};

use crate::stream::plan::{Join, Op, Stream, Window};

const DAY_US: i64 = 86_400_000_000;

/// The marks of a subtree's output.
pub fn marks(stream: &Stream) -> Vec<DerivedWatermark> {
    let inputs: Vec<Vec<DerivedWatermark>> = stream.inputs.iter().map(marks).collect();
    let widths: Vec<usize> = stream.inputs.iter().map(Stream::width).collect();
    timed(derive(&stream.op, &inputs, &widths), &stream.schema)
}

/// The marks of columns that hold microseconds, as marks do.
pub fn timed(mut marks: Vec<DerivedWatermark>, schema: &Schema) -> Vec<DerivedWatermark> {
    marks.retain(|m| {
        let typed = schema.fields().get(m.column).map(|f| f.data_type());
        matches!(typed, Some(DataType::Timestamp(TimeUnit::Microsecond, _)))
    });
    marks
}

/// The marks of an operator over inputs with these marks and numbers of columns.
#[deny(clippy::wildcard_enum_match_arm)]
pub fn derive(
    op: &Op,
    inputs: &[Vec<DerivedWatermark>],
    widths: &[usize],
) -> Vec<DerivedWatermark> {
    let port = |n: usize| inputs.get(n).map_or(&[][..], Vec::as_slice);
    let input = port(0);
    match op {
        Op::Scan { relation, columns } => {
            let marked = relation.watermarked();
            let own = columns.iter().enumerate().filter(|(_, c)| marked.contains(c));
            own.map(|(i, &c)| DerivedWatermark {
                column: i,
                terms: vec![WatermarkTerm {
                    relation: RelationId(relation.id),
                    column: c,
                    steps: vec![],
                }],
            })
            .collect()
        }
        // What expires or appears does so by the wall clock, whatever its time.
        Op::TemporalUpperBound(_) | Op::TemporalLowerBound(_) => vec![],
        Op::Values { .. } | Op::Repeat { .. } | Op::Expand(_) => vec![],
        Op::Filter { .. } | Op::Exchange { .. } | Op::Stamp { .. } => input.to_vec(),
        Op::Project { exprs } => project(exprs, input),
        Op::Union => union(inputs),
        Op::Hop { time_column, size_us, slide_us, offset_us } => {
            let mut out = input.to_vec();
            if let (Some(time), Some(&width)) = (of(input, *time_column), widths.first()) {
                let back = MarkStep::Add(slide_us.saturating_sub(*size_us));
                let bin = MarkStep::Bin { size: *slide_us, offset: *offset_us };
                let start = then(time, &[bin, back]);
                out.push(DerivedWatermark {
                    column: width + 1,
                    terms: then(&start, &[MarkStep::Add(*size_us)]),
                });
                out.push(DerivedWatermark { column: width, terms: start });
            }
            out
        }
        Op::Unnest { lists, .. } => {
            input.iter().filter(|m| !lists.contains(&m.column)).cloned().collect()
        }
        Op::Aggregate(a) => pick(input, &a.group),
        Op::TopN(t) => input.iter().filter(|m| t.group.contains(&m.column)).cloned().collect(),
        Op::Window(w) => window(w, input, widths),
        Op::WindowClose(h) => input.iter().filter(|m| m.column == h.column).cloned().collect(),
        // Only changes of the left side are changes of the output.
        Op::Lookup(j) => pick(input, &j.output),
        Op::Join(j) => {
            let width = widths.first().copied().unwrap_or(0);
            let [left, right] = bounds(j, input, port(1), width);
            join_output(j, &left, &right, widths)
        }
    }
}

fn window(w: &Window, input: &[DerivedWatermark], widths: &[usize]) -> Vec<DerivedWatermark> {
    let mut out: Vec<DerivedWatermark> =
        input.iter().filter(|m| w.group.contains(&m.column)).cloned().collect();
    let time = w.order.first().and_then(|o| of(input, o.0));
    if let (Some(terms), Some(&(column, _))) = (time, w.order.first())
        && follows_order(w)
        && of(&out, column).is_none()
    {
        out.push(DerivedWatermark { column, terms: terms.to_vec() });
    }
    if let (Some(time), Some(&width)) = (time, widths.first()) {
        // A session that has ended at the watermark does not change any more.
        let ends = w.calls.iter().enumerate().filter(|(_, c)| c.function == SESSION_END);
        out.extend(ends.map(|(i, _)| DerivedWatermark {
            column: width + i,
            terms: then(time, &[MarkStep::Add(1)]),
        }));
    }
    out
}

/// Whether a row that comes or goes changes no result of a row that is earlier in the order's first column.
fn follows_order(w: &Window) -> bool {
    let Some((_, order)) = w.order.first() else { return false };
    if order.descending || w.calls.is_empty() {
        return false;
    }
    // Of ASOF joins: a right row changes what comes after it, and one without a time is none.
    let asof = w.calls.iter().all(|c| c.function == LATEST);
    // A row without a time, of which nothing is promised, has to stand after all others.
    let back = !order.nulls_first && w.calls.iter().all(looks_back);
    asof || back
}

fn looks_back(call: &WindowCall) -> bool {
    match Reach::of(call) {
        Reach::Rows { before, .. } | Reach::Peers { before, .. } => before == Some(0),
        Reach::Shift { .. } => true,
        Reach::Values { frame } => {
            matches!(frame.end, Edge::Current | Edge::At { ahead: false, .. })
        }
        Reach::Session { .. } | Reach::Carry { .. } => false,
    }
}

/// The terms of a column's mark.
pub fn of(marks: &[DerivedWatermark], column: usize) -> Option<&[WatermarkTerm]> {
    marks.iter().find(|m| m.column == column).map(|m| m.terms.as_slice())
}

fn then(terms: &[WatermarkTerm], steps: &[MarkStep]) -> Vec<WatermarkTerm> {
    let mut terms = terms.to_vec();
    terms.iter_mut().for_each(|t| t.steps.extend_from_slice(steps));
    terms
}

/// Input columns in output order.
fn pick(input: &[DerivedWatermark], columns: &[usize]) -> Vec<DerivedWatermark> {
    let one = |(i, &c): (usize, &usize)| {
        Some(DerivedWatermark { column: i, terms: of(input, c)?.to_vec() })
    };
    columns.iter().enumerate().filter_map(one).collect()
}

fn project(exprs: &[ExprRef], input: &[DerivedWatermark]) -> Vec<DerivedWatermark> {
    let one = |(i, e): (usize, &ExprRef)| {
        let (column, steps) = monotone(e)?;
        Some(DerivedWatermark { column: i, terms: then(of(input, column)?, &steps) })
    };
    exprs.iter().enumerate().filter_map(one).collect()
}

/// A column of a union has the least of its inputs' marks.
fn union(inputs: &[Vec<DerivedWatermark>]) -> Vec<DerivedWatermark> {
    let Some((first, rest)) = inputs.split_first() else { return vec![] };
    let one = |m: &DerivedWatermark| {
        let mut terms = m.terms.clone();
        for input in rest {
            terms.extend_from_slice(of(input, m.column)?);
        }
        Some(DerivedWatermark { column: m.column, terms })
    };
    first.iter().filter_map(one).collect()
}

/// What a join promises of each side's columns. Every change of the output contains a change of one
/// side; a column keeps a mark where the other side's rows are bound to it, by equality or within an
/// interval: `l ≥ r + c` with a new `r` at its watermark means that `l` is not below that plus `c`.
///
/// State of a side below the mark of such a column is never reached again.
pub fn bounds<S>(
    j: &millrace_graph::Join<S>,
    left: &[DerivedWatermark],
    right: &[DerivedWatermark],
    width: usize,
) -> [Vec<DerivedWatermark>; 2] {
    let mut out = [vec![], vec![]];
    let mut add =
        |side: usize, column: usize, own: &[WatermarkTerm], other: &[WatermarkTerm], shift: i64| {
            if out[side].iter().any(|m: &DerivedWatermark| m.column == column) {
                return;
            }
            let step = [MarkStep::Add(shift)];
            let terms = [own.to_vec(), then(other, if shift == 0 { &[] } else { &step })].concat();
            out[side].push(DerivedWatermark { column, terms });
        };
    for (l, r) in j.pairs() {
        if let (Some(l_terms), Some(r_terms)) = (of(left, l), of(right, r)) {
            add(0, l, l_terms, r_terms, 0);
            add(1, r, r_terms, l_terms, 0);
        }
    }
    for (l, r, shift) in j.residual.iter().flat_map(at_least) {
        // l ≥ r + shift, of two columns of the pair.
        match (l < width, r < width) {
            (true, false) => {
                if let (Some(own), Some(other)) = (of(left, l), of(right, r - width)) {
                    add(0, l, own, other, shift);
                }
            }
            (false, true) => {
                if let (Some(own), Some(other)) = (of(right, l - width), of(left, r)) {
                    add(1, l - width, own, other, shift);
                }
            }
            _ => {}
        }
    }
    out
}

/// By which column, and down to which bound, each side's rows are kept.
///
/// A row that no change can reach is not needed for pairs, but an outer, semi or anti join also counts, when a
/// row of a preserved side is read back, the rows of the other side that it has met: those are kept for as long
/// as a row that may have met them is within reach.
pub fn retained<S>(
    j: &millrace_graph::Join<S>,
    left: &[DerivedWatermark],
    right: &[DerivedWatermark],
    width: usize,
) -> [Option<DerivedWatermark>; 2] {
    let bounds = bounds(j, left, right, width);
    let find = |side: usize, c: usize| bounds[side].iter().find(|m| m.column == c).cloned();
    // By a column of the key: the rows of a key go together.
    for (l, r) in j.pairs() {
        if let (Some(l), Some(r)) = (find(0, l), find(1, r)) {
            return [Some(l), Some(r)];
        }
    }
    let own = [bounds[0].first().cloned(), bounds[1].first().cloned()];
    let mut kept = own.clone();
    let preserved = preserved(j.kind);
    let at_least: Vec<_> = j.residual.iter().flat_map(at_least).collect();
    for side in [0, 1] {
        let Some(mark) = kept[side].as_mut().filter(|_| preserved[1 - side]) else { continue };
        let place = |side: usize, c: usize| if side == 0 { c } else { c + width };
        let shift = own[1 - side].as_ref().and_then(|other| {
            let pair = (place(side, mark.column), place(1 - side, other.column));
            let found = at_least.iter().find(|(a, b, _)| (*a, *b) == pair);
            found.map(|(_, _, shift)| then(&other.terms, &[MarkStep::Add(*shift)]))
        });
        match shift {
            Some(terms) => mark.terms.extend(terms),
            None => kept[side] = None,
        }
    }
    kept
}

/// Sides whose rows appear in the output by themselves.
fn preserved(kind: JoinKind) -> [bool; 2] {
    use JoinKind as K;
    match kind {
        K::Inner => [false, false],
        K::LeftOuter | K::LeftSemi | K::LeftAnti | K::LeftMark => [true, false],
        K::RightOuter | K::RightSemi | K::RightAnti => [false, true],
        K::FullOuter => [true, true],
    }
}

fn join_output(
    j: &Join,
    left: &[DerivedWatermark],
    right: &[DerivedWatermark],
    widths: &[usize],
) -> Vec<DerivedWatermark> {
    use millrace_graph::JoinKind as K;
    let width = widths.first().copied().unwrap_or(0);
    let full: Vec<DerivedWatermark> = match j.kind {
        K::LeftSemi | K::LeftAnti | K::LeftMark => left.to_vec(),
        K::RightSemi | K::RightAnti => right.to_vec(),
        _ => {
            let shifted = right
                .iter()
                .map(|m| DerivedWatermark { column: m.column + width, terms: m.terms.clone() });
            left.iter().cloned().chain(shifted).collect()
        }
    };
    // A null-aware join looks at rows of every key.
    if j.null_aware { vec![] } else { pick(&full, &j.output) }
}

/// `a ≥ b + c` for every conjunct of that form: (a, b, c in microseconds).
fn at_least(e: &ExprRef) -> Vec<(usize, usize, i64)> {
    let Some(b) = e.downcast_ref::<BinaryExpr>() else { return vec![] };
    if *b.op() == BinaryOp::And {
        return [at_least(b.left()), at_least(b.right())].concat();
    }
    let (Some(l), Some(r)) = (shifted(b.left()), shifted(b.right())) else { return vec![] };
    // l.0 + l.1 op r.0 + r.1
    let left_over = (l.0, r.0, r.1.saturating_sub(l.1));
    let right_over = (r.0, l.0, l.1.saturating_sub(r.1));
    match b.op() {
        BinaryOp::Gt | BinaryOp::GtEq => vec![left_over],
        BinaryOp::Lt | BinaryOp::LtEq => vec![right_over],
        BinaryOp::Eq => vec![left_over, right_over],
        _ => vec![],
    }
}

/// A column plus a constant.
fn shifted(e: &ExprRef) -> Option<(usize, i64)> {
    let (column, steps) = monotone(e)?;
    let mut sum = 0i64;
    for step in steps {
        match step {
            MarkStep::Add(us) => sum = sum.checked_add(us)?,
            MarkStep::Bin { .. } => return None,
        }
    }
    Some((column, sum))
}

/// The column, and what happens to it, of an expression that never decreases when the column grows.
pub fn monotone(e: &ExprRef) -> Option<(usize, Vec<MarkStep>)> {
    if let Some(c) = expr::as_column(e) {
        return Some((c, vec![]));
    }
    if let Some((inner, to)) = expr::as_cast(e) {
        // A cast of a timestamp to a timestamp with or without time zone: UTC.
        let (column, steps) = monotone(inner)?;
        let micros = matches!(to, DataType::Timestamp(TimeUnit::Microsecond, _));
        return micros.then_some((column, steps));
    }
    if let Some(b) = e.downcast_ref::<BinaryExpr>() {
        return match b.op() {
            BinaryOp::Plus => added(b.left(), b.right(), 1),
            BinaryOp::Minus => added(b.left(), b.right(), -1),
            _ => None,
        };
    }
    let call = e.downcast_ref::<ScalarFunctionExpr>()?;
    let step = match (call.fun().name(), call.args()) {
        ("pg_add", [a, b]) => return added(a, b, 1),
        ("pg_sub", [a, b]) => return added(a, b, -1),
        ("tumble_start", [_, size, offset]) => {
            MarkStep::Bin { size: integer(size)?, offset: integer(offset)? }
        }
        ("window_end", [_, size]) => MarkStep::Add(integer(size)?),
        ("date_trunc", [unit, x]) => {
            let (column, mut steps) = monotone(x)?;
            steps.push(MarkStep::Bin { size: unit_us(expr::as_literal(unit)?)?, offset: 0 });
            return Some((column, steps));
        }
        // Its result has the type of its argument.
        ("date_bin", [size, x, rest @ ..]) => {
            let offset = match rest {
                [] => 0,
                [origin] => instant(expr::as_literal(origin)?)?,
                _ => return None,
            };
            let (column, mut steps) = monotone(x)?;
            steps.push(MarkStep::Bin { size: interval_us(expr::as_literal(size)?)?, offset });
            return Some((column, steps));
        }
        _ => return None,
    };
    let (column, mut steps) = monotone(call.args().first()?)?;
    if matches!(step, MarkStep::Bin { size, .. } if size <= 0) {
        return None;
    }
    steps.push(step);
    Some((column, steps))
}

fn added(a: &ExprRef, b: &ExprRef, sign: i64) -> Option<(usize, Vec<MarkStep>)> {
    let (x, by) = match (expr::as_literal(a), expr::as_literal(b)) {
        (None, Some(by)) => (a, by),
        (Some(by), None) if sign == 1 => (b, by),
        _ => return None,
    };
    let us = interval_us(by)?;
    let (column, mut steps) = monotone(x)?;
    steps.push(MarkStep::Add(us.checked_mul(sign)?));
    Some((column, steps))
}

fn integer(e: &ExprRef) -> Option<i64> {
    match expr::as_literal(e)? {
        ScalarValue::Int64(v) => *v,
        _ => None,
    }
}

/// Months have no fixed length.
fn interval_us(v: &ScalarValue) -> Option<i64> {
    match v {
        ScalarValue::IntervalMonthDayNano(Some(i)) if i.months == 0 => {
            i64::from(i.days).checked_mul(DAY_US)?.checked_add(i.nanoseconds / 1_000)
        }
        _ => None,
    }
}

fn instant(v: &ScalarValue) -> Option<i64> {
    match v {
        ScalarValue::TimestampMicrosecond(v, _) => *v,
        _ => None,
    }
}

fn unit_us(v: &ScalarValue) -> Option<i64> {
    let unit = match v {
        ScalarValue::Utf8(Some(s)) | ScalarValue::Utf8View(Some(s)) => s.to_lowercase(),
        _ => return None,
    };
    Some(match unit.as_str() {
        "microsecond" | "microseconds" => 1,
        "millisecond" | "milliseconds" => 1_000,
        "second" => 1_000_000,
        "minute" => 60_000_000,
        "hour" => 3_600_000_000,
        "day" => DAY_US,
        _ => return None,
    })
}

/// The first marked column of a stream's output that users see: what EMIT ON WINDOW CLOSE waits for.
pub fn closing_column(stream: &Stream, visible: usize) -> Option<usize> {
    let mut columns: Vec<usize> = marks(stream).iter().map(|m| m.column).collect();
    columns.sort_unstable();
    columns.into_iter().find(|&c| c < visible)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::plan::Identity;

    #[test]
    fn steps_follow_the_calendar() {
        let term =
            |steps: Vec<MarkStep>| WatermarkTerm { relation: RelationId(1), column: 0, steps };
        let at = |steps, v| term(steps).apply(v);
        assert_eq!(at(vec![MarkStep::Bin { size: 10, offset: 0 }], 25), 20);
        assert_eq!(at(vec![MarkStep::Bin { size: 10, offset: 3 }], 25), 23);
        assert_eq!(at(vec![MarkStep::Bin { size: 10, offset: 0 }], -1), -10);
        assert_eq!(at(vec![MarkStep::Bin { size: 10, offset: 0 }, MarkStep::Add(10)], 25), 30);
        assert_eq!(at(vec![MarkStep::Add(i64::MAX)], 25), i64::MAX);
    }

    #[test]
    fn an_order_keeps_its_mark_where_no_result_looks_ahead() {
        use arrow::compute::SortOptions;

        use millrace_functions::window_call::RankFunction;
        use millrace_functions::window_call::numbering;

        let over = |call: WindowCall, options: SortOptions| {
            let (group, order) = (vec![1], vec![(0, options)]);
            let window = Window {
                group,
                order,
                calls: vec![call],
                vnode: vec![],
                state: Identity::default(),
            };
            let term = WatermarkTerm { relation: RelationId(1), column: 0, steps: vec![] };
            let input = vec![DerivedWatermark { column: 0, terms: vec![term] }];
            !derive(&Op::Window(window), &[input], &[2]).is_empty()
        };
        let options = |descending, nulls_first| SortOptions { descending, nulls_first };
        let call = |name: &str| WindowCall {
            function: name.into(),
            numbering: None,
            ..numbering(RankFunction::RowNumber)
        };
        assert!(over(numbering(RankFunction::Rank), options(false, false)));
        assert!(over(call("lag"), options(false, false)));
        assert!(!over(call("lag"), options(false, true)));
        assert!(!over(call("lag"), options(true, false)));
        assert!(!over(call("lead"), options(false, false)));
        assert!(!over(call("ntile"), options(false, false)));
    }

    #[test]
    fn a_mark_that_one_input_of_a_union_lacks_is_lost() {
        let mark = |column, relation| DerivedWatermark {
            column,
            terms: vec![WatermarkTerm { relation: RelationId(relation), column: 0, steps: vec![] }],
        };
        let both = union(&[vec![mark(0, 1), mark(1, 1)], vec![mark(1, 2)]]);
        assert_eq!(both.len(), 1);
        assert_eq!((both[0].column, both[0].terms.len()), (1, 2));
    }
}
