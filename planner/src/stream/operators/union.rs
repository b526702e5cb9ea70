//! [`Union`]: the rows of all inputs.

use arrow::datatypes::SchemaRef;
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_graph::{DerivedWatermark, Operator, Union};

use super::{Input, LineContext, Lowered, OperatorLine, OperatorRules, RowIdentity};
use crate::passes::exchange::{Placed, exchange, gather};
use crate::passes::identity::Keyed;
use crate::passes::properties::{Distribution, Properties};
use crate::passes::prune::{Pruned, Pruning, prune_exact, select};
use crate::passes::watermark;
use crate::stream::plan::{Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn union(inputs: Vec<Stream>, schema: SchemaRef) -> Stream {
        Stream { op: Op::Union(Union), inputs, schema }
    }
}

impl OperatorRules for Union {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let distribution = match inputs.split_first() {
            Some((first, rest)) if rest.iter().all(|p| p.distribution == first.distribution) => {
                first.distribution.clone()
            }
            _ => Distribution::Any,
        };
        Properties {
            append_only: inputs.iter().all(|p| p.append_only),
            max_rows: inputs.iter().map(|p| p.max_rows).sum(),
            ..Properties::unknown(width, distribution)
        }
    }

    /// A column has the least of its inputs' watermarks.
    fn watermarks(&self, inputs: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        let Some((first, rest)) = inputs.split_first() else { return vec![] };
        let one = |m: &DerivedWatermark| {
            let mut terms = m.terms.clone();
            for input in rest {
                terms.extend_from_slice(watermark::of(input, m.column)?);
            }
            Some(DerivedWatermark { column: m.column, terms })
        };
        first.iter().filter_map(one).collect()
    }

    fn keeps_state(&self) -> bool {
        false
    }

    /// The inputs run in the same tasks: all in one, or all in parallel.
    fn place(&mut self, inputs: Vec<Placed>) -> Vec<Placed> {
        let single = |p: &Placed| p.1.distribution == Distribution::Singleton;
        if inputs.iter().all(single) {
            return inputs;
        }
        if inputs.iter().any(|p| p.0.width() == 0) {
            return inputs.into_iter().map(gather).collect();
        }
        let spread = |input: Placed| {
            if single(&input) {
                let all = (0..input.0.width()).collect();
                exchange(input, all)
            } else {
                input
            }
        };
        inputs.into_iter().map(spread).collect()
    }

    fn identity(&mut self) -> Option<RowIdentity<'_>> {
        None
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let (kept, schema, map) = select(at.schema, at.required);
        let kept = kept.into_iter().collect();
        let inputs = at
            .inputs
            .into_iter()
            .map(|input| Ok(prune_exact(input, &kept)?.0))
            .collect::<Result<Vec<_>>>()?;
        Ok((Stream::union(inputs, schema), map))
    }

    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        Ok(Lowered::of(Operator::Union(self)))
    }
}

impl OperatorLine for Union {
    fn line(&self, _: &mut LineContext<'_>) -> String {
        "Union".into()
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::RelationId;
    use millrace_graph::WatermarkTerm;

    use super::*;

    #[test]
    fn a_mark_that_one_input_of_a_union_lacks_is_lost() {
        let mark = |column, relation| DerivedWatermark {
            column,
            terms: vec![WatermarkTerm { relation: RelationId(relation), column: 0, steps: vec![] }],
        };
        let both = Union.watermarks(&[vec![mark(0, 1), mark(1, 1)], vec![mark(1, 2)]], &[2, 2]);
        assert_eq!(both.len(), 1);
        assert_eq!((both[0].column, both[0].terms.len()), (1, 2));
    }
}
