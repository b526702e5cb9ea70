//! Entries of a cache in the order in which they are evicted: a calendar queue whose buckets get
//! narrower towards its front.
//!
//! A place is a 64-bit number, in microseconds or in arrivals. An entry lies at the level of the highest
//! digit (4 bits) in which its place differs from the front of the queue, in the bucket of that digit:
//! near places lie in narrow buckets, far ones in wide ones, so the queue fits the span between its front
//! and its furthest place by itself, however long that is, and walks over no empty time. When the front
//! reaches a bucket, its entries are spread over the levels below: an entry moves at most once a level.
//! Entries of equal place leave in the order in which they came.
//!
//! A place before the front moves the front back, which joins the buckets below one level into one.
//! Eviction frees an eighth of a cache at a time, so what is joined is spread again once an eviction, not
//! once a row.

use std::collections::VecDeque;

use super::Slot;

mod invariants;

/// Bits of a digit.
const DIGIT_BITS: u32 = 4;
const BUCKETS: usize = 1 << DIGIT_BITS;
const LEVELS: usize = (u64::BITS / DIGIT_BITS) as usize;

/// An entry and its place.
pub type Queued = (u64, Slot);

/// Buckets by the digit of one level; none until the first is needed.
#[derive(Default)]
struct Level {
    /// Bits of the digits whose buckets have entries.
    occupied: u16,
    buckets: Vec<Vec<Queued>>,
}

/// See the module.
#[derive(Default)]
pub struct EvictionQueue {
    /// No place is before it; its digits say where others lie.
    front: u64,
    at_front: VecDeque<Queued>,
    levels: [Level; LEVELS],
    len: usize,
    /// Entries put into a bucket, by pushes and by moves.
    #[cfg(test)]
    placed: usize,
}

impl EvictionQueue {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn push(&mut self, place: u64, slot: Slot) {
        if self.len == 0 {
            self.front = place;
        } else if place < self.front {
            self.move_back(place);
        }
        self.put((place, slot));
        self.len += 1;
    }

    /// The entry of the least place.
    pub fn pop(&mut self) -> Option<Queued> {
        if self.at_front.is_empty() {
            self.advance();
        }
        let popped = self.at_front.pop_front()?;
        self.len -= 1;
        Some(popped)
    }

    fn put(&mut self, queued: Queued) {
        #[cfg(test)]
        {
            self.placed += 1;
        }
        let Some((level, digit)) = position(queued.0, self.front) else {
            return self.at_front.push_back(queued);
        };
        self.levels[level].bucket(digit).push(queued);
    }

    /// Moves the front to the least place, which lies in the first bucket of the lowest level that has any.
    fn advance(&mut self) {
        let Some(level) = self.levels.iter_mut().find(|l| l.occupied != 0) else { return };
        let digit = level.occupied.trailing_zeros() as usize;
        level.occupied &= !(1 << digit);
        let bucket = std::mem::take(&mut level.buckets[digit]);
        if let Some(least) = bucket.iter().map(|q| q.0).min() {
            self.front = least;
        }
        bucket.into_iter().for_each(|queued| self.put(queued));
    }

    /// Moves the front back to `place`: what shared the higher digits with the old front is now together in
    /// the bucket of the old front's digit, which was empty.
    fn move_back(&mut self, place: u64) {
        let Some((level, digit)) = position(self.front, place) else { return };
        let (below, rest) = self.levels.split_at_mut(level);
        let mut joined: Vec<Queued> = std::mem::take(&mut self.at_front).into();
        for lower in below.iter_mut().filter(|l| l.occupied != 0) {
            lower.occupied = 0;
            lower.buckets.iter_mut().for_each(|bucket| joined.append(bucket));
        }
        #[cfg(test)]
        {
            self.placed += joined.len();
        }
        if !joined.is_empty() {
            *rest[0].bucket(digit) = joined;
        }
        self.front = place;
    }
}

impl Level {
    /// The bucket of a digit, about to have entries.
    fn bucket(&mut self, digit: usize) -> &mut Vec<Queued> {
        if self.buckets.is_empty() {
            self.buckets.resize_with(BUCKETS, Vec::new);
        }
        self.occupied |= 1 << digit;
        &mut self.buckets[digit]
    }
}

