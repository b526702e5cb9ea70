//! The nodes that compute what is wanted from a leaf's rows, or from what the rows of another lookahead have met, only
//! with the columns that are needed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow::datatypes::{FieldRef, Schema, SchemaRef};
use datafusion::physical_expr::{conjunction, split_conjunction};
use millrace_common::RelationId;
use millrace_functions::expr::{
    ExprRef, as_column, column, columns_of, output_field, replace_columns,
};

use super::stages::{Port, Stage};
use super::walk::{Crossed, End, Wanted, Way};
use super::{Chained, Inside, Lookahead, NodeId, Place};
use crate::{Expand, Filter, Hop, JobGraph, Node, Operator, Project, Unnest};

/// The lookahead of a port by a way; `None` where the key is the same for all rows. `carried`: columns of the port's
/// input that its hints bring along. `before`: of a way that ends at a join, the lookahead of the join's input.
pub fn lookahead(
    graph: &JobGraph,
    port: &Port,
    carried: &[usize],
    way: &Way,
    before: Option<&Stage>,
) -> Option<Lookahead> {
    let (mut rows, first) = match (way.end, before) {
        (End::Leaf(at), _) => {
            let leaf = node(graph, at)?;
            (Rows::of_node(leaf), First::of_leaf(at, leaf)?)
        }
        (End::Inside(inside), _) => {
            (Rows::of_node(node(graph, inside.from)?), First::inside(inside))
        }
        (End::Join(at, side), Some(stage)) => Rows::of_pairs(graph, at, side, &way.wanted, stage)?,
        (End::Join(..), None) => return None,
    };
    let input = Arc::clone(&rows.schema);
    let mut wanted = &way.wanted;
    for crossed in &way.crossed {
        let operator = node(graph, crossed.node)?;
        let below = node(graph, (crossed.node.0, *operator.inputs.first()?))?;
        rows.compute(wanted, &below.schema, false)?;
        rows.cross(operator, crossed, below.schema.fields().len())?;
        wanted = &crossed.wanted;
    }
    rows.compute(wanted, &node(graph, (port.node.0, port.input))?.schema, true)?;
    let columns =
        |of: &[usize]| of.iter().map(|c| rows.at.get(c).copied()).collect::<Option<Vec<usize>>>();
    let (key, vnode) = (columns(&port.access.key)?, columns(&port.access.vnode)?);
    let carried = columns(carried)?;
    let time = port.time.and_then(|c| rows.at.get(&c).copied());
    let Rows { steps, schema, varying, .. } = rows;
    if !key.iter().any(|&c| varying[c]) {
        return None;
    }
    let First { leaf, relation, inside, places, chained, depth } = first;
    Some(Lookahead {
        fragment: port.node.0,
        node: port.node.1,
        port: port.access.port,
        deleted: port.access.deleted,
        input_port: port.access.input_port,
        leaf,
        relation,
        inside,
        chained,
        input,
        steps,
        schema,
        key,
        vnode,
        time,
        carried,
        places,
        depth,
    })
}

/// Where the rows of a lookahead's first step come from.
struct First {
    leaf: NodeId,
    relation: Option<RelationId>,
    inside: Option<Inside>,
    places: Vec<Place>,
    chained: Option<Chained>,
    depth: usize,
}

impl First {
    fn of_leaf(at: NodeId, leaf: &Node) -> Option<First> {
        let (relation, places) = match &leaf.op {
            Operator::Subscribe(s) => (s.relation, vec![Place::Entry, Place::Root, Place::Leaf]),
            Operator::Source(s) => (s.relation, vec![Place::Entry, Place::Leaf]),
            _ => return None,
        };
        let (relation, inside) = (Some(relation), None);
        Some(First { leaf: at, relation, inside, places, chained: None, depth: 1 })
    }

    fn inside(inside: Inside) -> First {
        let (places, chained) = (vec![Place::Input], None);
        let (leaf, inside) = (inside.from, Some(inside));
        First { leaf, relation: None, inside, places, chained, depth: 1 }
    }

