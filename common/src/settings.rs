//! Every setting that can be SHOWn or SET, declared once: name, scope, kind, default, range, meaning.
//!
//! Purpose: parser, `SHOW ALL`, `pg_settings`, the cluster's own settings and the manual's table follow
//! from [`SETTINGS`]. Settings of
//! PostgreSQL that only affect planning, locking or printing are accepted with the values that
//! Millrace's behaviour covers; a value that would have to change results is refused, not ignored.

use std::collections::HashMap;

use crate::error::{SqlError, SqlState};
use crate::zone::{self, Zone};

/// What values a setting takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Bool,
    /// One of these, without regard to case; the first spelling of each is canonical.
    Enum(&'static [&'static str]),
    Int {
        min: i64,
        max: i64,
    },
    Float,
    /// Milliseconds, with PostgreSQL's units on input (`us`, `ms`, `s`, `min`, `h`, `d`).
    Millis {
        min: i64,
        max: i64,
    },
    /// Kilobytes, with `kB`, `MB`, `GB`, `TB` on input.
    Memory,
    /// A time zone that a session can have.
    Zone,
    Text,
    /// Cannot be set.
    ReadOnly,
}

/// Whose value it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// SET changes it for the session.
    Session,
    /// Kept in the metadata log; ALTER SYSTEM SET changes it for everybody.
    Cluster,
    /// SET changes it for the session, ALTER SYSTEM SET the value that new sessions begin with.
    Both,
}

#[derive(Debug)]
pub struct Setting {
    pub name: &'static str,
    pub scope: Scope,
    pub kind: Kind,
    pub default: &'static str,
    pub doc: &'static str,
    /// Its value is reported to clients at start and after changes (ParameterStatus).
    pub report: bool,
}

