//! A stream plan as text: one line an operator, inputs indented below.

use arrow::datatypes::Schema;
use millrace_graph::dispatch_operator;

use crate::bind::names::without_marks;
use crate::stream::operators::{LineContext, OperatorLine};
use crate::stream::plan::Stream;

/// The plan between two passes, or after the last.
pub fn explain_stream(stream: &Stream) -> Vec<String> {
    let mut lines = Vec::new();
    add(stream, 0, &mut lines);
    lines
}

fn add(stream: &Stream, depth: usize, lines: &mut Vec<String>) {
    lines.push("  ".repeat(depth) + &without_marks(&operator(stream)));
    stream.inputs.iter().for_each(|input| add(input, depth + 1, lines));
}

fn operator(stream: &Stream) -> String {
    let empty = Schema::empty();
    let input = |n: usize| stream.inputs.get(n).map_or(&empty, |i| i.schema.as_ref());
    let mut at = LineContext {
        inputs: [input(0), input(1)],
        output: &stream.schema,
        graph: None,
        names: &|_| None,
        keys: vec![],
    };
    dispatch_operator!(&stream.op, p => p.line(&mut at))
}
