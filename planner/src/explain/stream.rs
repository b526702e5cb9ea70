//! A stream plan as text: one line an operator, inputs indented below.

use arrow::datatypes::Schema;
use millrace_graph::JoinKind;

use super::text::{
    aggregate, column, duration, expand, hop, join, list, lookup, project, text, top_n, unnest,
    values, window,
};
use crate::bind::names::without_marks;
use crate::stream::plan::{Identity, Op, Stream};

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

#[deny(clippy::wildcard_enum_match_arm)]
fn operator(stream: &Stream) -> String {
    let empty = Schema::empty();
    let input = stream.inputs.first().map_or(&empty, |i| i.schema.as_ref());
    let right = stream.inputs.get(1).map_or(&empty, |i| i.schema.as_ref());
    match &stream.op {
        Op::Scan { relation, .. } => {
            let all: Vec<usize> = (0..stream.width()).collect();
            format!("Scan {} ({})", relation.name, list(&stream.schema, &all))
        }
        Op::Values { batch } => values(batch),
        Op::Filter { predicate } => format!("Filter {}", text(predicate, input)),
        Op::Project { exprs } => project(exprs, input, &stream.schema),
        Op::Union => "Union".into(),
        Op::Hop { time_column, size_us, slide_us, offset_us } => {
            hop(&column(input, *time_column), *size_us, *slide_us, *offset_us)
        }
        Op::Repeat { times_column } => format!("Repeat {} times", column(input, *times_column)),
        Op::Unnest { lists, keep_empty } => unnest(lists, *keep_empty, input),
        Op::Expand(e) => expand(e, input),
        Op::Aggregate(a) => aggregate(a, input),
        Op::Join(j) => join(j, [input, right], &stream.schema),
        Op::Lookup(j) => {
            let (outer, keys) = (j.kind == JoinKind::LeftOuter, [&j.left.keys[..], &j.right.keys]);
            lookup(outer, keys, j.residual.as_ref(), [input, right], &stream.schema)
        }
        Op::TopN(t) => top_n(t, input) + &told_apart(&t.state, input),
        Op::Window(w) => window(w, input) + &told_apart(&w.state, input),
        Op::WindowClose(h) => format!("Window close by {}", column(input, h.column)),
        Op::Stamp { add_us } => format!("Stamp processing time + {}", duration(*add_us)),
        Op::TemporalUpperBound(h) => format!("Expire by {}", column(input, h.column)),
        Op::TemporalLowerBound(h) => format!("Appear by {}", column(input, h.column)),
        Op::Exchange { hash } if hash.is_empty() => "Exchange to one task".into(),
        Op::Exchange { hash } => format!("Exchange hash ({})", list(input, hash)),
    }
}

/// The columns that tell rows of a group and order apart.
fn told_apart(identity: &Identity, input: &Schema) -> String {
    match identity.0.as_slice() {
        [] => String::new(),
        columns => format!(", identity ({})", list(input, columns)),
    }
}
