//! Roots of a job: rows into table 0 and to subscribers, or into a digest (docs/design.md §3, §4).
//!
//! A [`Materialize`] collects the epoch's change, consolidates it at the barrier and writes it once.
//! `Keyed` rows must net to at most one old and one new row a key, each once; anything else is a bug
//! and fails the job. `Append` rows are written as they come. A change beyond `delta_bytes` is not
//! kept for the changelog cache (readers fall back to the state table); `Multiset` rows are then written
//! through, since the memtable adds their weights up anyway, and `Keyed` rows are consolidated early and, if
//! most of them stay, set aside in the store until the barrier ([`SpilledDelta`]).

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, BinaryArray, UInt32Array};
use arrow::datatypes::SchemaRef;
use millrace_common::delta::take_rows;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError, SqlState, VNODE_COUNT, Vnode};
use millrace_rpc::catalog::RowStorage;
use millrace_storage::{MemRun, TableWriter};

use crate::blackhole::{Digest, digest};
use crate::changelog_cache::{ChangelogCache, HubChunk};
use crate::consolidate::{Net, net_across, net_by_key, weights};
use crate::error::ExecError;
use crate::exchange::Barrier;
use crate::layout::RowLayout;
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};
use crate::publish::SinkRoot;
use crate::rebuild::{Difference, Rebuild};
use crate::sequence::{ArrivalSequence, first_arrival};
use crate::spilled_delta::{Part, SpilledDelta};

/// What a root made of an epoch, beyond what it wrote.
#[derive(Debug, Default)]
pub struct RootReport {
    /// Change of the relation's row count.
    pub row_count: i64,
    pub changed: bool,
    /// The consolidated change; `None`: too large to be kept.
    pub delta: Option<Vec<HubChunk>>,
    /// Counters to be persisted with the epoch.
    pub counters: Vec<(String, u64)>,
    pub digest: Option<Digest>,
    /// Of a sink: the epoch's net rows, in the order in which they apply.
    pub staged: Vec<DeltaChunk>,
}

/// The last node of a job's last fragment.
pub enum Root {
    Materialize(Box<Materialize>),
    Blackhole(Digest),
    Sink(Box<SinkRoot>),
}

impl Root {
    pub fn push(&mut self, chunk: DeltaChunk) -> Result<(), ExecError> {
        match self {
            Root::Materialize(m) => m.push(chunk),
            Root::Blackhole(sum) => {
                *sum = sum.plus(digest(&chunk)?);
                Ok(())
            }
            Root::Sink(sink) => sink.push(chunk),
        }
    }

    /// Makes room after rows were pushed, if they are many.
    pub async fn relieve(&mut self) -> Result<(), ExecError> {
        match self {
            Root::Materialize(m) => m.relieve().await,
            Root::Blackhole(_) | Root::Sink(_) => Ok(()),
        }
    }

    /// Ends the epoch.
    pub async fn barrier(
        &mut self,
        barrier: &Barrier,
        sealed: &mut Vec<MemRun>,
    ) -> Result<RootReport, ExecError> {
        match self {
            Root::Materialize(m) => m.barrier(barrier, sealed).await,
            Root::Blackhole(sum) => {
                let sum = std::mem::take(sum);
                Ok(RootReport {
                    row_count: sum.rows,
                    changed: sum != Digest::default(),
                    delta: Some(Vec::new()),
                    digest: Some(sum),
                    ..RootReport::default()
                })
            }
            Root::Sink(sink) => sink.barrier(),
        }
    }

    pub fn memory_size(&self) -> usize {
        match self {
            Root::Materialize(m) => m.account.bytes() + m.writer.memory_size(),
            Root::Blackhole(_) => 0,
            Root::Sink(sink) => sink.memory_size(),
        }
    }
}

/// Rows that follow each other in one vnode of an append-only relation: then the next vnode has its turn, so that
/// readers share the rows among them.
const ROWS_PER_TURN: u64 = 1024;

/// The changelog cache of a relation, which says how much of an epoch's change it would keep.
pub struct KeptChange {
    pub changelogs: Arc<ChangelogCache>,
    pub relation: RelationId,
}

impl KeptChange {
    /// `budget`: what a task may keep of an epoch's change.
    fn most(&self, budget: usize) -> usize {
        budget.min(self.changelogs.most_kept(self.relation))
    }
}

