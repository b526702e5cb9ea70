//! What the statement under way has read, so that it takes effect only where that is still so (docs/design.md §4,
//! "Statements").
//!
//! Scans of tables and views note themselves: the relation, the epoch, and the filter that the plan pushes down to
//! them. What the table's sequencer checks anyway, the old rows of keys that are written, is left out at the end, so
//! that a statement which reads no other rows has nothing to be checked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow::array::{Array, AsArray, BinaryArray, RecordBatch};
use arrow::datatypes::SchemaRef;
use datafusion::catalog::Session as PlanSession;
use datafusion::common::DFSchema;
use datafusion::logical_expr::Expr;
use datafusion::physical_plan::PhysicalExpr;
use millrace_common::collections::HashSet;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError};
use millrace_executor::dml::{Filter, Read, ReadRows};
use millrace_rpc::catalog::{Relation, RelationKind};
use parking_lot::Mutex;

use super::Session;
use crate::cluster::{Cluster, Locks, ReadSet};
use crate::dml::rows;

/// Where scans note what they read; `None`: nobody asks.
pub type NotedReads = Arc<Mutex<Option<Reads>>>;

/// Reads of one relation that are kept apart: more of them, and it counts as read as a whole.
const READS: usize = 64;
/// The same for keys.
const KEYS: usize = 1 << 16;

/// Which rows of a relation one read has looked at.
#[derive(Clone)]
pub enum Looked {
    All,
    Keys(BinaryArray),
    Where(Filter),
}

struct OfRelation {
    relation: Arc<Relation>,
    reads: Vec<(Epoch, Looked)>,
}

/// See the module.
#[derive(Default)]
pub struct Reads {
    checks: bool,
    of: BTreeMap<u32, OfRelation>,
    /// Tables whose other statements wait for this one.
    pub locks: Option<Locks>,
}

/// What a statement writes to a table: rows whose keys the sequencer checks.
pub struct Written<'a> {
    pub table: u32,
    pub delta: &'a DeltaChunk,
    /// That keys of new rows are not there is checked as well, and leads to a new evaluation.
    pub new_keys: bool,
}

impl Reads {
    /// Empty. Without `checks` nothing is noted: the statement takes what is there.
    pub fn new(checks: bool) -> Reads {
        Reads { checks, ..Reads::default() }
    }

    pub fn relations(&self) -> impl Iterator<Item = u32> {
        self.of.keys().copied()
    }

    /// Whether rows were looked at by their keys only, of this table only.
    pub fn only_keys_of(&self, table: Option<u32>) -> bool {
        let by_key = |of: &OfRelation| of.reads.iter().all(|(_, l)| matches!(l, Looked::Keys(_)));
        self.of.iter().all(|(id, of)| Some(*id) == table && by_key(of))
    }

    fn note(&mut self, relation: &Arc<Relation>, epoch: Epoch, looked: Looked) {
        if !self.checks || relation.kind == RelationKind::Source as i32 {
            return;
        }
        let of = self.of.entry(relation.id);
        let of = of.or_insert_with(|| OfRelation { relation: relation.clone(), reads: Vec::new() });
        let covers = |(at, looked): &(Epoch, Looked)| *at <= epoch && matches!(looked, Looked::All);
        if of.reads.iter().any(covers) {
            return;
        }
        of.reads.push((epoch, looked));
        let keys = of.reads.iter().map(|(_, l)| if let Looked::Keys(k) = l { k.len() } else { 0 });
        if of.reads.len() > READS || keys.sum::<usize>() > KEYS {
            let oldest = of.reads.iter().map(|(at, _)| *at).min().unwrap_or(epoch);
            of.reads = vec![(oldest, Looked::All)];
        }
    }

    /// Whether not everything was read at one epoch.
    fn is_torn(&self) -> bool {
        let epochs = self.of.values().flat_map(|of| &of.reads).map(|(at, _)| *at);
        epochs.collect::<BTreeSet<Epoch>>().len() > 1
    }
}

