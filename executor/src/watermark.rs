//! Watermarks inside a job (docs/design.md §4, "Watermarks").
//!
//! What travels with the barriers is, for every relation that the job reads, how far its watermark has
//! come. The watermark of any column anywhere in the job is a function of these alone
//! ([`DerivedWatermark`]), so each task computes it for itself.

use millrace_common::RelationId;
use millrace_graph::{DerivedWatermark, WatermarkTerm};

/// A column of a relation that has a watermark.
pub type Origin = (RelationId, usize);

/// How far a watermark has come, as one task or several know it. Microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watermark {
    /// A split has none yet, or a first scan is under way: nothing is promised.
    Unknown,
    /// The least over the splits that are not idle.
    At(i64),
    /// All splits are idle (or there is none here): counts only if all are everywhere. The largest.
    Idle(Option<i64>),
}

impl Watermark {
    pub fn merge(self, other: Watermark) -> Watermark {
        match (self, other) {
            (Watermark::Unknown, _) | (_, Watermark::Unknown) => Watermark::Unknown,
            (Watermark::At(a), Watermark::At(b)) => Watermark::At(a.min(b)),
            (Watermark::At(a), Watermark::Idle(_)) | (Watermark::Idle(_), Watermark::At(a)) => {
                Watermark::At(a)
            }
            (Watermark::Idle(a), Watermark::Idle(b)) => Watermark::Idle(a.max(b)),
        }
    }

    pub fn value(self) -> Option<i64> {
        match self {
            Watermark::At(v) => Some(v),
            Watermark::Idle(v) => v,
            Watermark::Unknown => None,
        }
    }
}

/// The marks of all relations with a watermark that some tasks read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatermarkSet(Vec<(Origin, Watermark)>);

impl WatermarkSet {
    pub fn add(&mut self, origin: Origin, mark: Watermark) {
        match self.0.iter_mut().find(|(o, _)| *o == origin) {
            Some((_, known)) => *known = known.merge(mark),
            None => self.0.push((origin, mark)),
        }
    }

    pub fn merge(&mut self, other: &WatermarkSet) {
        other.0.iter().for_each(|&(origin, mark)| self.add(origin, mark));
    }

    pub fn iter(&self) -> impl Iterator<Item = (Origin, Option<i64>)> + '_ {
        self.0.iter().map(|(o, m)| (*o, m.value()))
    }

    fn get(&self, relation: RelationId, column: usize) -> Option<i64> {
        self.0.iter().find(|(o, _)| *o == (relation, column))?.1.value()
    }

    /// The watermarks of columns, of those that have one by now.
    pub fn columns(&self, marks: &[DerivedWatermark]) -> Vec<(usize, i64)> {
        let one = |m: &DerivedWatermark| Some((m.column, m.value(|r, c| self.get(r, c))?));
        marks.iter().filter_map(one).collect()
    }

    /// The least of some terms; `None`: one is not known yet.
    pub fn least(&self, terms: &[WatermarkTerm]) -> Option<i64> {
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
        let (a, b) = (Watermark::At(5), Watermark::Idle(Some(9)));
        assert_eq!(a.merge(b), Watermark::At(5));
        assert_eq!(b.merge(Watermark::Idle(None)).value(), Some(9));
        assert_eq!(Watermark::Idle(None).merge(a), a);
        assert_eq!(a.merge(Watermark::Unknown).value(), None);
        assert_eq!(a.merge(Watermark::At(3)).value(), Some(3));
    }
}
