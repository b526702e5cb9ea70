//! Connects a job's walkers with the tasks that own the keys, when the job starts.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::RelationId;
use millrace_common::collections::HashMap;
use millrace_graph::lookahead::{Behind, Lookahead, Place, behind, lookaheads};
use millrace_graph::{JobGraph, Operator as Op};
use millrace_rpc::catalog::{Relation, RelationKind};
use tokio::sync::Notify;

use super::chain::{Chains, without_gaps};
use super::edge::{HintReceiver, HintSender, hint_edge};
use super::edges::JobGraphs;
use super::leaf::{Frequent, LeafHints};
use super::operator::OperatorLookahead;
use super::route::{Route, TaskEnd};
use super::sides::Sides;
use super::uncommitted::Uncommitted;
use super::walker::Walker;
use crate::error::ExecError;
use crate::memory::MemoryGovernor;
use crate::operator::OperatorContext;
use crate::options::{ExecOptions, LookaheadMode};
use crate::stats::{self, OperatorMetrics};

/// A node: its fragment and its number there.
type NodeId = (usize, usize);

/// See the module.
pub struct Wiring {
    /// With the places that its walker looks at.
    lookaheads: Vec<(Lookahead, Vec<Place>)>,
    /// By leaf: who looks at what its tasks read ahead.
    ahead: HashMap<NodeId, Arc<Uncommitted>>,
    /// Told whenever an operator begins to want hints, or no longer wants any.
    changed: Arc<Notify>,
    /// By fragment and task.
    senders: HashMap<(usize, usize), HintSender>,
    receivers: HashMap<(usize, usize), HintReceiver>,
    /// By node and task.
    operators: HashMap<(NodeId, usize), Arc<OperatorLookahead>>,
    sides: Sides,
    chains: Chains,
    /// Of each lookahead.
    origins: Vec<Origin>,
}

/// Whose rows a lookahead looks at.
struct Origin {
    /// Columns of its relation.
    columns: Vec<usize>,
    /// The lookahead with the same keys of the leaf's rows: itself, or the one that it stands behind.
    number: usize,
}

impl Wiring {
    /// For a job with this graph; `tasks` are as many as each fragment has.
    pub fn new(
        graph: &JobGraph,
        inputs: &[Arc<Relation>],
        jobs: &JobGraphs<'_>,
        options: &ExecOptions,
        governor: &Arc<MemoryGovernor>,
        tasks: &[usize],
    ) -> Wiring {
        let mode = options.lookahead;
        let found = match mode {
            LookaheadMode::Off => Vec::new(),
            _ => lookaheads(graph),
        };
        let mode_of = |l: &Lookahead| {
            let node = graph.fragments.get(l.fragment).and_then(|f| f.nodes.get(l.node));
            node.map_or(LookaheadMode::Off, |node| mode.of(node.op.name()))
        };
        let behind = |l: &Lookahead| match mode_of(l) {
            LookaheadMode::Auto | LookaheadMode::Entry => behind(graph, l, &|id| jobs.of(id)),
            _ => Vec::new(),
        };
        let with_places = found.into_iter().map(|l| {
            let kind = match l.relation {
                Some(relation) => Some(kind_of(inputs, relation)?),
                None => None,
            };
            let mut places = places(mode_of(&l), kind, &l);
            if l.chained.is_some() {
                // It follows what it is chained to.
                places.truncate(1);
            }
            (!places.is_empty() || !behind(&l).is_empty()).then_some((l, places))
        });
        let mut lookaheads = without_gaps(with_places.collect());
        let columns = |(l, _): &(Lookahead, Vec<Place>)| subscription(graph, l.leaf).map(|s| s.1);
        let columns = lookaheads.iter().map(|l| columns(l).unwrap_or_default());
        let mut origins: Vec<Origin> =
            columns.enumerate().map(|(number, columns)| Origin { columns, number }).collect();
        for number in 0..lookaheads.len() {
            for Behind { lookahead, columns, .. } in behind(&lookaheads[number].0) {
                origins.push(Origin { columns, number });
                lookaheads.push((lookahead, vec![Place::Entry]));
            }
        }
        let own = |l: &Lookahead| subscription(graph, l.leaf).map(|s| s.0) == l.relation;
        let is_free = |l: &Lookahead| mode_of(l) == LookaheadMode::Auto;
        let sides = Sides::new(&lookaheads, own, is_free);
        let of_leaves = lookaheads.iter().filter(|(l, _)| l.inside.is_none());
        let ahead = of_leaves.map(|(l, _)| (l.leaf, Arc::default())).collect();
        let edge = || hint_edge(options.hint_credits, governor);
        Wiring { ahead, ..Wiring::of(lookaheads, origins, sides, edge, tasks) }
    }

