//! Column pruning: scans list exactly the columns that something above reads, states keep no others.
//!
//! Top-down over what is required of each output, bottom-up over where the kept columns lie. Inputs
//! of operators with state are cut to exactly the required columns; others may pass more. A node
//! that has columns keeps at least one: a batch without columns has no row count of its own.

use std::collections::BTreeSet;
use std::sync::Arc;

use arrow::datatypes::{DataType, FieldRef, Schema, SchemaRef};
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::expr;
use millrace_graph::pair_schema;
use millrace_graph::{Expand, JoinKind};

use crate::passes::Pass;
use crate::stream::plan::{Aggregate, Identity, Join, Op, Stream, TopN, Window};

/// Old position → new position, for the columns that are left.
type Map = Vec<Option<usize>>;

/// See [`prune`].
pub struct Prune;

impl Pass for Prune {
    fn name(&self) -> &'static str {
        "prune"
    }

    fn run(&self, stream: Stream) -> std::result::Result<Stream, SqlError> {
        prune(stream).map_err(sql_error_from_datafusion)
    }
}

/// Prunes a whole plan; its output stays as it is.
pub fn prune(stream: Stream) -> Result<Stream> {
    let all = (0..stream.width()).collect();
    Ok(prune_exact(stream, &all)?.0)
}

/// Keeps exactly the required columns, in their old order.
fn prune_exact(stream: Stream, required: &BTreeSet<usize>) -> Result<(Stream, Map)> {
    let old_width = stream.width();
    let required = at_least_one(&stream.schema, required);
    let (stream, map) = prune_columns(stream, &required)?;
    let kept: Vec<usize> = required.iter().filter_map(|&c| map[c]).collect();
    let identity = kept.len() == stream.width() && kept.iter().enumerate().all(|(i, &c)| i == c);
    let stream = if identity { stream } else { stream.select(&kept) };
    let mut exact = vec![None; old_width];
    for (new, &old) in required.iter().enumerate() {
        exact[old] = Some(new);
    }
    Ok((stream, exact))
}

/// The cheapest column stands in when none is required.
fn at_least_one(schema: &Schema, required: &BTreeSet<usize>) -> BTreeSet<usize> {
    if !required.is_empty() || schema.fields().is_empty() {
        return required.clone();
    }
    let cost = |t: &DataType| t.primitive_width().unwrap_or(64);
    let cheapest = (0..schema.fields().len()).min_by_key(|&c| cost(schema.field(c).data_type()));
    cheapest.into_iter().collect()
}

/// Keeps at least the required columns.
#[deny(clippy::wildcard_enum_match_arm)]
fn prune_columns(stream: Stream, required: &BTreeSet<usize>) -> Result<(Stream, Map)> {
    let Stream { op, inputs, schema } = stream;
    match op {
        Op::Scan { relation, columns } => {
            let (kept, schema, map) = select(&schema, required);
            let columns = kept.iter().map(|&c| columns[c]).collect();
            Ok((Stream::scan(relation, schema, columns), map))
        }
        Op::Values { batch } => {
            let (kept, _, map) = select(&schema, required);
            Ok((Stream::values(batch.project(&kept)?), map))
        }
        Op::Filter { predicate } => prune_filters(predicate, only(inputs)?, required),
        Op::Project { exprs } => prune_project(exprs, only(inputs)?, &schema, required),
        Op::Union => prune_union(inputs, &schema, required),
        Op::Hop { time_column, size_us, slide_us, offset_us } => {
            let input = only(inputs)?;
            let width = input.width();
            let below = required.iter().copied().filter(|&c| c < width).collect();
            let (input, mut map) = prune_columns(input, &with(&below, [time_column]))?;
            let time = kept_at(&map, time_column)?;
            map.extend([Some(input.width()), Some(input.width() + 1)]);
            Ok((input.hop(time, size_us, slide_us, offset_us), map))
        }
        Op::Repeat { times_column } => {
            let (input, map) = prune_columns(only(inputs)?, &with(required, [times_column]))?;
            let times = kept_at(&map, times_column)?;
            Ok((input.repeat(times), map))
        }
        Op::Unnest { lists, keep_empty } => {
            // How many elements there are decides how many rows.
            let needed = with(required, lists.iter().copied());
            let (input, map) = prune_columns(only(inputs)?, &needed)?;
            let lists = lists.iter().map(|&c| kept_at(&map, c)).collect::<Result<Vec<_>>>()?;
            Ok((input.unnest(lists, keep_empty), map))
        }
        Op::Expand(e) => prune_expand(e, only(inputs)?, required),
        Op::Aggregate(a) => prune_aggregate(a, only(inputs)?, required),
        Op::TopN(t) => prune_top_n(t, only(inputs)?, required),
        Op::Window(w) => prune_window(w, only(inputs)?, required),
        Op::Join(j) => prune_join(j, Stream::join, inputs, required),
        Op::Lookup(j) => prune_join(j, Stream::lookup, inputs, required),
        Op::WindowClose(h) => prune_buffer(h.column, Stream::window_close, inputs, required),
        Op::Stamp { add_us } => {
            let input = only(inputs)?;
            let width = input.width();
            let below = required.iter().copied().filter(|&c| c < width).collect();
            let (input, mut map) = prune_columns(input, &below)?;
            map.push(Some(input.width()));
            Ok((input.stamp(add_us), map))
        }
        Op::TemporalUpperBound(h) => prune_buffer(h.column, Stream::expire, inputs, required),
        Op::TemporalLowerBound(h) => prune_buffer(h.column, Stream::appear, inputs, required),
        Op::Exchange { hash } => {
            let needed = with(required, hash.iter().copied());
            let (input, map) = prune_exact(only(inputs)?, &needed)?;
            let hash = all_kept(&map, &hash)?;
            Ok((input.exchange(hash), map))
        }
    }
}

