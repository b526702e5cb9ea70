//! Identifiers. All are handed out by meta, are unique in a cluster and are never reused.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Number of hash partitions of every job (docs/design.md §2). A power of two.
pub const VNODE_COUNT: usize = 256;

/// One of the [`VNODE_COUNT`] hash partitions: the unit of ownership.
pub type Vnode = u16;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// A table, source, view, materialized view, index or sink in the catalog. It is also the OID
    /// that PostgreSQL clients see.
    RelationId,
    u32
);
id!(
    /// One state table: an operator's keyed state, or a relation's rows.
    TableId,
    u32
);
id!(
    /// A compute process.
    WorkerId,
    u32
);
id!(
    /// Raised in the log by every recovery of a job; whatever names another generation is ignored.
    Generation,
    u64
);
id!(
    /// An immutable sorted file of one state table.
    RunId,
    u64
);

/// A job maintains exactly one relation (or feeds one sink) and shares its identifier.
pub type JobId = RelationId;
