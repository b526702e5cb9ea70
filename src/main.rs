//! `millrace`: the command line.

mod allocator;

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use millrace::config::metrics_listen_from_env;
use millrace::ctl::{self, CtlOptions};
use millrace::roles::{
    ClusterOptions, CompactorProcess, ComputeProcess, FrontendProcess, MetaProcess, Role,
    RoleConfig,
};
use millrace::{LogFormat, Options, Overrides, Standalone, StartError};
use millrace_meta::backup::copy::{Purpose, Which};
use tokio_util::sync::CancellationToken;

/// A streaming SQL database: materialized views that stay right and fresh.
#[derive(Parser)]
#[command(version, about, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Without a subcommand: as `standalone`.
    #[command(flatten)]
    options: Options,
}

#[derive(Subcommand)]
enum Command {
    /// Runs all roles in one process (the default)
    Standalone(Options),
    /// Runs the leader of a cluster: it has the log, and places jobs
    Meta(ClusterOptions),
    /// Runs a frontend of a cluster: sessions of psql and drivers
    Frontend(ClusterOptions),
    /// Runs a compute process of a cluster: jobs run on it
    Compute(ClusterOptions),
    /// Runs a compactor of a cluster: it merges what jobs have written
    Compactor(ClusterOptions),
    /// Runs a server with a Nexmark stream and five views, and shows what they do
    ///
    /// Its data goes into a temporary directory and away with it, unless --data-dir or --object-store
    /// says otherwise. With --connect it starts no server: the stream and the views are made in one that runs, and
    /// dropped at the end.
    Demo(Demo),
    /// Copies everything in a store, up to one moment, into an empty directory or prefix
    ///
    /// A server may go on running on the store.
    Backup(Backup),
    /// Copies a backup into an empty directory or prefix, for a server to be started on
    Restore(Restore),
    /// Asks a server whether it serves; the exit code is 0 if it does
    Health(Health),
    /// Shows and steers a cluster: its processes, and where jobs run
    Ctl(CtlOptions),
}

#[derive(clap::Args)]
struct Health {
    /// The server's HTTP port [default: 127.0.0.1:5691]
    #[arg(long, visible_alias = "metrics-listen", env = "MILLRACE_HTTP", value_name = "HOST:PORT")]
    http: Option<String>,
}

impl Health {
    fn address(self) -> String {
        let given = self.http.or_else(metrics_listen_from_env);
        given.unwrap_or_else(|| "127.0.0.1:5691".to_owned())
    }
}

#[derive(clap::Args)]
struct Backup {
    /// The store to be copied: file:///path or s3://bucket/prefix
    #[arg(long, env = "MILLRACE_OBJECT_STORE", value_name = "URL")]
    object_store: String,
    /// Where the backup is made
    #[arg(long, value_name = "URL")]
    to: String,
}

#[derive(clap::Args)]
struct Restore {
    /// The backup
    #[arg(long, value_name = "URL")]
    from: String,
    /// The new store
    #[arg(long, env = "MILLRACE_OBJECT_STORE", value_name = "URL")]
    object_store: String,
}

#[derive(clap::Args)]
struct Demo {
    #[command(flatten)]
    options: Options,
    /// Events a second, of all three kinds
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    rate: u64,
    /// Ends by itself after it has shown its views for so many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// A server or cluster that runs: HOST:PORT, or what psql takes, as postgres://root@127.0.0.1:4566/dev; a password
    /// from PGPASSWORD. Connections are not encrypted
    #[arg(long, value_name = "ADDRESS")]
    connect: Option<String>,
}

fn main() -> ExitCode {
    let given = Cli::command().get_matches();
    let cli = Cli::from_arg_matches(&given).unwrap_or_else(|e| e.exit());
    // The demo draws on the terminal: only what matters may come between.
    let level = match cli.command {
        Some(Command::Demo(_) | Command::Ctl(_)) => "warn",
        _ => "info",
    };
    let format = log_format(&cli);
    millrace::logging::begin(level, format);
    let result = match cli.command {
        Some(Command::Standalone(options)) => run(options, &given, serve),
        Some(Command::Meta(options)) => run_role(options, Role::Meta, &given),
        Some(Command::Frontend(options)) => run_role(options, Role::Frontend, &given),
        Some(Command::Compute(options)) => run_role(options, Role::Compute, &given),
        Some(Command::Compactor(options)) => run_role(options, Role::Compactor, &given),
        Some(Command::Demo(demo)) => run_demo(demo, &given),
        Some(Command::Backup(backup)) => copy(&backup.object_store, &backup.to, Purpose::Keep),
        Some(Command::Restore(restore)) => copy(&restore.from, &restore.object_store, Purpose::Run),
        Some(Command::Health(health)) => millrace::health::check(&health.address()),
        Some(Command::Ctl(options)) => run_ctl(options),
        None => run(cli.options, &given, serve),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            match format {
                LogFormat::Text => eprintln!("millrace: {message}"),
                LogFormat::Json => tracing::error!("{message}"),
            }
            ExitCode::FAILURE
        }
    }
}

