//! One mode's result: a table row and a JSON line.

use millrace_executor::blackhole::Digest;
use millrace_storage::sim::SimStats;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::args::Setting;
use super::arrivals::Measured;
use super::groups::Load;
use super::modes::BOUND;
use super::times::{Latencies, percentiles};
use super::world::World;

/// Bytes of an arriving row: eight numbers, a time, and a text of 32 characters with its offset.
const ROW_BYTES: u64 = 8 * 8 + 36;

/// A run, or the medians of several. Names are those of the JSON line; what is not measured is null.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Cost {
    pub query: String,
    pub profile: String,
    pub mode: String,
    /// Which rows: those of all modes, or those that only some get.
    pub load: Load,
    /// Null: these are medians.
    pub run: Option<u32>,
    pub runs: u32,
    /// Of the mode `fixed`: the mode that it is.
    pub candidate: Option<String>,
    pub disk_tier: bool,
    pub skew: f64,
    pub state_to_cache: f64,
    /// Of the sketch of frequent keys.
    pub threshold: u8,
    pub rate: f64,
    /// Rows that were measured.
    pub rows: u64,
    pub visible_p50_ms: f64,
    pub visible_p99_ms: f64,
    pub visible_p999_ms: f64,
    pub state_wait_p50_ms: f64,
    pub state_wait_p99_ms: f64,
    pub state_wait_p999_ms: f64,
    /// Null if the rate was given.
    pub max_events_per_s: Option<f64>,
    /// User and system seconds of the process while the measured rows came, the sessions included.
    pub cpu_s: Option<f64>,
    pub cpu_s_per_million: Option<f64>,
    /// Of the machine's cores.
    pub cpu_share: Option<f64>,
    /// `cpu_s` to that of `async-timestamp` in the same round; of hot state to that of `ram-hot`.
    pub cpu_ratio: Option<f64>,
    /// Keys that a row waited for, by epochs of the last view.
    pub cold_keys_per_epoch: Option<f64>,
    /// Of the keys that rows brought, those that a row waited for or that were read ahead in time.
    pub cold_share: Option<f64>,
    /// Requests to the store for each of them: few if blocks near each other are read at once.
    pub gets_per_cold_key: Option<f64>,
    /// Of the last 256 epochs with rows the share in which a row waited for a read: of the operator with the largest.
    pub late_epochs: Option<f64>,
    pub epochs: Option<u64>,
    pub rounds: Option<u64>,
    /// Keys that were announced.
    pub hinted: Option<u64>,
    /// Bytes of hints, as they were sent to tasks, to bytes of rows.
    pub hint_bytes_ratio: Option<f64>,
    /// Keys that were read ahead, and those of them that had not arrived when a row needed them.
    pub prefetched: Option<u64>,
    pub late: Option<u64>,
    /// The share of them that no row needed; null where there are none.
    pub unused_hint_ratio: Option<f64>,
    pub store_gets: Option<u64>,
    pub store_puts: Option<u64>,
    /// Requests of all kinds at the profile's prices, commits included.
    pub dollars_per_million: Option<f64>,
    pub state_mb: f64,
    pub cache_mb: f64,
    /// Of it, what hints may need at most, or half of it if they may need more: the caches have it less.
    pub hints_mb: f64,
    pub output_rows: i64,
    pub output_hash: String,
}

pub fn print_header() {
    println!(
        "{:7} {:15} {:15} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>7} {:>6} {:>8} {:>7} {:>6} {:>6} {:>9} output_hash",
        "query",
        "profile",
        "mode",
        "rate",
        "v_p50ms",
        "v_p99ms",
        "v_p999ms",
        "s_p50ms",
        "s_p99ms",
        "s_p999ms",
        "max/s",
        "cpu_s/M",
        "cpu_%",
        "cold/ep",
        "late",
        "gets",
        "rounds",
        "hint_b",
        "unused",
        "$/million"
    );
}

impl Cost {
    /// Of nothing but who and what.
    pub fn of(world: &World, setting: &Setting, mode: &str, rate: f64) -> Cost {
        Cost {
            query: world.query.name.to_owned(),
            profile: setting.profile_name.clone(),
            mode: mode.to_owned(),
            runs: 1,
            disk_tier: setting.disk_tier,
            skew: setting.skew,
            state_to_cache: setting.state_to_cache,
            threshold: setting.threshold,
            rate,
            state_mb: world.state as f64 / 1e6,
            ..Cost::default()
        }
    }

    pub fn with_latencies(self, latencies: &Latencies) -> Cost {
        let (visible, waited) =
            (percentiles(&latencies.visible), percentiles(&latencies.state_wait));
        Cost {
            rows: latencies.rows(),
            visible_p50_ms: visible.p50,
            visible_p99_ms: visible.p99,
            visible_p999_ms: visible.p999,
            state_wait_p50_ms: waited.p50,
            state_wait_p99_ms: waited.p99,
            state_wait_p999_ms: waited.p999,
            ..self
        }
    }

    /// After [`Cost::with_latencies`]; of a query with so many cold state caches.
    pub fn with_measured(self, measured: &Measured, stats: &SimStats, caches: usize) -> Cost {
        let operators = measured.operators;
        let cold = operators.demand + operators.in_time;
        let per_row = |sum: f64| sum / self.rows.max(1) as f64;
        Cost {
            cpu_s: Some(measured.usage.cpu_s()),
            cpu_s_per_million: Some(per_row(measured.usage.cpu_s() * 1e6)),
            cpu_share: Some(measured.usage.cpu_share()),
            cold_keys_per_epoch: Some(operators.demand as f64 / measured.epochs.max(1) as f64),
            cold_share: Some(per_row(cold as f64) / caches.max(1) as f64),
            gets_per_cold_key: (cold > 0).then(|| stats.gets as f64 / cold as f64),
            late_epochs: measured.late_epochs,
            epochs: Some(measured.epochs),
            rounds: Some(stats.rounds),
            hinted: Some(operators.hinted),
            hint_bytes_ratio: Some(per_row(operators.hint_bytes as f64) / ROW_BYTES as f64),
            prefetched: Some(operators.prefetched),
            late: Some(operators.late),
            unused_hint_ratio: (operators.prefetched > 0)
                .then(|| operators.unused as f64 / operators.prefetched as f64),
            store_gets: Some(stats.gets),
            store_puts: Some(stats.puts),
            dollars_per_million: Some(per_row(stats.dollars * 1e6)),
            ..self
        }
    }

