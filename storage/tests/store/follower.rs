//! A version follower reads what the job's own store reads, at every epoch, whatever has become of slices and runs
//! meanwhile; and it fetches no slice twice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{Array, ArrayRef, BinaryArray, Int64Array, RecordBatch, StringArray};
use futures::TryStreamExt;
use millrace_common::access::AccessClass;
use millrace_common::{DeltaChunk, Epoch, JobId, RelationId, SqlError, SqlState, TableId};
use millrace_rpc::log::MovedPart;
use millrace_rpc::version::{JobVersion, SliceRef, VersionEdit};
use millrace_storage::cache::CacheOptions;
use millrace_storage::sim::{Profile, SimStore};
use millrace_storage::{
    FollowedJob, FollowedVersion, JobStore, RowStorage, ScanOptions, Snapshot, StateStore,
    StorageError, StoreOptions, TableDesc, TableWriter, VersionFollower, compaction,
};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use proptest::prelude::*;

use crate::pairs::{self, FoundRow, Key, Row, found_rows, row_at, schema};

const KEYED: u32 = 1;
const MULTISET: u32 = 2;
const APPEND: u32 = 3;
const TABLES: [u32; 3] = [KEYED, MULTISET, APPEND];
const JOB: JobId = RelationId(9);

fn descs() -> Vec<TableDesc> {
    vec![
        pairs::desc(KEYED, RowStorage::Keyed, AccessClass::PointUpdate, true),
        pairs::desc(MULTISET, RowStorage::Multiset, AccessClass::RangeRead, true),
        pairs::desc(APPEND, RowStorage::Append, AccessClass::Append, true),
    ]
}

#[derive(Clone, Debug)]
enum Op {
    Write(u32, Vec<(u8, i64, bool)>),
    /// At a new epoch, or at the last one, as in a first scan.
    Commit(bool),
    Flush,
    Compact(u32, usize),
    /// All that lies in the oldest objects moves into a new one.
    Move(u8),
    Horizon(u8),
    /// The follower is moved on, and compared.
    Follow,
    /// It is asked again for a version that it had.
    FollowOld,
    Idle,
}

fn op() -> impl Strategy<Value = Op> {
    let rows = prop::collection::vec((0u8..24, 0i64..6, prop::bool::weighted(0.3)), 1..20);
    prop_oneof![
        6 => (prop::sample::select(&TABLES[..]), rows).prop_map(|(t, rows)| Op::Write(t, rows)),
        5 => prop::bool::weighted(0.75).prop_map(Op::Commit),
        1 => Just(Op::Flush),
        1 => (prop::sample::select(&TABLES[..]), 1usize..5).prop_map(|(t, n)| Op::Compact(t, n)),
        1 => (0u8..4).prop_map(Op::Move),
        1 => any::<u8>().prop_map(Op::Horizon),
        4 => Just(Op::Follow),
        1 => Just(Op::FollowOld),
        1 => Just(Op::Idle),
    ]
}

fn options(store: Arc<dyn ObjectStore>, incarnation: u64) -> StoreOptions {
    StoreOptions {
        cache: CacheOptions {
            memory_bytes: 1 << 15,
            index_bytes: 1 << 14,
            ..CacheOptions::default()
        },
        block_bytes: Some(160),
        partition_bytes: Some(150),
        run_bytes: 700,
        inline_bytes: 300,
        direct_run_bytes: 900,
        // Some of what an epoch writes goes out before the epoch ends.
        spill_bytes: 700,
        ..StoreOptions::new(store, incarnation)
    }
}

/// What was read of a snapshot: all rows of each table.
type Content = BTreeMap<u32, Vec<(Key, i64, Row)>>;

async fn content(snapshot: &Snapshot) -> Result<Content, StorageError> {
    let mut content = Content::new();
    for table in TABLES {
        let options = ScanOptions { with_keys: true, batch_rows: 7, ..ScanOptions::default() };
        let batches: Vec<_> = snapshot.scan(TableId(table), options).try_collect().await?;
        let rows = content.entry(table).or_default();
        for batch in &batches {
            let keys = batch.keys.as_ref().unwrap();
            rows.extend((0..keys.len()).map(|i| {
                (keys.value(i).to_vec(), batch.weights.value(i), row_at(&batch.values, i))
            }));
        }
    }
    Ok(content)
}

