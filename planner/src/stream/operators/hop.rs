//! [`Hop`]: the windows that a row's time lies in.

use std::fmt::Write;
use std::sync::Arc;

use arrow::datatypes::{Field, FieldRef, Schema};
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_graph::{DerivedWatermark, Hop, MarkStep, Operator};

use super::{Input, LineContext, Lowered, OperatorLine, RowRules};
use crate::explain::text::{column, duration};
use crate::passes::identity::{Keyed, with_key};
use crate::passes::properties::Properties;
use crate::passes::prune::{Pruned, Pruning, below, kept_at, only, prune_columns, with};
use crate::passes::watermark::{self, port};
use crate::stream::plan::{Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn hop(self, hop: Hop) -> Stream {
        let time = self.schema.field(hop.time_column).data_type().clone();
        let mut fields: Vec<FieldRef> = self.schema.fields().iter().cloned().collect();
        for name in ["window_start", "window_end"] {
            fields.push(Arc::new(Field::new(name, time.clone(), false)));
        }
        let schema = Arc::new(Schema::new(fields));
        Stream { op: Op::Hop(hop), inputs: vec![self], schema }
    }
}

impl RowRules for Hop {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let mut p = Properties::of_input(inputs, width);
        let start = p.equal.len();
        p.equal.extend([start, start + 1]);
        if self.size_us != self.slide_us {
            p.keys.iter_mut().for_each(|k| {
                k.insert(start);
            });
            p.max_rows = None;
        }
        p
    }

    fn watermarks(
        &self,
        inputs: &[Vec<DerivedWatermark>],
        widths: &[usize],
    ) -> Vec<DerivedWatermark> {
        let Hop { time_column, size_us, slide_us, offset_us } = *self;
        let input = port(inputs, 0);
        let mut out = input.to_vec();
        if let (Some(time), Some(&width)) = (watermark::of(input, time_column), widths.first()) {
            let back = MarkStep::Add(slide_us.saturating_sub(size_us));
            let bin = MarkStep::Bin { size: slide_us, offset: offset_us };
            let start = watermark::then(time, &[bin, back]);
            let end = watermark::then(&start, &[MarkStep::Add(size_us)]);
            out.push(DerivedWatermark { column: width + 1, terms: end });
            out.push(DerivedWatermark { column: width, terms: start });
        }
        out
    }

    /// The windows come behind the input's columns, and a grown input moves them: they move back.
    fn with_key(&self, stream: &Stream) -> Result<Option<Keyed>> {
        let Some(input) = stream.inputs.first() else { return Ok(None) };
        let Some((input, key)) = with_key(input)? else { return Ok(None) };
        let (own, grown) = (stream.width() - 2, input.width());
        let columns: Vec<usize> = (0..own).chain([grown, grown + 1]).chain(own..grown).collect();
        let place = |k: usize| if k < own { k } else { k + 2 };
        let mut key: Vec<usize> = key.into_iter().map(place).collect();
        key.push(own);
        Ok(Some((input.hop(*self).select(&columns), key)))
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let input = only(at.inputs)?;
        let width = input.width();
        let below = below(at.required, width);
        let (input, mut map) = prune_columns(input, &with(&below, [self.time_column]))?;
        let time_column = kept_at(&map, self.time_column)?;
        map.extend([Some(input.width()), Some(input.width() + 1)]);
        Ok((input.hop(Hop { time_column, ..self }), map))
    }

    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        Ok(Lowered::of(Operator::Hop(self)))
    }
}

impl OperatorLine for Hop {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let Hop { size_us, slide_us, offset_us, .. } = *self;
        let time = column(at.inputs[0], self.time_column);
        let mut line = if size_us == slide_us {
            format!("Tumble {time} size {}", duration(size_us))
        } else {
            format!("Hop {time} size {} slide {}", duration(size_us), duration(slide_us))
        };
        if offset_us != 0 {
            let _ = write!(line, " offset {}", duration(offset_us));
        }
        line
    }
}
