//! The state store against a model: every read of every table, after any history of writes, seals,
//! commits, flushes, compactions, horizon moves and restarts, equals the same read of a sorted map.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{Array, ArrayRef, BinaryArray, Int64Array, RecordBatch, StringArray};
use futures::TryStreamExt;
use millrace_common::access::AccessClass;
use millrace_common::{Epoch, JobId, TableId};
use millrace_rpc::version::{JobVersion, VersionEdit};
use millrace_storage::cache::CacheOptions;
use millrace_storage::sim::{Profile, SimStore};
use millrace_storage::{
    JobStore, Persisted, RowStorage, ScanOptions, StateStore, StoreOptions, TableDesc, TableWriter,
    compaction,
};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use proptest::prelude::*;

use crate::pairs::{self, Key, Row, found_rows, row_at, schema};

const KEYED: u32 = 1;
const MULTISET: u32 = 2;
const APPEND: u32 = 3;
/// Keyed, and not a relation: only its newest version is ever read.
const STATE: u32 = 4;
const TABLES: [u32; 4] = [KEYED, MULTISET, APPEND, STATE];
const JOB: JobId = millrace_common::RelationId(9);

fn descs() -> Vec<TableDesc> {
    let desc = |id, storage, class| pairs::desc(id, storage, class, id != STATE);
    vec![
        desc(KEYED, RowStorage::Keyed, AccessClass::PointUpdate),
        desc(MULTISET, RowStorage::Multiset, AccessClass::RangeRead),
        desc(APPEND, RowStorage::Append, AccessClass::Append),
        desc(STATE, RowStorage::Keyed, AccessClass::PointUpdate),
    ]
}

#[derive(Clone, Debug)]
enum Op {
    Write(u32, Vec<(u8, i64, bool)>),
    /// Those of these rows whose keys have none; it is said that they have none.
    Insert(Vec<(u8, i64)>),
    Seal,
    /// Whether at a new epoch (else at the last one, as in a backfill).
    Publish(bool),
    Flush,
    /// Starts a flush, or lets the one that was started take effect.
    SlowFlush,
    Compact(u32, usize),
    Horizon(u8),
    Reopen,
    Check(u8, u8),
}

fn op() -> impl Strategy<Value = Op> {
    let rows = prop::collection::vec((0u8..24, 0i64..6, prop::bool::weighted(0.3)), 1..20);
    prop_oneof![
        6 => (prop::sample::select(&TABLES[..]), rows).prop_map(|(t, rows)| Op::Write(t, rows)),
        4 => prop::collection::vec((0u8..24, 0i64..6), 1..8).prop_map(Op::Insert),
        4 => Just(Op::Seal),
        4 => prop::bool::weighted(0.75).prop_map(Op::Publish),
        1 => Just(Op::Flush),
        2 => Just(Op::SlowFlush),
        1 => (prop::sample::select(&TABLES[..]), 1usize..5).prop_map(|(t, n)| Op::Compact(t, n)),
        1 => any::<u8>().prop_map(Op::Horizon),
        1 => Just(Op::Reopen),
        3 => (any::<u8>(), any::<u8>()).prop_map(|(a, b)| Op::Check(a, b)),
    ]
}

/// Entries in the order they were written; the epoch is `None` until published.
type History = BTreeMap<Key, Vec<(Option<u64>, i64, Row)>>;

struct World {
    store: Arc<StateStore>,
    job: Arc<JobStore>,
    writers: BTreeMap<u32, TableWriter>,
    committed: JobVersion,
    pending: Vec<Persisted>,
    tables: BTreeMap<u32, History>,
    /// What is written but not sealed, and each sealed but unpublished commit, in order.
    open: Vec<(u32, Key, i64, Row)>,
    sealed: Vec<Vec<(u32, Key, i64, Row)>>,
    /// Of the last commit that was sealed.
    number: u64,
    next_append: i64,
    flushing: Option<VersionEdit>,
    epoch: u64,
    horizon: u64,
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
        scan_bytes: 4000,
        lookup_bytes: 1500,
        inline_bytes: 300,
        direct_run_bytes: 900,
        // Most of what an epoch writes goes out before the epoch ends.
        spill_bytes: 400,
        ..StoreOptions::new(store, incarnation)
    }
}

