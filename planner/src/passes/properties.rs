//! Derived properties of a stream: unique keys, append-only, equal columns, distribution, size.
//!
//! They are facts about every possible content, never guesses: storage layouts rest on them. A
//! unique key is one under row identity (NULL equals NULL), at every barrier; inside an epoch
//! transient weights may violate it. "Equal" columns hold the same value in every row.

use std::collections::BTreeSet;

use millrace_functions::expr;
use millrace_functions::window_call::RankFunction;
use millrace_graph::JoinKind;
use millrace_rpc::catalog::{Relation, RelationKind, RowStorage};

use crate::stream::plan::{Aggregate, Join, JoinSide, Op, Stream, TopN, Window};

/// More keys than this are not tracked: joins multiply them.
const MAX_KEYS: usize = 8;

/// Which task holds a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Distribution {
    /// There is one task.
    Singleton,
    /// The task that owns the vnode of the hash of these columns, in this order; never empty.
    Hash(Vec<usize>),
    /// Any task, not known by columns.
    Any,
}

#[derive(Clone, Debug)]
pub struct Properties {
    pub append_only: bool,
    /// Sets of columns that no two rows agree on. An empty set: at most one row.
    pub keys: Vec<BTreeSet<usize>>,
    /// For every column the smallest column that is equal to it.
    pub equal: Vec<usize>,
    pub distribution: Distribution,
    /// No content has more rows.
    pub max_rows: Option<u64>,
}

impl Properties {
    /// The properties of a subtree. The distribution means something only once exchanges are placed.
    pub fn of(stream: &Stream) -> Properties {
        let inputs: Vec<Properties> = stream.inputs.iter().map(Properties::of).collect();
        Properties::derive(&stream.op, stream.width(), &inputs)
    }

    /// The properties of an operator with `width` output columns over inputs with these properties.
    #[deny(clippy::wildcard_enum_match_arm)]
    pub fn derive(op: &Op, width: usize, inputs: &[Properties]) -> Properties {
        let unknown = || plain(width, Distribution::Any);
        let input = || inputs.first().cloned().unwrap_or_else(unknown);
        let mut p = match op {
            Op::Scan { relation, columns } => scan(relation, columns),
            Op::Values { batch } => Properties {
                append_only: true,
                max_rows: Some(batch.num_rows() as u64),
                ..plain(width, Distribution::Singleton)
            },
            Op::Filter { .. } | Op::TemporalLowerBound(_) => input(),
            Op::Project { exprs } => {
                let columns: Vec<Option<usize>> = exprs.iter().map(expr::as_column).collect();
                project(&input(), &columns)
            }
            Op::Union => union(width, inputs),
            Op::Hop { size_us, slide_us, .. } => hop(&input(), size_us == slide_us),
            Op::Repeat { .. } => Properties { keys: vec![], max_rows: None, ..input() },
            Op::Unnest { lists, .. } => unnest(lists, &input()),
            Op::Expand(e) => expand(e.sets.len() as u64, width, &input()),
            Op::Aggregate(a) => aggregate(a, width, &input()),
            Op::Join(j) => match inputs {
                [left, right] => select(&join(j, left, right), &j.output),
                _ => unknown(),
            },
            Op::Lookup(j) => match inputs {
                [left, right] => select(&lookup(j, left, right), &j.output),
                _ => unknown(),
            },
            Op::TopN(t) => top_n(t, &input()),
            Op::Window(w) => window(w, &input()),
            // Once a window is closed its rows stay.
            Op::WindowClose(_) => Properties { append_only: true, ..input() },
            Op::Stamp { .. } => {
                let mut p = input();
                p.equal.push(width - 1);
                p
            }
            Op::TemporalUpperBound(_) => Properties { append_only: false, ..input() },
            Op::Exchange { hash } => Properties {
                distribution: if hash.is_empty() {
                    Distribution::Singleton
                } else {
                    Distribution::Hash(hash.clone())
                },
                ..input()
            },
        };
        p.tidy();
        p
    }

