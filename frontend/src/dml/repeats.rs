//! Rows of one INSERT … ON CONFLICT DO UPDATE that have the same key.
//!
//! PostgreSQL takes them one after the other. One whose WHERE is not true leaves the table's row as it was, so the
//! next one meets that row, too; one that is inserted or updates is met by the next one, which is 21000.

use std::collections::HashMap;

use arrow::array::{RecordBatch, UInt32Array};
use millrace_common::SqlError;
use millrace_executor::dml::second_time;
use millrace_rpc::catalog::Relation;

use super::rows;

/// See the module.
pub struct Repeats {
    /// For each row the first one that has its key.
    first: Vec<u32>,
    any: bool,
}

impl Repeats {
    pub fn of(table: &Relation, new: &RecordBatch) -> Result<Repeats, SqlError> {
        Ok(Repeats::new(rows::first_with_key(table, new)?))
    }

    fn new(first: Vec<u32>) -> Repeats {
        let any = first.iter().zip(0..).any(|(first, row): (&u32, u32)| *first != row);
        Repeats { first, any }
    }

    /// Whether two rows have the same key.
    pub fn any(&self) -> bool {
        self.any
    }

    /// The first row of each key, ascending.
    pub fn firsts(&self) -> UInt32Array {
        let rows = self.first.iter().zip(0..).filter(|(first, row)| **first == *row);
        UInt32Array::from_iter_values(rows.map(|(_, row): (_, u32)| row))
    }

    /// Given which of [`Repeats::firsts`] have a partner, ascending: all rows that have one, ascending, and which of
    /// the partners each has.
    pub fn spread(&self, found: &UInt32Array) -> (UInt32Array, UInt32Array) {
        let firsts = self.firsts();
        let partners = found.values().iter().zip(0..);
        let partner: HashMap<u32, u32> =
            partners.map(|(of, at)| (firsts.value(*of as usize), at)).collect();
        let rows = self.first.iter().zip(0..);
        let (rows, partners): (Vec<u32>, Vec<u32>) =
            rows.filter_map(|(first, row)| Some((row, *partner.get(first)?))).unzip();
        (UInt32Array::from(rows), UInt32Array::from(partners))
    }

    /// No row comes after one of its key that has been inserted or has updated; `takes_effect` are those, in any
    /// order.
    pub fn check(&self, takes_effect: impl Iterator<Item = u32>) -> Result<(), SqlError> {
        if !self.any {
            return Ok(());
        }
        // Of several rows of a key the last stays.
        let last: HashMap<u32, u32> = self.first.iter().copied().zip(0..).collect();
        for row in takes_effect {
            if last.get(&self.first[row as usize]) != Some(&row) {
                return Err(second_time());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_row_of_a_key_may_take_effect() {
        let repeats = Repeats::new(vec![0, 1, 0, 3, 1]);
        assert!(repeats.any());
        assert!(repeats.check([2, 4, 3].into_iter()).is_ok());
        assert_eq!(repeats.check([0].into_iter()).unwrap_err().state.0, "21000");
        assert!(repeats.check([1, 4].into_iter()).is_err());
        assert!(!Repeats::new(vec![0, 1, 2]).any());
    }

    #[test]
    fn rows_of_one_key_have_the_same_partner() {
        let repeats = Repeats::new(vec![0, 1, 0, 3, 1]);
        assert_eq!(repeats.firsts(), UInt32Array::from(vec![0, 1, 3]));
        // Rows 1 and 3 are there already.
        let (rows, partners) = repeats.spread(&UInt32Array::from(vec![1, 2]));
        assert_eq!(rows, UInt32Array::from(vec![1, 3, 4]));
        assert_eq!(partners, UInt32Array::from(vec![0, 1, 0]));
    }
}
