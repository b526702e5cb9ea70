//! The cluster protocol, simulated: two metas, three compute processes, a compactor and two frontends over a store and a
//! network that lose, repeat, delay and reorder, while processes are killed, stopped and cut off from each other.
//!
//! The leader, when the lead is claimed, the log, the fold, its followers, placement, fences and the collector are this
//! crate's own; tasks of jobs, sessions, and what else the binary does about the lead are simulated. A run follows from
//! its seed alone: time is tokio's paused clock, tasks run on one thread, and random numbers come from the seed.
//! `MILLRACE_SIMULATION_SEEDS=10000` tries so many seeds, `MILLRACE_SIMULATION_SEED=7` that one, or so many from it on;
//! with `MILLRACE_SIMULATION_TRACE=1` all that happens is printed.

mod checks;
mod compactor;
mod content;
mod frontends;
mod jobs;
mod members;
mod metas;
mod nemesis;
mod network;
mod planted;
mod standby;
mod store;
mod workers;
mod world;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZero;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::thread;
use std::time::Duration;

use millrace_common::fault_injection::plant_here;
use millrace_common::{RelationId, random_tests};
use parking_lot::Mutex;

use self::frontends::{Session, TABLES, known};
use self::members::Member;
use self::store::ProcessStore;
use self::world::{FRONTENDS, NODES, Process, World};

/// How long processes are harmed, in seconds: one of these.
const ROUGH: [u64; 3] = [10, 20, 40];
/// In some runs.
const LONG_ROUGH: u64 = 150;
/// How long everything may take to be as it should, when nothing is harmed any more.
const HEALED_WITHIN: Duration = Duration::from_secs(90);
/// Seeds that are tried by default: the tests of this module take one core little more than a minute with them.
const SEEDS: u64 = 200;
const LONG_SEEDS: u64 = 10_000;

/// A broken promise.
#[derive(Debug)]
pub struct Broken {
    pub promise: String,
    /// The last of what happened.
    pub lines: Vec<String>,
}

/// What a run comes to.
#[derive(Debug)]
pub struct Outcome {
    /// Of all that happened.
    pub trace: u64,
    /// Of the log.
    pub records: u64,
    /// How often what has happened.
    pub counts: BTreeMap<String, u64>,
    pub broken: Option<Broken>,
}

thread_local! {
    /// The first panic of a run on this thread; `None`: no run is under way.
    static PANIC: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// A panic in a simulated process is a broken promise of its run; it is not printed.
fn catch_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let is_caught = PANIC.with_borrow_mut(|panics| {
                panics.as_mut().map(|panics| panics.push(info.to_string())).is_some()
            });
            if !is_caught {
                before(info);
            }
        }));
    });
}

fn first_panic() -> Option<String> {
    PANIC.with_borrow(|panics| panics.as_ref()?.first().cloned())
}

/// One run. `bug`: planted in it.
pub fn run(seed: u64, bug: Option<&'static str>) -> Outcome {
    catch_panics();
    PANIC.set(Some(Vec::new()));
    plant_here(bug);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| runtime.block_on(whole(seed, bug))));
    let panicked = first_panic();
    drop(runtime);
    plant_here(None);
    PANIC.set(None);
    outcome.unwrap_or_else(|_| {
        let broken = Broken { promise: panicked.unwrap_or_default(), lines: Vec::new() };
        Outcome { trace: 0, records: 0, counts: BTreeMap::new(), broken: Some(broken) }
    })
}

/// Whether a run is under way on this thread.
pub fn is_under_way() -> bool {
    PANIC.with_borrow(Option::is_some)
}

async fn whole(seed: u64, bug: Option<&str>) -> Outcome {
    let world = World::new(seed, bug);
    let turns = Arc::clone(&world.turns);
    tokio::spawn(async move { turns.give().await });
    tokio::select! {
        biased;
        () = world.failed() => {}
        () = panicked() => {}
        () = history(&world) => {}
    }
    let promise = first_panic().or_else(|| world.failure());
    let broken = promise.map(|promise| Broken { promise, lines: world.last_lines() });
    let (trace, records) = (world.trace_hash(), world.head());
    let outcome = Outcome { trace, records, counts: world.counts(), broken };
    (0..NODES).for_each(|node| world.kill(node));
    outcome
}

