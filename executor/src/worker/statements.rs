//! Statements on the tables of this worker, as sessions call them.
//!
//! A table whose job is being started again is waited for: to a session a recovery is a pause.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::{DeltaChunk, JobId, SqlError, SqlState};
use millrace_graph::lookahead::Place;
use millrace_rpc::call_error::RUNS_ELSEWHERE;
use millrace_rpc::version::StatementId;

use super::{Shared, Worker};
use crate::dml::load::LoadLimits;
use crate::dml::reads::TableRead;
use crate::dml::transaction::{self, Part, Premises};
use crate::dml::{
    Announced, DmlError, DmlKind, DmlOutcome, DmlStatement, EntryFlag, Load, LoadKind, Read,
    ReadSet, Sequencer, TableLocks,
};
use crate::memory::MemoryGovernor;
use crate::worker::job::Kind;

/// How long a statement waits for its table's job to run.
const TABLE_WAIT: Duration = Duration::from_secs(10);

impl Worker {
    /// Checks a statement, commits it, and returns when it is visible and durable.
    pub async fn apply_dml(
        &self,
        job: JobId,
        statement: DmlStatement,
    ) -> Result<DmlOutcome, DmlError> {
        let table = self.shared.table(job).await?;
        table.work.count(table.apply(statement)).await
    }

    /// Commits net changes of several tables at one epoch, or none of them, if what they were computed from is still
    /// so. `entered` is set when they have entered the tables.
    pub async fn apply_transaction(
        &self,
        id: StatementId,
        parts: Vec<(JobId, DeltaChunk, DmlKind)>,
        read: ReadSet,
        entered: &EntryFlag,
    ) -> Result<DmlOutcome, DmlError> {
        let mut found = Vec::with_capacity(parts.len());
        for (job, delta, kind) in parts {
            let table = self.shared.table(job).await?;
            let entered = entered.clone();
            let statement = DmlStatement { id, delta, kind, mark: None, entered, announced: None };
            found.push(Part { table, statement });
        }
        let premises = self.shared.premises(read).await?;
        // All tables are on one process: which of them it counts for does not matter.
        let work = found.first().map(|part| Arc::clone(&part.table.work));
        let commit = transaction::commit(id, found, premises);
        match work {
            Some(work) => work.count(commit).await,
            None => commit.await,
        }
    }

    /// Makes other statements of these tables wait, and waits for those that are under way: what is read from now on
    /// stays so until the locks are dropped.
    pub async fn lock_tables(&self, tables: &[JobId]) -> Result<TableLocks, DmlError> {
        let mut found = BTreeMap::new();
        for job in tables {
            found.insert(*job, self.shared.table(*job).await?);
        }
        TableLocks::settled(found).await
    }

    /// A statement whose rows come in pieces. Nothing is visible before [`Load::finish`].
    pub async fn begin_load(
        &self,
        job: JobId,
        id: StatementId,
        kind: LoadKind,
    ) -> Result<Load, DmlError> {
        let options = &self.shared.options;
        let limits =
            LoadLimits { spill_bytes: options.load_bytes, memory_bytes: options.statement_bytes };
        Load::begin(TableSource(Arc::clone(&self.shared)), job, id, kind, limits).await
    }

    /// Tells those that look ahead of rows of a table that are staged and may be committed. `None`: nobody wants to know.
    pub fn announce_staged(&self, job: JobId, rows: &DeltaChunk) -> Option<Announced> {
        let uncommitted = self.shared.changelogs.uncommitted();
        uncommitted.announce(job, Place::Entry, None, || vec![rows.clone()])
    }

    /// The first of `n` consecutive hidden row ids that no row of the table has or will get.
    pub async fn allocate_row_ids(&self, job: JobId, n: u64) -> Result<i64, SqlError> {
        Ok(self.shared.table(job).await?.allocate_row_ids(n))
    }
}

/// Where a load finds its table, also after the table's job was restarted.
pub struct TableSource(Arc<Shared>);

impl TableSource {
    pub(crate) async fn table(&self, job: JobId) -> Result<Arc<Sequencer>, SqlError> {
        self.0.table(job).await
    }

    pub(crate) async fn premises(&self, read: ReadSet) -> Result<Premises, SqlError> {
        self.0.premises(read).await
    }

    pub(crate) fn governor(&self) -> &Arc<MemoryGovernor> {
        &self.0.governor
    }
}

/// Whoever sent the statement finds the table's process in the log.
fn runs_elsewhere() -> SqlError {
    SqlError::new(SqlState::CANNOT_CONNECT_NOW, "the table's job runs on another process")
        .with_routine(RUNS_ELSEWHERE)
}

impl Shared {
    pub(super) async fn table(&self, id: JobId) -> Result<Arc<Sequencer>, SqlError> {
        let running = async {
            loop {
                let mut started = std::pin::pin!(self.started.notified());
                started.as_mut().enable();
                if let Some(found) = self.running_table(id) {
                    return found;
                }
                if self.elsewhere.as_ref().is_some_and(|e| e.is_placed_elsewhere(id)) {
                    return Err(runs_elsewhere());
                }
                started.await;
            }
        };
        let found = tokio::time::timeout(TABLE_WAIT, running).await;
        found.unwrap_or_else(|_| Err(self.why_not_running(id)))
    }

    /// Waits for what has entered a table here by now: returns when the log has it, or never will; false: the log has
    /// placed the table on another process, so that it never will as soon as it says so.
    pub(super) async fn settle(&self, id: JobId) -> Result<bool, SqlError> {
        loop {
            let table = match self.table(id).await {
                Ok(table) => table,
                Err(error) if error.routine == Some(RUNS_ELSEWHERE) => return Ok(false),
                Err(error) => return Err(error),
            };
            if table.settle().await {
                return Ok(true);
            }
            // When its next generation runs, the log takes nothing of this one any more.
        }
    }

    /// What was read, with the tables that it was read from.
    async fn premises(&self, read: ReadSet) -> Result<Premises, SqlError> {
        let mut reads = Vec::with_capacity(read.reads.len());
        for Read { table, epoch, rows } in read.reads {
            reads.push(TableRead { table: self.table(table).await?, epoch, rows });
        }
        Ok(Premises { reads, locks: read.locks })
    }

    /// What the job failed of, if it did.
    fn why_not_running(&self, id: JobId) -> SqlError {
        let failure = self.stopped.read().get(&id).and_then(|job| job.why.clone());
        let failure = failure.or_else(|| self.job(id).and_then(|job| job.failure()));
        failure.unwrap_or_else(|| {
            SqlError::new(SqlState::CANNOT_CONNECT_NOW, "the table's job is not running")
                .with_hint("SHOW JOBS tells why; the job is retried.")
        })
    }

    /// `None`: not now.
    fn running_table(&self, id: JobId) -> Option<Result<Arc<Sequencer>, SqlError>> {
        let job = self.job(id)?;
        match &job.kind {
            Kind::Table(table) if job.is_stopped() || table.sequencer.is_stopped() => None,
            Kind::Table(table) => Some(Ok(Arc::clone(&table.sequencer))),
            _ => Some(Err(SqlError::internal("a statement on a relation that is not a table"))),
        }
    }
}