    /// Whether `a` and `b` always hold the same value.
    pub fn equals(&self, a: usize, b: usize) -> bool {
        a == b || self.equal.get(a) == self.equal.get(b)
    }

    /// Whether the columns contain a unique key, also by way of equal columns.
    pub fn is_unique(&self, columns: &[usize]) -> bool {
        self.keys.iter().any(|key| self.covers(columns, key))
    }

    fn covers(&self, columns: &[usize], key: &BTreeSet<usize>) -> bool {
        key.iter().all(|&k| columns.iter().any(|&c| self.equals(c, k)))
    }

    /// The key that adds the fewest columns to `given`, and which columns it adds.
    pub fn best_key(&self, given: &[usize]) -> Option<Vec<usize>> {
        let rest = |key: &BTreeSet<usize>| -> Vec<usize> {
            key.iter().copied().filter(|&k| !given.iter().any(|&g| self.equals(g, k))).collect()
        };
        self.keys.iter().map(rest).min_by_key(Vec::len)
    }

    /// The positions in `wanted` whose columns are, in order, the columns rows are distributed by:
    /// then all rows that agree on `wanted` are in one task. `None`: they are not.
    pub fn distributed_within(&self, wanted: &[usize]) -> Option<Vec<usize>> {
        let Distribution::Hash(columns) = &self.distribution else { return None };
        columns.iter().map(|&c| wanted.iter().position(|&w| self.equals(w, c))).collect()
    }

    /// Drops keys that contain other keys.
    fn tidy(&mut self) {
        self.keys.sort_by_key(BTreeSet::len);
        let mut kept: Vec<BTreeSet<usize>> = Vec::new();
        for key in self.keys.drain(..) {
            if kept.len() < MAX_KEYS && !kept.iter().any(|k| k.is_subset(&key)) {
                kept.push(key);
            }
        }
        if kept.first().is_some_and(BTreeSet::is_empty) {
            self.max_rows = Some(self.max_rows.map_or(1, |n| n.min(1)));
        } else if self.max_rows.is_some_and(|n| n <= 1) {
            kept = vec![BTreeSet::new()];
        }
        self.keys = kept;
    }
}

/// Nothing known but where rows are.
fn plain(width: usize, distribution: Distribution) -> Properties {
    Properties {
        append_only: false,
        keys: vec![],
        equal: (0..width).collect(),
        distribution,
        max_rows: None,
    }
}

fn scan(relation: &Relation, columns: &[usize]) -> Properties {
    let position = |c: &u32| columns.iter().position(|&have| have == *c as usize);
    let source = relation.kind() == RelationKind::Source;
    let all = |list: &[u32]| list.iter().map(position).collect::<Option<Vec<usize>>>();
    let keyed = source || relation.storage() == RowStorage::Keyed;
    // A view with at most one row is keyed by no columns; a root always has a key.
    let empty_key = relation.key.is_empty() && relation.kind() != RelationKind::MaterializedView;
    let keys = match all(&relation.key) {
        Some(key) if keyed && !empty_key => vec![key.into_iter().collect()],
        _ => vec![],
    };
    let distribution = match all(&relation.distribution) {
        Some(hash) if !source && relation.storage() != RowStorage::Append && !hash.is_empty() => {
            Distribution::Hash(hash)
        }
        _ => Distribution::Any,
    };
    let append_only = source || relation.append_only;
    Properties { append_only, keys, ..plain(columns.len(), distribution) }
}

fn select(input: &Properties, columns: &[usize]) -> Properties {
    project(input, &columns.iter().map(|&c| Some(c)).collect::<Vec<_>>())
}

