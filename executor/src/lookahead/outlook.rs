//! How far watermarks are likely to be soon, for operators that read a range of state when one has passed it
//! (docs/design.md §8).
//!
//! A watermark is known when its epoch ends. What it will be is guessed from how far it has moved in each of the last
//! epochs. A wrong guess costs a read or a wait, never a result.

use std::collections::VecDeque;

use crate::watermark::{Origin, Watermark, WatermarkSet};

/// Epochs whose steps are remembered.
const EPOCHS: usize = 8;

/// See the module. Of one task.
#[derive(Debug, Default)]
pub struct Outlook(Vec<(Origin, Course)>);

/// Of one watermark, in microseconds.
#[derive(Debug)]
struct Course {
    last: i64,
    /// How far it moved in each of the last epochs.
    steps: VecDeque<i64>,
}

impl Course {
    fn pass(&mut self, value: i64) {
        if self.steps.len() == EPOCHS {
            self.steps.pop_front();
        }
        self.steps.push_back(value.saturating_sub(self.last).max(0));
        self.last = self.last.max(value);
    }

    /// The median of the steps that it made counts: neither a jump nor epochs that brought nothing change what is
    /// foreseen.
    fn after(&self, epochs: u32) -> i64 {
        let mut steps: Vec<i64> = self.steps.iter().copied().filter(|step| *step > 0).collect();
        steps.sort_unstable();
        let step = steps.get(steps.len() / 2).copied().unwrap_or(0);
        self.last.saturating_add(step.saturating_mul(i64::from(epochs)))
    }
}

impl Outlook {
    /// An epoch has ended with these watermarks.
    pub fn pass(&mut self, marks: &WatermarkSet) {
        for (origin, value) in marks.iter() {
            let known = self.0.iter().position(|(known, _)| *known == origin);
            match (known, value) {
                (Some(at), Some(value)) => self.0[at].1.pass(value),
                (None, Some(value)) => {
                    self.0.push((origin, Course { last: value, steps: VecDeque::new() }));
                }
                // Nothing is promised any more.
                (Some(at), None) => drop(self.0.swap_remove(at)),
                (None, None) => {}
            }
        }
    }

    /// The watermarks that are likely so many epochs later.
    pub fn after(&self, epochs: u32) -> WatermarkSet {
        let mut marks = WatermarkSet::default();
        for (origin, course) in &self.0 {
            marks.add(*origin, Watermark::At(course.after(epochs)));
        }
        marks
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::RelationId;

    use super::*;

    const A: Origin = (RelationId(1), 0);
    const B: Origin = (RelationId(2), 3);

    fn marks(values: &[(Origin, Watermark)]) -> WatermarkSet {
        let mut marks = WatermarkSet::default();
        values.iter().for_each(|&(origin, mark)| marks.add(origin, mark));
        marks
    }

    fn at(outlook: &Outlook, epochs: u32) -> Vec<Option<i64>> {
        outlook.after(epochs).iter().map(|(_, value)| value).collect()
    }

    #[test]
    fn watermarks_are_expected_to_move_as_far_as_they_mostly_did_in_the_last_epochs() {
        let mut outlook = Outlook::default();
        for value in [100, 110, 140, 145] {
            outlook.pass(&marks(&[(A, Watermark::At(value)), (B, Watermark::At(7))]));
        }
        assert_eq!(at(&outlook, 1), [Some(155), Some(7)]);
        assert_eq!(at(&outlook, 3), [Some(175), Some(7)]);
        // What stands still is expected to.
        for _ in 0..EPOCHS {
            outlook.pass(&marks(&[(A, Watermark::At(145))]));
        }
        assert_eq!(at(&outlook, 3), [Some(145), Some(7)]);
    }

    #[test]
    fn a_jump_does_not_change_what_is_expected() {
        let mut outlook = Outlook::default();
        for value in [0, 10, 20, 30, 1_000_030, 1_000_040, 1_000_040] {
            outlook.pass(&marks(&[(A, Watermark::At(value))]));
        }
        assert_eq!(at(&outlook, 1), [Some(1_000_050)]);
    }

    #[test]
    fn nothing_is_expected_of_a_watermark_that_was_seen_once_or_is_unknown() {
        let mut outlook = Outlook::default();
        outlook.pass(&marks(&[(A, Watermark::At(i64::MIN)), (B, Watermark::Unknown)]));
        assert_eq!(at(&outlook, 9), [Some(i64::MIN)]);
        outlook.pass(&marks(&[(A, Watermark::At(i64::MAX)), (B, Watermark::Idle(None))]));
        assert_eq!(at(&outlook, 9), [Some(i64::MAX)], "no overflow");
        outlook.pass(&marks(&[(A, Watermark::Unknown)]));
        assert!(at(&outlook, 9).is_empty());
    }
}
