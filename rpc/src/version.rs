//! A job's version: the runs, tail slices and positions that make it up at an epoch (§2, §9).

use crate::sequence::Sequence;
use crate::vnode_set;

/// Names of counters that hold from when on rows of a state table are kept begin with this.
pub const RETAIN: &str = "retain.";

/// Names of counters of rows that came too late begin with this.
pub const LATE: &str = "late.";

/// From when on rows of state tables are kept, by a job's counters: (table, microseconds).
pub fn cleaned(version: &JobVersion) -> Vec<(u32, i64)> {
    let bound =
        |(name, v): (&String, &u64)| Some((name.strip_prefix(RETAIN)?.parse().ok()?, *v as i64));
    version.counters.iter().filter_map(bound).collect()
}

/// Rows that were too late for a job's inputs, or for the table.
pub fn late_rows(version: &JobVersion) -> u64 {
    version.counters.iter().filter(|(name, _)| name.starts_with(LATE)).map(|(_, n)| n).sum()
}

/// The counter that holds from when on rows of a state table are kept, in microseconds.
pub fn retention_counter(table: u32) -> String {
    format!("{RETAIN}{table}")
}

/// Names of counters that number the rows of append-only tables begin with this.
pub const ARRIVALS: &str = "append.";

/// A run: an immutable sorted file of one state table, as a byte range of a segment object.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunMeta {
    /// Unique in the cluster, never reused.
    #[prost(uint64, tag = "1")]
    pub run_id: u64,
    #[prost(uint32, tag = "2")]
    pub table_id: u32,
    /// Object name below the store's prefix.
    #[prost(string, tag = "3")]
    pub object: String,
    #[prost(uint64, tag = "4")]
    pub offset: u64,
    /// Bytes of the whole run in the object, footer included.
    #[prost(uint64, tag = "5")]
    pub length: u64,
    /// Bytes of index, filter and footer at the run's end: what one read fetches to open it.
    #[prost(uint64, tag = "6")]
    pub meta_length: u64,
    /// 0: overlapping, newest last by `sequence`; 1 and up: sorted levels or tiers.
    #[prost(uint32, tag = "7")]
    pub level: u32,
    #[prost(uint64, tag = "8")]
    pub rows: u64,
    #[prost(bytes = "bytes", tag = "9")]
    pub min_key: prost::bytes::Bytes,
    #[prost(bytes = "bytes", tag = "10")]
    pub max_key: prost::bytes::Bytes,
    #[prost(uint64, tag = "11")]
    pub min_epoch: u64,
    #[prost(uint64, tag = "12")]
    pub max_epoch: u64,
    /// Entries that delete (tombstones, negative weights).
    #[prost(uint64, tag = "13")]
    pub tombstones: u64,
    /// The largest [`Sequence`] of what it holds. Orders runs of one level: a larger one was written later. Breaks ties
    /// of equal epochs.
    #[prost(uint64, tag = "14")]
    pub sequence: u64,
    /// The vnodes that its entries may have, as a [`vnode_set`](crate::vnode_set).
    #[prost(bytes = "bytes", tag = "15")]
    pub vnodes: prost::bytes::Bytes,
    /// Of a large run whose index is in partitions: the last `meta_length` bytes of the run, its top index, where they
    /// are few. Who has them need not read what opens the run. Empty: it is read.
    #[prost(bytes = "bytes", tag = "16")]
    pub top: prost::bytes::Bytes,
}

/// A committed epoch's delta of one job, not yet in runs: a byte range of a tail segment, or, when
/// very small, the bytes themselves (they ride in the log record).
#[derive(Clone, PartialEq, prost::Message)]
pub struct SliceRef {
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    /// Empty when `inline` holds the bytes.
    #[prost(string, tag = "2")]
    pub object: String,
    #[prost(uint64, tag = "3")]
    pub offset: u64,
    #[prost(uint64, tag = "4")]
    pub length: u64,
    #[prost(bytes = "bytes", tag = "5")]
    pub inline: prost::bytes::Bytes,
    /// Its [`Sequence`]. Orders slices of equal epoch (backfill commits share one).
    #[prost(uint64, tag = "6")]
    pub sequence: u64,
    /// The vnodes that its entries may have, as a [`vnode_set`](crate::vnode_set).
    #[prost(bytes = "bytes", tag = "7")]
    pub vnodes: prost::bytes::Bytes,
}