const fn s(name: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Setting {
    Setting { name, scope: Scope::Session, kind, default, doc, report: false }
}

const fn reported(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    doc: &'static str,
) -> Setting {
    Setting { name, scope: Scope::Session, kind, default, doc, report: true }
}

/// A duration in milliseconds that the cluster keeps.
const fn cluster(
    name: &'static str,
    scope: Scope,
    (min, max): (i64, i64),
    default: &'static str,
    doc: &'static str,
) -> Setting {
    Setting { name, scope, kind: Kind::Millis { min, max }, default, doc, report: false }
}

const SECOND: i64 = 1_000;
const DAY: i64 = 24 * 3_600 * SECOND;

const ANY_MS: Kind = Kind::Millis { min: 0, max: i32::MAX as i64 };
const ANY_INT: Kind = Kind::Int { min: 0, max: i32::MAX as i64 };
const ISOLATION: Kind =
    Kind::Enum(&["serializable", "repeatable read", "read committed", "read uncommitted"]);

/// All settings, sorted by name without regard to case.
pub static SETTINGS: &[Setting] = &[
    reported(
        "application_name",
        Kind::Text,
        "",
        "Name of the client program, shown in pg_stat_activity.",
    ),
    s(
        "background_ddl",
        Kind::Bool,
        "off",
        "CREATE MATERIALIZED VIEW returns at once instead of when it has caught up.",
    ),
    cluster(
        "barrier_interval",
        Scope::Cluster,
        (1, 3_600 * SECOND),
        "250",
        "Longest time that data nobody waits for stays uncommitted in a view.",
    ),
    s(
        "block_size",
        Kind::ReadOnly,
        "8192",
        "Reported for clients that ask; Millrace has no pages.",
    ),
    s("bytea_output", Kind::Enum(&["hex"]), "hex", "How bytea is printed."),
    cluster(
        "changelog_retention",
        Scope::Cluster,
        (SECOND, 365 * DAY),
        "86400000",
        "How long changes are kept for a view, index or sink that has not taken them; then it is detached.",
    ),
    Setting {
        name: "changelog_retention_bytes",
        scope: Scope::Cluster,
        kind: Kind::Int { min: 0, max: i64::MAX },
        default: "274877906944",
        doc: "How many bytes of such changes are kept; 0: any number.",
        report: false,
    },
    s(
        "check_function_bodies",
        Kind::Bool,
        "on",
        "Accepted; there are no function bodies to check.",
    ),
    reported(
        "client_encoding",
        Kind::Enum(&["UTF8", "UTF-8", "UNICODE"]),
        "UTF8",
        "Encoding of the client's text.",
    ),
    s(
        "client_min_messages",
        Kind::Enum(&[
            "notice", "debug5", "debug4", "debug3", "debug2", "debug1", "debug", "log", "info",
            "warning", "error",
        ]),
        "notice",
        "Least level of messages sent to the client.",
    ),
    s(
        "constraint_exclusion",
        Kind::Enum(&["partition", "on", "off"]),
        "partition",
        "Accepted; has no effect.",
    ),
    s("cursor_tuple_fraction", Kind::Float, "0.1", "Accepted; has no effect."),
    s("data_checksums", Kind::ReadOnly, "on", "Every stored block carries a checksum."),
    reported(
        "DateStyle",
        Kind::Enum(&["ISO, MDY", "ISO", "ISO,MDY", "iso, mdy"]),
        "ISO, MDY",
        "How dates are printed.",
    ),
    s("debug_print_plan", Kind::Bool, "off", "Accepted; has no effect."),
    s("default_table_access_method", Kind::Text, "heap", "Accepted; has no effect."),
    s("default_tablespace", Kind::Text, "", "Accepted; has no effect."),
    s(
        "default_transaction_deferrable",
        Kind::Bool,
        "off",
        "Accepted; reads never wait for writes.",
    ),
    s("default_transaction_isolation", ISOLATION, "read committed", "Level of new transactions."),
    reported(
        "default_transaction_read_only",
        Kind::Bool,
        "off",
        "Refuses writes in new transactions.",
    ),
    Setting {
        name: "detached_views",
        scope: Scope::Cluster,
        kind: Kind::Enum(&["keep", "rebuild"]),
        default: "keep",
        doc: "`keep`: detached views and indexes wait for ALTER … REBUILD. `rebuild`: they are rebuilt by themselves.",
        report: false,
    },
    s("effective_cache_size", Kind::Memory, "4GB", "Accepted; has no effect."),
    s("enable_bitmapscan", Kind::Bool, "on", "Accepted; has no effect."),
    s("enable_hashagg", Kind::Bool, "on", "Accepted; has no effect."),
    s("enable_hashjoin", Kind::Bool, "on", "Accepted; has no effect."),
    s("enable_indexonlyscan", Kind::Bool, "on", "Accepted; has no effect."),
    s("enable_indexscan", Kind::Bool, "on", "Accepted; has no effect."),
    s("enable_material", Kind::Bool, "on", "Accepted; has no effect."),
    s("enable_mergejoin", Kind::Bool, "on", "Accepted; has no effect."),
    s("enable_nestloop", Kind::Bool, "on", "Accepted; has no effect."),
    s("enable_seqscan", Kind::Bool, "on", "Accepted; has no effect."),
    s("enable_sort", Kind::Bool, "on", "Accepted; has no effect."),
    s(
        "expression_errors",
        Kind::Enum(&["error", "null"]),
        "error",
        "Whether a failing expression is an error or NULL, as it is in views.",
    ),
    s(
        "extra_float_digits",
        Kind::Int { min: -15, max: 3 },
        "1",
        "Accepted; floats are always printed with the fewest digits that read back.",
    ),
    s("geqo", Kind::Bool, "on", "Accepted; has no effect."),
    s(
        "idle_in_transaction_session_timeout",
        ANY_MS,
        "0",
        "How long a session may wait for its client within a transaction block before it is ended; 0: without end.",
    ),
    s("idle_session_timeout", ANY_MS, "0", "Accepted; has no effect."),
    reported("in_hot_standby", Kind::ReadOnly, "off", "Reported for clients that ask."),
    reported("integer_datetimes", Kind::ReadOnly, "on", "Times are integers of microseconds."),
    reported("IntervalStyle", Kind::Enum(&["postgres"]), "postgres", "How intervals are printed."),
    reported("is_superuser", Kind::ReadOnly, "on", "Whether the user is a superuser."),
    s("jit", Kind::Bool, "off", "Accepted; has no effect."),
    s("lc_collate", Kind::ReadOnly, "C", "Strings are ordered by their bytes."),
    s("lc_ctype", Kind::ReadOnly, "C.UTF-8", "Classes of characters."),
    s("lc_messages", Kind::Text, "C", "Accepted; messages are in English."),
    s("lc_monetary", Kind::Text, "C", "Accepted; has no effect."),
    s("lc_numeric", Kind::Text, "C", "Accepted; has no effect."),
    s("lc_time", Kind::Text, "C", "Accepted; has no effect."),
    s(
        "lock_timeout",
        ANY_MS,
        "0",
        "Longest wait for an advisory lock; 0: without end. Nothing else waits for locks.",
    ),
    s("log_min_messages", Kind::Text, "warning", "Accepted; has no effect."),
    cluster(
        "log_retention",
        Scope::Cluster,
        (600 * SECOND, 365 * DAY),
        "86400000",
        "How long records of the metadata log stay after a snapshot covers them.",
    ),
    s(
        "log_statement",
        Kind::Enum(&["none", "ddl", "mod", "all"]),
        "none",
        "Accepted; has no effect.",
    ),
    s(
        "lookahead",
        Kind::Enum(&[
            "auto",
            "off",
            "entry",
            "root",
            "leaf",
            "input",
            "aggregate:entry",
            "aggregate:root",
            "aggregate:leaf",
            "aggregate:input",
            "join:entry",
            "join:root",
            "join:leaf",
            "join:input",
            "lookup:entry",
            "lookup:root",
            "lookup:leaf",
            "lookup:input",
            "topn:entry",
            "topn:root",
            "topn:leaf",
            "topn:input",
            "window:entry",
            "window:root",
            "window:leaf",
            "window:input",
        ]),
        "auto",
        "Where rows are looked at ahead of time by views, indexes and sinks created in this session, so that state can be read before they come: `entry`: when a statement brings them into a table. `root`: when their epoch is sealed. `leaf`: when the view itself has read them. `input`: when they come to an operator inside the view at which they may wait. `auto`: where it is worth most. With an operator in front: for operators of that kind, and `auto` for others.",
    ),
    s(
        "lookahead_bytes",
        Kind::Int { min: 0, max: i64::MAX },
        "268435456",
        "Bytes of state that an operator may read ahead in a second in each task, in views, indexes and sinks created in this session.",
    ),
    s(
        "lookahead_credits",
        Kind::Int { min: 4_096, max: 1 << 30 },
        "262144",
        "Bytes of hints that may wait for a task, in views, indexes and sinks created in this session; hints beyond it are dropped.",
    ),
    s(
        "lookahead_requests",
        Kind::Int { min: 0, max: i64::MAX },
        "5000",
        "Requests to the store that an operator may make in a second for state that it reads ahead, in views, indexes and sinks created in this session.",
    ),
    s(
        "lookahead_sketch_counters",
        Kind::Int { min: 16, max: 1_000_000 },
        "10000",
        "Counters in a row of the sketch that tells, at the places `leaf` and `input`, which keys are frequent and need no hints; for views, indexes and sinks created in this session.",
    ),
    s(
        "lookahead_sketch_halve_after",
        Kind::Int { min: 1, max: i32::MAX as i64 },
        "1000",
        "Rows after which all counts of that sketch are halved.",
    ),
    s("lookahead_sketch_rows", Kind::Int { min: 1, max: 16 }, "4", "Rows of that sketch."),
    s(
        "lookahead_sketch_threshold",
        Kind::Int { min: 1, max: 255 },
        "100",
        "Keys that have come more often, as that sketch counts, are frequent; 255: none is.",
    ),
    s(
        "lookahead_value",
        Kind::Int { min: 0, max: 100_000 },
        "11",
        "How many keys may be read ahead in vain, in percent of those whose rows did not have to wait; beyond it another place is taken to look at rows, or none for a while. For views, indexes and sinks created in this session.",
    ),
    s("maintenance_work_mem", Kind::Memory, "64MB", "Accepted; has no effect."),
    s("max_connections", Kind::ReadOnly, "1000", "Most connections at a time."),
    s("max_identifier_length", Kind::ReadOnly, "63", "Longest identifier."),
    s("max_index_keys", Kind::ReadOnly, "32", "Most columns of a key."),
    s("max_parallel_workers_per_gather", ANY_INT, "2", "Accepted; has no effect."),
    cluster(
        "object_retention",
        Scope::Cluster,
        (100, 30 * DAY),
        "600000",
        "How long objects stay in the store after the last version that names them.",
    ),
    s(
        "password_encryption",
        Kind::Enum(&["scram-sha-256", "md5"]),
        "scram-sha-256",
        "Accepted; has no effect.",
    ),
    s(
        "plan_cache_mode",
        Kind::Enum(&["auto", "force_custom_plan", "force_generic_plan"]),
        "auto",
        "Accepted; has no effect.",
    ),
    s(
        "progress_notices",
        Kind::Bool,
        "on",
        "Whether CREATE MATERIALIZED VIEW, CREATE INDEX, CREATE SINK and WAIT say every three seconds how far they are.",
    ),
    s("random_page_cost", Kind::Float, "4", "Accepted; has no effect."),
    s(
        "read_freshness",
        Kind::Enum(&["newest", "any"]),
        "newest",
        "`newest`: reads see all that was acknowledged before (strict serializable). `any`: reads never wait.",
    ),
    Setting {
        name: "read_from_owner",
        scope: Scope::Cluster,
        kind: Kind::Bool,
        default: "on",
        doc: "Whether frontends of a cluster ask the process that a relation's job runs on for few rows, before they read log and bucket.",
        report: false,
    },
    cluster(
        "read_wait_timeout",
        Scope::Both,
        (0, DAY),
        "10000",
        "How long a read waits for a view to catch up before it fails naming the view.",
    ),
    cluster(
        "rebalance_interval",
        Scope::Cluster,
        (0, DAY),
        "60000",
        "How often the leader of a cluster looks whether a job is to move to another compute process because loads have changed: it moves one that five looks in a row have found to. 0: never.",
    ),
    s("row_security", Kind::Bool, "on", "Accepted; there are no row policies."),
    s("search_path", Kind::Text, "\"$user\", public", "Schemas searched for names without one."),
    s("seq_page_cost", Kind::Float, "1", "Accepted; has no effect."),
    reported("server_encoding", Kind::ReadOnly, "UTF8", "Encoding of stored text."),
    reported(
        "server_version",
        Kind::ReadOnly,
        "15.8",
        "Version of PostgreSQL whose behaviour is followed.",
    ),
    s("server_version_num", Kind::ReadOnly, "150008", "The same as a number."),
    reported("session_authorization", Kind::ReadOnly, "root", "The user of the session."),
    s(
        "session_replication_role",
        Kind::Enum(&["origin", "local"]),
        "origin",
        "Accepted; there are no triggers.",
    ),
    cluster(
        "snapshot_retention",
        Scope::Cluster,
        (30 * SECOND, 30 * DAY),
        "600000",
        "How long old versions of rows stay readable.",
    ),
    s("ssl", Kind::ReadOnly, "off", "Whether TLS is on."),
    reported(
        "standard_conforming_strings",
        Kind::Enum(&["on"]),
        "on",
        "Backslashes in strings are ordinary.",
    ),
    s(
        "state_access",
        Kind::Enum(&["async", "sync"]),
        "async",
        "How views, indexes and sinks created in this session read state. `sync`: a chunk waits for its reads; for comparisons.",
    ),
    s(
        "state_cache_policy",
        Kind::Enum(&["timestamp", "lru", "clock"]),
        "timestamp",
        "What state caches of views, indexes and sinks created in this session evict first; `lru` and `clock` are for comparisons.",
    ),
    s("statement_timeout", ANY_MS, "0", "Ends a statement that runs longer; 0 turns it off."),
    s(
        "superuser_reserved_connections",
        Kind::ReadOnly,
        "3",
        "Connections of these that are kept for the built-in users.",
    ),
    s(
        "synchronous_commit",
        Kind::Enum(&["on", "off", "local", "remote_write", "remote_apply"]),
        "on",
        "Accepted; a commit is always durable before it is acknowledged.",
    ),
    s("tcp_keepalives_idle", ANY_INT, "0", "Accepted; has no effect."),
    reported("TimeZone", Kind::Zone, "UTC", "Zone in which timestamptz is read and printed."),
    s("transaction_deferrable", Kind::Bool, "off", "Accepted; reads never wait for writes."),
    s(
        "transaction_isolation",
        ISOLATION,
        "read committed",
        "READ COMMITTED: each statement of a block reads the newest epoch. REPEATABLE READ: all read the first one's.",
    ),
    s("transaction_read_only", Kind::Bool, "off", "Refuses writes in the transaction."),
    s("wal_level", Kind::ReadOnly, "logical", "Reported for clients that ask."),
    s("work_mem", Kind::Memory, "4MB", "Accepted; memory is governed for the whole process."),
    s("xmloption", Kind::Enum(&["content", "document"]), "content", "Accepted; has no effect."),
];

/// The declaration of a setting, by its name without regard to case.
pub fn find(name: &str) -> Result<&'static Setting, SqlError> {
    let name = match name.to_ascii_lowercase().as_str() {
        "time zone" => "TimeZone".to_owned(),
        "transaction isolation level" => "transaction_isolation".to_owned(),
        _ => name.to_owned(),
    };
    SETTINGS.iter().find(|s| s.name.eq_ignore_ascii_case(&name)).ok_or_else(|| {
        SqlError::new(
            SqlState::UNDEFINED_OBJECT,
            format!("unrecognized configuration parameter \"{name}\""),
        )
    })
}

