//! Derived properties of a stream: unique keys, append-only, equal columns, distribution, size.
//!
//! They are facts about every possible content, never guesses: storage layouts rest on them. A
//! unique key is one under row identity (NULL equals NULL), at every barrier; inside an epoch
//! transient weights may violate it. "Equal" columns hold the same value in every row.

use std::collections::BTreeSet;

use millrace_graph::dispatch_operator;

use crate::stream::operators::OperatorRules;
use crate::stream::plan::{Op, Stream};

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

impl Distribution {
    /// Of rows in the tasks that own the vnode of these columns; none: in the only task.
    pub fn by_vnode(columns: Vec<usize>) -> Distribution {
        if columns.is_empty() { Distribution::Singleton } else { Distribution::Hash(columns) }
    }
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
    pub fn derive(op: &Op, width: usize, inputs: &[Properties]) -> Properties {
        let mut p = dispatch_operator!(op, p => p.properties(width, inputs));
        p.tidy();
        p
    }

    /// Nothing known but where rows are.
    pub fn unknown(width: usize, distribution: Distribution) -> Properties {
        Properties {
            append_only: false,
            keys: vec![],
            equal: (0..width).collect(),
            distribution,
            max_rows: None,
        }
    }

    /// Of the first input; where there is none, of nothing known of `width` columns.
    pub fn of_input(inputs: &[Properties], width: usize) -> Properties {
        inputs.first().cloned().unwrap_or_else(|| Properties::unknown(width, Distribution::Any))
    }

    /// Of some of the columns, by position.
    pub fn select(&self, columns: &[usize]) -> Properties {
        self.project(&columns.iter().map(|&c| Some(c)).collect::<Vec<_>>())
    }

    /// Of columns given by their position here (`None`: computed).
    pub fn project(&self, columns: &[Option<usize>]) -> Properties {
        let find = |c: usize| {
            let same = |have: &Option<usize>| have.is_some_and(|have| self.equals(have, c));
            columns.iter().position(same)
        };
        let keys = self.keys.iter().filter_map(|k| k.iter().map(|&c| find(c)).collect()).collect();
        let equal =
            columns.iter().enumerate().map(|(i, c)| c.and_then(find).unwrap_or(i)).collect();
        let distribution = match &self.distribution {
            Distribution::Hash(hash) => hash
                .iter()
                .map(|&c| find(c))
                .collect::<Option<Vec<_>>>()
                .map_or(Distribution::Any, Distribution::Hash),
            other => other.clone(),
        };
        Properties {
            append_only: self.append_only,
            keys,
            equal,
            distribution,
            max_rows: self.max_rows,
        }
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

/// Puts `a` and `b` into one class; the smallest column stands for it.
pub fn merge(equal: &mut [usize], a: usize, b: usize) {
    let (a, b) = (equal[a], equal[b]);
    let (low, high) = (a.min(b), a.max(b));
    equal.iter_mut().filter(|e| **e == high).for_each(|e| *e = low);
}

#[cfg(test)]
mod tests {
    use millrace_graph::JoinKind;

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
