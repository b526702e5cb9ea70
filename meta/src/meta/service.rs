//! What workers ask the leader and tell it ([`MetaService`]).

use std::sync::Arc;

use millrace_common::{Epoch, Generation, JobId, RelationId, SqlError, SqlState, crash};
use millrace_rpc::catalog::Relation;
use millrace_rpc::log::{EditVersion, Entry, SplitMarkAt};
use millrace_rpc::services::{JobToStart, MetaService, SourceParts};
use millrace_rpc::version::{ColumnWatermark, VersionEdit};
use prost::bytes::Bytes;
use tokio::sync::watch;

use super::{Meta, START_LIMIT};

#[async_trait::async_trait]
impl MetaService for Meta {
    fn request_cut(&self, job: JobId) {
        if let Some(handle) = self.shared.job(job) {
            handle.request_cut();
        }
    }

    fn request_compaction(&self, job: JobId) {
        self.shared.compaction.look_at([job]);
    }

    async fn commit_edit(
        &self,
        job: JobId,
        generation: Generation,
        edit: VersionEdit,
    ) -> Result<bool, SqlError> {
        // Which horizon another leader has told the process is known when the job is adopted.
        if let Some(handle) = self.shared.job(job)
            && !handle.wait_attempted(START_LIMIT).await
        {
            let message = format!("the leader does not know yet how far job {job} is");
            return Err(SqlError::new(SqlState::CANNOT_CONNECT_NOW, message));
        }
        // After a restart nobody may read what a flush with this horizon has left out.
        let horizon = self.shared.job(job).map_or(0, |handle| handle.horizon().0);
        let entry = EditVersion { job: job.0, generation: generation.0, edit, horizon };
        let verdict = self.shared.log()?.append(Entry::EditVersion(entry)).await?;
        if let Ok(applied) = &verdict {
            crash::point("flush-after-commit");
            self.shared.wait_applied(job, applied.record).await;
        }
        Ok(verdict.is_ok())
    }

    fn report_failure(&self, job: JobId, generation: Generation, error: SqlError) {
        if let Some(handle) = self.shared.job(job) {
            handle.report_failure(generation, error);
        }
    }

    fn source_offsets(&self, source: RelationId, epoch: Epoch) -> Vec<(u32, u64)> {
        self.shared.state.read().source_offsets(source, epoch)
    }

    fn source_ahead(&self, source: RelationId, splits: &[(u32, u64)]) -> Vec<Option<u64>> {
        let planned = self.shared.planned(source);
        let state = self.shared.state.read();
        let Some(record) = state.sources.get(&source) else { return vec![None; splits.len()] };
        let next = |&(split, offset): &(u32, u64)| {
            let planned = || planned.get(&split).copied().filter(|end| *end > offset);
            record.next_end(split, offset).or_else(planned)
        };
        splits.iter().map(next).collect()
    }

    fn is_behind(&self, job: JobId) -> bool {
        self.shared.state.read().is_behind(job)
    }

    fn source_marks(&self, source: RelationId, epoch: Epoch) -> Vec<SplitMarkAt> {
        self.shared.state.read().source_marks(source, epoch)
    }

    fn watermarks(&self, relation: RelationId, epoch: Epoch) -> Vec<ColumnWatermark> {
        self.shared.state.read().watermarks(relation, epoch)
    }

    fn row_count(&self, relation: RelationId) -> Option<u64> {
        self.shared.state.read().row_count(relation)
    }

    fn source_parts(&self, source: RelationId) -> SourceParts {
        self.shared.state.read().source_parts(source)
    }

    fn job_to_start(&self, job: JobId) -> Option<JobToStart> {
        self.shared.state.read().job_to_start(job)
    }

    fn relation(&self, relation: RelationId) -> Option<Arc<Relation>> {
        self.shared.state.read().relations.get(&relation).cloned()
    }

    fn option(&self, relation: RelationId, name: &str) -> Option<String> {
        self.shared.state.read().option(relation, name)
    }

    fn changes(&self, relation: RelationId) -> Option<watch::Receiver<u64>> {
        Some(self.shared.changes.subscribe(relation))
    }

    fn graph(&self, relation: RelationId) -> Option<Bytes> {
        self.shared.state.read().graph(relation)
    }
}
