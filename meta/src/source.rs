//! Fixes how far a source's content goes (docs/design.md §4, roots).
//!
//! Offsets become content only by a record in the log, so every reader sees the same rows at the same
//! epoch; so do the splits and files that discovery finds. Their pace follows the fastest reader: at most
//! [`OUTSTANDING`] epochs lie ahead of what it has sealed, and each holds about half a second of its
//! work; epochs of that size are cut at once, without the barrier interval (`schedule`). A source with a rate of its own
//! is followed by the wall clock. Slower readers fall behind
//! without holding anybody back. A table fed by a connector is its source's only reader.
//!
//! A source that cannot be asked what there is says so in its status and is asked again, ever more
//! seldom; what is fixed already is read on meanwhile.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, RelationId, SqlError};
use millrace_connector::{ConnectorError, Known, More, Polled, Source, options};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::{Entry, SourceAdvance, SplitMark, SplitOffset};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::idle_splits::IdleSplits;
use crate::job::Sealed;
use crate::shared::Shared;
use crate::state::{MetaState, feed_counter};
use crate::status::JobState;

/// Epochs fixed beyond the fastest reader's last sealed one: one being worked on, one ready.
const OUTSTANDING: usize = 2;
/// Work of the fastest reader in one epoch.
const EPOCH_WORK: Duration = Duration::from_millis(500);
/// Rows of the first epoch, before any speed is known.
const FIRST_EVENTS: u64 = 16_384;
/// One epoch's bounds.
const MIN_EVENTS: u64 = 1_024;
pub const MAX_EVENTS: u64 = 8 << 20;
/// An epoch is at most this many times the one before: one lucky measurement does not flood a reader.
const MAX_GROWTH: u64 = 4;
/// Until an append that the log refused is tried again.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
/// Pause after a failure to open or poll the source; doubles with every failure in a row.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// A poll that takes longer has failed: a store or broker that does not answer.
const POLL_LIMIT: Duration = Duration::from_secs(120);

/// What a source is doing, for SHOW SOURCES.
#[derive(Clone, Debug, Default)]
pub struct SourceStatus {
    pub state: SourceState,
    /// Why it is failing.
    pub reason: Option<String>,
    /// How far each split could go, as far as is known.
    pub available: Vec<(u32, u64)>,
    /// Where splits end by the record that was last on its way into the log; for those that read ahead.
    pub planned: Vec<SplitOffset>,
    /// What it fixed last is as much as its readers work off in an epoch, or all there will ever be: they need not
    /// wait for more.
    pub is_full: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceState {
    #[default]
    Starting,
    /// No job reads it: it does not advance.
    Idle,
    Running,
    Paused,
    /// All there will ever be is fixed.
    Finished,
    /// It cannot be asked what there is.
    Failing,
}

impl SourceState {
    pub fn name(self) -> &'static str {
        match self {
            SourceState::Starting => "starting",
            SourceState::Idle => "idle",
            SourceState::Running => "running",
            SourceState::Paused => "paused",
            SourceState::Finished => "finished",
            SourceState::Failing => "failing",
        }
    }
}

pub struct Coordinator {
    shared: Arc<Shared>,
    id: RelationId,
    notify: Arc<Notify>,
    status: Arc<Mutex<SourceStatus>>,
}

/// What the readers allow now.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Demand {
    /// No job reads it.
    Nobody,
    /// Enough is outstanding.
    Enough,
    /// The speed of the fastest reader, in offsets a second; `None`: not measured yet.
    Next { speed: Option<f64> },
}

/// One opening of the source: until its catalog entry changes.
struct Session {
    relation: Arc<Relation>,
    source: Arc<dyn Source>,
    started_ms: u64,
    rate: Rate,
    polled: Option<(Instant, Polled)>,
    failures: u32,
    retry_at: Option<Instant>,
    amount: u64,
    last_advance: Option<Instant>,
    /// Of a fed table: what it had committed, and when.
    fed: Option<(u64, Instant)>,
    /// Of a source with a watermark.
    idle: Option<IdleSplits>,
}

/// A bucket of offsets that fills with time.
struct Rate {
    per_second: Option<u64>,
    tokens: f64,
    filled: Instant,
}

impl Rate {
    fn new(per_second: Option<u64>, now: Instant) -> Rate {
        Rate { per_second, tokens: 0.0, filled: now }
    }

    /// How much may be taken now.
    fn allowance(&mut self, now: Instant) -> u64 {
        let Some(rate) = self.per_second else { return u64::MAX };
        let earned = (now - self.filled).as_secs_f64() * rate as f64;
        self.filled = now;
        self.tokens = (self.tokens + earned).min((rate as f64).max(1.0));
        self.tokens as u64
    }

    fn take(&mut self, amount: u64) {
        if self.per_second.is_some() {
            self.tokens -= amount as f64;
        }
    }
}

