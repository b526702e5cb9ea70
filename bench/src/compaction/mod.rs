//! What a client notices of compaction: nothing is merged, a compactor process merges, or the compute process does it.
//!
//! Leader, frontend, compute process and compactor are processes of their own, over one directory. The compute process
//! runs on one core, and everything else, this program included, on another one. One connection inserts rows at a fixed
//! rate, whose view has so many groups, and is written so often, that its runs are merged again and again. Another one
//! changes a row of a small table and then reads a view over it, as `millrace-bench isolation` does.
//!
//! | mode | who merges |
//! |---|---|
//! | `none` | nobody: the compactor process is given the tasks, and its reads of runs are never answered |
//! | `compactor` | the compactor process |
//! | `compute` | the compute process: there is no compactor |
//!
//! All modes insert, flush and commit the same; the view has its groups in memory and reads no runs, so that it costs
//! nothing that they become many where nobody merges them. A mode in which somebody else has merged than should have,
//! or nobody, is an error, and so is a view that is not its query.

pub mod process;

use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_postgres::Client;

use self::process::{Ground, Kind, Process};
use crate::cores;
use crate::isolation::{self, Ratios, Times};
use crate::nexmark::{connect, execute, temporary};
use crate::sums::{self, only_row};

/// Rows of a statement of the load.
const LOAD_ROWS: u64 = 50_000;
/// Sums of the view of many groups.
const SUMS: u64 = 16;
/// Between two statements that insert.
const TICK: Duration = Duration::from_millis(250);
/// What is not measured after the inserts have begun.
const WARM_UP: Duration = Duration::from_secs(3);
/// Heartbeats, once a second, tell what processes have read.
const TOLD: Duration = Duration::from_millis(2_500);
/// The slowest of a hundred may be so much slower with a compactor than with nothing merged.
const GOAL: f64 = 1.1;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Groups of the view that is inserted under
    #[arg(long, default_value_t = 100_000)]
    groups: u64,
    /// Rows a second that are inserted
    #[arg(long, default_value_t = 4_000)]
    rate: u64,
    /// Committed rows of a job in memory beyond which they are written as runs
    #[arg(long, default_value = "1MB")]
    flush_size: String,
    /// Seconds measured in each mode
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// How often each mode is measured, by turns; the medians are told
    #[arg(long, default_value_t = 3)]
    runs: u32,
    /// A third of the groups, eight seconds, one run
    #[arg(long)]
    quick: bool,
    /// Where the stores lie; a temporary directory by default
    #[arg(long)]
    dir: Option<std::path::PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    None,
    Compactor,
    Compute,
}

impl Mode {
    const ALL: [Mode; 3] = [Mode::None, Mode::Compactor, Mode::Compute];

    fn name(self) -> &'static str {
        match self {
            Mode::None => "none",
            Mode::Compactor => "compactor",
            Mode::Compute => "compute",
        }
    }
}

/// The cores of the compute process and of everything else; `None`: there is only one.
#[derive(Clone, Copy, Debug)]
struct Pinned {
    compute: Option<usize>,
    others: Option<usize>,
}

impl Pinned {
    /// This process runs on its core from now on.
    fn pin() -> Pinned {
        let pinned = cores::allowed().map_err(|e| e.to_string()).and_then(|cores| {
            let [compute, others, ..] = cores[..] else {
                return Err(format!("there are {} cores", cores.len()));
            };
            cores::pin_process(others).map_err(|e| e.to_string())?;
            Ok(Pinned { compute: Some(compute), others: Some(others) })
        });
        pinned.unwrap_or_else(|why| {
            eprintln!("processes are not pinned to cores: {why}");
            Pinned { compute: None, others: None }
        })
    }
}

/// One mode. Names are those of the JSON line.
#[derive(Clone, Debug, Serialize)]
struct Measured {
    mode: &'static str,
    pinned: bool,
    runs: usize,
    samples: usize,
    update: Times,
    read: Times,
    update_ratio: Option<Ratios>,
    read_ratio: Option<Ratios>,
    inserted_per_s: f64,
    /// Requests for runs that were merged.
    compactor_reads: u64,
    compute_reads: u64,
    compute_cpu_s: f64,
    compactor_cpu_s: f64,
}

/// One ratio, and what it should be. Names are those of the JSON line.
#[derive(Clone, Debug, Serialize)]
struct Bar {
    bar: &'static str,
    value: f64,
    at_most: f64,
    met: bool,
}

