//! The meta log's durable formats (docs/design.md §10): numbered records and the snapshots that
//! cover them.
//!
//! A record is one object `meta/log/<n:020>`, created with a conditional put: an 8-byte header
//! (format version, CRC-32 of the rest), then a [`LogRecord`]. A snapshot `meta/snapshot/<n:020>`
//! has the same header, then a [`Snapshot`]: the fold of all records up to and including `n`.

use prost::bytes::{BufMut, Bytes, BytesMut};

use crate::catalog::{OptionEntry, Relation};
use crate::version::{ColumnWatermark, JobCommit, JobVersion, StatementId, VersionEdit};

/// Version of the header and of the messages below.
pub const FORMAT_VERSION: u32 = 1;
const HEADER: usize = 8;

/// One atomic step of the whole cluster's metadata.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LogRecord {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// Raised by every new leader; the fold ignores records of older terms.
    #[prost(uint64, tag = "2")]
    pub term: u64,
    /// Random, chosen by the leader when it starts: tells its own record from another's.
    #[prost(fixed64, tag = "3")]
    pub leader: u64,
    /// CRC-32 of the predecessor's bytes; 0 before the first.
    #[prost(fixed32, tag = "4")]
    pub prev_crc: u32,
    /// Assigned at the append; larger than all before it. The change epoch of every root in it.
    #[prost(uint64, tag = "5")]
    pub epoch: u64,
    #[prost(message, repeated, tag = "6")]
    pub entries: Vec<LogEntry>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LogEntry {
    #[prost(
        oneof = "Entry",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 20, 30, 40, 50, 60, 70, 71, 72, 73"
    )]
    pub entry: Option<Entry>,
}

/// What a record can say. Each is validated on its own; an invalid one is void and changes nothing.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Entry {
    #[prost(message, tag = "1")]
    CreateRelation(CreateRelation),
    #[prost(message, tag = "2")]
    DropRelations(DropRelations),
    #[prost(message, tag = "3")]
    CreateSchema(CreateSchema),
    #[prost(message, tag = "4")]
    DropSchema(DropSchema),
    #[prost(message, tag = "5")]
    Commit(JobCommit),
    #[prost(message, tag = "6")]
    EditVersion(EditVersion),
    #[prost(message, tag = "7")]
    RaiseGenerations(RaiseGenerations),
    #[prost(message, tag = "8")]
    SourceAdvance(SourceAdvance),
    #[prost(message, tag = "9")]
    SetSetting(SetSetting),
    #[prost(message, tag = "10")]
    DeleteObjects(DeleteObjects),
    #[prost(message, tag = "11")]
    StartBackfill(StartBackfill),
    #[prost(message, tag = "12")]
    Transaction(Transaction),
    #[prost(message, tag = "13")]
    Detach(Detach),
    #[prost(message, tag = "14")]
    Rebuild(Rebuild),
    #[prost(message, tag = "20")]
    SetUser(SetUser),
    #[prost(message, tag = "30")]
    Published(Published),
    #[prost(message, tag = "40")]
    AlterRelation(AlterRelation),
    #[prost(message, tag = "50")]
    Tick(Tick),
    #[prost(message, tag = "60")]
    MoveParts(MoveParts),
    #[prost(message, tag = "70")]
    RegisterProcess(RegisterProcess),
    #[prost(message, tag = "71")]
    FenceProcess(FenceProcess),
    #[prost(message, tag = "72")]
    PlaceJobs(PlaceJobs),
    #[prost(message, tag = "73")]
    GiveUp(GiveUp),
}

/// A process takes part from now on. The fold gives it the next incarnation, which names its objects and runs; the
/// same nonce again has the same incarnation.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct RegisterProcess {
    /// Random, chosen by the process when it starts. Not 0.
    #[prost(fixed64, tag = "1")]
    pub nonce: u64,
    /// What it does.
    #[prost(enumeration = "ProcessRole", repeated, tag = "2")]
    pub roles: Vec<i32>,
    /// Where others reach it; empty: nobody does.
    #[prost(string, tag = "3")]
    pub address: String,
}

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum ProcessRole {
    Unspecified = 0,
    Meta = 1,
    Frontend = 2,
    Compute = 3,
    Compactor = 4,
}

