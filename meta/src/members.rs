//! What the leader knows of the other processes beyond the log: when they last told that they are there, how far they
//! are, and what they read (docs/design.md §9, §10). It is in memory only: a new leader is told within a heartbeat.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_common::{EnvHandle, Epoch, RelationId};
use millrace_rpc::control::{Heartbeat, JobReport, ProcessUsage};
use millrace_rpc::log::ProcessRole;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::cluster::has_role;
use crate::processes::Processes;
use crate::state::MetaState;

/// A process that has told nothing for so long is fenced.
pub const PROCESS_LEASE: Duration = Duration::from_secs(6);
/// So is one that tells of itself and that no call has reached for so long, while one has reached another process: as long
/// as for one that is silent.
///
/// In all it takes 8 s from the cut, or from the first call after it, until such a process is fenced. That call fails after
/// [`NOTICED`], and counts from its beginning on. Within another second all processes are asked whether calls reach them
/// ([`crate::cluster`]), once a second and for 2 s each: one of these questions has failed more than 6 s after the cut, and
/// 7 s at most, and the next look fences. Then two records are appended, and the jobs run elsewhere.
const UNREACHED: Duration = Duration::from_secs(6);
/// A call fails when nothing has come from its process for so long (`CallLimits` in millrace-rpc). One that lasts longer has
/// been heard of until then.
const NOTICED: Duration = Duration::from_secs(4);
/// A call without an answer fails after so long although its process is heard (`CallLimits`): that says nothing of the time
/// before.
const ANSWER: Duration = Duration::from_secs(10);
/// What a process has told no longer ago than this counts: how the object store is, or that it is there.
pub const RECENT: Duration = Duration::from_secs(3);

/// How the leader's calls of a process have gone.
#[derive(Clone, Copy, Debug, Default)]
struct Calls {
    /// When one was answered last.
    answered: Option<Instant>,
    /// Since when none has reached it, as far as those tell that have failed since, and when the last of these did.
    failed: Option<(Instant, Instant)>,
    /// Until then this process could not hear anybody.
    deaf_until: Option<Instant>,
}

impl Calls {
    /// One that began then has ended.
    fn note(&mut self, is_answered: bool, began: Instant, now: Instant) {
        if is_answered {
            *self = Calls { answered: Some(now), failed: None, ..*self };
            return;
        }
        // Two that are far apart say nothing of the time between them.
        let lasts = |last: Instant| began.saturating_duration_since(last) <= UNREACHED;
        let since = match self.failed.filter(|(_, last)| lasts(*last)) {
            Some((since, _)) => since,
            None => {
                let noticed = match now.saturating_duration_since(began) < ANSWER {
                    true => now.checked_sub(NOTICED),
                    false => Some(now),
                };
                let known = [noticed, self.answered, self.deaf_until].into_iter().flatten();
                known.fold(began, Instant::max)
            }
        };
        self.failed = Some((since, now));
    }

    /// Since when none has reached it, where that is too long.
    fn cut_off_since(&self) -> Option<Instant> {
        let (since, last) = self.failed?;
        (last.saturating_duration_since(since) > UNREACHED).then_some(since)
    }

    fn are_answered_since(&self, since: Instant) -> bool {
        self.failed.is_none() && self.answered.is_some_and(|answered| answered > since)
    }
}

#[derive(Clone, Debug)]
struct Contact {
    last: Instant,
    /// It has told what it reads.
    has_told: bool,
    reads_from: Option<Epoch>,
    pinned: BTreeSet<String>,
    jobs: Vec<JobReport>,
    usage: ProcessUsage,
    /// The last record that it had applied.
    applied: u64,
    /// Heartbeats that are not answered yet.
    answering: usize,
    calls: Calls,
    /// For how long the object store has not answered it, as it says; `None`: it has said nothing.
    store_wait: Option<Duration>,
}

impl Contact {
    fn at(now: Instant) -> Contact {
        let (pinned, jobs, usage) = (BTreeSet::new(), Vec::new(), ProcessUsage::default());
        Contact {
            last: now,
            has_told: false,
            reads_from: None,
            pinned,
            jobs,
            usage,
            applied: 0,
            answering: 0,
            calls: Calls::default(),
            store_wait: None,
        }
    }
}

