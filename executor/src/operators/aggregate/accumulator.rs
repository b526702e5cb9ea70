//! Columnar accumulators: one value a slot, in plain vectors, updated a chunk at a time.
//!
//! Everything is exact under any weights in any order: sums are integers (with a carry, so that a
//! sum that left the type and came back is right again) or exact float sums. What is stored is what
//! `millrace_graph::state` lays out.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, Decimal128Array, Float64Array, Int64Array,
    PrimitiveArray,
};
use arrow::buffer::BooleanBuffer;
use arrow::compute::cast;
use arrow::datatypes::{DataType, Decimal128Type, Float64Type, Int64Type, Schema, i256};
use millrace_common::SqlError;
use millrace_functions::aggregate_kind::AggFunc;
use millrace_graph::AggCall;

use super::exact_aggregates::ExactSums;
use super::extreme::Extreme;
use super::float_sum::FloatSums;
use super::ordered_entries::Collected;
use crate::error::ExecError;
use crate::state::Slot;

/// The rows of one update: parallel slots, weights (`None`: all 1), and which of them count.
pub struct Rows<'a> {
    pub slots: &'a [Slot],
    pub weights: Option<&'a [i64]>,
    pub mask: Option<BooleanBuffer>,
}

impl Rows<'_> {
    #[inline]
    pub fn for_each(&self, mut f: impl FnMut(usize, usize, i64)) {
        match (self.weights, &self.mask) {
            (None, None) => {
                for (i, &s) in self.slots.iter().enumerate() {
                    f(i, s as usize, 1);
                }
            }
            (Some(w), None) => {
                for (i, (&s, &w)) in self.slots.iter().zip(w).enumerate() {
                    f(i, s as usize, w);
                }
            }
            (w, Some(mask)) => {
                for i in mask.set_indices() {
                    f(i, self.slots[i] as usize, w.map_or(1, |w| w[i]));
                }
            }
        }
    }
}

/// An exact sum of 128-bit values: `carry * 2^128 + low`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct WideSum {
    low: i128,
    carry: i64,
}

impl WideSum {
    #[inline]
    fn add(&mut self, value: i128, weight: i64) {
        let (value, carry) = if weight == 1 {
            (value, 0)
        } else if let Some(product) = value.checked_mul(i128::from(weight)) {
            (product, 0)
        } else {
            let product = i256::from_i128(value).wrapping_mul(i256::from_i128(i128::from(weight)));
            let (low, high) = product.to_parts();
            let low = low as i128;
            (low, (high + i128::from(low < 0)) as i64)
        };
        let (sum, overflow) = self.low.overflowing_add(value);
        self.low = sum;
        self.carry += carry + if overflow { if value > 0 { 1 } else { -1 } } else { 0 };
    }

    /// The sum, if 128 bits hold it.
    fn get(self) -> Option<i128> {
        (self.carry == 0).then_some(self.low)
    }
}

/// The stored count column of a sum also carries what the sum column cannot hold: a carry above its
/// 48 low bits. Without overflow it is just the count.
const COUNT_BITS: u32 = 48;

fn pack(count: i64, carry: i64) -> i64 {
    count.wrapping_add(carry << COUNT_BITS)
}

fn unpack(packed: i64) -> (i64, i64) {
    let carry = (packed.wrapping_add(1 << (COUNT_BITS - 1))) >> COUNT_BITS;
    (packed.wrapping_sub(carry << COUNT_BITS), carry)
}

/// One call's state over all slots.
pub enum Accumulator {
    Count(Vec<i64>),
    /// Integers (scale 0) and decimals.
    Sum {
        sums: Vec<WideSum>,
        counts: Vec<i64>,
        scale: i8,
        avg: bool,
    },
    Float {
        sums: FloatSums,
        counts: Vec<i64>,
        avg: bool,
    },
    Interval {
        parts: [Vec<WideSum>; 3],
        counts: Vec<i64>,
        avg: bool,
    },
    Bool {
        trues: Vec<i64>,
        falses: Vec<i64>,
        and: bool,
    },
    Extreme(Extreme),
    Collected(Collected),
    Exact(ExactSums),
}

