//! Processes of a cluster under test, over one bucket of an S3 server in the test's own process.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use millrace_s3::{Options, Server};
use millrace_storage::sim::{Faults, Profile};
use tokio_postgres::{Client, NoTls};

use crate::clocks::Clock;
use crate::network::Network;

/// How long a process may take until it is ready: a cold binary on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How long its threads may take until all of them are stopped.
const STOP_LIMIT: Duration = Duration::from_secs(60);
const BUCKET: &str = "cluster";
/// The object store's name in a network.
pub const OBJECT_STORE: &str = "object store";
/// Small thresholds, so that a short run also flushes, compacts and collects garbage. In the environment, where each role
/// takes what it heeds.
const SMALL: [(&str, &str); 8] = [
    ("MILLRACE_MEMORY_LIMIT", "128MB"),
    ("MILLRACE_DISK_CACHE", "0"),
    ("MILLRACE_FLUSH_SIZE", "16KB"),
    ("MILLRACE_INLINE_SIZE", "256"),
    ("MILLRACE_SNAPSHOT_RECORDS", "32"),
    ("MILLRACE_GC_INTERVAL", "200ms"),
    ("MILLRACE_PARALLELISM", "2"),
    // A process of a cluster opens no file otherwise.
    ("MILLRACE_ALLOW_PATH", "/"),
];

