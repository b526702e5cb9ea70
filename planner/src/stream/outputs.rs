//! What leaves the fragments of a job, and where common subplans are computed.

use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use millrace_common::SqlError;
use millrace_graph::{Edge, EdgeKind, Node, Operator, dispatch_operator};

use crate::passes::properties::{Distribution, Properties};
use crate::stream::fragment::{Builder, Computed, Known, Open};
use crate::stream::operators::OperatorRules;
use crate::stream::plan::{Common, Exchange, Op, Stream};

/// An edge whose consumer is not known yet, and what is known of its rows.
pub(super) struct Outgoing {
    fragment: usize,
    output: usize,
    known: Known,
}

impl Builder {
    /// Adds the taking end of an edge.
    pub fn receive(
        &mut self,
        edge: Outgoing,
        schema: SchemaRef,
        open: &mut Open,
    ) -> (usize, Known) {
        let Outgoing { fragment, output, known } = edge;
        open.producers.push((fragment, output));
        open.nodes.push(Node {
            op: Operator::Exchange(millrace_graph::Exchange { fragment, output }),
            inputs: vec![],
            schema,
            append_only: known.properties.append_only,
            marks: known.marks.clone(),
        });
        (open.nodes.len() - 1, known)
    }

    /// An edge out of the fragment that computes a subtree; its consumer is filled in when that is closed.
    pub fn producer(&mut self, input: Stream, hash: &[usize]) -> Result<Outgoing, SqlError> {
        let computed = self.compute(input)?;
        Ok(self.output(computed, hash.to_vec()))
    }

    /// Adds a subtree as a fragment of its own, or to the fragment of the common subplan that it is computed from.
    fn compute(&mut self, subtree: Stream) -> Result<Computed, SqlError> {
        let Some((id, subplan)) = common_below(&subtree) else {
            let mut open = Open::default();
            let (node, known) = self.emit(subtree, &mut open)?;
            let fragment = self.close(open, &known.properties, vec![]);
            return Ok(Computed { fragment, node, known });
        };
        let fragment = self.common(id, subplan)?.fragment;
        let nodes = std::mem::take(&mut self.fragments[fragment].nodes);
        let mut open = Open { nodes, above: Some(id), ..Open::default() };
        let (node, known) = self.emit(subtree, &mut open)?;
        self.fragments[fragment].nodes = open.nodes;
        Ok(Computed { fragment, node, known })
    }

    /// Adds an output to a fragment.
    fn output(&mut self, computed: Computed, hash: Vec<usize>) -> Outgoing {
        let Computed { fragment, node: from, known } = computed;
        let op = Op::Exchange(Exchange { hash: hash.clone() });
        let properties = Properties::derive(&op, known.properties.equal.len(), &[known.properties]);
        let outputs = &mut self.fragments[fragment].outputs;
        outputs.push(Edge { from, to: usize::MAX, carries: EdgeKind::Rows { hash } });
        let known = Known { properties, marks: known.marks };
        Outgoing { fragment, output: outputs.len() - 1, known }
    }

    /// The fragment of a common subplan, made when it is first needed.
    fn common(&mut self, id: usize, subplan: &Stream) -> Result<Computed, SqlError> {
        if let Some(computed) = self.common.get(&id) {
            return Ok(computed.clone());
        }
        let computed = self.compute(subplan.clone())?;
        self.common.insert(id, computed.clone());
        Ok(computed)
    }

    /// A common subplan in the middle of a fragment. Its rows come from its own fragment to the tasks that would
    /// compute them, if it has state; where these are not known by columns nothing above asks for them, so any task
    /// does. Without state computing them again costs less than moving them.
    pub fn place_common(
        &mut self,
        id: usize,
        subplan: Stream,
        open: &mut Open,
    ) -> Result<(usize, Known), SqlError> {
        if open.above == Some(id) {
            let Computed { node, known, .. } = self.common(id, &subplan)?;
            return Ok((node, known));
        }
        if !keeps_state(&subplan) || subplan.width() == 0 {
            return self.emit(subplan, open);
        }
        let hash = match Properties::of(&subplan).distribution {
            Distribution::Hash(columns) => columns,
            Distribution::Singleton => vec![],
            Distribution::Any => (0..subplan.width()).collect(),
        };
        let schema = Arc::clone(&subplan.schema);
        let computed = self.common(id, &subplan)?;
        let edge = self.output(computed, hash);
        Ok(self.receive(edge, schema, open))
    }
}

pub fn only(inputs: Vec<Stream>) -> Result<Stream, SqlError> {
    let mut inputs = inputs.into_iter();
    match (inputs.next(), inputs.next()) {
        (Some(input), None) => Ok(input),
        _ => Err(SqlError::internal("an exchange has no input, or several")),
    }
}

/// The common subplan that all of a subtree is computed from without state and without other rows.
fn common_below(stream: &Stream) -> Option<(usize, &Stream)> {
    match (&stream.op, stream.inputs.as_slice()) {
        (Op::Common(Common { id }), [subplan]) => Some((*id, subplan)),
        (op, [input]) if !has_state(op) => common_below(input),
        _ => None,
    }
}

fn keeps_state(stream: &Stream) -> bool {
    has_state(&stream.op) || stream.inputs.iter().any(keeps_state)
}

/// Whether an operator has state, or moves rows to where they meet it.
fn has_state(op: &Op) -> bool {
    matches!(op, Op::Exchange(_)) || dispatch_operator!(op, p => p.keeps_state())
}
