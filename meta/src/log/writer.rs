//! The only writer of the log: one append in flight, everything that waits in the next record.
//!
//! An entry is acknowledged after its record is durable *and* folded. What a put did is never guessed:
//! "already exists" and unknown outcomes are resolved by reading the record back. If the bytes are ours
//! it happened; if another leader's record is there, it is folded, and the fold says whether we still
//! lead. A deposed writer answers everything with [`MetaError::Deposed`]; entries whose record is in
//! doubt are not answered before they are resolved, or with [`MetaError::Unconfirmed`] where a leader that
//! came after it has to tell.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::EnvHandle;
use millrace_common::crash;
use millrace_common::task::spawn;
use millrace_rpc::log::{Entry, LogEntry, LogRecord, encode_frame};
use millrace_rpc::version::StatementId;
use parking_lot::RwLock;
use prost::Message;
use prost::bytes::Bytes;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, warn};

use super::lead::{AppendStats, AppendWait, Check, Lead, Retention};
use super::snapshot::{self, Retained, SnapshotPolicy, Taken};
use super::store::{Created, LogStore, Opened, crc, fold_next};
use crate::clock::ClockGuard;
use crate::error::MetaError;
use crate::first_record;
use crate::fold::{self, Applied, Verdict};
use crate::state::MetaState;
use crate::status::ahead_of_clock;

/// Entries waiting at most; senders wait beyond.
const QUEUE: usize = 4_096;
/// A record stops taking entries at this size, so that a large one does not delay small ones.
const RECORD_BYTES: usize = 4 << 20;
/// Pauses between attempts to resolve an append.
pub(super) const RETRY_MIN: Duration = Duration::from_millis(20);
pub(super) const RETRY_MAX: Duration = Duration::from_secs(2);

/// Told about every record after it is folded, before its entries are answered. Must not block.
pub trait Observer: Send + Sync + 'static {
    fn folded(&self, record: &Arc<LogRecord>, verdicts: &[Verdict]);
}

/// The entries of a leader's first record, given the state that it follows and its term. `None`: it shall not lead after
/// that state.
pub type FirstEntries<'a> = &'a (dyn Fn(&MetaState, u64) -> Option<Vec<Entry>> + Send + Sync);

pub struct WriterOptions {
    pub env: EnvHandle,
    pub policy: SnapshotPolicy,
    /// Read at every snapshot and for the rule of late appends.
    pub log_retention: Retention,
    /// For how long superseded snapshots stay.
    pub object_retention: Retention,
    pub observer: Arc<dyn Observer>,
    /// While it is wrong, nothing is appended or proven.
    pub clock: Arc<ClockGuard>,
}

struct Waiting {
    entry: LogEntry,
    answer: oneshot::Sender<Result<Verdict, MetaError>>,
}

/// A handle; clones share the writer. The writer ends when the last handle is gone.
#[derive(Clone)]
pub struct LogWriter {
    queue: mpsc::Sender<Waiting>,
    lead: Arc<Lead>,
    clock: Arc<ClockGuard>,
    deposed: watch::Receiver<Option<MetaError>>,
}

impl LogWriter {
    /// Takes the lead: appends a record of the next term that holds `entries`, then serves. The state is
    /// kept up to date behind `state`. Returns the term. [`MetaError::Overtaken`]: nothing was written, because of the
    /// state that the log has come to.
    pub async fn lead(
        store: LogStore,
        opened: Opened,
        state: Arc<RwLock<MetaState>>,
        entries: FirstEntries<'_>,
        options: WriterOptions,
    ) -> Result<(LogWriter, u64), MetaError> {
        let nonce = options.env.random();
        let (deposed_tx, deposed) = watch::channel(None);
        *state.write() = opened.state;
        let (lead, checks) = Lead::new(
            store.clone(),
            Arc::clone(&state),
            options.env.clone(),
            nonce,
            Arc::clone(&options.log_retention),
        );
        let clock = Arc::clone(&options.clock);
        let mut writer = Writer {
            store,
            state,
            term: 0,
            nonce,
            lead: Arc::clone(&lead),
            records_since: opened.tail_records,
            bytes_since: opened.tail_bytes,
            snapshot_bytes: opened.snapshot_bytes,
            snapshot_task: None,
            oldest_record: None,
            clock_behind: false,
            options,
        };
        writer.take_lead(entries).await?;
        let term = writer.term;
        let (queue, receiver) = mpsc::channel(QUEUE);
        spawn("write the log", writer.run(receiver, checks, deposed_tx));
        spawn("ask the object store", Arc::clone(&lead).watch_store());
        Ok((LogWriter { queue, lead, clock, deposed }, term))
    }

