//! The operations on objects, over the store below.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::{StreamExt, TryStreamExt};
use millrace_common::EnvHandle;
use millrace_common::task::spawn;
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload, UpdateVersion,
};
use s3s::dto::{ETag, ETagCondition, Range, StreamingBlob, Timestamp, TimestampFormat};
use s3s::{S3Error, S3Result, s3_error};

use crate::answer;

/// Bytes of one put or one part: they are held in memory.
pub const MAX_BODY: u64 = 256 << 20;
/// How long a client may send nothing of a body that it has announced.
const BODY_PATIENCE: Duration = Duration::from_secs(60);

/// What all requests share.
#[derive(Clone)]
pub struct Objects {
    pub store: Arc<dyn ObjectStore>,
    pub buckets: Arc<BTreeSet<String>>,
    pub env: EnvHandle,
}

impl Objects {
    pub fn has_bucket(&self, bucket: &str) -> S3Result<()> {
        if self.buckets.contains(bucket) {
            return Ok(());
        }
        Err(s3_error!(NoSuchBucket, "The specified bucket does not exist."))
    }

    /// Where an object is kept. Keys that a file's name cannot be are refused.
    pub fn locate(&self, bucket: &str, key: &str) -> S3Result<Path> {
        self.has_bucket(bucket)?;
        let refused = |why: &str| {
            s3_error!(InvalidArgument, "this server cannot keep the key \"{key}\": {why}")
        };
        // Files that are being written have such names.
        if key.contains('#') {
            return Err(refused("it contains #"));
        }
        let path = Path::parse(format!("{bucket}/{key}")).map_err(|e| refused(&e.to_string()))?;
        if path.as_ref().len() != bucket.len() + 1 + key.len() {
            return Err(refused("it ends in /"));
        }
        Ok(path)
    }

    /// Writes and answers with the entity tag.
    ///
    /// A client that goes away does not stop it: what has begun ends while the object's lock is held.
    pub async fn put(&self, path: Path, payload: PutPayload, mode: PutMode) -> S3Result<ETag> {
        let store = Arc::clone(&self.store);
        let options = PutOptions::from(mode);
        let put =
            spawn("put an object", async move { store.put_opts(&path, payload, options).await });
        let put = put.await.map_err(S3Error::internal_error)?.map_err(answer::error)?;
        Ok(ETag::Strong(put.e_tag.unwrap_or_default()))
    }

    /// Removes; that there is nothing to remove is fine.
    pub async fn delete(&self, path: Path) -> S3Result<()> {
        let store = Arc::clone(&self.store);
        let delete = spawn("delete an object", async move { store.delete(&path).await });
        match delete.await.map_err(S3Error::internal_error)? {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(answer::error(e)),
        }
    }

    pub async fn get(&self, path: &Path, options: GetOptions) -> S3Result<GetResult> {
        self.store.get_opts(path, options).await.map_err(answer::error)
    }

    /// The whole of a small object of ours.
    pub async fn read(&self, path: &Path) -> Result<Bytes, object_store::Error> {
        self.store.get(path).await?.bytes().await
    }

    /// Those below a directory, in the order of their names, that come after `offset`.
    pub async fn list(
        &self,
        dir: &Path,
        offset: Option<&Path>,
        mut take: impl FnMut(ObjectMeta) -> Taken,
    ) -> S3Result<()> {
        let mut found = match offset {
            Some(offset) => self.store.list_with_offset(Some(dir), offset),
            None => self.store.list(Some(dir)),
        };
        while let Some(meta) = found.try_next().await.map_err(answer::error)? {
            if take(meta) == Taken::Enough {
                break;
            }
        }
        Ok(())
    }

