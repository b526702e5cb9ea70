//! Reading ahead changes nothing but the time: rows, counters and committed places are the same with it and without,
//! whatever is planned and comes out otherwise, through kills, errors, new files and floors.

use std::collections::BTreeMap;

use arrow::array::TimestampMicrosecondArray;
use arrow::datatypes::TimeUnit;
use millrace_common::fault_injection::{READ_AHEAD_BUGS, plant};
use millrace_common::{SqlState, SqlType, random_tests};
use millrace_functions::expr::column;
use millrace_graph::codec::encode_watermark;
use millrace_graph::lookahead::Place;
use millrace_rpc::catalog::{Column, Relation, Watermark as DeclaredWatermark};
use millrace_rpc::log::{SourceFile, SplitMark, SplitMarkAt};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::watch;

use super::*;
use crate::lookahead::read_ahead::{ReadFrom as AheadFrom, read_ahead};
use crate::lookahead::uncommitted::{Following, Uncommitted};
use crate::memory::{MemoryClass, MemoryGovernor};
use crate::operators::tests::model::PLANTED;

const SPLITS: u32 = 3;
const SOURCE: RelationId = RelationId(9);
/// Rows of a file.
const FILE: u64 = 40;

#[tokio::test(start_paused = true)]
async fn a_leaf_that_stands_still_holds_nothing_and_misses_nothing_when_it_goes_on() {
    let outside = Outside::new(&plain());
    let mut leaf = Leaf::start(&outside, &BTreeMap::new(), true, None);
    let mut rows = Vec::new();
    for epoch in 1..4 {
        outside.fix(epoch, false);
        rows.push(leaf.epoch(epoch, usize::MAX).await.unwrap());
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        assert!(leaf.governor.used_by(MemoryClass::Ahead) > 0, "epoch {epoch}");
        tokio::time::sleep(std::time::Duration::from_secs(60)).await;
        assert_eq!(leaf.governor.used_by(MemoryClass::Ahead), 0, "epoch {epoch}");
    }
    let expected: Vec<_> =
        tell(&plain(), false).await.into_iter().map(|s| s.rows).take(3).collect();
    assert_eq!(rows, expected);
}

#[test]
fn bad_rows_that_are_held_count() {
    let bad = |n: u64| BadRow {
        place: "split 0".to_owned(),
        error: SqlError::new(SqlState::INVALID_TEXT_REPRESENTATION, format!("row {n} is bad")),
    };
    let batch = |count| RawBatch {
        rows: RecordBatch::new_empty(row_schema()),
        after: 1,
        position: None,
        bad_rows: (0..count).map(bad).collect(),
        announced: None,
    };
    let (none, many) = (batch(0).memory_size(), batch(8_192).memory_size());
    assert!(none > 0, "no batch is for nothing");
    assert!(many >= 8_192 * size_of::<BadRow>(), "{many} bytes");
}

/// What happens to a source and to the job that reads it.
#[derive(Clone, Debug)]
struct Story {
    /// Where the splits end at each epoch; the first is empty.
    epochs: Vec<[u64; SPLITS as usize]>,
    marks: Vec<SplitMarkAt>,
    /// At which epochs a bad row is to fail, at first.
    fails: Vec<bool>,
    /// After how many chunks the job is killed in an epoch, the first time.
    kills: Vec<Option<usize>>,
    /// How far what is planned for an epoch lies beyond what then is fixed.
    beyond: Vec<u64>,
    /// What happens beside the job before it is told of an epoch.
    pauses: Vec<usize>,
}

impl Story {
    fn random(seed: u64) -> Story {
        let mut random = StdRng::seed_from_u64(seed);
        let mut epochs = vec![[0; SPLITS as usize]];
        let mut marks = Vec::new();
        for epoch in 1..10 {
            let before = epochs[epoch - 1];
            for split in (0..SPLITS).filter(|_| random.random_bool(0.2)) {
                let floor = Some(before[split as usize] as i64 * 10 + 20);
                let mark = SplitMark { split, idle: false, floor };
                marks.push(SplitMarkAt {
                    epoch: epoch as u64,
                    mark,
                    offset: before[split as usize],
                });
            }
            epochs.push(before.map(|offset| offset + random.random_range(0..25)));
        }
        let count = epochs.len();
        let mut each =
            |chance: f64| (0..count).map(|_| random.random_bool(chance)).collect::<Vec<_>>();
        let (fails, killed, wrong) = (each(0.2), each(0.3), each(0.3));
        let mut number = |of: &[bool], most: usize| {
            of.iter().map(|is| is.then(|| random.random_range(0..most))).collect::<Vec<_>>()
        };
        let kills = number(&killed, 6);
        let beyond = number(&wrong, 4).into_iter().map(|n| n.map_or(0, |n| n as u64 + 1)).collect();
        let pauses = (0..count).map(|_| random.random_range(0..12)).collect();
        Story { epochs, marks, fails, kills, beyond, pauses }
    }

