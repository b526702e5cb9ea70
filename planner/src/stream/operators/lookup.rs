//! [`Lookup`]: left rows meet the right ones of the time when they are processed; inner or left outer.

use std::collections::BTreeSet;
use std::fmt::Write;

use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_common::access::AccessClass;
use millrace_graph as graph;
use millrace_graph::state::matches_schema;
use millrace_graph::{DerivedWatermark, JoinKind, Matches, Operator, pair_schema};
use millrace_rpc::catalog::RowStorage;

use super::join::{joined, on, place_sides, prune_sides, side_key, side_state};
use super::{Input, LineContext, Lowered, OperatorLine, OperatorRules, RowIdentity};
use crate::explain::text::{all_columns, list, state, text, vnode};
use crate::passes::classes;
use crate::passes::classes::SideLayout;
use crate::passes::exchange::Placed;
use crate::passes::identity::Keyed;
use crate::passes::properties::{Distribution, Properties, merge};
use crate::passes::prune::{Pruned, Pruning};
use crate::passes::watermark::{self, port};
use crate::stream::plan::{Join, JoinSide, Lookup, Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    /// `join`: an inner or a left outer one.
    pub fn lookup(self, right: Stream, join: Join) -> Stream {
        let schema = joined(&self, &right, &join);
        Stream { op: Op::Lookup(from_join(join)), inputs: vec![self, right], schema }
    }
}

fn from_join(j: Join) -> Lookup {
    Lookup {
        outer: j.kind == JoinKind::LeftOuter,
        left_keys: j.left.keys,
        left_vnode: j.left.vnode,
        right: j.right,
        residual: j.residual,
        output: j.output,
        matches: (),
    }
}

/// The join of the same rows, for what is the same of both.
fn as_join(l: Lookup) -> Join {
    Join {
        kind: if l.outer { JoinKind::LeftOuter } else { JoinKind::Inner },
        left: JoinSide { keys: l.left_keys, vnode: l.left_vnode, state: () },
        right: l.right,
        residual: l.residual,
        null_aware: false,
        null_equals_null: false,
        output: l.output,
    }
}

impl OperatorRules for Lookup {
    /// What a left row has met stays as it was, so nothing about the right side's rows at one time holds of the
    /// rows that were met at different times, but that a left row has met them together.
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let [left, right] = inputs else {
            return Properties::unknown(width, Distribution::Any);
        };
        let width = left.equal.len();
        let single = right.is_unique(&self.right.keys);
        let shifted =
            |key: &BTreeSet<usize>| key.iter().map(|c| c + width).collect::<BTreeSet<_>>();
        let keys = if single {
            left.keys.clone()
        } else {
            let pairs = left.keys.iter().flat_map(|l| {
                right.keys.iter().map(move |r| l.union(&shifted(r)).copied().collect())
            });
            pairs.collect()
        };
        let mut equal = left.equal.clone();
        equal.extend(right.equal.iter().map(|e| e + width));
        if !self.outer {
            let pairs = self.left_keys.iter().zip(&self.right.keys);
            pairs.for_each(|(&l, &r)| merge(&mut equal, l, r + width));
        }
        let full = Properties {
            append_only: left.append_only,
            keys,
            equal,
            distribution: Distribution::by_vnode(self.left_vnode.clone()),
            max_rows: left.max_rows.filter(|_| single),
        };
        full.select(&self.output)
    }

    /// Only changes of the left side are changes of the output.
    fn watermarks(&self, inputs: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        watermark::pick(port(inputs, 0), &self.output)
    }

    fn keeps_state(&self) -> bool {
        true
    }

    fn place(&mut self, inputs: Vec<Placed>) -> Vec<Placed> {
        let (inputs, vnodes) = place_sides([&self.left_keys, &self.right.keys], false, inputs);
        [self.left_vnode, self.right.vnode] = vnodes;
        inputs
    }

    fn identity(&mut self) -> Option<RowIdentity<'_>> {
        None
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let ([left, right], join, map) = prune_sides(as_join(self), at.inputs, at.required)?;
        Ok((left.lookup(right, join), map))
    }

    /// What is looked up is not bound by a watermark.
    fn lower(self, tables: &mut StateTables, inputs: &[Input<'_>]) -> Result<Lowered, SqlError> {
        let [left, right] = Input::two(inputs)?;
        let layout = classes::join_side(right.properties, &self.right.keys);
        let right_side = side_state(tables, "lookup", self.right, right.schema, layout);
        let matches = (!left.properties.append_only).then(|| {
            let SideLayout { storage, unique_key, .. } =
                classes::join_side(left.properties, &self.left_keys);
            let schema = matches_schema(right.schema);
            let table = tables.add("matches", AccessClass::RangeRead, RowStorage::Keyed, schema);
            Matches { table, identity: storage, unique_key }
        });
        Ok(Lowered::of(Operator::Lookup(graph::Lookup {
            outer: self.outer,
            left_keys: self.left_keys,
            left_vnode: self.left_vnode,
            right: right_side,
            residual: self.residual,
            output: self.output,
            matches,
        })))
    }
}

impl OperatorLine for Lookup {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        line(self, at)
    }
}

impl OperatorLine for graph::Lookup {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let [left, right] = at.inputs;
        let key = side_key(&self.right, &self.right.keys, right);
        at.keys.push((self.right.state.table, key));
        let mut tables = vec![self.right.state.table];
        if let Some(m) = &self.matches {
            let mut columns = self.left_keys.clone();
            columns.extend(&m.unique_key);
            let others = if m.identity == RowStorage::Keyed { "" } else { ", all others" };
            at.keys.push((m.table, format!("({}{others}, sequence)", list(left, &columns))));
            tables.push(m.table);
        }
        line(self, at) + &vnode(left, &self.left_vnode, &self.left_keys) + &state(&tables)
    }
}

/// A lookup join's kind, its equalities, what else must hold, and its columns.
fn line<S, M>(l: &graph::Lookup<S, M>, at: &LineContext<'_>) -> String {
    let [left, right] = at.inputs;
    let kind = if l.outer { "left outer" } else { "inner" };
    let keys = on([left, right], [&l.left_keys, &l.right.keys], " = ");
    let mut line = format!("Lookup join {kind}{keys} as of processing time");
    if let Some(residual) = &l.residual {
        let _ = write!(line, " where {}", text(residual, &pair_schema(left, right)));
    }
    format!("{line} → ({})", all_columns(at.output))
}
