//! Stream plan with exchanges → fragments, nodes and state tables.
//!
//! A fragment ends at an exchange: what is below becomes a fragment of its own, pushed before its
//! consumer. State tables are numbered as their operators are emitted, children first; table 0 is
//! the relation's rows.

use std::sync::Arc;

use arrow::datatypes::{Field, Schema, SchemaRef};
use millrace_common::access::{AccessClass, RetentionBy};
use millrace_common::fault_injection::is_planted;
use millrace_common::{RelationId, SqlError, SqlState};
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::asof::LATEST;
use millrace_functions::expr;
use millrace_functions::window_call::session_gap;
use millrace_graph::state::{accumulator_schema, matches_schema};
use millrace_graph::{
    self, AggCall, DerivedWatermark, Edge, EdgeKind, Fragment, JobGraph, JoinSide, Node, Operator,
    RelationLayout, Retention, SideState, StateTable, TopNState, ValueTable, WatermarkTerm,
    WindowState,
};
use millrace_rpc::catalog::{RelationKind, RowStorage};

use crate::passes::classes::{self, SideLayout};
use crate::passes::exchange::{Placed, exchange};
use crate::passes::properties::{Distribution, Properties};
use crate::passes::watermark;
use crate::stream::plan::{self, Op, Stream};
use crate::stream::{Sink, SinkKey};

/// Decides how the relation's rows lie and brings them to the tasks that own them.
///
/// Keyed if a unique key is known, preferably one that needs no exchange; else under an arrival
/// sequence if nothing is ever retracted; else a multiset. A blackhole takes rows wherever they are.
///
/// `shown`: the leading columns that the query has; those after them are hidden.
pub fn lay_out(
    root: Placed,
    sink: &Sink,
    shown: usize,
) -> Result<(Stream, RelationLayout), SqlError> {
    let p = &root.1;
    let derived = |visible: bool| {
        p.keys
            .iter()
            .map(|k| k.iter().copied().collect::<Vec<_>>())
            .filter(|k| !visible || k.iter().all(|c| *c < shown))
            .min_by_key(|k| (p.distributed_within(k).is_none(), k.len()))
    };
    let key = match sink {
        Sink::Publish(SinkKey::Given(key)) if !p.is_unique(key) => return Err(not_unique()),
        Sink::Publish(SinkKey::Given(key)) => Some(key.clone()),
        Sink::Publish(SinkKey::Derived) => Some(derived(true).ok_or_else(no_key)?),
        // A key that the target can see serves to pair old and new rows.
        Sink::Publish(SinkKey::None) => derived(true).or_else(|| derived(false)),
        Sink::Materialize | Sink::Blackhole => derived(false),
    };
    let (storage, key) = match (key, p.append_only) {
        (Some(key), _) => (RowStorage::Keyed, key),
        (None, true) => (RowStorage::Append, vec![]),
        (None, false) => (RowStorage::Multiset, vec![]),
    };
    let all: Vec<usize> = (0..root.0.width()).collect();
    let meeting = if storage == RowStorage::Keyed { key.clone() } else { all };
    let (root, distribution) = match (&p.distribution, storage) {
        (Distribution::Singleton, _) | (_, RowStorage::Append) => (root, vec![]),
        _ if *sink == Sink::Blackhole => (root, vec![]),
        _ => match p.distributed_within(&meeting) {
            Some(at) => (root, at.into_iter().map(|i| meeting[i]).collect()),
            None => (exchange(root, meeting.clone()), meeting),
        },
    };
    let layout = RelationLayout {
        schema: Arc::clone(&root.0.schema),
        storage,
        key,
        distribution,
        append_only: root.1.append_only,
        marks: watermark::marks(&root.0),
    };
    Ok((root.0, layout))
}

fn no_key() -> SqlError {
    SqlError::new(SqlState::INVALID_OBJECT_DEFINITION, "the query has no unique key to upsert by")
        .with_hint("Select the key columns of its tables, group by what identifies a row, or use append-only or Debezium format.")
}

