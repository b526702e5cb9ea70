//! Backups that are not released: states of the log, and the objects that stay for them (docs/design.md §9).
//!
//! A backup names what versions name when its record has been folded. An object of it that loses its last reference
//! is garbage as others are, and is not deleted before the backup is released.

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_common::Epoch;
use millrace_rpc::log::BackupSnapshot;
use millrace_rpc::version::StatementId;

use crate::jobs::Jobs;
use crate::objects::references_of;

/// Backups at a time: each snapshot of the log lists the objects of all.
pub const MOST_BACKUPS: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backup {
    pub name: String,
    /// Of the record that made it: the last one that it contains.
    pub number: u64,
    pub epoch: Epoch,
    /// All that it names.
    pub objects: Arc<BTreeSet<String>>,
    /// Bytes of them that it names.
    pub bytes: u64,
    /// By which it was asked for.
    pub statement: Option<StatementId>,
}

/// Part of the folded state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backups(Vec<Backup>);

impl Backups {
    /// In the order of their records.
    pub fn iter(&self) -> impl Iterator<Item = &Backup> {
        self.0.iter()
    }

    pub fn named(&self, name: &str) -> Option<&Backup> {
        self.0.iter().find(|backup| backup.name == name)
    }

    /// The one that was asked for by this id.
    pub fn asked_for_by(&self, id: StatementId) -> Option<&Backup> {
        self.0.iter().find(|backup| backup.statement == Some(id))
    }

    pub fn is_full(&self) -> bool {
        self.0.len() >= MOST_BACKUPS
    }

    /// Whether the object stays for one of them.
    pub fn hold(&self, object: &str) -> bool {
        self.0.iter().any(|backup| backup.objects.contains(object))
    }

    /// A backup of the state after this record: what it names is known at the record's end.
    pub(crate) fn begin(
        &mut self,
        name: String,
        statement: Option<StatementId>,
        number: u64,
        epoch: Epoch,
    ) {
        self.0.push(Backup { name, number, epoch, objects: Arc::default(), bytes: 0, statement });
    }

    /// Record `number` has been folded: its backups name what versions name now.
    pub(crate) fn fill(&mut self, number: u64, jobs: &Jobs) {
        let mut begun = self.0.iter_mut().filter(|backup| backup.number == number).peekable();
        if begun.peek().is_none() {
            return;
        }
        let (mut objects, mut bytes) = (BTreeSet::new(), 0);
        let references = jobs.values().flat_map(|job| references_of(&job.version));
        for (name, length) in references.filter(|(name, _)| !name.is_empty()) {
            if !objects.contains(name) {
                objects.insert(name.to_owned());
            }
            bytes += length;
        }
        let objects = Arc::new(objects);
        for backup in begun {
            (backup.objects, backup.bytes) = (Arc::clone(&objects), bytes);
        }
    }

    /// Whether there was one of this name.
    pub(crate) fn release(&mut self, name: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|backup| backup.name != name);
        self.0.len() < before
    }

    pub(crate) fn to_snapshot(&self) -> Vec<BackupSnapshot> {
        let backup = |b: &Backup| BackupSnapshot {
            name: b.name.clone(),
            number: b.number,
            epoch: b.epoch.0,
            objects: b.objects.iter().cloned().collect(),
            bytes: b.bytes,
            statement: b.statement,
        };
        self.0.iter().map(backup).collect()
    }

    pub(crate) fn from_snapshot(backups: Vec<BackupSnapshot>) -> Backups {
        let backup = |b: BackupSnapshot| Backup {
            name: b.name,
            number: b.number,
            epoch: Epoch(b.epoch),
            objects: Arc::new(b.objects.into_iter().collect()),
            bytes: b.bytes,
            statement: b.statement,
        };
        Backups(backups.into_iter().map(backup).collect())
    }

    /// Names differ, and records ascend. `is_there`: whether an object is in use or garbage, and not deleted.
    pub(crate) fn check(&self, is_there: impl Fn(&str) -> bool) -> Result<(), String> {
        for (at, backup) in self.0.iter().enumerate() {
            let before = &self.0[..at];
            if before.iter().any(|b| b.name == backup.name || b.number > backup.number) {
                return Err(format!("backup \"{}\" is there twice or out of order", backup.name));
            }
            if let Some(object) = backup.objects.iter().find(|object| !is_there(object)) {
                return Err(format!("\"{object}\" of backup \"{}\" is gone", backup.name));
            }
        }
        Ok(())
    }
}