/// A heartbeat that is being answered.
pub struct Answering<'a> {
    members: &'a Members,
    incarnation: u64,
    env: &'a EnvHandle,
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        if let Some(contact) = self.members.0.lock().get_mut(&self.incarnation) {
            contact.answering = contact.answering.saturating_sub(1);
            contact.last = self.env.now();
        }
    }
}

/// The last heartbeat of each process, by incarnation.
#[derive(Debug, Default)]
pub struct Members(Mutex<BTreeMap<u64, Contact>>);

impl Members {
    /// A process is there as of now, if nothing was known of it: it has just registered, or this process has just begun
    /// to lead.
    pub fn begin(&self, incarnation: u64, now: Instant) {
        self.0.lock().entry(incarnation).or_insert_with(|| Contact::at(now));
    }

    /// This process could not hear anybody until now: all have their lease from here on.
    pub fn begin_again(&self, now: Instant) {
        for contact in self.0.lock().values_mut() {
            contact.last = now;
            contact.calls = Calls { failed: None, deaf_until: Some(now), ..contact.calls };
            contact.store_wait = None;
        }
    }

    /// A call of a process that began then has been answered, in whatever way, or has not reached it.
    pub fn note_call(&self, incarnation: u64, is_answered: bool, began: Instant, now: Instant) {
        if let Some(contact) = self.0.lock().get_mut(&incarnation) {
            contact.calls.note(is_answered, began, now);
        }
    }

    /// The same of a question whether calls reach it, which is given less time than other calls: that it has not been
    /// answered counts where one of those has failed.
    pub fn note_question(&self, incarnation: u64, is_answered: bool, began: Instant, now: Instant) {
        if let Some(contact) = self.0.lock().get_mut(&incarnation)
            && (is_answered || contact.calls.failed.is_some())
        {
            contact.calls.note(is_answered, began, now);
        }
    }

    /// Whether some live process has not been reached by the last call.
    pub fn is_any_unreached(&self, processes: &Processes) -> bool {
        let contacts = self.0.lock();
        let has_failed = |id: &u64| contacts.get(id).is_some_and(|c| c.calls.failed.is_some());
        processes.live().keys().any(has_failed)
    }

    /// A process that tells of fewer records than before has been overtaken by itself: what it does not pin may be pinned
    /// since, and what it has told before may be over. Until it is as far again both count.
    pub fn note(&self, heartbeat: Heartbeat, now: Instant) {
        let Heartbeat {
            incarnation, applied, reads_from, pinned, jobs, usage, store_wait_ms, ..
        } = heartbeat;
        let store_wait = Some(Duration::from_millis(store_wait_ms));
        let usage = ProcessUsage { incarnation, ..usage.unwrap_or_default() };
        let reads_from = reads_from.map(Epoch);
        let pinned: BTreeSet<String> = pinned.into_iter().collect();
        let mut contacts = self.0.lock();
        let contact = contacts.entry(incarnation).or_insert_with(|| Contact::at(now));
        if applied < contact.applied {
            contact.reads_from = contact.reads_from.into_iter().chain(reads_from).min();
            contact.pinned.extend(pinned);
        } else {
            (contact.reads_from, contact.pinned, contact.applied) = (reads_from, pinned, applied);
        }
        (contact.last, contact.has_told) = (now, true);
        (contact.jobs, contact.usage) = (jobs, usage);
        contact.store_wait = store_wait;
    }

    /// While the answer lives, the process is not lost: it waits for this one.
    pub fn answering<'a>(&'a self, incarnation: u64, env: &'a EnvHandle) -> Answering<'a> {
        if let Some(contact) = self.0.lock().get_mut(&incarnation) {
            contact.answering += 1;
        }
        Answering { members: self, incarnation, env }
    }

    /// Forgets all others: what they told last holds nothing.
    pub fn keep(&self, is_live: impl Fn(u64) -> bool) {
        self.0.lock().retain(|id, _| is_live(*id));
    }

