//! One process of the cluster, as this program runs it when it is told to; and such processes as their parent has them.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use millrace::roles::{
    Auth, CompactorProcess, ComputeProcess, FrontendProcess, MetaProcess, Role, RoleConfig,
};
use millrace::{Config, Overrides, StartError, Tuning, runtimes};
use millrace_storage::object::open_object_store;
use millrace_storage::sim::{Profile, SimStore};

use crate::cores;
use crate::usage::cpu_s_of;

/// Of each process.
const MEMORY_LIMIT: usize = 1 << 30;
const PARALLELISM: usize = 1;
const BARRIER_INTERVAL: Duration = Duration::from_millis(100);
/// How long a process may take until it is ready.
const STARTS: Duration = Duration::from_secs(60);
/// Where runs lie in the store.
const RUNS: &str = "data";
/// What a process says before its address.
const READY: &str = "ready on ";

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// meta, compute, compactor or frontend
    role: String,
    #[arg(long)]
    object_store: String,
    #[arg(long)]
    data_dir: PathBuf,
    /// Where the leader listens
    #[arg(long)]
    meta: Option<String>,
    /// The core that it runs on; all if not given
    #[arg(long)]
    core: Option<usize>,
    /// Bytes of a job's committed rows in memory beyond which they are written as runs
    #[arg(long)]
    flush_bytes: usize,
    /// No run can be read: a compactor takes tasks, and none ends
    #[arg(long)]
    deaf: bool,
}

/// Runs a process until its parent has gone, or it has been fenced.
pub fn run(args: &Args) -> Result<(), String> {
    // Before any thread is started, so that all have it.
    if let Some(core) = args.core {
        cores::pin_thread(core).map_err(|e| format!("cannot run on core {core}: {e}"))?;
    }
    let runtime = runtimes::builder("millrace", MEMORY_LIMIT)
        .build()
        .map_err(|e| format!("cannot start threads: {e}"))?;
    let ended = runtime.block_on(serve(args));
    // What is still under way ends with the process.
    std::mem::forget(runtime);
    ended
}

fn role(name: &str) -> Result<Role, String> {
    Ok(match name {
        "meta" => Role::Meta,
        "compute" => Role::Compute,
        "compactor" => Role::Compactor,
        "frontend" => Role::Frontend,
        other => return Err(format!("no role \"{other}\"")),
    })
}

async fn serve(args: &Args) -> Result<(), String> {
    let process = Config {
        object_store: args.object_store.clone(),
        memory_limit: MEMORY_LIMIT,
        parallelism: PARALLELISM,
        barrier_interval: BARRIER_INTERVAL,
        tuning: Tuning { flush_bytes: Some(args.flush_bytes), ..Tuning::default() },
        ..Config::embedded(&args.data_dir)
    };
    let config = RoleConfig {
        role: role(&args.role)?,
        process,
        metas: args.meta.iter().cloned().collect(),
        insecure_rpc: false,
        rpc_tls: None,
        auth: Auth::Trust,
    };
    let mut overrides = Overrides {
        // Where nothing is merged, runs become more and more, and no commit shall wait for that.
        overlap_limit: Some(usize::MAX),
        ..Overrides::threads_apart()
    };
    if args.deaf {
        let store = open_object_store(&args.object_store).map_err(|e| e.to_string())?;
        let store = SimStore::new(store, Profile::INSTANT, 1);
        store.hang_reads(Some(RUNS));
        overrides.object_store = Some(Arc::new(store));
    }
    let text = |e: StartError| e.to_string();
    macro_rules! until_ended {
        ($process:ident) => {{
            let process = $process::start(config, overrides).await.map_err(text)?;
            say_ready(&process.address.to_string())?;
            tokio::select! {
                () = parent_gone() => Ok(()),
                reason = process.ended() => Err(reason),
            }
        }};
    }
    match config.role {
        Role::Meta => until_ended!(MetaProcess),
        Role::Compute => until_ended!(ComputeProcess),
        Role::Compactor => until_ended!(CompactorProcess),
        Role::Frontend => until_ended!(FrontendProcess),
    }
}

fn say_ready(address: &str) -> Result<(), String> {
    let mut out = std::io::stdout();
    let said = writeln!(out, "{READY}{address}").and_then(|()| out.flush());
    said.map_err(|e| e.to_string())
}

/// The parent holds the other end of the input, and never writes.
async fn parent_gone() {
    let read = tokio::task::spawn_blocking(|| {
        let mut nothing = Vec::new();
        std::io::stdin().read_to_end(&mut nothing)
    });
    // An error means the same.
    let _ = read.await;
}

/// A running process. Killed when dropped.
pub struct Process {
    child: Child,
    pub address: String,
}

/// What the processes of a cluster have in common.
pub struct Ground<'a> {
    pub dir: &'a Path,
    pub flush_bytes: usize,
}

/// How a process differs from the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kind<'a> {
    pub role: &'a str,
    pub meta: Option<&'a str>,
    pub core: Option<usize>,
    pub deaf: bool,
}

impl Ground<'_> {
    /// Starts a process, and waits until it is ready.
    pub async fn start(&self, kind: Kind<'_>) -> Result<Process, String> {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut command = Command::new(program);
        command.args(["process", kind.role]);
        command.arg("--object-store").arg(format!("file://{}", self.dir.join("store").display()));
        command.arg("--data-dir").arg(self.dir.join(kind.role));
        command.args(["--flush-bytes", &self.flush_bytes.to_string()]);
        if let Some(meta) = kind.meta {
            command.args(["--meta", meta]);
        }
        if let Some(core) = kind.core {
            command.args(["--core", &core.to_string()]);
        }
        if kind.deaf {
            command.arg("--deaf");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let child = command.spawn().map_err(|e| format!("{}: {e}", kind.role))?;
        let mut process = Process { child, address: String::new() };
        let ready = process.said_ready()?;
        let wait = tokio::task::spawn_blocking(move || ready.recv_timeout(STARTS));
        let address = wait.await.map_err(|e| e.to_string())?;
        process.address = address.map_err(|_| format!("{} does not start", kind.role))?;
        Ok(process)
    }
}

impl Process {
    /// Sends the address once it is told.
    fn said_ready(&mut self) -> Result<Receiver<String>, String> {
        let output = self.child.stdout.take().ok_or("the output of a process is not piped")?;
        let (tell, ready) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(address) = line.strip_prefix(READY) {
                    // Nobody may wait any more.
                    let _ = tell.send(address.to_owned());
                }
            }
        });
        Ok(ready)
    }

    pub fn port(&self) -> Result<u16, String> {
        let port = self.address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
        port.ok_or_else(|| format!("{} is no address", self.address))
    }

    /// Seconds of processor time, so far.
    pub fn cpu_s(&self) -> f64 {
        cpu_s_of(self.child.id())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Already gone is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
