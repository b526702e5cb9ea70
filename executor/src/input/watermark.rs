//! Watermarks where rows enter (docs/design.md §4, "Watermarks").
//!
//! A split's running watermark is the largest value of the watermark expression over its rows so far
//! that were not late, exact for every row, however the rows are chunked. A row whose time is below its split's running
//! watermark before it is late: it never enters, and is counted.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{Array, AsArray, BooleanArray, Int64Array, RecordBatch};
use arrow::buffer::BooleanBuffer;
use arrow::datatypes::{DataType, Int64Type, Schema, SchemaRef};
use millrace_common::SqlError;
use millrace_functions::expr::ExprRef;
use millrace_graph::codec::decode_watermark;
use millrace_rpc::catalog::Relation;
use millrace_rpc::log::SplitMarkAt;

use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::input::generated::Generated;
use crate::operators::expr::SafeExpr;

/// A relation's watermark expression over some of its columns.
#[derive(Clone, Debug)]
pub struct WatermarkExpr {
    expr: ExprRef,
    /// The time column's position in the batches it is applied to.
    time: usize,
}

impl WatermarkExpr {
    /// Over all of the relation's columns; `None`: it has no watermark.
    pub fn of(relation: &Relation) -> Result<Option<WatermarkExpr>, ExecError> {
        let Some(w) = &relation.watermark else { return Ok(None) };
        let schema = relation.arrow_schema()?;
        let time = w.column as usize;
        let typed = schema.fields().get(time).map(|f| f.data_type().clone());
        if !matches!(typed, Some(DataType::Timestamp(..))) {
            return Err(ExecError::internal("a watermark of a column that is no timestamp"));
        }
        let expr = decode_watermark(&w.expr, &schema).map_err(SqlError::from)?;
        Ok(Some(WatermarkExpr { expr, time }))
    }

    /// What it reads, in the relation it is of: the expression's columns, and the time.
    fn columns(&self) -> Vec<usize> {
        let mut columns = millrace_functions::expr::columns_of(&self.expr);
        columns.push(self.time);
        columns
    }

    /// Whether a relation has a watermark that reads generated columns of it.
    pub fn reads_generated(relation: &Relation) -> Result<bool, ExecError> {
        let Some(whole) = WatermarkExpr::of(relation)? else { return Ok(false) };
        let generated =
            |c: &usize| relation.columns.get(*c).is_some_and(|c| c.generated_sql.is_some());
        Ok(whole.columns().iter().any(generated))
    }

    /// Lets rows pass that are not late and moves the running watermark on. Gives the rows that stay
    /// (`None`: all) and how many do not.
    pub fn advance(
        &self,
        batch: &RecordBatch,
        running: &mut Option<i64>,
    ) -> Result<(Option<BooleanArray>, u64), ExecError> {
        self.advance_by(batch, running, |_| true)
    }

    /// The same where not every row that is in time enters: it is asked of each, in their order, and the others move
    /// nothing. They stay for whoever leaves them out.
    pub fn advance_by(
        &self,
        batch: &RecordBatch,
        running: &mut Option<i64>,
        mut enters: impl FnMut(usize) -> bool,
    ) -> Result<(Option<BooleanArray>, u64), ExecError> {
        let rows = batch.num_rows();
        // Where the expression fails it is NULL, as everywhere in a job: such rows move nothing. Other rows of the
        // batch do, or the watermark would depend on how rows are chunked.
        let moved = match self.expr.evaluate(batch).and_then(|v| v.into_array(rows)) {
            Ok(array) => micros(&array)?,
            Err(_) => {
                let unheard = Arc::new(ErrorSink::default());
                let expr = SafeExpr::new(Arc::clone(&self.expr), "watermark", unheard);
                micros(&expr.evaluate(batch)?)?
            }
        };
        let times = micros(batch.column(self.time))?;
        let mut late = 0;
        let mut stays = |i: usize| {
            let is_late = times.is_valid(i) && running.is_some_and(|w| times.value(i) < w);
            if !is_late && enters(i) && moved.is_valid(i) {
                *running = (*running).max(Some(moved.value(i)));
            }
            late += u64::from(is_late);
            !is_late
        };
        let mask = BooleanBuffer::collect_bool(rows, &mut stays);
        Ok(((late > 0).then(|| BooleanArray::new(mask, None)), late))
    }
}

