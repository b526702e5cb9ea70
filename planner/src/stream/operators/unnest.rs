//! [`Unnest`]: the elements of lists as rows.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Schema};
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_graph::{DerivedWatermark, Operator, Unnest};

use super::{Input, LineContext, Lowered, OperatorLine, RowRules};
use crate::explain::text::column;
use crate::passes::identity::Keyed;
use crate::passes::properties::{Distribution, Properties};
use crate::passes::prune::{Pruned, Pruning, all_kept, only, prune_columns, with};
use crate::passes::watermark::port;
use crate::stream::plan::{Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    /// The elements take the places of the lists.
    pub fn unnest(self, lists: Vec<usize>, keep_empty: bool) -> Stream {
        let fields = self.schema.fields().iter().enumerate().map(|(i, f)| match f.data_type() {
            DataType::List(item) if lists.contains(&i) => {
                Arc::new(Field::new(f.name(), item.data_type().clone(), true))
            }
            _ => Arc::clone(f),
        });
        let schema = Arc::new(Schema::new(fields.collect::<Vec<FieldRef>>()));
        Stream { op: Op::Unnest(Unnest { lists, keep_empty }), inputs: vec![self], schema }
    }
}

impl RowRules for Unnest {
    /// A column of elements is none of those that its list was equal to, and rows multiply.
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let lists = &self.lists;
        let input = Properties::of_input(inputs, width);
        let equal = (0..input.equal.len())
            .map(|c| {
                let same =
                    |&o: &usize| !lists.contains(&o) && input.equal.get(o) == input.equal.get(c);
                if lists.contains(&c) { c } else { (0..=c).find(same).unwrap_or(c) }
            })
            .collect();
        let moved = match &input.distribution {
            Distribution::Hash(columns) => columns.iter().any(|c| lists.contains(c)),
            Distribution::Singleton | Distribution::Any => false,
        };
        let distribution = if moved { Distribution::Any } else { input.distribution.clone() };
        Properties { keys: vec![], max_rows: None, equal, distribution, ..input }
    }

    fn watermarks(&self, inputs: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        let kept = port(inputs, 0).iter().filter(|m| !self.lists.contains(&m.column));
        kept.cloned().collect()
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        // How many elements there are decides how many rows.
        let needed = with(at.required, self.lists.iter().copied());
        let (input, map) = prune_columns(only(at.inputs)?, &needed)?;
        let lists = all_kept(&map, &self.lists)?;
        Ok((input.unnest(lists, self.keep_empty), map))
    }

    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        Ok(Lowered::of(Operator::Unnest(self)))
    }
}

impl OperatorLine for Unnest {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let lists: Vec<String> = self.lists.iter().map(|&c| column(at.inputs[0], c)).collect();
        let kept = if self.keep_empty { " keeping rows without elements" } else { "" };
        format!("Unnest {}{kept}", lists.join(", "))
    }
}
