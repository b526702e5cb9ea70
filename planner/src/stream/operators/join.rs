//! [`Join`]: a hash join on equal keys.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::Arc;

use arrow::datatypes::{FieldRef, Schema, SchemaRef};
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_common::access::RetentionBy;
use millrace_common::fault_injection::is_planted;
use millrace_functions::expr;
use millrace_graph as graph;
use millrace_graph::{
    DerivedWatermark, JoinKind, MarkStep, Operator, SideState, WatermarkTerm, pair_schema,
};
use millrace_rpc::catalog::RowStorage;

use super::{Input, LineContext, Lowered, OperatorLine, OperatorRules, RowIdentity};
use crate::explain::text::{all_columns, column, list, state, text, vnode};
use crate::passes::classes;
use crate::passes::classes::SideLayout;
use crate::passes::exchange::{Placed, exchange, gather, stays_single};
use crate::passes::identity::{Keyed, with_key};
use crate::passes::properties::{Distribution, Properties, merge};
use crate::passes::prune::{Map, Pruned, Pruning, all_kept, kept_at, prune_exact, select};
use crate::passes::watermark::{self, port};
use crate::stream::plan::{Join, JoinSide, Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn join(self, right: Stream, join: Join) -> Stream {
        let schema = joined(&self, &right, &join);
        Stream { op: Op::Join(join), inputs: vec![self, right], schema }
    }
}

/// The schema of a join's output.
pub fn joined(left: &Stream, right: &Stream, join: &Join) -> SchemaRef {
    let full = join.kind.output_fields(&left.schema, &right.schema);
    let fields: Vec<FieldRef> = join.output.iter().map(|&i| Arc::clone(&full[i])).collect();
    Arc::new(Schema::new(fields))
}

impl OperatorRules for Join {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let [left, right] = inputs else {
            return Properties::unknown(width, Distribution::Any);
        };
        let left_width = left.equal.len();
        let one_side = |p: &Properties, side: &JoinSide, extra: usize| {
            let mut p = p.clone();
            p.equal.extend(left_width..left_width + extra);
            p.append_only = false;
            p.distribution = Distribution::by_vnode(side.vnode.clone());
            p
        };
        let append_only = left.append_only && right.append_only;
        let full = match self.kind {
            JoinKind::LeftSemi => Properties { append_only, ..one_side(left, &self.left, 0) },
            JoinKind::RightSemi => Properties { append_only, ..one_side(right, &self.right, 0) },
            JoinKind::LeftAnti => one_side(left, &self.left, 0),
            JoinKind::RightAnti => one_side(right, &self.right, 0),
            JoinKind::LeftMark => one_side(left, &self.left, 1),
            JoinKind::Inner | JoinKind::LeftOuter | JoinKind::RightOuter | JoinKind::FullOuter => {
                pairs(self, left, right)
            }
        };
        full.select(&self.output)
    }

    fn watermarks(
        &self,
        inputs: &[Vec<DerivedWatermark>],
        widths: &[usize],
    ) -> Vec<DerivedWatermark> {
        // A null-aware join looks at rows of every key.
        if self.null_aware {
            return vec![];
        }
        let width = widths.first().copied().unwrap_or(0);
        let [left, right] = bounds(self, port(inputs, 0), port(inputs, 1), width);
        let full: Vec<DerivedWatermark> = match self.kind {
            JoinKind::LeftSemi | JoinKind::LeftAnti | JoinKind::LeftMark => left,
            JoinKind::RightSemi | JoinKind::RightAnti => right,
            JoinKind::Inner | JoinKind::LeftOuter | JoinKind::RightOuter | JoinKind::FullOuter => {
                let shifted = right
                    .into_iter()
                    .map(|m| DerivedWatermark { column: m.column + width, terms: m.terms });
                left.into_iter().chain(shifted).collect()
            }
        };
        watermark::pick(&full, &self.output)
    }

    fn keeps_state(&self) -> bool {
        true
    }

    fn place(&mut self, inputs: Vec<Placed>) -> Vec<Placed> {
        // NOT IN asks whether the right side has any row or NULL at all: one task must see it whole.
        let whole = self.null_aware && matches!(self.kind, JoinKind::LeftAnti | JoinKind::LeftMark);
        let (inputs, vnodes) = place_sides([&self.left.keys, &self.right.keys], whole, inputs);
        [self.left.vnode, self.right.vnode] = vnodes;
        inputs
    }

    fn identity(&mut self) -> Option<RowIdentity<'_>> {
        None
    }

    /// An inner join's rows are pairs: both keys together are unique.
    fn with_key(&self, stream: &Stream) -> Result<Option<Keyed>> {
        let [left, right] = stream.inputs.as_slice() else { return Ok(None) };
        if self.kind != JoinKind::Inner {
            return Ok(None);
        }
        match (with_key(left)?, with_key(right)?) {
            (Some(l), Some(r)) => with_keys(self, (left.width(), l), r).map(Some),
            _ => Ok(None),
        }
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let ([left, right], join, map) = prune_sides(self, at.inputs, at.required)?;
        Ok((left.join(right, join), map))
    }

    fn lower(self, tables: &mut StateTables, inputs: &[Input<'_>]) -> Result<Lowered, SqlError> {
        let [left, right] = Input::two(inputs)?;
        // A null-aware join keeps all rows under one key: its columns do not tell stored rows apart.
        let apart = !self.null_aware || is_planted("rows-under-one-key");
        let under = |keys: &[usize]| if apart { keys.to_vec() } else { vec![] };
        let left_layout = classes::join_side(left.properties, &under(&self.left.keys));
        let right_layout = classes::join_side(right.properties, &under(&self.right.keys));
        let kept = match self.null_aware {
            // It looks at rows of every key.
            true => [None, None],
            false => {
                let width = left.schema.fields().len();
                retained(&self, left.watermarks, right.watermarks, width)
            }
        };
        let join = graph::Join {
            kind: self.kind,
            left: side_state(tables, "join left", self.left, left.schema, left_layout),
            right: side_state(tables, "join right", self.right, right.schema, right_layout),
            residual: self.residual,
            null_aware: self.null_aware,
            null_equals_null: self.null_equals_null,
            output: self.output,
        };
        for (side, mark) in [&join.left, &join.right].into_iter().zip(kept) {
            if let Some(mark) = mark {
                tables.retain(side.state.table, RetentionBy::Value(mark.column), mark.terms);
            }
        }
        Ok(Lowered::of(Operator::Join(join)))
    }
}

