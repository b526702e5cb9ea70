//! Builds a job's tasks and the channels between them from its graph.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use arrow::datatypes::SchemaRef;
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::collections::HashMap;
use millrace_common::{Epoch, Generation, JobId, RelationId, TableId, Vnode};
use millrace_connector::create_source;
use millrace_graph::{
    self as graph, DerivedWatermark, Edge, EdgeKind, Fragment, JobGraph, Node, Operator as Op,
    Role, check_edges,
};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::services::MetaService;
use millrace_rpc::version::JobVersion;
use millrace_storage::{JobStore, TableWriter};
use tokio::sync::{Notify, mpsc};

use super::order::Order;
use super::{Consumer, Kind, PlanNode, Task, TaskReport};
use crate::blackhole::Digest;
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::exchange::{
    Barrier, ChunkReceiver, ChunkSender, Dispatcher, local_channel, owned_vnodes,
};
use crate::input::exchange::ExchangeLeaf;
use crate::input::relations::Relations;
use crate::input::source::{SourceInput, SourceReader, UnreadSplits};
use crate::input::subscribe::{SubscribeReader, Subscription};
use crate::input::values::ValuesReader;
use crate::input::watermark::SourceWatermark;
use crate::input::{CutLeaf, Leaf, Reader};
use crate::invariants::check_owners;
use crate::layout::RowLayout;
use crate::lookahead::edges::JobGraphs;
use crate::lookahead::leaf::LeafHints;
use crate::lookahead::outlook::Outlook;
use crate::lookahead::read_ahead::{LeafFollowers, ReadAhead, ReadFrom, Unread, read_ahead};
use crate::lookahead::stream_ahead::{StreamAhead, stream_ahead};
use crate::lookahead::wiring::Wiring;
use crate::materialize::{KeptChange, Materialize, Root};
use crate::memory::MemoryGovernor;
use crate::operator::{OperatorContext, Output};
use crate::operators;
use crate::options::ExecOptions;
use crate::publish::SinkRoot;
use crate::rebuild::Rebuild;
use crate::sequence::first_arrival;
use crate::state::stamps::event_time_column;
use crate::stats::{OperatorMetrics, Progress};

/// What the tasks of a job are made from.
pub struct Blueprint<'a> {
    pub job: JobId,
    pub generation: Generation,
    pub graph: &'a JobGraph,
    pub relation: &'a Relation,
    pub inputs: &'a [Arc<Relation>],
    pub version: &'a JobVersion,
    pub parallelism: usize,
    /// The job's own state.
    pub job_store: Arc<JobStore>,
    pub relations: Relations,
    pub meta: Arc<dyn MetaService>,
    pub governor: Arc<MemoryGovernor>,
    pub options: Arc<ExecOptions>,
    pub errors: Arc<ErrorSink>,
    pub progress: Arc<Progress>,
}

/// A job's tasks, not yet running, and the ends by which the job steers them.
pub struct Built {
    pub tasks: Vec<Task>,
    pub cuts: Vec<mpsc::UnboundedSender<Arc<Barrier>>>,
    pub reports: mpsc::UnboundedReceiver<TaskReport>,
    pub metrics: Vec<Arc<OperatorMetrics>>,
    /// What looks ahead, to run beside the tasks.
    pub beside: Vec<BoxFuture<'static, ()>>,
    /// Of the job's inputs, by number: see [`Barrier::stage`].
    pub stages: Vec<u32>,
}

type Senders = Vec<Box<dyn ChunkSender>>;
type Receivers = Vec<Box<dyn ChunkReceiver>>;

/// Of a node's inputs, in port order.
struct Inputs<'a> {
    schemas: Vec<SchemaRef>,
    marks: &'a [Vec<DerivedWatermark>],
}

/// Channels by (sending fragment, its output, task).
#[derive(Default)]
struct Channels {
    senders: HashMap<(usize, usize, usize), Senders>,
    receivers: HashMap<(usize, usize, usize), Receivers>,
}