    fn behind(stage: &Lookahead, chained: Chained) -> First {
        First {
            leaf: stage.leaf,
            relation: stage.relation,
            inside: None,
            places: stage.places.clone(),
            chained: Some(chained),
            depth: stage.depth + 1,
        }
    }
}

pub fn node(graph: &JobGraph, (fragment, index): NodeId) -> Option<&Node> {
    graph.fragments.get(fragment)?.nodes.get(index)
}

/// Rows after some steps.
struct Rows {
    schema: SchemaRef,
    append_only: bool,
    steps: Vec<Node>,
    /// Where columns of the graph's node lie in `schema`.
    at: BTreeMap<usize, usize>,
    /// Of each column of `schema`: whether it depends on the row.
    varying: Vec<bool>,
}

impl Rows {
    fn of_node(from: &Node) -> Rows {
        let width = from.schema.fields().len();
        Rows {
            schema: Arc::clone(&from.schema),
            append_only: from.append_only,
            steps: vec![],
            at: (0..width).map(|c| (c, c)).collect(),
            varying: vec![true; width],
        }
    }

    /// What hinted rows of a join's input bring along, and behind it what is needed of the rows that they meet.
    fn of_pairs(
        graph: &JobGraph,
        at: NodeId,
        side: usize,
        wanted: &Wanted,
        stage: &Stage,
    ) -> Option<(Rows, First)> {
        let join = node(graph, at)?;
        let input = |port: usize| node(graph, (at.0, *join.inputs.get(port)?));
        let left = input(0)?.schema.fields().len();
        let other = input(1 - side)?;
        let pairs = Pairs { left, side };
        let carried = pairs.carried(wanted);
        let mut rows = Rows {
            schema: Arc::new(Schema::empty()),
            append_only: input(side)?.append_only && other.append_only,
            steps: vec![],
            at: BTreeMap::new(),
            varying: vec![],
        };
        let mut fields: Vec<FieldRef> = vec![];
        for (&c, &position) in stage.columns.iter().zip(&stage.lookahead.carried) {
            rows.at.insert(pairs.of_hinted(c), fields.len());
            fields.push(Arc::clone(stage.lookahead.schema.fields().get(position)?));
        }
        if !carried.iter().all(|&c| rows.at.contains_key(&pairs.of_hinted(c))) {
            return None;
        }
        let met = pairs.met(wanted, &rows.at);
        for &c in &met {
            rows.at.insert(pairs.of_met(c), fields.len());
            fields.push(Arc::clone(other.schema.fields().get(c)?));
        }
        rows.varying = vec![true; fields.len()];
        rows.schema = Arc::new(Schema::new(fields));
        let first = First::behind(&stage.lookahead, Chained { after: 0, met });
        Some((rows, first))
    }

    /// Filters, then computes the wanted columns. What the key does not depend on may be missing. `names`: what the
    /// wanted columns are called; `last`: columns that are not wanted may stay.
    fn compute(&mut self, wanted: &Wanted, names: &Schema, last: bool) -> Option<()> {
        let mut filters: Vec<ExprRef> = vec![];
        for filter in &wanted.filters {
            let kept: Vec<ExprRef> =
                split_conjunction(filter).into_iter().filter_map(|e| self.over_schema(e)).collect();
            filters.extend((!kept.is_empty()).then(|| conjunction(kept)));
        }
        let mut columns: Vec<(usize, ExprRef)> = vec![];
        for column in &wanted.columns {
            match column.expr.as_ref().and_then(|e| self.over_schema(e)) {
                Some(e) => columns.push((column.column, e)),
                None if column.required => return None,
                None => {}
            }
        }
        if !filters.is_empty() {
            self.narrow(&mut filters, &mut columns)?;
            for predicate in filters {
                let schema = Arc::clone(&self.schema);
                self.push(Operator::Filter(Filter { predicate }), schema);
            }
        }
        self.project(columns, names, last)
    }

