//! [`Cluster`] by direct calls: meta, worker and store in this process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{BinaryArray, RecordBatch, UInt32Array};
use async_trait::async_trait;
use futures::StreamExt;
use millrace_common::{
    DeltaChunk, Epoch, RelationId, SqlError, SqlState, TableId, VNODE_COUNT, Vnode,
};
use millrace_executor::Worker;
use millrace_executor::dml::{
    Announced, DmlError, DmlKind, DmlOutcome, DmlStatement, EntryFlag, LoadKind,
};
use millrace_meta::processes::ProcessStatus;
use millrace_meta::{Catalog, CreateOptions, JobStatus, Meta};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::control::{CompactionReport, ProcessUsage};
use millrace_rpc::log::{AlterRelation, UserChange};
use millrace_rpc::services::MetaService;
use millrace_rpc::version::StatementId;
use millrace_storage::{JobStore, Snapshot, StateStore};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::cluster::source_scan::{SourceAt, scan_source};
use crate::cluster::{
    BatchStream, CatalogSnapshot, ChangeStream, Cluster, DmlResult, ExpressionError, FollowStep,
    JobRow, Load, Locks, PlacedVersion, ProcessRow, ReadSet, ScanRequest, SourceRow, SplitRow,
    job_row, snapshot, worker_report,
};

/// All roles in one process.
pub struct Direct {
    meta: Arc<Meta>,
    store: Arc<StateStore>,
    worker: Arc<Worker>,
    /// The catalog as sessions see it, made anew when meta's changes.
    catalog: Mutex<Option<(Arc<Catalog>, Arc<CatalogSnapshot>)>>,
}

impl Direct {
    pub fn new(meta: Arc<Meta>, store: Arc<StateStore>, worker: Arc<Worker>) -> Direct {
        Direct { meta, store, worker, catalog: Mutex::new(None) }
    }

    fn snapshot(&self, relation: &Relation, epoch: Epoch) -> Result<Snapshot, SqlError> {
        self.serving(relation)?.snapshot(epoch).map_err(SqlError::from)
    }

    fn serving(&self, relation: &Relation) -> Result<Arc<JobStore>, SqlError> {
        self.store.job(RelationId(relation.id)).ok_or_else(|| {
            SqlError::new(
                SqlState::CANNOT_CONNECT_NOW,
                format!("relation \"{}\" is not being served", relation.name),
            )
            .with_hint("SHOW JOBS tells why; the job is retried.")
        })
    }
}

#[async_trait]
impl Cluster for Direct {
    fn catalog(&self) -> Arc<CatalogSnapshot> {
        let current = self.meta.catalog();
        let mut cached = self.catalog.lock();
        if let Some((of, snapshot)) = cached.as_ref()
            && Arc::ptr_eq(of, &current)
        {
            return snapshot.clone();
        }
        let schemas = current.schemas().map(str::to_owned).collect();
        let relations = current.relations().cloned().collect();
        let first = CatalogSnapshot::default();
        let previous = cached.as_ref().map_or(&first, |(_, snapshot)| snapshot);
        let snapshot = Arc::new(CatalogSnapshot::after(previous, schemas, relations));
        *cached = Some((current, snapshot.clone()));
        snapshot
    }

    async fn create_relation(
        &self,
        relation: Relation,
        table_count: u32,
        or_replace: bool,
    ) -> Result<RelationId, SqlError> {
        let options = CreateOptions { table_count, or_replace, ..CreateOptions::default() };
        self.meta.create_relation(relation, options).await
    }

    async fn drop_relations(&self, ids: Vec<RelationId>) -> Result<(), SqlError> {
        self.meta.drop_relations(&ids).await
    }

    fn kept_since(&self, relation: RelationId) -> Epoch {
        self.worker.kept_since(relation)
    }

    async fn alter_relation(&self, change: AlterRelation) -> Result<(), SqlError> {
        self.meta.alter_relation(change).await
    }

    async fn rebuild(&self, id: RelationId) -> Result<(), SqlError> {
        self.meta.rebuild(id).await
    }

    async fn wait_rebuilt(
        &self,
        id: RelationId,
        cancel: CancellationToken,
    ) -> Result<(), SqlError> {
        self.meta.wait_rebuilt(id, &cancel).await
    }

