//! Frontends that have log and bucket, and call leader and tables through bytes, beside one in the leader's process.

#![allow(clippy::unwrap_used)] // a test fails where it does not find what it made

mod older_catalog;
mod reads;
mod shown;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use millrace_common::{DeltaChunk, EnvHandle, RelationId, SqlError};
use millrace_executor::{ExecOptions, Worker, WorkerOptions};
use millrace_frontend::server::Shared;
use millrace_frontend::{
    Direct, Frontend, FrontendConfig, ReadWays, RemoteCluster, RemoteOptions, STACK_BYTES,
    TableProcess, TableRoutes, console,
};
use millrace_meta::{LogFollower, Meta, MetaOptions};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::MetaControl;
use millrace_rpc::dml::{
    DmlAnswer, DmlKind, DmlService, EntryFlag, HeldLocks, LoadKind, LoadService, ReadSet,
    TableChange,
};
use millrace_rpc::log::MoveParts;
use millrace_rpc::loopback::Encoded;
use millrace_rpc::read::ReadService;
use millrace_rpc::remote::{CallLimits, Peer, RemoteDml, RemoteMeta, RemoteReads};
use millrace_rpc::services::{
    CompactionTask, CompactorService, ComputeService, LivePart, MetaService,
};
use millrace_rpc::version::{StatementId, VersionEdit};
use millrace_storage::sim::{Faults, Profile, RequestKind, SimStore};
use millrace_storage::state_store::StoreOptions;
use millrace_storage::{StateStore, VersionFollower};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use parking_lot::Mutex;

/// Nothing becomes large enough for it.
struct NoCompactor;

#[async_trait]
impl CompactorService for NoCompactor {
    async fn compact(&self, _: CompactionTask) -> Result<VersionEdit, SqlError> {
        Err(SqlError::internal("no compactor"))
    }

    async fn copy_parts(&self, _: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        Err(SqlError::internal("no compactor"))
    }
}

/// All jobs are there.
struct One(TableProcess);

impl TableRoutes for One {
    fn process_of(&self, _: RelationId) -> Result<TableProcess, SqlError> {
        Ok(self.0.clone())
    }
}

/// A leader with its worker, and a frontend beside them.
struct Server {
    bucket: Arc<dyn ObjectStore>,
    meta: Arc<Meta>,
    worker: Arc<Worker>,
    direct: Sessions,
}

/// A frontend whose statements come from the test.
struct Sessions(Frontend);

impl Sessions {
    fn new(cluster: Arc<dyn millrace_frontend::cluster::Cluster>, incarnation: u64) -> Sessions {
        let incarnation = incarnation.into();
        let config = FrontendConfig { incarnation, query_cores: 2, ..FrontendConfig::default() };
        Sessions(Frontend::new(cluster, config).unwrap())
    }

    fn shared(&self) -> &Arc<Shared> {
        self.0.shared()
    }

    /// The rows of the last of some statements.
    async fn rows(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        match console::run(self.shared(), "test".to_owned(), sql).await {
            (mut answers, None) => answers.pop().unwrap_or_default().rows,
            (_, Some(e)) => panic!("{sql}: {e:?}"),
        }
    }

    async fn text(&self, sql: &str) -> String {
        let row = |row: Vec<Option<String>>| {
            let values = row.into_iter().map(|v| v.unwrap_or_else(|| "NULL".to_owned()));
            values.collect::<Vec<_>>().join("|")
        };
        self.rows(sql).await.into_iter().map(row).collect::<Vec<_>>().join(" ")
    }

    async fn error(&self, sql: &str) -> SqlError {
        let (_, error) = console::run(self.shared(), "test".to_owned(), sql).await;
        error.unwrap_or_else(|| panic!("{sql} has no error"))
    }
}

impl Server {
    async fn start() -> Server {
        Server::on(Arc::new(InMemory::new())).await
    }

