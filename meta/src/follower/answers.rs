//! What the folded state alone answers of the questions that workers and frontends ask meta
//! ([`MetaService`](millrace_rpc::services::MetaService)): the leader and the followers answer alike.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use millrace_common::{Epoch, Generation, JobId, RelationId};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::log::SplitMarkAt;
use millrace_rpc::services::{JobToStart, SourceParts};
use millrace_rpc::version::{ColumnWatermark, feed_counter};

use crate::report::SplitReport;
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

    /// What a process needs to run a job; `None`: there is no such job.
    pub fn job_to_start(&self, id: JobId) -> Option<JobToStart> {
        let (relation, job) = (self.relations.get(&id)?, self.jobs.get(&id)?);
        let inputs = job.inputs.iter().filter_map(|input| self.relations.get(input).cloned());
        Some(JobToStart {
            record: self.number,
            generation: Generation(job.version.generation),
            relation: Arc::clone(relation),
            version: Arc::clone(&job.version),
            inputs: inputs.collect(),
            horizon: job.horizon,
        })
    }

    /// The value of an option of a relation.
    pub fn option(&self, relation: RelationId, name: &str) -> Option<String> {
        self.relations.get(&relation)?.option(name).map(str::to_owned)
    }

    /// Whether all these relations are exact at an epoch, and what makes them so can be read.
    pub fn exact_at(&self, relations: &[RelationId], epoch: Epoch) -> bool {
        relations.is_empty() || self.readable_common(relations, epoch) == Some(epoch)
    }

    /// The tables that a relation's rows follow from; a table's is itself.
    pub fn tables_behind(&self, id: RelationId) -> Vec<RelationId> {
        let is_table = |id: &RelationId| {
            self.relations.get(id).is_some_and(|r| r.kind() == RelationKind::Table)
        };
        self.closure(&[id]).into_iter().filter(is_table).collect()
    }

    /// A source, or the connector of a table, as far as the log tells; `None`: there is none of this id. `available`: how
    /// far its splits could go.
    pub fn split_reports(
        &self,
        id: RelationId,
        available: &[(u32, u64)],
    ) -> Option<Vec<SplitReport>> {
        let source = self.sources.get(&id)?;
        let job = self.jobs.get(&id);
        let splits: BTreeSet<u32> = source
            .newest()
            .iter()
            .map(|o| o.split)
            .chain(available.iter().map(|(s, _)| *s))
            .chain(source.parts.splits.iter().map(|s| s.split))
            .collect();
        let report = |split: u32| {
            let start = source.parts.start(split);
            let fixed = source.newest().iter().find(|o| o.split == split);
            let available = available.iter().find(|(s, _)| *s == split);
            SplitReport {
                split,
                name: source.parts.name(split).to_owned(),
                start,
                offset: fixed.map_or(start, |o| o.offset),
                taken: job.map(|j| {
                    j.version.counters.get(&feed_counter(split)).copied().unwrap_or(start)
                }),
                available: available.map(|(_, end)| *end).filter(|end| *end < u64::MAX),
            }
        };
        Some(splits.into_iter().map(report).collect())
    }

    /// The stored job graph of a relation.
    pub fn graph(&self, relation: RelationId) -> Option<Bytes> {
        self.relations.get(&relation).map(|r| r.graph.clone())
    }
}
