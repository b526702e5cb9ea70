//! The log in the object store (docs/design.md §10).
//!
//! - `meta/log/<n:020>`: record `n`, created with a conditional put; never overwritten.
//! - `meta/snapshot/<n:020>`: the fold of all records through `n`; records it covers are deleted, in bounded steps, once
//!   they are older than `log_retention`.
//!
//! Opening is two dependent rounds where few records follow the newest snapshot: the list of snapshots, then the snapshot
//! with the list of the records after it and the first of them; where more follow, they are a third one. Records that a
//! snapshot covers are never listed.
//! Safety needs nothing but the conditional put: whoever finds a record of a higher term at the head
//! is deposed, and whoever reads proves first that nobody has appended behind it. Liveness (who should lead) is not this module's matter.

mod lead;
mod settled;
mod snapshot;
mod store;
mod writer;

pub use lead::{AppendStats, AppendWait, LEADER_LEASE, LEASE_OUTWAITED, Retention};
pub use settled::settled;
pub use snapshot::SnapshotPolicy;
#[cfg(test)]
pub(crate) use store::fold_next;
pub use store::{LogStore, Opened, Replayed, crc, decode_record, encode_snapshot};
pub use writer::{FirstEntries, LogWriter, Observer, WriterOptions};
