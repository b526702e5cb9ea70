//! What a statement gives back.

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field as ArrowField, Schema};
use futures::StreamExt;
use millrace_common::{SqlError, SqlType};

use crate::cluster::BatchStream;
use crate::copy::{CopyIn, CopyOut};
use crate::wire::Field;

pub enum Outcome {
    /// An empty statement.
    Empty,
    /// Done; the command tag.
    Command(String),
    Rows(RowSet),
    CopyIn(Box<CopyIn>),
    CopyOut(Box<CopyOut>),
}

/// Rows on their way to the client.
pub struct RowSet {
    pub fields: Vec<Field>,
    pub stream: BatchStream,
    /// The tag when the rows are sent; `{n}` is their number.
    pub tag: String,
}

impl RowSet {
    pub fn select(fields: Vec<Field>, stream: BatchStream) -> RowSet {
        RowSet { fields, stream, tag: "SELECT {n}".to_owned() }
    }

    pub fn ready(fields: Vec<Field>, batches: Vec<RecordBatch>, tag: impl Into<String>) -> RowSet {
        let stream = futures::stream::iter(batches.into_iter().map(Ok)).boxed();
        RowSet { fields, stream, tag: tag.into() }
    }

    /// Rows of text under the given column names.
    pub fn text(
        names: &[&str],
        rows: Vec<Vec<Option<String>>>,
        tag: &str,
    ) -> Result<RowSet, SqlError> {
        let fields = names.iter().map(|n| text_field(n)).collect();
        let columns: Vec<ArrayRef> = (0..names.len())
            .map(|c| {
                Arc::new(rows.iter().map(|r| r.get(c).cloned().flatten()).collect::<StringArray>())
                    as ArrayRef
            })
            .collect();
        let schema = Schema::new(
            names.iter().map(|n| ArrowField::new(*n, DataType::Utf8, true)).collect::<Vec<_>>(),
        );
        let batch = RecordBatch::try_new(Arc::new(schema), columns)
            .map_err(crate::dml::rows::arrow_error)?;
        Ok(RowSet::ready(fields, vec![batch], tag))
    }
}

pub fn text_field(name: &str) -> Field {
    let told = Default::default();
    Field { name: name.to_owned(), type_oid: SqlType::Text.oid(), type_len: -1, typmod: -1, told }
}
