//! Results of window functions over part of a group.
//!
//! Ranking functions follow from places. All others are computed by the very code that batch runs, over
//! the rows asked for and as many around them as their results depend on.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, new_empty_array, new_null_array};
use arrow::compute::{SortOptions, cast, concat};
use arrow::datatypes::{DataType, SchemaRef};
use datafusion::error::DataFusionError;
use datafusion::physical_expr::window::WindowExpr;
use millrace_functions::asof::Place;
use millrace_functions::window_call::RankFunction;
use millrace_functions::window_call::WindowCall;
use millrace_functions::window_call::{Reach, compile};

use super::rows::Rows;
use super::values::Span;
use super::{asof_lookup, sessions};
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::operators::expr::sql_error;
use crate::operators::ordered::Ranked;
use crate::state::arena::{RowArena, RowRef};

/// One function.
struct Call {
    numbering: Option<RankFunction>,
    /// Absent with `numbering`.
    expr: Option<Arc<dyn WindowExpr>>,
    reach: Reach,
    /// With a reach by value.
    span: Option<Span>,
    output_type: DataType,
}

/// All functions of an operator.
pub struct Calls {
    calls: Vec<Call>,
    errors: Arc<ErrorSink>,
}

/// Results for rows that lie side by side: parallel columns and references, copies one by one.
#[derive(Default)]
pub struct Results {
    pub rows: Vec<RowRef>,
    pub columns: Vec<ArrayRef>,
}

impl Calls {
    pub fn new(
        calls: &[WindowCall],
        order: &[(usize, SortOptions)],
        input: &SchemaRef,
        errors: Arc<ErrorSink>,
    ) -> Result<Calls, ExecError> {
        let one = |call: &WindowCall| -> Result<Call, ExecError> {
            let numbering = call.numbering;
            let expr = match numbering {
                Some(_) => None,
                None => Some(compile(call, order, input)?),
            };
            let (output_type, reach) = (call.output_type.clone(), Reach::of(call));
            let span = Span::of(&reach, order, input)?;
            Ok(Call { numbering, expr, reach, span, output_type })
        };
        Ok(Calls { calls: calls.iter().map(one).collect::<Result<_, _>>()?, errors })
    }

    pub fn reaches(&self) -> Vec<Reach> {
        self.calls.iter().map(|c| c.reach).collect()
    }

    pub fn spans(&self) -> Vec<Span> {
        self.calls.iter().filter_map(|c| c.span).collect()
    }

    /// The results of the entries in a range of indices.
    pub fn evaluate(
        &self,
        rows: &Rows,
        range: Range<usize>,
        arena: &RowArena,
    ) -> Result<Results, ExecError> {
        let refs = expand(rows.range(range.clone()));
        let mut columns = Vec::with_capacity(self.calls.len());
        let mut context: Option<Context> = None;
        for call in &self.calls {
            columns.push(match (call.numbering, &call.expr) {
                (Some(rank), _) => number(rank, rows, range.clone()),
                (None, Some(expr)) => {
                    let context = match &context {
                        Some(c) => c,
                        None => context.insert(self.context(rows, range.clone(), arena)?),
                    };
                    self.compute(call, expr, context, &refs)?
                }
                (None, None) => new_null_array(&call.output_type, refs.len()),
            });
        }
        Ok(Results { rows: refs, columns })
    }

