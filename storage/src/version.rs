//! What a job's state consists of at a moment: an immutable [`Version`], swapped whole. Whoever holds
//! one reads a consistent state without locks, however long it takes.
//!
//! Memory runs and disk runs are ordered by [`Sequence`](millrace_rpc::sequence::Sequence), that is by commit and part:
//! of two entries with equal key and epoch (the commits of a backfill share one), the larger sequence was written later.
//! Only neighbours in that order may be merged, so a table counts *groups*: a flush boundary, or a commit that went
//! straight into disk runs, starts a new group, and merges stay inside one.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use millrace_common::{Epoch, TableId};
use millrace_rpc::version::{RunMeta, SliceRef, VersionEdit};

use crate::block::BlockCodec;
use crate::error::StorageError;
use crate::memrun::{MemRun, SealId};
use crate::pins::ObjectPins;
use crate::read_counts::ReadCounts;
use crate::run::RunReader;
use crate::table::TableDesc;
use crate::ttl_filter::Retain;

mod invariants;

pub(crate) use invariants::check_rewrite;

#[derive(Clone, Debug)]
pub(crate) struct TableVersion {
    pub desc: Arc<TableDesc>,
    pub codec: Arc<BlockCodec>,
    /// Committed, oldest first.
    pub mem: Vec<MemRun>,
    pub disk: Vec<Arc<RunReader>>,
    /// How often these are read.
    pub reads: Arc<ReadCounts>,
    /// The newest committed seal of each writer.
    committed: Vec<SealId>,
    /// Of memory runs published from now on.
    pub group: u64,
    /// From when on entries are kept, where the table is cleaned.
    pub retain: Option<Retain>,
}

impl TableVersion {
    pub fn new(desc: Arc<TableDesc>) -> TableVersion {
        let codec = Arc::new(BlockCodec::new(&desc.value_schema));
        TableVersion {
            desc,
            codec,
            mem: Vec::new(),
            disk: Vec::new(),
            reads: Arc::default(),
            committed: Vec::new(),
            group: 0,
            retain: None,
        }
    }

    /// The value schema as stored: every field nullable.
    pub fn schema(&self) -> &SchemaRef {
        self.codec.value_schema()
    }

    /// Whether the version holds what this seal made.
    pub fn has_committed(&self, seal: SealId) -> bool {
        self.committed.iter().any(|c| c.writer == seal.writer && c.seal >= seal.seal)
    }

    fn commit(&mut self, seal: SealId) {
        match self.committed.iter_mut().find(|c| c.writer == seal.writer) {
            Some(known) => known.seal = known.seal.max(seal.seal),
            None => self.committed.push(seal),
        }
    }

