//! Entries about backups.

use millrace_rpc::log::{CreateBackup, ReleaseBackup};
use millrace_rpc::version::StatementId;

use super::{Verdict, applied};
use crate::error::VoidReason;
use crate::state::MetaState;

/// It contains the whole record, so what it names is known at the record's end ([`fill`]). `statement`: by which it was
/// asked for.
pub fn create(
    state: &mut MetaState,
    entry: &CreateBackup,
    statement: Option<StatementId>,
) -> Verdict {
    if entry.name.is_empty() {
        return Err(VoidReason::Malformed);
    }
    if state.backups.named(&entry.name).is_some() {
        return Err(VoidReason::DuplicateBackup(entry.name.clone()));
    }
    if state.backups.is_full() {
        return Err(VoidReason::TooManyBackups);
    }
    state.backups.begin(entry.name.clone(), statement, state.number, state.epoch);
    Ok(applied(state))
}

/// What only it has kept is collected from now on, as other garbage.
pub fn release(state: &mut MetaState, entry: &ReleaseBackup) -> Verdict {
    match state.backups.release(&entry.name) {
        true => Ok(applied(state)),
        false => Err(VoidReason::UnknownBackup(entry.name.clone())),
    }
}

/// All entries of the record have been folded.
pub fn fill(state: &mut MetaState) {
    state.backups.fill(state.number, &state.jobs);
}
