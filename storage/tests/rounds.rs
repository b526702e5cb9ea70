//! What state access costs in store requests and dependent rounds, whatever the number of keys: the
//! hardware-independent form of "never one key at a time" (docs/design.md §14).

#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
#![allow(clippy::unwrap_used)] // a test fails where it does not find what it made

#[path = "common/numbers.rs"]
mod numbers;

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{BinaryArray, Int64Array, RecordBatch};
use bytes::Bytes;
use futures::TryStreamExt;
use millrace_common::access::AccessClass;
use millrace_common::{DeltaChunk, Epoch, JobId, RelationId};
use millrace_rpc::version::{JobVersion, RunMeta, SliceRef};
use millrace_storage::cache::{Priority, ReadLimits};
use millrace_storage::sim::{Profile, SimStore};
use millrace_storage::{
    JobStore, Lookup, ScanOptions, StateStore, StoreOptions, TableDesc, TableWriter,
};

use numbers::{TABLE, desc, schema};

fn keys(from: u64, to: u64) -> BinaryArray {
    let key = |i: u64| [&[0, (i % 256) as u8][..], &i.to_be_bytes()].concat();
    BinaryArray::from_iter_values((from..to).map(key))
}

fn values(from: u64, to: u64) -> RecordBatch {
    let n = Int64Array::from_iter_values(from as i64..to as i64);
    RecordBatch::try_new(schema(), vec![Arc::new(n)]).unwrap()
}

fn write(writer: &mut TableWriter, from: u64, to: u64) {
    writer.write(keys(from, to), None, values(from, to));
}

/// Slow enough that parallel requests overlap, on a machine that is busy with other things too.
const STEADY: Profile = Profile {
    p50: Duration::from_millis(150),
    p99: Duration::from_millis(150),
    ..Profile::INSTANT
};

fn sim() -> Arc<SimStore> {
    Arc::new(SimStore::in_memory(STEADY, 1))
}

async fn open(store: &Arc<SimStore>, incarnation: u64) -> Arc<StateStore> {
    let options = StoreOptions::new(Arc::clone(store) as _, incarnation);
    StateStore::open(options).await.unwrap()
}

async fn open_job(store: &StateStore, job: u32, version: &JobVersion) -> Arc<JobStore> {
    let job: JobId = RelationId(job);
    store.open_job(job, vec![desc(AccessClass::PointUpdate)], version).await.unwrap()
}

/// Writes, commits and publishes some keys; the slices, as the log would keep them.
async fn commit(
    job: &Arc<JobStore>,
    writer: &mut TableWriter,
    epoch: u64,
    keys: (u64, u64),
) -> Vec<SliceRef> {
    write(writer, keys.0, keys.1);
    commit_open(job, writer, epoch).await
}

/// The same of what is written already.
async fn commit_open(job: &Arc<JobStore>, writer: &mut TableWriter, epoch: u64) -> Vec<SliceRef> {
    let persisted = job.persist(epoch, writer.seal().unwrap()).await.unwrap();
    let at_epoch = |s: &SliceRef| SliceRef { epoch, ..s.clone() };
    let slices = persisted.slices.iter().map(at_epoch).collect();
    job.publish(Epoch(epoch), persisted);
    slices
}

