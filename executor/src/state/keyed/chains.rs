//! Keyed state and chained hints: what the keys of a hint find is given to the lookaheads that are chained to it, at
//! once if it is in memory, or when it has been read ([`crate::lookahead::chain`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::array::ArrayRef;
use millrace_common::collections::HashMap;

use super::{Entries, KeyedState};
use crate::error::ExecError;
use crate::lookahead::chain::{Carried, Chain, LIST_BYTES, MAX_MATCHES};
use crate::lookahead::{HINT_KEYS, Hint};
use crate::state::keys::ChunkKeys;
use crate::state::{KeyTable, Slot};

/// Rows of hints that wait for the entries of their keys at most.
const MAX_WAITING: usize = 16_384;
/// Bytes of what hints carry of which rows wait at most.
const MAX_WAITING_BYTES: usize = 4 << 20;

/// Bounds of [`Entries::met`].
pub struct MostMet {
    /// Rows under each key.
    pub rows: usize,
    /// Of the columns of all rows.
    pub bytes: usize,
}

/// Rows that are met.
#[derive(Default)]
pub struct Met {
    /// By position the entry of each.
    pub of: Vec<u32>,
    /// The columns asked for.
    pub columns: Vec<ArrayRef>,
    /// Rows that were too large.
    pub dropped: usize,
}

/// Rows of hints that wait for what their keys find.
#[derive(Default)]
pub struct Chains {
    waiting: HashMap<Slot, Vec<Waiting>>,
    count: usize,
    /// Of what their hints carry.
    bytes: Arc<AtomicUsize>,
}

struct Waiting {
    /// Of the key: the slot may have become another's.
    hash: u64,
    /// The row of the hint.
    row: u32,
    list: Arc<List>,
}

/// What a hint carries. Its bytes count until none of its rows waits.
struct List {
    carried: Arc<Carried>,
    bytes: Arc<AtomicUsize>,
}

/// Rows of hints of one chain and one epoch that go on together, as many as one hint may have: hints of single rows have
/// one key each.
#[derive(Default)]
struct Together {
    hints: Vec<Arc<List>>,
    /// The place of each among them.
    places: HashMap<*const List, usize>,
    /// The place of each row's hint, and its number there.
    rows: Vec<(usize, usize)>,
    slots: Vec<Slot>,
}

impl Together {
    /// Whether a row of this hint may go with these.
    fn takes(&self, hint: &List) -> bool {
        let own = &hint.carried;
        let is_alike = |known: &Arc<List>| {
            let known = &known.carried;
            Arc::ptr_eq(&known.chain, &own.chain) && known.due.is_same(&own.due)
        };
        self.rows.len() < HINT_KEYS && self.hints.first().is_some_and(is_alike)
    }

    fn add(&mut self, hint: Arc<List>, row: u32, slot: Slot) {
        let next = self.hints.len();
        let place = *self.places.entry(Arc::as_ptr(&hint)).or_insert(next);
        if place == next {
            self.hints.push(hint);
        }
        self.rows.push((place, row as usize));
        self.slots.push(slot);
    }
}

impl Drop for List {
    fn drop(&mut self) {
        self.bytes.fetch_sub(self.carried.bytes(), Ordering::Relaxed);
    }
}

impl Chains {
    /// For rows of a hint that wait; `None`: there is no room for what it carries.
    fn list(&self, carried: &Arc<Carried>) -> Option<Arc<List>> {
        let bytes = self.bytes.fetch_add(carried.bytes(), Ordering::Relaxed) + carried.bytes();
        // Dropped, it gives the bytes back.
        let list = List { carried: Arc::clone(carried), bytes: Arc::clone(&self.bytes) };
        (bytes <= MAX_WAITING_BYTES).then(|| Arc::new(list))
    }

    /// Whether there is room for it.
    fn add(&mut self, slot: Slot, waiting: Waiting) -> bool {
        let is_room = self.count < MAX_WAITING;
        if is_room {
            self.count += 1;
            self.waiting.entry(slot).or_default().push(waiting);
        }
        is_room
    }

    fn take(&mut self, slot: Slot) -> Vec<Waiting> {
        let taken = self.waiting.remove(&slot).unwrap_or_default();
        self.count -= taken.len();
        taken
    }

    /// Only what still waits is kept.
    fn prune(&mut self, keys: &KeyTable) {
        self.waiting.retain(|&slot, _| keys.is_prefetching(slot) || keys.is_fetching(slot));
        self.count = self.waiting.values().map(Vec::len).sum();
    }
}

