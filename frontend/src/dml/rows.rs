//! Rows on their way into a table: constraints, keys, temporary tables of them.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BooleanArray, RecordBatch, UInt32Array};
use arrow::compute;
use arrow::datatypes::{Schema, SchemaRef};
use bytes::BytesMut;
use datafusion::catalog::TableProvider;
use datafusion::datasource::MemTable;
use millrace_common::delta::{new_batch, take_rows};
use millrace_common::keys::KeyCodec;
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::round;
use millrace_rpc::catalog::{Column as CatalogColumn, Relation};

use crate::encoding::Column;
use crate::query::snapshot_table::encode_keys;

pub fn arrow_error(e: arrow::error::ArrowError) -> SqlError {
    SqlError::internal(format!("rows could not be put together: {e}"))
}

/// A batch of all of a table's columns.
pub fn batch(
    schema: &SchemaRef,
    columns: Vec<ArrayRef>,
    rows: usize,
) -> Result<RecordBatch, SqlError> {
    new_batch(schema, columns, rows).map_err(arrow_error)
}

/// The table's schema with every column nullable, so that violations are found by us.
pub fn nullable(schema: &Schema) -> SchemaRef {
    let fields: Vec<_> =
        schema.fields().iter().map(|f| f.as_ref().clone().with_nullable(true)).collect();
    Arc::new(Schema::new(fields))
}

/// Rounds the seconds of times to the digits that their columns are declared with.
pub fn round_seconds(table: &Relation, columns: &mut [ArrayRef]) -> Result<(), SqlError> {
    for (column, array) in table.columns.iter().zip(columns) {
        if let Some(digits) = column.sql_type.second_digits() {
            *array = round::round_seconds(array, digits)?;
        }
    }
    Ok(())
}

/// 23502 with the failing row, as PostgreSQL words it.
pub fn check_not_null(table: &Relation, columns: &[ArrayRef]) -> Result<(), SqlError> {
    match null_violation(table, columns)? {
        Some((_, e)) => Err(e),
        None => Ok(()),
    }
}

/// The first row with a null where none may be, and its error.
pub fn null_violation(
    table: &Relation,
    columns: &[ArrayRef],
) -> Result<Option<(usize, SqlError)>, SqlError> {
    let first_null = |array: &ArrayRef| match array.null_count() {
        0 => None,
        _ => (0..array.len()).find(|row| array.is_null(*row)),
    };
    let strict = table.columns.iter().enumerate().filter(|(_, column)| !column.nullable);
    let nulls = strict.filter_map(|(i, _)| Some((first_null(&columns[i])?, i)));
    // Of several columns of that row the first.
    let Some((row, i)) = nulls.min() else { return Ok(None) };
    let column = &table.columns[i].name;
    let message = format!(
        "null value in column \"{column}\" of relation \"{}\" violates not-null constraint",
        table.name
    );
    let error = SqlError::new(SqlState::NOT_NULL_VIOLATION, message)
        .with_detail(format!("Failing row contains ({}).", show_row(table, columns, row)?))
        .with_object(table.error_object(Some(column)));
    Ok(Some((row, error)))
}

fn show_row(table: &Relation, columns: &[ArrayRef], row: usize) -> Result<String, SqlError> {
    let mut parts = Vec::new();
    for (column, array) in table.columns.iter().zip(columns).filter(|(c, _)| !c.hidden) {
        let _ = column;
        let values = Column::new(&array.slice(row, 1))?;
        if values.is_null(0) {
            parts.push("null".to_owned());
            continue;
        }
        let mut text = BytesMut::new();
        values.put_text(0, &mut text)?;
        parts.push(String::from_utf8_lossy(&text).into_owned());
    }
    Ok(parts.join(", "))
}

/// Storage keys of full rows.
pub fn storage_keys(
    table: &Relation,
    rows: &RecordBatch,
) -> Result<arrow::array::BinaryArray, SqlError> {
    let key: Vec<ArrayRef> = table.key.iter().map(|k| rows.column(*k as usize).clone()).collect();
    encode_keys(table, &key)
}

