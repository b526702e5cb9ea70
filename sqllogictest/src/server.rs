//! A `millrace` process under test.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio_postgres::NoTls;

/// How long a server may take to print its address (a cold dev binary on a busy machine).
const START_LIMIT: Duration = Duration::from_secs(180);
/// How long a test's read waits for a view: on a busy machine a view may be seconds behind, and that is not what
/// a test asks.
const READ_WAIT: &str = "SET read_wait_timeout = '120s'";

/// How to start a server.
#[derive(Clone, Debug, Default)]
pub struct ServerOptions {
    pub data_dir: PathBuf,
    /// More flags of `millrace standalone`.
    pub args: Vec<String>,
    /// Environment of the process (crash points, S3 credentials …).
    pub env: HashMap<String, String>,
}

/// Small thresholds, so that a short run also flushes, compacts and collects garbage.
const SMALL: &[&str] = &[
    "--memory-limit=64MB",
    "--flush-size=16KB",
    "--inline-size=256",
    "--snapshot-records=32",
    "--gc-interval=100ms",
    "--parallelism=2",
];

impl ServerOptions {
    /// A server for which little data is much.
    pub fn small(data_dir: &Path) -> ServerOptions {
        ServerOptions {
            data_dir: data_dir.to_path_buf(),
            args: SMALL.iter().map(|a| (*a).to_string()).collect(),
            env: HashMap::new(),
        }
    }
}

/// A running child process; killed when dropped.
pub struct Server {
    binary: PathBuf,
    options: ServerOptions,
    child: Child,
    pub port: u16,
    /// Of the web console and metrics.
    pub http: Option<u16>,
    log: Log,
}

/// What a process writes to its standard error, read by a thread.
#[derive(Default)]
struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Log {
    fn of(child: &mut Child) -> Log {
        let mut log = Log::default();
        if let Some(err) = child.stderr.take() {
            let lines = Arc::clone(&log.lines);
            log.reader = Some(std::thread::spawn(move || {
                for line in BufReader::new(err).lines().map_while(Result::ok) {
                    if let Ok(mut lines) = lines.lock() {
                        lines.push(line);
                    }
                }
            }));
        }
        log
    }

    /// Of a process that has ended: waits until its last line has been read.
    fn finish(&mut self) {
        if let Some(reader) = self.reader.take() {
            // A reader that panicked has read what it could.
            let _ = reader.join();
        }
    }

    fn text(&self) -> String {
        self.lines.lock().map(|l| l.join("\n")).unwrap_or_default()
    }
}

impl Server {
    /// Starts the binary on a free port and waits until it says where it listens.
    pub fn start(binary: &Path, options: ServerOptions) -> Result<Server, String> {
        let (child, port, http, log) = spawn(binary, &options)?;
        Ok(Server { binary: binary.to_path_buf(), options, child, port, http, log })
    }

    /// `kill -9`, and waits until the process is gone and all that it said is in the log.
    pub fn kill(&mut self) {
        // Already gone is fine: a crash point may have got there first.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.log.finish();
    }

    /// Whether the process has ended by itself.
    pub fn has_exited(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Starts the same server again on the same data, with another environment if given.
    pub fn restart(&mut self, env: Option<HashMap<String, String>>) -> Result<(), String> {
        self.kill();
        if let Some(env) = env {
            self.options.env = env;
        }
        let (child, port, http, log) = spawn(&self.binary, &self.options)?;
        self.http = http;
        self.child = child;
        self.port = port;
        self.log = log;
        Ok(())
    }

    /// Process id, for looking at `/proc`.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What the server wrote to its log so far.
    pub fn log(&self) -> String {
        self.log.text()
    }

    /// A new connection; its driver runs in the background.
    pub async fn connect(&self) -> Result<tokio_postgres::Client, tokio_postgres::Error> {
        connect(self.port).await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Connects to a server on loopback as `root`, database `dev`.
pub async fn connect(port: u16) -> Result<tokio_postgres::Client, tokio_postgres::Error> {
    let text = format!("host=127.0.0.1 port={port} user=root dbname=dev");
    let (client, connection) = tokio_postgres::connect(&text, NoTls).await?;
    tokio::spawn(async move {
        // The client's calls report what went wrong.
        let _ = connection.await;
    });
    client.batch_execute(READ_WAIT).await?;
    Ok(client)
}

type Started = (Child, u16, Option<u16>, Log);

fn spawn(binary: &Path, options: &ServerOptions) -> Result<Started, String> {
    let mut child = Command::new(binary)
        .arg("standalone")
        .args(["--listen", "127.0.0.1:0", "--data-dir"])
        .arg(&options.data_dir)
        .args(&options.args)
        .envs(&options.env)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("cannot start {}: {e}", binary.display()))?;
    let mut log = Log::of(&mut child);
    let (sender, receiver) = std::sync::mpsc::channel();
    if let Some(out) = child.stdout.take() {
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                // Nobody listens any more once the port is known.
                let _ = sender.send(line);
            }
        });
    }
    let started = Instant::now();
    let mut http = None;
    while started.elapsed() < START_LIMIT {
        match receiver.recv_timeout(Duration::from_millis(50)) {
            Ok(line) => {
                http = http.or_else(|| http_of(&line));
                if let Some(port) = port_of(&line) {
                    return Ok((child, port, http, log));
                }
            }
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    let _ = child.kill();
    let _ = child.wait();
    log.finish();
    Err(format!("the server did not start:\n{}", log.text()))
}

/// The port in the line `psql -h 127.0.0.1 -p 4566 …`.
fn port_of(line: &str) -> Option<u16> {
    let mut words = line.split_whitespace().skip_while(|w| *w != "-p");
    words.next()?;
    words.next()?.parse().ok()
}

/// The port in the line `Console: http://127.0.0.1:5691/`.
fn http_of(line: &str) -> Option<u16> {
    line.strip_prefix("Console: http://")?.trim_end_matches('/').rsplit(':').next()?.parse().ok()
}
