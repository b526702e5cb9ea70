//! What is given for a setting: that it is in the setting's range, and goes together with the others.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use millrace_storage::cache::AdmissionPolicy;

use super::quantities::{Durations, duration, size};
use super::{Access, ConfigError, Options, Tuning};

/// Of the object store, in flight.
const MAX_READS: usize = 1 << 16;
/// PostgreSQL's.
const MAX_CONNECTIONS: usize = 262_143;
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(2);
const GIB: usize = 1 << 30;
/// Below this nothing works well enough to be worth starting.
const MIN_MEMORY: usize = 64_000_000;
/// What the disk cache takes at least, in areas, however little it is given.
const MIN_DISK_CACHE: usize = 64_000_000;
const MAX_PARALLELISM: usize = 256;
/// The log keeps up with the deletion of what its snapshots cover as long as no more records lie between two.
const MAX_SNAPSHOT_RECORDS: u64 = 2_048;
const DAY: Duration = Duration::from_secs(86_400);
/// Those of the setting.
const BARRIER_INTERVALS: Durations = Durations {
    least: Duration::from_millis(1),
    most: Duration::from_secs(3_600),
    expected: "1ms to 1h",
};
/// Six times the longest is the longest `object_retention`.
const GC_INTERVALS: Durations = Durations {
    least: Duration::from_millis(10),
    most: DAY.saturating_mul(5),
    expected: "10ms to 5d",
};
/// In less nobody proves who he is.
const AUTHENTICATION_TIMEOUTS: Durations =
    Durations { least: Duration::from_millis(100), most: DAY, expected: "100ms to 1d" };
/// No two clocks show the same.
const CLOCK_SKEWS: Durations = Durations {
    least: Duration::from_millis(10),
    most: DAY.saturating_mul(365),
    expected: "10ms to 365d",
};

/// A number that may be given, if it is one of these.
fn within<N: Copy + PartialOrd + std::fmt::Display>(
    name: &'static str,
    given: Option<N>,
    range: RangeInclusive<N>,
    expected: &'static str,
) -> Result<Option<N>, ConfigError> {
    match given {
        Some(n) if !range.contains(&n) => {
            Err(ConfigError::Invalid { name, value: n.to_string(), expected })
        }
        given => Ok(given),
    }
}

impl Options {
    pub(super) fn memory_limit(&self) -> Result<usize, ConfigError> {
        let name = "--memory-limit";
        let Some(text) = &self.memory_limit else {
            let half = crate::machine::memory() / 2;
            let why = "half of the memory of this machine is less than 64MB, which is the least";
            return (half >= MIN_MEMORY).then_some(half).ok_or(ConfigError::Missing { name, why });
        };
        let limit = size(name, text)?;
        match limit >= MIN_MEMORY {
            true => Ok(limit),
            false => {
                let expected = "at least 64MB";
                Err(ConfigError::Invalid { name, value: text.clone(), expected })
            }
        }
    }

    pub(super) fn disk_cache(&self, object_store: &str) -> Result<usize, ConfigError> {
        let Some(text) = &self.disk_cache else {
            return Ok(if object_store.starts_with("s3") { 8 * GIB } else { 0 });
        };
        let name = "--disk-cache";
        match size(name, text)? {
            limit if limit == 0 || limit >= MIN_DISK_CACHE => Ok(limit),
            _ => {
                let expected = "0, or at least 64MB";
                Err(ConfigError::Invalid { name, value: text.clone(), expected })
            }
        }
    }

    pub(super) fn barrier_interval(&self) -> Result<Duration, ConfigError> {
        match &self.barrier_interval {
            Some(text) => BARRIER_INTERVALS.read("--barrier-interval", text),
            None => Ok(Duration::from_millis(250)),
        }
    }

    pub(super) fn max_clock_skew(&self) -> Result<Duration, ConfigError> {
        match &self.max_clock_skew {
            Some(text) => CLOCK_SKEWS.read("--max-clock-skew", text),
            None => Ok(MAX_CLOCK_SKEW),
        }
    }

    pub(super) fn parallelism(&self) -> Result<usize, ConfigError> {
        let range = 1..=MAX_PARALLELISM;
        let given = within("--parallelism", self.parallelism, range, "1 to 256")?;
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Ok(given.unwrap_or_else(|| cores().min(MAX_PARALLELISM)))
    }