pub struct Materialize {
    layout: Arc<RowLayout>,
    writer: TableWriter,
    vnodes: Range<Vnode>,
    /// The epoch's change so far, not written.
    pending: Vec<DeltaChunk>,
    /// What of the epoch's change is set aside (Keyed).
    large: Option<SpilledDelta>,
    /// Written already, for the changelog cache; `None`: too large.
    written: Option<Vec<HubChunk>>,
    /// Of `written`.
    written_bytes: Reservation,
    kept: KeptChange,
    row_count: i64,
    changed: bool,
    /// Until a rebuild is done: `writer` is of the table in which its result is collected.
    rebuild: Option<Rebuild>,
    /// Append.
    arrivals: ArrivalSequence,
    budget: usize,
    /// Consolidate once `pending` holds this much.
    limit: usize,
    /// Of `pending`.
    account: Reservation,
    governor: Arc<MemoryGovernor>,
}

impl Materialize {
    /// `counters`: the job's, as committed. `budget`: bytes of change one epoch keeps, of all tasks.
    pub fn new(
        layout: Arc<RowLayout>,
        writer: TableWriter,
        vnodes: Range<Vnode>,
        counters: &std::collections::BTreeMap<String, u64>,
        budget: usize,
        kept: KeptChange,
        governor: &Arc<MemoryGovernor>,
    ) -> Materialize {
        let arrivals = ArrivalSequence::new(0, vnodes.start, first_arrival(counters));
        let budget = budget * usize::from(vnodes.end - vnodes.start) / VNODE_COUNT;
        Materialize {
            layout,
            writer,
            vnodes,
            pending: Vec::new(),
            large: None,
            written: Some(Vec::new()),
            written_bytes: governor.account(MemoryClass::Changelog),
            kept,
            row_count: 0,
            changed: false,
            rebuild: None,
            arrivals,
            budget,
            limit: budget,
            account: governor.account(MemoryClass::Change),
            governor: Arc::clone(governor),
        }
    }

    /// With a rebuild under way, if there is one.
    pub fn with_rebuild(self, rebuild: Option<Rebuild>) -> Materialize {
        Materialize { rebuild, ..self }
    }

    fn push(&mut self, chunk: DeltaChunk) -> Result<(), ExecError> {
        if self.layout.storage == RowStorage::Append {
            return self.append(chunk);
        }
        self.account.grow(chunk.memory_size());
        self.pending.push(chunk);
        let is_large = self.account.bytes() > self.limit;
        match self.layout.storage {
            RowStorage::Multiset if is_large || self.is_too_much() => self.write_multiset(),
            _ if is_large => self.compact(),
            _ => Ok(()),
        }
    }

    /// The views of this process have not written too much, and this one has much of it.
    fn is_too_much(&self) -> bool {
        self.governor.is_too_much_unwritten(self.account.bytes())
    }

    /// Rows by arrival.
    fn append(&mut self, chunk: DeltaChunk) -> Result<(), ExecError> {
        let chunk = expand_inserts(chunk)?;
        let rows = chunk.num_rows();
        let owned = u64::from(self.vnodes.end - self.vnodes.start);
        let numbers = self.arrivals.take(rows as u64);
        let turn = |n: u64| self.vnodes.start + (n / ROWS_PER_TURN % owned) as Vnode;
        let vnodes: Vec<Vnode> = numbers.clone().map(turn).collect();
        let mut key = [0u8; 10];
        let keys = BinaryArray::from_iter_values(vnodes.iter().zip(numbers).map(|(vnode, n)| {
            key[..2].copy_from_slice(&vnode.to_be_bytes());
            key[2..].copy_from_slice(&n.to_be_bytes());
            key
        }));
        self.row_count += rows as i64;
        self.writer.write(keys, None, chunk.batch.clone());
        self.remember(chunk, vnodes);
        Ok(())
    }

    /// Keeps a written change for the changelog cache while there is room.
    fn remember(&mut self, chunk: DeltaChunk, vnodes: Vec<Vnode>) {
        self.changed |= !chunk.is_empty();
        let (Some(kept), Some(new)) = (&mut self.written, HubChunk::new(chunk, vnodes)) else {
            return;
        };
        self.written_bytes.grow(new.memory_size());
        if self.written_bytes.bytes() > self.kept.most(self.budget) {
            self.written = None;
            self.written_bytes.set(0);
            return;
        }
        kept.push(new);
    }

