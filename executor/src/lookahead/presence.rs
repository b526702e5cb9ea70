//! Presence table: which keys are in the cache of one operator in one task, as far as that can be told without a lock
//! (docs/design.md §8).
//!
//! The task writes a key's tag when its entry becomes resident and clears it when the entry leaves; a walker compares.
//! A place holds one key, the last one that came. A wrong answer costs a read or a hint, never a result.
//!
//! What a key's rows need may differ by the input at which they come: of a join a key may be in memory by the rows of one
//! side only. So there is an entry for each input; see [`of_input`].
//!
//! A place is a tag (the upper half of the hash, never 0) and a mark: the round, that is the count of the operator's
//! barriers, in which a walker last saw the key coming. Eviction looks at it, so that an entry is renewed without a
//! message.

use std::sync::atomic::{AtomicU32, Ordering};

/// Places of a table: a power of two.
pub const PLACES: usize = 1 << 16;
/// Of a table that is made where there is room for no larger one: about as many keys as a small cache has.
pub const LEAST_PLACES: usize = 1 << 10;
/// Of one place.
pub const PLACE_BYTES: usize = size_of::<AtomicU32>();
/// An entry that was seen coming in this many of the last rounds is about to be used.
const ROUNDS: u16 = 2;
const MARK_BITS: u32 = 16;
const MARK: u32 = (1 << MARK_BITS) - 1;

/// The hash by which it is told of a key whether rows that come for it at an input find what they need.
pub fn of_input(hash: u64, port: usize) -> u64 {
    hash ^ (port as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// See the module. Its hashes are those of [`of_input`].
#[derive(Debug)]
pub struct Presence {
    places: Box<[AtomicU32]>,
    round: AtomicU32,
}

impl Presence {
    /// `places`: a power of two.
    pub fn with_places(places: usize) -> Presence {
        let places = (0..places.next_power_of_two()).map(|_| AtomicU32::new(0)).collect();
        // No mark is 0, and none that is cleared looks new.
        Presence { places, round: AtomicU32::new(1 + u32::from(ROUNDS)) }
    }

    pub fn bytes(&self) -> usize {
        self.places.len() * PLACE_BYTES
    }

    fn place(&self, hash: u64) -> &AtomicU32 {
        &self.places[hash as usize & (self.places.len() - 1)]
    }

    fn round(&self) -> u16 {
        self.round.load(Ordering::Relaxed) as u16
    }

    /// The key is in memory.
    pub fn set(&self, hash: u64) {
        let place = self.place(hash);
        if place.load(Ordering::Relaxed) >> MARK_BITS != tag(hash) {
            place.store(tag(hash) << MARK_BITS, Ordering::Relaxed);
        }
    }

    /// The key has left memory.
    pub fn clear(&self, hash: u64) {
        let place = self.place(hash);
        if place.load(Ordering::Relaxed) >> MARK_BITS == tag(hash) {
            place.store(0, Ordering::Relaxed);
        }
    }

    /// Whether the key may be in memory. If so it is marked: rows of it are coming.
    pub fn may_be_resident(&self, hash: u64) -> bool {
        let place = self.place(hash);
        let found = place.load(Ordering::Relaxed);
        if found >> MARK_BITS != tag(hash) {
            return false;
        }
        let marked = tag(hash) << MARK_BITS | u32::from(self.round());
        if found != marked {
            // Whoever wrote another key in between has won.
            let _ = place.compare_exchange(found, marked, Ordering::Relaxed, Ordering::Relaxed);
        }
        true
    }

    /// Whether a walker has just seen rows of the key coming.
    pub fn is_due(&self, hash: u64) -> bool {
        let found = self.place(hash).load(Ordering::Relaxed);
        let mark = (found & MARK) as u16;
        found >> MARK_BITS == tag(hash) && mark != 0 && self.round().wrapping_sub(mark) < ROUNDS
    }

    /// The operator has ended an epoch.
    pub fn next_round(&self) {
        let next = self.round().wrapping_add(1).max(1);
        self.round.store(u32::from(next), Ordering::Relaxed);
    }
}

fn tag(hash: u64) -> u32 {
    ((hash >> 48) as u32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: u64 = 7 << 48 | 5;
    /// At the place of `ONE`.
    const OTHER: u64 = 8 << 48 | 5;

    #[test]
    fn what_was_set_and_not_cleared_is_there() {
        let presence = Presence::with_places(64);
        assert!(!presence.may_be_resident(ONE) && !presence.may_be_resident(0));
        presence.set(ONE);
        assert!(presence.may_be_resident(ONE) && !presence.may_be_resident(OTHER));
        presence.clear(OTHER);
        assert!(presence.may_be_resident(ONE), "another key's entry has left");
        presence.set(OTHER);
        assert!(presence.may_be_resident(OTHER) && !presence.may_be_resident(ONE));
        presence.clear(OTHER);
        assert!(!presence.may_be_resident(OTHER));
    }

    #[test]
    fn a_key_seen_coming_is_due_for_two_rounds() {
        let presence = Presence::with_places(64);
        presence.set(ONE);
        assert!(!presence.is_due(ONE));
        assert!(presence.may_be_resident(ONE));
        presence.next_round();
        presence.set(ONE);
        assert!(presence.is_due(ONE), "that it is in memory takes no mark away");
        presence.next_round();
        assert!(!presence.is_due(ONE));
        // Whatever the count, also beyond its end.
        for _ in 0..70_000 {
            presence.next_round();
            assert!(!presence.is_due(OTHER));
        }
        assert!(presence.may_be_resident(ONE) && presence.is_due(ONE));
    }
}
