//! What a simulated cluster runs in: one seed, one clock, processes that are stopped and killed, and a trace.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

use millrace_common::task::{Entry, Gate, within};
use millrace_common::{Env, EnvHandle};
use millrace_rpc::call_error::CallError;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::checks::Checks;
use super::metas::Seat;
use super::network::Network;
use super::store::Bucket;
use super::workers::Worker;
use crate::follower::LogFollower;

/// A place where one process runs at a time.
pub type Node = usize;

pub const METAS: [Node; 2] = [0, 1];
pub const WORKERS: [Node; 3] = [2, 3, 4];
pub const COMPACTOR: Node = 5;
pub const FRONTENDS: [Node; 2] = [6, 7];
/// The object store, as an end of links.
pub const STORE: Node = 8;
/// Of processes.
pub const NODES: usize = 8;

/// Where the wall clock begins.
const BEGAN_MS: u64 = 1_700_000_040_000;
/// Lines of the trace that are kept for the report of a failure.
const LINES: usize = 300;

/// SplitMix64.
#[derive(Debug)]
pub struct Numbers(AtomicU64);

impl Numbers {
    pub fn new(seed: u64) -> Numbers {
        Numbers(AtomicU64::new(seed))
    }

    pub fn next(&self) -> u64 {
        let step = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.0.fetch_add(step, Ordering::Relaxed).wrapping_add(step);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// True in so many of a thousand cases.
    pub fn chance(&self, per_mille: u64) -> bool {
        self.below(1_000) < per_mille
    }

    /// From `low` to `high` milliseconds.
    pub fn between(&self, low: u64, high: u64) -> Duration {
        Duration::from_millis(low + self.below(high - low + 1))
    }

    pub fn of<T: Copy>(&self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// The clocks of one process: the simulation's, a little wrong, and numbers of its own.
struct ProcessEnv {
    began: Instant,
    numbers: Numbers,
    /// What its wall clock is ahead, in milliseconds.
    ahead: u64,
    /// What its clock since boot shows for a thousand milliseconds.
    rate: u32,
}

impl Env for ProcessEnv {
    fn now_ms(&self) -> u64 {
        BEGAN_MS + self.ahead + self.began.elapsed().as_millis() as u64
    }

    fn since_boot(&self) -> Duration {
        self.began.elapsed() * self.rate / 1_000
    }

    fn random(&self) -> u64 {
        self.numbers.next()
    }
}

#[derive(Debug, Default)]
struct Running {
    is_stopped: bool,
    is_dead: bool,
    waiting: Vec<Waker>,
}

/// Which of the tasks that could run does: the seed decides. The order in which tokio wakes tasks is not the seed's, so
/// it must decide nothing.
#[derive(Debug)]
pub struct Turns {
    numbers: Numbers,
    waiting: Mutex<BTreeMap<u64, Waker>>,
    /// Whose turn it is.
    turn: Mutex<Option<u64>>,
    news: Notify,
}

impl Turns {
    fn new(seed: u64) -> Turns {
        Turns {
            numbers: Numbers::new(seed),
            waiting: Mutex::default(),
            turn: Mutex::default(),
            news: Notify::new(),
        }
    }

    /// Whether it is this task's turn; otherwise it waits for it.
    fn enter(&self, task: u64, waker: &Waker) -> bool {
        if *self.turn.lock() == Some(task) {
            return true;
        }
        self.waiting.lock().insert(task, waker.clone());
        if self.turn.lock().is_none() {
            self.news.notify_one();
        }
        false
    }

    fn leave(&self) {
        *self.turn.lock() = None;
        if !self.waiting.lock().is_empty() {
            self.news.notify_one();
        }
    }

    /// A task that is gone has no turn, and waits for none.
    fn forget(&self, task: u64) {
        self.waiting.lock().remove(&task);
        if *self.turn.lock() == Some(task) {
            self.leave();
        }
    }

    /// Gives turns, for ever.
    pub async fn give(&self) {
        loop {
            self.news.notified().await;
            if self.turn.lock().is_some() {
                continue;
            }
            let next = {
                let mut waiting = self.waiting.lock();
                let at = self.numbers.below(waiting.len() as u64) as usize;
                let task = waiting.keys().nth(at).copied();
                task.and_then(|task| Some((task, waiting.remove(&task)?)))
            };
            if let Some((task, waker)) = next {
                *self.turn.lock() = Some(task);
                waker.wake();
            }
        }
    }
}

/// Whether a process runs.
#[derive(Debug)]
pub struct Switch {
    running: Mutex<Running>,
    turns: Arc<Turns>,
}

impl Gate for Switch {
    fn enter(&self, task: u64, waker: &Waker) -> Entry {
        if !self.turns.enter(task, waker) {
            return Entry::Wait;
        }
        let mut running = self.running.lock();
        let entry = match (running.is_dead, running.is_stopped) {
            (true, _) => Entry::Never,
            (false, false) => return Entry::Run,
            (false, true) => {
                running.waiting.push(waker.clone());
                Entry::Wait
            }
        };
        self.turns.leave();
        entry
    }

    fn leave(&self) {
        self.turns.leave();
    }

    fn forget(&self, task: u64) {
        self.turns.forget(task);
    }
}

impl Switch {
    fn set(&self, change: impl FnOnce(&mut Running)) {
        let waiting = {
            let mut running = self.running.lock();
            change(&mut running);
            std::mem::take(&mut running.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// What a process knows of terms and incarnations, as `millrace_rpc::remote::Admission` does.
#[derive(Debug, Default)]
pub struct Admission {
    pub term: u64,
    pub incarnation: u64,
    pub fenced: BTreeSet<u64>,
    /// When the leader has answered this process last.
    pub heard: Option<Instant>,
}

/// Who calls, and whom it means; 0: nobody in particular.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    pub term: u64,
    pub incarnation: u64,
    pub target: u64,
}

/// What a process serves.
#[derive(Default)]
pub struct Services {
    pub seat: Option<Arc<Seat>>,
    pub worker: Option<Arc<Worker>>,
    pub follower: Option<Arc<LogFollower>>,
}

/// One life of a process.
pub struct Process {
    pub node: Node,
    pub gate: Arc<Switch>,
    pub env: EnvHandle,
    pub admission: Mutex<Admission>,
    pub services: Mutex<Services>,
    /// It has read the log up to its registration, and reads what the log names from then on.
    pub reads: AtomicBool,
    /// What it reads now, and how often.
    pub pins: Mutex<Vec<String>>,
}

impl Process {
    /// Takes a call, or says what its caller is behind of.
    pub fn admit(&self, caller: Caller) -> Result<(), CallError> {
        let mut known = self.admission.lock();
        if known.fenced.contains(&caller.incarnation) {
            return Err(CallError::Fenced { incarnation: caller.incarnation });
        }
        let highest = known.term;
        known.term = known.term.max(caller.term);
        if caller.term != 0 && caller.term < highest {
            return Err(CallError::StaleTerm { term: highest });
        }
        if caller.target != 0 && caller.target != known.incarnation {
            return Err(CallError::StaleIncarnation { incarnation: known.incarnation });
        }
        Ok(())
    }

    pub fn incarnation(&self) -> u64 {
        self.admission.lock().incarnation
    }

    pub fn term(&self) -> u64 {
        self.admission.lock().term
    }

    pub fn raise_term(&self, term: u64) {
        let mut known = self.admission.lock();
        known.term = known.term.max(term);
    }

    pub fn follower(&self) -> Option<Arc<LogFollower>> {
        self.services.lock().follower.clone()
    }

    pub fn seat(&self) -> Option<Arc<Seat>> {
        self.services.lock().seat.clone()
    }

    pub fn worker(&self) -> Option<Arc<Worker>> {
        self.services.lock().worker.clone()
    }
}

/// What meta processes write down in their data directory, as `src/leadership.rs` does; a lock keeps it for one at a time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Led {
    /// The registration of the last that led; 0: none has.
    pub nonce: u64,
    /// How often one was deposed since one had led for long.
    pub deposed: u32,
}

impl Led {
    /// Whether the process that registered with this nonce was here, and so is dead.
    pub fn proves_dead(self, nonce: u64) -> bool {
        nonce != 0 && nonce == self.nonce
    }
}

#[derive(Debug, Default)]
struct Trace {
    hash: u64,
    lines: VecDeque<String>,
}

/// What a run suffers from: some of all harm, so that what is rare together with other harm is often alone.
#[derive(Clone, Debug)]
pub struct Climate {
    /// Only metas are harmed, and what is said arrives: no job has a reason to begin anew.
    pub harms_leaders_only: bool,
    /// How often the kinds of harm of `nemesis` come, in relation to each other.
    pub harm: [u64; 7],
    /// Longest pause between two of them, in milliseconds.
    pub pause: u64,
    /// Messages that are lost, late or repeated, and requests of the store that fail or take long, in a thousand.
    pub lost: u64,
    pub late: u64,
    pub repeated: u64,
    pub failed: u64,
    pub slow: u64,
    /// How long an append to the log takes at most, in milliseconds.
    pub append: u64,
    /// Claims of the lead out of turn, in a thousand looks.
    pub claims: u64,
    /// Whether those wait for longer that were deposed.
    pub penalties: bool,
    /// Longest pause of a session, in milliseconds.
    pub think: u64,
}

impl Climate {
    /// `bug`: planted; there is more of the harm that brings it out, and less of what hides it.
    fn new(numbers: &Numbers, bug: Option<&str>) -> Climate {
        let is_spared = numbers.chance(150);
        let harms_leaders_only = match bug {
            None => is_spared,
            Some(bug) => matches!(bug, "adopted-without-parts" | "not-adopted"),
        };
        let mut climate = Climate {
            harms_leaders_only,
            harm: std::array::from_fn(|_| numbers.of(&[0, 1, 3, 10])),
            pause: numbers.of(&[800, 1_500, 3_000]),
            lost: numbers.of(&[0, 5, 40]),
            late: numbers.of(&[0, 20, 120]),
            repeated: numbers.of(&[0, 60, 300]),
            failed: numbers.of(&[0, 10, 60]),
            slow: numbers.of(&[0, 10, 50]),
            append: numbers.of(&[0, 60, 300, 900]),
            claims: numbers.of(&[0, 6, 40]),
            penalties: true,
            think: numbers.of(&[300, 600, 1_500]),
        };
        climate.stress(bug);
        if harms_leaders_only {
            climate.spare_others();
        }
        climate
    }

    /// Metas are killed, stopped and end; nothing else is harmed, and no message is late.
    fn spare_others(&mut self) {
        (self.harm[2], self.harm[3], self.harm[4], self.harm[6]) = (0, 0, 0, 0);
        self.harm[0] += 3;
        (self.lost, self.late, self.pause) = (0, 0, 3_000);
    }

    fn stress(&mut self, bug: Option<&str>) {
        match bug {
            Some("late-commit-taken" | "sequence-of-writer") => {
                (self.harm[4], self.pause, self.append) = (30, 800, 900);
            }
            Some("stale-lead-read") => {
                self.harm = [0, 0, 0, 0, 0, 0, 20];
                (self.pause, self.lost, self.claims) = (3_000, 0, 0);
                (self.think, self.append, self.failed) = (60, 60, 0);
                // The next leader is to lead as long as the one before hears nothing of it.
                self.penalties = false;
            }
            Some("acknowledged-unsettled") => {
                self.harm = [0, 0, 10, 0, 0, 0, 10];
                (self.pause, self.lost, self.claims) = (1_500, 0, 0);
                (self.think, self.append, self.failed) = (60, 300, 0);
            }
            _ => {}
        }
    }
}

/// Everything of one run.
pub struct World {
    pub numbers: Numbers,
    pub climate: Climate,
    pub turns: Arc<Turns>,
    /// Invariants of the state are not checked: what a read makes of a bug is to be seen.
    pub spares_invariants: bool,
    /// Harm goes on for several times as long as versions of rows are kept.
    pub is_long: bool,
    /// Objects that nothing names are not kept for a while.
    pub collects_at_once: bool,
    pub began: Instant,
    pub bucket: Bucket,
    pub network: Network,
    pub checks: Checks,
    /// Whether requests and messages suffer, and processes are harmed.
    pub is_rough: AtomicBool,
    nodes: Mutex<Vec<Option<Arc<Process>>>>,
    led: Mutex<BTreeMap<Node, Led>>,
    trace: Mutex<Trace>,
    /// How often what has happened.
    counts: Mutex<BTreeMap<String, u64>>,
    prints: bool,
    failure: Mutex<Option<String>>,
    failed: Notify,
}

impl World {
    pub fn new(seed: u64, bug: Option<&str>) -> Arc<World> {
        let numbers = Numbers::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(1));
        Arc::new(World {
            climate: Climate::new(&numbers, bug),
            turns: Arc::new(Turns::new(numbers.next())),
            spares_invariants: bug == Some("sequence-of-writer"),
            is_long: bug == Some("scan-below-horizon") || bug.is_none() && seed % 16 == 5,
            collects_at_once: bug.is_none() && !seed.is_multiple_of(3),
            numbers,
            counts: Mutex::default(),
            prints: std::env::var_os("MILLRACE_SIMULATION_TRACE").is_some(),
            began: Instant::now(),
            bucket: Bucket::default(),
            network: Network::default(),
            checks: Checks::default(),
            is_rough: AtomicBool::new(false),
            nodes: Mutex::new(vec![None; NODES]),
            led: Mutex::default(),
            trace: Mutex::default(),
            failure: Mutex::default(),
            failed: Notify::new(),
        })
    }

    pub fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    pub fn wall_ms(&self) -> u64 {
        BEGAN_MS + self.now_ms()
    }

    pub fn is_rough(&self) -> bool {
        self.is_rough.load(Ordering::Relaxed)
    }

    /// A line of the trace.
    pub fn note(&self, line: impl FnOnce() -> String) {
        let line = format!("{:>7} {}", self.now_ms(), line());
        if self.prints {
            println!("{line}");
        }
        let mut trace = self.trace.lock();
        for byte in line.bytes() {
            trace.hash = (trace.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if trace.lines.len() == LINES {
            trace.lines.pop_front();
        }
        trace.lines.push_back(line);
    }

    /// Of all lines.
    pub fn trace_hash(&self) -> u64 {
        self.trace.lock().hash
    }

    pub fn last_lines(&self) -> Vec<String> {
        self.trace.lock().lines.iter().cloned().collect()
    }

    /// This has happened once more.
    pub fn count(&self, what: impl Into<String>) {
        *self.counts.lock().entry(what.into()).or_default() += 1;
    }

    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.counts.lock().clone()
    }

    /// A promise is broken: the run ends.
    pub fn fail(&self, promise: impl Into<String>) {
        let promise = promise.into();
        self.note(|| format!("BROKEN {promise}"));
        self.failure.lock().get_or_insert(promise);
        self.failed.notify_one();
    }

    pub fn failure(&self) -> Option<String> {
        self.failure.lock().clone()
    }

    pub async fn failed(&self) {
        self.failed.notified().await;
    }

    /// The process that runs there now.
    pub fn process(&self, node: Node) -> Option<Arc<Process>> {
        self.nodes.lock()[node].clone()
    }

    pub fn processes(&self) -> Vec<Arc<Process>> {
        self.nodes.lock().iter().flatten().cloned().collect()
    }

    /// What there is of the leaders that this node had.
    pub fn led(&self, node: Node) -> Led {
        self.led.lock().get(&node).copied().unwrap_or_default()
    }

    pub fn note_led(&self, node: Node, change: impl FnOnce(&mut Led)) {
        change(self.led.lock().entry(node).or_default());
    }

    /// A process begins there; one that is there is dead.
    pub fn start(self: &Arc<World>, node: Node) {
        self.kill(node);
        let env = ProcessEnv {
            began: self.began,
            numbers: Numbers::new(self.numbers.next()),
            ahead: self.numbers.below(400),
            rate: 960 + self.numbers.below(80) as u32,
        };
        let process = Arc::new(Process {
            node,
            gate: Arc::new(Switch { running: Mutex::default(), turns: Arc::clone(&self.turns) }),
            env: EnvHandle::new(env),
            admission: Mutex::default(),
            services: Mutex::default(),
            reads: AtomicBool::new(false),
            pins: Mutex::default(),
        });
        self.note(|| format!("start {node}"));
        self.nodes.lock()[node] = Some(Arc::clone(&process));
        let gate = Arc::clone(&process.gate) as Arc<dyn Gate>;
        let world = Arc::clone(self);
        match node {
            0 | 1 => drop(tokio::spawn(within(gate, super::metas::run(world, process)))),
            2..=4 => drop(tokio::spawn(within(gate, super::workers::run(world, process)))),
            5 => drop(tokio::spawn(within(gate, super::compactor::run(world, process)))),
            _ => drop(tokio::spawn(within(gate, super::frontends::run(world, process)))),
        }
    }

    /// As `kill -9`.
    pub fn kill(&self, node: Node) {
        let process = self.nodes.lock()[node].take();
        if let Some(process) = process {
            self.note(|| format!("kill {node}"));
            process.gate.set(|running| running.is_dead = true);
            // What it served names it in turn.
            drop(std::mem::take(&mut *process.services.lock()));
        }
    }

    /// As SIGSTOP, or SIGCONT.
    pub fn stop(&self, node: Node, is_stopped: bool) {
        if let Some(process) = self.process(node) {
            self.note(|| format!("{} {node}", if is_stopped { "stop" } else { "continue" }));
            process.gate.set(|running| running.is_stopped = is_stopped);
        }
    }

    /// A process ends by itself, and another one begins in its place a little later.
    pub fn restart(self: &Arc<World>, process: &Arc<Process>, why: &str) {
        let node = process.node;
        self.note(|| format!("end {node}: {why}"));
        let is_current = self.process(node).is_some_and(|now| Arc::ptr_eq(&now, process));
        if !is_current {
            return;
        }
        self.kill(node);
        let (world, pause) = (Arc::clone(self), self.numbers.between(100, 2_000));
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            if world.process(node).is_none() {
                world.start(node);
            }
        });
    }
}