    /// The live processes that have told nothing for longer than the lease.
    pub fn lost(&self, processes: &Processes, now: Instant) -> Vec<u64> {
        let contacts = self.0.lock();
        let is_lost = |id: &&u64| {
            let contact = contacts.get(*id);
            contact.is_some_and(|c| {
                c.answering == 0 && now.saturating_duration_since(c.last) > PROCESS_LEASE
            })
        };
        processes.live().keys().filter(is_lost).copied().collect()
    }

    /// The live processes that tell of themselves and that calls have not reached for longer than [`UNREACHED`], while
    /// another one has answered: they may be well, and nothing that runs there goes on. Where no process answers, it is this
    /// one that is cut off.
    pub fn cut_off(&self, processes: &Processes, now: Instant) -> Vec<u64> {
        let contacts = self.0.lock();
        let others_answer = |since| contacts.values().any(|c| c.calls.are_answered_since(since));
        let is_told =
            |c: &&Contact| c.answering > 0 || now.saturating_duration_since(c.last) <= RECENT;
        let told = |id: &u64| contacts.get(id).filter(is_told);
        let since = |id: &u64| told(id).and_then(|c| c.calls.cut_off_since());
        let live = processes.live().keys().copied();
        live.filter(|id| since(id).is_some_and(&others_answer)).collect()
    }

    /// For how long the object store has not answered the live compute processes, as those say that have said it lately.
    pub fn store_waits(&self, processes: &Processes, now: Instant) -> Vec<(u64, Duration)> {
        let contacts = self.0.lock();
        let wait_of = |id: &u64| {
            let contact = contacts.get(id)?;
            let is_recent = now.saturating_duration_since(contact.last) <= RECENT;
            contact.store_wait.filter(|_| is_recent)
        };
        let live = processes.live().iter();
        let computes = live.filter(|(_, p)| has_role(&p.registration, ProcessRole::Compute));
        computes.filter_map(|(id, _)| Some((*id, wait_of(id)?))).collect()
    }

    /// For how long the object store has not answered a process, as that has told last.
    pub fn store_wait_of(&self, incarnation: u64) -> Duration {
        let contacts = self.0.lock();
        contacts.get(&incarnation).and_then(|c| c.store_wait).unwrap_or_default()
    }

    /// The lowest epoch that some process reads; `None`: nothing is read. One that has told nothing yet, and has registered
    /// before this process did, which is `leader`, may read any: it has told an earlier leader.
    pub fn reads_from(&self, leader: u64) -> Option<Epoch> {
        let contacts = self.0.lock();
        let reads_from = |(id, c): (&u64, &Contact)| match c.has_told || *id > leader {
            true => c.reads_from,
            false => Some(Epoch::ZERO),
        };
        contacts.iter().filter_map(reads_from).min()
    }

    /// Whether some process reads this object.
    pub fn pins(&self, object: &str) -> bool {
        self.0.lock().values().any(|c| c.pinned.contains(object))
    }

    /// The objects that a process reads.
    pub fn pinned_by(&self, incarnation: u64) -> BTreeSet<String> {
        self.0.lock().get(&incarnation).map(|c| c.pinned.clone()).unwrap_or_default()
    }

    /// The lowest epoch that a process reads.
    pub fn reads_from_of(&self, incarnation: u64) -> Option<Epoch> {
        self.0.lock().get(&incarnation)?.reads_from
    }

    /// How jobs are, by relation, as the processes say that the log has them run on. What a process has told of a job that
    /// has moved since is past.
    pub fn job_reports(&self, state: &MetaState) -> BTreeMap<u32, JobReport> {
        let contacts = self.0.lock();
        let runs_on = |job: &JobReport, process: u64| {
            let placed = state.jobs.get(&RelationId(job.relation));
            placed.is_some_and(|placed| placed.process == process)
        };
        let told = contacts.iter().flat_map(|(id, c)| c.jobs.iter().map(move |job| (*id, job)));
        let own = told.filter(|(id, job)| runs_on(job, *id));
        own.map(|(_, job)| (job.relation, job.clone())).collect()
    }

    /// What the live processes have said of their caches and requests, by incarnation; those that have.
    pub fn usages(&self, processes: &Processes) -> Vec<ProcessUsage> {
        let contacts = self.0.lock();
        let live = contacts.iter().filter(|(id, _)| processes.is_live(**id));
        live.map(|(_, c)| &c.usage).filter(|u| u.incarnation != 0).cloned().collect()
    }

