//! Random events on random processes, from a seed: processes are killed and started again, stopped and woken, two at
//! once, compute processes leave in order while others take their place, and processes are cut off: one from all others,
//! two from each other, or one way only, with connections that are silent or end.
//!
//! `MILLRACE_NEMESIS_SEED` sets the seed, which each run prints, `MILLRACE_NEMESIS_SECONDS` for how long events go on,
//! and `MILLRACE_NEMESIS_LOGS` a directory that takes what the processes have written.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::PROGRESS;
use crate::network::{Network, Way, around};
use crate::process::{Cluster, Process, send_signal};
use crate::transfers::{self, Transfers};

/// The processes that events happen to.
const NAMES: [&str; 8] = Cluster::TWO_METAS_SPREAD;
const SECONDS: u64 = 20;
/// How long transfers of each session may take to go on once all processes are there.
const PROGRESS_LIMIT: Duration = Duration::from_secs(60);
/// How long it may take until all processes are ready that an event has ended.
const READY_LIMIT: Duration = Duration::from_secs(90);
/// How long a process that another has replaced may go on.
const REPLACED_LIMIT: Duration = Duration::from_secs(60);
/// How long a transfer may take: its frontend sleeps, and then waits for others that may sleep.
const LONGEST: Duration = Duration::from_secs(60);
/// Between two looks at the processes.
const LOOK: Duration = Duration::from_millis(20);

/// splitmix64: the same seed gives the same events.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.next() % (range.end() - range.start() + 1)
    }

    fn millis(&mut self, range: RangeInclusive<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.within(1..=n) == 1
    }
}

/// What is still to be done of an event.
enum Pending {
    Start(&'static str),
    /// The process of this name, by its id: another may have taken its place.
    Wake(&'static str, u32),
    /// What was held back is let through.
    Heal(Vec<Way>),
}

impl Pending {
    /// The process that it happens to.
    fn name(&self) -> Option<&'static str> {
        match self {
            Pending::Start(name) | Pending::Wake(name, _) => Some(name),
            Pending::Heal(_) => None,
        }
    }
}

struct Nemesis {
    cluster: Cluster,
    network: Network,
    running: Transfers,
    addresses: [String; 2],
    random: Random,
    pending: Vec<(Instant, Pending)>,
    /// Others have taken their place: they end.
    replaced: Vec<Process>,
    logs: Option<PathBuf>,
    logged: usize,
    began: Instant,
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|v| v.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

#[tokio::test(flavor = "multi_thread")]
async fn random_events_lose_nothing() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.map_or(0, |d| d.as_nanos() as u64 % 1_000_000);
    let seed = variable("MILLRACE_NEMESIS_SEED").unwrap_or(now);
    let seconds = variable("MILLRACE_NEMESIS_SECONDS").unwrap_or(SECONDS);
    println!("MILLRACE_NEMESIS_SEED={seed} MILLRACE_NEMESIS_SECONDS={seconds}");
    let dir = tempfile::tempdir().unwrap();
    let network = Network::new();
    let cluster = Cluster::start_on_network(dir.path(), &NAMES, network.clone()).await;
    transfers::create(&cluster.connect("frontend1").await).await;
    let addresses = addresses(&cluster);
    let running = Transfers::start(addresses.clone());
    let logs = std::env::var_os("MILLRACE_NEMESIS_LOGS").map(PathBuf::from);
    let (pending, replaced, random) = (Vec::new(), Vec::new(), Random(seed));
    let began = Instant::now();
    let mut nemesis = Nemesis {
        cluster,
        network,
        running,
        addresses,
        random,
        pending,
        replaced,
        logs,
        logged: 0,
        began,
    };
    while began.elapsed() < Duration::from_secs(seconds) {
        for _ in 0..nemesis.random.within(1..=3) {
            nemesis.event();
            if nemesis.random.one_in(4) {
                nemesis.event();
            }
            let pause = nemesis.random.millis(0..=1_500);
            nemesis.look_for(pause).await;
        }
        nemesis.settle().await;
    }
    nemesis.check().await;
}

fn addresses(cluster: &Cluster) -> [String; 2] {
    ["frontend1", "frontend2"].map(|name| cluster.address(name))
}

impl Nemesis {
    fn say(&self, what: impl Display) {
        println!("{:8.3} {what}", self.began.elapsed().as_secs_f64());
    }

    fn one_of_all(&mut self) -> &'static str {
        NAMES[self.random.within(0..=NAMES.len() as u64 - 1) as usize]
    }

    /// Holds back what some processes send each other, for a while.
    fn partition(&mut self) {
        let one = match self.random.one_in(3) {
            true => ["meta1", "meta2"][self.random.within(0..=1) as usize],
            false => self.one_of_all(),
        };
        let other = self.one_of_all();
        let (ways, from) = match self.random.within(0..=4) {
            0 | 1 => (around(one, &NAMES), "all, both ways".to_owned()),
            _ if other == one => (around(one, &NAMES), "all, both ways".to_owned()),
            2 | 3 => (vec![(one, other), (other, one)], format!("{other}, both ways")),
            _ => (vec![(one, other)], format!("{other}, one way")),
        };
        // Most are shorter than the lease of a process.
        let lasts = match self.random.one_in(4) {
            true => self.random.millis(8_000..=12_000),
            false => self.random.millis(200..=4_000),
        };
        let ends = self.random.one_in(2);
        self.network.hold(ways.iter().copied());
        if ends {
            ways.iter().for_each(|way| self.network.reset(*way));
        }
        let how = if ends { ", and connections end" } else { "" };
        self.say(format!("{one} is cut off from {from}, for {lasts:?}{how}"));
        self.pending.push((Instant::now() + lasts, Pending::Heal(ways)));
    }

