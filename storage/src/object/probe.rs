//! The probe of a store: does exactly one of many creators of a key win? Every commit relies on it.
//!
//! Asking one after the other is not enough: a server that looks whether the key is there, receives the object and then
//! renames it into place refuses a second creator who comes later, and lets both win who come at the same time. So the
//! creators race, and the bytes that stay must be the winner's.

use bytes::Bytes;
use futures::future::join_all;
use millrace_common::EnvHandle;
use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload};

use super::create_only;
use crate::error::{Result, StorageError};

/// Creators of the one key.
const RACERS: usize = 16;
/// Bytes that each of them writes: a server that is busy with one of them has others under way.
const BODY: usize = 1024;

/// Lets creators race for one key and deletes it. A store that lets two win, or keeps other bytes than the winner's, is
/// [`StorageError::Unsuitable`].
pub async fn probe(store: &dyn ObjectStore, env: &EnvHandle) -> Result<()> {
    let path = Path::from(format!("meta/probe/{:016x}", env.random()));
    let outcome = race(store, &path).await;
    if let Err(e) = store.delete(&path).await {
        tracing::debug!(error = %e, object = path.as_ref(), "a probe object stays behind");
    }
    outcome.map(drop)
}

/// As [`probe`], with a key that nobody has used; it stays, as is returned. Two dependent rounds.
pub async fn race(store: &dyn ObjectStore, path: &Path) -> Result<ObjectMeta> {
    let creators = (0..RACERS).map(|racer| {
        let payload = PutPayload::from_bytes(body(path, racer));
        store.put_opts(path, payload, create_only())
    });
    let mut standing = Standing::default();
    for (racer, created) in join_all(creators).await.into_iter().enumerate() {
        match created {
            Ok(_) => standing.winners.push(racer),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {}
            Err(Error::NotImplemented { .. } | Error::NotSupported { .. }) => {
                return Err(unsuitable(store, "it has no conditional put (create if absent)"));
            }
            Err(e) => standing.failed.push((racer, e)),
        }
    }
    standing.judge(store, path).await
}

fn body(path: &Path, racer: usize) -> Bytes {
    let mut bytes = format!("{path} {racer:02} ").into_bytes();
    bytes.resize(BODY, b'.');
    bytes.into()
}

fn unsuitable(store: &dyn ObjectStore, reason: impl Into<String>) -> StorageError {
    StorageError::Unsuitable { store: store.to_string(), reason: reason.into() }
}

/// How the race went.
#[derive(Default)]
struct Standing {
    winners: Vec<usize>,
    /// They may have created the object, or not.
    failed: Vec<(usize, Error)>,
}

impl Standing {
    /// `Ok` where one creator alone may have won and the object says that it did.
    async fn judge(mut self, store: &dyn ObjectStore, path: &Path) -> Result<ObjectMeta> {
        match self.winners.len() {
            0 if self.failed.len() == RACERS => {
                let (_, error) = self.failed.swap_remove(0);
                return Err(StorageError::from_store("write", path.as_ref(), error));
            }
            0 if self.failed.is_empty() => {
                let reason = format!(
                    "none of {RACERS} creators of a key could create it: its conditional put (If-None-Match) does not work"
                );
                return Err(unsuitable(store, reason));
            }
            // Who was answered with an error may have won: whether one of them did, the object says.
            0 => self.winners.extend(self.failed.iter().map(|(racer, _)| *racer)),
            1 => {}
            several => {
                let reason = format!(
                    "it lets two creators of a key win: {several} of {RACERS} that ran at the same time were told that \
                     they had created it, so its conditional put (If-None-Match) is not atomic or not there"
                );
                return Err(unsuitable(store, reason));
            }
        }
        let found = async {
            let found = store.get(path).await?;
            let description = found.meta.clone();
            Ok((description, found.bytes().await?))
        };
        let found: std::result::Result<_, Error> = found.await;
        let (description, bytes) =
            found.map_err(|e| StorageError::from_store("read", path.as_ref(), e))?;
        if self.winners.iter().any(|racer| body(path, *racer) == bytes) {
            return Ok(description);
        }
        let reason = "it keeps other bytes than the winner's of several creators of a key: its conditional put \
                      (If-None-Match) is not atomic";
        Err(unsuitable(store, reason))
    }
}
