//! Prefetches: reads of keys that rows are expected to need (docs/design.md §8).
//!
//! A read is made for a *round* of slots and is good for a slot only as long as the slot waits for it: a row that
//! needs it takes the slot out of the round, and so does whatever removes its entry. What is then answered is dropped.
//! A row that needs no read is noted beside it ([`Entries::TAKES_NOTES`](super::keyed::Entries::TAKES_NOTES)). Rounds are numbered, so that an answer never reaches a slot that was given to another key.
//!
//! Keys are collected before they are asked for ([`super::collected`]). Meanwhile their slots wait as for a read under way:
//! a slot that is taken out of the round is then not asked for. A row written meanwhile is in the store when it is asked,
//! and need not be noted.
//!
//! A row that needs what is being read ahead asks for it itself: the store's cache has one request for both, which then
//! has the class of the row's.

use std::collections::VecDeque;
use std::task::{Context, Poll};
use std::time::Duration;

use arrow::error::ArrowError;
use futures::stream::{AbortHandle, BoxStream, SelectAll, StreamExt, abortable, unfold};
use millrace_common::EnvHandle;
use millrace_common::collections::HashMap;
use millrace_storage::{Found, Part, Reading};
use tokio::time::Instant;

use super::Slot;
use super::arena::batch_bytes;
use super::collected::{Collected, Gathered};
use super::delayed::of_strings;
use super::keyed::{Missing, TABLES};
use crate::error::ExecError;
use crate::lookahead::Due;

/// After so long a read is given up: it keeps a version of the state from being let go.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of answers that are taken at once, roughly.
const ROUND_BYTES: usize = 1 << 20;

/// What is read from one table in a round.
pub struct Ahead {
    pub table: usize,
    pub slots: Vec<Slot>,
    round: u64,
    /// How far keys were closed when it was asked.
    pub closed: Option<i64>,
    /// When it was asked of the store; `None`: it was answered from memory.
    pub began: Option<Instant>,
}

impl Ahead {
    fn part(&self, positions: &[u32]) -> Ahead {
        let slots = positions.iter().map(|&i| self.slots[i as usize]).collect();
        Ahead { slots, ..*self }
    }

    /// What was found of the slots at these positions.
    pub fn pick(self, positions: &[u32], found: Found) -> Result<(Ahead, Found), ArrowError> {
        if positions.len() == self.slots.len() {
            return Ok((self, found));
        }
        Ok((self.part(positions), of_strings(&found, positions)?))
    }
}

/// What was found of some of the slots of a round, or why nothing was.
pub struct AheadAnswer {
    pub asked: Ahead,
    pub found: Result<Found, ExecError>,
}

struct Round {
    number: u64,
    began: Instant,
    reads: Vec<AbortHandle>,
}

/// See the module. Of one operator.
#[derive(Default)]
pub struct Prefetches {
    reads: SelectAll<BoxStream<'static, AheadAnswer>>,
    /// Slots that are being read ahead: from each table in which round; 0: not from this one.
    waiting: HashMap<Slot, [u64; TABLES]>,
    rounds: VecDeque<Round>,
    /// Of the last round.
    number: u64,
    /// What the next round asks for; once there is something, the last round is this one.
    collected: Collected,
    /// How long the read took that was answered last.
    took: Duration,
}

impl Prefetches {
    /// Nothing is collected and no read is under way, good for something or not.
    pub fn is_idle(&self) -> bool {
        self.reads.is_empty() && self.collected.is_empty()
    }

    /// Slots that wait for answers.
    pub fn slots(&self) -> impl Iterator<Item = Slot> {
        self.waiting.keys().copied()
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.waiting.len()
    }

    /// The tables from which a slot is being read.
    pub fn of(&self, slot: Slot) -> Missing {
        self.waiting.get(&slot).map_or(Missing::default(), |rounds| rounds.map(|r| r != 0))
    }

    /// Slots, by table, that are to be read for rows of an epoch.
    pub fn collect(&mut self, slots: [Vec<Slot>; TABLES], due: &Due, clock: &EnvHandle) {
        if self.collected.is_empty() {
            self.number += 1;
        }
        for (table, of_table) in slots.iter().enumerate() {
            for slot in of_table {
                self.waiting.entry(*slot).or_default()[table] = self.number;
            }
        }
        self.collected.add(slots, due, clock);
    }

    /// Whether as much is collected as is read together.
    pub fn is_full(&self) -> bool {
        self.collected.is_full()
    }

