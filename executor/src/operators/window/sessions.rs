//! Sessions among the rows of a group, which lie in order of a timestamp: which ones changes touch.
//!
//! Two neighbours are in one session if they are less than the gap apart. Where rows are further apart, with
//! every changed row among them, a session ends both before and after the changes: what lies between two
//! such places is looked at by itself.

use std::ops::Range;

use millrace_functions::session::continues;

use super::affected::{Changed, Interval};
use super::rows::Rows;
use crate::operators::ordered::Ranked;

/// The time that order bytes begin with (see `KeyCodec`: ascending); `None`: NULL.
pub fn time_of(order: &[u8]) -> Option<i64> {
    let (marker, rest) = order.split_first()?;
    let bytes: [u8; 8] = rest.get(..8)?.try_into().ok()?;
    (*marker == 1).then(|| (u64::from_be_bytes(bytes) ^ (1 << 63)) as i64)
}

fn time(row: &Ranked) -> i64 {
    time_of(row.order_bytes()).unwrap_or(i64::MAX)
}

/// The last of `rows` that follow one another, from `from` on, within the gap.
fn follow<'a>(
    rows: impl Iterator<Item = &'a Ranked>,
    from: i64,
    gap: i64,
) -> (i64, Option<&'a Ranked>) {
    let (mut at, mut last) = (from, None);
    for row in rows {
        let next = time(row);
        if !continues(at.min(next), at.max(next), gap) {
            break;
        }
        (at, last) = (next, Some(row));
    }
    (at, last)
}

/// Appends the intervals of whole sessions, old and new, that changes touch; ascending and apart.
pub fn touched(rows: &Rows, changes: Changed<'_>, gap: i64, found: &mut Vec<Interval>) {
    // Of the interval being made: its bounds, and its last time.
    let mut open: Option<(Vec<u8>, Vec<u8>, i64)> = None;
    for (key, order, _) in changes {
        let own = time_of(&key[..*order]).unwrap_or(i64::MAX);
        let at = rows.partition_point(|r| r.key[..] < key[..]);
        let joins = |(_, high, last): &(Vec<u8>, Vec<u8>, i64)| {
            key[..] <= high[..] || continues(*last, own, gap)
        };
        let low = match open.take() {
            // Nothing between the two: what comes before has been walked over.
            Some(interval) if joins(&interval) => {
                let (low, high, last) = interval;
                if key[..] <= high[..] {
                    open = Some((low, high, last));
                    continue;
                }
                low
            }
            other => {
                found.extend(other.map(|(low, high, _)| Interval { low, high: Some(high) }));
                follow(rows.before(at), own, gap).1.map_or(key.to_vec(), |r| r.key.to_vec())
            }
        };
        let (last, row) = follow(rows.after(at), own, gap);
        let high = row.map_or(key.to_vec(), |r| r.key.to_vec().max(key.to_vec()));
        open = Some((low, high, last));
    }
    found.extend(open.map(|(low, high, _)| Interval { low, high: Some(high) }));
}

/// The range with the sessions of its first and last entries whole.
pub fn around(rows: &Rows, range: Range<usize>, gap: i64) -> (usize, usize) {
    if range.is_empty() {
        return (range.start, range.end);
    }
    let reached = |rows: &mut dyn Iterator<Item = &Ranked>, from: i64| {
        let mut at = from;
        rows.take_while(|row| {
            let next = time(row);
            let near = continues(at.min(next), at.max(next), gap);
            at = next;
            near
        })
        .count()
    };
    let first = rows.get(range.start).map_or(i64::MIN, time);
    let last = rows.get(range.end - 1).map_or(i64::MAX, time);
    let before = reached(&mut rows.before(range.start), first);
    let after = reached(&mut rows.after(range.end), last);
    (range.start - before, range.end + after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::KeyBytes;
    use crate::state::arena::RowRef;

    fn key(time: i64) -> KeyBytes {
        let mut bytes = vec![1];
        bytes.extend(((time as u64) ^ (1 << 63)).to_be_bytes());
        KeyBytes::new(&bytes)
    }

    fn rows(times: &[i64]) -> Rows {
        let row = |(i, t): (usize, &i64)| {
            let at = RowRef { chunk: 0, row: i as u32 };
            Ranked { key: key(*t), order: 9, at, weight: 1 }
        };
        Rows::from_sorted(times.iter().enumerate().map(row).collect())
    }

    fn intervals(times: &[i64], changes: &[i64]) -> Vec<(i64, i64)> {
        let keys: Vec<KeyBytes> = changes.iter().map(|t| key(*t)).collect();
        let changes: Vec<_> = keys.iter().map(|k| (k, 9, 1)).collect();
        let mut found = Vec::new();
        touched(&rows(times), &changes, 10, &mut found);
        let edge = |k: &[u8]| time_of(k).unwrap();
        found.iter().map(|i| (edge(&i.low), edge(i.high.as_ref().unwrap()))).collect()
    }

    #[test]
    fn a_change_touches_the_sessions_beside_it() {
        let times = [0, 5, 30, 39, 60, 100];
        assert_eq!(intervals(&times, &[33]), [(30, 39)]);
        // Between two sessions and near both: it joins them.
        assert_eq!(intervals(&[0, 5, 20, 22], &[12]), [(0, 22)]);
        // Near neither.
        assert_eq!(intervals(&times, &[15]), [(15, 15)]);
        // Exactly the gap away.
        assert_eq!(intervals(&times, &[50, 70]), [(50, 50), (70, 70)]);
    }

    #[test]
    fn changes_that_follow_one_another_are_one_interval() {
        // 14 and 22 join 5 and 30 together.
        assert_eq!(intervals(&[0, 5, 30, 39], &[14, 22]), [(0, 39)]);
        assert_eq!(intervals(&[0, 5, 30, 39], &[14, 25]), [(0, 14), (25, 39)]);
        assert_eq!(intervals(&[0, 5, 8], &[5, 8, 40]), [(0, 8), (40, 40)]);
    }

    #[test]
    fn a_range_grows_to_whole_sessions() {
        let rows = rows(&[0, 5, 30, 39, 45, 60]);
        assert_eq!(around(&rows, 3..4, 10), (2, 5));
        assert_eq!(around(&rows, 1..3, 10), (0, 5));
        assert_eq!(around(&rows, 5..6, 10), (5, 6));
    }
}
