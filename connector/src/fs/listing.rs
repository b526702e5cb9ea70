//! What files there are, which of them are new, and how long they are.

use std::collections::{HashMap, HashSet};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use glob::{MatchOptions, Pattern};
use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;
use millrace_rpc::log::SourceFile;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};

use super::Compression;
use super::stream::ByteStream;
use crate::{ConnectorError, options, paths};

/// A local file may still be being written: it is taken when it has been left alone for so long.
const SETTLED: Duration = Duration::from_secs(1);
/// A poll measures compressed files for at most so long, so that those before become readable.
const MEASURING: Duration = Duration::from_secs(10);
/// A poll finds at most so many bytes of files' names and versions: they go into one message and one record of the log.
const FOUND_BYTES: usize = 16 << 20;
/// Of one file, beside its name and version.
const FILE_BYTES: usize = 64;

/// A directory, bucket prefix or file, and a pattern.
#[derive(Clone)]
pub struct Location {
    store: Arc<dyn ObjectStore>,
    /// What listing begins with.
    prefix: Path,
    pattern: Option<Pattern>,
    /// Of a local directory: the part before the pattern, which must exist.
    directory: Option<PathBuf>,
    /// How files of it are shown: `s3://bucket/`, or `/`.
    shown: String,
}

impl std::fmt::Debug for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.shown, self.prefix)
    }
}

impl Location {
    pub fn open(path: &str, relation: &Relation) -> Result<Location, SqlError> {
        let invalid = |reason: String| {
            options::invalid(format!("invalid value for option \"path\": {reason}"))
        };
        let (store, path, shown, local): (Arc<dyn ObjectStore>, String, String, bool) =
            if let Some(rest) = path.strip_prefix("s3://") {
                let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
                let store = open_s3(bucket, relation).map_err(invalid)?;
                (Arc::new(store), key.to_owned(), format!("s3://{bucket}/"), false)
            } else {
                let plain = path.strip_prefix("file://").unwrap_or(path);
                if plain.contains("://") {
                    return Err(invalid(format!("\"{path}\" is neither a path nor an s3:// URL")));
                }
                if !plain.starts_with('/') {
                    return Err(invalid(format!("\"{path}\" is not an absolute path")));
                }
                (Arc::new(LocalFileSystem::new()), plain[1..].to_owned(), "/".to_owned(), true)
            };
        let literal = literal_prefix(&path);
        let pattern = match literal.len() == path.len() {
            true => None,
            false => Some(Pattern::new(&path).map_err(|e| invalid(e.to_string()))?),
        };
        let prefix = if local {
            Path::from_absolute_path(format!("/{literal}")).map_err(|e| invalid(e.to_string()))?
        } else {
            Path::parse(literal.trim_end_matches('/')).map_err(|e| invalid(e.to_string()))?
        };
        let directory = local.then(|| FilePath::new("/").join(literal));
        if let Some(directory) = &directory {
            paths::check_text(directory)?;
        }
        Ok(Location { store, prefix, pattern, directory, shown })
    }

    pub fn is_local(&self) -> bool {
        self.directory.is_some()
    }

    pub fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// A file as users know it.
    pub fn shown(&self, path: &str) -> String {
        format!("{}{path}", self.shown)
    }

    /// Refuses a local file that a symbolic link leads to from outside of the directories that may be used.
    pub async fn check_file(&self, path: &str) -> Result<(), ConnectorError> {
        match self.is_local() {
            true => paths::check(&FilePath::new("/").join(path)).await,
            false => Ok(()),
        }
    }

    /// The files that match now, by name.
    pub async fn list(&self) -> Result<Vec<ObjectMeta>, ConnectorError> {
        let shown = self.shown(self.prefix.as_ref());
        if let Some(directory) = &self.directory {
            paths::check(directory).await?;
            self.check_file(self.prefix.as_ref()).await?;
            let meta = tokio::fs::metadata(directory).await;
            let meta = meta.map_err(|e| ConnectorError::io(&shown, plain_reason(&e)))?;
            if meta.is_file() {
                let one = self.store.head(&self.prefix).await;
                return Ok(vec![one.map_err(|e| ConnectorError::io(&shown, e))?]);
            }
            // Listing goes on silently without what it may not read.
            let readable = tokio::fs::read_dir(directory).await;
            drop(readable.map_err(|e| ConnectorError::io(&shown, plain_reason(&e)))?);
        } else if self.pattern.is_none()
            && let Ok(one) = self.store.head(&self.prefix).await
        {
            return Ok(vec![one]);
        }
        let mut found = Vec::new();
        let mut listing = self.store.list(Some(&self.prefix));
        while let Some(meta) = listing.next().await {
            let meta = meta.map_err(|e| ConnectorError::io(&shown, e))?;
            if self.matches(meta.location.as_ref()) {
                found.push(meta);
            }
        }
        found.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(found)
    }

