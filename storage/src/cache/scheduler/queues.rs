//! Which of the reads that wait may start next.
//!
//! A class comes before those below it. Within a class every relation has a queue, and the queues take turns, so a
//! relation with thousands of reads delays another's single one by one turn. Lower classes may have a part of the
//! slots only, and no relation may have all of a class's, so that a demand read finds one soon; a small share of each
//! lower class comes first, so that none waits for ever. The bytes that reads bring are bounded together.

use std::collections::VecDeque;

use millrace_common::collections::HashMap;

use super::super::Priority;

/// Whose read it is: reads of one owner are served in order.
pub(in crate::cache) type Owner = u64;

/// A read that waits or is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cache) struct Slot {
    pub priority: Priority,
    pub owner: Owner,
    /// What it brings into memory.
    pub bytes: u64,
}

/// What does not adapt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Bytes of all reads in flight; a read alone in its class may exceed it.
    pub bytes: u64,
    /// Reads of a class below demand.
    pub scans: usize,
}

/// Tells reads that wait apart.
pub(in crate::cache) type Place = u64;

#[derive(Debug)]
struct Class<T> {
    /// Owners with reads that wait, in the order of their turns.
    turns: VecDeque<Owner>,
    /// In each queue the places ascend.
    waiting: HashMap<Owner, VecDeque<(Place, Slot, T)>>,
    /// Reads in flight by owner.
    held: HashMap<Owner, usize>,
    queued: usize,
    in_flight: usize,
}

impl<T> Default for Class<T> {
    fn default() -> Class<T> {
        Class {
            turns: VecDeque::new(),
            waiting: HashMap::default(),
            held: HashMap::default(),
            queued: 0,
            in_flight: 0,
        }
    }
}

#[derive(Debug)]
pub(super) struct Queues<T> {
    classes: [Class<T>; Priority::ALL.len()],
    bounds: Bounds,
    in_flight: usize,
    bytes: u64,
    /// Starts whose rate was limited.
    paced: u64,
    /// Of the read that is queued next.
    next_place: Place,
}

/// Of starts whose rate is limited every so many looks at the shares of lower classes first: slots in flight say
/// little there, because most are free.
const SHARE_OF_PACED: u64 = 8;

/// What a class has for a free slot.
enum Turn<T> {
    Read(Slot, T),
    /// None waits, or none may have the slot.
    None,
    /// The next one's bytes do not fit yet.
    Memory,
}

impl<T> Queues<T> {
    pub fn new(bounds: Bounds) -> Queues<T> {
        let bounds = Bounds { scans: bounds.scans.max(1), ..bounds };
        Queues {
            classes: Default::default(),
            bounds,
            in_flight: 0,
            bytes: 0,
            paced: 0,
            next_place: 0,
        }
    }

    pub fn push(&mut self, slot: Slot, read: T) -> Place {
        let place = self.next_place;
        self.next_place += 1;
        let class = &mut self.classes[slot.priority as usize];
        class.queued += 1;
        let queue = class.waiting.entry(slot.owner).or_default();
        if queue.is_empty() {
            class.turns.push_back(slot.owner);
        }
        queue.push_back((place, slot, read));
        place
    }

    /// Moves a read that waits to the end of another class; its place there. `None`: it waits no longer.
    pub fn raise(&mut self, from: Slot, place: Place, to: Priority) -> Option<Place> {
        let class = &mut self.classes[from.priority as usize];
        let queue = class.waiting.get_mut(&from.owner)?;
        let at = queue.binary_search_by_key(&place, |(place, ..)| *place).ok()?;
        let (_, slot, read) = queue.remove(at)?;
        class.queued -= 1;
        if queue.is_empty() {
            class.waiting.remove(&from.owner);
            class.turns.retain(|owner| *owner != from.owner);
        }
        Some(self.push(Slot { priority: to, ..slot }, read))
    }

