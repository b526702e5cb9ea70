//! Sinks: an epoch's net change, staged with the commit and brought to the target after it
//! (docs/design.md §4, "Sinks").
//!
//! [`SinkRoot`] is the last node of a sink's graph: it nets the epoch's rows. At the cut [`Publisher`] makes
//! them durable beside the job's state and names them in the commit's [`PublishHandle`]; once that is in
//! the log, meta has them published, in order, and again after a crash. The target tells repeated
//! publications by their sequence.
//!
//! A staged part is `"MRPH" | u16 version | u16 0 | u32 CRC-32 of what follows | Arrow IPC stream`, all
//! little-endian; the stream's last column is the rows' weight.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arrow::array::{ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use arrow::ipc::reader::StreamReader;
use arrow::ipc::writer::StreamWriter;
use bytes::Bytes;
use millrace_common::{DeltaChunk, Epoch, SqlError, SqlState, crash};
use millrace_connector::sink::{Publication, SinkTarget};
use millrace_rpc::catalog::{Relation, RowStorage};
use millrace_rpc::version::{JobVersion, PublishHandle, SliceRef};
use millrace_storage::JobStore;
use parking_lot::Mutex;

use crate::consolidate::{consolidate_projected, net_by_identity, net_by_key};
use crate::error::ExecError;
use crate::layout::RowLayout;
use crate::materialize::{KeyedWrites, RootReport};
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};
use crate::worker::into_table::TableTarget;

const MAGIC: &[u8; 4] = b"MRPH";
const VERSION: u16 = 1;
const HEADER: usize = 12;
const WEIGHT: &str = "__weight";
/// Bytes of rows in one staged part, about.
const PART_BYTES: usize = 16 << 20;
/// Staged changes that are kept in memory.
const RECENT: usize = 2;

/// The last node of a sink's graph.
pub struct SinkRoot {
    layout: Arc<RowLayout>,
    /// Leading columns that are published; the others only tell rows apart.
    shown: usize,
    pending: Vec<DeltaChunk>,
    /// Netted already, because the epoch is large; applies before `pending`.
    done: Vec<DeltaChunk>,
    budget: usize,
    account: Reservation,
}

impl SinkRoot {
    /// `budget`: bytes of change that are netted as one.
    pub fn new(
        layout: Arc<RowLayout>,
        shown: usize,
        budget: usize,
        governor: &Arc<MemoryGovernor>,
    ) -> SinkRoot {
        SinkRoot {
            layout,
            shown,
            pending: Vec::new(),
            done: Vec::new(),
            budget,
            account: governor.account(MemoryClass::Memtable),
        }
    }

    pub fn memory_size(&self) -> usize {
        self.account.bytes()
    }

    pub fn push(&mut self, chunk: DeltaChunk) -> Result<(), ExecError> {
        self.account.grow(chunk.memory_size());
        self.pending.push(chunk);
        let waiting: usize = self.pending.iter().map(DeltaChunk::memory_size).sum();
        if waiting > self.budget { self.write_pending(false) } else { Ok(()) }
    }

    /// Nets what is pending. `whole`: it is all of the epoch's change.
    fn write_pending(&mut self, whole: bool) -> Result<(), ExecError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let layout = &self.layout;
        let chunk = DeltaChunk::concat(&layout.schema, &std::mem::take(&mut self.pending))?;
        let net = match layout.storage {
            // Never retracted: nothing to net.
            RowStorage::Append => chunk,
            RowStorage::Multiset => {
                let keys = layout.keys(&chunk.batch, &vec![0; chunk.num_rows()])?;
                net_by_identity(&keys, &chunk).apply(&chunk)?
            }
            RowStorage::Keyed => {
                let keys = layout.keys(&chunk.batch, &vec![0; chunk.num_rows()])?;
                let net = net_by_key(&keys, &chunk, &layout.identity)?;
                if whole && self.done.is_empty() {
                    KeyedWrites::of(&net, |row| layout.describe_key(&chunk.batch, row as usize))?;
                }
                net.apply(&chunk)?
            }
        };
        let shown: Vec<usize> = (0..self.shown).collect();
        let net = match self.shown < layout.schema.fields().len() {
            true => {
                consolidate_projected(DeltaChunk::new(net.batch.project(&shown)?, net.weights))?
            }
            false => net,
        };
        if !net.is_empty() {
            self.done.push(net);
        }
        self.account.set(self.done.iter().map(DeltaChunk::memory_size).sum());
        Ok(())
    }

    /// Ends the epoch.
    pub fn barrier(&mut self) -> Result<RootReport, ExecError> {
        self.write_pending(true)?;
        let staged = std::mem::take(&mut self.done);
        self.account.set(0);
        let weights = staged.iter().flat_map(|c| (0..c.num_rows()).map(|i| c.weight(i)));
        Ok(RootReport {
            row_count: weights.sum(),
            changed: !staged.is_empty(),
            delta: Some(Vec::new()),
            staged,
            ..RootReport::default()
        })
    }
}

