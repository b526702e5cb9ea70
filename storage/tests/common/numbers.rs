//! A table of one number a key.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use millrace_common::TableId;
use millrace_common::access::AccessClass;
use millrace_storage::{RowStorage, TableDesc};

pub const TABLE: TableId = TableId(1);

pub fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("n", DataType::Int64, false)]))
}

/// The table as an operator's state that is read in this way.
pub fn desc(class: AccessClass) -> TableDesc {
    TableDesc {
        id: TABLE,
        name: "numbers".into(),
        value_schema: schema(),
        storage: RowStorage::Keyed,
        class,
        relation: false,
        retention: None,
    }
}
