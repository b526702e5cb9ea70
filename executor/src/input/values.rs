//! Constant rows: once, in the job's first epoch.

use arrow::record_batch::RecordBatch;
use async_trait::async_trait;
use bytes::Bytes;
use millrace_common::DeltaChunk;
use millrace_rpc::version::{BackfillPosition, BackfillState};

use crate::error::ExecError;
use crate::exchange::Barrier;
use crate::input::Reader;

pub struct ValuesReader {
    input: u32,
    /// See [`Barrier::stage`].
    stage: u32,
    batch: RecordBatch,
    /// As committed or being committed.
    done: bool,
    due: bool,
}

impl ValuesReader {
    /// `backfill`: the job's, as committed; `None` when it has caught up.
    pub fn new(
        input: u32,
        stage: u32,
        batch: RecordBatch,
        backfill: Option<&BackfillState>,
    ) -> ValuesReader {
        let done = match backfill {
            None => true,
            Some(state) => state.positions.iter().any(|p| p.input == input && p.done),
        };
        ValuesReader { input, stage, batch, done, due: false }
    }
}

#[async_trait]
impl Reader for ValuesReader {
    fn begin(&mut self, barrier: &Barrier) -> Result<(), ExecError> {
        self.due = !self.done && !barrier.holds_scan(self.stage);
        Ok(())
    }

    async fn next(&mut self) -> Result<Option<DeltaChunk>, ExecError> {
        if !self.due {
            return Ok(None);
        }
        self.due = false;
        self.done = true;
        Ok(Some(DeltaChunk::inserts(self.batch.clone())))
    }

    fn positions(&self, out: &mut Vec<BackfillPosition>) {
        let done = self.done;
        out.push(BackfillPosition { input: self.input, vnode: 0, last_key: Bytes::new(), done });
    }
}