/// Where a sink's changes go.
pub enum Target {
    /// Outside this system.
    Outside(Arc<dyn SinkTarget>),
    /// A table here.
    Table(TableTarget),
}

/// Where in a sink's life a change lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeOf {
    /// A part of the inputs' snapshot, not the last.
    Snapshot,
    SnapshotEnd,
    Epoch,
}

/// Stages and publishes the changes of one sink.
pub struct Publisher {
    target: Target,
    schema: SchemaRef,
    /// Parts of the snapshot are held and told as one.
    whole: bool,
    /// Parts are held now.
    holding: AtomicBool,
    /// Of the next change.
    next: AtomicU64,
    /// Of the last change that the target is known to have.
    known: AtomicU64,
    /// The newest changes, by sequence, so that publishing them reads nothing: one is published while the next is
    /// staged.
    recent: Mutex<BTreeMap<u64, Vec<DeltaChunk>>>,
}

impl Publisher {
    pub fn new(
        relation: &Relation,
        version: &JobVersion,
        layout: &RowLayout,
        target: Target,
        whole: bool,
    ) -> Result<Publisher, ExecError> {
        let shown = relation.columns.iter().filter(|c| !c.hidden).count();
        // A failed expression is NULL whatever the plan derived about its column.
        let fields = layout.schema.fields().iter().take(shown);
        let fields: Vec<Field> = fields.map(|f| f.as_ref().clone().with_nullable(true)).collect();
        let last = version.publish.last().map_or(0, |h| h.sequence).max(version.published);
        Ok(Publisher {
            target,
            schema: Arc::new(Schema::new(fields)),
            whole,
            holding: AtomicBool::new(version.publish.last().is_some_and(|h| h.held)),
            next: AtomicU64::new(last + 1),
            known: AtomicU64::new(version.published),
            recent: Mutex::default(),
        })
    }

    /// Makes an epoch's change durable. `None`: there is none.
    pub async fn stage(
        &self,
        store: &JobStore,
        chunks: Vec<DeltaChunk>,
        of: ChangeOf,
    ) -> Result<Option<PublishHandle>, ExecError> {
        let held = self.whole && of == ChangeOf::Snapshot;
        // The end lets go of what is held, also if it has nothing to add.
        let releases = of == ChangeOf::SnapshotEnd && self.holding.load(Ordering::Relaxed);
        if chunks.is_empty() && !releases {
            return Ok(None);
        }
        self.holding.store(held, Ordering::Relaxed);
        crash::point("sink-before-stage");
        let rows = chunks.iter().map(|c| c.num_rows() as u64).sum();
        let mut encoded = Vec::new();
        for part in in_parts(&chunks) {
            encoded.push(encode(&self.schema, part)?);
        }
        let staging = encoded.into_iter().map(|part| store.stage(part));
        let parts: Vec<SliceRef> = futures::future::try_join_all(staging).await?;
        crash::point("sink-after-stage");
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let mut recent = self.recent.lock();
        recent.insert(sequence, chunks);
        while recent.len() > RECENT {
            recent.pop_first();
        }
        Ok(Some(PublishHandle { sequence, epoch: 0, parts, rows, held }))
    }

