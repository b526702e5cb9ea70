//! The record stream at the leader (docs/design.md §10): every folded record goes to each process, in order, with the
//! fold's verdicts; what a process acknowledges is what its readers may read.
//!
//! Records wait here, by reference, until they are acknowledged. A process that falls further behind than is kept, or
//! that misses some, is sent what the log has.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, JobId, RelationId, crash};
use millrace_rpc::call_error::is_unreachable;
use millrace_rpc::log::{Entry, LogRecord};
use millrace_rpc::services::ComputeService;
use millrace_rpc::stream::{Acknowledged, AppliedRecord, EntryOutcome, StreamError, StreamMessage};
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::{Notify, watch};
use tracing::warn;

use crate::error::MetaError;
use crate::fold::Verdict;
use crate::log::{LogStore, Replayed};
use crate::shared::Shared;

/// Records that are kept for a process may have so many bytes together.
const KEPT_BYTES: usize = 16 << 20;
/// Records of one message.
const MESSAGE_RECORDS: usize = 64;
/// Records that are read back from the log at a time.
const REPLAYED_RECORDS: usize = 256;
/// Pauses before a message that failed is sent again.
const RETRY_MIN: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Queue {
    /// The newest records, without a gap.
    recent: VecDeque<(AppliedRecord, usize)>,
    bytes: usize,
    /// Number of the last record.
    newest: u64,
    /// Not told yet.
    horizons: BTreeMap<JobId, Epoch>,
    /// Records that are not acknowledged, and the jobs that they are about.
    open: VecDeque<(u64, Vec<JobId>)>,
}

/// What to send next.
#[derive(Debug, PartialEq)]
enum Next {
    Message(StreamMessage),
    /// The record is not kept any more.
    Missed,
    Nothing,
}

impl Queue {
    /// `jobs`: those that the record is about; `bytes`: its size.
    fn push(&mut self, record: AppliedRecord, jobs: &[JobId], bytes: usize) {
        if !jobs.is_empty() {
            self.open.push_back((record.number(), jobs.to_vec()));
        }
        self.newest = record.number();
        self.recent.push_back((record, bytes));
        self.bytes += bytes;
        while self.bytes > KEPT_BYTES && self.recent.len() > 1 {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        if let Some((_, bytes)) = self.recent.pop_front() {
            self.bytes -= bytes;
        }
    }

    fn next(&mut self, number: u64) -> Next {
        let oldest = self.recent.front().map_or(self.newest + 1, |(r, _)| r.number());
        if number < oldest && number <= self.newest {
            return Next::Missed;
        }
        let skipped = number.saturating_sub(oldest) as usize;
        let records = self.recent.iter().skip(skipped).take(MESSAGE_RECORDS);
        let records: Vec<_> = records.map(|(record, _)| record.clone()).collect();
        let horizons: Vec<_> = std::mem::take(&mut self.horizons).into_iter().collect();
        if records.is_empty() && horizons.is_empty() {
            return Next::Nothing;
        }
        Next::Message(StreamMessage { records, horizons })
    }

    /// Jobs to which records have been applied, and the last of these.
    fn acknowledge(&mut self, at: &Acknowledged) -> Vec<(JobId, u64)> {
        while self.recent.front().is_some_and(|(r, _)| r.number() <= at.received) {
            self.drop_oldest();
        }
        let behind: BTreeMap<JobId, u64> = at.behind.iter().copied().collect();
        let mut done = BTreeMap::new();
        let mut kept = Vec::new();
        while let Some((number, jobs)) = self.open.pop_front_if(|(n, _)| *n <= at.received) {
            let is_behind = |job: &JobId| behind.get(job).is_some_and(|from| *from <= number);
            let (waiting, applied): (Vec<JobId>, Vec<JobId>) =
                jobs.into_iter().partition(is_behind);
            done.extend(applied.into_iter().map(|job| (job, number)));
            if !waiting.is_empty() {
                kept.push((number, waiting));
            }
        }
        kept.into_iter().rev().for_each(|open| self.open.push_front(open));
        done.into_iter().collect()
    }
}

/// With the verdicts as they are sent.
pub fn applied(record: Arc<LogRecord>, verdicts: &[Verdict]) -> AppliedRecord {
    let outcome = |verdict: &Verdict| match verdict {
        Ok(applied) => EntryOutcome::Applied(applied.epoch),
        Err(reason) => EntryOutcome::Void(reason.to_string()),
    };
    AppliedRecord { record, outcomes: verdicts.iter().map(outcome).collect() }
}

/// The jobs whose versions the record's entries are about, also where an entry is void.
fn jobs_of(record: &LogRecord) -> Vec<JobId> {
    let mut jobs = BTreeSet::new();
    for entry in record.entries.iter().filter_map(|e| e.entry.as_ref()) {
        match entry {
            Entry::Commit(commit) => drop(jobs.insert(RelationId(commit.job))),
            Entry::EditVersion(edit) => drop(jobs.insert(RelationId(edit.job))),
            Entry::Transaction(t) => jobs.extend(t.commits.iter().map(|c| RelationId(c.job))),
            _ => {}
        }
    }
    jobs.into_iter().collect()
}

/// What one compute process is sent, and how far it is.
#[derive(Default)]
pub struct RecordStream {
    queue: Mutex<Queue>,
    /// There may be something to send; holds one permit, so no wake-up is lost.
    news: Notify,
    /// The last record up to which everything is applied; `u64::MAX`: the process is gone.
    applied: watch::Sender<u64>,
    /// Where the stream begins, once that is known.
    beginning: watch::Sender<Option<Beginning>>,
}

/// How far a process was from the records that the log had when this leader turned to it.
struct Beginning {
    /// The last of them.
    record: u64,
    at: Acknowledged,
}

impl Beginning {
    /// Whether all of them are applied to these jobs.
    fn is_over_for(&self, jobs: &[JobId]) -> bool {
        let lacks = |(job, from): &(JobId, u64)| jobs.contains(job) && *from <= self.record;
        self.at.received >= self.record && !self.at.behind.iter().any(lacks)
    }
}

impl RecordStream {
    /// What was not told, unless it has risen meanwhile.
    fn tell_again(&self, horizons: Vec<(JobId, Epoch)>) {
        let mut queue = self.queue.lock();
        for (job, horizon) in horizons {
            queue.horizons.entry(job).or_insert(horizon);
        }
    }

