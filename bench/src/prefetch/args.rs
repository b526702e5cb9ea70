//! What the command line asks for, checked.

use clap::ValueEnum;
use millrace_executor::lookahead::sketch::SketchOptions;
use millrace_storage::sim::Profile;

use super::modes::{self, LEAF, Plan, RAM_HINTS, RECORDED};
use super::queries::{QUERIES, Query};

/// The least that a parallelism may be, and the most.
const TASKS: std::ops::RangeInclusive<usize> = 1..=64;
/// Keys of a table whose state is still in the store.
const LEAST_KEYS: u64 = 100;
const DEFAULT_RUNS: u32 = 5;
/// `--quick`: keys, seconds of rows at a rate, and seconds in which the most is looked for.
const QUICK_KEYS: u64 = 200_000;
const QUICK_SECONDS: f64 = 2.0;
const QUICK_CLOSED_SECONDS: f64 = 0.8;
/// `--sweep threshold`: keys of which some are frequent, and where they are counted.
const THRESHOLD_SKEW: f64 = 1.2;
const THRESHOLD_MODES: [&str; 2] = [RECORDED, LEAF];
/// The least share of the state to the caches with which no key is in memory but by chance.
const COLD_STATE: f64 = 4.0;

/// What `--help` begins with.
pub const ABOUT: &str = "\
Rows arrive in a table at a fixed rate, and views over it need state that is in no cache and lies in a simulated store.
Each mode of state access runs in a server of its own, on a copy of the same bucket, with the same memory. Measured are,
of each row, `visible` (arrival until it can be read in the last view) and `state_wait` (a view can read the row until
the view's epoch with it is sealed: reads of state, without the commit).

Queries: join1, join3, join5 (joins by keys of the row), chain5 (each key from the row before), q13, q18, q19, q20,
ads (enrichment and a count by window), views (a chain of three views); `all`.

Modes: sync-lru, sync-clock (a row waits for its state before the next), async-lru, async-clock, async-timestamp (rows
overtake each other while state is read), lookahead (hints, as by default), entry, root, leaf (hints from one fixed
place), join:input, aggregate:input (hints for these operators from rows inside the view, for others as by default; left
out for queries whose plan has no such place), fixed (the best of these five, which are all run), ram (nothing is cold),
bound (what a perfect prefetcher would reach with the leads and reads of the async-timestamp run; runs that and ram),
ram-hints (hints as by default while few keys come and their state is in memory; runs ram-hot, which is the same without
hints). Groups: `all`, and `async`, which is `all` without the two sync modes.

Rate: at most 70 % of the maximum of the slowest asynchronous mode, lowered until at most half a core for each task is
busy and keys are cold. Sync modes that cannot take it get rows apart, at 70 % of the maximum of the slowest of them, and
lookahead gets these rows too (lines with \"load\": \"sync\"); they are in no ratio with the others. Runs at low rates
are lengthened to a minute at most, until 1,000 rows are measured; with fewer, no 99.9th percentile is judged.

Output: for each mode a table row and a JSON line of medians over the runs, a JSON line for each run where there are
several, then the ratios that matter with their bars. Modes whose results differ are an
error; so is a run whose state is not cold, or with hints on and none sent (lines with ERROR).";

const AFTER: &str = "\
Examples:
  millrace-bench prefetch --quick --query join1 --profile nvme
  millrace-bench prefetch --query join1,join5 --profile dfs,s3-express --modes async --runs 5 --svg charts
  millrace-bench prefetch --query join1 --profile s3-express --modes async --sweep skew";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiskTier {
    Off,
    /// As large as the state, and holding it when the rows begin.
    On,
    /// Once without, once with it.
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sweep {
    /// Of the keys: exponents of Zipf's law.
    Skew,
    /// How many times larger the state is than the caches.
    Cache,
    /// From which count on a key is frequent and not announced to other tasks: 0 to 255.
    Threshold,
}

impl Sweep {
    fn default_values(self) -> Vec<f64> {
        match self {
            Sweep::Skew => vec![0.0, 0.6, 0.9, 1.2],
            Sweep::Cache => vec![1.0, 2.0, 4.0, 8.0, 16.0],
            Sweep::Threshold => vec![1.0, 10.0, 100.0, 255.0],
        }
    }
}

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Queries, separated by commas; `all` for every one
    #[arg(long, visible_alias = "queries", value_delimiter = ',', default_value = "join1")]
    query: Vec<String>,
    /// How the store behaves: nvme, dfs, s3-express, s3; `all` for all four
    #[arg(long, visible_alias = "profiles", value_delimiter = ',', default_value = "s3-express")]
    profile: Vec<String>,
    /// Modes and groups of modes, separated by commas; by default all, and for --sweep threshold async-timestamp,leaf
    #[arg(long, value_delimiter = ',')]
    modes: Vec<String>,
    /// A cache of blocks on a local disk, between memory and the store
    #[arg(long, value_enum, default_value = "off")]
    disk_tier: DiskTier,
    /// Keys of each table with state (with --quick at most 200000)
    #[arg(long, default_value_t = 1_000_000)]
    keys: u64,
    /// How many times larger the state is than the caches
    #[arg(long, default_value_t = 10)]
    state_to_cache: u64,
    /// How unequally often keys come: the exponent of Zipf's law; 0: all keys alike, and each in its turn. By default 0,
    /// and 1.2 for --sweep threshold
    #[arg(long)]
    skew: Option<f64>,
    /// Repeats everything for several values of one setting, on the same state
    #[arg(long, value_enum)]
    sweep: Option<Sweep>,
    /// The values of --sweep, instead of 0,0.6,0.9,1.2 (skew), 1,2,4,8,16 (cache) or 1,10,100,255 (threshold)
    #[arg(long, value_delimiter = ',', requires = "sweep")]
    sweep_values: Vec<f64>,
    /// Rows a second, for all modes; by default at most 70 % of the slowest asynchronous mode's maximum, and less if state
    /// would not be cold or more than half a core busy for each task; for sync modes that cannot take it their own
    #[arg(long)]
    rate: Option<f64>,
    /// Seconds in which rows arrive, in each run (with --quick at most 2); more at low rates, if neither --rate nor --quick
    /// is given
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Sessions that insert rows
    #[arg(long, default_value_t = 4)]
    sessions: usize,
    #[arg(long, default_value_t = 1)]
    parallelism: usize,
    /// Runs of each mode, by turns; the table has their medians. By default 5, with --quick 1
    #[arg(long)]
    runs: Option<u32>,
    /// Writes charts of the distributions into this directory, one for each query, profile and setting
    #[arg(long, value_name = "DIRECTORY")]
    svg: Option<std::path::PathBuf>,
    /// Fewer keys and seconds: at most a minute for each query and profile, in a release build
    #[arg(long)]
    quick: bool,
}

/// What is compared at a time: everything but the mode.
#[derive(Clone, Debug)]
pub struct Setting {
    pub profile_name: String,
    pub profile: Profile,
    pub disk_tier: bool,
    pub skew: f64,
    /// How many times larger the state is than the caches.
    pub state_to_cache: f64,
    /// Of the sketch of frequent keys.
    pub threshold: u8,
}

/// [`Args`] that make sense.
#[derive(Clone, Debug)]
pub struct Order {
    pub queries: Vec<&'static Query>,
    pub settings: Vec<Setting>,
    pub plan: Plan,
    pub keys: u64,
    pub rate: Option<f64>,
    pub seconds: f64,
    pub closed_seconds: f64,
    pub sessions: usize,
    pub parallelism: usize,
    pub runs: u32,
    pub svg: Option<std::path::PathBuf>,
    pub quick: bool,
}

impl Args {
    pub fn order(&self) -> Result<Order, String> {
        let (keys, seconds) = match self.quick {
            true => (self.keys.min(QUICK_KEYS), self.seconds.min(QUICK_SECONDS)),
            false => (self.keys, self.seconds),
        };
        require(keys >= LEAST_KEYS, || {
            format!("--keys must be at least {LEAST_KEYS}, not {keys}")
        })?;
        require(seconds > 0.0 && seconds.is_finite(), || "--seconds must be positive".to_owned())?;
        let is_rate = self.rate.is_none_or(|r| r > 0.0 && r.is_finite());
        require(is_rate, || "--rate must be positive".to_owned())?;
        require(TASKS.contains(&self.parallelism), || {
            format!("--parallelism must be {} to {}", TASKS.start(), TASKS.end())
        })?;
        require(self.sessions > 0, || "--sessions must be positive".to_owned())?;
        let runs = self.runs.unwrap_or(if self.quick { 1 } else { DEFAULT_RUNS });
        require(runs > 0, || "--runs must be positive".to_owned())?;
        Ok(Order {
            queries: self.queries()?,
            settings: self.settings()?,
            plan: self.plan()?,
            keys,
            rate: self.rate,
            seconds,
            closed_seconds: if self.quick { QUICK_CLOSED_SECONDS } else { seconds / 2.0 },
            sessions: self.sessions,
            parallelism: self.parallelism,
            runs,
            svg: self.svg.clone(),
            quick: self.quick,
        })
    }

    /// The sketch counts keys at the places `leaf` and `input` only, and only frequent ones reach a threshold: elsewhere
    /// all values of its sweep show the same.
    fn is_threshold_swept(&self) -> bool {
        self.sweep == Some(Sweep::Threshold)
    }

    fn skew(&self) -> f64 {
        self.skew.unwrap_or(if self.is_threshold_swept() { THRESHOLD_SKEW } else { 0.0 })
    }

    fn plan(&self) -> Result<Plan, String> {
        let default: &[&str] = if self.is_threshold_swept() { &THRESHOLD_MODES } else { &["all"] };
        let plan = match self.modes.is_empty() {
            true => Plan::of(&default.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())?,
            false => Plan::of(&self.modes)?,
        };
        // The rate of rows with hot state is that of others.
        let has_hot = plan.run.iter().any(|mode| mode.hot);
        let has_others = plan.run.iter().any(|mode| !mode.hot && mode.input_of().is_none());
        require(self.rate.is_some() || !has_hot || has_others, || {
            format!("{RAM_HINTS} alone needs a --rate, or another mode beside it for every query")
        })?;
        if self.is_threshold_swept() {
            let has_leaf = plan.run.iter().any(|mode| mode.name == LEAF);
            require(has_leaf, || {
                format!("--sweep threshold needs the mode {LEAF}: keys are counted there")
            })?;
            require(self.skew() > 0.0, || {
                "--sweep threshold needs a --skew above 0: no key comes often enough".to_owned()
            })?;
        }
        Ok(plan)
    }

    fn queries(&self) -> Result<Vec<&'static Query>, String> {
        if self.query.iter().any(|n| n == "all") {
            return Ok(QUERIES.iter().collect());
        }
        let names = || QUERIES.iter().map(|q| q.name).collect::<Vec<_>>().join(", ");
        let one = |n: &String| {
            Query::by_name(n)
                .ok_or_else(|| format!("there is no query \"{n}\"; there are {}", names()))
        };
        self.query.iter().map(one).collect()
    }

    /// Every profile with and without what is asked for, and with each value of the sweep.
    fn settings(&self) -> Result<Vec<Setting>, String> {
        let disk_tiers: &[bool] = match self.disk_tier {
            DiskTier::Off => &[false],
            DiskTier::On => &[true],
            DiskTier::Both => &[false, true],
        };
        let mut settings = Vec::new();
        for (profile_name, profile) in modes::store_profiles(&self.profile)? {
            for &disk_tier in disk_tiers {
                let setting = Setting {
                    profile_name: profile_name.clone(),
                    profile,
                    disk_tier,
                    skew: self.skew(),
                    state_to_cache: self.state_to_cache as f64,
                    threshold: SketchOptions::default().threshold,
                };
                settings.extend(self.swept(setting)?);
            }
        }
        for setting in &settings {
            let (skew, share) = (setting.skew, setting.state_to_cache);
            require((0.0..=2.0).contains(&skew), || format!("a skew must be 0 to 2, not {skew}"))?;
            require(share >= 1.0 && share.is_finite(), || {
                format!("the state must be at least as large as the caches, not {share} times")
            })?;
        }
        Ok(settings)
    }

    fn swept(&self, setting: Setting) -> Result<Vec<Setting>, String> {
        let Some(sweep) = self.sweep else { return Ok(vec![setting]) };
        let values = match self.sweep_values.is_empty() {
            true => sweep.default_values(),
            false => self.sweep_values.clone(),
        };
        let with = |value: f64| match sweep {
            Sweep::Skew => Ok(Setting { skew: value, ..setting.clone() }),
            Sweep::Cache => Ok(Setting { state_to_cache: value, ..setting.clone() }),
            Sweep::Threshold if (0.0..=255.0).contains(&value) => {
                Ok(Setting { threshold: value as u8, ..setting.clone() })
            }
            Sweep::Threshold => Err(format!("a threshold must be 0 to 255, not {value}")),
        };
        values.into_iter().map(with).collect()
    }
}

