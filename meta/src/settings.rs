//! Cluster-wide settings: the values of `millrace_common::settings` that the log keeps.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_common::SqlError;
use millrace_common::settings::{self, Scope, Setting};

/// The values in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub barrier_interval: Duration,
    pub read_wait_timeout: Duration,
    pub snapshot_retention: Duration,
    pub log_retention: Duration,
    pub object_retention: Duration,
    /// How long changes are kept for a job that has not taken them.
    pub changelog_retention: Duration,
    /// How many bytes of them; 0: any number.
    pub changelog_retention_bytes: u64,
    /// Whether detached views and indexes are rebuilt without being asked.
    pub rebuild_detached: bool,
    /// Whether frontends read few rows from the memory of the process that has them.
    pub read_from_owner: bool,
    /// Between two looks whether a job is to move because loads have changed; zero: there are none.
    pub rebalance_interval: Duration,
}

impl Settings {
    /// Defaults, overridden by `base` (command line), overridden by `logged` (SQL). A stored value
    /// that no longer parses counts as not set.
    pub fn resolve(base: &BTreeMap<String, String>, logged: &BTreeMap<String, String>) -> Settings {
        let text = |name: &str| {
            let given = [logged, base].into_iter().filter_map(|m| m.get(name));
            let default = settings::find(name).map_or("0", |s| s.default);
            let mut values = given.map(String::as_str).chain([default]);
            values.find_map(|v| find(name).ok()?.check(v).ok()).unwrap_or_default()
        };
        let number = |name: &str| text(name).parse::<u64>().unwrap_or_default();
        let get = |name: &str| Duration::from_millis(number(name));
        Settings {
            barrier_interval: get("barrier_interval"),
            read_wait_timeout: get("read_wait_timeout"),
            snapshot_retention: get("snapshot_retention"),
            log_retention: get("log_retention"),
            object_retention: get("object_retention"),
            changelog_retention: get("changelog_retention"),
            changelog_retention_bytes: number("changelog_retention_bytes"),
            rebuild_detached: text("detached_views") == "rebuild",
            read_from_owner: text("read_from_owner") == "on",
            rebalance_interval: get("rebalance_interval"),
        }
    }

    /// The value of a setting as it is stored, times in milliseconds; `None`: not a setting of the cluster.
    pub fn stored(&self, name: &str) -> Option<String> {
        let value = match name {
            "barrier_interval" => self.barrier_interval,
            "read_wait_timeout" => self.read_wait_timeout,
            "snapshot_retention" => self.snapshot_retention,
            "log_retention" => self.log_retention,
            "object_retention" => self.object_retention,
            "changelog_retention" => self.changelog_retention,
            "rebalance_interval" => self.rebalance_interval,
            "changelog_retention_bytes" => return Some(self.changelog_retention_bytes.to_string()),
            "detached_views" => {
                return Some(if self.rebuild_detached { "rebuild" } else { "keep" }.to_owned());
            }
            "read_from_owner" => {
                return Some(if self.read_from_owner { "on" } else { "off" }.to_owned());
            }
            _ => return None,
        };
        Some(value.as_millis().to_string())
    }
}

/// The setting of this name, if the cluster keeps it.
pub fn find(name: &str) -> Result<&'static Setting, SqlError> {
    let setting = settings::find(name)?;
    if setting.scope == Scope::Session {
        return Err(setting.wrong_scope("is a setting of sessions", "SET"));
    }
    Ok(setting)
}

/// Checks a value of the setting `name`.
pub fn parse(name: &str, value: &str) -> Result<Duration, SqlError> {
    let stored = find(name)?.check(value)?;
    let millis = stored
        .parse()
        .map_err(|_| SqlError::internal("a setting of the cluster is no duration"))?;
    Ok(Duration::from_millis(millis))
}

#[cfg(test)]
mod tests {
    use millrace_common::SqlState;

    use super::*;

    #[test]
    fn every_setting_of_the_cluster_has_its_field() {
        let none = BTreeMap::new();
        let defaults = Settings::resolve(&none, &none);
        for s in settings::SETTINGS.iter().filter(|s| s.scope != Scope::Session) {
            assert_eq!(defaults.stored(s.name).as_deref(), Some(s.default), "{}", s.name);
        }
    }

    #[test]
    fn logged_values_beat_the_command_line_and_both_beat_defaults() {
        let map = |v: &str| BTreeMap::from([("barrier_interval".to_owned(), v.to_owned())]);
        let none = BTreeMap::new();
        let of = |a: &BTreeMap<_, _>, b: &BTreeMap<_, _>| Settings::resolve(a, b).barrier_interval;
        assert_eq!(of(&none, &none), Duration::from_millis(250));
        assert_eq!(of(&map("20000us"), &none), Duration::from_millis(20));
        assert_eq!(of(&map("1s"), &map("2s")), Duration::from_secs(2));
        assert_eq!(of(&map("1s"), &map("nonsense")), Duration::from_secs(1));
    }

    #[test]
    fn bad_values_are_refused_by_name() {
        assert_eq!(parse("barrier", "1s").unwrap_err().state, SqlState::UNDEFINED_OBJECT);
        assert_eq!(
            parse("barrier_interval", "x").unwrap_err().state,
            SqlState::INVALID_PARAMETER_VALUE
        );
        assert_eq!(
            parse("log_retention", "1s").unwrap_err().state,
            SqlState::INVALID_PARAMETER_VALUE
        );
        assert_eq!(parse("work_mem", "1MB").unwrap_err().state.0, "55P02");
    }
}