/// How far a job's first scan of one input has come.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BackfillPosition {
    /// Which input of the job's graph.
    #[prost(uint32, tag = "1")]
    pub input: u32,
    #[prost(uint32, tag = "2")]
    pub vnode: u32,
    /// The last storage key read; for a source, its offset as big-endian u64. Empty: nothing yet.
    #[prost(bytes = "bytes", tag = "3")]
    pub last_key: prost::bytes::Bytes,
    #[prost(bool, tag = "4")]
    pub done: bool,
}

/// Present while a job scans its inputs' snapshots. All inputs are read at one epoch.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BackfillState {
    #[prost(uint64, tag = "1")]
    pub snapshot_epoch: u64,
    #[prost(message, repeated, tag = "2")]
    pub positions: Vec<BackfillPosition>,
    #[prost(uint64, tag = "3")]
    pub rows_read: u64,
    /// Rows all snapshots hold together, for progress. 0: not known.
    #[prost(uint64, tag = "4")]
    pub rows_total: u64,
    /// Of a rebuild: everything is scanned, and the next commit brings the difference to the content before.
    #[prost(bool, tag = "5")]
    pub swap: bool,
}

/// A job that no longer follows its inputs, and why.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Detached {
    /// Of the record since which it is detached.
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    /// For people.
    #[prost(string, tag = "2")]
    pub reason: String,
}

/// The committed state of a job.
#[derive(Clone, PartialEq, prost::Message)]
pub struct JobVersion {
    /// The epoch through which all inputs are processed (a root: of its last change).
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    #[prost(message, repeated, tag = "3")]
    pub runs: Vec<RunMeta>,
    #[prost(message, repeated, tag = "4")]
    pub tail: Vec<SliceRef>,
    #[prost(message, optional, tag = "5")]
    pub backfill: Option<BackfillState>,
    /// Rows in the relation, kept by its writer.
    #[prost(int64, tag = "6")]
    pub row_count: i64,
    /// Counters a job persists with its epochs, by name (next row id, append sequence per task …).
    #[prost(btree_map = "string, uint64", tag = "7")]
    pub counters: std::collections::BTreeMap<String, u64>,
    /// How many commits have been taken; see [`JobCommit::number`].
    #[prost(uint64, tag = "8")]
    pub commits: u64,
    /// The relation's watermarks at `epoch`.
    #[prost(message, repeated, tag = "30")]
    pub watermarks: Vec<ColumnWatermark>,
    /// The watermarks, at `epoch`, of the sources it reads.
    #[prost(message, repeated, tag = "31")]
    pub source_watermarks: Vec<SourceWatermark>,
    /// The content changes by itself when this epoch comes (rows expire). 0: it does not.
    #[prost(uint64, tag = "32")]
    pub due: u64,
    /// Of a sink: what its target may not have yet, oldest first.
    #[prost(message, repeated, tag = "20")]
    pub publish: Vec<PublishHandle>,
    /// Of a sink: the target has every handle up to this sequence.
    #[prost(uint64, tag = "21")]
    pub published: u64,
    /// It does not follow its inputs.
    #[prost(message, optional, tag = "40")]
    pub detached: Option<Detached>,
    /// First of the state tables that the last rebuild was given; 0: never rebuilt. The rows that the relation is read
    /// from stay in the relation's first table.
    #[prost(uint32, tag = "41")]
    pub rebuilt_tables: u32,
    /// While a view or index is being rebuilt: the epoch of the content that it has meanwhile. 0: it is not.
    #[prost(uint64, tag = "42")]
    pub content_epoch: u64,
    /// The content's last epoch before the last rebuild took effect, and the epoch of that: in between there is none.
    #[prost(uint64, tag = "43")]
    pub swapped_from: u64,
    #[prost(uint64, tag = "44")]
    pub swapped_at: u64,
}