/// Of all filters in a row, without recursion: a condition of a thousand terms is a thousand of them.
fn prune_filters(
    predicate: expr::ExprRef,
    mut input: Stream,
    required: &BTreeSet<usize>,
) -> Result<(Stream, Map)> {
    let mut needed = with(required, expr::columns_of(&predicate));
    let mut predicates = vec![predicate];
    while let Op::Filter { predicate } = &input.op {
        needed.extend(expr::columns_of(predicate));
        predicates.push(Arc::clone(predicate));
        input = only(input.inputs)?;
    }
    let (mut input, map) = prune_columns(input, &needed)?;
    for predicate in predicates.iter().rev() {
        let predicate = expr::remap(predicate, &map, &input.schema)?;
        input = input.filter(predicate);
    }
    Ok((input, map))
}

/// Of an operator that keeps rows back by the times of a column.
fn prune_buffer(
    column: usize,
    buffer: fn(Stream, usize) -> Stream,
    inputs: Vec<Stream>,
    required: &BTreeSet<usize>,
) -> Result<(Stream, Map)> {
    let (input, map) = prune_exact(only(inputs)?, &with(required, [column]))?;
    let column = kept_at(&map, column)?;
    Ok((buffer(input, column), map))
}

fn only(mut inputs: Vec<Stream>) -> Result<Stream> {
    match (inputs.pop(), inputs.is_empty()) {
        (Some(input), true) => Ok(input),
        _ => datafusion::common::internal_err!("an operator has not exactly one input"),
    }
}

fn with(set: &BTreeSet<usize>, more: impl IntoIterator<Item = usize>) -> BTreeSet<usize> {
    set.iter().copied().chain(more).collect()
}

fn kept_at(map: &Map, column: usize) -> Result<usize> {
    match map.get(column).copied().flatten() {
        Some(new) => Ok(new),
        None => datafusion::common::internal_err!("column {column} has been pruned"),
    }
}

fn all_kept(map: &Map, columns: &[usize]) -> Result<Vec<usize>> {
    columns.iter().map(|&c| kept_at(map, c)).collect()
}

/// The required columns of a leaf, its new schema and the map.
fn select(schema: &SchemaRef, required: &BTreeSet<usize>) -> (Vec<usize>, SchemaRef, Map) {
    let kept: Vec<usize> = at_least_one(schema, required).into_iter().collect();
    let fields: Vec<FieldRef> = kept.iter().map(|&c| Arc::clone(&schema.fields()[c])).collect();
    let mut map = vec![None; schema.fields().len()];
    kept.iter().enumerate().for_each(|(new, &old)| map[old] = Some(new));
    (kept, Arc::new(Schema::new(fields)), map)
}

