//! The same few keys, written again and again within one epoch, while parts of it are on their way to the
//! store: every read answers with what was written when it was asked, whatever was written, sealed,
//! published, flushed or compacted before its answer came (docs/design.md §9, "Large epochs").
//!
//! Steps are those of a worker: reads are under way while a task writes on; an epoch becomes durable while
//! the next one is written; the log names a commit's runs before the job has published them, and a
//! flush's before it has applied them; a compaction begins in between. The store answers slowly and in no
//! order, memory for lookups and caches is tiny.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{Array, ArrayRef, BinaryArray, Int64Array, RecordBatch, StringArray};
use futures::TryStreamExt;
use millrace_common::access::AccessClass;
use millrace_common::{Epoch, JobId, RelationId, TableId};
use millrace_rpc::version::{JobVersion, SliceRef, VersionEdit};
use millrace_storage::cache::CacheOptions;
use millrace_storage::sim::{Profile, SimStore};
use millrace_storage::{
    Found, JobStore, Persisted, RowStorage, ScanOptions, StateStore, StorageError, StoreOptions,
    TableDesc, TableWriter, compaction,
};
use proptest::prelude::*;
use tokio::task::JoinHandle;

use crate::pairs::{self, FoundRow, Key, Row, found_rows, row_at, schema};

const JOB: JobId = RelationId(20_000);
const KEYED: u32 = 1;
const MULTISET: u32 = 2;
/// Of operators: only their newest version is read, and weights may be below zero for a while.
const STATE: u32 = 3;
const COUNTS: u32 = 4;
const TABLES: [u32; 4] = [KEYED, MULTISET, STATE, COUNTS];
const RELATIONS: [u32; 2] = [KEYED, MULTISET];
const KEYS: u8 = 9;

fn descs() -> Vec<TableDesc> {
    let desc = |id, storage, class| pairs::desc(id, storage, class, RELATIONS.contains(&id));
    vec![
        desc(KEYED, RowStorage::Keyed, AccessClass::PointUpdate),
        desc(MULTISET, RowStorage::Multiset, AccessClass::PointUpdate),
        desc(STATE, RowStorage::Keyed, AccessClass::PointUpdate),
        desc(COUNTS, RowStorage::Multiset, AccessClass::RangeRead),
    ]
}

/// How little memory there is.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    spill: usize,
    lookup: usize,
    cache: usize,
    /// Commits above this become runs at once.
    direct: usize,
}

fn tiny() -> impl Strategy<Value = Sizes> {
    let of = |sizes: &'static [usize]| prop::sample::select(sizes);
    (
        of(&[0, 150, 600, 4_000]),
        of(&[300, 1_500, 1 << 20]),
        of(&[1 << 10, 1 << 14]),
        of(&[200, 1 << 20]),
    )
        .prop_map(|(spill, lookup, cache, direct)| Sizes { spill, lookup, cache, direct })
}

fn options(store: &Arc<SimStore>, incarnation: u64, sizes: Sizes) -> StoreOptions {
    StoreOptions {
        cache: CacheOptions {
            memory_bytes: sizes.cache,
            index_bytes: sizes.cache,
            ..CacheOptions::default()
        },
        block_bytes: Some(100),
        partition_bytes: Some(150),
        run_bytes: 500,
        scan_bytes: 3_000,
        lookup_bytes: sizes.lookup,
        inline_bytes: 200,
        direct_run_bytes: sizes.direct,
        spill_bytes: sizes.spill,
        ..StoreOptions::new(Arc::clone(store) as _, incarnation)
    }
}

#[derive(Clone, Debug)]
enum Op {
    Write(u32, Vec<(u8, i64, bool)>),
    /// Waits for room, as a task does between two chunks.
    Room,
    Ask(u32, u8),
    Answer(u8),
    Seal,
    /// The oldest sealed epoch into the log; whether at a new epoch (else at the last, as in a backfill).
    Commit(bool),
    /// The oldest epoch in the log becomes visible here.
    Publish,
    /// Starts a flush that is in the log, or applies it here.
    Flush,
    /// Starts a compaction, or lets it take effect.
    Compact(u32, usize),
    Horizon(u8),
    /// Whether the whole process is gone.
    Crash(bool),
    Check(u8, u8),
}