impl Accumulator {
    pub fn new(call: &AggCall, input: &Schema) -> Result<Accumulator, ExecError> {
        let arg = call.arg.map(|a| input.field(a).data_type());
        Ok(match call.func {
            AggFunc::Count => Accumulator::Count(Vec::new()),
            AggFunc::BoolAnd | AggFunc::BoolOr => Accumulator::Bool {
                trues: Vec::new(),
                falses: Vec::new(),
                and: call.func == AggFunc::BoolAnd,
            },
            AggFunc::Min | AggFunc::Max => {
                let t = arg.ok_or_else(|| ExecError::internal("min and max need an argument"))?;
                Accumulator::Extreme(Extreme::new(
                    t,
                    call.func == AggFunc::Max,
                    call.state.is_some(),
                )?)
            }
            func if func.is_collected() => {
                Accumulator::Collected(Collected::new(func, call.distinct, &call.output_type))
            }
            func if func.is_exact() => {
                let t =
                    arg.ok_or_else(|| ExecError::internal("an aggregate needs its argument"))?;
                Accumulator::Exact(ExactSums::new(func, t)?)
            }
            // `sum` and `avg`.
            _ => {
                let t = arg.ok_or_else(|| ExecError::internal("sum and avg need an argument"))?;
                Accumulator::sum(t, call.func == AggFunc::Avg)?
            }
        })
    }

    fn sum(arg: &DataType, avg: bool) -> Result<Accumulator, ExecError> {
        let counts = Vec::new();
        Ok(match arg {
            t if t.is_floating() => Accumulator::Float { sums: FloatSums::default(), counts, avg },
            t if t.is_integer() => Accumulator::Sum { sums: Vec::new(), counts, scale: 0, avg },
            DataType::Decimal32(_, s) | DataType::Decimal64(_, s) | DataType::Decimal128(_, s) => {
                Accumulator::Sum { sums: Vec::new(), counts, scale: *s, avg }
            }
            DataType::Interval(_) => {
                Accumulator::Interval { parts: Default::default(), counts, avg }
            }
            other => {
                let name = if avg { "avg" } else { "sum" };
                return Err(SqlError::unsupported(format!("{name} of {other} in a view")).into());
            }
        })
    }

    /// Makes room for slots below `capacity`.
    pub fn ensure(&mut self, capacity: usize) {
        match self {
            Accumulator::Count(c) => c.resize(capacity, 0),
            Accumulator::Sum { sums, counts, .. } => {
                sums.resize(capacity, WideSum::default());
                counts.resize(capacity, 0);
            }
            Accumulator::Float { sums, counts, .. } => {
                sums.ensure(capacity);
                counts.resize(capacity, 0);
            }
            Accumulator::Interval { parts, counts, .. } => {
                parts.iter_mut().for_each(|p| p.resize(capacity, WideSum::default()));
                counts.resize(capacity, 0);
            }
            Accumulator::Bool { trues, falses, .. } => {
                trues.resize(capacity, 0);
                falses.resize(capacity, 0);
            }
            Accumulator::Extreme(e) => e.ensure(capacity),
            Accumulator::Collected(c) => c.ensure(capacity),
            Accumulator::Exact(e) => e.ensure(capacity),
        }
    }

    /// An empty group.
    pub fn reset(&mut self, slot: usize) {
        match self {
            Accumulator::Count(c) => c[slot] = 0,
            Accumulator::Sum { sums, counts, .. } => {
                sums[slot] = WideSum::default();
                counts[slot] = 0;
            }
            Accumulator::Float { sums, counts, .. } => {
                sums.reset(slot);
                counts[slot] = 0;
            }
            Accumulator::Interval { parts, counts, .. } => {
                parts.iter_mut().for_each(|p| p[slot] = WideSum::default());
                counts[slot] = 0;
            }
            Accumulator::Bool { trues, falses, .. } => {
                trues[slot] = 0;
                falses[slot] = 0;
            }
            Accumulator::Extreme(e) => e.reset(slot),
            Accumulator::Collected(c) => c.set(slot, None),
            Accumulator::Exact(e) => e.reset(slot),
        }
    }