struct Builder<'a> {
    blueprint: Blueprint<'a>,
    channels: Channels,
    cuts: Vec<mpsc::UnboundedSender<Arc<Barrier>>>,
    metrics: HashMap<(usize, usize), Arc<OperatorMetrics>>,
    order: Order,
    wiring: Wiring,
    beside: Vec<BoxFuture<'static, ()>>,
}

/// One task's place.
#[derive(Clone)]
struct Place {
    /// Among the tasks of the job.
    number: usize,
    fragment: usize,
    task: usize,
    parallelism: usize,
    vnodes: Range<Vnode>,
    /// Tasks of all fragments that scan together: they share a cut's rows.
    first_input: u32,
    /// Tells the task that its caches are to let go.
    shed: Arc<Notify>,
}

pub fn build(blueprint: Blueprint<'_>) -> Result<Built, ExecError> {
    let graph = blueprint.graph;
    check_edges(&graph.fragments).map_err(ExecError::internal)?;
    let channels = connect(&blueprint)?;
    let (reports, receiver) = mpsc::unbounded_channel();
    let order = Order::of(graph)?;
    let (cuts, metrics) = (Vec::new(), HashMap::default());
    let of_fragments: Vec<usize> =
        graph.fragments.iter().map(|f| parallelism(f, blueprint.parallelism)).collect();
    let jobs = JobGraphs::new(blueprint.meta.as_ref());
    let Blueprint { inputs, options, governor, .. } = &blueprint;
    let wiring = Wiring::new(graph, inputs, &jobs, options, governor, &of_fragments);
    if blueprint.meta.is_behind(blueprint.job) {
        wiring.set_behind();
    }
    let beside = Vec::new();
    let mut builder = Builder { blueprint, channels, cuts, metrics, order, wiring, beside };
    let mut tasks = Vec::new();
    let mut fragment_of = Vec::new();
    let mut first_input = 0;
    for (f, fragment) in graph.fragments.iter().enumerate() {
        let parallelism = builder.parallelism(fragment);
        debug_check_owners(parallelism);
        for task in 0..parallelism {
            let vnodes = owned_vnodes(task, parallelism);
            let number = tasks.len();
            let shed = Arc::default();
            let place = Place { number, fragment: f, task, parallelism, vnodes, first_input, shed };
            tasks.push(builder.task(fragment, &place, reports.clone())?);
            fragment_of.push(f);
        }
        first_input += fragment.nodes.iter().filter(|n| n.op.role() == Role::Input).count() as u32;
    }
    let (wiring, metrics) = (builder.wiring, &builder.metrics);
    let ctx = context_of_steps(&builder.blueprint);
    for (task, fragment) in tasks.iter_mut().zip(fragment_of) {
        task.leaf_hints = wiring.leaf_hints(graph, fragment, metrics, &ctx);
    }
    let uncommitted = builder.blueprint.relations.changelogs.uncommitted();
    // Before what reads ahead: of what nobody follows nothing is told.
    let mut beside = wiring.walkers(graph, metrics, uncommitted, &ctx);
    beside.extend(builder.beside);
    let mut metrics: Vec<_> = builder.metrics.into_values().collect();
    metrics.sort_by_key(|m| (m.fragment, m.node));
    let stages = builder.order.stages;
    Ok(Built { tasks, cuts: builder.cuts, reports: receiver, metrics, beside, stages })
}

/// How many tasks each fragment of a job has that is to have so many.
pub fn fragment_tasks(graph: &JobGraph, of_job: usize) -> Vec<usize> {
    graph.fragments.iter().map(|fragment| parallelism(fragment, of_job)).collect()
}

fn parallelism(fragment: &Fragment, of_job: usize) -> usize {
    if fragment.singleton { 1 } else { of_job.max(1) }
}

