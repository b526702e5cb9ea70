//! What the leader does about backups for an operator.

use millrace_common::encoding::datetime::write_timestamp;
use millrace_common::{SqlError, SqlState};
use millrace_rpc::log::{CreateBackup, Entry, ReleaseBackup};
use millrace_rpc::operator::{BackupList, BackupOverview};
use millrace_rpc::version::StatementId;

use crate::backup::named::Backup;
use crate::error::MetaError;
use crate::meta::Meta;
use crate::state::MetaState;

/// Letters of a name.
const MOST_LETTERS: usize = 100;

impl Meta {
    /// Pins all that versions name, and writes the state of the log beside it. An empty name: one made of the time. By the
    /// same id again: the backup that was made, with its state, should that not have been written then.
    pub(crate) async fn make_backup(
        &self,
        name: String,
        id: Option<StatementId>,
    ) -> Result<BackupOverview, SqlError> {
        let name = if name.is_empty() { self.name_by_time()? } else { check_name(name)? };
        let entry = Entry::CreateBackup(CreateBackup { name: name.clone() });
        self.apply_by(id, entry).await?;
        // One that an earlier call has made by the time has another name.
        let backup = match id {
            Some(id) => self.shared.state.read().backups.asked_for_by(id).cloned(),
            None => self.backup_named(&name),
        };
        let backup = backup.ok_or_else(|| {
            let message = "the backup was made, and has been released meanwhile";
            SqlError::new(SqlState::UNDEFINED_OBJECT, message)
        })?;
        // Those of others do not matter here.
        if let Err(error) = self.backup_files.settle().await
            && !self.backup_files.has(backup.number).await
        {
            return Err(unwritten(&backup.name, error));
        }
        Ok(self.backup_overview(&backup).await)
    }

    /// What only this backup has kept is garbage from now on. By the same id again nothing is released, also where there is
    /// another one of that name by now.
    pub(crate) async fn end_backup(
        &self,
        name: String,
        id: Option<StatementId>,
    ) -> Result<BackupOverview, SqlError> {
        let is_done = self.shared.state.read().is_done(id);
        let released = match self.backup_named(&name).filter(|_| !is_done) {
            Some(backup) => Some(self.backup_overview(&backup).await),
            None => None,
        };
        let entry = Entry::ReleaseBackup(ReleaseBackup { name: name.clone() });
        self.apply_by(id, entry).await?;
        if let Err(error) = self.backup_files.settle().await {
            // The collector does it again.
            tracing::warn!(%error, name, "the state of a released backup was not deleted this time");
        }
        Ok(released.unwrap_or(BackupOverview { name, ..BackupOverview::default() }))
    }

    pub(crate) async fn list_backups(&self) -> BackupList {
        // A new leader has not looked yet. Where it cannot, they are shown as incomplete.
        let _ = self.backup_files.settle().await;
        let all: Vec<Backup> = self.shared.state.read().backups.iter().cloned().collect();
        let mut list = BackupList { now_ms: self.shared.env.now_ms(), ..BackupList::default() };
        for backup in &all {
            list.backups.push(self.backup_overview(backup).await);
        }
        list
    }

    fn backup_named(&self, name: &str) -> Option<Backup> {
        self.shared.state.read().backups.named(name).cloned()
    }

    async fn backup_overview(&self, backup: &Backup) -> BackupOverview {
        let is_complete = self.backup_files.has(backup.number).await;
        let state = self.shared.state.read();
        BackupOverview {
            name: backup.name.clone(),
            record: backup.number,
            made_ms: backup.epoch.millis(),
            objects: backup.objects.len() as u64,
            bytes: backup.bytes,
            kept_objects: kept(&state, backup),
            is_complete,
        }
    }

    fn name_by_time(&self) -> Result<String, SqlError> {
        let seconds = i64::try_from(self.shared.env.now_ms() / 1_000).ok();
        let micros = seconds.and_then(|s| s.checked_mul(1_000_000));
        let mut text = String::new();
        let written = micros.map(|us| write_timestamp(&mut text, us, false));
        if !matches!(written, Some(Ok(()))) {
            return Err(SqlError::internal("the time has no text"));
        }
        Ok(text.replace(' ', "T").replace(':', "-"))
    }
}

/// The log has the backup, and the store lacks its state.
fn unwritten(name: &str, error: MetaError) -> SqlError {
    let error = SqlError::from(error);
    let message = format!(
        "what backup \"{name}\" names is kept, but its state is not written yet: {}",
        error.message
    );
    SqlError::new(error.state, message).with_hint(
        "The leader tries again by itself: millrace ctl backup list shows when it is complete.",
    )
}

/// How many of its objects nothing else names.
fn kept(state: &MetaState, backup: &Backup) -> u64 {
    let garbage = backup.objects.iter().filter(|object| state.objects.is_garbage(object));
    garbage.count() as u64
}

/// A name is written on command lines, and is no number: those are records.
fn check_name(name: String) -> Result<String, SqlError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let is_number = name.chars().all(|c| c.is_ascii_digit());
    if name.len() > MOST_LETTERS
        || is_number
        || !name.chars().all(is_plain)
        || name.starts_with('-')
    {
        return Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!("\"{name}\" is no name of a backup"),
        )
        .with_hint(
            "A name has up to 100 letters of A to Z, digits, dots, hyphens and underscores, and is not a number.",
        ));
    }
    Ok(name)
}
