//! `millrace-s3`: the command line.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use millrace_s3::{HEALTH, Options, Server};
use millrace_storage::sim::{Faults, Profile, RequestKind};
use tokio::signal::unix::{SignalKind, signal};

const HEALTH_PATIENCE: Duration = Duration::from_secs(5);

/// An S3 server over a directory: a tool for tests and demos, no place for data that matter
#[derive(Parser)]
#[command(version, about, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Subcommand)]
enum Command {
    /// Asks a server whether it serves; the exit code is 0 if it does
    Health {
        /// Where it listens
        #[arg(long, env = "MILLRACE_S3_LISTEN", default_value = "127.0.0.1:9000")]
        listen: String,
    },
}

#[derive(clap::Args)]
struct Flags {
    /// Address for clients
    #[arg(long, env = "MILLRACE_S3_LISTEN", value_name = "HOST:PORT")]
    #[arg(default_value = "127.0.0.1:9000")]
    listen: String,
    /// Directory that holds the buckets
    #[arg(long, env = "MILLRACE_S3_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// A bucket that is to be there; may be given several times (in the environment separated by commas)
    #[arg(long, env = "MILLRACE_S3_BUCKET", value_name = "NAME", value_delimiter = ',')]
    bucket: Vec<String>,
    /// The one access key
    #[arg(long, env = "MILLRACE_S3_ACCESS_KEY", value_name = "KEY")]
    access_key: Option<String>,
    /// Its secret
    #[arg(long, env = "MILLRACE_S3_SECRET_KEY", value_name = "KEY", hide_env_values = true)]
    secret_key: Option<String>,
    /// Latencies, bandwidth and limits of a kind of store
    #[arg(long, env = "MILLRACE_S3_PROFILE", default_value = "instant")]
    profile: ProfileName,
    /// Of all requests together, instead of the profile's; 0: unlimited
    #[arg(long, env = "MILLRACE_S3_BYTES_PER_SECOND", value_name = "N")]
    bytes_per_second: Option<u64>,
    /// Above it requests wait; 0: unlimited
    #[arg(long, env = "MILLRACE_S3_REQUESTS_PER_SECOND", value_name = "N")]
    requests_per_second: Option<u64>,
    /// Of the latencies and faults
    #[arg(long, env = "MILLRACE_S3_SEED", value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    faults: FaultFlags,
    /// Lets two creators of a key win, as servers do that look first and write then: to test that it is refused
    #[arg(long, env = "MILLRACE_S3_RACY", help_heading = "Faults")]
    racy: bool,
}

/// Each a probability for a request, 0 to 1, but for the last two.
#[derive(clap::Args)]
#[command(next_help_heading = "Faults")]
struct FaultFlags {
    /// Requests that are answered with an error and not done (0 to 1, as all these)
    #[arg(long, env = "MILLRACE_S3_FAULT_ERROR", value_name = "P", default_value_t = 0.0)]
    #[arg(value_parser = probability)]
    fault_error: f64,
    /// Requests that are done, but answered with an error
    #[arg(long, env = "MILLRACE_S3_FAULT_LOST_ANSWER", value_name = "P", default_value_t = 0.0)]
    #[arg(value_parser = probability)]
    fault_lost_answer: f64,
    /// Requests that are never answered
    #[arg(long, env = "MILLRACE_S3_FAULT_HANG", value_name = "P", default_value_t = 0.0)]
    #[arg(value_parser = probability)]
    fault_hang: f64,
    /// Requests whose connection is closed without an answer
    #[arg(long, env = "MILLRACE_S3_FAULT_RESET", value_name = "P", default_value_t = 0.0)]
    #[arg(value_parser = probability)]
    fault_reset: f64,
    /// Requests that are answered with 503 Slow Down
    #[arg(long, env = "MILLRACE_S3_FAULT_SLOW_DOWN", value_name = "P", default_value_t = 0.0)]
    #[arg(value_parser = probability)]
    fault_slow_down: f64,
    /// Writes that find no space
    #[arg(long, env = "MILLRACE_S3_FAULT_DISK_FULL", value_name = "P", default_value_t = 0.0)]
    #[arg(value_parser = probability)]
    fault_disk_full: f64,
    /// Reads that break off
    #[arg(long, env = "MILLRACE_S3_FAULT_SHORT_READ", value_name = "P", default_value_t = 0.0)]
    #[arg(value_parser = probability)]
    fault_short_read: f64,
    /// Reads with a flipped bit
    #[arg(long, env = "MILLRACE_S3_FAULT_DAMAGED_READ", value_name = "P", default_value_t = 0.0)]
    #[arg(value_parser = probability)]
    fault_damaged_read: f64,
    /// Requests a second above which the answer is 503 Slow Down; 0: unlimited
    #[arg(long, env = "MILLRACE_S3_SLOW_DOWN_ABOVE", value_name = "N", default_value_t = 0)]
    slow_down_above: u64,
    /// The kind of requests that these faults, other than those of reads, happen to
    #[arg(long, env = "MILLRACE_S3_FAULT_ONLY")]
    fault_only: Option<KindName>,
}

