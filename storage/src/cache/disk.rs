//! The disk tier: encoded blocks in a foyer cache on a local directory, written when they are read or
//! built, found again after a restart.
//!
//! What is evicted: foyer gives up the oldest of the large areas that it writes, whatever lies in them. A block that is
//! read from the older half of them is written once more, so that what is in use stays: in effect the least recently used
//! go. (foyer can also keep blocks when it gives up their area, but after a restart it does not find what was written
//! behind such a block.)
//!
//! Its own memory part is only a staging area; decoded blocks live in the memory tier above. Keys hold
//! the block's checksum, so what another store left in the directory never matches. Opening recovers
//! the directory's index in the background: until then there is no disk tier.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use foyer::{
    Age, BlockEngineConfig, Code, DeviceBuilder, FifoPicker, FsDeviceBuilder, HybridCache,
    HybridCacheBuilder, HybridCachePolicy, InvalidRatioPicker, RecoverMode,
};

use mixtrics::metrics::BoxedRegistry;
use mixtrics::registry::prometheus_0_14::PrometheusMetricsRegistry;
use tokio::time::Instant;

use super::BlockKey;
use super::admission::{AdmissionPolicy, DiskAdmission};
use crate::error::{Result, StorageError};

/// Decoded entries never come near this.
const MAX_BLOCK_BYTES: usize = 256 << 20;
/// The unit in which foyer evicts.
const DEVICE_BLOCK_BYTES: usize = 16 << 20;
/// Of the areas, the oldest: a block that is read there is written once more.
const OLD_SHARE: f64 = 0.5;
/// An area of which so much is out of date is evicted first.
const MOSTLY_INVALID: f64 = 0.8;

impl DiskCacheOptions {
    /// Files that the cache keeps open.
    pub fn files(&self) -> usize {
        (self.capacity_bytes / DEVICE_BLOCK_BYTES).max(4)
    }
}

#[derive(Clone, Debug)]
pub struct DiskCacheOptions {
    pub directory: PathBuf,
    pub capacity_bytes: usize,
    /// Memory for blocks on their way to disk; more than that is dropped (counted by foyer).
    pub buffer_bytes: usize,
    /// Memory of the staging part.
    pub memory_bytes: usize,
    /// Which blocks go to disk.
    pub admission: AdmissionPolicy,
}