    pub fn mem_bytes(&self) -> usize {
        self.mem.iter().map(MemRun::memory_size).sum()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Version {
    /// Of the last publish.
    pub epoch: Epoch,
    /// Of the last part of the last published commit.
    pub sequence: u64,
    /// What is up to this is in disk runs.
    pub flushed_sequence: u64,
    /// Snapshots below this may miss versions.
    pub horizon: Epoch,
    tables: BTreeMap<TableId, Arc<TableVersion>>,
    pins: Arc<ObjectPins>,
}

impl Version {
    pub fn new(tables: impl IntoIterator<Item = TableDesc>, pins: Arc<ObjectPins>) -> Version {
        let tables = tables
            .into_iter()
            .map(|desc| (desc.id, Arc::new(TableVersion::new(Arc::new(desc)))))
            .collect();
        Version {
            epoch: Epoch::ZERO,
            sequence: 0,
            flushed_sequence: 0,
            horizon: Epoch::ZERO,
            tables,
            pins,
        }
    }

    pub fn table(&self, id: TableId) -> Result<&Arc<TableVersion>, StorageError> {
        self.tables.get(&id).ok_or_else(|| {
            StorageError::internal(format!("state table {id} is not part of the job"))
        })
    }

    pub fn tables(&self) -> impl Iterator<Item = &Arc<TableVersion>> {
        self.tables.values()
    }

    pub fn tables_mut(&mut self) -> impl Iterator<Item = &mut TableVersion> {
        self.tables.values_mut().map(Arc::make_mut)
    }

    pub fn table_mut(&mut self, id: TableId) -> Option<&mut TableVersion> {
        self.tables.get_mut(&id).map(Arc::make_mut)
    }

    pub fn mem_bytes(&self) -> usize {
        self.tables().map(|t| t.mem_bytes()).sum()
    }

    /// Level-0 runs of a table that are newer than some memory run, at most: compaction must wait for
    /// that to be flushed, because it lies between them.
    pub fn held_back_runs(&self) -> usize {
        let mem = self.tables().filter_map(|t| Some(t.mem.first()?.min_sequence));
        let Some(oldest) = mem.min() else { return 0 };
        let newer = |t: &Arc<TableVersion>| {
            t.disk.iter().filter(|r| r.meta().level == 0 && r.meta().sequence > oldest).count()
        };
        self.tables().map(newer).max().unwrap_or(0)
    }

    /// Adds a commit's memory runs, visible at `epoch`.
    pub fn add_runs(&mut self, epoch: Epoch, sequence: u64, runs: &[MemRun]) {
        for run in runs {
            if let Some(table) = self.table_mut(run.table) {
                table.commit(run.seal);
                table.mem.push(run.at(epoch, sequence, table.group));
            }
        }
    }

    /// The committed runs and decoded tail slices of a job, as they were when it was last seen: slices
    /// that went around a disk run of the same table are in different groups.
    pub fn load(&mut self, runs: &[RunMeta], tail: &[SliceRef], slices: Vec<Vec<MemRun>>) {
        self.apply(&VersionEdit { add_runs: runs.to_vec(), ..VersionEdit::default() });
        let newest = runs.iter().map(|r| r.sequence).chain(tail.iter().map(|s| s.sequence)).max();
        self.sequence = newest.unwrap_or(0);
        let mut breaks: Vec<u64> = runs.iter().map(|r| r.sequence).collect();
        breaks.sort_unstable();
        let mut group = 0;
        for (slice, mem) in tail.iter().zip(slices) {
            let after = breaks.partition_point(|b| *b < slice.sequence);
            if after != group {
                group = after;
                self.seal_groups();
            }
            self.add_runs(Epoch(slice.epoch), slice.sequence, &mem);
        }
        if breaks.len() > group {
            // What is committed from now on comes after these runs, the slices before them.
            self.seal_groups();
        }
    }

    /// Notes that these seals are committed in disk runs of an edit.
    pub fn commit_seals(&mut self, seals: &[(TableId, SealId)]) {
        for &(id, seal) in seals {
            if let Some(table) = self.table_mut(id) {
                table.commit(seal);
            }
        }
    }

    /// Those of these disk runs that are here.
    pub fn runs(&self, ids: &[u64]) -> Vec<Arc<RunReader>> {
        let disk = self.tables().flat_map(|t| &t.disk);
        disk.filter(|r| ids.contains(&r.meta().run_id)).cloned().collect()
    }

    /// Swaps runs; drops memory runs that the edit's runs now hold.
    pub fn apply(&mut self, edit: &VersionEdit) {
        let pins = Arc::clone(&self.pins);
        let flushed = edit.flushed_to();
        self.flushed_sequence = self.flushed_sequence.max(flushed);
        for table in self.tables_mut() {
            table.mem.retain(|m| m.max_sequence > flushed);
            table.disk.retain(|r| !edit.remove_runs.contains(&r.meta().run_id));
        }
        for run in &edit.add_runs {
            if let Some(table) = self.table_mut(TableId(run.table_id))
                && table.disk.iter().all(|r| r.meta().run_id != run.run_id)
            {
                table.disk.push(Arc::new(RunReader::pinned(
                    run.clone(),
                    Arc::clone(&table.codec),
                    &pins,
                )));
                table.group += 1;
            }
        }
    }

    /// Runs for which `moves` gives an offset lie there in `object`: the same bytes.
    pub fn move_runs(&mut self, object: &str, moves: impl Fn(&RunMeta) -> Option<u64>) {
        let pins = Arc::clone(&self.pins);
        for table in self.tables_mut() {
            for run in &mut table.disk {
                let Some(offset) = moves(run.meta()) else { continue };
                let meta = RunMeta { object: object.to_owned(), offset, ..run.meta().clone() };
                *run = Arc::new(RunReader::pinned(meta, Arc::clone(&table.codec), &pins));
            }
        }
    }

    /// Memory runs published from now on are never merged with those already there.
    pub fn seal_groups(&mut self) {
        self.tables_mut().for_each(|t| t.group += 1);
    }
}