    /// The read that a free slot goes to, which is in flight from now on. `is_paced`: the rate of starts is limited.
    pub fn take(&mut self, limit: usize, is_paced: bool) -> Option<(Slot, T)> {
        if self.in_flight >= limit {
            return None;
        }
        self.paced += u64::from(is_paced);
        let has_shares = !is_paced || self.paced.is_multiple_of(SHARE_OF_PACED);
        let has_shares = has_shares && self.others() < (limit / 2).max(1);
        // Where starts are few, another class comes first each time.
        let first = if is_paced { (self.paced / SHARE_OF_PACED) as usize } else { 0 };
        let classes = Priority::ALL.into_iter().rev().cycle().skip(first % Priority::ALL.len());
        let shares = classes.take(Priority::ALL.len()).filter(|_| has_shares).map(|p| (p, true));
        for (priority, is_share) in shares.chain(Priority::ALL.map(|p| (p, false))) {
            let most = match is_share {
                true => self.share(priority, limit),
                false => self.most(priority, limit),
            };
            match self.turn(priority, most, limit) {
                Turn::Read(slot, read) => {
                    self.start(slot);
                    return Some((slot, read));
                }
                // What is below must not take the memory that this one waits for.
                Turn::Memory if !is_share => return None,
                Turn::Memory | Turn::None => {}
            }
        }
        None
    }

    /// Counts a read as in flight.
    pub fn start(&mut self, slot: Slot) {
        let class = &mut self.classes[slot.priority as usize];
        class.in_flight += 1;
        *class.held.entry(slot.owner).or_default() += 1;
        self.in_flight += 1;
        self.bytes += slot.bytes;
    }