fn prune_project(
    exprs: Vec<millrace_functions::expr::ExprRef>,
    input: Stream,
    schema: &SchemaRef,
    required: &BTreeSet<usize>,
) -> Result<(Stream, Map)> {
    let (kept, schema, map) = select(schema, required);
    let needed = kept.iter().flat_map(|&k| expr::columns_of(&exprs[k])).collect();
    let (input, below) = prune_columns(input, &needed)?;
    let exprs = kept
        .iter()
        .map(|&k| expr::remap(&exprs[k], &below, &input.schema))
        .collect::<Result<Vec<_>>>()?;
    Ok((Stream { op: Op::Project { exprs }, inputs: vec![input], schema }, map))
}

fn prune_union(
    inputs: Vec<Stream>,
    schema: &SchemaRef,
    required: &BTreeSet<usize>,
) -> Result<(Stream, Map)> {
    let (kept, schema, map) = select(schema, required);
    let kept = kept.into_iter().collect();
    let inputs = inputs
        .into_iter()
        .map(|input| Ok(prune_exact(input, &kept)?.0))
        .collect::<Result<Vec<_>>>()?;
    Ok((Stream::union(inputs, schema), map))
}

fn prune_expand(mut e: Expand, input: Stream, required: &BTreeSet<usize>) -> Result<(Stream, Map)> {
    let width = input.width();
    let below = required.iter().copied().filter(|&c| c < width).collect();
    let (input, mut map) = prune_columns(input, &with(&below, e.columns.iter().copied()))?;
    e.columns = all_kept(&map, &e.columns)?;
    let grown = input.width();
    map.extend((0..=e.columns.len()).map(|i| Some(grown + i)));
    Ok((input.expand(e), map))
}

fn prune_aggregate(
    mut a: Aggregate,
    input: Stream,
    required: &BTreeSet<usize>,
) -> Result<(Stream, Map)> {
    let groups = a.group.len();
    // An aggregate without groups must not lose its last call: it would have no columns.
    let keep = |i: usize| required.contains(&(groups + i)) || (groups == 0 && i == 0);
    let mut map: Map = (0..groups).map(Some).collect();
    let mut calls = Vec::new();
    for (i, call) in a.calls.into_iter().enumerate() {
        map.push(keep(i).then_some(groups + calls.len()));
        if keep(i) {
            calls.push(call);
        }
    }
    a.calls = calls;
    let (input, below) = prune_exact(input, &a.columns_read().into_iter().collect())?;
    let mut calls = a.calls;
    for call in &mut calls {
        call.arg = call.arg.map(|c| kept_at(&below, c)).transpose()?;
        call.filter = call.filter.map(|c| kept_at(&below, c)).transpose()?;
    }
    let group = all_kept(&below, &a.group)?;
    let vnode = all_kept(&below, &a.vnode)?;
    let mut pruned = input.aggregate(group, calls);
    if let Op::Aggregate(a) = &mut pruned.op {
        a.vnode = vnode;
    }
    Ok((pruned, map))
}

fn prune_top_n(mut t: TopN, input: Stream, required: &BTreeSet<usize>) -> Result<(Stream, Map)> {
    let width = input.width();
    let rank_read = required.contains(&width);
    let below = required.iter().copied().filter(|&c| c < width).collect();
    let needed = with(&below, t.columns_read().into_iter().chain(t.state.0.iter().copied()));
    let (input, mut map) = prune_exact(input, &needed)?;
    t.emit_rank = t.emit_rank && rank_read;
    t.group = all_kept(&map, &t.group)?;
    t.vnode = all_kept(&map, &t.vnode)?;
    t.state = Identity(all_kept(&map, &t.state.0)?);
    for o in &mut t.order {
        o.0 = kept_at(&map, o.0)?;
    }
    map.push(t.emit_rank.then(|| input.width()));
    Ok((input.top_n(t), map))
}

/// Calls that nobody reads are not computed; without any the rows are the input's.
fn prune_window(mut w: Window, input: Stream, required: &BTreeSet<usize>) -> Result<(Stream, Map)> {
    let width = input.width();
    let below: BTreeSet<usize> = required.iter().copied().filter(|&c| c < width).collect();
    let read: Vec<bool> = (0..w.calls.len()).map(|i| required.contains(&(width + i))).collect();
    let mut reads = read.iter();
    w.calls.retain(|_| reads.next() == Some(&true));
    if w.calls.is_empty() {
        let (input, mut map) = prune_columns(input, &below)?;
        map.extend(read.iter().map(|_| None));
        return Ok((input, map));
    }
    let needed = with(&below, w.columns_read().into_iter().chain(w.state.0.iter().copied()));
    let (input, mut map) = prune_exact(input, &needed)?;
    w.group = all_kept(&map, &w.group)?;
    w.vnode = all_kept(&map, &w.vnode)?;
    w.state = Identity(all_kept(&map, &w.state.0)?);
    for o in &mut w.order {
        o.0 = kept_at(&map, o.0)?;
    }
    for e in w.calls.iter_mut().flat_map(|c| c.args.iter_mut().chain(&mut c.filter)) {
        *e = expr::remap(e, &map, &input.schema)?;
    }
    let mut next = input.width();
    for kept in read {
        map.push(kept.then_some(next));
        next += usize::from(kept);
    }
    Ok((input.window(w), map))
}

