//! A statement that comes in pieces (COPY, INSERT … SELECT, and large UPDATEs and DELETEs): invisible
//! until it is finished, and all or nothing (docs/design.md §4, "Statements").
//!
//! Small loads are kept in memory and enter as any statement does. Beyond a threshold rows are sorted
//! and written as runs that no version names; memory stays bounded by the threshold, whatever comes.
//! At the end keys are checked against each other and against the table, in batches, and the runs are
//! linked into the table's version by one commit. Dropping the handle deletes them.

use std::sync::Arc;

use millrace_common::{DeltaChunk, Epoch, JobId, SqlError, SqlState, crash};
use millrace_rpc::version::StatementId;
use millrace_storage::StorageError;
use millrace_storage::stage::{Repeated, Staging};

use super::check::Keyed;
use super::reads::{ReadRows, TableRead};
use super::transaction::{self, Part, Premises};
use super::{
    Announced, DmlError, DmlKind, DmlOutcome, DmlStatement, EntryFlag, InsertConflict, LoadKind,
    ReadSet, Sequencer, TableLocks, resolve,
};
use crate::error::ExecError;
use crate::memory::{MemoryClass, Reservation};
use crate::worker::TableSource;

/// Times a load is entered again because its table's job was restarted.
const MAX_ATTEMPTS: usize = 8;

/// What becomes of staged rows with the same key.
fn repeated(kind: LoadKind) -> Repeated {
    match kind {
        LoadKind::Insert { on_conflict: InsertConflict::Nothing } => Repeated::First,
        LoadKind::Insert { on_conflict: InsertConflict::Overwrite } => Repeated::Last,
        _ => Repeated::Add,
    }
}

/// Bounds of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadLimits {
    /// Bytes kept in memory before rows are written as runs.
    pub spill_bytes: usize,
    /// Bytes that loads which must stay in memory may hold.
    pub memory_bytes: usize,
}

/// A load under way.
pub struct Load {
    tables: TableSource,
    job: JobId,
    table: Arc<Sequencer>,
    id: StatementId,
    kind: LoadKind,
    chunks: Vec<DeltaChunk>,
    staging: Option<Staging>,
    /// Of a `Change`: rows to delete.
    removed: Option<Staging>,
    rows: u64,
    /// Rows that have gone to `staging`.
    staged: usize,
    row_count: i64,
    account: Reservation,
    limits: LoadLimits,
    /// What its rows were computed from.
    read: ReadSet,
    announced: AnnouncedRows,
}

/// Rows that were announced while they were staged.
struct AnnouncedRows {
    with: Announced,
    bytes: usize,
    /// None of its rows is missing.
    are_all: bool,
}

impl Default for AnnouncedRows {
    fn default() -> AnnouncedRows {
        AnnouncedRows { with: Announced::default(), bytes: 0, are_all: true }
    }
}

impl Load {
    pub(crate) async fn begin(
        tables: TableSource,
        job: JobId,
        id: StatementId,
        kind: LoadKind,
        limits: LoadLimits,
    ) -> Result<Load, DmlError> {
        let table = tables.table(job).await?;
        let account = tables.governor().account(MemoryClass::Statement);
        Ok(Load {
            tables,
            job,
            table,
            id,
            kind,
            chunks: Vec::new(),
            staging: None,
            removed: None,
            rows: 0,
            staged: 0,
            row_count: 0,
            account,
            limits,
            read: ReadSet::default(),
            announced: AnnouncedRows::default(),
        })
    }

    /// What the rows were computed from: if it has changed by the time they enter, that is a conflict.
    pub fn rest_on(&mut self, read: ReadSet) {
        self.read = read;
    }

    /// The epoch that the rows which are replaced were read at.
    pub fn read_at(&mut self, epoch: Epoch) {
        if let LoadKind::Replace { read_at } | LoadKind::Change { read_at, .. } = &mut self.kind {
            *read_at = epoch;
        }
    }

    /// Whether rows have gone to the store: the load can no longer be turned into a plain statement.
    pub fn has_spilled(&self) -> bool {
        self.staging.is_some()
    }

    /// Adds rows: full rows of the table, hidden columns included.
    pub async fn append(&mut self, chunk: DeltaChunk) -> Result<(), DmlError> {
        if chunk.is_empty() {
            return Ok(());
        }
        self.rows += chunk.num_rows() as u64;
        self.announce(&chunk);
        if self.staging.is_some() {
            let work = Arc::clone(&self.table.work);
            return work.count(self.stage(chunk)).await;
        }
        self.account.grow(chunk.memory_size());
        self.chunks.push(chunk);
        let replaces = self.kind.read_at().is_some();
        if self.account.bytes() <= self.limits.spill_bytes && !replaces {
            return Ok(());
        }
        if !self.may_spill() {
            return self.check_memory();
        }
        self.staging = Some(self.table.stage(repeated(self.kind)).map_err(failed)?);
        if matches!(self.kind, LoadKind::Change { .. }) {
            self.removed = Some(self.table.stage(Repeated::Add).map_err(failed)?);
        }
        for chunk in std::mem::take(&mut self.chunks) {
            self.stage(chunk).await?;
        }
        Ok(())
    }

