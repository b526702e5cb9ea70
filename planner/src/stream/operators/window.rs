//! [`Window`]: window functions over the rows of each group.

use std::fmt::Write;
use std::sync::Arc;

use arrow::datatypes::{Field, FieldRef, Schema};
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_common::access::{AccessClass, RetentionBy};
use millrace_functions::asof::LATEST;
use millrace_functions::expr::{self, ExprRef};
use millrace_functions::frame::Edge;
use millrace_functions::framed::Framed;
use millrace_functions::session::SESSION_END;
use millrace_functions::window_call::{
    RankFunction, Reach, WindowCall, follows_frame, session_gap,
};
use millrace_graph as graph;
use millrace_graph::{Closing, DerivedWatermark, MarkStep, Operator, WindowState};
use millrace_rpc::catalog::RowStorage;

use super::{Input, LineContext, Lowered, OperatorLine, OperatorRules, RowIdentity};
use crate::explain::text::{by_order, list, ordered_key, state, text, told_apart, vnode};
use crate::passes::classes;
use crate::passes::exchange::{Placed, meet_only};
use crate::passes::identity::Keyed;
use crate::passes::properties::Properties;
use crate::passes::prune::{
    Pruned, Pruning, all_kept, below, kept_at, only, prune_columns, prune_exact, with,
};
use crate::passes::watermark::{self, port};
use crate::stream::plan::{Identity, Op, Stream, Window};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn window(self, window: Window) -> Stream {
        let mut fields: Vec<FieldRef> = self.schema.fields().iter().cloned().collect();
        for call in &window.calls {
            let (name, output) = (&call.function, call.output_type.clone());
            fields.push(Arc::new(Field::new(name, output, call.numbering.is_none())));
        }
        let schema = Arc::new(Schema::new(fields));
        Stream { op: Op::Window(window), inputs: vec![self], schema }
    }
}

impl OperatorRules for Window {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let mut p = Properties::of_input(inputs, width);
        p.append_only = false;
        for call in &self.calls {
            let column = p.equal.len();
            p.equal.push(column);
            if call.numbering == Some(RankFunction::RowNumber) {
                p.keys.push(self.group.iter().copied().chain([column]).collect());
            }
        }
        p
    }

    fn watermarks(
        &self,
        inputs: &[Vec<DerivedWatermark>],
        widths: &[usize],
    ) -> Vec<DerivedWatermark> {
        let input = port(inputs, 0);
        let mut out: Vec<DerivedWatermark> =
            input.iter().filter(|m| self.group.contains(&m.column)).cloned().collect();
        let time = self.order.first().and_then(|o| watermark::of(input, o.0));
        if let (Some(terms), Some(&(column, _))) = (time, self.order.first())
            && follows_order(self)
            && watermark::of(&out, column).is_none()
        {
            out.push(DerivedWatermark { column, terms: terms.to_vec() });
        }
        if let (Some(time), Some(&width)) = (time, widths.first()) {
            // A session that has ended at the watermark does not change any more.
            let ends = self.calls.iter().enumerate().filter(|(_, c)| c.function == SESSION_END);
            out.extend(ends.map(|(i, _)| DerivedWatermark {
                column: width + i,
                terms: watermark::then(time, &[MarkStep::Add(1)]),
            }));
        }
        out
    }

    fn keeps_state(&self) -> bool {
        true
    }

    fn place(&mut self, inputs: Vec<Placed>) -> Vec<Placed> {
        meet_only(inputs, &self.group, &mut self.vnode)
    }

    fn identity(&mut self) -> Option<RowIdentity<'_>> {
        Some(RowIdentity { given: group_and_order(self), identity: &mut self.state })
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    /// Calls that nobody reads are not computed; without any the rows are the input's.
    fn prune(mut self, at: Pruning<'_>) -> Result<Pruned> {
        let input = only(at.inputs)?;
        let width = input.width();
        let below = below(at.required, width);
        let read: Vec<bool> =
            (0..self.calls.len()).map(|i| at.required.contains(&(width + i))).collect();
        let mut reads = read.iter();
        self.calls.retain(|_| reads.next() == Some(&true));
        if self.calls.is_empty() {
            let (input, mut map) = prune_columns(input, &below)?;
            map.extend(read.iter().map(|_| None));
            return Ok((input, map));
        }
        let own = self.columns_read().into_iter().chain(self.state.0.iter().copied());
        let (input, mut map) = prune_exact(input, &with(&below, own))?;
        self.group = all_kept(&map, &self.group)?;
        self.vnode = all_kept(&map, &self.vnode)?;
        self.state = Identity(all_kept(&map, &self.state.0)?);
        for o in &mut self.order {
            o.0 = kept_at(&map, o.0)?;
        }
        for e in self.calls.iter_mut().flat_map(|c| c.args.iter_mut().chain(&mut c.filter)) {
            *e = expr::remap(e, &map, &input.schema)?;
        }
        let mut next = input.width();
        for kept in read {
            map.push(kept.then_some(next));
            next += usize::from(kept);
        }
        Ok((input.window(self), map))
    }

    fn lower(self, tables: &mut StateTables, inputs: &[Input<'_>]) -> Result<Lowered, SqlError> {
        let input = Input::one(inputs)?;
        let (storage, unique_key) = classes::top_n_rows(input.properties, &group_and_order(&self));
        let schema = Arc::clone(input.schema);
        let table = tables.add("window", AccessClass::RangeRead, storage, schema);
        tables.retain_by_group(table, &self.group, input.watermarks);
        let closing = closing(&self, tables, input);
        let state = WindowState { table, storage, unique_key, closing };
        Ok(Lowered::of(Operator::Window(self.with_state(state))))
    }
}