    /// Whether a slot is as an empty group's.
    pub fn is_blank(&self, slot: usize) -> bool {
        match self {
            Accumulator::Count(c) => c[slot] == 0,
            Accumulator::Sum { sums, counts, .. } => {
                counts[slot] == 0 && sums[slot] == WideSum::default()
            }
            Accumulator::Float { sums, counts, .. } => counts[slot] == 0 && sums.is_zero(slot),
            Accumulator::Interval { parts, counts, .. } => {
                counts[slot] == 0 && parts.iter().all(|p| p[slot] == WideSum::default())
            }
            Accumulator::Bool { trues, falses, .. } => trues[slot] == 0 && falses[slot] == 0,
            Accumulator::Extreme(e) => e.is_blank(slot),
            Accumulator::Collected(c) => c.is_blank(slot),
            Accumulator::Exact(e) => e.is_blank(slot),
        }
    }

    /// Adds rows. `arg` is the argument column, parallel to them; NULLs are already masked out.
    pub fn update(&mut self, rows: &Rows<'_>, arg: Option<&ArrayRef>) -> Result<(), ExecError> {
        let need = || arg.ok_or_else(|| ExecError::internal("the aggregate's argument is missing"));
        match self {
            Accumulator::Count(counts) => rows.for_each(|_, s, w| counts[s] += w),
            Accumulator::Sum { sums, counts, scale, .. } => {
                add_wide(sums, counts, *scale, rows, need()?)?
            }
            Accumulator::Float { sums, counts, .. } => {
                let values = cast(need()?, &DataType::Float64)?;
                let values = values.as_primitive::<Float64Type>().values();
                rows.for_each(|i, s, w| {
                    sums.add(s, values[i], w);
                    counts[s] += w;
                });
            }
            Accumulator::Interval { parts, counts, .. } => {
                add_intervals(parts, counts, rows, need()?)?
            }
            Accumulator::Bool { trues, falses, .. } => {
                let values = need()?.as_boolean();
                rows.for_each(
                    |i, s, w| {
                        if values.value(i) { trues[s] += w } else { falses[s] += w }
                    },
                );
            }
            Accumulator::Extreme(e) => e.update(rows, need()?)?,
            // Made at the barrier, from the value table.
            Accumulator::Collected(_) => {}
            Accumulator::Exact(e) => e.update(rows, need()?)?,
        }
        Ok(())
    }

    /// Number of stored columns.
    pub fn width(&self) -> usize {
        match self {
            Accumulator::Count(_) | Accumulator::Extreme(_) | Accumulator::Collected(_) => 1,
            Accumulator::Sum { .. }
            | Accumulator::Float { .. }
            | Accumulator::Bool { .. }
            | Accumulator::Exact(_) => 2,
            Accumulator::Interval { .. } => 4,
        }
    }

    /// The stored columns of slots; `types` are theirs.
    pub fn store(&self, slots: &[Slot], types: &[DataType]) -> Result<Vec<ArrayRef>, ExecError> {
        let ints = |v: &[i64]| -> ArrayRef { Arc::new(pick(v, slots)) };
        Ok(match self {
            Accumulator::Count(c) => vec![ints(c)],
            Accumulator::Sum { sums, counts, .. } => {
                let packed =
                    slots.iter().map(|&s| pack(counts[s as usize], sums[s as usize].carry));
                vec![
                    store_wide(sums, slots, &types[0])?,
                    Arc::new(Int64Array::from_iter_values(packed)),
                ]
            }
            Accumulator::Float { sums, counts, .. } => vec![sums.store(slots), ints(counts)],
            Accumulator::Interval { parts, counts, .. } => {
                let mut columns = Vec::with_capacity(4);
                for (part, t) in parts.iter().zip(types) {
                    columns.push(store_wide(part, slots, t)?);
                }
                columns.push(ints(counts));
                columns
            }
            Accumulator::Bool { trues, falses, .. } => vec![ints(trues), ints(falses)],
            Accumulator::Extreme(e) => vec![e.result(slots)?],
            Accumulator::Collected(c) => vec![c.texts(slots)],
            Accumulator::Exact(e) => e.store(slots),
        })
    }

