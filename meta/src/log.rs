//! The log in the object store (docs/design.md §10).
//!
//! - `meta/log/<n:020>`: record `n`, created with a conditional put; never overwritten.
//! - `meta/snapshot/<n:020>`: the fold of all records through `n`; records it covers are deleted once
//!   they are older than `log_retention`.
//!
//! Opening is two dependent rounds: list, then the snapshot and the records after it together.
//! Safety needs nothing but the conditional put: whoever finds a record of a higher term at the head
//! is deposed, and whoever reads proves first that nobody has appended behind it. Liveness (who should lead) is not this module's matter.

mod lead;
mod snapshot;
mod store;
mod writer;

pub use lead::LEADER_LEASE;
pub use snapshot::SnapshotPolicy;
pub use store::{LogStore, Opened, crc};
pub use writer::{LogWriter, Observer, WriterOptions};