impl JobVersion {
    /// Whether its backfill computes the content of a view or index anew, beside what it has.
    pub fn is_rebuilding(&self) -> bool {
        self.content_epoch > 0
    }

    /// The state table that a table of the job's graph is, by its position, given the relation's first. Position 0 is
    /// where the job writes its result: in a rebuild a table beside the relation's rows.
    pub fn state_table(&self, first: u32, position: u32) -> u32 {
        match self.rebuilt_tables {
            0 => first + position,
            _ if position == 0 && !self.is_rebuilding() => first,
            rebuilt => rebuilt + position,
        }
    }

    /// The position in the job's graph of a state table of the job, given the relation's first and how many the graph
    /// has. In a rebuild the relation's rows are described as the table beside them is.
    pub fn graph_position(&self, first: u32, count: u32, table: u32) -> Option<u32> {
        match table == first {
            true => Some(0),
            false => (0..count).find(|position| self.state_table(first, *position) == table),
        }
    }
}

/// No later change of the relation has a smaller value in the column.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct ColumnWatermark {
    #[prost(uint32, tag = "1")]
    pub column: u32,
    /// Microseconds.
    #[prost(sint64, tag = "2")]
    pub value: i64,
}

/// The watermark of a source as one of its readers has computed it.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct SourceWatermark {
    #[prost(uint32, tag = "1")]
    pub source: u32,
    /// Microseconds.
    #[prost(sint64, tag = "2")]
    pub value: i64,
}

/// One commit's change of a sink, staged: it is brought to the target once the commit is in the log, and
/// again after a crash until a later record says that the target has it (§4, sinks). Target, sink and
/// sequence together make publishing idempotent.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PublishHandle {
    /// Counts a sink's commits that change something: 1, 2, 3 …
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// Net rows with their weights, in the order in which they apply.
    #[prost(message, repeated, tag = "3")]
    pub parts: Vec<SliceRef>,
    /// Rows in all parts.
    #[prost(uint64, tag = "4")]
    pub rows: u64,
    /// Part of a snapshot that is told as a whole: it is published together with the next change that is
    /// not held.
    #[prost(bool, tag = "5")]
    pub held: bool,
}

/// A change to a job's set of runs that changes no content: a flush or a compaction.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VersionEdit {
    #[prost(message, repeated, tag = "1")]
    pub add_runs: Vec<RunMeta>,
    #[prost(uint64, repeated, tag = "2")]
    pub remove_runs: Vec<u64>,
    /// Of flushes that earlier releases made: tail slices with a sequence up to this are now in `add_runs`. 0: none.
    #[prost(uint64, tag = "3")]
    pub flushed_sequence: u64,
    /// Of a flush.
    #[prost(message, optional, tag = "4")]
    pub flushed: Option<Flushed>,
}

/// What of a job's tail a flush holds: the tail's slices of all commits up to one, if it has all of their vnodes.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Flushed {
    /// The incarnation of the process that made it.
    #[prost(uint64, tag = "1")]
    pub writer: u64,
    /// [`JobCommit::number`] of the last commit that it holds everything of, as it does of all before. 0: of what was
    /// committed before commits were numbered.
    #[prost(uint64, tag = "2")]
    pub commit: u64,
    /// As a [`vnode_set`](crate::vnode_set).
    #[prost(bytes = "bytes", tag = "3")]
    pub vnodes: prost::bytes::Bytes,
}

impl VersionEdit {
    /// The largest sequence of what its flush holds; 0: it is none.
    pub fn flushed_to(&self) -> u64 {
        let flushed = self.flushed.as_ref().map_or(0, |f| Sequence::last_of(f.commit).get());
        flushed.max(self.flushed_sequence)
    }

    /// Whether a tail slice is now in its runs.
    pub fn retires(&self, slice: &SliceRef) -> bool {
        let covers = |f: &Flushed| vnode_set::covers(&f.vnodes, &slice.vnodes);
        slice.sequence <= self.flushed_to() && self.flushed.as_ref().is_none_or(covers)
    }
}

