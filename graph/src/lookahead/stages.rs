//! Lookaheads and those that they are chained to.
//!
//! A way that ends at a join makes a *demand* on one of the join's inputs: that its hints carry certain columns of its
//! rows. Demands are made from the operators downwards to the leaves; then the lookaheads of each port are made, those
//! that come before them first. Ways of a port that take the same turns are one lookahead, which carries what all of
//! them demand.

use arrow::datatypes::{DataType, SchemaRef};

use super::steps::{self, Pairs, node};
use super::walk::{End, Way, ways};
use super::{Access, Lookahead, NodeId, accesses, deleted};
use crate::{JobGraph, event_time_column};

/// Bytes that a hint may carry for each key.
const MAX_CARRIED: usize = 64;
/// What a text is taken to have.
const TEXT: usize = 16;
/// Lookaheads of one port, and reads that are chained.
const MAX_STAGES: usize = 16;
const MAX_DEPTH: usize = 8;
/// Demands on one port.
const MAX_DEMANDS: usize = 16;

/// Keyed state that rows of an input read.
pub struct Port {
    pub node: NodeId,
    pub access: Access,
    /// The node whose rows arrive at the port.
    pub input: usize,
    /// Their column with the event time.
    pub time: Option<usize>,
    /// Columns that hints are to carry; each list is sorted.
    demands: Vec<Vec<usize>>,
    routes: Vec<Route>,
}

/// Where a way of a port leads, and the columns that are to be carried on it.
struct Route {
    turns: Vec<usize>,
    end: End,
    carried: Vec<usize>,
}

/// A lookahead of a port.
pub struct Stage {
    pub lookahead: Lookahead,
    /// The columns of the port's input that it carries, in the order of [`Lookahead::carried`].
    pub columns: Vec<usize>,
    /// The port that it is chained to, and the position among its stages.
    after: Option<(usize, usize)>,
}

/// All lookaheads of a job, by operator.
pub fn lookaheads(graph: &JobGraph) -> Vec<Lookahead> {
    let mut finder = Finder { graph, ports: ports(graph), stages: vec![] };
    finder.stages.resize_with(finder.ports.len(), || None);
    finder.demand();
    (0..finder.ports.len()).for_each(|port| finder.make(port));
    finder.all()
}

fn ports(graph: &JobGraph) -> Vec<Port> {
    let mut ports = Vec::new();
    for (fragment, nodes) in graph.fragments.iter().map(|f| &f.nodes).enumerate() {
        for (number, operator) in nodes.iter().enumerate() {
            let all = accesses(graph, &operator.op).into_iter();
            for access in all.chain(deleted::access(nodes, operator)) {
                let Some(&input) = operator.inputs.get(access.input_port) else { continue };
                let time = nodes.get(input).and_then(|n| event_time_column(&n.marks));
                ports.push(Port::new((fragment, number), access, input, time));
            }
        }
    }
    ports
}

struct Finder<'a> {
    graph: &'a JobGraph,
    ports: Vec<Port>,
    /// Of each port, once they are made.
    stages: Vec<Option<Vec<Stage>>>,
}

