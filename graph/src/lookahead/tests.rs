use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use datafusion::common::ScalarValue;
use datafusion::logical_expr::Operator as Binary;
use datafusion::physical_expr::expressions::{BinaryExpr, IsNotNullExpr};
use millrace_functions::expr::{ExprRef, column, columns_of, literal};
use millrace_functions::window_call::RankFunction;
use millrace_rpc::catalog::RowStorage;

use super::*;
use crate::{
    Aggregate, BufferMode, DerivedWatermark, Edge, EdgeKind, EventTimeBuffer, Exchange, Expand,
    Filter, Fragment, GroupingSet, Hop, Join, JoinKind, JoinSide, Lookup, MarkStep, Matches,
    Materialize, Project, RelationLayout, Repeat, SideState, Source, Stamp, StateTable, Subscribe,
    TopN, TopNState, Union, Unnest, Values, WatermarkTerm, Window, WindowState,
};

mod chains;
mod closing;
mod deleted_rows;
mod inside;
mod places;
mod rules;

/// A graph of one fragment that grows node by node; every node has one state table.
struct Plan {
    nodes: Vec<Node>,
    tables: Vec<StateTable>,
}

fn bigint(name: &str) -> Field {
    Field::new(name, DataType::Int64, true)
}

fn time(name: &str) -> Field {
    Field::new(name, DataType::Timestamp(TimeUnit::Microsecond, None), true)
}

fn schema(fields: Vec<Field>) -> SchemaRef {
    Arc::new(Schema::new(fields))
}

fn int(value: i64) -> ExprRef {
    literal(ScalarValue::from(value))
}

fn binary(left: ExprRef, op: Binary, right: ExprRef) -> ExprRef {
    Arc::new(BinaryExpr::new(left, op, right))
}

fn mark(column: usize, steps: usize) -> DerivedWatermark {
    let steps = vec![MarkStep::Add(1); steps];
    let term = WatermarkTerm { relation: RelationId(9), column: 0, steps };
    DerivedWatermark { column, terms: vec![term] }
}

impl Plan {
    fn new() -> Plan {
        Plan { nodes: vec![], tables: vec![] }
    }

    fn add(&mut self, op: Operator, inputs: &[usize], schema: SchemaRef) -> usize {
        let node = Node { op, inputs: inputs.to_vec(), schema, append_only: false, marks: vec![] };
        self.nodes.push(node);
        self.tables.push(StateTable {
            name: "state".into(),
            class: AccessClass::PointUpdate,
            value_schema: schema_of_nothing(),
            storage: RowStorage::Keyed,
            relation: false,
            retention: None,
        });
        self.nodes.len() - 1
    }

    fn schema(&self, node: usize) -> &SchemaRef {
        &self.nodes[node].schema
    }

    fn fields(&self, node: usize) -> Vec<Field> {
        self.schema(node).fields().iter().map(|f| f.as_ref().clone()).collect()
    }

    fn column(&self, node: usize, c: usize) -> ExprRef {
        column(self.schema(node), c)
    }

    /// A subscription with BIGINT columns of these names.
    fn leaf(&mut self, names: &str) -> usize {
        let fields: Vec<Field> = names.split_whitespace().map(bigint).collect();
        self.leaf_of(fields)
    }

    fn leaf_of(&mut self, fields: Vec<Field>) -> usize {
        let relation = RelationId(self.nodes.len() as u32 + 100);
        let columns = (0..fields.len()).collect();
        self.add(Operator::Subscribe(Subscribe { relation, columns }), &[], schema(fields))
    }

    fn same(&mut self, op: Operator, input: usize) -> usize {
        let schema = Arc::clone(self.schema(input));
        self.add(op, &[input], schema)
    }

    fn filter(&mut self, input: usize, predicate: ExprRef) -> usize {
        self.same(Operator::Filter(Filter { predicate }), input)
    }

    /// Rows whose column is above a number.
    fn above(&mut self, input: usize, c: usize, least: i64) -> usize {
        let predicate = binary(self.column(input, c), Binary::Gt, int(least));
        self.filter(input, predicate)
    }

    /// Expressions with their names.
    fn project(&mut self, input: usize, exprs: Vec<(ExprRef, &str)>) -> usize {
        let from = Arc::clone(self.schema(input));
        let field =
            |(e, name): &(ExprRef, &str)| Field::new(*name, e.data_type(&from).unwrap(), true);
        let fields = exprs.iter().map(field).collect();
        let exprs = exprs.into_iter().map(|e| e.0).collect();
        self.add(Operator::Project(Project { exprs }), &[input], schema(fields))
    }