/// Joins whose output has both sides' columns.
fn pairs(j: &Join, left: &Properties, right: &Properties) -> Properties {
    let width = left.equal.len();
    let shift = |columns: &BTreeSet<usize>| columns.iter().map(|c| c + width).collect();
    let right_unique: Vec<BTreeSet<usize>> = right.keys.iter().map(shift).collect();
    // A side whose rows each meet at most one row of the other side keeps its keys, unless it can
    // be padded with NULLs.
    let (pads_left, pads_right) = match j.kind {
        JoinKind::LeftOuter => (false, true),
        JoinKind::RightOuter => (true, false),
        JoinKind::FullOuter => (true, true),
        _ => (false, false),
    };
    let mut keys = Vec::new();
    if !pads_left && right.is_unique(&j.right.keys) {
        keys.extend(left.keys.iter().cloned());
    }
    if !pads_right && left.is_unique(&j.left.keys) {
        keys.extend(right_unique.iter().cloned());
    }
    // A full join pads both: (NULL, NULL) may come from either side.
    if !(pads_left && pads_right) {
        for l in &left.keys {
            keys.extend(right_unique.iter().map(|r| l.union(r).copied().collect()));
        }
    }
    let mut equal = left.equal.clone();
    equal.extend(right.equal.iter().map(|e| e + width));
    if j.kind == JoinKind::Inner {
        j.pairs().for_each(|(l, r)| merge(&mut equal, l, r + width));
    }
    let distribution = match j.kind {
        JoinKind::FullOuter if !j.left.vnode.is_empty() => Distribution::Any,
        JoinKind::RightOuter => {
            Distribution::by_vnode(j.right.vnode.iter().map(|c| c + width).collect())
        }
        _ => Distribution::by_vnode(j.left.vnode.clone()),
    };
    let product = match (left.max_rows, right.max_rows) {
        (Some(l), Some(r)) if !(pads_left || pads_right) => l.checked_mul(r),
        (Some(l), Some(r)) => l.checked_mul(r).map(|n| n.max(l).max(r).max(l + r)),
        _ => None,
    };
    Properties {
        append_only: j.kind == JoinKind::Inner && left.append_only && right.append_only,
        keys,
        equal,
        distribution,
        max_rows: product,
    }
}

