//! Services that note what arrives and answer with what a test can tell, and the ways to call them.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use async_trait::async_trait;
use futures::stream::{self, StreamExt};
use millrace_common::error::ErrorObject;
use millrace_common::{DeltaChunk, Epoch, Generation, JobId, RelationId, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::{
    DefineAnswer, DefineRequest, Definition, GiveBackLocksRequest, Heartbeat, JobReports,
    ListedLock, MetaControl, ReadEpoch, RecordStream, SessionsAnswer, SessionsTold, SessionsWanted,
    TakeLockAnswer, TakeLockRequest,
};
use millrace_rpc::dml::{
    DmlAnswer, DmlKind, DmlService, EntryFlag, HeldLocks, LoadKind, LoadService, ReadSet,
    TableChange,
};
use millrace_rpc::log::{MoveParts, RegisterProcess};
use millrace_rpc::loopback::Encoded;
use millrace_rpc::operator::{
    BackupList, BackupOverview, ClusterOverview, CollectionReport, JobVersions, OperatorService,
    PlacedJobs,
};
use millrace_rpc::read::{FoundRows, ReadAnswer, ReadRefusal, ReadRequest, ReadService};
use millrace_rpc::remote::{
    Admission, CallLimits, Identity, Peer, RemoteCompactor, RemoteCompute, RemoteDml, RemoteMeta,
    RemoteReads, Server,
};
use millrace_rpc::services::{
    CompactionTask, CompactorService, ComputeService, Cut, LivePart, RunningJob, StartJob,
};
use millrace_rpc::source_poll::{More, PollSource, Polled};
use millrace_rpc::stream::{Acknowledged, StreamError, StreamMessage};
use millrace_rpc::version::{JobCommit, PublishHandle, StatementId, VersionEdit};
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};

use crate::filled;

/// No wait of a test lasts longer.
pub const LIMIT: Duration = Duration::from_secs(30);

/// All services. A job or table with this number never answers.
pub const STUCK: RelationId = RelationId(999);
/// One with this number answers with [`error`].
pub const FAILING: RelationId = RelationId(666);

pub struct Fake {
    seen: watch::Sender<Vec<String>>,
    /// Calls that never answer, and locks, that were dropped.
    pub dropped: Arc<watch::Sender<usize>>,
    /// Lets statements that have entered end.
    pub finish: Notify,
}

impl Default for Fake {
    fn default() -> Fake {
        let (seen, dropped) = (watch::channel(Vec::new()).0, Arc::new(watch::channel(0).0));
        Fake { seen, dropped, finish: Notify::new() }
    }
}

/// An error in which everything is set.
pub fn error() -> SqlError {
    let object = ErrorObject {
        schema: "public".into(),
        table: "t".into(),
        column: Some("c".into()),
        constraint: Some("t_pkey".into()),
    };
    let mut error = SqlError::new(SqlState::UNIQUE_VIOLATION, "a key exists – twice")
        .with_detail("d".repeat(20_000))
        .with_hint("h")
        .with_position(7)
        .with_object(object)
        .with_routine("routine")
        .with_context("context");
    error.after = Some((3, 4));
    error.row = Some(5);
    error
}

struct CountDrop(Arc<watch::Sender<usize>>);

impl Drop for CountDrop {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n += 1);
    }
}

impl Fake {
    fn note(&self, what: impl std::fmt::Debug) {
        self.seen.send_modify(|seen| seen.push(format!("{what:?}")));
    }

    /// What has arrived since this was last asked.
    pub fn seen(&self) -> Vec<String> {
        self.seen.send_replace(Vec::new())
    }

    /// Completes when something has arrived.
    pub async fn arrived(&self) {
        let mut seen = self.seen.subscribe();
        tokio::time::timeout(LIMIT, seen.wait_for(|s| !s.is_empty())).await.unwrap().unwrap();
    }

