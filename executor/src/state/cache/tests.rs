//! Which entry goes first, and that what is kept for it stays bounded.

use std::sync::Arc;

use arrow::array::{Int64Array, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::{DataType, Field, Schema, TimeUnit};
use millrace_common::DeltaChunk;
use millrace_common::collections::HashMap;

use super::*;
use crate::state::Stamps;
use crate::state::keys::KeyReader;

const POLICIES: [Eviction; 3] = [Eviction::Timestamp, Eviction::Lru, Eviction::Clock];
const HOUR_US: i64 = 3_600_000_000;

/// A cache of numbers whose rows bring their event time at port 0 and none at port 1.
struct Numbers {
    reader: KeyReader,
    stamps: Stamps,
    table: KeyTable,
    names: HashMap<Slot, i64>,
    /// Of entries that are due.
    epochs: HashMap<Slot, u64>,
}

impl Numbers {
    fn new(policy: Eviction) -> Numbers {
        let schema = Numbers::chunk(&[]).batch.schema();
        Numbers {
            reader: KeyReader::new(&schema, &[0], &[]).unwrap(),
            stamps: Stamps::new(&[Some(1), None]),
            table: KeyTable::new(policy, false),
            names: HashMap::default(),
            epochs: HashMap::default(),
        }
    }

    /// Rows of (key, time).
    fn chunk(rows: &[(i64, i64)]) -> DeltaChunk {
        let schema = Schema::new(vec![
            Field::new("key", DataType::Int64, false),
            Field::new("at", DataType::Timestamp(TimeUnit::Microsecond, None), false),
        ]);
        let keys = Int64Array::from_iter_values(rows.iter().map(|r| r.0));
        let times = TimestampMicrosecondArray::from_iter_values(rows.iter().map(|r| r.1));
        let columns: Vec<arrow::array::ArrayRef> = vec![Arc::new(keys), Arc::new(times)];
        DeltaChunk::inserts(RecordBatch::try_new(Arc::new(schema), columns).unwrap())
    }

    fn come(&mut self, port: usize, rows: &[(i64, i64)]) {
        let chunk = Numbers::chunk(rows);
        let keys = self.reader.read(&chunk.batch).unwrap();
        let stamps = self.stamps.of(port, &chunk);
        let mut slots = Vec::new();
        self.table.probe(&keys, None, &stamps, &mut slots);
        for (&slot, row) in slots.iter().zip(rows) {
            self.table.set_resident(slot);
            self.names.insert(slot, row.0);
        }
    }

    /// Evicts one entry.
    fn victim(&mut self) -> Option<i64> {
        let (names, epochs) = (&self.names, &self.epochs);
        let mut gone = None;
        let epoch = |_: &Option<i64>, slot: Slot| epochs.get(&slot).copied().unwrap_or(0);
        let release = |gone: &mut Option<i64>, slot: Slot| {
            *gone = Some(names[&slot]);
            true
        };
        self.table.evict(self.table.bytes().saturating_sub(1), &mut gone, epoch, release);
        gone
    }

    fn slot(&self, key: i64) -> Slot {
        *self.names.iter().find(|(_, name)| **name == key).unwrap().0
    }

    fn expect(&mut self, key: i64, epoch: u64) {
        let slot = self.slot(key);
        self.table.set_due(slot, true);
        self.epochs.insert(slot, epoch);
    }

    fn victims(&mut self) -> Vec<i64> {
        std::iter::from_fn(|| self.victim()).collect()
    }
}

#[test]
fn each_policy_evicts_another_entry() {
    let victims = POLICIES.map(|policy| {
        let mut cache = Numbers::new(policy);
        cache.come(0, &[(1, 3 * HOUR_US), (2, HOUR_US), (3, 2 * HOUR_US)]);
        cache.come(0, &[(3, 2 * HOUR_US), (2, HOUR_US), (1, 3 * HOUR_US)]);
        cache.victims()
    });
    // The earliest; the one not used for longest; the next around the ring, all having been used.
    assert_eq!(victims, [vec![2, 3, 1], vec![3, 2, 1], vec![1, 2, 3]]);
}

#[test]
fn clock_spares_what_was_used_since_the_hand_passed() {
    let mut cache = Numbers::new(Eviction::Clock);
    cache.come(0, &[(1, 0), (2, 0), (3, 0), (4, 0)]);
    // All are new: the hand goes once around.
    assert_eq!(cache.victim(), Some(1));
    cache.come(0, &[(2, 0), (4, 0)]);
    assert_eq!(cache.victim(), Some(3));
    // 2 has had its second chance, 4 and 5 still have theirs.
    cache.come(0, &[(5, 0)]);
    assert_eq!(cache.victims(), [2, 4, 5]);
}

#[test]
fn a_stamp_never_goes_back() {
    let mut cache = Numbers::new(Eviction::Timestamp);
    cache.come(0, &[(1, 10 * HOUR_US), (2, 20 * HOUR_US)]);
    // A late row of 2, and a row of another input, which happens now: at hour 20.
    cache.come(0, &[(2, HOUR_US), (3, 15 * HOUR_US)]);
    cache.come(1, &[(1, 0)]);
    assert_eq!(cache.victims(), [3, 2, 1]);
}

#[test]
fn times_far_apart_keep_their_order() {
    let mut cache = Numbers::new(Eviction::Timestamp);
    let day = 24 * HOUR_US;
    cache.come(
        0,
        &[(1, 400 * day), (2, 2), (3, 400 * day + 1), (4, -3 * day), (5, 1), (6, 9_000 * day)],
    );
    assert_eq!(cache.victim(), Some(4));
    // Before everything else, after an eviction.
    cache.come(0, &[(7, -9 * day)]);
    assert_eq!(cache.victims(), [7, 5, 2, 1, 3, 6]);
}

#[test]
fn a_slot_used_again_has_the_age_of_its_new_key() {
    for (again, expected) in [(HOUR_US, [3, 2]), (9 * HOUR_US, [2, 3])] {
        let mut cache = Numbers::new(Eviction::Timestamp);
        cache.come(0, &[(1, 5 * HOUR_US), (2, 7 * HOUR_US)]);
        let slot = *cache.names.iter().find(|(_, name)| **name == 1).unwrap().0;
        cache.table.remove(slot);
        cache.come(0, &[(3, again)]);
        assert_eq!(cache.names[&slot], 3);
        assert_eq!(cache.victims(), expected);
    }
}

/// First what was read in vain; then the others by the policy; last what is due, the most distant epoch first, whatever
/// the times are.
#[test]
fn what_was_read_in_vain_leaves_first_and_what_is_due_last() {
    for policy in POLICIES {
        let mut cache = Numbers::new(policy);
        cache.come(0, &(1..8).map(|key| (key, key * HOUR_US)).collect::<Vec<_>>());
        for (key, epoch) in [(1, 30), (4, 20), (2, 20), (3, 10)] {
            cache.expect(key, epoch);
        }
        cache.table.expire(cache.slot(7));
        cache.table.check_invariants().unwrap();
        assert_eq!(cache.victims(), [7, 5, 6, 1, 4, 2, 3], "{policy:?}");
        cache.table.check_invariants().unwrap();
    }
}

#[test]
fn an_entry_that_is_used_after_all_has_its_age_again() {
    for policy in [Eviction::Timestamp, Eviction::Lru] {
        let mut cache = Numbers::new(policy);
        cache.come(0, &[(4, 0), (1, HOUR_US), (2, 2 * HOUR_US), (3, 3 * HOUR_US)]);
        cache.table.expire(cache.slot(2));
        cache.table.expire(cache.slot(3));
        cache.come(0, &[(3, 3 * HOUR_US), (4, 4 * HOUR_US)]);
        assert_eq!(cache.victims(), [2, 1, 3, 4], "{policy:?}");
    }
}

#[test]
fn slots_used_again_leave_a_bounded_queue() {
    for policy in POLICIES {
        let mut cache = Numbers::new(policy);
        cache.come(0, &[(-1, HOUR_US)]);
        for key in 0..10_000 {
            // Ever earlier: each lies before what is left of the slot's last key.
            cache.come(0, &[(key, -key)]);
            let slot = *cache.names.iter().find(|(_, name)| **name == key).unwrap().0;
            cache.table.remove(slot);
            assert!(cache.table.queue.len() <= OUTDATED + 2 * cache.table.capacity());
        }
        assert_eq!(cache.victims(), [-1], "{policy:?}");
    }
}

#[test]
fn what_is_dirty_or_being_fetched_stays_in_its_place() {
    for policy in POLICIES {
        let mut cache = Numbers::new(policy);
        cache.come(0, &[(1, HOUR_US), (2, 2 * HOUR_US), (3, 3 * HOUR_US)]);
        let slot = *cache.names.iter().find(|(_, name)| **name == 1).unwrap().0;
        cache.table.mark_dirty(slot);
        assert_eq!(cache.victims(), [2, 3], "{policy:?}");
        cache.table.take_dirty();
        assert_eq!(cache.victims(), [1], "{policy:?}");
    }
}