fn keys_and_values(written: &[(u32, Key, i64, Row)]) -> (BinaryArray, RecordBatch) {
    let keys = BinaryArray::from_iter_values(written.iter().map(|w| &w.1));
    let n: ArrayRef = Arc::new(Int64Array::from_iter(written.iter().map(|w| w.3.0)));
    let s: ArrayRef = Arc::new(StringArray::from_iter_values(written.iter().map(|w| &w.3.1)));
    (keys, RecordBatch::try_new(schema(true), vec![n, s]).unwrap())
}

impl World {
    async fn new(store: Arc<dyn ObjectStore>) -> World {
        let store = StateStore::open(options(store, 1)).await.unwrap();
        let committed = JobVersion::default();
        let job = store.open_job(JOB, descs(), &committed).await.unwrap();
        let tables = TABLES.iter().map(|&t| (t, History::new())).collect();
        let mut world = World {
            store,
            job,
            writers: BTreeMap::new(),
            committed,
            pending: Vec::new(),
            tables,
            open: Vec::new(),
            sealed: Vec::new(),
            number: 0,
            next_append: 0,
            flushing: None,
            epoch: 0,
            horizon: 0,
        };
        world.open_writers();
        world
    }

    fn open_writers(&mut self) {
        self.writers = TABLES.iter().map(|&t| (t, self.job.writer(TableId(t)).unwrap())).collect();
    }

    async fn apply(&mut self, op: Op) {
        match op {
            Op::Write(table, rows) => self.write(table, rows),
            Op::Insert(rows) => self.insert(rows),
            Op::Seal => self.seal().await,
            Op::Publish(advance) => self.publish(advance),
            Op::Flush => {
                let edit = self.job.flush().await.unwrap();
                self.flushing = None;
                self.edit(edit);
            }
            Op::SlowFlush => match self.flushing.take() {
                None => self.flushing = Some(self.job.flush().await.unwrap()),
                Some(edit) => self.edit(edit),
            },
            Op::Compact(table, n) => self.compact(table, n).await,
            Op::Horizon(h) => {
                self.horizon = self.horizon.max(u64::from(h) % (self.epoch + 1));
                self.job.set_horizon(Epoch(self.horizon));
            }
            Op::Reopen => self.reopen().await,
            Op::Check(a, b) => self.check(a, b).await,
        }
    }

