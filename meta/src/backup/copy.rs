//! Copies of a store: one version of everything, taken while a server goes on.
//!
//! A version is what the log says up to one record. Its objects are copied first and its snapshot last: a copy
//! that was cut off has no snapshot, holds no database, and can be begun again; what it has left behind says what it is
//! a copy of, and for what. Of the newest version a server that runs may collect objects meanwhile. Then the log is read
//! again and what its newer version names is copied too, until nothing of a version was missing; each round copies only
//! what is new. What a named backup names stays.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryFutureExt, TryStreamExt, stream};
use millrace_common::collections::HashMap;
use millrace_common::{EnvHandle, SqlError, SqlState};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::log::FenceProcess;
use millrace_rpc::store_id::StoreId;
use millrace_storage::StorageError;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};

use super::named::{Backup, Backups};
use crate::fold::fence_processes;
use crate::log::LogStore;
use crate::objects::references_of;
use crate::state::MetaState;

/// Objects copied at the same time; each is held in memory.
const PARALLEL: usize = 4;
/// For how long an object is tried again while the stores fail, and the pause in between. A copy of much data outlasts what
/// stores refuse now and then.
const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_secs(1);
/// How often the log is read anew before it is given up.
const ROUNDS: usize = 100;
/// Says what a copy is of, and for what, until it has ended.
const MARK: &str = "meta/copying";
/// Where a target cannot be used.
const OTHER_TARGET: &str = "Give an empty directory or prefix.";
/// By how much the terms of a restored store are raised at least, and at most beyond that: no process of the store that
/// it comes from, or of another one that comes from the same backup, is given the same numbers.
const RAISE: (u64, u64) = (1_000, 1_000_000);

/// What was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The last record that the copy contains.
    pub record: u64,
    pub objects: usize,
    pub bytes: u64,
    /// Sinks of the copy that wait, because it is to go on by itself.
    pub paused_sinks: usize,
}

/// Which version is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which<'a> {
    /// What the log says now.
    Newest,
    /// A backup that is not released, by its name or the number of its record.
    Backup(&'a str),
}

/// What a copy is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// It is kept, to be restored some time. It has the store id of the original.
    Keep,
    /// Servers are started on it, while others may still run on the original: it has a store id of its own, they have
    /// higher terms and other incarnations, and its sinks to targets outside of it wait, because the original may publish there.
    Run,
}

/// Copies a version of the database in `from` to `to`, which is empty, or holds what an earlier copy of `origin`, the
/// name of what is in `from`, for the same purpose has left behind.
pub async fn copy(
    from: Arc<dyn ObjectStore>,
    to: Arc<dyn ObjectStore>,
    origin: &str,
    which: Which<'_>,
    purpose: Purpose,
) -> Result<Copied, SqlError> {
    let (source, target) = (LogStore::new(Arc::clone(&from)), LogStore::new(Arc::clone(&to)));
    let newest = source.open().await?.state;
    if newest.number == 0 {
        return Err(not_ready("there is no database in the store that is to be copied"));
    }
    let given = newest.term.max(newest.processes.last());
    let (state, version) = match which {
        Which::Newest => (newest, format!("the newest version of {origin}")),
        Which::Backup(name) => {
            let state = state_of(&source, backup_called(&newest, name)?).await?;
            let version = format!("record {} ({:08x}) of {origin}", state.number, state.crc);
            (state, version)
        }
    };
    let mark = match purpose {
        Purpose::Keep => version,
        Purpose::Run => format!("{version} for servers"),
    };
    check_target(&target, &to, &mark, state.number).await?;
    let mut copied: HashMap<String, u64> = HashMap::default();
    let mut state = copy_all(&from, &to, &source, state, which, &mut copied).await?;
    // They are of the original: nothing of this is copied.
    state.backups = Backups::default();
    state.objects.forget_garbage();
    let paused_sinks = match purpose {
        Purpose::Keep => 0,
        Purpose::Run => run_apart(&mut state, given)?,
    };
    target.put_snapshot(&state).await?;
    let found = target.open().await?.state;
    if found.number != state.number || found.crc != state.crc {
        return Err(SqlError::new(
            SqlState::DATA_CORRUPTED,
            "the copy's log differs from the original's",
        ));
    }
    // It is complete; a mark that stays does no harm.
    let _ = to.delete(&Path::from(MARK)).await;
    let bytes = copied.values().sum();
    Ok(Copied { record: state.number, objects: copied.len(), bytes, paused_sinks })
}