async fn gets(snapshot: &Snapshot, table: u32, keys: &[Key]) -> Vec<FoundRow> {
    let keys = BinaryArray::from_iter_values(keys);
    found_rows(&snapshot.multi_get(TableId(table), keys).await.unwrap())
}

fn net(chunks: &[DeltaChunk]) -> BTreeMap<Row, i64> {
    let mut net: BTreeMap<Row, i64> = BTreeMap::new();
    for chunk in chunks {
        for i in 0..chunk.num_rows() {
            *net.entry(row_at(&chunk.batch, i)).or_default() += chunk.weight(i);
        }
    }
    net.retain(|_, weight| *weight != 0);
    net
}

struct World {
    inner: Arc<InMemory>,
    store: Arc<StateStore>,
    job: Arc<JobStore>,
    writers: BTreeMap<u32, TableWriter>,
    committed: JobVersion,
    /// Of the log.
    record: u64,
    epoch: u64,
    horizon: u64,
    next_append: i64,
    next_object: u64,
    /// Weights of MULTISET's keys, written or not.
    weights: BTreeMap<Key, i64>,
    keys: BTreeSet<Key>,
    follower: VersionFollower,
    /// What the follower asks.
    reads: SimStore,
    old: Option<FollowedVersion>,
    /// A snapshot of an older version, and what it held when it was opened.
    open: Option<(Snapshot, Content)>,
}

impl World {
    async fn new() -> World {
        let inner = Arc::new(InMemory::new());
        let store = StateStore::open(options(Arc::clone(&inner) as _, 1)).await.unwrap();
        let job = store.open_job(JOB, descs(), &JobVersion::default()).await.unwrap();
        let reads = SimStore::new(Arc::clone(&inner) as _, Profile::INSTANT, 1);
        let readers = StateStore::open(options(Arc::new(reads.clone()), 2)).await.unwrap();
        let writers = TABLES.iter().map(|&t| (t, job.writer(TableId(t)).unwrap())).collect();
        World {
            inner,
            store,
            job,
            writers,
            committed: JobVersion::default(),
            record: 1,
            epoch: 0,
            horizon: 0,
            next_append: 0,
            next_object: 9_000,
            weights: BTreeMap::new(),
            keys: BTreeSet::new(),
            follower: VersionFollower::new(&readers),
            reads,
            old: None,
            open: None,
        }
    }

    async fn apply(&mut self, op: Op) {
        match op {
            Op::Write(table, rows) => self.write(table, rows),
            Op::Commit(advance) => self.commit(advance).await,
            Op::Flush => {
                let edit = self.job.flush().await.unwrap();
                self.edit(edit);
            }
            Op::Compact(table, n) => self.compact(table, n).await,
            Op::Move(which) => self.move_parts(which).await,
            Op::Horizon(h) => {
                self.horizon = self.horizon.max(u64::from(h) % (self.epoch + 1));
                self.job.set_horizon(Epoch(self.horizon));
                self.record += 1;
            }
            Op::Follow => self.follow().await,
            Op::FollowOld => self.follow_old().await,
            Op::Idle => drop(self.follower.close_idle(Duration::ZERO)),
        }
    }

    fn write(&mut self, table: u32, rows: Vec<(u8, i64, bool)>) {
        let mut written: Vec<(Key, i64, Row)> = Vec::new();
        for (k, n, delete) in rows {
            let mut key = vec![0, k % 4, b'k', k / 8, k];
            let mut row = (Some(n), "x".repeat(n as usize));
            let mut weight = 1;
            match table {
                APPEND => {
                    key.truncate(2);
                    key.extend(self.next_append.to_be_bytes());
                    self.next_append += 1;
                }
                MULTISET => {
                    row = (Some(i64::from(k)), String::new());
                    let total = self.weights.entry(key.clone()).or_default();
                    weight = if delete { -(*total).min(n) } else { n };
                    *total += weight;
                }
                _ if delete => (row, weight) = ((None, String::new()), -1),
                _ => {}
            }
            self.keys.insert(key.clone());
            written.push((key, weight, row));
        }
        let keys = BinaryArray::from_iter_values(written.iter().map(|w| &w.0));
        let weights = Int64Array::from_iter_values(written.iter().map(|w| w.1));
        let n: ArrayRef = Arc::new(Int64Array::from_iter(written.iter().map(|w| w.2.0)));
        let s: ArrayRef = Arc::new(StringArray::from_iter_values(written.iter().map(|w| &w.2.1)));
        let values = RecordBatch::try_new(schema(true), vec![n, s]).unwrap();
        self.writers.get_mut(&table).unwrap().write(keys, Some(weights), values);
    }

