//! Where merged entries become runs: cut at vnode boundaries once large enough (so that ownership can
//! move without rewriting), packed into segments, uploaded, and pushed into the block cache.

use std::sync::Arc;

use bytes::Bytes;
use millrace_common::access::AccessClass;
use millrace_common::task::spawn_blocking_on;
use millrace_common::{TableId, crash};
use millrace_rpc::version::RunMeta;

use crate::block::{BlockCodec, Entries};
use crate::cache::BlockCache;
use crate::error::Result;
use crate::given_up::Claim;
use crate::hot_keys::HotKeys;
use crate::job_store::JobStore;
use crate::merge::Merger;
use crate::object::PutWatch;
use crate::put_waits::PutKind;
use crate::run::{FinishedRun, RunBuilder, RunIndex, RunKind, RunOptions, RunReader};
use crate::segment::SegmentWriter;
use crate::state_store::Shared;
use crate::table::{RowStorage, TableDesc};

/// Runs beyond this get a segment of their own; smaller ones share.
const SHARED_SEGMENT_BYTES: usize = 8 << 20;
/// Bytes of a large commit's own runs that are kept until the commit is published, for the cache.
const KEPT_BYTES: usize = 16 << 20;

/// What a sink's runs are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub level: u32,
    pub sequence: u64,
}

/// Whether new runs go into the cache's memory tier too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admit {
    /// Their epoch is not known yet: they are handed to the caller.
    Later,
    /// Nothing: who reads them first fetches them.
    Never,
    /// Index and disk tier, and blocks with hot keys decoded in memory.
    Disk,
    /// Blocks stay decoded: what was just written is about to be read.
    Memory,
}

/// A run that is durable, with all that the cache wants to know of it.
#[derive(Debug)]
pub(crate) struct Built {
    pub meta: RunMeta,
    index: Arc<RunIndex>,
    bytes: Bytes,
    codec: Arc<BlockCodec>,
}

impl Built {
    /// Into the cache; `meta` has its epochs now.
    pub fn admit(&self, cache: &BlockCache, memory: bool) -> Result<()> {
        let reader = RunReader::new(self.meta.clone(), Arc::clone(&self.codec));
        cache.admit_run(&reader, Arc::clone(&self.index), &self.bytes, |_, _| memory)
    }

    /// As `admit`; blocks with hot keys go into memory.
    fn admit_hot(&self, cache: &BlockCache, hot: &mut HotKeys) -> Result<()> {
        let reader = RunReader::new(self.meta.clone(), Arc::clone(&self.codec));
        let (index, bytes) = (Arc::clone(&self.index), &self.bytes);
        cache.admit_run(&reader, index, bytes, |index, block| hot.admit(index, block))
    }
}

struct Unwritten {
    run: FinishedRun,
    codec: Arc<BlockCodec>,
    table: TableId,
    place: Place,
}

/// Collects runs of any number of tables.
pub(crate) struct RunWriter {
    shared: Arc<Shared>,
    admit: Admit,
    hot: HotKeys,
    /// The job that waits for what is written, to be told how it goes on.
    job: Option<Arc<JobStore>>,
    waiting: Vec<Unwritten>,
    waiting_bytes: u64,
    written: Vec<RunMeta>,
    built: Vec<Built>,
    claims: Vec<Claim>,
}

/// What a [`RunWriter`] has written.
#[derive(Debug)]
pub(crate) struct Written {
    pub runs: Vec<RunMeta>,
    /// What [`Admit::Later`] leaves to do.
    pub built: Vec<Built>,
    /// On the objects that hold the runs.
    pub claims: Vec<Claim>,
}

impl RunWriter {
    pub fn new(shared: Arc<Shared>, admit: Admit) -> RunWriter {
        RunWriter {
            shared,
            admit,
            hot: HotKeys::default(),
            job: None,
            waiting: Vec::new(),
            waiting_bytes: 0,
            written: Vec::new(),
            built: Vec::new(),
            claims: Vec::new(),
        }
    }

    /// Tells the job of what has been written.
    pub fn telling(mut self, job: &Arc<JobStore>) -> RunWriter {
        self.job = Some(Arc::clone(job));
        self
    }

    /// Blocks with these keys are in memory before the new runs are used.
    pub fn keeping_hot(mut self, hot: HotKeys) -> RunWriter {
        self.hot = hot;
        self
    }

    /// Writes all that a merge gives as runs of a table.
    pub async fn write(
        &mut self,
        desc: &TableDesc,
        codec: &Arc<BlockCodec>,
        place: Place,
        mut merger: Merger,
    ) -> Result<()> {
        // Opens all sources; disk runs among them say which prefixes their filters know.
        let mut next = merger.next().await?;
        let prefixes = self.shared.prefixes(desc.id).lengths();
        let mut options =
            run_options(desc, self.shared.options.block_bytes).with_prefix_lengths(prefixes);
        if let Some(bytes) = self.shared.options.partition_bytes {
            options.partition_bytes = bytes;
        }
        let new_builder = || RunBuilder::new(Arc::clone(codec), options.clone());
        let target = self.shared.options.run_bytes;
        let mut builder = new_builder();
        let mut finished = Vec::new();
        while let Some(mut entries) = next {
            while let Some(at) = cut_at(&builder, &entries, target) {
                builder.push(&entries.slice(0, at))?;
                entries = entries.slice(at, entries.len() - at);
                finished.push(std::mem::replace(&mut builder, new_builder()).finish()?);
            }
            builder.push(&entries)?;
            for run in finished.drain(..) {
                self.add(desc.id, codec, place, run).await?;
            }
            if let Some(job) = &self.job {
                job.note_upload();
            }
            next = merger.next().await?;
        }
        if builder.rows() > 0 {
            self.add(desc.id, codec, place, builder.finish()?).await?;
        }
        Ok(())
    }