    /// Durable and folded when it returns; the verdict is the fold's. After a refusal ([`MetaError::is_refusal`]) nothing
    /// has happened and the writer goes on; every other error is the end of this writer.
    pub async fn append(&self, entry: Entry) -> Result<Verdict, MetaError> {
        self.append_once(LogEntry::from(entry)).await
    }

    /// The same for an entry that may have been appended before, by its statement's id: if that has taken effect, nothing
    /// is appended, and this is the verdict.
    pub async fn append_once(&self, entry: LogEntry) -> Result<Verdict, MetaError> {
        let (answer, verdict) = oneshot::channel();
        if self.queue.send(Waiting { entry, answer }).await.is_err() {
            return Err(self.why_closed());
        }
        verdict.await.unwrap_or_else(|_| Err(self.why_closed()))
    }

    /// As `append`, with a void entry as an error.
    pub async fn apply(&self, entry: Entry) -> Result<Applied, millrace_common::SqlError> {
        Ok(self.append(entry).await??)
    }

    /// How the store takes appends.
    pub fn append_stats(&self) -> AppendStats {
        self.lead.append_stats()
    }

    /// The append under way, if one is.
    pub fn append_wait(&self) -> Option<AppendWait> {
        self.lead.append_wait()
    }

    /// For how long the store has answered nothing.
    pub fn store_wait(&self) -> Duration {
        self.lead.store_wait()
    }

    /// Whether the store answers something small that it is asked now. Returns late if it does not.
    pub async fn store_answers(&self) -> bool {
        let record = self.lead.state.read().number;
        self.lead.store.answers(record).await
    }

    fn why_closed(&self) -> MetaError {
        self.deposed.borrow().clone().unwrap_or(MetaError::Closed)
    }

    /// Returns once it is known that nobody else had taken the lead up to [`super::LEADER_LEASE`] ago, or that
    /// somebody has. It waits for a store that does not answer; `trouble` is told what it says.
    pub async fn prove_lead(&self, trouble: impl Fn(MetaError)) -> Result<(), MetaError> {
        let deposed = self.deposed.borrow().clone();
        if let Some(reason) = deposed {
            return Err(reason);
        }
        self.clock.check()?;
        self.lead.prove(trouble).await.map_err(|error| match error {
            MetaError::Closed => self.why_closed(),
            other => other,
        })
    }

    /// Completes when this writer has lost the lead.
    pub async fn deposed(&self) -> MetaError {
        let mut deposed = self.deposed.clone();
        match deposed.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or(MetaError::Closed),
            Err(_) => MetaError::Closed,
        }
    }
}

struct Writer {
    store: LogStore,
    state: Arc<RwLock<MetaState>>,
    term: u64,
    nonce: u64,
    lead: Arc<Lead>,
    records_since: u64,
    bytes_since: u64,
    snapshot_bytes: u64,
    snapshot_task: Option<tokio::task::JoinHandle<Option<Taken>>>,
    /// As the last snapshot has returned it.
    oldest_record: Option<u64>,
    /// The clock was behind the newest epoch when we looked last.
    clock_behind: bool,
    options: WriterOptions,
}

