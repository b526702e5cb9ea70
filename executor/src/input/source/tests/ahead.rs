//! Reading ahead changes nothing but the time: rows, counters, late counts, watermarks and committed places are the same
//! with it and without, whatever is planned and comes out otherwise, through first scans, kills, errors (also where what a
//! bad row does is altered), new files and splits, floors and idle marks.

mod story;

use std::collections::BTreeMap;

use arrow::array::TimestampMicrosecondArray;
use arrow::datatypes::TimeUnit;
use millrace_common::fault_injection::{READ_AHEAD_BUGS, plant};
use millrace_common::{SqlState, SqlType, random_tests};
use millrace_functions::expr::column;
use millrace_graph::codec::encode_watermark;
use millrace_graph::lookahead::Place;
use millrace_rpc::catalog::{Column, Relation, Watermark as DeclaredWatermark};
use millrace_rpc::log::{SourceFile, SplitMarkAt};
use parking_lot::Mutex;
use tokio::sync::watch;

use self::story::{Story, plain};
use super::*;
use crate::lookahead::keys_ahead::KeysAhead;
use crate::lookahead::read_ahead::{LeafFollowers, ReadFrom as AheadFrom, read_ahead};
use crate::lookahead::uncommitted::{Following, Uncommitted};
use crate::memory::{MemoryClass, MemoryGovernor};
use crate::operators::tests::model::PLANTED;