    fn of(
        lookaheads: Vec<(Lookahead, Vec<Place>)>,
        origins: Vec<Origin>,
        sides: Sides,
        edge: impl Fn() -> (HintSender, HintReceiver),
        tasks: &[usize],
    ) -> Wiring {
        let changed = Arc::default();
        let (mut senders, mut receivers) = (HashMap::default(), HashMap::default());
        let mut operators = HashMap::default();
        for (lookahead, _) in &lookaheads {
            let fragment = lookahead.fragment;
            for task in 0..tasks.get(fragment).copied().unwrap_or(0) {
                senders.entry((fragment, task)).or_insert_with(|| {
                    let (sender, receiver) = edge();
                    receivers.insert((fragment, task), receiver);
                    sender
                });
                let node = (fragment, lookahead.node);
                operators
                    .entry((node, task))
                    .or_insert_with(|| OperatorLookahead::of_sides(&changed, sides.of_node(node)));
            }
        }
        let tasks_of = |l: &Lookahead| {
            let task = |task| operators.get(&((l.fragment, l.node), task)).cloned();
            (0..).map_while(task).collect()
        };
        let chains = Chains::new(&lookaheads, tasks_of, |l| sides.of(l));
        sides.set_chains(&lookaheads, |number| chains.of(origins.get(number)?.number));
        let ahead = HashMap::default();
        Wiring { lookaheads, ahead, changed, senders, receivers, operators, sides, chains, origins }
    }

    /// Whom the tasks of a leaf are to tell of what they read ahead, if anybody may look at it.
    pub fn followers(&self, leaf: NodeId) -> Option<Arc<Uncommitted>> {
        self.ahead.get(&leaf).cloned()
    }

    /// Before the operators are made: rows wait for the job already.
    pub fn set_behind(&self) {
        self.operators.values().for_each(|operator| operator.set_behind());
    }

    /// Where hints for a task arrive; `None`: it has no operator with lookaheads, or it was asked for already.
    pub fn hints(&mut self, fragment: usize, task: usize) -> Option<HintReceiver> {
        self.receivers.remove(&(fragment, task))
    }

    /// What an operator shares with walkers, if any are to send it hints.
    pub fn operator(
        &self,
        (fragment, node): NodeId,
        task: usize,
    ) -> Option<Arc<OperatorLookahead>> {
        self.operators.get(&((fragment, node), task)).cloned()
    }

