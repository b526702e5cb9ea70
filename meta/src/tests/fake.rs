//! A compute service without dataflows: a relation's content is one number. A table's is how many rows
//! were inserted, a view's the sum of its inputs' at the same epoch, so every exact read can be checked.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use millrace_common::{EnvHandle, Epoch, Generation, JobId, RelationId, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::{Entry, MoveParts};
use millrace_rpc::sequence::Sequence;
use millrace_rpc::services::{
    CompactionTask, CompactorService, ComputeService, Cut, LivePart, MetaService, RunningJob,
    StartJob,
};
use millrace_rpc::source_poll::{More, PollSource, Polled};
use millrace_rpc::stream::{Acknowledged, EntryOutcome, StreamError, StreamMessage};
use millrace_rpc::version::{BackfillState, JobCommit, PublishHandle, SliceRef, VersionEdit};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::store::TestStore;
use super::{TestEnv, table, view};
use crate::meta::{CreateOptions, Meta};
use crate::options::MetaOptions;

/// How a job behaves.
#[derive(Clone, Debug, Default)]
pub struct Behaviour {
    pub hang: bool,
    pub fail_start: Option<String>,
    pub fail_cut: Option<String>,
    /// Its process does not answer.
    pub is_cut_off: bool,
    /// A leader that takes over is not answered.
    pub ignores_adoption: bool,
    /// A bug in what the driver runs itself.
    pub panic_in_cut: bool,
    pub cut_takes: Duration,
    /// Of a view: no row passes it.
    pub filters_all: bool,
    /// Cuts a backfill takes.
    pub backfill_steps: u64,
    /// Of a table: what each commit with rows adds to the store.
    pub commit_bytes: u64,
    /// Of a source: why it cannot be said what there is of it.
    pub fail_poll: Option<String>,
    /// Of a sink: how long its target takes for a change, and why it takes none.
    pub publish_takes: Duration,
    pub fail_publish: Option<String>,
    /// Nothing comes of the question to prepare an edit.
    pub never_prepares: bool,
}

/// An edit of a job's version that its process was asked to prepare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    pub job: JobId,
    /// The new runs.
    pub runs: Vec<u64>,
    /// Whether one of them was in the job's version by then.
    pub is_logged: bool,
}

/// Bytes of changes that a job takes in at once.
pub const STEP_BYTES: u64 = 1 << 20;

#[derive(Debug)]
struct FakeJob {
    generation: Generation,
    tasks: usize,
    /// Of the last cut that was not empty.
    number: u64,
    is_table: bool,
    /// Of a sink: of its last staged change.
    sequence: Option<u64>,
    inputs: Vec<RelationId>,
    backfill: Option<BackfillState>,
    waiting: Vec<oneshot::Sender<Epoch>>,
    /// Of the cuts in flight.
    sealed: VecDeque<Sealed>,
    /// The last commit that was concluded, if the worker hands it over all the same.
    handed_over_again: Option<JobCommit>,
    /// A cut of another leader is under way.
    is_cutting: bool,
}

/// Acknowledgements and the content to be.
#[derive(Debug)]
struct Sealed {
    number: u64,
    acks: Vec<oneshot::Sender<Epoch>>,
    value: i64,
    commit: JobCommit,
}

/// How the record stream to a worker is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stream {
    #[default]
    Sound,
    /// Messages are lost, cut short, repeated and applied without an answer, as this seed says.
    Faulty(u64),
    /// Nothing arrives.
    Broken,
    /// Nor do jobs start or end epochs: no call reaches the process.
    CutOff,
}

#[derive(Default)]
struct World {
    jobs: HashMap<JobId, FakeJob>,
    behaviours: HashMap<JobId, Behaviour>,
    /// Committed content of every relation over time; survives restarts, as the store would.
    content: HashMap<RelationId, Vec<(Epoch, i64)>>,
    cuts: Vec<(JobId, Generation, Epoch)>,
    /// How often each was started.
    starts: HashMap<JobId, usize>,
    stopped: HashSet<(JobId, Generation)>,
    /// How many epochs of each were cut and not concluded at a time, at the most.
    most_in_flight: HashMap<JobId, usize>,
    /// What targets of sinks have taken, in order.
    published: Vec<(JobId, u64)>,
    /// How many changes of a sink were staged and not taken by its target at a time, at the most.
    most_staged: HashMap<JobId, u64>,
    /// The last record taken in; `None`: none and no job.
    record: Option<u64>,
    stream: Stream,
    /// The record stream's last message.
    last_message: StreamMessage,
    /// How often the stream had a gap.
    gaps: u64,
    /// How much there is of each source.
    offered: HashMap<RelationId, u64>,
    /// The sources that were asked about, and the reader of each question.
    polls: Vec<(RelationId, JobId)>,
    /// In the order of the questions.
    prepared: Vec<Prepared>,
}