impl DiskCacheOptions {
    pub fn new(directory: PathBuf, capacity_bytes: usize) -> DiskCacheOptions {
        DiskCacheOptions {
            directory,
            capacity_bytes,
            buffer_bytes: 128 << 20,
            memory_bytes: 4 << 20,
            admission: AdmissionPolicy::default(),
        }
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
    /// Of those admitted: more came than the disk takes.
    pub dropped: u64,
    /// Written once more, because they were read when they were about to be evicted.
    pub kept: u64,
}

pub(super) struct DiskTier {
    cache: HybridCache<BlockKey, EncodedBlock>,
    admission: Box<dyn DiskAdmission>,
    admitted: AtomicU64,
    refused: AtomicU64,
    kept: AtomicU64,
    /// Of the library.
    counters: prometheus::Registry,
}

impl DiskTier {
    pub async fn open(options: &DiskCacheOptions) -> Result<DiskTier> {
        let failed = |e: foyer::Error| {
            StorageError::Cache(format!("cannot open {}: {e}", options.directory.display()))
        };
        let device = FsDeviceBuilder::new(&options.directory)
            .with_capacity(options.capacity_bytes.max(4 * DEVICE_BLOCK_BYTES))
            .build()
            .map_err(failed)?;
        let engine = BlockEngineConfig::new(device)
            .with_block_size(DEVICE_BLOCK_BYTES)
            .with_flushers(2)
            .with_reclaimers(2)
            .with_eviction_pickers(vec![
                Box::new(InvalidRatioPicker::new(MOSTLY_INVALID)),
                Box::new(FifoPicker::new(OLD_SHARE)),
            ])
            .with_buffer_pool_size(options.buffer_bytes);
        let counters = prometheus::Registry::new();
        let metrics: BoxedRegistry = Box::new(PrometheusMetricsRegistry::new(counters.clone()));
        let cache = HybridCacheBuilder::new()
            .with_name("millrace-blocks")
            .with_metrics_registry(metrics)
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .memory(options.memory_bytes.max(1))
            .with_shards(4)
            .with_weighter(|_: &BlockKey, v: &EncodedBlock| 64 + v.0.len())
            .storage()
            .with_engine_config(engine)
            .with_recover_mode(RecoverMode::Quiet)
            .build()
            .await
            .map_err(failed)?;
        Ok(DiskTier {
            cache,
            admission: options.admission.build(),
            admitted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            kept: AtomicU64::new(0),
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
            dropped: self.dropped(),
            kept: self.kept.load(Ordering::Relaxed),
        }
    }

    /// Blocks that were admitted and dropped, because more came than the disk takes.
    fn dropped(&self) -> u64 {
        let families = self.counters.gather();
        let operations = families.iter().filter(|f| f.name() == "foyer_storage_inner_op_total");
        let overflows = operations.flat_map(|f| f.get_metric()).filter(|metric| {
            let mut labels = metric.get_label().iter();
            labels.any(|l| l.name() == "op" && l.value().ends_with("_overflow"))
        });
        overflows.map(|metric| metric.get_counter().get_value() as u64).sum()
    }

    /// Whether a read is worth trying.
    pub fn may_contain(&self, key: &BlockKey) -> bool {
        self.cache.contains(key)
    }

    /// The block's bytes; errors of the cache count as absence.
    pub async fn get(&self, key: &BlockKey) -> Option<Bytes> {
        match self.cache.get(key).await {
            Ok(Some(entry)) => {
                let bytes = entry.value().0.clone();
                if entry.properties().age() == Age::Old {
                    self.kept.fetch_add(1, Ordering::Relaxed);
                    self.insert(*key, bytes.clone());
                }
                Some(bytes)
            }
            Ok(None) => None,
            Err(e) => {
                tracing::warn!(error = %e, "reading the disk cache failed");
                None
            }
        }
    }

    pub fn insert(&self, key: BlockKey, bytes: Bytes) {
        self.cache.storage_writer(key).insert(EncodedBlock(bytes));
    }

    pub fn remove(&self, key: &BlockKey) {
        self.cache.remove(key);
    }

    pub async fn close(&self) -> Result<()> {
        self.cache.close().await.map_err(|e| StorageError::Cache(format!("closing failed: {e}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_BYTES: usize = 256 << 10;

    fn key(block: u32) -> BlockKey {
        BlockKey { run: 1, block, crc: 7 }
    }

    async fn insert(tier: &DiskTier, blocks: std::ops::Range<u32>) {
        for block in blocks {
            tier.insert(key(block), vec![block as u8; BLOCK_BYTES].into());
        }
        // More at once than the tier takes is dropped.
        tier.cache.storage().wait().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_read_outlives_much_that_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let mut options = DiskCacheOptions::new(directory.path().to_path_buf(), 128 << 20);
        options.memory_bytes = 1;
        let tier = DiskTier::open(&options).await.unwrap();
        let hot = 0..16;
        insert(&tier, hot.clone()).await;
        // Three times as much as the tier holds.
        let mut missed = 0;
        for round in 1..96 {
            for block in hot.clone() {
                if tier.get(&key(block)).await.is_none() {
                    missed += 1;
                    insert(&tier, block..block + 1).await;
                }
            }
            insert(&tier, round * 16..(round + 1) * 16).await;
        }
        // If reading did nothing, each would be missed twice and more.
        assert!(missed < 16, "{missed} misses, {:?}", tier.stats());
        assert!(tier.stats().kept >= 16, "{:?}", tier.stats());
        tier.close().await.unwrap();
        // Only what is on disk.
        let tier = DiskTier::open(&options).await.unwrap();
        let mut found = 0;
        for block in hot {
            if let Some(bytes) = tier.get(&key(block)).await {
                assert!(bytes.len() == BLOCK_BYTES && bytes.iter().all(|b| *b == block as u8));
                found += 1;
            }
        }
        assert!(found >= 12, "{found} of 16");
        let left = (16..64).filter(|block| tier.may_contain(&key(*block))).count();
        assert_eq!(left, 0, "what was not read is gone");
    }
}