fn group_and_order(w: &Window) -> Vec<usize> {
    w.group.iter().copied().chain(w.order.iter().map(|o| o.0)).collect()
}

/// Whether a row that comes or goes changes no result of a row that is earlier in the order's first column.
fn follows_order(w: &Window) -> bool {
    let Some((_, order)) = w.order.first() else { return false };
    if order.descending || w.calls.is_empty() {
        return false;
    }
    // Of ASOF joins: a right row changes what comes after it, and one without a time is none.
    let asof = w.calls.iter().all(|c| c.function == LATEST);
    // A row without a time, of which nothing is promised, has to stand after all others.
    let back = !order.nulls_first && w.calls.iter().all(looks_back);
    asof || back
}

fn looks_back(call: &WindowCall) -> bool {
    match Reach::of(call) {
        Reach::Rows { before, .. } | Reach::Peers { before, .. } => before == Some(0),
        Reach::Shift { .. } => true,
        Reach::Values { frame } => {
            matches!(frame.end, Edge::Current | Edge::At { ahead: false, .. })
        }
        Reach::Session { .. } | Reach::Carry { .. } => false,
    }
}

/// What sessions and ASOF joins over a time with a watermark need to let rows go.
fn closing(w: &Window, tables: &mut StateTables, input: Input<'_>) -> Option<Closing> {
    let &(column, _) = w.order.first()?;
    let terms = watermark::of(input.watermarks, column)?;
    let gap = session_gap(w.calls.first()?);
    let asof = w.calls.iter().all(|c| c.function == LATEST);
    if w.calls.iter().any(|c| session_gap(c) != gap) || (gap.is_none() && !asof) {
        return None;
    }
    let gap = gap.unwrap_or(0);
    let columns = [column].into_iter().chain(w.group.iter().copied());
    let fields = columns.map(|c| Arc::clone(&input.schema.fields()[c])).collect::<Vec<_>>();
    let schema = Arc::new(Schema::new(fields));
    let table = tables.add("closing times", AccessClass::RangeRead, RowStorage::Keyed, schema);
    tables.retain(table, RetentionBy::Key, terms.to_vec());
    Some(Closing { column, gap, table })
}

