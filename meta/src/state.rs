//! The state that the log folds to (docs/design.md §10): catalog, versions, positions, settings.
//!
//! It is a value: two folds of the same records are equal, and a [`Snapshot`] is the same state in
//! bytes. Large parts sit behind `Arc`, so that a clone for a snapshot or a reader is cheap.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use millrace_common::collections::HashMap;
use millrace_common::{Epoch, RelationId};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::{
    CommittedStatement, JobSnapshot, Snapshot, SourcePosition, SourceSnapshot, SplitMarkAt,
    SplitOffset, UserSnapshot, WatermarksAt,
};
use millrace_rpc::services::SourceParts;
use millrace_rpc::store_id::{self, StoreId};
use millrace_rpc::version::{ColumnWatermark, JobVersion, StatementId};

use crate::backup::named::Backups;
use crate::catalog::without_views;
use crate::definitions::Definitions;
use crate::dependencies::Dependencies;
use crate::jobs::Jobs;
use crate::objects::Objects;
use crate::processes::Processes;
use crate::timeline::Timeline;

/// First id of a user's relation, as in PostgreSQL.
pub const FIRST_RELATION_ID: u32 = 16_384;
/// State table 0 is nobody's.
const FIRST_TABLE_ID: u32 = 1;
/// Statements whose fate can be looked up.
const STATEMENTS_KEPT: usize = 4_096;
/// Schemas that are always there.
pub const DEFAULT_SCHEMA: &str = "public";

/// The committed state of one job and what is known of its content over time.
#[derive(Clone, Debug, PartialEq)]
pub struct JobRecord {
    pub version: Arc<JobVersion>,
    pub timeline: Timeline,
    /// The relations with content of their own that it reads: fixed at its creation, plain views
    /// expanded. Replacing a view does not change the jobs planned over it. Roots: none.
    pub inputs: Vec<RelationId>,
    /// The incarnation of the process that it runs on; 0: none. A job that is placed elsewhere has a higher generation.
    pub process: u64,
    /// An operator has had it placed there: it stays while that process takes jobs.
    pub by_operator: bool,
    /// Versions below may be gone.
    pub horizon: Epoch,
    /// Its watermarks over time, ascending; each holds until the next.
    pub watermarks: VecDeque<(Epoch, Vec<ColumnWatermark>)>,
}

impl JobRecord {
    /// The watermarks as of an epoch.
    pub fn watermarks_at(&self, epoch: Epoch) -> &[ColumnWatermark] {
        let after = self.watermarks.partition_point(|(e, _)| *e <= epoch);
        let found = after.checked_sub(1).and_then(|at| self.watermarks.get(at));
        found.map_or(&[], |(_, columns)| columns)
    }
}

/// Where a source's content ends, over time.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceRecord {
    pub history: VecDeque<(Epoch, Vec<SplitOffset>)>,
    pub timeline: Timeline,
    /// Splits that became idle or active, in the order of the log.
    pub marks: Vec<SplitMarkAt>,
    /// The splits and files found so far.
    pub parts: SourceParts,
}

impl SourceRecord {
    /// The offsets fixed at or before `epoch`; none before the first.
    pub fn offsets_at(&self, epoch: Epoch) -> &[SplitOffset] {
        let after = self.history.partition_point(|(e, _)| *e <= epoch);
        match after.checked_sub(1).and_then(|at| self.history.get(at)) {
            Some((_, offsets)) => offsets,
            None => &[],
        }
    }

    /// The first offset of a split, beyond this one, at which an epoch ends.
    pub fn next_end(&self, split: u32, offset: u64) -> Option<u64> {
        // They are in the order of the splits, but for records of old versions.
        let find = |offsets: &[SplitOffset]| {
            let found = offsets.binary_search_by_key(&split, |o| o.split).ok();
            found.or_else(|| offsets.iter().position(|o| o.split == split))
        };
        let end = |offsets: &[SplitOffset]| find(offsets).map(|at| offsets[at].offset);
        let passed = |(_, offsets): &(Epoch, Vec<SplitOffset>)| end(offsets) <= Some(offset);
        end(&self.history.get(self.history.partition_point(passed))?.1)
    }

    /// Whether a split is idle, by the newest mark.
    pub fn is_idle(&self, split: u32) -> bool {
        self.marks.iter().rev().find(|m| m.mark.split == split).is_some_and(|m| m.mark.idle)
    }