    /// Leaves only the columns that are read, so that filters copy no others.
    fn narrow(&mut self, filters: &mut [ExprRef], columns: &mut [(usize, ExprRef)]) -> Option<()> {
        let exprs = || filters.iter().chain(columns.iter().map(|c| &c.1));
        let mut read: Vec<usize> = exprs().flat_map(columns_of).collect();
        read.sort_unstable();
        read.dedup();
        if read.len() == self.schema.fields().len() {
            return Some(());
        }
        let plain = read.iter().map(|&c| column(&self.schema, c)).collect();
        let fields = read.iter().map(|&c| Arc::clone(&self.schema.fields()[c]));
        let schema = Schema::new(fields.collect::<Vec<FieldRef>>());
        for e in filters.iter_mut().chain(columns.iter_mut().map(|c| &mut c.1)) {
            let moved = |c: usize| Some(column(&schema, read.binary_search(&c).ok()?));
            *e = replace_columns(e, moved).ok()?;
        }
        self.varying = read.iter().map(|&c| self.varying[c]).collect();
        self.push(Operator::Project(Project { exprs: plain }), Arc::new(schema));
        Some(())
    }

    fn project(
        &mut self,
        columns: Vec<(usize, ExprRef)>,
        names: &Schema,
        last: bool,
    ) -> Option<()> {
        let mut exprs: Vec<ExprRef> = vec![];
        let mut fields: Vec<FieldRef> = vec![];
        let mut at = BTreeMap::new();
        for (c, e) in &columns {
            let known = exprs.iter().position(|other| other == e);
            if known.is_none() {
                let name = match as_column(e) {
                    Some(plain) => self.schema.field(plain).name(),
                    None => names.fields().get(*c)?.name(),
                };
                fields.push(output_field(e, &self.schema, name).ok()?);
                exprs.push(Arc::clone(e));
            }
            at.insert(*c, known.unwrap_or(exprs.len() - 1));
        }
        let plain: Option<Vec<usize>> = exprs.iter().map(as_column).collect();
        if let Some(plain) = plain.filter(|p| last || p.len() == self.schema.fields().len()) {
            self.at = at.into_iter().map(|(c, position)| (c, plain[position])).collect();
            return Some(());
        }
        let varies = |e: &ExprRef| columns_of(e).into_iter().any(|c| self.varying[c]);
        self.varying = exprs.iter().map(varies).collect();
        self.at = at;
        self.push(Operator::Project(Project { exprs }), Arc::new(Schema::new(fields)));
        Some(())
    }

    /// An operator that makes several rows of one, over the columns that there are.
    fn cross(&mut self, node: &Node, crossed: &Crossed, width: usize) -> Option<()> {
        let at = |c: usize| self.at.get(&c).copied();
        let field = |c: usize| node.schema.fields().get(c).cloned();
        let mut fields: Vec<FieldRef> = self.schema.fields().iter().cloned().collect();
        let (op, own) = match &node.op {
            Operator::Hop(hop) => {
                let op = at(hop.time_column).map(|c| Operator::Hop(Hop { time_column: c, ..*hop }));
                fields.extend([field(width)?, field(width + 1)?]);
                (op, vec![width, width + 1])
            }
            Operator::Expand(expand) => {
                let read =
                    |i: &usize| crossed.wanted.reads(width + i) && at(expand.columns[*i]).is_some();
                let kept: Vec<usize> = (0..expand.columns.len()).filter(read).collect();
                let own = kept.iter().copied().chain([expand.columns.len()]);
                let own: Vec<usize> = own.map(|i| width + i).collect();
                fields.extend(own.iter().map(|&c| field(c)).collect::<Option<Vec<_>>>()?);
                let columns = kept.iter().filter_map(|&i| at(expand.columns[i])).collect();
                (Some(Operator::Expand(pruned(expand, columns, &kept))), own)
            }
            Operator::Unnest(unnest) => {
                let lists: Option<Vec<usize>> = unnest.lists.iter().map(|&c| at(c)).collect();
                for (&c, &position) in unnest.lists.iter().zip(lists.iter().flatten()) {
                    fields[position] = field(c)?;
                }
                let keep_empty = unnest.keep_empty;
                (lists.map(|lists| Operator::Unnest(Unnest { lists, keep_empty })), vec![])
            }
            _ => return None,
        };
        let Some(op) = op else {
            // Its columns are needed for time and filters only, and cannot be computed.
            if let Operator::Unnest(unnest) = &node.op {
                self.at.retain(|c, _| !unnest.lists.contains(c));
            }
            return Some(());
        };
        for c in own {
            self.at.insert(c, self.varying.len());
            self.varying.push(matches!(op, Operator::Hop(_)));
        }
        if let Operator::Expand(expand) = &op {
            let first = self.varying.len() - 1 - expand.columns.len();
            for (i, &c) in expand.columns.iter().enumerate() {
                self.varying[first + i] = self.varying[c];
            }
        }
        self.push(op, Arc::new(Schema::new(fields)));
        Some(())
    }

