//! The ways from an input of an operator up to leaves on which the key can be followed.
//!
//! A way ends before, at a join, where rows of one of its inputs bring the key only together with the rows of the other
//! input that they meet; and at an operator whose own rows bring a key that none of its input do, if they may wait for
//! something before they reach the port.
//!
//! What is wanted of a row are columns of the input, each an expression over the columns of the node that the walk has
//! come to. A projection is put into the expressions; an operator that turns one row into several with new columns is
//! kept, and the walk goes on below it with the columns that it reads. Time and filters are left out where they cannot
//! be followed: a hint may be wrong.

use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::logical_expr::Volatility;
use datafusion::physical_expr::{ScalarFunctionExpr, conjunction, split_conjunction};
use millrace_functions::expr::{ExprRef, columns_of, placeholder, replace_columns};
use millrace_functions::tree::Walk;

use super::stages::Port;
use super::{Inside, NodeId, deleted};
use crate::{BufferMode, JobGraph, Join, JoinKind, Lookup, Node, Operator};

/// Ways that are followed from one port: enough for every query that is written by hand. Those that end inside the job
/// are counted for themselves.
const MAX_WAYS: usize = 16;
/// Nodes that are visited from one port.
const MAX_VISITS: usize = 1000;
/// Parts of one expression: putting projections into each other may double it each time.
const MAX_PARTS: usize = 200;

/// A way from a port up to where its keys can be computed.
#[derive(Clone)]
pub struct Way {
    pub end: End,
    /// Over the columns at the end.
    pub wanted: Wanted,
    /// From the end to the port.
    pub crossed: Vec<Crossed>,
    /// The inputs by which it has left unions and joins, from the port to the end.
    pub turns: Vec<usize>,
    /// The part of it that ends inside the job.
    pub within: Option<Box<Way>>,
}

/// Where a way ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    Leaf(NodeId),
    /// A join: rows of this input bring the key with the rows of the other input that they meet. Its columns are those
    /// of the left input, then those of the right one.
    Join(NodeId, usize),
    /// Rows inside the job bring the key.
    Inside(Inside),
}

impl End {
    fn is_inside(self) -> bool {
        matches!(self, End::Inside(_))
    }
}

/// What is wanted of a node's rows.
#[derive(Clone, Default)]
pub struct Wanted {
    pub columns: Vec<WantedColumn>,
    /// Predicates over the node's columns that must be true, those nearest to the leaf first.
    pub filters: Vec<ExprRef>,
}

/// A column that the node above has, and how it is computed.
#[derive(Clone)]
pub struct WantedColumn {
    pub column: usize,
    /// `None`: it cannot be computed here.
    pub expr: Option<ExprRef>,
    /// The key depends on it.
    pub required: bool,
}

/// An operator on the way that is no expression, and what is wanted of its rows.
#[derive(Clone)]
pub struct Crossed {
    pub node: NodeId,
    pub wanted: Wanted,
}

/// All ways on which the access key of a port, and other columns of its input with it, can be followed.
pub fn ways(graph: &JobGraph, port: &Port, others: &[usize]) -> Vec<Way> {
    let mut wanted = Wanted::default();
    let access = &port.access;
    access.key.iter().chain(&access.vnode).chain(others).for_each(|&c| wanted.add(c, true));
    port.time.into_iter().for_each(|c| wanted.add(c, false));
    let wanted = match access.filter {
        Some(filter) => wanted.with_filter(&placeholder(filter)),
        None => wanted,
    };
    let mut walk = Walker { graph, deleted: access.deleted, found: vec![], visits: 0 };
    walk.visit((port.node.0, port.input), wanted, Trail::default());
    walk.found
}

/// How the walk has come to a node.
#[derive(Clone, Default)]
struct Trail {
    /// Operators crossed so far, the last one first seen.
    crossed: Vec<Crossed>,
    turns: Vec<usize>,
    /// Where rows of the node wait next, on their way to the port.
    waits: Option<Wait>,
    /// The part of the way that ends inside the job: where rows wait for state behind it, as near to the port as there
    /// is one, else where they wait for an exchange.
    within: Option<(Wait, Way)>,
}