    /// A name that nothing else has.
    pub fn unique(&self) -> String {
        format!("{:016x}{:016x}", self.env.random(), self.env.random())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    More,
    Enough,
}

/// Which writes a put's conditions allow.
pub fn put_mode(
    if_match: Option<ETagCondition>,
    if_none_match: Option<ETagCondition>,
) -> S3Result<PutMode> {
    match (if_match, if_none_match) {
        (None, None) => Ok(PutMode::Overwrite),
        (None, Some(ETagCondition::Any)) => Ok(PutMode::Create),
        (Some(ETagCondition::ETag(tag)), None) => {
            let e_tag = Some(tag.into_value());
            Ok(PutMode::Update(UpdateVersion { e_tag, version: None }))
        }
        _ => Err(s3_error!(
            NotImplemented,
            "a put may have the condition If-None-Match: * or If-Match with one entity tag"
        )),
    }
}

/// The conditions and the range of a get or a head.
#[derive(Default)]
pub struct Asked {
    pub head: bool,
    pub range: Option<Range>,
    pub if_match: Option<ETagCondition>,
    pub if_none_match: Option<ETagCondition>,
    pub if_modified_since: Option<Timestamp>,
    pub if_unmodified_since: Option<Timestamp>,
}

impl Asked {
    pub fn options(self) -> S3Result<GetOptions> {
        let tag = |condition: ETagCondition| match condition {
            ETagCondition::ETag(tag) => tag.into_value(),
            ETagCondition::Any => "*".to_string(),
        };
        let range = self.range.map(|range| match range {
            Range::Int { first, last: Some(last) } => {
                GetRange::Bounded(first..last.saturating_add(1))
            }
            Range::Int { first, last: None } => GetRange::Offset(first),
            Range::Suffix { length } => GetRange::Suffix(length),
        });
        Ok(GetOptions {
            range,
            head: self.head,
            if_match: self.if_match.map(tag),
            if_none_match: self.if_none_match.map(tag),
            if_modified_since: self.if_modified_since.map(|t| moment(&t)).transpose()?,
            if_unmodified_since: self.if_unmodified_since.map(|t| moment(&t)).transpose()?,
            ..GetOptions::default()
        })
    }
}

fn moment(timestamp: &Timestamp) -> S3Result<DateTime<Utc>> {
    let mut text = Vec::new();
    timestamp.format(TimestampFormat::HttpDate, &mut text).map_err(S3Error::internal_error)?;
    let text = String::from_utf8(text).map_err(S3Error::internal_error)?;
    let parsed = DateTime::parse_from_rfc2822(&text).map_err(S3Error::internal_error)?;
    Ok(parsed.with_timezone(&Utc))
}

pub fn e_tag(meta: &ObjectMeta) -> Option<ETag> {
    meta.e_tag.clone().map(ETag::Strong)
}

pub fn last_modified(meta: &ObjectMeta) -> Option<Timestamp> {
    Some(Timestamp::from(SystemTime::from(meta.last_modified)))
}

/// Sizes are far below 2⁶³.
pub fn size(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// All of a request's body.
pub async fn receive(body: Option<StreamingBlob>, announced: Option<i64>) -> S3Result<PutPayload> {
    let too_large = || {
        s3_error!(
            EntityTooLarge,
            "this server takes at most {MAX_BODY} bytes at once; upload in parts"
        )
    };
    if announced.is_some_and(|bytes| bytes > size(MAX_BODY)) {
        return Err(too_large());
    }
    let Some(mut body) = body else { return Ok(PutPayload::new()) };
    let mut parts: Vec<Bytes> = Vec::new();
    let mut total = 0;
    loop {
        let next = tokio::time::timeout(BODY_PATIENCE, body.next()).await;
        let next = next.map_err(|_| s3_error!(RequestTimeout, "the body did not arrive"))?;
        let Some(bytes) = next else { break };
        let bytes = bytes.map_err(|e| s3_error!(IncompleteBody, "the body did not arrive: {e}"))?;
        total += bytes.len() as u64;
        if total > MAX_BODY {
            return Err(too_large());
        }
        parts.push(bytes);
    }
    if announced.is_some_and(|bytes| bytes != size(total)) {
        return Err(s3_error!(IncompleteBody, "the body has {total} bytes, other than announced"));
    }
    Ok(PutPayload::from_iter(parts))
}

/// The bytes of an answer. Where a fault has taken some of them, the connection breaks off behind the others.
pub async fn send(result: GetResult) -> S3Result<StreamingBlob> {
    let announced = result.range.end - result.range.start;
    let bytes = result.bytes().await.map_err(answer::error)?;
    if bytes.len() as u64 == announced {
        return Ok(StreamingBlob::from(s3s::Body::from(bytes)));
    }
    let broken = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
    Ok(StreamingBlob::wrap(futures::stream::iter([Ok(bytes), Err(broken)])))
}
