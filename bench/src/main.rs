//! `millrace-bench`: what Millrace costs, measured on the machine it runs on (docs/performance.md).
//!
//! Every result is a table row and a JSON line. Compare modes of one run with each other, not seconds
//! across machines.

mod micro;
mod nexmark;
mod one_row;
mod report;
mod usage;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Benchmarks of Millrace.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A Nexmark query from the generator to a view (or a blackhole), state durable in a local object store
    Nexmark(nexmark::Args),
    /// Inner loops by themselves, in rows a second of one thread
    Micro(micro::Args),
    /// A one-row change under a view, over a large and over a small table
    OneRow(one_row::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("millrace-bench: cannot start threads: {e}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = match cli.command {
        Command::Nexmark(args) => runtime.block_on(nexmark::run(&args)),
        Command::Micro(args) => runtime.block_on(micro::run(&args)),
        Command::OneRow(args) => runtime.block_on(one_row::run(&args)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("millrace-bench: {message}");
            ExitCode::FAILURE
        }
    }
}
