//! Rows between processes: a [`DeltaChunk`] as an Arrow IPC stream and weights, in pieces of bounded size.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{Array, Int64Array, RecordBatch, UInt32Array};
use arrow::buffer::Buffer;
use arrow::error::ArrowError;
use arrow_ipc::reader::StreamDecoder;
use arrow_ipc::writer::StreamWriter;
use millrace_common::DeltaChunk;
use millrace_common::delta::take_rows;
use prost::bytes::Bytes;

use crate::call_error::CallError;
use crate::proto::Rows;

/// Bytes that a message may have. Rows come in pieces far below; what else is sent (a job's version, a record) is below
/// by the limits of the log.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;
/// Bytes of rows that go into one message, about.
const PIECE_BYTES: usize = 1 << 20;
/// What a message has besides its rows, at most.
const ENVELOPE_BYTES: usize = 1 << 20;

static ENCODED: AtomicU64 = AtomicU64::new(0);

/// Batches that this process has encoded to send them: none, as long as all roles are in it and call each other directly.
pub fn encoded_batches() -> u64 {
    ENCODED.load(Ordering::Relaxed)
}

/// A chunk in pieces, in its order; one, without rows, if it has none.
pub(crate) fn pieces(delta: &DeltaChunk) -> Result<Vec<Rows>, CallError> {
    let rows = delta.num_rows();
    let pieces = bytes_of(delta).div_ceil(PIECE_BYTES).clamp(1, rows.max(1));
    let step = rows.div_ceil(pieces).max(1);
    let mut encoded = Vec::with_capacity(pieces);
    let mut at = 0;
    loop {
        let taken = step.min(rows - at);
        append(&delta.slice(at, taken), &mut encoded)?;
        at += taken;
        if at >= rows {
            return Ok(encoded);
        }
    }
}

/// Bytes of the rows themselves: a slice does not count what it is a slice of.
pub fn bytes_of(delta: &DeltaChunk) -> usize {
    let bytes = |column: &dyn Array| {
        let sliced = column.to_data().get_slice_memory_size();
        sliced.unwrap_or_else(|_| column.get_array_memory_size())
    };
    delta.batch.columns().iter().map(|column| bytes(column.as_ref())).sum()
}

/// Adds a chunk as one piece, or as several where rows are of very different sizes.
fn append(delta: &DeltaChunk, to: &mut Vec<Rows>) -> Result<(), CallError> {
    let rows = encode(delta)?;
    if rows.batch.len() + 10 * rows.weights.len() <= MAX_MESSAGE_BYTES - ENVELOPE_BYTES {
        to.push(rows);
        return Ok(());
    }
    let half = delta.num_rows() / 2;
    if half == 0 {
        let message = format!("a row takes {} bytes", rows.batch.len());
        return Err(CallError::TooLarge(message));
    }
    append(&delta.slice(0, half), to)?;
    append(&delta.slice(half, delta.num_rows() - half), to)
}

fn encode(delta: &DeltaChunk) -> Result<Rows, CallError> {
    let write = || -> Result<Vec<u8>, ArrowError> {
        let mut bytes = Vec::new();
        let mut writer = StreamWriter::try_new(&mut bytes, &delta.batch.schema())?;
        writer.write(&delta.batch)?;
        writer.finish()?;
        drop(writer);
        Ok(bytes)
    };
    let bytes = write().map_err(|e| CallError::Malformed(e.to_string()))?;
    ENCODED.fetch_add(1, Ordering::Relaxed);
    let weights = delta.weights.as_ref().map_or(Vec::new(), |w| w.values().to_vec());
    Ok(Rows { crc: crc32fast::hash(&bytes), batch: bytes.into(), weights })
}

/// The chunk of one piece.
pub(crate) fn decode(rows: &Rows) -> Result<DeltaChunk, CallError> {
    if crc32fast::hash(&rows.batch) != rows.crc {
        return Err(CallError::Malformed("the checksum of rows does not match".into()));
    }
    // Arrow's reader checks most of what it reads, and panics at the rest.
    let read = catch_unwind(AssertUnwindSafe(|| read_batch(&rows.batch)));
    let batch = read
        .map_err(|_| CallError::Malformed("rows that cannot be read".into()))?
        .map_err(|e| CallError::Malformed(e.to_string()))?;
    if rows.weights.is_empty() {
        return Ok(DeltaChunk::inserts(batch));
    }
    if rows.weights.len() != batch.num_rows() {
        let (weights, rows) = (rows.weights.len(), batch.num_rows());
        return Err(CallError::Malformed(format!("{weights} weights of {rows} rows")));
    }
    Ok(DeltaChunk::new(batch, Some(Int64Array::from(rows.weights.clone()))))
}

