//! A relation as a DataFusion table: scans of its snapshot at the statement's epoch.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arrow::array::{ArrayRef, BinaryArray, RecordBatch};
use arrow::datatypes::{Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::Result as DfResult;
use datafusion::error::DataFusionError;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::{
    BinaryExpr, Expr, Operator, TableProviderFilterPushDown, TableType,
};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::{PartitionStream, StreamingTableExec};
use datafusion::scalar::ScalarValue;
use futures::{StreamExt, TryStreamExt};
use millrace_common::hash::{hash_columns, vnodes};
use millrace_common::keys::KeyCodec;
use millrace_common::{Epoch, RelationId, SqlError};
use millrace_executor::dml::StagedTable;
use millrace_rpc::catalog::{Relation, RelationKind, RowStorage};

use super::engine::ExpressionErrors;
use super::index::{self, IndexRead};
use super::overlay::Overlay;
use super::scan_parts;
use crate::cluster::{Cluster, ScanRequest};
use crate::session::reads::{NotedReads, note_scan};

/// The epoch a statement reads at; filled once its relations are known.
pub type EpochCell = Arc<OnceLock<Epoch>>;

/// How long a read waits for an index to be exact at its epoch before it scans the relation.
const INDEX_WAIT: Duration = Duration::from_millis(500);

/// Scans a relation.
pub struct SnapshotTable {
    cluster: Arc<dyn Cluster>,
    relation: Arc<Relation>,
    schema: SchemaRef,
    epoch: EpochCell,
    /// What the session's block has written: it sees that instead of what is committed.
    staged: Option<Arc<StagedTable>>,
    reads: NotedReads,
}

impl fmt::Debug for SnapshotTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SnapshotTable({}.{})", self.relation.schema, self.relation.name)
    }
}

impl SnapshotTable {
    pub fn new(
        cluster: Arc<dyn Cluster>,
        relation: Arc<Relation>,
        epoch: EpochCell,
    ) -> Result<SnapshotTable, SqlError> {
        let schema = relation.arrow_schema()?;
        let reads = NotedReads::default();
        Ok(SnapshotTable { cluster, relation, schema, epoch, staged: None, reads })
    }

    pub fn with_staged(mut self, staged: Option<Arc<StagedTable>>) -> SnapshotTable {
        self.staged = staged;
        self
    }

    pub fn with_reads(mut self, reads: NotedReads) -> SnapshotTable {
        self.reads = reads;
        self
    }

    /// Rows have a storage key that literals can be encoded to.
    fn keyed(&self) -> bool {
        self.relation.storage == RowStorage::Keyed as i32
            && self.relation.kind != RelationKind::Source as i32
            && !self.relation.key.is_empty()
            && self.relation.distribution.iter().all(|d| self.relation.key.contains(d))
    }

    /// The index that a scan with these filters reads instead, if it is exact at the epoch.
    async fn usable_index(&self, columns: &[usize], filters: &[Expr]) -> Option<IndexRead> {
        let read = self.index_for(columns, filters)?;
        if let Some(epoch) = self.epoch.get() {
            let id = RelationId(read.index.id);
            if !self.cluster.exact_at(&[id], *epoch) {
                // It is asked for everything the statement's epoch can hold.
                self.cluster.read_epoch(&[id], INDEX_WAIT, true).await.ok()?;
                self.cluster.exact_at(&[id], *epoch).then_some(())?;
            }
        }
        Some(read)
    }

    fn index_for(&self, columns: &[usize], filters: &[Expr]) -> Option<IndexRead> {
        if self.point(filters).is_some() || self.staged.is_some() {
            return None;
        }
        index::choose(&self.cluster.catalog(), &self.relation, &self.schema, columns, filters)
    }

    /// What EXPLAIN says of a scan beyond its filters.
    pub fn access(&self, projection: Option<&Vec<usize>>, filters: &[Expr]) -> Option<String> {
        if self.point(filters).is_some() {
            return Some("point read".to_owned());
        }
        let columns = self.columns(projection);
        let read = self.index_for(&columns, filters)?;
        Some(format!("index={}", read.index.name))
    }