/// These processes are taken for dead, for good: what they have uploaded and not committed can never be committed. The
/// generations of the jobs placed on them rise.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct FenceProcess {
    /// Those that are fenced already are left out; one that was never given makes the entry void.
    #[prost(uint64, repeated, tag = "1")]
    pub incarnations: Vec<u64>,
}

/// These jobs run on this process from now on. The generations of those that ran elsewhere rise.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PlaceJobs {
    /// Void if it is fenced.
    #[prost(uint64, tag = "1")]
    pub incarnation: u64,
    /// Empty: all jobs.
    #[prost(uint32, repeated, tag = "2")]
    pub jobs: Vec<u32>,
}

/// Objects that their process has written and will never bring into the log: unless something names them already,
/// they are garbage.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct GiveUp {
    /// Void if it is fenced: then everything that nothing names is garbage.
    #[prost(uint64, tag = "1")]
    pub incarnation: u64,
    /// All of this incarnation.
    #[prost(string, repeated, tag = "2")]
    pub names: Vec<String>,
}

/// A live process in a snapshot.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ProcessSnapshot {
    #[prost(uint64, tag = "1")]
    pub incarnation: u64,
    #[prost(message, required, tag = "2")]
    pub registration: RegisterProcess,
    /// Of the record that registered it.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    #[prost(uint64, tag = "4")]
    pub number: u64,
}

/// What [`SetUser`] does to the user of that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum UserChange {
    Unspecified = 0,
    /// Void if it exists.
    Create = 1,
    /// Created if it does not exist: a built-in user has no entry before its first change.
    Alter = 2,
    /// Void if it does not exist.
    Drop = 3,
}

/// Creates, changes or removes a user.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SetUser {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(enumeration = "UserChange", tag = "2")]
    pub change: i32,
    /// SCRAM-SHA-256 verifier in PostgreSQL's form; none: the user has no password.
    #[prost(string, optional, tag = "3")]
    pub verifier: Option<String>,
}

/// A user in a snapshot.
#[derive(Clone, PartialEq, prost::Message)]
pub struct UserSnapshot {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, optional, tag = "2")]
    pub verifier: Option<String>,
}

/// Epochs of several tables that hold parts of one transaction: all of them are valid and take effect,
/// or none does.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Transaction {
    #[prost(message, repeated, tag = "1")]
    pub commits: Vec<JobCommit>,
}

/// The fold assigns `relation.id`, `first_table_id` and `created_epoch`, and fixes the snapshot
/// epoch of a derived relation's backfill when its inputs have one.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateRelation {
    #[prost(message, required, tag = "1")]
    pub relation: Relation,
    /// A plain view of this name is replaced in place and keeps its id.
    #[prost(bool, tag = "2")]
    pub or_replace: bool,
    /// The incarnation of the process that a job of the relation runs on. 0, or fenced: on none yet.
    #[prost(uint64, tag = "3")]
    pub process: u64,
}

/// All or none: void if a relation outside the list depends on one inside.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DropRelations {
    #[prost(uint32, repeated, tag = "1")]
    pub ids: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateSchema {
    #[prost(string, tag = "1")]
    pub name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct DropSchema {
    #[prost(string, tag = "1")]
    pub name: String,
    /// With everything in it and all that depends on that.
    #[prost(bool, tag = "2")]
    pub cascade: bool,
}

/// A flush or a compaction: other runs, same content.
#[derive(Clone, PartialEq, prost::Message)]
pub struct EditVersion {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    /// 0: any (compactions are valid while their input runs are there).
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    #[prost(message, required, tag = "3")]
    pub edit: VersionEdit,
    /// Versions below this epoch may be gone after the edit. 0: unchanged.
    #[prost(uint64, tag = "4")]
    pub horizon: u64,
}

/// Fences the running tasks of these jobs.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RaiseGenerations {
    /// Empty: all jobs (a new leader).
    #[prost(uint32, repeated, tag = "1")]
    pub jobs: Vec<u32>,
}