    async fn commit(&mut self, advance: bool) {
        let runs: Vec<_> = self.writers.values_mut().flat_map(|w| w.seal().unwrap()).collect();
        self.committed.commits += 1;
        let persisted = self.job.persist(self.committed.commits, runs).await.unwrap();
        self.epoch += u64::from(advance || self.epoch == 0);
        self.committed.epoch = self.epoch;
        let slices = persisted.slices.iter();
        self.committed.tail.extend(slices.map(|s| SliceRef { epoch: self.epoch, ..s.clone() }));
        let edit = persisted.edit.clone();
        self.job.publish(Epoch(self.epoch), persisted);
        if let Some(mut edit) = edit {
            for run in edit.add_runs.iter_mut().filter(|r| r.max_epoch == 0) {
                (run.min_epoch, run.max_epoch) = (self.epoch, self.epoch);
            }
            self.fold(&edit);
        }
        self.record += 1;
    }

    /// What meta does with an edit.
    fn fold(&mut self, edit: &VersionEdit) {
        self.committed.runs.retain(|r| !edit.remove_runs.contains(&r.run_id));
        self.committed.runs.extend(edit.add_runs.iter().cloned());
        self.committed.tail.retain(|s| !edit.retires(s));
        self.record += 1;
    }

    fn edit(&mut self, edit: VersionEdit) {
        self.fold(&edit);
        self.job.apply_edit(&edit);
    }

    /// Merges the oldest `n` runs of level 0 and all of level 1.
    async fn compact(&mut self, table: u32, n: usize) {
        let of_level = |level: u32| {
            let runs = self.committed.runs.iter();
            let mut runs: Vec<_> =
                runs.filter(|r| r.table_id == table && r.level == level).cloned().collect();
            runs.sort_by_key(|r| r.sequence);
            runs
        };
        let mut inputs = of_level(0);
        // Runs that one flush cut apart share a sequence and stay together.
        let cut = inputs.get(n).map(|r| r.sequence);
        let oldest = self.committed.tail.iter().map(|s| s.sequence).min().unwrap_or(u64::MAX);
        inputs.retain(|r| cut.is_none_or(|c| r.sequence < c) && r.sequence < oldest);
        inputs.extend(of_level(1));
        if inputs.is_empty() {
            return;
        }
        let desc = self.job.table(TableId(table)).unwrap();
        let horizon = Epoch(self.horizon);
        let compacted =
            compaction::compact(&self.store, &desc, None, &inputs, 1, horizon, true).await;
        self.edit(compacted.unwrap());
    }

    async fn move_parts(&mut self, which: u8) {
        let runs = self.committed.runs.iter().map(|r| &r.object);
        let slices = self.committed.tail.iter().map(|s| &s.object).filter(|o| !o.is_empty());
        let objects: BTreeSet<String> = runs.chain(slices).cloned().collect();
        let Some(from) = objects.into_iter().nth(usize::from(which)) else { return };
        self.next_object += 1;
        let to = format!("data/1/{}.seg", self.next_object);
        let bytes =
            self.inner.get(&Path::from(from.as_str())).await.unwrap().bytes().await.unwrap();
        // They lie elsewhere in it.
        let shifted = [b"moved".as_slice(), &bytes].concat();
        self.inner.put(&Path::from(to.as_str()), shifted.into()).await.unwrap();
        let mut parts = Vec::new();
        let mut move_one = |object: &mut String, offset: &mut u64, length: u64| {
            if *object == from {
                parts.push(MovedPart {
                    job: JOB.0,
                    from_object: from.clone(),
                    from_offset: *offset,
                    length,
                    offset: *offset + 5,
                });
                object.clone_from(&to);
                *offset += 5;
            }
        };
        for run in &mut self.committed.runs {
            move_one(&mut run.object, &mut run.offset, run.length);
        }
        for slice in &mut self.committed.tail {
            move_one(&mut slice.object, &mut slice.offset, slice.length);
        }
        self.job.move_parts(&to, &parts);
        self.record += 1;
    }

