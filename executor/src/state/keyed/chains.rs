//! Keyed state and chained hints: what the keys of a hint find is given to the lookaheads that are chained to it, at
//! once if it is in memory, or when it has been read ([`crate::lookahead::chain`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::array::ArrayRef;
use millrace_common::collections::HashMap;

use super::{Entries, KeyedState};
use crate::error::ExecError;
use crate::lookahead::Hint;
use crate::lookahead::chain::{Carried, LIST_BYTES, MAX_MATCHES};
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
                rows.push(row);
                slots.push(slot);
            }
        }
        self.give(carried, &rows, &slots);
    }

    /// Entries have come: rows of hints that have waited for them go on.
    pub(super) fn follow(&mut self, complete: &[Slot]) {
        if self.chains.count == 0 {
            return;
        }
        let mut hints: HashMap<*const List, (Arc<List>, Vec<u32>, Vec<Slot>)> = HashMap::default();
        for &slot in complete {
            for Waiting { hash, row, list } in self.chains.take(slot) {
                if hash == self.keys.hash(slot) {
                    let of_hint = hints.entry(Arc::as_ptr(&list));
                    let (_, rows, slots) = of_hint.or_insert((list, vec![], vec![]));
                    rows.push(row);
                    slots.push(slot);
                }
            }
        }
        hints.values().for_each(|(list, rows, slots)| self.give(&list.carried, rows, slots));
    }

    /// An epoch has ended.
    pub(super) fn prune_chains(&mut self) {
        if self.chains.count > 0 {
            self.chains.prune(&self.keys);
        }
    }

    /// Pairs these rows of a hint with what their entries have. A failure is none of the task's.
    fn give(&self, carried: &Carried, rows: &[u32], slots: &[Slot]) {
        if slots.is_empty() || !carried.chain.is_wanted() {
            return;
        }
        if let Err(error) = self.pair(carried, rows, slots) {
            carried.chain.note_missed(rows.len());
            tracing::debug!(%error, "rows of chained hints could not be paired");
        }
    }

    fn pair(&self, carried: &Carried, rows: &[u32], slots: &[Slot]) -> Result<(), ExecError> {
        let chain = &carried.chain;
        let most = MostMet { rows: MAX_MATCHES, bytes: LIST_BYTES };
        let Met { of, columns, dropped } =
            self.entries.met(chain.port, slots, &most, &chain.met)?;
        chain.note_missed(dropped);
        let rows: Vec<u32> = of.into_iter().map(|i| rows[i as usize]).collect();
        chain.give(carried, &rows, &columns, &self.env.governor)
    }
}
