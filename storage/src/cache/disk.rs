//! The disk tier: encoded blocks in a foyer cache on a local directory, written when they are read or
//! built, found again after a restart.
//!
//! What is evicted: foyer gives up the oldest of the large areas that it writes, whatever lies in them. A block that is
//! read from the older half of them is written once more, so that what is in use stays: in effect the least recently used
//! go. (foyer can also keep blocks when it gives up their area, but after a restart it does not find what was written
//! behind such a block.)
//!
//! foyer's memory part is not used: decoded blocks live in the memory tier above. Keys hold the block's checksum, so
//! what another store left in the directory never matches. Opening recovers the directory's index in the background:
//! until then there is no disk tier.
//!
//! Nothing waits for the disk without bound: an insertion never waits, and a read or a close that takes too long leaves
//! the tier absent until it has ended.

mod areas;
mod overdue;
mod runtime;
#[cfg(test)]
mod tests;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use foyer::{
    Age, BlockEngineConfig, Code, DeviceBuilder, FifoPicker, FsDeviceBuilder, HybridCache,
    HybridCacheBuilder, HybridCachePolicy, InvalidRatioPicker, Load, RecoverMode, Spawner,
};
use mixtrics::metrics::BoxedRegistry;
use mixtrics::registry::prometheus_0_14::PrometheusMetricsRegistry;
use tokio::time::{Instant, timeout};

use millrace_common::task::spawn_blocking_on;

use super::BlockKey;
use super::admission::{AdmissionPolicy, DiskAdmission};
use overdue::Overdue;
use runtime::DiskRuntime;

use crate::error::{Result, StorageError};

/// Decoded entries never come near this.
const MAX_BLOCK_BYTES: usize = 256 << 20;
/// The unit in which foyer evicts.
const DEVICE_BLOCK_BYTES: usize = 16 << 20;
const AREA_BYTES: u64 = DEVICE_BLOCK_BYTES as u64;
/// Of the areas, the oldest: a block that is read there is written once more.
const OLD_SHARE: f64 = 0.5;
/// An area of which so much is out of date is evicted first.
const MOSTLY_INVALID: f64 = 0.8;
/// A tier of the same directory that is still being closed may take the area that was free.
const OPEN_ATTEMPTS: usize = 4;
/// A read that takes longer is answered by the store.
const READ_BOUND: Duration = Duration::from_secs(5);
/// What has not been written by then is not found after a restart.
const CLOSE_BOUND: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct DiskCacheOptions {
    pub directory: PathBuf,
    pub capacity_bytes: usize,
    /// Memory for blocks on their way to disk; more than that is dropped (counted by foyer).
    pub buffer_bytes: usize,
    /// Which blocks go to disk.
    pub admission: AdmissionPolicy,
}

impl DiskCacheOptions {
    pub fn new(directory: PathBuf, capacity_bytes: usize) -> DiskCacheOptions {
        DiskCacheOptions {
            directory,
            capacity_bytes,
            buffer_bytes: 128 << 20,
            admission: AdmissionPolicy::default(),
        }
    }

    /// Files that the cache keeps open.
    pub fn files(&self) -> usize {
        (self.capacity_bytes / DEVICE_BLOCK_BYTES).max(4)
    }
}

/// The bytes of an encoded block.
#[derive(Clone, Debug)]
pub(super) struct EncodedBlock(pub Bytes);

impl Code for EncodedBlock {
    fn encode(&self, writer: &mut impl Write) -> foyer::Result<()> {
        writer.write_all(&(self.0.len() as u32).to_le_bytes()).map_err(foyer::Error::io_error)?;
        writer.write_all(&self.0).map_err(foyer::Error::io_error)
    }

    fn decode(reader: &mut impl Read) -> foyer::Result<EncodedBlock> {
        let mut len = [0u8; 4];
        reader.read_exact(&mut len).map_err(foyer::Error::io_error)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_BLOCK_BYTES {
            let e =
                std::io::Error::new(std::io::ErrorKind::InvalidData, "block length out of range");
            return Err(foyer::Error::io_error(e));
        }
        let mut bytes = vec![0; len];
        reader.read_exact(&mut bytes).map_err(foyer::Error::io_error)?;
        Ok(EncodedBlock(bytes.into()))
    }

    fn estimated_size(&self) -> usize {
        4 + self.0.len()
    }
}

impl Code for BlockKey {
    fn encode(&self, writer: &mut impl Write) -> foyer::Result<()> {
        self.run.encode(writer)?;
        self.block.encode(writer)?;
        self.crc.encode(writer)
    }

    fn decode(reader: &mut impl Read) -> foyer::Result<BlockKey> {
        Ok(BlockKey {
            run: u64::decode(reader)?,
            block: u32::decode(reader)?,
            crc: u32::decode(reader)?,
        })
    }

