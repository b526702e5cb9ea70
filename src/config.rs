//! What a person can set about a process: flags, then environment, then the file, then defaults.

mod checks;
mod origin;
mod quantities;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use millrace_storage::cache::AdmissionPolicy;
use serde::Deserialize;

pub use self::quantities::{duration, size};
use crate::loopback::Loopback;

/// Flags of `millrace standalone`; each can also be given by environment or in the config file.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Options {
    /// Address for psql and drivers [default: 127.0.0.1:4566]
    #[arg(long, env = "MILLRACE_LISTEN", value_name = "HOST:PORT")]
    pub listen: Option<String>,

    /// Address of the web console, /metrics and /health; `off`: none [default: the port 1125 above
    /// --listen's on the same host, 127.0.0.1:5691, if it is free]
    #[arg(long, visible_alias = "metrics-listen", env = "MILLRACE_HTTP", value_name = "HOST:PORT")]
    #[serde(alias = "metrics-listen")]
    pub http: Option<String>,

    /// Where others reach this process; of a standalone server, where another one that is started on the same object store
    /// asks whether this one is still there [default: the address of --listen; where that is all addresses of the
    /// machine, a standalone server takes the one by which it reaches others]
    #[arg(long, env = "MILLRACE_ADVERTISE", value_name = "HOST:PORT")]
    pub advertise: Option<String>,

    /// Starts although another server uses the object store: that one ends
    #[arg(
        long,
        env = "MILLRACE_TAKE_OVER",
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        hide_possible_values = true
    )]
    pub take_over: Option<bool>,

    /// How far the clock of a process that leads may be from the object store's and from those of other processes; beyond
    /// it, it does not lead [default: 2s]
    #[arg(long, env = "MILLRACE_MAX_CLOCK_SKEW", value_name = "DURATION")]
    pub max_clock_skew: Option<String>,

    /// Certificate chain (PEM) with which connections of clients that ask for TLS are encrypted
    #[arg(long, env = "MILLRACE_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// Private key (PEM) of --tls-cert
    #[arg(long, env = "MILLRACE_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// Asks for a password on this machine too; clients of other machines always need one
    /// (CREATE USER name PASSWORD '…')
    #[arg(
        long,
        env = "MILLRACE_REQUIRE_PASSWORD",
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        hide_possible_values = true
    )]
    pub require_password: Option<bool>,

    /// Password of the user root, if it has none yet; from MILLRACE_ROOT_PASSWORD or the config file, as
    /// flags can be seen by others
    #[arg(skip)]
    pub root_password: Option<Password>,

    /// Sessions at a time, three of them for the users root and postgres; fewer where the limit of open files wants it
    /// [default: 1000]
    #[arg(long, env = "MILLRACE_MAX_CONNECTIONS", value_name = "N")]
    pub max_connections: Option<usize>,

    /// Connections at a time that have not proved yet who they are; the oldest give way [default: 200]
    #[arg(long, env = "MILLRACE_MAX_PENDING_CONNECTIONS", value_name = "N")]
    pub max_pending_connections: Option<usize>,

    /// How long a client may take to prove who it is, as 10s or 1min [default: 1min]
    #[arg(long, env = "MILLRACE_AUTHENTICATION_TIMEOUT", value_name = "DURATION")]
    pub authentication_timeout: Option<String>,

    /// A directory that file sources and sinks may use, with all in it; may be given several times (in the
    /// environment separated by colons) [default: every one while only this machine can connect, without a password;
    /// none otherwise, and in a cluster]
    #[arg(long, env = "MILLRACE_ALLOW_PATH", value_name = "DIR", value_delimiter = ':')]
    #[serde(default)]
    pub allow_path: Vec<PathBuf>,

    /// Directory for the embedded object store, the disk cache and the lock [default: millrace-data]
    #[arg(long, env = "MILLRACE_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,

    /// Where all durable data lives: file:///path or s3://bucket/prefix (credentials and endpoint
    /// from AWS_… variables) [default: a directory in the data directory]
    #[arg(long, env = "MILLRACE_OBJECT_STORE", value_name = "URL")]
    pub object_store: Option<String>,

    /// Memory for state, caches and queries, as 512MB or 4GiB [default: half of the machine's or the container's]
    #[arg(long, env = "MILLRACE_MEMORY_LIMIT", value_name = "SIZE")]
    pub memory_limit: Option<String>,

    /// Local disk for cached blocks; 0 turns it off [default: 0 for a local store, 8GiB for S3]
    #[arg(long, env = "MILLRACE_DISK_CACHE", value_name = "SIZE")]
    pub disk_cache: Option<String>,

    /// How long data that nobody waits for may stay uncommitted, as 250ms or 1s [default: 250ms]
    #[arg(long, env = "MILLRACE_BARRIER_INTERVAL", value_name = "DURATION")]
    pub barrier_interval: Option<String>,

    /// Parallel tasks a job [default: the number of cores]
    #[arg(long, env = "MILLRACE_PARALLELISM", value_name = "N")]
    pub parallelism: Option<usize>,

    /// Committed rows of a job that stay in memory before they are written as runs
    /// [default: a sixteenth of the memory limit, 4MiB to 64MiB]
    #[arg(long, env = "MILLRACE_FLUSH_SIZE", value_name = "SIZE", help_heading = "Tuning")]
    pub flush_size: Option<String>,

    /// A commit larger than this is written as runs at once [default: 8MiB]
    #[arg(long, env = "MILLRACE_DIRECT_RUN_SIZE", value_name = "SIZE", help_heading = "Tuning")]
    pub direct_run_size: Option<String>,

    /// A commit up to this rides in its log record [default: 16KiB]
    #[arg(long, env = "MILLRACE_INLINE_SIZE", value_name = "SIZE", help_heading = "Tuning")]
    pub inline_size: Option<String>,

    /// Commits of a job after which its rows are written as runs, however small [default: 500]
    #[arg(long, env = "MILLRACE_FLUSH_COMMITS", value_name = "N", help_heading = "Tuning")]
    pub flush_commits: Option<usize>,

    /// How long the commits of a job may stay in the tail before its rows are written as runs [default: 1h]
    #[arg(long, env = "MILLRACE_FLUSH_AGE", value_name = "DURATION", help_heading = "Tuning")]
    pub flush_age: Option<String>,

    /// Bytes of the commits of all jobs that are not written as runs; a job may have a quarter of them
    /// [default: a sixteenth of the memory limit, 4MiB to 64MiB]
    #[arg(long, env = "MILLRACE_TAIL_SIZE", value_name = "SIZE", help_heading = "Tuning")]
    pub tail_size: Option<String>,

    /// Bytes of its inputs' changes that a job which is behind takes in with one commit
    /// [default: a sixteenth of the memory limit, at least 4MiB]
    #[arg(long, env = "MILLRACE_STEP_SIZE", value_name = "SIZE", help_heading = "Tuning")]
    pub step_size: Option<String>,
    /// Reads of the object store in flight, at least, however often it asks for fewer [default: 64]
    #[arg(long, env = "MILLRACE_MIN_READS", value_name = "N", help_heading = "Tuning")]
    pub min_reads: Option<usize>,

    /// Reads of the object store in flight, at most [default: 1024; 128 for a local directory]
    #[arg(long, env = "MILLRACE_MAX_READS", value_name = "N", help_heading = "Tuning")]
    pub max_reads: Option<usize>,

    /// Whether a read that takes longer than usual is requested a second time, on or off [default: on]
    #[arg(long, env = "MILLRACE_HEDGE_READS", value_name = "on|off", help_heading = "Tuning")]
    pub hedge_reads: Option<String>,

    /// What goes to the disk cache: all that is read, or by history new data and what is read from the store again within
    /// a minute [default: all]
    #[arg(
        long,
        env = "MILLRACE_DISK_CACHE_ADMISSION",
        value_name = "all|history",
        help_heading = "Tuning"
    )]
    pub disk_cache_admission: Option<String>,

    /// Log records after which a snapshot of the log may be written [default: 256]
    #[arg(long, env = "MILLRACE_SNAPSHOT_RECORDS", value_name = "N", help_heading = "Tuning")]
    pub snapshot_records: Option<u64>,

    /// How often unused objects are deleted; if given, they stay six times as long, until ALTER SYSTEM SET
    /// object_retention says otherwise [default: 10s]
    #[arg(long, env = "MILLRACE_GC_INTERVAL", value_name = "DURATION", help_heading = "Tuning")]
    pub gc_interval: Option<String>,

    /// How the roles of a standalone server call each other: by reference, or for tests through the bytes that the
    /// processes of a cluster exchange [default: direct]
    #[arg(long, env = "MILLRACE_LOOPBACK", value_enum, help_heading = "Tuning")]
    pub loopback: Option<Loopback>,

    /// How the log on stderr is written: for people, or each line a JSON object [default: text]
    #[arg(long, env = "MILLRACE_LOG_FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,

    /// A TOML file with any of the above (listen = "…", data-dir = "…")
    #[arg(long, env = "MILLRACE_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people
    #[default]
    Text,
    /// Each line is a JSON object
    Json,
}

