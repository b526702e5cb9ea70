//! Consolidation: equal rows' weights summed, zeros dropped (docs/design.md §3).
//!
//! Rows are grouped by key bytes first; only where a key occurs more than once are whole rows
//! compared, and encoded only where it occurs more than twice. So a change that touches every key once costs
//! one hash a row.

use arrow::array::{
    Array, BinaryArray, DynComparator, Int64Array, RecordBatch, UInt32Array, make_comparator,
};
use arrow::compute::SortOptions;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use millrace_common::DeltaChunk;
use millrace_common::delta::take_rows;
use millrace_common::hash::hash_bytes;
use millrace_common::identity::RowCodec;

use crate::error::ExecError;

/// Net weights, rows of one key next to each other.
#[derive(Debug, Default)]
pub struct Net {
    /// Rows of the input, none with a net weight of zero; one for each distinct row.
    pub rows: Vec<u32>,
    pub weights: Vec<i64>,
    /// Where each key's rows begin in `rows`; keys without any left are not listed.
    pub starts: Vec<u32>,
    /// Every row of the input is there, with the weight it had.
    pub unchanged: bool,
}

impl Net {
    /// The rows of each key.
    pub fn keys(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        let ends = self.starts.iter().skip(1).copied().chain([self.rows.len() as u32]);
        self.starts.iter().zip(ends).map(|(&s, e)| s as usize..e as usize)
    }

    /// The consolidated rows.
    pub fn apply(&self, chunk: &DeltaChunk) -> Result<DeltaChunk, ExecError> {
        if self.unchanged {
            return Ok(chunk.clone());
        }
        let rows = UInt32Array::from(self.rows.clone());
        let batch = take_rows(&chunk.batch, &rows)?;
        Ok(DeltaChunk::new(batch, weights(&self.weights)))
    }

    fn push_key(&mut self, rows: impl IntoIterator<Item = (u32, i64)>) {
        let start = self.rows.len() as u32;
        for (row, weight) in rows.into_iter().filter(|(_, w)| *w != 0) {
            self.rows.push(row);
            self.weights.push(weight);
        }
        if self.rows.len() as u32 > start {
            self.starts.push(start);
        }
    }
}

/// Weights of a chunk; implied when all are one.
pub fn weights(weights: &[i64]) -> Option<Int64Array> {
    (!weights.iter().all(|&w| w == 1)).then(|| Int64Array::from(weights.to_vec()))
}

/// Rows by key: each key's first row, and from each row to the next of its key.
struct Chains {
    firsts: Vec<u32>,
    next: Vec<u32>,
}

const END: u32 = u32::MAX;

fn chain(keys: &BinaryArray) -> Chains {
    let mut firsts: Vec<u32> = Vec::with_capacity(keys.len());
    let mut next = vec![END; keys.len()];
    let mut lasts: Vec<u32> = Vec::with_capacity(keys.len());
    let mut table: HashTable<(u64, u32)> = HashTable::with_capacity(keys.len());
    for row in 0..keys.len() {
        let key = keys.value(row);
        let hash = hash_bytes(key);
        let same =
            |(h, k): &(u64, u32)| *h == hash && keys.value(firsts[*k as usize] as usize) == key;
        match table.entry(hash, same, |(h, _)| *h) {
            Entry::Occupied(at) => {
                let last = &mut lasts[at.get().1 as usize];
                next[*last as usize] = row as u32;
                *last = row as u32;
            }
            Entry::Vacant(at) => {
                at.insert((hash, firsts.len() as u32));
                firsts.push(row as u32);
                lasts.push(row as u32);
            }
        }
    }
    Chains { firsts, next }
}

impl Chains {
    fn of(&self, first: u32) -> impl Iterator<Item = u32> + '_ {
        let next = move |&row: &u32| Some(self.next[row as usize]).filter(|&n| n != END);
        std::iter::successors(Some(first), next)
    }
}

/// Nets a chunk whose keys are whole rows: weights of a key add up.
pub fn net_by_identity(keys: &BinaryArray, chunk: &DeltaChunk) -> Net {
    let chains = chain(keys);
    let unchanged = chains.firsts.len() == keys.len() && !has_zero(chunk);
    let mut net = Net { unchanged, ..Net::default() };
    for &first in &chains.firsts {
        let sum = chains.of(first).map(|r| chunk.weight(r as usize)).fold(0, i64::wrapping_add);
        net.push_key([(first, sum)]);
    }
    net
}

