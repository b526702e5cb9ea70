//! Random events on random processes, from a seed: processes are killed and started again, stopped and woken, two at
//! once, compute processes leave in order while others take their place, and processes are cut off: one from all others,
//! two from each other, one way only, or one from the object store or from its answers alone, with connections that are
//! silent or end. The object store is slow at times, and refuses requests or loses its answers. Small reads are answered by
//! the processes that tables run on, or from log and bucket, by turns.
//!
//! Meanwhile sessions transfer money, raise counters, append to lists and insert clicks, create views and drop them, views
//! follow these tables and the events of Nexmark, and sinks bring changes to files, a bucket, a table and PostgreSQL.
//!
//! `MILLRACE_NEMESIS_SEED` sets the seed, which each run prints, `MILLRACE_NEMESIS_SECONDS` for how long events go on,
//! and `MILLRACE_NEMESIS_LOGS` a directory that takes what the processes have written.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use millrace_storage::sim::{Faults, Profile};

use crate::PROGRESS;
use crate::network::{Network, Way, around};
use crate::process::{Cluster, OBJECT_STORE, Process, connect, role, send_signal};
use crate::transfers::{self, Transfers};
use crate::workloads::records::{self, Recorders};
use crate::workloads::streams;
use crate::workloads::targets::Targets;
use crate::workloads::views::Makers;
use crate::writers::{Outcomes, Workload};

/// The processes that events happen to.
const NAMES: [&str; 9] = [
    "meta1",
    "meta2",
    "compute1",
    "compute2",
    "compute3",
    "compactor1",
    "compactor2",
    "frontend1",
    "frontend2",
];
/// Those of the sessions.
const FRONTENDS: [&str; 2] = ["frontend1", "frontend2"];
const SECONDS: u64 = 20;
/// Within which writes go on elsewhere when one process is killed, stopped, replaced or cut off, from the beginning of that
/// on. docs/operations.md says 10 s of a meta process and 8 s of a compute process; the others hold up nobody else.
const PROMISED: Duration = Duration::from_secs(10);
/// The promise is for a machine where nothing else runs. Here debug builds of nine processes share it with other tests, so
/// there is a slack: as long as so many writes take on this machine before anything happens, because whoever takes over
/// makes some dozens of requests, one after the other. It is at least as long as what is promised, and at most three times
/// as long. A statement that a process does not answer which is not lost is looked up for 9 s, unless that is reached again:
/// that is within the slack, too.
const SLACK_IN_WRITES: u32 = 40;
/// The same where nothing is promised before the event has ended, from its end on. Half of it where nothing else runs.
const RESUME_LIMIT: Duration = Duration::from_secs(20);
/// What a meta process that was deposed says last. It waits for 1 s longer before it takes the lead again, and for twice as
/// long each further time, 16 s at most.
const DEPOSED: &str = "has taken over this object store";
/// How long writes of each session may take to go on once all processes are there.
const PROGRESS_LIMIT: Duration = Duration::from_secs(60);
/// How long it may take until all processes are ready that an event has ended.
const READY_LIMIT: Duration = Duration::from_secs(90);
/// How long a process that another has replaced may go on.
const REPLACED_LIMIT: Duration = Duration::from_secs(60);
/// How long a write may take: its frontend sleeps, and then waits for others that may sleep.
const LONGEST: Duration = Duration::from_secs(60);
/// The same of a definition, which its session gives up after 90 s, and then undoes. Nothing is promised of it while its job
/// is harmed again and again.
const LONGEST_DEFINITION: Duration = Duration::from_secs(120);
/// Definitions that must be acknowledged once nothing happens any more: of two by one session one creates a view.
const DEFINITIONS: usize = 3;
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
    /// The object store is fast and without faults again.
    HealStore,
}

impl Pending {
    /// The process that it happens to.
    fn name(&self) -> Option<&'static str> {
        match self {
            Pending::Start(name) | Pending::Wake(name, _) => Some(name),
            Pending::Heal(_) | Pending::HealStore => None,
        }
    }
}