    /// Fills `slots` from stored columns, row by row.
    pub fn load(&mut self, slots: &[Slot], columns: &[ArrayRef]) -> Result<(), ExecError> {
        let ints = |c: &ArrayRef| c.as_primitive::<Int64Type>().values().clone();
        match self {
            Accumulator::Count(counts) => put(counts, slots, &ints(&columns[0])),
            Accumulator::Sum { sums, counts, .. } => {
                let low = columns[0].as_primitive::<Decimal128Type>().values();
                let packed = ints(&columns[1]);
                for (i, &s) in slots.iter().enumerate() {
                    let (count, carry) = unpack(packed[i]);
                    sums[s as usize] = WideSum { low: low[i], carry };
                    counts[s as usize] = count;
                }
            }
            Accumulator::Float { sums, counts, .. } => {
                sums.load(slots, &columns[0])?;
                put(counts, slots, &ints(&columns[1]));
            }
            Accumulator::Interval { parts, counts, .. } => {
                for (part, column) in parts.iter_mut().zip(columns) {
                    let low = column.as_primitive::<Decimal128Type>().values();
                    for (i, &s) in slots.iter().enumerate() {
                        part[s as usize] = WideSum { low: low[i], carry: 0 };
                    }
                }
                put(counts, slots, &ints(&columns[3]));
            }
            Accumulator::Bool { trues, falses, .. } => {
                put(trues, slots, &ints(&columns[0]));
                put(falses, slots, &ints(&columns[1]));
            }
            Accumulator::Extreme(e) => e.load(slots, &columns[0])?,
            Accumulator::Collected(c) => c.load(slots, &columns[0]),
            Accumulator::Exact(e) => e.load(slots, columns)?,
        }
        Ok(())
    }

    /// The call's value for every slot, and how many of them overflow `output` (NULL).
    pub fn result(&self, slots: &[Slot], output: &DataType) -> Result<(ArrayRef, u64), ExecError> {
        let mut overflows = 0;
        let array: ArrayRef = match self {
            Accumulator::Count(c) => cast_to(Arc::new(pick(c, slots)), output)?,
            Accumulator::Sum { sums, counts, scale, avg } => {
                let exact = slots.iter().map(|&s| (sums[s as usize], counts[s as usize]));
                super::number::numeric(exact, *scale, *avg, output, &mut overflows)?
            }
            Accumulator::Float { sums, counts, avg } => {
                let values = slots.iter().map(|&s| {
                    let n = counts[s as usize];
                    (n > 0).then(|| sums.value(s as usize) / if *avg { n as f64 } else { 1.0 })
                });
                cast_to(Arc::new(Float64Array::from_iter(values)), output)?
            }
            Accumulator::Interval { parts, counts, avg } => {
                super::number::interval(parts, counts, slots, *avg, &mut overflows)
            }
            Accumulator::Bool { trues, falses, and } => {
                let values = slots.iter().map(|&s| {
                    let (t, f) = (trues[s as usize], falses[s as usize]);
                    (t > 0 || f > 0).then_some(if *and { f <= 0 } else { t > 0 })
                });
                Arc::new(BooleanArray::from_iter(values))
            }
            Accumulator::Extreme(e) => cast_to(e.result(slots)?, output)?,
            Accumulator::Collected(c) => c.result(slots, output)?,
            Accumulator::Exact(e) => e.result(slots, output, &mut overflows)?,
        };
        Ok((array, overflows))
    }

    /// Whether slots hold more than [`Accumulator::slot_bytes`].
    pub fn is_variable(&self) -> bool {
        matches!(self, Accumulator::Extreme(_) | Accumulator::Collected(_))
    }

    /// Bytes that a slot holds beside [`Accumulator::slot_bytes`].
    pub fn heap_bytes(&self, slot: usize) -> usize {
        match self {
            Accumulator::Extreme(extreme) => extreme.heap_bytes(slot),
            Accumulator::Collected(collected) => collected.heap_bytes(slot),
            _ => 0,
        }
    }