    fn version(&self) -> FollowedVersion {
        FollowedVersion {
            record: self.record,
            version: Arc::new(self.committed.clone()),
            horizon: Epoch(self.horizon),
        }
    }

    async fn follow(&mut self) {
        let at = self.version();
        let followed = self.follower.advance(JOB, at.clone(), descs).await.unwrap();
        assert_eq!((followed.record(), followed.epoch()), (self.record, Epoch(self.epoch)));
        // What is there already is not fetched again.
        let gets = self.reads.stats().gets;
        let again = self.follower.advance(JOB, at.clone(), descs).await.unwrap();
        assert!(Arc::ptr_eq(&again, &followed) && self.reads.stats().gets == gets);
        self.compare(&followed).await;
        if let Some((snapshot, before)) = self.open.take() {
            assert_eq!(content(&snapshot).await.unwrap(), before, "of an older version");
        }
        let snapshot = followed.snapshot(Epoch::MAX).unwrap();
        let now = content(&snapshot).await.unwrap();
        self.open = Some((snapshot, now));
        self.old = Some(at);
    }

    /// An earlier record takes nothing back.
    async fn follow_old(&mut self) {
        let Some(old) = self.old.clone() else { return };
        let before = self.follower.job(JOB).map(|job| job.record());
        let followed = self.follower.advance(JOB, old.clone(), descs).await.unwrap();
        assert_eq!(followed.record(), before.unwrap_or(old.record));
    }

    async fn compare(&self, followed: &FollowedJob) {
        let mut keys: Vec<Key> = self.keys.iter().cloned().collect();
        keys.push(vec![0, 2, 7]);
        for epoch in (self.horizon..=self.epoch).map(Epoch) {
            let theirs = followed.snapshot(epoch).unwrap();
            let own = self.job.snapshot(epoch).unwrap();
            assert_eq!(content(&theirs).await.unwrap(), content(&own).await.unwrap(), "at {epoch}");
            for table in TABLES {
                let found = gets(&theirs, table, &keys).await;
                assert_eq!(found, gets(&own, table, &keys).await, "keys of {table} at {epoch}");
                let (id, to) = (TableId(table), Epoch(self.epoch));
                let theirs: Vec<_> =
                    followed.changes(id, epoch, to, 0..256).try_collect().await.unwrap();
                let own: Vec<_> =
                    self.job.changes(id, epoch, to, 0..256).try_collect().await.unwrap();
                assert_eq!(net(&theirs), net(&own), "changes of {table} from {epoch}");
            }
        }
        if let Some(below) = self.horizon.checked_sub(1) {
            let refused = followed.snapshot(Epoch(below));
            assert!(matches!(refused, Err(StorageError::SnapshotTooOld { .. })));
        }
    }

    /// Deletes what the version does not name.
    async fn collect(&self) {
        let objects: Vec<_> =
            self.inner.list(None).map_ok(|o| o.location).try_collect().await.unwrap();
        let runs = self.committed.runs.iter().map(|r| &r.object);
        let slices = self.committed.tail.iter().map(|s| &s.object);
        let named: BTreeSet<&String> = runs.chain(slices).collect();
        for object in objects.iter().filter(|o| !named.contains(&o.to_string())) {
            self.inner.delete(object).await.unwrap();
        }
    }
}

fn block_on<T>(test: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(120), test).await.unwrap() })
}

proptest! {
    #![proptest_config(pairs::config(60))]
    #[test]
    fn a_follower_reads_what_the_jobs_store_reads(ops in prop::collection::vec(op(), 1..60)) {
        block_on(async {
            let mut world = World::new().await;
            for op in ops {
                world.apply(op).await;
            }
            world.commit(true).await;
            world.follow().await;
        });
    }
}

/// Rows of a slice in an object: more than a record holds, less than a run.
fn some_rows(from: u8) -> Vec<(u8, i64, bool)> {
    (from..from + 10).map(|k| (k % 24, 5, false)).collect()
}