    fn source_report(&self, id: RelationId) -> Option<SourceRow> {
        let report = self.meta.source_report(id)?;
        let feed = self.worker.feed_error(id);
        let splits = report.splits.into_iter().map(SplitRow::from);
        Some(SourceRow {
            state: if feed.is_some() { "failing" } else { report.state.name() }.to_owned(),
            reason: feed.map(|e| e.into_parts().message).or(report.reason),
            splits: splits.collect(),
            files: report.files,
        })
    }

    async fn create_schema(&self, name: &str) -> Result<(), SqlError> {
        self.meta.create_schema(name, false).await
    }

    async fn drop_schema(&self, name: &str) -> Result<(), SqlError> {
        self.meta.drop_schema(name, false).await
    }

    async fn wait_created(
        &self,
        id: RelationId,
        cancel: CancellationToken,
    ) -> Result<(), SqlError> {
        self.meta.wait_created(id, &cancel).await
    }

    async fn read_epoch(
        &self,
        ids: &[RelationId],
        timeout: Duration,
        fresh: bool,
    ) -> Result<Epoch, SqlError> {
        let timeout = (!timeout.is_zero()).then_some(timeout);
        self.meta.read_epoch(ids, timeout, fresh).await
    }

    async fn flush(&self) -> Result<(), SqlError> {
        self.meta.flush().await
    }

    fn setting(&self, name: &str) -> Option<String> {
        self.meta.settings().stored(name)
    }

    async fn set_setting(&self, name: &str, value: Option<&str>) -> Result<(), SqlError> {
        self.meta.set_setting(name, value).await
    }

    fn processes(&self) -> Vec<ProcessRow> {
        self.meta.processes().into_iter().map(process_row).collect()
    }

    fn usages(&self) -> Vec<ProcessUsage> {
        self.meta.usages()
    }

    fn compactions(&self) -> Vec<CompactionReport> {
        self.meta.compactions()
    }

    fn versions(&self) -> Vec<PlacedVersion> {
        self.meta.read_state(PlacedVersion::all)
    }

    fn users(&self) -> BTreeMap<String, Option<String>> {
        self.meta.catalog().users().clone()
    }

    async fn set_user(
        &self,
        name: &str,
        change: UserChange,
        verifier: Option<String>,
    ) -> Result<(), SqlError> {
        self.meta.set_user(name, change, verifier).await
    }

    fn jobs(&self) -> Vec<JobRow> {
        let statuses = self.meta.job_statuses().into_iter();
        let report = |s: JobStatus| {
            let own = worker_report(&self.worker, &self.store, s.relation);
            job_row(self.meta.job_report(s, own))
        };
        statuses.map(report).collect()
    }

    fn expression_errors(&self, id: RelationId) -> Vec<ExpressionError> {
        self.worker.errors(id).into_iter().map(ExpressionError::from).collect()
    }

    async fn scan(
        &self,
        relation: &Relation,
        epoch: Epoch,
        request: ScanRequest,
    ) -> Result<BatchStream, SqlError> {
        if relation.kind == RelationKind::Source as i32 {
            let id = RelationId(relation.id);
            let at = SourceAt {
                offsets: self.meta.source_offsets(id, epoch),
                parts: self.meta.source_parts(id),
                marks: self.meta.source_marks(id, epoch),
            };
            return scan_source(relation, at, &request);
        }
        let snapshot = self.snapshot(relation, epoch)?;
        Ok(snapshot::told(snapshot::scan(&snapshot, relation, request).await?))
    }

    async fn scan_parts(
        &self,
        relation: &Relation,
        epoch: Epoch,
        request: ScanRequest,
    ) -> Result<Vec<BatchStream>, SqlError> {
        if relation.kind == RelationKind::Source as i32 || !snapshot::is_whole(&request) {
            return Ok(vec![self.scan(relation, epoch, request).await?]);
        }
        let snapshot = self.snapshot(relation, epoch)?;
        let part =
            |vnodes| snapshot::told(snapshot::part(&snapshot, relation, &request.columns, vnodes));
        Ok(snapshot::parts(&snapshot, relation)?.into_iter().map(part).collect())
    }

