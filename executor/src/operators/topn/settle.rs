//! Large epochs in a top-N: changes that are written, and shown, before the barrier.
//!
//! Within an epoch the new row of a key may overtake the old one, and a retraction its row. So the stored rows
//! of what has changed are read, in batches: a change that leaves of a row what may be stored is complete so far
//! and is written; any other one waits on, and with it its group. All other groups may leave memory, since the
//! store now says the same of them.

use arrow::array::BinaryBuilder;
use millrace_common::collections::HashMap;

use super::TopNOperator;
use super::groups::Groups;
use crate::error::ExecError;
use crate::operator::Output;
use crate::operators::ordered::Listed;
use crate::state::fetch::wait;
use crate::state::keys::storage_keys;
use crate::state::{KeyBytes, KeyTable, KeyedState, Slot};

/// Rows that are read at once.
const AT_ONCE: usize = 4_096;

impl TopNOperator {
    /// What of the epoch's changes can be told already. While nothing is being read.
    pub(super) async fn settle_changes(&mut self, out: &mut Output) -> Result<(), ExecError> {
        self.state.check_settled(self.refills.is_empty())?;
        self.read_old().await?;
        let KeyedState { keys, entries: groups, .. } = &mut self.state;
        if groups.append_only {
            groups.write(keys)?;
        } else {
            let (settled, waiting) = split(groups, keys).await?;
            groups.write_changes(settled, keys)?;
            groups.hold(waiting);
            self.refill().await?;
        }
        self.emit(false, out)?;
        self.state.compact()?;
        self.state.unpin();
        if self.state.is_over() {
            self.state.evict()?;
        }
        self.held.settled(self.change_bytes(), self.state.pinned());
        Ok(())
    }
}

impl TopNOperator {
    /// What groups showed that came into memory with a prefix shorter than their window, because peers of one rank
    /// are many. Before their changes are written.
    pub(super) async fn read_old(&mut self) -> Result<(), ExecError> {
        let KeyedState { keys, entries: groups, .. } = &mut self.state;
        let dirty = keys.dirty().iter().copied();
        let mut short: Vec<Slot> = dirty.filter(|&slot| groups.is_old_short(slot)).collect();
        let mut limit = groups.prefix_rows();
        while !short.is_empty() {
            limit = limit.map(|limit| limit.saturating_mul(8));
            let prefixes = storage_keys(short.iter().map(|&s| (keys.vnode(s), keys.key(s))));
            let found = wait(groups.table.multi_scan(prefixes, limit)).await?;
            short = groups.load_old(short, &found, limit)?;
        }
        Ok(())
    }
}

/// The changes that can be made now, and those that wait; each in order.
async fn split(
    groups: &mut Groups,
    keys: &KeyTable,
) -> Result<(Vec<Listed>, Vec<Listed>), ExecError> {
    let changes = groups.take_pending();
    let mut is_settled = Vec::with_capacity(changes.len());
    let rows: Vec<&[Listed]> = groups.order.by_stored(&changes).collect();
    for rows in rows.chunks(AT_ONCE) {
        let mut asked = BinaryBuilder::new();
        let mut scratch = Vec::with_capacity(64);
        for ((slot, key), _) in rows.iter().filter_map(|versions| versions.first()) {
            groups.order.append_key(&mut asked, &mut scratch, keys, (*slot, key));
        }
        let found = wait(groups.table.multi_get(asked.finish())).await?;
        let mut stored: HashMap<u32, (KeyBytes, i64)> = HashMap::default();
        let read = groups.order.keys(&found.values)?;
        for (i, &input) in found.input.values().iter().enumerate() {
            read.write(i, &mut scratch);
            stored.insert(input, (KeyBytes::new(&scratch), found.weights.value(i)));
        }
        for (i, versions) in rows.iter().enumerate() {
            let stored = stored.get(&(i as u32));
            let is_changed = |key: &KeyBytes| versions.iter().any(|((_, k), _)| k == key);
            let others = stored.iter().filter(|(key, _)| !is_changed(key)).count();
            let weight = |key: &[u8]| stored.filter(|s| s.0[..] == *key).map_or(0, |s| s.1);
            let settled = groups.order.is_settled(versions, weight, others);
            is_settled.extend(std::iter::repeat_n(settled, versions.len()));
        }
    }
    drop(rows);
    let (mut settled, mut waiting) = (Vec::new(), Vec::new());
    for (change, is) in changes.into_iter().zip(is_settled) {
        if is { settled.push(change) } else { waiting.push(change) }
    }
    Ok((settled, waiting))
}