/// Resolved settings of a standalone process.
#[derive(Clone, Debug)]
pub struct Config {
    pub listen: String,
    /// Where others reach it; `None`: where it listens.
    pub advertise: Option<String>,
    /// Whether it takes over an object store that another server uses.
    pub take_over: bool,
    /// `None`: the clock is taken as it is.
    pub max_clock_skew: Option<Duration>,
    pub http: Http,
    pub access: Access,
    pub data_dir: PathBuf,
    pub object_store: String,
    /// Bytes.
    pub memory_limit: usize,
    /// Bytes; 0: no disk cache.
    pub disk_cache: usize,
    pub barrier_interval: Duration,
    pub parallelism: usize,
    pub tuning: Tuning,
    /// How the roles of a standalone server call each other.
    pub loopback: Loopback,
}

impl Config {
    /// A server inside another process, as tests and benchmarks run one: any free port, no HTTP, nothing outside
    /// `data_dir`. What differs is set by the caller.
    pub fn embedded(data_dir: &Path) -> Config {
        Config {
            listen: "127.0.0.1:0".to_owned(),
            advertise: None,
            take_over: false,
            max_clock_skew: None,
            http: Http::Off,
            access: Access::default(),
            data_dir: data_dir.to_path_buf(),
            object_store: format!("file://{}", data_dir.join("store").display()),
            memory_limit: 256 << 20,
            disk_cache: 0,
            barrier_interval: Duration::from_secs(1),
            parallelism: 2,
            tuning: Tuning::default(),
            loopback: Loopback::default(),
        }
    }
}

