//! What a transaction block has written to one table and not committed: the net change of every key
//! (docs/design.md §4, "Statements").
//!
//! Statements are kept in order as net deltas; an index over them tells of every key what the block
//! found there first and what it has there now. Reads of the block lay that over a snapshot; COMMIT
//! hands the net change to the table's sequencer, which checks it against what is committed by then.
//! A savepoint is a number of statements: going back forgets those after it.

use std::sync::Arc;

use arrow::array::{Array, BinaryArray, Int64Array, RecordBatch, UInt32Array};
use arrow::compute::interleave;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use millrace_common::error::ErrorObject;
use millrace_common::hash::hash_bytes;
use millrace_common::{DeltaChunk, SqlError};
use millrace_rpc::catalog::Relation;
use millrace_storage::Found;

use super::check::{Keyed, Writes};
use super::{DmlError, DmlKind, InsertConflict};
use crate::error::ExecError;
use crate::layout::RowLayout;
use crate::materialize::take_binary;

/// A row of a statement: (statement, row).
type Place = (u32, u32);

/// One statement's net change.
#[derive(Debug)]
struct Step {
    keys: BinaryArray,
    delta: DeltaChunk,
}

/// A key that the block has written.
#[derive(Clone, Copy, Debug)]
struct Slot {
    key: Place,
    /// The row that was there before the block's first write.
    old: Option<Place>,
    /// The row that is there now.
    new: Option<Place>,
}

/// Staged writes of one table. Cloning shares the rows and copies the index.
#[derive(Clone, Debug)]
pub struct StagedTable {
    layout: Arc<RowLayout>,
    /// The primary key as errors name it.
    primary_key_object: ErrorObject,
    primary_key: bool,
    steps: Vec<Arc<Step>>,
    /// Positions in `slots`, by key hash.
    table: HashTable<u32>,
    slots: Vec<Slot>,
    bytes: usize,
}

/// A statement on its way in: its keys are known, what is committed at them is not.
pub struct Pending {
    statement: Keyed,
    kind: DmlKind,
    distinct: BinaryArray,
    /// Positions in `distinct` of keys that the block has not written.
    unwritten: Vec<u32>,
    fresh: bool,
}

impl Pending {
    /// Keys whose committed rows [`StagedTable::stage`] needs; empty: none.
    pub fn keys(&self) -> Result<BinaryArray, ExecError> {
        match self.fresh {
            true => Ok(BinaryArray::from(Vec::<&[u8]>::new())),
            false => take_binary(&self.distinct, &UInt32Array::from(self.unwritten.clone())),
        }
    }
}

impl StagedTable {
    pub fn new(relation: &Relation) -> Result<StagedTable, SqlError> {
        let layout = RowLayout::of_relation(relation).map_err(ExecError::into_sql)?;
        Ok(StagedTable {
            layout: Arc::new(layout),
            primary_key_object: relation.primary_key_object(),
            primary_key: relation.primary_key,
            steps: Vec::new(),
            table: HashTable::new(),
            slots: Vec::new(),
            bytes: 0,
        })
    }

    /// Heap bytes of rows and index.
    pub fn memory_size(&self) -> usize {
        self.bytes + self.slots.len() * (size_of::<Slot>() + 8)
    }

    /// Statements so far: a savepoint.
    pub fn mark(&self) -> usize {
        self.steps.len()
    }

    /// Forgets the statements after a savepoint.
    pub fn rewind(&mut self, mark: usize) {
        if mark >= self.steps.len() {
            return;
        }
        let mut kept = std::mem::take(&mut self.steps);
        kept.truncate(mark);
        self.table.clear();
        self.slots.clear();
        self.bytes = 0;
        kept.into_iter().for_each(|step| self.push(step));
    }

    /// The first half of a statement: what has to be looked up for it.
    pub fn prepare(&self, delta: DeltaChunk, kind: DmlKind) -> Result<Pending, SqlError> {
        let build = || -> Result<Pending, ExecError> {
            let statement = Keyed::new(&self.layout, delta)?;
            let distinct = statement.distinct()?;
            let keys = 0..distinct.len() as u32;
            let unwritten =
                keys.filter(|&k| self.find(distinct.value(k as usize)).is_none()).collect();
            // A fresh row id cannot exist.
            let fresh =
                !self.primary_key && kind == DmlKind::Insert { on_conflict: InsertConflict::Error };
            Ok(Pending { statement, kind, distinct, unwritten, fresh })
        };
        build().map_err(ExecError::into_sql)
    }

