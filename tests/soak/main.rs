//! The soak: random histories, deaths of the server and faults of its store together, for as long as it is told; then
//! every view is its query, the books agree, and a backup can be restored.
//!
//! It goes in rounds. In each, sessions write and read, views come and go, and readers follow, while requests to the
//! store go wrong; at a random moment the server is killed, asked to end, or deposed by another one. Then a server is
//! started, in calm weather, and all is compared.
//!
//! `MILLRACE_SOAK_SECONDS` says how long the rounds go on (default 40), `MILLRACE_SOAK_SEED` what they draw. The seed fixes
//! statements, views, weather and deaths, not how they fall together. Without `MILLRACE_TEST_S3` (outside of CI) the store
//! is a directory, which has no faults.

mod accounts;
mod client;
mod ending;
mod files;
mod follower;
mod node;
mod proxy;
mod views;
mod writers;

#[path = "../equivalence/generate.rs"]
#[allow(dead_code)] // Written for another test, which uses all of it.
mod generate;
#[path = "../equivalence/history.rs"]
#[allow(dead_code)]
mod history;
#[path = "../equivalence/rng.rs"]
mod rng;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use accounts::Accounts;
use client::{Tally, describe};
use files::Files;
use follower::Follower;
use millrace_sqllogictest::{Server, bucket};
use node::{Death, Place};
use proxy::Proxy;
use rng::Rng;
use views::Maker;
use writers::Histories;

/// Rounds take this long, until something dies.
const ROUND: (i64, i64) = (3_000, 10_000);
/// Sessions of the kinds of which there are several.
const TRANSFERS: u64 = 2;
const COUNTERS: u64 = 2;
const HISTORIES: u64 = 2;
/// How long a session may take to notice that its server is gone, or its statement to end in bad weather.
const LATE: Duration = Duration::from_secs(240);

fn env_number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All that outlives a server.
struct Soak {
    seed: u64,
    place: Place,
    proxy: Option<Proxy>,
    folder: tempfile::TempDir,
    tally: Tally,
    accounts: Accounts,
    histories: Histories,
    maker: Maker,
    files: Files,
    followers: Vec<Follower>,
    /// Machines so far.
    machines: u64,
    /// The most memory of any server: in all, and of its own, in MiB.
    memory: (u64, u64),
}

impl Soak {
    async fn new(seed: u64) -> Soak {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::create_dir(folder.path().join("files")).expect("a folder of files");
        let (place, proxy) = match bucket::endpoint() {
            None => (Place::in_folder(folder.path()), None),
            Some(endpoint) => {
                let proxy = Proxy::start(&endpoint, seed).await.expect("a free port");
                let name = format!("soak-{}", std::process::id());
                (Place::in_bucket(&endpoint, &name, &proxy), Some(proxy))
            }
        };
        let relations = ["torn", "torn_batch", "wide_groups", "by_pair", "transfer"];
        Soak {
            seed,
            place,
            proxy,
            tally: Tally::default(),
            accounts: Accounts::default(),
            histories: Histories::new(seed),
            maker: Maker::new(writers::tables()),
            files: Files::new(&folder.path().join("files")),
            followers: relations.map(Follower::new).into(),
            folder,
            machines: 0,
            memory: (0, 0),
        }
    }

    fn start(&mut self) -> Result<Server, String> {
        tokio::task::block_in_place(|| self.place.start(self.folder.path(), self.machines))
    }

    async fn create(&self, server: &Server) -> Result<(), String> {
        let client = server.connect().await.map_err(|e| describe(&e))?;
        let small = writers::tables();
        let ddl = small.iter().map(|t| t.ddl()).chain(self.files.schema());
        let fixed = accounts::SCHEMA.iter().chain(writers::WIDE_SCHEMA).chain(views::SCHEMA);
        for sql in ddl.chain(fixed.map(|s| (*s).to_string())) {
            client.batch_execute(&sql).await.map_err(|e| format!("{sql}: {}", describe(&e)))?;
        }
        Ok(())
    }

    /// Everybody works until the moment, or until the server is gone.
    async fn work(&mut self, port: u16, round: u64, until: Instant) {
        let seed = self.seed;
        let rng = |who: u64| Rng::new(seed ^ (round << 32) ^ (who << 8) ^ 0x50a1);
        let connect = || millrace_sqllogictest::server::connect(port);
        let tally = &self.tally;
        let (accounts, histories, maker) = (&self.accounts, &self.histories, &self.maker);
        let (files, proxy) = (&self.files, &self.proxy);
        macro_rules! session {
            ($client:ident => $work:expr) => {
                async move {
                    if let Ok($client) = connect().await {
                        $work.await;
                    }
                }
            };
        }
        let transfers =
            (0..TRANSFERS).map(|i| session!(c => accounts.transfer(&c, tally, rng(i), until)));
        let counters =
            (0..COUNTERS).map(|i| session!(c => accounts.count(&c, tally, rng(10 + i), until)));
        let random =
            (0..HISTORIES).map(|i| session!(c => histories.write(&c, tally, rng(20 + i), until)));
        let followers = self.followers.iter_mut().enumerate().map(|(i, follower)| async move {
            if let (Ok(one), Ok(two)) = (connect().await, connect().await) {
                follower.follow(&one, &two, tally, rng(30 + i as u64), until).await;
            }
        });
        tokio::join!(
            futures::future::join_all(transfers),
            futures::future::join_all(counters),
            futures::future::join_all(random),
            futures::future::join_all(followers),
            session!(c => accounts.batch(&c, tally, rng(40), until)),
            session!(c => writers::write_wide(&c, tally, rng(41), until)),
            session!(c => maker.work(&c, tally, rng(42), until)),
            session!(c => views::audit(&c, tally, rng(43), until)),
            async { files.write(rng(44), until).await.expect("files are written") },
            async {
                if let Some(proxy) = proxy {
                    proxy.storm(&mut rng(45), until).await;
                }
            }
        );
    }

