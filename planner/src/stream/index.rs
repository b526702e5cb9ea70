//! The job of an index: another relation's rows, ordered by other columns.
//!
//! An index is a view without a query. Its rows lie under their index columns first, so that equal
//! and range predicates on leading columns are key ranges; what follows in the key tells rows apart.
//! All rows that agree on the first index column share a vnode: a predicate that fixes it reads one
//! range, any other one range a vnode.

use std::sync::Arc;

use arrow::datatypes::Schema;
use millrace_common::SqlError;
use millrace_graph::{JobGraph, RelationLayout};
use millrace_rpc::catalog::{Relation, RowStorage};

use super::Sink;
use super::fragment;
use super::plan::Stream;
use crate::passes::exchange;

/// Plans the job that keeps `columns` (positions in `relation`) ordered by the first `ordered` of
/// them. `unique`: positions in `columns` that make a row of the relation unique; empty: unknown.
pub fn plan_index(
    relation: &Arc<Relation>,
    columns: &[usize],
    ordered: usize,
    unique: &[usize],
) -> Result<JobGraph, SqlError> {
    let internal = |e: arrow::error::ArrowError| SqlError::internal(e.to_string());
    if ordered == 0 || ordered > columns.len() {
        return Err(SqlError::internal("an index over no column"));
    }
    let schema: Schema = relation.arrow_schema()?.project(columns).map_err(internal)?;
    let schema = Arc::new(schema);
    let stream = Stream::scan(Arc::clone(relation), Arc::clone(&schema), columns.to_vec());
    let distribution = vec![0];
    let placed = exchange::place(stream);
    let append_only = placed.1.append_only;
    let (stream, _) = match placed.1.distributed_within(&distribution) {
        Some(_) => placed,
        None => exchange::exchange(placed, distribution.clone()),
    };
    let mut key: Vec<usize> = Vec::new();
    let storage = if unique.is_empty() { RowStorage::Multiset } else { RowStorage::Keyed };
    if storage == RowStorage::Keyed {
        key.extend(0..ordered);
        key.extend(unique.iter().copied().filter(|u| *u >= ordered));
    }
    let marks = vec![];
    let layout = RelationLayout { schema, storage, key, distribution, append_only, marks };
    fragment::fragment(stream, layout, &Sink::Materialize)
}