    /// Where a split's content ends that is known of at an epoch.
    fn files_end(&self, epoch: usize, split: u32) -> u64 {
        self.epochs[epoch][split as usize].div_ceil(FILE) * FILE
    }
}

/// What the log and the catalog say.
struct Outside {
    story: Story,
    /// The newest epoch that is fixed.
    fixed: Mutex<usize>,
    fails: Mutex<bool>,
    changes: watch::Sender<u64>,
    /// The splits of each question how far may be read ahead.
    asked: Mutex<Vec<Vec<u32>>>,
}

impl Outside {
    fn new(story: &Story) -> Arc<Outside> {
        let (fixed, fails, changes) = (Mutex::new(0), Mutex::new(false), watch::Sender::new(0));
        Arc::new(Outside { story: story.clone(), fixed, fails, changes, asked: Mutex::default() })
    }

    fn fix(&self, epoch: usize, fails: bool) {
        (*self.fixed.lock(), *self.fails.lock()) = (epoch, fails);
        self.changes.send_modify(|n| *n += 1);
    }
}

struct Log(Arc<Outside>);

#[async_trait]
impl MetaService for Log {
    fn request_cut(&self, _: JobId) {}

    async fn commit_edit(&self, _: JobId, _: Generation, _: VersionEdit) -> Result<bool, SqlError> {
        Ok(true)
    }

    fn report_failure(&self, _: JobId, _: Generation, _: SqlError) {}

    fn source_offsets(&self, _: RelationId, epoch: Epoch) -> Vec<(u32, u64)> {
        (0..SPLITS).zip(self.0.story.epochs[epoch.0 as usize]).collect()
    }

    fn source_ahead(&self, _: RelationId, splits: &[(u32, u64)]) -> Vec<Option<u64>> {
        self.0.asked.lock().push(splits.iter().map(|(split, _)| *split).collect());
        let (story, fixed) = (&self.0.story, *self.0.fixed.lock());
        let next = |&(split, offset): &(u32, u64)| {
            let end = |epoch: usize| Some(story.epochs.get(epoch)?[split as usize]);
            let planned = end(fixed + 1).map(|end| end + story.beyond[fixed + 1]);
            (0..=fixed).filter_map(end).chain(planned).find(|end| *end > offset)
        };
        splits.iter().map(next).collect()
    }

    fn source_marks(&self, _: RelationId, epoch: Epoch) -> Vec<SplitMarkAt> {
        self.0.story.marks.iter().filter(|m| m.epoch <= epoch.0).copied().collect()
    }

    fn source_parts(&self, _: RelationId) -> SourceParts {
        let fixed = *self.0.fixed.lock();
        let file = |split| {
            let length = self.0.story.files_end(fixed, split);
            SourceFile { split, length, ..SourceFile::default() }
        };
        SourceParts { files: Arc::new((0..SPLITS).map(file).collect()), ..SourceParts::default() }
    }

    fn option(&self, _: RelationId, name: &str) -> Option<String> {
        assert_eq!(name, "on_error");
        Some(if *self.0.fails.lock() { "fail" } else { "skip" }.to_string())
    }

    fn changes(&self, _: RelationId) -> Option<watch::Receiver<u64>> {
        Some(self.0.changes.subscribe())
    }

    fn graph(&self, _: RelationId) -> Option<Bytes> {
        None
    }
}

fn row_schema() -> SchemaRef {
    let time = DataType::Timestamp(TimeUnit::Microsecond, None);
    Arc::new(Schema::new(vec![
        Field::new("n", DataType::Int64, true),
        Field::new("at", time, true),
    ]))
}

/// Row k of split s holds `s * 1000 + k` and a time; every seventh is bad, every fifth old.
struct Rows;

struct RowReader {
    split: u32,
    at: u64,
    parts: SourceParts,
    on_error: OnError,
    bad: Vec<BadRow>,
}

#[async_trait]
impl Source for Rows {
    fn schema(&self) -> SchemaRef {
        row_schema()
    }

    async fn poll(&self, _: &Known) -> Result<Polled, ConnectorError> {
        Ok(Polled::default())
    }