impl Writer {
    async fn run(
        mut self,
        mut queue: mpsc::Receiver<Waiting>,
        mut checks: mpsc::Receiver<Check>,
        deposed: watch::Sender<Option<MetaError>>,
    ) {
        loop {
            // In a fixed order, so that a seed repeats a run. Appends may follow each other without end; a check is asked
            // when the one before has been answered and is older than a lease, so that appends have their turn.
            let ended = tokio::select! {
                biased;
                Some(answer) = checks.recv() => {
                    let verdict = self.check_head().await;
                    let lost = verdict.as_ref().is_err_and(|e| !matches!(e, MetaError::Store(_)));
                    if let (true, Err(reason)) = (lost, &verdict) {
                        close(reason, &deposed);
                    }
                    // The reader may have given up.
                    let _ = answer.send(verdict);
                    lost
                }
                first = queue.recv() => match first {
                    Some(first) => self.serve(first, &mut queue, &deposed).await,
                    None => return,
                },
            };
            if ended {
                return;
            }
            self.maybe_snapshot().await;
        }
    }

    /// Appends what waits and answers it. Whether this was the end.
    async fn serve(
        &mut self,
        first: Waiting,
        queue: &mut mpsc::Receiver<Waiting>,
        deposed: &watch::Sender<Option<MetaError>>,
    ) -> bool {
        let (entries, answers) = gather(first, queue, |id| self.state.read().defined(id));
        if entries.is_empty() {
            return false;
        }
        let appended = match self.options.clock.check() {
            Ok(()) => self.append(entries).await,
            Err(skewed) => Err(skewed),
        };
        match appended {
            Ok(verdicts) => {
                for (at, answer) in answers {
                    // The sender may have been dropped: a cancelled statement.
                    let _ = answer.send(Ok(verdicts[at].clone()));
                }
                false
            }
            Err(reason) => {
                let goes_on = reason.is_refusal();
                match goes_on {
                    true => error!(error = %reason, "nothing was written"),
                    false => close(&reason, deposed),
                }
                for (_, answer) in answers {
                    let _ = answer.send(Err(reason.clone()));
                }
                !goes_on
            }
        }
    }

    /// Whether nobody has appended behind us; what an older leader has is folded.
    async fn check_head(&mut self) -> Result<(), MetaError> {
        let began = self.options.env.since_boot();
        let silent = self.lead.is_silent();
        let mut number = self.state.read().number + 1;
        while let Some(found) = self.store.read(number).await? {
            self.fold_foreign(number, &found)?;
            number += 1;
        }
        if silent {
            self.confirm_head(number - 1, number - 1).await?;
        }
        self.lead.proven(began);
        Ok(())
    }

    /// Appends term + 1, and the store's id where it has none, after folding whatever others append meanwhile.
    async fn take_lead(&mut self, entries: FirstEntries<'_>) -> Result<(), MetaError> {
        loop {
            let began = self.options.env.since_boot();
            let entries = {
                let state = self.state.read();
                self.term = state.term + 1;
                entries(&state, self.term).ok_or(MetaError::Overtaken)?
            };
            let store_id = first_record::store_id(&self.state.read(), &self.options.env);
            let entries = entries.into_iter().map(LogEntry::from).collect();
            let record = LogRecord { store_id, ..self.next_record(entries) };
            let bytes = encode_frame(&record, crc);
            crash::point("meta-before-lead");
            if self.resolve(record.number, &bytes).await?.is_none() {
                crash::point("meta-after-lead");
                self.lead.proven(began);
                self.fold(record, &bytes);
                return Ok(());
            }
        }
    }

    fn next_record(&self, entries: Vec<LogEntry>) -> LogRecord {
        let state = self.state.read();
        LogRecord {
            number: state.number + 1,
            term: self.term,
            leader: self.nonce,
            prev_crc: state.crc,
            epoch: state.epoch.next(self.options.env.now_ms()).0,
            entries,
            store_id: Bytes::new(),
        }
    }