async fn panicked() {
    while first_panic().is_none() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// What happens: a cluster begins, is harmed for a while and healed; then everything must come to what it promises.
async fn history(world: &Arc<World>) {
    for node in 0..NODES {
        world.start(node);
    }
    let calm = world.numbers.between(2_000, 8_000);
    tokio::time::sleep(calm).await;
    let rough = world.numbers.of(&ROUGH);
    let rough = Duration::from_secs(if world.is_long { LONG_ROUGH } else { rough });
    nemesis::rage(Arc::clone(world), rough).await;
    nemesis::heal(world);
    world.be_quiet();
    let healed = tokio::time::timeout(HEALED_WITHIN, come_to_rest(world)).await;
    if healed.is_err() {
        let missing = world.read_head(|state| {
            let jobs = state.jobs.iter().map(|(id, job)| {
                let version = &job.version;
                let scans = version.backfill.is_some();
                format!("{id} on {} generation {} scans {scans}", job.process, version.generation)
            });
            jobs.collect::<Vec<_>>()
        });
        world.fail(format!("the cluster makes no progress after it was healed: {missing:?}"));
    }
}

/// Reads everything anew, with statements of its own, and compares all followers.
async fn come_to_rest(world: &Arc<World>) {
    for name in TABLES {
        let append = |session: Session| async move {
            let follower = &session.member.follower;
            follower.catch_up().await.ok()?;
            let id = follower
                .read(|state| state.relation_named("public", name).map(|table| table.id))?;
            session.append(RelationId(id), 0).await.then_some(())
        };
        attempt(world, append).await;
    }
    let listed = attempt(world, |session: Session| async move {
        session.member.follower.catch_up().await.ok()?;
        Some(session.member.follower.read(known))
    });
    for relation in listed.await {
        let id = relation.id;
        let read = |session: Session| async move {
            let follower = &session.member.follower;
            follower.catch_up().await.ok()?;
            let is_there = follower.read(|state| state.relations.contains_key(&id));
            (!is_there || session.read(id).await.is_ok()).then_some(())
        };
        attempt(world, read).await;
    }
    while !world.has_backups() {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    compare(world).await;
}

/// Does something in a session of a frontend until it succeeds, in another session where the process ends meanwhile.
async fn attempt<T, F: Future<Output = Option<T>>>(
    world: &Arc<World>,
    what: impl Fn(Session) -> F,
) -> T {
    loop {
        if let Some(session) = session(world) {
            let process = Arc::clone(&session.member.process);
            let done = tokio::select! {
                biased;
                done = what(session) => done,
                () = ended(world, &process) => None,
            };
            if let Some(done) = done {
                return done;
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Returns when a process is dead or fenced.
async fn ended(world: &World, process: &Arc<Process>) {
    let is_current = || {
        let now = world.process(process.node);
        now.is_some_and(|now| Arc::ptr_eq(&now, process)) && world.is_live(process.incarnation())
    };
    while is_current() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A session of a frontend that reads the log.
fn session(world: &Arc<World>) -> Option<Session> {
    let process = world.process(FRONTENDS[0])?;
    let follower = process.follower().filter(|_| process.reads.load(Ordering::Relaxed))?;
    let member = Member::of(world, &process, follower);
    Some(Session { member, store: ProcessStore::open(world, process.node) })
}

/// All that follow the log have folded it to the same state, the leader too.
async fn compare(world: &Arc<World>) {
    for process in world.processes() {
        let who = format!("the process at {}", process.node);
        if let Some(seat) = process.seat() {
            world.check_follower(&who, &seat.meta.state_for_tests());
        }
        let Some(follower) = process.follower() else { continue };
        while follower.number() < world.head() {
            let _ = follower.catch_up().await;
        }
        world.check_follower(&who, &follower.read(Clone::clone));
    }
}

fn report(seed: u64, outcome: &Outcome) -> String {
    let Some(broken) = &outcome.broken else { return String::new() };
    format!(
        "seed {seed}: {}\n{}\nagain: MILLRACE_SIMULATION_SEED={seed} ./test.sh -p millrace-meta simulation",
        broken.promise,
        broken.lines.join("\n")
    )
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The seeds to be tried: all from one on, or that one alone.
fn seeds() -> Range<u64> {
    let first = from_environment("MILLRACE_SIMULATION_SEED");
    let usual = match first {
        Some(_) => 1,
        None if random_tests::is_long() => LONG_SEEDS,
        None => SEEDS,
    };
    let (first, count) = (first.unwrap_or(0), from_environment("MILLRACE_SIMULATION_SEEDS"));
    first..first + count.unwrap_or(usual)
}

/// Runs seeds until a run breaks a promise, on all cores: a run stays on its thread. Returns the first seed that does.
fn first_broken(seeds: &Range<u64>) -> Option<(u64, Outcome)> {
    let (next, broken) = (AtomicU64::new(seeds.start), Mutex::new(None::<(u64, Outcome)>));
    let is_one = seeds.end - seeds.start == 1;
    let work = || {
        while broken.lock().is_none() {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            let outcome = run(seed, None);
            if seed % 50 == 0 || is_one {
                println!("seed {seed}: {} records, {:?}", outcome.records, outcome.counts);
            }
            if outcome.broken.is_some() {
                // Another thread may be at an earlier seed, which counts, too.
                let mut broken = broken.lock();
                if broken.as_ref().is_none_or(|(other, _)| seed < *other) {
                    *broken = Some((seed, outcome));
                }
            }
        }
    };
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(work);
        }
    });
    broken.into_inner()
}

#[test]
fn the_protocol_keeps_its_promises_under_every_seed() {
    if let Some((seed, outcome)) = first_broken(&seeds()) {
        panic!("{}", report(seed, &outcome));
    }
}

#[test]
fn a_seed_repeats_a_run() {
    // In the last one, only leaders are harmed.
    let traces = [0, 9, 224].map(|seed| {
        let (first, second) = (run(seed, None), run(seed, None));
        assert!(first.records > 100, "little has happened: {} records", first.records);
        assert_eq!((first.trace, first.records), (second.trace, second.records), "seed {seed}");
        first.trace
    });
    assert_ne!(traces[0], traces[1], "all seeds are one run");
}
