//! Rows, a value at a time, into a batch of the wanted columns.
//!
//! A row that turns out bad in the middle stays in the builders and is taken out of the finished batch:
//! builders cannot go back.

use std::borrow::Cow;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BooleanArray, Int64Array, RecordBatch, RecordBatchOptions};
use arrow::compute::filter_record_batch;
use arrow::datatypes::{Field as ArrowField, Schema, SchemaRef};
use millrace_common::encoding::ColumnBuilder;
use millrace_common::{SqlError, SqlState, SqlType};

use crate::ConnectorError;
use crate::columns::{Columns, Include, Role};

/// What the connector knows of the row it adds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts<'a> {
    pub key: Option<&'a [u8]>,
    pub partition: &'a str,
    pub offset: u64,
    /// Microseconds since 1970.
    pub timestamp: Option<i64>,
    pub file: &'a str,
    pub row_id: i64,
}

/// A value as text, or the lack of one.
pub type Field<'a> = Option<Cow<'a, str>>;

struct Output {
    column: usize,
    role: Role,
    builder: ColumnBuilder,
}

/// Builds batches of some of a relation's columns. Whether a row is bad does not depend on which: every
/// column's value is read, so that all readers of a source leave out the same rows.
pub struct BatchBuilder {
    columns: Arc<Columns>,
    /// The wanted columns, `kept` of them, then those that are only checked.
    outputs: Vec<Output>,
    kept: usize,
    schema: SchemaRef,
    /// The same, everything nullable.
    relaxed: SchemaRef,
    rows: usize,
    bad: Vec<usize>,
    weights: Vec<i64>,
    retracts: bool,
}

impl BatchBuilder {
    pub fn new(columns: Arc<Columns>, wanted: &[usize]) -> Result<BatchBuilder, ConnectorError> {
        let schema = columns.project(wanted)?;
        let mut outputs = Vec::with_capacity(wanted.len());
        for &column in wanted {
            if columns.roles[column] == Role::Generated {
                return Err(ConnectorError::NoSuchColumn(column));
            }
            let builder = ColumnBuilder::new(columns.types[column], 1_024);
            outputs.push(Output { column, role: columns.roles[column], builder });
        }
        let unread = columns.values().filter(|c| !wanted.contains(c));
        let checked: Vec<Output> = unread
            .filter(|&c| !takes_anything(columns.types[c]) || !columns.nullable[c])
            .map(|column| Output {
                column,
                role: Role::Value,
                builder: ColumnBuilder::new(columns.types[column], 0),
            })
            .collect();
        let kept = outputs.len();
        outputs.extend(checked);
        let (bad, weights) = (Vec::new(), Vec::new());
        let nullable = |f: &Arc<ArrowField>| f.as_ref().clone().with_nullable(true);
        let relaxed =
            Arc::new(Schema::new(schema.fields().iter().map(nullable).collect::<Vec<_>>()));
        Ok(BatchBuilder {
            columns,
            outputs,
            kept,
            schema,
            relaxed,
            rows: 0,
            bad,
            weights,
            retracts: false,
        })
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Adds a row; `value` gives the text of a column that rows bring. An error says what is wrong with
    /// the row, which is then left out.
    pub fn push<'a>(
        &mut self,
        facts: &Facts<'_>,
        weight: i64,
        mut value: impl FnMut(usize) -> Result<Field<'a>, SqlError>,
    ) -> Result<(), SqlError> {
        let mut failed = None;
        for output in &mut self.outputs {
            if failed.is_some() {
                output.builder.append_null();
                continue;
            }
            let added = match output.role {
                Role::Value => {
                    let name = &self.columns.names[output.column];
                    let nullable = self.columns.nullable[output.column] || weight < 0;
                    value(output.column)
                        .and_then(|text| put(&mut output.builder, text.as_deref(), nullable))
                        .map_err(|e| in_column(e, name))
                }
                Role::Include(include) => put_fact(&mut output.builder, include, facts),
                Role::RowId => output.builder.append_text(&facts.row_id.to_string()),
                Role::Generated => {
                    output.builder.append_null();
                    Ok(())
                }
            };
            if let Err(error) = added {
                output.builder.append_null();
                failed = Some(error);
            }
        }
        self.weights.push(weight);
        self.retracts |= weight != 1;
        self.rows += 1;
        match failed {
            None => Ok(()),
            Some(error) => {
                self.bad.push(self.rows - 1);
                Err(error)
            }
        }
    }

