//! What the operators of all views have counted.

use millrace_executor::stats::OperatorStats;

use super::world::Running;

/// Sums over all operators of the views, in keys unless another unit is named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operators {
    /// Keys of hints, and the bytes in which they were sent to tasks.
    pub hinted: u64,
    pub hint_bytes: u64,
    /// Keys that a row waited for, announced or not.
    pub demand: u64,
    /// Keys that were read ahead; those of them that were there when a row came, that a row had to wait for all the
    /// same, and that no row needed.
    pub prefetched: u64,
    pub in_time: u64,
    pub late: u64,
    pub unused: u64,
}

impl Operators {
    pub fn now(running: &Running) -> Operators {
        all(running).map(|o| o.lookahead).fold(Operators::default(), |sum, one| Operators {
            hinted: sum.hinted + one.hinted,
            hint_bytes: sum.hint_bytes + one.hint_bytes,
            demand: sum.demand + one.missed,
            prefetched: sum.prefetched + one.prefetched,
            in_time: sum.in_time + one.in_time,
            late: sum.late + one.late,
            unused: sum.unused + one.unused,
        })
    }

    pub fn since(self, before: Operators) -> Operators {
        Operators {
            hinted: self.hinted.saturating_sub(before.hinted),
            hint_bytes: self.hint_bytes.saturating_sub(before.hint_bytes),
            demand: self.demand.saturating_sub(before.demand),
            prefetched: self.prefetched.saturating_sub(before.prefetched),
            in_time: self.in_time.saturating_sub(before.in_time),
            late: self.late.saturating_sub(before.late),
            unused: self.unused.saturating_sub(before.unused),
        }
    }
}

/// Rows are looked at nowhere.
pub const NO_PLACE: &str = "off";

/// Where the views' operators have rows looked at now; [`NO_PLACE`]: nowhere.
pub fn places(running: &Running) -> String {
    let is_active = |o: &OperatorStats| o.lookahead.active > 0;
    let mut found: Vec<&str> =
        all(running).filter(is_active).flat_map(|operator| operator.measures.places()).collect();
    found.sort_unstable();
    found.dedup();
    if found.is_empty() { NO_PLACE.to_owned() } else { found.join("+") }
}

/// The place inside a view, as the operators name it.
const INPUT: &str = "input";

/// Names of the views' operators for which rows inside the view can be looked at, each once.
pub fn with_input(running: &Running) -> Vec<String> {
    let has_input = |o: &OperatorStats| o.measures.candidates().contains(&INPUT);
    let mut names: Vec<String> = all(running).filter(has_input).map(|o| o.name).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The share of epochs in which a row had to wait for a read: of the operator with the largest. `None`: no operator has
/// noted any.
pub fn late_epochs(running: &Running) -> Option<f64> {
    let shares = all(running).filter_map(|o| o.measures.reads.without_demand);
    shares.map(|without| 1.0 - without).reduce(f64::max)
}

/// All operators of the views.
fn all(running: &Running) -> impl Iterator<Item = OperatorStats> {
    let views = running.relations.iter().skip(1);
    views.filter_map(|v| running.server.worker.stats(*v)).flat_map(|s| s.operators)
}
