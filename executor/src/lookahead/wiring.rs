//! Connects a job's walkers with the tasks that own the keys, when the job starts.

use std::sync::Arc;

use millrace_common::RelationId;
use millrace_common::collections::HashMap;
use millrace_graph::lookahead::{Lookahead, Place, lookaheads};
use millrace_graph::{JobGraph, Operator as Op};
use millrace_rpc::catalog::{Relation, RelationKind};
use tokio::sync::{Notify, mpsc};

use super::Hint;
use super::operator::OperatorLookahead;
use super::route::{Route, TaskEnd};
use super::uncommitted::Uncommitted;
use super::walker::Walker;
use crate::error::ExecError;
use crate::operator::OperatorContext;
use crate::options::LookaheadMode;
use crate::stats::{OperatorMetrics, Walked};

/// Hints that wait for a task at most: beyond it they are dropped.
const TASK_HINTS: usize = 64;

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
    senders: HashMap<(usize, usize), mpsc::Sender<Hint>>,
    receivers: HashMap<(usize, usize), mpsc::Receiver<Hint>>,
    /// By node and task.
    operators: HashMap<(NodeId, usize), Arc<OperatorLookahead>>,
}

impl Wiring {
    /// For a job with this graph; `tasks` are as many as each fragment has.
    pub fn new(
        graph: &JobGraph,
        inputs: &[Relation],
        mode: LookaheadMode,
        tasks: &[usize],
    ) -> Wiring {
        let found = match mode {
            LookaheadMode::Off => Vec::new(),
            _ => lookaheads(graph),
        };
        let with_places = found.into_iter().filter_map(|l| {
            let places = places(mode, kind_of(inputs, l.relation)?, &l);
            (l.depth == 1 && !places.is_empty()).then_some((l, places))
        });
        let lookaheads: Vec<_> = with_places.collect();
        let ahead = lookaheads.iter().map(|(l, _)| (l.leaf, Arc::default())).collect();
        Wiring { ahead, ..Wiring::of(lookaheads, tasks) }
    }

    fn of(lookaheads: Vec<(Lookahead, Vec<Place>)>, tasks: &[usize]) -> Wiring {
        let changed = Arc::default();
        let (mut senders, mut receivers) = (HashMap::default(), HashMap::default());
        let mut operators = HashMap::default();
        for (lookahead, _) in &lookaheads {
            let fragment = lookahead.fragment;
            for task in 0..tasks.get(fragment).copied().unwrap_or(0) {
                senders.entry((fragment, task)).or_insert_with(|| {
                    let (sender, receiver) = mpsc::channel(TASK_HINTS);
                    receivers.insert((fragment, task), receiver);
                    sender
                });
                operators
                    .entry(((fragment, lookahead.node), task))
                    .or_insert_with(|| OperatorLookahead::new(&changed));
            }
        }
        let ahead = HashMap::default();
        Wiring { lookaheads, ahead, changed, senders, receivers, operators }
    }

    /// Whom the tasks of a leaf are to tell of what they read ahead, if anybody may look at it.
    pub fn followers(&self, leaf: NodeId) -> Option<Arc<Uncommitted>> {
        self.ahead.get(&leaf).cloned()
    }

    /// Where hints for a task arrive; nothing ever does if it has no operator with lookaheads.
    pub fn hints(&mut self, fragment: usize, task: usize) -> mpsc::Receiver<Hint> {
        self.receivers.remove(&(fragment, task)).unwrap_or_else(|| mpsc::channel(1).1)
    }

    /// What an operator shares with walkers, if any are to send it hints.
    pub fn operator(
        &self,
        (fragment, node): NodeId,
        task: usize,
    ) -> Option<Arc<OperatorLookahead>> {
        self.operators.get(&((fragment, node), task)).cloned()
    }