    /// The second half: checks the statement against the block's rows and `found`, the committed rows at
    /// [`Pending::keys`], and takes it in. Returns the rows affected. Nothing has changed on an error;
    /// [`DmlError::Conflict`]: its old rows are not what is there, evaluate it again.
    pub fn stage(&mut self, pending: Pending, found: &Found) -> Result<u64, DmlError> {
        let failed = |e: ExecError| DmlError::Sql(e.into_sql());
        let there = self.there(&pending, found).map_err(failed)?;
        let checked = pending.statement.check(
            &self.layout,
            &self.primary_key_object,
            pending.kind,
            &there,
        )?;
        let Writes { delta, vnodes, rows_affected, .. } = checked;
        if !delta.is_empty() {
            let keys = self.layout.keys(&delta.batch, &vnodes).map_err(failed)?;
            self.push(Arc::new(Step { keys, delta }));
        }
        Ok(rows_affected)
    }

    /// The rows at a statement's distinct keys: the block's own where it wrote, else committed ones.
    fn there(&self, pending: &Pending, found: &Found) -> Result<Found, ExecError> {
        const COMMITTED: u32 = u32::MAX;
        let mut picks: Vec<(u32, Place)> = Vec::new();
        for (at, &key) in found.input.values().iter().enumerate() {
            picks.push((pending.unwritten[key as usize], (COMMITTED, at as u32)));
        }
        for key in 0..pending.distinct.len() {
            if let Some(place) = self.find(pending.distinct.value(key)).and_then(|s| s.new) {
                picks.push((key as u32, place));
            }
        }
        picks.sort_unstable_by_key(|(key, _)| *key);
        let places: Vec<Place> = picks.iter().map(|(_, place)| *place).collect();
        let values = self.gather(&places, Some(&found.values))?;
        Ok(Found {
            input: picks.iter().map(|(key, _)| *key).collect(),
            keys: BinaryArray::from(Vec::<&[u8]>::new()),
            weights: Int64Array::from_value(1, picks.len()),
            values,
        })
    }

    fn push(&mut self, step: Arc<Step>) {
        let number = self.steps.len() as u32;
        self.bytes += step.delta.memory_size() + step.keys.get_array_memory_size();
        self.steps.push(Arc::clone(&step));
        // Of one key the old row first: it may be in the chunk after the new one.
        for removed in [true, false] {
            for row in 0..step.keys.len() {
                if (step.delta.weight(row) < 0) == removed {
                    self.note(step.keys.value(row), (number, row as u32), removed);
                }
            }
        }
    }

    fn note(&mut self, key: &[u8], place: Place, removed: bool) {
        let StagedTable { table, slots, steps, .. } = self;
        let key_of = |slots: &[Slot], s: u32| {
            let (step, row) = slots[s as usize].key;
            steps[step as usize].keys.value(row as usize)
        };
        let entry = table.entry(
            hash_bytes(key),
            |&s| key_of(&slots[..], s) == key,
            |&s| hash_bytes(key_of(&slots[..], s)),
        );
        match entry {
            Entry::Occupied(at) => {
                slots[*at.get() as usize].new = (!removed).then_some(place);
            }
            Entry::Vacant(at) => {
                at.insert(slots.len() as u32);
                let (old, new) = if removed { (Some(place), None) } else { (None, Some(place)) };
                slots.push(Slot { key: place, old, new });
            }
        }
    }

    fn find(&self, key: &[u8]) -> Option<Slot> {
        let same = |&s: &u32| {
            let (step, row) = self.slots[s as usize].key;
            self.steps[step as usize].keys.value(row as usize) == key
        };
        self.table.find(hash_bytes(key), same).map(|&s| self.slots[s as usize])
    }

    /// Whether the block has written this storage key: what is committed there does not count.
    pub fn wrote(&self, key: &[u8]) -> bool {
        self.find(key).is_some()
    }

    /// Whether statements from `mark` on have written this storage key, at which a row was before them.
    pub fn wrote_since(&self, mark: usize, key: &[u8]) -> bool {
        self.find(key).is_some_and(|slot| slot.new.is_none_or(|(step, _)| step as usize >= mark))
    }

