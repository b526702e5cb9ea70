//! Whether a step of a chain is announced (docs/design.md §8).
//!
//! A chained key is known when the read before it has been answered, so the read of its own state may begin too late to
//! hide anything. Then it only takes apart what rows would ask for together: more requests, the slowest of which an epoch
//! waits for. That depends on the store and on the rows, and is found out by trying. Where most keys of a step come too
//! late, some epochs are run without its hints, and the longest waits of these are compared with those of the epochs
//! before.

use std::collections::VecDeque;

use super::choice::{MIN_EPOCHS, quantile, sorted};

/// Epochs without hints that are compared with the last [`MIN_EPOCHS`] with them.
pub const COMPARED: usize = 16;
/// The first epochs without hints, some of whose keys had been announced before: they count for neither.
pub const LEFT_OVER: u32 = 2;
/// Hints are worth it if the longest wait of an epoch is longer without them, by this.
const WORTH: f64 = 1.1;
/// Epochs for which a step is left out before it is tried again; doubled each time, up to a limit.
pub const OFF_EPOCHS: u64 = 256;
const MAX_OFF: u64 = 1 << 14;
/// Epochs for which nothing is compared again once hints were worth it.
pub const KEPT_EPOCHS: u64 = 1_024;

/// What an epoch has shown of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepEpoch {
    /// Keys that were announced and that rows have used: read by then, and still being read.
    pub in_time: u64,
    pub late: u64,
    /// Keys for which rows have waited, announced or not.
    pub missed: u64,
    /// The longest that a row has waited, microseconds; 0: none has.
    pub waited: i64,
}

/// Whether a step of a chain is announced, and why not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    #[default]
    Announced,
    /// For some epochs: they are compared with those before.
    Compared,
    /// Most of its keys came too late, and rows wait no longer without.
    TooLate,
}

impl Standing {
    /// Why it is not announced, for those who read about it; `None`: it is.
    pub fn reason(self) -> Option<&'static str> {
        match self {
            Standing::Announced => None,
            Standing::Compared => Some("trial without hints"),
            Standing::TooLate => Some("keys come too late"),
        }
    }
}

/// See the module. Of one input of an operator.
#[derive(Debug)]
pub struct Trial {
    standing: Standing,
    /// The last epochs with hints.
    with: VecDeque<StepEpoch>,
    /// The longest waits of epochs without.
    without: Vec<i64>,
    /// Epochs until it may be compared, or is announced again, ...
    left: u64,
    /// ... and for how many it is left out the next time.
    off: u64,
    /// Epochs without hints that are not compared.
    skipped: u32,
}

impl Default for Trial {
    fn default() -> Trial {
        let (standing, with, without) = Default::default();
        Trial { standing, with, without, left: 0, off: OFF_EPOCHS, skipped: 0 }
    }
}

impl Trial {
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// An epoch with rows has ended. Whether the standing has changed.
    pub fn epoch(&mut self, seen: StepEpoch) -> bool {
        let before = self.standing;
        match before {
            Standing::Announced => self.watch(seen),
            Standing::Compared => self.compare(seen),
            Standing::TooLate => {
                self.left = self.left.saturating_sub(1);
                if self.left == 0 {
                    self.standing = Standing::Announced;
                }
            }
        }
        self.standing != before
    }

    fn watch(&mut self, seen: StepEpoch) {
        self.left = self.left.saturating_sub(1);
        // Where nothing was announced, by the steps before or by this one, there is nothing to tell.
        if seen.in_time + seen.late == 0 {
            return;
        }
        if self.with.len() == MIN_EPOCHS {
            self.with.pop_front();
        }
        self.with.push_back(seen);
        let in_time: u64 = self.with.iter().map(|epoch| epoch.in_time).sum();
        let missed: u64 = self.with.iter().map(|epoch| epoch.missed).sum();
        if self.left == 0 && self.with.len() == MIN_EPOCHS && in_time < missed {
            (self.standing, self.skipped) = (Standing::Compared, 0);
            self.without.clear();
        }
    }