fn not_unique() -> SqlError {
    SqlError::new(
        SqlState::INVALID_OBJECT_DEFINITION,
        "the query is not known to be unique by the sink's primary_key",
    )
    .with_detail("Two rows with one key would overwrite each other in the target.")
    .with_hint("Keep one row of each key, with GROUP BY or row_number() … = 1, or add the columns that make a row unique.")
}

/// Cuts the plan into fragments.
pub fn fragment(root: Stream, layout: RelationLayout, sink: &Sink) -> Result<JobGraph, SqlError> {
    let rows = StateTable {
        name: "rows".into(),
        class: classes::relation_class(layout.storage),
        value_schema: Arc::clone(&layout.schema),
        storage: layout.storage,
        relation: true,
        retention: None,
    };
    let mut builder = Builder { fragments: vec![], tables: vec![rows] };
    let mut open = Open::default();
    let (node, Known { properties: p, marks }) = builder.emit(root, &mut open)?;
    let op = match sink {
        Sink::Materialize => Operator::Materialize,
        Sink::Blackhole => Operator::Blackhole,
        Sink::Publish(_) => Operator::Sink,
    };
    open.nodes.push(Node {
        op,
        inputs: vec![node],
        schema: Arc::clone(&layout.schema),
        append_only: p.append_only,
        marks,
    });
    builder.close(open, &p, vec![]);
    Ok(JobGraph { fragments: builder.fragments, tables: builder.tables, output: layout })
}

/// What is known of a subtree's rows.
struct Known {
    properties: Properties,
    marks: Vec<DerivedWatermark>,
}

/// A fragment under construction.
#[derive(Default)]
struct Open {
    nodes: Vec<Node>,
    /// Fragments whose rows it takes.
    producers: Vec<usize>,
}

impl Open {
    /// Adds a node with its columns in the order of its state, then one with them in the plan's.
    fn push_reordered(&mut self, node: Node, order: &[usize]) {
        let Node { op, inputs, schema, append_only, marks } = node;
        let fields: Vec<_> = order.iter().map(|&c| Arc::clone(&schema.fields()[c])).collect();
        let below = Arc::new(Schema::new(fields));
        let back = |c: usize| order.iter().position(|&o| o == c).unwrap_or(c);
        let width = schema.fields().len();
        let exprs = (0..width).map(|c| expr::column(&below, back(c))).collect();
        let moved = marks
            .iter()
            .map(|m| DerivedWatermark { column: back(m.column), terms: m.terms.clone() })
            .collect();
        self.nodes.push(Node { op, inputs, schema: below, append_only, marks: moved });
        let inputs = vec![self.nodes.len() - 1];
        let op = Operator::Project { exprs };
        self.nodes.push(Node { op, inputs, schema, append_only, marks });
    }
}

struct Builder {
    fragments: Vec<Fragment>,
    tables: Vec<StateTable>,
}

impl Builder {
    fn close(&mut self, open: Open, p: &Properties, outputs: Vec<Edge>) -> usize {
        let index = self.fragments.len();
        for producer in open.producers {
            for edge in &mut self.fragments[producer].outputs {
                edge.to = index;
            }
        }
        let singleton = p.distribution == Distribution::Singleton;
        self.fragments.push(Fragment { nodes: open.nodes, singleton, outputs });
        index
    }

    fn table(
        &mut self,
        name: &str,
        class: AccessClass,
        storage: RowStorage,
        schema: SchemaRef,
    ) -> usize {
        self.tables.push(StateTable {
            name: name.into(),
            class,
            value_schema: schema,
            storage,
            relation: false,
            retention: None,
        });
        self.tables.len() - 1
    }