    fn estimated_size(&self) -> usize {
        16
    }
}

/// Blocks that were offered to the disk tier since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    pub admitted: u64,
    /// By the policy.
    pub refused: u64,
    /// Of those admitted: more came than the disk takes, or it did not answer.
    pub dropped: u64,
    /// Written once more, because they were read when they were about to be evicted.
    pub kept: u64,
    /// The areas that hold blocks, and all that there are.
    pub used_bytes: u64,
    pub limit_bytes: u64,
}

pub(super) struct DiskTier {
    cache: HybridCache<BlockKey, EncodedBlock>,
    directory: PathBuf,
    runtime: DiskRuntime,
    overdue: Overdue,
    bounds: Bounds,
    admission: Box<dyn DiskAdmission>,
    /// Of all areas.
    areas_bytes: u64,
    admitted: AtomicU64,
    refused: AtomicU64,
    kept: AtomicU64,
    /// Blocks that came while something was overdue.
    left_out: AtomicU64,
    /// Of the library.
    counters: prometheus::Registry,
}

/// After how long an operation counts as overdue.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    read: Duration,
    close: Duration,
}

impl DiskTier {
    pub async fn open(options: &DiskCacheOptions) -> Result<DiskTier> {
        DiskTier::open_within(options, Bounds { read: READ_BOUND, close: CLOSE_BOUND }).await
    }

    async fn open_within(options: &DiskCacheOptions, bounds: Bounds) -> Result<DiskTier> {
        for _ in 0..OPEN_ATTEMPTS {
            let tier = DiskTier::try_open(options, bounds).await?;
            if tier.areas("clean") > 0 {
                return Ok(tier);
            }
        }
        Err(open_failed(&options.directory, "none of its areas stays free"))
    }

    /// A tier that can only be written if one of its areas is free.
    async fn try_open(options: &DiskCacheOptions, bounds: Bounds) -> Result<DiskTier> {
        let directory = options.directory.clone();
        let failed = |e: std::io::Error| open_failed(&options.directory, e);
        let runtime = DiskRuntime::start().map_err(failed)?;
        let (at, count) = (directory.clone(), options.files());
        let freeing = spawn_blocking_on(runtime.handle(), "look for a free area", move || {
            areas::free_one(&at, count)
        });
        if freeing.await.map_err(std::io::Error::other).flatten().map_err(failed)? {
            tracing::info!(
                directory = %directory.display(),
                "no area of the disk cache was free; the oldest has been made so"
            );
        }
        let counters = prometheus::Registry::new();
        let spawner = Spawner::from(runtime.handle().clone());
        let cache = open_cache(options, spawner, &counters)
            .await
            .map_err(|e| open_failed(&options.directory, e))?;
        Ok(DiskTier {
            cache,
            overdue: Overdue::new(directory.clone(), runtime.handle().clone()),
            directory,
            runtime,
            bounds,
            admission: options.admission.build(),
            areas_bytes: options.files() as u64 * AREA_BYTES,
            admitted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
            counters,
        })
    }

    /// Takes in a block that was read from the store, or does not.
    pub fn offer_read(&self, key: BlockKey, bytes: &Bytes, now: Instant) {
        self.offer(key, bytes, self.admission.admits_read(&key, now));
    }

    /// Takes in a block of a run that was just built, or does not.
    pub fn offer_built(&self, key: BlockKey, bytes: &Bytes) {
        self.offer(key, bytes, self.admission.admits_built());
    }

    fn offer(&self, key: BlockKey, bytes: &Bytes, is_admitted: bool) {
        let counter = if is_admitted { &self.admitted } else { &self.refused };
        counter.fetch_add(1, Ordering::Relaxed);
        if is_admitted {
            // The cache must not keep alive what the block was a part of.
            self.insert(key, Bytes::copy_from_slice(bytes));
        }
    }

    pub fn stats(&self) -> DiskStats {
        DiskStats {
            admitted: self.admitted.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            dropped: self.overflowed() + self.left_out.load(Ordering::Relaxed),
            kept: self.kept.load(Ordering::Relaxed),
            used_bytes: self.areas_bytes.saturating_sub(self.areas("clean") * AREA_BYTES),
            limit_bytes: self.areas_bytes,
        }
    }

    /// Blocks that were admitted and dropped, because more came than the disk takes.
    fn overflowed(&self) -> u64 {
        let families = self.counters.gather();
        let operations = families.iter().filter(|f| f.name() == "foyer_storage_inner_op_total");
        let overflows = operations.flat_map(|f| f.get_metric()).filter(|metric| {
            let mut labels = metric.get_label().iter();
            labels.any(|l| l.name() == "op" && l.value().ends_with("_overflow"))
        });
        overflows.map(|metric| metric.get_counter().get_value() as u64).sum()
    }