    /// For how long a process could have told of itself and has not; `None`: nothing is known of it.
    pub fn silence(&self, incarnation: u64, now: Instant) -> Option<Duration> {
        let contacts = self.0.lock();
        let contact = contacts.get(&incarnation)?;
        let is_answered = contact.answering == 0;
        Some(if is_answered { now.saturating_duration_since(contact.last) } else { Duration::ZERO })
    }

    /// How long ago a process has told of itself; `None`: it has not.
    pub fn heartbeat_age(&self, incarnation: u64, now: Instant) -> Option<Duration> {
        let contacts = self.0.lock();
        let contact = contacts.get(&incarnation)?;
        Some(now.saturating_duration_since(contact.last))
    }
}

#[cfg(test)]
mod tests {
    use millrace_rpc::log::RegisterProcess;

    use super::*;
    use crate::processes::Process;
    use crate::state::JobRecord;
    use crate::timeline::Timeline;

    fn process(registration: RegisterProcess) -> Process {
        Process { registration, epoch: Epoch::ZERO, number: 1, drained: false }
    }

    fn beat(incarnation: u64) -> Heartbeat {
        Heartbeat { incarnation, ..Heartbeat::default() }
    }

    const JOB: RelationId = RelationId(5);
    /// It has registered after the processes here.
    const LEADER: u64 = 9;

    fn report(rows: i64) -> JobReport {
        JobReport { relation: JOB.0, rows, ..JobReport::default() }
    }

    /// The log has the job run on this process.
    fn runs_on(process: u64) -> MetaState {
        let mut state = MetaState::default();
        let job = JobRecord {
            version: Default::default(),
            timeline: Timeline::default(),
            inputs: Vec::new(),
            process,
            by_operator: false,
            horizon: Epoch::ZERO,
            watermarks: Default::default(),
        };
        state.jobs.insert(JOB, job);
        state
    }

    #[tokio::test]
    async fn a_job_is_told_of_by_the_process_that_the_log_has_it_run_on() {
        let members = Members::default();
        for (process, rows) in [(1, 10), (2, 20)] {
            members.note(Heartbeat { jobs: vec![report(rows)], ..beat(process) }, Instant::now());
        }
        let told = |process| {
            let reports = members.job_reports(&runs_on(process));
            reports.get(&JOB.0).map(|job| job.rows)
        };
        assert_eq!((told(1), told(2)), (Some(10), Some(20)));
        assert_eq!((told(0), told(3)), (None, None), "nobody has told of it there");
    }