fn prune_join(
    mut j: Join,
    rebuild: fn(Stream, Stream, Join) -> Stream,
    inputs: Vec<Stream>,
    required: &BTreeSet<usize>,
) -> Result<(Stream, Map)> {
    let Ok([left, right]) = <[Stream; 2]>::try_from(inputs) else {
        return datafusion::common::internal_err!("a join has not exactly two inputs");
    };
    let (width, right_width) = (left.width(), right.width());
    // What of the join's output is kept, and which columns of the sides that and the join itself read.
    let old_schema = j.kind.output_fields(&left.schema, &right.schema);
    let fields: Vec<FieldRef> = j.output.iter().map(|&c| Arc::clone(&old_schema[c])).collect();
    let (kept, _, map) = select(&Arc::new(Schema::new(fields)), required);
    let output: Vec<usize> = kept.iter().map(|&k| j.output[k]).collect();

    let right_only = matches!(j.kind, JoinKind::RightSemi | JoinKind::RightAnti);
    let mark = |c: usize| j.kind == JoinKind::LeftMark && c == width;
    let mut needed_left: BTreeSet<usize> = j.left.keys.iter().copied().collect();
    let mut needed_right: BTreeSet<usize> = j.right.keys.iter().copied().collect();
    let read =
        output.iter().filter(|c| !mark(**c)).map(|&c| c + if right_only { width } else { 0 });
    for c in read.chain(j.residual.iter().flat_map(expr::columns_of)) {
        if c < width {
            needed_left.insert(c);
        } else {
            needed_right.insert(c - width);
        }
    }
    let (left, left_map) = prune_exact(left, &needed_left)?;
    let (right, right_map) = prune_exact(right, &needed_right)?;

    let new_width = left.width();
    let pair_map: Map = (0..width + right_width)
        .map(|c| match c.checked_sub(width) {
            None => left_map[c],
            Some(r) => right_map[r].map(|r| r + new_width),
        })
        .collect();
    for (side, map) in [(&mut j.left, &left_map), (&mut j.right, &right_map)] {
        side.keys = all_kept(map, &side.keys)?;
        side.vnode = all_kept(map, &side.vnode)?;
    }
    if let Some(residual) = &j.residual {
        let pair = pair_schema(&left.schema, &right.schema);
        j.residual = Some(expr::remap(residual, &pair_map, &pair)?);
    }
    j.output = output
        .into_iter()
        .map(|c| match c {
            c if mark(c) => Ok(new_width),
            c if right_only => kept_at(&right_map, c),
            c => kept_at(&pair_map, c),
        })
        .collect::<Result<_>>()?;
    Ok((rebuild(left, right, j), map))
}

#[cfg(test)]
mod tests {
    use datafusion::logical_expr::Operator;

    use super::*;
    use crate::passes::tests::{filter, ranked, scanned, table};

    #[test]
    fn scans_read_what_is_needed_and_no_more() {
        let plan = prune(filter(table(), &[("b", Operator::Gt, 1)]).select(&[0])).unwrap();
        assert_eq!(plan.width(), 1);
        assert_eq!(scanned(&plan), vec![0, 1]);
    }

    #[test]
    fn a_plan_that_needs_no_column_reads_the_cheapest() {
        let count = table().aggregate(vec![], vec![crate::passes::tests::count()]);
        assert_eq!(scanned(&prune(count).unwrap()), vec![0]);
    }

    #[test]
    fn a_rank_that_nobody_reads_is_not_put_out() {
        let plan = prune(ranked(table()).select(&[0, 1])).unwrap();
        let Op::TopN(t) = &plan.inputs[0].op else { panic!("{plan:?}") };
        assert!(!t.emit_rank);
    }
}
