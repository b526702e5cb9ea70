//! Reading a WITH clause: typed values, and a clear error for what is missing, malformed or unknown.

use std::str::FromStr;
use std::time::Duration;

use millrace_common::{SqlError, SqlState};
use millrace_rpc::catalog::{OptionEntry, Relation};

/// An error about an option (SQLSTATE 22023).
pub fn invalid(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)
}

/// The value of `name`, or an error that names it and shows an example.
pub fn required<'a>(
    relation: &'a Relation,
    name: &str,
    example: &str,
) -> Result<&'a str, SqlError> {
    relation.option(name).ok_or_else(|| {
        invalid(format!("missing option \"{name}\""))
            .with_hint(format!("Add it to the WITH clause, for example {name} = {example}."))
    })
}

/// A number with a default; `what` says what is expected, for the error.
pub fn number<T: FromStr + PartialOrd>(
    relation: &Relation,
    name: &str,
    default: T,
    min: T,
    what: &str,
) -> Result<T, SqlError> {
    let Some(text) = relation.option(name) else {
        return Ok(default);
    };
    match text.trim().parse::<T>() {
        Ok(value) if value >= min => Ok(value),
        _ => Err(invalid(format!("invalid value for option \"{name}\": \"{text}\""))
            .with_hint(format!("Give {what}."))),
    }
}

/// Refuses options that nobody reads.
pub fn only_known(relation: &Relation, known: &[&str]) -> Result<(), SqlError> {
    let of_all = |name: &str| name == "connector" || name == IDLE_TIMEOUT;
    let stray = |o: &&OptionEntry| !of_all(&o.name) && !known.contains(&o.name.as_str());
    idle_timeout(relation)?;
    match relation.options.iter().find(stray) {
        None => Ok(()),
        Some(o) => Err(invalid(format!("unknown option \"{}\"", o.name))
            .with_hint(format!("Options of this connector: {}.", known.join(", ")))),
    }
}

/// Of every source with a watermark: after how long without rows a split no longer holds it back.
pub const IDLE_TIMEOUT: &str = "idle_timeout";
const DEFAULT_IDLE: Duration = Duration::from_secs(60);

/// `None`: never (0).
pub fn idle_timeout(relation: &Relation) -> Result<Option<Duration>, SqlError> {
    let Some(text) = relation.option(IDLE_TIMEOUT) else { return Ok(Some(DEFAULT_IDLE)) };
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
    let unit_ms = match text[digits.len()..].trim() {
        "ms" => 1,
        "" | "s" | "second" | "seconds" => 1_000,
        "min" | "minute" | "minutes" => 60_000,
        "h" | "hour" | "hours" => 3_600_000,
        _ => 0,
    };
    match digits.trim().parse::<u32>() {
        Ok(0) => Ok(None),
        Ok(n) if unit_ms > 0 => Ok(Some(Duration::from_millis(u64::from(n) * unit_ms))),
        _ => Err(invalid(format!("invalid value for option \"{IDLE_TIMEOUT}\": \"{text}\""))
            .with_hint("Use a number of ms, s, min or h; 0 is never.")),
    }
}

/// One of a few words, the first being the default.
pub fn word<'a>(relation: &Relation, name: &str, words: &[&'a str]) -> Result<&'a str, SqlError> {
    let Some(text) = relation.option(name) else { return Ok(words[0]) };
    words.iter().find(|w| w.eq_ignore_ascii_case(text.trim())).copied().ok_or_else(|| {
        invalid(format!("invalid value for option \"{name}\": \"{text}\""))
            .with_hint(format!("Give one of: {}.", words.join(", ")))
    })
}

pub fn boolean(relation: &Relation, name: &str, default: bool) -> Result<bool, SqlError> {
    match relation.option(name).map(|t| t.trim().to_ascii_lowercase()).as_deref() {
        None => Ok(default),
        Some("true" | "on" | "yes" | "1") => Ok(true),
        Some("false" | "off" | "no" | "0") => Ok(false),
        Some(other) => Err(invalid(format!("invalid value for option \"{name}\": \"{other}\""))
            .with_hint("Give true or false.")),
    }
}

/// A single one-byte character.
pub fn byte(relation: &Relation, name: &str, default: u8) -> Result<u8, SqlError> {
    match relation.option(name).map(str::as_bytes) {
        None => Ok(default),
        Some(b"\\t") => Ok(b'\t'),
        Some([b]) if b.is_ascii() && *b != b'\n' && *b != b'\r' => Ok(*b),
        Some(_) => Err(invalid(format!("option \"{name}\" must be a single one-byte character"))),
    }
}

/// A time such as `500ms`, `10s` or `5min`; a plain number is seconds.
pub fn duration(relation: &Relation, name: &str, default: Duration) -> Result<Duration, SqlError> {
    let Some(text) = relation.option(name) else { return Ok(default) };
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
    let unit = match text[digits.len()..].trim() {
        "ms" => Some(0.001),
        "" | "s" => Some(1.0),
        "min" | "m" => Some(60.0),
        "h" => Some(3_600.0),
        _ => None,
    };
    match (digits.parse::<f64>(), unit) {
        (Ok(n), Some(unit)) if n > 0.0 && n * unit < 1e9 => Ok(Duration::from_secs_f64(n * unit)),
        _ => Err(invalid(format!("invalid value for option \"{name}\": \"{text}\""))
            .with_hint("Give a time such as '500ms', '10s' or '5min'.")),
    }
}

/// Offsets a second that a source may advance by; `None`: as fast as it is read.
pub fn rate_limit(relation: &Relation) -> Result<Option<u64>, SqlError> {
    let what = "rows a second (of files: bytes), 0 for no limit";
    Ok(Some(number(relation, "rate_limit", 0u64, 0, what)?).filter(|n| *n > 0))
}

/// The relation's FORMAT and ENCODE, or what stands for a missing clause.
pub fn format<'a>(relation: &'a Relation, default: (&'a str, &'a str)) -> (&'a str, &'a str) {
    relation.format.as_ref().map_or(default, |f| (f.format.as_str(), f.encode.as_str()))
}

/// What a row that cannot be read does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// It is left out and counted.
    #[default]
    Skip,
    /// The reader stops before it.
    Fail,
}

impl OnError {
    pub fn of(relation: &Relation) -> Result<OnError, SqlError> {
        Ok(OnError::named(word(relation, "on_error", &["skip", "fail"])?))
    }

    /// By the option's value.
    pub fn named(value: &str) -> OnError {
        if value == "fail" { OnError::Fail } else { OnError::Skip }
    }
}
