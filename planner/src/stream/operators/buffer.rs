//! [`EventTimeBuffer`]: rows that wait for an instant.

use std::sync::Arc;

use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_common::access::{AccessClass, RetentionBy};
use millrace_graph as graph;
use millrace_graph::{BufferMode, DerivedWatermark, Operator};
use millrace_rpc::catalog::RowStorage;

use super::{Input, LineContext, Lowered, OperatorLine, OperatorRules, RowIdentity};
use crate::explain::text::column;
use crate::passes::exchange::{Placed, meet};
use crate::passes::identity::Keyed;
use crate::passes::properties::{Distribution, Properties};
use crate::passes::prune::{Pruned, Pruning, kept_at, only, prune_exact, with};
use crate::passes::watermark::{self, port};
use crate::stream::plan::{EventTimeBuffer, Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn window_close(self, column: usize) -> Stream {
        self.buffer(BufferMode::WindowClose, column)
    }

    pub fn expire(self, column: usize) -> Stream {
        self.buffer(BufferMode::UpperBound, column)
    }

    pub fn appear(self, column: usize) -> Stream {
        self.buffer(BufferMode::LowerBound, column)
    }

    fn buffer(self, mode: BufferMode, column: usize) -> Stream {
        let schema = Arc::clone(&self.schema);
        let op = Op::Buffer(EventTimeBuffer { mode, column, vnode: vec![], table: () });
        Stream { op, inputs: vec![self], schema }
    }
}

impl OperatorRules for EventTimeBuffer {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let input = Properties::of_input(inputs, width);
        match self.mode {
            // Once a window is closed its rows stay.
            BufferMode::WindowClose => Properties { append_only: true, ..input },
            BufferMode::UpperBound => Properties { append_only: false, ..input },
            BufferMode::LowerBound => input,
        }
    }

    fn watermarks(&self, inputs: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        match self.mode {
            BufferMode::WindowClose => {
                port(inputs, 0).iter().filter(|m| m.column == self.column).cloned().collect()
            }
            // What expires or appears does so by the wall clock, whatever its time.
            BufferMode::UpperBound | BufferMode::LowerBound => vec![],
        }
    }

    fn keeps_state(&self) -> bool {
        true
    }

    /// Equal rows meet; where rows are distributed already they stay.
    fn place(&mut self, mut inputs: Vec<Placed>) -> Vec<Placed> {
        let Some(input) = inputs.pop() else { return inputs };
        let all: Vec<usize> = (0..input.0.width()).collect();
        let (input, vnode) = match &input.1.distribution {
            Distribution::Singleton => (input, vec![]),
            Distribution::Hash(_) | Distribution::Any => meet(input, &all),
        };
        self.vnode = vnode;
        vec![input]
    }

    fn identity(&mut self) -> Option<RowIdentity<'_>> {
        None
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let (input, map) = prune_exact(only(at.inputs)?, &with(at.required, [self.column]))?;
        let column = kept_at(&map, self.column)?;
        Ok((input.buffer(self.mode, column), map))
    }

    fn lower(self, tables: &mut StateTables, inputs: &[Input<'_>]) -> Result<Lowered, SqlError> {
        let EventTimeBuffer { mode, column, vnode, table: () } = self;
        let input = Input::one(inputs)?;
        let name = match mode {
            BufferMode::WindowClose => "held back",
            BufferMode::UpperBound => "to expire",
            BufferMode::LowerBound => "to appear",
        };
        let schema = Arc::clone(input.schema);
        let table = tables.add(name, AccessClass::RangeRead, RowStorage::Multiset, schema);
        // What goes by the wall clock is not bound by a watermark.
        if mode == BufferMode::WindowClose
            && let Some(terms) = watermark::of(input.watermarks, column)
        {
            tables.retain(table, RetentionBy::Key, terms.to_vec());
        }
        let buffer = graph::EventTimeBuffer { mode, column, vnode, table };
        Ok(Lowered::of(Operator::Buffer(buffer)))
    }
}

fn line<T>(buffer: &graph::EventTimeBuffer<T>, at: &LineContext<'_>) -> String {
    let name = match buffer.mode {
        BufferMode::WindowClose => "Window close",
        BufferMode::UpperBound => "Expire",
        BufferMode::LowerBound => "Appear",
    };
    format!("{name} by {}", column(at.inputs[0], buffer.column))
}

impl OperatorLine for EventTimeBuffer {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        line(self, at)
    }
}

impl OperatorLine for graph::EventTimeBuffer {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let column = column(at.inputs[0], self.column);
        at.keys.push((self.table, format!("({column}, all other columns)")));
        line(self, at)
    }
}