    /// The rows so far but the bad ones, and their weights if any is not 1.
    pub fn finish(&mut self) -> Result<(RecordBatch, Option<Int64Array>), ConnectorError> {
        let mut arrays: Vec<ArrayRef> =
            self.outputs.iter_mut().map(|o| o.builder.finish()).collect();
        arrays.truncate(self.kept);
        let rows = std::mem::take(&mut self.rows);
        let weights = std::mem::take(&mut self.weights);
        let retracts = std::mem::take(&mut self.retracts);
        let bad = std::mem::take(&mut self.bad);
        // Bad rows, and deletions, which have no values but the key, hold nulls anywhere.
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let batch = RecordBatch::try_new_with_options(Arc::clone(&self.relaxed), arrays, &options)?;
        let weights = retracts.then_some(weights);
        if bad.is_empty() {
            return Ok((self.strict(batch)?, weights.map(Int64Array::from)));
        }
        let mut good = vec![true; rows];
        bad.iter().for_each(|&r| good[r] = false);
        let kept = weights.map(|w| {
            Int64Array::from_iter_values(w.iter().zip(&good).filter(|(_, g)| **g).map(|(w, _)| *w))
        });
        let count = good.iter().filter(|g| **g).count();
        let batch = match batch.num_columns() {
            0 => RecordBatch::try_new_with_options(
                batch.schema(),
                vec![],
                &RecordBatchOptions::new().with_row_count(Some(count)),
            )?,
            _ => filter_record_batch(&batch, &BooleanArray::from(good))?,
        };
        Ok((self.strict(batch)?, kept))
    }

    /// With the relation's own schema where the rows fit it.
    fn strict(&self, batch: RecordBatch) -> Result<RecordBatch, ConnectorError> {
        let fits = batch
            .columns()
            .iter()
            .zip(self.schema.fields())
            .all(|(a, f)| f.is_nullable() || a.null_count() == 0);
        if !fits || batch.schema() == self.schema {
            return Ok(batch);
        }
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        let columns = batch.columns().to_vec();
        Ok(RecordBatch::try_new_with_options(Arc::clone(&self.schema), columns, &options)?)
    }
}

/// Whether any text is a value of the type.
fn takes_anything(t: SqlType) -> bool {
    matches!(t, SqlType::Text | SqlType::Varchar(None))
}

fn put(builder: &mut ColumnBuilder, text: Option<&str>, nullable: bool) -> Result<(), SqlError> {
    match text {
        Some(text) => builder.append_text(text),
        None if nullable => {
            builder.append_null();
            Ok(())
        }
        None => Err(SqlError::new(
            SqlState::NOT_NULL_VIOLATION,
            "null value violates not-null constraint",
        )),
    }
}

fn put_fact(
    builder: &mut ColumnBuilder,
    include: Include,
    facts: &Facts<'_>,
) -> Result<(), SqlError> {
    match include {
        Include::Key => match facts.key {
            Some(key) => builder.append_binary(key),
            None => {
                builder.append_null();
                Ok(())
            }
        },
        Include::Partition => builder.append_text(facts.partition),
        Include::Offset => builder.append_text(&facts.offset.to_string()),
        Include::Timestamp => match facts.timestamp {
            // The binary form: microseconds since 2000.
            Some(us) => builder.append_binary(&(us - 946_684_800_000_000).to_be_bytes()),
            None => {
                builder.append_null();
                Ok(())
            }
        },
        Include::File => builder.append_text(facts.file),
    }
}

fn in_column(mut error: SqlError, column: &str) -> SqlError {
    error.message = format!("column \"{column}\": {}", error.message);
    error
}
