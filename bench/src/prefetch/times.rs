//! When rows arrived, could be read by the first view, and were visible in the last.

use std::collections::BTreeMap;
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
    /// When the statement had its answer.
    pub acknowledged: Instant,
}

/// Epochs of the table and of each view, as far as they were looked up.
pub struct Epochs {
    relations: Vec<RelationId>,
    times: Vec<BTreeMap<Epoch, EpochTimes>>,
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

    /// The epoch of the table that a statement was committed with: the newest when it had its answer.
    fn of_statement(&self, sent: &Sent) -> Option<&EpochTimes> {
        let committed =
            |t: &&EpochTimes| t.committed.is_some_and(|c| c.into_std() <= sent.acknowledged);
        self.times.first()?.values().rev().find(committed)
    }

    /// When the rows of a statement were visible, and how long the views' epochs with them took from when their input
    /// could be read until they were sealed.
    fn seen(&self, sent: &Sent) -> Option<(Instant, Duration)> {
        let entered = self.of_statement(sent)?;
        let mut readable = entered.committed?;
        let mut waited = Duration::ZERO;
        for view in &self.times[1..] {
            let bringing = |t: &&EpochTimes| t.committed.is_some();
            let epoch = view.range(entered.epoch..).map(|(_, t)| t).find(bringing)?;
            waited += epoch.sealed?.saturating_duration_since(readable);
            readable = epoch.committed?;
        }
        Some((readable.into_std(), waited))
    }
}

/// Milliseconds of each row, sorted.
#[derive(Default)]
pub struct Latencies {
    visible: Vec<f64>,
    state_wait: Vec<f64>,
}

/// Median, 99th percentile and 99.9th.
pub struct Percentiles {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
}

impl Latencies {
    /// Of the rows that were due after a moment.
    pub fn of(epochs: &Epochs, sent: &[Sent], from: Instant) -> Result<Latencies, String> {
        let mut all = Latencies::default();
        let millis = |d: Duration| d.as_secs_f64() * 1_000.0;
        let mut unknown = 0;
        for statement in sent {
            let Some((visible, waited)) = epochs.seen(statement) else {
                unknown += 1;
                continue;
            };
            for row in 0..statement.rows {
                let due = statement.due + statement.every.mul_f64(row as f64);
                if due >= from {
                    all.visible.push(millis(visible.saturating_duration_since(due)));
                    all.state_wait.push(millis(waited));
                }
            }
        }
        if unknown * MOST_UNKNOWN > sent.len() {
            return Err(format!(
                "the epochs of {unknown} of {} statements are not known",
                sent.len()
            ));
        }
        all.visible.sort_by(f64::total_cmp);
        all.state_wait.sort_by(f64::total_cmp);
        Ok(all)
    }

    pub fn rows(&self) -> u64 {
        self.visible.len() as u64
    }

    pub fn visible(&self) -> Percentiles {
        percentiles(&self.visible)
    }

    pub fn state_wait(&self) -> Percentiles {
        percentiles(&self.state_wait)
    }
}

fn percentiles(sorted: &[f64]) -> Percentiles {
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

    #[test]
    fn a_row_is_visible_with_the_first_epoch_of_the_view_that_has_it() {
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
            acknowledged: (begun + Duration::from_millis(11)).into_std(),
        };
        let from = (begun + Duration::from_millis(2)).into_std();
        let all = Latencies::of(&epochs, &[sent], from).expect("the epochs are known");
        assert_eq!(all.rows(), 2, "the first row was due before");
        assert_eq!(all.visible, [46.0, 48.0]);
        assert_eq!(all.state_wait, [20.0, 20.0]);
    }
}
