//! Keys that are never asked for again, because a bound of one of their columns has been raised.

use arrow::array::Array;

use super::{ChunkKeys, Entries, KeyedState};
use crate::error::ExecError;
use crate::operators::times_of;
use crate::state::Slot;

impl<E: Entries> KeyedState<E> {
    /// The slots of keys that no input row brings, but the watermark of the first input.
    pub fn probe_keys(&mut self, keys: &ChunkKeys) -> Vec<Slot> {
        let stamps = self.stamps.untimed(keys.hashes.len());
        let mut slots = Vec::with_capacity(keys.hashes.len());
        self.keys.probe(keys, None, &stamps, &mut slots);
        self.grow();
        if !self.due.is_empty() {
            self.touch(0, &slots);
        }
        slots
    }

    /// Keys whose column `at` is below the bound are never asked for again.
    pub fn close(&mut self, at: usize, bound: i64) {
        self.closed = Some((at, bound));
    }

    /// Entries of closed keys leave. At a barrier, when nothing is dirty.
    pub fn sweep(&mut self) -> Result<(), ExecError> {
        let Some((at, bound)) = self.closed.filter(|(_, bound)| *bound > self.swept) else {
            return Ok(());
        };
        self.swept = bound;
        for slot in self.closed_keys(at, bound)? {
            self.remove(slot);
        }
        Ok(())
    }

    fn closed_keys(&self, at: usize, bound: i64) -> Result<Vec<Slot>, ExecError> {
        let known = |&s: &Slot| !self.keys.is_fetching(s);
        self.below(self.keys.slots().filter(known).collect(), at, bound)
    }

    /// Those whose key's column `at` is below the bound.
    pub(super) fn below(
        &self,
        mut slots: Vec<Slot>,
        at: usize,
        bound: i64,
    ) -> Result<Vec<Slot>, ExecError> {
        if slots.is_empty() {
            return Ok(slots);
        }
        let columns = self.readers[0].codec().decode(slots.iter().map(|&s| self.keys.key(s)))?;
        let Some(times) = columns.get(at) else { return Ok(Vec::new()) };
        let times = times_of(times)?;
        let mut row = 0;
        slots.retain(|_| {
            row += 1;
            times.is_valid(row - 1) && times.value(row - 1) < bound
        });
        Ok(slots)
    }
}