    /// What runs as long as the job: a walker for each leaf with lookaheads, and one for those that are chained. `ctx` is
    /// for operators without state.
    pub fn walkers(
        self,
        graph: &JobGraph,
        metrics: &HashMap<NodeId, Arc<OperatorMetrics>>,
        uncommitted: &Arc<Uncommitted>,
        ctx: &OperatorContext<'_>,
    ) -> Vec<BoxFuture<'static, ()>> {
        self.tell(metrics);
        let mut walked: Vec<(Walked, Vec<Route>)> = Vec::new();
        let mut chained = Vec::new();
        for ((lookahead, places), origin) in self.lookaheads.iter().zip(&self.origins) {
            // At the others the tasks look.
            let is_announced = |place: &Place| matches!(place, Place::Entry | Place::Root);
            let announced: Vec<Place> = places.iter().copied().filter(is_announced).collect();
            if lookahead.chained.is_none() && announced.is_empty() {
                continue;
            }
            let route = match self.route(graph, lookahead, metrics, ctx) {
                Ok(route) => route,
                Err(error) => {
                    tracing::warn!(job = %ctx.job, %error, "keys cannot be computed ahead");
                    continue;
                }
            };
            if lookahead.chained.is_some() {
                chained.push((lookahead, route));
                continue;
            }
            let Some(relation) = lookahead.relation else { continue };
            let (leaf, columns) = (lookahead.leaf, &origin.columns);
            let rows = Walked { leaf, relation, columns, places: announced };
            match walked.iter_mut().find(|(known, _)| *known == rows) {
                Some((_, routes)) => routes.push(route),
                None => walked.push((rows, vec![route])),
            }
        }
        let walker = |(rows, routes): (Walked<'_>, Vec<Route>)| {
            let Walked { leaf, relation, columns, places } = rows;
            let of_source = self.ahead.get(&leaf).filter(|_| is_source(graph, leaf));
            let uncommitted = of_source.unwrap_or(uncommitted);
            let columns = columns.to_vec();
            Walker::new(relation, places, columns, routes, uncommitted, &self.changed)
        };
        let behind = self.walkers_behind(graph, metrics, ctx);
        let walkers = walked.into_iter().map(walker).chain(behind);
        let walkers = walkers.map(|walker| walker.accounted(&ctx.governor).run().boxed());
        walkers.chain(self.chains.walker(chained).map(|walker| walker.run().boxed())).collect()
    }

    /// Walkers of rows that are committed and that a leaf has not come to: those of a first scan's next step, of the next
    /// part of a change, of the epochs that a job lacks. They look at them whichever place is in use: there these rows
    /// have been already.
    fn walkers_behind(
        &self,
        graph: &JobGraph,
        metrics: &HashMap<NodeId, Arc<OperatorMetrics>>,
        ctx: &OperatorContext<'_>,
    ) -> Vec<Walker> {
        let walker = |(leaf, followers): (&NodeId, &Arc<Uncommitted>)| {
            let (relation, columns) =
                subscription(graph, *leaf).filter(|_| !is_source(graph, *leaf))?;
            let is_own = |l: &&Lookahead| {
                let is_alone = l.chained.is_none() && l.inside.is_none();
                is_alone && (l.leaf, l.relation) == (*leaf, Some(relation))
            };
            let own = self.lookaheads.iter().map(|(l, _)| l).filter(is_own);
            // One that cannot be computed has been told of.
            let routes = own.filter_map(|l| self.route(graph, l, metrics, ctx).ok());
            let routes: Vec<Route> = routes.map(Route::at_any_place).collect();
            let (places, columns) = (vec![Place::Leaf], (0..columns.len()).collect());
            Some(Walker::new(relation, places, columns, routes, followers, &self.changed))
        };
        self.ahead.iter().filter_map(walker).collect()
    }

    /// What is looked at in each task of a fragment when its leaves have read it, or when its operators put it out. `ctx`
    /// as for walkers.
    pub fn leaf_hints(
        &self,
        graph: &JobGraph,
        fragment: usize,
        metrics: &HashMap<NodeId, Arc<OperatorMetrics>>,
        ctx: &OperatorContext<'_>,
    ) -> LeafHints {
        let mut hints = LeafHints::default();
        for (lookahead, places) in &self.lookaheads {
            let ((of, node), place) = match lookahead.inside {
                Some(inside) => (inside.from, Place::Input),
                None => (lookahead.leaf, Place::Leaf),
            };
            if of != fragment || !places.contains(&place) || lookahead.chained.is_some() {
                continue;
            }
            match self.route(graph, lookahead, metrics, ctx) {
                Ok(route) => {
                    let sketch = ctx.options.sketch;
                    hints.add(node, Frequent::new(route, place, sketch, &ctx.governor));
                }
                Err(error) => {
                    tracing::warn!(job = %ctx.job, %error, "keys cannot be computed ahead");
                }
            }
        }
        hints
    }

    /// Lets the counters of the operators tell that they are walked.
    fn tell(&self, metrics: &HashMap<NodeId, Arc<OperatorMetrics>>) {
        for (id, metrics) in metrics {
            let sides = self.sides.of_node(*id);
            let tasks: Vec<_> = (0..).map_while(|task| self.operator(*id, task)).collect();
            if !tasks.is_empty() {
                metrics.lookahead.walked.get_or_init(|| stats::Walked { sides, tasks });
            }
        }
    }

    fn route(
        &self,
        graph: &JobGraph,
        lookahead: &Lookahead,
        metrics: &HashMap<NodeId, Arc<OperatorMetrics>>,
        ctx: &OperatorContext<'_>,
    ) -> Result<Route, ExecError> {
        let (fragment, node) = (lookahead.fragment, lookahead.node);
        let end = |task: usize| {
            let hints = self.senders.get(&(fragment, task))?.clone();
            Some(TaskEnd { hints, operator: self.operator((fragment, node), task)? })
        };
        let missing = || ExecError::internal("a lookahead of a node that the graph does not have");
        let tasks: Vec<TaskEnd> = (0..).map_while(end).collect();
        let metrics = metrics.get(&(fragment, node)).filter(|_| !tasks.is_empty());
        let metrics = Arc::clone(metrics.ok_or_else(missing)?);
        let number = self.lookaheads.iter().position(|(l, _)| std::ptr::eq(l, lookahead));
        let number = number.and_then(|number| Some(self.origins.get(number)?.number));
        let route = Route::new(lookahead, &lookahead.input, tasks, metrics, ctx)?;
        let route = route.with_chain(number.and_then(|number| self.chains.of(number)));
        let side = self.sides.of(lookahead).ok_or_else(missing)?;
        let own = subscription(graph, lookahead.leaf).map(|(relation, _)| relation);
        Ok(route.at(side, own == lookahead.relation))
    }
}

