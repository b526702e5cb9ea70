//! Hint edges: the way of hints to a task, beside its rows (docs/design.md §8).
//!
//! An edge has credits of its own, in bytes. A hint takes them when it is sent and gives them back when the task takes it;
//! one for which there are none is lost. So no data, barrier or back-pressure holds a hint up, and a hint holds up none
//! of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::mpsc;

use super::chain::Carried;
use super::sent_keys::SentKeys;
use super::{Due, Hint, HintTimes};
use crate::error::ExecError;
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};
use crate::state::arena::column_bytes;

/// Credits of an edge, in bytes.
pub const CREDITS: usize = 256 << 10;

/// A hint on its way to a task: see [`Hint`].
pub struct SentHint {
    pub node: usize,
    pub port: usize,
    pub keys: SentKeys,
    pub times: HintTimes,
    pub due: Due,
    pub carried: Option<Arc<Carried>>,
}

impl SentHint {
    /// How many keys it has.
    pub fn count(&self) -> usize {
        self.keys.count()
    }

    /// Bytes that were made for it: copies of values, which rows are meant, the times, and what is carried beside the
    /// key's own columns. Without the fixed part of a message.
    pub fn bytes(&self) -> usize {
        let carried = self.carried.iter().flat_map(|carried| &carried.columns);
        let more = carried.filter(|column| !self.keys.has_copied(column)).map(column_bytes);
        self.keys.own_bytes() + self.times.bytes() + more.sum::<usize>()
    }

    /// What it takes of an edge's credits: what it keeps in memory, with its share of columns that it refers to.
    pub fn credit(&self) -> usize {
        size_of::<SentHint>() + size_of::<Credit>() + self.bytes() + self.keys.share
    }

    /// As an operator takes it.
    pub fn open(self) -> Result<Hint, ExecError> {
        let SentHint { node, port, keys, times, due, carried } = self;
        Ok(Hint { node, port, columns: keys.into_columns()?, times, due, carried })
    }
}

/// Bytes of hints that wait for a task.
#[derive(Debug)]
struct Credits {
    most: usize,
    used: AtomicUsize,
    governor: Arc<MemoryGovernor>,
}

/// What one hint has taken; given back when it is dropped.
struct Credit {
    credits: Arc<Credits>,
    bytes: usize,
    /// What is carried has an account of its own.
    _account: Reservation,
}

impl Drop for Credit {
    fn drop(&mut self) {
        self.credits.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Credits {
    /// `None`: there are not so many left.
    fn take(self: &Arc<Self>, bytes: usize, accounted: usize) -> Option<Credit> {
        let more = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        let mut account = self.governor.account(MemoryClass::Channel);
        account.set(accounted);
        Some(Credit { credits: Arc::clone(self), bytes, _account: account })
    }
}

/// The sending end: one for each that sends.
#[derive(Clone)]
pub struct HintSender {
    hints: mpsc::UnboundedSender<(SentHint, Credit)>,
    credits: Arc<Credits>,
}

/// The task's end.
pub struct HintReceiver {
    hints: mpsc::UnboundedReceiver<(SentHint, Credit)>,
}

/// An edge with so many bytes of credit.
pub fn hint_edge(credits: usize, governor: &Arc<MemoryGovernor>) -> (HintSender, HintReceiver) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let (used, governor) = (AtomicUsize::new(0), Arc::clone(governor));
    let credits = Arc::new(Credits { most: credits, used, governor });
    (HintSender { hints: sender, credits }, HintReceiver { hints: receiver })
}

impl HintSender {
    /// Sends a hint, if there are credits for it and the task is there. Never waits.
    pub fn try_send(&self, hint: SentHint) -> bool {
        let bytes = hint.credit();
        let carried = hint.carried.as_ref().map_or(0, |carried| carried.bytes());
        let credit = self.credits.take(bytes, bytes.saturating_sub(carried));
        credit.is_some_and(|credit| self.hints.send((hint, credit)).is_ok())
    }

    /// All credits that the edge has.
    pub fn credits(&self) -> usize {
        self.credits.most
    }

    /// There is room for a hint of few bytes, and somebody who takes it.
    pub fn has_some(&self) -> bool {
        let least = size_of::<SentHint>() + size_of::<Credit>();
        let used = self.credits.used.load(Ordering::Relaxed);
        used + least <= self.credits.most && !self.hints.is_closed()
    }
}

impl HintReceiver {
    /// The next hint, if one is there. Its credits are given back.
    pub fn try_recv(&mut self) -> Option<SentHint> {
        self.hints.try_recv().ok().map(|(hint, _)| hint)
    }

    /// The next hint; `None`: nobody sends any more. Cancel-safe.
    pub async fn recv(&mut self) -> Option<SentHint> {
        self.hints.recv().await.map(|(hint, _)| hint)
    }
}