    /// Storage keys of rows of the table, given all columns.
    pub fn storage_keys(&self, rows: &RecordBatch) -> Result<BinaryArray, SqlError> {
        let keys = || self.layout.keys(rows, &self.layout.vnodes(rows)?);
        keys().map_err(|e: ExecError| e.into_sql())
    }

    /// The rows that the block has put there.
    pub fn rows(&self) -> Result<RecordBatch, SqlError> {
        let places: Vec<Place> = self.slots.iter().filter_map(|s| s.new).collect();
        self.gather(&places, None).map_err(ExecError::into_sql)
    }

    /// Those of them at these keys: positions in `keys`, ascending, and the rows.
    pub fn rows_at(&self, keys: &BinaryArray) -> Result<(Vec<u32>, RecordBatch), SqlError> {
        let place = |k: usize| Some((k as u32, self.find(keys.value(k))?.new?));
        let (inputs, places): (Vec<u32>, Vec<Place>) = (0..keys.len()).filter_map(place).unzip();
        let rows = self.gather(&places, None).map_err(ExecError::into_sql)?;
        Ok((inputs, rows))
    }

    /// The net change: what was there −1, what is there now +1.
    pub fn net(&self) -> Result<DeltaChunk, SqlError> {
        let old = self.slots.iter().filter_map(|s| s.old).map(|p| (p, -1));
        let new = self.slots.iter().filter_map(|s| s.new).map(|p| (p, 1));
        let (places, weights): (Vec<Place>, Vec<i64>) = old.chain(new).unzip();
        let batch = self.gather(&places, None).map_err(ExecError::into_sql)?;
        Ok(DeltaChunk::new(batch, crate::consolidate::weights(&weights)))
    }

