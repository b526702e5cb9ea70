//! Modes that get the same rows, at one rate.
//!
//! The rate of a comparison is a share of what the slowest asynchronous mode takes. A mode in which each row waits for
//! its state before the next may take a hundredth of that over a slow store: at its rate the others would have a handful
//! of rows a second, and percentiles of nothing. Those that cannot take the rate of the others get rows apart, at a rate
//! of their own, and the mode with hints gets the same rows once more beside them.
//!
//! What hints cost where they gain nothing is seen with state that is in memory: of few keys, so with other rows.

use serde::{Deserialize, Serialize};

use super::args::Order;
use super::arrivals::WARM_UP;
use super::compare::Comparison;
use super::modes::{LOOKAHEAD, Mode};
use super::rate::{self, LOAD};

/// With fewer measured rows the 99.9th percentile is the slowest of them, which proves nothing.
pub const LEAST_ROWS: u64 = 1_000;
/// A run is lengthened until it has as many, but not beyond this.
const LONGEST_S: f64 = 60.0;

/// Which rows modes get. Names are those of the JSON line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Load {
    #[default]
    Common,
    /// At the rate of sync modes that cannot take the common one.
    Sync,
    /// Rows with few keys, whose state is in memory before.
    Hot,
}

impl Load {
    /// Behind the names of modes and files.
    pub fn suffix(self) -> &'static str {
        match self {
            Load::Common => "",
            Load::Sync => "-sync",
            Load::Hot => "-hot",
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Group<'a> {
    pub load: Load,
    /// With their places in the plan.
    pub modes: Vec<(usize, &'a Mode)>,
    pub rate: f64,
    /// Of each run.
    pub seconds: f64,
}

/// The groups of a comparison; `most`: of each mode of the plan the most rows a second that it takes, where it is known.
pub async fn of<'a>(
    comparison: &Comparison<'a>,
    most: &[Option<f64>],
) -> Result<Vec<Group<'a>>, String> {
    let order = comparison.order;
    let all = comparison.modes().into_iter();
    let (hot, cold): (Vec<_>, Vec<_>) = all.partition(|(_, mode)| mode.hot);
    let mut groups = match order.rate {
        Some(rate) => {
            vec![Group { load: Load::Common, modes: cold, rate, seconds: order.seconds }]
        }
        None => {
            let leading = leading(&cold);
            let rate = rate::choose(comparison, &leading, slowest(&leading, most)).await?;
            divided(order, &cold, most, rate)
        }
    };
    let first = groups.first().map(|group| (group.rate, group.seconds));
    groups.extend(first.map(|(rate, seconds)| Group {
        load: Load::Hot,
        modes: hot,
        rate,
        seconds,
    }));
    groups.retain(|group| !group.modes.is_empty());
    Ok(groups)
}

/// Those whose slowest decides the common rate: the asynchronous ones, if any is not in memory.
fn leading<'a>(all: &[(usize, &'a Mode)]) -> Vec<(usize, &'a Mode)> {
    let found = all.iter().filter(|(_, mode)| !mode.is_synchronous() && !mode.in_memory);
    let found: Vec<(usize, &Mode)> = found.copied().collect();
    if found.is_empty() { all.to_vec() } else { found }
}

/// The least of what these modes take.
fn slowest(modes: &[(usize, &Mode)], most: &[Option<f64>]) -> f64 {
    let known = modes.iter().filter_map(|(place, _)| most.get(*place).copied().flatten());
    known.reduce(f64::min).unwrap_or_default()
}

/// At a common rate: those that can take it, and apart those that cannot.
fn divided<'a>(
    order: &Order,
    all: &[(usize, &'a Mode)],
    most: &[Option<f64>],
    rate: f64,
) -> Vec<Group<'a>> {
    let takes = |place: usize| most.get(place).copied().flatten().is_some_and(|m| m * LOAD >= rate);
    let is_apart = |(place, mode): &(usize, &Mode)| mode.is_synchronous() && !takes(*place);
    let (mut slow, common): (Vec<_>, Vec<_>) = all.iter().copied().partition(is_apart);
    if common.is_empty() || slow.is_empty() {
        let seconds = seconds(order, rate);
        return vec![Group { load: Load::Common, modes: all.to_vec(), rate, seconds }];
    }
    let own_rate = (slowest(&slow, most) * LOAD).max(1.0);
    slow.extend(all.iter().filter(|(_, mode)| mode.name == LOOKAHEAD));
    let group = |load, modes, rate| Group { load, modes, rate, seconds: seconds(order, rate) };
    vec![group(Load::Common, common, rate), group(Load::Sync, slow, own_rate)]
}