/// A setting that a session may change.
fn find_of_session(name: &str) -> Result<&'static Setting, SqlError> {
    let setting = find(name)?;
    if setting.scope == Scope::Cluster {
        return Err(setting.wrong_scope("cannot be changed in a session", "ALTER SYSTEM SET"));
    }
    Ok(setting)
}

impl Setting {
    /// Of a statement that does not set this setting, with the one that does.
    pub fn wrong_scope(&self, why: &str, instead: &str) -> SqlError {
        let name = self.name;
        SqlError::new(SqlState("55P02"), format!("parameter \"{name}\" {why}"))
            .with_hint(format!("Use {instead} {name} = …."))
    }

    /// A value as it is stored and shown, or why it is refused.
    pub fn check(&self, value: &str) -> Result<String, SqlError> {
        let invalid = || {
            SqlError::new(
                SqlState::INVALID_PARAMETER_VALUE,
                format!("invalid value for parameter \"{}\": \"{value}\"", self.name),
            )
        };
        let in_range = |v: i64, min: i64, max: i64| {
            if (min..=max).contains(&v) {
                Ok(v.to_string())
            } else {
                Err(SqlError::new(
                    SqlState::INVALID_PARAMETER_VALUE,
                    format!(
                        "{v} is outside the valid range for parameter \"{}\" ({min} .. {max})",
                        self.name
                    ),
                ))
            }
        };
        match self.kind {
            Kind::ReadOnly => Err(SqlError::new(
                SqlState("55P02"),
                format!("parameter \"{}\" cannot be changed", self.name),
            )),
            Kind::Text => Ok(value.to_owned()),
            Kind::Zone => {
                let out_of_range = || match zone::hours(value.trim()) {
                    Some(_) => invalid().with_detail("UTC timezone offset is out of range."),
                    None => invalid(),
                };
                zone::of_session(value).map(|(name, _)| name).ok_or_else(out_of_range)
            }
            Kind::Bool => parse_bool(value)
                .map(|b| if b { "on" } else { "off" }.to_owned())
                .ok_or_else(|| {
                    SqlError::new(
                        SqlState::INVALID_PARAMETER_VALUE,
                        format!("parameter \"{}\" requires a Boolean value", self.name),
                    )
                }),
            Kind::Enum(values) => {
                match values.iter().find(|v| v.eq_ignore_ascii_case(value.trim())) {
                    Some(v) => Ok(self.canonical(v).to_owned()),
                    None => {
                        Err(invalid()
                            .with_hint(format!("Available values: {}.", values.join(", "))))
                    }
                }
            }
            Kind::Int { min, max } => {
                in_range(value.trim().parse().map_err(|_| invalid())?, min, max)
            }
            Kind::Float => {
                value.trim().parse::<f64>().map(|v| v.to_string()).map_err(|_| invalid())
            }
            Kind::Millis { min, max } => {
                in_range(parse_millis(value).ok_or_else(invalid)?, min, max)
            }
            Kind::Memory => {
                let t = value.trim();
                let digits = t.trim_end_matches(|c: char| c.is_ascii_alphabetic()).trim();
                digits.parse::<u64>().map(|_| t.to_owned()).map_err(|_| invalid())
            }
        }
    }

