//! Keys of hints that have not been asked of the store yet: they are collected, so that they are read together
//! (docs/design.md §8).
//!
//! A request costs the same for one key as for many that lie near each other, and hints of single statements have one key
//! each. So keys are asked for when there are [`MAX_KEYS`] of them, or after a short while, which is longer as long as a
//! read ahead is under way; and at once when one of their epochs is sealed, since their rows are then near.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use millrace_common::EnvHandle;
use tokio::runtime::Handle;
use tokio::time::{Instant, Sleep, sleep_until};

use super::Slot;
use super::keyed::TABLES;
use crate::lookahead::{Due, SealNotice};

/// Keys that are collected at most.
pub const MAX_KEYS: usize = 256;
/// Longest time for which keys are collected because a read ahead is under way.
const MAX_WAIT: Duration = Duration::from_millis(100);

/// See the module. Of one operator.
#[derive(Default)]
pub struct Collected {
    /// By table.
    slots: [Vec<Slot>; TABLES],
    /// The epochs that bring the rows.
    dues: Vec<Due>,
    /// Told when one of these is sealed.
    notice: Arc<SealNotice>,
    /// When the first key came; `None`: there are none.
    since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

/// What is asked of the store together.
pub struct Gathered {
    /// By table; each slot once.
    pub slots: [Vec<Slot>; TABLES],
    pub dues: Vec<Due>,
}

impl Collected {
    /// Nothing is collected.
    pub fn is_empty(&self) -> bool {
        self.since.is_none()
    }

    /// There are as many keys as are read together.
    pub fn is_full(&self) -> bool {
        self.slots.iter().map(Vec::len).sum::<usize>() >= MAX_KEYS
    }

    /// More slots, by table, whose rows an epoch brings.
    pub fn add(&mut self, slots: [Vec<Slot>; TABLES], due: &Due, clock: &EnvHandle) {
        self.since.get_or_insert_with(|| clock.now());
        for (own, more) in self.slots.iter_mut().zip(slots) {
            own.extend(more);
        }
        if !self.dues.iter().any(|known| known.is_same(due)) {
            due.tell_when_near(&self.notice);
            self.dues.push(due.clone());
        }
    }

    /// Everything that was collected. A slot that was given up and announced again, or given to another key, is there
    /// once.
    pub fn take(&mut self) -> Gathered {
        let Collected { mut slots, dues, .. } = std::mem::take(self);
        for of_table in &mut slots {
            of_table.sort_unstable();
            of_table.dedup();
        }
        Gathered { slots, dues }
    }

    /// Whether what is collected is to be asked for now; if not, the task is woken when it is. `window`: how long keys are
    /// collected; `under_way`: the time that a read ahead takes, if one is under way.
    pub fn poll_due(
        &mut self,
        window: Duration,
        under_way: Option<Duration>,
        clock: &EnvHandle,
        cx: &mut Context<'_>,
    ) -> bool {
        let Some(since) = self.since else { return false };
        if self.is_full() || self.notice.poll(cx) {
            return true;
        }
        let until = since + under_way.map_or(window, |took| took.min(MAX_WAIT).max(window));
        // Without a runtime nothing would wake it.
        if clock.now() >= until || Handle::try_current().is_err() {
            return true;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(until)));
        if timer.deadline() != until {
            timer.as_mut().reset(until);
        }
        timer.as_mut().poll(cx) == Poll::Ready(())
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn add(collected: &mut Collected, slots: std::ops::Range<Slot>, due: &Due) {
        collected.add([slots.collect(), Vec::new()], due, &EnvHandle::default());
    }

    fn is_due(collected: &mut Collected, under_way: Option<Duration>) -> bool {
        let cx = &mut Context::from_waker(Waker::noop());
        collected.poll_due(MS, under_way, &EnvHandle::default(), cx)
    }

    #[tokio::test(start_paused = true)]
    async fn keys_wait_for_others_for_a_while_and_longer_while_a_read_is_under_way() {
        let mut collected = Collected::default();
        assert!(!is_due(&mut collected, None) && collected.is_empty());
        let due = Due::default();
        add(&mut collected, 0..1, &due);
        assert!(!is_due(&mut collected, None));
        tokio::time::advance(MS).await;
        assert!(is_due(&mut collected, None));
        assert!(!is_due(&mut collected, Some(5 * MS)), "a read is under way");
        add(&mut collected, 1..2, &due);
        tokio::time::advance(4 * MS).await;
        assert!(is_due(&mut collected, Some(5 * MS)), "since the first key");
        assert!(!is_due(&mut collected, Some(Duration::from_secs(9))));
        tokio::time::advance(MAX_WAIT).await;
        assert!(is_due(&mut collected, Some(Duration::from_secs(9))), "no read holds them longer");
        let Gathered { slots, dues } = collected.take();
        assert_eq!((slots, dues.len()), ([vec![0, 1], vec![]], 1));
        assert!(collected.is_empty() && !is_due(&mut collected, None));
    }

    #[tokio::test(start_paused = true)]
    async fn many_keys_and_those_of_a_sealed_epoch_wait_for_nothing() {
        let mut collected = Collected::default();
        let (open, other) = (Due::default(), Due::default());
        add(&mut collected, 0..1, &open);
        add(&mut collected, 1..2, &other);
        assert!(!is_due(&mut collected, Some(50 * MS)));
        other.seal(None);
        assert!(is_due(&mut collected, Some(50 * MS)));
        collected.take();
        add(&mut collected, 0..1, &open);
        assert!(!is_due(&mut collected, Some(50 * MS)), "the other epoch's keys are asked for");
        add(&mut collected, 2..3, &other);
        assert!(is_due(&mut collected, Some(50 * MS)), "it was sealed before");
        collected.take();
        add(&mut collected, 0..MAX_KEYS as Slot - 1, &open);
        assert!(!is_due(&mut collected, Some(50 * MS)));
        add(&mut collected, 0..1, &open);
        assert!(is_due(&mut collected, Some(50 * MS)));
        assert_eq!(collected.take().slots[0].len(), MAX_KEYS - 1, "each slot once");
    }
}
