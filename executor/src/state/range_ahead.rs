//! Reads ahead of a watermark: of the range of a state table that an operator reads when the watermark has passed it
//! (docs/design.md §8).
//!
//! What is read are the blocks of the range, which then are in the store's cache, and the read at the *close*, the barrier
//! that brings the watermark, finds them there. Its rows are not kept, only told, for what they announce in their turn.
//! So what is read ahead decides nothing, whatever range was foreseen.
//!
//! Nothing is read ahead before a close has had to wait for the store. Afterwards it goes on as long as there are reads,
//! before closes or at them; where closes wait although their ranges were read ahead, it pauses.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::Epoch;
use millrace_storage::cache::Priority;
use millrace_storage::{Found, Lookup, Reading};
use tokio::time::{Instant, error::Elapsed, timeout};

use super::fetch;
use super::prefetch::PATIENCE;
use super::prefetch_budget::PrefetchBudget;
use crate::error::ExecError;
use crate::lookahead::choice::is_in_vain;
use crate::lookahead::slack::{DECAY, EpochNotes};
use crate::operators::Env;
use crate::options::LookaheadMode;

/// Closes without reads after which nothing is read ahead any more.
const KEPT_CLOSES: u32 = 64;
/// Closes for which nothing is read ahead when it was in vain; doubled each time, up to a limit.
const PENALTY_CLOSES: u32 = 64;
const MAX_PENALTY: u32 = 1 << 12;
/// Ranges read ahead in vain that are not yet worth a decision.
const FEW_UNUSED: f64 = 4.0;
/// Epochs that are looked ahead at most.
const MOST_EPOCHS: u32 = 64;
/// Rows of a read that are told, about.
pub const MOST_ROWS: usize = 8_192;
/// Bytes of one read, and no more than half of what caches may hold.
const MOST_BYTES: usize = 16 << 20;

/// See the module. Of one table of an operator in one task. Instants are microseconds.
pub struct RangeAhead {
    is_on: bool,
    decision: Decision,
    /// How many epochs are looked ahead: more, when reads came too late.
    epochs: u32,
    budget: PrefetchBudget,
    /// Bytes that were not in memory: those read ahead, and those the budget knows of; those read at closes.
    ahead: Arc<AtomicU64>,
    charged: u64,
    demand: Arc<AtomicU64>,
    /// Rows below were asked for ahead, or are closed.
    asked: i64,
    /// All rows below were in memory when they were last asked for, or are closed.
    complete: i64,
    /// Rows between these were read from the store, and are not closed.
    fetched: Option<(i64, i64)>,
    reading: Option<RangeRead>,
    /// What is closed now was not answered at once.
    is_pending: bool,
    /// Of the epoch.
    notes: EpochNotes,
    /// What the operator's counters were told.
    told: u64,
    env: Env,
}

/// A read ahead that is under way: of [from, to).
struct RangeRead {
    from: i64,
    to: i64,
    began: Instant,
    work: BoxFuture<'static, Result<Result<RangeAnswer, ExecError>, Elapsed>>,
}

struct RangeAnswer {
    /// All of the range was read.
    is_whole: bool,
    found: Vec<Found>,
}

impl RangeAhead {
    pub fn new(env: &Env) -> RangeAhead {
        let is_on = env.options.lookahead != LookaheadMode::Off;
        if is_on {
            env.metrics.lookahead.closes.follow();
        }
        RangeAhead {
            is_on,
            decision: Decision::new(env.options.lookahead_value),
            epochs: 1,
            budget: PrefetchBudget::new(env.options.prefetch_requests, env.options.prefetch_bytes),
            ahead: Arc::default(),
            charged: 0,
            demand: Arc::default(),
            asked: i64::MIN,
            complete: i64::MIN,
            fetched: None,
            reading: None,
            is_pending: false,
            notes: EpochNotes::default(),
            told: 0,
            env: env.clone(),
        }
    }

    /// [`RangeAhead::new`], of an operator whose epochs are told by [`RangeAhead::pass`] and by nothing else.
    pub fn measured(env: &Env) -> RangeAhead {
        env.metrics.lookahead.epochs.join();
        RangeAhead::new(env)
    }

    /// How many epochs ahead the watermark is to be foreseen; `None`: nothing is read ahead now.
    pub fn foresight(&self) -> Option<u32> {
        let is_wanted = self.decision.is_active() || self.env.options.random_hints;
        (self.is_on && is_wanted && self.reading.is_none()).then_some(self.epochs)
    }