/// What a job's tasks made of one epoch; becomes the job's entry in a log record.
#[derive(Clone, PartialEq, prost::Message)]
pub struct JobCommit {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    /// Of entries without a number, which earlier releases wrote: the job's epoch before this one.
    #[prost(uint64, tag = "3")]
    pub prev_epoch: u64,
    /// Counts the job's commits, as the leader numbers them at the cut: one more than the version has taken, or the
    /// entry is void. So a void commit voids those that were cut after it, also where several have the same epoch
    /// (backfill) or none yet (tables), and one that comes twice is taken once.
    #[prost(uint64, tag = "13")]
    pub number: u64,
    /// 0 for a root: the record's own epoch.
    #[prost(uint64, tag = "4")]
    pub epoch: u64,
    #[prost(message, repeated, tag = "5")]
    pub slices: Vec<SliceRef>,
    #[prost(message, optional, tag = "6")]
    pub edit: Option<VersionEdit>,
    #[prost(message, optional, tag = "7")]
    pub backfill: Option<BackfillState>,
    /// Change of the relation's row count.
    #[prost(int64, tag = "8")]
    pub row_count_delta: i64,
    #[prost(btree_map = "string, uint64", tag = "9")]
    pub counters: std::collections::BTreeMap<String, u64>,
    /// Whether the relation's content changed: its readers have something to do.
    #[prost(bool, tag = "10")]
    pub changed: bool,
    /// Ids of the statements this epoch contains (frontend incarnation, number).
    #[prost(message, repeated, tag = "11")]
    pub statements: Vec<StatementId>,
    /// The epoch holds parts of transactions over several tables: it is committed with the epochs of
    /// these jobs, by one entry, or not at all. Between worker and meta only, never in the log.
    #[prost(message, optional, tag = "12")]
    pub group: Option<CommitGroup>,
    /// As in [`JobVersion`]; a column that is missing keeps its watermark.
    #[prost(message, repeated, tag = "30")]
    pub watermarks: Vec<ColumnWatermark>,
    #[prost(message, repeated, tag = "31")]
    pub source_watermarks: Vec<SourceWatermark>,
    #[prost(uint64, tag = "32")]
    pub due: u64,
    /// Of a sink: the change that this commit leaves to be published.
    #[prost(message, optional, tag = "20")]
    pub publish: Option<PublishHandle>,
    /// Of a sink: the target has every handle up to this sequence. 0: nothing new.
    #[prost(uint64, tag = "21")]
    pub published: u64,
}

impl JobCommit {
    /// Nothing to log: the tasks had nothing open, and nobody's epoch ends with theirs.
    pub fn is_empty(&self) -> bool {
        !self.changed
            && self.group.is_none()
            && self.slices.is_empty()
            && self.edit.is_none()
            && self.statements.is_empty()
            && self.counters.is_empty()
            && self.row_count_delta == 0
            && self.publish.is_none()
    }
}

/// Epochs of several tables that are committed together.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CommitGroup {
    /// Unique among the groups of the worker's life.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// First the one whose cut has ended the epochs of all.
    #[prost(message, repeated, tag = "2")]
    pub members: Vec<GroupMember>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct GroupMember {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    #[prost(uint64, tag = "2")]
    pub generation: u64,
}

/// Name of the counter with which a table commits how far it has taken in a split of its connector.
pub fn feed_counter(split: u32) -> String {
    format!("source.{split}")
}