    fn push(&mut self, op: Operator, schema: SchemaRef) {
        self.schema = Arc::clone(&schema);
        let inputs = self.steps.len().checked_sub(1).into_iter().collect();
        let append_only = self.append_only;
        self.steps.push(Node { op, inputs, schema, append_only, marks: vec![] });
    }

    /// An expression over the graph's columns as one over those that there are.
    fn over_schema(&self, e: &ExprRef) -> Option<ExprRef> {
        replace_columns(e, |c| self.at.get(&c).map(|&c| column(&self.schema, c))).ok()
    }
}

/// The columns of a join's inputs, the left one's first. Rows of one of them, `side`, are hinted, and meet rows of the
/// other.
pub struct Pairs {
    /// Columns of the left input.
    pub left: usize,
    pub side: usize,
}

impl Pairs {
    fn of(&self, port: usize, c: usize) -> usize {
        if port == 0 { c } else { self.left + c }
    }

    fn of_hinted(&self, c: usize) -> usize {
        self.of(self.side, c)
    }

    fn of_met(&self, c: usize) -> usize {
        self.of(1 - self.side, c)
    }

    /// The input of a column, and its number there.
    fn input_of(&self, c: usize) -> (usize, usize) {
        c.checked_sub(self.left).map_or((0, c), |c| (1, c))
    }

    /// The columns of the hinted rows that the key depends on.
    pub fn carried(&self, wanted: &Wanted) -> Vec<usize> {
        let read = wanted.read().into_iter().filter(|(_, required)| *required);
        let own = read.map(|(c, _)| self.input_of(c)).filter(|(port, _)| *port == self.side);
        let mut own: Vec<usize> = own.map(|(_, c)| c).collect();
        own.sort_unstable();
        own
    }

    /// The columns of the rows that are met that can be used beside those that are `known`.
    fn met(&self, wanted: &Wanted, known: &BTreeMap<usize, usize>) -> Vec<usize> {
        let is_met = |c: usize| self.input_of(c).0 != self.side;
        let columns = wanted.columns.iter().filter_map(|w| w.expr.as_ref());
        let filters = wanted.filters.iter().flat_map(split_conjunction);
        let usable = columns
            .chain(filters)
            .map(columns_of)
            .filter(|read| read.iter().all(|&c| is_met(c) || known.contains_key(&c)));
        let met = usable.flatten().filter(|&c| is_met(c)).map(|c| self.input_of(c).1);
        met.collect::<BTreeSet<usize>>().into_iter().collect()
    }
}

/// An expansion with only some of its columns.
fn pruned(expand: &Expand, columns: Vec<usize>, kept: &[usize]) -> Expand {
    let mut expand = Expand { columns, sets: expand.sets.clone() };
    for set in &mut expand.sets {
        set.keep = kept.iter().filter_map(|&i| set.keep.get(i).copied()).collect();
    }
    expand
}
