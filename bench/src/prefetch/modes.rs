//! How state is accessed: the modes that are compared.

use std::time::Duration;

use millrace_executor::lookahead::buffers;
use millrace_executor::lookahead::sketch::SketchOptions;
use millrace_executor::options::Eviction::{self, Clock, Lru, Timestamp};
use millrace_executor::options::StateAccess::{self, Asynchronous, Synchronous};
use millrace_executor::options::{ExecOptions, LookaheadMode};
use millrace_graph::lookahead::Place;
use millrace_storage::sim::Profile;

use super::queries::Query;

/// A mode that is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    pub name: &'static str,
    access: StateAccess,
    eviction: Eviction,
    lookahead: LookaheadMode,
    /// Nothing is cold: caches hold everything, and reads of the store take no time.
    pub in_memory: bool,
    /// Rows have few keys, whose state has been read before anything is measured.
    pub hot: bool,
}

const fn mode(name: &'static str, access: StateAccess, eviction: Eviction) -> Mode {
    Mode { name, access, eviction, lookahead: LookaheadMode::Off, in_memory: false, hot: false }
}

const fn hints(name: &'static str, lookahead: LookaheadMode) -> Mode {
    Mode { lookahead, ..mode(name, Asynchronous, Timestamp) }
}

/// Rows are looked at inside the view for operators of this name, in lower case; for others as by default.
const fn at_input(name: &'static str, operator: &'static str) -> Mode {
    hints(name, LookaheadMode::Operator(operator, Place::Input))
}

const MODES: [Mode; 14] = [
    mode("sync-lru", Synchronous, Lru),
    mode("sync-clock", Synchronous, Clock),
    mode("async-lru", Asynchronous, Lru),
    mode("async-clock", Asynchronous, Clock),
    mode(RECORDED, Asynchronous, Timestamp),
    hints(LOOKAHEAD, LookaheadMode::Auto),
    hints("entry", LookaheadMode::Entry),
    hints("root", LookaheadMode::Root),
    hints(LEAF, LookaheadMode::Leaf),
    // The operators that have such a place in the plan of one of the queries.
    at_input("join:input", "join"),
    at_input("aggregate:input", "aggregate"),
    Mode { in_memory: true, ..mode(RAM, Asynchronous, Timestamp) },
    Mode { in_memory: true, hot: true, ..mode(RAM_HOT, Asynchronous, Timestamp) },
    Mode { in_memory: true, hot: true, ..hints(RAM_HINTS, LookaheadMode::Auto) },
];

/// Hints as by default.
pub const LOOKAHEAD: &str = "lookahead";
/// Hints from rows that the leaf has read.
pub const LEAF: &str = "leaf";
/// Nothing is cold.
pub const RAM: &str = "ram";
/// Nothing is cold, and the state that rows need is in memory already: without hints, and with hints as by default. What
/// hints cost where there is nothing to gain.
pub const RAM_HOT: &str = "ram-hot";
pub const RAM_HINTS: &str = "ram-hints";
/// The mode whose leads and reads are recorded for [`BOUND`].
pub const RECORDED: &str = "async-timestamp";
/// The best of the modes with a fixed place. Not run: taken from them.
pub const FIXED: &str = "fixed";
/// What a perfect prefetcher would reach. Not run: computed from [`RECORDED`] and [`RAM`].
pub const BOUND: &str = "bound";

/// Every key is a `BIGINT`, and so is what brings the next key of a chain.
const KEY_BYTES: usize = 8;

/// What all caches of the mode `ram` hold, which is more than the state.
const IN_MEMORY_BYTES: usize = 512 << 20;

fn run_names() -> String {
    MODES.map(|m| m.name).join(", ")
}

/// The modes of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// In the order in which they are run and shown.
    pub run: Vec<Mode>,
    pub fixed: bool,
    pub bound: bool,
}

