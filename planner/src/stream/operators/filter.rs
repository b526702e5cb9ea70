//! [`Filter`]: rows for which a predicate is true.

use std::sync::Arc;

use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_functions::expr::{self, ExprRef};
use millrace_graph::{DerivedWatermark, Filter, Operator};

use super::{Input, LineContext, Lowered, OperatorLine, RowRules};
use crate::explain::text::text;
use crate::passes::identity::{Keyed, with_key};
use crate::passes::properties::Properties;
use crate::passes::prune::{Pruned, Pruning, only, prune_columns, with};
use crate::passes::watermark::port;
use crate::stream::plan::{Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn filter(self, predicate: ExprRef) -> Stream {
        let schema = Arc::clone(&self.schema);
        Stream { op: Op::Filter(Filter { predicate }), inputs: vec![self], schema }
    }
}

impl RowRules for Filter {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        Properties::of_input(inputs, width)
    }

    fn watermarks(&self, inputs: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        port(inputs, 0).to_vec()
    }

    fn with_key(&self, stream: &Stream) -> Result<Option<Keyed>> {
        let Some(input) = stream.inputs.first() else { return Ok(None) };
        let found = with_key(input)?;
        Ok(found.map(|(input, key)| (input.filter(Arc::clone(&self.predicate)), key)))
    }

    /// Of all filters in a row, without recursion: a condition of a thousand terms is a thousand of them.
    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let mut input = only(at.inputs)?;
        let mut needed = with(at.required, expr::columns_of(&self.predicate));
        let mut predicates = vec![self.predicate];
        while let Op::Filter(Filter { predicate }) = &input.op {
            needed.extend(expr::columns_of(predicate));
            predicates.push(Arc::clone(predicate));
            input = only(input.inputs)?;
        }
        let (mut input, map) = prune_columns(input, &needed)?;
        for predicate in predicates.iter().rev() {
            let predicate = expr::remap(predicate, &map, &input.schema)?;
            input = input.filter(predicate);
        }
        Ok((input, map))
    }

    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        Ok(Lowered::of(Operator::Filter(self)))
    }
}

impl OperatorLine for Filter {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        format!("Filter {}", text(&self.predicate, at.inputs[0]))
    }
}
