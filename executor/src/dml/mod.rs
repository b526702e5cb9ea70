//! Statements on tables (docs/design.md §4): what a session hands to a table's sequencer, and what
//! it gets back.

pub mod check;
pub mod load;
pub mod reads;
mod resolve;
pub mod sequencer;
pub mod staged;
pub mod transaction;

use arrow::array::UInt32Array;
use millrace_common::error::ErrorObject;
use millrace_common::{DeltaChunk, Epoch, SqlError, SqlState};
use millrace_rpc::version::StatementId;

pub use load::Load;
pub use millrace_rpc::dml::{DmlKind, EntryFlag, InsertConflict, LoadKind, OnRepeat};
pub use reads::{Filter, Read, ReadRows, ReadSet, TableLocks};
pub use resolve::second_time;
pub use sequencer::Sequencer;
pub use staged::StagedTable;

pub use crate::lookahead::uncommitted::Announced;

/// How far a sink has been applied to a table; committed with the rows as one of the table's counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SinkMark {
    pub counter: String,
    pub sequence: u64,
}

/// A statement, evaluated.
#[derive(Clone, Debug)]
pub struct DmlStatement {
    pub id: StatementId,
    /// Full rows of the table, hidden columns included.
    pub delta: DeltaChunk,
    pub kind: DmlKind,
    /// Of a sink's change: applied only if the table has none of this sequence or a later one.
    pub mark: Option<SinkMark>,
    /// Set when its rows enter. Nobody waits for that of a connector or a sink.
    pub entered: EntryFlag,
    /// All its rows were announced while they were staged: they are not announced again.
    pub announced: Option<Announced>,
}

/// A statement that is committed.
#[derive(Clone, Debug)]
pub struct DmlOutcome {
    /// The statement's effects are visible from this epoch on.
    pub epoch: Epoch,
    /// Rows inserted, updated or deleted.
    pub rows_affected: u64,
    /// Positions of the statement's rows that took effect, ascending; `None`: all.
    pub kept: Option<UInt32Array>,
    /// Rows that were older than the table's watermark: they did not enter.
    pub late: u64,
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum DmlError {
    /// Rows are no longer as the statement saw them, or its epoch was provably not committed: evaluate
    /// it again at the newest epoch.
    #[error("the statement's rows have changed meanwhile")]
    Conflict,
    #[error("duplicate key value violates unique constraint \"{}\"", constraint.constraint.as_deref().unwrap_or_default())]
    UniqueViolation {
        constraint: Box<ErrorObject>,
        /// `Key (id)=(1) already exists.`
        detail: String,
        /// The statement's row, where it is still known.
        row: Option<usize>,
    },
    #[error(transparent)]
    Sql(#[from] SqlError),
}

impl From<DmlError> for SqlError {
    fn from(e: DmlError) -> SqlError {
        match e {
            DmlError::Sql(e) => e,
            DmlError::Conflict => SqlError::new(
                SqlState::SERIALIZATION_FAILURE,
                "could not serialize access due to concurrent update",
            ),
            DmlError::UniqueViolation { ref detail, ref constraint, row } => {
                let mut error = SqlError::new(SqlState::UNIQUE_VIOLATION, e.to_string())
                    .with_detail(detail.clone())
                    .with_object(constraint.as_ref().clone());
                error.row = row.map(|row| row as u64);
                error
            }
        }
    }
}

/// Nobody can say whether the statement was committed.
pub(crate) fn unknown_outcome() -> SqlError {
    SqlError::new(
        SqlState::TRANSACTION_RESOLUTION_UNKNOWN,
        "the table's job failed while the statement was being committed",
    )
    .with_detail("The statement may or may not have been committed.")
}