/// Positions of the first row of each key, ascending.
pub fn first_of_each_key(table: &Relation, rows: &RecordBatch) -> Result<UInt32Array, SqlError> {
    if rows.num_rows() <= 1 {
        return Ok(UInt32Array::from_iter_values(0..rows.num_rows() as u32));
    }
    let first = first_with_key(table, rows)?.into_iter().zip(0..);
    Ok(first.filter(|(first, row): &(u32, u32)| first == row).map(|(_, row)| row).collect())
}

/// For each row the position of the first one that has its key.
pub fn first_with_key(table: &Relation, rows: &RecordBatch) -> Result<Vec<u32>, SqlError> {
    let key: Vec<ArrayRef> = table.key.iter().map(|k| rows.column(*k as usize).clone()).collect();
    let codec = KeyCodec::new(key.iter().map(|c| c.data_type().clone())).map_err(arrow_error)?;
    let encoded = codec.rows(&key).map_err(arrow_error)?;
    let mut first = HashMap::with_capacity(rows.num_rows());
    Ok((0..rows.num_rows()).map(|i| *first.entry(encoded.row(i)).or_insert(i as u32)).collect())
}

pub fn take(rows: &RecordBatch, indices: &UInt32Array) -> Result<RecordBatch, SqlError> {
    take_rows(rows, indices).map_err(arrow_error)
}

pub fn filter(rows: &RecordBatch, mask: &BooleanArray) -> Result<RecordBatch, SqlError> {
    compute::filter_record_batch(rows, mask).map_err(arrow_error)
}

pub fn concat(schema: &SchemaRef, batches: &[RecordBatch]) -> Result<RecordBatch, SqlError> {
    let columns = (0..schema.fields().len())
        .map(|i| {
            let parts: Vec<&dyn Array> = batches.iter().map(|b| b.column(i).as_ref()).collect();
            if parts.is_empty() {
                Ok(arrow::array::new_empty_array(schema.field(i).data_type()))
            } else {
                compute::concat(&parts).map_err(arrow_error)
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    batch(schema, columns, batches.iter().map(RecordBatch::num_rows).sum())
}

/// A table over rows in memory.
pub fn mem_table(rows: RecordBatch) -> Result<Arc<dyn TableProvider>, SqlError> {
    let table =
        MemTable::try_new(rows.schema(), vec![vec![rows]]).map_err(sql_error_from_datafusion)?;
    Ok(Arc::new(table))
}

/// The catalog entry of such a table: the real one's columns under another name.
pub fn renamed(table: &Relation, name: &str) -> Relation {
    Relation { name: name.to_owned(), ..table.clone() }
}

/// What rows that a statement has in hand are called in the queries over them, beside the table's own name: `part` is
/// what they are of it. No table of a user has such a name, since no text of SQL can have the character 0, so that
/// queries within those read the tables.
pub fn in_hand(table: u32, part: &str) -> String {
    format!("{IN_HAND}{table} {part}")
}

/// The table whose rows in hand have this name.
pub fn table_in_hand(name: &str) -> Option<u32> {
    name.strip_prefix(IN_HAND)?.split(' ').next()?.parse().ok()
}

const IN_HAND: char = '\0';

/// The table under a name, with a column that numbers its rows (not hidden: the query must see it).
pub fn with_row_number(
    table: &Relation,
    name: &str,
    rows: &RecordBatch,
    numbers: UInt32Array,
) -> Result<(Relation, RecordBatch), SqlError> {
    let mut relation = renamed(table, name);
    relation.columns.push(CatalogColumn {
        name: ROW_NUMBER.to_owned(),
        sql_type: millrace_common::SqlType::BigInt.into(),
        nullable: false,
        default_sql: None,
        hidden: false,
        ..CatalogColumn::default()
    });
    let numbers: ArrayRef =
        Arc::new(numbers.iter().map(|n| n.map(i64::from)).collect::<arrow::array::Int64Array>());
    let mut columns = rows.columns().to_vec();
    columns.push(numbers);
    let schema = nullable(relation.arrow_schema()?.as_ref());
    let rows = batch(&schema, columns, rows.num_rows())?;
    Ok((relation, rows))
}

pub const ROW_NUMBER: &str = "_row_number";
