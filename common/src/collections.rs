//! Hash maps whose order is the same in every run with the same seed.
//!
//! The maps of the standard library draw a new seed for every map, so the order of their entries differs between runs,
//! and a run cannot be replayed. These take one seed for the process. A server sets it from its source of random
//! numbers when it starts ([`seed`]), because clients choose much of what is hashed (names, keys of rows): with a seed
//! known in advance they could choose keys that collide. A simulation sets it from its own seed.

use std::hash::BuildHasher;
use std::sync::OnceLock;

use foldhash::SharedSeed;
use foldhash::quality::{FoldHasher, SeedableRandomState};

/// A hash map with the seed of the process.
pub type HashMap<K, V> = std::collections::HashMap<K, V, SeededState>;
/// A hash set with the seed of the process.
pub type HashSet<T> = std::collections::HashSet<T, SeededState>;

static SEED: OnceLock<SharedSeed> = OnceLock::new();

/// Sets the seed of the process. Returns whether it was: the first map or set that is made fixes the seed for all
/// others, since one process has one seed.
pub fn seed(value: u64) -> bool {
    SEED.set(SharedSeed::from_u64(value)).is_ok()
}

/// Makes hashers with the seed of the process; a fixed one where none was set, as in tests.
#[derive(Clone, Debug)]
pub struct SeededState(SeedableRandomState);

impl Default for SeededState {
    fn default() -> SeededState {
        let shared = SEED.get_or_init(|| SharedSeed::from_u64(0));
        SeededState(SeedableRandomState::with_seed(0, shared))
    }
}

impl BuildHasher for SeededState {
    type Hasher = FoldHasher<'static>;

    fn build_hasher(&self) -> FoldHasher<'static> {
        self.0.build_hasher()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_with_the_same_entries_have_the_same_order() {
        let make = || (0..1_000).map(|i| (format!("key {i}"), i)).collect::<HashMap<_, _>>();
        assert!(make().iter().eq(make().iter()));
        assert!(!seed(1), "maps were made with another seed");
        let other = SharedSeed::from_u64(1);
        let hash = |shared| SeedableRandomState::with_seed(0, shared).hash_one("key");
        assert_ne!(hash(SEED.get().unwrap()), hash(Box::leak(Box::new(other))));
    }
}
