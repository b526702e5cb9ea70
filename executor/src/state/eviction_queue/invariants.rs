//! What holds of an eviction queue after every call.

use super::{EvictionQueue, Queued, position};

impl EvictionQueue {
    /// All entries, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &Queued> {
        let buckets = self.levels.iter().flat_map(|level| level.buckets.iter().flatten());
        self.at_front.iter().chain(buckets)
    }

    /// The first broken invariant, in words: every entry lies where its place says, none before the front, and all are
    /// counted.
    pub fn check_invariants(&self) -> Result<(), String> {
        if let Some((place, slot)) = self.at_front.iter().find(|q| q.0 != self.front) {
            return Err(format!("slot {slot} at {place} lies at the front, {}", self.front));
        }
        for (level, of_level) in self.levels.iter().enumerate() {
            for (digit, bucket) in of_level.buckets.iter().enumerate() {
                if bucket.is_empty() == (of_level.occupied & (1 << digit) != 0) {
                    return Err(format!("bucket {digit} of level {level} is marked wrongly"));
                }
                let lies_here = |q: &&Queued| {
                    q.0 > self.front && position(q.0, self.front) == Some((level, digit))
                };
                if let Some((place, slot)) = bucket.iter().find(|q| !lies_here(q)) {
                    return Err(format!("slot {slot} at {place} lies in a bucket of other places"));
                }
            }
        }
        let found = self.iter().count();
        if found != self.len {
            return Err(format!("{found} entries are counted as {}", self.len));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> EvictionQueue {
        let mut queue = EvictionQueue::default();
        for (slot, place) in [100, 7, 100, 70_000, 3, 1 << 40].into_iter().enumerate() {
            queue.push(place, slot as u32);
            queue.check_invariants().unwrap();
        }
        queue
    }

    #[test]
    fn entries_lie_where_they_belong() {
        let mut queue = queue();
        while queue.pop().is_some() {
            queue.check_invariants().unwrap();
        }
    }

    #[test]
    fn a_broken_queue_is_noticed() {
        let breaks: [(&str, fn(&mut EvictionQueue)); 4] = [
            ("counted", |q| q.len += 1),
            ("lies at the front", |q| q.at_front.push_back((9, 9))),
            ("marked wrongly", |q| q.levels[0].occupied = 0),
            ("other places", |q| q.levels[0].bucket(7).push((100, 9))),
        ];
        for (says, damage) in breaks {
            let mut queue = queue();
            damage(&mut queue);
            let broken = queue.check_invariants().unwrap_err();
            assert!(broken.contains(says), "{broken}");
        }
    }
}
