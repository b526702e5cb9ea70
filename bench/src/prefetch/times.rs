//! When rows arrived, could be read by each view, and were visible in the last.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use millrace_common::{Epoch, RelationId};
use millrace_executor::stats::EpochTimes;
use millrace_executor::worker::Worker;

/// One in so many statements may have epochs that nobody looked up in time.
const MOST_UNKNOWN: usize = 50;

/// Rows of one statement.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// When the first row was due, and the time between two.
    pub due: Instant,
    pub every: Duration,
    pub rows: u64,
    /// When the statement was sent, and when it had its answer.
    pub sent: Instant,
    pub acknowledged: Instant,
}

impl Sent {
    fn due_of(&self, row: u64) -> Instant {
        self.due + self.every.mul_f64(row as f64)
    }
}

/// Epochs of the table and of each view, as far as they were looked up.
pub struct Epochs {
    relations: Vec<RelationId>,
    times: Vec<BTreeMap<Epoch, EpochTimes>>,
}

/// An epoch of a view that has some statement's rows: from when they could be read until it was sealed.
#[derive(Clone, Copy, Debug)]
struct Stage {
    epoch: Epoch,
    readable: Instant,
    waited: Duration,
}

/// What the views did with a statement's rows, the first view first, and when the last one showed them.
struct Seen {
    stages: Vec<Stage>,
    visible: Instant,
}

impl Epochs {
    pub fn of(relations: &[RelationId]) -> Epochs {
        let times = vec![BTreeMap::new(); relations.len()];
        Epochs { relations: relations.to_vec(), times }
    }

    /// A worker remembers the newest epochs only, so this is called often.
    pub fn look(&mut self, worker: &Worker) {
        for (relation, times) in self.relations.iter().zip(&mut self.times) {
            let newest = worker.epoch_times(*relation).unwrap_or_default();
            times.extend(newest.into_iter().map(|t| (t.epoch, t)));
        }
    }

    /// Of the last view, between two moments.
    pub fn count(&self, from: Instant, to: Instant) -> u64 {
        let within =
            |t: &&EpochTimes| t.committed.is_some_and(|c| (from..=to).contains(&c.into_std()));
        self.times.last().map_or(0, |last| last.values().filter(within).count() as u64)
    }

    /// The epoch of the table that a statement was committed with: the newest when it had its answer. The worker notes a
    /// commit after it has answered, so where that one is older than the statement it is the next.
    fn of_statement(&self, sent: &Sent) -> Option<&EpochTimes> {
        let epochs = self.times.first()?;
        let is_answered =
            |t: &&EpochTimes| t.committed.is_some_and(|c| c.into_std() <= sent.acknowledged);
        let is_later = |t: &&EpochTimes| t.committed.is_some_and(|c| c.into_std() >= sent.sent);
        let newest = epochs.values().rev().find(is_answered).filter(is_later);
        newest.or_else(|| epochs.values().find(is_later))
    }

    fn seen(&self, sent: &Sent) -> Option<Seen> {
        let entered = self.of_statement(sent)?;
        let mut readable = entered.committed?;
        let mut stages = Vec::with_capacity(self.times.len());
        for view in &self.times[1..] {
            let bringing = |t: &&EpochTimes| t.committed.is_some();
            let found = view.range(entered.epoch..).map(|(_, t)| t).find(bringing)?;
            stages.push(Stage {
                epoch: found.epoch,
                readable: readable.into_std(),
                waited: found.sealed?.saturating_duration_since(readable),
            });
            readable = found.committed?;
        }
        Some(Seen { stages, visible: readable.into_std() })
    }
}

/// A run: when each statement's rows were where.
pub struct Recording {
    pub epochs: Epochs,
    pub sent: Vec<Sent>,
    /// Rows that were due before are not measured.
    pub from: Instant,
}

/// One measured row; milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct RowTimes {
    pub due: Instant,
    pub visible: f64,
    pub state_wait: f64,
}

impl Recording {
    /// Every row that was due in time.
    pub fn rows(&self) -> Result<Vec<RowTimes>, String> {
        self.rows_with(|_| 0.0)
    }