/// [`net_by_identity`] over several chunks with their keys: a row that comes again is added to its first.
pub fn net_across(keys: &[BinaryArray], chunks: &[DeltaChunk]) -> Vec<Net> {
    let mut sums: Vec<Vec<i64>> = chunks
        .iter()
        .map(|chunk| (0..chunk.num_rows()).map(|row| chunk.weight(row)).collect())
        .collect();
    let rows = keys.iter().map(Array::len).sum();
    let mut table: HashTable<(u64, u32, u32)> = HashTable::with_capacity(rows);
    let mut unchanged: Vec<bool> = chunks.iter().map(|chunk| !has_zero(chunk)).collect();
    for (c, keys_of) in keys.iter().enumerate() {
        for row in 0..keys_of.len() {
            let key = keys_of.value(row);
            let hash = hash_bytes(key);
            let same = |&(h, c, r): &(u64, u32, u32)| {
                h == hash && keys[c as usize].value(r as usize) == key
            };
            match table.entry(hash, same, |e| e.0) {
                Entry::Occupied(first) => {
                    let (_, first_chunk, first_row) = *first.get();
                    let weight = std::mem::take(&mut sums[c][row]);
                    let sum = &mut sums[first_chunk as usize][first_row as usize];
                    *sum = sum.wrapping_add(weight);
                    unchanged[first_chunk as usize] = false;
                    unchanged[c] = false;
                }
                Entry::Vacant(at) => {
                    at.insert((hash, c as u32, row as u32));
                }
            }
        }
    }
    let net = |(sums, unchanged): (Vec<i64>, bool)| {
        let mut net = Net { unchanged, ..Net::default() };
        for (row, weight) in sums.into_iter().enumerate() {
            net.push_key([(row as u32, weight)]);
        }
        net
    };
    sums.into_iter().zip(unchanged).map(net).collect()
}

/// Nets a chunk by key, then by row among the rows of a key. `identity` encodes whole rows.
pub fn net_by_key(
    keys: &BinaryArray,
    chunk: &DeltaChunk,
    identity: &RowCodec,
) -> Result<Net, ExecError> {
    let chains = chain(keys);
    let mut net = Net::default();
    if chains.firsts.len() == keys.len() {
        net.unchanged = !has_zero(chunk);
        for &row in &chains.firsts {
            net.push_key([(row, chunk.weight(row as usize))]);
        }
        return Ok(net);
    }
    // An old and a new row of a key, the usual case, are compared in place.
    let columns = chunk.batch.columns().iter();
    let comparators =
        columns.map(|c| make_comparator(c.as_ref(), c.as_ref(), SortOptions::default()));
    // `None`: a type that cannot be compared in place.
    let comparators: Option<Vec<DynComparator>> = comparators.collect::<Result<_, _>>().ok();
    let second = |first: u32| Some(chains.next[first as usize]).filter(|&n| n != END);
    let pair = |first: u32| {
        comparators.as_ref().filter(|_| second(first).is_some_and(|s| second(s).is_none()))
    };
    let several = |first: u32| second(first).is_some() && pair(first).is_none();
    let shared: Vec<u32> =
        chains.firsts.iter().filter(|&&f| several(f)).flat_map(|&f| chains.of(f)).collect();
    let taken = take_rows(&chunk.batch, &UInt32Array::from(shared))?;
    let encoded = identity.rows(taken.columns(), taken.num_rows())?;
    let mut at = 0;
    let mut group: Vec<(usize, u32)> = Vec::new();
    for &first in &chains.firsts {
        if let Some(comparators) = pair(first) {
            let other = chains.next[first as usize];
            let (a, b) = (first as usize, other as usize);
            if comparators.iter().all(|compare| compare(a, b).is_eq()) {
                net.push_key([(first, chunk.weight(a).wrapping_add(chunk.weight(b)))]);
            } else {
                net.push_key([(first, chunk.weight(a)), (other, chunk.weight(b))]);
            }
            continue;
        }
        if !several(first) {
            net.push_key([(first, chunk.weight(first as usize))]);
            continue;
        }
        group.clear();
        for row in chains.of(first) {
            group.push((at, row));
            at += 1;
        }
        group.sort_by(|a, b| encoded.row(a.0).cmp(&encoded.row(b.0)));
        let equal = group.chunk_by(|a, b| encoded.row(a.0) == encoded.row(b.0));
        net.push_key(equal.map(|rows| {
            let sum =
                rows.iter().map(|(_, r)| chunk.weight(*r as usize)).fold(0, i64::wrapping_add);
            (rows[0].1, sum)
        }));
    }
    Ok(net)
}