    async fn on(bucket: Arc<dyn ObjectStore>) -> Server {
        let meta = Meta::open(MetaOptions::new(Arc::clone(&bucket))).await.unwrap();
        let options = StoreOptions {
            // Slices are objects of their own.
            inline_bytes: 0,
            ..StoreOptions::new(Arc::clone(&bucket), meta.incarnation())
        };
        let store = StateStore::open(options).await.unwrap();
        // Loads go to the store soon.
        let exec = ExecOptions { load_bytes: 64 << 10, ..ExecOptions::default() };
        let worker = Worker::new(WorkerOptions { exec, ..WorkerOptions::new(Arc::clone(&store)) });
        worker.set_meta(Arc::clone(&meta) as Arc<dyn MetaService>);
        let compute = Arc::clone(&worker) as Arc<dyn ComputeService>;
        meta.start(compute, Arc::new(NoCompactor)).await.unwrap();
        let direct = Direct::new(Arc::clone(&meta), store, Arc::clone(&worker));
        let direct = Sessions::new(Arc::new(direct), 1_000);
        Server { bucket, meta, worker, direct }
    }

    /// Another frontend.
    async fn remote(&self, incarnation: u64) -> Sessions {
        self.remote_on(&self.bucket, incarnation).await
    }

    /// One that has a way of its own to the bucket.
    async fn remote_on(&self, bucket: &Arc<dyn ObjectStore>, incarnation: u64) -> Sessions {
        self.frontend_on(bucket, incarnation, self.leader(), self.process()).await.0
    }

    /// The leader, as others call it.
    fn leader(&self) -> Arc<dyn MetaControl> {
        Arc::new(Encoded::meta(Arc::clone(&self.meta) as Arc<dyn MetaControl>))
    }

    /// The process of the worker, as others call it.
    fn process(&self) -> TableProcess {
        let dml = Encoded::dml(Arc::clone(&self.worker) as Arc<dyn DmlService>);
        let reads = Encoded::reads(Arc::clone(&self.worker) as Arc<dyn ReadService>);
        let incarnation = self.meta.incarnation();
        TableProcess { incarnation, dml: Arc::new(dml), reads: Arc::new(reads) }
    }

    /// One for which leader and worker are not there.
    async fn cut_off(&self, incarnation: u64) -> Sessions {
        // Nobody listens at that port.
        let peer = Peer::new("127.0.0.1:1", Arc::default(), CallLimits::default()).unwrap();
        let process = TableProcess {
            incarnation: self.meta.incarnation(),
            dml: Arc::new(RemoteDml::new(peer.clone())),
            reads: Arc::new(RemoteReads::new(peer.clone())),
        };
        self.frontend(incarnation, Arc::new(RemoteMeta::new(peer)), process).await
    }

    async fn frontend(
        &self,
        incarnation: u64,
        meta: Arc<dyn MetaControl>,
        process: TableProcess,
    ) -> Sessions {
        self.frontend_on(&self.bucket, incarnation, meta, process).await.0
    }

    /// One that reads the log and the rows of this bucket, and what counts its reads.
    async fn frontend_on(
        &self,
        bucket: &Arc<dyn ObjectStore>,
        incarnation: u64,
        meta: Arc<dyn MetaControl>,
        process: TableProcess,
    ) -> (Sessions, Arc<ReadWays>) {
        let env = EnvHandle::default();
        let log = LogFollower::open(Arc::clone(bucket), env.clone()).await.unwrap();
        let options = StoreOptions::new(Arc::clone(bucket), incarnation);
        let store = StateStore::open(options).await.unwrap();
        let cluster = RemoteCluster::new(RemoteOptions {
            log: Arc::new(log),
            versions: Arc::new(VersionFollower::new(&store)),
            meta,
            routes: Arc::new(One(process)),
            env,
            settings: BTreeMap::new(),
            lease: None,
        });
        let ways = cluster.read_ways();
        (Sessions::new(Arc::new(cluster), incarnation), ways)
    }
}

fn run(test: impl Future<Output = ()> + Send + 'static) {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).thread_stack_size(STACK_BYTES).enable_all();
    let test = async { tokio::time::timeout(Duration::from_secs(120), test).await.unwrap() };
    runtime.build().unwrap().block_on(async { tokio::spawn(test).await.unwrap() });
}