    /// A read has ended, however it did.
    pub fn finish(&mut self, slot: Slot) {
        let class = &mut self.classes[slot.priority as usize];
        class.in_flight -= 1;
        if let Some(held) = class.held.get_mut(&slot.owner) {
            *held -= 1;
            if *held == 0 {
                class.held.remove(&slot.owner);
            }
        }
        self.in_flight -= 1;
        self.bytes -= slot.bytes;
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether reads that somebody waits for wait because of the limit.
    pub fn is_saturated(&self, limit: usize) -> bool {
        let waits = |class| self.counts(class).0 > 0;
        let waiting = waits(Priority::Demand) || waits(Priority::Barrier);
        waiting && self.in_flight >= alone(limit)
    }

    /// Reads in flight that are not demand reads.
    fn others(&self) -> usize {
        self.in_flight - self.classes[Priority::Demand as usize].in_flight
    }

    pub fn queued(&self) -> usize {
        self.classes.iter().map(|c| c.queued).sum()
    }

    /// Reads of a class that wait, and that are in flight.
    pub fn counts(&self, priority: Priority) -> (usize, usize) {
        let class = &self.classes[priority as usize];
        (class.queued, class.in_flight)
    }

    /// Slots that a class has before those above it.
    fn share(&self, priority: Priority, limit: usize) -> usize {
        match priority {
            Priority::Demand => 0,
            Priority::Barrier => (limit / 8).max(1),
            Priority::Flush => (limit / 16).max(1),
            Priority::Scan => (limit / 32).clamp(1, self.bounds.scans),
            Priority::Prefetch | Priority::Compaction => 1,
        }
    }

    /// Slots that a class may have at all.
    fn most(&self, priority: Priority, limit: usize) -> usize {
        match priority {
            Priority::Demand | Priority::Barrier => limit,
            Priority::Flush => (limit / 4).max(1),
            Priority::Prefetch => (limit / 2).max(1),
            Priority::Scan => (limit * 3 / 8).clamp(1, self.bounds.scans),
            Priority::Compaction => (limit / 8).clamp(1, self.bounds.scans),
        }
    }

    fn turn(&mut self, priority: Priority, most: usize, limit: usize) -> Turn<T> {
        let free = self.bounds.bytes.saturating_sub(self.bytes);
        let class = &mut self.classes[priority as usize];
        if class.in_flight >= most {
            return Turn::None;
        }
        for _ in 0..class.turns.len() {
            let Some(&owner) = class.turns.front() else { return Turn::None };
            if class.held.get(&owner).is_some_and(|&held| held >= alone(limit)) {
                class.turns.rotate_left(1);
                continue;
            }
            let Some(queue) = class.waiting.get_mut(&owner) else { return Turn::None };
            let fits = |slot: &Slot| slot.bytes <= free || class.in_flight == 0;
            if !queue.front().is_some_and(|(_, slot, _)| fits(slot)) {
                return Turn::Memory;
            }
            let Some((_, slot, read)) = queue.pop_front() else { return Turn::None };
            class.queued -= 1;
            class.turns.pop_front();
            match queue.is_empty() {
                true => drop(class.waiting.remove(&owner)),
                false => class.turns.push_back(owner),
            }
            return Turn::Read(slot, read);
        }
        Turn::None
    }
}

/// Slots of a class that one owner may have.
fn alone(limit: usize) -> usize {
    limit - limit / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { bytes: 1 << 30, scans: 24 };

    fn slot(priority: Priority, owner: Owner) -> Slot {
        Slot { priority, owner, bytes: 1 }
    }

    fn filled(reads: &[(Priority, Owner, usize)]) -> Queues<usize> {
        let mut queues = Queues::new(BOUNDS);
        for &(priority, owner, count) in reads {
            for n in 0..count {
                queues.push(slot(priority, owner), n);
            }
        }
        queues
    }

    /// Takes as many as there are slots.
    fn fill(queues: &mut Queues<usize>, limit: usize) -> Vec<Slot> {
        std::iter::from_fn(|| queues.take(limit, false).map(|(slot, _)| slot)).collect()
    }

    #[test]
    fn a_single_read_waits_for_one_turn_of_a_long_queue() {
        let mut queues = filled(&[(Priority::Demand, 1, 2_000)]);
        let first = fill(&mut queues, 64);
        assert_eq!(first.len(), 56, "an eighth is kept for others");
        assert!(queues.is_saturated(64), "a higher limit would start more");
        assert!(!queues.is_saturated(128), "these need not wait");
        queues.push(slot(Priority::Demand, 2), 0);
        assert_eq!(queues.take(64, false).map(|(s, _)| s.owner), Some(2), "it is served at once");
        // Also where all slots are taken, by many owners.
        let mut queues = filled(&[(Priority::Demand, 1, 2_000), (Priority::Demand, 3, 2_000)]);
        let first = fill(&mut queues, 64);
        assert_eq!(first.len(), 64);
        queues.push(slot(Priority::Demand, 2), 0);
        let mut owners = Vec::new();
        for ended in &first[..3] {
            queues.finish(*ended);
            owners.extend(queues.take(64, false).map(|(s, _)| s.owner));
        }
        assert!(owners.contains(&2), "{owners:?}");
    }

    #[test]
    fn reads_of_one_owner_keep_their_order() {
        let mut queues = filled(&[(Priority::Demand, 1, 5), (Priority::Demand, 2, 5)]);
        let taken: Vec<(Owner, usize)> =
            std::iter::from_fn(|| queues.take(64, false).map(|(s, n)| (s.owner, n))).collect();
        let of = |owner| taken.iter().filter(|t| t.0 == owner).map(|t| t.1).collect::<Vec<_>>();
        assert_eq!((of(1), of(2)), ((0..5).collect(), (0..5).collect()));
        assert_eq!(taken[..4].iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2, 1, 2]);
    }

    #[test]
    fn scans_leave_room_and_compactions_more() {
        let mut queues = filled(&[(Priority::Scan, 1, 500), (Priority::Compaction, 2, 500)]);
        let taken = fill(&mut queues, 64);
        let of = |p| taken.iter().filter(|s| s.priority == p).count();
        assert_eq!((of(Priority::Scan), of(Priority::Compaction)), (24, 8));
        for n in 0..100 {
            queues.push(slot(Priority::Demand, 3), n);
        }
        assert_eq!(fill(&mut queues, 64).len(), 32, "the rest is for demand");
    }

