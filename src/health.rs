//! `millrace health`: whether a server answers, for a container's health check.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// For connecting and for each part of the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// An answer is shorter.
const ANSWER_BYTES: u64 = 4096;

/// The status, and what else is said.
fn described(answer: &str) -> String {
    let status = answer.lines().next().unwrap_or_default();
    match answer.split_once("\r\n\r\n").map(|(_, body)| body.trim()) {
        Some(reason) if !reason.is_empty() => format!("{status}: {reason}"),
        _ => status.to_owned(),
    }
}

/// Asks the HTTP port of a server whether it serves. The error says why not.
pub fn check(address: &str) -> Result<(), String> {
    let cannot = |e: std::io::Error| format!("no answer from {address}: {e}");
    let mut addresses = address.to_socket_addrs().map_err(cannot)?;
    let first = addresses.next().ok_or_else(|| format!("{address} is no address"))?;
    let mut stream = TcpStream::connect_timeout(&first, PATIENCE).map_err(cannot)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(cannot)?;
    stream.set_write_timeout(Some(PATIENCE)).map_err(cannot)?;
    let request = format!("GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(cannot)?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES).read_to_end(&mut answer).map_err(cannot)?;
    let answer = String::from_utf8_lossy(&answer);
    match answer.starts_with("HTTP/1.1 200 ") {
        true => Ok(()),
        false => Err(format!("{address} answered: {}", described(&answer))),
    }
}
