//! What a read of whole keys costs, and what it waits for: the newest entry decides, so nothing older is read, and
//! what has come is answered while other blocks are still being read.

use std::sync::Arc;

use arrow::array::{AsArray, BinaryArray, Int64Array, RecordBatch};
use arrow::datatypes::Int64Type;
use millrace_common::access::AccessClass;
use millrace_common::{Epoch, JobId, RelationId};
use millrace_rpc::version::JobVersion;
use millrace_storage::sim::{Profile, SimStore};
use millrace_storage::{
    Found, JobStore, Lookup, Part, Reading, RowStorage, StateStore, StoreOptions, TableDesc,
    TableWriter,
};

use crate::numbers::{TABLE, desc, schema};

const JOB: JobId = RelationId(20_000);

fn key(n: u32) -> Vec<u8> {
    [&[0, 0][..], &n.to_be_bytes()].concat()
}

fn keys(keys: impl IntoIterator<Item = u32>) -> BinaryArray {
    BinaryArray::from_iter_values(keys.into_iter().map(key).collect::<Vec<_>>())
}

fn numbers(found: &Found) -> Vec<i64> {
    found.values.column(0).as_primitive::<Int64Type>().values().to_vec()
}

/// A store with one table, and what of it is committed.
struct World {
    sim: SimStore,
    storage: RowStorage,
    version: JobVersion,
    incarnation: u64,
    lookup_bytes: usize,
}

/// The store as a process has it open.
struct Open {
    store: Arc<StateStore>,
    job: Arc<JobStore>,
    writer: TableWriter,
}

impl World {
    fn new(storage: RowStorage) -> World {
        let sim = SimStore::in_memory(Profile::INSTANT, 1);
        let version = JobVersion::default();
        World { sim, storage, version, incarnation: 0, lookup_bytes: 64 << 20 }
    }

    /// With nothing in memory.
    async fn open(&mut self) -> Open {
        self.incarnation += 1;
        let options = StoreOptions {
            block_bytes: Some(512),
            lookup_bytes: self.lookup_bytes,
            ..StoreOptions::new(Arc::new(self.sim.clone()), self.incarnation)
        };
        let store = StateStore::open(options).await.unwrap();
        let desc = TableDesc { storage: self.storage, ..desc(AccessClass::PointUpdate) };
        let job = store.open_job(JOB, vec![desc], &self.version).await.unwrap();
        let writer = job.writer(TABLE).unwrap();
        Open { store, job, writer }
    }

    /// Commits these keys, each with a value of the epoch, and flushes them into a run.
    async fn flush(&mut self, epoch: u64, keys: std::ops::Range<u32>) {
        let mut open = self.open().await;
        open.write(epoch, keys, 1);
        open.publish(epoch).await;
        let edit = open.job.flush().await.unwrap();
        open.job.apply_edit(&edit);
        self.version.runs.extend(edit.add_runs);
    }

    /// Requests and blocks that a lookup takes, and what it finds.
    async fn cost(&self, open: &Open, asked: BinaryArray) -> (u64, u64, Found) {
        let before = (self.sim.stats().gets, open.store.cache().stats().misses);
        let found = open.writer.multi_get(asked).wait().await.unwrap();
        let after = (self.sim.stats().gets, open.store.cache().stats().misses);
        (after.0 - before.0, after.1 - before.1, found)
    }
}

impl Open {
    fn write(&mut self, value: u64, of: std::ops::Range<u32>, weight: i64) {
        let n = of.len();
        let values = Int64Array::from_value(value as i64, n);
        let values = RecordBatch::try_new(schema(), vec![Arc::new(values)]).unwrap();
        self.writer.write(keys(of), Some(Int64Array::from_value(weight, n)), values);
    }

    async fn publish(&mut self, epoch: u64) {
        let persisted = self.job.persist(epoch, self.writer.seal().unwrap()).await.unwrap();
        self.job.publish(Epoch(epoch), persisted);
    }

    /// Only indexes stay.
    async fn forget_blocks(&self) {
        self.writer.multi_get(keys(0..2_000)).wait().await.unwrap();
        self.store.cache().clear_memory();
    }
}

/// Four runs, each with all of these keys.
async fn overlapping(storage: RowStorage) -> World {
    let mut world = World::new(storage);
    for epoch in 1..=4 {
        world.flush(epoch, 0..2_000).await;
    }
    assert_eq!(world.version.runs.len(), 4);
    world
}

#[tokio::test]
async fn keys_that_memory_answers_cost_no_request() {
    let mut world = overlapping(RowStorage::Keyed).await;
    let mut open = world.open().await;
    let before = world.sim.stats().requests();
    // In a published run, deleted in another, and in the open epoch.
    open.write(5, 0..20, 1);
    open.publish(5).await;
    open.write(6, 10..20, -1);
    open.publish(6).await;
    open.write(7, 20..30, 1);
    let Lookup::Ready(found) = open.writer.multi_get(keys(0..30)) else {
        panic!("memory has the newest entry of every key");
    };
    assert_eq!(numbers(&found), [[5; 10], [7; 10]].concat());
    assert_eq!(world.sim.stats().requests(), before);
}