    /// Epochs follow the clock and never go back: one that was ahead and was put right leaves them ahead.
    fn watch_clock(&mut self) {
        let ahead = ahead_of_clock(self.state.read().epoch, self.options.env.now_ms());
        if let Some(ahead) = ahead
            && !self.clock_behind
        {
            warn!(
                ahead_s = ahead.as_secs(),
                "the clock is behind the newest epoch: it has been set back. Until it gets there, now() of materialized \
                 views stands where the clock was before"
            );
        }
        self.clock_behind = ahead.is_some();
    }

    /// One record with these entries, durable and folded. An error: deposed, or the log is damaged.
    async fn append(&mut self, entries: Vec<LogEntry>) -> Result<Vec<Verdict>, MetaError> {
        self.watch_clock();
        loop {
            let began = self.options.env.since_boot();
            let silent = self.lead.is_silent();
            let record = self.next_record(entries.clone());
            let bytes = encode_frame(&record, crc);
            crash::point("meta-before-append");
            if self.resolve(record.number, &bytes).await?.is_some() {
                // Somebody else's record took the number and did not depose us (an older leader's late
                // one): ours goes behind it.
                continue;
            }
            if silent || self.lead.is_silent() {
                let confirmed = self.confirm_head(record.number, record.number - 1).await;
                confirmed.map_err(unconfirmed)?;
            }
            crash::point("meta-after-append");
            self.lead.proven(began);
            self.records_since += 1;
            self.bytes_since += bytes.len() as u64;
            return Ok(self.fold(record, &bytes));
        }
    }