#[test]
fn a_frontend_elsewhere_defines_writes_and_reads() {
    run(async {
        let server = Server::start().await;
        let remote = server.remote(2_000).await;
        remote.rows("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
        remote.rows("CREATE TABLE log (line text)").await;
        remote
            .rows("CREATE MATERIALIZED VIEW sums AS SELECT v % 3 AS k, sum(id) AS s FROM t GROUP BY 1")
            .await;
        remote.rows("INSERT INTO t SELECT i, i * 7 FROM generate_series(1, 20) AS g(i)").await;
        remote.rows("INSERT INTO log VALUES ('a'), ('b'), ('a')").await;
        remote.rows("UPDATE t SET v = v + 1 WHERE id < 6").await;
        remote.rows("UPDATE t SET id = id + 100 WHERE v > 120").await;
        remote.rows("DELETE FROM t WHERE id = 7").await;
        remote.rows("INSERT INTO t VALUES (8, 0) ON CONFLICT (id) DO UPDATE SET v = -1").await;
        remote.rows("INSERT INTO t VALUES (9, 0) ON CONFLICT DO NOTHING").await;
        let both = "BEGIN; INSERT INTO t VALUES (500, 5); INSERT INTO log VALUES ('c'); COMMIT";
        remote.rows(both).await;
        remote.rows("BEGIN; DELETE FROM t; ROLLBACK").await;
        let queries = [
            "SELECT id, v FROM t ORDER BY id",
            "SELECT v FROM t WHERE id = 8",
            "SELECT k, s FROM sums ORDER BY k",
            "SELECT line, count(*) FROM log GROUP BY line ORDER BY line",
            "SELECT count(*) FROM t JOIN sums ON t.v % 3 = sums.k",
            "SELECT id FROM t WHERE id BETWEEN 3 AND 5 ORDER BY id",
        ];
        for query in queries {
            let (here, there) = (server.direct.text(query).await, remote.text(query).await);
            assert_eq!(there, here, "{query}");
            assert!(!here.is_empty(), "{query}");
        }
        assert_eq!(remote.text("SELECT v FROM t WHERE id = 8").await, "-1");
        let duplicate = remote.error("INSERT INTO t VALUES (8, 1)").await;
        assert_eq!(
            (duplicate.state.0, duplicate.detail.as_deref()),
            ("23505", Some("Key (id)=(8) already exists."))
        );
        // How jobs are the leader tells.
        let jobs = "SELECT name, state, rows FROM millrace_catalog.jobs ORDER BY name";
        let told = remote.text(jobs).await;
        assert!(told.contains("log|running|4") && told.contains("sums|running|4"), "{told}");
    });
}

#[test]
fn a_large_load_goes_through() {
    run(async {
        let server = Server::start().await;
        let remote = server.remote(2_000).await;
        remote.rows("CREATE TABLE t (id bigint PRIMARY KEY, v text)").await;
        let rows = "SELECT i, 'some text of row ' || i FROM generate_series(1, 30000) AS g(i)";
        remote.rows(&format!("INSERT INTO t {rows}")).await;
        let sum = "SELECT count(*), sum(id), sum(length(v)) FROM t";
        assert_eq!(remote.text(sum).await, server.direct.text(sum).await);
        let error = remote.error(&format!("INSERT INTO t {rows}")).await;
        assert_eq!(error.state.0, "23505");
        // Beyond what a statement holds, and moving every key.
        remote.rows("UPDATE t SET id = id + 1, v = v || repeat('x', 400)").await;
        assert_eq!(remote.text(sum).await, server.direct.text(sum).await);
        assert_eq!(remote.text("SELECT min(id), max(id) FROM t").await, "2|30001");
    });
}

#[test]
fn what_others_have_defined_is_looked_for_at_the_head() {
    run(async {
        let server = Server::start().await;
        // Nobody hands them records: they read the bucket when they must.
        let (one, other) = (server.remote(2_000).await, server.remote(3_000).await);
        one.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        one.rows("INSERT INTO t VALUES (1)").await;
        assert_eq!(other.text("SELECT id FROM t").await, "1");
        one.rows("DROP TABLE t; CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
        one.rows("INSERT INTO t VALUES (2, 3)").await;
        // Planned with the table that is gone, and again.
        assert_eq!(other.text("SELECT * FROM t").await, "2|3");
        other.rows("DROP TABLE IF EXISTS t").await;
        assert_eq!(one.error("SELECT * FROM t").await.state.0, "42P01");
        assert_eq!(other.error("SELECT * FROM nobody_knows").await.state.0, "42P01");
        one.rows("CREATE SCHEMA s; CREATE TABLE s.u (id bigint)").await;
        other.rows("CREATE TABLE IF NOT EXISTS s.u (id bigint)").await;
        other.rows("INSERT INTO s.u VALUES (5)").await;
        assert_eq!(one.text("SELECT id FROM s.u").await, "5");
    });
}

#[test]
fn a_write_to_a_table_that_was_dropped_goes_to_the_one_of_its_name() {
    run(async {
        let server = Server::start().await;
        let (one, other) = (server.remote(2_000).await, server.remote(3_000).await);
        one.rows("CREATE VIEW c AS SELECT 1 AS n").await;
        one.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        one.rows("CREATE TABLE log (line text)").await;
        assert_eq!(other.text("SELECT count(*) FROM t, log").await, "0");
        one.rows("DROP TABLE t; CREATE TABLE t (id bigint PRIMARY KEY)").await;
        one.rows("DROP TABLE log; CREATE TABLE log (line text)").await;
        // The worker waits for the tables that it is told. The read brings the log that says that they are gone.
        let (_, _, read) = tokio::join!(
            other.rows("INSERT INTO t VALUES (7)"),
            other.rows("INSERT INTO log VALUES ('a')"),
            other.text("SELECT n FROM c"),
        );
        assert_eq!(read, "1");
        assert_eq!(other.text("SELECT id, line FROM t, log").await, "7|a");
        one.rows("DROP TABLE t").await;
        let (error, _) =
            tokio::join!(other.error("INSERT INTO t VALUES (8)"), other.text("SELECT n FROM c"));
        assert_eq!(error.state.0, "42P01", "{error:?}");
    });
}

#[test]
fn only_what_names_something_needs_the_leader() {
    run(async {
        let server = Server::start().await;
        server.direct.rows("CREATE VIEW c AS SELECT 1 AS n").await;
        let alone = server.cut_off(2_000).await;
        assert_eq!(alone.text("SELECT 1").await, "1");
        let any = "SET read_freshness = 'any'; SELECT n FROM c";
        assert_eq!(alone.text(any).await, "1");
        let error = alone.error("SET read_wait_timeout = '300ms'; SELECT n FROM c").await;
        assert_eq!(error.state.0, "57P03", "a view may have been replaced: {error:?}");
    });
}

#[test]
fn what_is_committed_is_read_without_leader_and_worker() {
    run(async {
        let server = Server::start().await;
        server.direct.rows("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
        server.direct.rows("CREATE MATERIALIZED VIEW n AS SELECT count(*) AS n FROM t").await;
        server.direct.rows("INSERT INTO t VALUES (1, 2), (3, 4)").await;
        assert_eq!(server.direct.text("SELECT n FROM n").await, "2");
        let alone = server.cut_off(2_000).await;
        let any = "SET read_freshness = 'any'; ";
        assert_eq!(alone.text(&format!("{any}SELECT n FROM n")).await, "2");
        assert_eq!(alone.text(&format!("{any}SELECT v FROM t WHERE id = 3")).await, "4");
        let soon = "SET read_wait_timeout = '300ms'; ";
        let error = alone.error(&format!("{soon}SELECT n FROM n")).await;
        assert_eq!(error.state.0, "57P03");
        assert!(error.message.contains("the leader does not answer"), "{error:?}");
        let error = alone.error("CREATE TABLE u (id bigint)").await;
        assert_eq!(error.state.0, "57P03", "{error:?}");
        let jobs = "SELECT DISTINCT state, reason FROM millrace_catalog.jobs";
        let shown = alone.text(jobs).await;
        assert!(shown.starts_with("waiting|the leader does not answer"), "{shown}");
        assert!(alone.text("SHOW JOBS").await.contains("the leader does not answer"));
    });
}

#[test]
fn writers_that_read_what_others_write_lose_nothing() {
    run(async {
        let server = Server::start().await;
        let (one, other) = (server.remote(2_000).await, server.remote(3_000).await);
        one.rows("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
        one.rows("CREATE TABLE copies (n bigint)").await;
        one.rows("INSERT INTO t VALUES (1, 0), (2, 0)").await;
        // What each reads the other one writes, so that they conflict until one has the tables to itself.
        let write = async |sessions: &Sessions, id: u32| {
            for _ in 0..8 {
                let sum = "(SELECT sum(v) FROM t)";
                sessions.rows(&format!("UPDATE t SET v = {sum} + 1 WHERE id = {id}")).await;
                sessions.rows(&format!("INSERT INTO copies SELECT {sum}")).await;
            }
        };
        tokio::join!(write(&one, 1), write(&other, 2));
        // Alone, in some order: each sees all before it, so no value comes twice.
        let repeated = "SELECT count(*) - count(DISTINCT v) FROM t";
        assert_eq!(one.text(repeated).await, "0");
        assert_eq!(one.text("SELECT count(*) FROM copies").await, "16");
        assert_eq!(
            one.text("SELECT max(n) = (SELECT sum(v) FROM t) FROM copies").await,
            "t",
            "the last copy is of the last sum"
        );
    });
}

/// A worker whose answers to statements are lost, and some of the statements too.
struct Lossy {
    worker: Arc<Worker>,
    arrives: AtomicBool,
    /// Whether a statement can be abandoned. From then on statements arrive.
    is_reached: bool,
    /// A statement that arrives is not heard of any more, nor whether it has entered.
    is_mute: AtomicBool,
    /// The last statement that has not arrived.
    lost: Mutex<Option<(RelationId, StatementId, DeltaChunk, DmlKind)>>,
}

impl Lossy {
    /// Calls for all tables of a server go through it.
    fn beside(server: &Server, arrives: bool, is_reached: bool) -> (Arc<Lossy>, TableProcess) {
        let (worker, arrives) = (Arc::clone(&server.worker), AtomicBool::new(arrives));
        let (is_mute, lost) = (AtomicBool::new(false), Mutex::default());
        let lossy = Arc::new(Lossy { worker, arrives, is_reached, is_mute, lost });
        let dml = Arc::clone(&lossy) as Arc<dyn DmlService>;
        (lossy, TableProcess { dml, ..server.process() })
    }

    fn worker(&self) -> &dyn DmlService {
        &*self.worker
    }
}

fn cut_off() -> CallError {
    CallError::Unreachable { peer: "worker".to_owned(), cause: "cut off".to_owned() }
}

#[async_trait]
impl DmlService for Lossy {
    async fn apply_dml(
        &self,
        table: RelationId,
        id: StatementId,
        delta: DeltaChunk,
        kind: DmlKind,
        entered: &EntryFlag,
    ) -> Result<DmlAnswer, CallError> {
        if self.is_mute.load(Ordering::Relaxed) {
            self.worker().apply_dml(table, id, delta, kind, &EntryFlag::default()).await?;
            return std::future::pending().await;
        }
        if self.arrives.load(Ordering::Relaxed) {
            self.worker().apply_dml(table, id, delta, kind, entered).await?;
        } else {
            *self.lost.lock() = Some((table, id, delta, kind));
        }
        Err(cut_off())
    }

    async fn apply_transaction(
        &self,
        _: StatementId,
        _: Vec<TableChange>,
        _: ReadSet,
        _: &EntryFlag,
    ) -> Result<DmlAnswer, CallError> {
        Err(SqlError::internal("not part of the test").into())
    }

    async fn begin_load(
        &self,
        _: RelationId,
        _: StatementId,
        _: LoadKind,
    ) -> Result<Box<dyn LoadService>, CallError> {
        Err(SqlError::internal("not part of the test").into())
    }

    async fn lock_tables(&self, _: &[RelationId]) -> Result<Option<HeldLocks>, CallError> {
        Ok(None)
    }

    async fn allocate_row_ids(&self, _: RelationId, _: u64) -> Result<u64, CallError> {
        Ok(1)
    }

    async fn abandon(&self, tables: &[RelationId], id: StatementId) -> Result<bool, CallError> {
        if !self.is_reached {
            return Err(cut_off());
        }
        self.arrives.store(true, Ordering::Relaxed);
        self.worker().abandon(tables, id).await
    }
}

#[test]
fn the_log_tells_what_became_of_a_statement_without_an_answer() {
    run(async {
        let server = Server::start().await;
        server.direct.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        let (lossy, process) = Lossy::beside(&server, true, false);
        let remote = server.frontend(2_000, server.leader(), process).await;
        remote.rows("INSERT INTO t VALUES (1), (2)").await;
        assert_eq!(remote.text("SELECT count(*) FROM t").await, "2");
        lossy.arrives.store(false, Ordering::Relaxed);
        let error = remote.error("INSERT INTO t VALUES (3)").await;
        assert_eq!(error.state.0, "08007", "{error:?}");
        assert_eq!(remote.text("SELECT count(*) FROM t").await, "2");
    });
}

#[test]
fn a_statement_that_is_cut_off_before_its_entry_is_heard_of_may_be_committed() {
    run(async {
        let server = Server::start().await;
        server.direct.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        let (lossy, process) = Lossy::beside(&server, true, false);
        lossy.is_mute.store(true, Ordering::Relaxed);
        let remote = server.frontend(2_000, server.leader(), process).await;
        let error = remote.error("SET statement_timeout = '2s'; INSERT INTO t VALUES (1)").await;
        assert_eq!(error.state.0, "08007", "{error:?}");
        assert_eq!(server.direct.text("SELECT id FROM t").await, "1");
    });
}

#[test]
fn a_statement_that_was_lost_is_sent_again_when_its_process_is_reached() {
    run(async {
        let server = Server::start().await;
        server.direct.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        let (lossy, process) = Lossy::beside(&server, false, true);
        let remote = server.frontend(2_000, server.leader(), process).await;
        remote.rows("INSERT INTO t VALUES (1)").await;
        assert_eq!(server.direct.text("SELECT id FROM t").await, "1");
        // The first call arrives late. Nobody has the key then.
        server.direct.rows("DELETE FROM t").await;
        let (table, id, delta, kind) = lossy.lost.lock().take().unwrap();
        let late = lossy.worker().apply_dml(table, id, delta, kind, &EntryFlag::default()).await;
        assert!(late.is_err(), "{late:?}");
        assert_eq!(server.direct.text("SELECT count(*) FROM t").await, "0");
    });
}

/// A server whose store takes no record, until it is told to.
async fn takes_no_record(before: &str) -> (SimStore, Server, Sessions) {
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    let server = Server::on(Arc::new(sim.clone())).await;
    let remote = server.remote(2_000).await;
    remote.rows(before).await;
    let only = Some(RequestKind::Put);
    sim.set_faults(Faults { hang: 1.0, only, ..Faults::default() });
    (sim, server, remote)
}

fn takes_records(sim: &SimStore) {
    sim.set_faults(Faults::default());
    sim.answer_hung();
}

#[test]
fn a_definition_that_is_cut_off_may_have_been_made() {
    run(async {
        let (sim, _server, remote) = takes_no_record("SELECT 1").await;
        let error = remote.error("SET statement_timeout = '2s'; CREATE SCHEMA s").await;
        assert_eq!(error.state.0, "08007", "{error:?}");
        takes_records(&sim);
        let error = remote.error("CREATE SCHEMA s").await;
        assert_eq!(error.state.0, "42P06", "it has been made: {error:?}");
    });
}

#[test]
fn a_view_whose_creation_is_cut_off_goes_when_it_has_come() {
    run(async {
        // Its job runs, and has nothing to commit.
        let before = "CREATE TABLE t (id bigint); INSERT INTO t VALUES (1); SELECT id FROM t";
        let (sim, server, remote) = takes_no_record(before).await;
        let is_asked_for = async {
            while server.meta.append_stats().waiting.is_zero() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            _ = remote.rows("CREATE MATERIALIZED VIEW v AS SELECT id FROM t") => {
                panic!("no record is taken");
            }
            () = is_asked_for => {}
        }
        takes_records(&sim);
        // Its record comes after that of the view, which has been there then.
        remote.rows("CREATE TABLE u (id bigint)").await;
        let id = |name| server.meta.catalog().by_name("public", name).map(|r| r.id);
        assert_eq!(id("u").unwrap(), id("t").unwrap() + 2);
        while id("v").is_some() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
}

#[test]
fn a_cursor_elsewhere_is_told_of_changes() {
    run(async {
        let server = Server::start().await;
        let remote = server.remote(2_000).await;
        remote.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        remote.rows("CREATE MATERIALIZED VIEW n AS SELECT count(*) AS n FROM t").await;
        remote.rows("CREATE SUBSCRIPTION changes FROM n WITH (retention = '1 day')").await;
        // Whether it waits for the change or finds it makes no difference.
        let follow = "DECLARE c SUBSCRIPTION CURSOR FOR changes SINCE begin(); \
                      FETCH 2 FROM c WITH (timeout = '20s')";
        let insert = async {
            server.direct.rows("INSERT INTO t VALUES (1)").await;
            // Nobody hands over the record stream: a read brings the records.
            remote.text("SELECT n FROM n").await
        };
        let (told, _) = tokio::join!(remote.rows(follow), insert);
        let mut counts: Vec<_> = told.iter().map(|row| row[3].as_deref().unwrap()).collect();
        counts.sort_unstable();
        assert_eq!(counts, ["0", "1"], "{told:?}");
    });
}
