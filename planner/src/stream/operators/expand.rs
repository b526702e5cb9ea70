//! [`Expand`]: a row for each grouping set.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Schema};
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_graph::{DerivedWatermark, Expand, GroupingSet, Operator};

use super::{Input, LineContext, Lowered, OperatorLine, RowRules};
use crate::explain::text::list;
use crate::passes::identity::Keyed;
use crate::passes::properties::Properties;
use crate::passes::prune::{Pruned, Pruning, all_kept, below, only, prune_columns, with};
use crate::stream::plan::{Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn expand(self, expand: Expand) -> Stream {
        let own = self.schema.fields();
        let copies =
            expand.columns.iter().map(|&c| Arc::new(own[c].as_ref().clone().with_nullable(true)));
        let id = Arc::new(Field::new("grouping_id", DataType::Int64, false));
        let fields: Vec<FieldRef> = own.iter().cloned().chain(copies).chain([id]).collect();
        let schema = Arc::new(Schema::new(fields));
        Stream { op: Op::Expand(expand), inputs: vec![self], schema }
    }
}

impl RowRules for Expand {
    /// The id behind all columns tells a row's copies apart.
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let mut p = Properties::of_input(inputs, width);
        p.equal.extend(p.equal.len()..width);
        p.keys.iter_mut().for_each(|k| {
            k.insert(width - 1);
        });
        p.max_rows = p.max_rows.map(|n| n.saturating_mul(self.sets.len() as u64));
        p
    }

    fn watermarks(&self, _: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        vec![]
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(mut self, at: Pruning<'_>) -> Result<Pruned> {
        let input = only(at.inputs)?;
        let width = input.width();
        let below = below(at.required, width);
        let needed = with(&below, self.columns.iter().copied());
        let (input, mut map) = prune_columns(input, &needed)?;
        self.columns = all_kept(&map, &self.columns)?;
        let grown = input.width();
        map.extend((0..=self.columns.len()).map(|i| Some(grown + i)));
        Ok((input.expand(self), map))
    }

    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        Ok(Lowered::of(Operator::Expand(self)))
    }
}

impl OperatorLine for Expand {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let set = |s: &GroupingSet| {
            let kept = self.columns.iter().zip(&s.keep).filter(|(_, keep)| **keep).map(|(c, _)| *c);
            format!("({})", list(at.inputs[0], &kept.collect::<Vec<_>>()))
        };
        let sets: Vec<String> = self.sets.iter().map(set).collect();
        format!("Expand grouping sets {}", sets.join(", "))
    }
}
