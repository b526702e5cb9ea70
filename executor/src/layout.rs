//! How a relation's rows become entries of its state table: vnodes, key bytes, identity.

use arrow::array::{ArrayRef, BinaryArray, RecordBatch};
use arrow::datatypes::SchemaRef;
use millrace_common::hash::{hash_columns, vnodes};
use millrace_common::identity::RowCodec;
use millrace_common::keys::columns_at;
use millrace_common::{SqlError, Vnode};
use millrace_graph::RelationLayout;
use millrace_rpc::catalog::{Relation, RowStorage};

use crate::error::ExecError;

/// A relation's storage format, with the codecs made.
#[derive(Debug)]
pub struct RowLayout {
    pub schema: SchemaRef,
    pub storage: RowStorage,
    /// Columns of the storage key: the unique key, or all (Multiset), or none (Append).
    pub key: Vec<usize>,
    pub distribution: Vec<usize>,
    /// `None`: the key has no columns.
    codec: Option<RowCodec>,
    /// Encodes whole rows.
    pub identity: RowCodec,
}

impl RowLayout {
    fn new(
        schema: SchemaRef,
        storage: RowStorage,
        key: Vec<usize>,
        distribution: Vec<usize>,
    ) -> Result<RowLayout, ExecError> {
        let columns = schema.fields().len();
        if key.iter().chain(&distribution).any(|&c| c >= columns) {
            return Err(ExecError::internal("a relation's key names a column it does not have"));
        }
        let all: Vec<usize> = (0..columns).collect();
        let key = match storage {
            RowStorage::Keyed => key,
            RowStorage::Multiset => all.clone(),
            RowStorage::Append => Vec::new(),
        };
        let codec = match storage {
            _ if key.is_empty() => None,
            RowStorage::Multiset => Some(RowCodec::whole(&schema)?),
            _ => Some(RowCodec::of_values(&schema, &key)?),
        };
        let identity = RowCodec::whole(&schema)?;
        Ok(RowLayout { schema, storage, key, distribution, codec, identity })
    }

    /// Of a job's result.
    pub fn of_output(output: &RelationLayout) -> Result<RowLayout, ExecError> {
        RowLayout::new(
            SchemaRef::clone(&output.schema),
            output.storage,
            output.key.clone(),
            output.distribution.clone(),
        )
    }

    /// Of a table in the catalog.
    pub fn of_relation(relation: &Relation) -> Result<RowLayout, ExecError> {
        let storage = RowStorage::try_from(relation.storage)
            .map_err(|_| SqlError::internal("unknown row storage in the catalog"))?;
        let positions = |list: &[u32]| list.iter().map(|&c| c as usize).collect();
        RowLayout::new(
            relation.arrow_schema()?,
            storage,
            positions(&relation.key),
            positions(&relation.distribution),
        )
    }

    /// The vnode of every row; all 0 without distribution columns.
    pub fn vnodes(&self, batch: &RecordBatch) -> Result<Vec<Vnode>, ExecError> {
        if self.distribution.is_empty() {
            return Ok(vec![0; batch.num_rows()]);
        }
        let hashes = hash_columns(&columns_at(batch, &self.distribution), batch.num_rows())?;
        Ok(vnodes(&hashes))
    }

    /// The storage key of every row, for Keyed and Multiset.
    pub fn keys(&self, batch: &RecordBatch, vnodes: &[Vnode]) -> Result<BinaryArray, ExecError> {
        match &self.codec {
            Some(codec) => Ok(codec.storage_keys(vnodes, batch.columns())?),
            None => Ok(BinaryArray::from_iter_values(vnodes.iter().map(|v| v.to_be_bytes()))),
        }
    }

    /// The key columns of a row as PostgreSQL's error detail shows them: `(id)=(1)`.
    pub fn describe_key(&self, batch: &RecordBatch, row: usize) -> String {
        let names: Vec<&str> =
            self.key.iter().map(|&c| self.schema.field(c).name().as_str()).collect();
        let values: Vec<String> = self.key.iter().map(|&c| display(batch.column(c), row)).collect();
        format!("({})=({})", names.join(", "), values.join(", "))
    }
}

fn display(column: &ArrayRef, row: usize) -> String {
    if column.is_null(row) {
        return "null".to_string();
    }
    arrow::util::display::array_value_to_string(column, row).unwrap_or_else(|e| e.to_string())
}
