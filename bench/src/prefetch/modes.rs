//! How state is accessed: the modes that are compared.

use std::time::Duration;

use millrace_executor::options::Eviction::{self, Clock, Lru, Timestamp};
use millrace_executor::options::StateAccess::{self, Asynchronous, Synchronous};
use millrace_executor::options::{ExecOptions, LookaheadMode};
use millrace_storage::sim::Profile;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    pub name: &'static str,
    access: StateAccess,
    eviction: Eviction,
    lookahead: LookaheadMode,
    /// Nothing is cold: caches hold everything, and reads of the store take no time.
    pub in_memory: bool,
}

const fn mode(name: &'static str, access: StateAccess, eviction: Eviction) -> Mode {
    Mode { name, access, eviction, lookahead: LookaheadMode::Off, in_memory: false }
}

pub const MODES: [Mode; 9] = [
    mode("sync-lru", Synchronous, Lru),
    mode("sync-clock", Synchronous, Clock),
    mode("async-lru", Asynchronous, Lru),
    mode("async-clock", Asynchronous, Clock),
    mode("async-timestamp", Asynchronous, Timestamp),
    Mode { lookahead: LookaheadMode::Auto, ..mode("lookahead", Asynchronous, Timestamp) },
    Mode { lookahead: LookaheadMode::Entry, ..mode("entry", Asynchronous, Timestamp) },
    Mode { lookahead: LookaheadMode::Root, ..mode("root", Asynchronous, Timestamp) },
    Mode { in_memory: true, ..mode("ram", Asynchronous, Timestamp) },
];

/// What all caches of the mode `ram` hold, which is more than the state.
const IN_MEMORY_BYTES: usize = 512 << 20;

impl Mode {
    pub fn by_name(name: &str) -> Option<Mode> {
        MODES.into_iter().find(|m| m.name == name)
    }

    /// With `cache` bytes for each state cache.
    pub fn exec_options(&self, cache: usize) -> ExecOptions {
        let defaults = ExecOptions::default();
        ExecOptions {
            cache_bytes: if self.in_memory { IN_MEMORY_BYTES } else { cache },
            state_access: self.access,
            eviction: self.eviction,
            lookahead: self.lookahead,
            // A row waits for its state before the next is looked at.
            chunk_rows: if self.access == Synchronous { 1 } else { defaults.chunk_rows },
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

/// A kind of store, with puts and gets apart.
///
/// Gets are those of [`Profile`]. Of S3 a service that runs on it publishes 63/78 ms for gets and 100/195 ms for puts
/// (median and 99th percentile; turbopuffer.com/docs/architecture): a median of 1.6 times a get's, and 2.5 times at the
/// 99th percentile. The puts here have the same median ratio to the gets here, and that 99th percentile. For S3 Express
/// One Zone and replicated file systems only "single-digit milliseconds" and nothing are published, so their puts have
/// the same ratio of medians as S3 and the spread of their gets. On a local drive a durable write costs a flush, which
/// is no shorter than a read: same times.
pub fn store_profile(name: &str) -> Option<Profile> {
    let millis =
        |p50: u64, p99: u64| Some((Duration::from_millis(p50), Duration::from_millis(p99)));
    let profile = Profile::by_name(name)?;
    let puts = match name {
        "s3" => millis(48, 195),
        "s3-express" => millis(8, 24),
        "dfs" => Some((Duration::from_micros(2_400), Duration::from_micros(9_600))),
        _ => None,
    };
    Some(Profile { puts, ..profile })
}
