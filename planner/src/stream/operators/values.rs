//! [`Values`]: constant rows.

use arrow::record_batch::RecordBatch;
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_graph::{DerivedWatermark, Operator, Values};

use super::{Input, LineContext, Lowered, OperatorLine, RowRules};
use crate::passes::identity::Keyed;
use crate::passes::properties::{Distribution, Properties};
use crate::passes::prune::{Pruned, Pruning, select};
use crate::stream::plan::{Op, Stream};
use crate::stream::tables::StateTables;

/// More constant rows than this are only counted by EXPLAIN.
const SHOWN_ROWS: usize = 4;

impl Stream {
    pub fn values(batch: RecordBatch) -> Stream {
        let schema = batch.schema();
        Stream { op: Op::Values(Values { batch }), inputs: vec![], schema }
    }
}

impl RowRules for Values {
    fn properties(&self, width: usize, _: &[Properties]) -> Properties {
        Properties {
            append_only: true,
            max_rows: Some(self.batch.num_rows() as u64),
            ..Properties::unknown(width, Distribution::Singleton)
        }
    }

    fn watermarks(&self, _: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        vec![]
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let (kept, _, map) = select(at.schema, at.required);
        Ok((Stream::values(self.batch.project(&kept)?), map))
    }

    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        Ok(Lowered::of(Operator::Values(self)))
    }
}

impl OperatorLine for Values {
    fn line(&self, _: &mut LineContext<'_>) -> String {
        let batch = &self.batch;
        if batch.num_rows() > SHOWN_ROWS {
            return format!("Values {} rows", batch.num_rows());
        }
        let cell = |c: usize, row: usize| {
            arrow::util::display::array_value_to_string(batch.column(c), row).unwrap_or_default()
        };
        let row = |row: usize| {
            let cells: Vec<String> = (0..batch.num_columns()).map(|c| cell(c, row)).collect();
            format!("({})", cells.join(", "))
        };
        let rows: Vec<String> = (0..batch.num_rows()).map(row).collect();
        format!("Values {}", if rows.is_empty() { "no rows".into() } else { rows.join(", ") })
    }
}