    /// Adds a subtree to the open fragment; gives its node and what is known of it.
    fn emit(&mut self, stream: Stream, open: &mut Open) -> Result<(usize, Known), SqlError> {
        let Stream { op, inputs, schema } = stream;
        let width = schema.fields().len();
        if let Op::Exchange { hash } = &op {
            return self.receive(&op, hash, inputs, schema, open);
        }
        let schemas: Vec<SchemaRef> = inputs.iter().map(|i| Arc::clone(&i.schema)).collect();
        let mut nodes = Vec::with_capacity(inputs.len());
        let mut below = Vec::with_capacity(inputs.len());
        let mut marks = Vec::with_capacity(inputs.len());
        for input in inputs {
            let (node, known) = self.emit(input, open)?;
            nodes.push(node);
            below.push(known.properties);
            marks.push(known.marks);
        }
        let widths: Vec<usize> = schemas.iter().map(|s| s.fields().len()).collect();
        let properties = Properties::derive(&op, width, &below);
        let own = watermark::timed(watermark::derive(&op, &marks, &widths), &schema);
        let append_only = properties.append_only;
        let (op, order) = match op {
            Op::Aggregate(mut a) => {
                let order = closing_first(&mut a, marks.first());
                (Op::Aggregate(a), order)
            }
            op => (op, None),
        };
        let mut op = self.operator(op, &schemas, &below)?;
        if let (Operator::Window(w), [input], [marks]) = (&mut op, schemas.as_slice(), &*marks) {
            w.state.closing = self.closing(w, input, marks);
        }
        for (table, by, terms) in cleaned(&op, &marks, &widths) {
            if let Some(table) = self.tables.get_mut(table) {
                table.retention = Some(Retention { by, terms });
            }
        }
        match order {
            None => {
                open.nodes.push(Node { op, inputs: nodes, schema, append_only, marks: own.clone() })
            }
            Some(order) => {
                let node = Node { op, inputs: nodes, schema, append_only, marks: own.clone() };
                open.push_reordered(node, &order);
            }
        }
        Ok((open.nodes.len() - 1, Known { properties, marks: own }))
    }

    /// Adds an exchange, whose input becomes a fragment of its own.
    fn receive(
        &mut self,
        op: &Op,
        hash: &[usize],
        inputs: Vec<Stream>,
        schema: SchemaRef,
        open: &mut Open,
    ) -> Result<(usize, Known), SqlError> {
        let width = schema.fields().len();
        let Some(input) = inputs.into_iter().next() else {
            return Err(SqlError::internal("an exchange has no input"));
        };
        let (fragment, below) = self.producer(input, hash.to_vec())?;
        let p = Properties::derive(op, width, &[below.properties]);
        open.producers.push(fragment);
        let node = Node {
            op: Operator::Exchange { fragment, output: 0 },
            inputs: vec![],
            schema,
            append_only: p.append_only,
            marks: below.marks.clone(),
        };
        open.nodes.push(node);
        Ok((open.nodes.len() - 1, Known { properties: p, marks: below.marks }))
    }

    /// A closed fragment that feeds an exchange; its consumer is filled in when that is closed.
    fn producer(&mut self, input: Stream, hash: Vec<usize>) -> Result<(usize, Known), SqlError> {
        let mut open = Open::default();
        let (from, known) = self.emit(input, &mut open)?;
        let edge = Edge { from, to: usize::MAX, carries: EdgeKind::Rows { hash } };
        let index = self.close(open, &known.properties, vec![edge]);
        Ok((index, known))
    }

    #[deny(clippy::wildcard_enum_match_arm)]
    fn operator(
        &mut self,
        op: Op,
        schemas: &[SchemaRef],
        inputs: &[Properties],
    ) -> Result<Operator, SqlError> {
        let wrong = || SqlError::internal("an operator has the wrong number of inputs");
        let one = || match (schemas, inputs) {
            ([schema], [p]) => Ok((schema, p)),
            _ => Err(wrong()),
        };
        let two = || match (schemas, inputs) {
            ([left, right], [l, r]) => Ok(([left, right], [l, r])),
            _ => Err(wrong()),
        };
        Ok(match op {
            Op::Scan { relation, columns } => {
                let id = RelationId(relation.id);
                if relation.kind() == RelationKind::Source {
                    Operator::Source { relation: id, columns }
                } else {
                    Operator::Subscribe { relation: id, columns }
                }
            }
            Op::Values { batch } => Operator::Values { batch },
            Op::Filter { predicate } => Operator::Filter { predicate },
            Op::Project { exprs } => Operator::Project { exprs },
            Op::Union => Operator::Union,
            Op::Hop { time_column, size_us, slide_us, offset_us } => {
                Operator::Hop { time_column, size_us, slide_us, offset_us }
            }
            Op::Repeat { times_column } => Operator::Repeat { times_column },
            Op::Unnest { lists, keep_empty } => Operator::Unnest { lists, keep_empty },
            Op::Expand(e) => Operator::Expand(e),
            Op::Aggregate(a) => {
                let (schema, p) = one()?;
                self.aggregate(a, schema, p)
            }
            Op::Join(j) => {
                let (schemas, p) = two()?;
                self.join(j, schemas, p)
            }
            Op::Lookup(j) => {
                let (schemas, p) = two()?;
                self.lookup(j, schemas, p)
            }
            Op::TopN(t) => {
                let (schema, p) = one()?;
                self.top_n(t, schema, p)
            }
            Op::Window(w) => {
                let (schema, p) = one()?;
                self.window(w, schema, p)
            }
            Op::Stamp { add_us } => Operator::Stamp { add_us },
            Op::WindowClose(h) => Operator::WindowClose(self.hold("held back", h, one()?.0)),
            Op::TemporalUpperBound(h) => {
                Operator::TemporalUpperBound(self.hold("to expire", h, one()?.0))
            }
            Op::TemporalLowerBound(h) => {
                Operator::TemporalLowerBound(self.hold("to appear", h, one()?.0))
            }
            Op::Exchange { .. } => {
                return Err(SqlError::internal("an exchange is not part of a fragment"));
            }
        })
    }

