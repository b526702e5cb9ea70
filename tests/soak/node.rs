//! The server under test: where its data is, and the ways in which it ends.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_sqllogictest::{Server, ServerOptions, bucket};
use object_store::ObjectStore;
use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::prefix::PrefixStore;

use crate::proxy::Proxy;
use crate::rng::Rng;

pub const BINARY: &str = env!("CARGO_BIN_EXE_millrace");
/// Of `--memory-limit`, in MiB.
pub const MEMORY: u64 = 96;
/// How long a server may take to end when it is asked to.
const END: Duration = Duration::from_secs(120);

/// Small thresholds, so that state leaves memory, and a short run flushes, compacts and collects garbage.
const TUNING: &[&str] = &[
    "--memory-limit=96MiB",
    "--disk-cache=64MiB",
    "--flush-size=16KiB",
    "--direct-run-size=256KiB",
    "--inline-size=1KiB",
    "--snapshot-records=64",
    "--gc-interval=200ms",
    "--parallelism=2",
];

/// Where the data is.
#[derive(Clone)]
pub struct Place {
    pub url: String,
    /// What a process needs in its environment to get there.
    pub env: HashMap<String, String>,
    endpoint: Option<(String, String)>,
}

impl Place {
    /// A bucket behind the proxy.
    pub fn in_bucket(endpoint: &str, name: &str, proxy: &Proxy) -> Place {
        bucket::create(endpoint, name);
        Place {
            url: format!("s3://{name}/soak"),
            env: bucket::environment(&format!("http://{}", proxy.address)),
            endpoint: Some((endpoint.to_string(), name.to_string())),
        }
    }

    pub fn in_folder(folder: &Path) -> Place {
        Place {
            url: format!("file://{}", folder.join("store").display()),
            env: HashMap::new(),
            endpoint: None,
        }
    }

    /// The store itself, past the proxy.
    pub async fn store(&self) -> Result<Arc<dyn ObjectStore>, String> {
        let Some((endpoint, bucket)) = &self.endpoint else {
            let folder = self.url.trim_start_matches("file://");
            let store = LocalFileSystem::new_with_prefix(folder).map_err(|e| e.to_string())?;
            return Ok(Arc::new(store));
        };
        let store = AmazonS3Builder::new()
            .with_endpoint(endpoint)
            .with_allow_http(true)
            .with_bucket_name(bucket)
            .with_region("us-east-1")
            .with_access_key_id("x")
            .with_secret_access_key("x")
            .build();
        Ok(Arc::new(PrefixStore::new(store.map_err(|e| e.to_string())?, "soak")))
    }

    /// Starts a server there, on a machine of its own (a folder for its lock and its cache).
    pub fn start(&self, folder: &Path, machine: u64) -> Result<Server, String> {
        let mut args: Vec<String> = TUNING.iter().map(|a| (*a).to_string()).collect();
        args.push(format!("--object-store={}", self.url));
        // The one before may work on.
        args.push("--take-over".to_string());
        let data_dir = folder.join(format!("machine-{machine}"));
        let options = ServerOptions { data_dir, args, env: self.env.clone() };
        Server::start(Path::new(BINARY), options)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// `kill -9`.
    Killed,
    /// SIGTERM.
    Asked,
    /// Another server takes over the store while this one works.
    Deposed,
}

impl Death {
    pub fn draw(rng: &mut Rng) -> Death {
        match rng.below(10) {
            0..5 => Death::Killed,
            5..8 => Death::Asked,
            _ => Death::Deposed,
        }
    }
}

/// By process id, while the server is borrowed.
pub fn signal(pid: u32, name: &str) {
    let status = std::process::Command::new("kill").args([name, &pid.to_string()]).status();
    assert!(status.is_ok_and(|s| s.success()), "kill {name} {pid}");
}

/// Waits until it has ended by itself.
pub async fn ended(server: &mut Server) -> Result<(), String> {
    let begun = Instant::now();
    while !server.has_exited() {
        if begun.elapsed() > END {
            return Err(format!("the server does not end within {END:?}"));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.kill();
    Ok(())
}

/// Memory of the process so far, at most and its own, in MiB; zeros once it is gone.
pub fn memory(pid: u32) -> (u64, u64) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let value = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name));
        line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) >> 10
    };
    (value("VmHWM:"), value("RssAnon:"))
}