    /// Every row, with so many milliseconds of its waits taken away.
    fn rows_with(&self, saved: impl Fn(&[Stage]) -> f64) -> Result<Vec<RowTimes>, String> {
        let mut all = Vec::new();
        let mut unknown = 0;
        for statement in &self.sent {
            let Some(Seen { stages, visible }) = self.epochs.seen(statement) else {
                unknown += 1;
                continue;
            };
            let saved = saved(&stages);
            let waited: Duration = stages.iter().map(|s| s.waited).sum();
            for row in 0..statement.rows {
                let due = statement.due_of(row);
                if due >= self.from {
                    let visible = millis(visible.saturating_duration_since(due));
                    let state_wait = (millis(waited) - saved).max(0.0);
                    all.push(RowTimes { due, visible: (visible - saved).max(0.0), state_wait });
                }
            }
        }
        if unknown * MOST_UNKNOWN > self.sent.len() {
            let count = self.sent.len();
            return Err(format!("the epochs of {unknown} of {count} statements are not known"));
        }
        Ok(all)
    }

    /// The median wait of each view's epochs, by rows; milliseconds.
    pub fn median_waits(&self) -> Vec<f64> {
        let views = self.epochs.times.len() - 1;
        let mut waits = vec![Vec::new(); views];
        for statement in &self.sent {
            let measured = (0..statement.rows).filter(|row| statement.due_of(*row) >= self.from);
            let count = measured.count();
            let stages = self.epochs.seen(statement).map_or_else(Vec::new, |s| s.stages);
            for (all, stage) in waits.iter_mut().zip(stages) {
                all.extend(std::iter::repeat_n(millis(stage.waited), count));
            }
        }
        let median = |mut all: Vec<f64>| {
            all.sort_by(f64::total_cmp);
            all.get(all.len() / 2).copied().unwrap_or_default()
        };
        waits.into_iter().map(median).collect()
    }

    /// The rows as a perfect prefetcher would have served them.
    ///
    /// It knows every key when its row enters, reads at once, and reads nothing else. Of each epoch of a view the
    /// recording, made without hints, has the wait; `warm` is what a view's epoch takes when nothing is cold, so the
    /// rest of the wait is its reads, one after another. If all their keys are in the row, `parallel` of them begin at
    /// once, and the slowest takes at least their mean: the rest divided by `parallel`. If each key comes out of the
    /// read before, it is the whole rest. The lead is the time from a statement's sending until the view could read its
    /// rows, the mean over the epoch's rows. The prefetcher hides as much of the read as the lead lasts: the epoch
    /// waits for `warm + max(0, read - lead)`. Since that is convex in the lead, the mean lead makes it no worse than
    /// keys with leads of their own would be: it is a bound.
    pub fn bound(&self, warm: &[f64], parallel: u32) -> Result<Vec<RowTimes>, String> {
        let leads = self.leads();
        let saved_by = |(view, stage): (usize, &Stage)| {
            let lead = leads.get(&(view, stage.epoch)).copied().unwrap_or_default();
            let (waited, warm) =
                (millis(stage.waited), warm.get(view).copied().unwrap_or_default());
            let reads = (waited - warm).max(0.0);
            reads - (reads / f64::from(parallel.max(1)) - lead).max(0.0)
        };
        self.rows_with(|stages| stages.iter().enumerate().map(saved_by).sum())
    }

    /// Of each view's epochs the mean lead of their rows; milliseconds.
    fn leads(&self) -> HashMap<(usize, Epoch), f64> {
        let mut sums: HashMap<(usize, Epoch), (f64, f64)> = HashMap::new();
        for statement in &self.sent {
            let stages = self.epochs.seen(statement).map_or_else(Vec::new, |s| s.stages);
            for (view, stage) in stages.iter().enumerate() {
                let lead = millis(stage.readable.saturating_duration_since(statement.sent));
                let sum = sums.entry((view, stage.epoch)).or_default();
                *sum = (sum.0 + lead * statement.rows as f64, sum.1 + statement.rows as f64);
            }
        }
        sums.into_iter().map(|(of, (lead, rows))| (of, lead / rows.max(1.0))).collect()
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}

/// Milliseconds of each row, sorted.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    pub visible: Vec<f64>,
    pub state_wait: Vec<f64>,
}

/// Median, 99th percentile and 99.9th.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Percentiles {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
}

