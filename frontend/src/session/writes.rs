//! What a transaction block has written and not committed, and reads through it.
//!
//! Staged writes are kept as net changes of tables ([`StagedTable`]), bounded in bytes. The session's
//! own reads see them laid over the snapshot; nobody else does before COMMIT.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{BinaryArray, RecordBatch, UInt32Array};
use arrow::compute;
use millrace_common::{DeltaChunk, RelationId, SqlError, SqlState};
use millrace_executor::dml::{Announced, DmlError, DmlKind, InsertConflict, StagedTable};
use millrace_rpc::catalog::Relation;
use millrace_storage::Found;

use super::Session;
use super::reads::Written;
use crate::cluster::DmlResult;
use crate::dml::{Evaluated, rows};

/// Staged writes of all tables, by relation id.
#[derive(Clone, Default)]
pub struct StagedWrites {
    tables: BTreeMap<u32, Arc<StagedTable>>,
    /// Some statement said what to do with keys that exist: one that has come to exist since is a
    /// conflict to be tried again, not a duplicate.
    lenient: bool,
    announced: Vec<AnnouncedStep>,
    /// Rows of them, and of those that were taken back.
    announced_rows: usize,
}

/// Rows of a transaction that are announced to those that look ahead.
const ANNOUNCED_ROWS: usize = 1_000;

/// A statement whose rows were announced.
#[derive(Clone)]
struct AnnouncedStep {
    table: u32,
    /// Statements of the table with it.
    mark: usize,
    announced: Announced,
}

/// What a block commits.
struct NetChanges {
    changes: Vec<(RelationId, DeltaChunk, DmlKind)>,
    announced: Vec<AnnouncedStep>,
}

/// A position to go back to.
#[derive(Clone, Debug, Default)]
pub struct Marks(BTreeMap<u32, usize>);

impl Marks {
    /// Nothing is staged.
    pub fn is_empty(&self) -> bool {
        self.0.values().all(|steps| *steps == 0)
    }

    /// Statements of a table before it.
    pub fn of(&self, table: u32) -> usize {
        self.0.get(&table).copied().unwrap_or(0)
    }
}

impl StagedWrites {
    pub fn table(&self, id: u32) -> Option<Arc<StagedTable>> {
        self.tables.get(&id).cloned()
    }

    fn memory_size(&self) -> usize {
        self.tables.values().map(|t| t.memory_size()).sum()
    }

    pub fn marks(&self) -> Marks {
        Marks(self.tables.iter().map(|(id, table)| (*id, table.mark())).collect())
    }

    pub fn rewind(&mut self, to: &Marks) {
        for (id, table) in &mut self.tables {
            Arc::make_mut(table).rewind(to.of(*id));
        }
        self.announced.retain(|step| step.mark <= to.of(step.table));
    }

    /// As many of a statement's rows as may still be announced.
    fn to_announce(&mut self, rows: &DeltaChunk) -> Option<DeltaChunk> {
        let count = rows.num_rows().min(ANNOUNCED_ROWS.saturating_sub(self.announced_rows));
        self.announced_rows += count;
        (count > 0).then(|| rows.slice(0, count))
    }

    /// The net changes, and nothing is staged any more.
    fn take(&mut self) -> Result<NetChanges, SqlError> {
        let kind = if self.lenient { DmlKind::Upsert } else { DmlKind::Change };
        let StagedWrites { tables, announced, .. } = std::mem::take(self);
        let mut changes = Vec::with_capacity(tables.len());
        for (id, table) in tables {
            let net = table.net()?;
            if !net.is_empty() {
                changes.push((RelationId(id), net, kind));
            }
        }
        Ok(NetChanges { changes, announced })
    }

    pub fn clear(&mut self) {
        *self = StagedWrites::default();
    }
}

