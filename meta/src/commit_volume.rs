//! How much a job has committed, by epoch: at most what keeping its changes costs.
//!
//! Counted since this process leads; what was committed before is taken for nothing.

use std::collections::VecDeque;

use millrace_common::Epoch;
use millrace_rpc::version::JobCommit;

/// Bytes between two remembered epochs.
const STEP: u64 = 256 << 10;
/// Remembered epochs.
const KEPT: usize = 16 << 10;

/// See the module.
#[derive(Debug, Default)]
pub struct Written {
    total: u64,
    /// Ascending epochs with the bytes committed through them.
    marks: VecDeque<(Epoch, u64)>,
}

impl Written {
    /// `bytes` were committed at `epoch`.
    pub fn add(&mut self, epoch: Epoch, bytes: u64) {
        self.total += bytes;
        if self.marks.back().is_none_or(|(_, through)| self.total - through >= STEP) {
            self.marks.push_back((epoch, self.total));
            if self.marks.len() > KEPT {
                self.marks.pop_front();
            }
        }
    }

    /// The oldest remembered epoch after which no more than `bytes` were committed. `ZERO`: any is.
    pub fn since(&self, bytes: u64) -> Epoch {
        let floor = self.total.saturating_sub(bytes);
        if floor == 0 {
            return Epoch::ZERO;
        }
        let at = self.marks.partition_point(|(_, through)| *through < floor);
        let found = self.marks.get(at).or(self.marks.back());
        found.map_or(Epoch::ZERO, |(epoch, _)| *epoch)
    }
}

/// What a commit adds to the store.
pub fn bytes_of(commit: &JobCommit) -> u64 {
    let slices = commit.slices.iter().map(|s| s.length.max(s.inline.len() as u64));
    let runs = commit.edit.iter().flat_map(|e| &e.add_runs).map(|r| r.length);
    slices.chain(runs).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_bounded_by_bytes() {
        let mut written = Written::default();
        assert_eq!(written.since(0), Epoch::ZERO);
        for n in 1..=100 {
            written.add(Epoch(n), STEP);
        }
        // After epoch 90 ten steps were committed.
        assert_eq!(written.since(10 * STEP), Epoch(90));
        assert_eq!(written.since(10 * STEP + 1), Epoch(90));
        assert_eq!(written.since(10 * STEP - 1), Epoch(91));
        assert_eq!(written.since(0), Epoch(100));
        assert_eq!(written.since(100 * STEP), Epoch::ZERO);
        // Small commits are remembered together: less is kept, never more.
        for n in 101..=200 {
            written.add(Epoch(n), STEP / 10);
        }
        assert!(written.since(STEP) >= Epoch(190));
        for n in 0..2 * KEPT as u64 {
            written.add(Epoch(1_000 + n), STEP);
        }
        assert_eq!(written.marks.len(), KEPT);
    }
}
