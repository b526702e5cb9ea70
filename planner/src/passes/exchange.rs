//! Exchange placement: every operator with state gets its rows where its state is.
//!
//! Rows of one group, join key or stored row must meet in the task that owns the vnode of its hash.
//! An exchange is left out where the input is already distributed by columns that are all part of
//! the key (equal columns count as the same): the operator then takes its vnode from these columns.
//! Operators without a key run as one task. A single task that can hold only few rows is not spread.

use millrace_graph::dispatch_operator;

use crate::passes::properties::{Distribution, Properties};
use crate::stream::operators::OperatorRules;
use crate::stream::plan::{Exchange, Op, Stream};

/// Inputs of at most this many rows stay in one task.
const FEW_ROWS: u64 = 4096;

/// A subtree with exchanges in it, and its properties.
pub type Placed = (Stream, Properties);

pub fn place(stream: Stream) -> Placed {
    let Stream { mut op, inputs, schema } = stream;
    let inputs: Vec<Placed> = inputs.into_iter().map(place).collect();
    let inputs = dispatch_operator!(&mut op, p => p.place(inputs));
    let (inputs, properties): (Vec<Stream>, Vec<Properties>) = inputs.into_iter().unzip();
    let properties = Properties::derive(&op, schema.fields().len(), &properties);
    (Stream { op, inputs, schema }, properties)
}

/// Puts an exchange on top.
pub fn exchange((stream, properties): Placed, hash: Vec<usize>) -> Placed {
    let op = Op::Exchange(Exchange { hash: hash.clone() });
    let properties = Properties::derive(&op, stream.width(), &[properties]);
    (stream.exchange(hash), properties)
}

/// Brings all rows into one task.
pub fn gather(placed: Placed) -> Placed {
    if placed.1.distribution == Distribution::Singleton {
        return placed;
    }
    exchange(placed, vec![])
}

/// One task, and known to stay small.
pub fn stays_single(p: &Properties) -> bool {
    p.distribution == Distribution::Singleton && p.max_rows.is_some_and(|n| n <= FEW_ROWS)
}

/// The input where rows that agree on `key` meet, and the columns of `key` that decide the vnode.
pub fn meet(input: Placed, key: &[usize]) -> (Placed, Vec<usize>) {
    if key.is_empty() || stays_single(&input.1) {
        return (gather(input), vec![]);
    }
    if let Some(positions) = input.1.distributed_within(key) {
        let vnode = positions.iter().map(|&i| key[i]).collect();
        return (input, vnode);
    }
    (exchange(input, key.to_vec()), key.to_vec())
}

/// The only input as [`meet`] gives it; the columns that decide the vnode go into `vnode`.
pub fn meet_only(inputs: Vec<Placed>, key: &[usize], vnode: &mut Vec<usize>) -> Vec<Placed> {
    let met = inputs.into_iter().map(|input| {
        let (input, columns) = meet(input, key);
        *vnode = columns;
        input
    });
    met.collect()
}

#[cfg(test)]
mod tests {
    use millrace_graph::JoinKind;

    use super::*;
    use crate::passes::tests::{count, join, table};

    fn exchanges(stream: &Stream) -> usize {
        let own = usize::from(matches!(stream.op, Op::Exchange(_)));
        own + stream.inputs.iter().map(exchanges).sum::<usize>()
    }

    #[test]
    fn a_group_that_contains_the_distribution_stays() {
        let (plan, p) = place(table().aggregate(vec![1, 0], vec![count()]));
        assert_eq!(exchanges(&plan), 0);
        let Op::Aggregate(a) = &plan.op else { panic!("{plan:?}") };
        assert_eq!(a.vnode, vec![0]);
        assert_eq!(p.distribution, Distribution::Hash(vec![1]));
        assert_eq!(exchanges(&place(table().aggregate(vec![1], vec![count()])).0), 1);
    }

    #[test]
    fn a_join_moves_only_the_side_that_is_elsewhere() {
        assert_eq!(exchanges(&place(join(JoinKind::Inner, (0, 0))).0), 0);
        assert_eq!(exchanges(&place(join(JoinKind::Inner, (1, 0))).0), 1);
        assert_eq!(exchanges(&place(join(JoinKind::Inner, (1, 1))).0), 2);
    }

    /// After a join on a.b = b.a, rows lie by either name.
    #[test]
    fn equal_columns_count_as_the_same() {
        let by_left = join(JoinKind::Inner, (1, 0)).aggregate(vec![1], vec![count()]);
        let by_right = join(JoinKind::Inner, (1, 0)).aggregate(vec![3], vec![count()]);
        assert_eq!(exchanges(&place(by_left).0), 1);
        assert_eq!(exchanges(&place(by_right).0), 1);
    }

    #[test]
    fn few_rows_are_not_spread() {
        let one = table().aggregate(vec![], vec![count()]);
        assert_eq!(exchanges(&place(one.aggregate(vec![0], vec![count()])).0), 1);
    }
}