/// Rows grouped by key: the first row of every key, and the key (as a position in that list) of
/// every row.
pub fn group_keys(keys: &BinaryArray) -> (Vec<u32>, Vec<u32>) {
    let chains = chain(keys);
    let mut group = vec![0; keys.len()];
    for (g, &first) in chains.firsts.iter().enumerate() {
        for row in chains.of(first) {
            group[row as usize] = g as u32;
        }
    }
    (chains.firsts, group)
}

fn has_zero(chunk: &DeltaChunk) -> bool {
    chunk.weights.as_ref().is_some_and(|w| w.values().contains(&0))
}

/// Drops what cancels inside a chunk: after a projection, updates of other columns.
pub fn consolidate_projected(chunk: DeltaChunk) -> Result<DeltaChunk, ExecError> {
    let retracts = chunk.weights.as_ref().is_some_and(|w| w.values().iter().any(|&w| w < 0));
    if !retracts || chunk.batch.num_columns() == 0 {
        return Ok(chunk);
    }
    let keys = row_bytes(&RowCodec::whole(&chunk.batch.schema())?, &chunk.batch)?;
    net_by_identity(&keys, &chunk).apply(&chunk)
}

/// The identity bytes of whole rows.
pub fn row_bytes(identity: &RowCodec, batch: &RecordBatch) -> Result<BinaryArray, ExecError> {
    let rows = identity.rows(batch.columns(), batch.num_rows())?;
    Ok(BinaryArray::from_iter_values(rows.iter().map(|r| r.data().to_vec())))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, AsArray};
    use arrow::datatypes::Int64Type;

    use super::*;

    fn chunk(rows: &[(i64, i64, i64)]) -> (BinaryArray, DeltaChunk) {
        let keys = rows.iter().map(|r| r.0.to_be_bytes()).collect::<Vec<_>>();
        let a: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|r| r.0)));
        let b: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|r| r.1)));
        let batch = RecordBatch::try_from_iter([("a", a), ("b", b)]).unwrap();
        let w = Int64Array::from_iter_values(rows.iter().map(|r| r.2));
        (BinaryArray::from_iter_values(keys), DeltaChunk::new(batch, Some(w)))
    }

    fn listed(chunk: &DeltaChunk) -> Vec<(i64, i64, i64)> {
        let col = |i: usize| chunk.batch.column(i).as_primitive::<Int64Type>().values().to_vec();
        let (a, b) = (col(0), col(1));
        let mut rows: Vec<_> = (0..a.len()).map(|i| (a[i], b[i], chunk.weight(i))).collect();
        rows.sort_unstable();
        rows
    }

    #[test]
    fn rows_that_come_and_go_vanish_and_keys_stay_together() {
        let (keys, c) = chunk(&[
            (1, 10, -1),
            (2, 5, 1),
            (1, 11, 1),
            (2, 5, -1),
            (3, 1, 1),
            (1, 11, -1),
            (1, 12, 1),
        ]);
        let identity = RowCodec::whole(&c.batch.schema()).unwrap();
        let net = net_by_key(&keys, &c, &identity).unwrap();
        assert_eq!(listed(&net.apply(&c).unwrap()), [(1, 10, -1), (1, 12, 1), (3, 1, 1)]);
        assert_eq!(net.keys().map(|k| k.len()).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn multiplicities_add_up() {
        let (_, c) = chunk(&[(1, 1, 2), (1, 1, 3), (2, 2, 1), (2, 2, -1), (3, 3, 0)]);
        let vanished = consolidate_projected(c.clone()).unwrap();
        assert_eq!(listed(&vanished), [(1, 1, 5)]);
        let (keys, c) = chunk(&[(1, 1, 1), (2, 2, -1)]);
        assert!(net_by_identity(&keys, &c).unchanged);
    }

    #[test]
    fn rows_of_several_chunks_add_up_in_their_first_place() {
        let (a, first) = chunk(&[(1, 1, 1), (2, 2, 1), (3, 3, 1)]);
        let (b, second) = chunk(&[(4, 4, 2), (2, 2, -1), (3, 3, 1)]);
        let (c, third) = chunk(&[(5, 5, 1), (6, 6, -1)]);
        let chunks = [first, second, third];
        let nets = net_across(&[a, b, c], &chunks);
        assert_eq!(nets.iter().map(|n| n.unchanged).collect::<Vec<_>>(), [false, false, true]);
        let kept: Vec<_> =
            nets.iter().zip(&chunks).map(|(n, c)| listed(&n.apply(c).unwrap())).collect();
        assert_eq!(kept[0], [(1, 1, 1), (3, 3, 2)]);
        assert_eq!(kept[1], [(4, 4, 2)]);
        assert_eq!(kept[2], [(5, 5, 1), (6, 6, -1)]);
    }
}