    /// One event on a process that none is under way on.
    fn event(&mut self) {
        let name = self.one_of_all();
        let kind = self.random.within(0..=15);
        if kind > 9 {
            return self.partition();
        }
        let later = match self.random.one_in(2) {
            true => Duration::ZERO,
            false => self.random.millis(0..=3_000),
        };
        // Most are shorter than the lease of a process.
        let asleep = match self.random.one_in(4) {
            true => self.random.millis(8_000..=12_000),
            false => self.random.millis(200..=4_000),
        };
        let is_starting =
            self.pending.iter().any(|(_, p)| matches!(p, Pending::Start(n) if *n == name));
        if name.starts_with("compute") && kind >= 7 && !is_starting {
            self.say(format!("{name} is replaced"));
            let replaced = self.cluster.spawn(name);
            if let Some(mut process) = replaced {
                // It leaves in order, or is lost and wakes up later.
                match kind {
                    _ if process.has_ended() => {}
                    9 => process.signal("STOP"),
                    _ => process.signal("TERM"),
                }
                self.replaced.push(process);
            }
            return;
        }
        if self.pending.iter().any(|(_, p)| p.name() == Some(name)) {
            return;
        }
        let process = self.cluster.process(name);
        if kind < 5 {
            process.kill();
            self.say(format!("{name} is killed, and started again after {later:?}"));
            self.keep_log(name);
            self.pending.push((Instant::now() + later, Pending::Start(name)));
        } else if !process.has_ended() {
            let id = process.id();
            process.signal("STOP");
            self.say(format!("{name} is stopped for {asleep:?}"));
            self.pending.push((Instant::now() + asleep, Pending::Wake(name, id)));
        }
    }

    /// Does what is due, and starts processes again that were fenced.
    fn look(&mut self) {
        let now = Instant::now();
        let pending = std::mem::take(&mut self.pending);
        let (due, later): (Vec<_>, Vec<_>) = pending.into_iter().partition(|(at, _)| *at <= now);
        self.pending = later;
        for (_, due) in due {
            match due {
                Pending::Start(name) => drop(self.cluster.spawn(name)),
                Pending::Wake(_, id) => send_signal(id, "CONT"),
                Pending::Heal(ways) => self.network.release(&ways),
            }
        }
        for name in NAMES {
            let is_pending = self.pending.iter().any(|(_, p)| p.name() == Some(name));
            if !is_pending && self.cluster.process(name).has_ended() {
                self.say(format!("{name} has ended, and is started again"));
                self.keep_log(name);
                let log = self.cluster.process(name).log();
                let has_lost = ["has been fenced", "has taken over this object store"];
                let has_lost = has_lost.iter().any(|reason| log.contains(reason));
                assert!(has_lost, "{name} has ended by itself:\n{log}");
                self.cluster.spawn(name);
            }
            self.cluster.process(name).is_ready();
        }
        for (known, now) in self.addresses.iter_mut().zip(addresses(&self.cluster)) {
            // Until it is ready it has none.
            if !now.is_empty() {
                *known = now;
            }
        }
        self.running.move_to(self.addresses.clone());
    }

    async fn look_for(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.look();
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Waits until every process is there, and the transfers of both sessions go on.
    async fn settle(&mut self) {
        while !self.pending.is_empty() {
            self.look_for(LOOK).await;
        }
        let waiting = Instant::now();
        while let Some(name) = NAMES.iter().find(|name| !self.cluster.process(name).is_ready()) {
            let log = self.cluster.process(name).log();
            assert!(waiting.elapsed() < READY_LIMIT, "{name} is not ready:\n{log}");
            self.look_for(LOOK).await;
        }
        let ready = Instant::now();
        let goals = self.running.counts().map(|count| count + PROGRESS / 2);
        // Processes that were fenced in their sleep end only now.
        while self.running.counts().iter().zip(goals).any(|(count, goal)| *count < goal) {
            if ready.elapsed() > PROGRESS_LIMIT {
                NAMES.iter().for_each(|name| self.keep_log(name));
                panic!("transfers do not go on: {}", self.running.errors());
            }
            self.look_for(LOOK).await;
        }
        self.say(format!(
            "all are ready after {:?}, transfers go on after {:?}",
            ready - waiting,
            ready.elapsed()
        ));
    }

    async fn check(mut self) {
        for mut replaced in std::mem::take(&mut self.replaced) {
            // It may have been stopped before it was told to end, or may have slept for less than its lease.
            for signal in ["CONT", "TERM"] {
                if !replaced.has_ended() {
                    replaced.signal(signal);
                }
            }
            replaced.await_end(REPLACED_LIMIT);
            self.keep("replaced", &replaced.log());
        }
        for name in NAMES {
            self.keep_log(name);
        }
        let outcomes = self.running.end().await;
        println!(
            "the longest transfer took {:?}; errors: {:#?}",
            outcomes.longest, outcomes.errors
        );
        assert!(outcomes.longest < LONGEST);
        let internal = outcomes.errors.keys().find(|error| error.starts_with("XX"));
        assert_eq!(internal, None, "an error that says nothing");
        for name in ["frontend1", "frontend2"] {
            outcomes.check(&self.cluster.connect(name).await).await;
        }
    }

    fn keep_log(&mut self, name: &'static str) {
        let log = self.cluster.process(name).log();
        self.keep(name, &log);
    }

    /// What a process has written that is gone.
    fn keep(&mut self, name: &str, log: &str) {
        self.logged += 1;
        if let Some(dir) = &self.logs {
            std::fs::create_dir_all(dir).unwrap();
            std::fs::write(dir.join(format!("{:03}-{name}.log", self.logged)), log).unwrap();
        }
        assert!(!log.contains("panicked at"), "{name} has panicked:\n{log}");
    }
}
