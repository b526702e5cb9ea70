//! Which blocks go to the disk tier.
//!
//! What is written and not read again costs disk writes and shortens the time in which what is written has to be read to
//! stay ([`super::disk`]). A policy looks at what was read from the store lately.

use std::fmt::Debug;
use std::time::Duration;

use millrace_common::collections::HashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::BlockKey;

/// A policy.
pub(super) trait DiskAdmission: Debug + Send + Sync {
    /// Whether a block goes to disk that was read from the store at this time, for somebody who keeps blocks.
    fn admits_read(&self, key: &BlockKey, now: Instant) -> bool;

    /// Whether a block of a run that was just built goes to disk.
    fn admits_built(&self) -> bool;
}

/// Names of the policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdmissionPolicy {
    /// Everything.
    #[default]
    All,
    /// New runs, and what is read from the store more than once in a minute.
    History,
}

impl AdmissionPolicy {
    /// `None`: there is no such policy.
    pub fn parse(name: &str) -> Option<AdmissionPolicy> {
        match name {
            "all" => Some(AdmissionPolicy::All),
            "history" => Some(AdmissionPolicy::History),
            _ => None,
        }
    }

    pub(super) fn build(self) -> Box<dyn DiskAdmission> {
        match self {
            AdmissionPolicy::All => Box::new(Everything),
            AdmissionPolicy::History => Box::new(History::default()),
        }
    }
}

#[derive(Debug)]
struct Everything;

impl DiskAdmission for Everything {
    fn admits_read(&self, _: &BlockKey, _: Instant) -> bool {
        true
    }

    fn admits_built(&self) -> bool {
        true
    }
}

/// Counts the reads of each block. A generation of counts is dropped as a whole: reads of the last half to whole
/// minute count.
#[derive(Debug, Default)]
struct History {
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    this: HashMap<BlockKey, u32>,
    last: HashMap<BlockKey, u32>,
    /// When `this` began.
    since: Option<Instant>,
}

/// Half of the time that reads count.
const GENERATION: Duration = Duration::from_secs(30);
/// Blocks that a generation counts; about 2 MB. More end it early.
const COUNTED: usize = 64 << 10;
/// A block that is read more often than this goes to disk.
const SELDOM: u32 = 1;

impl Counts {
    fn count(&mut self, key: &BlockKey, now: Instant) -> u32 {
        let since = *self.since.get_or_insert(now);
        let age = now.saturating_duration_since(since);
        if age >= GENERATION || self.this.len() >= COUNTED {
            self.last = std::mem::take(&mut self.this);
            if age >= GENERATION * 2 {
                self.last.clear();
            }
            self.since = Some(now);
        }
        let count = self.this.entry(*key).or_default();
        *count += 1;
        *count + self.last.get(key).copied().unwrap_or(0)
    }
}

impl DiskAdmission for History {
    fn admits_read(&self, key: &BlockKey, now: Instant) -> bool {
        self.counts.lock().count(key, now) > SELDOM
    }

    fn admits_built(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn key(block: u32) -> BlockKey {
        BlockKey { run: 1, block, crc: 7 }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_read_again_within_a_minute_is_admitted() {
        let policy = AdmissionPolicy::History.build();
        let read = |block| policy.admits_read(&key(block), Instant::now());
        assert!(!read(1));
        advance(Duration::from_secs(29)).await;
        assert!(read(1), "a second time within half a minute");
        assert!(!read(2));
        advance(Duration::from_secs(5)).await;
        assert!(read(2), "also where a generation ends in between");
        assert!(!read(3));
        advance(Duration::from_secs(60)).await;
        assert!(!read(3), "the first read is too long ago");
        assert!(!read(4));
        advance(Duration::from_secs(3_600)).await;
        assert!(!read(4));
        assert!(policy.admits_built());
    }

    #[tokio::test(start_paused = true)]
    async fn a_scan_of_everything_admits_nothing_and_takes_bounded_memory() {
        let history = History::default();
        let admitted = (0..500_000).filter(|&b| history.admits_read(&key(b), Instant::now()));
        assert_eq!(admitted.count(), 0);
        let counts = history.counts.lock();
        assert!(counts.this.len() <= COUNTED && counts.last.len() <= COUNTED);
    }

    #[test]
    fn all_admits_all() {
        let policy = AdmissionPolicy::All.build();
        assert!(policy.admits_read(&key(1), Instant::now()) && policy.admits_built());
        assert_eq!(AdmissionPolicy::parse("history"), Some(AdmissionPolicy::History));
        assert_eq!(AdmissionPolicy::parse("some"), None);
    }
}