fn micros(array: &dyn Array) -> Result<Int64Array, ExecError> {
    let cast = arrow::compute::cast(array, &DataType::Int64)?;
    Ok(cast.as_primitive::<Int64Type>().clone())
}

/// What a reader of a source needs for its watermark.
#[derive(Clone, Debug)]
pub struct SourceWatermark {
    pub expr: WatermarkExpr,
    /// Position in the relation.
    pub column: usize,
    /// Columns to read: those asked for, then what the expression needs besides; in place of those that the source
    /// generates, what they are made of.
    pub columns: Vec<usize>,
    /// How many were asked for: the first columns of a whole batch.
    pub width: usize,
    generated: Option<Generated>,
}

impl SourceWatermark {
    pub fn of(relation: &Relation, asked: &[usize]) -> Result<Option<SourceWatermark>, ExecError> {
        let Some(whole) = WatermarkExpr::of(relation)? else { return Ok(None) };
        let mut columns = asked.to_vec();
        for c in whole.columns() {
            if !columns.contains(&c) {
                columns.push(c);
            }
        }
        let schema: SchemaRef = relation.arrow_schema()?;
        let read: Schema = schema.project(&columns)?;
        let map: Vec<Option<usize>> = (0..schema.fields().len())
            .map(|c| columns.iter().position(|have| *have == c))
            .collect();
        let expr = millrace_functions::expr::remap(&whole.expr, &map, &read)
            .map_err(|e| ExecError::internal(format!("a watermark expression: {e}")))?;
        let time = map[whole.time].unwrap_or(0);
        let expr = WatermarkExpr { expr, time };
        let (column, width) = (whole.time, asked.len());
        let (generated, columns) = match Generated::of(relation, &columns)? {
            Some((generated, read)) => (Some(generated), read),
            None => (None, columns),
        };
        Ok(Some(SourceWatermark { expr, column, columns, width, generated }))
    }

    /// Of rows as the connector reads them, what was asked for.
    pub fn asked(
        &self,
        read: RecordBatch,
        errors: &Arc<ErrorSink>,
    ) -> Result<RecordBatch, ExecError> {
        let asked: Vec<usize> = (0..self.width).collect();
        Ok(self.complete(read, Some(errors))?.project(&asked)?)
    }

    /// Rows as the connector reads them, with what is generated: what the expression is applied to.
    pub fn complete(
        &self,
        read: RecordBatch,
        errors: Option<&Arc<ErrorSink>>,
    ) -> Result<RecordBatch, ExecError> {
        match &self.generated {
            Some(generated) => generated.complete(&read, errors),
            None => Ok(read),
        }
    }
}

/// A split's running watermark and count of late rows, as they are committed.
#[derive(Clone, Debug, Default)]
pub struct SplitWatermark {
    pub running: Option<i64>,
    /// Since the job was made.
    pub late: u64,
    /// From an offset on rows are not older than this: the split was idle before.
    floors: Vec<(u64, i64)>,
}

impl SplitWatermark {
    fn names(input: u32, split: u32) -> (String, String) {
        (format!("watermark.{input}.{split}"), format!("{LATE}{input}.{split}"))
    }

    pub fn load(counters: &BTreeMap<String, u64>, input: u32, split: u32) -> SplitWatermark {
        let (running, late) = SplitWatermark::names(input, split);
        SplitWatermark {
            running: counters.get(&running).map(|v| *v as i64),
            late: counters.get(&late).copied().unwrap_or(0),
            floors: Vec::new(),
        }
    }

    pub fn store(&self, input: u32, split: u32, out: &mut BTreeMap<String, u64>) {
        let (running, late) = SplitWatermark::names(input, split);
        if let Some(value) = self.running {
            out.insert(running, value as u64);
        }
        if self.late > 0 {
            out.insert(late, self.late);
        }
    }