fn op() -> impl Strategy<Value = Op> {
    let rows = prop::collection::vec((0..KEYS, 0i64..6, prop::bool::weighted(0.4)), 1..8);
    let table = || prop::sample::select(&TABLES[..]);
    prop_oneof![
        20 => (table(), rows).prop_map(|(t, rows)| Op::Write(t, rows)),
        3 => Just(Op::Room),
        10 => (table(), any::<u8>()).prop_map(|(t, seed)| Op::Ask(t, seed)),
        8 => any::<u8>().prop_map(Op::Answer),
        3 => Just(Op::Seal),
        3 => prop::bool::weighted(0.8).prop_map(Op::Commit),
        3 => Just(Op::Publish),
        2 => Just(Op::Flush),
        2 => (table(), 2usize..8).prop_map(|(t, n)| Op::Compact(t, n)),
        1 => any::<u8>().prop_map(Op::Horizon),
        1 => any::<bool>().prop_map(Op::Crash),
        2 => (any::<u8>(), any::<u8>()).prop_map(|(a, b)| Op::Check(a, b)),
    ]
}

type Write = (u32, Key, i64, Row);
/// Published entries in the order they were written, with their epochs.
type History = BTreeMap<Key, Vec<(u64, i64, Row)>>;

/// A read under way, and what it must find.
struct Asked {
    what: String,
    answer: JoinHandle<Result<Found, StorageError>>,
    expected: Vec<FoundRow>,
}

/// An epoch that is in the log and not published here.
struct Logged {
    epoch: u64,
    persisted: Persisted,
    writes: Vec<Write>,
}

struct World {
    sim: Arc<SimStore>,
    sizes: Sizes,
    incarnation: u64,
    store: Arc<StateStore>,
    job: Arc<JobStore>,
    writers: BTreeMap<u32, TableWriter>,
    /// As the log has it.
    committed: JobVersion,
    /// Of the last commit that was sealed.
    number: u64,
    epoch: u64,
    published: u64,
    horizon: u64,
    open: Vec<Write>,
    sealed: VecDeque<(JoinHandle<Result<Persisted, StorageError>>, Vec<Write>)>,
    logged: VecDeque<Logged>,
    tables: BTreeMap<u32, History>,
    asked: Vec<Asked>,
    /// In the log, not applied here.
    flushed: Option<VersionEdit>,
    compacting: Option<JoinHandle<VersionEdit>>,
}

impl World {
    async fn new(sizes: Sizes, seed: u64) -> World {
        let profile = Profile {
            p50: Duration::from_micros(200),
            p99: Duration::from_millis(4),
            ..Profile::INSTANT
        };
        let sim = Arc::new(SimStore::in_memory(profile, seed));
        let store = StateStore::open(options(&sim, 1, sizes)).await.unwrap();
        let committed = JobVersion::default();
        let job = store.open_job(JOB, descs(), &committed).await.unwrap();
        let mut world = World {
            sim,
            sizes,
            incarnation: 1,
            store,
            job,
            writers: BTreeMap::new(),
            committed,
            number: 0,
            epoch: 0,
            published: 0,
            horizon: 0,
            open: Vec::new(),
            sealed: VecDeque::new(),
            logged: VecDeque::new(),
            tables: TABLES.iter().map(|&t| (t, History::new())).collect(),
            asked: Vec::new(),
            flushed: None,
            compacting: None,
        };
        world.open_writers();
        world
    }

    fn open_writers(&mut self) {
        self.writers = TABLES.iter().map(|&t| (t, self.job.writer(TableId(t)).unwrap())).collect();
    }

    async fn apply(&mut self, op: Op) {
        match op {
            Op::Write(table, rows) => self.write(table, &rows),
            Op::Room => self.job.wait_for_spills().await,
            Op::Ask(table, seed) => self.ask(table, seed),
            Op::Answer(which) => self.answer(which.into()).await,
            Op::Seal => self.seal(),
            Op::Commit(advance) => self.commit(advance).await,
            Op::Publish => self.publish(),
            Op::Flush => self.flush().await,
            Op::Compact(table, n) => match self.compacting.is_some() {
                true => self.end_compaction().await,
                false => self.start_compaction(table, n),
            },
            Op::Horizon(h) => {
                self.horizon = self.horizon.max(u64::from(h) % (self.published + 1));
                self.job.set_horizon(Epoch(self.horizon));
            }
            Op::Crash(whole) => self.crash(whole).await,
            Op::Check(a, b) => self.check(a, b).await,
        }
    }