/// What has happened to processes.
struct Event {
    /// Pauses of writes are told by it.
    kind: String,
    harmed: Vec<&'static str>,
    /// Whether writes of sessions at other frontends go on before it has ended.
    is_promised: bool,
}

impl Event {
    /// One process alone.
    fn of_one(name: &'static str, what: &str, is_promised: bool) -> Event {
        Event { kind: format!("{} {what}", role(name)), harmed: vec![name], is_promised }
    }
}

struct Nemesis {
    cluster: Cluster,
    network: Network,
    transfers: Transfers,
    recorders: Recorders,
    makers: Makers,
    addresses: [String; 2],
    random: Random,
    pending: Vec<(Instant, Pending)>,
    /// Others have taken their place: they end.
    replaced: Vec<Process>,
    logs: Option<PathBuf>,
    logged: usize,
    began: Instant,
    /// How long one write takes while nothing happens.
    write: Duration,
    /// How often each meta process was deposed.
    deposed: BTreeMap<&'static str, u32>,
    /// The longest time that writes took to go on, by kind of event.
    longest: BTreeMap<String, Duration>,
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
    let events = streams::events(seconds);
    let targets = create(&cluster, &dir.path().join("exported"), events).await;
    let mut nemesis = Nemesis::new(cluster, network, Random(seed));
    nemesis.measure().await;
    while nemesis.began.elapsed() < Duration::from_secs(seconds) {
        match nemesis.random.one_in(2) {
            true => nemesis.one_event().await,
            false => nemesis.some_events().await,
        }
        nemesis.settle().await;
        nemesis.switch_reads().await;
    }
    let cluster = nemesis.check().await;
    let client = cluster.connect("frontend1").await;
    targets.check(&cluster, &client).await;
    streams::check(&client, events).await;
}

/// Tables, views and sinks.
async fn create(cluster: &Cluster, exported: &Path, events: u64) -> Targets {
    let client = cluster.connect("frontend1").await;
    transfers::create(&client).await;
    records::create(&client).await;
    streams::create(&client, events).await;
    Targets::create(&client, exported).await
}

fn addresses(cluster: &Cluster) -> [String; 2] {
    FRONTENDS.map(|name| cluster.address(name))
}

impl Nemesis {
    fn new(cluster: Cluster, network: Network, random: Random) -> Nemesis {
        let addresses = addresses(&cluster);
        Nemesis {
            cluster,
            network,
            transfers: Transfers::start(addresses.clone()),
            recorders: Recorders::start(addresses.clone()),
            makers: Makers::start(addresses.clone()),
            addresses,
            random,
            pending: Vec::new(),
            replaced: Vec::new(),
            logs: std::env::var_os("MILLRACE_NEMESIS_LOGS").map(PathBuf::from),
            logged: 0,
            began: Instant::now(),
            write: Duration::ZERO,
            deposed: BTreeMap::new(),
            longest: BTreeMap::new(),
        }
    }

    fn say(&self, what: impl Display) {
        println!("{:8.3} {what}", self.began.elapsed().as_secs_f64());
    }

