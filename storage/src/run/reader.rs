//! A run that can be read: its description, its schema, and how bytes become blocks.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use millrace_common::Epoch;
use millrace_rpc::version::RunMeta;
use object_store::path::Path;

use crate::block::{Block, BlockCodec};
use crate::error::{Result, StorageError};
use crate::pins::{ObjectPins, Pin};
use crate::run::index::u16_at;
use crate::run::{FLAG_TOP, FOOTER_BYTES, RunIndex};

/// Holds no data and does no I/O: the [`crate::cache::BlockCache`] reads with its help.
#[derive(Clone, Debug)]
pub struct RunReader {
    meta: RunMeta,
    codec: Arc<BlockCodec>,
    path: Path,
    /// Keeps the object from being collected as garbage.
    _pin: Option<Pin>,
}

impl RunReader {
    pub fn new(meta: RunMeta, codec: Arc<BlockCodec>) -> RunReader {
        let path = Path::from(meta.object.as_str());
        RunReader { meta, codec, path, _pin: None }
    }

    /// One whose object stays as long as the reader does.
    pub(crate) fn pinned(
        meta: RunMeta,
        codec: Arc<BlockCodec>,
        pins: &Arc<ObjectPins>,
    ) -> RunReader {
        let pin = Some(pins.pin(&meta.object));
        RunReader { _pin: pin, ..RunReader::new(meta, codec) }
    }

    pub fn meta(&self) -> &RunMeta {
        &self.meta
    }

    pub fn codec(&self) -> &Arc<BlockCodec> {
        &self.codec
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The epoch of rows whose epoch was not known when the run was built.
    fn assigned(&self) -> Epoch {
        Epoch(self.meta.min_epoch)
    }

    /// Whether an index was made before the epoch of its rows was known.
    pub(crate) fn needs_epochs(&self, index: &RunIndex) -> bool {
        self.assigned() != Epoch::ZERO
            && index.block_numbers().any(|b| index.block_epochs(b).0 == Epoch::ZERO)
    }

    /// Where the part lies in the object that opens the run: index, filter and footer, or the top index.
    pub fn meta_range(&self) -> Range<u64> {
        let end = self.meta.offset + self.meta.length;
        end.saturating_sub(self.meta.meta_length)..end
    }

    /// Where a block lies in the object.
    pub fn block_range(&self, index: &RunIndex, block: u32) -> Range<u64> {
        let range = index.block_range(block);
        self.meta.offset + range.start..self.meta.offset + range.end
    }

    /// The top index, where the run's description has it. What cannot be opened from there is read from the store.
    pub(crate) fn described_index(&self) -> Option<RunIndex> {
        if self.meta.top.is_empty() {
            return None;
        }
        // A copy: the description may be a part of a large message.
        let top = Bytes::copy_from_slice(&self.meta.top);
        self.parse_index(&top).ok().filter(RunIndex::is_top)
    }

    /// Opens the run from its meta part.
    pub fn parse_index(&self, bytes: &Bytes) -> Result<RunIndex> {
        let at = self.meta_range().start;
        if bytes.len() as u64 != self.meta.meta_length {
            let reason = format!("{} of {} bytes were there", bytes.len(), self.meta.meta_length);
            return Err(StorageError::corrupt(&self.meta.object, at, reason));
        }
        let index = RunIndex::parse(bytes, self.assigned())
            .map_err(|reason| StorageError::corrupt(&self.meta.object, at, reason))?;
        if index.rows() != self.meta.rows {
            return Err(StorageError::corrupt(&self.meta.object, at, "another run lies here"));
        }
        Ok(index)
    }

    /// Whether the index of a run that was just built is stored in partitions.
    pub(crate) fn has_partitions(&self, run: &Bytes) -> bool {
        run.len() >= FOOTER_BYTES && u16_at(&run[run.len() - FOOTER_BYTES..], 10) & FLAG_TOP != 0
    }

    /// Where a partition of the index lies in the object.
    pub fn partition_range(&self, top: &RunIndex, partition: u32) -> Range<u64> {
        let start = self.meta_range().start.saturating_sub(top.block_bytes());
        let range = top.block_range(partition);
        start + range.start..start + range.end
    }

    /// Checks and opens one partition of the index.
    pub fn parse_partition(
        &self,
        top: &RunIndex,
        partition: u32,
        bytes: &Bytes,
    ) -> Result<RunIndex> {
        let at = self.partition_range(top, partition).start;
        let corrupt = |reason| StorageError::corrupt(&self.meta.object, at, reason);
        let Some(start) = top.partition_start(partition) else {
            return Err(corrupt("a partition that the index does not have"));
        };
        if crc32fast::hash(bytes) != top.block_crc(partition) {
            return Err(corrupt("checksum mismatch in a partition of the index"));
        }
        RunIndex::parse_partition(bytes, start, self.assigned()).map_err(corrupt)
    }

    /// Checks and decodes one block.
    pub fn decode_block(&self, index: &RunIndex, block: u32, bytes: &[u8]) -> Result<Block> {
        let offset = self.block_range(index, block).start;
        let crc = Some(index.block_crc(block));
        self.codec.decode(bytes, crc, self.assigned(), &self.meta.object, offset)
    }
}
