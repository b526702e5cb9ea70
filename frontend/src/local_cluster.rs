//! [`Cluster`] by direct calls: meta, worker and store in this process.

mod jobs;

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{BinaryArray, Int64Array, RecordBatch, RecordBatchOptions, UInt32Array};
use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_common::delta::take_rows;
use millrace_common::{
    DeltaChunk, Epoch, RelationId, SqlError, SqlState, TableId, VNODE_COUNT, Vnode,
};
use millrace_connector::{ReadFrom, SplitReader};
use millrace_executor::dml::{
    Announced, DmlError, DmlKind, DmlOutcome, DmlStatement, EntryFlag, Load, LoadKind, ReadSet,
    TableLocks,
};
use millrace_executor::error_sink::ErrorSink;
use millrace_executor::input::watermark::{SourceWatermark, SplitWatermark};
use millrace_executor::{ExecError, Worker};
use millrace_meta::feed::Follow;
use millrace_meta::processes::ProcessStatus;
use millrace_meta::{Catalog, CreateOptions, Meta};
use millrace_rpc::catalog::{OptionEntry, Relation, RelationKind};
use millrace_rpc::log::{ProcessRole, UserChange};
use millrace_rpc::services::MetaService;
use millrace_rpc::version::StatementId;
use millrace_storage::{JobStore, ScanBatch, ScanOptions, Snapshot, StateStore, StorageError};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::cluster::{
    BatchStream, CatalogSnapshot, ChangeStream, Cluster, DmlResult, ExpressionError, FollowStep,
    JobRow, ProcessRow, ScanRequest, SourceRow, SplitRow,
};
use crate::query::scan_parts;

/// Rows of a source made at a time.
const SOURCE_BATCH: usize = 8192;
/// Key ranges of one scan read at the same time.
const RANGES_AT_ONCE: usize = 16;

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

    /// What is wrong with a source that a job reads, or with its own connector.
    fn failing_input(&self, job: RelationId) -> Option<String> {
        let inputs = self.meta.inputs(job).into_iter().chain([job]);
        inputs.into_iter().find_map(|id| {
            let reason = self.meta.source_report(id)?.reason?;
            let catalog = self.meta.catalog();
            let name = catalog.relation(id).map(|r| r.name.clone()).unwrap_or_default();
            Some(format!("source \"{name}\": {reason}"))
        })
    }

    fn scan_source(
        &self,
        relation: &Relation,
        epoch: Epoch,
        request: ScanRequest,
    ) -> Result<BatchStream, SqlError> {
        let source = millrace_connector::create_source(relation)?;
        let offsets = self.meta.source_offsets(RelationId(relation.id), epoch);
        let id = RelationId(relation.id);
        let parts = self.meta.source_parts(id);
        let marks = self.meta.source_marks(id, epoch);
        let watermark =
            SourceWatermark::of(relation, &request.columns).map_err(ExecError::into_sql)?;
        let columns = watermark.as_ref().map_or(&request.columns, |w| &w.columns).clone();
        // What fails is NULL, and told by nobody: this is a query.
        let errors = request.null_errors.then(|| Arc::new(ErrorSink::default()));
        let splits = futures::stream::iter(offsets.into_iter().map(move |(split, until)| {
            let parts = parts.clone();
            let start = parts.start(split);
            let at = ReadFrom { split, offset: start, position: None, parts };
            let reader = source.open(at, &columns).map_err(SqlError::from);
            let mut progress = SplitWatermark::default();
            progress.set_floors(split, &marks);
            let watermark = watermark.clone();
            let errors = errors.clone();
            let scan = SplitScan { reader, until, at: start, watermark, errors, progress };
            futures::stream::unfold(Some(scan), |scan| async move { scan?.next().await })
        }));
        Ok(splits.flatten().boxed())
    }
}

/// A query's way through one split: the same rows that jobs see, late ones left out.
struct SplitScan {
    reader: Result<Box<dyn SplitReader>, SqlError>,
    until: u64,
    at: u64,
    watermark: Option<SourceWatermark>,
    /// `None`: a generated column that fails is an error.
    errors: Option<Arc<ErrorSink>>,
    progress: SplitWatermark,
}

