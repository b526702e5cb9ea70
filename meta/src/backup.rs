//! Copies of a store: one version of everything, taken while a server goes on.
//!
//! A version is what the log says up to one record. Its objects are copied first and its snapshot last: a copy
//! that was cut off has no snapshot, holds no database, and can be begun again. A server that runs may collect
//! objects meanwhile. Then the log is read again and what its newer version names is copied too, until nothing of
//! a version was missing; each round copies only what is new.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use millrace_common::collections::HashMap;
use millrace_common::{SqlError, SqlState};
use millrace_rpc::log::FenceProcess;
use millrace_storage::StorageError;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};

use crate::fold::fence_processes;
use crate::log::LogStore;
use crate::objects::references_of;
use crate::state::MetaState;

/// Objects copied at the same time; each is held in memory.
const PARALLEL: usize = 4;
/// How often the log is read anew before it is given up.
const ROUNDS: usize = 100;

/// What was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The last record that the copy contains.
    pub record: u64,
    pub objects: usize,
    pub bytes: u64,
}

/// Copies the database in `from` to `to`, which holds none. `takes_over`: the copy's servers have higher terms than
/// any that may still run on the original.
pub async fn copy(
    from: Arc<dyn ObjectStore>,
    to: Arc<dyn ObjectStore>,
    takes_over: bool,
) -> Result<Copied, SqlError> {
    let (source, target) = (LogStore::new(Arc::clone(&from)), LogStore::new(Arc::clone(&to)));
    let (records, snapshots) =
        futures::try_join!(target.list_records_after(0), target.list_snapshots())?;
    if !records.is_empty() || !snapshots.is_empty() {
        return Err(not_ready("the target of the copy holds a database already")
            .with_hint("Give an empty directory or prefix."));
    }
    let mut state = source.open().await?.state;
    if state.number == 0 {
        return Err(not_ready("there is no database in the store that is to be copied"));
    }
    let mut copied: HashMap<String, u64> = HashMap::default();
    let mut rounds = 0;
    while let Some(missing) = copy_objects(&from, &to, &state, &mut copied).await? {
        let newer = source.open().await?.state;
        rounds += 1;
        if newer.number == state.number {
            return Err(SqlError::new(
                SqlState::DATA_CORRUPTED,
                format!("object \"{missing}\" does not exist, and the log names it"),
            ));
        }
        if rounds == ROUNDS {
            return Err(not_ready("objects are collected faster than they can be copied")
                .with_hint(
                    "ALTER SYSTEM SET object_retention to more than the copy takes, or stop the server for that time.",
                ));
        }
        state = newer;
    }
    if takes_over {
        state.term += 1;
        // They run on the original, if they still do: nobody has to ask them, or wait for them.
        let incarnations = state.processes.live().keys().copied().collect();
        fence_processes(&mut state, &FenceProcess { incarnations })?;
    }
    target.put_snapshot(&state).await?;
    let found = target.open().await?.state;
    if found.number != state.number || found.crc != state.crc {
        return Err(SqlError::new(
            SqlState::DATA_CORRUPTED,
            "the copy's log differs from the original's",
        ));
    }
    let bytes = copied.values().sum();
    Ok(Copied { record: state.number, objects: copied.len(), bytes })
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

/// One object, read back and compared. `None`: it is not there. Objects never change, so that one which is at the
/// target already is left as it is.
async fn copy_object(
    from: &dyn ObjectStore,
    to: &dyn ObjectStore,
    name: &str,
) -> Result<Option<u64>, SqlError> {
    let path = Path::from(name);
    let reading = |e| SqlError::from(StorageError::from_store("read", name, e));
    let bytes = match from.get(&path).await {
        Ok(found) => found.bytes().await.map_err(reading)?,
        Err(object_store::Error::NotFound { .. }) => return Ok(None),
        Err(e) => return Err(reading(e)),
    };
    match to.put_opts(&path, bytes.clone().into(), PutMode::Create.into()).await {
        Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => {}
        Err(e) => return Err(StorageError::from_store("write", name, e).into()),
    }
    let back = to.get(&path).await.map_err(reading)?.bytes().await.map_err(reading)?;
    match back == bytes {
        true => Ok(Some(bytes.len() as u64)),
        false => Err(SqlError::new(
            SqlState::DATA_CORRUPTED,
            format!("the copy of object \"{name}\" differs from the original"),
        )),
    }
}

fn not_ready(message: &str) -> SqlError {
    SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, message)
}