    /// What the log says of the split.
    pub fn set_floors(&mut self, split: u32, marks: &[SplitMarkAt]) {
        let own = marks.iter().filter(|m| m.mark.split == split);
        self.floors = own.filter_map(|m| Some((m.offset, m.mark.floor?))).collect();
    }

    /// Before rows at `offset` are read: raises the watermark to the floors that hold there, and gives
    /// the offset before which no further floor begins.
    pub fn raise(&mut self, offset: u64) -> u64 {
        let holds = self.floors.iter().filter(|(from, _)| *from <= offset);
        self.running = self.running.max(holds.map(|(_, floor)| *floor).max());
        self.next_floor(offset)
    }

    /// Behind rows at `offset`, the offset before which no further floor begins.
    pub fn next_floor(&self, offset: u64) -> u64 {
        let further = self.floors.iter().map(|(from, _)| *from).filter(|from| *from > offset);
        further.min().unwrap_or(u64::MAX)
    }
}

/// Counters of late rows begin with this.
pub use millrace_rpc::version::LATE;

/// Whether a split is idle, by the newest of these marks.
pub fn is_idle(split: u32, marks: &[SplitMarkAt]) -> bool {
    marks.iter().rev().find(|m| m.mark.split == split).is_some_and(|m| m.mark.idle)
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, TimestampMicrosecondArray};
    use arrow::datatypes::{Field, TimeUnit};
    use datafusion::logical_expr::Operator;
    use datafusion::physical_expr::expressions::{BinaryExpr, CastExpr, Column};

    use super::*;

    #[test]
    fn only_floors_that_rows_have_come_to_raise_a_watermark() {
        let floors = vec![(20, 7), (10, 5)];
        let mut split = SplitWatermark { floors, ..SplitWatermark::default() };
        assert_eq!([0, 9, 10, 19].map(|offset| split.next_floor(offset)), [10, 10, 20, 20]);
        assert_eq!((split.raise(9), split.running), (10, None));
        assert_eq!((split.raise(10), split.running), (20, Some(5)));
        assert_eq!((split.next_floor(20), split.running), (u64::MAX, Some(5)));
        assert_eq!((split.raise(20), split.running), (u64::MAX, Some(7)));
    }

    #[test]
    fn a_row_whose_expression_fails_leaves_the_others_alone() {
        let timestamp = DataType::Timestamp(TimeUnit::Microsecond, None);
        // 100 / by, as a time.
        let hundred = millrace_functions::expr::literal(100i64.into());
        let by: ExprRef = Arc::new(Column::new("by", 1));
        let divided = Arc::new(BinaryExpr::new(hundred, Operator::Divide, by));
        let expr: ExprRef = Arc::new(CastExpr::new(divided, timestamp.clone(), None));
        let watermark = WatermarkExpr { expr, time: 0 };
        let schema = Arc::new(Schema::new(vec![
            Field::new("at", timestamp, true),
            Field::new("by", DataType::Int64, true),
        ]));
        let at: ArrayRef = Arc::new(TimestampMicrosecondArray::from(vec![60, 70, 10, 80]));
        let by: ArrayRef = Arc::new(Int64Array::from(vec![4, 0, 2, 0]));
        let batch = RecordBatch::try_new(schema, vec![at, by]).unwrap();
        let mut whole = None;
        let (stays, late) = watermark.advance(&batch, &mut whole).unwrap();
        // 25 after the first row: the third is late, and does not move it.
        assert_eq!((whole, late), (Some(25), 1));
        assert_eq!(stays, Some(BooleanArray::from(vec![true, true, false, true])));
        let (mut rows, mut late) = (None, 0);
        for i in 0..4 {
            late += watermark.advance(&batch.slice(i, 1), &mut rows).unwrap().1;
        }
        assert_eq!((rows, late), (Some(25), 1));
        // Without the first row nothing moves, and no row is late.
        let mut others = None;
        let (stays, late) = watermark.advance_by(&batch, &mut others, |row| row == 1).unwrap();
        assert_eq!((others, late, stays), (None, 0, None));
    }
}