/// A running child; killed when dropped.
pub struct Process {
    child: Child,
    /// Where it listens, once it is ready.
    pub address: String,
    ready: Receiver<String>,
    log: Arc<Mutex<Vec<String>>>,
    /// Ends when all of its log is there.
    told: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts it, and does not wait until it is ready.
    pub fn spawn(mut command: Command) -> Process {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary is there");
        let log = Arc::<Mutex<Vec<String>>>::default();
        let errors = child.stderr.take().expect("it is piped");
        let lines = Arc::clone(&log);
        let told = std::thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                lines.lock().expect("nobody panics with it").push(line);
            }
        });
        let (tell, ready) = std::sync::mpsc::channel();
        let output = child.stdout.take().expect("it is piped");
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some((_, address)) = line.split_once("is ready on ") {
                    // Nobody may wait any more.
                    let _ = tell.send(address.to_owned());
                }
            }
        });
        Process { child, address: String::new(), ready, log, told: Some(told) }
    }

    pub fn await_ready(&mut self) {
        self.address = self.ready.recv_timeout(START_LIMIT).unwrap_or_else(|_| {
            self.kill();
            panic!("a process was not ready in time:\n{}", self.log())
        });
    }

    /// Whether it has said by now that it is ready.
    pub fn is_ready(&mut self) -> bool {
        if let Ok(address) = self.ready.try_recv() {
            self.address = address;
        }
        !self.address.is_empty()
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended, by itself or not.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    pub fn log(&self) -> String {
        self.log.lock().expect("nobody panics with it").join("\n")
    }

    /// `kill -9`, and waits until it is gone.
    pub fn kill(&mut self) {
        // Already gone is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        send_signal(self.child.id(), name);
    }

    /// Waits until it has ended by itself.
    pub fn await_end(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        while !self.has_ended() {
            assert!(Instant::now() < deadline, "it goes on:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        // Its log is whole then.
        if let Some(told) = self.told.take() {
            told.join().expect("nobody panics with the log");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn send_signal(id: u32, name: &str) {
    let sent = Command::new("kill").args(["-s", name, &id.to_string()]).status();
    assert!(sent.is_ok_and(|s| s.success()), "{name} was not sent");
}

/// Stops a process, and returns when it stands still.
pub fn stop(id: u32) {
    send_signal(id, "STOP");
    let deadline = Instant::now() + STOP_LIMIT;
    while !is_stopped(id) {
        assert!(Instant::now() < deadline, "it does not stop");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Whether all threads of a process are stopped.
fn is_stopped(id: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{id}/task")).expect("it is there").flatten();
    let mut states =
        tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    // The state follows the name, which is in brackets.
    states.all(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")))
}

/// One leader or more that may lead, some compute processes, one compactor and two frontends.
pub struct Cluster {
    dir: PathBuf,
    s3: Server,
    /// Where those listen that others must find again when they were killed.
    ports: BTreeMap<&'static str, String>,
    processes: BTreeMap<&'static str, Process>,
    /// Where processes have their HTTP ports, if they have any; those of frontends are consoles.
    consoles: BTreeMap<&'static str, String>,
    has_consoles: bool,
    /// Of processes whose clocks are set.
    clocks: BTreeMap<&'static str, Clock>,
    /// What is between them, if that is to be changed; else they call each other directly.
    network: Option<Network>,
    flags: &'static [&'static str],
    /// What the processes log, if not what they log by default.
    log: Option<&'static str>,
    starts: u32,
}

/// A name of a process, and the role that it has.
pub fn role(name: &str) -> &str {
    name.trim_end_matches(|c: char| c.is_ascii_digit())
}

impl Cluster {
    pub const NAMES: [&'static str; 5] = ["meta", "compute", "compactor", "frontend1", "frontend2"];

    /// The same with three compute processes.
    pub const SPREAD: [&'static str; 7] =
        ["meta", "compute1", "compute2", "compute3", "compactor", "frontend1", "frontend2"];

    /// Two that may lead, and the others.
    pub const TWO_METAS: [&'static str; 6] =
        ["meta1", "meta2", "compute", "compactor", "frontend1", "frontend2"];

    /// The same with three compute processes.
    pub const TWO_METAS_SPREAD: [&'static str; 8] = [
        "meta1",
        "meta2",
        "compute1",
        "compute2",
        "compute3",
        "compactor",
        "frontend1",
        "frontend2",
    ];

    pub async fn start(dir: &Path) -> Cluster {
        Cluster::start_with(dir, &Cluster::NAMES).await
    }

    pub async fn start_with(dir: &Path, names: &[&'static str]) -> Cluster {
        Cluster::start_with_flags(dir, names, &[]).await
    }

    /// Processes have HTTP ports.
    pub async fn start_with_consoles(dir: &Path, names: &[&'static str]) -> Cluster {
        let cluster = Cluster::prepare(dir, names, &[], None).await;
        Cluster { has_consoles: true, ..cluster }.begun(names)
    }

    /// The same, and some have clocks that can be set.
    pub async fn start_with_clocks(
        dir: &Path,
        names: &[&'static str],
        clocks: BTreeMap<&'static str, Clock>,
    ) -> Cluster {
        let cluster = Cluster::prepare(dir, names, &[], None).await;
        Cluster { has_consoles: true, clocks, ..cluster }.begun(names)
    }

    /// All processes are given these flags, too.
    pub async fn start_with_flags(
        dir: &Path,
        names: &[&'static str],
        flags: &'static [&'static str],
    ) -> Cluster {
        Cluster::start_on(dir, names, flags, None).await
    }

    /// The same, and they log what this says.
    pub async fn start_with_log(
        dir: &Path,
        names: &[&'static str],
        flags: &'static [&'static str],
        log: &'static str,
    ) -> Cluster {
        let cluster = Cluster::prepare(dir, names, flags, None).await;
        Cluster { log: Some(log), ..cluster }.begun(names)
    }

    /// All processes call each other, and the object store, over this network.
    pub async fn start_on_network(dir: &Path, names: &[&'static str], network: Network) -> Cluster {
        Cluster::start_on(dir, names, &[], Some(network)).await
    }

    /// The same, and they have HTTP ports.
    pub async fn start_on_network_with_consoles(
        dir: &Path,
        names: &[&'static str],
        network: Network,
    ) -> Cluster {
        let cluster = Cluster::prepare(dir, names, &[], Some(network)).await;
        Cluster { has_consoles: true, ..cluster }.begun(names)
    }

    async fn start_on(
        dir: &Path,
        names: &[&'static str],
        flags: &'static [&'static str],
        network: Option<Network>,
    ) -> Cluster {
        Cluster::prepare(dir, names, flags, network).await.begun(names)
    }

    fn begun(mut self, names: &[&'static str]) -> Cluster {
        for name in names {
            self.begin(name);
        }
        self
    }

    /// Without its processes.
    async fn prepare(
        dir: &Path,
        names: &[&'static str],
        flags: &'static [&'static str],
        network: Option<Network>,
    ) -> Cluster {
        let s3 = Server::start(Options::new(dir.join("s3"), BUCKET)).await.expect("an S3 server");
        let ports = names.iter().filter(|name| !name.starts_with("frontend"));
        let ports = ports.map(|name| (*name, free_address())).collect();
        Cluster {
            dir: dir.to_owned(),
            s3,
            ports,
            processes: BTreeMap::new(),
            consoles: BTreeMap::new(),
            has_consoles: false,
            clocks: BTreeMap::new(),
            network,
            flags,
            log: None,
            starts: 0,
        }
    }

    /// Starts a process, beside or in place of the one of this name, and waits until it is ready.
    pub fn begin(&mut self, name: &'static str) -> Option<Process> {
        let previous = self.spawn(name);
        self.process(name).await_ready();
        previous
    }

    /// The object store below a prefix of the bucket; that of the cluster is below `millrace`.
    pub fn store(prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}")
    }

    /// The binary, with the way to the bucket in its environment.
    pub fn program(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.envs([
            ("AWS_ENDPOINT_URL", self.s3.endpoint()),
            ("AWS_ACCESS_KEY_ID", "millrace".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "millrace-secret".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
        ]);
        command
    }

    /// A process on the bucket.
    fn command(
        &self,
        role: &str,
        prefix: &str,
        data_dir: &Path,
        [listen, http]: [&str; 2],
    ) -> Command {
        let mut command = self.program();
        command
            .arg(role)
            .args(["--listen", listen, "--http", http])
            .args(["--object-store", &Cluster::store(prefix)])
            .arg("--data-dir")
            .arg(data_dir)
            .envs(SMALL);
        command
    }

    /// A server that runs all roles, on the same bucket. It says that it is ready in another way than a process of a
    /// cluster.
    pub fn standalone(&mut self, listen: &str, flags: &[&str]) -> Process {
        self.standalone_on("millrace", listen, flags)
    }

    /// The same below another prefix.
    pub fn standalone_on(&mut self, prefix: &str, listen: &str, flags: &[&str]) -> Process {
        self.starts += 1;
        let data_dir = self.dir.join(format!("standalone-{}", self.starts));
        let mut command = self.command("standalone", prefix, &data_dir, [listen, "off"]);
        command.args(flags);
        Process::spawn(command)
    }

    /// A process of another cluster, on the same bucket below another prefix, once it is ready. `meta`: the other
    /// cluster's leader, if it is not that itself.
    pub fn process_on(&mut self, prefix: &str, role: &str, meta: Option<&str>) -> Process {
        self.starts += 1;
        let data_dir = self.dir.join(format!("{role}-{}", self.starts));
        let mut command = self.command(role, prefix, &data_dir, [&free_address(), "off"]);
        command.args(meta.map(|meta| ["--meta", meta]).into_iter().flatten());
        let mut process = Process::spawn(command);
        process.await_ready();
        process
    }

    /// The same with flags of its own.
    pub fn begin_with(&mut self, name: &'static str, flags: &[&str]) {
        self.spawn_with(name, flags);
        self.process(name).await_ready();
    }

    /// Starts a process, beside or in place of the one of this name.
    pub fn spawn(&mut self, name: &'static str) -> Option<Process> {
        self.spawn_with(name, &[])
    }

    fn spawn_with(&mut self, name: &'static str, flags: &[&str]) -> Option<Process> {
        self.starts += 1;
        // One that still lives, or sleeps, has its address; another finds its own.
        let own = self.ports.get(name).filter(|own| TcpListener::bind(own.as_str()).is_ok());
        let takes_calls = role(name) != "frontend";
        let listen = match (own, &self.network) {
            (Some(own), _) => own.clone(),
            // Its proxy has to know it.
            (None, Some(_)) if takes_calls => free_address(),
            (None, _) => "127.0.0.1:0".to_owned(),
        };
        // A directory of its own, too: that of one that lives is locked.
        let data_dir = match own {
            Some(_) => self.dir.join(name),
            None => self.dir.join(format!("{name}-{}", self.starts)),
        };
        let console = self.has_consoles.then(free_address);
        let http = console.as_deref().unwrap_or("off");
        let mut command = self.command(role(name), "millrace", &data_dir, [&listen, http]);
        if let Some(console) = console {
            self.consoles.insert(name, console);
        }
        let work_dir = self.work_dir(role(name));
        std::fs::create_dir_all(&work_dir).expect("a working directory");
        command.current_dir(work_dir).args(self.flags).args(flags);
        command.envs(self.log.map(|log| ("MILLRACE_LOG", log)));
        command.envs(self.clocks.get(name).into_iter().flat_map(Clock::environment));
        if let Some(network) = &self.network {
            let store = network.proxy_for(name, OBJECT_STORE, &self.store_address());
            command.env("AWS_ENDPOINT_URL", format!("http://{store}"));
            if takes_calls {
                command.args(["--advertise", &network.proxy(name, &listen)]);
            }
        }
        let reached = |(name, address): (&&'static str, &String)| match &self.network {
            Some(network) => network.proxy(name, address),
            None => address.clone(),
        };
        let metas = self.ports.iter().filter(|(name, _)| role(name) == "meta");
        let metas: Vec<String> = metas.map(reached).collect();
        if role(name) != "meta" || metas.len() > 1 {
            command.args(["--meta", &metas.join(",")]);
        }
        let process = Process::spawn(command);
        if let Some(network) = &self.network {
            network.know(process.id(), name);
        }
        self.processes.insert(name, process)
    }

    pub fn process(&mut self, name: &str) -> &mut Process {
        self.processes.get_mut(name).expect("one of its processes")
    }

    pub fn address(&self, name: &str) -> String {
        self.processes[name].address.clone()
    }

    /// Where the object store listens.
    pub fn store_address(&self) -> String {
        self.s3.address().to_string()
    }

    /// How slow the object store is from now on, and what goes wrong there.
    pub fn disturb_store(&self, profile: Profile, faults: Faults) {
        self.s3.store().set_profile(profile);
        self.s3.store().set_faults(faults);
    }

    /// Where a process has its HTTP port.
    pub fn console(&self, name: &str) -> &str {
        &self.consoles[name]
    }

    /// Sets the clock of a process so many seconds ahead of the machine's.
    pub fn set_clock(&self, name: &str, ahead: i64) {
        self.clocks[name].set(ahead);
    }

    /// The working directory of the processes of a role.
    pub fn work_dir(&self, role: &str) -> PathBuf {
        self.dir.join("work").join(role)
    }

    /// What the object store has of the process that was given this incarnation.
    pub fn objects_of(&self, incarnation: u64) -> usize {
        let dir = self.dir.join(format!("s3/{BUCKET}/millrace/data/{incarnation}"));
        std::fs::read_dir(dir).map_or(0, |entries| entries.count())
    }

    /// Paths and sizes of what the object store has below a prefix.
    pub fn objects_below(&self, prefix: &str) -> BTreeMap<PathBuf, u64> {
        fn add(dir: &Path, found: &mut BTreeMap<PathBuf, u64>) {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                let path = entry.path();
                match entry.metadata() {
                    Ok(of) if of.is_dir() => add(&path, found),
                    Ok(of) => drop(found.insert(path, of.len())),
                    // Deleted meanwhile.
                    Err(_) => {}
                }
            }
        }
        let mut found = BTreeMap::new();
        add(&self.dir.join(format!("s3/{BUCKET}/{prefix}")), &mut found);
        found
    }

    /// A session at a frontend.
    pub async fn connect(&self, name: &str) -> Client {
        connect(&self.address(name)).await.expect("the frontend takes sessions")
    }
}

/// One that is free now.
pub fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
    listener.expect("a port").to_string()
}

/// A session at an address.
pub async fn connect(address: &str) -> Result<Client, tokio_postgres::Error> {
    let (host, port) = address.rsplit_once(':').expect("host and port");
    let config = format!("host={host} port={port} user=root dbname=dev connect_timeout=10");
    let (client, connection) = tokio_postgres::connect(&config, NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute("SET read_wait_timeout = '60s'; SET statement_timeout = '90s'").await?;
    Ok(client)
}
