//! Which rows of a group a set of changes can affect, as intervals of keys.
//!
//! A row's result is a function of the rows within reach of it, so it can change only if, before or
//! after, a changed row is among them. Steps from a changed row count rows that are there before and
//! after (`survivors`): that many of either are then no more.

use millrace_common::collections::HashMap;
use millrace_functions::window_call::Reach;

use super::rows::Rows;
use super::values::Span;
use super::{asof_lookup, sessions};
use crate::operators::ordered::Ranked;
use crate::state::KeyBytes;

/// Keys from `low` to `high`, both included; `None`: to the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interval {
    pub low: Vec<u8>,
    pub high: Option<Vec<u8>>,
}

impl Interval {
    pub const fn all() -> Interval {
        Interval { low: Vec::new(), high: None }
    }
}

/// The changes of a group, in order: key, length of the order bytes, weight.
pub type Changed<'a> = &'a [(&'a KeyBytes, usize, i64)];

/// Intervals that hold every row, old or new, whose result may differ; ascending and apart. `rows`: as
/// they were; `spans`: of the reaches by value.
pub fn affected(
    rows: &Rows,
    changes: Changed<'_>,
    reaches: &[Reach],
    spans: &[Span],
) -> Vec<Interval> {
    // So many changes that looking for what they spare is not worth it.
    if changes.len() * 4 >= rows.len() || reaches.iter().any(unbounded) {
        return vec![Interval::all()];
    }
    let deltas: HashMap<&[u8], i64> = changes.iter().map(|(k, _, w)| (&k[..], *w)).collect();
    let steps = Steps { rows, deltas };
    let mut found = Vec::new();
    for reach in reaches {
        match *reach {
            Reach::Rows { before, after } => {
                found.extend(changes.iter().map(|(k, ..)| steps.rows_around(k, before, after)));
            }
            Reach::Peers { before, after } => {
                let around = |(k, order, _): &(&KeyBytes, usize, i64)| {
                    steps.peers_around(k, &k[..*order], before, after)
                };
                found.extend(changes.iter().map(around));
            }
            Reach::Shift { peers } => steps.shifted(changes, peers, &mut found),
            Reach::Carry { place } => asof_lookup::touched(rows, changes, place, &mut found),
            Reach::Session { gap } => sessions::touched(rows, changes, gap, &mut found),
            // Below.
            Reach::Values { .. } => {}
        }
    }
    spans.iter().for_each(|span| span.touched(rows, changes, &mut found));
    merge(found)
}

fn unbounded(reach: &Reach) -> bool {
    matches!(
        reach,
        Reach::Rows { before: None, after: None } | Reach::Peers { before: None, after: None }
    )
}

struct Steps<'a> {
    rows: &'a Rows,
    deltas: HashMap<&'a [u8], i64>,
}

impl Steps<'_> {
    /// Copies of an entry that are there before and after.
    fn survivors(&self, row: &Ranked) -> i64 {
        let delta = self.deltas.get(&row.key[..]).copied().unwrap_or(0);
        row.weight.min(row.weight + delta).max(0)
    }

    /// Rows between changes whose number is not the same before them; with peers, through those that are
    /// level with the later one.
    fn shifted(&self, changes: Changed<'_>, peers: bool, found: &mut Vec<Interval>) {
        let mut shift = 0;
        for (i, (key, _, weight)) in changes.iter().enumerate() {
            shift += weight;
            let high = match (shift, changes.get(i + 1)) {
                (0, _) => Some(key.to_vec()),
                (_, Some((next, order, _))) if peers => Some(self.last_peer(next, &next[..*order])),
                (_, Some((next, ..))) => Some(next.to_vec()),
                (_, None) => None,
            };
            found.push(Interval { low: key.to_vec(), high });
        }
    }

    /// The last key that is level with a key, or that itself.
    fn last_peer(&self, key: &[u8], order: &[u8]) -> Vec<u8> {
        let end = self.rows.partition_point(|r| r.order_bytes() <= order);
        let last = end.checked_sub(1).and_then(|last| self.rows.get(last));
        match last.filter(|r| r.order_bytes() == order) {
            Some(row) => row.key.to_vec().max(key.to_vec()),
            None => key.to_vec(),
        }
    }

    fn rows_around(&self, key: &[u8], before: Option<u64>, after: Option<u64>) -> Interval {
        let at = self.rows.partition_point(|r| r.key[..] < *key);
        let reach = |limit: u64, rows: &mut dyn Iterator<Item = &Ranked>| {
            let (mut last, mut left) = (None, limit as i64);
            while left > 0 {
                let row = rows.next()?;
                left -= self.survivors(row);
                last = Some(row.key.to_vec());
            }
            Some(last.unwrap_or_else(|| key.to_vec()))
        };
        let low = match before {
            Some(n) => reach(n, &mut self.rows.before(at)).unwrap_or_default(),
            None => Vec::new(),
        };
        let own = usize::from(self.rows.get(at).is_some_and(|r| r.key[..] == *key));
        let high = after.and_then(|n| reach(n, &mut self.rows.after(at + own)));
        Interval { low, high }
    }

    fn peers_around(
        &self,
        key: &[u8],
        order: &[u8],
        before: Option<u64>,
        after: Option<u64>,
    ) -> Interval {
        let start = self.rows.partition_point(|r| r.order_bytes() < order);
        let end = self.rows.partition_point(|r| r.order_bytes() <= order);
        let low = match before {
            // The order bytes are no longer than any key of the group.
            Some(0) => order.to_vec(),
            Some(n) => self.groups(n, &mut self.rows.before(start)).map_or_else(Vec::new, |r| r.0),
            None => Vec::new(),
        };
        let high = match after {
            Some(0) => Some(self.last_peer(key, order)),
            Some(n) => self.groups(n, &mut self.rows.after(end)).map(|r| r.1),
            None => None,
        };
        Interval { low, high }
    }

    /// Walks over so many groups that survive; the order bytes of the last one, and its furthest key.
    /// `None`: there are not so many.
    fn groups(
        &self,
        count: u64,
        rows: &mut dyn Iterator<Item = &Ranked>,
    ) -> Option<(Vec<u8>, Vec<u8>)> {
        let (mut left, mut survives) = (count, false);
        let mut group: Option<(Vec<u8>, Vec<u8>)> = None;
        for row in rows {
            let same = group.as_ref().is_some_and(|(order, _)| order[..] == *row.order_bytes());
            if !same && survives {
                left -= 1;
                if left == 0 {
                    return group;
                }
            }
            survives = (same && survives) || self.survivors(row) > 0;
            group = Some((row.order_bytes().to_vec(), row.key.to_vec()));
        }
        None
    }
}