impl World {
    /// All of the message, or nothing.
    fn take(&mut self, message: &StreamMessage) -> Result<Acknowledged, StreamError> {
        for record in &message.records {
            let last = *self.record.get_or_insert(record.number() - 1);
            if record.number() > last + 1 {
                self.gaps += 1;
                return Err(StreamError::Gap { next: last + 1 });
            }
            if record.number() == last + 1 {
                let entries = record.record.entries.iter().filter_map(|e| e.entry.as_ref());
                for (entry, outcome) in entries.zip(record.outcomes.iter()) {
                    self.apply(entry, outcome);
                }
                self.record = Some(record.number());
            }
        }
        Ok(Acknowledged { received: self.record.unwrap_or(0), behind: Vec::new() })
    }

    fn apply(&mut self, entry: &Entry, outcome: &EntryOutcome) {
        let commits = match entry {
            Entry::Commit(commit) => std::slice::from_ref(commit),
            Entry::Transaction(transaction) => &transaction.commits,
            _ => return,
        };
        for commit in commits {
            self.conclude(commit, outcome);
        }
    }

    fn conclude(&mut self, commit: &JobCommit, outcome: &EntryOutcome) {
        let EntryOutcome::Applied(epoch) = outcome else { return };
        let id = RelationId(commit.job);
        let generation = Generation(commit.generation);
        let Some(job) = self.jobs.get_mut(&id).filter(|j| j.generation == generation) else {
            return;
        };
        let Some(own) = job.sealed.pop_front() else { return };
        assert_eq!(
            own.number, commit.number,
            "commits of {id:?} are concluded in order, each once"
        );
        if let Some(again) = &mut job.handed_over_again {
            *again = own.commit;
        }
        self.content.entry(id).or_default().push((*epoch, own.value));
        for ack in own.acks {
            let _ = ack.send(*epoch);
        }
    }

    /// What a leader that takes over is answered; `None`: nothing yet.
    fn hand_over(
        &self,
        id: JobId,
        generation: Generation,
        after: u64,
    ) -> Option<Option<RunningJob>> {
        let Some(job) = self.jobs.get(&id).filter(|job| job.generation == generation) else {
            return Some(None);
        };
        let again = job.handed_over_again.iter().filter(|commit| commit.number > 0);
        let sealed = again.chain(job.sealed.iter().map(|own| &own.commit));
        let running = || RunningJob {
            number: job.number,
            horizon: Epoch::ZERO,
            sealed: sealed.cloned().collect(),
            is_cutting: job.is_cutting,
        };
        (!job.is_cutting || job.number > after).then(|| Some(running()))
    }

    /// What becomes of a message on the way. `None`: it is lost, or its answer is.
    fn deliver(&mut self, message: StreamMessage) -> Option<Result<Acknowledged, StreamError>> {
        let Stream::Faulty(seed) = &mut self.stream else { return Some(self.take(&message)) };
        *seed =
            seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let fault = (*seed >> 33) % 6;
        let before = std::mem::replace(&mut self.last_message, message.clone());
        match fault {
            0 => None,
            1 => {
                let _ = self.take(&message);
                None
            }
            2 => {
                // The message before comes late, and once more.
                let _ = self.take(&before);
                Some(self.take(&message))
            }
            3 => {
                let mut rest = message;
                rest.records.drain(..rest.records.len().min(1));
                Some(self.take(&rest))
            }
            4 => {
                let mut part = message;
                part.records.truncate(1);
                Some(self.take(&part))
            }
            _ => Some(self.take(&message)),
        }
    }
}

#[derive(Default)]
pub struct Fake {
    world: Mutex<World>,
    meta: Mutex<Weak<Meta>>,
}

impl Fake {
    /// The leader that it reports to.
    pub fn attach(&self, meta: &Arc<Meta>) {
        *self.meta.lock() = Arc::downgrade(meta);
    }

    pub fn behave(&self, job: JobId, behaviour: Behaviour) {
        self.world.lock().behaviours.insert(job, behaviour);
    }

