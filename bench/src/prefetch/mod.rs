//! How long rows take whose state is in no cache: with hints, without, and as if nothing were cold.
//!
//! The state of a query, some times larger than the caches, is built once. Each mode runs on a copy of it, in a server
//! of its own with cold caches, over a simulated store. Rows arrive at a fixed rate whatever becomes of those before: at
//! 70 % of the most that the slowest mode can take. `visible` is the time from a row's arrival until it can be read in
//! the last view; `state_wait` from when a view could read the row until the view's epoch with it was sealed, which
//! contains the reads of cold state and no commit (over a chain of views, the sum). All modes must have the same result.
//!
//! A statement's rows are taken to be in the newest epoch of the table when it has its answer: where another epoch was
//! committed before the answer arrived, their times are too long by one epoch at most, in every mode.

mod load;
mod modes;
mod queries;
mod report;
mod times;
mod world;

use std::time::Duration;

use millrace_storage::sim::Profile;

use self::load::{Reader, Sessions};
use self::modes::{MODES, Mode};
use self::queries::{QUERIES, Query};
use self::report::Cost;
use self::world::World;
use crate::nexmark::digest_of_view;

/// Of the slowest mode's maximum.
const LOAD: f64 = 0.7;
const TASK_LIMIT: usize = 64;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Queries: join1, join3, join5, chain5, q13, q18, q19, q20, ads, views; `all` for every one
    #[arg(long, value_delimiter = ',', default_value = "join1")]
    query: Vec<String>,
    /// How the store behaves: nvme, dfs, s3-express or s3
    #[arg(long, value_delimiter = ',', default_value = "s3-express")]
    profile: Vec<String>,
    /// sync-lru, sync-clock, async-lru, async-clock, async-timestamp; with hints, lookahead (the place is chosen), entry
    /// and root (the place is fixed); ram (nothing is cold); `all` for every one
    #[arg(long, value_delimiter = ',', default_value = "all")]
    modes: Vec<String>,
    /// Keys of each table with state
    #[arg(long, default_value_t = 200_000)]
    keys: u64,
    /// How many times larger the state is than the caches
    #[arg(long, default_value_t = 4)]
    state_to_cache: u64,
    /// Rows a second; by default 70 % of the slowest mode's maximum
    #[arg(long)]
    rate: Option<f64>,
    /// Seconds in which rows arrive
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Sessions that insert rows
    #[arg(long, default_value_t = 4)]
    sessions: usize,
    #[arg(long, default_value_t = 1)]
    parallelism: usize,
    /// Runs of each mode, by turns; each prints its own line
    #[arg(long, default_value_t = 1)]
    runs: u32,
    /// A quarter of the keys and three seconds: at most a minute for a query and profile
    #[arg(long)]
    quick: bool,
}

pub async fn run(args: &Args) -> Result<(), String> {
    let args = &args.effective()?;
    let modes = chosen(&args.modes, "mode", Mode::by_name, &MODES)?;
    let queries =
        chosen(&args.query, "query", Query::by_name, &QUERIES.iter().collect::<Vec<_>>())?;
    report::print_header();
    for query in queries {
        let world = World::build(query, args.keys, args.state_to_cache, args.parallelism).await?;
        for name in &args.profile {
            let profile =
                modes::store_profile(name).ok_or_else(|| format!("no profile \"{name}\""))?;
            compare(args, &world, (name, profile), &modes).await?;
        }
    }
    Ok(())
}

impl Args {
    fn effective(&self) -> Result<Args, String> {
        let args = match self.quick {
            true => Args { keys: self.keys / 4, seconds: self.seconds.min(3.0), ..self.clone() },
            false => self.clone(),
        };
        let is_sound = args.keys > 0
            && args.seconds > 0.0
            && args.rate.is_none_or(|r| r > 0.0)
            && (1..=TASK_LIMIT).contains(&args.parallelism);
        if is_sound {
            return Ok(args);
        }
        Err(format!("keys, seconds and rate must be positive, parallelism 1 to {TASK_LIMIT}"))
    }

    fn closed_budget(&self) -> Duration {
        Duration::from_secs_f64(self.seconds / 2.0)
    }
}

fn chosen<T: Clone>(
    names: &[String],
    what: &str,
    by_name: impl Fn(&str) -> Option<T>,
    all: &[T],
) -> Result<Vec<T>, String> {
    if names.iter().any(|n| n == "all") {
        return Ok(all.to_vec());
    }
    let one = |n: &String| by_name(n).ok_or_else(|| format!("no {what} \"{n}\""));
    names.iter().map(one).collect()
}

/// All modes at one rate.
async fn compare(
    args: &Args,
    world: &World,
    (name, profile): (&str, Profile),
    modes: &[Mode],
) -> Result<(), String> {
    let mut most = Vec::new();
    for mode in modes {
        most.push(match args.rate {
            Some(_) => None,
            None => Some(most_rows(args, world, profile, mode).await?),
        });
    }
    let slowest = most.iter().flatten().copied().reduce(f64::min).unwrap_or_default();
    let rate = args.rate.unwrap_or(slowest * LOAD).max(1.0);
    let mut hash = None;
    for _ in 0..args.runs.max(1) {
        for (mode, most) in modes.iter().zip(&most) {
            let cost = Cost {
                max_events_per_s: *most,
                ..measure(args, world, profile, mode, rate).await?
            };
            let cost = Cost { profile: name.to_owned(), ..cost };
            cost.print()?;
            let expected = hash.get_or_insert_with(|| cost.output_hash.clone());
            if *expected != cost.output_hash {
                return Err(format!("{} has another result in the mode {}", cost.query, cost.mode));
            }
        }
    }
    Ok(())
}

/// The most rows a second that a mode can take.
async fn most_rows(
    args: &Args,
    world: &World,
    profile: Profile,
    mode: &Mode,
) -> Result<f64, String> {
    let running = world.copy(mode, profile).await?;
    let reader = Reader::open(world, &running).await?;
    let sessions = Sessions::open(world, &running, args.sessions).await?;
    let most = load::closed(world, &running, &sessions, args.closed_budget()).await;
    reader.close().await?;
    drop(sessions);
    running.stop().await;
    most
}

async fn measure(
    args: &Args,
    world: &World,
    profile: Profile,
    mode: &Mode,
    rate: f64,
) -> Result<Cost, String> {
    let running = world.copy(mode, profile).await?;
    let reader = Reader::open(world, &running).await?;
    let sessions = Sessions::open(world, &running, args.sessions).await?;
    let count = ((rate * args.seconds) as u64).max(1);
    let measured = load::open(world, &running, &sessions, (rate, count)).await?;
    let stats = running.sim.stats();
    let digest = digest_of_view(&running.server, running.view()).await?;
    reader.close().await?;
    drop(sessions);
    running.stop().await;
    Ok(Cost::of(world, mode, rate, &measured, &stats, digest))
}