    fn aggregate(&mut self, a: plan::Aggregate, input: &SchemaRef, p: &Properties) -> Operator {
        // (arg, filter, descending) of the value tables made so far.
        let mut values: Vec<((usize, Option<usize>, bool), usize)> = Vec::new();
        let mut calls = Vec::with_capacity(a.calls.len());
        // Extremes first: a DISTINCT call can share their table whatever its direction.
        let mut order: Vec<usize> = (0..a.calls.len()).collect();
        order.sort_by_key(|&i| a.calls[i].distinct);
        for &i in &order {
            let call = &a.calls[i];
            let direction = classes::value_order(call.func, call.distinct, p.append_only);
            let mut value = None;
            if let (Some(descending), Some(arg)) = (direction, call.arg) {
                let key = (arg, call.filter, descending);
                let fits = |k: &(usize, Option<usize>, bool)| {
                    *k == key
                        || (call.distinct
                            && !call.func.is_collected()
                            && (k.0, k.1) == (arg, call.filter))
                };
                value = Some(match values.iter().find(|(k, _)| fits(k)) {
                    Some((k, table)) => (*table, k.2),
                    None => {
                        let points = call.distinct && !call.func.is_collected();
                        let table = self.value_table(input, arg, points);
                        values.push((key, table));
                        (table, descending)
                    }
                });
            }
            let state = value.map(|(table, descending)| ValueTable { table, descending });
            calls.push((i, call.clone().with_state(state)));
        }
        calls.sort_by_key(|(i, _)| *i);
        let calls: Vec<AggCall> = calls.into_iter().map(|(_, call)| call).collect();
        let schema = accumulator_schema(&a.group, &calls, input);
        let name = if calls.is_empty() { "distinct" } else { "aggregate" };
        let table = self.table(name, AccessClass::PointUpdate, RowStorage::Keyed, schema);
        Operator::Aggregate(millrace_graph::Aggregate {
            group: a.group,
            vnode: a.vnode,
            calls,
            table,
        })
    }

    fn hold(
        &mut self,
        name: &str,
        h: plan::EventTimeBuffer,
        schema: &SchemaRef,
    ) -> millrace_graph::EventTimeBuffer {
        let table =
            self.table(name, AccessClass::RangeRead, RowStorage::Multiset, Arc::clone(schema));
        millrace_graph::EventTimeBuffer { column: h.column, vnode: h.vnode, table }
    }

    fn value_table(&mut self, input: &SchemaRef, arg: usize, distinct: bool) -> usize {
        let value: Field = input.field(arg).clone().with_nullable(false);
        let schema = Arc::new(Schema::new(vec![value]));
        let name = if distinct { "distinct values" } else { "extreme values" };
        self.table(name, classes::value_class(!distinct), RowStorage::Multiset, schema)
    }

