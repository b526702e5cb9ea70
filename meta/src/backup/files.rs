//! The states that backups have, in the object store: one object for each backup, written once its record is there
//! and deleted once it is released.
//!
//! Which there must be, the log says. So a leader that ended half-way leaves nothing undone: the next one compares the
//! store with the log, and does what is missing.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::Mutex;

use crate::error::MetaError;
use crate::log::LogStore;
use crate::shared::Shared;

pub struct BackupFiles {
    shared: Arc<Shared>,
    store: LogStore,
    /// The records of which there is a state; `None`: that is not known yet. Locked while something is done.
    there: Mutex<Option<BTreeSet<u64>>>,
}

impl BackupFiles {
    pub fn new(shared: Arc<Shared>, store: LogStore) -> BackupFiles {
        BackupFiles { shared, store, there: Mutex::default() }
    }

    /// Writes what backups lack and deletes what is of none. Asks nothing of the store where nothing has changed. One state
    /// that cannot be written keeps none of the others from it; the first error is returned.
    pub async fn settle(&self) -> Result<(), MetaError> {
        let mut there = self.there.lock().await;
        let there = match &mut *there {
            Some(known) => known,
            unknown => unknown.insert(self.store.list_backups().await?),
        };
        let (wanted, known): (BTreeSet<u64>, u64) = {
            let state = self.shared.state.read();
            (state.backups.iter().map(|backup| backup.number).collect(), state.number)
        };
        let lacking: Vec<u64> = wanted.difference(there).copied().collect();
        let mut settled = Ok(());
        for number in lacking {
            let written = self.write(number).await;
            if written.is_ok() {
                there.insert(number);
            }
            settled = settled.and(written);
        }
        // Of a record that is not known here a later leader has made it: this one has been deposed, and is the last to know.
        let released: Vec<u64> =
            there.difference(&wanted).copied().filter(|number| *number <= known).collect();
        for number in released {
            let failed = self.store.delete(vec![LogStore::backup_path(number)]).await;
            if failed.is_empty() {
                there.remove(&number);
            }
        }
        settled
    }

    /// The state as of this record.
    async fn write(&self, number: u64) -> Result<(), MetaError> {
        self.store.put_backup(self.store.state_at(number).await?).await
    }

    /// Whether the state as of this record is in the store, as far as is known.
    pub async fn has(&self, number: u64) -> bool {
        self.there.lock().await.as_ref().is_some_and(|there| there.contains(&number))
    }
}
