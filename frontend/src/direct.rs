//! [`Cluster`] by direct calls: meta, worker and store in this process.

use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{BinaryArray, Int64Array, RecordBatch, RecordBatchOptions, UInt32Array};
use arrow::compute::take_record_batch;
use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError, SqlState, TableId};
use millrace_executor::Worker;
use millrace_executor::dml::{DmlError, DmlOutcome, DmlStatement};
use millrace_meta::{Catalog, CreateOptions, JobState, Meta};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::services::MetaService;
use millrace_rpc::version::StatementId;
use millrace_storage::{ScanOptions, Snapshot, StateStore};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::cluster::{
    BatchStream, CatalogSnapshot, Cluster, DmlKind, DmlResult, ExpressionError, JobRow, ScanRequest,
};

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
        let job = self.store.job(RelationId(relation.id)).ok_or_else(|| {
            SqlError::new(
                SqlState::CANNOT_CONNECT_NOW,
                format!("relation \"{}\" is not being served", relation.name),
            )
            .with_hint("SHOW JOBS tells why; the job is retried.")
        })?;
        job.snapshot(epoch).map_err(SqlError::from)
    }

    fn scan_source(
        &self,
        relation: &Relation,
        epoch: Epoch,
        request: ScanRequest,
    ) -> Result<BatchStream, SqlError> {
        let source = millrace_connector::create_source(relation)?;
        let offsets = self.meta.source_offsets(RelationId(relation.id), epoch);
        let columns = request.columns;
        let splits = futures::stream::iter(offsets.into_iter().map(move |(split, until)| {
            let reader = source.reader(split, 0, &columns).map_err(SqlError::from);
            futures::stream::unfold(Some((reader, until)), |state| async move {
                let (reader, until) = state?;
                let mut reader = match reader {
                    Ok(reader) => reader,
                    Err(e) => return Some((Err(e), None)),
                };
                match reader.read(until, SOURCE_BATCH).await {
                    Ok(Some((batch, _))) => Some((Ok(batch), Some((Ok(reader), until)))),
                    Ok(None) => None,
                    Err(e) => Some((Err(SqlError::from(e)), None)),
                }
            })
        }));
        Ok(splits.flatten().boxed())
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
        let snapshot = Arc::new(CatalogSnapshot::new(schemas, relations));
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

    fn jobs(&self) -> Vec<JobRow> {
        self.meta
            .job_statuses()
            .into_iter()
            .map(|s| {
                let progress = match &s.state {
                    JobState::Running => None,
                    JobState::Failed { .. } if s.frontier.is_some() => None,
                    state => Some(state.progress_percent().map_or("0%".to_owned(), |p| format!("{p}%"))),
                };
                let reason = match &s.state {
                    JobState::Failed { reason, .. } => Some(reason.clone()),
                    JobState::WaitingForInputs { .. } => Some("an input is still being created".to_owned()),
                    _ => s.stalled.map(|d| {
                        format!(
                            "its tasks have been at one epoch for {} s; the object store may not answer",
                            d.as_secs()
                        )
                    }),
                };
                let word = if s.stalled.is_some() { "stalled" } else { s.state.name() };
                let details = vec![
                    format!("Rows: {}", s.row_count),
                    format!("Commits: {}", s.counters.commits),
                    format!("Restarts: {}", s.counters.restarts),
                    format!("Barrier p50: {:?}, p99: {:?}", s.counters.barrier_p50, s.counters.barrier_p99),
                ];
                JobRow {
                    relation: s.relation.0,
                    state: word.to_owned(),
                    progress,
                    reason,
                    epoch: s.epoch.0,
                    lag_ms: Some(s.lag_ms),
                    details,
                }
            })
            .collect()
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
        Ok(batches
            .map(|b| b.map_err(SqlError::from).and_then(|b| repeat(b.values, &b.weights)))
            .boxed())
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

    async fn apply_dml(
        &self,
        table: RelationId,
        id: StatementId,
        delta: DeltaChunk,
        kind: DmlKind,
    ) -> Result<DmlResult, SqlError> {
        let statement = DmlStatement { id, delta, kind: kind.into() };
        result_of(self.worker.apply_dml(table, statement).await)
    }

    async fn apply_transaction(
        &self,
        id: StatementId,
        changes: Vec<(RelationId, DeltaChunk, DmlKind)>,
    ) -> Result<DmlResult, SqlError> {
        let parts =
            changes.into_iter().map(|(table, delta, kind)| (table, delta, kind.into())).collect();
        result_of(self.worker.apply_transaction(id, parts).await)
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
        Ok(outcome) => Ok(DmlResult::Applied { rows: outcome.rows_affected }),
        Err(DmlError::Conflict) => Ok(DmlResult::Conflict),
        Err(e) => Err(e.into()),
    }
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
    take_record_batch(&values, &indices).map_err(crate::dml::rows::arrow_error)
}
