//! A leader whose jobs run on other processes: who registers, who is fenced, and where jobs run.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{EnvHandle, Generation, RelationId, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::control::{
    CreateRelationRequest, DefineRequest, Definition, Heartbeat, MetaControl, SessionId,
    TakeLockAnswer, TakeLockRequest,
};
use millrace_rpc::log::{Entry, FenceProcess, ProcessRole, RegisterProcess};
use millrace_rpc::operator::OperatorService;
use millrace_rpc::services::{CompactorService, ComputeService};
use millrace_rpc::version::StatementId;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;

use super::fake::{Behaviour, Cluster, Fake, NoCompactor, Stream};
use super::store::TestStore;
use super::{TestEnv, relation, table, view};
use crate::advisory::{self, Key, Mode};
use crate::cluster::{COMPUTE_WAIT, Connect};
use crate::gc::GcOptions;
use crate::log::LEADER_LEASE;
use crate::members::PROCESS_LEASE;
use crate::meta::{CreateOptions, Meta};
use crate::options::MetaOptions;
use crate::state::MetaState;

/// All processes are one fake worker, whose jobs are those of the newest generation.
pub struct Connections {
    pub worker: Arc<Fake>,
    pub fenced: Arc<Mutex<Vec<u64>>>,
}

impl Connect for Connections {
    fn compute(&self, _: &str, _: u64) -> Result<Arc<dyn ComputeService>, SqlError> {
        Ok(Arc::clone(&self.worker) as _)
    }

    fn compactor(&self, _: &str, _: u64) -> Result<Arc<dyn CompactorService>, SqlError> {
        Ok(Arc::new(NoCompactor))
    }

    fn fenced(&self, incarnation: u64) {
        self.fenced.lock().push(incarnation);
    }
}

async fn leader(store: &Arc<TestStore>) -> (Cluster, Arc<Mutex<Vec<u64>>>) {
    leader_of(store, Arc::default()).await
}

/// Leads the processes whose jobs this worker runs.
pub async fn leader_of(store: &Arc<TestStore>, fake: Arc<Fake>) -> (Cluster, Arc<Mutex<Vec<u64>>>) {
    let options = MetaOptions {
        env: EnvHandle::new(TestEnv::new(store.requests() + 1)),
        alone: false,
        roles: vec![ProcessRole::Meta],
        address: "m:1".into(),
        ..MetaOptions::new(Arc::clone(store) as _)
    };
    let meta = Meta::open(options).await.unwrap();
    fake.attach(&meta);
    let fenced = Arc::<Mutex<Vec<u64>>>::default();
    let connect = Connections { worker: Arc::clone(&fake), fenced: Arc::clone(&fenced) };
    meta.start_cluster(Arc::new(connect)).await.unwrap();
    (Cluster { meta, fake, store: Arc::clone(store) }, fenced)
}

pub fn process(nonce: u64, role: ProcessRole, address: &str) -> RegisterProcess {
    RegisterProcess { nonce, roles: vec![role as i32], address: address.into() }
}

pub async fn registered(meta: &Meta, process: RegisterProcess) -> u64 {
    MetaControl::register_process(meta, process).await.unwrap()
}

pub async fn beat(meta: &Meta, incarnation: u64) -> Result<u64, CallError> {
    meta.beat(Heartbeat { incarnation, ..Heartbeat::default() }).await
}

pub fn placed(meta: &Meta, id: RelationId) -> (u64, Generation) {
    let state = meta.state_for_tests();
    (state.jobs[&id].process, Generation(state.jobs[&id].version.generation))
}