    fn join(&mut self, j: plan::Join, schemas: [&SchemaRef; 2], p: [&Properties; 2]) -> Operator {
        // A null-aware join keeps all rows under one key: its columns do not tell stored rows apart.
        let apart = !j.null_aware || is_planted("rows-under-one-key");
        let under = |keys: &[usize]| if apart { keys.to_vec() } else { vec![] };
        let [left_layout, right_layout] = [
            classes::join_side(p[0], &under(&j.left.keys)),
            classes::join_side(p[1], &under(&j.right.keys)),
        ];
        let left = self.join_side("join left", j.left, schemas[0], left_layout);
        let right = self.join_side("join right", j.right, schemas[1], right_layout);
        Operator::Join(millrace_graph::Join {
            kind: j.kind,
            left,
            right,
            residual: j.residual,
            null_aware: j.null_aware,
            null_equals_null: j.null_equals_null,
            output: j.output,
        })
    }

    fn lookup(&mut self, j: plan::Join, schemas: [&SchemaRef; 2], p: [&Properties; 2]) -> Operator {
        let layout = classes::join_side(p[1], &j.right.keys);
        let right = self.join_side("lookup", j.right, schemas[1], layout);
        let matches = (!p[0].append_only).then(|| {
            let SideLayout { storage, unique_key, .. } = classes::join_side(p[0], &j.left.keys);
            let table = self.table(
                "matches",
                AccessClass::RangeRead,
                RowStorage::Keyed,
                matches_schema(schemas[1]),
            );
            millrace_graph::Matches { table, identity: storage, unique_key }
        });
        Operator::Lookup(millrace_graph::Lookup {
            outer: j.kind == millrace_graph::JoinKind::LeftOuter,
            left_keys: j.left.keys,
            left_vnode: j.left.vnode,
            right,
            residual: j.residual,
            output: j.output,
            matches,
        })
    }

    fn join_side(
        &mut self,
        name: &str,
        side: plan::JoinSide,
        schema: &SchemaRef,
        layout: SideLayout,
    ) -> JoinSide {
        let SideLayout { storage, unique_key, unique_per_key, class } = layout;
        let table = self.table(name, class, storage, Arc::clone(schema));
        side.with_state(SideState { table, storage, unique_key, unique_per_key })
    }

    fn window(&mut self, w: plan::Window, schema: &SchemaRef, p: &Properties) -> Operator {
        let given: Vec<usize> =
            w.group.iter().copied().chain(w.order.iter().map(|o| o.0)).collect();
        let (storage, unique_key) = classes::top_n_rows(p, &given);
        let table = self.table("window", AccessClass::RangeRead, storage, Arc::clone(schema));
        Operator::Window(w.with_state(WindowState { table, storage, unique_key, closing: None }))
    }

    /// What sessions and ASOF joins over a time with a watermark need to let rows go.
    fn closing(
        &mut self,
        w: &millrace_graph::Window,
        input: &SchemaRef,
        marks: &[DerivedWatermark],
    ) -> Option<millrace_graph::Closing> {
        let &(column, _) = w.order.first()?;
        let terms = watermark::of(marks, column)?;
        let gap = session_gap(w.calls.first()?);
        let asof = w.calls.iter().all(|c| c.function == LATEST);
        if w.calls.iter().any(|c| session_gap(c) != gap) || (gap.is_none() && !asof) {
            return None;
        }
        let gap = gap.unwrap_or(0);
        let columns = [column].into_iter().chain(w.group.iter().copied());
        let schema = columns.map(|c| Arc::clone(&input.fields()[c])).collect::<Vec<_>>();
        let schema = Arc::new(Schema::new(schema));
        let table = self.table("closing times", AccessClass::RangeRead, RowStorage::Keyed, schema);
        self.tables[table].retention =
            Some(Retention { by: RetentionBy::Key, terms: terms.to_vec() });
        Some(millrace_graph::Closing { column, gap, table })
    }

    fn top_n(&mut self, t: plan::TopN, schema: &SchemaRef, p: &Properties) -> Operator {
        let (storage, unique_key) = classes::top_n_rows(p, &t.columns_read());
        let table = self.table("top-n", AccessClass::RangeRead, storage, Arc::clone(schema));
        let append_only_input = p.append_only;
        Operator::TopN(t.with_state(TopNState { table, storage, unique_key, append_only_input }))
    }
}