    /// Bytes a slot takes.
    pub fn slot_bytes(&self) -> usize {
        match self {
            Accumulator::Count(_) => 8,
            Accumulator::Sum { .. } => 40,
            Accumulator::Float { .. } => 8 + FloatSums::SLOT_BYTES,
            Accumulator::Interval { .. } => 104,
            Accumulator::Bool { .. } => 16,
            Accumulator::Extreme(_) => 32,
            Accumulator::Collected(_) => 64,
            Accumulator::Exact(_) => ExactSums::SLOT_BYTES,
        }
    }
}

impl WideSum {
    pub fn value(self) -> Option<i128> {
        self.get()
    }
}

fn cast_to(array: ArrayRef, output: &DataType) -> Result<ArrayRef, ExecError> {
    if array.data_type() == output { Ok(array) } else { Ok(cast(&array, output)?) }
}

fn pick(values: &[i64], slots: &[Slot]) -> Int64Array {
    Int64Array::from_iter_values(slots.iter().map(|&s| values[s as usize]))
}

fn put(values: &mut [i64], slots: &[Slot], from: &[i64]) {
    for (&s, &v) in slots.iter().zip(from) {
        values[s as usize] = v;
    }
}

fn store_wide(sums: &[WideSum], slots: &[Slot], t: &DataType) -> Result<ArrayRef, ExecError> {
    if !matches!(t, DataType::Decimal128(_, _)) {
        return Err(ExecError::internal(format!("a sum is stored as {t}")));
    }
    let low: Decimal128Array =
        PrimitiveArray::from_iter_values(slots.iter().map(|&s| sums[s as usize].low));
    Ok(Arc::new(low.with_data_type(t.clone())))
}

fn add_wide(
    sums: &mut [WideSum],
    counts: &mut [i64],
    scale: i8,
    rows: &Rows<'_>,
    arg: &ArrayRef,
) -> Result<(), ExecError> {
    match arg.data_type() {
        t if t.is_integer() && *t != DataType::UInt64 => {
            let values = cast(arg, &DataType::Int64)?;
            let values = values.as_primitive::<Int64Type>().values();
            rows.for_each(|i, s, w| {
                sums[s].add(i128::from(values[i]), w);
                counts[s] += w;
            });
        }
        _ => {
            let values = cast(arg, &DataType::Decimal128(38, scale))?;
            let values = values.as_primitive::<Decimal128Type>().values();
            rows.for_each(|i, s, w| {
                sums[s].add(values[i], w);
                counts[s] += w;
            });
        }
    }
    Ok(())
}

fn add_intervals(
    parts: &mut [Vec<WideSum>; 3],
    counts: &mut [i64],
    rows: &Rows<'_>,
    arg: &ArrayRef,
) -> Result<(), ExecError> {
    use arrow::datatypes::{IntervalMonthDayNanoType, IntervalUnit};
    let values = cast(arg, &DataType::Interval(IntervalUnit::MonthDayNano))?;
    let values = values.as_primitive::<IntervalMonthDayNanoType>().values();
    rows.for_each(|i, s, w| {
        parts[0][s].add(i128::from(values[i].months), w);
        parts[1][s].add(i128::from(values[i].days), w);
        parts[2][s].add(i128::from(values[i].nanoseconds / 1_000), w);
        counts[s] += w;
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_that_overflowed_and_came_back_is_right() {
        let mut sum = WideSum::default();
        sum.add(i128::MAX, 1);
        sum.add(i128::MAX, 3);
        assert_eq!(sum.get(), None);
        let (count, carry) = unpack(pack(4, sum.carry));
        assert_eq!((count, carry), (4, sum.carry));
        sum.add(i128::MAX, -3);
        sum.add(7 - i128::MAX, 1);
        assert_eq!(sum.get(), Some(7));
        sum.add(i128::MIN, 2);
        assert_eq!(sum.get(), None);
        sum.add(i128::MIN, -2);
        assert_eq!(sum.get(), Some(7));
        assert_eq!(unpack(pack(-3, -2)), (-3, -2));
    }
}
