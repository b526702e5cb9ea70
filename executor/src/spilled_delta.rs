//! The change of a keyed relation in an epoch that is too large to be held (docs/design.md §6).
//!
//! What a key changes by in an epoch comes in any order and in pieces: only their sum says which row is
//! there afterwards. So pieces that do not fit are sorted by key and row, written to the store as runs that
//! no version names, and added up by a merge when the epoch ends.

use std::sync::Arc;

use arrow::array::BinaryArray;
use millrace_common::fault_injection::is_planted;
use millrace_common::{DeltaChunk, TableId, Vnode};
use millrace_storage::JobStore;
use millrace_storage::stage::{Merged, Repeated, Staging};

use crate::error::ExecError;
use crate::layout::RowLayout;
use crate::state::arena::new_batch;

/// Rows whose keys are encoded at once.
const PIECE_ROWS: usize = 8_192;

/// Pieces of a change, outside memory. Dropping it deletes them.
pub(crate) struct SpilledDelta {
    layout: Arc<RowLayout>,
    staging: Staging,
}

impl SpilledDelta {
    pub fn begin(
        layout: &Arc<RowLayout>,
        store: &Arc<JobStore>,
        table: TableId,
    ) -> Result<SpilledDelta, ExecError> {
        Ok(SpilledDelta {
            layout: Arc::clone(layout),
            staging: store.begin_staging(table, Repeated::Add)?,
        })
    }

    /// Takes pieces out of memory, so many bytes of them at a time. Rows that come again in later pieces add up.
    pub async fn add(&mut self, pieces: Vec<DeltaChunk>, at_once: usize) -> Result<(), ExecError> {
        if is_planted("set-aside-lost") {
            return Ok(());
        }
        for piece in pieces {
            let rows = piece.num_rows();
            for from in (0..rows).step_by(PIECE_ROWS) {
                self.write(&piece.slice(from, PIECE_ROWS.min(rows - from)))?;
                if self.staging.memory_size() > at_once {
                    self.staging.spill().await?;
                }
            }
        }
        Ok(self.staging.spill().await?)
    }

    fn write(&mut self, chunk: &DeltaChunk) -> Result<(), ExecError> {
        let vnodes = self.layout.vnodes(&chunk.batch)?;
        let keys = self.layout.keys(&chunk.batch, &vnodes)?;
        let rows = self.layout.identity.rows(chunk.batch.columns(), chunk.num_rows())?;
        let identities = BinaryArray::from_iter_values(
            keys.iter().flatten().zip(rows.iter()).map(|(key, row)| [key, row.as_ref()].concat()),
        );
        Ok(self.staging.write(identities, chunk.weights.clone(), chunk.batch.clone())?)
    }

    /// The whole change, consolidated, in parts that hold all rows of their keys.
    pub fn read(&self) -> Result<Parts, ExecError> {
        Ok(Parts {
            layout: Arc::clone(&self.layout),
            merged: self.staging.merged()?,
            last: None,
            ended: false,
        })
    }
}

/// A part of a change and its storage keys.
pub(crate) struct Part {
    pub chunk: DeltaChunk,
    pub keys: BinaryArray,
    pub vnodes: Vec<Vnode>,
}

/// Reads a change, ascending by key.
pub(crate) struct Parts {
    layout: Arc<RowLayout>,
    merged: Merged,
    /// Rows of a key of which more may come.
    last: Option<DeltaChunk>,
    ended: bool,
}

