//! Cluster-wide settings kept in the log: one declaration each, from which parsing, defaults and the
//! manual's table follow.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_common::{SqlError, SqlState};

/// A setting as declared.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub name: &'static str,
    pub default: Duration,
    pub min: Duration,
    pub max: Duration,
    pub doc: &'static str,
}

const DAY: u64 = 24 * 3600;

/// All of them; every one is a duration.
pub const SETTINGS: [Setting; 4] = [
    Setting {
        name: "barrier_interval",
        default: Duration::from_millis(250),
        min: Duration::from_millis(1),
        max: Duration::from_secs(3600),
        doc: "Longest time that data nobody waits for stays uncommitted in a view.",
    },
    Setting {
        name: "read_wait_timeout",
        default: Duration::from_secs(10),
        min: Duration::from_millis(1),
        max: Duration::from_secs(DAY),
        doc: "Longest time a read waits for a view to catch up before it fails naming the view.",
    },
    Setting {
        name: "snapshot_retention",
        default: Duration::from_secs(600),
        min: Duration::from_secs(30),
        max: Duration::from_secs(30 * DAY),
        doc: "How long old versions of rows stay readable.",
    },
    Setting {
        name: "log_retention",
        default: Duration::from_secs(DAY),
        min: Duration::from_secs(600),
        max: Duration::from_secs(365 * DAY),
        doc: "How long log records stay after a snapshot covers them.",
    },
];

/// The values in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub barrier_interval: Duration,
    pub read_wait_timeout: Duration,
    pub snapshot_retention: Duration,
    pub log_retention: Duration,
}

impl Settings {
    /// Defaults, overridden by `base` (command line), overridden by `logged` (SQL). A stored value
    /// that no longer parses counts as not set.
    pub fn resolve(base: &BTreeMap<String, String>, logged: &BTreeMap<String, String>) -> Settings {
        let get = |i: usize| {
            let setting = SETTINGS[i];
            [logged, base]
                .into_iter()
                .filter_map(|m| m.get(setting.name))
                .find_map(|v| parse(setting.name, v).ok())
                .unwrap_or(setting.default)
        };
        Settings {
            barrier_interval: get(0),
            read_wait_timeout: get(1),
            snapshot_retention: get(2),
            log_retention: get(3),
        }
    }

    /// The value of a setting by name, as text; `None`: no such setting.
    pub fn show(&self, name: &str) -> Option<String> {
        let value = match name {
            "barrier_interval" => self.barrier_interval,
            "read_wait_timeout" => self.read_wait_timeout,
            "snapshot_retention" => self.snapshot_retention,
            "log_retention" => self.log_retention,
            _ => return None,
        };
        Some(format_duration(value))
    }
}

/// The setting of this name.
pub fn find(name: &str) -> Result<&'static Setting, SqlError> {
    SETTINGS.iter().find(|s| s.name == name).ok_or_else(|| {
        SqlError::new(
            SqlState::UNDEFINED_OBJECT,
            format!("unrecognized configuration parameter \"{name}\""),
        )
    })
}

/// Checks a value of the setting `name`.
pub fn parse(name: &str, value: &str) -> Result<Duration, SqlError> {
    let setting = find(name)?;
    let duration = parse_duration(value).ok_or_else(|| {
        SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!("invalid value for parameter \"{name}\": \"{value}\""),
        )
        .with_hint("Write a duration such as 250ms, 10s, 5min, 24h or 1d; a bare number is milliseconds.")
    })?;
    if duration < setting.min || duration > setting.max {
        return Err(SqlError::new(
            SqlState::INVALID_PARAMETER_VALUE,
            format!(
                "{value} is outside the valid range for parameter \"{name}\" ({} .. {})",
                format_duration(setting.min),
                format_duration(setting.max)
            ),
        ));
    }
    Ok(duration)
}

fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    let millis = match text[digits..].trim() {
        "" | "ms" => 1,
        "s" | "sec" | "seconds" | "second" => 1_000,
        "min" | "m" | "minute" | "minutes" => 60_000,
        "h" | "hour" | "hours" => 3_600_000,
        "d" | "day" | "days" => 86_400_000,
        _ => return None,
    };
    Some(Duration::from_millis(number.checked_mul(millis)?))
}

fn format_duration(d: Duration) -> String {
    let ms = d.as_millis();
    let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")];
    units
        .into_iter()
        .find(|(size, _)| ms >= *size && ms % size == 0)
        .map_or_else(|| format!("{ms}ms"), |(size, unit)| format!("{}{unit}", ms / size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_they_print() {
        for text in ["250ms", "10s", "5min", "24h", "1d"] {
            let parsed = parse_duration(text).unwrap();
            assert_eq!(parse_duration(&format_duration(parsed)), Some(parsed));
        }
        assert_eq!(parse_duration("7"), Some(Duration::from_millis(7)));
        assert_eq!(parse_duration("-7"), None);
        assert_eq!(parse_duration("1 fortnight"), None);
    }

    #[test]
    fn logged_values_beat_the_command_line_and_both_beat_defaults() {
        let map = |v: &str| BTreeMap::from([("barrier_interval".to_owned(), v.to_owned())]);
        let none = BTreeMap::new();
        let of = |a: &BTreeMap<_, _>, b: &BTreeMap<_, _>| Settings::resolve(a, b).barrier_interval;
        assert_eq!(of(&none, &none), Duration::from_millis(250));
        assert_eq!(of(&map("1s"), &none), Duration::from_secs(1));
        assert_eq!(of(&map("1s"), &map("2s")), Duration::from_secs(2));
        assert_eq!(of(&map("1s"), &map("nonsense")), Duration::from_secs(1));
    }

    #[test]
    fn bad_values_are_refused_by_name() {
        assert_eq!(parse("barrier", "1s").unwrap_err().state, SqlState::UNDEFINED_OBJECT);
        assert_eq!(parse("barrier_interval", "x").unwrap_err().state, SqlState::INVALID_PARAMETER_VALUE);
        assert_eq!(parse("log_retention", "1s").unwrap_err().state, SqlState::INVALID_PARAMETER_VALUE);
    }
}
