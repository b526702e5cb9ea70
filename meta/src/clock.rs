//! Whether this process's clock may name the epochs of a cluster.
//!
//! Nothing that is promised depends on clocks, but epochs and retention follow the leader's. A process whose clock
//! differs from the object store's, or from those of most of its peers, by more than `max_clock_skew` does not lead: it
//! neither appends nor answers fresh reads until it is right again.
//!
//! The store's clock is read from an object that was just written: it was written between the beginning and the end of
//! the request, and its time may be cut to whole seconds. A peer's is in its heartbeats. Both are only known within
//! bounds, and a clock counts as wrong where that is certain. The store is asked at the start, when the clock was set, and
//! each minute while the log grows; an idle leader asks nothing.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::EnvHandle;
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{error, info, warn};

use crate::error::MetaError;
use crate::log::LogStore;
use crate::shared::Shared;

/// A store may cut the times of objects to whole seconds.
const STORE_STEP_MS: i64 = 1_000;
/// Heartbeats of a peer that are compared: one may have been on its way for long, but not each of them for longer than so
/// many milliseconds.
const HEARTBEATS: usize = 3;
const QUICKEST_MS: i64 = 1_000;
/// Between two looks whether the clock was set.
const LOOK: Duration = Duration::from_secs(1);
/// While the log grows, and while the clock is wrong.
const CHECK: Duration = Duration::from_secs(60);
const CHECK_WRONG: Duration = Duration::from_secs(5);

/// What this process's clock shows, less what another one shows, in milliseconds: between these two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockOffset {
    pub least_ms: i64,
    pub most_ms: i64,
}

impl ClockOffset {
    /// Of a store that has written an object at `theirs`, between these two moments of this process's clock.
    pub fn of_store(began_ms: u64, theirs_ms: i64, ended_ms: u64) -> ClockOffset {
        ClockOffset {
            least_ms: (began_ms as i64).saturating_sub(theirs_ms).saturating_sub(STORE_STEP_MS),
            most_ms: (ended_ms as i64).saturating_sub(theirs_ms),
        }
    }

    /// By how much the clock is certainly off, if by more than `max`: above 0 it is ahead.
    fn beyond(self, max: Duration) -> Option<i64> {
        let max = millis(max);
        match self {
            ClockOffset { least_ms, .. } if least_ms > max => Some(least_ms),
            ClockOffset { most_ms, .. } if most_ms < -max => Some(most_ms),
            _ => None,
        }
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Whose clock differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    Store,
    Peers,
    /// What this process's clock showed when it was last compared with the store's.
    Before,
}

/// A clock that is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockSkew {
    /// At least; above 0: this process's clock is ahead.
    pub offset_ms: i64,
    pub of: Reference,
    pub max: Duration,
}

impl fmt::Display for ClockSkew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = if self.offset_ms > 0 { "ahead of" } else { "behind" };
        let whose = match self.of {
            Reference::Store => "that of the object store",
            Reference::Peers => "those of most other processes",
            Reference::Before => "what it was when it was last compared with the object store's",
        };
        write!(
            f,
            "the clock of this process is at least {} ms {way} {whose} (max_clock_skew: {} ms)",
            self.offset_ms.unsigned_abs(),
            self.max.as_millis()
        )
    }
}

#[derive(Debug, Default)]
struct Known {
    skew: Option<ClockSkew>,
    /// The store was asked then, at this record, and wall clock and time since boot were so far apart.
    asked: Option<(Instant, u64, i64)>,
    /// By incarnation, upper bounds of the offset: a heartbeat has been on its way for an unknown time.
    peers: BTreeMap<u64, VecDeque<i64>>,
}

/// Watches the clock of a process that leads, or would.
#[derive(Debug, Default)]
pub struct ClockGuard {
    env: EnvHandle,
    /// `None`: the clock is taken as it is.
    max: Option<Duration>,
    known: Mutex<Known>,
}

impl ClockGuard {
    pub fn new(env: EnvHandle, max: Option<Duration>) -> ClockGuard {
        ClockGuard { env, max, known: Mutex::default() }
    }

    /// Whether it is watched at all.
    pub fn is_on(&self) -> bool {
        self.max.is_some()
    }

    /// Why this process does not lead at present; `None`: its clock is right, as far as it is known.
    pub fn skew(&self) -> Option<ClockSkew> {
        self.known.lock().skew
    }

    /// The same as an error, also where the clock was just set by so much that the store must be asked first.
    pub fn check(&self) -> Result<(), MetaError> {
        let skew = self.skew().or_else(|| self.just_set());
        skew.map_or(Ok(()), |skew| Err(MetaError::Skewed(skew)))
    }

