//! Large epochs in a value table: which changes can be made before the barrier.

use millrace_common::collections::HashSet;

use super::ValueTable;
use crate::error::ExecError;
use crate::state::fetch::wait;
use crate::state::keys::storage_keys;
use crate::state::{KeyTable, Slot};

impl ValueTable {
    /// In the middle of an epoch: entries whose changes would leave fewer than none of a value. Within an epoch a
    /// retraction may overtake its row; such a change waits for it.
    pub async fn waiting(&mut self, keys: &KeyTable) -> Result<HashSet<Slot>, ExecError> {
        let changes = self.changes(keys);
        let counts: Vec<i64> = if self.distinct.is_empty() {
            let asked = changes.iter().map(|c| (keys.vnode(c.slot), self.state.keys.key(c.count)));
            let asked = storage_keys(asked.collect::<Vec<_>>().into_iter());
            let found = wait(self.state.entries.table.multi_get(asked)).await?;
            let mut counts = vec![0; changes.len()];
            for (i, &input) in found.input.values().iter().enumerate() {
                counts[input as usize] = found.weights.value(i);
            }
            counts
        } else {
            let slots: Vec<Slot> = changes.iter().map(|c| c.count).collect();
            self.ask_counts(&slots)?;
            while self.is_fetching() {
                self.counts_arrived().await?;
            }
            slots.iter().map(|&slot| self.state.entries.counts[slot as usize]).collect()
        };
        let of_changes = changes.into_iter().zip(counts);
        Ok(of_changes.filter(|(c, n)| n + c.delta < 0).map(|(c, _)| c.count).collect())
    }

    /// The groups of entries.
    pub fn groups_of(&self, entries: &HashSet<Slot>) -> impl Iterator<Item = Slot> {
        entries.iter().map(|&entry| self.state.entries.groups[entry as usize])
    }
}
