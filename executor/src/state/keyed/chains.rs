//! Keyed state and chained hints: what the keys of a hint find is given to the lookaheads that are chained to it, at
//! once if it is in memory, or when it has been read ([`crate::lookahead::chain`]).

use std::sync::Arc;

use millrace_common::collections::HashMap;

use super::{Entries, KeyedState};
use crate::error::ExecError;
use crate::lookahead::Hint;
use crate::lookahead::chain::{Carried, MAX_MATCHES};
use crate::state::{KeyTable, Slot};

/// Rows of hints that wait for the entries of their keys at most.
const MAX_WAITING: usize = 16_384;

/// Rows of hints that wait for what their keys find.
#[derive(Default)]
pub struct Chains {
    waiting: HashMap<Slot, Vec<Waiting>>,
    count: usize,
}

struct Waiting {
    /// Of the key: the slot may have become another's.
    hash: u64,
    /// The row of the hint.
    row: u32,
    carried: Arc<Carried>,
}

impl Chains {
    fn add(&mut self, slot: Slot, waiting: Waiting) {
        if self.count < MAX_WAITING {
            self.count += 1;
            self.waiting.entry(slot).or_default().push(waiting);
        }
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
    /// A hint has been taken in.
    pub(super) fn chain(&mut self, hint: &Hint) -> Result<(), ExecError> {
        let Some(carried) = &hint.carried else { return Ok(()) };
        if carried.chain.port != hint.port || !carried.chain.is_wanted() {
            return Ok(());
        }
        let (mut rows, mut slots) = (Vec::new(), Vec::new());
        for (row, &hash) in (0u32..).zip(&hint.keys.hashes) {
            let Some(slot) = self.keys.find(hash, hint.keys.key(row as usize)) else { continue };
            if self.keys.is_prefetching(slot) || self.keys.is_fetching(slot) {
                let carried = Arc::clone(carried);
                self.chains.add(slot, Waiting { hash, row, carried });
            } else if self.keys.is_resident(slot) {
                rows.push(row);
                slots.push(slot);
            }
        }
        self.give(carried, &rows, &slots)
    }

    /// Entries have come: rows of hints that have waited for them go on.
    pub(super) fn follow(&mut self, complete: &[Slot]) -> Result<(), ExecError> {
        if self.chains.count == 0 {
            return Ok(());
        }
        let mut hints: HashMap<*const Carried, (Arc<Carried>, Vec<u32>, Vec<Slot>)> =
            HashMap::default();
        for &slot in complete {
            for Waiting { hash, row, carried } in self.chains.take(slot) {
                if hash == self.keys.hash(slot) {
                    let of_hint = hints.entry(Arc::as_ptr(&carried));
                    let (_, rows, slots) = of_hint.or_insert((carried, vec![], vec![]));
                    rows.push(row);
                    slots.push(slot);
                }
            }
        }
        hints.values().try_for_each(|(carried, rows, slots)| self.give(carried, rows, slots))
    }

    /// An epoch has ended.
    pub(super) fn prune_chains(&mut self) {
        if self.chains.count > 0 {
            self.chains.prune(&self.keys);
        }
    }

    fn give(&self, carried: &Carried, rows: &[u32], slots: &[Slot]) -> Result<(), ExecError> {
        let chain = &carried.chain;
        if slots.is_empty() || !chain.is_wanted() {
            return Ok(());
        }
        let (of, met) = self.entries.met(chain.port, slots, MAX_MATCHES, &chain.met)?;
        let rows: Vec<u32> = of.into_iter().map(|i| rows[i as usize]).collect();
        chain.give(carried, &rows, &met)
    }
}
