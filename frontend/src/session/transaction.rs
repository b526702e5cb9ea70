//! BEGIN, COMMIT, ROLLBACK, savepoints.
//!
//! Writes of a block are staged (see [`super::writes`]) and committed as one. Under READ COMMITTED each
//! statement of a block reads the newest epoch; under REPEATABLE READ all of them read the epoch of the
//! first one. Either way a row that another session has changed since the block read it fails the
//! COMMIT with 40001, so that no update is lost to a stale row. SET inside a block is undone by ROLLBACK.
//!
//! The statements of one query string, and those of the extended protocol before one Sync, are an implicit block; a
//! definition among them commits what came before it.

use std::sync::Arc;

use millrace_common::{SqlError, SqlState};
use millrace_meta::advisory::TransactionHolds;
use sqlparser::ast::{TransactionAccessMode, TransactionMode};

use super::Session;
use super::settings::Settings;
use super::writes::Marks;
use crate::server::Shared;

/// A savepoint: what ROLLBACK TO goes back to.
pub struct Savepoint {
    name: String,
    settings: Settings,
    writes: Marks,
    /// Settings that SET LOCAL hid by then.
    locals: Vec<(String, String)>,
    /// The advisory locks of the transaction.
    locks: TransactionHolds,
}

/// See [`Session::transaction_locks`].
pub(super) struct TransactionLocks {
    shared: Arc<Shared>,
    pid: i32,
}

impl Drop for TransactionLocks {
    fn drop(&mut self) {
        self.shared.locks.release_transaction(self.pid);
    }
}

/// The transaction block of a session.
pub enum Block {
    None,
    /// Statements of one query string, or before one Sync, without BEGIN.
    Implicit,
    Open {
        settings: Box<Settings>,
        savepoints: Vec<Savepoint>,
    },
    Failed {
        settings: Box<Settings>,
        savepoints: Vec<Savepoint>,
    },
}

impl Session {
    pub fn begin(&mut self, modes: &[TransactionMode]) -> Result<String, SqlError> {
        match self.block {
            Block::None | Block::Implicit => {
                let before = self.before_string.take();
                let mut settings = before.unwrap_or_else(|| Box::new(self.settings.clone()));
                for (name, before) in &self.locals {
                    // The value was this setting's before, so it is one it takes.
                    let _ = settings.set(name, before);
                }
                self.block = Block::Open { settings, savepoints: Vec::new() };
                self.queried = false;
                let level = self.settings.get("default_transaction_isolation")?.to_owned();
                if self.settings.get("transaction_isolation")? != level {
                    self.set_local("transaction_isolation", &level)?;
                }
                if let Err(e) = self.set_modes(modes) {
                    self.unbegin();
                    return Err(e);
                }
            }
            _ => self.notice(
                "WARNING",
                SqlState::ACTIVE_SQL_TRANSACTION,
                "there is already a transaction in progress",
            ),
        }
        Ok("BEGIN".to_owned())
    }

    /// A block whose BEGIN fails has not begun: what came before it in the same string is undone with it.
    fn unbegin(&mut self) {
        self.block = match std::mem::replace(&mut self.block, Block::None) {
            Block::Open { settings, .. } => {
                self.before_string = Some(settings);
                Block::Implicit
            }
            other => other,
        };
    }

    /// What AND CHAIN takes over into the next block: the settings that BEGIN can say.
    pub fn chained(&self, statement: &str) -> Result<Vec<(&'static str, String)>, SqlError> {
        if !self.in_block() {
            return Err(SqlError::new(
                SqlState::NO_ACTIVE_SQL_TRANSACTION,
                format!("{statement} can only be used in transaction blocks"),
            ));
        }
        let names = ["transaction_isolation", "transaction_read_only"];
        names.into_iter().map(|n| Ok((n, self.settings.get(n)?.to_owned()))).collect()
    }