    pub fn newest(&self) -> &[SplitOffset] {
        self.history.back().map_or(&[], |(_, offsets)| offsets)
    }
}

/// The newest statements and their epochs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Statements {
    order: VecDeque<(StatementId, Epoch)>,
    by_id: HashMap<StatementId, Epoch>,
}

impl Statements {
    pub fn insert(&mut self, id: StatementId, epoch: Epoch) {
        if self.by_id.insert(id, epoch).is_some() {
            return;
        }
        self.order.push_back((id, epoch));
        if self.order.len() > STATEMENTS_KEPT
            && let Some((old, _)) = self.order.pop_front()
        {
            self.by_id.remove(&old);
        }
    }

    pub fn get(&self, id: StatementId) -> Option<Epoch> {
        self.by_id.get(&id).copied()
    }

    /// Whether every statement that was committed after this epoch is still here.
    pub fn has_all_after(&self, epoch: Epoch) -> bool {
        self.order.len() < STATEMENTS_KEPT
            || self.order.front().is_some_and(|(_, oldest)| *oldest <= epoch)
    }
}

/// The fold of all records up to `number`.
#[derive(Clone, Debug, PartialEq)]
pub struct MetaState {
    /// Number of the last record folded; 0: none.
    pub number: u64,
    /// CRC-32 of that record's bytes.
    pub crc: u32,
    pub term: u64,
    pub leader: u64,
    /// The head: epoch of the last record.
    pub epoch: Epoch,
    /// Of the store that this is the log of. `None`: no record has given it one yet, because there is none, or no leader
    /// that knows of ids has claimed the store.
    pub store_id: Option<StoreId>,
    pub next_relation_id: u32,
    pub next_table_id: u32,
    pub schemas: BTreeSet<String>,
    pub relations: BTreeMap<RelationId, Arc<Relation>>,
    pub jobs: Jobs,
    pub sources: BTreeMap<RelationId, SourceRecord>,
    pub settings: BTreeMap<String, String>,
    /// Users that were created or changed, and their SCRAM verifiers.
    pub users: BTreeMap<String, Option<String>>,
    pub objects: Objects,
    pub processes: Processes,
    pub backups: Backups,
    pub statements: Statements,
    pub definitions: Definitions,
    /// Number of the last record that has changed relations, schemas, users or settings. Not part of a snapshot: of a state
    /// that was read from one it is the snapshot's number, until a record changes them.
    pub catalog_version: u64,
    /// Jobs with commits that their worker has perhaps not published yet, and the records and epochs of these, oldest
    /// first. Put in by the fold, taken out by what the worker acknowledges, of sinks by their drivers; the fold never
    /// reads it. Not part of a snapshot.
    pub unpublished: BTreeMap<RelationId, VecDeque<(u64, Epoch)>>,
    /// Jobs that are known to keep their content for longer than before without having committed. Put in by the fold,
    /// taken out by who wakes their readers. Not part of a snapshot.
    pub moved: BTreeSet<RelationId>,
    /// Who reads what, and what follows from it. Kept by the fold; not part of a snapshot.
    pub dependencies: Dependencies,
}

impl Default for MetaState {
    fn default() -> MetaState {
        MetaState {
            number: 0,
            crc: 0,
            term: 0,
            leader: 0,
            epoch: Epoch::ZERO,
            store_id: None,
            next_relation_id: FIRST_RELATION_ID,
            next_table_id: FIRST_TABLE_ID,
            schemas: BTreeSet::from([DEFAULT_SCHEMA.to_owned()]),
            relations: BTreeMap::new(),
            jobs: Jobs::default(),
            sources: BTreeMap::new(),
            settings: BTreeMap::new(),
            users: BTreeMap::new(),
            objects: Objects::default(),
            processes: Processes::default(),
            backups: Backups::default(),
            statements: Statements::default(),
            definitions: Definitions::default(),
            catalog_version: 0,
            unpublished: BTreeMap::new(),
            moved: BTreeSet::new(),
            dependencies: Dependencies::default(),
        }
    }
}

pub use millrace_rpc::version::feed_counter;