    fn take_pending(&mut self) -> Result<Option<DeltaChunk>, ExecError> {
        if self.pending.is_empty() {
            return Ok(None);
        }
        let whole = DeltaChunk::concat(&self.layout.schema, &std::mem::take(&mut self.pending))?;
        self.account.set(0);
        Ok(Some(whole))
    }

    /// Keys of whole rows are as large as the rows, and all of them are needed at once: a row may cancel one
    /// of any other piece. What is written goes piece by piece.
    fn write_multiset(&mut self) -> Result<(), ExecError> {
        let pieces = pieces(&self.layout.schema, std::mem::take(&mut self.pending))?;
        let (mut keys, mut vnodes) = (Vec::new(), Vec::new());
        for piece in &pieces {
            vnodes.push(self.layout.vnodes(&piece.batch)?);
            let own = self.layout.keys(&piece.batch, &vnodes[vnodes.len() - 1])?;
            self.account.grow(own.get_array_memory_size());
            keys.push(own);
        }
        let nets = net_across(&keys, &pieces);
        for (((piece, keys), vnodes), net) in pieces.into_iter().zip(keys).zip(vnodes).zip(nets) {
            self.row_count += net.weights.iter().sum::<i64>();
            let (delta, keys, vnodes) = pick(&net, &piece, &keys, &vnodes)?;
            drop(piece);
            if !delta.is_empty() {
                self.writer.write(keys, delta.weights.clone(), delta.batch.clone());
                self.remember(delta, vnodes);
            }
        }
        self.account.set(0);
        Ok(())
    }

    /// Frees what cancels; if most of it stays, waits longer until the next time.
    fn compact(&mut self) -> Result<(), ExecError> {
        let Some(chunk) = self.take_pending()? else { return Ok(()) };
        let vnodes = self.layout.vnodes(&chunk.batch)?;
        let keys = self.layout.keys(&chunk.batch, &vnodes)?;
        let kept = net_by_key(&keys, &chunk, &self.layout.identity)?.apply(&chunk)?;
        self.account.set(kept.memory_size());
        self.limit = self.budget.max(kept.memory_size() * 2);
        self.pending.push(kept);
        Ok(())
    }

    /// Sets a change aside that consolidation did not make small.
    async fn relieve(&mut self) -> Result<(), ExecError> {
        let is_large = self.account.bytes() > self.budget || self.is_too_much();
        if self.layout.storage != RowStorage::Keyed || !is_large {
            return Ok(());
        }
        self.limit = self.budget;
        self.set_aside().await
    }

    /// Takes the pieces that wait out of memory.
    async fn set_aside(&mut self) -> Result<(), ExecError> {
        let large = match &mut self.large {
            Some(large) => large,
            None => {
                let begun =
                    SpilledDelta::begin(&self.layout, self.writer.store(), self.writer.desc().id)?;
                self.large.insert(begun)
            }
        };
        large.add(std::mem::take(&mut self.pending), self.budget / 2).await?;
        self.account.set(0);
        Ok(())
    }

    /// Adds up what was set aside and writes it, part by part.
    async fn write_large(&mut self) -> Result<(), ExecError> {
        if self.large.is_none() {
            return self.write_keyed();
        }
        if !self.pending.is_empty() {
            self.set_aside().await?;
        }
        let Some(large) = self.large.take() else { return Ok(()) };
        self.written = None;
        let mut parts = large.read()?;
        while let Some(Part { chunk, keys, vnodes }) = parts.next().await? {
            self.changed |= !chunk.is_empty();
            self.write_net(&chunk, &keys, &vnodes)?;
            self.writer.store().wait_for_spills().await;
        }
        Ok(())
    }

    fn write_keyed(&mut self) -> Result<(), ExecError> {
        let Some(chunk) = self.take_pending()? else { return Ok(()) };
        let vnodes = self.layout.vnodes(&chunk.batch)?;
        let keys = self.layout.keys(&chunk.batch, &vnodes)?;
        self.write_net(&chunk, &keys, &vnodes)
    }