#[tokio::test(start_paused = true)]
async fn jobs_wait_for_a_compute_process_and_go_to_who_takes_its_place() {
    let (cluster, fenced) = leader(&TestStore::new()).await;
    let meta = Arc::clone(&cluster.meta);
    let t = cluster.create(table("t")).await;
    assert_eq!(placed(&meta, t).0, 0, "there is no process for it");
    let jobs = MetaControl::jobs(&*meta).await.unwrap().jobs;
    assert_eq!(jobs[0].state, "starting");
    assert!(jobs[0].reason.as_deref().unwrap_or_default().contains("no compute process"));

    let first = registered(&meta, process(7, ProcessRole::Compute, "a:1")).await;
    assert_eq!(registered(&meta, process(7, ProcessRole::Compute, "a:1")).await, first);
    let v = cluster.created(view("v", &[t])).await;
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [1, 1]);
    let (on, generation) = placed(&meta, t);
    assert_eq!(on, first);

    let second = registered(&meta, process(8, ProcessRole::Compute, "a:1")).await;
    assert_eq!(*fenced.lock(), [first]);
    assert_eq!(placed(&meta, t).0, second);
    assert!(placed(&meta, t).1 > generation);
    assert!(matches!(beat(&meta, first).await, Err(CallError::Fenced { .. })));
    assert!(beat(&meta, second).await.is_ok());
    cluster.read(&[t, v]).await;
}

/// A frontend has a relation created. The log grows by each, so no two have the same id.
async fn create(meta: &Meta, relation: Relation) -> Result<RelationId, CallError> {
    let id = StatementId { frontend: 1, number: meta.record() };
    let create =
        CreateRelationRequest { relation: Some(relation), table_count: 1, or_replace: false };
    let change = Some(Definition::CreateRelation(create));
    let created = meta.define(DefineRequest { id: Some(id), since: 0, change }).await?;
    Ok(RelationId(created.relation.expect("it was created")))
}

#[tokio::test(start_paused = true)]
async fn a_statement_waits_for_a_compute_process_only_so_long() {
    let (cluster, _) = leader(&TestStore::new()).await;
    let meta = &cluster.meta;
    let create = |name| create(meta, table(name));
    let began = tokio::time::Instant::now();
    let Err(CallError::Sql(error)) = create("t").await else { panic!("it runs nowhere") };
    let took = |since: tokio::time::Instant| since.elapsed().as_secs();
    assert_eq!((error.state, took(began)), (SqlState::CANNOT_CONNECT_NOW, COMPUTE_WAIT.as_secs()));
    assert!(error.to_string().contains("compute"), "{error}");
    assert_eq!(meta.catalog().relations().count(), 0, "nothing is left of it");
    // What needs none is created.
    let plain = relation("plain", RelationKind::View, &[]);
    self::create(meta, plain).await.unwrap();

    let compute = async {
        tokio::time::sleep(COMPUTE_WAIT / 2).await;
        registered(meta, process(7, ProcessRole::Compute, "a:1")).await
    };
    let (created, first) = tokio::join!(create("t"), compute);
    let t = created.unwrap();
    cluster.insert(t).await;

    // One that is lost while a view is created ends the wait as well; one that takes its place in time does not.
    let (v, u) = (RelationId(t.0 + 1), RelationId(t.0 + 2));
    for (id, name) in [(v, "v"), (u, "u")] {
        cluster.fake.behave(id, Behaviour { hang: true, ..Behaviour::default() });
        assert_eq!(cluster.create(view(name, &[t])).await, id);
    }
    let lose = async |incarnation| {
        meta.beat(Heartbeat { incarnation, leaving: true, ..Heartbeat::default() }).await.unwrap();
    };
    lose(first).await;
    let began = tokio::time::Instant::now();
    let error = MetaControl::wait_created(&**meta, v).await.unwrap_err();
    assert_eq!(SqlError::from(error).state, SqlState::CANNOT_CONNECT_NOW);
    assert_eq!(took(began), COMPUTE_WAIT.as_secs());
    assert_eq!(cluster.read(&[t]).await, [1], "nothing of it is missing");
    let late = async {
        tokio::time::sleep(COMPUTE_WAIT / 2).await;
        cluster.fake.behave(u, Behaviour::default());
        registered(meta, process(8, ProcessRole::Compute, "b:1")).await
    };
    let (waited, _) = tokio::join!(MetaControl::wait_created(&**meta, u), late);
    waited.unwrap();
}