    /// Rows of statements; of `u32::MAX`, rows of `extra`.
    fn gather(
        &self,
        places: &[Place],
        extra: Option<&RecordBatch>,
    ) -> Result<RecordBatch, ExecError> {
        let schema = Arc::clone(&self.layout.schema);
        if places.is_empty() {
            return Ok(RecordBatch::new_empty(schema));
        }
        // Only statements that give a row take part.
        let mut used: Vec<u32> = places.iter().map(|p| p.0).collect();
        used.sort_unstable();
        used.dedup();
        let batches = used.iter().map(|&step| match (self.steps.get(step as usize), extra) {
            (Some(step), _) => Ok(&step.delta.batch),
            (None, Some(extra)) => Ok(extra),
            (None, None) => Err(ExecError::internal("a staged row of no statement")),
        });
        let batches = batches.collect::<Result<Vec<&RecordBatch>, _>>()?;
        let indices: Vec<(usize, usize)> = places
            .iter()
            .map(|&(step, row)| (used.partition_point(|u| *u < step), row as usize))
            .collect();
        let columns = (0..schema.fields().len())
            .map(|c| {
                let parts: Vec<&dyn Array> = batches.iter().map(|b| b.column(c).as_ref()).collect();
                interleave(&parts, &indices)
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(RecordBatch::try_new(schema, columns)?)
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{AsArray, Int32Array};
    use arrow::datatypes::Int32Type;
    use millrace_common::SqlType;
    use millrace_common::delta::take_rows;
    use millrace_rpc::catalog::{Column, RowStorage};

    use super::*;

    fn relation() -> Relation {
        let column = |name: &str| Column {
            name: name.into(),
            sql_type: SqlType::Int.into(),
            nullable: true,
            hidden: false,
            ..Column::default()
        };
        Relation {
            name: "t".into(),
            columns: vec![column("k"), column("v")],
            key: vec![0],
            distribution: vec![0],
            primary_key: true,
            storage: RowStorage::Keyed as i32,
            ..Relation::default()
        }
    }

    fn chunk(rows: &[(i32, i32, i64)]) -> DeltaChunk {
        let schema = relation().arrow_schema().unwrap();
        let column = |f: fn(&(i32, i32, i64)) -> i32| {
            Arc::new(rows.iter().map(f).collect::<Int32Array>()) as arrow::array::ArrayRef
        };
        let batch = RecordBatch::try_new(schema, vec![column(|r| r.0), column(|r| r.1)]).unwrap();
        DeltaChunk::new(batch, Some(rows.iter().map(|r| r.2).collect::<Vec<_>>().into()))
    }

    fn sorted(batch: &RecordBatch, weights: impl Fn(usize) -> i64) -> Vec<(i32, i32, i64)> {
        let column = |c: usize| batch.column(c).as_primitive::<Int32Type>().clone();
        let (k, v) = (column(0), column(1));
        let mut rows: Vec<_> =
            (0..batch.num_rows()).map(|i| (k.value(i), v.value(i), weights(i))).collect();
        rows.sort_unstable();
        rows
    }

    fn run(
        t: &mut StagedTable,
        delta: DeltaChunk,
        kind: DmlKind,
        committed: &[(i32, i32, i64)],
    ) -> Result<u64, DmlError> {
        let pending = t.prepare(delta, kind).unwrap();
        let keys = pending.keys().unwrap();
        let rows = chunk(committed).batch;
        let all = t.storage_keys(&rows).unwrap();
        let hits: Vec<(u32, u32)> = (0..keys.len())
            .flat_map(|k| (0..all.len()).map(move |r| (k, r)))
            .filter(|&(k, r)| keys.value(k) == all.value(r))
            .map(|(k, r)| (k as u32, r as u32))
            .collect();
        let picked = UInt32Array::from_iter_values(hits.iter().map(|h| h.1));
        let found = Found {
            input: hits.iter().map(|h| h.0).collect(),
            values: take_rows(&rows, &picked).unwrap(),
            ..Found::empty(&rows.schema())
        };
        t.stage(pending, &found)
    }

    const INSERT: DmlKind = DmlKind::Insert { on_conflict: InsertConflict::Error };

    #[test]
    fn the_net_change_is_from_the_first_row_found_to_the_last_row_written() {
        let mut t = StagedTable::new(&relation()).unwrap();
        let committed = [(1, 10, 1), (2, 20, 1)];
        run(&mut t, chunk(&[(1, 10, -1), (1, 11, 1)]), DmlKind::Change, &committed).unwrap();
        run(&mut t, chunk(&[(1, 11, -1), (1, 12, 1)]), DmlKind::Change, &committed).unwrap();
        run(&mut t, chunk(&[(3, 30, 1)]), INSERT, &committed).unwrap();
        run(&mut t, chunk(&[(2, 20, -1)]), DmlKind::Change, &committed).unwrap();
        run(&mut t, chunk(&[(3, 30, -1), (4, 30, 1)]), DmlKind::Change, &committed).unwrap();
        let net = t.net().unwrap();
        assert_eq!(
            sorted(&net.batch, |i| net.weight(i)),
            [(1, 10, -1), (1, 12, 1), (2, 20, -1), (4, 30, 1)]
        );
        assert_eq!(sorted(&t.rows().unwrap(), |_| 1), [(1, 12, 1), (4, 30, 1)]);
    }

    #[test]
    fn a_statement_is_checked_against_the_blocks_own_rows() {
        let mut t = StagedTable::new(&relation()).unwrap();
        let committed = [(1, 10, 1)];
        assert!(matches!(
            run(&mut t, chunk(&[(1, 5, 1)]), INSERT, &committed),
            Err(DmlError::UniqueViolation { .. })
        ));
        run(&mut t, chunk(&[(1, 10, -1)]), DmlKind::Change, &committed).unwrap();
        run(&mut t, chunk(&[(1, 5, 1)]), INSERT, &committed).unwrap();
        assert!(matches!(
            run(&mut t, chunk(&[(1, 6, 1)]), INSERT, &committed),
            Err(DmlError::UniqueViolation { .. })
        ));
        assert!(matches!(
            run(&mut t, chunk(&[(1, 10, -1)]), DmlKind::Change, &committed),
            Err(DmlError::Conflict)
        ));
    }

    #[test]
    fn a_savepoint_forgets_what_came_after_it() {
        let mut t = StagedTable::new(&relation()).unwrap();
        run(&mut t, chunk(&[(1, 10, 1)]), INSERT, &[]).unwrap();
        let mark = t.mark();
        run(&mut t, chunk(&[(1, 10, -1), (2, 10, 1)]), DmlKind::Change, &[]).unwrap();
        t.rewind(mark);
        assert_eq!(sorted(&t.rows().unwrap(), |_| 1), [(1, 10, 1)]);
        t.rewind(0);
        assert!(t.net().unwrap().is_empty() && t.memory_size() == 0);
    }
}