/// How long rows come at a rate, so that enough of them are measured.
fn seconds(order: &Order, rate: f64) -> f64 {
    let least = LEAST_ROWS as f64 / (1.0 - WARM_UP) / rate;
    if order.quick { order.seconds } else { order.seconds.max(least.ceil().min(LONGEST_S)) }
}

impl Group<'_> {
    /// Lines for people: the rate, for whom, and whether there are few rows. `what`: the query and setting.
    pub fn print(&self, what: &str) {
        println!("{what}: {}", self.told());
    }

    fn told(&self) -> String {
        let names: Vec<&str> = self.modes.iter().map(|(_, mode)| mode.name).collect();
        let Group { rate, seconds, .. } = self;
        let why = match self.load {
            Load::Common => String::new(),
            Load::Sync => format!(
                " (mode{}), apart, since the sync modes cannot take the common rate: compared only with each other",
                self.load.suffix()
            ),
            Load::Hot => format!(
                " (mode{}), with few keys whose state is in memory: compared only with each other",
                self.load.suffix()
            ),
        };
        let few = match self.rows() < LEAST_ROWS {
            true => format!("; only {} rows are measured: no bar for p999", self.rows()),
            false => String::new(),
        };
        let names = names.join(", ");
        format!("{rate:.0} rows/s for {seconds:.0} s in {names}{why}{few}")
    }

    /// That are measured in a run.
    fn rows(&self) -> u64 {
        (self.rate * self.seconds * (1.0 - WARM_UP)) as u64
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::args::Args;
    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn order(words: &[&str]) -> Order {
        let words = std::iter::once(&"prefetch").chain(words);
        Cli::try_parse_from(words).unwrap().args.order().unwrap()
    }

    const MODES: &str = "sync-lru,sync-clock,async-lru,lookahead";

    /// By group: which rows, the names of its modes, rate and seconds.
    fn groups(order: &Order, most: &[f64], rate: f64) -> Vec<(Load, Vec<&'static str>, f64, f64)> {
        let all: Vec<(usize, &Mode)> = order.plan.run.iter().enumerate().collect();
        let most: Vec<Option<f64>> = most.iter().copied().map(Some).collect();
        let told = |g: Group<'_>| {
            (g.load, g.modes.iter().map(|(_, m)| m.name).collect(), g.rate, g.seconds)
        };
        divided(order, &all, &most, rate).into_iter().map(told).collect()
    }

    #[test]
    fn the_slowest_asynchronous_mode_decides_the_rate() {
        let order = order(&["--modes", MODES]);
        let all: Vec<(usize, &Mode)> = order.plan.run.iter().enumerate().collect();
        let most = [Some(8.0), Some(9.0), Some(4_000.0), Some(3_000.0)];
        assert_eq!(slowest(&leading(&all), &most), 3_000.0);
        assert_eq!(slowest(&leading(&all[..2]), &most), 8.0, "there are no others");
    }

    #[test]
    fn modes_that_cannot_take_the_rate_get_rows_apart() {
        let order = order(&["--modes", MODES, "--seconds", "5"]);
        let found = groups(&order, &[20.0, 30.0, 4_000.0, 3_000.0], 2_000.0);
        let common = (Load::Common, vec!["async-lru", "lookahead"], 2_000.0, 5.0);
        let apart = (Load::Sync, vec!["sync-lru", "sync-clock", "lookahead"], 14.0, LONGEST_S);
        assert_eq!(found, [common, apart]);
        // A fast store: one of them can.
        let found = groups(&order, &[2_000.0, 4_000.0, 4_000.0, 4_000.0], 2_000.0);
        let common = (Load::Common, vec!["sync-clock", "async-lru", "lookahead"], 2_000.0, 5.0);
        assert_eq!(found[0], common);
        assert_eq!(found[1].1, ["sync-lru", "lookahead"]);
        let found = groups(&order, &[4_000.0; 4], 2_000.0);
        assert_eq!((found.len(), found[0].1.len()), (1, 4));
    }

    #[test]
    fn a_run_at_a_low_rate_is_lengthened_until_a_percentile_means_something() {
        let slow = order(&["--modes", MODES, "--seconds", "5"]);
        assert_eq!(seconds(&slow, 50.0), 25.0);
        assert_eq!(seconds(&slow, 1_000.0), 5.0);
        assert_eq!(seconds(&order(&["--quick", "--seconds", "2"]), 50.0), 2.0);
        let group = Group { load: Load::Sync, modes: Vec::new(), rate: 10.0, seconds: 60.0 };
        let told = group.told();
        assert!(told.ends_with("only 480 rows are measured: no bar for p999"), "{told}");
    }
}