    /// A walker for each leaf with lookaheads. `ctx` is for operators without state.
    pub fn walkers(
        self,
        graph: &JobGraph,
        metrics: &HashMap<NodeId, Arc<OperatorMetrics>>,
        uncommitted: &Arc<Uncommitted>,
        ctx: &OperatorContext<'_>,
    ) -> Vec<Walker> {
        self.tell(metrics);
        let mut leaves: Vec<((NodeId, &[Place]), Vec<Route>)> = Vec::new();
        for (lookahead, places) in &self.lookaheads {
            let route = match self.route(graph, lookahead, metrics, ctx) {
                Ok(route) => route,
                Err(error) => {
                    tracing::warn!(job = %ctx.job, %error, "keys cannot be computed ahead");
                    continue;
                }
            };
            let leaf = (lookahead.leaf, places.as_slice());
            match leaves.iter_mut().find(|(known, _)| *known == leaf) {
                Some((_, routes)) => routes.push(route),
                None => leaves.push((leaf, vec![route])),
            }
        }
        let walker = |((leaf, places), routes): ((NodeId, &[Place]), Vec<Route>)| {
            let (relation, columns) = subscription(graph, leaf)?;
            let of_source = self.ahead.get(&leaf).filter(|_| is_source(graph, leaf));
            let (places, uncommitted) = (places.to_vec(), of_source.unwrap_or(uncommitted));
            Some(Walker::new(relation, places, columns, routes, uncommitted, &self.changed))
        };
        let behind = self.walkers_behind(graph, metrics, ctx);
        leaves.into_iter().filter_map(walker).chain(behind).collect()
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
            let own = self.lookaheads.iter().map(|(l, _)| l).filter(|l| l.leaf == *leaf);
            // One that cannot be computed has been told of.
            let routes: Vec<Route> =
                own.filter_map(|l| self.route(graph, l, metrics, ctx).ok()).collect();
            let (places, columns) = (vec![Place::Leaf], (0..columns.len()).collect());
            Some(Walker::new(relation, places, columns, routes, followers, &self.changed))
        };
        self.ahead.iter().filter_map(walker).collect()
    }

    /// Lets the counters of the operators tell that they are walked.
    fn tell(&self, metrics: &HashMap<NodeId, Arc<OperatorMetrics>>) {
        for (id, metrics) in metrics {
            let of_node = self.lookaheads.iter().filter(|(l, _)| (l.fragment, l.node) == *id);
            let mut places: Vec<Place> = of_node.flat_map(|(_, places)| places.clone()).collect();
            places.dedup();
            let tasks: Vec<_> = (0..).map_while(|task| self.operator(*id, task)).collect();
            if !tasks.is_empty() {
                metrics.lookahead.walked.get_or_init(|| Walked { places, tasks });
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
        let (of, leaf) = lookahead.leaf;
        let leaf = graph.fragments.get(of).and_then(|f| f.nodes.get(leaf)).ok_or_else(missing)?;
        Route::new(lookahead, &leaf.schema, tasks, metrics, ctx)
    }
}

fn kind_of(inputs: &[Relation], relation: RelationId) -> Option<RelationKind> {
    let found = inputs.iter().find(|r| r.id == relation.0)?;
    Some(found.kind())
}

/// Where rows of a relation are looked at: rows of a table when a statement brings them, those of a source when they are
/// read ahead, others when their epoch is sealed, unless the job is told otherwise.
fn places(mode: LookaheadMode, kind: RelationKind, lookahead: &Lookahead) -> Vec<Place> {
    let place = match (mode, kind) {
        (LookaheadMode::Off, _) | (LookaheadMode::Root, RelationKind::Source) => return Vec::new(),
        (
            LookaheadMode::Auto | LookaheadMode::Entry,
            RelationKind::Table | RelationKind::Source,
        ) => Place::Entry,
        (LookaheadMode::Entry, _) => return Vec::new(),
        (LookaheadMode::Auto | LookaheadMode::Root, _) => Place::Root,
    };
    lookahead.places.iter().filter(|p| **p == place).copied().collect()
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
