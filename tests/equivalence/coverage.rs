//! What the cases have met: kinds of views and operators by mode.

use std::collections::BTreeMap;

use millrace_graph::{self, JoinKind, JoinSide, Operator};
use millrace_rpc::catalog::RowStorage;

use crate::case::{Mode, Report};

/// Keys whose state was read from below the caches, or changes that were settled early, by operator.
pub type Reads = BTreeMap<&'static str, u64>;

/// Operators with state that histories of changes can meet. Others have tests of their own in this folder; no query
/// is planned with a null-aware mark join today, and the executor's tests have it.
const OPERATORS: &[&str] = &[
    "aggregate",
    "aggregate, distinct values",
    "aggregate, global",
    "aggregate, ordered values",
    "distinct",
    "join anti",
    "join full",
    "join inner",
    "join left",
    "join mark",
    "join right",
    "join semi",
    "join with a residual",
    "not in",
    "null aware, left keyed",
    "null aware, left rows",
    "null aware, right keyed",
    "null aware, right rows",
    "side keyed",
    "side of one row a key",
    "side of rows",
    "top-n",
    "top-n of rows",
    "top-n, global",
    "window",
    "window, global",
];

/// What an operator is counted as.
pub fn labels(op: &Operator) -> Vec<&'static str> {
    match op {
        Operator::Aggregate(a) => aggregate(a),
        Operator::Join(j) => join(j),
        Operator::Lookup(_) => vec!["lookup"],
        Operator::TopN(t) => {
            let mut labels = vec![if t.group.is_empty() { "top-n, global" } else { "top-n" }];
            labels.extend((t.state.storage != RowStorage::Keyed).then_some("top-n of rows"));
            labels
        }
        Operator::Window(w) if w.group.is_empty() => vec!["window, global"],
        Operator::Window(_) => vec!["window"],
        _ => vec![],
    }
}

fn aggregate(a: &millrace_graph::Aggregate) -> Vec<&'static str> {
    let valued =
        |distinct: bool| a.calls.iter().any(|c| c.state.is_some() && c.distinct == distinct);
    let mut labels = vec![match (a.group.is_empty(), a.calls.is_empty()) {
        (true, _) => "aggregate, global",
        (_, true) => "distinct",
        _ => "aggregate",
    }];
    labels.extend(valued(true).then_some("aggregate, distinct values"));
    labels.extend(valued(false).then_some("aggregate, ordered values"));
    labels
}

fn join(j: &millrace_graph::Join) -> Vec<&'static str> {
    let mut labels = vec![match (j.kind, j.null_aware) {
        (JoinKind::LeftMark, true) => "join mark, null aware",
        (_, true) => "not in",
        (JoinKind::Inner, _) => "join inner",
        (JoinKind::LeftOuter, _) => "join left",
        (JoinKind::RightOuter, _) => "join right",
        (JoinKind::FullOuter, _) => "join full",
        (JoinKind::LeftSemi | JoinKind::RightSemi, _) => "join semi",
        (JoinKind::LeftAnti | JoinKind::RightAnti, _) => "join anti",
        (JoinKind::LeftMark, _) => "join mark",
    }];
    labels.extend(j.residual.as_ref().map(|_| "join with a residual"));
    let keyed = |side: &JoinSide| side.state.storage == RowStorage::Keyed;
    if j.null_aware {
        labels.push(if keyed(&j.left) {
            "null aware, left keyed"
        } else {
            "null aware, left rows"
        });
        labels.push(match keyed(&j.right) {
            true => "null aware, right keyed",
            false => "null aware, right rows",
        });
        return labels;
    }
    for side in [&j.left, &j.right] {
        labels.push(match side.state.storage {
            RowStorage::Keyed if side.state.unique_per_key => "side of one row a key",
            RowStorage::Keyed => "side keyed",
            RowStorage::Multiset => "side of rows",
            RowStorage::Append => "side of rows that only come",
        });
    }
    labels
}

/// See the module.
#[derive(Default)]
pub struct Coverage {
    /// Views by tag.
    views: BTreeMap<(&'static str, &'static str), u64>,
    reads: BTreeMap<(&'static str, &'static str), u64>,
    settled: BTreeMap<(&'static str, &'static str), u64>,
}

/// Operators that settle large changes before the barrier.
const SETTLING: &[&str] =
    &["aggregate, distinct values", "aggregate, ordered values", "top-n", "window"];

impl Coverage {
    pub fn add(&mut self, mode: Mode, report: &Report) {
        for &tag in &report.tags {
            *self.views.entry((tag, mode.name())).or_default() += 1;
        }
        for (&operator, reads) in &report.reads {
            *self.reads.entry((operator, mode.name())).or_default() += reads;
        }
        for (&operator, times) in &report.settled {
            *self.settled.entry((operator, mode.name())).or_default() += times;
        }
    }

    /// Operators that settled no change before a barrier, in any mode.
    pub fn never_settled(&self) -> Vec<&'static str> {
        let settled = |name| self.settled.iter().any(|((label, _), &n)| *label == name && n > 0);
        SETTLING.iter().copied().filter(|name| !settled(*name)).collect()
    }

    /// Kinds of views that ran in no case with restarts, and operators that read no state back there.
    pub fn missed(&self) -> Vec<&'static str> {
        let met = |map: &BTreeMap<_, u64>, name| {
            map.get(&(name, Mode::Restart.name())).is_some_and(|&n| n > 0)
        };
        let mut tags: Vec<_> = self.views.keys().map(|k| k.0).collect();
        tags.dedup();
        let views = tags.into_iter().filter(|tag| !met(&self.views, tag));
        let operators = OPERATORS.iter().copied().filter(|name| !met(&self.reads, name));
        views.chain(operators).collect()
    }

    pub fn print(&self) {
        print("views of each kind", &self.views);
        print("keys read from below the caches", &self.reads);
        print("changes settled early", &self.settled);
    }
}

fn print(what: &str, counts: &BTreeMap<(&'static str, &'static str), u64>) {
    let mut names: Vec<_> = counts.keys().map(|k| k.0).collect();
    names.dedup();
    print!("{what:32}");
    for mode in Mode::ALL {
        print!("{:>13}", mode.name());
    }
    println!();
    for name in names {
        print!("{name:32}");
        for mode in Mode::ALL {
            print!("{:>13}", counts.get(&(name, mode.name())).copied().unwrap_or(0));
        }
        println!();
    }
}
