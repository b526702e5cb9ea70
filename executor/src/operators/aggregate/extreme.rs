//! MIN and MAX: the current result of every slot.
//!
//! Over append-only input it is maintained in place. Where rows may be retracted the result is set at
//! the barrier from the call's value table (see [`super::values`]).

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array};
use arrow::compute::{SortOptions, cast};
use arrow::datatypes::{DataType, Int64Type};
use millrace_common::fault_injection::is_planted;
use millrace_common::keys::KeyCodec;

use super::accumulator::Rows;
use crate::error::ExecError;
use crate::state::{KeyBytes, Slot};

/// See the module.
pub struct Extreme {
    max: bool,
    retractable: bool,
    data_type: DataType,
    values: Values,
}

enum Values {
    /// Types that cast to and from 64-bit integers in order.
    Ints { values: Vec<i64>, valid: Vec<bool> },
    /// All others, by their order-preserving bytes.
    Bytes { values: Vec<Option<KeyBytes>>, codec: KeyCodec },
}

/// The order in which values are kept. It is that of an array's elements too, of which NULL is the greatest, as in
/// PostgreSQL; where a value that is NULL would stand does not matter, because none is kept.
pub fn value_order(t: &DataType, descending: bool) -> SortOptions {
    SortOptions { descending, nulls_first: descending || !t.is_nested() }
}

impl Extreme {
    pub fn new(t: &DataType, max: bool, retractable: bool) -> Result<Extreme, ExecError> {
        let ints = matches!(
            t,
            DataType::Int8
                | DataType::Int16
                | DataType::Int32
                | DataType::Int64
                | DataType::Timestamp(_, _)
        );
        let values = if ints {
            Values::Ints { values: Vec::new(), valid: Vec::new() }
        } else {
            let codec = KeyCodec::with_options([(t.clone(), value_order(t, false))])?;
            Values::Bytes { values: Vec::new(), codec }
        };
        Ok(Extreme { max, retractable, data_type: t.clone(), values })
    }

    pub fn ensure(&mut self, capacity: usize) {
        match &mut self.values {
            Values::Ints { values, valid } => {
                values.resize(capacity, 0);
                valid.resize(capacity, false);
            }
            Values::Bytes { values, .. } => values.resize(capacity, None),
        }
    }

    pub fn reset(&mut self, slot: usize) {
        match &mut self.values {
            Values::Ints { valid, .. } => valid[slot] = false,
            Values::Bytes { values, .. } => values[slot] = None,
        }
    }

    pub fn is_blank(&self, slot: usize) -> bool {
        match &self.values {
            Values::Ints { valid, .. } => !valid[slot],
            Values::Bytes { values, .. } => values[slot].is_none(),
        }
    }

    /// Bytes of a slot's value beside its place.
    pub fn heap_bytes(&self, slot: usize) -> usize {
        match &self.values {
            Values::Ints { .. } => 0,
            Values::Bytes { values, .. } => values[slot].as_ref().map_or(0, KeyBytes::heap_size),
        }
    }

    /// Takes in rows that are never retracted.
    pub fn update(&mut self, rows: &Rows<'_>, arg: &ArrayRef) -> Result<(), ExecError> {
        if self.retractable {
            return Ok(());
        }
        let max = self.max;
        let mut retracted = false;
        match &mut self.values {
            Values::Ints { values, valid } => {
                let arg = cast(arg, &DataType::Int64)?;
                let arg = arg.as_primitive::<Int64Type>().values();
                rows.for_each(|i, s, w| {
                    retracted |= w < 0;
                    let better = if max { arg[i] > values[s] } else { arg[i] < values[s] };
                    if better || !valid[s] {
                        values[s] = arg[i];
                        valid[s] = true;
                    }
                });
            }
            Values::Bytes { values, codec } => {
                let arg = codec.rows(&[Arc::clone(arg)])?;
                rows.for_each(|i, s, w| {
                    retracted |= w < 0;
                    let new = arg.row(i).data();
                    let better = match &values[s] {
                        None => true,
                        Some(old) if max => new > &**old,
                        Some(old) => new < &**old,
                    };
                    if better {
                        values[s] = Some(KeyBytes::new(new));
                    }
                });
            }
        }
        if retracted {
            return Err(ExecError::internal("an append-only min or max got a retraction"));
        }
        Ok(())
    }

    /// Sets slots, row by row; NULL: no value.
    pub fn load(&mut self, slots: &[Slot], column: &ArrayRef) -> Result<(), ExecError> {
        match &mut self.values {
            Values::Ints { values, valid } => {
                let column = cast(column, &DataType::Int64)?;
                let column = column.as_primitive::<Int64Type>();
                for (i, &s) in slots.iter().enumerate() {
                    if valid[s as usize] && column.is_null(i) && is_planted("minmax-never-retracts")
                    {
                        continue;
                    }
                    let worse = if self.max {
                        column.value(i) < values[s as usize]
                    } else {
                        column.value(i) > values[s as usize]
                    };
                    if valid[s as usize] && worse && is_planted("minmax-never-retracts") {
                        continue;
                    }
                    values[s as usize] = column.value(i);
                    valid[s as usize] = column.is_valid(i);
                }
            }
            Values::Bytes { values, codec } => {
                let rows = codec.rows(&[Arc::clone(column)])?;
                for (i, &s) in slots.iter().enumerate() {
                    let value = column.is_valid(i).then(|| KeyBytes::new(rows.row(i).data()));
                    values[s as usize] = value;
                }
            }
        }
        Ok(())
    }

    /// The current value of slots, of the argument's type.
    pub fn result(&self, slots: &[Slot]) -> Result<ArrayRef, ExecError> {
        match &self.values {
            Values::Ints { values, valid } => {
                let ints = Int64Array::from_iter(
                    slots.iter().map(|&s| valid[s as usize].then_some(values[s as usize])),
                );
                Ok(cast(&ints, &self.data_type)?)
            }
            Values::Bytes { values, codec } => {
                let null = codec.rows(&[arrow::array::new_null_array(&self.data_type, 1)])?;
                let rows = slots.iter().map(|&s| match &values[s as usize] {
                    Some(v) => &**v,
                    None => null.row(0).data(),
                });
                let mut columns = codec.decode(rows)?;
                columns.pop().ok_or_else(|| ExecError::internal("a value decodes to no column"))
            }
        }
    }
}
