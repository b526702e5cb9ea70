//! The linear operators: filter, project, union, hop, repeat, expand. They keep no state and pass weights through.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, Int64Array, RecordBatch, TimestampMicrosecondArray, UInt32Array,
    new_null_array,
};
use arrow::compute::{cast, take};
use arrow::datatypes::{DataType, Field, Int64Type, SchemaRef};
use millrace_common::delta::take_rows;
use millrace_common::{DeltaChunk, EnvHandle};
use millrace_graph as graph;

use super::expr::SafeExpr;
use super::{BuildContext, Built, nullable};
use crate::error::ExecError;
use crate::operator::{Operator, Output};
use crate::state::arena::new_batch;

/// Keeps rows for which the predicate is true; a row on which it fails is dropped and counted.
pub struct Filter {
    pub predicate: SafeExpr,
}

impl Filter {
    /// Builds the operator of a node. Fails where the graph does not fit it.
    pub fn build(p: &graph::Filter, ctx: BuildContext<'_>) -> Built {
        let predicate = SafeExpr::new(Arc::clone(&p.predicate), "Filter", ctx.env.errors);
        Ok(Box::new(Filter { predicate }))
    }
}

impl Operator for Filter {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let mask = self.predicate.evaluate_mask(&chunk.batch)?;
        if mask.null_count() == 0 && mask.true_count() == mask.len() {
            out.push(chunk);
        } else if mask.true_count() > 0 {
            out.push(chunk.filter(&mask)?);
        }
        Ok(())
    }
}

/// Computes columns; plain column references cost nothing.
pub struct Project {
    exprs: Vec<SafeExpr>,
    schema: SchemaRef,
}

impl Project {
    /// Builds the operator of a node. Fails where the graph does not fit it.
    pub fn build(p: &graph::Project, ctx: BuildContext<'_>) -> Built {
        let safe = |e| SafeExpr::new(Arc::clone(e), "Project", Arc::clone(&ctx.env.errors));
        Ok(Box::new(Project::new(p.exprs.iter().map(safe).collect(), &ctx.node.schema)))
    }

    pub fn new(exprs: Vec<SafeExpr>, schema: &SchemaRef) -> Project {
        Project { exprs, schema: nullable(schema) }
    }
}

impl Operator for Project {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let columns = self
            .exprs
            .iter()
            .zip(self.schema.fields())
            .map(|(e, field)| conform(e.evaluate(&chunk.batch)?, field))
            .collect::<Result<Vec<_>, ExecError>>()?;
        out.push(chunk.with_columns(Arc::clone(&self.schema), columns)?);
        Ok(())
    }
}

/// The planner types every expression; only a difference in kind of string or the like is mended.
fn conform(array: ArrayRef, field: &Field) -> Result<ArrayRef, ExecError> {
    if array.data_type() == field.data_type() {
        Ok(array)
    } else {
        Ok(cast(&array, field.data_type())?)
    }
}

/// Bag union.
pub struct Union {
    pub schema: SchemaRef,
}

impl Union {
    /// Builds the operator of a node. Fails where the graph does not fit it.
    pub fn build(_: &graph::Union, ctx: BuildContext<'_>) -> Built {
        Ok(Box::new(Union { schema: ctx.output() }))
    }
}

impl Operator for Union {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let columns = chunk.batch.columns().to_vec();
        let schema = Arc::clone(&self.schema);
        out.push(chunk.with_columns(schema, columns)?);
        Ok(())
    }
}

/// Puts every row into the windows its time lies in.
pub struct Hop {
    pub time_column: usize,
    pub size_us: i64,
    pub slide_us: i64,
    pub offset_us: i64,
    pub schema: SchemaRef,
}

impl Operator for Hop {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let times = cast(chunk.batch.column(self.time_column), &self.time_type())?;
        let times = cast(&times, &DataType::Int64)?;
        let times = times.as_primitive::<Int64Type>();
        let (rows, starts) = self.windows(times);
        if rows.is_empty() {
            return Ok(());
        }
        let whole = rows.len() == chunk.num_rows()
            && rows.iter().enumerate().all(|(i, &r)| i == r as usize);
        let indices = UInt32Array::from(rows);
        let mut columns: Vec<ArrayRef> = if whole {
            chunk.batch.columns().to_vec()
        } else {
            let taken = chunk.batch.columns().iter().map(|c| take(c, &indices, None));
            taken.collect::<Result<_, _>>()?
        };
        let ends = Int64Array::from_iter_values(starts.iter().map(|s| s + self.size_us));
        let edge = self.schema.field(columns.len()).data_type();
        columns.push(cast(&Int64Array::from(starts), edge)?);
        columns.push(cast(&ends, edge)?);
        let weights = chunk.weights.as_ref().map(|w| {
            Int64Array::from_iter_values(indices.values().iter().map(|&r| w.value(r as usize)))
        });
        let rows = indices.len();
        let batch: RecordBatch = new_batch(&self.schema, columns, rows)?;
        out.push(DeltaChunk::new(batch, weights));
        Ok(())
    }
}