    /// Writes a change that holds all rows of its keys.
    fn write_net(
        &mut self,
        chunk: &DeltaChunk,
        keys: &BinaryArray,
        vnodes: &[Vnode],
    ) -> Result<(), ExecError> {
        self.check_owned(vnodes)?;
        let net = net_by_key(keys, chunk, &self.layout.identity)?;
        let puts =
            KeyedWrites::of(&net, |row| self.layout.describe_key(&chunk.batch, row as usize))?;
        self.row_count += puts.row_count;
        let (delta, delta_keys, delta_vnodes) = pick(&net, chunk, keys, vnodes)?;
        if puts.whole {
            self.writer.write(delta_keys, delta.weights.clone(), delta.batch.clone());
        } else {
            let rows = UInt32Array::from(puts.rows);
            let keys = take_binary(keys, &rows)?;
            self.writer.write(keys, weights(&puts.weights), take_rows(&chunk.batch, &rows)?);
        }
        self.remember(delta, delta_vnodes);
        Ok(())
    }

    /// The planner placed exchanges such that a task writes only its own vnodes.
    fn check_owned(&self, vnodes: &[Vnode]) -> Result<(), ExecError> {
        match vnodes.iter().find(|v| !self.vnodes.contains(v)) {
            Some(v) if usize::from(self.vnodes.end - self.vnodes.start) < VNODE_COUNT => {
                Err(ExecError::internal(format!(
                    "a row of vnode {v} reached the task of vnodes {:?}",
                    self.vnodes
                )))
            }
            _ => Ok(()),
        }
    }

    /// Changes the relation's rows by the difference to what was collected.
    async fn swap(&mut self, rebuild: Rebuild, epoch: Epoch) -> Result<(), ExecError> {
        if !self.pending.is_empty() || self.large.is_some() || self.writer.memory_size() > 0 {
            return Err(ExecError::internal("rows came after the last scan of a rebuild"));
        }
        (self.row_count, self.changed, self.written) = (0, false, None);
        let storage = self.layout.storage;
        let (vnodes, budget) = (self.vnodes.clone(), self.budget);
        let collected = self.writer.desc().id;
        let difference = Difference { rebuild: &rebuild, collected, epoch, vnodes, budget };
        let delta = difference.compute(storage).await?;
        self.writer = rebuild.rows;
        let mut parts = delta.read()?;
        while let Some(Part { chunk, keys, vnodes }) = parts.next().await? {
            self.changed |= !chunk.is_empty();
            match storage {
                RowStorage::Keyed => self.write_net(&chunk, &keys, &vnodes)?,
                RowStorage::Multiset => {
                    self.row_count +=
                        (0..chunk.num_rows()).map(|row| chunk.weight(row)).sum::<i64>();
                    self.writer.write(keys, chunk.weights, chunk.batch);
                }
                RowStorage::Append if (0..chunk.num_rows()).any(|row| chunk.weight(row) < 0) => {
                    return Err(lost_rows().into());
                }
                RowStorage::Append => self.append(chunk)?,
            }
            self.writer.store().wait_for_spills().await;
        }
        Ok(())
    }

    async fn barrier(
        &mut self,
        barrier: &Barrier,
        sealed: &mut Vec<MemRun>,
    ) -> Result<RootReport, ExecError> {
        if barrier.swap
            && let Some(rebuild) = self.rebuild.take()
        {
            self.swap(rebuild, barrier.epoch).await?;
        }
        match self.layout.storage {
            RowStorage::Append => {}
            RowStorage::Multiset => self.write_multiset()?,
            RowStorage::Keyed => self.write_large().await?,
        }
        sealed.extend(self.writer.seal()?);
        let counters = match self.layout.storage {
            RowStorage::Append => vec![self.arrivals.counter()],
            _ => Vec::new(),
        };
        self.written_bytes.set(0);
        self.limit = self.budget;
        if self.rebuild.is_some() {
            // What is collected is not content yet.
            (self.row_count, self.changed) = (0, false);
        }
        Ok(RootReport {
            row_count: std::mem::take(&mut self.row_count),
            changed: std::mem::take(&mut self.changed),
            delta: self.written.replace(Vec::new()),
            counters,
            digest: None,
            staged: Vec::new(),
        })
    }
}

