//! The one global, monotonic epoch clock (docs/design.md §2, §4).

use std::fmt;

use serde::{Deserialize, Serialize};

/// Bits below the wall-clock milliseconds.
const SEQ_BITS: u32 = 16;

/// A point on the epoch clock: wall-clock milliseconds since 1970 in the high 48 bits, a sequence
/// number in the low 16. Totally ordered; meta makes every epoch larger than all before it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch(pub u64);

impl Epoch {
    /// Before anything happened.
    pub const ZERO: Epoch = Epoch(0);
    /// After everything; as a read epoch: "whatever is newest".
    pub const MAX: Epoch = Epoch(u64::MAX);

    /// The first epoch of a wall-clock millisecond.
    pub fn from_millis(millis: u64) -> Epoch {
        Epoch(millis << SEQ_BITS)
    }

    /// The wall-clock milliseconds of this epoch.
    pub fn millis(self) -> u64 {
        self.0 >> SEQ_BITS
    }

    /// The smallest epoch that is larger than `self` and not before `now_millis`.
    pub fn next(self, now_millis: u64) -> Epoch {
        Epoch((self.0 + 1).max(now_millis << SEQ_BITS))
    }

    /// The epoch just before this one; `ZERO` stays.
    pub fn prev(self) -> Epoch {
        Epoch(self.0.saturating_sub(1))
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_is_larger_even_when_the_clock_goes_back() {
        let e = Epoch::from_millis(1_000);
        assert_eq!(e.next(2_000), Epoch::from_millis(2_000));
        assert!(e.next(10) > e);
        assert_eq!(e.next(10).millis(), 1_000);
    }
}
