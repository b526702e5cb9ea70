//! Recent deltas of the relations made on this worker: a bounded ring a relation (docs/design.md §4).
//!
//! Only a cache, with one budget for all rings: beyond it the largest drops its oldest change. Of what no job will
//! read any more, because none subscribes or all have read it, next to nothing is kept, and nothing while memory is
//! tight. The ring of a relation holds every change after `covered_from`, and answers for a
//! span of epochs exactly or not at all; what it has dropped is read from the relation's state table.
//! Chunks carry their rows' vnodes, computed once by the writer, so that readers only compare.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{BooleanArray, RecordBatch};
use arrow::buffer::BooleanBuffer;
use millrace_common::collections::HashMap;
use millrace_common::{DeltaChunk, EnvHandle, Epoch, RelationId, Vnode};
use parking_lot::Mutex;

use crate::error::ExecError;
use crate::lookahead::uncommitted::Uncommitted;
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};

/// Rows of a relation's change with their vnodes.
#[derive(Clone, Debug)]
pub struct HubChunk {
    chunk: DeltaChunk,
    vnodes: Arc<[Vnode]>,
    /// Smallest and largest of `vnodes`.
    bounds: (Vnode, Vnode),
}

impl HubChunk {
    /// `None` for no rows.
    pub fn new(chunk: DeltaChunk, vnodes: Vec<Vnode>) -> Option<HubChunk> {
        debug_assert_eq!(chunk.num_rows(), vnodes.len());
        let bounds = (*vnodes.iter().min()?, *vnodes.iter().max()?);
        Some(HubChunk { chunk, vnodes: vnodes.into(), bounds })
    }

    /// All columns of all rows, with their weights.
    pub fn chunk(&self) -> &DeltaChunk {
        &self.chunk
    }

    /// All columns of all rows, whatever their weights are.
    pub fn rows(&self) -> &RecordBatch {
        &self.chunk.batch
    }

    pub fn vnodes(&self) -> &[Vnode] {
        &self.vnodes
    }

    pub fn num_rows(&self) -> usize {
        self.vnodes.len()
    }

    /// Of the rows at `rows` those in `range`, with only `columns`. `None`: there are none.
    pub fn select(
        &self,
        range: &Range<Vnode>,
        columns: &[usize],
        rows: Range<usize>,
    ) -> Result<Option<DeltaChunk>, ExecError> {
        if rows.is_empty() || self.bounds.1 < range.start || self.bounds.0 >= range.end {
            return Ok(None);
        }
        let chunk = self.chunk.slice(rows.start, rows.len());
        let projected = DeltaChunk { batch: chunk.batch.project(columns)?, weights: chunk.weights };
        if range.contains(&self.bounds.0) && range.contains(&self.bounds.1) {
            return Ok(Some(projected));
        }
        let vnodes = &self.vnodes[rows];
        let mask = BooleanBuffer::collect_bool(vnodes.len(), |i| range.contains(&vnodes[i]));
        let own = projected.filter(&BooleanArray::new(mask, None))?;
        Ok((!own.is_empty()).then_some(own))
    }

    pub fn memory_size(&self) -> usize {
        self.chunk.memory_size() + self.vnodes.len() * 2
    }
}

/// A relation's change at one epoch.
#[derive(Debug)]
pub struct EpochDelta {
    pub epoch: Epoch,
    pub chunks: Vec<HubChunk>,
}

#[derive(Debug)]
struct Ring {
    /// All changes after this epoch are in `deltas`.
    covered_from: Epoch,
    deltas: VecDeque<Arc<EpochDelta>>,
    bytes: usize,
}

impl Ring {
    /// Bytes that the oldest change took.
    fn drop_oldest(&mut self) {
        if let Some(oldest) = self.deltas.pop_front() {
            self.covered_from = oldest.epoch;
            self.bytes -= oldest.chunks.iter().map(HubChunk::memory_size).sum::<usize>();
        }
    }

    fn clear(&mut self, covered_from: Epoch) {
        self.deltas.clear();
        self.bytes = 0;
        self.covered_from = covered_from;
    }
}

#[derive(Debug)]
struct Rings {
    of: HashMap<RelationId, Ring>,
    /// Those that hold something, by size.
    by_size: BTreeSet<(usize, RelationId)>,
    /// Subscriptions of each relation that has any: through which epoch each has read, and its number.
    readers: HashMap<RelationId, BTreeSet<(Epoch, u64)>>,
    next_reader: u64,
    /// Of all rings.
    account: Reservation,
}

