//! What the retracted rows of a lookup have met: read as the rows arrive, or ahead of them where hints tell of them, and
//! used at the barrier.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, AsArray, BinaryArray, BinaryBuilder, RecordBatch, UInt32Array};
use arrow::compute::interleave;
use arrow::datatypes::{Int64Type, SchemaRef};
use millrace_common::Epoch;
use millrace_common::collections::{HashMap, HashSet};
use millrace_storage::Found;
use tokio::time::Instant;

use crate::error::ExecError;
use crate::lookahead::operator::EpochReads;
use crate::lookahead::slack::EpochNotes;
use crate::lookahead::{DELETED_PORT, Due};
use crate::operators::Env;
use crate::state::arena::{batch_bytes, gather_batch};
use crate::state::prefixes_ahead::{HeldBytes, Kept};
use crate::state::{Fetches, KeyBytes, PrefixesAhead, StateTable};

/// The stored entries under the prefixes of an epoch's retracted rows. Nothing is written under them before
/// the barrier.
pub struct Retractions {
    /// Each with the prefixes asked for, and when.
    reads: Fetches<(BinaryArray, Instant)>,
    asked: HashSet<KeyBytes>,
    answers: Vec<Answer>,
    /// A prefix's answer, and its entries there.
    places: HashMap<KeyBytes, (usize, Range<usize>)>,
    bytes: usize,
    ahead: PrefixesAhead,
    env: Env,
}

struct Answer {
    found: Arc<Found>,
    /// If it was read ahead.
    _memory: Option<Arc<HeldBytes>>,
}

impl Retractions {
    pub fn new(env: &Env) -> Retractions {
        Retractions {
            reads: Fetches::default(),
            asked: HashSet::default(),
            answers: Vec::new(),
            places: HashMap::default(),
            bytes: 0,
            ahead: PrefixesAhead::new(env),
            env: env.clone(),
        }
    }

    /// Reads are under way.
    pub fn is_reading(&self) -> bool {
        !self.reads.is_empty()
    }

    pub fn memory_size(&self) -> usize {
        self.bytes
    }

    /// Rows under these prefixes are likely to be retracted in an epoch: reads ahead what they have met.
    pub fn hint(&mut self, prefixes: &BinaryArray, due: &Due, table: &dyn StateTable) {
        let mut seen = HashSet::default();
        let mut fresh = BinaryBuilder::new();
        for prefix in prefixes.iter().flatten() {
            if !self.asked.contains(prefix) && seen.insert(prefix) {
                fresh.append_value(prefix);
            }
        }
        self.ahead.hint(&fresh.finish(), due, table);
    }

    /// Asks for the entries under prefixes that have not been asked for in this epoch, in one batch.
    pub fn ask(&mut self, prefixes: &BinaryArray, table: &dyn StateTable) -> Result<(), ExecError> {
        let mut fresh = BinaryBuilder::new();
        for prefix in prefixes.iter().flatten() {
            if !self.asked.insert(KeyBytes::new(prefix)) {
                continue;
            }
            match self.ahead.take(prefix) {
                Some(kept) => self.place(prefix, kept),
                None => fresh.append_value(prefix),
            }
        }
        if !prefixes.is_empty() {
            self.ahead.note_rows(DELETED_PORT);
        }
        let fresh = fresh.finish();
        if fresh.is_empty() {
            return Ok(());
        }
        let (asked, metrics) = (fresh.len() as u64, Arc::clone(&self.env.metrics));
        let lookup = table.multi_scan(fresh.clone(), None);
        let lookup = lookup.counted(&metrics.lookahead.demand_requests);
        match self.reads.submit((fresh, self.env.clock.now()), lookup)? {
            Some(((prefixes, _), found)) => self.arrived(&prefixes, found),
            None => {
                metrics.fetch_rounds.add(1);
                self.ahead.note_missed(asked);
            }
        }
        Ok(())
    }

