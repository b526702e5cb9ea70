//! A local directory as an object store whose puts are durable when they return.
//!
//! A put writes a temporary file beside the target, syncs it, gives it its name (`rename`; for
//! create-if-absent `link`, which fails when the name is taken: exactly one of many creators wins)
//! and syncs the directory. Directories made on the way are synced into theirs. Temporary names end
//! in `#digits`, which listings leave out; a crash leaves at most such a file.
//!
//! Ranged reads are one blocking call (open, `pread`) instead of three.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::FutureExt;
use futures::stream::{self, BoxStream, StreamExt};
use millrace_common::EnvHandle;
use millrace_common::task::spawn_blocking;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    Attributes, CopyMode, CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload,
    ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result, UploadPart,
};
use parking_lot::Mutex;

use crate::error::{StorageError, UnknownOutcome};

const STORE: &str = "local directory";

#[derive(Clone, Debug)]
pub struct DurableLocal {
    inner: Arc<LocalFileSystem>,
    root: Arc<PathBuf>,
    /// Names temporary files.
    env: EnvHandle,
}

impl DurableLocal {
    /// Opens a directory, creating it when missing.
    pub fn open(root: &FilePath, env: EnvHandle) -> crate::error::Result<DurableLocal> {
        let name = root.display().to_string();
        let io = |cause: io::Error| StorageError::Io {
            operation: "open",
            object: name.clone(),
            cause: Arc::new(cause),
        };
        let absolute = std::path::absolute(root).map_err(io)?;
        create_dirs(&absolute).map_err(io)?;
        let inner = LocalFileSystem::new_with_prefix(&absolute)
            .map_err(|e| StorageError::from_store("open", name.clone(), e))?;
        Ok(DurableLocal { inner: Arc::new(inner), root: Arc::new(absolute), env })
    }

    pub fn root(&self) -> &FilePath {
        &self.root
    }

    async fn write(&self, location: &Path, payload: PutPayload, create: bool) -> Result<PutResult> {
        let target = self.inner.path_to_filesystem(location)?;
        let (location, env) = (location.clone(), self.env.clone());
        let written = spawn_blocking("write an object", move || {
            write_durably(&env, &target, &location, &payload, create)
        });
        written.await?.map(|()| PutResult { e_tag: None, version: None })
    }
}

impl fmt::Display for DurableLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.root.display().fmt(f)
    }
}

#[async_trait]
impl ObjectStore for DurableLocal {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        match opts.mode {
            PutMode::Overwrite => self.write(location, payload, false).await,
            PutMode::Create => self.write(location, payload, true).await,
            PutMode::Update(_) => Err(Error::NotImplemented {
                operation: "conditional update".to_string(),
                implementer: STORE.to_string(),
            }),
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let upload =
            Upload { store: self.clone(), location: location.clone(), parts: Arc::default() };
        Ok(Box::new(upload))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let conditional = options.if_match.is_some()
            || options.if_none_match.is_some()
            || options.if_modified_since.is_some()
            || options.if_unmodified_since.is_some();
        match options.range {
            Some(GetRange::Bounded(range)) if !conditional && !options.head => {
                let file = self.inner.path_to_filesystem(location)?;
                let location = location.clone();
                spawn_blocking("read an object", move || read_range(&file, location, range)).await?
            }
            _ => self.inner.get_opts(location, options).await,
        }
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let bytes = self.inner.get_opts(from, GetOptions::default()).await?.bytes().await?;
        let create = matches!(options.mode, CopyMode::Create);
        self.write(to, bytes.into(), create).await.map(|_| ())
    }
}

fn generic(source: io::Error) -> Error {
    Error::Generic { store: STORE, source: Box::new(source) }
}

