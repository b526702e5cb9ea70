//! Compute processes, whose tasks are simulated: they take statements, end epochs, follow the record stream and flush as
//! the executor does.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use millrace_common::fault_injection::is_planted;
use millrace_common::task::spawn;
use millrace_common::{Epoch, Generation, JobId, RelationId, SqlError};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::control::MetaControl;
use millrace_rpc::log::{Entry as LogEntry, ProcessRole};
use millrace_rpc::sequence::Sequence;
use millrace_rpc::services::{Cut, JobToStart, RunningJob, StartJob};
use millrace_rpc::stream::{Acknowledged, EntryOutcome, StreamError, StreamMessage};
use millrace_rpc::version::{Flushed, JobCommit, JobVersion, RunMeta, SliceRef, VersionEdit};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::compactor::{object_name, run_of};
use super::content::{self, Entry, Key, Rows};
use super::jobs::{Job, Statement};
use super::members::{Member, Pinned};
use super::network::Delivery;
use super::store::ProcessStore;
use super::world::{Process, World};
use crate::objects::references_of;

/// How long a worker waits for a record that the leader has told it of.
const RECORD_PATIENCE: Duration = Duration::from_secs(20);
/// How long a commit of a first scan takes at most, in milliseconds.
const SCAN_TAKES: u64 = 400;

/// What became of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executed {
    Committed,
    /// It has had no effect: this generation does not run here.
    Refused,
    /// The log knows.
    Unknown,
}

pub struct Worker {
    member: Arc<Member>,
    store: Arc<dyn ObjectStore>,
    jobs: Mutex<BTreeMap<JobId, Job>>,
    /// Told when a commit is durable, a cut ends or a job does.
    changed: Notify,
    /// The record stream's last record; `None`: none and no job.
    last: Mutex<Option<u64>>,
    /// What it has written, as earlier releases numbered it.
    persisted: AtomicU64,
    instances: AtomicU64,
}

pub async fn run(world: Arc<World>, process: Arc<Process>) {
    let Some(member) = Member::register(&world, &process, ProcessRole::Compute).await else {
        return world.restart(&process, "was fenced before it knew of its registration");
    };
    let worker = Arc::new(Worker {
        member: Arc::clone(&member),
        store: ProcessStore::open(&world, process.node),
        jobs: Mutex::default(),
        changed: Notify::new(),
        last: Mutex::default(),
        persisted: AtomicU64::default(),
        instances: AtomicU64::default(),
    });
    process.services.lock().worker = Some(Arc::clone(&worker));
    spawn("flush", Arc::clone(&worker).flush_now_and_then());
    member.beat(move || worker.applied()).await;
}