    /// Spellings that mean the same are shown as one.
    fn canonical(&self, value: &'static str) -> &'static str {
        match self.name {
            "client_encoding" | "DateStyle" => self.default,
            _ => value,
        }
    }

    /// A stored value as SHOW prints it: times in their largest whole unit, as PostgreSQL does.
    pub fn show(&self, value: &str) -> String {
        match (self.kind, value.parse::<i64>()) {
            (Kind::Millis { .. }, Ok(ms)) if ms > 0 => {
                let units = [
                    (DAY, "d"),
                    (3_600 * SECOND, "h"),
                    (60 * SECOND, "min"),
                    (SECOND, "s"),
                    (1, "ms"),
                ];
                let unit = units.into_iter().find(|(size, _)| ms % size == 0);
                unit.map_or_else(|| value.to_owned(), |(size, unit)| format!("{}{unit}", ms / size))
            }
            _ => value.to_owned(),
        }
    }

    /// Whether it only satisfies clients that ask.
    fn is_compatibility(&self) -> bool {
        self.kind == Kind::ReadOnly || self.doc.starts_with("Accepted")
    }

    /// The values it takes, for people.
    fn values(&self) -> String {
        match self.kind {
            Kind::Bool => "`on`, `off`".to_owned(),
            Kind::Enum(values) => {
                let values: Vec<String> = values.iter().map(|v| format!("`{v}`")).collect();
                values.join(", ")
            }
            Kind::Int { min, max } => format!("{min} to {max}"),
            Kind::Float => "a number".to_owned(),
            Kind::Millis { min, max } => {
                format!("{} to {}", self.show(&min.to_string()), self.show(&max.to_string()))
            }
            Kind::Memory => "a size".to_owned(),
            Kind::Zone => "a time zone".to_owned(),
            Kind::Text => "text".to_owned(),
            Kind::ReadOnly => "read only".to_owned(),
        }
    }

    pub fn category(&self) -> &'static str {
        match self.kind {
            Kind::ReadOnly => "Preset Options",
            _ if self.doc.starts_with("Accepted") => "Compatibility",
            _ => "Client Connection Defaults",
        }
    }
}