    /// The generation that runs, and how many tasks it was given.
    pub fn tasks_of(&self, job: JobId) -> (Generation, usize) {
        let world = self.world.lock();
        let job = &world.jobs[&job];
        (job.generation, job.tasks)
    }

    pub fn cuts_of(&self, job: JobId) -> Vec<Epoch> {
        self.world.lock().cuts.iter().filter(|(j, _, _)| *j == job).map(|(_, _, e)| *e).collect()
    }

    /// How often a job was started.
    pub fn starts_of(&self, job: JobId) -> usize {
        self.world.lock().starts.get(&job).copied().unwrap_or(0)
    }

    /// Changes what the worker has sealed and nobody has logged.
    pub fn sealed_of(&self, job: JobId, change: impl FnOnce(&mut Vec<JobCommit>)) {
        let mut world = self.world.lock();
        let sealed = &mut world.jobs.get_mut(&job).unwrap().sealed;
        let mut commits = sealed.iter().map(|s| s.commit.clone()).collect();
        change(&mut commits);
        sealed.truncate(commits.len());
        sealed.iter_mut().zip(commits).for_each(|(own, commit)| own.commit = commit);
    }

    /// A cut of another leader begins or ends.
    pub fn set_cutting(&self, job: JobId, is_cutting: bool) {
        self.world.lock().jobs.get_mut(&job).unwrap().is_cutting = is_cutting;
    }

    /// How many epochs are sealed and not concluded.
    pub fn in_flight(&self, job: JobId) -> usize {
        self.world.lock().jobs[&job].sealed.len()
    }

    /// From now on the worker hands over what was concluded last, too.
    pub fn hand_over_again(&self, job: JobId) {
        let mut world = self.world.lock();
        world.jobs.get_mut(&job).unwrap().handed_over_again = Some(JobCommit::default());
    }

    pub fn set_stream(&self, stream: Stream) {
        self.world.lock().stream = stream;
    }

    /// There is so much of a source from now on.
    pub fn offer(&self, source: RelationId, offset: u64) {
        self.world.lock().offered.insert(source, offset);
    }

    /// The readers on whose processes was asked what there is of a source, since this was last called.
    pub fn take_polls(&self, source: RelationId) -> Vec<JobId> {
        let mut world = self.world.lock();
        world.polls.extract_if(.., |(of, _)| *of == source).map(|(_, reader)| reader).collect()
    }

    /// What it was asked to prepare.
    pub fn prepared(&self) -> Vec<Prepared> {
        self.world.lock().prepared.clone()
    }

    /// How often the record stream had a gap.
    pub fn gaps(&self) -> u64 {
        self.world.lock().gaps
    }

    pub fn most_in_flight(&self, job: JobId) -> usize {
        self.world.lock().most_in_flight.get(&job).copied().unwrap_or(0)
    }

    /// Sequences that a sink's target has taken, in order.
    pub fn published_by(&self, job: JobId) -> Vec<u64> {
        self.world.lock().published.iter().filter(|(j, _)| *j == job).map(|(_, s)| *s).collect()
    }

    pub fn most_staged(&self, job: JobId) -> u64 {
        self.world.lock().most_staged.get(&job).copied().unwrap_or(0)
    }

    pub fn is_stopped(&self, job: JobId) -> bool {
        self.world.lock().stopped.iter().any(|(j, _)| *j == job)
    }

    pub fn value_at(&self, id: RelationId, epoch: Epoch) -> i64 {
        value_at(&self.world.lock().content, id, epoch)
    }

    /// At which epochs a relation's commits took effect, in order.
    pub fn committed_at(&self, id: RelationId) -> Vec<Epoch> {
        let world = self.world.lock();
        world.content.get(&id).into_iter().flatten().map(|(epoch, _)| *epoch).collect()
    }

    /// Inserts a row; returns when it is acknowledged.
    pub async fn insert(&self, table: JobId) -> Result<Epoch, SqlError> {
        let (done, acknowledged) = oneshot::channel();
        {
            let mut world = self.world.lock();
            let job =
                world.jobs.get_mut(&table).ok_or_else(|| SqlError::internal("no such table"))?;
            job.waiting.push(done);
        }
        let meta = self.meta.lock().upgrade();
        if let Some(meta) = meta {
            meta.request_cut(table);
        }
        acknowledged.await.map_err(|_| SqlError::internal("the table's tasks are gone"))
    }
}

