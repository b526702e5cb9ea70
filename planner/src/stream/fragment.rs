//! Stream plan with exchanges → fragments, nodes and state tables.
//!
//! A fragment ends at an exchange: what is below becomes a fragment of its own, pushed before its
//! consumer. State tables are numbered as their operators are emitted, children first; table 0 is
//! the relation's rows.

use std::sync::Arc;

use arrow::datatypes::{Field, Schema, SchemaRef};
use millrace_common::{RelationId, SqlError};
use millrace_rpc::catalog::{RelationKind, RowStorage};

use crate::graph::{
    self, AccessClass, AggCall, Fragment, FragmentOutput, JobGraph, JoinSide, Node, Operator,
    RelationLayout, StateTable,
};
use crate::graph_state::accumulator_schema;
use crate::passes::classes::{self, SideLayout};
use crate::passes::exchange::{Placed, exchange};
use crate::passes::properties::{Distribution, Properties};
use crate::stream::Sink;
use crate::stream::plan::{self, Op, Stream};

/// Decides how the relation's rows lie and brings them to the tasks that own them.
///
/// Keyed if a unique key is known, preferably one that needs no exchange; else under an arrival
/// sequence if nothing is ever retracted; else a multiset. A blackhole takes rows wherever they are.
pub fn lay_out(root: Placed, sink: Sink) -> (Stream, RelationLayout) {
    let p = &root.1;
    let key = p
        .keys
        .iter()
        .map(|k| k.iter().copied().collect::<Vec<_>>())
        .min_by_key(|k| (p.distributed_within(k).is_none(), k.len()));
    let (storage, key) = match (key, p.append_only) {
        (Some(key), _) => (RowStorage::Keyed, key),
        (None, true) => (RowStorage::Append, vec![]),
        (None, false) => (RowStorage::Multiset, vec![]),
    };
    let all: Vec<usize> = (0..root.0.width()).collect();
    let meeting = if storage == RowStorage::Keyed { key.clone() } else { all };
    let (root, distribution) = match (&p.distribution, storage) {
        (Distribution::Singleton, _) | (_, RowStorage::Append) => (root, vec![]),
        _ if sink == Sink::Blackhole => (root, vec![]),
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
    };
    (root.0, layout)
}

/// Cuts the plan into fragments.
pub fn fragment(root: Stream, layout: RelationLayout, sink: Sink) -> Result<JobGraph, SqlError> {
    let rows = StateTable {
        name: "rows".into(),
        class: classes::relation_class(layout.storage),
        value_schema: Arc::clone(&layout.schema),
        storage: layout.storage,
        relation: true,
    };
    let mut builder = Builder { fragments: vec![], tables: vec![rows] };
    let mut open = Open::default();
    let (node, p) = builder.emit(root, &mut open)?;
    let op = match sink {
        Sink::Materialize => Operator::Materialize,
        Sink::Blackhole => Operator::Blackhole,
    };
    open.nodes.push(Node {
        op,
        inputs: vec![node],
        schema: Arc::clone(&layout.schema),
        append_only: p.append_only,
    });
    builder.close(open, &p, FragmentOutput::Relation);
    Ok(JobGraph { fragments: builder.fragments, tables: builder.tables, output: layout })
}

/// A fragment under construction.
#[derive(Default)]
struct Open {
    nodes: Vec<Node>,
    /// Fragments whose rows it takes.
    producers: Vec<usize>,
}

struct Builder {
    fragments: Vec<Fragment>,
    tables: Vec<StateTable>,
}