fn log_format(cli: &Cli) -> LogFormat {
    match &cli.command {
        None => cli.options.log_format(),
        Some(Command::Standalone(options)) => options.log_format(),
        Some(
            Command::Meta(options)
            | Command::Frontend(options)
            | Command::Compute(options)
            | Command::Compactor(options),
        ) => options.process.log_format(),
        Some(Command::Demo(demo)) => demo.options.log_format(),
        Some(Command::Backup(_) | Command::Restore(_) | Command::Health(_) | Command::Ctl(_)) => {
            LogFormat::Text
        }
    }
}

/// `millrace ctl`.
fn run_ctl(options: CtlOptions) -> Result<(), String> {
    let runtime =
        tokio::runtime::Runtime::new().map_err(|e| format!("cannot start threads: {e}"))?;
    let told = runtime.block_on(ctl::run(options))?;
    let printed = print(&told.text);
    told.trouble.map_or(printed, Err)
}

/// `millrace backup` and `restore`.
fn copy(from: &str, to: &str, purpose: Purpose) -> Result<(), String> {
    let runtime =
        tokio::runtime::Runtime::new().map_err(|e| format!("cannot start threads: {e}"))?;
    let copied = runtime.block_on(millrace::copy::copy(from, to, Which::Newest, purpose))?;
    print(&millrace::copy::told(&copied))
}

/// Flags of a demo that has no server of its own, with the names of their groups.
const CONNECTED_DEMO: [&str; 5] = ["connect", "rate", "seconds", "Demo", "Options"];

/// Refuses flags of a server where the demo starts none.
fn check_connected_demo(given: &ArgMatches) -> Result<(), String> {
    let Some((_, given)) = given.subcommand() else { return Ok(()) };
    let on_line = |id: &&str| given.value_source(id) == Some(ValueSource::CommandLine);
    let given = given.ids().map(clap::Id::as_str).filter(on_line);
    match given.into_iter().find(|id| !CONNECTED_DEMO.contains(id)) {
        Some(flag) => Err(format!("--{} has no meaning with --connect", flag.replace('_', "-"))),
        None => Ok(()),
    }
}

fn run_demo(demo: Demo, given: &ArgMatches) -> Result<(), String> {
    let Demo { mut options, rate, seconds, connect } = demo;
    if let Some(address) = connect {
        check_connected_demo(given)?;
        let runtime =
            tokio::runtime::Runtime::new().map_err(|e| format!("cannot start threads: {e}"))?;
        return runtime.block_on(show_connected_demo(&address, rate, seconds));
    }
    let mut scratch = None;
    if options.data_dir.is_none() && options.object_store.is_none() && options.config.is_none() {
        let dir = tempfile::Builder::new()
            .prefix("millrace-demo-")
            .tempdir()
            .map_err(|e| format!("cannot make a temporary directory: {e}"))?;
        options.data_dir = Some(dir.path().to_path_buf());
        scratch = Some(dir);
    }
    let result = run(options, given, move |config| show_demo(config, rate, seconds));
    drop(scratch);
    result
}

