//! Fixes how far a source's content goes (docs/design.md §4, roots).
//!
//! Offsets become content only by a record in the log, so every reader sees the same rows at the same
//! epoch; so do the splits and files that discovery finds. Their pace follows the fastest reader: at most
//! two epochs lie ahead of what it has sealed, and each holds about half a second of its work; epochs of that size are
//! cut at once, without the barrier interval (`schedule`). A source with a rate of its own is followed by the wall
//! clock. Slower readers fall behind without holding anybody back. A table fed by a connector is its source's only reader.
//!
//! What there is beyond that, the leader does not look at itself: a process on which a job reads the source is asked
//! ([`polling`], [`asking`]). A source of which it cannot be said what there is shows that in its status and is asked
//! about again, ever more seldom; what is fixed already is read on meanwhile.

mod asking;
mod pace;
mod polling;
mod status;

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, JobId, RelationId, SqlError};
use millrace_connector::options;
use millrace_rpc::catalog::Relation;
use millrace_rpc::log::{Entry, SourceAdvance, SourceFile, SourceSplit, SplitMark, SplitOffset};
use millrace_rpc::services::ComputeService;
use millrace_rpc::source_poll::{Known, More, Polled};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use self::asking::Asking;
pub use self::pace::MAX_EVENTS;
use self::pace::{
    Demand, FIRST_EVENTS, MIN_EVENTS, Next, Rate, demand, extended, is_full, next_amount,
    next_offsets,
};
use self::polling::is_poll_due;
pub use self::status::{SourceState, SourceStatus};
use crate::idle_splits::IdleSplits;
use crate::job::Sealed;
use crate::shared::Shared;
use crate::state::{MetaState, feed_counter};
use crate::status::JobState;

/// Until an append that the log refused is tried again.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
/// Pause after the source could not be opened or polled; doubles with every failure in a row.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

pub struct Coordinator {
    shared: Arc<Shared>,
    /// The processes that are asked what there is.
    compute: Arc<dyn ComputeService>,
    id: RelationId,
    notify: Arc<Notify>,
    status: Arc<Mutex<SourceStatus>>,
}

/// Until the source's catalog entry changes.
struct Session {
    relation: Arc<Relation>,
    started_ms: u64,
    rate: Rate,
    asking: Asking,
    /// It could be told last what there is.
    is_checked: bool,
    polled: Option<(Instant, Polled)>,
    /// What the last poll found that is not logged yet.
    found: (Vec<SourceSplit>, Vec<SourceFile>),
    /// As was told last; `None`: not yet.
    offsets_per_row: Option<u64>,
    failures: u32,
    retry_at: Option<Instant>,
    amount: u64,
    last_advance: Option<Instant>,
    /// Of a fed table: what it had committed, and when.
    fed: Option<(u64, Instant)>,
    /// Of a source with a watermark.
    idle: Option<IdleSplits>,
}

impl Session {
    /// What the next epoch is to hold, in offsets.
    fn wanted(&self) -> u64 {
        self.amount.saturating_mul(self.offsets_per_row.unwrap_or(1))
    }

    /// What of the source cannot be read, as was told last.
    fn trouble(&self) -> Option<&SqlError> {
        self.polled.as_ref()?.1.trouble.as_ref()
    }
}

impl Coordinator {
    pub fn new(
        shared: Arc<Shared>,
        compute: Arc<dyn ComputeService>,
        id: RelationId,
        notify: Arc<Notify>,
        status: Arc<Mutex<SourceStatus>>,
    ) -> Coordinator {
        Coordinator { shared, compute, id, notify, status }
    }

    /// Until cancelled.
    pub async fn run(self) {
        let mut failures = 0;
        while let Some(relation) = self.relation() {
            match self.begin(&relation) {
                Ok(mut session) => {
                    failures = 0;
                    if !self.drive(&mut session).await {
                        return;
                    }
                }
                Err(error) => {
                    failures += 1;
                    self.failing(&error);
                    self.pause(retry_pause(failures)).await;
                }
            }
        }
    }

    fn relation(&self) -> Option<Arc<Relation>> {
        self.shared.state.read().relations.get(&self.id).cloned()
    }

    fn begin(&self, relation: &Arc<Relation>) -> Result<Session, SqlError> {
        let most = self.most();
        Ok(Session {
            started_ms: Epoch(relation.created_epoch).millis(),
            rate: Rate::new(options::rate_limit(relation)?, self.shared.env.now()),
            relation: Arc::clone(relation),
            asking: Asking::default(),
            is_checked: false,
            polled: None,
            found: Default::default(),
            offsets_per_row: None,
            failures: 0,
            retry_at: None,
            amount: FIRST_EVENTS.min(most),
            last_advance: None,
            fed: None,
            idle: IdleSplits::of(relation),
        })
    }

    fn most(&self) -> u64 {
        self.shared.source_epoch_events.get().copied().unwrap_or(MAX_EVENTS).max(MIN_EVENTS)
    }

