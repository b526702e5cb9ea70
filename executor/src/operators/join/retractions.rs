//! What the retracted rows of a lookup have met: read as the rows arrive, used at the barrier.

use std::ops::Range;

use arrow::array::{Array, AsArray, BinaryArray, BinaryBuilder, RecordBatch, UInt32Array};
use arrow::compute::interleave;
use arrow::datatypes::{Int64Type, SchemaRef};
use millrace_common::collections::{HashMap, HashSet};
use millrace_storage::Found;

use crate::error::ExecError;
use crate::operators::Env;
use crate::state::arena::{batch_bytes, gather_batch};
use crate::state::{Fetches, KeyBytes, StateTable};

/// The stored entries under the prefixes of an epoch's retracted rows. Nothing is written under them before
/// the barrier.
#[derive(Default)]
pub struct Retractions {
    /// Each with the prefixes asked for.
    reads: Fetches<BinaryArray>,
    asked: HashSet<KeyBytes>,
    answers: Vec<Found>,
    /// A prefix's answer, and its entries there.
    places: HashMap<KeyBytes, (usize, Range<usize>)>,
    bytes: usize,
}

impl Retractions {
    /// Reads are under way.
    pub fn is_reading(&self) -> bool {
        !self.reads.is_empty()
    }

    pub fn memory_size(&self) -> usize {
        self.bytes
    }

    /// Asks for the entries under prefixes that have not been asked for in this epoch, in one batch.
    pub fn ask(
        &mut self,
        prefixes: &BinaryArray,
        table: &dyn StateTable,
        env: &Env,
    ) -> Result<(), ExecError> {
        let mut fresh = BinaryBuilder::new();
        for prefix in prefixes.iter().flatten() {
            if self.asked.insert(KeyBytes::new(prefix)) {
                fresh.append_value(prefix);
            }
        }
        let fresh = fresh.finish();
        if fresh.is_empty() {
            return Ok(());
        }
        let lookup = table.multi_scan(fresh.clone(), None);
        match self.reads.submit(fresh, lookup)? {
            Some((prefixes, found)) => self.arrived(&prefixes, found),
            None => env.metrics.fetch_rounds.add(1),
        }
        Ok(())
    }

    fn arrived(&mut self, prefixes: &BinaryArray, found: Found) {
        let inputs = found.input.values();
        for (i, prefix) in prefixes.iter().flatten().enumerate() {
            let start = inputs.partition_point(|&at| (at as usize) < i);
            let end = inputs.partition_point(|&at| at as usize <= i);
            self.places.insert(KeyBytes::new(prefix), (self.answers.len(), start..end));
        }
        self.bytes += batch_bytes(&found.values);
        self.answers.push(found);
    }

    /// Waits for answers. Cancel-safe.
    pub async fn completed(&mut self) -> Result<(), ExecError> {
        for (prefixes, found) in self.reads.completed().await? {
            self.arrived(&prefixes, found);
        }
        Ok(())
    }

    /// What was found under prefixes that have all been asked for and answered, as one answer.
    pub fn found(&self, prefixes: &BinaryArray, schema: &SchemaRef) -> Result<Found, ExecError> {
        let (mut input, mut picks) = (Vec::new(), Vec::new());
        for (i, prefix) in prefixes.iter().flatten().enumerate() {
            let place = self.places.get(prefix);
            let (answer, rows) =
                place.ok_or_else(|| ExecError::internal("a retracted row was not read"))?;
            input.extend(std::iter::repeat_n(i as u32, rows.len()));
            picks.extend(rows.clone().map(|row| (*answer, row)));
        }
        if picks.is_empty() {
            return Ok(Found::empty(schema));
        }
        let keys: Vec<&dyn Array> = self.answers.iter().map(|f| &f.keys as &dyn Array).collect();
        let weights: Vec<&dyn Array> =
            self.answers.iter().map(|f| &f.weights as &dyn Array).collect();
        let values: Vec<&RecordBatch> = self.answers.iter().map(|f| &f.values).collect();
        Ok(Found {
            input: UInt32Array::from(input),
            keys: interleave(&keys, &picks)?.as_binary::<i32>().clone(),
            weights: interleave(&weights, &picks)?.as_primitive::<Int64Type>().clone(),
            values: gather_batch(schema, &values, &picks)?,
        })
    }

    /// The epoch has ended.
    pub fn clear(&mut self) {
        self.asked.clear();
        self.answers.clear();
        self.places.clear();
        self.bytes = 0;
    }
}