    /// The rows that the results of a range depend on.
    fn context(
        &self,
        rows: &Rows,
        range: Range<usize>,
        arena: &RowArena,
    ) -> Result<Context, ExecError> {
        let carries = |c: &Call| matches!(c.reach, Reach::Carry { .. });
        if let (Some(Reach::Carry { place }), true) =
            (self.calls.first().map(|c| c.reach), self.calls.iter().all(carries))
        {
            return carried(rows, range, place, arena);
        }
        let (mut start, mut end) = (range.start, range.end);
        for call in self.calls.iter().filter(|c| c.expr.is_some()) {
            // What a change reaches ahead, a result looks back to.
            let (s, e) = match call.reach {
                Reach::Rows { before, after } => {
                    (back(rows, range.start, after), ahead(rows, range.end, before))
                }
                Reach::Peers { before, after } => {
                    (groups_back(rows, range.start, after), groups_ahead(rows, range.end, before))
                }
                Reach::Shift { .. } => (range.start, range.end),
                Reach::Carry { place } => {
                    (asof_lookup::right_before(rows, range.start, place), range.end)
                }
                Reach::Session { gap } => sessions::around(rows, range.clone(), gap),
                Reach::Values { .. } => {
                    let span = call.span.as_ref();
                    span.map_or((0, rows.len()), |span| span.around(rows, range.clone()))
                }
            };
            start = start.min(s);
            end = end.max(e);
        }
        // Peers are seen whole.
        if self.calls.iter().any(|c| matches!(c.reach, Reach::Peers { .. })) {
            start = groups_back(rows, start, Some(0));
            end = groups_ahead(rows, end, Some(0));
        }
        let skip: i64 = rows.range(start..range.start).map(|r| r.weight).sum();
        let batch = arena.batch(&expand(rows.range(start..end)))?;
        Ok(Context { batch, skip: skip as usize })
    }

    fn compute(
        &self,
        call: &Call,
        expr: &Arc<dyn WindowExpr>,
        context: &Context,
        refs: &[RowRef],
    ) -> Result<ArrayRef, ExecError> {
        if refs.is_empty() {
            return Ok(new_empty_array(&call.output_type));
        }
        let values = match expr.evaluate(&context.batch) {
            Ok(values) => values.slice(context.skip, refs.len()),
            Err(error) => self.one_by_one(call, expr, context, refs.len(), error)?,
        };
        if *values.data_type() == call.output_type {
            Ok(values)
        } else {
            Ok(cast(&values, &call.output_type)?)
        }
    }

    /// A function that fails over some rows' frames is NULL for these rows, as any failing expression
    /// is. Where frames have no bounded number of rows it is NULL for all rows it was asked for.
    fn one_by_one(
        &self,
        call: &Call,
        expr: &Arc<dyn WindowExpr>,
        context: &Context,
        rows: usize,
        error: DataFusionError,
    ) -> Result<ArrayRef, ExecError> {
        let (Some(before), Some(after)) = row_reach(call.reach) else {
            self.errors.report("Window", &sql_error(&error), rows as u64);
            return Ok(new_null_array(&call.output_type, rows));
        };
        let mut values = Vec::with_capacity(rows);
        for row in context.skip..context.skip + rows {
            let start = row.saturating_sub(after);
            let end = row.saturating_add(before + 1).min(context.batch.num_rows());
            values.push(match expr.evaluate(&context.batch.slice(start, end - start)) {
                Ok(one) => cast(&one.slice(row - start, 1), &call.output_type)?,
                Err(error) => {
                    self.errors.report("Window", &sql_error(&error), 1);
                    new_null_array(&call.output_type, 1)
                }
            });
        }
        Ok(concat(&values.iter().map(AsRef::as_ref).collect::<Vec<_>>())?)
    }
}

/// Of the rows before a range only the last right one matters.
fn carried(
    rows: &Rows,
    range: Range<usize>,
    place: Place,
    arena: &RowArena,
) -> Result<Context, ExecError> {
    let right = asof_lookup::right_before(rows, range.start, place);
    let right = (right < range.start).then(|| rows.get(right)).flatten();
    let mut refs: Vec<RowRef> = right.iter().map(|r| r.at).collect();
    let skip = refs.len();
    refs.extend(expand(rows.range(range)));
    Ok(Context { batch: arena.batch(&refs)?, skip })
}

struct Context {
    batch: RecordBatch,
    /// Rows of it before the first one asked for.
    skip: usize,
}