    /// Whether a scan with these filters is a read at one key.
    pub fn reads_one_key(&self, filters: &[Expr]) -> bool {
        self.point(filters).is_some()
    }

    fn columns(&self, projection: Option<&Vec<usize>>) -> Vec<usize> {
        projection.cloned().unwrap_or_else(|| (0..self.schema.fields().len()).collect())
    }

    /// The one storage key that conjuncts of equality on all key columns name.
    fn point(&self, filters: &[Expr]) -> Option<BinaryArray> {
        if !self.keyed() {
            return None;
        }
        let mut values: Vec<Option<ScalarValue>> = vec![None; self.relation.columns.len()];
        for filter in filters {
            self.collect_equalities(filter, &mut values);
        }
        let mut columns: Vec<Option<ArrayRef>> = vec![None; values.len()];
        for &k in &self.relation.key {
            let value = values.get_mut(k as usize)?.take()?;
            columns[k as usize] = Some(value.to_array_of_size(1).ok()?);
        }
        let batch: Vec<ArrayRef> = self
            .relation
            .key
            .iter()
            .map(|&k| columns[k as usize].clone())
            .collect::<Option<_>>()?;
        encode_keys(&self.relation, &batch).ok()
    }

    fn collect_equalities(&self, filter: &Expr, values: &mut [Option<ScalarValue>]) {
        let Expr::BinaryExpr(BinaryExpr { left, op, right }) = filter else { return };
        match op {
            Operator::And => {
                self.collect_equalities(left, values);
                self.collect_equalities(right, values);
            }
            Operator::Eq => {
                let (column, value) = match (left.as_ref(), right.as_ref()) {
                    (Expr::Column(c), Expr::Literal(v, _))
                    | (Expr::Literal(v, _), Expr::Column(c)) => (c, v),
                    _ => return,
                };
                let Ok(i) = self.schema.index_of(&column.name) else { return };
                if !value.is_null() && value.data_type() == *self.schema.field(i).data_type() {
                    values[i] = Some(value.clone());
                }
            }
            _ => {}
        }
    }
}

/// Storage keys of rows given by their key columns, in key order.
pub fn encode_keys(relation: &Relation, key_columns: &[ArrayRef]) -> Result<BinaryArray, SqlError> {
    let internal = |e: arrow::error::ArrowError| {
        SqlError::internal(format!("a key could not be encoded: {e}"))
    };
    let rows = key_columns.first().map_or(0, |c| c.len());
    let codec =
        KeyCodec::new(key_columns.iter().map(|c| c.data_type().clone())).map_err(internal)?;
    let distribution: Vec<ArrayRef> = relation
        .distribution
        .iter()
        .filter_map(|d| relation.key.iter().position(|k| k == d))
        .map(|i| key_columns[i].clone())
        .collect();
    let nodes = if relation.distribution.is_empty() {
        vec![0; rows]
    } else {
        vnodes(&hash_columns(&distribution, rows).map_err(internal)?)
    };
    codec.storage_keys(&nodes, key_columns).map_err(internal)
}

