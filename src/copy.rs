//! `millrace backup`, `millrace restore` and `millrace ctl restore`: a database from one store to another, by URL.

use std::sync::Arc;

use millrace_common::SqlError;
use millrace_meta::backup::copy::{self, Copied, Purpose, Which};
use millrace_storage::StorageError;
use millrace_storage::object::{local_directory, open_object_store};
use object_store::ObjectStore;

use crate::standalone::described;

/// Copies the database at `from` to `to`; an error reads as a sentence.
pub async fn copy(
    from: &str,
    to: &str,
    which: Which<'_>,
    purpose: Purpose,
) -> Result<Copied, String> {
    // Opening a local store would make a directory of a mistyped name.
    let directory = local_directory(from).map_err(|e| failed(from, &e))?;
    if let Some(directory) = directory
        && !tokio::fs::try_exists(&directory).await.unwrap_or(false)
    {
        return Err(format!("cannot open {from}: the directory does not exist"));
    }
    let open = |url: &str| match open_object_store(url) {
        Ok(store) => Ok(store as Arc<dyn ObjectStore>),
        Err(e) => Err(failed(url, &e)),
    };
    let (source, target) = (open(from)?, open(to)?);
    let copied = copy::copy(source, target, from, which, purpose).await;
    copied.map_err(|e| format!("cannot copy {from} to {to}: {}", described(&e)))
}

/// What was copied, in words.
pub fn told(copied: &Copied) -> String {
    let Copied { record, objects, bytes, paused_sinks } = copied;
    let sinks = match paused_sinks {
        0 => String::new(),
        n => format!(
            " Sinks that are paused, because the original may publish to their targets: {n}. ALTER SINK … RESUME has \
             one go on."
        ),
    };
    format!(
        "Copied {objects} objects ({bytes} bytes): everything up to log record {record}.{sinks}"
    )
}

fn failed(url: &str, error: &StorageError) -> String {
    format!("cannot open {url}: {}", described(&SqlError::from(error.clone())))
}