    fn write(&mut self, table: u32, rows: &[(u8, i64, bool)]) {
        let mut written: Vec<Write> = Vec::new();
        for &(k, n, delete) in rows {
            let key = vec![0, k % 3, k];
            let (weight, row) = match (table, delete) {
                (MULTISET, true) => (-self.total(&key, &written).min(n), of_key(k)),
                (COUNTS, true) => (-n, of_key(k)),
                (MULTISET | COUNTS, false) => (n, of_key(k)),
                (_, true) => (-1, (None, String::new())),
                (_, false) => (1, (Some(n), "x".repeat(n as usize * 5))),
            };
            written.push((table, key, weight, row));
        }
        let keys = BinaryArray::from_iter_values(written.iter().map(|w| &w.1));
        let weights = Int64Array::from_iter_values(written.iter().map(|w| w.2));
        let n: ArrayRef = Arc::new(Int64Array::from_iter(written.iter().map(|w| w.3.0)));
        let s: ArrayRef = Arc::new(StringArray::from_iter_values(written.iter().map(|w| &w.3.1)));
        let values = RecordBatch::try_new(schema(true), vec![n, s]).unwrap();
        self.writers.get_mut(&table).unwrap().write(keys, Some(weights), values);
        self.open.extend(written);
    }

    /// What is written and not published, oldest first.
    fn loose(&self) -> impl Iterator<Item = &Write> {
        let logged = self.logged.iter().flat_map(|l| &l.writes);
        logged.chain(self.sealed.iter().flat_map(|s| &s.1)).chain(&self.open)
    }

    /// Net weight of a key of the relation, so that no more is deleted than is there.
    fn total(&self, key: &Key, now: &[Write]) -> i64 {
        let done = self.tables[&MULTISET].get(key).map_or(0, |h| h.iter().map(|e| e.1).sum());
        let loose = self.loose().chain(now).filter(|w| w.0 == MULTISET && w.1 == *key);
        done + loose.map(|w| w.2).sum::<i64>()
    }

    /// Rows as published up to an epoch; `None`: with everything that was written.
    fn rows(&self, table: u32, at: Option<u64>) -> BTreeMap<Key, (i64, Row)> {
        let mut entries: BTreeMap<Key, Vec<(i64, Row)>> = BTreeMap::new();
        for (key, history) in &self.tables[&table] {
            let seen = history.iter().filter(|e| at.is_none_or(|at| e.0 <= at));
            entries.insert(key.clone(), seen.map(|e| (e.1, e.2.clone())).collect());
        }
        if at.is_none() {
            for (_, key, weight, row) in self.loose().filter(|w| w.0 == table) {
                entries.entry(key.clone()).or_default().push((*weight, row.clone()));
            }
        }
        let mut rows = BTreeMap::new();
        for (key, entries) in entries {
            let Some((newest, row)) = entries.last() else { continue };
            let weight = match table {
                MULTISET | COUNTS => entries.iter().map(|e| e.0).sum(),
                _ => *newest,
            };
            if weight > 0 {
                rows.insert(key, (weight, row.clone()));
            }
        }
        rows
    }

    /// Starts a read; what it must find is what is written now.
    fn ask(&mut self, table: u32, seed: u8) {
        let rows = self.rows(table, None);
        let writer = &self.writers[&table];
        let limit = (seed % 4 > 1).then_some(usize::from(seed / 4 % 4));
        let mut expected: Vec<FoundRow> = Vec::new();
        let mut expect = |inside: &dyn Fn(usize, &[u8]) -> bool, asked: usize, limit| {
            for i in 0..asked {
                let own = rows.iter().filter(|(k, _)| inside(i, k.as_slice())).take(limit);
                expected.extend(own.map(|(k, (w, row))| (i as u32, k.clone(), *w, row.clone())));
            }
        };
        let all = usize::MAX;
        let (what, lookup) = match seed % 3 {
            0 => {
                let mut keys: Vec<Key> = (0..=KEYS).map(|k| vec![0, k % 3, k]).collect();
                let by = usize::from(seed) % keys.len();
                keys.rotate_left(by);
                expect(&|i, k| keys[i] == k, keys.len(), all);
                ("multi_get", writer.multi_get(BinaryArray::from_iter_values(&keys)))
            }
            1 => {
                let prefixes: Vec<Key> = vec![vec![0, 2], vec![], vec![0, 1, 4], vec![0], vec![9]];
                expect(&|i, k| k.starts_with(&prefixes[i]), prefixes.len(), limit.unwrap_or(all));
                let asked = BinaryArray::from_iter_values(&prefixes);
                ("multi_scan", writer.multi_scan(asked, limit))
            }
            _ => {
                let starts: Vec<Key> = vec![vec![0, 0, 3], vec![0, 1, 1], vec![0, 2]];
                let ends: Vec<Key> = vec![vec![0, 1], vec![0, 1, 5], vec![0, 9]];
                let inside = |i: usize, k: &[u8]| starts[i].as_slice() <= k && k < &ends[i][..];
                expect(&inside, starts.len(), limit.unwrap_or(all));
                let from = BinaryArray::from_iter_values(&starts);
                let to = BinaryArray::from_iter_values(&ends);
                ("multi_range", writer.multi_range(from, to, limit))
            }
        };
        let what = format!("{what} of table {table}, limit {limit:?}");
        self.asked.push(Asked { what, answer: tokio::spawn(lookup.wait()), expected });
    }

