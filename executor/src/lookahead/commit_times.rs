//! How long a relation's epochs take from when they are sealed until they are committed: so long at least rows that are
//! sealed can be read ahead before anybody has them.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;

/// Commits that are remembered.
const KEPT: usize = 64;
/// Fewer tell nothing.
const ENOUGH: usize = 8;
/// One in so many commits is faster than what is told.
const FASTER: usize = 10;

/// See the module.
#[derive(Debug, Default)]
pub struct CommitTimes(Mutex<VecDeque<Duration>>);

impl CommitTimes {
    pub fn note(&self, took: Duration) {
        let mut known = self.0.lock();
        if known.len() == KEPT {
            known.pop_front();
        }
        known.push_back(took);
    }

    /// What one commit in ten does not take; `None`: too few are known.
    pub fn least(&self) -> Option<Duration> {
        let mut known: Vec<Duration> = self.0.lock().iter().copied().collect();
        if known.len() < ENOUGH {
            return None;
        }
        let at = known.len() / FASTER;
        Some(*known.select_nth_unstable(at).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_the_last_commits_is_faster() {
        let times = CommitTimes::default();
        let ms = Duration::from_millis;
        (0..ENOUGH as u64 - 1).for_each(|_| times.note(ms(500)));
        assert_eq!(times.least(), None);
        (0..KEPT as u64).for_each(|i| times.note(ms(100 + i * 37 % 64)));
        assert_eq!(times.least(), Some(ms(106)), "the first ones are forgotten");
    }
}
