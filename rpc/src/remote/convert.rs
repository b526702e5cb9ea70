//! Messages as they are sent, and what they are here.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, Generation, JobId, RelationId};

use crate::call_error::{CallError, error_from_proto, error_to_proto};
use crate::log::SplitOffset;
use crate::proto::{self, entry_outcome, live_part, poll_source_answer};
use crate::services::{CompactionTask, LivePart, MergedTable, PartKind, RunningJob, StartJob};
use crate::source_poll::{More, PollSource, Polled};
use crate::stream::{Acknowledged, AppliedRecord, EntryOutcome, StreamMessage};

/// A field that must be there.
pub(super) fn required<T>(field: Option<T>, name: &str) -> Result<T, CallError> {
    field.ok_or_else(|| CallError::missing(name))
}

pub(super) fn job_generation(job: JobId, generation: Generation) -> proto::JobGeneration {
    proto::JobGeneration { job: job.0, generation: generation.0 }
}

impl From<StartJob> for proto::StartJobRequest {
    fn from(start: StartJob) -> proto::StartJobRequest {
        let StartJob { job, generation, record, parallelism } = start;
        let parallelism = u32::try_from(parallelism).unwrap_or(u32::MAX);
        proto::StartJobRequest { generation: generation.0, record, parallelism, job: job.0 }
    }
}

impl From<proto::StartJobRequest> for StartJob {
    fn from(start: proto::StartJobRequest) -> StartJob {
        let proto::StartJobRequest { generation, record, parallelism, job } = start;
        let (job, generation) = (RelationId(job), Generation(generation));
        StartJob { job, generation, record, parallelism: parallelism as usize }
    }
}

impl From<RunningJob> for proto::RunningJob {
    fn from(job: RunningJob) -> proto::RunningJob {
        let RunningJob { number, horizon, sealed, is_cutting } = job;
        proto::RunningJob { number, horizon: horizon.0, sealed, cutting: is_cutting }
    }
}

impl From<proto::RunningJob> for RunningJob {
    fn from(job: proto::RunningJob) -> RunningJob {
        let proto::RunningJob { number, horizon, sealed, cutting } = job;
        RunningJob { number, horizon: Epoch(horizon), sealed, is_cutting: cutting }
    }
}

fn offsets_to_proto(offsets: Vec<(u32, u64)>) -> Vec<SplitOffset> {
    offsets.into_iter().map(|(split, offset)| SplitOffset { split, offset }).collect()
}

fn offsets_from_proto(offsets: Vec<SplitOffset>) -> Vec<(u32, u64)> {
    offsets.into_iter().map(|o| (o.split, o.offset)).collect()
}

impl From<PollSource> for proto::PollSourceRequest {
    fn from(poll: PollSource) -> proto::PollSourceRequest {
        let PollSource { source, reader, record, offsets, started_ms, now_ms } = poll;
        let (source, reader, offsets) = (source.0, reader.0, offsets_to_proto(offsets));
        proto::PollSourceRequest { source, reader, record, offsets, started_ms, now_ms }
    }
}

impl From<proto::PollSourceRequest> for PollSource {
    fn from(poll: proto::PollSourceRequest) -> PollSource {
        let proto::PollSourceRequest { source, reader, record, offsets, started_ms, now_ms } = poll;
        let (source, reader) = (RelationId(source), RelationId(reader));
        let offsets = offsets_from_proto(offsets);
        PollSource { source, reader, record, offsets, started_ms, now_ms }
    }
}

impl From<Polled> for proto::PollSourceAnswer {
    fn from(polled: Polled) -> proto::PollSourceAnswer {
        let Polled { splits, files, available, more, trouble, offsets_per_row } = polled;
        let more = match more {
            More::Never => poll_source_answer::More::Never(proto::Empty {}),
            More::WithTime => poll_source_answer::More::WithTime(proto::Empty {}),
            More::After(pause) => {
                let nanos = u64::try_from(pause.as_nanos());
                poll_source_answer::More::AfterNs(nanos.unwrap_or(u64::MAX))
            }
        };
        let (available, more) = (offsets_to_proto(available), Some(more));
        let trouble = trouble.as_ref().map(error_to_proto);
        proto::PollSourceAnswer { splits, files, available, trouble, offsets_per_row, more }
    }
}

impl TryFrom<proto::PollSourceAnswer> for Polled {
    type Error = CallError;

    fn try_from(answer: proto::PollSourceAnswer) -> Result<Polled, CallError> {
        let proto::PollSourceAnswer { splits, files, available, trouble, offsets_per_row, more } =
            answer;
        let more = match required(more, "more")? {
            poll_source_answer::More::Never(_) => More::Never,
            poll_source_answer::More::WithTime(_) => More::WithTime,
            poll_source_answer::More::AfterNs(nanos) => More::After(Duration::from_nanos(nanos)),
        };
        let (available, trouble) = (offsets_from_proto(available), trouble.map(error_from_proto));
        Ok(Polled { splits, files, available, more, trouble, offsets_per_row })
    }
}