/// The manual's table of the settings that change what Millrace does, and the names of the others.
pub fn settings_table() -> String {
    let mut table =
        String::from("| setting | scope | default | values | meaning |\n|---|---|---|---|---|\n");
    for s in SETTINGS.iter().filter(|s| !s.is_compatibility()) {
        let scope = match s.scope {
            Scope::Session => "session",
            Scope::Cluster => "cluster",
            Scope::Both => "both",
        };
        let default = match s.show(s.default) {
            d if d.is_empty() => "empty".to_owned(),
            d => format!("`{d}`"),
        };
        table.push_str(&format!(
            "| `{}` | {scope} | {default} | {} | {} |\n",
            s.name,
            s.values(),
            s.doc
        ));
    }
    let others: Vec<String> =
        SETTINGS.iter().filter(|s| s.is_compatibility()).map(|s| format!("`{}`", s.name)).collect();
    table.push_str(&format!(
        "\nFor clients that ask for them, without effect or read only: {}.\n",
        others.join(", ")
    ));
    table
}

/// PostgreSQL's spellings of a Boolean.
pub fn parse_bool(value: &str) -> Option<bool> {
    match value.trim().to_ascii_lowercase().as_str() {
        "on" | "true" | "t" | "yes" | "y" | "1" => Some(true),
        "off" | "false" | "f" | "no" | "n" | "0" => Some(false),
        _ => None,
    }
}