impl Rings {
    /// Makes a change to a ring and keeps the accounts.
    fn change(&mut self, relation: RelationId, change: impl FnOnce(&mut Ring)) {
        let Some(ring) = self.of.get_mut(&relation) else { return };
        let before = ring.bytes;
        change(ring);
        let after = ring.bytes;
        if before != after {
            self.by_size.remove(&(before, relation));
            if after > 0 {
                self.by_size.insert((after, relation));
            }
            self.account.set((self.account.bytes() + after).saturating_sub(before));
        }
    }

    /// Drops the oldest changes that no reader will ask for, while the ring holds more than so many bytes.
    fn trim(&mut self, relation: RelationId, most: usize) {
        let read =
            self.readers.get(&relation).and_then(BTreeSet::first).map_or(Epoch::MAX, |r| r.0);
        self.change(relation, |ring| {
            while ring.bytes > most
                && ring.deltas.front().is_some_and(|oldest| oldest.epoch <= read)
            {
                ring.drop_oldest();
            }
        });
    }

    fn remove(&mut self, relation: RelationId) {
        self.change(relation, |ring| ring.clear(ring.covered_from));
        self.of.remove(&relation);
    }
}

/// The rings of all relations of the worker.
#[derive(Debug)]
pub struct ChangelogCache {
    rings: Mutex<Rings>,
    budget: usize,
    governor: Arc<MemoryGovernor>,
    uncommitted: Arc<Uncommitted>,
}

/// Of what no job will read a ring holds so much of the budget: statements compare with the latest changes.
const UNREAD_PART: usize = 32;
/// A ring of fewer bytes stays even while memory is tight.
const WORTH_SHEDDING: usize = 64 << 10;
/// All rings together hold so many times what one may.
const ALL_RINGS: usize = 2;

/// Keeps a relation's changes in memory for a reader of them, until it is dropped.
#[derive(Debug)]
pub struct RingReader {
    changelogs: Arc<ChangelogCache>,
    relation: RelationId,
    number: u64,
    /// It has read all changes up to here.
    read: Epoch,
}

impl RingReader {
    /// It has read all changes through this epoch, and asks for none of them again.
    pub fn passed(&mut self, epoch: Epoch) {
        if epoch <= self.read {
            return;
        }
        let mut rings = self.changelogs.rings.lock();
        if let Some(readers) = rings.readers.get_mut(&self.relation) {
            readers.remove(&(self.read, self.number));
            readers.insert((epoch, self.number));
        }
        self.read = epoch;
        rings.trim(self.relation, self.changelogs.budget / UNREAD_PART);
    }
}

impl Drop for RingReader {
    fn drop(&mut self) {
        let mut rings = self.changelogs.rings.lock();
        if let Some(readers) = rings.readers.get_mut(&self.relation) {
            readers.remove(&(self.read, self.number));
            if readers.is_empty() {
                rings.readers.remove(&self.relation);
            }
        }
        rings.trim(self.relation, self.changelogs.budget / UNREAD_PART);
    }
}

impl ChangelogCache {
    /// `budget`: bytes one relation's ring may hold.
    pub fn new(budget: usize, governor: Arc<MemoryGovernor>, clock: EnvHandle) -> ChangelogCache {
        let rings = Rings {
            of: HashMap::default(),
            by_size: BTreeSet::new(),
            readers: HashMap::default(),
            next_reader: 0,
            account: governor.account(MemoryClass::Changelog),
        };
        let uncommitted = Arc::new(Uncommitted::new(clock));
        ChangelogCache { rings: Mutex::new(rings), budget, governor, uncommitted }
    }

    /// Changes that are not committed yet, for those that look ahead. No reader sees them.
    pub fn uncommitted(&self) -> &Arc<Uncommitted> {
        &self.uncommitted
    }

    /// An empty ring that will hold every change after `from`.
    pub fn open(&self, relation: RelationId, from: Epoch) {
        let ring = Ring { covered_from: from, deltas: VecDeque::new(), bytes: 0 };
        let mut rings = self.rings.lock();
        rings.remove(relation);
        rings.of.insert(relation, ring);
    }

    pub fn close(&self, relation: RelationId) {
        self.rings.lock().remove(relation);
    }

    /// A job reads the relation's changes from now on.
    pub fn subscribe(self: &Arc<Self>, relation: RelationId) -> RingReader {
        let mut rings = self.rings.lock();
        let number = rings.next_reader;
        rings.next_reader += 1;
        rings.readers.entry(relation).or_default().insert((Epoch::ZERO, number));
        drop(rings);
        RingReader { changelogs: Arc::clone(self), relation, number, read: Epoch::ZERO }
    }

    /// While memory is tight, gives back what all readers have read. Called several times a second.
    pub fn shed(&self) {
        if !self.governor.is_tight() {
            return;
        }
        let mut rings = self.rings.lock();
        let worth = |held: &&(usize, RelationId)| held.0 > WORTH_SHEDDING;
        let large: Vec<RelationId> =
            rings.by_size.iter().rev().take_while(worth).map(|held| held.1).collect();
        large.into_iter().for_each(|relation| rings.trim(relation, 0));
    }