impl Builder {
    fn close(&mut self, open: Open, p: &Properties, output: FragmentOutput) -> usize {
        let index = self.fragments.len();
        for producer in open.producers {
            if let FragmentOutput::Exchange { to, .. } = &mut self.fragments[producer].output {
                *to = index;
            }
        }
        let singleton = p.distribution == Distribution::Singleton;
        self.fragments.push(Fragment { nodes: open.nodes, singleton, output });
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
        });
        self.tables.len() - 1
    }

    /// Adds a subtree to the open fragment; gives its node and properties.
    fn emit(&mut self, stream: Stream, open: &mut Open) -> Result<(usize, Properties), SqlError> {
        let Stream { op, inputs, schema } = stream;
        let width = schema.fields().len();
        if let Op::Exchange { hash } = &op {
            let Some(input) = inputs.into_iter().next() else {
                return Err(SqlError::internal("an exchange has no input"));
            };
            let (fragment, below) = self.producer(input, hash.clone())?;
            let p = Properties::derive(&op, width, &[below]);
            open.producers.push(fragment);
            let node = Node {
                op: Operator::Exchange { fragment },
                inputs: vec![],
                schema,
                append_only: p.append_only,
            };
            open.nodes.push(node);
            return Ok((open.nodes.len() - 1, p));
        }
        let schemas: Vec<SchemaRef> = inputs.iter().map(|i| Arc::clone(&i.schema)).collect();
        let mut nodes = Vec::with_capacity(inputs.len());
        let mut below = Vec::with_capacity(inputs.len());
        for input in inputs {
            let (node, p) = self.emit(input, open)?;
            nodes.push(node);
            below.push(p);
        }
        let p = Properties::derive(&op, width, &below);
        let op = self.operator(op, &schemas, &below)?;
        open.nodes.push(Node { op, inputs: nodes, schema, append_only: p.append_only });
        Ok((open.nodes.len() - 1, p))
    }

    /// A closed fragment that feeds an exchange; its consumer is filled in when that is closed.
    fn producer(
        &mut self,
        input: Stream,
        hash: Vec<usize>,
    ) -> Result<(usize, Properties), SqlError> {
        let mut open = Open::default();
        let (_, p) = self.emit(input, &mut open)?;
        let index = self.close(open, &p, FragmentOutput::Exchange { to: usize::MAX, hash });
        Ok((index, p))
    }

    fn operator(
        &mut self,
        op: Op,
        schemas: &[SchemaRef],
        inputs: &[Properties],
    ) -> Result<Operator, SqlError> {
        Ok(match (op, schemas, inputs) {
            (Op::Scan { relation, columns }, ..) => {
                let id = RelationId(relation.id);
                match relation.kind() {
                    RelationKind::Source => Operator::Source { relation: id, columns },
                    _ => Operator::Subscribe { relation: id, columns },
                }
            }
            (Op::Values { batch }, ..) => Operator::Values { batch },
            (Op::Filter { predicate }, ..) => Operator::Filter { predicate },
            (Op::Project { exprs }, ..) => Operator::Project { exprs },
            (Op::Union, ..) => Operator::Union,
            (Op::Hop { time_column, size_us, slide_us, offset_us }, ..) => {
                Operator::Hop { time_column, size_us, slide_us, offset_us }
            }
            (Op::Repeat { times_column }, ..) => Operator::Repeat { times_column },
            (Op::Expand(e), ..) => Operator::Expand(e),
            (Op::Aggregate(a), [schema], [p]) => self.aggregate(a, schema, p),
            (Op::Join(j), [left, right], [l, r]) => self.join(j, [left, right], [l, r]),
            (Op::TopN(t), [schema], [p]) => self.top_n(t, schema, p),
            (Op::Window(w), [schema], [p]) => self.window(w, schema, p),
            _ => return Err(SqlError::internal("an operator has the wrong number of inputs")),
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
                    *k == key || (call.distinct && (k.0, k.1) == (arg, call.filter))
                };
                value = Some(match values.iter().find(|(k, _)| fits(k)) {
                    Some((k, table)) => (*table, k.2),
                    None => {
                        let table = self.value_table(input, arg, call.distinct);
                        values.push((key, table));
                        (table, descending)
                    }
                });
            }
            calls.push((
                i,
                AggCall {
                    func: call.func,
                    arg: call.arg,
                    distinct: call.distinct,
                    filter: call.filter,
                    output_type: call.output.data_type().clone(),
                    value_table: value.map(|v| v.0),
                    value_descending: value.is_some_and(|v| v.1),
                },
            ));
        }
        calls.sort_by_key(|(i, _)| *i);
        let calls: Vec<AggCall> = calls.into_iter().map(|(_, call)| call).collect();
        let schema = accumulator_schema(&a.group, &calls, input);
        let name = if calls.is_empty() { "distinct" } else { "aggregate" };
        let table = self.table(name, AccessClass::PointUpdate, RowStorage::Keyed, schema);
        Operator::Aggregate(graph::Aggregate { group: a.group, vnode: a.vnode, calls, table })
    }

    fn value_table(&mut self, input: &SchemaRef, arg: usize, distinct: bool) -> usize {
        let value: Field = input.field(arg).clone().with_nullable(false);
        let schema = Arc::new(Schema::new(vec![value]));
        let name = if distinct { "distinct values" } else { "extreme values" };
        self.table(name, classes::value_class(!distinct), RowStorage::Multiset, schema)
    }

    fn join(&mut self, j: plan::Join, schemas: [&SchemaRef; 2], p: [&Properties; 2]) -> Operator {
        let [left_keys, right_keys] = [j.left_keys(), j.right_keys()];
        let left = self.join_side("join left", left_keys, &j.vnode, schemas[0], p[0]);
        let right = self.join_side("join right", right_keys, &j.vnode, schemas[1], p[1]);
        Operator::Join(graph::Join {
            kind: j.kind,
            left,
            right,
            residual: j.residual,
            null_aware: j.null_aware,
            null_equals_null: j.null_equals_null,
            output: j.output,
        })
    }

    fn join_side(
        &mut self,
        name: &str,
        keys: Vec<usize>,
        vnode: &[usize],
        schema: &SchemaRef,
        p: &Properties,
    ) -> JoinSide {
        let SideLayout { storage, unique_key, unique_per_key, class } =
            classes::join_side(p, &keys);
        let table = self.table(name, class, storage, Arc::clone(schema));
        let vnode = vnode.iter().map(|&k| keys[k]).collect();
        JoinSide { keys, vnode, table, storage, unique_key, unique_per_key }
    }

    fn window(&mut self, w: plan::Window, schema: &SchemaRef, p: &Properties) -> Operator {
        let given: Vec<usize> =
            w.group.iter().copied().chain(w.order.iter().map(|o| o.0)).collect();
        let (storage, unique_key) = classes::top_n_rows(p, &given);
        let table = self.table("window", AccessClass::RangeRead, storage, Arc::clone(schema));
        let plan::Window { group, order, calls, vnode, .. } = w;
        Operator::Window(graph::Window { group, vnode, order, calls, table, storage, unique_key })
    }

    fn top_n(&mut self, t: plan::TopN, schema: &SchemaRef, p: &Properties) -> Operator {
        let given: Vec<usize> =
            t.group.iter().copied().chain(t.order.iter().map(|o| o.0)).collect();
        let (storage, unique_key) = classes::top_n_rows(p, &given);
        let table = self.table("top-n", AccessClass::RangeRead, storage, Arc::clone(schema));
        Operator::TopN(graph::TopN {
            group: t.group,
            vnode: t.vnode,
            order: t.order,
            offset: t.offset,
            limit: t.limit,
            rank: t.rank,
            emit_rank: t.emit_rank,
            table,
            storage,
            unique_key,
            append_only_input: p.append_only,
        })
    }
}
