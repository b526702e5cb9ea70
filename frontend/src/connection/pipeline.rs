//! Statements of the extended protocol that come before one Sync: they are one transaction, which Sync commits; where
//! it stands right behind the last of them that one is complete when all are committed, as in a query string. So an error
//! of the commit is the answer to a statement: libpq's pipelines do not expect one to Sync.
//!
//! A statement that has Sync right behind it and nothing before it is by itself: it may be of any size, and is tried
//! again on a conflict. So the message behind a statement is looked at before the statement runs. A client that
//! sends no more waits for no answer either: without Flush or Sync it is not owed one.
//!
//! Source: PostgreSQL 15 documentation, 55.2.3 and 55.2.4 (extended query, pipelining).

use millrace_common::SqlError;
use millrace_planner::Statement;
use sqlparser::ast::{CopySource, DiscardObject, Statement as Sql};
use tokio_util::sync::CancellationToken;

use super::reading::Unread;
use super::{Connection, guarded};
use crate::copy::CopyIn;
use crate::session::{Block, canceled};
use crate::wire::FrontendMessage;

/// Messages behind a statement that are looked at, before it counts as one of several.
const LOOK_AHEAD: usize = 16;

impl Connection {
    /// The next message: first those that have been looked at already.
    pub(super) async fn receive(&mut self) -> Option<Result<FrontendMessage, Unread>> {
        self.memory = None;
        let message = match self.ahead.pop_front() {
            Some(message) => Some(message),
            None => self.messages.recv().await,
        };
        Some(message?.map(|arrived| {
            self.memory = arrived.memory;
            arrived.message
        }))
    }

    /// Before a statement runs: it begins a transaction if more statements may follow it. An error: the server ends, and
    /// has not begun it.
    pub(super) async fn enter_pipeline(&mut self, statement: &Statement) -> Result<(), SqlError> {
        if self.session.in_block() || answers_first(statement) {
            return Ok(());
        }
        let last = self.is_last(&self.stop.clone()).await?;
        if last && matches!(self.session.block, Block::None) {
            return Ok(());
        }
        self.session.begin_implicit();
        self.session.last_of_many = last;
        Ok(())
    }

    /// After the data of a COPY: what follows it before Sync is committed with it. Clients take the answer to a COPY for
    /// that to its commit, so one that stands alone, or last, is committed before it is answered, also while the server
    /// ends.
    pub(super) async fn enter_pipeline_after_copy(
        &mut self,
        copy: &CopyIn,
    ) -> Result<(), SqlError> {
        if self.session.in_block() {
            return Ok(());
        }
        let last = self.is_last(&self.session.cancel.clone()).await?;
        if matches!(self.session.block, Block::Implicit) {
            self.ends_string = last;
            return Ok(());
        }
        if last {
            return Ok(());
        }
        if copy.is_on_its_way() {
            return Err(SqlError::unsupported(
                "a large COPY before other statements of a pipeline",
            )
            .with_hint("Send Sync after it, or begin a transaction block before it."));
        }
        self.session.begin_implicit();
        Ok(())
    }

    /// Whether nothing that may fail stands between the statement that is about to run and Sync. An error: it is not known
    /// by the time that `ended` is cancelled.
    async fn is_last(&mut self, ended: &CancellationToken) -> Result<bool, SqlError> {
        for at in 0..LOOK_AHEAD {
            if at == self.ahead.len() {
                let message = tokio::select! {
                    biased;
                    message = self.messages.recv() => message,
                    () = ended.cancelled() => return Err(canceled()),
                };
                let Some(message) = message else { return Ok(false) };
                self.ahead.push_back(message);
            }
            match self.ahead.get(at).and_then(|m| m.as_ref().ok()).map(|m| &m.message) {
                Some(FrontendMessage::Sync(_)) => return Ok(true),
                Some(FrontendMessage::Close(_)) => {}
                _ => return Ok(false),
            }
        }
        Ok(false)
    }

    /// Sync: commits what came since the last one, if nothing of it has failed.
    pub(super) async fn sync(&mut self) -> std::io::Result<()> {
        self.skip_to_sync = false;
        if matches!(self.session.block, Block::Implicit) {
            let cancel = self.session.shared.resume_statement(self.session.pid);
            let timeout = self.timeout();
            let step = self.session.begin_step();
            let commit = self.session.commit_implicit();
            match guarded(&self.gone, &cancel, timeout, &step, commit).await {
                Ok(()) => {
                    self.session.end_string();
                    self.flush_notices();
                    self.end_statement();
                }
                Err(e) => self.fail(&e),
            }
        }
        // Without a block every Sync ends the transaction and its portals.
        if !self.session.in_block() {
            self.session.portals.retain(|_, p| p.hold);
        }
        self.ready().await
    }
}

/// What does not wait to see whether more statements come: the client of a COPY waits for the server to ask for the
/// data, and DISCARD ALL is refused in a transaction.
fn answers_first(statement: &Statement) -> bool {
    let Statement::Sql(sql) = statement else { return false };
    match sql.as_ref() {
        Sql::Copy { source: CopySource::Table { .. }, to: false, .. } => true,
        Sql::Discard { object_type } => matches!(object_type, DiscardObject::ALL),
        _ => false,
    }
}