    async fn wait_applied(&self, number: u64) {
        let mut applied = self.applied.subscribe();
        // The sender is in `self`.
        let _ = applied.wait_for(|applied| *applied >= number).await;
    }

    fn next(&self, number: u64) -> Next {
        self.queue.lock().next(number)
    }

    /// The log has had the records up to this one when the stream was opened.
    fn begin(&self, record: u64) {
        {
            let mut queue = self.queue.lock();
            // Those before are there, and not kept.
            queue.newest = queue.newest.max(record);
        }
        let at = Acknowledged::default();
        self.beginning.send_replace(Some(Beginning { record, at }));
    }

    fn note_position(&self, at: &Acknowledged) {
        self.beginning.send_if_modified(|beginning| {
            let Some(beginning) = beginning else { return false };
            let is_over =
                beginning.at.received >= beginning.record && beginning.at.behind.is_empty();
            if !is_over {
                beginning.at = at.clone();
            }
            !is_over
        });
    }

    /// Completes when the process has applied to these jobs all that the log had when this leader turned to it, or is
    /// gone. A leader before this one may not have sent it everything.
    async fn wait_begun(&self, jobs: &[JobId]) {
        let (mut beginning, mut applied) = (self.beginning.subscribe(), self.applied.subscribe());
        let begun = beginning.wait_for(|b| b.as_ref().is_some_and(|b| b.is_over_for(jobs)));
        // The senders are in `self`.
        tokio::select! {
            _ = begun => {}
            _ = applied.wait_for(|applied| *applied == u64::MAX) => {}
        }
    }

    /// Jobs that have come further.
    pub fn acknowledge(&self, at: &Acknowledged) -> Vec<(JobId, u64)> {
        self.queue.lock().acknowledge(at)
    }

    pub fn set_applied(&self, number: u64) {
        self.applied.send_if_modified(|applied| {
            let more = number > *applied;
            *applied = number.max(*applied);
            more
        });
    }
}

/// The streams of all compute processes, by incarnation.
#[derive(Default)]
pub struct RecordStreams(Mutex<BTreeMap<u64, Arc<RecordStream>>>);

impl RecordStreams {
    /// From now on records are kept for this process.
    pub fn open(&self, incarnation: u64) -> Arc<RecordStream> {
        let stream = Arc::<RecordStream>::default();
        self.0.lock().insert(incarnation, Arc::clone(&stream));
        stream
    }

    /// Nobody waits for this process any more.
    pub fn close(&self, incarnation: u64) {
        let closed = self.0.lock().remove(&incarnation);
        if let Some(stream) = closed {
            stream.set_applied(u64::MAX);
        }
    }

