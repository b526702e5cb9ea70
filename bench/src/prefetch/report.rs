//! One mode's result: a table row and a JSON line.

use millrace_executor::blackhole::Digest;
use millrace_storage::sim::SimStats;
use serde::Serialize;

use super::load::Measured;
use super::modes::Mode;
use super::world::World;

/// Names are those of the JSON line; what is not measured is null.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Cost {
    pub query: String,
    pub profile: String,
    pub mode: String,
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
    pub cpu_s: f64,
    /// Keys that a row waited for, by epochs of the last view.
    pub cold_keys_per_epoch: f64,
    /// The share of epochs with such a read; not measured.
    pub late_epochs: Option<f64>,
    pub epochs: u64,
    pub rounds: u64,
    /// Bytes of hints to bytes of rows; not measured.
    pub hint_bytes_ratio: Option<f64>,
    /// Keys that were read ahead, and those of them that had not arrived when a row needed them.
    pub prefetched: u64,
    pub late: u64,
    /// The share of them that no row needed; null where there are none.
    pub unused_hint_ratio: Option<f64>,
    pub store_gets: u64,
    pub store_puts: u64,
    /// Requests of all kinds at the profile's prices, commits included.
    pub dollars_per_million: f64,
    pub state_mb: f64,
    pub cache_mb: f64,
    pub output_rows: i64,
    pub output_hash: String,
}

pub fn print_header() {
    println!(
        "{:7} {:10} {:15} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>7} {:>8} {:>7} {:>9} output_hash",
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
        "cpu_s",
        "cold/ep",
        "gets",
        "rounds",
        "$/million"
    );
}

impl Cost {
    pub fn of(
        world: &World,
        mode: &Mode,
        rate: f64,
        measured: &Measured,
        stats: &SimStats,
        digest: Digest,
    ) -> Cost {
        let (visible, waited) = (measured.latencies.visible(), measured.latencies.state_wait());
        let operators = measured.operators;
        Cost {
            query: world.query.name.to_owned(),
            mode: mode.name.to_owned(),
            rate,
            rows: measured.rows,
            visible_p50_ms: visible.p50,
            visible_p99_ms: visible.p99,
            visible_p999_ms: visible.p999,
            state_wait_p50_ms: waited.p50,
            state_wait_p99_ms: waited.p99,
            state_wait_p999_ms: waited.p999,
            cpu_s: measured.usage.cpu_s(),
            cold_keys_per_epoch: operators.missed as f64 / measured.epochs.max(1) as f64,
            prefetched: operators.prefetched,
            late: operators.late,
            unused_hint_ratio: (operators.prefetched > 0)
                .then(|| operators.unused as f64 / operators.prefetched as f64),
            epochs: measured.epochs,
            rounds: stats.rounds,
            store_gets: stats.gets,
            store_puts: stats.puts,
            dollars_per_million: stats.dollars * 1e6 / measured.rows.max(1) as f64,
            state_mb: world.state as f64 / 1e6,
            cache_mb: world.cache as f64 / 1e6,
            output_rows: digest.rows,
            output_hash: format!("{:016x}", digest.hash),
            ..Cost::default()
        }
    }

    pub fn print(&self) -> Result<(), String> {
        println!(
            "{:7} {:10} {:15} {:>8.0} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.0} {:>7.2} {:>7.1} {:>8} {:>7} {:>9.2} {}",
            self.query,
            self.profile,
            self.mode,
            self.rate,
            self.visible_p50_ms,
            self.visible_p99_ms,
            self.visible_p999_ms,
            self.state_wait_p50_ms,
            self.state_wait_p99_ms,
            self.state_wait_p999_ms,
            self.max_events_per_s.unwrap_or_default(),
            self.cpu_s,
            self.cold_keys_per_epoch,
            self.store_gets,
            self.rounds,
            self.dollars_per_million,
            self.output_hash
        );
        println!("{}", serde_json::to_string(self).map_err(|e| e.to_string())?);
        Ok(())
    }
}