    async fn answer(&mut self, which: usize) {
        if self.asked.is_empty() {
            return;
        }
        let Asked { what, answer, expected } = self.asked.swap_remove(which % self.asked.len());
        let found = answer.await.unwrap().unwrap();
        assert_eq!(found_rows(&found), expected, "{what}");
    }

    /// Ends the epoch; it becomes durable in the background.
    fn seal(&mut self) {
        let runs: Vec<_> = self.writers.values_mut().flat_map(|w| w.seal().unwrap()).collect();
        self.number += 1;
        let persisting = tokio::spawn(self.job.persist(self.number, runs));
        self.sealed.push_back((persisting, std::mem::take(&mut self.open)));
    }

    async fn commit(&mut self, advance: bool) {
        let Some((persisting, writes)) = self.sealed.pop_front() else { return };
        let persisted = persisting.await.unwrap().unwrap();
        self.epoch += u64::from(advance || self.epoch == 0);
        let epoch = self.epoch;
        self.committed.epoch = epoch;
        self.committed.commits += 1;
        let slices = persisted.slices.iter().map(|s| SliceRef { epoch, ..s.clone() });
        self.committed.tail.extend(slices);
        if let Some(mut edit) = persisted.edit.clone() {
            for run in edit.add_runs.iter_mut().filter(|r| r.max_epoch == 0) {
                (run.min_epoch, run.max_epoch) = (epoch, epoch);
            }
            self.fold(&edit);
        }
        self.logged.push_back(Logged { epoch, persisted, writes });
    }

    fn publish(&mut self) {
        let Some(Logged { epoch, persisted, writes }) = self.logged.pop_front() else { return };
        self.job.publish(Epoch(epoch), persisted);
        self.note(epoch, writes);
    }

    fn note(&mut self, epoch: u64, writes: Vec<Write>) {
        self.published = epoch;
        for (table, key, weight, row) in writes {
            let history = self.tables.get_mut(&table).unwrap().entry(key).or_default();
            history.push((epoch, weight, row));
        }
    }

    /// What the log does with an edit.
    fn fold(&mut self, edit: &VersionEdit) {
        self.committed.runs.retain(|r| !edit.remove_runs.contains(&r.run_id));
        self.committed.runs.extend(edit.add_runs.iter().cloned());
        self.committed.tail.retain(|s| !edit.retires(s));
    }

    async fn flush(&mut self) {
        if self.flushed.is_some() {
            return self.apply_flush();
        }
        let edit = self.job.flush().await.unwrap();
        if edit.flushed.is_some() {
            self.fold(&edit);
            self.flushed = Some(edit);
        }
    }

    fn apply_flush(&mut self) {
        if let Some(edit) = self.flushed.take() {
            self.job.apply_edit(&edit);
        }
    }

    /// Of the oldest `n` runs of level 0, as the log has them, and all of level 1.
    fn start_compaction(&mut self, table: u32, n: usize) {
        let of_level = |level: u32| {
            let runs = self.committed.runs.iter();
            let mut runs: Vec<_> =
                runs.filter(|r| r.table_id == table && r.level == level).cloned().collect();
            runs.sort_by_key(|r| r.sequence);
            runs
        };
        let mut inputs = of_level(0);
        // Runs that were cut apart share a sequence and stay together.
        let cut = inputs.get(n).map(|r| r.sequence);
        let oldest_slice = self.committed.tail.iter().map(|s| s.sequence).min().unwrap_or(u64::MAX);
        inputs.retain(|r| cut.is_none_or(|c| r.sequence < c) && r.sequence < oldest_slice);
        if inputs.is_empty() {
            return;
        }
        inputs.extend(of_level(1));
        let (store, horizon) = (Arc::clone(&self.store), Epoch(self.horizon));
        let desc = self.job.table(TableId(table)).unwrap();
        self.compacting = Some(tokio::spawn(async move {
            let ids: Vec<u64> = inputs.iter().map(|r| r.run_id).collect();
            assert!(store.wait_for_runs(JOB, &ids).await);
            compaction::compact(&store, &desc, None, &inputs, 1, horizon, true).await.unwrap()
        }));
    }

