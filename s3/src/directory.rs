//! Objects as files: what the server keeps, with the conditions of S3.
//!
//! The object `bucket/key` is the file of this name below the data directory, written by [`DurableLocal`]: synced, and a
//! create is a `link`, so exactly one of many creators wins. What replaces or removes an object holds a lock that
//! creates share, so that a write with If-Match and the entity tag of an answer speak of the same bytes.

use std::fmt;
use std::fs::{self, File, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use millrace_common::EnvHandle;
use millrace_common::task::spawn_blocking;
use millrace_storage::StorageError;
use millrace_storage::object::DurableLocal;
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::walk;

const STORE: &str = "data directory";
/// Locks that all keys share.
const LOCKS: usize = 256;
/// Between the look and the write of a racy create: as long as a large body takes to arrive, and longer than creators that
/// begin at the same time are apart on a busy machine.
const RACY_PAUSE: Duration = Duration::from_secs(1);
/// Objects that one step of a listing reads.
const LIST_STEP: usize = 1000;

/// A range that lies beyond the object.
#[derive(Debug, thiserror::Error)]
#[error("the object has {size} bytes, the range begins behind them")]
pub struct Unsatisfiable {
    pub size: u64,
}

/// The store below the data directory.
pub struct Directory {
    durable: DurableLocal,
    root: Arc<PathBuf>,
    locks: Vec<RwLock<()>>,
    /// A create looks whether the object is there and then writes: two can win. To test who must notice.
    racy: bool,
}

impl Directory {
    /// Opens a directory, creating it when missing.
    pub fn open(root: &FilePath, racy: bool) -> std::result::Result<Directory, StorageError> {
        let durable = DurableLocal::open(root, EnvHandle::default())?;
        let root = Arc::new(durable.root().to_path_buf());
        let locks = (0..LOCKS).map(|_| RwLock::new(())).collect();
        Ok(Directory { durable, root, locks, racy })
    }

    fn lock_of(&self, location: &Path) -> &RwLock<()> {
        let mut hasher = DefaultHasher::new();
        location.as_ref().hash(&mut hasher);
        &self.locks[hasher.finish() as usize % LOCKS]
    }

    /// Held while an object is created.
    async fn shared(&self, location: &Path) -> RwLockReadGuard<'_, ()> {
        self.lock_of(location).read().await
    }

    /// Held while an object is replaced or removed.
    async fn exclusive(&self, location: &Path) -> RwLockWriteGuard<'_, ()> {
        self.lock_of(location).write().await
    }

    async fn meta(&self, location: &Path) -> Result<ObjectMeta> {
        let (file, location) = (self.file(location), location.clone());
        spawn_blocking("look at an object", move || {
            let metadata = fs::metadata(file).map_err(|e| failed(&location, e))?;
            meta_of(location, &metadata)
        })
        .await?
    }

    fn file(&self, location: &Path) -> PathBuf {
        self.root.join(location.as_ref())
    }

    /// Writes, and answers with the entity tag of what was written; the caller holds the lock.
    async fn write(
        &self,
        location: &Path,
        payload: PutPayload,
        mode: PutMode,
    ) -> Result<PutResult> {
        self.durable.put_opts(location, payload, mode.into()).await?;
        Ok(PutResult { e_tag: self.meta(location).await?.e_tag, version: None })
    }

    async fn racy_create(&self, location: &Path, payload: PutPayload) -> Result<PutResult> {
        match self.meta(location).await {
            Ok(_) => return Err(taken(location)),
            Err(Error::NotFound { .. }) => {}
            Err(e) => return Err(e),
        }
        tokio::time::sleep(RACY_PAUSE).await;
        self.write(location, payload, PutMode::Overwrite).await
    }

    fn listing(
        &self,
        prefix: Option<&Path>,
        after: Option<&Path>,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let root = Arc::clone(&self.root);
        let prefix = prefix.map_or(String::new(), |p| p.as_ref().to_string());
        let first = Some(after.map_or(String::new(), |p| p.as_ref().to_string()));
        stream::try_unfold(first, move |after| {
            let (root, prefix) = (Arc::clone(&root), prefix.clone());
            async move {
                let Some(after) = after else { return Ok::<_, Error>(None) };
                let page = spawn_blocking("list objects", move || {
                    walk::page(&root, &prefix, &after, LIST_STEP)
                });
                let page = page.await?.map_err(generic)?;
                let next = page.last().filter(|_| page.len() == LIST_STEP);
                let next = next.map(|last| last.location.as_ref().to_string());
                Ok(Some((stream::iter(page.into_iter().map(Ok)), next)))
            }
        })
        .try_flatten()
        .boxed()
    }
}