#[tokio::test(start_paused = true)]
async fn jobs_are_spread_over_processes_and_those_of_a_lost_one_go_to_the_others() {
    let (cluster, fenced) = leader(&TestStore::new()).await;
    let meta = Arc::clone(&cluster.meta);
    let first = registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
    let t = cluster.created(table("t")).await;
    let v = cluster.created(view("v", &[t])).await;
    let second = registered(&meta, process(2, ProcessRole::Compute, "b:1")).await;
    assert!(fenced.lock().is_empty(), "nobody's place was taken");
    let before = placed(&meta, t);
    assert_eq!((before.0, placed(&meta, v).0), (first, second));
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [1, 1]);
    for _ in 0..15 {
        tokio::time::sleep(PROCESS_LEASE / 10).await;
        beat(&meta, first).await.unwrap();
    }
    assert_eq!(*fenced.lock(), [second]);
    assert_eq!(placed(&meta, v).0, first);
    assert_eq!(placed(&meta, t), before, "what ran elsewhere is left alone");
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [2, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_process_that_is_silent_is_fenced_and_its_jobs_run_nowhere() {
    let (cluster, fenced) = leader(&TestStore::new()).await;
    let meta = Arc::clone(&cluster.meta);
    let compute = registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
    let frontend = registered(&meta, process(2, ProcessRole::Frontend, "f:1")).await;
    let t = cluster.created(table("t")).await;
    for _ in 0..15 {
        tokio::time::sleep(PROCESS_LEASE / 10).await;
        beat(&meta, frontend).await.unwrap();
    }
    assert_eq!(*fenced.lock(), [compute], "the frontend has told that it is there");
    assert_eq!(placed(&meta, t).0, 0);
    let again = registered(&meta, process(3, ProcessRole::Compute, "a:1")).await;
    assert_eq!(placed(&meta, t).0, again);
    cluster.read(&[t]).await;
}

#[tokio::test(start_paused = true)]
async fn another_leader_goes_on_with_the_processes_of_the_one_before() {
    let store = TestStore::new();
    let (cluster, _) = leader(&store).await;
    let compute = registered(&cluster.meta, process(1, ProcessRole::Compute, "a:1")).await;
    let t = cluster.created(table("t")).await;
    let before = placed(&cluster.meta, t);
    let fake = Arc::clone(&cluster.fake);
    cluster.meta.shutdown().await;
    drop(cluster);
    let (cluster, fenced) = leader_of(&store, fake).await;
    assert_eq!(placed(&cluster.meta, t), before, "a change of leader raises no generation");
    assert!(beat(&cluster.meta, compute).await.is_ok());
    let names = cluster.meta.processes().into_iter().map(|p| p.process.registration.address);
    assert_eq!(names.collect::<Vec<_>>(), ["a:1", "m:1"], "the leader before is fenced");
    cluster.insert(t).await;
    assert_eq!(placed(&cluster.meta, t), before, "nor later");
    assert!(fenced.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_read_waits_while_its_job_goes_to_another_process() {
    let (cluster, _) = leader(&TestStore::new()).await;
    let meta = Arc::clone(&cluster.meta);
    registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
    let t = cluster.created(table("t")).await;
    let v = cluster.created(view("v", &[t])).await;
    cluster.fake.behave(v, Behaviour { is_cut_off: true, ..Behaviour::default() });
    cluster.fake.insert(t).await.unwrap();
    let relations = [v];
    let reading = meta.read_epoch(&relations, None, true);
    let replaced = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        cluster.fake.behave(v, Behaviour::default());
        registered(&meta, process(2, ProcessRole::Compute, "a:1")).await;
    };
    let (epoch, ()) = tokio::join!(reading, replaced);
    assert_eq!(cluster.fake.value_at(v, epoch.unwrap()), 1);
}

/// A caller that gives up, a full store or a change of leader may leave any record of several unwritten.
#[tokio::test(start_paused = true)]
async fn what_ended_half_way_is_brought_to_its_end() {
    let (cluster, fenced) = leader(&TestStore::new()).await;
    let meta = Arc::clone(&cluster.meta);
    let append = async |entry| meta.shared.log().unwrap().apply(entry).await.map(drop).unwrap();
    let t = cluster.create(table("t")).await;
    let soon = Duration::from_secs(2);

    // Registered, and neither called nor given jobs.
    append(Entry::RegisterProcess(process(1, ProcessRole::Compute, "a:1"))).await;
    tokio::time::sleep(soon).await;
    let first = placed(&meta, t).0;
    assert_ne!(first, 0);
    assert_eq!(registered(&meta, process(1, ProcessRole::Compute, "a:1")).await, first);
    let v = cluster.created(view("v", &[t])).await;
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [1, 1]);

    // Registered at the address of another, which is not fenced.
    append(Entry::RegisterProcess(process(2, ProcessRole::Compute, "a:1"))).await;
    tokio::time::sleep(soon).await;
    assert_eq!(*fenced.lock(), [first]);
    let second = placed(&meta, t).0;
    assert!(second != first && second != 0);
    assert_eq!(placed(&meta, v).0, second);

    // Fenced, and its jobs nowhere. A relation of a session is left of it.
    let third = registered(&meta, process(3, ProcessRole::Compute, "b:1")).await;
    let session = registered(&meta, process(4, ProcessRole::Frontend, "f:1")).await;
    let of_session = Relation { ephemeral: session, ..table("of_session") };
    cluster.create(of_session).await;
    let incarnations = vec![second, session];
    append(Entry::FenceProcess(FenceProcess { incarnations })).await;
    tokio::time::sleep(soon).await;
    assert_eq!([placed(&meta, t).0, placed(&meta, v).0], [third, third]);
    assert!(meta.catalog().by_name("public", "of_session").is_none());
    assert_eq!(*fenced.lock(), [first, second, session]);
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [2, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_drained_process_has_no_jobs_until_that_is_undone() {
    let (cluster, _) = leader(&TestStore::new()).await;
    let meta = Arc::clone(&cluster.meta);
    let first = registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
    let frontend = registered(&meta, process(9, ProcessRole::Frontend, "f:1")).await;
    let t = cluster.created(table("t")).await;
    let v = cluster.created(view("v", &[t])).await;
    let message = |error: CallError| error.to_string();
    let only = meta.drain(first, false, None).await.map_err(message).unwrap_err();
    assert!(only.contains("the only one"), "{only}");
    let second = registered(&meta, process(2, ProcessRole::Compute, "b:1")).await;
    assert_eq!((placed(&meta, t).0, placed(&meta, v).0), (first, second));
    for (worker, part) in [(frontend, "no compute process"), (777, "there is no process 777")] {
        let error = meta.drain(worker, false, None).await.map_err(message).unwrap_err();
        assert!(error.contains(part), "{error}");
        let error = meta.move_job(v, worker, None).await.map_err(message).unwrap_err();
        assert!(error.contains(part), "{error}");
    }

    let generation = placed(&meta, t).1;
    assert_eq!(meta.drain(first, false, None).await.unwrap().jobs, [t.0]);
    assert_eq!(placed(&meta, t), (second, Generation(generation.0 + 1)));
    let w = cluster.created(view("w", &[t])).await;
    assert_eq!(placed(&meta, w).0, second);
    let error = meta.move_job(v, first, None).await.map_err(message).unwrap_err();
    assert!(error.contains("is drained"), "{error}");
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v, w]).await, [1, 1, 1]);
    // It is drained for whoever leads next, too.
    let state = meta.state_for_tests();
    let again = MetaState::from_snapshot(state.to_snapshot());
    assert!(again.processes.is_drained(first) && !again.processes.is_drained(second));

    assert!(
        !meta.drain(first, true, None).await.unwrap().jobs.is_empty(),
        "it takes its share again"
    );
    let third = registered(&meta, process(3, ProcessRole::Compute, "c:1")).await;
    assert_eq!(placed(&meta, v).0, third, "it has had nothing to do");
    assert_eq!(meta.move_job(v, first, None).await.unwrap().jobs, [v.0]);
    assert_eq!(placed(&meta, v).0, first);
    assert_eq!(meta.move_job(v, first, None).await.unwrap().jobs, [0u32; 0], "it is there already");
    let error = meta.move_job(RelationId(999), third, None).await.map_err(message).unwrap_err();
    assert!(error.contains("there is no job 999"), "{error}");
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v, w]).await, [2, 2, 2]);
}