    async fn end_compaction(&mut self) {
        let Some(task) = self.compacting.take() else { return };
        // It may be waiting for any of these.
        self.apply_flush();
        while !self.logged.is_empty() {
            self.publish();
        }
        let edit = task.await.unwrap();
        self.fold(&edit);
        self.job.apply_edit(&edit);
    }

    /// What is in the log stays; what was written and is not, is gone.
    async fn crash(&mut self, whole: bool) {
        self.asked.drain(..).for_each(|asked| asked.answer.abort());
        self.sealed.drain(..).for_each(|sealed| sealed.0.abort());
        if let Some(task) = self.compacting.take() {
            task.abort();
        }
        self.writers.clear();
        self.open.clear();
        self.flushed = None;
        while let Some(Logged { epoch, writes, .. }) = self.logged.pop_front() {
            self.note(epoch, writes);
        }
        self.number = self.committed.commits;
        self.store.close_job(JOB);
        if whole {
            self.incarnation += 1;
            let options = options(&self.sim, self.incarnation, self.sizes);
            self.store = StateStore::open(options).await.unwrap();
        }
        self.job = self.store.open_job(JOB, descs(), &self.committed).await.unwrap();
        self.job.set_horizon(Epoch(self.horizon));
        self.open_writers();
    }

    async fn check(&self, a: u8, b: u8) {
        let span = self.published - self.horizon + 1;
        let (x, y) = (self.horizon + u64::from(a) % span, self.horizon + u64::from(b) % span);
        for table in RELATIONS {
            self.check_scan(table, x).await;
            self.check_changes(table, x.min(y), x.max(y)).await;
        }
    }

    async fn check_scan(&self, table: u32, at: u64) {
        let snapshot = self.job.snapshot(Epoch(at)).unwrap();
        let options = ScanOptions { with_keys: true, batch_rows: 4, ..ScanOptions::default() };
        let batches: Vec<_> = snapshot.scan(TableId(table), options).try_collect().await.unwrap();
        let mut got: Vec<(Key, (i64, Row))> = Vec::new();
        for batch in &batches {
            let keys = batch.keys.as_ref().unwrap();
            got.extend((0..keys.len()).map(|i| {
                (keys.value(i).to_vec(), (batch.weights.value(i), row_at(&batch.values, i)))
            }));
        }
        let want: Vec<_> = self.rows(table, Some(at)).into_iter().collect();
        assert_eq!(got, want, "scan of table {table} at {at}");
    }

    async fn check_changes(&self, table: u32, from: u64, to: u64) {
        let changes = self.job.changes(TableId(table), Epoch(from), Epoch(to), 0..256);
        let chunks: Vec<_> = changes.try_collect().await.unwrap();
        let mut net: BTreeMap<Row, i64> = BTreeMap::new();
        for chunk in &chunks {
            for i in 0..chunk.num_rows() {
                *net.entry(row_at(&chunk.batch, i)).or_default() += chunk.weight(i);
            }
        }
        for (weight, row) in self.rows(table, Some(from)).into_values() {
            *net.entry(row).or_default() += weight;
        }
        for (weight, row) in self.rows(table, Some(to)).into_values() {
            *net.entry(row).or_default() -= weight;
        }
        net.retain(|_, w| *w != 0);
        assert!(net.is_empty(), "changes of table {table} in ({from}, {to}] are off by {net:?}");
    }

    /// Everything that is under way comes to its end.
    async fn settle(&mut self) {
        self.seal();
        while !self.sealed.is_empty() {
            self.commit(true).await;
        }
        while !self.logged.is_empty() {
            self.publish();
        }
        self.apply_flush();
        self.end_compaction().await;
        for seed in 0..12 {
            TABLES.iter().for_each(|&table| self.ask(table, seed));
        }
        while !self.asked.is_empty() {
            self.answer(0).await;
        }
        self.check(0, 255).await;
        self.check(255, 254).await;
    }
}

/// The row of a key whose weights add up.
fn of_key(k: u8) -> Row {
    (Some(i64::from(k)), "k".repeat(k.into()))
}

fn run(sizes: Sizes, seed: u64, ops: Vec<Op>) {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async move {
        let mut world = World::new(sizes, seed).await;
        for op in ops {
            world.apply(op).await;
        }
        world.settle().await;
        world.crash(true).await;
        world.settle().await;
    });
    // What was given up by a crash may still be writing.
    runtime.shutdown_background();
}

proptest! {
    #![proptest_config(pairs::config(60))]
    #[test]
    fn every_read_answers_with_what_was_written_when_it_was_asked(
        sizes in tiny(), seed in any::<u64>(), ops in prop::collection::vec(op(), 1..160)
    ) {
        run(sizes, seed, ops);
    }
}