/// Copies until nothing of a version was missing; returns that version.
async fn copy_all(
    from: &Arc<dyn ObjectStore>,
    to: &Arc<dyn ObjectStore>,
    source: &LogStore,
    mut state: MetaState,
    which: Which<'_>,
    copied: &mut HashMap<String, u64>,
) -> Result<MetaState, SqlError> {
    let mut rounds = 0;
    while let Some(missing) = copy_objects(from, to, &state, copied).await? {
        let newer = source.open().await?.state;
        if let Which::Backup(name) = which {
            // It may have been released meanwhile.
            backup_called(&newer, name)?;
        }
        rounds += 1;
        if matches!(which, Which::Backup(_)) || newer.number == state.number {
            return Err(SqlError::new(
                SqlState::DATA_CORRUPTED,
                format!("object \"{missing}\" does not exist, and the log names it"),
            ));
        }
        if rounds == ROUNDS {
            return Err(not_ready("objects are collected faster than they can be copied")
                .with_hint(
                    "ALTER SYSTEM SET object_retention to more than the copy takes, or make a backup with millrace ctl backup.",
                ));
        }
        state = newer;
    }
    Ok(state)
}

/// Makes of a copied state one that goes on apart from the original. `given`: the newest term, or incarnation, that the
/// original has by now, which may be far beyond those of the state. Returns how many sinks wait.
fn run_apart(state: &mut MetaState, given: u64) -> Result<usize, SqlError> {
    let (least, most) = RAISE;
    let env = EnvHandle::default();
    let raise = least + env.random() % most;
    state.term = state.term.max(state.processes.last()).max(given) + raise;
    // Processes that are given one store for the other tell them apart by it.
    state.store_id = Some(StoreId::random(&env));
    // They run on the original, if they still do: nobody has to ask them, or wait for them.
    let incarnations = state.processes.live().keys().copied().collect();
    fence_processes(state, &FenceProcess { incarnations })?;
    let mut paused = 0;
    for relation in state.relations.values_mut() {
        let leads_out = relation.kind() == RelationKind::Sink && relation.target == 0;
        if leads_out && !relation.paused {
            Arc::make_mut(relation).paused = true;
            paused += 1;
        }
    }
    Ok(paused)
}

/// A backup by its name, or the number of its record.
fn backup_called<'a>(state: &'a MetaState, name: &str) -> Result<&'a Backup, SqlError> {
    let number: Option<u64> = name.parse().ok();
    let mut backups = state.backups.iter();
    let found = backups.find(|backup| backup.name == name || Some(backup.number) == number);
    found.ok_or_else(|| {
        let message = format!("there is no backup \"{name}\", or it has been released");
        let names: Vec<&str> = state.backups.iter().map(|b| b.name.as_str()).collect();
        SqlError::new(SqlState::UNDEFINED_OBJECT, message).with_hint(match names.is_empty() {
            true => "There are none: millrace ctl backup create makes one.".to_owned(),
            false => format!("There are: {}.", names.join(", ")),
        })
    })
}

async fn state_of(source: &LogStore, backup: &Backup) -> Result<MetaState, SqlError> {
    let state = source.read_backup(backup.number).await?;
    state.ok_or_else(|| {
        not_ready(&format!("backup \"{}\" is not complete: its state is not there", backup.name))
            .with_hint("The leader writes it; millrace ctl backup list shows when it has.")
    })
}

/// Refuses a target that holds anything but what a copy with this mark has left behind, which may be complete: it was cut
/// off before it could tell. Leaves the mark there. `record`: the last one of the copy.
async fn check_target(
    target: &LogStore,
    to: &Arc<dyn ObjectStore>,
    mark: &str,
    record: u64,
) -> Result<(), SqlError> {
    let (records, snapshots, mut left) = futures::try_join!(
        target.list_records_after(0).map_err(SqlError::from),
        target.list_snapshots().map_err(SqlError::from),
        left_behind(to),
    )?;
    let is_own = left.as_deref() == Some(mark);
    let is_complete = is_own && snapshots.iter().all(|(number, _)| *number == record);
    if !records.is_empty() || !(snapshots.is_empty() || is_complete) {
        return Err(has_database());
    }
    if left.is_none() {
        if let Some(first) = to.list(None).try_next().await.map_err(reading)? {
            let message =
                format!("the target of the copy is not empty: it holds \"{}\"", first.location);
            return Err(not_ready(&message).with_hint(OTHER_TARGET));
        }
        let written = target.put_if_absent(&Path::from(MARK), mark.to_owned().into()).await;
        written.map_err(|e| StorageError::from_store("write", MARK, e))?;
        // Another copy may have begun since.
        left = left_behind(to).await?;
    }
    match left {
        Some(found) if found == mark => Ok(()),
        Some(found) => {
            let message = format!(
                "the target of the copy holds what a copy of {found} has left behind, and this is a copy of {mark}"
            );
            Err(not_ready(&message).with_hint(OTHER_TARGET))
        }
        // It has ended meanwhile.
        None => Err(has_database()),
    }
}