pub async fn run(args: &Args) -> Result<(), String> {
    let mut args = args.clone();
    if args.quick {
        args.groups /= 3;
        (args.seconds, args.runs) = (8, 1);
    }
    if args.groups == 0 || args.rate == 0 || args.seconds == 0 || args.runs == 0 {
        return Err("there must be groups, rows, time and a run".to_owned());
    }
    let flush = millrace::config::size("--flush-size", &args.flush_size);
    let flush = flush.map_err(|e| e.to_string())?;
    let pinned = Pinned::pin();
    let mut all: Vec<(Mode, Measured)> = Vec::new();
    for _ in 0..args.runs {
        for mode in Mode::ALL {
            all.push((mode, measure(&args, mode, flush, pinned).await?));
        }
    }
    let of = |mode| {
        let runs = all.iter().filter(|(of, _)| *of == mode).map(|(_, run)| run);
        median(runs.collect::<Vec<&Measured>>())
    };
    report(Mode::ALL.into_iter().filter_map(of).collect())
}

/// The median of each number.
fn median(runs: Vec<&Measured>) -> Option<Measured> {
    let first = *runs.first()?;
    let of = |what: fn(&Measured) -> f64| {
        let mut sorted: Vec<f64> = runs.iter().map(|run| what(run)).collect();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = ((sorted.len() - 1) / 2, sorted.len() / 2);
        (sorted[low] + sorted[high]) / 2.0
    };
    Some(Measured {
        runs: runs.len(),
        samples: runs.iter().map(|run| run.samples).sum(),
        update: Times { p50_ms: of(|m| m.update.p50_ms), p99_ms: of(|m| m.update.p99_ms) },
        read: Times { p50_ms: of(|m| m.read.p50_ms), p99_ms: of(|m| m.read.p99_ms) },
        inserted_per_s: of(|m| m.inserted_per_s),
        compactor_reads: of(|m| m.compactor_reads as f64) as u64,
        compute_reads: of(|m| m.compute_reads as f64) as u64,
        compute_cpu_s: of(|m| m.compute_cpu_s),
        compactor_cpu_s: of(|m| m.compactor_cpu_s),
        ..first.clone()
    })
}

fn report(mut all: Vec<Measured>) -> Result<(), String> {
    let Some(none) = all.first().cloned() else { return Ok(()) };
    for measured in all.iter_mut().skip(1) {
        measured.update_ratio = Some(measured.update.over(none.update));
        measured.read_ratio = Some(measured.read.over(none.read));
    }
    println!(
        "{:9} {:>6} {:>7} {:>19} {:>19} {:>13} {:>13} {:>8} {:>11} {:>11} {:>11} {:>11}",
        "mode",
        "pinned",
        "samples",
        "update p50/p99 ms",
        "read p50/p99 ms",
        "update ratio",
        "read ratio",
        "rows/s",
        "reads_compr",
        "reads_compu",
        "cpu_compu_s",
        "cpu_compr_s"
    );
    for measured in &all {
        print(measured)?;
    }
    for bar in all.iter().filter(|m| m.mode == Mode::Compactor.name()).flat_map(bars) {
        let met = if bar.met { "met" } else { "NOT MET" };
        println!("{}: {:.2} (at most {}: {met})", bar.bar, bar.value, bar.at_most);
        println!("{}", serde_json::to_string(&bar).map_err(|e| e.to_string())?);
    }
    Ok(())
}

fn bars(compactor: &Measured) -> Vec<Bar> {
    let bar = |bar, ratio: Option<Ratios>| {
        let value = ratio?.p99;
        Some(Bar { bar, value, at_most: GOAL, met: value <= GOAL })
    };
    let update = bar("p99 of an update, compactor to none", compactor.update_ratio);
    let read = bar("p99 of a fresh read, compactor to none", compactor.read_ratio);
    update.into_iter().chain(read).collect()
}

fn print(measured: &Measured) -> Result<(), String> {
    let times = |t: Times| format!("{:.2} / {:.2}", t.p50_ms, t.p99_ms);
    let ratios =
        |r: Option<Ratios>| r.map_or(String::new(), |r| format!("{:.2} / {:.2}", r.p50, r.p99));
    println!(
        "{:9} {:>6} {:>7} {:>19} {:>19} {:>13} {:>13} {:>8.0} {:>11} {:>11} {:>11.2} {:>11.2}",
        measured.mode,
        measured.pinned,
        measured.samples,
        times(measured.update),
        times(measured.read),
        ratios(measured.update_ratio),
        ratios(measured.read_ratio),
        measured.inserted_per_s,
        measured.compactor_reads,
        measured.compute_reads,
        measured.compute_cpu_s,
        measured.compactor_cpu_s,
    );
    println!("{}", serde_json::to_string(measured).map_err(|e| e.to_string())?);
    Ok(())
}