/// An operator at which rows may wait.
#[derive(Clone, Copy)]
struct Wait {
    at: NodeId,
    /// For state or for the barrier, and not only for another task.
    holds_up: bool,
}

impl Trail {
    fn turned(&self, input: usize) -> Trail {
        let mut trail = self.clone();
        trail.turns.push(input);
        trail
    }

    fn ends(self, end: End, wanted: Wanted) -> Way {
        let crossed = self.crossed.into_iter().rev().collect();
        let within = self.within.map(|(_, way)| Box::new(way));
        Way { end, wanted, crossed, turns: self.turns, within }
    }

    /// The way as it would end at a node, if its rows wait somewhere behind it.
    fn inside(&self, from: NodeId, wanted: &Wanted) -> Option<(Wait, Way)> {
        let waits = self.waits?;
        let end = End::Inside(Inside { from, input_of: waits.at });
        let trail = Trail { within: None, ..self.clone() };
        Some((waits, trail.ends(end, wanted.clone())))
    }

    /// Past an operator that holds rows up, with the way as it would end there.
    fn past(mut self, at: NodeId, here: Option<(Wait, Way)>) -> Trail {
        let is_nearer = |(waits, _): &(Wait, Way)| match &self.within {
            Some((known, _)) => waits.holds_up && !known.holds_up,
            None => true,
        };
        if let Some(here) = here.filter(is_nearer) {
            self.within = Some(here);
        }
        Trail { waits: Some(Wait { at, holds_up: true }), ..self }
    }

    /// Past an exchange.
    fn exchanged(mut self, at: NodeId) -> Trail {
        self.waits.get_or_insert(Wait { at, holds_up: false });
        self
    }
}

struct Walker<'a> {
    graph: &'a JobGraph,
    /// Only of rows that are deleted at the port.
    deleted: bool,
    found: Vec<Way>,
    visits: usize,
}