pub fn require(holds: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(message()) }
}

impl Setting {
    /// No key is in memory but by chance.
    pub fn is_cold(&self) -> bool {
        !self.disk_tier && self.skew <= 0.0 && self.state_to_cache >= COLD_STATE
    }

    /// What a sweep changes.
    pub fn title(&self) -> String {
        let Setting { skew, state_to_cache, threshold, .. } = self;
        format!("skew {skew}, state {state_to_cache} x cache, threshold {threshold}")
    }

    /// For tables and file names.
    pub fn label(&self) -> String {
        let disk = if self.disk_tier { "+disk" } else { "" };
        format!("{}{disk}", self.profile_name)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn order(words: &[&str]) -> Result<Order, String> {
        let words = std::iter::once(&"prefetch").chain(words);
        Cli::try_parse_from(words).map_err(|e| e.to_string())?.args.order()
    }

    #[test]
    fn every_setting_of_a_sweep_is_run_with_and_without_a_disk_tier() {
        let words = ["--profiles", "nvme,s3", "--disk-tier", "both", "--sweep", "skew"];
        let settings = order(&words).unwrap().settings;
        assert_eq!(settings.len(), 2 * 2 * 4);
        assert_eq!(settings.iter().filter(|s| s.disk_tier && s.skew == 0.9).count(), 2);
        let words = ["--sweep", "cache", "--sweep-values", "3,5"];
        let shares: Vec<f64> =
            order(&words).unwrap().settings.iter().map(|s| s.state_to_cache).collect();
        assert_eq!(shares, [3.0, 5.0]);
    }

    #[test]
    fn a_sweep_of_the_threshold_has_frequent_keys_where_they_are_counted() {
        let swept = order(&["--sweep", "threshold"]).unwrap();
        let names: Vec<&str> = swept.plan.run.iter().map(|m| m.name).collect();
        assert_eq!(names, THRESHOLD_MODES);
        let told: Vec<(f64, u8)> = swept.settings.iter().map(|s| (s.skew, s.threshold)).collect();
        assert_eq!(told, [1, 10, 100, 255].map(|threshold| (THRESHOLD_SKEW, threshold)));
        let own = order(&["--sweep", "threshold", "--skew", "0.9", "--modes", "async"]).unwrap();
        assert!(own.settings.iter().all(|s| s.skew == 0.9) && own.plan.run.len() > 2);
        assert_eq!(order(&[]).unwrap().settings[0].skew, 0.0);
    }

    #[test]
    fn a_bad_argument_is_named() {
        for (words, told) in [
            (vec!["--query", "join2"], "there is no query \"join2\"; there are join1, join3"),
            (vec!["--profile", "disk"], "there is no profile \"disk\"; there are nvme, dfs"),
            (vec!["--modes", "fast"], "there is no mode \"fast\"; there are sync-lru"),
            (vec!["--rate", "0"], "--rate must be positive"),
            (vec!["--keys", "1"], "--keys must be at least"),
            (vec!["--skew=-1"], "a skew must be 0 to 2"),
            (vec!["--sweep-values", "1"], "--sweep"),
            (vec!["--modes", "ram-hints"], "ram-hints alone needs a --rate"),
            (vec!["--modes", "join:input,ram-hints"], "ram-hints alone needs a --rate"),
            (vec!["--sweep", "threshold", "--skew", "0"], "needs a --skew above 0"),
            (vec!["--sweep", "threshold", "--modes", "lookahead"], "needs the mode leaf"),
            (vec!["--parallelism", "65"], "--parallelism must be 1 to 64"),
        ] {
            let error = order(&words).map(drop).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
    }
}
