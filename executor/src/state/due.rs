//! Which entries of a cache rows are expected for, and by when (docs/design.md §8).
//!
//! A hint marks entries as *due* at the epoch that brings its rows; of several epochs the latest counts. The mark is taken
//! away by the first row at the input that was announced, or when the operator has passed the barrier of that epoch. The
//! keys of a hint share their due epoch, so a barrier looks at hints and not at keys.

use std::collections::VecDeque;

use millrace_common::collections::HashMap;

use super::Slot;
use crate::lookahead::Due;

/// Barriers after which a mark goes whose epoch was never told.
const MAX_BARRIERS: u64 = 256;

/// Of one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DueMark {
    hint: u64,
    /// The entry was read ahead, and no row has used it; else it was in memory when the hint came.
    pub is_read: bool,
    /// Rows have come for the entry since, though at inputs at which none were announced.
    is_touched: bool,
    /// Inputs at which rows are expected, as bits.
    ports: u8,
}

impl DueMark {
    /// The entry was read ahead, and no row at all has come for it.
    pub fn is_in_vain(&self) -> bool {
        self.is_read && !self.is_touched
    }
}

/// What a row has made of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touched {
    /// It is the first one that uses what was read ahead.
    pub is_used: bool,
    /// Rows are not expected any more.
    pub is_over: bool,
}

struct DueHint {
    number: u64,
    due: Due,
    slots: Vec<Slot>,
    /// Barriers before it.
    barrier: u64,
}

/// See the module. Of one operator.
#[derive(Default)]
pub struct DueMarks {
    of: HashMap<Slot, DueMark>,
    hints: VecDeque<DueHint>,
    number: u64,
    barriers: u64,
}

impl DueMarks {
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Entries that a hint has marked for rows at an input.
    pub fn mark(&mut self, due: &Due, port: usize, slots: Vec<(Slot, bool)>) {
        if slots.is_empty() {
            return;
        }
        self.number += 1;
        for &(slot, is_read) in &slots {
            let none = DueMark { hint: 0, is_read: false, is_touched: false, ports: 0 };
            let mark = self.of.entry(slot).or_insert(none);
            if !is_later(&self.hints, mark.hint, due) {
                mark.hint = self.number;
            }
            mark.is_read |= is_read;
            mark.ports |= 1 << port;
        }
        self.hints.push_back(DueHint {
            number: self.number,
            due: due.clone(),
            slots: slots.into_iter().map(|(slot, _)| slot).collect(),
            barrier: self.barriers,
        });
    }

    pub fn has(&self, slot: Slot) -> bool {
        self.of.contains_key(&slot)
    }

    /// The epoch that brings the rows of an entry. The last one: nobody knows; 0: no hint has announced any.
    pub fn epoch(&self, slot: Slot) -> u64 {
        let Some(mark) = self.of.get(&slot) else { return 0 };
        hint_of(&self.hints, mark.hint).and_then(|hint| hint.due.epoch()).unwrap_or(u64::MAX)
    }

    /// A row has come for an entry at an input. `None`: none was expected there.
    pub fn touch(&mut self, slot: Slot, port: usize) -> Option<Touched> {
        let mark = self.of.get_mut(&slot)?;
        mark.is_touched = true;
        if mark.ports & 1 << port == 0 {
            return None;
        }
        mark.ports &= !(1 << port);
        let is_used = std::mem::take(&mut mark.is_read);
        let is_over = mark.ports == 0;
        if is_over {
            self.of.remove(&slot);
        }
        Some(Touched { is_used, is_over })
    }

    /// An entry leaves: its mark.
    pub fn take(&mut self, slot: Slot) -> Option<DueMark> {
        self.of.remove(&slot)
    }

    /// The barrier of an epoch: the entries whose rows have not come, and are not to be expected any more.
    pub fn pass(&mut self, epoch: u64) -> Vec<(Slot, DueMark)> {
        self.barriers += 1;
        let (of, barriers) = (&mut self.of, self.barriers);
        let mut passed = Vec::new();
        self.hints.retain(|hint| {
            if !hint.due.has_passed(epoch) && barriers - hint.barrier < MAX_BARRIERS {
                return true;
            }
            for slot in &hint.slots {
                if of.get(slot).is_some_and(|mark| mark.hint == hint.number) {
                    passed.extend(of.remove(slot).map(|mark| (*slot, mark)));
                }
            }
            false
        });
        passed
    }
}