fn lost_rows() -> SqlError {
    SqlError::new(
        SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
        "the inputs no longer have all rows from which this append-only relation was computed",
    )
    .with_hint("Drop it and create it anew.")
}

/// Chunks in their order, small ones put together.
fn pieces(schema: &SchemaRef, chunks: Vec<DeltaChunk>) -> Result<Vec<DeltaChunk>, ExecError> {
    const PIECE_BYTES: usize = 1 << 20;
    let mut pieces = Vec::new();
    let (mut group, mut bytes) = (Vec::new(), 0);
    for chunk in chunks {
        let more = chunk.memory_size();
        if bytes > 0 && bytes + more > PIECE_BYTES {
            pieces.push(DeltaChunk::concat(schema, &std::mem::take(&mut group))?);
            bytes = 0;
        }
        bytes += more;
        group.push(chunk);
    }
    if !group.is_empty() {
        pieces.push(DeltaChunk::concat(schema, &group)?);
    }
    Ok(pieces)
}

/// The net rows with their keys and vnodes.
fn pick(
    net: &Net,
    chunk: &DeltaChunk,
    keys: &BinaryArray,
    vnodes: &[Vnode],
) -> Result<(DeltaChunk, BinaryArray, Vec<Vnode>), ExecError> {
    if net.unchanged {
        return Ok((chunk.clone(), keys.clone(), vnodes.to_vec()));
    }
    let rows = UInt32Array::from(net.rows.clone());
    let own = net.rows.iter().map(|&r| vnodes[r as usize]).collect();
    Ok((net.apply(chunk)?, take_binary(keys, &rows)?, own))
}

pub(crate) fn take_binary(
    keys: &BinaryArray,
    rows: &UInt32Array,
) -> Result<BinaryArray, ExecError> {
    use arrow::array::AsArray;
    Ok(arrow::compute::take(keys, rows, None)?.as_binary::<i32>().clone())
}

/// What a keyed change writes: the new row of a key, or its deletion.
pub(crate) struct KeyedWrites {
    pub rows: Vec<u32>,
    pub weights: Vec<i64>,
    pub row_count: i64,
    /// The writes are exactly the net rows: no key has an old and a new one.
    pub whole: bool,
}

impl KeyedWrites {
    /// Checks multiplicities: a key nets to at most one old row and one new row, once each.
    pub fn of(net: &Net, describe: impl Fn(u32) -> String) -> Result<KeyedWrites, ExecError> {
        let mut writes =
            KeyedWrites { rows: Vec::new(), weights: Vec::new(), row_count: 0, whole: true };
        for key in net.keys() {
            let (mut old, mut new) = (None, None);
            for i in key {
                let place = match net.weights[i] {
                    1 => &mut new,
                    -1 => &mut old,
                    w => return Err(violation(w, describe(net.rows[i]))),
                };
                if place.replace(net.rows[i]).is_some() {
                    return Err(violation(2 * net.weights[i], describe(net.rows[i])));
                }
            }
            writes.whole &= old.is_none() || new.is_none();
            writes.row_count += i64::from(new.is_some()) - i64::from(old.is_some());
            if let Some(row) = new.or(old) {
                writes.rows.push(row);
                writes.weights.push(if new.is_some() { 1 } else { -1 });
            }
        }
        Ok(writes)
    }
}

fn violation(weight: i64, key: String) -> ExecError {
    ExecError::internal(format!("the rows of key {key} changed by weight {weight} in one epoch"))
}

/// A row of weight n as n rows; a retraction is a bug.
fn expand_inserts(chunk: DeltaChunk) -> Result<DeltaChunk, ExecError> {
    let Some(weights) = &chunk.weights else { return Ok(chunk) };
    if let Some(w) = weights.values().iter().find(|w| **w < 0) {
        return Err(ExecError::internal(format!("weight {w} reached an append-only relation")));
    }
    let rows = weights.values().iter().enumerate();
    let rows: Vec<u32> =
        rows.flat_map(|(i, &w)| std::iter::repeat_n(i as u32, w as usize)).collect();
    Ok(DeltaChunk::inserts(take_rows(&chunk.batch, &UInt32Array::from(rows))?))
}