/// What is known of a file. The tag differs between any two writes: each is another inode or another moment.
pub fn meta_of(location: Path, metadata: &Metadata) -> Result<ObjectMeta> {
    if !metadata.is_file() {
        return Err(failed(&location, io::ErrorKind::NotFound.into()));
    }
    let modified = metadata.modified().map_err(generic)?;
    let since = modified.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let size = metadata.len();
    let e_tag = Some(format!("{:x}-{:x}-{size:x}", metadata.ino(), since.as_nanos()));
    Ok(ObjectMeta { location, last_modified: modified.into(), size, e_tag, version: None })
}

fn generic(source: io::Error) -> Error {
    Error::Generic { store: STORE, source: Box::new(source) }
}

fn failed(location: &Path, source: io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Error::NotFound { path: location.to_string(), source: Box::new(source) }
        }
        _ => generic(source),
    }
}

fn taken(location: &Path) -> Error {
    Error::AlreadyExists { path: location.to_string(), source: "it is there".into() }
}

fn other_tag(location: &Path) -> Error {
    Error::Precondition { path: location.to_string(), source: "the entity tag differs".into() }
}

/// Runs on a blocking thread.
fn read(file: &FilePath, location: Path, options: &GetOptions) -> Result<GetResult> {
    let file = File::open(file).map_err(|e| failed(&location, e))?;
    let metadata = file.metadata().map_err(generic)?;
    let meta = meta_of(location, &metadata)?;
    options.check_preconditions(&meta)?;
    let beyond =
        || Error::Generic { store: STORE, source: Box::new(Unsatisfiable { size: meta.size }) };
    let range = match &options.range {
        None => 0..meta.size,
        Some(GetRange::Bounded(range)) => range.start..range.end.min(meta.size),
        Some(GetRange::Offset(start)) => *start..meta.size,
        Some(GetRange::Suffix(length)) => meta.size.saturating_sub(*length)..meta.size,
    };
    if options.range.is_some() && range.start >= range.end {
        return Err(beyond());
    }
    let mut bytes = Vec::new();
    if !options.head {
        bytes.resize((range.end - range.start) as usize, 0);
        file.read_exact_at(&mut bytes, range.start).map_err(generic)?;
    }
    let bytes = Bytes::from(bytes);
    let payload = GetResultPayload::Stream(stream::once(async move { Ok(bytes) }).boxed());
    Ok(GetResult { payload, meta, range, attributes: Attributes::default() })
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Directory").field("root", &self.root).field("racy", &self.racy).finish()
    }
}

impl fmt::Display for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.root.display().fmt(f)
    }
}

/// A store for [`SimStore`](millrace_storage::sim::SimStore) to be laid over; it has its own way of uploading in parts.
#[derive(Clone, Debug)]
pub struct Shared(pub Arc<Directory>);

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Shared {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let this = &self.0;
        match options.mode {
            PutMode::Create if this.racy => this.racy_create(location, payload).await,
            PutMode::Create => {
                let _held = this.shared(location).await;
                this.write(location, payload, PutMode::Create).await
            }
            PutMode::Overwrite => {
                let _held = this.exclusive(location).await;
                this.write(location, payload, PutMode::Overwrite).await
            }
            PutMode::Update(expected) => {
                let _held = this.exclusive(location).await;
                if this.meta(location).await?.e_tag != expected.e_tag {
                    return Err(other_tag(location));
                }
                this.write(location, payload, PutMode::Overwrite).await
            }
        }
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(Error::NotImplemented {
            operation: "an upload in parts".to_string(),
            implementer: STORE.to_string(),
        })
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (file, location) = (self.0.file(location), location.clone());
        spawn_blocking("read an object", move || read(&file, location, &options)).await?
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let this = Arc::clone(&self.0);
        locations
            .and_then(move |location| {
                let this = Arc::clone(&this);
                async move {
                    let _held = this.exclusive(&location).await;
                    let file = this.file(&location);
                    let removed = spawn_blocking("delete an object", move || fs::remove_file(file));
                    match removed.await? {
                        Ok(()) => Ok(location),
                        Err(e) => Err(failed(&location, e)),
                    }
                }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.listing(prefix, None)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.listing(prefix, Some(offset))
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        Err(Error::NotImplemented {
            operation: "a list with a delimiter".to_string(),
            implementer: STORE.to_string(),
        })
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(Error::NotImplemented {
            operation: "a copy".to_string(),
            implementer: STORE.to_string(),
        })
    }
}