    /// Completes when a call that never answers has been dropped, or locks.
    pub async fn was_dropped(&self) {
        let mut dropped = self.dropped.subscribe();
        tokio::time::timeout(LIMIT, dropped.wait_for(|n| *n > 0)).await.unwrap().unwrap();
    }

    async fn answer(&self, id: RelationId) -> Result<(), SqlError> {
        if id == STUCK {
            let _counted = CountDrop(Arc::clone(&self.dropped));
            std::future::pending::<()>().await;
        }
        if id == FAILING { Err(error()) } else { Ok(()) }
    }
}

/// What there is of a source as of a record: everything is set, and whether there is more differs from record to record.
pub fn polled(record: u64) -> Polled {
    Polled {
        splits: filled::all("millrace.log.SourceSplit"),
        files: vec![filled::one("millrace.log.SourceFile"); 2],
        available: vec![(0, u64::MAX), (1 << 31, 5)],
        more: match record % 3 {
            0 => More::Never,
            1 => More::WithTime,
            _ => More::After(Duration::from_nanos(1_000_000_001)),
        },
        trouble: (record > 0).then(|| SqlError::new(SqlState::IO_ERROR, "a file is missing")),
        offsets_per_row: 64,
    }
}

#[async_trait]
impl ComputeService for Fake {
    async fn start_job(&self, start: StartJob) -> Result<(), SqlError> {
        self.note(start);
        Ok(())
    }

    async fn adopt_job(
        &self,
        job: JobId,
        generation: Generation,
        record: u64,
        after: u64,
    ) -> Result<Option<RunningJob>, SqlError> {
        self.note((job, generation, record, after));
        self.answer(job).await?;
        let running = || RunningJob {
            number: record + 1,
            horizon: Epoch(record + 2),
            sealed: vec![filled::one("millrace.version.JobCommit"); 2],
            is_cutting: true,
        };
        Ok((record > 0).then(running))
    }

    async fn cut(
        &self,
        job: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<JobCommit, SqlError> {
        self.note((job, generation, cut));
        self.answer(job).await?;
        Ok(filled::one("millrace.version.JobCommit"))
    }

    async fn apply_records(&self, message: StreamMessage) -> Result<Acknowledged, StreamError> {
        if message.records.is_empty() {
            return Err(StreamError::Gap { next: 4 });
        }
        self.note(message);
        Ok(Acknowledged { received: 9, behind: vec![(RelationId(3), 8)] })
    }

    async fn applied_since(&self, known: Acknowledged) -> Acknowledged {
        Acknowledged { received: known.received + 1, ..known }
    }

    async fn prepare_edit(&self, job: JobId, generation: Generation, edit: VersionEdit) {
        self.note((job, generation, edit));
    }

    async fn abort_epoch(&self, job: JobId, generation: Generation, error: SqlError) {
        self.note((job, generation, error));
    }

    async fn publish(
        &self,
        job: JobId,
        generation: Generation,
        handles: Vec<PublishHandle>,
    ) -> Result<(), SqlError> {
        self.note((job, generation, handles));
        Ok(())
    }

    async fn stop_job(&self, job: JobId, generation: Generation) {
        self.note((job, generation));
    }

    async fn poll_source(&self, poll: PollSource) -> Result<Polled, SqlError> {
        let (source, record) = (poll.source, poll.record);
        self.note(poll);
        self.answer(source).await?;
        Ok(polled(record))
    }
}

#[async_trait]
impl CompactorService for Fake {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError> {
        self.note(task);
        Ok(filled::one("millrace.version.VersionEdit"))
    }

    async fn copy_parts(&self, parts: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        self.note(parts);
        Ok(filled::one("millrace.log.MoveParts"))
    }
}

#[async_trait]
impl MetaControl for Fake {
    async fn register_process(&self, process: RegisterProcess) -> Result<u64, CallError> {
        self.note(process);
        Ok(41)
    }