    /// Bytes of one change that would be kept now.
    pub fn most_kept(&self, relation: RelationId) -> usize {
        self.most(&self.rings.lock(), relation)
    }

    fn most(&self, rings: &Rings, relation: RelationId) -> usize {
        match rings.readers.contains_key(&relation) {
            true => self.budget,
            false => self.budget / UNREAD_PART,
        }
    }

    /// The relation changed at `epoch`. `None`: the change is too large to be kept, or was not.
    pub fn put(&self, relation: RelationId, epoch: Epoch, chunks: Option<Vec<HubChunk>>) {
        // Only a watermark has moved: an epoch without an entry has no changes either.
        if chunks.as_ref().is_some_and(Vec::is_empty) {
            return;
        }
        let bytes = chunks.iter().flatten().map(HubChunk::memory_size).sum::<usize>();
        let mut rings = self.rings.lock();
        let most = self.most(&rings, relation);
        let is_tight = self.governor.is_tight();
        rings.change(relation, |ring| {
            let Some(chunks) = chunks.filter(|_| bytes <= most) else { return ring.clear(epoch) };
            while ring.bytes + bytes > most && !ring.deltas.is_empty() {
                ring.drop_oldest();
            }
            ring.bytes += bytes;
            ring.deltas.push_back(Arc::new(EpochDelta { epoch, chunks }));
            if is_tight && ring.deltas.len() > 1 {
                ring.drop_oldest();
            }
        });
        while rings.account.bytes() > self.budget.saturating_mul(ALL_RINGS) {
            let Some(&(_, largest)) = rings.by_size.last() else { break };
            rings.change(largest, Ring::drop_oldest);
        }
    }