/// For what looks ahead of the job's rows. Its expressions that fail are not the job's: the rows come again.
fn context_of_steps<'a>(b: &Blueprint<'_>) -> OperatorContext<'a> {
    OperatorContext {
        job: b.job,
        task: 0,
        vnodes: owned_vnodes(0, 1),
        event_time: Vec::new(),
        writers: &no_state,
        options: Arc::clone(&b.options),
        errors: Arc::default(),
        metrics: Arc::default(),
        lookahead: Arc::default(),
        governor: Arc::clone(&b.governor),
        shed: Arc::default(),
        clock: b.relations.store.env().clone(),
        restored: Epoch(b.version.epoch),
        first_arrival: 0,
    }
}

fn no_state(_: usize) -> Result<TableWriter, ExecError> {
    Err(ExecError::internal("a step of a lookahead has no state"))
}

fn connect(blueprint: &Blueprint<'_>) -> Result<Channels, ExecError> {
    let mut channels = Channels::default();
    let fragments = &blueprint.graph.fragments;
    for (from, fragment) in fragments.iter().enumerate() {
        let sending_tasks = parallelism(fragment, blueprint.parallelism);
        for (output, edge) in fragment.outputs.iter().enumerate() {
            let receiving = fragments
                .get(edge.to)
                .ok_or_else(|| ExecError::internal("an edge leads to no fragment"))?;
            let receiving_tasks = parallelism(receiving, blueprint.parallelism);
            match &edge.carries {
                EdgeKind::Rows { hash } if hash.is_empty() && receiving_tasks > 1 => {
                    return Err(ExecError::internal("an edge without keys leads to several tasks"));
                }
                EdgeKind::Rows { .. } => {}
            }
            for s in 0..sending_tasks {
                for r in 0..receiving_tasks {
                    let (tx, rx) =
                        local_channel(blueprint.options.channel_bytes, &blueprint.governor);
                    channels.senders.entry((from, output, s)).or_default().push(tx);
                    channels.receivers.entry((from, output, r)).or_default().push(rx);
                }
            }
        }
    }
    Ok(channels)
}

/// In debug builds, that every vnode has one owner among the tasks of a fragment.
fn debug_check_owners(parallelism: usize) {
    if cfg!(debug_assertions) {
        let owned: Vec<_> = (0..parallelism).map(|task| owned_vnodes(task, parallelism)).collect();
        debug_assert_eq!(check_owners(&owned), Ok(()));
    }
}