/// What comes of a call that reaches nobody.
fn unreached() -> SqlError {
    let (peer, cause) = ("the process".to_owned(), "planted".to_owned());
    CallError::NotConnected { peer, cause }.into()
}

fn value_at(content: &HashMap<RelationId, Vec<(Epoch, i64)>>, id: RelationId, epoch: Epoch) -> i64 {
    let history = content.get(&id).map_or(&[][..], Vec::as_slice);
    history.iter().rev().find(|(e, _)| *e <= epoch).map_or(0, |(_, v)| *v)
}

#[async_trait]
impl ComputeService for Fake {
    async fn start_job(&self, start: StartJob) -> Result<(), SqlError> {
        let id = start.job;
        let leader = self.meta.lock().upgrade();
        let logged = leader.and_then(|meta| meta.job_to_start(id));
        let logged = logged.filter(|job| job.generation == start.generation);
        let mut world = self.world.lock();
        if world.stream == Stream::CutOff {
            return Err(unreached());
        }
        if let Some(reason) = world.behaviours.get(&id).and_then(|b| b.fail_start.clone()) {
            return Err(SqlError::internal(reason));
        }
        let logged = logged.ok_or_else(|| SqlError::internal("the log has another generation"))?;
        let (kind, version) = (logged.relation.kind(), &logged.version);
        let job = FakeJob {
            generation: start.generation,
            tasks: start.parallelism,
            number: version.commits,
            is_table: kind == RelationKind::Table,
            sequence: (kind == RelationKind::Sink).then(|| {
                let last = version.publish.last();
                last.map_or(version.published, |h| h.sequence)
            }),
            inputs: logged.inputs.iter().map(|r| RelationId(r.id)).collect(),
            backfill: version.backfill.clone(),
            waiting: Vec::new(),
            sealed: Default::default(),
            handed_over_again: None,
            is_cutting: false,
        };
        *world.starts.entry(id).or_default() += 1;
        world.record.get_or_insert(start.record);
        world.jobs.insert(id, job);
        Ok(())
    }