/// The mark of a copy that has not ended, or was cut off.
async fn left_behind(to: &Arc<dyn ObjectStore>) -> Result<Option<String>, SqlError> {
    match to.get(&Path::from(MARK)).await {
        Ok(found) => {
            let found = found.bytes().await.map_err(reading)?;
            Ok(Some(String::from_utf8_lossy(&found).into_owned()))
        }
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(e) => Err(reading(e)),
    }
}

/// The target cannot be read.
fn reading(error: object_store::Error) -> SqlError {
    StorageError::from_store("read", MARK, error).into()
}

fn has_database() -> SqlError {
    not_ready("the target of the copy holds a database already").with_hint(OTHER_TARGET)
}

/// Copies what the version names and is not copied yet; the first object that is not there any more.
async fn copy_objects(
    from: &Arc<dyn ObjectStore>,
    to: &Arc<dyn ObjectStore>,
    state: &MetaState,
    copied: &mut HashMap<String, u64>,
) -> Result<Option<String>, SqlError> {
    let mut names: Vec<String> = state
        .jobs
        .values()
        .flat_map(|job| references_of(&job.version))
        .map(|(name, _)| name)
        .filter(|name| !name.is_empty() && !copied.contains_key(*name))
        .map(str::to_owned)
        .collect();
    names.sort_unstable();
    names.dedup();
    let mut copies = stream::iter(names)
        .map(|name| async move {
            let size = copy_object(from.as_ref(), to.as_ref(), &name).await?;
            Ok::<_, SqlError>((name, size))
        })
        .buffer_unordered(PARALLEL);
    let mut missing = None;
    while let Some((name, size)) = copies.try_next().await? {
        match size {
            Some(size) => drop(copied.insert(name, size)),
            None => missing = Some(name),
        }
    }
    Ok(missing)
}

/// One object, read back and compared; again while the stores fail, up to [`PATIENCE`]. `None`: it is not there. Objects
/// never change, so that one which is at the target already is left as it is.
async fn copy_object(
    from: &dyn ObjectStore,
    to: &dyn ObjectStore,
    name: &str,
) -> Result<Option<u64>, SqlError> {
    let env = EnvHandle::default();
    let began = env.now();
    loop {
        match try_copy(from, to, name).await {
            Ok(Some(Compared { is_same: false, .. })) => {
                return Err(SqlError::new(
                    SqlState::DATA_CORRUPTED,
                    format!("the copy of object \"{name}\" differs from the original"),
                ));
            }
            Ok(copied) => return Ok(copied.map(|copied| copied.size)),
            Err(error) if may_pass(&error) && env.elapsed(began) < PATIENCE => {
                tracing::warn!(%error, "an object is not copied yet, trying again");
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// An object at the target.
struct Compared {
    size: u64,
    is_same: bool,
}

async fn try_copy(
    from: &dyn ObjectStore,
    to: &dyn ObjectStore,
    name: &str,
) -> Result<Option<Compared>, StorageError> {
    let path = Path::from(name);
    let reading = |e| StorageError::from_store("read", name, e);
    let bytes = match from.get(&path).await {
        Ok(found) => found.bytes().await.map_err(reading)?,
        Err(object_store::Error::NotFound { .. }) => return Ok(None),
        Err(e) => return Err(reading(e)),
    };
    match to.put_opts(&path, bytes.clone().into(), PutMode::Create.into()).await {
        Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => {}
        Err(e) => return Err(StorageError::from_store("write", name, e)),
    }
    let back = to.get(&path).await.map_err(reading)?.bytes().await.map_err(reading)?;
    Ok(Some(Compared { size: bytes.len() as u64, is_same: back == bytes }))
}

/// Whether another attempt may end differently. What is unknown of one does not matter to the next: the bytes are the same.
fn may_pass(error: &StorageError) -> bool {
    matches!(
        error,
        StorageError::Timeout { .. }
            | StorageError::Io { .. }
            | StorageError::OutcomeUnknown { .. }
    )
}

fn not_ready(message: &str) -> SqlError {
    SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, message)
}