impl Session {
    /// Takes a statement into the block. `None`: evaluate it again.
    pub async fn stage(
        &self,
        table: &Relation,
        evaluated: &Evaluated,
    ) -> Result<Option<u64>, SqlError> {
        let kind = evaluated.kind;
        let limit = self.shared.config.query_memory;
        let pending = {
            let mut writes = self.writes.lock();
            let delta = evaluated.delta.clone();
            if writes.memory_size() + delta.memory_size() > limit {
                return Err(too_much(limit));
            }
            let strict = DmlKind::Insert { on_conflict: InsertConflict::Error };
            writes.lenient |=
                (kind != strict && kind != DmlKind::Change) || evaluated.resolves_conflicts;
            let staged = match writes.tables.entry(table.id) {
                std::collections::btree_map::Entry::Occupied(at) => at.into_mut(),
                std::collections::btree_map::Entry::Vacant(at) => {
                    at.insert(Arc::new(StagedTable::new(table)?))
                }
            };
            staged.prepare(delta, kind)?
        };
        let keys = pending.keys()?;
        let found = if keys.value_offsets().len() <= 1 {
            Found::empty(&evaluated.delta.schema())
        } else {
            let epoch = self.read_epoch(&[RelationId(table.id)]).await?;
            let (input, values) = self.cluster().multi_get(table, epoch, keys).await?;
            Found { input, values, ..Found::empty(&evaluated.delta.schema()) }
        };
        let mut writes = self.writes.lock();
        let Some(staged) = writes.tables.get_mut(&table.id) else {
            return Err(SqlError::internal("the block's writes are gone"));
        };
        match Arc::make_mut(staged).stage(pending, &found) {
            Ok(rows) => {
                let mark = staged.mark();
                if let Some(announcing) = writes.to_announce(&evaluated.delta)
                    && let Some(announced) =
                        self.cluster().announce_staged(RelationId(table.id), &announcing)
                {
                    writes.announced.push(AnnouncedStep { table: table.id, mark, announced });
                }
                Ok(Some(rows))
            }
            Err(DmlError::Conflict) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Rows of a table that have these storage keys, as this session sees them: positions in `keys`,
    /// ascending, and the rows.
    pub async fn rows_at(
        &self,
        table: &Relation,
        keys: BinaryArray,
    ) -> Result<(UInt32Array, RecordBatch), SqlError> {
        let epoch = self.read_epoch(&[RelationId(table.id)]).await?;
        self.note_keys(table, epoch, &keys);
        let staged = self.writes.lock().table(table.id);
        let Some(staged) = staged else {
            return self.cluster().multi_get(table, epoch, keys).await;
        };
        let (own, own_rows) = staged.rows_at(&keys)?;
        let unwritten: Vec<u32> = (0..keys.value_offsets().len().saturating_sub(1) as u32)
            .filter(|&k| !staged.wrote(keys.value(k as usize)))
            .collect();
        let asked = UInt32Array::from(unwritten);
        let asked_keys = compute::take(&keys, &asked, None).map_err(rows::arrow_error)?;
        let asked_keys = arrow::array::AsArray::as_binary::<i32>(&asked_keys).clone();
        let (found, found_rows) = self.cluster().multi_get(table, epoch, asked_keys).await?;
        let mut order: Vec<(u32, usize)> = own
            .iter()
            .copied()
            .chain(found.values().iter().map(|&f| asked.value(f as usize)))
            .zip(0..)
            .collect();
        order.sort_unstable();
        let schema = own_rows.schema();
        let count = found_rows.num_rows();
        let found_rows = rows::batch(&schema, found_rows.columns().to_vec(), count)?;
        let all = rows::concat(&schema, &[own_rows, found_rows])?;
        let picked = UInt32Array::from_iter_values(order.iter().map(|(_, row)| *row as u32));
        let inputs = UInt32Array::from_iter_values(order.iter().map(|(key, _)| *key));
        Ok((inputs, rows::take(&all, &picked)?))
    }

    /// Commits what is staged, as one: every table at one epoch. Whatever comes of it, nothing is staged
    /// afterwards.
    pub async fn commit_writes(&self) -> Result<(), SqlError> {
        let NetChanges { mut changes, announced } = self.writes.lock().take()?;
        let written = changes.iter().map(|(table, delta, kind)| {
            let new_keys = *kind == DmlKind::Upsert;
            Written { table: table.0, delta, new_keys }
        });
        let written: Vec<Written<'_>> = written.collect();
        let Some(read) = self.read_set(&written)? else {
            return Err(crate::dml::too_many_conflicts());
        };
        if changes.is_empty() {
            return Ok(());
        }
        let (id, entered) = (self.shared.next_statement().await?, self.step.entered());
        let result = match changes.len() {
            1 if read.is_empty() => {
                let Some((table, delta, kind)) = changes.pop() else { return Ok(()) };
                self.cluster().apply_dml(table, id, delta, kind, entered).await?
            }
            _ => self.cluster().apply_transaction(id, changes, read, entered).await?,
        };
        match result {
            DmlResult::Applied { epoch, late, .. } => {
                announced.into_iter().for_each(|step| step.announced.committed(epoch));
                self.note_late(late);
                Ok(())
            }
            DmlResult::Conflict => Err(crate::dml::too_many_conflicts()),
        }
    }
}

fn too_much(limit: usize) -> SqlError {
    SqlError::new(
        SqlState::STATEMENT_TOO_COMPLEX,
        format!("the uncommitted writes of the transaction exceed {} MB", limit >> 20),
    )
    .with_hint(
        "Commit in several smaller transactions, or give the server a larger --memory-limit.",
    )
}