fn merge(mut found: Vec<Interval>) -> Vec<Interval> {
    found.sort_by(|a, b| a.low.cmp(&b.low));
    let mut merged: Vec<Interval> = Vec::with_capacity(found.len());
    for next in found {
        match merged.last_mut() {
            Some(last) if last.high.as_ref().is_none_or(|h| *h >= next.low) => {
                last.high = match (last.high.take(), next.high) {
                    (Some(a), Some(b)) => Some(a.max(b)),
                    _ => None,
                };
            }
            _ => merged.push(next),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::arena::RowRef;

    /// Order and identity of four bytes each; two rows of each order.
    fn row(n: u32) -> Ranked {
        let mut key = (n / 2).to_be_bytes().to_vec();
        key.extend(n.to_be_bytes());
        let at = RowRef { chunk: 0, row: n };
        Ranked { key: KeyBytes::new(&key), order: 4, at, weight: 1 }
    }

    fn group(rows: u32) -> Rows {
        // Even places only, so that there is room between them.
        Rows::from_sorted((0..rows).map(|n| row(n * 4)).collect())
    }

    fn places(rows: &Rows, changes: &[(u32, i64)], reach: Reach) -> Vec<(usize, usize)> {
        let keys: Vec<KeyBytes> = changes.iter().map(|c| row(c.0).key).collect();
        let changed: Vec<_> = keys.iter().zip(changes).map(|(k, c)| (k, 4, c.1)).collect();
        let place = |i: &Interval| {
            let start = rows.partition_point(|r| r.key[..] < i.low[..]);
            let end = i
                .high
                .as_ref()
                .map_or(rows.len(), |h| rows.partition_point(|r| r.key[..] <= h[..]));
            (start, end)
        };
        affected(rows, &changed, &[reach], &[]).iter().map(place).collect()
    }

    #[test]
    fn a_change_reaches_as_many_rows_in_any_group() {
        let reach = Reach::Rows { before: Some(1), after: Some(2) };
        for size in [1_000, 100_000] {
            let rows = group(size);
            // A new row before the 501st: one row before it and two after.
            assert_eq!(places(&rows, &[(4 * 500 - 1, 1)], reach), vec![(499, 502)]);
            // The 501st goes: itself too.
            assert_eq!(places(&rows, &[(4 * 500, -1)], reach), vec![(499, 503)]);
        }
    }

    /// What comes after rows that go together is reached from the last one that stays.
    #[test]
    fn rows_that_go_are_not_counted() {
        let rows = group(1_000);
        let gone: Vec<(u32, i64)> = (100..110).map(|n| (4 * n, -1)).collect();
        let reach = Reach::Rows { before: Some(0), after: Some(2) };
        assert_eq!(places(&rows, &gone, reach), vec![(100, 112)]);
        let reach = Reach::Rows { before: Some(2), after: Some(0) };
        assert_eq!(places(&rows, &gone, reach), vec![(98, 110)]);
    }

    #[test]
    fn a_number_moves_until_the_count_is_the_same_again() {
        let rows = group(1_000);
        let moved = [(4 * 100, -1), (4 * 300 + 1, 1)];
        assert_eq!(places(&rows, &moved, Reach::Shift { peers: false }), vec![(100, 301)]);
        assert_eq!(
            places(&rows, &[(4 * 100, -1)], Reach::Shift { peers: false }),
            vec![(100, 1000)]
        );
    }

    /// The new row is the first of two peers: the other's rank counts one row less before it.
    #[test]
    fn a_rank_moves_through_the_peers_of_the_last_change() {
        let pairs = |n: u32| {
            let key = [(n / 2).to_be_bytes(), n.to_be_bytes()].concat();
            let at = RowRef { chunk: 0, row: n };
            Ranked { key: KeyBytes::new(&key), order: 4, at, weight: 1 }
        };
        let rows = Rows::from_sorted((0..1_000).filter(|n| n % 4 != 2).map(pairs).collect());
        let moved = [(100, -1), (102, 1)];
        assert_eq!(places(&rows, &moved, Reach::Shift { peers: true }), vec![(75, 78)]);
    }

    #[test]
    fn peers_are_reached_together() {
        let order = |n: u32| n.to_be_bytes().to_vec();
        let peer = |n: u32| {
            let key = [order(n / 5), order(n)].concat();
            let at = RowRef { chunk: 0, row: n };
            Ranked { key: KeyBytes::new(&key), order: 4, at, weight: 1 }
        };
        let rows = Rows::from_sorted((0..1_000).map(peer).collect());
        let key = peer(502).key;
        let intervals = |before, after| {
            affected(&rows, &[(&key, 4, -1)], &[Reach::Peers { before, after }], &[])
        };
        let whole = |from: u32, to: u32| {
            vec![Interval { low: order(from / 5), high: Some(peer(to).key.to_vec()) }]
        };
        assert_eq!(intervals(Some(0), Some(0)), whole(500, 504));
        assert_eq!(intervals(Some(1), Some(1)), whole(495, 509));
        let to_end = Interval { low: order(100), high: None };
        assert_eq!(intervals(Some(0), None), vec![to_end]);
    }
}