impl OperatorLine for Window {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        line(self, at.inputs[0]) + &told_apart(&self.state, at.inputs[0])
    }
}

impl OperatorLine for graph::Window {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let input = at.inputs[0];
        let WindowState { table, storage, unique_key, closing } = &self.state;
        let mut line = line(self, input);
        let key = ordered_key(&self.group, &self.order, unique_key, *storage, input);
        at.keys.push((*table, key));
        let mut tables = vec![*table];
        if let Some(closing) = closing {
            line.push_str(", closed by watermark");
            let columns: Vec<usize> =
                [closing.column].into_iter().chain(self.group.clone()).collect();
            at.keys.push((closing.table, format!("({})", list(input, &columns))));
            tables.push(closing.table);
        }
        line + &vnode(input, &self.vnode, &self.group) + &state(&tables)
    }
}

/// Window calls and what they are over.
fn line<S>(window: &graph::Window<S>, input: &Schema) -> String {
    let calls: Vec<String> = window.calls.iter().map(|c| window_call(c, input)).collect();
    format!("Window {}{}", calls.join(", "), by_order(&window.group, &window.order, input))
}

fn window_call(c: &WindowCall, input: &Schema) -> String {
    if let Some(framed) = Framed::of(c) {
        return framed_call(&framed, &c.args, input);
    }
    let args: Vec<String> = c.args.iter().map(|e| text(e, input)).collect();
    let distinct = if c.distinct { "distinct " } else { "" };
    let mut call = format!("{}({distinct}{})", c.function, args.join(", "));
    if c.ignore_nulls {
        call.push_str(" ignore nulls");
    }
    if let Some(filter) = &c.filter {
        let _ = write!(call, " filter ({})", text(filter, input));
    }
    if follows_frame(c) {
        let frame = c.frame.to_string().to_lowercase();
        let _ = write!(call, " {frame}");
    }
    call
}

/// A call over a frame of ours, as it was written.
fn framed_call(framed: &Framed, args: &[ExprRef], input: &Schema) -> String {
    let (filter, args) = framed.arguments(args);
    let args: Vec<String> = args.iter().map(|e| text(e, input)).collect();
    let distinct = if framed.distinct { "distinct " } else { "" };
    let mut call = format!("{}({distinct}{})", framed.function, args.join(", "));
    if framed.ignore_nulls {
        call.push_str(" ignore nulls");
    }
    if let Some(filter) = filter {
        let _ = write!(call, " filter ({})", text(filter, input));
    }
    if !["lag", "lead"].contains(&framed.function.as_str()) {
        let _ = write!(call, " {}", framed.frame);
    }
    call
}

#[cfg(test)]
mod tests {
    use arrow::compute::SortOptions;
    use millrace_common::RelationId;
    use millrace_functions::window_call::numbering;
    use millrace_graph::WatermarkTerm;

    use super::*;

    #[test]
    fn an_order_keeps_its_mark_where_no_result_looks_ahead() {
        let over = |call: WindowCall, options: SortOptions| {
            let (group, order) = (vec![1], vec![(0, options)]);
            let window = Window {
                group,
                order,
                calls: vec![call],
                vnode: vec![],
                state: Identity::default(),
            };
            let term = WatermarkTerm { relation: RelationId(1), column: 0, steps: vec![] };
            let input = vec![DerivedWatermark { column: 0, terms: vec![term] }];
            !window.watermarks(&[input], &[2]).is_empty()
        };
        let options = |descending, nulls_first| SortOptions { descending, nulls_first };
        let call = |name: &str| WindowCall {
            function: name.into(),
            numbering: None,
            ..numbering(RankFunction::RowNumber)
        };
        assert!(over(numbering(RankFunction::Rank), options(false, false)));
        assert!(over(call("lag"), options(false, false)));
        assert!(!over(call("lag"), options(false, true)));
        assert!(!over(call("lag"), options(true, false)));
        assert!(!over(call("lead"), options(false, false)));
        assert!(!over(call("ntile"), options(false, false)));
    }
}
