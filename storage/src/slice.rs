//! Tail slices: one committed epoch's delta of one job, as bytes (docs/design.md §9).
//!
//! ```text
//!  0 u32 crc32 of everything after this field
//!  4 u32 magic 0x4C53524D ("MRSL")
//!  8 u16 version (1)   10 u16 flags   12 u32 parts
//! 16 parts: u32 table id, u32 length, then `length` bytes: one block (see `block`)
//! ```
//!
//! All integers are little-endian. Blocks are written before the epoch is known and take that of the
//! slice's reference when read. The parts of one table follow each other in key order; a table that
//! two tasks wrote has their parts one after the other, so a reader starts a new run where keys step
//! back.
//!
//! Flag 1 says that each entry is a row of a key that had none before, so that the change of the epoch is
//! read without a look for old rows. A reader may pass over flags, as earlier releases do, which write none.

use std::sync::Arc;

use bytes::Bytes;
use millrace_common::collections::HashMap;
use millrace_common::{Epoch, TableId};

use crate::block::{BlockCodec, BlockEncoder, Entries};
use crate::error::{Result, StorageError};
use crate::memrun::{MemRun, SealId};

const MAGIC: u32 = 0x4c53_524d;
const VERSION: u16 = 1;
/// Each entry is a row of a key that had none.
const NEW_KEYS: u16 = 1;
const HEADER_BYTES: usize = 16;
/// Rows of one part: bounds what a reader decompresses at a time.
const PART_ROWS: usize = 1 << 14;

type Codecs = HashMap<TableId, Arc<BlockCodec>>;

/// The slice of these runs.
pub(crate) fn encode(runs: &[MemRun], codecs: &Codecs) -> Result<Bytes> {
    let mut out = vec![0u8; HEADER_BYTES];
    let mut encoder = BlockEncoder::default();
    let mut parts = 0u32;
    for run in runs {
        let codec = codec_of(codecs, run.table())?;
        for batch in run.batches() {
            let mut at = 0;
            while at < batch.len() {
                let n = PART_ROWS.min(batch.len() - at);
                append_part(&mut out, run.table(), codec, &batch.slice(at, n), &mut encoder)?;
                at += n;
                parts += 1;
            }
        }
    }
    out[4..8].copy_from_slice(&MAGIC.to_le_bytes());
    out[8..10].copy_from_slice(&VERSION.to_le_bytes());
    let flags = if runs.iter().all(|run| run.new_keys) { NEW_KEYS } else { 0 };
    out[10..12].copy_from_slice(&flags.to_le_bytes());
    out[12..16].copy_from_slice(&parts.to_le_bytes());
    let crc = crc32fast::hash(&out[4..]);
    out[..4].copy_from_slice(&crc.to_le_bytes());
    Ok(out.into())
}

