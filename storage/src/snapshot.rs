//! Reads of a job's state as of an epoch. A snapshot holds the version it was made from, so nothing
//! that happens later (publishes, flushes, compactions) changes what it reads.

use std::ops::{Bound, Range};
use std::sync::Arc;

use arrow::array::{BinaryArray, Int64Array, RecordBatch};
use arrow::datatypes::SchemaRef;
use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_common::{Epoch, TableId, Vnode};
use millrace_rpc::version::RunMeta;

use crate::block::Entries;
use crate::cache::Priority;
use crate::committed::Committed;
use crate::disk;
use crate::entry::{Found, rebuild};
use crate::error::{Result, StorageError};
use crate::follower::Held;
use crate::memrun::MemRun;
use crate::merge::{Merger, Mode, Source, rank};
use crate::read_counts::SCAN_KEYS;
use crate::version::{TableVersion, Version};
use crate::writer::{LookupRequest, ask, memory_sources};

/// Bounds of key bytes.
pub type KeyRange = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// Key ranges of one scan that are read at the same time.
const RANGES_AT_ONCE: usize = 16;

/// What a scan reads.
#[derive(Clone, Debug)]
pub struct ScanOptions {
    /// Value columns; `None`: all.
    pub projection: Option<Vec<usize>>,
    pub with_keys: bool,
    pub range: Option<KeyRange>,
    pub vnodes: Option<Range<Vnode>>,
    pub batch_rows: usize,
}

impl Default for ScanOptions {
    fn default() -> ScanOptions {
        ScanOptions {
            projection: None,
            with_keys: false,
            range: None,
            vnodes: None,
            batch_rows: 8192,
        }
    }
}

/// Rows that exist, in key order; weights > 0.
#[derive(Clone, Debug)]
pub struct ScanBatch {
    pub keys: Option<BinaryArray>,
    pub weights: Int64Array,
    pub values: RecordBatch,
}

/// A job's state as of an epoch.
#[derive(Clone)]
pub struct Snapshot {
    committed: Arc<Committed>,
    version: Arc<Version>,
    epoch: Epoch,
    /// Of a follower: that the snapshot is open.
    held: Option<Arc<Held>>,
}

impl Snapshot {
    pub(crate) fn new(committed: Arc<Committed>, version: Arc<Version>, epoch: Epoch) -> Snapshot {
        Snapshot { committed, version, epoch, held: None }
    }

    /// The same, of a follower: `hold` makes what says of a version that it is being read.
    pub(crate) fn held(self, hold: impl FnOnce(&Arc<Version>) -> Held) -> Snapshot {
        let held = Some(Arc::new(hold(&self.version)));
        Snapshot { held, ..self }
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The runs that a table consists of, beside what is in memory.
    pub fn runs(&self, table: TableId) -> Vec<RunMeta> {
        self.version.table(table).map_or_else(
            |_| Vec::new(),
            |table| table.disk.iter().map(|run| run.meta().clone()).collect(),
        )
    }

    /// How many columns the rows of a table have, if they are those of a relation. `None`: the table is part of the job's
    /// state only, or of another job.
    pub fn relation_columns(&self, table: TableId) -> Option<usize> {
        let desc = &self.version.table(table).ok()?.desc;
        desc.relation.then(|| desc.value_schema.fields().len())
    }

    /// About how many entries a table has and the bytes that hold them, older versions included.
    pub fn size(&self, table: TableId) -> Result<(u64, u64)> {
        let table = self.version.table(table)?;
        let memory = table.mem.iter().map(|run| (run.num_rows() as u64, run.memory_size() as u64));
        let disk = table.disk.iter().map(|run| (run.meta().rows, run.meta().length));
        Ok(memory.chain(disk).fold((0, 0), |sum, run| (sum.0 + run.0, sum.1 + run.1)))
    }

    /// The rows of a table, in key order.
    pub fn scan(
        &self,
        table: TableId,
        options: ScanOptions,
    ) -> BoxStream<'static, Result<ScanBatch>> {
        match self.merger(table, &options) {
            Err(e) => futures::stream::once(futures::future::ready(Err(e))).boxed(),
            Ok((merger, schema)) => {
                let held = self.held.clone();
                let to_batch = move |batch: Result<Entries>| {
                    let batch = batch.map_err(|error| explain(held.as_deref(), error))?;
                    scan_batch(batch, &schema, options.with_keys)
                };
                merger.into_stream().map(to_batch).boxed()
            }
        }
    }

