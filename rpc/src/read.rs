//! Committed rows, as a frontend asks the process that a job runs on for them, whose memory has most of what is read: the
//! faster way beside log and bucket, which are always there. So whoever serves this may refuse any call.

use async_trait::async_trait;
use millrace_common::{DeltaChunk, Epoch, Generation, JobId, TableId, VNODE_COUNT};
use prost::bytes::Bytes;

use crate::call_error::CallError;

/// Keys of one request, at most.
pub const MOST_KEYS: usize = 256;
/// Key ranges of one request, at most: an index of which the first column is not fixed is read by one in each vnode.
pub const MOST_RANGES: usize = VNODE_COUNT;
/// Bytes of the keys of one request, or of the bounds of its ranges, at most.
pub const MOST_KEY_BYTES: usize = 1 << 20;

/// Storage keys from one (inclusive) to another (exclusive).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRange {
    pub from: Bytes,
    pub until: Bytes,
}

/// Which rows of a relation are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WantedRows {
    /// Those at these storage keys.
    Keys(Vec<Bytes>),
    /// Those in any of these ranges.
    Ranges(Vec<KeyRange>),
    /// Any: only their number is limited.
    Any,
}

impl WantedRows {
    /// Whether so few keys or ranges may be asked for; whoever serves reads refuses more.
    pub fn is_small(&self) -> bool {
        let fit =
            |count: usize, most: usize, bytes: usize| count <= most && bytes <= MOST_KEY_BYTES;
        match self {
            WantedRows::Keys(keys) => fit(keys.len(), MOST_KEYS, keys.iter().map(Bytes::len).sum()),
            WantedRows::Ranges(ranges) => {
                let bytes = ranges.iter().map(|range| range.from.len() + range.until.len());
                fit(ranges.len(), MOST_RANGES, bytes.sum())
            }
            WantedRows::Any => true,
        }
    }
}

/// What a read asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    pub job: JobId,
    /// The one that the log has.
    pub generation: Generation,
    /// How many commits of the job the caller has read in the log ([`JobVersion::commits`]): all of them count, and which
    /// others do `epoch` says.
    ///
    /// [`JobVersion::commits`]: crate::version::JobVersion::commits
    pub commits: u64,
    /// At which the relation is exact.
    pub epoch: Epoch,
    /// The state table that has the relation's rows.
    pub table: TableId,
    /// Positions of the columns that are wanted, hidden ones counted. No more than there are.
    pub columns: Vec<u32>,
    pub rows: WantedRows,
    /// About so many rows are enough; `None`: all are wanted.
    pub limit: Option<u64>,
    /// Bytes of rows beyond which the read is refused.
    pub max_bytes: u64,
}

/// What a read was answered with.
#[derive(Clone, Debug)]
pub enum ReadAnswer {
    Rows(FoundRows),
    Refused(ReadRefusal),
}

/// The rows that were asked for.
#[derive(Clone, Debug, Default)]
pub struct FoundRows {
    /// Where keys were asked for: the position of each row's key among them, ascending.
    pub positions: Vec<u32>,
    /// Rows with their multiplicities, all of the same columns.
    pub chunks: Vec<DeltaChunk>,
}

/// Why a process does not answer with rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadRefusal {
    /// The job does not run there in this generation.
    NotOpen,
    /// Commits that the caller has read in the log have not taken effect there.
    NotYet,
    /// The epoch is no longer kept.
    TooOld,
    /// The rows have more bytes than the caller takes, or the request has more keys or ranges than are served.
    TooLarge,
    /// Many others read there now.
    Busy,
}

/// Served by a compute process, called by frontends. An error says nothing of the rows: they can be read from log and
/// bucket.
#[async_trait]
pub trait ReadService: Send + Sync {
    /// Rows of a relation as of an epoch: the same as from log and bucket.
    async fn read(&self, request: ReadRequest) -> Result<ReadAnswer, CallError>;

    /// Returns when there is a connection, so that a call does not wait for one.
    async fn connect(&self) -> Result<(), CallError> {
        Ok(())
    }
}