impl Hop {
    /// Fails for windows without a length.
    pub fn build(p: &graph::Hop, ctx: BuildContext<'_>) -> Built {
        let graph::Hop { time_column, size_us, slide_us, offset_us } = *p;
        if slide_us <= 0 || size_us <= 0 {
            return Err(ExecError::internal("a window without a length"));
        }
        let schema = ctx.output();
        Ok(Box::new(Hop { time_column, size_us, slide_us, offset_us, schema }))
    }

    /// The type of the windows' edges: microseconds.
    fn time_type(&self) -> DataType {
        self.schema.field(self.schema.fields().len() - 1).data_type().clone()
    }

    /// (row, window start), rows in order; a window contains its start, not its end.
    fn windows(&self, times: &Int64Array) -> (Vec<u32>, Vec<i64>) {
        let per_row = ((self.size_us + self.slide_us - 1) / self.slide_us).max(1);
        let mut rows = Vec::with_capacity(times.len() * per_row as usize);
        let mut starts = Vec::with_capacity(rows.capacity());
        for (row, time) in times.iter().enumerate() {
            let Some(time) = time else { continue };
            let shifted = time.wrapping_sub(self.offset_us);
            let last = time.wrapping_sub(shifted.rem_euclid(self.slide_us));
            for back in (0..per_row).rev() {
                let start = last.wrapping_sub(back * self.slide_us);
                if start.wrapping_add(self.size_us) > time {
                    rows.push(row as u32);
                    starts.push(start);
                }
            }
        }
        (rows, starts)
    }
}

/// Appends the processing time and a bit.
pub struct Stamp {
    pub add_us: i64,
    pub schema: SchemaRef,
    pub clock: EnvHandle,
}

impl Stamp {
    /// Builds the operator of a node. Fails where the graph does not fit it.
    pub fn build(p: &graph::Stamp, ctx: BuildContext<'_>) -> Built {
        let schema = ctx.output();
        Ok(Box::new(Stamp { add_us: p.add_us, schema, clock: ctx.env.clock }))
    }
}

impl Operator for Stamp {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let now = i64::try_from(self.clock.now_micros()).unwrap_or(i64::MAX);
        let stamp = vec![now.saturating_add(self.add_us); chunk.num_rows()];
        let mut columns = chunk.batch.columns().to_vec();
        columns.push(Arc::new(TimestampMicrosecondArray::from(stamp)));
        out.push(chunk.with_columns(Arc::clone(&self.schema), columns)?);
        Ok(())
    }
}

/// Multiplies the weight of a row by a column of it.
pub struct Repeat {
    pub times_column: usize,
}

impl Repeat {
    /// Builds the operator of a node. Fails where the graph does not fit it.
    pub fn build(p: &graph::Repeat, _: BuildContext<'_>) -> Built {
        Ok(Box::new(Repeat { times_column: p.times_column }))
    }
}

impl Operator for Repeat {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let times = cast(chunk.batch.column(self.times_column), &DataType::Int64)?;
        let times = times.as_primitive::<Int64Type>();
        let (mut rows, mut weights) = (Vec::new(), Vec::new());
        for (row, n) in times.iter().enumerate() {
            let Some(n) = n.filter(|n| *n > 0) else { continue };
            let weight = chunk.weight(row).checked_mul(n);
            weights.push(weight.ok_or_else(|| ExecError::internal("a row has too many copies"))?);
            rows.push(row as u32);
        }
        let batch = if rows.len() == chunk.num_rows() {
            chunk.batch
        } else {
            take_rows(&chunk.batch, &UInt32Array::from(rows))?
        };
        out.push(DeltaChunk::new(batch, Some(weights.into())));
        Ok(())
    }
}

/// Puts out every row once for each grouping set.
pub struct Expand {
    pub expand: graph::Expand,
    pub schema: SchemaRef,
}

impl Expand {
    /// Builds the operator of a node. Fails where the graph does not fit it.
    pub fn build(p: &graph::Expand, ctx: BuildContext<'_>) -> Built {
        Ok(Box::new(Expand { expand: p.clone(), schema: ctx.output() }))
    }
}

impl Operator for Expand {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let rows = chunk.num_rows();
        for set in &self.expand.sets {
            let mut columns = chunk.batch.columns().to_vec();
            for (&c, keep) in self.expand.columns.iter().zip(&set.keep) {
                let column = chunk.batch.column(c);
                columns.push(if *keep {
                    Arc::clone(column)
                } else {
                    new_null_array(column.data_type(), rows)
                });
            }
            columns.push(Arc::new(Int64Array::from_value(set.id, rows)));
            let batch = new_batch(&self.schema, columns, rows)?;
            out.push(DeltaChunk::new(batch, chunk.weights.clone()));
        }
        Ok(())
    }
}
