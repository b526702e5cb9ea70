//! Small rewrites that make plans shorter: neighbouring projections become one, projections that
//! change nothing and unions of one input go, DISTINCT over unique rows goes, and a semi join whose
//! other side is unique on the keys is an inner join, which needs no barrier to answer. Projections
//! of constant rows are computed here.

use std::sync::Arc;

use arrow::record_batch::{RecordBatch, RecordBatchOptions};
use datafusion::common::Result;
use datafusion::physical_expr::ScalarFunctionExpr;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::expr;
use millrace_functions::expr::ExprRef;
use millrace_functions::ordered_entries::collect_entry;
use millrace_graph::{JoinKind, Project, Values};

use crate::passes::Plain;
use crate::passes::properties::Properties;
use crate::stream::plan::{Op, Stream};

/// See the module.
pub const SIMPLIFY: Plain =
    Plain { name: "simplify", run: |stream| simplify(stream).map_err(sql_error_from_datafusion) };

fn simplify(stream: Stream) -> Result<Stream> {
    let mut stream = stream.map_inputs(simplify)?;
    stream = semi_to_inner(drop_distinct(stream));
    loop {
        let before = (std::mem::discriminant(&stream.op), stream.inputs.len());
        let (next, merged) = merge_projections(stream)?;
        stream = fold_values(drop_identity(next));
        let after = (std::mem::discriminant(&stream.op), stream.inputs.len());
        if !merged && before == after {
            return Ok(stream);
        }
    }
}

/// Takes the place of a projection whose columns are the input's, in order and by the same names.
fn drop_identity(stream: Stream) -> Stream {
    let nothing = match (&stream.op, stream.inputs.as_slice()) {
        (Op::Project(Project { exprs }), [input]) => {
            let same = |(i, e): (usize, &ExprRef)| {
                expr::as_column(e) == Some(i)
                    && stream.schema.field(i).name() == input.schema.field(i).name()
            };
            exprs.len() == input.width() && exprs.iter().enumerate().all(same)
        }
        (Op::Union(_), [input]) => stream.schema == input.schema,
        _ => false,
    };
    if nothing { stream.into_input() } else { stream }
}

/// `Project(Project(x))` as one, unless that computes something twice.
fn merge_projections(stream: Stream) -> Result<(Stream, bool)> {
    let Stream { op, mut inputs, schema } = stream;
    let (outer, inner) = match (&op, inputs.as_slice()) {
        (
            Op::Project(Project { exprs }),
            [Stream { op: Op::Project(Project { exprs: inner }), .. }],
        ) => (exprs, inner),
        _ => return Ok((Stream { op, inputs, schema }, false)),
    };
    let mut uses = vec![0; inner.len()];
    for e in outer {
        count_uses(e, &mut uses);
    }
    let cheap = |e: &ExprRef| expr::as_column(e).is_some() || expr::as_literal(e).is_some();
    // What goes into an entry of a collecting aggregate may fail by itself, and is NULL there.
    let mut entered = vec![0; inner.len()];
    outer.iter().filter(|e| is_entry(e)).for_each(|e| count_uses(e, &mut entered));
    let kept = |i: usize| uses[i] > 1 || entered[i] > 0;
    if inner.iter().enumerate().any(|(i, e)| kept(i) && !cheap(e)) {
        return Ok((Stream { op, inputs, schema }, false));
    }
    let exprs = outer
        .iter()
        .map(|e| expr::replace_columns(e, |c| inner.get(c).map(Arc::clone)))
        .collect::<Result<Vec<_>>>()?;
    let below = inputs.pop().map(|i| i.inputs).unwrap_or_default();
    let exprs = match below.first() {
        None => exprs,
        Some(input) => {
            exprs.into_iter().map(|e| expr::without_rank_casts(e, &input.schema)).collect()
        }
    };
    Ok((Stream { op: Op::Project(Project { exprs }), inputs: below, schema }, true))
}

