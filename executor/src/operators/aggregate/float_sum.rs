//! Exact, order-independent float sums a slot (docs/design.md §3).

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, BinaryBuilder};
use millrace_common::exact_sum::ExactSum;

use crate::error::ExecError;
use crate::state::Slot;

/// One exact sum a slot.
#[derive(Default)]
pub struct FloatSums {
    sums: Vec<ExactSum>,
}

impl FloatSums {
    pub const SLOT_BYTES: usize = size_of::<ExactSum>();

    pub fn ensure(&mut self, capacity: usize) {
        self.sums.resize_with(capacity, ExactSum::default);
    }

    pub fn reset(&mut self, slot: usize) {
        self.sums[slot] = ExactSum::default();
    }

    pub fn is_zero(&self, slot: usize) -> bool {
        self.sums[slot] == ExactSum::default()
    }

    #[inline]
    pub fn add(&mut self, slot: usize, value: f64, weight: i64) {
        self.sums[slot].add(value, weight);
    }

    pub fn value(&self, slot: usize) -> f64 {
        self.sums[slot].value()
    }

    pub fn store(&self, slots: &[Slot]) -> ArrayRef {
        let mut out = BinaryBuilder::new();
        for &s in slots {
            out.append_value(self.sums[s as usize].to_bytes());
        }
        Arc::new(out.finish())
    }

    pub fn load(&mut self, slots: &[Slot], column: &ArrayRef) -> Result<(), ExecError> {
        let column = column.as_binary::<i32>();
        for (i, &s) in slots.iter().enumerate() {
            self.sums[s as usize] = ExactSum::from_bytes(column.value(i))
                .ok_or_else(|| ExecError::internal("a stored float sum cannot be read"))?;
        }
        Ok(())
    }
}
