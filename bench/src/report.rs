//! One result: a table row for people and a JSON line for programs.

use serde::Serialize;

/// A measured Nexmark run. Names are those of the JSON line.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NexmarkResult {
    pub query: String,
    pub sink: String,
    pub events: u64,
    pub wall_s: f64,
    /// User plus system seconds of the whole process, generator included, through the last commit.
    pub cpu_s: f64,
    pub user_s: f64,
    pub system_s: f64,
    pub events_per_s: f64,
    pub events_per_cpu_s: f64,
    pub peak_rss_mb: f64,
    pub store_puts: u64,
    pub store_gets: u64,
    pub store_bytes_written: u64,
    pub barrier_p50_ms: f64,
    pub barrier_p99_ms: f64,
    pub output_rows: i64,
    /// Order-independent hash of the output's rows.
    pub output_hash: String,
}

impl NexmarkResult {
    pub fn print_header() {
        println!(
            "{:5} {:9} {:>10} {:>8} {:>8} {:>11} {:>11} {:>8} {:>6} {:>6} {:>9} {:>8} {:>8} {:>10} output_hash",
            "query",
            "sink",
            "events",
            "wall_s",
            "cpu_s",
            "events/s",
            "events/cpu",
            "rss_mb",
            "puts",
            "gets",
            "written",
            "b_p50ms",
            "b_p99ms",
            "rows"
        );
    }

    pub fn print_row(&self) {
        println!(
            "{:5} {:9} {:>10} {:>8.2} {:>8.2} {:>11.0} {:>11.0} {:>8.0} {:>6} {:>6} {:>8.1}M {:>8.1} {:>8.1} {:>10} {}",
            self.query,
            self.sink,
            self.events,
            self.wall_s,
            self.cpu_s,
            self.events_per_s,
            self.events_per_cpu_s,
            self.peak_rss_mb,
            self.store_puts,
            self.store_gets,
            self.store_bytes_written as f64 / 1e6,
            self.barrier_p50_ms,
            self.barrier_p99_ms,
            self.output_rows,
            self.output_hash
        );
    }

    pub fn print_json(&self) {
        match serde_json::to_string(self) {
            Ok(line) => println!("{line}"),
            Err(e) => eprintln!("cannot print the result as JSON: {e}"),
        }
    }
}
