//! [`Common`]: a subtree that stands in several places of the plan.

use std::sync::Arc;

use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_graph::DerivedWatermark;

use super::{Input, LineContext, Lowered, OperatorLine, RowRules};
use crate::passes::identity::Keyed;
use crate::passes::properties::Properties;
use crate::passes::prune::{Pruned, Pruning, only, prune_exact};
use crate::passes::watermark::port;
use crate::stream::plan::{Common, Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    /// The subtree with this number.
    pub fn common(self, id: usize) -> Stream {
        let schema = Arc::clone(&self.schema);
        Stream { op: Op::Common(Common { id }), inputs: vec![self], schema }
    }
}

impl RowRules for Common {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        Properties::of_input(inputs, width)
    }

    fn watermarks(&self, inputs: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        port(inputs, 0).to_vec()
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let (input, map) = prune_exact(only(at.inputs)?, at.required)?;
        Ok((input.common(self.id), map))
    }

    /// The fragmenter looks through it, so no fragment has it as an operator.
    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        Err(SqlError::internal("a common subplan has a fragment of its own"))
    }
}

impl OperatorLine for Common {
    fn line(&self, _: &mut LineContext<'_>) -> String {
        format!("Common subplan {}", self.id)
    }
}