    fn compare(&mut self, seen: StepEpoch) {
        if self.skipped < LEFT_OVER {
            self.skipped += 1;
            return;
        }
        // An epoch that needed nothing says nothing of how long it would have waited.
        if seen.missed > 0 {
            self.without.push(seen.waited);
        }
        if self.without.len() < COMPARED {
            return;
        }
        let with = median(self.with.iter().map(|epoch| epoch.waited));
        let without = median(self.without.iter().copied());
        self.with.clear();
        if without as f64 > with as f64 * WORTH {
            (self.standing, self.left) = (Standing::Announced, KEPT_EPOCHS);
            self.off = OFF_EPOCHS;
        } else {
            (self.standing, self.left) = (Standing::TooLate, self.off);
            self.off = (self.off * 2).min(MAX_OFF);
        }
    }
}

fn median(of: impl Iterator<Item = i64>) -> i64 {
    quantile(&sorted(of), 0.5).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An epoch of whose announced keys some are in time; rows wait so long.
    fn with(in_time: u64, late: u64, waited: i64) -> StepEpoch {
        StepEpoch { in_time, late, missed: late + 1, waited }
    }

    /// One of which nothing is announced.
    fn without(waited: i64) -> StepEpoch {
        StepEpoch { missed: 10, waited, ..StepEpoch::default() }
    }

    fn run(trial: &mut Trial, epochs: u64, seen: StepEpoch) {
        for _ in 0..epochs {
            trial.epoch(seen);
        }
    }

    /// A trial whose step is being compared, after epochs with a longest wait.
    fn compared(waited: i64) -> Trial {
        let mut trial = Trial::default();
        run(&mut trial, MIN_EPOCHS as u64 - 1, with(2, 8, waited));
        assert_eq!(trial.standing(), Standing::Announced, "little is known yet");
        assert!(trial.epoch(with(2, 8, waited)), "it is told that this has changed");
        assert_eq!(trial.standing(), Standing::Compared);
        trial
    }

    /// The epochs without hints.
    fn answer(trial: &mut Trial, waited: i64) -> Standing {
        // Their keys had been announced: how long they wait says nothing.
        run(trial, LEFT_OVER.into(), with(2, 8, 1));
        run(trial, COMPARED as u64 - 1, without(waited));
        assert_eq!(trial.standing(), Standing::Compared);
        assert!(trial.epoch(without(waited)));
        trial.standing()
    }

    #[test]
    fn a_step_whose_keys_are_in_time_is_announced() {
        let mut trial = Trial::default();
        run(&mut trial, 5_000, with(6, 4, 90_000));
        assert_eq!(trial.standing(), Standing::Announced);
    }

    #[test]
    fn where_nothing_is_announced_nothing_is_compared() {
        let mut trial = Trial::default();
        run(&mut trial, 5_000, without(90_000));
        run(&mut trial, MIN_EPOCHS as u64 - 1, with(0, 10, 90_000));
        assert_eq!(trial.standing(), Standing::Announced);
    }

    #[test]
    fn a_step_that_is_late_and_shortens_no_wait_is_left_out_and_tried_again() {
        let mut trial = compared(100_000);
        assert_eq!(answer(&mut trial, 109_000), Standing::TooLate, "a tenth more is not enough");
        for round in 0..3 {
            let off = OFF_EPOCHS << round;
            run(&mut trial, off - 1, without(100_000));
            assert_eq!(trial.standing(), Standing::TooLate);
            assert!(trial.epoch(without(100_000)));
            assert_eq!(trial.standing(), Standing::Announced);
            run(&mut trial, MIN_EPOCHS as u64, with(0, 10, 100_000));
            assert_eq!(answer(&mut trial, 100_000), Standing::TooLate, "for twice as long");
        }
    }

    #[test]
    fn a_step_that_is_late_and_shortens_waits_is_kept() {
        let mut trial = compared(100_000);
        assert_eq!(answer(&mut trial, 111_000), Standing::Announced);
        run(&mut trial, KEPT_EPOCHS - 1, with(2, 8, 100_000));
        assert_eq!(trial.standing(), Standing::Announced, "not again so soon");
        run(&mut trial, 1, with(2, 8, 100_000));
        assert_eq!(trial.standing(), Standing::Compared);
    }

    #[test]
    fn epochs_that_need_no_read_are_not_compared() {
        let mut trial = compared(100_000);
        run(&mut trial, 500, StepEpoch::default());
        assert_eq!(trial.standing(), Standing::Compared);
        run(&mut trial, COMPARED as u64, without(200_000));
        assert_eq!(trial.standing(), Standing::Announced);
    }
}