/// What a walker looks at.
#[derive(PartialEq)]
struct Walked<'a> {
    leaf: NodeId,
    relation: RelationId,
    columns: &'a [usize],
    places: Vec<Place>,
}

fn kind_of(inputs: &[Arc<Relation>], relation: RelationId) -> Option<RelationKind> {
    let found = inputs.iter().find(|r| r.id == relation.0)?;
    Some(found.kind())
}

/// Where rows of a relation can be looked at, the earliest first: rows of a table when a statement brings them, those of
/// a source when they are read ahead, all but these when their epoch is sealed, and all when the leaf has read them, or
/// an operator puts them out, where they may wait behind it, unless the job is told otherwise.
fn places(mode: LookaheadMode, kind: Option<RelationKind>, lookahead: &Lookahead) -> Vec<Place> {
    let is_possible = |place: &Place| match place {
        Place::Entry => matches!(kind, Some(RelationKind::Table | RelationKind::Source)),
        Place::Root => kind.is_some_and(|kind| kind != RelationKind::Source),
        Place::Leaf | Place::Input => true,
    };
    let is_wanted = |place: &Place| match mode {
        LookaheadMode::Auto => true,
        LookaheadMode::Entry => *place == Place::Entry,
        LookaheadMode::Root => *place == Place::Root,
        LookaheadMode::Leaf => *place == Place::Leaf,
        LookaheadMode::Input => *place == Place::Input,
        // Of an operator it is one of the others.
        LookaheadMode::Off | LookaheadMode::Operator(..) => false,
    };
    let found = lookahead.places.iter().filter(|p| is_possible(p) && is_wanted(p));
    found.copied().collect()
}

/// What a leaf reads of which relation, among the columns that are announced: of a source those that it reads.
fn subscription(graph: &JobGraph, (fragment, node): NodeId) -> Option<(RelationId, Vec<usize>)> {
    match &graph.fragments.get(fragment)?.nodes.get(node)?.op {
        Op::Subscribe(of) => Some((of.relation, of.columns.clone())),
        Op::Source(of) => Some((of.relation, (0..of.columns.len()).collect())),
        _ => None,
    }
}

fn is_source(graph: &JobGraph, (fragment, node): NodeId) -> bool {
    let found = graph.fragments.get(fragment).and_then(|f| f.nodes.get(node));
    found.is_some_and(|n| matches!(n.op, Op::Source(_)))
}