    /// Whether a slot is to be read from a table, and has not been asked for.
    pub fn is_collected(&self, slot: Slot, table: usize) -> bool {
        !self.collected.is_empty()
            && self.waiting.get(&slot).is_some_and(|rounds| rounds[table] == self.number)
    }

    /// Begins a round: the slots that it asks for, as far as they still wait.
    pub fn begin(&mut self, clock: &EnvHandle) -> Gathered {
        let mut gathered = self.collected.take();
        for (table, slots) in gathered.slots.iter_mut().enumerate() {
            let waits = |slot: &Slot| {
                self.waiting.get(slot).is_some_and(|rounds| rounds[table] == self.number)
            };
            slots.retain(waits);
        }
        self.rounds.push_back(Round { number: self.number, began: clock.now(), reads: Vec::new() });
        gathered
    }

    /// What is read from a table in the round.
    pub fn ask(&mut self, table: usize, slots: Vec<Slot>, closed: Option<i64>) -> Ahead {
        Ahead { table, slots, round: self.number, closed, began: None }
    }

    /// A read that is not answered from memory.
    pub fn submit(&mut self, mut asked: Ahead, reading: Reading) {
        asked.began = self.rounds.back().map(|round| round.began);
        let (parts, handle) = abortable(parts(asked, reading));
        if let Some(round) = self.rounds.back_mut() {
            round.reads.push(handle);
        }
        self.reads.push(parts.boxed());
    }

    /// Whether a slot still waits for this answer.
    pub fn awaits(&self, asked: &Ahead, slot: Slot) -> bool {
        self.waiting.get(&slot).is_some_and(|rounds| rounds[asked.table] == asked.round)
    }

    /// A slot does not wait for a table any more; whether it waits for none.
    pub fn settle(&mut self, slot: Slot, table: usize) -> bool {
        let Some(rounds) = self.waiting.get_mut(&slot) else { return true };
        rounds[table] = 0;
        let is_done = rounds.iter().all(|round| *round == 0);
        if is_done {
            self.waiting.remove(&slot);
        }
        is_done
    }

    /// Ends rounds that have taken too long: the slots that waited for them, each with the table.
    pub fn give_up(&mut self, clock: &EnvHandle) -> Vec<(Slot, usize)> {
        let mut last = 0;
        while self.rounds.front().is_some_and(|r| clock.elapsed(r.began) > PATIENCE) {
            let Some(round) = self.rounds.pop_front() else { break };
            round.reads.iter().for_each(AbortHandle::abort);
            last = round.number;
        }
        if last == 0 {
            return Vec::new();
        }
        let mut left = Vec::new();
        self.waiting.retain(|slot, rounds| {
            for (table, round) in rounds.iter_mut().enumerate() {
                if *round != 0 && *round <= last {
                    *round = 0;
                    left.push((*slot, table));
                }
            }
            rounds.iter().any(|round| *round != 0)
        });
        left
    }

    /// A read was answered.
    pub fn note_took(&mut self, took: Duration) {
        self.took = took;
    }

    /// Whether what is collected is to be asked for now; if not, the task is woken when it is.
    pub fn poll_collected(
        &mut self,
        window: Duration,
        clock: &EnvHandle,
        cx: &mut Context<'_>,
    ) -> bool {
        let under_way = (!self.reads.is_empty()).then_some(self.took);
        self.collected.poll_due(window, under_way, clock, cx)
    }

    /// The answers that have come.
    pub fn poll_answers(&mut self, cx: &mut Context<'_>) -> Vec<AheadAnswer> {
        let (mut answers, mut bytes) = (Vec::new(), 0);
        while bytes < ROUND_BYTES
            && let Poll::Ready(Some(answer)) = self.reads.poll_next_unpin(cx)
        {
            bytes += answer.found.as_ref().map_or(0, |found| batch_bytes(&found.values));
            answers.push(answer);
        }
        answers
    }
}

fn parts(asked: Ahead, reading: Reading) -> impl futures::Stream<Item = AheadAnswer> + Send {
    unfold(Some((asked, reading)), |left| async move {
        let (asked, mut reading) = left?;
        match reading.next().await {
            Ok(Part { asked: positions, found, is_last }) => {
                let answer = AheadAnswer { asked: asked.part(&positions), found: Ok(found) };
                Some((answer, (!is_last).then_some((asked, reading))))
            }
            Err(e) => Some((AheadAnswer { asked, found: Err(e.into()) }, None)),
        }
    })
}