/// The source's content at the record's epoch ends at these offsets (exclusive).
#[derive(Clone, PartialEq, prost::Message)]
pub struct SourceAdvance {
    #[prost(uint32, tag = "1")]
    pub source: u32,
    #[prost(message, repeated, tag = "2")]
    pub offsets: Vec<SplitOffset>,
    /// Splits that leave or enter the minimum that is the source's watermark.
    #[prost(message, repeated, tag = "20")]
    pub marks: Vec<SplitMark>,
    /// Splits found since the last record.
    #[prost(message, repeated, tag = "10")]
    pub splits: Vec<SourceSplit>,
    /// Files found since the last record; each goes behind those its split has.
    #[prost(message, repeated, tag = "11")]
    pub files: Vec<SourceFile>,
}

/// A split becomes idle, or active (again).
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct SplitMark {
    #[prost(uint32, tag = "1")]
    pub split: u32,
    #[prost(bool, tag = "2")]
    pub idle: bool,
    /// Of a split that becomes active: the source's watermark before, in microseconds. Rows from here
    /// on that are older are late.
    #[prost(sint64, optional, tag = "3")]
    pub floor: Option<i64>,
}

/// A [`SplitMark`] as the fold keeps it.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct SplitMarkAt {
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    #[prost(message, required, tag = "2")]
    pub mark: SplitMark,
    /// The split's offset before: the floor holds for rows from here on.
    #[prost(uint64, tag = "3")]
    pub offset: u64,
}

/// A split that was discovered. One that is named by offsets only begins at 0.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SourceSplit {
    #[prost(uint32, tag = "1")]
    pub split: u32,
    /// As the outside calls it.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Offset of its first row.
    #[prost(uint64, tag = "3")]
    pub start: u64,
}

/// A file of a split. The split's offsets count through its files, in the order of their discovery.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SourceFile {
    #[prost(uint32, tag = "1")]
    pub split: u32,
    /// As the connector opens it.
    #[prost(string, tag = "2")]
    pub path: String,
    /// Bytes in the store, and what the store says changes with the content.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    #[prost(string, tag = "4")]
    pub version: String,
    /// Offsets it takes: its bytes, decompressed.
    #[prost(uint64, tag = "5")]
    pub length: u64,
    /// The split's offset at which it begins. Assigned by the fold.
    #[prost(uint64, tag = "6")]
    pub start: u64,
    /// When it was last written, in wall-clock milliseconds.
    #[prost(int64, tag = "7")]
    pub modified_ms: i64,
}

/// Changes options of a relation, or pauses and resumes a source.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AlterRelation {
    #[prost(uint32, tag = "1")]
    pub id: u32,
    /// Replace the options of these names.
    #[prost(message, repeated, tag = "2")]
    pub options: Vec<OptionEntry>,
    #[prost(bool, optional, tag = "3")]
    pub paused: Option<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct SplitOffset {
    #[prost(uint32, tag = "1")]
    pub split: u32,
    #[prost(uint64, tag = "2")]
    pub offset: u64,
}

/// An empty value resets to the default.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SetSetting {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, optional, tag = "2")]
    pub value: Option<String>,
}

/// These objects are about to be deleted and can never be referenced again.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeleteObjects {
    #[prost(string, repeated, tag = "1")]
    pub names: Vec<String>,
}

/// The inputs of a job created over unfinished inputs are ready: fix its snapshot epoch.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StartBackfill {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    #[prost(uint64, tag = "2")]
    pub generation: u64,
}