impl Finder<'_> {
    /// Finds the routes of all ports, with what is carried on them.
    fn demand(&mut self) {
        let mut open: Vec<(usize, Vec<usize>)> =
            (0..self.ports.len()).rev().map(|port| (port, vec![])).collect();
        while let Some((port, columns)) = open.pop() {
            let Some(input) = self.schema_of(port) else { continue };
            for way in ways(self.graph, &self.ports[port], &columns) {
                if let Some((before, carried)) = self.before(&way)
                    && let demands = &mut self.ports[before].demands
                    && !demands.contains(&carried)
                    && demands.len() < MAX_DEMANDS
                {
                    demands.push(carried.clone());
                    open.push((before, carried));
                }
                self.ports[port].add_route(&way, &columns, &input);
            }
        }
    }

    fn schema_of(&self, port: usize) -> Option<SchemaRef> {
        let Port { node: (fragment, _), input, .. } = self.ports.get(port)?;
        Some(SchemaRef::clone(&node(self.graph, (*fragment, *input))?.schema))
    }

    /// The port that comes before a way, and the columns of its rows that the key depends on. `None`: nothing does, or
    /// they are too large.
    fn before(&self, way: &Way) -> Option<(usize, Vec<usize>)> {
        let End::Join(at, side) = way.end else { return None };
        let is_it = |p: &Port| p.node == at && p.access.port == side && !p.access.deleted;
        let before = self.ports.iter().position(is_it)?;
        let left = *node(self.graph, at)?.inputs.first()?;
        let left = node(self.graph, (at.0, left))?.schema.fields().len();
        let carried = Pairs { left, side }.carried(&way.wanted);
        fits(&self.schema_of(before)?, &carried).then_some((before, carried))
    }

    /// Makes the lookaheads of a port, after those that they are chained to.
    fn make(&mut self, port: usize) {
        if self.stages[port].is_some() {
            return;
        }
        let (mut made, mut inside): (Vec<Stage>, Vec<Stage>) = Default::default();
        let plain = ways(self.graph, &self.ports[port], &[]);
        for i in 0..self.ports[port].routes.len() {
            let Route { turns, end, carried } = &self.ports[port].routes[i];
            let is_route = |w: &&Way| w.turns == *turns && w.end == *end;
            let carrying = ways(self.graph, &self.ports[port], carried);
            let Some(way) = carrying.iter().find(is_route) else { continue };
            let (way, plain) = (way.clone(), plain.iter().find(is_route));
            let stages = match (way.end, self.before(&way)) {
                // Hints of rows inside the job carry nothing.
                (End::Inside(_), _) => vec![],
                (_, Some((before, _))) => {
                    self.make(before);
                    self.chained(port, i, &way, before)
                }
                (_, None) => self.stage(port, i, &way, None).into_iter().collect(),
            };
            let more = plain.map_or(vec![], |way| self.inside(port, way, &stages));
            more.into_iter().for_each(|new| add(&mut inside, new));
            stages.into_iter().for_each(|new| add(&mut made, new));
        }
        made.sort_by_key(|stage| stage.lookahead.depth);
        made.truncate(MAX_STAGES);
        inside.truncate(MAX_STAGES);
        made.append(&mut inside);
        self.stages[port] = Some(made);
    }

    /// The lookaheads by rows inside the job on a way, one beside each of these by the whole of it. Where a join brings
    /// the key and nothing can be chained, there is one for itself.
    fn inside(&self, port: usize, way: &Way, beside: &[Stage]) -> Vec<Stage> {
        let of_port = &self.ports[port];
        let (within, is_alone) = match way.end {
            End::Inside(_) => (Some(way), true),
            End::Join(..) => (way.within.as_deref(), beside.is_empty()),
            End::Leaf(_) => (way.within.as_deref(), false),
        };
        let found = within.and_then(|w| steps::lookahead(self.graph, of_port, &[], w, None));
        let Some(found) = found else { return vec![] };
        let stage = |lookahead| Stage { lookahead, columns: vec![], after: None };
        if is_alone {
            return vec![stage(found)];
        }
        let same_leaf = |Stage { lookahead: l, .. }: &Stage| {
            stage(Lookahead { leaf: l.leaf, relation: l.relation, ..found.clone() })
        };
        beside.iter().map(same_leaf).collect()
    }

    /// The lookaheads by a route that are chained to those of another port.
    fn chained(&self, port: usize, route: usize, way: &Way, before: usize) -> Vec<Stage> {
        let stages = self.stages[before].iter().flatten().enumerate();
        let carries = |l: &Lookahead| l.inside.is_none() && l.depth < MAX_DEPTH;
        let stages = stages.filter(|(_, stage)| carries(&stage.lookahead));
        stages.filter_map(|(i, _)| self.stage(port, route, way, Some((before, i)))).collect()
    }

    fn stage(
        &self,
        port: usize,
        route: usize,
        way: &Way,
        after: Option<(usize, usize)>,
    ) -> Option<Stage> {
        let port = &self.ports[port];
        let columns = port.routes[route].carried.clone();
        let before = match after {
            Some((of, i)) => Some(self.stages[of].as_ref()?.get(i)?),
            None => None,
        };
        let lookahead = steps::lookahead(self.graph, port, &columns, way, before)?;
        Some(Stage { lookahead, columns, after })
    }

    fn all(self) -> Vec<Lookahead> {
        let of_ports: Vec<Vec<Stage>> =
            self.stages.into_iter().map(Option::unwrap_or_default).collect();
        let first: Vec<usize> = of_ports
            .iter()
            .scan(0, |next, stages| Some(std::mem::replace(next, *next + stages.len())))
            .collect();
        let numbered = |Stage { mut lookahead, after, .. }: Stage| {
            if let (Some(chained), Some((port, i))) = (&mut lookahead.chained, after) {
                chained.after = first[port] + i;
            }
            lookahead
        };
        of_ports.into_iter().flatten().map(numbered).collect()
    }
}

impl Port {
    pub fn new(node: NodeId, access: Access, input: usize, time: Option<usize>) -> Port {
        Port { node, access, input, time, demands: vec![vec![]], routes: vec![] }
    }

    /// Columns are to be carried on a way; it is one with another that takes the same turns, if they fit.
    fn add_route(&mut self, way: &Way, columns: &[usize], input: &SchemaRef) {
        let mut same = self.routes.iter_mut().filter(|r| r.turns == way.turns && r.end == way.end);
        let joined = same.find_map(|route| {
            let mut all = [route.carried.as_slice(), columns].concat();
            all.sort_unstable();
            all.dedup();
            fits(input, &all).then_some((route, all))
        });
        match joined {
            Some((route, all)) => route.carried = all,
            None => {
                let (turns, end) = (way.turns.clone(), way.end);
                self.routes.push(Route { turns, end, carried: columns.to_vec() });
            }
        }
    }
}

/// Adds a lookahead to others of a port, if it is none of them.
fn add(stages: &mut Vec<Stage>, new: Stage) {
    let is_known =
        |other: &Stage| other.after == new.after && other.lookahead.is_same(&new.lookahead);
    if !stages.iter().any(is_known) {
        stages.push(new);
    }
}

/// Whether a hint may carry these columns.
fn fits(schema: &SchemaRef, columns: &[usize]) -> bool {
    let width = |&c: &usize| match schema.fields().get(c)?.data_type() {
        DataType::Boolean => Some(1),
        DataType::Utf8 | DataType::Binary => Some(TEXT),
        fixed => fixed.primitive_width(),
    };
    let widths: Option<Vec<usize>> = columns.iter().map(width).collect();
    widths.is_some_and(|widths| widths.iter().sum::<usize>() <= MAX_CARRIED)
}