    async fn adopt_job(
        &self,
        id: JobId,
        generation: Generation,
        _: u64,
        after: u64,
    ) -> Result<Option<RunningJob>, SqlError> {
        let behaviour = self.world.lock().behaviours.get(&id).cloned().unwrap_or_default();
        if behaviour.ignores_adoption {
            std::future::pending::<()>().await;
        }
        if behaviour.is_cut_off {
            return Err(SqlError::new(SqlState::CONNECTION_FAILURE, "planted"));
        }
        loop {
            if let Some(answer) = self.world.lock().hand_over(id, generation, after) {
                return Ok(answer);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn cut(
        &self,
        id: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<JobCommit, SqlError> {
        let behaviour = self.world.lock().behaviours.get(&id).cloned().unwrap_or_default();
        tokio::time::sleep(behaviour.cut_takes).await;
        if behaviour.hang {
            std::future::pending::<()>().await;
        }
        assert!(!behaviour.panic_in_cut, "planted");
        if behaviour.is_cut_off {
            return Err(SqlError::new(SqlState::CONNECTION_FAILURE, "planted"));
        }
        if let Some(reason) = behaviour.fail_cut {
            return Err(SqlError::internal(reason));
        }
        let mut world = self.world.lock();
        if world.stream == Stream::CutOff {
            return Err(unreached());
        }
        world.cuts.push((id, generation, cut.epoch));
        let World { jobs, content, most_in_flight, published, most_staged, .. } = &mut *world;
        let job = jobs.get_mut(&id).ok_or_else(|| SqlError::internal("not started"))?;
        if job.generation != generation {
            return Err(SqlError::internal("another generation runs"));
        }
        assert_eq!(cut.number, job.number + 1, "commits are numbered without a gap");
        let most = most_in_flight.entry(id).or_default();
        *most = (*most).max(job.sealed.len() + 1);
        let mut commit = JobCommit {
            job: id.0,
            generation: generation.0,
            number: cut.number,
            epoch: cut.epoch.0,
            ..JobCommit::default()
        };
        if job.is_table {
            let acks = std::mem::take(&mut job.waiting);
            let before = match job.sealed.back() {
                Some(sealed) => sealed.value,
                None => value_at(content, id, Epoch::MAX),
            };
            let value = before + acks.len() as i64;
            commit.changed = !acks.is_empty();
            commit.row_count_delta = acks.len() as i64;
            if commit.changed && behaviour.commit_bytes > 0 {
                let length = behaviour.commit_bytes;
                let sequence = Sequence::new(cut.number, 0).unwrap().get();
                commit.slices = vec![SliceRef { length, sequence, ..SliceRef::default() }];
            }
            if !commit.is_empty() {
                job.number = cut.number;
                let sealed = commit.clone();
                job.sealed.push_back(Sealed { number: cut.number, acks, value, commit: sealed });
            }
            return Ok(commit);
        }
        if let Some(backfill) = &mut job.backfill {
            if Epoch(backfill.snapshot_epoch) != cut.epoch && backfill.snapshot_epoch != 0 {
                return Err(SqlError::internal("a backfill is cut at its snapshot epoch"));
            }
            backfill.snapshot_epoch = cut.epoch.0;
            backfill.rows_read += 1;
            backfill.rows_total = behaviour.backfill_steps;
            let more = backfill.rows_read < behaviour.backfill_steps;
            commit.backfill = more.then(|| backfill.clone());
            job.backfill = commit.backfill.clone();
        }
        let passing = job.inputs.iter().filter(|_| !behaviour.filters_all);
        let value = passing.map(|i| value_at(content, *i, cut.epoch)).sum();
        commit.changed = value != value_at(content, id, Epoch::MAX);
        if let Some(sequence) = job.sequence.as_mut().filter(|_| commit.changed) {
            *sequence += 1;
            let taken = published.iter().rev().find(|(j, _)| *j == id).map_or(0, |(_, s)| *s);
            let most = most_staged.entry(id).or_default();
            *most = (*most).max(*sequence - taken);
            commit.publish =
                Some(PublishHandle { sequence: *sequence, ..PublishHandle::default() });
        }
        job.number = cut.number;
        let (number, acks, sealed) = (cut.number, Vec::new(), commit.clone());
        job.sealed.push_back(Sealed { number, acks, value, commit: sealed });
        Ok(commit)
    }

    async fn apply_records(&self, message: StreamMessage) -> Result<Acknowledged, StreamError> {
        let answer = {
            let mut world = self.world.lock();
            let stream = world.stream;
            match stream {
                Stream::Broken => None,
                Stream::CutOff => Some(Err(StreamError::Failed(unreached()))),
                Stream::Sound | Stream::Faulty(_) => world.deliver(message),
            }
        };
        answer.unwrap_or_else(|| Err(StreamError::Failed(SqlError::internal("planted"))))
    }

    async fn applied_since(&self, _: Acknowledged) -> Acknowledged {
        // No job is ever busy.
        std::future::pending().await
    }

    async fn prepare_edit(&self, job: JobId, _: Generation, edit: VersionEdit) {
        let runs: Vec<u64> = edit.add_runs.iter().map(|run| run.run_id).collect();
        let meta = self.meta.lock().upgrade();
        let logged = meta.and_then(|m| m.job_status(job)).map(|status| status.version);
        let logged = logged.iter().flat_map(|version| &version.runs);
        let is_logged = logged.map(|run| run.run_id).any(|run| runs.contains(&run));
        let never_answers = {
            let mut world = self.world.lock();
            world.prepared.push(Prepared { job, runs, is_logged });
            world.behaviours.get(&job).is_some_and(|b| b.never_prepares)
        };
        if never_answers {
            std::future::pending::<()>().await;
        }
    }

    async fn abort_epoch(&self, _: JobId, _: Generation, _: SqlError) {}

    async fn publish(
        &self,
        id: JobId,
        _: Generation,
        handles: Vec<PublishHandle>,
    ) -> Result<(), SqlError> {
        let behaviour = self.world.lock().behaviours.get(&id).cloned().unwrap_or_default();
        let last = handles.last().map_or(0, |h| h.sequence);
        tokio::time::sleep(behaviour.publish_takes).await;
        let meta = self.meta.lock().upgrade();
        let logged = meta.and_then(|m| m.job_status(id)).map(|s| s.version.publish.clone());
        let after = logged.into_iter().flatten().filter(|h| h.sequence > last).count();
        assert_eq!(after, 0, "logged before the target had {last}");
        if let Some(reason) = behaviour.fail_publish {
            return Err(SqlError::internal(reason));
        }
        self.world.lock().published.extend(handles.iter().map(|h| (id, h.sequence)));
        Ok(())
    }

    async fn stop_job(&self, id: JobId, generation: Generation) {
        let hang = {
            let mut world = self.world.lock();
            world.stopped.insert((id, generation));
            if world.jobs.get(&id).is_some_and(|j| j.generation == generation) {
                world.jobs.remove(&id);
            }
            world.behaviours.get(&id).is_some_and(|b| b.hang)
        };
        if hang {
            std::future::pending::<()>().await;
        }
    }

    async fn poll_source(&self, poll: PollSource) -> Result<Polled, SqlError> {
        let (source, reader, offered) = {
            let mut world = self.world.lock();
            world.polls.push((poll.source, poll.reader));
            let of = |id| world.behaviours.get(&id).cloned().unwrap_or_default();
            let offered = world.offered.get(&poll.source).copied().unwrap_or(0);
            (of(poll.source), of(poll.reader), offered)
        };
        if source.hang {
            std::future::pending::<()>().await;
        }
        if reader.is_cut_off {
            return Err(SqlError::new(SqlState::CONNECTION_FAILURE, "planted"));
        }
        if let Some(reason) = source.fail_poll {
            return Err(SqlError::new(SqlState::IO_ERROR, reason));
        }
        let more = More::After(Duration::from_millis(100));
        Ok(Polled { available: vec![(0, offered)], more, offsets_per_row: 1, ..Polled::default() })
    }
}

/// Compacts nothing; nothing here has runs.
pub struct NoCompactor;

#[async_trait]
impl CompactorService for NoCompactor {
    async fn compact(&self, _: CompactionTask) -> Result<VersionEdit, SqlError> {
        Err(SqlError::unsupported("compaction"))
    }

    async fn copy_parts(&self, _: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        Err(SqlError::unsupported("compaction"))
    }
}

/// A meta, its store and its fake workers.
pub struct Cluster {
    pub meta: Arc<Meta>,
    pub fake: Arc<Fake>,
    pub store: Arc<TestStore>,
}

impl Cluster {
    pub async fn new() -> Cluster {
        Cluster::on(TestStore::new(), Arc::default()).await
    }

    /// With the table `t`.
    pub async fn with_table() -> (Cluster, RelationId) {
        let cluster = Cluster::new().await;
        let table = cluster.created(table("t")).await;
        (cluster, table)
    }

    /// With the table `t` and the view `v` of it.
    pub async fn with_view() -> (Cluster, RelationId, RelationId) {
        let (cluster, table) = Cluster::with_table().await;
        let view = cluster.created(view("v", &[table])).await;
        (cluster, table, view)
    }

    /// Opens (again) what a store holds.
    pub async fn on(store: Arc<TestStore>, fake: Arc<Fake>) -> Cluster {
        let seed = store.requests() + 1;
        let env = EnvHandle::new(TestEnv::new(seed));
        let options = MetaOptions {
            env,
            step_bytes: STEP_BYTES,
            ..MetaOptions::new(Arc::clone(&store) as _)
        };
        let meta = Meta::open(options).await.unwrap();
        fake.attach(&meta);
        {
            let mut world = fake.world.lock();
            world.jobs.clear();
            world.record = None;
        }
        meta.start(Arc::clone(&fake) as _, Arc::new(NoCompactor)).await.unwrap();
        Cluster { meta, fake, store }
    }

    /// Stops, and opens the store again with what the fake workers had made durable.
    pub async fn restart(self) -> Cluster {
        self.meta.shutdown().await;
        let Cluster { meta, fake, store } = self;
        drop(meta);
        Cluster::on(store, fake).await
    }

    pub async fn create(&self, relation: Relation) -> RelationId {
        let options = CreateOptions { table_count: 1, ..CreateOptions::default() };
        self.meta.create_relation(relation, options).await.unwrap()
    }

    pub async fn created(&self, relation: Relation) -> RelationId {
        let id = self.create(relation).await;
        self.meta.wait_created(id, &Default::default()).await.unwrap();
        id
    }

    pub async fn insert(&self, table: RelationId) -> Epoch {
        self.fake.insert(table).await.unwrap()
    }

    /// A fresh read of all of them, at one epoch.
    pub async fn read(&self, ids: &[RelationId]) -> Vec<i64> {
        let epoch = self.meta.read_epoch(ids, None, true).await.unwrap();
        ids.iter().map(|id| self.fake.value_at(*id, epoch)).collect()
    }
}