    /// Brings changes to the target as one, again if need be.
    pub async fn publish(
        &self,
        store: &JobStore,
        handles: &[PublishHandle],
    ) -> Result<(), ExecError> {
        let Some(handle) = handles.last() else { return Ok(()) };
        let known = self.known.load(Ordering::Relaxed);
        if matches!(self.target, Target::Outside(_)) && handle.sequence <= known {
            // Asked again, by a leader that was not told.
            return Ok(());
        }
        let recent = self.recent.lock().get(&handle.sequence).cloned();
        let mut chunks = match recent {
            Some(chunks) => chunks,
            None => self.load(store, handle).await?,
        };
        if handles.len() > 1 {
            // As much is in memory as the net of it is, and one part.
            let mut net = Vec::new();
            for earlier in &handles[..handles.len() - 1] {
                net = self.net(net, self.load(store, earlier).await?)?;
            }
            chunks = self.net(net, chunks)?;
        }
        match &self.target {
            Target::Outside(target) => {
                let (sequence, epoch) = (handle.sequence, Epoch(handle.epoch));
                target.publish(&Publication { sequence, known, epoch, chunks }).await?;
                self.known.fetch_max(sequence, Ordering::Relaxed);
            }
            Target::Table(table) => table.publish(handle.sequence, chunks).await?,
        }
        self.recent.lock().retain(|sequence, _| *sequence > handle.sequence);
        Ok(())
    }

    fn net(
        &self,
        mut all: Vec<DeltaChunk>,
        more: Vec<DeltaChunk>,
    ) -> Result<Vec<DeltaChunk>, ExecError> {
        all.extend(more);
        let net = consolidate_projected(DeltaChunk::concat(&self.schema, &all)?)?;
        Ok(if net.is_empty() { Vec::new() } else { vec![net] })
    }

    async fn load(
        &self,
        store: &JobStore,
        handle: &PublishHandle,
    ) -> Result<Vec<DeltaChunk>, ExecError> {
        let mut chunks = Vec::new();
        for part in &handle.parts {
            let bytes = store.read_staged(part).await?;
            let place = match part.object.is_empty() {
                true => "the meta log",
                false => part.object.as_str(),
            };
            chunks.extend(decode(&bytes, place)?);
        }
        Ok(chunks)
    }
}

/// Chunks in order, grouped to parts. A chunk is never divided: its rows of a key stay together.
fn in_parts(chunks: &[DeltaChunk]) -> impl Iterator<Item = &[DeltaChunk]> {
    let mut bytes = 0;
    let fits = move |_: &DeltaChunk, next: &DeltaChunk| {
        bytes += next.memory_size();
        let fits = bytes < PART_BYTES;
        if !fits {
            bytes = 0;
        }
        fits
    };
    chunks.chunk_by(fits)
}

fn encode(schema: &SchemaRef, chunks: &[DeltaChunk]) -> Result<Bytes, ExecError> {
    let mut fields: Vec<Arc<Field>> = schema.fields().iter().cloned().collect();
    fields.push(Arc::new(Field::new(WEIGHT, DataType::Int64, false)));
    let full = Arc::new(Schema::new(fields));
    let mut out = vec![0u8; HEADER];
    {
        let mut writer = StreamWriter::try_new(&mut out, &full)?;
        for chunk in chunks {
            let mut columns = chunk.batch.columns().to_vec();
            columns.push(Arc::new(chunk.weights_array()) as ArrayRef);
            writer.write(&RecordBatch::try_new(Arc::clone(&full), columns)?)?;
        }
        writer.finish()?;
    }
    let crc = crc32fast::hash(&out[HEADER..]);
    out[..4].copy_from_slice(MAGIC);
    out[4..6].copy_from_slice(&VERSION.to_le_bytes());
    out[8..12].copy_from_slice(&crc.to_le_bytes());
    Ok(out.into())
}

fn decode(bytes: &[u8], place: &str) -> Result<Vec<DeltaChunk>, ExecError> {
    let damaged = |what: &str| {
        let message = format!("a sink's staged change in {place} is damaged: {what}");
        ExecError::Sql(SqlError::new(SqlState::DATA_CORRUPTED, message))
    };
    let Some((head, body)) = bytes.split_at_checked(HEADER) else {
        return Err(damaged("it is too short"));
    };
    if &head[..4] != MAGIC {
        return Err(damaged("it is not one"));
    }
    if head[4..6] != VERSION.to_le_bytes() {
        return Err(damaged("its version is not known"));
    }
    if head[8..12] != crc32fast::hash(body).to_le_bytes() {
        return Err(damaged("its checksum does not match"));
    }
    let mut chunks = Vec::new();
    for batch in StreamReader::try_new(body, None)? {
        let batch = batch?;
        let last = batch.num_columns().checked_sub(1).ok_or_else(|| damaged("no columns"))?;
        let weights = batch
            .column(last)
            .as_primitive_opt::<Int64Type>()
            .ok_or_else(|| damaged("rows without weights"))?
            .clone();
        let columns: Vec<usize> = (0..last).collect();
        chunks.push(DeltaChunk::new(batch.project(&columns)?, Some(weights)));
    }
    Ok(chunks)
}