/// The processes of one mode.
struct Cluster {
    client: Client,
    /// Of who inserts.
    other: Client,
    compute: Process,
    compactor: Option<Process>,
    _others: [Process; 2],
}

impl Cluster {
    async fn start(ground: &Ground<'_>, mode: Mode, pinned: Pinned) -> Result<Cluster, String> {
        let other = Kind { core: pinned.others, ..Kind::default() };
        let meta = ground.start(Kind { role: "meta", ..other }).await?;
        let other = Kind { meta: Some(&meta.address), ..other };
        let compactor = Kind { role: "compactor", deaf: mode == Mode::None, ..other };
        let compactor = match mode {
            Mode::None | Mode::Compactor => Some(ground.start(compactor).await?),
            Mode::Compute => None,
        };
        let compute = Kind { role: "compute", core: pinned.compute, ..other };
        let compute = ground.start(compute).await?;
        let frontend = ground.start(Kind { role: "frontend", ..other }).await?;
        let port = frontend.port()?;
        let (client, other) = (connect(port).await?, connect(port).await?);
        Ok(Cluster { client, other, compute, compactor, _others: [meta, frontend] })
    }

    /// Requests for runs to be merged that processes of a role have been answered.
    async fn merge_reads(&self, role: &str) -> Result<u64, String> {
        let sql = format!(
            "SELECT coalesce(sum(r.served), 0)::bigint FROM millrace_catalog.requests r \
             JOIN millrace_catalog.processes p ON p.incarnation = r.worker \
             WHERE r.class = 'compaction' AND '{role}' = ANY(p.roles)"
        );
        self.number(&sql).await
    }

    /// Runs that merges have made, and that no later merge has replaced.
    async fn merged_runs(&self) -> Result<u64, String> {
        self.number("SELECT count(*) FROM millrace_catalog.runs WHERE level > 0").await
    }

    async fn number(&self, sql: &str) -> Result<u64, String> {
        let read = only_row(&self.client, sql).await?;
        let number = read.first().cloned().flatten().and_then(|n| n.parse().ok());
        number.ok_or_else(|| format!("no number: {read:?}"))
    }

    /// The same of the compactor and of the compute process.
    async fn all_merge_reads(&self) -> Result<[u64; 2], String> {
        Ok([self.merge_reads("compactor").await?, self.merge_reads("compute").await?])
    }

    /// Seconds of processor time of the compactor and of the compute process.
    fn cpu_s(&self) -> [f64; 2] {
        [self.compactor.as_ref().map_or(0.0, Process::cpu_s), self.compute.cpu_s()]
    }

    async fn prepare(&self, args: &Args) -> Result<(), String> {
        let client = &self.client;
        execute(client, "SET read_wait_timeout = '1h'").await?;
        isolation::prepare_small(client).await?;
        execute(client, "CREATE TABLE events (k BIGINT, v BIGINT)").await?;
        execute(client, &sums::create_view("churn", "events", SUMS)).await?;
        for from in (0..args.groups).step_by(LOAD_ROWS as usize) {
            let to = (from + LOAD_ROWS).min(args.groups) - 1;
            execute(client, &insert(args, from, to)).await?;
        }
        execute(client, "FLUSH").await
    }
}

/// Rows of groups in no order.
fn insert(args: &Args, from: u64, to: u64) -> String {
    let (groups, value) = (args.groups, sums::value());
    format!(
        "INSERT INTO events SELECT x::bigint * 1000003 % {groups}, {value} \
         FROM generate_series({from}, {to}) AS s(x)"
    )
}

/// Whether those have merged that should have. `merged`: runs that merges have made. What the compute process merges it
/// may have in memory.
fn check_merges(mode: Mode, compactor: u64, compute: u64, merged: u64) -> Result<(), String> {
    let as_it_should = match mode {
        Mode::None => compactor == 0 && compute == 0 && merged == 0,
        Mode::Compactor => compactor > 0 && compute == 0 && merged > 0,
        Mode::Compute => compactor == 0 && merged > 0,
    };
    match as_it_should {
        true => Ok(()),
        false => Err(format!(
            "{}: runs to be merged were read {compactor} times by the compactor and {compute} times by the compute process, \
             and {merged} runs were made; where nothing is merged, measure for longer, or with a smaller --flush-size",
            mode.name()
        )),
    }
}

