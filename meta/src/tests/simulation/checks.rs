//! What must hold, looked at with every record, deletion and read. The log that is looked at is the bucket's, folded by
//! the crate's own fold as soon as a record is durable.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use millrace_common::{Generation, JobId, RelationId};
use millrace_rpc::log::{Entry, LogEntry, LogRecord};
use millrace_rpc::version::{JobCommit, StatementId};
use parking_lot::Mutex;

use super::content::{Key, Rows};
use super::world::World;
use crate::fold::Verdict;
use crate::follower::LogFollower;
use crate::invariants;
use crate::log::fold_next;
use crate::state::MetaState;

#[derive(Clone, Copy, Debug)]
struct Issued {
    table: RelationId,
    key: Key,
    at: u64,
    acknowledged: Option<u64>,
}

#[derive(Default)]
struct Known {
    /// After all records of the bucket.
    head: MetaState,
    /// Applied commits of each job.
    commits: BTreeMap<JobId, u64>,
    /// Who has made each commit.
    sealed: BTreeMap<(u32, u64, u64), u64>,
    /// Who has started each generation of a job.
    owners: BTreeMap<(JobId, u64), u64>,
    /// Generations of jobs that a process has begun to run; as long as nothing else but leaders is harmed, those that run.
    running: BTreeSet<(JobId, u64)>,
    statements: BTreeSet<(u64, u64)>,
    /// All statements, by their number.
    issued: Vec<Issued>,
}

/// See the module.
#[derive(Default)]
pub struct Checks {
    known: Mutex<Known>,
    names: AtomicU64,
    is_quiet: AtomicBool,
}

/// What was acknowledged when a read began.
pub type Acknowledged = Vec<u32>;