/// The job has left its inputs' changes unread for too long: they are kept for it no longer, and it ends until it is
/// rebuilt. What it had computed stays readable.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Detach {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    /// Void if another one runs by now.
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    /// For people.
    #[prost(string, tag = "3")]
    pub reason: String,
}

/// The job computes its result anew, from a snapshot of its inputs. A view or index keeps its content meanwhile and
/// changes, when it is done, by the difference; a sink begins with another snapshot.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Rebuild {
    #[prost(uint32, tag = "1")]
    pub job: u32,
}

/// Moves the head, so that epochs follow the clock where some relation's content does.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Tick {}

/// Runs, slices and staged changes lie in another object from now on, byte for byte: the objects that they lay in held
/// little else that is alive.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MoveParts {
    /// Where they lie now.
    #[prost(string, tag = "1")]
    pub object: String,
    /// Parts that nothing names any more have no effect.
    #[prost(message, repeated, tag = "2")]
    pub parts: Vec<MovedPart>,
}

/// A byte range of an object, and where its copy begins in another one.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct MovedPart {
    /// The job whose version names it.
    #[prost(uint32, tag = "1")]
    pub job: u32,
    /// Where it lay.
    #[prost(string, tag = "2")]
    pub from_object: String,
    #[prost(uint64, tag = "3")]
    pub from_offset: u64,
    #[prost(uint64, tag = "4")]
    pub length: u64,
    /// Where it begins in the new object.
    #[prost(uint64, tag = "5")]
    pub offset: u64,
}

/// A sink's target has everything up to this sequence.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Published {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    #[prost(uint64, tag = "3")]
    pub sequence: u64,
}

/// The fold's whole state.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Snapshot {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// CRC-32 of record `number`'s bytes.
    #[prost(fixed32, tag = "2")]
    pub crc: u32,
    #[prost(uint64, tag = "3")]
    pub term: u64,
    #[prost(fixed64, tag = "4")]
    pub leader: u64,
    #[prost(uint64, tag = "5")]
    pub epoch: u64,
    #[prost(uint32, tag = "6")]
    pub next_relation_id: u32,
    #[prost(uint32, tag = "7")]
    pub next_table_id: u32,
    #[prost(string, repeated, tag = "8")]
    pub schemas: Vec<String>,
    #[prost(message, repeated, tag = "9")]
    pub relations: Vec<Relation>,
    #[prost(message, repeated, tag = "10")]
    pub jobs: Vec<JobSnapshot>,
    #[prost(message, repeated, tag = "11")]
    pub sources: Vec<SourceSnapshot>,
    #[prost(btree_map = "string, string", tag = "12")]
    pub settings: std::collections::BTreeMap<String, String>,
    /// Objects no version names any more, with the epoch since when.
    #[prost(btree_map = "string, uint64", tag = "13")]
    pub garbage: std::collections::BTreeMap<String, u64>,
    /// Names of live processes whose deletion is logged.
    #[prost(message, repeated, tag = "14")]
    pub deleted: Vec<CounterRange>,
    /// The newest statements committed, oldest first.
    #[prost(message, repeated, tag = "15")]
    pub statements: Vec<CommittedStatement>,
    #[prost(message, repeated, tag = "30")]
    pub users: Vec<UserSnapshot>,
    /// The newest incarnation that was given; 0: none was, and terms named objects.
    #[prost(uint64, tag = "40")]
    pub last_incarnation: u64,
    /// Those that are not fenced.
    #[prost(message, repeated, tag = "41")]
    pub processes: Vec<ProcessSnapshot>,
    /// Nonces of the processes that were fenced last, oldest first.
    #[prost(fixed64, repeated, tag = "42")]
    pub fenced_nonces: Vec<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct JobSnapshot {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    #[prost(message, required, tag = "2")]
    pub version: JobVersion,
    #[prost(message, required, tag = "3")]
    pub timeline: TimelineSnapshot,
    #[prost(uint64, tag = "4")]
    pub horizon: u64,
    /// The relations it reads, as they were when it was created.
    #[prost(uint32, repeated, tag = "5")]
    pub inputs: Vec<u32>,
    /// The incarnation of the process that it runs on; 0: none.
    #[prost(uint64, tag = "6")]
    pub process: u64,
    /// Its watermarks over time.
    #[prost(message, repeated, tag = "20")]
    pub watermarks: Vec<WatermarksAt>,
}