    /// Waits, at most so long: something may have happened.
    async fn pause(&self, limit: Duration) {
        let _ = tokio::time::timeout(limit, self.notify.notified()).await;
    }

    /// `true`: the catalog entry has changed, begin again. `false`: it is gone.
    async fn drive(&self, session: &mut Session) -> bool {
        loop {
            let Some(relation) = self.relation() else { return false };
            if !Arc::ptr_eq(&relation, &session.relation) {
                return true;
            }
            if relation.paused {
                self.set_state(SourceState::Paused);
                self.notify.notified().await;
                continue;
            }
            let speed = match self.demand(session) {
                Demand::Next { speed } => speed,
                Demand::Nobody => {
                    self.stay_idle(session).await;
                    continue;
                }
                Demand::Enough => {
                    self.notify.notified().await;
                    continue;
                }
            };
            if !self.step(session, speed).await {
                return false;
            }
        }
    }

    /// Fixes the next offsets, or waits for there to be any. `false`: the log is closed.
    async fn step(&self, session: &mut Session, speed: Option<f64>) -> bool {
        let interval = self.shared.settings().barrier_interval;
        if let (Some(speed), Some(per_row)) = (speed, session.offsets_per_row) {
            session.amount = next_amount(session.amount, speed / per_row as f64).min(self.most());
        }
        let known = self.known(session.started_ms);
        if is_poll_due(session, &known, session.wanted(), interval, self.shared.env.now()) {
            self.poll(session, &known).await;
        }
        let wanted = session.wanted();
        match session.trouble() {
            Some(trouble) => self.failing(trouble),
            None if session.retry_at.is_none() => self.set_state(SourceState::Running),
            None => {}
        }
        let (splits, files) = mem::take(&mut session.found);
        let mut after = known;
        after.parts = extended(&after.parts, &splits);
        let allowed = session.rate.allowance(self.shared.env.now()).min(wanted);
        let next = match &session.polled {
            Some((_, polled)) if allowed > 0 => next_offsets(polled, &after, allowed),
            _ => Next::default(),
        };
        let at_clock = next.at_clock || session.rate.per_second.is_some();
        let (offsets, marks) = self.mark(session, next.offsets);
        if offsets.is_empty() && splits.is_empty() && files.is_empty() && marks.is_empty() {
            self.wait_for_more(session, interval).await;
            return true;
        }
        // What follows the clock is fixed once in a barrier interval.
        let since = session.last_advance.map_or(Duration::MAX, |at| self.shared.env.elapsed(at));
        let only_offsets = splits.is_empty() && files.is_empty() && marks.is_empty();
        if at_clock && since < interval && only_offsets {
            tokio::time::sleep(interval - since).await;
            return true;
        }
        session.last_advance = Some(self.shared.env.now());
        session.rate.take(next.taken);
        // Before the record: it wakes the readers, who look at it.
        let more = session.polled.as_ref().map(|(_, polled)| polled.more);
        self.status.lock().is_full = is_full(next.taken, wanted, more);
        // Readers learn of files only from the record.
        if splits.is_empty() && files.is_empty() {
            self.plan(&offsets);
        }
        let entry = SourceAdvance { source: self.id.0, offsets, splits, files, marks };
        self.advance(session, entry).await
    }

    /// No job that reads it runs, so it does not advance. If there are any, a process is asked all the same, so that it is
    /// seen why they may not.
    async fn stay_idle(&self, session: &mut Session) {
        let mut is_well = self.status.lock().state != SourceState::Failing;
        let has_readers = !self.readers().is_empty();
        let is_due = session.retry_at.is_none_or(|at| self.shared.env.now() >= at);
        if has_readers && is_due && !session.is_checked {
            let known = self.known(session.started_ms);
            self.poll(session, &known).await;
            let trouble = session.trouble().filter(|_| session.is_checked);
            trouble.into_iter().for_each(|trouble| self.failing(trouble));
            is_well = session.is_checked && trouble.is_none();
        }
        match session.retry_at {
            Some(at) if has_readers && !session.is_checked => {
                self.pause(at.saturating_duration_since(self.shared.env.now())).await;
            }
            _ => {
                if is_well {
                    self.set_state(SourceState::Idle);
                }
                self.notify.notified().await;
            }
        }
    }

    /// The jobs that read the source and run, beyond their backfill: committed epoch and last sealed cut.
    fn running(&self, state: &MetaState) -> Vec<(JobId, Epoch, Option<Sealed>)> {
        let running = |id: JobId| {
            let handle = self.shared.job(id)?;
            let job = state.jobs.get(&id)?;
            let ready = job.version.backfill.is_none() && handle.state() == JobState::Running;
            ready.then(|| (id, Epoch(job.version.epoch), handle.sealed()))
        };
        state.readers(self.id).into_iter().filter_map(running).collect()
    }

    /// Lets readers of the source, or the table that it feeds, read ahead what the next record is to fix.
    fn plan(&self, offsets: &[SplitOffset]) {
        if !offsets.is_empty() {
            self.status.lock().planned = offsets.to_vec();
            self.shared.changes.touch(self.id);
        }
    }