/// How clients prove who they are, how many there may be, and who else can listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Files of certificate chain and key.
    pub tls: Option<(PathBuf, PathBuf)>,
    pub require_password: bool,
    /// Of the user root, where it has none yet.
    pub root_password: Option<Password>,
    /// Directories that file sources and sinks may use.
    pub allow_paths: Vec<PathBuf>,
    /// Sessions at a time.
    pub max_connections: usize,
    /// Connections at a time of clients that have not proved yet who they are.
    pub max_pending: usize,
    /// How long they have for that.
    pub authentication_timeout: Duration,
}

impl Default for Access {
    fn default() -> Access {
        Access {
            tls: None,
            require_password: false,
            root_password: None,
            allow_paths: Vec::new(),
            max_connections: 1000,
            max_pending: 200,
            authentication_timeout: Duration::from_secs(60),
        }
    }
}

/// A password, which is not printed.
#[derive(Clone, Deserialize, PartialEq, Eq)]
pub struct Password(pub String);

impl Password {
    fn from_env() -> Option<Password> {
        let given = std::env::var("MILLRACE_ROOT_PASSWORD").ok()?;
        (!given.is_empty()).then_some(Password(given))
    }
}

impl std::fmt::Debug for Password {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Password(…)")
    }
}

/// The second name of MILLRACE_HTTP, as --metrics-listen is that of --http: clap takes one from the environment.
pub fn metrics_listen_from_env() -> Option<String> {
    let given = std::env::var_os("MILLRACE_METRICS_LISTEN")?;
    // What is no UTF-8 is no address either, and refused as one.
    Some(given.to_string_lossy().into_owned())
}

/// Where the HTTP port listens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Http {
    #[default]
    Off,
    /// Somebody asked for it: the process does not start without.
    At(String),
    /// The default: the process starts without where the port is taken.
    IfFree(String),
}

impl Http {
    /// `None`: it is off.
    pub fn address(&self) -> Option<&str> {
        match self {
            Http::Off => None,
            Http::At(address) | Http::IfFree(address) => Some(address),
        }
    }

