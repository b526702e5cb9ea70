//! What a process opens and takes for itself: its data directory, the object store, and the lead.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use millrace_common::SqlState;
use millrace_meta::{Meta, MetaOptions, is_overtaken};
use millrace_storage::given_up::GivenUp;
use millrace_storage::object::{MeterOptions, Metered, Reserve, open_with};
use millrace_storage::recovery_reads::TailPrefetch;
use millrace_storage::{StateStore, StoreOptions};
use object_store::ObjectStore;
use tokio::runtime::Handle;

use super::options::{meta_options, store_options};
use super::{Overrides, StartError};
use crate::candidate::Candidate;
use crate::config::Config;
use crate::leadership::{Leadership, outwait_predecessors};

/// Reads the log, takes the lead and opens the state store.
pub(super) async fn open_state(
    config: &Config,
    overrides: &Overrides,
    object_store: Arc<dyn ObjectStore>,
    background: &Option<Handle>,
    candidate: &Candidate,
) -> Result<(Arc<Meta>, Arc<StateStore>), StartError> {
    let late_store: Arc<OnceLock<Arc<StateStore>>> = Arc::default();
    let tail: Arc<OnceLock<Arc<TailPrefetch>>> = Arc::default();
    let given_up = Arc::<GivenUp>::default();
    let options = || MetaOptions {
        given_up: Arc::clone(&given_up),
        ..meta_options(config, overrides, Arc::clone(&object_store), &late_store, &tail)
    };
    let meta = loop {
        match take_lead(config, overrides, || candidate.options(options())).await {
            // Another one was first, and is asked now.
            Err(StartError::Meta(error)) if is_overtaken(&error) => {}
            taken => break taken?,
        }
    };
    let options = StoreOptions {
        prefetch: tail.get().cloned(),
        background: background.clone(),
        given_up,
        ..store_options(config, overrides, object_store, meta.incarnation())
    };
    let store = StateStore::open(options).await?;
    // Set once, here: nobody else holds the cell yet.
    let _ = late_store.set(Arc::clone(&store));
    Ok((meta, store))
}

/// Takes the data directory for this process; the kernel releases it when the process ends.
pub(crate) fn lock(data_dir: &Path) -> Result<File, StartError> {
    let path = data_dir.to_path_buf();
    std::fs::create_dir_all(data_dir)
        .map_err(|source| StartError::DataDir { path: path.clone(), source })?;
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(data_dir.join("lock"))
        .map_err(|source| StartError::Lock { path: path.clone(), source })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StartError::Locked { path }),
        Err(TryLockError::Error(source)) => Err(StartError::Lock { path, source }),
    }
}

/// Opens the log and takes the lead. Where the store has no space left, some of what is kept aside for that is used.
pub(crate) async fn take_lead(
    config: &Config,
    overrides: &Overrides,
    options: impl Fn() -> MetaOptions,
) -> Result<Arc<Meta>, StartError> {
    let reserve = match overrides.object_store {
        Some(_) => None,
        None => Reserve::of(&config.object_store),
    };
    let mut full = false;
    let meta = loop {
        match Meta::open(options()).await {
            Err(error) if error.state == SqlState::DISK_FULL && release(&reserve).await => {
                full = true;
            }
            opened => break opened?,
        }
    };
    if full {
        tracing::warn!(
            store = config.object_store,
            "the object store has no space left: reads are served, and statements that write are refused until some \
             is freed"
        );
    } else if let Some(reserve) = reserve {
        // Nobody waits for it.
        tokio::task::spawn_blocking(move || {
            if let Err(error) = reserve.keep() {
                tracing::warn!(%error, "no space could be kept aside for a start on a full store");
            }
        });
    }
    Ok(meta)
}

/// Returns when this process, which has just taken the lead, may acknowledge what it does. `stopped` completes when its
/// predecessors are known to answer no read any more.
pub(crate) async fn begin_to_lead(config: &Config, meta: &Meta, stopped: impl Future<Output = ()>) {
    let data_dir = config.data_dir.clone();
    let own = tokio::task::spawn_blocking(move || Leadership::read(&data_dir)).await;
    let mut own = own.unwrap_or_default();
    outwait_predecessors(meta, &own, stopped).await;
    // Not before: if this process dies while it waits, the next one must wait, too.
    let nonce = meta.nonce();
    if let Err(error) = tokio::task::spawn_blocking(move || own.lead(nonce)).await {
        tracing::warn!(%error, "it could not be written down who leads");
    }
}

/// Whether some space was freed.
async fn release(reserve: &Option<Reserve>) -> bool {
    let Some(reserve) = reserve.clone() else { return false };
    let released = tokio::task::spawn_blocking(move || reserve.release()).await;
    matches!(released, Ok(Ok(true)))
}

pub(crate) type OpenedStore = (Arc<dyn ObjectStore>, Option<Arc<Metered>>);

pub(crate) fn open_store(
    config: &Config,
    overrides: &Overrides,
) -> Result<OpenedStore, StartError> {
    if let Some(given) = &overrides.object_store {
        return Ok((Arc::clone(given), None));
    }
    let meter = MeterOptions { env: overrides.env.clone(), ..MeterOptions::default() };
    let metered = open_with(&config.object_store, meter)?;
    Ok((Arc::clone(&metered) as Arc<dyn ObjectStore>, Some(metered)))
}