    /// Puts `bytes` as record `number` until it is known who wrote that record. `None`: we did.
    /// Otherwise the foreign record, already folded; an error if it deposed us.
    async fn resolve(
        &mut self,
        number: u64,
        bytes: &Bytes,
    ) -> Result<Option<Arc<LogRecord>>, MetaError> {
        let lead = Arc::clone(&self.lead);
        let append = lead.begin_append(number);
        let mut pause = RETRY_MIN;
        let mut in_doubt = false;
        loop {
            let created = tokio::select! {
                biased;
                created = self.store.create(number, bytes, &append.watch) => created,
                // It is there: whatever the answer is, and when it comes.
                () = lead.found(number) => Created::Exists,
            };
            match created {
                Created::Yes => return Ok(None),
                Created::Exists => {}
                // No earlier attempt can still succeed: the number is free for another record.
                Created::Full(reason) if !in_doubt => return Err(MetaError::Full(reason)),
                Created::Full(reason) => {
                    warn!(number, reason, "append in doubt, trying again");
                    append.note_failure(&reason);
                }
                Created::Unknown(reason) => {
                    warn!(number, reason, "append in doubt, reading it back");
                    append.note_failure(&reason);
                }
            }
            match self.store.read(number).await {
                Ok(Some(found)) if found == *bytes => return Ok(None),
                Ok(Some(found)) => return self.fold_foreign(number, &found).map(Some),
                // Not there yet; a put under way may still land, but it has the same bytes.
                Ok(None) => {}
                Err(reason) => warn!(number, %reason, "record cannot be read back, trying again"),
            }
            in_doubt = true;
            lead.count_retry();
            let jitter = self.options.env.random() % (pause.as_millis() as u64).max(1);
            tokio::time::sleep(pause + Duration::from_millis(jitter)).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    fn fold_foreign(&mut self, number: u64, bytes: &[u8]) -> Result<Arc<LogRecord>, MetaError> {
        let mut state = self.state.write();
        let leading = state.leader == self.nonce;
        let (record, verdicts) = fold_next(&mut state, number, bytes)?;
        let term = state.term;
        drop(state);
        let record = Arc::new(record);
        self.options.observer.folded(&record, &verdicts);
        match leading && term > self.term {
            true => Err(MetaError::Deposed { term }),
            false => Ok(record),
        }
    }

    /// The rule of late appends (§10): after a long silence our number may have been used, covered and
    /// deleted meanwhile. We lead only if record `number` is the head of what is there, and no snapshot covers
    /// more than those up to `covered`.
    async fn confirm_head(&self, number: u64, covered: u64) -> Result<(), MetaError> {
        let mut pause = RETRY_MIN;
        loop {
            match futures::try_join!(
                self.store.list_records_after(number),
                self.store.list_snapshots()
            ) {
                Ok((records, snapshots)) => {
                    let beyond = !records.is_empty() || snapshots.iter().any(|(n, _)| *n > covered);
                    return if beyond {
                        Err(MetaError::Deposed { term: self.term + 1 })
                    } else {
                        Ok(())
                    };
                }
                Err(reason) => warn!(%reason, "the log cannot be listed, trying again"),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    fn fold(&mut self, record: LogRecord, bytes: &[u8]) -> Vec<Verdict> {
        let record = Arc::new(record);
        let verdicts = fold::apply(&mut self.state.write(), &record, crc(bytes));
        self.options.observer.folded(&record, &verdicts);
        verdicts
    }

    /// Starts a snapshot in the background when one is due and none is being written.
    async fn maybe_snapshot(&mut self) {
        if self.snapshot_task.as_ref().is_some_and(|t| t.is_finished())
            && let Some(task) = self.snapshot_task.take()
            && let Ok(Some(taken)) = task.await
        {
            self.snapshot_bytes = taken.size;
            self.oldest_record = taken.oldest_record;
        }
        let due =
            self.options.policy.is_due(self.records_since, self.bytes_since, self.snapshot_bytes);
        if !due || self.snapshot_task.is_some() {
            return;
        }
        self.records_since = 0;
        self.bytes_since = 0;
        let state = self.state.read().for_snapshot();
        let (store, oldest) = (self.store.clone(), self.oldest_record);
        let retained = Retained {
            records: (self.options.log_retention)(),
            snapshots: (self.options.object_retention)(),
        };
        let now_ms = self.options.env.now_ms();
        self.snapshot_task = Some(spawn("take a snapshot", async move {
            snapshot::take(&store, state, retained, oldest, now_ms)
                .await
                .inspect_err(|e| warn!(error = %e, "no snapshot this time; the log stays longer"))
                .ok()
        }));
    }
}

/// Of an entry whose record was written: that it has had no effect is not known.
fn unconfirmed(error: MetaError) -> MetaError {
    match error {
        MetaError::Deposed { term } => MetaError::Unconfirmed { term },
        other => other,
    }
}

/// Nothing is acknowledged from here on.
fn close(reason: &MetaError, deposed: &watch::Sender<Option<MetaError>>) {
    error!(%reason, "the log is closed");
    // For those whose entries were not written.
    deposed.send_replace(Some(match reason {
        MetaError::Unconfirmed { term } => MetaError::Deposed { term: *term },
        other => other.clone(),
    }));
}

/// Who waits for each entry of a record, by its position there.
type Answers = Vec<(usize, oneshot::Sender<Result<Verdict, MetaError>>)>;

/// Everything that waits, up to the size of a record. Definitions that have taken effect (`defined`) are answered and left
/// out, and of those with the same id one is taken: no id comes into the log twice.
fn gather(
    first: Waiting,
    queue: &mut mpsc::Receiver<Waiting>,
    defined: impl Fn(StatementId) -> Option<Applied>,
) -> (Vec<LogEntry>, Answers) {
    let mut entries: Vec<LogEntry> = Vec::new();
    let mut answers = Vec::new();
    let mut bytes = 0;
    let mut next = Some(first);
    while let Some(Waiting { entry, answer }) = next {
        let id = entry.statement;
        let same = id.and_then(|id| entries.iter().position(|e| e.statement == Some(id)));
        match (id.and_then(&defined), same) {
            // The sender may have been dropped: a cancelled statement.
            (Some(applied), _) => drop(answer.send(Ok(Ok(applied)))),
            (None, Some(at)) => answers.push((at, answer)),
            (None, None) => {
                bytes += entry.encoded_len();
                answers.push((entries.len(), answer));
                entries.push(entry);
            }
        }
        next = if bytes < RECORD_BYTES { queue.try_recv().ok() } else { None };
    }
    (entries, answers)
}
