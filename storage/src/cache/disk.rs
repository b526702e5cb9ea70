//! The disk tier: encoded blocks in a foyer cache on a local directory, written when they are read or
//! built, found again after a restart.
//!
//! Its own memory part is only a staging area; decoded blocks live in the memory tier above. Keys hold
//! the block's checksum, so what another store left in the directory never matches. Opening recovers
//! the directory's index in the background: until then there is no disk tier.

use std::io::{Read, Write};
use std::path::PathBuf;

use bytes::Bytes;
use foyer::{
    BlockEngineConfig, Code, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder,
    HybridCachePolicy, RecoverMode,
};

use mixtrics::metrics::BoxedRegistry;
use mixtrics::registry::noop::NoopMetricsRegistry;
use mixtrics::registry::prometheus_0_14::PrometheusMetricsRegistry;

use super::BlockKey;
use crate::error::{Result, StorageError};

/// Decoded entries never come near this.
const MAX_BLOCK_BYTES: usize = 256 << 20;
/// The unit in which foyer evicts.
const DEVICE_BLOCK_BYTES: usize = 16 << 20;

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
    /// Where the tier's own counters go, dropped writes (`buffer_overflow`) among them.
    pub metrics: Option<prometheus::Registry>,
}

impl DiskCacheOptions {
    pub fn new(directory: PathBuf, capacity_bytes: usize) -> DiskCacheOptions {
        DiskCacheOptions {
            directory,
            capacity_bytes,
            buffer_bytes: 128 << 20,
            memory_bytes: 4 << 20,
            metrics: None,
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

#[derive(Clone)]
pub(super) struct DiskTier {
    cache: HybridCache<BlockKey, EncodedBlock>,
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
            .with_buffer_pool_size(options.buffer_bytes);
        let metrics: BoxedRegistry = match &options.metrics {
            Some(registry) => Box::new(PrometheusMetricsRegistry::new(registry.clone())),
            None => Box::new(NoopMetricsRegistry),
        };
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
        Ok(DiskTier { cache })
    }

    /// Whether a read is worth trying.
    pub fn may_contain(&self, key: &BlockKey) -> bool {
        self.cache.contains(key)
    }

    /// The block's bytes; errors of the cache count as absence.
    pub async fn get(&self, key: &BlockKey) -> Option<Bytes> {
        match self.cache.get(key).await {
            Ok(entry) => entry.map(|e| e.value().0.clone()),
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
