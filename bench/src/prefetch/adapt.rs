//! How hints follow what changes: first the keys of the rows, then the store.
//!
//! Rows arrive at a fixed rate under a join by a key that a projection makes. In the first phase the projection gives
//! few keys, whose state is soon in memory. With the second it gives keys of the whole table, cold ones. With the third
//! the store gets faster. Every second it is noted what rows waited for and what was read ahead.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use millrace_executor::lookahead::sketch::SketchOptions;

use super::args::{Setting, require};
use super::arrivals::{Arrivals, record};
use super::load::{Reader, Sessions};
use super::modes::{self, Mode};
use super::operators::{Operators, places};
use super::queries::{ADAPT, COLD_ROWS, Keys};
use super::times::{Latencies, Recording, RowTimes, Sent, percentiles};
use super::verdict::{self, Outcome, Second, Verdict};
use super::world::{Running, World};
use crate::chart::{self, Line, Panel, XScale, YScale};

/// With `--quick`.
const QUICK_PHASE: f64 = 10.0;
const QUICK_KEYS: u64 = 50_000;
/// A phase should be longer than the time in which all is to be normal again; in a shorter one that time ends with it.
const LEAST_PHASE: f64 = 2.0;
const LEAST_KEYS: u64 = 2_000;

/// What `--help` begins with.
pub const ABOUT: &str = "\
Rows arrive at a fixed rate under a join by a key that a projection makes, over a simulated store. After 40 s the
projection gives keys of the whole table, whose state is cold, instead of a few whose state is in memory; after 80 s the
store gets faster. The state is built before.

Printed is a time-line by the second, as a table and as JSON lines: rows; keys that rows had to wait for (`demand`,
`late` ones among them); keys read ahead that were there when their rows came (`in_time`), that were not yet (`late`)
and that no row needed (`unused`); where rows are looked at (`place`); milliseconds until rows are visible. At the end:
whether unannounced reads are back to where they were within 5 s of the first change, and whether nothing rises with the
second. The last line counts the checks and names those that are not met (`missed`): as with the bars of
`millrace-bench prefetch`, that is told and no error.";

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The store at first: nvme, dfs, s3-express or s3
    #[arg(long, default_value = "s3-express")]
    profile: String,
    /// The store in the third phase
    #[arg(long, default_value = "dfs")]
    faster: String,
    /// How state is accessed: lookahead, or another mode of `millrace-bench prefetch` that is run
    #[arg(long, default_value = "lookahead")]
    mode: String,
    /// Rows a second
    #[arg(long, default_value_t = 500.0)]
    rate: f64,
    /// Seconds of each of the three phases (with --quick 10)
    #[arg(long, default_value_t = 40.0)]
    phase: f64,
    /// Keys of the table with state (with --quick 50000)
    #[arg(long, default_value_t = 200_000)]
    keys: u64,
    /// How many times larger the state is than the caches
    #[arg(long, default_value_t = 4)]
    state_to_cache: u64,
    /// Sessions that insert rows
    #[arg(long, default_value_t = 4)]
    sessions: usize,
    #[arg(long, default_value_t = 1)]
    parallelism: usize,
    /// Writes a chart of the time-line into this directory
    #[arg(long, value_name = "DIRECTORY")]
    svg: Option<PathBuf>,
    /// Half a minute instead of two, and fewer keys
    #[arg(long)]
    quick: bool,
}

/// What is run, checked.
struct Order {
    mode: Mode,
    setting: Setting,
    faster: modes::NamedProfile,
    phase: f64,
    keys: u64,
}

pub async fn run(args: &Args) -> Result<(), String> {
    let order = args.order()?;
    let world = World::build(&ADAPT, order.keys, args.parallelism, false).await?;
    let running = world.copy(&order.mode, &order.setting, 0).await?;
    let reader = Reader::open(&world, &running).await?;
    let keys = Keys::in_turn(order.keys);
    let sessions = Sessions::open(&keys, &running, args.sessions).await?;
    let seconds = observe(args, &order, &running, &sessions).await?;
    reader.close().await?;
    drop(sessions);
    running.discard().await?;
    print(&seconds)?;
    if let Some(directory) = &args.svg {
        draw(directory, args, &order, &seconds)?;
    }
    let verdicts = verdict::of(&seconds, order.phase as usize);
    verdict::print(&verdicts)?;
    outcome(args, &verdicts).print()
}

fn outcome(args: &Args, verdicts: &[Verdict]) -> Outcome {
    let of = Outcome {
        mode: args.mode.clone(),
        profile: args.profile.clone(),
        faster: args.faster.clone(),
        rate: args.rate,
        checks: 0,
        met: 0,
        missed: Vec::new(),
    };
    Outcome::with(verdicts, of)
}

impl Args {
    fn order(&self) -> Result<Order, String> {
        let (phase, keys) = match self.quick {
            true => (self.phase.min(QUICK_PHASE), self.keys.min(QUICK_KEYS)),
            false => (self.phase, self.keys),
        };
        // Whole seconds, as the time-line has.
        let phase = phase.round();
        require(phase >= LEAST_PHASE && phase.is_finite(), || {
            format!("--phase must be at least {LEAST_PHASE} seconds")
        })?;
        require(keys >= LEAST_KEYS, || format!("--keys must be at least {LEAST_KEYS}"))?;
        require(self.rate >= 1.0 && self.rate.is_finite(), || {
            "--rate must be at least 1 row a second".to_owned()
        })?;
        require(self.state_to_cache >= 1, || "--state-to-cache must be at least 1".to_owned())?;
        require(self.sessions > 0, || "--sessions must be positive".to_owned())?;
        require((1..=64).contains(&self.parallelism), || {
            "--parallelism must be 1 to 64".to_owned()
        })?;
        let (profile_name, profile) = modes::named_profile(&self.profile)?;
        let setting = Setting {
            profile_name,
            profile,
            disk_tier: false,
            skew: 0.0,
            state_to_cache: self.state_to_cache as f64,
            threshold: SketchOptions::default().threshold,
        };
        let mode = Mode::by_name(&self.mode)?;
        require(mode.input_of().is_none(), || {
            format!("--mode {}: the plan of the query has no such place", mode.name)
        })?;
        Ok(Order { mode, setting, faster: modes::named_profile(&self.faster)?, phase, keys })
    }
}