    /// The rows of [from, to) are likely to be closed soon; none of the table is below. `ask` reads a part of the range;
    /// only what is to be told needs to be in its answer. Tells what memory has at once.
    pub fn expect(
        &mut self,
        from: i64,
        to: i64,
        ask: impl FnOnce(i64, i64) -> Lookup,
    ) -> Option<Found> {
        let to = self.misled(from, to);
        if self.foresight().is_none() || from.max(self.asked) >= to {
            return None;
        }
        self.complete = self.complete.max(from);
        let from = from.max(self.asked);
        let counted = &self.env.metrics.lookahead;
        counted.hinted.add(1);
        let requests = counted.ahead_requests.load(Ordering::Relaxed);
        if !self.budget.has_some(&self.env.clock, requests) {
            counted.dropped.add(1);
            return None;
        }
        self.asked = to;
        let lookup = ask(from, to).of_class(Priority::Prefetch);
        match lookup.counted(&counted.ahead_requests).counted_in_bytes(&self.ahead) {
            Lookup::Ready(found) => {
                counted.resident.add(1);
                self.cover(from, to);
                Some(found)
            }
            Lookup::Pending(reading) => {
                self.read(from, to, reading);
                None
            }
        }
    }

    /// For tests: where hints are random, so is how far is foreseen.
    fn misled(&self, from: i64, to: i64) -> i64 {
        if !self.env.options.random_hints || from >= to {
            return to;
        }
        let most = to.saturating_sub(from).saturating_mul(2).unsigned_abs().max(1);
        from.saturating_add((self.env.clock.random() % most) as i64)
    }

    fn read(&mut self, from: i64, to: i64, mut reading: Reading) {
        let bytes = Arc::clone(&self.ahead);
        let most = MOST_BYTES.min(self.env.options.cache_bytes / 2) as u64;
        let most = bytes.load(Ordering::Relaxed) + most;
        let work = async move {
            let (mut found, mut rows) = (Vec::new(), 0);
            loop {
                let part = reading.next().await?;
                if !part.found.is_empty() && rows < MOST_ROWS {
                    rows += part.found.values.num_rows();
                    found.push(part.found);
                }
                if part.is_last || bytes.load(Ordering::Relaxed) > most {
                    return Ok::<_, ExecError>(RangeAnswer { is_whole: part.is_last, found });
                }
            }
        };
        let work = timeout(PATIENCE, work).boxed();
        self.reading = Some(RangeRead { from, to, began: self.env.clock.now(), work });
    }

    fn cover(&mut self, from: i64, to: i64) {
        if self.complete >= from {
            self.complete = self.complete.max(to);
        }
    }

    /// A read ahead is under way.
    pub fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// Waits for it, if there is one: what it tells. Cancel-safe.
    pub async fn progress(&mut self) -> Vec<Found> {
        let Some(reading) = &mut self.reading else { return Vec::new() };
        let answer = (&mut reading.work).await;
        let Some(RangeRead { from, to, began, .. }) = self.reading.take() else {
            return Vec::new();
        };
        let bytes = self.charge();
        let counted = &self.env.metrics.lookahead;
        match bytes {
            0 => counted.resident.add(1),
            _ => {
                counted.prefetched.add(1);
                let first = self.fetched.map_or(from, |(first, _)| first);
                self.fetched = Some((first, to));
                self.notes.note_read(self.env.clock.elapsed(began));
            }
        }
        // What failed is asked for again when it is needed, and says why then.
        let answer = answer.ok().and_then(Result::ok);
        match &answer {
            Some(answer) if answer.is_whole => self.cover(from, to),
            _ => {
                counted.dropped.add(1);
                self.asked = self.asked.min(from);
            }
        }
        answer.map_or(Vec::new(), |answer| answer.found)
    }

    /// Gives up a read that is under way: it keeps an old version of the table alive. Its range may be asked for again.
    pub fn give_up(&mut self) {
        if let Some(RangeRead { from, .. }) = self.reading.take() {
            self.charge();
            self.asked = self.asked.min(from);
            self.env.metrics.lookahead.dropped.add(1);
        }
    }

    /// Bytes that were read ahead since the last time.
    fn charge(&mut self) -> usize {
        let all = self.ahead.load(Ordering::Relaxed);
        let new = all.saturating_sub(std::mem::replace(&mut self.charged, all)) as usize;
        self.budget.charge_bytes(new);
        new
    }

    /// Rows that are closed, waited for.
    pub async fn wait(&mut self, lookup: Lookup) -> Result<Found, ExecError> {
        let began = self.env.clock.now();
        self.notes.began[0].get_or_insert(began);
        if !lookup.is_pending() {
            return fetch::wait(lookup).await;
        }
        self.is_pending = true;
        let requests = &self.env.metrics.lookahead.demand_requests;
        let found = fetch::wait(lookup.counted(requests).counted_in_bytes(&self.demand)).await;
        self.notes.note_read(self.env.clock.elapsed(began));
        found
    }