    fn from_option(given: Option<String>, listen: &str) -> Http {
        match given {
            Some(text) if matches!(text.as_str(), "off" | "none" | "") => Http::Off,
            Some(address) => Http::At(address),
            None => beside(listen).map_or(Http::Off, Http::IfFree),
        }
    }
}

/// From psql's port to the console's: 4566 and 5691.
const HTTP_OFFSET: u16 = 1125;

/// The default address beside one for SQL.
fn beside(listen: &str) -> Option<String> {
    let (host, port) = listen.rsplit_once(':')?;
    match port.parse::<u16>().ok()? {
        0 => Some(format!("{host}:0")),
        port => port.checked_add(HTTP_OFFSET).map(|p| format!("{host}:{p}")),
    }
}

/// Thresholds of background work; `None`: what suits the memory limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    pub flush_bytes: Option<usize>,
    pub direct_run_bytes: Option<usize>,
    pub inline_bytes: Option<usize>,
    pub flush_commits: Option<usize>,
    pub flush_age: Option<Duration>,
    pub tail_bytes: Option<usize>,
    pub step_bytes: Option<usize>,
    pub min_reads: Option<usize>,
    pub max_reads: Option<usize>,
    pub hedge_reads: Option<bool>,
    pub disk_cache_admission: Option<AdmissionPolicy>,
    pub snapshot_records: Option<u64>,
    pub gc_interval: Option<Duration>,
}

impl Tuning {
    /// What suits the memory limit, in constants.
    pub const DEFAULT: Tuning = Tuning {
        flush_bytes: None,
        direct_run_bytes: None,
        inline_bytes: None,
        flush_commits: None,
        flush_age: None,
        tail_bytes: None,
        step_bytes: None,
        min_reads: None,
        max_reads: None,
        hedge_reads: None,
        disk_cache_admission: None,
        snapshot_records: None,
        gc_interval: None,
    };
}

/// A setting that cannot be understood.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the config file {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("the config file {} is not valid: {message}", path.display())]
    Parse { path: PathBuf, message: String },
    #[error("{name} is missing: {why}")]
    Missing { name: &'static str, why: &'static str },
    /// One of settings that mean something together only.
    #[error("{missing} is missing, and {given} is given: {why}")]
    Half { given: &'static str, missing: &'static str, why: &'static str },
    #[error("{one} and {other} contradict each other: {why}")]
    Contradiction { one: &'static str, other: &'static str, why: String },
    #[error("--{flag} has no meaning for millrace {role}: it is for {whose}")]
    Foreign { flag: String, role: &'static str, whose: &'static str },
    #[error("invalid value for {name}: \"{value}\" (expected {expected})")]
    Invalid { name: &'static str, value: String, expected: &'static str },
}

/// An address at which a process can be called: a host, and a port that is not 0. `expected` completes the error.
pub(crate) fn callable(
    name: &'static str,
    text: String,
    expected: &'static str,
) -> Result<String, ConfigError> {
    let (host, port) = text.rsplit_once(':').unwrap_or_default();
    // A sign would be taken for part of the number.
    let is_number = port.bytes().all(|digit| digit.is_ascii_digit());
    match port.parse::<u16>() {
        Ok(port) if port > 0 && is_number && is_host(host) => Ok(text),
        _ => Err(ConfigError::Invalid { name, value: text, expected }),
    }
}

/// Whether a text is the name of a host or its address, of IPv6 within brackets.
fn is_host(text: &str) -> bool {
    let somewhere = |ip: IpAddr| !ip.to_canonical().is_unspecified();
    if let Some(address) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        return address.parse::<Ipv6Addr>().is_ok_and(|ip| somewhere(ip.into()));
    }
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    match text.parse::<Ipv4Addr>() {
        Ok(ip) => somewhere(ip.into()),
        Err(_) => !text.is_empty() && text.bytes().all(is_of_name),
    }
}

/// Where others reach this process.
fn advertised(text: String) -> Result<String, ConfigError> {
    let expected =
        "the host and the port at which other processes reach this one, as 10.0.0.2:4571";
    callable("--advertise", text, expected)
}

impl Options {
    /// How the log is written, which is needed before the rest. A config file that cannot be read is an error of
    /// [`Options::resolve`].
    pub fn log_format(&self) -> LogFormat {
        let of_file = || {
            let file: toml::Table = toml::from_str(&read_file(self.config.as_ref()?).ok()?).ok()?;
            file.get("log-format")?.clone().try_into().ok()
        };
        self.log_format.or_else(of_file).unwrap_or_default()
    }

