//! What the leader shows an operator, and how he steers where jobs run ([`OperatorService`]).

use std::collections::BTreeMap;

use async_trait::async_trait;
use millrace_common::{JobId, RelationId, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::ProcessRole;
use millrace_rpc::operator::{
    BackupList, BackupOverview, ClusterOverview, CollectionReport, JobOverview, JobVersions,
    LevelOverview, OperatorService, PlacedJobs, VersionOverview, WorkerOverview,
};
use millrace_rpc::version::{JobVersion, StatementId};

use crate::cluster::has_role;
use crate::meta::Meta;
use crate::placement::writes_tables;
use crate::processes::ProcessStatus;
use crate::state::{JobRecord, MetaState};

#[async_trait]
impl OperatorService for Meta {
    async fn overview(&self) -> Result<ClusterOverview, CallError> {
        Ok(ClusterOverview {
            term: self.term(),
            record: self.record(),
            leader: self.incarnation(),
            workers: self.processes().iter().map(|p| self.worker_overview(p)).collect(),
            jobs: self.job_overviews(),
            store_id: self.store_id().map(|id| id.to_string()).unwrap_or_default(),
        })
    }

    async fn move_job(
        &self,
        job: JobId,
        worker: u64,
        id: Option<StatementId>,
    ) -> Result<PlacedJobs, CallError> {
        let jobs = self.cluster()?.move_job(job, worker, id).await?;
        Ok(PlacedJobs { record: self.record(), jobs })
    }

    async fn drain(
        &self,
        worker: u64,
        undo: bool,
        id: Option<StatementId>,
    ) -> Result<PlacedJobs, CallError> {
        let jobs = self.cluster()?.drain(worker, undo, id).await?;
        Ok(PlacedJobs { record: self.record(), jobs })
    }

    async fn versions(&self) -> Result<JobVersions, CallError> {
        let state = self.shared.state.read();
        let versions = state.jobs.iter().map(|(id, job)| {
            version_overview(*id, state.relations.get(id).map(|r| &**r), &job.version)
        });
        Ok(JobVersions { versions: versions.collect() })
    }

    async fn collection(&self, run: bool) -> Result<CollectionReport, CallError> {
        if run {
            self.shared.collection.run().await;
        }
        Ok(self.collection_report())
    }

    async fn create_backup(
        &self,
        name: String,
        id: Option<StatementId>,
    ) -> Result<BackupOverview, CallError> {
        Ok(self.make_backup(name, id).await?)
    }

    async fn backups(&self) -> Result<BackupList, CallError> {
        Ok(self.list_backups().await)
    }

    async fn release_backup(
        &self,
        name: String,
        id: Option<StatementId>,
    ) -> Result<BackupOverview, CallError> {
        Ok(self.end_backup(name, id).await?)
    }
}

impl Meta {
    fn worker_overview(&self, status: &ProcessStatus) -> WorkerOverview {
        let process = &status.process;
        let role = |role: ProcessRole| format!("{role:?}").to_lowercase();
        WorkerOverview {
            report: Some(self.process_report(status)),
            roles: process.registration.roles().map(role).collect(),
            address: process.registration.address.clone(),
            since_ms: process.epoch.millis(),
            drained: process.drained,
        }
    }

    fn job_overviews(&self) -> Vec<JobOverview> {
        let (own, loads) = {
            let state = self.shared.state.read();
            (self.shared.members.job_reports(&state), self.shared.loads.loads(&state))
        };
        let catalog = self.catalog();
        let overview = |status: crate::status::JobStatus| {
            let (id, generation) = (status.relation, status.generation.0);
            let report = self.job_report(status, own.get(&id.0).cloned().unwrap_or_default());
            let relation = catalog.relation(id);
            let of_record = |job: &JobRecord| (job.process, job.by_operator);
            let placed = self.shared.state.read().jobs.get(&id).map(of_record);
            let (worker, by_operator) = placed.unwrap_or_default();
            JobOverview {
                id: id.0,
                schema: relation.map(|r| r.schema.clone()).unwrap_or_default(),
                name: relation.map(|r| r.name.clone()).unwrap_or_default(),
                kind: relation.map(|r| kind(r)).unwrap_or_default().to_owned(),
                worker,
                generation,
                parallelism: relation.map_or(0, |r| r.parallelism),
                writes_tables: relation.is_some_and(|r| writes_tables(r)),
                state: report.state,
                reason: report.reason,
                lag_ms: report.lag_ms,
                load: loads.get(&id).copied(),
                by_operator,
            }
        };
        self.job_statuses().into_iter().map(overview).collect()
    }
}

fn kind(relation: &Relation) -> &'static str {
    match relation.kind() {
        RelationKind::Table => "table",
        RelationKind::Source => "source",
        RelationKind::MaterializedView => "materialized view",
        RelationKind::Index => "index",
        RelationKind::Sink => "sink",
        RelationKind::View => "view",
        RelationKind::Subscription => "subscription",
        RelationKind::Unspecified => "relation",
    }
}

fn version_overview(
    id: RelationId,
    relation: Option<&Relation>,
    version: &JobVersion,
) -> VersionOverview {
    let mut levels: BTreeMap<u32, LevelOverview> = BTreeMap::new();
    for run in &version.runs {
        let level = levels.entry(run.level).or_default();
        level.level = run.level;
        level.runs += 1;
        level.bytes += run.length;
        level.rows += run.rows;
    }
    VersionOverview {
        job: id.0,
        schema: relation.map(|r| r.schema.clone()).unwrap_or_default(),
        name: relation.map(|r| r.name.clone()).unwrap_or_default(),
        epoch: version.epoch,
        commits: version.commits,
        slices: version.tail.len() as u64,
        slice_bytes: version.tail.iter().map(|s| s.length.max(s.inline.len() as u64)).sum(),
        levels: levels.into_values().collect(),
    }
}

/// Whether jobs may be placed on a process by an operator; else why not.
pub(crate) fn check_worker(state: &MetaState, worker: u64) -> Result<(), SqlError> {
    let Some(process) = state.processes.live().get(&worker) else {
        let message = format!("there is no process {worker}");
        return Err(SqlError::new(SqlState::UNDEFINED_OBJECT, message).with_hint(
            "It may have been fenced: millrace ctl workers shows those that are there.",
        ));
    };
    match has_role(&process.registration, ProcessRole::Compute) {
        true => Ok(()),
        false => Err(SqlError::new(
            SqlState::WRONG_OBJECT_TYPE,
            format!("process {worker} is no compute process: no jobs run on it"),
        )),
    }
}
