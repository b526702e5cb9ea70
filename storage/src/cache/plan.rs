//! Which ranged reads fetch a set of pieces of one object: a pure function.
//!
//! On an object store a request costs more than some tens of kilobytes, so close pieces share one
//! read; reads are bounded so that a large fetch runs in parallel.

use std::ops::Range;

/// What is wanted of an object; `tag` is the caller's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub range: Range<u64>,
    pub tag: usize,
}

/// One ranged read and the pieces inside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedRead {
    pub range: Range<u64>,
    pub pieces: Vec<Piece>,
}

impl PlannedRead {
    /// Where a piece lies in the bytes that the read returns.
    pub fn within(&self, piece: &Piece) -> Range<usize> {
        let start = (piece.range.start - self.range.start) as usize;
        start..start + (piece.range.end - piece.range.start) as usize
    }
}

/// Joins pieces whose gap is at most `join_gap`, as long as a read stays within `max_read` (a single
/// piece may exceed it).
pub fn plan(mut pieces: Vec<Piece>, join_gap: u64, max_read: u64) -> Vec<PlannedRead> {
    pieces.sort_unstable_by_key(|p| (p.range.start, p.range.end));
    let mut reads: Vec<PlannedRead> = Vec::new();
    for piece in pieces {
        if let Some(read) = reads.last_mut() {
            let end = read.range.end.max(piece.range.end);
            let close = piece.range.start <= read.range.end.saturating_add(join_gap);
            if close && end - read.range.start <= max_read {
                read.range.end = end;
                read.pieces.push(piece);
                continue;
            }
        }
        reads.push(PlannedRead { range: piece.range.clone(), pieces: vec![piece] });
    }
    reads
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(ranges: &[(u64, u64)]) -> Vec<Piece> {
        ranges.iter().enumerate().map(|(tag, &(a, b))| Piece { range: a..b, tag }).collect()
    }

    fn ranges(reads: &[PlannedRead]) -> Vec<Range<u64>> {
        reads.iter().map(|r| r.range.clone()).collect()
    }

    #[test]
    fn close_pieces_share_a_read() {
        let reads = plan(pieces(&[(100, 110), (0, 10), (15, 20)]), 5, 1000);
        assert_eq!(ranges(&reads), vec![0..20, 100..110]);
        assert_eq!(reads[0].within(&reads[0].pieces[1]), 15..20);
    }

    #[test]
    fn a_read_stays_bounded() {
        let reads = plan(pieces(&[(0, 60), (60, 120), (120, 500)]), 1000, 128);
        assert_eq!(ranges(&reads), vec![0..120, 120..500]);
    }

    proptest! {
        #[test]
        fn every_piece_is_inside_exactly_one_read(
            raw in prop::collection::vec((0u64..10_000, 1u64..300), 0..60),
            gap in 0u64..500, max in 1u64..2_000,
        ) {
            let wanted = pieces(&raw.iter().map(|&(a, n)| (a, a + n)).collect::<Vec<_>>());
            let reads = plan(wanted.clone(), gap, max);
            let mut tags: Vec<usize> = Vec::new();
            for read in &reads {
                prop_assert!(read.pieces.len() == 1 || read.range.end - read.range.start <= max);
                for p in &read.pieces {
                    prop_assert!(read.range.start <= p.range.start && p.range.end <= read.range.end);
                    prop_assert_eq!(&wanted[p.tag], p);
                    tags.push(p.tag);
                }
            }
            tags.sort_unstable();
            prop_assert_eq!(tags, (0..wanted.len()).collect::<Vec<_>>());
        }
    }
}
