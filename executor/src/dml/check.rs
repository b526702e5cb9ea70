//! Checks a statement against the table's rows and reduces it to what is to be written.
//!
//! Pure functions over the statement and the rows found at its keys: the sequencer looks up and
//! applies. Rows are compared by their canonical bytes.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BinaryArray, Int64Array, RecordBatch, UInt32Array};
use arrow::datatypes::{Schema, SchemaRef};
use millrace_common::delta::take_rows;
use millrace_common::error::ErrorObject;
use millrace_common::{DeltaChunk, SqlError, Vnode};
use millrace_storage::Found;

use super::{DmlError, DmlKind, InsertConflict};
use crate::consolidate::{group_keys, net_by_key};
use crate::error::ExecError;
use crate::layout::RowLayout;
use crate::lookahead::uncommitted::Announced;
use crate::materialize::take_binary;

/// A statement with its keys, before it is checked.
#[derive(Debug)]
pub struct Keyed {
    pub delta: DeltaChunk,
    pub vnodes: Vec<Vnode>,
    pub keys: BinaryArray,
    /// The first row of every distinct key.
    firsts: Vec<u32>,
    /// Each row's position in `firsts`.
    group: Vec<u32>,
}

/// The keys of a statement's rows, and which of them have a row.
#[derive(Debug)]
pub struct KeyReservations {
    group: Vec<u32>,
    taken: Vec<bool>,
}

impl KeyReservations {
    /// Whether a row gets its key, which then has one.
    pub fn claim(&mut self, row: usize) -> bool {
        !std::mem::replace(&mut self.taken[self.group[row] as usize], true)
    }
}

/// What a statement that passed writes.
#[derive(Debug)]
pub struct Writes {
    /// One entry a key: a new row (+1) or a deletion (−1).
    pub keys: BinaryArray,
    pub weights: Option<Int64Array>,
    pub rows: RecordBatch,
    /// The table's change, old rows included, with vnodes.
    pub delta: DeltaChunk,
    pub vnodes: Vec<Vnode>,
    pub row_count: i64,
    pub rows_affected: u64,
    pub kept: Option<UInt32Array>,
    /// Its rows were announced when it was received.
    pub announced: Option<Announced>,
}

impl Writes {
    /// Whether no key that is written has a row: each adds one to the table.
    pub fn are_new(&self) -> bool {
        self.row_count == self.keys.len() as i64
    }
}

