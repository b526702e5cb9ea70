//! Reads of committed state: small ones of the process that the job runs on, where it answers ([`owners`]), and all others
//! of the versions that the log names, through the followers of their jobs.
//!
//! A read that was too slow finds an object of its version gone: then a newer version has taken its place, which holds
//! the same content at the read's epoch. The log is followed further, and the read goes on where it was, unless the log
//! has fenced this process.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{BinaryArray, RecordBatch, UInt32Array};
use arrow::compute::concat_batches;
use arrow::datatypes::SchemaRef;
use futures::StreamExt;
use futures::stream;
use millrace_common::{
    EnvHandle, Epoch, Generation, RelationId, SqlError, SqlState, TableId, VNODE_COUNT, Vnode,
};
use millrace_executor::ExecError;
use millrace_executor::worker::rows_table;
use millrace_meta::{LogFollower, ReadLease};
use millrace_rpc::catalog::Relation;
use millrace_rpc::read::{FoundRows, ReadRequest, WantedRows};
use millrace_storage::{FollowedJob, FollowedVersion, Snapshot, StorageError, VersionFollower};
use tokio::time::{Instant, timeout_at};

use super::owners::{self, Owners, Why};
use super::{RemoteCluster, TableRoutes};
use crate::cluster::snapshot::{self, Rows};
use crate::cluster::source_scan::SourceAt;
use crate::cluster::{BatchStream, ChangeStream, ScanRequest};

/// Between looks at a log that has nothing newer yet.
const PAUSE: Duration = Duration::from_millis(20);

impl RemoteCluster {
    /// What the log says of a source.
    pub(super) fn source_at(&self, relation: &Relation, epoch: Epoch) -> SourceAt {
        let id = RelationId(relation.id);
        self.log.read(|state| SourceAt {
            offsets: state.source_offsets(id, epoch),
            parts: state.source_parts(id),
            marks: state.source_marks(id, epoch),
        })
    }

    /// What reads a relation at an epoch.
    pub(super) fn reader(&self, relation: &Relation, epoch: Epoch) -> Reader {
        let settings = self.cluster_settings();
        Reader(Arc::new(Shared {
            log: Arc::clone(&self.log),
            versions: Arc::clone(&self.versions),
            routes: Arc::clone(&self.routes),
            owners: Arc::clone(&self.owners),
            env: self.env.clone(),
            lease: self.lease.clone(),
            relation: relation.clone(),
            epoch,
            patience: settings.read_wait_timeout,
            from_owner: settings.read_from_owner,
        }))
    }
}

/// Reads one relation at one epoch.
#[derive(Clone)]
pub(super) struct Reader(Arc<Shared>);

struct Shared {
    log: Arc<LogFollower>,
    versions: Arc<VersionFollower>,
    routes: Arc<dyn TableRoutes>,
    owners: Arc<Owners>,
    env: EnvHandle,
    lease: Option<Arc<ReadLease>>,
    relation: Relation,
    epoch: Epoch,
    /// For how long a version is looked for whose objects are there.
    patience: Duration,
    /// Small reads are sent to the process that the job runs on.
    from_owner: bool,
}

impl Reader {
    pub(super) async fn scan(&self, request: ScanRequest) -> Result<BatchStream, SqlError> {
        self.check_lease().await?;
        if let Some(rows) = self.scan_at_owner(&request).await {
            return Ok(rows);
        }
        let mut deadline = None;
        if snapshot::is_whole(&request) {
            let snapshot = self.snapshot(&mut deadline).await?;
            return Ok(self.part(&snapshot, request.columns, 0..VNODE_COUNT as Vnode));
        }
        // Its ranges are read beside each other, in no order: it can begin again until something was seen of it.
        loop {
            let snapshot = self.snapshot(&mut deadline).await?;
            match begun(snapshot, &self.0.relation, request.clone()).await {
                Err(StorageError::Superseded { object }) => {
                    self.newer(&mut deadline, object).await?;
                }
                rows => return Ok(rows?),
            }
        }
    }

    pub(super) async fn scan_parts(
        &self,
        request: ScanRequest,
    ) -> Result<Vec<BatchStream>, SqlError> {
        if !snapshot::is_whole(&request) {
            return Ok(vec![self.scan(request).await?]);
        }
        self.0.owners.ways.note_follower(Why::Scan);
        let snapshot = self.snapshot(&mut None).await?;
        let parts = snapshot::parts(&snapshot, &self.0.relation)?;
        let part = |vnodes| self.part(&snapshot, request.columns.clone(), vnodes);
        Ok(parts.into_iter().map(part).collect())
    }