    /// A count by group, whose vnode is that of its first column.
    fn group(&mut self, input: usize, group: &[usize]) -> usize {
        let mut fields: Vec<Field> =
            group.iter().map(|&c| self.schema(input).field(c).clone()).collect();
        fields.push(bigint("n"));
        let vnode = group.first().copied().into_iter().collect();
        let table = self.nodes.len();
        let op = Aggregate { group: group.to_vec(), vnode, calls: vec![], table };
        self.add(Operator::Aggregate(op), &[input], schema(fields))
    }

    fn join(&mut self, inputs: [usize; 2], kind: JoinKind, keys: [&[usize]; 2]) -> usize {
        let schemas = inputs.map(|i| Arc::clone(self.schema(i)));
        let fields = kind.output_fields(&schemas[0], &schemas[1]);
        let [left, right] = keys.map(side);
        let output = (0..fields.len()).collect();
        let op = Join {
            kind,
            left,
            right,
            residual: None,
            null_aware: false,
            null_equals_null: false,
            output,
        };
        let schema = Arc::new(Schema::new(fields));
        self.add(Operator::Join(op), &inputs, schema)
    }

    fn top(&mut self, input: usize, group: &[usize]) -> usize {
        let mut fields = self.fields(input);
        fields.push(bigint("rank"));
        let state = TopNState {
            table: 0,
            storage: RowStorage::Multiset,
            unique_key: vec![],
            append_only_input: false,
        };
        let op = TopN {
            group: group.to_vec(),
            vnode: group.to_vec(),
            order: vec![],
            offset: 0,
            limit: Some(1),
            rank: RankFunction::RowNumber,
            emit_rank: true,
            state,
        };
        self.add(Operator::TopN(op), &[input], schema(fields))
    }

    fn window(&mut self, input: usize, group: &[usize]) -> usize {
        let mut fields = self.fields(input);
        fields.push(bigint("previous"));
        let state = WindowState {
            table: 0,
            storage: RowStorage::Multiset,
            unique_key: vec![],
            closing: None,
        };
        let (group, vnode) = (group.to_vec(), group.to_vec());
        let op = Window { group, vnode, order: vec![], calls: vec![], state };
        self.add(Operator::Window(op), &[input], schema(fields))
    }

    fn graph(self) -> JobGraph {
        let mut nodes = self.nodes;
        let last = nodes.len() - 1;
        nodes.push(Node {
            op: Operator::Materialize(Materialize),
            inputs: vec![last],
            ..nodes[last].clone()
        });
        graph_of(vec![Fragment { nodes, singleton: false, outputs: vec![] }], self.tables)
    }

    /// What is found, each checked, as text.
    fn found(self) -> Vec<String> {
        shown(&self.graph())
    }

    /// What is found for one operator.
    fn found_at(self, node: usize) -> Vec<String> {
        let graph = self.graph();
        let all = checked(&graph);
        all.iter().filter(|l| l.node == node).map(show).collect()
    }
}

fn side(keys: &[usize]) -> JoinSide {
    let storage = RowStorage::Append;
    let state = SideState { table: 0, storage, unique_key: vec![], unique_per_key: false };
    JoinSide { keys: keys.to_vec(), vnode: keys.to_vec(), state }
}

fn schema_of_nothing() -> SchemaRef {
    Arc::new(Schema::empty())
}

fn graph_of(fragments: Vec<Fragment>, tables: Vec<StateTable>) -> JobGraph {
    let output = RelationLayout {
        schema: schema_of_nothing(),
        storage: RowStorage::Multiset,
        key: vec![],
        distribution: vec![],
        append_only: false,
        marks: vec![],
    };
    JobGraph { fragments, tables, output }
}

fn shown(graph: &JobGraph) -> Vec<String> {
    checked(graph).iter().map(show).collect()
}

/// All lookaheads, after a check that their steps fit each other and the operator.
fn checked(graph: &JobGraph) -> Vec<Lookahead> {
    let all = lookaheads(graph);
    for l in &all {
        check(graph, &all, l);
    }
    all
}

/// Every expression is over the columns of the step before, and of the type that the schema says; the key's columns
/// have the types of the operator's.
fn check(graph: &JobGraph, all: &[Lookahead], l: &Lookahead) {
    match &l.chained {
        None => {
            let (fragment, node) = l.inside.map_or(l.leaf, |inside| inside.from);
            assert_eq!(l.input, graph.fragments[fragment].nodes[node].schema);
        }
        Some(chained) => check_chained(graph, &all[chained.after], l),
    }
    let mut schema = Arc::clone(&l.input);
    for step in &l.steps {
        check_step(step, &schema);
        schema = Arc::clone(&step.schema);
    }
    assert_eq!(schema, l.schema);
    let nodes = &graph.fragments[l.fragment].nodes;
    let operator = &nodes[l.node];
    let input = &nodes[operator.inputs[l.input_port]].schema;
    let own = accesses(graph, &operator.op).into_iter();
    let mut own = own.chain(deleted::access(nodes, operator));
    let is_it = |a: &Access| (a.port, a.deleted) == (l.port, l.deleted);
    let access = own.find(is_it).unwrap();
    for (of, wanted) in [(&l.key, &access.key), (&l.vnode, &access.vnode)] {
        assert_eq!(of.len(), wanted.len());
        for (&c, &w) in of.iter().zip(wanted) {
            assert_eq!(schema.field(c).data_type(), input.field(w).data_type());
        }
    }
}