    fn open(&self, from: ReadFrom, _: &[usize]) -> Result<Box<dyn SplitReader>, ConnectorError> {
        // As a reader of files does: a place that is known exactly is where it goes on.
        let known = from.position.filter(|p| p.offset >= from.offset);
        known.into_iter().for_each(|p| assert_eq!(p.line, p.offset * 10));
        let at = known.map_or(from.offset, |p| p.offset);
        let (on_error, bad) = (OnError::Skip, Vec::new());
        Ok(Box::new(RowReader { split: from.split, at, parts: from.parts, on_error, bad }))
    }
}

#[async_trait]
impl SplitReader for RowReader {
    async fn read(&mut self, until: u64, max_rows: usize) -> ReadResult {
        tokio::task::yield_now().await;
        let end = until.min(self.at + max_rows as u64);
        let (mut numbers, mut times) = (Vec::new(), Vec::new());
        for k in self.at..end {
            let known = self.parts.files.iter().filter(|f| f.split == self.split);
            if known.map(|f| f.length).sum::<u64>() <= k {
                return Err(ConnectorError::NoSuchSplit(self.split));
            }
            if k % 7 == 3 {
                let place = format!("split {}", self.split);
                let error = SqlError::new(SqlState::BAD_COPY_FILE_FORMAT, format!("row {k}"));
                if self.on_error == OnError::Fail {
                    return Err(ConnectorError::BadRow { place, error: Box::new(error) });
                }
                self.bad.push(BadRow { place, error });
                continue;
            }
            numbers.push(i64::from(self.split) * 1_000 + k as i64);
            times.push(k as i64 * 10 - if k % 5 == 2 { 35 } else { 0 });
        }
        self.at = end;
        let (numbers, times) = (Int64Array::from(numbers), TimestampMicrosecondArray::from(times));
        let columns: Vec<ArrayRef> = vec![Arc::new(numbers), Arc::new(times)];
        Ok(Some((RecordBatch::try_new(row_schema(), columns)?, end)))
    }

    fn position(&self) -> Option<Position> {
        Some(Position { offset: self.at, line: self.at * 10 })
    }

    fn take_bad_rows(&mut self) -> Vec<BadRow> {
        std::mem::take(&mut self.bad)
    }

    fn set_on_error(&mut self, on_error: OnError) {
        self.on_error = on_error;
    }

    fn extend(&mut self, parts: &SourceParts) {
        self.parts = parts.clone();
    }
}

/// A source with a watermark on its second column.
fn relation() -> Relation {
    let column_of = |name: &str, sql_type: SqlType| Column {
        name: name.to_string(),
        sql_type: sql_type.into(),
        nullable: true,
        ..Column::default()
    };
    let expr = encode_watermark(&column(&row_schema(), 1)).unwrap();
    Relation {
        id: SOURCE.0,
        columns: vec![column_of("n", SqlType::BigInt), column_of("at", SqlType::Timestamp)],
        watermark: Some(DeclaredWatermark { column: 1, expr, ..DeclaredWatermark::default() }),
        ..Relation::default()
    }
}

/// The job's leaf in one generation.
struct Leaf {
    reader: SourceReader,
    errors: Arc<ErrorSink>,
    /// What reads ahead, if anything does.
    beside: Option<tokio::task::JoinHandle<()>>,
    governor: Arc<MemoryGovernor>,
}

impl Leaf {
    fn start(
        outside: &Arc<Outside>,
        counters: &BTreeMap<String, u64>,
        is_ahead: bool,
        followers: Option<Arc<Uncommitted>>,
    ) -> Leaf {
        let meta: Arc<dyn MetaService> = Arc::new(Log(Arc::clone(outside)));
        let errors = Arc::new(ErrorSink::load(counters));
        let watermark = SourceWatermark::of(&relation(), &[0]).unwrap();
        let governor = MemoryGovernor::new(1 << 30);
        let ahead = is_ahead.then(|| {
            let (ahead, work) = read_ahead(AheadFrom {
                relation: SOURCE,
                watermark: watermark.clone(),
                meta: Arc::clone(&meta),
                read_rows: 4,
                governor: Arc::clone(&governor),
                clock: EnvHandle::default(),
                followers,
            });
            (ahead, tokio::spawn(work.run()))
        });
        let (ahead, beside) = ahead.unzip();
        let from = SourceInput {
            input: 0,
            relation: SOURCE,
            source: Arc::new(Rows),
            columns: vec![0],
            watermark,
            meta,
            scan_rows: 100,
            stage: 0,
            read_rows: 4,
            errors: Arc::clone(&errors),
            progress: Arc::new(Progress::new(EnvHandle::default())),
            counters: counters.clone(),
        };
        let reader = SourceReader::new(from, 0, 1, None, ahead).unwrap();
        Leaf { reader, errors, beside, governor }
    }