/// Six runs of keys of their own, which all cover the whole range: filters decide, and where one is wrong asking all at
/// once reads hardly more.
#[tokio::test]
async fn a_cold_read_of_thousands_of_keys_costs_two_rounds() {
    let sim = sim();
    let store = open(&sim, 1).await;
    let job = open_job(&store, 20000, &JobVersion::default()).await;
    let mut writer = job.writer(TABLE).unwrap();
    let mut version = JobVersion::default();
    for i in 0..6 {
        commit(&job, &mut writer, i + 1, (i * 20_000, (i + 1) * 20_000)).await;
        let edit = job.flush().await.unwrap();
        job.apply_edit(&edit);
        version.runs.extend(edit.add_runs);
    }
    assert!(version.runs.len() >= 6);

    let cold = open(&sim, 2).await;
    let job = open_job(&cold, 20000, &version).await;
    let writer = job.writer(TABLE).unwrap();
    let before = sim.stats();
    let asked = BinaryArray::from_iter_values((0..4_000u64).map(|i| {
        let key = i * 31;
        [&[0, (key % 256) as u8][..], &key.to_be_bytes()].concat()
    }));
    let found = writer.multi_get(asked.clone()).wait().await.unwrap();
    assert_eq!(found.len(), 120_000usize.div_ceil(31));
    let cost = sim.stats();
    assert!(cost.rounds - before.rounds <= 2, "{} rounds", cost.rounds - before.rounds);
    assert!(cost.gets - before.gets <= 40, "{} requests for 4000 keys", cost.gets - before.gets);

    let again = writer.multi_get(asked);
    assert!(matches!(again, Lookup::Ready(_)), "all blocks are in memory now");
    assert_eq!(sim.stats().gets, cost.gets);
}

/// A slice of the tail says of its keys whether they are new: where they are, there are no old rows to look for.
#[tokio::test]
async fn a_change_of_new_keys_is_read_without_a_lookup() {
    let sim = sim();
    let table = || vec![TableDesc { relation: true, ..desc(AccessClass::PointUpdate) }];
    let store = open(&sim, 1).await;
    let version = JobVersion::default();
    let job = store.open_job(RelationId(20000), table(), &version).await.unwrap();
    let mut writer = job.writer(TABLE).unwrap();
    commit(&job, &mut writer, 1, (0, 20_000)).await;
    let edit = job.flush().await.unwrap();
    job.apply_edit(&edit);
    let mut version = JobVersion { runs: edit.add_runs, epoch: 3, ..JobVersion::default() };

    writer.write_new(keys(20_000, 20_010), values(0, 10));
    version.tail.extend(commit_open(&job, &mut writer, 2).await);
    writer.write(keys(0, 10), None, values(100, 110));
    version.tail.extend(commit_open(&job, &mut writer, 3).await);

    let change = async |incarnation, from, to| {
        let cold = open(&sim, incarnation).await;
        let job = cold.open_job(RelationId(20000), table(), &version).await.unwrap();
        let before = sim.stats();
        let changes = job.changes(TABLE, Epoch(from), Epoch(to), 0..256);
        let changes: Vec<DeltaChunk> = changes.try_collect().await.unwrap();
        let cost = sim.stats();
        let rows: usize = changes.iter().map(DeltaChunk::num_rows).sum();
        (rows, cost.rounds - before.rounds, cost.gets - before.gets)
    };
    assert_eq!(change(2, 1, 2).await, (10, 0, 0));
    let (rows, rounds, gets) = change(3, 2, 3).await;
    assert_eq!(rows, 20, "old rows and new ones");
    assert!(rounds > 0 && gets > 0, "{gets} requests in {rounds} rounds");
    // A key that was new may have been changed since.
    let (rows, _, gets) = change(4, 1, 3).await;
    assert_eq!(rows, 30);
    assert!(gets > 0);
}