#[test]
fn a_slice_is_fetched_once() {
    block_on(async {
        let mut world = World::new().await;
        for n in 0..8 {
            world.write(KEYED, some_rows(n));
            world.commit(true).await;
        }
        let in_objects =
            world.committed.tail.iter().filter(|s| !s.object.is_empty()).count() as u64;
        assert!(in_objects >= 8, "{:?}", world.committed.tail);
        // Each once, then the new ones alone; where they have moved to does not matter.
        let followed = world.follower.advance(JOB, world.version(), descs).await.unwrap();
        assert_eq!(world.reads.stats().gets, in_objects);
        assert!(followed.memory_bytes() > 0);
        assert_eq!(world.follower.memory_bytes(), followed.memory_bytes());
        world.write(KEYED, some_rows(9));
        world.commit(true).await;
        world.move_parts(0).await;
        world.follower.advance(JOB, world.version(), descs).await.unwrap();
        assert_eq!(world.reads.stats().gets, in_objects + 1);
        world.compare(&followed).await;
        // A flush leaves nothing in memory, and nothing is fetched for it before somebody reads.
        world.apply(Op::Flush).await;
        let gets = world.reads.stats().gets;
        world.follower.advance(JOB, world.version(), descs).await.unwrap();
        assert_eq!((world.reads.stats().gets, world.follower.memory_bytes()), (gets, 0));
        world.compare(&followed).await;
    });
}

#[test]
fn open_snapshots_and_scans_pin_and_idle_jobs_are_closed() {
    block_on(async {
        let mut world = World::new().await;
        world.write(KEYED, some_rows(0));
        world.commit(true).await;
        world.apply(Op::Flush).await;
        let followed = world.follower.advance(JOB, world.version(), descs).await.unwrap();
        assert_eq!(world.follower.pinned(), Default::default(), "nobody reads");
        let named: BTreeSet<String> =
            world.committed.runs.iter().map(|r| r.object.clone()).collect();
        let snapshot = followed.snapshot(Epoch::MAX).unwrap();
        let scan = snapshot.scan(TableId(KEYED), ScanOptions::default());
        drop(snapshot);
        world.write(KEYED, some_rows(3));
        world.commit(true).await;
        world.follower.advance(JOB, world.version(), descs).await.unwrap();
        let newer = followed.snapshot(Epoch(2)).unwrap();
        let pinned = world.follower.pinned();
        assert_eq!((pinned.epoch, pinned.objects), (Some(Epoch(1)), named));
        assert_eq!(world.follower.close_idle(Duration::ZERO), [], "it is being read");
        drop(scan);
        assert_eq!(world.follower.pinned().epoch, Some(Epoch(2)));
        drop(newer);
        assert_eq!(world.follower.pinned(), Default::default());
        assert_eq!(world.follower.close_idle(Duration::from_secs(3_600)), []);
        assert_eq!(world.follower.close_idle(Duration::ZERO), [JOB]);
        assert_eq!((world.follower.open_jobs(), world.follower.memory_bytes()), (vec![], 0));
    });
}

#[test]
fn who_was_too_slow_is_told_to_follow_again() {
    block_on(async {
        let mut world = World::new().await;
        for n in 0..3 {
            world.write(KEYED, some_rows(n));
            world.commit(true).await;
        }
        let slices = world.version();
        world.apply(Op::Flush).await;
        let followed = world.follower.advance(JOB, world.version(), descs).await.unwrap();
        let snapshot = followed.snapshot(Epoch::MAX).unwrap();
        world.write(KEYED, some_rows(7));
        world.commit(true).await;
        world.apply(Op::Flush).await;
        world.apply(Op::Compact(KEYED, 9)).await;
        world.collect().await;

        let is_superseded = |e: &StorageError| matches!(e, StorageError::Superseded { .. });
        let error = content(&snapshot).await.unwrap_err();
        assert!(is_superseded(&error), "{error}");
        assert_eq!(SqlError::from(error).state, SqlState::SERIALIZATION_FAILURE);
        let keys = BinaryArray::from_iter_values(&world.keys);
        let error = snapshot.multi_get(TableId(KEYED), keys).await.unwrap_err();
        assert!(is_superseded(&error), "{error}");
        let changes = followed.changes(TableId(KEYED), Epoch(1), Epoch(3), 0..256);
        let error = changes.try_collect::<Vec<_>>().await.unwrap_err();
        assert!(is_superseded(&error), "{error}");
        world.follower.close(JOB);
        let error = world.follower.advance(JOB, slices, descs).await.unwrap_err();
        assert!(is_superseded(&error), "{error}");
        assert_eq!(world.follower.open_jobs(), []);

        world.follow().await;
    });
}
