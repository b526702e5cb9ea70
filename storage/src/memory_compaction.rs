//! Merging of memory runs: a job that commits often would otherwise gather one run a commit, and every
//! read would ask each.
//!
//! Runs are merged by size, newest first, as soon as [`FAN_IN`] neighbours of one group are of a kind,
//! so that an entry is copied a logarithmic number of times. Small merges happen while publishing;
//! large ones on a blocking thread, one at a time a job, and take effect if their inputs are still
//! there.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use millrace_common::task::spawn_blocking_on;
use millrace_common::{Epoch, TableId};

use crate::error::Result;
use crate::job_store::JobStore;
use crate::memrun::{MemRun, RUN_BATCH_ROWS};
use crate::merge::{Merger, Mode, Source};
use crate::version::{TableVersion, Version};

/// Neighbouring runs that are merged at once, at least.
const FAN_IN: usize = 4;
/// Merges up to this many rows happen at once: in about a millisecond.
const INLINE_ROWS: usize = 1 << 12;

/// Brings the number of memory runs down, now or in the background.
pub(crate) fn compact_memory(store: &Arc<JobStore>) {
    let version = store.version();
    for table in version.tables() {
        let Some(inputs) = pick(&table.mem) else { continue };
        let rows: usize = inputs.iter().map(MemRun::num_rows).sum();
        if rows <= INLINE_ROWS {
            merge_and_swap(store, table, &version, inputs);
        } else if !store.merging.swap(true, Ordering::AcqRel) {
            merge_in_background(store, Arc::clone(table), Arc::clone(&version), inputs.to_vec());
        }
    }
}

fn merge_in_background(
    store: &Arc<JobStore>,
    table: Arc<TableVersion>,
    version: Arc<Version>,
    inputs: Vec<MemRun>,
) {
    let (store, background) = (Arc::clone(store), store.shared.background());
    let work = move || {
        merge_and_swap(&store, &table, &version, &inputs);
        store.merging.store(false, Ordering::Release);
    };
    match background {
        Some(runtime) => drop(spawn_blocking_on(&runtime, "merge memory runs", work)),
        None => work(),
    }
}

/// The newest neighbours worth merging.
fn pick(runs: &[MemRun]) -> Option<&[MemRun]> {
    let newest = runs.last()?;
    let mut start = runs.len() - 1;
    let mut rows = newest.num_rows();
    while start > 0 {
        let older = &runs[start - 1];
        let similar = older.num_rows() <= rows.max(64)
            || runs.len() - start < FAN_IN && older.num_rows() <= rows * 2;
        if older.group != newest.group || !similar {
            break;
        }
        rows += older.num_rows();
        start -= 1;
    }
    (runs.len() - start >= FAN_IN).then(|| &runs[start..])
}

fn merge_and_swap(store: &JobStore, table: &TableVersion, version: &Version, inputs: &[MemRun]) {
    match merge(table, version.horizon, inputs) {
        Ok(merged) => {
            store.update(|v| v.replace_mem(table.desc.id, inputs, merged));
        }
        // Reads still see the inputs: nothing is lost but the saving.
        Err(error) => {
            tracing::warn!(job = store.label(), table = table.desc.name, %error, "memory runs could not be merged")
        }
    }
}

/// One run with the entries of all. `None`: they cancelled out.
fn merge(table: &TableVersion, horizon: Epoch, inputs: &[MemRun]) -> Result<Option<MemRun>> {
    let horizon = table.horizon(horizon);
    let sources = inputs
        .iter()
        .map(|r| Source::memory(r.batches().iter().cloned(), r.max_sequence))
        .collect();
    // Older runs may hold these keys, unless there are none at all.
    let oldest = inputs.first().map(|r| r.min_sequence);
    let bottom = table.disk.is_empty() && table.mem.first().map(|r| r.min_sequence) == oldest;
    let mode = Mode::Compact { horizon, bottom };
    let schema = Arc::clone(table.schema());
    let merger = Merger::new(table.desc.storage, mode, schema, RUN_BATCH_ROWS, sources)
        .retaining(table.retain);
    // Sources in memory never wait.
    let batches = futures::executor::block_on(merger.collect())?;
    Ok(MemRun::merged(table.desc.id, batches, inputs))
}

impl TableVersion {
    /// Versions at or below this are merged into the newest: operator state is only ever read at its
    /// newest version.
    pub(crate) fn horizon(&self, relations: Epoch) -> Epoch {
        if self.desc.relation { relations } else { Epoch::MAX }
    }
}

impl Version {
    /// Swaps neighbouring memory runs for their merge, if all of them are still there.
    fn replace_mem(&mut self, id: TableId, inputs: &[MemRun], merged: Option<MemRun>) {
        let Some(table) = self.table_mut(id) else { return };
        let same = |a: &MemRun, b: &MemRun| Arc::ptr_eq(&a.batches, &b.batches);
        let Some(at) = table.mem.iter().position(|r| inputs.first().is_some_and(|i| same(r, i)))
        else {
            return;
        };
        let there = table.mem[at..].iter().zip(inputs).filter(|(a, b)| same(a, b)).count();
        if there == inputs.len() {
            table.mem.splice(at..at + inputs.len(), merged);
        }
    }
}
