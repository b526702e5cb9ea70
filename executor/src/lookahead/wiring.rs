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
        Wiring::of(with_places.collect(), tasks)
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
        Wiring { lookaheads, changed, senders, receivers, operators }
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
            let (places, columns) = (places.to_vec(), columns.to_vec());
            Some(Walker::new(relation, places, columns, routes, uncommitted, &self.changed))
        };
        leaves.into_iter().filter_map(walker).collect()
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

/// Where rows of a relation are looked at: rows of a table when a statement brings them, others when their epoch is
/// sealed, unless the job is told otherwise.
fn places(mode: LookaheadMode, kind: RelationKind, lookahead: &Lookahead) -> Vec<Place> {
    let place = match (mode, kind) {
        (LookaheadMode::Off, _) | (_, RelationKind::Source) => return Vec::new(),
        (LookaheadMode::Auto | LookaheadMode::Entry, RelationKind::Table) => Place::Entry,
        (LookaheadMode::Entry, _) => return Vec::new(),
        (LookaheadMode::Auto | LookaheadMode::Root, _) => Place::Root,
    };
    lookahead.places.iter().filter(|p| **p == place).copied().collect()
}

/// What a leaf reads of which relation.
fn subscription(graph: &JobGraph, (fragment, node): NodeId) -> Option<(RelationId, &[usize])> {
    match &graph.fragments.get(fragment)?.nodes.get(node)?.op {
        Op::Subscribe(of) => Some((of.relation, &of.columns)),
        _ => None,
    }
}
