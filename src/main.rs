//! `millrace`: the command line.

mod allocator;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use millrace::{Options, Overrides, Standalone};

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
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("MILLRACE_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .init();
    let cli = Cli::parse();
    let options = match cli.command {
        Some(Command::Standalone(options)) => options,
        None => cli.options,
    };
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("millrace: {message}");
            ExitCode::FAILURE
        }
    }
}

/// How long a thread for flushes, compactions and file access waits for more work.
const IDLE_THREAD: std::time::Duration = std::time::Duration::from_secs(1);

/// Threads for flushes, compactions and file access, at most. Each keeps pages of its own for every size
/// that it has ever asked for. Few are enough: only a flush and a compaction wait on one for another.
fn blocking_threads(limit: usize) -> usize {
    (limit / (32 << 20)).clamp(8, 512)
}

fn run(options: Options) -> Result<(), String> {
    let config = options.resolve().map_err(|e| e.to_string())?;
    allocator::tune(config.memory_limit);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("millrace")
        // Each keeps some memory of its own.
        .thread_keep_alive(IDLE_THREAD)
        .max_blocking_threads(blocking_threads(config.memory_limit))
        .on_thread_stop(millrace_common::heap::report)
        .build()
        .map_err(|e| format!("cannot start threads: {e}"))?;
    runtime.block_on(serve(config))
}

async fn serve(config: millrace::Config) -> Result<(), String> {
    let store = config.object_store.clone();
    let server =
        Standalone::start(config, Overrides::default()).await.map_err(|e| e.to_string())?;
    let address = server.address;
    println!("Millrace is ready; data in {store}");
    println!("psql -h {} -p {} -U root dev", address.ip(), address.port());
    tokio::select! {
        () = stop_signal() => {
            tracing::info!("stopping");
            server.shutdown().await;
            Ok(())
        }
        error = server.deposed() => Err(error.to_string()),
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
