//! [`Repeat`]: copies of a row.

use std::sync::Arc;

use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_graph::{DerivedWatermark, Operator, Repeat};

use super::{Input, LineContext, Lowered, OperatorLine, RowRules};
use crate::explain::text::column;
use crate::passes::identity::Keyed;
use crate::passes::properties::Properties;
use crate::passes::prune::{Pruned, Pruning, kept_at, only, prune_columns, with};
use crate::stream::plan::{Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn repeat(self, times_column: usize) -> Stream {
        let schema = Arc::clone(&self.schema);
        Stream { op: Op::Repeat(Repeat { times_column }), inputs: vec![self], schema }
    }
}

impl RowRules for Repeat {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        Properties { keys: vec![], max_rows: None, ..Properties::of_input(inputs, width) }
    }

    fn watermarks(&self, _: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        vec![]
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let (input, map) =
            prune_columns(only(at.inputs)?, &with(at.required, [self.times_column]))?;
        let times = kept_at(&map, self.times_column)?;
        Ok((input.repeat(times), map))
    }

    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        Ok(Lowered::of(Operator::Repeat(self)))
    }
}

impl OperatorLine for Repeat {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        format!("Repeat {} times", column(at.inputs[0], self.times_column))
    }
}
