//! What can be set about execution. One value for the worker; a job takes a copy when it starts.

use std::time::Duration;

use millrace_graph::lookahead::Place;

use crate::lookahead::edge::CREDITS;
use crate::lookahead::sketch::SketchOptions;

/// How an operator reads its state (docs/design.md §14, comparison modes).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateAccess {
    /// Gated batches: rows wait by key, reads are batched and overlap (§7).
    #[default]
    Asynchronous,
    /// The chunk waits for its reads.
    Synchronous,
}

/// What a state cache evicts first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Eviction {
    /// The entry whose latest use lies furthest back in event time (order of arrival where rows bring none).
    #[default]
    Timestamp,
    /// The entry whose latest use lies furthest back in the order of arrival.
    Lru,
    /// The next around the ring that was not used since it was last passed over.
    Clock,
}

/// Where a job's rows are looked at ahead of time, for the keys that its operators will need (§8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LookaheadMode {
    /// Rows of tables when a statement brings them, of sources when they are read ahead, others when their epoch is
    /// sealed.
    #[default]
    Auto,
    Off,
    /// When a statement brings them, or a source is read ahead.
    Entry,
    /// When their epoch is sealed.
    Root,
    /// When a leaf of the job has read them.
    Leaf,
    /// When they come to an operator inside the job at which they may wait.
    Input,
    /// For operators of this name, in lower case; for others `Auto`.
    Operator(&'static str, Place),
}

impl LookaheadMode {
    /// What it is for operators of a name.
    pub fn of(self, operator: &str) -> LookaheadMode {
        match self {
            LookaheadMode::Operator(name, place) if name.eq_ignore_ascii_case(operator) => {
                match place {
                    Place::Entry => LookaheadMode::Entry,
                    Place::Root => LookaheadMode::Root,
                    Place::Leaf => LookaheadMode::Leaf,
                    Place::Input => LookaheadMode::Input,
                }
            }
            LookaheadMode::Operator(..) => LookaheadMode::Auto,
            of_all => of_all,
        }
    }

    /// A value of the setting. `None`: it has none such.
    pub fn parse(value: &str) -> Option<LookaheadMode> {
        /// Operators that read keyed state.
        const OPERATORS: [&str; 5] = ["aggregate", "join", "lookup", "topn", "window"];
        let place = |name: &str| match name {
            "entry" => Some(Place::Entry),
            "root" => Some(Place::Root),
            "leaf" => Some(Place::Leaf),
            "input" => Some(Place::Input),
            _ => None,
        };
        Some(match value {
            "auto" => LookaheadMode::Auto,
            "off" => LookaheadMode::Off,
            "entry" => LookaheadMode::Entry,
            "root" => LookaheadMode::Root,
            "leaf" => LookaheadMode::Leaf,
            "input" => LookaheadMode::Input,
            _ => {
                let (operator, at) = value.split_once(':')?;
                let operator = OPERATORS.into_iter().find(|o| *o == operator)?;
                LookaheadMode::Operator(operator, place(at)?)
            }
        })
    }
}

