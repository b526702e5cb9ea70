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
use millrace_graph::dispatch_operator;

use crate::passes::Pass;
use crate::stream::operators::OperatorRules;
use crate::stream::plan::Stream;

/// Old position → new position, for the columns that are left.
pub type Map = Vec<Option<usize>>;

/// An operator that is pruned: its inputs as they were, its output columns, and which of them are required.
pub struct Pruning<'a> {
    pub inputs: Vec<Stream>,
    pub schema: &'a SchemaRef,
    pub required: &'a BTreeSet<usize>,
}

/// The operator over pruned inputs, and where its columns are now.
pub type Pruned = (Stream, Map);

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
pub fn prune_exact(stream: Stream, required: &BTreeSet<usize>) -> Result<Pruned> {
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
pub fn prune_columns(stream: Stream, required: &BTreeSet<usize>) -> Result<Pruned> {
    let Stream { op, inputs, schema } = stream;
    dispatch_operator!(op, p => p.prune(Pruning { inputs, schema: &schema, required }))
}

/// The only input.
pub fn only(mut inputs: Vec<Stream>) -> Result<Stream> {
    match (inputs.pop(), inputs.is_empty()) {
        (Some(input), true) => Ok(input),
        _ => datafusion::common::internal_err!("an operator has not exactly one input"),
    }
}

/// The required columns that come from an input of this width.
pub fn below(required: &BTreeSet<usize>, width: usize) -> BTreeSet<usize> {
    required.iter().copied().filter(|&c| c < width).collect()
}

/// More required columns.
pub fn with(set: &BTreeSet<usize>, more: impl IntoIterator<Item = usize>) -> BTreeSet<usize> {
    set.iter().copied().chain(more).collect()
}

/// Where a column is now that must have been kept.
pub fn kept_at(map: &Map, column: usize) -> Result<usize> {
    match map.get(column).copied().flatten() {
        Some(new) => Ok(new),
        None => datafusion::common::internal_err!("column {column} has been pruned"),
    }
}

/// [`kept_at`] of several.
pub fn all_kept(map: &Map, columns: &[usize]) -> Result<Vec<usize>> {
    columns.iter().map(|&c| kept_at(map, c)).collect()
}

/// The required columns of a leaf, its new schema and the map.
pub fn select(schema: &SchemaRef, required: &BTreeSet<usize>) -> (Vec<usize>, SchemaRef, Map) {
    let kept: Vec<usize> = at_least_one(schema, required).into_iter().collect();
    let fields: Vec<FieldRef> = kept.iter().map(|&c| Arc::clone(&schema.fields()[c])).collect();
    let mut map = vec![None; schema.fields().len()];
    kept.iter().enumerate().for_each(|(new, &old)| map[old] = Some(new));
    (kept, Arc::new(Schema::new(fields)), map)
}

#[cfg(test)]
mod tests {
    use datafusion::logical_expr::Operator;

    use super::*;
    use crate::passes::tests::{filter, ranked, scanned, table};
    use crate::stream::plan::Op;

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
