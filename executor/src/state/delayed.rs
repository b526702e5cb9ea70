//! A state table whose every read completes later, and not in the order it was asked: what a slow store
//! does to an operator, without one. Small tests never leave memory, so without this they would never
//! park a row (docs/design.md §14, random completion orders).

use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{Array, AsArray, BinaryArray, Int64Array, RecordBatch, UInt32Array};
use arrow::compute::take;
use arrow::datatypes::{Int64Type, SchemaRef};
use arrow::error::ArrowError;
use futures::{StreamExt, TryStreamExt, stream};
use millrace_common::delta::take_rows;
use millrace_storage::{Found, Lookup, MemRun, Part, Reading, StorageError};

use super::StateTable;
use crate::error::ExecError;

/// A read waits for fewer turns of the scheduler than this.
const MAX_TURNS: u64 = 7;
/// An answer comes in so many parts at most.
const MAX_PARTS: u64 = 4;

pub struct Delayed<T> {
    inner: T,
    reads: AtomicU64,
}

impl<T: StateTable> Delayed<T> {
    pub fn new(inner: T) -> Delayed<T> {
        Delayed { inner, reads: AtomicU64::new(0) }
    }

    /// `asked`: how many strings. Many answers come in parts, in no order, each after a while of its own.
    fn delay(&self, lookup: Lookup, asked: usize) -> Lookup {
        let n = self.reads.fetch_add(1, Ordering::Relaxed) + 1;
        let count = irregular(n) % MAX_PARTS + 1;
        let mut strings = vec![Vec::new(); count as usize];
        for i in (0..asked as u32).rev() {
            strings[(irregular(n + u64::from(i)) % count) as usize].push(i);
        }
        let turns = move |part: u64| irregular(n + part) / MAX_PARTS % MAX_TURNS + 1;
        let wait = async move {
            yield_turns(turns(0)).await;
            let found = lookup.wait().await?;
            let parts = match count {
                1 => vec![Part::whole(found, asked)],
                _ => parts_of(&found, strings)?,
            };
            Ok::<_, StorageError>(stream::iter(
                parts.into_iter().zip(1..).map(Ok::<_, StorageError>),
            ))
        };
        let parts = stream::once(wait).try_flatten().then(move |part| async move {
            let (part, number) = part?;
            yield_turns(turns(number)).await;
            Ok(part)
        });
        Lookup::Pending(Reading::new(parts.boxed()))
    }
}

/// Fibonacci hashing: of a counter, an irregular but repeatable sequence.
fn irregular(n: u64) -> u64 {
    n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

async fn yield_turns(turns: u64) {
    for _ in 0..turns {
        tokio::task::yield_now().await;
    }
}

/// What was found of every n-th string, n being `cut` + 1 and at least 2, and of the others, the last one first: the strings
/// of a part are neither the first ones nor in the order of the question.
pub fn cut_at(found: &Found, cut: usize, asked: usize) -> Result<Vec<Part>, ArrowError> {
    let every = |i: &u32| *i as usize % (cut + 1) == cut;
    let all = 0..asked as u32;
    let (picked, others): (Vec<u32>, Vec<u32>) =
        (all.clone().filter(every).collect(), all.rev().filter(|i| !every(i)).collect());
    parts_of(found, vec![picked, others])
}

/// What was found of each of these groups of strings, which are all that were asked; groups without any are left out.
fn parts_of(found: &Found, mut groups: Vec<Vec<u32>>) -> Result<Vec<Part>, ArrowError> {
    groups.retain(|strings| !strings.is_empty());
    if groups.is_empty() {
        return Ok(vec![Part::whole(found.clone(), 0)]);
    }
    let last = groups.len() - 1;
    let part = |(i, asked): (usize, Vec<u32>)| {
        let found = of_strings(found, &asked)?;
        Ok(Part { asked, found, is_last: i == last })
    };
    groups.into_iter().enumerate().map(part).collect()
}

/// What was found of the strings at these positions, in this order.
pub(super) fn of_strings(found: &Found, asked: &[u32]) -> Result<Found, ArrowError> {
    let inputs = found.input.values();
    let (mut input, mut rows) = (Vec::new(), Vec::new());
    for (i, position) in asked.iter().enumerate() {
        let from = inputs.partition_point(|at| at < position);
        let to = inputs.partition_point(|at| at <= position);
        input.extend(std::iter::repeat_n(i as u32, to - from));
        rows.extend(from as u32..to as u32);
    }
    let rows = UInt32Array::from(rows);
    Ok(Found {
        input: UInt32Array::from(input),
        keys: take(&found.keys, &rows, None)?.as_binary::<i32>().clone(),
        weights: take(&found.weights, &rows, None)?.as_primitive::<Int64Type>().clone(),
        values: take_rows(&found.values, &rows)?,
    })
}

impl<T: StateTable> StateTable for Delayed<T> {
    fn write(
        &mut self,
        keys: BinaryArray,
        weights: Option<Int64Array>,
        values: RecordBatch,
    ) -> Result<(), ExecError> {
        self.inner.write(keys, weights, values)
    }

    fn multi_get(&self, keys: BinaryArray) -> Lookup {
        let asked = keys.len();
        self.delay(self.inner.multi_get(keys), asked)
    }

    fn multi_scan(&self, prefixes: BinaryArray, limit: Option<usize>) -> Lookup {
        let asked = prefixes.len();
        self.delay(self.inner.multi_scan(prefixes, limit), asked)
    }

    fn multi_range(&self, starts: BinaryArray, ends: BinaryArray, limit: Option<usize>) -> Lookup {
        let asked = starts.len();
        self.delay(self.inner.multi_range(starts, ends, limit), asked)
    }

    fn seal(&mut self) -> Result<Vec<MemRun>, ExecError> {
        self.inner.seal()
    }

    fn value_schema(&self) -> SchemaRef {
        self.inner.value_schema()
    }

    fn is_empty(&self) -> bool {
        false
    }

    fn bound(&self) -> Option<i64> {
        self.inner.bound()
    }
}
