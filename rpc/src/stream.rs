//! The record stream: what the leader sends every process, in the order of the log (docs/design.md §10).

use std::sync::Arc;

use millrace_common::{Epoch, JobId, SqlError};

use crate::log::LogRecord;

/// What the fold made of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryOutcome {
    /// It took effect; of a job's commit, this is the epoch committed.
    Applied(Epoch),
    /// It changed nothing, for this reason.
    Void(String),
}

/// A durable record, with what became of its entries.
#[derive(Clone, Debug, PartialEq)]
pub struct AppliedRecord {
    pub record: Arc<LogRecord>,
    /// One for each entry.
    pub outcomes: Arc<[EntryOutcome]>,
}

impl AppliedRecord {
    pub fn number(&self) -> u64 {
        self.record.number
    }
}

/// One message of the stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StreamMessage {
    /// Without a gap among them.
    pub records: Vec<AppliedRecord>,
    /// What is not logged: no read will ever need versions of these relations below these epochs.
    pub horizons: Vec<(JobId, Epoch)>,
}

/// How far a process is. What it says stays true.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acknowledged {
    /// It has every record up to this number, and has applied it to every job that is not in `behind`.
    pub received: u64,
    /// Jobs that are busy or being opened, and for each the oldest record that has not been applied to it, nor is in what
    /// it is opened from.
    pub behind: Vec<(JobId, u64)>,
}

impl Acknowledged {
    /// The last record up to which everything is applied.
    pub fn applied(&self) -> u64 {
        let oldest = self.behind.iter().map(|(_, record)| record.saturating_sub(1)).min();
        oldest.map_or(self.received, |before| before.min(self.received))
    }
}

/// Why a message had no effect, as far as is known.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StreamError {
    /// Records are missing before those that were sent. Nothing of the message was applied.
    #[error("the record stream has a gap: record {next} is the next one")]
    Gap {
        /// The record to go on with.
        next: u64,
    },
    /// There was no answer: the message may have been applied, and may be sent again.
    #[error(transparent)]
    Failed(SqlError),
}

#[cfg(test)]
mod tests {
    use millrace_common::RelationId;

    use super::*;

    #[test]
    fn a_busy_job_holds_the_acknowledged_record_back() {
        let mut at = Acknowledged { received: 9, behind: Vec::new() };
        assert_eq!(at.applied(), 9);
        at.behind = vec![(RelationId(1), 9), (RelationId(2), 7)];
        assert_eq!(at.applied(), 6);
    }
}