impl OfRelation {
    /// The reads to be checked beside what is written.
    fn beside(&self, written: &[Written<'_>]) -> Result<Vec<(Epoch, ReadRows)>, SqlError> {
        let id = self.relation.id;
        let by_key = self.reads.iter().any(|(_, l)| matches!(l, Looked::Keys(_)));
        let at_one_epoch = self.reads.iter().all(|(at, _)| *at == self.reads[0].0);
        let mut checked: HashSet<Vec<u8>> = HashSet::default();
        for w in written.iter().filter(|w| w.table == id && by_key && at_one_epoch) {
            let keys = rows::storage_keys(&self.relation, &w.delta.batch)?;
            let told = |row: &usize| w.new_keys || w.delta.weight(*row) < 0;
            let told = (0..keys.len()).filter(told);
            checked.extend(told.map(|row| keys.value(row).to_vec()));
        }
        let mut left = Vec::new();
        for (epoch, looked) in &self.reads {
            match looked {
                Looked::All => left.push((*epoch, ReadRows::All)),
                Looked::Where(filter) => left.push((*epoch, ReadRows::Where(Arc::clone(filter)))),
                Looked::Keys(keys) => {
                    let keys = keys.iter().flatten().filter(|key| !checked.contains(*key));
                    let keys: HashSet<Vec<u8>> = keys.map(<[u8]>::to_vec).collect();
                    if !keys.is_empty() {
                        left.push((*epoch, ReadRows::Keys(Arc::new(keys))));
                    }
                }
            }
        }
        Ok(left)
    }
}

impl Session {
    /// What the statement has read beside the rows that it writes, and the locks that it has. `None`: a relation is
    /// gone.
    pub fn read_set(&self, written: &[Written<'_>]) -> Result<Option<ReadSet>, SqlError> {
        let mut noted = self.reads.lock();
        let Some(noted) = noted.as_mut() else { return Ok(Some(ReadSet::default())) };
        let mut set = ReadSet { reads: Vec::new(), locks: noted.locks.take() };
        for of in noted.of.values() {
            let left = of.beside(written)?;
            if left.is_empty() {
                continue;
            }
            if self.cluster().catalog().by_id(of.relation.id).is_none() {
                return Ok(None);
            }
            set.reads.extend(on_tables(self.cluster().as_ref(), &of.relation, left));
        }
        Ok(Some(set))
    }

    /// The same for a statement that finds its table as it was read, or is a conflict anyway.
    pub fn read_set_beside(&self, table: u32) -> Result<Option<ReadSet>, SqlError> {
        if let Some(noted) = self.reads.lock().as_mut() {
            noted.of.remove(&table);
        }
        self.read_set(&[])
    }

    /// Whether what the statement has read may be of several epochs.
    pub fn reads_are_torn(&self) -> bool {
        self.reads.lock().as_ref().is_some_and(Reads::is_torn)
    }

    /// Rows of a table were looked at by their storage keys.
    pub fn note_keys(&self, table: &Relation, epoch: Epoch, keys: &BinaryArray) {
        if let Some(noted) = self.reads.lock().as_mut() {
            noted.note(&Arc::new(table.clone()), epoch, Looked::Keys(keys.clone()));
        }
    }
}

/// Reads of a relation as reads of tables: a view's rows follow from the tables below it.
fn on_tables(
    cluster: &dyn Cluster,
    relation: &Relation,
    reads: Vec<(Epoch, ReadRows)>,
) -> Vec<Read> {
    let id = RelationId(relation.id);
    if relation.kind == RelationKind::Table as i32 {
        let read = |(epoch, rows)| Read { table: id, epoch, rows };
        return reads.into_iter().map(read).collect();
    }
    let Some(epoch) = reads.iter().map(|(at, _)| *at).min() else { return Vec::new() };
    let all = |table| Read { table, epoch, rows: ReadRows::All };
    cluster.tables_behind(id).into_iter().map(all).collect()
}

/// A scan of a relation notes what it reads: rows that its filters let through, or one by its key.
pub fn note_scan(
    noted: &NotedReads,
    (relation, schema): (&Arc<Relation>, &SchemaRef),
    epoch: Epoch,
    key: Option<&BinaryArray>,
    filters: &[Expr],
    state: &dyn PlanSession,
) {
    let mut noted = noted.lock();
    let Some(noted) = noted.as_mut().filter(|noted| noted.checks) else { return };
    let looked = match key {
        Some(key) => Looked::Keys(key.clone()),
        None => filter_of(schema, filters, state).map_or(Looked::All, Looked::Where),
    };
    noted.note(relation, epoch, looked);
}

/// A filter over whole rows; `None`: every row may pass.
fn filter_of(schema: &SchemaRef, filters: &[Expr], state: &dyn PlanSession) -> Option<Filter> {
    let of = DFSchema::try_from(schema.as_ref().clone()).ok()?;
    // What cannot be computed from a row alone lets every row pass.
    let compile = |filter: &Expr| state.create_physical_expr(filter.clone(), &of).ok();
    let filters: Vec<Arc<dyn PhysicalExpr>> = filters.iter().filter_map(compile).collect();
    if filters.is_empty() {
        return None;
    }
    Some(Arc::new(move |rows: &RecordBatch| may_pass(&filters, rows)))
}

/// Whether any row may pass all filters. One that fails on a row may have let it pass.
fn may_pass(filters: &[Arc<dyn PhysicalExpr>], rows: &RecordBatch) -> bool {
    let mut passed: Option<Vec<bool>> = None;
    for filter in filters {
        let value = filter.evaluate(rows).and_then(|v| v.into_array(rows.num_rows()));
        let Ok(value) = value else { continue };
        let Some(value) = value.as_boolean_opt() else { continue };
        let own = (0..value.len()).map(|row| value.is_valid(row) && value.value(row));
        passed = Some(match passed {
            None => own.collect(),
            Some(before) => before.into_iter().zip(own).map(|(a, b)| a && b).collect(),
        });
    }
    passed.is_none_or(|passed| passed.contains(&true))
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array};
    use datafusion::logical_expr::{col, lit};
    use datafusion::prelude::SessionContext;
    use millrace_common::SqlType;
    use millrace_rpc::catalog::Column;

