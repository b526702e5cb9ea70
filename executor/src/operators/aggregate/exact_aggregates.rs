//! Aggregates of exact sums (variances, regressions, bits): one state a slot, absent while the group has no
//! values.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, BinaryBuilder, Int64Array};
use arrow::datatypes::{DataType, Int64Type};
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::exact_aggregates::{Exact, ExactCall, Number, column};

use super::accumulator::Rows;
use crate::error::ExecError;
use crate::state::Slot;

/// See the module.
pub struct ExactSums {
    call: ExactCall,
    /// The result over no values: no pairs are none.
    empty: Option<i64>,
    states: Vec<Option<Box<Exact>>>,
    counts: Vec<i64>,
}

impl ExactSums {
    /// Bytes a slot takes, about.
    pub const SLOT_BYTES: usize = 400;

    pub fn new(func: AggFunc, arg: &DataType) -> Result<ExactSums, ExecError> {
        let empty = (func == AggFunc::RegrCount).then_some(0);
        let call = ExactCall::new(func, arg)?;
        Ok(ExactSums { call, empty, states: Vec::new(), counts: Vec::new() })
    }

    pub fn ensure(&mut self, capacity: usize) {
        self.states.resize_with(capacity, || None);
        self.counts.resize(capacity, 0);
    }

    pub fn reset(&mut self, slot: usize) {
        self.states[slot] = None;
        self.counts[slot] = 0;
    }

    pub fn is_blank(&self, slot: usize) -> bool {
        // Sums of which everything was taken back have the bytes of none.
        let none = |state: &Exact| state.to_bytes() == self.call.empty().to_bytes();
        self.counts[slot] == 0 && self.states[slot].as_deref().is_none_or(none)
    }

    pub fn update(&mut self, rows: &Rows<'_>, arg: &ArrayRef) -> Result<(), ExecError> {
        let values = self.call.values(arg)?;
        let (call, states, counts) = (&self.call, &mut self.states, &mut self.counts);
        rows.for_each(|i, s, w| {
            states[s].get_or_insert_with(|| Box::new(call.empty())).add(&values, i, w);
            counts[s] += w;
        });
        Ok(())
    }

    /// The stored columns: the sums' bytes (empty: no values yet), the count.
    pub fn store(&self, slots: &[Slot]) -> Vec<ArrayRef> {
        let mut sums = BinaryBuilder::new();
        for &s in slots {
            match &self.states[s as usize] {
                Some(state) => sums.append_value(state.to_bytes()),
                None => sums.append_value([]),
            }
        }
        let counts = slots.iter().map(|&s| self.counts[s as usize]);
        vec![Arc::new(sums.finish()), Arc::new(Int64Array::from_iter_values(counts))]
    }

    pub fn load(&mut self, slots: &[Slot], columns: &[ArrayRef]) -> Result<(), ExecError> {
        let [sums, counts] = columns else {
            return Err(ExecError::internal("exact sums are stored in two columns"));
        };
        let (sums, counts) = (sums.as_binary::<i32>(), counts.as_primitive::<Int64Type>());
        for (i, &s) in slots.iter().enumerate() {
            let state = match sums.value(i) {
                [] => None,
                bytes => Some(Box::new(self.call.read(bytes)?)),
            };
            self.states[s as usize] = state;
            self.counts[s as usize] = counts.value(i);
        }
        Ok(())
    }

    /// Results that fail (out of range) are NULL and counted.
    pub fn result(
        &self,
        slots: &[Slot],
        output: &DataType,
        overflows: &mut u64,
    ) -> Result<ArrayRef, ExecError> {
        let one = |&s: &Slot| {
            let state = self.states[s as usize].as_ref().filter(|_| self.counts[s as usize] > 0);
            let Some(state) = state else { return Number::Integer(self.empty) };
            self.call.result(state, output).unwrap_or_else(|_| {
                *overflows += 1;
                Number::Integer(None)
            })
        };
        Ok(column(slots.iter().map(one).collect(), output)?)
    }
}