    /// A record was folded.
    pub fn push(&self, record: &Arc<LogRecord>, verdicts: &[Verdict]) {
        let streams = self.0.lock();
        if streams.is_empty() {
            return;
        }
        let (jobs, bytes) = (jobs_of(record), record.encoded_len());
        for stream in streams.values() {
            let record = applied(Arc::clone(record), verdicts);
            stream.queue.lock().push(record, &jobs, bytes);
            stream.news.notify_one();
        }
    }

    /// No read will need versions of the relation below this epoch.
    pub fn raise_horizon(&self, job: JobId, horizon: Epoch) {
        for stream in self.0.lock().values() {
            stream.queue.lock().horizons.insert(job, horizon);
            stream.news.notify_one();
        }
    }

    /// Completes when every process that is there now has applied this record and all before it, or is gone.
    pub async fn wait_applied(&self, number: u64) {
        let streams: Vec<Arc<RecordStream>> = self.0.lock().values().cloned().collect();
        for stream in streams {
            stream.wait_applied(number).await;
        }
    }

    /// Completes when a process has applied to these jobs all that the log had when this leader turned to it, or is gone.
    pub async fn wait_begun(&self, incarnation: u64, jobs: &[JobId]) {
        let stream = self.0.lock().get(&incarnation).cloned();
        if let Some(stream) = stream {
            stream.wait_begun(jobs).await;
        }
    }

    /// The same of one process.
    pub async fn wait_applied_by(&self, incarnation: u64, number: u64) {
        let stream = self.0.lock().get(&incarnation).cloned();
        if let Some(stream) = stream {
            stream.wait_applied(number).await;
        }
    }
}

/// Sends the stream to a process until the server stops.
pub struct Sender {
    shared: Arc<Shared>,
    stream: Arc<RecordStream>,
    compute: Arc<dyn ComputeService>,
    log: LogStore,
    /// Of the process.
    incarnation: u64,
    /// The record that the process needs next.
    next: u64,
    /// As it said last.
    acknowledged: Acknowledged,
    pause: Duration,
}

impl Sender {
    /// Of the records after the newest one, and of those before that an earlier leader has not sent.
    pub fn new(
        shared: Arc<Shared>,
        compute: Arc<dyn ComputeService>,
        log: LogStore,
        incarnation: u64,
    ) -> Sender {
        // Opened first: no record is between the newest and those that are kept.
        let stream = shared.streams.open(incarnation);
        let number = shared.state.read().number;
        stream.begin(number);
        let acknowledged = Acknowledged::default();
        let (next, pause) = (number + 1, RETRY_MIN);
        Sender { shared, stream, compute, log, incarnation, next, acknowledged, pause }
    }

    pub async fn run(mut self) {
        self.begin().await;
        loop {
            match self.stream.next(self.next) {
                Next::Message(message) => self.send(message).await,
                Next::Missed => self.send_missed().await,
                Next::Nothing => self.wait().await,
            }
        }
    }

    /// Finds out what the process has.
    async fn begin(&mut self) {
        // Who has nothing yet begins with what is before. So does a process that runs everything itself.
        let newest = Acknowledged { received: self.next - 1, behind: Vec::new() };
        if self.shared.is_alone.get() != Some(&false) {
            return self.note(newest);
        }
        loop {
            let at = match self.apply(StreamMessage::default()).await {
                Ok(at) if at.received == 0 => newest.clone(),
                Ok(at) => at,
                Err(StreamError::Gap { next }) => {
                    Acknowledged { received: next.saturating_sub(1), behind: Vec::new() }
                }
                Err(error) => {
                    self.take_error(error).await;
                    continue;
                }
            };
            self.pause = RETRY_MIN;
            self.next = at.received + 1;
            return self.note(at);
        }
    }

    /// Until there is something to send. Meanwhile busy jobs go on.
    async fn wait(&mut self) {
        let stream = Arc::clone(&self.stream);
        let news = stream.news.notified();
        if self.acknowledged.behind.is_empty() {
            return news.await;
        }
        let compute = Arc::clone(&self.compute);
        tokio::select! {
            biased;
            () = news => {}
            further = compute.applied_since(self.acknowledged.clone()) => self.note(further),
        }
    }

    async fn send(&mut self, message: StreamMessage) {
        let horizons = message.horizons.clone();
        crash::point("meta-before-conclude");
        match self.apply(message).await {
            Ok(at) => {
                crash::point("meta-after-conclude");
                self.pause = RETRY_MIN;
                self.next = at.received.max(self.acknowledged.received) + 1;
                self.note(at);
            }
            Err(error) => {
                self.stream.tell_again(horizons);
                self.take_error(error).await;
            }
        }
    }