impl World {
    /// A number for the name of a relation.
    pub fn next_name(&self) -> u64 {
        self.checks.names.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether sessions begin nothing any more.
    pub fn is_quiet(&self) -> bool {
        self.checks.is_quiet.load(Ordering::Relaxed)
    }

    pub fn be_quiet(&self) {
        self.checks.is_quiet.store(true, Ordering::Relaxed);
    }

    /// Number of the last record in the bucket.
    pub fn head(&self) -> u64 {
        self.checks.known.lock().head.number
    }

    pub fn read_head<T>(&self, read: impl FnOnce(&MetaState) -> T) -> T {
        read(&self.checks.known.lock().head)
    }

    /// Whether the log has the process as live.
    pub fn is_live(&self, incarnation: u64) -> bool {
        self.checks.known.lock().head.processes.is_live(incarnation)
    }

    /// A record is durable.
    pub fn record_appended(&self, number: u64, bytes: &Bytes) {
        let appended = {
            let mut known = self.checks.known.lock();
            let appended = known.append(number, bytes, !self.spares_invariants);
            let restarted = || match self.climate.harms_leaders_only {
                true => known.check_generations(number),
                false => Ok(()),
            };
            appended.and_then(|counts| restarted().map(|()| counts))
        };
        match appended {
            Ok(counts) => {
                self.note(|| format!("record {number}: {}", counts.join(", ")));
                counts.into_iter().for_each(|what| self.count(what));
            }
            Err(promise) => self.fail(promise),
        }
    }

    /// A process has made a commit that is on its way into the log.
    pub fn sealed(&self, commit: &JobCommit, incarnation: u64) {
        let at = (commit.job, commit.generation, commit.number);
        self.checks.known.lock().sealed.insert(at, incarnation);
    }

    /// A process begins to run a generation of a job.
    pub fn owned(&self, job: JobId, generation: Generation, incarnation: u64) {
        let owner = {
            let mut known = self.checks.known.lock();
            *known.owners.entry((job, generation.0)).or_insert(incarnation)
        };
        if owner != incarnation {
            self.fail(format!(
                "generation {} of job {job} has two owners: {owner} and {incarnation}",
                generation.0
            ));
        }
    }

    /// A process runs a generation of a job.
    pub fn runs(&self, job: JobId, generation: Generation) {
        let kept = {
            let mut known = self.checks.known.lock();
            known.running.insert((job, generation.0));
            known.check_scans()
        };
        if let Err(promise) = kept {
            self.fail(promise);
        }
    }

    /// The process that should run a generation of a job has told that it does not.
    pub fn runs_no_longer(&self, job: JobId, generation: Generation) {
        self.checks.known.lock().running.remove(&(job, generation.0));
    }

    /// A leader has a process start a generation of a job.
    pub fn check_start(&self, job: JobId, generation: Generation) {
        let is_running = self.checks.known.lock().running.contains(&(job, generation.0));
        if is_running && self.climate.harms_leaders_only {
            self.fail(format!(
                "job {job} is started again in generation {}, and only leaders were harmed",
                generation.0
            ));
        }
    }

    /// An object is not in the bucket any more.
    pub fn object_deleted(&self, name: &str) {
        let (is_named, is_held, live): (bool, bool, BTreeSet<u64>) = {
            let head = &self.checks.known.lock().head;
            let live = head.processes.live().keys().copied().collect();
            (head.objects.is_referenced(name), head.backups.hold(name), live)
        };
        if is_named {
            return self.fail(format!("\"{name}\" is collected, and the log names it"));
        }
        if is_held {
            return self.fail(format!("\"{name}\" is collected, and a backup names it"));
        }
        for process in self.processes() {
            let incarnation = process.incarnation();
            if !live.contains(&incarnation) || !process.reads.load(Ordering::Relaxed) {
                continue;
            }
            if process.pins.lock().iter().any(|pinned| pinned == name) {
                self.fail(format!("\"{name}\" is collected while process {incarnation} reads it"));
            }
            // What merges runs reads what its task names.
            let is_reader = process.node != super::world::COMPACTOR;
            let names =
                |follower: &LogFollower| follower.read(|state| state.objects.is_referenced(name));
            if is_reader && process.follower().is_some_and(|follower| names(&follower)) {
                self.fail(format!(
                    "\"{name}\" is collected, and process {incarnation} may begin to read it"
                ));
            }
        }
    }

    /// A new statement that appends its number to a key's list.
    pub fn issue(&self, table: RelationId, key: Key) -> u32 {
        let at = self.now_ms();
        let issued = &mut self.checks.known.lock().issued;
        issued.push(Issued { table, key, at, acknowledged: None });
        issued.len() as u32 - 1
    }

    /// A statement is told to be committed.
    pub fn acknowledged(&self, op: u32) {
        let now = self.now_ms();
        let is_durable = {
            let mut known = self.checks.known.lock();
            known.issued[op as usize].acknowledged.get_or_insert(now);
            known.statements.contains(&(1, u64::from(op)))
        };
        self.note(|| format!("statement {op} is acknowledged"));
        if !is_durable {
            self.fail(format!("statement {op} is acknowledged, and not in the log"));
        }
    }

    /// What was acknowledged by now of these tables.
    pub fn acknowledged_of(&self, ids: &[RelationId]) -> Acknowledged {
        let known = self.checks.known.lock();
        let issued = known.issued.iter().enumerate();
        let done = issued.filter(|(_, i)| i.acknowledged.is_some() && ids.contains(&i.table));
        done.map(|(op, _)| op as u32).collect()
    }

    /// A read that began when these were acknowledged has seen these rows.
    pub fn check_acknowledged(&self, rows: &BTreeMap<RelationId, Rows>, before: &Acknowledged) {
        let missing = {
            let known = self.checks.known.lock();
            let is_missing = |op: &&u32| {
                let issued = known.issued[**op as usize];
                let table = rows.get(&issued.table);
                table.is_some_and(|t| !t.get(&issued.key).is_some_and(|list| list.contains(op)))
            };
            before.iter().find(is_missing).copied()
        };
        if let Some(op) = missing {
            self.fail(format!("a fresh read misses statement {op}, which was acknowledged before"));
        }
    }

    /// Each statement is there once at most, where it belongs, and in an order in which they can have followed each other.
    pub fn check_table(&self, table: RelationId, rows: &Rows) {
        let broken = self.checks.known.lock().check_table(table, rows);
        if let Err(promise) = broken {
            self.fail(promise);
        }
    }

    /// The log of the bucket, and this one, are the same state.
    pub fn check_follower(&self, who: &str, state: &MetaState) {
        let differs = {
            let known = self.checks.known.lock();
            let same_number = known.head.number == state.number;
            same_number && known.head.to_snapshot() != state.to_snapshot()
        };
        if differs {
            self.fail(format!("{who} has folded record {} to another state", state.number));
        }
    }
}

fn kind_of(entry: &Entry) -> &'static str {
    match entry {
        Entry::Commit(_) => "commit",
        Entry::Rebuild(_) => "new beginning",
        Entry::EditVersion(_) => "edit",
        Entry::StartBackfill(_) => "first scan",
        Entry::RaiseGenerations(_) => "restart",
        Entry::RegisterProcess(_) => "process",
        Entry::FenceProcess(_) => "fence",
        Entry::PlaceJobs(_) => "placement",
        Entry::DeleteObjects(_) => "deletion",
        Entry::GiveUp(_) => "giving up",
        Entry::CreateRelation(_) => "creation",
        Entry::DropRelations(_) => "drop",
        Entry::CreateBackup(_) => "backup",
        Entry::ReleaseBackup(_) => "release",
        _ => "other",
    }
}