    /// What of an advance may be logged, and the marks of splits that go with it.
    fn mark(
        &self,
        session: &mut Session,
        offsets: Vec<SplitOffset>,
    ) -> (Vec<SplitOffset>, Vec<SplitMark>) {
        let Some(idle) = &mut session.idle else { return (offsets, Vec::new()) };
        let state = self.shared.state.read();
        let now = self.shared.env.now();
        let mut admitted = idle.admit(&state, self.id, offsets, now);
        admitted.marks.extend(idle.silent(&state, self.id, now));
        (admitted.offsets, admitted.marks)
    }

    /// Nothing can be fixed now.
    async fn wait_for_more(&self, session: &Session, interval: Duration) {
        // A rate holds back only what is there.
        let limited = session.rate.per_second.is_some() && self.is_left(session);
        let now = self.shared.env.now();
        let until_retry = session.retry_at.map(|at| at.saturating_duration_since(now));
        let until_retry = until_retry.filter(|pause| !pause.is_zero());
        match (&session.polled, until_retry) {
            (_, Some(pause)) => self.pause(pause).await,
            (Some((_, polled)), None) if polled.more == More::WithTime || limited => {
                tokio::time::sleep(interval).await;
            }
            (Some((at, polled)), None) => match polled.more {
                More::After(pause) => self.pause(pause.saturating_sub(now - *at)).await,
                _ => {
                    self.set_state(SourceState::Finished);
                    let idle = session.idle.as_ref();
                    let check = idle.and_then(|i| {
                        i.next_check(&self.shared.state.read(), self.id, self.shared.env.now())
                    });
                    match check {
                        None => self.notify.notified().await,
                        Some(check) => self.pause(check.max(interval)).await,
                    }
                }
            },
            (None, None) => tokio::time::sleep(interval).await,
        }
    }

    /// Whether there is more than what is fixed.
    fn is_left(&self, session: &Session) -> bool {
        let Some((_, polled)) = &session.polled else { return false };
        let known = self.known(session.started_ms);
        polled.available.iter().any(|(split, end)| *end > known.offset(*split))
    }

    fn known(&self, started_ms: u64) -> Known {
        let state = self.shared.state.read();
        let source = state.sources.get(&self.id);
        Known {
            parts: source.map(|s| s.parts.clone()).unwrap_or_default(),
            offsets: source
                .map(|s| s.newest().iter().map(|o| (o.split, o.offset)).collect())
                .unwrap_or_default(),
            started_ms,
            now_ms: self.shared.env.now_ms(),
        }
    }

    fn demand(&self, session: &mut Session) -> Demand {
        let state = self.shared.state.read();
        if state.jobs.contains_key(&self.id) {
            let running = self.shared.job(self.id).is_some_and(|h| h.state() == JobState::Running);
            return if running {
                fed_demand(&state, self.id, session, self.shared.env.now())
            } else {
                Demand::Enough
            };
        }
        let readers: Vec<(Epoch, Option<Sealed>)> =
            self.running(&state).into_iter().map(|(_, epoch, sealed)| (epoch, sealed)).collect();
        demand(&state, self.id, &readers)
    }

    /// `false`: the source is gone or the log is closed. Where the log takes nothing at present, that is waited for, and
    /// the source has not advanced.
    async fn advance(&self, session: &mut Session, advance: SourceAdvance) -> bool {
        let Ok(log) = self.shared.log() else { return false };
        match log.append(Entry::SourceAdvance(advance)).await {
            Ok(verdict) => verdict.is_ok(),
            Err(error) if error.is_refusal() => {
                // What was found is not logged: it is to be found again.
                session.polled = None;
                tokio::time::sleep(REFUSED_PAUSE).await;
                true
            }
            Err(_) => false,
        }
    }
}

fn retry_pause(failures: u32) -> Duration {
    RETRY_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(RETRY_MAX)
}

/// A fed table's demand: one epoch's worth may be fixed that it has not committed.
fn fed_demand(state: &MetaState, id: RelationId, session: &mut Session, now: Instant) -> Demand {
    let (Some(source), Some(job)) = (state.sources.get(&id), state.jobs.get(&id)) else {
        return Demand::Nobody;
    };
    let committed = |o: &SplitOffset| {
        let counter = job.version.counters.get(&feed_counter(o.split)).copied();
        counter.unwrap_or_else(|| source.parts.start(o.split))
    };
    let total: u64 = source.newest().iter().map(committed).sum();
    let fixed: u64 = source.newest().iter().map(|o| o.offset).sum();
    let mut speed = None;
    match session.fed {
        Some((before, at)) if total > before => {
            let took = (now - at).as_secs_f64().max(1e-3);
            speed = Some((total - before) as f64 / took);
            session.fed = Some((total, now));
        }
        _ => session.fed = Some((total, now)),
    }
    match fixed.saturating_sub(total) {
        outstanding if outstanding > session.wanted() => Demand::Enough,
        _ => Demand::Next { speed },
    }
}