/// A relation's watermarks from an epoch on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct WatermarksAt {
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    #[prost(message, repeated, tag = "2")]
    pub columns: Vec<ColumnWatermark>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct SourceSnapshot {
    #[prost(uint32, tag = "1")]
    pub source: u32,
    #[prost(message, repeated, tag = "2")]
    pub history: Vec<SourcePosition>,
    #[prost(message, required, tag = "3")]
    pub timeline: TimelineSnapshot,
    #[prost(message, repeated, tag = "10")]
    pub splits: Vec<SourceSplit>,
    #[prost(message, repeated, tag = "11")]
    pub files: Vec<SourceFile>,
    /// In the order they were logged.
    #[prost(message, repeated, tag = "20")]
    pub marks: Vec<SplitMarkAt>,
}

/// A source's content from an epoch on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SourcePosition {
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    #[prost(message, repeated, tag = "2")]
    pub offsets: Vec<SplitOffset>,
}

/// Segments of constant, exact content: `lo` and `hi` of each, inclusive, ascending. Of the last, which is open,
/// `hi` is the newest commit that left the content as it was.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TimelineSnapshot {
    /// As earlier releases stored them; read where there are no `steps`, and not written.
    #[prost(uint64, repeated, tag = "1")]
    pub bounds: Vec<u64>,
    /// The bounds, each as its distance from the one before, the first from 0.
    #[prost(uint64, repeated, tag = "3")]
    pub steps: Vec<u64>,
    /// Epoch of the newest change; 0: never.
    #[prost(uint64, tag = "2")]
    pub last_change: u64,
    /// Per segment the bytes of change through its beginning, each as its distance from the one before, the first
    /// from 0. None: an earlier release stored the segments and did not count.
    #[prost(uint64, repeated, tag = "4")]
    pub volumes: Vec<u64>,
    /// From here on bytes are counted.
    #[prost(uint64, tag = "5")]
    pub measured_since: u64,
}

/// Object counters `from ..= to` of one incarnation.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct CounterRange {
    #[prost(uint64, tag = "1")]
    pub incarnation: u64,
    #[prost(uint64, tag = "2")]
    pub from: u64,
    #[prost(uint64, tag = "3")]
    pub to: u64,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct CommittedStatement {
    #[prost(message, required, tag = "1")]
    pub id: StatementId,
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
}

/// Why stored bytes are not a record or snapshot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("the object is shorter than its header")]
    Short,
    #[error("format version {0} is not known to this server")]
    Version(u32),
    #[error("the checksum does not match")]
    Checksum,
    #[error("the message cannot be decoded: {0}")]
    Decode(String),
}

/// Header and message as stored. `crc` computes CRC-32 (IEEE).
pub fn encode_frame<M: prost::Message>(message: &M, crc: impl Fn(&[u8]) -> u32) -> Bytes {
    let mut out = BytesMut::with_capacity(HEADER + message.encoded_len());
    out.put_u32(FORMAT_VERSION);
    out.put_u32(0);
    // Infallible: a BytesMut grows.
    let _ = message.encode(&mut out);
    let sum = crc(&out[HEADER..]);
    out[4..HEADER].copy_from_slice(&sum.to_be_bytes());
    out.freeze()
}

