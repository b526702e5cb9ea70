//! The groups of a top-N by slot, the rows they refer to, and what is to be written of them.

use arrow::array::{BinaryArray, BinaryBuilder};
use arrow::datatypes::SchemaRef;
use millrace_common::collections::HashSet;
use millrace_storage::{Found, Lookup};

use super::SLACK;
use super::group::{Group, Window};
use crate::error::ExecError;
use crate::operators::ordered::{Change, Changes, Listed, Ranked, RowKeys, RowOrder};
use crate::state::arena::RowRef;
use crate::state::keys::append_storage_key;
use crate::state::{Entries, KeyBytes, KeyTable, RowArena, Slot, StateTable};

/// Retractions of an epoch after which a group is read at the barrier only, when they are written: a prefix read
/// before is longer by each of them.
const EARLY_RETRACTIONS: usize = 1_024;
/// Changed rows of an epoch after which groups are read at the barrier only: each answer is compared with all of them.
const EARLY_CHANGES: usize = 1 << 16;

/// See the module.
pub struct Groups {
    pub table: Box<dyn StateTable>,
    pub order: RowOrder,
    pub window: Window,
    pub append_only: bool,
    /// The stored rows are exactly those shown: what to write follows from old and new window.
    stores_window: bool,
    pub of: Vec<Group>,
    pub arena: RowArena,
    pending: Changes,
}

impl Groups {
    pub fn new(
        table: Box<dyn StateTable>,
        order: RowOrder,
        window: Window,
        append_only: bool,
        input: &SchemaRef,
    ) -> Groups {
        Groups {
            table,
            stores_window: order.keyed && append_only && window.offset == 0,
            order,
            window,
            append_only,
            of: Vec::new(),
            arena: RowArena::new(crate::operators::nullable(input)),
            pending: Changes::default(),
        }
    }

    /// Rows to read for a window, and to keep after trimming.
    pub fn prefix_rows(&self) -> Option<usize> {
        let end = usize::try_from(self.window.end?).ok()?;
        Some(end.saturating_mul(2).saturating_add(SLACK))
    }

    fn fetch_limit(&self) -> Option<usize> {
        if self.append_only { None } else { self.prefix_rows() }
    }

    /// Whether a row of append-only input can be in its group's window.
    pub fn may_enter(&self, slot: Slot, keys: &RowKeys, row: usize) -> bool {
        let group = &self.of[slot as usize];
        match group.cut(&self.window) {
            Some(0) => false,
            Some(cut) => {
                let last = &group.rows[cut - 1];
                keys.cmp_order(row, &last.key[..last.order as usize]).is_le()
            }
            None => true,
        }
    }

    /// The group changes in this epoch: remembers what it showed. Its slot is marked dirty.
    pub fn touch(&mut self, slot: Slot) {
        let group = &mut self.of[slot as usize];
        if group.old.is_none() {
            group.old_is_short = !group.is_sufficient(&self.window);
            let shown = group.shown(&self.window);
            for row in &shown {
                self.arena.retain(row.at);
            }
            group.old = Some(shown);
        }
    }

    /// A row's change, for the group's prefix and for the store.
    pub fn apply(&mut self, slot: Slot, row: Ranked) -> Result<(), ExecError> {
        if self.append_only && row.weight < 0 {
            return Err(ExecError::internal("an append-only top-N got a retraction"));
        }
        let group = &mut self.of[slot as usize];
        group.retracted += usize::from(row.weight < 0);
        match group.rows.binary_search_by(|r| r.key.cmp(&row.key)) {
            Ok(at) => {
                group.rows[at].weight += row.weight;
                if group.rows[at].weight == 0 {
                    let gone = group.rows.remove(at);
                    self.arena.release(gone.at);
                }
            }
            Err(at) if at < group.rows.len() || group.complete => {
                self.arena.retain(row.at);
                group.rows.insert(at, row.clone());
            }
            Err(_) => {}
        }
        self.note(slot, row);
        self.trim(slot);
        Ok(())
    }

