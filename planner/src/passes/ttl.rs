//! A TTL: rows of the inputs count for so long after they were processed, then they are retracted.
//!
//! The view is then its query over the rows that came within the TTL, and what its operators keep is bounded by
//! these. Rows expire behind the filters and projections of an input, so that no more of them is kept than is
//! needed. Only rows that are never retracted otherwise can expire: one that were would have to be found again.
//! What a lookup looks up stays as long as it is there.

use millrace_common::SqlError;

use crate::passes::Pass;
use crate::passes::properties::Properties;
use crate::stream::plan::{Op, Stream};

/// Puts an expiry behind every input.
pub struct ExpireInputs {
    /// How long rows count, in microseconds.
    pub ttl_us: i64,
}

impl Pass for ExpireInputs {
    fn name(&self) -> &'static str {
        "expire inputs"
    }

    fn run(&self, stream: Stream) -> Result<Stream, SqlError> {
        expire_inputs(stream, self.ttl_us)
    }
}

fn expire_inputs(stream: Stream, ttl_us: i64) -> Result<Stream, SqlError> {
    if is_input(&stream) {
        return expire(stream, ttl_us);
    }
    let Stream { op, inputs, schema } = stream;
    let looked_up = |port: usize| port == 1 && matches!(op, Op::Lookup(_));
    let inputs = inputs.into_iter().enumerate().map(|(port, input)| match looked_up(port) {
        true => Ok(input),
        false => expire_inputs(input, ttl_us),
    });
    let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
    Ok(Stream { op, inputs, schema })
}

/// A scan, filtered and projected.
fn is_input(stream: &Stream) -> bool {
    match (&stream.op, stream.inputs.as_slice()) {
        (Op::Scan(_), _) => true,
        (Op::Filter(_) | Op::Project(_), [input]) => is_input(input),
        _ => false,
    }
}

fn expire(stream: Stream, ttl_us: i64) -> Result<Stream, SqlError> {
    if !Properties::of(&stream).append_only {
        return Err(SqlError::unsupported("a ttl over an input whose rows change").with_hint(
            "Rows of sources, of APPEND ONLY tables and of views that only grow can expire.",
        ));
    }
    let width = stream.width();
    let all: Vec<usize> = (0..width).collect();
    Ok(stream.stamp(ttl_us).expire(width).select(&all))
}