/// Index and filter of a large run are read by partition, of which the run's description tells: how much one key reads
/// does not grow with the run, and what is kept of indexes stays within its budget.
#[tokio::test]
async fn a_key_of_a_large_run_costs_a_partition_and_a_block() {
    const PARTITION: u64 = 8 << 10;
    const BUDGET: u64 = 48 << 10;
    const KEYS: u64 = 60_000;
    let sim = sim();
    let open = async |incarnation| {
        let mut options = StoreOptions::new(Arc::clone(&sim) as _, incarnation);
        options.partition_bytes = Some(PARTITION as usize);
        options.cache.index_bytes = BUDGET as usize;
        StateStore::open(options).await.unwrap()
    };
    let job = open_job(&*open(1).await, 20000, &JobVersion::default()).await;
    let mut writer = job.writer(TABLE).unwrap();
    commit(&job, &mut writer, 1, (0, KEYS)).await;
    let edit = job.flush().await.unwrap();
    let version = JobVersion { runs: edit.add_runs, ..JobVersion::default() };
    let [run] = &version.runs[..] else { panic!("one run: {:?}", version.runs) };
    // An eighth of the keys' filter is more than the top index, which is all that opens the run.
    assert!(run.meta_length < KEYS * 12 / 8 / 8, "{} bytes open the run", run.meta_length);

    let cold = open(2).await;
    let job = open_job(&cold, 20000, &version).await;
    let writer = job.writer(TABLE).unwrap();
    let get = async |key: u64| {
        let before = sim.stats();
        let found = writer.multi_get(keys(key, key + 1)).wait().await.unwrap();
        assert_eq!(found.len(), usize::from(key < KEYS));
        let cost = sim.stats();
        (cost.gets - before.gets, cost.rounds - before.rounds, cost.bytes_read - before.bytes_read)
    };
    let (gets, rounds, bytes) = get(777).await;
    let block = 16 << 10;
    assert_eq!((gets, rounds), (2, 2), "a partition, a block");
    assert!(bytes <= PARTITION * 3 / 2 + block, "{bytes}");
    assert_eq!(get(777).await.0, 0, "all of it is kept");
    // Another vnode lies in another partition.
    let (gets, rounds, bytes) = get(800).await;
    assert_eq!((gets, rounds), (2, 2));
    assert!(bytes <= PARTITION * 3 / 2 + block, "{bytes}");
    for key in (0..KEYS).step_by(7_001) {
        get(key).await;
        let kept = cold.cache().stats().index_bytes;
        assert!(kept <= BUDGET, "{kept} bytes of indexes");
    }

    // Many keys cost no more rounds than one. Of a run whose description is too old, or too long, the top index is read.
    let undescribed = RunMeta { top: Bytes::new(), ..run.clone() };
    for (incarnation, run, rounds) in [(3, run.clone(), 2), (4, undescribed, 3)] {
        let version = JobVersion { runs: vec![run], ..JobVersion::default() };
        let job = open_job(&*open(incarnation).await, 20000, &version).await;
        let before = sim.stats().rounds;
        let found = job.writer(TABLE).unwrap().multi_get(keys(0, 5_000)).wait().await.unwrap();
        assert_eq!((found.len(), sim.stats().rounds - before), (5_000, rounds));
    }
}

/// What a new owner of a job waits for before its first row, however large the state is: the tail, the indexes that a key
/// needs, its blocks.
#[tokio::test]
async fn a_job_is_opened_and_a_key_read_in_three_rounds_whatever_the_number_of_runs() {
    const KEYS: u64 = 4_000;
    const PARTITION: u64 = 1 << 10;
    const BLOCK: u64 = 512;
    let sim = sim();
    let open = async |incarnation| {
        let mut options = StoreOptions::new(Arc::clone(&sim) as _, incarnation);
        (options.partition_bytes, options.block_bytes) =
            (Some(PARTITION as usize), Some(BLOCK as usize));
        (options.inline_bytes, options.cache.join_gap) = (0, 0);
        StateStore::open(options).await.unwrap()
    };
    sim.set_profile(Profile::INSTANT);
    let job = open_job(&*open(1).await, 20000, &JobVersion::default()).await;
    let mut writer = job.writer(TABLE).unwrap();
    let mut version = JobVersion::default();
    for runs in 1..=20 {
        // Each run has all keys, so that each may answer, and only the epochs of blocks tell which is the newest.
        commit(&job, &mut writer, runs, (0, KEYS)).await;
        let edit = job.flush().await.unwrap();
        job.apply_edit(&edit);
        version.runs.extend(edit.add_runs);
        assert_eq!(version.runs.len(), runs as usize);
        assert!(version.runs.iter().all(|run| !run.top.is_empty()), "they have partitions");
        if ![1, 5, 20].contains(&runs) {
            continue;
        }
        sim.set_profile(STEADY);
        let before = sim.stats();
        let cold = open(100 + runs).await;
        let opened = open_job(&cold, 20000, &version).await;
        let found = opened.writer(TABLE).unwrap().multi_get(keys(777, 778)).wait().await.unwrap();
        assert_eq!(found.len(), 1);
        let cost = sim.stats();
        assert_eq!(cost.rounds - before.rounds, 2, "{runs} runs: indexes, blocks");
        let bytes = cost.bytes_read - before.bytes_read;
        assert!(bytes <= runs * (PARTITION + BLOCK) * 2, "{bytes} bytes of {runs} runs");
        sim.set_profile(Profile::INSTANT);
    }
    // The tail is read at the same time, whatever there is of it.
    for epoch in 21..25 {
        version.tail.extend(commit(&job, &mut writer, epoch, (KEYS, KEYS + 100)).await);
    }
    sim.set_profile(STEADY);
    let before = sim.stats();
    let opened = open_job(&*open(200).await, 20000, &version).await;
    let found = opened.writer(TABLE).unwrap().multi_get(keys(778, 779)).wait().await.unwrap();
    assert_eq!((found.len(), sim.stats().rounds - before.rounds), (1, 3));
}