pub(super) fn record_to_proto(applied: AppliedRecord) -> proto::AppliedRecord {
    let outcome = |outcome: &EntryOutcome| proto::EntryOutcome {
        outcome: Some(match outcome {
            EntryOutcome::Applied(epoch) => entry_outcome::Outcome::Applied(epoch.0),
            EntryOutcome::Void(reason) => entry_outcome::Outcome::Void(reason.clone()),
        }),
    };
    let outcomes = applied.outcomes.iter().map(outcome).collect();
    let record = Arc::try_unwrap(applied.record).unwrap_or_else(|shared| (*shared).clone());
    proto::AppliedRecord { record: Some(record), outcomes }
}

fn record_from_proto(applied: proto::AppliedRecord) -> Result<AppliedRecord, CallError> {
    let record = required(applied.record, "record")?;
    if record.entries.len() != applied.outcomes.len() {
        return Err(CallError::Malformed("a record without outcomes of its entries".into()));
    }
    let outcome = |o: proto::EntryOutcome| match required(o.outcome, "outcome")? {
        entry_outcome::Outcome::Applied(epoch) => Ok(EntryOutcome::Applied(Epoch(epoch))),
        entry_outcome::Outcome::Void(reason) => Ok(EntryOutcome::Void(reason)),
    };
    let outcomes = applied.outcomes.into_iter().map(outcome);
    let outcomes = outcomes.collect::<Result<Vec<_>, CallError>>()?;
    Ok(AppliedRecord { record: Arc::new(record), outcomes: outcomes.into() })
}

impl From<StreamMessage> for proto::StreamMessage {
    fn from(message: StreamMessage) -> proto::StreamMessage {
        let horizon = |(job, epoch): (JobId, Epoch)| proto::Horizon { job: job.0, epoch: epoch.0 };
        proto::StreamMessage {
            records: message.records.into_iter().map(record_to_proto).collect(),
            horizons: message.horizons.into_iter().map(horizon).collect(),
        }
    }
}

impl TryFrom<proto::StreamMessage> for StreamMessage {
    type Error = CallError;

    fn try_from(message: proto::StreamMessage) -> Result<StreamMessage, CallError> {
        let records = message.records.into_iter().map(record_from_proto);
        let horizons = message.horizons.iter().map(|h| (RelationId(h.job), Epoch(h.epoch)));
        Ok(StreamMessage {
            records: records.collect::<Result<_, _>>()?,
            horizons: horizons.collect(),
        })
    }
}

impl From<Acknowledged> for proto::Acknowledged {
    fn from(at: Acknowledged) -> proto::Acknowledged {
        let behind = at.behind.into_iter();
        let behind = behind.map(|(job, record)| proto::BehindJob { job: job.0, record });
        proto::Acknowledged { received: at.received, behind: behind.collect() }
    }
}

impl From<proto::Acknowledged> for Acknowledged {
    fn from(at: proto::Acknowledged) -> Acknowledged {
        let behind = at.behind.iter().map(|b| (RelationId(b.job), b.record)).collect();
        Acknowledged { received: at.received, behind }
    }
}

impl From<MergedTable> for proto::MergedTable {
    fn from(table: MergedTable) -> proto::MergedTable {
        let MergedTable { position, bound } = table;
        proto::MergedTable { position, bound }
    }
}

impl From<proto::MergedTable> for MergedTable {
    fn from(table: proto::MergedTable) -> MergedTable {
        let proto::MergedTable { position, bound } = table;
        MergedTable { position, bound }
    }
}

impl From<CompactionTask> for proto::CompactionTask {
    fn from(task: CompactionTask) -> proto::CompactionTask {
        proto::CompactionTask {
            task_id: task.task_id,
            job: task.job.0,
            relation: Some(task.relation),
            inputs: task.inputs,
            target_level: task.target_level,
            horizon: task.horizon.0,
            bottom: task.bottom,
            table: Some(task.table.into()),
        }
    }
}

impl TryFrom<proto::CompactionTask> for CompactionTask {
    type Error = CallError;

    fn try_from(task: proto::CompactionTask) -> Result<CompactionTask, CallError> {
        Ok(CompactionTask {
            task_id: task.task_id,
            job: RelationId(task.job),
            relation: required(task.relation, "relation")?,
            inputs: task.inputs,
            table: required(task.table, "table")?.into(),
            target_level: task.target_level,
            horizon: Epoch(task.horizon),
            bottom: task.bottom,
        })
    }
}

impl From<LivePart> for proto::LivePart {
    fn from(part: LivePart) -> proto::LivePart {
        let kind = match part.kind {
            PartKind::Run { run_id, meta_length } => {
                live_part::Kind::Run(proto::RunPart { run_id, meta_length })
            }
            PartKind::Slice => live_part::Kind::Slice(proto::SlicePart {}),
            PartKind::Staged => live_part::Kind::Staged(proto::StagedPart {}),
        };
        let LivePart { job, object, offset, length, .. } = part;
        proto::LivePart { job: job.0, object, offset, length, kind: Some(kind) }
    }
}

impl TryFrom<proto::LivePart> for LivePart {
    type Error = CallError;

    fn try_from(part: proto::LivePart) -> Result<LivePart, CallError> {
        let kind = match required(part.kind, "kind")? {
            live_part::Kind::Run(run) => {
                PartKind::Run { run_id: run.run_id, meta_length: run.meta_length }
            }
            live_part::Kind::Slice(_) => PartKind::Slice,
            live_part::Kind::Staged(_) => PartKind::Staged,
        };
        let proto::LivePart { job, object, offset, length, .. } = part;
        Ok(LivePart { job: RelationId(job), object, offset, length, kind })
    }
}