/// Names a DML statement, so that after a failure its fate can be looked up (§4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
pub struct StatementId {
    #[prost(uint64, tag = "1")]
    pub frontend: u64,
    #[prost(uint64, tag = "2")]
    pub number: u64,
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    /// A failure here means that versions in logs and snapshots would not be readable. The bytes are written by hand from
    /// the protobuf encoding.
    #[test]
    fn golden_version_of_a_detached_and_rebuilt_job() {
        let version = JobVersion {
            epoch: 300,
            generation: 2,
            backfill: Some(BackfillState {
                snapshot_epoch: 9,
                swap: true,
                ..BackfillState::default()
            }),
            detached: Some(Detached { epoch: 8, reason: "r".into() }),
            rebuilt_tables: 7,
            content_epoch: 6,
            swapped_from: 5,
            swapped_at: 4,
            ..JobVersion::default()
        };
        let body = concat!(
            "08ac02",       // epoch
            "1002",         // generation
            "2a0408092801", // a backfill at 9, of a rebuild
            "c20205",
            "0808120172", // detached at 8, because r
            "c80207",     // its rebuilt tables,
            "d00206",     // its content meanwhile,
            "d80205",
            "e00204", // and the last swap, from 5 to 4
        );
        let bytes = version.encode_to_vec();
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, body);
        assert_eq!(JobVersion::decode(&bytes[..]).unwrap(), version);
    }

    #[test]
    fn a_state_table_is_found_in_the_graph_before_a_rebuild_in_it_and_after_it() {
        let version = |rebuilt_tables, content_epoch| JobVersion {
            rebuilt_tables,
            content_epoch,
            ..JobVersion::default()
        };
        let positions = |version: JobVersion| {
            [9, 10, 12, 13, 50, 52, 53].map(|table| version.graph_position(10, 3, table))
        };
        assert_eq!(positions(version(0, 0)), [None, Some(0), Some(2), None, None, None, None]);
        let rebuilding = [None, Some(0), None, None, Some(0), Some(2), None];
        assert_eq!(positions(version(50, 7)), rebuilding);
        assert_eq!(positions(version(50, 0)), [None, Some(0), None, None, None, Some(2), None]);
    }

    /// As releases wrote it whose slices and runs were counted, and not numbered by commit and part.
    #[test]
    fn golden_version_and_flush_with_counters() {
        let bytes = [
            0x08, 9, // epoch
            0x1a, 7, 0x08, 5, 0x10, 4, 0x70, 0xac, 0x02, // run 5 of table 4, counter 300
            0x22, 7, 0x08, 8, 0x2a, 1, b's', 0x30, 7, // a slice of epoch 8, counter 7
        ];
        let version = JobVersion::decode(&bytes[..]).unwrap();
        let run = RunMeta { run_id: 5, table_id: 4, sequence: 300, ..RunMeta::default() };
        let slice = SliceRef { epoch: 8, inline: "s".into(), sequence: 7, ..SliceRef::default() };
        let (runs, tail) = (vec![run], vec![slice.clone()]);
        assert_eq!(version, JobVersion { epoch: 9, runs, tail, ..JobVersion::default() });
        assert_eq!(version.encode_to_vec(), bytes);
        let flush = VersionEdit::decode(&[0x18, 7][..]).unwrap();
        assert_eq!((flush.flushed_to(), flush.retires(&slice)), (7, true));
        assert!(!flush.retires(&SliceRef { sequence: 8, ..slice.clone() }));
        let first = Sequence::new(1, 0).unwrap().get();
        assert!(!flush.retires(&SliceRef { sequence: first, ..slice }));
    }

    #[test]
    fn golden_flush_and_parts_of_a_commit() {
        let vnodes: prost::bytes::Bytes = vec![3; 32].into();
        let three = "03".repeat(32);
        let sequence = Sequence::new(5, 2).unwrap().get();
        let slice = SliceRef { sequence, vnodes: vnodes.clone(), ..SliceRef::default() };
        let run = RunMeta { sequence, vnodes: vnodes.clone(), ..RunMeta::default() };
        let flushed = Some(Flushed { writer: 6, commit: 5, vnodes });
        let edit = VersionEdit { add_runs: vec![run], flushed, ..VersionEdit::default() };
        assert!(edit.retires(&slice));
        let hex = |bytes: Vec<u8>| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        // 2^24 + 5 above the 20 bits of part 2.
        let sequence = "8280c082808004";
        assert_eq!(hex(slice.encode_to_vec()), format!("30{sequence}3a20{three}"));
        let run = format!("0a2a70{sequence}7a20{three}");
        assert_eq!(hex(edit.encode_to_vec()), format!("{run}2226080610051a20{three}"));
    }
}