#[tokio::test(start_paused = true)]
async fn no_jobs_are_sent_to_a_process_that_does_not_answer() {
    let (cluster, _) = leader(&TestStore::new()).await;
    let meta = Arc::clone(&cluster.meta);
    let first = registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
    let t = cluster.created(table("t")).await;
    let second = registered(&meta, process(2, ProcessRole::Compute, "b:1")).await;
    let message = |error: CallError| error.to_string();
    // Both are there, and the leader does not reach them.
    cluster.fake.set_stream(Stream::Broken);
    beat(&meta, first).await.unwrap();
    beat(&meta, second).await.unwrap();
    let error = meta.move_job(t, second, None).await.map_err(message).unwrap_err();
    assert!(error.contains(&format!("process {second} does not answer")), "{error}");
    let error = meta.drain(first, false, None).await.map_err(message).unwrap_err();
    assert!(error.contains(&format!("process {second} does not answer")), "{error}");
    assert!(!meta.state_for_tests().processes.is_drained(first));
    cluster.fake.set_stream(Stream::Sound);
    // It answers, and has told nothing for a while.
    tokio::time::sleep(PROCESS_LEASE - Duration::from_secs(1)).await;
    let error = meta.move_job(t, second, None).await.map_err(message).unwrap_err();
    assert!(error.contains("does not answer"), "{error}");
    beat(&meta, first).await.unwrap();
    beat(&meta, second).await.unwrap();
    assert_eq!(meta.move_job(t, second, None).await.unwrap().jobs, [t.0]);
    assert_eq!(meta.drain(second, false, None).await.unwrap().jobs, [t.0]);
}