impl Walker<'_> {
    /// Goes on at a node whose rows are wanted.
    fn visit(&mut self, at: NodeId, wanted: Wanted, above: Trail) {
        self.visits += 1;
        if self.visits > MAX_VISITS || self.count(false) >= MAX_WAYS {
            return;
        }
        let graph = self.graph;
        let Some(nodes) = graph.fragments.get(at.0).map(|f| &f.nodes) else { return };
        let Some(node) = nodes.get(at.1) else { return };
        let input = |port: usize| node.inputs.get(port).map(|&i| (at.0, i));
        let (Some(below), Some(width)) = (input(0), width(nodes, node, 0)) else {
            return self.enter(at, node, wanted, above);
        };
        let here = above.inside(at, &wanted);
        let above = if holds_up(&node.op) { above.past(at, here.clone()) } else { above };
        let goes_on = match &node.op {
            op if self.deleted && !deleted::passes(op) => false,
            Operator::Filter(filter) => {
                self.go_on(below, wanted.with_filter(&filter.predicate), above)
            }
            Operator::Project(project) => {
                let expr = |c: usize| project.exprs.get(c).filter(|e| is_immutable(e)).cloned();
                self.through(below, &wanted, above, expr)
            }
            Operator::Union(_) => {
                for (turn, &input) in node.inputs.iter().enumerate() {
                    self.visit((at.0, input), wanted.clone(), above.turned(turn));
                }
                true
            }
            // How often a row comes does not matter.
            Operator::Repeat(_) => self.go_on(below, wanted, above),
            Operator::Hop(_) | Operator::Expand(_) | Operator::Unnest(_) => {
                self.cross(at, node, below, wanted, above)
            }
            Operator::Aggregate(a) => {
                self.through(below, &wanted, above, |c| a.group.get(c).map(|&g| placeholder(g)))
            }
            // The input's columns, and behind them what is computed of several rows or of the clock.
            Operator::TopN(_) | Operator::Window(_) | Operator::Stamp(_) => {
                self.through(below, &wanted, above, |c| (c < width).then(|| placeholder(c)))
            }
            // Its rows pass at once; others wait for an instant.
            Operator::Buffer(b) if b.mode == BufferMode::UpperBound => {
                self.go_on(below, wanted, above)
            }
            Operator::Join(join) => self.join(at, node, join, &wanted, &above),
            Operator::Lookup(lookup) => self.lookup(at, node, lookup, &wanted, above),
            _ => false,
        };
        if let Some((_, way)) = here.filter(|_| !goes_on) {
            self.add(way);
        }
    }

    fn go_on(&mut self, at: NodeId, wanted: Wanted, above: Trail) -> bool {
        self.visit(at, wanted, above);
        true
    }

    fn add(&mut self, way: Way) {
        if self.count(way.end.is_inside()) < MAX_WAYS {
            self.found.push(way);
        }
    }

    /// How many ways were found that end inside the job, or that do not.
    fn count(&self, inside: bool) -> usize {
        self.found.iter().filter(|way| way.end.is_inside() == inside).count()
    }

    /// Goes on at a node without an input: a leaf, or an exchange.
    fn enter(&mut self, at: NodeId, node: &Node, wanted: Wanted, above: Trail) {
        match &node.op {
            Operator::Exchange(exchange) => {
                let from = self.graph.fragments.get(exchange.fragment);
                if let Some(edge) = from.and_then(|f| f.outputs.get(exchange.output)) {
                    self.visit((exchange.fragment, edge.from), wanted, above.exchanged(at));
                }
            }
            Operator::Subscribe(_) | Operator::Source(_) => {
                self.add(above.ends(End::Leaf(at), wanted));
            }
            _ => {}
        }
    }

    /// Goes on below an operator each of whose columns is an expression over its input; this and what follows say whether
    /// they can.
    fn through(
        &mut self,
        below: NodeId,
        wanted: &Wanted,
        above: Trail,
        expr: impl Fn(usize) -> Option<ExprRef>,
    ) -> bool {
        let wanted = wanted.over(&expr);
        wanted.is_some_and(|wanted| self.go_on(below, wanted, above))
    }

    /// Goes on on each side of a join that the key can be computed from. A side whose rows bring it only with what they
    /// meet is an end, also where the other side brings it alone: its rows may be there before.
    fn join(
        &mut self,
        at: NodeId,
        node: &Node,
        join: &Join,
        wanted: &Wanted,
        above: &Trail,
    ) -> bool {
        let nodes = &self.graph.fragments[at.0].nodes;
        let alone = [0, 1]
            .map(|side| wanted.over(&|c| join_column(join, nodes, node, side, c).map(placeholder)));
        let mut goes_on = false;
        for (side, alone) in alone.into_iter().enumerate() {
            let Some(&below) = node.inputs.get(side) else { continue };
            if self.deleted && !deleted::passes_join(join.kind, side) {
                continue;
            }
            let above = above.turned(side);
            goes_on |= match alone {
                Some(wanted) => self.go_on((at.0, below), wanted, above),
                None => {
                    let column = |c: usize| pair_column(join, c);
                    self.end(End::Join(at, side), wanted, &join.residual, above, column)
                }
            }
        }
        goes_on
    }

    /// Goes on on the left side of a lookup: the right side emits nothing.
    fn lookup(
        &mut self,
        at: NodeId,
        node: &Node,
        lookup: &Lookup,
        wanted: &Wanted,
        above: Trail,
    ) -> bool {
        let nodes = &self.graph.fragments[at.0].nodes;
        let Some(&below) = node.inputs.first() else { return false };
        let above = above.turned(0);
        match wanted.over(&|c| lookup_column(lookup, nodes, node, c)) {
            Some(wanted) => self.go_on((at.0, below), wanted, above),
            None => {
                let column = |c: usize| lookup.output.get(c).copied();
                self.end(End::Join(at, 0), wanted, &lookup.residual, above, column)
            }
        }
    }

    /// Ends at a join whose column is one of its inputs', the left one's first. What is paired there does not tell whether
    /// it is deleted.
    fn end(
        &mut self,
        end: End,
        wanted: &Wanted,
        residual: &Option<ExprRef>,
        above: Trail,
        column: impl Fn(usize) -> Option<usize>,
    ) -> bool {
        if self.deleted {
            return false;
        }
        let Some(mut wanted) = wanted.over(&|c| column(c).map(placeholder)) else { return false };
        if let Some(residual) = residual {
            wanted = wanted.with_filter(residual);
        }
        self.add(above.ends(end, wanted));
        true
    }

    /// Goes on below an operator that makes several rows of one, with columns of its own.
    fn cross(
        &mut self,
        at: NodeId,
        node: &Node,
        below: NodeId,
        wanted: Wanted,
        mut above: Trail,
    ) -> bool {
        let Some(width) = width(&self.graph.fragments[at.0].nodes, node, 0) else { return false };
        let own = |c: usize| match &node.op {
            Operator::Unnest(unnest) => unnest.lists.contains(&c),
            _ => c >= width,
        };
        let (wanted, lower) = wanted.without_filters_of(own);
        let read = wanted.read();
        let required = |&(c, required): &(usize, bool)| required && own(c);
        if wanted.filters.is_empty() && !read.iter().any(required) {
            let filters = lower;
            let below_it = |c: usize| (!own(c)).then(|| placeholder(c));
            return self.through(below, &Wanted { filters, ..wanted }, above, below_it);
        }
        let mut next = Wanted { columns: vec![], filters: lower };
        for (c, required) in read {
            for c in sources(&node.op, width, c) {
                next.add(c, required);
            }
        }
        above.crossed.push(Crossed { node: at, wanted });
        self.go_on(below, next, above)
    }
}