    /// Tells those that look ahead of rows. Of a large load only the first ones: it commits all at once, and caches would
    /// not keep more until then.
    fn announce(&mut self, chunk: &DeltaChunk) {
        let announced = &mut self.announced;
        announced.bytes += chunk.memory_size();
        let fits = announced.bytes <= self.limits.spill_bytes;
        match fits.then(|| self.table.announce(chunk)).flatten() {
            Some(more) => announced.with.join(more),
            None => announced.are_all = false,
        }
    }

    /// Which rows are late is decided in memory.
    fn may_spill(&self) -> bool {
        !self.table.has_watermark()
    }

    fn check_memory(&self) -> Result<(), DmlError> {
        if self.account.bytes() <= self.limits.memory_bytes {
            return Ok(());
        }
        let message = format!("the statement's rows exceed {} MB", self.limits.memory_bytes >> 20);
        Err(SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, message)
            .with_hint("Load the data in several smaller statements.")
            .into())
    }

    async fn stage(&mut self, chunk: DeltaChunk) -> Result<(), DmlError> {
        let failed = |e: StorageError| failed(e.into());
        if let Some(removed) = &mut self.removed {
            let (old, new) = split(&chunk).map_err(|e| failed(e.into()))?;
            self.row_count += new.num_rows() as i64 - old.num_rows() as i64;
            let old = self.table.keyed(old).map_err(|e| DmlError::Sql(e.into_sql()))?;
            removed.write(old.keys, old.delta.weights, old.delta.batch).map_err(failed)?;
            if removed.memory_size() > self.limits.spill_bytes {
                removed.spill().await.map_err(failed)?;
            }
            return self.write(new).await;
        }
        let weights = &chunk.weights;
        let removed = weights.as_ref().map_or(0, |w| w.values().iter().filter(|w| **w < 0).count());
        self.row_count += match self.kind {
            LoadKind::Insert { .. } => chunk.num_rows() as i64,
            _ => -(removed as i64),
        };
        self.write(chunk).await
    }

    async fn write(&mut self, chunk: DeltaChunk) -> Result<(), DmlError> {
        let failed = |e: StorageError| failed(e.into());
        let keyed = self.table.keyed(chunk).map_err(|e| DmlError::Sql(e.into_sql()))?;
        if let Some(repeated) = self.repeated(&keyed) {
            return Err(repeated);
        }
        self.staged += keyed.delta.num_rows();
        let Some(staging) = &mut self.staging else { return Ok(()) };
        staging.write(keyed.keys, keyed.delta.weights, keyed.delta.batch).map_err(failed)?;
        if staging.memory_size() > self.limits.spill_bytes {
            staging.spill().await.map_err(failed)?;
        }
        let removed = self.removed.as_ref().map_or(0, Staging::memory_size);
        self.account.set(staging.memory_size() + removed);
        Ok(())
    }

    /// A key that two of a chunk's new rows have: once they are sorted nobody knows which rows they were.
    fn repeated(&self, keyed: &Keyed) -> Option<DmlError> {
        let fails = self.kind == LoadKind::Insert { on_conflict: InsertConflict::Error };
        if !fails || !self.table.has_primary_key() {
            return None;
        }
        let row = keyed.first_repeat()?;
        Some(self.table.duplicate(&keyed.delta.batch, row, Some(self.staged + row)))
    }

    /// Checks and commits all rows as one statement. `entered` is set when they have entered the table.
    pub async fn finish(mut self, entered: &EntryFlag) -> Result<DmlOutcome, DmlError> {
        let announced = std::mem::take(&mut self.announced);
        let with = announced.with.clone();
        let work = Arc::clone(&self.table.work);
        let commit = self.commit(entered, announced.are_all.then_some(announced.with));
        let outcome = work.count(commit).await?;
        with.committed(outcome.epoch);
        Ok(outcome)
    }

    /// `announced`: of all its rows.
    async fn commit(
        mut self,
        entered: &EntryFlag,
        announced: Option<Announced>,
    ) -> Result<DmlOutcome, DmlError> {
        let Some(mut staging) = self.staging.take() else {
            return self.finish_in_memory(entered, announced).await;
        };
        staging.spill().await.map_err(|e| failed(e.into()))?;
        if let Some(removed) = &mut self.removed {
            removed.spill().await.map_err(|e| failed(e.into()))?;
        }
        self.account.set(0);
        crash::point("load-before-link");
        let alone = self.stands_alone();
        for _ in 0..MAX_ATTEMPTS {
            match self.enter(&mut staging, entered).await {
                // A restarted job: the rows are where they were.
                Err(DmlError::Conflict) if alone => {
                    self.table = self.tables.table(self.job).await?;
                }
                other => return other,
            }
        }
        Err(DmlError::Conflict)
    }

    async fn finish_in_memory(
        mut self,
        entered: &EntryFlag,
        announced: Option<Announced>,
    ) -> Result<DmlOutcome, DmlError> {
        let LoadKind::Insert { on_conflict } = self.kind else {
            return Err(SqlError::internal("a small load that replaces rows").into());
        };
        let chunks = std::mem::take(&mut self.chunks);
        let delta = DeltaChunk::concat(self.table.schema(), &chunks)
            .map_err(|e| DmlError::Sql(SqlError::internal(e.to_string())))?;
        drop(chunks);
        let id = self.id;
        let statement = |delta: DeltaChunk| DmlStatement {
            id,
            delta,
            kind: DmlKind::Insert { on_conflict },
            mark: None,
            entered: entered.clone(),
            announced: announced.clone(),
        };
        if !self.read.is_empty() {
            let statement = statement(delta);
            let premises = self.tables.premises(std::mem::take(&mut self.read)).await?;
            let part = Part { table: Arc::clone(&self.table), statement };
            return transaction::commit(self.id, vec![part], premises).await;
        }
        for _ in 0..MAX_ATTEMPTS {
            match self.table.apply(statement(delta.clone())).await {
                Err(DmlError::Conflict) => self.table = self.tables.table(self.job).await?,
                other => return other,
            }
        }
        Err(DmlError::Conflict)
    }

    /// Links the staged rows, alone in their epoch.
    async fn enter(
        &mut self,
        staging: &mut Staging,
        entered: &EntryFlag,
    ) -> Result<DmlOutcome, DmlError> {
        const NEW_ROWS: LoadKind = LoadKind::Insert { on_conflict: InsertConflict::Error };
        let checked = match self.kind {
            NEW_ROWS => self.table.check_before(staging).await?,
            _ => None,
        };
        let turns = self.turns().await?;
        // Before its runs count as ones that the log may come to name.
        self.table.check_frontend(self.id)?;
        let mut rows = (self.rows, self.row_count);
        let runs = match self.kind {
            NEW_ROWS => {
                self.table.check_staged(staging, checked.as_ref()).await?;
                // Nobody has to remember what this writes.
                drop(checked);
                staging.keep()
            }
            LoadKind::Insert { on_conflict } if self.table.has_primary_key() => {
                let spill_bytes = self.limits.spill_bytes;
                let mut resolved =
                    resolve::conflicts(&self.table, staging, on_conflict, spill_bytes).await?;
                rows.1 = resolved.row_count;
                if on_conflict == InsertConflict::Nothing {
                    rows.0 = resolved.kept;
                }
                resolved.staging.keep()
            }
            LoadKind::Change { on_repeat, .. } => {
                let Some(removed) = &self.removed else {
                    return Err(SqlError::internal("a change without its old rows").into());
                };
                let spill_bytes = self.limits.spill_bytes;
                let moved = resolve::moves(&self.table, removed, staging, on_repeat, spill_bytes);
                let mut gone = moved.await?;
                let mut runs = gone.keep();
                runs.extend(staging.keep());
                runs
            }
            _ => staging.keep(),
        };
        let fate = self.table.enter_load(self.id, runs, rows.1, entered)?;
        let epoch = Sequencer::committed_with_turns(fate, turns).await?;
        Ok(DmlOutcome { epoch, rows_affected: rows.0, kept: None, late: 0 })
    }

    /// Whether nothing but its own rows decides what it does.
    fn stands_alone(&self) -> bool {
        matches!(self.kind, LoadKind::Insert { .. }) && self.read.is_empty()
    }

    /// The turns of its table and of those that were read, when all that it rests on is still so.
    async fn turns(&mut self) -> Result<TableLocks, DmlError> {
        let Premises { reads, locks } =
            self.tables.premises(std::mem::take(&mut self.read)).await?;
        let own = (self.table.job, Arc::clone(&self.table));
        let read = reads.iter().map(|read| (read.table.job, Arc::clone(&read.table)));
        let tables = read.chain([own]).collect();
        let turns = match locks {
            Some(locks) => locks.with(&tables)?,
            None => TableLocks::take(tables).await,
        };
        self.table.wait_until_quiescent().await?;
        let replaced = |epoch| self.table.changed_since(epoch, &ReadRows::All);
        if self.kind.read_at().is_some_and(replaced) || !reads.iter().all(TableRead::holds) {
            return Err(DmlError::Conflict);
        }
        Ok(turns)
    }

    /// Forgets all rows. The same as dropping it.
    pub fn abort(self) {}
}

/// Old rows and new rows of a change.
fn split(chunk: &DeltaChunk) -> Result<(DeltaChunk, DeltaChunk), arrow::error::ArrowError> {
    let rows = 0..chunk.num_rows() as u32;
    let (old, new): (Vec<u32>, Vec<u32>) = rows.partition(|&i| chunk.weight(i as usize) < 0);
    Ok((chunk.take(&old.into())?, chunk.take(&new.into())?))
}

fn failed(e: ExecError) -> DmlError {
    DmlError::Sql(e.into_sql())
}