fn is_entry(e: &ExprRef) -> bool {
    e.downcast_ref::<ScalarFunctionExpr>().is_some_and(|f| f.name() == collect_entry().name())
}

fn count_uses(e: &ExprRef, uses: &mut [usize]) {
    match expr::as_column(e) {
        Some(c) => uses[c] += 1,
        None => e.children().into_iter().for_each(|child| count_uses(child, uses)),
    }
}

/// A row that meets at most one other: whether it meets any is an inner join.
fn semi_to_inner(mut stream: Stream) -> Stream {
    let (Op::Join(j), [left, right]) = (&mut stream.op, stream.inputs.as_slice()) else {
        return stream;
    };
    match j.kind {
        JoinKind::LeftSemi if Properties::of(right).is_unique(&j.right.keys) => {
            j.kind = JoinKind::Inner;
        }
        JoinKind::RightSemi if Properties::of(left).is_unique(&j.left.keys) => {
            let width = left.width();
            j.output.iter_mut().for_each(|c| *c += width);
            j.kind = JoinKind::Inner;
        }
        _ => {}
    }
    stream
}

/// A projection of constant rows is constant rows, unless an expression fails: that is NULL at run
/// time, and counted.
fn fold_values(stream: Stream) -> Stream {
    let (Op::Project(Project { exprs }), [Stream { op: Op::Values(Values { batch }), .. }]) =
        (&stream.op, stream.inputs.as_slice())
    else {
        return stream;
    };
    let rows = batch.num_rows();
    let evaluate = |e: &ExprRef| e.evaluate(batch).and_then(|v| v.into_array(rows));
    let Ok(columns) = exprs.iter().map(evaluate).collect::<Result<Vec<_>>>() else { return stream };
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    match RecordBatch::try_new_with_options(Arc::clone(&stream.schema), columns, &options) {
        Ok(batch) => Stream::values(batch),
        Err(_) => stream,
    }
}

/// DISTINCT over columns that contain a unique key is a projection.
fn drop_distinct(mut stream: Stream) -> Stream {
    let Op::Aggregate(a) = &stream.op else { return stream };
    if !a.calls.is_empty() || a.group.is_empty() {
        return stream;
    }
    match stream.inputs.pop() {
        Some(input) if Properties::of(&input).is_unique(&a.group) => input.select(&a.group),
        Some(input) => {
            stream.inputs.push(input);
            stream
        }
        None => stream,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::tests::{join, table};

    #[test]
    fn projections_merge_and_vanish() {
        let plan = simplify(table().select(&[2, 1, 0]).select(&[2, 1, 0])).unwrap();
        assert!(matches!(plan.op, Op::Scan(_)), "{plan:?}");
        let plan = simplify(table().select(&[2, 1, 0]).select(&[1])).unwrap();
        assert!(matches!(plan.inputs[0].op, Op::Scan(_)), "{plan:?}");
    }

    #[test]
    fn a_semi_join_with_unique_rows_is_an_inner_join() {
        let kind = |kind, key| {
            let Op::Join(j) = simplify(join(kind, key)).unwrap().op else { panic!("not a join") };
            j.kind
        };
        assert_eq!(kind(JoinKind::LeftSemi, (1, 0)), JoinKind::Inner);
        assert_eq!(kind(JoinKind::LeftSemi, (0, 1)), JoinKind::LeftSemi);
        assert_eq!(kind(JoinKind::LeftAnti, (1, 0)), JoinKind::LeftAnti);
    }

    #[test]
    fn distinct_over_a_key_is_a_projection() {
        let plan = simplify(table().aggregate(vec![0, 2], vec![])).unwrap();
        assert!(matches!(plan.op, Op::Project(_)), "{plan:?}");
        let plan = simplify(table().aggregate(vec![1, 2], vec![])).unwrap();
        assert!(matches!(plan.op, Op::Aggregate(_)), "{plan:?}");
    }
}
