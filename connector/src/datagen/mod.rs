//! Made-up rows: sequences, random values, skewed keys, timestamps, at a given rate.
//!
//! Every value is a function of (seed, column, row number) alone, so a split can be read from any
//! offset and again. Split `i` of `n` holds the rows whose number is `i` modulo `n`.

mod field;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, RecordBatchOptions};
use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;

use crate::columns::{Columns, Include, Role};
use crate::generated::Pace;
use crate::{
    ConnectorError, Known, OpenResult, Polled, ReadFrom, ReadResult, Source, SplitReader, options,
};
use field::Field;

const OPTIONS: &[&str] = &["connector", "rows", "rows_per_second", "splits", "seed", "rate_limit"];
const INCLUDES: &[Include] = &[Include::Partition, Include::Offset];
/// About as much as a batch takes at most: texts may be a megabyte each.
const READ_BYTES: usize = 8 << 20;

pub struct DatagenSource {
    columns: Arc<Columns>,
    /// By column; `None` where the column holds something else than a value.
    fields: Arc<Vec<Option<Field>>>,
    pace: Pace,
}

impl DatagenSource {
    /// Reads and checks the WITH clause and the declared columns.
    pub fn new(relation: &Relation) -> Result<DatagenSource, SqlError> {
        let columns = Columns::new(relation, INCLUDES)?;
        let names: Vec<&str> = columns.values().map(|c| columns.names[c].as_str()).collect();
        for option in &relation.options {
            let field = option.name.strip_prefix("fields.").and_then(|f| f.rsplit_once('.'));
            match field {
                Some((column, _)) if names.contains(&column) => {}
                Some((column, _)) => {
                    return Err(options::invalid(format!(
                        "option \"{}\" names column \"{column}\", which does not exist",
                        option.name
                    )));
                }
                None if OPTIONS.contains(&option.name.as_str()) => {}
                None => {
                    return Err(options::invalid(format!("unknown option \"{}\"", option.name))
                        .with_hint(format!(
                            "Options of this connector: {}, fields.<column>.<property>.",
                            OPTIONS.join(", ")
                        )));
                }
            }
        }
        if relation.format.is_some() {
            return Err(options::invalid("connector \"datagen\" takes no FORMAT clause"));
        }
        let seed = options::number(relation, "seed", 42u64, 0, "a number")?;
        let total = options::number(relation, "rows", u64::MAX, 0, "a number of rows")?;
        let fields = (0..columns.len())
            .map(|c| match columns.roles[c] {
                Role::Value => {
                    let seed = field::mix(seed ^ field::mix(c as u64 + 1));
                    let (name, t) = (&columns.names[c], columns.types[c]);
                    Field::new(relation, name, t, seed, total).map(Some)
                }
                _ => Ok(None),
            })
            .collect::<Result<_, SqlError>>()?;
        let splits =
            options::number(relation, "splits", 1u32, 1, "a number of splits, at least 1")?;
        let what = "rows a second, 0 for no limit";
        let rate = options::number(relation, "rows_per_second", 10u64, 0, what)?;
        let pace = Pace { splits, total, rate };
        Ok(DatagenSource { columns: Arc::new(columns), fields: Arc::new(fields), pace })
    }
}

#[async_trait]
impl Source for DatagenSource {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.columns.schema)
    }

    async fn poll(&self, known: &Known) -> Result<Polled, ConnectorError> {
        Ok(self.pace.poll(known))
    }

    fn open(&self, at: ReadFrom, columns: &[usize]) -> OpenResult {
        if at.split >= self.pace.splits {
            return Err(ConnectorError::NoSuchSplit(at.split));
        }
        let fields = columns.iter().filter_map(|c| self.fields.get(*c)?.as_ref());
        let width: usize = fields.map(Field::width).sum();
        Ok(Box::new(Reader {
            most_rows: (READ_BYTES / width.max(1)).max(1),
            schema: self.columns.project(columns)?,
            columns: Arc::clone(&self.columns),
            fields: Arc::clone(&self.fields),
            wanted: columns.to_vec(),
            splits: u64::from(self.pace.splits),
            split: at.split,
            offset: at.offset,
        }))
    }
}

struct Reader {
    /// Of one batch.
    most_rows: usize,
    schema: SchemaRef,
    columns: Arc<Columns>,
    fields: Arc<Vec<Option<Field>>>,
    wanted: Vec<usize>,
    splits: u64,
    split: u32,
    offset: u64,
}

impl Reader {
    fn column(&self, column: usize, numbers: &[u64]) -> Result<ArrayRef, ConnectorError> {
        let rows = numbers.len();
        Ok(match (self.columns.roles[column], &self.fields[column]) {
            (Role::Value, Some(field)) => field.values(numbers)?,
            (Role::RowId, _) => {
                Arc::new(Int64Array::from_iter_values(numbers.iter().map(|n| *n as i64)))
            }
            (Role::Include(Include::Offset), _) => {
                let from = self.offset as i64;
                Arc::new(Int64Array::from_iter_values(from..from + rows as i64))
            }
            (Role::Include(Include::Partition), _) => {
                let text = self.split.to_string();
                Arc::new(arrow::array::StringArray::from_iter_values(std::iter::repeat_n(
                    text, rows,
                )))
            }
            _ => return Err(ConnectorError::NoSuchColumn(column)),
        })
    }
}

#[async_trait]
impl SplitReader for Reader {
    async fn read(&mut self, until: u64, max_rows: usize) -> ReadResult {
        if self.offset >= until {
            return Ok(None);
        }
        let rows = max_rows.min(self.most_rows);
        let end = until.min(self.offset.saturating_add(rows as u64));
        let number = |offset| offset * self.splits + u64::from(self.split);
        let numbers: Vec<u64> = (self.offset..end).map(number).collect();
        let arrays =
            self.wanted.iter().map(|&c| self.column(c, &numbers)).collect::<Result<Vec<_>, _>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(numbers.len()));
        let batch = RecordBatch::try_new_with_options(Arc::clone(&self.schema), arrays, &options)?;
        self.offset = end;
        Ok(Some((batch, end)))
    }
}
