//! [`Exchange`]: rows that move between tasks. In a plan it says where to; in a graph its edge does.

use std::sync::Arc;

use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_graph as graph;
use millrace_graph::{DerivedWatermark, EdgeKind};

use super::{Input, LineContext, Lowered, OperatorLine, RowRules};
use crate::explain::text::list;
use crate::passes::identity::Keyed;
use crate::passes::properties::{Distribution, Properties};
use crate::passes::prune::{Pruned, Pruning, all_kept, only, prune_exact, with};
use crate::passes::watermark::port;
use crate::stream::plan::{Exchange, Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn exchange(self, hash: Vec<usize>) -> Stream {
        let schema = Arc::clone(&self.schema);
        Stream { op: Op::Exchange(Exchange { hash }), inputs: vec![self], schema }
    }
}

impl RowRules for Exchange {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let distribution = Distribution::by_vnode(self.hash.clone());
        Properties { distribution, ..Properties::of_input(inputs, width) }
    }

    fn watermarks(&self, inputs: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        port(inputs, 0).to_vec()
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let needed = with(at.required, self.hash.iter().copied());
        let (input, map) = prune_exact(only(at.inputs)?, &needed)?;
        let hash = all_kept(&map, &self.hash)?;
        Ok((input.exchange(hash), map))
    }

    /// The fragmenter cuts the plan here, so no fragment has it as an operator.
    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        Err(SqlError::internal("an exchange is not part of a fragment"))
    }
}

impl OperatorLine for Exchange {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        if self.hash.is_empty() {
            return "Exchange to one task".into();
        }
        format!("Exchange hash ({})", list(at.inputs[0], &self.hash))
    }
}

impl OperatorLine for graph::Exchange {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let graph::Exchange { fragment, output } = *self;
        let Some(producer) = at.graph.and_then(|g| g.fragments.get(fragment)) else {
            return format!("Exchange from fragment {fragment}");
        };
        let edge = producer.outputs.get(output);
        let how = match edge.and_then(|e| Some((&e.carries, producer.nodes.get(e.from)?))) {
            Some((EdgeKind::Rows { hash }, from)) if !hash.is_empty() => {
                format!("hash ({})", list(&from.schema, hash))
            }
            Some((EdgeKind::Rows { .. }, _)) | None => "to one task".into(),
        };
        let which = if producer.outputs.len() > 1 { format!(".{output}") } else { String::new() };
        let tasks = if producer.singleton { ", one task" } else { "" };
        format!("Exchange {how} from fragment {fragment}{which}{tasks}")
    }
}
