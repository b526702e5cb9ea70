//! Object stores: opening one by URL, and proving that it can keep our promises (docs/design.md §10).
//!
//! Whatever the kind, the same wrapper ([`Metered`]) counts requests, bounds each by a time-out, holds those back that a
//! throttling store would refuse, and repeats those that may be repeated. Local directories go through [`DurableLocal`], because
//! `object_store`'s own does not sync to disk.

mod failure;
pub(crate) mod limiter;
mod listing;
mod local;
mod metered;
mod pace;
mod probe;
mod reserve;
mod watch;

use std::path::PathBuf;
use std::sync::Arc;

use millrace_common::EnvHandle;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ObjectStore, PutMode, PutOptions, PutPayload, RetryConfig};
use url::Url;

use crate::error::{Result, StorageError};

pub use failure::Failure;
pub use local::DurableLocal;
pub use metered::{MeterOptions, Metered, OneAttempt, RequestStats};
pub use pace::{Held, PaceStats, RequestClass};
pub use probe::{probe, race};
pub use reserve::Reserve;
pub use watch::{PutProgress, PutWatch};

/// Dollars for a million GET requests: the list price of S3 Standard in its first regions. Also for stores that bill
/// none, so that the number of requests has one price.
pub const GET_DOLLARS_PER_MILLION: f64 = 0.40;

/// Opens the store at a path, `file:///path`, `s3://bucket/prefix` or (tests) `memory:`.
///
/// S3 takes credentials, region and endpoint (`AWS_ENDPOINT`, for S3-compatible servers) from the
/// environment. Nothing is read or written yet but a missing local directory, which is created.
pub fn open_object_store(url: &str) -> Result<Arc<Metered>> {
    open_with(url, MeterOptions::default())
}

/// [`open_object_store`] with other time-outs, or another environment.
pub fn open_with(url: &str, options: MeterOptions) -> Result<Arc<Metered>> {
    Ok(Metered::wrap(open_raw(url, &options.env)?, options))
}

fn open_raw(url: &str, env: &EnvHandle) -> Result<Arc<dyn ObjectStore>> {
    let invalid = |reason: &str| StorageError::InvalidUrl {
        url: url.to_string(),
        reason: reason.to_string(),
    };
    if url.is_empty() {
        return Err(invalid("it is empty"));
    }
    if url == "memory:" {
        return Ok(Arc::new(InMemory::new()));
    }
    if let Some(path) = local_directory(url)? {
        return Ok(Arc::new(DurableLocal::open(&path, env.clone())?));
    }
    let parsed = Url::parse(url).map_err(|e| invalid(&e.to_string()))?;
    match parsed.scheme() {
        "s3" => open_s3(&parsed).map_err(|reason| invalid(&reason)),
        other => Err(invalid(&format!("scheme \"{other}\" is not known"))),
    }
}

/// The directory of a local store; `None`: it is none.
pub fn local_directory(url: &str) -> Result<Option<PathBuf>> {
    if !url.contains("://") {
        let is_path = !url.is_empty() && url != "memory:";
        return Ok(is_path.then(|| PathBuf::from(url)));
    }
    let invalid = |reason: &str| StorageError::InvalidUrl {
        url: url.to_string(),
        reason: reason.to_string(),
    };
    let parsed = Url::parse(url).map_err(|e| invalid(&e.to_string()))?;
    match parsed.scheme() {
        "file" => {
            let path = parsed.to_file_path();
            path.map(Some).map_err(|()| invalid("a local path is file:///absolute/path"))
        }
        _ => Ok(None),
    }
}

fn open_s3(url: &Url) -> std::result::Result<Arc<dyn ObjectStore>, String> {
    let bucket = url.host_str().ok_or("the bucket is missing")?;
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        // Repeating is `Metered`'s business: it knows which puts may be repeated.
        .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() });
    let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
    if endpoint.is_some_and(|e| e.starts_with("http://")) {
        builder = builder.with_allow_http(true);
    }
    let store = builder.build().map_err(|e| e.to_string())?;
    match Path::from_url_path(url.path()).map_err(|e| e.to_string())? {
        prefix if prefix.as_ref().is_empty() => Ok(Arc::new(store)),
        prefix => Ok(Arc::new(PrefixStore::new(store, prefix))),
    }
}

/// Options of a put that must not replace anything.
pub fn create_only() -> PutOptions {
    PutOptions { mode: PutMode::Create, ..PutOptions::default() }
}

/// Creates an object that must not exist yet.
pub async fn create(store: &dyn ObjectStore, name: &str, payload: PutPayload) -> Result<()> {
    store
        .put_opts(&Path::from(name), payload, create_only())
        .await
        .map(|_| ())
        .map_err(|e| StorageError::from_store("write", name, e))
}

#[cfg(test)]
mod tests;
