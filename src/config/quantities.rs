//! Sizes and durations as people write them.

use std::time::Duration;

use super::ConfigError;

/// The durations that a flag takes.
pub(super) struct Durations {
    /// Included, as is `most`.
    pub least: Duration,
    pub most: Duration,
    /// Both, for an error.
    pub expected: &'static str,
}

impl Durations {
    /// The value of the flag `name`.
    pub fn read(&self, name: &'static str, text: &str) -> Result<Duration, ConfigError> {
        let given = duration(name, text)?;
        match (self.least..=self.most).contains(&given) {
            true => Ok(given),
            false => {
                let (value, expected) = (text.to_owned(), self.expected);
                Err(ConfigError::Invalid { name, value, expected })
            }
        }
    }
}

/// `512MB`, `4GiB`, `1048576`: decimal and binary suffixes, case-insensitive.
pub fn size(name: &'static str, text: &str) -> Result<usize, ConfigError> {
    let bad = || ConfigError::Invalid {
        name,
        value: text.to_string(),
        expected: "a size such as 512MB or 4GiB",
    };
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(lower.len());
    let number: f64 = lower[..digits].parse().map_err(|_| bad())?;
    let factor: f64 = match lower[digits..].trim() {
        "" | "b" => 1.0,
        "kb" | "k" => 1e3,
        "mb" | "m" => 1e6,
        "gb" | "g" => 1e9,
        "tb" | "t" => 1e12,
        "kib" => 1024.0,
        "mib" => (1u64 << 20) as f64,
        "gib" => (1u64 << 30) as f64,
        "tib" => (1u64 << 40) as f64,
        _ => return Err(bad()),
    };
    Ok((number * factor) as usize)
}

/// `250us`, `250ms`, `1s`, `1.5s`, `1min`, `1h`, `2d`; a number alone is of milliseconds.
pub fn duration(name: &'static str, text: &str) -> Result<Duration, ConfigError> {
    let bad = || ConfigError::Invalid {
        name,
        value: text.to_string(),
        expected: "a duration such as 250ms, 1s, 10min or 1h",
    };
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(lower.len());
    let number: f64 = lower[..digits].parse().map_err(|_| bad())?;
    let seconds = match lower[digits..].trim() {
        "us" => number / 1e6,
        "ms" | "" => number / 1e3,
        "s" => number,
        "min" => number * 60.0,
        "h" => number * 3_600.0,
        "d" => number * 86_400.0,
        _ => return Err(bad()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations() {
        assert_eq!(size("x", "256MB").unwrap(), 256_000_000);
        assert_eq!(size("x", "1.5 GiB").unwrap(), 3 << 29);
        assert_eq!(size("x", "0").unwrap(), 0);
        assert!(size("x", "12 parsecs").is_err());
        assert!(size("x", "").is_err());
        assert_eq!(duration("x", "250ms").unwrap(), Duration::from_millis(250));
        assert_eq!(duration("x", "1.5s").unwrap(), Duration::from_millis(1_500));
        assert_eq!(duration("x", "0.5min").unwrap(), Duration::from_secs(30));
        assert_eq!(duration("x", "1h").unwrap(), Duration::from_secs(3_600));
        assert_eq!(duration("x", "1.5 D").unwrap(), Duration::from_secs(36 * 3_600));
        assert!(duration("x", "-1s").is_err());
        assert!(duration("x", "1y").is_err() && duration("x", "h").is_err());
    }

    #[test]
    fn a_range_has_its_ends() {
        let range = Durations {
            least: Duration::from_millis(5),
            most: Duration::from_secs(60),
            expected: "5ms to 1min",
        };
        for (text, millis) in [("5", 5), ("7ms", 7), ("1min", 60_000)] {
            assert_eq!(range.read("--x", text).unwrap(), Duration::from_millis(millis));
        }
        for text in ["0", "4.9ms", "60.1s", "1e9d"] {
            assert!(range.read("--x", text).is_err(), "{text}");
        }
        let error = range.read("--x", "2 h").unwrap_err().to_string();
        assert_eq!(error, "invalid value for --x: \"2 h\" (expected 5ms to 1min)");
    }
}
