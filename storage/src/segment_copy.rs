//! Copies of what is alive in segments that hold little else (docs/design.md §9): runs, slices and staged changes, byte
//! for byte, packed into a new segment. References are exchanged by the log.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use millrace_common::Epoch;
use millrace_rpc::log::{MoveParts, MovedPart};
use millrace_rpc::services::{LivePart, PartKind};

use crate::cache::{Piece, Priority, plan};
use crate::error::{Result, StorageError};
use crate::given_up::Claim;
use crate::run::RunIndex;
use crate::segment::SegmentWriter;
use crate::slice;
use crate::state_store::StateStore;

/// Copies the parts into one new segment, durable when this returns, and says where they lie in it. All of them are in
/// memory until then: the caller bounds their bytes. If the log does not come to know of it, the caller gives it up.
pub async fn copy_parts(store: &StateStore, mut parts: Vec<LivePart>) -> Result<MoveParts> {
    let shared = Arc::clone(store.shared());
    let closed = |_| StorageError::internal("the state store is closed");
    let _turn = shared.compacting.acquire().await.map_err(closed)?;
    parts.sort_by(|a, b| (&a.object, a.offset).cmp(&(&b.object, b.offset)));
    let mut objects: BTreeMap<&str, Vec<Piece>> = BTreeMap::new();
    for (tag, part) in parts.iter().enumerate() {
        let range = part.offset..part.offset + part.length;
        objects.entry(&part.object).or_default().push(Piece { range, tag });
    }
    let mut copies: Vec<Bytes> = vec![Bytes::new(); parts.len()];
    let cache = &shared.options.cache;
    for (object, pieces) in objects {
        // One after the other: nobody waits for them, and the store has better to do.
        for read in plan(pieces, cache.join_gap, cache.max_read_bytes) {
            let bytes = shared
                .cache
                .read_uncached(object, read.range.clone(), Priority::Compaction)
                .await?;
            for piece in &read.pieces {
                let part = bytes.slice(read.within(piece));
                check(&parts[piece.tag], &part)?;
                // A joined read may hold much that is not wanted.
                copies[piece.tag] = Bytes::copy_from_slice(&part);
            }
        }
    }
    let mut segment = SegmentWriter::new(shared.namer.next_segment());
    let object = segment.name().to_owned();
    let claim = Claim::new(&object, &shared.options.given_up);
    let moved = parts.into_iter().zip(copies).map(|(part, bytes)| MovedPart {
        job: part.job.0,
        from_object: part.object,
        from_offset: part.offset,
        length: part.length,
        offset: segment.add(bytes),
    });
    let parts = moved.collect();
    segment.finish(&shared.options.store).await?;
    claim.settle();
    Ok(MoveParts { object, parts })
}

/// What is damaged must not take the place of what may be whole: the read may be at fault. The format of staged changes
/// is known to sinks alone.
fn check(part: &LivePart, bytes: &Bytes) -> Result<()> {
    let damaged = match part.kind {
        PartKind::Run { meta_length, .. } => check_run(bytes, meta_length).err(),
        PartKind::Slice => (!slice::is_whole(bytes)).then_some("checksum mismatch"),
        PartKind::Staged => None,
    };
    match damaged {
        Some(reason) => Err(StorageError::corrupt(&part.object, part.offset, reason)),
        None => Ok(()),
    }
}

fn check_run(bytes: &Bytes, meta_length: u64) -> std::result::Result<(), &'static str> {
    let meta_at = bytes.len().checked_sub(meta_length as usize).ok_or("shorter than its index")?;
    let index = RunIndex::parse(&bytes.slice(meta_at..), Epoch::ZERO)?;
    if !index.is_top() {
        return check_blocks(bytes, &index);
    }
    let partitions_at =
        meta_at.checked_sub(index.block_bytes() as usize).ok_or("shorter than its index")?;
    for partition in index.block_numbers() {
        let range = index.block_range(partition);
        let range = partitions_at + range.start as usize..partitions_at + range.end as usize;
        let stored = bytes.slice(range);
        if crc32fast::hash(&stored) != index.block_crc(partition) {
            return Err("checksum mismatch");
        }
        let start = index.partition_start(partition).ok_or("a partition without a beginning")?;
        check_blocks(bytes, &RunIndex::parse_partition(&stored, start, Epoch::ZERO)?)?;
    }
    Ok(())
}

fn check_blocks(bytes: &Bytes, index: &RunIndex) -> std::result::Result<(), &'static str> {
    for block in index.block_numbers() {
        let range = index.block_range(block);
        let stored = bytes.get(range.start as usize..range.end as usize);
        let (named, rest) =
            stored.and_then(|b| b.split_at_checked(4)).ok_or("a block is cut off")?;
        let crc = index.block_crc(block);
        if named != crc.to_le_bytes() || crc32fast::hash(rest) != crc {
            return Err("checksum mismatch");
        }
    }
    Ok(())
}