/// What a join promises of each side's columns. Every change of the output contains a change of one
/// side; a column keeps a mark where the other side's rows are bound to it, by equality or within an
/// interval: `l ≥ r + c` with a new `r` at its watermark means that `l` is not below that plus `c`.
///
/// State of a side below the mark of such a column is never reached again.
fn bounds<S>(
    j: &graph::Join<S>,
    left: &[DerivedWatermark],
    right: &[DerivedWatermark],
    width: usize,
) -> [Vec<DerivedWatermark>; 2] {
    let mut out = [vec![], vec![]];
    let mut add =
        |side: usize, column: usize, own: &[WatermarkTerm], other: &[WatermarkTerm], shift: i64| {
            if out[side].iter().any(|m: &DerivedWatermark| m.column == column) {
                return;
            }
            let step = [MarkStep::Add(shift)];
            let terms =
                [own.to_vec(), watermark::then(other, if shift == 0 { &[] } else { &step })]
                    .concat();
            out[side].push(DerivedWatermark { column, terms });
        };
    for (l, r) in j.pairs() {
        if let (Some(l_terms), Some(r_terms)) = (watermark::of(left, l), watermark::of(right, r)) {
            add(0, l, l_terms, r_terms, 0);
            add(1, r, r_terms, l_terms, 0);
        }
    }
    for (l, r, shift) in j.residual.iter().flat_map(watermark::at_least) {
        // l ≥ r + shift, of two columns of the pair.
        match (l < width, r < width) {
            (true, false) => {
                if let (Some(own), Some(other)) =
                    (watermark::of(left, l), watermark::of(right, r - width))
                {
                    add(0, l, own, other, shift);
                }
            }
            (false, true) => {
                if let (Some(own), Some(other)) =
                    (watermark::of(right, l - width), watermark::of(left, r))
                {
                    add(1, l - width, own, other, shift);
                }
            }
            _ => {}
        }
    }
    out
}

/// By which column, and down to which bound, each side's rows are kept.
///
/// A row that no change can reach is not needed for pairs, but an outer, semi or anti join also counts, when a
/// row of a preserved side is read back, the rows of the other side that it has met: those are kept for as long
/// as a row that may have met them is within reach.
fn retained<S>(
    j: &graph::Join<S>,
    left: &[DerivedWatermark],
    right: &[DerivedWatermark],
    width: usize,
) -> [Option<DerivedWatermark>; 2] {
    let bounds = bounds(j, left, right, width);
    let find = |side: usize, c: usize| bounds[side].iter().find(|m| m.column == c).cloned();
    // By a column of the key: the rows of a key go together.
    for (l, r) in j.pairs() {
        if let (Some(l), Some(r)) = (find(0, l), find(1, r)) {
            return [Some(l), Some(r)];
        }
    }
    let own = [bounds[0].first().cloned(), bounds[1].first().cloned()];
    let mut kept = own.clone();
    let preserved = preserved(j.kind);
    let at_least: Vec<_> = j.residual.iter().flat_map(watermark::at_least).collect();
    for side in [0, 1] {
        let Some(mark) = kept[side].as_mut().filter(|_| preserved[1 - side]) else { continue };
        let place = |side: usize, c: usize| if side == 0 { c } else { c + width };
        let shift = own[1 - side].as_ref().and_then(|other| {
            let pair = (place(side, mark.column), place(1 - side, other.column));
            let found = at_least.iter().find(|(a, b, _)| (*a, *b) == pair);
            found.map(|(_, _, shift)| watermark::then(&other.terms, &[MarkStep::Add(*shift)]))
        });
        match shift {
            Some(terms) => mark.terms.extend(terms),
            None => kept[side] = None,
        }
    }
    kept
}

/// Sides whose rows appear in the output by themselves.
fn preserved(kind: JoinKind) -> [bool; 2] {
    use JoinKind as K;
    match kind {
        K::Inner => [false, false],
        K::LeftOuter | K::LeftSemi | K::LeftAnti | K::LeftMark => [true, false],
        K::RightOuter | K::RightSemi | K::RightAnti => [false, true],
        K::FullOuter => [true, true],
    }
}

