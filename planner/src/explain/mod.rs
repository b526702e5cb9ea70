//! A job graph as text, the same way for every operator: one line each, inputs indented below, then
//! one line a state table, then one line a lookahead.
//!
//! Columns are shown by name; a name that its input has twice is followed by `#position`. The text
//! is pinned by the planner's snapshot tests.

mod expr;
mod lookahead;
mod stream;
pub(crate) mod text;

use std::collections::HashSet;
use std::fmt::Write;
use std::sync::Arc;

use arrow::datatypes::Schema;
use millrace_common::RelationId;
use millrace_common::access::AccessClass;
use millrace_graph::state::ROWS_COLUMN;
use millrace_graph::{Exchange, JobGraph, Node, Operator, Role, StateTable, dispatch_operator};
use millrace_rpc::catalog::RowStorage;

use self::text::list;
use crate::bind::names::without_marks;
use crate::stream::operators::{LineContext, OperatorLine};

pub use expr::expr_text;
pub use lookahead::subject as lookahead_subject;
pub use stream::explain_stream;

/// What is shown of the relations that a job reads.
#[derive(Clone, Copy)]
pub struct Relations<'a> {
    pub name: &'a dyn Fn(RelationId) -> Option<String>,
    /// Statements change it: its rows can be seen as they enter.
    pub is_table: &'a dyn Fn(RelationId) -> bool,
    /// What the job of a derived relation runs.
    pub graph: &'a dyn Fn(RelationId) -> Option<Arc<JobGraph>>,
}

/// One line an operator, inputs indented below; then the state tables; then the lookaheads.
pub fn explain_graph(graph: &JobGraph, relations: &Relations<'_>) -> Vec<String> {
    let keys = vec![String::new(); graph.tables.len()];
    let names = relations.name;
    let mut out = Explain { graph, names, lines: vec![], keys, shown: HashSet::new() };
    if let Some((root, fragment)) = graph.fragments.iter().enumerate().next_back() {
        out.node(root, fragment.nodes.len().saturating_sub(1), 0);
    }
    out.tables();
    out.lines.extend(lookahead::lines(graph, relations));
    out.lines.iter().map(|line| without_marks(line)).collect()
}

struct Explain<'a> {
    graph: &'a JobGraph,
    names: &'a dyn Fn(RelationId) -> Option<String>,
    lines: Vec<String>,
    /// What the key of every state table is, collected from the operators.
    keys: Vec<String>,
    /// Nodes that have their lines, by fragment.
    shown: HashSet<(usize, usize)>,
}

impl Explain<'_> {
    /// A node and what is below it; what feeds several has its inputs shown once.
    fn node(&mut self, fragment: usize, index: usize, depth: usize) {
        let graph = self.graph;
        let Some(nodes) = graph.fragments.get(fragment).map(|f| &f.nodes) else { return };
        let Some(node) = nodes.get(index) else { return };
        let inputs: Vec<&Schema> =
            node.inputs.iter().filter_map(|&i| nodes.get(i)).map(|n| n.schema.as_ref()).collect();
        let mut line = "  ".repeat(depth);
        line.push_str(&self.operator(node, &inputs));
        if !node.append_only && node.op.role() != Role::Root {
            line.push_str(" ±");
        }
        if !node.marks.is_empty() {
            let columns: Vec<usize> = node.marks.iter().map(|m| m.column).collect();
            let _ = write!(line, " watermark ({})", list(&node.schema, &columns));
        }
        if !self.shown.insert((fragment, index)) {
            self.lines.push(line + " (shown above)");
            return;
        }
        self.lines.push(line);
        for &input in &node.inputs {
            self.node(fragment, input, depth + 1);
        }
        if let Operator::Exchange(Exchange { fragment: from, output }) = node.op
            && let Some(edge) = graph.fragments.get(from).and_then(|f| f.outputs.get(output))
        {
            self.node(from, edge.from, depth + 1);
        }
    }

    fn operator(&mut self, node: &Node, inputs: &[&Schema]) -> String {
        let empty = Schema::empty();
        let input = |n: usize| inputs.get(n).copied().unwrap_or(&empty);
        let mut at = LineContext {
            inputs: [input(0), input(1)],
            output: &node.schema,
            graph: Some(self.graph),
            names: self.names,
            keys: vec![],
        };
        let line = dispatch_operator!(&node.op, p => p.line(&mut at));
        for (table, key) in at.keys {
            if let Some(slot) = self.keys.get_mut(table) {
                *slot = key;
            }
        }
        line
    }

    fn tables(&mut self) {
        let root = self.graph.fragments.last().and_then(|f| f.nodes.last());
        // A sink keeps no rows.
        let unused = usize::from(root.is_some_and(|n| matches!(n.op, Operator::Sink(_))));
        for (i, t) in self.graph.tables.iter().enumerate().skip(unused) {
            let key = self.keys.get(i).cloned().unwrap_or_default();
            self.lines.push(format!("state {i}: {}", table(t, &key)));
        }
    }
}

fn table(t: &StateTable, key: &str) -> String {
    let storage = match t.storage {
        RowStorage::Keyed => "keyed",
        RowStorage::Multiset => "multiset",
        RowStorage::Append => "append",
    };
    let class = match t.class {
        AccessClass::PointUpdate => "point update",
        AccessClass::Append => "append",
        AccessClass::RangeRead => "range read",
        AccessClass::Lookup => "lookup",
        AccessClass::Merge => "merge",
    };
    let shown = t.value_schema.fields().iter().filter(|f| f.name() != ROWS_COLUMN).count();
    let plural = if shown == 1 { "" } else { "s" };
    let cleaned = if t.retention.is_some() { ", cleaned by watermark" } else { "" };
    format!("{}, {class}, {storage} {key}, {shown} column{plural}{cleaned}", t.name)
}
