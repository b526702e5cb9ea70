//! The operators of the job graph; see [`build`].
//!
//! [`linear`] ones keep no state. [`aggregate`], [`join`], [`topn`] and [`window`] say what the entry of a
//! key holds, and how it is read and written; [`crate::state::KeyedState`] does the rest. All emit whole
//! chunks and all of their results are independent of the order in which rows of different keys, or reads,
//! complete.

pub mod aggregate;
pub mod event_time_buffer;
pub mod expr;
pub mod join;
pub mod linear;
mod ordered;
#[cfg(test)]
mod tests;
pub mod topn;
pub mod unnest;
pub mod window;

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use millrace_common::{DeltaChunk, Epoch, Vnode};
use millrace_graph::{Node, Operator as Op};

use self::event_time_buffer::{EventTimeBuffer, Mode};
use self::expr::SafeExpr;
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::memory::MemoryGovernor;
use crate::operator::{Operator, OperatorContext, Output};
use crate::options::ExecOptions;
use crate::state::{Delayed, StateTable};
use crate::stats::OperatorMetrics;

/// What every operator with state shares.
#[derive(Clone)]
pub struct Env {
    pub options: Arc<ExecOptions>,
    pub errors: Arc<ErrorSink>,
    pub metrics: Arc<OperatorMetrics>,
    pub governor: Arc<MemoryGovernor>,
    /// Vnodes the task owns.
    pub vnodes: Range<Vnode>,
    /// By input port: the column that tells the event time of its rows.
    pub event_time: Vec<Option<usize>>,
    /// The last epoch that the job's state has all of.
    pub restored: Epoch,
    /// Number of the next row of append-only state: see [`crate::sequence`].
    pub first_arrival: u64,
}

/// Builds the instance of a node that one task drives. Leaves and roots are the runtime's.
pub fn build(
    node: &Node,
    input_schemas: &[SchemaRef],
    ctx: &OperatorContext<'_>,
) -> Result<Box<dyn Operator>, ExecError> {
    let env = Env {
        options: Arc::clone(&ctx.options),
        errors: Arc::clone(&ctx.errors),
        metrics: Arc::clone(&ctx.metrics),
        governor: Arc::clone(&ctx.governor),
        vnodes: ctx.vnodes.clone(),
        event_time: ctx.event_time.clone(),
        restored: ctx.restored,
        first_arrival: ctx.first_arrival,
    };
    let delayed = ctx.options.delay_reads;
    build_with(node, input_schemas, env, &mut |local| {
        let writer = ctx.writer(local)?;
        Ok(if delayed { Box::new(Delayed::new(writer)) } else { Box::new(writer) })
    })
}

/// [`build`], with state tables of any kind.
#[deny(clippy::wildcard_enum_match_arm)]
pub fn build_with(
    node: &Node,
    input_schemas: &[SchemaRef],
    env: Env,
    tables: &mut dyn FnMut(usize) -> Result<Box<dyn StateTable>, ExecError>,
) -> Result<Box<dyn Operator>, ExecError> {
    let input = |port: usize| {
        let missing = || ExecError::internal("the graph gives a node too few inputs");
        input_schemas.get(port).ok_or_else(missing)
    };
    Ok(match &node.op {
        Op::Filter { predicate } => {
            let predicate = SafeExpr::new(Arc::clone(predicate), "Filter", env.errors);
            Box::new(linear::Filter { predicate })
        }
        Op::Project { exprs } => {
            let safe = |e| SafeExpr::new(Arc::clone(e), "Project", Arc::clone(&env.errors));
            Box::new(linear::Project::new(exprs.iter().map(safe).collect(), &node.schema))
        }
        Op::Union => Box::new(linear::Union { schema: nullable(&node.schema) }),
        Op::Hop { time_column, size_us, slide_us, offset_us } => {
            if *slide_us <= 0 || *size_us <= 0 {
                return Err(ExecError::internal("a window without a length"));
            }
            Box::new(linear::Hop {
                time_column: *time_column,
                size_us: *size_us,
                slide_us: *slide_us,
                offset_us: *offset_us,
                schema: nullable(&node.schema),
            })
        }
        Op::Stamp { add_us } => {
            Box::new(linear::Stamp { add_us: *add_us, schema: nullable(&node.schema) })
        }
        Op::Repeat { times_column } => Box::new(linear::Repeat { times_column: *times_column }),
        Op::Unnest { lists, keep_empty } => Box::new(unnest::Unnest {
            lists: lists.clone(),
            keep_empty: *keep_empty,
            schema: nullable(&node.schema),
        }),
        Op::Expand(e) => {
            Box::new(linear::Expand { expand: e.clone(), schema: nullable(&node.schema) })
        }
        Op::Aggregate(a) => Box::new(aggregate::Aggregate::new(node, a, input(0)?, env, tables)?),
        Op::Join(j) => {
            let (left, right) = (input(0)?, input(1)?);
            let made =
                join::HashJoin::new(&node.schema, node.append_only, j, left, right, env, tables)?;
            Box::new(made)
        }
        Op::Lookup(l) => join::lookup::build(node, l, input(0)?, input(1)?, env, tables)?,
        Op::TopN(t) => Box::new(topn::TopNOperator::new(node, t, input(0)?, env, tables)?),
        Op::Window(w) => Box::new(window::WindowOperator::new(node, w, input(0)?, env, tables)?),
        Op::WindowClose(h) => buffered(Mode::WindowClose, h, input(0)?, env, tables)?,
        Op::TemporalUpperBound(h) => buffered(Mode::UpperBound, h, input(0)?, env, tables)?,
        Op::TemporalLowerBound(h) => buffered(Mode::LowerBound, h, input(0)?, env, tables)?,
        Op::Subscribe { .. }
        | Op::Source { .. }
        | Op::Exchange { .. }
        | Op::Values { .. }
        | Op::Materialize
        | Op::Blackhole
        | Op::Sink => {
            return Err(ExecError::internal("leaves and roots are built by the runtime"));
        }
    })
}

/// What holds rows until the event time is there.
fn buffered(
    mode: Mode,
    hold: &millrace_graph::EventTimeBuffer,
    input: &SchemaRef,
    env: Env,
    tables: &mut dyn FnMut(usize) -> Result<Box<dyn StateTable>, ExecError>,
) -> Result<Box<dyn Operator>, ExecError> {
    let table = tables(hold.table)?;
    Ok(Box::new(EventTimeBuffer::new(mode, hold, input, env, table)?))
}

/// A failed expression is NULL whatever the plan derived about its column.
pub(crate) fn nullable(schema: &Schema) -> SchemaRef {
    let fields: Vec<Field> =
        schema.fields().iter().map(|f| f.as_ref().clone().with_nullable(true)).collect();
    Arc::new(Schema::new(fields))
}

/// A timestamp column as microseconds.
pub(crate) fn times_of(column: &ArrayRef) -> Result<Int64Array, ExecError> {
    let cast = arrow::compute::cast(column, &DataType::Int64)?;
    Ok(cast.as_primitive::<Int64Type>().clone())
}

/// Emits a chunk in pieces of at most `rows`.
pub(crate) fn emit_sliced(chunk: DeltaChunk, rows: usize, out: &mut Output) {
    if chunk.num_rows() <= rows {
        out.push(chunk);
        return;
    }
    let mut at = 0;
    while at < chunk.num_rows() {
        let len = rows.min(chunk.num_rows() - at);
        out.push(chunk.slice(at, len));
        at += len;
    }
}