    fn just_set(&self) -> Option<ClockSkew> {
        let max = self.max?;
        let (.., set_to) = self.known.lock().asked?;
        let offset_ms = self.set_to().saturating_sub(set_to);
        let is_far = offset_ms.unsigned_abs() > millis(max).unsigned_abs();
        is_far.then_some(ClockSkew { offset_ms, of: Reference::Before, max })
    }

    /// How far the wall clock is from the time since boot, which nobody sets.
    pub(crate) fn set_to(&self) -> i64 {
        (self.env.now_ms() as i64).saturating_sub(millis(self.env.since_boot()))
    }

    /// Whether the store is to be asked now; `record` is the log's last.
    pub fn is_due(&self, record: u64) -> bool {
        let Some(max) = self.max else { return false };
        let known = self.known.lock();
        let Some((at, asked_at, set_to)) = known.asked else { return true };
        let moved = self.set_to().abs_diff(set_to) > millis(max / 2).unsigned_abs();
        let age = self.env.elapsed(at);
        moved
            || (known.skew.is_some() && age >= CHECK_WRONG)
            || (record != asked_at && age >= CHECK)
    }

    /// The store has been asked; `record` is the log's last. `set_to`: [`ClockGuard::set_to`] from before that, so that
    /// who sets the clock meanwhile is noticed.
    pub fn note_store(&self, offset: ClockOffset, record: u64, set_to: i64) {
        let Some(max) = self.max else { return };
        let mut known = self.known.lock();
        known.asked = Some((self.env.now(), record, set_to));
        let by_store = offset.beyond(max).map(|ms| (ms, Reference::Store));
        known.judge(by_store, max);
    }

    /// A peer's clock has shown `theirs_ms` when it sent a heartbeat, which has just come. 0: it does not say.
    pub fn note_peer(&self, incarnation: u64, theirs_ms: u64) {
        let Some(max) = self.max.filter(|_| theirs_ms != 0) else { return };
        let Ok(theirs) = i64::try_from(theirs_ms) else { return };
        let most = (self.env.now_ms() as i64).saturating_sub(theirs);
        let mut known = self.known.lock();
        let recent = known.peers.entry(incarnation).or_default();
        if recent.len() == HEARTBEATS {
            recent.pop_front();
        }
        recent.push_back(most);
        let by_store = known.skew.filter(|skew| skew.of == Reference::Store);
        known.judge(by_store.map(|skew| (skew.offset_ms, Reference::Store)), max);
    }

    /// Forgets all other peers.
    pub fn keep(&self, is_live: impl Fn(u64) -> bool) {
        self.known.lock().peers.retain(|id, _| is_live(*id));
    }
}

/// Asks the store for its time whenever that is due.
pub async fn watch_clock(shared: Arc<Shared>, store: LogStore) {
    let mut has_failed = false;
    loop {
        tokio::time::sleep(if has_failed { CHECK_WRONG } else { LOOK }).await;
        let record = shared.state.read().number;
        if !shared.clock.is_due(record) {
            continue;
        }
        let set_to = shared.clock.set_to();
        match store.measure_clock(&shared.env).await {
            Ok(offset) => {
                shared.clock.note_store(offset, record, set_to);
                has_failed = false;
            }
            Err(error) => {
                if !has_failed {
                    warn!(%error, "the clock was not compared with the object store's");
                }
                has_failed = true;
            }
        }
    }
}

impl Known {
    fn judge(&mut self, by_store: Option<(i64, Reference)>, max: Duration) {
        let found = by_store.or_else(|| self.by_peers(max).map(|ms| (ms, Reference::Peers)));
        let skew = found.map(|(offset_ms, of)| ClockSkew { offset_ms, of, max });
        match (&self.skew, &skew) {
            (None, Some(wrong)) => error!("{wrong}: it does not lead until that is right"),
            (Some(_), None) => info!("the clock of this process is right again: it may lead"),
            _ => {}
        }
        self.skew = skew;
    }

    /// By how much more than half of the peers, and two at least, say that the clock is off.
    fn by_peers(&self, max: Duration) -> Option<i64> {
        let known: Vec<_> = self.peers.values().filter_map(offset_of).collect();
        let mut off: Vec<i64> = known.iter().filter_map(|offset| offset.beyond(max)).collect();
        off.sort_unstable_by_key(|ms| ms.unsigned_abs());
        (off.len() >= 2 && off.len() * 2 > known.len()).then(|| off[0])
    }
}

