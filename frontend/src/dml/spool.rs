//! Rows for RETURNING of a statement that is too large to be held: computed before anything is applied, written to a
//! temporary file, and read back when the statement is committed.

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::Path;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::ipc::reader::StreamReader;
use arrow::ipc::writer::StreamWriter;
use datafusion::execution::SpillFile;
use futures::StreamExt;
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_rpc::catalog::Relation;
use sqlparser::ast::SelectItem;

use super::{Returned, returned, rows};
use crate::session::Session;
use crate::wire::Field;

/// Collects what RETURNING gives for a statement's rows.
pub struct Spool {
    table: Relation,
    alias: String,
    items: Vec<SelectItem>,
    file: Option<Spooled>,
}

struct Spooled {
    fields: Vec<Field>,
    file: Arc<dyn SpillFile>,
    writer: StreamWriter<BufWriter<File>>,
}

impl Spool {
    pub fn new(table: &Relation, alias: &str, items: &[SelectItem]) -> Spool {
        Spool { table: table.clone(), alias: alias.to_owned(), items: items.to_vec(), file: None }
    }

    /// Rows that the statement touched.
    pub async fn add(&mut self, session: &Session, touched: RecordBatch) -> Result<(), SqlError> {
        let (fields, batches) = self.compute(session, touched).await?;
        for batch in batches {
            let spooled = match &mut self.file {
                Some(spooled) => spooled,
                None => self.file.insert(Spooled::create(session, fields.clone(), &batch)?),
            };
            spooled.writer.write(&batch).map_err(rows::arrow_error)?;
        }
        Ok(())
    }

    async fn compute(
        &self,
        session: &Session,
        rows: RecordBatch,
    ) -> Result<(Vec<Field>, Vec<RecordBatch>), SqlError> {
        returned(session, &self.table, &self.alias, &self.items, rows).await
    }

    /// The columns and the rows, to be read once the statement is committed.
    pub async fn finish(self, session: &Session) -> Result<Returned, SqlError> {
        let Some(Spooled { fields, file, mut writer }) = self.file else {
            let none = RecordBatch::new_empty(rows::nullable(self.table.arrow_schema()?.as_ref()));
            let (fields, _) = self.compute(session, none).await?;
            return Ok((fields, futures::stream::empty().boxed()));
        };
        writer.finish().map_err(rows::arrow_error)?;
        drop(writer);
        let open = File::open(path_of(file.as_ref())?).map_err(io_error)?;
        let reader =
            StreamReader::try_new(BufReader::new(open), None).map_err(rows::arrow_error)?;
        // The file lives as long as its reader.
        let batches = reader.map(move |batch| {
            let _ = &file;
            batch.map_err(rows::arrow_error)
        });
        Ok((fields, futures::stream::iter(batches).boxed()))
    }
}

impl Spooled {
    fn create(
        session: &Session,
        fields: Vec<Field>,
        first: &RecordBatch,
    ) -> Result<Spooled, SqlError> {
        let file = session.engine().temporary_file()?;
        let path = path_of(file.as_ref())?;
        let open = File::options().write(true).open(path).map_err(io_error)?;
        let writer = StreamWriter::try_new(BufWriter::new(open), &first.schema())
            .map_err(rows::arrow_error)?;
        Ok(Spooled { fields, file, writer })
    }
}

fn path_of(file: &dyn SpillFile) -> Result<&Path, SqlError> {
    file.path().ok_or_else(|| SqlError::internal("a temporary file without a path"))
}

fn io_error(e: std::io::Error) -> SqlError {
    sql_error_from_datafusion(datafusion::error::DataFusionError::IoError(e))
}