/// The same columns, all of which may be NULL.
fn nullable(schema: &SchemaRef) -> SchemaRef {
    let fields = schema.fields().iter().map(|field| field.as_ref().clone().with_nullable(true));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

impl Keyed {
    pub fn new(layout: &RowLayout, delta: DeltaChunk) -> Result<Keyed, ExecError> {
        let given = delta.batch.schema();
        let types =
            |s: &Schema| s.fields().iter().map(|f| f.data_type().clone()).collect::<Vec<_>>();
        if types(&given) != types(&layout.schema) {
            return Err(ExecError::internal("a statement's rows do not have the table's columns"));
        }
        let options =
            arrow::array::RecordBatchOptions::new().with_row_count(Some(delta.num_rows()));
        let columns = delta.batch.columns().to_vec();
        let schema = match delta.weights.as_ref() {
            // A deletion may bring no more than its key. What is stored is looked up.
            Some(weights) if weights.values().iter().any(|weight| *weight < 0) => {
                nullable(&layout.schema)
            }
            _ => layout.schema.clone(),
        };
        let batch = RecordBatch::try_new_with_options(schema, columns, &options)?;
        let delta = DeltaChunk::new(batch, delta.weights);
        let vnodes = layout.vnodes(&delta.batch)?;
        let keys = layout.keys(&delta.batch, &vnodes)?;
        let (firsts, group) = group_keys(&keys);
        Ok(Keyed { delta, vnodes, keys, firsts, group })
    }

    /// The distinct keys, to be looked up.
    pub fn distinct(&self) -> Result<BinaryArray, ExecError> {
        if self.firsts.len() == self.keys.len() {
            return Ok(self.keys.clone());
        }
        take_binary(&self.keys, &UInt32Array::from(self.firsts.clone()))
    }

    /// The first row whose key an earlier row has.
    pub fn first_repeat(&self) -> Option<usize> {
        if self.firsts.len() == self.keys.len() {
            return None;
        }
        (0..self.group.len()).find(|&row| self.firsts[self.group[row] as usize] as usize != row)
    }

    /// Who gets each key, where the first row that wants it does and others give way: the rows found at
    /// [`Keyed::distinct`] have theirs.
    pub fn claims(&self, found: &Found) -> KeyReservations {
        let mut taken = vec![false; self.firsts.len()];
        found.input.values().iter().for_each(|key| taken[*key as usize] = true);
        KeyReservations { group: self.group.clone(), taken }
    }

    /// Only these rows, which ascend, and where each distinct key is among theirs.
    pub fn take(&self, rows: &UInt32Array) -> Result<(Keyed, Vec<Option<u32>>), ExecError> {
        let mut moved: Vec<Option<u32>> = vec![None; self.firsts.len()];
        let (mut firsts, mut group) = (Vec::new(), Vec::with_capacity(rows.len()));
        for (at, row) in rows.values().iter().enumerate() {
            let number = moved[self.group[*row as usize] as usize].get_or_insert_with(|| {
                firsts.push(at as u32);
                firsts.len() as u32 - 1
            });
            group.push(*number);
        }
        let keyed = Keyed {
            delta: self.delta.take(rows)?,
            vnodes: rows.values().iter().map(|row| self.vnodes[*row as usize]).collect(),
            keys: take_binary(&self.keys, rows)?,
            firsts,
            group,
        };
        Ok((keyed, moved))
    }

    /// Checks against the rows found at [`Keyed::distinct`] and says what to write.
    pub fn check(
        &self,
        layout: &RowLayout,
        primary_key: &ErrorObject,
        kind: DmlKind,
        found: &Found,
    ) -> Result<Writes, DmlError> {
        let mut existing: Vec<Option<u32>> = vec![None; self.firsts.len()];
        for (at, &key) in found.input.values().iter().enumerate() {
            existing[key as usize] = Some(at as u32);
        }
        let checker = Checker { statement: self, layout, primary_key, found, existing };
        match kind {
            DmlKind::Insert { on_conflict } => checker.insert(on_conflict),
            DmlKind::Feed { on_conflict } => checker.feed(on_conflict),
            DmlKind::Change => checker.change(false),
            DmlKind::Upsert => checker.change(true),
            DmlKind::Replicate => checker.replicate().map_err(|e| DmlError::Sql(e.into_sql())),
        }
    }
}

struct Checker<'a> {
    statement: &'a Keyed,
    layout: &'a RowLayout,
    primary_key: &'a ErrorObject,
    found: &'a Found,
    /// By distinct key: the row in `found`.
    existing: Vec<Option<u32>>,
}