/// A job with many rows, all of them in runs.
async fn flushed(sim: &Arc<SimStore>) -> JobVersion {
    let store = open(sim, 1).await;
    let job = open_job(&store, 20000, &JobVersion::default()).await;
    commit(&job, &mut job.writer(TABLE).unwrap(), 1, (0, 20_000)).await;
    let edit = job.flush().await.unwrap();
    JobVersion { runs: edit.add_runs, ..JobVersion::default() }
}

#[tokio::test]
async fn a_lookup_reads_in_the_class_that_it_is_given() {
    let sim = sim();
    let version = flushed(&sim).await;
    for class in [Priority::Demand, Priority::Barrier, Priority::Prefetch] {
        let cold = open(&sim, 2 + class as u64).await;
        let job = open_job(&cold, 20000, &version).await;
        let lookup = job.writer(TABLE).unwrap().multi_get(keys(5, 6)).of_class(class);
        let wait = tokio::spawn(lookup.wait());
        // Its index, then its block, each under way for a while.
        let mut seen = [0; Priority::ALL.len()];
        while !wait.is_finished() {
            let stats = cold.cache().read_stats();
            for (most, class) in seen.iter_mut().zip(stats.classes) {
                *most = class.in_flight.max(*most);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let only = Priority::ALL.map(|c| usize::from(c == class));
        assert_eq!(seen, only, "{class:?}");
        assert_eq!(wait.await.unwrap().unwrap().len(), 1);
    }
}

/// What is read ahead becomes more urgent when its epoch is sealed, whatever it waits for: also for an index, which comes
/// before its blocks.
#[tokio::test]
async fn a_lookup_that_waits_for_an_index_raises_that_read_too() {
    let sim = sim();
    let version = flushed(&sim).await;
    let mut options = StoreOptions::new(Arc::clone(&sim) as _, 2);
    options.cache.reads = ReadLimits::fixed(2);
    let cold = StateStore::open(options).await.unwrap();
    let job = open_job(&cold, 20000, &version).await;
    let of = |class: Priority| cold.cache().read_stats().classes[class as usize];
    let until = async |is_so: &dyn Fn() -> bool| {
        let waits = async {
            while !is_so() {
                tokio::task::yield_now().await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(20), waits).await;
        assert!(waited.is_ok(), "{:?}", cold.cache().read_stats());
    };
    sim.hang_reads(None);
    // They take the slots that there are.
    let busy = [(); 2].map(|()| {
        let (cache, object) = (Arc::clone(cold.cache()), version.runs[0].object.clone());
        tokio::spawn(async move { cache.read_uncached(&object, 0..1, Priority::Demand).await })
    });
    until(&|| of(Priority::Demand).in_flight == 2).await;
    let lookup = job.writer(TABLE).unwrap().multi_get(keys(5, 6)).of_class(Priority::Prefetch);
    let Lookup::Pending(reading) = lookup else { panic!("nothing is in memory") };
    let class = reading.class();
    let read = tokio::spawn(reading.whole());
    until(&|| of(Priority::Prefetch).queued == 1).await;
    class.raise(Priority::Barrier, None);
    until(&|| of(Priority::Barrier).queued == 1).await;
    assert_eq!(of(Priority::Prefetch).queued, 0);
    sim.release_reads();
    for busy in busy {
        assert_eq!(busy.await.unwrap().unwrap().len(), 1);
    }
    assert_eq!(read.await.unwrap().unwrap().len(), 1);
}

#[tokio::test]
async fn small_state_never_touches_the_store() {
    let sim = sim();
    let store = open(&sim, 1).await;
    let job = open_job(&store, 20000, &JobVersion::default()).await;
    let mut writer = job.writer(TABLE).unwrap();
    for epoch in 1..40 {
        commit(&job, &mut writer, epoch, (epoch * 10, epoch * 10 + 20)).await;
        assert!(writer.memory_complete());
        assert!(matches!(writer.multi_get(keys(0, 500)), Lookup::Ready(_)));
    }
    assert_eq!(sim.stats().requests(), 0, "small commits ride in the log record");
    assert!(job.stats().tables[0].mem_runs < 16, "memory runs are merged as they come");
}

/// Under a paused clock: how long it takes to encode the slices does not count.
#[tokio::test(start_paused = true)]
async fn commits_of_many_jobs_share_puts() {
    let sim = sim();
    let store = open(&sim, 1).await;
    let mut commits = Vec::new();
    for id in 0..20 {
        let job = open_job(&store, 20000 + id, &JobVersion::default()).await;
        let mut writer = job.writer(TABLE).unwrap();
        write(&mut writer, 0, 10_000);
        commits.push(job.persist(1, writer.seal().unwrap()));
    }
    let persisted = futures::future::try_join_all(commits).await.unwrap();
    assert!(persisted.iter().all(|p| !p.slices[0].object.is_empty()));
    assert!(sim.stats().puts <= 2, "{} puts", sim.stats().puts);
}

#[tokio::test]
async fn recovery_reads_the_tail_in_one_round_and_nothing_else() {
    let sim = sim();
    let store = open(&sim, 1).await;
    let job = open_job(&store, 20000, &JobVersion::default()).await;
    let mut writer = job.writer(TABLE).unwrap();
    let mut version = JobVersion::default();
    for epoch in 1..=8 {
        let slices = commit(&job, &mut writer, epoch, (epoch * 5_000, (epoch + 1) * 5_000)).await;
        version.tail.extend(slices);
    }
    let before = sim.stats();
    let job = open_job(&*open(&sim, 2).await, 20000, &version).await;
    let cost = sim.stats();
    assert_eq!((cost.rounds - before.rounds, cost.gets - before.gets), (1, 8));

    let scan = job.snapshot(Epoch(8)).unwrap().scan(TABLE, ScanOptions::default());
    let batches: Vec<_> = scan.try_collect().await.unwrap();
    assert_eq!(batches.iter().map(|b| b.values.num_rows()).sum::<usize>(), 40_000);
    assert_eq!(sim.stats().gets, cost.gets);
}

#[tokio::test]
async fn a_damaged_tail_slice_stops_the_job_and_names_the_object() {
    let sim = sim();
    let store = open(&sim, 1).await;
    let job = open_job(&store, 20000, &JobVersion::default()).await;
    let mut writer = job.writer(TABLE).unwrap();
    let mut slices = commit(&job, &mut writer, 1, (0, 10_000)).await;
    slices[0].length -= 1;
    let version = JobVersion { tail: slices.clone(), ..JobVersion::default() };
    let error = store
        .open_job(RelationId(20000), vec![desc(AccessClass::PointUpdate)], &version)
        .await
        .unwrap_err();
    assert!(error.to_string().contains(&slices[0].object), "{error}");
}
