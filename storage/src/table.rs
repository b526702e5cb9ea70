//! What the store knows of a state table: the shape of its entries and how it will be used. It knows
//! nothing of the operators that own it.

use arrow::datatypes::SchemaRef;
use millrace_common::TableId;
use millrace_common::access::{AccessClass, RetentionBy};
pub use millrace_rpc::catalog::RowStorage;

/// One state table of a job.
#[derive(Clone, Debug)]
pub struct TableDesc {
    pub id: TableId,
    /// What it is for, as EXPLAIN shows it.
    pub name: String,
    /// Columns of a stored value; may be none.
    pub value_schema: SchemaRef,
    pub storage: RowStorage,
    pub class: AccessClass,
    /// Users and subscribers read it: versions are kept down to the horizon.
    pub relation: bool,
    /// Entries that become too old are dropped, by this time of theirs.
    pub retention: Option<RetentionBy>,
}
