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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use datafusion::logical_expr::Operator;
    use millrace_common::SqlState;
    use millrace_graph::{BufferMode, JoinKind};
    use millrace_rpc::catalog::Relation;

    use super::*;
    use crate::passes::tests::{count, filter, join, table};
    use crate::stream::plan::Scan;

    const TTL_US: i64 = 60_000_000;

    /// The table of the tests, whose rows stay.
    fn growing() -> Stream {
        let Stream { op: Op::Scan(Scan { relation, columns }), schema, .. } = table() else {
            panic!("the table is scanned");
        };
        let relation = Relation { append_only: true, ..Relation::clone(&relation) };
        Stream::scan(Arc::new(relation), schema, columns)
    }

    fn expired(stream: Stream) -> Result<Stream, SqlError> {
        ExpireInputs { ttl_us: TTL_US }.run(stream)
    }

    /// What an expiry is put behind, if the plan is one.
    fn below_expiry(stream: &Stream) -> Option<&Stream> {
        let Op::Project(_) = stream.op else { return None };
        let [Stream { op: Op::Buffer(buffer), inputs, .. }] = stream.inputs.as_slice() else {
            return None;
        };
        let [Stream { op: Op::Stamp(stamp), inputs, .. }] = inputs.as_slice() else {
            return None;
        };
        let [input] = inputs.as_slice() else { return None };
        (stamp.add_us == TTL_US
            && buffer.mode == BufferMode::UpperBound
            && buffer.column == input.width())
        .then_some(input)
    }

    fn over_growing(kind: JoinKind) -> Stream {
        let Stream { op, inputs, schema } = join(kind, (0, 0));
        Stream { op, inputs: inputs.into_iter().map(|_| growing()).collect(), schema }
    }

    #[test]
    fn an_input_expires_behind_its_filters_and_projections() {
        let narrow = filter(growing(), &[("a", Operator::Gt, 5)]).select(&[1]);
        let found = expired(narrow).unwrap();
        assert_eq!(found.width(), 1, "the stamp is dropped again");
        let input = below_expiry(&found).expect("an expiry");
        assert!(matches!(input.op, Op::Project(_)));
        assert!(matches!(input.inputs[0].op, Op::Filter(_)));
    }

    #[test]
    fn operators_read_inputs_that_expire() {
        let found = expired(growing().aggregate(vec![1], vec![count()])).unwrap();
        assert!(matches!(found.op, Op::Aggregate(_)));
        assert!(below_expiry(&found.inputs[0]).is_some());
        let found = expired(over_growing(JoinKind::Inner)).unwrap();
        assert!(found.inputs.iter().all(|input| below_expiry(input).is_some()));
    }

    #[test]
    fn what_a_lookup_looks_up_stays() {
        let Stream { op: Op::Join(of), inputs, .. } = over_growing(JoinKind::Inner) else {
            panic!("a join");
        };
        let [left, right]: [Stream; 2] = inputs.try_into().unwrap_or_else(|_| panic!("two inputs"));
        let found = expired(left.lookup(right, of)).unwrap();
        assert!(below_expiry(&found.inputs[0]).is_some());
        assert!(matches!(found.inputs[1].op, Op::Scan(_)));
    }

    #[test]
    fn rows_that_change_cannot_expire() {
        let error = expired(table()).map(drop).unwrap_err();
        assert_eq!(error.state, SqlState::FEATURE_NOT_SUPPORTED);
        assert!(error.hint.is_some());
        assert!(expired(join(JoinKind::Inner, (0, 0))).is_err());
    }
}