#[derive(Clone, Debug)]
pub struct ExecOptions {
    /// Rows one operator may park before its task stops pulling input.
    pub parked_rows: usize,
    /// Bytes of them.
    pub parked_bytes: usize,
    /// Bytes one state cache (a state table in a task) may hold.
    pub cache_bytes: usize,
    pub state_access: StateAccess,
    /// For tests: state caches start out knowing nothing, and every read of state completes later and
    /// out of order.
    pub delay_reads: bool,
    /// For tests: hints are always wanted; operators announce keys of recent rows to themselves, and mishandle the hints
    /// that they get, at random.
    pub random_hints: bool,
    pub eviction: Eviction,
    pub lookahead: LookaheadMode,
    /// Reads ahead that may be in vain for each that has hidden the wait of its row.
    pub lookahead_value: f64,
    /// Requests to the store that an operator may make for prefetches in a second, and bytes of their answers in a task.
    pub prefetch_requests: u64,
    pub prefetch_bytes: u64,
    /// How long keys that are to be read ahead are collected before the store is asked; zero: they are not.
    pub prefetch_window: Duration,
    /// Which keys are frequent, for hints between tasks.
    pub sketch: SketchOptions,
    /// Bytes of hints that may wait for a task; beyond it they are dropped.
    pub hint_credits: usize,
    /// Sources are read ahead of their epochs; for tests that compare.
    pub read_ahead: bool,
    /// Old values a Grouped operator remembers in an epoch before it emits what it has.
    pub group_change_bytes: usize,
    /// Rows of a chunk an operator emits at most; it also ends an exploding step.
    pub chunk_rows: usize,
    /// Small chunks are joined up to this many rows before an exchange sends them.
    pub coalesce_rows: usize,
    /// Bytes under way in one exchange channel.
    pub channel_bytes: usize,
    /// Rows a backfilling leaf reads in one cut.
    pub backfill_rows: usize,
    /// Bytes a root consolidates in an epoch before it writes through.
    pub delta_bytes: usize,
    /// Bytes of recent deltas a relation keeps for its readers.
    pub changelog_bytes: usize,
    /// Rows of a source a leaf reads at once.
    pub source_rows: usize,
    /// Bytes one statement may hold in the sequencer.
    pub statement_bytes: usize,
    /// Bytes of a load kept in memory before its rows are written as runs.
    pub load_bytes: usize,
}

impl Default for ExecOptions {
    fn default() -> ExecOptions {
        ExecOptions {
            parked_rows: 6_000,
            parked_bytes: 16 << 20,
            cache_bytes: 64 << 20,
            state_access: StateAccess::default(),
            delay_reads: false,
            random_hints: false,
            eviction: Eviction::default(),
            lookahead: LookaheadMode::default(),
            lookahead_value: 0.11,
            prefetch_requests: 5_000,
            prefetch_bytes: 256 << 20,
            prefetch_window: Duration::from_millis(1),
            sketch: SketchOptions::default(),
            hint_credits: CREDITS,
            read_ahead: true,
            group_change_bytes: 32 << 20,
            chunk_rows: 8_192,
            coalesce_rows: 2_048,
            channel_bytes: 4 << 20,
            backfill_rows: 256 * 1024,
            delta_bytes: 64 << 20,
            changelog_bytes: 32 << 20,
            source_rows: 8_192,
            statement_bytes: 256 << 20,
            load_bytes: 16 << 20,
        }
    }
}

/// Options of relations that say how their jobs run; also settings of the sessions that create them.
pub const JOB_OPTIONS: [&str; 11] = [
    "lookahead",
    "state_access",
    "state_cache_policy",
    "lookahead_sketch_rows",
    "lookahead_sketch_counters",
    "lookahead_sketch_threshold",
    "lookahead_sketch_halve_after",
    "lookahead_value",
    "lookahead_requests",
    "lookahead_bytes",
    "lookahead_credits",
];

impl ExecOptions {
    /// For tests: caches that keep next to nothing, and hints at random.
    pub fn with_random_hints(self) -> ExecOptions {
        ExecOptions { cache_bytes: 2 << 10, delay_reads: true, random_hints: true, ..self }
    }

    /// For the job of a relation with these options: what they do not tell stays as it is.
    pub fn for_job<'a>(&self, option: impl Fn(&str) -> Option<&'a str>) -> ExecOptions {
        let [
            lookahead,
            access,
            policy,
            rows,
            counters,
            threshold,
            halve_after,
            value,
            requests,
            bytes,
            credits,
        ] = JOB_OPTIONS.map(option);
        let percent: Option<f64> = parsed(value);
        let lookahead_value = percent.map_or(self.lookahead_value, |percent| percent / 100.0);
        let lookahead = lookahead.and_then(LookaheadMode::parse).unwrap_or(self.lookahead);
        let own = self.sketch;
        let sketch = SketchOptions {
            rows: parsed(rows).unwrap_or(own.rows),
            counters: parsed(counters).unwrap_or(own.counters),
            threshold: parsed(threshold).unwrap_or(own.threshold),
            halve_after: parsed(halve_after).unwrap_or(own.halve_after),
        };
        let state_access = match access {
            Some("async") => StateAccess::Asynchronous,
            Some("sync") => StateAccess::Synchronous,
            _ => self.state_access,
        };
        let eviction = match policy {
            Some("timestamp") => Eviction::Timestamp,
            Some("lru") => Eviction::Lru,
            Some("clock") => Eviction::Clock,
            _ => self.eviction,
        };
        ExecOptions {
            lookahead,
            lookahead_value,
            prefetch_requests: parsed(requests).unwrap_or(self.prefetch_requests),
            prefetch_bytes: parsed(bytes).unwrap_or(self.prefetch_bytes),
            sketch,
            hint_credits: parsed(credits).unwrap_or(self.hint_credits),
            state_access,
            eviction,
            ..self.clone()
        }
    }
}