/// Ctrl-C or SIGTERM, or the end of the time that was given, which begins now.
async fn demo_end(stop: impl Future<Output = ()>, seconds: Option<u64>) {
    let until = async {
        match seconds {
            Some(seconds) => tokio::time::sleep(std::time::Duration::from_secs(seconds)).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = stop => {}
        () = until => {}
    }
}

async fn show_connected_demo(address: &str, rate: u64, seconds: Option<u64>) -> Result<(), String> {
    let remote = millrace::demo::remote::Remote::connect(address).await?;
    let stop = stop_signal();
    tokio::pin!(stop);
    let created = tokio::select! {
        created = millrace::demo::create(&remote, rate) => Some(created),
        () = &mut stop => None,
    };
    if let Some(Ok(())) = created {
        say("Try: SELECT * FROM millrace_demo.sellers ORDER BY bids DESC LIMIT 5;\n");
        millrace::demo::show(&remote, demo_end(stop, seconds)).await;
    }
    let cleaned = remote.clean_up().await;
    created.unwrap_or(Ok(()))?;
    cleaned?;
    say("\nThe demo has ended, and what it made is dropped.");
    Ok(())
}

async fn show_demo(
    config: millrace::Config,
    rate: u64,
    seconds: Option<u64>,
) -> Result<(), String> {
    let server =
        Standalone::start(config, Overrides::threads_apart()).await.map_err(|e| e.to_string())?;
    let stop = stop_signal();
    tokio::pin!(stop);
    let created = tokio::select! {
        created = millrace::demo::create(&server, rate) => Some(created),
        () = &mut stop => None,
    };
    if let Some(Ok(())) = created {
        greet(&server);
        say("Try: SELECT * FROM sellers ORDER BY bids DESC LIMIT 5;\n");
        millrace::demo::show(&server, demo_end(stop, seconds)).await;
        say("\nThe demo has ended.");
    }
    server.shutdown().await;
    created.unwrap_or(Ok(()))
}

/// Where to connect.
fn greet(server: &Standalone) {
    let address = server.address;
    if let Some(http) = server.http {
        say(&format!("Console: http://{http}/"));
    }
    say(&format!("psql -h {} -p {} -U root dev", address.ip(), address.port()));
}

/// What a command has come to. Whoever has read enough of it is no failure.
fn print(text: &str) -> Result<(), String> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(format!("it is done, and what it has come to cannot be printed: {error}"))
        }
        _ => Ok(()),
    }
}

/// A line for whoever started the server. Nobody may be there to read it.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn run<F: Future<Output = Result<(), String>>>(
    options: Options,
    given: &ArgMatches,
    serve: impl FnOnce(millrace::Config) -> F,
) -> Result<(), String> {
    let config = options.resolve().map_err(|e| e.told(given))?;
    run_on_threads(config.memory_limit, serve(config))
}

fn run_role(options: ClusterOptions, role: Role, given: &ArgMatches) -> Result<(), String> {
    if let Some((_, given)) = given.subcommand() {
        ClusterOptions::check_flags(role, given).map_err(|e| e.to_string())?;
    }
    let config = options.resolve(role).map_err(|e| e.told(given))?;
    run_on_threads(config.process.memory_limit, serve_role(config))
}

fn run_on_threads(
    memory_limit: usize,
    serve: impl Future<Output = Result<(), String>>,
) -> Result<(), String> {
    allocator::tune(memory_limit);
    let runtime = millrace::runtimes::builder("millrace", memory_limit)
        .build()
        .map_err(|e| format!("cannot start threads: {e}"))?;
    let result = runtime.block_on(serve);
    // What is still under way needs no end: nothing durable depends on it, and the process ends now. Tearing the
    // runtime down beneath it would make it panic instead.
    std::mem::forget(runtime);
    result
}

async fn serve(config: millrace::Config) -> Result<(), String> {
    let store = config.object_store.clone();
    let server =
        Standalone::start(config, Overrides::threads_apart()).await.map_err(|e| e.to_string())?;
    say(&format!("Millrace is ready; data in {store}"));
    greet(&server);
    tokio::select! {
        () = stop_signal() => {
            tracing::info!("stopping");
            server.shutdown().await;
            Ok(())
        }
        error = server.deposed() => Err(error.to_string()),
    }
}

/// A process of a cluster, until it is stopped, or has been fenced or deposed.
async fn serve_role(config: RoleConfig) -> Result<(), String> {
    let overrides = Overrides::threads_apart();
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    tokio::spawn(async move {
        stop_signal().await;
        stopped.cancel();
    });
    macro_rules! until_ended {
        ($process:ident, $name:literal) => {{
            let process = match $process::start_until(config, overrides, &stop).await {
                Ok(process) => process,
                Err(StartError::Stopped) => return Ok(()),
                Err(error) => return Err(error.to_string()),
            };
            say(&format!(concat!("Millrace ", $name, " is ready on {}"), process.address));
            tokio::select! {
                biased;
                () = stop.cancelled() => {
                    tracing::info!("stopping");
                    process.shutdown().await;
                    Ok(())
                }
                reason = process.ended() => Err(reason),
            }
        }};
    }
    match config.role {
        Role::Meta => until_ended!(MetaProcess, "meta"),
        Role::Frontend => until_ended!(FrontendProcess, "frontend"),
        Role::Compute => until_ended!(ComputeProcess, "compute"),
        Role::Compactor => until_ended!(CompactorProcess, "compactor"),
    }
}

/// Ctrl-C or SIGTERM.
async fn stop_signal() {
    let interrupt = tokio::signal::ctrl_c();
    match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
        Ok(mut terminate) => {
            tokio::select! {
                _ = interrupt => {}
                _ = terminate.recv() => {}
            }
        }
        Err(_) => {
            // Without a handler the kernel's default still ends the process.
            let _ = interrupt.await;
        }
    }
}