async fn measure(
    args: &Args,
    mode: Mode,
    flush_bytes: usize,
    pinned: Pinned,
) -> Result<Measured, String> {
    let dir = temporary(args.dir.as_deref())?;
    let ground = Ground { dir: dir.path(), flush_bytes };
    let cluster = Cluster::start(&ground, mode, pinned).await?;
    cluster.prepare(args).await?;
    let before = cluster.all_merge_reads().await?;
    let length = Duration::from_secs(args.seconds);
    let until = Instant::now() + WARM_UP + length;
    let sample = async {
        tokio::time::sleep_until(until - length).await;
        let before = cluster.cpu_s();
        let times = isolation::sample(&cluster.client, length).await?;
        let after = cluster.cpu_s();
        Ok::<_, String>((times, [after[0] - before[0], after[1] - before[1]]))
    };
    let (inserted, sampled) = futures::join!(load(args, &cluster.other, until), sample);
    let ((update, read), [compactor_cpu_s, compute_cpu_s]) = sampled?;
    tokio::time::sleep(TOLD).await;
    let after = cluster.all_merge_reads().await?;
    let [compactor_reads, compute_reads] = [after[0] - before[0], after[1] - before[1]];
    let merged = cluster.merged_runs().await?;
    check_merges(mode, compactor_reads, compute_reads, merged)?;
    let churn = ("churn", "events", SUMS);
    sums::check_view(&cluster.client, churn, "count(DISTINCT k)").await?;
    Ok(Measured {
        mode: mode.name(),
        pinned: pinned.compute.is_some(),
        runs: 1,
        samples: update.len(),
        update: Times::of(update),
        read: Times::of(read),
        update_ratio: None,
        read_ratio: None,
        inserted_per_s: inserted? as f64 / (WARM_UP + length).as_secs_f64(),
        compactor_reads,
        compute_reads,
        compute_cpu_s,
        compactor_cpu_s,
    })
}

/// Inserts rows at a fixed rate, as far as the cluster takes them. How many it were.
async fn load(args: &Args, client: &Client, until: Instant) -> Result<u64, String> {
    let rows = (args.rate * TICK.as_millis() as u64 / 1_000).max(1);
    let mut ticks = tokio::time::interval(TICK);
    // What is late is made up for: all modes insert the same.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut next = args.groups;
    while Instant::now() < until {
        ticks.tick().await;
        execute(client, &insert(args, next, next + rows - 1)).await?;
        next += rows;
    }
    Ok(next - args.groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(p99_ms: f64) -> Measured {
        let times = Times { p50_ms: 1.0, p99_ms };
        Measured {
            mode: Mode::Compactor.name(),
            pinned: true,
            runs: 1,
            samples: 10,
            update: times,
            read: times,
            update_ratio: None,
            read_ratio: None,
            inserted_per_s: 1.0,
            compactor_reads: 1,
            compute_reads: 0,
            compute_cpu_s: 1.0,
            compactor_cpu_s: 1.0,
        }
    }

    #[test]
    fn who_merges_is_checked() {
        for (mode, compactor, compute, merged) in
            [(Mode::None, 0, 0, 0), (Mode::Compactor, 3, 0, 1), (Mode::Compute, 0, 3, 1)]
        {
            assert!(check_merges(mode, compactor, compute, merged).is_ok(), "{mode:?}");
            assert!(check_merges(mode, compactor + 1, compute + 1, 1).is_err(), "{mode:?}");
        }
        assert!(check_merges(Mode::Compactor, 0, 0, 0).is_err(), "nothing was merged");
        assert!(check_merges(Mode::Compute, 0, 0, 0).is_err(), "nothing was merged");
    }

    #[test]
    fn bars_are_of_the_slowest_of_a_hundred() {
        let none = measured(10.0);
        for (p99_ms, met) in [(11.0, true), (12.0, false)] {
            let mut own = measured(p99_ms);
            own.update_ratio = Some(own.update.over(none.update));
            own.read_ratio = Some(own.read.over(none.read));
            assert!(bars(&own).iter().all(|bar| bar.met == met), "{p99_ms}");
            assert_eq!(bars(&own).len(), 2);
        }
    }

    #[test]
    fn of_runs_the_median_is_told() {
        let runs = [measured(1.0), measured(9.0), measured(2.0)];
        let told = median(runs.iter().collect()).unwrap();
        assert_eq!((told.update.p99_ms, told.runs, told.samples), (2.0, 3, 30));
        assert!(median(Vec::new()).is_none());
    }
}