impl Plan {
    /// Of names of modes and groups. What a derived mode is taken from is run, too.
    pub fn of(names: &[String]) -> Result<Plan, String> {
        let has = |wanted: &[&str]| names.iter().any(|n| wanted.contains(&n.as_str()));
        let fixed = has(&[FIXED, "async", "all"]);
        let bound = has(&[BOUND, "async", "all"]);
        let known = |name: &str| {
            [FIXED, BOUND, "async", "all"].contains(&name) || MODES.iter().any(|m| m.name == name)
        };
        if let Some(unknown) = names.iter().find(|n| !known(n)) {
            return Err(format!(
                "there is no mode \"{unknown}\"; there are {}, {FIXED}, {BOUND}, and the groups all and async",
                run_names()
            ));
        }
        let is_run = |mode: &&Mode| {
            let in_group = has(&["all"]) || has(&["async"]) && mode.access == Asynchronous;
            in_group
                || has(&[mode.name])
                || fixed && mode.is_candidate()
                || bound && [RECORDED, RAM].contains(&mode.name)
                || mode.name == RAM_HOT && has(&[RAM_HINTS])
        };
        Ok(Plan { run: MODES.iter().filter(is_run).copied().collect(), fixed, bound })
    }
}

impl Mode {
    pub fn by_name(name: &str) -> Result<Mode, String> {
        let found = MODES.into_iter().find(|m| m.name == name);
        found
            .ok_or_else(|| format!("there is no mode \"{name}\" to run; there are {}", run_names()))
    }

    /// One of those that [`FIXED`] is taken from.
    pub fn is_candidate(&self) -> bool {
        use LookaheadMode::{Entry, Leaf, Operator, Root};
        matches!(self.lookahead, Entry | Root | Leaf | Operator(..))
    }

    /// The operator, in lower case, for which rows inside the view are looked at: the mode is one for queries whose plan
    /// has such a place. `None`: it is one for every query.
    pub fn input_of(&self) -> Option<&'static str> {
        match self.lookahead {
            LookaheadMode::Operator(operator, Place::Input) => Some(operator),
            _ => None,
        }
    }

    /// Without hints, and with cold state: what hints are compared with.
    pub fn is_baseline(&self) -> bool {
        !self.has_hints() && !self.in_memory
    }

    /// A row waits for its state before the next is looked at.
    pub fn is_synchronous(&self) -> bool {
        self.access == Synchronous
    }

    /// Keys are announced in it.
    pub fn has_hints(&self) -> bool {
        self.lookahead != LookaheadMode::Off
    }

    /// Bytes that hints for a query take at most, and that its caches therefore have less: tables of keys in memory,
    /// sketches of frequent ones, and all that buffers hints and keys, for so many tasks.
    pub fn hint_bytes(&self, query: &Query, parallelism: usize) -> usize {
        if !self.has_hints() || self.in_memory {
            return 0;
        }
        let each =
            buffers::operator_bytes(SketchOptions::default(), ExecOptions::default().hint_credits);
        let chain = if query.is_chained() { buffers::chain_bytes(KEY_BYTES) } else { 0 };
        query.caches * parallelism * each + chain
    }

    /// With `cache` bytes for each state cache, and a threshold of the sketch of frequent keys.
    pub fn exec_options(&self, cache: usize, threshold: u8) -> ExecOptions {
        let defaults = ExecOptions::default();
        ExecOptions {
            cache_bytes: if self.in_memory { IN_MEMORY_BYTES } else { cache },
            state_access: self.access,
            eviction: self.eviction,
            lookahead: self.lookahead,
            sketch: SketchOptions { threshold, ..defaults.sketch },
            // A row waits for its state before the next is looked at.
            chunk_rows: if self.is_synchronous() { 1 } else { defaults.chunk_rows },
            ..defaults
        }
    }

    /// The store as the mode meets it.
    pub fn profile(&self, profile: Profile) -> Profile {
        match self.in_memory {
            true => Profile {
                puts: Some(profile.puts.unwrap_or((profile.p50, profile.p99))),
                p50: Duration::ZERO,
                p99: Duration::ZERO,
                ..profile
            },
            false => profile,
        }
    }
}

/// Names of [`store_profile`]s, from the fastest to the slowest.
const PROFILES: [&str; 4] = ["nvme", "dfs", "s3-express", "s3"];

pub type NamedProfile = (String, Profile);