    async fn multi_get(
        &self,
        relation: &Relation,
        epoch: Epoch,
        keys: BinaryArray,
    ) -> Result<(UInt32Array, RecordBatch), SqlError> {
        let snapshot = self.snapshot(relation, epoch)?;
        let found = snapshot
            .multi_get(TableId(relation.first_table_id), keys)
            .await
            .map_err(SqlError::from)?;
        Ok((found.input, found.values))
    }

    fn follow_now(&self, id: RelationId, seen: Epoch) -> Option<FollowStep> {
        self.meta.follow_now(id, seen).map(FollowStep::from)
    }

    async fn follow(
        &self,
        id: RelationId,
        seen: Epoch,
        progress: Option<Duration>,
    ) -> Result<FollowStep, SqlError> {
        self.meta.follow(id, seen, progress).await.map(FollowStep::from)
    }

    async fn changes(
        &self,
        relation: &Relation,
        from: Epoch,
        to: Epoch,
    ) -> Result<ChangeStream, SqlError> {
        let job = self.serving(relation)?;
        let vnodes = 0..VNODE_COUNT as Vnode;
        let changes = job.changes(TableId(relation.first_table_id), from, to, vnodes);
        Ok(changes.map(|c| c.map_err(SqlError::from)).boxed())
    }

    async fn apply_dml(
        &self,
        table: RelationId,
        id: StatementId,
        delta: DeltaChunk,
        kind: DmlKind,
        entered: &EntryFlag,
    ) -> Result<DmlResult, SqlError> {
        self.meta.check_clock()?;
        let entered = entered.clone();
        let statement = DmlStatement { id, delta, kind, mark: None, entered, announced: None };
        result_of(self.worker.apply_dml(table, statement).await)
    }

    fn announce_staged(&self, table: RelationId, rows: &DeltaChunk) -> Option<Announced> {
        self.worker.announce_staged(table, rows)
    }

    async fn begin_load(
        &self,
        table: RelationId,
        id: StatementId,
        kind: LoadKind,
    ) -> Result<Load, SqlError> {
        self.meta.check_clock()?;
        Ok(Load::Here(Box::new(self.worker.begin_load(table, id, kind).await?)))
    }

    async fn apply_transaction(
        &self,
        id: StatementId,
        changes: Vec<(RelationId, DeltaChunk, DmlKind)>,
        read: ReadSet,
        entered: &EntryFlag,
    ) -> Result<DmlResult, SqlError> {
        self.meta.check_clock()?;
        let Some(read) = read.into_local() else { return Ok(DmlResult::Conflict) };
        result_of(self.worker.apply_transaction(id, changes, read, entered).await)
    }

    async fn lock_tables(&self, tables: &[RelationId]) -> Result<Option<Locks>, SqlError> {
        match self.worker.lock_tables(tables).await {
            Ok(locks) => Ok(Some(Locks::Here(locks))),
            Err(DmlError::Conflict) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn tables_behind(&self, id: RelationId) -> Vec<RelationId> {
        self.meta.tables_behind(id)
    }

    fn exact_at(&self, ids: &[RelationId], epoch: Epoch) -> bool {
        self.meta.exact_at(ids, epoch)
    }

    async fn allocate_row_ids(&self, table: RelationId, n: u64) -> Result<u64, SqlError> {
        Ok(self.worker.allocate_row_ids(table, n).await? as u64)
    }
}

fn result_of(outcome: Result<DmlOutcome, DmlError>) -> Result<DmlResult, SqlError> {
    match outcome {
        Ok(DmlOutcome { epoch, rows_affected: rows, late, .. }) => {
            Ok(DmlResult::Applied { epoch, rows, late })
        }
        Err(DmlError::Conflict) => Ok(DmlResult::Conflict),
        Err(e) => Err(e.into()),
    }
}

fn process_row(status: ProcessStatus) -> ProcessRow {
    let ProcessStatus { incarnation, process, applied, jobs, load, .. } = status;
    ProcessRow { applied: Some(applied), load, ..ProcessRow::new(incarnation, process, jobs) }
}
