//! Rows as a table's connector reads them, made into the table's.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, Int64Array, RecordBatch, RecordBatchOptions,
    TimestampMicrosecondArray,
};
use arrow::compute::{self, filter_record_batch};
use arrow::datatypes::DataType;
use millrace_common::{DeltaChunk, SqlError, SqlState, SqlType};
use millrace_functions::round::round_seconds;
use millrace_rpc::catalog::Relation;

use crate::dml::Sequencer;
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::input::generated::{PROCTIME, expressions};
use crate::operators::expr::SafeExpr;

/// How a column of the table is made.
enum Make {
    /// Position in what is read.
    Read(usize),
    /// Position among the expressions.
    Compute(usize),
    /// The time of arrival: `PROCTIME()`.
    Now,
    RowId,
}

/// What a table's rows are made of.
pub struct FeedRows {
    relation: Relation,
    sequencer: Arc<Sequencer>,
    /// Where rows and expressions that fail are reported.
    errors: Arc<ErrorSink>,
    /// Columns to read, and what to make of them.
    read: Vec<usize>,
    make: Vec<Make>,
    /// Expressions, and the columns (among those read) they are over.
    exprs: Vec<SafeExpr>,
    over: Vec<usize>,
}

impl FeedRows {
    /// Fails if the relation's generated columns are not what its graph computes.
    pub fn new(
        relation: &Relation,
        sequencer: Arc<Sequencer>,
        errors: Arc<ErrorSink>,
    ) -> Result<FeedRows, ExecError> {
        let (exprs, sources) = expressions(relation)?;
        let safe = |e| SafeExpr::new(e, "generated column", Arc::clone(&errors));
        let exprs: Vec<SafeExpr> = exprs.into_iter().map(safe).collect();
        let (mut read, mut make, mut computed) = (Vec::new(), Vec::new(), 0);
        for (i, column) in relation.columns.iter().enumerate() {
            make.push(if column.generated_sql.as_deref() == Some(PROCTIME) {
                Make::Now
            } else if column.generated_sql.is_some() {
                computed += 1;
                Make::Compute(computed - 1)
            } else if column.hidden {
                Make::RowId
            } else {
                read.push(i);
                Make::Read(read.len() - 1)
            });
        }
        if computed != exprs.len() {
            return Err(ExecError::internal("a table's generated columns do not fit its graph"));
        }
        let over = sources
            .into_iter()
            .map(|c| read.iter().position(|r| *r == c))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| ExecError::internal("a generated column over a generated column"))?;
        let relation = relation.clone();
        Ok(FeedRows { relation, sequencer, errors, read, make, exprs, over })
    }

    /// The columns that are read.
    pub fn read(&self) -> &[usize] {
        &self.read
    }

    /// Rows of all of the table's columns; rows that violate NOT NULL are reported and left out. `row_ids`: gives the
    /// first of so many hidden row ids.
    pub fn complete(
        &self,
        batch: RecordBatch,
        weights: Option<Int64Array>,
        row_ids: impl Fn(u64) -> i64,
    ) -> Result<DeltaChunk, ExecError> {
        let rows = batch.num_rows();
        let read =
            self.read.iter().zip(batch.columns()).map(|(at, array)| self.rounded(*at, array));
        let read = read.collect::<Result<Vec<ArrayRef>, ExecError>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let batch = RecordBatch::try_new_with_options(batch.schema(), read, &options)?;
        let computed = self.compute(&batch)?;
        let columns = self.make.iter().enumerate().map(|(column, make)| match make {
            Make::Read(at) => Ok(Arc::clone(batch.column(*at))),
            Make::Compute(at) => self.rounded(column, &computed[*at]),
            Make::Now => Ok(times_of_arrival(self.sequencer.time_of_arrival(), rows)),
            Make::RowId => {
                let first = row_ids(rows as u64);
                Ok(Arc::new(Int64Array::from_iter_values(first..first + rows as i64)) as ArrayRef)
            }
        });
        let columns = columns.collect::<Result<Vec<ArrayRef>, ExecError>>()?;
        let good = self.valid(&columns, weights.as_ref());
        // Deletions bring no more than their key.
        let schema = self.sequencer.schema();
        let nullable: Vec<_> =
            schema.fields().iter().map(|f| f.as_ref().clone().with_nullable(true)).collect();
        let schema = Arc::new(arrow::datatypes::Schema::new(nullable));
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let full = RecordBatch::try_new_with_options(schema, columns, &options)?;
        let Some(good) = good else { return Ok(DeltaChunk::new(full, weights)) };
        let weights = match weights {
            None => None,
            Some(w) => Some(compute::filter(&w, &good)?.as_primitive().clone()),
        };
        Ok(DeltaChunk::new(filter_record_batch(&full, &good)?, weights))
    }

    /// Times with as many digits of their seconds as their column has.
    fn rounded(&self, column: usize, array: &ArrayRef) -> Result<ArrayRef, ExecError> {
        let digits = self.relation.columns.get(column).and_then(|c| c.sql_type.second_digits());
        match digits {
            Some(digits) => Ok(round_seconds(array, digits)?),
            None => Ok(Arc::clone(array)),
        }
    }

    fn compute(&self, batch: &RecordBatch) -> Result<Vec<ArrayRef>, ExecError> {
        if self.exprs.is_empty() {
            return Ok(Vec::new());
        }
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        let columns = self.over.iter().map(|&c| Arc::clone(batch.column(c))).collect();
        let schema = Arc::new(batch.schema().project(&self.over)?);
        let input = RecordBatch::try_new_with_options(schema, columns, &options)?;
        self.exprs.iter().map(|e| e.evaluate(&input)).collect()
    }

    /// Rows whose NOT NULL columns have values; `None`: all.
    fn valid(&self, columns: &[ArrayRef], weights: Option<&Int64Array>) -> Option<BooleanArray> {
        let rows = columns.first().map_or(0, |c| c.len());
        let mut good: Option<Vec<bool>> = None;
        for (i, (column, array)) in self.relation.columns.iter().zip(columns).enumerate() {
            if column.nullable || array.null_count() == 0 {
                continue;
            }
            let key = self.relation.key.contains(&(i as u32));
            let deletes = |row: usize| weights.is_some_and(|w| w.value(row) < 0);
            let bad = (0..rows).filter(|&r| array.is_null(r) && (key || !deletes(r)));
            let mut count = 0;
            for row in bad {
                good.get_or_insert_with(|| vec![true; rows])[row] = false;
                count += 1;
            }
            if count > 0 {
                let message = format!(
                    "null value in column \"{}\" of relation \"{}\" violates not-null constraint",
                    column.name, self.relation.name
                );
                let error = SqlError::new(SqlState::NOT_NULL_VIOLATION, message);
                self.errors.report("connector", &error, count);
            }
        }
        good.map(BooleanArray::from)
    }
}

/// The time at which rows arrive, so many times.
pub(in crate::worker) fn times_of_arrival(time: i64, rows: usize) -> ArrayRef {
    let array = TimestampMicrosecondArray::from(vec![time; rows]);
    match SqlType::Timestamptz.to_arrow() {
        DataType::Timestamp(_, Some(zone)) => Arc::new(array.with_timezone(zone)),
        _ => Arc::new(array),
    }
}