/// A length of time in an option: `10s`, `500 ms`, `1 day`, `1 hour 30 min`.
pub fn parse_duration(value: &str) -> Result<std::time::Duration, SqlError> {
    let invalid = || {
        SqlError::new(SqlState::INVALID_PARAMETER_VALUE, format!("invalid duration: \"{value}\""))
            .with_hint(
                "Give a number and a unit, such as '500ms', '10s', '5 min', '1 hour' or '1 day'.",
            )
    };
    let mut rest = value.trim();
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(rest.len());
        let n: f64 = rest[..digits].parse().map_err(|_| invalid())?;
        rest = rest[digits..].trim_start();
        let letters = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        seconds += n * match rest[..letters].to_ascii_lowercase().as_str() {
            "us" => 1e-6,
            "ms" | "millisecond" | "milliseconds" => 1e-3,
            "s" | "sec" | "second" | "seconds" => 1.0,
            "min" | "m" | "minute" | "minutes" => 60.0,
            "h" | "hour" | "hours" => 3_600.0,
            "d" | "day" | "days" => 86_400.0,
            "week" | "weeks" => 604_800.0,
            _ => return Err(invalid()),
        };
        rest = rest[letters..].trim_start();
    }
    if value.trim().is_empty() {
        return Err(invalid());
    }
    std::time::Duration::try_from_secs_f64(seconds).map_err(|_| invalid())
}

