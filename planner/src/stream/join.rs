//! Joins of all kinds, cross joins included.

use std::sync::Arc;

use arrow::datatypes::Schema;
use datafusion::common::{JoinType, NullEquality};
use datafusion::logical_expr::{self, Operator};
use datafusion::physical_expr::expressions::{BinaryExpr, IsNullExpr};
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::expr;
use millrace_functions::expr::ExprRef;
use millrace_graph::JoinKind;
use millrace_graph::pair_schema;

use crate::stream::compile::compile;
use crate::stream::convert::{Converter, Extended, Result, check_key, in_view};
use crate::stream::lookup::{Lookup, check_linear};
use crate::stream::plan::{Join, JoinSide, Stream};

impl Converter<'_> {
    pub(super) fn join(&self, join: &logical_expr::Join) -> Result<Stream> {
        let lookup = self.lookup(join)?;
        let left = self.convert(&join.left)?;
        let right = self.convert(&join.right)?;
        match lookup {
            Lookup::No => {}
            Lookup::Right => check_linear(&right)?,
            Lookup::Left => check_linear(&left)?,
        }
        let (left_schema, right_schema) = (join.left.schema(), join.right.schema());
        let widths = (left.width(), right.width());
        let (mut left, mut right) = (Extended::new(left), Extended::new(right));
        let mut keys = Vec::with_capacity(join.on.len());
        for (l, r) in &join.on {
            let l = left.add(compile(l, left_schema)?);
            let r = right.add(compile(r, right_schema)?);
            keys.push((l, r));
        }
        let (left, right) = (left.finish()?, right.finish()?);
        check_keys(&left, &right, &keys)?;
        let residual = residual(join, widths.0, &left.schema, &right.schema)?;
        let (residual, null_aware) = match join.null_aware {
            true => not_in(&left, &right, &mut keys, residual)?,
            false => (residual, false),
        };
        let null_equals_null = join.null_equality == NullEquality::NullEqualsNull;
        if lookup != Lookup::No && null_equals_null {
            return Err(in_view("a lookup by IS NOT DISTINCT FROM"));
        }
        let swapped = join.join_type == JoinType::RightMark || lookup == Lookup::Left;
        let kind = match join.join_type {
            JoinType::Right if swapped => JoinKind::LeftOuter,
            other => kind_of(other),
        };
        let (left, right, keys, residual, widths) = if swapped {
            let keys = keys.into_iter().map(|(l, r)| (r, l)).collect();
            let residual = residual.map(|e| swap(&e, &left, &right)).transpose()?;
            (right, left, keys, residual, (widths.1, widths.0))
        } else {
            (left, right, keys, residual, widths)
        };
        let mut output = output_of(kind, widths, left.width());
        if lookup == Lookup::Left {
            output.rotate_left(widths.0);
        }
        let (left_keys, right_keys) = keys.into_iter().unzip();
        let side = |keys| JoinSide { keys, vnode: vec![], state: () };
        let (l, r) = (side(left_keys), side(right_keys));
        let j = Join { kind, left: l, right: r, residual, null_aware, null_equals_null, output };
        let stream = match lookup {
            Lookup::No => left.join(right, j),
            _ => left.lookup(right, j),
        };
        // Names as the logical plan has them (the mark column is named by its subquery).
        let columns = join
            .schema
            .fields()
            .iter()
            .enumerate()
            .map(|(i, f)| (expr::column(&stream.schema, i), f.name().clone()))
            .collect();
        stream.project(columns).map_err(sql_error_from_datafusion)
    }
}

/// The filter of a join over its sides, which may have grown key columns.
fn residual(
    join: &logical_expr::Join,
    left_width: usize,
    left: &Schema,
    right: &Schema,
) -> Result<Option<ExprRef>> {
    let Some(filter) = &join.filter else { return Ok(None) };
    let both = join.left.schema().join(join.right.schema()).map_err(sql_error_from_datafusion)?;
    let compiled = compile(filter, &both)?;
    over_pair(&compiled, left_width, left, right).map(Some)
}

