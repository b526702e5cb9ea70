//! The evaluations of one statement: again when what one has read, or the rows that it writes, have changed before it
//! entered; after a few of them while other statements of the tables wait.

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_common::{RelationId, SqlError};
use parking_lot::Mutex;

use super::{MAX_ATTEMPTS, too_many_conflicts};
use crate::session::Session;
use crate::session::reads::Reads;

/// Evaluations that others do not wait for.
const FREE: usize = 3;
/// The same for statements that only look at rows by their keys: they are quick, and soon through.
const FREE_BY_KEY: usize = 16;

pub struct Attempts {
    /// Where the session notes what is read; `None`: another keeps it, or nothing is checked.
    reads: Option<Arc<Mutex<Option<Reads>>>>,
    /// The table that is written.
    table: Option<u32>,
    made: usize,
    /// The next evaluation has the tables to itself.
    alone: bool,
}

impl Attempts {
    /// Of a statement on a table; without one, of a statement of parts.
    pub fn of(session: &Session, table: Option<u32>) -> Attempts {
        // The statements of a block are committed together, and what a block has read is not checked then.
        let reads = (!session.stages_writes()).then(|| Arc::clone(&session.reads));
        Attempts { reads, table, made: 0, alone: false }
    }

    /// Has the next evaluation wait for its turn at once: it is long, and others write all the time.
    pub fn take_turn(&mut self) {
        self.alone = true;
    }

    /// Before every evaluation. Fails when there have been too many.
    pub async fn next(&mut self, session: &Session) -> Result<(), SqlError> {
        self.made += 1;
        if self.made > MAX_ATTEMPTS {
            return Err(too_many_conflicts());
        }
        let Some(noted) = &self.reads else { return Ok(()) };
        // Its locks, if it has any, end here.
        let before = noted.lock().take().unwrap_or_default();
        let mut tables: BTreeSet<RelationId> = self.table.into_iter().map(RelationId).collect();
        let read =
            before.relations().flat_map(|id| session.cluster().tables_behind(RelationId(id)));
        tables.extend(read);
        let free = if before.only_keys_of(self.table) { FREE_BY_KEY } else { FREE };
        drop(before);
        let checks = session.settings.get("read_freshness")? != "any";
        let mut next = Reads::new(checks);
        if self.alone || self.made > free {
            let tables: Vec<RelationId> = tables.into_iter().collect();
            next.locks = session.cluster().lock_tables(&tables).await?;
        }
        *noted.lock() = Some(next);
        Ok(())
    }
}

impl Drop for Attempts {
    /// However the statement ended, nobody waits for it any longer.
    fn drop(&mut self) {
        if let Some(noted) = &self.reads {
            let last = noted.lock().take();
            drop(last);
        }
    }
}