    async fn apply(&mut self, message: StreamMessage) -> Result<Acknowledged, StreamError> {
        let began = self.shared.env.now();
        let answer = self.compute.apply_records(message).await;
        let is_lost = matches!(&answer, Err(StreamError::Failed(error)) if is_unreachable(error));
        let now = self.shared.env.now();
        self.shared.members.note_call(self.incarnation, !is_lost, began, now);
        answer
    }

    async fn take_error(&mut self, error: StreamError) {
        match error {
            StreamError::Gap { next } => self.next = next,
            StreamError::Failed(error) => {
                warn!(%error, "records did not reach a process, trying again");
                self.back_off().await;
            }
        }
    }

    /// What is not kept any more, from the log.
    async fn send_missed(&mut self) {
        match self.log.replay(self.next, REPLAYED_RECORDS).await {
            Ok(missed) => {
                let again = |r: Replayed| applied(Arc::new(r.record), &r.verdicts);
                let records = missed.into_iter().map(again).collect();
                self.send(StreamMessage { records, horizons: Vec::new() }).await;
            }
            Err(error) => self.warn_missing(error).await,
        }
    }

    async fn warn_missing(&mut self, error: MetaError) {
        warn!(%error, record = self.next, "records that a process lacks cannot be read, trying again");
        self.back_off().await;
    }

    async fn back_off(&mut self) {
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(RETRY_MAX);
    }

    fn note(&mut self, at: Acknowledged) {
        // An answer that was overtaken by another says nothing.
        if at.received < self.acknowledged.received {
            return;
        }
        self.shared.acknowledge(self.incarnation, &self.stream, &at);
        self.stream.note_position(&at);
        self.acknowledged = at;
    }
}

#[cfg(test)]
mod tests {
    use millrace_rpc::log::LogEntry;
    use millrace_rpc::version::JobCommit;

    use super::*;
    use crate::fold::Applied;

    fn push(queue: &mut Queue, number: u64, jobs: &[u32], bytes: usize) {
        let entry = |job: &u32| {
            let statements = vec![Default::default(); bytes];
            let commit = JobCommit { job: *job, statements, ..JobCommit::default() };
            LogEntry::from(Entry::Commit(commit))
        };
        let entries: Vec<LogEntry> = jobs.iter().map(entry).collect();
        let outcome = Applied { epoch: Epoch(number), record: number, relation: None };
        let verdicts = vec![Ok(outcome); entries.len()];
        let record = Arc::new(LogRecord { number, entries, ..LogRecord::default() });
        let (jobs, bytes) = (jobs_of(&record), record.encoded_len());
        queue.push(applied(record, &verdicts), &jobs, bytes);
    }

    fn numbers(next: Next) -> Vec<u64> {
        match next {
            Next::Message(message) => message.records.iter().map(AppliedRecord::number).collect(),
            other => panic!("{other:?}"),
        }
    }

    const A: JobId = RelationId(1);
    const B: JobId = RelationId(2);

    #[test]
    fn a_busy_job_keeps_its_records_open_and_nobody_elses() {
        let mut queue = Queue::default();
        (4..=6).for_each(|number| push(&mut queue, number, &[1, 2], 0));
        assert_eq!(numbers(queue.next(4)), [4, 5, 6]);
        assert_eq!(numbers(queue.next(6)), [6]);
        let at = Acknowledged { received: 6, behind: vec![(A, 5)] };
        assert_eq!(queue.acknowledge(&at), [(A, 4), (B, 6)]);
        assert_eq!(queue.next(7), Next::Nothing);
        assert_eq!(queue.acknowledge(&at), []);
        push(&mut queue, 7, &[1], 0);
        let at = Acknowledged { received: 7, behind: vec![(A, 7)] };
        assert_eq!(queue.acknowledge(&at), [(A, 6)]);
        let at = Acknowledged { received: 7, behind: Vec::new() };
        assert_eq!(queue.acknowledge(&at), [(A, 7)]);
        assert!(queue.open.is_empty() && queue.recent.is_empty() && queue.bytes == 0);
    }

    #[test]
    fn what_is_not_kept_is_missed_and_nothing_is_sent_in_its_place() {
        let mut queue = Queue::default();
        let large = KEPT_BYTES / 8;
        (1..=9).for_each(|number| push(&mut queue, number, &[1], large));
        let oldest = queue.recent.front().map(|(r, _)| r.number()).unwrap_or_default();
        assert!(oldest > 1 && queue.bytes <= KEPT_BYTES, "{oldest}, {} bytes", queue.bytes);
        assert_eq!(queue.next(oldest - 1), Next::Missed);
        assert_eq!(numbers(queue.next(oldest)).first(), Some(&oldest));
        assert_eq!(queue.next(10), Next::Nothing);
    }
}