const SPLITS: u32 = 3;
/// It may be found later than the others.
const LAST: u32 = SPLITS - 1;
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
        weights: None,
        after: 1,
        position: None,
        bad_rows: (0..count).map(bad).collect(),
        announced: None,
        keys: KeysAhead::default(),
    };
    let (none, many) = (batch(0).memory_size(), batch(8_192).memory_size());
    assert!(none > 0, "no batch is for nothing");
    assert!(many >= 8_192 * size_of::<BadRow>(), "{many} bytes");
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

    /// What runs beside the job has the time that the story gives it at number `n`.
    async fn pause(&self, n: usize) {
        for _ in 0..self.story.pauses[n % self.story.pauses.len()] {
            tokio::task::yield_now().await;
        }
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
        let (story, epoch) = (&self.0.story, epoch.0 as usize);
        story.splits(epoch).map(|split| (split, story.epochs[epoch][split as usize])).collect()
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
        let files = self.0.story.splits(fixed).map(file).collect();
        SourceParts { files: Arc::new(files), ..SourceParts::default() }
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
        Leaf::resume(outside, counters, None, is_ahead, followers)
    }

    /// `backfill`: the first scan as committed.
    fn resume(
        outside: &Arc<Outside>,
        counters: &BTreeMap<String, u64>,
        backfill: Option<&BackfillState>,
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
                meta: Arc::clone(&meta),
                read_rows: 4,
                governor: Arc::clone(&governor),
                clock: EnvHandle::default(),
                told: Box::new(LeafFollowers {
                    relation: SOURCE,
                    watermark: watermark.clone(),
                    uncommitted: followers,
                }),
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
            scan_rows: 20,
            stage: 0,
            read_rows: 4,
            errors: Arc::clone(&errors),
            progress: Arc::new(Progress::new(EnvHandle::default())),
            counters: counters.clone(),
        };
        let reader = SourceReader::new(from, 0, 1, backfill, ahead).unwrap();
        Leaf { reader, errors, beside, governor }
    }

    /// The rows of an epoch, as many chunks of them as asked for; `None`: it failed.
    async fn epoch(&mut self, epoch: usize, chunks: usize) -> Option<Vec<i64>> {
        self.read(&next_epoch(epoch), chunks).await
    }

    /// The same of an epoch, or of a step of the first scan.
    async fn read(&mut self, barrier: &Barrier, chunks: usize) -> Option<Vec<i64>> {
        self.reader.begin(barrier).unwrap();
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

fn next_epoch(epoch: usize) -> Barrier {
    let (prev, epoch) = (Epoch(epoch as u64 - 1), Epoch(epoch as u64));
    Barrier { prev, epoch, backfill: false, stage: 0, swap: false }
}

/// What a job has to show for an epoch, or for a step of its first scan.
#[derive(Debug, PartialEq)]
struct Shown {
    rows: Vec<i64>,
    failed: bool,
    counters: BTreeMap<String, u64>,
    marks: WatermarkSet,
    positions: Vec<BackfillPosition>,
    /// Rows of the first scan.
    scanned: u64,
}

/// A job through all its generations, with what is committed of it.
struct Job {
    outside: Arc<Outside>,
    is_ahead: bool,
    counters: BTreeMap<String, u64>,
    backfill: Option<BackfillState>,
    leaf: Leaf,
}

impl Job {
    fn start(story: &Story, is_ahead: bool) -> Job {
        let (outside, counters) = (Outside::new(story), BTreeMap::new());
        let scan = |epoch| BackfillState { snapshot_epoch: epoch, ..BackfillState::default() };
        let backfill = story.scan.map(|epoch| scan(epoch as u64));
        let leaf = Leaf::resume(&outside, &counters, backfill.as_ref(), is_ahead, None);
        Job { outside, is_ahead, counters, backfill, leaf }
    }

    fn restart(&mut self) {
        let (counters, backfill) = (&self.counters, self.backfill.as_ref());
        self.leaf = Leaf::resume(&self.outside, counters, backfill, self.is_ahead, None);
    }

    /// Goes on to a barrier, where the story has number `n`, and commits.
    async fn go_on(&mut self, barrier: &Barrier, n: usize) -> Shown {
        let outside = Arc::clone(&self.outside);
        if let Some(chunks) = outside.story.kills[n % outside.story.kills.len()] {
            let _ = self.leaf.read(barrier, chunks).await;
            self.restart();
        }
        let mut rows = self.leaf.read(barrier, usize::MAX).await;
        let failed = rows.is_none();
        if failed {
            outside.fix(barrier.epoch.0 as usize, false);
            self.restart();
            rows = self.leaf.read(barrier, usize::MAX).await;
        }
        self.leaf.commit(&mut self.counters);
        let mut positions = Vec::new();
        self.leaf.reader.positions(&mut positions);
        let scan = self.backfill.take().filter(|_| barrier.backfill);
        self.backfill = scan.map(|scan| BackfillState { positions: positions.clone(), ..scan });
        Shown {
            rows: rows.unwrap(),
            failed,
            counters: self.counters.clone(),
            marks: self.leaf.reader.marks(),
            positions,
            scanned: self.leaf.reader.take_scanned(),
        }
    }

    /// All steps of the first scan.
    async fn scan(&mut self, epoch: usize) -> Vec<Shown> {
        let mut shown: Vec<Shown> = Vec::new();
        let at = Epoch(epoch as u64);
        let barrier = Barrier { prev: at, epoch: at, backfill: true, stage: 0, swap: false };
        self.outside.fix(epoch, self.outside.story.fails[epoch]);
        while shown.last().is_none_or(|step| step.positions.iter().any(|p| !p.done)) {
            self.outside.pause(shown.len()).await;
            let step = self.go_on(&barrier, shown.len()).await;
            shown.push(step);
            assert!(shown.len() < 1_000, "the scan does not end");
        }
        shown
    }
}

async fn tell(story: &Story, is_ahead: bool) -> Vec<Shown> {
    let mut job = Job::start(story, is_ahead);
    let mut shown = match story.scan {
        Some(epoch) => job.scan(epoch).await,
        None => Vec::new(),
    };
    for epoch in story.scan.unwrap_or(0) + 1..story.epochs.len() {
        job.outside.pause(epoch).await;
        job.outside.fix(epoch, story.fails[epoch]);
        shown.push(job.go_on(&next_epoch(epoch), epoch).await);
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

/// Whatever is to change nothing happens in some story, and shows.
#[test]
fn stories_have_scans_new_splits_and_idle_ones() {
    let _unplanted = PLANTED.read();
    let stories: Vec<Story> = (0..50).map(Story::random).collect();
    let is_found_later = |s: &&Story| s.found > s.scan.unwrap_or(0) + 1;
    let (scans, others): (Vec<&Story>, Vec<&Story>) =
        stories.iter().partition(|story| story.scan.is_some());
    for of in [&scans, &others] {
        assert!(of.iter().any(is_found_later));
        assert!(of.iter().any(|story| story.marks.iter().any(|at| at.mark.idle)));
    }
    let mut steps = 0;
    let mut all_marks = Vec::new();
    for story in &stories {
        let shown = run(tell(story, true));
        let epochs = story.epochs.len() - 1 - story.scan.unwrap_or(0);
        steps = steps.max(shown.len() - epochs);
        all_marks.extend(shown.into_iter().map(|shown| shown.marks));
    }
    assert!(steps > 3, "no first scan has more than {steps} steps");
    let has_value = |marks: &WatermarkSet| marks.iter().any(|(_, value)| value.is_some());
    assert!(all_marks.iter().any(has_value));
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

async fn announced(following: &mut Following) -> Vec<(Place, Vec<i64>)> {
    let mut all = Vec::new();
    while let Some(Some(next)) = futures::FutureExt::now_or_never(following.next()) {
        for rows in &next.rows {
            let numbers = rows.batch.column(0).as_primitive::<Int64Type>();
            all.push((next.place, numbers.values().to_vec()));
            assert_eq!(rows.batch.num_columns(), 1, "as the leaf hands them out");
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
            rows.extend(batch.batch.column(0).as_primitive::<Int64Type>().values());
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