    pub fn with_output(self, digest: Digest) -> Cost {
        let output_hash = format!("{:016x}", digest.hash);
        Cost { output_rows: digest.rows, output_hash, ..self }
    }

    /// What a perfect prefetcher would have had in the same run as this one.
    pub fn bound(&self, latencies: &Latencies) -> Cost {
        let bare = Cost {
            mode: BOUND.to_owned(),
            max_events_per_s: None,
            cpu_s: None,
            cpu_s_per_million: None,
            cpu_share: None,
            cpu_ratio: None,
            cold_keys_per_epoch: None,
            cold_share: None,
            gets_per_cold_key: None,
            late_epochs: None,
            epochs: None,
            rounds: None,
            hinted: None,
            hint_bytes_ratio: None,
            prefetched: None,
            late: None,
            unused_hint_ratio: None,
            store_gets: None,
            store_puts: None,
            dollars_per_million: None,
            ..self.clone()
        };
        bare.with_latencies(latencies)
    }

    /// Of each number its median over the runs; of other fields the first run's.
    pub fn median(runs: &[Cost]) -> Result<Cost, String> {
        let lines = runs.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>();
        let lines = lines.map_err(|e| e.to_string())?;
        let first = lines.first().and_then(Value::as_object).ok_or("there are no runs")?;
        let of_all = |name: &String| lines.iter().filter_map(|l| l.get(name)).collect::<Vec<_>>();
        let fields: Map<String, Value> =
            first.keys().map(|name| (name.clone(), median(&of_all(name)))).collect();
        let cost: Cost = serde_json::from_value(fields.into()).map_err(|e| e.to_string())?;
        Ok(Cost { run: None, runs: runs.len() as u32, ..cost })
    }

    pub fn print(&self) -> Result<(), String> {
        let disk = if self.disk_tier { "+disk" } else { "" };
        let mode = self.candidate.as_ref().map_or_else(String::new, |of| format!("={of}"));
        let or_dash = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |v| format!("{v:.digits$}"))
        };
        let whole = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |v| v.to_string());
        println!(
            "{:7} {:15} {:15} {:>8.0} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8} {:>8} {:>6} {:>7} {:>6} {:>8} {:>7} {:>6} {:>6} {:>9} {}",
            self.query,
            format!("{}{disk}", self.profile),
            format!("{}{mode}{}", self.mode, self.load.suffix()),
            self.rate,
            self.visible_p50_ms,
            self.visible_p99_ms,
            self.visible_p999_ms,
            self.state_wait_p50_ms,
            self.state_wait_p99_ms,
            self.state_wait_p999_ms,
            or_dash(self.max_events_per_s, 0),
            or_dash(self.cpu_s_per_million, 1),
            or_dash(self.cpu_share.map(|share| share * 100.0), 0),
            or_dash(self.cold_keys_per_epoch, 1),
            or_dash(self.late_epochs, 2),
            whole(self.store_gets),
            whole(self.rounds),
            or_dash(self.hint_bytes_ratio, 3),
            or_dash(self.unused_hint_ratio, 3),
            or_dash(self.dollars_per_million, 2),
            self.output_hash
        );
        self.print_json()
    }

    pub fn print_json(&self) -> Result<(), String> {
        println!("{}", serde_json::to_string(self).map_err(|e| e.to_string())?);
        Ok(())
    }
}

/// Of numbers; of whole ones a whole one. Nulls do not count.
fn median(values: &[&Value]) -> Value {
    let mut numbers: Vec<f64> = values.iter().filter_map(|v| v.as_f64()).collect();
    if numbers.is_empty() {
        return values.first().map_or(Value::Null, |v| (*v).clone());
    }
    numbers.sort_by(f64::total_cmp);
    let (low, high) = (numbers[(numbers.len() - 1) / 2], numbers[numbers.len() / 2]);
    match values.iter().all(|v| v.is_i64() || v.is_u64() || v.is_null()) {
        true => Value::from(low as i64),
        false => Value::from((low + high) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_taken_of_each_number() {
        let run = |run: u32, p50: f64, gets: Option<u64>, unused: Option<f64>| Cost {
            run: Some(run),
            visible_p50_ms: p50,
            store_gets: gets,
            unused_hint_ratio: unused,
            output_hash: "a".to_owned(),
            ..Cost::default()
        };
        let runs = [
            run(0, 5.0, Some(7), None),
            run(1, 1.0, Some(9), Some(0.5)),
            run(2, 3.0, Some(8), None),
        ];
        let median = Cost::median(&runs).unwrap();
        assert_eq!((median.visible_p50_ms, median.store_gets), (3.0, Some(8)));
        assert_eq!((median.run, median.runs, median.unused_hint_ratio), (None, 3, Some(0.5)));
        assert_eq!(median.output_hash, "a");
        let two = Cost::median(&runs[..2]).unwrap();
        assert_eq!((two.visible_p50_ms, two.store_gets), (3.0, Some(7)));
        assert!(Cost::median(&[]).is_err());
    }
}