    /// Fills what is not given from the config file, then from defaults.
    pub fn resolve(self) -> Result<Config, ConfigError> {
        let file = match &self.config {
            Some(path) => parsed(path, toml::from_str(&read_file(path)?))?,
            None => Options::default(),
        };
        let given = self.completed_from(file);
        let data_dir = given.data_dir.clone().unwrap_or_else(|| PathBuf::from("millrace-data"));
        let data_dir = std::path::absolute(&data_dir).unwrap_or(data_dir);
        let object_store = given
            .object_store
            .clone()
            .unwrap_or_else(|| format!("file://{}", data_dir.join("store").display()));
        let memory_limit = given.memory_limit()?;
        let disk_cache = given.disk_cache(&object_store)?;
        let barrier_interval = given.barrier_interval()?;
        let parallelism = given.parallelism()?;
        let tuning = given.tuning()?;
        let access = given.access()?;
        let max_clock_skew = given.max_clock_skew()?;
        let listen = given.listen.unwrap_or_else(|| "127.0.0.1:4566".to_string());
        let http = Http::from_option(given.http, &listen);
        Ok(Config {
            listen,
            advertise: given.advertise.map(advertised).transpose()?,
            take_over: given.take_over.unwrap_or_default(),
            max_clock_skew: Some(max_clock_skew),
            http,
            access,
            data_dir,
            object_store,
            memory_limit,
            disk_cache,
            barrier_interval,
            parallelism,
            tuning,
            loopback: given.loopback.unwrap_or_default(),
        })
    }

    /// These, and where one is not given, that of the config file.
    pub(crate) fn completed_from(self, file: Options) -> Options {
        Options {
            listen: self.listen.or(file.listen),
            http: self.http.or_else(metrics_listen_from_env).or(file.http),
            advertise: self.advertise.or(file.advertise),
            take_over: self.take_over.or(file.take_over),
            max_clock_skew: self.max_clock_skew.or(file.max_clock_skew),
            tls_cert: self.tls_cert.or(file.tls_cert),
            tls_key: self.tls_key.or(file.tls_key),
            require_password: self.require_password.or(file.require_password),
            root_password: self.root_password.or_else(Password::from_env).or(file.root_password),
            max_connections: self.max_connections.or(file.max_connections),
            max_pending_connections: self.max_pending_connections.or(file.max_pending_connections),
            authentication_timeout: self.authentication_timeout.or(file.authentication_timeout),
            allow_path: match self.allow_path.is_empty() {
                true => file.allow_path,
                false => self.allow_path,
            },
            data_dir: self.data_dir.or(file.data_dir),
            object_store: self.object_store.or(file.object_store),
            memory_limit: self.memory_limit.or(file.memory_limit),
            disk_cache: self.disk_cache.or(file.disk_cache),
            barrier_interval: self.barrier_interval.or(file.barrier_interval),
            parallelism: self.parallelism.or(file.parallelism),
            flush_size: self.flush_size.or(file.flush_size),
            direct_run_size: self.direct_run_size.or(file.direct_run_size),
            inline_size: self.inline_size.or(file.inline_size),
            flush_commits: self.flush_commits.or(file.flush_commits),
            flush_age: self.flush_age.or(file.flush_age),
            tail_size: self.tail_size.or(file.tail_size),
            step_size: self.step_size.or(file.step_size),
            min_reads: self.min_reads.or(file.min_reads),
            max_reads: self.max_reads.or(file.max_reads),
            hedge_reads: self.hedge_reads.or(file.hedge_reads),
            disk_cache_admission: self.disk_cache_admission.or(file.disk_cache_admission),
            snapshot_records: self.snapshot_records.or(file.snapshot_records),
            gc_interval: self.gc_interval.or(file.gc_interval),
            loopback: self.loopback.or(file.loopback),
            log_format: self.log_format.or(file.log_format),
            config: self.config,
        }
    }
}

pub(crate) fn read_file(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_path_buf(), source })
}

pub(crate) fn parsed<T>(path: &Path, read: Result<T, toml::de::Error>) -> Result<T, ConfigError> {
    read.map_err(|e| ConfigError::Parse { path: path.to_path_buf(), message: e.message().into() })
}

#[cfg(test)]
mod tests;
