//! Watermarks inside a job (docs/design.md §4, "Watermarks").
//!
//! What travels with the barriers is, for every relation that the job reads, how far its watermark has
//! come. The watermark of any column anywhere in the job is a function of these alone
//! ([`ColumnMark`]), so each task computes it for itself.

use millrace_common::RelationId;
use millrace_graph::{ColumnMark, MarkTerm};

/// A column of a relation that has a watermark.
pub type Origin = (RelationId, usize);

/// How far a watermark has come, as one task or several know it. Microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A split has none yet, or a first scan is under way: nothing is promised.
    Unknown,
    /// The least over the splits that are not idle.
    At(i64),
    /// All splits are idle (or there is none here): counts only if all are everywhere. The largest.
    Idle(Option<i64>),
}

impl Mark {
    pub fn merge(self, other: Mark) -> Mark {
        match (self, other) {
            (Mark::Unknown, _) | (_, Mark::Unknown) => Mark::Unknown,
            (Mark::At(a), Mark::At(b)) => Mark::At(a.min(b)),
            (Mark::At(a), Mark::Idle(_)) | (Mark::Idle(_), Mark::At(a)) => Mark::At(a),
            (Mark::Idle(a), Mark::Idle(b)) => Mark::Idle(a.max(b)),
        }
    }

    pub fn value(self) -> Option<i64> {
        match self {
            Mark::At(v) => Some(v),
            Mark::Idle(v) => v,
            Mark::Unknown => None,
        }
    }
}

/// The marks of all relations with a watermark that some tasks read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks(Vec<(Origin, Mark)>);

impl Marks {
    pub fn add(&mut self, origin: Origin, mark: Mark) {
        match self.0.iter_mut().find(|(o, _)| *o == origin) {
            Some((_, known)) => *known = known.merge(mark),
            None => self.0.push((origin, mark)),
        }
    }

    pub fn merge(&mut self, other: &Marks) {
        other.0.iter().for_each(|&(origin, mark)| self.add(origin, mark));
    }

    pub fn iter(&self) -> impl Iterator<Item = (Origin, Option<i64>)> + '_ {
        self.0.iter().map(|(o, m)| (*o, m.value()))
    }

    fn get(&self, relation: RelationId, column: usize) -> Option<i64> {
        self.0.iter().find(|(o, _)| *o == (relation, column))?.1.value()
    }

    /// The watermarks of columns, of those that have one by now.
    pub fn columns(&self, marks: &[ColumnMark]) -> Vec<(usize, i64)> {
        let one = |m: &ColumnMark| Some((m.column, m.value(|r, c| self.get(r, c))?));
        marks.iter().filter_map(one).collect()
    }

    /// The least of some terms; `None`: one is not known yet.
    pub fn least(&self, terms: &[MarkTerm]) -> Option<i64> {
        let values: Option<Vec<i64>> =
            terms.iter().map(|t| Some(t.apply(self.get(t.relation, t.column)?))).collect();
        values?.into_iter().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_splits_count_only_when_all_are() {
        let (a, b) = (Mark::At(5), Mark::Idle(Some(9)));
        assert_eq!(a.merge(b), Mark::At(5));
        assert_eq!(b.merge(Mark::Idle(None)).value(), Some(9));
        assert_eq!(Mark::Idle(None).merge(a), a);
        assert_eq!(a.merge(Mark::Unknown).value(), None);
        assert_eq!(a.merge(Mark::At(3)).value(), Some(3));
    }
}
