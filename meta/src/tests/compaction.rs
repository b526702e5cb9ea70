//! Compactions on other processes: who stalls loses the task, and what came too late is garbage.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use millrace_common::{EnvHandle, Epoch, JobId, RelationId, SqlError};
use millrace_rpc::control::{Heartbeat, MetaControl, TableLookups};
use millrace_rpc::log::{EditVersion, Entry, MoveParts, ProcessRole};
use millrace_rpc::services::{CompactionTask, CompactorService, ComputeService, LivePart};
use millrace_rpc::version::{RunMeta, VersionEdit};
use millrace_storage::read_counts::{READ_BURST, TableReads};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::cluster::{beat, process, registered};
use super::fake::{Behaviour, Fake, Prepared};
use super::store::TestStore;
use super::{TestEnv, table};
use crate::cluster::Connect;
use crate::compact::ReadsOfTable;
use crate::members::PROCESS_LEASE;
use crate::meta::{CreateOptions, Meta};
use crate::options::MetaOptions;

/// A process that compacts; its address says how.
struct Compacting {
    incarnation: u64,
    address: String,
    /// The horizons of the tasks that each address was given.
    given: Given,
}

type Given = Arc<Mutex<BTreeMap<String, Vec<Epoch>>>>;

#[async_trait]
impl CompactorService for Compacting {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError> {
        let given = {
            let mut given = self.given.lock();
            let of_this = given.entry(self.address.clone()).or_default();
            of_this.push(task.horizon);
            of_this.len()
        };
        if self.address == "stalls" || self.address == "late" && given > 1 {
            return std::future::pending().await;
        }
        let run = RunMeta {
            run_id: self.incarnation << 32 | task.task_id,
            level: task.target_level,
            object: format!("data/{}/{}.seg", self.incarnation, task.task_id),
            ..run(task.inputs[0].table_id, task.inputs.len() as u64)
        };
        let mut remove_runs: Vec<u64> = task.inputs.iter().map(|run| run.run_id).collect();
        if self.address == "late" {
            // As if another had replaced one meanwhile.
            remove_runs[0] = 1;
        }
        Ok(VersionEdit { add_runs: vec![run], remove_runs, ..VersionEdit::default() })
    }

    async fn copy_parts(&self, _: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        Err(SqlError::unsupported("moving parts"))
    }
}

struct Connections {
    worker: Arc<Fake>,
    given: Given,
}

impl Connect for Connections {
    fn compute(&self, _: &str, _: u64) -> Result<Arc<dyn ComputeService>, SqlError> {
        Ok(Arc::clone(&self.worker) as _)
    }

    fn compactor(
        &self,
        address: &str,
        incarnation: u64,
    ) -> Result<Arc<dyn CompactorService>, SqlError> {
        let (address, given) = (address.to_owned(), Arc::clone(&self.given));
        Ok(Arc::new(Compacting { incarnation, address, given }))
    }

    fn fenced(&self, _: u64) {}
}

/// A run of one key, of the n-th commit.
fn run(table_id: u32, n: u64) -> RunMeta {
    RunMeta {
        table_id,
        length: 10,
        rows: 1,
        min_key: vec![0, 0, 1].into(),
        max_key: vec![0, 0, 1].into(),
        min_epoch: n,
        max_epoch: n,
        sequence: n,
        ..RunMeta::default()
    }
}

async fn leader(
    store: &Arc<TestStore>,
    env: &EnvHandle,
    table_reads: Option<ReadsOfTable>,
    connect: Connections,
) -> Arc<Meta> {
    let options = MetaOptions {
        env: env.clone(),
        alone: false,
        roles: vec![ProcessRole::Meta],
        address: "m:1".into(),
        table_reads,
        ..MetaOptions::new(Arc::clone(store) as _)
    };
    let meta = Meta::open(options).await.unwrap();
    connect.worker.attach(&meta);
    meta.start_cluster(Arc::new(connect)).await.unwrap();
    meta
}

