//! What can be set about execution. One value for the worker; a job takes a copy when it starts.

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
    /// For tests: operators announce keys of recent rows to themselves, at random.
    pub random_hints: bool,
    pub eviction: Eviction,
    pub lookahead: LookaheadMode,
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
pub const JOB_OPTIONS: [&str; 3] = ["lookahead", "state_access", "state_cache_policy"];

impl ExecOptions {
    /// For the job of a relation with these options: what they do not tell stays as it is.
    pub fn for_job<'a>(&self, option: impl Fn(&str) -> Option<&'a str>) -> ExecOptions {
        let [lookahead, access, policy] = JOB_OPTIONS.map(option);
        let lookahead = match lookahead {
            Some("auto") => LookaheadMode::Auto,
            Some("off") => LookaheadMode::Off,
            Some("entry") => LookaheadMode::Entry,
            Some("root") => LookaheadMode::Root,
            _ => self.lookahead,
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
        ExecOptions { lookahead, state_access, eviction, ..self.clone() }
    }
}