/// It takes what the hints of the one before carry, then columns of what their rows meet.
fn check_chained(graph: &JobGraph, before: &Lookahead, l: &Lookahead) {
    let nodes = &graph.fragments[before.fragment].nodes;
    let other = nodes[before.node].inputs[1 - before.port];
    let met = &l.chained.as_ref().unwrap().met;
    let carried = before.carried.iter().map(|&c| before.schema.field(c));
    let all: Vec<&Field> =
        carried.chain(met.iter().map(|&c| nodes[other].schema.field(c))).collect();
    assert_eq!(l.input.fields().iter().map(|f| f.as_ref()).collect::<Vec<_>>(), all);
    assert_eq!((l.depth, l.leaf, l.relation), (before.depth + 1, before.leaf, before.relation));
}

fn check_step(step: &Node, input: &SchemaRef) {
    let over = |e: &ExprRef| {
        for c in columns_of(e) {
            assert!(c < input.fields().len(), "{e} over {input}");
        }
        e.data_type(input).unwrap()
    };
    let width = input.fields().len();
    match &step.op {
        Operator::Filter(f) => {
            assert_eq!(over(&f.predicate), DataType::Boolean);
            assert_eq!(&step.schema, input);
        }
        Operator::Project(p) => {
            assert_eq!(p.exprs.len(), step.schema.fields().len());
            for (e, field) in p.exprs.iter().zip(step.schema.fields()) {
                assert_eq!(&over(e), field.data_type());
            }
        }
        Operator::Hop(hop) => {
            assert_eq!(step.schema.fields().len(), width + 2);
            assert_eq!(input.field(hop.time_column).data_type(), time("").data_type());
        }
        Operator::Expand(expand) => {
            assert_eq!(step.schema.fields().len(), width + expand.columns.len() + 1);
            for (i, &c) in expand.columns.iter().enumerate() {
                let (copy, of) = (step.schema.field(width + i), input.field(c));
                assert_eq!(copy.data_type(), of.data_type());
            }
            assert!(expand.sets.iter().all(|s| s.keep.len() == expand.columns.len()));
        }
        Operator::Unnest(unnest) => {
            for &c in &unnest.lists {
                let DataType::List(item) = input.field(c).data_type() else { panic!("no list") };
                assert_eq!(step.schema.field(c).data_type(), item.data_type());
            }
        }
        other => panic!("a step {}", other.name()),
    }
}

/// `node.port of leaf: after …; steps; key (…) vnode (…) carries (…) time …`, columns with their positions.
fn show(l: &Lookahead) -> String {
    let name = |&c: &usize| format!("{}@{c}", l.schema.field(c).name());
    let names = |of: &[usize]| of.iter().map(name).collect::<Vec<_>>().join(", ");
    let mut text = format!("{}.{} of {}:", l.node, l.port, l.leaf.1);
    if l.deleted {
        text += " deleted rows;";
    }
    if let Some(inside) = l.inside {
        assert_eq!(l.places, [Place::Input]);
        text += &format!(" from {} at {};", inside.from.1, inside.input_of.1);
    }
    if let Some(chained) = &l.chained {
        text += &format!(" after {};", chained.after);
    }
    for step in &l.steps {
        let exprs = match &step.op {
            Operator::Filter(f) => f.predicate.to_string(),
            Operator::Project(p) => {
                p.exprs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            }
            Operator::Hop(h) => h.time_column.to_string(),
            Operator::Expand(e) => format!("{:?} {}", e.columns, e.sets.len()),
            Operator::Unnest(u) => format!("{:?}", u.lists),
            _ => String::new(),
        };
        text += &format!(" {} {exprs};", step.op.name());
    }
    text += &format!(" key ({})", names(&l.key));
    if l.vnode != l.key {
        text += &format!(" vnode ({})", names(&l.vnode));
    }
    if !l.carried.is_empty() {
        text += &format!(" carries ({})", names(&l.carried));
    }
    text + &l.time.map_or(String::new(), |c| format!(" time {}", name(&c)))
}