/// Sends the rows of all phases and notes what becomes of them.
async fn observe(
    args: &Args,
    order: &Order,
    running: &Running,
    sessions: &Sessions,
) -> Result<Vec<Second>, String> {
    let count = |phases: f64| (args.rate * order.phase * phases) as u64;
    let begun = Instant::now();
    let hot = Arrivals::new(begun, args.rate, 0, count(1.0));
    let cold = Arrivals::new(hot.end(), args.rate, COLD_ROWS, count(2.0));
    let sending = async {
        let mut sent: Vec<Sent> = hot.drive(sessions).await?;
        sent.append(&mut cold.drive(sessions).await?);
        Ok(sent)
    };
    let switching = async {
        tokio::time::sleep_until((begun + Duration::from_secs_f64(2.0 * order.phase)).into()).await;
        running.sim.set_profile(order.mode.profile(order.faster.1));
    };
    let watching = watch(running, begun, (3.0 * order.phase) as u64);
    let (recording, (), mut seconds) =
        futures::join!(record(running, sending, begun), switching, watching);
    add_rows(&mut seconds, &recording?, begun, order.phase)?;
    Ok(seconds)
}

/// What the operators and the store have counted in each second.
async fn watch(running: &Running, begun: Instant, count: u64) -> Vec<Second> {
    let mut seconds = Vec::new();
    let (mut counted, mut gets) = (Operators::now(running), running.sim.stats().gets);
    for second in 0..count {
        tokio::time::sleep_until((begun + Duration::from_secs(second + 1)).into()).await;
        let (now, gets_now) = (Operators::now(running), running.sim.stats().gets);
        let since = now.since(counted);
        let place = places(running);
        eprintln!("{second:>4} s: demand {}, in time {}, {place}", since.demand, since.in_time);
        seconds.push(Second {
            second,
            demand: since.demand,
            in_time: since.in_time,
            late: since.late,
            unused: since.unused,
            store_gets: gets_now - gets,
            place,
            ..Second::default()
        });
        (counted, gets) = (now, gets_now);
    }
    seconds
}

/// How many rows were due in each second, and how long they took.
fn add_rows(
    seconds: &mut [Second],
    recording: &Recording,
    begun: Instant,
    phase: f64,
) -> Result<(), String> {
    let rows = recording.rows()?;
    let second_of = |row: &RowTimes| row.due.saturating_duration_since(begun).as_secs();
    for second in seconds {
        let own: Vec<RowTimes> =
            rows.iter().filter(|r| second_of(r) == second.second).copied().collect();
        let latencies = Latencies::of(&own);
        let visible = percentiles(&latencies.visible);
        second.phase = 1 + (second.second as f64 / phase) as u32;
        second.rows = latencies.rows();
        (second.visible_p50_ms, second.visible_p99_ms) = (visible.p50, visible.p99);
    }
    Ok(())
}

fn print(seconds: &[Second]) -> Result<(), String> {
    println!(
        "{:>6} {:>5} {:>7} {:>7} {:>7} {:>6} {:>6} {:>6} {:>8} {:>8} place",
        "second",
        "phase",
        "rows",
        "demand",
        "in_time",
        "late",
        "unused",
        "gets",
        "v_p50ms",
        "v_p99ms"
    );
    for s in seconds {
        println!(
            "{:>6} {:>5} {:>7} {:>7} {:>7} {:>6} {:>6} {:>6} {:>8.2} {:>8.2} {}",
            s.second,
            s.phase,
            s.rows,
            s.demand,
            s.in_time,
            s.late,
            s.unused,
            s.store_gets,
            s.visible_p50_ms,
            s.visible_p99_ms,
            s.place
        );
    }
    for second in seconds {
        println!("{}", serde_json::to_string(second).map_err(|e| e.to_string())?);
    }
    Ok(())
}

fn draw(
    directory: &std::path::Path,
    args: &Args,
    order: &Order,
    seconds: &[Second],
) -> Result<(), String> {
    let line = |name: &str, of: fn(&Second) -> f64| Line {
        name: name.to_owned(),
        points: seconds.iter().map(|s| (s.second as f64, of(s))).collect(),
    };
    let marks = vec![
        (order.phase, "keys change".to_owned()),
        (2.0 * order.phase, format!("store: {}", order.faster.0)),
    ];
    let panel = |title: &str, lines: Vec<Line>| Panel {
        title: title.to_owned(),
        x_label: "seconds".to_owned(),
        x: XScale::Linear,
        y: YScale::Linear,
        lines,
        marks: marks.clone(),
    };
    let keys = vec![
        line("demand", |s| s.demand as f64),
        line("in_time", |s| s.in_time as f64),
        line("late", |s| s.late as f64),
        line("unused", |s| s.unused as f64),
    ];
    let times =
        vec![line("visible p50", |s| s.visible_p50_ms), line("visible p99", |s| s.visible_p99_ms)];
    let panels = [panel("keys in each second", keys), panel("milliseconds", times)];
    let title = format!("adapt: {}, {} rows/s, {}", args.mode, args.rate, order.setting.label());
    let name = format!("adapt-{}-{}.svg", args.mode, order.setting.label());
    chart::write(directory, &name, &chart::svg(&title, &panels))
}