/// The message of stored bytes, after checking header and checksum.
pub fn decode_frame<M: prost::Message + Default>(
    bytes: &[u8],
    crc: impl Fn(&[u8]) -> u32,
) -> Result<M, FrameError> {
    let (header, body) = bytes.split_at_checked(HEADER).ok_or(FrameError::Short)?;
    let word = |at: usize| {
        u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    if word(0) != FORMAT_VERSION {
        return Err(FrameError::Version(word(0)));
    }
    if word(4) != crc(body) {
        return Err(FrameError::Checksum);
    }
    M::decode(body).map_err(|e| FrameError::Decode(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In place of CRC-32: the sum of the bytes.
    fn sum(bytes: &[u8]) -> u32 {
        bytes.iter().map(|b| u32::from(*b)).sum()
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// A failure here means that logs would not be readable: give the new format a new version and keep reading
    /// the old one. The bytes are written by hand from the protobuf encoding.
    #[test]
    fn golden_log_record() {
        let set = SetSetting { name: "a".into(), value: Some("b".into()) };
        let record = LogRecord {
            number: 1,
            term: 2,
            leader: 3,
            prev_crc: 4,
            epoch: 300,
            entries: vec![LogEntry { entry: Some(Entry::SetSetting(set)) }],
        };
        let body = concat!(
            "0801",               // number
            "1002",               // term
            "190300000000000000", // leader
            "2504000000",         // predecessor's CRC
            "28ac02",             // epoch
            "3208",
            "4a06",
            "0a0161",
            "120162", // one entry: SetSetting a = b
        );
        let bytes = encode_frame(&record, sum);
        assert_eq!(hex(&bytes[..4]), "00000001", "the format version");
        assert_eq!(u32::from_be_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]), sum(&bytes[8..]));
        assert_eq!(hex(&bytes[8..]), body);
        assert_eq!(decode_frame::<LogRecord>(&bytes, sum).unwrap(), record);
    }

    /// As above.
    #[test]
    fn golden_entries_of_detached_and_rebuilt_jobs() {
        use prost::Message;
        let entries = [
            Entry::Detach(Detach { job: 7, generation: 3, reason: "r".into() }),
            Entry::Rebuild(Rebuild { job: 7 }),
        ];
        let bytes = entries.map(|entry| hex(&LogEntry { entry: Some(entry) }.encode_to_vec()));
        assert_eq!(bytes, ["6a0708071003".to_owned() + "1a0172", "72020807".to_owned()]);
    }

    /// As above.
    #[test]
    fn golden_entry_of_moved_parts() {
        use prost::Message;
        let part =
            MovedPart { job: 7, from_object: "a".into(), from_offset: 300, length: 5, offset: 6 };
        let moved = Entry::MoveParts(MoveParts { object: "b".into(), parts: vec![part] });
        let body = concat!(
            "e20311", "0a0162", // the new object
            "120c",   // one part
            "0807",   // of job 7,
            "120161", // which lay in object a
            "18ac02", // from 300 on,
            "2005",   // 5 bytes long,
            "2806",   // and begins at 6 now
        );
        let bytes = LogEntry { entry: Some(moved.clone()) }.encode_to_vec();
        assert_eq!(hex(&bytes), body);
        let read = LogEntry::decode(&bytes[..]).unwrap();
        assert_eq!(read.entry, Some(moved));
    }

    /// As above.
    #[test]
    fn golden_entries_of_processes() {
        use prost::Message;
        let roles = vec![ProcessRole::Meta as i32, ProcessRole::Compute as i32];
        let entries = [
            Entry::RegisterProcess(RegisterProcess { nonce: 1, roles, address: "a".into() }),
            Entry::FenceProcess(FenceProcess { incarnations: vec![7, 300] }),
            Entry::PlaceJobs(PlaceJobs { incarnation: 7, jobs: vec![5, 6] }),
            Entry::GiveUp(GiveUp { incarnation: 7, names: vec!["n".into()] }),
        ];
        let expected = [
            "b20410".to_owned() + "090100000000000000" + "12020103" + "1a0161",
            "ba0405".to_owned() + "0a0307ac02",
            "c20406".to_owned() + "0807" + "12020506",
            "ca0405".to_owned() + "0807" + "12016e",
        ];
        for (entry, expected) in entries.into_iter().zip(expected) {
            let bytes = LogEntry { entry: Some(entry.clone()) }.encode_to_vec();
            assert_eq!(hex(&bytes), expected);
            assert_eq!(LogEntry::decode(&bytes[..]).unwrap().entry, Some(entry));
        }
    }

    /// As above.
    #[test]
    fn golden_snapshot_of_processes() {
        use prost::Message;
        let registration = RegisterProcess { nonce: 1, roles: vec![3], address: String::new() };
        let process = ProcessSnapshot { incarnation: 7, registration, epoch: 300, number: 5 };
        let snapshot = Snapshot {
            last_incarnation: 8,
            processes: vec![process],
            fenced_nonces: vec![2],
            ..Snapshot::default()
        };
        let body = concat!(
            "c00208", // the newest incarnation
            "ca0215",
            "0807", // incarnation 7
            "120c",
            "090100000000000000",
            "120103", // nonce 1, a compute process
            "18ac02",
            "2005",                   // registered at 300, by record 5
            "d202080200000000000000", // nonce 2 is fenced
        );
        let bytes = snapshot.encode_to_vec();
        let body_at = bytes.len() - body.len() / 2;
        assert_eq!(hex(&bytes[body_at..]), body);
        assert_eq!(Snapshot::decode(&bytes[..]).unwrap(), snapshot);
    }

    #[test]
    fn golden_log_snapshot() {
        let snapshot = Snapshot {
            number: 1,
            crc: 2,
            term: 3,
            leader: 4,
            epoch: 300,
            next_relation_id: 5,
            next_table_id: 6,
            schemas: vec!["s".into()],
            settings: [("a".to_string(), "b".to_string())].into(),
            garbage: [("o".to_string(), 7)].into(),
            sources: vec![SourceSnapshot {
                source: 8,
                timeline: TimelineSnapshot {
                    steps: vec![300, 1],
                    volumes: vec![5],
                    last_change: 9,
                    ..TimelineSnapshot::default()
                },
                ..SourceSnapshot::default()
            }],
            ..Snapshot::default()
        };
        let body = concat!(
            "0801",               // number
            "1502000000",         // the record's CRC
            "1803",               // term
            "210400000000000000", // leader
            "28ac02",             // epoch
            "3005",
            "3806",   // next ids
            "420173", // schema s
            "5a0e",
            "0808",
            "1a0a",
            "1009",
            "1a03ac0201", // source 8: changed at 9, one segment from 300 to 301
            "220105",     // which begins after 5 bytes of change
            "6206",
            "0a0161",
            "120162", // setting a = b
            "6a05",
            "0a016f",
            "1007", // garbage o since 7
        );
        let bytes = encode_frame(&snapshot, sum);
        assert_eq!(hex(&bytes[8..]), body);
        assert_eq!(decode_frame::<Snapshot>(&bytes, sum).unwrap(), snapshot);
    }

    #[test]
    fn bytes_that_are_no_record_are_refused_by_what_is_wrong() {
        let bytes = encode_frame(&LogRecord { number: 1, ..LogRecord::default() }, sum);
        let read = |bytes: &[u8]| decode_frame::<LogRecord>(bytes, sum).unwrap_err();
        assert_eq!(read(&bytes[..7]), FrameError::Short);
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes.to_vec();
            bytes[at] = byte;
            bytes
        };
        assert_eq!(read(&with(3, 2)), FrameError::Version(2));
        assert_eq!(read(&with(9, 2)), FrameError::Checksum);
        // A field whose value is missing, under a sum that is right.
        let body = [0x08];
        let frame: Vec<u8> = [&[0, 0, 0, 1, 0, 0, 0, 8][..], &body].concat();
        assert!(matches!(read(&frame), FrameError::Decode(_)));
    }
}
