//! `CREATE SINK … INTO table`: a sink's changes as statements on a table of this system.
//!
//! Each published change is one statement of the table's sequencer. The table commits the sink's sequence
//! with its rows, as one of its counters, so a change that is published again after a crash is told from
//! one that is new.

use std::sync::{Arc, Weak};

use arrow::array::{Array, ArrayRef, Int64Array, RecordBatch};
use bytes::BytesMut;
use millrace_common::delta::take_rows;
use millrace_common::encoding::Column;
use millrace_common::{DeltaChunk, RelationId, SqlError, SqlState};
use millrace_rpc::catalog::Relation;
use millrace_rpc::version::StatementId;

use super::Shared;
use super::feed::times_of_arrival;
use crate::dml::{DmlError, DmlKind, DmlStatement, EntryFlag, SinkMark};
use crate::error::ExecError;

/// Times a change is tried again because the table's job ended under it.
const ATTEMPTS: usize = 3;

/// The table that a sink feeds.
pub struct TableTarget {
    /// Weak: the job must not keep the worker alive.
    shared: Weak<Shared>,
    table: RelationId,
    /// The sink's counter in the table.
    mark: String,
    sink: u32,
    append_only: bool,
}

impl TableTarget {
    pub(super) fn new(shared: Weak<Shared>, table: u32, sink: &Relation) -> TableTarget {
        TableTarget {
            shared,
            table: RelationId(table),
            mark: sink_counter(sink),
            sink: sink.id,
            append_only: sink.option("type") == Some("append-only"),
        }
    }

    /// Applies a change, unless the table has it already.
    pub async fn publish(&self, sequence: u64, chunks: Vec<DeltaChunk>) -> Result<(), ExecError> {
        let Some(shared) = self.shared.upgrade() else { return Err(ExecError::Stopped) };
        let mut attempt = 0;
        loop {
            attempt += 1;
            let table = shared.table(self.table).await?;
            let rows: Vec<DeltaChunk> =
                chunks.iter().map(|c| self.rows(c, table.as_ref())).collect::<Result<_, _>>()?;
            let delta = DeltaChunk::concat(table.schema(), &rows)?;
            let statement = DmlStatement {
                id: StatementId { frontend: u64::from(self.sink) << 32, number: sequence },
                delta,
                kind: DmlKind::Replicate,
                mark: Some(SinkMark { counter: self.mark.clone(), sequence }),
                entered: EntryFlag::default(),
                announced: None,
            };
            match table.apply(statement).await {
                Ok(_) => return Ok(()),
                Err(DmlError::Conflict) if attempt < ATTEMPTS => {}
                Err(e) => return Err(ExecError::Sql(e.into())),
            }
        }
    }

    /// The sink's rows as the table's.
    fn rows(
        &self,
        chunk: &DeltaChunk,
        table: &crate::dml::Sequencer,
    ) -> Result<DeltaChunk, ExecError> {
        let schema = table.schema();
        // A table that the sink may not delete from only ever grows.
        let chunk = match (&chunk.weights, self.append_only) {
            (Some(weights), true) => {
                let kept = weights.values().iter().map(|w| Some(*w > 0)).collect();
                chunk.filter(&kept)?
            }
            _ => chunk.clone(),
        };
        let chunk = if self.append_only { expand(chunk)? } else { chunk };
        let rows = chunk.num_rows();
        let row_ids = table.hidden_row_id().map(|at| {
            let first = table.allocate_row_ids(rows as u64);
            (at, Arc::new(Int64Array::from_iter_values(first..first + rows as i64)) as ArrayRef)
        });
        // The sink's query has the table's columns in order, but for a hidden row id, and its times of arrival are
        // those at which a row arrives here.
        let mut columns: Vec<ArrayRef> = chunk.batch.columns().to_vec();
        let hidden = row_ids.as_ref().map(|(at, _)| *at);
        if let Some((at, ids)) = row_ids {
            columns.insert(at.min(columns.len()), ids);
        }
        for at in table.times_of_arrival() {
            if let Some(column) = columns.get_mut(*at) {
                *column = times_of_arrival(table.time_of_arrival(), rows);
            }
        }
        check_not_null(table, &columns, hidden)?;
        Ok(DeltaChunk::new(RecordBatch::try_new(schema.clone(), columns)?, chunk.weights))
    }
}

/// 23502 with the failing row, as an INSERT would say it. The change is not applied: left out, the row would
/// be missing without a word.
fn check_not_null(
    table: &crate::dml::Sequencer,
    columns: &[ArrayRef],
    hidden: Option<usize>,
) -> Result<(), SqlError> {
    for (field, column) in table.schema().fields().iter().zip(columns) {
        if field.is_nullable() || column.null_count() == 0 {
            continue;
        }
        let row = (0..column.len()).find(|r| column.is_null(*r)).unwrap_or(0);
        let shown = columns.iter().enumerate().filter(|(i, _)| Some(*i) != hidden);
        let values: Vec<String> =
            shown.map(|(_, c)| show(c, row)).collect::<Result<_, SqlError>>()?;
        let object = table.error_object(field.name());
        return Err(SqlError::new(
            SqlState::NOT_NULL_VIOLATION,
            format!(
                "null value in column \"{}\" of relation \"{}\" violates not-null constraint",
                field.name(),
                object.table
            ),
        )
        .with_object(object)
        .with_detail(format!("Failing row contains ({}).", values.join(", ")))
        .with_hint("Drop the sink, and create it with a query that leaves NULLs out."));
    }
    Ok(())
}

fn show(column: &ArrayRef, row: usize) -> Result<String, SqlError> {
    let value = Column::new(&column.slice(row, 1))?;
    if value.is_null(0) {
        return Ok("null".to_owned());
    }
    let mut text = BytesMut::new();
    value.put_text(0, &mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A row of weight n as n rows.
fn expand(chunk: DeltaChunk) -> Result<DeltaChunk, ExecError> {
    let Some(weights) = &chunk.weights else { return Ok(chunk) };
    if weights.values().iter().all(|w| *w == 1) {
        return Ok(DeltaChunk::inserts(chunk.batch));
    }
    let rows = weights.values().iter().enumerate();
    let rows: Vec<u32> =
        rows.flat_map(|(i, &w)| std::iter::repeat_n(i as u32, w.max(0) as usize)).collect();
    let rows = arrow::array::UInt32Array::from(rows);
    Ok(DeltaChunk::inserts(take_rows(&chunk.batch, &rows)?))
}

/// The name under which a table counts what a sink has brought. Ids of relations are never reused.
fn sink_counter(sink: &Relation) -> String {
    format!("{}{}", crate::dml::sequencer::SINK_COUNTER, sink.id)
}
