//! Results that are made of all values of a group.

use arrow::array::AsArray;
use millrace_storage::Found;

use super::{ValueTable, prefixes};
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::operators::aggregate::accumulator::Accumulator;
use crate::state::arena::batch_bytes;
use crate::state::fetch::wait;
use crate::state::{KeyTable, Slot};

/// Groups whose values are read whole at first, before it is known how large they are.
pub(super) const FIRST_GROUPS: usize = 256;
/// Bytes of values that are read whole at once, about.
const WHOLE_BYTES: usize = 4 << 20;

impl ValueTable {
    /// Makes the results of the groups that have been read, then of those that are not read yet, so many at a time
    /// as are not too large together.
    pub(super) async fn collect_all(
        &mut self,
        mut unread: &[Slot],
        keys: &KeyTable,
        accumulators: &mut [Accumulator],
        errors: &ErrorSink,
    ) -> Result<(), ExecError> {
        while let Some((slots, found)) = self.all.take() {
            let bytes = batch_bytes(&found.values) / slots.len().max(1);
            self.collect(accumulators, &slots, &found, errors)?;
            let (next, rest) = unread.split_at(unread.len().min(WHOLE_BYTES / (bytes + 1) + 1));
            if !next.is_empty() {
                let read = self.state.entries.table.multi_scan(prefixes(keys, next), None);
                self.all = Some((next.to_vec(), wait(read).await?));
            }
            unread = rest;
        }
        Ok(())
    }

    /// Makes the results of changed groups anew, from all their values in order. One that cannot be made
    /// is NULL and counted.
    fn collect(
        &self,
        accumulators: &mut [Accumulator],
        slots: &[Slot],
        found: &Found,
        errors: &ErrorSink,
    ) -> Result<(), ExecError> {
        let values = found.values.column(0).as_binary::<i32>();
        let mut groups: Vec<Vec<usize>> = vec![Vec::new(); slots.len()];
        for (i, &input) in found.input.values().iter().enumerate() {
            groups[input as usize].push(i);
        }
        for &call in &self.collected {
            let Accumulator::Collected(collected) = &mut accumulators[call] else {
                return Err(ExecError::internal("a value table serves another call"));
            };
            for (&slot, rows) in slots.iter().zip(&groups) {
                let entries = rows.iter().map(|&i| (values.value(i), found.weights.value(i)));
                let result = collected.build(entries);
                let result = result.unwrap_or_else(|e| {
                    errors.report("Aggregate", &e, 1);
                    None
                });
                collected.set(slot as usize, result);
            }
        }
        Ok(())
    }
}
