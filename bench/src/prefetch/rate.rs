//! How many rows a second a comparison sends if none are given: to asynchronous modes, if there are any; see
//! [`super::groups`].
//!
//! A share of the slowest mode's maximum is not enough: the maximum is that of large batches, each of which reads most
//! of the state in a few large requests and keeps the processor busy. There nothing is left to hide. So the rate is
//! lowered until, in a mode without hints, a part of the processor is idle, keys are not in memory, and there are
//! requests by key.

use super::compare::{Comparison, Run};
use super::invalid::LEAST_COLD;
use super::modes::{Mode, RECORDED};
use crate::usage::cores;

/// Of the slowest mode's maximum.
pub const LOAD: f64 = 0.7;
/// Of the cores that the process may take, its clients and the simulated store among it. A task works on one core, so
/// as many count as there are tasks.
const MOST_CPU: f64 = 0.5;
/// By how much a rate is lowered below the one that would just meet the share, since small epochs cost more.
const MARGIN: f64 = 0.9;
/// Requests for each cold key. Those for blocks near each other are joined, so that with fewer much of the state is read
/// for each epoch.
const LEAST_GETS: f64 = 0.3;
const MOST_TRIALS: usize = 8;
const LEAST_RATE: f64 = 50.0;
/// Rows of a trial, at least, however low the rate is: some epochs.
const LEAST_ROWS: f64 = 20.0;

/// What a trial at a rate has shown.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Trial {
    rate: f64,
    /// Of as many cores as there are tasks.
    cpu_share: f64,
    /// Of the keys that rows brought, those that were not in memory. `None`: they need not be cold.
    cold_share: Option<f64>,
    /// Requests for each of them.
    gets: f64,
}

impl Trial {
    fn told(self) -> String {
        let Trial { gets, .. } = self;
        let cold = |share: f64| {
            format!("; {share:.2} of their keys are cold, with {gets:.2} requests for each")
        };
        self.cold_share.map_or_else(String::new, cold)
    }

    /// Than one at a higher rate. What takes the processor may not be rows but epochs, of which a lower rate has as many.
    fn is_better_than(self, last: Trial) -> bool {
        self.cpu_share < last.cpu_share * MARGIN || self.gets > last.gets / MARGIN
    }

    /// The next rate to try; `None`: this one will do.
    fn lower(self) -> Option<f64> {
        let by_cpu = MOST_CPU / self.cpu_share.max(1e-9);
        let is_warm = |share| share < LEAST_COLD || self.gets < LEAST_GETS;
        let is_warm = self.cold_share.is_some_and(is_warm);
        let by_cold = if is_warm { 0.5 } else { f64::MAX };
        let factor = by_cpu.min(by_cold);
        (factor < 1.0).then_some(self.rate * factor * MARGIN)
    }
}

/// For these modes, with their places in the plan: below the share of the slowest one's `maximum`, and by trials below
/// what the processor and the state allow.
pub async fn choose(
    comparison: &Comparison<'_>,
    modes: &[(usize, &Mode)],
    maximum: f64,
) -> Result<f64, String> {
    let named = |name: &str| modes.iter().find(|(_, m)| m.name == name);
    let cold = || modes.iter().find(|(_, m)| !m.in_memory);
    let mode = named(RECORDED).or_else(cold).map(|(_, mode)| *mode);
    let mut rate = (maximum * LOAD).max(1.0);
    // Of nothing but `ram` nothing is cold.
    let Some(mode) = mode else { return Ok(rate) };
    let mut last: Option<Trial> = None;
    for _ in 0..MOST_TRIALS {
        let trial = of(comparison, mode, rate).await?;
        eprintln!(
            "{} {}: {rate:.0} rows/s take {:.0} % of the tasks' cores{}",
            comparison.world.query.name,
            comparison.setting.label(),
            trial.cpu_share * 100.0,
            trial.told()
        );
        let helps = last.is_none_or(|last| trial.is_better_than(last));
        last = Some(trial);
        match trial.lower().filter(|_| rate > LEAST_RATE && helps) {
            Some(lower) => rate = lower.max(LEAST_RATE),
            None => break,
        }
    }
    Ok(rate)
}

async fn of(comparison: &Comparison<'_>, mode: &Mode, rate: f64) -> Result<Trial, String> {
    let seconds = comparison.order.closed_seconds.max(LEAST_ROWS / rate);
    let Run { cost, .. } = comparison.measure(mode, (rate, seconds), 0).await?;
    let cold_share = cost.cold_share.filter(|_| comparison.setting.is_cold());
    let cores = cores();
    let tasks = comparison.order.parallelism.min(cores);
    let cpu_share = cost.cpu_share.unwrap_or_default() * cores as f64 / tasks as f64;
    Ok(Trial { rate, cpu_share, cold_share, gets: cost.gets_per_cold_key.unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_lowered_until_state_is_cold_and_cores_are_idle() {
        let lower = |cpu_share: f64, cold: f64, gets: f64| {
            Trial { rate: 1_000.0, cpu_share, cold_share: Some(cold), gets }.lower()
        };
        assert_eq!(lower(0.5, 1.0, 1.0), None);
        assert_eq!(lower(1.0, 1.0, 1.0), Some(450.0));
        assert_eq!(lower(0.1, 0.1, 1.0), Some(450.0), "keys are in memory");
        assert_eq!(lower(0.1, 1.0, 0.1), Some(450.0), "much of the state is read at once");
        assert_eq!(lower(0.25, 0.5, 0.5), None);
    }
    #[test]
    fn a_lower_rate_that_changes_nothing_is_the_last() {
        let trial = |cpu_share: f64, gets: f64| Trial {
            rate: 100.0,
            cpu_share,
            cold_share: Some(1.0),
            gets,
        };
        assert!(trial(0.6, 0.2).is_better_than(trial(0.8, 0.2)));
        assert!(trial(0.8, 0.4).is_better_than(trial(0.8, 0.2)));
        assert!(!trial(0.78, 0.21).is_better_than(trial(0.8, 0.2)));
    }
}
