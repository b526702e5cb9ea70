//! The nodes that compute what is wanted from a leaf's rows, only with the columns that are needed.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::datatypes::{FieldRef, Schema, SchemaRef};
use datafusion::physical_expr::{conjunction, split_conjunction};
use millrace_functions::expr::{
    ExprRef, as_column, column, columns_of, output_field, replace_columns,
};

use super::walk::{Crossed, Wanted, Way};
use super::{Access, Lookahead, Place};
use crate::{Expand, Filter, Hop, JobGraph, Node, Operator, Project, Unnest};

/// The lookahead of an operator's port by a way; `None` where the key is the same for all rows. `time`: the column of
/// the port's input with the event time.
pub fn lookahead(
    graph: &JobGraph,
    (fragment, index): (usize, usize),
    access: &Access,
    time: Option<usize>,
    way: &Way,
) -> Option<Lookahead> {
    let leaf = node(graph, way.leaf)?;
    let (relation, places) = match &leaf.op {
        Operator::Subscribe(s) => (s.relation, vec![Place::Entry, Place::Root, Place::Leaf]),
        Operator::Source(s) => (s.relation, vec![Place::Leaf]),
        _ => return None,
    };
    let mut rows = Rows::of_leaf(leaf);
    let mut wanted = &way.wanted;
    for crossed in &way.crossed {
        let operator = node(graph, crossed.node)?;
        let input = node(graph, (crossed.node.0, *operator.inputs.first()?))?;
        rows.compute(wanted, &input.schema, false)?;
        rows.cross(operator, crossed, input.schema.fields().len())?;
        wanted = &crossed.wanted;
    }
    let port = *node(graph, (fragment, index))?.inputs.get(access.port)?;
    rows.compute(wanted, &node(graph, (fragment, port))?.schema, true)?;
    let columns = |of: &[usize]| of.iter().map(|c| rows.at.get(c).copied()).collect();
    let (key, vnode): (Option<Vec<usize>>, Option<Vec<usize>>) =
        (columns(&access.key), columns(&access.vnode));
    let (key, vnode) = (key?, vnode?);
    let time = time.and_then(|c| rows.at.get(&c).copied());
    let Rows { steps, schema, varying, .. } = rows;
    if !key.iter().any(|&c| varying[c]) {
        return None;
    }
    let leaf = way.leaf;
    let (node, port) = (index, access.port);
    Some(Lookahead {
        fragment,
        node,
        port,
        leaf,
        relation,
        steps,
        schema,
        key,
        vnode,
        time,
        places,
        depth: 1,
    })
}

fn node(graph: &JobGraph, (fragment, index): (usize, usize)) -> Option<&Node> {
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
    fn of_leaf(leaf: &Node) -> Rows {
        let width = leaf.schema.fields().len();
        Rows {
            schema: Arc::clone(&leaf.schema),
            append_only: leaf.append_only,
            steps: vec![],
            at: (0..width).map(|c| (c, c)).collect(),
            varying: vec![true; width],
        }
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

/// An expansion with only some of its columns.
fn pruned(expand: &Expand, columns: Vec<usize>, kept: &[usize]) -> Expand {
    let mut expand = Expand { columns, sets: expand.sets.clone() };
    for set in &mut expand.sets {
        set.keep = kept.iter().filter_map(|&i| set.keep.get(i).copied()).collect();
    }
    expand
}
