//! Stream plan with exchanges → fragments, nodes and state tables.
//!
//! A fragment ends at an exchange: what is below becomes a fragment of its own, pushed before its
//! consumer. A common subplan becomes one fragment, with an output for each place that it stands in
//! (`outputs`). State tables are numbered as their operators are emitted, children first; table 0 is
//! the relation's rows.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{Schema, SchemaRef};
use millrace_common::{SqlError, SqlState};
use millrace_functions::expr;
use millrace_graph::{
    self, DerivedWatermark, Edge, Fragment, JobGraph, Node, Operator, Project, RelationLayout,
    StateTable, dispatch_operator,
};
use millrace_rpc::catalog::RowStorage;

use crate::passes::classes;
use crate::passes::exchange::{Placed, exchange};
use crate::passes::properties::{Distribution, Properties};
use crate::passes::watermark;
use crate::stream::operators::{Input, Lowered, OperatorRules};
use crate::stream::outputs::only;
use crate::stream::plan::{Common, Exchange, Op, Stream};
use crate::stream::tables::StateTables;
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
    let mut builder =
        Builder { fragments: vec![], tables: StateTables::new(rows), common: HashMap::new() };
    let mut open = Open::default();
    let (node, Known { properties: p, marks }) = builder.emit(root, &mut open)?;
    let op = match sink {
        Sink::Materialize => Operator::Materialize(millrace_graph::Materialize),
        Sink::Blackhole => Operator::Blackhole(millrace_graph::Blackhole),
        Sink::Publish(_) => Operator::Sink(millrace_graph::Sink),
    };
    open.nodes.push(Node {
        op,
        inputs: vec![node],
        schema: Arc::clone(&layout.schema),
        append_only: p.append_only,
        marks,
    });
    builder.close(open, &p, vec![]);
    Ok(JobGraph {
        fragments: builder.fragments,
        tables: builder.tables.into_list(),
        output: layout,
    })
}

/// What is known of a subtree's rows.
#[derive(Clone)]
pub(super) struct Known {
    pub properties: Properties,
    pub marks: Vec<DerivedWatermark>,
}

/// A fragment under construction.
#[derive(Default)]
pub(super) struct Open {
    pub nodes: Vec<Node>,
    /// The edges whose rows it takes: fragments, and which of their outputs.
    pub producers: Vec<(usize, usize)>,
    /// The common subplan that the fragment computes, once that is in it: the fragment goes on above it.
    pub above: Option<usize>,
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
        let op = Operator::Project(Project { exprs });
        self.nodes.push(Node { op, inputs, schema, append_only, marks });
    }
}

pub(super) struct Builder {
    pub fragments: Vec<Fragment>,
    tables: StateTables,
    /// By number, the common subplans that have their fragments.
    pub common: HashMap<usize, Computed>,
}

/// Where the rows of a subtree come from.
#[derive(Clone)]
pub(super) struct Computed {
    pub fragment: usize,
    pub node: usize,
    pub known: Known,
}

impl Builder {
    pub fn close(&mut self, open: Open, p: &Properties, outputs: Vec<Edge>) -> usize {
        let index = self.fragments.len();
        for (producer, output) in open.producers {
            self.fragments[producer].outputs[output].to = index;
        }
        let singleton = p.distribution == Distribution::Singleton;
        self.fragments.push(Fragment { nodes: open.nodes, singleton, outputs });
        index
    }

    /// Adds a subtree to the open fragment; gives its node and what is known of it.
    pub fn emit(&mut self, stream: Stream, open: &mut Open) -> Result<(usize, Known), SqlError> {
        let Stream { op, inputs, schema } = stream;
        let width = schema.fields().len();
        if let Op::Exchange(Exchange { hash }) = &op {
            let edge = self.producer(only(inputs)?, hash)?;
            return Ok(self.receive(edge, schema, open));
        }
        if let Op::Common(Common { id }) = op {
            return self.place_common(id, only(inputs)?, open);
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
        let inputs: Vec<Input<'_>> = schemas
            .iter()
            .zip(&below)
            .zip(&marks)
            .map(|((schema, properties), watermarks)| Input { schema, properties, watermarks })
            .collect();
        let tables = &mut self.tables;
        let Lowered { op, order } = dispatch_operator!(op, p => p.lower(tables, &inputs))?;
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
}
