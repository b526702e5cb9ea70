//! Limits from filters on ranks: `row_number() OVER (…) <= n` keeps the first `n` rows a group.
//!
//! Windows with a ranking function become unlimited top-Ns that put out the rank. A filter above,
//! with only projections and other filters between, bounds the rank from one or both sides; the
//! bounds move into the top-N and the conjuncts that gave them go. (Filters commute, so others may
//! lie between.)

use std::sync::Arc;

use arrow::datatypes::Schema;
use datafusion::common::ScalarValue;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::conjunction;
use datafusion::physical_expr::expressions::BinaryExpr;
use datafusion::physical_expr::utils::split_conjunction;
use millrace_functions::expr;
use millrace_functions::expr::ExprRef;
use millrace_functions::window_call;
use millrace_graph::{Filter, Project};

use crate::passes::Plain;
use crate::stream::plan::{Identity, Op, Stream, Window};

/// Ranks that pass, from 1, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bounds {
    low: i64,
    high: Option<i64>,
}

impl Bounds {
    const ALL: Bounds = Bounds { low: 1, high: None };

    fn and(self, other: Bounds) -> Bounds {
        let high = match (self.high, other.high) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Bounds { low: self.low.max(other.low), high }
    }
}

/// Moves filters on ranks into the top-Ns below them.
pub const LIMIT_RANKS: Plain = Plain { name: "limit ranks", run: |stream| Ok(limit_ranks(stream)) };

fn limit_ranks(stream: Stream) -> Stream {
    let Stream { op, inputs, schema } = stream;
    let mut inputs: Vec<Stream> = inputs.into_iter().map(limit_ranks).collect();
    let Op::Filter(Filter { predicate }) = &op else { return Stream { op, inputs, schema } };
    let mut bounds = Bounds::ALL;
    let mut rest = Vec::new();
    for conjunct in split_conjunction(predicate) {
        match inputs.first().and_then(|input| rank_bounds(conjunct, input)) {
            Some(b) => bounds = bounds.and(b),
            None => rest.push(Arc::clone(conjunct)),
        }
    }
    if bounds == Bounds::ALL && !rest.is_empty() {
        return Stream { op, inputs, schema };
    }
    let Some(input) = inputs.pop() else { return Stream { op, inputs, schema } };
    let input = apply(input, bounds);
    if rest.is_empty() { input } else { input.filter(conjunction(rest)) }
}

/// Makes windows of top-Ns without limits.
pub const NUMBER_ROWS: Plain = Plain { name: "number rows", run: |stream| Ok(number_rows(stream)) };

/// Rankings that nothing limits are window functions: a change emits the rows whose rank it moves,
/// without a look at the rest of their group.
fn number_rows(stream: Stream) -> Stream {
    let Stream { op, inputs, schema } = stream;
    let mut inputs: Vec<Stream> = inputs.into_iter().map(number_rows).collect();
    match (op, inputs.pop()) {
        (Op::TopN(t), Some(input)) if t.emit_rank && t.limit.is_none() && t.offset == 0 => {
            let (group, order) = (t.group, t.order);
            let calls = vec![window_call::numbering(t.rank)];
            let state = Identity::default();
            let op = Op::Window(Window { group, order, calls, vnode: vec![], state });
            Stream { op, inputs: vec![input], schema }
        }
        (op, input) => {
            inputs.extend(input);
            Stream { op, inputs, schema }
        }
    }
}

/// The bounds a conjunct puts on the rank of the top-N below, if it is only about that.
fn rank_bounds(conjunct: &ExprRef, input: &Stream) -> Option<Bounds> {
    let comparison = conjunct.downcast_ref::<BinaryExpr>()?;
    let (column, op, literal) = match (integer(comparison.left()), integer(comparison.right())) {
        (None, Some(n)) => (comparison.left(), *comparison.op(), n),
        (Some(n), None) => (comparison.right(), comparison.op().swap()?, n),
        _ => return None,
    };
    if !is_rank(column, input) {
        return None;
    }
    let bounds = |low: i64, high| Bounds { low: low.max(1), high };
    Some(match op {
        Operator::Eq => bounds(literal, Some(literal)),
        Operator::Lt => bounds(1, Some(literal.checked_sub(1)?)),
        Operator::LtEq => bounds(1, Some(literal)),
        Operator::Gt => bounds(literal.checked_add(1)?, None),
        Operator::GtEq => bounds(literal, None),
        _ => return None,
    })
}