#[derive(Clone, Copy, ValueEnum)]
enum ProfileName {
    Instant,
    Nvme,
    Dfs,
    S3Express,
    S3,
}

#[derive(Clone, Copy, ValueEnum)]
enum KindName {
    Put,
    Get,
    List,
    Delete,
}

fn probability(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(p) if (0.0..=1.0).contains(&p) => Ok(p),
        _ => Err("it must be a number from 0 to 1".to_string()),
    }
}

impl From<FaultFlags> for Faults {
    fn from(flags: FaultFlags) -> Faults {
        Faults {
            error: flags.fault_error,
            lost_answer: flags.fault_lost_answer,
            hang: flags.fault_hang,
            reset: flags.fault_reset,
            slow_down: flags.fault_slow_down,
            disk_full: flags.fault_disk_full,
            short_read: flags.fault_short_read,
            damaged_read: flags.fault_damaged_read,
            slow_down_above: flags.slow_down_above,
            only: flags.fault_only.map(|kind| match kind {
                KindName::Put => RequestKind::Put,
                KindName::Get => RequestKind::Get,
                KindName::List => RequestKind::List,
                KindName::Delete => RequestKind::Delete,
            }),
            ..Faults::default()
        }
    }
}

impl TryFrom<Flags> for Options {
    type Error = String;

    /// What must be given is checked here: the subcommand needs none of it.
    fn try_from(flags: Flags) -> Result<Options, String> {
        fn given<T>(value: Option<T>, flag: &str, env: &str) -> Result<T, String> {
            value.ok_or_else(|| format!("--{flag} (or {env}) is missing"))
        }
        let mut profile = match flags.profile {
            ProfileName::Instant => Profile::INSTANT,
            ProfileName::Nvme => Profile::NVME,
            ProfileName::Dfs => Profile::DFS,
            ProfileName::S3Express => Profile::S3_EXPRESS,
            ProfileName::S3 => Profile::S3,
        };
        profile.bytes_per_second = flags.bytes_per_second.unwrap_or(profile.bytes_per_second);
        profile.requests_per_second =
            flags.requests_per_second.unwrap_or(profile.requests_per_second);
        Ok(Options {
            listen: flags.listen,
            data_dir: given(flags.data_dir, "data-dir", "MILLRACE_S3_DATA_DIR")?,
            buckets: flags.bucket,
            access_key: given(flags.access_key, "access-key", "MILLRACE_S3_ACCESS_KEY")?,
            secret_key: given(flags.secret_key, "secret-key", "MILLRACE_S3_SECRET_KEY")?,
            profile,
            faults: flags.faults.into(),
            seed: flags.seed,
            racy: flags.racy,
        })
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("MILLRACE_LOG")
                // What a fault does is no error of the server.
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,s3s=off")),
        )
        .init();
    let result = match cli.command {
        Some(Command::Health { listen }) => health(&listen),
        None => cli.flags.try_into().and_then(serve),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("millrace-s3: {message}");
            ExitCode::FAILURE
        }
    }
}

/// A line for whoever started the server. Nobody may be there to read it.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

#[tokio::main]
async fn serve(options: Options) -> Result<(), String> {
    let signals = |e: std::io::Error| format!("cannot wait for signals: {e}");
    let mut terminate = signal(SignalKind::terminate()).map_err(signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(signals)?;
    let server = Server::start(options).await.map_err(|e| e.to_string())?;
    say("millrace-s3 is a tool for tests and demos: no place for data that matter.");
    say(&format!("Listening on {}", server.endpoint()));
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    server.stop().await;
    Ok(())
}

fn health(listen: &str) -> Result<(), String> {
    // A server that listens everywhere is asked on this machine.
    let address = listen.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:");
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(&address)?;
        stream.set_read_timeout(Some(HEALTH_PATIENCE))?;
        stream.set_write_timeout(Some(HEALTH_PATIENCE))?;
        let request =
            format!("GET {HEALTH} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.take(4096).read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = ask().map_err(|e| format!("no answer from {address}: {e}"))?;
    if answer.starts_with("HTTP/1.1 200") {
        return Ok(());
    }
    Err(format!("{address} answers {}", answer.lines().next().unwrap_or("nothing")))
}