/// Columns given by their position in the input (`None`: computed).
fn project(input: &Properties, columns: &[Option<usize>]) -> Properties {
    let find = |c: usize| {
        let same = |have: &Option<usize>| have.is_some_and(|have| input.equals(have, c));
        columns.iter().position(same)
    };
    let keys = input.keys.iter().filter_map(|k| k.iter().map(|&c| find(c)).collect()).collect();
    let equal = columns.iter().enumerate().map(|(i, c)| c.and_then(find).unwrap_or(i)).collect();
    let distribution = match &input.distribution {
        Distribution::Hash(hash) => hash
            .iter()
            .map(|&c| find(c))
            .collect::<Option<Vec<_>>>()
            .map_or(Distribution::Any, Distribution::Hash),
        other => other.clone(),
    };
    Properties {
        append_only: input.append_only,
        keys,
        equal,
        distribution,
        max_rows: input.max_rows,
    }
}

fn union(width: usize, inputs: &[Properties]) -> Properties {
    let distribution = match inputs.split_first() {
        Some((first, rest)) if rest.iter().all(|p| p.distribution == first.distribution) => {
            first.distribution.clone()
        }
        _ => Distribution::Any,
    };
    Properties {
        append_only: inputs.iter().all(|p| p.append_only),
        max_rows: inputs.iter().map(|p| p.max_rows).sum(),
        ..plain(width, distribution)
    }
}

/// A column of elements is none of those that its list was equal to, and rows multiply.
fn unnest(lists: &[usize], input: &Properties) -> Properties {
    let equal = (0..input.equal.len())
        .map(|c| {
            let same = |&o: &usize| !lists.contains(&o) && input.equal.get(o) == input.equal.get(c);
            if lists.contains(&c) { c } else { (0..=c).find(same).unwrap_or(c) }
        })
        .collect();
    let moved = match &input.distribution {
        Distribution::Hash(columns) => columns.iter().any(|c| lists.contains(c)),
        _ => false,
    };
    let distribution = if moved { Distribution::Any } else { input.distribution.clone() };
    Properties { keys: vec![], max_rows: None, equal, distribution, ..input.clone() }
}

fn hop(input: &Properties, tumble: bool) -> Properties {
    let start = input.equal.len();
    let mut p = input.clone();
    p.equal.extend([start, start + 1]);
    if !tumble {
        p.keys.iter_mut().for_each(|k| {
            k.insert(start);
        });
        p.max_rows = None;
    }
    p
}

/// The id behind all columns tells a row's copies apart.
fn expand(sets: u64, width: usize, input: &Properties) -> Properties {
    let mut p = input.clone();
    p.equal.extend(input.equal.len()..width);
    p.keys.iter_mut().for_each(|k| {
        k.insert(width - 1);
    });
    p.max_rows = p.max_rows.map(|n| n.saturating_mul(sets));
    p
}

fn aggregate(a: &Aggregate, width: usize, input: &Properties) -> Properties {
    let groups: Vec<Option<usize>> = a.group.iter().map(|&g| Some(g)).collect();
    let below = project(input, &groups);
    let distribution = if a.vnode.is_empty() {
        Distribution::Singleton
    } else {
        let find = |c: &usize| a.group.iter().position(|g| g == c);
        let found = a.vnode.iter().map(find).collect::<Option<Vec<_>>>();
        found.map_or(Distribution::Any, Distribution::Hash)
    };
    let mut keys = below.keys;
    keys.push((0..a.group.len()).collect());
    let mut equal = below.equal;
    equal.extend(a.group.len()..width);
    Properties {
        append_only: a.calls.is_empty() && input.append_only,
        keys,
        equal,
        distribution,
        max_rows: if a.group.is_empty() { Some(1) } else { input.max_rows },
    }
}