#[async_trait]
impl TableProvider for SnapshotTable {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    /// Point reads only narrow the scan; the filter stays in the plan.
    fn supports_filters_pushdown(
        &self,
        filters: &[&Expr],
    ) -> DfResult<Vec<TableProviderFilterPushDown>> {
        let indexed = index::indexes(&self.cluster.catalog(), self.relation.id).next().is_some();
        let kind = if indexed || self.keyed() {
            TableProviderFilterPushDown::Inexact
        } else {
            TableProviderFilterPushDown::Unsupported
        };
        Ok(vec![kind; filters.len()])
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> DfResult<Arc<dyn ExecutionPlan>> {
        let columns = self.columns(projection);
        let schema = Arc::new(self.schema.project(&columns)?);
        let keys = self.point(filters);
        let epoch = self.epoch.get().copied().unwrap_or_default();
        note_scan(
            &self.reads,
            (&self.relation, &self.schema),
            epoch,
            keys.as_ref(),
            filters,
            state,
        );
        // With filters above it a limit would cut before they ran.
        let limit = if filters.is_empty() { limit } else { None };
        let errors = state.config().get_extension::<ExpressionErrors>();
        let null_errors = errors.is_some_and(|e| *e == ExpressionErrors::Null);
        let of = |columns| ScanRequest { columns, limit, null_errors, ..ScanRequest::default() };
        let (relation, request) = match self.usable_index(&columns, filters).await {
            Some(IndexRead { index, columns, ranges, .. }) => {
                (index, ScanRequest { ranges: Some(ranges), ..of(columns) })
            }
            None => (self.relation.clone(), ScanRequest { keys, ..of(columns) }),
        };
        let mut request = request;
        let overlay = self.staged.clone().map(|staged| {
            // Rows of the snapshot that the block has written are left out: no limit before that, and
            // their keys are read with them.
            request.limit = None;
            Overlay::new(staged, &self.relation, &mut request)
        });
        let partition = Arc::new(SnapshotScan {
            cluster: self.cluster.clone(),
            relation,
            epoch: self.epoch.clone(),
            request,
            overlay,
            schema: schema.clone(),
        });
        Ok(Arc::new(StreamingTableExec::try_new(
            schema,
            vec![partition],
            None,
            vec![],
            false,
            limit,
        )?))
    }
}

struct SnapshotScan {
    cluster: Arc<dyn Cluster>,
    relation: Arc<Relation>,
    epoch: EpochCell,
    request: ScanRequest,
    overlay: Option<Overlay>,
    schema: SchemaRef,
}

impl fmt::Debug for SnapshotScan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match (&self.request.keys, &self.request.ranges) {
            (Some(_), _) => "point read",
            (None, Some(_)) => "range scan",
            (None, None) => "scan",
        };
        write!(f, "{how} of {}.{}", self.relation.schema, self.relation.name)
    }
}

impl PartitionStream for SnapshotScan {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, context: Arc<TaskContext>) -> SendableRecordBatchStream {
        let (cluster, relation) = (self.cluster.clone(), self.relation.clone());
        let (request, epoch) = (self.request.clone(), self.epoch.get().copied());
        let schema = self.schema.clone();
        let overlay = self.overlay.clone();
        let ahead = context.session_config().target_partitions();
        let open = async move {
            let epoch = epoch
                .ok_or_else(|| SqlError::internal("a scan ran before its epoch was chosen"))
                .map_err(external)?;
            let keys = request.keys.clone();
            let parts = cluster.scan_parts(&relation, epoch, request).await.map_err(external)?;
            let mut batches = scan_parts::in_order(parts, ahead);
            if let Some(overlay) = overlay {
                let own = overlay.rows(keys.as_ref()).map_err(external)?;
                let rest = batches.map(move |b| overlay.unwritten(&relation, &b?));
                batches = futures::stream::iter([Ok(own)]).chain(rest).boxed();
            }
            Ok::<_, DataFusionError>(
                batches.map(move |b| b.map_err(external).and_then(|b| conform(&schema, &b))),
            )
        };
        let stream = futures::stream::once(open).try_flatten();
        Box::pin(RecordBatchStreamAdapter::new(self.schema.clone(), stream))
    }
}

pub fn external(e: SqlError) -> DataFusionError {
    DataFusionError::External(Box::new(e))
}

/// The same columns under the names and nullability the plan knows.
fn conform(schema: &SchemaRef, batch: &RecordBatch) -> DfResult<RecordBatch> {
    let options = arrow::array::RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    let relaxed = Arc::new(Schema::new(
        schema.fields().iter().map(|f| f.as_ref().clone()).collect::<Vec<_>>(),
    ));
    Ok(RecordBatch::try_new_with_options(relaxed, batch.columns().to_vec(), &options)?)
}
