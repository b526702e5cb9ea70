//! The tail: commits of all jobs, packed into few objects (docs/design.md §9).
//!
//! Slices below a threshold cost no put at all: they ride in the log record. The others go through one of two lanes,
//! by their size: a small slice never waits for the bytes of large ones, in the queue or in its segment. [`lane`] says
//! when a lane begins a put, and how that bounds their number.

mod lane;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use bytes::Bytes;
use millrace_common::EnvHandle;
use millrace_rpc::version::SliceRef;
use object_store::ObjectStore;
use tokio::sync::oneshot;

use self::lane::{Lane, Limits, Names, Slice};
use crate::error::{Result, StorageError};
use crate::given_up::{Claim, GivenUp};
use crate::put_waits::Waiting;
use crate::segment::ObjectNamer;

/// Slices up to this size go through the lane of small ones: a commit of some thousand rows.
const SMALL_SLICE_BYTES: usize = 512 << 10;
/// At some 100 MB/s, which one request to an object store reaches, the bytes of such a segment take about as long as an
/// empty request does. So a slice in a full segment waits for its own put hardly longer than one alone.
const SMALL: Limits = Limits { segment_bytes: 4 << 20, in_flight: 8 };
/// Of such a segment the time is that of its bytes: a larger one would save few requests. A slice has 8 MB at most,
/// unless it is a sink's part.
const LARGE: Limits = Limits { segment_bytes: 16 << 20, in_flight: 4 };

pub(crate) struct Tail {
    small: Arc<Lane>,
    large: Arc<Lane>,
    inline_bytes: usize,
}

impl Tail {
    /// Slices of up to `inline_bytes` ride in the log record.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        namer: Arc<ObjectNamer>,
        given_up: Arc<GivenUp>,
        env: &EnvHandle,
        inline_bytes: usize,
    ) -> Tail {
        let names = Names { namer, given_up };
        let lane = |limits| Lane::new(Arc::clone(&store), names.clone(), env.clone(), limits);
        Tail { small: lane(SMALL), large: lane(LARGE), inline_bytes }
    }

    /// Makes a slice durable, or inline: then the log record makes it so. `waiting` is told what its put does. Slices
    /// become durable in any order. The claim is on the object that holds it, if one does.
    pub async fn put(
        &self,
        bytes: Bytes,
        sequence: u64,
        waiting: &Waiting,
    ) -> Result<(SliceRef, Option<Claim>)> {
        if bytes.len() <= self.inline_bytes {
            let length = bytes.len() as u64;
            let slice = SliceRef { inline: bytes, length, sequence, ..SliceRef::default() };
            return Ok((slice, None));
        }
        let lane = if bytes.len() <= SMALL_SLICE_BYTES { &self.small } else { &self.large };
        let (done, slice) = oneshot::channel();
        lane.add(Slice { bytes, wait: Arc::clone(&waiting.wait), done });
        let stopped =
            |_| StorageError::internal("the tail writer stopped before the slice was written");
        let (slice, claim) = slice.await.map_err(stopped)??;
        Ok((SliceRef { sequence, ..slice }, Some(claim)))
    }

    /// Bytes of slices that wait or are being written.
    pub fn held_bytes(&self) -> usize {
        self.small.held_bytes() + self.large.held_bytes()
    }
}
