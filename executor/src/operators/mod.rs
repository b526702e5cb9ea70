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
pub(crate) mod tests;
pub mod topn;
pub mod unnest;
pub mod window;

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use millrace_common::{DeltaChunk, EnvHandle, Epoch, Vnode};
use millrace_graph::{Node, Operator as Op};
use tokio::sync::Notify;

use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::lookahead::operator::OperatorLookahead;
use crate::lookahead::random_hints::RandomHints;
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
    /// What it shares with the walkers.
    pub lookahead: Arc<OperatorLookahead>,
    pub governor: Arc<MemoryGovernor>,
    /// Tells the task that its caches are to let go.
    pub shed: Arc<Notify>,
    pub clock: EnvHandle,
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
pub fn build(node: &Node, input_schemas: &[SchemaRef], ctx: &OperatorContext<'_>) -> Built {
    let env = Env {
        options: Arc::clone(&ctx.options),
        errors: Arc::clone(&ctx.errors),
        metrics: Arc::clone(&ctx.metrics),
        lookahead: Arc::clone(&ctx.lookahead),
        governor: Arc::clone(&ctx.governor),
        shed: Arc::clone(&ctx.shed),
        clock: ctx.clock.clone(),
        vnodes: ctx.vnodes.clone(),
        event_time: ctx.event_time.clone(),
        restored: ctx.restored,
        first_arrival: ctx.first_arrival,
    };
    let delayed = ctx.options.delay_reads;
    let operator = build_with(node, input_schemas, env, &mut |local| {
        let writer = ctx.writer(local)?;
        Ok(if delayed { Box::new(Delayed::new(writer)) } else { Box::new(writer) })
    })?;
    if ctx.options.random_hints {
        return Ok(RandomHints::around(operator, node, &ctx.clock));
    }
    Ok(operator)
}

/// What an operator is built from.
pub struct BuildContext<'a> {
    node: &'a Node,
    inputs: &'a [SchemaRef],
    env: Env,
    tables: Tables<'a>,
}

/// What building an operator gives.
type Built = Result<Box<dyn Operator>, ExecError>;

/// Gives an operator its state tables, by local id.
type Tables<'a> = &'a mut dyn FnMut(usize) -> Result<Box<dyn StateTable>, ExecError>;

impl BuildContext<'_> {
    /// The schema of an input. Fails where the graph gives the node fewer inputs.
    fn input(&self, port: usize) -> Result<SchemaRef, ExecError> {
        let missing = || ExecError::internal("the graph gives a node too few inputs");
        self.inputs.get(port).cloned().ok_or_else(missing)
    }

    /// The schema of the output, whose columns may all be NULL.
    fn output(&self) -> SchemaRef {
        nullable(&self.node.schema)
    }
}

/// [`build`], with state tables of any kind.
#[deny(clippy::wildcard_enum_match_arm)]
pub fn build_with(node: &Node, input_schemas: &[SchemaRef], env: Env, tables: Tables<'_>) -> Built {
    let ctx = BuildContext { node, inputs: input_schemas, env, tables };
    match &node.op {
        Op::Filter(p) => linear::Filter::build(p, ctx),
        Op::Project(p) => linear::Project::build(p, ctx),
        Op::Union(p) => linear::Union::build(p, ctx),
        Op::Hop(p) => linear::Hop::build(p, ctx),
        Op::Stamp(p) => linear::Stamp::build(p, ctx),
        Op::Repeat(p) => linear::Repeat::build(p, ctx),
        Op::Expand(p) => linear::Expand::build(p, ctx),
        Op::Unnest(p) => unnest::build(p, ctx),
        Op::Aggregate(p) => aggregate::Aggregate::build(p, ctx),
        Op::Join(p) => join::build(p, ctx),
        Op::Lookup(p) => join::lookup::build(p, ctx),
        Op::TopN(p) => topn::TopNOperator::build(p, ctx),
        Op::Window(p) => window::WindowOperator::build(p, ctx),
        Op::Buffer(p) => event_time_buffer::EventTimeBuffer::build(p, ctx),
        Op::Subscribe(_)
        | Op::Source(_)
        | Op::Exchange(_)
        | Op::Values(_)
        | Op::Materialize(_)
        | Op::Blackhole(_)
        | Op::Sink(_) => Err(ExecError::internal("leaves and roots are built by the runtime")),
        Op::Scan(never) | Op::Common(never) => match *never {},
    }
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
