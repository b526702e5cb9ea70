//! `string_agg` and `array_agg`: the current result of every slot as text, set at the barrier from the
//! call's value table (see [`super::values`]).

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, StringArray};
use arrow::datatypes::DataType;
use millrace_common::SqlType;
use millrace_planner::functions::collected::read_entry;
use millrace_planner::graph::AggFunc;

use crate::error::ExecError;
use crate::state::Slot;

/// See the module.
pub struct Collected {
    func: AggFunc,
    pub distinct: bool,
    results: Vec<Option<Box<str>>>,
}

impl Collected {
    pub fn new(func: AggFunc, distinct: bool) -> Collected {
        Collected { func, distinct, results: Vec::new() }
    }

    pub fn ensure(&mut self, capacity: usize) {
        self.results.resize(capacity, None);
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
        if self.func == AggFunc::StringAgg {
            return Ok(arrow::compute::cast(&self.texts(slots), output)?);
        }
        let to = SqlType::from_arrow(output)?;
        Ok(millrace_planner::functions::cast::convert(&self.texts(slots), to)?)
    }

    /// A group's result from its entries in order, each with its count.
    pub fn build<'a>(
        &self,
        entries: impl Iterator<Item = (&'a [u8], i64)>,
    ) -> Result<Option<Box<str>>, ExecError> {
        let mut out = String::new();
        let mut any = false;
        for (entry, count) in entries {
            let (value, separator) = read_entry(entry)
                .ok_or_else(|| ExecError::internal("a collected value is malformed"))?;
            let count = if self.distinct { 1 } else { count };
            for _ in 0..count.max(0) {
                self.push(&mut out, value, separator, !any);
                any = true;
            }
        }
        if self.func == AggFunc::ArrayAgg {
            out.push('}');
        }
        Ok(any.then(|| out.into_boxed_str()))
    }

    fn push(&self, out: &mut String, value: Option<&str>, separator: &str, first: bool) {
        match self.func {
            AggFunc::ArrayAgg => {
                out.push(if first { '{' } else { ',' });
                match value {
                    None => out.push_str("NULL"),
                    Some(value) => {
                        out.push('"');
                        for c in value.chars() {
                            if matches!(c, '"' | '\\') {
                                out.push('\\');
                            }
                            out.push(c);
                        }
                        out.push('"');
                    }
                }
            }
            _ => {
                if !first {
                    out.push_str(separator);
                }
                out.push_str(value.unwrap_or(""));
            }
        }
    }
}