    /// The rows of an epoch, as many chunks of them as asked for; `None`: it failed.
    async fn epoch(&mut self, epoch: usize, chunks: usize) -> Option<Vec<i64>> {
        let (prev, epoch) = (Epoch(epoch as u64 - 1), Epoch(epoch as u64));
        let barrier = Barrier { prev, epoch, backfill: false, stage: 0, swap: false };
        self.reader.begin(&barrier).unwrap();
        let mut rows = Vec::new();
        for _ in 0..chunks {
            let next = loop {
                tokio::select! {
                    biased;
                    next = self.reader.next() => break next,
                    // Dropped and taken up again.
                    () = tokio::task::yield_now() => {}
                }
            };
            match next {
                Ok(Some(chunk)) => {
                    rows.extend(chunk.batch.column(0).as_primitive::<Int64Type>().values())
                }
                Ok(None) => break,
                Err(_) => return None,
            }
        }
        rows.sort_unstable();
        Some(rows)
    }

    /// What is committed with an epoch.
    fn commit(&self, counters: &mut BTreeMap<String, u64>) {
        self.reader.counters(counters);
        counters.extend(self.errors.unsaved());
    }
}

impl Drop for Leaf {
    fn drop(&mut self) {
        self.beside.iter().for_each(|beside| beside.abort());
    }
}

/// What a job has to show for an epoch.
#[derive(Debug, PartialEq)]
struct Shown {
    rows: Vec<i64>,
    failed: bool,
    counters: BTreeMap<String, u64>,
}

async fn tell(story: &Story, is_ahead: bool) -> Vec<Shown> {
    let outside = Outside::new(story);
    let mut counters = BTreeMap::new();
    let mut leaf = Leaf::start(&outside, &counters, is_ahead, None);
    let mut shown = Vec::new();
    for epoch in 1..story.epochs.len() {
        for _ in 0..story.pauses[epoch] {
            tokio::task::yield_now().await;
        }
        outside.fix(epoch, story.fails[epoch]);
        if let Some(chunks) = story.kills[epoch] {
            let _ = leaf.epoch(epoch, chunks).await;
            leaf = Leaf::start(&outside, &counters, is_ahead, None);
        }
        let mut rows = leaf.epoch(epoch, usize::MAX).await;
        let failed = rows.is_none();
        if failed {
            outside.fix(epoch, false);
            leaf = Leaf::start(&outside, &counters, is_ahead, None);
            rows = leaf.epoch(epoch, usize::MAX).await;
        }
        leaf.commit(&mut counters);
        shown.push(Shown { rows: rows.unwrap(), failed, counters: counters.clone() });
    }
    shown
}

/// The first story that is told otherwise by a job that reads ahead.
async fn difference(seeds: u32) -> Option<u64> {
    for seed in 0..u64::from(seeds) {
        let story = Story::random(seed);
        // Without reading ahead no bug of it can be.
        let (expected, got) = (tell(&story, false).await, tell(&story, true).await);
        if expected != got {
            return Some(seed);
        }
    }
    None
}

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(test)
}

#[test]
fn reading_ahead_changes_no_row_no_counter_and_no_place() {
    let _unplanted = PLANTED.read();
    assert_eq!(run(difference(random_tests::cases(200, 5_000))), None);
    let whole: Vec<Shown> = run(tell(&Story::random(0), true));
    let last = &whole.last().unwrap().counters;
    let counted = |name: &str| last.iter().any(|(n, v)| n.starts_with(name) && *v > 0);
    assert!(counted("errors.total") && counted("late.") && counted("position."), "{last:?}");
}

#[test]
fn every_planted_bug_of_reading_ahead_is_noticed() {
    let _alone = PLANTED.write();
    for (bug, _) in READ_AHEAD_BUGS {
        plant(Some(bug));
        let found = run(difference(200));
        plant(None);
        assert!(found.is_some(), "{bug} was not noticed");
    }
}

/// Epochs of five rows a split, all as planned.
fn plain() -> Story {
    let epochs: Vec<_> = (0..10).map(|e| [e * 5; SPLITS as usize]).collect();
    let count = epochs.len();
    Story {
        epochs,
        marks: Vec::new(),
        fails: vec![false; count],
        kills: vec![None; count],
        beyond: vec![0; count],
        pauses: vec![0; count],
    }
}

