//! Names, frames and single requests: what the log asks of an object store.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use millrace_common::EnvHandle;
use millrace_common::task::{spawn, spawn_blocking};
use millrace_rpc::log::{FrameError, LogRecord, Snapshot, decode_frame, encode_frame};
use millrace_storage::StorageError;
use millrace_storage::object::{Failure, OneAttempt, PutWatch, race};
use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode};
use prost::bytes::Bytes;
use tokio::task::JoinHandle;

use crate::clock::ClockOffset;
use crate::error::MetaError;
use crate::fold::Verdict;
use crate::state::MetaState;

const LOG: &str = "meta/log";
const SNAPSHOT: &str = "meta/snapshot";
/// The states that backups have.
const BACKUP: &str = "meta/backup";
const PROBE: &str = "meta/probe";
/// Records fetched at a time when opening: all there usually are, so that they cost one round.
const OPEN_PARALLEL: usize = 512;
/// Records behind the newest snapshot that are asked for before it is known how many there are: where there are no
/// more, they cost no round of their own.
const OPEN_AHEAD: u64 = 256;
/// Objects deleted at a time.
pub const DELETE_PARALLEL: usize = 8;
/// Between attempts to write a snapshot and its like, times their number.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(100);
/// A request that takes longer is given up and its outcome looked up.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// CRC-32 (IEEE), as in frames.
pub fn crc(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// What a conditional put is known to have done.
#[derive(Debug)]
pub enum Created {
    Yes,
    Exists,
    /// There was no space: it has not happened and will not.
    Full(String),
    /// Time-out or error: it may have happened, or may still happen.
    Unknown(String),
}

/// The log as found.
#[derive(Debug)]
pub struct Opened {
    pub state: MetaState,
    /// Bytes of the snapshot and of the records after it, for the snapshot policy.
    pub snapshot_bytes: u64,
    pub tail_bytes: u64,
    pub tail_records: u64,
}

/// A record that was read back and folded again.
#[derive(Debug)]
pub struct Replayed {
    pub record: LogRecord,
    pub verdicts: Vec<Verdict>,
}

#[derive(Clone, Debug)]
pub struct LogStore {
    store: Arc<dyn ObjectStore>,
}

impl LogStore {
    pub fn new(store: Arc<dyn ObjectStore>) -> LogStore {
        LogStore { store }
    }

    pub fn record_path(number: u64) -> Path {
        Path::from(format!("{LOG}/{number:020}"))
    }

    fn snapshot_path(number: u64) -> Path {
        Path::from(format!("{SNAPSHOT}/{number:020}"))
    }

    /// Where the state is that a backup has, as of this record.
    pub fn backup_path(number: u64) -> Path {
        Path::from(format!("{BACKUP}/{number:020}"))
    }

    /// Refuses a store that lets two creators of one key win. How far its clock is from that of this process, and what
    /// ends when nothing is left of the probe.
    pub async fn probe(&self, env: &EnvHandle) -> (Result<ClockOffset, MetaError>, JoinHandle<()>) {
        let path = LogStore::probe_path(env);
        let began = env.now_ms();
        let outcome = race(&*self.store, &path).await;
        let ended = env.now_ms();
        let deleted = self.delete_probe(path);
        let written = outcome.map_err(|e| match e {
            full @ StorageError::DiskFull { .. } => MetaError::Full(full.to_string()),
            unsuitable @ StorageError::Unsuitable { .. } => {
                MetaError::Unsuitable(unsuitable.to_string())
            }
            other => MetaError::Store(other.to_string()),
        });
        let offset = written.map(|written| {
            ClockOffset::of_store(began, written.last_modified.timestamp_millis(), ended)
        });
        (offset, deleted)
    }

    /// How far the store's clock is from that of this process. Three requests.
    pub async fn measure_clock(&self, env: &EnvHandle) -> Result<ClockOffset, MetaError> {
        let path = LogStore::probe_path(env);
        let began = env.now_ms();
        let measured = async {
            self.store.put(&path, Bytes::from_static(b"clock").into()).await?;
            let ended = env.now_ms();
            let written = self.store.head(&path).await?.last_modified;
            Ok(ClockOffset::of_store(began, written.timestamp_millis(), ended))
        };
        let measured = tokio::time::timeout(REQUEST_TIMEOUT, measured).await;
        self.delete_probe(path);
        measured.unwrap_or_else(|_| {
            Err(MetaError::Store(format!("no answer within {} s", REQUEST_TIMEOUT.as_secs())))
        })
    }

    fn probe_path(env: &EnvHandle) -> Path {
        Path::from(format!("{PROBE}/{:016x}", env.random()))
    }

    /// Nobody waits for it: a key left behind is harmless, its number is not used again.
    fn delete_probe(&self, path: Path) -> JoinHandle<()> {
        let store = Arc::clone(&self.store);
        spawn("delete a probe", async move {
            let _ = store.delete(&path).await;
        })
    }

    /// Reads the newest snapshot and everything after it. The records that it covers are not even listed: they stay for
    /// a day, and that may be a million.
    pub async fn open(&self) -> Result<Opened, MetaError> {
        let newest = self.list_snapshots().await?.iter().map(|(n, _)| *n).max();
        let covered = newest.unwrap_or(0);
        let snapshot = async {
            match newest {
                Some(n) => self.get(&LogStore::snapshot_path(n)).await.map(Some),
                None => Ok(None),
            }
        };
        let ahead = async { Ok(self.read_ahead(covered + 1).await) };
        let (snapshot, records, ahead) =
            futures::try_join!(snapshot, self.list_records_after(covered), ahead)?;
        let mut numbers: Vec<u64> =
            records.iter().map(|(n, _)| *n).filter(|n| *n > covered).collect();
        numbers.sort_unstable();
        let ahead = &ahead;
        let tail = stream::iter(numbers.clone())
            .map(|n| async move {
                match ahead.get(&n) {
                    Some(bytes) => Ok(bytes.clone()),
                    None => self.get(&LogStore::record_path(n)).await,
                }
            })
            .buffered(OPEN_PARALLEL)
            .try_collect::<Vec<Bytes>>()
            .await?;
        let snapshot_bytes = snapshot.as_ref().map_or(0, |b| b.len() as u64);
        let mut state = match snapshot {
            Some(bytes) => MetaState::from_snapshot(decode::<Snapshot>(
                &LogStore::snapshot_path(covered),
                &bytes,
            )?),
            None => MetaState::default(),
        };
        let tail_bytes = tail.iter().map(|b| b.len() as u64).sum();
        for (number, bytes) in numbers.iter().zip(&tail) {
            fold_next(&mut state, *number, bytes)?;
        }
        Ok(Opened { state, snapshot_bytes, tail_bytes, tail_records: tail.len() as u64 })
    }

    /// The records from `first` on, at most `limit`, with the fold's verdicts: what a process has missed. They are folded
    /// anew from the newest snapshot before them.
    pub async fn replay(&self, first: u64, limit: usize) -> Result<Vec<Replayed>, MetaError> {
        let mut state = self.newest_snapshot(first.saturating_sub(1)).await?;
        let mut replayed = Vec::new();
        while replayed.len() < limit {
            let number = state.number + 1;
            let Some(bytes) = self.read(number).await? else {
                // Deleted, or never written.
                return if number < first { Err(MetaError::Gap { number }) } else { Ok(replayed) };
            };
            let (record, verdicts) = fold_next(&mut state, number, &bytes)?;
            if number >= first {
                replayed.push(Replayed { record, verdicts });
            }
        }
        Ok(replayed)
    }

    /// The state after record `number`, folded anew: its records must still be there, unless a snapshot covers them.
    pub async fn state_at(&self, number: u64) -> Result<MetaState, MetaError> {
        let mut state = self.newest_snapshot(number).await?;
        while state.number < number {
            let next = state.number + 1;
            let bytes = self.read(next).await?.ok_or(MetaError::Gap { number: next })?;
            fold_next(&mut state, next, &bytes)?;
        }
        Ok(state)
    }

    /// The newest snapshot of a record up to `last`; without one, the state before the first record.
    async fn newest_snapshot(&self, last: u64) -> Result<MetaState, MetaError> {
        let snapshots = self.list_snapshots().await?;
        match snapshots.iter().map(|(n, _)| *n).filter(|n| *n <= last).max() {
            Some(n) => self.read_state(&LogStore::snapshot_path(n)).await,
            None => Ok(MetaState::default()),
        }
    }

    async fn read_state(&self, path: &Path) -> Result<MetaState, MetaError> {
        Ok(MetaState::from_snapshot(decode::<Snapshot>(path, &self.get(path).await?)?))
    }

    /// The records of which a backup's state is there.
    pub async fn list_backups(&self) -> Result<BTreeSet<u64>, MetaError> {
        Ok(self.list(BACKUP).await?.into_iter().map(|(number, _)| number).collect())
    }

    /// Writes the state that a backup has; one that is already there is the same.
    pub async fn put_backup(&self, state: MetaState) -> Result<(), MetaError> {
        let path = LogStore::backup_path(state.number);
        let bytes = spawn_blocking("encode a backup", move || encode_snapshot(&state)).await;
        let bytes =
            bytes.map_err(|e| MetaError::Store(format!("the backup was not encoded: {e}")))?;
        Ok(self.put_if_absent(&path, bytes).await?)
    }

    /// The state that a backup has; `None`: it is not there.
    pub async fn read_backup(&self, number: u64) -> Result<Option<MetaState>, MetaError> {
        let path = LogStore::backup_path(number);
        let Some(bytes) = self.get_optional(&path).await? else { return Ok(None) };
        Ok(Some(MetaState::from_snapshot(decode::<Snapshot>(&path, &bytes)?)))
    }

    /// The records from `first` on, as far as they are among the next few and can be read. Which ones there must be, the
    /// list of all tells.
    async fn read_ahead(&self, first: u64) -> BTreeMap<u64, Bytes> {
        let reads = (first..first + OPEN_AHEAD).map(|n| async move {
            let found = self.get_optional(&LogStore::record_path(n)).await.ok()??;
            Some((n, found))
        });
        futures::future::join_all(reads).await.into_iter().flatten().collect()
    }

    async fn get(&self, path: &Path) -> Result<Bytes, MetaError> {
        Ok(self.store.get(path).await?.bytes().await?)
    }

    /// Number and description of every object below `prefix`.
    pub async fn list(&self, prefix: &str) -> Result<Vec<(u64, ObjectMeta)>, MetaError> {
        let prefix = Path::from(prefix);
        let all: Vec<ObjectMeta> = self.store.list(Some(&prefix)).try_collect().await?;
        Ok(all.into_iter().filter_map(numbered).collect())
    }

    /// The records with a number above this one.
    pub async fn list_records_after(
        &self,
        number: u64,
    ) -> Result<Vec<(u64, ObjectMeta)>, MetaError> {
        let (prefix, offset) = (Path::from(LOG), LogStore::record_path(number));
        let listed = self.store.list_with_offset(Some(&prefix), &offset);
        let all: Vec<ObjectMeta> = listed.try_collect().await?;
        Ok(all.into_iter().filter_map(numbered).collect())
    }

    /// When a record was written, in wall-clock milliseconds; `None`: there is none.
    pub async fn record_time(&self, number: u64) -> Result<Option<i64>, MetaError> {
        match self.store.head(&LogStore::record_path(number)).await {
            Ok(meta) => Ok(Some(meta.last_modified.timestamp_millis())),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    pub async fn list_snapshots(&self) -> Result<Vec<(u64, ObjectMeta)>, MetaError> {
        self.list(SNAPSHOT).await
    }

    /// Creates record `number`; `watch` is told how that goes on.
    pub async fn create(&self, number: u64, bytes: &Bytes, watch: &PutWatch) -> Created {
        let path = LogStore::record_path(number);
        let options = watch.options(PutMode::Create);
        let put = self.store.put_opts(&path, bytes.clone().into(), options);
        match tokio::time::timeout(REQUEST_TIMEOUT, put).await {
            Ok(Ok(_)) => Created::Yes,
            Ok(Err(object_store::Error::AlreadyExists { .. })) => Created::Exists,
            Ok(Err(e)) => match StorageError::from_store("write", path.as_ref(), e) {
                full @ StorageError::DiskFull { .. } => Created::Full(full.to_string()),
                other => Created::Unknown(other.to_string()),
            },
            Err(_) => Created::Unknown(format!("no answer within {} s", REQUEST_TIMEOUT.as_secs())),
        }
    }

    /// Record `number`'s bytes; `None`: there is none now.
    pub async fn read(&self, number: u64) -> Result<Option<Bytes>, MetaError> {
        let path = LogStore::record_path(number);
        match tokio::time::timeout(REQUEST_TIMEOUT, self.get_optional(&path)).await {
            Ok(result) => result,
            Err(_) => {
                Err(MetaError::Store(format!("no answer within {} s", REQUEST_TIMEOUT.as_secs())))
            }
        }
    }

    /// Whether the store answers a question that costs it little: whether it has this record. The answer does not matter;
    /// that it wants fewer questions is one, which any leader would get.
    pub async fn answers(&self, number: u64) -> bool {
        let path = LogStore::record_path(number);
        let mut options = GetOptions { head: true, ..GetOptions::default() };
        options.extensions.insert(OneAttempt { again: false });
        let asked = self.store.get_opts(&path, options);
        let answer = tokio::time::timeout(REQUEST_TIMEOUT, asked).await;
        match answer {
            Ok(Ok(_) | Err(object_store::Error::NotFound { .. })) => true,
            Ok(Err(error)) => Failure::of(&error) == Failure::SlowDown,
            Err(_) => false,
        }
    }

    async fn get_optional(&self, path: &Path) -> Result<Option<Bytes>, MetaError> {
        match self.store.get(path).await {
            Ok(found) => Ok(Some(found.bytes().await?)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Writes the snapshot of `state`; returns its size. One that is already there is the same.
    pub async fn put_snapshot(&self, state: &MetaState) -> Result<u64, MetaError> {
        self.put_encoded_snapshot(state.number, encode_snapshot(state)).await
    }

    /// As `put_snapshot`, of what [`encode_snapshot`] has made of the state after record `number`.
    pub async fn put_encoded_snapshot(&self, number: u64, bytes: Bytes) -> Result<u64, MetaError> {
        let size = bytes.len() as u64;
        self.put_if_absent(&LogStore::snapshot_path(number), bytes).await?;
        Ok(size)
    }

    /// Puts an object unless one is there, which stays as it is.
    pub async fn put_if_absent(
        &self,
        path: &Path,
        bytes: Bytes,
    ) -> Result<(), object_store::Error> {
        /// What is unknown of an attempt does not matter to the next one: the bytes are the same.
        const ATTEMPTS: u32 = 5;
        let mut attempt = 1;
        loop {
            let put = self.store.put_opts(path, bytes.clone().into(), PutMode::Create.into());
            match put.await {
                Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => return Ok(()),
                Err(object_store::Error::Generic { .. }) if attempt < ATTEMPTS => {}
                Err(e) => return Err(e),
            }
            tokio::time::sleep(ATTEMPT_PAUSE * attempt).await;
            attempt += 1;
        }
    }

    /// Deletes objects, about in this order; those already gone count as deleted. Returns those that it could not delete.
    pub async fn delete(&self, paths: Vec<Path>) -> Vec<Path> {
        let delete = |path: Path| async move {
            match self.store.delete(&path).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => None,
                Err(_) => Some(path),
            }
        };
        let failed = stream::iter(paths).map(delete).buffered(DELETE_PARALLEL);
        failed.filter_map(|path| async move { path }).collect().await
    }

    /// Name and size of every object below `prefix`.
    pub async fn list_sizes(&self, prefix: &str) -> Result<Vec<(String, u64)>, MetaError> {
        let prefix = Path::from(prefix);
        let all: Vec<ObjectMeta> = self.store.list(Some(&prefix)).try_collect().await?;
        Ok(all.into_iter().map(|m| (m.location.to_string(), m.size)).collect())
    }
}

/// The bytes of a snapshot of this state.
pub fn encode_snapshot(state: &MetaState) -> Bytes {
    encode_frame(&state.to_snapshot(), crc)
}

fn numbered(object: ObjectMeta) -> Option<(u64, ObjectMeta)> {
    Some((object.location.filename()?.parse().ok()?, object))
}

fn decode<M: prost::Message + Default>(path: &Path, bytes: &[u8]) -> Result<M, MetaError> {
    decode_frame(bytes, crc).map_err(|error| match (path.to_string(), error) {
        (object, FrameError::Newer { needed }) => MetaError::Newer { object, needed },
        (object, error) => MetaError::Corrupt { object, error },
    })
}

/// Record `number`, of its bytes.
pub fn decode_record(number: u64, bytes: &[u8]) -> Result<LogRecord, MetaError> {
    decode(&LogStore::record_path(number), bytes)
}

/// Checks that `bytes` are the record after `state`, and folds it.
pub fn fold_next(
    state: &mut MetaState,
    number: u64,
    bytes: &[u8],
) -> Result<(LogRecord, Vec<Verdict>), MetaError> {
    if number != state.number + 1 {
        return Err(MetaError::Gap { number: state.number + 1 });
    }
    let record = decode_record(number, bytes)?;
    if record.number != number || record.prev_crc != state.crc {
        return Err(MetaError::Gap { number });
    }
    let verdicts = crate::fold::apply(state, &record, crc(bytes));
    Ok((record, verdicts))
}
