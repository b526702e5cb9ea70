//! What the store knows of a state table: the shape of its entries and how it will be used. It knows
//! nothing of the operators that own it.

use arrow::datatypes::SchemaRef;
use millrace_common::TableId;
pub use millrace_rpc::catalog::RowStorage;

use crate::retain::RetainBy;

/// How a state table is used (docs/design.md §2): decides block size, filter and compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StateClass {
    /// Read and written by whole keys.
    #[default]
    PointUpdate,
    /// Written in arrival order; runs hardly overlap.
    Append,
    /// Read by key prefix.
    RangeRead,
    /// Read by key or prefix, seldom written.
    Lookup,
    /// Written without being read.
    Merge,
}

/// One state table of a job.
#[derive(Clone, Debug)]
pub struct TableDesc {
    pub id: TableId,
    /// What it is for, as EXPLAIN shows it.
    pub name: String,
    /// Columns of a stored value; may be none.
    pub value_schema: SchemaRef,
    pub storage: RowStorage,
    pub class: StateClass,
    /// Users and subscribers read it: versions are kept down to the horizon.
    pub relation: bool,
    /// Entries that become too old are dropped, by this time of theirs.
    pub retention: Option<RetainBy>,
}