/// Writes an object, however often that fails.
pub async fn put(store: &Arc<dyn ObjectStore>, name: &str, bytes: Bytes) {
    while store.put(&Path::from(name), bytes.clone().into()).await.is_err() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The names of a version's objects.
pub fn objects_of(version: &JobVersion) -> Vec<String> {
    references_of(version).map(|(name, _)| name.to_owned()).collect()
}

fn not_here() -> SqlError {
    SqlError::internal("this generation does not run here")
}

impl Worker {
    fn applied(&self) -> u64 {
        let followed = self.member.follower.number();
        self.last.lock().map_or(followed, |last| last.min(followed))
    }

    async fn reach(&self, record: u64) -> Result<(), SqlError> {
        let deadline = self.member.process.env.now() + RECORD_PATIENCE;
        Ok(self.member.follower.wait_for(record, deadline).await?)
    }

    /// What the log has of a job that it has placed here in this generation.
    fn logged(&self, id: JobId, generation: Generation) -> Option<JobToStart> {
        let own = self.member.process.incarnation();
        self.member.follower.read(|state| {
            let is_here = state.jobs.get(&id).is_some_and(|job| job.process == own);
            state.job_to_start(id).filter(|job| is_here && job.generation == generation)
        })
    }

    pub async fn start_job(&self, start: StartJob) -> Result<(), SqlError> {
        let (id, generation) = (start.job, start.generation);
        self.reach(start.record).await?;
        let is_past = |jobs: &BTreeMap<JobId, Job>| {
            jobs.get(&id).is_some_and(|job| {
                let was_adopted = job.generation == generation && job.since > start.record;
                job.generation > generation || was_adopted
            })
        };
        if is_past(&self.jobs.lock()) {
            return Err(not_here());
        }
        let logged = self.logged(id, generation).ok_or_else(not_here)?;
        let (world, process) = (&self.member.world, &self.member.process);
        world.note(|| format!("{} starts {id} generation {}", process.node, generation.0));
        world.owned(id, generation, process.incarnation());
        world.check_start(id, generation);
        self.stop_job(id, generation);
        let _pinned = self.member.pin(objects_of(&logged.version));
        let entries = content::read_version(&self.store, &logged.version).await;
        let is_current = self.member.follower.read(|state| {
            let job = state.jobs.get(&id);
            job.is_some_and(|job| job.version.generation == generation.0)
        });
        let entries = match is_current {
            true => self.member.must_read(&logged.relation.name, entries),
            false => entries.ok(),
        };
        let entries = entries.ok_or_else(|| SqlError::internal("its content cannot be read"))?;
        let mut jobs = self.jobs.lock();
        if is_past(&jobs) {
            return Err(not_here());
        }
        self.last.lock().get_or_insert(start.record);
        let job = Job {
            generation,
            instance: self.instances.fetch_add(1, Ordering::Relaxed),
            is_table: logged.relation.kind() == RelationKind::Table,
            table: logged.relation.first_table_id,
            name: logged.relation.name.clone(),
            inputs: logged.inputs.iter().map(|r| RelationId(r.id)).collect(),
            number: logged.version.commits,
            rows: content::rows_at(&entries, Epoch::MAX),
            horizon: logged.horizon,
            backfill: logged.version.backfill.clone(),
            open: Vec::new(),
            sealed: VecDeque::new(),
            cutting: 0,
            since: 0,
        };
        jobs.insert(id, job);
        world.runs(id, generation);
        Ok(())
    }

    /// Ends this generation, and those before: what has entered is the log's to tell.
    pub fn stop_job(&self, id: JobId, generation: Generation) {
        let mut jobs = self.jobs.lock();
        if jobs.get(&id).is_some_and(|job| job.generation <= generation)
            && let Some(job) = jobs.remove(&id)
        {
            let sealed = job.sealed.into_iter();
            self.member.given_up.add(sealed.flat_map(|sealed| sealed.objects));
            self.changed.notify_waiters();
        }
    }

    /// Has a statement append its number to a key's list.
    pub async fn execute(&self, id: JobId, generation: u64, op: u32, key: Key) -> Executed {
        let (answer, answered) = oneshot::channel();
        match self.jobs.lock().get_mut(&id) {
            Some(job) if job.generation.0 == generation && job.is_table => {
                job.open.push(Statement { op, key, answer });
            }
            _ => return Executed::Refused,
        }
        let member = Arc::clone(&self.member);
        spawn("ask for a cut", async move {
            for _ in 0..20 {
                let asked = member.ask_leader(Delivery::Repeated, move |meta| async move {
                    MetaControl::request_cut(&*meta, id).await
                });
                if asked.await.is_ok() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
        });
        match answered.await {
            Ok(_) => Executed::Committed,
            Err(_) => Executed::Unknown,
        }
    }

    /// What a leader that takes over goes on with; `None`: this generation does not run here.
    pub async fn adopt_job(
        &self,
        id: JobId,
        generation: Generation,
        record: u64,
        after: u64,
    ) -> Result<Option<RunningJob>, SqlError> {
        self.reach(record).await?;
        let (world, node) = (&self.member.world, self.member.process.node);
        loop {
            let changed = self.changed.notified();
            let running = match self.jobs.lock().get_mut(&id) {
                Some(job) if job.generation == generation => Some(job.hand_over(record, after)),
                _ => None,
            };
            match running {
                Some(Some(running)) => {
                    world.note(|| {
                        let sealed = running.sealed.len();
                        format!("{node} hands over {id} generation {}: {sealed}", generation.0)
                    });
                    world.count("handed over");
                    return Ok(Some(running));
                }
                Some(None) => changed.await,
                None => {
                    world.note(|| format!("{node} does not run {id} generation {}", generation.0));
                    world.runs_no_longer(id, generation);
                    return Ok(None);
                }
            }
        }
    }

    pub async fn cut(
        &self,
        id: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<JobCommit, SqlError> {
        self.reach(cut.record).await?;
        let cutting = self.begin_cut(id, generation, cut)?;
        let commit = self.make_commit(&cutting, cut).await;
        if commit.is_err() {
            // What it has taken in is lost with it.
            self.end_job(id, cutting.instance);
        }
        commit
    }

    fn begin_cut(
        &self,
        id: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<Cutting<'_>, SqlError> {
        let mut jobs = self.jobs.lock();
        let job = jobs.get_mut(&id).filter(|job| job.generation == generation);
        let job = job.ok_or_else(not_here)?;
        if cut.record < job.since {
            return Err(SqlError::internal("the cut is one of a leader that leads no longer"));
        }
        job.cutting += 1;
        Ok(Cutting { worker: self, id, generation, instance: job.instance })
    }

    fn end_job(&self, id: JobId, instance: u64) {
        let of_instance = self
            .jobs
            .lock()
            .get(&id)
            .filter(|job| job.instance == instance)
            .map(|job| job.generation);
        if let Some(generation) = of_instance {
            self.stop_job(id, generation);
        }
    }

    async fn make_commit(&self, cutting: &Cutting<'_>, cut: Cut) -> Result<JobCommit, SqlError> {
        let Cutting { id, generation, instance, .. } = *cutting;
        let world = &self.member.world;
        if world.is_rough() && world.numbers.chance(30) {
            tokio::time::sleep(world.numbers.between(100, 3_000)).await;
        }
        let (inputs, scans) = {
            let jobs = self.jobs.lock();
            let job = jobs.get(&id).filter(|job| job.instance == instance);
            let job = job.ok_or_else(not_here)?;
            (job.inputs.clone(), job.backfill.is_some())
        };
        if scans {
            tokio::time::sleep(world.numbers.between(0, SCAN_TAKES)).await;
            self.check_kept(id, generation, &inputs);
        }
        let mut rows = Vec::new();
        for input in inputs {
            rows.push(self.rows_of(input, cut.epoch).await?);
        }
        let (mut commit, parts) = {
            let mut jobs = self.jobs.lock();
            let job = jobs.get_mut(&id).filter(|job| job.instance == instance);
            let job = job.ok_or_else(not_here)?;
            if cut.number != job.number + 1 {
                return Err(SqlError::internal("a commit is missing before this one"));
            }
            let mut commit = JobCommit {
                job: id.0,
                generation: generation.0,
                number: cut.number,
                epoch: cut.epoch.0,
                ..JobCommit::default()
            };
            let parts = match job.is_table {
                true => job.seal_table(&mut commit),
                false => job.seal_view(&mut commit, &rows),
            };
            commit.changed = !parts.is_empty();
            if job.is_table && !commit.changed {
                return Ok(commit);
            }
            world.sealed(&commit, self.member.process.incarnation());
            (commit, parts)
        };
        commit.slices = self.persist(&commit, parts).await?;
        let objects = commit.slices.iter().map(|s| s.object.clone()).filter(|o| !o.is_empty());
        let objects: Vec<String> = objects.collect();
        let mut jobs = self.jobs.lock();
        let job = jobs.get_mut(&id).filter(|job| job.instance == instance);
        let sealed = job.and_then(|job| job.sealed.iter_mut().find(|s| s.number == cut.number));
        match sealed {
            Some(sealed) => (sealed.objects, sealed.commit) = (objects, Some(commit.clone())),
            None => self.member.given_up.add(objects),
        }
        drop(jobs);
        self.changed.notify_waiters();
        Ok(commit)
    }

    /// The inputs of a first scan that run here have not been told to drop versions of its epoch.
    fn check_kept(&self, id: JobId, generation: Generation, inputs: &[JobId]) {
        let world = &self.member.world;
        let jobs = self.jobs.lock();
        let (scan, told) = world.read_head(|state| {
            let is_current = |id: JobId, generation: Generation| {
                state.jobs.get(&id).filter(|job| job.version.generation == generation.0)
            };
            let backfill = is_current(id, generation).and_then(|j| j.version.backfill.clone());
            let told = inputs.iter().filter_map(|id| Some((*id, jobs.get(id)?)));
            let told = told.filter(|(id, job)| is_current(*id, job.generation).is_some());
            let told: Vec<(JobId, Epoch)> = told.map(|(id, job)| (id, job.horizon)).collect();
            (backfill.map(|backfill| Epoch(backfill.snapshot_epoch)), told)
        });
        let Some(scan) = scan else { return };
        if let Some((input, horizon)) = told.into_iter().find(|(_, horizon)| *horizon > scan) {
            world.fail(format!(
                "{input} may drop versions below {horizon}, and {id} scans them at {scan}"
            ));
        }
    }

    /// Slices of the parts of a commit, in objects or to be put into the log.
    async fn persist(
        &self,
        commit: &JobCommit,
        parts: Vec<Vec<Entry>>,
    ) -> Result<Vec<SliceRef>, SqlError> {
        let mut slices = Vec::new();
        for (part, entries) in parts.into_iter().enumerate() {
            let persisted = self.persisted.fetch_add(1, Ordering::Relaxed) + 1;
            let sequence = match is_planted("sequence-of-writer") {
                true => Sequence::stored(persisted),
                false => Sequence::new(commit.number, part as u64)
                    .map_err(|e| SqlError::internal(e.to_string()))?,
            };
            let bytes = content::encode(&entries);
            let (length, epoch) = (bytes.len() as u64, commit.epoch);
            let slice = SliceRef { epoch, length, sequence: sequence.get(), ..SliceRef::default() };
            if self.member.world.numbers.chance(500) {
                slices.push(SliceRef { inline: bytes, ..slice });
                continue;
            }
            let (object, _) = object_name(&self.member.process);
            put(&self.store, &object, bytes).await;
            slices.push(SliceRef { object, ..slice });
        }
        Ok(slices)
    }

    /// The rows of a relation at an epoch, as the log and the bucket have them.
    async fn rows_of(&self, id: RelationId, epoch: Epoch) -> Result<Rows, SqlError> {
        self.member.rows_at(&self.store, id, epoch).await.map_err(SqlError::internal)
    }

    /// What the leader sends, in the order of the log, each record once.
    pub async fn apply_records(&self, message: StreamMessage) -> Result<Acknowledged, StreamError> {
        let taken = self.member.follower.take(&message.records).await;
        taken.map_err(|e| StreamError::Failed(SqlError::from(e)))?;
        let mut last = self.last.lock();
        for record in &message.records {
            let known = *last.get_or_insert(record.number().saturating_sub(1));
            if record.number() > known + 1 {
                return Err(StreamError::Gap { next: known + 1 });
            }
            if record.number() <= known {
                continue;
            }
            let entries = record.record.entries.iter().filter_map(|e| e.entry.as_ref());
            for (entry, outcome) in entries.zip(record.outcomes.iter()) {
                match entry {
                    LogEntry::Commit(commit) => self.conclude(commit, outcome),
                    LogEntry::EditVersion(edit) if matches!(outcome, EntryOutcome::Applied(_)) => {
                        self.raise_horizon(RelationId(edit.job), Epoch(edit.horizon));
                    }
                    _ => {}
                }
            }
            *last = Some(record.number());
        }
        for (job, horizon) in &message.horizons {
            self.raise_horizon(*job, *horizon);
        }
        Ok(Acknowledged { received: last.unwrap_or(0), behind: Vec::new() })
    }

    fn raise_horizon(&self, id: JobId, horizon: Epoch) {
        if let Some(job) = self.jobs.lock().get_mut(&id) {
            job.horizon = job.horizon.max(horizon);
        }
    }

    fn conclude(&self, commit: &JobCommit, outcome: &EntryOutcome) {
        let (id, generation) = (RelationId(commit.job), Generation(commit.generation));
        let world = &self.member.world;
        let mut jobs = self.jobs.lock();
        let Some(job) = jobs.get_mut(&id).filter(|job| job.generation == generation) else {
            return;
        };
        if !job.sealed.iter().any(|sealed| sealed.number == commit.number) {
            return;
        }
        let EntryOutcome::Applied(epoch) = outcome else {
            drop(jobs);
            self.stop_job(id, generation);
            return;
        };
        let Some(sealed) = job.sealed.pop_front() else { return };
        if sealed.number != commit.number {
            world.fail(format!(
                "commit {} of {id} is concluded before {}",
                commit.number, sealed.number
            ));
        }
        for statement in sealed.statements {
            world.acknowledged(statement.op);
            let _ = statement.answer.send(*epoch);
        }
    }

    async fn flush_now_and_then(self: Arc<Worker>) {
        loop {
            let pause = self.member.world.numbers.between(500, 2_500);
            tokio::time::sleep(pause).await;
            let open: Vec<JobId> = self.jobs.lock().keys().copied().collect();
            if !open.is_empty() {
                self.flush(self.member.world.numbers.of(&open)).await;
            }
        }
    }

    /// Brings a job's tail into a run, without versions below the job's horizon.
    async fn flush(&self, id: JobId) {
        let of_job = |job: &Job| (job.generation, job.table, job.horizon);
        let Some((generation, table, horizon)) = self.jobs.lock().get(&id).map(of_job) else {
            return;
        };
        let version = self.member.follower.read(|state| {
            let job = state.jobs.get(&id)?;
            (job.version.generation == generation.0).then(|| Arc::clone(&job.version))
        });
        let Some(version) = version.filter(|version| !version.tail.is_empty()) else { return };
        let _pinned: Pinned = self.member.pin(objects_of(&version));
        let mut entries = Vec::new();
        for slice in &version.tail {
            let Ok(read) = content::read_slice(&self.store, slice).await else { return };
            entries.extend(read);
        }
        let entries = content::merged(entries, horizon);
        let sequence = version.tail.iter().map(|slice| slice.sequence).max().unwrap_or(0);
        let (object, run_id) = object_name(&self.member.process);
        let bytes = content::encode(&entries);
        let run = RunMeta {
            run_id,
            object: object.clone(),
            length: bytes.len() as u64,
            ..run_of(&entries, table, 0, sequence)
        };
        put(&self.store, &object, bytes).await;
        let (writer, commit) = (self.member.process.incarnation(), version.commits);
        let flushed = Some(Flushed { writer, commit, ..Flushed::default() });
        let edit = VersionEdit { add_runs: vec![run], flushed, ..VersionEdit::default() };
        let committed = self.member.ask_leader(Delivery::Repeated, move |meta| {
            let edit = edit.clone();
            async move { MetaControl::commit_edit(&*meta, id, generation, edit).await }
        });
        if !matches!(committed.await, Ok(true)) {
            // If the log names it all the same, it leaves it alone.
            self.member.given_up.add([object]);
        }
    }
}

/// A cut is under way until this is dropped.
struct Cutting<'a> {
    worker: &'a Worker,
    id: JobId,
    generation: Generation,
    instance: u64,
}

impl Drop for Cutting<'_> {
    fn drop(&mut self) {
        let mut jobs = self.worker.jobs.lock();
        if let Some(job) = jobs.get_mut(&self.id).filter(|job| job.instance == self.instance) {
            job.cutting -= 1;
        }
        drop(jobs);
        self.worker.changed.notify_waiters();
    }
}

impl Member {
    /// The rows of a relation at an epoch, by the version that the log has here.
    pub async fn rows_at(
        &self,
        store: &Arc<dyn ObjectStore>,
        id: RelationId,
        epoch: Epoch,
    ) -> Result<Rows, String> {
        let found = self.follower.read(|state| {
            let (relation, job) = (state.relations.get(&id)?, state.jobs.get(&id)?);
            Some((relation.name.clone(), Arc::clone(&job.version), job.horizon))
        });
        let (name, version, horizon) = found.ok_or("the relation was dropped")?;
        if epoch < horizon {
            return Err("versions of that epoch are gone".to_owned());
        }
        let _pinned = self.pin(objects_of(&version));
        let read = content::read_version(store, &version).await;
        let entries = self.must_read(&name, read).ok_or("its content cannot be read")?;
        Ok(content::rows_at(&entries, epoch))
    }
}