impl Parts {
    pub async fn next(&mut self) -> Result<Option<Part>, ExecError> {
        while !self.ended {
            let mut chunks: Vec<DeltaChunk> = self.last.take().into_iter().collect();
            match self.merged.next().await? {
                Some(entries) => {
                    let columns = entries.values.columns().to_vec();
                    let batch = new_batch(&self.layout.schema, columns, entries.values.num_rows())?;
                    chunks.push(DeltaChunk::new(batch, entries.weights));
                }
                None => self.ended = true,
            }
            if chunks.is_empty() {
                continue;
            }
            let chunk = DeltaChunk::concat(&self.layout.schema, &chunks)?;
            let vnodes = self.layout.vnodes(&chunk.batch)?;
            let keys = self.layout.keys(&chunk.batch, &vnodes)?;
            let rows = chunk.num_rows();
            let whole = match self.ended {
                true => rows,
                false => (0..rows)
                    .rev()
                    .find(|&r| keys.value(r) != keys.value(rows - 1))
                    .map_or(0, |r| r + 1),
            };
            if whole < rows {
                self.last = Some(chunk.slice(whole, rows - whole));
            }
            if whole > 0 {
                let (chunk, keys) = (chunk.slice(0, whole), keys.slice(0, whole));
                return Ok(Some(Part { chunk, keys, vnodes: vnodes[..whole].to_vec() }));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use arrow::array::{AsArray, Int64Array, RecordBatch};
    use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
    use millrace_common::RelationId;
    use millrace_common::access::AccessClass;
    use millrace_common::collections::HashSet;
    use millrace_graph::RelationLayout;
    use millrace_rpc::version::JobVersion;
    use millrace_storage::{RowStorage, StateStore, StoreOptions, TableDesc};
    use object_store::ObjectStore;
    use object_store::local::LocalFileSystem;
    use object_store::memory::InMemory;

    use super::*;

    const TABLE: TableId = TableId(1);
    /// More than one merged batch holds.
    const KEYS: i64 = 20_000;

    fn schema() -> SchemaRef {
        let field = |name| Field::new(name, DataType::Int64, false);
        Arc::new(Schema::new(vec![field("id"), field("v")]))
    }

    /// One row of every key.
    fn rows(value: i64, weight: i64) -> DeltaChunk {
        let ids = Int64Array::from_iter_values(0..KEYS);
        let values = Int64Array::from_value(value, KEYS as usize);
        let batch = RecordBatch::try_new(schema(), vec![Arc::new(ids), Arc::new(values)]).unwrap();
        DeltaChunk::new(batch, Some(Int64Array::from_value(weight, KEYS as usize)))
    }

    /// New rows come before the old ones they replace, and an intermediate one comes and goes: each key's
    /// old and new row are left, in one part.
    #[tokio::test]
    async fn pieces_add_up_and_no_key_is_torn() {
        let (job, layout) = job(Arc::new(InMemory::new())).await;
        let mut change = SpilledDelta::begin(&layout, &job, TABLE).unwrap();
        for (value, weight) in [(3, 1), (2, -1), (2, 1), (1, -1)] {
            change.add(vec![rows(value, weight)], 1 << 20).await.unwrap();
        }
        let mut parts = change.read().unwrap();
        let mut seen: HashSet<i64> = HashSet::default();
        let (mut count, mut sum) = (0, 0);
        while let Some(part) = parts.next().await.unwrap() {
            let column = |c: usize| part.chunk.batch.column(c).as_primitive::<Int64Type>().clone();
            let (ids, values) = (column(0), column(1));
            let of_part: HashSet<i64> = ids.values().iter().copied().collect();
            assert!(of_part.is_disjoint(&seen), "a key is in two parts");
            seen.extend(of_part);
            for row in 0..ids.len() {
                assert_eq!(part.chunk.weight(row), values.value(row) - 2, "+3 and −1 are left");
                sum += values.value(row);
            }
            count += 1;
        }
        assert!(count > 1, "one part proves nothing");
        assert_eq!((seen.len() as i64, sum), (KEYS, 4 * KEYS));
    }

    /// A job of one keyed table.
    async fn job(bucket: Arc<dyn ObjectStore>) -> (Arc<JobStore>, Arc<RowLayout>) {
        let table = TABLE;
        let desc = TableDesc {
            id: table,
            name: "v".into(),
            value_schema: schema(),
            storage: RowStorage::Keyed,
            class: AccessClass::RangeRead,
            relation: true,
            retention: None,
        };
        let options = StoreOptions::new(bucket, 1);
        let store = StateStore::open(options).await.unwrap();
        let version = JobVersion::default();
        let job = store.open_job(RelationId(20_000), vec![desc], &version).await.unwrap();
        let layout = RowLayout::of_output(&RelationLayout {
            schema: schema(),
            storage: RowStorage::Keyed,
            key: vec![0],
            distribution: vec![0],
            append_only: false,
            marks: Vec::new(),
        });
        (job, Arc::new(layout.unwrap()))
    }

    /// More views at a time than threads for files, of which a server has at least eight: each writer waits for the store,
    /// which needs such a thread.
    #[test]
    fn many_that_are_set_aside_leave_threads_for_the_store() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(8)
            .enable_all()
            .build()
            .unwrap();
        let directory = tempfile::tempdir().unwrap();
        let ended = runtime.block_on(async {
            let files = LocalFileSystem::new_with_prefix(directory.path()).unwrap();
            let (job, layout) = job(Arc::new(files)).await;
            let mut changes: Vec<SpilledDelta> =
                (0..12).map(|_| SpilledDelta::begin(&layout, &job, TABLE).unwrap()).collect();
            let all = changes.iter_mut().map(|change| change.add(vec![rows(3, 1)], 1 << 20));
            tokio::time::timeout(Duration::from_secs(60), futures::future::try_join_all(all)).await
        });
        runtime.shutdown_background();
        ended.expect("they wait for each other").unwrap();
    }
}
