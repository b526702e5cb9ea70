//! What generating sources share: a fixed number of splits and content that follows from the clock.

use crate::{Known, More, Polled};

/// A stream of numbered rows or events, dealt out to `splits` in turn.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub splits: u32,
    /// Numbers in the whole stream; `u64::MAX`: endless.
    pub total: u64,
    /// Numbers a second over all splits; 0: as fast as possible.
    pub rate: u64,
}

impl Pace {
    /// How many of the stream's first `numbers` lie in `split`.
    pub fn share(&self, split: u32, numbers: u64) -> u64 {
        let (n, i) = (u64::from(self.splits), u64::from(split));
        numbers.saturating_sub(i).div_ceil(n)
    }

    /// The offset (exclusive) up to which a split goes at `now_ms`.
    pub fn available(&self, split: u32, started_ms: u64, now_ms: u64) -> u64 {
        let paced = self.paced(started_ms, now_ms).min(self.total);
        if paced == u64::MAX { u64::MAX } else { self.share(split, paced) }
    }

    fn paced(&self, started_ms: u64, now_ms: u64) -> u64 {
        if self.rate == 0 {
            return u64::MAX;
        }
        let elapsed = u128::from(now_ms.saturating_sub(started_ms));
        u64::try_from(elapsed * u128::from(self.rate) / 1_000).unwrap_or(u64::MAX)
    }

    pub fn poll(&self, known: &Known) -> Polled {
        let at = |split| (split, self.available(split, known.started_ms, known.now_ms));
        let ends = self.paced(known.started_ms, known.now_ms) >= self.total;
        let more = if ends || self.rate == 0 { More::Never } else { More::WithTime };
        Polled { available: (0..self.splits).map(at).collect(), more, ..Polled::default() }
    }
}