/// The input columns that a column of such an operator is made of.
fn sources(op: &Operator, width: usize, c: usize) -> Vec<usize> {
    match op {
        Operator::Hop(hop) if c >= width => vec![hop.time_column],
        Operator::Expand(expand) if c >= width => {
            expand.columns.get(c - width).copied().into_iter().collect()
        }
        // They are read side by side.
        Operator::Unnest(unnest) if unnest.lists.contains(&c) => unnest.lists.clone(),
        _ => vec![c],
    }
}

/// The column of one side of a join that a column of its output is, or is equal to.
fn join_column(join: &Join, nodes: &[Node], node: &Node, side: usize, c: usize) -> Option<usize> {
    use JoinKind as Kind;
    let at = *join.output.get(c)?;
    let left = width(nodes, node, 0)?;
    let (from, column) = match join.kind {
        Kind::LeftSemi | Kind::LeftAnti => (0, at),
        Kind::LeftMark if at < left => (0, at),
        Kind::LeftMark => return None,
        Kind::RightSemi | Kind::RightAnti => (1, at),
        Kind::Inner | Kind::LeftOuter | Kind::RightOuter | Kind::FullOuter if at < left => (0, at),
        Kind::Inner | Kind::LeftOuter | Kind::RightOuter | Kind::FullOuter => (1, at - left),
    };
    if from == side {
        return Some(column);
    }
    // A null-aware join compares by rules of its own.
    let mut pairs = join.pairs().filter(|_| !join.null_aware);
    let (l, r) = pairs.find(|&(l, r)| if from == 0 { l == column } else { r == column })?;
    same_type(nodes, node, l, r).then_some(if side == 0 { l } else { r })
}

/// The column of both inputs of a join, the left one's first, that a column of its output is. A null-aware join
/// compares by rules of its own, and the rows of a key of none are all that there are.
fn pair_column(join: &Join, c: usize) -> Option<usize> {
    use JoinKind as Kind;
    let pairs =
        matches!(join.kind, Kind::Inner | Kind::LeftOuter | Kind::RightOuter | Kind::FullOuter);
    let at = join.output.get(c).copied();
    at.filter(|_| pairs && !join.null_aware && !join.left.keys.is_empty())
}

/// The left column that a column of a lookup's output is, or is equal to.
fn lookup_column(lookup: &Lookup, nodes: &[Node], node: &Node, c: usize) -> Option<ExprRef> {
    let at = *lookup.output.get(c)?;
    let left = width(nodes, node, 0)?;
    if at < left {
        return Some(placeholder(at));
    }
    let mut pairs = lookup.left_keys.iter().zip(&lookup.right.keys);
    let (&l, &r) = pairs.find(|(_, r)| **r == at - left)?;
    same_type(nodes, node, l, r).then(|| placeholder(l))
}