    pub(super) fn tuning(&self) -> Result<Tuning, ConfigError> {
        let bytes = |name: &'static str, given: &Option<String>| {
            given.as_deref().map(|text| size(name, text)).transpose()
        };
        let (min_reads, max_reads) = self.reads()?;
        let flush_commits =
            within("--flush-commits", self.flush_commits, 1..=usize::MAX, "at least 1")?;
        let snapshots = 1..=MAX_SNAPSHOT_RECORDS;
        let snapshot_records =
            within("--snapshot-records", self.snapshot_records, snapshots, "1 to 2048")?;
        let age = |text: &str| duration("--flush-age", text);
        let collection = |text: &str| GC_INTERVALS.read("--gc-interval", text);
        Ok(Tuning {
            flush_bytes: bytes("--flush-size", &self.flush_size)?,
            direct_run_bytes: bytes("--direct-run-size", &self.direct_run_size)?,
            inline_bytes: bytes("--inline-size", &self.inline_size)?,
            flush_commits,
            flush_age: self.flush_age.as_deref().map(age).transpose()?,
            tail_bytes: bytes("--tail-size", &self.tail_size)?,
            step_bytes: self.step_bytes()?,
            min_reads,
            max_reads,
            hedge_reads: match self.hedge_reads.as_deref() {
                None => None,
                Some("on") => Some(true),
                Some("off") => Some(false),
                Some(other) => {
                    let (name, value) = ("--hedge-reads", other.to_owned());
                    return Err(ConfigError::Invalid { name, value, expected: "on or off" });
                }
            },
            disk_cache_admission: match self.disk_cache_admission.as_deref() {
                None => None,
                Some(given) => Some(AdmissionPolicy::parse(given).ok_or_else(|| {
                    let (name, value) = ("--disk-cache-admission", given.to_owned());
                    ConfigError::Invalid { name, value, expected: "all or history" }
                })?),
            },
            snapshot_records,
            gc_interval: self.gc_interval.as_deref().map(collection).transpose()?,
        })
    }

    /// A job takes in something with each commit.
    fn step_bytes(&self) -> Result<Option<usize>, ConfigError> {
        let Some(text) = &self.step_size else { return Ok(None) };
        let name = "--step-size";
        match size(name, text)? {
            0 => {
                let expected = "at least 1 byte";
                Err(ConfigError::Invalid { name, value: text.clone(), expected })
            }
            bytes => Ok(Some(bytes)),
        }
    }

    /// The least and the most reads in flight, where they are given.
    fn reads(&self) -> Result<(Option<usize>, Option<usize>), ConfigError> {
        let reads = |name: &'static str, given| within(name, given, 2..=MAX_READS, "2 to 65536");
        let min_reads = reads("--min-reads", self.min_reads)?;
        let max_reads = reads("--max-reads", self.max_reads)?;
        if let (Some(least), Some(most)) = (min_reads, max_reads)
            && least > most
        {
            return Err(ConfigError::Contradiction {
                one: "--min-reads",
                other: "--max-reads",
                why: format!("{least} is more than {most}"),
            });
        }
        Ok((min_reads, max_reads))
    }

    /// The files with which connections of clients are encrypted.
    fn tls(&self) -> Result<Option<(PathBuf, PathBuf)>, ConfigError> {
        let (cert, key) = ("--tls-cert", "--tls-key");
        let (given, missing) = match (&self.tls_cert, &self.tls_key) {
            (None, None) => return Ok(None),
            (Some(cert), Some(key)) => return Ok(Some((cert.clone(), key.clone()))),
            (Some(_), None) => (cert, key),
            (None, Some(_)) => (key, cert),
        };
        let why = "connections of clients are encrypted with a certificate and its key";
        Err(ConfigError::Half { given, missing, why })
    }

    pub(super) fn access(&self) -> Result<Access, ConfigError> {
        let count = |name: &'static str, given, default: usize| {
            within(name, given, 1..=MAX_CONNECTIONS, "1 to 262143")
                .map(|given| given.unwrap_or(default))
        };
        let defaults = Access::default();
        let authentication_timeout = match &self.authentication_timeout {
            Some(text) => AUTHENTICATION_TIMEOUTS.read("--authentication-timeout", text)?,
            None => defaults.authentication_timeout,
        };
        if self.root_password.as_ref().is_some_and(|password| password.0.is_empty()) {
            let (name, value) = ("root-password", String::new());
            let expected = "a password that is not empty";
            return Err(ConfigError::Invalid { name, value, expected });
        }
        Ok(Access {
            max_connections: count(
                "--max-connections",
                self.max_connections,
                defaults.max_connections,
            )?,
            max_pending: count(
                "--max-pending-connections",
                self.max_pending_connections,
                defaults.max_pending,
            )?,
            authentication_timeout,
            tls: self.tls()?,
            require_password: self.require_password.unwrap_or_default(),
            root_password: self.root_password.clone(),
            allow_paths: self.allow_path.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::settings::{self, Kind};

    use super::super::Config;
    use super::*;

    #[test]
    fn what_the_cluster_keeps_has_the_range_of_its_setting() {
        let range = |name| match settings::find(name).unwrap().kind {
            Kind::Millis { min, max } => [min, max].map(|ms| Duration::from_millis(ms as u64)),
            kind => panic!("{name} is {kind:?}"),
        };
        let barriers = [BARRIER_INTERVALS.least, BARRIER_INTERVALS.most];
        assert_eq!(barriers, range("barrier_interval"));
        assert_eq!(GC_INTERVALS.most * 6, range("object_retention")[1]);
    }

    #[test]
    fn ranges_of_durations_are_those_that_errors_name() {
        for range in [BARRIER_INTERVALS, GC_INTERVALS, AUTHENTICATION_TIMEOUTS, CLOCK_SKEWS] {
            let (least, most) = range.expected.split_once(" to ").unwrap();
            assert_eq!(range.read("x", least).unwrap(), range.least, "{}", range.expected);
            assert_eq!(range.read("x", most).unwrap(), range.most, "{}", range.expected);
        }
    }

    fn of_file(text: &str) -> Result<Config, String> {
        let options: Options = toml::from_str(text).unwrap();
        options.resolve().map_err(|e| e.to_string())
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let cases: &[(&str, &[&str], &str)] = &[
            ("barrier-interval", &["0", "100us", "2h"], "1ms to 1h"),
            ("gc-interval", &["0", "1ms", "6d"], "10ms to 5d"),
            ("authentication-timeout", &["0", "2d"], "100ms to 1d"),
            ("max-clock-skew", &["0", "366d"], "10ms to 365d"),
            ("memory-limit", &["0", "63MB"], "at least 64MB"),
            ("disk-cache", &["8", "63MB"], "0, or at least 64MB"),
            ("step-size", &["0"], "at least 1 byte"),
        ];
        for (key, values, expected) in cases {
            for value in *values {
                let error = of_file(&format!("{key} = \"{value}\"")).unwrap_err();
                let told = format!("invalid value for --{key}: \"{value}\" (expected {expected})");
                assert_eq!(error, told);
            }
        }
        let cases: &[(&str, &[u64], &str)] = &[
            ("parallelism", &[0, 257], "1 to 256"),
            ("flush-commits", &[0], "at least 1"),
            ("snapshot-records", &[0, 2_049], "1 to 2048"),
            ("min-reads", &[0, 1, 65_537], "2 to 65536"),
            ("max-reads", &[0, 1, 65_537], "2 to 65536"),
            ("max-connections", &[0, 262_144], "1 to 262143"),
            ("max-pending-connections", &[0, 262_144], "1 to 262143"),
        ];
        for (key, values, expected) in cases {
            for value in *values {
                let error = of_file(&format!("{key} = {value}")).unwrap_err();
                let told = format!("invalid value for --{key}: \"{value}\" (expected {expected})");
                assert_eq!(error, told);
            }
        }
        assert_eq!(of_file("disk-cache = \"0\"").unwrap().disk_cache, 0);
        let error = of_file("root-password = \"\"").unwrap_err();
        assert!(error.contains("root-password") && error.contains("not empty"), "{error}");
    }

    #[test]
    fn settings_that_do_not_go_together_are_refused() {
        for (text, given, missing) in [
            ("tls-cert = \"c\"", "--tls-cert", "--tls-key"),
            ("tls-key = \"k\"", "--tls-key", "--tls-cert"),
        ] {
            let error = of_file(text).unwrap_err();
            let told = format!("{missing} is missing, and {given} is given: ");
            assert!(error.starts_with(&told), "{error}");
        }
        let access = of_file("tls-cert = \"c\"\ntls-key = \"k\"").unwrap().access;
        assert_eq!(access.tls, Some(("c".into(), "k".into())));
        let error = of_file("min-reads = 100\nmax-reads = 99").unwrap_err();
        let told = "--min-reads and --max-reads contradict each other: 100 is more than 99";
        assert_eq!(error, told);
        assert!(of_file("min-reads = 100\nmax-reads = 100").is_ok());
    }
}
