//! Constant lists that values are looked up in: `x = ANY ('{…}')`, and `x IN (…)` of many constants.
//!
//! A list is made a set once, not for each batch of values. Sets are found by where their list is, and go
//! when it is gone.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use arrow::array::{Array, ArrayRef, BooleanArray, ListArray};
use arrow::row::{RowConverter, SortField};
use datafusion::common::Result;
use millrace_common::keys::canonicalise;

use super::byte_order::comparable;
use crate::error::external;

/// Sets that are kept at the same time; a list beyond them is made a set again for each batch that comes after others.
const KEPT: usize = 16;

type Sets = Vec<(Weak<ListArray>, Arc<Elements>)>;

static SETS: Mutex<Sets> = Mutex::new(Vec::new());

fn sets() -> MutexGuard<'static, Sets> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether each value is among the elements of the one list in `list`: NULL where that is not known.
pub fn contains(list: &Arc<ListArray>, values: &ArrayRef) -> Result<BooleanArray> {
    set_of(list)?.contain(values)
}

fn set_of(list: &Arc<ListArray>) -> Result<Arc<Elements>> {
    let at = Arc::downgrade(list);
    if let Some((_, set)) = sets().iter().find(|(known, _)| known.ptr_eq(&at)) {
        return Ok(Arc::clone(set));
    }
    let set = Arc::new(Elements::new(&list.value(0))?);
    let mut sets = sets();
    sets.retain(|(list, _)| list.strong_count() > 0);
    if sets.len() == KEPT {
        sets.remove(0);
    }
    sets.push((at, Arc::clone(&set)));
    Ok(set)
}

/// The elements of a list, by their canonical bytes.
struct Elements {
    converter: RowConverter,
    bytes: HashSet<Box<[u8]>>,
    has_null: bool,
    is_empty: bool,
}

impl Elements {
    fn new(elements: &ArrayRef) -> Result<Elements> {
        let elements = canonical(elements)?;
        let converter = RowConverter::new(vec![SortField::new(elements.data_type().clone())])?;
        let rows = converter.convert_columns(std::slice::from_ref(&elements))?;
        let valid = (0..elements.len()).filter(|i| elements.is_valid(*i));
        let bytes = valid.map(|i| rows.row(i).data().into()).collect();
        Ok(Elements {
            converter,
            bytes,
            has_null: elements.null_count() > 0,
            is_empty: elements.is_empty(),
        })
    }

    fn contain(&self, values: &ArrayRef) -> Result<BooleanArray> {
        let values = canonical(values)?;
        let rows = self.converter.convert_columns(std::slice::from_ref(&values))?;
        let of = |i: usize| match values.is_valid(i) {
            true if self.bytes.contains(rows.row(i).data()) => Some(true),
            true => (!self.has_null).then_some(false),
            false => self.is_empty.then_some(false),
        };
        Ok((0..values.len()).map(of).collect())
    }
}

fn canonical(values: &ArrayRef) -> Result<ArrayRef> {
    let mut one = comparable(&[canonicalise(values)]).map_err(external)?;
    Ok(one.swap_remove(0))
}

#[cfg(test)]
mod tests {
    use arrow::array::{Float64Array, Int32Array};
    use arrow::datatypes::{Float64Type, Int32Type};

    use super::*;

    fn list(elements: Vec<Option<i32>>) -> Arc<ListArray> {
        Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>([Some(elements)]))
    }

    #[test]
    fn nulls_leave_open_what_is_not_found() {
        let values: ArrayRef = Arc::new(Int32Array::from(vec![Some(1), Some(2), None]));
        let found = |elements| contains(&list(elements), &values).unwrap();
        let expected = |all: [Option<bool>; 3]| BooleanArray::from(all.to_vec());
        assert_eq!(found(vec![Some(2), Some(3)]), expected([Some(false), Some(true), None]));
        assert_eq!(found(vec![Some(2), None]), expected([None, Some(true), None]));
        assert_eq!(found(vec![]), expected([Some(false); 3]));
    }

    #[test]
    fn floats_are_found_by_value() {
        let list =
            ListArray::from_iter_primitive::<Float64Type, _, _>([Some([-0.0, f64::NAN].map(Some))]);
        let values: ArrayRef = Arc::new(Float64Array::from(vec![0.0, -f64::NAN, 1.0]));
        let found = contains(&Arc::new(list), &values).unwrap();
        assert_eq!(found, BooleanArray::from(vec![true, true, false]));
    }

    #[test]
    fn sets_are_kept_for_as_long_as_their_lists() {
        let values: ArrayRef = Arc::new(Int32Array::from(vec![7]));
        let lists: Vec<_> = (0..3 * KEPT as i32).map(|i| list(vec![Some(i)])).collect();
        for _ in 0..2 {
            for (i, list) in lists.iter().enumerate() {
                assert_eq!(contains(list, &values).unwrap().value(0), i == 7);
            }
        }
        assert!(sets().len() <= KEPT);
        let kept = lists.last().map(Arc::downgrade).unwrap();
        drop(lists);
        contains(&list(vec![Some(1)]), &values).unwrap();
        assert!(!sets().iter().any(|(list, _)| list.ptr_eq(&kept)));
    }
}