/// A state table that is cleaned, and from when on its rows are never reached again.
type Cleaned = (usize, RetentionBy, Vec<WatermarkTerm>);

/// State cleaning: which of an operator's tables are cleaned by the watermarks of its inputs.
#[deny(clippy::wildcard_enum_match_arm)]
fn cleaned(op: &Operator, inputs: &[Vec<DerivedWatermark>], widths: &[usize]) -> Vec<Cleaned> {
    let port = |n: usize| inputs.get(n).map_or(&[][..], Vec::as_slice);
    let input = port(0);
    let by_group = |table: usize, group: &[usize]| {
        let found = input.iter().find(|m| group.contains(&m.column));
        found.map(|m| (table, RetentionBy::Value(m.column), m.terms.clone())).into_iter().collect()
    };
    match op {
        Operator::Aggregate(a) => cleaned_groups(a, input),
        Operator::TopN(t) => by_group(t.state.table, &t.group),
        Operator::Window(w) => by_group(w.state.table, &w.group),
        // It looks at rows of every key.
        Operator::Join(j) if j.null_aware => vec![],
        Operator::Join(j) => {
            let width = widths.first().copied().unwrap_or(0);
            let kept = watermark::retained(j, input, port(1), width);
            let sides = [&j.left, &j.right].into_iter().zip(kept);
            let one = |(side, mark): (&JoinSide, Option<DerivedWatermark>)| {
                let mark = mark?;
                Some((side.state.table, RetentionBy::Value(mark.column), mark.terms))
            };
            sides.filter_map(one).collect()
        }
        Operator::WindowClose(h) => {
            let terms = watermark::of(input, h.column);
            terms.map(|t| (h.table, RetentionBy::Key, t.to_vec())).into_iter().collect()
        }
        // What is looked up, and what goes by the wall clock, is not bound by a watermark.
        Operator::Lookup(_)
        | Operator::TemporalUpperBound(_)
        | Operator::TemporalLowerBound(_)
        | Operator::Subscribe { .. }
        | Operator::Source { .. }
        | Operator::Exchange { .. }
        | Operator::Values { .. }
        | Operator::Filter { .. }
        | Operator::Project { .. }
        | Operator::Union
        | Operator::Hop { .. }
        | Operator::Repeat { .. }
        | Operator::Unnest { .. }
        | Operator::Expand(_)
        | Operator::Stamp { .. }
        | Operator::Materialize
        | Operator::Blackhole
        | Operator::Sink => vec![],
    }
}

/// Groups below the watermark of a group column, which [`closing_first`] has put first where a value table needs
/// that.
fn cleaned_groups(a: &millrace_graph::Aggregate, input: &[DerivedWatermark]) -> Vec<Cleaned> {
    let found = a.group.iter().enumerate().find_map(|(i, &g)| Some((i, watermark::of(input, g)?)));
    let Some((at, terms)) = found else { return vec![] };
    let groups = (a.table, RetentionBy::Value(at), terms.to_vec());
    let values = a.calls.iter().filter_map(|c| c.state);
    let values = values.map(|v| (v.table, RetentionBy::Key, terms.to_vec()));
    [groups].into_iter().chain(values).collect()
}

/// Brings the first group column with a watermark to the front, so that the state tables that have only
/// the group's key can be cleaned by it. Gives the new order of the output columns, if it is another.
fn closing_first(
    a: &mut plan::Aggregate,
    marks: Option<&Vec<DerivedWatermark>>,
) -> Option<Vec<usize>> {
    let marks = marks?;
    let values = a.calls.iter().any(|c| {
        c.distinct || c.func.is_collected() || matches!(c.func, AggFunc::Min | AggFunc::Max)
    });
    let at = a.group.iter().position(|g| watermark::of(marks, *g).is_some())?;
    if at == 0 || !values {
        return None;
    }
    let column = a.group.remove(at);
    a.group.insert(0, column);
    let groups = [at].into_iter().chain((0..a.group.len()).filter(|&g| g != at));
    Some(groups.chain(a.group.len()..a.group.len() + a.calls.len()).collect())
}