/// What several heartbeats say: the quickest of them was on its way for no longer than [`QUICKEST_MS`].
fn offset_of(recent: &VecDeque<i64>) -> Option<ClockOffset> {
    let most_ms = *recent.iter().min()?;
    let is_sure = recent.len() == HEARTBEATS;
    let least_ms = if is_sure { most_ms.saturating_sub(QUICKEST_MS) } else { i64::MIN };
    Some(ClockOffset { least_ms, most_ms })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use millrace_common::{Env, SystemEnv};

    use super::*;
    use crate::tests::clock::SetForward;

    const MAX: Duration = Duration::from_secs(2);

    fn guard() -> (Arc<SetForward>, ClockGuard) {
        let clock = Arc::<SetForward>::default();
        let env = EnvHandle::from(Arc::clone(&clock) as Arc<dyn Env>);
        (clock, ClockGuard::new(env, Some(MAX)))
    }

    fn store(least_ms: i64, most_ms: i64) -> ClockOffset {
        ClockOffset { least_ms, most_ms }
    }

    #[test]
    fn a_clock_is_wrong_only_where_that_is_certain() {
        // The request took 4 s: anything between may be true.
        let slow = ClockOffset::of_store(10_000, 10_500, 14_000);
        assert_eq!((slow, slow.beyond(MAX)), (store(-1_500, 3_500), None));
        let ahead = ClockOffset::of_store(14_000, 10_500, 14_010);
        assert_eq!(ahead.beyond(MAX), Some(2_500));
        // A store that cuts its times to whole seconds.
        assert_eq!(ClockOffset::of_store(13_000, 10_000, 13_010).beyond(MAX), None);
        assert_eq!(ClockOffset::of_store(10_000, 13_000, 10_010).beyond(MAX), Some(-2_990));
    }

    #[test]
    fn the_lead_comes_back_with_the_right_time() {
        let (_, guard) = guard();
        guard.note_store(store(5_000, 6_000), 1, guard.set_to());
        let error = guard.check().unwrap_err().to_string();
        assert!(error.contains("5000 ms ahead of that of the object store"), "{error}");
        guard.note_store(store(-1_000, 0), 1, guard.set_to());
        assert!(guard.check().is_ok());
    }

    #[test]
    fn the_store_is_asked_when_the_clock_was_set() {
        let (clock, guard) = guard();
        assert!(guard.is_due(1), "it was never asked");
        guard.note_store(store(0, 0), 1, guard.set_to());
        assert!(!guard.is_due(1) && !guard.is_due(2), "not each moment");
        for ms in [1_500, -1_500] {
            clock.0.store(ms, Ordering::Relaxed);
            assert!(guard.is_due(1), "{ms}");
        }
        let off = ClockGuard::new(EnvHandle::default(), None);
        assert!(!off.is_due(1));
    }

    /// Nothing is logged with the time of a clock that was just set far, before the store has said whether it is right.
    #[test]
    fn a_clock_that_was_set_far_counts_as_wrong_until_the_store_is_asked() {
        let (clock, guard) = guard();
        clock.0.store(9_000, Ordering::Relaxed);
        assert!(guard.check().is_ok(), "nothing is known yet");
        guard.note_store(store(0, 0), 1, guard.set_to());
        assert!(guard.check().is_ok());
        for ms in [12_000, 6_000] {
            clock.0.store(ms, Ordering::Relaxed);
            assert!(guard.check().is_err(), "{ms}");
        }
        // Set while the store was asked: once more.
        let before = guard.set_to();
        clock.0.store(20_000, Ordering::Relaxed);
        guard.note_store(store(0, 0), 1, before);
        assert!(guard.check().is_err() && guard.is_due(1));
        guard.note_store(store(0, 0), 1, guard.set_to());
        assert!(guard.check().is_ok());
        guard.note_peer(7, u64::MAX);
        guard.note_peer(7, 1 << 63);
    }

    #[test]
    fn more_than_half_of_the_peers_decide() {
        let (clock, guard) = guard();
        let beat = |peer: u64, theirs: i64| {
            guard.note_peer(peer, SystemEnv.now_ms().saturating_add_signed(theirs));
        };
        beat(1, 9_000);
        assert_eq!(guard.skew(), None, "one may be wrong itself");
        beat(2, 9_000);
        let skew = guard.skew().unwrap();
        assert!(skew.of == Reference::Peers && skew.offset_ms < -8_000, "{skew}");
        beat(3, 0);
        beat(4, 0);
        assert_eq!(guard.skew(), None, "half is not more than half");
        guard.keep(|peer| peer != 4);
        beat(3, 0);
        assert!(guard.skew().is_some());
        // A heartbeat that comes late makes the own clock look ahead; three of them do not.
        guard.keep(|_| false);
        clock.0.store(9_000, Ordering::Relaxed);
        for _ in 0..HEARTBEATS {
            beat(1, 0);
            assert_eq!(guard.skew(), None, "each of them may have been on its way for long");
            beat(2, 0);
        }
        assert!(guard.skew().is_some_and(|skew| skew.offset_ms > 7_000));
    }
}
