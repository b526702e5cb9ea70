//! How long a job takes that was lost with its process, until it gives out a row somewhere else, by the size of its
//! state.
//!
//! Leader, frontend and compute processes run in this process, each on threads and a runtime of its own, and over a
//! simulated store of its own with the latencies of a kind of store and a limit of bandwidth; all of these are over one
//! directory. One compute process has the tables, another one the view, a third one stands by. The one with the view is
//! killed and a row is inserted; nothing is told to the leader, which misses the heartbeats of the dead one, fences it
//! and places the view on the third. Measured is what follows from the *decision*: the record that places the view is in
//! the log.
//!
//! - `row`: the new owner has computed the row that was inserted, whose state is cold. Until then it has made so many
//!   dependent rounds, requests and bytes.
//! - `visible`: the commit with that row is in the log.
//!
//! The mode `download` really reads all runs of the view through a store with the same profile and bandwidth, many
//! ranges at a time, and nothing else: a mode that downloads state before it starts takes at least as long.

mod cluster;
mod host;
mod report;
mod run;
mod trace;

use millrace_storage::sim::Profile;

use self::cluster::Cluster;
use self::report::{Line, bars_of, bars_of_sizes};
use self::run::{Download, Recovery};

/// Bytes of what is called a gigabyte here, and a megabyte.
const GB: f64 = 1e9;
const MB: f64 = 1e6;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Gigabytes of the view's state in the store, ascending
    #[arg(long, value_delimiter = ',', default_values_t = [0.25, 1.0])]
    sizes: Vec<f64>,
    /// How the store behaves: nvme, dfs, s3-express or s3
    #[arg(long, default_value = "s3")]
    profile: String,
    /// Megabytes a second that each process can read and write; by default those of a network of 1 Gbit/s
    #[arg(long, default_value_t = 125)]
    bandwidth: u64,
    /// Every request takes the median time, so that requests that belong together end together, and count as one round
    #[arg(long)]
    steady: bool,
    /// How often the owner is killed; the medians are told
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Print the requests of each recovery
    #[arg(long)]
    trace: bool,
    /// 0.02 and 0.08 GB, two runs each
    #[arg(long, conflicts_with_all = ["sizes", "runs"])]
    quick: bool,
    /// Where the store lies; a temporary directory by default
    #[arg(long)]
    dir: Option<std::path::PathBuf>,
}

pub async fn run(args: &Args) -> Result<(), String> {
    let mut args = args.clone();
    if args.quick {
        (args.sizes, args.runs) = (vec![0.02, 0.08], 2);
    }
    let profile = checked(&args)?;
    let mut lines = Vec::new();
    report::print_header();
    for &size in &args.sizes {
        let [recovery, download] = measure(&args, size, profile).await?;
        for line in [&recovery, &download] {
            line.print()?;
        }
        for bar in bars_of(&recovery, &download) {
            bar.print()?;
        }
        lines.push(recovery);
    }
    if let Some(bar) = bars_of_sizes(&lines) {
        bar.print()?;
    }
    Ok(())
}

/// The store's behaviour, if the arguments make sense.
fn checked(args: &Args) -> Result<Profile, String> {
    let profile = Profile::by_name(&args.profile)
        .ok_or_else(|| format!("no profile \"{}\"", args.profile))?;
    if args.sizes.is_empty() || args.sizes.iter().any(|size| !(0.001..=1_000.0).contains(size)) {
        return Err("--sizes: gigabytes from 0.001 on".to_owned());
    }
    if !args.sizes.is_sorted_by(|a, b| a < b) {
        return Err("--sizes: in ascending order".to_owned());
    }
    if args.runs == 0 || args.bandwidth == 0 {
        return Err("there must be a run, and some bandwidth".to_owned());
    }
    let p99 = if args.steady { profile.p50 } else { profile.p99 };
    Ok(Profile { p99, bytes_per_second: args.bandwidth.saturating_mul(MB as u64), ..profile })
}

/// Builds the state of one size, and loses its owner some times.
async fn measure(args: &Args, size: f64, profile: Profile) -> Result<[Line; 2], String> {
    let mut cluster = Cluster::start(args.dir.as_deref(), (size * GB) as u64).await?;
    let measured = drive(&mut cluster, args, profile).await;
    let state = cluster.state_bytes();
    let stopped = cluster.stop().await;
    let (recoveries, download) = measured?;
    stopped?;
    let setting = report::Setting {
        size_gb: size,
        state_mb: state as f64 / MB,
        profile: args.profile.clone(),
        bandwidth_mb_s: args.bandwidth,
        steady: args.steady,
    };
    Ok([Line::of_recoveries(&setting, &recoveries), Line::of_download(&setting, &download)])
}

async fn drive(
    cluster: &mut Cluster,
    args: &Args,
    profile: Profile,
) -> Result<(Vec<Recovery>, Download), String> {
    cluster.fill().await?;
    cluster.limit(profile);
    let mut recoveries = Vec::new();
    for _ in 0..args.runs {
        recoveries.push(cluster.lose_owner(args.trace).await?);
    }
    let download = cluster.download().await?;
    cluster.check_content().await?;
    Ok((recoveries, download))
}
