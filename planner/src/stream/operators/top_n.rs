//! [`TopN`]: the first rows of each group.

use std::fmt::Write;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Schema};
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_common::access::AccessClass;
use millrace_functions::window_call::RankFunction;
use millrace_graph as graph;
use millrace_graph::{DerivedWatermark, Operator, TopNState};

use super::{Input, LineContext, Lowered, OperatorLine, OperatorRules, RowIdentity};
use crate::explain::text::{by_order, ordered_key, state, told_apart, vnode};
use crate::passes::classes;
use crate::passes::exchange::{Placed, meet_only};
use crate::passes::identity::Keyed;
use crate::passes::properties::Properties;
use crate::passes::prune::{Pruned, Pruning, all_kept, below, kept_at, only, prune_exact, with};
use crate::passes::watermark::port;
use crate::stream::plan::{Identity, Op, Stream, TopN};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn top_n(self, top: TopN) -> Stream {
        let mut fields: Vec<FieldRef> = self.schema.fields().iter().cloned().collect();
        if top.emit_rank {
            fields.push(Arc::new(Field::new(rank_name(top.rank), DataType::Int64, false)));
        }
        let schema = Arc::new(Schema::new(fields));
        Stream { op: Op::TopN(top), inputs: vec![self], schema }
    }
}

fn rank_name(rank: RankFunction) -> &'static str {
    match rank {
        RankFunction::RowNumber => "row_number",
        RankFunction::Rank => "rank",
        RankFunction::DenseRank => "dense_rank",
    }
}

impl OperatorRules for TopN {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let mut p = Properties::of_input(inputs, width);
        p.append_only = false;
        let one_each = self.rank == RankFunction::RowNumber;
        if one_each && self.limit.is_some_and(|l| l <= 1) {
            p.keys.push(self.group.iter().copied().collect());
        }
        if self.emit_rank {
            let rank = p.equal.len();
            p.equal.push(rank);
            if one_each {
                p.keys.push(self.group.iter().copied().chain([rank]).collect());
            }
        }
        if one_each && self.group.is_empty() {
            p.max_rows = match (self.limit, p.max_rows) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        }
        p
    }

    fn watermarks(&self, inputs: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        port(inputs, 0).iter().filter(|m| self.group.contains(&m.column)).cloned().collect()
    }

    fn keeps_state(&self) -> bool {
        true
    }

    fn place(&mut self, inputs: Vec<Placed>) -> Vec<Placed> {
        meet_only(inputs, &self.group, &mut self.vnode)
    }

    fn identity(&mut self) -> Option<RowIdentity<'_>> {
        Some(RowIdentity { given: self.columns_read(), identity: &mut self.state })
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(mut self, at: Pruning<'_>) -> Result<Pruned> {
        let input = only(at.inputs)?;
        let width = input.width();
        let rank_read = at.required.contains(&width);
        let below = below(at.required, width);
        let read = self.columns_read().into_iter().chain(self.state.0.iter().copied());
        let (input, mut map) = prune_exact(input, &with(&below, read))?;
        self.emit_rank = self.emit_rank && rank_read;
        self.group = all_kept(&map, &self.group)?;
        self.vnode = all_kept(&map, &self.vnode)?;
        self.state = Identity(all_kept(&map, &self.state.0)?);
        for o in &mut self.order {
            o.0 = kept_at(&map, o.0)?;
        }
        map.push(self.emit_rank.then(|| input.width()));
        Ok((input.top_n(self), map))
    }

    fn lower(self, tables: &mut StateTables, inputs: &[Input<'_>]) -> Result<Lowered, SqlError> {
        let input = Input::one(inputs)?;
        let (storage, unique_key) = classes::top_n_rows(input.properties, &self.columns_read());
        let schema = Arc::clone(input.schema);
        let table = tables.add("top-n", AccessClass::RangeRead, storage, schema);
        tables.retain_by_group(table, &self.group, input.watermarks);
        let append_only_input = input.properties.append_only;
        let state = TopNState { table, storage, unique_key, append_only_input };
        Ok(Lowered::of(Operator::TopN(self.with_state(state))))
    }
}

impl OperatorLine for TopN {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        line(self, at.inputs[0]) + &told_apart(&self.state, at.inputs[0])
    }
}

impl OperatorLine for graph::TopN {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let input = at.inputs[0];
        let TopNState { table, storage, unique_key, append_only_input } = &self.state;
        let window = if *append_only_input { ", window only" } else { "" };
        let key = ordered_key(&self.group, &self.order, unique_key, *storage, input);
        at.keys.push((*table, key));
        line(self, input) + window + &vnode(input, &self.vnode, &self.group) + &state(&[*table])
    }
}

/// Which rows of each group by which order.
fn line<S>(top: &graph::TopN<S>, input: &Schema) -> String {
    let mut line = format!("TopN {}", rank_name(top.rank));
    match (top.offset, top.limit) {
        (0, Some(limit)) => drop(write!(line, " <= {limit}")),
        (0, None) => {}
        (offset, Some(limit)) => {
            let _ = write!(line, " in {}..{}", offset + 1, offset.saturating_add(limit));
        }
        (offset, None) => drop(write!(line, " > {offset}")),
    }
    line.push_str(&by_order(&top.group, &top.order, input));
    if top.emit_rank {
        line.push_str(", with rank");
    }
    line
}