    /// Adds to what will be written; takes over the reference to `at`.
    fn note(&mut self, slot: Slot, row: Ranked) {
        let Ranked { key, order, at, weight } = row;
        if self.stores_window {
            self.arena.release(at);
            return;
        }
        if let Some(same) = self.pending.add((slot, key), Change { weight, order, at }) {
            self.arena.release(same);
        }
    }

    /// Adds changes that wait for more of the epoch.
    pub fn hold(&mut self, changes: Vec<Listed>) {
        for (place, change) in changes {
            if let Some(same) = self.pending.add(place, change) {
                self.arena.release(same);
            }
        }
    }

    /// The epoch's changes in order; none are pending afterwards.
    pub fn take_pending(&mut self) -> Vec<Listed> {
        self.pending.take()
    }

    /// Whether changes of a group are pending.
    pub fn waiting(&self) -> HashSet<Slot> {
        self.pending.iter().map(|((slot, _), _)| *slot).collect()
    }

    /// Bytes of what is pending, with its rows.
    pub fn pending_bytes(&self) -> usize {
        self.pending.bytes(&self.arena)
    }

    /// Forgets rows that are not needed; of append-only input, for good.
    fn trim(&mut self, slot: Slot) {
        let group = &mut self.of[slot as usize];
        let keep = if self.append_only {
            group.cut(&self.window).unwrap_or(usize::MAX)
        } else {
            match (self.window.end, group.rows.len()) {
                (Some(end), len)
                    if len > (end as usize).saturating_mul(4).saturating_add(4 * SLACK) =>
                {
                    let cut = group.cut(&self.window).unwrap_or(len);
                    cut.saturating_mul(2).saturating_add(SLACK)
                }
                _ => usize::MAX,
            }
        };
        if group.rows.len() <= keep {
            return;
        }
        let dropped = group.rows.split_off(keep);
        if self.append_only {
            for row in dropped {
                self.note(slot, Ranked { weight: -row.weight, ..row });
            }
        } else {
            group.complete = false;
            for row in dropped {
                self.arena.release(row.at);
            }
        }
    }

    /// Writes what entered and what left the windows since they were last shown.
    fn write_windows(&mut self, keys: &KeyTable) -> Result<(), ExecError> {
        let mut out = BinaryBuilder::new();
        let (mut rows, mut weights) = (Vec::new(), Vec::new());
        let mut scratch = Vec::with_capacity(64);
        for &slot in keys.dirty() {
            let group = &self.of[slot as usize];
            let mut old = group.old.iter().flatten().peekable();
            let mut new = group.rows.iter().peekable();
            loop {
                let order = match (old.peek(), new.peek()) {
                    (None, None) => break,
                    (Some(_), None) => std::cmp::Ordering::Less,
                    (None, Some(_)) => std::cmp::Ordering::Greater,
                    (Some(o), Some(n)) => o.key.cmp(&n.key),
                };
                let gone = if order.is_le() { old.next() } else { None };
                let come = if order.is_ge() { new.next() } else { None };
                let (key, at, weight) = match (gone, come) {
                    (Some(o), None) => (&o.key, o.at, 0),
                    (None, Some(n)) => (&n.key, n.at, 1),
                    _ => continue,
                };
                let parts: [&[u8]; 2] = [keys.key(slot), key];
                append_storage_key(&mut out, &mut scratch, keys.vnode(slot), &parts);
                rows.push(at);
                weights.push(weight);
            }
        }
        if !rows.is_empty() {
            let batch = self.arena.batch(&rows)?;
            self.table.write(out.finish(), Some(weights.into()), batch)?;
        }
        Ok(())
    }

    /// Writes the epoch's net changes.
    pub fn write(&mut self, keys: &KeyTable) -> Result<(), ExecError> {
        if self.stores_window {
            return self.write_windows(keys);
        }
        let changes = self.pending.take();
        self.write_changes(changes, keys)
    }

    /// Writes net changes, given in order.
    pub fn write_changes(
        &mut self,
        changes: Vec<Listed>,
        keys: &KeyTable,
    ) -> Result<(), ExecError> {
        self.order.write(&changes, keys, &self.arena, self.table.as_mut())?;
        for (_, change) in changes {
            self.arena.release(change.at);
        }
        Ok(())
    }