/// Profiles by name; `all`: every one.
pub fn store_profiles(names: &[String]) -> Result<Vec<NamedProfile>, String> {
    if names.iter().any(|n| n == "all") {
        return PROFILES.iter().map(|name| named_profile(name)).collect();
    }
    names.iter().map(|name| named_profile(name)).collect()
}

pub fn named_profile(name: &str) -> Result<NamedProfile, String> {
    let missing = || format!("there is no profile \"{name}\"; there are {}", PROFILES.join(", "));
    Ok((name.to_owned(), store_profile(name).ok_or_else(missing)?))
}

/// A kind of store, with puts and gets apart.
///
/// Gets are those of [`Profile`]. Of S3 a service that runs on it publishes 63/78 ms for gets and 100/195 ms for puts
/// (median and 99th percentile; turbopuffer.com/docs/architecture): a median of 1.6 times a get's, and 2.5 times at the
/// 99th percentile. The puts here have the same median ratio to the gets here, and that 99th percentile. For S3 Express
/// One Zone and replicated file systems only "single-digit milliseconds" and nothing are published, so their puts have
/// the same ratio of medians as S3 and the spread of their gets. On a local drive a durable write costs a flush, which
/// is no shorter than a read: same times.
fn store_profile(name: &str) -> Option<Profile> {
    let millis =
        |p50: u64, p99: u64| Some((Duration::from_millis(p50), Duration::from_millis(p99)));
    let profile = Profile::by_name(name).filter(|_| PROFILES.contains(&name))?;
    let puts = match name {
        "s3" => millis(48, 195),
        "s3-express" => millis(8, 24),
        "dfs" => Some((Duration::from_micros(2_400), Duration::from_micros(9_600))),
        _ => None,
    };
    Some(Profile { puts, ..profile })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(names: &[&str]) -> Plan {
        Plan::of(&names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn what_a_derived_mode_is_taken_from_is_run() {
        let names = |plan: &Plan| plan.run.iter().map(|m| m.name).collect::<Vec<_>>();
        let all = plan(&["all"]);
        assert!(all.fixed && all.bound && all.run.len() == MODES.len());
        let fixed = plan(&["async-lru", "fixed"]);
        assert!(fixed.fixed && !fixed.bound);
        assert_eq!(names(&fixed)[0], "async-lru");
        for candidate in ["entry", "root", LEAF, "join:input", "aggregate:input"] {
            assert!(names(&fixed).contains(&candidate), "{candidate}");
        }
        assert_eq!(names(&plan(&["bound"])), [RECORDED, RAM]);
        assert_eq!(names(&plan(&["ram-hints"])), [RAM_HOT, RAM_HINTS]);
        let asynchronous = plan(&["async"]);
        assert!(asynchronous.run.iter().all(|m| m.access == Asynchronous));
    }

    #[test]
    fn a_place_inside_a_view_is_forced_as_by_the_setting_of_that_name() {
        let inside: Vec<Mode> = MODES.into_iter().filter(|m| m.input_of().is_some()).collect();
        assert_eq!(inside.len(), 2);
        for mode in inside {
            assert_eq!(LookaheadMode::parse(mode.name), Some(mode.lookahead), "{}", mode.name);
            assert!(mode.is_candidate() && mode.has_hints(), "{}", mode.name);
        }
        let of = |mode: &str| Mode::by_name(mode).unwrap().input_of();
        assert_eq!([of("join:input"), of(LEAF), of(LOOKAHEAD)], [Some("join"), None, None]);
    }

    #[test]
    fn hints_take_their_memory_from_the_caches() {
        let bytes = |mode: &str, query: &str, tasks: usize| {
            let query = Query::by_name(query).unwrap();
            Mode::by_name(mode).unwrap().hint_bytes(query, tasks)
        };
        assert_eq!(bytes("async-lru", "join5", 1), 0);
        assert_eq!(bytes(RAM_HINTS, "join5", 1), 0, "they do not bound anything");
        let one = bytes(LOOKAHEAD, "join1", 1);
        assert!(one > 600_000, "presence, sketch, waiting hints and keys being read: {one}");
        assert_eq!(bytes(LOOKAHEAD, "join5", 2), 10 * one);
        assert_eq!(bytes("leaf", "chain5", 1), 5 * one + buffers::chain_bytes(KEY_BYTES));
    }
}
