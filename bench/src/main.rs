//! `millrace-bench`: what Millrace costs, measured on the machine it runs on (docs/performance.md).
//!
//! Every result is a table row and a JSON line. Compare modes of one run with each other, not seconds
//! across machines.

/// The server's own: what is measured is what it has.
#[path = "../../src/allocator.rs"]
mod allocator;
mod chart;
mod cold;
mod compaction;
mod cores;
mod freshness;
mod isolation;
mod jobs;
mod life;
mod memory;
mod micro;
mod nexmark;
mod one_row;
mod prefetch;
mod recovery;
mod report;
mod statements;
mod sums;
mod usage;
mod warm;
mod window;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

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
    /// A one-row change under window functions, over groups of growing size
    Window(window::Args),
    /// Tiny views over tables that change at the full rate of commits: what a long life leaves behind
    Life(life::Args),
    /// Whole tables that change under many views: the most memory that is resident, of the limit
    Memory(memory::Args),
    /// Rows whose state is in no cache, over a simulated store: an aggregate and a join, in both modes of state access
    Cold(cold::Args),
    /// Keyed statements a second of many sessions on one table whose keys are in no cache, over a simulated store
    Statements(statements::Args),
    /// Rows at a fixed rate whose state is in no cache: how long until they are visible, with and without lookahead
    #[command(long_about = prefetch::ABOUT)]
    Prefetch(prefetch::Args),
    /// Rows whose keys change, over a store that gets faster: by the second, what is read ahead and what rows wait for
    #[command(long_about = prefetch::adapt::ABOUT)]
    Adapt(prefetch::adapt::Args),
    /// From a row sent until it can be read, is streamed, and is in a sink, behind chains of views
    Freshness(freshness::Args),
    /// A one-row change and a fresh read of a small view, alone and beside the work of other jobs and queries
    Isolation(isolation::Args),
    /// Commits, CREATE, DROP and idling with many views
    Jobs(jobs::Args),
    /// A view whose process is killed, until another one gives out a row of it, by the size of its state
    Recovery(recovery::Args),
    /// An UPDATE and a fresh read while nothing is merged, while a compactor merges, and while the compute process does
    CompactionIsolation(compaction::Args),
    /// A process of a cluster that another command has started
    #[command(hide = true)]
    Process(compaction::process::Args),
}

fn main() -> ExitCode {
    // As with a limit that is not small.
    allocator::tune(usize::MAX);
    let cli = Cli::parse();
    if let Command::Process(args) = &cli.command {
        // It has threads of its own.
        end(compaction::process::run(args));
    }
    eprintln!("built with the profile {}", env!("MILLRACE_PROFILE"));
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
        Command::Jobs(args) => runtime.block_on(jobs::run(&args)),
        Command::Cold(args) => runtime.block_on(cold::run(&args)),
        Command::Adapt(args) => runtime.block_on(prefetch::adapt::run(&args)),
        Command::Freshness(args) => runtime.block_on(freshness::run(&args)),
        Command::Isolation(args) => runtime.block_on(isolation::run(&args)),
        Command::Life(args) => runtime.block_on(life::run(&args)),
        Command::Memory(args) => runtime.block_on(memory::run(&args)),
        Command::OneRow(args) => runtime.block_on(one_row::run(&args)),
        Command::Prefetch(args) => runtime.block_on(prefetch::run(&args)),
        Command::Statements(args) => runtime.block_on(statements::run(&args)),
        Command::Window(args) => runtime.block_on(window::run(&args)),
        Command::Recovery(args) => runtime.block_on(recovery::run(&args)),
        Command::CompactionIsolation(args) => runtime.block_on(compaction::run(&args)),
        // It has ended.
        Command::Process(_) => Ok(()),
    };
    end(outcome)
}

/// Ends the program. What may still run, as compactions, ends with it: nobody needs the results.
fn end(outcome: Result<(), String>) -> ! {
    let code = match outcome {
        Ok(()) => 0,
        Err(message) => {
            eprintln!("millrace-bench: {message}");
            1
        }
    };
    std::process::exit(code)
}