fn row_reach(reach: Reach) -> (Option<usize>, Option<usize>) {
    let count = |n: Option<u64>| n.and_then(|n| usize::try_from(n).ok());
    match reach {
        Reach::Rows { before, after } => (count(before), count(after)),
        _ => (None, None),
    }
}

/// Each copy by itself.
fn expand<'a>(rows: impl Iterator<Item = &'a Ranked>) -> Vec<RowRef> {
    let mut refs = Vec::new();
    for row in rows {
        refs.extend(std::iter::repeat_n(row.at, row.weight.max(0) as usize));
    }
    refs
}

/// Entries until there are so many rows.
fn steps<'a>(rows: impl Iterator<Item = &'a Ranked>, count: u64) -> usize {
    let (mut entries, mut left) = (0, count as i64);
    for row in rows {
        if left <= 0 {
            break;
        }
        left -= row.weight;
        entries += 1;
    }
    entries
}

fn back(rows: &Rows, at: usize, count: Option<u64>) -> usize {
    count.map_or(0, |n| at - steps(rows.before(at), n))
}

fn ahead(rows: &Rows, at: usize, count: Option<u64>) -> usize {
    count.map_or(rows.len(), |n| at + steps(rows.after(at), n))
}

/// The start of the group that is so many groups before the one that the entry `at` is in.
fn groups_back(rows: &Rows, at: usize, count: Option<u64>) -> usize {
    let Some(count) = count else { return 0 };
    rows.get(at).map_or(at, |first| at - entries_of_groups(first, rows.before(at), count))
}

/// The end of the group that is so many groups after the one that the entry before `at` is in.
fn groups_ahead(rows: &Rows, at: usize, count: Option<u64>) -> usize {
    let Some(count) = count else { return rows.len() };
    let last = at.checked_sub(1).and_then(|i| rows.get(i));
    last.map_or(at, |last| at + entries_of_groups(last, rows.after(at), count))
}

/// How many of these entries are in the group of `from` or in one of the `count` groups that follow it.
fn entries_of_groups<'a>(
    from: &'a Ranked,
    rows: impl Iterator<Item = &'a Ranked>,
    count: u64,
) -> usize {
    let (mut entries, mut left) = (0, count);
    let mut order = from.order_bytes();
    for row in rows {
        if row.order_bytes() != order {
            if left == 0 {
                break;
            }
            left -= 1;
            order = row.order_bytes();
        }
        entries += 1;
    }
    entries
}

/// Ranks of the entries in a range, copies one by one.
fn number(rank: RankFunction, rows: &Rows, range: Range<usize>) -> ArrayRef {
    // From the start of the first entry's peers, which a rank is counted from.
    let start = groups_back(rows, range.start, Some(0));
    let mut before: i64 = rows.range(0..start).map(|r| r.weight).sum();
    let mut groups = match rank {
        RankFunction::DenseRank => count_groups(rows, start),
        _ => 0,
    };
    let mut values = Vec::with_capacity(range.len());
    let (mut current, mut last): (i64, Option<&[u8]>) = (0, None);
    for (i, row) in rows.range(start..range.end).enumerate() {
        if last != Some(row.order_bytes()) {
            last = Some(row.order_bytes());
            groups += 1;
            current = before + 1;
        }
        if start + i >= range.start {
            for copy in 0..row.weight.max(0) {
                values.push(match rank {
                    RankFunction::RowNumber => before + copy + 1,
                    RankFunction::Rank => current,
                    RankFunction::DenseRank => groups,
                });
            }
        }
        before += row.weight;
    }
    Arc::new(Int64Array::from(values))
}

fn count_groups(rows: &Rows, end: usize) -> i64 {
    let (mut groups, mut last): (i64, Option<&[u8]>) = (0, None);
    for row in rows.range(0..end) {
        if last != Some(row.order_bytes()) {
            last = Some(row.order_bytes());
            groups += 1;
        }
    }
    groups
}
