//! Read avoidance and access classes: how every state table is laid out and used.
//!
//! In this order of preference: a layout that needs no read (an arrival sequence, weights that add
//! up), one that reads a whole key, one that scans a prefix.

use millrace_common::access::AccessClass;
use millrace_functions::aggregate_kind::AggFunc;
use millrace_rpc::catalog::RowStorage;

use crate::passes::properties::Properties;

/// How one side of a join is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SideLayout {
    pub storage: RowStorage,
    pub unique_key: Vec<usize>,
    pub unique_per_key: bool,
    pub class: AccessClass,
}

/// A side with at most one row a join key is looked up by whole key. Rows that are never retracted
/// need no identity: an arrival sequence is shorter than any key. Else the unique key that adds
/// least to the join key, else the whole row.
pub fn join_side(p: &Properties, keys: &[usize]) -> SideLayout {
    let scanned = |storage, unique_key| SideLayout {
        storage,
        unique_key,
        unique_per_key: false,
        class: AccessClass::RangeRead,
    };
    if p.is_unique(keys) {
        return SideLayout {
            storage: RowStorage::Keyed,
            unique_key: vec![],
            unique_per_key: true,
            class: AccessClass::Lookup,
        };
    }
    if p.append_only {
        return scanned(RowStorage::Append, vec![]);
    }
    match p.best_key(keys) {
        Some(key) => scanned(RowStorage::Keyed, key),
        None => scanned(RowStorage::Multiset, vec![]),
    }
}

/// The identity of a top-N's rows beyond group and order.
pub fn top_n_rows(p: &Properties, group_and_order: &[usize]) -> (RowStorage, Vec<usize>) {
    match p.best_key(group_and_order) {
        Some(key) => (RowStorage::Keyed, key),
        None => (RowStorage::Multiset, vec![]),
    }
}

/// Whether a call needs to know the values of its group, and in which direction they are ordered.
/// An append-only MIN or MAX only ever compares with its result.
pub fn value_order(func: AggFunc, distinct: bool, append_only: bool) -> Option<bool> {
    match func {
        AggFunc::Min | AggFunc::Max if append_only => None,
        AggFunc::Min => Some(false),
        AggFunc::Max => Some(true),
        _ if distinct || func.is_collected() => Some(false),
        _ => None,
    }
}

/// The class of an aggregate's value table: ordered if a MIN or MAX looks for the next value.
pub fn value_class(scanned: bool) -> AccessClass {
    if scanned { AccessClass::RangeRead } else { AccessClass::PointUpdate }
}

/// How the relation's own rows are written: multiset weights and arrival sequences need no read.
pub fn relation_class(storage: RowStorage) -> AccessClass {
    match storage {
        RowStorage::Keyed => AccessClass::PointUpdate,
        RowStorage::Multiset => AccessClass::Merge,
        RowStorage::Append => AccessClass::Append,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::tests::table;

    #[test]
    fn the_cheapest_layout_that_is_right() {
        let mut p = Properties::of(&table());
        assert_eq!(join_side(&p, &[0]).class, AccessClass::Lookup);
        let side = join_side(&p, &[1]);
        assert_eq!((side.storage, side.unique_key), (RowStorage::Keyed, vec![0]));
        p.append_only = true;
        assert_eq!(join_side(&p, &[1]).storage, RowStorage::Append);
        p.append_only = false;
        p.keys.clear();
        assert_eq!(join_side(&p, &[1]).storage, RowStorage::Multiset);
    }

    #[test]
    fn an_append_only_extreme_needs_no_values() {
        assert_eq!(value_order(AggFunc::Max, false, true), None);
        assert_eq!(value_order(AggFunc::Max, false, false), Some(true));
        assert_eq!(value_order(AggFunc::Count, true, true), Some(false));
    }
}