    /// Areas of the state.
    fn areas(&self, state: &str) -> u64 {
        let families = self.counters.gather();
        let states = families.iter().filter(|f| f.name() == "foyer_storage_block_engine_block");
        let of_state = states.flat_map(|f| f.get_metric()).filter(|metric| {
            metric.get_label().iter().any(|l| l.name() == "type" && l.value() == state)
        });
        of_state.map(|metric| metric.get_gauge().get_value() as u64).sum()
    }

    /// Whether a read is worth trying.
    pub fn may_contain(&self, key: &BlockKey) -> bool {
        !self.overdue.any() && self.cache.storage().may_contains(key)
    }

    /// The block's bytes. An error of the cache counts as absence, and so does an answer that takes too long.
    pub async fn get(&self, key: &BlockKey) -> Option<Bytes> {
        if self.overdue.any() {
            return None;
        }
        // Not through the memory part, which starts a task for each read while it holds a lock.
        let (cache, wanted) = (self.cache.clone(), *key);
        let load = async move { cache.storage().load(&wanted).await };
        let loaded = self.overdue.within(self.bounds.read, "reading a block", load).await?;
        match loaded {
            Ok(Load::Entry { value: EncodedBlock(bytes), populated, .. }) => {
                if populated.age == Age::Old {
                    self.kept.fetch_add(1, Ordering::Relaxed);
                    self.insert(*key, bytes.clone());
                }
                Some(bytes)
            }
            Ok(Load::Piece { piece, .. }) => Some(piece.value().0.clone()),
            Ok(Load::Throttled | Load::Miss) => None,
            Err(e) => {
                tracing::warn!(error = %e, "reading the disk cache failed");
                None
            }
        }
    }

    /// Never waits: what the disk does not take is dropped.
    pub fn insert(&self, key: BlockKey, bytes: Bytes) {
        if self.overdue.any() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.cache.storage_writer(key).insert(EncodedBlock(bytes));
    }

    pub fn remove(&self, key: &BlockKey) {
        self.cache.remove(key);
    }

    /// Waits until what was inserted is on disk.
    ///
    /// # Errors
    ///
    /// If that takes too long, too: the rest is not found after a restart then.
    pub async fn close(&self) -> Result<()> {
        let cache = self.cache.clone();
        let close = async move { cache.close().await };
        let bound = self.bounds.close;
        let directory = self.directory.display();
        match self.overdue.within(bound, "closing the disk cache", close).await {
            Some(closed) => {
                closed.map_err(|e| StorageError::Cache(format!("closing {directory} failed: {e}")))
            }
            None => Err(StorageError::Cache(format!("closing {directory} takes over {bound:?}"))),
        }
    }
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        let (cache, bound) = (self.cache.clone(), self.bounds.close);
        self.runtime.end_after(async move {
            // Who wants to know how it ends has called `close`.
            let _ = timeout(bound, cache.close()).await;
        });
    }
}

/// foyer's cache on the directory.
async fn open_cache(
    options: &DiskCacheOptions,
    spawner: Spawner,
    counters: &prometheus::Registry,
) -> foyer::Result<HybridCache<BlockKey, EncodedBlock>> {
    let device = FsDeviceBuilder::new(&options.directory)
        .with_capacity(options.files() * DEVICE_BLOCK_BYTES)
        .build()?;
    let engine = BlockEngineConfig::new(device)
        .with_block_size(DEVICE_BLOCK_BYTES)
        .with_flushers(2)
        .with_reclaimers(2)
        .with_eviction_pickers(vec![
            Box::new(InvalidRatioPicker::new(MOSTLY_INVALID)),
            Box::new(FifoPicker::new(OLD_SHARE)),
        ])
        .with_buffer_pool_size(options.buffer_bytes);
    let metrics: BoxedRegistry = Box::new(PrometheusMetricsRegistry::new(counters.clone()));
    HybridCacheBuilder::new()
        .with_name("millrace-blocks")
        .with_metrics_registry(metrics)
        .with_policy(HybridCachePolicy::WriteOnInsertion)
        .memory(1)
        .with_shards(4)
        .with_weighter(|_: &BlockKey, v: &EncodedBlock| 64 + v.0.len())
        .storage()
        .with_spawner(spawner)
        .with_engine_config(engine)
        .with_recover_mode(RecoverMode::Quiet)
        .build()
        .await
}

fn open_failed(directory: &Path, error: impl std::fmt::Display) -> StorageError {
    StorageError::Cache(format!("cannot open {}: {error}", directory.display()))
}
