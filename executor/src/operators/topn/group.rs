//! A group of a top-N: its first rows in order, and which of them are shown.

use millrace_functions::window_call::RankFunction;

use crate::operators::ordered::Ranked;
use crate::state::KeyBytes;
use crate::state::arena::RowRef;

/// A row of the result.
#[derive(Clone, Debug)]
pub struct Shown {
    pub key: KeyBytes,
    pub at: RowRef,
    pub weight: i64,
    pub rank: i64,
}

/// What is shown of every group.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub offset: i64,
    /// Exclusive end, counted like `offset`.
    pub end: Option<i64>,
    pub rank: RankFunction,
    /// Every copy of a row has a rank of its own.
    pub emit_rank: bool,
}

/// The remembered rows of a group: all up to the last one, of all that are stored.
#[derive(Clone, Debug, Default)]
pub struct Group {
    pub rows: Vec<Ranked>,
    /// There are no others.
    pub complete: bool,
    /// What was shown when the epoch began, once the group has been touched.
    pub old: Option<Vec<Shown>>,
    /// `old` was taken from a prefix that does not hold the whole window.
    pub old_is_short: bool,
    /// Retractions of this epoch.
    pub retracted: usize,
    /// Its prefix is being read again.
    pub refilling: bool,
    /// In this epoch its prefix was read again, and is still too short: it waits for the barrier.
    pub is_short: bool,
}

impl Group {
    /// Whether the window can be told from the rows remembered.
    pub fn is_sufficient(&self, window: &Window) -> bool {
        self.complete || self.cut(window).is_some()
    }

    /// Number of rows from the first up to the end of the window, if it ends here.
    pub fn cut(&self, window: &Window) -> Option<usize> {
        let end = window.end?;
        if end <= 0 {
            return Some(0);
        }
        let mut ranks = Ranks::new(window.rank);
        for (i, row) in self.rows.iter().enumerate() {
            let rank = ranks.next(row, self.previous(i));
            match window.rank {
                RankFunction::RowNumber if ranks.count >= end => return Some(i + 1),
                RankFunction::RowNumber => {}
                _ if rank > end => return Some(i),
                _ => {}
            }
        }
        None
    }

    fn previous(&self, i: usize) -> Option<&Ranked> {
        i.checked_sub(1).map(|p| &self.rows[p])
    }

    /// The rows in the window.
    pub fn shown(&self, window: &Window) -> Vec<Shown> {
        let mut shown = Vec::new();
        let mut ranks = Ranks::new(window.rank);
        let end = window.end.unwrap_or(i64::MAX);
        for (i, row) in self.rows.iter().enumerate() {
            if row.weight <= 0 {
                continue;
            }
            let before = ranks.count;
            let rank = ranks.next(row, self.previous(i));
            if window.rank == RankFunction::RowNumber {
                let first = before.max(window.offset);
                let last = ranks.count.min(end);
                push_numbered(&mut shown, row, first, last, window.emit_rank);
                if before >= end {
                    break;
                }
            } else if rank > end {
                break;
            } else if rank > window.offset {
                let Ranked { key, at, weight, .. } = row.clone();
                shown.push(Shown { key, at, weight, rank });
            }
        }
        shown
    }
}

/// Copies `first..last` (0-based) of a row.
fn push_numbered(shown: &mut Vec<Shown>, row: &Ranked, first: i64, last: i64, each: bool) {
    if first >= last {
        return;
    }
    let one = |weight, rank| Shown { key: row.key.clone(), at: row.at, weight, rank };
    if each {
        shown.extend((first..last).map(|n| one(1, n + 1)));
    } else {
        shown.push(one(last - first, 0));
    }
}

/// Ranks of rows in order.
struct Ranks {
    rank: RankFunction,
    /// Rows before and with the current one.
    count: i64,
    current: i64,
}

impl Ranks {
    fn new(rank: RankFunction) -> Ranks {
        Ranks { rank, count: 0, current: 0 }
    }

    fn next(&mut self, row: &Ranked, previous: Option<&Ranked>) -> i64 {
        let peers =
            || previous.is_some_and(|p| p.key[..p.order as usize] == row.key[..row.order as usize]);
        match self.rank {
            RankFunction::RowNumber => self.current = self.count + 1,
            RankFunction::Rank if !peers() => self.current = self.count + 1,
            RankFunction::DenseRank if !peers() => self.current += 1,
            _ => {}
        }
        self.count += row.weight.max(0);
        self.current
    }
}