struct Test {
    store: Arc<TestStore>,
    env: EnvHandle,
    table_reads: Option<ReadsOfTable>,
    meta: Arc<Meta>,
    worker: Arc<Fake>,
    given: Given,
    compute: u64,
    table: JobId,
    beating: Vec<AbortOnDropHandle<()>>,
}

impl Test {
    /// A table on a compute process that beats. All state tables count as read often.
    async fn new() -> Test {
        Test::with(Some(Arc::new(|_, _| TableReads::MANY))).await
    }

    async fn with(table_reads: Option<ReadsOfTable>) -> Test {
        let (store, worker) = (TestStore::new(), Arc::<Fake>::default());
        let (env, given) = (EnvHandle::new(TestEnv::new(1)), Given::default());
        let connect = Connections { worker: Arc::clone(&worker), given: Arc::clone(&given) };
        let meta = leader(&store, &env, table_reads.clone(), connect).await;
        let compute = registered(&meta, process(1, ProcessRole::Compute, "compute")).await;
        let (table_id, beating) = (RelationId(0), Vec::new());
        let mut test = Test {
            store,
            env,
            table_reads,
            meta,
            worker,
            given,
            compute,
            table: table_id,
            beating,
        };
        test.beats(compute);
        let options = CreateOptions { table_count: 1, ..CreateOptions::default() };
        test.table = test.meta.create_relation(table("t"), options).await.unwrap();
        test.meta.wait_created(test.table, &Default::default()).await.unwrap();
        test
    }

    /// Another one takes over from a leader that is lost. Nobody has told it anything.
    async fn next_leader(&mut self) {
        self.beating.clear();
        self.meta.shutdown().await;
        let (worker, given) = (Arc::clone(&self.worker), Arc::clone(&self.given));
        let connect = Connections { worker, given };
        self.meta = leader(&self.store, &self.env, self.table_reads.clone(), connect).await;
    }

    async fn compactor(&self, nonce: u64, address: &str) -> u64 {
        registered(&self.meta, process(nonce, ProcessRole::Compactor, address)).await
    }

