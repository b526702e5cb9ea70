//! What differs between two versions of the catalog.

use std::sync::Arc;

use crate::catalog::Relation;

/// The relations of `old` that are gone or were replaced, and those of `new` that are not in `old` as they are. Both
/// ascend by id, and what has not changed is the same allocation: looking at it costs a comparison of pointers.
pub fn differences<'a>(
    old: impl IntoIterator<Item = &'a Arc<Relation>>,
    new: impl IntoIterator<Item = &'a Arc<Relation>>,
) -> (Vec<&'a Arc<Relation>>, Vec<&'a Arc<Relation>>) {
    let (mut old, mut new) = (old.into_iter().peekable(), new.into_iter().peekable());
    let (mut gone, mut added) = (Vec::new(), Vec::new());
    loop {
        match (old.peek(), new.peek()) {
            (Some(a), Some(b)) if Arc::ptr_eq(a, b) => {
                old.next();
                new.next();
            }
            (Some(a), b) if b.is_none_or(|b| a.id <= b.id) => gone.extend(old.next()),
            (_, Some(_)) => added.extend(new.next()),
            _ => return (gone, added),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_dropped_replaced_and_created_differs() {
        let relation = |id| Arc::new(Relation { id, ..Relation::default() });
        let old: Vec<_> = (1..=5).map(relation).collect();
        let mut new = old.clone();
        new.remove(1);
        new[2] = relation(4);
        new.push(relation(6));
        let none = Vec::new();
        let (gone, added) = differences(&old, &new);
        let ids = |all: Vec<&Arc<Relation>>| all.iter().map(|r| r.id).collect::<Vec<_>>();
        assert_eq!((ids(gone), ids(added)), (vec![2, 4], vec![4, 6]));
        let (gone, added) = differences(&old, &none);
        assert_eq!((gone.len(), added.len()), (5, 0));
        let (gone, added) = differences(&none, &new);
        assert_eq!((gone.len(), added.len()), (0, 5));
    }
}
