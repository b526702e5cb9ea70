//! What a frontend needs of the rest of the system, as one trait.
//!
//! Purpose: sessions, DDL, DML and batch queries are written against [`Cluster`] and know neither
//! meta, worker nor store. The process serves it by direct calls ([`crate::direct`]); tests serve it
//! from memory; a cluster will serve it over the network.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{BinaryArray, RecordBatch, UInt32Array};
use async_trait::async_trait;
use futures::stream::BoxStream;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError};
use millrace_rpc::catalog::Relation;
use millrace_rpc::version::StatementId;
use tokio_util::sync::CancellationToken;

/// An immutable copy of the catalog.
#[derive(Debug, Default)]
pub struct CatalogSnapshot {
    pub schemas: Vec<String>,
    relations: Vec<Arc<Relation>>,
    by_name: HashMap<(String, String), usize>,
    by_id: HashMap<u32, usize>,
}

impl CatalogSnapshot {
    pub fn new(schemas: Vec<String>, mut relations: Vec<Arc<Relation>>) -> CatalogSnapshot {
        relations.sort_by_key(|r| r.id);
        let by_name = relations
            .iter()
            .enumerate()
            .map(|(i, r)| ((r.schema.clone(), r.name.clone()), i))
            .collect();
        let by_id = relations.iter().enumerate().map(|(i, r)| (r.id, i)).collect();
        CatalogSnapshot { schemas, relations, by_name, by_id }
    }

    /// All relations, by ascending id.
    pub fn relations(&self) -> &[Arc<Relation>] {
        &self.relations
    }

    pub fn get(&self, schema: &str, name: &str) -> Option<&Arc<Relation>> {
        self.by_name.get(&(schema.to_owned(), name.to_owned())).map(|i| &self.relations[*i])
    }

    pub fn by_id(&self, id: u32) -> Option<&Arc<Relation>> {
        self.by_id.get(&id).map(|i| &self.relations[*i])
    }

    /// Relations that read `id` or belong to it, directly.
    pub fn dependants(&self, id: u32) -> impl Iterator<Item = &Arc<Relation>> {
        self.relations.iter().filter(move |r| r.depends_on.contains(&id))
    }
}

/// What a scan reads.
#[derive(Clone, Debug, Default)]
pub struct ScanRequest {
    /// Positions in [`Relation::columns`].
    pub columns: Vec<usize>,
    /// Stop after about this many rows.
    pub limit: Option<usize>,
    /// Storage keys, when only these rows are wanted (relations stored by key).
    pub keys: Option<BinaryArray>,
    /// Ranges of storage keys, when only rows in them are wanted.
    pub ranges: Option<Vec<KeyBounds>>,
}

/// Storage keys from one (inclusive) to another (exclusive).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyBounds {
    pub from: Vec<u8>,
    pub until: Vec<u8>,
}

pub type BatchStream = BoxStream<'static, Result<RecordBatch, SqlError>>;

/// What a statement does to a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmlKind {
    /// An existing key is an error.
    Insert,
    /// Rows whose key exists are left out.
    InsertOrIgnore,
    /// Rows whose key exists replace the old row.
    InsertOrOverwrite,
    /// Old rows −1, new rows +1; old rows must still be as given.
    Change,
    /// As `Change`, but a new row whose key has come to exist since is a conflict.
    Upsert,
}

impl From<DmlKind> for millrace_executor::dml::DmlKind {
    fn from(kind: DmlKind) -> Self {
        use millrace_executor::dml::{DmlKind as Worker, InsertConflict};
        let insert = |on_conflict| Worker::Insert { on_conflict };
        match kind {
            DmlKind::Insert => insert(InsertConflict::Error),
            DmlKind::InsertOrIgnore => insert(InsertConflict::Nothing),
            DmlKind::InsertOrOverwrite => insert(InsertConflict::Overwrite),
            DmlKind::Change => Worker::Change,
            DmlKind::Upsert => Worker::Upsert,
        }
    }
}

/// What came of a statement.
#[derive(Debug)]
pub enum DmlResult {
    Applied {
        rows: u64,
    },
    /// The rows it was evaluated on have changed: evaluate it again.
    Conflict,
}

/// One line of SHOW JOBS.
#[derive(Clone, Debug, Default)]
pub struct JobRow {
    pub relation: u32,
    pub state: String,
    pub progress: Option<String>,
    pub reason: Option<String>,
    pub epoch: u64,
    pub lag_ms: Option<u64>,
    /// Further lines for EXPLAIN ANALYZE.
    pub details: Vec<String>,
}

/// A line of `millrace_catalog.errors`: failures of one expression of a view with one SQLSTATE.
#[derive(Clone, Debug)]
pub struct ExpressionError {
    pub place: String,
    pub sqlstate: &'static str,
    pub count: u64,
    /// The first messages.
    pub samples: Vec<String>,
}

#[async_trait]
pub trait Cluster: Send + Sync + 'static {
    fn catalog(&self) -> Arc<CatalogSnapshot>;

    /// Durable when it returns; the job starts by itself.
    async fn create_relation(
        &self,
        relation: Relation,
        table_count: u32,
        or_replace: bool,
    ) -> Result<RelationId, SqlError>;
    async fn drop_relations(&self, ids: Vec<RelationId>) -> Result<(), SqlError>;
    async fn create_schema(&self, name: &str) -> Result<(), SqlError>;
    async fn drop_schema(&self, name: &str) -> Result<(), SqlError>;

    /// Returns when the relation is readable, or has failed.
    async fn wait_created(&self, id: RelationId, cancel: CancellationToken)
    -> Result<(), SqlError>;
    /// One epoch at which all are exact; `fresh`: nothing acknowledged before is missing.
    async fn read_epoch(
        &self,
        ids: &[RelationId],
        timeout: Duration,
        fresh: bool,
    ) -> Result<Epoch, SqlError>;
    async fn flush(&self) -> Result<(), SqlError>;
    /// The stored value of a setting that the cluster keeps.
    fn setting(&self, name: &str) -> Option<String>;
    /// Changes it for everybody; `None`: back to the default.
    async fn set_setting(&self, name: &str, value: Option<&str>) -> Result<(), SqlError>;
    fn jobs(&self) -> Vec<JobRow>;
    /// Expressions of a running job that failed on rows: their values are NULL.
    fn expression_errors(&self, id: RelationId) -> Vec<ExpressionError>;

    /// Rows of a relation at an epoch; a row of multiplicity n comes n times.
    async fn scan(
        &self,
        relation: &Relation,
        epoch: Epoch,
        request: ScanRequest,
    ) -> Result<BatchStream, SqlError>;
    /// Rows of a keyed relation by storage key: positions in `keys`, ascending, and all columns.
    async fn multi_get(
        &self,
        relation: &Relation,
        epoch: Epoch,
        keys: BinaryArray,
    ) -> Result<(UInt32Array, RecordBatch), SqlError>;

    async fn apply_dml(
        &self,
        table: RelationId,
        id: StatementId,
        delta: DeltaChunk,
        kind: DmlKind,
    ) -> Result<DmlResult, SqlError>;
    /// Net changes of several tables at one epoch, or none of them.
    async fn apply_transaction(
        &self,
        id: StatementId,
        changes: Vec<(RelationId, DeltaChunk, DmlKind)>,
    ) -> Result<DmlResult, SqlError>;
    /// Whether all of these are exact, and readable, at an epoch.
    fn exact_at(&self, ids: &[RelationId], epoch: Epoch) -> bool;
    /// The first of `n` new row ids.
    async fn allocate_row_ids(&self, table: RelationId, n: u64) -> Result<u64, SqlError>;
}