/// Whether a hint is known to be due after an epoch.
fn is_later(hints: &VecDeque<DueHint>, hint: u64, due: &Due) -> bool {
    let known = hint_of(hints, hint).and_then(|h| h.due.epoch());
    known.zip(due.epoch()).is_some_and(|(known, new)| known > new)
}

fn hint_of(hints: &VecDeque<DueHint>, number: u64) -> Option<&DueHint> {
    hints.binary_search_by_key(&number, |h| h.number).ok().and_then(|i| hints.get(i))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(passed: Vec<(Slot, DueMark)>) -> Vec<(Slot, bool)> {
        passed.into_iter().map(|(slot, mark)| (slot, mark.is_read)).collect()
    }

    #[test]
    fn marks_go_with_the_barrier_of_the_latest_epoch() {
        let mut marks = DueMarks::default();
        marks.mark(&Due::at(10), 0, vec![(1, true), (2, true), (3, false)]);
        marks.mark(&Due::at(20), 0, vec![(2, false)]);
        assert_eq!(marks.of.len(), 3);
        assert!(marks.take(3).is_some_and(|mark| !mark.is_read) && marks.take(3).is_none());
        assert_eq!(slots(marks.pass(9)), []);
        assert_eq!(slots(marks.pass(15)), [(1, true)]);
        assert_eq!(slots(marks.pass(20)), [(2, true)], "that it was read ahead is not forgotten");
        assert!(marks.is_empty() && marks.hints.is_empty());
        // Whatever the order in which they are announced.
        marks.mark(&Due::at(20), 0, vec![(1, true)]);
        marks.mark(&Due::at(10), 0, vec![(1, true)]);
        assert_eq!((slots(marks.pass(15)), slots(marks.pass(20))), (vec![], vec![(1, true)]));
    }

    #[test]
    fn a_row_takes_the_mark_of_its_own_input_only() {
        let mut marks = DueMarks::default();
        marks.mark(&Due::at(10), 0, vec![(1, true)]);
        assert_eq!(marks.touch(1, 1), None, "none was expected there");
        marks.mark(&Due::at(10), 1, vec![(1, false)]);
        let touched = |is_used, is_over| Some(Touched { is_used, is_over });
        assert_eq!(marks.touch(1, 0), touched(true, false));
        assert_eq!((marks.touch(1, 0), marks.has(1)), (None, true));
        assert_eq!(marks.touch(1, 1), touched(false, true), "it was used before");
        assert!(marks.is_empty());
    }

    #[test]
    fn the_latest_epoch_says_how_distant_an_entry_is() {
        let mut marks = DueMarks::default();
        let unknown = Due::default();
        marks.mark(&Due::at(20), 0, vec![(1, true), (2, true)]);
        marks.mark(&Due::at(10), 0, vec![(2, true), (3, true)]);
        marks.mark(&unknown, 0, vec![(4, true)]);
        assert_eq!([1, 2, 3, 4, 5].map(|slot| marks.epoch(slot)), [20, 20, 10, u64::MAX, 0]);
        unknown.resolve(15);
        assert_eq!(marks.epoch(4), 15);
    }

    #[test]
    fn an_entry_is_in_vain_if_no_row_has_come_at_any_input() {
        let mut marks = DueMarks::default();
        marks.mark(&Due::at(10), 0, vec![(1, true), (2, true), (3, false)]);
        assert_eq!(marks.touch(2, 1), None);
        let passed = marks.pass(10).into_iter();
        let in_vain: Vec<_> = passed.map(|(slot, mark)| (slot, mark.is_in_vain())).collect();
        assert_eq!(in_vain, [(1, true), (2, false), (3, false)]);
    }

    #[test]
    fn an_epoch_that_is_never_told_holds_no_mark_for_ever() {
        let mut marks = DueMarks::default();
        let (told, due) = (Due::default(), Due::default());
        marks.mark(&told, 0, vec![(1, true)]);
        marks.mark(&due, 0, vec![(2, true)]);
        assert_eq!(slots(marks.pass(1)), []);
        // The rows will never be committed.
        told.resolve(1);
        assert_eq!(slots(marks.pass(2)), [(1, true)]);
        let passed = (3..300).flat_map(|epoch| slots(marks.pass(epoch)));
        assert_eq!(passed.collect::<Vec<_>>(), [(2, true)]);
    }
}