    #[test]
    fn lower_classes_are_never_starved() {
        let mut queues = filled(&[(Priority::Demand, 1, 5_000), (Priority::Demand, 4, 5_000)]);
        let mut in_flight = VecDeque::from(fill(&mut queues, 64));
        queues.push(slot(Priority::Scan, 2), 0);
        queues.push(slot(Priority::Compaction, 3), 0);
        let mut served = Vec::new();
        for _ in 0..2 {
            queues.finish(in_flight.pop_front().unwrap());
            served.extend(queues.take(64, false).map(|(s, _)| s.priority));
        }
        served.sort_unstable_by_key(|p| *p as usize);
        assert_eq!(served, [Priority::Scan, Priority::Compaction]);
        assert_eq!(queues.counts(Priority::Scan), (0, 1));
    }

    #[test]
    fn demand_comes_first_where_the_rate_is_limited() {
        let reads = [(Priority::Demand, 1, 100), (Priority::Scan, 2, 100)];
        let mut queues = filled(&[reads[0], reads[1], (Priority::Compaction, 3, 100)]);
        // Each ends before the next starts.
        let mut demand = 0;
        for _ in 0..80 {
            let (slot, _) = queues.take(64, true).unwrap();
            demand += usize::from(slot.priority == Priority::Demand);
            queues.finish(slot);
        }
        assert_eq!(demand, 70);
    }

    #[test]
    fn bytes_in_flight_are_bounded_and_a_large_read_comes_alone() {
        let mut queues = Queues::new(Bounds { bytes: 100, scans: 24 });
        let push = |queues: &mut Queues<()>, bytes| {
            queues.push(Slot { priority: Priority::Demand, owner: bytes, bytes }, ());
        };
        push(&mut queues, 60);
        push(&mut queues, 500);
        push(&mut queues, 10);
        let (first, ()) = queues.take(64, false).unwrap();
        assert!(queues.take(64, false).is_none(), "smaller ones do not overtake it");
        queues.finish(first);
        let (large, ()) = queues.take(64, false).unwrap();
        assert_eq!(large.bytes, 500);
        queues.finish(large);
        assert_eq!(queues.take(64, false).unwrap().0.bytes, 10);
        assert_eq!((queues.in_flight(), queues.queued()), (1, 0));
    }

    #[test]
    fn a_read_that_is_raised_leaves_its_queue_and_waits_in_the_other() {
        let mut queues = Queues::new(BOUNDS);
        let prefetch = slot(Priority::Prefetch, 1);
        let places: Vec<Place> = (0..3).map(|n| queues.push(prefetch, n)).collect();
        let demand = queues.push(slot(Priority::Demand, 1), 9);
        let raised = queues.raise(prefetch, places[1], Priority::Demand).unwrap();
        assert!(raised > demand);
        assert_eq!(queues.raise(prefetch, places[1], Priority::Demand), None, "it is not there");
        assert_eq!(
            (queues.counts(Priority::Demand), queues.counts(Priority::Prefetch)),
            ((2, 0), (2, 0))
        );
        let barrier = queues.raise(slot(Priority::Demand, 1), raised, Priority::Barrier);
        let again = slot(Priority::Barrier, 1);
        assert!(queues.raise(again, barrier.unwrap(), Priority::Demand).is_some());
        let order: Vec<i32> =
            std::iter::from_fn(|| queues.take(64, false).map(|(_, n)| n)).collect();
        // The share of prefetches comes first.
        assert_eq!(order, [0, 9, 1, 2]);
        assert_eq!(queues.queued(), 0);
    }

    #[test]
    fn classes_come_in_their_order() {
        let all = Priority::ALL.map(|p| (p, 1, 100));
        let mut queues = filled(&all);
        let taken = fill(&mut queues, 256);
        let of = |p| taken.iter().filter(|s| s.priority == p).count();
        // All have their shares; demand has most of the rest.
        assert_eq!(Priority::ALL.map(of), [100, 100, 16 + 30, 1, 8, 1]);
        let first: Vec<Priority> =
            taken.iter().map(|s| s.priority).skip(1 + 8 + 1 + 16 + 32).collect();
        assert!(first.is_sorted(), "{first:?}");
    }
}
