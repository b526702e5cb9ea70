//! Header and checksum of stored records and snapshots.

use prost::bytes::{BufMut, Bytes, BytesMut};

/// The newest format of the log that this build reads. It rises with whatever an older build would misread or pass over:
/// here, and in all that the log names. 2: drained processes and backups, which a build of format 1 passes over: it would
/// place jobs where none are to be, and delete what a backup names. Store ids are no reason: who passes one over leaves
/// it out of its snapshots, and the next leader that finds none gives another one. Nor is it that an operator has placed a
/// job: who passes that over moves it when a process joins, as it always has.
pub const FORMAT_VERSION: u32 = 2;
/// The oldest format whose builds may open a log that this build has written to. Every record and snapshot names it, so
/// the head of the log does: an older build refuses the whole.
pub const OLDEST_READER: u32 = 2;

const HEADER: usize = 8;

/// Why stored bytes are not a record or snapshot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("the object is shorter than its header")]
    Short,
    #[error("format version {0} is not known to this server")]
    Version(u32),
    /// Written by a newer build, and for builds that read this format.
    #[error("it needs log format {needed}, and this server reads up to {FORMAT_VERSION}")]
    Newer { needed: u32 },
    #[error("the checksum does not match")]
    Checksum,
    #[error("the message cannot be decoded: {0}")]
    Decode(String),
}

const _: () = assert!(0 < OLDEST_READER && OLDEST_READER <= FORMAT_VERSION);

/// Header and message as stored. `crc` computes CRC-32 (IEEE).
pub fn encode_frame<M: prost::Message>(message: &M, crc: impl Fn(&[u8]) -> u32) -> Bytes {
    let mut out = BytesMut::with_capacity(HEADER + message.encoded_len());
    out.put_u32(OLDEST_READER);
    out.put_u32(0);
    // Infallible: a BytesMut grows.
    let _ = message.encode(&mut out);
    let sum = crc(&out[HEADER..]);
    out[4..HEADER].copy_from_slice(&sum.to_be_bytes());
    out.freeze()
}

/// The message of stored bytes, after checking header and checksum.
pub fn decode_frame<M: prost::Message + Default>(
    bytes: &[u8],
    crc: impl Fn(&[u8]) -> u32,
) -> Result<M, FrameError> {
    let (header, body) = bytes.split_at_checked(HEADER).ok_or(FrameError::Short)?;
    let word = |at: usize| {
        u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    match word(0) {
        0 => return Err(FrameError::Version(0)),
        needed if needed > FORMAT_VERSION => return Err(FrameError::Newer { needed }),
        _ => {}
    }
    if word(4) != crc(body) {
        return Err(FrameError::Checksum);
    }
    M::decode(body).map_err(|e| FrameError::Decode(e.to_string()))
}