fn top_n(t: &TopN, input: &Properties) -> Properties {
    let mut p = input.clone();
    p.append_only = false;
    let one_each = t.rank == RankFunction::RowNumber;
    if one_each && t.limit.is_some_and(|l| l <= 1) {
        p.keys.push(t.group.iter().copied().collect());
    }
    if t.emit_rank {
        let rank = p.equal.len();
        p.equal.push(rank);
        if one_each {
            p.keys.push(t.group.iter().copied().chain([rank]).collect());
        }
    }
    if one_each && t.group.is_empty() {
        p.max_rows = match (t.limit, p.max_rows) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
    p
}

fn window(w: &Window, input: &Properties) -> Properties {
    let mut p = input.clone();
    p.append_only = false;
    for call in &w.calls {
        let column = p.equal.len();
        p.equal.push(column);
        if call.numbering == Some(RankFunction::RowNumber) {
            p.keys.push(w.group.iter().copied().chain([column]).collect());
        }
    }
    p
}

/// What a left row has met stays as it was, so nothing about the right side's rows at one time holds of the
/// rows that were met at different times, but that a left row has met them together.
fn lookup(j: &Join, left: &Properties, right: &Properties) -> Properties {
    let width = left.equal.len();
    let single = right.is_unique(&j.right.keys);
    let shifted = |key: &BTreeSet<usize>| key.iter().map(|c| c + width).collect::<BTreeSet<_>>();
    let keys = if single {
        left.keys.clone()
    } else {
        let pairs = left
            .keys
            .iter()
            .flat_map(|l| right.keys.iter().map(move |r| l.union(&shifted(r)).copied().collect()));
        pairs.collect()
    };
    let mut equal = left.equal.clone();
    equal.extend(right.equal.iter().map(|e| e + width));
    if j.kind == JoinKind::Inner {
        j.pairs().for_each(|(l, r)| merge(&mut equal, l, r + width));
    }
    Properties {
        append_only: left.append_only,
        keys,
        equal,
        distribution: by_vnode(j.left.vnode.clone()),
        max_rows: left.max_rows.filter(|_| single),
    }
}

fn join(j: &Join, left: &Properties, right: &Properties) -> Properties {
    let width = left.equal.len();
    let one_side = |p: &Properties, side: &JoinSide, extra: usize| {
        let mut p = p.clone();
        p.equal.extend(width..width + extra);
        p.append_only = false;
        p.distribution = by_vnode(side.vnode.clone());
        p
    };
    match j.kind {
        JoinKind::LeftSemi => Properties {
            append_only: left.append_only && right.append_only,
            ..one_side(left, &j.left, 0)
        },
        JoinKind::RightSemi => Properties {
            append_only: left.append_only && right.append_only,
            ..one_side(right, &j.right, 0)
        },
        JoinKind::LeftAnti => one_side(left, &j.left, 0),
        JoinKind::RightAnti => one_side(right, &j.right, 0),
        JoinKind::LeftMark => one_side(left, &j.left, 1),
        JoinKind::Inner | JoinKind::LeftOuter | JoinKind::RightOuter | JoinKind::FullOuter => {
            pairs(j, left, right)
        }
    }
}

fn by_vnode(columns: Vec<usize>) -> Distribution {
    if columns.is_empty() { Distribution::Singleton } else { Distribution::Hash(columns) }
}

/// Joins whose output has both sides' columns.
fn pairs(j: &Join, left: &Properties, right: &Properties) -> Properties {
    let width = left.equal.len();
    let shift = |columns: &BTreeSet<usize>| columns.iter().map(|c| c + width).collect();
    let right_unique: Vec<BTreeSet<usize>> = right.keys.iter().map(shift).collect();
    // A side whose rows each meet at most one row of the other side keeps its keys, unless it can
    // be padded with NULLs.
    let (pads_left, pads_right) = match j.kind {
        JoinKind::LeftOuter => (false, true),
        JoinKind::RightOuter => (true, false),
        JoinKind::FullOuter => (true, true),
        _ => (false, false),
    };
    let mut keys = Vec::new();
    if !pads_left && right.is_unique(&j.right.keys) {
        keys.extend(left.keys.iter().cloned());
    }
    if !pads_right && left.is_unique(&j.left.keys) {
        keys.extend(right_unique.iter().cloned());
    }
    // A full join pads both: (NULL, NULL) may come from either side.
    if !(pads_left && pads_right) {
        for l in &left.keys {
            keys.extend(right_unique.iter().map(|r| l.union(r).copied().collect()));
        }
    }
    let mut equal = left.equal.clone();
    equal.extend(right.equal.iter().map(|e| e + width));
    if j.kind == JoinKind::Inner {
        j.pairs().for_each(|(l, r)| merge(&mut equal, l, r + width));
    }
    let distribution = match j.kind {
        JoinKind::FullOuter if !j.left.vnode.is_empty() => Distribution::Any,
        JoinKind::RightOuter => by_vnode(j.right.vnode.iter().map(|c| c + width).collect()),
        _ => by_vnode(j.left.vnode.clone()),
    };
    let product = match (left.max_rows, right.max_rows) {
        (Some(l), Some(r)) if !(pads_left || pads_right) => l.checked_mul(r),
        (Some(l), Some(r)) => l.checked_mul(r).map(|n| n.max(l).max(r).max(l + r)),
        _ => None,
    };
    Properties {
        append_only: j.kind == JoinKind::Inner && left.append_only && right.append_only,
        keys,
        equal,
        distribution,
        max_rows: product,
    }
}

/// Puts `a` and `b` into one class; the smallest column stands for it.
fn merge(equal: &mut [usize], a: usize, b: usize) {
    let (a, b) = (equal[a], equal[b]);
    let (low, high) = (a.min(b), a.max(b));
    equal.iter_mut().filter(|e| **e == high).for_each(|e| *e = low);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::exchange::place;
    use crate::passes::tests::{join, ranked, table};

    fn set(columns: &[usize]) -> BTreeSet<usize> {
        columns.iter().copied().collect()
    }

    #[test]
    fn a_table_is_keyed_and_distributed_by_its_key() {
        let p = Properties::of(&table());
        assert_eq!(p.keys, vec![set(&[0])]);
        assert_eq!(p.distribution, Distribution::Hash(vec![0]));
        assert_eq!(Properties::of(&table().select(&[1])).keys, Vec::<BTreeSet<usize>>::new());
    }

    /// a JOIN b ON a.b = b.a (its key): each row of a meets at most one of b.
    #[test]
    fn a_lookup_join_keeps_the_left_key() {
        let p = Properties::of(&join(JoinKind::Inner, (1, 0)));
        assert!(p.is_unique(&[0]));
        assert!(p.equals(1, 3));
        assert!(!p.is_unique(&[3]));
        let p = Properties::of(&join(JoinKind::LeftOuter, (1, 0)));
        assert!(p.is_unique(&[0]));
        assert!(!p.equals(1, 3), "the right side may be padded");
    }

    #[test]
    fn padding_takes_keys_away() {
        assert!(!Properties::of(&join(JoinKind::RightOuter, (1, 0))).is_unique(&[0]));
        assert!(Properties::of(&join(JoinKind::RightOuter, (1, 0))).is_unique(&[0, 3]));
        assert!(!Properties::of(&join(JoinKind::FullOuter, (1, 0))).is_unique(&[0, 3]));
    }

    #[test]
    fn the_first_row_of_a_group_is_unique_in_it() {
        let mut top = ranked(table());
        if let Op::TopN(t) = &mut top.op {
            t.limit = Some(1);
        }
        let p = Properties::of(&top);
        assert!(p.is_unique(&[1]));
        assert!(!p.append_only);
    }

    #[test]
    fn one_row_has_the_empty_key() {
        let (_, p) = place(table().aggregate(vec![], vec![crate::passes::tests::count()]));
        assert_eq!(p.keys, vec![set(&[])]);
        assert_eq!(p.max_rows, Some(1));
        assert_eq!(p.distribution, Distribution::Singleton);
    }
}