/// Whether a left and a right column are encoded alike.
fn same_type(nodes: &[Node], node: &Node, left: usize, right: usize) -> bool {
    let field = |port: usize, c: usize| {
        let input = nodes.get(*node.inputs.get(port)?)?;
        input.schema.fields().get(c).map(|f| f.data_type())
    };
    field(0, left).is_some_and(|l| Some(l) == field(1, right))
}

/// Whether rows wait at an operator: for state that it reads, or for the barrier at which it emits.
fn holds_up(op: &Operator) -> bool {
    // What is held in a buffer waits for an instant, which is no lead; other rows pass at once.
    !matches!(op, Operator::Buffer(_)) && !op.cleaned_tables().is_empty()
}

/// How many columns an input has.
fn width(nodes: &[Node], node: &Node, port: usize) -> Option<usize> {
    Some(nodes.get(*node.inputs.get(port)?)?.schema.fields().len())
}

/// Whether an expression gives the same for the same row, whenever it is evaluated.
fn is_immutable(e: &ExprRef) -> bool {
    let other = |e: &ExprRef| {
        e.downcast_ref::<ScalarFunctionExpr>()
            .is_some_and(|f| f.fun().signature().volatility != Volatility::Immutable)
    };
    !e.any(|e| Ok(other(e))).unwrap_or(true)
}

fn parts(e: &ExprRef) -> usize {
    let mut count = 0;
    let counted = e.walk(|_| {
        count += 1;
        let enough = count > MAX_PARTS;
        Ok(if enough { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    });
    if counted.is_ok() { count } else { usize::MAX }
}

impl Wanted {
    /// A column of the node as it is.
    fn add(&mut self, column: usize, required: bool) {
        match self.columns.iter_mut().find(|w| w.column == column) {
            Some(known) => known.required |= required,
            None => {
                self.columns.push(WantedColumn {
                    column,
                    expr: Some(placeholder(column)),
                    required,
                });
            }
        }
    }

    fn with_filter(mut self, predicate: &ExprRef) -> Wanted {
        let deterministic = split_conjunction(predicate).into_iter().filter(|e| is_immutable(e));
        let kept: Vec<ExprRef> = deterministic.cloned().collect();
        if !kept.is_empty() {
            self.filters.insert(0, conjunction(kept));
        }
        self
    }

    /// The same over the columns below; `None` where the key is lost.
    fn over(&self, expr: &dyn Fn(usize) -> Option<ExprRef>) -> Option<Wanted> {
        let put = |e: &ExprRef| {
            let e = replace_columns(e, expr).ok()?;
            (parts(&e) <= MAX_PARTS).then_some(e)
        };
        let mut columns = Vec::with_capacity(self.columns.len());
        for wanted in &self.columns {
            let expr = wanted.expr.as_ref().and_then(put);
            if wanted.required && expr.is_none() {
                return None;
            }
            columns.push(WantedColumn { expr, ..wanted.clone() });
        }
        let filter = |e: &ExprRef| {
            let kept: Vec<ExprRef> = split_conjunction(e).into_iter().filter_map(put).collect();
            (!kept.is_empty()).then(|| conjunction(kept))
        };
        Some(Wanted { columns, filters: self.filters.iter().filter_map(filter).collect() })
    }

    /// The same without the filters that do not read such columns, and those.
    fn without_filters_of(self, own: impl Fn(usize) -> bool) -> (Wanted, Vec<ExprRef>) {
        let (filters, lower): (Vec<_>, Vec<_>) =
            self.filters.into_iter().partition(|f| columns_of(f).into_iter().any(&own));
        (Wanted { columns: self.columns, filters }, lower)
    }

    pub fn reads(&self, column: usize) -> bool {
        self.read().iter().any(|r| r.0 == column)
    }

    /// The columns that are read, each once, and whether the key depends on them.
    pub fn read(&self) -> Vec<(usize, bool)> {
        let mut read = Wanted::default();
        for wanted in &self.columns {
            let columns = wanted.expr.iter().flat_map(columns_of);
            columns.for_each(|c| read.add(c, wanted.required));
        }
        for filter in &self.filters {
            columns_of(filter).into_iter().for_each(|c| read.add(c, false));
        }
        read.columns.iter().map(|w| (w.column, w.required)).collect()
    }
}