    async fn follow(&self, from: u64) -> Result<RecordStream, CallError> {
        let message =
            StreamMessage { horizons: vec![(RelationId(2), Epoch(from))], records: vec![] };
        Ok(stream::iter([Ok(message), Err(CallError::Gap { next: 8 })]).boxed())
    }

    async fn request_cut(&self, job: JobId) -> Result<(), CallError> {
        self.note(("cut", job));
        Ok(())
    }

    async fn request_compaction(&self, job: JobId) -> Result<(), CallError> {
        self.note(("compaction", job));
        Ok(())
    }

    async fn commit_edit(
        &self,
        job: JobId,
        generation: Generation,
        edit: VersionEdit,
    ) -> Result<bool, CallError> {
        self.note((job, generation, edit));
        Ok(true)
    }

    async fn report_failure(
        &self,
        job: JobId,
        generation: Generation,
        error: SqlError,
    ) -> Result<(), CallError> {
        self.note((job, generation, error));
        Ok(())
    }

    async fn beat(&self, heartbeat: Heartbeat) -> Result<u64, CallError> {
        self.note(heartbeat);
        Ok(77)
    }

    async fn define(&self, request: DefineRequest) -> Result<DefineAnswer, CallError> {
        let rebuilds = match &request.change {
            Some(Definition::Rebuild(rebuild)) => Some(RelationId(rebuild.job)),
            _ => None,
        };
        self.note(request);
        if let Some(id) = rebuilds {
            self.answer(id).await?;
        }
        Ok(DefineAnswer { relation: Some(16384), record: 12 })
    }

    async fn wait_created(&self, id: RelationId) -> Result<(), CallError> {
        self.note(("created", id));
        Ok(self.answer(id).await?)
    }

    async fn wait_rebuilt(&self, id: RelationId) -> Result<(), CallError> {
        Ok(self.answer(id).await?)
    }

    async fn read_epoch(
        &self,
        ids: &[RelationId],
        timeout: Option<Duration>,
        fresh: bool,
    ) -> Result<ReadEpoch, CallError> {
        self.note((ids, timeout, fresh));
        Ok(ReadEpoch { epoch: Epoch(300), record: 20, catalog_version: 12 })
    }

    async fn flush(&self) -> Result<(), CallError> {
        self.note("flush");
        Ok(())
    }

    async fn jobs(&self) -> Result<JobReports, CallError> {
        Ok(filled::one("millrace.rpc.JobReports"))
    }

    async fn take_lock(&self, request: TakeLockRequest) -> Result<TakeLockAnswer, CallError> {
        self.note(request);
        Ok(TakeLockAnswer { taken: true, term: 21 })
    }

    async fn give_back_locks(&self, request: GiveBackLocksRequest) -> Result<(), CallError> {
        self.note(request);
        Ok(())
    }

    async fn locks(&self) -> Result<Vec<ListedLock>, CallError> {
        Ok(vec![filled::one("millrace.rpc.ListedLock")])
    }

    async fn tell_sessions(&self, told: SessionsTold) -> Result<SessionsWanted, CallError> {
        self.note(told);
        Ok(filled::one("millrace.rpc.SessionsWanted"))
    }

    async fn sessions(&self, process: u64) -> Result<SessionsAnswer, CallError> {
        self.note(process);
        Ok(filled::one("millrace.rpc.SessionsAnswer"))
    }
}

#[async_trait]
impl DmlService for Fake {
    async fn apply_dml(
        &self,
        table: RelationId,
        id: StatementId,
        delta: DeltaChunk,
        kind: DmlKind,
        entered: &EntryFlag,
    ) -> Result<DmlAnswer, CallError> {
        let rows = delta.num_rows() as u64;
        self.note((table, id, &delta.batch, delta.weights_array(), kind));
        if rows == 0 {
            return Ok(DmlAnswer::Conflict);
        }
        self.answer(table).await?;
        entered.set();
        self.finish.notified().await;
        Ok(DmlAnswer::Applied { epoch: Epoch(300), rows, late: 1 })
    }