    /// From now on this process tells that it is there.
    fn beats(&mut self, incarnation: u64) {
        let meta = Arc::clone(&self.meta);
        let beating = tokio::spawn(async move {
            while beat(&meta, incarnation).await.is_ok() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
        self.beating.push(AbortOnDropHandle::new(beating));
    }

    /// The table has runs that are worth merging, if it is read.
    async fn add_runs(&self) {
        self.add_runs_over(None).await;
    }

    /// The same above a run of level 1 of so many bytes.
    async fn add_runs_over(&self, bytes: Option<u64>) {
        let state = self.meta.state_for_tests();
        let table_id = state.relations[&self.table].first_table_id;
        let numbered = |n: u64| RunMeta {
            run_id: self.compute << 32 | n,
            object: format!("data/{}/{n}.seg", self.compute),
            ..run(table_id, n)
        };
        let below = bytes.map(|length| RunMeta { length, level: 1, ..numbered(0) });
        let add_runs = (1..=4).map(numbered).chain(below).collect();
        let edit = VersionEdit { add_runs, ..VersionEdit::default() };
        let entry = EditVersion { job: self.table.0, generation: 0, edit, horizon: 0 };
        self.meta.apply(Entry::EditVersion(entry)).await.unwrap();
    }

    fn given_to(&self, address: &str) -> usize {
        self.given.lock().get(address).map_or(0, Vec::len)
    }

    async fn until(&self, what: impl Fn(&Test) -> bool) {
        let reached = async {
            while !what(self) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(600), reached).await.unwrap();
    }

    /// Who has written the table's only run; `None`: it has several.
    fn merged_by(&self) -> Option<u64> {
        let state = self.meta.state_for_tests();
        let [run] = &state.jobs[&self.table].version.runs[..] else { return None };
        Some(run.run_id >> 32)
    }
}

#[tokio::test(start_paused = true)]
async fn a_compactor_that_falls_silent_loses_its_task_to_another() {
    let mut test = Test::new().await;
    let stalled = test.compactor(2, "stalls").await;
    test.add_runs().await;
    test.until(|t| t.given_to("stalls") == 1).await;
    let other = test.compactor(3, "merges").await;
    test.beats(other);
    let since = Instant::now();
    test.until(|t| t.merged_by() == Some(other)).await;
    assert!(since.elapsed() < PROCESS_LEASE, "{:?}: before {stalled} is fenced", since.elapsed());
    assert_eq!((test.given_to("merges"), test.given_to("compute")), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn where_the_only_compactor_is_silent_the_process_of_the_job_compacts() {
    let test = Test::new().await;
    test.compactor(2, "stalls").await;
    test.add_runs().await;
    test.until(|t| t.given_to("stalls") == 1).await;
    let since = Instant::now();
    test.until(|t| t.merged_by() == Some(t.compute)).await;
    assert!(since.elapsed() < PROCESS_LEASE);
}

#[tokio::test(start_paused = true)]
async fn where_the_store_does_not_answer_the_only_compactor_the_process_of_the_job_compacts() {
    let mut test = Test::new().await;
    let cut_off = test.compactor(2, "stalls").await;
    let (meta, began) = (Arc::clone(&test.meta), Instant::now());
    let beating = tokio::spawn(async move {
        loop {
            let store_wait_ms = began.elapsed().as_millis() as u64;
            let told = Heartbeat { incarnation: cut_off, store_wait_ms, ..Heartbeat::default() };
            meta.beat(told).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    test.beating.push(AbortOnDropHandle::new(beating));
    test.add_runs().await;
    test.until(|t| t.merged_by() == Some(t.compute)).await;
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());
    assert_eq!(test.given_to("stalls"), 1, "it is given no other");
}

#[tokio::test(start_paused = true)]
async fn a_compactor_that_only_tells_of_itself_loses_its_task() {
    let mut test = Test::new().await;
    let stalled = test.compactor(2, "stalls").await;
    test.beats(stalled);
    test.add_runs().await;
    test.until(|t| t.given_to("stalls") == 1).await;
    let other = test.compactor(3, "merges").await;
    test.beats(other);
    let since = Instant::now();
    test.until(|t| t.merged_by() == Some(other)).await;
    assert!(since.elapsed() <= Duration::from_secs(65), "{:?}", since.elapsed());
    assert!(test.meta.state_for_tests().processes.is_live(stalled));
}

/// So that it does not ask the store for what it has in its caches: of runs that another process has written.
#[tokio::test(start_paused = true)]
async fn the_process_of_the_job_prepares_new_runs_before_the_log_names_them() {
    for never_prepares in [false, true] {
        let mut test = Test::new().await;
        test.worker.behave(test.table, Behaviour { never_prepares, ..Behaviour::default() });
        let other = test.compactor(2, "merges").await;
        test.beats(other);
        test.add_runs().await;
        let since = Instant::now();
        test.until(|t| t.merged_by() == Some(other)).await;
        // It is for speed only: who does not answer holds the result up for a while at most.
        assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
        let runs = vec![other << 32 | 1];
        let asked = Prepared { job: test.table, runs, is_logged: false };
        assert_eq!(test.worker.prepared(), [asked], "{never_prepares}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_has_written_the_new_runs_has_nothing_to_prepare() {
    let test = Test::new().await;
    test.add_runs().await;
    test.until(|t| t.merged_by() == Some(t.compute)).await;
    let asked = test.worker.prepared();
    assert!(asked.is_empty(), "{asked:?}");
}

/// The leader gives up for a process that lives what it has handed over too late.
#[tokio::test(start_paused = true)]
async fn a_result_that_comes_too_late_is_refused_and_collected() {
    let mut test = Test::new().await;
    let late = test.compactor(2, "late").await;
    test.beats(late);
    test.add_runs().await;
    let is_gone = |t: &Test| {
        let state = t.meta.state_for_tests();
        let name = format!("data/{late}/1.seg");
        state.objects.is_garbage(&name) || state.objects.is_deleted(&name)
    };
    test.until(is_gone).await;
    let state = test.meta.state_for_tests();
    assert_eq!(state.jobs[&test.table].version.runs.len(), 4, "it changes nothing");
    assert!(state.processes.is_live(late));
}

/// Lookups are told with the heartbeats of all processes; a table that nobody looks up is left as it is.
#[tokio::test(start_paused = true)]
async fn a_table_is_merged_when_it_has_been_looked_up() {
    let mut test = Test::with(None).await;
    let compactor = test.compactor(2, "merges").await;
    test.beats(compactor);
    let told = async |incarnation, keys| {
        let table = test.meta.state_for_tests().relations[&test.table].first_table_id;
        let lookups = vec![TableLookups { job: test.table.0, table, keys, cold: keys }];
        let heartbeat = Heartbeat { incarnation, lookups, ..Heartbeat::default() };
        test.meta.beat(heartbeat).await.unwrap();
    };
    // Of a process that has never told any nothing is known.
    told(test.compute, 0).await;
    test.add_runs_over(Some(1 << 20)).await;
    told(test.compute, READ_BURST / 2).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(test.given_to("merges"), 0, "too few have looked it up");
    let frontend = registered(&test.meta, process(3, ProcessRole::Frontend, "f:1")).await;
    told(frontend, READ_BURST / 2).await;
    test.until(|t| t.merged_by() == Some(compactor)).await;
}

/// An epoch that is older than `snapshot_retention`, and the horizon of a compaction beside a frontend that does or does
/// not read as of it.
async fn horizon_beside(is_read: bool) -> (Epoch, Epoch) {
    let mut test = Test::new().await;
    test.meta.set_setting("snapshot_retention", Some("30s")).await.unwrap();
    let compactor = test.compactor(2, "merges").await;
    test.beats(compactor);
    let frontend = registered(&test.meta, process(3, ProcessRole::Frontend, "f:1")).await;
    let epoch = test.meta.state_for_tests().epoch;
    for _ in 0..60 {
        let reads_from = is_read.then_some(epoch.0);
        let heartbeat = Heartbeat { incarnation: frontend, reads_from, ..Heartbeat::default() };
        test.meta.beat(heartbeat).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    test.add_runs().await;
    test.until(|t| t.given_to("merges") == 1).await;
    let horizon = test.given.lock()["merges"][0];
    (epoch, horizon)
}

#[tokio::test(start_paused = true)]
async fn a_compaction_keeps_the_versions_that_a_long_transaction_reads() {
    let (epoch, horizon) = horizon_beside(true).await;
    assert_eq!(horizon, epoch);
    let (epoch, horizon) = horizon_beside(false).await;
    assert!(horizon > epoch, "nobody needs them: {horizon} {epoch}");
}

/// Whoever has just begun to lead knows of no reads, and of whoever comes from then on that it has none from before.
#[tokio::test(start_paused = true)]
async fn a_compaction_keeps_all_versions_until_a_new_leader_knows_what_processes_read() {
    let mut test = Test::new().await;
    let compactor = test.compactor(2, "merges").await;
    let frontend = registered(&test.meta, process(3, ProcessRole::Frontend, "f:1")).await;
    test.next_leader().await;
    for id in [test.compute, compactor] {
        test.beats(id);
    }
    test.add_runs().await;
    test.until(|t| t.given_to("merges") == 1).await;
    assert_eq!(test.given.lock()["merges"], [Epoch::ZERO]);
    test.until(|t| t.merged_by().is_some()).await;
    beat(&test.meta, frontend).await.unwrap();
    let began = Instant::now();
    registered(&test.meta, process(4, ProcessRole::Frontend, "g:1")).await;
    test.add_runs().await;
    test.until(|t| t.given_to("merges") == 2).await;
    assert!(test.given.lock()["merges"][1] > Epoch::ZERO);
    assert!(began.elapsed() < PROCESS_LEASE, "it has not been fenced");
}