/// The level of the highest digit in which `place` differs from `front`, and that digit of it.
fn position(place: u64, front: u64) -> Option<(usize, usize)> {
    let highest = (place ^ front).checked_ilog2()?;
    let level = highest / DIGIT_BITS;
    let digit = (place >> (level * DIGIT_BITS)) as usize % BUCKETS;
    Some((level as usize, digit))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    const DAY_US: u64 = 86_400_000_000;

    /// Places of several spans, some far ahead and some before everything else.
    fn place(rng: &mut StdRng, now: u64) -> u64 {
        match rng.random_range(0..20) {
            0 => now.saturating_sub(rng.random_range(0..30 * DAY_US)),
            1 => now + rng.random_range(0..400 * DAY_US),
            2 => rng.random(),
            3..6 => now,
            _ => now + rng.random_range(0..5_000_000),
        }
    }

    #[test]
    fn the_least_place_leaves_first_and_equal_ones_as_they_came() {
        for seed in 0..200 {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut queue = EvictionQueue::default();
            let mut model: BTreeMap<u64, VecDeque<Slot>> = BTreeMap::new();
            let mut now = (1 << 63) + 1_700_000_000_000_000;
            for slot in 0..rng.random_range(1..800) {
                now += rng.random_range(0..1_000_000);
                let at = place(&mut rng, now);
                queue.push(at, slot);
                model.entry(at).or_default().push_back(slot);
                while rng.random_bool(0.45) {
                    let first = model.first_entry().map(|mut e| {
                        let popped = (*e.key(), e.get_mut().pop_front().unwrap());
                        if e.get().is_empty() {
                            e.remove();
                        }
                        popped
                    });
                    assert_eq!(queue.pop(), first, "seed {seed}");
                }
                assert_eq!(queue.len(), model.values().map(VecDeque::len).sum::<usize>());
            }
            let rest =
                model.into_iter().flat_map(|(at, slots)| slots.into_iter().map(move |s| (at, s)));
            assert_eq!(
                std::iter::from_fn(|| queue.pop()).collect::<Vec<_>>(),
                rest.collect::<Vec<_>>(),
                "seed {seed}"
            );
        }
    }

    #[test]
    fn an_entry_moves_a_bounded_number_of_times_whatever_the_span() {
        // An hour, a thousand years, and an hour with one entry far ahead.
        for (span, outlier) in
            [(3_600_000_000, None), (365_000 * DAY_US, None), (3_600_000_000, Some(u64::MAX))]
        {
            let mut rng = StdRng::seed_from_u64(span);
            let mut queue = EvictionQueue::default();
            let n = 20_000;
            outlier.into_iter().for_each(|at| queue.push(at, 0));
            (0..n).for_each(|slot| queue.push((1 << 63) + rng.random_range(0..span), slot));
            // Steady state: one leaves, one comes that is a little late or up to a span ahead.
            for slot in 0..n {
                let (front, _) = queue.pop().unwrap();
                queue.push(front + rng.random_range(0..span), slot);
            }
            while queue.pop().is_some() {}
            let pushed = 2 * n as usize + 1;
            assert!(queue.placed <= pushed * 10, "{} for {pushed} of {span}", queue.placed);
        }
    }

    #[test]
    fn late_entries_between_evictions_are_cheap() {
        let mut rng = StdRng::seed_from_u64(1);
        let mut queue = EvictionQueue::default();
        let (span, n) = (30 * DAY_US, 16_000);
        (0..n).for_each(|slot| queue.push((1 << 63) + rng.random_range(0..span), slot));
        // Rows in no order of time at all, as a first scan brings them: an eighth leaves, an eighth comes.
        for _ in 0..16 {
            (0..n / 8).for_each(|_| assert!(queue.pop().is_some()));
            (0..n / 8).for_each(|slot| queue.push((1 << 63) + rng.random_range(0..span), slot));
        }
        let pushed = 3 * n as usize;
        assert!(queue.placed <= pushed * 24, "{} for {pushed}", queue.placed);
    }
}
