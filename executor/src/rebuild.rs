//! The end of a rebuild (docs/design.md §4, "Retention"): what the job has computed anew was collected in a table beside
//! the relation's rows; now the rows change by the difference of both.
//!
//! Old rows with weight −1 and new ones with +1 are sorted by key and row outside memory, and what cancels is dropped.
//! So a rebuild of any size takes bounded memory, and what reads the relation gets nothing but what is different.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::Int64Array;
use futures::StreamExt;
use millrace_common::{DeltaChunk, Epoch, TableId, VNODE_COUNT, Vnode};
use millrace_graph::RelationLayout;
use millrace_rpc::catalog::RowStorage;
use millrace_storage::{JobStore, ScanOptions, TableWriter};

use crate::error::ExecError;
use crate::layout::RowLayout;
use crate::spilled_delta::SpilledDelta;
use crate::state::arena::new_batch;

/// What a root needs for the end of a rebuild, until which it writes to another table.
pub struct Rebuild {
    /// Of the relation's rows.
    pub rows: TableWriter,
    /// The content that they have.
    pub content: Epoch,
    /// By which rows are compared: the relation's own, or all columns where its rows have no key.
    layout: Arc<RowLayout>,
}

impl Rebuild {
    pub fn new(
        rows: TableWriter,
        content: Epoch,
        output: &RelationLayout,
    ) -> Result<Rebuild, ExecError> {
        let layout = match output.storage {
            RowStorage::Append => RelationLayout {
                storage: RowStorage::Multiset,
                distribution: Vec::new(),
                ..output.clone()
            },
            _ => output.clone(),
        };
        Ok(Rebuild { rows, content, layout: Arc::new(RowLayout::of_output(&layout)?) })
    }
}

/// The rows of one task that a rebuild brings or takes away.
pub(crate) struct Difference<'a> {
    pub rebuild: &'a Rebuild,
    /// Where the new rows are, as of `epoch`.
    pub collected: TableId,
    pub epoch: Epoch,
    /// The task's.
    pub vnodes: Range<Vnode>,
    /// Bytes of rows that are sorted at a time.
    pub budget: usize,
}

impl Difference<'_> {
    pub async fn compute(&self, storage: RowStorage) -> Result<SpilledDelta, ExecError> {
        let store = Arc::clone(self.rebuild.rows.store());
        let rows = self.rebuild.rows.desc().id;
        let mut delta = SpilledDelta::begin(&self.rebuild.layout, &store, rows)?;
        let vnodes = match storage {
            // Where a row is follows from its arrival, not from its content: one task compares all.
            RowStorage::Append if self.vnodes.start > 0 => return Ok(delta),
            RowStorage::Append => 0..VNODE_COUNT as Vnode,
            _ => self.vnodes.clone(),
        };
        for (table, epoch, sign) in
            [(rows, self.rebuild.content, -1), (self.collected, self.epoch, 1)]
        {
            self.add(&mut delta, &store, (table, epoch), vnodes.clone(), sign).await?;
        }
        Ok(delta)
    }

    /// Adds the rows of a table as of an epoch, their weights multiplied by `sign`.
    async fn add(
        &self,
        delta: &mut SpilledDelta,
        store: &Arc<JobStore>,
        (table, epoch): (TableId, Epoch),
        vnodes: Range<Vnode>,
        sign: i64,
    ) -> Result<(), ExecError> {
        let schema = &self.rebuild.layout.schema;
        let options = ScanOptions { vnodes: Some(vnodes), ..ScanOptions::default() };
        let mut scan = store.snapshot(epoch)?.scan(table, options);
        let (mut pieces, mut bytes) = (Vec::new(), 0);
        while let Some(batch) = scan.next().await.transpose()? {
            let rows = batch.values.num_rows();
            let values = new_batch(schema, batch.values.columns().to_vec(), rows)?;
            let weights = batch.weights.values().iter().map(|w| w * sign);
            let piece = DeltaChunk::new(values, Some(Int64Array::from_iter_values(weights)));
            bytes += piece.memory_size();
            pieces.push(piece);
            if bytes > self.budget {
                delta.add(std::mem::take(&mut pieces), self.budget).await?;
                bytes = 0;
            }
        }
        delta.add(pieces, self.budget).await
    }
}