    /// Begins the block of an AND CHAIN; `None`: there is none.
    pub fn begin_chained(
        &mut self,
        settings: Option<Vec<(&'static str, String)>>,
    ) -> Result<(), SqlError> {
        let Some(settings) = settings else { return Ok(()) };
        self.begin(&[])?;
        settings.iter().try_for_each(|(name, value)| self.set_local(name, value))
    }

    /// What BEGIN and SET TRANSACTION say of the block.
    pub fn set_modes(&mut self, modes: &[TransactionMode]) -> Result<(), SqlError> {
        for mode in modes {
            match mode {
                TransactionMode::IsolationLevel(level) => {
                    let level = level.to_string().to_lowercase();
                    if self.settings.get("transaction_isolation")? != level {
                        self.refuse_new_level()?;
                        self.set_local("transaction_isolation", &level)?;
                    }
                }
                TransactionMode::AccessMode(access) => {
                    let read_only = matches!(access, TransactionAccessMode::ReadOnly);
                    let value = if read_only { "on" } else { "off" };
                    self.set_local("transaction_read_only", value)?;
                }
            }
        }
        Ok(())
    }

    /// The level of a block is chosen before its first query and savepoint.
    fn refuse_new_level(&self) -> Result<(), SqlError> {
        let refused = |when: &str| {
            let message = format!("SET TRANSACTION ISOLATION LEVEL must {when}");
            Err(SqlError::new(SqlState::ACTIVE_SQL_TRANSACTION, message))
        };
        let read = self.queried || self.frozen.lock().is_some();
        if read || !self.writes.lock().marks().is_empty() {
            return refused("be called before any query");
        }
        match &self.block {
            Block::Open { savepoints, .. } if !savepoints.is_empty() => {
                refused("not be called in a subtransaction")
            }
            _ => Ok(()),
        }
    }

    fn set_local(&mut self, name: &str, value: &str) -> Result<(), SqlError> {
        if !self.locals.iter().any(|(n, _)| n == name) {
            let before = self.settings.get(name)?.to_owned();
            self.locals.push((name.to_owned(), before));
        }
        self.set_value(name, value)
    }

    /// Ends the block, committing its writes. On an error nothing of it is committed, unless the error
    /// says that the outcome is unknown.
    pub async fn commit(&mut self) -> Result<String, SqlError> {
        self.transaction_at = self.statement_at;
        match std::mem::replace(&mut self.block, Block::None) {
            block @ (Block::None | Block::Implicit) => {
                self.notice(
                    "WARNING",
                    SqlState::NO_ACTIVE_SQL_TRANSACTION,
                    "there is no transaction in progress",
                );
                self.end_locals();
                self.before_string = None;
                if matches!(block, Block::Implicit) {
                    let _locks = self.transaction_locks();
                    self.commit_block().await?;
                }
                Ok("COMMIT".to_owned())
            }
            Block::Open { settings, .. } => {
                let _locks = self.transaction_locks();
                self.end_locals();
                self.end_block();
                self.finish_reading(settings).await?;
                self.commit_block().await?;
                Ok("COMMIT".to_owned())
            }
            Block::Failed { settings, .. } => {
                self.roll_back_to(*settings);
                Ok("ROLLBACK".to_owned())
            }
        }
    }

    /// Reads what its cursors WITH HOLD have left, at the end of a block. What fails there, or is cut off, takes back all
    /// of the block, as what fails in a string of statements does.
    async fn finish_reading(&mut self, settings: Box<Settings>) -> Result<(), SqlError> {
        (self.block, self.before_string) = (Block::Implicit, Some(settings));
        let read = self.store_cursors().await;
        match read {
            Ok(()) => (self.block, self.before_string) = (Block::None, None),
            Err(_) => self.fail_block(),
        }
        read
    }

    /// Commits what is staged; the block's cursors WITH HOLD stay, if it is.
    async fn commit_block(&mut self) -> Result<(), SqlError> {
        let committed = match self.shared.locks.check(self.pid) {
            Ok(()) => self.commit_writes().await,
            Err(lost) => {
                self.writes.lock().clear();
                Err(lost)
            }
        };
        match committed {
            Ok(()) => self.settle_cursors(0),
            Err(_) => self.undo_cursors(0),
        }
        self.notice_late();
        committed
    }

    pub fn rollback(&mut self) -> String {
        self.transaction_at = self.statement_at;
        match std::mem::replace(&mut self.block, Block::None) {
            Block::None | Block::Implicit => {
                self.notice(
                    "WARNING",
                    SqlState::NO_ACTIVE_SQL_TRANSACTION,
                    "there is no transaction in progress",
                );
                self.end_locals();
                self.undo_string();
                self.writes.lock().clear();
                self.undo_cursors(0);
                drop(self.transaction_locks());
            }
            Block::Open { settings, .. } | Block::Failed { settings, .. } => {
                self.roll_back_to(*settings);
            }
        }
        "ROLLBACK".to_owned()
    }

    /// The transaction's advisory locks, which are free when this is dropped: also where a commit is cut off.
    pub(super) fn transaction_locks(&self) -> TransactionLocks {
        TransactionLocks { shared: self.shared.clone(), pid: self.pid }
    }

    /// What SET has set since the string began, or since what was committed of it.
    fn undo_string(&mut self) {
        if let Some(before) = self.before_string.take() {
            self.restore(*before);
        }
    }

    fn roll_back_to(&mut self, settings: Settings) {
        self.restore(settings);
        self.writes.lock().clear();
        drop(self.transaction_locks());
        self.undo_cursors(0);
        self.end_block();
    }

    /// How deep a cursor is that is declared now: see [`super::prepare::Declared`].
    pub(super) fn depth(&self) -> usize {
        match &self.block {
            Block::None => 0,
            Block::Implicit => 1,
            Block::Open { savepoints, .. } | Block::Failed { savepoints, .. } => {
                1 + savepoints.len()
            }
        }
    }

    /// Cursors that are deeper go with what is rolled back, WITH HOLD too: they may show what has never been.
    fn undo_cursors(&mut self, depth: usize) {
        self.portals.retain(|_, p| p.declared.as_ref().is_none_or(|d| d.depth <= depth));
    }

    /// Cursors that are deeper belong to what is around it from now on.
    fn settle_cursors(&mut self, depth: usize) {
        for declared in self.portals.values_mut().filter_map(|p| p.declared.as_mut()) {
            declared.depth = declared.depth.min(depth);
        }
    }

    /// Portals and cursors without HOLD end with their transaction.
    fn end_block(&mut self) {
        self.locals.clear();
        self.queried = false;
        *self.frozen.lock() = None;
        self.portals.retain(|_, p| p.hold);
    }

    /// An error inside a block fails it.
    pub fn fail_block(&mut self) {
        self.block = match std::mem::replace(&mut self.block, Block::None) {
            Block::Open { settings, savepoints } => {
                // A savepoint may yet be gone back to, with what was locked before it.
                match savepoints.last() {
                    Some(savepoint) => self.shared.locks.back_to(self.pid, &savepoint.locks),
                    None => drop(self.transaction_locks()),
                }
                Block::Failed { settings, savepoints }
            }
            Block::Implicit => {
                self.undo_string();
                self.writes.lock().clear();
                self.undo_cursors(0);
                drop(self.transaction_locks());
                Block::None
            }
            other => other,
        };
    }

    /// Between BEGIN and its end.
    pub fn in_block(&self) -> bool {
        matches!(self.block, Block::Open { .. } | Block::Failed { .. })
    }

    /// Whether a statement is one of several that are committed together.
    pub fn in_transaction(&self) -> bool {
        matches!(self.block, Block::Open { .. } | Block::Implicit)
    }

    /// Whether writes wait for a commit. They need not where the statement is the last of its transaction, and the
    /// only one that writes.
    pub fn stages_writes(&self) -> bool {
        match self.block {
            Block::None | Block::Failed { .. } => false,
            Block::Open { .. } => true,
            Block::Implicit => {
                !self.last_of_many || self.in_parts() || !self.writes.lock().marks().is_empty()
            }
        }
    }

    /// The next statement is one of several, of a query string or before one Sync.
    pub fn begin_implicit(&mut self) {
        if matches!(self.block, Block::None) {
            self.block = Block::Implicit;
            self.before_string = Some(Box::new(self.settings.clone()));
        }
    }

    /// Commits what statements without BEGIN have written so far. What fails, or is cut off, is undone by
    /// [`Session::fail_block`].
    pub async fn commit_implicit(&mut self) -> Result<(), SqlError> {
        if matches!(self.block, Block::Implicit) {
            let _locks = self.transaction_locks();
            self.commit_block().await?;
            self.block = Block::None;
            self.before_string = None;
        }
        Ok(())
    }

    /// A statement has committed what it wrote by itself: nothing is left to be committed of an implicit block.
    pub fn end_implicit(&mut self) {
        if matches!(self.block, Block::Implicit) && self.writes.lock().marks().is_empty() {
            drop(self.transaction_locks());
            self.settle_cursors(0);
            self.block = Block::None;
            self.before_string = None;
        }
    }

    /// Whether the block reads one epoch throughout.
    pub fn freezes_snapshot(&self) -> bool {
        let level = self.settings.get("transaction_isolation").unwrap_or_default();
        self.in_block() && matches!(level, "repeatable read" | "serializable")
    }

    pub fn savepoint(&mut self, name: String) -> Result<String, SqlError> {
        let savepoint = Savepoint {
            name,
            settings: self.settings.clone(),
            writes: self.writes.lock().marks(),
            locals: self.locals.clone(),
            locks: self.shared.locks.transaction_holds(self.pid),
        };
        match &mut self.block {
            Block::Open { savepoints, .. } => {
                savepoints.push(savepoint);
                Ok("SAVEPOINT".to_owned())
            }
            _ => Err(needs_block("SAVEPOINT")),
        }
    }

    pub fn release(&mut self, name: &str) -> Result<String, SqlError> {
        match &mut self.block {
            Block::Open { savepoints, .. } => {
                let at = find(savepoints, name)?;
                savepoints.truncate(at);
                self.settle_cursors(at + 1);
                Ok("RELEASE".to_owned())
            }
            _ => Err(needs_block("RELEASE SAVEPOINT")),
        }
    }

    pub fn rollback_to(&mut self, name: &str) -> Result<String, SqlError> {
        match std::mem::replace(&mut self.block, Block::None) {
            other @ (Block::None | Block::Implicit) => {
                self.block = other;
                Err(needs_block("ROLLBACK TO SAVEPOINT"))
            }
            Block::Open { settings, mut savepoints }
            | Block::Failed { settings, mut savepoints } => {
                let found = find(&savepoints, name);
                if let Ok(at) = found {
                    let savepoint = &savepoints[at];
                    self.restore(savepoint.settings.clone());
                    self.locals = savepoint.locals.clone();
                    self.writes.lock().rewind(&savepoint.writes);
                    self.shared.locks.back_to(self.pid, &savepoint.locks);
                    savepoints.truncate(at + 1);
                    self.undo_cursors(at + 1);
                    self.block = Block::Open { settings, savepoints };
                } else {
                    self.block = Block::Failed { settings, savepoints };
                }
                found.map(|_| "ROLLBACK".to_owned())
            }
        }
    }

    /// Refuses what cannot be rolled back inside a block.
    pub fn refuse_in_block(&self, what: &str) -> Result<(), SqlError> {
        if self.in_block() {
            return Err(SqlError::unsupported(format!("{what} in a transaction block")).with_hint(
                "Run it outside BEGIN … COMMIT; there every statement commits by itself.",
            ));
        }
        self.check_writable(what)
    }

    /// Refuses writes where they are not allowed.
    pub fn check_writable(&self, what: &str) -> Result<(), SqlError> {
        for name in ["transaction_read_only", "default_transaction_read_only"] {
            if self.settings.bool(name) {
                return Err(SqlError::new(
                    SqlState("25006"),
                    format!("cannot execute {what} in a read-only transaction"),
                ));
            }
        }
        if self.in_block() && self.settings.get("transaction_isolation")? == "serializable" {
            return Err(SqlError::unsupported("a write in a SERIALIZABLE transaction")
                .with_hint("Use REPEATABLE READ, and retry on SQLSTATE 40001."));
        }
        Ok(())
    }
}

fn find(savepoints: &[Savepoint], name: &str) -> Result<usize, SqlError> {
    savepoints.iter().rposition(|s| s.name == name).ok_or_else(|| {
        SqlError::new(SqlState::INVALID_SAVEPOINT, format!("savepoint \"{name}\" does not exist"))
    })
}

fn needs_block(what: &str) -> SqlError {
    SqlError::new(
        SqlState::NO_ACTIVE_SQL_TRANSACTION,
        format!("{what} can only be used in transaction blocks"),
    )
}

/// 25P02, for everything but the end of a failed block.
pub fn aborted() -> SqlError {
    SqlError::new(
        SqlState::IN_FAILED_SQL_TRANSACTION,
        "current transaction is aborted, commands ignored until end of transaction block",
    )
}