    pub(super) async fn multi_get(
        &self,
        keys: BinaryArray,
    ) -> Result<(UInt32Array, RecordBatch), SqlError> {
        self.check_lease().await?;
        if let Some(found) = self.get_at_owner(&keys).await {
            return Ok(found);
        }
        let table = TableId(self.0.relation.first_table_id);
        let mut deadline = None;
        loop {
            let snapshot = self.snapshot(&mut deadline).await?;
            match snapshot.multi_get(table, keys.clone()).await {
                Err(StorageError::Superseded { object }) => {
                    self.newer(&mut deadline, object).await?;
                }
                found => return Ok(found.map(|found| (found.input, found.values))?),
            }
        }
    }

    /// The net change after the epoch through `to`.
    pub(super) async fn changes(&self, to: Epoch) -> Result<ChangeStream, SqlError> {
        let table = TableId(self.0.relation.first_table_id);
        let mut deadline = None;
        loop {
            let job = self.job(&mut deadline).await?;
            let mut changes = job.changes(table, self.0.epoch, to, 0..VNODE_COUNT as Vnode);
            match changes.next().await {
                Some(Err(StorageError::Superseded { object })) => {
                    self.newer(&mut deadline, object).await?;
                }
                None => return Ok(stream::empty().boxed()),
                Some(first) => {
                    let first = stream::iter([first]);
                    return Ok(first.chain(changes).map(|c| c.map_err(SqlError::from)).boxed());
                }
            }
        }
    }

    /// The rows of a small scan, from the process that the job runs on. `None`: they are to be read from log and bucket.
    async fn scan_at_owner(&self, request: &ScanRequest) -> Option<BatchStream> {
        let limit = request.limit.map(|limit| limit as u64);
        let rows = async {
            let schema = self.schema(&request.columns)?;
            let wanted = owners::small(request);
            let found = self.ask_owner(&request.columns, wanted, limit).await?;
            owners::batches(&schema, found.chunks).map_err(|_| Why::Failed)
        };
        let batches = self.counted(rows.await)?;
        Some(stream::iter(batches.into_iter().map(Ok)).boxed())
    }

    /// The same for rows at some keys: positions in these, ascending, and all columns.
    async fn get_at_owner(&self, keys: &BinaryArray) -> Option<(UInt32Array, RecordBatch)> {
        let rows = async {
            let columns: Vec<usize> = (0..self.0.relation.columns.len()).collect();
            let schema = self.schema(&columns)?;
            let found = self.ask_owner(&columns, owners::few_keys(keys), None).await?;
            let batches = owners::batches(&schema, found.chunks).map_err(|_| Why::Failed)?;
            let rows = concat_batches(&schema, &batches).map_err(|_| Why::Failed)?;
            Ok((UInt32Array::from(found.positions), rows))
        };
        self.counted(rows.await)
    }

    /// Some columns of the relation, as its rows have them.
    fn schema(&self, columns: &[usize]) -> Result<SchemaRef, Why> {
        let all = self.0.relation.arrow_schema().map_err(|_| Why::Failed)?;
        all.project(columns).map(Arc::new).map_err(|_| Why::Failed)
    }

    /// What the process that the job runs on answers, if it may be an answer. `wanted`: `None` if that is much.
    async fn ask_owner(
        &self,
        columns: &[usize],
        wanted: Option<WantedRows>,
        limit: Option<u64>,
    ) -> Result<FoundRows, Why> {
        let Shared { log, routes, owners, relation, epoch, from_owner, .. } = self.0.as_ref();
        let rows = wanted.ok_or(Why::Scan)?;
        if !from_owner {
            return Err(Why::Off);
        }
        let job = RelationId(relation.id);
        // The generation and the commits of one record, however far the log has come when the process is looked for: it
        // refuses what does not fit.
        let at = log.read(|state| {
            let version = &state.jobs.get(&job)?.version;
            Some((Generation(version.generation), version.commits))
        });
        let (generation, commits) = at.ok_or(Why::NoOwner)?;
        let process = routes.process_of(job).map_err(|_| Why::NoOwner)?;
        let keys = match &rows {
            WantedRows::Keys(keys) => Some(keys.len()),
            WantedRows::Ranges(_) | WantedRows::Any => None,
        };
        let request = ReadRequest {
            job,
            generation,
            commits,
            epoch: *epoch,
            table: TableId(relation.first_table_id),
            columns: columns.iter().map(|column| *column as u32).collect(),
            rows,
            limit,
            max_bytes: owners::MOST_BYTES,
        };
        let found = owners.ask(process.incarnation, &process.reads, request).await?;
        owners::may_answer(&found, keys).then_some(found).ok_or(Why::Failed)
    }

    /// Counts a read by its way.
    fn counted<T>(&self, rows: Result<T, Why>) -> Option<T> {
        let ways = &self.0.owners.ways;
        match &rows {
            Ok(_) => ways.note_owner(),
            Err(why) => ways.note_follower(*why),
        }
        rows.ok()
    }