impl Known {
    /// Returns what is to be counted.
    fn append(
        &mut self,
        number: u64,
        bytes: &[u8],
        checks_invariants: bool,
    ) -> Result<Vec<String>, String> {
        let before: BTreeMap<JobId, (u64, u64)> = self.owners_now();
        let folded = fold_next(&mut self.head, number, bytes);
        let (record, verdicts) = folded.map_err(|e| format!("the log is broken: {e}"))?;
        self.head.unpublished.clear();
        self.head.moved.clear();
        if checks_invariants {
            invariants::check(&self.head).map_err(|e| format!("after record {number}: {e}"))?;
        }
        self.check_record(&record, &verdicts, &before)?;
        self.check_scans().map_err(|e| format!("after record {number}: {e}"))?;
        let count = |(entry, verdict): (&LogEntry, &Verdict)| {
            let kind = entry.entry.as_ref().map_or("nothing", kind_of);
            match verdict {
                Ok(_) => kind.to_owned(),
                Err(reason) => format!("{kind} void: {reason}"),
            }
        };
        Ok(record.entries.iter().zip(&verdicts).map(count).collect())
    }

    /// The process and generation of each job.
    fn owners_now(&self) -> BTreeMap<JobId, (u64, u64)> {
        let jobs = self.head.jobs.iter();
        jobs.map(|(id, job)| (*id, (job.process, job.version.generation))).collect()
    }

    /// What a first scan reads is kept: from its start on no edit drops versions of its epoch.
    fn check_scans(&self) -> Result<(), String> {
        for (id, job) in self.head.jobs.iter() {
            let runs = self.running.contains(&(*id, job.version.generation));
            let scan = job.version.backfill.as_ref().map(|b| b.snapshot_epoch);
            let Some(scan) = scan.filter(|scan| runs && *scan > 0) else { continue };
            for input in &job.inputs {
                let Some(read) = self.head.jobs.get(input) else { continue };
                if read.horizon.0 > scan {
                    return Err(format!(
                        "versions of {input} are dropped below {}, and {id} scans them at {scan}",
                        read.horizon
                    ));
                }
            }
        }
        Ok(())
    }

    /// No generation has ended that runs.
    fn check_generations(&self, number: u64) -> Result<(), String> {
        for (id, generation) in &self.running {
            let Some(job) = self.head.jobs.get(id) else { continue };
            if job.version.generation > *generation {
                return Err(format!(
                    "record {number} ends generation {generation} of job {id}, and only leaders were harmed"
                ));
            }
        }
        Ok(())
    }

    fn check_record(
        &mut self,
        record: &LogRecord,
        verdicts: &[Verdict],
        before: &BTreeMap<JobId, (u64, u64)>,
    ) -> Result<(), String> {
        let mut owners = before.clone();
        for (entry, verdict) in record.entries.iter().zip(verdicts) {
            let (Some(entry), Ok(_)) = (entry.entry.as_ref(), verdict) else { continue };
            match entry {
                Entry::Commit(commit) => self.check_commit(commit, &owners)?,
                Entry::DropRelations(dropped) => {
                    for id in &dropped.ids {
                        self.commits.remove(&RelationId(*id));
                    }
                }
                // What the entries before it in the record have changed.
                Entry::FenceProcess(fenced) => {
                    owners.retain(|_, (process, _)| !fenced.incarnations.contains(process));
                }
                Entry::PlaceJobs(placed) => {
                    for job in &placed.jobs {
                        owners.insert(RelationId(*job), (placed.incarnation, 0));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_commit(
        &mut self,
        commit: &JobCommit,
        owners: &BTreeMap<JobId, (u64, u64)>,
    ) -> Result<(), String> {
        let id = RelationId(commit.job);
        let number = self.commits.entry(id).or_default();
        *number += 1;
        if commit.number != *number {
            return Err(format!("commit {} of job {id} follows {}", commit.number, *number - 1));
        }
        let maker = self.sealed.get(&(commit.job, commit.generation, commit.number)).copied();
        let owner = owners.get(&id).map_or(0, |(process, _)| *process);
        if let Some(maker) = maker
            && maker != owner
        {
            return Err(format!(
                "a commit of job {id} is taken that process {maker} has made; it runs on {owner}"
            ));
        }
        for StatementId { frontend, number } in &commit.statements {
            if !self.statements.insert((*frontend, *number)) {
                return Err(format!("statement {number} is committed twice"));
            }
        }
        Ok(())
    }

    fn check_table(&self, table: RelationId, rows: &Rows) -> Result<(), String> {
        let mut seen = BTreeSet::new();
        for (key, list) in rows {
            for op in list {
                let issued = self.issued.get(*op as usize).ok_or("a row of nobody")?;
                if !seen.insert(*op) {
                    return Err(format!("statement {op} is there twice: {list:?}"));
                }
                if issued.table != table || issued.key != *key {
                    return Err(format!("statement {op} is in the wrong row"));
                }
            }
            for (at, later) in list.iter().enumerate() {
                let began = self.issued[*later as usize].at;
                let ended = |op: &u32| self.issued[*op as usize].acknowledged;
                let overtaken = list[at..]
                    .iter()
                    .skip(1)
                    .find(|op| ended(op).is_some_and(|ended| ended < began));
                if let Some(earlier) = overtaken {
                    return Err(format!("statement {later} is before {earlier}, which was over"));
                }
            }
        }
        Ok(())
    }
}