/// Brings rows that agree on the keys together. `whole`: one task sees all rows. Gives the columns that decide the
/// vnode, of each side.
pub fn place_sides(
    [left_keys, right_keys]: [&[usize]; 2],
    whole: bool,
    inputs: Vec<Placed>,
) -> (Vec<Placed>, [Vec<usize>; 2]) {
    let Ok([left, right]) = <[Placed; 2]>::try_from(inputs) else {
        return (vec![], [vec![], vec![]]);
    };
    if whole || left_keys.is_empty() || (stays_single(&left.1) && stays_single(&right.1)) {
        return (vec![gather(left), gather(right)], [vec![], vec![]]);
    }
    let at = |keys: &[usize], positions: &[usize]| -> Vec<usize> {
        positions.iter().map(|&p| keys[p]).collect()
    };
    let left_fits = left.1.distributed_within(left_keys);
    let right_fits = right.1.distributed_within(right_keys);
    let (left, right, vnode) = match (left_fits, right_fits) {
        (Some(l), Some(r)) if l == r => (left, right, l),
        (Some(l), _) => {
            let hash = at(right_keys, &l);
            (left, exchange(right, hash), l)
        }
        (None, Some(r)) => {
            let hash = at(left_keys, &r);
            (exchange(left, hash), right, r)
        }
        (None, None) => {
            let vnode = (0..left_keys.len()).collect();
            (exchange(left, left_keys.to_vec()), exchange(right, right_keys.to_vec()), vnode)
        }
    };
    (vec![left, right], [at(left_keys, &vnode), at(right_keys, &vnode)])
}

/// An inner join's rows are pairs: both keys together are unique.
fn with_keys(
    j: &Join,
    (left_width, (left, left_key)): (usize, Keyed),
    (right, right_key): Keyed,
) -> Result<Keyed> {
    let grown = left.width();
    let place = |c: usize| if c < left_width { c } else { c - left_width + grown };
    let mut j = j.clone();
    if let Some(residual) = &j.residual {
        let pair = pair_schema(&left.schema, &right.schema);
        j.residual =
            Some(expr::replace_columns(residual, |c| Some(expr::column(&pair, place(c))))?);
    }
    j.output = j.output.iter().map(|&c| place(c)).collect();
    let full = left_key.into_iter().chain(right_key.into_iter().map(|k| k + grown));
    let mut key = Vec::new();
    for k in full {
        let have = j.output.iter().position(|&c| c == k);
        key.push(have.unwrap_or(j.output.len()));
        if have.is_none() {
            j.output.push(k);
        }
    }
    Ok((left.join(right, j), key))
}

/// A join over pruned sides, whose columns it refers to.
pub fn prune_sides(
    mut j: Join,
    inputs: Vec<Stream>,
    required: &BTreeSet<usize>,
) -> Result<([Stream; 2], Join, Map)> {
    let Ok([left, right]) = <[Stream; 2]>::try_from(inputs) else {
        return datafusion::common::internal_err!("a join has not exactly two inputs");
    };
    let (width, right_width) = (left.width(), right.width());
    // What of the join's output is kept, and which columns of the sides that and the join itself read.
    let old_schema = j.kind.output_fields(&left.schema, &right.schema);
    let fields: Vec<FieldRef> = j.output.iter().map(|&c| Arc::clone(&old_schema[c])).collect();
    let (kept, _, map) = select(&Arc::new(Schema::new(fields)), required);
    let output: Vec<usize> = kept.iter().map(|&k| j.output[k]).collect();

    let right_only = matches!(j.kind, JoinKind::RightSemi | JoinKind::RightAnti);
    let mark = |c: usize| j.kind == JoinKind::LeftMark && c == width;
    let mut needed_left: BTreeSet<usize> = j.left.keys.iter().copied().collect();
    let mut needed_right: BTreeSet<usize> = j.right.keys.iter().copied().collect();
    let read =
        output.iter().filter(|c| !mark(**c)).map(|&c| c + if right_only { width } else { 0 });
    for c in read.chain(j.residual.iter().flat_map(expr::columns_of)) {
        if c < width {
            needed_left.insert(c);
        } else {
            needed_right.insert(c - width);
        }
    }
    let (left, left_map) = prune_exact(left, &needed_left)?;
    let (right, right_map) = prune_exact(right, &needed_right)?;

    let new_width = left.width();
    let pair_map: Map = (0..width + right_width)
        .map(|c| match c.checked_sub(width) {
            None => left_map[c],
            Some(r) => right_map[r].map(|r| r + new_width),
        })
        .collect();
    for (side, map) in [(&mut j.left, &left_map), (&mut j.right, &right_map)] {
        side.keys = all_kept(map, &side.keys)?;
        side.vnode = all_kept(map, &side.vnode)?;
    }
    if let Some(residual) = &j.residual {
        let pair = pair_schema(&left.schema, &right.schema);
        j.residual = Some(expr::remap(residual, &pair_map, &pair)?);
    }
    j.output = output
        .into_iter()
        .map(|c| match c {
            c if mark(c) => Ok(new_width),
            c if right_only => kept_at(&right_map, c),
            c => kept_at(&pair_map, c),
        })
        .collect::<Result<_>>()?;
    Ok(([left, right], j, map))
}