    /// All rows below have been read, and are not asked for again.
    pub fn close(&mut self, to: i64) {
        let is_overtaken = self.reading.as_ref().is_some_and(|reading| reading.from < to);
        let has_read = self.demand.swap(0, Ordering::Relaxed) > 0;
        // What is being read ahead is not read again, but waited for.
        let has_waited = std::mem::take(&mut self.is_pending) && (has_read || is_overtaken);
        let was_fetched = self.fetched.is_some_and(|(from, _)| from < to);
        let outcome = match has_waited {
            true if is_overtaken => Outcome::Late,
            true if was_fetched && self.complete >= to => Outcome::Unused,
            true => Outcome::Missed,
            false if was_fetched => Outcome::InTime,
            false => Outcome::Resident,
        };
        if is_overtaken {
            // What it has not asked for yet is no longer needed, or asked for again.
            self.reading = None;
            self.charge();
        }
        // What was asked for ahead is no longer there, or was not all of it: it is asked for again.
        if is_overtaken || matches!(outcome, Outcome::Unused | Outcome::Missed) {
            (self.asked, self.complete) = (to, to);
        }
        self.asked = self.asked.max(to);
        self.complete = self.complete.max(to);
        self.fetched = self.fetched.filter(|(_, end)| *end > to).map(|(_, end)| (to, end));
        self.count(outcome);
    }

    fn count(&mut self, outcome: Outcome) {
        let counted = &self.env.metrics.lookahead;
        let (has_waited, is_used) = (outcome.has_waited(), outcome == Outcome::InTime);
        let is_unused = outcome == Outcome::Unused;
        counted.missed.add(u64::from(has_waited));
        counted.in_time.add(u64::from(is_used));
        counted.unused.add(u64::from(is_unused));
        counted.late.add(u64::from(outcome == Outcome::Late));
        self.notes.missed += u64::from(has_waited);
        self.notes.used += u64::from(is_used);
        self.notes.unused += u64::from(is_unused);
        self.decision.close(outcome);
        self.epochs = match outcome {
            _ if !self.decision.is_active() => 1,
            Outcome::Late => MOST_EPOCHS.min(self.epochs * 2),
            _ => self.epochs,
        };
        counted.closes.set_active(&mut self.told, self.decision.is_active());
    }

    /// An epoch has ended: tells the operator's counters of its reads.
    pub fn pass(&mut self, epoch: Epoch) {
        let notes = std::mem::take(&mut self.notes);
        self.env.metrics.lookahead.pass(epoch, &notes, false);
    }
}

/// What a close has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Nothing was read, before or at it.
    Resident,
    /// What was read ahead was there.
    InTime,
    /// It was still being read.
    Late,
    /// It was read ahead, and again.
    Unused,
    /// It was not read ahead, or not all of it.
    Missed,
}

impl Outcome {
    fn has_waited(self) -> bool {
        matches!(self, Outcome::Late | Outcome::Unused | Outcome::Missed)
    }
}

/// Whether ranges are read ahead.
struct Decision {
    /// Closes before which they still are, and before which they are not whatever is read.
    left: u32,
    off: u32,
    penalty: u32,
    /// Ranges in vain that are worth one that was in time.
    value: f64,
    /// Those of the last closes that were in time, and those in vain.
    hidden: f64,
    unused: f64,
}

impl Decision {
    fn new(value: f64) -> Decision {
        let (left, off, hidden, unused) = (0, 0, 0.0, 0.0);
        Decision { left, off, penalty: PENALTY_CLOSES, value, hidden, unused }
    }

    fn is_active(&self) -> bool {
        self.left > 0
    }

    fn close(&mut self, outcome: Outcome) {
        self.off = self.off.saturating_sub(1);
        self.left = match outcome {
            Outcome::Resident => self.left.saturating_sub(1),
            _ if self.off > 0 => 0,
            _ => KEPT_CLOSES,
        };
        let count = |what| f64::from(u8::from(outcome == what));
        self.hidden = self.hidden * DECAY + count(Outcome::InTime);
        self.unused = self.unused * DECAY + count(Outcome::Unused);
        if self.unused > FEW_UNUSED && is_in_vain(self.unused, self.hidden, self.value) {
            (self.left, self.off) = (0, self.penalty);
            self.penalty = (self.penalty * 2).min(MAX_PENALTY);
            (self.hidden, self.unused) = (0.0, 0.0);
        } else if self.hidden > FEW_UNUSED
            && !is_in_vain(4.0 * self.unused, self.hidden, self.value)
        {
            self.penalty = PENALTY_CLOSES;
        }
    }
}