impl Builder<'_> {
    fn parallelism(&self, fragment: &Fragment) -> usize {
        parallelism(fragment, self.blueprint.parallelism)
    }

    fn task(
        &mut self,
        fragment: &Fragment,
        place: &Place,
        reports: mpsc::UnboundedSender<TaskReport>,
    ) -> Result<Task, ExecError> {
        let mut nodes: Vec<PlanNode> = Vec::with_capacity(fragment.nodes.len());
        let mut input = place.first_input;
        for (n, node) in fragment.nodes.iter().enumerate() {
            let schemas: Vec<SchemaRef> = node
                .inputs
                .iter()
                .map(|&i| fragment.nodes.get(i).filter(|_| i < n).map(|c| c.schema.clone()))
                .collect::<Option<_>>()
                .ok_or_else(|| ExecError::internal("a node's input does not precede it"))?;
            let marks: Vec<_> =
                node.inputs.iter().map(|&i| fragment.nodes[i].marks.clone()).collect();
            let metrics = self.metrics(place.fragment, n, &node.op);
            let inputs = Inputs { schemas, marks: &marks };
            let kind = self.kind(node, &inputs, place, input, &metrics)?;
            input += u32::from(node.op.role() == Role::Input);
            let mut made = slot(kind, metrics);
            made.inputs = marks;
            made.retained = node
                .op
                .cleaned_tables()
                .into_iter()
                .filter_map(|t| Some((t, self.blueprint.graph.tables.get(t)?.retention.clone()?)))
                .collect();
            nodes.push(made);
        }
        link(fragment, &mut nodes);
        for (n, slot) in nodes.iter_mut().enumerate() {
            slot.after = self.order.after(place.fragment, n).to_vec();
        }
        let mut exit = |(output, edge): (usize, &Edge)| {
            let senders = self.channels.senders.remove(&(place.fragment, output, place.task));
            let senders = senders.unwrap_or_default();
            match &edge.carries {
                EdgeKind::Rows { hash } => {
                    Dispatcher::new(hash.clone(), senders, &self.blueprint.options)
                }
            }
        };
        let exits = fragment.outputs.iter().enumerate().map(&mut exit).collect();
        Ok(Task {
            number: place.number,
            nodes,
            exits,
            reports,
            store: Arc::clone(&self.blueprint.job_store),
            governor: Arc::clone(&self.blueprint.governor),
            shed: Arc::clone(&place.shed),
            hints: self.wiring.hints(place.fragment, place.task),
            leaf_hints: LeafHints::default(),
            outlook: Outlook::default(),
            chunk_rows: self.blueprint.options.chunk_rows.max(1),
            progress: Arc::clone(&self.blueprint.progress),
            epoch_rows: 0,
            epoch_waited: Duration::ZERO,
            place: None,
            has_turn: false,
            turn: 0,
            yielded: self.blueprint.relations.store.env().now(),
            clock: self.blueprint.relations.store.env().clone(),
        })
    }

    fn metrics(&mut self, fragment: usize, node: usize, op: &Op) -> Arc<OperatorMetrics> {
        let made = self.metrics.entry((fragment, node));
        Arc::clone(made.or_insert_with(|| OperatorMetrics::new(fragment, node, op.name())))
    }

    fn kind(
        &mut self,
        node: &Node,
        inputs: &Inputs<'_>,
        place: &Place,
        input: u32,
        metrics: &Arc<OperatorMetrics>,
    ) -> Result<Kind, ExecError> {
        let backfill = self.blueprint.version.backfill.as_ref();
        Ok(match &node.op {
            Op::Subscribe(graph::Subscribe { relation, columns }) => {
                let leaf = (metrics.fragment, metrics.node);
                let mut from = self.subscription(input, *relation, columns, place)?;
                from.ahead = self.stream_ahead(*relation, leaf);
                Kind::Leaf(self.cut_leaf(SubscribeReader::new(from, backfill)))
            }
            Op::Source(graph::Source { relation, columns }) => {
                let from = Arc::new(self.source(input, *relation, columns)?);
                let leaf = (metrics.fragment, metrics.node);
                let ahead = match self.blueprint.options.read_ahead {
                    true => Some(self.read_ahead(&from, leaf, place)?),
                    false => None,
                };
                let (task, of) = (place.task, place.parallelism);
                Kind::Leaf(self.cut_leaf(SourceReader::new(from, task, of, backfill, ahead)?))
            }
            Op::Values(graph::Values { batch }) => {
                if place.parallelism > 1 {
                    return Err(ExecError::internal("constant rows in several tasks"));
                }
                Kind::Leaf(self.cut_leaf(ValuesReader::new(
                    input,
                    self.order.stage(input),
                    batch.clone(),
                    backfill,
                )))
            }
            Op::Exchange(graph::Exchange { fragment, output }) => {
                let receivers = self.channels.receivers.remove(&(*fragment, *output, place.task));
                let receivers = receivers
                    .ok_or_else(|| ExecError::internal("an exchange without a sending fragment"))?;
                Kind::Leaf(Box::new(ExchangeLeaf::new(receivers)))
            }
            Op::Materialize(_) => Kind::Root(self.materialize(place)?),
            Op::Blackhole(_) => Kind::Root(Root::Blackhole(Digest::default())),
            Op::Sink(_) => Kind::Root(self.sink()?),
            // What is no leaf and no root; the match that builds it names every operator.
            _ => Kind::Operator(self.operator(node, inputs, place, metrics)?),
        })
    }

    fn cut_leaf<R: Reader + 'static>(&mut self, reader: R) -> Box<dyn Leaf> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.cuts.push(sender);
        Box::new(CutLeaf::new(receiver, reader))
    }

    fn input_relation(&self, id: RelationId) -> Result<&Relation, ExecError> {
        let found = self.blueprint.inputs.iter().find(|r| r.id == id.0).map(Arc::as_ref);
        found.ok_or_else(|| ExecError::Unavailable(format!("input relation {id} does not exist")))
    }

    fn subscription(
        &self,
        input: u32,
        relation: RelationId,
        columns: &[usize],
        place: &Place,
    ) -> Result<Subscription, ExecError> {
        let upstream = self.input_relation(relation)?;
        let covers = |list: &[u32]| list.iter().all(|c| columns.contains(&(*c as usize)));
        let distinct = !upstream.key.is_empty() && covers(&upstream.key);
        let narrows = columns.len() < upstream.columns.len() || !distinct;
        let b = &self.blueprint;
        if b.version.backfill.is_some() && place.task == 0 {
            b.progress.to_scan.add(b.meta.row_count(relation).unwrap_or(0));
        }
        Ok(Subscription {
            input,
            relation,
            table: TableId(upstream.first_table_id),
            columns: columns.to_vec(),
            narrows: narrows && !upstream.append_only,
            watermarked: upstream.watermarked(),
            meta: Arc::clone(&b.meta),
            vnodes: place.vnodes.clone(),
            relations: b.relations.clone(),
            scan_rows: (b.options.backfill_rows / place.parallelism).max(1),
            stage: self.order.stage(input),
            chunk_rows: b.options.chunk_rows,
            governor: Arc::clone(&b.governor),
            progress: Arc::clone(&b.progress),
            ahead: None,
        })
    }

    /// Has what a leaf reads from the store read beside its task, if it is of use to anybody.
    fn stream_ahead(&mut self, relation: RelationId, leaf: (usize, usize)) -> Option<StreamAhead> {
        let followers = self.wiring.followers(leaf)?;
        let governor = Arc::clone(&self.blueprint.governor);
        let (ahead, pumps) = stream_ahead(relation, followers, governor);
        self.beside.push(pumps.run().boxed());
        Some(ahead)
    }

    fn source(
        &self,
        input: u32,
        relation: RelationId,
        columns: &[usize],
    ) -> Result<SourceInput, ExecError> {
        let upstream = self.input_relation(relation)?;
        if upstream.kind != RelationKind::Source as i32 {
            return Err(ExecError::internal(format!("relation {relation} is not a source")));
        }
        let b = &self.blueprint;
        Ok(SourceInput {
            input,
            relation,
            watermark: SourceWatermark::of(upstream, columns)?,
            source: create_source(upstream)?,
            columns: columns.to_vec(),
            meta: Arc::clone(&b.meta),
            scan_rows: b.options.backfill_rows,
            stage: self.order.stage(input),
            read_rows: b.options.source_rows,
            progress: Arc::clone(&b.progress),
            errors: Arc::clone(&b.errors),
            counters: b.version.counters.clone(),
        })
    }

    /// Has the splits of a leaf read ahead beside its task.
    fn read_ahead(
        &mut self,
        of: &Arc<SourceInput>,
        leaf: (usize, usize),
        place: &Place,
    ) -> Result<ReadAhead, ExecError> {
        let version = self.blueprint.version;
        let (committed, backfill) = (Epoch(version.epoch), version.backfill.as_ref());
        let (task, tasks) = (place.task, place.parallelism);
        let unread: Option<Box<dyn Unread>> = match self.blueprint.relation.paused {
            // A sink that takes nothing until it is resumed.
            true => None,
            false => Some(Box::new(UnreadSplits::new(of, task, tasks, committed, backfill)?)),
        };
        let (ahead, work) = read_ahead(ReadFrom {
            relation: of.relation,
            meta: Arc::clone(&of.meta),
            read_rows: of.read_rows,
            governor: Arc::clone(&self.blueprint.governor),
            clock: self.blueprint.relations.store.env().clone(),
            told: Box::new(LeafFollowers {
                relation: of.relation,
                watermark: of.watermark.clone(),
                uncommitted: self.wiring.followers(leaf),
            }),
            unread,
        });
        self.beside.push(work.run().boxed());
        Ok(ahead)
    }

    fn materialize(&self, place: &Place) -> Result<Root, ExecError> {
        let b = &self.blueprint;
        let layout = Arc::new(RowLayout::of_output(&b.graph.output)?);
        let first = b.relation.first_table_id;
        let writer = b.job_store.writer(TableId(b.version.state_table(first, 0)))?;
        let rebuild = match b.version.is_rebuilding() {
            true => {
                let rows = b.job_store.writer(TableId(first))?;
                Some(Rebuild::new(rows, Epoch(b.version.content_epoch), &b.graph.output)?)
            }
            false => None,
        };
        let changelogs = Arc::clone(&b.relations.changelogs);
        let kept = KeptChange { changelogs, relation: RelationId(b.relation.id) };
        let root = Materialize::new(
            layout,
            writer,
            place.vnodes.clone(),
            &b.version.counters,
            b.options.delta_bytes,
            kept,
            &b.governor,
        );
        Ok(Root::Materialize(Box::new(root.with_rebuild(rebuild))))
    }

    fn sink(&self) -> Result<Root, ExecError> {
        let b = &self.blueprint;
        let layout = Arc::new(RowLayout::of_output(&b.graph.output)?);
        let shown = b.relation.columns.iter().filter(|c| !c.hidden).count();
        let root = SinkRoot::new(layout, shown, b.options.delta_bytes, &b.governor);
        Ok(Root::Sink(Box::new(root)))
    }

    fn operator(
        &self,
        node: &Node,
        inputs: &Inputs<'_>,
        place: &Place,
        metrics: &Arc<OperatorMetrics>,
    ) -> Result<Box<dyn crate::operator::Operator>, ExecError> {
        let b = &self.blueprint;
        let writers = |local: usize| {
            let id = TableId(b.version.state_table(b.relation.first_table_id, local as u32));
            Ok(b.job_store.writer(id)?)
        };
        let ctx = OperatorContext {
            job: b.job,
            task: place.task,
            vnodes: place.vnodes.clone(),
            event_time: inputs.marks.iter().map(|m| event_time_column(m)).collect(),
            writers: &writers,
            options: Arc::clone(&b.options),
            errors: Arc::clone(&b.errors),
            metrics: Arc::clone(metrics),
            lookahead: self
                .wiring
                .operator((metrics.fragment, metrics.node), place.task)
                .unwrap_or_default(),
            governor: Arc::clone(&b.governor),
            shed: Arc::clone(&place.shed),
            clock: b.relations.store.env().clone(),
            restored: Epoch(b.version.epoch),
            first_arrival: first_arrival(&b.version.counters),
        };
        operators::build(node, &inputs.schemas, &ctx)
    }
}

fn slot(kind: Kind, metrics: Arc<OperatorMetrics>) -> PlanNode {
    PlanNode {
        kind,
        consumers: Vec::new(),
        ancestors: Vec::new(),
        after: Vec::new(),
        out: Output::default(),
        queue: Default::default(),
        barrier: None,
        inputs: Vec::new(),
        retained: Vec::new(),
        metrics,
        state_bytes: 0,
    }
}

/// Sets consumers and ancestors.
fn link(fragment: &Fragment, nodes: &mut [PlanNode]) {
    for (n, node) in fragment.nodes.iter().enumerate() {
        for (port, &input) in node.inputs.iter().enumerate() {
            nodes[input].consumers.push(Consumer::Node(n, port));
        }
    }
    for (exit, edge) in fragment.outputs.iter().enumerate() {
        nodes[edge.from].consumers.push(Consumer::Exit(exit));
    }
    for n in (0..nodes.len()).rev() {
        let mut above = BTreeSet::new();
        for consumer in &nodes[n].consumers {
            if let Consumer::Node(parent, _) = *consumer {
                above.insert(parent);
                above.extend(&nodes[parent].ancestors);
            }
        }
        nodes[n].ancestors = above.into_iter().collect();
    }
}
