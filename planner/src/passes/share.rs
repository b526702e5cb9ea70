//! Common subplans: what a plan computes several times is marked, so that it is computed once.
//!
//! A query that names a WITH query, a view's definition or a table several times has the same subtree in several
//! places. Two subtrees are the same if their operators, settings and columns are equal; then they have the same rows
//! in every epoch, because views call no volatile functions. The largest such subtrees get an [`Op::Common`] on top,
//! all with one number. The fragmenter makes them one fragment with several outputs.
//!
//! A plan with a lookup is left as it is: a lookup takes the whole of an epoch from one side before it takes the other,
//! so a fragment that fed both could wait for itself.

use std::collections::HashMap;
use std::mem::{Discriminant, discriminant};

use arrow::datatypes::SchemaRef;
use millrace_common::SqlError;
use millrace_functions::interrupt;

use crate::stream::plan::{Op, Stream};

/// Marks the common subplans of a plan whose exchanges are placed. Fails where the statement has ended.
pub fn mark_common(stream: Stream) -> Result<Stream, SqlError> {
    if has_lookup(&stream) {
        return Ok(stream);
    }
    let mut numbering = Numbering::default();
    let root = numbering.number(&stream)?;
    let uses = numbering.uses;
    if uses.iter().all(|&n| n < 2) {
        return Ok(stream);
    }
    Ok(mark(stream, &root, &uses))
}

fn has_lookup(stream: &Stream) -> bool {
    matches!(stream.op, Op::Lookup(_)) || stream.inputs.iter().any(has_lookup)
}

/// A subtree's number: equal subtrees have the same.
struct Numbered {
    id: usize,
    inputs: Vec<Numbered>,
}

/// What has to be equal, apart from the operator's settings: its kind and the numbers of its inputs.
type Shape = (Discriminant<Op>, Vec<usize>);

#[derive(Default)]
struct Numbering<'a> {
    by_shape: HashMap<Shape, Vec<usize>>,
    nodes: Vec<(&'a Op, &'a SchemaRef)>,
    /// By number: in how many places of the plan without repetitions the subtree stands. Exchanges are not counted
    /// as places: what matters is what they move.
    uses: Vec<usize>,
}

impl<'a> Numbering<'a> {
    fn number(&mut self, stream: &'a Stream) -> Result<Numbered, SqlError> {
        interrupt::check()?;
        let inputs: Vec<Numbered> =
            stream.inputs.iter().map(|i| self.number(i)).collect::<Result<_, _>>()?;
        let shape = (discriminant(&stream.op), inputs.iter().map(|i| i.id).collect());
        let alike = self.by_shape.entry(shape).or_default();
        let same = |&&id: &&usize| {
            let (op, schema) = self.nodes[id];
            *op == stream.op && *schema == stream.schema
        };
        if let Some(&id) = alike.iter().find(same) {
            return Ok(Numbered { id, inputs });
        }
        let id = self.nodes.len();
        alike.push(id);
        self.nodes.push((&stream.op, &stream.schema));
        self.uses.push(0);
        if !matches!(stream.op, Op::Exchange(_)) {
            for (input, numbered) in stream.inputs.iter().zip(&inputs) {
                self.uses[moved(input, numbered)] += 1;
            }
        }
        Ok(Numbered { id, inputs })
    }
}

/// The number of a subtree, of what is below where it is an exchange.
fn moved(stream: &Stream, numbered: &Numbered) -> usize {
    match (&stream.op, stream.inputs.as_slice(), numbered.inputs.as_slice()) {
        (Op::Exchange(_), [input], [below]) => moved(input, below),
        _ => numbered.id,
    }
}

fn mark(stream: Stream, numbered: &Numbered, uses: &[usize]) -> Stream {
    let Stream { op, inputs, schema } = stream;
    // Constant rows are cheaper where they are needed than on their way there.
    let is_common = uses[numbered.id] > 1 && !matches!(op, Op::Exchange(_) | Op::Values(_));
    let inputs = inputs.into_iter().zip(&numbered.inputs);
    let inputs = inputs.map(|(input, numbered)| mark(input, numbered, uses)).collect();
    let stream = Stream { op, inputs, schema };
    if is_common { stream.common(numbered.id) } else { stream }
}

#[cfg(test)]
mod tests {
    use millrace_graph::JoinKind;

    use super::*;
    use crate::passes::exchange::place;
    use crate::passes::tests::{count, joined_on, table};
    use crate::stream::plan::{Common, Scan};

    /// The numbers of the marks, from the root, and the operators below them.
    fn marks(stream: &Stream) -> Vec<(usize, &'static str)> {
        let mut found = Vec::new();
        if let (Op::Common(Common { id }), [input]) = (&stream.op, stream.inputs.as_slice()) {
            let kind = match input.op {
                Op::Scan(_) => "scan",
                Op::Aggregate(_) => "aggregate",
                _ => "other",
            };
            found.push((*id, kind));
        }
        found.extend(stream.inputs.iter().flat_map(marks));
        found
    }

    fn marked(stream: Stream) -> Vec<(usize, &'static str)> {
        marks(&mark_common(place(stream).0).unwrap())
    }

    #[test]
    fn the_largest_equal_subtrees_are_marked_and_nothing_in_them() {
        let counts = || table().aggregate(vec![1], vec![count()]);
        let found = marked(joined_on(counts(), counts(), JoinKind::Inner, (0, 1)));
        let [(left, "aggregate"), (right, "aggregate")] = found[..] else { panic!("{found:?}") };
        assert_eq!(left, right);
    }

    #[test]
    fn a_common_input_of_different_operators_is_marked() {
        let left = table().aggregate(vec![1], vec![count()]);
        let right = table().aggregate(vec![2, 1], vec![count()]);
        let found = marked(joined_on(left, right, JoinKind::Inner, (0, 1)));
        assert_eq!(found.iter().map(|m| m.1).collect::<Vec<_>>(), ["scan", "scan"]);
    }

    #[test]
    fn subtrees_that_differ_in_a_setting_are_not_common() {
        let by = |column| table().select(&[column]);
        let found = marked(joined_on(by(0), by(0).repeat(0), JoinKind::Inner, (0, 0)));
        assert_eq!(found.len(), 2);
        let mut other = table();
        if let Op::Scan(Scan { columns, .. }) = &mut other.op {
            columns.swap(0, 1);
        }
        assert_eq!(marked(joined_on(table(), other, JoinKind::Inner, (0, 0))), []);
    }

    #[test]
    fn plans_with_a_lookup_stay_trees() {
        let Op::Join(join) = joined_on(table(), table(), JoinKind::Inner, (0, 0)).op else {
            panic!("a join")
        };
        assert_eq!(marked(table().lookup(table(), join)), []);
    }
}