    /// The changes in `(from, to]`, oldest first; `None`: not all of them are here.
    pub fn get(
        &self,
        relation: RelationId,
        from: Epoch,
        to: Epoch,
    ) -> Option<Vec<Arc<EpochDelta>>> {
        let rings = self.rings.lock();
        let ring = rings.of.get(&relation)?;
        if from < ring.covered_from {
            return None;
        }
        // Epochs ascend, and a ring may hold very many.
        let first = ring.deltas.partition_point(|d| d.epoch <= from);
        let end = ring.deltas.partition_point(|d| d.epoch <= to).max(first);
        Some(ring.deltas.range(first..end).cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array};

    use super::*;

    fn changelogs(budget: usize, governor: &Arc<MemoryGovernor>) -> Arc<ChangelogCache> {
        Arc::new(ChangelogCache::new(budget, Arc::clone(governor), EnvHandle::default()))
    }

    const R: RelationId = RelationId(7);

    fn chunk(rows: i64, vnodes: impl Fn(i64) -> Vnode) -> HubChunk {
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows));
        let batch = RecordBatch::try_from_iter([("a", column)]).unwrap();
        HubChunk::new(DeltaChunk::inserts(batch), (0..rows).map(vnodes).collect()).unwrap()
    }

    #[test]
    fn answers_a_span_exactly_or_not_at_all() {
        let changelogs = changelogs(10_000, &MemoryGovernor::new(1 << 30));
        let _reader = changelogs.subscribe(R);
        assert!(changelogs.get(R, Epoch(0), Epoch(9)).is_none());
        changelogs.open(R, Epoch(10));
        assert!(changelogs.get(R, Epoch(9), Epoch(20)).is_none());
        assert!(changelogs.get(R, Epoch(10), Epoch(20)).unwrap().is_empty());
        for epoch in [12, 14, 16] {
            changelogs.put(R, Epoch(epoch), Some(vec![chunk(4, |_| 0)]));
        }
        let epochs = |from, to| {
            let got = changelogs.get(R, Epoch(from), Epoch(to)).unwrap();
            got.iter().map(|d| d.epoch.0).collect::<Vec<_>>()
        };
        assert_eq!(epochs(10, 20), [12, 14, 16]);
        assert_eq!(epochs(12, 14), [14]);
        // A large change pushes older ones out; one too large empties the ring.
        changelogs.put(R, Epoch(18), Some(vec![chunk(990, |_| 0)]));
        assert!(changelogs.get(R, Epoch(10), Epoch(18)).is_none());
        assert_eq!(epochs(16, 18), [18]);
        changelogs.put(R, Epoch(20), Some(vec![chunk(90_000, |_| 0)]));
        assert!(changelogs.get(R, Epoch(18), Epoch(20)).is_none());
        assert!(epochs(20, 30).is_empty());
    }

    #[test]
    fn a_ring_is_kept_for_readers_and_the_largest_gives_way() {
        let changelogs = changelogs(10_000, &MemoryGovernor::new(1 << 30));
        let relations = [1, 2, 3].map(RelationId);
        relations.iter().for_each(|&r| changelogs.open(r, Epoch(1)));
        let put = |r: RelationId, epoch, rows| {
            changelogs.put(r, Epoch(epoch), Some(vec![chunk(rows, |_| 0)]));
        };
        let has = |r: RelationId, from, to| changelogs.get(r, Epoch(from), Epoch(to)).is_some();
        put(relations[0], 2, 100);
        assert!(!has(relations[0], 1, 2), "nobody subscribes");
        let mut readers = Vec::from(relations.map(|r| changelogs.subscribe(r)));
        for (relation, rows) in relations.into_iter().zip([400, 900, 900]) {
            put(relation, 3, rows / 2);
            put(relation, 4, rows / 2);
        }
        // Of some 4, 9 and 9 KB only 20 fit: one of the largest has dropped its oldest change.
        assert!(has(relations[0], 2, 4));
        let kept = relations[1..].iter().filter(|&&r| has(r, 2, 4)).count();
        assert_eq!(kept, 1);
        assert!(relations.iter().all(|&r| has(r, 3, 4)));
        readers.truncate(1);
        assert!(has(relations[0], 2, 4) && !has(relations[1], 3, 4) && !has(relations[2], 3, 4));
        drop(readers);
        let held = changelogs.governor.used_by(MemoryClass::Changelog);
        assert!(held <= 3 * 10_000 / UNREAD_PART, "{held} bytes are held for nobody");
    }

    /// What all have read is for nobody, whether or not there is more to come for them.
    #[test]
    fn what_all_readers_have_read_is_given_back() {
        let governor = MemoryGovernor::new(1 << 20);
        let changelogs = changelogs(1 << 20, &governor);
        changelogs.open(R, Epoch(1));
        let mut readers = [changelogs.subscribe(R), changelogs.subscribe(R)];
        let large = || Some(vec![chunk(10_000, |_| 0)]);
        let has = |from| changelogs.get(R, Epoch(from), Epoch(9)).is_some();
        changelogs.put(R, Epoch(2), large());
        changelogs.put(R, Epoch(4), large());
        readers[0].passed(Epoch(4));
        assert!(has(1), "the other has read nothing");
        readers[1].passed(Epoch(3));
        assert!(!has(1) && has(2), "one change is read by both");
        readers[1].passed(Epoch(4));
        assert!(!has(2) && has(4));
        assert_eq!(governor.used_by(MemoryClass::Changelog), 0);
        // A little stays, unless memory is tight.
        let small = 1 << 20 >> 5;
        changelogs.put(R, Epoch(6), Some(vec![chunk(2_000, |_| 0)]));
        assert!(governor.used_by(MemoryClass::Changelog) < small);
        readers.iter_mut().for_each(|r| r.passed(Epoch(6)));
        changelogs.shed();
        assert!(has(4));
    }

    #[test]
    fn while_memory_is_tight_only_what_somebody_will_read_is_kept() {
        let governor = MemoryGovernor::new(1 << 20);
        let changelogs = changelogs(16 << 20, &governor);
        let relations = [RelationId(1), RelationId(2)];
        relations.iter().for_each(|&r| changelogs.open(r, Epoch(1)));
        let mut readers = relations.map(|r| changelogs.subscribe(r));
        for relation in relations {
            changelogs.put(relation, Epoch(2), Some(vec![chunk(10_000, |_| 0)]));
        }
        readers[0].passed(Epoch(2));
        let has = |r: RelationId| changelogs.get(r, Epoch(1), Epoch(2)).is_some();
        changelogs.shed();
        assert!(relations.iter().all(|&r| has(r)), "there is room");
        let mut others = governor.account(MemoryClass::Statement);
        others.set(1 << 20);
        changelogs.shed();
        assert!(!has(relations[0]) && has(relations[1]));
        drop(readers);
        changelogs.shed();
        assert_eq!(governor.used_by(MemoryClass::Changelog), 0);
    }

    #[test]
    fn a_reader_gets_the_rows_of_its_vnodes() {
        let c = chunk(10, |i| i as Vnode);
        assert_eq!(c.select(&(0..256), &[0], 0..10).unwrap().unwrap().num_rows(), 10);
        assert_eq!(c.select(&(3..5), &[0], 0..10).unwrap().unwrap().num_rows(), 2);
        assert!(c.select(&(10..20), &[0], 0..10).unwrap().is_none());
        assert_eq!(c.select(&(0..256), &[], 0..10).unwrap().unwrap().num_rows(), 10);
    }
}