impl<E: Entries> KeyedState<E> {
    /// A hint with these keys has been taken in.
    pub(super) fn chain(&mut self, hint: &Hint, keys: &ChunkKeys) {
        let Some(carried) = &hint.carried else { return };
        if carried.chain.port != hint.port || !carried.chain.is_wanted() {
            return;
        }
        let (mut rows, mut slots) = (Vec::new(), Vec::new());
        let mut list: Option<Option<Arc<List>>> = None;
        for (row, &hash) in (0u32..).zip(&keys.hashes) {
            let Some(slot) = self.keys.find(hash, keys.key(row as usize)) else { continue };
            if self.keys.is_prefetching(slot) || self.keys.is_fetching(slot) {
                let list = list.get_or_insert_with(|| self.chains.list(carried)).clone();
                let waits =
                    list.is_some_and(|list| self.chains.add(slot, Waiting { hash, row, list }));
                carried.chain.note_missed(usize::from(!waits));
            } else if self.keys.is_resident(slot) {
                rows.push((0, row as usize));
                slots.push(slot);
            }
        }
        self.give(&[carried.as_ref()], &rows, &slots);
    }

    /// Entries have come: rows of hints that have waited for them go on.
    pub(super) fn follow(&mut self, complete: &[Slot]) {
        if self.chains.count == 0 {
            return;
        }
        let mut all: Vec<Together> = Vec::new();
        for &slot in complete {
            for Waiting { hash, row, list } in self.chains.take(slot) {
                if hash != self.keys.hash(slot) {
                    continue;
                }
                let known = all.iter().rposition(|together| together.takes(&list));
                let at = known.unwrap_or_else(|| {
                    all.push(Together::default());
                    all.len() - 1
                });
                all[at].add(list, row, slot);
            }
        }
        for Together { hints, rows, slots, .. } in &all {
            let hints: Vec<&Carried> = hints.iter().map(|list| list.carried.as_ref()).collect();
            self.give(&hints, rows, slots);
        }
    }

    /// An epoch has ended.
    pub(super) fn prune_chains(&mut self) {
        if self.chains.count > 0 {
            self.chains.prune(&self.keys);
        }
    }

    /// Pairs these rows of hints of one chain with what their entries have. A failure is none of the task's.
    fn give(&self, hints: &[&Carried], rows: &[(usize, usize)], slots: &[Slot]) {
        let Some(chain) = hints.first().map(|hint| &hint.chain) else { return };
        if slots.is_empty() || !chain.is_wanted() {
            return;
        }
        if let Err(error) = self.pair(chain, hints, rows, slots) {
            chain.note_missed(rows.len());
            tracing::debug!(%error, "rows of chained hints could not be paired");
        }
    }

    fn pair(
        &self,
        chain: &Chain,
        hints: &[&Carried],
        rows: &[(usize, usize)],
        slots: &[Slot],
    ) -> Result<(), ExecError> {
        let most = MostMet { rows: MAX_MATCHES, bytes: LIST_BYTES };
        let Met { of, columns, dropped } =
            self.entries.met(chain.port, slots, &most, &chain.met)?;
        chain.note_missed(dropped);
        let rows: Vec<(usize, usize)> = of.into_iter().map(|i| rows[i as usize]).collect();
        chain.give(hints, &rows, &columns, &self.env.governor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lookahead::Due;
    use crate::lookahead::chain::chain_to;
    use crate::memory::{MemoryClass, MemoryGovernor};

    fn hint(chain: &Arc<Chain>, due: &Due) -> Arc<List> {
        let account = MemoryGovernor::new(1 << 20).account(MemoryClass::Channel);
        let (chain, due) = (Arc::clone(chain), due.clone());
        let carried = Carried { chain, columns: Vec::new(), due, is_alone: false, account };
        Arc::new(List { carried: Arc::new(carried), bytes: Arc::default() })
    }

    #[test]
    fn rows_of_hints_of_one_epoch_go_on_together() {
        let (chain, other) = (chain_to(Vec::new()), chain_to(Vec::new()));
        let (epoch, next) = (Due::default(), Due::default());
        let (first, second) = (hint(&chain, &epoch), hint(&chain, &epoch));
        let mut together = Together::default();
        assert!(!together.takes(&first), "it is of no epoch yet");
        together.add(Arc::clone(&first), 5, 70);
        assert!(together.takes(&first) && together.takes(&second));
        together.add(Arc::clone(&second), 0, 71);
        together.add(first, 6, 72);
        let expected = [(0, 5), (1, 0), (0, 6)];
        assert_eq!((together.hints.len(), together.rows.as_slice()), (2, &expected[..]));
        assert_eq!(together.slots, [70, 71, 72]);
        assert!(!together.takes(&hint(&chain, &next)), "another epoch");
        assert!(!together.takes(&hint(&other, &epoch)), "another chain");
        (3..HINT_KEYS as u32).for_each(|row| together.add(Arc::clone(&second), row, row));
        assert!(!together.takes(&second), "as many as a hint may have");
    }
}