    fn one_of_all(&mut self) -> &'static str {
        NAMES[self.random.within(0..=NAMES.len() as u64 - 1) as usize]
    }

    /// Some events, one after the other or two at once.
    async fn some_events(&mut self) {
        for _ in 0..self.random.within(1..=3) {
            self.event();
            if self.random.one_in(4) {
                self.event();
            }
            let pause = self.random.millis(0..=1_500);
            self.look_for(pause).await;
        }
    }

    /// Before anything happens: how long a write takes on this machine.
    async fn measure(&mut self) {
        let began = Instant::now();
        self.writes_go_on(PROGRESS).await;
        self.write = began.elapsed() / PROGRESS as u32;
        self.say(format!("a write takes {:?}", self.write));
        self.began = Instant::now();
    }

    /// How long writes may take to go on after an event that has just begun, from its beginning on.
    fn limit(&self, event: &Event) -> Duration {
        if !event.is_promised {
            let now = Instant::now();
            let ends = self.pending.iter().map(|(at, _)| at.saturating_duration_since(now));
            return RESUME_LIMIT + ends.max().unwrap_or_default();
        }
        let slack = (self.write * SLACK_IN_WRITES).clamp(PROMISED, PROMISED * 3);
        let deposed = self.deposed.values().max().copied().unwrap_or_default();
        let penalty = deposed.checked_sub(1).map_or(0, |times| 1_u64 << times.min(4));
        PROMISED + slack + Duration::from_secs(penalty)
    }

    /// One event alone: soon afterwards sessions write again, at frontends that it has not happened to.
    async fn one_event(&mut self) {
        let began = Instant::now();
        let event = self.event();
        let (since, limit) = (Instant::now(), self.limit(&event));
        let sessions = FRONTENDS.map(|name| !event.harmed.contains(&name));
        loop {
            let transfers = self.transfers.have_written_since(since);
            let records = self.recorders.have_written_since(since);
            if (0..2).all(|i| !sessions[i] || transfers[i] && records[i]) {
                break;
            }
            let errors = [self.transfers.errors(), self.recorders.errors()].concat();
            let kind = &event.kind;
            assert!(began.elapsed() < limit, "{kind}: writes do not go on in {limit:?}: {errors}");
            self.look_for(LOOK).await;
        }
        let pause = began.elapsed();
        self.say(format!("{}: writes go on after {pause:?}, {limit:?} at most", event.kind));
        let longest = self.longest.entry(event.kind).or_default();
        *longest = pause.max(*longest);
    }

    /// Most are shorter than the lease of a process.
    fn duration(&mut self) -> Duration {
        match self.random.one_in(4) {
            true => self.random.millis(8_000..=12_000),
            false => self.random.millis(200..=4_000),
        }
    }

    /// Holds back what goes these ways, for a while.
    fn hold(&mut self, ways: Vec<Way>, what: String) {
        let (lasts, ends) = (self.duration(), self.random.one_in(2));
        self.network.hold(ways.iter().copied());
        if ends {
            ways.iter().for_each(|way| self.network.reset(*way));
        }
        let how = if ends { ", and connections end" } else { "" };
        self.say(format!("{what}, for {lasts:?}{how}"));
        self.pending.push((Instant::now() + lasts, Pending::Heal(ways)));
    }

    /// Any process, more often one that may lead.
    fn often_a_meta(&mut self) -> &'static str {
        match self.random.one_in(3) {
            true => ["meta1", "meta2"][self.random.within(0..=1) as usize],
            false => self.one_of_all(),
        }
    }

    /// Cuts processes off from each other.
    fn partition(&mut self) -> Event {
        let one = self.often_a_meta();
        let other = self.one_of_all();
        let kind = self.random.within(0..=4);
        if kind <= 1 || other == one {
            self.hold(around(one, &NAMES), format!("{one} is cut off from all, both ways"));
            return Event::of_one(one, "cut off from all", true);
        }
        let (ways, how) = match kind {
            2 | 3 => (vec![(one, other), (other, one)], "both ways"),
            _ => (vec![(one, other)], "one way"),
        };
        self.hold(ways, format!("{one} is cut off from {other}, {how}"));
        let mut roles = [role(one), role(other)];
        roles.sort_unstable();
        let kind = format!("{} cut off from each other, {how}", roles.join(" and "));
        // Jobs of a compute process that the leader does not hear of, or does not reach, go elsewhere.
        let is_promised = roles == ["compute", "meta"];
        Event { kind, harmed: vec![one, other], is_promised }
    }

    /// Cuts a process off from the object store, or only from its answers: then what the process asks for is done there.
    /// Nothing is promised where that is a compactor.
    fn cut_off_from_store(&mut self) -> Event {
        let name = self.often_a_meta();
        let (ways, what) = match self.random.one_in(2) {
            true => (vec![(OBJECT_STORE, name)], "cut off from answers of the object store"),
            false => {
                let both = vec![(name, OBJECT_STORE), (OBJECT_STORE, name)];
                (both, "cut off from the object store")
            }
        };
        self.hold(ways, format!("{name} is {what}"));
        let is_promised = role(name) != "compactor";
        Event::of_one(name, what, is_promised)
    }

    /// The object store is slow for a while, refuses requests, loses answers and resets connections.
    fn disturb_store(&mut self) -> Event {
        let (lasts, percent) = (self.duration(), self.random.within(0..=5));
        let slow = if self.random.one_in(2) { Profile::S3 } else { Profile::INSTANT };
        let share = percent as f64 / 100.0;
        let faults =
            Faults { slow_down: share, lost_answer: share, reset: share, ..Faults::default() };
        self.cluster.disturb_store(slow, faults);
        let how = if slow == Profile::S3 { "is slow" } else { "is fast" };
        self.say(format!(
            "the object store {how}, refuses {percent} % and loses {percent} % of answers, for {lasts:?}"
        ));
        self.pending.push((Instant::now() + lasts, Pending::HealStore));
        let kind = "object store disturbed".to_owned();
        Event { kind, harmed: Vec::new(), is_promised: false }
    }

    /// One event on processes that none is under way on.
    fn event(&mut self) -> Event {
        let name = self.one_of_all();
        let kind = self.random.within(0..=19);
        match kind {
            0..=9 => {}
            10..=15 => return self.partition(),
            16..=17 => return self.cut_off_from_store(),
            _ => return self.disturb_store(),
        }
        let later = match self.random.one_in(2) {
            true => Duration::ZERO,
            false => self.random.millis(0..=3_000),
        };
        let asleep = self.duration();
        let is_starting =
            self.pending.iter().any(|(_, p)| matches!(p, Pending::Start(n) if *n == name));
        let is_replaced = name.starts_with("compute") && kind >= 7 && !is_starting;
        if is_replaced {
            self.replace(name, kind == 9);
        } else if !self.pending.iter().any(|(_, p)| p.name() == Some(name)) {
            match kind < 5 {
                true => self.kill(name, later),
                false => self.stop(name, asleep),
            }
        }
        let what = match kind {
            _ if is_replaced => "replaced",
            0..=4 => "killed",
            _ => "stopped",
        };
        Event::of_one(name, what, true)
    }

    /// Another process takes the place of one, which leaves in order, or is lost and wakes up later.
    fn replace(&mut self, name: &'static str, is_lost: bool) {
        self.say(format!("{name} is replaced"));
        let Some(mut process) = self.cluster.spawn(name) else { return };
        if !process.has_ended() {
            process.signal(if is_lost { "STOP" } else { "TERM" });
        }
        self.replaced.push(process);
    }

    fn kill(&mut self, name: &'static str, later: Duration) {
        self.cluster.process(name).kill();
        self.say(format!("{name} is killed, and started again after {later:?}"));
        self.keep_log(name);
        self.pending.push((Instant::now() + later, Pending::Start(name)));
    }

    fn stop(&mut self, name: &'static str, asleep: Duration) {
        let process = self.cluster.process(name);
        if process.has_ended() {
            return;
        }
        let id = process.id();
        process.signal("STOP");
        self.say(format!("{name} is stopped for {asleep:?}"));
        self.pending.push((Instant::now() + asleep, Pending::Wake(name, id)));
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
                Pending::HealStore => {
                    self.cluster.disturb_store(Profile::INSTANT, Faults::default());
                }
            }
        }
        for name in NAMES {
            // Without the object store's answers it does not start.
            let waits = |pending: &Pending| match pending {
                Pending::Heal(ways) => ways.contains(&(OBJECT_STORE, name)),
                other => other.name() == Some(name),
            };
            let is_pending = self.pending.iter().any(|(_, pending)| waits(pending));
            if !is_pending && self.cluster.process(name).has_ended() {
                self.say(format!("{name} has ended, and is started again"));
                self.keep_log(name);
                let log = self.cluster.process(name).log();
                let has_lost = ["has been fenced", DEPOSED];
                let has_lost = has_lost.iter().any(|reason| log.contains(reason));
                assert!(has_lost, "{name} has ended by itself:\n{log}");
                if log.contains(DEPOSED) {
                    *self.deposed.entry(name).or_default() += 1;
                }
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
        self.transfers.move_to(self.addresses.clone());
        self.recorders.move_to(self.addresses.clone());
        self.makers.move_to(self.addresses.clone());
    }

    async fn look_for(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.look();
            tokio::time::sleep(LOOK).await;
        }
    }

    /// How many writes sessions have had acknowledged.
    fn counts(&self) -> Vec<usize> {
        [self.transfers.counts(), self.recorders.counts()].concat()
    }

    /// Waits until every process is there, and the writes of all sessions go on.
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
        // Processes that were fenced in their sleep end only now.
        self.writes_go_on(PROGRESS / 2).await;
        // Other work on the machine may have begun meanwhile.
        let began = Instant::now();
        self.writes_go_on(1).await;
        self.write = self.write.max(began.elapsed());
        self.say(format!(
            "all are ready after {:?}, writes go on after {:?}",
            ready - waiting,
            ready.elapsed()
        ));
    }

    /// Small reads go to the processes of their tables from now on, or not. A frontend that has just ended is left alone.
    async fn switch_reads(&mut self) {
        let setting = if self.random.one_in(3) { "off" } else { "on" };
        let Ok(client) = connect(&self.addresses[0]).await else { return };
        let sql = format!("ALTER SYSTEM SET read_from_owner = '{setting}'");
        match client.batch_execute(&sql).await {
            Ok(()) => self.say(format!("read_from_owner is {setting}")),
            Err(error) => self.say(format!("read_from_owner is as it was: {error}")),
        }
    }

    /// Waits until each session has had so many more writes acknowledged.
    async fn writes_go_on(&mut self, more: usize) {
        let began = Instant::now();
        let goals: Vec<usize> = self.counts().iter().map(|count| count + more).collect();
        while self.counts().iter().zip(&goals).any(|(count, goal)| count < goal) {
            if began.elapsed() > PROGRESS_LIMIT {
                NAMES.iter().for_each(|name| self.keep_log(name));
                let errors = [self.transfers.errors(), self.recorders.errors()].concat();
                panic!("writes do not go on: {errors}");
            }
            self.look_for(LOOK).await;
        }
    }

    /// Ends the writes, and compares what is there with what became of them.
    async fn check(mut self) -> Cluster {
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
        println!("the longest pauses of writes after one event: {:?}", self.longest);
        self.makers.progress(DEFINITIONS).await;
        let views = self.makers.end().await;
        let transfers = self.transfers.end().await;
        let records = self.recorders.end().await;
        check_errors("transfer", &transfers, LONGEST);
        check_errors("record", &records, LONGEST);
        check_errors("definition", &views, LONGEST_DEFINITION);
        for name in FRONTENDS {
            let client = self.cluster.connect(name).await;
            transfers.check(&client).await;
            records.check(&client).await;
            views.check(&client).await;
        }
        self.cluster
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

fn check_errors<W: Workload>(what: &str, outcomes: &Outcomes<W>, longest: Duration) {
    println!("the longest {what} took {:?}; errors: {:#?}", outcomes.longest, outcomes.errors);
    assert!(outcomes.longest < longest);
    // The first scan of a view may fail for any reason that its job has: the error names it.
    let says_nothing = |error: &&String| error.starts_with("XX") && !error.contains("creating \"");
    assert_eq!(outcomes.errors.keys().find(says_nothing), None, "an error that says nothing");
}
