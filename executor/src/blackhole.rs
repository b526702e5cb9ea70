//! The sink that computes all and stores nothing but a digest, and the same digest of any rows, so
//! that a view and a blackhole over one query can be compared.
//!
//! Order-independent: the sum over rows of weight × hash, wrapping. The hash is over the row's values
//! in canonical form (`millrace_common::hash`), stable across releases.

use millrace_common::DeltaChunk;
use millrace_common::hash::hash_columns;

use crate::error::ExecError;

/// What a multiset of rows sums up to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest {
    /// Sum of weights.
    pub rows: i64,
    pub hash: u64,
}

impl Digest {
    pub fn plus(self, other: Digest) -> Digest {
        Digest {
            rows: self.rows.wrapping_add(other.rows),
            hash: self.hash.wrapping_add(other.hash),
        }
    }
}

/// The digest of a chunk's rows, all columns.
pub fn digest(chunk: &DeltaChunk) -> Result<Digest, ExecError> {
    let hashes = hash_columns(chunk.batch.columns(), chunk.num_rows())?;
    Ok(match &chunk.weights {
        None => Digest {
            rows: hashes.len() as i64,
            hash: hashes.iter().fold(0, |sum, h| sum.wrapping_add(*h)),
        },
        Some(weights) => {
            let mut sum = Digest::default();
            for (h, &w) in hashes.iter().zip(weights.values()) {
                sum.rows = sum.rows.wrapping_add(w);
                sum.hash = sum.hash.wrapping_add(h.wrapping_mul(w as u64));
            }
            sum
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, Int64Array, RecordBatch};

    use super::*;

    #[test]
    fn order_and_detours_do_not_matter() {
        let chunk = |values: Vec<i64>, weights: Vec<i64>| {
            let a: ArrayRef = Arc::new(Int64Array::from(values));
            let batch = RecordBatch::try_from_iter([("a", a)]).unwrap();
            DeltaChunk::new(batch, Some(Int64Array::from(weights)))
        };
        let direct = digest(&chunk(vec![1, 2, 2], vec![1, 1, 1])).unwrap();
        let detour = digest(&chunk(vec![2, 3, 1, 3], vec![2, 5, 1, -5])).unwrap();
        assert_eq!(direct, detour);
        assert_eq!(direct.rows, 3);
        assert_ne!(direct, digest(&chunk(vec![1, 2, 3], vec![1, 1, 1])).unwrap());
    }
}