#[tokio::test]
async fn a_key_of_the_newest_of_four_runs_costs_one_block() {
    for (storage, blocks) in
        [(RowStorage::Keyed, 1), (RowStorage::Append, 1), (RowStorage::Multiset, 4)]
    {
        let mut world = overlapping(storage).await;
        let open = world.open().await;
        open.forget_blocks().await;
        let (gets, misses, found) = world.cost(&open, keys([700])).await;
        assert_eq!((gets, misses), (blocks, blocks), "{storage:?}");
        assert_eq!(numbers(&found), [4], "{storage:?}");
        let (gets, ..) = world.cost(&open, keys([700])).await;
        assert_eq!(gets, 0, "it is in memory now");
    }
}

#[tokio::test]
async fn an_older_epoch_is_answered_by_the_run_of_its_time() {
    let mut world = overlapping(RowStorage::Keyed).await;
    let open = world.open().await;
    open.forget_blocks().await;
    for at in 1..=4 {
        let snapshot = open.job.snapshot(Epoch(at)).unwrap();
        let before = open.store.cache().stats().misses;
        let found = snapshot.multi_get(TABLE, keys([700])).await.unwrap();
        assert_eq!(numbers(&found), [at as i64]);
        assert_eq!(open.store.cache().stats().misses - before, 1);
    }
}

async fn next(reading: &mut Reading) -> Part {
    reading.next().await.unwrap()
}

#[tokio::test]
async fn rows_of_blocks_that_have_come_do_not_wait_for_others() {
    let mut world = World::new(RowStorage::Keyed);
    world.flush(1, 0..1_000).await;
    world.flush(2, 1_000..2_000).await;
    let mut open = world.open().await;
    open.forget_blocks().await;
    open.write(3, 500..501, 1);
    world.sim.hang_reads(Some(&world.version.runs[1].object));
    // One key that memory has, and two blocks of a run that can be read with two of one that hangs.
    let Lookup::Pending(mut reading) = open.writer.multi_get(keys([1_900, 3, 500, 990, 1_003]))
    else {
        panic!("blocks are missing");
    };
    let first = next(&mut reading).await;
    assert_eq!((&first.asked[..], &numbers(&first.found)[..]), (&[2][..], &[3][..]));
    let mut arrived = Vec::new();
    while arrived.len() < 2 {
        let part = next(&mut reading).await;
        assert!(!part.is_last && numbers(&part.found).iter().all(|n| *n == 1));
        arrived.extend(part.asked);
    }
    arrived.sort_unstable();
    assert_eq!(arrived, [1, 3]);
    world.sim.release_reads();
    let mut last = next(&mut reading).await;
    let mut hung = last.asked.clone();
    while !last.is_last {
        last = next(&mut reading).await;
        hung.extend(&last.asked);
    }
    hung.sort_unstable();
    assert_eq!(hung, [0, 4]);
}

#[tokio::test]
async fn what_one_request_brings_is_one_part() {
    let mut world = World::new(RowStorage::Keyed);
    world.flush(1, 0..2_000).await;
    let open = world.open().await;
    open.forget_blocks().await;
    let before = open.store.cache().stats();
    let Lookup::Pending(mut reading) = open.writer.multi_get(keys(0..2_000)) else {
        panic!("blocks are missing");
    };
    let part = next(&mut reading).await;
    assert!(part.is_last && part.asked.len() == 2_000);
    let after = open.store.cache().stats();
    assert!(after.misses - before.misses > 20);
    assert_eq!((after.gets - before.gets, after.rounds - before.rounds), (1, 1));
}

#[tokio::test]
async fn a_lookup_reads_on_only_as_its_parts_are_taken() {
    // Decoded blocks are taken for four times as large as encoded ones.
    const DECODED: u64 = 4;
    let mut world = World::new(RowStorage::Keyed);
    world.flush(1, 0..20_000).await;
    world.lookup_bytes = 64 << 10;
    let open = world.open().await;
    open.writer.multi_get(keys([0])).wait().await.unwrap();
    let before = open.store.cache().stats().bytes;
    let Lookup::Pending(mut reading) = open.writer.multi_get(keys(0..20_000)) else {
        panic!("blocks are missing");
    };
    let (mut parts, mut found) = (0, 0);
    loop {
        let part = next(&mut reading).await;
        (parts, found) = (parts + 1, found + part.asked.len());
        let read = (open.store.cache().stats().bytes - before) * DECODED;
        assert!(read <= (parts + 1) * world.lookup_bytes as u64, "{read} bytes, part {parts}");
        if part.is_last {
            break;
        }
    }
    assert_eq!(found, 20_000);
    assert!(parts > 2, "{parts} parts");
}