/// The only batch. The decoder works on the bytes where they are: it makes no room for what they only claim to have.
fn read_batch(bytes: &Bytes) -> Result<RecordBatch, ArrowError> {
    let mut buffer = Buffer::from(bytes.clone());
    let mut decoder = StreamDecoder::new();
    let batch = decoder.decode(&mut buffer)?;
    let batch = batch.ok_or_else(|| ArrowError::IpcError("there is no batch".into()))?;
    // Each column in memory of its own: otherwise each would count, and keep, the whole message.
    let rows = u32::try_from(batch.num_rows()).map_err(|e| ArrowError::IpcError(e.to_string()))?;
    take_rows(&batch, &UInt32Array::from_iter_values(0..rows))
}

/// Pieces of one chunk, together again.
pub(crate) fn join(mut chunks: Vec<DeltaChunk>) -> Result<DeltaChunk, CallError> {
    let first = chunks.first().ok_or_else(|| CallError::missing("rows"))?;
    let schema = first.schema();
    if chunks.iter().any(|c| c.schema() != schema) {
        return Err(CallError::Malformed("rows of one change have different columns".into()));
    }
    match chunks.len() {
        1 => Ok(chunks.remove(0)),
        _ => DeltaChunk::concat(&schema, &chunks).map_err(|e| CallError::Malformed(e.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, Int64Array, StringArray};

    use super::*;

    fn chunk(rows: usize, width: usize) -> DeltaChunk {
        let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows as i64));
        let texts: ArrayRef =
            Arc::new(StringArray::from_iter_values((0..rows).map(|i| format!("{i:width$}"))));
        let batch = RecordBatch::try_from_iter([("id", ids), ("text", texts)]).unwrap();
        let weights = (0..rows as i64).map(|i| if i % 3 == 0 { -1 } else { 1 });
        DeltaChunk::new(batch, Some(Int64Array::from_iter_values(weights)))
    }

    #[test]
    fn a_large_chunk_goes_in_pieces_and_comes_back_as_it_was() {
        for delta in [chunk(0, 1), chunk(1, 1), chunk(5000, 2000)] {
            let pieces = pieces(&delta).unwrap();
            assert!(pieces.iter().all(|p| p.batch.len() < 2 * PIECE_BYTES));
            assert_eq!(pieces.len() > 5, delta.num_rows() == 5000);
            let back = join(pieces.iter().map(|p| decode(p).unwrap()).collect()).unwrap();
            assert_eq!(back.batch, delta.batch);
            assert_eq!(back.weights_array(), delta.weights_array());
        }
    }

    #[test]
    fn rows_take_no_more_memory_than_before_they_were_sent() {
        let delta = chunk(5000, 20);
        let pieces = pieces(&delta.slice(100, 1000)).unwrap();
        assert_eq!(pieces.len(), 1, "the other rows are not sent");
        let back = decode(&pieces[0]).unwrap();
        assert!(back.memory_size() < delta.memory_size() / 3, "{}", back.memory_size());
    }

    #[test]
    fn damaged_rows_are_an_error_whatever_the_damage() {
        let good = encode(&chunk(20, 8)).unwrap();
        for at in 0..good.batch.len() {
            let mut bytes = good.batch.to_vec();
            bytes[at] ^= 0xff;
            let batch: Bytes = bytes.into();
            assert!(decode(&Rows { batch: batch.clone(), ..good.clone() }).is_err(), "checksum");
            // With a checksum that is right it may be other rows, but it does not panic.
            let crc = crc32fast::hash(&batch);
            let _ = decode(&Rows { batch, crc, weights: Vec::new() });
        }
        let few = Rows { weights: vec![1], ..good.clone() };
        assert!(matches!(decode(&few), Err(CallError::Malformed(m)) if m.contains("1 weights")));
        assert!(decode(&Rows::default()).is_err());
    }
}