    use super::*;

    fn table() -> Arc<Relation> {
        let column = |name: &str| Column {
            name: name.into(),
            sql_type: SqlType::BigInt.into(),
            nullable: true,
            ..Column::default()
        };
        Arc::new(Relation {
            id: 7,
            kind: RelationKind::Table as i32,
            columns: vec![column("id"), column("v")],
            key: vec![0],
            ..Relation::default()
        })
    }

    fn rows(values: &[(i64, Option<i64>)]) -> RecordBatch {
        let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(values.iter().map(|r| r.0)));
        let others: ArrayRef = Arc::new(Int64Array::from_iter(values.iter().map(|r| r.1)));
        RecordBatch::try_new(table().arrow_schema().unwrap(), vec![ids, others]).unwrap()
    }

    #[test]
    fn a_row_that_any_filter_stops_decides_nothing() {
        let state = SessionContext::new().state();
        let schema = table().arrow_schema().unwrap();
        let filters = [col("v").gt(lit(5_i64)), col("id").lt(lit(10_i64))];
        let filter = filter_of(&schema, &filters, &state).unwrap();
        assert!(filter(&rows(&[(1, Some(1)), (2, Some(6))])));
        assert!(!filter(&rows(&[(1, Some(1)), (20, Some(6)), (3, None)])));
        // One that fails on a row may have let it pass, and one that cannot be compiled lets all pass.
        let fails = [(lit(1_i64) / col("v")).gt(lit(0_i64))];
        assert!(filter_of(&schema, &fails, &state).unwrap()(&rows(&[(1, Some(0))])));
        assert!(filter_of(&schema, &[col("other").gt(lit(5_i64))], &state).is_none());
    }

    #[test]
    fn keys_that_are_written_are_left_out() {
        let (table, read) = (table(), rows(&[(1, Some(1)), (2, Some(2)), (3, None)]));
        let keys = rows::storage_keys(&table, &read).unwrap();
        let mut reads = Reads::new(true);
        reads.note(&table, Epoch(5), Looked::Keys(keys.clone()));
        assert!(reads.only_keys_of(Some(7)) && !reads.is_torn());
        let old = DeltaChunk::inserts(rows(&[(1, Some(1))])).negate();
        let new = DeltaChunk::inserts(rows(&[(2, Some(9))]));
        let written = |delta, new_keys| Written { table: 7, delta, new_keys };
        let left = |reads: &Reads, written: &[Written<'_>]| {
            let left = reads.of[&7].beside(written).unwrap();
            let count = |(_, rows): &(Epoch, ReadRows)| match rows {
                ReadRows::Keys(keys) => keys.len(),
                _ => 1000,
            };
            left.iter().map(count).sum::<usize>()
        };
        assert_eq!(left(&reads, &[]), 3);
        assert_eq!(left(&reads, &[written(&old, false), written(&new, false)]), 2);
        assert_eq!(left(&reads, &[written(&old, false), written(&new, true)]), 1);
        // Of two epochs nobody knows which one the old row is of.
        reads.note(&table, Epoch(6), Looked::Keys(keys));
        assert!(reads.is_torn());
        assert_eq!(left(&reads, &[written(&old, false)]), 6);
        // As a whole it is read once.
        reads.note(&table, Epoch(4), Looked::All);
        reads.note(&table, Epoch(6), Looked::All);
        assert!(!reads.only_keys_of(Some(7)));
        assert_eq!(left(&reads, &[]), 6 + 1000);
    }
}