fn append_part(
    out: &mut Vec<u8>,
    table: TableId,
    codec: &BlockCodec,
    entries: &Entries,
    encoder: &mut BlockEncoder,
) -> Result<()> {
    out.extend_from_slice(&table.0.to_le_bytes());
    let length_at = out.len();
    out.extend_from_slice(&[0; 4]);
    let (length, _) = codec.encode(entries, encoder, out)?;
    out[length_at..length_at + 4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(())
}

fn codec_of(codecs: &Codecs, table: TableId) -> Result<&Arc<BlockCodec>> {
    codecs.get(&table).ok_or_else(|| {
        StorageError::internal(format!("state table {table} is not part of the job"))
    })
}

/// The runs of a slice that was committed at `epoch`. `object` and `offset` name it in errors.
pub(crate) fn decode(
    bytes: &[u8],
    codecs: &Codecs,
    epoch: Epoch,
    object: &str,
    offset: u64,
) -> Result<Vec<MemRun>> {
    let corrupt = |reason: &str| StorageError::corrupt(object, offset, reason);
    if bytes.len() < HEADER_BYTES || bytes[4..8] != MAGIC.to_le_bytes() {
        return Err(corrupt("not a tail slice"));
    }
    if bytes[8..10] != VERSION.to_le_bytes() {
        return Err(corrupt("unknown tail slice version"));
    }
    if crc32fast::hash(&bytes[4..]).to_le_bytes() != bytes[..4] {
        return Err(corrupt("checksum mismatch"));
    }
    let mut runs: Vec<(TableId, Vec<Entries>)> = Vec::new();
    let mut at = HEADER_BYTES;
    for _ in 0..u32_at(bytes, 12).unwrap_or(0) {
        let table = u32_at(bytes, at).ok_or_else(|| corrupt("part beyond the end"))?;
        let length = u32_at(bytes, at + 4).ok_or_else(|| corrupt("part beyond the end"))? as usize;
        let block =
            bytes.get(at + 8..at + 8 + length).ok_or_else(|| corrupt("part beyond the end"))?;
        at += 8 + length;
        // Of a state table that the job has no more, since it was detached or rebuilt.
        let Some(codec) = codecs.get(&TableId(table)) else { continue };
        let entries =
            codec.decode(block, None, epoch, object, offset + (at - length) as u64)?.entries;
        add_part(&mut runs, TableId(table), entries);
    }
    let new_keys = u16::from_le_bytes([bytes[10], bytes[11]]) & NEW_KEYS != 0;
    let run = |(table, batches): (TableId, Vec<Entries>)| {
        let mut run = MemRun::sealed(table, batches.into(), SealId::default());
        run.new_keys = new_keys;
        run
    };
    Ok(runs.into_iter().map(run).collect())
}

/// Whether these are the bytes of one slice, undamaged.
pub(crate) fn is_whole(bytes: &[u8]) -> bool {
    bytes.len() >= HEADER_BYTES
        && bytes[4..8] == MAGIC.to_le_bytes()
        && crc32fast::hash(&bytes[4..]).to_le_bytes() == bytes[..4]
}

fn add_part(runs: &mut Vec<(TableId, Vec<Entries>)>, table: TableId, entries: Entries) {
    if entries.is_empty() {
        return;
    }
    match runs.last_mut() {
        Some((t, batches)) if *t == table && follows(batches.last(), &entries) => {
            batches.push(entries)
        }
        _ => runs.push((table, vec![entries])),
    }
}

fn follows(last: Option<&Entries>, next: &Entries) -> bool {
    last.is_none_or(|l| l.keys.value(l.len() - 1) < next.keys.value(0))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at + 4)?;
    Some(u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}

#[cfg(test)]
mod tests {
    use arrow::array::{BinaryArray, Int64Array, RecordBatch};
    use arrow::datatypes::{DataType, Field, Schema};

    use super::*;
    use crate::block::Epochs;

    fn codecs() -> Codecs {
        let schema = Schema::new(vec![Field::new("n", DataType::Int64, false)]);
        HashMap::from_iter([(TableId(7), Arc::new(BlockCodec::new(&schema)))])
    }

    fn run(keys: &[&str]) -> MemRun {
        let schema = Arc::clone(codecs()[&TableId(7)].value_schema());
        let n = Int64Array::from_iter_values(0..keys.len() as i64);
        let entries = Entries {
            keys: BinaryArray::from_iter_values(keys),
            epochs: Epochs::Uniform(Epoch::ZERO),
            weights: None,
            values: RecordBatch::try_new(schema, vec![Arc::new(n)]).unwrap(),
        };
        MemRun::sealed(TableId(7), Arc::from([entries]), SealId::default())
    }

    #[test]
    fn a_slice_reads_back_at_its_epoch() {
        let bytes = encode(&[run(&["a", "b"]), run(&["a2"])], &codecs()).unwrap();
        let runs = decode(&bytes, &codecs(), Epoch(5), "data/1/1.seg", 0).unwrap();
        // Keys step back between the parts, so they are two runs.
        assert_eq!(runs.iter().map(MemRun::num_rows).collect::<Vec<_>>(), vec![2, 1]);
        assert!(matches!(runs[0].batches()[0].epochs, Epochs::Uniform(Epoch(5))));
    }

    /// A failure here means that old commits would not be readable: give the new format a new version and keep
    /// reading the old one.
    #[test]
    fn golden_slice() {
        let pinned = include_str!("testdata/slice_v1.hex").trim_end();
        let bytes = encode(&[run(&["a", "b"])], &codecs()).unwrap();
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, pinned);
    }

    #[test]
    fn that_keys_are_new_is_kept_in_a_flag_which_version_1_passes_over() {
        let read = |bytes: &[u8]| {
            let runs = decode(bytes, &codecs(), Epoch(5), "data/1/1.seg", 0).unwrap();
            runs.iter().map(|run| (run.num_rows(), run.new_keys)).collect::<Vec<_>>()
        };
        let mut new = run(&["a", "b"]);
        new.new_keys = true;
        let changed = encode(&[new.clone(), run(&["c"])], &codecs()).unwrap();
        assert_eq!(read(&changed), [(3, false)], "of all, or of none");
        let (new, old) =
            (encode(&[new], &codecs()).unwrap(), encode(&[run(&["a", "b"])], &codecs()).unwrap());
        assert_eq!((read(&new), read(&old)), (vec![(2, true)], vec![(2, false)]));
        let differ = (4..new.len()).filter(|&at| new[at] != old[at]);
        assert_eq!(differ.map(|at| (at, new[at])).collect::<Vec<_>>(), [(10, 1)]);
    }

    #[test]
    fn any_damaged_byte_names_the_object_and_yields_no_rows() {
        let bytes = encode(&[run(&["a", "b", "c"])], &codecs()).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 0x10;
            let error = decode(&damaged, &codecs(), Epoch(5), "data/1/1.seg", 64).unwrap_err();
            let named =
                matches!(&error, StorageError::Corrupt { object, .. } if object == "data/1/1.seg");
            assert!(named, "byte {at}: {error}");
        }
        let cut = &bytes[..bytes.len() - 1];
        assert!(decode(cut, &codecs(), Epoch(5), "data/1/1.seg", 64).is_err());
    }
}