    async fn add(
        &mut self,
        table: TableId,
        codec: &Arc<BlockCodec>,
        place: Place,
        run: FinishedRun,
    ) -> Result<()> {
        self.waiting_bytes += run.bytes.len() as u64;
        self.waiting.push(Unwritten { run, codec: Arc::clone(codec), table, place });
        // Memory that allows small runs only does not allow for many of them to wait either.
        let most = SHARED_SEGMENT_BYTES.min(self.shared.options.run_bytes);
        if self.waiting_bytes >= most as u64 { self.upload().await } else { Ok(()) }
    }

    async fn upload(&mut self) -> Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let mut segment = SegmentWriter::new(self.shared.namer.next_segment());
        self.claims.push(Claim::new(segment.name(), &self.shared.options.given_up));
        let mut built = Vec::new();
        for Unwritten { run, codec, table, place } in self.waiting.drain(..) {
            let FinishedRun { bytes, meta, index } = run;
            let meta = RunMeta {
                run_id: self.shared.namer.next_run_id(),
                table_id: table.0,
                object: segment.name().to_string(),
                offset: segment.add(bytes.clone()),
                level: place.level,
                sequence: place.sequence,
                ..meta
            };
            built.push(Built { meta, index, bytes, codec });
        }
        self.waiting_bytes = 0;
        let watch = PutWatch::default();
        let waiting = self.job.as_ref().map(|job| job.wait_for_put(PutKind::Runs));
        if let Some(waiting) = &waiting {
            waiting.wait.begun(segment.name(), &watch);
        }
        crash::point("storage-before-run-put");
        segment.finish_watched(&self.shared.options.store, &watch).await?;
        drop(waiting);
        if let Some(job) = &self.job {
            job.note_upload();
        }
        crash::point("storage-after-run-put");
        self.written.extend(built.iter().map(|b| b.meta.clone()));
        match self.admit {
            Admit::Later => self.keep(built),
            Admit::Never => {}
            Admit::Disk => {
                let hot = &mut self.hot;
                built.iter().try_for_each(|b| b.admit_hot(&self.shared.cache, hot))?;
            }
            Admit::Memory => built.iter().try_for_each(|b| b.admit(&self.shared.cache, true))?,
        }
        Ok(())
    }

    /// Keeps what a commit's publication may push into the cache, while that is little.
    fn keep(&mut self, built: Vec<Built>) {
        let most = KEPT_BYTES.min(self.shared.options.run_bytes * 2);
        let mut kept: usize = self.built.iter().map(|b| b.bytes.len()).sum();
        self.built.extend(built.into_iter().take_while(|b| {
            kept += b.bytes.len();
            kept <= most
        }));
    }

    /// Everything is durable when this returns.
    pub async fn finish(mut self) -> Result<Written> {
        self.upload().await?;
        Ok(Written { runs: self.written, built: self.built, claims: self.claims })
    }
}

/// Where a run that has grown to `target` ends: before the next vnode, or, far beyond it, anywhere
/// between two keys.
fn cut_at(builder: &RunBuilder, entries: &Entries, target: usize) -> Option<usize> {
    let bytes = builder.estimated_bytes();
    if bytes < target || entries.is_empty() || builder.rows() == 0 {
        return None;
    }
    let first = entries.keys.value(0);
    let next = match bytes < target * 2 {
        true => first
            .get(..2)
            .and_then(successor)
            .map_or(entries.len(), |next| entries.lower_bound(&next, 0)),
        false => entries.upper_bound(first, 0),
    };
    (next < entries.len()).then_some(next)
}

/// The first bytes above all keys of a vnode.
fn successor(vnode: &[u8]) -> Option<[u8; 2]> {
    let next = u16::from_be_bytes([*vnode.first()?, *vnode.get(1)?]).checked_add(1)?;
    Some(next.to_be_bytes())
}

fn run_options(desc: &TableDesc, block_bytes: Option<usize>) -> RunOptions {
    let kind = match desc.class {
        AccessClass::PointUpdate | AccessClass::Lookup | AccessClass::Merge if !desc.relation => {
            RunKind::Point
        }
        AccessClass::RangeRead if !desc.relation => RunKind::Prefix,
        // Asked by key for each statement and changed row as often as scanned.
        _ if desc.storage == RowStorage::Keyed => RunKind::Prefix,
        _ => RunKind::Range,
    };
    // Relations are scanned, and asked by key for each statement and changed row: they want both.
    let mut options = RunOptions::new(kind).with_filter(kind == RunKind::Point || desc.relation);
    options.block_bytes = block_bytes.unwrap_or(options.block_bytes);
    options
}

/// Runs a future that computes much on a blocking thread of the caller's runtime; its I/O stays on the runtime.
pub(crate) async fn on_blocking_thread<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    on_blocking_thread_of(tokio::runtime::Handle::current(), work).await
}

/// Like [`on_blocking_thread`], on the runtime for what computes much.
pub(crate) async fn in_background<T: Send + 'static>(
    shared: &Shared,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let runtime = shared.background().unwrap_or_else(tokio::runtime::Handle::current);
    on_blocking_thread_of(runtime, work).await
}

async fn on_blocking_thread_of<T: Send + 'static>(
    runtime: tokio::runtime::Handle,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let threads = runtime.clone();
    let done = spawn_blocking_on(&threads, "write runs", move || runtime.block_on(work)).await;
    done.map_err(|e| crate::StorageError::internal(format!("a storage task failed: {e}")))?
}