/// What was written when the store refused it is told of, and who is silent.
#[tokio::test(start_paused = true)]
async fn what_goes_wrong_in_a_collection_is_told() {
    let (cluster, _) = leader(&TestStore::new()).await;
    let meta = Arc::clone(&cluster.meta);
    let compute = registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
    beat(&meta, compute).await.unwrap();
    assert_eq!(meta.collection(true).await.unwrap().troubles, [""; 0]);
    cluster.store.refuse_lists(true);
    meta.apply(Entry::FenceProcess(FenceProcess { incarnations: vec![compute] })).await.unwrap();
    let troubles = meta.collection(true).await.unwrap().troubles;
    assert!(troubles.iter().any(|t| t.contains("were not swept this time: ")), "{troubles:?}");
    cluster.store.refuse_lists(false);
    assert_eq!(meta.collection(true).await.unwrap().troubles, [""; 0]);
    let compute = registered(&meta, process(2, ProcessRole::Compute, "a:1")).await;
    tokio::time::sleep(PROCESS_LEASE - Duration::from_secs(1)).await;
    let report = meta.collection(true).await.unwrap();
    let silent = format!("process {compute} has told nothing for ");
    assert!(report.troubles.iter().any(|t| t.contains(&silent)), "{report:?}");
}

/// One that had stopped goes on with what it had begun, and ends.
#[tokio::test(start_paused = true)]
async fn what_a_fenced_process_writes_late_is_collected_when_another_takes_its_place() {
    let (cluster, _) = leader(&TestStore::new()).await;
    let meta = Arc::clone(&cluster.meta);
    let compute = registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
    meta.apply(Entry::FenceProcess(FenceProcess { incarnations: vec![compute] })).await.unwrap();
    meta.collection(true).await.unwrap();
    let late = Path::from(format!("data/{compute}/1.seg"));
    cluster.store.put(&late, "late".into()).await.unwrap();
    registered(&meta, process(2, ProcessRole::Compute, "a:1")).await;
    meta.collection(true).await.unwrap();
    assert!(cluster.store.head(&late).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn garbage_is_collected_when_an_operator_asks() {
    let hour = Duration::from_secs(3600);
    let store = TestStore::new();
    let options = MetaOptions {
        env: EnvHandle::new(TestEnv::new(store.requests() + 1)),
        alone: false,
        gc: GcOptions { period: hour, ..GcOptions::default() },
        ..MetaOptions::new(Arc::clone(&store) as _)
    };
    let meta = Meta::open(options).await.unwrap();
    let connect = Connections { worker: Arc::default(), fenced: Arc::default() };
    meta.start_cluster(Arc::new(connect)).await.unwrap();
    let began = tokio::time::Instant::now();
    for run in [true, false, true] {
        let report = meta.collection(run).await.unwrap();
        assert_eq!((report.garbage, report.holders.len()), (0, 1));
    }
    assert!(began.elapsed() < hour, "nobody waits for the next round by itself");
}

pub async fn take_lock(meta: &Meta, process: u64, key: i64) -> Result<TakeLockAnswer, CallError> {
    let session = Some(SessionId { process, pid: 7 });
    let lock = Some(advisory::to_proto(Key::One(key), Mode::Exclusive));
    let request = TakeLockRequest { session, lock, waits: true, number: key as u64 };
    MetaControl::take_lock(meta, request).await
}

/// One that has slept meanwhile, for example: its successor gives the same lock to somebody else.
#[tokio::test(start_paused = true)]
async fn a_leader_that_has_been_succeeded_gives_no_locks() {
    let store = TestStore::new();
    let (first, _) = leader(&store).await;
    let frontend = registered(&first.meta, process(1, ProcessRole::Frontend, "f:1")).await;
    assert!(take_lock(&first.meta, frontend, 1).await.unwrap().taken);
    let term = first.meta.term();
    let (second, _) = leader(&store).await;
    tokio::time::advance(LEADER_LEASE).await;
    let refused = take_lock(&first.meta, frontend, 2).await;
    assert!(matches!(refused, Err(CallError::Sql(_))), "{refused:?}");
    let given = take_lock(&second.meta, frontend, 2).await.unwrap();
    assert!(given.taken && given.term > term, "{given:?} {term}");
}

/// The locks of the leader before are lost, and their holders do not know it yet.
#[tokio::test(start_paused = true)]
async fn a_new_leader_gives_no_locks_before_others_know_of_it() {
    let (cluster, _) = leader(&TestStore::new()).await;
    let frontend = registered(&cluster.meta, process(1, ProcessRole::Frontend, "f:1")).await;
    let from = tokio::time::Instant::now() + LEADER_LEASE;
    cluster.meta.give_locks_from(from);
    assert!(take_lock(&cluster.meta, frontend, 1).await.unwrap().taken);
    assert!(tokio::time::Instant::now() >= from);
}

/// Each address is a worker of its own.
struct Places([(&'static str, Arc<Fake>); 2]);

impl Connect for Places {
    fn compute(&self, address: &str, _: u64) -> Result<Arc<dyn ComputeService>, SqlError> {
        let place = self.0.iter().find(|(at, _)| *at == address);
        let (_, worker) = place.ok_or_else(|| SqlError::internal("nobody is there"))?;
        Ok(Arc::clone(worker) as _)
    }

    fn compactor(&self, _: &str, _: u64) -> Result<Arc<dyn CompactorService>, SqlError> {
        Ok(Arc::new(NoCompactor))
    }

    fn fenced(&self, _: u64) {}
}

/// From now on this process tells that it is there.
pub fn beats(meta: &Arc<Meta>, incarnation: u64) -> AbortOnDropHandle<()> {
    let meta = Arc::clone(meta);
    AbortOnDropHandle::new(tokio::spawn(async move {
        while beat(&meta, incarnation).await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }))
}

/// A leader of two processes that beat, each a worker of its own.
struct TwoPlaces {
    meta: Arc<Meta>,
    workers: [Arc<Fake>; 2],
    processes: [u64; 2],
    /// It was on the first.
    table: RelationId,
    running: Vec<AbortOnDropHandle<()>>,
}

impl TwoPlaces {
    async fn new() -> TwoPlaces {
        let options = MetaOptions {
            env: EnvHandle::new(TestEnv::new(1)),
            alone: false,
            roles: vec![ProcessRole::Meta],
            address: "m:1".into(),
            ..MetaOptions::new(TestStore::new() as _)
        };
        let meta = Meta::open(options).await.unwrap();
        let workers = [Arc::<Fake>::default(), Arc::<Fake>::default()];
        workers.iter().for_each(|worker| worker.attach(&meta));
        let [a, b] = workers.clone();
        meta.start_cluster(Arc::new(Places([("a:1", a), ("b:1", b)]))).await.unwrap();
        let (table_id, running) = (RelationId(0), Vec::new());
        let mut places = TwoPlaces { meta, workers, processes: [0; 2], table: table_id, running };
        let first = places.register(1, "a:1").await;
        places.table = places.create(table("t")).await;
        let second = places.register(2, "b:1").await;
        places.processes = [first, second];
        assert_eq!(placed(&places.meta, places.table).0, first);
        places
    }

    /// A process that tells that it is there.
    async fn register(&mut self, nonce: u64, address: &str) -> u64 {
        let incarnation =
            registered(&self.meta, process(nonce, ProcessRole::Compute, address)).await;
        self.running.push(beats(&self.meta, incarnation));
        incarnation
    }

    async fn create(&self, relation: Relation) -> RelationId {
        let options = CreateOptions { table_count: 1, ..CreateOptions::default() };
        let id = self.meta.create_relation(relation, options).await.unwrap();
        self.meta.wait_created(id, &Default::default()).await.unwrap();
        id
    }

    /// The leader's calls reach these workers no more, a row is inserted, and a minute passes.
    async fn cut_off(&mut self, workers: &[usize]) {
        self.cut_off_for(workers, Duration::from_secs(60)).await;
    }

    async fn cut_off_for(&mut self, workers: &[usize], lasts: Duration) {
        workers.iter().for_each(|n| self.workers[*n].set_stream(Stream::CutOff));
        let (worker, table) = (Arc::clone(&self.workers[0]), self.table);
        let inserting = tokio::spawn(async move { drop(worker.insert(table).await) });
        self.running.push(AbortOnDropHandle::new(inserting));
        tokio::time::sleep(lasts).await;
    }

    fn is_live(&self, incarnation: u64) -> bool {
        self.meta.state_for_tests().processes.is_live(incarnation)
    }
}

/// Cut off one way only: it tells that it is there.
#[tokio::test(start_paused = true)]
async fn the_jobs_of_a_process_that_no_call_reaches_go_to_one_that_answers() {
    let cases: [(&[usize], bool); 3] = [(&[], false), (&[0], true), (&[0, 1], false)];
    for (cut_off, is_fenced) in cases {
        let mut places = TwoPlaces::new().await;
        places.cut_off(cut_off).await;
        let [first, second] = places.processes;
        assert_eq!(places.is_live(first), !is_fenced, "{cut_off:?}");
        assert!(places.is_live(second), "{cut_off:?}");
        let expected = if is_fenced { second } else { first };
        assert_eq!(placed(&places.meta, places.table).0, expected, "{cut_off:?}");
    }
}

/// One call that fails is enough, and nobody has to call the other one: the leader asks them. A call as it is made by a
/// server fails after 4 s, which count.
#[tokio::test(start_paused = true)]
async fn a_process_that_no_call_reaches_is_fenced_within_seconds() {
    for (seconds, is_fenced) in [(5, false), (9, true)] {
        let mut places = TwoPlaces::new().await;
        places.cut_off_for(&[0], Duration::from_secs(seconds)).await;
        let [first, second] = places.processes;
        assert_eq!([first, second].map(|id| places.is_live(id)), [!is_fenced, true], "{seconds}");
        let expected = if is_fenced { second } else { first };
        assert_eq!(placed(&places.meta, places.table).0, expected, "{seconds}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_is_started_again_where_no_call_arrives_has_no_jobs_until_it_answers() {
    let mut places = TwoPlaces::new().await;
    places.cut_off(&[0]).await;
    let [_, second] = places.processes;
    let view = places.create(view("v", &[places.table])).await;
    let again = places.register(3, "a:1").await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(places.is_live(again));
    let where_jobs_are =
        |places: &TwoPlaces| [places.table, view].map(|id| placed(&places.meta, id).0);
    assert_eq!(where_jobs_are(&places), [second, second]);
    places.workers[0].set_stream(Stream::Sound);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(where_jobs_are(&places), [second, again]);
}