    /// A round: work, a death on the way, and a server afterwards, which may be another one.
    async fn round(
        &mut self,
        mut server: Server,
        round: u64,
        rng: &mut Rng,
    ) -> Result<Server, String> {
        let work = Duration::from_millis(rng.between(ROUND.0, ROUND.1) as u64);
        let before = work.mul_f64(rng.between(40, 100) as f64 / 100.0);
        let death = Death::draw(rng);
        println!(
            "round {round}: {} ms, {death:?} after {} ms",
            work.as_millis(),
            before.as_millis()
        );
        let (port, pid) = (server.port, server.pid());
        let begun = Instant::now();
        let machine = self.machines + u64::from(death == Death::Deposed);
        let place = self.place.clone();
        let folder = self.folder.path().to_path_buf();
        let dying = async {
            // The moment is the point: it is not synchronisation.
            tokio::time::sleep(before).await;
            let memory = node::memory(pid);
            match death {
                Death::Killed => node::signal(pid, "-9"),
                Death::Asked => node::signal(pid, "-TERM"),
                Death::Deposed => {
                    let started =
                        tokio::task::spawn_blocking(move || place.start(&folder, machine)).await;
                    return (memory, started.ok());
                }
            }
            (memory, None)
        };
        let working = tokio::time::timeout(LATE, self.work(port, round, begun + work));
        let (late, (memory, started)) = tokio::join!(working, dying);
        self.memory = (self.memory.0.max(memory.0), self.memory.1.max(memory.1));
        if late.is_err() {
            return Err(format!("sessions do not end within {LATE:?}\n{}", server.log()));
        }
        if death == Death::Asked {
            node::ended(&mut server).await?;
        }
        if death != Death::Deposed && !server.has_exited() {
            server.kill();
        }
        sound(&server)?;
        self.machines = machine;
        match started {
            Some(Ok(new)) => {
                node::ended(&mut server).await.map_err(|e| format!("deposed: {e}"))?;
                Ok(new)
            }
            // In bad weather a start may fail; what it failed for must have been the weather.
            started => {
                if let Some(Err(log)) = started {
                    println!("  a start failed: {}", log.lines().last().unwrap_or_default());
                }
                drop(server);
                self.start()
            }
        }
    }

    /// Compares everything, while nobody writes.
    async fn verify(&mut self, server: &Server) -> Result<usize, String> {
        let client = server.connect().await.map_err(|e| describe(&e))?;
        views::all_run(&client).await?;
        self.accounts.settle(&client).await?;
        self.files.check(&client).await?;
        let views = views::check_all(&client).await?;
        views::check_sink(&client).await?;
        for follower in &mut self.followers {
            follower.catch_up(&client, &self.tally).await?;
        }
        match self.tally.wrong() {
            Some(wrong) => Err(wrong),
            None => Ok(views),
        }
    }

    /// After the last round.
    async fn end(&mut self, mut server: Server) -> Result<(), String> {
        // What earlier servers left is swept by one that starts.
        server.kill();
        self.machines += 1;
        let server = self.start()?;
        let views = self.verify(&server).await?;
        let client = server.connect().await.map_err(|e| describe(&e))?;
        let made = ending::restored(&client, &self.place, self.folder.path()).await?;
        println!("{views} views; {}", made.trim());
        let beyond = ending::no_garbage(&client, &self.place, self.folder.path()).await?;
        println!("{beyond} objects that no version names");
        sound(&server)
    }
}

/// Its log tells of no panic.
fn sound(server: &Server) -> Result<(), String> {
    let log = server.log();
    match log.lines().position(|l| l.contains("panicked at")) {
        None => Ok(()),
        Some(at) => {
            let lines: Vec<&str> = log.lines().skip(at).take(20).collect();
            Err(format!("the server panicked:\n{}", lines.join("\n")))
        }
    }
}

/// The end of a server's log.
fn tail(server: &Server) -> String {
    let log = server.log();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

async fn run(soak: &mut Soak, seconds: u64) -> Result<(), String> {
    let begun = Instant::now();
    let mut rng = Rng::new(soak.seed);
    let mut server = soak.start()?;
    soak.create(&server).await?;
    let mut round = 0;
    while begun.elapsed() < Duration::from_secs(seconds) {
        server = soak.round(server, round, &mut rng).await?;
        let verified = Instant::now();
        let views = soak.verify(&server).await.map_err(|e| format!("{e}\n{}", tail(&server)))?;
        println!("  {views} views are their queries; took {} ms", verified.elapsed().as_millis());
        round += 1;
    }
    soak.end(server).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 6)]
async fn histories_kills_and_store_faults_together() {
    let seed = env_number("MILLRACE_SOAK_SEED", 1);
    let seconds = env_number("MILLRACE_SOAK_SECONDS", 40);
    println!("seed {seed}, {seconds} s");
    let mut soak = Soak::new(seed).await;
    let outcome = run(&mut soak, seconds).await;
    println!("statements: {:?}", soak.tally.counts());
    println!("requests: {:?}", soak.proxy.as_ref().map(Proxy::fates).unwrap_or_default());
    let (most, own) = soak.memory;
    println!("memory of a server: {most} MiB at most, {own} MiB its own, of {} MiB", node::MEMORY);
    if let Err(wrong) = outcome {
        panic!("seed {seed}: {wrong}");
    }
    // Mapped code is not its own.
    assert!(own * 2 <= node::MEMORY * 3, "{own} MiB are more than one and a half times the limit");
}