    /// A process that may have been fenced asks the log first: what it reads is not kept for it any more, and it is to end.
    async fn check_lease(&self) -> Result<(), SqlError> {
        let Shared { lease, patience, .. } = self.0.as_ref();
        if let Some(lease) = lease {
            lease.check(*patience).await?;
        }
        Ok(())
    }

    /// The newest version of the job that is known here.
    async fn job(&self, deadline: &mut Option<Instant>) -> Result<Arc<FollowedJob>, SqlError> {
        let Shared { log, versions, relation, .. } = self.0.as_ref();
        self.check_lease().await?;
        let id = RelationId(relation.id);
        let rows = rows_table(relation).map_err(ExecError::into_sql)?;
        loop {
            let at = log.read(|state| {
                let job = state.jobs.get(&id)?;
                let (version, horizon) = (Arc::clone(&job.version), job.horizon);
                Some(FollowedVersion { record: state.number, version, horizon })
            });
            let at = at.ok_or_else(|| gone(relation))?;
            match versions.advance(id, at, || vec![rows.clone()]).await {
                Ok(job) => return Ok(job),
                Err(StorageError::Superseded { object }) => self.newer(deadline, object).await?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn snapshot(&self, deadline: &mut Option<Instant>) -> Result<Snapshot, SqlError> {
        Ok(self.job(deadline).await?.snapshot(self.0.epoch)?)
    }

    /// Follows the log further, because an object of the version that is known is gone. `deadline`: by when a version is
    /// to be found whose objects are there; set by the first call.
    async fn newer(&self, deadline: &mut Option<Instant>, object: String) -> Result<(), SqlError> {
        let Shared { log, env, patience, .. } = self.0.as_ref();
        let deadline = *deadline.get_or_insert_with(|| env.now() + *patience);
        let known = log.number();
        let late = || SqlError::from(StorageError::Superseded { object: object.clone() });
        loop {
            let number = timeout_at(deadline, log.catch_up()).await.map_err(|_| late())??;
            if number > known {
                return Ok(());
            }
            if env.now() + PAUSE >= deadline {
                return Err(late());
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// The rows under some vnodes, in the order of their keys. Where an object is gone on the way, the rest is
    /// read of a newer version: at one epoch all versions have the same rows, in the same order.
    fn part(&self, snapshot: &Snapshot, columns: Vec<usize>, vnodes: Range<Vnode>) -> BatchStream {
        let rows = snapshot::part(snapshot, &self.0.relation, &columns, vnodes.clone());
        let scan = PartScan { reader: self.clone(), columns, vnodes, rows, seen: 0, skip: 0 };
        stream::try_unfold(scan, PartScan::next).boxed()
    }
}

/// A scan of a part that can be begun again.
struct PartScan {
    reader: Reader,
    columns: Vec<usize>,
    vnodes: Range<Vnode>,
    rows: Rows,
    /// Rows that were handed out.
    seen: usize,
    /// Of those, how many are still to come once more.
    skip: usize,
}

impl PartScan {
    async fn next(mut self) -> Result<Option<(RecordBatch, PartScan)>, SqlError> {
        let mut deadline = None;
        loop {
            let batch = match self.rows.next().await {
                None => return Ok(None),
                Some(Ok(batch)) => batch,
                Some(Err(StorageError::Superseded { object })) => {
                    self.reader.newer(&mut deadline, object).await?;
                    let snapshot = self.reader.snapshot(&mut deadline).await?;
                    let (relation, vnodes) = (&self.reader.0.relation, self.vnodes.clone());
                    self.rows = snapshot::part(&snapshot, relation, &self.columns, vnodes);
                    self.skip = self.seen;
                    continue;
                }
                Some(Err(error)) => return Err(error.into()),
            };
            let again = self.skip.min(batch.num_rows());
            self.skip -= again;
            let batch = batch.slice(again, batch.num_rows() - again);
            if batch.num_rows() > 0 {
                self.seen += batch.num_rows();
                return Ok(Some((batch, self)));
            }
        }
    }
}

/// A scan that has brought its first batch.
async fn begun(
    snapshot: Snapshot,
    relation: &Relation,
    request: ScanRequest,
) -> Result<BatchStream, StorageError> {
    let mut rows = snapshot::scan(&snapshot, relation, request).await?;
    let first = rows.next().await.transpose()?;
    Ok(snapshot::told(stream::iter(first.map(Ok)).chain(rows).boxed()))
}

fn gone(relation: &Relation) -> SqlError {
    let message = format!("relation \"{}\" does not exist", relation.name);
    SqlError::new(SqlState::UNDEFINED_TABLE, message)
}