/// A side's state table.
pub fn side_state(
    tables: &mut StateTables,
    name: &str,
    side: JoinSide,
    schema: &SchemaRef,
    layout: SideLayout,
) -> graph::JoinSide {
    let SideLayout { storage, unique_key, unique_per_key, class } = layout;
    let table = tables.add(name, class, storage, Arc::clone(schema));
    side.with_state(SideState { table, storage, unique_key, unique_per_key })
}

impl OperatorLine for Join {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        line(self, at)
    }
}

impl OperatorLine for graph::Join {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        for (side, input) in [&self.left, &self.right].into_iter().zip(at.inputs) {
            let keys: &[usize] = if self.null_aware { &[] } else { &side.keys };
            at.keys.push((side.state.table, side_key(side, keys, input)));
        }
        line(self, at)
            + &vnode(at.inputs[0], &self.left.vnode, &self.left.keys)
            + &state(&[self.left.state.table, self.right.state.table])
    }
}

/// What a side's rows are stored under; `keys`: what comes before what tells them apart.
pub fn side_key(side: &graph::JoinSide, keys: &[usize], input: &Schema) -> String {
    let mut columns = keys.to_vec();
    columns.extend(&side.state.unique_key);
    let mut key = list(input, &columns);
    match side.state.storage {
        RowStorage::Keyed => {}
        RowStorage::Multiset => key.push_str(if key.is_empty() { "all" } else { ", all others" }),
        RowStorage::Append => key.push_str(if key.is_empty() { "sequence" } else { ", sequence" }),
    }
    format!("({key})")
}

/// A join's kind, its equalities, what else must hold, and its columns.
fn line<S>(j: &graph::Join<S>, at: &LineContext<'_>) -> String {
    let kind = match j.kind {
        JoinKind::Inner => "inner",
        JoinKind::LeftOuter => "left outer",
        JoinKind::RightOuter => "right outer",
        JoinKind::FullOuter => "full outer",
        JoinKind::LeftSemi => "left semi",
        JoinKind::RightSemi => "right semi",
        JoinKind::LeftAnti => "left anti",
        JoinKind::RightAnti => "right anti",
        JoinKind::LeftMark => "left mark",
    };
    let equals = if j.null_equals_null { " is not distinct from " } else { " = " };
    let [left, right] = at.inputs;
    let mut line =
        format!("Join {kind}{}", on([left, right], [&j.left.keys, &j.right.keys], equals));
    if let Some(residual) = &j.residual {
        let _ = write!(line, " where {}", text(residual, &pair_schema(left, right)));
    }
    if j.null_aware {
        line.push_str(", null aware");
    }
    format!("{line} → ({})", all_columns(at.output))
}

/// The equalities of a join.
pub fn on(inputs: [&Schema; 2], keys: [&[usize]; 2], equals: &str) -> String {
    let pair = |(&l, &r): (&usize, &usize)| column(inputs[0], l) + equals + &column(inputs[1], r);
    let pairs: Vec<String> = keys[0].iter().zip(keys[1]).map(pair).collect();
    if pairs.is_empty() { String::new() } else { format!(" on ({})", pairs.join(", ")) }
}