    #[tokio::test]
    async fn a_fenced_process_has_no_caches() {
        let (mut processes, members) = (Processes::default(), Members::default());
        for id in 1..=2 {
            let registration = RegisterProcess { nonce: id, ..RegisterProcess::default() };
            processes.register(id, process(registration));
            let usage = Some(ProcessUsage::default());
            members.note(Heartbeat { usage, ..beat(id) }, Instant::now());
        }
        let told = |processes: &Processes| {
            members.usages(processes).iter().map(|usage| usage.incarnation).collect::<Vec<_>>()
        };
        assert_eq!(told(&processes), [1, 2]);
        processes.fence(2);
        assert_eq!(told(&processes), [1]);
        // A heartbeat that has come before the fence may be noted after it.
        members.note(beat(2), Instant::now());
        assert_eq!(told(&processes), [1]);
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_silent_for_longer_than_the_lease_is_lost() {
        let mut processes = Processes::default();
        for id in 1..=3 {
            let registration = RegisterProcess { nonce: id, ..RegisterProcess::default() };
            processes.register(id, process(registration));
        }
        let members = Members::default();
        members.begin(1, Instant::now());
        members.begin(2, Instant::now());
        tokio::time::advance(PROCESS_LEASE).await;
        assert_eq!(members.lost(&processes, Instant::now()), [0u64; 0]);
        members.note(beat(2), Instant::now());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(members.lost(&processes, Instant::now()), [1], "of 3 nothing is expected yet");
        members.begin_again(Instant::now());
        assert_eq!(members.lost(&processes, Instant::now()), [0u64; 0], "nobody was heard");
        tokio::time::advance(PROCESS_LEASE + Duration::from_millis(1)).await;
        assert_eq!(members.lost(&processes, Instant::now()), [1, 2]);
        processes.fence(1);
        assert_eq!(members.lost(&processes, Instant::now()), [2]);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_an_answer_is_not_lost() {
        let mut processes = Processes::default();
        let registration = RegisterProcess { nonce: 1, ..RegisterProcess::default() };
        processes.register(1, process(registration));
        let (members, env) = (Members::default(), EnvHandle::default());
        members.note(beat(1), Instant::now());
        let answering = members.answering(1, &env);
        tokio::time::advance(PROCESS_LEASE * 2).await;
        assert_eq!(members.lost(&processes, Instant::now()), [0u64; 0]);
        drop(answering);
        assert_eq!(members.lost(&processes, Instant::now()), [0u64; 0], "it may beat again");
        tokio::time::advance(PROCESS_LEASE + Duration::from_millis(1)).await;
        assert_eq!(members.lost(&processes, Instant::now()), [1]);
    }

    #[tokio::test(start_paused = true)]
    async fn who_cannot_be_called_while_others_can_is_cut_off() {
        let mut processes = Processes::default();
        let members = Members::default();
        for id in 1..=2 {
            let registration = RegisterProcess { nonce: id, ..RegisterProcess::default() };
            processes.register(id, process(registration));
            members.begin(id, Instant::now());
        }
        // For so long the calls of a process fail, once a second; with these answers at the end.
        let called = async |seconds: u64, answers: Vec<(u64, bool)>| {
            for _ in 0..=seconds {
                tokio::time::advance(Duration::from_secs(1)).await;
                members.note_call(1, false, Instant::now(), Instant::now());
            }
            for (id, is_answered) in answers {
                members.note_call(id, is_answered, Instant::now(), Instant::now());
            }
            members.note(Heartbeat { incarnation: 1, ..Heartbeat::default() }, Instant::now());
            members.cut_off(&processes, Instant::now())
        };
        assert_eq!(called(7, vec![]).await, [0u64; 0], "nobody is reached");
        assert_eq!(called(1, vec![(2, true)]).await, [1]);
        assert_eq!(called(1, vec![(2, false)]).await, [0u64; 0], "nobody is reached any more");
        assert_eq!(called(1, vec![(2, true), (1, true)]).await, [0u64; 0]);
        assert_eq!(called(6, vec![(2, true)]).await, [0u64; 0], "not for long enough");
        assert_eq!(called(0, vec![(2, true)]).await, [1]);
        tokio::time::advance(RECENT + Duration::from_secs(1)).await;
        assert_eq!(members.cut_off(&processes, Instant::now()), [0u64; 0], "it is silent");
        members.begin_again(Instant::now());
        assert_eq!(called(0, vec![(2, true)]).await, [0u64; 0], "this process has stood still");
        tokio::time::advance(UNREACHED * 2).await;
        assert_eq!(called(0, vec![(2, true)]).await, [0u64; 0], "two calls that failed");
    }

    /// A process that is cut off is noticed by calls that last.
    #[tokio::test(start_paused = true)]
    async fn a_call_that_fails_counts_from_its_beginning_on_if_that_was_not_long_ago() {
        let mut processes = Processes::default();
        for id in 1..=2 {
            let registration = RegisterProcess { nonce: id, ..RegisterProcess::default() };
            processes.register(id, process(registration));
        }
        // Two calls that fail after so many seconds, one after the other, and whether this process has stood still
        // until the first one failed.
        let cases = [
            (4, 3, false, true),
            (4, 2, false, false),
            (1, 6, false, true),
            (1, 5, false, false),
            (60, 6, false, false),
            (60, 7, false, true),
            (4, 6, true, false),
            (4, 7, true, true),
        ];
        for (first, second, stood_still, is_cut_off) in cases {
            let members = Members::default();
            (1..=2).for_each(|id| members.begin(id, Instant::now()));
            for seconds in [first, second] {
                let began = Instant::now();
                tokio::time::advance(Duration::from_secs(seconds)).await;
                if stood_still && seconds == first {
                    members.begin_again(Instant::now());
                }
                members.note_call(1, false, began, Instant::now());
            }
            members.note_call(2, true, Instant::now(), Instant::now());
            members.note(Heartbeat { incarnation: 1, ..Heartbeat::default() }, Instant::now());
            let cut_off = members.cut_off(&processes, Instant::now());
            assert_eq!(cut_off == [1], is_cut_off, "{first} {second} {stood_still}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_that_is_not_answered_counts_where_a_call_has_failed() {
        let mut processes = Processes::default();
        let registration = RegisterProcess { nonce: 1, ..RegisterProcess::default() };
        processes.register(1, process(registration));
        let members = Members::default();
        let now = Instant::now();
        members.begin(1, now);
        members.note_question(1, false, now, now);
        assert!(!members.is_any_unreached(&processes), "it may be busy");
        members.note_call(1, false, now, now);
        members.note_question(1, false, now, now);
        assert!(members.is_any_unreached(&processes));
        members.note_question(1, true, now, now);
        assert!(!members.is_any_unreached(&processes));
    }

    #[tokio::test]
    async fn what_processes_read_is_held() {
        let members = Members::default();
        assert_eq!(members.reads_from(LEADER), None);
        let one = Heartbeat { reads_from: Some(9), pinned: vec!["a".into()], ..beat(1) };
        members.note(one, Instant::now());
        members.note(Heartbeat { reads_from: Some(7), ..beat(2) }, Instant::now());
        assert_eq!(members.reads_from(LEADER), Some(Epoch(7)));
        assert!(members.pins("a") && !members.pins("b"));
        members.note(beat(1), Instant::now());
        assert!(!members.pins("a"), "it has told that it is done");
        members.keep(|id| id != 2);
        assert_eq!(members.reads_from(LEADER), None);
        members.begin(3, Instant::now());
        assert_eq!(members.reads_from(LEADER), Some(Epoch::ZERO), "it has told nothing yet");
        assert_eq!(members.reads_from(2), None, "nor to anybody before");
        members.note(beat(3), Instant::now());
        assert_eq!(members.reads_from(LEADER), None);
    }

    /// An object is deleted once every process has applied its record and none pins it: the newest heartbeat says both.
    #[tokio::test]
    async fn a_heartbeat_that_comes_late_gives_no_pin_back() {
        let members = Members::default();
        let newer = Heartbeat { applied: 8, pinned: vec!["a".into()], ..beat(1) };
        members.note(newer, Instant::now());
        members.note(Heartbeat { applied: 7, ..beat(1) }, Instant::now());
        assert!(members.pins("a"));
        members.note(Heartbeat { applied: 8, ..beat(1) }, Instant::now());
        assert!(!members.pins("a"));
    }

    #[tokio::test(start_paused = true)]
    async fn who_tells_of_fewer_records_than_before_is_heard_all_the_same() {
        let members = Members::default();
        let pins = |applied, reads_from, object: &str| {
            let pinned = vec![object.to_owned()];
            Heartbeat { applied, reads_from: Some(reads_from), pinned, ..beat(1) }
        };
        members.note(pins(8, 30, "a"), Instant::now());
        tokio::time::advance(PROCESS_LEASE).await;
        let jobs = vec![report(3)];
        members.note(Heartbeat { jobs, ..pins(7, 20, "b") }, Instant::now());
        assert!(members.pins("a") && members.pins("b"));
        assert_eq!(members.reads_from(LEADER), Some(Epoch(20)));
        assert!(members.job_reports(&runs_on(1)).contains_key(&JOB.0));
        assert_eq!(members.silence(1, Instant::now()), Some(Duration::ZERO));
        members.note(pins(7, 40, "c"), Instant::now());
        assert_eq!(members.reads_from(LEADER), Some(Epoch(20)), "7 is not what it was before");
        members.note(pins(8, 50, "d"), Instant::now());
        assert!(!["a", "b", "c"].iter().any(|object| members.pins(object)));
        assert_eq!(members.reads_from(LEADER), Some(Epoch(50)));
    }
}
