//! Exchange placement: every operator with state gets its rows where its state is.
//!
//! Rows of one group, join key or stored row must meet in the task that owns the vnode of its hash.
//! An exchange is left out where the input is already distributed by columns that are all part of
//! the key (equal columns count as the same): the operator then takes its vnode from these columns.
//! Operators without a key run as one task. A single task that can hold only few rows is not spread.

use millrace_graph::JoinKind;

use crate::passes::properties::{Distribution, Properties};
use crate::stream::plan::{Aggregate, EventTimeBuffer, Join, Op, Stream, TopN, Window};

/// Inputs of at most this many rows stay in one task.
const FEW_ROWS: u64 = 4096;

/// A subtree with exchanges in it, and its properties.
pub type Placed = (Stream, Properties);

#[deny(clippy::wildcard_enum_match_arm)]
pub fn place(stream: Stream) -> Placed {
    let Stream { op, inputs, schema } = stream;
    let inputs: Vec<Placed> = inputs.into_iter().map(place).collect();
    let (op, inputs) = match op {
        Op::Aggregate(a) => place_aggregate(a, inputs),
        Op::TopN(t) => place_top_n(t, inputs),
        Op::Window(w) => place_window(w, inputs),
        Op::Join(j) => {
            let (j, inputs) = place_join(j, inputs);
            (Op::Join(j), inputs)
        }
        Op::Lookup(j) => {
            let (j, inputs) = place_join(j, inputs);
            (Op::Lookup(j), inputs)
        }
        Op::Union => (Op::Union, place_union(inputs)),
        Op::WindowClose(h) => {
            let (vnode, inputs) = place_hold(inputs);
            (Op::WindowClose(EventTimeBuffer { vnode, ..h }), inputs)
        }
        Op::TemporalUpperBound(h) => {
            let (vnode, inputs) = place_hold(inputs);
            (Op::TemporalUpperBound(EventTimeBuffer { vnode, ..h }), inputs)
        }
        Op::TemporalLowerBound(h) => {
            let (vnode, inputs) = place_hold(inputs);
            (Op::TemporalLowerBound(EventTimeBuffer { vnode, ..h }), inputs)
        }
        op @ (Op::Scan { .. }
        | Op::Values { .. }
        | Op::Filter { .. }
        | Op::Project { .. }
        | Op::Hop { .. }
        | Op::Repeat { .. }
        | Op::Unnest { .. }
        | Op::Expand(_)
        | Op::Stamp { .. }
        | Op::Exchange { .. }) => (op, inputs),
    };
    let (inputs, properties): (Vec<Stream>, Vec<Properties>) = inputs.into_iter().unzip();
    let properties = Properties::derive(&op, schema.fields().len(), &properties);
    (Stream { op, inputs, schema }, properties)
}

/// Puts an exchange on top.
pub fn exchange((stream, properties): Placed, hash: Vec<usize>) -> Placed {
    let op = Op::Exchange { hash: hash.clone() };
    let properties = Properties::derive(&op, stream.width(), &[properties]);
    (stream.exchange(hash), properties)
}

fn gather(placed: Placed) -> Placed {
    if placed.1.distribution == Distribution::Singleton {
        return placed;
    }
    exchange(placed, vec![])
}

/// One task, and known to stay small.
fn stays_single(p: &Properties) -> bool {
    p.distribution == Distribution::Singleton && p.max_rows.is_some_and(|n| n <= FEW_ROWS)
}

/// The input where rows that agree on `key` meet, and the columns of `key` that decide the vnode.
fn meet(input: Placed, key: &[usize]) -> (Placed, Vec<usize>) {
    if key.is_empty() || stays_single(&input.1) {
        return (gather(input), vec![]);
    }
    if let Some(positions) = input.1.distributed_within(key) {
        let vnode = positions.iter().map(|&i| key[i]).collect();
        return (input, vnode);
    }
    (exchange(input, key.to_vec()), key.to_vec())
}