fn parse_millis(value: &str) -> Option<i64> {
    let t = value.trim();
    let split = t.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(t.len());
    let n: f64 = t[..split].trim().parse().ok()?;
    let scale = match &t[split..] {
        "" | "ms" => 1.0,
        "us" => 0.001,
        "s" => 1e3,
        "min" => 6e4,
        "h" => 3.6e6,
        "d" => 8.64e7,
        _ => return None,
    };
    Some((n * scale).round() as i64)
}

/// The values of one session: those that differ from the defaults.
#[derive(Clone, Debug, Default)]
pub struct SessionSettings {
    /// Defaults of this connection (startup parameters), which RESET goes back to.
    base: HashMap<&'static str, String>,
    values: HashMap<&'static str, String>,
}

impl SessionSettings {
    /// Sets a value that RESET returns to.
    pub fn set_base(&mut self, name: &str, value: &str) -> Result<&'static Setting, SqlError> {
        let setting = find_of_session(name)?;
        self.base.insert(setting.name, setting.check(value)?);
        Ok(setting)
    }

    /// Sets what only the server knows, also for read-only settings.
    pub fn preset(&mut self, name: &str, value: &str) {
        if let Ok(setting) = find(name) {
            self.base.insert(setting.name, value.to_owned());
        }
    }

    pub fn set(&mut self, name: &str, value: &str) -> Result<&'static Setting, SqlError> {
        let setting = find_of_session(name)?;
        self.values.insert(setting.name, setting.check(value)?);
        Ok(setting)
    }

    pub fn reset(&mut self, name: &str) -> Result<&'static Setting, SqlError> {
        let setting = find(name)?;
        self.values.remove(setting.name);
        Ok(setting)
    }

    pub fn reset_all(&mut self) {
        self.values.clear();
    }

    /// Whether this session has a value of its own.
    pub fn is_set(&self, setting: &'static Setting) -> bool {
        self.values.contains_key(setting.name) || self.base.contains_key(setting.name)
    }

    pub fn get(&self, name: &str) -> Result<&str, SqlError> {
        find(name).map(|s| self.value(s))
    }

    pub fn value(&self, setting: &'static Setting) -> &str {
        self.values
            .get(setting.name)
            .or_else(|| self.base.get(setting.name))
            .map_or(setting.default, String::as_str)
    }

    pub fn bool(&self, name: &str) -> bool {
        self.get(name).is_ok_and(|v| v == "on")
    }

    /// The session's time zone, if it is not UTC.
    pub fn zone(&self) -> Option<Zone> {
        let name = self.get("TimeZone").ok().filter(|name| *name != "UTC")?;
        Zone::of_name(name).filter(|zone| !zone.is_utc())
    }

    /// A duration setting; `None` where it is 0 (off).
    pub fn millis(&self, name: &str) -> Option<u64> {
        self.get(name).ok().and_then(|v| v.parse().ok()).filter(|v| *v > 0)
    }
}

#[cfg(test)]
mod tests;