/// The residual of a NOT IN, and whether the join has to look for NULLs of its key besides.
fn not_in(
    left: &Stream,
    right: &Stream,
    keys: &mut Vec<(usize, usize)>,
    residual: Option<ExprRef>,
) -> Result<(Option<ExprRef>, bool)> {
    match (keys.len(), residual) {
        (1, None) => Ok((None, true)),
        // Correlated. DataFusion puts the pair of IN before those of the correlation.
        (2.., None) => {
            let (l, r) = keys.remove(0);
            let pair = pair_schema(&left.schema, &right.schema);
            Ok((Some(may_equal(&pair, l, left.width() + r)), false))
        }
        _ => Err(in_view("this correlated NOT IN over columns that may be NULL")
            .with_hint("Use NOT EXISTS, or declare the columns NOT NULL.")),
    }
}

/// `l = r OR l IS NULL OR r IS NULL`: what must never hold of a pair for `l NOT IN (… r …)`. Under
/// an anti join this is exactly NOT IN's logic, per group of the other keys.
fn may_equal(pair: &Schema, l: usize, r: usize) -> ExprRef {
    let binary = |a: ExprRef, op, b: ExprRef| -> ExprRef { Arc::new(BinaryExpr::new(a, op, b)) };
    let column = |c| expr::column(pair, c);
    let null = |c| -> ExprRef { Arc::new(IsNullExpr::new(column(c))) };
    let either_null = binary(null(l), Operator::Or, null(r));
    binary(binary(column(l), Operator::Eq, column(r)), Operator::Or, either_null)
}

fn kind_of(t: JoinType) -> JoinKind {
    match t {
        JoinType::Inner => JoinKind::Inner,
        JoinType::Left => JoinKind::LeftOuter,
        JoinType::Right => JoinKind::RightOuter,
        JoinType::Full => JoinKind::FullOuter,
        JoinType::LeftSemi => JoinKind::LeftSemi,
        JoinType::RightSemi => JoinKind::RightSemi,
        JoinType::LeftAnti => JoinKind::LeftAnti,
        JoinType::RightAnti => JoinKind::RightAnti,
        JoinType::LeftMark | JoinType::RightMark => JoinKind::LeftMark,
    }
}

/// The original columns in the full output of sides that may have grown key columns.
fn output_of(kind: JoinKind, (left, right): (usize, usize), left_full: usize) -> Vec<usize> {
    match kind {
        JoinKind::LeftSemi | JoinKind::LeftAnti => (0..left).collect(),
        JoinKind::RightSemi | JoinKind::RightAnti => (0..right).collect(),
        JoinKind::LeftMark => (0..left).chain([left_full]).collect(),
        _ => (0..left).chain(left_full..left_full + right).collect(),
    }
}

/// An expression over the original columns of both sides, over those of the grown sides.
fn over_pair(e: &ExprRef, left_width: usize, left: &Schema, right: &Schema) -> Result<ExprRef> {
    let pair = pair_schema(left, right);
    let grown = left.fields().len() - left_width;
    let place = |c: usize| if c < left_width { c } else { c + grown };
    expr::replace_columns(e, |c| Some(expr::column(&pair, place(c))))
        .map_err(sql_error_from_datafusion)
}

/// A residual over (left, right) as one over (right, left).
fn swap(e: &ExprRef, left: &Stream, right: &Stream) -> Result<ExprRef> {
    let pair = pair_schema(&right.schema, &left.schema);
    let (l, r) = (left.width(), right.width());
    let place = |c: usize| if c < l { c + r } else { c - l };
    expr::replace_columns(e, |c| Some(expr::column(&pair, place(c))))
        .map_err(sql_error_from_datafusion)
}

fn check_keys(left: &Stream, right: &Stream, keys: &[(usize, usize)]) -> Result<()> {
    for &(l, r) in keys {
        check_key(left, &[l], "joining on")?;
        check_key(right, &[r], "joining on")?;
        let (a, b) = (Arc::clone(&left.schema.fields()[l]), Arc::clone(&right.schema.fields()[r]));
        if a.data_type() != b.data_type() {
            let (a, b) = (a.data_type(), b.data_type());
            return Err(in_view(format!("joining a column of type {a} with one of type {b}"))
                .with_hint("Cast one of them."));
        }
    }
    Ok(())
}