    /// The rows of a table in any of these ranges. They are read beside each other, so the rows are in no order.
    pub fn scan_ranges(
        &self,
        table: TableId,
        ranges: Vec<KeyRange>,
        options: ScanOptions,
    ) -> BoxStream<'static, Result<ScanBatch>> {
        let snapshot = self.clone();
        futures::stream::iter(ranges)
            .map(move |range| {
                snapshot.scan(table, ScanOptions { range: Some(range), ..options.clone() })
            })
            .flatten_unordered(RANGES_AT_ONCE)
            .boxed()
    }

    fn merger(&self, id: TableId, options: &ScanOptions) -> Result<(Merger, SchemaRef)> {
        let table = self.version.table(id)?;
        let mode = Mode::AsOf(self.epoch);
        let range = key_range(options.range.as_ref(), options.vnodes.as_ref());
        let projection = options.projection.as_deref();
        let sources = table_sources(&self.committed, table, mode, &range, projection)?;
        let project = |schema: &SchemaRef| -> Result<SchemaRef> {
            Ok(match projection {
                None => Arc::clone(schema),
                Some(columns) => Arc::new(schema.project(columns)?),
            })
        };
        let stored = project(table.schema())?;
        let merger = Merger::new(table.desc.storage, mode, stored, options.batch_rows, sources);
        Ok((merger, project(&table.desc.value_schema)?))
    }

    /// The current rows of these keys, sorted by (input, key).
    pub async fn multi_get(&self, table: TableId, keys: BinaryArray) -> Result<Found> {
        self.ask(table, LookupRequest::Keys(keys)).await
    }

    /// All rows whose key starts with a prefix, in key order, at most `limit` a prefix.
    pub async fn multi_scan(
        &self,
        table: TableId,
        prefixes: BinaryArray,
        limit: Option<usize>,
    ) -> Result<Found> {
        self.ask(table, LookupRequest::Prefixes(prefixes, limit)).await
    }

    async fn ask(&self, table: TableId, question: LookupRequest) -> Result<Found> {
        let table = Arc::clone(self.version.table(table)?);
        let memory = memory_sources(&table, self.epoch);
        let found = ask(&self.committed, table, memory, self.epoch, question).wait().await;
        found.map_err(|error| self.explain(error))
    }

    /// What an error of a read means to who reads this snapshot.
    pub(crate) fn explain(&self, error: StorageError) -> StorageError {
        explain(self.held.as_deref(), error)
    }

    pub(crate) fn table(&self, id: TableId) -> Result<&Arc<TableVersion>> {
        self.version.table(id)
    }

    pub(crate) fn committed(&self) -> &Arc<Committed> {
        &self.committed
    }
}

fn explain(held: Option<&Held>, error: StorageError) -> StorageError {
    match held {
        Some(held) => held.explain(error),
        None => error,
    }
}

fn scan_batch(entries: Entries, schema: &SchemaRef, with_keys: bool) -> Result<ScanBatch> {
    let rows = entries.len();
    Ok(ScanBatch {
        weights: entries.weights_array(),
        values: rebuild(schema, entries.values.columns().to_vec(), rows)?,
        keys: with_keys.then_some(entries.keys),
    })
}

/// Committed memory and disk runs of a table that matter to `mode`, cut to a key range.
pub(crate) fn table_sources(
    committed: &Committed,
    table: &TableVersion,
    mode: Mode,
    range: &KeyRange,
    projection: Option<&[usize]>,
) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for run in table.mem.iter().filter(|r| mode.wants(r.min_epoch, r.max_epoch)) {
        sources.push(Source::memory(run_range(run, range, projection)?, rank(0, run.max_sequence)));
    }
    let wanted = table.disk.iter().filter(|run| {
        let meta = run.meta();
        mode.wants(Epoch(meta.min_epoch), Epoch(meta.max_epoch))
    });
    if matches!(mode, Mode::AsOf(_)) && !table.disk.is_empty() {
        committed.note_reads(&table.reads, SCAN_KEYS, false);
    }
    sources.extend(disk::scan_all(
        &committed.shared,
        wanted.cloned(),
        mode,
        range,
        projection,
        Priority::Scan,
    ));
    Ok(sources)
}

/// The batches of a memory run inside a range, as zero-copy windows.
fn run_range(run: &MemRun, range: &KeyRange, projection: Option<&[usize]>) -> Result<Vec<Entries>> {
    let mut cut = Vec::new();
    for batch in run.batches() {
        let window = cut_range(batch, range);
        if !window.is_empty() {
            cut.push(match projection {
                None => window,
                Some(columns) => window.project(columns)?,
            });
        }
    }
    Ok(cut)
}

/// The entries of a batch inside a range.
pub(crate) fn cut_range(batch: &Entries, range: &KeyRange) -> Entries {
    let after = |key: &[u8]| batch.upper_bound(key, 0);
    let start = match &range.0 {
        Bound::Unbounded => 0,
        Bound::Included(key) => batch.lower_bound(key, 0),
        Bound::Excluded(key) => after(key),
    };
    let end = match &range.1 {
        Bound::Unbounded => batch.len(),
        Bound::Included(key) => after(key),
        Bound::Excluded(key) => batch.lower_bound(key, 0),
    };
    batch.slice(start, end.saturating_sub(start))
}

/// The intersection of a key range and a range of vnodes.
pub(crate) fn key_range(range: Option<&KeyRange>, vnodes: Option<&Range<Vnode>>) -> KeyRange {
    let (mut lower, mut upper) = range.cloned().unwrap_or((Bound::Unbounded, Bound::Unbounded));
    let Some(vnodes) = vnodes else { return (lower, upper) };
    let first = vnodes.start.to_be_bytes().to_vec();
    let end = vnodes.end.to_be_bytes().to_vec();
    match &lower {
        Bound::Included(k) | Bound::Excluded(k) if *k >= first => {}
        _ => lower = Bound::Included(first),
    }
    match &upper {
        Bound::Included(k) | Bound::Excluded(k) if *k < end => {}
        _ => upper = Bound::Excluded(end),
    }
    (lower, upper)
}