fn place_aggregate(mut a: Aggregate, mut inputs: Vec<Placed>) -> (Op, Vec<Placed>) {
    if let Some(input) = inputs.pop() {
        let (input, vnode) = meet(input, &a.group);
        a.vnode = vnode;
        inputs.push(input);
    }
    (Op::Aggregate(a), inputs)
}

fn place_top_n(mut t: TopN, mut inputs: Vec<Placed>) -> (Op, Vec<Placed>) {
    if let Some(input) = inputs.pop() {
        let (input, vnode) = meet(input, &t.group);
        t.vnode = vnode;
        inputs.push(input);
    }
    (Op::TopN(t), inputs)
}

fn place_window(mut w: Window, mut inputs: Vec<Placed>) -> (Op, Vec<Placed>) {
    if let Some(input) = inputs.pop() {
        let (input, vnode) = meet(input, &w.group);
        w.vnode = vnode;
        inputs.push(input);
    }
    (Op::Window(w), inputs)
}

fn place_join(mut j: Join, inputs: Vec<Placed>) -> (Join, Vec<Placed>) {
    let Ok([left, right]) = <[Placed; 2]>::try_from(inputs) else {
        return (j, vec![]);
    };
    // NOT IN asks whether the right side has any row or NULL at all: one task must see it whole.
    let one_task = j.left.keys.is_empty()
        || (j.null_aware && matches!(j.kind, JoinKind::LeftAnti | JoinKind::LeftMark))
        || (stays_single(&left.1) && stays_single(&right.1));
    if one_task {
        (j.left.vnode, j.right.vnode) = (vec![], vec![]);
        return (j, vec![gather(left), gather(right)]);
    }
    let (left_keys, right_keys) = (j.left.keys.clone(), j.right.keys.clone());
    let at = |keys: &[usize], positions: &[usize]| -> Vec<usize> {
        positions.iter().map(|&p| keys[p]).collect()
    };
    let left_fits = left.1.distributed_within(&left_keys);
    let right_fits = right.1.distributed_within(&right_keys);
    let (left, right, vnode) = match (left_fits, right_fits) {
        (Some(l), Some(r)) if l == r => (left, right, l),
        (Some(l), _) => {
            let hash = at(&right_keys, &l);
            (left, exchange(right, hash), l)
        }
        (None, Some(r)) => {
            let hash = at(&left_keys, &r);
            (exchange(left, hash), right, r)
        }
        (None, None) => {
            let vnode = (0..left_keys.len()).collect();
            (exchange(left, left_keys.clone()), exchange(right, right_keys.clone()), vnode)
        }
    };
    (j.left.vnode, j.right.vnode) = (at(&left_keys, &vnode), at(&right_keys, &vnode));
    (j, vec![left, right])
}

/// Equal rows meet; where rows are distributed already they stay.
fn place_hold(mut inputs: Vec<Placed>) -> (Vec<usize>, Vec<Placed>) {
    let Some(input) = inputs.pop() else { return (vec![], inputs) };
    let all: Vec<usize> = (0..input.0.width()).collect();
    let (input, vnode) = match &input.1.distribution {
        Distribution::Singleton => (input, vec![]),
        _ => meet(input, &all),
    };
    (vnode, vec![input])
}

/// Inputs of a union run in the same tasks: all in one, or all in parallel.
fn place_union(inputs: Vec<Placed>) -> Vec<Placed> {
    let single = |p: &Placed| p.1.distribution == Distribution::Singleton;
    if inputs.iter().all(single) {
        return inputs;
    }
    if inputs.iter().any(|p| p.0.width() == 0) {
        return inputs.into_iter().map(gather).collect();
    }
    inputs
        .into_iter()
        .map(|input| {
            if single(&input) {
                let all = (0..input.0.width()).collect();
                exchange(input, all)
            } else {
                input
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::tests::{count, join, table};

    fn exchanges(stream: &Stream) -> usize {
        let own = usize::from(matches!(stream.op, Op::Exchange { .. }));
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