    /// What was read ahead for a prefix, maybe together with others.
    fn place(&mut self, prefix: &[u8], Kept { answer, rows, memory }: Kept) {
        let known = self.answers.iter().rposition(|known| Arc::ptr_eq(&known.found, &answer));
        let at = known.unwrap_or_else(|| {
            self.bytes += batch_bytes(&answer.values);
            self.answers.push(Answer { found: answer, _memory: Some(memory) });
            self.answers.len() - 1
        });
        self.places.insert(KeyBytes::new(prefix), (at, rows));
    }

    /// Entries under these prefixes are written.
    pub fn written(&mut self, prefixes: &BinaryArray) {
        self.ahead.written(prefixes);
    }

    /// Reads are under way that no row waits for.
    pub fn is_prefetching(&self) -> bool {
        self.ahead.is_reading()
    }

    /// Waits for answers, or for what is read ahead. Cancel-safe.
    pub async fn progress(&mut self) -> Result<(), ExecError> {
        let answers = tokio::select! {
            biased;
            answers = self.reads.completed(), if !self.reads.is_empty() => answers?,
            () = self.ahead.completed(), if self.ahead.is_reading() => Vec::new(),
            else => Vec::new(),
        };
        self.take_in(answers);
        Ok(())
    }

    /// An epoch ends, all rows of which have come. What they were, and its reads.
    pub fn pass(&mut self, epoch: Epoch) -> (EpochNotes, EpochReads) {
        self.ahead.pass(epoch)
    }

    /// Lets go of what was read ahead.
    pub fn shed(&mut self) {
        self.ahead.shed();
    }

    fn arrived(&mut self, prefixes: &BinaryArray, found: Found) {
        let inputs = found.input.values();
        for (i, prefix) in prefixes.iter().flatten().enumerate() {
            let start = inputs.partition_point(|&at| (at as usize) < i);
            let end = inputs.partition_point(|&at| at as usize <= i);
            self.places.insert(KeyBytes::new(prefix), (self.answers.len(), start..end));
        }
        self.bytes += batch_bytes(&found.values);
        self.answers.push(Answer { found: Arc::new(found), _memory: None });
    }

    /// Waits for answers. Cancel-safe.
    pub async fn completed(&mut self) -> Result<(), ExecError> {
        let answers = self.reads.completed().await?;
        self.take_in(answers);
        Ok(())
    }

    fn take_in(&mut self, answers: Vec<((BinaryArray, Instant), Found)>) {
        for ((prefixes, asked), found) in answers {
            self.ahead.note_wait(asked);
            self.arrived(&prefixes, found);
        }
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
        let answers = || self.answers.iter().map(|answer| &answer.found);
        let keys: Vec<&dyn Array> = answers().map(|found| &found.keys as &dyn Array).collect();
        let weights: Vec<&dyn Array> =
            answers().map(|found| &found.weights as &dyn Array).collect();
        let values: Vec<&RecordBatch> = answers().map(|found| &found.values).collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryClass;
    use crate::operators::tests::prefixes::{env, prefix, table};

    #[test]
    fn what_was_read_ahead_together_is_kept_once_as_long_as_any_of_it_is() {
        let env = env();
        let table = table(&[1, 2, 3], 1_000);
        let held = || env.governor.used_by(MemoryClass::Cache);
        let mut retractions = Retractions::new(&env);
        let all = BinaryArray::from_iter_values([1, 2, 3].map(prefix));
        retractions.hint(&all, &Due::default(), &table);
        for n in [3, 1, 2] {
            let row = BinaryArray::from_iter_values([prefix(n)]);
            retractions.ask(&row, &table).unwrap();
            assert!(!retractions.is_reading());
            assert!(held() >= 3_000 && retractions.memory_size() >= 3_000, "after {n}");
        }
        assert_eq!(retractions.answers.len(), 1);
        let found = retractions.found(&all, &table.value_schema()).unwrap();
        let keys: Vec<&[u8]> = found.keys.iter().flatten().map(|key| &key[..2]).collect();
        assert_eq!(keys, [1, 2, 3].map(prefix));
        retractions.clear();
        assert_eq!((held(), retractions.memory_size()), (0, 0));
    }
}
