//! Runs that do not measure what they should: told in the output, and an error at the end.

use serde::Serialize;

use super::args::Setting;
use super::modes::Mode;
use super::report::Cost;

/// Of the keys that rows bring, those that were not in memory, at least. A filter of `ads` drops two rows of three.
pub const LEAST_COLD: f64 = 0.25;
/// Keys that rows waited for, by rows: with more of them there should have been hints.
const MOST_WAITS: f64 = 0.01;
/// The same where state is in memory: each window of `ads` has new groups.
const MOST_HOT_WAITS: f64 = 0.1;

/// Names are those of the JSON line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Invalid {
    pub error: String,
    pub query: String,
    pub profile: String,
    pub mode: String,
    pub run: Option<u32>,
}

impl Invalid {
    /// What is wrong with a run, if anything is.
    pub fn of(mode: &Mode, setting: &Setting, cost: &Cost) -> Option<Invalid> {
        let error = without_hints(mode, cost)
            .or_else(|| warm(mode, setting, cost))
            .or_else(|| not_hot(mode, cost))?;
        Some(Invalid {
            error,
            query: cost.query.clone(),
            profile: cost.profile.clone(),
            mode: cost.mode.clone(),
            run: cost.run,
        })
    }

    /// A line for people and one for programs.
    pub fn print(&self) -> Result<(), String> {
        println!("{:7} {:15} {:15} ERROR: {}", self.query, self.profile, self.mode, self.error);
        println!("{}", serde_json::to_string(self).map_err(|e| e.to_string())?);
        Ok(())
    }
}

/// Keys that rows waited for, by rows.
fn waits(cost: &Cost) -> f64 {
    cost.cold_keys_per_epoch.unwrap_or_default() * cost.epochs.unwrap_or_default() as f64
        / cost.rows.max(1) as f64
}

fn not_hot(mode: &Mode, cost: &Cost) -> Option<String> {
    let waits = waits(cost);
    let is_cold = mode.hot && waits > MOST_HOT_WAITS;
    is_cold.then(|| format!("state is not in memory: rows waited for {waits:.2} keys each"))
}

fn without_hints(mode: &Mode, cost: &Cost) -> Option<String> {
    let waits = waits(cost);
    let silent = mode.has_hints() && cost.hinted == Some(0) && waits > MOST_WAITS;
    silent.then(|| format!("no hint was sent, though rows waited for {waits:.2} keys each"))
}

fn warm(mode: &Mode, setting: &Setting, cost: &Cost) -> Option<String> {
    let cold = cost.cold_share.unwrap_or_default();
    let is_warm = mode.is_baseline() && setting.is_cold() && cold < LEAST_COLD;
    is_warm.then(|| format!("state is not cold: rows waited for {cold:.2} of their keys"))
}

#[cfg(test)]
mod tests {
    use super::super::modes::named_profile;
    use super::*;

    fn setting(skew: f64) -> Setting {
        let (profile_name, profile) = named_profile("s3").unwrap();
        Setting {
            profile_name,
            profile,
            disk_tier: false,
            skew,
            state_to_cache: 10.0,
            threshold: 100,
        }
    }

    fn error(mode: &str, skew: f64, hinted: u64, cold: f64) -> Option<String> {
        let cost = Cost {
            rows: 100,
            epochs: Some(10),
            cold_keys_per_epoch: Some(9.0),
            hinted: Some(hinted),
            cold_share: Some(cold),
            ..Cost::default()
        };
        let mode = Mode::by_name(mode).unwrap();
        Invalid::of(&mode, &setting(skew), &cost).map(|invalid| invalid.error)
    }

    #[test]
    fn a_run_with_hints_that_sends_none_is_an_error() {
        let silent = error("lookahead", 0.0, 0, 1.0).unwrap();
        assert_eq!(silent, "no hint was sent, though rows waited for 0.90 keys each");
        assert_eq!(error("lookahead", 0.0, 1, 1.0), None);
        assert_eq!(error("async-lru", 0.0, 0, 1.0), None);
    }

    #[test]
    fn keys_that_are_in_memory_are_not_cold() {
        let warm = error("async-lru", 0.0, 0, 0.1).unwrap();
        assert_eq!(warm, "state is not cold: rows waited for 0.10 of their keys");
        assert_eq!(error("async-lru", 1.0, 0, 0.1), None, "some keys come often");
        assert_eq!(error("ram", 0.0, 0, 0.0), None);
        let cold = error("ram-hot", 0.0, 0, 0.0).unwrap();
        assert_eq!(cold, "state is not in memory: rows waited for 0.90 keys each");
    }
}
