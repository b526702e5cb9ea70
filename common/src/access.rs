//! How a state table is used and cleaned: what the planner chooses and the store works by.

/// How a state table is used; chosen from the plan (docs/design.md §2; APSys'18). Decides block size, filter and
/// compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AccessClass {
    /// Read, changed and written back by whole key: aggregates, a relation's keyed rows.
    #[default]
    PointUpdate,
    /// Written in arrival order, never read by a key of its own: append-only rows. Runs hardly overlap.
    Append,
    /// Read by prefix in key order: join sides, top-N, values of MIN and MAX.
    RangeRead,
    /// Read by whole key and written without being read: a join side with unique join keys.
    Lookup,
    /// Written as operands that the store adds up: weights of multiset rows nobody reads back.
    Merge,
}

/// Where a row of a state table has its time, a timestamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RetentionBy {
    /// In the first column of the key, behind the vnode, in ascending order, NULLs first.
    Key,
    /// In a column of the value.
    Value(usize),
}