impl Coordinator {
    pub fn new(
        shared: Arc<Shared>,
        id: RelationId,
        notify: Arc<Notify>,
        status: Arc<Mutex<SourceStatus>>,
    ) -> Coordinator {
        Coordinator { shared, id, notify, status }
    }

    /// Until cancelled.
    pub async fn run(self) {
        let mut failures = 0;
        while let Some(relation) = self.relation() {
            match self.open(&relation) {
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

    fn open(&self, relation: &Arc<Relation>) -> Result<Session, SqlError> {
        let most = self.most();
        Ok(Session {
            source: millrace_connector::create_source(relation)?,
            started_ms: Epoch(relation.created_epoch).millis(),
            rate: Rate::new(options::rate_limit(relation)?, self.shared.env.now()),
            relation: Arc::clone(relation),
            polled: None,
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

    fn set_state(&self, state: SourceState) {
        let mut status = self.status.lock();
        status.state = state;
        if state != SourceState::Failing && status.reason.take().is_some() {
            info!(source = %self.shared.label(self.id), "source can be read again");
        }
    }

    fn failing(&self, error: &SqlError) {
        let reason = one_line(error);
        let mut status = self.status.lock();
        if status.reason.as_deref() != Some(&reason) {
            warn!(source = %self.shared.label(self.id), %error, "source cannot be read");
        }
        status.state = SourceState::Failing;
        status.reason = Some(reason);
    }

    /// `true`: the catalog entry has changed, open it again. `false`: it is gone.
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
                    if self.status.lock().state != SourceState::Failing {
                        self.set_state(SourceState::Idle);
                    }
                    self.notify.notified().await;
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
        let per_row = session.source.offsets_per_row().max(1);
        if let Some(speed) = speed {
            session.amount = next_amount(session.amount, speed / per_row as f64).min(self.most());
        }
        let known = self.known(session.started_ms);
        let wanted = session.amount.saturating_mul(per_row);
        let mut found = None;
        if is_poll_due(session, &known, wanted, interval, self.shared.env.now()) {
            match tokio::time::timeout(POLL_LIMIT, session.source.poll(&known)).await {
                Ok(Ok(polled)) => {
                    session.failures = 0;
                    session.retry_at = None;
                    self.status.lock().available = polled.available.clone();
                    found = Some((polled.splits.clone(), polled.files.clone()));
                    session.polled = Some((self.shared.env.now(), polled));
                }
                Ok(Err(error)) => self.poll_failed(session, error.into()),
                Err(_) => {
                    let place = format!("source {}", self.id);
                    let error = ConnectorError::io(place, "it does not answer");
                    self.poll_failed(session, error.into());
                }
            }
        }
        match session.polled.as_ref().and_then(|(_, polled)| polled.trouble.as_ref()) {
            Some(trouble) => self.failing(trouble),
            None if session.retry_at.is_none() => self.set_state(SourceState::Running),
            None => {}
        }
        let (splits, files) = found.unwrap_or_default();
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
            self.plan(&session.relation, &offsets);
        }
        let entry = SourceAdvance { source: self.id.0, offsets, splits, files, marks };
        self.advance(entry).await
    }

    /// Lets readers of a source read ahead what the next record is to fix.
    fn plan(&self, relation: &Relation, offsets: &[SplitOffset]) {
        if relation.kind() == RelationKind::Source && !offsets.is_empty() {
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

    fn poll_failed(&self, session: &mut Session, error: SqlError) {
        session.failures += 1;
        session.retry_at = Some(self.shared.env.now() + retry_pause(session.failures));
        self.failing(&error);
    }

    /// Nothing can be fixed now.
    async fn wait_for_more(&self, session: &Session, interval: Duration) {
        // A rate holds back only what is there.
        let limited = session.rate.per_second.is_some() && self.is_left(session);
        let now = self.shared.env.now();
        let until_retry = session.retry_at.map(|at| at.saturating_duration_since(now));
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
        let readers: Vec<(Epoch, Option<Sealed>)> = state
            .readers(self.id)
            .into_iter()
            .filter_map(|id| {
                let handle = self.shared.job(id)?;
                let job = state.jobs.get(&id)?;
                let ready = job.version.backfill.is_none() && handle.state() == JobState::Running;
                ready.then(|| (Epoch(job.version.epoch), handle.sealed()))
            })
            .collect();
        demand(&state, self.id, &readers)
    }

    /// `false`: the source is gone or the log is closed. Where the log takes nothing at present, that is waited for, and
    /// the source has not advanced.
    async fn advance(&self, advance: SourceAdvance) -> bool {
        let Ok(log) = self.shared.log() else { return false };
        match log.append(Entry::SourceAdvance(advance)).await {
            Ok(verdict) => verdict.is_ok(),
            Err(error) if error.is_refusal() => {
                tokio::time::sleep(REFUSED_PAUSE).await;
                true
            }
            Err(_) => false,
        }
    }
}

/// Message, detail and hint, where only the last sentence keeps its full stop.
fn one_line(error: &SqlError) -> String {
    let mut line = error.message.clone();
    for part in [&error.detail, &error.hint].into_iter().flatten() {
        if line.ends_with('.') {
            line.pop();
        }
        line.push_str(". ");
        line.push_str(part);
    }
    line
}

fn retry_pause(failures: u32) -> Duration {
    RETRY_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(RETRY_MAX)
}

fn extended(
    parts: &millrace_rpc::services::SourceParts,
    splits: &[millrace_rpc::log::SourceSplit],
) -> millrace_rpc::services::SourceParts {
    let mut parts = parts.clone();
    if !splits.is_empty() {
        Arc::make_mut(&mut parts.splits).extend(splits.iter().cloned());
    }
    parts
}

/// Whether to ask again: nothing is known, or what is known does not fill the next epoch and there
/// may be more.
fn is_poll_due(
    session: &Session,
    known: &Known,
    wanted: u64,
    interval: Duration,
    now: Instant,
) -> bool {
    if session.retry_at.is_some_and(|at| now < at) {
        return false;
    }
    let Some((at, polled)) = &session.polled else { return true };
    match polled.more {
        More::Never => false,
        More::WithTime => now - *at >= interval / 2,
        More::After(pause) => {
            let left = |(split, end): &(u32, u64)| end.saturating_sub(known.offset(*split));
            let left = polled.available.iter().map(left).fold(0, u64::saturating_add);
            now - *at >= pause && left < wanted
        }
    }
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
    let epoch = session.amount.saturating_mul(session.source.offsets_per_row().max(1));
    match fixed.saturating_sub(total) {
        outstanding if outstanding > epoch => Demand::Enough,
        _ => Demand::Next { speed },
    }
}

/// `readers`: committed epoch and last sealed cut of every running reader.
fn demand(state: &MetaState, id: RelationId, readers: &[(Epoch, Option<Sealed>)]) -> Demand {
    let Some(source) = state.sources.get(&id) else { return Demand::Nobody };
    let reached =
        |(epoch, sealed): &(Epoch, Option<Sealed>)| sealed.map_or(*epoch, |s| s.to.max(*epoch));
    let Some(fastest) = readers.iter().map(reached).max() else { return Demand::Nobody };
    let ahead =
        source.history.iter().rev().take_while(|(e, _)| *e > fastest).take(OUTSTANDING).count();
    if ahead >= OUTSTANDING {
        return Demand::Enough;
    }
    let total = |epoch| source.offsets_at(epoch).iter().map(|o| o.offset).sum::<u64>();
    let speeds = readers.iter().filter_map(|(_, sealed)| {
        let sealed = (*sealed)?;
        let events = total(sealed.to).saturating_sub(total(sealed.from));
        (events > 0).then(|| events as f64 / sealed.took.as_secs_f64().max(1e-3))
    });
    Demand::Next { speed: speeds.reduce(f64::max) }
}

fn next_amount(previous: u64, speed: f64) -> u64 {
    let wanted = (speed * EPOCH_WORK.as_secs_f64()) as u64;
    wanted
        .clamp(previous / MAX_GROWTH, previous.saturating_mul(MAX_GROWTH))
        .clamp(MIN_EVENTS, MAX_EVENTS)
}

/// What one record can fix.
#[derive(Debug, Default, PartialEq)]
struct Next {
    offsets: Vec<SplitOffset>,
    /// It is all there is now, and more comes with time.
    at_clock: bool,
    /// Offsets that all splits together go forward by.
    taken: u64,
}

/// Whether an advance is worth a commit of its own.
fn is_full(taken: u64, wanted: u64, more: Option<More>) -> bool {
    taken > 0 && (taken >= wanted || more == Some(More::Never))
}

/// Every split moves by its share of `amount`, as far as it has rows; what one cannot use goes to the
/// others.
fn next_offsets(polled: &Polled, known: &Known, amount: u64) -> Next {
    let mut left: Vec<(u32, u64, u64)> = polled
        .available
        .iter()
        .map(|(split, end)| {
            let from = known.offset(*split);
            (*split, from, end.saturating_sub(from))
        })
        .collect();
    left.sort_by_key(|(_, _, available)| *available);
    let mut next = Next::default();
    let mut amount = amount;
    let mut short = false;
    let count = left.len();
    for (i, (split, from, available)) in left.into_iter().enumerate() {
        let share = amount.div_ceil((count - i) as u64);
        short |= available < share;
        let step = available.min(share);
        if step > 0 {
            amount -= step;
            next.taken += step;
            next.offsets.push(SplitOffset { split, offset: from + step });
        }
    }
    next.offsets.sort_by_key(|o| o.split);
    next.at_clock = short && polled.more == More::WithTime;
    next
}

#[cfg(test)]
mod tests {
    use millrace_common::SqlState;

    use super::*;

    #[test]
    fn a_reason_has_one_full_stop_between_its_sentences() {
        let error = SqlError::new(SqlState::IO_ERROR, "a file has changed");
        assert_eq!(one_line(&error), "a file has changed");
        let error = error.with_hint("Leave it.");
        assert_eq!(one_line(&error), "a file has changed. Leave it.");
        let error = error.with_detail("It was short.");
        assert_eq!(one_line(&error), "a file has changed. It was short. Leave it.");
    }

    fn polled(available: u64, more: More) -> Polled {
        Polled { available: vec![(0, available), (1, available)], more, ..Polled::default() }
    }

    fn known(at: u64) -> Known {
        Known { offsets: vec![(0, at), (1, at)], ..Known::default() }
    }

    fn offsets(of: u64) -> Vec<SplitOffset> {
        [0, 1].map(|split| SplitOffset { split, offset: of }).to_vec()
    }

    #[test]
    fn splits_share_an_epoch_and_what_one_lacks_goes_to_the_others() {
        let next =
            |available, from| next_offsets(&polled(available, More::WithTime), &known(from), 200);
        assert_eq!(next(50, 0), Next { offsets: offsets(50), at_clock: true, taken: 100 });
        assert_eq!(next(50, 50), Next { at_clock: true, ..Next::default() });
        assert_eq!(next(500, 0), Next { offsets: offsets(100), at_clock: false, taken: 200 });
        let uneven = Polled { available: vec![(0, 10), (1, 1_000)], ..Polled::default() };
        let offsets = next_offsets(&uneven, &known(0), 200).offsets;
        let of = |split, offset| SplitOffset { split, offset };
        assert_eq!(offsets, [of(0, 10), of(1, 190)]);
        // A split that does not begin at 0 goes forward from where it begins.
        let split = millrace_rpc::log::SourceSplit { split: 3, name: String::new(), start: 70 };
        let parts = extended(&Default::default(), &[split]);
        let known = Known { parts, ..Known::default() };
        let one = Polled { available: vec![(3, 90)], ..Polled::default() };
        assert_eq!(next_offsets(&one, &known, 5).offsets, [of(3, 75)]);
    }

    #[test]
    fn an_epoch_is_full_where_waiting_would_not_add_to_it() {
        let after = Some(More::After(Duration::from_secs(1)));
        assert!(is_full(100, 100, after));
        assert!(!is_full(99, 100, after));
        assert!(!is_full(99, 100, Some(More::WithTime)));
        assert!(is_full(99, 100, Some(More::Never)), "the end");
        assert!(!is_full(0, 100, Some(More::Never)), "only files and marks");
    }

    #[test]
    fn an_epoch_grows_with_the_readers_speed_but_not_at_once() {
        assert_eq!(next_amount(1_000_000, 1_000_000.0), 500_000);
        assert_eq!(next_amount(16_384, 1e9), 16_384 * MAX_GROWTH);
        assert_eq!(next_amount(MAX_EVENTS, 1e12), MAX_EVENTS);
        assert_eq!(next_amount(2_048, 0.5), MIN_EVENTS);
    }

    #[test]
    fn at_most_two_epochs_lie_ahead_of_the_fastest_reader() {
        let id = RelationId(1);
        let mut state = MetaState::default();
        let history = (1..=3).map(|e| (Epoch(e * 10), offsets(e * 100))).collect();
        let timeline = crate::timeline::Timeline::since(Epoch(1));
        let parts = Default::default();
        state
            .sources
            .insert(id, crate::state::SourceRecord { history, timeline, parts, marks: Vec::new() });
        let next = |offset| state.sources[&id].next_end(0, offset);
        assert_eq!(
            [0, 99, 100, 299, 300].map(next),
            [Some(100), Some(100), Some(200), Some(300), None]
        );
        let sealed = |from, to| Some(Sealed { from: Epoch(from), to: Epoch(to), took: EPOCH_WORK });
        assert_eq!(demand(&state, id, &[]), Demand::Nobody);
        assert_eq!(demand(&state, id, &[(Epoch(10), None)]), Demand::Enough);
        assert_eq!(demand(&state, id, &[(Epoch(20), None)]), Demand::Next { speed: None });
        // The slow reader does not matter, and a sealed epoch counts before it is committed.
        let readers = [(Epoch(0), None), (Epoch(10), sealed(10, 20))];
        assert_eq!(demand(&state, id, &readers), Demand::Next { speed: Some(400.0) });
    }
}
