//! What the folded state alone answers of the questions that workers and frontends ask meta
//! ([`MetaService`](millrace_rpc::services::MetaService)): the leader and the followers answer alike.

use bytes::Bytes;
use millrace_common::{Epoch, RelationId};
use millrace_rpc::log::SplitMarkAt;
use millrace_rpc::services::SourceParts;
use millrace_rpc::version::ColumnWatermark;

use crate::state::MetaState;

impl MetaState {
    /// Where a source's content ends at an epoch: (split, offset exclusive).
    pub fn source_offsets(&self, source: RelationId, epoch: Epoch) -> Vec<(u32, u64)> {
        let Some(record) = self.sources.get(&source) else { return Vec::new() };
        record.offsets_at(epoch).iter().map(|o| (o.split, o.offset)).collect()
    }

    /// Through `epoch`, which splits became idle or active, oldest first.
    pub fn source_marks(&self, source: RelationId, epoch: Epoch) -> Vec<SplitMarkAt> {
        let marks = self.sources.get(&source).map(|s| s.marks.as_slice()).unwrap_or_default();
        marks.iter().filter(|m| m.epoch <= epoch.0).copied().collect()
    }

    /// The splits and files of a source found so far.
    pub fn source_parts(&self, source: RelationId) -> SourceParts {
        self.sources.get(&source).map(|s| s.parts.clone()).unwrap_or_default()
    }

    /// A relation's watermarks (not a source's) as of an epoch.
    pub fn watermarks(&self, relation: RelationId, epoch: Epoch) -> Vec<ColumnWatermark> {
        self.jobs.get(&relation).map(|j| j.watermarks_at(epoch).to_vec()).unwrap_or_default()
    }

    /// About how many rows a relation (not a source) has now.
    pub fn row_count(&self, relation: RelationId) -> Option<u64> {
        u64::try_from(self.jobs.get(&relation)?.version.row_count).ok()
    }

    /// The value of an option of a relation.
    pub fn option(&self, relation: RelationId, name: &str) -> Option<String> {
        self.relations.get(&relation)?.option(name).map(str::to_owned)
    }

    /// The stored job graph of a relation.
    pub fn graph(&self, relation: RelationId) -> Option<Bytes> {
        self.relations.get(&relation).map(|r| r.graph.clone())
    }
}