    fn write(&mut self, table: u32, rows: Vec<(u8, i64, bool)>) {
        let mut written = Vec::new();
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
                    weight = if delete { -self.total(table, &key, &written).min(n) } else { n };
                }
                _ if delete => {
                    row = (None, String::new());
                    weight = -1;
                }
                _ => {}
            }
            written.push((table, key, weight, row));
        }
        let (keys, values) = keys_and_values(&written);
        let weights = Int64Array::from_iter_values(written.iter().map(|w| w.2));
        self.writers.get_mut(&table).unwrap().write(keys, Some(weights), values);
        self.open.extend(written);
    }

    fn insert(&mut self, rows: Vec<(u8, i64)>) {
        let mut there = self.rows(KEYED, None);
        let mut written = Vec::new();
        for (k, n) in rows {
            let key = vec![0, k % 4, b'k', k / 8, k];
            let row = (Some(n), "x".repeat(n as usize));
            if there.insert(key.clone(), (1, row.clone())).is_none() {
                written.push((KEYED, key, 1, row));
            }
        }
        let (keys, values) = keys_and_values(&written);
        self.writers.get_mut(&KEYED).unwrap().write_new(keys, values);
        self.open.extend(written);
    }

    /// Net weight of a key with everything written so far.
    fn total(&self, table: u32, key: &Key, now: &[(u32, Key, i64, Row)]) -> i64 {
        let done = self.tables[&table].get(key).map_or(0, |h| h.iter().map(|e| e.1).sum());
        let loose = self.sealed.iter().flatten().chain(&self.open).chain(now);
        done + loose.filter(|w| w.0 == table && w.1 == *key).map(|w| w.2).sum::<i64>()
    }

    async fn seal(&mut self) {
        let runs: Vec<_> = self.writers.values_mut().flat_map(|w| w.seal().unwrap()).collect();
        assert!(runs.iter().all(|r| r.is_sorted()));
        self.number += 1;
        self.pending.push(self.job.persist(self.number, runs).await.unwrap());
        self.sealed.push(std::mem::take(&mut self.open));
    }

    fn publish(&mut self, advance: bool) {
        if self.pending.is_empty() {
            return;
        }
        let persisted = self.pending.remove(0);
        self.epoch += u64::from(advance || self.epoch == 0);
        self.committed.epoch = self.epoch;
        self.committed.commits += 1;
        for slice in &persisted.slices {
            self.committed
                .tail
                .push(millrace_rpc::version::SliceRef { epoch: self.epoch, ..slice.clone() });
        }
        if let Some(edit) = &persisted.edit {
            let mut edit = edit.clone();
            for run in edit.add_runs.iter_mut().filter(|r| r.max_epoch == 0) {
                (run.min_epoch, run.max_epoch) = (self.epoch, self.epoch);
            }
            self.fold(&edit);
        }
        self.job.publish(Epoch(self.epoch), persisted);
        for (table, key, weight, row) in self.sealed.remove(0) {
            let history = self.tables.get_mut(&table).unwrap().entry(key).or_default();
            history.push((Some(self.epoch), weight, row));
        }
    }

    /// What meta does with an edit.
    fn fold(&mut self, edit: &VersionEdit) {
        self.committed.runs.retain(|r| !edit.remove_runs.contains(&r.run_id));
        self.committed.runs.extend(edit.add_runs.iter().cloned());
        self.committed.tail.retain(|s| !edit.retires(s));
    }

    fn edit(&mut self, edit: VersionEdit) {
        self.fold(&edit);
        self.job.apply_edit(&edit);
    }

    /// Merges the oldest `n` runs of level 0 and all of level 1.
    async fn compact(&mut self, table: u32, n: usize) {
        let of_table = |level: u32| {
            let mut runs: Vec<_> = self
                .committed
                .runs
                .iter()
                .filter(|r| r.table_id == table && r.level == level)
                .cloned()
                .collect();
            runs.sort_by_key(|r| r.sequence);
            runs
        };
        let mut inputs = of_table(0);
        // Runs that one flush cut apart share a sequence and stay together.
        let cut = inputs.get(n).map(|r| r.sequence);
        let oldest_slice = self.committed.tail.iter().map(|s| s.sequence).min().unwrap_or(u64::MAX);
        inputs.retain(|r| cut.is_none_or(|c| r.sequence < c) && r.sequence < oldest_slice);
        inputs.extend(of_table(1));
        if inputs.is_empty() {
            return;
        }
        let desc = self.job.table(TableId(table)).unwrap();
        let edit =
            compaction::compact(&self.store, &desc, None, &inputs, 1, Epoch(self.horizon), true)
                .await
                .unwrap();
        self.edit(edit);
    }

    async fn reopen(&mut self) {
        self.writers.clear();
        self.pending.clear();
        self.number = self.committed.commits;
        self.flushing = None;
        self.open.clear();
        self.sealed.clear();
        self.store.close_job(JOB);
        self.job = self.store.open_job(JOB, descs(), &self.committed).await.unwrap();
        self.job.set_horizon(Epoch(self.horizon));
        self.open_writers();
    }

    /// Rows at an epoch; `None`: with everything that is not published yet.
    fn rows(&self, table: u32, at: Option<u64>) -> BTreeMap<Key, (i64, Row)> {
        let mut history = self.tables[&table].clone();
        if at.is_none() {
            for (t, key, weight, row) in self.sealed.iter().flatten().chain(&self.open) {
                if *t == table {
                    history.entry(key.clone()).or_default().push((None, *weight, row.clone()));
                }
            }
        }
        let mut rows = BTreeMap::new();
        for (key, entries) in history {
            let seen: Vec<_> =
                entries.iter().filter(|e| at.is_none_or(|at| e.0 <= Some(at))).collect();
            let Some(last) = seen.last() else { continue };
            let weight = if table == MULTISET { seen.iter().map(|e| e.1).sum() } else { last.1 };
            if weight > 0 {
                rows.insert(key, (weight, last.2.clone()));
            }
        }
        rows
    }

    async fn check(&self, a: u8, b: u8) {
        for table in TABLES {
            self.check_writer(table, a).await;
        }
        let span = self.epoch - self.horizon + 1;
        let (x, y) = (self.horizon + u64::from(a) % span, self.horizon + u64::from(b) % span);
        for table in [KEYED, MULTISET, APPEND] {
            self.check_scan(table, x, b).await;
            self.check_get(table, y, a).await;
            self.check_changes(table, x.min(y), x.max(y)).await;
        }
    }

    async fn check_writer(&self, table: u32, seed: u8) {
        let expected = self.rows(table, None);
        let mut keys: Vec<Key> = self.tables[&table].keys().cloned().collect();
        keys.push(vec![0, 1, 7]);
        keys.extend(self.open.iter().map(|w| w.1.clone()));
        let turn = usize::from(seed) % keys.len();
        keys.rotate_left(turn);
        let found = self.writers[&table]
            .multi_get(BinaryArray::from_iter_values(&keys))
            .wait()
            .await
            .unwrap();
        let want = keys.iter().enumerate().filter_map(|(i, k)| {
            expected.get(k).map(|(w, row)| (i as u32, k.clone(), *w, row.clone()))
        });
        assert_eq!(found_rows(&found), want.collect::<Vec<_>>(), "multi_get of table {table}");

        let prefixes: Vec<Key> =
            vec![vec![0, 2], vec![], vec![0, 1, b'k', 1], vec![0, 0, b'k', 2, 16], vec![9]];
        let limit = (!seed.is_multiple_of(3)).then_some(usize::from(seed % 5));
        let asked = BinaryArray::from_iter_values(&prefixes);
        let found = self.writers[&table].multi_scan(asked, limit).wait().await.unwrap();
        let mut want = Vec::new();
        for (i, prefix) in prefixes.iter().enumerate() {
            let under = expected.iter().filter(|(k, _)| k.starts_with(prefix));
            let limited = under.take(limit.unwrap_or(usize::MAX));
            want.extend(limited.map(|(k, (w, row))| (i as u32, k.clone(), *w, row.clone())));
        }
        assert_eq!(found_rows(&found), want, "multi_scan of table {table}, limit {limit:?}");
    }

    async fn check_scan(&self, table: u32, at: u64, seed: u8) {
        let snapshot = self.job.snapshot(Epoch(at)).unwrap();
        let lower = vec![0, seed % 4];
        let range =
            (seed.is_multiple_of(2)).then(|| (Bound::Excluded(lower.clone()), Bound::Unbounded));
        let options = ScanOptions {
            with_keys: true,
            batch_rows: 7,
            range: range.clone(),
            ..ScanOptions::default()
        };
        let batches: Vec<_> = snapshot.scan(TableId(table), options).try_collect().await.unwrap();
        let mut got = Vec::new();
        for batch in &batches {
            let keys = batch.keys.as_ref().unwrap();
            got.extend((0..keys.len()).map(|i| {
                (keys.value(i).to_vec(), (batch.weights.value(i), row_at(&batch.values, i)))
            }));
        }
        let want =
            self.rows(table, Some(at)).into_iter().filter(|(k, _)| range.is_none() || *k > lower);
        assert_eq!(got, want.collect::<Vec<_>>(), "scan of table {table} at {at}");

        let vnodes =
            ScanOptions { projection: Some(vec![1]), vnodes: Some(1..3), ..ScanOptions::default() };
        let batches: Vec<_> = snapshot.scan(TableId(table), vnodes).try_collect().await.unwrap();
        let want = self.rows(table, Some(at)).keys().filter(|k| k[1] == 1 || k[1] == 2).count();
        assert_eq!(batches.iter().map(|b| b.values.num_rows()).sum::<usize>(), want);
        assert!(batches.iter().all(|b| b.values.num_columns() == 1));
    }

    async fn check_get(&self, table: u32, at: u64, seed: u8) {
        let expected = self.rows(table, Some(at));
        let mut keys: Vec<Key> = self.tables[&table].keys().cloned().collect();
        keys.push(vec![0, 2, 7]);
        let turn = usize::from(seed) % keys.len();
        keys.rotate_left(turn);
        let asked = BinaryArray::from_iter_values(&keys);
        let snapshot = self.job.snapshot(Epoch(at)).unwrap();
        let found = snapshot.multi_get(TableId(table), asked).await.unwrap();
        let want = keys.iter().enumerate().filter_map(|(i, k)| {
            expected.get(k).map(|(w, row)| (i as u32, k.clone(), *w, row.clone()))
        });
        assert_eq!(found_rows(&found), want.collect::<Vec<_>>(), "keys of table {table} at {at}");
    }

    async fn check_changes(&self, table: u32, from: u64, to: u64) {
        let changes = self.job.changes(TableId(table), Epoch(from), Epoch(to), 0..256);
        let chunks: Vec<_> = changes.try_collect().await.unwrap();
        let mut got: BTreeMap<Row, i64> = BTreeMap::new();
        for chunk in &chunks {
            for i in 0..chunk.num_rows() {
                *got.entry(row_at(&chunk.batch, i)).or_default() += chunk.weight(i);
            }
        }
        let mut want: BTreeMap<Row, i64> = BTreeMap::new();
        let (before, after) = (self.rows(table, Some(from)), self.rows(table, Some(to)));
        for (key, (weight, row)) in &after {
            if before.get(key) != Some(&(*weight, row.clone())) {
                *want.entry(row.clone()).or_default() += weight;
            }
        }
        for (key, (weight, row)) in &before {
            if after.get(key) != Some(&(*weight, row.clone())) {
                *want.entry(row.clone()).or_default() -= weight;
            }
        }
        want.retain(|_, w| *w != 0);
        got.retain(|_, w| *w != 0);
        assert_eq!(got, want, "changes of table {table} in ({from}, {to}]");
    }
}

fn run(ops: Vec<Op>, store: Arc<dyn ObjectStore>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async move {
        let mut world = World::new(store).await;
        for op in ops {
            world.apply(op).await;
        }
        world.check(3, 200).await;
        world.reopen().await;
        world.check(7, 100).await;
    });
}

proptest! {
    #![proptest_config(pairs::config(150))]
    #[test]
    fn every_read_equals_the_model(ops in prop::collection::vec(op(), 1..80)) {
        run(ops, Arc::new(InMemory::new()));
    }
}

/// Long enough that requests overlap, and so spread that their answers come in any order.
const SPREAD: Profile =
    Profile { p50: Duration::from_millis(2), p99: Duration::from_millis(8), ..Profile::INSTANT };

proptest! {
    #![proptest_config(pairs::config(12))]
    #[test]
    fn every_read_equals_the_model_in_whatever_order_blocks_come(
        ops in prop::collection::vec(op(), 20..50),
        seed in any::<u64>(),
    ) {
        run(ops, Arc::new(SimStore::in_memory(SPREAD, seed)));
    }
}