async fn announced(following: &mut Following) -> Vec<(Place, Vec<i64>)> {
    let mut all = Vec::new();
    while let Some(Some(next)) = futures::FutureExt::now_or_never(following.next()) {
        for rows in &next.rows {
            let numbers = rows.column(0).as_primitive::<Int64Type>();
            all.push((next.place, numbers.values().to_vec()));
            assert_eq!(rows.num_columns(), 1, "as the leaf hands them out");
        }
    }
    all
}

#[tokio::test]
async fn rows_of_the_next_epoch_are_announced_before_it_and_are_due_with_it() {
    let outside = Outside::new(&plain());
    let uncommitted = Arc::new(Uncommitted::default());
    let mut following = uncommitted.follow(SOURCE, vec![Place::Entry]);
    let mut leaf = Leaf::start(&outside, &BTreeMap::new(), true, Some(Arc::clone(&uncommitted)));
    outside.fix(1, false);
    assert_eq!(leaf.epoch(1, usize::MAX).await.unwrap().len(), 9);
    // Epoch 2 is only planned; nobody has asked for its rows.
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
    let mut rows: Vec<i64> = Vec::new();
    let mut dues = Vec::new();
    while let Some(Some(next)) = futures::FutureExt::now_or_never(following.next()) {
        assert_eq!(next.place, Place::Entry);
        dues.push(next.due);
        for batch in &next.rows {
            rows.extend(batch.column(0).as_primitive::<Int64Type>().values());
        }
    }
    rows.sort_unstable();
    let expected: Vec<i64> = (0..3).flat_map(|s| (5..10).map(move |k| s * 1_000 + k)).collect();
    assert_eq!(rows, expected, "late rows, too: which are late is not known yet");
    assert!(leaf.governor.used_by(MemoryClass::Ahead) > 0);
    assert_eq!(leaf.errors.total(), 3, "bad rows of the first epoch");
    assert!(!dues.iter().any(|due| due.has_passed(u64::MAX)), "not handed out");
    outside.fix(2, false);
    leaf.epoch(2, usize::MAX).await.unwrap();
    assert!(dues.iter().all(|due| due.has_passed(2) && !due.has_passed(1)));
}

/// Once all splits stand at the end of what is planned, a change of the source is one question, whatever their number;
/// and without a change there is none.
#[tokio::test(start_paused = true)]
async fn meta_is_asked_once_for_all_splits_when_something_has_changed() {
    let outside = Outside::new(&plain());
    let mut leaf = Leaf::start(&outside, &BTreeMap::new(), true, None);
    outside.fix(1, false);
    leaf.epoch(1, usize::MAX).await.unwrap();
    // The clock goes on when nothing else does: what is planned has been read. It is not given back yet.
    let a_moment = std::time::Duration::from_millis(10);
    tokio::time::sleep(a_moment).await;
    outside.asked.lock().clear();
    tokio::time::sleep(a_moment).await;
    assert_eq!(*outside.asked.lock(), Vec::<Vec<u32>>::new());
    outside.fix(2, false);
    tokio::time::sleep(a_moment).await;
    assert!(leaf.governor.used_by(MemoryClass::Ahead) > 0);
    let mut first = outside.asked.lock()[0].clone();
    first.sort_unstable();
    assert_eq!(first, [0, 1, 2]);
}

#[tokio::test]
async fn nothing_is_read_beyond_what_is_planned_and_nothing_stays() {
    let outside = Outside::new(&plain());
    let uncommitted = Arc::new(Uncommitted::default());
    let mut following = uncommitted.follow(SOURCE, vec![Place::Entry]);
    let mut leaf = Leaf::start(&outside, &BTreeMap::new(), true, Some(Arc::clone(&uncommitted)));
    outside.fix(1, false);
    leaf.epoch(1, usize::MAX).await.unwrap();
    for _ in 0..500 {
        tokio::task::yield_now().await;
    }
    let seen = announced(&mut following).await;
    let last = seen.iter().flat_map(|(_, rows)| rows).map(|n| n % 1_000).max();
    assert_eq!(last, Some(9), "epoch 3 is not planned");
    let governor = Arc::clone(&leaf.governor);
    let beside = leaf.beside.take().unwrap();
    drop(leaf);
    beside.await.unwrap();
    assert_eq!(governor.used_by(MemoryClass::Ahead), 0);
}