fn parsed<T: std::str::FromStr>(option: Option<&str>) -> Option<T> {
    option?.parse().ok()
}

#[cfg(test)]
mod tests {
    use millrace_common::settings::{Kind, find};

    use super::*;

    #[test]
    fn every_value_of_the_setting_is_a_mode_and_names_an_operator_with_keyed_state() {
        let Kind::Enum(values) = find("lookahead").unwrap().kind else { panic!("no list") };
        let mut modes: Vec<LookaheadMode> = Vec::new();
        for value in values {
            let mode = LookaheadMode::parse(value).unwrap_or_else(|| panic!("{value}"));
            assert!(!modes.contains(&mode), "{value}");
            modes.push(mode);
        }
        assert_eq!(LookaheadMode::parse("filter:root"), None);
        assert_eq!(LookaheadMode::parse("join:"), None);
        let of_joins = LookaheadMode::parse("join:leaf").unwrap();
        assert_eq!(of_joins.of("Join"), LookaheadMode::Leaf);
        assert_eq!(of_joins.of("Aggregate"), LookaheadMode::Auto);
        assert_eq!(LookaheadMode::Root.of("Join"), LookaheadMode::Root);
    }

    #[test]
    fn a_job_takes_what_its_relation_tells() {
        let told = [
            ("lookahead", "topn:root"),
            ("state_access", "sync"),
            ("state_cache_policy", "clock"),
            ("lookahead_sketch_rows", "2"),
            ("lookahead_sketch_counters", "5000"),
            ("lookahead_sketch_threshold", "7"),
            ("lookahead_sketch_halve_after", "300"),
            ("lookahead_value", "50"),
            ("lookahead_requests", "3"),
            ("lookahead_bytes", "4096"),
            ("lookahead_credits", "8192"),
        ];
        assert_eq!(told.map(|(name, _)| name), JOB_OPTIONS);
        for (name, value) in told {
            assert_eq!(find(name).unwrap().check(value).unwrap(), value, "{name}");
        }
        let option = |name: &str| told.iter().find(|(of, _)| *of == name).map(|(_, value)| *value);
        let own = ExecOptions::default().for_job(option);
        assert_eq!(own.lookahead, LookaheadMode::Operator("topn", Place::Root));
        assert_eq!(own.state_access, StateAccess::Synchronous);
        assert_eq!(own.eviction, Eviction::Clock);
        let sketch = SketchOptions { rows: 2, counters: 5_000, threshold: 7, halve_after: 300 };
        assert_eq!(own.sketch, sketch);
        assert_eq!(own.lookahead_value, 0.5);
        assert_eq!((own.prefetch_requests, own.prefetch_bytes), (3, 4_096));
        assert_eq!(own.hint_credits, 8_192);
    }

    #[test]
    fn a_job_that_is_told_nothing_runs_as_the_worker_does() {
        let worker = ExecOptions {
            state_access: StateAccess::Synchronous,
            eviction: Eviction::Lru,
            prefetch_requests: 9,
            ..ExecOptions::default()
        };
        let own = worker.for_job(|_| None);
        assert_eq!(own.state_access, StateAccess::Synchronous);
        assert_eq!((own.eviction, own.prefetch_requests), (Eviction::Lru, 9));
        for (policy, expected) in
            [("timestamp", Eviction::Timestamp), ("lru", Eviction::Lru), ("clock", Eviction::Clock)]
        {
            let own = worker.for_job(|name| (name == "state_cache_policy").then_some(policy));
            assert_eq!(own.eviction, expected);
        }
        let own = worker.for_job(|name| (name == "state_access").then_some("async"));
        assert_eq!(own.state_access, StateAccess::Asynchronous);
    }
}