impl SplitScan {
    async fn next(mut self) -> Option<(Result<RecordBatch, SqlError>, Option<SplitScan>)> {
        let reader = match &mut self.reader {
            Ok(reader) => reader,
            Err(e) => return Some((Err(e.clone()), None)),
        };
        let until = self.until.min(self.progress.raise(self.at));
        let (batch, after) = match reader.read(until, SOURCE_BATCH).await {
            Ok(Some(read)) => read,
            Ok(None) => return None,
            Err(e) => return Some((Err(SqlError::from(e)), None)),
        };
        self.at = after;
        match self.on_time(batch) {
            Ok(batch) => Some((Ok(batch), Some(self))),
            Err(e) => Some((Err(e), None)),
        }
    }

    fn on_time(&mut self, batch: RecordBatch) -> Result<RecordBatch, SqlError> {
        let Some(w) = &self.watermark else { return Ok(batch) };
        let batch = w.complete(batch, self.errors.as_ref()).map_err(ExecError::into_sql)?;
        let advanced = w.expr.advance(&batch, &mut self.progress.running);
        let (stays, _) = advanced.map_err(ExecError::into_sql)?;
        let asked: Vec<usize> = (0..w.width).collect();
        let arrow = |e: arrow::error::ArrowError| SqlError::internal(e.to_string());
        let batch = batch.project(&asked).map_err(arrow)?;
        match stays {
            None => Ok(batch),
            Some(mask) => arrow::compute::filter_record_batch(&batch, &mask).map_err(arrow),
        }
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
        let options = CreateOptions { table_count, or_replace, if_not_exists: false };
        self.meta.create_relation(relation, options).await
    }

    async fn drop_relations(&self, ids: Vec<RelationId>) -> Result<(), SqlError> {
        self.meta.drop_relations(&ids).await
    }

    fn kept_since(&self, relation: RelationId) -> Epoch {
        self.worker.kept_since(relation)
    }