    /// Hidden files (`.x`, `_x`) never match.
    fn matches(&self, path: &str) -> bool {
        let name = path.rsplit('/').next().unwrap_or(path);
        if name.starts_with(['.', '_']) {
            return false;
        }
        let strict = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
        self.pattern.as_ref().is_none_or(|p| p.matches_with(path, strict))
    }
}

/// The folders of a path before its first wildcard.
fn literal_prefix(path: &str) -> &str {
    match path.find(['*', '?', '[']) {
        None => path,
        Some(at) => path[..at].rfind('/').map_or("", |slash| &path[..slash]),
    }
}

fn plain_reason(e: &std::io::Error) -> String {
    match e.kind() {
        std::io::ErrorKind::NotFound => "it does not exist".to_owned(),
        std::io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => e.to_string(),
    }
}

fn open_s3(bucket: &str, relation: &Relation) -> Result<impl ObjectStore, String> {
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
    let given = [
        ("s3.endpoint", AmazonS3ConfigKey::Endpoint),
        ("s3.region", AmazonS3ConfigKey::Region),
        ("s3.access_key_id", AmazonS3ConfigKey::AccessKeyId),
        ("s3.secret_access_key", AmazonS3ConfigKey::SecretAccessKey),
    ];
    for (name, key) in given {
        if let Some(value) = relation.option(name) {
            builder = builder.with_config(key, value);
        }
    }
    let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
    if endpoint.is_some_and(|e| e.starts_with("http://")) {
        builder = builder.with_allow_http(true);
    }
    builder.build().map_err(|e| e.to_string())
}

/// What changes when a file's content does.
pub fn version_of(meta: &ObjectMeta) -> String {
    match &meta.e_tag {
        Some(tag) => tag.clone(),
        None => meta.last_modified.timestamp_micros().to_string(),
    }
}

/// An error if a file that was found before is another now. One that is gone is missed only by who
/// needs to read it.
pub fn check_unchanged(
    location: &Location,
    found: &[ObjectMeta],
    known: &[SourceFile],
) -> Result<(), ConnectorError> {
    let known: HashMap<&str, &SourceFile> = known.iter().map(|f| (f.path.as_str(), f)).collect();
    for meta in found {
        let Some(file) = known.get(meta.location.as_ref()) else { continue };
        if file.size != meta.size || file.version != version_of(meta) {
            return Err(changed(&location.shown(&file.path), file.size, meta.size));
        }
    }
    Ok(())
}

/// `shown`: the file as users know it.
pub fn changed(shown: &str, before: u64, now: u64) -> ConnectorError {
    let detail = match before == now {
        true => "It has been written again.".to_owned(),
        false => format!("It had {before} bytes and has {now} now."),
    };
    ConnectorError::Changed { place: format!("file {shown}"), detail }
}

/// Files seen but not taken yet.
#[derive(Debug, Default)]
pub struct Settling {
    /// By path: version, and since when it is this one.
    seen: HashMap<String, (String, Instant)>,
    /// Those that could not be read.
    failed: HashMap<String, Failure>,
}

#[derive(Debug)]
struct Failure {
    error: SqlError,
    times: u32,
    retry_at: Instant,
}

/// The pause before a file that could not be read is tried again, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

impl Settling {
    /// Whether all that was seen has been taken.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Notes which files could not be read this time; those that are not there any more are forgotten.
    pub fn note_failures(&mut self, found: &[String], failures: Vec<(String, ConnectorError)>) {
        let there: HashSet<&String> = found.iter().collect();
        self.failed.retain(|path, _| there.contains(path));
        for (path, error) in failures {
            let times = self.failed.get(&path).map_or(0, |f| f.times) + 1;
            let pause = RETRY.0.saturating_mul(1 << times.min(16)).min(RETRY.1);
            let failure = Failure { error: error.into(), times, retry_at: Instant::now() + pause };
            self.failed.insert(path, failure);
        }
    }

