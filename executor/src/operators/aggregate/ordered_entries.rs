//! `string_agg`, `array_agg`, percentiles and their like: the current result of every slot as text, set at
//! the barrier from the call's value table (see [`super::values`]).

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, StringArray};
use arrow::datatypes::DataType;
use millrace_common::{SqlError, SqlType};
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::ordered_entries::build;

use crate::error::ExecError;
use crate::state::Slot;

/// See the module.
pub struct Collected {
    func: AggFunc,
    distinct: bool,
    output: DataType,
    results: Vec<Option<Box<str>>>,
}

impl Collected {
    pub fn new(func: AggFunc, distinct: bool, output: &DataType) -> Collected {
        Collected { func, distinct, output: output.clone(), results: Vec::new() }
    }

    pub fn ensure(&mut self, capacity: usize) {
        self.results.resize(capacity, None);
    }

    pub fn is_blank(&self, slot: usize) -> bool {
        self.results[slot].is_none()
    }

    /// Bytes of a slot's result beside its place.
    pub fn heap_bytes(&self, slot: usize) -> usize {
        self.results[slot].as_ref().map_or(0, |text| text.len())
    }

    pub fn set(&mut self, slot: usize, result: Option<Box<str>>) {
        self.results[slot] = result;
    }

    /// The stored column.
    pub fn texts(&self, slots: &[Slot]) -> ArrayRef {
        let texts = slots.iter().map(|&s| self.results[s as usize].as_deref());
        Arc::new(StringArray::from_iter(texts))
    }

    pub fn load(&mut self, slots: &[Slot], column: &ArrayRef) {
        let texts = column.as_string::<i32>();
        for (i, &s) in slots.iter().enumerate() {
            self.results[s as usize] = texts.is_valid(i).then(|| texts.value(i).into());
        }
    }

    pub fn result(&self, slots: &[Slot], output: &DataType) -> Result<ArrayRef, ExecError> {
        if self.func == AggFunc::StringAgg && *output != DataType::Binary {
            return Ok(arrow::compute::cast(&self.texts(slots), output)?);
        }
        let to = SqlType::from_arrow(output)?;
        Ok(millrace_functions::cast::convert(&self.texts(slots), to)?)
    }

    /// A group's result from its entries in order, each with its count.
    pub fn build<'a>(
        &self,
        entries: impl Iterator<Item = (&'a [u8], i64)>,
    ) -> Result<Option<Box<str>>, SqlError> {
        build(self.func, self.distinct, &self.output, None, entries)
    }
}