fn integer(e: &ExprRef) -> Option<i64> {
    let below = expr::below_integer_casts(e, &Schema::empty());
    match expr::as_literal(&below)? {
        ScalarValue::Int8(v) => v.map(i64::from),
        ScalarValue::Int16(v) => v.map(i64::from),
        ScalarValue::Int32(v) => v.map(i64::from),
        ScalarValue::Int64(v) => *v,
        ScalarValue::UInt8(v) => v.map(i64::from),
        ScalarValue::UInt16(v) => v.map(i64::from),
        ScalarValue::UInt32(v) => v.map(i64::from),
        ScalarValue::UInt64(v) => v.and_then(|v| i64::try_from(v).ok()),
        _ => None,
    }
}

/// Whether an expression over `input`'s columns is the rank of an unlimited top-N below.
fn is_rank(e: &ExprRef, input: &Stream) -> bool {
    let e = expr::below_integer_casts(e, &input.schema);
    let Some(column) = expr::as_column(&e) else { return false };
    match (&input.op, input.inputs.as_slice()) {
        (Op::Project(Project { exprs }), [below]) => {
            exprs.get(column).is_some_and(|e| is_rank(e, below))
        }
        (Op::Filter(_), [below]) => is_rank(&e, below),
        (Op::TopN(t), _) => {
            let unlimited = t.limit.is_none() && t.offset == 0;
            unlimited && t.emit_rank && column + 1 == input.width()
        }
        _ => false,
    }
}

/// Puts the bounds into the top-N that `is_rank` found.
fn apply(mut stream: Stream, bounds: Bounds) -> Stream {
    match &mut stream.op {
        Op::TopN(t) => {
            t.offset = (bounds.low - 1).unsigned_abs();
            t.limit = bounds.high.map(|h| (h - bounds.low + 1).max(0).unsigned_abs());
            stream
        }
        Op::Project(_) | Op::Filter(_) => {
            stream.inputs = stream.inputs.into_iter().map(|i| apply(i, bounds)).collect();
            stream
        }
        _ => stream,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::tests::{filter, ranked, table};

    fn limits(sql_like: &[(&str, Operator, i64)]) -> (u64, Option<u64>, bool) {
        let plan = limit_ranks(filter(ranked(table()), sql_like));
        let filtered = matches!(plan.op, Op::Filter(_));
        let mut at = &plan;
        loop {
            if let Op::TopN(t) = &at.op {
                return (t.offset, t.limit, filtered);
            }
            at = &at.inputs[0];
        }
    }

    #[test]
    fn comparisons_with_the_rank_become_limits() {
        let rank = "row_number";
        assert_eq!(limits(&[(rank, Operator::LtEq, 3)]), (0, Some(3), false));
        assert_eq!(limits(&[(rank, Operator::Lt, 3)]), (0, Some(2), false));
        assert_eq!(limits(&[(rank, Operator::Eq, 1)]), (0, Some(1), false));
        let between = [(rank, Operator::GtEq, 2), (rank, Operator::LtEq, 4)];
        assert_eq!(limits(&between), (1, Some(3), false));
        assert_eq!(limits(&[(rank, Operator::Gt, 5)]), (5, None, false));
    }

    #[test]
    fn nothing_fits_an_empty_range() {
        let rank = "row_number";
        assert_eq!(limits(&[(rank, Operator::Lt, 1)]), (0, Some(0), false));
        let none = [(rank, Operator::Gt, 5), (rank, Operator::Lt, 3)];
        assert_eq!(limits(&none).1, Some(0));
    }

    #[test]
    fn other_conjuncts_stay() {
        assert_eq!(limits(&[("a", Operator::Gt, 7)]), (0, None, true));
        let both = [("a", Operator::Gt, 7), ("row_number", Operator::LtEq, 2)];
        assert_eq!(limits(&both), (0, Some(2), true));
    }
}
