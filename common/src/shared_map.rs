//! A hash map of which a changed copy costs little: copies share what they have in common.
//!
//! For maps that are replaced as a whole while others still read the version before, such as those of the catalog.

use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

use crate::collections::{HashMap, SeededState};

/// A change copies one part of this many.
const PARTS: usize = 64;

/// See the module.
#[derive(Clone, Debug)]
pub struct SharedMap<K, V> {
    hasher: SeededState,
    parts: Vec<Arc<HashMap<K, V>>>,
}

impl<K, V> Default for SharedMap<K, V> {
    fn default() -> SharedMap<K, V> {
        let empty = Arc::new(HashMap::default());
        SharedMap { hasher: SeededState::default(), parts: vec![empty; PARTS] }
    }
}

impl<K: Hash + Eq + Clone, V: Clone> SharedMap<K, V> {
    fn part<Q: Hash + ?Sized>(&self, key: &Q) -> usize {
        // The upper bits: the maps of the parts use the lower ones.
        (self.hasher.hash_one(key) >> 32) as usize % PARTS
    }

    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.parts.get(self.part(key))?.get(key)
    }

    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        let part = self.part(&key);
        Arc::make_mut(self.parts.get_mut(part)?).insert(key, value)
    }

    pub fn remove<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.get(key)?;
        let part = self.part(key);
        Arc::make_mut(self.parts.get_mut(part)?).remove(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_copy_leaves_the_original_and_shares_the_rest() {
        let mut original = SharedMap::default();
        for i in 0..1_000 {
            original.insert(i, i * 2);
        }
        let mut copy = original.clone();
        copy.insert(7, 0);
        assert_eq!(copy.remove(&8), Some(16));
        assert_eq!(copy.remove(&5_000), None);
        assert_eq!((original.get(&7), original.get(&8)), (Some(&14), Some(&16)));
        assert_eq!((copy.get(&7), copy.get(&8), copy.get(&9)), (Some(&0), None, Some(&18)));
        let same = original.parts.iter().zip(&copy.parts).filter(|(a, b)| Arc::ptr_eq(a, b));
        assert!(same.count() >= PARTS - 2);
    }
}
