//! ASOF joins: left and right rows of a group in one order, and for each left row the last right row before it.
//! A change of a left row reaches itself; one of a right row, the rows up to the next right one that stays.

use millrace_common::collections::HashMap;
use millrace_functions::asof::Place;

use super::affected::{Changed, Interval};
use super::rows::Rows;

/// The index of the last right row before an index; the index itself if there is none.
pub fn right_before(rows: &Rows, at: usize, place: Place) -> usize {
    let steps = rows.before(at).position(|r| place.is_right(r.order_bytes()));
    steps.map_or(at, |steps| at - steps - 1)
}

/// Appends the intervals of rows that changes reach.
pub fn touched(rows: &Rows, changes: Changed<'_>, place: Place, found: &mut Vec<Interval>) {
    let deltas: HashMap<&[u8], i64> = changes.iter().map(|(k, _, w)| (&k[..], *w)).collect();
    for (key, order, _) in changes {
        let low = key.to_vec();
        if !place.is_right(&key[..*order]) {
            found.push(Interval { high: Some(low.clone()), low });
            continue;
        }
        let at = rows.partition_point(|r| r.key[..] <= key[..]);
        let mut last = low.clone();
        let mut ended = false;
        for row in rows.after(at) {
            let delta = deltas.get(&row.key[..]).copied().unwrap_or(0);
            if place.is_right(row.order_bytes()) && row.weight + delta.min(0) > 0 {
                ended = true;
                break;
            }
            last = row.key.to_vec();
        }
        // Left rows that come with the change have intervals of their own.
        found.push(Interval { low, high: ended.then_some(last) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operators::ordered::Ranked;
    use crate::state::KeyBytes;
    use crate::state::arena::RowRef;

    const PLACE: Place = Place { offset: 1, right: false };

    /// A time of one byte, then whether it is a left row.
    fn key(time: u8, right: bool) -> KeyBytes {
        KeyBytes::new(&[time, u8::from(!right)])
    }

    fn rows(all: &[(u8, bool)]) -> Rows {
        let row = |(i, r): (usize, &(u8, bool))| {
            let at = RowRef { chunk: 0, row: i as u32 };
            Ranked { key: key(r.0, r.1), order: 2, at, weight: 1 }
        };
        Rows::from_sorted(all.iter().enumerate().map(row).collect())
    }

    fn reached(changes: &[(u8, bool, i64)]) -> Vec<(u8, Option<u8>)> {
        let rows = rows(&[
            (1, true),
            (2, false),
            (3, false),
            (5, true),
            (6, false),
            (8, true),
            (9, false),
        ]);
        let keys: Vec<_> = changes.iter().map(|c| key(c.0, c.1)).collect();
        let changes: Vec<_> = keys.iter().zip(changes).map(|(k, c)| (k, 2, c.2)).collect();
        let mut found = Vec::new();
        touched(&rows, &changes, PLACE, &mut found);
        found.iter().map(|i| (i.low[0], i.high.as_ref().map(|h| h[0]))).collect()
    }

    #[test]
    fn a_right_row_reaches_the_next_that_stays() {
        assert_eq!(reached(&[(4, true, 1)]), [(4, Some(4))]);
        assert_eq!(reached(&[(2, true, 1)]), [(2, Some(3))]);
        assert_eq!(reached(&[(5, true, -1)]), [(5, Some(6))]);
        assert_eq!(reached(&[(2, true, 1), (5, true, -1)]), [(2, Some(6)), (5, Some(6))]);
        assert_eq!(reached(&[(7, true, 1), (8, true, -1)]), [(7, None), (8, None)]);
        assert_eq!(reached(&[(6, false, -1)]), [(6, Some(6))]);
    }
}