    async fn apply_transaction(
        &self,
        id: StatementId,
        changes: Vec<TableChange>,
        read: ReadSet,
        entered: &EntryFlag,
    ) -> Result<DmlAnswer, CallError> {
        let changes: Vec<_> = changes
            .iter()
            .map(|c| (c.table, c.kind, &c.delta.batch, c.delta.weights_array()))
            .collect();
        self.note((id, changes, read));
        entered.set();
        Ok(DmlAnswer::Conflict)
    }

    async fn begin_load(
        &self,
        table: RelationId,
        id: StatementId,
        kind: LoadKind,
    ) -> Result<Box<dyn LoadService>, CallError> {
        self.note((table, id, kind));
        self.answer(table).await?;
        let dropped = CountDrop(Arc::clone(&self.dropped));
        Ok(Box::new(FakeLoad { seen: self.seen.clone(), rows: 0, _dropped: dropped }))
    }

    async fn lock_tables(&self, tables: &[RelationId]) -> Result<Option<HeldLocks>, CallError> {
        self.note(tables);
        if tables.is_empty() {
            return Ok(None);
        }
        Ok(Some(HeldLocks { id: 77, guard: Box::new(CountDrop(Arc::clone(&self.dropped))) }))
    }

    async fn allocate_row_ids(&self, table: RelationId, n: u64) -> Result<u64, CallError> {
        self.answer(table).await?;
        Ok(1000 + n)
    }

    async fn abandon(&self, tables: &[RelationId], id: StatementId) -> Result<bool, CallError> {
        self.note((tables, id));
        for table in tables {
            self.answer(*table).await?;
        }
        Ok(tables.len() == 1)
    }
}

/// What [`Fake`] refuses reads with, by the commits that the caller has read.
pub const REFUSALS: [ReadRefusal; 5] = [
    ReadRefusal::NotOpen,
    ReadRefusal::NotYet,
    ReadRefusal::TooOld,
    ReadRefusal::TooLarge,
    ReadRefusal::Busy,
];

/// Rows of two chunks, the first with multiplicities.
pub fn found() -> FoundRows {
    let ids: ArrayRef = Arc::new(Int64Array::from(vec![7, 8]));
    let batch = RecordBatch::try_from_iter([("id", ids)]).unwrap();
    let weights = Some(Int64Array::from(vec![2, 1]));
    let chunks = vec![DeltaChunk::new(batch.clone(), weights), DeltaChunk::inserts(batch)];
    FoundRows { positions: vec![0, 1, 5, 6], chunks }
}

#[async_trait]
impl ReadService for Fake {
    async fn read(&self, request: ReadRequest) -> Result<ReadAnswer, CallError> {
        let (job, commits) = (request.job, request.commits);
        self.note(request);
        self.answer(job).await?;
        let refused = usize::try_from(commits).ok().and_then(|at| REFUSALS.get(at));
        Ok(refused.map_or_else(|| ReadAnswer::Rows(found()), |why| ReadAnswer::Refused(*why)))
    }
}

struct FakeLoad {
    seen: watch::Sender<Vec<String>>,
    rows: u64,
    _dropped: CountDrop,
}

#[async_trait]
impl LoadService for FakeLoad {
    async fn append(&mut self, rows: DeltaChunk) -> Result<bool, CallError> {
        self.rows += rows.num_rows() as u64;
        if rows.is_empty() { Err(error().into()) } else { Ok(self.rows > 1) }
    }

    async fn read_at(&mut self, epoch: Epoch) -> Result<(), CallError> {
        self.seen.send_modify(|seen| seen.push(format!("{epoch:?}")));
        Ok(())
    }

    async fn rest_on(&mut self, read: ReadSet) -> Result<(), CallError> {
        self.seen.send_modify(|seen| seen.push(format!("{read:?}")));
        Ok(())
    }