    async fn alter_relation(
        &self,
        id: RelationId,
        options: Vec<OptionEntry>,
        paused: Option<bool>,
    ) -> Result<(), SqlError> {
        self.meta.alter_relation(id, options, paused).await
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
        let splits = report.splits.into_iter().map(|s| SplitRow {
            split: s.split,
            name: s.name,
            start: s.start,
            offset: s.taken.unwrap_or(s.offset),
            available: s.available.map(|end| end.max(s.offset)).or(s.taken.map(|_| s.offset)),
        });
        Some(SourceRow {
            state: if feed.is_some() { "failing" } else { report.state.name() },
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
        self.meta.job_statuses().into_iter().map(|s| self.job_row(s)).collect()
    }

    fn expression_errors(&self, id: RelationId) -> Vec<ExpressionError> {
        let all = self.worker.errors(id).into_iter();
        all.map(|e| ExpressionError {
            place: e.place,
            sqlstate: e.state,
            count: e.count,
            samples: e.samples,
        })
        .collect()
    }

    async fn scan(
        &self,
        relation: &Relation,
        epoch: Epoch,
        request: ScanRequest,
    ) -> Result<BatchStream, SqlError> {
        if relation.kind == RelationKind::Source as i32 {
            return self.scan_source(relation, epoch, request);
        }
        let snapshot = self.snapshot(relation, epoch)?;
        let table = TableId(relation.first_table_id);
        if let Some(keys) = request.keys {
            let found = snapshot.multi_get(table, keys).await.map_err(SqlError::from)?;
            let batch =
                found.values.project(&request.columns).map_err(crate::dml::rows::arrow_error)?;
            return Ok(futures::stream::iter([Ok(batch)]).boxed());
        }
        let options = ScanOptions {
            projection: Some(request.columns),
            batch_rows: request.limit.map_or(8192, |l| l.clamp(1, 8192)),
            ..ScanOptions::default()
        };
        let batches: BoxStream<'static, _> = match request.ranges {
            None => snapshot.scan(table, options),
            Some(ranges) => futures::stream::iter(ranges)
                .map(move |r| {
                    let range = Some((Bound::Included(r.from), Bound::Excluded(r.until)));
                    snapshot.scan(table, ScanOptions { range, ..options.clone() })
                })
                .flatten_unordered(RANGES_AT_ONCE)
                .boxed(),
        };
        Ok(counted(batches))
    }

    async fn scan_parts(
        &self,
        relation: &Relation,
        epoch: Epoch,
        request: ScanRequest,
    ) -> Result<Vec<BatchStream>, SqlError> {
        let whole = request.keys.is_none() && request.ranges.is_none() && request.limit.is_none();
        if relation.kind == RelationKind::Source as i32 || !whole {
            return Ok(vec![self.scan(relation, epoch, request).await?]);
        }
        let snapshot = self.snapshot(relation, epoch)?;
        let table = TableId(relation.first_table_id);
        let (rows, bytes) = snapshot.size(table).map_err(SqlError::from)?;
        let part = |vnodes| {
            let (snapshot, projection) = (snapshot.clone(), Some(request.columns.clone()));
            let options =
                ScanOptions { projection, vnodes: Some(vnodes), ..ScanOptions::default() };
            // Its runs are opened when it is its turn.
            let opened = async move { counted(snapshot.scan(table, options)) };
            futures::stream::once(opened).flatten().boxed()
        };
        Ok(scan_parts::parts(rows, bytes).into_iter().map(part).collect())
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
        self.meta.follow_now(id, seen).map(step)
    }

    async fn follow(
        &self,
        id: RelationId,
        seen: Epoch,
        progress: Option<Duration>,
    ) -> Result<FollowStep, SqlError> {
        self.meta.follow(id, seen, progress).await.map(step)
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
        let entered = entered.clone();
        let statement = DmlStatement { id, delta, kind, mark: None, entered, announced: None };
        result_of(self.worker.apply_dml(table, statement).await)
    }

    fn announce_staged(&self, table: RelationId, rows: &RecordBatch) -> Option<Announced> {
        self.worker.announce_staged(table, rows)
    }

    async fn begin_load(
        &self,
        table: RelationId,
        id: StatementId,
        kind: LoadKind,
    ) -> Result<Load, SqlError> {
        Ok(self.worker.begin_load(table, id, kind).await?)
    }

    async fn apply_transaction(
        &self,
        id: StatementId,
        changes: Vec<(RelationId, DeltaChunk, DmlKind)>,
        read: ReadSet,
        entered: &EntryFlag,
    ) -> Result<DmlResult, SqlError> {
        result_of(self.worker.apply_transaction(id, changes, read, entered).await)
    }

    async fn lock_tables(&self, tables: &[RelationId]) -> Result<Option<TableLocks>, SqlError> {
        match self.worker.lock_tables(tables).await {
            Ok(locks) => Ok(Some(locks)),
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

fn step(follow: Follow) -> FollowStep {
    match follow {
        Follow::Change(epoch) => FollowStep::Change(epoch),
        Follow::Unchanged(epoch) => FollowStep::Unchanged(epoch),
    }
}

/// Rows as often as their multiplicity says.
fn counted(batches: BoxStream<'static, Result<ScanBatch, StorageError>>) -> BatchStream {
    batches.map(|b| b.map_err(SqlError::from).and_then(|b| repeat(b.values, &b.weights))).boxed()
}

/// A row of multiplicity n as n rows.
fn repeat(values: RecordBatch, weights: &Int64Array) -> Result<RecordBatch, SqlError> {
    if weights.values().iter().all(|w| *w == 1) {
        return Ok(values);
    }
    let indices: UInt32Array = weights
        .values()
        .iter()
        .enumerate()
        .flat_map(|(i, w)| std::iter::repeat_n(i as u32, usize::try_from(*w).unwrap_or(0)))
        .collect();
    if values.num_columns() == 0 {
        let options = RecordBatchOptions::new().with_row_count(Some(indices.len()));
        return RecordBatch::try_new_with_options(values.schema(), vec![], &options)
            .map_err(crate::dml::rows::arrow_error);
    }
    take_rows(&values, &indices).map_err(crate::dml::rows::arrow_error)
}

fn process_row(status: ProcessStatus) -> ProcessRow {
    let ProcessStatus { incarnation, process, applied } = status;
    let role = |role: ProcessRole| match role {
        ProcessRole::Unspecified => "unspecified",
        ProcessRole::Meta => "meta",
        ProcessRole::Frontend => "frontend",
        ProcessRole::Compute => "compute",
        ProcessRole::Compactor => "compactor",
    };
    let roles = process.registration.roles().map(role).collect();
    let (address, epoch) = (process.registration.address, process.epoch);
    ProcessRow { incarnation, roles, address, epoch, applied }
}
