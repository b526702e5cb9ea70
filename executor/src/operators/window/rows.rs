//! The rows of a group in order, in blocks, so that a change costs the same in a group of a thousand
//! rows and of a million: finding a place is two binary searches, taking it moves part of a block.

use std::ops::Range;

use crate::error::ExecError;
use crate::operators::ordered::Ranked;
use crate::state::arena::RowRef;

/// Rows of a block when it is split in two.
const BLOCK: usize = 512;

/// See the module. Indices count entries; an entry stands for `weight` equal rows.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    /// None of them empty.
    blocks: Vec<Vec<Ranked>>,
    len: usize,
    key_bytes: usize,
}

impl Rows {
    pub fn from_sorted(rows: Vec<Ranked>) -> Rows {
        let (len, key_bytes) = (rows.len(), rows.iter().map(|r| r.key.heap_size()).sum());
        let mut rows = rows.into_iter();
        let mut blocks = Vec::with_capacity(len / BLOCK + 1);
        loop {
            let block: Vec<Ranked> = rows.by_ref().take(BLOCK / 2).collect();
            if block.is_empty() {
                return Rows { blocks, len, key_bytes };
            }
            blocks.push(block);
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Heap bytes of the entries, without the rows they refer to.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<Ranked>() + self.key_bytes
    }

    fn locate(&self, index: usize) -> (usize, usize) {
        let mut rest = index;
        for (b, block) in self.blocks.iter().enumerate() {
            if rest < block.len() {
                return (b, rest);
            }
            rest -= block.len();
        }
        (self.blocks.len(), 0)
    }

    pub fn get(&self, index: usize) -> Option<&Ranked> {
        let (block, at) = self.locate(index);
        self.blocks.get(block)?.get(at)
    }

    /// The first index for which `before` does not hold; it holds for a prefix of the rows.
    pub fn partition_point(&self, before: impl Fn(&Ranked) -> bool) -> usize {
        let block = self.blocks.partition_point(|b| b.last().is_some_and(&before));
        let skipped: usize = self.blocks[..block].iter().map(Vec::len).sum();
        skipped + self.blocks.get(block).map_or(0, |b| b.partition_point(&before))
    }

    /// Entries in a range of indices, from either end.
    pub fn range(&self, range: Range<usize>) -> impl Iterator<Item = &Ranked> {
        let (start, skip) = self.locate(range.start);
        self.blocks[start.min(self.blocks.len())..].iter().flatten().skip(skip).take(range.len())
    }

    /// Entries before an index, the nearest first.
    pub fn before(&self, index: usize) -> impl Iterator<Item = &Ranked> {
        let (block, at) = self.locate(index);
        let partial = self.blocks.get(block).map_or(&[][..], |b| &b[..at]);
        partial.iter().rev().chain(self.blocks[..block].iter().rev().flat_map(|b| b.iter().rev()))
    }

    /// Entries from an index on.
    pub fn after(&self, index: usize) -> impl Iterator<Item = &Ranked> {
        self.range(index..self.len)
    }

    /// Adds a weight; gives back references that are no longer held, the given one among them unless
    /// it is a new entry's. An entry whose weight would fall below zero is an error.
    pub fn add(&mut self, row: Ranked) -> Result<Vec<RowRef>, ExecError> {
        let block = self.blocks.partition_point(|b| b.last().is_some_and(|l| l.key < row.key));
        let block = block.min(self.blocks.len().saturating_sub(1));
        let found = self.blocks.get(block).map(|b| b.binary_search_by(|r| r.key.cmp(&row.key)));
        match (found, self.blocks.get_mut(block)) {
            (Some(Ok(at)), Some(rows)) if rows[at].weight + row.weight > 0 => {
                rows[at].weight += row.weight;
                Ok(vec![row.at])
            }
            (Some(Ok(at)), Some(rows)) if rows[at].weight + row.weight == 0 => {
                let gone = rows.remove(at);
                if rows.is_empty() {
                    self.blocks.remove(block);
                }
                self.len -= 1;
                self.key_bytes -= gone.key.heap_size();
                Ok(vec![row.at, gone.at])
            }
            (Some(Err(at)), Some(rows)) if row.weight > 0 => {
                self.len += 1;
                self.key_bytes += row.key.heap_size();
                rows.insert(at, row);
                if rows.len() > BLOCK {
                    let upper = rows.split_off(BLOCK / 2);
                    self.blocks.insert(block + 1, upper);
                }
                Ok(vec![])
            }
            (_, None) if row.weight > 0 => {
                self.len = 1;
                self.key_bytes = row.key.heap_size();
                self.blocks.push(vec![row]);
                Ok(vec![])
            }
            _ => Err(ExecError::internal("a group has more retractions than rows")),
        }
    }

    /// All references, for rewriting them.
    pub fn refs_mut(&mut self) -> impl Iterator<Item = &mut RowRef> {
        self.blocks.iter_mut().flatten().map(|r| &mut r.at)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Ranked> {
        self.blocks.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::KeyBytes;

    fn row(key: u32, weight: i64) -> Ranked {
        let at = RowRef { chunk: 0, row: key };
        Ranked { key: KeyBytes::new(&key.to_be_bytes()), order: 4, at, weight }
    }

    fn keys<'a>(rows: impl Iterator<Item = &'a Ranked>) -> Vec<u32> {
        rows.map(|r| u32::from_be_bytes(r.key[..].try_into().unwrap())).collect()
    }

    #[test]
    fn rows_stay_in_order_through_splits_and_removals() {
        let mut rows = Rows::default();
        // 7 and 2003 are coprime: every key once, in a scattered order.
        for i in 0..2003u32 {
            assert!(rows.add(row(i * 7 % 2003, 1)).unwrap().is_empty());
        }
        assert_eq!(rows.len(), 2003);
        assert_eq!(keys(rows.iter()), (0..2003).collect::<Vec<_>>());
        for i in (0..2003).filter(|i| i % 3 != 0) {
            assert_eq!(rows.add(row(i, -1)).unwrap().len(), 2);
        }
        assert!(rows.add(row(1, -1)).is_err(), "it is gone already");
        let left: Vec<u32> = (0..2003).filter(|i| i % 3 == 0).collect();
        assert_eq!(keys(rows.iter()), left);
        assert_eq!(keys(rows.range(10..13)), left[10..13]);
        assert_eq!(keys(rows.before(300).take(2)), vec![left[299], left[298]]);
        let bound = 600u32.to_be_bytes();
        assert_eq!(rows.partition_point(|r| r.key[..] < bound[..]), 200);
        assert_eq!(rows.get(200).map(|r| r.at.row), Some(600));
    }
}
