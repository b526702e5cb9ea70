//! Key gates: rows parked by reference until their key's state is there, first in, first out by key
//! (docs/design.md §7).
//!
//! Parked rows of keys that complete together leave as one batch per port: the blocking buffer is
//! also the mini-batch. Ports of one key are not ordered against each other: deltas commute.

use arrow::array::{Int64Array, RecordBatch};
use millrace_common::DeltaChunk;
use millrace_common::collections::HashMap;
use millrace_common::fault_injection::is_planted;

use super::arena::{batch_bytes, gather_batch};
use super::cache::Slot;
use crate::error::ExecError;

mod invariants;

const END: u32 = u32::MAX;
/// Places for rows that are kept when none wait any more.
const KEPT_NODES: usize = 1_024;

#[derive(Clone, Copy)]
struct Parked {
    chunk: u32,
    row: u32,
    next: u32,
}

struct ParkedChunk {
    port: usize,
    chunk: DeltaChunk,
    waiting: usize,
    bytes: usize,
}

/// Rows that may run.
pub struct Ready {
    pub port: usize,
    pub chunk: DeltaChunk,
    /// The slot of every row.
    pub slots: Vec<Slot>,
}

/// See the module.
#[derive(Default)]
pub struct KeyGate {
    queues: HashMap<Slot, (u32, u32)>,
    nodes: Vec<Parked>,
    free: u32,
    chunks: Vec<Option<ParkedChunk>>,
    free_chunks: Vec<u32>,
    rows: usize,
    bytes: usize,
}

impl KeyGate {
    pub fn new() -> KeyGate {
        KeyGate { free: END, ..KeyGate::default() }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of chunks that have parked rows.
    pub fn bytes(&self) -> usize {
        self.bytes + self.nodes.capacity() * size_of::<Parked>()
    }

    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// The keys that rows are parked for.
    pub fn slots(&self) -> impl Iterator<Item = Slot> {
        self.queues.keys().copied()
    }

    /// Parks `rows` of a chunk; `slots` is parallel to them.
    pub fn park(&mut self, port: usize, chunk: &DeltaChunk, rows: &[u32], slots: &[Slot]) {
        let lost = usize::from(!rows.is_empty() && is_planted("lost-parked-row"));
        let (rows, slots) = (&rows[..rows.len() - lost], &slots[..slots.len() - lost]);
        if rows.is_empty() {
            return;
        }
        let bytes = batch_bytes(&chunk.batch);
        let parked = ParkedChunk { port, chunk: chunk.clone(), waiting: rows.len(), bytes };
        self.bytes += bytes;
        self.rows += rows.len();
        let id = match self.free_chunks.pop() {
            Some(id) => {
                self.chunks[id as usize] = Some(parked);
                id
            }
            None => {
                self.chunks.push(Some(parked));
                (self.chunks.len() - 1) as u32
            }
        };
        for (&row, &slot) in rows.iter().zip(slots) {
            let node = self.node(Parked { chunk: id, row, next: END });
            match self.queues.get_mut(&slot) {
                Some((_, tail)) => {
                    self.nodes[*tail as usize].next = node;
                    *tail = node;
                }
                None => {
                    self.queues.insert(slot, (node, node));
                }
            }
        }
    }

    fn node(&mut self, parked: Parked) -> u32 {
        if self.free == END {
            self.nodes.push(parked);
            (self.nodes.len() - 1) as u32
        } else {
            let node = self.free;
            self.free = self.nodes[node as usize].next;
            self.nodes[node as usize] = parked;
            node
        }
    }

    /// Takes out everything that waits for `slots`: per port one batch, rows of a key in order.
    pub fn take(&mut self, slots: impl IntoIterator<Item = Slot>) -> Result<Vec<Ready>, ExecError> {
        let mut by_port: [(Vec<(u32, u32)>, Vec<Slot>); 2] = Default::default();
        for slot in slots {
            let Some((head, _)) = self.queues.remove(&slot) else { continue };
            let mut at = head;
            while at != END {
                let Parked { chunk, row, next } = self.nodes[at as usize];
                let port = self.chunks[chunk as usize].as_ref().map_or(0, |c| c.port);
                by_port[port.min(1)].0.push((chunk, row));
                by_port[port.min(1)].1.push(slot);
                self.nodes[at as usize].next = self.free;
                self.free = at;
                at = next;
            }
        }
        let mut ready = Vec::new();
        if self.queues.is_empty() && self.nodes.capacity() > KEPT_NODES {
            (self.nodes, self.free) = (Vec::new(), END);
        }
        for (port, (rows, slots)) in by_port.into_iter().enumerate() {
            if !rows.is_empty() {
                ready.push(Ready { port, chunk: self.gather(&rows)?, slots });
            }
        }
        Ok(ready)
    }

    /// The rows as one chunk; chunks left without parked rows are let go.
    fn gather(&mut self, rows: &[(u32, u32)]) -> Result<DeltaChunk, ExecError> {
        let mut place: HashMap<u32, usize> = HashMap::default();
        let mut chunks: Vec<&DeltaChunk> = Vec::new();
        let mut picks = Vec::with_capacity(rows.len());
        for &(id, row) in rows {
            let at = *place.entry(id).or_insert(chunks.len());
            if at == chunks.len() {
                let parked = self.chunks[id as usize].as_ref();
                chunks.push(
                    &parked.ok_or_else(|| ExecError::internal("a parked chunk is gone"))?.chunk,
                );
            }
            picks.push((at, row as usize));
        }
        let batches: Vec<&RecordBatch> = chunks.iter().map(|c| &c.batch).collect();
        let batch = gather_batch(batches[0].schema_ref(), &batches, &picks)?;
        let weights = chunks
            .iter()
            .any(|c| c.weights.is_some())
            .then(|| Int64Array::from_iter_values(picks.iter().map(|&(c, r)| chunks[c].weight(r))));
        self.rows -= rows.len();
        for &(id, _) in rows {
            let place = &mut self.chunks[id as usize];
            let Some(parked) = place else { continue };
            parked.waiting -= 1;
            if parked.waiting == 0 {
                self.bytes -= parked.bytes;
                *place = None;
                self.free_chunks.push(id);
            }
        }
        Ok(DeltaChunk::new(batch, weights))
    }
}
