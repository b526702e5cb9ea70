//! BEGIN, COMMIT, ROLLBACK, savepoints.
//!
//! A block groups reads; each of its statements reads the newest epoch. SET inside it is undone by
//! ROLLBACK. Writes in a block are refused until they can be committed as one.

use millrace_common::settings::SessionSettings;
use millrace_common::{SqlError, SqlState};

use super::Session;

/// The transaction block of a session.
pub enum Block {
    None,
    Open { settings: Box<SessionSettings>, savepoints: Vec<(String, SessionSettings)> },
    Failed { settings: Box<SessionSettings>, savepoints: Vec<(String, SessionSettings)> },
}

impl Session {
    pub fn begin(&mut self) -> String {
        match self.block {
            Block::None => {
                self.block = Block::Open {
                    settings: Box::new(self.settings.clone()),
                    savepoints: Vec::new(),
                };
            }
            _ => self.notice(
                "WARNING",
                SqlState::ACTIVE_SQL_TRANSACTION,
                "there is already a transaction in progress",
            ),
        }
        "BEGIN".to_owned()
    }

    pub fn commit(&mut self) -> String {
        match std::mem::replace(&mut self.block, Block::None) {
            Block::None => {
                self.notice(
                    "WARNING",
                    SqlState::NO_ACTIVE_SQL_TRANSACTION,
                    "there is no transaction in progress",
                );
                "COMMIT".to_owned()
            }
            Block::Open { .. } => {
                self.end_locals();
                self.end_block();
                "COMMIT".to_owned()
            }
            Block::Failed { settings, .. } => {
                self.settings = *settings;
                self.end_block();
                "ROLLBACK".to_owned()
            }
        }
    }

    pub fn rollback(&mut self) -> String {
        match std::mem::replace(&mut self.block, Block::None) {
            Block::None => {
                self.notice(
                    "WARNING",
                    SqlState::NO_ACTIVE_SQL_TRANSACTION,
                    "there is no transaction in progress",
                );
            }
            Block::Open { settings, .. } | Block::Failed { settings, .. } => {
                self.settings = *settings;
                self.end_block();
            }
        }
        "ROLLBACK".to_owned()
    }

    /// Portals and cursors without HOLD end with their transaction.
    fn end_block(&mut self) {
        self.locals.clear();
        self.portals.retain(|_, p| p.hold);
    }

    /// An error inside a block fails it.
    pub fn fail_block(&mut self) {
        self.block = match std::mem::replace(&mut self.block, Block::None) {
            Block::Open { settings, savepoints } => Block::Failed { settings, savepoints },
            other => other,
        };
    }

    pub fn in_block(&self) -> bool {
        !matches!(self.block, Block::None)
    }

    pub fn savepoint(&mut self, name: String) -> Result<String, SqlError> {
        let settings = self.settings.clone();
        match &mut self.block {
            Block::Open { savepoints, .. } => {
                savepoints.push((name, settings));
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
                Ok("RELEASE".to_owned())
            }
            _ => Err(needs_block("RELEASE SAVEPOINT")),
        }
    }

    pub fn rollback_to(&mut self, name: &str) -> Result<String, SqlError> {
        match std::mem::replace(&mut self.block, Block::None) {
            Block::None => Err(needs_block("ROLLBACK TO SAVEPOINT")),
            Block::Open { settings, mut savepoints }
            | Block::Failed { settings, mut savepoints } => {
                let found = find(&savepoints, name);
                if let Ok(at) = found {
                    self.settings = savepoints[at].1.clone();
                    savepoints.truncate(at + 1);
                    self.block = Block::Open { settings, savepoints };
                } else {
                    self.block = Block::Failed { settings, savepoints };
                }
                found.map(|_| "ROLLBACK".to_owned())
            }
        }
    }

    /// Refuses what would write inside a block.
    pub fn refuse_in_block(&self, what: &str) -> Result<(), SqlError> {
        if self.in_block() {
            return Err(SqlError::unsupported(format!("{what} in a transaction block")).with_hint(
                "Run it outside BEGIN … COMMIT; there every statement commits by itself.",
            ));
        }
        for name in ["transaction_read_only", "default_transaction_read_only"] {
            if self.settings.bool(name) {
                return Err(SqlError::new(
                    SqlState("25006"),
                    format!("cannot execute {what} in a read-only transaction"),
                ));
            }
        }
        Ok(())
    }
}

fn find(savepoints: &[(String, SessionSettings)], name: &str) -> Result<usize, SqlError> {
    savepoints.iter().rposition(|(n, _)| n == name).ok_or_else(|| {
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
