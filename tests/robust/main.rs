//! What goes wrong stays where it is (docs/design.md §1, §14): a job that hangs or fails delays no other,
//! bad input is a clear error, reads of state are batched, and sessions under load see what they must.

mod arguments;
mod bad_input;
mod bad_settings;
mod clock;
mod isolation;
mod large;
mod lookahead;
mod loopback;
mod memory;
mod node;
mod pipeline;
mod protocol;
mod rounds;
mod s3;
mod serializable;
mod slow_store;
mod slow_writes;
mod stress;
mod telling;
mod threads;
mod unread;

#[path = "../crash/ledger.rs"]
mod ledger;

use std::path::Path;

use millrace_sqllogictest::{Server, ServerOptions};
use tempfile::TempDir;

/// A server of a directory of its own, which must outlive it.
fn started(args: &[&str]) -> (Server, TempDir) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = ServerOptions {
        data_dir: dir.path().to_path_buf(),
        args: args.iter().map(|a| (*a).to_string()).collect(),
        ..ServerOptions::default()
    };
    let server = Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
        .expect("the server starts");
    (server, dir)
}

/// The most that the process has held in memory at a time.
fn peak_bytes(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid()));
    let status = status.expect("the server runs");
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    kib.expect("the kernel says") << 10
}