/// Whether the relation has a job (tasks, a version).
pub fn has_job(relation: &Relation) -> bool {
    matches!(
        relation.kind(),
        RelationKind::Table
            | RelationKind::MaterializedView
            | RelationKind::Index
            | RelationKind::Sink
    )
}

/// Whether the relation's content follows from other relations.
pub fn is_derived(relation: &Relation) -> bool {
    has_job(relation) && relation.kind() != RelationKind::Table
}

/// Whether a sink begins with the changes after its creation (`snapshot = false`).
pub fn skips_snapshot(relation: &Relation) -> bool {
    relation.kind() == RelationKind::Sink
        && relation.option("snapshot").is_some_and(|v| matches!(v, "false" | "off" | "0"))
}

impl MetaState {
    /// How many jobs run on a process.
    pub fn jobs_of(&self, incarnation: u64) -> usize {
        self.jobs.values().filter(|job| job.process == incarnation).count()
    }

    /// Whether this is a sink that was told to wait.
    pub fn is_paused_sink(&self, id: RelationId) -> bool {
        self.relations.get(&id).is_some_and(|r| r.paused && r.kind() == RelationKind::Sink)
    }

    /// Whether the job has all that its inputs held when it began.
    pub fn is_caught_up(&self, id: RelationId) -> bool {
        self.jobs.get(&id).is_some_and(|job| job.version.backfill.is_none())
    }

    /// What a derived relation reads; nothing for roots.
    pub fn inputs(&self, id: RelationId) -> &[RelationId] {
        self.jobs.get(&id).map_or(&[], |job| &job.inputs)
    }

    /// These relations with plain views replaced by what they read.
    pub fn expand_views(&self, ids: &[u32]) -> Vec<RelationId> {
        without_views(&self.relations, ids.iter().copied().map(RelationId))
    }

    /// Derived relations that read `id` directly.
    pub fn readers(&self, id: RelationId) -> Vec<RelationId> {
        self.dependencies.readers(id).collect()
    }

    pub fn relation_named(&self, schema: &str, name: &str) -> Option<&Arc<Relation>> {
        self.relations.values().find(|r| r.schema == schema && r.name == name)
    }

    /// A copy of what [`Self::to_snapshot`] takes, for use outside the lock. What is large is shared, or left out
    /// because it follows from the rest.
    pub fn for_snapshot(&self) -> MetaState {
        MetaState {
            number: self.number,
            crc: self.crc,
            term: self.term,
            leader: self.leader,
            epoch: self.epoch,
            store_id: self.store_id,
            next_relation_id: self.next_relation_id,
            next_table_id: self.next_table_id,
            schemas: self.schemas.clone(),
            relations: self.relations.clone(),
            jobs: self.jobs.clone(),
            sources: self.sources.clone(),
            settings: self.settings.clone(),
            users: self.users.clone(),
            objects: self.objects.without_references(),
            processes: self.processes.clone(),
            backups: self.backups.clone(),
            statements: Statements {
                order: self.statements.order.clone(),
                by_id: HashMap::default(),
            },
            definitions: self.definitions.clone(),
            catalog_version: self.catalog_version,
            unpublished: BTreeMap::new(),
            moved: BTreeSet::new(),
            dependencies: Dependencies::default(),
        }
    }

    /// The same state as bytes to be.
    pub fn to_snapshot(&self) -> Snapshot {
        Snapshot {
            number: self.number,
            crc: self.crc,
            term: self.term,
            leader: self.leader,
            epoch: self.epoch.0,
            next_relation_id: self.next_relation_id,
            next_table_id: self.next_table_id,
            schemas: self.schemas.iter().cloned().collect(),
            relations: self.relations.values().map(|r| r.as_ref().clone()).collect(),
            jobs: self.jobs.iter().map(|(id, job)| job_snapshot(*id, job)).collect(),
            sources: self.sources.iter().map(|(id, s)| source_snapshot(*id, s)).collect(),
            settings: self.settings.clone(),
            garbage: self.objects.garbage_snapshot(),
            deleted: self.objects.deleted_snapshot(),
            statements: self
                .statements
                .order
                .iter()
                .map(|(id, epoch)| CommittedStatement { id: *id, epoch: epoch.0 })
                .collect(),
            users: self
                .users
                .iter()
                .map(|(n, v)| UserSnapshot { name: n.clone(), verifier: v.clone() })
                .collect(),
            last_incarnation: self.processes.last(),
            processes: self.processes.live_snapshot(),
            fenced_nonces: self.processes.fenced_nonces().collect(),
            backups: self.backups.to_snapshot(),
            store_id: store_id::bytes_of(self.store_id),
            definitions: self.definitions.to_snapshot(),
        }
    }

