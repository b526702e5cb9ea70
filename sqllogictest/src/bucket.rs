//! Buckets of the S3-compatible server that tests are given (`MILLRACE_TEST_S3`: its address).

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The server's address; `None`, outside of CI only: there is none.
///
/// # Panics
/// In CI without one.
pub fn endpoint() -> Option<String> {
    let found = std::env::var("MILLRACE_TEST_S3").ok();
    let ci = std::env::var("CI").is_ok_and(|v| v == "true");
    assert!(found.is_some() || !ci, "MILLRACE_TEST_S3 is not set");
    if found.is_none() {
        println!("skipped: MILLRACE_TEST_S3 is not set");
    }
    found
}

/// Makes a bucket; one that is there already is fine.
///
/// # Panics
/// If the server does not.
pub fn create(endpoint: &str, bucket: &str) {
    let host = endpoint.trim_start_matches("http://");
    // It may have been started only just before.
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut stream = loop {
        match TcpStream::connect(host) {
            Ok(stream) => break stream,
            Err(e) => assert!(Instant::now() < deadline, "the S3 server does not answer: {e}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let request = format!(
        "PUT /{bucket} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// What a process needs in its environment to use the server.
pub fn environment(endpoint: &str) -> HashMap<String, String> {
    let env = [
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ALLOW_HTTP", "true"),
    ];
    HashMap::from(env.map(|(k, v)| (k.to_string(), v.to_string())))
}