/// Runs on a blocking thread.
fn write_durably(
    env: &EnvHandle,
    target: &FilePath,
    location: &Path,
    payload: &PutPayload,
    create: bool,
) -> Result<()> {
    let parent = target.parent().ok_or_else(|| generic(io::ErrorKind::InvalidInput.into()))?;
    let (file, temporary) = open_temporary(env, target, parent).map_err(generic)?;
    let named = fill(file, payload).and_then(|()| match create {
        true => fs::hard_link(&temporary, target),
        false => fs::rename(&temporary, target),
    });
    if create || named.is_err() {
        // A temporary file that stays behind is invisible; it costs space, nothing else.
        let _ = fs::remove_file(&temporary);
    }
    match named {
        Ok(()) => {}
        Err(e) if create && e.kind() == io::ErrorKind::AlreadyExists => {
            return Err(Error::AlreadyExists { path: location.to_string(), source: Box::new(e) });
        }
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            return Err(Error::PermissionDenied {
                path: location.to_string(),
                source: Box::new(e),
            });
        }
        Err(e) => return Err(generic(e)),
    }
    // From here on the object exists: a failure leaves it open whether it would survive a crash.
    sync_dir(parent).map_err(|e| Error::Generic {
        store: STORE,
        source: Box::new(UnknownOutcome { cause: Arc::new(e) }),
    })
}

fn fill(mut file: File, payload: &PutPayload) -> io::Result<()> {
    for part in payload.iter() {
        file.write_all(part)?;
    }
    file.sync_all()
}

/// A new file beside `target`, its directory made when missing.
fn open_temporary(
    env: &EnvHandle,
    target: &FilePath,
    parent: &FilePath,
) -> io::Result<(File, PathBuf)> {
    let mut made = false;
    loop {
        let mut name = target.as_os_str().to_owned();
        name.push(format!("#{}", env.random()));
        let path = PathBuf::from(name);
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            // Another writer may have made the directory since: that it exists now says nothing.
            Err(e) if e.kind() == io::ErrorKind::NotFound && !made => {
                create_dirs(parent)?;
                made = true;
            }
            Err(e) => return Err(e),
        }
    }
}

/// Creates a directory and its parents; each new one is synced into its parent.
fn create_dirs(dir: &FilePath) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let parent = dir.parent();
    if let Some(parent) = parent {
        create_dirs(parent)?;
    }
    match fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ => parent.map_or(Ok(()), sync_dir),
    }
}

fn sync_dir(dir: &FilePath) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Runs on a blocking thread.
fn read_range(path: &FilePath, location: Path, range: std::ops::Range<u64>) -> Result<GetResult> {
    let not_found = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => {
            Error::NotFound { path: location.to_string(), source: Box::new(source) }
        }
        _ => generic(source),
    };
    let file = File::open(path).map_err(not_found)?;
    let metadata = file.metadata().map_err(generic)?;
    let size = metadata.len();
    if range.start >= size || range.end < range.start {
        let reason = format!("range {}..{} of an object of {size} bytes", range.start, range.end);
        return Err(generic(io::Error::new(io::ErrorKind::UnexpectedEof, reason)));
    }
    let range = range.start..range.end.min(size);
    let mut bytes = vec![0u8; (range.end - range.start) as usize];
    file.read_exact_at(&mut bytes, range.start).map_err(generic)?;
    let last_modified = metadata.modified().map_err(generic)?.into();
    let bytes = Bytes::from(bytes);
    Ok(GetResult {
        payload: GetResultPayload::Stream(stream::once(async move { Ok(bytes) }).boxed()),
        meta: ObjectMeta { location, last_modified, size, e_tag: None, version: None },
        range,
        attributes: Attributes::default(),
    })
}

/// Parts are gathered and put as one, so that an upload too is all there or not there.
#[derive(Debug)]
struct Upload {
    store: DurableLocal,
    location: Path,
    parts: Arc<Mutex<Vec<Bytes>>>,
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.parts.lock().extend(data.iter().cloned());
        async { Ok(()) }.boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let parts = std::mem::take(&mut *self.parts.lock());
        self.store.write(&self.location, PutPayload::from_iter(parts), false).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.parts.lock().clear();
        Ok(())
    }
}