#[cfg(test)]
mod tests {
    use arrow::array::Int64Array;

    use super::*;

    fn chunk(rows: &[(i64, i64)]) -> DeltaChunk {
        let values: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|r| r.0)));
        let weights = Int64Array::from_iter_values(rows.iter().map(|r| r.1));
        DeltaChunk::new(RecordBatch::try_from_iter([("a", values)]).unwrap(), Some(weights))
    }

    #[test]
    fn a_staged_part_reads_back_and_damage_is_noticed() {
        let chunks = [chunk(&[(1, 1), (2, -1)]), chunk(&[(3, 5)])];
        let bytes = encode(&chunks[0].schema(), &chunks).unwrap();
        let back = decode(&bytes, "here").unwrap();
        assert_eq!(back.len(), 2);
        assert_eq!(back[0].batch, chunks[0].batch);
        assert_eq!(back[1].weights, chunks[1].weights);
        for at in [0, 5, 9, HEADER + 20, bytes.len() - 1] {
            let mut wrong = bytes.to_vec();
            wrong[at] ^= 0x40;
            let error = decode(&wrong, "segment 7").unwrap_err().into_sql();
            assert_eq!(error.state, SqlState::DATA_CORRUPTED, "byte {at}");
            assert!(error.message.contains("segment 7"), "{}", error.message);
        }
    }

    /// A failure here means that changes staged before an upgrade could not be published after it: give the new
    /// format a new version and keep reading the old one.
    #[test]
    fn golden_staged_change() {
        let pinned = include_str!("testdata/staged_change_v1.hex").trim_end();
        let chunks = [chunk(&[(1, 1), (2, -1)])];
        let bytes = encode(&chunks[0].schema(), &chunks).unwrap();
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, pinned);
    }

    #[test]
    fn an_epoch_is_netted_by_key_and_hidden_columns_do_not_count() {
        use millrace_graph::RelationLayout;
        let schema = Arc::new(Schema::new(vec![
            Field::new("k", DataType::Int64, true),
            Field::new("v", DataType::Int64, true),
            Field::new("hidden", DataType::Int64, true),
        ]));
        let layout = RowLayout::of_output(&RelationLayout {
            schema: Arc::clone(&schema),
            storage: RowStorage::Keyed,
            key: vec![0],
            distribution: vec![],
            append_only: false,
            marks: vec![],
        })
        .unwrap();
        let governor = MemoryGovernor::new(1 << 20);
        let mut root = SinkRoot::new(Arc::new(layout), 2, 1 << 20, &governor);
        let rows = |rows: &[(i64, i64, i64, i64)]| {
            let column = |f: fn(&(i64, i64, i64, i64)) -> i64| {
                Arc::new(Int64Array::from_iter_values(rows.iter().map(f))) as ArrayRef
            };
            let columns = vec![column(|r| r.0), column(|r| r.1), column(|r| r.2)];
            let batch = RecordBatch::try_new(Arc::clone(&schema), columns).unwrap();
            DeltaChunk::new(batch, Some(Int64Array::from_iter_values(rows.iter().map(|r| r.3))))
        };
        root.push(rows(&[(1, 10, 0, 1), (2, 20, 0, -1), (3, 30, 0, -1)])).unwrap();
        root.push(rows(&[(1, 10, 0, -1), (2, 21, 0, 1), (3, 30, 1, 1)])).unwrap();
        let report = root.barrier().unwrap();
        let [only] = report.staged.as_slice() else { panic!("{:?}", report.staged) };
        let expected = rows(&[(2, 20, 0, -1), (2, 21, 0, 1)]);
        assert_eq!(only.batch, expected.batch.project(&[0, 1]).unwrap());
        assert_eq!(only.weights, expected.weights);
        assert_eq!((report.row_count, report.changed), (0, true));
        assert!(!root.barrier().unwrap().changed);
    }
}