    /// Groups' rows as read; replaces what was remembered.
    pub fn load_prefixes(
        &mut self,
        slots: &[Slot],
        found: &Found,
        limit: Option<usize>,
    ) -> Result<(), ExecError> {
        for &slot in slots {
            for row in std::mem::take(&mut self.of[slot as usize].rows) {
                self.arena.release(row.at);
            }
        }
        let mut counts = vec![0usize; slots.len()];
        if !found.is_empty() {
            let keys = self.order.keys(&found.values)?;
            let chunk = self.arena.insert(found.values.clone(), found.len());
            let mut scratch = Vec::with_capacity(64);
            for (row, &input) in found.input.values().iter().enumerate() {
                counts[input as usize] += 1;
                let order = keys.write(row, &mut scratch);
                let at = RowRef { chunk, row: row as u32 };
                let weight = found.weights.value(row);
                let group = &mut self.of[slots[input as usize] as usize];
                group.rows.push(Ranked { key: KeyBytes::new(&scratch), order, at, weight });
            }
        }
        for (&slot, count) in slots.iter().zip(counts) {
            self.of[slot as usize].complete = self.append_only || limit.is_none_or(|l| count < l);
        }
        Ok(())
    }

    /// Whether what a group showed is still to be read.
    pub fn is_old_short(&self, slot: Slot) -> bool {
        self.of[slot as usize].old_is_short
    }

    /// What groups showed, from their rows as stored, which have not changed since; those of which that was not
    /// all.
    pub fn load_old(
        &mut self,
        slots: Vec<Slot>,
        found: &Found,
        limit: Option<usize>,
    ) -> Result<Vec<Slot>, ExecError> {
        let mut stored: Vec<Group> = slots.iter().map(|_| Group::default()).collect();
        let keys = self.order.keys(&found.values)?;
        let chunk =
            (!found.is_empty()).then(|| self.arena.insert(found.values.clone(), found.len()));
        let mut scratch = Vec::with_capacity(64);
        for (row, &input) in found.input.values().iter().enumerate() {
            let order = keys.write(row, &mut scratch);
            let at = RowRef { chunk: chunk.unwrap_or_default(), row: row as u32 };
            let (key, weight) = (KeyBytes::new(&scratch), found.weights.value(row));
            stored[input as usize].rows.push(Ranked { key, order, at, weight });
        }
        let mut short = Vec::new();
        for (slot, mut stored) in slots.into_iter().zip(stored) {
            stored.complete = limit.is_none_or(|limit| stored.rows.len() < limit);
            if stored.is_sufficient(&self.window) {
                let shown = stored.shown(&self.window);
                shown.iter().for_each(|row| self.arena.retain(row.at));
                let group = &mut self.of[slot as usize];
                group.old_is_short = false;
                let before = group.old.replace(shown);
                before.into_iter().flatten().for_each(|row| self.arena.release(row.at));
            } else {
                short.push(slot);
            }
            stored.rows.iter().for_each(|row| self.arena.release(row.at));
        }
        Ok(short)
    }

    /// Whether the prefix of a dirty group is to be read again now: it is too short, is not being read, and need not
    /// wait for the barrier.
    pub fn begins_refill(&mut self, slot: Slot) -> bool {
        let most = self.prefix_rows().unwrap_or(0).saturating_mul(4).max(EARLY_RETRACTIONS);
        let group = &mut self.of[slot as usize];
        let begins = !group.refilling
            && !group.is_short
            && group.retracted <= most
            && self.pending.len() <= EARLY_CHANGES
            && !group.is_sufficient(&self.window);
        group.refilling |= begins;
        begins
    }

    /// Rows to read of groups as they were stored when the epoch began: those retracted since are among them.
    pub fn refill_limit(&self, slots: &[Slot]) -> Option<usize> {
        let retracted = slots.iter().map(|&slot| self.of[slot as usize].retracted).max();
        Some(self.prefix_rows()?.saturating_add(retracted.unwrap_or(0)))
    }