    /// Whether a file may be tried now.
    pub fn is_due(&self, path: &str) -> bool {
        self.failed.get(path).is_none_or(|f| f.retry_at <= Instant::now())
    }

    /// Forgets that the files could not be read.
    pub fn taken(&mut self, files: &[SourceFile]) {
        files.iter().for_each(|f| drop(self.failed.remove(&f.path)));
    }

    /// Why a file cannot be read, if one cannot, and how many others there are.
    pub fn trouble(&self) -> Option<SqlError> {
        let (_, first) = self.failed.iter().min_by(|a, b| a.0.cmp(b.0))?;
        let mut error = first.error.clone();
        if self.failed.len() > 1 {
            let others = format!("{} other files cannot be read either.", self.failed.len() - 1);
            error = error.with_detail(others);
        }
        Some(error)
    }

    /// The new files that are complete, as far as one can tell. An object in a bucket always is.
    pub fn settled(
        &mut self,
        found: Vec<ObjectMeta>,
        known: &[SourceFile],
        local: bool,
    ) -> Vec<ObjectMeta> {
        let known: HashSet<&str> = known.iter().map(|f| f.path.as_str()).collect();
        let fresh = found.into_iter().filter(|m| !known.contains(m.location.as_ref()));
        if !local {
            return fresh.collect();
        }
        let mut before = std::mem::take(&mut self.seen);
        let mut settled = Vec::new();
        let now = std::time::SystemTime::now();
        for meta in fresh {
            let version = version_of(&meta);
            let since = match before.remove(meta.location.as_ref()) {
                Some((same, since)) if same == version => since,
                _ => Instant::now(),
            };
            let modified = std::time::SystemTime::from(meta.last_modified);
            let untouched = now.duration_since(modified).is_ok_and(|age| age >= SETTLED);
            if untouched || since.elapsed() >= SETTLED {
                settled.push(meta);
            } else {
                self.seen.insert(meta.location.to_string(), (version, since));
            }
        }
        settled
    }
}

/// The new files with their lengths, each given to the shortest split; and those that cannot be read, with why.
pub async fn measure(
    location: &Location,
    compression: Compression,
    fresh: Vec<ObjectMeta>,
    ends: &mut [u64],
) -> (Vec<SourceFile>, Vec<(String, ConnectorError)>) {
    let begun = Instant::now();
    let mut files = Vec::with_capacity(fresh.len());
    let mut unreadable = Vec::new();
    let mut found_bytes = 0;
    for meta in fresh {
        if found_bytes > FOUND_BYTES {
            break;
        }
        let path = meta.location.to_string();
        let (size, version) = (meta.size, version_of(&meta));
        found_bytes += path.len() + version.len() + FILE_BYTES;
        let modified_ms = meta.last_modified.timestamp_millis();
        let mut file =
            SourceFile { split: 0, path, size, version, length: size, start: 0, modified_ms };
        let gzip = compression.is_gzip(&file.path);
        if gzip && begun.elapsed() > MEASURING && !files.is_empty() {
            break;
        }
        let length = match gzip {
            true => decompressed_length(location, &file).await,
            false => readable(location, &file).await.map(|()| size),
        };
        match length {
            Ok(length) => file.length = length,
            Err(error) => {
                unreadable.push((file.path, error));
                continue;
            }
        }
        let Some((split, end)) = ends.iter_mut().enumerate().min_by_key(|(_, end)| **end) else {
            break;
        };
        file.split = split as u32;
        *end += file.length;
        files.push(file);
    }
    (files, unreadable)
}

/// Whether a local file may be read; of an object in a bucket its listing says enough.
async fn readable(location: &Location, file: &SourceFile) -> Result<(), ConnectorError> {
    if !location.is_local() {
        return Ok(());
    }
    location.check_file(&file.path).await?;
    let path = FilePath::new("/").join(&file.path);
    match tokio::fs::File::open(&path).await {
        Ok(_) => Ok(()),
        Err(e) => Err(ConnectorError::io(location.shown(&file.path), plain_reason(&e))),
    }
}

async fn decompressed_length(
    location: &Location,
    file: &SourceFile,
) -> Result<u64, ConnectorError> {
    let mut stream = ByteStream::open(location, file, true, 0).await?;
    let mut length = 0;
    while let Some(bytes) = stream.next().await? {
        length += bytes.len() as u64;
    }
    Ok(length)
}