    async fn finish(self: Box<Self>, entered: &EntryFlag) -> Result<DmlAnswer, CallError> {
        entered.set();
        Ok(DmlAnswer::Applied { epoch: Epoch(5), rows: self.rows, late: 0 })
    }
}

#[async_trait]
impl OperatorService for Fake {
    async fn overview(&self) -> Result<ClusterOverview, CallError> {
        Ok(filled::one("millrace.rpc.ClusterOverview"))
    }

    async fn move_job(
        &self,
        job: JobId,
        worker: u64,
        id: Option<StatementId>,
    ) -> Result<PlacedJobs, CallError> {
        self.note((job, worker, id));
        match job {
            FAILING => Err(error().into()),
            _ => Ok(filled::one("millrace.rpc.PlacedJobs")),
        }
    }

    async fn drain(
        &self,
        worker: u64,
        undo: bool,
        id: Option<StatementId>,
    ) -> Result<PlacedJobs, CallError> {
        self.note((worker, undo, id));
        Ok(filled::one("millrace.rpc.PlacedJobs"))
    }

    async fn versions(&self) -> Result<JobVersions, CallError> {
        Ok(filled::one("millrace.rpc.JobVersions"))
    }

    async fn collection(&self, run: bool) -> Result<CollectionReport, CallError> {
        self.note(run);
        Ok(filled::one("millrace.rpc.CollectionReport"))
    }

    async fn create_backup(
        &self,
        name: String,
        id: Option<StatementId>,
    ) -> Result<BackupOverview, CallError> {
        self.note((name, id));
        Ok(filled::one("millrace.rpc.BackupOverview"))
    }

    async fn backups(&self) -> Result<BackupList, CallError> {
        Ok(filled::one("millrace.rpc.BackupList"))
    }

    async fn release_backup(
        &self,
        name: String,
        id: Option<StatementId>,
    ) -> Result<BackupOverview, CallError> {
        self.note((name, id));
        Ok(filled::one("millrace.rpc.BackupOverview"))
    }
}

/// The services of a [`Fake`], as others call them.
pub struct Clients {
    pub fake: Arc<Fake>,
    pub compute: Arc<dyn ComputeService>,
    pub compactor: Arc<dyn CompactorService>,
    pub meta: Arc<dyn MetaControl>,
    pub dml: Arc<dyn DmlService>,
    pub reads: Arc<dyn ReadService>,
}

/// In this process, through bytes.
pub fn encoded() -> Clients {
    let fake = Arc::new(Fake::default());
    Clients {
        compute: Arc::new(Encoded::compute(fake.clone())),
        compactor: Arc::new(Encoded::compactor(fake.clone())),
        meta: Arc::new(Encoded::meta(fake.clone())),
        dml: Arc::new(Encoded::dml(fake.clone())),
        reads: Arc::new(Encoded::reads(fake.clone())),
        fake,
    }
}

/// Over a server that listens.
pub async fn networked() -> Clients {
    let (fake, address) = serve(Arc::default()).await;
    let peer = peer(&address, Arc::default());
    Clients {
        fake,
        compute: Arc::new(RemoteCompute::new(peer.clone())),
        compactor: Arc::new(RemoteCompactor::new(peer.clone())),
        meta: Arc::new(RemoteMeta::new(peer.clone())),
        dml: Arc::new(RemoteDml::new(peer.clone())),
        reads: Arc::new(RemoteReads::new(peer)),
    }
}

/// A server with all services of a [`Fake`], and its address.
pub async fn serve(admission: Arc<Admission>) -> (Arc<Fake>, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let fake = Arc::new(Fake::default());
    let server = Server::new(admission)
        .compute(fake.clone())
        .compactor(fake.clone())
        .meta(fake.clone())
        .dml(fake.clone())
        .reads(fake.clone());
    tokio::spawn(server.serve(listener));
    (fake, address)
}

pub fn peer(address: &str, identity: Arc<Identity>) -> Peer {
    let limits = CallLimits { answer: Duration::from_secs(5), ..CallLimits::default() };
    Peer::new(address, identity, limits).unwrap()
}