    /// Groups' rows as they were stored when the epoch began; its changes are applied to them.
    pub fn load_and_change(
        &mut self,
        slots: &[Slot],
        found: &Found,
        limit: Option<usize>,
    ) -> Result<(), ExecError> {
        self.load_prefixes(slots, found, limit)?;
        slots.iter().for_each(|&slot| self.of[slot as usize].refilling = false);
        self.apply_pending(slots);
        for &slot in slots {
            let is_short = !self.is_sufficient(slot) && self.refill_limit(&[slot]) <= limit;
            self.of[slot as usize].is_short = is_short;
            self.trim(slot);
        }
        Ok(())
    }

    /// Makes the pending changes of groups to their rows as stored.
    pub fn apply_pending(&mut self, slots: &[Slot]) {
        if self.pending.is_empty() {
            return;
        }
        let read: HashSet<Slot> = slots.iter().copied().collect();
        for ((slot, key), change) in self.pending.iter().filter(|(of, _)| read.contains(&of.0)) {
            let group = &mut self.of[*slot as usize];
            let &Change { weight, order, at } = change;
            match group.rows.binary_search_by(|r| r.key.cmp(key)) {
                Ok(place) => {
                    group.rows[place].weight += weight;
                    if group.rows[place].weight == 0 {
                        let gone = group.rows.remove(place);
                        self.arena.release(gone.at);
                    }
                }
                Err(place) if weight != 0 && (place < group.rows.len() || group.complete) => {
                    self.arena.retain(at);
                    group.rows.insert(place, Ranked { key: key.clone(), order, at, weight });
                }
                Err(_) => {}
            }
        }
    }

    /// Whether a group's window can be told from the rows remembered.
    pub fn is_sufficient(&self, slot: Slot) -> bool {
        self.of[slot as usize].is_sufficient(&self.window)
    }

    /// Whether it can be told, and no row is still to come that is already taken back.
    pub fn is_certain(&self, slot: Slot) -> bool {
        self.is_sufficient(slot) && self.of[slot as usize].rows.iter().all(|r| r.weight > 0)
    }
}

impl Entries for Groups {
    fn ensure(&mut self, capacity: usize) {
        self.of.resize(capacity, Group::default());
    }

    /// The prefixes of groups; whole groups when there is no limit.
    fn read(&self, _: usize, keys: BinaryArray) -> Lookup {
        self.table.multi_scan(keys, self.fetch_limit())
    }

    fn read_ahead(&self, _: usize, keys: BinaryArray, rows: usize) -> Lookup {
        self.table.multi_scan(keys, Some(self.fetch_limit().map_or(rows, |limit| limit.min(rows))))
    }

    fn load(&mut self, _: usize, slots: &[Slot], found: &Found) -> Result<(), ExecError> {
        self.load_prefixes(slots, found, self.fetch_limit())
    }

    fn absent(&mut self, slot: Slot) {
        self.of[slot as usize] = Group { complete: true, ..Group::default() };
    }

    fn size(&self, slot: Slot) -> usize {
        let group = &self.of[slot as usize];
        let keys: usize = group.rows.iter().map(|r| r.key.heap_size()).sum();
        let row = size_of::<Ranked>() + self.arena.row_bytes();
        size_of::<Group>() + group.rows.len() * row + keys
    }

    fn release(&mut self, slot: Slot) -> bool {
        let group = std::mem::take(&mut self.of[slot as usize]);
        group.rows.iter().for_each(|r| self.arena.release(r.at));
        !group.rows.is_empty() || !group.complete
    }

    fn held(&self, keys: &KeyTable) -> usize {
        let pending = self.pending.len() * self.arena.row_bytes();
        keys.bytes().max(self.arena.bytes().saturating_sub(pending))
    }

    fn give_back(&mut self) {
        self.of = Vec::new();
    }

    /// Rewrites the rows in memory densely; only when nothing else refers to them.
    fn compact(&mut self, keys: &KeyTable) -> Result<(), ExecError> {
        let only_groups = self.pending.is_empty() && keys.dirty().is_empty();
        if only_groups && self.arena.wants_compaction() {
            let rows = self.of.iter_mut().flat_map(|g| g.rows.iter_mut());
            let mut refs: Vec<&mut RowRef> = rows.map(|r| &mut r.at).collect();
            self.arena.compact(&mut refs)?;
        }
        Ok(())
    }
}
