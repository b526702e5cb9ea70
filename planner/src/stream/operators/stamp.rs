//! [`Stamp`]: the processing time of a row.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Schema, TimeUnit};
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_graph::{DerivedWatermark, Operator, Stamp};

use super::{Input, LineContext, Lowered, OperatorLine, RowRules};
use crate::explain::text::duration;
use crate::passes::identity::Keyed;
use crate::passes::properties::Properties;
use crate::passes::prune::{Pruned, Pruning, below, only, prune_columns};
use crate::passes::watermark::port;
use crate::stream::plan::{Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn stamp(self, add_us: i64) -> Stream {
        let time = DataType::Timestamp(TimeUnit::Microsecond, None);
        let stamp = Arc::new(Field::new("expires", time, false));
        let fields: Vec<FieldRef> = self.schema.fields().iter().cloned().chain([stamp]).collect();
        let schema = Arc::new(Schema::new(fields));
        Stream { op: Op::Stamp(Stamp { add_us }), inputs: vec![self], schema }
    }
}

impl RowRules for Stamp {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let mut p = Properties::of_input(inputs, width);
        p.equal.push(width - 1);
        p
    }

    fn watermarks(&self, inputs: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        port(inputs, 0).to_vec()
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let input = only(at.inputs)?;
        let width = input.width();
        let below = below(at.required, width);
        let (input, mut map) = prune_columns(input, &below)?;
        map.push(Some(input.width()));
        Ok((input.stamp(self.add_us), map))
    }

    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        Ok(Lowered::of(Operator::Stamp(self)))
    }
}

impl OperatorLine for Stamp {
    fn line(&self, _: &mut LineContext<'_>) -> String {
        format!("Stamp processing time + {}", duration(self.add_us))
    }
}