impl Checker<'_> {
    fn duplicate(&self, row: usize) -> DmlError {
        let key = self.layout.describe_key(&self.statement.delta.batch, row);
        DmlError::UniqueViolation {
            constraint: Box::new(self.primary_key.clone()),
            detail: format!("Key {key} already exists."),
            row: Some(row),
        }
    }

    fn insert(&self, on_conflict: InsertConflict) -> Result<Writes, DmlError> {
        let s = self.statement;
        let rows = s.keys.len();
        if (0..rows).any(|i| s.delta.weight(i) != 1) {
            return Err(SqlError::internal("an INSERT that deletes rows").into());
        }
        // The row that stands for each key; of several the first, or the last when overwriting.
        let mut chosen: Vec<Option<u32>> = vec![None; s.firsts.len()];
        for row in 0..rows {
            let key = s.group[row] as usize;
            let (seen, exists) = (chosen[key].is_some(), self.existing[key].is_some());
            match on_conflict {
                InsertConflict::Error if seen || exists => return Err(self.duplicate(row)),
                InsertConflict::Nothing if seen || exists => {}
                _ => chosen[key] = Some(row as u32),
            }
        }
        let old: Vec<u32> = match on_conflict {
            InsertConflict::Overwrite => self.existing.iter().flatten().copied().collect(),
            _ => Vec::new(),
        };
        let mut new: Vec<u32> = chosen.into_iter().flatten().collect();
        new.sort_unstable();
        let all = new.len() == rows;
        let affected = match on_conflict {
            InsertConflict::Overwrite => rows,
            _ => new.len(),
        };
        let kept = (!all).then(|| UInt32Array::from(new.clone()));
        let writes = self.inserted(new, &old, all).map_err(|e| DmlError::Sql(e.into_sql()))?;
        Ok(Writes { rows_affected: affected as u64, kept, ..writes })
    }

    /// New rows, of which some replace `old` rows of `found`.
    fn inserted(&self, new: Vec<u32>, old: &[u32], all: bool) -> Result<Writes, ExecError> {
        let s = self.statement;
        let (keys, vnodes, rows) = if all {
            (s.keys.clone(), s.vnodes.clone(), s.delta.batch.clone())
        } else {
            let indices = UInt32Array::from(new.clone());
            let vnodes = new.iter().map(|&r| s.vnodes[r as usize]).collect();
            let rows = take_rows(&s.delta.batch, &indices)?;
            (take_binary(&s.keys, &indices)?, vnodes, rows)
        };
        let row_count = new.len() as i64 - old.len() as i64;
        let inserted = DeltaChunk::inserts(rows.clone());
        let (delta, vnodes) = if old.is_empty() {
            (inserted, vnodes)
        } else {
            let replaced = self.found_rows(old)?;
            let mut both = self.layout.vnodes(&replaced.batch)?;
            both.extend(vnodes);
            let delta = DeltaChunk::concat(&self.layout.schema, &[replaced, inserted])?;
            (delta, both)
        };
        Ok(Writes {
            announced: None,
            keys,
            weights: None,
            rows,
            delta,
            vnodes,
            row_count,
            rows_affected: 0,
            kept: None,
        })
    }

    /// See [`DmlKind::Feed`].
    fn feed(&self, on_conflict: InsertConflict) -> Result<Writes, DmlError> {
        let s = self.statement;
        if s.delta.weights.is_none() {
            let on_conflict = match on_conflict {
                InsertConflict::Error => InsertConflict::Nothing,
                other => other,
            };
            return self.insert(on_conflict);
        }
        // The last row of each key; `None`: the key is not there afterwards.
        let mut last: Vec<Option<Option<u32>>> = vec![None; s.firsts.len()];
        for row in 0..s.keys.len() {
            let key = s.group[row] as usize;
            let deletes = s.delta.weight(row) < 0;
            let kept = matches!(last[key], Some(Some(_)))
                || (last[key].is_none() && self.existing[key].is_some());
            match (deletes, on_conflict) {
                (true, _) => last[key] = Some(None),
                (false, InsertConflict::Overwrite) => last[key] = Some(Some(row as u32)),
                (false, _) if kept => {}
                (false, _) => last[key] = Some(Some(row as u32)),
            }
        }
        self.replace(&last).map_err(|e| DmlError::Sql(e.into_sql()))
    }

    /// What to write so that each key has the row given for it, or none; keys without a word stay.
    fn replace(&self, last: &[Option<Option<u32>>]) -> Result<Writes, ExecError> {
        let s = self.statement;
        let (mut new, mut old, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        for (key, wanted) in last.iter().enumerate() {
            let Some(wanted) = wanted else { continue };
            old.extend(self.existing[key]);
            match (wanted, self.existing[key]) {
                (Some(row), _) => new.push(*row),
                (None, Some(_)) => gone.push(s.firsts[key]),
                (None, None) => {}
            }
        }
        let retracted = self.found_rows(&old)?;
        let inserted = take_rows(&s.delta.batch, &UInt32Array::from(new.clone()))?;
        let mut vnodes = self.layout.vnodes(&retracted.batch)?;
        vnodes.extend(new.iter().map(|&r| s.vnodes[r as usize]));
        let written: Vec<u32> = new.iter().chain(&gone).copied().collect();
        let weights: Vec<i64> = new.iter().map(|_| 1).chain(gone.iter().map(|_| -1)).collect();
        let indices = UInt32Array::from(written);
        let rows = take_rows(&s.delta.batch, &indices)?;
        let delta =
            DeltaChunk::concat(&self.layout.schema, &[retracted, DeltaChunk::inserts(inserted)])?;
        Ok(Writes {
            announced: None,
            keys: take_binary(&s.keys, &indices)?,
            weights: crate::consolidate::weights(&weights),
            rows,
            delta,
            vnodes,
            row_count: new.len() as i64 - old.len() as i64,
            rows_affected: (new.len() + gone.len()) as u64,
            kept: None,
        })
    }

    /// Rows of `found`, retracted.
    fn found_rows(&self, rows: &[u32]) -> Result<DeltaChunk, ExecError> {
        let indices = UInt32Array::from(rows.to_vec());
        let batch = take_rows(&self.found.values, &indices)?;
        let columns: Vec<ArrayRef> = batch.columns().to_vec();
        let batch = RecordBatch::try_new(self.layout.schema.clone(), columns)?;
        Ok(DeltaChunk::inserts(batch).negate())
    }

    fn change(&self, upsert: bool) -> Result<Writes, DmlError> {
        let failed = |e: ExecError| DmlError::Sql(e.into_sql());
        self.check_old_rows().map_err(failed)?.then_some(()).ok_or(DmlError::Conflict)?;
        let s = self.statement;
        let net = net_by_key(&s.keys, &s.delta, &self.layout.identity).map_err(failed)?;
        let (mut rows, mut weights, mut row_count) = (Vec::new(), Vec::new(), 0);
        // An upsert has its updates first, old rows before new ones, then what it inserts.
        let updates = 2 * (0..s.keys.len()).take_while(|&i| s.delta.weight(i) < 0).count();
        for key in net.keys() {
            let (mut old, mut new) = (None, None);
            for i in key {
                let row = net.rows[i];
                match net.weights[i] {
                    1 if new.is_none() => new = Some(row),
                    -1 if old.is_none() => old = Some(row),
                    w if w > 0 => return Err(self.duplicate(row as usize)),
                    _ => return Err(DmlError::Conflict),
                }
            }
            let Some(row) = new.or(old) else { continue };
            let taken = self.existing[s.group[row as usize] as usize].is_some();
            if old.is_none() && taken {
                let inserted = upsert && row as usize >= updates;
                return Err(match inserted {
                    true => DmlError::Conflict,
                    false => self.duplicate(row as usize),
                });
            }
            row_count += i64::from(new.is_some()) - i64::from(old.is_some());
            rows.push(row);
            weights.push(if new.is_some() { 1 } else { -1 });
        }
        let plus = (0..s.keys.len()).filter(|&i| s.delta.weight(i) > 0).count();
        let affected = plus.max(s.keys.len() - plus) as u64;
        let written = UInt32Array::from(rows);
        let build = || -> Result<Writes, ExecError> {
            Ok(Writes {
                announced: None,
                keys: take_binary(&s.keys, &written)?,
                weights: crate::consolidate::weights(&weights),
                rows: take_rows(&s.delta.batch, &written)?,
                delta: net.apply(&s.delta)?,
                vnodes: net.rows.iter().map(|&r| s.vnodes[r as usize]).collect(),
                row_count,
                rows_affected: affected,
                kept: None,
            })
        };
        build().map_err(failed)
    }

    /// The newest row of each key replaces what is there; a key that only goes is deleted.
    fn replicate(&self) -> Result<Writes, ExecError> {
        let s = self.statement;
        let net = net_by_key(&s.keys, &s.delta, &self.layout.identity)?;
        let (mut rows, mut weights, mut replaced, mut new) = (vec![], vec![], vec![], vec![]);
        for key in net.keys() {
            let row = key.clone().rev().find(|i| net.weights[*i] > 0).map(|i| net.rows[i]);
            let Some(any) = row.or_else(|| net.rows.get(key.start).copied()) else { continue };
            let there = self.existing[s.group[any as usize] as usize];
            if row.is_none() && there.is_none() {
                continue;
            }
            replaced.extend(there);
            new.extend(row);
            rows.push(any);
            weights.push(if row.is_some() { 1 } else { -1 });
        }
        let row_count = new.len() as i64 - replaced.len() as i64;
        let (written, new) = (UInt32Array::from(rows), UInt32Array::from(new));
        let inserted = DeltaChunk::inserts(take_rows(&s.delta.batch, &new)?);
        let gone = self.found_rows(&replaced)?;
        let mut vnodes = self.layout.vnodes(&gone.batch)?;
        vnodes.extend(new.values().iter().map(|&r| s.vnodes[r as usize]));
        Ok(Writes {
            announced: None,
            keys: take_binary(&s.keys, &written)?,
            weights: crate::consolidate::weights(&weights),
            rows: take_rows(&s.delta.batch, &written)?,
            delta: DeltaChunk::concat(&self.layout.schema, &[gone, inserted])?,
            vnodes,
            row_count,
            rows_affected: written.len() as u64,
            kept: None,
        })
    }

    /// Whether every old row is there as the statement saw it.
    fn check_old_rows(&self) -> Result<bool, ExecError> {
        let s = self.statement;
        let old: Vec<u32> =
            (0..s.keys.len() as u32).filter(|&i| s.delta.weight(i as usize) < 0).collect();
        let mut found = Vec::with_capacity(old.len());
        for &row in &old {
            match self.existing[s.group[row as usize] as usize] {
                Some(at) => found.push(at),
                None => return Ok(false),
            }
        }
        let seen = take_rows(&s.delta.batch, &UInt32Array::from(old))?;
        let now = take_rows(&self.found.values, &UInt32Array::from(found))?;
        let identity = &self.layout.identity;
        let (seen, now) = (
            identity.rows(seen.columns(), seen.num_rows())?,
            identity.rows(now.columns(), now.num_rows())?,
        );
        Ok(seen.iter().zip(now.iter()).all(|(a, b)| a == b))
    }
}
