//! Splits to which a leaf has not come, for what reads ahead of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_common::Epoch;
use millrace_connector::SplitReader;
use millrace_rpc::services::SourceParts;
use millrace_rpc::version::BackfillState;

use super::{SourceInput, decode_offset, is_own};
use crate::error::ExecError;
use crate::lookahead::read_ahead::Unread;

/// The splits of one task, as it begins to read them after its start.
pub struct UnreadSplits {
    from: Arc<SourceInput>,
    task: usize,
    parallelism: usize,
    /// Where the job is in them; others are new.
    offsets: BTreeMap<u32, u64>,
}

impl UnreadSplits {
    /// Those of task `task` of `parallelism`. `committed`: the epoch that the job goes on from; `backfill`: its first scan
    /// as committed.
    pub fn new(
        from: &Arc<SourceInput>,
        task: usize,
        parallelism: usize,
        committed: Epoch,
        backfill: Option<&BackfillState>,
    ) -> Result<UnreadSplits, ExecError> {
        let offsets: BTreeMap<u32, u64> = match backfill {
            None => from.meta.source_offsets(from.relation, committed).into_iter().collect(),
            Some(state) => {
                let own = state.positions.iter().filter(|p| p.input == from.input);
                own.map(|p| Ok((p.vnode, decode_offset(&p.last_key)?)))
                    .collect::<Result<_, ExecError>>()?
            }
        };
        Ok(UnreadSplits { from: Arc::clone(from), task, parallelism, offsets })
    }
}

impl Unread for UnreadSplits {
    fn start(&self, split: u32, parts: &SourceParts) -> Option<u64> {
        let start = || self.offsets.get(&split).copied().unwrap_or_else(|| parts.start(split));
        is_own(split, self.task, self.parallelism).then(start)
    }

    fn open(&self, split: u32, offset: u64, parts: &SourceParts) -> Option<Box<dyn SplitReader>> {
        let opened = self.from.open(split, offset, None, parts);
        opened.inspect_err(|error| tracing::debug!(split, %error, "cannot be read ahead")).ok()
    }
}