    pub fn from_snapshot(snapshot: Snapshot) -> MetaState {
        let jobs: Jobs =
            snapshot.jobs.into_iter().map(|j| (RelationId(j.job), job_record(j))).collect();
        let objects = Objects::from_snapshot(
            jobs.values().map(|j| j.version.as_ref()),
            &snapshot.garbage,
            &snapshot.deleted,
        );
        let mut statements = Statements::default();
        for s in &snapshot.statements {
            statements.insert(s.id, Epoch(s.epoch));
        }
        let mut state = MetaState {
            number: snapshot.number,
            crc: snapshot.crc,
            term: snapshot.term,
            leader: snapshot.leader,
            epoch: Epoch(snapshot.epoch),
            store_id: StoreId::from_bytes(&snapshot.store_id),
            next_relation_id: snapshot.next_relation_id,
            next_table_id: snapshot.next_table_id,
            schemas: snapshot.schemas.into_iter().collect(),
            relations: snapshot
                .relations
                .into_iter()
                .map(|r| (RelationId(r.id), Arc::new(r)))
                .collect(),
            jobs,
            sources: snapshot
                .sources
                .into_iter()
                .map(|s| (RelationId(s.source), source_record(s)))
                .collect(),
            settings: snapshot.settings,
            users: snapshot.users.into_iter().map(|u| (u.name, u.verifier)).collect(),
            objects,
            processes: Processes::from_snapshot(
                snapshot.last_incarnation,
                snapshot.processes,
                snapshot.fenced_nonces,
            ),
            backups: Backups::from_snapshot(snapshot.backups),
            statements,
            definitions: Definitions::from_snapshot(&snapshot.definitions),
            catalog_version: snapshot.number,
            unpublished: BTreeMap::new(),
            moved: BTreeSet::new(),
            dependencies: Dependencies::default(),
        };
        state.rebuild_dependencies();
        state
    }
}

fn job_snapshot(id: RelationId, job: &JobRecord) -> JobSnapshot {
    JobSnapshot {
        job: id.0,
        version: job.version.as_ref().clone(),
        timeline: job.timeline.to_snapshot(),
        horizon: job.horizon.0,
        inputs: job.inputs.iter().map(|i| i.0).collect(),
        process: job.process,
        by_operator: job.by_operator,
        watermarks: job
            .watermarks
            .iter()
            .map(|(epoch, columns)| WatermarksAt { epoch: epoch.0, columns: columns.clone() })
            .collect(),
    }
}

fn job_record(snapshot: JobSnapshot) -> JobRecord {
    JobRecord {
        version: Arc::new(snapshot.version),
        timeline: Timeline::from_snapshot(&snapshot.timeline),
        horizon: Epoch(snapshot.horizon),
        inputs: snapshot.inputs.into_iter().map(RelationId).collect(),
        process: snapshot.process,
        by_operator: snapshot.by_operator,
        watermarks: snapshot.watermarks.into_iter().map(|w| (Epoch(w.epoch), w.columns)).collect(),
    }
}

fn source_snapshot(id: RelationId, source: &SourceRecord) -> SourceSnapshot {
    let position = |(epoch, offsets): &(Epoch, Vec<SplitOffset>)| SourcePosition {
        epoch: epoch.0,
        offsets: offsets.clone(),
    };
    SourceSnapshot {
        source: id.0,
        history: source.history.iter().map(position).collect(),
        timeline: source.timeline.to_snapshot(),
        marks: source.marks.clone(),
        splits: source.parts.splits.to_vec(),
        files: source.parts.files.to_vec(),
    }
}

fn source_record(snapshot: SourceSnapshot) -> SourceRecord {
    SourceRecord {
        history: snapshot.history.into_iter().map(|p| (Epoch(p.epoch), p.offsets)).collect(),
        timeline: Timeline::from_snapshot(&snapshot.timeline),
        marks: snapshot.marks,
        parts: SourceParts { splits: Arc::new(snapshot.splits), files: Arc::new(snapshot.files) },
    }
}