impl Latencies {
    pub fn of(rows: &[RowTimes]) -> Latencies {
        let sorted = |of: fn(&RowTimes) -> f64| {
            let mut all: Vec<f64> = rows.iter().map(of).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        Latencies { visible: sorted(|r| r.visible), state_wait: sorted(|r| r.state_wait) }
    }

    /// Of several runs.
    pub fn all(runs: impl Iterator<Item = Latencies>) -> Latencies {
        let mut all = Latencies::default();
        for mut run in runs {
            all.visible.append(&mut run.visible);
            all.state_wait.append(&mut run.state_wait);
        }
        all.visible.sort_by(f64::total_cmp);
        all.state_wait.sort_by(f64::total_cmp);
        all
    }

    pub fn rows(&self) -> u64 {
        self.visible.len() as u64
    }
}

/// Of sorted values.
pub fn percentiles(sorted: &[f64]) -> Percentiles {
    let at = |share: f64| {
        let last = sorted.len().saturating_sub(1) as f64;
        sorted.get((last * share).round() as usize).copied().unwrap_or_default()
    };
    Percentiles { p50: at(0.5), p99: at(0.99), p999: at(0.999) }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant as At;

    use super::*;

    /// Three rows, sent at 0 ms and readable at 10 ms, in an epoch that is sealed at 30 and committed at 50.
    fn recording() -> Recording {
        let begun = At::now();
        let at = |ms: u64| Some(begun + Duration::from_millis(ms));
        let table = EpochTimes { epoch: Epoch(5), sealed: None, committed: at(10) };
        let before = EpochTimes { epoch: Epoch(4), sealed: at(11), committed: at(12) };
        let with = EpochTimes { epoch: Epoch(6), sealed: at(30), committed: at(50) };
        let mut epochs = Epochs::of(&[RelationId(1), RelationId(2)]);
        epochs.times[0].insert(table.epoch, table);
        epochs.times[1].extend([(before.epoch, before), (with.epoch, with)]);
        let sent = Sent {
            due: begun.into_std(),
            every: Duration::from_millis(2),
            rows: 3,
            sent: begun.into_std(),
            acknowledged: (begun + Duration::from_millis(11)).into_std(),
        };
        let from = (begun + Duration::from_millis(2)).into_std();
        Recording { epochs, sent: vec![sent], from }
    }

    #[test]
    fn a_row_is_visible_with_the_first_epoch_of_the_view_that_has_it() {
        let all = Latencies::of(&recording().rows().expect("the epochs are known"));
        assert_eq!(all.rows(), 2, "the first row was due before");
        assert_eq!(all.visible, [46.0, 48.0]);
        assert_eq!(all.state_wait, [20.0, 20.0]);
        assert_eq!(recording().median_waits(), [20.0]);
    }

    #[test]
    fn an_epoch_from_before_a_statement_does_not_have_its_rows() {
        let mut recording = recording();
        let sent = recording.sent[0].sent;
        let before = At::from_std(sent) - Duration::from_millis(1);
        let old = EpochTimes { epoch: Epoch(3), sealed: None, committed: Some(before) };
        recording.epochs.times[0].insert(old.epoch, old);
        // The commit was noted at 10 ms.
        recording.sent[0].acknowledged = sent + Duration::from_millis(9);
        let all = Latencies::of(&recording.rows().expect("the epochs are known"));
        assert_eq!(all.visible, [46.0, 48.0]);
    }

    #[test]
    fn a_perfect_prefetcher_hides_a_read_for_as_long_as_the_lead_lasts() {
        let waits = |warm: f64| {
            let rows = recording().bound(&[warm], 1).expect("the epochs are known");
            Latencies::of(&rows)
        };
        // A read of 18 ms, of which the lead of 10 ms hides as much.
        assert_eq!(waits(2.0).state_wait, [10.0, 10.0]);
        assert_eq!(waits(2.0).visible, [36.0, 38.0]);
        // A read of 5 ms is hidden whole.
        assert_eq!(waits(15.0).state_wait, [15.0, 15.0]);
        // An epoch that took no longer than a warm one cannot be made shorter.
        assert_eq!(waits(30.0).state_wait, [20.0, 20.0]);
    }
    #[test]
    fn of_reads_that_begin_at_once_the_slowest_is_at_least_their_mean() {
        let rows = |parallel: u32| recording().bound(&[2.0], parallel).expect("they are known");
        // 18 ms in all: a lead of 10 ms leaves 8 of one read, nothing of two of 9 ms, and nothing of six.
        assert_eq!(Latencies::of(&rows(1)).state_wait, [10.0, 10.0]);
        assert_eq!(Latencies::of(&rows(2)).state_wait, [2.0, 2.0]);
        assert_eq!(Latencies::of(&rows(6)).state_wait, [2.0, 2.0]);
    }
}
